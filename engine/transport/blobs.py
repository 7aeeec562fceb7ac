"""The blobs between nodes: their kinds, and what the header of each must look like, checked before anything is read.

A peer is another process, perhaps a newer, a broken or a hostile one. A header of another shape raises `BadRequest`,
which closes the connection it came by; a kind that is not listed is its receiver's to judge. Called by the host's
`inbound`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from logyard.protocol.errors import BadRequest

from ..types import Buffer

UNKNOWN_GROUPS = 1
DEFINE_GROUPS = 2
DEFINED = 3
DELETE_GROUPS = 4
REMOVED_GROUPS = 5
"""{"groups": [[uid, index, term], ...]}: at this committed index, whose entry has this term, the receiver was no
member; "lineages": of each, where terms begin in what the sender has applied."""
REFUSED_GROUPS = 6
"""{"uids": [...]}: the sender will store no replica of them before somebody led them."""
TAKE_BACK = 7
"""{"uids": [...]}: a creator got no answers, and gives the groups up."""
SNAPSHOT_OFFER = 10
SNAPSHOT_PULL = 11
SNAPSHOT_PIECE = 12
SNAPSHOT_PROGRESS = 13
SNAPSHOT_DONE = 14
READ_ASK = 20
"""{"uid"}: what is the group's read index?"""
READ_INDEX = 21
"""{"uid", "index", "error"}: the answer."""
MEND_ASK = 22
"""{"uid", "first"}: may the sender, which lost records, stop counting now?"""
MEND_TURN = 23
"""{"ok"}: the answer."""
MEND_STOPPED = 24
"""{"uids": [...]}: the sender's members of these groups have stopped as damaged, and are not made anew yet."""
MACHINE_VERSIONS = 30
"""{"machines": {kind: newest version}}."""
SLEEP = 40
SLEEPING = 41
AWAKE = 42
DIGEST = 43
SLEEPERS = 44
CATALOG_ASK = 50
"""{"command"}: let the sender's command be applied to the catalogue, if the receiver leads it."""
CATALOG_ANSWER = 51
"""{"reply", "error", "leader"}: the machine's reply, or why there is none, and who may lead."""
CATALOG_VIEW = 52
"""{"live", "founded"}: the nodes that the sender hears, and a number of its catalogue's founding, or 0; to who leads it
also "led": groups that the sender leads, awake or not, eight bytes each."""

GROUPS = (
    UNKNOWN_GROUPS, DEFINE_GROUPS, DEFINED, DELETE_GROUPS, REMOVED_GROUPS, REFUSED_GROUPS, TAKE_BACK,
)  # fmt: skip
"""The group registry's."""
QUIESCE = (SLEEP, SLEEPING, AWAKE)
DIGESTS = (DIGEST, SLEEPERS)
"""Of groups that nobody uses."""


Handler = Callable[[int, int, int, Mapping[str, Any], bytes | memoryview], None]
"""Take a blob: by which node, its kind, the request it asks or answers, its header and its body."""


def without_body(take: Callable[[int, int, int, Mapping[str, Any]], None]) -> Handler:
    """Return the handler of blobs that have none."""
    return lambda node, kind, request, header, body: take(node, kind, request, header)


class SendBlob(Protocol):
    """Send a node one blob; False when it was dropped."""

    def __call__(
        self, node: int, kind: int, request: int, header: Mapping[str, Any], body: Sequence[Buffer] = ()
    ) -> bool:
        """Return whether it was taken."""
        ...


Check = Callable[[Any], bool]
U64_MAX = (1 << 64) - 1


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= U64_MAX


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _bytes(value: Any) -> bool:
    return isinstance(value, bytes)


def _bytes_or_number(value: Any) -> bool:
    return _bytes(value) or _number(value)


def _uids(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) % 8 == 0


def _text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _bytes_or_none(value: Any) -> bool:
    return value is None or isinstance(value, bytes)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _row(*checks: Check) -> Check:
    return lambda value: (
        isinstance(value, list) and len(value) == len(checks) and all(map(lambda check, x: check(x), checks, value))
    )


def _text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _versions(value: Any) -> bool:
    return _text_map(value) and all(map(_number, value.values()))


_UIDS = {"uids": _list_of(_number)}
_SPEC = _row(_number, _text, _text, _text_map, _list_of(_number), _number)
_PIECE = _row(_number, _number, _bytes_or_number, _list_of(_number))

SHAPES: Mapping[int, Mapping[str, Check]] = {
    UNKNOWN_GROUPS: _UIDS,
    DEFINE_GROUPS: {
        "specs": _list_of(_SPEC),
        "admitted?": _list_of(_row(_number, _number)),
        "last?": _flag,
        "ask?": _flag,
        "asleep?": _flag,
        "of?": _number,
    },
    DEFINED: {"error": _text_or_none, "again?": _flag},
    DELETE_GROUPS: _UIDS,
    REMOVED_GROUPS: {
        "groups": _list_of(_row(_number, _number, _number)),
        "lineages?": _list_of(_list_of(_row(_number, _number))),
    },
    REFUSED_GROUPS: _UIDS,
    TAKE_BACK: _UIDS,
    SNAPSHOT_OFFER: {"uid": _number, "index": _number},
    SNAPSHOT_PULL: {
        "uid": _number,
        "index": _number,
        "ranges": _list_of(_row(_number, _number)),
        "chunks": _list_of(_bytes),
        "limit": _number,
        "beside?": _flag,
    },
    SNAPSHOT_PIECE: {
        "uid": _number,
        "entries": _list_of(_PIECE),
        "through": _number,
        "release": _number,
        "live": _number,
        "chunks": _list_of(_row(_bytes, _number)),
        "error": _text_or_none,
    },
    SNAPSHOT_PROGRESS: {"uid": _number},
    SNAPSHOT_DONE: {"uid": _number, "ok": _flag, "error": _text_or_none},
    READ_ASK: {"uid": _number},
    READ_INDEX: {"uid": _number, "index": _number, "error": _text_or_none},
    MEND_ASK: {"uid": _number, "first": _number},
    MEND_TURN: {"ok": _flag},
    MEND_STOPPED: _UIDS,
    MACHINE_VERSIONS: {"machines": _versions},
    SLEEP: {"groups": _list_of(_row(_number, _number, _number))},
    SLEEPING: {"groups": _list_of(_number)},
    AWAKE: {"groups": _list_of(_number)},
    DIGEST: {"parts": _list_of(_row(_number, _number))},
    SLEEPERS: {"parts": _list_of(_number), "groups": _list_of(_row(_number, _number))},
    CATALOG_ASK: {"command": _bytes},
    CATALOG_ANSWER: {"reply": _bytes_or_none, "error": _text_or_none, "leader": _number},
    CATALOG_VIEW: {"live": _list_of(_number), "founded": _number, "led?": _uids},
}
"""By kind (docs/wire.md): the keys that must be there, or with "?" may be; a newer node may say more."""


def check_shape(kind: int, header: Mapping[str, Any]) -> None:
    """Raise `BadRequest` unless `header` has every key of its kind, of the right type."""
    for name, check in SHAPES.get(kind, {}).items():
        key = name.removesuffix("?")
        sound = check(header[key]) if key in header else key != name
        if not sound:
            raise BadRequest(f"a blob of kind {kind} whose {key!r} is missing or malformed")

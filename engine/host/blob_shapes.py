"""What the header of each blob between nodes must look like: checked before anything is read from it.

A peer is another process, perhaps a newer, a broken or a hostile one. A header of another shape raises `BadRequest`,
which closes the connection it came by; a kind that is not listed is its receiver's to judge. Called by `inbound`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import BadRequest

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


def _text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


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
_PIECE = _row(_number, _number, _bytes, _list_of(_number))

SHAPES: Mapping[int, Mapping[str, Check]] = {
    1: _UIDS,
    2: {"specs": _list_of(_SPEC), "admitted?": _list_of(_row(_number, _number)), "last?": _flag, "ask?": _flag},
    3: {"error": _text_or_none},
    4: _UIDS,
    5: {"groups": _list_of(_row(_number, _number, _number))},
    6: _UIDS,
    7: _UIDS,
    10: {"uid": _number, "index": _number},
    11: {
        "uid": _number,
        "index": _number,
        "ranges": _list_of(_row(_number, _number)),
        "chunks": _list_of(_bytes),
        "limit": _number,
    },
    12: {
        "uid": _number,
        "entries": _list_of(_PIECE),
        "through": _number,
        "release": _number,
        "live": _number,
        "chunks": _list_of(_row(_bytes, _number)),
        "error": _text_or_none,
    },
    13: {"uid": _number},
    14: {"uid": _number, "ok": _flag, "error": _text_or_none},
    20: {"uid": _number},
    21: {"uid": _number, "index": _number, "error": _text_or_none},
    22: {"uid": _number, "first": _number},
    23: {"ok": _flag},
    30: {"machines": _versions},
    40: {"groups": _list_of(_row(_number, _number, _number))},
    41: {"groups": _list_of(_number)},
    42: {"groups": _list_of(_number)},
    43: {"parts": _list_of(_row(_number, _number))},
    44: {"parts": _list_of(_number), "groups": _list_of(_row(_number, _number))},
}
"""By kind (docs/wire.md): the keys that must be there, or with "?" may be; a newer node may say more."""


def check_shape(kind: int, header: Mapping[str, Any]) -> None:
    """Raise `BadRequest` unless `header` has every key of its kind, of the right type."""
    for name, check in SHAPES.get(kind, {}).items():
        key = name.removesuffix("?")
        sound = check(header[key]) if key in header else key != name
        if not sound:
            raise BadRequest(f"a blob of kind {kind} whose {key!r} is missing or malformed")

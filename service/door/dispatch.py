"""The verbs of a CALL frame: `protocol.verbs` checks the arguments, then one call of the system each.

Called by `server`, one task a call; a handler returns a plain value for RESULT, or a `Data` for a DATA frame.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import CoroutineType, MappingProxyType
from typing import Any, Protocol

from logyard.engine.replica.delivery import SessionSink
from logyard.engine.types import Buffer
from logyard.protocol import wire
from logyard.protocol.errors import BadRequest, LogyardError, UnknownGroup, error_value
from logyard.protocol.pending import Sink
from logyard.protocol.verbs import LATEST, LIST_WHOLE, NAME, VERBS, Verb, text

from .kv_calls import KV_CALLS, HasKv
from .scan_calls import SCANS, ScanPort
from .scan_calls import Data as Data

NAMES_SHOWN = 4
TEXT_SHOWN = 256
KIND = text("kind")
FIRST_KIND = 1 << wire.KIND_SHIFT
"""The flags of an APPEND from here on name a kind."""


class Quiet:
    """The sink of a command that its client wants no answer to: `settled` only gives its bytes back."""

    __slots__ = ("_settled",)

    def __init__(self, settled: Callable[[int], object]) -> None:
        self._settled = settled

    def reply(self, request: int, status: int, data: Buffer) -> None:
        """Tell nobody."""
        self._settled(request)


class SystemPort(ScanPort, HasKv, Protocol):
    """What the client door needs of a node; `service.node.Node` has it."""

    cluster_id: str

    def submit(
        self, uid: int, frame: memoryview, sink: Sink, request: int, *, early: bool = False, low: bool = False
    ) -> None:
        """Queue a client frame; raise a `LogyardError` when it was not queued."""

    def require_kind(self, group: int | str, kind: str) -> None:
        """Raise `WrongKind` unless a group, by uid or by name, is of that kind, or is not here."""

    async def open_session(self, name: str, session: int, client: int, ttl_ms: int) -> object:
        """Begin a client's session in a group."""

    async def close_session(self, name: str, session: int) -> object:
        """End it."""

    def heartbeat(self, client: int) -> object:
        """Prolong the sessions of a client that is alive."""

    async def listen(self, name: str, session: int, sink: SessionSink) -> object:
        """Let `sink` have what is sent to a session, until this raises."""

    async def session_reply(self, name: str, session: int, sequence: int, wait_s: float) -> bytes:
        """Return what came of a session's frame, as this member applied it."""

    async def wait_applied(self, name: str, index: int, term: int, wait_s: float) -> int:
        """Wait until this member has applied an index."""

    async def query(
        self, name: str, request: bytes, consistency: str, index: int, *, staleness_s: float = 0.0
    ) -> bytes:
        """Ask a group's machine something."""

    def receiving(self) -> None:
        """Begin to handle bytes of a connection."""

    def received(self) -> None:
        """Drain what those bytes brought."""

    def at_turn_end(self, call: Callable[[], None]) -> bool:
        """Run `call` when the turn under way ends; return False when there is none."""

    async def create_groups(self, specs: Sequence[Mapping[str, Any]]) -> object:
        """Create groups on all their members."""

    async def create_batch(
        self, names: Sequence[str], members: Sequence[int], machine: str, arguments: Mapping[str, Any]
    ) -> int:
        """Create groups of one definition, asleep; return how many are new."""

    async def delete_group(self, name: str, force: bool = False, topic: int = 0, uid: int = 0) -> object:
        """Delete a group on all its members."""

    def group_page(self, after: str, limit: int) -> list[dict[str, Any]]:
        """Return a row for each of at most `limit` groups behind the name `after`."""

    def describe(self, name: str) -> dict[str, Any]:
        """Return everything about a group."""

    def locate(self, names: Sequence[str]) -> Sequence[Sequence[Any]]:
        """Return (name, uid, leader or 0, members, compress, kind) of each group; raise `UnknownGroup`."""

    def sleeping(self, names: Sequence[str]) -> Sequence[str]:
        """Return which of some groups sleep here; wakes none."""

    async def led_soon(self, names: Sequence[str]) -> None:
        """Wait a moment for groups that were woken just now to have a leader."""

    async def poll(
        self, name: str, offset: int, max_records: int, max_bytes: int, wait_s: float, bodies: bool, consistency: str,
        *, staleness_s: float = 0.0, since: int | None = None, uid: int = 0,
    ) -> tuple[dict[str, Any], list[Buffer]]:  # fmt: skip
        """Return the log's bounds and node, and record blocks."""

    async def read_body(
        self, name: str, offset: int, start: int, stop: int | None, stored: bool = False, *, uid: int = 0
    ) -> tuple[int, Any]:
        """Return the log's uid, and a range of one record's body or of what is stored of it."""

    async def bounds(
        self, name: str, consistency: str, *, staleness_s: float = 0.0, uid: int = 0
    ) -> dict[str, Any]:  # fmt: skip
        """Return ``{start, end, node}`` of a log."""

    async def truncate(self, name: str, before: int) -> int:
        """Drop the records before an offset; return the log's start afterwards."""

    async def retain(self, name: str, ms: int, size: int, records: int) -> int:
        """Limit what a log keeps; return its start afterwards."""

    async def open_producer(self, name: str, producer: int) -> int:
        """Return the highest sequence that a producer has written."""

    async def open_epoch(self, name: str, producer: int, incarnation: int, epoch: int) -> None:
        """Make a log take the frames of a fenced producer's epoch."""

    async def close_epoch(self, name: str, producer: int, incarnation: int, epoch: int) -> None:
        """Take no more frames of an epoch."""

    async def partition(self, name: str, command: bytes) -> bytes:
        """Make a log a topic's partition, or fence it."""

    async def epoch_state(self, name: str, producer: int) -> tuple[int, int, bool] | None:
        """Return a fenced producer's incarnation, epoch, and whether that is open."""

    async def snapshot(self, names: Sequence[str] | None) -> object:
        """Snapshot these groups."""

    async def compact(self) -> object:
        """Give dead payload space back."""

    def scrub(self, start: bool) -> object:
        """Begin a scrub, or look at one."""

    async def transfer(self, name: str, to: int) -> object:
        """Hand over leadership."""

    async def change_members(self, name: str, change: str, node: int) -> object:
        """Add or remove a member."""

    async def change_membership(self, name: str, changes: Sequence[tuple[str, int]]) -> object:
        """Make changes (kind, node) that take effect together."""

    def campaign(self, name: str) -> object:
        """Let this node's member ask to lead."""

    async def force_shrink(self, name: str) -> object:
        """Make this node's member the only one."""

    async def forget_node(self, node: int, force: bool) -> object:
        """Believe whoever comes next under a node's number."""

    async def skip(self, name: str, index: int, ordinal: int) -> object:
        """Leave out a command that a machine failed at."""

    async def catalog(self, section: str, question: str, values: Mapping[str, Any], consistency: str) -> object:
        """Answer what the catalogue says."""

    async def catalog_change(self, section: str, change: str, values: Mapping[str, Any]) -> object:
        """Change the catalogue."""

    async def join(self, token: bytes, directory: int, peer: str, client: str, zone: str, replaces: int) -> object:
        """Let a directory become a node."""

    def status(self) -> dict[str, Any]:
        """Return counters and sizes."""

    def board(self, after: str, limit: int) -> Sequence[Sequence[Any]]:
        """Return standings of at most `limit` groups behind the name `after`."""

    def key_metrics(self, names: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        """Return roles, indexes and sizes of groups."""


def submit_command(
    system: SystemPort, sink: Sink, settled: Callable[[int], object], request: int, flags: int, body: Buffer
) -> None:
    """Submit an APPEND's body, as its flags want it. Raises `ProtocolError` for what is none; a refusal goes to its
    sink."""
    if len(body) < wire.UID.size:
        raise wire.ProtocolError("an APPEND begins with a group's uid")
    uid, frame = wire.UID.unpack_from(body)[0], memoryview(body)[wire.UID.size :]
    try:
        if flags >= FIRST_KIND:
            system.require_kind(uid, wire.kind_of(flags))
            flags &= FIRST_KIND - 1
        if not flags:
            system.submit(uid, frame, sink, request)
            return
        mode = flags & wire.REPLY_MODE
        if mode not in wire.REPLY_MODES:
            raise wire.ProtocolError(f"an APPEND has no flags {flags:#x}")
        if mode == wire.REPLY_NONE:
            sink = Quiet(settled)
        low = bool(flags & wire.LOW_PRIORITY)
        system.submit(uid, frame, sink, request, early=mode == wire.REPLY_APPEND, low=low)
    except LogyardError as error:
        sink.reply(request, 1, wire.pack(error_value(error)))


def _rows(system: SystemPort, names: Sequence[str]) -> list[list[Any]]:
    # Groups that are not here are left out, so that one unknown name does not hide the others.
    rows: list[list[Any]] = []
    for name in names:
        try:
            rows += (list(row) for row in system.locate([name]))
        except UnknownGroup:
            continue
    return rows


async def _list(system: SystemPort, after: str, limit: int | None) -> object:
    if limit is not None:
        return system.group_page(after, limit)
    rows = system.group_page(after, LIST_WHOLE + 1)
    if len(rows) > LIST_WHOLE:
        raise LogyardError(f"there are more than {LIST_WHOLE} groups, which only pages hold", code="too_large")
    return rows


async def _locate(system: SystemPort, names: Sequence[str]) -> object:
    asleep = system.sleeping(names)
    rows = _rows(system, names)
    if asleep and not all(leader for _, _, leader, *_ in rows):
        # Asking has woken them: most have a leader before the client could ask again.
        await system.led_soon(asleep)
        rows = _rows(system, names)
    return rows


def _freshness(staleness_s: float, uid: int) -> dict[str, Any]:
    """Return what a read says about whose state it wants, and how old: only what was said."""
    found: dict[str, Any] = {}
    if staleness_s:
        found["staleness_s"] = staleness_s
    if uid:
        found["uid"] = uid
    return found


async def _poll(
    system: SystemPort, name: str, offset: int, records: int, size: int, wait_s: float, bodies: bool, consistency: str,
    staleness_s: float, since: int | None, uid: int,
) -> Data:  # fmt: skip
    more: dict[str, Any] = _freshness(staleness_s, uid)
    if since is not None:
        more["since"] = since
    elif offset == LATEST or not records:
        bounds = await system.bounds(name, consistency, **more)
        offset = bounds["end"]
        if not records or not wait_s:
            return Data(bounds, ())
    return Data(*await system.poll(name, offset, records, size, wait_s, bodies, consistency, **more))


async def _read_body(
    system: SystemPort, name: str, offset: int, start: int, stop: int | None, stored: bool, uid: int
) -> Data:  # fmt: skip
    more: dict[str, Any] = {"stored": True} if stored else {}
    found, body = await system.read_body(name, offset, start, stop, **more, **_freshness(0.0, uid))
    header: dict[str, Any] = {"node": system.node_id, "uid": found}
    if isinstance(body, tuple):
        envelope, size = body
        return Data({**header, "envelope": envelope, "stored": size}, ())
    return Data(header, (body,))


async def _latest(system: SystemPort, name: str, consistency: str, staleness_s: float, uid: int) -> object:
    return await system.bounds(name, consistency, **_freshness(staleness_s, uid))


async def _query(
    system: SystemPort, name: str, request: bytes, consistency: str, index: int, staleness_s: float
) -> object:  # fmt: skip
    return await system.query(name, request, consistency, index, **_freshness(staleness_s, 0))


async def _members(
    system: SystemPort, name: str, changes: Sequence[tuple[str, int]] | None, change: str | None, node: int | None
) -> object:
    if changes is not None:
        return await system.change_membership(name, changes)
    if change is None or node is None:
        raise BadRequest("members takes changes, or a change and a node")
    return await system.change_members(name, change, node)


PLAIN: Mapping[str, str] = MappingProxyType(
    {
        "create": "create_groups", "create_batch": "create_batch", "delete": "delete_group",
        "describe": "describe",
        "truncate": "truncate", "retain": "retain", "producer": "open_producer",
        "epoch": "open_epoch", "epoch_done": "close_epoch", "epoch_state": "epoch_state",
        "partition": "partition",
        "session_open": "open_session",
        "session_close": "close_session", "heartbeat": "heartbeat", "session_reply": "session_reply",
        "wait_applied": "wait_applied", "snapshot": "snapshot", "compact": "compact", "scrub": "scrub",
        "transfer": "transfer", "status": "status", "board": "board", "key_metrics": "key_metrics",
        "campaign": "campaign", "force_shrink": "force_shrink", "skip": "skip", "forget_node": "forget_node",
        "logs": "log_rows", "changed_logs": "changed_logs",
        "catalog": "catalog", "catalog_change": "catalog_change", "join": "join",
    }
)  # fmt: skip
"""Verbs that are one call of the system with the values as they are; a test compares both sides."""


HANDLERS: Mapping[str, str | Callable[..., Awaitable[object]]] = MappingProxyType(
    {
        **PLAIN,
        "list": _list, "locate": _locate, "poll": _poll, "read_body": _read_body, "latest": _latest, "query": _query,
        "members": _members, **SCANS, **KV_CALLS,
    }
)  # fmt: skip
SHOWN = (
    "section", "peer_address", "client_address", "name", "change", "node", "to", "lost", "force", "before",
    "ms", "bytes", "records", "index", "ordinal",
)  # fmt: skip


def shown(arguments: Mapping[str, Any]) -> str:
    """Return the plain arguments of an administrative verb, for a line of the log."""
    several = arguments.get("specs") or arguments.get("names")
    found = {key: arguments[key] for key in SHOWN if isinstance(arguments.get(key), str | int)}
    if isinstance(several, list):
        names = [one.get("name") if isinstance(one, dict) else one for one in several[:NAMES_SHOWN]]
        found["names"] = f"{names}" + (f" and {len(several) - len(names)} more" if len(several) > len(names) else "")
    return " ".join(f"{key}={str(value)[:TEXT_SHOWN]!r}" for key, value in found.items())


async def serve_call(system: SystemPort, method: str, arguments: Mapping[str, Any]) -> object:
    """Run one verb. Raises `LogyardError`, `BadRequest` for a method that is not known."""
    handler = HANDLERS.get(method)
    if handler is None:
        raise BadRequest(f"no method {method[:64]!r}; there are {', '.join(sorted((*HANDLERS, 'cluster')))}")
    values = taken(system, VERBS[method], arguments)
    found = handler(system, *values) if callable(handler) else getattr(system, handler)(*values)
    # While the call waits it keeps what its handler took, and not what else there was.
    del arguments, values
    return await found if isinstance(found, CoroutineType) else found


def taken(system: SystemPort, verb: Verb, arguments: Mapping[str, Any]) -> list[Any]:
    """Return the checked arguments of a call. Raises `WrongKind` for a group that is not of the kind that they name."""
    if "kind" in arguments:
        system.require_kind(NAME.check(arguments.get("name")), KIND.check(arguments["kind"]))
    return verb.take(arguments)

"""The verbs of a CALL frame: arguments are taken by `Asked`, which checks them, then one call of the system each.

Called by `rpc`, one task a call; a handler returns a plain value for RESULT, or a `Data` for a DATA frame.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from logyard.engine.host.delivery import SessionSink
from logyard.engine.types import Buffer
from logyard.protocol import wire
from logyard.protocol.errors import BadRequest, LogyardError, UnknownGroup, error_value

from .kv_calls import KV_CALLS, HasKv
from .rpc_arguments import Asked
from .rpc_scans import SCANS, ScanPort
from .rpc_scans import Data as Data

BOARD_ROWS = 2000
"""Rows of one board answer: about 200 bytes each."""
NAMES_SHOWN = 4
TEXT_SHOWN = 256
LATEST = -1
"""As a poll's offset: behind the last record."""
FIRST_KIND = 1 << wire.KIND_SHIFT
"""The flags of an APPEND from here on name a kind."""


class ReplySink(Protocol):
    """Where the answer to a submitted frame goes."""

    def reply(self, request: int, status: int, data: bytes) -> None:
        """Status 0: the machine's reply; 1: a packed error. Called once, in a turn of the loop."""


class Quiet:
    """The sink of a command that its client wants no answer to: `settled` only gives its bytes back."""

    __slots__ = ("_settled",)

    def __init__(self, settled: Callable[[int], object]) -> None:
        self._settled = settled

    def reply(self, request: int, status: int, data: Buffer) -> None:
        """Nobody is told."""
        self._settled(request)


class SystemPort(ScanPort, HasKv, Protocol):
    """What the client door needs of a node; `service.node.Node` has it."""

    cluster_id: str

    def submit(
        self, uid: int, frame: memoryview, sink: ReplySink, request: int, *, early: bool = False, low: bool = False
    ) -> None:
        """Queue a client frame; raises a `LogyardError` when it was not queued."""

    def require_kind(self, group: int | str, kind: str) -> None:
        """Raise `WrongKind` unless a group, by uid or by name, is of that kind, or is not here."""

    async def open_session(self, name: str, session: int, client: int, ttl_ms: int) -> object:
        """Begin a client's session in a group."""

    async def close_session(self, name: str, session: int) -> object:
        """End it."""

    def heartbeat(self, client: int) -> object:
        """A client is alive."""

    async def listen(self, name: str, session: int, sink: SessionSink) -> object:
        """Let `sink` have what is sent to a session, until this raises."""

    async def session_reply(self, name: str, session: int, sequence: int, wait_s: float) -> bytes:
        """What came of a session's frame, as this member applied it."""

    async def wait_applied(self, name: str, index: int, term: int, wait_s: float) -> int:
        """Until this member has applied an index."""

    async def query(
        self, name: str, request: bytes, consistency: str, index: int, *, staleness_s: float = 0.0
    ) -> bytes:
        """Ask a group's machine something."""

    def receiving(self) -> None:
        """Bytes of a connection are about to be handled."""

    def received(self) -> None:
        """They were: drain what they brought."""

    def at_turn_end(self, call: Callable[[], None]) -> bool:
        """Run `call` when the turn under way ends; False when there is none."""

    async def create_groups(self, specs: Sequence[Mapping[str, Any]]) -> object:
        """Create groups on all their members."""

    async def delete_group(self, name: str, force: bool = False) -> object:
        """Delete a group on all its members."""

    def groups(self) -> list[dict[str, Any]]:
        """A row a group."""

    def describe(self, name: str) -> dict[str, Any]:
        """Everything about a group."""

    def locate(self, names: Sequence[str]) -> Sequence[Sequence[Any]]:
        """(name, uid, leader or 0, members, compress, kind) of each group; raises `UnknownGroup`."""

    async def poll(
        self, name: str, offset: int, max_records: int, max_bytes: int, wait_s: float, bodies: bool, consistency: str,
        *, staleness_s: float = 0.0, since: int | None = None, uid: int = 0,
    ) -> tuple[dict[str, Any], list[Buffer]]:  # fmt: skip
        """The log's bounds and node, and record blocks."""

    async def read_body(self, name: str, offset: int, start: int, stop: int | None, stored: bool = False) -> Any:
        """A range of one record's body, or of what is stored of it."""

    async def bounds(
        self, name: str, consistency: str, *, staleness_s: float = 0.0, uid: int = 0
    ) -> dict[str, Any]:  # fmt: skip
        """``{start, end, node}`` of a log."""

    async def truncate(self, name: str, before: int) -> int:
        """Drop the records before an offset; the log's start afterwards."""

    async def retain(self, name: str, ms: int, size: int, records: int) -> int:
        """Limits on what a log keeps; its start afterwards."""

    async def open_producer(self, name: str, producer: int) -> int:
        """The highest sequence that a producer has written."""

    async def snapshot(self, names: Sequence[str] | None) -> object:
        """Snapshot groups."""

    async def compact(self) -> object:
        """Give dead payload space back."""

    def scrub(self, start: bool) -> object:
        """Begin a scrub, or look at one."""

    async def transfer(self, name: str, to: int) -> object:
        """Hand over leadership."""

    async def change_members(self, name: str, change: str, node: int) -> object:
        """Add or remove a member."""

    async def change_membership(self, name: str, changes: Sequence[tuple[str, int]]) -> object:
        """Changes (kind, node) that take effect together."""

    def campaign(self, name: str) -> object:
        """Let this node's member ask to lead."""

    async def force_shrink(self, name: str) -> object:
        """Make this node's member the only one."""

    async def forget_node(self, node: int, force: bool) -> object:
        """Believe whoever comes next under a node's number."""

    async def skip(self, name: str, index: int, ordinal: int) -> object:
        """Leave out a command that a machine failed at."""

    def status(self) -> dict[str, Any]:
        """Counters and sizes."""

    def board(self, after: str, limit: int) -> Sequence[Sequence[Any]]:
        """Standings of at most `limit` groups behind the name `after`."""

    def key_metrics(self, names: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        """Roles, indexes and sizes of groups."""


def submit_command(
    system: SystemPort, sink: ReplySink, settled: Callable[[int], object], request: int, flags: int, body: Buffer
) -> None:
    """An APPEND's body, as its flags want it. Raises `ProtocolError` for what is none; a refusal goes to its sink."""
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


async def _create(system: SystemPort, asked: Asked) -> object:
    return await system.create_groups(asked.specs("specs"))


async def _delete(system: SystemPort, asked: Asked) -> object:
    return await system.delete_group(asked.text("name"), asked.flag("force", False))


async def _list(system: SystemPort, asked: Asked) -> object:
    return system.groups()


async def _describe(system: SystemPort, asked: Asked) -> object:
    return system.describe(asked.text("name"))


async def _locate(system: SystemPort, asked: Asked) -> object:
    # Groups that are not here are left out, so that one unknown name does not hide the others.
    rows: list[list[Any]] = []
    for name in asked.names("names"):
        try:
            rows += (list(row) for row in system.locate([name]))
        except UnknownGroup:
            continue
    return rows


def _freshness(asked: Asked) -> dict[str, Any]:
    """What a read says about whose state it wants, and how old: only what was said."""
    found: dict[str, Any] = {}
    staleness, uid = asked.seconds("staleness_s"), asked.uid("uid")
    if staleness:
        found["staleness_s"] = staleness
    if uid:
        found["uid"] = uid
    return found


async def _poll(system: SystemPort, asked: Asked) -> Data:
    name, consistency = asked.text("name"), asked.text("consistency", "leader")
    offset, bodies = asked.number("offset", least=LATEST), asked.flag("bodies", True)
    records, size, wait = asked.number("max_records"), asked.number("max_bytes"), asked.seconds("wait_s")
    more: dict[str, Any] = _freshness(asked)
    since = asked.optional_number("since")
    if since is not None:
        more["since"] = since
    elif offset == LATEST or not records:
        bounds = await system.bounds(name, consistency, **more)
        offset = bounds["end"]
        if not records or not wait:
            return Data(bounds, ())
    header, blocks = await system.poll(name, offset, records, size, wait, bodies, consistency, **more)
    return Data(header, blocks)


async def _read_body(system: SystemPort, asked: Asked) -> Data:
    start, stop = asked.number("start", 0), asked.optional_number("stop")
    more = {"stored": True} if asked.flag("stored", False) else {}
    body = await system.read_body(asked.text("name"), asked.number("offset"), start, stop, **more)
    if isinstance(body, tuple):
        envelope, stored = body
        return Data({"node": system.node_id, "envelope": envelope, "stored": stored}, ())
    return Data({"node": system.node_id}, (body,))


async def _latest(system: SystemPort, asked: Asked) -> object:
    return await system.bounds(asked.text("name"), asked.text("consistency", "linearizable"), **_freshness(asked))


async def _truncate(system: SystemPort, asked: Asked) -> object:
    return await system.truncate(asked.text("name"), asked.number("before"))


async def _retain(system: SystemPort, asked: Asked) -> object:
    return await system.retain(
        asked.text("name"), asked.number("ms", 0), asked.number("bytes", 0), asked.number("records", 0)
    )


async def _producer(system: SystemPort, asked: Asked) -> object:
    return await system.open_producer(asked.text("name"), asked.number("producer", least=1))


async def _session_open(system: SystemPort, asked: Asked) -> object:
    session, client = asked.number("session", least=1), asked.number("client", least=1)
    return await system.open_session(asked.text("name"), session, client, asked.number("ttl_ms", least=1))


async def _session_close(system: SystemPort, asked: Asked) -> object:
    return await system.close_session(asked.text("name"), asked.number("session", least=1))


async def _heartbeat(system: SystemPort, asked: Asked) -> object:
    return system.heartbeat(asked.number("client", least=1))


async def _session_reply(system: SystemPort, asked: Asked) -> object:
    session, sequence = asked.number("session", least=1), asked.number("sequence", least=1)
    return await system.session_reply(asked.text("name"), session, sequence, asked.seconds("wait_s"))


async def _wait_applied(system: SystemPort, asked: Asked) -> object:
    index, term = asked.number("index"), asked.number("term", 0)
    return await system.wait_applied(asked.text("name"), index, term, asked.seconds("wait_s"))


async def _query(system: SystemPort, asked: Asked) -> object:
    consistency, index = asked.text("consistency", "leader"), asked.number("index", 0)
    staleness = asked.seconds("staleness_s")
    more = {"staleness_s": staleness} if staleness else {}
    return await system.query(asked.text("name"), asked.raw("request"), consistency, index, **more)


async def _snapshot(system: SystemPort, asked: Asked) -> object:
    return await system.snapshot(asked.optional_names("names"))


async def _compact(system: SystemPort, asked: Asked) -> object:
    return await system.compact()


async def _scrub(system: SystemPort, asked: Asked) -> object:
    return system.scrub(asked.flag("start", False))


async def _members(system: SystemPort, asked: Asked) -> object:
    name, changes = asked.text("name"), asked.changes("changes")
    if changes is not None:
        return await system.change_membership(name, changes)
    return await system.change_members(name, asked.text("change"), asked.number("node", least=1))


async def _transfer(system: SystemPort, asked: Asked) -> object:
    return await system.transfer(asked.text("name"), asked.number("to", least=1))


async def _status(system: SystemPort, asked: Asked) -> object:
    return system.status()


async def _board(system: SystemPort, asked: Asked) -> object:
    return system.board(asked.text("after", " "), min(asked.number("limit", BOARD_ROWS, least=1), BOARD_ROWS))


async def _key_metrics(system: SystemPort, asked: Asked) -> object:
    return system.key_metrics(asked.names("names"))


async def _campaign(system: SystemPort, asked: Asked) -> object:
    return system.campaign(asked.text("name"))


async def _force_shrink(system: SystemPort, asked: Asked) -> object:
    return await system.force_shrink(asked.text("name"))


async def _forget_node(system: SystemPort, asked: Asked) -> object:
    return await system.forget_node(asked.number("lost", least=1), asked.flag("force", False))


async def _skip(system: SystemPort, asked: Asked) -> object:
    return await system.skip(asked.text("name"), asked.number("index", least=1), asked.number("ordinal"))


Handler: TypeAlias = Callable[[SystemPort, Asked], Awaitable[object]]

HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        "create": _create,
        "delete": _delete,
        "list": _list,
        "describe": _describe,
        "locate": _locate,
        "poll": _poll,
        "read_body": _read_body,
        "latest": _latest,
        "truncate": _truncate,
        "retain": _retain,
        "producer": _producer,
        "session_open": _session_open,
        "session_close": _session_close,
        "heartbeat": _heartbeat,
        "session_reply": _session_reply,
        "wait_applied": _wait_applied,
        "query": _query,
        "snapshot": _snapshot,
        "compact": _compact,
        "scrub": _scrub,
        "members": _members,
        "transfer": _transfer,
        "status": _status,
        "board": _board,
        "key_metrics": _key_metrics,
        "campaign": _campaign,
        "force_shrink": _force_shrink,
        "skip": _skip,
        "forget_node": _forget_node,
        **SCANS,
        **KV_CALLS,
    }
)


ADMINISTRATIVE = frozenset(
    {
        "create", "delete", "truncate", "retain", "snapshot", "compact", "scrub", "members", "transfer", "campaign",
        "force_shrink", "skip", "forget_node",
    }
)  # fmt: skip
"""Verbs that change what a cluster is: who called each, and what came of it, stands in the node's log."""
SHOWN = ("name", "change", "node", "to", "lost", "force", "before", "ms", "bytes", "records", "index", "ordinal")


def shown(arguments: Mapping[str, Any]) -> str:
    """The plain arguments of an administrative verb, for a line of the log."""
    specs = arguments.get("specs")
    found = {key: arguments[key] for key in SHOWN if isinstance(arguments.get(key), str | int)}
    if isinstance(specs, list):
        names = [spec.get("name") for spec in specs[:NAMES_SHOWN] if isinstance(spec, dict)]
        found["names"] = f"{names}" + (f" and {len(specs) - len(names)} more" if len(specs) > len(names) else "")
    return " ".join(f"{key}={str(value)[:TEXT_SHOWN]!r}" for key, value in found.items())


async def serve_call(system: SystemPort, method: str, arguments: Mapping[str, Any]) -> object:
    """Run one verb. Raises `LogyardError`, `BadRequest` for a method that is not known."""
    handler = HANDLERS.get(method)
    if handler is None:
        raise BadRequest(f"no method {method[:64]!r}; there are {', '.join(sorted((*HANDLERS, 'cluster')))}")
    asked = asked_of(system, arguments)
    # While the call waits it keeps what its handler took, and not what else there was.
    del arguments
    return await handler(system, asked)


def asked_of(system: SystemPort, arguments: Mapping[str, Any]) -> Asked:
    """The arguments of a call. Raises `WrongKind` for a group that is not of the kind that they name."""
    asked = Asked(arguments)
    if "kind" in arguments:
        system.require_kind(asked.text("name"), asked.text("kind"))
    return asked

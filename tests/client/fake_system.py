"""An in-memory stand-in for a node's engine, behind the real client door: real sockets, real frames, no Raft.

Commands are checked and decoded by the engine's own code, kept in memory, and answered a turn later, as a system would.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import trio

from logyard.engine.config import SystemConfig
from logyard.engine.machine import Reject
from logyard.engine.replica.proposals import CommandRejected
from logyard.engine.replica.sessions import Sessions
from logyard.engine.types import Buffer
from logyard.protocol import wire
from logyard.protocol.errors import (
    BadRequest,
    Busy,
    Gone,
    GroupExists,
    NotLeader,
    OutOfRange,
    UnknownGroup,
    WrongKind,
    encode_error,
)
from logyard.protocol.frame import (
    ABSENT,
    BINDS,
    FRAME,
    FRAME_BYTES,
    FRAME_SESSION,
    FRAME_SESSION_AT,
    LARGE,
    PIECE,
    PIECED,
    check_frame,
    table_of,
)
from logyard.protocol.pending import Sink
from logyard.protocol.records import encode_block
from logyard.service.door.server import RpcServer
from logyard.service.tls import Door


class FakeLog:
    """Records of one append log."""

    def __init__(self, uid: int, members: list[int], leader: int) -> None:
        self.uid = uid
        self.members = members
        self.leader = leader
        self.start = 0
        self.sessions = Sessions()
        self.records: list[tuple[bytes, bytes | None]] = []

    @property
    def end(self) -> int:
        return len(self.records)


class FakeCluster:
    """What all fake nodes share: the logs themselves."""

    def __init__(self) -> None:
        self.logs: dict[str, FakeLog] = {}
        self.by_uid: dict[int, FakeLog] = {}
        self.nodes: dict[int, FakeSystem] = {}
        self.grown = trio.lowlevel.ParkingLot()
        self.addresses: dict[int, str] = {}
        self.pieces: dict[tuple[int, int], dict[int, bytes]] = {}
        self.sessions: set[int] = set()
        self.heartbeats: list[tuple[int, int]] = []
        # False: its nodes are of a version that lists all groups in one answer.
        self.pages = True

    def create(self, name: str, members: list[int], leader: int) -> FakeLog:
        log = FakeLog(1000 + len(self.logs), members, leader)
        self.logs[name] = self.by_uid[log.uid] = log
        return log


class FakeSystem:
    """One node. `busy` refuses so many submissions, `lose` cuts the connection instead of so many answers; `keep` False
    counts commands without storing them."""

    def __init__(self, cluster: FakeCluster, node: int) -> None:
        self.cluster = cluster
        self.node_id = node
        self.cluster_id = "fake"
        self.keep = True
        self.busy = 0
        self.submitted = 0
        self.silent = False
        self.forgotten = 0
        self.lose = 0
        self.under_way = 0
        self.frames: list[int] = []
        self._queue: list[tuple[FakeLog, memoryview, Sink, int, bool]] = []
        self._bell = trio.lowlevel.ParkingLot()

    async def run(self) -> None:
        """Answer what was queued, a turn later."""
        while True:
            if not self._queue:
                await self._bell.park()
            queue, self._queue = self._queue, []
            self.under_way = max(self.under_way, len(queue))
            for log, frame, sink, request, early in queue:
                reply = self._once(log, frame)
                if self.lose:
                    # It happened, and the connection ends before anybody hears of it.
                    self.lose -= 1
                    cast(Any, sink).scope.cancel()
                    continue
                if isinstance(reply, Reject):
                    sink.reply(request, 1, encode_error(CommandRejected(reply)))
                else:
                    sink.reply(request, 0, wire.PLACE.pack(log.end, 1) if early else reply)
            self.cluster.grown.unpark_all()

    def _once(self, log: FakeLog, frame: memoryview) -> bytes | Reject:
        """The engine's own rule of sessions."""
        session, sequence = FRAME_SESSION.unpack_from(frame, FRAME_SESSION_AT)
        if not session:
            return self._apply(log, frame)
        known = log.sessions.take(session, sequence)
        if known is None:
            known = self._apply(log, frame)
            log.sessions.keep(session, sequence, known)
        return known

    def _apply(self, log: FakeLog, frame: memoryview) -> bytes:
        _, flags, _, count, *_, session, _ = FRAME.unpack_from(frame)
        self.frames.append(count)
        pieces = self.cluster.pieces
        if flags & (PIECE | BINDS):
            upload, extent = PIECED.unpack_from(frame, FRAME_BYTES)
            ((head, body),) = frame_records(frame)
            if flags & PIECE:
                pieces.setdefault((session, upload), {})[extent] = body or b""
                return b""
            whole = b"".join(part for _, part in sorted(pieces.pop((session, upload)).items()))
            assert len(whole) == extent
            log.records.append((head, whole))
            return wire.REPLY.pack(log.end - 1, 1)
        first = log.end
        if self.keep:
            log.records += frame_records(frame)
        else:
            first = self.submitted
            self.submitted += count
        return wire.REPLY.pack(first, count)

    def submit(
        self, uid: int, frame: memoryview, sink: Sink, request: int, *, early: bool = False, low: bool = False
    ) -> None:
        log = self.cluster.by_uid.get(uid)
        if log is None:
            raise UnknownGroup(f"no group {uid}")
        if log.leader != self.node_id:
            raise NotLeader(log.leader)
        check_frame(frame)
        if self.busy:
            self.busy -= 1
            raise Busy("the fake", 0.002)
        if self.silent:
            self.forgotten += 1
            return
        self._queue.append((log, frame, sink, request, early))
        self._bell.unpark_all()

    async def create_groups(self, specs: Sequence[Mapping[str, Any]]) -> object:
        for spec in specs:
            if spec["name"] in self.cluster.logs:
                if self.cluster.logs[spec["name"]].members != spec["members"]:
                    raise GroupExists(f"{spec['name']} is there")
                continue
            self.cluster.create(spec["name"], spec["members"], spec["members"][0])
        return len(specs)

    async def delete_group(self, name: str, force: bool = False, topic: int = 0, uid: int = 0) -> object:
        log = self._log(name)
        del self.cluster.logs[name], self.cluster.by_uid[log.uid]
        return None

    def _log(self, name: str) -> FakeLog:
        log = self.cluster.logs.get(name)
        if log is None or self.node_id not in log.members:
            raise UnknownGroup(f"no group {name!r}", name=name)
        return log

    def _read(self, name: str, consistency: str) -> FakeLog:
        log = self._log(name)
        if consistency != "local" and log.leader != self.node_id:
            raise NotLeader(log.leader)
        return log

    def receiving(self) -> None:
        pass

    def received(self) -> None:
        pass

    def at_turn_end(self, call: Callable[[], None]) -> bool:
        return False

    def group_page(self, after: str, limit: int) -> list[dict[str, Any]]:
        mine = [name for name, log in self.cluster.logs.items() if self.node_id in log.members]
        if self.cluster.pages:
            mine = sorted(name for name in mine if name > after)[:limit]
        return [self.describe(name) for name in mine]

    def describe(self, name: str) -> dict[str, Any]:
        log = self._log(name)
        role = "leader" if log.leader == self.node_id else "follower"
        return {"name": name, "uid": log.uid, "role": role, "leader": log.leader, "term": 1, "node": self.node_id}

    def sleeping(self, names: Sequence[str]) -> list[str]:
        return []

    async def led_soon(self, names: Sequence[str]) -> None:
        raise AssertionError("nothing sleeps here")

    def locate(self, names: Sequence[str]) -> list[tuple[str, int, int, list[int]]]:
        logs = [(name, self._log(name)) for name in names]
        return [(name, log.uid, log.leader, log.members) for name, log in logs]

    async def poll(
        self, name: str, offset: int, max_records: int, max_bytes: int, wait_s: float, bodies: bool, consistency: str
    ) -> tuple[dict[str, Any], list[Buffer]]:
        log = self._read(name, consistency)
        if offset < log.start:
            raise Gone(f"{offset} was truncated", start=log.start, end=log.end)
        if offset > log.end:
            raise OutOfRange(f"{offset} is not there", start=log.start, end=log.end)
        with trio.move_on_after(wait_s):
            while offset == log.end:
                await self.cluster.grown.park()
        blocks: list[Buffer] = []
        chosen = log.records[offset : offset + max_records]
        while chosen and max_bytes > 0:
            # Several blocks a page, as a log of many entries gives.
            part, chosen = chosen[:7], chosen[7:]
            blocks += fake_block(offset, part, bodies)
            offset += len(part)
            max_bytes -= sum(len(head) + len(body or b"") for head, body in part)
        return {"start": log.start, "end": log.end, "node": self.node_id}, blocks

    async def read_body(self, name: str, offset: int, start: int, stop: int | None) -> tuple[int, Buffer]:
        body = self._log(name).records[offset][1] or b""
        if not 0 <= start <= (len(body) if stop is None else stop) <= len(body):
            raise OutOfRange("no such bytes")
        return 0, memoryview(body)[start:stop]

    async def bounds(self, name: str, consistency: str) -> dict[str, Any]:
        log = self._read(name, consistency)
        return {"start": log.start, "end": log.end, "node": self.node_id}

    async def truncate(self, name: str, before: int) -> int:
        log = self._read(name, "leader")
        if before > log.end:
            raise OutOfRange(f"{before} is not there")
        log.start = max(log.start, before)
        return log.start

    def require_kind(self, group: int | str, kind: str) -> None:
        if kind != "log":
            raise WrongKind(str(group), "log", kind)

    async def open_session(self, name: str, session: int, client: int, ttl_ms: int) -> object:
        self._read(name, "leader").sessions.register(session, client, ttl_ms)
        self.cluster.sessions.add(session)
        return None

    async def close_session(self, name: str, session: int) -> object:
        self._read(name, "leader").sessions.expire(session)
        self.cluster.sessions.discard(session)
        for key in [key for key in self.cluster.pieces if key[0] == session]:
            del self.cluster.pieces[key]
        return None

    def heartbeat(self, client: int) -> object:
        self.cluster.heartbeats.append((self.node_id, client))
        return None

    async def listen(self, name: str, session: int, sink: object) -> object:
        await trio.sleep_forever()
        return None

    async def session_reply(self, name: str, session: int, sequence: int, wait_s: float) -> bytes:
        reply = self._log(name).sessions.known(session, sequence)
        if not isinstance(reply, bytes):
            raise Busy("the fake", 0.002)
        return reply

    async def wait_applied(self, name: str, index: int, term: int = 0, wait_s: float = 0.0) -> int:
        if index > self._log(name).end:
            raise Busy("the fake", 0.002)
        return self._log(name).end

    async def query(self, name: str, request: bytes, consistency: str = "leader", index: int = 0) -> bytes:
        return request[::-1]

    async def snapshot(self, names: Sequence[str] | None) -> object:
        return {"groups": len(self.cluster.logs) if names is None else len(names)}

    async def compact(self) -> object:
        return {"moved": 0}

    async def transfer(self, name: str, to: int) -> object:
        self._read(name, "leader").leader = to
        return None

    async def change_members(self, name: str, change: str, node: int) -> object:
        members = self._read(name, "leader").members
        if change not in ("add", "remove"):
            raise BadRequest("no such change")
        if change == "add":
            members.append(node)
        else:
            members.remove(node)
        return None

    async def change_membership(self, name: str, changes: Sequence[tuple[str, int]]) -> object:
        for change, node in changes:
            await self.change_members(name, change, node)
        return None

    def campaign(self, name: str) -> object:
        self._log(name).leader = self.node_id
        return None

    async def force_shrink(self, name: str) -> object:
        self._log(name).members[:] = [self.node_id]
        return 7

    async def skip(self, name: str, index: int, ordinal: int) -> object:
        return [self._read(name, "leader").uid, index, ordinal]

    def board(self, after: str, limit: int) -> list[list[Any]]:
        names = sorted(name for name in self.cluster.logs if name > after and self.node_id in self._log(name).members)
        return [
            [name, log.uid, log.leader, 1, 5, "leader" if log.leader == self.node_id else "follower", "running",
             log.members, [], []]
            for name in names[:limit]
            if (log := self.cluster.logs[name])
        ]  # fmt: skip

    def key_metrics(self, names: Sequence[str]) -> list[dict[str, Any]]:
        return [self.describe(name) for name in names]

    def status(self) -> dict[str, Any]:
        return {"node": self.node_id, "groups": len(self.cluster.logs), "odd": {1, 2}}


def frame_records(frame: memoryview) -> list[tuple[bytes, bytes | None]]:
    """The records of a command frame."""
    _, _, _, count, command_bytes, pack_bytes, _, _, _ = FRAME.unpack_from(frame)
    at = FRAME_BYTES + command_bytes
    table = table_of(frame[at:], count)
    heads, large = at + 8 * count, at + pack_bytes
    small = heads + sum(table[::2])
    found: list[tuple[bytes, bytes | None]] = []
    for head, size in zip(table[::2], table[1::2], strict=True):
        body: bytes | None = None
        if size != ABSENT and size >= LARGE:
            body = bytes(frame[large : large + size])
            large += size
        elif size != ABSENT:
            body = bytes(frame[small : small + size])
            small += size
        found.append((bytes(frame[heads : heads + head]), body))
        heads += head
    return found


def fake_block(first: int, records: Sequence[tuple[bytes, bytes | None]], bodies: bool) -> list[Buffer]:
    """A record block of these records."""
    table: list[int] = []
    for head, body in records:
        table += (len(head), ABSENT if body is None else len(body))
    shown = [body for _, body in records if body is not None] if bodies else None
    return encode_block(first, first + 100, 3, 1_700_000_000_000, table, [head for head, _ in records], shown)


@asynccontextmanager
async def fake_cluster(count: int = 3, config: SystemConfig | None = None) -> AsyncIterator[FakeCluster]:
    """`count` fake nodes on loopback sockets; all know one another's client addresses."""
    cluster = FakeCluster()
    async with trio.open_nursery() as nursery:
        for node in range(1, count + 1):
            await start_node(cluster, node, nursery, config)
        yield cluster
        nursery.cancel_scope.cancel()


async def start_node(
    cluster: FakeCluster,
    node: int,
    nursery: trio.Nursery,
    config: SystemConfig | None = None,
    port: int = 0,
    door: Door | None = None,
) -> tuple[RpcServer, trio.CancelScope]:
    """One fake node; its scope ends it."""
    system = cluster.nodes[node] = FakeSystem(cluster, node)
    # It lacks what no test asks of it.
    server = RpcServer(cast(Any, system), f"127.0.0.1:{port}", {}, config or SystemConfig(), door)
    # One map for all: every node tells clients of every other, also of those that start later.
    server.client_addresses = cluster.addresses
    cluster.addresses.pop(node, None)
    scope = trio.CancelScope()

    async def run(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with scope:
            async with trio.open_nursery() as inner:
                inner.start_soon(system.run)
                await inner.start(server.serve)
                task_status.started()

    await nursery.start(run)
    return server, scope

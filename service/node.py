"""One node: the engine, the payload store, the transport and the client door, composed. The only place that knows
every package.

`serve` is the daemon's life; `open_system` (see `embedded`) is the same engine inside a user's own process. `Node` is
what `rpc` calls: the engine's verbs, and the append log's (`log_verbs`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from logyard.engine.config import SystemConfig
from logyard.engine.disk.door import Disk
from logyard.engine.host.engine import System
from logyard.engine.machine import Machine, Reject
from logyard.engine.ports import NoPeers, PeersPort
from logyard.engine.raft.configuration import KINDS, Change
from logyard.engine.raft.core import LEADER
from logyard.engine.replica.delivery import SessionSink
from logyard.engine.replica.leadership import wait
from logyard.engine.replica.member import Member
from logyard.engine.replica.proposals import CommandRejected, Sink
from logyard.engine.replica.sessions import EXPIRE
from logyard.engine.replica.submit import Answer, check_leader
from logyard.engine.transport.config import TransportConfig
from logyard.engine.transport.peers import Peers
from logyard.machines.log.command import TRUNCATE
from logyard.machines.registry import BUILT_IN, create_machine
from logyard.protocol.errors import BadRequest, Busy, Gone, GroupStopped, NotLeader, Refused, WrongKind
from logyard.protocol.frame import FRAME_BYTES, UNIFORM

from .addresses import ADMIN
from .config import NodeConfig, read_secret
from .kv_calls import KvPort
from .kv_verbs import KvVerbs
from .log_changes import LogChanges
from .log_verbs import LogVerbs
from .own_machines import machine_factory
from .payload_port import StoreAdapter
from .pushes import listen
from .rpc import ADMIN_PLACES, RpcServer
from .status import board_rows, describe_member, describe_sleeper, key_metrics, node_status, payload_disk_bytes
from .tls import Door, PeerGuard, open_doors
from .writer.process import COMMAND as WRITER_COMMAND
from .writer.process import WriterProcess

RETRY_S = 0.02
"""When a client asks again for what this member has not applied yet: it has waited here already."""


def kind_of(member: Member) -> str:
    """Return what a group's clients speak to: the name of its machine, or of the built-in one that it is a kind of."""
    return next((name for name, kind in BUILT_IN.items() if isinstance(member.machine, kind)), member.spec.machine)


class Node(LogVerbs):
    """The engine and the append log's verbs, by group name. One for each process that serves or embeds."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.node_id = system.node_id
        self.cluster_id = system.cluster_id
        self.config = system.config
        self.log_changes = LogChanges(system.names, system.members, system.quiesced)
        self.metrics_port = 0
        self.doors: list[Door] = []
        self.kv: KvPort = KvVerbs(system, self.consistent)

    def reload_tls(self) -> None:
        """Read the certificates again, for new connections. Raises `BadRequest`: then the old ones stay in use."""
        for door in self.doors:
            door.reload()

    def submit(
        self, uid: int, frame: memoryview, sink: Sink, request: int, *, early: bool = False, low: bool = False
    ) -> None:
        """Queue a client frame. Raises typed errors; see `engine.replica.submit`."""
        if len(frame) > FRAME_BYTES and frame[FRAME_BYTES] == TRUNCATE and frame[1] & UNIFORM:
            # Its position must be the offset's; a wrong one would serve wrong records for good.
            raise BadRequest("a truncation is a call of its own: the server finds its position")
        self.system.commands.submit(uid, frame, sink, request, early=early, low=low)

    def receiving(self) -> None:
        """Begin to handle bytes of a connection: their commands share a turn."""
        self.system.ready_loop.hold()

    def received(self) -> None:
        """Drain now, or soon, what the bytes of a connection brought."""
        self.system.ready_loop.release()

    def at_turn_end(self, call: Callable[[], None]) -> bool:
        """Run `call` when the turn under way ends; return False when there is none."""
        return self.system.ready_loop.at_turn_end(call)

    async def create_groups(self, specs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Create groups; equal ones may exist. Returns name and uid of each."""
        found = await self.system.groups.create(specs)
        return [{"name": spec.name, "uid": spec.uid, "members": list(spec.voters)} for spec in found]

    async def delete_group(self, name: str, force: bool = False) -> None:
        """Delete a group: a command, on its leader; members that are away learn of it when they speak. `force`: tell
        the nodes one by one instead, from any member's, for a group without a quorum. Raises `NotLeader`."""
        member = self.system.member(name)
        if force:
            await self.system.groups.delete([member.uid])
            return
        sink = Answer()
        self.system.commands.propose(member, "delete", sink=sink)
        await sink.wait()
        # As its apply does: when this returns, this node has forgotten the group.
        await self.system.groups.delete([member.uid])

    def groups(self) -> list[dict[str, Any]]:
        """Return a row a group. Wakes none."""
        return [describe_member(self.system, member, brief=True) for member in self.system.members.values()] + [
            describe_sleeper(self.system, uid, row) for uid, row in self.system.quiesced.rows()
        ]

    def describe(self, name: str) -> dict[str, Any]:
        """Return everything about one group on this node."""
        return describe_member(self.system, self.system.member(name), brief=False)

    def require_kind(self, group: int | str, kind: str) -> None:
        """Raise `WrongKind` unless a group, by uid or by name, is of that kind. Who is not here is not judged."""
        member = self.system.members.get(group)  # type: ignore[arg-type]  # None for a name
        if member is not None and member.spec.machine == kind:
            return
        uid = self.system.names.get(group, 0) if isinstance(group, str) else group
        member = self.system.members.get(uid) or self.system.unquiesce.find(uid, use=True)
        if member is not None and member.spec.machine != kind and kind_of(member) != kind:
            raise WrongKind(member.spec.name, kind_of(member), kind)

    def locate(self, names: Sequence[str]) -> list[tuple[str, int, int, list[int], bool, str]]:
        """Return (name, uid, leader or 0, members, whether its option asks for compressed payloads, kind) of each
        group."""
        found = []
        for name in names:
            member = self.system.member(name)
            compress = member.spec.arguments.get("compress") == "zstd"
            raft = member.raft
            found.append((name, member.uid, raft.leader, list(raft.configuration.voters), compress, kind_of(member)))
        return found

    # Sessions

    async def open_session(self, name: str, session: int, client: int, ttl_ms: int) -> None:
        """Begin a session of `client` in a group; an equal one may exist. On the leader; raises `NotLeader`, `Busy`."""
        await self.system.heartbeats.open(self.system.member(name), session, client, ttl_ms)

    async def close_session(self, name: str, session: int) -> None:
        """End a session; one that ended already is no error. On the leader; raises `NotLeader`."""
        member = self.system.member(name)
        await self.system.commands.commit(member, EXPIRE, session)
        self.system.delivery.stir(member.uid)

    async def listen(self, name: str, session: int, sink: SessionSink) -> None:
        """Let `sink` have what the machine sends to a session, until this raises; see `pushes.listen`."""
        await listen(self.system, name, session, sink)

    def heartbeat(self, client: int) -> None:
        """Prolong all sessions, in groups that this node leads, of a client that is alive. Raises `Busy`."""
        self.system.heartbeats.heard(client)

    async def session_reply(self, name: str, session: int, sequence: int, wait_s: float) -> bytes:
        """Return what came of a session's frame, once this member itself has applied it. Raises `Busy` after `wait_s`,
        and what the frame was refused with."""
        member = self.system.member(name)

        def known() -> bytes | Reject | None:
            return member.sessions.known(session, sequence) if member.sessions is not None else None

        await self._until(member, lambda: known() is not None, wait_s)
        reply = known()
        if reply is None:
            raise Busy("the way to the command", RETRY_S)
        if isinstance(reply, Reject):
            raise CommandRejected(reply)
        return reply

    async def wait_applied(self, name: str, index: int, term: int = 0, wait_s: float = 0.0) -> int:
        """Wait until this member has applied `index`; return what it has applied then. Raises `Busy` after `wait_s`;
        with a `term` `Refused` when that entry was overwritten by another leader's, `Gone` when nobody can tell any
        more."""
        member = self.system.member(name)
        member.check_running()
        await self._until(member, lambda: member.raft.applied >= index, wait_s)
        if member.raft.applied < index:
            raise Busy("the way to the index", RETRY_S)
        if term:
            found = member.raft.log.term(index)
            if found is None:
                raise Gone(f"group {name!r}: which term wrote entry {index} is not known any more")
            if found != term:
                raise Refused(f"group {name!r}: entry {index} of term {term} was overwritten in term {found}")
        return member.raft.applied

    async def query(
        self, name: str, request: bytes, consistency: str = "leader", index: int = 0, *, staleness_s: float = 0.0
    ) -> bytes:
        """Ask a machine something: its own `query` method answers. `index`: not before this member has applied it.

        `consistency` as in `poll`. Raises `BadRequest` for a machine without queries, what a `Reject` says, `Busy`.
        """
        member = await self.consistent(name, consistency, staleness_s)
        if index:
            await self.wait_applied(name, index, wait_s=self.config.poll_wait_s_max)
        member.check_running()
        ask = getattr(member.machine, "query", None)
        if ask is None:
            raise BadRequest(f"a {member.spec.machine} answers no queries")
        try:
            answer: bytes = ask(request)
        except Reject as reject:
            raise CommandRejected(reject) from None
        return answer

    async def _until(self, member: Member, condition: Callable[[], bool], wait_s: float) -> None:
        with trio.move_on_after(min(wait_s, self.config.poll_wait_s_max)):
            await wait(member, condition)

    async def snapshot(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Snapshot the named groups' members on this node (all of them by default); return counts and bytes."""
        members = [self.system.member(name) for name in names] if names else list(self.system.members.values())
        return await self.system.snapshots.take(members)

    async def compact(self) -> dict[str, Any]:
        """Migrate every live payload to generations, rewrite sparse ones, give dead space back."""
        system = self.system
        files = await system.storage.janitor.compact()
        return {
            "files": files,
            "live_bytes_in_wal": system.storage.accounting.live_bytes(),
            "live_bytes_in_generations": sum(one.live for one in system.store.generations()),
            "disk_bytes": payload_disk_bytes(system.wal, system.store),
        }

    def scrub(self, start: bool) -> dict[str, Any]:
        """Ask for a whole pass from here on, or just look: `wanted` is the number of `passes` by which it has ended."""
        scrub = self.system.scrub
        return {"wanted": scrub.ask() if start else 0, "epoch": self.system.incarnation.epoch, **scrub.status()}

    async def transfer(self, name: str, to: int) -> None:
        """Move leadership."""
        await self.system.leadership.transfer(name, to)

    async def change_members(self, name: str, change: str, node: int, target: int = 0) -> dict[str, Any]:
        """Make one change; see `change_membership`."""
        return await self.change_membership(name, [(change, node, target)])

    async def change_membership(
        self, name: str, changes: Sequence[Sequence[Any]], auto_leave: bool = True
    ) -> dict[str, Any]:
        """Make changes (kind, node, target or nothing) that take effect as one; on the leader. Kinds: see
        `engine.raft.configuration.Change`. Return the configuration when it is committed, and, unless `auto_leave` is
        False, a joint one is left. Raises `NotLeader`, `BadRequest`, `Refused` with the reason."""
        steps = [Change(str(kind), int(node), *map(int, rest)) for kind, node, *rest in changes]
        for kind, node, _ in steps:
            if kind not in KINDS:
                raise BadRequest(f"{kind!r} is no membership change; use one of {', '.join(KINDS)}")
            if kind != "remove" and node != self.node_id and node not in self.system.peers.nodes:
                raise BadRequest(f"node {node} is not one of this cluster's: its address is not configured here")
        member = self.system.member(name)
        check_leader(member)
        fresh = {step.node for step in steps if step.kind != "remove"} - member.raft.configuration.nodes()
        await self.system.groups.check_room(member, fresh)
        # The group may have slept, gone, or got another leader meanwhile: what is proposed is so to the member of now.
        uid, member = member.uid, self.system.member(name)
        if member.uid != uid:
            raise Refused(f"{name!r} was deleted and made anew meanwhile")
        check_leader(member)
        index = member.raft.propose_membership(steps, auto_leave=auto_leave)
        return await self._configured(member, index, auto_leave)

    async def leave_joint(self, name: str) -> dict[str, Any]:
        """End a joint configuration that was entered without `auto_leave`; on the leader."""
        member = self.system.member(name)
        check_leader(member)
        return await self._configured(member, member.raft.leave_joint(), True)

    async def _configured(self, member: Member, index: int, left: bool) -> dict[str, Any]:
        """Return the configuration when the entry at `index` is committed, and, if `left`, it is joint no more."""
        system, raft = self.system, member.raft
        term = raft.term
        system.active.add(member)
        system.ready_loop.mark(member)
        try:
            await wait(member, lambda: raft.applied >= index or raft.log.term(index) != term)
            if raft.log.term(index) not in (term, None) or raft.applied < index:
                # Another leader's entries took its place: it is not committed and never will be.
                raise NotLeader(raft.leader)
            if left:
                await wait(member, lambda: not raft.applied_configuration.joint or raft.role != LEADER)
        except GroupStopped:
            # A leader that removed itself may be told, and gone, before this task goes on.
            if raft.applied < index:
                raise
        found = raft.configuration
        return {
            "voters": list(found.voters), "learners": list(found.learners), "outgoing": list(found.outgoing),
            "promotable": [list(pair) for pair in found.promotable], "index": index,
        }  # fmt: skip

    def campaign(self, name: str) -> None:
        """Let this node's member ask to lead."""
        self.system.leadership.campaign(name)

    async def force_shrink(self, name: str) -> int:
        """Make this node's member the only one of a group that lost its quorum for good; see
        `Leadership.force_shrink`."""
        return await self.system.leadership.force_shrink(name)

    async def forget_node(self, node: int, force: bool = False) -> bool:
        """Believe whoever comes next as `node`, whatever its directory; see `engine.host.decommission`."""
        return await self.system.decommission.forget_node(node, force)

    async def skip(self, name: str, index: int, ordinal: int) -> None:
        """Leave out the command that halted the group's machine, on every member; return when it is. On the leader
        only; raises `NotLeader`, `Refused`, `Rejected`."""
        sink = Answer()
        self.system.quarantine.request(self.system.member(name), index, ordinal, sink)
        await sink.wait()

    def board(self, after: str, limit: int) -> list[list[Any]]:
        """Return who leads what, as this node's tables have it; never waits."""
        return board_rows(self.system, after, limit)

    def key_metrics(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return roles, indexes and sizes of groups in whatever state; never waits."""
        return key_metrics(self.system, names)

    def status(self) -> dict[str, Any]:
        """Return counters and sizes of this node; never waits."""
        return node_status(self.system)


def build_system(
    path: Path,
    node_id: int,
    cluster_id: str,
    config: SystemConfig,
    *,
    disk: Disk | None = None,
    machines: Callable[[str, dict[str, Any]], Machine] = create_machine,
    draw: Callable[[int], int] | None = None,
    writer_command: Sequence[str] = (),
) -> System:
    """Return an engine on a directory, not opened yet. `disk`, `machines` and the random source of elections are other
    than the usual ones in tests. `writer_command` starts the process that storage jobs run in; without one they run in
    threads."""
    disk = disk or Disk()
    writer = WriterProcess(path, config, disk, writer_command) if writer_command else None
    store = StoreAdapter(path / "payloads", config, disk, writer)
    own = random.Random(int.from_bytes(os.urandom(8), "little"))
    return System(path, node_id, cluster_id, config, store, machines, draw or own.randrange, disk, writer)


async def serve(config: NodeConfig, *, task_status: trio.TaskStatus[Node] = trio.TASK_STATUS_IGNORED) -> None:
    """Run the daemon: engine, transport and client door until cancelled; `started` when clients are answered.

    Raises `WalFailed` when the disk failed this node, and what `System.open` raises.
    """
    limits = config.limits
    peer_door, client_door = open_doors(config)
    command = WRITER_COMMAND if config.writer_process else ()
    machines = machine_factory(config.machines)
    system = build_system(
        Path(config.directory), config.id, config.cluster, limits, machines=machines, writer_command=command
    )
    await system.open()
    try:
        peers = build_peers(config, system, peer_door)
        node = Node(system)
        node.doors = [door for door in (peer_door, client_door) if door is not None]
        clients = {number: f"{host}:{port}" for number, (host, port) in config.client_addresses.items()}
        host, port = config.client_listen
        rpc = RpcServer(node, f"{host}:{port}", clients, limits, client_door)
        near = f"unix:{os.path.join(os.path.abspath(config.directory), ADMIN)}"
        admin = RpcServer(node, near, clients, limits, places=ADMIN_PLACES)
        system.admission.door(lambda: rpc.buffered() + admin.buffered())
        async with trio.open_nursery() as nursery:
            await nursery.start(system.run, peers)
            if isinstance(peers, Peers):
                await nursery.start(peers.run)
            await nursery.start(rpc.serve)
            admin.client_addresses = {**rpc.client_addresses, config.id: near}
            await nursery.start(admin.serve)
            if config.metrics_listen is not None:
                from .metrics import render
                from .metrics_http import MetricsServer

                door = MetricsServer(config.metrics_listen, lambda: render(system))
                await nursery.start(door.serve)
                node.metrics_port = door.port
            task_status.started(node)
    finally:
        system.part()
        system.close()


def build_peers(config: NodeConfig, system: System, door: Door | None = None) -> PeersPort | Peers:
    """Return the transport for the configured peers, or none for a node alone. `door`: TLS."""
    if not config.peers:
        return NoPeers()
    transport = TransportConfig.of(config.limits)
    addresses = {config.id: config.peer_listen, **config.peers}
    return Peers(
        config.id, config.cluster, system.incarnation.epoch, addresses, transport, system.inbound,
        healthy=system.disk_health.healthy, at_rest=system.ticker.is_resting, digest=system.digests.digest,
        guard=None if door is None else PeerGuard(door), secret=read_secret(config),
        origin=system.incarnation.origin, known=system.incarnation.acquaintances, vitals=system.vitals,
    )  # fmt: skip

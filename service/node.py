"""One node: the engine, the payload store, the transport and the client door, composed. The only place that knows
every package.

`serve` is the daemon's life; `open_system` (see `embedded`) is the same engine inside a user's own process. `Node` is
what the door calls: each verb is bound to the part that has it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import trio

from logyard.engine.config import SystemConfig
from logyard.engine.disk.door import Disk
from logyard.engine.host.engine import System
from logyard.engine.log.meta_batch import MetaBatch
from logyard.engine.log.meta_rows import PLACES
from logyard.engine.machine import Machine
from logyard.engine.ports import NoPeers
from logyard.engine.replica.build import MakeCore, make_raft
from logyard.engine.replica.member import Member
from logyard.engine.transport.blobs import CATALOG_ANSWER, CATALOG_ASK, CATALOG_VIEW, without_body
from logyard.engine.transport.config import TransportConfig
from logyard.engine.transport.handler import PeerStatus, was_removed
from logyard.engine.transport.peers import Peers
from logyard.engine.transport.reactor import reactor
from logyard.engine.types import Buffer
from logyard.machines.catalog.plan import Move
from logyard.machines.log.command import TRUNCATE
from logyard.machines.registry import create_machine
from logyard.protocol.errors import BadRequest, Refused, UnknownGroup
from logyard.protocol.frame import FRAME_BYTES, UNIFORM, encode_frame
from logyard.protocol.pending import PendingReply, Sink

from . import group_verbs, machine_verbs, status
from .addresses import ADMIN
from .catalog import calls as catalog_calls
from .catalog import keeper, sleepers
from .catalog.births import Births
from .catalog.calls import CatalogCalls
from .catalog.join import said
from .catalog.keeper import Keeper
from .catalog.mover import Mover
from .catalog.places import Address, Place, Places, reachable
from .catalog.places import decode as decode_places
from .catalog.verbs import NO_CATALOG, CatalogVerbs
from .config import NodeConfig, read_secret
from .consistency import Consistency, Waits
from .consumer_lag import consumer_lags
from .door import pushes
from .door.kv_calls import KvPort
from .door.pushes import Listening
from .door.server import ADMIN_PLACES, RpcServer
from .group_verbs import ByCatalogue, GroupVerbs
from .kv import watch as kv_watch
from .kv.reads import KvReads
from .kv.verbs import KvVerbs
from .kv.watch import Watches
from .log import audit as log_audit
from .log import scan as log_scan
from .log import verbs as log_verbs
from .log.audit import LogAudit
from .log.changes import LogChanges
from .log.reader import LogReader
from .log.scan import LogScan
from .log.verbs import LogVerbs
from .machine_verbs import MachineVerbs
from .membership import Membership
from .own_machines import machine_factory
from .payload_port import StoreAdapter
from .status import GroupStatus, NodeStatus
from .tls import Door, PeerGuard, open_doors, reload_doors
from .writer.process import COMMAND as WRITER_COMMAND
from .writer.process import WriterProcess

AnyVerb: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]


class Node:
    """The verbs of one node, by name, from the parts that have them. One for each process that serves or embeds.

    It composes: the parts are given the engine's parts that they need, bound once. `door.dispatch.SystemPort` says what
    each verb does for a client.
    """

    def __init__(self, system: System) -> None:
        self.system = system
        self.node_id = system.node_id
        self.cluster_id = system.cluster_id
        self.config = system.config
        self.name = f"node-{self.node_id}"
        self.client_port = self.metrics_port = 0
        self.doors: list[Door] = []
        self.keeper: Keeper | None = None
        self.catalog: AnyVerb = _no_catalog
        self.catalog_change: AnyVerb = _no_catalog
        self.join: AnyVerb = _no_catalog
        # The bytes of a connection: their commands share a turn.
        self._submit = system.replicas.commands.submit
        self.receiving = system.ready_loop.hold
        self.received = system.ready_loop.release
        self.at_turn_end = system.ready_loop.at_turn_end
        waits = Waits(
            system.replicas.leadership.led, system.replicas.leadership.read_index, system.host.follower_reads.within
        )
        self._reads = Consistency(self._find, waits)
        self.consistent = self._reads.member
        self._compose_groups()
        self._compose_logs()
        self._compose_machines()
        self._compose_status()

    def _compose_groups(self) -> None:
        system = self.system
        groups = group_verbs.Groups(system.names, system.members, system.member, system.quiescence.lookup.find_used)
        verbs = GroupVerbs(groups, system.host.groups, system.replicas.commands.propose)
        self.create_groups, self.delete_group = verbs.create_groups, verbs.delete_group
        self.create_batch, self.sleeping, self.led_soon = verbs.create_batch, verbs.sleeping, verbs.led_soon
        self.require_kind, self.locate = verbs.require_kind, verbs.locate
        self.membership = Membership(
            self.node_id,
            system.member,
            lambda: system.peers.nodes,
            system.host.groups.check_room,
            system.ready_loop.rouse,
        )
        self.change_members = self.membership.change_members
        self.change_membership = self.membership.change_membership
        self.leave_joint = self.membership.leave_joint
        leadership = system.replicas.leadership
        self.transfer, self.campaign = leadership.transfer, leadership.campaign
        self.force_shrink, self.forget_node = leadership.force_shrink, system.host.decommission.forget_node

    def _compose_logs(self) -> None:
        system, replicas, config = self.system, self.system.replicas, self.config
        reader = LogReader(
            self.node_id, replicas.reader, system.repair.payload_repair.stretch, system.repair.log_repair.found
        )
        verbs = LogVerbs(
            self.node_id,
            log_verbs.Limits(config.entry_records_max, config.poll_bytes_max, config.poll_wait_s_max),
            system.member, self._reads, reader,
            log_verbs.Leader(
                replicas.leadership.read_index, replicas.versions.require, partial(self.command, reserved=True)
            ),
        )  # fmt: skip
        self.poll, self.read_body, self.bounds = verbs.poll, verbs.read_body, verbs.bounds
        self.truncate, self.retain, self.open_producer = verbs.truncate, verbs.retain, verbs.open_producer
        self.open_epoch, self.epoch_state, self.close_epoch = verbs.open_epoch, verbs.epoch_state, verbs.close_epoch
        self.partition = verbs.partition
        groups = log_scan.Groups(system.names, system.members, system.quiescence.table, self._find)
        scans = LogScan(self.node_id, config.poll_bytes_max, groups, replicas.reader, reader.offset_since)
        self.log_rows, self.scan, self.seek = scans.log_rows, scans.scan, scans.seek
        self.changed_logs = LogChanges(system.names, system.members, system.quiescence.table).since
        stored = log_audit.Stored(
            system.store, system.replicas.reader.payload_entries, system.wal.read_payload, system.storage.location
        )
        self.audit = LogAudit(self.node_id, self._find, stored, system.transfers.snapshots.compare).audit

    def _compose_machines(self) -> None:
        system, wait_s_max = self.system, self.config.poll_wait_s_max
        sessions = machine_verbs.Sessions(
            system.replicas.heartbeats.open, system.replicas.commands.commit, system.replicas.delivery.stir
        )
        verbs = MachineVerbs(system.member, wait_s_max, self._reads, sessions)
        self.open_session, self.close_session = verbs.open_session, verbs.close_session
        self.session_reply, self.wait_applied, self.query = verbs.session_reply, verbs.wait_applied, verbs.query
        self.heartbeat = system.replicas.heartbeats.heard
        groups = pushes.Groups(self.node_id, system.members, system.member, system.has)
        self.listen = Listening(groups, system.replicas.delivery, system.replicas.effects.on_listening).listen
        reads = KvReads(system.replicas.reader, system.repair.payload_repair.stretch, system.replicas.log_clock.now)
        watches = Watches(kv_watch.Groups(self.node_id, system.member, system.has), reads.read)
        self.kv: KvPort = KvVerbs(self.node_id, wait_s_max, self.consistent, reads, watches)

    def _compose_status(self) -> None:
        system = self.system
        groups = status.Groups(
            self.node_id, system.names, system.members, system.quiescence.table, system.leader_cache, system.store.homes
        )
        rows = GroupStatus(groups)
        self.groups, self.group_page = rows.rows, rows.page
        self.board, self.key_metrics = rows.board, rows.key_metrics
        self._describe = rows.describe
        self._stored = status.Stored(system.wal, system.store, system.storage.accounting.live_bytes)
        said = {**self._said(), "consumers": lambda: [row._asdict() for row in consumer_lags(groups)]}
        self.status = NodeStatus(groups, self._stored, said).read

    def _said(self) -> Mapping[str, Callable[[], Any]]:
        """Return what the engine's parts say of themselves, by the status's key. `apply` is of this process: entries it
        applied since its start, the processor time of that, and of the start's replay of the write-ahead log."""
        system, storage, disk = self.system, self.system.storage, self.system.disk
        applier, counters, location = system.replicas.applier, system.counters, storage.location
        writer = system.writer
        return {
            "name": lambda: self.name,
            "epoch": lambda: system.incarnation.epoch,
            "damage": lambda: system.repair.log_repair.status() | system.repair.refill.status(),
            "active": lambda: len(system.active),
            "live_nodes": lambda: sorted(system.live),
            "fdatasyncs": lambda: disk.fdatasyncs,
            "bytes_written": lambda: disk.bytes_written,
            "busy": lambda: dict(counters.busy),
            "listening": lambda: len(system.replicas.delivery.sinks),
            "pushes_dropped": lambda: system.replicas.delivery.dropped,
            "liveness_mismatches": lambda: system.transfers.snapshots.mismatches,
            "forks": lambda: system.host.replica_gc.forked,
            "snapshots_taken": lambda: system.transfers.snapshots.taken,
            "snapshots_sent": lambda: system.transfers.snapshot_sender.sent,
            "snapshots_installed": lambda: system.transfers.snapshot_receiver.installed,
            "migrated_files": lambda: storage.compactor.files,
            "migrated_bytes": lambda: storage.compactor.bytes,
            "apply": lambda: {
                "entries": applier.entries,
                "cpu_us": applier.nanoseconds // 1000,
                "replay_cpu_us": counters.replay_nanoseconds // 1000,
            },
            "wal": lambda: {
                "files": len(system.wal.files),
                "allocated_bytes": system.wal.allocated_bytes(),
                "sealed": len(location.files),
                **system.storage.group_commit.status(),
            },
            "segments": storage.segments.status,
            "rings": storage.rings.status,
            "jobs": storage.jobs.status,
            "holders": storage.gc_blockers.status,
            "writer": writer.status if writer is not None else lambda: dict(status.NO_WRITER),
            "cache_bytes": lambda: system.cache.bytes,
            "budget": system.admission.status,
            "space": system.storage.space.status,
            "disk": system.host.slow_disk.status,
            "followers": system.host.outbound.status,
            "transfers": system.transfers.snapshot_receiver.status,
            "pieces_served": lambda: system.transfers.pull_answers.pieces,
            "pins_expired": lambda: location.expired,
            "repaired_entries": lambda: system.repair.payload_repair.fetched,
            "repairs_failed": lambda: system.repair.payload_repair.failed,
            "scrub": system.repair.scrub.status,
            "peers": lambda: [one._asdict() for one in system.peers.status()],
        }

    def keep_catalogue(
        self,
        said: Mapping[str, Any],
        configured: Collection[int],
        meet: Callable[[int, str, str], Awaitable[None]],
        part: Callable[[int], Awaitable[None]],
        look_s: float = keeper.LOOK_S,
    ) -> Keeper:
        """Take part in the catalogue: creations and deletions go by it from now on. `said`: what this node says of
        itself, `configured`: the nodes of its configuration, `meet` and `part`: a node has these addresses, or is
        gone. The keeper returned is to be run."""
        system, registry = self.system, self.system.host.groups
        own = system.incarnation

        def find() -> Member | None:
            return self.keeper.member() if self.keeper is not None else None

        def move(number: int) -> Move | None:
            return self.keeper.move(number) if self.keeper is not None else None

        network = catalog_calls.Network(
            system.live, lambda *blob: system.peers.send_blob(*blob), lambda: system.peers.nodes
        )
        calls = CatalogCalls(self.node_id, find, self.command, network, system.spawn)
        births = Births(calls, registry)
        here = keeper.Here(
            self.node_id, self.cluster_id,
            lambda: {"directory": own.origin.directory, "epoch": own.epoch, "versions": dict(keeper.VERSIONS), **said},
            system.names, system.members,
            system.has, system.live, configured, lambda having: _denied(self.node_id, system.peers.status(), having),
        )  # fmt: skip
        change = self.membership.change_membership
        asleep = sleepers.Sleepers(self.node_id, sleepers.Groups(system.quiescence.table, system.find, system.spec))
        mover = Mover(calls, system.members, system.live, move, change, self.transfer, system.spawn)
        doors = keeper.Doors(
            lambda node, view: system.peers.send_blob(node, CATALOG_VIEW, 0, view), calls, asleep, mover, registry,
            births.finish, change, meet, part,
        )  # fmt: skip
        self.keeper = found = Keeper(here, doors, look_s)
        system.host.inbound.hear((CATALOG_ASK, CATALOG_ANSWER), without_body(calls.on_blob))
        system.host.inbound.hear(
            (CATALOG_VIEW,), without_body(lambda node, kind, request, header: found.on_view(node, header))
        )
        verbs = CatalogVerbs(
            self.node_id, self.cluster_id, found, calls, system.host.follower_reads.within,
            system.replicas.log_clock.latest,
        )  # fmt: skip
        self.catalog, self.catalog_change, self.join = verbs.ask, verbs.change, verbs.join
        by_catalogue = ByCatalogue(births, system.member, self.delete_group, registry.delete, found.check)
        self.create_groups, self.delete_group = by_catalogue.create_groups, by_catalogue.delete_group
        self.create_batch = by_catalogue.create_batch
        return self.keeper

    def _find(self, name: str, uid: int) -> Member:
        """Return a group's member, woken. Raises `UnknownGroup`, also when the name is another group's than `uid`."""
        known = self.system.names.get(name, 0)
        if uid and known and known != uid:
            raise UnknownGroup(
                f"log {name!r} of uid {uid:016x} is gone: another one has its name", name=name, another=True
            )
        return self.system.member(name)

    def reload_tls(self) -> Sequence[Door]:
        """Read the certificates again, for new connections; return the doors that have them. Raises `BadRequest`: then
        the old ones stay in use."""
        reload_doors(self.doors, self.cluster_id, self.node_id)
        return self.doors

    def submit(
        self, uid: int, frame: memoryview, sink: Sink, request: int, *, early: bool = False, low: bool = False
    ) -> None:
        """Queue a client frame. Raises typed errors; see `engine.replica.submit`."""
        if len(frame) > FRAME_BYTES and frame[FRAME_BYTES] == TRUNCATE and frame[1] & UNIFORM:
            # Its position must be the offset's; a wrong one would serve wrong records for good.
            raise BadRequest("a truncation is a call of its own: the server finds its position")
        self._submit(uid, frame, sink, request, early=early, low=low)

    async def command(self, member: Member, command: bytes, *, reserved: bool = False) -> bytes:
        """Commit one command without payload and return the machine's reply. `reserved`: it frees space."""
        (frame,) = encode_frame([(b"", None)], command=command)
        return await self.commit(member, [frame], reserved=reserved)

    async def commit(self, member: Member, frame: Sequence[Buffer], *, reserved: bool = False) -> bytes:
        """Commit one frame from inside this process. Raises what the frame's reply says."""
        pending: PendingReply[bytes] = PendingReply()
        whole = memoryview(frame[0] if len(frame) == 1 else b"".join(frame))
        self._submit(member.uid, whole, pending, 0, reserved=reserved)
        return await pending.wait(trio.Event)

    def describe(self, name: str) -> dict[str, Any]:
        """Return everything about one group on this node."""
        return self._describe(self.system.member(name), brief=False)

    async def skip(self, name: str, index: int, ordinal: int) -> None:
        """Leave out the command that halted the group's machine, on every member; return when it is. On the leader
        only; raises `NotLeader`, `Refused`, `Rejected`."""
        pending: PendingReply[bytes] = PendingReply()
        self.system.replicas.quarantine.request(self.system.member(name), index, ordinal, pending)
        await pending.wait(trio.Event)

    async def snapshot(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Snapshot the named groups' members on this node (all of them by default); return counts and bytes."""
        members = [self.system.member(name) for name in names] if names else list(self.system.members.values())
        return await self.system.transfers.snapshots.take(members)

    async def compact(self) -> dict[str, Any]:
        """Migrate every live payload to generations, rewrite sparse ones, give dead space back."""
        files, stored = await self.system.storage.janitor.compact(), self._stored
        return {
            "files": files,
            "live_bytes_in_wal": stored.wal_live(),
            "live_bytes_in_generations": sum(one.live for one in stored.store.generations()),
            "disk_bytes": stored.disk_bytes(),
        }

    def scrub(self, start: bool) -> dict[str, Any]:
        """Ask for a whole pass from here on, or just look: `wanted` is the number of `passes` by which it has ended."""
        scrub = self.system.repair.scrub
        return {"wanted": scrub.ask() if start else 0, "epoch": self.system.incarnation.epoch, **scrub.status()}

    def metrics(self) -> tuple[str, bytes]:
        """Return (content type, body) of a scrape."""
        from .metrics import render

        return render(self.status(), self.system.members.values(), self.system.storage.location.files.values())


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
    make_core: MakeCore = make_raft,
) -> System:
    """Return an engine on a directory, not opened yet. `disk`, `machines`, the random source of elections and
    `make_core` are other than the usual ones in tests. `writer_command` starts the process that storage jobs run in;
    without one they run in threads."""
    disk = disk or Disk()
    writer = WriterProcess(path, config, disk, writer_command) if writer_command else None
    store = StoreAdapter(path / "payloads", config, disk, writer)
    own = random.Random(int.from_bytes(os.urandom(8), "little"))
    return System(path, node_id, cluster_id, config, store, machines, draw or own.randrange, disk, writer, make_core)


async def _no_catalog(*what: object) -> Any:
    """Refuse a verb about the catalogue."""
    raise Refused(NO_CATALOG)


def _denied(node: int, peers: Sequence[PeerStatus], having: Collection[int]) -> bool:
    """Return whether none of the other nodes `having` a catalogue has to do with a node, and some say that it was
    removed: others may be gone, too, and who is removed never comes back."""
    known = any(one.up and one.node in having for one in peers)
    return not known and any(was_removed(node, one.node) in one.error for one in peers)


def _addresses(config: NodeConfig, known: Mapping[int, Place], proof: bool) -> dict[int, Address]:
    """Return where the nodes listen, this one included; nothing for one that is alone and that nobody may join."""
    others = {**config.peers, **reachable(known)}
    return {**others, config.id: config.peer_listen} if others or (config.catalog and proof) else {}


async def _store(batches: MetaBatch, rows: Sequence[tuple[bytes, bytes]]) -> None:
    await batches.commit(lambda: rows)


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
    sockets = reactor()
    if sockets is not None:
        system.ready_loop.share(sockets.soon)
    try:
        known = decode_places(system.meta.get(PLACES)) if config.catalog else {}
        peers: NoPeers | Peers = NoPeers()
        secret, own = read_secret(config), system.incarnation
        addresses = _addresses(config, known, peer_door is not None or secret is not None)
        if addresses:
            peers = Peers(
                config.id, config.cluster, own.epoch, addresses, TransportConfig.of(limits), system.host.inbound,
                healthy=system.host.disk_health.healthy, at_rest=system.host.ticker.is_resting,
                digest=system.quiescence.digests.digest, guard=None if peer_door is None else PeerGuard(peer_door),
                secret=secret, origin=own.origin, known=own.acquaintances, vitals=system.vitals,
            )  # fmt: skip
        node = Node(system)
        node.name = config.name
        node.doors = [door for door in (peer_door, client_door) if door is not None]
        # Which port its own 0 is, the door knows, and tells.
        clients = {number: f"{host}:{port}" for number, (host, port) in config.client_addresses.items() if port}
        clients |= {number: place.client for number, place in known.items()}
        host, port = config.client_listen
        rpc = RpcServer(node, f"{host}:{port}", clients, limits, client_door, delay=system.admission.delay)
        near = f"unix:{os.path.join(os.path.abspath(config.directory), ADMIN)}"
        admin = RpcServer(node, near, clients, limits, places=ADMIN_PLACES)
        system.admission.door(lambda: rpc.buffered() + admin.buffered())
        async with trio.open_nursery() as nursery:
            await nursery.start(system.run, peers)
            if isinstance(peers, Peers):
                await nursery.start(peers.run)
            node.client_port = await nursery.start(rpc.serve)
            admin.client_addresses = {**rpc.client_addresses, config.id: near}
            await nursery.start(admin.serve)
            if config.catalog:

                def tell(number: int, client: str) -> None:
                    for door in (rpc, admin):
                        door.introduce(number, client)

                network = peers if isinstance(peers, Peers) else None
                places = Places(known, network, partial(_store, system.storage.meta_batch), tell)
                keeper_ = node.keep_catalogue(said(config), config.nodes, places.meet, places.part)
                await nursery.start(keeper_.run)
            if config.metrics_listen is not None:
                from .metrics_http import MetricsServer

                door = MetricsServer(config.metrics_listen, node.metrics)
                await nursery.start(door.serve)
                node.metrics_port = door.port
            task_status.started(node)
    finally:
        system.part()
        system.close()

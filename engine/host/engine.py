"""A system: the engine of one node. It owns every member, the one WAL, the tasks and threads.

Composition, not logic: each part is given what it needs by its constructor, built from the log up; what it tells goes
up as an event (a call that is bound late, where the part above is not there yet) or as a return value. No part knows
this object. The payload store and the transport come in through `engine.ports`, wired by `service.node`. Constructors
do no I/O: `open` does.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio

from logyard.protocol.errors import (
    Corrupt,
    LogyardError,
    UnknownGroup,
)

from ..config import SystemConfig
from ..disk.door import Disk
from ..disk.health import DiskHealth
from ..disk.rate_limiter import RateLimiter
from ..disk.slow_disk import SlowDisk
from ..identity import Vitals
from ..log.cache import PayloadCache
from ..log.checkpoints import Checkpoints, DueSnapshots
from ..log.compactor import Compactor
from ..log.gc_blockers import GcBlockers
from ..log.group_commit import GroupCommit
from ..log.group_logs import GroupLogs
from ..log.janitor import Janitor
from ..log.liveness_accounting import LivenessAccounting, Recount
from ..log.location import Location, SealedFile, Unflushed
from ..log.meta import MetaStore
from ..log.meta_batch import MetaBatch
from ..log.rehoming import Rehoming
from ..log.segment_files import SegmentFiles
from ..log.segment_writer import SegmentWriter
from ..log.space import Space
from ..log.wal import Rolled, Sealed, Wal, WalConfig
from ..machine import Machine
from ..ports import PeersPort, StorePort, WriterPort
from ..quiesce import quiesce, transitions, unquiesce
from ..quiesce.digest import Digests
from ..quiesce.payload_flush import PayloadFlush
from ..quiesce.quiesce import Quiesce
from ..quiesce.quiesced_sessions import QuiescedSessions
from ..quiesce.quiesced_table import QuiescedTable
from ..quiesce.timers import Timers
from ..quiesce.transitions import Transitions
from ..quiesce.unquiesce import LivenessScan, Unquiesce
from ..raft.core import LEADER
from ..raft.messages import Message
from ..raft.progress import Window
from ..recovery.incarnation import Incarnation
from ..recovery.open import DataDirectory, Files, Start
from ..recovery.open import Groups as Found
from ..repair import log_repair, scrub, scrub_walks
from ..repair.log_repair import LogRepair, MendTurns
from ..repair.payload_repair import PayloadRepair, Refill
from ..repair.scrub import Findings, Repairs, Scrub
from ..replica import applier, snapshot_sections
from ..replica.applier import Applier
from ..replica.build import Builder, Cores, Enliven, limits_of
from ..replica.delivery import Delivery
from ..replica.effects import Effects
from ..replica.heartbeats import Heartbeats
from ..replica.leadership import Leadership
from ..replica.log_clock import Clocks, LogClock
from ..replica.member import Member
from ..replica.proposals import Shape
from ..replica.quarantine import Quarantine
from ..replica.reader import Reader
from ..replica.retire import Retire
from ..replica.submit import Submit
from ..replica.versions import Versions
from ..snapshot.format import Snapshot
from ..transfer import snapshot_receiver
from ..transfer.chunks import Chunks
from ..transfer.pull import Pulls
from ..transfer.snapshot_receiver import SnapshotReceiver
from ..transfer.snapshot_sender import PullAnswers, SnapshotSender
from ..transfer.snapshot_store import SnapshotStore
from ..transport import blobs
from ..types import Buffer, Spec
from . import groups, inbound, outbound, ready_loop, replica_gc, ticker
from .admission import Admission
from .decommission import Decommission
from .follower_reads import FollowerReads
from .forks import Forks
from .groups import GroupRegistry
from .inbound import Inbound
from .leader_cache import Counters, LeaderCache, RoleChanges
from .names import Names
from .outbound import Outbound
from .ready_loop import ReadyLoop
from .replica_gc import ReplicaGC
from .shutdown import FailStop, note_commits
from .storage import Storage
from .ticker import Ticker
from .walks import Walks

log = logging.getLogger(__name__)


class System:
    """One node's engine.

    `writer` is the process that storage jobs run in; without one they run in threads.
    `machines` turns a machine's name and arguments into a fresh machine. `draw(n)` is the random source of elections,
    in [0, n).
    """

    def __init__(
        self,
        path: Path,
        node_id: int,
        cluster_id: str,
        config: SystemConfig,
        store: StorePort,
        machines: Callable[[str, dict[str, Any]], Machine],
        draw: Callable[[int], int],
        disk: Disk | None = None,
        writer: WriterPort | None = None,
    ) -> None:
        self.path = path
        self.node_id = node_id
        self.cluster_id = cluster_id
        self.config = config
        self.store = store
        self.writer = writer
        self.create_machine = machines
        self.draw = draw
        self.disk = disk or Disk()
        self.members: dict[int, Member] = {}
        self.live: set[int] = {node_id}
        self.active: set[Member] = set()
        self.windows: dict[int, Window] = {}
        self.cache = PayloadCache(config.payload_cache_bytes)
        self.leader_cache = LeaderCache()
        self.counters = Counters()
        self.data = DataDirectory(self.disk, path)
        self.meta = MetaStore(self.disk, str(path / "meta"))
        self.incarnation = Incarnation(node_id, cluster_id, self.disk, path, self.meta)
        self.wal = Wal(self.disk, str(path / "wal"), WalConfig.of(config))
        # The clocks that log time is made from.
        self.clocks = Clocks()
        self.peers: PeersPort
        self.nursery: trio.Nursery
        self.limits = limits_of(config)
        # Called when many objects came that live long, and when many went: the daemon looks after its memory then.
        self.grown: Callable[[], None] = _nothing
        self.shrunk: Callable[[], None] = _nothing
        self._compose_storage()
        self._compose_groups()

    def _compose_storage(self) -> None:
        """Build what keeps bytes on this node's disk, bottom up."""
        path, config = self.path, self.config
        shape = Shape(config.entry_bytes_max, config.entry_records_max, self.cache.keep, self.counters.refused)
        self.ready_loop = ReadyLoop(shape, self.cache, self.active, self.clocks)
        self.group_commit = GroupCommit(
            self.wal, self.ready_loop.persisted, self.rolled, self.fail, lambda reason: self.space.note(reason),
            config.wal_batch_bytes,
        )  # fmt: skip
        self.space = Space(
            path, self.disk, config, self.group_commit, lambda: self.admission.queued, self.counters.refused
        )
        unflushed = Unflushed(self.wal)
        location = Location(self.store, unflushed, config.pin_ms / 1000)
        meta_batch = MetaBatch(
            self.members, self.meta, self.store, self.space, self.incarnation.acquaintances, self.fail, self.spawn,
            lambda *snapshot: self.chunks.changed(*snapshot),
        )  # fmt: skip
        segments = SegmentFiles(
            path, self.disk, self.members, location.files.__contains__, lambda member: self.log_repair.is_left(member),
            lambda: self.storage.janitor.look(), None if self.writer is None else self.writer.write_segment,
        )  # fmt: skip
        accounting = LivenessAccounting(
            self.members, self.store, location, segments, lambda *range_: self.reader.payload_entries(*range_),
            lambda *lost: self.refill.lose(*lost), lambda member, seconds: self.recount.later(member, seconds),
        )  # fmt: skip
        pace = RateLimiter(config)

        def limit(debt: int) -> int:
            pace.sample(self.group_commit.batch_bytes)
            return pace.limit(debt, unflushed.backlog_files)

        compactor = Compactor(
            config, self.members, self.store, self.space, meta_batch, location, segments, limit
        )  # fmt: skip
        jobs = self.store.jobs
        segment_writer = SegmentWriter(
            self.members, unflushed, self.space, meta_batch, location, segments, accounting, jobs, self._flushed
        )  # fmt: skip
        self.checkpoints = Checkpoints(
            meta_batch, segments, accounting, segment_writer, lambda member: self.chunks.log_kept_above(member),
            self.ready_loop.persist_alone,
        )  # fmt: skip
        take: Callable[[Sequence[Member]], Awaitable[dict[str, int]]] = lambda due: self.snapshots.take(due)  # noqa: E731
        due = DueSnapshots(self.members, config.snapshot_entries, lambda: self.space.full, take)
        gc_blockers = GcBlockers(self.members, unflushed, location, segments, config.segments_max, take)
        janitor = Janitor(
            self.group_commit, self.space, meta_batch, segments, segment_writer, compactor, jobs,
            [
                ("removal of what transfers left", self._collect_transfers),
                ("snapshots", due.run),
                ("snapshots for old segments", gc_blockers.ask),
            ],
            self._no_room,
        )  # fmt: skip
        self.recount = Recount(self.members, accounting, janitor.lock, self.spawn, janitor.look, self._damaged)
        rehoming = Rehoming(self.members, self.store, meta_batch, location, accounting, janitor.lock)
        logs = GroupLogs(
            self.members, self.group_commit, meta_batch, segment_writer, segments, accounting, janitor, self._forgotten
        )  # fmt: skip
        self.storage = Storage(
            jobs, meta_batch, location, segments, accounting, segment_writer, compactor, gc_blockers, janitor,
            rehoming, logs,
        )  # fmt: skip
        self.admission = Admission(
            config, self.group_commit, self.space, unflushed, compactor, self.cache, self.windows, self.counters.refused
        )
        self.disk_health = DiskHealth(
            self.disk, path, config, self.group_commit, lambda: self.ticker.resting, self.spawn
        )
        self.fail_stop = FailStop(
            self.disk, path, self.members, meta_batch, self._over, self._send,
            lambda: any(peer.up and peer.queued for peer in self.peers.status()),
        )  # fmt: skip
        self.slow_disk = SlowDisk(
            config, self.group_commit, self.disk_health, self.members, self._others, self.limits.be_patient, self.mark
        )

    def _compose_groups(self) -> None:
        """Build what makes replicas of groups live, on top of that."""
        self.walks = Walks(self.members, self.spawn)
        self.retire = Retire(
            self.members, self.active, self._send, self.group_commit.drop, lambda name, uid: self.names.drop(name, uid)
        )
        self.commands = Submit(
            self.node_id, self.config, self.members, lambda uid: self.unquiesce.find(uid, use=True),
            self.ready_loop.mark,
        )  # fmt: skip
        self.leadership = Leadership(
            self.node_id, self.config.election_ticks * self.config.tick_ms / 1000, self.member, self.mark
        )
        pins = self.storage.location
        self.reader = Reader(
            self.store, self.storage.segments, pins, self.wal.read_payload, lambda *asked: self.repair.unit(*asked)
        )
        self.snapshots = SnapshotStore(self.checkpoints, self.store.decode_liveness, self._settled, self.retire.stop)
        self.chunks = Chunks(self.config, self.members, self.storage.meta_batch, self.checkpoints.compact_log)
        self.pulls = Pulls(self.config, self.node_id, self.live, self.send_blob)
        self.snapshot_sender = SnapshotSender(
            self.config, self.snapshots, self.storage.meta_batch, self.chunks, self.send_blob, self.spawn, self.mark
        )
        self.pull_answers = PullAnswers(
            self.config, self._find_by, self.store, self.reader, self.storage.location.holds, self.chunks,
            self.send_blob, self.spawn,
        )  # fmt: skip
        meta_batch, logs = self.storage.meta_batch, self.storage.group_logs
        self.builder = Builder(
            Cores(self.node_id, self.live, self.draw, self.limits, self.windows), self.create_machine, self.store,
            meta_batch.load_snapshot, lambda uid: self.replica_gc.departed.get(uid), self._own_time, self.admission,
            self.clocks,
        )  # fmt: skip
        self.enliven = Enliven(self.node_id, self.members, lambda member: self.versions.learn(member), self.mark)
        self.snapshot_receiver = self._receiver()
        self.repair = PayloadRepair(self.pulls, self.reader, self.store, self.storage.rehoming.write_back)
        self.outbound = self._outbound()
        self.log_repair = self._log_repair()
        self.refill = Refill(
            self.store, self.repair, self.find, self.log_repair.barred, meta_batch.commit_store, meta_batch.owe_store,
            self.spawn,
        )  # fmt: skip
        self.mend_turns = MendTurns(self.node_id, self.live, self.find, self.send_blob)
        self.forks = Forks(self.disk, self.path, self.config.disk_reserve_bytes, self.node_id, self.reader)
        self.quiesced = QuiescedTable(self.node_id)
        self.names = Names(self.quiesced)
        self.replica_gc = ReplicaGC(
            self.node_id, self.find, self.retire, self.forks,
            replica_gc.Rows(meta_batch.commit, logs.forget, self.group_commit.write_alone), self.send_blob, self.spawn,
        )  # fmt: skip
        self.groups = self._registry()
        self.versions = Versions(
            self.node_id, self.config.machine_upgrade_percent, self.members, self.live, lambda: self.peers.nodes,
            self.commands, self.send_blob, self.mark,
        )  # fmt: skip
        self.follower_reads = FollowerReads(self.find, self.leadership.read_index, self.send_blob, self.spawn)
        self.log_clock = LogClock(
            self.clocks, self.reader.newest_time, self.versions.knows, self.commands.propose, self.ready_loop.mark
        )
        self.heartbeats = Heartbeats(self.config, self.commands)
        self._compose_quiescence()
        self.delivery = Delivery(self.reader, pins, self.repair.stretch, self.spawn, self.config.delivery_queue_bytes)
        self.effects = Effects(
            self.delivery, self.storage.accounting.released, self.commands, self.log_clock.now,
            lambda member, keep_log: self.snapshots.take([member], keep_log), self.spawn,
        )  # fmt: skip
        self.quarantine = Quarantine(
            self.reader, self.create_machine, lambda uid: meta_batch.load_snapshot(meta_batch.snapshot(uid)),
            self.commands.queue_own,
        )  # fmt: skip
        self.applier = self._applier()
        self.decommission = Decommission(
            self.node_id, self.members, self.quiesced, meta_batch.commit,
            self.incarnation.acquaintances.known.__contains__, lambda: self.peers,
        )  # fmt: skip
        self.ticker = self._ticker()
        self.inbound = self._inbound()
        self.scrub = self._scrub()

    def _registry(self) -> GroupRegistry:
        """Build what knows this node's groups."""
        here = groups.Groups(
            self.names, self.find, self.has, self.spec, lambda: self.group_count, self.log_repair.barred
        )  # fmt: skip
        host = groups.Host(
            self.start_member, lambda: self.grown(), self.retire.detach, self.storage.group_logs.forget, self.spawn
        )  # fmt: skip
        return GroupRegistry(
            self.node_id, self.config.groups_max, self.create_machine, here, self.replica_gc, self.storage.meta_batch,
            groups.Peers(lambda: self.peers.nodes, self.live, self.send_blob), host,
        )  # fmt: skip

    def _scrub(self) -> Scrub:
        """Build what reads through all that is stored."""
        config, disk, storage, store, members = self.config, self.disk, self.storage, self.store, self.members
        meta_batch, segments, files = storage.meta_batch, storage.segments, storage.location.files
        unflushed = storage.segment_writer.unflushed
        findings = Findings(
            config.scrub_bytes_per_s,
            lambda: bool(self.slow_disk.slow or self.admission.full or unflushed.backlog_files > 1),
        )  # fmt: skip
        host = scrub.Host(self.find, self._damaged, self.snapshots.renew, self.refill.lose, store.lost)
        repairs = Repairs(self.node_id, members, findings, self.mend_turns, host)
        here, read = scrub_walks.Groups(members, self.find, self.spec), findings.read
        walks = {
            "meta": scrub_walks.MetaWalk(disk, meta_batch, here, read, repairs).run,
            "snapshot": scrub_walks.SnapshotWalk(meta_batch, here, read, repairs).run,
            "segment": scrub_walks.SegmentWalk(
                disk, segments, files, members, storage.janitor.lock, storage.accounting.recount, read, repairs
            ).run,
            "wal": scrub_walks.WalWalk(
                disk, self.path / "wal", segments.path, files, members,
                lambda uid, index: store.home(uid, index) is not None, read, repairs,
            ).run,
            "generation": scrub_walks.GenerationWalk(disk, store, meta_batch, here, read, repairs).run,
        }  # fmt: skip
        return Scrub(config.scrub_every_s, self.clocks.wall_ns, meta_batch, findings, repairs, walks, self.refill.look)

    def _compose_quiescence(self) -> None:
        """Build what lets groups sleep and wakes them."""
        node, table, members, live = self.node_id, self.quiesced, self.members, self.live
        self.rebuild = transitions.Rebuild(
            str(self.path / "meta"), self.meta, self.builder.build, log_repair.stop,
            self.log_repair.revive, self.versions.learn,
        )  # fmt: skip
        epoch_of = self._epoch_of

        def stir() -> None:
            self.ticker.stir()

        self.quiesced_timers = Timers(node, self.clocks, table.leader_of, self.log_clock.fresh, stir)
        sessions = QuiescedSessions(self.heartbeats)
        self.heartbeats.spare(sessions.clients)
        self.transitions = Transitions(
            node, members, self.names, self.leader_cache, table, self.quiesced_timers, sessions, self.rebuild
        )
        self.unquiesce = Unquiesce(
            node, members, live, table, self.quiesced_timers, sessions, LivenessScan(node, table, epoch_of),
            self.transitions,
            unquiesce.Host(self.mark, lambda member: self.effects.on_leading(member), stir, self.send_blob),
        )  # fmt: skip
        self.digests = Digests(
            node, table, live, self.config.liveness_interval_ms / 1000, lambda: self.peers, self.unquiesce.soon,
            self.unquiesce.tell_awake,
        )  # fmt: skip
        meta_batch, location = self.storage.meta_batch, self.storage.location
        flush = PayloadFlush(
            self.store, location.files, location, self.reader, self.wal.read_payload, self.storage.rehoming.move,
            self.config.hibernate_move_bytes,
        )  # fmt: skip
        storage = quiesce.Storage(
            flush.is_done, flush.run, self.snapshots.take, self.checkpoints.move_out,
            partial(meta_batch.commit, store=True), self.storage.group_logs.slept, self.storage.group_logs.forget_slept,
        )  # fmt: skip

        def is_held(member: Member) -> bool:
            return member in self.effects.ticking or (member.raft.role == LEADER and sessions.is_silent(member))

        def left(member: Member) -> None:
            self.active.discard(member)
            self.effects.timed.discard(member)

        hibernation = quiesce.Hibernation(
            members, self.transitions, storage, is_held, epoch_of, left, lambda: self.shrunk()
        )  # fmt: skip
        self.quiesce = Quiesce(
            node, self.config.hibernate_after_ms / 1000, members, live, table, hibernation, self.unquiesce,
            quiesce.Host(self.active.__contains__, self.send_blob, self.spawn),
        )  # fmt: skip

    def _ticker(self) -> Ticker:
        """Build the node's one timer on what it drives."""
        windows, storage, timed, members = self.windows, self.storage, self.effects.timed, self.members
        waking = self.unquiesce

        def needed() -> bool:
            if waking.is_busy or self.admission.full or self.space.full:
                return True
            return any(window.waiting for window in windows.values())

        chores = ticker.Chores(
            needed, self.quiesced_timers.next_s, self.slow_disk.tick, (waking.tick, self.digests.compare),
            (self.admission.look, self.outbound.resume_all), self.heartbeats.look,
            (
                lambda: self.inbound.forget_asked(), self.replica_gc.forget_told, self.quiesce.look, waking.look,
                lambda: self.leader_cache.prune(members, len(members)), self.versions.look,
                lambda: self.log_clock.catch_up(timed), self.refill.look, storage.meta_batch.look,
            ),
            storage.janitor.look,
        )  # fmt: skip
        active = ticker.Groups(self.active, self.ready_loop.mark, self.walks.over_members, self.quiesce.rest)
        return Ticker(self.config, active, self.disk_health, self.group_commit, self.effects, chores)

    def _inbound(self) -> Inbound:
        """Build what takes in what other nodes say."""
        registry, gc, follower_reads, waking = self.groups, self.replica_gc, self.follower_reads, self.unquiesce
        here = inbound.Groups(
            self.node_id, self.members, self.live, self.active, self._find_by, registry.deleted,
            self.walks.over_members, gc.tell,
        )  # fmt: skip
        links = inbound.Links(
            (gc.forget_told, registry.on_link_up, self.versions.on_link_up),
            (self.snapshot_sender.on_link_lost, self.pulls.on_link_lost),
            waking.on_liveness, self.fail,
        )  # fmt: skip

        def without_body(take: Callable[[int, int, int, Mapping[str, Any]], None]) -> inbound.Handler:
            return lambda node, kind, request, header, body: take(node, kind, request, header)

        by_part: list[tuple[Sequence[int], inbound.Handler]] = [
            (blobs.GROUPS, without_body(registry.on_blob)),
            ((blobs.SNAPSHOT_OFFER,), lambda node, _, *rest: self.snapshot_receiver.on_offer(node, *rest)),
            ((blobs.SNAPSHOT_PULL,), lambda node, _, *rest: self.pull_answers.on_pull(node, *rest[:2])),
            ((blobs.SNAPSHOT_PIECE,), lambda node, _, *rest: self.pulls.on_piece(node, *rest)),
            ((blobs.SNAPSHOT_PROGRESS, blobs.SNAPSHOT_DONE), without_body(self.snapshot_sender.on_blob)),
            ((blobs.READ_ASK, blobs.READ_INDEX), without_body(follower_reads.on_blob)),
            ((blobs.MEND_ASK, blobs.MEND_TURN), without_body(self.mend_turns.on_blob)),
            ((blobs.MACHINE_VERSIONS,), lambda node, kind, number, header, body: self.versions.on_blob(node, header)),
            (blobs.QUIESCE, without_body(self.quiesce.on_blob)),
            (blobs.DIGESTS, lambda node, kind, number, header, body: self.digests.on_blob(node, kind, header)),
        ]  # fmt: skip
        return Inbound(
            here, self.ready_loop, self.cache.keep, self.space,
            inbound.Windows(self.windows, self.outbound.resume), links,
            {kind: handler for kinds, handler in by_part for kind in kinds}, self.send_blob,
        )  # fmt: skip

    def _applier(self) -> Applier:
        """Build what applies entries on top of what it tells."""
        host = applier.Host(
            self.groups.on_delete, self.replica_gc.applied, self.log_repair.found, self.retire.stop,
            self.heartbeats.began, lambda member: self.members.get(member.uid) is member, self.ready_loop.mark,
            self.active.add, self.spawn,
        )  # fmt: skip
        return Applier(self.reader, self.effects, self.quarantine, host)

    def _receiver(self) -> SnapshotReceiver:
        """Build the receiving end of transfers on what there is by now."""
        host = snapshot_receiver.Host(
            self.find, lambda node, uid: self.inbound.ask(node, uid), self.ready_loop.turn, self._restore,
            self.retire.stop, self.mark, self.storage.rehoming.store_payloads,
        )  # fmt: skip
        return SnapshotReceiver(
            self.members, self.store, self.checkpoints, self.chunks, self.pulls, host, self.send_blob, self.spawn
        )

    def _log_repair(self) -> LogRepair:
        """Build what has damaged groups mended."""
        host = log_repair.Host(
            self.builder.build, self.enliven, self.retire.silence, self.retire.stop, self.spawn,
        )  # fmt: skip
        return LogRepair(
            self.node_id, self.members, self.storage.meta_batch, self.storage.group_logs, self.reader, host
        )

    def _outbound(self) -> Outbound:
        """Build what sends messages that are not at hand."""
        host = outbound.Host(
            self._send, self.snapshot_sender.start_transfer, self._let_log_go, self._damaged,
            self.repair.stretch, self.storage.location.holds, self.spawn,
        )  # fmt: skip
        return Outbound(
            self.config.append_bytes_max, self.members, self.windows, self.reader, host, self.ready_loop.mark, self.mark
        )

    async def open(self) -> None:
        """Lock the directory, recover everything from it. Raises `DirectoryInUse`, `WrongIdentity`, `Corrupt`."""
        storage = self.storage
        start = Start(
            self.data, self.incarnation,
            Files(
                self.space, self.wal, self.meta, self.store, storage.segments, storage.location, storage.accounting,
                storage.segment_writer, storage.janitor,
            ),
            Found(
                self.members, self.names, self.groups.deleted, self.replica_gc.departed, self.builder.build,
                self.transitions.adopt, self.refill.lose,
                lambda: self.chunks.recover(self.has, self.groups.deleted),
            ),
            self.log_repair,
        )  # fmt: skip
        await trio.to_thread.run_sync(start.run)
        self.counters.replayed(start.replay_ns)
        self.group_commit.held_back(self.storage.location.unsealed())

    async def run(self, peers: PeersPort, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; raise `WalFailed` when the disk failed (law 7), `Outdated` when the others say so."""
        # The GIL: a helper thread that must retake it per call starves at the default interval
        # (docs/internals/hosting.md, "The interpreter lock").
        sys.setswitchinterval(self.config.switch_interval_us / 1_000_000)
        self.peers = peers
        storage = self.storage
        roles = RoleChanges(self.leader_cache, self.log_repair.sound, self.effects, self.heartbeats)
        self.ready_loop.drive(
            ready_loop.Driven(
                peers, self.group_commit, self.applier.apply_all, self.outbound.prepare, self.log_clock.now,
                self.heartbeats.seen, storage.accounting.cut, storage.segment_writer.hard_state_written, roles.tell,
                self.ticker,
            )
        )  # fmt: skip
        self.group_commit.start()
        try:
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                if self.writer is not None:
                    await nursery.start(self.writer.run, self.data.lock_fd)
                nursery.start_soon(self.ready_loop.run)
                nursery.start_soon(self.ready_loop.tell)
                nursery.start_soon(self.ticker.run)
                if self.config.hibernate_after_ms:
                    nursery.start_soon(self.quiesce.run)
                nursery.start_soon(self.storage.janitor.run)
                nursery.start_soon(self.scrub.run)
                self.enliven.recovered()
                self.log_repair.start()
                task_status.started()
                raise await self.fail_stop.finish()
        finally:
            self.group_commit.stop()

    def start_member(self, spec: Spec) -> None:
        """Let a group that was just registered come alive; one whose definition was lost here is mended."""
        if spec.uid in self.log_repair.barred:
            self.enliven(self.log_repair.admit(spec))
        else:
            self.enliven(self.builder.fresh(spec), fresh=True)

    def _own_time(self, uid: int, kind: int) -> int:
        """Return log time of an entry of a core's own: of one that is being built there is none yet."""
        member = self.members.get(uid)
        return self.log_clock.of_own_entry(member, kind) if member is not None else 0

    def rolled(self, rolled: Rolled) -> None:
        """Have files that the WAL sealed flushed, and stop whose entries it could not take."""
        self.storage.janitor.rolled(rolled.sealed)
        for gap in rolled.gaps:
            member = self.members.get(gap.uid)
            if member is not None:
                self.retire.stop(member, f"the write-ahead log expected entry {gap.expected} of this group next")

    async def _flushed(self, sealed: Sealed, file: SealedFile, members: set[Member]) -> None:
        """Let go of what a new segment has: of the logs, of the file if nothing in it lives, of memory."""
        self.checkpoints.flushed(members)
        await self.storage.compactor.flushed(file)
        self.group_commit.let_go(sealed.entries)

    async def _collect_transfers(self) -> None:
        """Give back what was kept for other members' transfers, or for one that came to nothing."""
        self.storage.location.expire(time.monotonic())
        self.chunks.expire(trio.current_time())
        await self.snapshot_receiver.collect(self.has)
        await self.chunks.collect()

    def _forgotten(self, uid: int) -> None:
        """Count nothing any more that came for a replica that goes, nor its payloads."""
        self.chunks.forget(uid)
        self.store.delete_group(uid)

    def _no_room(self) -> None:
        """Let no promise hold up the space that a full disk needs."""
        self.chunks.give_up()
        self.storage.location.expire(math.inf)

    def _others(self) -> Iterator[tuple[int, Vitals]]:
        """Yield the live nodes, and what they say of themselves."""
        peers = self.peers
        return ((node, peers.vitals_of(node)) for node in peers.nodes if node in self.live)

    def part(self) -> None:
        """Leave the last word of a node that stops in order, after `run` and before `close`; a crash has none.
        BLOCKING."""
        if self.fail_stop.failure is None:
            note_commits(self.members.values(), self.wal)

    def close(self) -> None:
        """Give up the directory. Everything acknowledged is durable already; nothing is flushed here."""
        self.disk_health.close()
        self.storage.segments.close()
        self.data.close()
        self.quiesced.close()

    def fail(self, error: LogyardError) -> None:
        """Fail this node, which can't go on: `run` ends soon, by this error."""
        self.fail_stop.begin(error)

    def _over(self, error: LogyardError) -> None:
        """Let nothing be promised any more."""
        self.group_commit.refuse(error)
        self.ready_loop.end()
        self.ticker.end()

    def vitals(self) -> Vitals:
        """Return what goes with each renewal."""
        return Vitals(self.wal.position[0], self.slow_disk.sync_us, self.slow_disk.slow)

    def send_blob(
        self, node: int, kind: int, request: int, header: Mapping[str, Any], body: Sequence[Buffer] = ()
    ) -> bool:
        """Send a node one blob; return False when it was dropped."""
        return self.peers.send_blob(node, kind, request, header, body)

    def spawn(self, task: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Run a task until it ends, or the node does."""
        self.nursery.start_soon(task, *arguments)

    def tell_memory(self, grown: Callable[[], None], shrunk: Callable[[], None]) -> None:
        """Have these called when many objects came that live long, and when many went."""
        self.grown, self.shrunk = grown, shrunk

    def mark(self, member: Member) -> None:
        """Let a member be looked at in the next turn, and at the next tick."""
        self.active.add(member)
        self.ready_loop.mark(member)

    def _send(self, messages: Sequence[Message]) -> None:
        self.peers.send(messages)

    def _epoch_of(self, node: int) -> int:
        return self.epoch if node == self.node_id else self.peers.epoch_of(node)

    async def _settled(self) -> None:
        await self.group_commit.exclusive(_nothing)

    async def _let_log_go(self, member: Member) -> None:
        await self.snapshots.take([member])
        await self.storage.group_logs.roll_out(member)

    def _damaged(self, member: Member, error: Corrupt) -> None:
        self.log_repair.found(member, error)

    def _find_by(self, uid: int, node: int) -> Member | None:
        return self.unquiesce.find(uid, by=node)

    def _restore(self, member: Member, snapshot: Snapshot) -> None:
        liveness = self.store.decode_liveness(snapshot.live)
        snapshot_sections.restore_member(member, snapshot, liveness, self.clocks.monotonic_ns())

    def find(self, uid: int) -> Member | None:
        """Return a group's member, woken if it hibernates; None when this node has none."""
        return self.unquiesce.find(uid)

    def member(self, name: str) -> Member:
        """Return a member by name, woken if it hibernates. Raises `UnknownGroup`."""
        # A name is taken before its group is durable, and so before there is a member.
        member = self.unquiesce.find(self.names.get(name, 0), use=True)
        if member is None:
            raise UnknownGroup(f"no group {name!r} on node {self.node_id}", name=name)
        # Whoever asks is going to use it: it does not rest just now.
        self.active.add(member)
        return member

    def has(self, uid: int) -> bool:
        """Return whether this node has a group, awake or not."""
        return uid in self.members or uid in self.quiesced

    @property
    def epoch(self) -> int:
        """Return the number of this life of the directory."""
        return self.incarnation.epoch

    @property
    def group_count(self) -> int:
        """Groups of this node, awake or not."""
        return len(self.members) + len(self.quiesced)

    def spec(self, uid: int) -> Spec | None:
        """Return a group's definition; wakes nobody."""
        member = self.members.get(uid)
        if member is not None:
            return member.spec
        return self.rebuild.spec(uid) if uid in self.quiesced else None


def _nothing() -> None:
    """Do nothing: of an embedded system the process is somebody else's, and who waits for a batch wants no more."""

"""A system: the engine of one node. It owns every member, the one WAL, the tasks and threads.

It is built from below, floor by floor. Each floor has a composing function in its own folder, and is a tuple of its
parts by name; this file calls them in order, and is the only one that knows them all:

    storage      log/compose.py       what keeps bytes on this node's disk
    replicas     replica/compose.py   what makes replicas live: the way in, applying, effects, reading
    transfers    transfer/compose.py  snapshots on their way between nodes
    repair       repair/compose.py    what was lost here comes back from others
    quiescence   quiesce/compose.py   groups that nobody uses sleep, and are found all the same
    the host     host/compose.py      turns and ticks, messages in and out, the group registry, the end

All stand on the `Ground` (values, doors, members, the ready loop), and each on the floors above it in this list. What a
floor tells those that come later, or asks them, is declared in its `Above` (`engine.upcall`); `_bind` is the whole list
of those calls. A part is given by its constructor what it needs; none knows this object. The payload store and the
transport come in through `engine.ports`, wired by `service.node`. Constructors do no I/O: `open` does.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio

from ..config import SystemConfig
from ..disk.door import Disk
from ..identity import Vitals
from ..log.cache import PayloadCache
from ..log.compose import compose_storage
from ..log.meta import MetaStore
from ..log.wal import Wal, WalConfig
from ..machine import Machine
from ..ports import PeersPort, StorePort, WriterPort
from ..quiesce.compose import compose_quiescence
from ..raft.progress import Window
from ..recovery.incarnation import Incarnation
from ..recovery.open import DataDirectory, Files, Start
from ..recovery.open import Groups as Found
from ..repair.compose import compose_repair
from ..replica.build import MakeCore, limits_of, make_raft
from ..replica.compose import compose_replicas
from ..replica.ground import Ground
from ..replica.log_clock import Clocks
from ..replica.member import Member
from ..replica.proposals import Shape
from ..transfer.compose import compose_transfers
from ..transport.network import Network
from .admission import Admission
from .compose import Floors, compose_host
from .leader_cache import Counters, LeaderCache
from .ready_loop import ReadyLoop
from .shutdown import note_commits


class System:
    """One node's engine.

    `writer` is the process that storage jobs run in; without one they run in threads.
    `machines` turns a machine's name and arguments into a fresh machine. `draw(n)` is the random source of elections,
    in [0, n). `make_core` makes what decides a group's log.
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
        make_core: MakeCore = make_raft,
    ) -> None:
        self.path = path
        self.node_id = node_id
        self.cluster_id = cluster_id
        self.config = config
        self.store = store
        self.writer = writer
        self.disk = disk = disk or Disk()
        self.members: dict[int, Member] = {}
        self.live: set[int] = {node_id}
        self.active: set[Member] = set()
        self.windows: dict[int, Window] = {}
        self.cache = PayloadCache(config.payload_cache_bytes)
        self.leader_cache = LeaderCache()
        self.counters = Counters()
        self.data = DataDirectory(disk, path)
        self.meta = MetaStore(disk, str(path / "meta"))
        self.incarnation = Incarnation(node_id, cluster_id, disk, path, self.meta)
        self.wal = Wal(disk, str(path / "wal"), WalConfig.of(config))
        # The clocks that log time is made from.
        self.clocks = Clocks()
        self.limits = limits_of(config)
        # Called when many objects came that live long, and when many went: the daemon looks after its memory then.
        self.grown: Callable[[], None] = _nothing
        self.shrunk: Callable[[], None] = _nothing
        self.peers: PeersPort
        self.nursery: trio.Nursery
        self._network = Network(self.live)
        refused, known = self.counters.refused, self.incarnation.acquaintances
        shape = Shape(config.entry_bytes_max, config.entry_records_max, self.cache.keep, refused)
        self.ready_loop = ReadyLoop(
            shape, self.cache, self.active, self.clocks, self.config.linger_ms / 1000, self.config.linger_groups
        )

        ground = Ground(
            node_id, path, config, disk, store, self.wal, self.clocks, self.members, self.live, self.active,
            self.windows, self.limits, self.cache, self.ready_loop, self._network, self.spawn,
        )  # fmt: skip
        self.storage = storage = compose_storage(
            ground, self.meta, known, None if writer is None else writer.write_segment, refused
        )
        self.admission = Admission(
            config, storage.group_commit, storage.space, storage.segment_writer.unflushed, storage.compactor,
            self.cache, self.windows, refused,
        )  # fmt: skip
        self.replicas = compose_replicas(ground, storage, machines, draw, make_core, self.admission, refused)
        self.transfers = compose_transfers(ground, storage, self.replicas)
        self.repair = compose_repair(ground, storage, self.replicas, self.transfers)
        self.quiescence = compose_quiescence(
            ground, self.meta, storage, self.replicas, self.transfers.snapshots, self.repair.log_repair,
            self.leader_cache, self._epoch_of,
        )  # fmt: skip
        self.host = compose_host(
            Floors(ground, storage, self.replicas, self.transfers, self.repair, self.quiescence),
            self.ready_loop, self.admission, self.leader_cache, machines, known.known.__contains__,
            lambda: self.grown(),
        )  # fmt: skip
        self._bind()
        self.names, lookup = self.quiescence.names, self.quiescence.lookup
        self.find, self.member, self.has, self.spec = lookup.find, lookup.member, lookup.has, lookup.spec

    def _bind(self) -> None:
        """Bind what floors tell those that stand on them, and ask them."""
        storage, replicas, transfers = self.storage.above, self.replicas.above, self.transfers.above
        repair, asleep = self.repair.above, self.quiescence.above
        logs, payloads, lookup = self.repair.log_repair, self.repair.payload_repair, self.quiescence.lookup
        snapshots, chunks = self.transfers.snapshots, self.transfers.chunks

        storage.failed.bind(self.host.fail_stop.begin)
        storage.stopped.bind(self.replicas.retire.stop)
        storage.damaged.bind(logs.found)
        storage.lost.bind(self.repair.refill.lose)
        storage.forgotten.bind(chunks.forget)
        storage.chunks_left.bind(chunks.drop)
        storage.queued.bind(lambda: self.admission.queued)
        storage.is_left.bind(logs.is_left)
        storage.payload_entries.bind(self.replicas.reader.payload_entries)
        storage.snapshot.bind(snapshots.take)
        storage.beside.bind(chunks.changed)
        storage.kept_above.bind(chunks.log_kept_above)
        storage.tidy_transfers.bind(partial(self.transfers.collect, lookup.has))
        storage.no_room.bind(chunks.give_up)

        replicas.wake.bind(lookup.find_used)
        replicas.named.bind(lookup.member)
        replicas.departed.bind(self.host.replica_gc.departed.get)
        replicas.mend.bind(payloads.unit)
        replicas.fetch.bind(payloads.stretch)
        replicas.snapshot.bind(lambda member, keep_log: snapshots.take([member], keep_log))
        replicas.damaged.bind(logs.found)
        replicas.deleted.bind(self.host.groups.on_delete)
        replicas.configured.bind(self.host.replica_gc.applied)
        replicas.gone.bind(self.quiescence.names.drop)

        transfers.find.bind(lookup.find)
        transfers.find_by.bind(lookup.find_by)
        transfers.unknown.bind(self.host.inbound.ask)

        repair.find.bind(lookup.find)
        repair.spec.bind(lookup.spec)
        repair.is_busy.bind(lambda: self.host.slow_disk.slow or self.admission.full)

        asleep.stir.bind(self.host.ticker.stir)
        asleep.asked.bind(self.host.ticker.elections.ask)
        asleep.shrunk.bind(lambda: self.shrunk())

        for above in (storage, replicas, transfers, repair, asleep):
            assert not above.unbound(), above.unbound()

    async def open(self) -> None:
        """Lock the directory, recover everything from it. Raises `DirectoryInUse`, `WrongIdentity`, `Corrupt`."""
        storage, repair, deleted = self.storage, self.repair, self.host.groups.deleted
        start = Start(
            self.data, self.incarnation,
            Files(
                storage.space, self.wal, self.meta, self.store, storage.segments, storage.rings, storage.location,
                storage.accounting, storage.segment_writer, storage.janitor,
            ),
            Found(
                self.members, self.names, deleted, self.host.replica_gc.departed, self.replicas.builder.build,
                self.quiescence.transitions.adopt,
                self.quiescence.transitions.adopt_fresh if self.config.hibernate_after_ms else None,
                repair.refill.lose,
                lambda: self.transfers.chunks.recover(self.has, deleted),
            ),
            repair.log_repair,
        )  # fmt: skip
        await trio.to_thread.run_sync(start.run)
        self.counters.replayed(start.replay_ns)
        storage.group_commit.held_back(storage.location.unsealed())

    async def run(self, peers: PeersPort, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; raise `WalFailed` when the disk failed (law 7), `Outdated` when the others say so."""
        # The GIL: a helper thread that must retake it per call starves at the default interval
        # (docs/internals/hosting.md, "The interpreter lock").
        sys.setswitchinterval(self.config.switch_interval_us / 1_000_000)
        self.peers = peers
        self._network.attach(peers)
        self.ready_loop.drive(self.host.driven._replace(peers=peers))
        storage, replicas, logs = self.storage, self.replicas, self.repair.log_repair
        storage.group_commit.start()
        try:
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                if self.writer is not None:
                    await nursery.start(self.writer.run, self.data.lock_fd)
                nursery.start_soon(self.ready_loop.run)
                nursery.start_soon(self.ready_loop.tell)
                nursery.start_soon(self.ready_loop.window.run)
                nursery.start_soon(self.host.ticker.run)
                if self.config.hibernate_after_ms:
                    nursery.start_soon(self.quiescence.quiesce.run)
                nursery.start_soon(storage.janitor.run)
                nursery.start_soon(self.repair.scrub.run)
                replicas.enliven.recovered()
                logs.start()
                task_status.started()
                raise await self.host.fail_stop.finish()
        finally:
            storage.group_commit.stop()

    def part(self) -> None:
        """Leave the last word of a node that stops in order, after `run` and before `close`; a crash has none.
        BLOCKING."""
        if self.host.fail_stop.failure is None:
            note_commits(self.members.values(), self.wal)

    def close(self) -> None:
        """Give up the directory. Everything acknowledged is durable already; nothing is flushed here."""
        self.host.disk_health.close()
        self.storage.segments.close()
        self.storage.rings.close()
        self.data.close()
        self.quiescence.table.close()

    def spawn(self, task: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Run a task until it ends, or the node does."""
        self.nursery.start_soon(task, *arguments)

    def tell_memory(self, grown: Callable[[], None], shrunk: Callable[[], None]) -> None:
        """Have these called when many objects came that live long, and when many went."""
        self.grown, self.shrunk = grown, shrunk

    def vitals(self) -> Vitals:
        """Return what goes with each renewal."""
        written = self.incarnation.claim(self.wal.next_batch)
        return Vitals(written, self.host.slow_disk.sync_us, self.host.slow_disk.slow)

    @property
    def epoch(self) -> int:
        """Return the number of this life of the directory."""
        return self.incarnation.epoch

    @property
    def group_count(self) -> int:
        """Groups of this node, awake or not."""
        return self.quiescence.lookup.count()

    def _epoch_of(self, node: int) -> int:
        return self.epoch if node == self.node_id else self._network.epoch_of(node)


def _nothing() -> None:
    """Do nothing: of an embedded system the process is somebody else's."""

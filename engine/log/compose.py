"""How the storage of a node is built: what keeps bytes on its disk, from group commit up to the janitor.

Circles within the floor are closed at its end, by an upcall of its own or by a task that runs later; what goes further
up is in `Above`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from logyard.protocol.errors import Corrupt, LogyardError

from ..disk.rate_limiter import RateLimiter
from ..identity import Acquaintances
from ..jobs import Jobs
from ..replica.ground import Ground
from ..replica.member import Member
from ..snapshot.format import Encoded
from ..upcall import Upcall, Upcalls
from . import checkpoint_rows as rows
from .checkpoints import Checkpoints, DueSnapshots
from .compactor import Compactor
from .gc_blockers import GcBlockers
from .group_commit import GroupCommit
from .group_logs import GroupLogs
from .janitor import Janitor
from .liveness_accounting import Found, LivenessAccounting, Recount
from .location import Location, SealedFile, Unflushed
from .meta import MetaStore
from .meta_batch import MetaBatch
from .rehoming import Rehoming
from .ring import Geometry
from .ring_files import RingFiles
from .segment_files import SegmentFiles
from .segment_job import SegmentRunner
from .segment_writer import SegmentWriter
from .space import Space
from .wal import Rolled, Sealed, WalConfig


class Above(Upcalls):
    """What storage tells the floors above, and asks them."""

    def __init__(self) -> None:
        self.failed = Upcall[[LogyardError], None]()
        """The disk failed: nothing is written any more (law 7)."""
        self.stopped = Upcall[[Member, str], None]()
        """A member can't go on."""
        self.damaged = Upcall[[Member, Corrupt], None]()
        """A record of a member can't be read."""
        self.lost = Upcall[[int, int, int], None]()
        """Payloads of a group's entries, first to last, are on no file here."""
        self.forgotten = Upcall[[int], object]()
        """A group's replica goes, with all that came for it."""
        self.chunks_left = Upcall[[int, Sequence[bytes]], None]()
        """The snapshot of a group that named these chunks is stored no more."""
        self.queued = Upcall[[], int]()
        """How many bytes were admitted, and are not with group commit yet?"""
        self.is_left = Upcall[[Member], bool]()
        """Can nobody mend a member, so that what it has stays for people?"""
        self.payload_entries = Upcall[[Member, int, int], Iterator[Found]]()
        """Find entries with payload, wherever they are."""
        self.snapshot = Upcall[[Sequence[Member]], Awaitable[dict[str, int]]]()
        """Take snapshots."""
        self.beside = Upcall[[Member, int, Encoded, bool], Iterable[rows.Put]]()
        """What is stored with a snapshot, in the same commit?"""
        self.kept_above = Upcall[[Member], int]()
        """Up to where may a member's log go, for all that transfers need of it?"""
        self.tidy_transfers = Upcall[[], Awaitable[bool]]()
        """Give back what was kept for transfers that are over; is there more of it?"""
        self.no_room = Upcall[[], None]()
        """The disk is full: no promise may hold up space."""


class Storage(NamedTuple):
    """The parts, by name: for the floors above, and for the node's status. No part is given all of them."""

    above: Above
    jobs: Jobs
    """Which of its jobs failed by a defect."""
    group_commit: GroupCommit
    space: Space
    meta_batch: MetaBatch
    location: Location
    segments: SegmentFiles
    rings: RingFiles
    accounting: LivenessAccounting
    segment_writer: SegmentWriter
    compactor: Compactor
    checkpoints: Checkpoints
    gc_blockers: GcBlockers
    janitor: Janitor
    rehoming: Rehoming
    group_logs: GroupLogs


def compose_storage(
    ground: Ground,
    meta: MetaStore,
    acquaintances: Acquaintances,
    elsewhere: SegmentRunner | None,
    refused: Callable[[str], None],
) -> Storage:
    """Build a node's. `elsewhere` writes segments instead of a thread of this process; `refused` counts what is sent
    back for want of space."""
    config, members, store, above = ground.config, ground.members, ground.store, Above()

    def rolled(rolled: Rolled) -> None:
        """Have files that the WAL sealed flushed, and stop whose entries it could not take."""
        janitor.rolled(rolled.sealed)
        for gap in rolled.gaps:
            member = members.get(gap.uid)
            if member is not None:
                above.stopped(member, f"the write-ahead log expected entry {gap.expected} of this group next")

    def forgotten(uid: int) -> None:
        """Count nothing any more that came for a replica that goes, nor its payloads."""
        above.forgotten(uid)
        store.delete_group(uid)

    group_commit = GroupCommit(
        ground.wal,
        ground.loop.persisted,
        rolled,
        above.failed,
        lambda reason: space.note(reason),
        WalConfig.of(config).batch_bytes,
    )
    space = Space(ground.path, ground.disk, config, group_commit, above.queued, refused)
    meta_batch = MetaBatch(members, meta, store, space, acquaintances, above.failed, ground.spawn, above.beside)
    unflushed = Unflushed(ground.wal)
    location = Location(store, unflushed, config.pin_ms / 1000)
    geometry = Geometry(config.ring_slots, config.ring_slot_bytes)
    rings = RingFiles(ground.path, ground.disk, members, geometry, meta_batch.commit_members, meta_batch.raise_format)
    segments = SegmentFiles(
        ground.path, ground.disk, members, location.files.__contains__, above.is_left, lambda: janitor.look(),
        elsewhere, rings,
    )  # fmt: skip
    accounting = LivenessAccounting(
        members, store, location, segments, above.payload_entries, above.lost,
        lambda member, seconds: recount.later(member, seconds),
    )  # fmt: skip
    compactor = Compactor(
        config, members, store, space, meta_batch, location, segments, _limit(ground, group_commit, unflushed)
    )

    async def flushed(sealed: Sealed, file: SealedFile, members: Sequence[Member]) -> None:
        """Let go of what a new segment has: of the logs, of the file if nothing in it lives, of memory."""
        try:
            await checkpoints.flushed(members)
            await compactor.flushed(file)
        finally:
            group_commit.let_go(sealed.entries)

    segment_writer = SegmentWriter(
        members, unflushed, space, meta_batch, location, segments, accounting, store.jobs, flushed
    )
    checkpoints = Checkpoints(
        meta_batch, segments, accounting, segment_writer, above.kept_above, ground.loop.persist_alone
    )
    gc_blockers = GcBlockers(members, unflushed, location, segments, config.segments_max, above.snapshot)
    janitor = Janitor(
        group_commit, space, meta_batch, segments, segment_writer, compactor, store.jobs,
        _later(ground, space, location, gc_blockers, above, lambda: janitor.look()), lambda: _no_room(location, above),
    )  # fmt: skip
    recount = Recount(members, accounting, janitor.lock, ground.spawn, janitor.look, above.damaged)
    rehoming = Rehoming(members, store, meta_batch, location, accounting, janitor.lock)
    group_logs = GroupLogs(
        members, group_commit, meta_batch, segment_writer, segments, rings, accounting, janitor, forgotten,
        above.chunks_left,
    )  # fmt: skip
    return Storage(
        above, store.jobs, group_commit, space, meta_batch, location, segments, rings, accounting, segment_writer,
        compactor, checkpoints, gc_blockers, janitor, rehoming, group_logs,
    )  # fmt: skip


def _limit(ground: Ground, group_commit: GroupCommit, unflushed: Unflushed) -> Callable[[int], int]:
    """Return what says how fast payloads may be copied beside what clients write."""
    pace = RateLimiter(ground.config)

    def limit(debt: int) -> int:
        pace.sample(group_commit.batch_bytes)
        return pace.limit(debt, unflushed.backlog_files)

    return limit


def _later(
    ground: Ground,
    space: Space,
    location: Location,
    gc_blockers: GcBlockers,
    above: Above,
    look: Callable[[], None],
) -> Sequence[tuple[str, Callable[[], Awaitable[object]]]]:
    """Return the janitor's jobs that touch no file; it is to `look` again where one is not done."""

    async def tidy() -> None:
        location.expire(time.monotonic())
        if await above.tidy_transfers():
            look()

    config = ground.config
    due = DueSnapshots(
        ground.members, config.snapshot_entries, config.ring_entries_due, lambda: space.full, above.snapshot
    )
    return [
        ("removal of what transfers left", tidy),
        ("snapshots", due.run),
        ("snapshots for old segments", gc_blockers.ask),
    ]


def _no_room(location: Location, above: Above) -> None:
    """Let no promise hold up the space that a full disk needs."""
    above.no_room()
    location.expire(math.inf)

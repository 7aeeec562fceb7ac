"""What of a log may go, alone: only what a durable snapshot covers, a segment has, and no transfer needs."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from logyard.engine.entry import CONFIGURATION, NOOP, build_plain
from logyard.engine.log import checkpoint_rows as rows
from logyard.engine.log.checkpoints import FULL_ENTRIES, Checkpoints, DueSnapshots
from logyard.engine.log.meta_rows import RingRun, SegmentRun, StateRow
from logyard.engine.log.wal import WalItem
from logyard.engine.raft.configuration import Configuration
from logyard.engine.raft.membership import adopt
from logyard.engine.raft.raft_log import RaftLog
from logyard.engine.replica.member import HALTED, Member
from logyard.engine.snapshot.format import Encoded, Snapshot
from logyard.engine.types import Spec
from logyard.protocol.errors import NoSpace

from ..raft.network import make
from ..replica.doubles import Admission, Living, Recorder

UID, TERM, LAST = 9, 4, 20


def member_of(uid: int = UID) -> Member:
    """A member with entries 1 to 20, all in memory; nothing of them is in a segment or a snapshot."""
    log = RaftLog(entries=[build_plain(at, TERM, NOOP, 0) for at in range(1, LAST + 1)])
    raft: Any = SimpleNamespace(uid=uid, stopped=False, applied=LAST, log=log)
    spec = Spec(uid, "a", "log", {}, (1,), 0)
    return Member(spec, raft, cast(Any, Recorder()), cast(Any, Living()), Admission())


def captured(member: Member, index: int, keep_log: bool = False) -> rows.Captured:
    snapshot = Snapshot(member.uid, index, TERM, b"", 1, 0, 0, {}, b"")
    return rows.Captured(member, snapshot, Encoded(b"", {}, (), 100), keep_log)


class Bench:
    """Checkpoints, and what they asked of others; the next commit raises `error`, if there is one."""

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.kept = LAST
        self.error: Exception | None = None
        self.refused: set[int] = set()
        # Up to where segments are stored, where that is not all that was flushed.
        self.stored = LAST
        flush: Any = SimpleNamespace(hard_state_written=lambda member: self.did.append("hard state"), groups_per_step=2)
        self.checkpoints = Checkpoints(
            cast(Any, self), cast(Any, self), cast(Any, self), flush, lambda member: self.kept,
            lambda member, item: self.did.append(("persist", item)),
        )  # fmt: skip

    async def commit_snapshots(self, wanted: Sequence[rows.Captured]) -> list[rows.Captured]:
        if self.error is not None:
            raise self.error
        return [one for one in wanted if one.member.uid not in self.refused]

    def stored_through(self, member: Member) -> int:
        return min(member.flushed, self.stored)

    def shed(self, member: Member) -> None:
        self.did.append(("shed", member.raft.log.snapshot_index))

    def leave(self, member: Member, number: int) -> None:
        assert number not in [run.segment for run in member.segments], "what it leaves it does not name"
        self.did.append(("leave", number))

    def replaced(self, member: Member, before: object, index: int) -> None:
        self.did.append(("replaced", before, index))

    def cut(self, member: Member, last: int) -> None:
        self.did.append(("cut", last))


@pytest.mark.parametrize(
    ("snapshot", "flushed", "kept", "start"),
    [
        (15, 20, 20, 15), (15, 10, 20, 10), (15, 20, 8, 8), (0, 20, 20, 0), (15, 0, 20, 0), (15, 20, 0, 0),
        (20, 20, 20, 20),
    ],
)  # fmt: skip
def test_a_log_goes_as_far_as_all_three_allow(snapshot: int, flushed: int, kept: int, start: int) -> None:
    bench, member = Bench(), member_of()
    member.covered(snapshot, TERM, 100)
    member.flush_through(flushed)
    bench.kept = kept
    bench.checkpoints.let_log_go(member)
    log = member.raft.log
    assert (log.snapshot_index, log.first_index, log.last_index) == (start, start + 1, LAST)
    assert bench.did == ([("shed", start)] if start else [])
    bench.checkpoints.let_log_go(member)
    assert len(bench.did) <= 1, "there is nothing more to forget"


def test_a_log_does_not_go_beyond_segments_that_are_stored_as_such() -> None:
    bench, member = Bench(), member_of()
    member.covered(20, TERM, 100)
    member.flush_through(15)
    bench.stored = 9
    bench.checkpoints.let_log_go(member)
    assert member.raft.log.snapshot_index == 9
    bench.stored = LAST
    bench.checkpoints.let_log_go(member)
    assert member.raft.log.snapshot_index == 15


async def test_a_snapshot_lets_the_log_below_it_go_and_a_checkpoint_does_not() -> None:
    bench, member = Bench(), member_of()
    member.flush_through(20)
    await bench.checkpoints.store_snapshots([captured(member, 12, keep_log=True)])
    assert (member.snapshot_index, member.snapshot_bytes) == (12, 100) and member.raft.log.first_index == 1
    await bench.checkpoints.store_snapshots([captured(member, 15)])
    assert member.snapshot_index == 15 and member.raft.log.first_index == 16


async def test_what_was_not_stored_covers_nothing() -> None:
    bench, member, other = Bench(), member_of(), member_of(8)
    for one in (member, other):
        one.flush_through(20)
    bench.refused = {UID}
    await bench.checkpoints.store_snapshots([captured(member, 15), captured(other, 15)])
    assert (member.snapshot_index, other.snapshot_index) == (0, 15) and member.raft.log.first_index == 1
    bench.error = NoSpace("full")
    with pytest.raises(NoSpace):
        await bench.checkpoints.store_snapshots([captured(other, 18)])
    assert other.snapshot_index == 15 and other.raft.log.first_index == 16


@pytest.mark.parametrize("how", ["stopped", "overtaken"])
async def test_a_snapshot_that_comes_too_late_moves_nothing_back(how: str) -> None:
    bench, member = Bench(), member_of()
    member.flush_through(20)
    if how == "stopped":
        cast(Any, member.raft).stopped = True
    else:
        member.covered(18, TERM, 50)
    await bench.checkpoints.store_snapshots([captured(member, 15)])
    assert member.snapshot_index == (0 if how == "stopped" else 18) and member.raft.log.first_index == 1


async def test_what_a_segment_has_leaves_memory_and_of_a_stopped_group_nothing_does() -> None:
    bench, member, stopped, fresh = Bench(), member_of(), member_of(8), member_of(7)
    cast(Any, stopped.raft).stopped = True
    for one in (member, stopped):
        one.flush_through(12)
    await bench.checkpoints.flushed([member, stopped, fresh])
    assert [one.raft.log.memory_first for one in (member, stopped, fresh)] == [13, 1, 1]
    assert member.raft.log.first_index == 1, "no snapshot covers it"


def test_an_installed_snapshot_that_the_log_has_leaves_the_log_as_it_is() -> None:
    bench, member = Bench(), member_of()
    member.add_segment(SegmentRun(1, 20, 3))
    before: Any = object()
    bench.checkpoints.installed(member, before, captured(member, 15).snapshot, 100, 15)
    assert bench.did == [("replaced", before, 15)] and member.segments == [SegmentRun(1, 20, 3)]
    assert (member.snapshot_index, member.compactable, member.flushed) == (15, 15, 20)


def test_a_log_that_starts_over_says_so_in_the_wal_and_keeps_only_where_old_payloads_are() -> None:
    bench, member = Bench(), member_of()
    member.segments = [SegmentRun(1, 8, 3), SegmentRun(9, 20, 4)]
    member.flush_through(20)
    member.raft.log.reset(50, 6)
    before: Any = object()
    bench.checkpoints.installed(member, before, captured(member, 50).snapshot, 100, 12)
    replaced, cut, shed, *marks, state = bench.did
    assert (replaced, cut, shed, state) == (("replaced", before, 50), ("cut", 12), ("shed", 50), "hard state")
    items = [item for _, item in marks]
    assert all(isinstance(item, WalItem) and item.uid == UID for item in items)
    assert [item.truncate for item in items] == [50, 51], "the first is void by itself: an overwritten log has one"
    assert member.segments == [SegmentRun(1, 8, 3), SegmentRun(9, 12, 4)]
    assert member.flushed == 50, "what it flushed of the log before says nothing of this one"


def test_a_log_that_starts_over_has_nothing_in_its_ring_and_the_stored_row_may_still_name_it() -> None:
    bench, member = Bench(), member_of()
    member.ring = [RingRun(1, 30, 1), RingRun(40, 60, 1)]
    member.raft.log.reset(50, 6)
    bench.checkpoints.installed(member, cast(Any, object()), captured(member, 50).snapshot, 100, 12)
    assert member.ring_runs == [] and member.ring == [RingRun(1, 30, 1), RingRun(40, 50, 1)]
    member.free_ring(50)
    assert member.ring == []


def test_a_checkpoint_names_what_the_ring_has_of_the_log_alone() -> None:
    member = member_of()
    member.raft = make(terms=[TERM] * 20)
    _, value = rows.state(member)
    assert value is not None and "ring" not in StateRow.unpack(rows.state(member)[0], value).extra
    member.add_segment(None, [RingRun(1, 8, TERM), RingRun(9, 12, TERM)])
    assert (member.ring, member.flushed) == ([RingRun(1, 12, TERM)], 12)
    member.raft.log.compact(5, TERM)
    _, value = rows.state(member)
    assert value is not None and StateRow.unpack(rows.state(member)[0], value).ring == [RingRun(6, 12, TERM)]
    member.add_segment(SegmentRun(9, 14, 3), [RingRun(10, 13, TERM)])
    assert member.ring == [RingRun(1, 8, TERM), RingRun(10, 13, TERM)], "what is newer overrides what was said"
    assert (member.segments, member.flushed) == ([SegmentRun(9, 14, 3)], 14)


def test_a_checkpoint_names_the_term_of_each_configuration_that_may_still_be_overwritten() -> None:
    """By it a restart tells whether the log that it finds is the one that held it."""
    member = member_of()
    core = member.raft = make(terms=[TERM] * 3)
    later = Configuration((1, 2))
    core.log.push(build_plain(4, TERM, CONFIGURATION, 0, later.encode()))
    adopt(core, 4, later)
    key, value = rows.state(member)
    assert value is not None
    row = StateRow.unpack(key, value)
    assert row.extra["configurations"] == [[0, 0, Configuration((1, 2, 3)).encode()], [4, TERM, later.encode()]]


def test_a_group_moves_out_of_its_segments() -> None:
    bench, member = Bench(), member_of()
    member.segments = [SegmentRun(1, 8, 3), SegmentRun(9, 20, 4)]
    member.covered(20, TERM, 100)
    bench.checkpoints.move_out(member)
    assert member.segments == [] and member.raft.log.snapshot_index == 20
    assert bench.did == [("shed", 20), ("leave", 3), ("leave", 4)]
    bench.checkpoints.move_out(member)
    assert len(bench.did) == 3, "twice is once"


class Due:
    """Snapshots that are due each 100 entries."""

    def __init__(self) -> None:
        self.full = False
        self.taken: list[list[int]] = []
        self.members = {uid: member_of(uid) for uid in (1, 2, 3)}
        self.due = DueSnapshots(self.members, 100, 20, lambda: self.full, self.take)

    async def take(self, members: Sequence[Member]) -> None:
        self.taken.append([one.uid for one in members])

    def ahead(self, uid: int, entries: int) -> None:
        member: Any = self.members[uid]
        member.raft.applied = member.compactable + entries


async def test_a_snapshot_is_due_so_many_entries_after_what_the_log_may_go_to() -> None:
    rig = Due()
    await rig.due.run()
    rig.ahead(1, 99)
    rig.ahead(2, 100)
    rig.members[3].need_log_above(50)
    rig.ahead(3, 150)
    await rig.due.run()
    assert rig.taken == [[2, 3]]
    rig.members[3].state = HALTED
    await rig.due.run()
    assert rig.taken[1:] == [[2]]


@pytest.mark.parametrize("full", [True, False])
async def test_a_full_disk_has_them_taken_sooner(full: bool) -> None:
    rig = Due()
    rig.full = full
    for uid, entries in ((1, FULL_ENTRIES - 1), (2, FULL_ENTRIES)):
        rig.ahead(uid, entries)
    await rig.due.run()
    assert rig.taken == ([[2]] if full else [])

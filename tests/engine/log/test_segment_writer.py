"""The way from a sealed WAL file to its segment, alone: durable, switched, committed; what a failure leaves of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from logyard.engine.jobs import Jobs
from logyard.engine.log.liveness_accounting import Present
from logyard.engine.log.location import Location, SealedFile, Share, Unflushed
from logyard.engine.log.meta_rows import RingRun, SegmentRun
from logyard.engine.log.segment_files import Flushed
from logyard.engine.log.segment_writer import SegmentWriter
from logyard.engine.log.wal import Sealed
from logyard.engine.replica.member import Member
from logyard.protocol.errors import Busy, Corrupt, JobFailed, NoSpace

from ..quiesce.doubles import LAST, member_of


class Bench:
    """A writer, and what it had others do, in order. `found` says which groups a file speaks of, `present` of which it
    is the log's content; `fails` what a step raises, once."""

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.stored_files: list[int] = []
        self.members: dict[int, Member] = {}
        self.found: list[int] = []
        self.present_of: list[int] = []
        self.ring: dict[int, list[RingRun]] = {}
        self.left: set[int] = set()
        self.users: dict[int, set[int]] = {}
        self.fails: dict[str, Exception] = {}
        self.jobs = Jobs(lambda: 0.0)
        self.meanwhile: Callable[[], None] = lambda: None
        self.asked: list[list[int]] = []
        self.between: Callable[[], None] = lambda: None
        wal: Any = SimpleNamespace(current=100, current_entries=[])
        self.unflushed = Unflushed(wal)
        self.location = Location(cast(Any, None), self.unflushed, 10.0)
        self.writer = SegmentWriter(
            self.members, self.unflushed, cast(Any, self), cast(Any, self), self.location, cast(Any, self),
            cast(Any, self), self.jobs, self.adopted,
        )  # fmt: skip

    def may(self, what: str) -> None:
        if what in self.fails:
            raise self.fails.pop(what)

    def group(self, uid: int) -> Member:
        self.members[uid] = member_of(set(), uid)
        return self.members[uid]

    def seal(self, *files: int) -> None:
        self.unflushed.add([Sealed(file, file, 1 << 20, []) for file in files])

    # What the writer asks of others

    async def out_of_reserve(self, what: str, job: Callable[[], Awaitable[Any]]) -> Any:
        return await job()

    async def write(self, sealed: Sealed) -> Flushed:
        self.may("write")
        self.did.append(("write", sealed.file))
        self.meanwhile()
        ring = {self.members[uid]: runs for uid, runs in self.ring.items()}
        return Flushed({uid: (1, 10, 1, 500) for uid in self.found}, ring)

    async def write_anew(self, sealed: Sealed) -> None:
        self.did.append(("anew", sealed.file))

    def raise_floors(self, uids: Iterable[int]) -> None:
        if found := sorted(uids):
            self.did.append(("floors", found))

    def present(self, number: int, found: Any) -> list[Present]:
        self.may("present")
        self.asked.append(sorted(found))
        self.between()
        return [
            Present(self.members[uid], SegmentRun(1, 10, number), Share(1, 10, 300), 500)
            for uid in self.present_of
            if uid in found and uid in self.members
        ]

    def is_left(self, member: Member) -> bool:
        return member.uid in self.left

    def adopt(self, number: int, users: set[int]) -> None:
        self.may("adopt")
        self.did.append(("adopt", number))
        self.users[number] = users

    def stored(self, number: int) -> None:
        assert self.did[-1][0] == "commit", "not before"
        self.stored_files.append(number)

    async def commit_members(self, members: Iterable[Member], sealed_files: Sequence[SealedFile] = ()) -> None:
        self.may("commit")
        self.did.append(("commit", sorted(one.uid for one in members), [one.file for one in sealed_files]))

    async def adopted(self, sealed: Sealed, file: SealedFile, members: Collection[Member]) -> None:
        self.may("adopted")
        self.did.append(("adopted", sealed.file, file.live, sorted(one.uid for one in members)))

    @property
    def committed(self) -> list[list[int]]:
        return [step[1] for step in self.did if step[0] == "commit"]


async def test_a_segment_is_durable_then_switched_to_then_committed() -> None:
    bench = Bench()
    member = bench.group(1)
    bench.found = bench.present_of = [1]
    bench.seal(7)
    await bench.writer.run()
    assert bench.did == [("write", 7), ("adopt", 7), ("commit", [1], [7]), ("adopted", 7, 300, [1])]
    assert member.segments == [SegmentRun(1, 10, 7)] and member.flushed == 10 and bench.users == {7: {1}}
    file = bench.location.files[7]
    assert (file.live, file.total, file.length) == (300, 500, 1 << 20)
    assert not bench.unflushed.backlog_files and not bench.unflushed.is_open(7)


async def test_slots_of_a_ring_are_switched_to_and_committed_with_the_floor_that_their_payloads_need() -> None:
    bench = Bench()
    one, two, three = bench.group(1), bench.group(2), bench.group(3)
    # Of one all is in its ring, of another a part, and what was written of the third was overwritten meanwhile.
    bench.ring = {1: [RingRun(1, 9, 1)], 2: [RingRun(1, 3, 1), RingRun(11, 12, 1)], 3: []}
    bench.found = bench.present_of = [2]
    bench.seal(7)
    await bench.writer.run()
    assert bench.did == [("write", 7), ("adopt", 7), ("floors", [1, 2, 3]), ("commit", [1, 2, 3], [7]), bench.did[-1]]
    assert (one.ring, one.segments, one.flushed) == ([RingRun(LAST + 1, 9, 1)], [], 9)
    assert (two.ring, two.flushed) == ([RingRun(11, 12, 1)], 12), "of what is below the log no row names anything"
    assert two.segments == [SegmentRun(1, 10, 7)] and not three.ring and bench.users == {7: {2}}


async def test_what_a_row_named_of_a_ring_is_free_when_the_next_row_is_stored() -> None:
    bench = Bench()
    member = bench.group(1)
    member.ring = [RingRun(1, LAST + 2, 1)]
    bench.ring = {1: [RingRun(LAST + 3, LAST + 4, 1)]}
    bench.seal(7)
    bench.fails["commit"] = NoSpace("full")
    with pytest.raises(NoSpace):
        await bench.writer.run()
    assert member.ring == [RingRun(1, LAST + 4, 1)], "the log begins above its snapshot, and no row says so yet"
    bench.ring = {}
    bench.writer.hard_state_written(member)
    await bench.writer.run()
    assert member.ring == [RingRun(LAST + 1, LAST + 4, 1)]


async def test_nothing_to_write_is_no_work_and_many_files_go_oldest_first() -> None:
    bench = Bench()
    await bench.writer.run()
    assert not bench.did
    bench.seal(7, 8)
    bench.seal(6)
    await bench.writer.run()
    assert [step[1] for step in bench.did if step[0] == "write"] == [6, 7, 8]


async def test_a_file_without_any_content_of_a_log_is_a_home_of_nobody() -> None:
    bench = Bench()
    bench.found = [1, 2]
    bench.group(1)
    bench.seal(7)
    await bench.writer.run()
    assert bench.users == {7: set()} and not bench.location.files[7].shares
    assert bench.committed == [[1]], "its truncations and floors are in the file; group 2 went"


async def test_what_a_damaged_member_has_here_is_kept_and_not_said() -> None:
    bench = Bench()
    bench.group(1).quarantine("a test")
    bench.group(2)
    bench.found = [1, 2]
    bench.left = {1}
    bench.seal(7)
    await bench.writer.run()
    assert bench.location.files[7].kept and bench.users == {7: {1}} and bench.committed == [[2]]


async def test_hard_states_in_the_file_are_stored_with_it_once() -> None:
    bench = Bench()
    known, forgotten, late = bench.group(1), bench.group(2), bench.group(4)
    rebuilt = bench.group(3)
    for member in (known, forgotten, rebuilt):
        bench.writer.hard_state_written(member)
    bench.writer.forget(forgotten)
    bench.group(3)  # Another object stands for it now; what it knew is stored.
    bench.meanwhile = lambda: bench.writer.hard_state_written(late)
    bench.seal(7)
    await bench.writer.run()
    bench.meanwhile = lambda: None
    bench.seal(8, 9)
    await bench.writer.run()
    assert bench.committed == [[1], [4], []], "what was written meanwhile is in the next file"


@pytest.mark.parametrize("step", ["write", "present", "commit"])
async def test_a_flush_that_failed_is_done_again_with_all_it_says(step: str) -> None:
    bench = Bench()
    member = bench.group(1)
    bench.writer.hard_state_written(bench.group(2))
    bench.found = bench.present_of = [1]
    bench.seal(7, 8)
    bench.fails[step] = NoSpace("full") if step != "present" else Corrupt("a file", 0, "this", "that")
    with pytest.raises((NoSpace, Corrupt)):
        await bench.writer.run()
    assert bench.unflushed.backlog_files == 2 and bench.unflushed.is_open(7)
    assert bool(member.segments) == (step == "commit") and not bench.jobs.frozen
    bench.did.clear()
    await bench.writer.run()
    # What was switched to is gone by: readers have it open, logs and rows of other commits name what is in it.
    assert [step[1] for step in bench.did if step[0] == "write"] == ([8] if step == "commit" else [7, 8])
    assert bench.committed[0] == [1, 2] and member.segments[-1].segment == 8
    file = bench.location.files[7]
    assert (file.live, file.total) == (300, 500), "as if it had been adopted once"
    assert bench.stored_files == [7, 8]


async def test_a_segment_that_is_stored_is_not_flushed_again_whatever_becomes_of_what_follows() -> None:
    bench = Bench()
    bench.group(1)
    bench.found = bench.present_of = [1]
    bench.seal(7, 8)
    bench.fails["adopted"] = NoSpace("full")
    with pytest.raises(NoSpace):
        await bench.writer.run()
    assert not bench.unflushed.is_open(7) and bench.unflushed.is_open(8)
    await bench.writer.run()
    assert [step[1] for step in bench.did if step[0] == "write"] == [7, 8]
    assert [step[2] for step in bench.did if step[0] == "commit"] == [[7], [8]]


async def test_whom_a_file_speaks_of_may_be_another_object_when_it_is_stored() -> None:
    bench = Bench()
    bench.group(1)
    bench.group(2)
    bench.found = bench.present_of = [1, 2]
    bench.seal(7)
    bench.fails["commit"] = NoSpace("full")
    with pytest.raises(NoSpace):
        await bench.writer.run()
    again = bench.group(1)
    del bench.members[2]
    await bench.writer.run()
    assert bench.committed == [[1]] and bench.did[-1] == ("adopted", 7, 600, [1]) and not again.segments


async def test_what_a_switch_left_half_adopted_is_not_adopted_once_more() -> None:
    bench = Bench()
    bench.group(1)
    bench.found = bench.present_of = [1]
    bench.seal(7)
    bench.fails["adopt"] = KeyError("a defect")
    with pytest.raises(JobFailed):
        await bench.writer.run()
    assert bench.jobs.frozen and not bench.committed and bench.unflushed.is_open(7)
    bench.did.clear()
    bench.seal(8)
    await bench.writer.run()
    assert not bench.did, "until a restart reads both files anew"


def many(bench: Bench, count: int, step: int) -> list[Member]:
    """So many groups, all in file 7, of which `step` go by its segment at once."""
    bench.writer.groups_per_step = step
    bench.found = bench.present_of = list(range(1, count + 1))
    bench.seal(7)
    return [bench.group(uid) for uid in bench.found]


async def test_many_groups_go_by_a_segment_in_steps_and_the_last_commit_names_the_file() -> None:
    bench = Bench()
    members = many(bench, 5, 2)
    seen: list[tuple[list[int], int]] = []

    def look() -> None:
        file = bench.location.files.get(7)
        seen.append(([one.uid for one in members if one.segments], file.live if file is not None else -1))
        assert bench.unflushed.is_open(7) and not bench.stored_files

    bench.between = look
    await bench.writer.run()
    assert seen == [([], -1), ([1, 2], 600), ([1, 2, 3, 4], 1200)]
    assert bench.asked == [[1, 2], [3, 4], [5]]
    assert [step for step in bench.did if step[0] != "adopted"] == [
        ("write", 7), ("adopt", 7), ("commit", [1, 2], []), ("commit", [3, 4], []), ("commit", [5], [7])
    ]  # fmt: skip
    assert bench.did[-1] == ("adopted", 7, 1500, [1, 2, 3, 4, 5]) and bench.users == {7: {1, 2, 3, 4, 5}}


async def test_others_run_between_two_steps() -> None:
    bench = Bench()
    many(bench, 6, 1)
    turns: list[int] = []

    async def other() -> None:
        while bench.unflushed.is_open(7):
            turns.append(len(bench.asked))
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        nursery.start_soon(bench.writer.run)
    # Of two tasks either is first in a round of the loop.
    assert len(bench.asked) == 6 and all(later - before <= 2 for before, later in pairwise([0, *turns, 6]))


async def test_who_goes_between_two_steps_has_nothing_in_the_segment() -> None:
    bench = Bench()
    members = many(bench, 4, 2)

    def go() -> None:
        if len(bench.asked) == 2:
            # One whom the first step met, and one whom the second one is to meet.
            del bench.members[1], bench.members[3]

    bench.between = go
    await bench.writer.run()
    assert bench.committed == [[2], [4]] and not members[2].segments
    assert bench.users == {7: {1, 2, 4}}, "whoever has one of a segment go says so itself"


async def test_a_step_that_finds_no_descriptor_is_taken_later_and_none_twice() -> None:
    bench = Bench()
    members = many(bench, 5, 2)

    def busy() -> None:
        if len(bench.asked) == 2:
            raise Busy("no descriptor", 0.1)

    bench.between = busy
    with pytest.raises(Busy):
        await bench.writer.run()
    assert [bool(one.segments) for one in members] == [True, True, False, False, False]
    assert bench.unflushed.is_open(7) and not bench.jobs.frozen and not bench.committed
    bench.between = lambda: None
    await bench.writer.run()
    assert bench.asked == [[1, 2], [3, 4], [3, 4], [5]]
    assert [step[1] for step in bench.did if step[0] == "write"] == [7]
    file = bench.location.files[7]
    assert (file.live, file.total) == (1500, 2500) and bench.stored_files == [7]


async def test_what_a_later_step_can_not_read_is_written_anew_and_none_is_taken_twice() -> None:
    bench = Bench()
    many(bench, 5, 2)

    def damaged() -> None:
        if len(bench.asked) in (2, 3):
            raise Corrupt("a file", 0, "this", "that")

    bench.between = damaged
    for anew in ([], ["anew"]):
        with pytest.raises(Corrupt):
            await bench.writer.run()
        assert [step[0] for step in bench.did] == ["write", "adopt", *anew] and not bench.jobs.frozen
    await bench.writer.run()
    assert bench.asked == [[1, 2], [3, 4], [3, 4], [3, 4], [5]] and bench.stored_files == [7]
    assert [step[0] for step in bench.did[:4]] == ["write", "adopt", "anew", "anew"]
    assert (bench.location.files[7].live, bench.location.files[7].total) == (1500, 2500)


async def test_a_log_that_is_made_anew_between_two_steps_has_nothing_in_the_segment() -> None:
    bench = Bench()
    many(bench, 4, 2)

    def rebuild() -> None:
        if len(bench.asked) == 1:
            bench.group(1)
            bench.group(3)

    bench.between = rebuild
    await bench.writer.run()
    assert bench.asked == [[1, 2], [4]] and not bench.members[3].segments
    assert bench.committed == [[1, 2], [3, 4]], "their rows are stored with the others"


async def test_what_rings_took_is_in_logs_before_anybody_else_has_a_turn() -> None:
    bench = Bench()
    members = many(bench, 4, 1)
    ringed = [bench.group(5), members[2], members[3]]
    bench.ring = {one.uid: [RingRun(LAST + 1, LAST + 2, 1)] for one in ringed}
    seen: list[list[int]] = []
    bench.between = lambda: seen.append([one.uid for one in ringed if one.ring])
    await bench.writer.run()
    assert bench.asked == [[1, 3, 4], [2]], "as many as there are rings, those with rings among them"
    assert seen == [[], [5, 3, 4]]


async def test_rows_of_which_some_could_not_be_stored_are_stored_anew() -> None:
    bench = Bench()
    many(bench, 5, 2)
    commit = bench.commit_members
    calls = 0

    async def second_fails(members: Iterable[Member], sealed_files: Sequence[SealedFile] = ()) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise NoSpace("full")
        await commit(members, sealed_files)

    bench.commit_members = second_fails  # type: ignore[method-assign]
    with pytest.raises(NoSpace):
        await bench.writer.run()
    assert bench.unflushed.is_open(7) and not bench.stored_files
    await bench.writer.run()
    assert bench.committed == [[1, 2], [1, 2], [3, 4], [5]] and bench.stored_files == [7]
    assert bench.location.files[7].total == 2500

"""Counters of what lives in sealed files, alone: after any release they say what counting anew would say.

A file that counts as fuller than it is costs space; one that counts as emptier is given up with what lives in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from errno import EIO
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from logyard.engine.disk.door import unreadable
from logyard.engine.entry import NOOP, Entry, build_commands, build_plain, records_in, units_of
from logyard.engine.log import liveness_accounting
from logyard.engine.log.liveness_accounting import LivenessAccounting, Recount
from logyard.engine.log.location import SealedFile, Share
from logyard.engine.log.meta_rows import SegmentRun
from logyard.engine.machine import PayloadRange, Position
from logyard.engine.raft.configuration import Configuration
from logyard.payloads.liveness import Liveness
from logyard.protocol.errors import Busy, Corrupt
from logyard.protocol.frame import encode_frame

UID, TERM, RECORDS = 9, 4, 3
MISSING = Corrupt("a segment", 0, "this", "that")
SHORT = Busy("descriptors", 2.0)


def entry(index: int, records: int = RECORDS, term: int = TERM) -> Entry:
    """An entry as a segment has it: of one frame, whose payload grows with its index."""
    frame = memoryview(b"".join(encode_frame([(b"", bytes(10 + index))] * records, command=b"put")))
    made = build_commands(UID, index, term, 0, [frame])
    return Entry(index, term, made.kind, made.data, None, made.body_bytes)


class Home(NamedTuple):
    first: int
    last: int
    generation: int = 1


class Segment:
    """A segment's rows; `error` is raised instead of them."""

    def __init__(self, entries: list[Entry]) -> None:
        self.rows = {one.index: one for one in entries}
        self.error: Exception | None = None
        self.reads = 0

    def entries(self, uid: int, low: int, high: int, bytes_max: int = 0) -> list[Entry]:
        """Two at a time: who wants more asks again."""
        self.reads += 1
        if self.error is not None:
            raise self.error
        return [self.rows[at] for at in range(low, high + 1) if at in self.rows][: 2 if bytes_max else None]


class Bench:
    """One group with entries 1 to 10 in file 1, 11 to 20 in file 2, `records` each; nothing is dead."""

    def __init__(self, records: int = RECORDS) -> None:
        self.marked: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self.homes: list[Home] = []
        self.lost: list[tuple[int, int]] = []
        self.dropped: list[tuple[SegmentRun, int]] = []
        self.uncounted: list[float] = []
        self.unsealed: list[tuple[int, Entry]] = []
        self.opened: Exception | None = None
        self.segments = {
            number: Segment([entry(at, records) for at in range(10 * number - 9, 10 * number + 1)])
            for number in (1, 2)
        }  # fmt: skip
        self.liveness = Liveness()
        log = SimpleNamespace(last_index=20, snapshot_index=0, term=lambda index: TERM, compact=self.compact)
        member = SimpleNamespace(
            uid=UID, damaged=False, snapshot_index=0, snapshot_term=TERM, liveness=self.liveness,
            segments=[SegmentRun(1, 10, 1), SegmentRun(11, 20, 2)],
            raft=SimpleNamespace(log=log, configuration=Configuration((1, 2))),
            is_dead=lambda one: self.liveness.is_dead_range((one.index, 0), (one.index, records_in(one.data))),
        )  # fmt: skip
        self.member: Any = cast(Any, member)
        store: Any = SimpleNamespace(
            home=self.home, homes=lambda uid: self.homes, lost=lambda uid, first, last: bool(self.lost),
            mark_dead=lambda uid, first, end: self.marked.append((first, end)),
        )  # fmt: skip
        self.files = {1: SealedFile(1, 1 << 20), 2: SealedFile(2, 1 << 20)}
        location: Any = SimpleNamespace(files=self.files, unsealed=lambda: iter(self.unsealed))
        segments: Any = SimpleNamespace(
            reader=self.reader, drop_below=lambda member, run, base: self.dropped.append((run, base))
        )
        self.accounting = LivenessAccounting(
            {UID: self.member}, store, location, segments, self.payload_entries,
            lambda uid, first, last: self.lost.append((first, last)),
            lambda member, seconds: self.uncounted.append(seconds),
        )  # fmt: skip
        for run in self.member.segments:
            self.accounting.book(self.member, self.files[run.segment], run)

    def reader(self, number: int) -> Segment:
        if self.opened is not None:
            raise self.opened
        return self.segments[number]

    def compact(self, index: int, term: int) -> None:
        self.member.raft.log.snapshot_index = index

    def home(self, uid: int, index: int) -> Home | None:
        return next((one for one in self.homes if one.first <= index <= one.last), None)

    def payload_entries(self, member: Any, first: int, last: int) -> Iterator[Any]:
        return iter([one for segment in self.segments.values() if (one := segment.rows.get(first)) is not None])

    def release(self, first: tuple[int, int], end: tuple[int, int]) -> None:
        """As the member does, and then says of what died."""
        died = self.liveness.live_within(first, end)
        self.liveness.release(first, end)
        self.accounting.released(self.member, died)

    def live(self, number: int, *without: int) -> int:
        """What lives in a file, by looking at every entry."""
        return sum(
            one.body_bytes
            for one in self.segments[number].rows.values()
            if not self.member.is_dead(one) and self.home(UID, one.index) is None and one.index not in without
        )

    def check(self) -> None:
        for number, file in self.files.items():
            share = file.shares.get(UID)
            assert file.live == (share.live if share is not None else 0) == self.live(number), number


# Releases


def test_a_release_of_a_whole_share_reads_nothing() -> None:
    bench = Bench()
    bench.check()
    bench.segments[1].reads = bench.segments[2].reads = 0
    bench.release((1, 0), (11, 0))
    bench.check()
    assert bench.files[1].live == 0 and not bench.files[1].shares and bench.files[2].live
    assert bench.segments[1].reads == bench.segments[2].reads == 0


def test_a_release_that_ends_inside_a_share_takes_exactly_that() -> None:
    bench = Bench()
    bench.release((1, 0), (4, 0))
    bench.check()
    bench.release((1, 0), (14, 2))
    bench.check()
    assert not bench.files[1].shares and bench.files[2].live == bench.live(2)


def test_an_entry_is_dead_with_its_last_record_and_not_before() -> None:
    bench = Bench()
    size = bench.files[1].live
    for ordinal in (1, 0):
        bench.release((5, ordinal), (5, ordinal + 1))
        assert bench.files[1].live == size
    bench.release((5, 2), (5, 3))
    bench.check()
    assert bench.files[1].live == size - bench.segments[1].rows[5].body_bytes
    # Behind the last record there never was anything: nothing more dies.
    bench.release((5, 3), (6, 0))
    bench.check()


def test_an_entry_that_dies_in_two_parts_is_taken_out_once() -> None:
    """What a release finds on both sides of a record that was dead took the whole entry twice: a file counted as empty
    while something in it lived, and was given up with it."""
    bench = Bench()
    for index in range(1, 6):
        bench.release((index, 1), (index, 2))
    bench.release((1, 0), (6, 0))
    bench.check()
    assert bench.files[1].live == sum(bench.segments[1].rows[index].body_bytes for index in range(6, 11))


def test_what_died_with_a_snapshot_is_taken_out_once() -> None:
    bench = Bench()
    before = bench.liveness
    before.release((5, 1), (5, 2))
    bench.liveness = bench.member.liveness = Liveness()
    for first, end in [((1, 0), (3, 1)), ((5, 0), (6, 0)), ((12, 1), (13, 0))]:
        bench.liveness.release(first, end)
    bench.accounting.replaced(bench.member, before, 15)
    bench.check()


def test_what_died_of_nobody_here_changes_no_file() -> None:
    bench = Bench()
    size = bench.files[1].live, bench.files[2].live
    bench.accounting.released(bench.member, [])
    bench.liveness.release((25, 0), (30, 0))
    bench.accounting.released(bench.member, [PayloadRange(Position(25, 0), Position(30, 0))])
    assert size == (bench.files[1].live, bench.files[2].live)
    bench.files[1].remove(UID)
    bench.liveness.release((1, 0), (5, 0))
    bench.accounting.released(bench.member, [PayloadRange(Position(1, 0), Position(5, 0))])
    assert not bench.files[1].live, "what has no share here does not die here"


def test_what_has_a_home_elsewhere_and_tombstones_do_not_die_here() -> None:
    bench = Bench()
    bench.homes = [Home(3, 4)]
    bench.segments[1].rows[5].tombstone = 2
    bench.accounting.recount(bench.member)
    size = bench.files[1].live
    bench.release((3, 0), (6, 0))
    assert bench.files[1].live == size
    bench.release((6, 0), (7, 0))
    assert bench.files[1].live == size - bench.segments[1].rows[6].body_bytes


def test_every_copy_hears_what_died_of_it_whole_and_of_its_parts() -> None:
    bench = Bench()
    bench.release((2, 0), (5, 1))
    assert bench.marked == [((2, 0), (5, 0))], "of entry 5 one unit has all records, and two of them live"
    bench.marked.clear()
    bench.release((5, 1), (6, 0))
    assert bench.marked == [((5, 0), (6, 0))]


releases = st.tuples(st.integers(1, 22), st.integers(0, RECORDS + 1), st.integers(1, 22), st.integers(0, RECORDS + 1))


@given(st.lists(releases, max_size=12))
def test_counters_are_what_counting_anew_would_say(found: list[tuple[int, int, int, int]]) -> None:
    bench = Bench()
    for index, ordinal, last, end in found:
        first, stop = sorted([(index, ordinal), (last, end)])
        if first < stop:
            bench.release(first, stop)
            bench.check()
    before = {number: file.live for number, file in bench.files.items()}
    bench.accounting.recount(bench.member)
    assert before == {number: file.live for number, file in bench.files.items()}


# What can't be read


def test_for_want_of_descriptors_a_file_counts_as_fuller_and_the_copies_still_hear_of_it() -> None:
    bench = Bench()
    size = bench.files[1].live
    bench.opened = SHORT
    bench.release((1, 0), (4, 0))
    assert bench.files[1].live == size and bench.uncounted == [2.0] and bench.marked == [((1, 0), (4, 0))]
    with pytest.raises(Busy):
        bench.accounting.recount(bench.member)
    assert bench.files[1].live == size, "nothing changed"
    bench.opened = None
    bench.accounting.recount(bench.member)
    bench.check()


@pytest.mark.parametrize("damaged", [1, 2])
def test_counting_that_meets_damage_leaves_the_books_as_they_are(damaged: int) -> None:
    """A file of which nothing counts as living is given to the stock."""
    bench = Bench()
    bench.segments[damaged].error = MISSING
    before = {number: (file.live, file.shares[UID]) for number, file in bench.files.items()}
    with pytest.raises(Corrupt):
        bench.accounting.recount(bench.member)
    assert {number: (file.live, file.shares.get(UID)) for number, file in bench.files.items()} == before


@pytest.mark.parametrize(("snapshot", "lost", "counted"), [(10, [(1, 10)], 0), (30, [(1, 10)], 0), (4, [(1, 4)], 6)])
def test_places_that_the_snapshot_covers_are_lost_when_they_can_not_be_read(
    snapshot: int, lost: list[tuple[int, int]], counted: int
) -> None:
    bench = Bench()
    bench.member.snapshot_index = snapshot
    rows, file, run = bench.segments[1].rows, SealedFile(3, 100), bench.member.segments[0]

    def damaged(uid: int, low: int, high: int, bytes_max: int = 0) -> list[Entry]:
        if low <= min(snapshot, 10):
            raise MISSING
        return [rows[at] for at in range(low, high + 1)]

    bench.segments[1].entries = damaged  # type: ignore[method-assign]
    bench.accounting.book(bench.member, file, run)
    assert bench.lost == lost and bench.dropped == [(run, snapshot)]
    assert bench.member.raft.log.snapshot_index == snapshot, "the log has nothing below it any more"
    assert file.live == file.total == sum(rows[at].body_bytes for at in range(11 - counted, 11))


def test_what_nobody_else_has_is_not_given_up_because_the_disk_can_not_read_it_now() -> None:
    bench = Bench()
    bench.member.snapshot_index = 30
    bench.member.raft.configuration = Configuration((1,))
    cause = OSError(EIO, "it can't be read")
    bench.segments[1].error = unreadable("a segment", 0, "56 readable bytes", cause)
    bench.segments[1].error.__cause__ = cause
    with pytest.raises(Corrupt):
        bench.accounting.book(bench.member, SealedFile(3, 100), bench.member.segments[0])
    assert not bench.lost and not bench.dropped


@pytest.mark.parametrize("error", [MISSING, SHORT], ids=["damage", "descriptors"])
def test_above_the_snapshot_nothing_is_lost_and_a_want_of_descriptors_is_no_damage(error: Exception) -> None:
    bench = Bench()
    bench.member.snapshot_index = 0 if error is MISSING else 30
    bench.segments[1].error = error
    with pytest.raises(type(error)):
        bench.accounting.book(bench.member, SealedFile(3, 100), bench.member.segments[0])
    assert not bench.lost and not bench.dropped


@pytest.mark.parametrize("index", [1, 10])
def test_what_a_segment_has_no_row_of_is_not_counted(index: int) -> None:
    """Where the row may be damaged, its reader says so."""
    bench = Bench()
    del bench.segments[1].rows[index]
    bench.accounting.recount(bench.member)
    bench.check()


# Other ends of a share


def test_what_is_overwritten_is_cut_and_a_file_that_can_not_be_read_is_counted_later() -> None:
    bench = Bench()
    bench.release((13, 0), (15, 0))
    bench.accounting.cut(bench.member, 16)
    lives = [at for at in range(11, 17) if not bench.member.is_dead(bench.segments[2].rows[at])]
    assert bench.files[2].live == sum(bench.segments[2].rows[at].body_bytes for at in lives)
    assert bench.files[2].shares[UID].last == 16 and bench.files[1].live == bench.live(1)
    bench.opened = SHORT
    bench.accounting.cut(bench.member, 12)
    assert bench.uncounted == [2.0] and bench.files[2].shares[UID].last == 12
    bench.accounting.cut(bench.member, 10)
    assert not bench.files[2].shares and bench.files[2].live == 0


def test_what_goes_to_a_generation_leaves_its_file_once() -> None:
    bench = Bench()
    bench.release((4, 0), (5, 0))
    before, bench.homes = [Home(2, 3)], [Home(2, 3)]
    bench.accounting.recount(bench.member)
    bench.accounting.rehomed(bench.member, 2, 12, before)
    bench.homes = [Home(2, 12)]
    bench.check()
    size = bench.files[1].live
    bench.accounting.rehomed(bench.member, 2, 12, bench.homes)
    assert bench.files[1].live == size


def test_damage_on_the_way_to_a_generation_is_counted_anew_at_once() -> None:
    bench = Bench()
    size = bench.files[1].live
    bench.segments[1].error = MISSING
    bench.accounting.rehomed(bench.member, 2, 12, [])
    assert bench.uncounted == [0.0] and bench.files[1].live == size
    assert bench.files[2].live == bench.live(2, 11, 12), "the other file is none the worse for it"


def test_who_goes_has_nothing_that_lives() -> None:
    bench = Bench()
    bench.accounting.forget(bench.member)
    bench.accounting.forget(bench.member)
    assert [file.live for file in bench.files.values()] == [0, 0]


def test_segments_are_opened_before_anything_changes() -> None:
    bench = Bench()
    bench.accounting.open_segments(bench.member, [(21, 30)])
    bench.opened = SHORT
    bench.accounting.open_segments(bench.member, [(21, 30)])
    with pytest.raises(Busy):
        bench.accounting.open_segments(bench.member, [(21, 30), (20, 25)])


def test_the_copies_hear_of_what_died_while_they_were_made() -> None:
    bench = Bench()
    bench.accounting.settle(bench.member, 1, 9)
    assert not bench.marked
    for first, end in [((2, 0), (4, 0)), ((8, 0), (12, 0))]:
        bench.liveness.release(first, end)
    bench.accounting.settle(bench.member, 3, 9)
    assert bench.marked == [((3, 0), (4, 0)), ((8, 0), (10, 0))]


# New segments


def found_in(bench: Bench, first: int = 1, last: int = 10, term: int = TERM) -> list[Any]:
    size = sum(bench.segments[1].rows[at].body_bytes for at in range(first, last + 1))
    return bench.accounting.present(1, {UID: (first, last, term, size), 1234: (1, 2, 1, 100)})


def test_a_new_segment_is_the_content_of_a_log() -> None:
    bench = Bench()
    ((member, run, share, size),) = found_in(bench)
    assert member is bench.member and run == SegmentRun(1, 10, 1)
    assert (share.first, share.last, share.live) == (1, 10, size) and size == bench.live(1)
    bench.member.damaged = True
    assert not found_in(bench)


def test_of_a_new_segment_what_died_before_it_was_booked_does_not_count() -> None:
    bench = Bench()
    bench.liveness.release((3, 0), (5, 0))
    ((_, _, share, size),) = found_in(bench)
    assert share.live == bench.live(1) < size
    bench.homes = [Home(8, 9)]
    ((_, _, share, size),) = found_in(bench)
    assert share.live == bench.live(1)
    bench.liveness.release((1, 0), (11, 0))
    assert found_in(bench)[0].share.live == 0


@pytest.mark.parametrize(("start", "term", "run"), [(4, TERM, (5, 10)), (0, 5, (1, 6)), (4, 5, (5, 6)), (6, 5, None)])
def test_of_a_new_segment_only_what_the_log_still_says_counts(
    start: int, term: int, run: tuple[int, int] | None
) -> None:
    """The snapshot is at `start`; from entry 7 on the log has another `term`."""
    bench = Bench()
    bench.member.raft.log.snapshot_index = start
    bench.member.raft.log.term = lambda index: term if index > 6 else TERM
    found = found_in(bench)
    assert [(one.run.first, one.run.last) for one in found] == ([run] if run else [])
    if run:
        alive = sum(bench.segments[1].rows[at].body_bytes for at in range(run[0], run[1] + 1))
        assert found[0].size == found[0].share.live == alive


def test_what_lives_in_files_without_a_segment_counts_by_looking() -> None:
    bench = Bench()
    sealed = sum(file.live for file in bench.files.values())
    tombstone, gone, other = entry(22), entry(23), entry(24, term=3)
    tombstone.tombstone = 5
    bench.liveness.release((23, 0), (24, 0))
    bench.homes = [Home(25, 25)]
    bench.unsealed = [
        (UID, one) for one in (entry(21), tombstone, gone, other, entry(25), build_plain(26, TERM, NOOP, 0))
    ]
    bench.unsealed.append((1234, entry(21)))
    assert bench.accounting.live_bytes() == sealed + entry(21).body_bytes


def test_of_very_many_entries_without_a_segment_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    sealed = sum(file.live for file in bench.files.values())
    bench.unsealed = [(UID, entry(at)) for at in range(21, 1021)]
    size = sum(one.body_bytes for _, one in bench.unsealed)
    monkeypatch.setattr(liveness_accounting, "LOOKED_AT_MAX", 200)
    looked: list[int] = []
    is_dead = bench.member.is_dead

    def counted(one: Entry) -> bool:
        looked.append(one.index)
        return bool(is_dead(one))

    monkeypatch.setattr(bench.member, "is_dead", counted, raising=False)
    assert bench.accounting.live_bytes() == sealed + size and 50 < len(looked) < 350
    # Every second one is dead, as where two groups take turns.
    for at in range(21, 1021, 2):
        bench.liveness.release((at, 0), (at + 1, 0))
    assert bench.accounting.live_bytes() == pytest.approx(sealed + size / 2, rel=0.2)


@pytest.mark.parametrize(("lost", "damaged", "marks"), [(True, False, 1), (False, False, 0), (True, True, 0)])
def test_after_a_start_what_is_dead_is_not_lost(lost: bool, damaged: bool, marks: int) -> None:
    bench = Bench()
    bench.liveness.release((3, 0), (5, 0))
    bench.lost = [(1, 10)] if lost else []
    bench.member.damaged = damaged
    bench.accounting.look_for_lost(bench.member)
    assert bench.marked == [((3, 0), (5, 0))] * marks or bench.marked == [((1, 0), (5, 0))] * marks


def test_a_unit_dies_when_its_last_record_does() -> None:
    """An entry of two frames has two units: one may die alone."""
    bench = Bench()
    frames = [memoryview(b"".join(encode_frame([(b"", b"x")] * 2, command=b"put"))) for _ in range(2)]
    two = build_commands(UID, 5, TERM, 0, frames)
    bench.segments[1].rows[5] = Entry(5, TERM, two.kind, two.data, None, two.body_bytes)
    assert [(unit.first_ordinal, unit.records) for unit in units_of(two.data)] == [(0, 2), (2, 2)]
    bench.release((5, 2), (5, 3))
    assert not bench.marked
    bench.release((5, 3), (5, 4))
    assert bench.marked == [((5, 1), (5, 2))]


# Counting anew, later


class Later:
    """One member's recount; `outcomes` is what counting says, one after the other."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.counts: list[float] = []
        self.damaged: list[Corrupt] = []
        self.looks = 0
        self.lock = trio.Lock()
        self.member: Any = SimpleNamespace(uid=UID, raft=SimpleNamespace(stopped=False))
        self.members: dict[int, Any] = {UID: self.member}
        self.nursery: trio.Nursery
        homes: Any = SimpleNamespace(recount=self.recount)
        self.recounts = Recount(
            self.members, homes, self.lock, self.spawn, self.look, lambda member, error: self.damaged.append(error)
        )

    def spawn(self, run: Callable[..., Awaitable[None]], member: Any, seconds: float) -> None:
        self.nursery.start_soon(run, member, seconds)

    def look(self) -> None:
        self.looks += 1

    def recount(self, member: Any) -> None:
        assert self.lock.locked(), "who stores payloads elsewhere counts them itself"
        self.counts.append(trio.current_time() - self.began)
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome

    async def run(self, *seconds: float) -> None:
        self.began = trio.current_time()
        async with trio.open_nursery() as self.nursery:
            for one in seconds:
                self.recounts.later(self.member, one)


async def test_a_member_is_counted_once_however_often_it_is_asked_for(autojump_clock: trio.testing.MockClock) -> None:
    later = Later()
    await later.run(2.0, 0.0, 5.0)
    assert later.counts == [2.0] and later.looks == 1
    await later.run(1.0)
    assert later.counts == [2.0, 1.0]


async def test_it_is_tried_until_there_are_descriptors(autojump_clock: trio.testing.MockClock) -> None:
    later = Later(Busy("descriptors", 3.0), Busy("descriptors", 4.0))
    await later.run(1.0)
    assert later.counts == [1.0, 4.0, 8.0] and not later.damaged and later.looks == 1


async def test_what_can_never_be_read_is_damage_and_ends_it(autojump_clock: trio.testing.MockClock) -> None:
    later = Later(MISSING)
    await later.run(1.0)
    assert later.damaged == [MISSING] and later.counts == [1.0]
    await later.run(1.0)
    assert len(later.counts) == 2, "when it is mended it may be asked for again"


@pytest.mark.parametrize("how", ["stopped", "rebuilt"])
async def test_who_is_gone_is_not_counted(how: str, autojump_clock: trio.testing.MockClock) -> None:
    later = Later()
    if how == "stopped":
        later.member.raft.stopped = True
    else:
        later.members[UID] = object()
    await later.run(1.0)
    assert not later.counts and later.looks == 1


def test_a_share_is_reduced_by_no_more_than_it_has() -> None:
    file = SealedFile(1, 100)
    file.add(UID, Share(1, 10, 50), 80)
    with pytest.raises(AssertionError, match="more bytes died"):
        file.reduce(UID, 51)
    file.shorten(UID, 5, 1000)
    assert not file.shares and file.live == 0 and file.dead_ratio == 1.0

"""One group from rows and WAL, without a directory: what the image is, and what is found where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from logyard.engine.entry import COMMANDS, Entry, build_plain
from logyard.engine.log.meta_rows import Departed, RingRun, SegmentRun, SnapshotRow, StateRow
from logyard.engine.log.recovered import Collector, Recovered
from logyard.engine.raft.configuration import Configuration
from logyard.engine.recovery.rebuild import Image, placed_through, rebuild, slept_on
from logyard.engine.snapshot.format import Snapshot
from logyard.engine.types import Spec
from logyard.protocol.errors import Corrupt

SPEC = Spec(7, "group", "log", {}, (1, 2, 3), 0)


def entries(first: int, last: int, term: int = 1) -> list[Entry]:
    return [build_plain(index, term, COMMANDS, 0) for index in range(first, last + 1)]


def wal(*parts: list[Entry] | int, hard: tuple[int, int, int] | None = (1, 0, 0), floor: int = 0) -> Recovered:
    """What the WAL says: entries, and indexes that it is cut at."""
    sink = Collector()
    for part in parts:
        if isinstance(part, int):
            sink.truncate(SPEC.uid, part)
        else:
            for entry in part:
                sink.entry(SPEC.uid, entry)
    if hard is not None:
        sink.hard_state(SPEC.uid, *hard)
    sink.floor(SPEC.uid, floor)
    return sink.of(SPEC.uid)


def checkpoint(flushed: int = 0, base: tuple[int, int] = (0, 0), **fields: Any) -> StateRow:
    """A row whose log is in segment 4, all of term 1."""
    runs = [SegmentRun(base[0] + 1, flushed, 4)] if flushed > base[0] else []
    terms = [(base[0] + 1, 1)] if runs else []
    row = StateRow(SPEC.uid, runs=runs, term_runs=terms, **{"term": 1, **fields})
    row.extra = {"log": list(base), "flushed": flushed}
    return row


def snapshot(index: int, term: int = 1, voters: tuple[int, ...] = (1, 2)) -> Snapshot:
    return Snapshot(SPEC.uid, index, term, Configuration(voters).encode(), 1, 0, 0, {}, b"")


def shape(image: Image) -> tuple[tuple[int, int], list[int], int, list[SegmentRun]]:
    """(base, indexes in memory, end of segments, runs)."""
    image.check()
    log = image.log
    log.check()
    return (log.snapshot_index, log.snapshot_term), [one.index for one in log.entries], image.flushed, image.runs


def test_a_group_that_has_nothing_yet() -> None:
    image = rebuild(SPEC, None, None, Recovered())
    assert shape(image) == ((0, 0), [], 0, []) and image.base == (0, Configuration(SPEC.voters))
    assert (image.term, image.vote, image.commit, image.floor, image.promise) == (0, 0, 0, 0, (0, 0))


def test_the_wal_goes_on_where_segments_end() -> None:
    image = rebuild(SPEC, checkpoint(10, commit=8), None, wal(entries(9, 14), hard=(3, 2, 12), floor=5))
    assert shape(image) == ((0, 0), [9, 10, 11, 12, 13, 14], 8, [SegmentRun(1, 8, 4)])
    assert (image.term, image.vote, image.commit, image.floor) == (3, 2, 12, 5)
    image = rebuild(SPEC, checkpoint(10, commit=8), None, wal(entries(11, 12)))
    assert shape(image) == ((0, 0), [11, 12], 10, [SegmentRun(1, 10, 4)])


@pytest.mark.parametrize(("said", "through"), [(wal(), 8), (wal(entries(10, 12)), 8), (wal(entries(7, 9)), 6)])
def test_payloads_are_where_the_rows_say_up_to_where_the_runs_of_a_log_that_starts_over_end(
    said: Recovered, through: int
) -> None:
    row = checkpoint(10, commit=8)
    image = rebuild(SPEC, row, snapshot(20), said)
    assert image.log.snapshot_index == 20 and image.runs == [SegmentRun(1, through, 4)]
    assert placed_through(row, said) == through


def test_what_the_wal_voids_is_not_in_segments_either() -> None:
    image = rebuild(SPEC, checkpoint(10), None, wal(entries(11, 12), 7, entries(7, 8, 2), hard=(2, 0, 0)))
    assert shape(image) == ((0, 0), [7, 8], 6, [SegmentRun(1, 6, 4)])
    assert image.log.term(6) == 1 and image.log.term(7) == 2


def test_a_snapshot_of_the_log_leaves_the_log_as_it_is() -> None:
    image = rebuild(SPEC, checkpoint(10, (4, 1), snapshot_index=6), snapshot(6), wal(entries(11, 12)))
    assert shape(image) == ((4, 1), [11, 12], 10, [SegmentRun(5, 10, 4)])
    assert image.commit == 6 and image.base == (0, Configuration(SPEC.voters))


@pytest.mark.parametrize("marked", [False, True])
def test_the_log_starts_over_above_an_installed_snapshot(marked: bool) -> None:
    """With the WAL's two marks what came after it counts; without them a crash came between."""
    marks = (20, 21) if marked else ()
    said = wal(*marks, entries(21, 22, 2), hard=(2, 0, 0)) if marked else wal(hard=(1, 0, 0))
    image = rebuild(SPEC, checkpoint(10, commit=8), snapshot(20, 2), said)
    assert shape(image) == ((20, 2), [21, 22] if marked else [], 20, [SegmentRun(1, 8, 4)])
    assert image.base == (20, Configuration((1, 2))) and image.proven_term == 2 and image.proven_commit == 20


def ringed(flushed: int, base: tuple[int, int] = (0, 0), **fields: Any) -> StateRow:
    """A row whose log is in its ring, but for entry 5 in segment 4."""
    row = checkpoint(flushed, base, **fields)
    row.runs = [SegmentRun(5, 5, 4)]
    row.extra["ring"] = [[base[0] + 1, 4, 1], [6, flushed, 1]]
    return row


def test_a_log_in_a_ring_ends_where_the_wal_overwrites_it() -> None:
    image = rebuild(SPEC, ringed(10), None, wal(entries(11, 12)))
    assert image.ring == [RingRun(1, 4, 1), RingRun(6, 10, 1)] and not list(image.doubts())
    assert image.places == [SegmentRun(1, 4, 0), SegmentRun(5, 5, 4), SegmentRun(6, 10, 0)]
    image = rebuild(SPEC, ringed(10), None, wal(entries(8, 9, 2), hard=(2, 0, 0)))
    assert (image.ring, image.flushed) == ([RingRun(1, 4, 1), RingRun(6, 7, 1)], 7) and not list(image.doubts())
    image = rebuild(SPEC, ringed(10), None, wal(entries(3, 4, 2), hard=(2, 0, 0)))
    assert (image.ring, image.runs) == ([RingRun(1, 2, 1)], [])


def test_a_log_that_starts_over_has_nothing_in_its_ring() -> None:
    image = rebuild(SPEC, ringed(10, commit=8), snapshot(20, 2), wal(hard=(1, 0, 0)))
    assert image.ring == [] and shape(image) == ((20, 2), [], 20, [SegmentRun(5, 5, 4)])
    image = rebuild(SPEC, ringed(10, (2, 1), snapshot_index=6), snapshot(6), wal(entries(11, 12)))
    assert image.ring == [RingRun(3, 4, 1), RingRun(6, 10, 1)], "its own snapshot leaves it as it is"


def test_nonsense_about_a_ring_is_a_finding() -> None:
    for nonsense in ([[1, 2]], 7, [["a", 2, 1]], None):
        row = checkpoint(10)
        row.extra["ring"] = nonsense
        image = rebuild(SPEC, row, None, wal(entries(8, 9, 2), hard=(2, 0, 0)))
        assert [one.kind for one in image.findings] == ["log"], nonsense


def test_a_snapshot_may_be_of_another_log_at_the_same_index() -> None:
    image = rebuild(SPEC, checkpoint(10, commit=3), snapshot(6, 2), wal(entries(11, 12)))
    assert shape(image) == ((6, 2), [], 6, [SegmentRun(1, 3, 4)])


def test_configurations_count_while_their_entry_is_in_the_log() -> None:
    row = checkpoint(10)
    later = Configuration((1, 2, 3, 4)).encode()
    row.extra["configurations"] = [[2, 0, Configuration((1, 3)).encode()], [5, 1, later], [6, 9, later], [12, 1, later]]
    image = rebuild(SPEC, row, None, wal())
    assert image.base == (2, Configuration((1, 3))) and image.configurations == [(5, Configuration((1, 2, 3, 4)))]


@pytest.mark.parametrize(
    ("state", "said", "taken", "kind", "words"),
    [
        (checkpoint(10), wal(entries(13, 14)), None, "log", "entries 11 to 12 are in no file"),
        (checkpoint(10, (4, 1)), wal(), None, "snapshot", "the log begins above 4"),
        (checkpoint(10), wal(entries(11, 12, 5)), None, "log", "its log ends in term 5, its stored term is 1"),
        (StateRow(7, extra={"log": [0, 0], "flushed": 3}), wal(), None, "log", "term runs"),
        (StateRow(7, extra={"configurations": [[0, 0, b"?"]]}), wal(), None, "log", ""),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_found_and_raised_by_a_start(
    state: StateRow, said: Recovered, taken: Snapshot | None, kind: str, words: str
) -> None:
    image = rebuild(SPEC, state, taken, said)
    assert len(image.findings) == 1
    (finding,) = image.findings
    assert finding.kind == kind and words in finding.message
    with pytest.raises(type(finding.error)):
        image.check()
    # What is left is a log all the same.
    image.log.check()


def test_nonsense_that_verifies_is_a_finding_and_no_exception() -> None:
    for extra in ({"log": [1]}, {"log": "x"}, {"flushed": None}, {"configurations": [[0]]}, {"configurations": 3}):
        image = rebuild(SPEC, StateRow(7, extra=extra), None, wal())
        assert image.findings, extra


def test_who_lost_its_end_believes_no_commit_index_and_no_term() -> None:
    image = rebuild(SPEC, checkpoint(10, commit=9), snapshot(6), wal(entries(11, 12, 5)), mended=True)
    image.check()
    assert image.commit == 6 and image.log.last_term == 5
    with pytest.raises(Corrupt, match="a stored term of at least 5"):
        rebuild(SPEC, checkpoint(10, commit=9), snapshot(6), wal(entries(11, 12, 5))).check()


def test_a_replica_made_anew_keeps_the_vote_of_the_old_one_whatever_the_log_says() -> None:
    """One vote a term, across removal, re-creation and crashes at any point of them."""
    left = Departed(50, 2, 4, 10, 11)
    found = []
    for hard in (None, (49, 1, 0), (50, 0, 0), (50, 2, 0), (51, 0, 0), (51, 1, 0)):
        image = rebuild(SPEC, None, None, wal(hard=hard), left)
        assert image.promise == (4, 10)
        found.append((image.term, image.vote))
    assert found == [(50, 2)] * 4 + [(51, 0), (51, 1)]


def test_a_group_slept_on_while_the_wal_says_nothing_newer() -> None:
    row = checkpoint(20, (20, 2), term=2, vote=1, floor=4)
    row.extra["asleep"] = [0, 0, 0, 0, 0, 0]
    stored = SnapshotRow(SPEC.uid, 20, 2, b"")
    quiet = (Recovered(), wal(entries(19, 20, 2), hard=(2, 1, 20), floor=4), wal(20, 21, hard=(2, 0, 0)))
    assert all(slept_on(row, stored, said) for said in quiet)
    loud = (wal(entries(21, 21, 2)), wal(hard=(3, 0, 0)), wal(hard=(2, 3, 0)), wal(floor=5))
    assert not any(slept_on(row, stored, said) for said in loud)
    assert not slept_on(row, None, Recovered()) and not slept_on(checkpoint(20, (20, 2)), stored, Recovered())
    row.extra["ring"] = [[20, 20, 2]]
    assert not slept_on(row, stored, Recovered()), "who has anything in a ring did not"

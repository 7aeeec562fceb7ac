"""Ranges of a transfer against sets, and answers against what they claim."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from logyard.engine.ranges import Range, covered, runs_of, subtract, union
from logyard.engine.transfer.chunks import Intent
from logyard.engine.transfer.pull import Sources

indexes = st.sets(st.integers(1, 60))


def ranges_of(found: set[int]) -> list[Range]:
    return union((one, one) for one in found)


def points(ranges: list[Range]) -> set[int]:
    return {index for first, last in ranges for index in range(first, last + 1)}


@given(indexes, indexes)
def test_ranges_are_sets(one: set[int], two: set[int]) -> None:
    assert points(ranges_of(one)) == one
    left = subtract(ranges_of(one), ranges_of(two))
    assert points(left) == one - two
    assert all(first <= last for first, last in left) and left == sorted(left)
    assert points(union([*ranges_of(one), *ranges_of(two)])) == one | two
    for through in (0, 7, 60):
        assert points(covered(ranges_of(one), through)) == {index for index in one if index <= through}


@given(indexes, indexes)
def test_a_home_never_takes_over_what_is_at_home_elsewhere(mine: set[int], theirs: set[int]) -> None:
    runs = runs_of(sorted(mine), lambda first, last: bool(theirs & {*range(first, last + 1)}))
    taken = points(runs)
    assert mine <= taken and runs == sorted(runs)
    assert not (taken - mine) & theirs, "nothing that lies between changes its home"
    if not theirs:
        assert len(runs) == (1 if mine else 0)


def test_an_intent_taken_over_says_what_explains_a_gap() -> None:
    before = Intent(50, 2, 60, [(1, 40)], [b"c" * 16])
    assert Intent.unpack(before.put(7)[1] or b"").covered == [(1, 40)]
    newer = before.taken_over(55, 2, [])
    assert (newer.index, newer.release, newer.covered) == (55, 60, [(1, 40)])
    assert before.taken_over(60, 2, []).release == 0, "the snapshot itself does not name what died by then"
    # What the newer one did not name was never asked for; the older one may name it: dead by 50 at the latest.
    assert before.taken_over(45, 3, []).release == 60
    assert Intent(50, 2, 0, [(1, 40)]).taken_over(45, 3, []).release == 50


def test_sources_take_turns_and_leave_out_who_failed() -> None:
    sources = Sources([3, 1, 3, 2])
    assert [sources.next() for _ in range(5)] == [3, 1, 2, 3, 1]
    sources.fail(2)
    sources.fail(3)
    assert [sources.next() for _ in range(2)] == [1, 1]
    sources.include([4])
    assert {sources.next() for _ in range(3)} == {1, 4}
    sources.fail(1)
    sources.fail(4)
    assert sources.next() == 0 == Sources([]).next()

from __future__ import annotations

import itertools
import sys

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from logyard.payloads.liveness import Liveness, decode_live_set
from logyard.payloads.reference import PayloadRange, Position
from logyard.payloads.transfer import merge, missing, portions, subtract
from logyard.protocol.errors import PayloadCorrupt

HEAD_BYTES = len(Liveness().encode_live_set(0)) - 16
INDEXES, ORDINALS = 12, 6
positions = st.tuples(st.integers(1, INDEXES), st.integers(0, ORDINALS))
releases = st.lists(st.tuples(positions, positions).map(lambda pair: (min(pair), max(pair))), max_size=14)
UNIVERSE = [(index, ordinal) for index in range(1, INDEXES + 2) for ordinal in range(ORDINALS + 3)]


def dead_by(calls: list[tuple[tuple[int, int], tuple[int, int]]]) -> set[tuple[int, int]]:
    return {at for at in UNIVERSE for first, end in calls if first <= at < end}


def inside(ranges: list[PayloadRange], at: tuple[int, int]) -> bool:
    return any(first <= at < end for first, end in ranges)


@given(releases)
def test_it_equals_a_set_of_positions(calls: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    found = Liveness()
    for number, (first, end) in enumerate(calls):
        before, after = dead_by(calls[:number]), dead_by(calls[: number + 1])
        changed = found.release(first, end)
        assert changed or before == after
        assert found.release(first, end) is False, "deadness is idempotent"
    dead = dead_by(calls)
    assert {at for at in UNIVERSE if not found.is_live(*at)} == dead
    ranges = list(found.live_ranges(INDEXES + 1))
    assert {at for at in UNIVERSE if inside(ranges, at)} == set(UNIVERSE) - dead
    assert all(left.end < right.first for left, right in itertools.pairwise(ranges))
    for index in range(1, INDEXES + 1):
        for records in range(1, ORDINALS + 1):
            assert found.is_entry_dead(index, records) == all((index, n) in dead for n in range(records))
            units = [(number, number, 0) for number in range(records)] + [(records, 0, records)]
            live = {number for number in range(records) if (index, number) not in dead}
            assert found.live_units(index, units) == (live | {records} if live else set())


@given(releases, st.randoms(use_true_random=False))
def test_the_form_is_canonical(calls: list[tuple[tuple[int, int], tuple[int, int]]], rng: object) -> None:
    """Equal sets are equal values and equal bytes, whatever the order of the releases."""
    one, other = Liveness(), Liveness()
    for first, end in calls:
        one.release(first, end)
    shuffled = list(calls)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    for first, end in shuffled:
        other.release(first, end)
    assert one == other
    assert one.encode_live_set(INDEXES) == other.encode_live_set(INDEXES)


@given(releases, st.integers(1, INDEXES + 1))
def test_live_sets_round_trip(calls: list[tuple[tuple[int, int], tuple[int, int]]], upto: int) -> None:
    found = Liveness()
    for first, end in calls:
        found.release(first, end)
    live_set = decode_live_set(found.encode_live_set(upto))
    assert live_set.upto == upto
    for at in UNIVERSE:
        assert live_set.liveness.is_live(*at) == (found.is_live(*at) or at[0] > upto)
    assert live_set.ranges() == list(found.live_ranges(upto))


@given(releases, releases, st.integers(1, INDEXES))
def test_installing_a_snapshot(
    common: list[tuple[tuple[int, int], tuple[int, int]]],
    more: list[tuple[tuple[int, int], tuple[int, int]]],
    upto: int,
) -> None:
    source, receiver = Liveness(), Liveness()
    for first, end in common:
        source.release(first, end)
        receiver.release(first, end)
    for first, end in more:
        source.release(first, end)
    before = {at for at in UNIVERSE if not receiver.is_live(*at)}
    receiver.install(decode_live_set(source.encode_live_set(upto)))
    for at in UNIVERSE:
        assert receiver.is_live(*at) == (source.is_live(*at) if at[0] <= upto else at not in before)


def test_nothing_rises_from_the_dead() -> None:
    receiver = Liveness()
    receiver.release((1, 0), (4, 0))
    with pytest.raises(AssertionError, match="was dead here"):
        receiver.install(decode_live_set(Liveness().encode_live_set(9)))


@pytest.mark.parametrize("data", [b"", b"LIVE", bytes(80)])
def test_a_missing_live_set_is_an_error_and_never_empty(data: bytes) -> None:
    with pytest.raises(PayloadCorrupt):
        decode_live_set(data)


def test_a_live_set_that_verifies_and_has_no_bitmaps_is_refused_by_name() -> None:
    found = Liveness()
    found.release((5, 1), (7, 3))
    body = found.encode_live_set(9)[:-16]
    bad = body[:HEAD_BYTES] + b"x" * (len(body) - HEAD_BYTES)
    with pytest.raises(PayloadCorrupt, match="bitmaps"):
        decode_live_set(bad + xxhash.xxh3_128_digest(bad))


def test_every_flipped_bit_and_every_cut_of_a_live_set_is_found() -> None:
    found = Liveness()
    found.release((1, 0), (3, 2))
    found.release((5, 1), (7, 3))
    data = found.encode_live_set(20)
    for at in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(PayloadCorrupt):
            decode_live_set(bytes(damaged))
    for size in range(len(data)):
        with pytest.raises(PayloadCorrupt):
            decode_live_set(data[:size])


def test_a_whole_release_moves_the_prefix_over_entries_released_record_by_record() -> None:
    found = Liveness()
    for index in range(1, 2000):
        for ordinal in (2, 0, 1):
            found.release((index, ordinal), (index, ordinal + 1))
        found.release((index, 0), (index + 1, 0))
    assert found == Liveness(2000) and found.released_before == Position(2000, 0)
    assert (found._entries, found._tails, found._parts) == (None, None, None)


def test_a_group_that_releases_in_order_is_two_numbers() -> None:
    found = Liveness()
    for index in range(1, 5000):
        found.release(found.released_before, (index, index % 7))
    assert (found._entries, found._tails, found._parts) == (None, None, None)
    assert sys.getsizeof(found) < 100
    assert len(found.encode_live_set(5000)) < 100


def test_a_wide_release_behind_the_prefix_is_cheap() -> None:
    found = Liveness()
    found.release((1_000, 3), (50_000_000, 2))
    assert not found.is_live(49_999_999, 5) and found.is_live(50_000_000, 2) and found.is_live(1_000, 2)
    assert len(found.encode_live_set(60_000_000)) < 20_000
    found.release((1, 0), (1_000, 3))
    assert found == Liveness(50_000_000, 2)


# Transfer

ranges_of = releases.map(lambda calls: [PayloadRange(Position(*first), Position(*end)) for first, end in calls])


@given(ranges_of, ranges_of)
def test_subtract_and_merge_equal_sets(wanted: list[PayloadRange], held: list[PayloadRange]) -> None:
    left = subtract(wanted, held)
    for at in UNIVERSE:
        assert inside(left, at) == (inside(wanted, at) and not inside(held, at))
        assert inside(merge(wanted), at) == inside(wanted, at)
    assert left == merge(left)


@given(releases, ranges_of)
def test_missing_is_what_lives_and_is_not_held(
    calls: list[tuple[tuple[int, int], tuple[int, int]]], held: list[PayloadRange]
) -> None:
    source = Liveness()
    for first, end in calls:
        source.release(first, end)
    lacks = missing(decode_live_set(source.encode_live_set(INDEXES)), held)
    for at in UNIVERSE:
        assert inside(lacks, at) == (at[0] <= INDEXES and source.is_live(*at) and not inside(held, at))


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 40))
def test_portions_cover_every_byte_once_in_bounded_requests(lengths: list[int], limit: int) -> None:
    units = [(index, 0, length) for index, length in enumerate(lengths)]
    asked: dict[int, list[tuple[int, int]]] = {}
    for batch in portions(units, limit):
        assert batch and sum(stop - start for _, _, start, stop in batch) <= limit
        for index, _, start, stop in batch:
            asked.setdefault(index, []).append((start, stop))
    assert sorted(asked) == list(range(len(lengths)))
    for index, length in enumerate(lengths):
        assert asked[index][0][0] == 0 and asked[index][-1][1] == length
        assert all(left[1] == right[0] for left, right in zip(asked[index], asked[index][1:], strict=False))


@given(releases, positions, positions)
@example([((2, 1), (3, 0))], (1, 0), (2, 0))  # what is dead behind the range, in the entry where it ends
@example([((2, 3), (3, 0))], (1, 0), (2, 2))
def test_what_lives_within_a_range_is_what_a_release_of_it_kills(
    calls: list[tuple[tuple[int, int], tuple[int, int]]], one: tuple[int, int], other: tuple[int, int]
) -> None:
    found = Liveness()
    for first, end in calls:
        found.release(first, end)
    first, end = min(one, other), max(one, other)
    lives = found.live_within(first, end)
    wanted = {at for at in UNIVERSE if first <= at < end} - dead_by(calls)
    assert {at for at in UNIVERSE if inside(lives, at)} == wanted
    assert all(left.end < right.first for left, right in itertools.pairwise(lives))
    assert found.release(first, end) is bool(lives)

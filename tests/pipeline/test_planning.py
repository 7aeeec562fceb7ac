"""From options and logs to ranges and tasks: pure functions."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.client.scans import LogRow
from logyard.pipeline.errors import DataLoss, OptionError
from logyard.pipeline.network import merge_rows
from logyard.pipeline.offsets import check_named, ending_times, resolve, starting_times
from logyard.pipeline.options import Options, parse_options
from logyard.pipeline.partitions import LEAST_BYTES, LOG_ROWS_WEIGHT, Weighed, cut, pack, spread, weigh
from logyard.pipeline.sources import LogInfo, Wanted

A = LogInfo("a", 1, 10, 100, 0, 1, (1, 2, 3))
B = LogInfo("b", 2, 0, 0, 0, 2, (1, 2, 3))


def asked(**more: str) -> Options:
    return parse_options({"servers": "h:1", "subscribePattern": ".*"} | more)


def spans(options: Options, starts: dict[str, int] | None = None, ends: dict[str, int] | None = None) -> object:
    return [(one.log, one.uid, one.first, one.end) for one in resolve(options, [A, B], starts or {}, ends or {})]


def test_ranges_of_the_usual_options() -> None:
    assert spans(asked()) == [("a", 1, 10, 100)]
    assert spans(asked(startingOffsets='{"a": 50}', endingOffsets='{"a": 60}')) == [("a", 1, 50, 60)]
    assert spans(asked(startingOffsets='{"a": -1}')) == []
    assert spans(asked(startingOffsets='{"a": 60}', endingOffsets='{"a": 60}')) == []
    exact = parse_options({"servers": "h:1", "assign": '{"a": [20, 30], "b": [-2, -1]}'})
    assert spans(exact) == [("a", 1, 20, 30)]


def test_what_is_not_there_yet_or_no_more_is_said() -> None:
    with pytest.raises(OptionError, match="endingOffsets: log 'a' ends at 100"):
        spans(asked(endingOffsets='{"a": 101}'))
    with pytest.raises(OptionError, match="startingOffsets: log 'b' ends at 0"):
        spans(asked(startingOffsets='{"b": 1}'))
    with pytest.raises(DataLoss, match=r"records 5\.\.9 were truncated.*failOnDataLoss=false"):
        spans(asked(startingOffsets='{"a": 5}'))
    assert spans(asked(startingOffsets='{"a": 5}', failOnDataLoss="false")) == [("a", 1, 5, 100)]
    with pytest.raises(DataLoss, match=r"records 5\.\.6 were"):
        spans(asked(startingOffsets='{"a": 5}', endingOffsets='{"a": 7}'))


def test_times() -> None:
    assert starting_times(asked(startingTimestamp="7"), [A, B]) == {"a": 7, "b": 7}
    assert ending_times(asked(endingOffsetsByTimestamp='{"b": 9}'), [A, B]) == {"b": 9}
    assert starting_times(asked(), [A, B]) == {}
    latest = asked(startingOffsetsByTimestampStrategy="latest", startingTimestamp="7")
    # A log that grew since it was listed is read up to where it was.
    assert spans(latest, {"a": 30, "b": 0}, {"a": 105}) == [("a", 1, 30, 100)]
    assert spans(latest, {"a": 100, "b": 0}) == []
    with pytest.raises(OptionError, match="startingTimestamp: log 'a' has no record"):
        spans(asked(startingTimestamp="7"), {"a": 100})


def test_names_that_are_not_there() -> None:
    with pytest.raises(OptionError, match=r"^subscribe: there is no append log 'c'"):
        check_named(parse_options({"servers": "h:1", "subscribe": "a,c"}), [A, B])
    with pytest.raises(OptionError, match=r"^startingOffsets: 'c' is not one"):
        check_named(asked(startingOffsets='{"c": 1}'), [A, B])
    check_named(asked(startingOffsets='{"a": 1}'), [A, B])


def test_one_row_a_log() -> None:
    def row(name: str, uid: int, leader: int, start: int, end: int) -> LogRow:
        return LogRow(name, uid, leader, start, end, 7, (1, 2, 3))

    found = merge_rows([row("b", 5, 1, 0, 4), row("a", 1, 0, 3, 10), row("a", 1, 2, 2, 12), row("a", 9, 3, 0, 99)])
    assert [(one.name, one.uid, one.leader, one.start, one.end) for one in found] == [
        ("a", 1, 2, 3, 12), ("b", 5, 1, 0, 4),
    ]  # fmt: skip


def wanted(name: str, first: int, end: int) -> Wanted:
    return Wanted(name, 1, first, end, (1, 2, 3))


def test_followers_come_first_and_share_the_work() -> None:
    ranges = [Weighed(wanted(f"log-{n}", 0, 10), 1000) for n in range(30)]
    placed = spread(ranges, {one.wanted.log: 2 for one in ranges})
    assert {one.wanted.nodes[-1] for one in placed} == {2}
    assert Counter(one.wanted.nodes[0] for one in placed) == {1: 15, 3: 15}
    assert placed == spread(list(reversed(ranges)), {one.wanted.log: 2 for one in ranges})
    alone = spread([Weighed(Wanted("x", 1, 0, 5, (4,)), 1)], {"x": 4})
    assert alone[0].wanted.nodes == (4,)


def test_tasks_of_one_range_are_cut_by_who_leads() -> None:
    """As docs/guides/from-kafka.md warns: all tasks together are the same, a task's number is no place."""
    ranges = [Weighed(wanted(f"log-{n}", 0, 1000), (n % 5 + 1) << 20) for n in range(12)]
    plans = []
    for shift in (1, 2):
        leaders = {one.wanted.log: (n + shift) % 3 + 1 for n, one in enumerate(ranges)}
        plans.append(pack(spread(ranges, leaders), 6 << 20, 4, 2))
    records = [
        sorted((one.log, offset) for task in tasks for one in task for offset in range(one.first, one.end))
        for tasks in plans
    ]
    assert records[0] == records[1] and len(records[0]) == 12_000
    first, second = ([{(one.log, one.first, one.end) for one in task} for task in tasks] for tasks in plans)
    assert first != second


def test_small_logs_share_tasks_and_a_long_one_is_split() -> None:
    small = [weigh(wanted(f"log-{n:04}", 0, 10), A, False) for n in range(5000)]
    assert len(pack(small, 128 << 20, None, 2)) == 4
    assert len(pack(small, 128 << 20, 10, 2)) == 10
    assert len(pack(small[:50], 128 << 20, None, 2)) == 1
    long = Weighed(wanted("long", 0, 1000), 100 * LEAST_BYTES)
    tasks = pack([long], 10 * LEAST_BYTES, None, 2)
    assert len(tasks) == 10
    assert sum(one.end - one.first for task in tasks for one in task) == 1000
    assert pack([], 1, None, 2) == []


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 10**7), st.integers(1, 3)), max_size=40),
    st.integers(1, 10**7), st.one_of(st.none(), st.integers(1, 20)),
)  # fmt: skip
def test_every_record_is_in_exactly_one_task(
    sizes: list[tuple[int, int, int]], max_bytes: int, least: int | None
) -> None:
    ranges = [
        Weighed(Wanted(f"log-{n}", 1, 5, 5 + rows, (node,)), weight) for n, (rows, weight, node) in enumerate(sizes)
    ]
    tasks = pack(ranges, max_bytes, least, 2)
    assert tasks == pack(ranges, max_bytes, least, 2)
    seen: dict[str, list[tuple[int, int]]] = {}
    for task in tasks:
        assert task
        for one in task:
            seen.setdefault(one.log, []).append((one.first, one.end))
    for one, _ in ranges:
        parts = sorted(seen.pop(one.log))
        assert [parts[0][0], parts[-1][1]] == [one.first, one.end]
        assert all(left[1] == right[0] for left, right in pairwise(parts))
    assert not seen


def test_a_streams_tasks_hold_logs_by_name_and_split_only_a_long_one() -> None:
    small = [Wanted(f"log-{n:03}", 7, 5, 105) for n in range(300)]
    tasks = cut(small, 250_000, None)
    assert [len(task) for task in tasks] == [227, 73] and [one for task in tasks for one in task] == small
    assert len(cut(small, 250_000, 6)) == 6
    long = cut([Wanted("a", 7, 0, 10), Wanted("long", 7, 100, 1_000_100), Wanted("z", 7, 0, 10)], 250_000, None)
    parts = [one for task in long for one in task if one.log == "long"]
    assert len(parts) == 5 and all(left.end == right.first for left, right in pairwise(parts))
    assert (parts[0].first, parts[-1].end) == (100, 1_000_100)
    assert cut([], 5, 5) == []


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 9)), max_size=40),
    st.integers(1, 1000), st.sampled_from((1, 1000)), st.one_of(st.none(), st.integers(1, 50)), st.randoms(),
)  # fmt: skip
def test_a_streams_tasks_depend_on_ranges_and_options_alone(
    sizes: list[tuple[int, int]], max_rows: int, scale: int, least: int | None, chance: random.Random
) -> None:
    # Many rows with few a task would be tens of millions of tasks.
    sizes, max_rows = [(rows * scale, first) for rows, first in sizes], max_rows * scale
    ranges = [Wanted(f"log-{n}", 1, first, first + rows) for n, (rows, first) in enumerate(sizes)]
    tasks = cut(ranges, max_rows, least)
    mixed = list(ranges)
    chance.shuffle(mixed)
    assert cut(mixed, max_rows, least) == tasks
    covered = [one for task in tasks for one in task]
    assert covered == sorted(covered)
    for one in ranges:
        parts = [part for part in covered if part.log == one.log]
        assert (parts[0].first, parts[-1].end) == (one.first, one.end)
        assert all(left.end == right.first for left, right in pairwise(parts))
        assert len(parts) == 1 or one.end - one.first + LOG_ROWS_WEIGHT > max_rows or least

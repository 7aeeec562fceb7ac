"""A stream's offsets, what lies between two of them, and how a limit is shared out: pure functions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.pipeline.errors import DataLoss
from logyard.pipeline.options import STREAM, Options, parse_options
from logyard.pipeline.sources import LogInfo, Wanted
from logyard.pipeline.stream_offsets import (
    BadOffset,
    Batch,
    Limit,
    Lost,
    Position,
    StreamOffset,
    advance,
    between,
    came_and_went,
    is_read,
    parse_offset,
    share,
    without_passed_over,
)


def info(name: str, end: int, start: int = 0, uid: int = 1) -> LogInfo:
    return LogInfo(name, uid, start, end, 0, 1, (1, 2, 3))


def at(**logs: int) -> StreamOffset:
    return StreamOffset({name: Position(1, following) for name, following in logs.items()})


def asked(**more: str) -> Options:
    return parse_options({"servers": "h:1", "subscribePattern": ".*"} | more, STREAM)


def spans(start: StreamOffset, end: StreamOffset) -> list[tuple[str, int, int]]:
    return [(one.log, one.first, one.end) for one in between(start, end).ranges]


def test_an_offset_is_plain_json_and_comes_back() -> None:
    offset = StreamOffset({"a": Position(1 << 63, 5), "b": Position(2, 9, 4)}, "a")
    plain = offset.plain()
    assert plain == {"v": 1, "turn": "a", "logs": {"a": [1 << 63, 5], "b": [2, 9, 4]}}
    assert parse_offset(json.loads(json.dumps(plain))) == offset
    assert parse_offset({"v": 1, "logs": {"a": [7, 5]}}) == StreamOffset({"a": Position(7, 5)})


def test_the_first_batch_follows_from_its_end_alone() -> None:
    """What Spark says was its beginning may be asked for anew, and be another one."""
    start = StreamOffset({"a": Position(1, 5), "b": Position(1, 9), "cut": Position(1, 3)}, initial=True)
    assert parse_offset(start.plain()) == start
    infos = [info("a", 8), info("b", 9), info("new", 2), info("cut", 10, start=6)]
    end = parse_offset(advance(start, infos, (), asked(failOnDataLoss="false"), None).plain())
    assert not end.initial
    expected = [("a", 5, 8), ("cut", 3, 10), ("new", 0, 2)]
    for again in (start, StreamOffset({"a": Position(1, 99), "c": Position(7, 1)}, initial=True)):
        assert spans(again, end) == expected and not between(again, end).lost
    later = advance(end, [info("a", 9)], (), asked(), None)
    assert spans(end, later) == [("a", 8, 9)]
    assert advance(start, [info("a", 5)], (), asked(), None) is start and spans(start, start) == []


def test_offsets_of_ten_thousand_logs_stay_small() -> None:
    logs = {f"orders-{n:05}": Position((1 << 63) + n, 1_000_000 + n) for n in range(10_000)}
    assert len(json.dumps(StreamOffset(logs, "orders-00000").plain())) < 500_000


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"v": 2, "logs": {}}, "version 2, this logyard knows version 1"),
        ({"orders": {"0": 5}}, "is no offset of the format logyard"),
        (7, "7 is no offset of the format logyard"),
        (None, "None is no offset"),
        ({"v": 1}, "the checkpoint is damaged"),
        ({"v": 1, "logs": []}, "the checkpoint is damaged"),
        ({"v": 1, "logs": {"a": [1]}}, "the checkpoint is damaged"),
        ({"v": 1, "logs": {"a": [1, "5"]}}, "the checkpoint is damaged"),
        ({"v": 1, "logs": {"a": [1, -5]}}, "the checkpoint is damaged"),
        ({"v": 1, "logs": {"a": [1, 5, 6]}}, "the checkpoint is damaged"),
        ({"v": 1, "logs": {"a": [1, True]}}, "the checkpoint is damaged"),
        ({"v": 1, "turn": 5, "logs": {}}, "the checkpoint is damaged"),
    ],
)
def test_what_is_no_offset_of_ours_is_refused(value: Any, said: str) -> None:
    with pytest.raises(BadOffset, match=said) as caught:
        parse_offset(value)
    assert str(caught.value).startswith("checkpoint: ") and "checkpointLocation" in str(caught.value)


def test_files_of_two_queries_are_refused() -> None:
    with pytest.raises(BadOffset, match="would begin at 9 and end at 5"):
        between(at(a=9), at(a=5))


def test_without_a_limit_a_batch_reads_all_there_is() -> None:
    start = at(a=5, b=7)
    end = advance(start, [info("a", 10), info("b", 7)], (), asked(), None)
    assert spans(start, end) == [("a", 5, 10)] and end.logs == at(a=10, b=7).logs
    # Nothing new is the same object, so that Spark makes no batch of it.
    assert advance(end, [info("a", 10), info("b", 7)], (), asked(), None) is end


def test_it_never_goes_back() -> None:
    """A member that is behind says less than was read; one that is away says nothing."""
    start = at(a=5, b=7)
    assert advance(start, [info("a", 3)], (), asked(), None) is start
    assert advance(start, [], (), asked(), None) is start


def test_a_new_log_begins_where_it_is_told() -> None:
    start = at(a=5)
    infos = [info("a", 5), info("empty", 0), info("new", 30, start=10)]
    end = advance(start, infos, (), asked(), None)
    assert spans(start, end) == [("new", 10, 30)] and end.logs["empty"] == Position(1, 0)
    # What was met then is no new log later.
    assert advance(end, infos, (), asked(), None) is end
    later = advance(end, [info("a", 5), info("empty", 2), info("new", 31, start=10)], (), asked(), None)
    assert spans(end, later) == [("empty", 0, 2), ("new", 30, 31)]
    latest = advance(start, infos, (), asked(newLogs="latest"), None)
    assert spans(start, latest) == [] and latest.logs["new"] == Position(1, 30)
    after = advance(latest, [info("empty", 1), info("new", 33, start=10)], (), asked(newLogs="latest"), None)
    assert spans(latest, after) == [("empty", 0, 1), ("new", 30, 33)]


def test_a_log_that_was_deleted_is_a_loss_or_a_row() -> None:
    start = at(a=5, b=7)
    with pytest.raises(DataLoss, match=r"^log 'b': it was deleted; records from 7 on.*failOnDataLoss=false"):
        advance(start, [info("a", 5)], {"b"}, asked(), None)
    end = advance(start, [info("a", 6)], {"b"}, asked(failOnDataLoss="false"), None)
    assert between(start, end).lost == [Lost("b", 7)] and spans(start, end) == [("a", 5, 6)]
    # If it comes again it is a new one.
    back = advance(end, [info("a", 6), info("b", 2, uid=9)], (), asked(failOnDataLoss="false"), None)
    assert spans(end, back) == [("b", 0, 2)] and not between(end, back).lost


def test_a_log_that_was_made_anew_is_a_loss_or_a_row_and_is_read_from_its_beginning() -> None:
    start = at(a=500)
    anew = [info("a", 20, start=3, uid=2)]
    with pytest.raises(DataLoss, match=r"^log 'a': it was deleted and made anew; records from 500 on"):
        advance(start, anew, (), asked(), None)
    for more in ({}, {"newLogs": "latest"}):
        end = advance(start, anew, (), asked(failOnDataLoss="false", **more), None)
        assert between(start, end).lost == [Lost("a", 500)] and spans(start, end) == [("a", 3, 20)]
        assert advance(end, anew, (), asked(failOnDataLoss="false"), None) is end


def test_a_truncated_log_is_a_loss_or_one_range_with_the_gap() -> None:
    start = at(a=5)
    with pytest.raises(DataLoss, match=r"^log 'a': records 5\.\.899 were truncated.*failOnDataLoss=false"):
        advance(start, [info("a", 1000, start=900)], (), asked(), None)
    lossy = asked(failOnDataLoss="false")
    end = advance(start, [info("a", 1000, start=900)], (), lossy, Limit(10, 1000, {}))
    assert spans(start, end) == [("a", 5, 910)]
    gone = advance(start, [info("a", 900, start=900)], (), lossy, None)
    assert spans(start, gone) == [("a", 5, 900)]


def test_a_limit_is_shared_out_in_turn_and_in_depth() -> None:
    backlog = [(f"log-{n}", 5000) for n in range(10)]
    granted, turn = share(backlog, Limit(3000, 1000, {}), "")
    assert granted == {"log-0": 1000, "log-1": 1000, "log-2": 1000} and turn == "log-2"
    granted, turn = share(backlog, Limit(3500, 1000, {}), "log-8")
    assert granted == {"log-9": 1168, "log-0": 1166, "log-1": 1166} and turn == "log-1"
    assert share(backlog, Limit(100, 1000, {}), "log-3") == ({"log-4": 100}, "log-4")
    # What those that take part have no records for goes to the next one, whose turn it still is.
    few = [("a", 10), ("b", 20), ("c", 5000)]
    assert share(few, Limit(500, 1000, {}), "") == ({"a": 10, "b": 20, "c": 470}, "b")
    assert share(few, Limit(10**6, 1000, {}), "") == ({"a": 10, "b": 20, "c": 5000}, "c")
    # In bytes, one record always passes.
    assert share([("a", 5), ("b", 5)], Limit(10, 2, {"a": 100, "b": 1}), "") == ({"a": 1}, "a")
    assert share([("a", 50), ("b", 50)], Limit(1000, 2, {"a": 100, "b": 1}), "") == ({"a": 9, "b": 50}, "b")


def test_no_log_waits_longer_than_the_backlog_takes() -> None:
    """One log has a thousand times the records of the others."""
    ends = {"elephant": 100_000} | {f"mouse-{n:02}": 100 for n in range(50)}
    infos = [info(name, end) for name, end in sorted(ends.items())]
    for limit, least in ((500, 1000), (2000, 1000), (5000, 10), (150, 100)):
        offset, batches, waited = at(**dict.fromkeys(ends, 0)), 0, dict[str, int]()
        while offset.logs != at(**ends).logs:
            following = advance(offset, infos, (), asked(), Limit(limit, least, {}))
            rows = sum(end - first for _, first, end in spans(offset, following))
            assert rows == min(limit, sum(ends[name] - one.next for name, one in offset.logs.items()))
            batches += 1
            for name, first, _ in spans(offset, following):
                if not first:
                    waited[name] = batches
            offset = following
        backlog = sum(ends.values())
        assert batches == -(-backlog // limit) and max(waited.values()) <= -(-backlog // limit)
        # And nobody waits for the elephant: its share of a batch is that of another.
        assert max(waited.values()) <= 2 + (50 * 100 + 1000 * len(ends)) // limit


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 5000), min_size=1),
    st.integers(1, 20_000), st.integers(1, 3000), st.sampled_from(["", "a", "d", "z"]),
)  # fmt: skip
def test_a_batch_is_as_large_as_its_limit_allows(backlog: dict[str, int], budget: int, least: int, turn: str) -> None:
    granted, last = share(sorted(backlog.items()), Limit(budget, least, {}), turn)
    assert sum(granted.values()) == min(budget, sum(backlog.values()))
    assert all(0 < rows <= backlog[name] for name, rows in granted.items()) and last in granted
    shallow = [name for name, rows in granted.items() if rows < min(least, backlog[name])]
    assert len(shallow) <= 1


@given(st.data())
def test_batches_cover_every_record_once(data: st.DataObject) -> None:
    """Over any course of appends, limits and logs that come."""
    offset, ends, seen = StreamOffset(), dict[str, int](), dict[str, list[int]]()
    for _ in range(data.draw(st.integers(1, 12))):
        for name in data.draw(st.lists(st.sampled_from("abcde"), max_size=4)):
            ends[name] = ends.get(name, 0) + data.draw(st.integers(0, 30))
        visible = [info(name, end) for name, end in sorted(ends.items()) if data.draw(st.booleans())]
        budget = data.draw(st.one_of(st.none(), st.integers(1, 40)))
        limit = None if budget is None else Limit(budget, data.draw(st.integers(1, 20)), {})
        following = advance(offset, visible, (), asked(), limit)
        for name, first, end in spans(offset, parse_offset(following.plain())):
            seen.setdefault(name, []).extend(range(first, end))
        offset = following
    last = advance(offset, [info(name, end) for name, end in ends.items()], (), asked(), None)
    for name, first, end in spans(offset, last):
        seen.setdefault(name, []).extend(range(first, end))
    assert seen == {name: list(range(end)) for name, end in ends.items() if end}


def test_a_partition_that_came_and_went_under_the_name_of_one_that_was_read_is_a_loss_or_a_row() -> None:
    """Its number was used twice between two triggers: 1 was read, 2 is gone unread, 3 is there, or nothing."""
    start = StreamOffset({"t.1": Position(1, 8)})
    ended, gone = {("t.1", 1): 8, ("t.1", 2): 5}, {"t": [("t.1", 1, 8), ("t.1", 2, 5)]}
    assert without_passed_over(ended, {"t": [("t.1", 1, 8), ("t.1", 2, 0)]}, start) == ended, "nothing was in it"
    assert without_passed_over(ended, {"t": [("t.1", 2, 5), ("t.1", 1, 8)]}, start) == ended, "that was before"
    left = without_passed_over(ended, gone, start)
    assert left == {("t.1", 2): 5} and not is_read("t.1", start.logs["t.1"], left)
    new = info("t.1", 4, uid=3)
    with pytest.raises(DataLoss, match=r"t\.1"):
        advance(start, [new], set(), asked(), None, left)
    end = advance(start, [new], set(), asked(failOnDataLoss="false"), None, left)
    assert between(start, end) == Batch([Wanted("t.1", 3, 0, 4)], [Lost("t.1", 8)])


def test_a_partition_that_came_and_went_and_was_never_seen_is_a_loss_or_a_row() -> None:
    gone = {
        "t": [("t.1", 1, 8), ("t.1", 2, 5), ("t.2", 3, 0), ("t.1", 4, 1), ("t.3", 5, 2)],
        "other": [("other.1", 9, 9)],
    }
    start = StreamOffset({"t.3": Position(7, 1)}, gone={"t": 1})
    assert came_and_went(gone, start) == ["t.1"], "t.2 was empty, t.3 is known, other was not looked at then"
    assert came_and_went(gone, StreamOffset(gone={"t": 4})) == ["t.3"]
    assert came_and_went(gone, StreamOffset(gone={"t": 0})) == ["t.1", "t.3"]
    assert came_and_went(gone, StreamOffset(gone={"t": 77})) == ["t.1", "t.3"], "the list was cut"
    assert came_and_went(gone, StreamOffset(gone={"t": 5})) == came_and_went(gone, StreamOffset()) == []
    end = StreamOffset(start.logs, gone={"t": 5}, lost=("t.1",))
    plain = json.loads(json.dumps(end.plain()))
    assert parse_offset(plain) == end and plain["gone"] == {"t": 5} and plain["lost"] == ["t.1"]
    assert between(start, end) == Batch([], [Lost("t.1", 0)]) and between(end, replace(end, lost=())) == Batch([], [])
    damaged: list[dict[str, Any]] = [{"gone": []}, {"gone": {"t": "x"}}, {"lost": "t.1"}, {"lost": [1]}]
    for wrong in damaged:
        with pytest.raises(BadOffset, match="damaged"):
            parse_offset({**plain, **wrong})

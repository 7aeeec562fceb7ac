"""Sinks against real processes, without Spark: what is in the logs after crashes at every step, repeats, and drivers
that do not know of each other. Contents are compared, never counts."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count
from typing import Any

import msgpack
import pyarrow
import pytest

from logyard.client.sync import Yard
from logyard.pipeline.errors import OptionError
from logyard.pipeline.sink import core
from logyard.pipeline.sink.core import Sink, Writing, Written, open_sink
from logyard.pipeline.sink.options import SINK_OPTIONS, SinkOptions, parse_sink, sink_table
from logyard.pipeline.sink.record import (
    Cut,
    Fenced,
    SinkError,
    SinkLog,
    Stored,
    pack_ranges,
    read_state,
    unpack_ranges,
)
from logyard.pipeline.sink.rows import check_columns, frames
from logyard.protocol.errors import LogyardError, OutOfRange, Refused, WrongKind
from logyard.protocol.records import Record
from logyard.service.local_cluster import LocalCluster
from tests.source_tree import ROOT

from .support import reach

Row = tuple[str, bytes, bytes | None]
NUMBERS = count()
STEPS = (
    "mid-write", "after-write", "before-commit", "after-manifest", "mid-fan-out", "before-done", "before-truncation",
    "after-truncation",
)  # fmt: skip

BOTH = ("exactly-once", "exactly-once-direct")


class Crash(BaseException):
    """The process is gone: nothing may catch it."""


def arrow(rows: Sequence[Row], size: int = 1000) -> list[pyarrow.RecordBatch]:
    """Rows as Spark would bring them, in batches of `size`."""
    schema = pyarrow.schema([("log", pyarrow.string()), ("meta", pyarrow.binary()), ("payload", pyarrow.binary())])
    return [
        pyarrow.RecordBatch.from_pylist(
            [dict(zip(schema.names, row, strict=True)) for row in rows[first : first + size]], schema
        )
        for first in range(0, len(rows), size)
    ]


class Query:
    """A query that writes to a sink: its batches are lists of tasks of rows. `run` is a new one after each restart."""

    def __init__(self, cluster: LocalCluster, guarantee: str = "exactly-once", **more: str) -> None:
        self.number = next(NUMBERS)
        self.given = {
            "servers": ",".join(cluster.addresses), "sinkId": f"sink-{self.number}", "deliveryGuarantee": guarantee,
            "createLogs": "true", "timeoutSeconds": "20", **more,
        }  # fmt: skip
        self.query, self.run = f"query-{self.number}", 0

    @property
    def options(self) -> SinkOptions:
        return parse_sink(self.given, True)

    def sink(self) -> Sink:
        return open_sink(self.options)

    def restart(self) -> None:
        self.run += 1

    def writing(self, batch: int) -> Writing:
        return Writing(batch, self.query, f"run-{self.number}-{self.run}")

    def write(self, batch: int, tasks: Sequence[Sequence[Row]], size: int = 1000) -> list[Written]:
        found = []
        for number, rows in enumerate(tasks):
            sink = self.sink()
            with closing(sink.yard):
                found.append(sink.write(arrow(rows, size), self.writing(batch), number))
        return found

    def commit(self, written: Sequence[Written], batch: int) -> None:
        sink = self.sink()
        with closing(sink.yard):
            sink.commit(written, batch)

    def do(self, batch: int, tasks: Sequence[Sequence[Row]], size: int = 1000) -> None:
        self.commit(self.write(batch, tasks, size), batch)

    def log(self, name: str) -> str:
        return f"{name}-{self.number}"

    def rows(self, batch: int, draw: random.Random, tasks: int = 2, logs: int = 3) -> list[list[Row]]:
        """Rows of all kinds: without payload, empty, small, beyond a pack, one in pieces now and then."""
        kinds: list[Callable[[], bytes | None]] = [
            lambda: None, lambda: b"", lambda: draw.randbytes(50), lambda: draw.randbytes(9000),
        ]  # fmt: skip
        found = [
            [
                (self.log(f"log{draw.randrange(logs)}"), b"%d %d %d" % (batch, task, number), draw.choice(kinds)())
                for number in range(draw.randint(1, 40))
            ]
            for task in range(tasks)
        ]
        if draw.random() < 0.3:
            found[0].append((self.log("log0"), b"large", draw.randbytes((1 << 20) + 1)))
        return found


def content(yard: Yard, name: str) -> list[tuple[bytes, bytes | None]]:
    return [
        (bytes(one.metadata), None if one.payload is None else bytes(one.payload)) for one in yard.log(name).records()
    ]


def check(yard: Yard, batches: Sequence[Sequence[Sequence[Row]]]) -> None:
    """Each log holds each batch's rows once, batch behind batch, a task's in their order."""
    names = {row[0] for tasks in batches for rows in tasks for row in rows}
    for name in sorted(names):
        found = content(yard, name)
        at = 0
        for tasks in batches:
            wanted = [[row[1:] for row in rows if row[0] == name] for rows in tasks]
            part = found[at : at + sum(map(len, wanted))]
            assert Counter(part) == Counter(row for rows in wanted for row in rows), name
            for rows in wanted:
                own = [one for one in part if one in rows]
                assert own == rows, (name, "in the order of a task's rows")
            at += len(part)
        assert at == len(found), (name, "and nothing else")


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Crash before the nth time that a step comes; it happens once."""

    def arm(step: str, number: int) -> None:
        left = [number]

        def hook(came: str) -> None:
            if came == step:
                left[0] -= 1
                if left[0] == 0:
                    raise Crash(step)

        monkeypatch.setattr(core, "HOOK", hook)

    return arm


@pytest.mark.sample(3)
@pytest.mark.parametrize("guarantee", BOTH)
@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_and_a_repeat_leave_each_batch_once(
    cluster: LocalCluster, yard: Yard, crashing: Callable[[str, int], None], guarantee: str, step: str
) -> None:
    draw = random.Random(f"{guarantee} {step}")
    query = Query(cluster, guarantee)
    batches = [query.rows(number, draw) for number in range(3)]
    query.do(0, batches[0])
    staged = guarantee == "exactly-once"
    several, never = step.startswith("mid"), not staged and step not in ("mid-write", "after-write", "before-done")
    crashing(step, draw.randint(1, 2) if several else 1)
    if never:
        query.do(1, batches[1])
    else:
        with pytest.raises(Crash):
            query.do(1, batches[1])
    query.restart()
    for number in (1, 2):
        query.do(number, batches[number], size=draw.choice((1, 7, 1000)))
    check(yard, batches)
    for stage in range(2 if staged else 0):
        start, end = yard.log(f"sink-{query.number}.stage-{stage}").latest()
        assert start > 0 and end - start <= sum(map(len, batches[2])), "what is committed is not kept twice"


@contextmanager
def without_majority(cluster: LocalCluster) -> Iterator[Callable[[], None]]:
    """Give what stops two of three nodes; they go on afterwards, or when it is called again."""
    processes = [cluster.nodes[number].process for number in (2, 3)]
    signals = iter((signal.SIGSTOP, signal.SIGCONT))

    def turn() -> None:
        number = next(signals, signal.SIGCONT)
        for one in processes:
            assert one is not None
            one.send_signal(number)

    try:
        yield turn
    finally:
        next(signals, None)
        turn()


LOST_AT = (("exactly-once", "mid-write"), ("exactly-once", "mid-fan-out"), ("exactly-once-direct", "mid-write"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("guarantee", "step"), LOST_AT)
def test_a_majority_that_is_away_for_a_while_delays_a_batch_and_no_more(
    cluster: LocalCluster, yard: Yard, monkeypatch: pytest.MonkeyPatch, guarantee: str, step: str
) -> None:
    query = Query(cluster, guarantee)
    batches = [query.rows(number, random.Random(f"{step} {number}")) for number in range(2)]
    query.do(0, batches[0])
    with without_majority(cluster) as turn:
        back, once = threading.Timer(1.5, turn), iter([True])

        def hook(came: str) -> None:
            # Several threads come here.
            if came == step and next(once, False):
                turn()
                back.start()

        monkeypatch.setattr(core, "HOOK", hook)
        query.do(1, batches[1])
        assert back.finished.is_set(), "it was done while there was a majority"
        back.join()
    check(yard, batches)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("guarantee", "step"), [*LOST_AT, ("exactly-once", "before-commit")])
def test_a_majority_that_stays_away_ends_a_batch_in_time_and_a_restart_finishes_it(
    cluster: LocalCluster, yard: Yard, monkeypatch: pytest.MonkeyPatch, guarantee: str, step: str
) -> None:
    query = Query(cluster, guarantee)
    log = query.log("log")
    # All that is made once is there before.
    batches = [[[(log, b"%d %d" % (batch, number), b"x") for number in range(50)]] for batch in range(2)]
    query.do(0, batches[0])
    query.given["timeoutSeconds"] = "3"
    with without_majority(cluster) as turn:
        stopped, once = list[float](), iter([True])

        def hook(came: str) -> None:
            if came == step and next(once, False):
                stopped.append(time.monotonic())
                turn()

        monkeypatch.setattr(core, "HOOK", hook)
        with pytest.raises(LogyardError) as failed:
            query.do(1, batches[1])
        assert stopped, failed.value
        assert not isinstance(failed.value, SinkError) and time.monotonic() - stopped[0] < 20
    if step in ("before-commit", "mid-write") and guarantee == "exactly-once":
        check(yard, batches[:1])
    query.restart()
    query.given["timeoutSeconds"] = "20"
    for number in (0, 1):
        query.do(number, batches[number])
    check(yard, batches)


@pytest.mark.parametrize("guarantee", BOTH)
def test_a_batch_that_is_done_is_not_written_again(cluster: LocalCluster, yard: Yard, guarantee: str) -> None:
    """As after the last entries of a checkpoint's commit log were lost."""
    query, draw = Query(cluster, guarantee), random.Random(1)
    batches = [query.rows(number, draw) for number in range(4)]
    for number, tasks in enumerate(batches):
        query.do(number, tasks)
    query.restart()
    for number in (2, 3):
        query.do(number, batches[number])
    batches.append(query.rows(4, draw))
    query.do(4, batches[4])
    check(yard, batches)


@pytest.mark.sample(1)
@pytest.mark.parametrize("guarantee", BOTH)
def test_payloads_up_to_the_largest_are_in_one_batch_with_none_at_all(
    cluster: LocalCluster, yard: Yard, guarantee: str
) -> None:
    query, draw = Query(cluster, guarantee, timeoutSeconds="60"), random.Random(63)
    log = query.log("log")
    sizes = (None, 100, (1 << 20) + 1, 0, 63 << 20, 100)
    tasks: list[list[Row]] = [
        [(log, b"%d" % number, None if size is None else draw.randbytes(size))
         for number, size in enumerate(sizes)],
        [], [(query.log("other"), b"", None)],
    ]  # fmt: skip
    written = query.write(0, tasks)
    query.restart()
    query.commit(query.write(0, tasks), 0)
    with pytest.raises(Fenced):
        query.commit(written, 0)
    check(yard, [tasks])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_thousand_restarts_with_other_tasks_meet_no_limit_of_producers(cluster: LocalCluster, yard: Yard) -> None:
    """Each restart finds a batch half written, by as many tasks as it was; the next one has more or fewer."""
    query, draw = Query(cluster, "exactly-once-direct"), random.Random(1100)
    log, wanted = query.log("log"), list[list[list[Row]]]()
    sink = query.sink()
    with closing(sink.yard):
        for batch in range(1100):
            count = draw.randint(1, 3)
            tasks: list[list[Row]] = [
                [(log, b"%d %d %d" % (batch, task, n), None) for n in range(2)] for task in range(count)
            ]
            wanted.append(tasks)
            for task in draw.sample(range(count), draw.randint(0, count)):
                sink.write(arrow(tasks[task]), query.writing(batch), task)
            query.restart()
            found = [sink.write(arrow(rows), query.writing(batch), task) for task, rows in enumerate(tasks)]
            sink.commit(found, batch)
    check(yard, wanted)


def test_a_stage_refuses_limits_on_what_it_keeps(cluster: LocalCluster, yard: Yard) -> None:
    query = Query(cluster)
    query.do(0, [[(query.log("log0"), b"one", b"body")]])
    with pytest.raises(Refused, match="stage"):
        yard.log(f"sink-{query.number}.stage-0").retain(records=1)


def test_a_batch_is_done_with_the_guarantee_that_it_was_begun_with(
    cluster: LocalCluster, yard: Yard, crashing: Callable[[str, int], None]
) -> None:
    """Each writes under numbers of its own: what the first one wrote would be there twice."""
    for guarantee, other in (BOTH, BOTH[::-1]):
        query = Query(cluster, guarantee)
        rows: list[list[Row]] = [[(query.log(name), b"%d" % number, b"x") for number in range(5)] for name in "ab"]
        crashing("before-done", 1)
        with pytest.raises(Crash):
            query.do(0, rows)
        query.restart()
        query.given["deliveryGuarantee"] = other
        with pytest.raises(SinkError, match=f"was begun with deliveryGuarantee={guarantee}:"):
            query.do(0, rows)
        query.given["deliveryGuarantee"] = guarantee
        query.do(0, rows)
        query.given["deliveryGuarantee"] = other
        more: list[list[Row]] = [[(query.log("a"), b"more", b"y")]]
        query.do(1, more)
        check(yard, [rows, more])


def test_a_source_that_is_not_pure_is_sound_in_stages_and_refused_where_it_is_written_at_once(
    cluster: LocalCluster, yard: Yard, crashing: Callable[[str, int], None]
) -> None:
    for guarantee in BOTH:
        query, draw = Query(cluster, guarantee), random.Random(2)
        first = [[(query.log("log"), b"%d" % number, draw.randbytes(20)) for number in range(20)]]
        second = [[(query.log("log"), b"%d" % number, draw.randbytes(20)) for number in range(20)]]
        crashing("after-write", 1)
        with pytest.raises(Crash):
            query.do(0, first)
        query.restart()
        if guarantee == "exactly-once":
            query.do(0, second)
            check(yard, [second])
        else:
            with pytest.raises(SinkError, match="not pure") as refused:
                query.do(0, second)
            assert refused.value.code == "sequence_differs"
            check(yard, [first])


def test_what_a_manifest_says_counts_and_not_the_rows_of_a_repeat(
    cluster: LocalCluster, yard: Yard, crashing: Callable[[str, int], None]
) -> None:
    query, draw = Query(cluster), random.Random(3)
    first, second = query.rows(0, draw), query.rows(0, draw, tasks=3)
    crashing("mid-fan-out", 1)
    with pytest.raises(Crash):
        query.do(0, first)
    query.restart()
    query.do(0, second)
    check(yard, [first])


@pytest.mark.parametrize("guarantee", BOTH)
def test_a_driver_that_was_stopped_is_fenced_when_it_goes_on(cluster: LocalCluster, yard: Yard, guarantee: str) -> None:
    draw = random.Random(4)
    old, new = Query(cluster, guarantee), Query(cluster, guarantee)
    new.given, new.query, new.number = old.given, old.query, old.number
    batches = [old.rows(number, draw) for number in range(3)]
    old.do(0, batches[0])
    written = old.write(1, batches[1])
    new.restart()
    new.do(1, batches[1])
    with pytest.raises(Fenced):
        old.commit(written, 1)
    new.do(2, batches[2])
    with pytest.raises(Fenced):
        old.write(2, batches[2])
    with pytest.raises(Fenced):
        old.commit(written, 1)
    check(yard, batches)


def test_a_zombie_task_beside_the_next_batch_changes_nothing(cluster: LocalCluster, yard: Yard) -> None:
    query, draw = Query(cluster, "exactly-once-direct"), random.Random(5)
    batches = [query.rows(number, draw) for number in range(2)]
    query.do(0, batches[0])
    late = query.sink()
    with closing(late.yard):
        own, _ = late.begin(query.writing(0))
        state = own.load()
        assert state is not None
        writer = late.yard.log(query.log("log0")).epoch(*own.epoch(state, 0), 0)
        query.do(1, [[(query.log("log0"), b"1", b"1")]])
        with pytest.raises(LogyardError) as refused:
            writer.append(b"late", number=9)
        assert refused.value.code == "fenced"
        assert late.write(arrow(batches[0][0]), query.writing(0), 0).rows == 0
    check(yard, [batches[0], [[(query.log("log0"), b"1", b"1")]]])


@pytest.mark.parametrize("guarantee", BOTH)
def test_a_checkpoint_that_is_gone_is_refused_until_the_sink_is_reset(
    cluster: LocalCluster, yard: Yard, guarantee: str
) -> None:
    query, draw = Query(cluster, guarantee), random.Random(6)
    batches = [query.rows(number, draw) for number in range(4)]
    query.do(0, batches[0])
    query.do(1, batches[1])
    query.query += " anew"
    query.restart()
    with pytest.raises(SinkError, match="sinkReset"):
        query.do(0, batches[2])
    query.given["sinkReset"] = "true"
    query.do(0, batches[2])
    query.do(1, batches[3])
    check(yard, batches)


class Emptied:
    """A sink's log of which all was truncated."""

    def __init__(self) -> None:
        self.reads = 0

    def latest(self) -> tuple[int, int]:
        return 7, 7

    def read(self, offset: int) -> Any:
        self.reads += 1
        assert self.reads < 100, "it looks for ever for what is not there"
        raise OutOfRange("it is truncated", start=7, end=7)

    def append_many(self, records: Any, *, at: int | None = None) -> range:
        raise AssertionError("nothing is known that could be written")

    def truncate(self, before: int) -> int:
        raise AssertionError("nothing is there")


def test_a_sink_whose_log_was_truncated_says_so() -> None:
    with pytest.raises(SinkError, match=r"^sink 's': the records of its log were truncated.*sinkReset=true"):
        SinkLog(Emptied(), 1, "sink 's'").load()


@pytest.mark.parametrize("guarantee", BOTH)
def test_no_row_goes_to_the_logs_that_a_sink_keeps_itself_in(cluster: LocalCluster, yard: Yard, guarantee: str) -> None:
    query, draw = Query(cluster, guarantee), random.Random(8)
    batches = [query.rows(number, draw) for number in range(2)]
    query.do(0, batches[0])
    for own in ("log", "stage-0", "stage-77"):
        with pytest.raises(SinkError, match=rf"^sink 'sink-{query.number}': log .* is the sink's own"):
            query.do(1, [[(f"sink-{query.number}.{own}", b"", b"x")]])
    query.do(1, batches[1])
    check(yard, batches)


def test_a_sink_whose_log_is_gone_is_refused_until_it_is_reset(cluster: LocalCluster, yard: Yard) -> None:
    query, draw = Query(cluster), random.Random(7)
    batches = [query.rows(number, draw) for number in range(2)]
    query.do(0, batches[0])
    yard.delete(f"sink-{query.number}.log")
    with pytest.raises(SinkError, match="its log deleted"):
        query.do(1, batches[1])
    query.given["sinkReset"] = "true"
    query.do(1, batches[1])
    check(yard, batches)


def test_a_sink_goes_on_after_resets_and_the_deletion_of_its_log(cluster: LocalCluster, yard: Yard) -> None:
    query, draw = Query(cluster, sinkReset="true"), random.Random(7)
    batches = [query.rows(number, draw) for number in range(6)]
    for number, tasks in enumerate(batches[:3]):
        query.query = f"query-{query.number}-{number}"
        query.do(0, tasks)
    query.do(1, batches[3])
    yard.delete(f"sink-{query.number}.log")
    query.do(2, batches[4])
    yard.delete(f"sink-{query.number}.log")
    query.query = f"query-{query.number}-last"
    query.do(0, batches[5])
    check(yard, batches)


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("guarantee", BOTH)
def test_a_late_commit_finishes_nothing_of_a_sink_that_was_reset_meanwhile(
    cluster: LocalCluster, yard: Yard, monkeypatch: pytest.MonkeyPatch, guarantee: str, batch: int
) -> None:
    """The new query's batches have the same numbers: those up to the late one would count as done, unwritten."""
    query, draw = Query(cluster, guarantee), random.Random(7)
    batches = [query.rows(number, draw) for number in range(batch + 3)]
    for number in range(batch):
        query.do(number, batches[number])
    late, anew = batches[batch], batches[batch + 1 :]
    other = Query(cluster, guarantee, sinkReset="true", sinkId=f"sink-{query.number}")
    begun: list[list[Written]] = []

    def hook(step: str) -> None:
        if step == "before-done":
            monkeypatch.setattr(core, "HOOK", None)
            begun.append(other.write(0, anew[0]))

    monkeypatch.setattr(core, "HOOK", hook)
    with pytest.raises(Fenced, match="the sink was reset while batch"):
        query.do(batch, late)
    other.commit(begun[0], 0)
    other.do(1, anew[1])
    check(yard, batches)


def test_a_stage_that_is_deleted_behind_the_manifest_is_missed(
    cluster: LocalCluster, yard: Yard, crashing: Callable[[str, int], None]
) -> None:
    query = Query(cluster, stageLogs="1")
    names = [query.log("a"), query.log("b")]
    rows = [[(name, b"%d" % number, name.encode()) for number in range(5)] for name in names]
    crashing("after-manifest", 1)
    with pytest.raises(Crash):
        query.do(0, rows)
    query.restart()
    yard.delete(f"sink-{query.number}.stage-0")
    # Its tasks end in another order this time.
    with pytest.raises(
        SinkError, match=r"batch 0, which is committed, are not in their stage any more .*stage-0' del"
    ) as error:
        query.do(0, rows[::-1])
    assert not isinstance(error.value, Fenced)
    assert content(yard, names[0]) == content(yard, names[1]) == []
    query.given["sinkReset"] = "true"
    query.restart()
    query.do(0, rows)
    query.do(1, rows)
    check(yard, [rows, rows])


def test_a_stage_that_is_deleted_while_a_task_writes_to_it_fails_the_task(
    cluster: LocalCluster, yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(cluster, stageLogs="1")
    rows = [[(query.log("a"), b"%d" % number, b"a") for number in range(5)]]

    def hook(step: str) -> None:
        if step == "after-write":
            monkeypatch.setattr(core, "HOOK", None)
            yard.delete(f"sink-{query.number}.stage-0")
            reach(lambda: f"sink-{query.number}.stage-0" not in {row["name"] for row in yard.list()})

    monkeypatch.setattr(core, "HOOK", hook)
    with pytest.raises(SinkError, match="was deleted while this task wrote to it"):
        query.write(0, rows)
    query.do(0, rows)
    check(yard, [rows])


def test_rows_do_not_go_to_the_log_of_another_sink(cluster: LocalCluster, yard: Yard) -> None:
    other, query = Query(cluster), Query(cluster, "at-least-once")
    rows = [[(other.log("a"), b"0", b"a")]]
    other.do(0, rows)
    own = f"sink-{other.number}.log"
    for name in (own, f"sink-{other.number}.stage-0"):
        with pytest.raises(SinkError, match=rf"log '{name}' is another sink's own"):
            query.do(0, [[(name, b"0", b"a")]])
    other.do(1, rows)
    # Of a name that looks like one nothing is thought.
    name = f"app-{query.number}.log"
    query.do(1, [[(name, b"done", b"a")]])
    query.do(2, [[(name, b"1", b"a")]])
    assert content(yard, name) == [(b"done", b"a"), (b"1", b"a")]
    yard.log(own).append(b"mine", b"hello")
    with pytest.raises(SinkError, match=r"record \d+ of the sink's log is no sink's.*sinkReset=true goes on"):
        other.do(2, rows)
    yard.delete(own)
    other.given["sinkReset"] = "true"
    other.do(2, rows)
    check(yard, [rows] * 3)


def test_a_plain_batch_below_the_newest_is_refused(cluster: LocalCluster, yard: Yard) -> None:
    query = Query(cluster)
    query.query = ""
    rows = [[(query.log("a"), b"%d" % number, b"a")] for number in (25, 20, 26)]
    query.do(20261125, rows[:1])
    query.do(20261125, rows[:1])
    query.restart()
    with pytest.raises(SinkError, match=r"batchId 20261120 is below 20261125.*have to rise"):
        query.do(20261120, rows[1:2])
    query.do(20261126, rows[2:])
    check(yard, [rows[:1], rows[2:]])


def test_a_plain_batch_that_was_committed_is_finished_before_another_one(
    cluster: LocalCluster, yard: Yard, crashing: Callable[[str, int], None]
) -> None:
    query, draw = Query(cluster), random.Random(9)
    query.query = ""
    batches = [query.rows(number, draw) for number in range(2)]
    crashing("after-manifest", 1)
    with pytest.raises(Crash):
        query.do(7, batches[0])
    query.restart()
    with pytest.raises(SinkError, match="batch 7 was committed and is not finished: write it again first"):
        query.do(8, batches[1])
    query.do(7, query.rows(2, draw))
    query.do(8, batches[1])
    check(yard, batches)


def test_a_plain_batch_of_which_a_stage_is_lost_is_written_again_by_a_reset(
    cluster: LocalCluster, yard: Yard, crashing: Callable[[str, int], None]
) -> None:
    query, draw = Query(cluster, stageLogs="1"), random.Random(10)
    query.query = ""
    batches = [query.rows(number, draw) for number in range(2)]
    crashing("after-manifest", 1)
    with pytest.raises(Crash):
        query.do(7, batches[0])
    query.restart()
    yard.delete(f"sink-{query.number}.stage-0")
    with pytest.raises(SinkError, match=r"are not in their stage any more.*sinkReset=true writes the batch again"):
        query.do(7, batches[0])
    query.given["sinkReset"] = "true"
    query.restart()
    with pytest.raises(SinkError, match="batch 7 was committed and is not finished"):
        query.do(8, batches[1])
    for number in (0, 1):
        query.do(7 + number, batches[number])
    check(yard, batches)


def test_plain_writes_take_over_the_sink_of_a_query_by_a_reset(cluster: LocalCluster, yard: Yard) -> None:
    query, draw = Query(cluster), random.Random(11)
    batches = [query.rows(number, draw) for number in range(5)]
    for number in range(3):
        query.do(number, batches[number])
    query.query = ""
    query.restart()
    with pytest.raises(SinkError, match="batchId 1 is below 2"):
        query.do(1, batches[3])
    query.given["sinkReset"] = "true"
    for number in (3, 4):
        query.do(number - 2, batches[number])
        query.do(number - 2, batches[number])
    check(yard, batches)


def test_a_manifest_of_an_earlier_build_is_read() -> None:
    packed = msgpack.packb([1, "manifest", 5, "query", 3, 2, ["run"], [["a", "b"], [[1, 0, 7, 9]]], [4, 5], 8])
    state = read_state(Record(10, b"manifest", len(packed), 1, 1, 99, memoryview(packed)))
    assert (state.at, state.incarnation, state.ranges) == (11, 5, (Stored("b", 0, 7, 9),))
    kept = (Stored("a", 1, 0, 1, 1 << 60), Stored("b", 2, 3, 4, 1 << 61), Stored("a", 1, 1, 2, 1 << 60))
    assert unpack_ranges(msgpack.unpackb(msgpack.packb(pack_ranges(kept)))) == kept


def test_another_checkpoint_of_the_same_query_that_is_ahead_is_refused(cluster: LocalCluster) -> None:
    query, draw = Query(cluster), random.Random(8)
    query.do(0, query.rows(0, draw))
    with pytest.raises(SinkError, match="never finished"):
        query.do(2, query.rows(2, draw))


@pytest.mark.parametrize("guarantee", BOTH)
def test_a_log_that_is_not_there_fails_before_anything_is_visible(
    cluster: LocalCluster, yard: Yard, guarantee: str
) -> None:
    query = Query(cluster, guarantee, createLogs="false")
    there, missing = query.log("there"), query.log("missing")
    yard.create_many([there])
    rows = [[(there, b"1", b"1"), (missing, b"2", b"2")]]
    with pytest.raises(SinkError, match=f"there is no log '{missing}'; createLogs"):
        query.do(0, rows)
    if guarantee == "exactly-once":
        assert content(yard, there) == []
    query.restart()
    query.given["createLogs"] = "true"
    query.do(0, rows)
    check(yard, [rows])


@pytest.mark.parametrize("made", [{"machine": "kv"}, {"machine": "queue"}, {"compact": "key"}, {}])
def test_what_takes_no_rows_fails_before_anything_is_visible(
    cluster: LocalCluster, yard: Yard, made: dict[str, Any]
) -> None:
    """Without `made` a partition that was taken away."""
    query = Query(cluster)
    there, other = query.log("a"), query.log("b")
    if made:
        yard.create(other, **made)
    else:
        topic = yard.topic(other)
        topic.create(2)
        topic.send_many([(b"%d" % number, b"", b"") for number in range(50)])
        other = topic.shrink(1).draining[0].log
    with pytest.raises(WrongKind if "machine" in made else Refused, match=other):
        query.do(0, [[(there, b"1", b"1"), (other, b"2", b"2")]])
    assert content(yard, there) == []
    query.restart()
    rows = [[(there, b"3", b"3")]]
    query.do(0, rows)
    check(yard, [rows])


@pytest.mark.parametrize("way", ["createLogs", "dropMissing"])
def test_a_log_that_is_deleted_behind_the_manifest(
    cluster: LocalCluster, yard: Yard, crashing: Callable[[str, int], None], way: str
) -> None:
    query = Query(cluster, createLogs="false")
    kept, gone = query.log("kept"), query.log("gone")
    yard.create_many([kept, gone])
    rows = [[(gone, b"1", b"1"), (kept, b"2", b"2")]]
    crashing("after-manifest", 1)
    with pytest.raises(Crash):
        query.do(0, rows)
    yard.delete(gone)
    with pytest.raises(SinkError, match=f"{gone!r} was deleted after batch 0"):
        query.commit([], 0)
    query.given[way] = "true"
    query.do(0, rows)
    assert content(yard, kept) == [(b"2", b"2")]
    assert (
        content(yard, gone) == [(b"1", b"1")]
        if way == "createLogs"
        else gone not in [one["name"] for one in yard.list()]
    )


def test_an_empty_batch_is_a_batch(cluster: LocalCluster, yard: Yard) -> None:
    for guarantee in BOTH:
        query = Query(cluster, guarantee)
        query.do(0, [])
        query.do(1, [[], []])
        rows = [[(query.log("log"), b"", None)]]
        query.do(2, rows)
        check(yard, [rows])


def test_at_least_once_writes_what_it_gets_as_often_as_it_gets_it(cluster: LocalCluster, yard: Yard) -> None:
    query = Query(cluster, "at-least-once")
    rows = [[(query.log("log"), b"1", b"x" * 10), (query.log("log"), b"2", b"y" * ((1 << 20) + 1))]]
    query.do(0, rows)
    query.do(0, rows)
    check(yard, [rows, rows])


def test_two_writes_of_one_run_need_a_sink_each(cluster: LocalCluster, yard: Yard) -> None:
    """As in foreachBatch: the same batch of another run is a repeat, another job of the same run is a mistake."""
    query = Query(cluster)
    rows = [[(query.log("log"), b"1", b"1")]]

    def do(run: str) -> None:
        sink = query.sink()
        with closing(sink.yard):
            written = [sink.write(arrow(task), Writing(3, "", run), number) for number, task in enumerate(rows)]
            sink.commit(written, 3)

    do("run/job-1")
    with pytest.raises(SinkError, match="one sinkId per write"):
        do("run/job-2")
    do("later/job-3")
    check(yard, [rows])


def test_frames_follow_from_the_rows_of_a_log_alone() -> None:
    draw = random.Random(9)
    rows = [(f"log{draw.randrange(3)}", b"m", draw.randbytes(draw.choice((1, 200, 3000)))) for _ in range(500)]
    rows.insert(100, ("log1", b"large", bytes((1 << 20) + 1)))
    cut = Cut(20, 10_000)
    wanted: dict[str, list[Any]] = {}
    for size in (1, 3, 1000):
        found: dict[str, list[Any]] = {}
        for one in frames(arrow(rows, size), None, cut):
            assert len(one.records) <= 20 and (len(one.records) == 1 or one.size <= 10_000)
            found.setdefault(one.log, []).append(one.records)
        wanted = wanted or found
        assert found == wanted
    # Rows of other logs in between change nothing either.
    alone = [one.records for one in frames(arrow([row for row in rows if row[0] == "log2"]), None, cut)]
    assert alone == wanted["log2"]
    assert [row[1:] for row in rows if row[0] == "log1"] == [row for records in wanted["log1"] for row in records]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (("", b"", b""), "a row has no log"),
        (("a", bytes((64 << 10) + 1), b""), "a row's meta has 65537 bytes"),
        (("a", b"", bytes((63 << 20) + 1)), "a row's payload has 66060289 bytes"),
    ],
)
def test_a_row_that_cannot_be_stored_is_refused(row: Row, said: str) -> None:
    with pytest.raises(SinkError, match=said):
        list(frames(arrow([row]), None, Cut()))
    assert list(frames(arrow([]), None, Cut())) == []


def test_a_gap_is_no_row() -> None:
    batch = pyarrow.RecordBatch.from_pylist([{"log": "a", "payload": b"", "kind": "gap"}])
    with pytest.raises(SinkError, match="kind = 'record'"):
        list(frames([batch], None, Cut()))


@pytest.mark.parametrize(
    ("columns", "log", "said"),
    [
        ([("log", "string")], None, "payload: a sink needs this column"),
        ([("payload", "binary")], None, "log: give the option, or a column"),
        ([("payload", "int")], "a", "payload: this column is int"),
        ([("payload", "binary"), ("log", "binary")], None, "log: this column is binary; string is expected"),
        ([("payload", "binary"), ("offset", "bigint")], "a", "offset: a sink has no such column"),
    ],
)
def test_columns_that_a_sink_does_not_take(columns: list[tuple[str, str]], log: str | None, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        check_columns(columns, log)
    check_columns([("payload", "string"), ("meta", "binary"), ("log", "string")], None)


@pytest.mark.parametrize(
    ("given", "streaming", "said"),
    [
        ({}, True, "servers: it is needed"),
        ({"servers": "a:1"}, True, "sinkId: it is needed: exactly-once knows"),
        ({"servers": "a:1", "sinkid": "s", "batchid": "1"}, True, "batchId: a stream has its own"),
        ({"servers": "a:1", "sinkId": "s", "deliveryGuarantee": "exactly-once"}, False, "batchId: it is needed"),
        ({"servers": "a:1", "sinkId": "s" * 101}, True, "sinkId: a name of 1 to 100"),
        ({"servers": "a:1", "deliveryGuarantee": "once"}, True, "deliveryGuarantee: exactly-once,"),
        (
            {"servers": "a:1", "batchId": "3", "deliveryGuarantee": "at-least-once"},
            False,
            "batchId: at-least-once keeps",
        ),
        ({"servers": "a:1", "topic": "t"}, True, "topic: a sink has no such option; here it is log"),
        ({"servers": "a:1", "createlog": "t"}, True, "createlog: a sink has no such option; is it createLogs"),
        ({"servers": "a:1", "sinkId": "s", "tlsCa": "x"}, True, "tlsCertificate: it is needed too"),
        ({"servers": "nowhere", "sinkId": "s"}, True, "servers: "),
        ({"servers": "a:1", "sinkId": "s", "members": "1,b"}, True, "members: numbers of nodes"),
    ],
)
def test_options_that_are_refused(given: dict[str, str], streaming: bool, said: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_sink(given, streaming)
    assert str(refused.value).startswith(said)


def test_the_documented_table_is_this_one() -> None:
    page = (ROOT / "docs" / "guides" / "spark.md").read_text("utf-8")
    assert sink_table() in page, "docs/guides/spark.md: put in what sink.options.sink_table() gives"
    assert all(one.doc.endswith(".") and "|" not in one.doc for one in SINK_OPTIONS)


def test_options_by_default() -> None:
    stream = parse_sink({"servers": "a:1", "sinkId": "s", "checkpointlocation": "x"}, True)
    assert (stream.guarantee, stream.stages, stream.create) == ("exactly-once", 8, False)
    assert parse_sink({"servers": "a:1"}, False).guarantee == "at-least-once"
    assert parse_sink({"servers": "a:1", "sinkId": "s", "batchId": "4"}, False).guarantee == "exactly-once"

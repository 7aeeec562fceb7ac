"""Batches of records into Delta tables, with delta-rs alone: what Spark does here is done by hand. Each test compares
what was sent with what both tables hold, by log and offset."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow
import pytest
from deltalake import DeltaTable

from logyard.pipeline.frames import gap_batch
from logyard.pipeline.jobs import tables
from logyard.pipeline.jobs.tables import Batches, Run, Tables
from logyard.pipeline.sink.record import Fenced, SinkError
from logyard.pipeline.tables.compaction import FILES_MAX, compact
from logyard.pipeline.tables.files import Task
from logyard.pipeline.tables.kv_schema import BadTable
from logyard.protocol.kv import GetResult, KeyValue

from .wrong_json import wrong

At: TypeAlias = tuple[str, int]
Records: TypeAlias = dict[At, bytes | None]
QUERY = "11111111-2222"
AT_US = 1_795_426_200_000_000
SPARKS = pyarrow.schema(
    [("log", pyarrow.string()), ("offset", pyarrow.int64()), ("timestamp", pyarrow.timestamp("us", tz="UTC")),
     ("meta", pyarrow.binary()), ("payload_size", pyarrow.int64()), ("payload", pyarrow.binary())]
)  # fmt: skip


class Keys:
    """A KV group as far as rules go; each change makes a revision."""

    def __init__(self, **keys: Any) -> None:
        self.revision = 1
        self.values: dict[str, Any] = {}
        self.put(**keys)

    def put(self, **keys: Any) -> None:
        self.values |= keys
        self.revision += 1

    def range(self, key: bytes, *, prefix: bool) -> GetResult:
        assert prefix and key == b"tables/t/"
        found = [
            KeyValue(key + name.encode(), json.dumps(value).encode(), 1, 1, 1, 0) for name, value in self.values.items()
        ]
        return GetResult(self.revision, tuple(found), False, len(found))


class Crash(Exception):
    """The driver died here."""


class Yard:
    """A table, its rules and its drivers."""

    def __init__(self, out: Path) -> None:
        self.keys = Keys(schema={"n": "long"}, dimensions=["shop"])
        self.job = Tables({}, "t", out)

    def driver(self, **change: Any) -> Batches:
        return Batches(self.job._replace(**change), self.keys)

    def rows(self) -> list[dict[str, Any]]:
        return read(self.job.table)

    def rejects(self) -> list[dict[str, Any]]:
        return read(self.job.rejected)

    def check(self, *batches: Mapping[At, bytes | None]) -> None:
        """Every record is in one of the two tables, once, as it was sent."""
        sent = {at: data for batch in batches for at, data in batch.items()}
        rows, rejects = self.rows(), self.rejects()
        assert sorted((one["_log"], one["_offset"]) for one in rows + rejects) == sorted(sent)
        for one in rows:
            data = sent[one["_log"], one["_offset"]]
            assert data is not None
            found = json.loads(data)
            assert {"time": found["time"], "n": one["n"], **json.loads(one["_rest"] or "{}")} == {
                "n": None, **{name: value for name, value in found.items() if name != "shop"}
            } and one["shop"] == found.get("shop")  # fmt: skip
        for one in rejects:
            assert one["bytes"] == sent[one["_log"], one["_offset"]]


def read(table: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DeltaTable(str(table)).to_pyarrow_table().to_pylist()
    return found


def records(first: int, count: int, log: str = "a", hour: int = 9, **more: Any) -> Records:
    return {
        (log, n): json.dumps({"time": f"2026-11-23T{hour:02}:30:00Z", "n": n, "shop": "xyz"[n % 3], **more}).encode()
        for n in range(first, first + count)
    }


def batch_of(sent: Mapping[At, bytes | None]) -> pyarrow.RecordBatch:
    rows = [
        {"log": log, "offset": offset, "timestamp": AT_US, "meta": b"", "payload": data,
         "payload_size": len(data) if data is not None else 99 << 20}
        for (log, offset), data in sent.items()
    ]  # fmt: skip
    return pyarrow.RecordBatch.from_pylist(rows, SPARKS)


def run(*parts: Mapping[At, bytes | None]) -> Run:
    """Tasks over these parts."""

    def tasks(task: Task) -> Iterator[str]:
        for part in parts:
            yield json.dumps(task.run([batch_of(part)]))

    return tasks


def die_at(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def hook(now: str) -> None:
        if now == step:
            monkeypatch.setattr(tables, "HOOK", None)
            raise Crash(step)

    monkeypatch.setattr(tables, "HOOK", hook)


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path)


def test_batches_go_to_their_dimension_and_hour(yard: Yard) -> None:
    driver = yard.driver()
    first, second, bad = records(0, 20), records(20, 20, hour=10), {("b", 0): b"{", ("b", 1): None}
    driver.write(0, QUERY, run(first, bad))
    driver.write(1, QUERY, run(second))
    yard.check(first, second, bad)
    assert {(one["shop"], one["_hour"]) for one in yard.rows()} == {
        (shop, f"2026-11-23T{hour}") for shop in "xyz" for hour in ("09", "10")
    }
    counts = driver.counts
    assert (counts.batches, counts.read, counts.rows, counts.rejected) == (2, 42, 40, 2)
    rejects = {one["_offset"]: one for one in yard.rejects()}
    assert rejects[0]["reason"] == "no_json" and rejects[0]["_hour"] == "2026-11-23T09" and rejects[0]["size"] == 1
    assert rejects[1]["reason"] == "too_large" and rejects[1]["bytes"] is None and rejects[1]["size"] == 99 << 20


def test_a_record_without_a_payload_is_its_metadata(yard: Yard) -> None:
    ((at, data),) = records(5, 1).items()
    row = {"log": at[0], "offset": at[1], "timestamp": AT_US, "meta": data, "payload_size": None, "payload": None}
    batch = pyarrow.RecordBatch.from_pylist([row], SPARKS)
    yard.driver().write(0, QUERY, lambda task: iter([json.dumps(task.run([batch]))]))
    yard.check({at: data})


def test_a_gap_is_among_the_rejects(yard: Yard) -> None:
    """As the source has them with failOnDataLoss=false: counted where records were truncated, not where a log went."""
    gaps = [gap_batch("a", 3, 7, True), gap_batch("b", 5, None, True)]
    good = records(10, 5)

    def tasks(task: Task) -> Iterator[str]:
        yield json.dumps(task.run([*gaps, batch_of(good)]))

    driver = yard.driver()
    driver.write(0, QUERY, tasks)
    assert (driver.counts.read, driver.counts.rows, driver.counts.rejected) == (7, 5, 2)
    found = [(one["_log"], one["_offset"], one["_time"], one["reason"], one["detail"]) for one in yard.rejects()]
    assert sorted(found, key=str) == [
        ("a", 3, None, "lost", "7 records are gone"), ("b", 5, None, "lost", "records from here on are gone"),
    ]  # fmt: skip


def test_a_thousand_kinds_of_wrong_are_all_among_the_rejects(yard: Yard) -> None:
    bad = {("a", n): data for n, data in enumerate(wrong(seed=15, count=1000, field="n", dimension="shop"))}
    good = records(1000, 10)
    yard.driver().write(0, QUERY, run(bad, good))
    yard.check(bad, good)
    assert len(yard.rejects()) == 1000


def test_many_partitions_in_a_batch_and_more_than_a_task_holds(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    from logyard.pipeline.tables import files

    monkeypatch.setattr(files, "HELD_BYTES", 4000)
    chance = random.Random(3)
    shops = ["ä b/c", "%2F", "x=y", "..", "'"]
    sent = {
        ("a", n): json.dumps({"time": n * 1800, "n": n, "shop": chance.choice(shops)}).encode() for n in range(200)
    }  # fmt: skip
    yard.driver().write(0, QUERY, run(sent))
    yard.check(sent)
    assert len(yard.rows()) == 200
    found = DeltaTable(str(yard.job.table)).to_pyarrow_table(filters=[("shop", "=", shops[0])])
    assert set(found["shop"].to_pylist()) == {shops[0]}


@pytest.mark.parametrize("entries", [1, 2])
def test_a_batch_that_is_repeated_is_left_out(yard: Yard, entries: int) -> None:
    """Whatever its tasks would say: the checkpoint's log of commits lost its last entries."""
    driver = yard.driver()
    for number in range(3):
        driver.write(number, QUERY, run(records(number * 5, 5)))
    driver = yard.driver()
    for number in range(3 - entries, 3):
        driver.write(number, QUERY, run({("a", 999): b"{}"}))
    assert driver.counts.repeated == entries
    driver.write(3, QUERY, run(records(15, 5)))
    yard.check(records(0, 20))


@pytest.mark.parametrize("step", ["before-t__rejected", "before-t", "after-commit"])
def test_a_driver_that_dies_anywhere_leaves_each_record_once(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    first, second, bad = records(0, 5), records(5, 5, note="x"), {("b", 0): b"[]"}
    yard.driver().write(0, QUERY, run(first))
    die_at(monkeypatch, step)
    with pytest.raises(Crash):
        yard.driver().write(1, QUERY, run(second, bad))
    known = {
        Path(one).name for path in (yard.job.table, yard.job.rejected) for one in DeltaTable(str(path)).file_uris()
    }
    written = {one.name for one in yard.job.out.rglob("part-*.parquet")}
    assert bool(written - known) == (step != "after-commit"), "files without a commit"
    driver = yard.driver()
    driver.write(1, QUERY, run(second, bad))
    assert driver.counts.repeated == (step == "after-commit")
    yard.check(first, second, bad)


def test_orphans_are_not_seen_and_a_vacuum_finds_them(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = records(0, 9)
    die_at(monkeypatch, "before-t")
    with pytest.raises(Crash):
        yard.driver().write(0, QUERY, run(sent))
    assert yard.rows() == []
    orphans = {one.relative_to(yard.job.table).as_posix() for one in yard.job.table.rglob("part-*.parquet")}
    assert len(orphans) == 3
    yard.driver().write(0, QUERY, run(sent))
    table = DeltaTable(str(yard.job.table))
    found = table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)
    assert set(found) == orphans
    yard.check(sent)


def test_a_replay_between_the_two_commits_uses_the_rules_of_the_first(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = records(0, 3) | records(3, 3, note="x")
    die_at(monkeypatch, "before-t")
    with pytest.raises(Crash):
        yard.driver().write(0, QUERY, run(sent))
    revision = yard.keys.revision
    yard.keys.put(schema={"n": "string", "note": "long"})
    for number in range(20):
        # Other sinks' commits in between, more than are looked through at once.
        yard.driver(sink="other").write(number, QUERY, run(records(100 + number, 1, log="o", note=number)))
    driver = yard.driver()
    driver.write(0, QUERY, run(sent))
    assert driver.revision == revision
    mine = [one for one in yard.rows() if one["_log"] == "a"]
    assert sorted(one["n"] for one in mine) == list(range(6)) and {one["note"] for one in mine} == {None}
    assert [one["_log"] for one in yard.rejects()] == ["o"] * 20, "n is a long in the table"


def test_a_new_field_is_a_new_column_and_another_type_goes_to_the_rejects(yard: Yard) -> None:
    driver = yard.driver()
    driver.write(0, QUERY, run(records(0, 2, note="early")))
    yard.keys.put(schema={"n": "long", "note": "string", "more": "json"})
    driver.write(1, QUERY, run(records(2, 2, note="x", more=[1])))
    yard.keys.put(schema={"n": "string", "note": "string"})
    driver.write(2, QUERY, run(records(4, 2, note="y"), {("b", 0): b'{"time": 1, "note": "z", "more": 5}'}))
    rows = {(one["_log"], one["_offset"]): one for one in yard.rows()}
    assert [rows["a", n]["note"] for n in range(4)] == [None, None, "x", "x"]
    assert json.loads(rows["a", 0]["_rest"]) == {"note": "early"} and rows["a", 2]["more"] == "[1]"
    assert rows["b", 0]["note"] == "z" and json.loads(rows["b", 0]["_rest"]) == {"more": 5}
    rejects = yard.rejects()
    assert sorted(one["_offset"] for one in rejects) == [4, 5]
    assert {one["detail"] for one in rejects} == {"n: the table has long, and the schema says string"}
    yard.keys.put(schema={"N": "long"})
    driver.write(3, QUERY, run({("b", 1): b'{"time": 1, "N": 1}', ("b", 2): b'{"time": 1}'}))
    assert len(yard.rejects()) == 3 and driver.counts.rejected == 3


def test_other_dimensions_need_another_table(yard: Yard) -> None:
    driver = yard.driver()
    driver.write(0, QUERY, run(records(0, 2)))
    yard.keys.put(dimensions=["shop", "till"])
    with pytest.raises(BadTable, match="give the table another name"):
        driver.write(1, QUERY, run(records(2, 2)))
    yard.keys.put(dimensions=["shop"])
    driver.write(1, QUERY, run(records(2, 2)))
    yard.check(records(0, 4))


def test_a_table_that_nobody_described(yard: Yard) -> None:
    yard.keys = Keys(scheme={})
    with pytest.raises(BadTable, match=r"KV group 'tables' describes no table under 'tables/t/'"):
        yard.driver().write(0, QUERY, run(records(0, 1)))


def test_an_hour_that_comes_a_day_late_and_files_of_old_hours_are_merged(yard: Yard) -> None:
    driver = yard.driver()
    sent: list[Records] = []
    for number in range(5):
        sent.append(records(number * 9, 9) | records(number * 9, 3, log="b", hour=11))
        driver.write(number, QUERY, run(*({at: data} for at, data in sent[-1].items())))
    now = datetime(2026, 11, 23, 11, 59, tzinfo=UTC)
    assert compact(yard.job.table, datetime(2026, 11, 23, 10, 59, tzinfo=UTC)) == (0, 0), "it is not an hour old"
    assert compact(yard.job.table, now) == (45, 3)
    assert files_of(yard)["2026-11-23T11"] == 5 and files_of(yard)["2026-11-23T09"] == 1
    yard.check(*sent)
    for number in range(5, 9):
        # A day late: to its own hour.
        sent.append(records(number * 9, 9))
        driver.write(number, QUERY, run(sent[-1]))
        compact(yard.job.table, now)
        assert files_of(yard)["2026-11-23T09"] <= FILES_MAX
    assert {one["_hour"] for one in yard.rows() if one["_log"] == "a"} == {"2026-11-23T09"}
    compact(yard.job.table, datetime(2026, 11, 24, tzinfo=UTC))
    assert max(files_of(yard).values()) <= FILES_MAX
    assert compact(yard.job.table, datetime(2026, 11, 24, tzinfo=UTC)) == (0, 0)
    yard.check(*sent)


def files_of(yard: Yard) -> dict[str, int]:
    """The most files of a partition of each hour."""
    found: dict[tuple[str, str], int] = {}
    actions = pyarrow.table(DeltaTable(str(yard.job.table)).get_add_actions(flatten=True)).to_pylist()
    for one in actions:
        key = one["partition._hour"], one["partition.shop"]
        found[key] = found.get(key, 0) + 1
    return {hour: max(count for (other, _), count in found.items() if other == hour) for hour, _ in found}


def test_a_checkpoint_that_was_deleted_is_refused_until_it_is_reset(yard: Yard) -> None:
    for number in range(3):
        yard.driver().write(number, QUERY, run(records(number, 1)))
    with pytest.raises(SinkError, match=r"another query has written under this name up to batch 2 .* --reset"):
        yard.driver().write(0, "another", run(records(0, 1)))
    again = yard.driver(reset=True)
    again.write(0, "another", run(records(50, 1)))
    again.write(1, "another", run(records(51, 1)))
    yard.check(*(records(number, 1) for number in (0, 1, 2, 50, 51)))
    with pytest.raises(SinkError, match="another query"):
        yard.driver().write(3, QUERY, run(records(3, 1)))
    yard.driver(reset=True).write(2, "another", run(records(52, 1)))
    yard.check(*(records(number, 1) for number in (0, 1, 2, 50, 51, 52)))


def test_a_reset_that_dies_between_the_commits_is_finished_without_one(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.driver().write(0, QUERY, run(records(0, 1)))
    die_at(monkeypatch, "before-t")
    with pytest.raises(Crash):
        yard.driver(reset=True).write(0, "another", run(records(1, 1)))
    yard.driver().write(0, "another", run(records(1, 1)))
    yard.check(records(0, 2))


def test_a_table_that_was_deleted_or_a_foreign_checkpoint_is_refused(yard: Yard) -> None:
    with pytest.raises(SinkError, match=r"batch 3 was asked for, and .*t__rejected has none"):
        yard.driver().write(3, QUERY, run(records(0, 1)))
    yard.driver(reset=True).write(3, QUERY, run(records(0, 1)))
    with pytest.raises(SinkError, match=r"batch 7 was asked for, and .* has 3"):
        yard.driver().write(7, QUERY, run(records(1, 1)))


@pytest.mark.parametrize("table", ["t__rejected", "t"])
def test_of_two_drivers_at_one_batch_one_is_fenced(yard: Yard, monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    """The first has looked and not committed when the second does all of it."""
    first, second, bad = records(0, 5), records(5, 5), {("b", 0): b"[]"}
    slow, fast = yard.driver(), yard.driver()
    slow.write(0, QUERY, run(first))

    def overtake(step: str) -> None:
        if step == f"before-{table}":
            monkeypatch.setattr(tables, "HOOK", None)
            fast.write(1, QUERY, run(second, bad))

    monkeypatch.setattr(tables, "HOOK", overtake)
    with pytest.raises(Fenced, match="another driver has committed batch 1 meanwhile"):
        slow.write(1, QUERY, run(second, bad))
    yard.check(first, second, bad)
    fast.write(2, QUERY, run(records(10, 5)))
    with pytest.raises(Fenced, match="another run of this query has taken over at batch 2"):
        slow.write(2, QUERY, run(records(10, 9)))
    yard.check(first, second, bad, records(10, 5))


def test_two_jobs_at_once_on_one_table(yard: Yard) -> None:
    """With names of their own both go on, also while both make the table and its columns."""
    failures: list[BaseException] = []
    begun = threading.Barrier(2)

    def write(name: str) -> None:
        try:
            driver = yard.driver(sink=name)
            begun.wait(20)
            for number in range(8):
                if name == "one" and number in (2, 5):
                    yard.keys.put(schema={"n": "long", f"extra{number}": "long"})
                driver.write(number, QUERY, run(records(number * 5, 5, log=name), {(f"{name}-bad", number): b"x"}))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    yard.check(*(records(0, 40, log=name) | {(f"{name}-bad", n): b"x" for n in range(8)} for name in ("one", "two")))


def test_a_count_that_does_not_add_up_commits_nothing(yard: Yard) -> None:
    def lossy(task: Task) -> Iterator[str]:
        for said in run(records(0, 5))(task):
            yield json.dumps({**json.loads(said), "read": 6})

    with pytest.raises(SinkError, match="batch 0: 6 records were read, 5 are rows and 0 rejected"):
        yard.driver().write(0, QUERY, lossy)
    assert yard.rows() == [] and DeltaTable(str(yard.job.rejected)).transaction_version("t") is None


def test_an_empty_batch_is_a_batch(yard: Yard) -> None:
    driver = yard.driver()
    empty: Sequence[Records] = ()
    driver.write(0, QUERY, run(*empty))
    driver.write(1, QUERY, run(records(0, 1)))
    yard.check(records(0, 1))

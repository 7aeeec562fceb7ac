"""The sinks in Spark itself: streams that are cut and repeated, foreachBatch, and the first line of what is refused."""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logyard.client.sync import Yard
from logyard.service.local_cluster import LocalCluster

from .support import fill
from .test_sink import STEPS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
NUMBERS = count()
BOTH = ("exactly-once", pytest.param("exactly-once-direct", marks=pytest.mark.long))


class Copy:
    """A stream that copies logs: each record of `FROM-n` becomes one of `TO-n`."""

    def __init__(self, spark: SparkSession, cluster: LocalCluster, path: Path, guarantee: str) -> None:
        self.spark, self.path, self.number = spark, path, next(NUMBERS)
        self.servers = ",".join(cluster.addresses)
        self.sink = {
            "servers": self.servers, "sinkId": f"copy-{self.number}", "deliveryGuarantee": guarantee,
            "createLogs": "true", "checkpointLocation": str(path),
        }  # fmt: skip

    def source(self, name: str) -> str:
        return f"from-{self.number}-{name}"

    def target(self, name: str) -> str:
        return f"to-{self.number}-{name}"

    def stream(self, most: int = 40, **more: str) -> DataFrame:
        found = (
            self.spark.readStream.format("logyard")
            .option("servers", self.servers)
            .option("subscribePattern", f"from-{self.number}-.*")
            .option("startingOffsets", "earliest")
            .option("includePayload", "inline")
            .option("maxOffsetsPerTrigger", str(most))
            .option("minRowsPerLog", "7")
            .options(**more)
            .load()
        )
        return found.selectExpr("replace(log, 'from', 'to') as log", "meta", "payload")

    def start(self, kind: str = "logyard", rows: DataFrame | None = None, **more: str) -> StreamingQuery:
        """Begin to copy what is there."""
        rows = self.stream() if rows is None else rows
        query = rows.writeStream.format(kind).options(**{**self.sink, **more})
        return query.trigger(availableNow=True).start()

    def run(self, kind: str = "logyard", rows: DataFrame | None = None, **more: str) -> int:
        """Copy what is there; the batches that it took."""
        running = self.start(kind, rows, **more)
        try:
            running.awaitTermination()
        finally:
            running.stop()
        return len([one for one in running.recentProgress if one["numInputRows"]])

    def forget(self, entries: int) -> None:
        """Lose the last entries of the checkpoint's log of commits."""
        commits = sorted((int(one.name), one) for one in (self.path / "commits").iterdir() if one.name.isdigit())
        for _, one in commits[-entries:]:
            one.unlink()
            (one.parent / f".{one.name}.crc").unlink(missing_ok=True)

    def check(self, yard: Yard, *names: str) -> None:
        for name in names:
            wanted, found = records(yard, self.source(name)), records(yard, self.target(name))
            assert Counter(found) == Counter(wanted), name


def records(yard: Yard, name: str) -> list[tuple[bytes, bytes | None]]:
    return [(bytes(one.metadata), one.payload) for one in yard.log(name).records()]


@pytest.mark.long
@pytest.mark.parametrize("guarantee", BOTH)
def test_a_stream_that_forgets_what_it_committed_copies_each_record_once(
    spark: SparkSession, cluster: LocalCluster, yard: Yard, tmp_path: Path, guarantee: str
) -> None:
    copy = Copy(spark, cluster, tmp_path / "checkpoint", guarantee)
    fill(yard, [copy.source(name) for name in "abc"], 50)
    assert copy.run() >= 3
    copy.check(yard, *"abc")
    copy.forget(1)
    fill(yard, [copy.source("d")], 30, None)
    yard.log(copy.source("a")).append(b"large", bytes((1 << 20) + 5))
    copy.run()
    copy.check(yard, *"abcd")
    copy.forget(2)
    copy.run()
    copy.check(yard, *"abcd")
    assert copy.run() == 0
    copy.check(yard, *"abcd")


@pytest.mark.long
def test_a_checkpoint_that_was_deleted_is_refused_by_name(
    spark: SparkSession, cluster: LocalCluster, yard: Yard, tmp_path: Path
) -> None:
    copy = Copy(spark, cluster, tmp_path / "one", "exactly-once")
    fill(yard, [copy.source("a")], 20)
    copy.run()
    copy.path = tmp_path / "two"
    copy.sink["checkpointLocation"] = str(copy.path)
    with pytest.raises(Exception, match="another query has written to this sinkId"):
        copy.run()
    copy.check(yard, "a")
    copy.run(sinkReset="true")
    assert Counter(records(yard, copy.target("a"))) == Counter(records(yard, copy.source("a")) * 2)


@pytest.mark.long
def test_a_batch_in_foreach_batch_is_written_once(
    spark: SparkSession, cluster: LocalCluster, yard: Yard, tmp_path: Path
) -> None:
    copy = Copy(spark, cluster, tmp_path / "checkpoint", "exactly-once")
    fill(yard, [copy.source(name) for name in "ab"], 30)
    options = {name: value for name, value in copy.sink.items() if name != "checkpointLocation"}

    def write(df: DataFrame, number: int) -> None:
        df.write.format("logyard").mode("append").options(**options).option("batchId", str(number)).save()

    def run(what: Any) -> None:
        running = copy.stream().writeStream.foreachBatch(what).option("checkpointLocation", str(copy.path))
        running.trigger(availableNow=True).start().awaitTermination()

    run(write)
    copy.check(yard, "a", "b")
    copy.forget(2)
    run(write)
    copy.check(yard, "a", "b")

    def twice(df: DataFrame, number: int) -> None:
        write(df, number)
        write(df, number)

    yard.log(copy.source("a")).append(b"more")
    with pytest.raises(Exception, match="one sinkId per write"):
        run(twice)
    copy.check(yard, "a", "b")


@pytest.mark.long
@pytest.mark.parametrize("guarantee", ["exactly-once", "exactly-once-direct"])
def test_processes_that_are_killed_at_any_step_leave_each_record_once(
    spark: SparkSession, cluster: LocalCluster, yard: Yard, tmp_path: Path, guarantee: str
) -> None:
    from .crashing import CrashingSource

    spark.dataSource.register(CrashingSource)
    copy = Copy(spark, cluster, tmp_path / "checkpoint", guarantee)
    mark = tmp_path / "mark"
    names = []
    direct = ("mid-write", "after-write", "before-done")
    for step in direct if guarantee == "exactly-once-direct" else STEPS:
        names.append(step)
        fill(yard, [copy.source(step)], 30)
        mark.write_text(step)
        with pytest.raises(Exception, match=r"(?i)crashed|exited|EOF|STREAM_FAILED"):
            copy.run("crashing", mark=str(mark))
        assert not mark.exists()
        copy.run("crashing", mark=str(mark))
        copy.check(yard, *names)


@pytest.mark.long
def test_what_a_sink_refuses_it_refuses_by_name(spark: SparkSession, cluster: LocalCluster, yard: Yard) -> None:
    rows = spark.createDataFrame([("a", b"x")], "log string, payload binary")
    sink = rows.write.format("logyard").option("servers", ",".join(cluster.addresses))
    with pytest.raises(Exception, match="mode: overwrite: a log is appended to"):
        sink.mode("overwrite").save()
    with pytest.raises(Exception, match="offset: a sink has no such column"):
        spark.createDataFrame([(b"x", 1)], "payload binary, offset long").write.format("logyard").option(
            "servers", ",".join(cluster.addresses)
        ).option("log", "a").mode("append").save()
    with pytest.raises(Exception, match="there is no log 'nowhere'; createLogs=true makes it"):
        sink.option("log", "nowhere").mode("append").save()
    name = f"plain-{next(NUMBERS)}"
    sink.option("log", name).option("createLogs", "true").mode("append").save()
    assert records(yard, name) == [(b"", b"x")]

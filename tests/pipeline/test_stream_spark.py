"""The stream source in Spark itself: checkpoints, replays, lag, and the first line of what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logyard.client.sync import Yard
from logyard.service.local_cluster import LocalCluster

from .support import fill, lead, reach

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


class Table:
    """What each batch held, and in how many tasks; a batch that is repeated has to hold the same in the same order."""

    def __init__(self) -> None:
        self.batches: dict[int, list[tuple[Any, ...]]] = {}
        self.repeated = 0

    def __call__(self, df: DataFrame, number: int) -> None:
        rows = [
            (row["task"], row["log"], row["offset"], row["kind"], bytes(row["meta"] or b""))
            for row in df.selectExpr("spark_partition_id() as task", "*").collect()
        ]
        self.repeated += number in self.batches
        assert self.batches.setdefault(number, rows) == rows

    def offsets(self, name: str) -> list[int]:
        """Of a log's records, batch after batch."""
        return [
            offset for number in sorted(self.batches) for _, log, offset, kind, _ in self.batches[number]
            if log == name and kind == "record"
        ]  # fmt: skip


def load(spark: SparkSession, cluster: LocalCluster, **options: str) -> DataFrame:
    given = {"servers": ",".join(cluster.addresses), "startingOffsets": "earliest", "timeoutSeconds": "20"} | options
    return spark.readStream.format("logyard").options(**given).load()


def run(df: DataFrame, table: Table, checkpoint: Path) -> StreamingQuery:
    """All there is now."""
    query = (
        df.writeStream.foreachBatch(table)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    return query


@pytest.mark.long
def test_batches_restarts_and_the_cheapest_replay(
    spark: SparkSession, cluster: LocalCluster, yard: Yard, tmp_path: Path
) -> None:
    names = ["flow-1", "flow-2", "flow-3"]
    fill(yard, names, 100)
    table = Table()
    df = load(spark, cluster, subscribePattern="flow-.*", maxOffsetsPerTrigger="130", minRowsPerLog="20")
    query = run(df, table, tmp_path)
    assert [len(rows) for rows in table.batches.values()] == [130, 130, 40]
    assert all(table.offsets(name) == list(range(100)) for name in names)
    # Where lag is seen.
    lags = [json.loads(progress["sources"][0]["latestOffset"]) for progress in query.recentProgress]
    behind = [lag["behind"] for lag in lags]
    assert behind[:3] == [170, 40, 0] and query.recentProgress[0]["numInputRows"] == 130
    # The last entry of the commit log is gone, leaders have moved, there is more, tasks would be others by now.
    for name in names:
        lead(yard, name, int(yard.describe(name)["leader"]) % 3 + 1)
    fill(yard, ["flow-4"], 50)
    (tmp_path / "commits" / "2").unlink()
    # Spark checks its files, and takes one without a checksum.
    (tmp_path / "commits" / ".2.crc").unlink(missing_ok=True)
    run(df, table, tmp_path)
    assert table.repeated == 1 and table.offsets("flow-4") == list(range(50))
    # With other limits and parallelism what is left is cut otherwise, and nothing is lost.
    yard.log("flow-1").append_many([(b"more", None)] * 30)
    spark.conf.set("spark.sql.shuffle.partitions", "5")
    try:
        for _ in range(3):
            yard.log("flow-1").append(b"more", None)
            other = load(spark, cluster, subscribePattern="flow-.*", minPartitions="4", maxPartitionRows="1007")
            run(other, table, tmp_path)
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", "2")
    assert table.offsets("flow-1") == list(range(133)) and table.offsets("flow-4") == list(range(50))


def test_a_query_at_latest_that_found_nothing_goes_on_from_there(
    spark: SparkSession, cluster: LocalCluster, yard: Yard, tmp_path: Path
) -> None:
    fill(yard, ["young"], 10)
    table = Table()
    df = load(spark, cluster, subscribe="young", startingOffsets="latest")
    run(df, table, tmp_path)
    yard.log("young").append_many([(b"new", None)] * 5)
    # Its first batch is planned anew, by another process, when the beginning is somewhere else.
    (tmp_path / "commits" / "0").unlink()
    (tmp_path / "commits" / ".0.crc").unlink(missing_ok=True)
    run(df, table, tmp_path)
    assert table.offsets("young") == list(range(10, 15))


@pytest.mark.long
def test_a_query_that_goes_on_through_a_dead_leader_new_logs_and_losses(
    spark: SparkSession, cluster: LocalCluster, yard: Yard, tmp_path: Path
) -> None:
    names = [f"live-{n}" for n in range(4)]
    fill(yard, names, 50)
    table = Table()
    df = load(spark, cluster, subscribePattern="live-.*", failOnDataLoss="false", minPartitions="2")
    query = df.writeStream.foreachBatch(table).option("checkpointLocation", str(tmp_path)).start()
    try:

        def read(name: str, end: int) -> bool:
            if (error := query.exception()) is not None:
                raise error
            return table.offsets(name) == list(range(end))

        reach(lambda: all(read(name, 50) for name in names), 60)
        victim = int(yard.describe("live-0")["leader"])
        cluster.kill9(victim)
        try:
            for name in names:
                yard.log(name).append_many([(b"on", None)] * 10)
            reach(lambda: all(read(name, 60) for name in names), 60)
        finally:
            cluster.restart(victim)
        fill(yard, ["live-new"], 20)
        reach(lambda: read("live-new", 20), 60)
        yard.delete("live-3")
        reach(lambda: any(row[1:4] == ("live-3", 60, "gap") for rows in table.batches.values() for row in rows), 60)
        yard.log("live-2").append(b"end", None)
        reach(lambda: read("live-2", 61), 60)
        assert query.lastProgress is not None
    finally:
        query.stop()
    assert query.exception() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maxTriggerDelay": "15m"}, "maxTriggerDelay: there is no such option; Spark knows a least number"),
        ({"kafka.bootstrap.servers": "x"}, "kafka.bootstrap.servers: there is no such option; here it is servers"),
        ({"maxOffsetsPerTrigger": "5", "path": "/tmp"}, "path: "),
        ({"newLogs": "latest", "maxPartitionBytes": "5"}, "maxPartitionBytes: it goes by what the servers"),
    ],
)
def test_what_no_stream_has_is_refused_by_load(
    spark: SparkSession, cluster: LocalCluster, options: dict[str, str], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        load(spark, cluster, subscribe="wrong", **options)


@pytest.mark.long
def test_errors_of_ours_are_what_the_query_ends_with(
    spark: SparkSession, cluster: LocalCluster, yard: Yard, tmp_path: Path
) -> None:
    fill(yard, ["ends"], 20)

    def fails(message: str, checkpoint: Path, **options: str) -> None:
        with pytest.raises(Exception, match=message):
            run(load(spark, cluster, subscribe="ends", **options), Table(), checkpoint)

    # Only when it begins does Spark say that it is a stream.
    fails("endingOffsets: a stream has no end", tmp_path / "a", endingOffsets="latest")
    run(load(spark, cluster, subscribe="ends"), Table(), tmp_path / "b")
    path = tmp_path / "b" / "offsets" / "0"
    lines = path.read_text("utf-8").splitlines()
    assert '"v": 1' in lines[2]
    for value, message in (
        (lines[2].replace('"v": 1', '"v": 2'), "checkpoint: its offsets are of version 2"),
        ('{"topic": {"0": 5}}', "checkpoint: .* is no offset of the format logyard"),
        # What is no JSON at all Spark's own reading of it refuses.
        (lines[2][:30], "JSONDecodeError"),
    ):
        path.write_text("\n".join([*lines[:2], value]), "utf-8")
        (tmp_path / "b" / "offsets" / ".0.crc").unlink(missing_ok=True)
        fails(message, tmp_path / "b")
    path.write_text("\n".join(lines), "utf-8")
    yard.log("ends").append_many([(b"more", None)] * 10)
    yard.log("ends").truncate(25)
    reach(lambda: all(yard.log("ends").latest(node=node).start == 25 for node in (1, 2, 3)))
    fails(r"log 'ends': records 20\.\.24 were truncated before the stream read them", tmp_path / "b")

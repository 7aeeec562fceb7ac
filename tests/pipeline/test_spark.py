"""The format "logyard" in Spark itself: one JVM, one cluster of three processes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from logyard.client.sync import Yard, connect_sync
from logyard.service.local_cluster import LocalCluster

from .support import fill, lead, reach

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


def load(spark: SparkSession, cluster: LocalCluster, **options: str) -> DataFrame:
    reader = spark.read.format("logyard").option("servers", ",".join(cluster.addresses))
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load()


def test_logs_are_a_table(spark: SparkSession, cluster: LocalCluster, yard: Yard) -> None:
    fill(yard, ["orders", "events"], 100)
    df = load(spark, cluster, subscribe="orders,events")
    assert df.columns == [
        "log", "offset", "index", "term", "timestamp", "kind", "meta", "payload_size", "payload_hash",
    ]  # fmt: skip
    assert df.count() == 200
    rows = df.where("log = 'orders' and offset >= 97").orderBy("offset").collect()
    assert [(row["offset"], bytes(row["meta"]), row["payload_size"]) for row in rows] == [
        (n, b"orders %d" % n, 50) for n in (97, 98, 99)
    ]
    assert rows[0]["index"] > 0 and rows[0]["timestamp"].year >= 2025
    # The range is that of the first use, whatever is appended meanwhile; a filter narrows one action only.
    yard.log("orders").append(b"later", None)
    assert df.count() == 200 and df.where("offset < 10").count() == 20
    assert df.where("offset < 10").union(df.where("offset >= 90")).count() == 40
    assert load(spark, cluster, subscribe="orders,events").count() == 201
    df.createOrReplaceTempView("records")
    (row,) = spark.sql("select count(distinct log), max(offset) from records").collect()
    assert tuple(row) == (2, 99)


def test_payloads_come_when_they_are_asked_for(spark: SparkSession, cluster: LocalCluster, yard: Yard) -> None:
    yard.create("bodies")
    log = yard.log("bodies")
    for body in (None, b"", b"small", b"L" * 100_000, b"H" * (2 << 20)):
        log.append(b"", body)
    given = {"subscribe": "bodies", "includePayload": "inline"}
    rows = load(spark, cluster, **given, maxInlineBytes="1m", verify="true").orderBy("offset").collect()
    assert [row["payload"] for row in rows] == [None, b"", b"small", b"L" * 100_000, None]
    assert [row["payload_size"] for row in rows] == [None, 0, 5, 100_000, 2 << 20]
    assert [row["payload_hash"] is None for row in rows] == [True, False, False, False, False]
    assert load(spark, cluster, **given).where("length(payload) = 2097152").count() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"subscribe": "orders", "startingOffset": "earliest"},
            "startingoffset: there is no such option; is it starting",
        ),
        ({"subscribe": "orders", "subscribePattern": "x"}, "subscribePattern: it excludes subscribe"),
        ({"subscribe": "orders", "includePayload": "yes"}, "includePayload: none or inline"),
    ],
)
def test_a_wrong_option_is_named_at_load(
    spark: SparkSession, cluster: LocalCluster, options: dict[str, str], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        load(spark, cluster, **options)


def test_what_is_not_there_is_said(spark: SparkSession, cluster: LocalCluster, yard: Yard) -> None:
    fill(yard, ["there"], 3)
    with pytest.raises(Exception, match="subscribe: there is no append log 'not-there'"):
        load(spark, cluster, subscribe="there,not-there").count()
    with pytest.raises(Exception, match="schema: the columns are fixed"):
        spark.read.format("logyard").schema("a int").option("servers", cluster.addresses[0]).option(
            "subscribe", "there"
        ).load().count()
    assert load(spark, cluster, subscribePattern="nothing-like-it").count() == 0


def test_truncated_records_fail_or_are_a_counted_gap(spark: SparkSession, cluster: LocalCluster, yard: Yard) -> None:
    fill(yard, ["short"], 50)
    early = load(spark, cluster, subscribe="short")
    late = load(spark, cluster, subscribe="short", failOnDataLoss="false")
    # Planned by the first use, read again by the next.
    assert early.count() == late.count() == 50
    yard.log("short").truncate(20)
    reach(lambda: all(yard.log("short").latest(node=node).start == 20 for node in (1, 2, 3)))
    with pytest.raises(Exception, match=r"log 'short': records 0\.\.19 were truncated"):
        early.count()
    gap = late.where("kind = 'gap'").collect()
    assert [(row["offset"], row["payload_size"]) for row in gap] == [(0, 20)]
    assert late.where("kind = 'record'").count() == 30
    with pytest.raises(Exception, match=r"log 'short': records 0\.\.19 were truncated, it starts at 20"):
        load(spark, cluster, subscribe="short", startingOffsets='{"short": 0}').count()


@pytest.mark.long
def test_five_thousand_logs_take_a_few_tasks(spark: SparkSession, cluster: LocalCluster, yard: Yard) -> None:
    names = [f"tiny-{n:05}" for n in range(5000)]
    yard.create_many(names)
    full = names[::10]
    for name in full:
        yard.log(name).append_many([(b"a", None), (b"b", b"x")])
    df = load(spark, cluster, subscribePattern="tiny-.*")
    assert df.count() == 2 * len(full)
    assert sorted(row["log"] for row in df.select("log").distinct().collect()) == full
    # One task for each four MiB or so: a task costs more than many tiny logs.
    assert df.selectExpr("spark_partition_id() as p").distinct().count() <= 4
    many = load(spark, cluster, subscribePattern="tiny-.*", minPartitions="8")
    assert many.selectExpr("spark_partition_id() as p").distinct().count() == 8


@pytest.mark.long
def test_leaders_change_while_spark_reads(spark: SparkSession, cluster: LocalCluster, yard: Yard) -> None:
    names = [f"busy-{n}" for n in range(8)]
    fill(yard, names, 2000)
    df = load(spark, cluster, subscribePattern="busy-.*", minPartitions="16", verify="true")
    done = threading.Event()
    moved: list[str] = []

    def shake() -> None:
        while not done.is_set():
            for name in names:
                leader = int(yard.describe(name)["leader"])
                lead(yard, name, leader % 3 + 1)
                moved.append(name)

    shaker = threading.Thread(target=shake)
    shaker.start()
    try:
        reach(lambda: bool(moved))
        for _ in range(2):
            counted = df.groupBy("log").agg({"offset": "count", "payload_hash": "count"}).collect()
            assert {row["log"]: (row[1], row[2]) for row in counted} == {name: (2000, 2000) for name in names}
    finally:
        done.set()
        shaker.join()
    assert len(moved) > 1


def test_times_and_exact_ranges(spark: SparkSession, cluster: LocalCluster, yard: Yard) -> None:
    fill(yard, ["timed"], 10)
    reach(lambda: int(yard.log("timed").append(b"next", None)) >= 10)
    stamps = [row["timestamp"] for row in load(spark, cluster, subscribe="timed").orderBy("offset").collect()]
    last = str(int(stamps[-1].timestamp() * 1000))
    found = load(spark, cluster, subscribe="timed", startingTimestamp=last).collect()
    assert [row["offset"] for row in found] == [n for n, stamp in enumerate(stamps) if stamp >= stamps[-1]]
    before = load(spark, cluster, subscribe="timed", endingTimestamp=last).count()
    assert before == len(stamps) - len(found)
    exact = load(spark, cluster, assign='{"timed": [2, 5]}').collect()
    assert sorted(row["offset"] for row in exact) == [2, 3, 4]
    with pytest.raises(Exception, match="startingTimestamp: log 'timed' has no record"):
        load(spark, cluster, subscribe="timed", startingTimestamp="99999999999999").count()


def test_a_task_that_fails_says_which_log_and_what(spark: SparkSession, tmp_path_factory: Any) -> None:
    with LocalCluster(tmp_path_factory.mktemp("brief"), 1) as cluster:
        cluster.start()
        with connect_sync(cluster.addresses) as yard:
            fill(yard, ["lone"], 5)
        df = load(spark, cluster, subscribe="lone", timeoutSeconds="5")
        assert df.count() == 5
    with pytest.raises(Exception, match="cannot reach 127"):
        df.count()

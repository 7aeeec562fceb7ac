"""Sinks in Spark where something else fails: an executor, the leader of a log, a driver that is stopped and goes on."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from logyard.client.sync import Yard
from logyard.service.local_cluster import LocalCluster

from . import kills
from .crashing import NOBODY, PROCESS, CrashingSource, reached
from .support import fill, reach
from .test_sink_spark import Copy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(600)]
GUARANTEES = ("exactly-once", "exactly-once-direct")
FIRST_VISIBLE = {"exactly-once": "mid-fan-out", "exactly-once-direct": "mid-write"}


@pytest.fixture(scope="module")
def rig() -> Iterator[kills.Rig]:
    """A cluster, and a driver with two executors."""
    with kills.rig(executors=True) as found:
        yield found


def test_an_executor_whose_jvm_is_killed_leaves_each_record_once(rig: kills.Rig) -> None:
    assert rig.run(1) == ""
    assert sum(rig.told.values()) == 1


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_driver_that_was_stopped_and_goes_on_behind_another_one_is_fenced(
    spark: SparkSession, rig: kills.Rig, tmp_path: Path, guarantee: str
) -> None:
    mark, query = rig.mark(guarantee), rig.query(guarantee, guarantee)
    sources = [f"from-{guarantee}-{number}" for number in range(kills.LOGS)]
    fill(rig.yard, sources, 40)
    mark.write_text(f"{'before-commit' if guarantee == 'exactly-once' else 'mid-write'} 1 {NOBODY}")
    rig.driver.ask(query)
    reach(reached(mark).exists, kills.PATIENCE_S)
    rig.driver.signal(signal.SIGSTOP)
    try:
        copied = shutil.copytree(query["sink"].pop("checkpointLocation"), tmp_path / "copy")
        del query["sink"]["mark"]
        rows = spark.readStream.format("logyard").options(**query["source"]).load()
        sink = rows.selectExpr("replace(log, 'from', 'to') as log", "meta", "payload").writeStream.format("logyard")
        sink.options(**query["sink"], checkpointLocation=str(copied)).trigger(availableNow=True).start()
        for one in spark.streams.active:
            one.awaitTermination()
        assert [rig.different(name) for name in sources] == [""] * len(sources)
    finally:
        rig.driver.signal(signal.SIGCONT)
    assert "another run of this query has taken over" in rig.driver.answer()["error"]
    assert [rig.different(name) for name in sources] == [""] * len(sources)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_the_leader_of_a_log_is_killed_while_a_batch_is_written_to_it(
    spark: SparkSession, cluster: LocalCluster, yard: Yard, tmp_path: Path, guarantee: str
) -> None:
    spark.dataSource.register(CrashingSource)
    copy, mark = Copy(spark, cluster, tmp_path / "checkpoint", guarantee), tmp_path / "mark"
    fill(yard, [copy.source("a")], 100)
    mark.write_text(f"{FIRST_VISIBLE[guarantee]} 1 {NOBODY}")
    running = copy.start("crashing", mark=str(mark))
    try:
        reach(reached(mark).exists, kills.PATIENCE_S)
        leader = int(yard.describe(copy.target("a"))["leader"])
        cluster.kill9(leader)
        os.kill(int(reached(mark).read_text()), signal.SIGCONT)
        running.awaitTermination()
        copy.check(yard, "a")
        cluster.restart(leader)
    finally:
        running.stop()


def test_restarts_with_other_numbers_of_tasks_in_unfinished_and_finished_batches(
    spark: SparkSession, cluster: LocalCluster, yard: Yard, tmp_path: Path
) -> None:
    spark.dataSource.register(CrashingSource)
    copy, mark = Copy(spark, cluster, tmp_path / "checkpoint", "exactly-once-direct"), tmp_path / "mark"
    fill(yard, [copy.source("a"), copy.source("b")], 50)
    for number, (tasks, dies) in enumerate([(2, True), (5, False), (1, True), (3, False)]):
        rows = copy.stream(1000, minPartitions=str(tasks))
        if dies:
            mark.write_text(f"after-write 1 {PROCESS}")
            with pytest.raises(Exception, match=r"(?i)crashed|exited|EOF|STREAM_FAILED"):
                copy.run("crashing", rows, mark=str(mark))
        copy.run("crashing", rows, mark=str(mark))
        copy.check(yard, "a", "b")
        yard.log(copy.source("a")).append_many([(b"more %d %d" % (number, one), b"x") for one in range(50)])

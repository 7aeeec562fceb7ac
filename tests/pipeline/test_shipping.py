"""Logyard on Spark's other ways of running: executors of their own that get the wheel, and Spark Connect.

Each in a process of its own: a JVM has one Spark.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from logyard.client.sync import connect_sync
from logyard.service.local_cluster import LocalCluster
from tests.source_tree import ROOT
from tests.test_package import wheel as wheel

from .support import fill

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("yard"), 3) as found:
        found.start()
        with connect_sync(found.addresses) as yard:
            fill(yard, [f"log-{n}" for n in range(20)], 100)
        yield found


def run(script: str, cwd: Path, *words: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=cwd, capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


CLUSTER = """
import os
import sys
import pandas
from logyard.pipeline import local_session, ship

servers, wheel = sys.argv[1:]
options = os.environ.get("SPARK_SUBMIT_OPTS", "")
spark = local_session(master="local-cluster[2,1,700]", memory="1g", spark_executor_extraJavaOptions=options)
ship(spark, wheel)
df = (
    spark.read.format("logyard").option("servers", servers).option("subscribePattern", "log-.*")
    .option("includePayload", "inline").option("verify", "true").option("minPartitions", "4").load()
)
print(df.count(), df.where("payload is not null").count(), df.select("log").distinct().count())


def origins(batches):
    import logyard.pipeline.network
    for batch in batches:
        yield pandas.DataFrame({"file": [logyard.pipeline.network.__file__]})


print(*{row["file"] for row in df.select("log").mapInPandas(origins, "file string").collect()})
spark.stop()
"""


def test_executors_run_what_the_wheel_has(cluster: LocalCluster, wheel: Path, tmp_path: Path) -> None:
    counts, files = run(CLUSTER, tmp_path, ",".join(cluster.addresses), str(wheel)).splitlines()[-2:]
    assert counts == "2000 2000 20"
    assert all(".zip" in file for file in files.split()), files


CONNECT = """
import os, sys
from pyspark.sql import SparkSession
from logyard.pipeline.session import prepare

prepare()
spark = SparkSession.builder.remote("local[2]").getOrCreate()
df = spark.read.format("logyard").option("servers", sys.argv[1]).option("subscribe", "log-1,log-2").load()
print(df.count(), df.where("offset >= 90").count())
try:
    spark.read.format("logyard").option("servers", sys.argv[1]).load().count()
except Exception as error:
    print("subscribe: give exactly one" in str(error))
spark.stop()
"""


def test_spark_connect(cluster: LocalCluster, tmp_path: Path) -> None:
    # With a port of its own: elsewhere on this machine the same may run.
    said = run(CONNECT, tmp_path, ",".join(cluster.addresses), SPARK_TESTING="1").splitlines()
    assert said[-2:] == ["200 20", "True"]

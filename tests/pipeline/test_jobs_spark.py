"""The jobs and the directory source in Spark itself: what the other tests of them can't see is how they travel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logyard.client.sync import connect_sync
from logyard.pipeline.jobs.audit import run_audit
from logyard.pipeline.jobs.digests import digest_logs
from logyard.pipeline.jobs.export import Export, run_export
from logyard.pipeline.jobs.importing import Import, run_import
from logyard.service.local_cluster import LocalCluster

from ..service.check.test_run import flip

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
BODY = b"<a payload of its own>" * 900


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a stopped cluster of two nodes, 40 logs."""
    path = tmp_path_factory.mktemp("yard")
    with LocalCluster(path, 2) as cluster:
        cluster.start()
        with connect_sync(cluster.addresses) as client:
            names = [f"log-{number}" for number in range(40)]
            client.create_many(names)
            for name in names:
                client.log(name).append_many([(b"%d" % number, BODY if number % 5 else None) for number in range(10)])
            client.log("log-7").truncate(4)
        cluster.stop()
    yield path


def given(cluster: LocalCluster) -> dict[str, str]:
    return {"servers": ",".join(cluster.addresses), "subscribePattern": ".*"}


@pytest.mark.long
def test_a_directory_is_a_table(spark: SparkSession, yard: Path) -> None:
    reader = spark.read.format("logyard").options(path=str(yard), subscribePattern="log-.*", minPartitions="4")
    df = reader.load()
    assert df.count() == 396 and df.where("log = 'log-7'").agg({"offset": "min"}).first()[0] == 4  # type: ignore[index]
    bodies = reader.options(includePayload="inline", verify="true").load()
    assert bodies.where("payload_hash is not null").count() == 40 * 8 - 3
    assert bodies.where("payload is null and payload_size is not null").count() == 0


@pytest.mark.long
def test_out_and_in_again_from_directories(spark: SparkSession, yard: Path, tmp_path: Path) -> None:
    path = {"path": str(yard), "subscribePattern": ".*"}
    seen: list[int] = []
    exported = run_export(spark, Export(path, tmp_path / "out"), seen.append)
    assert exported["logs"] == 40 and exported["rows"] == sum(seen) == 396
    table = spark.read.parquet(str(tmp_path / "out" / "data"))
    assert table.count() == 396 and table.select("log").distinct().count() == 40
    with LocalCluster(tmp_path / "second", 1) as second:
        second.start()
        servers = {"servers": ",".join(second.addresses)}
        assert run_import(spark, Import(tmp_path / "out", servers))["appended"] == 396
        assert digest_logs(spark, given(second)) == digest_logs(spark, path)
        audit = run_audit(spark, servers)
    assert audit["ok"] and audit["copies"] == 40 and 0 < audit["worker_peak_bytes"] < 1 << 30


@pytest.mark.long
def test_a_damaged_directory_fails_a_read_and_an_audit(spark: SparkSession, yard: Path) -> None:
    data = yard / "node-1" / "data"
    hit: list[tuple[Path, int]] = []
    for path in data.glob("wal/*.wal"):
        at = path.read_bytes().find(BODY)
        if at >= 0:
            hit.append((path, at + 10))
    assert hit
    for path, at in hit:
        flip(path, at)
    rows: list[dict[str, Any]] = []
    try:
        one = run_audit(spark, {"path": str(data)}, rows=rows.append)
        reader = spark.read.format("logyard").options(path=str(data), subscribePattern=".*", verify="true")
        with pytest.raises(Exception, match=r"log 'log-\d+': .*\.wal at byte \d+"):
            reader.load().write.format("noop").mode("overwrite").save()
        # The other node has it: a cluster's directory is read around the damage.
        both = spark.read.format("logyard").options(path=str(yard), subscribePattern=".*", verify="true").load()
        assert both.count() == 396
    finally:
        for path, at in hit:
            flip(path, at)
    assert not one["ok"] and one["corrupt"] == 1 and len(rows) == 40
    assert json.dumps(one) and ".wal" in one["problems"][0]

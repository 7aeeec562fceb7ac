"""Every block of docs/guides/spark.md runs, in order and in one program, as a reader would try them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from logyard.client.sync import connect_sync
from logyard.service.local_cluster import LocalCluster
from tests.test_docs import PYTHON

from .support import fill

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = "docs/guides/spark.md"
ADDRESS = "127.0.0.1:7001"
SALES = [b'{"time": "2026-11-23T09:30:00Z", "shop": "north", "amount": 1.5, "user": "ann"}', b'{"shop": "north"}']


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(240)
def test_the_guide_runs(spark: SparkSession, tmp_path_factory: Any, capfd: pytest.CaptureFixture[str]) -> None:
    blocks = [block for block in PYTHON if block.page == PAGE]
    assert len(blocks[0].text.strip().splitlines()) == 5, "a quick start of five lines, one of them empty"
    (stream,) = [block for block in blocks if block.text.startswith("stream = spark.readStream")]
    assert len(stream.text.strip().splitlines()) == 5, "a stream in five lines"
    with LocalCluster(tmp_path_factory.mktemp("yard"), 1) as cluster:
        cluster.start()
        (table,) = [block for block in blocks if "run_tables" in block.text]
        assert len(table.text.strip().splitlines()) == 10, "from logs to a table in ten lines, one of them empty"
        (sink,) = [block for block in blocks if block.text.startswith("copied = ")]
        assert len(sink.text.strip().splitlines()) <= 5, "a sink in five lines"
        with connect_sync(cluster.addresses) as yard:
            fill(yard, ["orders-1", "orders-2"], 30)
            yard.create("sales-1")
            yard.log("sales-1").append_many([(b"", sale) for sale in SALES])
        names: dict[str, Any] = {}
        place = tmp_path_factory.mktemp("orders")
        assert ADDRESS in blocks[0].text
        for block in blocks:
            text = block.text.replace(ADDRESS, cluster.addresses[0]).replace("/tmp/orders", str(place))
            exec(compile(text, f"{block.page}:{block.line}", "exec"), names)
    shown = capfd.readouterr().out
    assert names["rows"].select(["amount", "user"]).to_pylist() == [{"amount": 1.5, "user": "ann"}]
    assert names["rejects"].to_pylist() == [
        {"_log": "sales-1", "_offset": 1, "reason": "no_time", "detail": "there is none"}
    ]
    assert shown.count("|orders-1|") >= 2 and "|orders-1|   30|" in shown and names["spark"] is not None

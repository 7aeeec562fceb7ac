"""Tables in Spark itself, on a cluster: each record is in one of the two tables, once, by log and offset."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

from logyard.client.sync import Yard
from logyard.pipeline.jobs import tables
from logyard.pipeline.jobs.tables import Tables, run_tables
from logyard.pipeline.sink.record import SinkError
from logyard.service.cli import spark as cli_spark
from logyard.service.cli.root import cli
from logyard.service.local_cluster import LocalCluster

from .wrong_json import wrong

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
NUMBERS = count()


@pytest.fixture(scope="module")
def yard(yard: Yard) -> Yard:
    """With the group of the tables' rules."""
    yard.create("tables", machine="kv")
    return yard


class Shop:
    """Logs of one test, and the job over them."""

    def __init__(self, spark: SparkSession, cluster: LocalCluster, yard: Yard, out: Path) -> None:
        self.spark, self.yard = spark, yard
        self.name = f"orders{next(NUMBERS)}"
        given = {
            "servers": ",".join(cluster.addresses),
            "subscribePattern": f"{self.name}-.*",
            "maxOffsetsPerTrigger": "400",
        }
        self.job = Tables({**given, "minRowsPerLog": "10"}, self.name, out)
        self.put("schema", {"n": "long"})
        self.put("dimensions", ["shop"])

    def put(self, key: str, value: Any) -> int:
        return self.yard.kv("tables").put(f"tables/{self.name}/{key}".encode(), json.dumps(value).encode()).revision

    def append(self, log: str, numbers: range, hour: int = 9, **more: Any) -> None:
        name = f"{self.name}-{log}"
        if name not in {one["name"] for one in self.yard.list()}:
            self.yard.create(name)
        self.yard.log(name).append_many([
            (b"", json.dumps({"time": f"2026-11-23T{hour:02}:00:01Z", "n": n, "shop": "xyz"[n % 3], **more}).encode())
            for n in numbers
        ])  # fmt: skip

    def run(self, **change: Any) -> dict[str, Any]:
        return run_tables(self.spark, self.job._replace(**change))

    def read(self, path: Path) -> DataFrame:
        found = DeltaTable(str(path)).to_pyarrow_table()
        self.spark.conf.set("spark.sql.execution.arrow.pyspark.enabled", "true")
        return self.spark.createDataFrame(found.to_pandas(), SPARKS[path == self.job.rejected])

    def check(self) -> None:
        """A full outer join with the source."""
        given = {name: value for name, value in self.job.given.items() if name[:3] not in ("max", "min")}
        logs = self.spark.read.format("logyard").options(**given, includePayload="inline").load()
        source = logs.selectExpr("log", "offset", "coalesce(payload, meta) as data")
        rows = self.read(self.job.table).selectExpr("_log", "_offset", "n", "shop", "cast(null as binary) as bytes")
        rejects = self.read(self.job.rejected).selectExpr(
            "_log", "_offset", "cast(null as long)", "cast(null as string)", "bytes"
        )
        both = rows.union(rejects)
        source.createOrReplaceTempView("source")
        both.createOrReplaceTempView("both")
        (found,) = self.spark.sql(
            "select count(*) as count, count_if(log is null or _log is null) as alone, count_if(case "
            "when bytes is not null then bytes <> data "
            "else n <> get_json_object(cast(data as string), '$.n') "
            "or shop <> get_json_object(cast(data as string), '$.shop') end) as different "
            "from source full outer join both on log = _log and offset = _offset"
        ).collect()
        assert (found["alone"], found["different"]) == (0, 0)
        assert found["count"] == source.count() == both.count() > 0

    def forget(self, entries: int) -> None:
        """Lose the last entries of the checkpoint's log of commits."""
        commits = sorted(
            (int(one.name), one) for one in (self.job.checkpoint / "commits").iterdir() if one.name.isdigit()
        )
        for _, one in commits[-entries:]:
            one.unlink()
            (one.parent / f".{one.name}.crc").unlink(missing_ok=True)


SPARKS = {
    False: "n long, _rest string, _time timestamp, _log string, _offset long, shop string, _hour string",
    True: "_log string, _offset long, _time timestamp, reason string, detail string, size long, bytes binary, "
    "_hour string",
}


@pytest.fixture
def shop(spark: SparkSession, cluster: LocalCluster, yard: Yard, tmp_path: Path) -> Shop:
    return Shop(spark, cluster, yard, tmp_path)


@pytest.mark.long
def test_logs_become_tables_and_a_batch_that_was_forgotten_is_not_there_twice(shop: Shop) -> None:
    for log in "abc":
        shop.append(log, range(300), hour=9 + "abc".index(log))
    shop.yard.log(f"{shop.name}-a").append_many([(data, None) for data in [b"{", b"[]"]])
    bad = list(wrong(seed=7, count=100, field="n", dimension="shop"))
    shop.yard.log(f"{shop.name}-b").append_many([(b"", data) for data in bad if data])
    done = shop.run()
    assert done["batches"] >= 3 and done["rows_read"] == done["rows_written"] + done["rows_rejected"]
    assert done["rows_written"] == 900
    shop.check()
    shop.forget(2)
    shop.append("d", range(10))
    done = shop.run()
    assert done["batches_repeated"] == 1 and done["rows_written"] == 10
    shop.check()
    assert shop.run()["batches"] == 0


def test_a_change_of_the_rules_takes_effect_at_the_next_batch(shop: Shop) -> None:
    shop.append("a", range(30), note="x")
    first = shop.run()
    revision = shop.put("schema", {"n": "long", "note": "string"})
    shop.append("a", range(30, 60), note="x")
    second = shop.run(compact=True)
    assert first["kv_revision"] < revision == second["kv_revision"] and second["rows_rejected"] == 0
    rows = DeltaTable(str(shop.job.table)).to_pyarrow_table(columns=["n", "note"]).to_pylist()
    assert {one["n"]: one["note"] for one in rows} == {n: None if n < 30 else "x" for n in range(60)}
    history = DeltaTable(str(shop.job.table)).history()
    assert {one["logyard"]["revision"] for one in history if "logyard" in one} == {first["kv_revision"], revision}


@pytest.mark.long
@pytest.mark.parametrize("step", ["before-{}", "before-{}__rejected"])
def test_a_driver_that_fails_goes_on(shop: Shop, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    shop.append("a", range(50))
    shop.yard.log(f"{shop.name}-a").append(b"no json")

    def fail(now: str) -> None:
        if now == step.format(shop.name):
            raise RuntimeError("the driver died here")

    monkeypatch.setattr(tables, "HOOK", fail)
    with pytest.raises(RuntimeError, match="the driver died here"):
        shop.run()
    monkeypatch.setattr(tables, "HOOK", None)
    shop.put("schema", {"n": "string"})
    done = shop.run()
    rejected = 51 if "rejected" in step else 1
    assert (done["rows_written"], done["rows_rejected"]) == (51 - rejected, rejected)
    shop.check()


DRIVER = """
import os, signal, sys
from pathlib import Path
from logyard.pipeline import local_session
from logyard.pipeline.jobs import tables

step, name, out, servers = sys.argv[1:]

def die(now):
    if now == step:
        os.killpg(0, signal.SIGKILL)

tables.HOOK = die
given = {"servers": servers, "subscribePattern": f"{name}-.*"}
tables.run_tables(local_session("dies", memory="1g"), tables.Tables(given, name, Path(out)))
"""


@pytest.mark.long
@pytest.mark.parametrize("step", ["before-{}__rejected", "before-{}"])
def test_a_driver_that_is_killed_with_all_of_its_processes_leaves_each_record_once(
    shop: Shop, tmp_path: Path, step: str
) -> None:
    shop.append("a", range(50))
    shop.yard.log(f"{shop.name}-a").append(b"no json")
    words = [step.format(shop.name), shop.name, str(shop.job.out), shop.job.given["servers"]]
    # Into a file: workers that live a moment longer would hold a pipe open.
    with open(tmp_path / "said", "w+") as said:
        died = subprocess.run([sys.executable, "-c", DRIVER, *words], start_new_session=True, stdout=said, stderr=said)
    assert died.returncode == -signal.SIGKILL, (tmp_path / "said").read_text()
    shop.append("b", range(5))
    shop.run()
    shop.check()


@pytest.mark.long
def test_what_is_refused_is_one_sentence(shop: Shop, tmp_path: Path) -> None:
    shop.append("a", range(5))
    shop.run()
    other = shop.job._replace(out=tmp_path / "other")
    with pytest.raises(SinkError, match="another query has written under this name up to batch 0"):
        shop.job.checkpoint.rename(tmp_path / "gone")
        shop.run()
    with pytest.raises(Exception, match=r"KV group 'tables' describes no table under 'nothing/'"):
        run_tables(shop.spark, other._replace(prefix="nothing/"))
    done = shop.run(reset=True)
    assert done["rows_written"] == 5 and len(DeltaTable(str(shop.job.table)).to_pyarrow_table()) == 10
    shop.append("a", range(5, 10))
    shop.yard.log(f"{shop.name}-a").truncate(7)
    with pytest.raises(SinkError, match=r"^the stream ended: log '.*-a': records 5\.\.6 were truncated"):
        shop.run()


@pytest.mark.long
def test_plain_parquet_is_sparks_own(shop: Shop) -> None:
    shop.append("a", range(90))
    shop.yard.log(f"{shop.name}-a").append(b"no json")
    done = shop.run(plain=True)
    assert (done["rows_read"], done["rows_written"], done["rows_rejected"]) == (91, 90, 1)
    shop.append("a", range(90, 100))
    assert shop.run(plain=True)["rows_written"] == 10
    rows = shop.spark.read.parquet(str(shop.job.table)).where("shop = 'x' and n >= 0").select("n").collect()
    assert sorted(one["n"] for one in rows) == list(range(0, 100, 3))
    (bad,) = shop.spark.read.parquet(str(shop.job.rejected)).collect()
    assert (bad["_offset"], bad["reason"], bytes(bad["bytes"])) == (90, "no_json", b"no json")


@pytest.mark.long
def test_the_verb_counts_and_is_strict_where_that_was_asked_for(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def session(*_: object) -> Iterator[SparkSession]:
        yield shop.spark

    monkeypatch.setattr(cli_spark, "session", session)
    shop.append("a", range(20))
    shop.yard.log(f"{shop.name}-a").append(b"no json")
    words = ["spark", "tables", shop.name, "--out", str(shop.job.out), "--logs", f"{shop.name}-.*", "--once", "--json"]
    words += ["--servers", shop.job.given["servers"], "--max-records", "15"]
    first = CliRunner().invoke(cli, [*words, "--strict", "--compact"])
    found = json.loads(first.stdout.splitlines()[-1])
    assert first.exit_code == 1 and (found["rows_written"], found["rows_rejected"], found["ok"]) == (20, 1, False)
    assert found["batches"] == 2 and found["files_merged"] == 0
    second = CliRunner().invoke(cli, [*words, "--strict"])
    assert second.exit_code == 0 and json.loads(second.stdout.splitlines()[-1])["rows_read"] == 0
    refused = CliRunner().invoke(cli, [*words, "--sink-id", "a b"])
    assert refused.exit_code == 1 and "a name of letters" in refused.stdout

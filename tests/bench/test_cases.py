"""Each case of `logyard bench` on real nodes, small: the keys of its report, and that its checks can fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from logyard.bench.cases.append import LoadFailed, run_processes
from logyard.bench.cases.churn import differences
from logyard.bench.cases.cluster import in_memory
from logyard.bench.cases.failover import Load
from logyard.bench.load import LoadSpec
from logyard.bench.settings import ClusterSettings, FailoverSettings
from logyard.bench.suite.sync_delay import delayed_environment
from logyard.bench.workload import Workload
from logyard.client.lane import Batch


def bench(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "logyard.service.cli", "bench", *words, "--volatile", "--json"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    found: dict[str, Any] = json.loads(lines[0])
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "shape",
    [
        ("--nodes", "1", "--logs", "1", "--size", "256", "--clients", "5", "--window", "100"),
        ("--nodes", "1", "--logs", "3", "--size", "256", "--clients", "5", "--runtime", "asyncio"),
        ("--nodes", "1", "--logs", "1", "--size", "4096", "--clients", "5", "--window", "100", "--keep", "10000000"),
        ("--nodes", "1", "--logs", "3", "--size", "16", "--clients", "5", "--window", "100", "--keep", "1000000"),
        ("--nodes", "3", "--logs", "20", "--size", "5000", "--clients", "8", "--processes", "2"),
    ],
    ids=[
        "pipelined, one node",
        "under asyncio, one node",
        "what is old goes",
        "what is old and small goes",
        "closed loop, three nodes",
    ],
)
def test_append_counts_verifies_and_agrees_with_its_window(tmp_path: Path, shape: Sequence[str]) -> None:
    found = bench("append", *shape, "--seconds", "1", "--warmup", "0.5", "--dir", str(tmp_path / "nodes"))
    assert found["ok"] is True
    assert found["lost"] == found["failed"] == 0
    assert found["runtime"] == ("asyncio" if "asyncio" in shape else "trio")
    assert found["ops_per_s"] > 10
    assert found["mb_per_s"] == pytest.approx(found["ops_per_s"] * found["size"] / 1e6, rel=0.01)
    assert found["acknowledged"] == found["stored"] >= found["ops_per_s"]
    # A limit is kept to an eighth of it, and to an entry.
    most = found["keep"] * 9 // 8 + (2 << 20) if found["keep"] else found["stored"] * found["size"]
    assert 0 < found["kept"] * found["size"] <= most
    assert 0 < found["verified"] < found["acknowledged"] / 20
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert 0.5 < found["window_agreement"] < 2
    assert found["fdatasyncs"] > 0
    assert found["warmup_s"] == 0.5
    assert found["filesystem"]


@pytest.mark.long
def test_idle_reports_what_a_log_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGYARD_HIBERNATE_AFTER_MS", "200")
    found = bench(
        "idle", "--nodes", "1", "--logs", "300", "--seconds", "0.5", "--settle", "0.5", "--dir", str(tmp_path / "nodes")
    )
    assert found["ok"] is True
    assert 0 < found["bytes_per_log"] < 200_000
    for key in ("cpu_percent", "restarted_cpu_percent"):
        assert 0 < found[key] < 200
    assert found["anonymous_bytes_per_log"] <= found["bytes_per_log"]
    assert found["restarted_bytes_per_log"] < 200_000
    assert 0 < found["restart_ready_s"] <= found["restart_s"] <= found["restart_append_s"]


@pytest.mark.long
def test_huge_reports_what_many_logs_cost(tmp_path: Path) -> None:
    found = bench(
        "huge", "--nodes", "1", "--logs", "3000", "--active", "100", "--seconds", "0.5", "--warmup", "0.5",
        "--dir", str(tmp_path / "nodes"),
    )  # fmt: skip
    assert found["ok"] is True and found["created_per_s"] > 500
    assert found["restart_s"] > 0 < found["restarted_first_append_ms_p50"] <= found["restarted_first_append_ms_max"]
    assert found["alone_per_s"] > 0 < found["beside_per_s"] and found["rate_ratio"] > 0 < found["cpu_ratio"]


def test_recover_loses_nothing(tmp_path: Path) -> None:
    found = bench(
        "recover", "--nodes", "1", "--logs", "30", "--entries", "3", "--size", "64", "--dir", str(tmp_path / "nodes")
    )
    assert found["ok"] is True
    assert found["stored"] == found["acknowledged"] == 90
    assert found["lost"] == 0
    assert 0 < found["ready_s"] <= found["recovery_s"]


@pytest.mark.long
def test_mixed_compares_the_small_ones_alone_and_beside(tmp_path: Path) -> None:
    words = ("--nodes", "1", "--logs", "5", "--seconds", "0.5", "--warmup", "0.2", "--upload-mib", "8")
    done = subprocess.run(
        [sys.executable, "-m", "logyard.service.cli", "bench", "mixed", *words, "--volatile", "--json",
         "--dir", str(tmp_path / "nodes")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    # The ratio of so short a run may be anything, and `ok` with it.
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["intact"] is True and found["failed"] == 0
    assert found["appends_quiet"] > 10 and found["appends_beside"] > 0
    assert 0 < found["p50_quiet_ms"] <= found["p99_quiet_ms"]
    assert found["ratio"] == pytest.approx(found["p99_beside_ms"] / found["p99_quiet_ms"], rel=0.05)
    assert found["upload_mb_per_s"] > 0.1


@pytest.mark.long
def test_replay_counts_what_the_node_counted(tmp_path: Path) -> None:
    found = bench("replay", "--size", "70000", "--entries", "40", "--dir", str(tmp_path / "nodes"))
    assert found["ok"] is True and found["problems"] == []
    assert found["applied"] >= 40 and found["replayed"] >= 40
    assert 0 < found["apply_us"] < 100_000 and 0 < found["replay_us"] < 1_000_000
    assert found["replay_us"] == pytest.approx(found["replay_log_us"] + found["replay_apply_us"], abs=0.02)


@pytest.mark.long
def test_churn_of_the_young_writes_them_once(tmp_path: Path) -> None:
    found = bench("churn", "--mode", "young", "--nodes", "1", "--mib", "24", "--settle", "0.3", "--dir", str(tmp_path))
    assert found["ok"] is True and found["problems"] == []
    assert found["migrated_bytes"] < found["payload_bytes"] / 10
    assert found["filesystem"] == "tmpfs" or 0.9 < found["written_per_payload_byte"] < 1.6
    assert found["disk_per_payload_byte"] > 0.5


@pytest.mark.long
def test_churn_of_the_old_migrates_them(tmp_path: Path) -> None:
    found = bench("churn", "--mode", "old", "--nodes", "1", "--mib", "24", "--settle", "1.5", "--dir", str(tmp_path))
    assert found["ok"] is True and found["problems"] == []
    assert found["migrated_bytes"] > found["payload_bytes"] / 4 and found["generations_bytes"] > 0
    assert found["live_bytes"] == found["payload_bytes"] / 2
    assert found["disk_per_payload_byte"] > 0.9


def test_churn_notices_a_record_that_came_back_different() -> None:
    class Log:
        def latest(self, *, node: int, consistency: str) -> tuple[int, int]:
            return 0, 3

        def read(self, number: int, *, node: int) -> Any:
            return Record(0, b"", bodies[number])

    class Record(NamedTuple):
        offset: int
        metadata: bytes
        payload: bytes

    workload = Workload(64, 1, 0)
    bodies = [workload.body(0), workload.body(1), workload.body(2)]
    assert differences(Log(), workload, 0, 3, 1) == []
    bodies[2] = bodies[1]
    assert differences(Log(), workload, 0, 3, 1) == ["node 1: record 2 came back different"]
    assert "it should be 1..3" in differences(Log(), workload, 1, 3, 1)[0]


def test_a_load_process_that_cannot_connect_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    spec = LoadSpec(["127.0.0.1:not-a-port"], ["log"], 64, 1, 1, 0, 0, 0.1, 0.1, 100)
    with pytest.raises(LoadFailed):
        run_processes([spec], lambda text: None)
    assert "HOST:PORT" in capfd.readouterr().err


@pytest.mark.long
def test_failover_brings_every_log_back(tmp_path: Path) -> None:
    found = bench(
        "failover", "--logs", "40", "--interval", "0.1", "--steady", "0.3", "--dir", str(tmp_path / "nodes")
    )  # fmt: skip
    assert found["ok"] is True and found["problems"] == []
    assert found["logs"] == 40
    assert found["lost"] == found["failed"] == 0
    assert found["stored"] == found["acknowledged"] >= 2 * 40
    assert 0 < found["first_s"] <= found["p50_s"] <= found["p99_s"] <= found["failover_s"] < 30
    assert 0 < found["noticed_s"] <= found["led_again_s"]


@pytest.mark.long
def test_a_dead_node_of_many_has_all_logs_led_again(tmp_path: Path) -> None:
    found = bench(
        "failover", "--logs", "60", "--leaders", "spread", "--steady", "0.3", "--rate", "50",
        "--dir", str(tmp_path / "nodes"),
    )  # fmt: skip
    assert found["ok"] is True and found["problems"] == [] and found["lost"] == found["failed"] == 0
    assert found["acknowledged"] == 60 + found["probes"] and found["probes"] > 50
    assert 0 < found["noticed_s"] <= found["led_again_s"] == found["failover_s"] < 30
    assert 0 < found["append_p50_ms"] <= found["append_p99_ms"] <= found["append_max_ms"]


def test_a_log_is_back_only_with_a_write_submitted_after_the_kill() -> None:
    class Pending:
        def __init__(self) -> None:
            self.batch = Batch(lane, 1, 0.0)
            self.on_done = self.batch.pending.on_done

    class Lane:
        name = "log"

    lane: Any = Lane()

    class Log:
        name = "log"

        def append_nowait(self, metadata: bytes, payload: bytes) -> Pending:
            return Pending()

    one: Any = Log()
    load = Load([one], FailoverSettings(1, 16, 0.5, 0.0))
    (writer,) = load.writers
    load.submit(writer, 1.0)
    batch = writer.batch
    load.kill(2.0)
    assert batch is not None
    batch.finish(None)
    assert load.missing == 1 and not writer.back_at, "it may have been stored by the dead node"
    load.submit(writer, 3.0)
    batch = writer.batch
    assert batch is not None
    batch.finish(None)
    assert load.missing == 0 and writer.back_at and load.back.is_set()


@pytest.mark.parametrize(
    "shape",
    [
        ("--queues", "1", "--consumers", "1"),
        ("--queues", "1", "--consumers", "1", "--runtime", "asyncio"),
        ("--queues", "20", "--consumers", "0", "--size", "5000"),
    ],
    ids=["consumed meanwhile", "consumed meanwhile, under asyncio", "many queues"],
)
@pytest.mark.long
def test_queue_counts_what_was_published_and_consumed(tmp_path: Path, shape: Sequence[str]) -> None:
    found = bench("queue", *shape, "--seconds", "1", "--warmup", "0.5", "--dir", str(tmp_path / "nodes"))
    assert found["ok"] is True
    assert found["lost"] == found["different"] == found["twice"] == found["failed"] == 0
    assert found["ops_per_s"] > 10 and 0.5 < found["window_agreement"] < 2
    assert found["declare_s"] > 0 and found["terms"] > 0 and found["terms_early"] == 0
    if found["consumers"]:
        assert found["consumed"] == found["acknowledged"] and found["consumed_per_s"] > 10 and found["left"] == 0
    else:
        assert found["left"] == found["acknowledged"]


@pytest.mark.long
def test_groups_counts_what_was_sent_and_consumed(tmp_path: Path) -> None:
    shape = ("--nodes", "1", "--partitions", "3", "--members", "2", "--records", "5000", "--seconds", "1")
    found = bench("groups", *shape, "--dir", str(tmp_path / "nodes"))
    assert found["ok"] is True and found["lost"] == found["twice"] == found["lag"] == 0
    assert found["consumed"] == 5000 + found["sent_at_rate"] and found["consumed_per_s"] > 10
    assert found["latency_p50_ms"] <= found["latency_p99_ms"]


@pytest.mark.long
def test_cluster_measures_a_catalogue_on_nodes_and_in_memory(tmp_path: Path) -> None:
    found = bench(
        "cluster", "--logs", "600", "--lookups", "2000", "--finds", "20", "--dir", str(tmp_path / "nodes")
    )  # fmt: skip
    assert found["ok"] is True and found["created_per_s"] > 20
    assert 0 < found["lookup_us"] < 1000 * found["find_ms_p50"]
    assert 0 < found["snapshot_written_bytes"] <= found["snapshot_bytes"]
    assert 0 < found["snapshot_written_share"] <= 1 and 0 < found["restart_ready_s"] <= found["restart_s"]


def test_cluster_tells_the_catalogue_what_nodes_tell_it() -> None:
    found = in_memory(ClusterSettings(logs=1000, lookups=500, finds=1))
    assert found["snapshot_written_bytes"] < found["snapshot_bytes"] > 60 * 1000 and found["lookup_us"] > 0
    assert found["snapshot_written_share"] == pytest.approx(
        found["snapshot_written_bytes"] / found["snapshot_bytes"], abs=0.001
    )


@pytest.mark.parametrize("mode", ["put", "get", "watch"])
@pytest.mark.long
def test_kv_runs_under_asyncio(tmp_path: Path, mode: str) -> None:
    found = bench(
        "kv", "--mode", mode, "--nodes", "1", "--clients", "4", "--keys", "5", "--watchers", "20", "--seconds", "1",
        "--warmup", "0.2", "--processes", "2", "--runtime", "asyncio", "--dir", str(tmp_path / "nodes"),
    )  # fmt: skip
    assert found["ok"] is True and found["runtime"] == "asyncio"
    assert found["lost"] == found["failed"] == 0 and found["verified"] > 0 and found["ops_per_s"] > 10


@pytest.mark.long
def test_a_smoke_of_one_case_is_kept_reported_and_equal_to_itself(tmp_path: Path) -> None:
    report = tmp_path / "report"
    found = bench("run", "smoke", "--cases", "recover-100", "--against", "", "--report", str(report))
    assert found["ok"] is True
    (row,) = found["rows"]
    assert (row["case"], row["system"], row["rounds"]) == ("recover-100", "logyard", 1) and row["median"] > 0
    text = (report / "report.html").read_text()
    assert "<svg" in text and "recover-100" in text
    raw = report / "raw" / "recover-100" / "logyard-1.json"
    made = raw.stat().st_mtime_ns
    again = bench("run", "smoke", "--cases", "recover-100", "--against", "", "--report", str(report))
    assert again["rows"] == found["rows"] and raw.stat().st_mtime_ns == made
    done = subprocess.run(
        [sys.executable, "-m", "logyard.service.cli", "bench", "compare", str(report), str(report), "--json"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    same = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and same["worse"] == [] and same["cases"][0]["ratio"] == 1.0


@pytest.mark.long
def test_a_node_with_a_sync_delay_has_its_syncs_in_our_library(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    told = delayed_environment(tmp_path, 0.2)
    look = (
        "import ctypes, os\n"
        "at = ctypes.cast(ctypes.CDLL(None).fdatasync, ctypes.c_void_p).value\n"
        "for line in open('/proc/self/maps'):\n"
        "    first, last = (int(part, 16) for part in line.split()[0].split('-'))\n"
        "    if first <= at < last: print(line.split()[-1])\n"
        "with open('synced', 'wb') as stream: os.fdatasync(stream.fileno())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", look],
        capture_output=True,
        text=True,
        env={**os.environ, **told},
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout.strip() == told["LD_PRELOAD"]
    # As LMDB writes its meta page: no sync follows.
    timed = (
        "import os, time\n"
        "for flag in (os.O_DSYNC, os.O_SYNC):\n"
        "    fd, began = os.open('direct', os.O_RDWR | os.O_CREAT | flag), time.monotonic()\n"
        "    assert os.pwrite(fd, b'data', 3) == 4 and os.pread(fd, 4, 3) == b'data'\n"
        "    print(time.monotonic() - began)\n"
    )
    told = delayed_environment(tmp_path, 300.0)
    done = subprocess.run(
        [sys.executable, "-c", timed], capture_output=True, text=True, env={**os.environ, **told}, cwd=tmp_path,
        check=True,
    )  # fmt: skip
    assert all(float(line) >= 0.3 for line in done.stdout.split()) and len(done.stdout.split()) == 2

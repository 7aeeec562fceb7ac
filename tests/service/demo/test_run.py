"""The demo on a small source, with three real nodes: every key of the report, and every claim it makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LOGS = 12
KEYS = {
    "ok", "logs", "records", "payload_bytes", "acknowledged", "lost", "mismatched", "members_verified", "node_pids",
    "fdatasyncs", "groups_led_by_killed", "in_flight_at_kill", "failover_s", "recovery_s", "records_per_s", "mb_per_s",
    "snapshot_bytes", "live_bytes_in_wal", "live_bytes_in_generations", "disk_before", "disk_after",
}  # fmt: skip


def logyard(*words: str, timeout: float = 90) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "logyard.service.cli", *words, "--json"],
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    assert len(lines) == 1, "all but the object goes to standard error"
    return done.returncode, json.loads(lines[-1]), done.stderr


def write_source(root: Path) -> int:
    """50 files of all sizes that matter: empty, below a page, above it, above a batch. Returns their bytes."""
    total = 0
    for number in range(50):
        size = (0, 7, 300, 4096, 70_000, 2_000_000)[number % 6 if number < 12 else number % 5]
        path = root / f"part-{number % 3}" / f"file-{number:02}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((f"{number:04}".encode() * (size // 4 + 1))[:size])
        total += size
    return total


@pytest.mark.long
def test_the_demo_keeps_every_promise_on_a_small_source(tmp_path: Path) -> None:
    total = write_source(tmp_path / "source")
    directory = tmp_path / "yard"
    code, report, words = logyard(
        "demo", "--logs", str(LOGS), "--source", str(tmp_path / "source"), "--dir", str(directory)
    )
    assert code == 0, f"{report['problems']} {report['goals']}\n{words}"
    assert set(report) >= KEYS
    assert report["ok"] is True
    assert report["logs"] == LOGS
    assert report["records"] >= 50
    assert report["payload_bytes"] >= total
    assert report["acknowledged"] == report["records"]
    assert report["lost"] == report["mismatched"] == 0
    assert report["members_verified"] == 3
    assert len(set(report["node_pids"])) == 3
    assert report["killed_pid"] in report["node_pids"]
    assert report["fdatasyncs"] > 0
    assert report["groups_led_by_killed"] >= LOGS / 3
    assert report["in_flight_at_kill"] > 0
    assert 0 < report["failover_s"] < 60
    assert 0 < report["recovery_s"] < 60
    assert report["live_bytes_in_wal"] == [0, 0, 0]
    assert min(report["live_bytes_in_generations"]) >= report["payload_bytes"]
    assert report["snapshot_bytes"] < report["payload_bytes"]
    # What the write-ahead log has allocated ahead is several times that.
    assert max(report["disk_before"]) < 2 * report["payload_bytes"]
    for before, after in zip(report["disk_before"], report["disk_after"], strict=True):
        assert after < before
    code, checked, _ = logyard("check", str(directory))
    assert code == 0
    assert len(checked["directories"]) == 3

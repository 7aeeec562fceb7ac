"""The metrics' table, alone: what a scrape reads, whose groups have a label, how dead bytes are counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from logyard.service import metrics
from logyard.service.metrics import METRICS, Metric, largest_groups, render, samples


def member(uid: int, snapshot: int = 0, pending: int = 0) -> Any:
    return SimpleNamespace(
        uid=uid, spec=SimpleNamespace(name=f"g{uid}"), snapshot_bytes=snapshot, proposals=SimpleNamespace(bytes=pending)
    )


def file(total: int, **live: int) -> Any:
    """A sealed WAL file; `live` are the groups' shares."""
    shares = {int(uid[1:]): SimpleNamespace(live=size) for uid, size in live.items()}
    return SimpleNamespace(shares=shares, total=total, live=sum(live.values()))


def test_only_the_largest_groups_have_a_label_and_empty_ones_never() -> None:
    members = [member(1, pending=5), member(2, snapshot=50), member(3), member(4, pending=1)]
    sealed = [file(100, g1=30, g4=1), file(100, g1=30)]
    found = largest_groups(members, sealed, 2)
    assert list(found.items()) == [
        ("g1", {"wal": 60, "snapshot": 0, "pending": 5}), ("g2", {"wal": 0, "snapshot": 50, "pending": 0})
    ]  # fmt: skip
    assert list(largest_groups(members, sealed, 9)) == ["g1", "g2", "g4"]


def test_dead_bytes_are_what_sealed_files_and_generations_hold_beyond_what_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = next(metric for metric in METRICS if metric.name == "payload_dead_bytes")
    monkeypatch.setattr(metrics, "METRICS", (one,))
    status = {"generations": [{"total": 90, "live": 60}]}
    # A share may be counted before its file's total is.
    sealed = [file(100, g1=30), file(10, g1=30)]
    ((_, found),) = samples(status, [], sealed)
    assert dict(found) == {("wal",): 70.0, ("generations",): 30.0}


def test_a_scrape_in_the_text_format(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        Metric("syncs", "counter", "Syncs.", metrics.field("syncs")),
        Metric("stall_seconds", "gauge", "Stalled.", metrics.field("wal", "ms", scale=1e-3)),
        Metric("busy", "counter", "Refused.", metrics.by_key("busy"), ("cause",)),
    )
    monkeypatch.setattr(metrics, "METRICS", table)
    kind, body = render(cast(Any, {"syncs": 3, "wal": {"ms": 250}, "busy": {"full": 2, "disk": 1}}), [], [])
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    assert kind.startswith("text/plain") and lines == [
        "logyard_syncs_total 3.0", "logyard_stall_seconds 0.25", 'logyard_busy_total{cause="disk"} 1.0',
        'logyard_busy_total{cause="full"} 2.0',
    ]  # fmt: skip

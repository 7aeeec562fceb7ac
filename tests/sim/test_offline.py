"""The offline check at the end of a simulated run: it reads every node, draws nothing, and sees what is damaged."""

from __future__ import annotations

from typing import Any

import pytest

from logyard.service.check import process as check_process

from . import offline
from .files import File
from .run import Run


def test_every_directory_is_read_and_damage_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[dict[str, Any]] = []
    inspect = check_process.inspect

    def noted(*arguments: Any) -> dict[str, Any]:
        reports.append(inspect(*arguments))
        return reports[-1]

    monkeypatch.setattr(check_process, "inspect", noted)
    run = Run(31, 0.3, allowed=frozenset({"kill", "power_cut"}), features=frozenset({"offline"}))
    result = run.go()
    assert result.violations == [] and len(reports) == len(run.cluster.hosts)
    assert sum(len(report["groups"]) for report in reports) >= 12 and sum(one["counts"]["units"] for one in reports)
    plain = Run(31, 0.3, allowed=frozenset({"kill", "power_cut"}), features=frozenset()).go()
    assert plain.event_hash == result.event_hash
    host = run.cluster.hosts[2]
    logs = [path for path, node in host.files.walk() if isinstance(node, File) and path.endswith(".wal")]
    host.files.unlink(max(logs))
    assert [one for one in offline.complaints(run.cluster, (), ()) if one.startswith("offline check of node 2")]
    assert not list(offline.complaints(run.cluster, {2}, ()))

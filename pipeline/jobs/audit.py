"""Audit: every live payload of every member read from its own disk, hashed, and compared with what should be there.

Over a running cluster each member's node checks its own copy, and only figures travel; nothing is mended on the way.
Over directories the tasks read them. Tasks return one row a copy and forget it: memory does not grow with the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..options import parse_options
from .audit_cluster import audit_cluster, cluster_tasks
from .running import Progress, Result, run_tasks, silent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHOWN = 100
"""Problems that are listed; all are counted."""
WORST = 10


class Total(NamedTuple):
    """Sums over copies; bytes of payload."""

    copies: int = 0
    units: int = 0
    bytes: int = 0
    dead: int = 0
    missing: int = 0
    corrupt: int = 0
    mismatches: int = 0

    def plus(self, row: Mapping[str, Any]) -> Total:
        """Return the total with one more row."""
        return Total(*(have + int(row.get(key, 0)) for key, have in self._asdict().items()))


def run_audit(
    spark: SparkSession,
    given: Mapping[str, str],
    progress: Progress = silent,
    rows: Callable[[Result], object] = lambda row: None,
) -> dict[str, Any]:
    """Audit the logs that the data source's options `given` name (a cluster), or everything in a directory. Returns
    plain figures; `ok`: nothing is missing, damaged or in disagreement. `warnings`: of a directory, what the next start
    puts right (one of two copies that is damaged, say), and what can't be judged. `progress` counts copies;
    `rows` gets the row of each copy."""
    named = any(name.lower() in ("subscribe", "assign") for name in given)
    options = parse_options(given if named else {"subscribePattern": ".*", **given})
    summary = Summary(rows)
    if options.path is not None:
        from .audit_directory import audit_directory, differing, directory_tasks

        tasks, problems = directory_tasks(Path(options.path), options)
        for problem in problems + differing(Path(options.path), options):
            summary.problem(problem)
        for result in run_tasks(spark, partial(audit_directory, options), tasks):
            summary.add(result)
            progress(result.get("copies", 0))
    else:
        cluster, problems = cluster_tasks(options)
        for problem in problems:
            summary.problem(problem)
        for result in run_tasks(spark, partial(audit_cluster, options), cluster):
            summary.add(result)
            progress(result["copies"])
        summary.agree()
    return summary.fields()


class Summary:
    """What the rows add up to."""

    def __init__(self, rows: Callable[[Result], object]) -> None:
        self.total = Total()
        self.problems: list[str] = []
        self.count = 0
        self.warnings: list[str] = []
        self.warning_count = 0
        self.orphaned = 0
        self.worker_peak = 0
        self.files: dict[str, dict[str, int]] = {}
        self._rows = rows
        self._nodes: dict[int, Total] = {}
        self._worst: list[tuple[float, int, str, int, int]] = []
        self._digests: dict[tuple[int, int, int, int], dict[int, tuple[str, str]]] = {}

    def problem(self, text: str) -> None:
        """Note what is wrong."""
        self.count += 1
        if len(self.problems) < SHOWN:
            self.problems.append(text)

    def add(self, row: Result) -> None:
        """Add one copy of a log, or a file of a directory."""
        for text in row["problems"]:
            self.problem(text)
        warnings = row.get("warnings", [])
        self.warning_count += len(warnings)
        self.warnings += warnings[: SHOWN - len(self.warnings)]
        self.worker_peak = max(self.worker_peak, row.get("peak", 0))
        self.orphaned += row.get("orphaned", 0)
        for path, (live, stored) in row.get("files", {}).items():
            known = self.files.setdefault(path, {"live": 0, "stored": 0})
            known["live"] += live
            known["stored"] += stored
        if not row["copies"]:
            return
        self._rows(row)
        self.total = self.total.plus(row)
        node = row["node"]
        self._nodes[node] = self._nodes.get(node, Total()).plus(row)
        stored = row["bytes"] + row["dead"]
        if row["bytes"]:
            self._worst.append((stored / row["bytes"], node, row["log"], row["bytes"], row["dead"]))
            self._worst = sorted(self._worst, reverse=True)[:WORST]
        if "digest" in row:
            key = (row["uid"], row["applied"], row["start"], row["end"])
            self._digests.setdefault(key, {})[node] = (row["digest"], row["log"])

    def agree(self) -> None:
        """Check that members that have applied the same hold the same."""
        for (_, applied, *_), nodes in self._digests.items():
            if len({digest for digest, _ in nodes.values()}) > 1:
                log = next(iter(nodes.values()))[1]
                self.problem(f"log {log!r}: nodes {sorted(nodes)} hold different payloads at entry {applied}")

    def fields(self) -> dict[str, Any]:
        """Return plain figures."""
        return {
            "ok": not self.count, **self.total._asdict(), "orphaned_bytes": self.orphaned,
            "amplification": _ratio(self.total), "problems": self.problems, "problem_count": self.count,
            "warnings": self.warnings, "warning_count": self.warning_count,
            "nodes": {
                node: {**total._asdict(), "amplification": _ratio(total)}
                for node, total in sorted(self._nodes.items())
            },
            "worst": [
                {"log": log, "node": node, "amplification": round(ratio, 3), "bytes": live, "dead": dead}
                for ratio, node, log, live, dead in self._worst
            ],
            "files": dict(sorted(self.files.items())), "worker_peak_bytes": self.worker_peak,
        }  # fmt: skip


def _ratio(total: Total) -> float:
    """Return bytes stored for each that lives."""
    return round((total.bytes + total.dead) / total.bytes, 3) if total.bytes else 1.0

"""The directories of one cluster against each other: what its nodes know of one another shows a wiped or older one.

A start would find the same as soon as it met a peer (`engine.identity`). Called by `logyard check` when it is given
more than one directory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from logyard.engine.identity import Origin, difference, plausible
from logyard.pipeline.directory.report import DAMAGE


def compare(reports: Iterable[dict[str, Any]]) -> None:
    """Add a finding to the report of each directory that is not the one another node of its cluster knows."""
    found = [report for report in reports if report["node"]]
    for report in found:
        for other in found:
            known = other["peers"].get(str(report["node"])) if other["cluster"] == report["cluster"] else None
            if known is None or other is report or not plausible(Origin(*known)):
                continue
            reason = _reason(Origin(*known), report)
            if reason:
                text = f"node {other['node']} will refuse it: {reason}"
                report["findings"].append(
                    {"severity": DAMAGE, "kind": "outdated", "group": "", "path": "meta", "message": text}
                )
                report["ok"] = False


def _reason(known: Origin, report: dict[str, Any]) -> str:
    directory, epoch, written = report["directory"], report["epoch"], report["written"]
    # As it was last started, and as it would be started next.
    return difference(known, Origin(directory, epoch, 0, 0)) or difference(
        known, Origin(directory, epoch + 1, 0, written)
    )

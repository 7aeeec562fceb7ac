"""The audit's tasks over a running cluster: each member is asked by its node, step by step. Called by `audit`."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import closing
from typing import TypeAlias

from logyard.client.scans import AuditStep, LogRow, audit_call, logs_call
from logyard.client.sync import Yard
from logyard.protocol.errors import LogyardError
from logyard.protocol.verbs import LOG_ROWS

from ..network import NODE_PATIENCE_S, NetworkSource
from ..opening import open_source
from ..options import Options
from .digests import MASK
from .running import Result, bins, not_there

STEP_BYTES = 64 << 20
STEP_S = 120.0
TASKS = 4
"""Tasks for each node."""
ROW_BYTES = 256

ClusterTask: TypeAlias = tuple[int, list[tuple[str, int]]]
"""A node, and the logs (name, uid) that it is asked about."""


def connected(options: Options) -> NetworkSource:
    """Return the cluster that options name."""
    source = open_source(options)
    assert isinstance(source, NetworkSource)
    return source


def cluster_tasks(options: Options) -> tuple[list[ClusterTask], list[str]]:
    """Return the tasks, and what is wrong already: nodes that do not answer, members that are not there."""
    matches = re.compile(options.pattern or ".*").fullmatch
    rows: dict[int, list[LogRow]] = {}
    problems: list[str] = []
    with closing(connected(options)) as source:
        for node in source.yard.nodes():
            try:
                found = _rows(source.yard, node)
            except LogyardError as error:
                problems.append(f"node {node} does not answer: {error}")
                continue
            rows[node] = [
                row for row in found if matches(row.name) and (options.names is None or row.name in options.names)
            ]
    members = {(row.uid, row.name): row.members for found in rows.values() for row in found}
    problems += not_there(options, {name for _, name in members})
    for (uid, name), nodes in sorted(members.items(), key=lambda item: item[0][1]):
        for node in nodes:
            if node in rows and uid not in {row.uid for row in rows[node]}:
                problems.append(f"log {name!r}: its member on node {node} does not run")
    tasks: list[ClusterTask] = []
    for node, found in rows.items():
        weighed = [(row.bytes + (row.end - row.start) * ROW_BYTES, (row.name, row.uid)) for row in found]
        tasks += ((node, one) for one in bins(weighed, TASKS))
    # Those that run together ask different nodes.
    order = {node: number for number, node in enumerate(rows)}
    seen: dict[int, int] = {}
    ranked = []
    for node, logs in tasks:
        seen[node] = seen.get(node, 0) + 1
        ranked.append((seen[node], order[node], (node, logs)))
    return [task for *_, task in sorted(ranked, key=lambda one: one[:2])], problems


def _rows(yard: Yard, node: int) -> list[LogRow]:
    rows: list[LogRow] = []
    while True:
        page: list[LogRow] = yard.run(logs_call(node, rows[-1].name if rows else ""), NODE_PATIENCE_S)
        rows += page
        if len(page) < LOG_ROWS:
            return rows


def audit_cluster(options: Options, task: ClusterTask) -> Iterator[Result]:
    """Run one task."""
    node, logs = task
    with closing(connected(options)) as source:
        for name, uid in logs:
            yield audit_member(source.yard, node, name, uid)


def audit_member(yard: Yard, node: int, name: str, uid: int) -> Result:
    """Audit one copy, in steps."""
    row: Result = {
        "node": node, "log": name, "uid": uid, "copies": 1, "units": 0, "bytes": 0, "dead": 0, "missing": 0,
        "corrupt": 0, "mismatches": 0, "entries": 0, "problems": [],
    }  # fmt: skip
    index = offset = digest = 0
    steps: list[tuple[int, int, int]] = []
    while True:
        try:
            step: AuditStep = yard.run(audit_call(node, name, uid, index, offset, STEP_BYTES), STEP_S)
        except LogyardError as error:
            row["problems"].append(f"log {name!r} on node {node}: it could not be audited: {error}")
            return row
        for key in ("entries", "units", "bytes", "dead", "missing", "corrupt", "mismatches"):
            row[key] += getattr(step, key)
        row["problems"] += (f"log {name!r} on node {node}: {text}" for text in step.problems)
        digest = digest + step.digest & MASK
        steps.append((step.applied, step.start, step.end))
        index, offset = step.next, step.offset
        if not index:
            break
    if len(set(steps)) == 1 and not row["missing"] and not row["corrupt"]:
        # Only what was whole, and still while it was looked at, can be compared.
        row.update(applied=step.applied, start=step.start, end=step.end, digest=f"{digest:032x}")
    row["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return row

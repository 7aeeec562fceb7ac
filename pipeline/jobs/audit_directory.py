"""The audit's tasks over directories of stopped nodes: groups in bundles, each generation, and the files of the WAL.

It is `logyard check` cut into tasks, with figures for each group. A page that the disk can't read ends its task, and
so the job, where a check names it. Called by `audit`.
"""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from logyard.engine.recovery.inspect import Facts

from ..directory.files import Segments, check_wal, users_of
from ..directory.generations import Generations
from ..directory.groups import check_group
from ..directory.lock import held
from ..directory.meta import read_meta
from ..directory.payloads import check_payloads
from ..directory.places import data_directories
from ..directory.reading import StoppedNode, plain_errors
from ..directory.report import DAMAGE, Report
from ..directory.source import differences
from ..options import Options
from .running import Result, bins, not_there

TASKS = 4
"""Bundles of groups for each directory."""


class DirectoryTask(NamedTuple):
    """What to look at in `directory` of node `node`: groups by uid, a generation (0: none), or the rest."""

    directory: Path
    node: int
    groups: tuple[int, ...] = ()
    generation: int = 0


def directory_tasks(path: Path, options: Options) -> tuple[list[DirectoryTask], list[str]]:
    """Return the tasks of each directory, and what is wrong already: logs that are named and nowhere. Raises
    `DirectoryInUse`, `Corrupt` where not even the groups are known."""
    matches = re.compile(options.pattern or ".*").fullmatch
    tasks: list[DirectoryTask] = []
    there: set[str] = set()
    for directory in data_directories(path):
        with StoppedNode(directory) as node:
            facts, marks = node.facts, node.generations.marks
            weights = {uid: 0 for uid in facts.groups if uid not in facts.deleted}
            for (_, _, uid), found in marks.items():
                if uid in weights:
                    weights[uid] += found.live
            for uid, recovered in node.wal.groups.items():
                if uid in weights:
                    weights[uid] += sum(entry.body_bytes for entry in recovered.entries)
            chosen = [
                (weight + 4096, uid) for uid, weight in weights.items()
                if matches(facts.name(uid)) and (options.names is None or facts.name(uid) in options.names)
            ]  # fmt: skip
            there |= {facts.name(uid) for _, uid in chosen}
            tasks += (DirectoryTask(directory, node.node, tuple(uids)) for uids in bins(chosen, TASKS))
            tasks += (DirectoryTask(directory, node.node, generation=number) for number in node.generations.numbers)
            tasks.append(DirectoryTask(directory, node.node))
    return tasks, not_there(options, there)


def differing(path: Path, options: Options) -> list[str]:
    """Return copies of one log that differ, each with the names of both directories. Raises as `directory_tasks`."""
    matches = re.compile(options.pattern or ".*").fullmatch
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(StoppedNode(directory)) for directory in data_directories(path)]
        copies: dict[int, list[StoppedNode]] = {}
        for node in nodes:
            for uid in node.uids():
                name = node.facts.name(uid)
                if matches(name) and (options.names is None or name in options.names):
                    copies.setdefault(uid, []).append(node)
        return [problem for uid, same in sorted(copies.items()) for problem in differences(uid, same)]


def audit_directory(options: Options, task: DirectoryTask) -> Iterator[Result]:
    """Run one task. Raises `DirectoryInUse`."""
    report = Report(lambda stage, done, total: None, lambda path: None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(plain_errors(f"directory {task.directory}", task.directory))
        stack.enter_context(held(task.directory))
        facts = read_meta(task.directory, frozenset(), report)
        generations = Generations(task.directory, facts, frozenset(), report)
        stack.callback(generations.close)
        if task.generation:
            yield _generation(task, generations, facts, report)
        elif task.groups:
            yield from _groups(task, generations, facts, report, stack)
        else:
            yield _files(task, facts, report)


def _row(task: DirectoryTask, report: Report, first: int, **more: object) -> Result:
    told: dict[bool, list[str]] = {True: [], False: []}
    for finding in report.findings[first:]:
        text = f"{task.directory} (node {task.node}): {finding['group']} {finding['path']}: {finding['message']}"
        told[finding["severity"] == DAMAGE].append(text)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "node": task.node, "copies": 0, "problems": told[True], "warnings": told[False], "peak": peak, **more
    }  # fmt: skip


def _files(task: DirectoryTask, facts: Facts, report: Report) -> Result:
    """Verify WAL and segments as bytes, beside the meta store's facts."""
    wal = check_wal(task.directory, facts, report)
    segments = Segments(task.directory, report)
    try:
        segments.verify(users_of(facts, wal), facts)
    finally:
        segments.close()
    return _row(task, report, 0)


def _generation(task: DirectoryTask, generations: Generations, facts: Facts, report: Report) -> Result:
    """Audit every row of one generation, also dead ones; rows that are nobody's are orphaned."""
    number, first, orphaned = task.generation, len(report.findings), 0
    with report.guarded("generation", path=generations.data(number)):
        measured = generations.reader(number).measure()
        for text in measured.damage:
            report.damage("generation", text, path=generations.data(number))
        for run, columns in measured.runs.items():
            for uid, (indexes, _, sizes) in columns.groups.items():
                spans = [
                    (home.first, home.last) for home in generations.homes.get(uid, ())
                    if (home.generation, home.run) == (number, run) and uid not in facts.deleted
                ]  # fmt: skip
                orphaned += sum(
                    size for index, size in zip(indexes, sizes, strict=True)
                    if not any(low <= index <= high for low, high in spans)
                )  # fmt: skip
    return _row(task, report, first, orphaned=orphaned)


def _groups(
    task: DirectoryTask, generations: Generations, facts: Facts, report: Report, stack: contextlib.ExitStack
) -> Iterator[Result]:
    wal = check_wal(task.directory, facts, report, shapes=False)
    segments = Segments(task.directory, report)
    stack.callback(segments.close)
    generations.prepare()
    for uid in task.groups:
        # What was found above is not of one group, and another task's to tell.
        first, units, size = len(report.findings), report.counts["units"], report.counts["bytes"]
        space: dict[str, tuple[int, int]] = {}
        name = facts.name(uid)
        with report.guarded("group", group=name):
            group = check_group(uid, facts, wal, segments, generations.homes.get(uid, ()), report)
            space = check_payloads(group, task.directory, wal, segments, generations, facts, report)
        texts = [one["message"] for one in report.findings[first:] if one["severity"] == DAMAGE]
        corrupt = sum("hash" in text or "verify" in text or "damaged" in text for text in texts)
        live, stored = (sum(one[place] for one in space.values()) for place in (0, 1))
        yield _row(
            task, report, first, copies=1, log=name, uid=uid,
            units=report.counts["units"] - units, bytes=report.counts["bytes"] - size, dead=stored - live,
            missing=len(texts) - corrupt, corrupt=corrupt, mismatches=0,
            files={f"node-{task.node}/{path}": found for path, found in space.items()},
        )  # fmt: skip

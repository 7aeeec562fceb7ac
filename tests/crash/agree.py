"""A start and a reader of the stopped directory, side by side: one image of each group, and no finding of `logyard
check` where the start raises nothing.

The start opens a copy, and is looked at before it runs: what it does next is its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from logyard.engine.config import SystemConfig
from logyard.engine.host.engine import System
from logyard.engine.log.recovered import Recovered
from logyard.engine.machine import Machine
from logyard.engine.raft.membership import decode_entries
from logyard.engine.raft.raft_log import RaftLog
from logyard.engine.recovery.inspect import Facts, Wal, image_of
from logyard.engine.recovery.rebuild import Image, never_used, slept_on
from logyard.engine.replica.apply import Replicated
from logyard.engine.replica.member import Member
from logyard.machines.registry import create_machine
from logyard.pipeline.directory.groups import GroupLog, Replay
from logyard.pipeline.directory.meta import read_meta
from logyard.pipeline.directory.report import DAMAGE, UNKNOWN, Report
from logyard.service.check.process import inspect
from logyard.service.node import build_system

Make = Callable[[str, dict[str, Any]], Machine]


async def disagreements(path: Path, copy: Path, config: SystemConfig, make: Make = create_machine) -> list[str]:
    """Return where the two differ on the directory `path`, which stays as it is. Raises what the start raises."""
    report = inspect(path, frozenset(), lambda line: None, make)
    said = Report(lambda stage, done, total: None, lambda inside: None)
    facts, wal = read_meta(path, frozenset(), said), Wal()
    wal.read(str(path / "wal"), facts)
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("lock", "writer-lock"))
    system = build_system(copy, facts.node or 1, facts.cluster or "embedded", config, machines=make)
    await system.open()
    try:
        wrong = [f"{facts.name(uid)}: {text}" for uid, text in _differences(system, facts, wal, make)]
        if not any(system.repair.log_repair.status().values()) and not system.repair.log_repair.known:
            wrong += [f"check: {one}" for one in report["findings"] if one["severity"] in (DAMAGE, UNKNOWN)]
    finally:
        system.close()
        shutil.rmtree(copy)
    return wrong


def _differences(system: System, facts: Facts, wal: Wal, make: Make) -> Iterator[tuple[int, str]]:
    there = {uid for uid in facts.groups if uid not in facts.deleted}
    members, asleep = system.members, system.quiescence.table
    for uid in sorted(there | members.keys()):
        if uid not in there:
            yield uid, "only the start has it"
            continue
        image = image_of(uid, facts, wal)
        if uid in asleep:
            row, said = facts.snapshots.get(uid), wal.groups.get(uid)
            fresh = never_used(facts.states.get(uid), row, said, facts.departed.get(uid))
            if not fresh and not slept_on(image.state, row, said or Recovered()):
                yield uid, "it sleeps for the start alone"
        elif uid not in members:
            yield uid, "the start has it not"
        elif uid not in wal.damaged and not members[uid].damaged:
            yield from ((uid, text) for text in _different(members[uid], image, make, facts.node))


def _different(member: Member, image: Image, make: Make, node: int) -> Iterator[str]:
    if image.findings:
        yield f"findings where the start raises nothing: {image.findings}"
        return
    mine, theirs = _of_member(member), _of_image(image, make, node)
    for name, value in mine.items():
        if value != theirs[name]:
            yield f"{name}: {value!r} at the start, {theirs[name]!r} in the stopped directory"
    # A start gives up runs below its log that locate nothing any more.
    runs = [run for run in image.runs if run in member.segments or run.last > image.log.snapshot_index]
    if runs != member.segments:
        yield f"runs: {member.segments} at the start, {image.runs} in the stopped directory"
    if image.ring != member.ring:
        yield f"ring: {member.ring} at the start, {image.ring} in the stopped directory"


def _of_log(log: RaftLog) -> tuple[object, ...]:
    entries = [(one.index, one.term, bytes(one.data), one.file, one.offset, one.tombstone) for one in log.entries]
    return log.snapshot_index, log.snapshot_term, log.runs, log.memory_first, log.last_index, log.stable, entries


def _of_member(member: Member) -> dict[str, object]:
    raft = member.raft
    return {
        "promises": (raft.term, raft.vote, raft.promise), "commit": raft.commit, "log": _of_log(raft.log),
        "configuration": (raft.configuration_index, raft.configuration),
        "snapshot": (member.snapshot_index, member.snapshot_term, member.compactable),
        "floor": member.floor, "flushed": member.flushed, "version": member.version,
        "machine": member.machine.snapshot(), "beside the machine": _beside(member),
    }  # fmt: skip


def _beside(state: Replicated) -> tuple[object, ...]:
    sessions, uploads, kept = state.sessions, state.uploads, state.kept
    return sessions and sessions.encode(), uploads and uploads.encode(), kept and kept.sections()


def _of_image(image: Image, make: Make, node: int) -> dict[str, object]:
    state = Replay(GroupLog(image, True, node), make)
    snapshot = image.snapshot
    later = [*image.configurations, *decode_entries(image.log.entries)]
    newest = max([image.base, *(one for one in later if one[0] > image.base[0])], key=lambda one: one[0])
    return {
        "promises": (image.proven_term, image.vote if image.proven_term == image.term else 0, image.promise),
        "commit": image.proven_commit, "log": _of_log(image.log), "configuration": newest,
        "snapshot": (snapshot.index, snapshot.term, image.compactable) if snapshot is not None else (0, 0, 0),
        "floor": image.floor, "flushed": image.flushed, "version": state.version,
        "machine": state.machine.snapshot(),
        "beside the machine": _beside(state),
    }  # fmt: skip

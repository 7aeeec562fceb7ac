"""Both kinds of crash states, in parallel: the log alone, recorded at the disk door; and a whole node under strace."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from logyard.engine.log.record import DATA_START
from logyard.engine.log.ring import FOLDER, Geometry
from logyard.payloads.bodies import NAME as BODIES

from .events import CREATE, RENAME, SIZE, SYNC, SYNC_DIRECTORY, UNLINK, WRITE, Event
from .states import crash_states
from .trace import available, read_trace, run_traced
from .verify import expectations, verify
from .wal import Story
from .workload import CONFIG

WAL_BATCHES = 40
VARIANTS = 4
NEAR = 16
"""Events behind a call: what is committed because of it comes soon."""
CUTS = 0.2
"""Of those, how many are looked at."""
KEPT = 10
"""Violations that are spelt out."""


@dataclass
class Counts:
    """What a run did."""

    node_states: int = 0
    wal_states: int = 0
    events: int = 0
    wraps: int = 0
    """How often a ring was written to behind its last slot, and from its first on again."""
    with_bodies: int = 0
    """Of the states of nodes those in which a generation's file beside LMDB has bodies."""
    traced: bool = False
    door_differs: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """For people and machines."""
        return {
            "states": self.node_states + self.wal_states, "node_states": self.node_states,
            "wal_states": self.wal_states, "events": self.events, "wraps": self.wraps,
            "with_bodies": self.with_bodies, "traced": self.traced,
            "door_differs": self.door_differs, "violations": self.violations,
        }  # fmt: skip


def place() -> str | None:
    """Memory where there is: a state is written for each recovery, and nothing here needs a disk's promises."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def drain(jobs: Iterator[tuple[str, Future[Any]]], counts: Counts, kind: str) -> None:
    """Let jobs run, a few at a time, and note what they find."""
    running: dict[Future[Any], str] = {}

    def take() -> None:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            what = running.pop(future)
            wrong = future.result()
            setattr(counts, kind, getattr(counts, kind) + 1)
            if wrong and len(counts.violations) < KEPT:
                counts.violations.append(f"{what}: {wrong}")

    for what, future in jobs:
        running[future] = what
        while len(running) >= 2 * (os.cpu_count() or 1):
            take()
    while running:
        take()


def check_wal(pool: ProcessPoolExecutor, root: Path, seed: int, most: int, counts: Counts) -> None:
    """Up to `most` states of logs drawn from the seed and its successors."""

    def jobs() -> Iterator[tuple[str, Future[Any]]]:
        number = 0
        for life in range(seed, seed + 1000):
            story = Story(root / f"wal-{life}", life, WAL_BATCHES)
            counts.events += len(story.events)
            told = root / f"story-{life}"
            told.write_bytes(pickle.dumps(story))
            for state, done, begun in story.cases(life, VARIANTS):
                if number >= most:
                    return
                number += 1
                yield f"wal, seed {life}, state {number}", pool.submit(judge_wal, told, state, done, begun)

    drain(jobs(), counts, "wal_states")


def judge_wal(told: Path, state: dict[str, bytes | None], done: int, begun: int) -> str:
    """In a worker."""
    story: Story = pickle.loads(told.read_bytes())
    return story.judge(state, done, begun, told.parent / f"worker-{os.getpid()}")


def check_node(
    pool: ProcessPoolExecutor, root: Path, seed: int, steps: int, most: int, counts: Counts, around: str = ""
) -> None:
    """Up to `most` states of nodes' lives; with `around` one cut of a few soon behind calls about such files, so that
    whole lives are looked at. The door is compared with the kernel."""

    def jobs() -> Iterator[tuple[str, Future[Any]]]:
        number = 0
        for life in range(seed, seed + 1000):
            events = record(root, life, steps, counts)
            counts.events += len(events)
            counts.wraps += wraps(events)
            near = close_to(events, around, random.Random(f"{life} cuts"))
            for at, state in crash_states(events, life, VARIANTS, wanted=near.__contains__ if around else None):
                if number >= most:
                    return
                number += 1
                counts.with_bodies += has_bodies(state)
                what = f"node, seed {life}, event {at} ({events[at - 1].kind} {events[at - 1].path})"
                yield what, pool.submit(judge_node, root, state, expectations(events, at))

    drain(jobs(), counts, "node_states")


def has_bodies(state: dict[str, bytes | None]) -> bool:
    """Whether large bodies lie beside LMDB there."""
    return any(content for path, content in state.items() if path.rpartition("/")[2] == BODIES)


def close_to(events: list[Event], path: str, draw: random.Random) -> set[int]:
    """How many events there are at some cuts behind a call about files whose path begins so, or soon after."""
    found: set[int] = set()
    for number, event in enumerate(events, 1):
        if event.path.startswith(path):
            found.update(range(number, number + NEAR))
    return {number for number in sorted(found) if draw.random() < CUTS}


def wraps(events: list[Event]) -> int:
    """How often rings were wrapped: a header's place lies before that of the last one."""
    first_slot = Geometry(CONFIG.ring_slots, CONFIG.ring_slot_bytes).slot_at(0)
    at: dict[str, int] = {}
    found = 0
    for event in events:
        if event.kind == WRITE and event.path.startswith(f"{FOLDER}/") and DATA_START <= event.offset < first_slot:
            found += event.offset < at.get(event.path, 0)
            at[event.path] = event.offset
    return found


def judge_node(root: Path, state: dict[str, bytes | None], want: Any) -> str:
    """In a worker. What is wrong is left there to be looked at."""
    place_ = root / f"worker-{os.getpid()}"
    wrong = verify(state, want, place_)
    if wrong:
        place_.rename(tempfile.mkdtemp(prefix="wrong-", dir=root))
    return "; ".join(wrong[:3])


def record(root: Path, seed: int, steps: int, counts: Counts) -> list[Event]:
    """One life under strace; the disk door's own record is compared."""
    data, output, told = root / f"node-{seed}", root / "trace", root / "door"
    data.mkdir(mode=0o700)
    command = [sys.executable, "-m", "tests.crash.workload", str(data), str(seed), str(steps), str(told)]
    run_traced(command, output)
    events = read_trace(output, str(data), f"{data}.marks")
    output.unlink()
    (root / f"events-{seed}").write_bytes(pickle.dumps(events))
    counts.door_differs += differences(pickle.loads(told.read_bytes()), events)
    return events


def differences(door: list[Event], kernel: list[Event]) -> list[str]:
    """Where what the disk door recorded is not what the kernel saw, for the files that belong to the door."""
    compared = (WRITE, SIZE, CREATE, RENAME, UNLINK, SYNC, SYNC_DIRECTORY)
    mine: dict[str, list[tuple[Any, ...]]] = {}
    theirs: dict[str, list[tuple[Any, ...]]] = {}
    paths = {event.path for event in door if event.kind in (CREATE, WRITE)}
    for events, found in ((door, mine), (kernel, theirs)):
        for event in events:
            if event.kind in compared and event.path in paths:
                offset = 0 if event.kind in (SYNC, SYNC_DIRECTORY) else event.offset
                found.setdefault(event.path, []).append((event.kind, offset, event.data))
    wrong = []
    for path in sorted(paths):
        if mine.get(path) != theirs.get(path):
            pairs = zip(mine.get(path, []), theirs.get(path, []), strict=False)
            at = next((number for number, (one, other) in enumerate(pairs) if one != other), -1)
            wrong.append(
                f"{path}: {len(mine.get(path, []))} calls at the door, {len(theirs.get(path, []))} seen, at {at}"
            )
    return wrong


def run(states: int, wal_states: int, seed: int, steps: int, around: str = "") -> Counts:
    """Everything. `around`: of nodes only what is soon behind a call about files whose path begins so. BLOCKING."""
    counts = Counts(traced=available())
    root = Path(tempfile.mkdtemp(prefix="logyard-crash-", dir=place()))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        try:
            check_wal(pool, root, seed, wal_states, counts)
            if counts.traced:
                check_node(pool, root, seed, steps, states, counts, around)
        except BrokenProcessPool:
            counts.violations.append("a recovery killed its process")
    if not counts.violations:
        shutil.rmtree(root)
    return counts

"""Cycles: a node lives on the image, the power goes, the file system and the node recover, everything acknowledged is
there. And full images: the node refuses, survives, and has everything."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import trio

from tests.crash.trace import available
from tests.crash.verify import Expected, examine
from tests.crash.workload import Script

from .image import MAKE, Image, reason_against

IMAGE_BYTES = 192 << 20
FULL_BYTES = 24 << 20
STEPS = 100_000
LIFE_S = (0.1, 0.8)
STILL_S = 3.0
LIFE_S_MAX = 60


@dataclass
class Counts:
    """What was done and found. `not_run`: kinds that can't be tried here, and why."""

    cycles: int = 0
    acknowledged: int = 0
    lost: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)


def child(what: Callable[[], object]) -> int:
    """A process of its own for `what`: its id. It never returns here."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    _leave(what)


def _leave(what: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        what()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def live(path: Path, marks: Path, errors: Path, seed: int, greedy: bool) -> None:
    """In a child: use a node until something ends it; `greedy`: and free nothing."""
    log = os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 2)
    script = Script(path, seed, os.open(marks, os.O_CREAT | os.O_WRONLY | os.O_APPEND))
    script.greedy = greedy
    trio.run(script.life, STEPS)


def check(path: Path, want: Expected, report: Path, room: bool) -> None:
    """In a child: recover twice, and say what is wrong. `room`: there is some to append a record in between."""
    extra: dict[str, int] = {}
    wrong: list[str] = []
    for again in (not room, True):
        try:
            wrong += trio.run(examine, path, want, again, extra)
        except BaseException as error:
            inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            wrong.append(f"recovery {again + 1}: {type(inner).__name__}: {inner}")
            break
    report.write_text(json.dumps(wrong), "utf-8")


def told(marks: Path) -> tuple[Expected, int]:
    """What the node said before the cut; how many records it acknowledged."""
    want, count = Expected(), 0
    for line in marks.read_bytes().splitlines() if marks.exists() else ():
        want.take(line)
        count += b'"done": "append"' in line
    return want, count


class Cycle:
    """One life and one recovery, in a directory of its own on the image."""

    def __init__(self, image: Image, outside: Path, number: int, seed: int) -> None:
        self.image = image
        self.path = image.path / f"node-{number}"
        self.marks, self.report = outside / "marks", outside / "report"
        self.errors = outside / "errors"
        self.seed = seed
        self.number = number
        self.draw = random.Random(f"{seed} {number}")

    def fill(self, node: int) -> None:
        """Until nothing has been acknowledged for a while: then the image is full, and the node waits for room."""
        size, since = -1, time.monotonic()
        while time.monotonic() < since + STILL_S:
            threading.Event().wait(0.05)
            grown = self.marks.stat().st_size if self.marks.exists() else 0
            if grown != size:
                size, since = grown, time.monotonic()

    def run(self, counts: Counts, kind: str, cut: bool) -> None:
        """`cut`: end it by a power cut after a drawn time; otherwise let it fill the image."""
        for path in (self.marks, self.report):
            path.unlink(missing_ok=True)
        self.path.mkdir(mode=0o700)
        node = child(lambda: live(self.path, self.marks, self.errors, self.draw.randrange(1 << 30), not cut))
        if cut:
            # When the power goes is the test's to choose: nothing is waited for.
            threading.Event().wait(self.draw.uniform(*LIFE_S))
            self.image.cut()
            os.kill(node, signal.SIGKILL)
        if not cut:
            self.fill(node)
            os.kill(node, signal.SIGKILL)
        os.waitpid(node, 0)
        if not cut and (said := self.errors.read_text("utf-8", "replace")) and "NoSpace" not in said:
            counts.violations.append(f"{kind}: the node did not stay: {said[-500:]}")
        if cut:
            self.image.remount()
        want, acknowledged = told(self.marks)
        judge = child(lambda: check(self.path, want, self.report, cut))
        os.waitpid(judge, 0)
        wrong = json.loads(self.report.read_text("utf-8")) if self.report.exists() else ["the recovery's process died"]
        tally(counts, kind, acknowledged, wrong, f"cycle {self.number}, seed {self.seed}")


def failing_sync(path: Path, outside: Path, number: int, seed: int, counts: Counts) -> None:
    """A life in which the kernel answers a drawn fdatasync, and all after it, with EIO; then the recovery."""
    draw = random.Random(f"{seed} eio {number}")
    path.mkdir(mode=0o700)
    inject = f"inject=fdatasync:error=EIO:when={draw.randint(1, 80)}+"
    words = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync", "-e", inject, sys.executable, "-m"]
    life = [*words, "tests.crash.workload", str(path), str(draw.randrange(1 << 30)), "2000"]
    done = subprocess.run(life, capture_output=True, timeout=LIFE_S_MAX)
    want, acknowledged = told(Path(f"{path}.marks"))
    report = outside / f"eio-{number}"
    os.waitpid(child(lambda: check(path, want, report, True)), 0)
    wrong = json.loads(report.read_text("utf-8")) if report.exists() else ["the recovery's process died"]
    if not done.returncode:
        wrong.append("a node went on after failed syncs")
    tally(counts, "eio of a sync", acknowledged, wrong, f"cycle {number}, seed {seed}")
    shutil.rmtree(path)


def tally(counts: Counts, kind: str, acknowledged: int, wrong: list[str], which: str) -> None:
    """Count a cycle."""
    counts.cycles += 1
    counts.by_kind[kind] = counts.by_kind.get(kind, 0) + 1
    counts.acknowledged += acknowledged
    counts.lost += sum("was acknowledged" in what or what.endswith("is not there") for what in wrong)
    counts.violations += [f"{kind}, {which}: {what}" for what in wrong[:3]]


def run(cycles: int, seed: int) -> Counts:
    """`cycles` of each file system that is there, and a few full images. BLOCKING."""
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="logyard-powercut-") as name, tempfile.TemporaryDirectory() as outside:
        for kind in MAKE:
            if why := reason_against(kind):
                counts.not_run[kind] = why
                continue
            with Image(Path(name), kind, IMAGE_BYTES) as image:
                for number in range(cycles):
                    cycle = Cycle(image, Path(outside), number, seed)
                    cycle.run(counts, kind, cut=True)
                    shutil.rmtree(cycle.path)
            for number in range(max(1, cycles // 20)):
                with Image(Path(name), kind, FULL_BYTES) as image:
                    Cycle(image, Path(outside), number, seed).run(counts, f"{kind} full", cut=False)
        counts.not_run["eio of a block"] = "there is no FUSE library here to fail single blocks with"
        if available():
            for number in range(max(1, cycles // 10)):
                failing_sync(Path(name) / f"eio-{number}", Path(outside), number, seed, counts)
        else:
            counts.not_run["eio of a sync"] = "no strace that may trace"
    return counts


def row(counts: Counts) -> dict[str, Any]:
    """For people and machines."""
    return {
        "cycles": counts.cycles, "acknowledged": counts.acknowledged, "lost": counts.lost, "by_kind": counts.by_kind,
        "violations": counts.violations, "not_run": counts.not_run,
    }  # fmt: skip

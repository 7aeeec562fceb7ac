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
from pathlib import Path
from typing import Any

from tests.crash.trace import available

from . import blocks
from .failing import failing_blocks
from .image import MAKE, Image, reason_against
from .life import Counts, check, child, live, tally, told

IMAGE_BYTES = 192 << 20
FULL_BYTES = 24 << 20
LIFE_S = (0.1, 0.8)
STILL_S = 3.0
LIFE_S_MAX = 60


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
                    if image.size > FULL_BYTES:
                        image.shrink(FULL_BYTES)
                    Cycle(image, Path(outside), number, seed).run(counts, f"{kind} full", cut=False)
        if why := blocks.reason_against() or reason_against("ext4"):
            counts.not_run["eio of a block"] = why
        else:
            for number in range(max(1, cycles // 10)):
                failing_blocks(Path(name), Path(outside), number, seed, counts)
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

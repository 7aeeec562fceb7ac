"""Blocks of the disk that fail under a node's files: writes of its log, then reads of what it had stored.

A node whose log can't be written ends, and says so; one that can't read what it stored says that, or goes on without,
and serves nothing wrong. When the blocks are sound again everything acknowledged is there: no error was taken for an
end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .blocks import BadBlocks, extents
from .image import Image
from .life import Counts, check, child, live, tally, told

DISK_BYTES = 96 << 20
BLOCK = 4096
LIFE_S = (0.5, 1.5)
END_S = 60.0
ATTEMPTS = 5
SERVED = ("nobody appended", "is there twice")
"""What must not be said of a node even while it can't read some blocks."""


def failing_blocks(directory: Path, outside: Path, number: int, seed: int, counts: Counts) -> None:
    """One life and one recovery for each of write and read; another one where nothing met the blocks."""
    for kind in ("write", "read"):
        for attempt in range(ATTEMPTS):
            place = directory / f"blocks-{kind}-{number}-{attempt}"
            place.mkdir()
            with BadBlocks(place, DISK_BYTES) as disk, Image(place, "ext4", DISK_BYTES, disk.file) as image:
                one = Failing(kind, disk, image, outside, random.Random(f"{seed} {kind} {number} {attempt}"))
                if one.run(counts, number, seed):
                    break
        else:
            counts.violations.append(f"eio of a block, {kind}: cycle {number}, seed {seed} hit nothing")


class Failing:
    """One cycle."""

    def __init__(self, kind: str, disk: BadBlocks, image: Image, outside: Path, draw: random.Random) -> None:
        self.kind, self.disk, self.image, self.draw = kind, disk, image, draw
        self.path = image.path / "node"
        self.marks, self.report, self.errors = (outside / f"blocks-{name}" for name in ("marks", "report", "errors"))
        self.wrong: list[str] = []

    def files(self, *kinds: str) -> list[Path]:
        """The node's files of these kinds that have bytes."""
        found = []
        for path in sorted(self.path.rglob("*")):
            # The node lives, and its files come and go.
            with suppress(FileNotFoundError):
                if path.suffix in kinds and path.stat().st_size >= BLOCK and extents(path):
                    found.append(path)
        return found

    def run(self, counts: Counts, number: int, seed: int) -> bool:
        """A life, blocks that fail, and the recovery once they are sound. Whether anything met them."""
        for path in (self.marks, self.report):
            path.unlink(missing_ok=True)
        self.path.mkdir(mode=0o700)
        node = child(lambda: live(self.path, self.marks, self.errors, self.draw.randrange(1 << 30), False))
        # When the disk fails is the test's to choose: nothing is waited for.
        threading.Event().wait(self.draw.uniform(*LIFE_S))
        if self.kind == "write":
            ranges = []
            for path in self.files(".wal"):
                with suppress(FileNotFoundError):
                    ranges += extents(path)
            self.disk.order(write=ranges)
            self.ended(node)
        else:
            os.kill(node, signal.SIGKILL)
            os.waitpid(node, 0)
            self.unreadable()
        hits = self.disk.hits
        self.disk.order()
        self.image.remount()
        want, acknowledged = told(self.marks)
        self.examined(lambda: check(self.path, want, self.report, True))
        if hits or self.wrong:
            tally(counts, f"eio of a block, {self.kind}", acknowledged, self.wrong, f"cycle {number}, seed {seed}")
        return bool(hits or self.wrong)

    def ended(self, node: int) -> None:
        """The node must end by itself, with an error."""
        deadline = time.monotonic() + END_S
        while True:
            found, status = os.waitpid(node, os.WNOHANG)
            if found:
                break
            if time.monotonic() > deadline:
                os.kill(node, signal.SIGKILL)
                _, status = os.waitpid(node, 0)
                self.wrong.append("the node went on after failed writes")
                return
            threading.Event().wait(0.05)
        if not status:
            self.wrong.append("the node ended well after failed writes")

    def unreadable(self) -> None:
        """Some blocks of what it stored can't be read: a start must neither die of it nor serve anything else."""
        chosen = self.files(".wal", ".seg")
        ranges = []
        for path in self.draw.sample(chosen, min(3, len(chosen))):
            first, end = self.draw.choice(extents(path))
            at = first + self.draw.randrange((end - first) // BLOCK) * BLOCK
            ranges.append((at, at + BLOCK))
        self.image.unmount()
        self.disk.order(read=ranges)
        self.image.mount()
        want, _ = told(self.marks)
        # A failed block is met again and again; once is enough.
        self.examined(lambda: check(self.path, want, self.report, False), SERVED)
        self.report.unlink(missing_ok=True)

    def examined(self, what: Callable[[], object], only: tuple[str, ...] = ()) -> None:
        """A recovery in a process of its own; of what it says, `only` such complaints count."""
        _, status = os.waitpid(child(what), 0)
        said = json.loads(self.report.read_text("utf-8")) if self.report.exists() else []
        if status:
            self.wrong.append(f"the recovery's process ended with {status}")
        self.wrong += [one for one in said if not only or any(word in one for word in only)]

"""Crash states of the write-ahead log alone: recorded at the disk door, recovered by its replay, compared with a model.

What is recovered is the state after some whole batch: none less than was acknowledged before the cut, none more than
was begun.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from logyard.engine.disk.door import Disk
from logyard.engine.log.record import BLOCK, DATA_START
from logyard.engine.log.wal import WalConfig, WalItem
from tests.engine.log.model import Memory, command, open_wal, recover

from .events import MARK, Event
from .recorder import RecordingDisk
from .states import crash_states, materialise

CONFIG = WalConfig(file_bytes=DATA_START + 32 * BLOCK, batch_bytes=64 * 1024)
"""A batch takes all that is written at once: what is recovered is the state between two writes."""
UIDS = (7, 8, 9)
SIZES = (0, 60, 900, 5000)


class Story:
    """A log's life: the events, and the model's state after each batch."""

    def __init__(self, path: Path, seed: int, batches: int) -> None:
        self.draw = random.Random(f"{seed} wal")
        self.last = dict.fromkeys(UIDS, 0)
        self.terms = dict.fromkeys(UIDS, 1)
        path.mkdir()
        disk = RecordingDisk(str(path))
        wal, _, _ = open_wal(disk, str(path), CONFIG)
        model = Memory()
        self.states: list[dict[int, tuple[Any, ...]]] = [model.state()]
        self.since = len(disk.events)
        for number in range(1, batches + 1):
            items = [self.item(uid) for uid in self.draw.sample(UIDS, self.draw.randint(1, 3))]
            model.take(items)
            self.states.append(model.state())
            disk.mark(b"do %d" % number)
            wal.write(items)
            disk.mark(b"done %d" % number)
            if self.draw.random() < 0.15:
                wal.roll()
        wal.close()
        self.events: list[Event] = disk.events

    def item(self, uid: int) -> WalItem:
        """What one group gives to a batch."""
        truncate = 0
        if self.last[uid] > 1 and self.draw.random() < 0.2:
            truncate = self.draw.randint(1, self.last[uid])
            self.last[uid] = truncate - 1
            self.terms[uid] += 1
        first = self.last[uid] + 1
        self.last[uid] += self.draw.randint(1, 3)
        term = self.terms[uid]
        entries = [
            command(
                uid, index, term, [self.draw.randbytes(self.draw.choice(SIZES))] if self.draw.random() < 0.7 else ()
            )
            for index in range(first, self.last[uid] + 1)
        ]
        return WalItem(uid, entries, (term, 1, first - 1), truncate=truncate)

    def bounds(self, number: int) -> tuple[int, int]:
        """(batches acknowledged, batches begun) when `number` events had been asked for."""
        done = begun = 0
        for event in self.events[:number]:
            if event.kind == MARK:
                word, batch = event.data.split()
                done, begun = (int(batch), begun) if word == b"done" else (done, int(batch))
        return done, begun

    def cases(self, seed: int, variants: int) -> Iterator[tuple[dict[str, bytes | None], int, int]]:
        """Crash states with the batches acknowledged and begun."""
        for number, state in crash_states(self.events, seed, variants, self.since):
            yield state, *self.bounds(number)

    def judge(self, state: dict[str, bytes | None], done: int, begun: int, root: Path) -> str:
        """What is wrong with the recovery of a state, also when it is done again after a new batch."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        materialise(state, root)
        memory, result = recover(Disk(), str(root))
        if result.damage:
            return f"damage after a mere crash: {result.damage[0]}"
        found = memory.state()
        if found not in self.states[done : begun + 1]:
            where = self.states.index(found) if found in self.states else None
            return f"recovered the state after batch {where}, {done} were acknowledged and {begun} begun"
        wal, memory, _ = open_wal(Disk(), str(root), CONFIG)
        after = [WalItem(100, [command(100, 1)])]
        wal.write(after)
        wal.close()
        memory.take(after)
        again, result = recover(Disk(), str(root))
        if again.state() != memory.state() or result.damage:
            return "a batch after the recovery is not there, or something else changed"
        return ""

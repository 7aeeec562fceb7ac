"""What the payload tests share: a disk door, entries made of seeds, and rows that read them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from logyard.engine.disk.door import Disk
from logyard.payloads.layout import Buffer, SourceRow, SourceUnit
from logyard.payloads.store import PayloadStore, StoreConfig
from logyard.payloads.writing import GenerationConfig

MIB = 1 << 20
SMALL = GenerationConfig(map_bytes=8 * MIB, transaction_bytes=1 * MIB)


class Door(Disk):
    """The disk door; it counts, so that a forgotten directory sync is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []

    def spend(self) -> bool:
        return False

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(fd)
        os.close(fd)
        self.synced.append(path)


class Crash(Exception):
    """The process dies here."""


def crash_after(left: int) -> Callable[[str, int], None]:
    """Make the callback of a job whose process dies at the step after so many."""
    count = [left]

    def step(name: str, size: int) -> None:
        if not count[0]:
            raise Crash(name)
        count[0] -= 1

    return step


@dataclass
class Made:
    """One entry: metadata, and its units as (bytes, small)."""

    uid: int
    index: int
    term: int
    data: bytes
    units: list[tuple[bytes, bool]]

    @property
    def payload(self) -> bytes:
        return b"".join(body for body, _ in self.units)

    def row(self, live: set[int] | None = None, read: Callable[[int, int], Buffer] | None = None) -> SourceRow:
        payload = self.payload
        units = [
            SourceUnit(number, len(body), small, number + 7, xxhash.xxh3_128_digest(body, number + 7))
            for number, (body, small) in enumerate(self.units)
        ]
        return SourceRow(
            self.uid, self.index, self.term, self.data, units, live, read or (lambda at, size: payload[at : at + size])
        )


def made(uid: int, index: int, sizes: Sequence[int], term: int = 3) -> Made:
    """An entry with a unit of each size; those below a page are packs."""
    rng = random.Random(f"{uid}/{index}/{term}")
    units = [(rng.randbytes(size), size < 4096) for size in sizes]
    return Made(uid, index, term, rng.randbytes(40 + index % 50), units)


class Source:
    """Entries of several groups, as a migration reads them."""

    def __init__(self, entries: Sequence[Made]) -> None:
        self.entries = {(entry.uid, entry.index): entry for entry in entries}
        self.live: dict[tuple[int, int], set[int]] = {}
        self.reads = 0

    def ranges(self) -> list[tuple[int, int, int]]:
        found: dict[int, list[int]] = {}
        for uid, index in sorted(self.entries):
            found.setdefault(uid, []).append(index)
        return [(uid, indexes[0], indexes[-1]) for uid, indexes in found.items()]

    def read(self, uid: int, first: int, last: int) -> Iterator[SourceRow]:
        for index in range(first, last + 1):
            entry = self.entries.get((uid, index))
            if entry is not None:
                self.reads += 1
                yield entry.row(self.live.get((uid, index)))


def check_all(store: PayloadStore, source: Source) -> None:
    """Everything the source says lives is in the store, byte for byte."""
    for (uid, index), entry in source.entries.items():
        live = source.live.get((uid, index))
        for number, (body, _) in enumerate(entry.units):
            if live is None or number in live:
                assert store.read_unit(uid, index, number) == body
        if live is None or live:
            stored = store.lookup(uid, index)
            assert (stored.data, stored.term) == (entry.data, entry.term)


def check_counters(store: PayloadStore) -> None:
    """Counters equal what a full scan of the rows finds."""
    counted = store.recount()
    told = {info.id: info for info in store.generations()}
    assert counted.keys() == told.keys()
    for number, counts in counted.items():
        assert (counts.total, counts.live) == (told[number].total, told[number].live), number
        assert told[number].dead == counts.total - counts.live
        assert store.measure(number).damage == []


def open_store(path: Path, door: Door | None = None, **changes: Any) -> PayloadStore:
    """A store with small maps."""
    config = StoreConfig(generation_bytes=8 * MIB, transaction_bytes=1 * MIB, drop_current_bytes=1)._replace(**changes)
    store = PayloadStore(path, config, door or Door())
    store.open()
    return store

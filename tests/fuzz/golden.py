"""The golden files, spoilt: every bit flipped, every truncation. Each is detected or changes nothing; nothing crashes,
and nothing but what was written is ever served."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgpack

from logyard.engine.disk.door import Disk
from logyard.engine.entry import unit_hash, units_of
from logyard.engine.log.ring import RingReader
from logyard.engine.log.segment import SegmentReader
from logyard.engine.log.wal_files import wal_name
from logyard.engine.snapshot.format import decode
from logyard.protocol.errors import LogyardError, PayloadError
from tests.engine.log.model import Memory, recover
from tests.formats.regenerate import MAIL, ORDERS, RING, ROWS, SEGMENT, WAL, entries, ring_entries

Spoil = tuple[str, int]
"""("bit", which) or ("cut", length)."""
Judge = Callable[[bytes, bool], str]
"""Of a spoilt file, and whether it is cut: what is wrong with what became of it; "same" where nothing changed."""


def spoils(size: int, bits: Iterable[int], cuts: Iterable[int]) -> Iterator[Spoil]:
    """What to try on a file of `size` bytes."""
    yield from (("bit", bit) for bit in bits if bit < 8 * size)
    yield from (("cut", length) for length in cuts if length < size)


def spoilt(data: bytes, how: Spoil) -> bytes:
    """The file after it."""
    kind, at = how
    if kind == "cut":
        return data[:at]
    found = bytearray(data)
    found[at // 8] ^= 1 << at % 8
    return bytes(found)


def known() -> dict[tuple[int, int], tuple[int, bytes, int]]:
    """What the WAL and the segment hold: (term, data, tombstone) by group and index."""
    made = entries()
    rows = [(ORDERS, made["configuration"]), (ORDERS, made["commands"]), (MAIL, made["dead"])]
    return {(uid, entry.index): (entry.term, entry.data, entry.tombstone) for uid, entry in rows}


class WalJudge:
    """Replays a spoilt WAL file, written over the last one in place."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / wal_name(1)
        self.path.write_bytes(WAL.read_bytes())
        self.known = known()
        memory, self.whole = recover(Disk(), str(directory))
        self.state = memory.state()

    def __call__(self, data: bytes, cut: bool) -> str:
        """See `Judge`."""
        self.path.write_bytes(data)
        try:
            memory, result = recover(Disk(), str(self.directory))
        except LogyardError:
            return ""
        for uid, entry in memory.found:
            if self.known.get((uid, entry.index)) != (entry.term, entry.data, entry.tombstone):
                return f"entry {entry.index} of {uid:x} is not what was written"
        if result.damage or result.healed or memory.state() != self.state:
            return "" if cut or result.damage or result.healed else self.torn(memory)
        return "same" if self.payloads(memory, data) else ""

    def torn(self, memory: Memory) -> str:
        """A flipped bit that took records away without a word: only the last batch may go, as a torn tail would."""
        return "" if not memory.found else "records are gone, and nobody says so"

    def payloads(self, memory: Memory, data: bytes) -> bool:
        """Whether every payload is whole: replay does not read them, their readers check each unit."""
        for uid, entry in memory.found:
            if entry.tombstone or not entry.body_bytes:
                continue
            for unit in units_of(entry.data):
                at = entry.offset + unit.offset
                if unit_hash(uid, entry.index, entry.term, unit.number, data[at : at + unit.length]) != unit.hash:
                    return False
        return True


class SegmentJudge:
    """Reads a spoilt segment."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "segment"
        self.known = known()

    def __call__(self, data: bytes, cut: bool) -> str:
        """See `Judge`."""
        self.path.write_bytes(data)
        try:
            reader = SegmentReader(Disk(), str(self.path))
        except LogyardError:
            return ""
        try:
            said = bool(reader.verify())
            for uid, (first, last) in reader.runs.items():
                try:
                    found = reader.entries(uid, first, last)
                except LogyardError:
                    said = True
                    continue
                for entry in found:
                    if self.known.get((uid, entry.index)) != (entry.term, entry.data, entry.tombstone):
                        return f"entry {entry.index} of {uid:x} is not what was written"
            return "" if said else "same"
        finally:
            reader.close()


class RingJudge:
    """Reads a spoilt ring, of which a row names both entries."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "ring"
        self.known = {entry.index: (entry.term, entry.data, entry.tombstone) for entry in ring_entries()}

    def __call__(self, data: bytes, cut: bool) -> str:
        """See `Judge`."""
        self.path.write_bytes(data)
        try:
            reader = RingReader(Disk(), str(self.path), MAIL)
        except LogyardError:
            return ""
        try:
            seen = reader.verify(8, 9, 3)
            for index in {8, 9} - seen.bad.keys():
                entry = reader.find(index, 3).entry
                if (entry.term, entry.data, entry.tombstone) != self.known[index]:
                    return f"entry {index} is not what was written"
            return "" if seen.bad or seen.torn or reader.heads < 2 else "same"
        finally:
            reader.close()


def judge_manifest(data: bytes, cut: bool) -> str:
    """See `Judge`."""
    want = decode(msgpack.unpackb(ROWS.read_bytes())[0], ORDERS)
    try:
        found = decode(data, ORDERS)
    except (LogyardError, PayloadError):
        return ""
    return "same" if found == want else "another snapshot"


def sweep(name: str, data: bytes, judge: Judge, bits: Iterable[int], cuts: Iterable[int]) -> tuple[int, int, list[str]]:
    """(tried, of which harmless, what is wrong). Harmless: bytes that mean nothing."""
    tried = same = 0
    wrong: list[str] = []
    for how in spoils(len(data), bits, cuts):
        tried += 1
        try:
            said = judge(spoilt(data, how), how[0] == "cut")
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        if said == "same":
            same += 1
        elif said:
            wrong.append(f"{name}, {how[0]} {how[1]}: {said}")
    return tried, same, wrong


def targets(directory: Path) -> dict[str, tuple[bytes, Judge]]:
    """Every golden file with its judge."""
    os.makedirs(directory, exist_ok=True)
    wal = directory / "wal"
    wal.mkdir()
    return {
        "wal": (WAL.read_bytes(), WalJudge(wal)),
        "segment": (SEGMENT.read_bytes(), SegmentJudge(directory)),
        "ring": (RING.read_bytes(), RingJudge(directory)),
        "manifest": (msgpack.unpackb(ROWS.read_bytes())[0], judge_manifest),
    }

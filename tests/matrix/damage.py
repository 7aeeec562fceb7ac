"""What is done to bytes of files, and where the bytes of each kind lie on a node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from logyard.engine.disk.door import Disk
from logyard.engine.log.record import ENTRY_RECORD, RECORD
from logyard.engine.log.ring import FOLDER, RingReader, ring_name
from logyard.engine.log.segment import HEAD, HEAD_BYTES, ROW, ROW_BYTES
from logyard.engine.log.wal_files import wal_epochs, wal_name

PAGE = 4096


class Place(NamedTuple):
    """An offset of a file that carries what is to be damaged."""

    path: Path
    offset: int


def find(paths: list[Path], token: bytes) -> list[Place]:
    """Where a token lies; all of its places."""
    found = []
    for path in paths:
        image = path.read_bytes() if path.exists() else b""
        at = image.find(token)
        while at >= 0:
            found.append(Place(path, at))
            at = image.find(token, at + 1)
    return found


def wal_files(data: Path) -> list[Path]:
    """Of a node, oldest first."""
    return [data / "wal" / wal_name(epoch) for epoch in wal_epochs(os.listdir(data / "wal"))]


def segments(data: Path) -> list[Path]:
    """Of a node, oldest first."""
    return sorted((data / "segments").glob("*.seg"))


def ring(data: Path, uid: int) -> Path:
    """A system group's."""
    return data / FOLDER / ring_name(uid)


STORED = {"generation": "data.mdb", "bodies": "bodies"}
"""The files of a generation, by kind."""


def generations(data: Path, kind: str = "generation") -> list[Path]:
    """Of a node, oldest first."""
    return sorted((data / "payloads").glob(f"gen-*[0-9]/{STORED[kind]}"))


def next_generations(data: Path, kind: str = "generation") -> list[Path]:
    """Those that jobs will write to."""
    newest = int(generations(data)[-1].parent.name.removeprefix("gen-"))
    return [data / "payloads" / f"gen-{number:010d}" / STORED[kind] for number in range(newest, newest + 8)]


def environments(data: Path) -> list[Path]:
    """The two copies of a node's meta store."""
    return [data / "meta" / name / "data.mdb" for name in ("a", "b")]


def index_of(path: Path) -> int:
    """Where a segment's index begins."""
    fields = HEAD.unpack(path.read_bytes()[: HEAD_BYTES - 8])
    return int(fields[6])


def segment_entries(paths: list[Path], uid: int) -> list[Place]:
    """The middles of a group's entries in segments."""
    found = []
    for path in paths:
        image, start = path.read_bytes(), index_of(path)
        if image[-HEAD_BYTES:] != image[:HEAD_BYTES]:
            # Hit before: what stands there is no index.
            continue
        rows = int(HEAD.unpack(image[: HEAD_BYTES - 8])[4])
        for at in range(start, start + rows * ROW_BYTES, ROW_BYTES):
            owner, _, _, offset, *_, length, _, _, _ = ROW.unpack_from(image, at)
            if owner == uid:
                found.append(Place(path, offset + length // 2))
    return found


def wal_records(path: Path, uid: int) -> list[Place]:
    """The middles of a group's entries, without their payloads, in a WAL file."""
    image, owner = path.read_bytes(), uid.to_bytes(8, "little")
    found, at = [], image.find(owner)
    while at >= 0:
        start = at - 8
        if start >= 0 and len(image) >= start + RECORD.size:
            kind, _, _, length, _, value, payload, _ = RECORD.unpack_from(image, start)
            if kind == ENTRY_RECORD and not value and 0 < length < PAGE and payload:
                found.append(Place(path, start + RECORD.size + length // 2))
        at = image.find(owner, at + 1)
    return found


def ring_slots(path: Path, uid: int, runs: list[dict[str, int]]) -> list[Place]:
    """The middles of the metadata of entries that a ring has, by what its node says of it."""
    reader = RingReader(Disk(), str(path), uid)
    try:
        found = [
            (reader.geometry.slot_at(index), reader.find(index, run["term"]).entry)
            for run in runs
            for index in range(run["first"], run["last"] + 1)
        ]
        return [Place(path, at + len(entry.data) // 2) for at, entry in found]
    finally:
        reader.close()


def spoil(place: Place, fault: str) -> None:
    """A bit, a block, or all from there on."""
    path, offset = place
    if fault == "truncation":
        os.truncate(path, offset)
        return
    with path.open("r+b") as file:
        if fault == "bit flip":
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 4]))
        else:
            assert fault == "zeroed block", fault
            start = offset // PAGE * PAGE
            file.seek(start)
            file.write(bytes(min(PAGE, path.stat().st_size - start)))

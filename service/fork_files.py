"""Files of forks (`engine.host.forks`): what a replica had that its group's lineage has not, for the operator.

Invariant: nothing of a file is believed before all of it matched its digest. Used by `cli.forks` and `check`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import xxhash

from logyard.engine.entry import COMMANDS, frames_of, units_of
from logyard.engine.host.forks import DIRECTORY, MAGIC, SUFFIX
from logyard.protocol.errors import Corrupt, LogyardError
from logyard.protocol.frame import ABSENT, BINDS, LARGE, MARK, PIECE, table_of


class ForkRecord(NamedTuple):
    """One record of an entry. `parts`: its payload's bytes, one after the other; none where it has no payload, or that
    was released. `missing`: bytes of one that came in pieces which are not there. `encoded`: its client compressed it,
    and its head begins with the envelope."""

    index: int  # type: ignore[assignment]  # tuple.index is not missed
    ordinal: int
    command: bytes
    head: bytes
    parts: tuple[bytes, ...] | None
    missing: int
    encoded: bool

    @property
    def body(self) -> bytes | None:
        """The payload as a whole."""
        return None if self.parts is None else b"".join(self.parts)


def fork_files(data: Path) -> list[Path]:
    """Return the files of a data directory, by name. Raises `LogyardError` where there is none, OSError where one may
    not be read: who is told that nothing is kept drops the directory."""
    if not any((data / name).exists() for name in ("meta", "wal", DIRECTORY)):
        raise LogyardError(f"{data} is no data directory: it has neither meta nor wal")
    try:
        return sorted(data / DIRECTORY / name for name in os.listdir(data / DIRECTORY) if name.endswith(SUFFIX))
    except FileNotFoundError:
        return []


def is_fork_name(path: Path) -> bool:
    """Return whether a file lies and is called as a fork's does, whatever is in it."""
    return path.suffix == SUFFIX and path.absolute().parent.name == DIRECTORY


def read_fork(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the head and the entries of a file, all of it verified. Raises `Corrupt`."""
    raw = path.read_bytes()
    if not raw.startswith(MAGIC):
        raise Corrupt(str(path), 0, MAGIC.hex(), raw[: len(MAGIC)].hex())
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(raw)))
    unpacker.feed(memoryview(raw)[len(MAGIC) :])
    values: list[dict[str, Any]] = []
    at = ended = 0
    try:
        for value in unpacker:
            ended, at = at, unpacker.tell()
            values.append(value)
    except (ValueError, msgpack.UnpackException) as error:
        raise Corrupt(str(path), len(MAGIC) + at, "a fork's file", str(error)) from error
    end = values[-1] if len(values) > 1 and isinstance(values[-1], dict) else {}
    digest = xxhash.xxh3_128_digest(memoryview(raw)[: len(MAGIC) + ended])
    if end.get("digest") != digest or end.get("entries") != len(values) - 2:
        raise Corrupt(str(path), len(MAGIC) + ended, digest.hex(), repr(end))
    return values[0], values[1:-1]


Pieces = dict[tuple[int, int], dict[int, bytes]]
"""By session and upload, by byte offset: pieces of payloads that no record has bound yet."""


def records_in(entries: Iterable[dict[str, Any]]) -> Iterator[ForkRecord]:
    """Yield the records of a file's entries, in order. Pieces of a payload are no records of their own: they are the
    payload of the one that binds them, and nobody's where none does."""
    pieces: Pieces = {}
    for entry in entries:
        yield from _records_of(entry, pieces)


def _records_of(entry: dict[str, Any], pieces: Pieces) -> Iterator[ForkRecord]:
    if entry["kind"] != COMMANDS:
        return
    units, bodies = units_of(entry["data"]), entry["units"]
    packs = {unit.first_ordinal: bodies[unit.number] for unit in units if unit.records}
    large = {unit.first_ordinal: bodies[unit.number] for unit in units if not unit.records}
    for frame in frames_of(entry["data"]):
        pack = packs.get(frame.first)
        if pack is None:
            continue
        table = table_of(pack, frame.records)
        at = 8 * frame.records
        small = at + sum(length & ~MARK for length in table[::2])
        commands = frame.split_commands()
        upload = (frame.session, frame.upload)
        for number in range(frame.records):
            head_bytes, body_bytes = table[2 * number] & ~MARK, table[2 * number + 1]
            ordinal = frame.first + number
            body: bytes | None = None
            if body_bytes != ABSENT and body_bytes >= LARGE:
                body = large.get(ordinal)
            elif body_bytes != ABSENT:
                body = pack[small : small + body_bytes]
                small += body_bytes
            if frame.flags & PIECE:
                # One without bytes gives the upload up.
                if body_bytes == ABSENT:
                    pieces.pop(upload, None)
                elif body is not None:
                    pieces.setdefault(upload, {})[frame.extent] = body
                continue
            parts: tuple[bytes, ...] | None = None if body is None else (body,)
            missing = 0
            if frame.flags & BINDS:
                found = pieces.pop(upload, {})
                parts = tuple(found[offset] for offset in sorted(found)) or None
                missing = frame.extent - sum(map(len, parts or ()))
            head, encoded = pack[at : at + head_bytes], bool(table[2 * number] & MARK)
            yield ForkRecord(entry["index"], ordinal, commands[number], head, parts, missing, encoded)
            at += head_bytes

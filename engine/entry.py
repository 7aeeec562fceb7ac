"""The encoded entry: the one form in which a command batch lives, on the wire, in the WAL, in segments and in memory.

An entry has two parts. `data` (header, unit directory, frame heads) is the *metadata*: what is replayed and applied.
`bodies` are the payload bytes, gathered from the client's frames and never joined. The proposer of the leader
encodes an entry once; those bytes go unchanged everywhere (law 6). See docs/internals/files-on-disk.md for the layout.

It holds frames as clients made them (`protocol.frame`).

A *unit* is what has a hash of its own: the pack of a frame, or one large body. Units are numbered within the entry.
A record's *ordinal* is its number within the entry.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack
import xxhash

from logyard.payloads.reference import PayloadRef
from logyard.protocol.errors import Corrupt
from logyard.protocol.frame import (
    ABSENT,
    BINDS,
    FRAME,
    FRAME_BYTES,
    FRAME_VERSION,
    LARGE,
    PIECE,
    PIECED,
    SYSTEM,
    UNIFORM,
    table_of,
)

from .types import Bodies, Buffer

COMMANDS = 1
NOOP = 2
CONFIGURATION = 3

ENTRY = struct.Struct("<BBHIIIQQqQ")
"""kind, flags, frames, units, records, timestamp rest (0), index, term, timestamp (ms), body bytes."""
ENTRY_BYTES = ENTRY.size
FRAMES_MAX = 0xFFFF
"""Frames in one entry: what their count has room for."""
UNIT = struct.Struct("<16sQII")
"""hash (xxh3-128), length, first ordinal, records (0: a large body)."""
UNIT_BYTES = UNIT.size
GUARDED = 1
"""An entry's flag: a frame of it belongs to a session or is the engine's own: the engine looks at it first."""
MASK64 = (1 << 64) - 1
_new: Callable[[type[Frame], tuple[Any, ...]], Frame] = tuple.__new__
"""Makes a `Frame` of all its fields. Its class is a Python call more, of which there is one an entry and member."""


class Entry:
    """One log entry. `bodies` is None once the payload bytes left memory; `file`/`offset` say where the WAL holds them.

    `tombstone` is the release index d of law 4 when the payload bytes are known to be dead and were not sent; 0
    otherwise.
    """

    __slots__ = ("index", "term", "kind", "data", "bodies", "body_bytes", "file", "offset", "tombstone")

    def __init__(
        self, index: int, term: int, kind: int, data: bytes, bodies: Bodies | None = (), body_bytes: int = 0
    ) -> None:
        self.index = index
        self.term = term
        self.kind = kind
        self.data = data
        self.bodies = bodies
        self.body_bytes = body_bytes
        self.file = 0
        self.offset = 0
        self.tombstone = 0

    @property
    def size(self) -> int:
        """Bytes of metadata and payload together: what windows and budgets count."""
        return len(self.data) + self.body_bytes

    def place(self, file: int, offset: int) -> None:
        """Note where the WAL holds the payload bytes."""
        self.file = file
        self.offset = offset

    def let_go(self) -> None:
        """Let the payload bytes leave memory: who needs them reads them."""
        self.bodies = None

    def __repr__(self) -> str:
        return f"Entry({self.index}@{self.term} kind={self.kind} data={len(self.data)} body={self.body_bytes})"


class Frame(NamedTuple):
    """A client frame's head, as the machine sees it. Shapes: `records` commands; sizes in bytes."""

    flags: int
    large: int
    records: int
    command_bytes: int
    pack_bytes: int
    large_bytes: int
    session: int
    sequence: int
    commands: bytes
    first: int = 0
    """The ordinal of its first record. A machine is not shown frames that the engine answers itself (duplicates, its
    own commands): their ordinals are gaps."""
    upload: int = 0
    extent: int = 0
    """Of a piece: its upload and byte offset. Of a frame that binds: its upload and the payload's size."""
    pieces: tuple[PayloadRef, ...] = ()
    """The payload of a frame that binds, in the order of its bytes: what the machine keeps or releases with its
    record. They lie before this entry, so a release of all that does must leave out those it still needs."""

    @property
    def uniform(self) -> bool:
        """One command stands for all records."""
        return bool(self.flags & UNIFORM)

    def split_commands(self) -> Sequence[bytes]:
        """Return the command of each record."""
        if self.flags & UNIFORM:
            return [self.commands] * self.records
        lengths = struct.unpack_from(f"<{self.records}I", self.commands)
        found, at = [], 4 * self.records
        for length in lengths:
            found.append(self.commands[at : at + length])
            at += length
        return found


class Unit(NamedTuple):
    """One hashed piece of an entry's payload: `offset` counts from the start of the entry's payload bytes."""

    number: int
    hash: bytes
    length: int
    first_ordinal: int
    records: int
    offset: int


def encode_system(name: str, *arguments: object) -> memoryview:
    """Return a frame of the engine's own: one command, msgpack ``[name, ...arguments]``, and nothing else."""
    command = msgpack.packb([name, *arguments])
    return memoryview(FRAME.pack(FRAME_VERSION, UNIFORM | SYSTEM, 0, 1, len(command), 0, 0, 0, 0) + command)


def system_command(frame: Frame) -> list[Any]:
    """Return what `encode_system` was given."""
    found: list[Any] = msgpack.unpackb(frame.commands)
    return found


def unit_seed(uid: int, index: int, term: int, unit: int) -> int:
    """Return the seed that binds a unit's hash to its place: bytes moved to another entry never verify."""
    return (uid ^ (index * 0x9E3779B97F4A7C15) ^ (term * 0xC2B2AE3D27D4EB4F) ^ (unit * 0x165667B19E3779F9)) & MASK64


def unit_hash(uid: int, index: int, term: int, unit: int, data: Buffer) -> bytes:
    """Return the xxh3-128 of one unit's bytes, seeded with its place."""
    return xxhash.xxh3_128_digest(data, unit_seed(uid, index, term, unit))


def build_commands(uid: int, index: int, term: int, timestamp: int, frames: Sequence[memoryview]) -> Entry:
    """Encode checked client frames as one entry. Payload bytes are sliced, never copied."""
    units: list[bytes] = []
    heads: list[Buffer] = []
    bodies: list[Buffer] = []
    ordinal = body_bytes = guarded = 0
    for frame in frames:
        _, _, large, records, command_bytes, pack_bytes, large_bytes, session, _ = FRAME.unpack_from(frame)
        if session:
            guarded = GUARDED
        pack_at = FRAME_BYTES + command_bytes
        pack_end = pack_at + pack_bytes
        heads.append(frame[:pack_at])
        pack = frame[pack_at:pack_end]
        units.append(UNIT.pack(unit_hash(uid, index, term, len(units), pack), pack_bytes, ordinal, records))
        bodies.append(pack)
        if large:
            at = pack_end
            for number, length in enumerate(table_of(pack, records)[1::2]):
                if LARGE <= length != ABSENT:
                    body = frame[at : at + length]
                    at += length
                    digest = unit_hash(uid, index, term, len(units), body)
                    units.append(UNIT.pack(digest, length, ordinal + number, 0))
                    bodies.append(body)
        ordinal += records
        body_bytes += pack_bytes + large_bytes
    head = ENTRY.pack(COMMANDS, guarded, len(frames), len(units), ordinal, 0, index, term, timestamp, body_bytes)
    return Entry(index, term, COMMANDS, b"".join((head, *units, *heads)), tuple(bodies), body_bytes)


def build_system(index: int, term: int, timestamp: int, frames: Sequence[memoryview]) -> Entry:
    """Encode frames of the engine's own as one entry. It has no payload at all, so nothing of it is ever stored apart
    or released."""
    heads = []
    for frame in frames:
        command_bytes = FRAME.unpack_from(frame)[4]
        heads.append(frame[: FRAME_BYTES + command_bytes])
    count = len(frames)
    head = ENTRY.pack(COMMANDS, GUARDED, count, 0, count, 0, index, term, timestamp, 0)
    return Entry(index, term, COMMANDS, b"".join((head, *heads)))


def build_plain(index: int, term: int, kind: int, timestamp: int, content: bytes = b"") -> Entry:
    """Return a no-op or a configuration entry: it stands alone and has no payload."""
    return Entry(index, term, kind, ENTRY.pack(kind, 0, 0, 0, 0, 0, index, term, timestamp, 0) + content, (), 0)


def plain_content(entry: Entry) -> bytes:
    """Return what `build_plain` was given."""
    return entry.data[ENTRY_BYTES:]


def parse_entry(data: bytes, where: str = "entry") -> Entry:
    """Return an `Entry` without bodies from its metadata; raise `Corrupt` when it is too short to be one."""
    if len(data) < ENTRY_BYTES:
        raise Corrupt(where, 0, f"{ENTRY_BYTES} bytes", len(data))
    kind, _, _, units, _, _, index, term, _, body_bytes = ENTRY.unpack_from(data)
    if kind not in (COMMANDS, NOOP, CONFIGURATION) or len(data) < ENTRY_BYTES + units * UNIT_BYTES:
        raise Corrupt(where, 0, "an entry", f"kind {kind}, {units} units in {len(data)} bytes")
    return Entry(index, term, kind, data, None if body_bytes else (), body_bytes)


def timestamp_of(data: bytes) -> int:
    """Return the leader's log time, in milliseconds since 1970."""
    stamp: int = ENTRY.unpack_from(data)[8]
    return stamp


def units_of(data: bytes) -> list[Unit]:
    """Return the unit directory of an entry's metadata, in the order of the payload bytes."""
    count = ENTRY.unpack_from(data)[3]
    found: list[Unit] = []
    offset = 0
    end = ENTRY_BYTES + count * UNIT_BYTES
    for number, (digest, length, first, records) in enumerate(UNIT.iter_unpack(data[ENTRY_BYTES:end])):
        found.append(Unit(number, digest, length, first, records, offset))
        offset += length
    return found


def is_guarded(data: bytes) -> bool:
    """Return whether the engine has to look at an entry's frames before a machine does."""
    return bool(data[1] & GUARDED)


def frames_of(data: bytes) -> list[Frame]:
    """Return the frame heads of an entry, with the commands to apply."""
    _, _, frames, units, _, _, _, _, _, _ = ENTRY.unpack_from(data)
    found: list[Frame] = []
    at = ENTRY_BYTES + units * UNIT_BYTES
    first = 0
    for _ in range(frames):
        _, flags, large, records, command_bytes, pack_bytes, large_bytes, session, sequence = FRAME.unpack_from(
            data, at
        )
        at += FRAME_BYTES
        end = at + command_bytes
        upload = extent = 0
        if flags & (PIECE | BINDS):
            upload, extent = PIECED.unpack_from(data, at)
            at += PIECED.size
        found.append(
            _new(
                Frame,
                (
                    flags, large, records, command_bytes, pack_bytes, large_bytes, session, sequence, data[at:end],
                    first, upload, extent, (),
                ),
            )
        )  # fmt: skip
        at = end
        first += records
    return found


def verify_bodies(uid: int, entry: Entry) -> None:
    """Check every unit's hash against the bodies in memory (one buffer a unit); raise `Corrupt`."""
    bodies = entry.bodies
    if not entry.body_bytes:
        return
    data = entry.data
    count = ENTRY.unpack_from(data)[3]
    if bodies is None or len(bodies) != count:
        raise Corrupt(f"group {uid:016x} entry {entry.index}", 0, f"{count} units", bodies and len(bodies))
    index, term = entry.index, entry.term
    for number, body in enumerate(bodies):
        digest, length, _, _ = UNIT.unpack_from(data, ENTRY_BYTES + number * UNIT_BYTES)
        got = unit_hash(uid, index, term, number, body)
        if len(body) != length or got != digest:
            raise Corrupt(
                f"group {uid:016x} entry {index} unit {number}", units_of(data)[number].offset, digest.hex(), got.hex()
            )


def split_bodies(data: bytes, payload: memoryview) -> tuple[memoryview, ...]:
    """Slice an entry's contiguous payload bytes into its units."""
    return tuple(payload[unit.offset : unit.offset + unit.length] for unit in units_of(data))


def records_in(data: bytes) -> int:
    """Return how many records (and so ordinals) an entry carries."""
    count: int = ENTRY.unpack_from(data)[4]
    return count

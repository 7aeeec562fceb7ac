"""A snapshot's bytes: a checksummed manifest with named sections, each with version and hash of its own, and the exact
live set.

The live set is inside the checksum: a snapshot without one does not parse, and is never taken for one with nothing
live (law 4). A large section is not in the manifest but beside it, in chunks that are named by their hash: what did
not change since the last snapshot has the same name, and is neither stored nor sent again.
Layout: docs/internals/files-on-disk.md. Used by `engine.transfer`, `engine.recovery` and `logyard check`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgpack
import xxhash

from logyard.protocol.errors import Corrupt, WrongIdentity

from ..machine import Sections

MAGIC = b"LYSN"
FORMAT = 2
"""1 where every section is inline, so that such snapshots are what they always were; 2 with chunks."""
HEAD = struct.Struct("<4sHHQQ")
"""magic, format, 0, length of the manifest in bytes, xxh3-64 of the manifest seeded with the group's uid."""
INLINE_BYTES = 64 << 10
"""Sections up to this size stay in the manifest, unless they are many: one row more would cost more than writing them
again."""
MANIFEST_BYTES = 8 << 20
"""Of sections in a manifest, which goes to another node as one frame: where there are more, only `TINY_BYTES` are."""
TINY_BYTES = 1 << 10
CHUNK_BYTES = 1 << 20
HASH_BYTES = 16


class Snapshot(NamedTuple):
    """State of group `uid` at `index`; `live` is the encoded live set at or below it, `release` the last release
    applied. `versions`: of the sections whose version is not the machine's."""

    uid: int
    index: int  # type: ignore[assignment]  # tuple.index is not missed
    term: int
    configuration: bytes
    version: int
    release: int
    timestamp: int
    sections: Sections
    live: bytes
    versions: Mapping[str, int] = {}


class Section(NamedTuple):
    """One section as the manifest has it: its bytes, or the names of its chunks."""

    name: str
    version: int
    hash: bytes
    size: int
    data: bytes | None
    chunks: tuple[bytes, ...]


class Manifest(NamedTuple):
    """A snapshot with its large sections by name only."""

    snapshot: Snapshot
    sections: tuple[Section, ...]

    @property
    def chunks(self) -> tuple[bytes, ...]:
        """The chunks of all sections, each once, in order."""
        return tuple(dict.fromkeys(chunk for section in self.sections for chunk in section.chunks))

    @property
    def chunk_bytes(self) -> int:
        """Their sizes together, a chunk that is in two places counted twice."""
        return sum(section.size for section in self.sections if section.data is None)


class Encoded(NamedTuple):
    """A snapshot ready to be stored: its manifest, its chunks by name (those that are stored already may be missing),
    all names, and how many bytes it is with them."""

    manifest: bytes
    chunks: Mapping[bytes, memoryview]
    names: tuple[bytes, ...]
    size: int


def encode(snapshot: Snapshot) -> bytes:
    """Return bytes of a snapshot with every section inline."""
    return _encoded(snapshot, 1 << 62).manifest


def split(snapshot: Snapshot, inline_bytes: int = INLINE_BYTES) -> Encoded:
    """Return a snapshot's manifest, with sections above `inline_bytes` as chunks; and those above `TINY_BYTES`, where
    the others are more than `MANIFEST_BYTES` together."""
    if sum([len(data) for data in snapshot.sections.values() if len(data) <= inline_bytes]) > MANIFEST_BYTES:
        inline_bytes = min(inline_bytes, TINY_BYTES)
    return _encoded(snapshot, inline_bytes)


def _encoded(snapshot: Snapshot, inline_bytes: int) -> Encoded:
    rows: list[tuple[object, ...]] = []
    chunks: dict[bytes, memoryview] = {}
    beside = 0
    for name, data in snapshot.sections.items():
        version = snapshot.versions.get(name, snapshot.version)
        digest = xxhash.xxh3_128_digest(data)
        if len(data) <= inline_bytes:
            rows.append((name, version, digest, data))
            continue
        names = []
        for at in range(0, len(data), CHUNK_BYTES):
            chunk = memoryview(data)[at : at + CHUNK_BYTES]
            names.append(xxhash.xxh3_128_digest(chunk))
            chunks[names[-1]] = chunk
        rows.append((name, version, digest, None, len(data), names))
        beside += len(data)
    manifest: bytes = msgpack.packb(
        (
            snapshot.uid,
            snapshot.index,
            snapshot.term,
            snapshot.configuration,
            snapshot.version,
            snapshot.release,
            snapshot.timestamp,
            rows,
            snapshot.live,
        )
    )
    check = xxhash.xxh3_64_intdigest(manifest, snapshot.uid)
    head = HEAD.pack(MAGIC, FORMAT if chunks else 1, 0, len(manifest), check)
    return Encoded(head + manifest, chunks, tuple(chunks), len(head) + len(manifest) + beside)


def read_manifest(data: bytes, uid: int) -> Manifest:
    """Parse and verify all but the chunks; the snapshot's `sections` are the inline ones. Raises `Corrupt`, or
    `WrongIdentity` for a newer format."""
    where = f"snapshot of group {uid:016x}"
    if len(data) < HEAD.size:
        raise Corrupt(where, 0, f"{HEAD.size} bytes", len(data))
    magic, version, _, length, check = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise Corrupt(where, 0, MAGIC, magic)
    if version > FORMAT:
        raise WrongIdentity(f"{where} has format {version}; this logyard reads up to {FORMAT}: update it")
    if version < 1:
        raise Corrupt(where, len(MAGIC), "a format", version)
    manifest = data[HEAD.size :]
    if len(manifest) != length or xxhash.xxh3_64_intdigest(manifest, uid) != check:
        raise Corrupt(where, HEAD.size, f"checksum {check:016x}", "another")
    try:
        found_uid, index, term, configuration, machine, release, stamp, rows, live = msgpack.unpackb(manifest)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Corrupt(where, HEAD.size, "a manifest", f"{type(error).__name__}: {error}") from error
    numbers = (found_uid, index, term, machine, release, stamp)
    if not all(type(one) is int and one >= 0 for one in numbers) or not type(configuration) is type(live) is bytes:
        raise Corrupt(where, HEAD.size, "numbers, a configuration and a live set", numbers)
    if found_uid != uid:
        raise Corrupt(where, HEAD.size, f"uid {uid:016x}", f"{found_uid:016x}")
    sections = tuple(_section(row, where) for row in rows)
    inline = {one.name: one.data for one in sections if one.data is not None}
    versions = {one.name: one.version for one in sections if one.version != machine}
    return Manifest(
        Snapshot(uid, index, term, configuration, machine, release, stamp, inline, live, versions), sections
    )


def _section(row: list[object], where: str) -> Section:
    name, version, digest, data, *beside = row
    assert isinstance(name, str) and isinstance(version, int) and isinstance(digest, bytes)
    if data is not None:
        assert isinstance(data, bytes)
        if xxhash.xxh3_128_digest(data) != digest:
            raise Corrupt(f"{where}, section {name!r}", HEAD.size, digest.hex(), "another hash")
        return Section(name, version, digest, len(data), data, ())
    size, names = beside if len(beside) == 2 else (0, None)
    if (
        not isinstance(size, int)
        or not isinstance(names, list)
        or len(names) != -(-size // CHUNK_BYTES)
        or not all(isinstance(one, bytes) and len(one) == HASH_BYTES for one in names)
    ):
        raise Corrupt(f"{where}, section {name!r}", HEAD.size, "names of chunks that add up to its size", size)
    return Section(name, version, digest, size, None, tuple(names))


def is_chunk(name: bytes, data: bytes) -> bool:
    """Return whether these bytes are the chunk of that name."""
    return xxhash.xxh3_128_digest(data) == name


def assemble(manifest: Manifest, load: Callable[[bytes], bytes | None]) -> Snapshot:
    """Return the snapshot with all of its sections; `load` gives a chunk by name. Raises `Corrupt` for one that is
    missing or does not match its name."""
    sections: dict[str, bytes] = {}
    for section in manifest.sections:
        if section.data is not None:
            sections[section.name] = section.data
            continue
        where = f"snapshot of group {manifest.snapshot.uid:016x}, section {section.name!r}"
        parts = []
        for at, name in enumerate(section.chunks):
            part = load(name)
            if part is None or not is_chunk(name, part):
                raise Corrupt(where, at * CHUNK_BYTES, f"chunk {name.hex()}", "none" if part is None else "another")
            parts.append(part)
        data = b"".join(parts)
        if len(data) != section.size or xxhash.xxh3_128_digest(data) != section.hash:
            raise Corrupt(where, 0, f"{section.size} bytes with hash {section.hash.hex()}", f"{len(data)} others")
        sections[section.name] = data
    return manifest.snapshot._replace(sections=sections)


def decode(data: bytes, uid: int, load: Callable[[bytes], bytes | None] = lambda name: None) -> Snapshot:
    """Parse and verify all of a snapshot. Raises `Corrupt`, or `WrongIdentity` for a newer format."""
    return assemble(read_manifest(data, uid), load)

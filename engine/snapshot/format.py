"""A snapshot's bytes: a checksummed manifest with named sections, each with a hash of its own, and the exact live set.

The live set is inside the checksum: a snapshot without one does not parse, and is never taken for one with nothing
live (law 4).
Layout: docs/internals/files-on-disk.md. Used by `engine.host.snapshots` and recovery.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgpack
import xxhash

from ..errors import Corrupt, WrongIdentity
from ..machine import Sections

MAGIC = b"LYSN"
FORMAT = 1
HEAD = struct.Struct("<4sHHQQ")
"""magic, format, 0, length of the manifest in bytes, xxh3-64 of the manifest seeded with the group's uid."""


class Snapshot(NamedTuple):
    """State of group `uid` at `index`; `live` is the encoded live set at or below it, `release` the last release
    applied."""

    uid: int
    index: int  # type: ignore[assignment]  # tuple.index is not missed
    term: int
    configuration: bytes
    version: int
    release: int
    timestamp: int
    sections: Sections
    live: bytes


def encode(snapshot: Snapshot) -> bytes:
    """Bytes of a snapshot."""
    sections = [
        (name, snapshot.version, xxhash.xxh3_128_digest(data), data) for name, data in snapshot.sections.items()
    ]
    manifest: bytes = msgpack.packb(
        (
            snapshot.uid,
            snapshot.index,
            snapshot.term,
            snapshot.configuration,
            snapshot.version,
            snapshot.release,
            snapshot.timestamp,
            sections,
            snapshot.live,
        )
    )
    return HEAD.pack(MAGIC, FORMAT, 0, len(manifest), xxhash.xxh3_64_intdigest(manifest, snapshot.uid)) + manifest


def decode(data: bytes, uid: int) -> Snapshot:
    """Parse and verify. Raises `Corrupt`, or `WrongIdentity` for a newer format."""
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
    found_uid, index, term, configuration, machine, release, stamp, rows, live = msgpack.unpackb(manifest)
    if found_uid != uid:
        raise Corrupt(where, HEAD.size, f"uid {uid:016x}", f"{found_uid:016x}")
    sections = {}
    for name, _, digest, section in rows:
        if xxhash.xxh3_128_digest(section) != digest:
            raise Corrupt(f"{where}, section {name!r}", HEAD.size, digest.hex(), "another hash")
        sections[name] = section
    return Snapshot(uid, index, term, configuration, machine, release, stamp, sections, live)

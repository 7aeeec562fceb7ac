"""Records of an export's files, as `export` wrote them: each checked against its hash, each file against its digest.

Used by `importing`, and by an export that goes on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet as parquet
from xxhash import xxh3_128, xxh3_128_digest

from .digests import Digest, digest_of
from .manifest import ExportError, Part

PLACE = "payload_file"
"""The column that names the file of a payload that is not in its row."""
ROWS = 256
"""Rows that are decoded at once: with payloads of up to 16 MiB each."""
FILE_BYTES = 1 << 20
DAMAGE = (OSError, ValueError, TypeError, KeyError, struct.error, pyarrow.ArrowException)
"""What reading a damaged file may raise: its footer may say that it has other columns, or of other types."""


class Row(NamedTuple):
    """A record of the export. `place`: the file that its payload is in."""

    offset: int
    meta: bytes
    payload: bytes | None
    size: int | None
    hash: bytes | None
    place: Path | None


def pieces_of(row: Row) -> Iterator[bytes]:
    """Yield a payload from its column or its file; a file is checked against its hash. Raises `ExportError`."""
    if row.place is None:
        yield row.payload or b""
        return
    state = xxh3_128()
    try:
        with open(row.place, "rb") as file:
            while piece := file.read(FILE_BYTES):
                state.update(piece)
                yield piece
    except (OSError, ValueError) as error:
        raise ExportError(f"{row.place}: {error}") from error
    if state.digest() != row.hash:
        raise ExportError(f"{row.place}: it does not match the hash of record {row.offset}")


def batches_of(source: Path, part: Part) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of a file. Raises `ExportError` unless they are the part's records, by their offsets."""
    path, at = source / part.file, part.first
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        for batch in file.iter_batches(ROWS):
            for offset in batch.column("offset").to_pylist():
                if offset != at:
                    raise ExportError(f"{path}: record {offset} is where record {at} belongs")
                at += 1
            yield batch
    if at != part.end:
        raise ExportError(f"{path}: records from {at} on are missing")


def read_part(source: Path, part: Part, first: int) -> Iterator[Row]:
    """Yield the records of a file from offset `first` on; offsets, payloads and, at its end, the part's digest are
    checked. Raises `ExportError`."""
    path = source / part.file
    total = Digest()
    try:
        for batch in batches_of(source, part):
            total = total.plus(digest_of(batch))
            names = ("offset", "meta", "payload", "payload_size", "payload_hash", PLACE)
            columns = [batch.column(name) for name in names]
            for values in zip(*columns, strict=True):
                offset, meta, payload, size, digest, place = (value.as_py() for value in values)
                if payload is not None and xxh3_128_digest(payload) != digest:
                    raise ExportError(f"{path}: the payload of record {offset} does not match its hash")
                if offset >= first:
                    yield Row(offset, meta, payload, size, digest, path.parent / place if place else None)
    except DAMAGE as error:
        raise ExportError(f"{path}: {error}") from error
    if total != part.sum:
        raise ExportError(f"{path}: its records are not those of the manifest")


def is_whole(source: Path, part: Part, payloads: bool) -> bool:
    """Return whether a file has all that its footer says, and so have the files of its payloads; without `payloads`
    there are none, and no hashes."""
    try:
        if not payloads:
            for _ in batches_of(source, part):
                pass
            return True
        for row in read_part(source, part, part.first):
            if row.place is not None:
                for _ in pieces_of(row):
                    pass
    except (ExportError, *DAMAGE):
        return False
    return True

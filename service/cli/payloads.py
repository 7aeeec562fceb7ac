"""Payloads of any size at the command line: files and standard input stream into a log, payloads stream out of it.

Invariant: a payload that travels in pieces is never whole in memory here; the client is loaded by who needs it, so
that help and completion stay quick. Called by `service.cli.logs`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

if TYPE_CHECKING:
    from logyard.client.sync import Log
    from logyard.protocol.records import Page, Record

Source: TypeAlias = bytes | Path | BinaryIO
"""A payload: here, or where to read it from."""
PREVIEW_BYTES = 1024


def input_records(files: Sequence[Path], metadata: str | None, whole: bool) -> Iterator[tuple[bytes, Source]]:
    """Yield (metadata, payload) of each file, of standard input, or of its lines without their line ends."""
    from logyard.client.upload import WHOLE_BYTES

    head = (metadata or "").encode()
    for path in files:
        name = head if metadata is not None else str(path).encode()
        yield name, path if path.stat().st_size > WHOLE_BYTES else path.read_bytes()
    if files:
        return
    stream = sys.stdin.buffer
    if whole:
        yield head, stream
    else:
        for line in stream:
            yield head, line.rstrip(b"\r\n")


def append_source(log: Log, head: bytes, source: Path | BinaryIO, compress: str | None = None) -> tuple[int, int]:
    """Append one record from a file or a stream; return its offset and its bytes."""
    from logyard.client.upload import WHOLE_BYTES
    from logyard.protocol.frame import PIECE_BYTES_MAX

    if isinstance(source, Path):
        with source.open("rb") as file:
            return append_source(log, head, file, compress)
    counted = 0

    def rest() -> Iterator[bytes]:
        nonlocal counted
        for data in chain((first,), iter(lambda: source.read(PIECE_BYTES_MAX), b"")):
            counted += len(data)
            yield data

    first = source.read(WHOLE_BYTES + 1)
    if len(first) <= WHOLE_BYTES:
        return log.append(head, first, compress=compress), len(first)
    return log.append_stream(head, rest(), compress=compress), counted


def write_payload(log: Log, record: Record, page: Page, out: BinaryIO) -> None:
    """Write the payload of a record of a page, wherever it is."""
    if record.view is not None:
        out.write(record.view)
    elif record.size:
        for piece in log.body_pieces(record.offset, 0, record.size, node=page.node, uid=page.uid):
            out.write(piece)
    out.flush()


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that has its name only when the block ends well: before, what was there stays. A pipe or a device
    is written as it is."""
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()
    part = path.with_name(f".logyard-{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            yield file
        if path.exists():
            shutil.copymode(path, part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def complete(log: Log, record: Record, page: Page, preview: bool) -> Record:
    """Return a record of a page to show, with the payload that did not come along, or the beginning of it; without, if
    it is too long for one answer."""
    from logyard.protocol.frame import FRAME_BYTES_MAX

    if record.left_out:
        most = min(record.size, PREVIEW_BYTES) if preview else record.size
        whole = most <= FRAME_BYTES_MAX
        body = log.read_body(record.offset, 0, most, node=page.node, uid=page.uid) if whole else None
        record.show(None if body is None else memoryview(body))
    return record

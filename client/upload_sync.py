"""Uploads of the blocking client: a piece under way in a thread while the next one is read, then the record.

Invariant: whatever ends an upload, from the moment on at which its session may have begun, also ends that, so nothing
stays but the record, if it was bound. Called by `sync.Log`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import BinaryIO, Protocol

from logyard.protocol.errors import BadRequest, LogyardError
from logyard.protocol.frame import APPEND_COMMAND, PIECE_BYTES_MAX, Buffer

from .admin import Call, T
from .upload import CLOSE_S, Cutter, Upload, check_size, check_total, may_be_open, pieces_of, stored_of


class Commander(Protocol):
    """What an upload needs of a yard."""

    def run(self, call: Call[T], timeout: float | None = None) -> T:
        """Ask, again where that is allowed."""

    def command(self, name: str, frame: list[Buffer], timeout: float | None = None) -> bytes:
        """Send a command frame to a group's leader; return its reply."""


def upload(
    yard: Commander,
    name: str,
    metadata: Buffer,
    source: Iterable[Buffer],
    size: int | None,
    timeout: float | None,
    compress: bool = False,
    command: bytes = APPEND_COMMAND,
) -> int:
    """Append a record whose payload comes from `source`; return its offset. `timeout` (seconds) is for each piece.
    `command`: of the frame that binds its pieces."""
    if size is not None:
        check_size(size)
    one = Upload(name, metadata, random.Random(), compress, command)
    opened = True
    try:
        try:
            _open(yard, one, timeout)
        except LogyardError as refusal:
            opened = may_be_open(refusal)
            raise
        _send_pieces(yard, one, source, timeout)
        check_total(size, one.original)
        return one.offset_of(yard.command(name, one.bind(), timeout))
    finally:
        # Ends what was not bound, and costs nothing else once it was.
        if opened:
            with suppress(LogyardError):
                yard.run(one.close_call(), CLOSE_S)


def _open(yard: Commander, one: Upload, timeout: float | None) -> None:
    try:
        yard.run(one.open_call(), timeout)
    except BadRequest as refusal:
        if not one.shorten(refusal):
            raise
        yard.run(one.open_call(), timeout)


def _send_pieces(yard: Commander, one: Upload, source: Iterable[Buffer], timeout: float | None) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="logyard-upload") as pool:
        sent: Future[bytes] | None = None
        for piece in stored_of(pieces_of(source, Cutter()), one):
            if sent is not None:
                sent.result()
                one.done()
            sent = pool.submit(yard.command, one.name, one.piece(piece), timeout)
        if sent is not None:
            sent.result()
            one.done()


def read_file(file: BinaryIO) -> Iterator[Buffer]:
    """Yield a file as a source."""
    while data := file.read(PIECE_BYTES_MAX):
        yield data

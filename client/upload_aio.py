"""Uploads of the asynchronous client: a piece under way while the next one is read, then the record that binds them.

Invariant: whatever ends an upload (an error, a cancellation, a source that raises), from the moment on at which its
session may have begun, also ends that, so nothing stays but the record, if it was bound. Called by `aio.Log`.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import BinaryIO

from logyard.protocol.errors import BadRequest, LogyardError
from logyard.protocol.frame import APPEND_COMMAND, PIECE_BYTES_MAX, Buffer

from .upload import CLOSE_S, Cutter, Upload, check_size, check_total, may_be_open
from .yards import Yard


async def upload(
    network: Yard,
    name: str,
    metadata: Buffer,
    source: AsyncIterable[Buffer] | BinaryIO | memoryview,
    size: int | None,
    timeout: float | None,
    compress: bool = False,
    command: bytes = APPEND_COMMAND,
) -> int:
    """Append a record whose payload comes from `source`; return its offset. `timeout` (seconds) is for each piece.
    `command`: of the frame that binds its pieces."""
    if size is not None:
        check_size(size)
    if isinstance(source, memoryview):
        source = views(source)
    elif not isinstance(source, AsyncIterable):
        source = read_file(network, source)
    one = Upload(name, metadata, network.chance, compress, command)
    opened = True
    try:
        try:
            await _open(network, one, timeout)
        except LogyardError as refusal:
            opened = may_be_open(refusal)
            raise
        await _send_pieces(network, one, source, timeout)
        check_total(size, one.original)
        reply = await network.command(name, one.bind(), timeout)
        return one.offset_of(reply)
    finally:
        # Ends what was not bound, and costs nothing else once it was.
        if opened:
            with network.runtime.scope(network.clock() + CLOSE_S, shield=True):
                try:
                    await network.run(one.close_call(), CLOSE_S)
                except LogyardError:
                    pass


async def _open(network: Yard, one: Upload, timeout: float | None) -> None:
    try:
        await network.run(one.open_call(), timeout)
    except BadRequest as refusal:
        if not one.shorten(refusal):
            raise
        await network.run(one.open_call(), timeout)


async def _send_pieces(network: Yard, one: Upload, source: AsyncIterable[Buffer], timeout: float | None) -> None:
    failure: list[BaseException] = []
    lot = network.runtime.lot()
    window = network.window

    async def send(frame: list[Buffer], held: int) -> None:
        try:
            await network.command(one.name, frame, timeout)
            one.done()
        except LogyardError as error:
            failure.append(error)
            nursery.cancel_scope.cancel()
        finally:
            window.give_back(held)
            lot.unpark_all()

    async with network.runtime.nursery() as nursery:
        try:
            cutter = Cutter()
            async for piece in _pieces(source, cutter, one):
                while one.under_way:
                    await lot.park()
                while window.used >= window.limit:
                    await network.freed()
                frame = one.piece(piece)
                held = len(piece)
                window.hold(held)
                nursery.start_soon(send, frame, held)
        except Exception as error:  # carried around the nursery, which would wrap it in a group
            failure.append(error)
            nursery.cancel_scope.cancel()
    if failure:
        raise failure[0]


async def _pieces(source: AsyncIterable[Buffer], cutter: Cutter, one: Upload) -> AsyncIterator[Buffer]:
    async for data in source:
        for piece in cutter.feed(data):
            yield one.stored(piece)
    for piece in cutter.rest():
        yield one.stored(piece)
    for piece in one.index():
        yield piece


async def views(payload: Buffer) -> AsyncIterator[Buffer]:
    """Yield a payload in memory as a source: never copied."""
    yield payload


async def read_file(network: Yard, file: BinaryIO) -> AsyncIterator[Buffer]:
    """Yield a file as a source, read in a thread."""
    while data := await network.runtime.in_thread(file.read, PIECE_BYTES_MAX):
        yield data

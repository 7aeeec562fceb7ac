"""Reads that ask the kernel once lose nothing, end where the stream ends, and never touch a closed descriptor."""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing

from logyard.engine.transport.eager import EagerReads


async def test_bytes_come_in_order_whatever_the_sizes_and_the_end_is_seen() -> None:
    left, right = (trio.socket.from_stdlib_socket(one) for one in socket.socketpair())
    assert isinstance(left, trio.socket.SocketType)
    sent = bytes(range(256)) * 400
    got = bytearray()

    async def read() -> None:
        reads = EagerReads(right)
        buffer = memoryview(bytearray(1000))
        while count := await reads.recv_into(buffer):
            got.extend(buffer[:count])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        at = 0
        for size in (1, 999, 1000, 1001, 5000, len(sent)):
            await trio.testing.wait_all_tasks_blocked()
            while at < min(size, len(sent)):
                at += await left.send(sent[at:size])
        left.close()
    assert bytes(got) == sent
    right.close()


async def test_a_socket_closed_under_a_read_ends_it() -> None:
    left, right = (trio.socket.from_stdlib_socket(one) for one in socket.socketpair())
    reads = EagerReads(right)
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await reads.recv_into(memoryview(bytearray(8)))

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        right.close()
    with pytest.raises((OSError, ValueError, trio.ClosedResourceError)):
        await reads.recv_into(memoryview(bytearray(8)))
    left.close()

"""Links and the receive loop over real sockets: every frame size, backpressure, and peers that misbehave."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio

from logyard.engine.transport import frame
from logyard.engine.transport.config import TransportConfig
from logyard.engine.transport.frame import BULK, CONTROL, Header, Hello
from logyard.engine.transport.link import BEGINNING, Link, Stream, dial, receive, require_loopback
from logyard.engine.transport.listener import Listener
from logyard.protocol.errors import BadRequest, Corrupt, Refused, WrongIdentity

CONFIG = TransportConfig(receive_bytes=16 << 10)


@asynccontextmanager
async def connected(link: Link) -> AsyncIterator[trio.socket.SocketType]:
    """`link` running on one end of a connection; yields the other end."""
    accepted: list[trio.socket.SocketType] = []
    there = trio.Event()

    async def serve(theirs: Hello, sock: Stream) -> None:
        assert isinstance(sock, trio.socket.SocketType)
        accepted.append(sock)
        there.set()
        await trio.sleep_forever()

    listener = Listener(("127.0.0.1", 0), CONFIG, lambda theirs: Hello("c", 2, 1, 1, theirs.lane), serve)
    async with trio.open_nursery() as nursery:
        await nursery.start(listener.run)
        sock, raw = await dial(listener.address, Hello("c", 1, 2, 1, link.lane), CONFIG, lambda theirs: None)
        attached = trio.Event()
        nursery.start_soon(link.run, sock, raw, attached.set)
        with trio.fail_after(5):
            await there.wait()
            await attached.wait()
        yield accepted[0]
        nursery.cancel_scope.cancel()


async def test_frames_of_every_size_arrive_whole_and_in_order() -> None:
    """Sizes around the receive buffer and its half: a frame larger than the buffer must not stall the loop."""
    sizes = [0, 1, 100, 8000, 8191, 8192, 16_383, 16_384, 16_385, 40_000, 1 << 20, 3 << 20, 7, 0]
    sizes += random.Random(2).choices([0, 10, 500, 5000, 9000, 20_000], k=300)
    bodies = [random.Random(n).randbytes(size) for n, size in enumerate(sizes)]
    got: list[tuple[int, bytes]] = []
    done = trio.Event()

    def deliver(header: Header, section: memoryview, body: memoryview) -> None:
        blob = frame.decode_blob(section, body)
        got.append((blob.request, bytes(blob.body)))
        if len(got) == len(bodies):
            done.set()

    link = Link(BULK, 64 << 20, lambda: None)
    async with connected(link) as other, trio.open_nursery() as nursery:
        nursery.start_soon(receive, other, BULK, CONFIG, deliver)
        for number, body in enumerate(bodies):
            parts = [body[at : at + 3000] for at in range(0, len(body), 3000)]
            assert link.send(frame.encode_blob(1, number, {}, parts))
        with trio.fail_after(10):
            await done.wait()
        nursery.cancel_scope.cancel()
    assert got == list(enumerate(bodies))
    assert link.queued == 0 and not link.connected


async def test_a_frame_of_more_buffers_than_one_gather_write_takes() -> None:
    link = Link(BULK, 64 << 20, lambda: None)
    parts = [bytes([n % 256]) * 1024 for n in range(3000)]
    got: list[bytes] = []
    async with connected(link) as other, trio.open_nursery() as nursery:

        def deliver(header: Header, section: memoryview, body: memoryview) -> None:
            got.append(bytes(frame.decode_blob(section, body).body))
            nursery.cancel_scope.cancel()

        nursery.start_soon(receive, other, BULK, CONFIG, deliver)
        assert link.send(frame.encode_blob(1, 1, {}, parts))
        with trio.fail_after(10):
            await trio.sleep_forever()
    assert got == [b"".join(parts)]


async def test_a_full_bulk_queue_drops_whole_frames_and_says_when_there_is_room() -> None:
    drained = trio.Event()
    link = Link(BULK, 1 << 20, drained.set)
    got: list[int] = []
    async with connected(link) as other, trio.open_nursery() as nursery:
        sent = [number for number in range(300) if link.send(frame.encode_blob(1, number, {}, [bytes(100_000)]))]
        assert sent == list(range(len(sent))) and len(sent) < 300, "the first drop ends it until there is room"
        assert link.lossy and link.queued <= 1 << 20 and link.dropped == 300 - len(sent)
        assert not drained.is_set()

        def deliver(header: Header, section: memoryview, body: memoryview) -> None:
            got.append(frame.decode_blob(section, body).request)
            if got[-1] == 999:
                nursery.cancel_scope.cancel()

        nursery.start_soon(receive, other, BULK, CONFIG, deliver)
        with trio.fail_after(5):
            await drained.wait()
            assert not link.lossy and link.send(frame.encode_blob(1, 999, {}))
            await trio.sleep_forever()
    assert got == [*sent, 999]


async def test_a_larger_frame_than_the_queue_goes_through_alone() -> None:
    link = Link(BULK, 1 << 20, lambda: None)
    async with connected(link) as other, trio.open_nursery() as nursery:
        assert link.send(frame.encode_blob(1, 1, {}, [bytes(8 << 20)]))
        assert not link.send(frame.encode_blob(1, 2, {}))
        sizes: list[int] = []

        def deliver(header: Header, section: memoryview, body: memoryview) -> None:
            sizes.append(len(body))
            nursery.cancel_scope.cancel()

        nursery.start_soon(receive, other, BULK, CONFIG, deliver)
        with trio.fail_after(5):
            await trio.sleep_forever()
    assert sizes == [8 << 20]


async def test_a_full_control_queue_resets_the_connection() -> None:
    link = Link(CONTROL, 1 << 20, lambda: None)
    async with connected(link) as other:
        for number in range(1000):
            if not link.send(frame.encode_blob(1, number, {}, [bytes(100_000)])):
                break
        with trio.fail_after(5):
            with pytest.raises((ConnectionResetError, BadRequest)):
                await receive(other, CONTROL, CONFIG, lambda *found: None)
            while link.connected:
                await trio.testing.wait_all_tasks_blocked()
        assert "does not read" in link.error and link.queued == 0
        assert not link.send(frame.encode_blob(1, 1, {}))


async def test_the_end_of_the_other_side_is_noticed_without_sending() -> None:
    link = Link(CONTROL, 1 << 20, lambda: None)
    async with connected(link) as other:
        other.close()
        with trio.fail_after(5):
            while link.connected:
                await trio.testing.wait_all_tasks_blocked()
        assert link.error


async def unserved(theirs: Hello, sock: Stream) -> None:
    raise AssertionError("nobody was admitted")


def renewal() -> bytes:
    return frame.encode_renewal(frame.Renewal(1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (renewal()[:-1], ConnectionResetError),
        (renewal() + b"x", ConnectionResetError),
        (renewal() + bytes(40), Corrupt),
        (renewal()[:-1] + b"\xff", Corrupt),
        (frame.encode_header(frame.MESSAGES, 1, b"", 70 << 20) + bytes(100), BadRequest),
        (frame.encode_header(frame.MESSAGES, 1, bytes(8), 1 << 20) + bytes(2000), BadRequest),
        (b"".join(frame.encode_blob(1, 1, {}, [bytes(50_000)]))[:-1], ConnectionResetError),
    ],
)
async def test_what_is_damaged_or_cut_ends_the_connection(data: bytes, error: type[Exception]) -> None:
    mine, theirs = trio.socket.socketpair()
    with mine, theirs:
        async with trio.open_nursery() as nursery:

            async def feed() -> None:
                at = 0
                while at < len(data):
                    at += await theirs.send(data[at:])
                theirs.close()

            nursery.start_soon(feed)
            with trio.fail_after(5), pytest.raises(error):
                await receive(mine, BULK, CONFIG, lambda *found: None)


class Script:
    """A stream that gives what it is asked for and remembers how much that was."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[int] = []

    async def recv_into(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self.data))
        self.asked.append(len(buffer))
        buffer[:count] = self.data[:count]
        self.data = self.data[count:]
        return count


async def test_behind_a_large_frame_only_the_beginning_of_the_next_is_read_at_first() -> None:
    sizes = [300_000, 400_000, 400_000, 10, 20, 500_000]
    bodies = [bytes([number]) * size for number, size in enumerate(sizes, 1)]
    found: list[bytes] = []
    stream: Any = Script(b"".join(b"".join(frame.encode_blob(1, 1, {}, [body])) for body in bodies))
    await receive(stream, BULK, CONFIG, lambda header, section, body: found.append(bytes(body)))
    assert found == bodies
    assert stream.asked[2] == stream.asked[4] == BEGINNING, "the second and the third large one"
    copied = [stream.asked[place] for place in (2, 4)]
    assert stream.asked[3] > 400_000 - copied[0] and stream.asked[5] > 400_000 - copied[1]


@pytest.mark.parametrize("cut", [1, 39, 40, 41, 5000])
async def test_frames_may_arrive_in_any_pieces(cut: int) -> None:
    data = renewal() * 3 + b"".join(frame.encode_blob(1, 1, {"h": 1}, [bytes(30_000)])) + renewal()
    mine, theirs = trio.socket.socketpair()
    kinds: list[int] = []
    with mine, theirs:
        async with trio.open_nursery() as nursery:

            async def feed() -> None:
                for at in range(0, len(data), cut) if cut > 1 else range(0, 400):
                    await theirs.send(data[at : at + cut])
                    await trio.testing.wait_all_tasks_blocked()
                theirs.close()

            nursery.start_soon(feed)
            with trio.fail_after(10):
                if cut == 1:
                    with pytest.raises(ConnectionResetError):
                        await receive(mine, BULK, CONFIG, lambda header, *rest: kinds.append(header.type))
                else:
                    await receive(mine, BULK, CONFIG, lambda header, *rest: kinds.append(header.type))
    assert kinds == [frame.LIVENESS] * 3 + ([frame.BLOB, frame.LIVENESS] if cut > 1 else [])


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "example.org"])
def test_only_loopback_addresses_without_tls(host: str) -> None:
    with pytest.raises(Refused, match="TLS"):
        require_loopback(host)
    with pytest.raises(Refused):
        Listener((host, 0), CONFIG, lambda theirs: theirs, unserved)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_addresses(host: str) -> None:
    require_loopback(host)


async def test_a_silent_connection_and_one_that_says_something_else_are_closed() -> None:
    config = TransportConfig(handshake_timeout_ms=100, handshakes=3)
    served: list[Hello] = []

    async def serve(theirs: Hello, sock: Stream) -> None:
        served.append(theirs)

    listener = Listener(("127.0.0.1", 0), config, lambda theirs: theirs, serve)
    async with trio.open_nursery() as nursery:
        await nursery.start(listener.run)
        first = bytes(frame.encode_renewal(frame.Renewal(1, 2, 3, 4, 5)))
        large = frame.encode_header(frame.MESSAGES, 1, bytes(8), 64 << 20)
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(40), first, large):
            with trio.socket.socket() as sock, trio.fail_after(5):
                await sock.connect(listener.address)
                await sock.send(data)
                # A close with bytes unread is a reset.
                with suppress(ConnectionResetError):
                    while await sock.recv(4096):
                        pass
        assert listener.refused == 4 and listener.waiting == 0 and not served
        nursery.cancel_scope.cancel()


async def test_of_more_strangers_than_allowed_the_oldest_is_closed() -> None:
    config = TransportConfig(handshakes=2)
    listener = Listener(("127.0.0.1", 0), config, lambda theirs: theirs, unserved)
    async with trio.open_nursery() as nursery:
        await nursery.start(listener.run)
        waiting = [trio.socket.socket() for _ in range(2)]
        for sock in waiting:
            await sock.connect(listener.address)
        await trio.testing.wait_all_tasks_blocked()
        with trio.socket.socket() as sock, trio.fail_after(5):
            await waiting[0].send(b"L")
            await trio.testing.wait_all_tasks_blocked(0.01)
            await sock.connect(listener.address)
            assert await waiting[1].recv(10) == b"", "that has said nothing"
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert listener.waiting == 2
        for sock in waiting:
            sock.close()
        nursery.cancel_scope.cancel()


async def test_dial_refuses_another_node_or_cluster() -> None:
    async def serve(theirs: Hello, sock: Stream) -> None:
        await trio.sleep_forever()

    answer = Hello("c", 3, 1, 1, CONTROL)
    listener = Listener(("127.0.0.1", 0), CONFIG, lambda theirs: answer, serve)
    async with trio.open_nursery() as nursery:
        await nursery.start(listener.run)
        for hello in (Hello("c", 1, 2, 1, CONTROL), Hello("d", 1, 3, 1, CONTROL)):
            with pytest.raises(WrongIdentity):
                await dial(listener.address, hello, CONFIG, lambda theirs: None)
        sock, _ = await dial(listener.address, Hello("c", 1, 3, 1, CONTROL), CONFIG, lambda theirs: None)
        sock.close()
        nursery.cancel_scope.cancel()

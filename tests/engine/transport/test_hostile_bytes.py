"""Bytes that no node of ours would send, on real sockets, before and after the handshake.

They close the connection they came on; the links of the others stand. Also how a node dials again, and that one stuck
lane does not hold the other.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import msgpack
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logyard.engine.transport import codec, frame
from logyard.engine.transport.config import TransportConfig
from logyard.engine.transport.frame import BULK, CONTROL, HEADER_BYTES, Hello
from logyard.engine.transport.link import Stream, dial, prepare, read_greeting, receive
from logyard.engine.transport.listener import Listener
from logyard.engine.transport.proof import decode_challenge
from logyard.protocol.errors import BadRequest, Corrupt, LogyardError, WrongIdentity

from .recorder import append, make_entry, reply
from .test_peers import CONFIG, SECRET, Node, cluster, prove_node

KINDS: tuple[Sequence[bytes | bytearray | memoryview], ...] = (
    *codec.encode_messages([append(1, 5, [make_entry(5, 10, [b"x" * 300])]), reply(1)], 1 << 20),
    frame.encode_blob(1, 1, {"uids": [1, 2]}, [b"y" * 100]),
    [frame.encode_renewal(frame.Renewal(1, 2, 3, 4, 5))],
)
GOOD = b"".join(b"".join(found) for found in KINDS)


def framed(kind: int, count: int, section: bytes, body: bytes = b"") -> bytes:
    """A frame whose hashes are right, whatever it says."""
    return frame.encode_header(kind, count, section, len(body)) + section + body


def headed(kind: int, count: int, section: int, body: int) -> bytes:
    """A header alone, of a frame of any size."""
    head = frame.HEADER.pack(frame.MAGIC, 1, kind, 0, count, section, body, frame.hash64(b""))
    return head + frame.HASH.pack(frame.hash64(head))


def blob(header: bytes) -> bytes:
    section = frame.BLOB_STRUCT.pack(1, 0, len(header), 1, frame.hash64(b"")) + header
    return framed(frame.BLOB, 1, section)


DEEP = b"\x91" * 5000 + b"\xc0"
CLASSES = {
    "bad magic": b"\x00" + GOOD[1:],
    "bad header hash": GOOD[:35] + bytes([GOOD[35] ^ 1]) + GOOD[36:],
    "bad section hash": GOOD[:60] + bytes([GOOD[60] ^ 1]) + GOOD[61:],
    "oversize section": headed(frame.MESSAGES, 1, 2**32 - 1, 0),
    "oversize body": headed(frame.MESSAGES, 1, 8, 2**63),
    "unknown type": headed(77, 0, 0, 0),
    "a second hello": frame.encode_hello(Hello("yard", 2, 1, 1, BULK)),
    "lying counts": framed(frame.MESSAGES, 1, codec.SECTION.pack(1, 2**32 - 1)),
    "counts that differ": framed(frame.MESSAGES, 3, codec.SECTION.pack(1, 0) + bytes(codec.MESSAGE_BYTES)),
    "no section": framed(frame.MESSAGES, 0, b""),
    "deep msgpack": blob(b"\x81\xa1x" + DEEP),
    "msgpack of a huge array": blob(b"\x81\xa1x\xdd\xff\xff\xff\xff"),
    "msgpack extension": blob(msgpack.packb({"x": msgpack.ExtType(4, b"xx")})),
    "no map": blob(b"\x93\x01\x02\x03"),
    "garbage": random.Random(3).randbytes(3000),
    "short renewal": framed(frame.LIVENESS, 0, b"1234"),
}


async def gone(stream: Stream) -> None:
    """The other side closed."""
    with trio.fail_after(5), suppress(OSError):
        while await stream.recv(4096):
            pass


@pytest.mark.parametrize("name", CLASSES)
async def test_what_is_malformed_closes_its_connection_alone(name: str) -> None:
    """Node 3's impostor sends it after a sound handshake; the link between 1 and 2 never goes down."""
    a, b = Node(1), Node(2)
    async with cluster(a, b):
        a.peers.add_peer(3, ("127.0.0.1", 1))
        await a.until(lambda: a.peers.live == {1, 2})
        for lane in (BULK, CONTROL):
            hello = Hello("yard", 3, 1, 1, lane)
            stream, _ = await dial(a.peers.address, hello, CONFIG, lambda theirs: None, None, SECRET.key)
            with stream:
                with suppress(OSError):
                    await stream.sendmsg([CLASSES[name]])
                await gone(stream)
        before_hello, raw = trio.socket.socket(), CLASSES[name]
        with before_hello:
            await before_hello.connect(a.peers.address)
            with suppress(OSError):
                # What is sound but for its place is refused as well: nothing but a hello may come first.
                await before_hello.send(raw if name != "a second hello" else GOOD)
                before_hello.shutdown(trio.socket.SHUT_WR)
            await gone(before_hello)
        b.peers.send([reply(1, 9)])
        await a.until(lambda: any(m.uid == 9 for _, m in a.recorder.messages))
        assert a.recorder.ups == [2] and not a.recorder.downs and not b.recorder.downs


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_streams_on_real_sockets(data: st.DataObject) -> None:
    """Any damage to a good stream: what was whole before it is delivered, then a typed error or the end, no more."""
    stream = bytearray(GOOD * 2)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(stream) - 1))
        change = data.draw(st.integers(0, 2))
        if change == 0:
            stream[at] ^= 1 << data.draw(st.integers(0, 7))
        elif change == 1:
            del stream[at : at + data.draw(st.integers(1, 50))]
        else:
            stream[at:at] = data.draw(st.binary(min_size=1, max_size=50))
        if not stream:
            return

    async def main() -> None:
        mine, theirs = trio.socket.socketpair()
        with mine, theirs:
            async with trio.open_nursery() as nursery:

                async def feed() -> None:
                    await theirs.send(stream)
                    theirs.close()

                nursery.start_soon(feed)
                with trio.fail_after(5), suppress(LogyardError, ConnectionResetError):
                    await receive(mine, BULK, CONFIG, deliver)

    def deliver(header: frame.Header, section: memoryview, body: memoryview) -> None:
        if header.type == frame.MESSAGES:
            codec.decode_messages(section, body, 2, 1)
        elif header.type == frame.BLOB:
            frame.decode_blob(section, body)
        elif header.type == frame.LIVENESS:
            frame.decode_renewal(section)

    trio.run(main)


@given(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=300), st.binary(max_size=50))
def test_sound_hashes_around_any_section(kind: int, count: int, section: bytes, body: bytes) -> None:
    """The sender computes hashes too: behind them every parser must still expect anything."""
    data = framed(kind, count, section, body)
    for lane in (CONTROL, BULK):
        with suppress(BadRequest, Corrupt, WrongIdentity):
            frame.parse_header(data[:HEADER_BYTES], lane, CONFIG)
        for parse in (frame.decode_hello, frame.decode_renewal):
            with suppress(BadRequest, Corrupt, WrongIdentity):
                parse(section)
        with suppress(BadRequest, Corrupt):
            frame.decode_blob(section, memoryview(body))
        with suppress(BadRequest, Corrupt):
            codec.decode_messages(section, memoryview(body), 2, 1)


async def test_redials_wait_longer_each_time_up_to_a_bound_and_with_jitter() -> None:
    """A listener that takes every hello and hangs up."""
    config = TransportConfig(backoff_min_ms=10, backoff_max_ms=80)
    times: list[float] = []
    async with trio.open_nursery() as nursery:
        listening = trio.socket.socket()
        await listening.bind(("127.0.0.1", 0))
        listening.listen()
        node = Node(1, config=config)
        await nursery.start(node.run)
        node.peers.add_peer(2, listening.getsockname())
        with listening, trio.fail_after(20):
            while len(times) < 14:
                sock, _ = await listening.accept()
                with sock:
                    _, section = await read_greeting(sock, CONTROL, config)
                    if decode_challenge(section).lane == BULK:
                        times.append(trio.current_time())
        nursery.cancel_scope.cancel()
    gaps = [later - earlier for earlier, later in pairwise(times)]
    for number, gap in enumerate(gaps):
        full = min(0.010 * 2**number, 0.080)
        assert gap >= full / 2, f"redial {number} after {gap:.3f} s"
    last = gaps[4:]
    assert sorted(last)[len(last) // 2] < 0.150, "bounded: the median of the last gaps is near the longest wait"
    assert max(last) - min(last) > 0.002, "jittered"


async def test_a_stuck_bulk_lane_does_not_delay_control_messages() -> None:
    got: list[float] = []
    done = trio.Event()
    arrived = trio.Event()
    config = TransportConfig(backoff_min_ms=10, backoff_max_ms=40, stable_ms=0)

    async def serve(theirs: Hello, stream: Stream) -> None:
        def deliver(header: frame.Header, *rest: memoryview) -> None:
            if header.type == frame.MESSAGES:
                got.append(trio.current_time())
                if len(got) == 50:
                    done.set()
                arrived.set()

        if theirs.lane == CONTROL:
            await receive(stream, CONTROL, config, deliver)
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        hello = Hello("yard", 2, 1, 1, CONTROL)
        other = Listener(
            ("127.0.0.1", 0), config, lambda theirs: hello._replace(lane=theirs.lane), serve, prove=prove_node
        )
        await nursery.start(other.run)
        node = Node(1, config=config)
        await nursery.start(node.run)
        node.peers.add_peer(2, other.address)
        links = node.peers._peers[2].links
        with trio.fail_after(5):
            while not all(link.connected for link in links):
                await trio.testing.wait_all_tasks_blocked(0.001)
        entry = make_entry(5, 10, [bytes(7 << 20)])
        for _ in range(12):
            node.peers.send([append(2, 5, [entry])])
        assert links[BULK].queued > 30 << 20 and links[BULK].lossy, "the bulk lane is stuck"
        delays = []
        with trio.fail_after(10):
            for number in range(50):
                arrived = trio.Event()
                begun = trio.current_time()
                node.peers.send([reply(2, number + 1)])
                await arrived.wait()
                delays.append(trio.current_time() - begun)
            await done.wait()
        assert sorted(delays)[25] < 0.02
        assert links[BULK].connected and links[BULK].queued > 30 << 20
        nursery.cancel_scope.cancel()


def test_half_open_connections_end() -> None:
    """The kernel is asked to: unacknowledged bytes and a silent other side both end the connection in time."""
    config = TransportConfig(dead_peer_ms=8000)
    with socket.socket() as sock:
        prepare(sock, config)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
        option = {name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in
                  ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")}  # fmt: skip
        assert option["TCP_KEEPIDLE"] + option["TCP_KEEPINTVL"] * option["TCP_KEEPCNT"] <= 8

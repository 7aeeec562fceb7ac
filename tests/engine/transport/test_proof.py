"""Who speaks for a node without TLS proves to know the cluster's secret: forged, replayed and reflected words change
nothing, on either side."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio

from logyard.engine.identity import EPOCH_MAX, NOBODY, Acquaintances, Origin, difference
from logyard.engine.transport import proof
from logyard.engine.transport.frame import (
    BULK,
    CHALLENGE,
    CONTROL,
    HEADER_BYTES,
    HELLO,
    OUTDATED,
    PROVED,
    REFUSED,
    Hello,
    encode_header,
    encode_hello,
    encode_refused,
)
from logyard.engine.transport.link import dial, read_greeting
from logyard.engine.transport.proof import Exchange, Secret
from logyard.protocol.errors import LogyardError, WrongIdentity

from .test_peers import CONFIG, SECRET, Node, cluster

FORGED = Hello("yard", 2, 1, 2**62, CONTROL)
"""Node 2 in its epoch 2^62, without a directory: once two of these ended a cluster of three for good."""


async def told(address: tuple[str, int], data: bytes) -> bytes:
    """Everything a node says to somebody who sends this and nothing more."""
    heard = b""
    with trio.socket.socket() as sock, trio.fail_after(5):
        await sock.connect(address)
        await sock.send(data)
        with suppress(OSError):
            while more := await sock.recv(4096):
                heard += more
    return heard


async def test_forged_hellos_change_nothing_and_the_real_node_stays() -> None:
    a, b = Node(1), Node(2)
    async with cluster(a, b):
        await a.until(lambda: a.peers.live == {1, 2})
        known = dict(a.peers.known.known)
        assert b"asks for proof" in await told(a.peers.address, encode_hello(FORGED))
        first = proof.ask("yard", 2, 1, CONTROL)
        hello = encode_hello(FORGED)[HEADER_BYTES:]
        for key in (b"another secret, as long", b""):
            said = Exchange(key, first, first, dialled=True).seal(HELLO, hello)
            assert b"proof is wrong" in await told(a.peers.address, proof.encode_challenge(first) + said)
        assert a.peers.known.known == known and a.peers.epoch_of(2) == 1 and not a.peers.known.outdated
        assert a.recorder.ups == [2] and not a.recorder.downs and not b.recorder.outdated
        # Nor does a restart of the real one find a trace of it.
        await b.kill()
        await a.until(lambda: a.peers.live == {1})
        again = Node(2, epoch=2, address=b.peers.address)
        again.peers.add_peer(1, a.peers.address)
        async with trio.open_nursery() as nursery:
            await nursery.start(again.run)
            await a.until(lambda: a.peers.live == {1, 2})
            nursery.cancel_scope.cancel()


async def listening(answer: Callable[[trio.SocketStream], Awaitable[None]], node: Node) -> trio.SocketListener:
    """A listener under node 2's address, which is nobody's we know; `node` is told that node 2 is there."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    sock = listener.socket.getsockname()
    node.peers.add_peer(2, (sock[0], sock[1]))
    return listener


@pytest.mark.parametrize("required", [True, False])
async def test_a_listener_that_proves_nothing_ends_no_node(required: bool) -> None:
    """Whoever takes a dead node's port could tell the others that they are outdated: exit code 76, for good."""
    asked = trio.Event()
    count = [0]

    async def refuse(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(4096)
            with suppress(trio.BrokenResourceError):
                await stream.send_all(encode_refused("you are a copy", OUTDATED))
            count[0] += 1
            if count[0] > 5:
                asked.set()

    node = Node(1, secret=Secret(SECRET.key, required))
    async with trio.open_nursery() as nursery:
        await nursery.start(node.run)
        listener = await listening(refuse, node)
        nursery.start_soon(trio.serve_listeners, refuse, [listener])
        with trio.fail_after(5):
            await asked.wait()
        assert not node.recorder.outdated and "without proof" in node.peers.status()[0].error
        nursery.cancel_scope.cancel()


async def test_a_listener_that_proves_itself_is_believed() -> None:
    """The other side of it: node 2 knows a later life of node 1, and node 1 hears it."""
    a, b = Node(1, epoch=3), Node(2)
    b.peers.known.known[1] = Origin(0, 5, 0, 0)
    async with trio.open_nursery() as nursery:
        for node in (a, b):
            await nursery.start(node.run)
        b.peers.add_peer(1, a.peers.address)
        a.peers.add_peer(2, b.peers.address)
        await a.until(lambda: bool(a.recorder.outdated))
        assert a.recorder.outdated[0][0] == 2 and "before 5" in a.recorder.outdated[0][1]
        nursery.cancel_scope.cancel()


async def test_a_recorded_handshake_opens_no_second_connection() -> None:
    """A wire that keeps what a real node said, and says it again: the listener's number is another one."""
    a = Node(1)
    a.peers.add_peer(2, ("127.0.0.1", 1))
    async with trio.open_nursery() as nursery:
        await nursery.start(a.run)
        said: list[bytes] = []

        async def relay(stream: trio.SocketStream) -> None:
            on = await trio.open_tcp_stream(*a.peers.address)
            async with stream, on, trio.open_nursery() as both:

                async def forth() -> None:
                    async for data in stream:
                        said.append(bytes(data))
                        await on.send_all(data)
                    both.cancel_scope.cancel()

                async def back() -> None:
                    async for data in on:
                        await stream.send_all(data)

                both.start_soon(forth)
                both.start_soon(back)

        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, relay, [listener])
        host, port = listener.socket.getsockname()
        sock, _ = await dial((host, port), Hello("yard", 2, 1, 7, CONTROL), CONFIG, lambda _: None, None, SECRET.key)
        sock.close()
        assert a.peers.epoch_of(2) == 7
        heard = await told(a.peers.address, b"".join(said))
        assert b"proof is wrong" in heard and heard[5] == CHALLENGE
        nursery.cancel_scope.cancel()


async def test_a_nodes_own_words_sent_back_to_it_prove_nothing() -> None:
    """Whoever holds node 2's port lets node 1 answer its own challenge, over a second connection to node 1."""
    a = Node(1)
    async with trio.open_nursery() as nursery:
        await nursery.start(a.run)
        heard: list[bytes] = []

        async def reflect(stream: trio.SocketStream) -> None:
            async with stream:
                question = await stream.receive_some(4096)
                with suppress(trio.BrokenResourceError):
                    # As it is, and turned round, with each of its parts where the other side's would be.
                    heard.append(await told(a.peers.address, question))
                    await stream.send_all(question)

        listener = await listening(reflect, a)
        nursery.start_soon(trio.serve_listeners, reflect, [listener])
        with trio.fail_after(5):
            while len(heard) < 3 or "answers, not node 2" not in a.peers.status()[0].error:
                await trio.sleep(0.01)
        assert all(b"not node 2" in words for words in heard), "it proves to be nobody but itself"
        assert not a.recorder.ups and not a.recorder.outdated and a.peers.epoch_of(2) == 0
        nursery.cancel_scope.cancel()


async def test_a_node_of_the_first_release_may_join_while_the_secret_is_optional() -> None:
    """It says a plain hello, and refuses a challenge. Nothing that it says is stored, and it is refused afterwards by
    who has heard a proof of that node."""
    old, new = Node(1), Node(2, secret=Secret(SECRET.key, required=False))
    # What a node of the first release does.
    old.peers._key = lambda peer: b""  # type: ignore[method-assign]
    old.peers._listener._prove, old.peers._listener._required = None, False
    async with cluster(old, new):
        await new.until(lambda: new.peers.live == {1, 2})
        await old.until(lambda: old.peers.live == {1, 2})
        assert not new.peers.known.known and not new.peers.known.fresh
        sock, _ = await dial(
            new.peers.address, Hello("yard", 1, 2, 1, BULK), CONFIG, lambda theirs: None, None, SECRET.key
        )
        sock.close()
        assert new.peers.known.known[1].epoch == 1
        with pytest.raises(WrongIdentity, match="proved itself before"):
            await dial(new.peers.address, Hello("yard", 1, 2, 9, BULK), CONFIG, lambda theirs: None)


async def test_who_proves_itself_takes_the_place_of_who_did_not() -> None:
    """A forged later epoch is all that an optional secret lets somebody say, and it lasts until the node comes."""
    a = Node(1, secret=Secret(SECRET.key, required=False))
    a.peers.add_peer(2, ("127.0.0.1", 1))
    async with trio.open_nursery() as nursery:
        await nursery.start(a.run)
        forged, _ = await dial(a.peers.address, Hello("yard", 2, 1, 9, CONTROL), CONFIG, lambda theirs: None)
        assert a.peers.epoch_of(2) == 9 and not a.peers.known.known
        real, _ = await dial(a.peers.address, Hello("yard", 2, 1, 7, CONTROL), CONFIG, lambda _: None, None, SECRET.key)
        assert a.peers.epoch_of(2) == 7 and a.peers.known.known[2].epoch == 7
        with forged, real, trio.fail_after(5), suppress(OSError):
            assert not await forged.recv(1), "it is closed"
        nursery.cancel_scope.cancel()


async def test_two_secrets_and_a_plain_dialler_end_in_a_word_that_says_so() -> None:
    a = Node(1)
    a.peers.add_peer(2, ("127.0.0.1", 1))
    async with trio.open_nursery() as nursery:
        await nursery.start(a.run)
        hello = Hello("yard", 2, 1, 1, CONTROL)
        with pytest.raises(WrongIdentity, match="peer_secret_file has another secret"):
            await dial(a.peers.address, hello, CONFIG, lambda theirs: None, None, b"another secret, as long")
        with pytest.raises(WrongIdentity, match="give every node the same peer_secret_file"):
            await dial(a.peers.address, hello, CONFIG, lambda theirs: None)
        for wrong in (hello._replace(node=3), hello._replace(expected=2), hello._replace(cluster="other")):
            with pytest.raises(WrongIdentity, match=r"without proof: (this is|node 3 is no peer)"):
                await dial(a.peers.address, wrong, CONFIG, lambda theirs: None, None, SECRET.key)
        nursery.cancel_scope.cancel()


def test_a_proof_is_of_its_direction_its_pair_its_numbers_and_its_words() -> None:
    key = SECRET.key
    first = proof.ask("yard", 2, 1, BULK)
    second = proof.answer(key, first, proof.decode_challenge(first))
    proof.check_answer(key, first, second)
    dialler, listener = (Exchange(key, first, second, dialled=side) for side in (True, False))
    hello = encode_hello(Hello("yard", 2, 1, 3, BULK))[HEADER_BYTES:]
    section = dialler.seal(HELLO, hello)[HEADER_BYTES:]
    assert listener.open(section) == (HELLO, hello)
    with pytest.raises(WrongIdentity):
        dialler.open(section)
    for at in range(len(section)):
        damaged = bytearray(section)
        damaged[at] ^= 1
        with pytest.raises(WrongIdentity):
            listener.open(damaged)
    for words in (first, second):
        for at in range(len(words)):
            other = bytearray(words)
            other[at] ^= 1
            pair = (bytes(other), second) if words is first else (first, bytes(other))
            with pytest.raises(LogyardError):
                Exchange(key, *pair, dialled=False).open(section)
            with pytest.raises(LogyardError):
                proof.check_answer(key, *pair)
    with pytest.raises(WrongIdentity, match="the hello is node 3"):
        listener.require(Hello("yard", 3, 1, 3, BULK))


def test_the_bytes_of_a_proof() -> None:
    """A change here keeps out the nodes that run already."""
    key, nonces = b"0123456789abcdef", (bytes(range(32)), bytes(range(32, 64)))
    first = proof._encode(proof.Challenge("yard", 2, 1, BULK, nonces[0]))
    ours = proof.Challenge("yard", 1, 2, BULK, nonces[1])
    second = proof._encode(ours._replace(proof=proof.prove(key, proof.ANSWER, first + proof._encode(ours))))
    hello = encode_hello(Hello("yard", 2, 1, 3, BULK, 4, 5, 6))[HEADER_BYTES:]
    refused = encode_refused("no", OUTDATED)[HEADER_BYTES:]
    found = [
        proof.encode_challenge(first), proof.encode_challenge(second),
        Exchange(key, first, second, dialled=True).seal(HELLO, hello),
        Exchange(key, first, second, dialled=False).seal(REFUSED, refused),
    ]  # fmt: skip
    assert [data[5] for data in found] == [CHALLENGE, CHALLENGE, PROVED, PROVED]
    assert [hashlib.sha256(data).hexdigest()[:16] for data in found] == GOLDEN


GOLDEN = [
    "05822fc10a2a3212",
    "f701707bcadc8f40",
    "74e7a09c3ab541f0",
    "f23291ba2105a34f",
]


async def test_a_long_refusal_fits_beside_its_proof() -> None:
    mine, theirs = trio.socket.socketpair()
    exchange = Exchange(SECRET.key, proof.ask("yard", 2, 1, BULK), b"", dialled=False)
    with mine, theirs:
        await mine.send(exchange.seal(REFUSED, encode_refused("x" * 5000)[HEADER_BYTES:]))
        kind, section = await read_greeting(theirs, BULK, CONFIG)
        assert kind == PROVED and len(section) > 900
        await mine.send(encode_header(REFUSED, 0, b"", 0))
        assert await read_greeting(theirs, BULK, CONFIG) == (REFUSED, b"")


def test_a_directory_is_not_unsaid_and_an_epoch_is_one() -> None:
    known = Acquaintances()
    with pytest.raises(WrongIdentity, match="no node started"):
        known.meet(2, Origin(7, EPOCH_MAX + 1, 1, 1))
    assert not known.known
    known.meet(2, Origin(7, 3, 1, 1))
    assert "is not the one it had" in difference(known.known[2], Origin(0, 4, 1, 1))
    assert not difference(NOBODY, Origin(7, EPOCH_MAX, 1, 1))
    known.meet(2, Origin(7, 4, 2, 1), proved=False)
    assert known.known[2].epoch == 3
    with pytest.raises(WrongIdentity):
        known.meet(2, Origin(8, 4, 2, 1), proved=False)
    assert not known.outdated

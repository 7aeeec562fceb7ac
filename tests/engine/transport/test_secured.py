"""Lanes under mutual TLS over real sockets: who is let in, who is not and in which words."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import trio
import trio.testing

from logyard.engine.transport.frame import CONTROL, Hello
from logyard.engine.transport.link import dial
from logyard.protocol.errors import Refused
from logyard.protocol.tls import TlsConfig
from logyard.service.tls import Door, PeerGuard
from tests.service.certificates import Yard

from .recorder import append, make_entry, reply
from .test_peers import CONFIG, Node, cluster


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    return Yard(tmp_path_factory.mktemp("certificates"))


def guard(files: TlsConfig) -> PeerGuard:
    return PeerGuard(Door("tls", files))


def secured(yard: Yard, node: int, files: TlsConfig | None = None, **more: object) -> Node:
    return Node(node, cluster="fake", guard=guard(files or yard.node(node)), **more)  # type: ignore[arg-type]


async def test_three_nodes_talk_under_tls(yard: Yard) -> None:
    nodes = [secured(yard, node) for node in (1, 2, 3)]
    async with cluster(*nodes):
        for node in nodes:
            await node.until(lambda node=node: node.peers.live == {1, 2, 3})  # type: ignore[misc]
        body = random.Random(1).randbytes(20 << 20)
        entry = make_entry(5, 10, [body])
        nodes[0].peers.send([append(2, 5, [entry]), reply(2, 4), append(3, 6, []), reply(3, 4)])
        assert nodes[0].peers.send_blob(3, 7, 99, {"uid": 5}, [body[:5000], body[5000:900_000]])
        await nodes[1].until(lambda: len(nodes[1].recorder.messages) == 2, 20)
        await nodes[2].until(lambda: len(nodes[2].recorder.messages) == 2 and len(nodes[2].recorder.blobs) == 1, 20)
        (found,) = [m.entries[0] for _, m in nodes[1].recorder.messages if m.entries]
        assert b"".join(found.bodies or ()) == b"".join(entry.bodies or ())
        assert bytes(nodes[2].recorder.blobs[0][4]) == body[:900_000]
        assert not any(node.recorder.downs for node in nodes)


async def test_a_full_queue_under_tls_drops_whole_frames_and_goes_on(yard: Yard) -> None:
    config = replace(CONFIG, bulk_queue_bytes=1 << 20)
    a, b = secured(yard, 1, config=config), secured(yard, 2, config=config)
    async with cluster(a, b):
        entry = make_entry(5, 10, [bytes(900_000)])
        for _ in range(30):
            a.peers.send([append(2, 5, [entry])])
        assert a.peers.status()[0].dropped > 0
        await a.until(lambda: a.recorder.ups == [2, 2])
        assert b.recorder.ups == [1], "nothing was reset, and nothing arrived damaged"
        a.peers.send([append(2, 6, [])])
        await b.until(lambda: any(m.uid == 6 for _, m in b.recorder.messages))


BAD: list[tuple[Callable[[Yard], PeerGuard | None], str]] = [
    (lambda yard: None, "this port speaks TLS only"),
    (lambda yard: guard(yard.unknown_ca()), "unknown there|not accepted"),
    (lambda yard: guard(yard.client()), "for client alice of cluster 'fake', not for node 2"),
    (lambda yard: guard(yard.node(3)), "for node 3 of cluster 'fake', not for node 2"),
    (lambda yard: guard(yard.other_cluster(2)), "for node 92 of cluster 'other', not for node 2 of cluster 'fake'"),
    (lambda yard: guard(yard.expired_node(9)), "has expired"),
]


@pytest.mark.parametrize(("make", "words"), BAD)
async def test_who_is_refused_at_the_peer_port(
    yard: Yard, make: Callable[[Yard], PeerGuard | None], words: str, mock_clock: trio.testing.MockClock
) -> None:
    """Time stands still: no limit of the handshake is over before the refusal is told, and nobody dials again."""
    a = secured(yard, 1)
    wrong = Node(2, cluster="fake", guard=make(yard))
    async with trio.open_nursery() as nursery:
        await nursery.start(a.run)
        await nursery.start(wrong.run)
        a.peers.add_peer(2, wrong.peers.address)
        wrong.peers.add_peer(1, a.peers.address)
        while not (error := wrong.peers.status()[0].error):
            await trio.testing.wait_all_tasks_blocked(0.01)
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(error)
        assert "\n" not in error and not a.recorder.ups and not wrong.recorder.ups and a.peers.live == {1}
        nursery.cancel_scope.cancel()


async def test_a_dialler_refuses_a_port_that_is_not_the_node_it_wants(yard: Yard) -> None:
    """Node 2's address leads to a node that shows node 3's certificate, or speaks no TLS."""
    for other, words in ((secured(yard, 2, yard.node(3)), "for node 3"), (Node(2, cluster="fake"), "not speak TLS")):
        a = secured(yard, 1)
        async with trio.open_nursery() as nursery:
            await nursery.start(a.run)
            await nursery.start(other.run)
            other.peers.add_peer(1, a.peers.address)
            a.peers.add_peer(2, other.peers.address)
            with trio.fail_after(5):
                while words not in a.peers.status()[0].error:
                    await trio.testing.wait_all_tasks_blocked(0.01)
            assert not a.recorder.ups
            nursery.cancel_scope.cancel()


async def test_off_loopback_needs_the_guard(yard: Yard) -> None:
    hello = Hello("fake", 1, 2, 1, CONTROL)
    with pytest.raises(Refused, match=r"\[tls\] ca, certificate, key"):
        await dial(("192.0.2.1", 7), hello, CONFIG, lambda theirs: None)
    config = replace(CONFIG, handshake_timeout_ms=30)
    with pytest.raises((OSError, trio.TooSlowError)):
        await dial(("192.0.2.1", 7), hello, config, lambda theirs: None, guard(yard.node(1)))


@pytest.mark.parametrize("host", ["b\xfccher_1.example", "\u2603.example", "a\0b", "a..b"])
async def test_a_name_that_no_resolver_takes_is_a_peer_that_is_not_there(yard: Yard, host: str) -> None:
    """Every node of the cluster ended when it heard of it, and at each of its starts."""
    a, b = secured(yard, 1), secured(yard, 2)
    async with cluster(a, b):
        a.peers.add_peer(3, (host, 7000))
        with trio.fail_after(5):
            while "no name of a host" not in a.peers.status()[1].error:
                await trio.testing.wait_all_tasks_blocked(0.01)
        await a.until(lambda: a.recorder.ups == [2])

"""A flood of connections that say nothing, or nothing of use, on a peer port: who is a peer gets in all the same."""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing

from logyard.engine.transport.config import TransportConfig
from logyard.service.tls import Door, PeerGuard
from tests.service.certificates import Yard

from .test_peers import Node

AT_ONCE = 300
"""Connections that the flood opens every ten milliseconds: more than a port has places."""


def stands(sock: socket.socket) -> bool:
    """Whether the other side has not closed a connection."""
    try:
        return bool(sock.recv(1, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


async def flood(port: int, said: bytes) -> None:
    """Open connections without end, and give none up that has a place."""
    held: list[socket.socket] = []
    try:
        while True:
            for _ in range(AT_ONCE):
                held.append(socket.create_connection(("127.0.0.1", port)))
                held[-1].sendall(said)
            for one in [one for one in held if not stands(one)]:
                held.remove(one)
                one.close()
            await trio.sleep(0.01)
    finally:
        for one in held:
            one.close()


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    return Yard(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize("said", [b"", b"\x16"], ids=["silent", "one byte"])
@pytest.mark.parametrize("tls", [False, True])
async def test_a_restarted_node_is_in_within_two_seconds(
    yard: Yard, tls: bool, said: bytes, mock_clock: trio.testing.MockClock
) -> None:
    """The places of those who have not said who they are were given to who came first: to the flood, for 5 s each.

    Time passes when nobody has anything to do: 30,000 connections a second, however busy the machine is.
    """

    def node(number: int, epoch: int, address: tuple[str, int] = ("127.0.0.1", 0)) -> Node:
        guard = PeerGuard(Door("tls", yard.node(number))) if tls else None
        return Node(number, epoch=epoch, cluster="fake", guard=guard, config=TransportConfig(), address=address)

    # What the kernel carries from one socket to the other may take a moment where it has much to do.
    mock_clock.autojump_threshold = 0.02
    a, b = node(1, 1), node(2, 1)
    async with trio.open_nursery() as nursery:
        for one in (a, b):
            await nursery.start(one.run)
        a.peers.add_peer(2, b.peers.address)
        b.peers.add_peer(1, a.peers.address)
        await a.until(lambda: a.peers.live == {1, 2})
        await b.kill()
        await a.until(lambda: a.peers.live == {1})
        again = node(2, 2, b.peers.address)
        again.peers.add_peer(1, a.peers.address)
        nursery.start_soon(flood, a.peers.address[1], said)
        with trio.fail_after(5):
            while a.peers._listener.refused < 100:
                await trio.sleep(0.01)
        with trio.fail_after(2):
            await nursery.start(again.run)
            await a.until(lambda: a.peers.live == {1, 2})
        nursery.cancel_scope.cancel()

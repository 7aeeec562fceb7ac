"""A flood of connections that say nothing, or nothing of use, on a peer port: who is a peer gets in all the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from logyard.engine.transport.config import TransportConfig
from logyard.service.tls import Door, PeerGuard
from tests.service.certificates import Yard

from .test_peers import Node

FLOOD = """
import socket, sys
from collections import deque
address, said = ("127.0.0.1", int(sys.argv[1])), bytes.fromhex(sys.argv[2])
held = deque()
print("flooding", flush=True)
while True:
    try:
        sock = socket.create_connection(address, 1)
        if said:
            sock.sendall(said)
        held.append(sock)
    except OSError:
        pass
    if len(held) > 5000:
        held.popleft().close()
"""


@contextmanager
def flood(port: int, said: bytes) -> Iterator[None]:
    """A process that opens connections as fast as it can, and holds 5,000."""
    with subprocess.Popen([sys.executable, "-c", FLOOD, str(port), said.hex()], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"flooding\n"
            yield
            assert process.poll() is None
        finally:
            process.kill()


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    return Yard(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize("said", [b"", b"\x16"], ids=["silent", "one byte"])
@pytest.mark.parametrize("tls", [False, True])
async def test_a_restarted_node_is_in_within_two_seconds(yard: Yard, tls: bool, said: bytes) -> None:
    """The places of those who have not said who they are were given to who came first: to the flood, for 5 s each."""

    def node(number: int, epoch: int, address: tuple[str, int] = ("127.0.0.1", 0)) -> Node:
        guard = PeerGuard(Door("tls", yard.node(number))) if tls else None
        return Node(number, epoch=epoch, cluster="fake", guard=guard, config=TransportConfig(), address=address)

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
        with flood(a.peers.address[1], said):
            with trio.fail_after(5):
                while a.peers._listener.refused < 100:
                    await trio.sleep(0.01)
            begun = trio.current_time()
            await nursery.start(again.run)
            await a.until(lambda: a.peers.live == {1, 2})
            took = trio.current_time() - begun
        assert took < 2, f"{took:.1f} s"
        nursery.cancel_scope.cancel()

"""The door to the other nodes opens late: nobody hears what is said before, and then it is said by the transport."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from logyard.engine.transport.network import Network


def test_before_the_transport_is_there_nobody_is_told() -> None:
    network = Network({1})
    network.send([])
    assert not network.send_blob(2, 1, 0, {})
    assert not network.nodes and not network.status() and not network.is_talking() and not list(network.others())
    assert network.epoch_of(2) == network.digest_of(2) == 0


def test_then_the_transport_is_asked() -> None:
    live: set[int] = {1, 2}
    sent: list[Any] = []
    network = Network(live)

    def send_blob(*blob: Any) -> bool:
        sent.append(blob)
        return True

    say = network.send_blob
    peers: Any = SimpleNamespace(
        nodes=frozenset({2, 3}), send_blob=send_blob, vitals_of=lambda node: f"of {node}",
        status=lambda: [SimpleNamespace(up=False, queued=9), SimpleNamespace(up=True, queued=0)],
    )  # fmt: skip
    network.attach(peers)
    assert say(3, 7, 1, {"uid": 4}) and sent == [(3, 7, 1, {"uid": 4}, ())]
    assert network.nodes == {2, 3} and [node for node, _ in network.others()] == [2]
    assert not network.is_talking(), "what waits for a node that is gone does not leave any more"
    live.add(3)
    assert [node for node, _ in network.others()] == [2, 3]
    peers.status = lambda: [SimpleNamespace(up=True, queued=1)]
    assert network.is_talking()

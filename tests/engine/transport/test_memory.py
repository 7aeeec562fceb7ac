"""The in-memory twin: what the real transport promises, in virtual time and with faults on order."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from logyard.engine.transport.memory import MemoryNetwork, MemoryPeers
from logyard.protocol.errors import BadRequest

from .recorder import Recorder, append, entry_values, make_entry, reply, values


def build(count: int, seed: int = 0) -> tuple[MemoryNetwork, list[Recorder], list[MemoryPeers]]:
    network = MemoryNetwork(seed=seed)
    recorders = [Recorder() for _ in range(count)]
    nodes = [network.join(number + 1, recorder) for number, recorder in enumerate(recorders)]
    return network, recorders, nodes


def test_messages_go_through_the_codec_and_all_are_live() -> None:
    network, recorders, nodes = build(3)
    network.step(30)
    assert all(node.live == {1, 2, 3} for node in nodes)
    assert recorders[0].ups == [2, 3] and recorders[0].downs == []
    entry = make_entry(5, 10, [b"x" * 5000])
    sent = append(2, 5, [entry])
    nodes[0].send([sent, reply(2), reply(3)])
    assert not recorders[1].messages
    network.step()
    got = [m for _, m in recorders[1].messages]
    assert [m.kind for m in got] == [6, 5] and got[1] is not sent and values(got[1]) == values(sent)
    assert got[1].entries is not None and entry_values(got[1].entries[0]) == entry_values(entry)
    assert [node for node, _ in recorders[2].messages] == [1]


def test_blobs() -> None:
    network, recorders, nodes = build(2)
    assert nodes[0].send_blob(2, 4, 5, {"h": 1}, [b"a", b"b"])
    assert not nodes[0].send_blob(9, 4, 5, {})
    with pytest.raises(BadRequest, match="above its limit"):
        nodes[0].send_blob(2, 4, 5, {}, bytes(nodes[0].config.frame_bytes_max))
    network.step()
    (blob,) = recorders[1].blobs
    assert blob[:4] == (1, 4, 5, {"h": 1}) and bytes(blob[4]) == b"ab"


def test_a_one_way_link_is_dead_on_both_sides_and_heals_with_a_probe() -> None:
    network, recorders, nodes = build(2)
    network.step(50)
    network.partition([1], [2], one_way=True)
    network.step(150)
    assert nodes[0].live == {1} and nodes[1].live == {2}
    nodes[1].send([reply(1, 3)])
    nodes[0].send([reply(2, 4)])
    network.step()
    assert len(recorders[0].messages) == 1 and not recorders[1].messages
    assert recorders[0].ups == [2]
    network.heal()
    network.step(40)
    assert recorders[0].ups == [2, 2] and recorders[0].downs == [2] and recorders[1].ups == [1, 1]
    assert nodes[0].live == nodes[1].live == {1, 2}


def test_partition_isolates_one_of_three() -> None:
    network, _, nodes = build(3)
    network.step(50)
    network.partition([1], [2, 3])
    network.step(100)
    assert nodes[0].live == {1} and nodes[1].live == nodes[2].live == {2, 3}


def test_loss_ends_in_a_reset() -> None:
    network, recorders, nodes = build(2, seed=3)
    network.drop(1.0)
    nodes[0].send([reply(2)])
    network.step()
    assert network.lost > 0 and not recorders[1].messages
    network.heal()
    network.step(2)
    assert recorders[0].ups == [2] * len(recorders[0].ups) and len(recorders[0].ups) > 1
    assert recorders[1].downs and recorders[0].downs


def test_delay_counts_in_steps_and_keeps_the_order() -> None:
    network, recorders, nodes = build(2)
    network.delay(1, 2, 5)
    nodes[0].send([reply(2, 1)])
    network.delay(1, 2, 0)
    nodes[0].send([reply(2, 2)])
    network.step(4)
    assert not recorders[1].messages
    network.step()
    assert [m.uid for _, m in recorders[1].messages] == [1, 2]


def test_a_crash_is_noticed_sooner_than_silence_and_a_restart_is_seen() -> None:
    network, recorders, nodes = build(3)
    network.step(50)
    network.crash(2)
    assert recorders[0].downs == [2]
    network.step(20)
    assert nodes[0].live == nodes[2].live == {1, 3}
    again = network.join(2, Recorder())
    assert again.epoch == 2
    network.step(30)
    assert nodes[0].live == again.live == {1, 2, 3} and recorders[0].ups == [2, 3, 2]


def test_a_restart_at_once_is_seen_dead_once() -> None:
    network, recorders, _ = build(2)
    network.step(50)
    network.crash(2)
    network.join(2, Recorder())
    network.step(30)
    assert recorders[0].lives == [{1, 2}, {1}, {1, 2}]


def test_an_unhealthy_node_is_dead() -> None:
    network = MemoryNetwork()
    well = [True]
    own = network.join(1, Recorder())
    network.join(2, Recorder(), healthy=lambda: well[0])
    network.step(50)
    assert own.live == {1, 2}
    well[0] = False
    network.step(100)
    assert own.live == {1}


def test_peers_come_and_go() -> None:
    network = MemoryNetwork()
    recorder = Recorder()
    own = network.join(1, recorder, peers=[])
    other = network.join(2, Recorder(), peers=[1])
    assert not recorder.ups
    own.add_peer(2)
    assert recorder.ups == [2]
    network.step(30)
    assert own.live == other.live == {1, 2}
    own.remove_peer(2)
    assert own.live == {1} and recorder.downs == [2]
    assert not own.send_blob(2, 1, 1, {})


def test_the_same_seed_gives_the_same_run() -> None:
    def once() -> list[tuple[object, ...]]:
        network, recorders, nodes = build(3, seed=9)
        network.drop(0.3)
        for number in range(50):
            nodes[number % 3].send([reply(node, number) for node in (1, 2, 3) if node != number % 3 + 1])
            network.step()
        return [(node, *values(m)) for recorder in recorders for node, m in recorder.messages]

    assert once() == once()


async def test_run_delivers_at_once_and_keeps_the_time(autojump_clock: trio.testing.MockClock) -> None:
    network, recorders, nodes = build(2)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        for node in nodes:
            await nursery.start(node.run)
        nodes[0].send([reply(2)])
        begun = trio.current_time()
        await recorders[1].until(lambda: bool(recorders[1].messages))
        assert trio.current_time() == begun
        await recorders[0].until(lambda: nodes[0].live == {1, 2})
        await trio.sleep(60)
        assert recorders[0].lives == [{1, 2}] and abs(network.now - 60) < 0.5
        nursery.cancel_scope.cancel()
    assert not network.nodes, "cancelled nodes have crashed"

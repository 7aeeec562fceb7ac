"""Two and three `Peers` in one process, over real loopback sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.entry import verify_bodies
from logyard.engine.raft.messages import APPEND, LEADER_GONE, READ, Message
from logyard.engine.transport import frame
from logyard.engine.transport.config import TransportConfig
from logyard.engine.transport.frame import BULK, CONTROL, Hello
from logyard.engine.transport.link import Guard, dial
from logyard.engine.transport.peers import Peers
from logyard.engine.transport.proof import Exchange, Secret, answer, decode_challenge
from logyard.protocol.errors import BadRequest, Corrupt

from .recorder import Recorder, append, entry_values, make_entry, reply, values

CONFIG = TransportConfig(backoff_min_ms=10, backoff_max_ms=40, stable_ms=0)
LOCAL = ("127.0.0.1", 0)
SECRET = Secret(b"what nodes 1 to 3 share")


def prove_node(first: bytes) -> Exchange:
    """Answer a challenge as whoever is asked for."""
    return Exchange(SECRET.key, first, answer(SECRET.key, first, decode_challenge(first)), dialled=False)


class Node:
    """One node of a test: its recorder, its peers and the scope that ends it."""

    def __init__(
        self,
        node: int,
        *,
        epoch: int = 1,
        cluster: str = "yard",
        config: TransportConfig = CONFIG,
        address: tuple[str, int] = LOCAL,
        healthy: Callable[[], bool] = lambda: True,
        guard: Guard | None = None,
        secret: Secret | None = SECRET,
    ) -> None:
        self.recorder = Recorder()
        self.node = node
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.peers = Peers(
            node, cluster, epoch, {node: address}, config, self.recorder, healthy=healthy, guard=guard, secret=secret
        )

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        with self.scope:
            await self.peers.run(task_status)
        self.ended.set()

    async def kill(self) -> None:
        self.scope.cancel()
        await self.ended.wait()

    async def until(self, condition: Callable[[], bool], seconds: float = 5) -> None:
        await self.recorder.until(condition, seconds)


@asynccontextmanager
async def cluster(*nodes: Node) -> AsyncIterator[trio.Nursery]:
    """Run the nodes, introduce them to each other and wait until all links stand."""
    async with trio.open_nursery() as nursery:
        for node in nodes:
            await nursery.start(node.run)
        for node in nodes:
            for other in nodes:
                if other is not node:
                    node.peers.add_peer(other.node, other.peers.address)
        for node in nodes:
            await node.until(lambda node=node: len(set(node.recorder.ups)) == len(nodes) - 1)  # type: ignore[misc]
        yield nursery
        nursery.cancel_scope.cancel()


async def test_three_nodes_are_live_and_talk() -> None:
    nodes = [Node(1), Node(2), Node(3)]
    async with cluster(*nodes):
        for node in nodes:
            await node.until(lambda node=node: node.peers.live == {1, 2, 3})  # type: ignore[misc]
        entry = make_entry(5, 10, [b"small", b"large" * 2000])
        sent = [reply(2, 4), append(2, 5, [entry]), append(3, 5, [entry]), append(2, 6, []), reply(3, 4)]
        nodes[0].peers.send(sent)
        for node in nodes[1:]:
            want = [values(m) for m in sent if m.to == node.node]
            await node.until(lambda node=node, want=want: len(node.recorder.messages) == len(want))  # type: ignore[misc]
            got = [m for sender, m in node.recorder.messages if sender == m.sender == 1 and m.to == node.node]
            assert sorted(map(values, got)) == sorted(want)
            entries = [e for m in got for e in m.entries or ()]
            assert [entry_values(e) for e in entries] == [entry_values(entry)]
            verify_bodies(5, entries[0])
        assert [status.up for status in nodes[0].peers.status()] == [True, True]


async def test_live_is_one_set_changed_in_place_and_messages_to_strangers_are_dropped() -> None:
    a, b = Node(1), Node(2)
    live = a.peers.live
    async with cluster(a, b):
        await a.until(lambda: live == {1, 2})
        a.peers.send([reply(9), reply(2)])
        await b.until(lambda: len(b.recorder.messages) == 1)
        assert a.recorder.lives == [{1, 2}]


async def test_a_large_entry_goes_through_beside_renewals() -> None:
    a, b = Node(1), Node(2)
    async with cluster(a, b):
        await b.until(lambda: b.peers.live == {1, 2})
        body = bytes(20 << 20)
        entry = make_entry(5, 10, [body])
        a.peers.send([append(2, 5, [entry])])
        a.peers.send([reply(2, 1)])
        await b.until(lambda: len(b.recorder.messages) == 2, 10)
        message = next(m for _, m in b.recorder.messages if m.entries)
        assert message.entries is not None and message.entries[0].body_bytes > 20 << 20
        verify_bodies(5, message.entries[0])
        assert b.recorder.lives == [{1, 2}] and a.recorder.lives == [{1, 2}] and not b.recorder.downs


async def test_blobs_on_both_lanes() -> None:
    a, b = Node(1), Node(2)
    async with cluster(a, b):
        assert a.peers.send_blob(2, 7, 99, {"uid": 5}, [b"x" * 300_000, b"y"])
        assert a.peers.send_blob(2, 8, 100, b"\x80", b"raw", control=True)
        assert not a.peers.send_blob(3, 8, 100, {})
        # The other side would cut the connection, and the next one.
        for size, control in ((a.peers.config.frame_bytes_max, False), (a.peers.config.control_frame_bytes, True)):
            with pytest.raises(BadRequest, match="above its limit"):
                a.peers.send_blob(2, 7, 99, {}, bytes(size), control=control)
        await b.until(lambda: len(b.recorder.blobs) == 2)
        found, small = sorted(b.recorder.blobs, key=lambda blob: blob[1])
        assert small[:4] == (1, 8, 100, {}) and bytes(small[4]) == b"raw"
        assert found[0] == 1 and found[3] == {"uid": 5} and found[2] == 99 and bytes(found[4]) == b"x" * 300_000 + b"y"


async def test_a_killed_node_is_dead_soon_and_alive_after_its_restart() -> None:
    # A node that is merely silent is not dead within this test.
    a, b, c = Node(1, config=replace(CONFIG, liveness_timeout_ms=60_000)), Node(2), Node(3)
    async with cluster(a, b, c) as nursery:
        await a.until(lambda: a.peers.live == {1, 2, 3})
        address = b.peers.address
        await b.kill()
        await a.until(lambda: a.peers.live == {1, 3})
        assert 2 in a.recorder.downs
        ups = a.recorder.ups.count(2)
        again = Node(2, epoch=2, address=address)
        again.peers.add_peer(1, a.peers.address)
        again.peers.add_peer(3, c.peers.address)
        await nursery.start(again.run)
        await a.until(lambda: a.peers.live == {1, 2, 3} and a.recorder.ups.count(2) == ups + 1)
        again.peers.send([reply(1, 77)])
        await a.until(lambda: any(m.uid == 77 for _, m in a.recorder.messages))


async def test_a_node_that_restarts_at_once_is_seen_dead_once() -> None:
    """Its groups have lost their leader even if no timeout passed in between."""
    a, b = Node(1), Node(2)
    async with cluster(a, b) as nursery:
        await a.until(lambda: a.peers.live == {1, 2})
        address = b.peers.address
        await b.kill()
        again = Node(2, epoch=2, address=address)
        again.peers.add_peer(1, a.peers.address)
        await nursery.start(again.run)
        await a.until(lambda: a.recorder.lives == [{1, 2}, {1}, {1, 2}])


async def test_a_process_of_an_older_epoch_is_refused() -> None:
    a, b = Node(1), Node(2, epoch=5)
    async with cluster(a, b) as nursery:
        old = Node(2, epoch=4)
        old.peers.add_peer(1, a.peers.address)
        await nursery.start(old.run)
        with trio.fail_after(5):
            while "before 5" not in old.peers.status()[0].error:
                await trio.testing.wait_all_tasks_blocked(0.01)
        assert not old.recorder.ups and a.recorder.downs == []


async def test_other_clusters_nodes_and_strangers_are_refused() -> None:
    a = Node(1)
    for wrong in (Node(2, cluster="other"), Node(3), Node(2)):
        async with trio.open_nursery() as nursery:
            await nursery.start(a.run)
            await nursery.start(wrong.run)
            a.peers.add_peer(2, wrong.peers.address)
            # The last one believes to talk to node 4.
            wrong.peers.add_peer(4 if wrong.node == 2 and wrong.peers.cluster_id == "yard" else 1, a.peers.address)
            with trio.fail_after(5):
                while "not node" not in (error := wrong.peers.status()[0].error) and "no peer" not in error:
                    await trio.testing.wait_all_tasks_blocked(0.01)
            assert not a.recorder.ups and not wrong.recorder.ups and a.peers.live == {1}
            nursery.cancel_scope.cancel()
        a = Node(1)


async def test_reconnects_after_an_abrupt_close_and_probes_again() -> None:
    a, b = Node(1), Node(2)
    async with cluster(a, b):
        await a.until(lambda: a.peers.live == {1, 2})
        for peer, link in ((1, BULK), (2, CONTROL)):
            own, other = (b, a) if peer == 1 else (a, b)
            ups = (len(a.recorder.ups), len(b.recorder.ups))
            own.peers._peers[peer].links[link].reset("test")
            await a.until(lambda ups=ups: len(a.recorder.ups) > ups[0])  # type: ignore[misc]
            await b.until(lambda ups=ups: len(b.recorder.ups) > ups[1])  # type: ignore[misc]
            assert other.node in own.recorder.downs and own.node in other.recorder.downs
        a.peers.send([reply(2, 1), append(2, 2, [])])
        await b.until(lambda: len(b.recorder.messages) == 2)
        assert a.recorder.lives == b.recorder.lives == [{1, 2}], "a short break is no death"


async def test_a_damaged_frame_costs_its_connection_and_nothing_else() -> None:
    a, b = Node(1), Node(2)
    async with cluster(a, b):
        bad = bytearray(frame.encode_renewal(frame.Renewal(1, 1, 1, 1, 1)))
        bad[-1] ^= 1
        assert a.peers._peers[2].links[CONTROL].send([bytes(bad)])
        await b.until(lambda: len(b.recorder.ups) == 2)
        await a.until(lambda: len(a.recorder.ups) == 2)
        a.peers.send([reply(2)])
        await b.until(lambda: len(b.recorder.messages) == 1)


async def test_a_second_connection_of_the_same_peer_replaces_the_first() -> None:
    a, b = Node(1), Node(2)
    async with cluster(a, b):
        hello = Hello("yard", 1, 2, 1, BULK)
        sock, _ = await dial(b.peers.address, hello, CONFIG, lambda theirs: None, None, SECRET.key)
        await b.until(lambda: b.recorder.downs == [1])
        sock.close()
        await b.until(lambda: b.recorder.ups == [1, 1])


async def test_an_unhealthy_node_is_dead_though_its_links_stand() -> None:
    well = [True]
    a, b = Node(1), Node(2, healthy=lambda: well[0])
    async with cluster(a, b):
        await a.until(lambda: a.peers.live == {1, 2})
        well[0] = False
        await a.until(lambda: a.peers.live == {1})
        assert not a.recorder.downs and b.peers.live == {1, 2}
        well[0] = True
        await a.until(lambda: a.peers.live == {1, 2})


async def test_removed_peers_are_refused_until_they_are_added_again() -> None:
    a, b = Node(1), Node(2)
    async with cluster(a, b):
        await a.until(lambda: a.peers.live == {1, 2})
        a.peers.remove_peer(2)
        assert a.peers.live == {1} and a.recorder.downs == [2]
        await b.until(lambda: b.recorder.downs == [1])
        with trio.fail_after(5):
            while "node 2 is no peer of node 1 any more: it was removed" not in b.peers.status()[0].error:
                await trio.testing.wait_all_tasks_blocked(0.01)
        a.peers.add_peer(2, b.peers.address)
        await a.until(lambda: a.recorder.ups == [2, 2] and a.peers.live == {1, 2})


async def test_a_full_bulk_queue_ends_in_a_probe() -> None:
    config = replace(CONFIG, bulk_queue_bytes=1 << 20)
    a, b = Node(1, config=config), Node(2, config=config)
    async with cluster(a, b):
        entry = make_entry(5, 10, [bytes(900_000)])
        for _ in range(30):
            a.peers.send([append(2, 5, [entry])])
        status = a.peers.status()[0]
        assert status.dropped > 0 and status.queued <= 1 << 20
        await a.until(lambda: a.recorder.ups == [2, 2] and a.recorder.downs == [2])
        assert b.recorder.ups == [1], "nothing was reset: only the sender probes"
        a.peers.send([append(2, 6, [])])
        await b.until(lambda: any(m.uid == 6 for _, m in b.recorder.messages))


async def test_a_farewell_comes_behind_the_appends_and_never_gets_lost_alone() -> None:
    """Where it overtook them a follower took them for word of a leader that was none, and waited for it for good."""
    config = replace(CONFIG, bulk_queue_bytes=1 << 20)
    a, b = Node(1, config=config), Node(2, config=config)
    async with cluster(a, b):
        farewell = Message(LEADER_GONE, 5, 2, 1, 1)
        a.peers.send([append(2, 5, [make_entry(5, number, [bytes(60_000)])]) for number in range(10, 20)])
        a.peers.send([farewell])
        await b.until(lambda: len(b.recorder.messages) == 12)
        kinds = [m.kind for _, m in b.recorder.messages]
        assert kinds.count(APPEND) == 10 and kinds[-1] == LEADER_GONE and not b.recorder.downs
        entry = make_entry(5, 20, [bytes(900_000)])
        for _ in range(30):
            a.peers.send([append(2, 5, [entry])])
        assert a.peers.status()[0].dropped and not b.recorder.downs
        # Only who trusts can ask whether that is right: it has to see that something is lost.
        a.peers.send([farewell])
        await b.until(lambda: b.recorder.downs == [1] and b.recorder.ups == [1, 1])


async def test_a_farewell_is_the_last_word_on_both_lanes() -> None:
    """Where it overtook a READ, that passed for word of a leader that was none as well."""
    a, b = Node(1), Node(2)
    async with cluster(a, b):
        for uid in range(1, 21):
            a.peers.send([Message(READ, uid, 2, 1, 1, context=4), Message(LEADER_GONE, uid, 2, 1, 1)])
        await b.until(lambda: len(b.recorder.messages) == 60)
        for uid in range(1, 21):
            assert [m.kind for _, m in b.recorder.messages if m.uid == uid][-1] == LEADER_GONE


async def test_a_node_that_is_removed_while_it_answers_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Node(1), Node(2)
    met = trio.Event()

    async def removed_meanwhile(address: Any, hello: Hello, config: Any, meet: Any, *more: Any) -> Any:
        def late(theirs: Hello) -> None:
            if hello.node == 1:
                a.peers.remove_peer(theirs.node)
                met.set()
            meet(theirs)

        return await dial(address, hello, config, late, *more)

    monkeypatch.setattr("logyard.engine.transport.peers.dial", removed_meanwhile)
    async with trio.open_nursery() as nursery:
        for node in (a, b):
            await nursery.start(node.run)
        b.peers.add_peer(1, a.peers.address)
        a.peers.add_peer(2, b.peers.address)
        with trio.fail_after(5):
            await met.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert a.peers.nodes == frozenset()
        nursery.cancel_scope.cancel()


async def test_what_the_handler_refuses_costs_its_connection() -> None:
    class Refusing(Recorder):
        def on_messages(self, node: int, messages: list[Message]) -> None:
            super().on_messages(node, messages)
            if len(self.messages) == 1:
                raise Corrupt("entry", 0, "a hash", "another")

    a, b = Node(1), Node(2)
    b.recorder = b.peers._handler = Refusing()
    async with cluster(a, b):
        a.peers.send([reply(2)])
        await a.until(lambda: a.recorder.ups == [2, 2])
        await b.until(lambda: b.recorder.ups == [1, 1])
        a.peers.send([reply(2)])
        await b.until(lambda: len(b.recorder.messages) == 2)


async def test_a_handler_that_raises_is_this_nodes_bug() -> None:
    class Raising(Recorder):
        def on_messages(self, node: int, messages: list[Message]) -> None:
            raise OSError("handler")

    a, b = Node(1), Node(2)
    b.peers._handler = Raising()
    caught = []
    try:
        async with cluster_of_two(a, b):
            a.peers.send([reply(2)])
            with trio.fail_after(5):
                await trio.sleep_forever()
    except* AssertionError as group:
        caught.append(group)
    assert caught and "handler raised" in repr(caught[0].exceptions)


@asynccontextmanager
async def cluster_of_two(a: Node, b: Node) -> AsyncIterator[None]:
    """As `cluster`, watched from `a` alone."""
    async with trio.open_nursery() as nursery:
        for node in (a, b):
            await nursery.start(node.run)
        a.peers.add_peer(2, b.peers.address)
        b.peers.add_peer(1, a.peers.address)
        await a.until(lambda: a.recorder.ups == [2])
        yield


async def test_followers_of_one_turn_share_an_encoding_only_when_they_are_sent_the_same() -> None:
    nodes = [Node(1), Node(2), Node(3)]
    async with cluster(*nodes):
        shared, other = [make_entry(5, 10, [b"one"])], [make_entry(6, 20, [b"two"])]
        first, second = append(2, 5, shared), append(3, 5, shared)
        first.entries = second.entries = shared
        nodes[0].peers.send([first, second])
        for node in nodes[1:]:
            await node.until(lambda node=node: len(node.recorder.messages) == 1)  # type: ignore[misc]
        # As many messages, and other ones: of another group, or without entries.
        sent = [append(2, 5, shared), append(2, 5, []), append(3, 6, other), append(3, 6, [])]
        sent[0].entries, sent[2].entries = shared, other
        nodes[0].peers.send(sent)
        for node in nodes[1:]:
            await node.until(lambda node=node: len(node.recorder.messages) == 3)  # type: ignore[misc]
            want = [values(m) for m in [first, second, *sent] if m.to == node.node]
            assert [values(m) for _, m in node.recorder.messages] == want
            assert all(m.to == node.node for _, m in node.recorder.messages)

"""Queues over sockets on real engines: publish, consume, settle; leaders, consumers and connections that go."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from logyard.client import errors, queue_sync, sync
from logyard.client.aio import Yard, connect
from logyard.client.queue import Consumer, Message, Queue
from logyard.client.sequences import WINDOW
from logyard.client.sync import connect_sync
from logyard.machines import queue as machines
from logyard.protocol import queue as queue_wire
from logyard.protocol.errors import NotLeader, SessionExpired, Unknown
from logyard.protocol.queue import NotHeld
from logyard.service.cli.output import Terminated
from logyard.service.cli.root import cli
from logyard.service.door import pushes
from logyard.service.door.pushes import Listener
from tests.engine.host.cluster import Cluster, cluster, until

from .test_exactly_once import Doors


@asynccontextmanager
async def served(
    path: Path, count: int = 1, limits: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Cluster, Doors, Yard]]:
    async with cluster(path, count, group="", **(limits or {})) as run, trio.open_nursery() as nursery:
        await until(lambda: all(len(one.system.live) == count for one in run.nodes.values()), "all are live")
        await run.nodes[1].create_groups([{"name": "q", "members": run.ids, "machine": "queue", "arguments": options}])
        await run.leader("q")
        doors = Doors(run, nursery)
        for number in run.ids:
            await doors.open(number)
        async with connect(list(doors.addresses.values())) as yard:
            yield run, doors, yard
        nursery.cancel_scope.cancel()


def machine_of(run: Cluster, number: int) -> machines.Queue:
    machine = run.member(number, "q").machine
    assert isinstance(machine, machines.Queue)
    return machine


async def following(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    with trio.fail_after(20):
        while len(found) < count:
            found.append(await consumer.__anext__())
    return found


async def test_what_is_published_comes_in_order_and_is_gone_when_acknowledged(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, _, yard):
        queue = yard.queue("q")
        large = bytes(range(256)) * 1024
        ids = [await queue.publish(b"one", metadata=b"first"), await queue.publish(large), await queue.publish(None)]
        ids += await queue.publish_many([(b"m%d" % number, b"b" * number) for number in range(50)])
        assert ids == list(range(1, 54))
        assert (await queue.stats())["ready"] == 53
        async with queue.consume() as consumer:
            found = await following(consumer, 53)
            assert [one.id for one in found] == ids and [one.tag for one in found] == ids
            assert (found[0].metadata, found[0].body) == (b"first", b"one")
            assert found[1].body == large and found[2].body is None
            assert [(one.metadata, one.body) for one in found[3:]] == [(b"m%d" % n, b"b" * n) for n in range(50)]
            await consumer.ack(found[10], multiple=True)
            for one in found[11:]:
                consumer.ack_nowait(one)
        stats = await queue.stats()
        assert stats["ready"] == stats["unacked"] == stats["consumers"] == 0 and stats["acknowledged"] == 53
        member = run.member(1, "q")
        assert not list(member.machine.live_refs())
        assert not list(member.liveness.live_ranges(machine_of(run, 1).state.last_index)), "nor of commands"


async def test_publications_of_different_callers_do_not_share_a_refusal(tmp_path: Path) -> None:
    """They shared a frame, which is taken as a whole or not at all."""
    full: list[str] = []

    async def publish(queue: Queue) -> None:
        try:
            await queue.publish(b"m")
        except errors.LogyardError as error:
            full.append(error.code)

    async with served(tmp_path, max_length=10, overflow="reject") as (_, _, yard):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(publish, yard.queue("q"))
        assert full == ["queue_full"] * 10 and (await yard.queue("q").stats())["ready"] == 10


def bodies(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def drain(consumer: Consumer, wanted: int, found: list[Message]) -> None:
    """Acknowledge what comes, until so many different messages were seen."""
    with trio.fail_after(40):
        while len({one.id for one in found}) < wanted:
            message = await consumer.__anext__()
            found.append(message)
            consumer.ack_nowait(message)


async def test_killed_leaders_lose_and_double_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, 3) as (run, doors, yard):
        queue = yard.queue("q")
        ids: list[int] = []
        found: list[Message] = []

        async def publish() -> None:
            for number in range(300):
                ids.append(await queue.publish(b"%d" % number))

        async with trio.open_nursery() as nursery, queue.consume(prefetch=10) as consumer:
            nursery.start_soon(publish)
            for seen in (60, 140, 220):
                await drain(consumer, seen, found)
                leader = await run.leader("q")
                await doors.crash(leader)
                await run.leader("q")
                await doors.start(leader)
            await drain(consumer, 300, found)
        assert sorted(ids) == [one.id for one in found] == list(range(1, 301)), (
            "in order, once each, for it never let go"
        )
        assert [one.body for one in found] == bodies(300) and not any(one.deliveries for one in found)
        await queue.publish_many([(b"", b"left")] * 3)
        await run.applied("q")
        members = [run.member(number, "q") for number in run.ids]
        assert len({machine_of(run, number).snapshot()["queue"] for number in run.ids}) == 1
        last = machine_of(run, 1).state.last_index
        assert len({member.liveness.encode_live_set(last) for member in members}) == 1, "live sets are equal"
        for member in members:
            (claim,) = member.machine.live_refs()
            (live,) = member.liveness.live_ranges(last)
            assert claim.first == live.first == (last, 0) and claim.end == (last, 3)


async def test_what_a_killed_consumer_held_goes_to_another_in_order(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, _, yard):
        queue = yard.queue("q")
        await queue.publish_many([(b"", body) for body in bodies(20)])
        async with queue.consume(prefetch=8) as first:
            held = await following(first, 8)
            await first.ack(held[2])
            async with queue.consume(prefetch=5) as second:
                assert [one.id for one in await following(second, 5)] == [10, 11, 12, 13, 14]
                # As the leader does when it heard nothing of its client for the session's time.
                await run.nodes[1].close_session("q", first.id)
                with trio.fail_after(20), pytest.raises(errors.SessionExpired):
                    while True:
                        await first.__anext__()
                await second.credit(40)
                rest = await following(second, 14)
                assert [one.id for one in rest] == [1, 2, 4, 5, 6, 7, 8, 9, 15, 16, 17, 18, 19, 20]
                assert [one.deliveries for one in rest] == [1] * 8 + [0] * 6
                assert (await queue.stats())["unacked"] == 19


async def test_an_expired_lease_gives_the_message_to_somebody_else_and_a_late_ack_takes_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, yard):
        queue = yard.queue("q")
        await queue.publish(b"slow")
        async with queue.consume(prefetch=1, lease=1.0) as slow, queue.consume(priority=-1) as other:
            (mine,) = await following(slow, 1)
            await slow.credit(0)
            (theirs,) = await following(other, 1)
            assert (theirs.id, theirs.deliveries) == (mine.id, 1)
            with pytest.raises(NotHeld) as late:
                await slow.ack(mine)
            assert late.value.code == "not_held" and (late.value.settled, late.value.missed) == (0, 1)
            assert (await queue.stats())["unacked"] == 1, "it is the other's"
            assert await slow.extend(mine) == 0 and await other.extend(theirs) == 1
            assert await other.ack(theirs) == 1
        assert (await queue.stats())["acknowledged"] == 1


@pytest.mark.parametrize("blocks", [False, True])
async def test_any_number_of_leases_begins_anew(tmp_path: Path, blocks: bool) -> None:
    count = 2 * queue_wire.RANGES_MAX + 2

    def blocking(servers: list[str]) -> None:
        with connect_sync(servers) as yard, yard.queue("q").consume(prefetch=count) as consumer:
            found = [consumer.get(20.0) for _ in range(count)]
            held = [one for one in found[::2] if one is not None]
            assert consumer.extend(*held) == len(held) > queue_wire.RANGES_MAX
            assert consumer.extend() == 0

    async with served(tmp_path) as (_, doors, yard):
        queue = yard.queue("q")
        await queue.publish_many([(b"", None)] * count)
        if blocks:
            await trio.to_thread.run_sync(blocking, list(doors.addresses.values()))
            return
        async with queue.consume(prefetch=count) as consumer:
            held = (await following(consumer, count))[::2]
            assert await consumer.extend(*held) == len(held) > queue_wire.RANGES_MAX
            assert await consumer.extend() == 0


async def test_leaving_a_consumer_that_ended_tells_what_was_settled_in_vain(tmp_path: Path) -> None:
    async def ended(consumer: Consumer) -> Message:
        """Return a message of a consumer whose session is over."""
        message = await consumer.__anext__()
        await run.nodes[1].close_session("q", consumer.id)
        with pytest.raises(errors.SessionExpired):
            await consumer.__anext__()
        return message

    async with served(tmp_path) as (run, _, yard):
        queue = yard.queue("q")
        await queue.publish(b"m")
        with trio.fail_after(20):
            async with queue.consume() as consumer:
                await ended(consumer)
            with pytest.raises(errors.SessionExpired):
                async with queue.consume() as consumer:
                    consumer.ack_nowait(await ended(consumer))
            with pytest.raises(ZeroDivisionError):
                async with queue.consume() as consumer:
                    consumer.ack_nowait(await ended(consumer))
                    raise ZeroDivisionError
        assert (await queue.stats())["acknowledged"] == 0


async def test_lost_deliveries_are_noticed_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = Listener.push, 0

    def unreliable(self: Listener, uid: int, session: int, header: Any, body: Any) -> bool:
        nonlocal count
        if header["kind"] == "records":
            count += 1
            if count % 3 == 1:
                self.dropped += 1
                return False
        return real(self, uid, session, header, body)

    monkeypatch.setattr(Listener, "push", unreliable)
    monkeypatch.setattr(pushes, "ALIVE_S", 0.02)
    async with served(tmp_path) as (_, _, yard):
        queue = yard.queue("q")
        found: list[Message] = []
        async with queue.consume(prefetch=3) as consumer:
            for number in range(60):
                await queue.publish(b"%d" % number)
            await drain(consumer, 60, found)
        assert [one.body for one in found] == bodies(60) and count > 20


async def test_a_cut_connection_is_taken_up_where_it_was(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, doors, yard):
        queue = yard.queue("q")
        found: list[Message] = []
        await queue.publish_many([(b"", body) for body in bodies(100)])
        async with queue.consume(prefetch=30) as consumer:
            for seen in (10, 50, 90):
                await drain(consumer, seen, found)
                await doors.cut(1)
            await drain(consumer, 100, found)
        assert [one.body for one in found] == bodies(100)
        assert (await queue.stats())["acknowledged"] == 100


async def test_a_blocking_consumer_does_the_same(tmp_path: Path) -> None:
    async with served(tmp_path, 3, delivery_limit=2) as (run, doors, _):
        addresses = list(doors.addresses.values())
        seen: list[int] = []

        def work() -> None:
            with connect_sync(addresses) as yard:
                queue = yard.queue("q")
                assert queue.publish(b"late", delay=3600) == 1 and queue.cancel(1, 77) == 1
                assert queue.publish_many([(b"m", body) for body in bodies(40)]) == range(2, 42)
                assert queue.publish_many([(b"", b"x")] * 3, publisher=7, sequence=1) == range(42, 45)
                assert queue.publish_many([(b"", b"x")] * 4, publisher=7, sequence=1) == range(45, 46)
                with queue.consume(prefetch=10, lease=30) as consumer:
                    for message in consumer:
                        seen.append(message.id)
                        if message.id == 5:
                            consumer.nack(message)
                        elif message.id == 6:
                            consumer.reject(message)
                        else:
                            consumer.ack(message)
                        if len(seen) == 45:
                            break
                    assert consumer.get(0.01) is None
                stats = queue.stats()
                assert (stats["ready"], stats["unacked"], stats["dead"], stats["acknowledged"]) == (0, 0, 2, 42)
                with queue.consume(dead=True) as letters:
                    found = [letters.get(10), letters.get(10)]
                    assert [(one.id, one.reason) for one in found if one] == [(6, "rejected"), (5, "delivery_limit")]
                assert queue.purge(dead=True) == 2

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, work)
            await until(lambda: len(seen) > 10, "it consumes")
            leader = await run.leader("q")
            await doors.crash(leader)
            await run.leader("q")
            await doors.start(leader)
        assert sorted(set(seen)) == list(range(2, 46)) and seen.count(5) == 2


async def test_a_blocking_consumer_that_is_closed_while_nobody_answers_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "END_S", 0.2)
    async with served(tmp_path, 1) as (_, doors, _):
        addresses = list(doors.addresses.values())

        gone = threading.Event()
        consumers: list[Any] = []

        def consume() -> None:
            with connect_sync(addresses, timeout=1.0) as yard:
                # What it settled can't be told any more, which may be said.
                with suppress(errors.LogyardError), yard.queue("q").consume() as consumer:
                    consumers.append(consumer)
                    assert gone.wait(20.0)
                consumer._thread.join(20.0)
                assert not consumer._thread.is_alive()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, consume)
            await until(lambda: consumers and consumers[0]._connection is not None, "it listens")
            await doors.crash(1)
            gone.set()


async def test_a_queue_that_nobody_uses_deletes_itself(tmp_path: Path) -> None:
    async with served(tmp_path, 3, expires_ms=2000) as (run, _, yard):
        queue = yard.queue("q")
        await queue.publish(b"for nobody")
        await until(lambda: not any("q" in one.system.names for one in run.nodes.values()), "gone on every node")


async def test_a_queue_that_was_never_used_deletes_itself_too(tmp_path: Path) -> None:
    async with served(tmp_path, expires_ms=100) as (run, _, _):
        await until(lambda: "q" not in run.system(1).names, "gone")


async def test_an_hour_of_requeuing_grows_nothing(tmp_path: Path) -> None:
    limits = {"snapshot_entries": 32, "delivery_queue_bytes": 1 << 20}
    async with served(tmp_path, 1, limits, delivery_limit=0, lease_ms=9_000) as (run, _, yard):
        queue, system, member = yard.queue("q"), run.system(1), run.member(1, "q")
        ahead = 0
        wall, monotonic = system.clocks.wall_ns, system.clocks.monotonic_ns
        monkey = {"wall_ns": lambda: wall() + ahead, "monotonic_ns": lambda: monotonic() + ahead}
        for name, clock in monkey.items():
            setattr(system.clocks, name, clock)
        await queue.publish_many([(b"", bytes([number]) * 50_000) for number in range(3)])
        sizes: list[int] = []
        began = member.log_time
        async with queue.consume() as consumer:
            for turn in range(360):
                messages = await following(consumer, 3)
                assert [one.id for one in messages] == [1, 2, 3] and messages[0].deliveries == turn
                if turn % 2:
                    await consumer.nack(messages[2], multiple=True)
                else:
                    # Nobody settles it: its lease ends.
                    ahead += 20_000_000_000
                if turn in (90, 359):
                    await until(lambda: member.snapshot_index > member.raft.applied - 100, "snapshots are taken")
                    await run.nodes[1].snapshot()
                    await run.roll(1)
                    await run.nodes[1].compact()
                    sizes.append(sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file()))
                    assert member.raft.log.last_index - member.raft.log.memory_first < 100, "the log is short"
                    assert (
                        len(member.machine.snapshot()["queue"]) < 1000
                        and len(member.liveness.encode_live_set(1 << 40)) < 200
                    )
        assert member.log_time - began >= 3_600_000, "an hour of log time"
        assert sizes[1] <= sizes[0] + (2 << 20), f"a WAL file more or less: {sizes}"


async def test_a_member_that_came_by_snapshot_leads_on(tmp_path: Path) -> None:
    async with served(tmp_path, 3, {"snapshot_entries": 16}) as (run, doors, yard):
        queue = yard.queue("q")
        late = 1 + await run.leader("q") % 3
        await doors.crash(late)
        async with queue.consume(prefetch=8) as consumer:
            for number in range(60):
                await queue.publish(b"%d" % number * 2000)
            messages = await following(consumer, 8)
            for message in (messages[0], messages[3]):
                await consumer.ack(message)
            await queue.publish(b"later", delay=3600)
            for number in run.nodes:
                await run.nodes[number].snapshot()
                await run.nodes[number].compact()
            await doors.start(late)
            await run.applied("q")
            assert run.member(late, "q").snapshot_index > 0
            await run.lead(late, "q")
            messages += await following(consumer, 2)
            await consumer.ack(messages[-1], multiple=True)
            messages += await following(consumer, 8)
        assert [one.body for one in messages] == [b"%d" % number * 2000 for number in range(18)]
        stats = await queue.stats()
        assert (stats["acknowledged"], stats["ready"], stats["delayed"]) == (10, 50, 1)


async def test_a_queue_sleeps_with_its_consumer_and_wakes_for_it(tmp_path: Path) -> None:
    async with served(tmp_path, 3, {"hibernate_after_ms": 50}) as (run, _, yard):
        queue = yard.queue("q")
        async with queue.consume() as consumer:
            for number in range(2):
                await until(
                    lambda: all(run.system(one).names["q"] in run.system(one).quiescence.table for one in run.nodes),
                    "it sleeps",
                )
                await queue.publish(b"%d" % number)
                (message,) = await following(consumer, 1)
                assert message.body == b"%d" % number
                await consumer.ack(message)
            await queue.publish(b"in a moment", delay=0.4)
            (message,) = await following(consumer, 1)
            await consumer.ack(message)


async def test_a_restarted_node_delivers_what_was_held(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, doors, yard):
        queue = yard.queue("q")
        found: list[Message] = []
        await queue.publish_many([(b"head%d" % number, body * 900) for number, body in enumerate(bodies(40))])
        async with queue.consume(prefetch=20) as consumer:
            await drain(consumer, 15, found)
            await doors.crash(1)
            await doors.start(1)
            await drain(consumer, 40, found)
        assert [one.body for one in found] == [body * 900 for body in bodies(40)]


async def test_a_history_with_dying_consumers_and_leaders_is_total(tmp_path: Path) -> None:
    """Everything confirmed is consumed; what was acknowledged for good never comes again."""
    draw = random.Random(6)
    async with served(tmp_path, 3, delivery_limit=0) as (run, doors, yard):
        queue = yard.queue("q")
        confirmed: set[int] = set()
        # Whose acknowledgement was sent, and whose answer came: the answer of one may be lost with a session.
        sent: set[int] = set()
        settled: set[int] = set()
        again: list[int] = []

        async def publish() -> None:
            for number in range(60):
                priority = draw.choice(("normal", "high"))
                confirmed.update(await queue.publish_many([(b"", b"%d" % number)] * 5, priority=priority))

        async def is_done() -> bool:
            return len(sent) == 300 and (len(settled) == 300 or (await queue.stats())["acknowledged"] == 300)

        async def consume(number: int) -> None:
            while not await is_done():
                dies = draw.random() < 0.3
                try:
                    async with queue.consume(prefetch=draw.randint(1, 20), priority=number % 2) as consumer:
                        for _ in range(draw.randint(5, 40)):
                            message = await consumer.get(0.05)
                            if message is None:
                                break
                            again.extend({message.id} & settled)
                            if draw.random() < 0.1:
                                await consumer.nack(message)
                            else:
                                sent.add(message.id)
                                await consumer.ack(message)
                                settled.add(message.id)
                        if dies:
                            # A node that is killed meanwhile never answers who asked it in this very process.
                            with trio.move_on_after(1):
                                await run.nodes[await run.leader("q")].close_session("q", consumer.id)
                except (errors.SessionExpired, errors.NotLeader, NotLeader):
                    continue

        with trio.fail_after(50):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(publish)
                for number in range(4):
                    nursery.start_soon(consume, number)
                for seen in (60, 180):
                    await until(lambda seen=seen: len(settled) > seen, "they work")
                    leader = await run.leader("q")
                    await doors.crash(leader)
                    await run.leader("q")
                    await doors.start(leader)
        assert confirmed == sent == set(range(1, 301)) and not again
        stats = await queue.stats()
        assert (stats["acknowledged"], stats["ready"], stats["unacked"], stats["dead"]) == (300, 0, 0, 0)


async def test_a_settle_says_how_many_messages_it_found(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, yard):
        queue = yard.queue("q")
        await queue.publish_many([(b"", b"%d" % number) for number in range(20)])
        async with queue.consume(prefetch=20) as consumer:
            held = await following(consumer, 20)
            assert await consumer.ack(held[0]) == 1 and await consumer.ack(held[3], multiple=True) == 3
            for settle in (consumer.ack, consumer.nack, consumer.reject):
                with pytest.raises(NotHeld, match="1 of 1"):
                    await settle(held[0])
            with pytest.raises(NotHeld):
                await consumer.ack(held[3], multiple=True)
            assert await consumer.reject(held[4]) == 1 and await consumer.nack(held[5]) == 1
            (again,) = await following(consumer, 1)
            for one in (*held[6:10], again):
                consumer.ack_nowait(one)
            assert await consumer.flush() == 5 and await consumer.flush() == 0
            for one in held[8:12]:
                consumer.ack_nowait(one)
            with pytest.raises(NotHeld, match="2 of 4") as some:
                await consumer.flush()
            assert (some.value.settled, some.value.missed) == (2, 2)
            # What was gathered and is covered by a later `multiple` counts once.
            consumer.ack_nowait(held[12])
            consumer.ack_nowait(held[14], multiple=True)
            assert await consumer.flush() == 3
            async with trio.open_nursery() as nursery:
                for one in held[15:18]:
                    nursery.start_soon(consumer.ack, one)
        assert (await queue.stats())["ready"] == 2


async def test_leaving_says_what_was_settled_too_late(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, yard):
        queue = yard.queue("q")
        await queue.publish(b"x")
        with pytest.raises(NotHeld):
            async with queue.consume() as consumer:
                (message,) = await following(consumer, 1)
                await consumer.ack(message)
                consumer.ack_nowait(message)
        with pytest.raises(ValueError, match="mine"):
            async with queue.consume() as consumer:
                consumer.ack_nowait(message)
                raise ValueError("mine")


async def test_a_flush_of_a_consumer_that_was_closed_says_so(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, yard):
        queue = yard.queue("q")
        await queue.publish(b"once")
        async with queue.consume() as consumer:
            (message,) = await following(consumer, 1)
            consumer.ack_nowait(message)
            await consumer.close()
            with pytest.raises(Unknown, match="closed"), trio.fail_after(10):
                await consumer.flush()


async def test_a_blocking_consumer_says_it_at_flush_and_when_it_leaves(tmp_path: Path) -> None:
    def blocking(servers: list[str]) -> None:
        with connect_sync(servers) as yard:
            queue = yard.queue("q")
            queue.publish_many([(b"", b"%d" % number) for number in range(10)])
            with queue.consume(prefetch=10, lease=0.2) as slow:
                first = slow.get(5)
                assert first is not None
                slow.credit(0)
                with queue.consume(prefetch=20, priority=-1, lease=60) as other:
                    # The lease of what the slow one holds ends, and all goes to the other one.
                    taken = [other.get(20) for _ in range(10)]
                    slow.ack(first)
                    with pytest.raises(NotHeld) as late:
                        slow.flush()
                    assert (late.value.settled, late.value.missed) == (0, 1)
                    for message in taken[:4]:
                        assert message is not None
                        other.ack(message)
                    assert other.flush() == 4
                    for message in taken[4:]:
                        assert message is not None
                        other.ack(message)
                    assert other.get(0) is None, "which settles what was gathered"
                    assert other.flush() == 6
            queue.publish(b"once")
            with pytest.raises(NotHeld), queue.consume() as consumer:
                message = consumer.get(5)
                assert message is not None
                consumer.ack(message)
                assert consumer.get(0) is None
                consumer.ack(message)

    async with served(tmp_path) as (_, doors, _):
        await trio.to_thread.run_sync(blocking, list(doors.addresses.values()))


async def test_the_command_line_says_how_many_were_acknowledged(tmp_path: Path) -> None:
    def ask(servers: list[str], *words: str, code: int = 0) -> dict[str, Any]:
        done = CliRunner().invoke(cli, ["queue", *words, "--servers", servers[0], "--json"])
        assert done.exit_code == code, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def blocking(servers: list[str]) -> None:
        with connect_sync(servers) as yard:
            yard.queue("q").publish_many([(b"", b"one"), (b"", b"two")])
            found = ask(servers, "consume", "q")
            assert (found["acknowledged"], found["not_held"], len(found["messages"])) == (2, 0, 2)
            yard.queue("q").publish(b"three")
            ack = queue_sync.Consumer.ack

            def late(consumer: queue_sync.Consumer, message: Message) -> None:
                ack(consumer, message)
                consumer.command(queue_wire.purge_command(True, False, False))
                consumer.flush()
                ack(consumer, message)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(queue_sync.Consumer, "ack", late)
                found = ask(servers, "consume", "q", code=1)
            assert not found["ok"] and (found["not_held"], len(found["messages"])) == (1, 1)
            assert ask(servers, "consume", "q", "--requeue")["acknowledged"] == 0

    async with served(tmp_path) as (_, doors, _):
        await trio.to_thread.run_sync(blocking, list(doors.addresses.values()))


@pytest.mark.parametrize("how", ["interrupt", "terminate", "error"])
async def test_the_command_line_writes_what_it_acknowledges_whatever_ends_it(tmp_path: Path, how: str) -> None:
    """Messages were acknowledged while they came, and written at the end: an interruption lost all of them."""
    raised = {"interrupt": KeyboardInterrupt(), "terminate": Terminated(143), "error": NotLeader.told("a test")}[how]
    get, calls = queue_sync.Consumer.get, itertools.count(1)

    def breaking(consumer: queue_sync.Consumer, wait: float | None) -> Message | None:
        if next(calls) == 21:
            # As acknowledgements leave when there is no further message.
            consumer.flush()
            raise raised
        return get(consumer, wait)

    def ask(servers: list[str], *words: str) -> dict[str, Any]:
        done = CliRunner().invoke(cli, ["queue", "consume", "q", *words, "--servers", servers[0], "--json"])
        found: dict[str, Any] = json.loads(done.stdout)
        assert bool(done.exit_code) is not found["ok"], done.output
        return found

    def blocking(servers: list[str]) -> None:
        with connect_sync(servers) as yard:
            yard.queue("q").publish_many([(b"", b"%d" % number) for number in range(30)])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(queue_sync.Consumer, "get", breaking)
                cut = ask(servers, "--count", "30")
            assert cut["error"]["code"] == ("not_leader" if how == "error" else "interrupted")
            left = ask(servers, "--count", "10", "--wait", "20")
            seen = [int(one["body"]) for found in (cut, left) for one in found["messages"]]
            assert sorted(seen) == list(range(30)) and len(cut["messages"]) == 20

    async with served(tmp_path) as (_, doors, _):
        await trio.to_thread.run_sync(blocking, list(doors.addresses.values()))


async def test_a_consumer_whose_commands_were_given_up_a_window_long_ends_and_gives_back_what_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as (_, _, yard):
        queue = yard.queue("q")
        await queue.publish_many([(b"", body) for body in bodies(10)])
        async with queue.consume() as consumer:
            found = await following(consumer, 10)
            assert await consumer.ack(found[0]) == 1
            with monkeypatch.context() as outage:
                outage.setattr(type(yard), "command", lambda *_: trio.sleep_forever())
                for _ in range(WINDOW):
                    with trio.CancelScope() as scope:
                        scope.cancel()
                        await consumer.ack(found[1])
            with pytest.raises(SessionExpired):
                await consumer.ack(found[2])
            assert isinstance(consumer.failure, SessionExpired) and consumer.id not in yard.sessions.held
            with pytest.raises(SessionExpired), trio.fail_after(20):
                await consumer.__anext__()
            async with queue.consume() as another:
                again = await following(another, 9)
            assert [one.id for one in again] == [one.id for one in found[1:]], "at once, although the first is not left"


async def test_a_blocking_consumer_ends_as_well_when_a_window_of_commands_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> bytes:
        raise NotLeader.told("a test")

    def blocking(servers: list[str]) -> None:
        with connect_sync(servers) as yard:
            queue = yard.queue("q")
            queue.publish(b"body")
            with queue.consume() as consumer:
                message = consumer.get(20.0)
                assert message is not None and consumer.extend(message) == 1
                with monkeypatch.context() as outage:
                    outage.setattr(sync.Yard, "command", away)
                    for _ in range(WINDOW):
                        with pytest.raises(NotLeader):
                            consumer.extend(message)
                with pytest.raises(SessionExpired):
                    consumer.extend(message)
                assert queue.stats()["ready"] == 1, "at once, although it is not left"
                with pytest.raises(SessionExpired):
                    consumer.get(20.0)
                consumer._beating.join(20.0)
                assert not consumer._beating.is_alive()

    async with served(tmp_path) as (_, doors, _):
        await trio.to_thread.run_sync(blocking, list(doors.addresses.values()))

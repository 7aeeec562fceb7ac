"""Terms as clients see them, under a clock that jumps: measured from the last request that was answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from logyard.client.queue import Consumer
from logyard.protocol.groups import coordinator_of

from .virtual_time import VirtualCluster, client, virtual_cluster

Clock = trio.testing.MockClock
TERM_S = 6.0
ROUNDING_S = 1e-6
"""Of the virtual clock, which adds floats up."""
SLEEP_S = 45.0
YEAR_NS = 365 * 86_400 * 1_000_000_000
MEANWHILE = ("slept", "stepped", "stopped")


async def meanwhile(found: VirtualCluster, name: str, what: str) -> None:
    """What happened to a group before something is granted."""
    if what == "slept":
        await found.until(lambda: not any(name in _awake(found, number) for number in found.run.ids))
        await trio.sleep(SLEEP_S)
    elif what == "stepped":
        for node in found.run.nodes.values():
            system, wall = node.system, node.system.clocks.wall_ns
            system.clocks.wall_ns = lambda wall=wall: wall() + 3600 * 1_000_000_000  # type: ignore[misc]
    else:
        await found.stop(found.leaders(name)[0])
        await found.until(lambda: found.leaders(name))


def _awake(found: VirtualCluster, number: int) -> set[str]:
    return {member.spec.name for member in found.run.nodes[number].system.members.values()}


async def passed(began: float, over: Callable[[], Awaitable[bool]]) -> float:
    """Seconds since then when something was over."""
    with trio.fail_after(10 * TERM_S):
        while not await over():
            await trio.sleep(0.05)
    return trio.current_time() - began


@pytest.mark.parametrize("what", MEANWHILE)
async def test_a_kv_lease_lasts_its_time(tmp_path: Path, mock_clock: Clock, what: str) -> None:
    async with virtual_cluster(tmp_path, mock_clock, hibernate_after_ms=1000) as found, client(found) as yard:
        await found.create("kv", "kv")
        kv = yard.kv("kv")
        await kv.put(b"k", b"before")
        await meanwhile(found, "kv", what)
        began = trio.current_time()
        lease = await kv.grant(TERM_S)
        await kv.put(b"k", b"v", lease=lease.id)

        async def gone() -> bool:
            return await kv.get(b"k") is None

        assert TERM_S - ROUNDING_S <= await passed(began, gone) <= TERM_S + 1


@pytest.mark.parametrize("what", MEANWHILE)
async def test_queue_leases_and_delays_last_their_time(tmp_path: Path, mock_clock: Clock, what: str) -> None:
    async with virtual_cluster(tmp_path, mock_clock, hibernate_after_ms=1000) as found, client(found) as yard:
        await found.create("q", "queue")
        queue = yard.queue("q")
        await queue.publish(b"before")
        await queue.purge()
        await meanwhile(found, "q", what)
        async with queue.consume(lease=TERM_S) as holder, queue.consume(priority=-1, lease=600) as other:
            began = trio.current_time()
            await queue.publish(b"held")
            assert (await holder.__anext__()).body == b"held"
            # It has no room for anything else, as long as that is not given back.
            await holder.credit(1)
            await queue.publish(b"late", delay=TERM_S)
            arrived: dict[bytes, float] = {}

            async def listen(consumer: Consumer) -> None:
                async for message in consumer:
                    arrived.setdefault(bytes(message.body or b""), trio.current_time() - began)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen, holder)
                nursery.start_soon(listen, other)
                await found.until(lambda: len(arrived) == 2)
                nursery.cancel_scope.cancel()
            assert all(TERM_S <= at <= TERM_S + 1.1 for at in arrived.values()), arrived


async def test_a_new_leader_whose_wall_clock_is_ahead_forgets_no_consumer_group(
    tmp_path: Path, mock_clock: Clock
) -> None:
    async with virtual_cluster(tmp_path, mock_clock) as found, client(found) as yard:
        topic = yard.topic("orders")
        await topic.create(1)
        await topic.send(b"k", b"", b"payload")
        async with yard.consume("orders", group="g", start="earliest") as records:
            await records.commit(await records.get(20))
        coordinator = coordinator_of("g")
        leader = found.leaders(coordinator)[0]
        for number in found.run.nodes.keys() - {leader}:
            clocks = found.run.nodes[number].system.clocks
            clocks.wall_ns = lambda wall=clocks.wall_ns: wall() + YEAR_NS  # type: ignore[misc]
        await found.stop(leader)
        await found.until(lambda: found.leaders(coordinator))
        await trio.sleep(5)
        described = await yard.consumer_group("g").describe()
        assert described["state"] == "empty" and [row["offset"] for row in described["partitions"]] == [1]


async def test_a_silent_sessions_time_is_kept_to_the_second(tmp_path: Path, mock_clock: Clock) -> None:
    """Of several, at all phases of when their leader looks."""
    async with virtual_cluster(tmp_path, mock_clock) as found:
        leader = await found.create("g")
        node, ends = found.run.nodes[leader], dict[int, float]()
        for number in range(1, 8):
            await node.open_session("g", number, 10 * number, 2000)
            node.heartbeat(10 * number)
            ends[number] = trio.current_time()
            await trio.sleep(0.17)
        member = found.run.member(leader, "g")
        while member.sessions is not None:
            for number in [one for one in ends if one not in member.sessions.by_id]:
                assert 2.0 <= trio.current_time() - ends.pop(number) <= 3.0
            await trio.sleep(0.02)

"""Queues over sockets on real engines: publish, consume, settle; leaders, consumers and connections that go."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from logyard.client.aio import Yard, connect
from logyard.client.queue import Consumer, Message, Queue
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


async def following(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    with trio.fail_after(20):
        while len(found) < count:
            found.append(await consumer.__anext__())
    return found


async def test_what_is_published_comes_in_order_and_is_gone_when_acknowledged(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, _, yard):
        queue = Queue(yard, "q")
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
        assert not list(member.liveness.live_ranges(member.machine.state.last_index)), "nor of commands"

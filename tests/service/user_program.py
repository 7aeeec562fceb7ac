"""A user's program in each face: that the verbs' types are exact is what mypy --strict and pyright say of this file.

Run by `test_types`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import trio

import logyard
from logyard.client.log import Bounds, Place
from logyard.client.messages import Delivered, Message
from logyard.client.producer import Producer, SyncProducer
from logyard.client.records import Page, Record
from logyard.client.tail import Tailed
from logyard.protocol.kv import Changes, GetResult, KeyValue, Lease, PutResult
from logyard.protocol.queue import Message as QueueMessage


async def with_tasks(servers: list[str]) -> int:
    """The asynchronous face, under trio or asyncio."""
    async with logyard.connect(servers) as yard:
        log, kv, queue = yard.log("log"), yard.kv("kv"), yard.queue("queue")
        assert_type(await log.append(b"m", b"body"), int)
        assert_type(await log.append(b"m", reply="append"), Place)
        assert_type(await log.append_many([(b"m", None)]), range)
        assert_type(await log.poll(0), Page)
        assert_type(await log.read(0), Record)
        assert_type(await log.latest(), Bounds)
        assert_type(await log.producer("p"), Producer)
        async for record in log.records():
            assert_type(record, Record)
        async for tailed in log.tail(follow=False):
            assert_type(tailed, Tailed)
        pending = log.append_nowait(b"m")
        assert_type(await pending.wait(), int)
        assert_type(await kv.put(b"k", b"v"), PutResult)
        assert_type(await kv.get(b"k"), KeyValue | None)
        assert_type(await kv.range(b"k"), GetResult)
        assert_type(await kv.grant(9), Lease)
        async with kv.watch(b"k", start=1) as changes:
            assert_type(await changes.__anext__(), Changes)
        assert_type(await queue.publish(b"m"), int)
        assert_type(await queue.publish_many([(b"", b"m")]), range)
        async with queue.consume(prefetch=1) as messages:
            message = await messages.get(5.0)
            assert_type(message, QueueMessage | None)
            if message is not None:
                assert_type(await messages.ack(message), int)
        assert_type(await yard.machine("log").describe(), dict[str, Any])
        async with await yard.open_session("log") as session:
            assert_type(session.closed, bool)
        assert_type(await yard.locate("log"), dict[str, Any])
        assert_type(await yard.leader_view("log"), dict[str, Any])
        return (await log.latest()).end


def with_threads(servers: list[str]) -> int:
    """The blocking face."""
    with logyard.connect_sync(servers) as yard:
        log, kv, queue = yard.log("log"), yard.kv("kv"), yard.queue("queue")
        assert_type(log.append(b"m", b"body"), int)
        assert_type(log.append(b"m", reply="append"), Place)
        assert_type(log.append_many([(b"m", None)]), range)
        assert_type(log.poll(0), Page)
        assert_type(log.read(0), Record)
        assert_type(log.latest(), Bounds)
        assert_type(log.producer("p"), SyncProducer)
        for record in log.records():
            assert_type(record, Record)
        for tailed in log.tail(follow=False):
            assert_type(tailed, Tailed)
        assert_type(kv.put(b"k", b"v"), PutResult)
        assert_type(kv.get(b"k"), KeyValue | None)
        assert_type(kv.range(b"k"), GetResult)
        assert_type(kv.grant(9), Lease)
        assert_type(next(kv.watch(b"k", start=1)), Changes)
        assert_type(queue.publish(b"m"), int)
        assert_type(queue.publish_many([(b"", b"m")]), range)
        with queue.consume(prefetch=1) as messages:
            assert_type(messages.get(5.0), QueueMessage | None)
        assert_type(yard.machine("log").describe(), dict[str, Any])
        assert_type(yard.locate("log"), dict[str, Any])
        assert_type(yard.leader_view("log"), dict[str, Any])
        return log.latest().end


async def embedded(path: Path) -> int:
    """The engine inside this process."""
    async with logyard.open_system(path) as system:
        log = await system.start_group("log", logyard.AppendLog())
        await system.create("kv", machine="kv")
        await system.create("queue", machine="queue")
        kv, queue = system.kv("kv"), system.queue("queue")
        assert_type(await log.append(b"m", b"body"), int)
        assert_type(await log.append(b"m", reply="append"), Place)
        assert_type(await log.append_many([(b"m", None)]), range)
        assert_type(await system.log("log").read(0), Record)
        assert_type(await log.producer("p"), Producer)
        async for record in log.records():
            assert_type(record, Record)
        assert_type(await kv.put(b"k", b"v"), PutResult)
        assert_type(await kv.get(b"k"), KeyValue | None)
        async with kv.watch(b"k", start=1) as changes:
            assert_type(await changes.__anext__(), Changes)
        assert_type(await queue.publish(b"m"), int)
        async with queue.consume(prefetch=1) as messages:
            assert_type(await messages.get(5.0), QueueMessage | None)
        assert_type(await system.machine("log").describe(), dict[str, Any])
        assert_type(await system.list(), list[dict[str, Any]])
        return (await log.latest()).end


async def listening(yard_of: list[str], name: str) -> None:
    """What a machine sends."""
    async with logyard.connect(yard_of) as yard:
        session = await yard.machine(name).open_session()
        async for received in session.messages():
            assert_type(received, Message | Delivered)
        await session.close()


def caught(path: Path) -> str:
    """One family of errors, by the package's own names."""
    try:
        trio.run(embedded, path)
    except logyard.Busy as error:
        assert_type(error.retry_after, float)
        return error.code
    except logyard.LogyardError as error:
        return error.code
    return ""

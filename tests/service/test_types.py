"""A user's program in each face: that the verbs' types are exact is what mypy --strict says of this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import trio

import logyard
from logyard.client.log import Bounds, Place
from logyard.client.producer import EpochWriter, Producer, SyncEpochWriter, SyncProducer
from logyard.client.records import Page, Record
from logyard.client.tail import Tailed
from logyard.protocol.kv import GetResult, KeyValue, Lease, PutResult

from .test_asyncio import served


async def with_tasks(servers: list[str]) -> int:
    """The asynchronous face."""
    async with logyard.connect(servers) as yard:
        log, kv, queue = yard.log("log"), yard.kv("kv"), yard.queue("queue")
        assert_type(await log.append(b"m", b"body"), int)
        assert_type(await log.append(b"m", reply="append"), Place)
        assert_type(await log.append_many([(b"m", None)]), range)
        assert_type(await log.poll(0), Page)
        assert_type(await log.read(0), Record)
        assert_type(await log.latest(), Bounds)
        assert_type(await log.producer("p"), Producer)
        assert_type(await log.epoch("p", 1, 0), EpochWriter)
        async for record in log.records():
            assert_type(record, Record)
        async for tailed in log.tail(follow=False):
            assert_type(tailed, Tailed)
        assert_type(await kv.put(b"k", b"v"), PutResult)
        assert_type(await kv.get(b"k"), KeyValue | None)
        assert_type(await kv.range(b"k"), GetResult)
        assert_type(await kv.grant(9), Lease)
        assert_type(await queue.publish(b"m"), int)
        assert_type(await queue.publish_many([(b"", b"m")]), range)
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
        assert_type(log.epoch("p", 1, 0), SyncEpochWriter)
        for record in log.records():
            assert_type(record, Record)
        for tailed in log.tail(follow=False):
            assert_type(tailed, Tailed)
        assert_type(kv.put(b"k", b"v"), PutResult)
        assert_type(kv.get(b"k"), KeyValue | None)
        assert_type(kv.range(b"k"), GetResult)
        assert_type(kv.grant(9), Lease)
        assert_type(queue.publish(b"m"), int)
        assert_type(queue.publish_many([(b"", b"m")]), range)
        assert_type(yard.locate("log"), dict[str, Any])
        assert_type(yard.leader_view("log"), dict[str, Any])
        return log.latest().end


async def test_both_programs_run(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, servers):
        assert await with_tasks(servers) == 3
        assert await trio.to_thread.run_sync(with_threads, servers) == 6

"""The client under asyncio, and uvloop, over real engines: every verb's way, cancellation, and web frameworks on it.

The cluster runs under trio in this thread, the client in a loop of its own beside it: as a user's program does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.client import errors
from logyard.client.aio import Yard, connect
from logyard.client.sync import connect_sync
from logyard.protocol.frame import PIECE_BYTES_MAX
from logyard.protocol.kv import Compare, Put
from logyard.protocol.queue import NotHeld
from tests.client.test_runtime_asyncio import LOOPS
from tests.engine.host.cluster import Cluster, cluster, until

from .test_exactly_once import Doors

LIMIT_S = 60.0


@asynccontextmanager
async def served(path: Path, count: int = 1) -> AsyncIterator[tuple[Cluster, Doors, list[str]]]:
    """Nodes with a log, a KV group and a queue."""
    async with cluster(path, count, group="") as run, trio.open_nursery() as nursery:
        await until(lambda: all(len(one.system.live) == count for one in run.nodes.values()), "all are live")
        for kind in ("log", "kv", "queue"):
            await run.create(kind, machine=kind)
        doors = Doors(run, nursery)
        for number in run.ids:
            await doors.open(number)
        yield run, doors, list(doors.addresses.values())
        nursery.cancel_scope.cancel()


async def beside(loop: Callable[[], asyncio.AbstractEventLoop], task: Coroutine[Any, Any, None]) -> None:
    """Run a task under an asyncio loop in another thread."""

    def work() -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(asyncio.wait_for(task, LIMIT_S))

    await trio.to_thread.run_sync(work)


@LOOPS
async def test_a_log_under_asyncio(tmp_path: Path, loop: Any) -> None:
    async def main(servers: list[str]) -> None:
        async with connect(servers) as yard:
            log = yard.log("log")
            assert await log.append(b"a", b"first") == 0
            pending = [log.append_nowait(b"", b"%d" % number) for number in range(1000)]
            await yard.drain()
            assert [one.offset for one in pending] == list(range(1, 1001)) and await pending[-1].wait() == 1000
            assert await log.append_many([(b"m", b"x"), (b"m", None)]) == range(1001, 1003)
            place = await log.append(b"early", reply="append")
            assert await log.wait_applied(place.index, term=place.term) >= place.index
            large = bytes(range(256)) * (3 * PIECE_BYTES_MAX // 256)
            offset = await log.append(b"large", large)
            assert await log.read_body(offset) == large
            assert b"".join([piece async for piece in log.body_pieces(offset, 5, 2_000_000)]) == large[5:2_000_000]
            path = tmp_path / "file"
            path.write_bytes(large)
            with path.open("rb") as file:
                streamed = await log.append_stream(b"streamed", file, len(large))
            assert (await log.read(streamed)).payload == large
            assert [record.payload async for record in log.records(1, 4)] == [b"0", b"1", b"2"]
            producer = await log.producer("mine")
            assert await producer.append(b"p", sequence=1) == await producer.append(b"p", sequence=1)
            writer = await log.epoch("sink", 1, 0)
            assert await writer.append(b"e") == await writer.append(b"e", number=1)
            found = [one async for one in log.tail(follow=False)]
            assert sum(len(one.records) for one in found) == (await log.latest()).end
            following = log.tail(found[-1].cursor)
            asked = asyncio.ensure_future(next_of(following))
            last = await log.append(b"tailed")
            assert [one.offset for one in (await asked).records] == [last]
            with pytest.raises(errors.OutOfRange):
                await log.read(last + 1)
            assert await log.truncate(5) == 5

    async with served(tmp_path) as (_, _, servers):
        await beside(loop, main(servers))


@LOOPS
async def test_a_kv_group_under_asyncio(tmp_path: Path, loop: Any) -> None:
    async def main(servers: list[str]) -> None:
        async with connect(servers) as yard:
            kv = yard.kv("kv")
            async with kv.watch(b"k", prefix=True, previous=True) as first, kv.watch(b"k/1") as second:
                await first.created()
                await second.created()
                await asyncio.gather(*(kv.put(b"k/%d" % number, b"v%d" % number) for number in range(100)))
                seen = {event.key async for change in taken(first, 100) for event in change.events}
                assert seen == {b"k/%d" % number for number in range(100)}
                assert [event.key for event in (await anext(second)).events] == [b"k/1"]
                # A reader that is cancelled loses nothing.
                waiting = asyncio.ensure_future(anext(first))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting])
                await kv.put(b"k/1", b"again")
                (event,) = (await anext(first)).events
                assert event.kv is not None and event.previous is not None
                assert (event.kv.value, event.previous.value) == (b"again", b"v1")
            found = await asyncio.gather(*(kv.get(b"k/%d" % number) for number in range(100)))
            assert [one.value for one in found if one is not None][2:] == [b"v%d" % number for number in range(2, 100)]
            done = await kv.txn([Compare(b"k/1", "value", "=", b"again")], [Put(b"k/1", bytes(100_000))])
            assert done.succeeded
            assert (await kv.range(b"k/", prefix=True)).count == 100
            lease = await kv.grant(60)
            await kv.put(b"leased", b"", lease=lease.id)
            assert await kv.keep_alive(lease.id) == 60
            assert await kv.revoke(lease.id) == 1 and await kv.get(b"leased") is None
            assert (await kv.delete(b"k", prefix=True)).deleted == 100

    async with served(tmp_path) as (_, _, servers):
        await beside(loop, main(servers))


async def next_of(source: Any) -> Any:
    """What comes next."""
    return await anext(source)


async def taken(source: Any, count: int) -> AsyncIterator[Any]:
    """So many of what comes."""
    for _ in range(count):
        yield await anext(source)


@LOOPS
async def test_a_queue_under_asyncio(tmp_path: Path, loop: Any) -> None:
    async def main(servers: list[str]) -> None:
        async with connect(servers) as yard:
            queue = yard.queue("queue")
            ids = await queue.publish_many([(b"", b"%d" % number) for number in range(50)])
            pending = [queue.publish_nowait(b"later") for _ in range(10)]
            async with queue.consume(prefetch=20) as consumer:
                found = []
                async for message in consumer:
                    found.append(message.id)
                    if message.id % 2:
                        consumer.ack_nowait(message)
                    else:
                        assert await consumer.ack(message) == 1
                    if len(found) == 60:
                        break
                assert await consumer.flush() == 30
                assert found == [*ids, *(one.offset for one in pending)]
                assert await consumer.get(0.01) is None
                with pytest.raises(NotHeld):
                    await consumer.ack(message)
            assert await queue.purge() == 0
            await queue.publish(b"held")
            async with queue.consume() as first:
                assert (await anext(first)).body == b"held"
            async with queue.consume() as second:
                message = await anext(second)
                assert message.body == b"held"
                await second.ack(message)

    async with served(tmp_path) as (_, _, servers):
        await beside(loop, main(servers))


@LOOPS
async def test_sessions_and_admin_verbs_under_asyncio(tmp_path: Path, loop: Any) -> None:
    async def main(servers: list[str]) -> None:
        async with connect(servers) as yard:
            await yard.create("more")
            assert {row["name"] for row in await yard.list()} == {"log", "kv", "queue", "more"}
            session = await yard.open_session("more", kind="log")
            with pytest.raises(errors.WrongKind):
                await yard.open_session("more", kind="kv")
            messages = session.messages()
            waiting = asyncio.ensure_future(anext(messages))
            await asyncio.sleep(0)
            await session.close()
            with pytest.raises(StopAsyncIteration):
                await waiting
            assert (await yard.statuses())[1]["node"] == 1
            assert (await yard.leaders())[1] == []
            await yard.delete("more")

    async with served(tmp_path) as (_, _, servers):
        await beside(loop, main(servers))


@LOOPS
async def test_crashing_leaders_lose_and_double_nothing(tmp_path: Path, loop: Any) -> None:
    offsets: dict[bytes, int] = {}
    wanted = 4 * 50

    async def main(servers: list[str]) -> None:
        async def append(yard: Yard, name: bytes) -> None:
            log = yard.log("log")
            for number in range(50):
                body = b"%s:%d" % (name, number)
                offsets[body] = await log.append(b"", body)

        async with connect(servers) as yard, connect(servers) as other, asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(append((yard, other)[number % 2], b"%d" % number))

    def more(before: int) -> bool:
        return len(offsets) >= min(wanted, before + 60)

    async with served(tmp_path, 3) as (run, doors, servers), trio.open_nursery() as nursery:
        nursery.start_soon(beside, loop, main(servers))
        while len(offsets) < wanted:
            before = len(offsets)
            await until(partial(more, before), "some more are there")
            leader = await run.leader("log")
            await doors.crash(leader)
            await doors.start(leader)
    assert sorted(offsets.values()) == list(range(wanted))


@LOOPS
async def test_one_exception_of_a_body_comes_as_it_is_and_several_stay_a_group(tmp_path: Path, loop: Any) -> None:
    async def main(servers: list[str]) -> None:
        with pytest.raises(ValueError, match="mine"):
            async with connect(servers):
                raise ValueError("mine")
        with pytest.raises(ExceptionGroup) as found:
            async with connect(servers):
                raise ExceptionGroup("both", [ValueError("one"), KeyError("two")])
        assert len(found.value.exceptions) == 2
        with pytest.raises(errors.UnknownGroup):
            async with connect(servers) as yard:
                await yard.log("nobody").latest()

    async with served(tmp_path) as (_, _, servers):
        await beside(loop, main(servers))


@LOOPS
async def test_a_cancelled_block_is_cancelled_and_leaves_no_task(tmp_path: Path, loop: Any) -> None:
    async def main(servers: list[str]) -> None:
        begun, before = asyncio.Event(), asyncio.all_tasks()

        async def work() -> None:
            async with connect(servers) as yard, yard.queue("queue").consume() as consumer:
                begun.set()
                await anext(consumer)

        task = asyncio.create_task(work())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), connect(servers) as yard:
                async for _ in yard.log("log").tail():
                    pass
        assert asyncio.all_tasks() == before

    async with served(tmp_path) as (_, _, servers):
        await beside(loop, main(servers))


async def test_fastapi_on_a_client(tmp_path: Path) -> None:
    """As a user writes it: the yard lives as long as the application."""
    fastapi = pytest.importorskip("fastapi", reason="the extra test brings it")

    async def main(servers: list[str]) -> None:
        @asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[None]:
            async with connect(servers) as yard:
                app.state.yard = yard
                yield

        app = fastapi.FastAPI(lifespan=lifespan)

        async def append(text: str) -> dict[str, int]:
            return {"offset": await app.state.yard.log("log").append(b"", text.encode())}

        app.add_api_route("/append/{text}", append, methods=["POST"])
        async with app.router.lifespan_context(app):
            found = [await posted(app, f"/append/{number}") for number in range(3)]
        assert found == [b'{"offset":0}', b'{"offset":1}', b'{"offset":2}']

    async with served(tmp_path) as (_, _, servers):
        await beside(asyncio.new_event_loop, main(servers))


async def posted(app: Any, path: str) -> bytes:
    """The body that an ASGI application answers a POST with."""
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"}, "headers": [],
        "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2),
    }  # fmt: skip
    body = bytearray()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        body.extend(message.get("body", b""))

    await app(scope, receive, send)
    return bytes(body)


async def test_flask_on_a_blocking_client(tmp_path: Path) -> None:
    """One yard for all threads of the server."""
    flask = pytest.importorskip("flask", reason="the extra test brings it")

    def work(servers: list[str]) -> None:
        with connect_sync(servers) as yard:
            app = flask.Flask("demo")

            def append(text: str) -> dict[str, int]:
                return {"offset": yard.log("log").append(b"", text.encode())}

            app.add_url_rule("/append/<text>", view_func=append, methods=["POST"])
            with app.test_client() as client:
                assert [client.post(f"/append/{number}").json["offset"] for number in range(3)] == [0, 1, 2]

    async with served(tmp_path) as (_, _, servers):
        await trio.to_thread.run_sync(work, servers)

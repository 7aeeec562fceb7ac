"""A system of one's own process has the verbs of the clients: KV groups, queues, machines of one's own, sessions."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import logyard
from logyard.client.messages import Message
from logyard.engine.machine import Machine
from logyard.machines.log import AppendLog
from logyard.protocol.errors import BadRequest, GroupStopped, LogyardError, Unknown, UnknownGroup, WrongKind
from logyard.protocol.pending import OK, PendingReply
from logyard.service.embedded import Patience, open_system
from tests.chaos import register
from tests.chaos.register import Registers
from tests.engine.host.scribe import Scribe, command

from .test_embedded import SMALL


async def test_kv_with_a_watch(tmp_path: Path) -> None:
    async with open_system(tmp_path, SMALL) as system:
        await system.create("kv", machine="kv")
        kv = system.kv("kv")
        async with kv.watch(b"jobs/", prefix=True) as changes:
            await changes.created()
            revision = (await kv.put(b"jobs/1", b"v" * 70_000)).revision
            with trio.fail_after(10):
                seen = await changes.__anext__()
            assert seen.revision == revision and seen.events[0].key == b"jobs/1"
        found = await kv.get(b"jobs/1")
        assert found is not None and found.value == b"v" * 70_000
        assert (await kv.range(b"", prefix=True)).count == 1 and (await kv.delete(b"jobs/1")).deleted == 1


async def test_a_watch_of_a_group_that_is_not_there_says_so(tmp_path: Path) -> None:
    async with open_system(tmp_path, SMALL) as system:
        with trio.fail_after(20), pytest.raises(UnknownGroup):
            async with system.kv("nothing").watch(b"a") as changes:
                await changes.created()
        await system.create("kv", machine="kv")
        with trio.fail_after(20), pytest.raises((UnknownGroup, GroupStopped), match=r"delete|no group"):
            async with system.kv("kv").watch(b"a") as changes:
                await changes.created()
                await system.delete("kv")
                await changes.__anext__()


async def test_a_queue_with_a_consumer(tmp_path: Path) -> None:
    async with open_system(tmp_path, SMALL) as system:
        await system.create("queue", machine="queue")
        queue = system.queue("queue")
        assert await queue.publish(b"one") == 1
        assert await queue.publish_many([(b"", b"two"), (b"", b"three")]) == range(2, 4)
        async with queue.consume(prefetch=10) as messages:
            with trio.fail_after(10):
                got = [await messages.__anext__() for _ in range(3)]
            assert [message.body for message in got] == [b"one", b"two", b"three"]
            await messages.ack(got[0])
            messages.ack_nowait(got[1])
        assert (await queue.stats())["ready"] == 1, "what was not settled went back"


async def test_machines_of_ones_own_and_what_they_send(tmp_path: Path) -> None:
    own: dict[str, type[Machine]] = {"registers": Registers, "scribe": Scribe}
    async with open_system(tmp_path, SMALL, machines=own) as system:
        await system.create("r", machine="registers")
        await system.create("s", machine="scribe")
        group = system.machine("r")
        await group.command(register.encode(register.WRITE, "key", 7))
        assert (await group.describe())["machine"] == "registers"
        async with await system.machine("s").open_session() as session:
            await session.command(command("send", session.id, b"hello"))
            with trio.fail_after(10):
                async for received in session.messages():
                    assert isinstance(received, Message) and received.data == b"hello"
                    break
        assert session.closed and not system.sessions.held
        with pytest.raises(WrongKind):
            await system.open_session("s", kind="registers")


async def test_streams_large_payloads_and_the_first_record_that_is_there(tmp_path: Path) -> None:
    async with open_system(tmp_path, SMALL) as system:
        log = await system.start_group("log", logyard.AppendLog())
        body = bytes(range(256)) * 10_000
        assert await log.append(b"pieces", body) == 0
        assert await log.append_stream(b"file", BytesIO(body)) == 1
        assert await log.append(b"last") == 2
        assert await log.append(b"early", reply="append") > (0, 0) and await log.append(b"blind", reply="none") == -1
        assert [part async for part in log.body_pieces(1)] and await log.read_body(1) == body
        assert await log.truncate(1) == 1
        assert [record.offset async for record in log.records(stop=4)] == [1, 2, 3]
        assert [one.records[0].offset async for one in log.tail(follow=False)] == [1]


async def test_numbers_that_are_none_are_bad_requests(tmp_path: Path) -> None:
    async with open_system(tmp_path, SMALL) as system:
        await system.create("l", start=5)
        log = system.log("l")
        assert list(await log.append_many([(b"", b"x")], at=5)) == [5]
        for at in (-1, 1 << 64):
            with pytest.raises(BadRequest, match="an offset is a number"):
                await log.append_many([(b"", b"x")], at=at)
        for age in (math.inf, math.nan):
            with pytest.raises(BadRequest, match="an age is a number of seconds"):
                await log.retain(age=age)
        for keys in ([], [b"a", b"b"]):
            with pytest.raises(BadRequest, match="a key of its own"):
                await log.append_many([(b"", b"x")], keys=keys)
        assert (await log.latest()) == (5, 6)


class Numbers(Registers):
    """Answers what it is asked with a number."""

    def query(self, request: bytes) -> bytes:
        return 5  # type: ignore[return-value]


async def test_an_answer_that_is_no_bytes_is_no_answer(tmp_path: Path) -> None:
    async with open_system(tmp_path, SMALL, machines={"numbers": Numbers}) as system:
        group = await system.start_group("n", Numbers())
        with pytest.raises(TypeError, match="int, not bytes"):
            await group.query(b"")


async def test_the_yards_verbs(tmp_path: Path) -> None:
    async with open_system(tmp_path, SMALL) as system:
        await system.create_many(["a", "b"])
        assert [row["name"] for row in await system.list()] == ["a", "b"]
        assert (await system.locate("a"))["kind"] == "log" and (await system.members("a"))["members"] == [1]
        assert (await system.cluster())["node"] == 1 and await system.nodes() == [1]
        assert [row.name for row in (await system.leaders())[0]] == ["a", "b"]
        await system.delete("a")
        with pytest.raises(UnknownGroup):
            await system.log("a").append(b"late")
        with pytest.raises(LogyardError, match="there is no node 2"):
            await system.status(2)
    with pytest.raises(LogyardError, match="closed"):
        await system.log("b").append(b"late")
    with pytest.raises(LogyardError, match="closed"):
        await system.list(1)


async def test_a_command_that_is_waited_for_in_vain_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    patience = Patience(30.0)
    told: dict[str, float] = {}

    async def wait(name: str, deadline: float) -> None:
        with pytest.raises(Unknown, match=name):
            await patience.wait(PendingReply(), deadline, name)
        told[name] = trio.current_time()

    came: PendingReply[bytes] = PendingReply()
    came.reply(0, OK, b"reply")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(patience.end)
        began = trio.current_time()
        assert await patience.wait(came, began + 30.0, "answered") == b"reply"
        async with trio.open_nursery() as waiting:
            waiting.start_soon(wait, "first", began + 30.0)
            await trio.sleep(20.0)
            waiting.start_soon(wait, "second", began + 50.0)
        nursery.cancel_scope.cancel()
    assert told == pytest.approx({"first": began + 30.0, "second": began + 50.0})


async def test_what_is_under_way_when_the_system_is_left_is_told(tmp_path: Path) -> None:
    """Tasks of a nursery outside of the system's block: nothing would ever answer them."""
    told: dict[str, LogyardError] = {}
    begun: set[str] = set()

    async def tell(name: str, task: Callable[[], Awaitable[object]]) -> None:
        begun.add(name)
        with pytest.raises(LogyardError) as failure:
            while True:
                await task()
        told[name] = failure.value

    own: dict[str, type[Machine]] = {"scribe": Scribe}
    async with trio.open_nursery() as nursery:
        async with open_system(tmp_path, SMALL, machines=own) as system:
            log, quiet = [await system.start_group(name, AppendLog()) for name in ("log", "quiet")]
            await system.create("kv", machine="kv")
            await system.create("queue", machine="queue")
            await system.create("s", machine="scribe")
            await system.topic("orders").create(1)

            async def watch() -> None:
                async with system.kv("kv").watch(b"a") as changes:
                    await changes.__anext__()

            async def work() -> None:
                async with system.queue("queue").consume() as messages:
                    await messages.__anext__()

            async def listen() -> None:
                async with await system.machine("s").open_session() as session:
                    async for _ in session.messages():
                        pass

            async def consume() -> None:
                async with system.consume("orders", group="g") as records:
                    await records.get(60)

            tasks: dict[str, Callable[[], Awaitable[object]]] = {
                **{f"writer {number}": lambda: log.append(b"", b"x") for number in range(8)},
                "patient": lambda: log.append(b"", b"x", timeout=600.0),
                "first": lambda: log.append(b"", b"x", reply="append"),
                "upload": lambda: log.append_stream(b"", BytesIO(bytes(3 << 20))),
                "poll": lambda: quiet.poll(0, wait=60, timeout=600.0),
                "read": lambda: log.latest(),
                "query": lambda: system.machine("s").query(b"", index=1 << 40, timeout=600.0),
                "watch": watch, "work": work, "listen": listen, "consume": consume,
            }  # fmt: skip
            for name, task in tasks.items():
                nursery.start_soon(tell, name, task)
            await trio.sleep(0.5)
        nursery.cancel_scope.deadline = trio.current_time() + 8
    assert begun == told.keys() == set(tasks)


async def test_a_reply_that_comes_too_late_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_system(tmp_path / "data", SMALL) as system:
        log = await system.start_group("log", AppendLog())
        kept: list[tuple[Any, ...]] = []
        submit = system.node.submit
        monkeypatch.setattr(system.node, "submit", lambda *frame, **options: kept.append(frame))
        with pytest.raises(Unknown, match="log"):
            await log.append(b"late", timeout=0.5)
        monkeypatch.undo()
        ((uid, frame, sink, request),) = kept
        submit(uid, frame, sink, request)
        assert await log.append(b"next") == 1

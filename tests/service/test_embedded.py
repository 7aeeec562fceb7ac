"""logyard inside a user's own process: the README's verbs on a real directory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio

from logyard.engine.config import SystemConfig
from logyard.engine.machine import Applied, Context, PayloadRef
from logyard.machines.log import AppendLog
from logyard.protocol.errors import (
    BadRequest,
    Busy,
    DirectoryInUse,
    GroupStopped,
    LogyardError,
    OutOfRange,
    WrongIdentity,
)
from logyard.protocol.kv import Compare
from logyard.service.embedded import open_system

SMALL = SystemConfig(
    wal_file_bytes=1 << 20, generation_bytes=16 << 20, generation_transaction_bytes=1 << 20, payload_cache_bytes=0
)


async def test_records_outlive_the_process(tmp_path: Path) -> None:
    async with open_system(tmp_path / "data", SMALL) as system:
        log = await system.start_group("events", AppendLog())
        assert await log.append(b"meta", b"body") == 0
        assert await log.append_many([(b"a", b"1"), (b"b", None), (b"c", b"L" * 100_000)]) == range(1, 4)
        assert log.bounds() == (0, 4)
    async with open_system(tmp_path / "data", SMALL) as system:
        log = await system.start_group("events", AppendLog())
        assert log.bounds() == (0, 4)
        found = [(record.offset, record.metadata, record.payload) async for record in log.records()]
        assert found == [(0, b"meta", b"body"), (1, b"a", b"1"), (2, b"b", None), (3, b"c", b"L" * 100_000)]
        assert (await log.read(3)).size == 100_000 and await log.read_body(3, 99_998) == b"LL"
        assert [record.metadata async for record in log.records(1, 3)] == [b"a", b"b"]
        page = await log.poll(0, max_records=2, bodies=False)
        assert len(page) == 2 and page.next == 2 and page.records[0].payload is None


async def test_text_in_place_of_bytes_is_told_by_its_name(tmp_path: Path) -> None:
    """kv.put("k", ...) said that "a key is 1 to 16384 bytes", which it has."""
    async with open_system(tmp_path) as yard:
        for name, machine in (("k", "kv"), ("q", "queue"), ("l", "log")):
            await yard.create(name, machine=machine)
        await yard.topic("t").create(2)
        text: Any = "a"
        kv: Any = yard.kv("k")
        queue: Any = yard.queue("q")
        log: Any = yard.log("l")
        group: Any = yard.machine("l")
        topic: Any = yard.topic("t")
        wrong: dict[str, list[Callable[[], Awaitable[Any]]]] = {
            "a key": [
                lambda: kv.put("a", b"v"), lambda: kv.get("a"), lambda: kv.delete("a"), lambda: kv.count("a"),
                lambda: kv.range("a", prefix=True), lambda: kv.txn([Compare(text, "value", "=", b"v")], []),
                lambda: kv.watch("a").__aenter__(), lambda: topic.send("a", b"m"),
                lambda: topic.send_many([("a", b"m", None)]),
            ],
            "the end of a range": [lambda: kv.range(b"a", "b")],
            "a value": [lambda: kv.put(b"a", "v"), lambda: kv.put(b"a", "v" * 2000)],
            "an operand": [lambda: kv.txn([Compare(b"a", "value", "=", text)], [])],
            "a payload": [lambda: queue.publish("x"), lambda: log.append(b"", "x")],
            "metadata": [
                lambda: log.append("x"), lambda: topic.send(b"a", "m"), lambda: topic.send(None, "m"),
                lambda: log.append("x", bytes(2 << 20)),
            ],
            "a command": [lambda: group.command("x"), lambda: log.append(b"", command="x")],
        }  # fmt: skip
        for what, calls in wrong.items():
            for call in calls:
                with pytest.raises(BadRequest, match=f"^{what} is bytes, not str"):
                    await call()
        for call in (
            lambda: kv.get(b"a", revision=1 << 70), lambda: kv.range(b"a", limit=1 << 70),
            lambda: kv.put(b"a", b"v", lease=1 << 70), lambda: kv.time_to_live(1 << 70), lambda: kv.compact(1 << 70),
        ):  # fmt: skip
            with pytest.raises(BadRequest, match=r"^a number has more than 64 bits"):
                await call()
        assert await kv.count(prefix=True) == 0


def test_it_says_that_it_runs_under_trio(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_system(tmp_path):
            raise AssertionError("it opened")

    with pytest.raises(RuntimeError, match="runs under trio"):
        asyncio.run(main())


async def test_queries_and_waiting_for_an_index(tmp_path: Path) -> None:
    async with open_system(tmp_path / "data", SMALL) as system:
        log = await system.start_group("events", AppendLog())
        await log.append(b"", b"x")
        applied = await log.wait_applied(1)
        assert msgpack.unpackb(await log.query(msgpack.packb(["bounds"]), index=applied)) == [0, 1]
        with pytest.raises(Busy):
            await log.wait_applied(applied + 100, timeout=1.0)
        shown = await log.describe()
        assert shown["sessions"] == shown["session_reply_bytes"] == 0


async def test_truncation_compaction_and_snapshots_keep_the_rest(tmp_path: Path) -> None:
    async with open_system(tmp_path / "data", SMALL) as system:
        log = await system.start_group("events", AppendLog())
        for number in range(30):
            await log.append(b"%d" % number, bytes([number]) * 50_000)
        assert await log.truncate(20) == 20
        assert (await log.snapshot())[1]["taken"] == 1
        freed = (await system.compact())[1]
        assert freed["live_bytes_in_wal"] < 1000 and 10 * 50_000 <= freed["live_bytes_in_generations"] < 11 * 50_100
        status = await system.status()
        assert status["payload_live_bytes"] == freed["live_bytes_in_generations"] + freed["live_bytes_in_wal"]
        with pytest.raises(OutOfRange):
            await log.read(19)
        with pytest.raises(OutOfRange):
            await log.read(30)
    async with open_system(tmp_path / "data", SMALL) as system:
        log = await system.start_group("events", AppendLog())
        assert log.bounds() == (20, 30)
        assert [record.payload async for record in log.records()] == [
            bytes([number]) * 50_000 for number in range(20, 30)
        ]
        assert (await log.describe())["floor"] == 0, "a snapshot above the release says the same"


async def test_a_floor_that_a_snapshot_covers_is_shown_no_more(tmp_path: Path) -> None:
    """A segment or a compaction between a truncation and the snapshot stores a floor: until then it matters."""
    async with open_system(tmp_path / "data", SMALL) as system:
        log = await system.start_group("events", AppendLog())
        for number in range(3):
            await log.append(b"%d" % number, bytes([number]) * 50_000)
        await log.truncate(2)
        await system.compact()
        assert (await log.describe())["floor"] == (await log.describe())["applied"] > 0
        await log.snapshot()
        assert (await log.describe())["floor"] == 0
    async with open_system(tmp_path / "data", SMALL) as system:
        log = await system.start_group("events", AppendLog())
        assert (await log.describe())["floor"] == 0 and log.bounds() == (2, 3)


async def test_a_reader_waits_for_a_writer(tmp_path: Path) -> None:
    async with open_system(tmp_path / "data", SMALL) as system:
        log = await system.start_group("events", AppendLog())
        pages = []

        async def reader() -> None:
            pages.append(await log.poll(0, wait=5))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader)
            with trio.fail_after(4):
                await log.append(b"now", b"!")
        assert [record.metadata for record in pages[0]] == [b"now"]


async def test_many_writers_share_entries_and_keep_their_own_offsets(tmp_path: Path) -> None:
    async with open_system(tmp_path / "data", SMALL) as system:
        log = await system.start_group("events", AppendLog())
        got: dict[int, bytes] = {}

        async def writer(number: int) -> None:
            for turn in range(10):
                body = b"%d/%d" % (number, turn)
                got[await log.append(b"", body)] = body

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(writer, number)
        assert sorted(got) == list(range(200))
        assert [record.payload async for record in log.records()] == [got[offset] for offset in range(200)]
        assert (await system.status())["commit"] < 150, "commands that wait together are one entry"


async def test_groups_come_and_go(tmp_path: Path) -> None:
    async with open_system(tmp_path / "data", SMALL) as system:
        log = await system.start_group("a", AppendLog())
        await system.start_group("b", AppendLog())
        await log.append(b"old", b"x")
        assert sorted(row["name"] for row in system.groups()) == ["a", "b"]
        await system.delete_group("a")
        with pytest.raises((GroupStopped, LogyardError)):
            await log.append(b"late", b"x")
        again = await system.start_group("a", AppendLog())
        assert again.bounds() == (0, 0)


async def test_a_machine_nobody_knows_is_refused(tmp_path: Path) -> None:
    class Mine:
        version = 1

        def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
            return Applied(b"")

        def snapshot(self) -> dict[str, bytes]:
            return {}

        def restore(self, sections: object) -> None: ...

        def live_refs(self) -> tuple[()]:
            return ()

    async with open_system(tmp_path / "data", SMALL) as system:
        with pytest.raises(LogyardError, match="Mine"):
            await system.start_group("mine", Mine())


async def test_a_directory_is_opened_once_and_for_its_own_node(tmp_path: Path) -> None:
    async with open_system(tmp_path / "data", SMALL):
        with pytest.raises(DirectoryInUse):
            async with open_system(tmp_path / "data", SMALL):
                pass
    from logyard.service.node import build_system

    with pytest.raises(WrongIdentity):
        await build_system(tmp_path / "data", 2, "embedded", SMALL).open()
    async with open_system(tmp_path / "data", SMALL):
        pass

"""Clients, sockets and real engines whose leaders crash: each append is in the log once, and its answer is true."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from logyard.client import errors
from logyard.client.aio import Log, Yard, connect
from logyard.client.sync import connect_sync
from logyard.engine.config import SystemConfig
from logyard.service.check.run import check_directory
from logyard.service.door.server import RpcServer
from tests.engine.host.cluster import Cluster, cluster, until


class Doors:
    """A client door for each node, on the port that it had before a crash."""

    def __init__(self, run: Cluster, nursery: trio.Nursery) -> None:
        self.run = run
        self.addresses: dict[int, str] = {}
        self._nursery = nursery
        self._scopes: dict[int, trio.CancelScope] = {}
        self._ended: dict[int, trio.Event] = {}

    async def open(self, number: int) -> None:
        _, _, port = self.addresses.get(number, "::0").rpartition(":")
        server = RpcServer(self.run.nodes[number], f"127.0.0.1:{port}", {}, SystemConfig())
        server.client_addresses = self.addresses
        self.addresses.pop(number, None)
        scope = self._scopes[number] = trio.CancelScope()
        ended = self._ended[number] = trio.Event()

        async def serve(task_status: trio.TaskStatus[int]) -> None:
            with scope:
                await server.serve(task_status)
            ended.set()

        await self._nursery.start(serve)

    async def crash(self, number: int) -> None:
        self._scopes[number].cancel()
        await self.run.crash(number)

    async def close(self, number: int) -> None:
        """All connections end, and nobody gets another one; the node goes on."""
        self._scopes[number].cancel()
        await self._ended[number].wait()

    async def cut(self, number: int) -> None:
        """All connections end; the node goes on."""
        await self.close(number)
        await self.open(number)

    async def start(self, number: int) -> None:
        await self.run.start(number)
        await self.open(number)


@asynccontextmanager
async def served(path: Path, count: int = 3) -> AsyncIterator[tuple[Cluster, Doors]]:
    async with cluster(path, count) as run, trio.open_nursery() as nursery:
        doors = Doors(run, nursery)
        for number in run.ids:
            await doors.open(number)
        yield run, doors
        nursery.cancel_scope.cancel()


async def test_appends_through_crashing_leaders_are_there_once(tmp_path: Path) -> None:
    draw = random.Random(4)
    async with served(tmp_path) as (run, doors):
        found: dict[bytes, int] = {}
        crashes, over, done = 0, False, trio.Event()

        def numbers() -> Iterator[int]:
            return itertools.takewhile(lambda number: not over and (number < 40 or crashes < 3), itertools.count())

        async def append(log: Log, name: bytes) -> None:
            for number in numbers():
                body = b"%s:%d" % (name, number)
                found[body] = await log.append(b"", body * draw.choice((1, 1, 900)))
            records = [(b"", b"%s:many:%d" % (name, number)) for number in range(5)]
            offsets = await log.append_many(records)
            found.update(zip((body for _, body in records), offsets, strict=True))

        def blocking() -> None:
            with connect_sync(list(doors.addresses.values())) as yard:
                log = yard.log("log")
                for number in numbers():
                    body = b"sync:%d" % number
                    found[body] = log.append(b"", body)

        async def write(yard: Yard, other: Yard) -> None:
            async with trio.open_nursery() as writers:
                for number in range(4):
                    writers.start_soon(append, yard.log("log"), b"a%d" % number)
                writers.start_soon(append, other.log("log"), b"b")
                writers.start_soon(trio.to_thread.run_sync, blocking)
            done.set()

        addresses = list(doors.addresses.values())
        async with connect(addresses) as yard, connect(addresses) as other, trio.open_nursery() as nursery:
            nursery.start_soon(write, yard, other)
            try:
                while not done.is_set():
                    before = len(found)
                    # Progress between crashes, and frames under way when they come.
                    await until(lambda before=before: done.is_set() or len(found) > before + 20, "appends go on")
                    leader = await run.leader()
                    await doors.crash(leader)
                    await run.leader()
                    await doors.start(leader)
                    crashes += 1
            finally:
                # A thread hears of nothing else.
                over = True
        await until(lambda: all(not run.member(number).sessions for number in run.nodes), "clients that leave clean up")
        await run.applied()
        for number in run.ids:
            bodies = [body or b"" for _, body in await run.read(number)]
            assert len(bodies) == len(found), "nothing twice, nothing lost"
            for body, offset in found.items():
                assert bodies[offset].startswith(body), "where the answer said"
        await run.close()
        report = await trio.to_thread.run_sync(check_directory, tmp_path / "node-1")
        assert not report["findings"], report


async def test_the_chosen_member_answers_and_waits(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, doors), connect(list(doors.addresses.values())) as yard:
        log = yard.log("log")
        for node in (1, 2, 3, 1, 2, 3):
            offset = await log.append(b"", b"%d" % node, reply_from=node)
            assert run.log(node).end > offset, "that member had applied it"
        place = await log.append(b"", b"early", reply="append")
        for node in run.ids:
            assert await log.wait_applied(place.index, term=place.term, node=node) >= place.index
        assert await log.append(b"", b"quiet", reply="none") == -1
        assert await log.append(b"", b"low", priority="low") == 8
        assert [record.payload for record in await log.poll(6)] == [b"early", b"quiet", b"low"]
        # One that does not answer in time is no reason to doubt the leader's word, but it is not what was asked for.
        follower = next(number for number in run.ids if not run.leads(number))
        await doors.crash(follower)
        with pytest.raises(errors.LogyardError):
            await log.append(b"", b"x", reply_from=follower, timeout=0.3)
        await doors.start(follower)


async def test_sessions_of_a_client_that_died_end_by_themselves(tmp_path: Path) -> None:
    async with served(tmp_path, 1) as (run, doors):
        addresses = list(doors.addresses.values())
        async with trio.open_nursery() as nursery:
            started = trio.Event()

            async def die() -> None:
                async with connect(addresses, session_ttl=1.0) as yard:
                    await yard.log("log").append(b"", b"x")
                    started.set()
                    await trio.sleep_forever()

            nursery.start_soon(die)
            await started.wait()
            nursery.cancel_scope.cancel()
        member = run.member(1)
        assert member.sessions is not None, "nobody said good-bye"
        beats = run.system(1).replicas.heartbeats
        beats.clock += 2.0
        beats.look()
        await until(lambda: member.sessions is None, "silence ends it")


async def test_as_many_records_as_an_entry_may_have_are_appended_together_and_no_more(tmp_path: Path) -> None:
    def blocking(servers: list[str], start: int) -> None:
        with connect_sync(servers) as yard:
            log = yard.log("log")
            with pytest.raises(errors.BadRequest, match=f"{most + 1} records in one frame; send at most {most}"):
                log.append_many([(b"", None)] * (most + 1))
            assert log.append_many([(b"", None)] * most) == range(start, start + most)

    most = SystemConfig().entry_records_max
    async with served(tmp_path, 1) as (_, doors):
        addresses = list(doors.addresses.values())
        async with connect(addresses) as yard:
            log = yard.log("log")
            assert await log.append_many([(b"", None)] * most) == range(most)
            with pytest.raises(errors.BadRequest, match=f"{most + 1} records in one frame; send at most {most}"):
                await log.append_many([(b"", None)] * (most + 1))
            assert await log.append(b"") == most, "that is all that came of it"
        await trio.to_thread.run_sync(blocking, addresses, most + 1)

"""KV groups through clients, sockets and real engines: values of every size, leases, leaders that go."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.client import errors
from logyard.client.aio import Yard, connect
from logyard.client.scans import audit_call
from logyard.client.sync import connect_sync
from logyard.engine.replica.member import Member
from logyard.engine.replica.reader import Located, Reader
from logyard.machines.kv import KV
from logyard.machines.kv import command as kv_command
from logyard.machines.kv.digest import digest
from logyard.machines.kv.snapshot import Frozen
from logyard.machines.registry import create_machine
from logyard.payloads.reference import PayloadRange
from logyard.protocol import kv as kv_wire
from logyard.protocol.kv import Compacted, Compare, Delete, Get, Put, PutResult, TxnResult
from logyard.service.kv import tracks
from logyard.service.kv.reads import KvReads
from tests.engine.host.cluster import Cluster, cluster, until

from ..test_exactly_once import Doors


@asynccontextmanager
async def served(path: Path, count: int = 1, **arguments: int) -> AsyncIterator[tuple[Cluster, Doors, Yard]]:
    """Nodes with the KV group "kv", and a client."""

    def machines(name: str, given: dict[str, Any]) -> Any:
        return create_machine(name, {**given, **arguments} if name == "kv" else given)

    async with cluster(path, count, group="", machines=machines) as run, trio.open_nursery() as nursery:
        await until(lambda: all(len(one.system.live) == count for one in run.nodes.values()), "all are live")
        await run.create("kv", machine="kv")
        doors = Doors(run, nursery)
        for number in run.ids:
            await doors.open(number)
        async with connect(list(doors.addresses.values())) as yard:
            yield run, doors, yard
        nursery.cancel_scope.cancel()


def machine(run: Cluster, number: int) -> KV:
    found = run.member(number, "kv").machine
    assert isinstance(found, KV)
    return found


def live(run: Cluster, number: int) -> list[PayloadRange]:
    """The payloads that the node keeps for the group."""
    member = run.member(number, "kv")
    return list(member.liveness.live_ranges(member.raft.applied))


def test_both_sides_have_the_same_numbers() -> None:
    for name in (
        "PUT", "DELETE", "RANGE", "TXN", "COMPACT", "GRANT", "KEEP", "REVOKE", "TIME_TO_LIVE", "LEASES", "VALUES",
        "STATUS", "PREVIOUS", "KEEP_LEASE", "KEYS_ONLY", "COUNT_ONLY", "REFERENCES", "UNCOUNTED", "DESCENDING",
        "FROM_KEY", "KEY_BYTES_MAX", "NUMBER_MAX",
    ):  # fmt: skip
        assert getattr(kv_wire, name) == getattr(kv_command, name), name
    for name in ("NO_PUT", "NO_DELETE", "PARTS"):
        assert getattr(kv_wire, name) == getattr(tracks, name), name
    assert kv_wire.digest(b"some") == digest(b"some")
    assert kv_wire.SORTS["value"] == kv_command.BY_VALUE and kv_wire.TARGETS["lease"] == kv_command.OF_LEASE
    assert kv_wire.RELATIONS["!="] == kv_command.DIFFERENT and kv_wire.RELATIONS["<"] == kv_command.LESS


async def test_values_of_every_size_come_back(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        values = {b"k%d" % size: bytes(range(256)) * (size // 256) + b"x" * (size % 256)
                  for size in (0, 1, 255, 1023, 1024, 4095, 4096, 70_000, 1 << 20, 3 << 20)}  # fmt: skip
        async with trio.open_nursery() as nursery:
            for key, value in values.items():
                nursery.start_soon(kv.put, key, value)
        found = await kv.range(prefix=True)
        assert {one.key: one.value for one in found.kvs} == values and found.count == len(values)
        assert [one.key for one in found.kvs] == sorted(values)
        for key, value in values.items():
            one = await kv.get(key)
            assert one is not None and one.value == value
        assert await kv.get(b"none") is None
        empty = await kv.get(b"k0")
        assert empty is not None and empty.value == b""
        assert await kv.count(b"k1", b"k2") == 4
        backwards = await kv.range(b"k", prefix=True, descending=True, limit=3)
        assert [one.key for one in backwards.kvs] == sorted(values)[::-1][:3] and backwards.more
        by_mod = await kv.range(b"k", prefix=True, sort="mod", keys_only=True)
        assert [one.mod_revision for one in by_mod.kvs] == list(range(2, 12))


async def test_pages_end_with_keys_of_any_length(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        keys = [b"%03d" % number + b"x" * (kv_wire.KEY_BYTES_MAX - 3) for number in range(300)]
        keys.append(b"\xff" * kv_wire.KEY_BYTES_MAX)
        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(kv.put, key, b"v")
        for descending in (False, True):
            found = await kv.range(prefix=True, descending=descending)
            assert sorted(one.key for one in found.kvs) == keys and found.count == len(keys)


async def test_a_read_waits_as_long_as_it_may_whoever_asks_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, free = KvReads.fetch, trio.Event()

    async def slow(self: KvReads, member: Member, requests: Any) -> Any:
        await free.wait()
        return await real(self, member, requests)

    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        await kv.put(b"a", b"one")
        monkeypatch.setattr(KvReads, "fetch", slow)

        async def impatient() -> None:
            with pytest.raises(errors.LogyardError):
                await kv.get(b"a", timeout=0.05)
            free.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(impatient)
            found = await kv.get(b"a", timeout=20.0)
            assert found is not None and found.value == b"one"


async def test_what_was_done_and_can_not_be_fetched_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chaos found a transaction that its client was told of as refused, and that was done: its node was killed between
    the command's answer and that to the question for the value it read."""

    async def refused(*asked: object) -> Any:
        raise errors.NotLeader(0)

    def blocking(servers: list[str]) -> None:
        with connect_sync(servers) as yard:
            kv = yard.kv("kv")
            with monkeypatch.context() as patch:
                patch.setattr(type(kv), "ask", lambda *asked: trio.from_thread.run(refused))
                with pytest.raises(errors.Unknown, match="done at revision 4"):
                    kv.put(b"a", new, previous=True)

    old, new = b"o" * 5000, b"n" * 5000
    async with served(tmp_path) as (_, doors, yard):
        kv = yard.kv("kv")
        await kv.put(b"a", old)
        with monkeypatch.context() as patch:
            patch.setattr(type(kv), "ask", refused)
            with pytest.raises(errors.Unknown, match="done at revision 3"):
                await kv.txn([Compare(b"a", "value", "=", old)], [Get(b"a"), Put(b"a", new)])
            with pytest.raises(errors.LogyardError) as code:
                await kv.put(b"x", b"", lease=12345)
            assert code.value.code == "lease_not_found", "what the machine refused was not done"
            with pytest.raises(errors.NotLeader):
                await kv.get(b"a")
        found = await kv.get(b"a")
        assert found is not None and found.value == new
        await trio.to_thread.run_sync(blocking, list(doors.addresses.values()))


async def test_transactions_with_large_values_and_what_they_replaced(tmp_path: Path) -> None:
    async with served(tmp_path, history=1) as (run, _, yard):
        kv = yard.kv("kv")
        old, new, third = b"o" * 5000, b"n" * 100_000, b"t" * 2000
        await kv.put(b"a", old)
        done = await kv.txn(
            [Compare(b"a", "value", "=", old), Compare(b"b", "version", "=", 0)],
            [Put(b"a", new, previous=True), Put(b"b", third), Get(b"a", b"c"), Put(b"small", b"s")],
            [Put(b"never", b"x" * 3000)],
        )
        assert done.succeeded and done.revision == 3
        first, _, read, _ = done.results
        assert isinstance(first, PutResult) and first.previous is not None and first.previous.value == old
        assert isinstance(read, kv_wire.GetResult) and [one.value for one in read.kvs] == [new, third]
        again = await kv.txn([Compare(b"a", "value", "=", old)], [Put(b"a", b"")], [Delete(b"b", previous=True)])
        deleted = again.results[0]
        assert not again.succeeded and isinstance(deleted, kv_wire.DeleteResult)
        assert [one.value for one in deleted.previous] == [third]
        with pytest.raises(errors.LogyardError) as refused:
            await kv.put(b"x", b"y" * 5000, lease=12345)
        assert refused.value.code == "lease_not_found"
        await kv.put(b"one", b"more")
        member = run.member(1, "kv")
        (only,) = machine(run, 1).live_refs()
        assert all(
            member.liveness.is_dead_range((index, ordinal), (index, ordinal + 1)) == ((index, ordinal) != only.first)
            for index in range(3, member.raft.applied + 1)
            for ordinal in range(3)
        ), "one large value lives, the others are overwritten or were refused"


async def test_older_revisions_and_compaction(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        for number in range(5):
            await kv.put(b"a", b"%d" % number * 3000)
        then = await kv.get(b"a", revision=3)
        assert then is not None and then.value == b"1" * 3000
        assert await kv.compact(5) == 6
        with pytest.raises(Compacted) as gone:
            await kv.get(b"a", revision=4)
        assert gone.value.revision == 5
        still = await kv.get(b"a", revision=5)
        assert still is not None and still.value == b"3" * 3000
        assert (await kv.status())["compacted"] == 5


async def test_a_long_range_comes_in_pages_of_one_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logyard.client.kv_requests.PAGE_BYTES", 10_000)
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        for number in range(40):
            await kv.put(b"k%02d" % number, b"v" * 2000)
        found = await kv.range(b"k", prefix=True)
        assert [one.key for one in found.kvs] == [b"k%02d" % number for number in range(40)] and not found.more
        backwards = await kv.range(b"k", prefix=True, descending=True, limit=33)
        assert [one.key for one in backwards.kvs] == [b"k%02d" % number for number in range(39, 6, -1)]
        assert backwards.more and backwards.count == 40


async def test_leases_by_clients(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, yard):
        kv = yard.kv("kv")
        lease = await kv.grant(2.0)
        await kv.put(b"here", b"x" * 2000, lease=lease.id)
        found = await kv.time_to_live(lease.id, keys=True)
        assert found.keys == (b"here",) and 0 < found.left <= 2.0 and await kv.leases() == (lease.id,)
        async with kv.watch(b"here") as changes:
            await changes.created()
            assert await kv.keep_alive(lease.id) == 2.0
            with trio.fail_after(10):
                gone = await anext(changes)
        assert gone.events == (kv_wire.Event(b"here", None),)
        with pytest.raises(errors.LogyardError) as refused:
            await kv.keep_alive(lease.id)
        assert refused.value.code == "lease_not_found"
        other = await kv.grant(60, lease=77)
        await kv.put(b"there", b"", lease=other.id)
        assert await kv.revoke(77) == 1 and await kv.get(b"there") is None


async def test_operations_through_crashing_leaders_happen_once(tmp_path: Path) -> None:
    async with served(tmp_path, 3) as (run, doors, yard):
        kv = yard.kv("kv")
        finished = trio.Event()

        async def count(name: bytes) -> None:
            for number in range(60):
                size = 3000 if number % 3 else 3
                done = await kv.put(name, b"%d" % number * size, previous=True)
                assert (done.previous is None) == (number == 0)

        def gone_on(number: int, goal: int) -> bool:
            return finished.is_set() or machine(run, number).state.revision > goal

        async def crash() -> None:
            while not finished.is_set():
                first = await run.leader("kv")
                goal = machine(run, first).state.revision + 40
                await until(partial(gone_on, first, goal), "some more are done")
                if finished.is_set():
                    return
                await doors.crash(first)
                await run.leader("kv", among=[number for number in run.ids if number != first])
                await doors.start(first)

        async with trio.open_nursery() as outer:
            outer.start_soon(crash)
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(count, b"counter%d" % number)
            finished.set()
        found = await kv.range(b"counter", prefix=True)
        assert [one.version for one in found.kvs] == [60] * 4, "each put was applied once"
        assert found.revision == 241
        await run.applied("kv")
        views = [machine(run, number).snapshot() for number in run.ids]
        assert views[0] == views[1] == views[2]
        assert live(run, 1) == live(run, 2) == live(run, 3)


@pytest.mark.long
async def test_stale_reads_are_answered_by_any_member(tmp_path: Path) -> None:
    async with served(tmp_path, 3) as (run, _, yard):
        kv = yard.kv("kv")
        await kv.put(b"a", b"v" * 5000)
        await run.applied("kv")
        for number in run.ids:
            found = await kv.get(b"a", node=number)
            assert found is not None and found.value == b"v" * 5000
        leader = await run.leader("kv")
        others = [number for number in run.ids if number != leader]
        run.partition(leader)
        await run.leader("kv", among=others)
        await kv.put(b"a", b"new")
        old = await kv.get(b"a", node=leader)
        assert old is not None and old.value == b"v" * 5000, "stale on request"
        new = await kv.get(b"a")
        assert new is not None and new.value == b"new"
        run.partition()


async def test_an_audit_reads_what_lives_of_any_machine(tmp_path: Path) -> None:
    async with served(tmp_path, 3) as (run, _, yard):
        kv = yard.kv("kv")
        for number in range(6):
            await kv.put(b"key%d" % (number % 4), bytes([number]) * 5000)
        await kv.compact((await kv.status())["revision"])
        for number in run.ids:
            history = machine(run, number).overview
            await until(lambda history=history: history()["revision"] == 7 and not history()["history"], "it is purged")
        uid = run.member(1, "kv").uid
        rows = [await yard.run(audit_call(number, "kv", uid, 0, 0, 1 << 20)) for number in run.ids]
        assert [(row.start, row.end, row.problems) for row in rows] == [(0, 0, ())] * 3
        assert len({(row.units, row.bytes, row.digest) for row in rows}) == 1 and 20_000 <= rows[0].bytes < 25_000
        await kv.put(b"key0", b"x" * 5000)
        (again,) = [await yard.run(audit_call(await run.leader("kv"), "kv", uid, 0, 0, 1 << 20))]
        assert 25_000 <= again.bytes < 30_000 and again.digest != rows[0].digest


async def test_a_payload_whose_place_is_lost_comes_from_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path, 3) as (run, _, yard):
        kv = yard.kv("kv")
        await kv.put(b"large", b"L" * 5000)
        for number in run.ids:
            await until(lambda number=number: machine(run, number).state.revision == 2, "all have applied it")
        reader, whole = run.nodes[2].system.replicas.reader, Reader.payload_entries

        def lossy(self: Reader, member: Member, first: int, last: int) -> Iterator[Located]:
            """The places of what lies in the log are lost; what a peer sends gets a home in a generation."""
            return (one for one in whole(self, member, first, last) if self is not reader or one.home is not None)

        monkeypatch.setattr(Reader, "payload_entries", lossy)
        found = await kv.get(b"large", node=2)
        assert found is not None and found.value == b"L" * 5000


async def test_a_restart_and_a_snapshot_keep_everything(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, doors, yard):
        kv = yard.kv("kv")
        lease = await kv.grant(60)
        for number in range(30):
            await kv.put(b"k%d" % (number % 7), b"%d" % number * 2000, lease=lease.id if number % 2 else 0)
        await kv.delete(b"k3")
        await run.nodes[1].snapshot()
        await kv.put(b"after", b"x" * 2000)
        before = machine(run, 1).snapshot()
        await doors.crash(1)
        await doors.start(1)
        found = await kv.range(prefix=True, revision=20)
        assert len(found.kvs) == 7 and machine(run, 1).state.revision == 33
        after = machine(run, 1).snapshot()
        assert {name: data for name, data in after.items() if name != "kv"} == {
            name: data for name, data in before.items() if name != "kv"
        }
        one = await kv.txn([Compare(b"k3", "version", "=", 0)], [])
        assert isinstance(one, TxnResult) and one.succeeded


async def test_a_snapshot_is_written_by_a_thread_while_commands_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    writers: list[bool] = []
    written = Frozen.sections

    def sections(self: Frozen) -> dict[str, bytes]:
        writers.append(threading.current_thread() is threading.main_thread())
        begun.set()
        assert go_on.wait(20)
        return written(self)

    async with served(tmp_path) as (run, doors, yard):
        kv = yard.kv("kv")
        for number in range(20):
            await kv.put(b"k%d" % (number % 4), b"%d" % number * 1000)
        monkeypatch.setattr(Frozen, "sections", sections)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.nodes[1].snapshot)
            await trio.to_thread.run_sync(begun.wait)
            await kv.put(b"k0", b"later" * 1000)
            await kv.compact(22)
            await until(lambda: not machine(run, 1).state.purgeable, "what the snapshot names is released")
            go_on.set()
        assert writers == [False]
        assert run.nodes[1].system.transfers.snapshots.mismatches == 0
        await doors.crash(1)
        monkeypatch.undo()
        await doors.start(1)
        newest = await kv.range(b"k", prefix=True)
        assert newest.kvs[0].value == b"later" * 1000 and newest.revision == 22
        with pytest.raises(Compacted):
            await kv.get(b"k0", revision=21)

"""Consumers and senders of topics when something fails, is cancelled, or comes at an unlucky moment."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
from click.testing import CliRunner, Result

from logyard.client._async import consumer
from logyard.client._async.topics import AGE_S_MAX, AGE_S_MIN
from logyard.client._sync import consumer as blocking
from logyard.client._sync.consumer import GroupConsumer
from logyard.client.log import POLL_BYTES
from logyard.client.numbering import slot_of
from logyard.client.sync import connect_sync
from logyard.machines.log.retention import AGE_MS_MAX, AGE_MS_MIN
from logyard.protocol.errors import BadRequest, GroupExists, LogyardError, NotLeader, Refused, Unknown
from logyard.protocol.groups import leave_command
from logyard.protocol.topics import partition_log
from logyard.service.cli import topic as topic_cli
from logyard.service.cli.root import cli
from logyard.service.embedded import EmbeddedLog, EmbeddedMachine, EmbeddedSystem, open_system

from .test_topics import KEYS, served, taken

LONG = bytes(2 << 20)
"""A payload that does not fit into a page of `PAGE` bytes."""
PAGE = 1 << 20


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[EmbeddedSystem]:
    async with open_system(tmp_path / "yard") as found:
        yield found


async def with_long(yard: EmbeddedSystem) -> None:
    """Make a topic of one partition with a record, a long one, and another one."""
    topic = yard.topic("orders")
    await topic.create(1)
    for payload in (b"before", LONG, b"after"):
        await topic.send(b"k", b"", payload)


async def test_a_long_record_that_can_not_be_read_now_is_not_passed_over(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_long(yard)
    plain = EmbeddedLog.read_body
    failures = [LogyardError("nobody leads it", retry="elsewhere"), LogyardError("it is damaged")]

    async def failing(self: EmbeddedLog, *given: Any, **more: Any) -> bytes:
        if failures:
            raise failures.pop(0)
        return await plain(self, *given, **more)

    monkeypatch.setattr(EmbeddedLog, "read_body", failing)
    async with yard.consume("orders", group="g", max_bytes=PAGE) as records:
        assert (await taken(records, 1))[0].offset == 0
        # What passes by itself is waited for; what does not is told.
        with pytest.raises(LogyardError, match="damaged"):
            await records.get(20)
        assert (await records.commit()).offsets == {0: 1}, "what was not given is not done with"
        got = await taken(records, 2)
    assert [one.offset for one in got] == [1, 2] and got[0].payload == LONG


async def test_a_long_record_whose_reading_is_cancelled_is_not_passed_over(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_long(yard)
    plain, scope = EmbeddedLog.read_body, trio.CancelScope()

    async def cancelled(self: EmbeddedLog, *given: Any, **more: Any) -> bytes:
        scope.cancel()
        await trio.lowlevel.checkpoint()
        return await plain(self, *given, **more)

    monkeypatch.setattr(EmbeddedLog, "read_body", cancelled)
    async with yard.consume("orders", group="g", max_bytes=PAGE) as records:
        assert (await taken(records, 1))[0].offset == 0
        with scope:
            await records.get(20)
        assert scope.cancelled_caught
        monkeypatch.setattr(EmbeddedLog, "read_body", plain)
        got = await taken(records, 2)
    assert [one.offset for one in got] == [1, 2] and got[0].payload == LONG


async def test_a_long_record_that_is_truncated_while_it_is_read_is_passed_over(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_long(yard)
    plain = EmbeddedLog.read_body

    async def late(self: EmbeddedLog, *given: Any, **more: Any) -> bytes:
        await self.truncate(2)
        return await plain(self, *given, **more)

    monkeypatch.setattr(EmbeddedLog, "read_body", late)
    async with yard.consume("orders", group="g", start="earliest", max_bytes=PAGE) as records:
        got = await taken(records, 2)
    assert [one.offset for one in got] == [0, 2]


async def test_commits_that_are_always_due_leave_room_for_records(yard: EmbeddedSystem) -> None:
    topic = yard.topic("orders")
    await topic.create(1)
    await topic.send_many([(b"k", b"", b"%d" % number) for number in range(4)])
    async with yard.consume("orders", group="g", commit_every=0) as records:
        assert [one.offset for one in await taken(records, 4)] == [0, 1, 2, 3]
        told = await yard.consumer_group("g").describe()
        assert [one["offset"] for one in told["partitions"]] == [3], "what it came back from is committed at once"


async def test_the_command_line_commits_nothing_that_it_did_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With every record.
    monkeypatch.setattr(topic_cli, "COMMIT_S", 0.0)
    plain, calls = GroupConsumer.get, iter(range(5))

    def breaking(self: GroupConsumer, wait: float) -> Any:
        if next(calls, 0) == 3:
            raise LogyardError("the connection is gone")
        return plain(self, wait)

    async with served(tmp_path) as (_, _, servers):

        def run(*words: str) -> Result:
            return CliRunner().invoke(cli, [*words, "--servers", ",".join(servers)])

        def work() -> None:
            with connect_sync(servers) as yard:
                yard.topic("orders").create(1)
                yard.topic("orders").send_many([(None, b"", b"%d" % number) for number in range(4)])
            with monkeypatch.context() as patched:
                patched.setattr(GroupConsumer, "get", breaking)
                failed = run("consume", "orders", "--group", "g", "--json")
            found = json.loads(failed.stdout)
            assert failed.exit_code and "the connection is gone" in failed.output and not found["ok"]
            assert [one["payload"] for one in found["records"]] == ["0", "1", "2"], "it is written as it comes"
            told = json.loads(run("consume", "orders", "--group", "g", "--count", "4", "--json").stdout)
            assert [one["payload"] for one in told["records"]] == ["0", "1", "2", "3"]
            told = json.loads(run("consume", "orders", "--group", "g", "--wait", "0.1", "--json").stdout)
            assert told["records"] == []

        await trio.to_thread.run_sync(work)


async def test_the_command_line_goes_on_behind_the_fences_of_partitions_that_ended(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, servers):

        def work() -> None:
            with connect_sync(servers) as yard:
                topic = yard.topic("orders")
                topic.create(2)
                topic.send_many([(key, b"", b"before") for key in KEYS])
                topic.shrink(1)
                topic.send_many([(key, b"", b"after") for key in KEYS])
            words = ["consume", "orders", "--json", "--servers", ",".join(servers)]
            for group, more in (("g", ["--wait", "5"]), ("h", ["--follow", "--count", str(len(KEYS) + 1)])):
                # More comes when that is committed, and who reads an object that names an error may make nothing of it.
                told = json.loads(CliRunner().invoke(cli, [*words, "--group", group, *more]).stdout)
                assert told["ok"] and [one["payload"] for one in told["records"]] == ["before"] * len(KEYS)
                told = json.loads(CliRunner().invoke(cli, [*words, "--group", group, "--count", "12"]).stdout)
                assert [one["payload"] for one in told["records"]] == ["after"] * len(KEYS)

        await trio.to_thread.run_sync(work)


async def test_a_group_that_nobody_leads_is_no_topic_without_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two of three nodes dead a new group took nothing for a minute, and the command was a success."""

    def nobody_leads(self: GroupConsumer) -> None:
        raise NotLeader.told("_groups-3: no leader known")

    async with served(tmp_path) as (_, _, servers):

        def work() -> None:
            with connect_sync(servers) as yard:
                yard.topic("orders").create(1)
            words = ["consume", "orders", "--group", "g", "--wait", "0.1", "--json", "--servers", ",".join(servers)]
            with monkeypatch.context() as patched:
                patched.setattr(GroupConsumer, "_join", nobody_leads)
                failed = CliRunner().invoke(cli, words)
            assert failed.exit_code == 1 and json.loads(failed.stdout)["error"]["code"] == "not_leader"
            assert json.loads(CliRunner().invoke(cli, words).stdout)["ok"]

        await trio.to_thread.run_sync(work)


async def test_a_commit_waits_no_longer_than_it_is_told(yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = yard.topic("orders")
    await topic.create(1)
    await topic.send(b"k", b"", b"x")
    plain, waited = EmbeddedMachine.command, list[float | None]()

    async def command(self: EmbeddedMachine, *given: Any, timeout: float | None = None, **more: Any) -> bytes:
        waited.append(timeout)
        return await plain(self, *given, timeout=timeout, **more)

    async with yard.consume("orders", group="g", commit_every=None) as records:
        (record,) = await taken(records, 1)
        monkeypatch.setattr(EmbeddedMachine, "command", command)
        assert (await records.commit(record, timeout=7.5)).offsets == {0: 1}
    assert waited[0] == 7.5


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(143)], ids=["SIGINT", "SIGTERM"])
async def test_an_interrupted_command_line_commits_what_it_wrote(
    interrupt: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Never by itself.
    monkeypatch.setattr(topic_cli, "COMMIT_S", 1000.0)
    plain, calls = GroupConsumer.__next__, iter(range(5))
    committed = list[tuple[int, float | None]]()

    def interrupted(self: GroupConsumer) -> Any:
        found = plain(self)
        if next(calls) == 3:
            # The record before it was written, this one was not.
            raise interrupt
        return found

    def twice(self: GroupConsumer, record: Any = None, *, timeout: float | None = None) -> Any:
        committed.append((record.offset, timeout))
        raise KeyboardInterrupt

    async with served(tmp_path) as (_, _, servers):

        def run(*words: str) -> Result:
            return CliRunner().invoke(cli, [*words, "--servers", ",".join(servers)])

        def offset() -> Any:
            return json.loads(run("groups", "describe", "g", "--json").stdout)["partitions"][0]["offset"]

        def work() -> None:
            with connect_sync(servers) as yard:
                yard.topic("orders").create(1)
                yard.topic("orders").send_many([(None, b"", b"%d" % number) for number in range(9)])
            monkeypatch.setattr(GroupConsumer, "__next__", interrupted)
            ended = run("consume", "orders", "--group", "g", "--follow")
            assert [line.split("\t")[1] for line in ended.stdout.splitlines()] == ["0", "1", "2"]
            assert ended.exit_code == (1 if isinstance(interrupt, KeyboardInterrupt) else 143)
            assert offset() == 3
            # Another one does not wait for the commit; nor for its partitions to go to others.
            monkeypatch.setattr(GroupConsumer, "commit", twice)
            assert run("consume", "orders", "--group", "g", "--follow", "--count", "1").exit_code == 1
            assert committed == [(3, None), (3, topic_cli.INTERRUPTED_S)] and offset() == 3

        await trio.to_thread.run_sync(work)


@pytest.mark.long
async def test_a_partition_that_nobody_leads_does_not_keep_a_new_group_from_the_others(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = yard.topic("orders")
    await topic.create(2)
    sent = [await topic.send(key) for key in KEYS]
    plain, dead = EmbeddedSystem.run, [partition_log("orders", 0)]

    async def run(self: EmbeddedSystem, call: Any, timeout: float | None = None, pushed: Any = None) -> Any:
        if call.arguments.get("name") in dead and call.method in ("latest", "poll"):
            raise LogyardError("nobody leads it", retry="elsewhere")
        return await plain(self, call, timeout, pushed)

    monkeypatch.setattr(EmbeddedSystem, "run", run)
    async with yard.consume("orders", group="g") as records:
        first = sum(one.partition == 1 for one in sent)
        assert {one.partition for one in await taken(records, first)} == {1}
        dead.clear()
        assert {one.partition for one in await taken(records, len(KEYS) - first)} == {0}


async def test_pages_that_do_not_arrive_in_time_are_asked_for_in_smaller_parts(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = yard.topic("orders")
    await topic.create(1)
    for _ in range(20):
        await topic.send(b"k", b"", bytes(100_000))
    plain, late, rate = EmbeddedSystem.run, [0.0], [100_000.0]
    pages: list[int] = []

    async def run(self: EmbeddedSystem, call: Any, timeout: float | None = None, pushed: Any = None) -> Any:
        if call.method != "poll":
            return await plain(self, call, timeout, pushed)
        assert timeout is not None and timeout <= self.timeout + 1
        pages.append(call.arguments["max_bytes"])
        # As over a line of so many bytes a second.
        seconds = pages[-1] / rate[0]
        late[0] += min(seconds, timeout)
        if seconds > timeout:
            raise Unknown("poll: no answer in time")
        return await plain(self, call, timeout, pushed)

    monkeypatch.setattr(EmbeddedSystem, "run", run)
    monkeypatch.setattr(EmbeddedSystem, "clock", lambda self: trio.current_time() + late[0])
    async with yard.consume("orders", group="g", ttl=300) as records:
        got = await taken(records, 20)
        assert [one.offset for one in got] == list(range(20))
        assert pages[0] == POLL_BYTES and min(pages) == pages[-1] < POLL_BYTES, "it does not try more again and again"
        rate[0] = 1e9
        while pages[-1] < POLL_BYTES:
            await topic.send(b"k", b"", None)
            await taken(records, 1)


async def test_senders_that_slept_find_the_way_when_their_partitions_are_gone(yard: EmbeddedSystem) -> None:
    stale = yard.topic("orders")
    await stale.create(3)
    before = {(await stale.send(key)).partition for key in KEYS}
    await yard.topic("orders").shrink(1, force=True)
    after: list[int] = []

    async def send(key: bytes) -> None:
        after.append((await stale.send(key)).partition)

    # Several at once: one of them is the first to hear of it.
    async with trio.open_nursery() as nursery:
        for key in KEYS:
            nursery.start_soon(send, key)
    assert before == {0, 1, 2} and after == [0] * len(KEYS)


@pytest.mark.parametrize(("verb", "times"), [("send", 2), ("send_many", 1), ("produce", 2)])
async def test_a_long_record_that_takes_all_of_its_time_finds_the_way_when_partitions_changed(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch, verb: str, times: int
) -> None:
    topic = yard.topic("orders")
    await topic.create(1)
    producer = await topic.producer("p")
    key, other = (next(key for key in KEYS if slot_of(key) // 8192 == half) for half in (1, 0))
    assert (await topic.send(key)).partition == 0
    await yard.topic("orders").grow(2)
    plain, plain_many, late = EmbeddedLog._upload, EmbeddedLog._send_many, [0.0]

    async def upload(self: EmbeddedLog, *given: Any, **more: Any) -> int:
        late[0] += 1000
        return await plain(self, *given, **more)

    async def send_many(self: EmbeddedLog, records: Any, timeout: float, *given: Any) -> Any:
        assert timeout > 1, "others have what was left before it"
        return await plain_many(self, records, timeout, *given)

    monkeypatch.setattr(EmbeddedLog, "_upload", upload)
    monkeypatch.setattr(EmbeddedLog, "_send_many", send_many)
    monkeypatch.setattr(EmbeddedSystem, "clock", lambda self: trio.current_time() + late[0])
    if verb == "send":
        sent = [await topic.send(key, b"", LONG)]
    elif verb == "send_many":
        # By the old layout they go together, by the new one only the first is a record of its own.
        sent = await topic.send_many([(key, b"", LONG), (other, b"", None), (other, b"", None)])
    else:
        sent = [await producer.send(key, b"", LONG)]
    assert sent[0].partition == 1 and late == [1000 * times]


async def test_who_joins_again_because_no_answer_came_is_one_member(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = yard.topic("orders")
    await topic.create(2)
    await topic.send_many([(key, b"", None) for key in KEYS])
    plain, lost = EmbeddedMachine.command, [1, 2]

    async def command(self: EmbeddedMachine, *given: Any, **more: Any) -> bytes:
        reply = await plain(self, *given, **more)
        if self.name.startswith("_groups") and lost:
            lost.pop()
            raise Unknown("the answer was lost")
        return reply

    monkeypatch.setattr(EmbeddedMachine, "command", command)
    async with yard.consume("orders", group="g", ttl=300) as records:
        await taken(records, len(KEYS))
        assert not lost
        told = await yard.consumer_group("g").describe()
        assert len(told["members"]) == 1, "a second one would keep partitions for five minutes"


async def test_who_ends_for_want_of_an_offset_leaves(yard: EmbeddedSystem) -> None:
    await yard.topic("orders").create(1)
    async with yard.consume("orders", group="strict", start="error") as records:
        with pytest.raises(LogyardError) as refused:
            await records.get(20)
        assert refused.value.code == "no_offset"
    assert (await yard.consumer_group("strict").describe())["members"] == []


async def test_who_is_cancelled_leaves(yard: EmbeddedSystem) -> None:
    topic = yard.topic("orders")
    await topic.create(1)
    await topic.send(b"k")
    with trio.CancelScope() as scope:
        async with yard.consume("orders", group="g", ttl=300) as records:
            await taken(records, 1)
            scope.cancel()
            await records.get(20)
    assert scope.cancelled_caught
    assert (await yard.consumer_group("g").describe())["members"] == []


@pytest.mark.long
async def test_who_is_cancelled_with_the_system_does_not_hang(tmp_path: Path) -> None:
    began = trio.current_time()
    with trio.fail_after(60), trio.CancelScope() as scope:
        async with open_system(tmp_path / "yard") as yard:
            await yard.topic("orders").create(1)
            await yard.topic("orders").send(b"k")
            async with yard.consume("orders", group="g", ttl=300) as records:
                await taken(records, 1)
                began = trio.current_time()
                scope.cancel()
                await records.get(20)
    assert scope.cancelled_caught and trio.current_time() - began < 20


async def test_a_topic_that_is_half_deleted_is_not_waited_for(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "REFRESH_S", 0.05)
    topic = yard.topic("orders")
    await topic.create(1)
    await topic.send(b"k")
    async with yard.consume("orders", group="g") as records:
        await taken(records, 1)
        # Who deletes it is cut off behind the first step.
        await topic._tell("delete", {"name": "orders"})
        with pytest.raises(LogyardError) as refused:
            await records.get(20)
        assert refused.value.code == "unknown_topic"
    async with yard.consume("orders", group="h") as records:
        with pytest.raises(LogyardError) as refused:
            await records.get(2)
        assert refused.value.code == "unknown_topic"


@pytest.mark.parametrize("member", ["", "m"])
async def test_a_topic_that_is_made_anew_is_read_from_its_start(yard: EmbeddedSystem, member: str) -> None:
    topic = yard.topic("orders")
    await topic.create(1)
    await topic.send_many([(b"k", b"", b"old")] * 2)
    async with yard.consume("orders", group="g", member=member, ttl=5) as records:
        await taken(records, 2)
        await topic.delete()
        await topic.create(1)
        await topic.send_many([(b"k", b"", b"%d" % number) for number in range(5)])
        got = await taken(records, 5)
    assert [one.payload for one in got] == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_group_is_reset_to_what_a_partition_has(yard: EmbeddedSystem) -> None:
    topic = yard.topic("orders")
    await topic.create(1)
    await topic.send_many([(b"k", b"", None)] * 3)
    group = yard.consumer_group("g")
    assert await group.reset("orders", 100) == {0: 3}
    async with yard.consume("orders", group="g") as records:
        await topic.send(b"k", b"", b"next")
        (one,) = await taken(records, 1)
        assert one.payload == b"next", "nothing is read that was passed over"
        assert (await records.commit(one)).offsets == {0: 4}
    await yard.log(partition_log("orders", 0)).truncate(2)
    assert await group.reset("orders", 0) == {0: 2}
    for wrong in (-1, "middle"):
        with pytest.raises(BadRequest):
            await group.reset("orders", wrong)


async def test_a_record_of_an_ownership_that_is_over_is_told_as_lost(yard: EmbeddedSystem) -> None:
    topic = yard.topic("orders")
    await topic.create(1)
    await topic.send(b"k")
    async with yard.consume("orders", group="g", member="m") as older:
        (one,) = await taken(older, 1)
        coordinator = yard.machine(older._coordinator)
        # As after a silence that was too long.
        await coordinator.command(leave_command("g", "m", older._own.member))
        (again,) = await taken(older, 1)
        assert again.offset == one.offset and again.epoch > one.epoch
        assert await older.commit(one) == ({}, (0,))
        assert await older.commit(again) == ({0: 1}, ())


@pytest.mark.parametrize("kept", [{"age": 0.5}, {"age": float("inf")}, {"bytes": 1 << 70}, {"records": -1}])
async def test_a_topic_does_not_come_to_be_half_made_by_what_no_log_can_keep(
    yard: EmbeddedSystem, kept: dict[str, Any]
) -> None:
    assert (AGE_S_MIN * 1000, AGE_S_MAX) == (AGE_MS_MIN, AGE_MS_MAX // 1000)
    topic = yard.topic("orders")
    with pytest.raises(BadRequest):
        await topic.create(1, **kept)
    assert await yard.topics() == []
    await topic.create(1)
    with pytest.raises(BadRequest):
        await topic.retain(**kept)
    assert len((await topic.grow(2)).live) == 2


async def test_a_blocking_consumer_that_nobody_closed_has_no_thread_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "AWAY_S", 0.1)
    async with served(tmp_path) as (_, _, servers):

        def work() -> None:
            with connect_sync(servers) as yard:
                yard.topic("orders").create(1)
                yard.topic("orders").send_many([(b"k", b"", None)] * 2)
                records = yard.consume("orders", group="g", ttl=1)
                assert next(records).offset == 0
                for one in threads():
                    one.join(20)
                assert not threads()
                # One that comes back after all goes on, and says that it lives.
                while not threads():
                    records.get(0.05)

        await trio.to_thread.run_sync(work)


async def test_a_client_that_is_closed_leaves_no_thread_of_a_consumer(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, servers):

        def work() -> None:
            with connect_sync(servers) as yard:
                yard.topic("orders").create(1)
                yard.topic("orders").send_many([(b"k", b"", None)])
                assert next(yard.consume("orders", group="g", ttl=1)).offset == 0
                assert threads()
            for one in threads():
                one.join(20)
            assert not threads()

        await trio.to_thread.run_sync(work)


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "logyard consumer" and one.is_alive()]


async def test_what_was_there_before_a_topic_outlives_it(yard: EmbeddedSystem) -> None:
    await yard.create("orders.0")
    await yard.log("orders.0").append(b"mine")
    await yard.log("orders.0").append(b"too")
    await yard.create("jobs.1", machine="queue")
    await yard.queue("jobs.1").publish(b"mine")
    with pytest.raises(LogyardError, match="has records of its own"):
        await yard.topic("orders").create(2, records=1)
    with pytest.raises(GroupExists):
        await yard.topic("jobs").create(2)
    for name in ("orders", "jobs"):
        await yard.topic(name).delete()
    assert await yard.topics() == []
    assert (await yard.log("orders.0").read(0)).metadata == b"mine"
    kept = await yard.log("orders.0").query(msgpack.packb(["retention"]))
    assert msgpack.unpackb(kept) == [0, 0, 0], "nor does the topic say what it keeps"
    assert (await yard.queue("jobs.1").stats())["ready"] == 1


async def test_partitions_are_not_added_over_a_log_that_is_somebody_s_own(yard: EmbeddedSystem) -> None:
    topic = yard.topic("orders")
    await topic.create(1)
    await yard.create("orders.1")
    await yard.log("orders.1").append(b"mine")
    for _ in range(2):
        with pytest.raises(Refused, match=r"log 'orders.1' has records of its own: delete it"):
            await topic.grow(2)
    assert {(await topic.send(key)).partition for key in KEYS} == {0}, "nothing was fenced for it"
    assert (await yard.log("orders.1").read(0)).metadata == b"mine"
    await yard.delete("orders.1")
    assert len((await topic.grow(2)).live) == 2
    assert {(await topic.send(key)).partition for key in KEYS} == {0, 1}


async def test_a_topic_that_is_deleted_while_it_is_made_leaves_its_name_free(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, deleted = EmbeddedSystem.create_many, False

    async def create_many(self: EmbeddedSystem, names: Any, **more: Any) -> None:
        nonlocal deleted
        if "orders.0" in names and not deleted:
            deleted = True
            await self.topic("orders").delete()
        await plain(self, names, **more)

    monkeypatch.setattr(EmbeddedSystem, "create_many", create_many)
    topic = yard.topic("orders")
    with pytest.raises(LogyardError) as refused:
        await topic.create(2)
    assert refused.value.code == "unknown_topic"
    assert not [one["name"] for one in yard.groups() if one["name"].startswith("orders")]
    await topic.create(2)
    await topic.send(b"k")


async def test_what_a_former_topic_left_behind_goes_with_the_one_of_now(yard: EmbeddedSystem) -> None:
    topic = yard.topic("orders")
    row = await topic.create(2)
    # Whoever made it anew behind its deletion was killed.
    await topic._tell("delete", {"name": "orders"})
    await topic._tell("deleted", {"id": row.id})
    with pytest.raises(LogyardError, match="is partition 0 of topic 1"):
        await topic.create(2)
    await topic.delete()
    assert len((await topic.create(2)).live) == 2

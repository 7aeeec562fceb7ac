"""Topics and consumer groups in every face, over sockets on real engines and inside one process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import trio
from click.testing import CliRunner

from logyard.client._async import consumer, topics
from logyard.client.aio import connect
from logyard.client.numbering import slot_of
from logyard.client.reading import Consumed
from logyard.client.sync import connect_sync
from logyard.protocol.errors import BadRequest, GroupExists, LogyardError, NotLeader, Unknown, UnknownGroup
from logyard.protocol.groups import coordinator_of, coordinators
from logyard.protocol.topics import SLOTS, partition_log
from logyard.service.cli.root import cli
from logyard.service.embedded import EmbeddedMachine, EmbeddedSystem, open_system
from tests.engine.host.cluster import Cluster, cluster, until

from .test_exactly_once import Doors

KEYS = [b"key-%d" % number for number in range(12)]


@asynccontextmanager
async def served(path: Path, count: int = 1) -> AsyncIterator[tuple[Cluster, Doors, list[str]]]:
    async with cluster(path, count, group="") as run, trio.open_nursery() as nursery:
        await until(lambda: all(len(one.system.live) == count for one in run.nodes.values()), "all are live")
        doors = Doors(run, nursery)
        for number in run.ids:
            await doors.open(number)
        yield run, doors, list(doors.addresses.values())
        nursery.cancel_scope.cancel()


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[EmbeddedSystem]:
    async with open_system(tmp_path / "yard") as found:
        yield found


async def taken(records: Any, count: int, seconds: float = 30.0) -> list[Consumed]:
    found: list[Consumed] = []
    with trio.fail_after(seconds):
        while len(found) < count:
            found.append(await records.__anext__())
    return found


async def whole(yard: Any) -> None:
    """A topic's life, in a face under trio or asyncio."""
    topic = yard.topic("orders")
    await topic.create(3)
    await topic.create(3)
    with pytest.raises(GroupExists):
        await topic.create(4)
    sent = [await topic.send(key, b"m", b"%d" % number) for number, key in enumerate(KEYS * 2)]
    assert len({(one.partition, one.offset) for one in sent}) == 24
    assert [one.partition for one in sent[:12]] == [one.partition for one in sent[12:]], "a key's partition is one"
    many = await topic.send_many([(key, b"m", b"many") for key in KEYS] + [(None, b"", None)])
    assert [one.partition for one in many[:12]] == [one.partition for one in sent[:12]]
    async with yard.consume("orders", group="g", ttl=5) as records:
        got: list[Consumed] = []
        while len(got) < 37:
            got.append(await records.__anext__())
        assert {one.key for one in got} == {*KEYS, None}
        for key in KEYS:
            number = KEYS.index(key)
            payloads = [one.payload for one in got if one.key == key]
            assert payloads == [b"%d" % number, b"%d" % (number + 12), b"many"]
        assert records.assignment == [0, 1, 2]
        # The last one is with the loop: it is not done with.
        done = await records.commit()
        assert sum(done.offsets.values()) == 36 and not done.lost
        done = await records.commit(got[-1])
        assert list(done.offsets) == [got[-1].partition]
    told = await yard.consumer_group("g").describe()
    assert [one["lag"] for one in told["partitions"]] == [0, 0, 0] and told["state"] == "empty"
    assert [one["group"] for one in await yard.consumer_groups()] == ["g"]
    assert [one.name for one in await yard.topics()] == ["orders"]
    await yard.consumer_group("g").reset("orders", "earliest")
    async with yard.consume("orders", group="g", ttl=5) as records:
        assert (await records.get(20)).offset == 0
        with pytest.raises(LogyardError) as refused:
            await yard.consumer_group("g").delete()
        assert refused.value.code == "group_active"
    assert [one.number for one in (await topic.shrink(2)).draining] == [2]
    assert [one.number for one in (await topic.alter(2, force=True)).partitions] == [0, 1]
    assert len((await topic.alter(3)).live) == 3
    await yard.consumer_group("g").delete()
    assert await topic.purge() > 0
    await topic.delete()
    with pytest.raises(LogyardError) as refused:
        await yard.topic("orders").send(b"k")
    assert refused.value.code == "unknown_topic"


async def test_embedded(yard: EmbeddedSystem) -> None:
    await whole(yard)


async def test_over_the_network(tmp_path: Path) -> None:
    async with served(tmp_path, 3) as (_, _, servers), connect(servers) as yard:
        await whole(yard)


async def test_under_asyncio(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, servers):

        async def main() -> None:
            async with connect(servers) as yard:
                await whole(yard)

        await trio.to_thread.run_sync(asyncio.run, main())


async def test_blocking(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, servers):

        def work() -> None:
            with connect_sync(servers) as yard:
                topic = yard.topic("orders")
                topic.create(3)
                for number, key in enumerate(KEYS * 2):
                    topic.send(key, b"m", b"%d" % number)
                producer = topic.producer("mine")
                assert producer.send(b"k", sequence=5) == producer.send(b"k", sequence=5)
                assert topic.producer("mine").last == 5
                with yard.consume("orders", group="g", ttl=5) as records:
                    got = []
                    for record in records:
                        got.append(record)
                        if len(got) == 25:
                            # The body may take longer than the member lives: its thread says that it does.
                            threading.Event().wait(6.0)
                            assert records.commit(record).offsets and not records.commit().lost
                            break
                told = yard.consumer_group("g").describe()
                assert [one["lag"] for one in told["partitions"]] == [0, 0, 0]
                topic.grow(4)
                assert len(topic.shrink(2).live) == 2
                assert len(topic.shrink(1, force=True).partitions) == 1
                topic.delete()

        await trio.to_thread.run_sync(work)


async def test_members_share_a_topic_and_take_over(yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = yard.topic("orders")
    await topic.create(4)
    await topic.send_many([(b"%d" % number, b"", None) for number in range(40)])
    async with yard.consume("orders", group="g", ttl=3, commit_every=0.2) as first:
        seen = Counter((one.partition, one.offset) for one in await taken(first, 40))
        async with yard.consume("orders", group="g", ttl=3, commit_every=0.2) as second:
            with trio.fail_after(20):
                while len(first.assignment) != 2 or len(second.assignment) != 2:
                    for one in (first, second):
                        more = await one.get(0.05)
                        assert more is None, f"{more} was committed, and is read again"
            assert sorted(first.assignment + second.assignment) == [0, 1, 2, 3]
            await topic.send_many([(b"%d" % number, b"", None) for number in range(40, 80)])
            with trio.fail_after(20):
                while sum(seen.values()) < 80:
                    for one in (first, second):
                        record = await one.get(0.05)
                        if record is not None:
                            assert record.partition in one.assignment
                            seen[record.partition, record.offset] += 1
            # The loop of `first` does not come back: `second` has all of it when its time is over.
            await second.commit()
            monkeypatch.setattr(consumer, "AWAY_S", 1.0)
            with trio.fail_after(20):
                while len(second.assignment) != 4:
                    record = await second.get(0.2)
                    if record is not None:
                        seen[record.partition, record.offset] += 1
        assert len(seen) == 80


async def test_the_same_name_takes_over_at_once_and_fences(yard: EmbeddedSystem) -> None:
    topic = yard.topic("orders")
    await topic.create(2)
    await topic.send_many([(b"%d" % number, b"", None) for number in range(10)])
    older = yard.consume("orders", group="g", member="a")
    got = await taken(older, 6)
    await older.commit(got[-1])
    newer = yard.consume("orders", group="g", member="a")
    rest = await taken(newer, 4, 5.0)
    places = [(one.partition, one.offset) for one in got + rest]
    assert len(set(places)) == 10
    with pytest.raises(LogyardError) as refused, trio.fail_after(20):
        while True:
            await older.get(0.1)
            await older.commit()
            await trio.sleep(0.1)
    assert refused.value.code == "fenced"
    await older.close()
    await newer.close()
    # It left nothing: whoever has its name next begins where it was.
    async with yard.consume("orders", group="g", member="a") as third:
        assert await taken(third, 4, 5.0)


async def test_partitions_that_are_added_keep_each_keys_order(yard: EmbeddedSystem) -> None:
    topic, stale = yard.topic("orders"), yard.topic("orders")
    await topic.create(2)
    for number in range(5):
        for key in KEYS:
            await stale.send(key, b"", b"%d" % number)
    async with yard.consume("orders", group="g", ttl=5, commit_every=0.1) as records:
        got = await taken(records, 10)
        row = await topic.grow(5)
        assert [one.number for one in row.live] == [0, 1, 2, 3, 4] and row.epoch == 2
        # This one does not know yet.
        for number in range(5, 10):
            for key in KEYS:
                await stale.send(key, b"", b"%d" % number)
        got += await taken(records, 10 * len(KEYS) - 10)
        assert len(records.assignment) == 5
    for key in KEYS:
        assert [one.payload for one in got if one.key == key] == [b"%d" % number for number in range(10)]
    assert {one.partition for one in got} > {0, 1}


async def test_partitions_that_are_taken_away_keep_each_keys_order(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "RETIRE_S", 0.1)
    monkeypatch.setattr(consumer, "REFRESH_S", 0.1)
    topic, stale = yard.topic("orders"), yard.topic("orders")
    await topic.create(5)
    for number in range(5):
        for key in KEYS:
            await stale.send(key, b"", b"%d" % number)
    async with yard.consume("orders", group="g", ttl=5, commit_every=0.1) as records:
        got = await taken(records, 10)
        row = await topic.shrink(2)
        assert [one.number for one in row.live] == [0, 1] and row.epoch == 2
        assert [one.number for one in row.draining] == [2, 3, 4] and row.state == "live"
        for number in range(5, 10):
            for key in KEYS:
                sent = await stale.send(key, b"", b"%d" % number)
                assert sent.partition < 2
        # A second group begins when the partitions have ended: it reads them as well.
        async with yard.consume("orders", group="h", ttl=5, commit_every=0.1) as others:
            seen = await taken(others, 10 * len(KEYS))
            got += await taken(records, 10 * len(KEYS) - 10)
            with trio.fail_after(20):
                while len((await topic.describe()).partitions) > 2:
                    assert await records.get(0.1) is None and await others.get(0.1) is None
            assert records.assignment == others.assignment == [0, 1]
    for read in (got, seen):
        for key in KEYS:
            assert [one.payload for one in read if one.key == key] == [b"%d" % number for number in range(10)]
    assert all(one["name"] not in ("orders.2", "orders.3", "orders.4") for one in yard.groups())
    # Their numbers are used again, by other logs.
    row = await topic.grow(4)
    assert [(one.number, one.born) for one in row.live] == [(0, 0), (1, 0), (2, 3), (3, 3)]
    for key in KEYS:
        await stale.send(key, b"", b"10")
    async with yard.consume("orders", group="g", ttl=5, commit_every=0.1) as records:
        more = await taken(records, len(KEYS))
        assert {one.key for one in more} == set(KEYS) and await records.get(0.3) is None
    told = await yard.consumer_group("g").describe()
    assert [(one["partition"], one["lag"]) for one in told["partitions"]] == [(0, 0), (1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize("change", ["shrink", "grow"])
async def test_a_loop_whose_commits_others_wait_for_is_told_so(yard: EmbeddedSystem, change: str) -> None:
    topic = yard.topic("orders")
    await topic.create(2 if change == "shrink" else 1)
    # In the last half of the slots are those that a second partition has.
    moved = [key for key in KEYS if slot_of(key) >= SLOTS // 2]
    for key in moved:
        await topic.send(key, b"", b"before")
    await (topic.shrink(1) if change == "shrink" else topic.grow(2))
    for key in moved:
        assert (await topic.send(key, b"", b"after")).partition == (change == "grow")
    async with yard.consume("orders", group="g", ttl=5) as records:
        for _ in moved:
            (record,) = await taken(records, 1)
            assert records.trouble is None
            # It does not cover the record in hand, so the last one before the fence is never committed.
            await records.commit()
        with trio.fail_after(20):
            while records.trouble is None:
                assert await records.get(0.1) is None
        assert records.trouble.code == "uncommitted" and "commit(record)" in str(records.trouble)
        await records.commit(record)
        assert {one.payload for one in await taken(records, len(moved))} == {b"after"}
        assert records.trouble is None
    async with yard.consume("orders", group="h", ttl=5, commit_every=100) as records:
        await taken(records, len(moved))
        assert await records.get(1) is None and records.trouble is None, "it commits by itself"


async def test_a_coordinator_that_nobody_leads_does_not_keep_records_back_for_long(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "RETIRE_S", 0.1)
    monkeypatch.setattr(consumer, "REFRESH_S", 0.1)
    topic = yard.topic("orders")
    await topic.create(2)
    await topic.send_many([(key, b"", b"before") for key in KEYS])
    waited, plain = list[float | None](), EmbeddedMachine.query

    async def query(self: EmbeddedMachine, *given: Any, timeout: float | None = None, **more: Any) -> bytes:
        if self.name not in coordinators():
            return await plain(self, *given, timeout=timeout, **more)
        # As when that time is over.
        waited.append(timeout)
        raise NotLeader.told("no leader known")

    monkeypatch.setattr(EmbeddedMachine, "query", query)
    async with yard.consume("orders", group="g", ttl=5) as records:
        with pytest.raises(NotLeader):
            await topic.shrink(1)
        waited.clear()
        with trio.fail_after(20):
            while not waited:
                await records.get(0.1)
    assert waited == [consumer.POLL_S] * len(waited)


async def test_what_nobody_has_read_stays_unless_it_is_forced(yard: EmbeddedSystem) -> None:
    topic = yard.topic("orders")
    await topic.create(3)
    for key in KEYS:
        await topic.send(key, b"", b"1")
    with pytest.raises(LogyardError, match="goes with that"):
        await yard.delete("orders.2")
    row = await topic.shrink(1)
    assert [one.number for one in row.draining] == [1, 2]
    with pytest.raises(LogyardError, match="goes with that"):
        await yard.delete("orders.2")
    async with yard.consume("orders", group="g", commit_every=0.1) as records:
        await records.commit((await taken(records, 1))[0])
    assert [one.number for one in (await topic.alter(1)).draining] == [1, 2], "a group has not read them"
    told = await yard.consumer_group("g").describe()
    assert sum(one["lag"] for one in told["partitions"]) + 1 == len(KEYS) and len(told["partitions"]) == 3
    with pytest.raises(BadRequest, match="to have fewer"):
        await topic.alter(4, force=True)
    # What is empty goes.
    end = (await yard.log("orders.1").latest()).end
    await yard.log("orders.1").truncate(end)
    assert [one.number for one in (await topic.retire()).draining] == [2]
    row = await topic.alter(1, force=True)
    assert [one.number for one in row.partitions] == [0] and len(row.ended) == 2
    with pytest.raises(BadRequest):
        await topic.shrink(2)
    with pytest.raises(LogyardError):
        await topic.shrink(0)
    # The group goes on with what is left, also of a partition that waited for those that were dropped.
    async with yard.consume("orders", group="g", commit_every=0.1) as records:
        await topic.send(b"k", b"", b"last")
        with trio.fail_after(20):
            while (await records.__anext__()).payload != b"last":
                pass
    await topic.delete()
    assert not [one["name"] for one in yard.groups() if one["name"].startswith("orders")]


async def test_the_command_line_takes_partitions_away(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, servers):

        def run(*words: str) -> str:
            found = CliRunner().invoke(cli, [*words, "--servers", ",".join(servers)], catch_exceptions=False)
            assert found.exit_code == 0, found.output
            return found.stdout

        def work() -> None:
            run("topic", "create", "orders", "--partitions", "3")
            with connect_sync(servers) as yard:
                yard.topic("orders").send_many([(key, b"", b"1") for key in KEYS])
            send = ["topic", "send", "orders", "--separator", ":", "--json", "--servers", ",".join(servers)]
            found = CliRunner().invoke(cli, send, input="a:1\nb:2\nc\nd:4\n")
            message = json.loads(found.stdout)["error"]["message"]
            assert found.exit_code == 2 and "line 3 has no ':'" in message and "2 lines before it are sent" in message
            said = run("topic", "alter", "orders", "--partitions", "1")
            assert said.startswith("orders has 1 partitions; those that ended stay until") and "1, 2" in said
            assert run("topic", "list") == "orders\tlive\t1\t2\t2\n"
            rows = [line.split("\t") for line in run("topic", "describe", "orders").splitlines()]
            assert [(row[0], row[2]) for row in rows] == [("0", "16384"), ("1", "0"), ("2", "0")]
            assert rows[0][6] == "-" and all(row[6] == row[4] for row in rows[1:])
            told = json.loads(run("topic", "alter", "orders", "--partitions", "1", "--json"))
            assert [one["ends_at"] is None for one in told["partitions"]] == [True, False, False]
            (join,) = told["partitions"][0]["joins"]
            assert [one["partition"] for one in join["after"]] == [1, 2]
            taken = json.loads(run("consume", "orders", "--group", "g", "--count", "1", "--json"))
            assert taken["taken"] == 1
            described = json.loads(run("groups", "describe", "g", "--json"))
            assert sum(one["lag"] for one in described["partitions"]) == len(KEYS) + 2 - 1
            told = json.loads(run("topic", "alter", "orders", "--partitions", "1", "--force", "--yes", "--json"))
            assert [one["partition"] for one in told["partitions"]] == [0]
            refused = CliRunner().invoke(cli, ["topic", "alter", "orders", "--force", "--keep"])
            assert refused.exit_code == 2 and "--force is for fewer" in refused.output

        await trio.to_thread.run_sync(work)


async def test_a_producer_sends_again_after_partitions_were_taken_away(yard: EmbeddedSystem) -> None:
    topic = yard.topic("orders")
    await topic.create(6)
    producer = await topic.producer("p")
    for sequence, key in enumerate(KEYS, 1):
        await producer.send(key, b"", b"%d" % sequence, sequence=sequence)
    await topic.shrink(2)
    again = await yard.topic("orders").producer("p")
    assert again.last == len(KEYS)
    await topic.shrink(1)
    for one in (producer, again):
        for sequence, key in enumerate(KEYS, 1):
            await one.send(key, b"", b"%d" % sequence, sequence=sequence)
    await topic.grow(3)
    for sequence, key in enumerate(KEYS, 1):
        await again.send(key, b"", b"%d" % sequence, sequence=sequence)
    await again.send(b"new", b"", b"new")
    async with yard.consume("orders", group="g", commit_every=0.1) as records:
        got = await taken(records, len(KEYS) + 1)
        assert await records.get(0.5) is None
    assert Counter(one.payload for one in got) == Counter([b"new", *(b"%d" % one for one in range(1, len(KEYS) + 1))])


async def test_what_was_read_of_one_partition_is_not_taken_for_another_of_its_number(yard: EmbeddedSystem) -> None:
    topic = yard.topic("orders")
    await topic.create(2)
    for number in range(3):
        await topic.send_many([(key, b"", b"%d" % number) for key in KEYS])
    async with yard.consume("orders", group="g", commit_every=0.1) as records:
        await records.commit((await taken(records, 3 * len(KEYS)))[-1])
    # While nobody of the group is there its number ends, is used again, and ends again, with less in it.
    await topic.shrink(1)
    row = await topic.grow(2)
    assert row.live[1].born
    await topic.send_many([(key, b"", b"more") for key in KEYS])
    second = (await yard.log("orders.1").latest()).end
    assert 0 < second < 3 * len(KEYS)
    told = await yard.consumer_group("g").describe()
    assert [(one["partition"], one["offset"] is None, one["lag"]) for one in told["partitions"]][1] == (1, True, None)
    row = await topic.shrink(1)
    assert [one.number for one in row.draining] == [1] and (await topic.retire()).draining
    async with yard.consume("orders", group="g", commit_every=0.1) as records:
        got = await taken(records, len(KEYS))
        assert {(one.key, one.payload) for one in got} == {(key, b"more") for key in KEYS}
        await records.commit(got[-1])
    assert [one.number for one in (await topic.retire()).partitions] == [0]


class Stopped(topics.Topic):
    """A topic in a process that is stopped before one of its steps, until it may go on."""

    __slots__ = ("step", "stopped", "go_on")

    def __init__(self, yard: Any, name: str, step: str) -> None:
        super().__init__(yard, name)
        self.step, self.stopped, self.go_on = step, trio.Event(), trio.Event()

    async def _at(self, step: str) -> None:
        if step == self.step:
            self.stopped.set()
            await self.go_on.wait()

    async def _read_by_all(self, *values: Any) -> Any:
        await self._at("ask")
        return await super()._read_by_all(*values)

    async def _tell(self, command: str, values: dict[str, Any]) -> Any:
        await self._at(command)
        return await super()._tell(command, values)

    async def _delete_log(self, *values: Any) -> None:
        await self._at("delete")
        await super()._delete_log(*values)

    async def _open(self, *values: Any) -> None:
        await self._at("open")
        await super()._open(*values)


@pytest.mark.parametrize(("retry", "nodes", "read"), [("elsewhere", 3, []), ("never", 3, [0]), ("elsewhere", 1, [0])])
async def test_one_nodes_word_that_it_has_no_coordinator_retires_no_partition(
    retry: str, nodes: int, read: list[int]
) -> None:
    """The coordinator had moved, and the time was over before anybody else was asked: its groups lost the records."""

    class Other:
        async def query(self, *values: Any, **options: Any) -> Any:
            raise UnknownGroup("no group on node 1", retry=retry)

    class One(Other):
        async def query(self, *values: Any, **options: Any) -> Any:
            return msgpack.packb([["g", [[0, 9, 5]]]])

    async def known() -> list[int]:
        return list(range(nodes))

    machines = dict.fromkeys(coordinators(), Other()) | {next(iter(coordinators())): One()}
    asked: Any = SimpleNamespace(machine=machines.__getitem__, nodes=known)
    row: Any = SimpleNamespace(id=7)
    partition: Any = SimpleNamespace(number=0, born=5, end=9)
    assert await topics.Topic(asked, "orders")._read_by_all(row, [partition], None) == read


@pytest.mark.parametrize(("retry", "nodes"), [("elsewhere", 3), ("never", 3), ("elsewhere", 1)])
async def test_one_nodes_word_that_it_has_no_topics_ends_none(retry: str, nodes: int) -> None:
    """They had moved: a list of topics was empty, and what was left of a change took the topic for deleted."""
    called: list[object] = []

    class Topics:
        async def query(self, *values: Any, **options: Any) -> Any:
            raise UnknownGroup("no group on node 1", retry=retry)

    async def known() -> list[int]:
        return list(range(nodes))

    async def run(call: object) -> None:
        called.append(call)

    asked: Any = SimpleNamespace(machine=lambda name: Topics(), nodes=known, run=run)
    row: Any = SimpleNamespace(id=7, partitions=[SimpleNamespace(log="orders.0")])
    topic = topics.Topic(asked, "orders")
    if nodes > 1 and retry == "elsewhere":
        for question in (topics.all_topics(asked), topics.look_up(asked, "orders")):
            with pytest.raises(UnknownGroup):
                await question
        await topic._clear_up(row)
        assert not called, "nothing is deleted"
        return
    assert await topics.all_topics(asked) == []
    with pytest.raises(LogyardError, match="there is no topic"):
        await topics.look_up(asked, "orders")
    await topic._clear_up(row)
    assert len(called) == 1


@pytest.mark.parametrize("step", ["ask", "retire", "delete", "drained"])
async def test_who_was_stopped_while_a_partition_went_takes_no_other_of_its_number(
    yard: EmbeddedSystem, step: str
) -> None:
    topic, late = yard.topic("orders"), Stopped(yard, "orders", step)
    await topic.create(2)
    await topic.send_many([(key, b"", b"1") for key in KEYS])
    await topic.shrink(1)
    async with yard.consume("orders", group="g", commit_every=0.1) as records:
        await records.commit((await taken(records, len(KEYS)))[-1])
    before = await topic.describe()
    assert [one.number for one in before.draining] == [1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(late.retire, before)
        await late.stopped.wait()
        assert [one.number for one in (await topic.retire()).partitions] == [0]
        assert [one.number for one in (await topic.grow(2)).live] == [0, 1]
        await topic.send_many([(key, b"", b"2") for key in KEYS])
        if step != "delete":
            await topic.shrink(1)
        late.go_on.set()
    async with yard.consume("orders", group="g", commit_every=0.1) as records:
        assert {(one.key, one.payload) for one in await taken(records, len(KEYS))} == {(key, b"2") for key in KEYS}


async def test_a_log_that_was_opened_by_who_had_been_stopped_over_two_changes_takes_its_records(
    yard: EmbeddedSystem,
) -> None:
    topic = yard.topic("orders")
    await topic.create(1)
    producer = await topic.producer("p")
    for sequence, key in enumerate(KEYS, 1):
        await producer.send(key, b"", b"%d" % sequence, sequence=sequence)
    late, second = (Stopped(yard, "orders", "open") for _ in range(2))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(late.grow, 2)
        await late.stopped.wait()
        await topic.finish()
        assert [one.number for one in (await topic.shrink(1)).partitions] == [0]
        nursery.start_soon(second.grow, 2)
        await second.stopped.wait()
        # The log that is made now has the name of the one that it was about to open.
        late.go_on.set()
        with trio.fail_after(10):
            while await yard.log("orders.1").query(msgpack.packb(["partition"])) == msgpack.packb(None):
                await trio.sleep(0.01)
        second.go_on.set()
    assert len((await topic.describe()).live) == 2
    with trio.fail_after(20):
        again = await yard.topic("orders").producer("p")
        for sequence, key in enumerate(KEYS, 1):
            await again.send(key, b"", b"%d" % sequence, sequence=sequence)
        await yard.topic("orders").send_many([(key, b"", b"new") for key in KEYS])
    async with yard.consume("orders", group="g", commit_every=0.1) as records:
        got = await taken(records, 2 * len(KEYS))
        assert await records.get(0.5) is None
    assert Counter(one.payload for one in got)[b"new"] == len(KEYS)


@pytest.mark.long
async def test_taking_partitions_away_that_was_left_half_done_is_finished_by_whoever_comes(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = yard.topic("orders")
    calls: list[int] = []
    run = yard.run

    def failing(at: int) -> Callable[..., Any]:
        async def ask(call: Any, *more: Any) -> Any:
            if call.method == "partition" or (call.method == "delete" and at > 100):
                calls.append(1)
                if len(calls) == at % 100:
                    raise LogyardError("killed here", code="killed")
            return await run(call, *more)

        return ask

    wanted = [b"1"]
    monkeypatch.setattr(topics, "RESUME_S", 0.3)
    # The consumer does not let any go.
    monkeypatch.setattr(consumer, "REFRESH_S", 60.0)
    await topic.create(3)
    for key in KEYS:
        await topic.send(key, b"", b"1")
    producer = await topic.producer("p")
    await producer.send(b"once", b"", b"once", sequence=1)
    # Three partitions become two: each of the seven steps on their logs is the last one once.
    for at in range(1, 8):
        calls.clear()
        monkeypatch.setattr(yard, "run", failing(at))
        with pytest.raises(LogyardError, match="killed"):
            await topic.shrink(2)
        monkeypatch.setattr(yard, "run", run)
        for number, key in enumerate(KEYS):
            # Some know that there is something to be done, some find it.
            await (topic if number % 2 else yard.topic("orders")).send(key, b"", b"2%d" % at)
        wanted.append(b"2%d" % at)
        row = await topic.shrink(2)
        assert len(row.live) == 2 and row.state == "live"
        await topic.grow(3)
        for key in KEYS:
            await yard.topic("orders").send(key, b"", b"3%d" % at)
        wanted.append(b"3%d" % at)
    async with yard.consume("orders", group="g", commit_every=0.1) as records:
        await (await yard.topic("orders").producer("p")).send(b"once", b"", b"once", sequence=1)
        got = await taken(records, len(wanted) * len(KEYS) + 1)
        assert await records.get(0.3) is None
    for key in KEYS:
        assert [one.payload for one in got if one.key == key] == wanted
    # Partitions that were read go, also if whoever let them go comes no further than the first log.
    calls.clear()
    monkeypatch.setattr(yard, "run", failing(102))
    with pytest.raises(LogyardError, match="killed"):
        await topic.retire()
    monkeypatch.setattr(yard, "run", run)
    row = await topic.retire()
    assert len(row.partitions) == 3 and len(row.ended) == 7


async def test_logs_whose_deletion_was_not_answered_are_let_go_all_the_same(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, lost, run = yard.topic("orders"), set(), yard.run

    async def unanswered(call: Any, *more: Any) -> Any:
        reply = await run(call, *more)
        if call.method == "delete" and call.arguments["name"] not in lost:
            lost.add(call.arguments["name"])
            raise Unknown("its answer was lost")
        return reply

    await topic.create(2)
    monkeypatch.setattr(yard, "run", unanswered)
    await topic.delete()
    assert lost == {"orders.0", "orders.1"} and not lost & {str(row["name"]) for row in yard.groups()}


async def test_a_log_that_was_made_while_a_node_had_the_former_one_is_made_again(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is asked to make it finds one of that name and definition, which goes a moment later."""
    topic = yard.topic("orders")
    kind = type(topic.yard)
    create, late = kind.create_many, True

    async def had_it(self: Any, names: Any, **more: Any) -> Any:
        nonlocal late
        if late and names[0].startswith("orders"):
            late = False
            return None
        return await create(self, names, **more)

    monkeypatch.setattr(kind, "create_many", had_it)
    for partitions in (2, 4):
        late = True
        row = await (topic.create(partitions) if partitions == 2 else topic.grow(partitions))
        assert len(row.live) == partitions and not late
    assert {(await topic.send(b"%d" % number)).partition for number in range(64)} == {0, 1, 2, 3}


async def test_a_number_is_used_again_although_a_node_that_was_away_has_its_former_log(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = yard.topic("orders")
    await topic.create(2)
    await topic.shrink(1)
    kind, refused = type(topic.yard), list[Any]()
    create = kind.create_many

    async def has_it(self: Any, names: Any, **more: Any) -> Any:
        if len(refused) < 2:
            refused.append(names)
            raise GroupExists("node 3: the name 'orders.1' is taken")
        return await create(self, names, **more)

    monkeypatch.setattr(kind, "create_many", has_it)
    assert [one.number for one in (await topic.grow(2)).live] == [0, 1] and len(refused) == 2


class Load:
    """A producer that numbers the records of each key, and one group's loop that reads them."""

    def __init__(self) -> None:
        self.sent: dict[bytes, int] = dict.fromkeys(KEYS, 0)
        self.over = self.done = False

    async def produce(self, topic: Any) -> None:
        while not self.over:
            for key in KEYS:
                self.sent[key] += 1
                await topic.send(key, b"", b"%d" % self.sent[key])
        self.done = True

    async def read(self, yard: Any, group: str, seen: dict[bytes, list[int]]) -> None:
        async with yard.consume("orders", group=group, ttl=5, commit_every=0.1, max_records=20) as records:
            last = None
            while not self.done or sum(map(len, seen.values())) < sum(self.sent.values()):
                record = await records.get(0.1)
                if record is not None:
                    last = record
                    seen[record.key].append(int(record.payload))
            # What ended is let go when all of it is committed, not when it was read.
            await records.commit(last)


@pytest.mark.long
async def test_histories_over_growing_and_shrinking_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups, one of them with two members, and producers that know of no change before they are refused."""
    for name, value in (("RETIRE_S", 0.3), ("REFRESH_S", 0.2)):
        monkeypatch.setattr(consumer, name, value)
    async with served(tmp_path, 3) as (_, _, servers), connect(servers) as yard, connect(servers) as other:
        topic = yard.topic("orders")
        await topic.create(3)
        load = Load()
        seen: dict[str, dict[bytes, list[int]]] = {group: {key: [] for key in KEYS} for group in ("g", "h")}
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(load.produce, other.topic("orders"))
                for face, group in ((yard, "g"), (other, "g"), (yard, "h")):
                    nursery.start_soon(load.read, face, group, seen[group])
                for count in (5, 2, 4, 1, 3, 2):
                    await trio.sleep(0.7)
                    row = await topic.alter(count)
                    assert len(row.live) == count
                await trio.sleep(0.7)
                load.over = True
        for group, keys in seen.items():
            for key, numbers in keys.items():
                assert numbers == list(range(1, load.sent[key] + 1)), f"{group}, {key!r}: {numbers}"
        # All was read, and the last ones go as well.
        row = await topic.retire()
        # Which numbers are left depends on when what had them before was read.
        assert row.partitions == row.live and len(row.live) == 2 and len(row.ended) >= 6


async def test_a_producer_sends_again_after_partitions_were_added(yard: EmbeddedSystem) -> None:
    topic = yard.topic("orders")
    await topic.create(2)
    producer = await topic.producer("p")
    for sequence, key in enumerate(KEYS, 1):
        await producer.send(key, b"", b"%d" % sequence, sequence=sequence)
    await topic.grow(6)
    again = await yard.topic("orders").producer("p")
    assert again.last == len(KEYS)
    for sequence, key in enumerate(KEYS, 1):
        await again.send(key, b"", b"%d" % sequence, sequence=sequence)
    await again.send(b"new", b"", b"new")
    with pytest.raises(BadRequest):
        await again.send(None)  # type: ignore[arg-type]
    async with yard.consume("orders", group="g", commit_every=0.1) as records:
        got = await taken(records, len(KEYS) + 1)
        assert await records.get(0.5) is None
    assert Counter(one.payload for one in got) == Counter([b"new", *(b"%d" % one for one in range(1, len(KEYS) + 1))])


@pytest.mark.long
async def test_a_change_that_was_left_half_done_is_finished_by_whoever_comes(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = yard.topic("orders")
    calls: list[int] = []
    run = yard.run

    def failing(at: int) -> Callable[..., Any]:
        async def ask(call: Any, *more: Any) -> Any:
            if call.method == "partition":
                calls.append(1)
                if len(calls) == at:
                    raise LogyardError("killed here", code="killed")
            return await run(call, *more)

        return ask

    for at in (1, 2):
        calls.clear()
        monkeypatch.setattr(yard, "run", failing(at))
        with pytest.raises(LogyardError, match="killed"):
            await topic.create(2)
        monkeypatch.setattr(yard, "run", run)
    # A producer finishes it.
    for key in KEYS:
        await yard.topic("orders").send(key, b"", b"1")
    for at, count in ((1, 3), (2, 3), (3, 3), (4, 4), (6, 5)):
        calls.clear()
        monkeypatch.setattr(yard, "run", failing(at))
        with pytest.raises(LogyardError, match="killed"):
            await topic.grow(count)
        monkeypatch.setattr(yard, "run", run)
        for key in KEYS:
            await yard.topic("orders").send(key, b"", b"%d%d" % (count, at))
    assert len((await topic.grow(5)).live) == 5
    async with yard.consume("orders", group="g", commit_every=0.1) as records:
        got = await taken(records, 6 * len(KEYS))
    for key in KEYS:
        assert [one.payload for one in got if one.key == key] == [b"1", b"31", b"32", b"33", b"44", b"56"]


async def test_starts(yard: EmbeddedSystem) -> None:
    topic = yard.topic("orders")
    await topic.create(1)
    await topic.send(b"k", b"", b"old")
    async with yard.consume("orders", group="strict", start="error") as records:
        with pytest.raises(LogyardError) as refused:
            await records.get(5)
        assert refused.value.code == "no_offset"
    async with yard.consume("orders", group="late", start="latest") as records:
        assert await records.get(3.0) is None
        await topic.send(b"k", b"", b"new")
    # Where it begins is committed, also if nothing came: what comes meanwhile is not passed over.
    async with yard.consume("orders", group="late", start="latest") as records:
        assert (await taken(records, 1))[0].payload == b"new"
    await yard.log(partition_log("orders", 0)).truncate(2)
    await topic.send(b"k", b"", b"newest")
    async with yard.consume("orders", group="late") as records:
        assert (await taken(records, 1))[0].payload == b"newest", "what was truncated is passed over"
    for wrong in ({"start": "middle"}, {"ttl": 0.1}, {"ttl": 400}):
        with pytest.raises(BadRequest):
            yard.consume("orders", group="g", **wrong)
    with pytest.raises(BadRequest):
        yard.consume("orders", group="")
    with pytest.raises(LogyardError, match="no topic"):
        await yard.consume("nowhere", group="g").get(5)


@pytest.mark.parametrize("start", ["latest", "error"])
async def test_partitions_that_are_added_are_read_from_their_start_wherever_a_group_begins(
    yard: EmbeddedSystem, start: str
) -> None:
    topic = yard.topic("orders")
    await topic.create(1)
    await yard.consumer_group("g").reset("orders", "earliest")
    with trio.fail_after(20):
        while (await yard.describe(coordinator_of("g")))["machine_state"]["version"] < 3:
            await yard.pause(0.05)
    async with yard.consume("orders", group="g", start=start, ttl=5, commit_every=0.1) as records:
        for key in KEYS:
            await topic.send(key, b"", b"before")
        await taken(records, len(KEYS))
        await topic.grow(2)
        for key in KEYS:
            await topic.send(key, b"", b"after")
        got = await taken(records, len(KEYS))
        assert {one.partition for one in got} == {0, 1} and {one.key for one in got} == set(KEYS)


async def test_nothing_is_given_without_an_answered_sign_of_life(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = yard.topic("orders")
    await topic.create(1)
    await topic.send_many([(b"k", b"", b"%d" % number) for number in range(10)])
    async with yard.consume("orders", group="g", ttl=1) as records:
        assert (await taken(records, 2))[1].payload == b"1"
        plain = EmbeddedSystem.machine

        def cut(self: EmbeddedSystem, name: str) -> Any:
            if name.startswith("_groups"):
                raise LogyardError("cut off", retry="elsewhere")
            return plain(self, name)

        monkeypatch.setattr(EmbeddedSystem, "machine", cut)
        with trio.fail_after(10):
            # What was fetched is here, and is given as long as it may be.
            until_ = yard.clock() + 0.5
            while (record := await records.get(0.1)) is not None:
                assert yard.clock() < until_ + 0.2, record
                await trio.sleep(0.1)
        assert await records.get(0.3) is None
        monkeypatch.setattr(EmbeddedSystem, "machine", plain)
        with trio.fail_after(20):
            assert await records.get(10) is not None


@pytest.mark.long
async def test_a_dead_consumers_partitions_are_read_in_time_and_a_coordinator_may_die(tmp_path: Path) -> None:
    # Half of it is what a busy machine may take beside the two seconds.
    ttl = 4.0
    async with served(tmp_path, 3) as (run, doors, servers), connect(servers) as yard, connect(servers) as other:
        topic = yard.topic("orders")
        await topic.create(2)
        await topic.send_many([(b"%d" % number, b"", None) for number in range(20)])
        dead = other.consume("orders", group="g", ttl=ttl)
        await taken(dead, 1)
        async with yard.consume("orders", group="g", ttl=ttl, commit_every=0.2) as records:
            await records.get(0.1)
            # It gives nothing up, and then it is gone: a process that was killed.
            other.close()
            began = trio.current_time()
            got = await taken(records, 10, 60.0)
            assert trio.current_time() - began <= 1.5 * ttl + 2
            coordinator = next(name for name in coordinators() if _known(run, name))
            await doors.crash(await run.leader(coordinator))
            await topic.send_many([(b"%d" % number, b"", None) for number in range(20, 40)])
            seen = {(one.partition, one.offset) for one in got}
            with trio.fail_after(60):
                while len(seen) < 40:
                    one = await records.__anext__()
                    seen.add((one.partition, one.offset))
            assert not (await records.commit()).lost


def _known(run: Cluster, name: str) -> bool:
    return any(row["name"] == name for row in run.nodes[1].groups())

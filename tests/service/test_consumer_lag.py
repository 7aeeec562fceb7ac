"""How far consumer groups are behind: said by one node, with and without members, asked of no group."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import trio
from prometheus_client.parser import text_string_to_metric_families

from logyard.client.aio import connect
from logyard.engine.machine import Context
from logyard.engine.raft.state import FOLLOWER, LEADER
from logyard.machines.catalog.topics import Topics
from logyard.machines.catalog.topics_alone import TopicsAlone
from logyard.machines.groups import Groups as Coordinator
from logyard.machines.groups.state import Group, Part
from logyard.machines.log import AppendLog
from logyard.protocol.groups import PartitionShape, Shape, join_command
from logyard.protocol.topics import LIVE, SECTION, Partition, Topic, first_layout
from logyard.service.consumer_lag import consumer_lags
from tests.engine.host.cluster import until

from .test_topics import served

OTHERS = [b"other-%d" % number for number in range(8)]


async def test_one_node_says_how_far_a_group_is_behind_also_without_members(tmp_path: Path) -> None:
    async with served(tmp_path, 3) as (run, _, addresses), connect(addresses) as yard:
        nodes = [run.nodes[number] for number in run.ids]

        def said() -> list[tuple[str, str, int, int, int]]:
            return [tuple(row.values()) for node in nodes for row in node.status()["consumers"]]

        topic = yard.topic("orders")
        await topic.create(2)
        assert said() == []
        with trio.fail_after(60):
            await topic.send_many([(key, b"", b"x") for key in OTHERS])
            async with yard.consume("orders", group="billing", ttl=5) as records:
                for _ in OTHERS:
                    await records.__anext__()
                await records.commit()
            await until(lambda: [row[:3] for row in said()].count(("billing", "orders", 0)) == 1, "one node says it")
            # The last record that it handed out was not come back from, and is not committed.
            await until(lambda: sum(row[4] for row in said()) == 1, "all but one are committed")

            # Nobody reads any more: the coordinator stays awake, and its node's copies of the logs say where they end.
            await topic.send_many([(key, b"", b"x") for key in OTHERS])
            await until(lambda: sum(row[4] for row in said()) == len(OTHERS) + 1, "what came since")
        worst = max(said(), key=lambda row: row[4])
        (teller,) = [node for node in nodes if node.status()["consumers"]]
        assert tuple(teller.status()["consumers"][0].values()) == worst, "worst first"

        found = {
            (sample.name, *(sample.labels[key] for key in ("group", "topic", "partition"))): sample.value
            for family in text_string_to_metric_families(teller.metrics()[1].decode())
            for sample in family.samples
            if sample.name.startswith("logyard_consumer")
        }
        assert found["logyard_consumer_lag_records", "billing", "orders", str(worst[2])] == worst[4]
        assert found["logyard_consumer_offset", "billing", "orders", str(worst[2])] == worst[3]

        await yard.consumer_group("billing").delete()
        await until(lambda: not said(), "nobody reads it")


async def test_what_was_read_of_a_deleted_topic_says_nothing_of_one_that_has_its_name_now(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, _, addresses), connect(addresses) as yard:
        topic = yard.topic("orders")

        def said() -> list[tuple[int, int]]:
            return [(row["offset"], row["lag"]) for row in run.nodes[1].status()["consumers"]]

        async def read(count: int) -> None:
            async with yard.consume("orders", group="billing", ttl=5) as records:
                for _ in range(count):
                    await records.__anext__()
                await records.commit()

        with trio.fail_after(60):
            await topic.create(1)
            await topic.send_many([(b"k", b"", b"x")] * 10)
            await read(9)
            await until(lambda: said() == [(8, 2)], "it is behind")
            await topic.delete()
            await topic.create(1)
            await topic.send_many([(b"k", b"", b"x")] * 5)
            assert said() == []
            assert (await yard.consumer_group("billing").describe())["partitions"] == []
            await read(2)
            await until(lambda: said() == [(1, 4)], "of the newer one")
            (row,) = (await yard.consumer_group("billing").describe())["partitions"]
            assert (row["offset"], row["end"], row["lag"]) == (1, 5, 4)


def test_no_more_rows_than_asked_for() -> None:
    class Group:
        name = "g"

        def positions(self) -> list[tuple[int, str, int, int, int]]:
            return [(7, "t", number, 0, number) for number in range(4)] + [(8, "gone", 0, 0, 5)]

    class Asleep(dict[int, Any]):
        def row(self, uid: int) -> Any:
            return self[uid]

    coordinator = Coordinator()
    cast(Any, coordinator).groups = {"g": Group()}
    member = SimpleNamespace(raft=SimpleNamespace(role=LEADER), machine=coordinator)
    asleep = Asleep({20 + number: SimpleNamespace(end=10) for number in range(4)})
    names = {"_groups-3": 1, "_topics": 2, **{f"t.{number}": 20 + number for number in range(4)}}
    topics = TopicsAlone()
    logs = tuple(Partition(number, f"t.{number}", 20 + number) for number in range(4))
    by_id = cast(Topics, topics.sections[SECTION]).by_id
    by_id[7] = Topic(7, "t", 1, LIVE, 1, first_layout(range(4)), logs, 4)
    keeper = SimpleNamespace(machine=topics)
    groups = cast(Any, SimpleNamespace(members={1: member, 2: keeper}, names=names, quiesced=asleep))
    assert [(row.partition, row.offset, row.lag) for row in consumer_lags(groups, 2)] == [(0, 0, 10), (1, 1, 9)]
    by_id[9] = by_id.pop(7)._replace(id=9)
    assert not consumer_lags(groups), "logs that sleep are of another topic now"
    by_id[7] = by_id.pop(9)._replace(id=7, partitions=(logs[0]._replace(born=3), *logs[1:]))
    assert [row.partition for row in consumer_lags(groups)] == [1, 2, 3], "0 is another one now"
    member.raft.role = FOLLOWER
    assert not consumer_lags(groups)


def test_a_group_whose_name_is_no_text_spoils_no_scrape() -> None:
    """Only a client made by hand tells one."""
    shape = Shape(7, "t", 1, (PartitionShape(0),))
    coordinator = Coordinator()
    coordinator.apply(Context(1, 1, 1, 0, 1), join_command(cast(Any, b"by hand"), "", 1, 5000, "", [shape]), ())
    cast(Any, coordinator).groups[b"by hand"].parts[7, 0].commit(0)
    log = AppendLog()
    log.partition = cast(Any, SimpleNamespace(topic=7))
    leader = SimpleNamespace(raft=SimpleNamespace(role=LEADER), machine=coordinator)
    members = {1: leader, 2: SimpleNamespace(machine=log)}
    groups = cast(Any, SimpleNamespace(members=members, names={"_groups-3": 1, "t.0": 2}, quiesced={}))
    (row,) = consumer_lags(groups)
    assert row == ("b'by hand'", "t", 0, 0, 0)


def test_of_topics_of_one_name_the_newest_has_it() -> None:
    """A label set that is there twice spoils a scrape."""
    group = Group("g", 0)
    for topic, offset in ((7, 3), (9, 5)):
        group.shapes[topic] = cast(Any, SimpleNamespace(name="orders"))
        part = group.parts[topic, 0] = Part()
        part.commit(offset)
    group.parts[9, 1] = Part()
    assert list(group.positions()) == [(9, "orders", 0, 0, 5)]

"""Topics read by the data source, without a JVM: partitions looked up, those that are added, keys in their column."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from logyard.client.sync import Yard
from logyard.pipeline.datasource import LogPartition, LogReader, LogyardDataSource
from logyard.pipeline.errors import DataLoss, OptionError
from logyard.pipeline.topics import taken_apart
from logyard.protocol.topics import enveloped, opened_envelope
from logyard.service.local_cluster import LocalCluster

from .plain_query import PlainQuery, Rows
from .support import reach


def read(cluster: LocalCluster, **given: str) -> Rows:
    """All rows of a batch."""
    source = LogyardDataSource({"servers": ",".join(cluster.addresses), **given})
    schema = source.schema()
    reader = source.reader(schema)
    assert isinstance(reader, LogReader)
    found = []
    for task in reader.partitions():
        assert isinstance(task, LogPartition)
        for batch in reader.read(task):
            assert batch.schema.names == schema.names
            found += batch.to_pylist()
    return found


def seen(rows: Rows) -> set[tuple[Any, ...]]:
    return {(row["log"], row["offset"], row["key"], row["meta"], row["payload"]) for row in rows}


def send(yard: Yard, topic: str, number: int) -> set[tuple[Any, ...]]:
    """Records of all kinds; what they are read as."""
    found = set()
    for one in range(number):
        key = None if one % 5 == 0 else b"" if one % 7 == 0 else b"key %d" % one
        metadata, payload = b"m" * (one % 3), None if one % 4 == 0 else b"%d" % one
        sent = yard.topic(topic).send(key, metadata, payload)
        found.add((f"{topic}.{sent.partition}", sent.offset, key, metadata, payload))
    return found


def test_a_batch_has_the_records_of_partitions_and_their_keys(cluster: LocalCluster, yard: Yard) -> None:
    yard.topic("orders").create(partitions=3)
    yard.topic("other.orders").create(partitions=1)
    wanted = send(yard, "orders", 40)
    others = send(yard, "other.orders", 5)
    # They look like partitions, and are none.
    yard.create_many(["orders.7", "orders.x", "orders"])
    for name in ("orders.7", "orders.x", "orders"):
        yard.log(name).append(enveloped(b"key", b""), b"no")
    # It is one, and this record has no envelope.
    direct = yard.log("orders.0").append(b"plain", b"direct")
    wanted.add(("orders.0", direct, None, b"plain", b"direct"))
    assert seen(read(cluster, subscribeTopic="orders", includePayload="inline")) == wanted
    both = read(cluster, subscribeTopic="orders, other.orders", includePayload="inline")
    assert seen(both) == wanted | others
    yard.log("orders.0").truncate(1)
    reach(lambda: all(yard.log("orders.0").latest(node=node).start == 1 for node in (1, 2, 3)))
    rows = read(cluster, subscribeTopic="orders", failOnDataLoss="false", startingOffsets='{"orders.0": 0}')
    (gap,) = [row for row in rows if row["kind"] == "gap"]
    assert (gap["key"], gap["meta"], gap["offset"]) == (None, None, 0) and "payload" not in gap


def test_partitions_that_are_added_are_new_logs_of_a_stream(cluster: LocalCluster, yard: Yard, tmp_path: Path) -> None:
    yard.topic("grows").create(partitions=2)
    given = {
        "servers": ",".join(cluster.addresses), "subscribeTopic": "grows", "startingOffsets": "earliest",
        "includePayload": "inline",
    }  # fmt: skip
    found: Rows = []
    running = PlainQuery(tmp_path, given, lambda number, rows: found.extend(rows))
    wanted = send(yard, "grows", 30)
    yard.create_many(["grows.9"])
    yard.log("grows.9").append(b"", b"no")
    assert running.trigger()
    assert seen(found) == wanted and not running.trigger()
    yard.topic("grows").grow(4)
    wanted |= send(yard, "grows", 60)
    while running.trigger():
        pass
    assert seen(found) == wanted and len(found) == len(wanted) and {log for log, *_ in wanted} >= {"grows.2", "grows.3"}
    # A restart, and a run to the end.
    wanted |= send(yard, "grows", 10)
    PlainQuery(tmp_path, given, lambda number, rows: found.extend(rows)).available_now()
    assert seen(found) == wanted and len(found) == len(wanted)


def test_partitions_that_are_taken_away_are_read_to_their_ends(
    cluster: LocalCluster, yard: Yard, tmp_path: Path
) -> None:
    topic = yard.topic("shrinks")
    topic.create(partitions=4)
    given = {
        "servers": ",".join(cluster.addresses), "subscribeTopic": "shrinks", "startingOffsets": "earliest",
        "includePayload": "inline",
    }  # fmt: skip
    found: Rows = []
    running = PlainQuery(tmp_path, given, lambda number, rows: found.extend(rows))
    wanted = send(yard, "shrinks", 40)
    assert running.trigger()
    wanted |= send(yard, "shrinks", 40)
    assert [one.number for one in topic.shrink(1).draining] == [1, 2, 3]
    wanted |= send(yard, "shrinks", 20)
    assert seen(read(cluster, subscribeTopic="shrinks", includePayload="inline")) == wanted, "a batch has them as well"
    while running.trigger():
        pass
    assert seen(found) == wanted and len(found) == len(wanted)
    # They go, one after the other; their numbers are used again, and nothing is missing.
    topic.shrink(1, force=True)
    assert not running.trigger() and not running.trigger()
    assert [one.born for one in topic.grow(3).live] == [0, 3, 3]
    later = send(yard, "shrinks", 60) - wanted
    for query in (running, PlainQuery(tmp_path, given, lambda number, rows: found.extend(rows))):
        while query.trigger():
            pass
    assert seen(found) == wanted | later and {log for log, *_ in later} >= {"shrinks.1", "shrinks.2"}
    # What the stream has not read is missing.
    send(yard, "shrinks", 60)
    topic.shrink(1, force=True)
    with pytest.raises(DataLoss, match=r"log 'shrinks\.[12]': it was deleted"):
        PlainQuery(tmp_path, given, lambda number, rows: None).trigger()


def test_a_partition_that_comes_and_goes_between_two_triggers_is_missed(
    cluster: LocalCluster, yard: Yard, tmp_path: Path
) -> None:
    topic = yard.topic("blinks")
    topic.create(partitions=2)
    given = {
        "servers": ",".join(cluster.addresses), "subscribeTopic": "blinks", "startingOffsets": "earliest",
        "includePayload": "inline",
    }  # fmt: skip

    def comes_and_goes() -> set[tuple[Any, ...]]:
        """Let partition 2 come and go; return what was sent to those that stay."""
        topic.grow(3)
        sent = send(yard, "blinks", 60)
        topic.shrink(2, force=True)
        assert {log for log, *_ in sent} >= {"blinks.2"}
        return {one for one in sent if one[0] != "blinks.2"}

    wanted = send(yard, "blinks", 20)
    # What was there before the stream is not its business.
    wanted |= comes_and_goes()
    found: Rows = []
    running = PlainQuery(tmp_path / "fails", given, lambda number, rows: found.extend(rows))
    allows = PlainQuery(
        tmp_path / "allows", given | {"failOnDataLoss": "false"}, lambda number, rows: gaps.extend(rows)
    )
    gaps: Rows = []
    for query in (running, allows):
        assert query.trigger() and not query.trigger()
    assert seen(found) == wanted
    comes_and_goes()
    with pytest.raises(DataLoss, match=r"log 'blinks\.2': it came and went between two triggers; records from 0 on"):
        running.trigger()
    while allows.trigger():
        pass
    lost = [row for row in gaps if row["kind"] == "gap"]
    assert [(row["log"], row["offset"], row["payload_size"]) for row in lost] == [("blinks.2", 0, None)]


def test_a_topic_that_was_deleted_or_made_anew_ends_a_stream(cluster: LocalCluster, yard: Yard, tmp_path: Path) -> None:
    yard.topic("anew").create(partitions=2)
    send(yard, "anew", 10)
    given = {"servers": ",".join(cluster.addresses), "subscribeTopic": "anew", "timeoutSeconds": "10"}
    running = PlainQuery(tmp_path, given, lambda number, rows: None)
    running.trigger()
    yard.topic("anew").delete()
    with pytest.raises(OptionError, match=r"^subscribeTopic: there is no topic 'anew'"):
        running.trigger()
    yard.topic("anew").create(partitions=1)
    with pytest.raises(DataLoss, match=r"log 'anew\.0': it was deleted and made anew|log 'anew\.1': it was deleted"):
        PlainQuery(tmp_path, given, lambda number, rows: None).trigger()


def test_a_topic_that_is_not_there_is_refused_by_load(cluster: LocalCluster) -> None:
    given = {"servers": ",".join(cluster.addresses), "subscribeTopic": "nowhere"}
    with pytest.raises(OptionError, match=r"^subscribeTopic: there is no topic 'nowhere'"):
        LogyardDataSource(given).schema()


@pytest.fixture
def metas() -> Iterator[list[bytes | None]]:
    """Metadata of records of all kinds: enveloped, without a key, cut off, none at all."""
    draw = random.Random(16)
    found: list[bytes | None] = [
        None,
        b"",
        b"\xf5",
        b"\xf5\x01\x05\x00abc",
        b"\xf5\x02\x00\x00abc",
        b"\xf5\x00\x02\x00abc",
    ]
    for _ in range(300):
        key = draw.choice((None, b"", draw.randbytes(draw.randint(1, 400))))
        whole = enveloped(key, draw.randbytes(draw.randint(0, 9)))
        found.append(draw.choice((whole, whole[: draw.randint(0, len(whole))], draw.randbytes(6), None)))
    draw.shuffle(found)
    yield found


def test_a_column_is_taken_apart_as_each_record_of_it(metas: list[bytes | None]) -> None:
    wanted = [(None, None) if one is None else opened_envelope(one) for one in metas]
    column = pyarrow.array(metas, pyarrow.binary())
    for first, end in ((0, len(metas)), (13, 200), (7, 7), (5, 6)):
        keys, rest = taken_apart(column.slice(first, end - first))
        keys.validate(full=True)
        rest.validate(full=True)
        assert list(zip(keys.to_pylist(), rest.to_pylist(), strict=True)) == wanted[first:end]
    keys, rest = taken_apart(pyarrow.array([None, b"", b"ab"], pyarrow.binary()))
    assert keys.to_pylist() == [None] * 3 and rest.to_pylist() == [None, b"", b"ab"]

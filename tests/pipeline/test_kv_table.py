"""KV groups as tables: one revision, changes as a stream, puts and deletes; in Spark where it has to travel."""

from __future__ import annotations

import pickle
import threading
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest

from logyard.client.sync import Yard
from logyard.pipeline import kv_table as kv_table_module
from logyard.pipeline.datasource import LogyardDataSource
from logyard.pipeline.errors import DataLoss, OptionError
from logyard.pipeline.kv_table import KvReader, KvSink, KvStreamReader, kv_table, operation, parse_kv
from logyard.pipeline.stream_offsets import BadOffset
from logyard.protocol.kv import KEY_BYTES_MAX, Delete, Put
from logyard.service.local_cluster import LocalCluster

from ..source_tree import ROOT
from .support import reach

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NUMBERS = count()


@pytest.fixture
def given(cluster: LocalCluster, yard: Yard) -> dict[str, str]:
    """The options for a new group."""
    name = f"kv-{next(NUMBERS)}"
    yard.create(name, machine="kv")
    return {"servers": ",".join(cluster.addresses), "machine": "kv", "group": name}


def rows(reader: Any, *tasks: Any) -> list[dict[str, Any]]:
    """As in a task's process."""
    there = pickle.loads(pickle.dumps(reader))
    return [row for task in tasks for batch in there.read(task) for row in batch.to_pylist()]


def keys(given: dict[str, str], **more: str) -> dict[bytes, bytes]:
    reader = KvReader(parse_kv({**given, **more}))
    return {row["key"]: row["value"] for row in rows(reader, *reader.partitions())}


class Stream:
    def __init__(self, given: dict[str, str], **more: str) -> None:
        source = LogyardDataSource({**given, **more})
        reader = source.streamReader(source.schema())
        assert isinstance(reader, KvStreamReader)
        self.reader = reader

    def end(self, start: Any) -> Any:
        return self.reader.latestOffset(start, self.reader.getDefaultReadLimit())

    def between(self, start: Any, end: Any) -> list[tuple[int, bytes, bytes | None]]:
        found = rows(self.reader, *self.reader.partitions(start, end))
        assert all(row["deleted"] == (row["value"] is None) for row in found)
        return [(row["revision"], row["key"], row["value"]) for row in found]


def test_a_batch_is_one_revision(given: dict[str, str], yard: Yard) -> None:
    kv = yard.kv(given["group"])
    wanted = {b"a/%03d" % n: b"v%d" % n for n in range(250)} | {b"a/large": b"x" * 100_000, b"a/empty": b""}
    for key, value in wanted.items():
        kv.put(key, value)
    kv.put(b"b", b"other")
    reader = KvReader(parse_kv({**given, "prefix": "a/"}))
    tasks = reader.partitions()
    revision = kv.status()["revision"]
    kv.put(b"a/000", b"later")
    kv.delete(b"a/001")
    found = rows(reader, *tasks)
    assert {row["key"]: row["value"] for row in found} == wanted
    assert [row["key"] for row in found] == sorted(wanted) and {row["deleted"] for row in found} == {False}
    now = {**wanted, b"a/000": b"later", b"b": b"other"}
    del now[b"a/001"]
    assert keys(given) == now
    assert keys(given, revision=str(revision), prefix="a/") == wanted
    kv.compact(revision + 1)
    with pytest.raises(DataLoss, match="read it anew"):
        rows(reader, *tasks)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 250])
def test_many_keys_are_read_by_several_tasks_at_one_revision(given: dict[str, str], yard: Yard, count: int) -> None:
    kv = yard.kv(given["group"])
    wanted = [b"k/%03d" % n for n in range(count)]
    for key in [*wanted, b"j", b"l"]:
        kv.put(key, key)
    reader = KvReader(parse_kv({**given, "prefix": "k/", "maxPartitionKeys": "4"}))
    tasks = reader.partitions()
    for key in wanted:
        kv.delete(key)
    kv.put(b"k/000a", b"later")
    found = [[row["key"] for row in rows(reader, task)] for task in tasks]
    assert found == [wanted[at : at + 4] for at in range(0, count + 1, 4)], "and the last one may be empty"
    assert [key for key in keys({**given, "maxPartitionKeys": "1"})] == [b"j", b"k/000a", b"l"]


def test_tasks_end_with_keys_of_any_length(given: dict[str, str], yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = yard.kv(given["group"])
    wanted = [b"k", *[b"%d" % n + b"x" * (KEY_BYTES_MAX - 1) for n in range(5)], b"\xff" * KEY_BYTES_MAX]
    for key in wanted:
        kv.put(key, b"v")
    for number in ("1", "2", "3", "7"):
        assert list(keys(given, maxPartitionKeys=number)) == sorted(wanted)
    monkeypatch.setattr(kv_table_module, "PAGE_KEYS", 1)
    assert list(keys(given)) == sorted(wanted)


def test_a_stream_is_the_changes_and_a_repeated_batch_is_the_same(given: dict[str, str], yard: Yard) -> None:
    kv = yard.kv(given["group"])
    first = kv.put(b"a", b"1").revision
    stream = Stream(given, startingRevision="earliest")
    start = stream.reader.initialOffset()
    kv.put(b"b", b"2")
    end = stream.end(start)
    assert stream.between(start, end) == [(first, b"a", b"1"), (first + 1, b"b", b"2")]
    kv.delete(b"a")
    kv.put(b"b", b"3")
    following = stream.end(end)
    assert stream.between(end, following) == [(first + 2, b"a", None), (first + 3, b"b", b"3")]
    assert stream.end(following) == following and stream.between(following, following) == []
    later = Stream(given, startingRevision="latest")
    assert later.between(later.reader.initialOffset(), end) == stream.between(start, end), "what it says is not counted"
    begun = later.end(later.reader.initialOffset())
    assert begun.get("uid") and "initial" not in begun, "from then on it would miss what is missing"
    assert later.between(later.reader.initialOffset(), begun) == [] and later.end(begun) == begun
    named = Stream(given, startingRevision=str(first + 2), prefix="b")
    found = named.end(named.reader.initialOffset())
    assert named.between(named.reader.initialOffset(), found) == [(first + 3, b"b", b"3")]
    kv.put(b"c", b"other")
    more = named.end(found)
    assert named.between(found, more) == [], "a revision that changed none of its keys"
    kv.compact(first + 2)
    with pytest.raises(DataLoss, match="is compacted"):
        stream.between(start, end)


def test_a_group_that_was_made_anew_is_another_one(given: dict[str, str], yard: Yard) -> None:
    group = given["group"]
    yard.kv(group).put(b"a", b"1")
    stream = Stream(given, startingRevision="earliest")
    start = stream.reader.initialOffset()
    end = stream.end(start)
    # As of a version whose offsets did not say which group they are of.
    old = {name: value for name, value in end.items() if name != "uid"}
    yard.kv(group).put(b"a", b"2")
    known = stream.end(old)
    assert len(stream.between(old, known)) == 1 and known["uid"]
    batch = KvReader(parse_kv(given))
    tasks = batch.partitions()
    yard.delete(group)
    reach(lambda: group not in {row["name"] for row in yard.list()})
    yard.create(group, machine="kv")
    for number in range(5):
        yard.kv(group).put(b"other", b"%d" % number)
    for again in (stream, Stream(given)):
        with pytest.raises(DataLoss, match=f"KV group '{group}': it was deleted and made anew"):
            again.end(known)
        with pytest.raises(DataLoss, match="made anew"):
            again.between(end, known)
    with pytest.raises(DataLoss, match="made anew"):
        rows(batch, *tasks)
    pinned = Stream(given)
    pinned.reader.prepareForTriggerAvailableNow()
    with pytest.raises(DataLoss, match="made anew"):
        pinned.end(known)


def test_an_older_copy_of_a_group_ends_a_stream(given: dict[str, str], yard: Yard) -> None:
    """A checkpoint that is ahead of its group, as when a backup was put back: neither waited for nor passed over."""
    yard.kv(given["group"]).put(b"a", b"1")
    stream = Stream(given, startingRevision="earliest")
    start = stream.reader.initialOffset()
    end = stream.end(start)
    ahead = {**end, "revision": end["revision"] + 5}
    with pytest.raises(DataLoss, match=f"is at revision {end['revision']}, and .* at {ahead['revision']}: an older"):
        stream.end(ahead)
    waiting = threading.Event()
    found: list[BaseException] = []

    def repeated() -> None:
        try:
            stream.between(end, ahead)
        except DataLoss as error:
            found.append(error)
        waiting.set()

    threading.Thread(target=repeated, daemon=True).start()
    assert waiting.wait(20.0), "it waits for a revision that nobody will make"
    assert [str(error) for error in found] and "an older copy" in str(found[0])
    # Where a query begins may be to come.
    later = Stream(given, startingRevision="1000")
    assert later.end(later.reader.initialOffset()) == later.reader.initialOffset()


def test_an_offset_of_another_source_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(BadOffset, match="is no offset of a KV group"):
        Stream(given).end({"v": 1, "turn": "", "logs": {}})


def test_of_a_key_the_last_row_counts(given: dict[str, str], yard: Yard) -> None:
    kv = yard.kv(given["group"])
    kv.put(b"gone", b"x")
    sent = [{"key": b"k%d" % (n % 700), "value": b"%d" % n, "deleted": False} for n in range(2500)]
    sent += [{"key": b"gone", "value": None, "deleted": True}, {"key": b"k1", "value": b"", "deleted": None}]
    sent += [{"key": b"large", "value": bytes(9 << 20), "deleted": False}]
    sink = pickle.loads(pickle.dumps(KvSink(parse_kv(given))))
    for _ in range(2):
        sink.write(iter([pyarrow.RecordBatch.from_pylist(sent[:1100]), pyarrow.RecordBatch.from_pylist(sent[1100:])]))
        wanted = {one["key"]: one["value"] for one in sent if one["value"] is not None}
        assert keys(given) == wanted


def test_what_a_row_asks_for() -> None:
    assert operation({"key": "a", "value": "b"}) == Put(b"a", b"b")
    assert operation({"key": b"a", "value": b"b", "deleted": True}) == Delete(b"a")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"key": "", "value": "b"}, "key: a row has none"),
        ({"key": "a", "value": None}, "value: key b'a'"),
    ]
    for row, what in wrong:
        with pytest.raises(OptionError, match=what):
            operation(row)


@pytest.mark.parametrize(
    ("change", "what"),
    [({"machine": "queue"}, "machine: kv is expected"), ({"group": ""}, "group: it is needed"),
     ({"servers": "x"}, "servers: "),
     ({"grup": "x"}, "grup: .* is it group?"), ({"subscribe": "x"}, "subscribe: with machine=kv"),
     ({"revision": "0"}, "revision: a revision is expected"), ({"startingRevision": "soon"}, "startingRevision: "),
     ({"tlsCa": "x"}, "tlsCertificate: it is needed too: tlsCa, tlsCertificate and tlsKey go together")],
)  # fmt: skip
def test_what_is_refused(change: dict[str, str], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        parse_kv({"servers": "127.0.0.1:7001", "machine": "kv", "group": "a", **change})


def test_the_guide_has_the_options() -> None:
    assert kv_table() in (ROOT / "docs" / "guides" / "spark.md").read_text("utf-8")


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(240)
def test_out_and_in_again_in_spark(spark: SparkSession, given: dict[str, str], yard: Yard, tmp_path: Path) -> None:
    kv = yard.kv(given["group"])
    copy = f"{given['group']}-copy"
    yard.create(copy, machine="kv")
    source = spark.readStream.format("logyard").options(**given, startingRevision="earliest").load()

    def run() -> None:
        changes = source.select("key", "value", "deleted").writeStream.format("logyard")
        changes = changes.options(**{**given, "group": copy}).option("checkpointLocation", str(tmp_path))
        changes.trigger(availableNow=True).start().awaitTermination()

    for key in (b"a", b"b", b"c"):
        kv.put(key, b"1")
    run()
    kv.put(b"a", b"2")
    kv.delete(b"b")
    run()
    assert keys({**given, "group": copy}) == {b"a": b"2", b"c": b"1"}
    table = spark.read.format("logyard").options(**given).load()
    assert table.where("key = 'a' and version = 2").count() == 1 and table.count() == 2
    out = spark.createDataFrame([("d", "4")], "key string, value string").write.format("logyard").mode("append")
    out.options(**given).save()
    assert keys(given) == {b"a": b"2", b"c": b"1", b"d": b"4"}
    with pytest.raises(Exception, match="other: string: a KV sink takes key and value"):
        frame = spark.createDataFrame([("d", "4", "x")], "key string, value string, other string")
        frame.write.format("logyard").mode("append").options(**given).save()
    with pytest.raises(Exception, match="prefix: this is not for a sink"):
        out.options(**given, prefix="x").save()

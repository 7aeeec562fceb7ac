"""The stream source against real processes, without a JVM: restarts, replays, and what happens to logs meanwhile."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from logyard.client.sync import Yard, connect_sync
from logyard.pipeline.datasource import LogyardDataSource
from logyard.pipeline.errors import DataLoss
from logyard.pipeline.partitions import Weighed, pack, spread
from logyard.pipeline.stream import StreamPartition, StreamReader
from logyard.pipeline.stream_offsets import BadOffset, between, parse_offset
from logyard.protocol.errors import LogyardError
from logyard.service.local_cluster import LocalCluster

from .plain_query import Killed, PlainQuery, Rows
from .support import fill, lead, reach


class Table:
    """A sink that keeps a batch once, as one that knows batch numbers does."""

    def __init__(self) -> None:
        self.batches: dict[int, Rows] = {}

    def __call__(self, number: int, rows: Rows) -> None:
        known = self.batches.setdefault(number, rows)
        assert known == rows, "a batch that is repeated has the same rows in the same places"

    @property
    def rows(self) -> Rows:
        return [row for number in sorted(self.batches) for row in self.batches[number]]

    def offsets(self, name: str) -> list[int]:
        return [row["offset"] for row in self.rows if row["log"] == name and row["kind"] == "record"]

    def gaps(self) -> list[tuple[str, int, int | None]]:
        return [(row["log"], row["offset"], row["payload_size"]) for row in self.rows if row["kind"] == "gap"]


def given(cluster: LocalCluster, **options: str) -> dict[str, str]:
    return {"servers": ",".join(cluster.addresses), "startingOffsets": "earliest", "timeoutSeconds": "20"} | options


def applied(yard: Yard, name: str, end: int) -> None:
    """Every member has it."""
    reach(lambda: all(yard.log(name).latest(node=node).end >= end for node in (1, 2, 3)))


def test_a_stream_from_beginning_to_end(cluster: LocalCluster, yard: Yard, tmp_path: Path) -> None:
    names = ["flow-1", "flow-2", "flow-3"]
    fill(yard, names, 100)
    table = Table()
    options = given(cluster, subscribePattern="flow-.*", maxOffsetsPerTrigger="40", minRowsPerLog="20")
    query = PlainQuery(tmp_path, options, table)
    assert query.available_now() == 8
    assert {len(rows) for rows in table.batches.values()} == {40, 20}
    assert all(table.offsets(name) == list(range(100)) for name in names)
    assert query.reader.reportLatestOffset() == {"logs": 3, "records": 300, "behind": 0}
    yard.log("flow-2").append_many([(b"more", b"x")] * 5)
    # A run that was pinned reads nothing that came later; the next one does, and remembers an empty log.
    assert not query.trigger()
    yard.create("flow-4")
    again = PlainQuery(tmp_path, options, table)
    assert again.available_now() == 1 and table.offsets("flow-2") == list(range(105))
    assert again.offset(8)["logs"]["flow-4"][1] == 0
    assert PlainQuery(tmp_path, options, table).available_now() == 0


def test_what_was_acknowledged_is_in_the_next_batch(cluster: LocalCluster, yard: Yard, tmp_path: Path) -> None:
    yard.create("prompt")
    table = Table()
    query = PlainQuery(tmp_path, given(cluster, subscribe="prompt"), table)
    query.trigger()
    log = yard.log("prompt")
    for number in range(100):
        offset = int(log.append(b"%d" % number, None))
        assert query.trigger() and table.offsets("prompt")[-1] == offset == number
    assert not query.trigger()


def test_a_replay_reads_the_same_whoever_leads_and_however_many_nodes_live(
    cluster: LocalCluster, yard: Yard, tmp_path: Path
) -> None:
    """The last entry of the commit log is gone, leaders have moved, a node is dead, more has been appended."""
    names = [f"pure-{n}" for n in range(6)]
    fill(yard, names, 300)
    table = Table()
    options = given(cluster, subscribePattern="pure-.*", maxOffsetsPerTrigger="700", maxPartitionRows="1500")
    query = PlainQuery(tmp_path, options, table)
    query.available_now()
    number = len(table.batches) - 1
    tasks = query.tasks(query.offset(number - 1), query.offset(number))
    for name in names:
        lead(yard, name, int(yard.describe(name)["leader"]) % 3 + 1)
        yard.log(name).append_many([(b"later", None)] * 10)
        # What only a dead leader knows to be committed is in a batch once there is another one.
        applied(yard, name, 310)
    (query.commits / str(number)).unlink()
    cluster.kill9(3)
    try:
        # `Table` compares what comes again.
        again = PlainQuery(tmp_path, options | {"minRowsPerLog": "7", "maxOffsetsPerTrigger": "100"}, table)
        assert again.tasks(query.offset(number - 1), query.offset(number)) == tasks
        again.available_now()
    finally:
        cluster.restart(3)
    assert all(table.offsets(name) == list(range(310)) for name in names)


def test_tasks_that_are_cut_by_who_leads_are_caught_by_a_replay(
    cluster: LocalCluster, yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: planning as batches do it. The sum of the rows is right, and the rows of a task are others."""
    names = [f"planted-{n}" for n in range(6)]
    fill(yard, names, 300)
    for name in names:
        lead(yard, name, 1)

    def by_leaders(reader: StreamReader, start: Any, end: Any) -> list[Any]:
        ranges = between(parse_offset(start), parse_offset(end)).ranges
        leaders = {name: int(yard.describe(name)["leader"]) for name in names}
        weighed = [Weighed(one._replace(nodes=(1, 2, 3)), one.end - one.first) for one in ranges]
        return [StreamPartition(task) for task in pack(spread(weighed, leaders), 600, None, 2)]

    monkeypatch.setattr(StreamReader, "partitions", by_leaders)
    table = Table()
    query = PlainQuery(tmp_path, given(cluster, subscribePattern="planted-.*"), table)
    query.available_now()
    (query.commits / "0").unlink()
    for name in names[::2]:
        lead(yard, name, 3)
    reach(lambda: all(yard.describe(name)["leader"] == 3 for name in names[::2]))
    with pytest.raises(AssertionError, match="the same rows in the same places"):
        PlainQuery(tmp_path, given(cluster, subscribePattern="planted-.*"), table).available_now()


def test_a_stream_under_tls_brings_payloads_along(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "yard", 1, tls=True) as cluster:
        cluster.start()
        files = cluster.client_tls
        assert files is not None
        bodies = [None, b"", b"small", b"L" * 100_000, b"H" * (2 << 20)]
        options = given(cluster, subscribe="secret", includePayload="inline", maxInlineBytes="1m", verify="true")
        with connect_sync(cluster.addresses, tls=files) as yard:
            yard.create("secret")
            for number, body in enumerate(bodies):
                yard.log("secret").append(b"%d" % number, body)
            with pytest.raises(LogyardError):
                LogyardDataSource(options | {"timeoutSeconds": "1"}).schema()
            options |= {"tlsCa": str(files.ca), "tlsCertificate": str(files.certificate), "tlsKey": str(files.key)}
            table = Table()
            assert PlainQuery(tmp_path / "point", options, table).available_now() == 1
            yard.log("secret").append(b"later", b"later")
            assert PlainQuery(tmp_path / "point", options, table).available_now() == 1
        assert [(row["meta"], row["payload"]) for row in table.rows] == [
            (b"%d" % number, None if number == 4 else body) for number, body in enumerate(bodies)
        ] + [(b"later", b"later")]  # fmt: skip
        assert [row["payload_hash"] is None for row in table.rows] == [True] + [False] * 5


@pytest.mark.long
def test_two_hundred_restarts_with_kills_at_every_point(cluster: LocalCluster, yard: Yard, tmp_path: Path) -> None:
    """Each start has other limits and other tasks; what a batch holds stays what its offsets say."""
    chance = random.Random(11)
    names = [f"again-{n}" for n in range(4)]
    fill(yard, names, 20)
    ends = dict.fromkeys(names, 20)
    seen: dict[int, set[tuple[str, int, bytes]]] = {}

    def sink(number: int, rows: Rows) -> None:
        found = {(row["log"], row["offset"], row["meta"]) for row in rows}
        assert len(found) == len(rows) and seen.setdefault(number, found) == found

    for _ in range(200):
        options = given(
            cluster, subscribePattern="again-.*", minRowsPerLog=str(chance.randint(1, 30)),
            maxOffsetsPerTrigger=str(chance.randint(1, 60)), minPartitions=str(chance.randint(1, 5)),
            maxPartitionRows=str(chance.choice([1, 1005, 250_000])),
        )  # fmt: skip
        query = PlainQuery(tmp_path, options, sink)
        query.kill_after = chance.choice(["offset", "read", "sink", ""])
        try:
            query.trigger()
        except Killed:
            pass
        finally:
            query.reader.stop()
        if chance.random() < 0.5:
            name = chance.choice(names)
            yard.log(name).append_many([(b"%s %d" % (name.encode(), ends[name] + n), None) for n in range(5)])
            ends[name] += 5
    PlainQuery(tmp_path, given(cluster, subscribePattern="again-.*"), sink).available_now()
    found = sorted(row for rows in seen.values() for row in rows)
    assert found == sorted((name, n, b"%s %d" % (name.encode(), n)) for name in names for n in range(ends[name]))


@pytest.mark.parametrize("fail", [True, False])
def test_logs_that_are_truncated_deleted_or_made_anew(
    cluster: LocalCluster, yard: Yard, tmp_path: Path, fail: bool
) -> None:
    kind = "hard" if fail else "soft"
    names = [f"{kind}-{what}" for what in ("cut", "dropped", "anew", "kept")]
    cut, dropped, anew, kept = names
    fill(yard, names, 50)
    table = Table()
    options = given(cluster, subscribePattern=f"{kind}-.*", failOnDataLoss=str(fail).lower())
    query = PlainQuery(tmp_path, options, table)
    assert query.trigger()

    def happens(name: str) -> None:
        """To records that were not read yet."""
        yard.log(name).append_many([(b"new", None)] * 10)
        if name == cut:
            yard.log(cut).truncate(55)
            reach(lambda: all(yard.log(cut).latest(node=node).start == 55 for node in (1, 2, 3)))
            return
        yard.delete(name)
        reach(lambda: not query.reader.source.logs(names=[name]))
        if name == anew:
            fill(yard, [anew], 7)
            applied(yard, anew, 7)

    said = {
        cut: rf"^log '{cut}': records 50\.\.54 were truncated before the stream read them; set failOnDataLoss=false",
        dropped: rf"^log '{dropped}': it was deleted; records from 50 on may have been lost; set failOnDataLoss=false",
        anew: rf"^log '{anew}': it was deleted and made anew; records from 50 on may have been lost; set failOnData",
    }
    for name, message in said.items():
        happens(name)
        if fail:
            with pytest.raises(DataLoss, match=message):
                query.trigger()
            with pytest.raises(DataLoss, match=message):
                PlainQuery(tmp_path, options, table).available_now()
            # As the message says. The row is in the batch in which it was met.
            lossy = options | {"failOnDataLoss": "false"}
            PlainQuery(tmp_path, lossy, table).available_now()
        else:
            assert query.trigger()
    gaps = [(cut, 50, 5), (dropped, 50, None), (anew, 50, None)]
    assert table.gaps() == gaps
    assert table.offsets(cut) == [*range(50), *range(55, 60)] and table.offsets(kept) == list(range(50))
    assert table.offsets(dropped) == list(range(50)) and table.offsets(anew) == [*range(50), *range(7)]
    # The batches with those rows again: what is lost did not become more meanwhile.
    repeated = PlainQuery(tmp_path, options | {"failOnDataLoss": "false"}, table)
    for number in range(1, len(table.batches)):
        tasks = repeated.tasks(repeated.offset(number - 1), repeated.offset(number))
        assert [row for task in tasks for row in repeated.read(task)] == table.batches[number]


def test_a_batch_whose_logs_are_gone_says_so_when_it_is_repeated(
    cluster: LocalCluster, yard: Yard, tmp_path: Path
) -> None:
    """Deleted, or made anew, between a batch's offset and its reading."""
    fill(yard, ["void-a", "void-b"], 30)
    table = Table()
    options = given(cluster, subscribePattern="void-.*")
    query = PlainQuery(tmp_path, options, table)
    query.kill_after = "offset"
    with pytest.raises(Killed):
        query.trigger()
    yard.delete("void-a")
    yard.delete("void-b")
    reach(lambda: not query.reader.source.logs(names=["void-a", "void-b"]))
    fill(yard, ["void-b"], 40)
    with pytest.raises(DataLoss, match=r"^log 'void-[ab]': it was deleted before records 0\.\.29 were read"):
        PlainQuery(tmp_path, options, table).trigger()
    lossy = options | {"failOnDataLoss": "false"}
    PlainQuery(tmp_path, lossy, table).available_now()
    assert table.gaps()[:2] == [("void-a", 0, 30), ("void-b", 0, 30)] and table.offsets("void-b") == list(range(40))


def test_logs_deleted_after_the_pin_end_the_run(cluster: LocalCluster, yard: Yard, tmp_path: Path) -> None:
    fill(yard, ["pin-a", "pin-b"], 30)
    options = given(cluster, subscribePattern="pin-.*", maxOffsetsPerTrigger="20", minRowsPerLog="5")
    table = Table()
    query = PlainQuery(tmp_path / "lossy", options | {"failOnDataLoss": "false"}, table)
    failing = PlainQuery(tmp_path / "failing", options, lambda number, rows: None)
    for one in (query, failing):
        one.reader.prepareForTriggerAvailableNow()
        assert one.trigger()
    yard.delete("pin-a")
    reach(lambda: not query.reader.source.logs(names=["pin-a"]))
    fill(yard, ["pin-a", "pin-new"], 90)
    with pytest.raises(DataLoss, match="log 'pin-a': it was deleted before records"):
        while failing.trigger():
            pass
    while query.trigger():
        pass
    taken = len(table.offsets("pin-a"))
    assert table.offsets("pin-b") == list(range(30)) and sum(count or 0 for *_, count in table.gaps()) == 30 - taken
    assert not table.offsets("pin-new")
    # The next run, with logs that came meanwhile, ends as well.
    again = PlainQuery(tmp_path / "lossy", options | {"failOnDataLoss": "false"}, table)
    again.available_now()
    assert table.offsets("pin-new") == list(range(90)) and table.offsets("pin-a")[-90:] == list(range(90))


def test_new_logs_begin_where_it_is_told(cluster: LocalCluster, yard: Yard, tmp_path: Path) -> None:
    fill(yard, ["fresh-1"], 10)
    tables = {kind: Table() for kind in ("earliest", "latest")}
    queries = {
        kind: PlainQuery(
            tmp_path / kind, given(cluster, subscribePattern="fresh-.*", startingOffsets=kind, newLogs=kind), table
        )
        for kind, table in tables.items()
    }
    assert all(query.trigger() for query in queries.values()) and not tables["latest"].rows
    fill(yard, ["fresh-2"], 10)
    applied(yard, "fresh-2", 10)
    for query in queries.values():
        assert query.trigger()
    yard.log("fresh-2").append(b"late", None)
    for query in queries.values():
        assert query.trigger()
    assert tables["earliest"].offsets("fresh-2") == list(range(11)) and tables["latest"].offsets("fresh-2") == [10]


def test_a_new_query_at_latest_misses_nothing_when_its_first_batch_is_repeated(
    cluster: LocalCluster, yard: Yard, tmp_path: Path
) -> None:
    """Spark asks for the beginning again, of a later process even: it is somewhere else by then."""
    fill(yard, ["young", "younger"], 10)
    table = Table()
    options = given(cluster, subscribePattern="young.*", startingOffsets="latest")
    query = PlainQuery(tmp_path, options, table)
    start = query.reader.initialOffset()
    for number in range(3):
        yard.log("young").append(b"%d" % number, None)
    end = query.reader.latestOffset(start, ReadAllAvailable())
    (query.offsets / "0").write_text(json.dumps(end), "utf-8")
    yard.log("young").append_many([(b"later", None)] * 5)
    fill(yard, ["young-new"], 4)
    for _ in range(2):
        again = PlainQuery(tmp_path, options, table)
        assert again.trigger() and table.offsets("young") == [10, 11, 12]
        (query.commits / "0").unlink()
    (query.commits / "0").touch()
    PlainQuery(tmp_path, options, table).available_now()
    assert table.offsets("young") == list(range(10, 18)) and table.offsets("young-new") == list(range(4))
    assert not table.gaps()


@pytest.mark.long
def test_a_leader_killed_between_trigger_and_reading(cluster: LocalCluster, yard: Yard, tmp_path: Path) -> None:
    names = [f"led-{n}" for n in range(6)]
    fill(yard, names, 200)
    table = Table()
    query = PlainQuery(tmp_path, given(cluster, subscribePattern="led-.*", maxOffsetsPerTrigger="500"), table)
    query.kill_after = "offset"
    with pytest.raises(Killed):
        query.trigger()
    query.kill_after = ""
    victim = int(yard.describe("led-0")["leader"])
    cluster.kill9(victim)
    try:
        while query.trigger():
            pass
        assert all(table.offsets(name) == list(range(200)) for name in names)
        # Without a majority no append, but what is committed is read; with nobody, it waits for somebody.
        log = yard.log("led-0")
        assert int(log.append(b"on", None)) == 200
        assert query.trigger() and table.offsets("led-0") == list(range(201))
    finally:
        cluster.restart(victim)
    cluster.stop()
    cluster.start()
    with connect_sync(cluster.addresses) as other:
        assert int(other.log("led-1").append(b"on", None)) == 200
    reach(lambda: query.trigger() or table.offsets("led-1") == list(range(201)))
    assert table.offsets("led-1") == list(range(201))


def test_limits_in_bytes_know_large_payloads(cluster: LocalCluster, yard: Yard, tmp_path: Path) -> None:
    yard.create_many(["fat", "slim"])
    yard.log("fat").append_many([(b"f", b"x" * 50_000)] * 40)
    yard.log("slim").append_many([(b"s" * 90, b"y" * 10)] * 400)
    options = given(cluster, subscribe="fat,slim", maxBytesPerTrigger="500k", minRowsPerLog="5")
    table = Table()
    query = PlainQuery(tmp_path, options, table)
    query.available_now()
    assert table.offsets("fat") == list(range(40)) and table.offsets("slim") == list(range(400))
    sizes = [sum(len(row["meta"]) + row["payload_size"] for row in rows) for rows in table.batches.values()]
    assert 4 <= len(sizes) <= 12 and max(sizes) < 1_000_000
    one = PlainQuery(tmp_path / "tiny", options | {"maxBytesPerTrigger": "1"}, Table())
    start = one.reader.initialOffset()
    end = one.reader.latestOffset(start, ReadMaxBytes(1))
    assert [sum(part.end - part.first for part in task.ranges) for task in one.tasks(start, end)] == [1]


def test_the_engine_may_ask_without_a_limit(cluster: LocalCluster, yard: Yard, tmp_path: Path) -> None:
    """As a query with once=True does."""
    fill(yard, ["once"], 100)
    query = PlainQuery(tmp_path, given(cluster, subscribe="once", maxOffsetsPerTrigger="7"), Table())
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(7)
    start = query.reader.initialOffset()
    assert query.reader.latestOffset(start, ReadAllAvailable())["logs"]["once"][1] == 100
    assert query.reader.latestOffset(start, ReadMaxRows(7))["logs"]["once"][1] == 7
    assert query.reader.reportLatestOffset() == {"logs": 1, "records": 100, "behind": 93}


def test_a_checkpoint_that_is_deleted_copied_of_another_version_or_damaged(
    cluster: LocalCluster, yard: Yard, tmp_path: Path
) -> None:
    fill(yard, ["point"], 30)
    options = given(cluster, subscribe="point", maxOffsetsPerTrigger="10")
    table = Table()
    PlainQuery(tmp_path / "one", options, table).available_now()
    # Copied: each copy goes its own way from there.
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    yard.log("point").append(b"on", None)
    copied = Table()
    PlainQuery(tmp_path / "two", options, copied).available_now()
    assert copied.offsets("point") == [30]
    # Deleted: the query begins anew, where startingOffsets says.
    shutil.rmtree(tmp_path / "two")
    PlainQuery(tmp_path / "two", options | {"startingOffsets": "latest"}, copied := Table()).available_now()
    assert copied.offsets("point") == []
    PlainQuery(tmp_path / "three", options, copied := Table()).available_now()
    assert copied.offsets("point") == list(range(31))
    # Of another version, of another source, damaged.
    path = tmp_path / "one" / "offsets" / "2"
    sound = json.loads(path.read_text("utf-8"))
    for value, said in (
        ({**sound, "v": 2}, "^checkpoint: its offsets are of version 2, this logyard knows version 1"),
        ({"point": {"0": 10}}, "^checkpoint: .* is no offset of the format logyard"),
        ({**sound, "logs": {"point": ["x", 10]}}, "^checkpoint: .* the checkpoint is damaged"),
    ):
        path.write_text(json.dumps(value), "utf-8")
        with pytest.raises(BadOffset, match=said):
            PlainQuery(tmp_path / "one", options, table).available_now()
    # Records that never were are not waited for: when they come they would be passed over.
    path.write_text(json.dumps({**sound, "logs": {"point": [sound["logs"]["point"][0], 500]}}), "utf-8")
    with pytest.raises(DataLoss, match=r"^log 'point': it ends at 31, and the checkpoint says that records up to 500"):
        PlainQuery(tmp_path / "one", options, table).available_now()
    # The last two commits and the newest offset are gone: the rest is repeated as it was.
    path.unlink()
    (tmp_path / "one" / "commits" / "2").unlink()
    (tmp_path / "one" / "commits" / "1").unlink()
    PlainQuery(tmp_path / "one", options, table_again := Table()).available_now()
    assert table_again.offsets("point") == list(range(10, 31))


def test_the_hint_of_a_consumer(cluster: LocalCluster, yard: Yard, tmp_path: Path) -> None:
    yard.create("hints", machine="kv")
    fill(yard, ["hinted"], 20)
    options = given(cluster, subscribe="hinted", maxOffsetsPerTrigger="10", consumer="hints/spark/hinted")
    query = PlainQuery(tmp_path, options, Table())
    query.available_now()
    found = yard.kv("hints").get(b"spark/hinted")
    assert found is not None
    # Of the batch before the last: Spark tells of a batch when the next one begins.
    assert json.loads(found.value or b"")["logs"]["hinted"][1] == 10
    # One that can't be written holds nobody up.
    lost = PlainQuery(tmp_path / "lost", options | {"consumer": "no-such-group/x"}, table := Table())
    lost.available_now()
    assert table.offsets("hinted") == list(range(20))


def test_what_is_wrong_with_the_options_is_said_when_the_stream_begins(cluster: LocalCluster, yard: Yard) -> None:
    """And not by the constructor, whose error Spark hides behind one of its own."""
    fill(yard, ["wrong"], 1)
    source = LogyardDataSource(given(cluster, subscribe="wrong", endingOffsets="latest"))
    reader: Any = source.streamReader(source.schema())
    for ask in (reader.getDefaultReadLimit, reader.initialOffset, lambda: reader.latestOffset({}, None)):
        with pytest.raises(ValueError, match=r"^endingOffsets: a stream has no end"):
            ask()
    reader.stop()


def test_a_log_that_goes_while_a_query_has_read_nothing_yet_is_a_loss_or_a_gap(
    cluster: LocalCluster, yard: Yard, tmp_path: Path
) -> None:
    yard.create_many(["quiet"])
    tables = {"true": Table(), "false": Table()}
    queries = {
        fail: PlainQuery(
            tmp_path / fail, given(cluster, subscribePattern="quiet.*", newLogs="latest", failOnDataLoss=fail), table
        )
        for fail, table in tables.items()
    }
    for query in queries.values():
        query.trigger()
    yard.log("quiet").append(b"never read", None)
    yard.delete("quiet")
    reach(lambda: not any(row["name"] == "quiet" for row in yard.list()))
    with pytest.raises(DataLoss, match="quiet"):
        for _ in range(5):
            queries["true"].trigger()
    for _ in range(5):
        queries["false"].trigger()
    assert tables["false"].gaps() == [("quiet", 0, None)]

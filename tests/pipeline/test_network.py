"""The network source against real processes: planning, payloads of any size, and what may go away meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from logyard.client.scans import seek_call
from logyard.client.sync import Yard, connect_sync
from logyard.pipeline import network
from logyard.pipeline.datasource import plan
from logyard.pipeline.errors import DataLoss
from logyard.pipeline.log_table import LogTable
from logyard.pipeline.network import NetworkSource, Pending, preferred
from logyard.pipeline.opening import open_source
from logyard.pipeline.options import parse_options
from logyard.pipeline.sources import LogInfo, Reading
from logyard.protocol.errors import Busy, LogyardError, UnknownGroup
from logyard.service.local_cluster import LocalCluster

from .support import fill, lead, reach, read, whole

ALL = Reading(payloads=True, verify=True)


# Who takes another one for dead wakes its logs; and nobody dies here.
LIMITS = {"hibernate_after_ms": 300, "liveness_timeout_ms": 30_000}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("yard"), 3, limits=LIMITS) as found:
        found.start()
        yield found


@pytest.fixture
def yard(cluster: LocalCluster) -> Iterator[Yard]:
    with connect_sync(cluster.addresses) as found:
        yield found


@pytest.fixture
def source(cluster: LocalCluster) -> Iterator[NetworkSource]:
    found = NetworkSource(cluster.addresses, timeout_s=10.0)
    yield found
    found.close()


def hibernating(yard: Yard) -> int:
    # A node that is too busy to answer has a row without figures.
    return sum(int(status.get("hibernating", 0)) for status in yard.statuses().values())


def all_rest(yard: Yard) -> bool:
    """Return whether all three nodes have all groups, asleep, so that only a use changes how many are."""
    statuses = yard.statuses().values()
    counts = {one.get(key) for one in statuses for key in ("groups", "hibernating")}
    return len(statuses) == 3 and len(counts) == 1 and None not in counts


@pytest.mark.long
def test_thousands_of_sleeping_logs_are_planned_and_none_wakes(
    cluster: LocalCluster, yard: Yard, source: NetworkSource
) -> None:
    names = [f"many-{n:05}" for n in range(2000)]
    yard.create_many(names)
    fill(yard, ["few"], 3)
    reach(lambda: all_rest(yard), 60.0)
    slept = hibernating(yard)
    infos = source.logs(pattern="many-.*")
    assert [info.name for info in infos] == names
    assert all(info.end == 0 and info.members == (1, 2, 3) for info in infos)
    (few,) = source.logs(names=["few", "no-such-log"])
    assert (few.start, few.end) == (0, 3)
    options = parse_options({"servers": ",".join(cluster.addresses), "subscribePattern": "many-.*"})
    assert plan(options) == []
    assert hibernating(yard) == slept
    assert [row["offset"] for row in read(source, [whole(few)])] == [0, 1, 2]
    for name in ("many-00000", "many-01999"):
        yard.delete(name)
    assert len(source.logs(pattern="many-.*")) == 1998


def test_a_table_of_sleeping_logs_follows_what_changes_and_wakes_none(
    cluster: LocalCluster, yard: Yard, source: NetworkSource
) -> None:
    names = [f"dozing-{n:02}" for n in range(30)]
    fill(yard, names, 2)
    reach(lambda: all_rest(yard), 60.0)
    table = LogTable(lambda name: name.startswith("dozing-"))
    source.follow(table)
    assert sorted(table.infos) == names and {info.end for info in table.infos.values()} == {2} and not table.missing
    slept = hibernating(yard)
    source.follow(table)
    assert hibernating(yard) == slept
    # Awake, with something new, and asleep again between two looks.
    yard.log(names[3]).append(b"new", None)
    reach(lambda: all_rest(yard))
    yard.delete(names[4])
    reach(lambda: not source.logs(names=[names[4]]))
    fill(yard, ["dozing-new"], 5)
    source.follow(table)
    infos = source.logs(pattern="dozing-.*")
    assert {one.name: (one.uid, one.start, one.end) for one in infos} == {
        name: (one.uid, one.start, one.end) for name, one in table.infos.items()
    }
    assert table.infos[names[3]].end == 3 and table.infos["dozing-new"].end == 5 and names[4] not in table.infos


def test_payloads_of_any_size_come_with_their_hashes(yard: Yard, source: NetworkSource) -> None:
    chance = random.Random(1)
    yard.create("sizes")
    log = yard.log("sizes")
    bodies = [None, b"", b"a", chance.randbytes(4096), chance.randbytes(700_000), chance.randbytes(3 << 20)]
    bodies += [chance.randbytes(9 << 20), b"end"]
    for number, body in enumerate(bodies):
        assert log.append(b"m%d" % number, body) == number
    (info,) = source.logs(names=["sizes"])
    rows = read(source, [whole(info)], ALL)
    assert [row["payload"] for row in rows] == bodies
    sizes = [None if body is None else len(body) for body in bodies]
    digests = [None if body is None else xxhash.xxh3_128_digest(body) for body in bodies]
    assert [row["payload_size"] for row in rows] == sizes and [row["payload_hash"] for row in rows] == digests
    few = read(source, [whole(info)], Reading(payloads=True, inline_bytes=1 << 20))
    assert [row["payload"] for row in few] == [
        body if body is None or len(body) <= 1 << 20 else None for body in bodies
    ]
    assert [row["payload_size"] for row in few] == sizes
    hashed = read(source, [whole(info)], Reading(verify=True))
    assert [row["payload_hash"] for row in hashed] == digests
    bare = read(source, [whole(info)])
    assert [row["payload_size"] for row in bare] == sizes and {row["payload_hash"] for row in bare} == {None}


def test_any_member_serves_and_a_stranger_is_passed_over(yard: Yard, source: NetworkSource) -> None:
    yard.create_many(["two"], members=[1, 2])
    fill(yard, ["three"], 500)
    yard.log("two").append_many([(b"", b"y")] * 500)
    infos = source.logs(names=["two", "three"])
    assert [info.members for info in infos] == [(1, 2, 3), (1, 2)]
    for nodes in ((1,), (2,), (3,), (3, 2, 1), ()):
        assert len(read(source, [whole(info, nodes=nodes) for info in infos], ALL)) == 1000
    for info in infos:
        assert preferred(info)[-1] == info.leader


def truncate(yard: Yard, name: str, before: int) -> None:
    yard.log(name).truncate(before)
    reach(lambda: all(yard.log(name).latest(node=node).start == before for node in (1, 2, 3)))


def test_what_is_gone_is_an_error_or_a_counted_gap(yard: Yard, source: NetworkSource) -> None:
    fill(yard, ["cut", "dropped", "again", "kept"], 100)
    infos = {info.name: info for info in source.logs(names=["cut", "dropped", "again", "kept"])}
    wanted = [whole(infos[name]) for name in ("cut", "dropped", "again", "kept")]
    truncate(yard, "cut", 30)
    yard.delete("dropped")
    yard.delete("again")
    # A member that has not heard of it yet would serve the records.
    reach(lambda: not source.logs(names=["dropped", "again"]))
    fill(yard, ["again"], 5)
    with pytest.raises(DataLoss, match=r"^log 'cut': records 0\.\.29 were truncated.*failOnDataLoss=false") as caught:
        read(source, wanted[:1])
    assert caught.value.details == {"log": "cut", "first": 0, "end": 30}
    for one in wanted[1:3]:
        with pytest.raises(DataLoss, match=f"^log '{one.log}': it was deleted before records 0..99"):
            read(source, [one])
    rows = read(source, wanted, ALL._replace(gaps=True))
    gaps = [(row["log"], row["offset"], row["payload_size"]) for row in rows if row["kind"] == "gap"]
    assert sorted(gaps) == [("again", 0, 100), ("cut", 0, 30), ("dropped", 0, 100)]
    assert [row["offset"] for row in rows if row["log"] == "cut"] == [0, *range(30, 100)]
    assert sum(row["log"] == "kept" for row in rows) == 100
    truncate(yard, "kept", 100)
    (gap,) = read(source, [wanted[3]], Reading(gaps=True))
    assert (gap["offset"], gap["payload_size"]) == (0, 100)


def test_offsets_by_time(yard: Yard, source: NetworkSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the leaders have it: a follower that lacks the last records would answer with where its own copy ends."""
    fill(yard, ["early", "late", "empty"], 10)
    asked: dict[str, int] = {}
    seek = seek_call

    def noted(nodes: Sequence[int], wanted: Sequence[tuple[str, int, int]]) -> Any:
        for name, *_ in wanted:
            asked.setdefault(name, nodes[0])
        return seek(nodes, wanted)

    monkeypatch.setattr(network, "seek_call", noted)
    leaders = {info.name: info.leader for info in source.logs(names=["early", "late", "empty"])}
    yard.log("early").append(b"", b"")
    (first, *_, last) = read(source, [whole(source.logs(names=["early"])[0])])
    stamp = int(last["timestamp"].timestamp() * 1000)
    found = source.offsets_at({"early": stamp, "late": 0, "empty": 1 << 50})
    assert found == {"early": 10 if last["timestamp"] > first["timestamp"] else 0, "late": 0, "empty": 10}
    assert all(asked[name] == leader for name, leader in leaders.items() if leader)
    with pytest.raises(UnknownGroup):
        source.offsets_at({"no-such-log": 0})


def test_a_new_leader_in_the_middle_of_a_read(
    yard: Yard, source: NetworkSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "SCAN_ROWS", 10)
    names = [f"moving-{n}" for n in range(4)]
    fill(yard, names, 200)
    infos = source.logs(names=names)
    reading = Reading(payloads=True, batch_rows=10)
    seen: dict[str, list[int]] = {name: [] for name in names}
    batches = source.read([whole(info) for info in infos], reading)
    for number, batch in enumerate(batches):
        for log, offset in zip(batch.column("log").to_pylist(), batch.column("offset").to_pylist(), strict=True):
            seen[log].append(offset)
        if number % 10 == 5:
            info = infos[number // 10 % 4]
            leader = int(yard.describe(info.name)["leader"])
            lead(yard, info.name, leader % 3 + 1)
    assert seen == {name: list(range(200)) for name in names}


@pytest.mark.long
def test_a_node_that_dies_in_the_middle_of_a_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    with LocalCluster(tmp_path_factory.mktemp("mortal"), 3) as cluster:
        cluster.start()
        with connect_sync(cluster.addresses) as yard:
            fill(yard, ["a", "b", "c"], 3000, b"z" * 5000)
            reach(lambda: all(yard.log(name).latest(node=node).end == 3000 for name in "abc" for node in (1, 2, 3)))
        source = NetworkSource(cluster.addresses, timeout_s=30.0)
        infos = source.logs(names=["a", "b", "c"])
        victim = preferred(infos[0])[0]
        seen: dict[str, list[int]] = {name: [] for name in "abc"}
        for number, batch in enumerate(source.read([whole(info) for info in infos], ALL)):
            for log, offset in zip(batch.column("log").to_pylist(), batch.column("offset").to_pylist(), strict=True):
                seen[log].append(offset)
            if not number:
                cluster.kill9(victim)
        assert seen == {name: list(range(3000)) for name in "abc"}
        # Planning goes on without it; without all of them it says why.
        assert [victim in info.members for info in source.logs()] == [False] * 3
        cluster.kill9(*[node for node in (1, 2, 3) if node != victim])
        hopeless = NetworkSource(cluster.addresses, timeout_s=1.0)
        with pytest.raises(LogyardError):
            hopeless.logs()
        source._timeout_s = 1.0
        with pytest.raises(LogyardError, match=r"^log 'a': offset 5 cannot be read from any of the nodes"):
            read(source, [whole(infos[0], first=5)])
        source.close()


def test_a_damaged_answer_is_asked_of_another_node(
    yard: Yard, source: NetworkSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(yard, ["sound", "hurt"], 50)
    infos = source.logs(names=["sound", "hurt"])
    liar = 2
    reach(lambda: all(yard.log(info.name).latest(node=liar).end == 50 for info in infos))
    ask = source._scan
    lies = []

    def scan(asked, reading):  # type: ignore[no-untyped-def]
        found = ask(asked, reading)
        if found.node != liar:
            return found
        lies.append(found)
        data = bytearray(found.data)
        data[-1] ^= 1
        return found._replace(data=memoryview(bytes(data)))

    monkeypatch.setattr(source, "_scan", scan)
    rows = read(source, [whole(info, nodes=(liar, 1, 3)) for info in infos], ALL)
    assert sorted((row["log"], row["offset"]) for row in rows) == [
        (name, offset) for name in ("hurt", "sound") for offset in range(50)
    ]
    assert lies and {row["payload"] for row in rows} == {b"x" * 50}


def test_a_damaged_answer_while_the_next_one_is_under_way(
    yard: Yard, source: NetworkSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["ahead-1", "ahead-2", "ahead-3"]
    fill(yard, names, 50)
    infos = source.logs(names=names)
    reach(lambda: all(yard.log(name).latest(node=node).end == 50 for name in names for node in (1, 2, 3)))
    yard.log("ahead-2").truncate(5)
    monkeypatch.setattr(network, "SCAN_ROWS", 20)
    ask = source._scan
    answers = []

    def scan(asked, reading):  # type: ignore[no-untyped-def]
        found = ask(asked, reading)
        answers.append(found)
        if len(answers) not in (2, 5):
            return found
        data = bytearray(found.data)
        data[-1] ^= 1
        return found._replace(data=memoryview(bytes(data)))

    monkeypatch.setattr(source, "_scan", scan)
    rows = read(source, [whole(info, nodes=(1,)) for info in infos], ALL._replace(gaps=True, batch_rows=20))
    wanted = {name: [("record", offset) for offset in range(50)] for name in names}
    wanted["ahead-2"] = [("gap", 0), *wanted["ahead-2"][5:]]
    found = {name: [(row["kind"], row["offset"]) for row in rows if row["log"] == name] for name in names}
    assert found == wanted and len(answers) > 8


def test_planning_by_options(cluster: LocalCluster, yard: Yard) -> None:
    names = [f"plan-{n:03}" for n in range(100)]
    fill(yard, names, 50)
    given = {"servers": ",".join(cluster.addresses), "subscribePattern": "plan-.*", "minPartitions": "6"}
    options = parse_options(given)
    tasks = plan(options, 2)
    assert len(tasks) == 6 and sum(one.end - one.first for task in tasks for one in task) == 5000
    later = plan(replace(options, starting_time=1 << 50, starting="x", strategy="latest"), 2)  # type: ignore[arg-type]
    assert later == []
    ranges = parse_options({"servers": given["servers"], "assign": '{"plan-000": [10, 20]}'})
    ((one,),) = plan(ranges, 2)
    assert (one.log, one.first, one.end) == ("plan-000", 10, 20)


def test_a_cluster_under_tls(tmp_path_factory: pytest.TempPathFactory) -> None:
    with LocalCluster(tmp_path_factory.mktemp("tls"), 1, tls=True) as cluster:
        cluster.start()
        files = cluster.client_tls
        assert files is not None
        with connect_sync(cluster.addresses, tls=files) as yard:
            fill(yard, ["secret"], 10)
        given = {"servers": cluster.addresses[0], "subscribe": "secret"}
        with pytest.raises(LogyardError):
            plan(parse_options(given | {"timeoutSeconds": "1"}))
        given |= {"tlsCa": str(files.ca), "tlsCertificate": str(files.certificate), "tlsKey": str(files.key)}
        options = parse_options(given)
        ((one,),) = plan(options)
        with closing(open_source(options)) as source:
            assert sum(batch.num_rows for batch in source.read([one], options.reading)) == 10


class Answers:
    """A yard of three nodes. `ends`: where each one's copy of a log ends, the first of the nodes refuses `refusals`
    times."""

    def __init__(self, ends: dict[int, int], refusals: int = 0) -> None:
        self.ends = ends
        self.refusals = refusals
        self.asked: list[int] = []

    def nodes(self) -> list[int]:
        return sorted(self.ends)

    def run(self, call: Any, timeout: float) -> list[int | LogyardError]:
        node = call.nodes[0]
        self.asked.append(node)
        if node == min(self.ends) and self.refusals:
            self.refusals -= 1
            return [Busy("a moment", 0.01)] * 2
        return [self.ends[node]] * 2

    def locate(self, name: str) -> dict[str, Any]:
        return {"uid": 9}


def with_answers(yard: Answers, monkeypatch: pytest.MonkeyPatch) -> NetworkSource:
    source = NetworkSource(["h:1"])
    monkeypatch.setattr(source, "_yard", yard)
    info = LogInfo("log", 9, 0, 1000, 0, 1, (1, 2, 3))
    monkeypatch.setattr(source, "logs", lambda names=None, pattern=None: [info])
    return source


def test_an_end_by_time_is_not_where_the_copy_of_one_that_is_behind_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    yard = Answers({1: 1000, 2: 500, 3: 500}, refusals=1)
    assert with_answers(yard, monkeypatch).offsets_at({"log": 1 << 50}) == {"log": 1000}
    assert yard.asked[0] == yard.asked[-1] == 1 and len(yard.asked) > 2


@pytest.mark.parametrize("uid", [9, 0])
def test_a_log_that_nodes_did_not_have_at_moments_of_their_own_is_not_deleted(
    uid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of which a range names no uid: a sink's stage, what an import compares."""
    source = with_answers(Answers({1: 0, 2: 0, 3: 0}), monkeypatch)
    one = Pending("log", uid, 100, 1000, [1, 2, 3], time.monotonic())
    reading: Any = SimpleNamespace(gaps=True, payloads=False)
    for node in (1, 2, 3):
        assert not list(source._missing(one, UnknownGroup("no"), node, reading))
    assert one.next == 100 and not one.unknown

"""Audits: nothing wrong with what is sound, and every damaged byte of a live payload named by log and node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logyard.client.sync import connect_sync
from logyard.pipeline.jobs.audit import Summary, Total, run_audit
from logyard.service.local_cluster import LocalCluster

from ..service.check.test_run import flip
from .here import Here

NAMES = ("one", "two", "three")


def body(name: str, number: int) -> bytes:
    return f"<{name} {number}>".encode() * (1500 if number % 2 else 5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Records 0..19 of each log in generations, 10 of them released, 20..29 in the WAL."""
    with LocalCluster(tmp_path_factory.mktemp("audit"), 3) as found:
        found.start()
        with connect_sync(found.addresses) as yard:
            yard.create_many(NAMES)
            for name in NAMES:
                yard.log(name).append_many([(b"meta", body(name, number)) for number in range(20)])
            yard.compact()
            for name in NAMES:
                yard.log(name).truncate(10)
                yard.log(name).append_many([(b"meta", body(name, number)) for number in range(20, 30)])
            applied(found)
            yard.snapshot()
        yield found


def applied(cluster: LocalCluster) -> None:
    """Wait until every member has applied everything."""
    with connect_sync(cluster.addresses) as yard:
        for name in NAMES:
            index = yard.describe(name)["applied"]
            for node in cluster.nodes:
                yard.log(name).wait_applied(index, node=node)


def audit(cluster: LocalCluster, rows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    spark: Any = Here()
    return run_audit(
        spark, {"servers": ",".join(cluster.addresses)}, rows=lambda row: rows.append(row) if rows is not None else None
    )


def test_logs_that_are_named_are_audited_alone(cluster: LocalCluster) -> None:
    spark: Any = Here()
    for named in ({"subscribe": "one,two"}, {"assign": '["one", "two"]'}):
        rows: list[dict[str, Any]] = []
        found = run_audit(spark, {"servers": ",".join(cluster.addresses), **named}, rows=rows.append)
        assert (found["ok"], found["copies"], {row["log"] for row in rows}) == (True, 6, {"one", "two"})


def test_a_log_that_is_named_and_nowhere_is_a_problem(cluster: LocalCluster) -> None:
    spark: Any = Here()
    named = {"servers": ",".join(cluster.addresses), "subscribe": "one,lost"}
    found = run_audit(spark, named)
    assert (found["ok"], found["copies"], found["problems"]) == (False, 3, ["log 'lost' is not there"])
    cluster.stop()
    stopped = run_audit(spark, {"path": str(cluster.nodes[1].directory.parent), "subscribe": "one,lost"})
    cluster.start()
    assert (stopped["ok"], stopped["problems"]) == (False, ["log 'lost' is not there"])


def directory_audit(path: Path) -> dict[str, Any]:
    spark: Any = Here()
    return run_audit(spark, {"path": str(path)})


def test_a_copy_of_the_meta_store_that_is_gone_is_a_warning(cluster: LocalCluster) -> None:
    """The next start makes it anew from the other one: nothing is lost."""
    cluster.stop()
    before = directory_audit(cluster.nodes[2].directory)
    (cluster.nodes[2].data / "meta" / "b" / "data.mdb").unlink()
    found = directory_audit(cluster.nodes[2].directory)
    cluster.start()
    applied(cluster)
    assert not any("meta/b" in text for text in before["warnings"])
    assert found["ok"] and found["warning_count"] == len(found["warnings"]) > before["warning_count"]
    assert any("(node " in text and "meta/b" in text for text in found["warnings"])


def damage(cluster: LocalCluster, node: int, wanted: bytes) -> int:
    """Flip a bit of each copy that the node has of some bytes."""
    hits = 0
    data = cluster.nodes[node].data
    for path in [*data.glob("wal/*.wal"), *data.glob("payloads/gen-*/[bd]*")]:
        raw = path.read_bytes()
        at = raw.find(wanted)
        while at >= 0:
            flip(path, at + len(wanted) // 2)
            hits += 1
            at = raw.find(wanted, at + 1)
    return hits


def test_a_sound_cluster_and_its_directories(cluster: LocalCluster) -> None:
    rows: list[dict[str, Any]] = []
    found = audit(cluster, rows)
    assert found["ok"], found["problems"]
    assert found["copies"] == 9 == len(rows) and {row["node"] for row in rows} == {1, 2, 3}
    live = sum(len(body(name, number)) for name in NAMES for number in range(10, 30))
    assert found["bytes"] > 3 * live and found["nodes"][1]["bytes"] == found["nodes"][2]["bytes"]
    assert found["dead"] > 0 and found["amplification"] > 1
    assert all(row["digest"] for row in rows)
    cluster.stop()
    stopped = directory_audit(cluster.nodes[1].directory.parent)
    cluster.start()
    assert stopped["ok"], stopped["problems"]
    assert stopped["copies"] == 9 and stopped["bytes"] >= found["bytes"] and not stopped["orphaned_bytes"]
    assert any("payloads/gen" in path for path in stopped["files"]) and any(".wal" in path for path in stopped["files"])
    assert sum(one["live"] for one in stopped["files"].values()) >= found["bytes"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [13, 12, 25])
def test_damage_is_found_on_the_member_that_has_it(cluster: LocalCluster, number: int) -> None:
    """A large body and a pack in a generation, a large body in the WAL."""
    cluster.stop()
    wanted = body("two", number)
    assert damage(cluster, 2, wanted)
    stopped = directory_audit(cluster.nodes[2].directory)
    whole = directory_audit(cluster.nodes[1].directory)
    cluster.start()
    applied(cluster)
    found = audit(cluster)
    cluster.stop()
    damage(cluster, 2, flipped(wanted))
    cluster.start()
    applied(cluster)
    assert not stopped["ok"] and any("two" in text for text in stopped["problems"]) and whole["ok"]
    assert not found["ok"] and found["corrupt"] == found["nodes"][2]["corrupt"] == 1
    assert all("log 'two' on node 2" in text for text in found["problems"])
    again = audit(cluster)
    assert again["ok"], again["problems"]


def flipped(wanted: bytes) -> bytes:
    middle = len(wanted) // 2
    return wanted[:middle] + bytes([wanted[middle] ^ 0xFF]) + wanted[middle + 1 :]


def test_a_member_that_does_not_answer_is_a_problem(cluster: LocalCluster) -> None:
    cluster.kill9(3)
    found = audit(cluster)
    cluster.restart(3)
    applied(cluster)
    assert not found["ok"] and any("node 3 does not answer" in text for text in found["problems"])
    assert found["copies"] == 6


def test_members_that_differ_are_named_and_those_that_have_applied_less_are_not() -> None:
    def copy(node: int, digest: str, applied: int = 7, log: str = "one") -> dict[str, Any]:
        return {
            **Total(copies=1)._asdict(), "problems": [], "node": node, "log": log, "uid": 5 if log == "one" else 6,
            "applied": applied, "start": 0, "end": 3, "digest": digest,
        }  # fmt: skip

    def problems(*copies: dict[str, Any]) -> list[str]:
        summary = Summary(lambda row: None)
        for one in copies:
            summary.add(one)
        summary.agree()
        assert summary.fields()["ok"] is (not summary.problems)
        return summary.problems

    assert problems(copy(1, "a"), copy(2, "a"), copy(3, "b", applied=6), copy(1, "c", log="two")) == []
    (said,) = problems(copy(1, "a"), copy(2, "b"), copy(3, "a"), copy(1, "c", log="two"))
    assert said == "log 'one': nodes [1, 2, 3] hold different payloads at entry 7"

"""The node's verbs as rpc calls them: what they return, and that errors survive the way through a reply."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from logyard.protocol.errors import (
    BadRequest,
    Busy,
    Corrupt,
    LogyardError,
    NotLeader,
    UnknownGroup,
    decode_error,
    encode_error,
)
from tests.engine.host.cluster import KIB, cluster, until


def kinds(root: type[LogyardError]) -> Iterator[type[LogyardError]]:
    for kind in root.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_every_error_comes_back_as_itself() -> None:
    for kind in kinds(LogyardError):
        if kind.__module__ != LogyardError.__module__ or "code" not in kind.__dict__:
            continue
        error = kind.__new__(kind)
        Exception.__init__(error, "what happened")
        error.details = {"leader": 3, "cause": "x", "path": "p"}
        found = decode_error(encode_error(error))
        assert type(found) is kind and str(found) == "what happened" and found.details == error.details
    assert decode_error(encode_error(NotLeader(7))).details == {"leader": 7}
    for error in (Busy("a budget", 0.5), Corrupt("f", 3, 1, 2)):
        assert str(decode_error(encode_error(error))) == str(error)
    odd = LogyardError("new")
    odd.code = "from_a_later_version"
    assert decode_error(encode_error(odd)).code == "from_a_later_version"


async def test_what_a_node_says_of_its_groups(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(2)
        await c.fill(2, 5, 40 * KIB)
        await c.applied()
        (row,) = c.nodes[2].groups()
        assert (row["name"], row["role"], row["leader"], row["state"]) == ("log", "leader", 2, "running")
        assert (row["start"], row["end"]) == (0, 5) and row["commit"] == row["applied"] == row["last"]
        found = c.nodes[2].describe("log")
        assert found["voters"] == [1, 2, 3] and found["stable"] == found["last"]
        # A follower may apply what it has not yet said to be stable.
        matched = {1: found["last"], 3: found["last"]}
        await until(
            lambda: {node: one["match"] for node, one in c.nodes[2].describe("log")["progress"].items()} == matched
        )
        await until(lambda: c.nodes[2].describe("log")["quiet"])
        await c.nodes[2].truncate("log", 2)
        await c.nodes[2].compact()
        found = c.nodes[2].describe("log")
        assert found["homes"] and found["segments"] and found["floor"] and found["released_before"] > [0, 0]
        assert c.nodes[1].locate(["log"]) == [("log", row["uid"], 2, [1, 2, 3], False, "log")]
        with pytest.raises(UnknownGroup):
            c.nodes[1].locate(["log", "none"])


async def test_what_a_node_says_of_itself(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        bodies = await c.fill(1, 10, 40 * KIB)
        await c.applied()
        for number in c.ids:
            status = c.nodes[number].status()
            assert status["node"] == number and status["groups"] == 1 and status["led"] == (number == 1)
            assert status["live_nodes"] == [1, 2, 3] and status["epoch"] == 1
            assert sum(map(len, bodies)) <= status["payload_live_bytes"] == status["wal_bytes_live"]
            assert status["payload_disk_bytes"] >= status["payload_live_bytes"]
        await c.nodes[1].truncate("log", 10)
        await c.applied()
        assert c.nodes[1].status()["payload_live_bytes"] < 100
        found = await c.nodes[1].compact()
        assert found["live_bytes_in_wal"] + found["live_bytes_in_generations"] < 400
        await c.restart(1)
        assert c.nodes[1].status()["epoch"] == 2


async def test_verbs_for_the_leader_say_who_leads(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(3)
        await c.applied()
        node = c.nodes[1]
        for call in (
            lambda: node.truncate("log", 0),
            lambda: node.change_members("log", "remove", 2),
            lambda: node.transfer("log", 1),
            lambda: node.bounds("log", "leader"),
            lambda: c.append(1, [(b"", b"x")]),
        ):
            with pytest.raises(NotLeader) as caught:
                await call()
            assert caught.value.leader == 3
        with pytest.raises(BadRequest):
            node.submit(c.member(1).uid, memoryview(b"x"), _Nobody(), 1) if c.leads(1) else c.nodes[3].submit(
                c.member(3).uid, memoryview(b"x"), _Nobody(), 1
            )
        with pytest.raises(UnknownGroup):
            node.submit(12345, memoryview(b"x"), _Nobody(), 1)


class _Nobody:
    def reply(self, request: int, status: int, data: bytes) -> None:
        raise AssertionError("nothing was queued")


async def test_a_snapshot_call_takes_what_advanced_and_nothing_twice(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        await c.create("other", [1])
        await c.fill(1, 3, 100)
        assert (await c.nodes[1].snapshot())["taken"] == 2
        assert (await c.nodes[1].snapshot())["taken"] == 0
        await c.fill(1, 1, 100)
        assert (await c.nodes[1].snapshot(["log"]))["taken"] == 1
        with pytest.raises(UnknownGroup):
            await c.nodes[1].snapshot(["none"])


async def test_snapshots_come_by_themselves_when_due(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, snapshot_entries=16) as c:
        await c.fill(1, 40, 40 * KIB)
        await until(lambda: c.member(1).snapshot_index >= 16)
        await until(lambda: c.member(1).raft.log.snapshot_index >= 16)
        await c.restart(1)
        await c.leader()
        assert len(await c.read(1)) == 40

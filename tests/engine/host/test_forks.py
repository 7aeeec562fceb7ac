"""A lineage that a forced shrink ended: its members keep what only they have before they leave, or stay."""

from __future__ import annotations

import base64
import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from logyard.client.upload import Upload
from logyard.engine.disk.door import Disk
from logyard.engine.entry import build_commands
from logyard.engine.host import forks
from logyard.engine.raft.core import LEADER
from logyard.engine.replica.member import STOPPED
from logyard.pipeline.directory.report import Report
from logyard.protocol.errors import Refused
from logyard.service.check.process import check_forks
from logyard.service.cli.root import cli
from logyard.service.fork_files import fork_files, read_fork, records_in

from ..quiesce.test_quiesce import asleep
from .cluster import KIB, Cluster, cluster, until
from .test_uploads import SIZE, begin, bind, insist, piece


async def went_on_alone(c: Cluster, packed: bool = False, asleep_before: bool = False) -> list[bytes]:
    """Nodes 2 and 3 acknowledged what they return; node 1, which has heard nothing of it, became the group.
    `asleep_before`: the others slept when they went down."""
    await c.lead(2)
    await c.fill(2, 5, 5 * KIB)
    await c.applied()
    await c.crash(1)
    await until(lambda: 1 not in c.system(2).live)
    bodies = [b"%d only here " % number * (2 if number % 2 else 800) for number in range(6)]
    for body in bodies:
        await c.append(await c.leader(), [(b"head", body)])
    await c.applied(among=[2, 3])
    for number in (2, 3) if packed else ():
        await c.nodes[number].snapshot(["log"])
        await c.nodes[number].compact()
        assert c.member(number).raft.log.first_index == c.member(number).raft.log.last_index + 1
    if asleep_before:
        await asleep(c, among=[2, 3])
    await shrunk_to_one(c)
    return bodies


async def shrunk_to_one(c: Cluster) -> None:
    """Node 1 comes back alone, is made the group by force, and goes on."""
    await c.crash(2)
    await c.crash(3)
    await c.start(1)
    await until(lambda: c.member(1).raft.role != LEADER)
    await c.nodes[1].force_shrink("log")
    for number in range(8):
        await c.append(await c.leader(), [(b"", b"alone %d" % number)])


@pytest.mark.parametrize(("compacted", "packed"), [(False, False), (True, False), (False, True), (True, True)])
async def test_what_a_majority_acknowledged_is_kept_before_its_members_leave(
    tmp_path: Path, compacted: bool, packed: bool
) -> None:
    """`compacted`: the lineage is a snapshot by then; `packed`: so is the fork, its payloads are in a generation."""
    async with cluster(tmp_path) as c:
        bodies = await went_on_alone(c, packed)
        if compacted:
            await c.nodes[1].snapshot(["log"])
            await c.nodes[1].compact()
        for number in (2, 3):
            await c.start(number)
        await c.bare(2, 3)
        for number in (2, 3):
            assert c.system(number).host.replica_gc.forked == 1 and c.nodes[number].status()["forks"] == 1
            (file,) = fork_files(tmp_path / f"node-{number}")
            head, entries = read_fork(file)
            assert (head["name"], head["node"], head["uid"]) == ("log", number, c.member(1).uid)
            found = list(records_in(entries))
            kept = [record.body for record in found if record.head == b"head"]
            assert kept == bodies
            command_line(tmp_path / f"node-{number}", file, tmp_path / f"out-{number}", bodies)
        # The group goes on, and takes them in again.
        await c.nodes[1].change_membership("log", [("add_promotable", 2), ("add_promotable", 3)])
        await until(lambda: c.member(1).raft.configuration.voters == (1, 2, 3))
        assert c.system(1).host.replica_gc.forked == 0


def entries_of(frames: list[list[Any]]) -> list[dict[str, Any]]:
    """What a fork's file has of entries of one frame each."""
    entries = []
    for index, parts in enumerate(frames, 1):
        entry = build_commands(5, index, 1, 0, [memoryview(b"".join(parts))])
        units = [bytes(body) for body in entry.bodies or ()]
        entries.append({"index": index, "term": 1, "kind": entry.kind, "data": entry.data, "units": units})
    return entries


def test_a_payload_in_pieces_is_one_record_with_all_its_bytes() -> None:
    one, other, lost = (Upload("log", b"head %d" % number, random.Random(number)) for number in (1, 2, 3))
    frames: list[list[Any]] = []
    for upload, body in ((one, b"a" * 5000), (other, b"x" * 100), (lost, b"y"), (one, b"b" * 70)):
        frames.append(upload.piece(body))
        upload.done()
    entries = entries_of([*frames, other.bind(), one.bind(), lost.bind()])
    del entries[2]
    found = [(record.head, record.body, record.missing) for record in records_in(entries)]
    assert found == [
        (b"head 2", b"x" * 100, 0), (b"head 1", b"a" * 5000 + b"b" * 70, 0), (b"head 3", None, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
async def test_pieces_from_before_the_split_are_kept_with_the_record_that_binds_them(
    tmp_path: Path, packed: bool
) -> None:
    """Where the upload was under way when the survivor was cut off: the lineage never bound it, and lets it go."""
    async with cluster(tmp_path) as c:
        await c.lead(2)
        await begin(c)
        body = random.Random(5).randbytes(2 * SIZE)
        assert await insist(c, piece(1, 9, 0, body[:SIZE])) == b""
        await c.applied()
        await c.crash(1)
        await until(lambda: 1 not in c.system(2).live)
        assert await insist(c, piece(2, 9, SIZE, body[SIZE:])) == b""
        await insist(c, bind(3, 9, len(body), head=b"long"))
        await c.applied(among=[2, 3])
        for number in (2, 3) if packed else ():
            await c.nodes[number].snapshot(["log"])
            await c.nodes[number].compact()
        await shrunk_to_one(c)
        for number in (2, 3):
            await c.start(number)
        await c.bare(2, 3)
        for number in (2, 3):
            (file,) = fork_files(tmp_path / f"node-{number}")
            (record,) = [one for one in records_in(read_fork(file)[1]) if one.head == b"long"]
            assert record.body == body and not record.missing


def command_line(data: Path, file: Path, target: Path, bodies: list[bytes]) -> None:
    """The operator's verbs: what is there, its records as files, and away with it."""

    def run(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(cli, ["forks", *words, "--json"])
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    (row,) = run("list", str(data))["forks"]
    assert (row["file"], row["name"]) == (str(file), "log") and row["records"] >= len(bodies)
    run("export", str(file), str(target))
    rows = [json.loads(line) for line in (target / "records.jsonl").read_text().splitlines()]
    head = base64.b64encode(b"head").decode()
    assert [(target / row["payload"]).read_bytes() for row in rows if row["metadata"] == head] == bodies
    spoilt = bytearray(file.read_bytes())
    spoilt[len(spoilt) // 2] ^= 1
    file.write_bytes(spoilt)
    elsewhere = target / file.name
    elsewhere.write_bytes(spoilt)
    assert CliRunner().invoke(cli, ["forks", "drop", str(elsewhere)]).exit_code == 1 and elsewhere.exists()
    spoilt[len(spoilt) // 2] ^= 1
    file.write_bytes(spoilt)
    damaged_ones_are_named_and_dropped(data, file, target.with_name(f"{target.name}-again"), bytes(spoilt))
    run("drop", str(file))
    assert not file.exists()


def test_a_directory_that_can_not_be_looked_at_does_not_count_as_one_without_forks(tmp_path: Path) -> None:
    def run(directory: Path) -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["forks", "list", str(directory)])
        return done.exit_code, done.output

    code, said = run(tmp_path)
    assert code == 1 and said == f"error: {tmp_path} is no data directory: it has neither meta nor wal\n"
    (tmp_path / "node-2").mkdir()
    (tmp_path / "node-2" / "node.toml").touch()
    assert run(tmp_path)[0] == 1
    data = tmp_path / "node-2" / "data"
    (data / "meta").mkdir(parents=True)
    assert run(tmp_path) == (0, "0 forks\n")
    # What root may not list either.
    (data / forks.DIRECTORY).touch()
    code, said = run(tmp_path)
    assert code == 1 and said == f"error: {data / forks.DIRECTORY}: Not a directory\n"


def damaged_ones_are_named_and_dropped(data: Path, good: Path, target: Path, whole: bytes) -> None:
    """They are in nobody's way: of the good one everything goes on."""
    damage = {"a-1-2": b"", "b-1-2": b"\x01\x02\x03" * 99, "c-1-2": forks.MAGIC + b"\x01\x02", "d-1-2": whole[:-3]}
    for name, body in damage.items():
        good.with_name(f"{name}.fork").write_bytes(body)
    paths = [str(good.with_name(f"{name}.fork")) for name in damage]
    done = CliRunner().invoke(cli, ["forks", "list", str(data), "--json"])
    said = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 1 and not said["ok"]
    assert [one["file"] for one in said["forks"]] == [str(good)] and [one["file"] for one in said["damaged"]] == paths
    assert CliRunner().invoke(cli, ["forks", "export", str(good), str(target)]).exit_code == 0
    report = Report(lambda *_: None, lambda _: None)
    check_forks(data, report)
    assert [one["path"] for one in report.findings] == [f"forks/{name}.fork" for name in damage]
    assert {(one["severity"], one["kind"]) for one in report.findings} == {("damage", "fork")}
    for path in paths:
        assert CliRunner().invoke(cli, ["forks", "drop", path]).exit_code == 0 and not Path(path).exists()


async def test_a_member_that_was_merely_away_keeps_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.fill(1, 5, KIB)
        await c.applied()
        await c.crash(3)
        await until(lambda: 3 not in c.system(1).live)
        await c.nodes[1].change_members("log", "remove", 3)
        await c.fill(1, 3, KIB)
        await c.start(3)
        await c.bare(3)
        assert c.system(3).host.replica_gc.forked == 0 and not fork_files(tmp_path / "node-3")


class NoRoomForForks(Disk):
    """A disk that is full when a fork is to be kept."""

    __slots__ = ("full",)

    def __init__(self) -> None:
        super().__init__()
        self.full = True

    def create(self, path: str) -> int:
        if self.full and f"/{forks.DIRECTORY}/" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)


async def test_without_room_a_forked_replica_stays_and_goes_when_there_is(tmp_path: Path) -> None:
    disk = NoRoomForForks()
    async with cluster(tmp_path, disks={3: disk}) as c:
        bodies = await went_on_alone(c)
        await c.start(3)
        await until(lambda: "could not be written" in c.member(3).reason)
        disk.full = False
        assert c.member(3).state == STOPPED and not fork_files(tmp_path / "node-3")
        await c.restart(3)
        await c.bare(3)
        (file,) = fork_files(tmp_path / "node-3")
        records = list(records_in(read_fork(file)[1]))
        assert [record.body for record in records if record.head == b"head"] == bodies


async def test_a_replica_that_went_on_without_the_survivor_goes_before_its_node_is_let_in(tmp_path: Path) -> None:
    """Also where it slept meanwhile, and so never spoke: it was taken for a member, with what it had of its own."""
    async with cluster(tmp_path, hibernate_after_ms=30) as c:
        bodies = await went_on_alone(c, asleep_before=True)
        with pytest.raises(Refused, match="node 2 can't be a member: it does not answer"):
            await c.nodes[1].change_membership("log", [("add_promotable", 2)])
        await c.start(2)
        await until(lambda: 2 in c.system(1).live)
        with pytest.raises(Refused, match="it has a replica from before"):
            await c.nodes[1].change_membership("log", [("add_promotable", 2)])
        await c.bare(2)
        await c.nodes[1].change_membership("log", [("add_promotable", 2)])
        await until(lambda: c.member(1).raft.configuration.voters == (1, 2))
        (file,) = fork_files(tmp_path / "node-2")
        records = list(records_in(read_fork(file)[1]))
        assert [record.body for record in records if record.head == b"head"] == bodies
        await c.applied(among=[1, 2])
        assert c.member(2).machine.snapshot() == c.member(1).machine.snapshot()

"""A program that lacks a group's machine, or can't restore it, halts that group and gives up nothing of it (law 7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from logyard.engine.machine import Sections

from .cluster import cluster, until
from .scribe import Scribe, command
from .scribe import machines as scribes
from .test_effects import same, scribe, tell


class Failing(Scribe):
    def restore(self, sections: Sections) -> None:
        raise ZeroDivisionError("a defect of this program")


def missing(name: str, arguments: dict[str, Any]) -> Any:
    if name == "scribe":
        raise KeyError(name)
    return scribes(name, arguments)


def failing(name: str, arguments: dict[str, Any]) -> Any:
    return Failing() if name == "scribe" else scribes(name, arguments)


@pytest.mark.parametrize("program, word", [(missing, "KeyError"), (failing, "ZeroDivisionError")])
@pytest.mark.parametrize("count", [1, 3])
async def test_a_program_that_can_not_make_a_machine_gives_up_nothing(
    tmp_path: Path, program: Any, word: str, count: int
) -> None:
    makes: list[Any] = [scribes]
    async with cluster(tmp_path, count, machines=lambda *named: makes[0](*named)) as c:
        await c.create("s", machine="scribe")
        for number in range(3):
            await tell(c, "s", "note", str(number))
        await c.applied("s")
        for number in c.ids:
            await c.nodes[number].snapshot()
        await tell(c, "s", "note", "behind the snapshot")
        makes[0] = program
        for number in c.ids:
            await c.restart(number)
        await until(lambda: all(c.member(number, "s").state == "halted" for number in c.ids))
        for number in c.ids:
            member = c.member(number, "s")
            assert word in member.reason and member.raft.log.last_index >= 5 and not member.damaged
        await c.append(await c.leader(), [(b"", b"others go on")])
        makes[0] = scribes
        for number in c.ids:
            await c.restart(number)
        await tell(c, "s", "note", "repaired")
        await same(c)
        assert scribe(c, 1).written("note") == ["0", "1", "2", "behind the snapshot", "repaired"]


@pytest.mark.parametrize("count", [1, 3])
async def test_nor_of_a_group_that_only_the_wal_knows(tmp_path: Path, count: int) -> None:
    makes: list[Any] = [scribes]
    async with cluster(tmp_path, count, machines=lambda *named: makes[0](*named)) as c:
        await c.create("s", machine="scribe")
        await tell(c, "s", "note", "young")
        await c.applied("s")
        makes[0] = missing
        for number in c.ids:
            await c.restart(number)
        assert all(c.member(number, "s").state == "halted" for number in c.ids)
        assert all(c.nodes[number].describe("s")["state"] == "halted" for number in c.ids)
        makes[0] = scribes
        for number in c.ids:
            await c.restart(number)
        await tell(c, "s", "note", "repaired")
        await same(c)
        assert scribe(c, 1).written("note") == ["young", "repaired"]


class Picky(Scribe):
    """Fails over one state, as a defect does."""

    def restore(self, sections: Sections) -> None:
        super().restore(sections)
        if self.written("note")[-1] == "odd":
            raise ZeroDivisionError("a defect of this program")


async def test_who_is_brought_up_by_a_snapshot_that_it_can_restore_may_lead_again(tmp_path: Path) -> None:
    makes: list[Any] = [scribes]
    async with cluster(tmp_path, machines=lambda *named: makes[0](*named)) as c:
        await c.create("s", machine="scribe")
        await tell(c, "s", "note", "odd")
        await c.applied("s")
        raft = c.member(3, "s").raft
        await until(lambda: raft.log.stable == raft.log.last_index, "what is applied is durable here, too")
        await c.nodes[3].snapshot(["s"])
        makes[0] = lambda name, arguments: Picky() if name == "scribe" else scribes(name, arguments)
        await c.restart(3)
        await until(lambda: c.member(3, "s").state == "halted")
        assert not c.member(3, "s").raft.may_lead
        await c.leader("s", [1, 2])
        c.partition(3)
        leader = await c.leader("s", [1, 2])
        await c.nodes[leader].command(c.member(leader, "s"), command("note", "even"))
        await c.applied("s", [1, 2])
        for number in (1, 2):
            await c.nodes[number].snapshot(["s"])
            await c.nodes[number].compact()
            member = c.member(number, "s")
            await until(lambda member=member: member.raft.log.snapshot_index == member.snapshot_index > 0)
        c.network.heal()
        await until(lambda: c.member(3, "s").state == "running", "a snapshot lies above what it could not restore")
        assert c.member(3, "s").raft.may_lead and c.system(3).transfers.snapshot_receiver.installed == 1
        await c.lead(3, "s")
        await tell(c, "s", "note", "led by it")
        assert await same(c)

"""A program that lacks a group's machine, or can't restore it, halts that group and gives up nothing of it (law 7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from logyard.engine.machine import Sections

from .cluster import cluster, until
from .scribe import Scribe
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

"""The cluster that users' tests import: real engines, crashes, cut links, and a check that members are equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from logyard.machines.log.command import APPEND, APPEND_REPLY
from logyard.protocol.errors import LogyardError
from logyard.testing import cluster, until
from tests.machines.faulty import Sound


class Odd(Sound):
    """Each of them says something else."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Odd.made += 1
        self.count = 1000 * Odd.made


async def test_a_machine_of_one_s_own_on_three_nodes(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3, machines={"words": Sound}, machine_tick_ms=1000) as run:
        await run.create("w", "words")
        for number in range(10):
            await run.command("w", b"add w%d" % number, b"x" * 10_000)
        with pytest.raises(LogyardError) as caught:
            await run.command("w", b"drop nothing")
        assert caught.value.code == "unknown_name"
        await run.check("w")
        first = await run.leader("w")
        await run.crash(first)
        await run.command("w", b"drop w3")
        await run.start(first)
        await run.check("w")
        assert sorted(run.machine(first, "w").words) == [f"w{n}" for n in range(10) if n != 3]
        leader = await run.leader("w")
        alone = next(number for number in run.ids if number != leader)
        run.partition(alone)
        await run.command("w", b"add w3")
        assert "w3" not in run.machine(alone, "w").words
        run.heal()
        await until(lambda: "w3" in run.machine(alone, "w").words, "it catches up")
        await run.restart(alone)
        await run.check("w")


async def test_members_that_differ_are_noticed(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3, machines={"odd": Odd}) as run:
        await run.create("o", "odd")
        await run.command("o", b"add a")
        with pytest.raises(AssertionError, match="members of o differ"):
            await run.check("o")


async def test_logs_are_there_too(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as run:
        await run.create("log")
        assert APPEND_REPLY.unpack(await run.command("log", APPEND, b"payload")) == (0, 1)
        assert await run.query("log", b"\x91\xa6bounds") == await run.query("log", b"\x91\xa6bounds", node=1)

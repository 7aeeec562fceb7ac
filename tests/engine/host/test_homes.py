"""Which gaps a new home may cover: a table of conditions, as random histories rarely notice one of them changed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, cast

from logyard.engine.ports import HomePort

from .cluster import KIB, cluster


class Home(NamedTuple):
    first: int
    last: int


async def test_a_home_hides_nothing_that_is_stored_elsewhere(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        await c.fill(1, 10, KIB)
        await c.nodes[1].truncate("log", 5)
        member, homes = c.member(1), c.system(1).storage.accounting
        last = member.raft.log.last_index
        alive = [at for at in range(1, last + 1) if member.liveness.live_within((at, 0), (at + 1, 0))]
        assert alive[0] > 1 and alive == list(range(alive[0], alive[-1] + 1)), f"some at the end of {last}: {alive}"
        before = cast("list[HomePort]", [Home(last + 10, last + 14), Home(last + 20, last + 24)])
        hides = homes.hidden_by(member, before, dense=False)
        # What lives in the own log, at either end of the gap.
        assert hides(alive[0], alive[0]) and hides(alive[-1], last + 5) and hides(1, alive[0])
        # What is dead there, or above it without a home.
        assert not hides(1, alive[0] - 1) and not hides(alive[-1] + 1, last + 9)
        assert not hides(last + 1, last + 9) and not hides(last + 15, last + 19) and not hides(last + 25, last + 30)
        # Another home, touched at its first or last entry, around it or within it.
        for first, end in ((9, 10), (14, 16), (8, 30), (11, 12), (24, 24), (15, 20)):
            assert hides(last + first, last + end), (first, end)
        assert homes.hidden_by(member, (), dense=True)(last + 1, last + 9), "every gap of a dense run"

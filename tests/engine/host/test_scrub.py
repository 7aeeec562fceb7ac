"""The scrub: damage that nobody has met yet is found in every kind of file, and repaired; nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster, cluster, until
from .test_repair import all_read, filled, hurt_file, hurt_generations


async def scrubbed(c: Cluster, number: int) -> dict[str, Any]:
    """A whole pass of a node, from here on; its status."""
    scrub = c.system(number).scrub
    wanted = scrub.ask()
    await until(lambda: scrub.passes >= wanted, "the scrub ends")
    assert not scrub.error
    return scrub.status()


async def test_a_sound_directory_is_read_and_nothing_is_found(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        bodies = await filled(c)
        await c.nodes[1].compact()
        await c.fill(1, 4, 20_000)
        await c.roll(1)
        await c.nodes[1].snapshot()
        status = await scrubbed(c, 1)
        assert not status["findings"] and status["finished_ms"]
        assert all(one["bytes"] for one in status["last"].values()), status["last"]
        assert status["last"]["generation"]["bytes"] >= sum(map(len, bodies))


@pytest.mark.parametrize("number", [1, 3], ids=["leader", "follower"])
@pytest.mark.parametrize("place", ["wal", "generation"])
async def test_damaged_payloads_come_from_peers(tmp_path: Path, place: str, number: int) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c)
        if place == "generation":
            await c.nodes[number].compact()
            assert hurt_generations(c, number, bodies[2:5]) == 3
        else:
            await c.roll(number)
            assert hurt_file(c, number, bodies[2:5]) == 3
        status = await scrubbed(c, number)
        assert status["last"][place]["found"] == status["last"][place]["repaired"] == 1, status
        assert not status["left"]
        # Its own again: nobody has to be asked.
        c.partition(number)
        fetched = c.system(number).repair.fetched
        await all_read(c, number, bodies)
        assert c.system(number).repair.fetched == fetched
        c.network.heal()
        status = await scrubbed(c, number)
        assert not status["findings"]

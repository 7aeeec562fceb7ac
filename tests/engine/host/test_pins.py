"""Pins are promises with an end: what is read stays for a while, and no reader holds up space for ever."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from logyard.engine.entry import units_of
from logyard.engine.replica.reader import Located, Wanted
from logyard.protocol.errors import Gone, LogyardError, NoSpace

from .cluster import KIB, Cluster, cluster, until


def located(c: Cluster, index: int) -> Located:
    return next(
        one for one in c.system(1).replicas.reader.payload_entries(c.member(1), index, index) if one.index == index
    )


def all_of(one: Located) -> list[Wanted]:
    return [Wanted(one, unit, 0, unit.length) for unit in units_of(one.data)]


@pytest.mark.parametrize("place", ["wal", "generation"])
async def test_a_pin_keeps_a_home_and_ends_by_itself(tmp_path: Path, place: str) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0, pin_ms=60_000) as c:
        await c.fill(1, 10, 40 * KIB)
        if place == "generation":
            await c.nodes[1].compact()
        else:
            await c.roll(1)
        system, member = c.system(1), c.member(1)
        found = located(c, 4)
        number = found.home.generation if found.home is not None else found.entry.file  # type: ignore[union-attr]
        home, storage = (place, number), system.storage
        storage.location.pin(home)
        storage.location.pin(home)
        await c.nodes[1].truncate("log", 10)
        await c.nodes[1].compact()

        def there() -> bool:
            if place == "generation":
                return number in [one.id for one in system.store.generations()]
            return number in [one for one, _ in system.wal.files]

        assert there()
        storage.location.expire(time.monotonic())
        assert there(), "not yet"
        storage.location.expire(time.monotonic() + 61)
        await c.nodes[1].compact()
        assert not there() and storage.location.expired == 1
        # The reader comes too late, and its own end of the promise is no other one's.
        with pytest.raises((Gone, LogyardError)):
            await system.replicas.reader.read(member, all_of(found))
        await c.fill(1, 1, 40 * KIB)
        for _ in range(2):
            storage.location.unpin(home)
        assert not storage.location._pins and not storage.location._late


async def test_a_slow_reader_of_what_lives_gets_it_from_its_new_home(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 6, 40 * KIB)
        await c.roll(1)
        found = located(c, 4)
        home = ("wal", found.entry.file)  # type: ignore[union-attr]
        storage = c.system(1).storage
        storage.location.pin(home)
        await c.nodes[1].compact()
        storage.location.expire(math.inf)
        assert home[1] not in [one for one, _ in c.system(1).wal.files]
        data = await c.system(1).replicas.reader.read(c.member(1), all_of(found))
        assert any(bodies[at][:12] in bytes(part) for part in data for at in range(6))
        storage.location.unpin(home)


async def test_a_full_disk_ends_every_pin(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0, pin_ms=600_000) as c:
        await c.fill(1, 3, 40 * KIB)
        await c.roll(1)
        storage = c.system(1).storage
        (file,) = storage.location.files
        storage.location.pin(("wal", file))

        async def full() -> None:
            raise NoSpace("the disk is full")

        await storage.janitor._try("a job", full)
        assert storage.location.expired == 1
        await until(lambda: not storage.location._pins)
        storage.location.unpin(("wal", file))

"""Attacks on read repair where it meets releases, migration and restarts: what is written back is what lives here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.protocol.errors import Corrupt, LogyardError

from .cluster import Cluster, cluster, payload_books, until
from .test_histories import check_books, counted
from .test_repair import SIZE, filled, hurt_file, in_files


def body_of(name: bytes) -> bytes:
    return name.ljust(SIZE, b".")


async def one_entry(c: Cluster, names: list[bytes]) -> list[bytes]:
    """One entry with a large body a name."""
    await c.lead(1)
    bodies = [body_of(name) for name in names]
    await c.append(1, [(b"", body) for body in bodies])
    await c.applied()
    await in_files(c)
    return bodies


def hold_applying(c: Cluster, number: int) -> Any:
    """A node applies nothing until the returned function is called."""
    applier = c.system(number).applier
    plain, held = applier.apply, []

    def hold(member: Any) -> None:
        held.append(member)

    applier.apply = hold  # type: ignore[method-assign]

    def go_on() -> None:
        applier.apply = plain  # type: ignore[method-assign]
        for member in dict.fromkeys(held):
            plain(member)

    return go_on


async def test_a_peer_that_released_the_unit_does_not_make_zeros_of_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await one_entry(c, [b"first", b"second"])
        assert hurt_file(c, 3, bodies[:1]) == 1
        go_on = hold_applying(c, 3)
        await c.nodes[1].truncate("log", 1)
        await c.applied(among=[1, 2])
        with pytest.raises(LogyardError):
            found = await c.read(3)
            assert found[0][1] == bodies[0], "never other bytes"
        go_on()
        await c.applied()
        assert [body for _, body in await c.read(3, 1)] == bodies[1:]
        await check_books(c, 3, bodies[1:])


async def test_a_repair_takes_nothing_away_that_lives_here(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await one_entry(c, [b"first", b"second"])
        assert hurt_file(c, 3, bodies[1:]) == 1
        go_on = hold_applying(c, 3)
        await c.nodes[1].truncate("log", 1)
        await c.applied(among=[1, 2])
        assert [body for _, body in await c.read(3)] == bodies
        assert [body for _, body in await c.read(3)] == bodies, "also after what came was written back"
        go_on()
        await c.applied()
        assert [body for _, body in await c.read(3, 1)] == bodies[1:]


@pytest.mark.parametrize("how", ["asked", "waiting"])
async def test_what_dies_while_it_is_repaired_stays_dead(tmp_path: Path, how: str) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c, 6)
        assert hurt_file(c, 3, bodies[:1]) == 1
        system = c.system(3)
        storage = system.storage
        reached = trio.Event()
        async with trio.open_nursery() as nursery:
            if how == "waiting":
                # A job of the janitor keeps what came waiting for its home.
                await storage.janitor.lock.acquire()
                plain = storage.rehoming.store_payloads

                async def store(*arguments: Any, **options: Any) -> None:
                    reached.set()
                    await plain(*arguments, **options)

                storage.rehoming.store_payloads = store  # type: ignore[method-assign]
            else:
                ask = system.pulls.ask
                go_on = trio.Event()

                async def late(*arguments: Any) -> Any:
                    piece = await ask(*arguments)
                    reached.set()
                    await go_on.wait()
                    return piece

                system.pulls.ask = late  # type: ignore[method-assign, assignment]
            nursery.start_soon(c.page, 3, 0)
            await reached.wait()
            await c.nodes[1].truncate("log", 3)
            await c.applied()
            if how == "waiting":
                storage.janitor.lock.release()
            else:
                go_on.set()
        await check_books(c, 3, bodies[3:])


async def test_a_file_that_failed_goes_when_nothing_in_it_lives(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        bodies = await filled(c, 6)
        await c.roll(1)
        assert hurt_file(c, 1, bodies[2:3]) == 1
        with pytest.raises(Corrupt):
            await c.nodes[1].compact()
        storage = c.system(1).storage
        (file,) = [file for file in storage.location.files.values() if file.failed]
        await c.nodes[1].truncate("log", 6)
        storage.janitor.look()
        await until(lambda: file.file not in storage.location.files, "a file with nothing live is dropped")


async def test_a_file_whose_last_damage_was_mended_can_be_emptied(tmp_path: Path) -> None:
    """The damaged entry was all that its group had there, beside what others have."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.create("other")
        await c.lead(1, "other")
        bodies = await filled(c, 1)
        others = await c.fill(1, 4, SIZE, "other", b"o")
        await c.applied("other")
        await c.roll(3)
        assert hurt_file(c, 3, bodies) == 1
        with pytest.raises(Corrupt):
            await c.nodes[3].compact()
        storage = c.system(3).storage
        assert [body for _, body in await c.read(3)] == bodies
        assert not [file for file in storage.location.files.values() if file.failed]
        await c.nodes[3].compact()
        assert not storage.location.files
        assert [body for _, body in await c.read(3, name="other")] == others


async def test_a_release_that_meets_a_damaged_row_halts_no_group(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = [b"small %d" % at for at in range(8)]
        await c.append(1, [(b"", body) for body in bodies])
        await c.applied()
        await c.nodes[3].compact()
        await c.crash(3)
        found = 0
        for path in sorted((c.path / "node-3" / "payloads").glob("gen-*/data.mdb")):
            data = path.read_bytes()
            at = data.find(bodies[5])
            if at >= 0:
                found += 1
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(b"S")
        assert found == 1
        await c.start(3)
        await c.applied()
        # Ends inside the entry, whose row does not verify.
        await c.nodes[1].truncate("log", 3)
        await c.applied()
        assert c.member(3).state == "running", c.member(3).reason
        assert [body for _, body in await c.read(3, 3)] == bodies[3:]


async def test_a_repair_is_booked_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c)
        await c.roll(3)
        before = payload_books(c.system(3))["wal"]
        assert before == counted(c, 3)
        assert hurt_file(c, 3, bodies[2:5]) == 3
        assert [body for _, body in await c.read(3)] == bodies
        books = payload_books(c.system(3))
        assert books["wal"] == counted(c, 3) != before and books["generations"]

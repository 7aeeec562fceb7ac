"""A damaged snapshot of a member that runs is written anew from its memory: no vote and no only copy is lost for it."""

from __future__ import annotations

from pathlib import Path

import trio

from logyard.engine.log import meta_rows
from logyard.engine.log.meta_rows import KEY, SnapshotRow

from ..host.cluster import MIB, Cluster, cluster
from ..host.test_repair import all_read, filled
from ..host.test_sections import put, shelves, stored
from ..host.test_uploads import begin, upload
from .test_scrub import overwrite_rows, scrubbed


async def hurt_snapshot(c: Cluster, number: int) -> None:
    """A snapshot whose row verifies in no copy."""
    await c.roll(number)
    await c.nodes[number].snapshot()
    assert overwrite_rows(c, number, SnapshotRow.PREFIX + KEY.pack(c.member(number).uid), ("a", "b")) == 2


async def test_the_only_copy_goes_on(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        bodies = await c.fill(1, 12, 20_000)
        await hurt_snapshot(c, 1)
        status = await scrubbed(c, 1)
        assert status["findings"] and not status["left"]
        bodies += await c.fill(1, 2, 20_000)
        await c.restart(1)
        await c.lead(1)
        await c.applied()
        await all_read(c, 1, bodies)


async def test_two_of_three_at_once_keep_their_votes(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        bodies = await filled(c)
        for number in (2, 3):
            await hurt_snapshot(c, number)
        async with trio.open_nursery() as nursery:
            for number in (2, 3):
                nursery.start_soon(scrubbed, c, number)
        bodies += await c.fill(1, 1, 20_000)
        assert not any(c.system(number).repair.log_repair.mended for number in c.ids)
        for number in (2, 3):
            assert not (await scrubbed(c, number))["findings"]
            await c.restart(number)
        await c.applied()
        await all_read(c, 3, bodies)


async def test_pieces_of_uploads_are_no_damage(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await begin(c)
        await upload(c, 1, 3, bytes(range(256)) * 9000)
        await c.applied()
        await c.roll(1)
        assert not (await scrubbed(c, 1))["findings"]
        await c.nodes[1].compact()
        await c.nodes[1].snapshot()
        assert not (await scrubbed(c, 1))["findings"]


async def test_a_chunk_that_is_damaged_is_written_again(tmp_path: Path) -> None:
    async with shelves(tmp_path, 1) as c:
        await put(c, 1, "big", 1, 2 * MIB)
        await c.nodes[1].snapshot()
        await c.nodes[1].compact()
        before, meta = stored(c, 1), c.system(1).storage.meta_batch.meta
        (key, _) = sorted(meta.keys(meta_rows.CHUNK))
        meta.commit([(key, b"not what its name says")])
        status = await scrubbed(c, 1)
        assert status["last"]["snapshot"]["repaired"] == 1 and not status["left"] and stored(c, 1) == before
        books = c.log(1).books
        await c.restart(1)
        await c.lead(1)
        await c.applied()
        assert c.log(1).books == books and not (await scrubbed(c, 1))["findings"]

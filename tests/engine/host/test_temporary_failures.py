"""What could not be done just now is no answer, and no damage: nothing is given up for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from logyard.machines.log import AppendLog
from logyard.protocol.errors import SHORTAGE, Busy, Corrupt

from .cluster import cluster, until
from .test_mending import SIZE, mended, stable

DAMAGE = Corrupt("a segment", 0, "this", "that")


def no_memory(*_: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize("error", [MemoryError()], ids=["memory"])
async def test_a_machine_that_can_not_be_restored_ends_the_start_and_gives_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Each of three nodes once: all were to be mended, and nobody was left to mend them."""
    async with cluster(tmp_path) as c:
        await c.fill(await c.leader(), 20, 100)
        await c.applied()
        for number in c.ids:
            await c.nodes[number].snapshot()
        for number in c.ids:
            await c.crash(number)
        whole, failing = AppendLog.restore, [True]

        def restore(self: AppendLog, sections: Any) -> None:
            if failing[0]:
                raise error
            whole(self, sections)

        monkeypatch.setattr(AppendLog, "restore", restore)
        for number in c.ids:
            with pytest.raises(Exception, match="group 'log': its machine 'log' can't be restored from its snapshot"):
                await c.start(number)
        failing[0] = False
        for number in c.ids:
            await c.start(number)
        await c.applied()
        assert [c.member(number).machine.end for number in c.ids] == [20, 20, 20]  # type: ignore[attr-defined]
        assert not any(c.system(number).repair.log_repair.known for number in c.ids)


async def test_a_group_whose_machine_can_not_be_restored_when_it_wakes_keeps_all_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, hibernate_after_ms=60, hibernate_move_bytes=1 << 20) as c:
        await c.lead(1)
        await c.fill(1, 3, SIZE)
        await c.applied()
        uid = c.member(3).uid
        await until(lambda: uid in c.system(3).quiescence.table, "it sleeps")
        with monkeypatch.context() as once:
            once.setattr(AppendLog, "restore", no_memory)
            member = c.system(3).quiescence.unquiesce.find(uid)
        assert member is not None and member.damaged and "can't be restored" in member.reason
        assert not c.system(3).repair.log_repair.known
        await c.restart(3)
        await c.applied()
        assert len(await c.read(3)) == 3


async def test_a_log_is_not_cut_where_it_can_not_be_read_for_want_of_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.fill(1, 6, SIZE)
        await stable(c, 3)
        await c.roll(3)
        old, reader, left = c.member(3), c.system(3).replicas.reader, [2]
        flushed, stored = old.flushed, reader.stored_entries

        def short(member: Any, first: int, last: int, *more: Any) -> Sequence[Any]:
            if left[0]:
                left[0] -= 1
                raise Busy(SHORTAGE, 0.1)
            return stored(member, first, last, *more)

        monkeypatch.setattr(reader, "stored_entries", short)
        c.partition(3)
        c.system(3).repair.log_repair.found(old, DAMAGE)
        await until(lambda: c.replica(3) not in (None, old), "it is made anew when they can be read")
        assert c.member(3).flushed == flushed, "with all that was good"
        c.network.heal()
        await mended(c, 3)


async def test_who_is_made_anew_and_can_not_be_counted_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.fill(1, 6, SIZE)
        await stable(c, 3)
        await c.roll(3)
        old, accounting, left = c.member(3), c.system(3).storage.accounting, [1]
        recount = accounting.recount

        def busy(member: Any) -> None:
            if left[0]:
                left[0] -= 1
                raise Busy(SHORTAGE, 0.1)
            recount(member)

        monkeypatch.setattr(accounting, "recount", busy)
        c.system(3).repair.log_repair.found(old, DAMAGE)
        await until(lambda: c.replica(3) not in (None, old), "made anew")
        await mended(c, 3)
        assert not left[0]

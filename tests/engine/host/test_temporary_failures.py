"""What could not be done just now is no answer, and no damage: nothing is given up for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from logyard.engine.replica.apply import NotRestored
from logyard.machines.log import AppendLog
from logyard.protocol.errors import SHORTAGE, Busy

from .cluster import cluster, until
from .test_mending import mended
from .test_rows_without_room import DAMAGE, asleep, flushed, made_anew


def no_memory(*_: Any) -> None:
    raise MemoryError


async def test_a_machine_that_can_not_be_restored_ends_the_start_and_gives_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
                raise MemoryError
            whole(self, sections)

        monkeypatch.setattr(AppendLog, "restore", restore)
        for number in c.ids:
            with pytest.raises(NotRestored, match="group 'log': no memory for its machine 'log'"):
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
        uid = await asleep(c)
        with monkeypatch.context() as once:
            once.setattr(AppendLog, "restore", no_memory)
            member = c.system(3).quiescence.unquiesce.find(uid)
        assert member is not None and member.damaged and "no memory" in member.reason
        assert not c.system(3).repair.log_repair.known
        await c.restart(3)
        await c.applied()
        assert len(await c.read(3)) == 3


async def test_a_log_is_not_cut_where_it_can_not_be_read_for_want_of_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await flushed(c)
        old, reader, left = c.member(3), c.system(3).replicas.reader, [2]
        before, stored = old.flushed, reader.stored_entries

        def short(member: Any, first: int, last: int, *more: Any) -> Sequence[Any]:
            if left[0]:
                left[0] -= 1
                raise Busy(SHORTAGE, 0.1)
            return stored(member, first, last, *more)

        monkeypatch.setattr(reader, "stored_entries", short)
        c.partition(3)
        c.system(3).repair.log_repair.found(old, DAMAGE)
        await until(lambda: c.replica(3) not in (None, old), "it is made anew when they can be read")
        assert c.member(3).flushed == before, "with all that was good"
        c.network.heal()
        await mended(c, 3)


async def test_who_is_made_anew_and_can_not_be_counted_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await flushed(c)
        accounting, left = c.system(3).storage.accounting, [1]
        recount = accounting.recount

        def busy(member: Any) -> None:
            if left[0]:
                left[0] -= 1
                raise Busy(SHORTAGE, 0.1)
            recount(member)

        monkeypatch.setattr(accounting, "recount", busy)
        await made_anew(c, 3)
        assert not left[0]

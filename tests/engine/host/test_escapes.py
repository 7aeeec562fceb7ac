"""What the world does to a task ends that task's work, not the node: nothing but a failed disk does."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.engine.disk.door import Disk
from logyard.engine.log.meta_rows import Departed
from logyard.engine.log.segment import ROW
from logyard.engine.repair.payload_repair import Refill
from logyard.engine.transport.blobs import DEFINE_GROUPS, DELETE_GROUPS, REMOVED_GROUPS
from logyard.protocol.errors import BadRequest, Corrupt, LogyardError

from .cluster import KIB, cluster, until
from .rig_groups import Network, spec_of
from .test_replica_gc_alone import node as rig_node
from .test_transfers import laggard


class FullPayloads(Disk):
    """No room, or no descriptor, for anything of the payload store's, while there is an `error`."""

    __slots__ = ("error", "hits")

    def __init__(self) -> None:
        super().__init__()
        self.error = self.hits = 0

    def sync_directory(self, path: str) -> None:
        if self.error and "/payloads" in path:
            self.hits += 1
            raise OSError(self.error, os.strerror(self.error), path)
        super().sync_directory(path)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EMFILE], ids=["no space", "no descriptors"])
async def test_a_snapshot_that_can_not_be_taken_in_now_is_taken_in_later(tmp_path: Path, error: int) -> None:
    disk = FullPayloads()
    async with cluster(tmp_path, disks={3: disk}) as c:
        await laggard(c, 6)
        disk.error = error
        await c.start(3)
        await until(lambda: disk.hits > 0, "a generation could not be made")
        disk.error = 0
        await c.applied()
        assert not c.failures


async def test_an_overwritten_log_whose_segment_is_damaged_is_counted_later(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.fill(1, 10, 20 * KIB, tag=b"old")
        await c.applied()
        c.partition(1)
        member = c.member(1)
        async with trio.open_nursery() as nursery:

            async def append(number: int) -> None:
                with pytest.raises(LogyardError):
                    await c.append(1, [(b"doomed", b"%d" % number * 10 * KIB)])

            for number in range(4):
                last = member.raft.log.last_index
                nursery.start_soon(append, number)
                await until(lambda last=last: member.raft.log.last_index > last, "it is in one log")
            await until(lambda: member.raft.log.stable == member.raft.log.last_index, "and on its disk")
            await c.roll(1)
            nursery.cancel_scope.cancel()
        new = await c.leader(among=[2, 3])
        await c.fill(new, 3, 20 * KIB, tag=b"new")
        await c.restart(1)
        c.partition(1)
        member, segments = c.member(1), c.system(1).storage.segments
        assert member.segments
        for run in member.segments:
            path = segments.path(run.segment)
            data = bytearray(path.read_bytes())
            # Of the last entry the metadata, and not the index.
            reader = segments.reader(run.segment)
            group = reader.groups[member.uid]
            data[ROW.unpack_from(reader._row(group.row + group.rows - 1))[3] + 20] ^= 0xFF
            path.write_bytes(data)
            segments.renew(run.segment)
            with pytest.raises(Corrupt):
                segments.reader(run.segment).entries(member.uid, run.first, run.last)
        c.network.heal()
        await c.applied()
        assert not c.failures


async def test_who_is_let_in_again_and_deleted_meanwhile_promises_nothing() -> None:
    async with rig_node() as (_, one):
        one.gc.departed[9] = Departed(3, 2, 3, 10, 11)
        inner = one.write

        async def write(items: Any) -> None:
            await inner(items)
            one.registry.on_blob(2, DELETE_GROUPS, 0, {"uids": [9]})
            await trio.testing.wait_all_tasks_blocked()

        one.gc._rows = one.gc._rows._replace(write=write)
        one.registry.on_blob(2, DEFINE_GROUPS, 0, {"specs": [list(spec_of(9))], "admitted": [[9, 20]]})
        await trio.testing.wait_all_tasks_blocked()
        assert not one.members and not one.gc.departed


@pytest.mark.parametrize("lineages", [None, 5, [[5]], [[["a", 1]]]], ids=str)
async def test_a_lineage_of_any_shape_is_refused(tmp_path: Path, lineages: Any) -> None:
    async with cluster(tmp_path) as c:
        node = 1 if await c.leader() != 1 else 2
        header = {"groups": [[c.member(node).uid, 1000, 1000]], "lineages": lineages}
        with pytest.raises(BadRequest):
            c.system(node).host.inbound.on_blob(3, REMOVED_GROUPS, 0, header, b"")


async def test_a_definition_that_is_given_twice_is_one(tmp_path: Path) -> None:
    async with cluster(tmp_path, hibernate_after_ms=200) as c:
        on_blob = c.system(1).host.inbound.on_blob
        row = [77, "new", "log", {}, [1, 2, 3], 5]
        on_blob(3, DEFINE_GROUPS, 1, {"specs": [[78, "a", *row[2:]], [78, "b", *row[2:]]], "asleep": True}, b"")
        on_blob(3, DEFINE_GROUPS, 1, {"specs": [row, row], "asleep": True}, b"")
        await until(lambda: c.system(1).quiescence.lookup.has(77), "it is there")
        assert not c.system(1).quiescence.lookup.has(78) and not c.failures


async def test_a_definition_whose_other_can_not_be_read_is_refused() -> None:
    async with trio.open_nursery() as nursery:
        one = Network(3, nursery).nodes[1]
        one.names["log"] = 55

        def spec(uid: int) -> Any:
            raise Corrupt("the meta store", 0, "a definition", "two bad copies")

        one.registry._groups = one.registry._groups._replace(spec=spec)
        one.registry.on_blob(2, DEFINE_GROUPS, 3, {"specs": [list(spec_of(77))], "asleep": True})
        await trio.testing.wait_all_tasks_blocked()
        assert 77 not in one.members


async def test_payloads_that_find_no_room_on_their_way_back_are_asked_for_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        asked: list[int] = []

        async def stretch(*_: Any) -> int:
            asked.append(1)
            raise OSError(errno.ENOSPC, "full")

        member = SimpleNamespace(state="running", raft=SimpleNamespace(mend=None, applied=9), resolves=True)
        store = SimpleNamespace(lost_ranges=lambda: [(1, 1, 2)], lost=lambda *_: True, found=lambda *_: None)
        nobody = cast(Any, None)
        refill = Refill(
            cast(Any, store), cast(Any, SimpleNamespace(stretch=stretch)), lambda uid: cast(Any, member), (), nobody,
            lambda: None, nursery.start_soon,
        )  # fmt: skip
        for _ in range(20):
            refill.look()
            await trio.sleep(1)
        assert len(asked) > 1 and not refill.at_work


async def test_damage_that_an_installed_snapshot_meets_does_not_leave_it_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path) as c:
        await laggard(c, 6)
        await c.start(3)
        accounting, met = c.system(3).storage.accounting, []

        def take_out(*_: Any) -> None:
            met.append(1)
            raise Corrupt("a segment", 0, "this", "that")

        monkeypatch.setattr(accounting, "_take_out", take_out)
        await c.applied()
        member = c.member(3)
        assert member.state == "running" and member.raft.log.snapshot_index == member.snapshot_index
        assert not c.failures

"""The scrub's walk over rings, alone: a ring that is another file by the time that it is judged."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.disk.door import Disk
from logyard.engine.log.meta_rows import RingRun
from logyard.engine.log.record import BLOCK
from logyard.engine.log.ring import Geometry, make_ring, write_slots
from logyard.engine.repair.scrub_walks import RingWalk
from logyard.protocol.errors import Busy

from ..log.test_ring_files import plain
from .test_scrub_alone import UID, Rig, a_member

SHAPE = Geometry(16, BLOCK)


class Opens(Disk):
    """Has something happen the first time that a file is opened to be read, after which that may fail."""

    __slots__ = ("code", "first")

    def __init__(self) -> None:
        super().__init__()
        self.first: Callable[[], None] | None = None
        self.code = 0

    def open_file(self, path: str, *, write: bool = False) -> int:
        first, self.first = self.first, None
        if first is not None:
            first()
            raise OSError(self.code, "injected")
        return super().open_file(path, write=write)


class Bench:
    """A group of which the ring has entries 1 to 4 of term 1."""

    def __init__(self, path: Path) -> None:
        self.disk = Opens()
        self.path = path / "7.ring"
        self.member = a_member()
        self.member.damaged = False
        self.rig = Rig(self.member)
        self.meanwhile: Callable[[], None] = lambda: None
        self.make(1, 4, 1)

    def make(self, first: int, last: int, term: int) -> None:
        make_ring(Disk(), str(self.path), UID, SHAPE)
        write_slots(Disk(), str(self.path), UID, SHAPE, [plain(index, term) for index in range(first, last + 1)])
        self.member.ring_runs = [RingRun(first, last, term)]

    def spoil(self, offset: int) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(b"\xff" * 16)

    async def read(self, kind: str, size: int) -> None:
        self.meanwhile()
        self.meanwhile = lambda: None

    async def walk(self) -> list[Any]:
        """Walk once; return what was found, and whose mending was asked for."""
        rig = self.rig
        walk = RingWalk(self.disk, lambda uid: self.path, rig.members, trio.Lock(), self.read, rig.repairs)
        await walk.run()
        await rig.repairs.look()
        return [*rig.named(), *rig.asked]


@pytest.mark.parametrize("spoilt", [SHAPE.slot_at(3), SHAPE.header_at(3)], ids=["body", "header"])
async def test_a_ring_that_was_made_anew_is_judged_and_not_the_one_that_was_read(tmp_path: Path, spoilt: int) -> None:
    bench = Bench(tmp_path)
    bench.spoil(spoilt)
    bench.meanwhile = lambda: bench.make(5, 9, 2)
    assert not await bench.walk()
    image = bench.path.read_bytes()
    bench.meanwhile = lambda: bench.make(5, 9, 2)
    assert not await bench.walk() and bench.path.read_bytes() == image


async def test_a_ring_that_was_not_there_for_a_while_is_no_damage(tmp_path: Path) -> None:
    """Its group slept when it was opened, and woke."""
    bench = Bench(tmp_path)
    bench.disk.code, bench.disk.first = errno.ENOENT, lambda: bench.make(5, 9, 2)
    assert not await bench.walk()


async def test_what_is_still_damaged_when_it_is_looked_at_again_is_mended(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.meanwhile = bench.path.unlink
    bench.spoil(SHAPE.slot_at(3))
    assert await bench.walk() == [("ring", "group-7", False), ("may", UID, 1), ("mend", UID)]


async def test_a_group_that_went_meanwhile_is_nobodys_damage(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.spoil(SHAPE.slot_at(3))

    def gone() -> None:
        bench.rig.members.clear()
        bench.path.unlink()

    bench.meanwhile = gone
    assert not await bench.walk()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM])
async def test_a_want_of_descriptors_ends_the_walk_and_is_no_damage(tmp_path: Path, code: int) -> None:
    bench = Bench(tmp_path)
    bench.disk.code, bench.disk.first = code, lambda: None
    with pytest.raises((OSError, Busy)):
        await bench.walk()
    assert not bench.rig.named() and not bench.rig.asked

"""Which entries of a sealed file a ring takes, and which slots are free for them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from logyard.engine.disk.door import Disk
from logyard.engine.entry import COMMANDS, Entry, build_commands, build_plain
from logyard.engine.log.meta_rows import RingRun
from logyard.engine.log.record import BLOCK
from logyard.engine.log.ring import Geometry, RingReader, make_ring, write_slots
from logyard.engine.log.ring_files import RingFiles
from logyard.engine.raft.raft_log import RaftLog
from logyard.engine.replica.member import Member
from logyard.protocol.errors import NoSpace
from logyard.protocol.frame import encode_frame

from ..quiesce.doubles import member_of

UID = 0xA1
SHAPE = Geometry(16, BLOCK)


def plain(index: int, term: int = 1, size: int = 40) -> Entry:
    return build_plain(index, term, COMMANDS, 5, bytes(size))


def with_payload(index: int) -> Entry:
    return build_commands(UID, index, 1, 5, [memoryview(b"".join(encode_frame([(b"", b"x")], command=b"put")))])


class Bench:
    """A system group whose log begins above `base`, and what was stored in which order."""

    def __init__(self, path: Path, base: int = 0, disk: Disk | None = None) -> None:
        self.did: list[str] = []
        self.members: dict[int, Member] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        self.error: Exception | None = None
        self.rings = RingFiles(path, disk or Disk(), self.members, SHAPE, self.commit, self.raise_format)
        self.member = member_of(set(), UID, "_s", last=0)
        self.members[UID] = self.member
        self.log(base, [])
        self.dead: set[int] = set()
        cast(Any, self.member.liveness).is_dead_range = lambda first, end: first[0] in self.dead

    def log(self, base: int, entries: Iterable[Entry], last: int = 0) -> None:
        """What the log is: in files up to `last`, and then in memory."""
        runs = [(base + 1, 1)] if last > base else []
        cast(Any, self.member.raft).log = RaftLog(base, 1 if base else 0, runs, list(entries), last_index=last or base)

    async def commit(self, members: Collection[Member]) -> None:
        if self.error is not None:
            raise self.error
        assert list(members) == [self.member]
        self.did.append("commit")
        self.meanwhile()

    async def raise_format(self, number: int) -> None:
        self.did.append(f"format {number}")

    async def plan(self, entries: list[Entry]) -> list[RingRun]:
        planned = await self.rings.plan({UID: entries})
        return [run for one in planned for run in one.job.runs]

    def make(self, *entries: Entry, shape: Geometry = SHAPE) -> None:
        path = self.rings.path(UID)
        path.parent.mkdir(exist_ok=True)
        make_ring(Disk(), str(path), UID, shape)
        write_slots(Disk(), str(path), UID, shape, entries)


async def test_a_ring_takes_what_fits_and_has_no_payload_that_lives(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    large = plain(2, size=SHAPE.data_bytes_max)
    fits = plain(3, size=SHAPE.data_bytes_max - len(plain(3, size=0).data))
    living, dead, tombstone = with_payload(4), with_payload(5), with_payload(6)
    bench.dead, tombstone.tombstone = {5}, 9
    entries = [plain(1), large, fits, living, dead, tombstone, plain(7), plain(8, 2)]
    bench.log(0, entries)
    assert await bench.plan(entries) == [RingRun(1, 1, 1), RingRun(3, 3, 1), RingRun(5, 7, 1), RingRun(8, 8, 2)]
    assert bench.did == ["format 2"], "before there is a ring, no older program takes the directory"


@pytest.mark.parametrize("how", ["user's", "damaged", "stopped", "gone"])
async def test_nothing_is_written_for_other_groups(tmp_path: Path, how: str) -> None:
    bench = Bench(tmp_path)
    bench.log(0, [plain(1)])
    if how == "user's":
        bench.member.spec = bench.member.spec._replace(name="s")
    elif how == "damaged":
        bench.member.quarantine("a test")
    elif how == "stopped":
        bench.member.raft.stop()
    else:
        bench.members.clear()
    assert await bench.plan([plain(1)]) == [] and not bench.did


async def test_what_is_not_the_logs_content_is_left_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.log(3, [plain(4), plain(5, 2)])
    assert await bench.plan([plain(2), plain(3), plain(4), plain(5), plain(6)]) == [RingRun(4, 4, 1)]


async def test_a_slot_is_free_when_no_stored_row_names_what_is_in_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.make()
    bench.log(0, [plain(index) for index in range(15, 19)], last=14)
    bench.member.ring = [RingRun(1, 14, 1)]
    later = [plain(index) for index in range(15, 19)]
    assert await bench.plan(later) == [RingRun(15, 16, 1)] and not bench.did
    assert bench.rings.refused == 2
    # A snapshot has let the log go up to 1, and no row says so yet.
    bench.log(1, later, last=14)
    assert await bench.plan(later) == [RingRun(15, 17, 1)] and bench.did == ["commit"]
    assert bench.member.ring == [RingRun(2, 14, 1)]
    # It is stored already: nothing more is.
    assert await bench.plan(later) == [RingRun(15, 17, 1)] and bench.did == ["commit"]


async def test_a_row_that_can_not_be_stored_frees_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.make()
    bench.log(8, [plain(17)], last=16)
    bench.member.ring = [RingRun(1, 16, 1)]
    bench.error = NoSpace("full")
    with pytest.raises(NoSpace):
        await bench.plan([plain(17)])
    assert bench.member.ring == [RingRun(1, 16, 1)]


async def test_many_entries_in_one_file_leave_the_ring_the_newest(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    entries = [plain(index) for index in range(1, 101)]
    bench.log(0, entries)
    assert await bench.plan(entries) == [RingRun(85, 100, 1)]


async def test_what_was_overwritten_has_free_slots(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.make()
    bench.log(0, [plain(8, 2), plain(9, 2)], last=7)
    bench.member.ring = [RingRun(1, 16, 1)]
    bench.member.cut_ring(8)
    assert await bench.plan([plain(8, 2), plain(9, 2)]) == [RingRun(8, 9, 2)]


async def test_a_ring_that_is_needed_and_can_not_be_read_is_not_made_anew(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.log(4, [plain(9)], last=8)
    bench.member.ring = [RingRun(1, 4, 1)]
    assert await bench.plan([plain(9)]) == [], "a stored row names what was there"
    bench.member.free_ring(4)
    (planned,) = await bench.rings.plan({UID: [plain(9)]})
    assert planned.job.make and bench.did == ["format 2"]


class NoDescriptors(Disk):
    def open_file(self, path: str, *, write: bool = False) -> int:
        raise OSError(errno.EMFILE, "too many open files")


async def test_without_descriptors_all_goes_to_the_segment(tmp_path: Path) -> None:
    bench = Bench(tmp_path, disk=NoDescriptors())
    bench.make()
    bench.log(0, [plain(1)])
    assert await bench.plan([plain(1)]) == [] and bench.rings.refused == 1


async def test_a_ring_whose_name_may_not_be_durable_is_made_anew(tmp_path: Path) -> None:
    """As a crash between renaming it and syncing its directory leaves it, or a sync that failed."""
    bench, entries = Bench(tmp_path), [plain(1)]
    bench.log(0, entries)
    bench.make()
    for failed in ({UID: "its directory can't be synced"}, {}):
        planned = await bench.rings.plan({UID: entries})
        assert planned[0].job.make, "no row names it, and nobody here made it"
        bench.rings.written(planned, failed)
    assert bench.did == ["format 2"] * 2
    (planned_next,) = await bench.rings.plan({UID: entries})
    assert not planned_next.job.make
    bench.rings.remove(UID)
    bench.make()
    (planned_again,) = await bench.rings.plan({UID: entries})
    assert planned_again.job.make, "a group that comes back has another one"


async def test_a_ring_that_a_row_named_is_durable(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.make()
    bench.log(0, [plain(9)], last=8)
    bench.member.ring = [RingRun(1, 8, 1)]
    await bench.plan([plain(9)])
    bench.log(8, [plain(9)])
    bench.member.free_ring(8)
    (planned,) = await bench.rings.plan({UID: [plain(9)]})
    assert not planned.job.make


@pytest.mark.parametrize("how", ["damaged", "stopped", "of another shape"])
async def test_what_became_of_a_group_while_slots_were_freed_counts(tmp_path: Path, how: str) -> None:
    bench = Bench(tmp_path)
    bench.make()
    later = [plain(index) for index in range(17, 19)]
    bench.log(1, later, last=16)
    bench.member.ring = [RingRun(1, 16, 1)]

    def meanwhile() -> None:
        if how == "damaged":
            bench.member.quarantine("a test")
        elif how == "stopped":
            bench.member.raft.stop()
        else:
            bench.rings.close_one(UID)
            bench.make(shape=Geometry(32, BLOCK))

    bench.meanwhile = meanwhile
    planned = await bench.rings.plan({UID: later})
    assert bench.did == ["commit"]
    found = [(one.job.slots, one.job.runs) for one in planned]
    assert found == ([(32, (RingRun(17, 18, 1),))] if how == "of another shape" else [])


async def test_what_became_of_one_group_while_slots_of_another_were_freed_counts(tmp_path: Path) -> None:
    bench, other = Bench(tmp_path), 0xA0
    bench.make()
    bench.log(1, [plain(17)], last=16)
    bench.member.ring = [RingRun(1, 16, 1)]
    first = bench.members[other] = member_of(set(), other, "_t", last=0)
    cast(Any, first.raft).log = RaftLog(0, 0, [], [plain(1)])
    bench.meanwhile = lambda: first.quarantine("a test")
    planned = await bench.rings.plan({other: [plain(1)], UID: [plain(17)]})
    assert [one.job.uid for one in planned] == [UID]


class NoRemoval(Disk):
    """Removes nothing, as long as it is `stuck`."""

    __slots__ = ("stuck",)

    def __init__(self) -> None:
        super().__init__()
        self.stuck = True

    def unlink(self, path: str) -> None:
        if self.stuck:
            raise OSError(errno.EIO, "a bad block")
        super().unlink(path)


async def test_a_ring_that_can_not_be_removed_breaks_nobody_and_goes_at_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = NoRemoval()
    bench = Bench(tmp_path, disk=disk)
    bench.log(0, [plain(1)])
    planned = await bench.rings.plan({UID: [plain(1)]})
    bench.make()
    bench.members.clear()
    assert bench.rings.written(planned, {}) == {}
    bench.rings.remove(UID)
    bench.rings.sweep(lambda uid: False)
    assert bench.rings.path(UID).exists() and caplog.text.count("can't be removed") == 3
    disk.stuck = False
    bench.rings.sweep(lambda uid: False)
    assert not bench.rings.path(UID).exists()


async def test_who_goes_while_it_is_planned_or_written_leaves_no_ring(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.make()
    bench.log(8, [plain(17)], last=16)
    bench.member.ring = [RingRun(1, 16, 1)]
    bench.meanwhile = bench.members.clear
    assert await bench.plan([plain(17)]) == []
    bench.members[UID] = bench.member
    planned = await bench.rings.plan({UID: [plain(17)]})
    assert planned
    bench.members[UID] = member_of(set(), UID, "_s")
    assert bench.rings.written(planned, {}) == {} and not bench.rings.path(UID).exists()


async def test_what_was_written_counts_as_far_as_it_is_the_logs_content(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    entries = [plain(index) for index in range(1, 9)]
    bench.log(0, entries)
    planned = await bench.rings.plan({UID: entries})
    bench.log(0, [*entries[:4], plain(5, 2)])
    assert bench.rings.written(planned, {}) == {bench.member: [RingRun(1, 4, 1)]}
    bench.log(2, entries[2:])
    assert bench.rings.written(planned, {}) == {bench.member: [RingRun(3, 8, 1)]}
    bench.log(9, [])
    assert bench.rings.written(planned, {}) == {bench.member: []}
    before = bench.rings.refused
    assert bench.rings.written(planned, {UID: "a bad block"}) == {} and bench.rings.refused == before + 8
    bench.member.quarantine("a test")
    assert bench.rings.written(planned, {}) == {}


def test_a_start_removes_what_is_nobodys_and_leaves_the_rest(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.rings.sweep(lambda uid: False)
    bench.make(plain(1))
    folder = bench.rings.path(UID).parent
    for name in ("00000000000000b2.ring", "00000000000000a1.ring.tmp", "other"):
        (folder / name).write_bytes(b"x")
    bench.rings.scan()
    bench.rings.sweep(UID.__eq__)
    assert sorted(path.name for path in folder.iterdir()) == ["00000000000000a1.ring", "other"]
    assert bench.rings.status() == {"files": 1, "bytes": SHAPE.size, "refused": 0}
    reader = bench.rings.reader(UID)
    assert isinstance(reader, RingReader) and reader is bench.rings.reader(UID), "one descriptor"
    bench.rings.close()

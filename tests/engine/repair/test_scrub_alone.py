"""The scrub, alone: when it passes, how it hands damage on and to whom, and what each walk makes of its files."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import trio
import trio.testing

from logyard.engine.disk.door import Disk
from logyard.engine.log import meta_rows
from logyard.engine.log.meta_rows import SegmentRun
from logyard.engine.log.segment import ROW_BYTES, SegmentReader, write_segment
from logyard.engine.log.wal import WalConfig, WalItem
from logyard.engine.log.wal_files import wal_name
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.engine.raft.membership import Configuration
from logyard.engine.repair import scrub, scrub_walks
from logyard.engine.repair.scrub import (
    ASK_S,
    FIRST_S,
    GIVE_WAY_MAX_S,
    KINDS,
    LEADER_S,
    REPAIR_S,
    Findings,
    Repairs,
    Scrub,
)
from logyard.protocol.errors import Busy, Corrupt

from ..log.model import command, open_wal

UID = 7


def a_member(uid: int = UID, voters: tuple[int, ...] = (1, 2, 3), role: int = FOLLOWER) -> Any:
    """What the scrub sees of a member."""
    configuration = Configuration(voters)
    raft = SimpleNamespace(
        configuration=configuration, stopped=False, mend=None, role=role, log=SimpleNamespace(snapshot_index=0)
    )
    return SimpleNamespace(
        uid=uid, raft=raft, spec=SimpleNamespace(name=f"group-{uid}"), segments=[], snapshot_index=0, chunks={},
        liveness=SimpleNamespace(live_within=lambda first, end: [first], released_before=SimpleNamespace(index=1)),
    )  # fmt: skip


class Rig:
    """Node 1, with what repairs were asked for."""

    def __init__(self, *members: Any) -> None:
        self.members = {member.uid: member for member in members}
        self.asked: list[Any] = []
        self.lost: set[tuple[int, int, int]] = set()
        self.waiting: dict[int, int] = {}
        self.allowed = True
        self.renews = True
        self.findings = Findings(1 << 30, lambda: False)
        host = scrub.Host(
            self.members.get, lambda member, error: self.asked.append(("mend", member.uid)), self.renew,
            self.lose, lambda *one: one in self.lost,
        )  # fmt: skip
        turns: Any = self
        self.repairs = Repairs(1, self.members, self.findings, turns, host)

    async def renew(self, member: Any) -> bool:
        self.asked.append(("renew", member.uid))
        return self.renews

    def lose(self, *lost: int) -> None:
        self.asked.append(("lose", *lost))
        self.lost.add(lost)  # type: ignore[arg-type]

    async def may_begin(self, member: Any, first: int) -> bool:
        self.asked.append(("may", member.uid, first))
        return self.allowed

    def named(self) -> list[tuple[str, str, bool]]:
        return [(one.kind, one.group, one.is_repaired()) for one in self.findings.named]


# The pass


class Books:
    """A meta store of one row."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes | None] = {}
        self.meta: Any = SimpleNamespace(get=self.rows.get)

    async def commit(self, build: Callable[[], Iterable[Any]]) -> None:
        self.rows.update(build())


@asynccontextmanager
async def scrubbing(rig: Rig, books: Books, every_s: float = 0, **walks: Any) -> AsyncIterator[tuple[Scrub, list[str]]]:
    """A scrub that runs, and the kinds that were walked over; `walks` of a kind are done instead."""
    walked: list[str] = []

    def walk(kind: str) -> Callable[[], Any]:
        async def run() -> None:
            walked.append(kind)
            await rig.findings.read(kind, 10)
            if kind in walks:
                walks[kind]()

        return run

    named = {kind: walk(kind) for kind in KINDS}
    found = Scrub(
        every_s, lambda: int(trio.current_time() * 1e9), books, rig.findings, rig.repairs, named,
        lambda: rig.asked.append("look"),
    )  # fmt: skip
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.run)
        yield found, walked
        nursery.cancel_scope.cancel()


async def test_a_pass_walks_over_each_kind_and_only_when_asked_if_it_is_off(
    autojump_clock: trio.testing.MockClock,
) -> None:
    books = Books()
    async with scrubbing(Rig(), books) as (found, walked):
        await trio.sleep(1e6)
        assert not walked
        assert found.ask() == found.ask() == 1
        await trio.sleep(1)
        status = found.status()
        assert walked == list(KINDS) and found.passes == 1 and status["running"] == ""
        assert status["pass_bytes"] == 60 and status["kinds"]["wal"] == {"bytes": 10, "found": 0, "repaired": 0}
        assert msgpack.unpackb(books.rows[meta_rows.SCRUB] or b"") == found.finished_ms > 0


async def test_who_asks_during_a_pass_gets_the_next_one(autojump_clock: trio.testing.MockClock) -> None:
    wanted: list[int] = []

    def ask() -> None:
        if not wanted:
            wanted.append(one[0].ask())

    one: list[Scrub] = []
    async with scrubbing(Rig(), Books(), wal=ask) as (found, walked):
        one.append(found)
        found.ask()
        await trio.sleep(1)
        assert wanted == [2] == [found.passes] and walked == [*KINDS, *KINDS]


async def test_passes_are_so_long_apart_across_starts(autojump_clock: trio.testing.MockClock) -> None:
    books = Books()
    async with scrubbing(Rig(), books, 100) as (found, _):
        await trio.sleep(99)
        assert found.status()["passes"] == 0
        await trio.sleep(2)
        assert found.passes == 1
    await trio.sleep(40)
    async with scrubbing(Rig(), books, 100) as (found, _):
        await trio.sleep(58)
        assert found.finished_ms and found.status()["passes"] == 0
        await trio.sleep(3)
        assert found.passes == 1


async def test_a_pass_that_ended_in_the_future_puts_nothing_off(autojump_clock: trio.testing.MockClock) -> None:
    """By a wall clock that was ahead: each start began to wait for the whole time again."""
    books = Books()
    books.rows[meta_rows.SCRUB] = msgpack.packb(365 * 86_400_000)
    async with scrubbing(Rig(), books, 7 * 86_400) as (found, _):
        await trio.sleep(FIRST_S - 1)
        assert found.status()["passes"] == 0
        await trio.sleep(2)
        assert found.passes == 1
        assert found.finished_ms < 365 * 86_400_000


async def test_a_walk_that_fails_ends_the_pass_and_is_tried_again(autojump_clock: trio.testing.MockClock) -> None:
    def fail() -> None:
        if len(walked) < len(KINDS):
            raise ZeroDivisionError("nonsense in a file")

    books = Books()
    async with scrubbing(Rig(), books, 10_000, segment=fail) as (found, walked):
        found.ask()
        await trio.sleep(1)
        assert found.error == "ZeroDivisionError: nonsense in a file" and found.passes == 1 and not books.rows
        await trio.sleep(scrub.RETRY_S + 1)
        assert not found.error and found.passes == 2 and walked == [*KINDS[:3], *KINDS]


async def test_a_pass_waits_for_what_it_found_but_not_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(a_member())
    lost = UID, 5, 6

    def find() -> None:
        rig.repairs.lose("wal", UID, [5, 6], "in WAL file 3")
        rig.findings.add("wal", "", "nobody repairs this", scrub.never)

    async with scrubbing(rig, Books(), wal=find) as (found, _):
        found.ask()
        await trio.sleep(REPAIR_S / 2)
        assert found.status()["running"] == "repair" and "look" in rig.asked
        rig.lost.discard(lost)
        await trio.sleep(1)
        status = found.status()
        assert not status["running"] and status["left"] == 1
        assert status["last"]["wal"] == {"bytes": 10, "found": 2, "repaired": 1}
        # It comes to nothing the next time: given up, and still there to be seen.
        found.ask()
        await trio.sleep(REPAIR_S + 1)
        assert not found.status()["running"] and found.status()["left"] == 2


async def test_the_rate_and_giving_way(autojump_clock: trio.testing.MockClock) -> None:
    """A second for each second's bytes; longer while the node is busy, and not for ever."""
    busy = False
    findings = Findings(1000, lambda: busy)
    began = trio.current_time()
    for _ in range(5):
        await findings.read("wal", 200)
    assert trio.current_time() - began == pytest.approx(1.0)
    busy = True
    await findings.read("wal", 1000)
    assert trio.current_time() - began == pytest.approx(2 + GIVE_WAY_MAX_S, abs=0.5)
    assert findings.counts["wal"]["bytes"] == 2000


# Who repairs


def test_lost_payloads_come_back_stretch_by_stretch_and_only_those_that_live() -> None:
    member = a_member()
    member.liveness.live_within = lambda first, end: [first] if first[0] != 4 else []
    rig = Rig(member, a_member(8, (1,)))
    rig.repairs.lose("wal", UID, [2, 3, 4, 5, 9], "in WAL file 3")
    assert rig.asked == [("lose", UID, 2, 3), ("lose", UID, 5, 5), ("lose", UID, 9, 9)]
    rig.lost.discard((UID, 5, 5))
    assert [one.is_repaired() for one in rig.findings.named] == [False, True, False]
    rig.repairs.lose("wal", 8, [1], "in WAL file 3")
    rig.repairs.lose("wal", 99, [1], "in WAL file 3")
    assert rig.findings.named[3].is_repaired is scrub.never and len(rig.findings.named) == 4 and len(rig.asked) == 3


async def test_a_snapshot_is_written_anew_or_its_group_mended() -> None:
    rig = Rig(member := a_member())
    await rig.repairs.renew("snapshot", member, Corrupt("snapshot", 0, "it", "another"))
    assert rig.named() == [("snapshot", "group-7", True)] and not rig.waiting
    rig.renews = False
    await rig.repairs.renew("snapshot", member, Corrupt("snapshot", 0, "it", "another"))
    assert rig.named()[1:] == [("snapshot", "group-7", False)] and rig.waiting == {UID: 0}


async def test_a_group_is_mended_when_it_is_its_turn(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(member := a_member())
    rig.allowed = False
    rig.repairs.mend("segment", member, Corrupt("one", 0, "it", "another"), 5, 9)
    rig.repairs.mend("segment", member, Corrupt("two", 0, "it", "another"), 3, 4)
    assert rig.waiting == {UID: 9}
    await rig.repairs.look()
    await rig.repairs.look()
    assert rig.asked == [("may", UID, 3)]
    rig.allowed = True
    await trio.sleep(ASK_S)
    await rig.repairs.look()
    assert rig.asked[1:] == [("may", UID, 3), ("mend", UID)] and not rig.waiting
    await rig.repairs.look()
    assert len(rig.asked) == 3 and not any(one.is_repaired() for one in rig.findings.named)
    rig.members[UID] = mending = a_member()
    mending.raft.mend = object()
    assert not rig.findings.named[0].is_repaired()
    mending.raft.mend = None
    assert all(one.is_repaired() for one in rig.findings.named)


async def test_a_damaged_leader_waits_for_followers_that_lack_more(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(member := a_member(role=LEADER))
    rig.repairs.mend("segment", member, Corrupt("one", 0, "it", "another"), 5, 9)
    await rig.repairs.look()
    assert not rig.asked and rig.waiting
    await trio.sleep(LEADER_S)
    await rig.repairs.look()
    assert rig.asked == [("may", UID, 5), ("mend", UID)]


async def test_who_is_mended_or_gone_already_waits_for_no_turn(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(member := a_member(), other := a_member(8))
    for one in (member, other):
        rig.repairs.mend("segment", one, Corrupt("one", 0, "it", "another"), 5, 9)
    del rig.members[8]
    member.raft.mend = object()
    await rig.repairs.look()
    assert not rig.asked and not rig.waiting
    rig.repairs.mend("segment", other, Corrupt("one", 0, "it", "another"), 5, 9)
    assert len(rig.findings.named) == 2, "a replica that went is nobody's to mend"


async def test_the_only_copy_is_for_people_to_judge() -> None:
    rig = Rig(member := a_member(voters=(1,)))
    rig.repairs.mend("segment", member, OSError("rot"), 5, 9)
    await rig.repairs.look()
    assert rig.asked == [("mend", UID)] and rig.findings.named[0].is_repaired is scrub.never


# The walks


class Segments:
    """Segment 5, needed by `users`."""

    def __init__(self, path: Path, users: set[int]) -> None:
        self.users: dict[int, set[int]] = {5: users}
        self.renewed: list[int] = []
        self.dropped: list[SegmentRun] = []
        self.in_rings: set[tuple[int, int]] = set()
        self.known: SegmentReader | None = None
        self._path = path

    def path(self, number: int) -> Path:
        return self._path / f"{number}.seg"

    def opened(self, number: int) -> SegmentReader | None:
        return self.known

    def renew(self, number: int) -> None:
        self.renewed.append(number)

    def in_ring(self, uid: int, index: int) -> bool:
        return (uid, index) in self.in_rings

    def drop_below(self, member: Any, run: SegmentRun, base: int) -> None:
        self.dropped.append(run)


def damaged_rows(path: Path, *numbers: int) -> None:
    """Turn one byte of these rows of a segment's index."""
    image = bytearray(path.read_bytes())
    reader = SegmentReader(Disk(), str(path), 5)
    start = reader._index
    reader.close()
    for number in numbers:
        image[start + number * ROW_BYTES + 8] ^= 1
    path.write_bytes(image)


async def segment_pass(rig: Rig, segments: Segments, files: Any = None) -> list[Any]:
    recounted: list[Any] = []
    walk = scrub_walks.SegmentWalk(
        Disk(), segments, files or {}, rig.members, trio.Lock(), lambda member: recounted.append(member.uid),
        rig.findings.read, rig.repairs,
    )  # fmt: skip
    await walk.run()
    return recounted


def stored(tmp_path: Path) -> tuple[Rig, Segments, Any]:
    """A group with entries 1 to 9 in segment 5."""
    rig = Rig(member := a_member())
    segments = Segments(tmp_path, {UID})
    write_segment(Disk(), str(segments.path(5)), 5, [(UID, command(UID, index)) for index in range(1, 10)])
    member.segments = [SegmentRun(1, 9, 5)]
    return rig, segments, member


async def test_a_sound_segment_is_read_and_one_that_nobody_needs_is_not(tmp_path: Path) -> None:
    rig, segments, _ = stored(tmp_path)
    await segment_pass(rig, segments)
    size = segments.path(5).stat().st_size
    assert not rig.findings.named and rig.findings.counts["segment"]["bytes"] == size
    segments.users = {}
    segments.path(5).unlink()
    await segment_pass(rig, segments)
    assert not rig.findings.named and rig.findings.counts["segment"]["bytes"] == size


async def test_a_pass_leaves_no_descriptor(tmp_path: Path) -> None:
    rig, segments, _ = stored(tmp_path)
    await segment_pass(rig, segments)
    before = len(os.listdir("/proc/self/fd"))
    await segment_pass(rig, segments)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_segment_is_written_anew_from_a_reader_that_knows_it(tmp_path: Path) -> None:
    rig, segments, _ = stored(tmp_path)
    good = segments.path(5).read_bytes()
    segments.known = SegmentReader(Disk(), str(segments.path(5)), 5)
    segments.path(5).unlink()
    await segment_pass(rig, segments)
    segments.known.close()
    assert segments.path(5).read_bytes() == good and segments.renewed == [5]
    assert rig.named() == [("segment", "", True)]


async def test_a_damaged_row_has_its_group_mended_from_there(tmp_path: Path) -> None:
    rig, segments, _ = stored(tmp_path)
    damaged_rows(segments.path(5), 3, 5)
    assert not await segment_pass(rig, segments)
    await rig.repairs.look()
    assert rig.asked == [("may", UID, 4), ("mend", UID)] and rig.named() == [("segment", "group-7", False)]


@pytest.mark.parametrize("lives", [True, False])
async def test_damage_below_the_log_costs_places_and_no_mending(tmp_path: Path, lives: bool) -> None:
    rig, segments, member = stored(tmp_path)
    damaged_rows(segments.path(5), 3)
    member.raft.log.snapshot_index = member.snapshot_index = 6
    files = {5: SimpleNamespace(file=5, shares={UID: SimpleNamespace(first=1, last=9)} if lives else {})}
    recounted = await segment_pass(rig, segments, files)
    assert not rig.asked
    if lives:
        assert recounted == [UID] and not segments.dropped
        rig.lost.add((UID, 1, 6))
        assert rig.named() == [("segment", "group-7", False)]
    else:
        assert segments.dropped == member.segments and not recounted and rig.named() == [("segment", "group-7", True)]


async def test_a_segment_that_is_gone_is_lost_as_a_whole(tmp_path: Path) -> None:
    rig, segments, _ = stored(tmp_path)
    segments.path(5).unlink()
    await segment_pass(rig, segments)
    assert rig.waiting == {UID: 9} and "it is gone" in rig.findings.named[0].text


async def wal_pass(tmp_path: Path, spoil: Callable[[Path, Any], object], moved: bool = False) -> Rig:
    """A sealed file of WAL entries 1 to 3 with 5,000 bytes of payload each."""
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path / "wal"), WalConfig(file_bytes=256 * 1024))
    entries = [command(UID, index, bodies=[bytes([index]) * 5000]) for index in (1, 2, 3)]
    wal.write([WalItem(UID, entries)])
    sealed = wal.roll()
    assert sealed is not None
    wal.close()
    segments = Segments(tmp_path, {UID})
    write_segment(disk, str(segments.path(sealed.file)), sealed.file, sealed.entries)
    rig = Rig(a_member())
    path = tmp_path / "wal" / wal_name(sealed.file)
    spoil(path, sealed.entries[1][1])
    files: Any = {
        sealed.file: SimpleNamespace(file=sealed.file, shares={UID: SimpleNamespace(first=1, last=3)}),
    }
    walk = scrub_walks.WalWalk(
        disk, tmp_path / "wal", segments.path, files, rig.members, lambda uid, index: moved, rig.findings.read,
        rig.repairs,
    )  # fmt: skip
    await walk.run()
    return rig


def turn(path: Path, entry: Any) -> None:
    image = bytearray(path.read_bytes())
    image[entry.offset + 100] ^= 1
    path.write_bytes(image)


async def test_payloads_of_a_sealed_file_are_verified(tmp_path: Path) -> None:
    rig = await wal_pass(tmp_path, lambda path, entry: None)
    assert not rig.findings.named and rig.findings.counts["wal"]["bytes"] >= 15_000


async def test_a_damaged_payload_of_a_sealed_file_is_lost_unless_it_moved(tmp_path: Path) -> None:
    for name, moved in (("a", False), ("b", True)):
        (tmp_path / name).mkdir()
        rig = await wal_pass(tmp_path / name, turn, moved)
        assert rig.asked == ([] if moved else [("lose", UID, 2, 2)])


async def test_a_sealed_file_that_went_is_no_damage(tmp_path: Path) -> None:
    assert not (await wal_pass(tmp_path, lambda path, _: path.unlink())).findings.named


class Generations:
    """Generation 4, with entries of groups 7 and 8; `says` is what its verification finds."""

    def __init__(self, path: Path, says: tuple[list[tuple[int, int]], str]) -> None:
        self.path = path
        self.path.write_bytes(bytes(3 << 20))
        self.says = says
        self.failed: list[Any] = []
        self.verified: Callable[[], object] = lambda: None
        self.there = [SimpleNamespace(id=4)]

    def generations(self) -> list[Any]:
        return self.there

    def data_file(self, number: int) -> str:
        return str(self.path)

    def bodies_file(self, number: int) -> str:
        return str(self.path.with_name("bodies"))

    async def verify(self, number: int) -> tuple[list[tuple[int, int]], str]:
        self.verified()
        return self.says

    def at_home(self, number: int) -> list[tuple[int, int, int]]:
        return [(7, 1, 9), (8, 2, 4)]

    def fail(self, number: int, reason: str) -> None:
        self.failed.append((number, reason))


async def generation_pass(rig: Rig, store: Any, disk: Disk | None = None) -> list[str]:
    owed: list[str] = []
    books: Any = SimpleNamespace(owe_store=lambda: owed.append("owed"))
    groups = scrub_walks.Groups(rig.members, rig.members.get, lambda uid: None)
    await scrub_walks.GenerationWalk(disk or Disk(), store, books, groups, rig.findings.read, rig.repairs).run()
    return owed


async def test_damaged_entries_of_a_generation_come_from_peers(tmp_path: Path) -> None:
    rig = Rig(a_member(), a_member(8))
    store = Generations(tmp_path / "data", ([(7, 3), (8, 2), (7, 4)], ""))
    assert not await generation_pass(rig, store)
    assert rig.asked == [("lose", 7, 3, 4), ("lose", 8, 2, 2)] and not store.failed
    assert rig.findings.counts["generation"]["bytes"] == 3 << 20


class Reading(Disk):
    """Notes what is forgotten and read of a file of large bodies, whose second MiB can't be read."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[str, int]] = []

    def _is_bodies(self, fd: int) -> bool:
        return os.readlink(f"/proc/self/fd/{fd}").endswith("bodies")

    def forget_pages(self, fd: int, offset: int, length: int) -> None:
        super().forget_pages(fd, offset, length)
        if self._is_bodies(fd):
            assert length == 1 << 20
            self.done.append(("forget", offset))

    def read(self, fd: int, length: int, offset: int) -> bytes:
        if self._is_bodies(fd):
            self.done.append(("read", offset))
            if offset == 1 << 20:
                raise OSError(errno.EIO, "a block can't be read")
        return super().read(fd, length, offset)


async def test_large_bodies_are_read_from_the_disk_before_they_are_verified(tmp_path: Path) -> None:
    rig, disk = Rig(a_member()), Reading()
    store = Generations(tmp_path / "data", ([(7, 3)], ""))
    (tmp_path / "bodies").write_bytes(bytes((2 << 20) + 5))
    store.verified = lambda: disk.done.append(("verify", 0))
    assert not await generation_pass(rig, store, disk)
    each = [(what, at << 20) for at in range(3) for what in ("forget", "read")]
    assert disk.done == [*each, ("verify", 0)]
    assert not store.failed and rig.asked == [("lose", 7, 3, 3)], "what can't be read is damage of its entry alone"
    assert rig.findings.counts["generation"]["bytes"] == (3 << 20) + (1 << 20) + 5


async def test_a_generation_of_which_nothing_can_be_trusted_is_failed(tmp_path: Path) -> None:
    rig = Rig(a_member(), a_member(8))
    store = Generations(tmp_path / "data", ([], "its tree is damaged"))
    assert await generation_pass(rig, store) == ["owed"] and store.failed == [(4, "its tree is damaged")]
    rig.lost.add((8, 2, 4))
    assert rig.named() == [("generation", "", False)]
    rig.lost.clear()
    assert rig.named() == [("generation", "", True)]


async def test_a_generation_with_an_only_copy_is_kept(tmp_path: Path) -> None:
    rig = Rig(a_member(), a_member(8, (1,)))
    store = Generations(tmp_path / "data", ([], "its tree is damaged"))
    assert not await generation_pass(rig, store) and not store.failed
    assert "no other node has group-8" in rig.findings.named[0].text


async def test_a_generation_that_went_meanwhile_is_no_damage(tmp_path: Path) -> None:
    rig = Rig(a_member())
    store = Generations(tmp_path / "data", ([], "it is not there"))
    store.generations = lambda: store.there.pop() and [SimpleNamespace(id=4)] if store.there else []  # type: ignore
    await generation_pass(rig, store)
    store = Generations(tmp_path / "data", ([], ""))
    store.path.unlink()
    await generation_pass(rig, store)
    assert not rig.findings.named and not store.failed


class Meta:
    """Two copies of some rows: `mended` and `lost` are what verifying finds."""

    def __init__(self, *files: str) -> None:
        self.mended: list[tuple[bytes, str]] = []
        self.lost: list[bytes] = []
        self.steps = [b"", b"half"]
        self._files = files

    def files(self) -> tuple[str, ...]:
        return self._files

    def verify(self, start: bytes, count: int) -> Any:
        assert start == self.steps.pop(0)
        last = not self.steps
        return SimpleNamespace(
            mended=self.mended if last else [], lost=self.lost if last else [], size=100,
            next=None if last else self.steps[0],
        )  # fmt: skip


async def meta_pass(rig: Rig, meta: Meta) -> list[Any]:
    books = Books()
    books.meta = meta
    spec: Any = lambda uid: rig.members[uid].spec if uid in rig.members else None  # noqa: E731
    groups = scrub_walks.Groups(rig.members, rig.members.get, spec)
    walk: Any = scrub_walks.MetaWalk(Disk(), books, groups, rig.findings.read, rig.repairs)  # type: ignore[arg-type]
    await walk.run()
    return list(books.rows)


async def test_rows_that_one_copy_lost_are_whole_again(tmp_path: Path) -> None:
    rig, meta = Rig(a_member()), Meta(str(tmp_path / "gone"))
    meta.mended = [(meta_rows.state_key(UID), "a"), (b"f", "b")]
    assert not await meta_pass(rig, meta)
    assert rig.named() == [("meta", "group-7", True), ("meta", "", True)]
    assert rig.findings.counts["meta"]["bytes"] == 200


async def test_a_lost_row_is_written_by_who_knows_it_or_is_for_people(tmp_path: Path) -> None:
    rig, meta = Rig(member := a_member()), Meta()
    member.is_gone = member.damaged = False
    member.spec = SimpleNamespace(
        uid=UID, name="group-7", machine="log", arguments={}, voters=(1, 2, 3), created=5
    )  # fmt: skip
    meta.lost = [meta_rows.group_key(UID), meta_rows.snapshot_key(UID), meta_rows.state_key(99), b"f"]
    assert await meta_pass(rig, meta) == [meta_rows.group_key(UID)]
    assert rig.asked == [("renew", UID)]
    assert rig.named() == [
        ("meta", "group-7", True), ("meta", "group-7", True), ("meta", "", False), ("meta", "", False),
    ]  # fmt: skip


class Snapshots(Books):
    """One group's snapshot row, which can't be loaded while `index` stands."""

    def __init__(self, bad: int, *indexes: int) -> None:
        super().__init__()
        self.bad = bad
        self.indexes = [*indexes]
        self.meta = SimpleNamespace(keys=lambda prefix: [meta_rows.snapshot_key(UID)], get=self.get)

    def get(self, key: bytes) -> bytes:
        index = self.indexes.pop(0) if len(self.indexes) > 1 else self.indexes[0]
        value = meta_rows.SnapshotRow(UID, index, 1, b"12345").put()[1]
        assert value is not None
        return value

    def load_snapshot(self, row: meta_rows.SnapshotRow) -> Any:
        if row.index == self.bad:
            raise Corrupt("a chunk", 0, "it", "none")
        return SimpleNamespace(sections={"one": b"123"})

    def owe_store(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("books", "bad"), [(Snapshots(0, 5), False), (Snapshots(5, 5), True), (Snapshots(5, 5, 6), False)]
)
async def test_a_snapshot_that_can_not_be_loaded_is_renewed_unless_a_newer_one_came(
    books: Snapshots, bad: bool
) -> None:
    rig = Rig(a_member())
    groups = scrub_walks.Groups(rig.members, rig.members.get, lambda uid: None)
    await scrub_walks.SnapshotWalk(books, groups, rig.findings.read, rig.repairs).run()
    assert rig.asked == ([("renew", UID)] if bad else [])
    assert rig.findings.counts["snapshot"]["bytes"] == (5 if bad else 8)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EIO], ids=["memory", "damage"])
async def test_a_want_of_memory_loses_no_segment(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, segments, _ = stored(tmp_path)

    def read(self: Disk, fd: int, length: int, offset: int) -> bytes:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Disk, "read", read)
    if code == errno.ENOMEM:
        with pytest.raises(Busy):
            await segment_pass(rig, segments)
        assert not rig.findings.named and not rig.waiting
    else:
        await segment_pass(rig, segments)
        assert rig.findings.named

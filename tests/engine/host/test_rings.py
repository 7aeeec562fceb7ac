"""Rings of system groups in running nodes: written, wrapped, overwritten, damaged, mended, and what stands in their
place where there is none (docs/decisions/0042)."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import trio

from logyard.engine.disk.door import Disk
from logyard.engine.disk.faulty import FaultyDisk
from logyard.engine.entry import Entry
from logyard.engine.log import ring
from logyard.engine.log.meta_rows import RingRun
from logyard.engine.log.record import BLOCK
from logyard.engine.log.ring import RingReader
from logyard.engine.log.ring_files import RingFiles
from logyard.engine.replica.member import STOPPED
from logyard.engine.replica.ring_room import RING
from logyard.protocol.errors import Busy, Corrupt, NoSpace, WrongIdentity
from logyard.service.check.process import inspect
from logyard.service.writer.process import COMMAND
from tests.notes import KIND, NAME, SLOTS, machines

from ..repair.test_scrub import scrubbed
from .cluster import KIB, Cluster, cluster, open_descriptors, until
from .full_disk import QuotaDisk
from .rings import note, note_once, noted, notes, ring_of, ring_path, said
from .test_full_disk import ready, room
from .test_mending import mended


async def filled(c: Cluster, first: int = 1, last: int = 8) -> None:
    """Notes that node 1 leads to all, in the rings of all."""
    await c.lead(1, NAME)
    await note(c, 1, *said(first, last))
    await c.applied(NAME)
    for number in c.ids:
        await until(lambda number=number: c.member(number, NAME).raft.log.stable == c.member(1, NAME).raft.applied)
        await c.roll(number)


def spoil(path: Path, offset: int, data: bytes = b"\xff" * 16) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def body_at(c: Cluster, number: int, index: int) -> tuple[Path, int]:
    """Where a node's ring has the metadata of an entry."""
    reader = ring_of(c, number)
    return Path(reader.path), reader.geometry.slot_at(index)


def inside(member: object) -> list[int]:
    """What the ring of a member has of its log."""
    runs: list[RingRun] = member.ring_runs  # type: ignore[attr-defined]
    return [index for run in runs for index in range(run.first, run.last + 1)]


@pytest.mark.parametrize("writer", [(), COMMAND], ids=["thread", "process"])
async def test_the_log_lies_in_the_ring_and_is_read_from_there(tmp_path: Path, writer: Sequence[str]) -> None:
    async with noted(tmp_path, writer=writer) as c:
        await filled(c)
        for number in c.ids:
            member = c.member(number, NAME)
            assert not member.segments and inside(member) == list(range(1, member.flushed + 1))
            assert member.raft.log.memory_first > member.flushed, "it left memory"
            if writer:
                node_writer = c.system(number).writer
                assert node_writer is not None and node_writer.status()["jobs"]
        await note(c, 1, *said(9, 10))
        await c.applied(NAME)
        await c.close()
        for number in c.ids:
            await c.start(number)
        await c.applied(NAME)
        assert all(notes(c, number) == said(1, 10) for number in c.ids)
        assert c.nodes[1].describe(NAME)["ring"][0]["first"] == 1
        assert c.system(1).storage.rings.status()["files"] == 1


async def test_a_laggard_is_fed_from_the_ring(tmp_path: Path) -> None:
    """Without payloads, which are released: as tombstones."""
    async with noted(tmp_path) as c:
        await filled(c, last=2)
        await c.crash(3)
        await c.lead(1, NAME)
        await note(c, 1, *said(3, 8))
        await c.applied(NAME, [1, 2])
        await c.roll(1)
        assert c.member(1, NAME).raft.log.memory_first > c.member(1, NAME).flushed
        await c.start(3)
        await c.applied(NAME)
        assert notes(c, 3) == said(1, 8)
        assert c.member(3, NAME).floor, "law 4: bytes that it never got"


async def test_a_ring_wraps_for_ever_and_a_restart_finds_all(tmp_path: Path) -> None:
    async with noted(tmp_path, 1, ring_slots=SLOTS) as c:
        for first in range(1, 200, 10):
            await note(c, 1, *said(first, first + 9))
            await c.roll(1)
            member = c.member(1, NAME)
            assert len(inside(member)) <= SLOTS and not member.segments
        assert notes(c, 1) == said(1, 200) and c.system(1).storage.rings.refused == 0
        await c.restart(1)
        await c.applied(NAME)
        assert notes(c, 1) == said(1, 200)
        assert os.path.getsize(ring_of(c, 1).path) == ring_of(c, 1).geometry.size


async def test_a_snapshot_is_asked_for_before_the_ring_wraps_and_commands_wait_for_it(tmp_path: Path) -> None:
    async with noted(tmp_path, 1, ring_slots=SLOTS) as c:
        member, janitor = c.member(1, NAME), c.system(1).storage.janitor
        async with janitor.lock:
            # Nobody takes a snapshot now.
            taken = 0
            with pytest.raises(Busy, match=RING) as refused:
                while taken < 2 * SLOTS:
                    await note_once(c, 1, b"note %d" % (taken + 1))
                    taken += 1
            assert refused.value.retry_after and taken < SLOTS and member.raft.log.last_index < SLOTS
            assert c.system(1).counters.busy[RING] == 1
            await note_once(c, 1, b"frees space", reserved=True)
            assert not member.snapshot_index
        # It was asked for when half of the ring was used: the janitor only waited.
        await until(lambda: member.compactable >= SLOTS // 2, "a snapshot")
        await note(c, 1, b"goes on")
        assert notes(c, 1)[-2:] == [b"frees space", b"goes on"]


@pytest.mark.long
async def test_half_a_ring_is_enough_for_a_snapshot(tmp_path: Path) -> None:
    async with noted(tmp_path, 3, ring_slots=SLOTS) as c:
        await c.lead(1, NAME)
        await note(c, 1, *said(1, SLOTS // 2))
        for number in c.ids:
            await until(lambda number=number: c.member(number, NAME).compactable, f"a snapshot on {number}")


async def test_what_a_ring_has_no_room_for_lies_in_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower can't refuse; nor does the shared log wait for one group."""
    async with noted(tmp_path, 1, ring_slots=SLOTS) as c:
        member, janitor = c.member(1, NAME), c.system(1).storage.janitor
        monkeypatch.setattr(type(c.config), "ring_entries_max", property(lambda config: 1 << 30))
        async with janitor.lock:
            room = member.proposals.admission
            monkeypatch.setattr(type(room), "admit", lambda self, *rest: self._admission.admit(*rest))
            await note(c, 1, *said(1, 12))
            await janitor.roll()
            await note(c, 1, *said(13, 30))
            await janitor.roll()
            before = inside(member)
            assert member.segments and not member.compactable and c.system(1).storage.rings.refused
            assert before == sorted(set(before)) and len({index % SLOTS for index in before}) == len(before)
        await c.restart(1)
        await c.applied(NAME)
        assert notes(c, 1) == said(1, 30)


async def died_behind_the_slots(c: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and segment of the newest file are durable, and the power goes before the commit that names them."""

    async def gone(*_: object, **__: object) -> None:
        raise NoSpace("the power is gone")

    batch = c.system(1).storage.meta_batch
    with monkeypatch.context() as dying:
        # Who frees slots stores that through another name.
        dying.setattr(batch, "commit_members", gone)
        with pytest.raises(NoSpace):
            await c.roll(1)
        await c.crash(1)


def complaints(path: Path) -> list[str]:
    """What the offline check says of node 1."""
    found = inspect(path / "node-1", frozenset(), lambda line: None, machines)["findings"]
    return [one["message"] for one in found if one["severity"] in ("damage", "unknown")]


async def test_a_crash_behind_the_slots_leaves_all_that_a_row_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest entries take slots of what a snapshot covers, as soon as no row names those."""
    async with noted(tmp_path, 1, ring_slots=SLOTS) as c:
        await note(c, 1, *said(1, 9))
        await c.roll(1)
        member = c.member(1, NAME)
        await c.nodes[1].snapshot()
        assert member.raft.log.snapshot_index == member.flushed, "the snapshot lets the log go"
        assert member.ring and not member.ring_runs, "of which no row says anything yet"
        await note(c, 1, *said(10, 19))
        await died_behind_the_slots(c, monkeypatch)
        assert not complaints(tmp_path)
        await c.start(1)
        await c.applied(NAME)
        assert notes(c, 1) == said(1, 19)
        await c.roll(1)
        await c.restart(1)
        await c.applied(NAME)
        assert notes(c, 1) == said(1, 19)


async def test_a_row_that_was_not_stored_is_stored_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was is not known: what the slots have stays, and nothing is written once more."""
    async with noted(tmp_path, 1) as c:
        await note(c, 1, *said(1, 4))

        async def full(*_: object, **__: object) -> None:
            raise NoSpace("no room for a row")

        with monkeypatch.context() as once:
            once.setattr(c.system(1).storage.meta_batch, "commit_members", full)
            with pytest.raises(NoSpace):
                await c.roll(1)
        await note(c, 1, *said(5, 6))
        await c.roll(1)
        assert not c.member(1, NAME).segments and inside(c.member(1, NAME)) == list(range(1, 8))
        await c.restart(1)
        await c.applied(NAME)
        assert notes(c, 1) == said(1, 6) and not c.member(1, NAME).damaged


async def test_a_floor_is_stored_before_payloads_go(tmp_path: Path) -> None:
    """Law 4: the ring has none of those that are released, and the WAL file that had them goes."""
    async with noted(tmp_path, 1) as c:
        await note(c, 1, *said(1, 4))
        member = c.member(1, NAME)
        assert not member.floor and member.last_release
        await c.roll(1)
        assert not c.system(1).storage.location.files, "nothing lives in the file"
        last = member.last_release
        await c.crash(1)
        system = c.build(1)
        await system.open()
        assert system.members[member.uid].floor == last
        system.close()


async def test_a_crash_behind_slots_of_an_overwritten_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row names the old tail, the WAL has the new one."""
    async with noted(tmp_path) as c:
        await filled(c, last=4)
        old, first = c.member(1, NAME), c.member(1, NAME).raft.log.last_index + 1
        c.partition(1)
        for number in range(4):
            c.system(1).replicas.commands.queue_own(old, f"never {number}")
            await until(lambda number=number: old.raft.log.stable == first + number, "it has it on disk")
        await c.roll(1)
        await note(c, await c.leader(NAME, [2, 3]), b"other")
        c.network.heal()
        await c.applied(NAME)
        await until(lambda: old.raft.log.stable == old.raft.log.last_index, "so is what took their place")
        assert old.raft.log.last_index < first + 3
        await died_behind_the_slots(c, monkeypatch)
        assert not complaints(tmp_path)
        await c.start(1)
        await c.applied(NAME)
        assert notes(c, 1) == [*said(1, 4), b"other"] and c.member(1, NAME).raft.mend is None


@pytest.mark.parametrize("hurt", ["gone", "no head", "slots"])
async def test_a_ring_of_which_the_wal_voids_all_is_needed_by_nobody(
    tmp_path: Path, hurt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row names the old tail alone: what is below it went with the snapshot."""
    async with noted(tmp_path) as c:
        await filled(c, last=4)
        await c.nodes[1].snapshot()
        old, first = c.member(1, NAME), c.member(1, NAME).raft.log.last_index + 1
        assert old.raft.log.snapshot_index == first - 1
        c.partition(1)
        for number in range(4):
            c.system(1).replicas.commands.queue_own(old, f"never {number}")
            await until(lambda number=number: old.raft.log.stable == first + number, "it has it on disk")
        await c.roll(1)
        assert old.ring == [RingRun(first, first + 3, old.raft.term)]
        await note(c, await c.leader(NAME, [2, 3]), b"other")
        c.network.heal()
        await c.applied(NAME)
        await until(lambda: old.raft.log.stable == old.raft.log.last_index, "so is what took their place")
        path, shape = ring_path(c, 1, old.uid), ring_of(c, 1).geometry
        await died_behind_the_slots(c, monkeypatch)
        if hurt == "gone":
            path.unlink()
        else:
            spoil(path, 0 if hurt == "no head" else shape.slot_at(first), bytes(2 * BLOCK))
        assert not complaints(tmp_path)
        await c.start(1)
        await c.applied(NAME)
        assert notes(c, 1) == [*said(1, 4), b"other"] and c.member(1, NAME).raft.mend is None
        await c.roll(1)
        await c.restart(1)
        await c.applied(NAME)
        assert notes(c, 1) == [*said(1, 4), b"other"] and c.member(1, NAME).raft.mend is None


async def test_a_command_above_the_slot_lies_in_a_shared_segment(tmp_path: Path) -> None:
    large = b"L" * (5 * 1024)
    async with noted(tmp_path) as c:
        await c.lead(1, NAME)
        await note(c, 1, *said(1, 3), large, *said(5, 6))
        await c.applied(NAME)
        for number in c.ids:
            await c.roll(number)
            member = c.member(number, NAME)
            (run,) = member.segments
            assert run.first == run.last and run.first not in inside(member)
            assert len(inside(member)) == member.flushed - 1
        await c.close()
        for number in c.ids:
            await c.start(number)
        await c.applied(NAME)
        assert all(notes(c, number) == [*said(1, 3), large, *said(5, 6)] for number in c.ids)
        for number in c.ids:
            await c.nodes[number].snapshot()
            await c.nodes[number].compact()
            await until(lambda number=number: not c.member(number, NAME).segments, "nothing needs the segment")
            assert not list((tmp_path / f"node-{number}" / "segments").glob("*.seg"))


async def test_an_overwritten_tail_is_junk_however_well_it_verifies(tmp_path: Path) -> None:
    async with noted(tmp_path) as c:
        await filled(c, last=4)
        old, first = c.member(1, NAME), c.member(1, NAME).raft.log.last_index + 1
        c.partition(1)
        # Without payload, so that they lie in the ring although they are not committed.
        for number in range(4):
            c.system(1).replicas.commands.queue_own(old, f"never {number}")
            await until(lambda number=number: old.raft.log.stable == first + number, "it has it on disk")
        await c.roll(1)
        last, term = old.raft.log.last_index, old.raft.term
        assert old.ring[-1] == RingRun(*old.ring[-1][:1], last, term) and last in inside(old)
        leader = await c.leader(NAME, [2, 3])
        await note(c, leader, b"other")
        c.network.heal()
        await c.applied(NAME)
        await c.roll(1)
        member = c.member(1, NAME)
        assert member.flushed < last and inside(member)[-1] == member.flushed
        stale = RingReader(Disk(), ring_of(c, 1).path, member.uid)
        assert stale.find(last, term).whole, "what was overwritten verifies as ever"
        stale.close()
        with pytest.raises(Corrupt, match="no segment that holds it"):
            c.system(1).replicas.reader.stored_entries(member, last, last)
        await c.restart(1)
        await c.applied(NAME)
        assert all(notes(c, number) == [*said(1, 4), b"other"] for number in c.ids)
        assert c.member(1, NAME).raft.log.last_index == c.member(2, NAME).raft.log.last_index


async def test_a_group_made_anew_has_a_ring_of_its_own(tmp_path: Path) -> None:
    async with noted(tmp_path, 1) as c:
        await filled(c)
        gone, path = c.member(1, NAME).uid, Path(ring_of(c, 1).path)
        old = path.read_bytes()
        await c.nodes[1].delete_group(NAME)
        await until(lambda: not path.exists(), "its ring goes with it")
        await c.create(NAME, machine=KIND)
        await note(c, 1, b"new")
        await c.roll(1)
        uid = c.member(1, NAME).uid
        assert uid != gone and not path.exists() and ring_path(c, 1, uid).exists()
        # What stood in the old one is junk in its place.
        await c.crash(1)
        image = bytearray(ring_path(c, 1, uid).read_bytes())
        image[4 * BLOCK :] = old[4 * BLOCK :]
        ring_path(c, 1, uid).write_bytes(image)
        path.write_bytes(old)
        await c.start(1)
        await until(lambda: c.member(1, NAME).state == STOPPED, "its entries are not there")
        assert notes(c, 1) == [] and not path.exists(), "and what is nobody's ring is removed"


def no_room(c: Cluster, number: int, index: int) -> None:
    """The body of an entry."""
    path, at = body_at(c, number, index)
    spoil(path, at)


def no_head(c: Cluster, number: int, index: int) -> None:
    path, _ = body_at(c, number, index)
    spoil(path, 0, bytes(2 * BLOCK))


def no_file(c: Cluster, number: int, index: int) -> None:
    path, _ = body_at(c, number, index)
    path.unlink()


def cut_file(c: Cluster, number: int, index: int) -> None:
    path, at = body_at(c, number, index)
    os.truncate(path, at)


HURTS = [no_room, no_head, no_file, cut_file]


@pytest.mark.parametrize("number", [1, 3], ids=["leader", "follower"])
@pytest.mark.parametrize("hurt", HURTS, ids=lambda hurt: hurt.__name__)
async def test_damage_that_a_start_meets_is_mended_by_the_others(tmp_path: Path, hurt: object, number: int) -> None:
    assert callable(hurt)
    async with noted(tmp_path) as c:
        await c.create("other")
        await filled(c)
        hurt(c, number, 4)
        await c.restart(number)
        await mended(c, number, NAME)
        await until(lambda: c.member(number, "other").raft.mend is None)
        assert all(notes(c, one) == said(1, 8) for one in c.ids)
        await c.lead(number, NAME)
        await note(c, number, b"again")
        await c.applied(NAME)
        await c.roll(number)
        assert c.member(number, NAME).ring_runs, "it has a ring again"
        await c.restart(number)
        await c.applied(NAME)
        assert notes(c, number) == [*said(1, 8), b"again"] and c.member(number, NAME).raft.mend is None


@pytest.mark.parametrize("hurt", HURTS, ids=lambda hurt: hurt.__name__)
async def test_damage_that_a_scrub_meets_is_mended_by_the_others(tmp_path: Path, hurt: object) -> None:
    assert callable(hurt)
    async with noted(tmp_path) as c:
        await filled(c)
        hurt(c, 3, 4)
        status = await scrubbed(c, 3)
        assert [(one["kind"], one["group"]) for one in status["findings"]] == [("ring", NAME)] and not status["left"]
        await mended(c, 3, NAME)
        await c.restart(3)
        await c.applied(NAME)
        assert notes(c, 3) == said(1, 8) and not (await scrubbed(c, 3))["findings"]


async def test_a_scrub_writes_torn_headers_and_a_head_anew(tmp_path: Path) -> None:
    async with noted(tmp_path) as c:
        await filled(c)
        reader = ring_of(c, 3)
        path, shape = Path(reader.path), reader.geometry
        good = path.read_bytes()
        member = c.member(3, NAME)
        spoil(path, shape.header_at(2))
        spoil(path, shape.copy_at(3))
        spoil(path, BLOCK)
        status = await scrubbed(c, 3)
        assert status["last"]["ring"]["found"] == status["last"]["ring"]["repaired"] == 1
        assert path.read_bytes() == good and c.member(3, NAME) is member, "nobody had to be asked"
        assert not (await scrubbed(c, 3))["findings"]
        # What no run names is nobody's, whatever it looks like.
        spoil(path, shape.slot_at(member.flushed + 2))
        assert not (await scrubbed(c, 3))["findings"]


@pytest.mark.parametrize("hurt", HURTS, ids=lambda hurt: hurt.__name__)
async def test_a_group_alone_stays_stopped_and_keeps_what_it_has(tmp_path: Path, hurt: object) -> None:
    assert callable(hurt)
    async with noted(tmp_path, 1) as c:
        await c.create("other")
        await filled(c)
        hurt(c, 1, 4)
        left = {path.name: path.read_bytes() for path in (tmp_path / "node-1" / "rings").iterdir()}
        for _ in range(2):
            await c.restart(1)
            member = c.member(1, NAME)
            await until(lambda member=member: member.state == STOPPED, "it stops")
            assert "ring" in member.reason
            await c.leader("other")
            await c.append(1, [(b"", b"goes on")], "other")
            await c.roll(1)
            assert {path.name: path.read_bytes() for path in (tmp_path / "node-1" / "rings").iterdir()} == left
        status = await scrubbed(c, 1)
        assert not status["findings"], "it is stopped, and said so"


async def test_a_scrub_stops_a_group_alone_by_its_name(tmp_path: Path) -> None:
    async with noted(tmp_path, 1) as c:
        await filled(c)
        no_room(c, 1, 4)
        status = await scrubbed(c, 1)
        assert status["left"] == 1 and status["findings"][0]["group"] == NAME
        assert c.member(1, NAME).state == STOPPED


class Short(FaultyDisk):
    """A process that has no descriptors for rings now and then."""

    __slots__ = ("short_of",)

    def __init__(self) -> None:
        super().__init__()
        self.short_of = ""

    def open_file(self, path: str, *, write: bool = False) -> int:
        if self.short_of and path.endswith(self.short_of):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().open_file(path, write=write)


async def test_a_want_of_descriptors_is_no_damage(tmp_path: Path) -> None:
    disk = Short()
    async with noted(tmp_path, 1, disks={1: disk}) as c:
        await filled(c, last=3)
        member, rings = c.member(1, NAME), c.system(1).storage.rings
        rings.close()
        disk.short_of = ".ring"
        with pytest.raises(Busy):
            c.system(1).replicas.reader.stored_entries(member, 1, 2)
        await note(c, 1, *said(4, 5))
        await c.roll(1)
        assert member.segments and member.state == "running", "what can't go there lies in a segment"
        disk.short_of = ""
        await note(c, 1, *said(6, 7))
        await c.roll(1)
        assert inside(member)[-1] == member.flushed
        await c.restart(1)
        await c.applied(NAME)
        assert notes(c, 1) == said(1, 7)


@pytest.mark.parametrize(
    "step", ["create", "preallocate", "write", "datasync", "sync_file", "rename", "sync_directory"]
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
async def test_a_ring_that_can_not_be_made_or_written_costs_nobody_else(tmp_path: Path, step: str, code: int) -> None:
    disk = RingFaults()
    async with noted(tmp_path, 1, disks={1: disk}) as c:
        await c.create("other")
        await note(c, 1, *said(1, 3))
        await c.append(1, [(b"", b"beside")], "other")
        disk.fail_ring(step, code)
        await c.roll(1)
        member = c.member(1, NAME)
        assert not disk.plan and member.segments and not member.ring_runs
        assert c.member(1, "other").segments and not c.failures
        await note(c, 1, *said(4, 5))
        await c.roll(1)
        assert inside(member) and inside(member)[-1] == member.flushed, "the next time it is made, and written"
        assert disk.renamed == (2 if step in ("sync_directory", "datasync") else 1), (
            "anew, if nobody knows what is there"
        )
        await c.restart(1)
        await c.applied(NAME)
        assert notes(c, 1) == said(1, 5)


class RingFaults(Disk):
    """Fails one call about a ring; counts those that were made."""

    __slots__ = ("plan", "renamed")

    def __init__(self) -> None:
        super().__init__()
        self.plan: tuple[str, int] | None = None
        self.renamed = 0

    def fail_ring(self, step: str, code: int) -> None:
        self.plan = (step, code)

    def _enter(self, step: str, path: str | int) -> None:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        if self.plan is not None and self.plan[0] == step and "rings" in path:
            code, self.plan = self.plan[1], None
            raise OSError(code, f"{os.strerror(code)} (injected at {step})")

    def create(self, path: str) -> int:
        self._enter("create", path)
        return super().create(path)

    def preallocate(self, fd: int, size: int, fill: bool = True) -> None:
        self._enter("preallocate", fd)
        super().preallocate(fd, size, fill)

    def _pwritev(self, fd: int, buffers: Sequence[object], offset: int) -> int:
        self._enter("write", fd)
        return super()._pwritev(fd, buffers, offset)  # type: ignore[arg-type]

    def datasync(self, fd: int) -> None:
        self._enter("datasync", fd)
        super().datasync(fd)

    def sync_file(self, fd: int) -> None:
        self._enter("sync_file", fd)
        super().sync_file(fd)

    def rename(self, old: str, new: str) -> None:
        self._enter("rename", old)
        super().rename(old, new)
        self.renamed += "rings" in old

    def unlink(self, path: str) -> None:
        self._enter("unlink", path)
        super().unlink(path)

    def sync_directory(self, path: str) -> None:
        self._enter("sync_directory", path)
        super().sync_directory(path)


async def test_a_ring_that_is_there_and_never_had_a_run_is_made_anew(tmp_path: Path) -> None:
    """A crash between its name and the sync of the directory: the next power cut may take the name."""
    disk = RingFaults()
    async with noted(tmp_path, 1, disks={1: disk}) as c:
        await note(c, 1, *said(1, 3))
        disk.fail_ring("sync_directory", errno.EIO)
        await c.roll(1)
        path = ring_path(c, 1, c.member(1, NAME).uid)
        before = path.stat().st_ino
        await c.restart(1)
        await c.applied(NAME)
        await note(c, 1, *said(4, 5))
        await c.roll(1)
        assert c.member(1, NAME).ring_runs and path.stat().st_ino != before
        anew = path.stat().st_ino
        await c.restart(1)
        await c.applied(NAME)
        await note(c, 1, *said(6, 7))
        await c.roll(1)
        assert path.stat().st_ino == anew and notes(c, 1) == said(1, 7), "a row names it"


async def test_a_ring_that_can_not_be_removed_stays_until_a_start(tmp_path: Path) -> None:
    disk = RingFaults()
    async with noted(tmp_path, 1, disks={1: disk}) as c:
        await filled(c)
        path = Path(ring_of(c, 1).path)
        disk.fail_ring("unlink", errno.EIO)
        await c.nodes[1].delete_group(NAME)
        await until(lambda: not disk.plan, "its removal fails")
        await c.create(NAME, machine=KIND)
        await note(c, 1, b"new")
        await c.roll(1)
        assert path.exists() and c.member(1, NAME).ring_runs and not c.failures
        await c.restart(1)
        await c.applied(NAME)
        assert not path.exists() and notes(c, 1) == [b"new"]


@pytest.mark.parametrize("made", [False, True], ids=["no ring yet", "a ring"])
async def test_a_full_disk_goes_on_with_the_ring_that_is_there_and_without_one(tmp_path: Path, made: bool) -> None:
    """A ring is reserved when it is made: nothing of a full disk is needed to write to it."""
    disk = QuotaDisk(tmp_path / "node-1")
    async with noted(tmp_path, 1, disks={1: disk}) as c:
        await note(c, 1, *said(1, 3))
        if made:
            await c.roll(1)
        await note(c, 1, *said(4, 6))
        await ready(c, 1)
        # Room for a segment and for some rows, and for no ring.
        disk.fill(64 * KIB)
        await c.roll(1)
        member = c.member(1, NAME)
        assert bool(member.segments) != made and bool(member.ring_runs) == made and not c.failures
        with pytest.raises(NoSpace):
            while True:
                await note_once(c, 1, bytes(40 * KIB))
        disk.quota = -1
        await room(c, 1)
        await note(c, 1, *said(7, 8))
        await c.roll(1)
        assert inside(member)[-1] == member.flushed
        found = notes(c, 1)
        await c.restart(1)
        await c.applied(NAME)
        assert notes(c, 1) == found and [one for one in found if len(one) < KIB] == said(1, 8)


async def no_rings(self: RingFiles, latest: Mapping[int, Sequence[Entry]]) -> list[object]:
    """As a program that knows none."""
    return []


async def test_a_directory_without_rings_is_read_and_its_segments_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with noted(tmp_path) as c:
        with monkeypatch.context() as before:
            before.setattr(RingFiles, "plan", no_rings)
            await filled(c)
        assert all(c.member(number, NAME).segments and not c.member(number, NAME).ring for number in c.ids)
        assert not list(tmp_path.glob("*/rings")) and c.system(1).meta.identity.format == 1  # type: ignore[union-attr]
        await c.close()
        for number in c.ids:
            await c.start(number)
        await c.applied(NAME)
        await c.lead(1, NAME)
        await note(c, 1, *said(9, 10))
        await c.applied(NAME)
        assert all(notes(c, number) == said(1, 10) for number in c.ids)
        for number in c.ids:
            await c.roll(number)
            member = c.member(number, NAME)
            assert member.segments and inside(member)[-1] == member.flushed
            identity = c.system(number).meta.identity
            assert identity is not None and identity.format == 2
        for number in c.ids:
            await c.restart(number)
        await c.applied(NAME)
        assert all(notes(c, number) == said(1, 10) for number in c.ids)
        for number in c.ids:
            await c.nodes[number].snapshot()
            await c.nodes[number].compact()
            await until(lambda number=number: not c.member(number, NAME).segments, "nothing is in segments any more")


async def test_a_newer_ring_is_refused_before_anything_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with noted(tmp_path, 1) as c:
        with monkeypatch.context() as newer:
            newer.setattr(ring, "FORMAT", ring.FORMAT + 1)
            await filled(c)
            await c.crash(1)
        files = [path for path in (tmp_path / "node-1").rglob("*") if path.is_file() and "lock" not in path.name]
        before = {path: path.read_bytes() for path in files}
        system = c.build(1)
        with pytest.raises(WrongIdentity, match="newer than 1"):
            await system.open()
        assert {path: path.read_bytes() for path in files} == before


async def test_a_user_group_has_neither_ring_nor_descriptor(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, machines=machines, group="", ring_slots=SLOTS) as c:
        for number in range(8):
            await c.create(f"user-{number}")
            await c.append(1, [(b"", b"x")], f"user-{number}")
        await c.roll(1)
        assert not (tmp_path / "node-1" / "rings").exists()
        await c.create(NAME, machine=KIND)
        await note(c, 1, b"one")
        before = open_descriptors()
        await c.roll(1)
        assert c.system(1).replicas.reader.stored_entries(c.member(1, NAME), 1, 2)
        assert open_descriptors() <= before + 1, "one for the ring"


async def test_a_system_group_that_sleeps_needs_no_ring(tmp_path: Path) -> None:
    async with noted(tmp_path, hibernate_after_ms=1) as c:
        await c.lead(1, NAME)
        await note(c, 1, *said(1, 4))
        await c.applied(NAME)
        for number in c.ids:
            await c.roll(number)
        await until(lambda: not any(NAME_IS_AWAKE(c, number) for number in c.ids), "it sleeps")
        assert not list(tmp_path.glob("node-*/rings/*.ring"))
        for number in c.ids:
            await c.restart(number)
        assert notes(c, 2) == said(1, 4)
        leader = await c.leader(NAME)
        await note(c, leader, b"awake")
        await c.applied(NAME)
        assert all(notes(c, number)[-1] == b"awake" for number in c.ids)


def NAME_IS_AWAKE(c: Cluster, number: int) -> bool:
    system = c.system(number)
    return system.names.get(NAME, 0) in system.members


async def test_a_replica_that_goes_takes_its_ring_along(tmp_path: Path) -> None:
    async with noted(tmp_path) as c:
        await filled(c)
        (path,) = (tmp_path / "node-3" / "rings").iterdir()
        await c.nodes[await c.leader(NAME)].change_members(NAME, "remove", 3)
        await until(lambda: c.replica(3, NAME) is None and not path.exists(), "both are gone")
        await c.nodes[await c.leader(NAME)].change_members(NAME, "add", 3)
        await until(lambda: c.replica(3, NAME) is not None, "it is back")
        await c.applied(NAME)
        with trio.fail_after(20):
            await note(c, await c.leader(NAME), b"more")
        await c.applied(NAME)
        await c.roll(3)
        await c.restart(3)
        await c.applied(NAME)
        assert notes(c, 3) == [*said(1, 8), b"more"]

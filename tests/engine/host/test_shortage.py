"""A process without descriptors or memory has lost nothing: what met that is done again, and no disk or file is blamed
for it (law 7)."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest
import trio

from logyard.engine.disk.door import SPARE_DESCRIPTORS, Disk
from logyard.engine.disk.faulty import FaultyDisk
from logyard.engine.entry import Entry
from logyard.engine.log.meta import MetaStore
from logyard.engine.log.wal import WalItem
from logyard.engine.ports import SourceEntry
from logyard.payloads.catalog import Catalog
from logyard.payloads.generation import Generation
from logyard.protocol.errors import Busy, NoSpace, StoreShort
from tests.engine.log.model import command, open_wal, recover
from tests.payloads.support import SMALL, Door

from .cluster import KIB, cluster, until

SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class ShortDisk(Disk):
    """Files whose names end in `short` can't be opened, for want of descriptors."""

    __slots__ = ("short", "met")

    def __init__(self, short: str = "") -> None:
        super().__init__()
        self.short = short
        self.met = 0

    def open_file(self, path: str, *, write: bool = False) -> int:
        if self.short and path.endswith(self.short):
            self.met += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return super().open_file(path, write=write)


@contextmanager
def full_table() -> Iterator[None]:
    """No descriptor is left in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    taken = []
    try:
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError as error:
                assert error.errno == errno.EMFILE
                break
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("error", SHORT)
@pytest.mark.parametrize("call", ["create", "preallocate", "write", "rename"])
def test_a_roll_that_finds_no_descriptor_waits_for_one(tmp_path: Path, call: str, error: int) -> None:
    """It counted as a failed disk: the node ended, exit code 75."""
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    refused = index = 0
    while wal.current < 4:
        index += 1
        items = [WalItem(7, [command(7, index, bodies=[b"s" * 4200])])]
        if wal.room < 16 * KIB and not refused:
            disk.fail(call, 1, error)
        try:
            wal.write(items)
        except NoSpace:
            refused += 1
            wal.write(items)
    assert refused == 1
    wal.close()
    memory, result = recover(Disk(), str(tmp_path))
    assert sorted(memory.log[7]) == list(range(1, index + 1)) and not result.damage


def test_a_full_table_of_descriptors_leaves_files_a_reserve(tmp_path: Path) -> None:
    disk = Disk()
    path = str(tmp_path / "file")
    os.close(disk.create(path))
    disk.hold()
    with full_table():
        held = [disk.open_file(path) for _ in range(SPARE_DESCRIPTORS - 1)]
        disk.sync_directory(str(tmp_path))
        held.append(disk.open_file(path))
        with pytest.raises(OSError, match="Too many open files"):
            disk.open_file(path)
        assert not disk.spend()
        for fd in held:
            disk.close(fd)
        # What comes back is kept for files again.
        with pytest.raises(OSError, match="Too many open files"):
            os.open(path, os.O_RDONLY)
        disk.close(disk.open_file(path))
    disk.let_go()


def test_a_generation_that_finds_no_descriptor_is_not_set_aside(tmp_path: Path) -> None:
    door = Door()
    made = Generation(str(tmp_path / "gen-0000000001"), 1, SMALL)
    made.create(0, door.sync_directory)
    made.seal(door.sync_directory)
    made.close()
    catalog = Catalog(str(tmp_path), SMALL, door, writer=False)
    with full_table():
        with pytest.raises(StoreShort):
            catalog.get(1)
        assert not catalog.failed()
    assert catalog.get(1).statistics().total == 0
    catalog.close()


def test_a_meta_store_that_finds_no_descriptor_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both copies would have been: a node that can't tell any more what it promised."""
    store = MetaStore(Disk(), str(tmp_path / "meta"))
    store.open("test", 1)
    store.commit([(b"key", b"value")])
    store.close()
    real = lmdb.open

    def short(path: str, **options: object) -> lmdb.Environment:
        if options.get("readahead") is False and options.get("readonly") and "lock" not in options:
            failure = lmdb.Error(f"{path}: Too many open files")
            failure.__dict__["code"] = errno.EMFILE
            raise failure
        return real(path, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(lmdb, "open", short)
        with pytest.raises(Busy):
            MetaStore(Disk(), str(tmp_path / "meta")).open("test", 1)
    assert not list((tmp_path / "meta").glob("*.bad-*"))
    again = MetaStore(Disk(), str(tmp_path / "meta"))
    again.open("test", 1, began=True)
    assert again.get(b"key") == b"value"
    again.close()


async def test_a_start_short_of_descriptors_calls_no_segment_damaged(tmp_path: Path) -> None:
    disk = ShortDisk()
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        await c.fill(1, 60, 40 * KIB)
        await until(lambda: c.member(1).flushed > 0, "segments are written")
        await c.crash(1)
        disk.short = ".seg"
        with pytest.raises(Busy):
            await c.build(1).open()
        assert disk.met
        disk.short = ""
        await c.start(1)
        await c.leader()
        assert not c.system(1).repair.log_repair.known and len(await c.read(1)) == 60


async def test_a_read_short_of_descriptors_is_busy_and_loses_nothing(tmp_path: Path) -> None:
    disk = ShortDisk()
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        await c.fill(1, 60, 40 * KIB)
        await until(lambda: c.member(1).flushed > 0, "segments are written")
        await c.restart(1)
        await c.leader()
        system = c.system(1)
        for number in list(system.storage.segments.users):
            system.storage.segments.renew(number)
        disk.short = ".seg"
        member = c.member(1)
        with pytest.raises(Busy, match="descriptors"):
            system.replicas.reader.log_entries(member, 1, 5, 1 << 20)
        with pytest.raises(Busy, match="descriptors"):
            await c.read(1)
        assert (
            member.state == "running" and not system.repair.log_repair.known and not system.repair.payload_repair.failed
        )
        disk.short = ""
        assert len(await c.read(1)) == 60


async def test_apply_that_is_short_of_descriptors_goes_on_later(tmp_path: Path) -> None:
    """What it can't read now it reads later: that is no fault of the group."""
    disk = ShortDisk()
    async with cluster(tmp_path, 3, disks={3: disk}) as c:
        await c.lead(1)
        await c.fill(1, 60, 40 * KIB)
        await c.applied()
        system, member = c.system(3), c.member(3)
        real = system.replicas.reader.log_entries
        met = trio.Event()

        def short(*arguments: object) -> object:
            if not met.is_set():
                met.set()
                raise Busy("the node's file descriptors or memory", 0.05)
            return real(*arguments)  # type: ignore[arg-type]

        system.replicas.reader.log_entries = short  # type: ignore[assignment]
        await c.append(1, [(b"", b"one more")])
        await met.wait()
        await c.applied()
        assert member.state == "running"


async def test_a_switch_to_a_segment_needs_no_descriptor(tmp_path: Path) -> None:
    """What it reads is read before it: the sealing is done again, and nothing freezes."""
    disk = ShortDisk()
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        await c.fill(1, 6, 40 * KIB)
        # A part of what is sealed next is dead: its share is counted by the segment's entries.
        await c.nodes[1].truncate("log", 3)
        await c.applied()
        disk.short = ".seg"
        storage = c.system(1).storage
        with pytest.raises(Busy, match="descriptors"):
            await c.roll(1)
        assert disk.met and not storage.jobs.frozen and not storage.jobs.failed
        disk.short = ""
        async with storage.janitor.lock:
            await storage.segment_writer.run()
        assert [file.live // (40 * KIB) for file in storage.location.files.values()] == [3]
        await storage.janitor.compact()
        assert not storage.location.files and len(await c.read(1, 3)) == 3


async def test_a_switch_to_another_home_needs_no_descriptor(tmp_path: Path) -> None:
    disk = ShortDisk()
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        await c.fill(1, 6, 40 * KIB)
        system, member = c.system(1), c.member(1)
        await c.roll(1)
        storage = system.storage

        def row(entry: Entry) -> SourceEntry:
            def read(offset: int, length: int) -> bytes:
                return bytes(system.wal.read_payload(entry.file, entry.offset + offset, length))

            return SourceEntry(member.uid, entry.index, entry.term, entry.data, None, read)

        found = storage.segments.reader(1).entries(member.uid, 1, member.raft.commit)
        rows = [row(one) for one in found if one.body_bytes]
        storage.segments.renew(1)
        disk.short = ".seg"
        with pytest.raises(Busy, match="descriptors"):
            await storage.rehoming.store_payloads(member, rows)
        assert disk.met and not storage.jobs.frozen and not system.store.homes(member.uid)
        disk.short = ""
        await storage.rehoming.store_payloads(member, rows)
        assert rows and not any(file.live for file in storage.location.files.values())


async def test_a_release_short_of_descriptors_is_counted_later(tmp_path: Path) -> None:
    """The group was halted at the command that released, and only a skip of it let it go on."""
    disk = ShortDisk()
    async with cluster(tmp_path, 3, disks={3: disk}) as c:
        await c.lead(1)
        await c.fill(1, 6, 40 * KIB)
        await c.applied()
        await c.roll(3)
        storage, member = c.system(3).storage, c.member(3)
        (file,) = storage.location.files.values()
        storage.segments.renew(file.file)
        disk.short = ".seg"
        await c.nodes[1].truncate("log", 3)
        await until(lambda: disk.met, "a segment was asked for")
        assert member.state == "running"
        assert file.live >= 3 * 40 * KIB, "it counts as fuller than it is, never as emptier"
        met = disk.met
        await until(lambda: disk.met > met, "it was tried again")
        assert member.state == "running" and file.live >= 3 * 40 * KIB
        disk.short = ""
        await until(lambda: file.live // (40 * KIB) == 3, "what died was counted")
        await c.applied()
        await storage.janitor.compact()
        assert not storage.location.files and len(await c.read(3, 3)) == 3


async def test_an_overwritten_log_short_of_descriptors_is_counted_later(tmp_path: Path) -> None:
    disk = ShortDisk()
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        await c.fill(1, 6, 40 * KIB)
        await c.roll(1)
        storage, member = c.system(1).storage, c.member(1)
        (file,) = storage.location.files.values()
        whole, last = file.live, member.raft.log.last_index
        (entry,) = c.system(1).replicas.reader.log_entries(member, last, last, 1 << 20)
        storage.segments.renew(file.file)
        disk.short = ".seg"
        # As when a leader replaces what was never committed.
        storage.accounting.cut(member, last - 1)
        assert disk.met and file.shares[member.uid].last == last - 1 and file.live == whole
        member.segments = [run._replace(last=min(run.last, last - 1)) for run in member.segments]
        disk.short = ""
        await until(lambda: file.live < whole, "what was overwritten was counted")
        assert file.live == whole - entry.body_bytes

"""The disk door: gathered writes, publication, the directory lock, and the twin that fails."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from logyard.engine.disk.door import ALIGNMENT, HUGE_PAGE, IOV_MAX, Disk, join_small
from logyard.engine.disk.faulty import Call, FaultyDisk
from logyard.engine.types import Buffer
from logyard.protocol.errors import DirectoryInUse


def test_small_buffers_are_joined_and_big_ones_are_passed_by_reference() -> None:
    big = memoryview(bytearray(5000))
    joined = join_small([b"a", b"b", big, b"c", b"", b"d"])
    assert joined[0] == b"ab"
    assert joined[1] is big
    assert joined[2] == b"cd"


@pytest.mark.parametrize("short", [0, 1, 7, 1000, 1500])
def test_a_gathered_write_continues_after_short_writes(tmp_path: Path, short: int) -> None:
    disk = FaultyDisk()
    disk.short = short
    buffers = [bytes([n]) * size for n, size in enumerate((3, 1024, 0, 1500, 2, 2))]
    fd = disk.create(str(tmp_path / "file"))
    assert disk.gather_write(fd, buffers, 10) == 2531
    assert disk.read(fd, 5000, 10) == b"".join(buffers)
    assert disk.bytes_written == 2531
    disk.close(fd)


def test_more_buffers_than_one_system_call_takes(tmp_path: Path) -> None:
    disk = Disk()
    fd = disk.create(str(tmp_path / "file"))
    buffers = [n.to_bytes(2, "little") * 600 for n in range(2 * IOV_MAX + 5)]
    disk.gather_write(fd, buffers, 0)
    assert disk.read(fd, 1 << 24, 0) == b"".join(buffers)
    disk.close(fd)


def test_a_new_file_and_directory_are_the_owners_alone(tmp_path: Path) -> None:
    disk = Disk()
    disk.make_directory(str(tmp_path / "data"))
    disk.close(disk.create(str(tmp_path / "data" / "file")))
    assert os.stat(tmp_path / "data").st_mode & 0o777 == 0o700
    assert os.stat(tmp_path / "data" / "file").st_mode & 0o777 == 0o600
    os.symlink(tmp_path / "data" / "file", tmp_path / "link")
    with pytest.raises(OSError) as caught:
        disk.open_file(str(tmp_path / "link"))
    assert caught.value.errno == errno.ELOOP


def test_publish_syncs_the_file_before_the_rename_and_the_directory_after_it(tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.write_file(str(tmp_path / "final"), [b"one", b"two"])
    names = [call.name for call in disk.calls]
    assert names == ["unlink", "create", "write", "sync_file", "rename", "sync_directory", "sync_file"]
    assert (tmp_path / "final").read_bytes() == b"onetwo"
    disk.fail("sync_file", 1, errno.EIO)
    with pytest.raises(OSError):
        disk.write_file(str(tmp_path / "final"), [b"three"])
    assert (tmp_path / "final").read_bytes() == b"onetwo"


def test_preallocation_leaves_zeros_of_the_whole_size(tmp_path: Path) -> None:
    disk = Disk()
    fd = disk.create(str(tmp_path / "file"))
    disk.preallocate(fd, 3_000_000)
    assert disk.size(fd) == 3_000_000
    assert os.fstat(fd).st_blocks * 512 >= 3_000_000
    assert not any(disk.read(fd, 3_000_000, 0))
    disk.close(fd)


def test_two_holders_of_one_directory(tmp_path: Path) -> None:
    """Invariant 8: the lock lives as long as any copy of its descriptor, so an orphaned writer keeps it."""
    disk = Disk()
    held = disk.lock_directory(str(tmp_path))
    with pytest.raises(DirectoryInUse, match=str(os.getpid())):
        disk.lock_directory(str(tmp_path))
    os.set_inheritable(held, True)
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, close_fds=False
    )
    disk.close(held)
    with pytest.raises(DirectoryInUse):
        disk.lock_directory(str(tmp_path))
    assert child.stdin is not None
    child.stdin.close()
    child.wait(10)
    disk.close(disk.lock_directory(str(tmp_path)))


def test_the_twin_fails_the_call_it_was_told_to_and_remembers(tmp_path: Path) -> None:
    disk = FaultyDisk()
    fd = disk.create(str(tmp_path / "file"))
    disk.fail("write", 2, errno.ENOSPC, written=2)
    disk.gather_write(fd, [b"one"], 0)
    with pytest.raises(OSError) as caught:
        disk.gather_write(fd, [b"two"], 3)
    assert caught.value.errno == errno.ENOSPC
    assert disk.read(fd, 10, 0) == b"onetw"
    assert disk.calls[1:] == [Call("write", fd, 0, b"one"), Call("write", fd, 3, b"two")]
    disk.gather_write(fd, [b"two"], 3)
    disk.close(fd)


@pytest.mark.parametrize("room", [8192, 65536])
def test_a_write_around_the_page_cache_carries_every_byte(tmp_path: Path, room: int) -> None:
    """Small, large and stage-sized buffers, over several stages; what lies behind stays as it was."""
    disk = Disk()
    path = str(tmp_path / "direct")
    fd = disk.create(path)
    disk.gather_write(fd, [b"\xee" * 400_000], 0)
    direct = disk.open_direct(path)
    if direct < 0:
        pytest.fail(
            "the file system of the test directory has no direct writes: set TMPDIR to one that has (ext4, xfs)"
        )
    stage = memoryview(mmap.mmap(-1, room))
    buffers: list[bytes | memoryview] = [b"a" * 100, bytes(range(256)) * 300, b"", b"b" * room, memoryview(b"c" * 5000)]
    size = sum(map(len, buffers))
    buffers.append(bytes(-size % 4096))
    total = sum(map(len, buffers))
    assert disk.aligned_write(direct, buffers, 8192, stage) == total
    disk.datasync(direct)
    found = disk.read(fd, 400_000, 0)
    assert found == b"\xee" * 8192 + b"".join(buffers) + b"\xee" * (400_000 - 8192 - total)


def test_a_short_write_around_the_page_cache_goes_on_at_a_block(tmp_path: Path) -> None:
    class Halting(Disk):
        def _pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
            assert offset % 4096 == 0
            return super()._pwritev(fd, [memoryview(buffers[0])[:8192]], offset) - (100 if offset == 0 else 0)

    disk = Halting()
    path = str(tmp_path / "short")
    os.close(disk.create(path))
    fd = os.open(path, os.O_RDWR)
    body = os.urandom(40_960)
    assert disk.aligned_write(fd, [body], 0, memoryview(mmap.mmap(-1, 65536))) == len(body)
    assert os.pread(fd, 50_000, 0) == body


class ShortDisk(Disk):
    """Writes as much as chance gives, and insists on what direct writes need."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance

    def _pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        (data,) = buffers
        assert offset % ALIGNMENT == 0 == len(data) % ALIGNMENT
        return os.pwrite(fd, data[: self.chance.choice([len(data), self.chance.randint(ALIGNMENT, len(data))])], offset)


def test_law_8_direct_writes_are_whole_however_short_the_parts(tmp_path: Path) -> None:
    chance = random.Random(8)
    disk = ShortDisk(chance)
    for number in range(100):
        stage = memoryview(mmap.mmap(-1, ALIGNMENT * chance.randint(1, 4)))
        data = chance.randbytes(ALIGNMENT * chance.randint(1, 9))
        buffers: list[Buffer] = []
        at = 0
        while at < len(data):
            size = chance.choice([0, 1, 100, ALIGNMENT, 5000, 20_000])
            buffers.append(data[at : at + size] if size % 2 else memoryview(data)[at : at + size])
            at += size
        path = tmp_path / str(number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        assert disk.aligned_write(fd, buffers, 2 * ALIGNMENT, stage) == len(data)
        os.close(fd)
        assert path.read_bytes()[2 * ALIGNMENT :] == data


def test_reads_around_the_page_cache_give_what_is_there(tmp_path: Path) -> None:
    disk = Disk()
    path = str(tmp_path / "direct")
    data = os.urandom(3 * HUGE_PAGE + 100)
    fd = disk.create(path)
    disk.gather_write(fd, [data], 0)
    direct = disk.open_direct_reads(path)
    memory = disk.direct_memory(HUGE_PAGE)
    assert len(memory) == HUGE_PAGE and not any(memory)
    for offset in (0, ALIGNMENT, 2 * HUGE_PAGE):
        assert disk.direct_read(direct, memory, offset) == HUGE_PAGE
        assert memory == data[offset : offset + HUGE_PAGE]
    assert disk.direct_read(direct, memory[: 2 * ALIGNMENT], 3 * HUGE_PAGE) == 100, "fewer at the end"
    assert memory[:100] == data[-100:]
    assert disk.direct_read(direct, memory, 4 * HUGE_PAGE) == 0
    for one in (fd, direct):
        disk.close(one)


def test_memory_for_direct_writes_begins_at_a_block_whatever_its_size(tmp_path: Path) -> None:
    disk = Disk()
    path = str(tmp_path / "direct")
    disk.close(disk.create(path))
    direct = disk.open_direct(path)
    for size in (ALIGNMENT, 8 * ALIGNMENT, HUGE_PAGE):
        memory = disk.direct_memory(size)
        memory[:] = data = os.urandom(size)
        disk.direct_write(direct, memory, 0)
        assert (tmp_path / "direct").read_bytes()[:size] == data
    disk.close(direct)


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "no such advice")

    monkeypatch.setattr(mmap, "mmap", Mapping)
    assert len(Disk().direct_memory(HUGE_PAGE)) == HUGE_PAGE


def test_a_child_has_memory_of_its_own_where_its_parents_lay() -> None:
    """What a child inherits it lets go of some time: where there were nothing, that would be what was put there since,
    and the next write into it the end of the process."""
    disk = Disk()
    memory = disk.direct_memory(4 * ALIGNMENT)
    memory[:4] = b"here"
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            # Nothing of the parent's, whose device may be writing to it.
            os._exit(0 if bytes(memory) == bytes(4 * ALIGNMENT) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(memory[:4]) == b"here"

"""The engine's disk door on a simulated file system, with faults on order, and the face of `os` beside it.

Invariant: a dead process reaches nothing: every call of it raises `Crashed`. `crash_in` lets it die at the n-th step
from now, before that step takes effect. Used by `cluster`.
"""

from __future__ import annotations

import errno
import mmap
import os
import posixpath
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

from logyard.engine.disk.door import Disk
from logyard.engine.types import Buffer
from logyard.protocol.errors import DirectoryInUse

from .files import Directory, File, FileSystem
from .loop import Crashed, Doomed, Life, Loop

ERRORS = {"sync": "D4.sync_EIO", "write": "D5.write_EIO", "commit": "D4.commit_EIO"}


class Faults:
    """What is to go wrong with one node's disk, and what did (`hits`, by kind)."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.hits: Counter[str] = Counter()
        # (operation, substring of the path or nothing) -> errno, once.
        self.errors: dict[str, int] = {}
        self.short = 0.0
        self.latency_s = 0.0
        self.lost_write = False
        self.misdirect = False
        self.stale_read = False
        # Bytes that all files may have, once the disk is full; -1: it is not.
        self.quota = -1
        # The process has no descriptor left.
        self.no_descriptors = False
        # The next commit of a generation meets the end of its map, which the estimate did not see.
        self.map_full = False
        # How many commits more of a store ("meta", "generation", or of the first those that seal) find no space.
        self.no_commit: dict[str, int] = {}
        # Its next write ends by an error of the program, and counts as this kind.
        self.bug = ""


class SimDisk(Disk):
    """One process's door to its node's file system."""

    __slots__ = ("files", "faults", "life", "crash_in", "crash_kind", "steps", "watch")

    def __init__(self, files: FileSystem, faults: Faults, life: Life) -> None:
        super().__init__()
        self.files = files
        self.faults = faults
        self.life = life
        self.crash_in = -1
        self.crash_kind = "P5.crash_at_step"
        self.steps = 0
        # Told of each write: (file, offset, bytes).
        self.watch: Callable[[File, int, bytes], None] = _nothing

    def hold(self, count: int = 0) -> None:
        """Nothing: its descriptors are numbers."""

    def step(self, operation: str) -> None:
        """One step that changes something: the place where processes die and errors come."""
        if not self.life.alive:
            raise Crashed
        self.steps += 1
        if self.crash_in >= 0:
            self.crash_in -= 1
            if self.crash_in < 0:
                self.faults.hits[self.crash_kind] += 1
                raise Crashed
        faults = self.faults
        if faults.errors:
            code = faults.errors.pop(operation, 0)
            if code:
                faults.hits[ERRORS[operation]] += 1
                raise OSError(code, f"{os.strerror(code)} (simulated at {operation})")

    def make_directory(self, path: str) -> None:
        self.step("names")
        if self.files.make_directory(path) and path != self.files.prefix:
            self.sync_directory(posixpath.dirname(path))

    def list_directory(self, path: str) -> list[str]:
        return sorted(self.files.directory(path).names)

    def _descriptor(self) -> None:
        if self.faults.no_descriptors:
            self.faults.hits["P4.descriptors"] += 1
            raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)} (simulated)")

    def create(self, path: str) -> int:
        self.step("names")
        self._descriptor()
        return self.files.open(self.files.create(path))

    def open_file(self, path: str, *, write: bool = False) -> int:
        if not self.life.alive:
            raise Crashed
        self._descriptor()
        return self.files.open(self.files.file(path))

    def close(self, fd: int) -> None:
        self.files.descriptors.pop(fd, None)

    def size(self, fd: int) -> int:
        return len(self.files.opened(fd).seen)

    def free_bytes(self, path: str) -> int:
        quota = self.faults.quota
        return 1 << 40 if quota < 0 else max(0, quota - self.files.used())

    def read(self, fd: int, length: int, offset: int) -> bytes:
        if not self.life.alive:
            raise Crashed
        file = self.files.opened(fd)
        data = bytes(file.seen[offset : offset + length])
        if self.faults.stale_read and file.kind == "wal" and offset >= 8192:
            # Not of the newest batch: what nothing follows is a torn end to everybody.
            sectors = (min(len(data), file.last - offset)) // 512
            if sectors > 0:
                self.faults.stale_read = False
                self.faults.hits["D10.stale_read"] += 1
                at = self.faults.draw.randrange(sectors) * 512
                return data[:at] + bytes(512) + data[at + 512 :]
        return data

    def preallocate(self, fd: int, size: int, fill: bool = True) -> None:
        self.step("preallocate")
        file = self.files.opened(fd)
        self.claim(size - len(file.seen))
        file.resize(size)

    def claim(self, size: int) -> None:
        """So many bytes more: is there room?"""
        if self.faults.quota < 0 or size <= self.free_bytes(""):
            return
        self.faults.hits["D6.full"] += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse_commit(self, store: str) -> None:
        """Raise ENOSPC where the commits of such a store are to find no space."""
        left = self.faults.no_commit.pop(store, 0)
        if left:
            self.faults.no_commit[store] = left - 1
            self.faults.hits["D6.commit_full"] += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_direct(self, path: str) -> int:
        return -1

    def open_direct_reads(self, path: str) -> int:
        return -1

    def direct_memory(self, size: int) -> memoryview:
        # Pages that nothing is written to are none: most nodes here never use it.
        return memoryview(mmap.mmap(-1, size))

    def _pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.step("write")
        data = b"".join(buffers)
        faults, file = self.faults, self.files.opened(fd)
        if faults.bug and file.kind == "wal":
            faults.hits[faults.bug] += 1
            faults.bug = ""
            raise Doomed
        if faults.quota >= 0:
            self.claim(offset + len(data) - len(file.seen))
        if faults.short and len(data) > 1 and faults.draw.random() < faults.short:
            faults.hits["D5.short"] += 1
            data = data[: faults.draw.randrange(1, len(data))]
        if file.kind == "wal":
            written = (offset, bytes(file.seen[offset : offset + len(data)]), data)
            if file.synced or file.newest is None:
                file.before, file.newest, file.synced = file.newest, written, False
            else:
                # The rest of a short write.
                first, before, begun = file.newest
                file.newest = (first, before + written[1], begun + data)
        file.write(offset, data)
        self.watch(file, offset, data)
        return len(data)

    def _lose(self, file: File, offset: int, before: bytes, data: bytes) -> None:
        """The write before the one that was just synced did not reach its place. The newest one always does: what
        nothing follows is a torn end to everybody."""
        faults = self.faults
        places = [at for at in range(8192, offset - len(data), 4096)]
        if offset < 8192 or (faults.misdirect and not places):
            return
        kind = "D10.misdirected" if faults.misdirect else "D10.lost_write"
        elsewhere = faults.draw.choice(places) if faults.misdirect else offset
        faults.lost_write = faults.misdirect = False
        faults.hits[kind] += 1
        for content in (file.seen, file.held):
            content[offset : offset + len(data)] = before.ljust(len(data), b"\0")
            if elsewhere != offset:
                content[elsewhere : elsewhere + len(data)] = data

    def datasync(self, fd: int) -> None:
        life = self.life
        # Whoever waits for this sync has waited so long when it returns.
        life.shift = 0.0
        file = self.files.opened(fd)
        try:
            self.step("sync")
        except OSError:
            file.forget()
            raise
        self.fdatasyncs += 1
        file.sync()
        file.synced = True
        if file.before is not None and (self.faults.lost_write or self.faults.misdirect):
            self._lose(file, *file.before)
            file.before = None

    def sync_file(self, fd: int) -> None:
        self.datasync(fd)

    def sync_directory(self, path: str) -> None:
        self.step("sync_names")
        self.files.directory(path).sync()

    def rename(self, old: str, new: str) -> None:
        self.step("names")
        self.files.rename(old, new)
        if new.endswith(".wal"):
            self.files.file(new).kind = "wal"

    def unlink(self, path: str) -> None:
        self.step("names")
        try:
            self.files.unlink(path)
        except FileNotFoundError:
            pass

    def revalidate(self, path: str) -> None:
        self.files.file(path).revalidate()

    def lock_directory(self, path: str) -> int:
        self.step("names")
        if self.files.locked:
            raise DirectoryInUse(f"{path} is in use", path=path)
        self.files.locked = True
        return self.files.open(self.files.create(f"{path}/lock", exclusive=False))


def _nothing(file: File, offset: int, data: bytes) -> None:
    """Nobody watches."""


class SimPath(PurePosixPath):
    """A path on the running node's file system."""

    __slots__ = ()
    loop: Loop

    def _find(self) -> File | Directory | None:
        return files_of(self.loop).find(str(self))

    def exists(self) -> bool:
        return self._find() is not None

    def is_dir(self) -> bool:
        return isinstance(self._find(), Directory)

    def stat(self) -> Any:
        found = files_of(self.loop).file(str(self))
        return SimpleNamespace(st_size=len(found.seen))


def files_of(loop: Loop) -> FileSystem:
    """The file system of the node that runs now."""
    life = loop.life
    assert life is not None
    if not life.alive:
        raise Crashed
    return life.files  # type: ignore[attr-defined, no-any-return]


class Os:
    """Stands for the module `os` in the engine's modules: names go to the running node's file system."""

    def __init__(self, loop: Loop, entropy: Callable[[int], bytes]) -> None:
        self._loop = loop
        self.urandom = entropy
        self.path = SimpleNamespace(
            join=posixpath.join, dirname=posixpath.dirname, basename=posixpath.basename, abspath=str,
            exists=lambda path: self._files.find(path) is not None,
            isdir=lambda path: isinstance(self._files.find(path), Directory),
            getsize=lambda path: len(self._files.file(path).seen),
        )  # fmt: skip

    @property
    def _files(self) -> FileSystem:
        return files_of(self._loop)

    @property
    def _disk(self) -> SimDisk:
        return self._loop.life.disk  # type: ignore[union-attr, no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def listdir(self, path: str) -> list[str]:
        return sorted(self._files.directory(path).names)

    def walk(self, path: str) -> Iterable[tuple[str, list[str], list[str]]]:
        found = list(self._files.walk(self._files.directory(path), str(path)))
        folders = [str(path), *(where for where, node in found if isinstance(node, Directory))]
        for folder in folders:
            names = [where.rpartition("/")[2] for where, node in found
                     if isinstance(node, File) and where.rpartition("/")[0] == folder]  # fmt: skip
            yield folder, [], names

    def makedirs(self, path: str, mode: int = 0o777, exist_ok: bool = False) -> None:
        self._disk.step("names")
        self._files.make_directory(path)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self.makedirs(path)

    def rename(self, old: str, new: str) -> None:
        self._disk.rename(old, new)

    def unlink(self, path: str) -> None:
        self._disk.step("names")
        self._files.unlink(path)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self._disk.step("names")
            return self._files.open(self._files.create(path, exclusive=False))
        return self._files.open(self._files.file(path))

    def close(self, fd: int) -> None:
        self._disk.close(fd)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        return self._disk.read(fd, length, offset)

    def fstat(self, fd: int) -> Any:
        return SimpleNamespace(st_size=len(self._files.opened(fd).seen))

    def stat(self, path: str) -> Any:
        return SimpleNamespace(st_blocks=(len(self._files.file(path).seen) + 511) // 512)

    def posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        self._disk.claim(size)

    def statvfs(self, path: str) -> Any:
        return SimpleNamespace(f_bavail=self._disk.free_bytes(path), f_frsize=1)


def open_twin(loop: Loop) -> Callable[..., BytesIO]:
    """The built-in `open`, for reading whole files."""

    def open_(path: str, mode: str = "r") -> BytesIO:
        assert mode == "rb"
        return BytesIO(bytes(files_of(loop).file(path).seen))

    return open_


def remove_tree(loop: Loop) -> Callable[[str], None]:
    """`shutil.rmtree`."""

    def rmtree(path: str) -> None:
        disk = loop.life.disk  # type: ignore[union-attr]
        disk.step("names")
        files_of(loop).unlink(path)

    return rmtree

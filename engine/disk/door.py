"""The only door to files that matter, and the only place that syncs (law 12).

Invariant: after `datasync`, `sync_directory` or `publish` return, what was written before is on stable storage; an
`OSError` of theirs means that nobody knows, and the caller never retries on the same descriptor. Files are 0600,
directories 0700, links are not followed. Every module of the engine that keeps files is handed a `Disk`; its twin for
tests, which fails on demand, is in `faulty`, that in memory in the simulator.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterable, Sequence

from logyard.protocol.errors import SHORT, SHORT_RETRY_S, SHORTAGE, Busy, Corrupt, LogyardError, Refused

from ..types import Buffer
from .lock import lock_directory

IOV_MAX = 1024
"""Buffers one `pwritev` takes on Linux."""
JOIN_BELOW = 1024
"""Bytes: a smaller buffer is cheaper to copy into a joined one than to pass on its own (measured)."""
STEP = 1 << 20
"""Bytes zero-filled per write, so that a preallocation does not hold the disk's queue for long."""
SYNC_EVERY = 8
"""Steps between two syncs of a preallocation: dirty pages beside the live WAL stay bounded."""

ALIGNMENT = 4096
"""What writes around the page cache are multiples of: no device's block is larger."""
MADV_WIPEONFORK = 18
"""madvise(2), Linux 4.14; Python has no name for it."""
HUGE_PAGE = 2 << 20
"""Bytes of the smallest on the machines that this is for. On others `direct_memory` has more small pages, no more."""
OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


SPARE_DESCRIPTORS = 16
"""Held in reserve, for files whose opening must not wait until a connection ends."""


def is_full(error: BaseException) -> bool:
    """Return whether an error says that the disk, or this user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


_DAMAGE = (errno.EIO, errno.ENOENT, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EREMOTEIO, errno.EILSEQ)


def is_damage(error: OSError) -> bool:
    """Return whether an error of reading says that bytes are lost. All others are the process's or the machine's, and
    pass: no descriptors, no memory, no right."""
    return error.errno in _DAMAGE


def is_short(error: BaseException) -> bool:
    """Return whether an error says that the process or the machine lacks descriptors or memory. That passes, and says
    nothing about a disk or a file: what met it is done again later."""
    return isinstance(error, OSError) and error.errno in SHORT


def unreadable(path: str, offset: int, want: object, error: OSError) -> LogyardError:
    """Return what a read that failed means: `Busy` where the process lacks something, else `Corrupt`."""
    if is_short(error):
        return Busy(SHORTAGE, SHORT_RETRY_S)
    return Corrupt(path, offset, want, error.strerror)


def join_small(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Join neighbours below `JOIN_BELOW` bytes; pass bigger buffers by reference. The order stays."""
    joined: list[Buffer] = []
    small: list[Buffer] = []
    for buffer in buffers:
        if len(buffer) < JOIN_BELOW:
            small.append(buffer)
            continue
        if small:
            joined.append(b"".join(small))
            small = []
        joined.append(buffer)
    if small:
        joined.append(b"".join(small))
    return joined


class Disk:
    """Real files. It holds no state but counters and descriptors in reserve, so that any number of threads may use
    one."""

    __slots__ = ("fdatasyncs", "bytes_written", "_spare", "_spare_max")

    def __init__(self) -> None:
        self.fdatasyncs = 0
        self.bytes_written = 0
        self._spare: list[int] = []
        self._spare_max = 0

    def __del__(self) -> None:
        self.let_go()

    def hold(self, count: int = SPARE_DESCRIPTORS) -> None:
        """Keep so many descriptors in reserve: whoever else fills the process's table, files can still be opened."""
        self._spare_max = count
        self._refill()

    def let_go(self) -> None:
        """Give the reserve back."""
        self._spare_max = 0
        while self.spend():
            pass

    def spend(self) -> bool:
        """Give one descriptor of the reserve up for what is opened next; return False when none is left."""
        try:
            os.close(self._spare.pop())
        except IndexError:
            return False
        return True

    def _refill(self) -> None:
        try:
            while len(self._spare) < self._spare_max:
                self._spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if not is_short(error):
                raise

    def _open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Return a descriptor, out of the reserve when there is no other."""
        while True:
            try:
                fd = os.open(path, flags | os.O_CLOEXEC, mode)
            except OSError as error:
                if not (is_short(error) and self.spend()):
                    raise
            else:
                return fd

    def make_directory(self, path: str) -> None:
        """Create `path` (0700) unless it is there, and make its name durable."""
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            return
        self.sync_directory(os.path.dirname(os.path.abspath(path)))

    def list_directory(self, path: str) -> list[str]:
        """Return the names in `path`, sorted."""
        return sorted(os.listdir(path))

    def create(self, path: str) -> int:
        """Return a descriptor of a new, empty file (0600), for reading and writing; its name is not durable yet."""
        return self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN)

    def open_file(self, path: str, *, write: bool = False) -> int:
        """Return a descriptor of a file that exists."""
        return self._open(path, (os.O_RDWR if write else os.O_RDONLY) | OPEN)

    def close(self, fd: int) -> None:
        """Give a descriptor back, to the reserve first."""
        os.close(fd)
        if len(self._spare) < self._spare_max:
            self._refill()

    def size(self, fd: int) -> int:
        """Return the bytes of an open file."""
        return os.fstat(fd).st_size

    def free_bytes(self, path: str) -> int:
        """Return the bytes that this process may still allocate on the file system of `path`. A quota may say less."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def read(self, fd: int, length: int, offset: int) -> bytes:
        """Return up to `length` bytes at `offset`; fewer only at the end of the file."""
        found = os.pread(fd, length, offset)
        if len(found) == length or not found:
            return found
        parts = [found]
        missing = length - len(found)
        offset += len(found)
        while missing and (more := os.pread(fd, missing, offset)):
            parts.append(more)
            missing -= len(more)
            offset += len(more)
        return b"".join(parts)

    def preallocate(self, fd: int, size: int, fill: bool = True) -> None:
        """Reserve `size` bytes; with `fill` write them with zeros once, in steps, so that later writes change no
        file-system metadata.

        Never-written space takes writes three times slower than space written before, so filling pays when it is done
        ahead, on an idle
        disk; under load it only writes everything twice (docs/decisions/0003).
        """
        if size:
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                # Where the file system can't reserve and the C library does not write for it, zeros claim the space.
                fill = True
        if not fill:
            return
        zeros = memoryview(bytes(min(STEP, size)))
        for number, offset in enumerate(range(0, size, STEP)):
            self.gather_write(fd, [zeros[: min(STEP, size - offset)]], offset)
            if number % SYNC_EVERY == SYNC_EVERY - 1:
                self.datasync(fd)
        self.datasync(fd)
        # The WAL writes around the page cache: zeros in it would only have to be thrown out one by one.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def gather_write(self, fd: int, buffers: Iterable[Buffer], offset: int) -> int:
        """Write the buffers one after another at `offset`; return the bytes written, which are always all of them.

        Small neighbours are joined, big buffers are passed by reference, short writes are continued.
        """
        pending = join_small(buffers)
        total = 0
        while pending:
            chunk = pending[:IOV_MAX]
            written = self._pwritev(fd, chunk, offset + total)
            if written <= 0:
                raise OSError(errno.EIO, "a write made no progress")
            total += written
            done = 0
            while done < len(chunk) and written >= len(chunk[done]):
                written -= len(chunk[done])
                done += 1
            if written:
                pending = [memoryview(chunk[done])[written:], *pending[done + 1 :]]
            else:
                pending = pending[done:]
        self.bytes_written += total
        return total

    def open_direct(self, path: str) -> int:
        """Return a descriptor whose writes bypass the page cache, for `aligned_write`; -1 where the file system has no
        such thing.

        A page of cache that was never touched costs more than the write (docs/decisions/0004): five times the CPU a
        MiB.
        """
        return self._open_around(path, os.O_WRONLY)

    def direct_memory(self, size: int) -> memoryview:
        """Return `size` bytes of zeros, aligned to `ALIGNMENT`, for direct reads and writes. A multiple of `HUGE_PAGE`
        lies in huge pages where the kernel has them: the device is told of one piece of memory instead of hundreds, and
        is done in 0.55 to 0.7 of the time (docs/decisions/0046)."""
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A fork would have a page copied to which the device writes (open(2), O_DIRECT). A child gets zeros in its
        # place, not nothing: it would unmap what it had put there itself when it lets go of what it inherited.
        for advice in (MADV_WIPEONFORK, *([] if size % HUGE_PAGE else [mmap.MADV_HUGEPAGE])):
            try:
                memory.madvise(advice)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return memoryview(memory)

    def open_direct_reads(self, path: str) -> int:
        """Return a descriptor whose reads bypass the page cache, for `direct_read`; -1 where the file system has no
        such thing. For large reads of what nobody reads again: those of 64 KiB cost more than through the cache."""
        return self._open_around(path, os.O_RDONLY)

    def _open_around(self, path: str, flags: int) -> int:
        try:
            return self._open(path, flags | os.O_DIRECT | OPEN)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return -1

    def direct_read(self, fd: int, memory: memoryview, offset: int) -> int:
        """Fill `memory`, aligned to `ALIGNMENT` as `offset` and its length are, with a descriptor of
        `open_direct_reads`; return the bytes read, fewer only at the end of the file."""
        done = 0
        while done < len(memory):
            found = os.preadv(fd, [memory[done:]], offset + done)
            done += found
            if not found or done % ALIGNMENT:
                break
        return done

    def aligned_write(self, fd: int, buffers: Iterable[Buffer], offset: int, stage: memoryview) -> int:
        """Write buffers one after another through `stage` with a descriptor of `open_direct`; return the bytes
        written, always all.

        `offset`, the total and the stage's length are multiples of `ALIGNMENT`, and the stage's memory is aligned to
        it. The copy into the
        stage takes the place of the kernel's copy into the page cache: bytes are moved once either way.
        """
        room = len(stage)
        total = filled = 0
        for buffer in buffers:
            size = len(buffer)
            if filled + size <= room:
                stage[filled : filled + size] = buffer
                filled += size
                continue
            view = memoryview(buffer)
            while len(view):
                part = view[: room - filled]
                stage[filled : filled + len(part)] = part
                filled += len(part)
                view = view[len(part) :]
                if filled == room:
                    total += self._write_stage(fd, stage, offset + total)
                    filled = 0
        if filled:
            total += self._write_stage(fd, stage[:filled], offset + total)
        self.bytes_written += total
        return total

    def direct_write(self, fd: int, memory: memoryview, offset: int) -> None:
        """Write `memory`, aligned to `ALIGNMENT` as `offset` and its length are, with a descriptor of `open_direct`."""
        self.bytes_written += self._write_stage(fd, memory, offset)

    def unwritten_from(self, fd: int, offset: int) -> int:
        """Return the first offset >= `offset` whose space was reserved and never written; where the file system can't
        tell, or all was written, the file's size."""
        try:
            return os.lseek(fd, offset, os.SEEK_HOLE)
        except OSError:
            return self.size(fd)

    def _write_stage(self, fd: int, stage: memoryview, offset: int) -> int:
        done = 0
        while done < len(stage):
            written = self._pwritev(fd, [stage[done:]], offset + done)
            # A short write may end anywhere; the next one begins at a multiple again and writes the rest of that
            # block twice.
            if written < len(stage) - done:
                written -= written % ALIGNMENT
                if written <= 0:
                    raise OSError(errno.EIO, "a write made no progress")
            done += written
        return done

    def _pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def datasync(self, fd: int) -> None:
        """Make the data, and the metadata needed to read it back, durable (fdatasync)."""
        self.fdatasyncs += 1
        os.fdatasync(fd)

    def sync_file(self, fd: int) -> None:
        """Make data and all metadata durable (fsync)."""
        os.fsync(fd)

    def sync_directory(self, path: str) -> None:
        """Make creations, renames and removals of names in `path` durable."""
        fd = self._open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.sync_file(fd)
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        """Rename within a directory; durable after `sync_directory`."""
        os.rename(old, new)

    def publish(self, temporary: str, final: str) -> None:
        """Make a complete temporary file appear under its final name: sync it, rename it, sync the directory."""
        fd = self.open_file(temporary, write=True)
        try:
            self.sync_file(fd)
        finally:
            self.close(fd)
        self.rename(temporary, final)
        self.sync_directory(os.path.dirname(final))

    def write_file(self, path: str, buffers: Iterable[Buffer]) -> int:
        """Write a whole file through `path`.tmp and `publish`; return its bytes. A crash leaves the old or the new."""
        temporary = path + ".tmp"
        self.unlink(temporary)
        fd = self.create(temporary)
        try:
            written = self.gather_write(fd, buffers, 0)
        finally:
            self.close(fd)
        self.publish(temporary, path)
        return written

    def unlink(self, path: str) -> None:
        """Remove a name; nothing happens when it is not there. Durable after `sync_directory`."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass

    def revalidate(self, path: str) -> None:
        """Write what the page cache holds of a file to the disk, and drop it from memory: what is read next is what the
        disk has. After a failed sync the kernel calls pages clean that never got there. Raises `OSError`."""
        fd = self.open_file(path)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            self.close(fd)

    def forget_pages(self, fd: int, offset: int, length: int) -> None:
        """Drop clean pages of a file that nobody has mapped from memory: the next read is the disk's."""
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)

    def lock_directory(self, path: str) -> int:
        """Take the lock of a data directory (see `lock.lock_directory`). Raises `DirectoryInUse`, and `Refused` for one
        that everybody may write to."""
        if os.stat(path).st_mode & stat.S_IWOTH:
            raise Refused(f"{path} may be written to by every user of this machine: chmod o-w {path}")
        return lock_directory(path)

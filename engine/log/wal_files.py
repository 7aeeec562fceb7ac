"""The files of the WAL directory: preallocation ahead of need, reads with pins, recycling, the stock of spares.

Invariant: a file comes into use only with a durable head of its own (new epoch, new salt) under a durable name, and
leaves use only when no pin holds it, so an open reader never sees the bytes of another use. Called by `wal` and, for
payload reads, by any thread.

Names: ``<epoch>.wal`` in use, ``*.spare`` zero-filled or recycled and waiting, ``*.tmp`` unfinished and removed at the
next open.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

from logyard.protocol.errors import Corrupt, Gone

from ..disk.door import Disk, is_full, unreadable
from ..entry import Entry
from .record import BLOCK, DATA_START, FileHead, encode_file_head

WAL = ".wal"
SPARE = ".spare"
TEMPORARY = ".tmp"


class Sealed(NamedTuple):
    """A WAL file that takes no more batches. `entries` are all it got, in write order: the last one of (uid, index)
    wins.

    `file` and `epoch` are the same number; `length` is where its batches end, in bytes.
    """

    file: int
    epoch: int
    length: int
    entries: list[tuple[int, Entry]]


class SyncFailed(OSError):
    """A sync failed, or a rename that others rely on: unlike after a failed write, nobody knows what the disk holds."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.errno, f"sync: {error.strerror}")


def wal_name(epoch: int) -> str:
    """Return the name of a WAL file in its directory."""
    return f"{epoch:016x}{WAL}"


def wal_epochs(names: Sequence[str]) -> list[int]:
    """Return the epochs of the WAL files among `names`, oldest first; other names are skipped."""
    found = []
    for name in names:
        stem = name.removesuffix(WAL)
        if stem != name and len(stem) == 16:
            try:
                found.append(int(stem, 16))
            except ValueError:
                continue
    return sorted(found)


class _File:
    __slots__ = ("path", "bytes", "fd", "pins", "doomed")

    def __init__(self, path: str, size: int, fd: int) -> None:
        self.path = path
        self.bytes = size
        self.fd = fd
        self.pins = 0
        # Recycled by its owner, kept for its last reader.
        self.doomed = False

    def pin(self) -> None:
        """Count a reader more."""
        self.pins += 1

    def unpin(self) -> bool:
        """Count a reader less. Return whether the file may go now: it was to, and this was the last pin."""
        self.pins -= 1
        assert self.pins >= 0, f"{self.path} is unpinned more often than pinned"
        return self.doomed and not self.pins

    def doom(self) -> bool:
        """Return whether nobody holds the file; who does is its last reader from now on."""
        self.doomed = self.pins > 0
        return not self.doomed


class WalFiles:
    """The directory's files. Every method may be called from any thread; `start` and `open` only from the writer's."""

    __slots__ = (
        "_disk", "_directory", "_file_bytes", "_stock_max", "_reserve", "_files", "_stock", "_lock", "_preparing",
        "short", "_frugal",
    )  # fmt: skip

    def __init__(self, disk: Disk, directory: str, file_bytes: int, stock: int, reserve: int = 0) -> None:
        self._disk = disk
        self._directory = directory
        self._file_bytes = file_bytes
        self._stock_max = stock + reserve
        # So many spares are used only when the disk has no room for another file.
        self._reserve = reserve
        # The file in use came out of the reserve.
        self.short = False
        # What is free was given up for others: the reserve comes first.
        self._frugal = False
        self._files: dict[int, _File] = {}
        # Spare files: path and bytes.
        self._stock: list[tuple[str, int]] = []
        self._lock = threading.Lock()
        # Held while a spare is made, so that the writer waits for the one under way instead of making a second.
        self._preparing = threading.Lock()

    def open(self) -> None:
        """Read the directory: files in use get descriptors, spares of the right size are the stock, the rest goes."""
        disk = self._disk
        disk.make_directory(self._directory)
        names = disk.list_directory(self._directory)
        for name in names:
            path = os.path.join(self._directory, name)
            if name.endswith(TEMPORARY):
                disk.unlink(path)
            elif name.endswith(SPARE):
                fd = disk.open_file(path)
                size = disk.size(fd)
                disk.close(fd)
                if size == self._file_bytes and len(self._stock) < self._stock_max:
                    self._stock.append((path, size))
                else:
                    disk.unlink(path)
        for epoch in wal_epochs(names):
            path = os.path.join(self._directory, wal_name(epoch))
            fd = disk.open_file(path, write=True)
            self._files[epoch] = _File(path, disk.size(fd), fd)
        # Also when nothing changed: the process before may have died between a rename and its sync, and what is written
        # to that file from here on must not lie under a name that a power failure takes back.
        disk.sync_directory(self._directory)

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            self._disk.close(file.fd)

    def start(self, head: FileHead, need: int) -> tuple[int, int]:
        """Bring a file into use for batches of at least `need` bytes; return (descriptor, bytes). OSErrors pass.

        The head is durable before the name, the name before the return. A crash in between leaves a spare.
        `SyncFailed` is final.
        """
        disk = self._disk
        path, size = self._take_spare(DATA_START + need + BLOCK)
        final = os.path.join(self._directory, wal_name(head.epoch))
        fd = -1
        try:
            fd = disk.open_file(path, write=True)
            block = encode_file_head(head)
            disk.gather_write(fd, [block, block], 0)
        except OSError:
            if fd >= 0:
                disk.close(fd)
            # Nothing refers to the spare yet: a full disk can be waited out, and the head is written again.
            with self._lock:
                self._stock.append((path, size))
            raise
        try:
            disk.datasync(fd)
            disk.rename(path, final)
            disk.sync_directory(self._directory)
        except OSError as error:
            # The new file may or may not be there for the next replay, and its head ends the file before it.
            raise SyncFailed(error) from error
        with self._lock:
            self._files[head.epoch] = _File(final, size, fd)
        return fd, size

    def prepare(self, fill: bool) -> None:
        """Make a spare when there is none beside the reserve, and the reserve. Slow when it is to `fill` the files with
        zeros: call it on a thread of its own."""
        with self._preparing:
            while self.missing:
                made = self._make_spare(self._file_bytes, fill and not self._stock)
                with self._lock:
                    self._stock.append(made)

    def economize(self, frugal: bool) -> None:
        """Use the reserve before new space from now on, or after it again."""
        self._frugal = frugal

    @property
    def missing(self) -> int:
        """Spares to make until the next file and the reserve are there."""
        return max(0, self._reserve + 1 - len(self._stock))

    @property
    def spare_bytes(self) -> int:
        """Of all spares."""
        with self._lock:
            return sum(size for _, size in self._stock)

    def _take_spare(self, need: int) -> tuple[str, int]:
        with self._preparing:
            beside = len(self._stock) > self._reserve
            if (beside or self._frugal) and (found := self._fitting(need)):
                self.short = not beside
                return found
            try:
                # A writer waits for this one: reserved space is enough.
                made = self._make_spare(max(self._file_bytes, (need + BLOCK - 1) // BLOCK * BLOCK), False)
            except OSError as error:
                if not is_full(error) or not (found := self._fitting(need)):
                    raise
                self.short = True
                return found
            self.short = False
            return made

    def _fitting(self, need: int) -> tuple[str, int] | None:
        with self._lock:
            for number, (_, size) in enumerate(self._stock):
                if size >= need:
                    return self._stock.pop(number)
        return None

    def _make_spare(self, size: int, fill: bool) -> tuple[str, int]:
        disk = self._disk
        number = 0
        while os.path.exists(path := os.path.join(self._directory, f"new-{number}{SPARE}")):
            number += 1
        temporary = path + TEMPORARY
        disk.unlink(temporary)
        fd = disk.create(temporary)
        try:
            disk.preallocate(fd, size, fill)
            disk.sync_file(fd)
            disk.rename(temporary, path)
        except OSError:
            disk.unlink(temporary)
            raise
        finally:
            disk.close(fd)
        disk.sync_directory(self._directory)
        return path, size

    def recycle(self, epoch: int) -> bool:
        """Recycle a file whose content is durable elsewhere or dead: to the stock, or unlinked. Twice is harmless.

        False while pins hold it: then the last `unpin` does it. Unlinking a big file takes milliseconds.
        """
        with self._lock:
            file = self._files.get(epoch)
            if file is None:
                return True
            if not file.doom():
                return False
            del self._files[epoch]
        self._retire(epoch, file)
        return True

    def _retire(self, epoch: int, file: _File) -> None:
        disk = self._disk
        disk.close(file.fd)
        with self._lock:
            keep = file.bytes == self._file_bytes and len(self._stock) < self._stock_max
        if keep:
            # The new name is durable before the stock offers the space: bytes of the next use never stand under the
            # old name.
            spare = os.path.join(self._directory, f"{epoch:016x}{SPARE}")
            disk.rename(file.path, spare)
            disk.sync_directory(self._directory)
            with self._lock:
                self._stock.append((spare, file.bytes))
        else:
            disk.unlink(file.path)
            disk.sync_directory(self._directory)

    def pin(self, epoch: int) -> None:
        """Promise to read `epoch`: it stays until `unpin`. Raises `Gone` when it is recycled or about to be."""
        with self._lock:
            file = self._files.get(epoch)
            if file is None or file.doomed:
                raise Gone(f"WAL file {epoch} was recycled")
            file.pin()

    def unpin(self, epoch: int) -> None:
        """End one promise; the last one lets a recycled file go."""
        with self._lock:
            file = self._files[epoch]
            if not file.unpin():
                return
            del self._files[epoch]
        self._retire(epoch, file)

    def read(self, epoch: int, offset: int, length: int) -> bytes:
        """Return payload bytes, whose hash the caller checks. Raises `Gone`, or `Corrupt` when the disk can't give
        them."""
        self.pin(epoch)
        try:
            file = self._files[epoch]
            try:
                found = self._disk.read(file.fd, length, offset)
            except OSError as error:
                raise unreadable(file.path, offset, f"{length} readable bytes", error) from error
            if len(found) != length:
                raise Corrupt(file.path, offset, f"{length} bytes", len(found))
            return found
        finally:
            self.unpin(epoch)

    @property
    def listing(self) -> list[tuple[int, int]]:
        """(epoch, bytes) of the files in use, oldest first."""
        with self._lock:
            return sorted((epoch, file.bytes) for epoch, file in self._files.items())

    def path(self, epoch: int) -> str:
        """Return where a file in use lies."""
        return self._files[epoch].path

    def descriptor(self, epoch: int) -> tuple[int, int]:
        """Return (descriptor, bytes) of a file that is there."""
        file = self._files[epoch]
        return file.fd, file.bytes

    def allocated_bytes(self) -> int:
        """Return the bytes of disk the directory holds, spares included."""
        with self._lock:
            used = sum(file.bytes for file in self._files.values())
        return used + self.spare_bytes

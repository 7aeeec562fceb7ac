"""The journal of payload environments in use: which one was the process inside when it died?

A mapped page that cannot be read kills the process (SIGBUS), and so may a damaged tree page; no exception tells
which environment it was. So an environment gets a slot here before it is opened, and the slot is set while a thread
is inside. The file is a shared mapping: its bytes outlive the process without a sync. A plain kill may hit the same
instant, so what `open` returns is only *suspected*: `store` probes it in a child process. Invariant: a process
inside an environment has that slot set. Called by `generation` and `catalog`.
"""

from __future__ import annotations

import mmap
import os
import struct

IN_USE = "in-use"
IN_USE_WRITER = "in-use.writer"
"""Journals in a store's directory: of the process that has it, and of its writer process."""
_MAGIC = b"logyard-journal1"
_SLOT = struct.Struct("<QQ")
"""generation, 1 while a thread is inside (a whole word: torn by nothing)."""
_BYTES = 16 << 10
"""Of the file, and by which it grows: as many slots as generations are open, and these are all there are."""


class Journal:
    """A file of slots. Not thread-safe but for `mark` and `leave`, whose callers hold their generation's lock."""

    __slots__ = ("path", "_map", "_free")

    def __init__(self, path: str) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self._free: list[int] = []

    def open(self) -> list[int]:
        """Map the file and clear it; return the generations that the last process was inside of, rising. It keeps its
        size: a start on a full disk needs no more than there is."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            old = os.pread(fd, os.fstat(fd).st_size, 0)
            size = max(_BYTES, len(old) // _BYTES * _BYTES) if old.startswith(_MAGIC) else _BYTES
            os.truncate(fd, size)
            # Through a map a full disk is a signal that kills; here it is an error.
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._map[:] = _MAGIC + bytes(size - len(_MAGIC))
        self._free = list(range(_slots(size) - 1, -1, -1))
        return _suspects(old)

    def enter(self, generation: int) -> int:
        """Return a slot for an environment that is about to be opened; it counts as inside until `mark(slot,
        False)`. Raises OSError when there is none and the file can't grow."""
        assert self._map is not None, "the journal is closed"
        if not self._free:
            self._grow(len(self._map))
        slot = self._free.pop()
        _SLOT.pack_into(self._map, len(_MAGIC) + slot * _SLOT.size, generation, 1)
        return slot

    def _grow(self, size: int) -> None:
        fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size + _BYTES)
            # Who marks through the former map meanwhile writes to the same file. It goes with its last user.
            self._map = mmap.mmap(fd, size + _BYTES)
        finally:
            os.close(fd)
        self._free += range(_slots(size + _BYTES) - 1, _slots(size) - 1, -1)

    def mark(self, slot: int, inside: bool) -> None:
        """Record that a thread goes into the environment, or that the last one left it."""
        if self._map is not None:
            self._map[len(_MAGIC) + slot * _SLOT.size + 8] = inside

    def leave(self, slot: int) -> None:
        """Record that the environment is closed."""
        if self._map is not None:
            _SLOT.pack_into(self._map, len(_MAGIC) + slot * _SLOT.size, 0, 0)
            self._free.append(slot)

    def close(self) -> None:
        """Unmap; nothing is suspected of a process that ends this way."""
        if self._map is not None:
            self._map.close()
            self._map = None


def take_suspects(path: str) -> list[int]:
    """Return what the journal of another process, which is dead, says as `Journal.open` does; the journal is
    removed."""
    try:
        with open(path, "rb") as file:
            found = _suspects(file.read())
        os.unlink(path)
    except FileNotFoundError:
        return []
    return found


def _slots(size: int) -> int:
    return (size - len(_MAGIC)) // _SLOT.size


def _suspects(old: bytes) -> list[int]:
    if not old.startswith(_MAGIC):
        return []
    slots = old[len(_MAGIC) : len(_MAGIC) + _slots(len(old)) * _SLOT.size]
    return sorted({generation for generation, inside in _SLOT.iter_unpack(slots) if inside})

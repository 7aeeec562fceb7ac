"""The large bodies of a generation: one file that only grows, beside the environment whose rows say where they lie.

Invariant: what a row names is durable before the row is committed, and is never written again: it ends where the row
says that is committed with it (`ends`). What lies behind (left of a crash, or of a transaction that was given up) is
nobody's, and written over. The file proves nothing: the row has the hash of the bytes with their place. Written
around the page cache, which costs a twentieth of what LMDB takes for the same bytes (docs/performance.md).
Used by `generation`, with one writer at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol

from .layout import Buffer, aligned

NAME = "bodies"
STAGE_BYTES = 2 << 20
OFFSET_MAX = (1 << 63) - 1


class BodiesDoor(Protocol):
    """What writing takes of the engine's disk door."""

    def create(self, path: str, /) -> int:
        """Return a descriptor of a new, empty file."""
        ...

    def open_direct(self, path: str, /) -> int:
        """Return a descriptor whose writes bypass the page cache; -1 where there is no such thing."""
        ...

    def open_file(self, path: str, /, *, write: bool = False) -> int:
        """Return a descriptor of a file that is there."""
        ...

    def direct_memory(self, size: int, /) -> memoryview:
        """Return aligned memory."""
        ...

    def direct_write(self, fd: int, memory: memoryview, offset: int, /) -> None:
        """Write aligned memory."""
        ...

    def gather_write(self, fd: int, buffers: Iterable[Buffer], offset: int, /) -> int:
        """Write buffers."""
        ...

    def datasync(self, fd: int, /) -> None:
        """Make what was written durable."""
        ...

    def revalidate(self, path: str, /) -> None:
        """Have what is read next of a file be what the disk has."""
        ...

    def close(self, fd: int, /) -> None:
        """Close a descriptor."""
        ...


class Unwritten(Exception):
    """What was taken did not become durable: `cause` says why."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Bodies:
    """Of the generation in `directory`. `open` makes it usable, with a `door` for writing too. Raises `OSError`."""

    __slots__ = (
        "path", "_door", "_fd", "_write", "_direct", "_stage", "_start", "_written", "_staged", "doubtful",
    )  # fmt: skip

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, NAME)
        self._door: BodiesDoor | None = None
        self._fd = self._write = -1
        self._direct = False
        self._stage = memoryview(b"")
        # Where the batch begins; how much of it is written, and how much waits in the stage.
        self._start = self._written = self._staged = 0
        # A batch, or the commit that names one, failed: what the descriptor and the page cache say counts for nothing.
        self.doubtful = False

    def create(self, door: BodiesDoor) -> None:
        """Make the empty file; durable with its directory."""
        door.close(door.create(self.path))

    def moved(self, directory: str) -> None:
        """Know that the generation has its name now."""
        self.path = os.path.join(directory, NAME)

    def open(self, door: BodiesDoor | None) -> int:
        """Open for reading, and by a door for writing, from `begin` on; return the file's bytes."""
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._door = door
        if door is not None:
            self._open_write(door)
        return os.fstat(self._fd).st_size

    def _open_write(self, door: BodiesDoor) -> None:
        self._write = door.open_direct(self.path)
        self._direct = self._write >= 0
        if not self._direct:
            self._write = door.open_file(self.path, write=True)

    def doubt(self) -> None:
        """Know that the commit failed that may have named what was written: `reopen` before more is."""
        self.doubtful = True

    def reopen(self) -> int:
        """Open for writing as at a start, after something failed; return the file's bytes. The disk is asked for them:
        after a failed sync the page cache calls clean what never got there. Readers keep theirs: it has nothing but
        the file. Raises OSError while the disk still fails; it is to be called again then."""
        assert self._door is not None, "not open for writing"
        self.drop()
        write, self._write = self._write, -1
        if write >= 0:
            self._door.close(write)
        self._door.revalidate(self.path)
        self._open_write(self._door)
        return os.fstat(self._fd).st_size

    def begin(self, end: int) -> None:
        """Write behind `end` from now on."""
        self._start = aligned(end)
        self.doubtful = False

    @property
    def waits(self) -> bool:
        """Whether something was taken that is not durable."""
        return self._written + self._staged > 0

    @property
    def end(self) -> int:
        """Where the file ends with what is not durable yet."""
        return self._start + self._written + self._staged

    def append(self, body: Buffer) -> int:
        """Take a copy of bytes; return where they will lie. Raises `Unwritten`: none since `flush` was taken then."""
        place = self.end
        if not self._stage:
            self._stage = self._new_stage()
        left = memoryview(body)
        while len(left):
            part = left[: STAGE_BYTES - self._staged]
            self._stage[self._staged : self._staged + len(part)] = part
            self._staged += len(part)
            left = left[len(part) :]
            if self._staged == STAGE_BYTES:
                self._write_stage()
        return place

    def _new_stage(self) -> memoryview:
        assert self._door is not None, "not open for writing"
        try:
            return self._door.direct_memory(STAGE_BYTES)
        except OSError as error:
            raise self._unwritten(error) from error

    def flush(self) -> int:
        """Make what was taken durable; return where it ends. Raises `Unwritten`: it was not taken then."""
        if not self.waits:
            return self._start
        assert self._door is not None, "not open for writing"
        end = self.end
        if self._staged:
            self._write_stage()
        try:
            self._door.datasync(self._write)
        except OSError as error:
            raise self._unwritten(error) from error
        self._start = aligned(end)
        self._written = self._staged = 0
        return end

    def _write_stage(self) -> None:
        """Write what the stage has, up to whole pages."""
        assert self._door is not None, "not open for writing"
        size = aligned(self._staged)
        self._stage[self._staged : size] = bytes(size - self._staged)
        part, place = self._stage[:size], self._start + self._written
        try:
            if self._direct:
                self._door.direct_write(self._write, part, place)
            else:
                self._door.gather_write(self._write, [part], place)
        except OSError as error:
            raise self._unwritten(error) from error
        self._written += self._staged
        self._staged = 0

    def _unwritten(self, error: OSError) -> Unwritten:
        self.drop()
        self.doubtful = True
        return Unwritten(error)

    def drop(self) -> None:
        """Forget what was taken and not made durable, and give the stage's memory back."""
        self._written = self._staged = 0
        self._stage = memoryview(b"")

    def read(self, place: int, length: int) -> bytes:
        """Return bytes; fewer where the file ends. No file reaches beyond `OFFSET_MAX`, whatever a row says."""
        if place > OFFSET_MAX:
            return b""
        found = os.pread(self._fd, length, place)
        while len(found) < length:
            more = os.pread(self._fd, length - len(found), place + len(found))
            if not more:
                break
            found += more
        return found

    def close(self) -> None:
        """Close the file."""
        self.drop()
        if self._write >= 0:
            assert self._door is not None
            self._door.close(self._write)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = self._write = -1

"""Judging a generation's bytes: a full, verifying scan of its rows, and a check of its file before LMDB maps it.

Invariant: what is counted here was verified row by row, and only whole entries count. Called by `generation`; the
counters of `store` must equal what this finds (invariant tests, `logyard check`).
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from logyard.protocol.errors import SHORT, GenerationFailed, GenerationUnfinished, PayloadCorrupt, StoreShort

from . import layout
from .free_pages import EMPTY, BadPage, free_pages
from .layout import KEY
from .ledger import ENTRY_SLOT, Columns

_META = struct.Struct("<IIQQ48s48sQQ")
"""LMDB 0.9's meta page after its 16-byte page header: magic, version, address, map bytes, two trees, last page,
transaction."""
_MAGIC = 0xBEEFC0DE
_ABSENT_MAX = 1 << 20
"""Pages that are looked for among the free ones."""


class Counts(NamedTuple):
    """What `recount` finds in a generation, from its rows and not from any counter."""

    entries: int
    total: int
    live: int


class Measured(NamedTuple):
    """A full scan's result: the slots of each run by group, whole entries, what does not verify or is not whole, and
    (run, uid, index) of the entries with a row that does not verify; of the generation's own rows (0, 0, 0)."""

    runs: dict[int, Columns]
    entries: int
    damage: list[str]
    bad: set[tuple[int, int, int]]

    @property
    def total(self) -> int:
        """Bytes of all slots."""
        return sum(columns.total for columns in self.runs.values())


class Measuring:
    """Feed it every row in key order."""

    __slots__ = ("path", "_form", "_placed", "_runs", "_entries", "_damage", "_bad", "_open", "_wanted", "_slots",
                 "_listed", "_ledger", "places")  # fmt: skip

    def __init__(self, path: str, form: int, placed: Callable[[bytes, bytes], tuple[int, bytes]]) -> None:
        """Take what reads and verifies a piece in the file beside, by key and value of its row."""
        self.path = path
        self._form = form
        self._placed = placed
        self._runs: dict[int, Columns] = {}
        self._entries = 0
        self._damage: list[str] = []
        self._bad: set[tuple[int, int, int]] = set()
        self._open: tuple[int, int, int] | None = None
        self._wanted: set[tuple[int, int]] = set()
        self._slots: list[tuple[int, int]] = []
        # The ledger of each run, packed as it is stored; it comes before all entries. And that of a run, unpacked.
        self._listed: dict[int, list[bytes]] = {}
        self._ledger = (layout.OWN, Columns())
        # Rows that name bytes in the file beside.
        self.places = 0

    def visit(self, key: bytes, value: memoryview) -> int:
        """Count one row, still in the map; return how many bytes were read."""
        size = len(value)
        run, uid, index, _, unit, piece = KEY.unpack(key)
        try:
            if run == layout.OWN:
                body = layout.unwrap(self.path, key, value)
                if uid == layout.LEDGER:
                    self._listed.setdefault(index, []).append(bytes(body))
            elif not unit:
                self._close()
                entry = layout.parse_entry(self.path, key, value, bodies=False)
                self._open = (run, uid, index)
                overhead = layout.ENTRY_ROW.size + layout.UNIT_ROW.size * len(entry.units) + len(entry.data)
                self._slots = [(found.number, found.length) for found in entry.units] + [(ENTRY_SLOT, overhead)]
                self._wanted = {
                    (found.number + 1, number)
                    for found in entry.units
                    if found.at < 0
                    for number in range(len(layout.piece_lengths(found.length, self._form)))
                }
            else:
                if layout.parse_place(self.path, key, value, self._form) is None:
                    layout.parse_piece(self.path, key, value)
                else:
                    self.places += 1
                    size += len(self._placed(key, bytes(value))[1])
                if self._open == (run, uid, index):
                    self._wanted.discard((unit, piece))
        except PayloadCorrupt as error:
            self._damage.append(str(error))
            self._bad.add((run, uid, index) if run != layout.OWN else (0, 0, 0))
        return size

    def _close(self) -> None:
        """Close the open entry, which is complete, or is not."""
        if self._open is None:
            return
        run, uid, index = self._open
        if self._wanted:
            # A part of an entry that no ledger names is what an earlier life left, and counts nowhere.
            if self._counts(run, uid, index):
                self._damage.append(f"{self.path}: entry {index} of group {uid:016x} lacks {len(self._wanted)} rows")
        else:
            columns = self._runs.setdefault(run, Columns())
            for unit, size in self._slots:
                columns.add(uid, index, unit, size)
            self._entries += 1
        self._open = None

    def _counts(self, run: int, uid: int, index: int) -> bool:
        """Return whether a ledger names an entry."""
        if self._ledger[0] != run:
            self._ledger = (run, Columns())
            for body in self._listed.get(run, ()):
                self._ledger[1].merge(memoryview(body))
        group = self._ledger[1].groups.get(uid)
        if group is None:
            return False
        at = bisect_left(group[0], index)
        return at < len(group[0]) and group[0][at] == index

    def finish(self, lacks: str = "") -> Measured:
        """Return what was measured, after the last row. `lacks`: which of the generation's own rows is not there."""
        self._close()
        if lacks:
            self._damage.append(f"{self.path}: it lacks {lacks}")
            self._bad.add((0, 0, 0))
        return Measured(self._runs, self._entries, self._damage, self._bad)


def check_file(path: str) -> None:
    """Refuse a data file that was cut: touching the map behind its end would kill the process (SIGBUS). It may be
    shorter than its own meta page says by pages that are free: those are never touched."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in SHORT:
            raise StoreShort(f"{path}: {error}") from error
        raise GenerationFailed(path, f"it cannot be opened: {error}") from error
    try:
        metas = _metas(fd)
        while True:
            # Behind the meta pages: a writer makes the file longer first.
            size = os.fstat(fd).st_size
            problem = _cut(fd, size, metas)
            before, metas = metas, _metas(fd)
            # What a writer changed meanwhile says nothing about the file.
            if not problem or metas == before:
                break
    except OSError as error:
        if error.errno in SHORT:
            raise StoreShort(f"{path}: {error}") from error
        raise GenerationFailed(path, f"it cannot be read: {error}") from error
    finally:
        os.close(fd)
    if size < 2 * layout.PAGE:
        raise GenerationUnfinished(path, "its creation did not finish")
    if problem:
        raise GenerationFailed(path, problem)


def _metas(fd: int) -> list[tuple[int, int, int]]:
    """Return (transaction, last page, root of the free pages) of each meta page."""
    metas = []
    for page in (0, 1):
        body = os.pread(fd, _META.size, page * layout.PAGE + layout.PAGE_HEAD)
        if len(body) == _META.size:
            magic, version, _, _, free, _, last_page, transaction = _META.unpack(body)
            if magic == _MAGIC:
                root = int.from_bytes(free[-8:], "little")
                metas.append((transaction, last_page, root) if version == 1 else (0, 0, EMPTY))
    return metas


def _cut(fd: int, size: int, metas: list[tuple[int, int, int]]) -> str:
    """Return what is wrong with a file of so many bytes."""
    if not metas:
        return "neither of its meta pages is one"
    _, last_page, root = max(metas)
    first, problem = size // layout.PAGE, f"it has {size} bytes and says {(last_page + 1) * layout.PAGE}: it was cut"
    if first > last_page:
        return ""
    if last_page - first >= _ABSENT_MAX:
        return problem
    try:
        free = free_pages(fd, root)
    except BadPage:
        return problem
    return "" if all(page in free for page in range(first, last_page + 1)) else problem

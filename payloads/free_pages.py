"""Which pages of an LMDB data file its own list of free pages names, read from the file and not through a map.

A transaction that takes pages at the end of the file and frees them again before it commits never writes them: the file
is then shorter than its meta page says, and whole all the same. Called by `measuring.check_file`, for such files only.
"""

from __future__ import annotations

import os
import struct

from .layout import PAGE, PAGE_HEAD

HEAD = struct.Struct("<8xHHHH")
"""LMDB 0.9's page header: number, padding, flags, lower and upper end of the free space (a count on overflow pages)."""
NODE = struct.Struct("<HHHH")
NUMBER = struct.Struct("<Q")
BRANCH, LEAF = 1, 2
BIG = 1
"""Flag of a node whose data lies on pages of its own."""
EMPTY = (1 << 64) - 1
DEPTH_MAX = 32


class BadPage(Exception):
    """The list can't be read: the file is cut, or damaged."""


def free_pages(fd: int, root: int) -> set[int]:
    """Return all free pages below the root of the list. Raises `BadPage`, OSError."""
    found: set[int] = set()
    if root != EMPTY:
        _walk(fd, root, found, DEPTH_MAX)
    return found


def _walk(fd: int, number: int, found: set[int], depth: int) -> None:
    page = _read(fd, number * PAGE, PAGE)
    _, flags, lower, upper = HEAD.unpack_from(page)
    if not depth or not flags & (BRANCH | LEAF) or not PAGE_HEAD <= lower <= upper <= PAGE:
        raise BadPage(f"page {number}")
    for at in range(PAGE_HEAD, lower, 2):
        start = int.from_bytes(page[at : at + 2], "little")
        if not upper <= start <= PAGE - NODE.size:
            raise BadPage(f"page {number}")
        low, high, kind, key = NODE.unpack_from(page, start)
        if flags & BRANCH:
            _walk(fd, low | high << 16 | kind << 32, found, depth - 1)
            continue
        size, data = low | high << 16, start + NODE.size + key
        if kind & BIG:
            numbers = _read(fd, NUMBER.unpack_from(page, data)[0] * PAGE + PAGE_HEAD, size)
        else:
            numbers = page[data : data + size]
        # A count, then as many numbers.
        if size % NUMBER.size or len(numbers) != size or not size:
            raise BadPage(f"page {number}")
        (count,) = NUMBER.unpack_from(numbers)
        if (count + 1) * NUMBER.size > size:
            raise BadPage(f"page {number}")
        found.update(one for (one,) in NUMBER.iter_unpack(numbers[NUMBER.size : (count + 1) * NUMBER.size]))


def _read(fd: int, offset: int, length: int) -> bytes:
    found = os.pread(fd, length, offset) if offset < 1 << 62 else b""
    if len(found) != length:
        raise BadPage(f"nothing at {offset}")
    return found

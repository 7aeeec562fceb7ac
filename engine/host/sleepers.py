"""The table of hibernating groups: one packed row each, and the digests by which two nodes know that they agree.

Invariants: a group is in this table or a `Member`, never both; the sum kept for a node is that of `mark(uid, term)`
over the rows it concerns, whatever the order they came and went in (architecture section 9). No I/O, no clock; the
verbs are in `hibernation`.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

ROW = struct.Struct("<QQQQQIII")
MARK = struct.Struct("<QQ")
MASK = (1 << 64) - 1
BUCKETS = 256


class Shape(NamedTuple):
    """What many groups have in common: kept once. `asleep` are the followers that sleep under this leader, `absent`
    those that could not be asked. On a follower both are empty."""

    voters: tuple[int, ...]
    learners: tuple[int, ...]
    asleep: tuple[int, ...]
    absent: tuple[int, ...]
    machine: str


class Row(NamedTuple):
    """A hibernating group: everything committed and applied is at `last`, in a durable snapshot of `size` bytes.

    `leader` 0: nobody is known to lead; the first use elects. `due`: log time of its next timer in ms, 0 for none.
    `start` and `end` are those of a machine that is a log.
    """

    term: int
    last: int
    due: int
    start: int
    end: int
    leader: int
    size: int
    shape: Shape


def mark(uid: int, term: int) -> int:
    """A group's share of a digest."""
    return xxh3_64_intdigest(MARK.pack(uid, term))


def bucket(uid: int) -> int:
    """Which part of a digest a group is in."""
    return (uid >> 8) % BUCKETS


class Sleepers:
    """Rows by uid. `led_with[node]` is the sum over the groups that this node leads and `node` sleeps in,
    `under[node]` over those that this node sleeps in under `node`. `led` counts groups, `entries` and `bytes` sum what
    rows say of their last index and snapshot."""

    __slots__ = ("node", "led", "entries", "bytes", "led_with", "under", "_rows", "_shapes", "_numbers")

    def __init__(self, node: int) -> None:
        self.node = node
        self.led = self.entries = self.bytes = 0
        self.led_with: dict[int, int] = {}
        self.under: dict[int, int] = {}
        self._rows: dict[int, bytes] = {}
        self._shapes: list[Shape] = []
        self._numbers: dict[Shape, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, uid: int) -> bool:
        return uid in self._rows

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._rows))

    def row(self, uid: int) -> Row:
        """A group's row."""
        return self._unpack(self._rows[uid])

    def _unpack(self, packed: bytes) -> Row:
        term, last, due, start, end, leader, size, shape = ROW.unpack(packed)
        return Row(term, last, due, start, end, leader, size, self._shapes[shape])

    def rows(self) -> Iterator[tuple[int, Row]]:
        """All of them; the table may change meanwhile."""
        for uid, packed in list(self._rows.items()):
            yield uid, self._unpack(packed)

    def add(self, uid: int, row: Row) -> None:
        """A group goes to sleep."""
        assert uid not in self._rows
        number = self._numbers.get(row.shape)
        if number is None:
            number = self._numbers[row.shape] = len(self._shapes)
            self._shapes.append(row.shape)
        self._rows[uid] = ROW.pack(*row[:-1], number)
        self._count(uid, row, 1)

    def pop(self, uid: int) -> Row | None:
        """A group wakes, or goes."""
        if uid not in self._rows:
            return None
        row = self.row(uid)
        del self._rows[uid]
        self._count(uid, row, -1)
        return row

    def follow(self, uid: int, leader: int) -> None:
        """Another leader, or none (0), from now on."""
        row = self.pop(uid)
        assert row is not None
        self.add(uid, row._replace(leader=leader))

    def _count(self, uid: int, row: Row, sign: int) -> None:
        self.entries += sign * row.last
        self.bytes += sign * row.size
        self.led += sign * (row.leader == self.node)
        if not row.leader:
            return
        share = sign * mark(uid, row.term)
        if row.leader != self.node:
            self.under[row.leader] = (self.under.get(row.leader, 0) + share) & MASK
            return
        for node in row.shape.asleep:
            self.led_with[node] = (self.led_with.get(node, 0) + share) & MASK

    def between(self, leader: int, follower: int) -> Iterator[tuple[int, Row]]:
        """The groups behind the digest of `leader` for `follower`; one of the two is this node."""
        for uid, row in self.rows():
            if row.leader == leader and (follower == self.node or follower in row.shape.asleep):
                yield uid, row

    def parts(self, leader: int, follower: int) -> dict[int, int]:
        """The same digest by bucket, empty ones left out."""
        found: dict[int, int] = {}
        for uid, row in self.between(leader, follower):
            found[bucket(uid)] = (found.get(bucket(uid), 0) + mark(uid, row.term)) & MASK
        return {number: total for number, total in found.items() if total}


def quorum_lives(shape: Shape, live: Container[int]) -> bool:
    """Whether a majority of a group's voters is alive. (A joint configuration never sleeps.)"""
    return 2 * sum(1 for node in shape.voters if node in live) > len(shape.voters)

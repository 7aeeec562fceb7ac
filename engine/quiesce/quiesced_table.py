"""The table of quiesced groups: one packed row each, and the digests by which two nodes know that they agree.

Invariants: a group is in this table or a `Member`, never both; the sum kept for a node is that of `mark(uid, term)`
over the rows it concerns, whatever the order they came and went in (docs/internals/hosting.md). Rows are in an
SQLite database in memory, and no Python object is kept for any of them: a few small ones for each, made while members
end, would lie in the allocator's arenas that these leave, and keep them all. No I/O, no clock; what
comes with a row is in `transitions`.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from ..log.meta_rows import StateRow
from ..raft.configuration import Configuration
from ..recovery.rebuild import log_base
from ..replica.member import Member
from ..types import Spec

MARK = struct.Struct("<QQ")
MASK = (1 << 64) - 1
BUCKETS = 256
PAGE = 256
"""Rows that a walk over the table takes at once."""
LOWEST = -(1 << 63)
TABLE = """CREATE TABLE rows (
    uid INTEGER PRIMARY KEY, term INT, last INT, due INT, start INT, "end" INT, leader INT, size INT, shape INT,
    name TEXT, since_ms INT, under INT, epoch INT
)"""

LED = "(leader != 0 OR under != 0)"
"""Of an expression for `QuiescedTable.rows`: the rows are found by their leader, without a look at the many that were
never used."""
BY_NAME = "CREATE INDEX by_name ON rows (name)"
BY_LEADER = f"CREATE INDEX by_leader ON rows (leader) WHERE {LED}"
INSERT = "INSERT INTO rows VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)"


class Shape(NamedTuple):
    """What many groups have in common: kept once. `asleep` are the followers that sleep under this leader, `absent`
    those that could not be asked. On a follower both are empty."""

    voters: tuple[int, ...]
    learners: tuple[int, ...]
    asleep: tuple[int, ...]
    absent: tuple[int, ...]
    machine: str


class Row(NamedTuple):
    """A quiesced group: everything committed and applied is at `last`, in a durable snapshot of `size` bytes.

    `leader` 0: nobody is known to lead; the first use elects. `due`: log time of its next timer in ms, 0 for none.
    `start` and `end` are those of a machine that is a log (`log_bounds`). `since_ms`: since when `leader` leads. After
    a restart, `under` and `epoch` say which process led the group before. `last` 0: it was never used.
    """

    term: int
    last: int
    due: int
    start: int
    end: int
    leader: int
    size: int
    shape: Shape
    name: str = ""
    since_ms: int = 0
    under: int = 0
    epoch: int = 0

    def stored(self, epoch: int) -> list[int]:
        """Return what a state row keeps of it; `epoch` is that of its leader's process."""
        return [self.leader, epoch, self.due, self.start, self.end, self.size]


def row_of(member: Member, leader: int, asleep: Iterable[int] = (), absent: Iterable[int] = ()) -> Row:
    """Return what is left of a member that sleeps under `leader`."""
    raft, machine, kept = member.raft, member.machine, member.kept
    voters, learners = raft.configuration.voters, raft.configuration.learners
    shape = Shape(voters, learners, tuple(sorted(asleep)), tuple(sorted(absent)), member.spec.machine)
    due = min(kept.timers.values(), default=0) if kept is not None else 0
    # Not by names that any machine may have for something else.
    bounds = getattr(machine, "log_bounds", None)
    start, end = (0, 0) if bounds is None else bounds()
    return Row(raft.term, raft.log.last_index, due, start, end, leader, member.snapshot_bytes, shape, member.spec.name)


def row_again(spec: Spec, state: StateRow) -> tuple[Row, int]:
    """Return the row of a group that slept when this node ended, and the log time (ms) at which it went to sleep.
    Nobody leads it until its leader is met again."""
    leader, epoch, due, start, end, size = state.extra["asleep"]
    configuration = Configuration.decode(state.extra["configurations"][0][2])
    shape = Shape(configuration.voters, configuration.learners, (), (), spec.machine)
    last = int(log_base(state)[0])
    row = Row(state.term, last, due, start, end, 0, size, shape, spec.name, under=leader, epoch=epoch)
    return row, state.extra.get("slept", 0)


def row_fresh(spec: Spec) -> Row:
    """Return the row of a group that nobody has used yet: its definition is all there is of it."""
    return Row(0, 0, 0, 0, 0, 0, 0, Shape(spec.voters, (), (), (), spec.machine), spec.name)


def mark(uid: int, term: int) -> int:
    """Return a group's share of a digest."""
    return xxh3_64_intdigest(MARK.pack(uid, term))


def bucket(uid: int) -> int:
    """Return which part of a digest a group is in."""
    return (uid >> 8) % BUCKETS


class QuiescedTable:
    """Rows by uid. `led_with[node]` is the sum over the groups that this node leads and `node` sleeps in,
    `under[node]` over those that this node sleeps in under `node`. `led` counts groups, `entries` and `bytes` sum what
    rows say of their last index and snapshot."""

    __slots__ = (
        "node", "led", "entries", "bytes", "led_with", "under", "_count", "_turn", "_table", "_shapes", "_numbers",
    )  # fmt: skip

    def __init__(self, node: int) -> None:
        self.node = node
        self.led = self.entries = self.bytes = 0
        self.led_with: dict[int, int] = {}
        self.under: dict[int, int] = {}
        self._count = 0
        # How many came or went.
        self._turn = 0
        # Recovery fills it in a thread; from then on it is the loop's.
        self._table = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        for statement in ("PRAGMA journal_mode = OFF", TABLE, BY_NAME, BY_LEADER):
            self._table.execute(statement)
        self._shapes: list[Shape] = []
        self._numbers: dict[Shape, int] = {}

    def __len__(self) -> int:
        return self._count

    def __contains__(self, uid: int) -> bool:
        return self._count > 0 and self._find(uid, "uid") is not None

    def __iter__(self) -> Iterator[int]:
        return (uid for uid, _ in self.rows())

    def _find(self, uid: int, columns: str) -> tuple[Any, ...] | None:
        found: tuple[Any, ...] | None = self._table.execute(
            f"SELECT {columns} FROM rows WHERE uid = ?", (_signed(uid),)
        ).fetchone()
        return found

    def row(self, uid: int) -> Row:
        """Return a group's row. Raises KeyError."""
        found = self._find(uid, "*")
        if found is None:
            raise KeyError(uid)
        return self._row(found)

    def leader_of(self, uid: int) -> int:
        """Return whom a group sleeps under, 0 for nobody. Raises KeyError."""
        return self.row(uid).leader

    def _row(self, found: tuple[Any, ...]) -> Row:
        _, term, last, due, start, end, leader, size, shape, name, since_ms, under, epoch = found
        return Row(term, last, due, start, end, leader, size, self._shapes[shape], name, since_ms, under, epoch)

    def rows(self, where: str = "1", *values: int) -> Iterator[tuple[int, Row]]:
        """Yield those for which an SQL expression holds, in steps. Groups may come and go meanwhile: who went before
        its turn is not among them."""
        after = LOWEST
        query = f"SELECT * FROM rows WHERE uid >= ? AND ({where}) ORDER BY uid LIMIT {PAGE}"
        while True:
            found = self._table.execute(query, (after, *values)).fetchall()
            turn = self._turn
            for columns in found:
                yield columns[0] & MASK, self._row(columns)
                if columns[0] == -LOWEST - 1:
                    return
                after = columns[0] + 1
                if self._turn != turn:
                    # What was read of the others may not hold any more.
                    break
            else:
                if len(found) < PAGE:
                    return

    def bounds(self, machine: str) -> Iterator[tuple[str, int, int, int, int]]:
        """Yield (name, uid, leader, start, end) of the groups with that machine, in steps; the table may change
        meanwhile."""
        after = LOWEST
        while True:
            found = self._table.execute(
                f'SELECT uid, name, leader, start, "end", shape FROM rows WHERE uid >= ? ORDER BY uid LIMIT {PAGE}',
                (after,),
            ).fetchall()
            for uid, name, leader, start, end, shape in found:
                if self._shapes[shape].machine == machine:
                    yield name, uid & MASK, leader, start, end
            if len(found) < PAGE or found[-1][0] == -LOWEST - 1:
                return
            after = found[-1][0] + 1

    def named(self, name: str) -> int:
        """Return the uid of a group, 0 for none."""
        found = self._table.execute("SELECT uid FROM rows WHERE name = ?", (name,)).fetchone() if self._count else None
        return 0 if found is None else int(found[0]) & MASK

    def names(self, after: str = "", limit: int = -1) -> list[str]:
        """Return at most so many names behind `after`, in order."""
        query = "SELECT name FROM rows WHERE name > ? ORDER BY name LIMIT ?"
        return [name for (name,) in self._table.execute(query, (after, limit))]

    def add(self, uid: int, row: Row) -> None:
        """Put in a group that goes to sleep."""
        self._table.execute(INSERT, (_signed(uid), *row[:7], self._number(row.shape), *row[8:]))
        self._count += 1
        self._turn += 1
        self._sum(uid, row, 1)

    def extend(self, rows: Iterable[tuple[int, Row]]) -> None:
        """Put in many; none of them is here."""
        added = list(rows)
        self._table.executemany(
            INSERT, ((_signed(uid), *row[:7], self._number(row.shape), *row[8:]) for uid, row in added)
        )
        self._count += len(added)
        self._turn += 1
        for uid, row in added:
            self._sum(uid, row, 1)

    def _number(self, shape: Shape) -> int:
        number = self._numbers.get(shape)
        if number is None:
            number = self._numbers[shape] = len(self._shapes)
            self._shapes.append(shape)
        return number

    def pop(self, uid: int) -> Row | None:
        """Take out a group that wakes, or goes; return its row, None when it does not sleep."""
        found = self._find(uid, "*") if self._count else None
        if found is None:
            return None
        row = self._row(found)
        self._table.execute("DELETE FROM rows WHERE uid = ?", (found[0],))
        self._count -= 1
        self._turn += 1
        self._sum(uid, row, -1)
        return row

    def follow(self, uid: int, leader: int) -> None:
        """Note another leader, or none (0), from now on."""
        row = self.row(uid)
        self._table.execute("UPDATE rows SET leader = ? WHERE uid = ?", (leader, _signed(uid)))
        self._sum(uid, row, -1)
        self._sum(uid, row._replace(leader=leader), 1)

    def _sum(self, uid: int, row: Row, sign: int) -> None:
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

    def led_where(self, holds: Callable[[Shape], bool]) -> Iterator[tuple[int, Row]]:
        """Yield the groups that this node leads and whose shape `holds`; the table may change meanwhile."""
        numbers = [str(number) for number, shape in enumerate(self._shapes) if holds(shape)]
        return self.rows(f"leader = {self.node} AND {LED} AND shape IN ({','.join(numbers)})") if numbers else iter(())

    def led_here(self) -> list[int]:
        """Return the groups that this node leads, in one go: tens of thousands are some milliseconds."""
        found = self._table.execute(f"SELECT uid FROM rows WHERE leader = {self.node} AND {LED}").fetchall()
        return [uid & MASK for (uid,) in found]

    def between(self, leader: int, follower: int) -> Iterator[tuple[int, Row]]:
        """Yield the groups behind the digest of `leader` for `follower`; one of the two is this node."""
        for uid, row in self.rows(f"leader = ? AND {LED}", leader):
            if follower == self.node or follower in row.shape.asleep:
                yield uid, row

    def parts(self, leader: int, follower: int) -> dict[int, int]:
        """Return the same digest by bucket, empty ones left out."""
        found: dict[int, int] = {}
        for uid, row in self.between(leader, follower):
            found[bucket(uid)] = (found.get(bucket(uid), 0) + mark(uid, row.term)) & MASK
        return {number: total for number, total in found.items() if total}

    def close(self) -> None:
        """Give the memory back."""
        self._table.close()


def _signed(uid: int) -> int:
    """Return a uid as SQLite has integers."""
    return uid - (1 << 64) if uid >> 63 else uid


def quorum_lives(shape: Shape, live: Container[int]) -> bool:
    """Return whether a majority of a group's voters is alive. (A joint configuration never sleeps.)"""
    return 2 * sum(1 for node in shape.voters if node in live) > len(shape.voters)

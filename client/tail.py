"""Following a log with a place that is yours to keep: what drives another database from it, each record exactly once.

A `Cursor` names a log by its uid as well, so that a log that was deleted and made anew under the same name is never
taken for the one whose place was kept. Store the cursor of a batch in the transaction that applies its records: after
a crash, what the database holds and where to go on agree. `SqliteCursor` does that for SQLite.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from logyard.protocol.errors import Refused
from logyard.protocol.records import Record

TAIL_WAIT_S = 5.0
"""How long one question for more records waits; then it is asked again."""


class Cursor(NamedTuple):
    """A place in a log: before the record at `offset` of the log `uid`."""

    uid: int
    offset: int


class Tailed(NamedTuple):
    """Records in order, without a gap among those that the log still has; `cursor` is the place behind them."""

    records: Sequence[Record]
    cursor: Cursor


CREATE = "CREATE TABLE IF NOT EXISTS {table} (name TEXT PRIMARY KEY, uid TEXT NOT NULL, place INTEGER NOT NULL)"


class SqliteCursor:
    """The place of one reader, kept in the reader's own SQLite database, in the table `table` under `name`.

    `move` writes within the caller's transaction and begins none that is not begun; so it is committed or rolled back
    with what was applied. Two programs that apply the same log to one database can't both move it: the later one's
    `move` raises `Refused`, and its transaction must be rolled back.
    """

    __slots__ = ("connection", "name", "table", "_at")

    def __init__(self, connection: sqlite3.Connection, name: str, table: str = "logyard_cursors") -> None:
        if not table.isidentifier():
            raise ValueError(f"{table!r} is no name of a table")
        self.connection = connection
        self.name = name
        self.table = table
        self._at: Cursor | None = None
        connection.execute(CREATE.format(table=table))
        connection.commit()

    def load(self) -> Cursor | None:
        """Return the place as it is stored, None before the first `move`."""
        row = self.connection.execute(f"SELECT uid, place FROM {self.table} WHERE name = ?", (self.name,)).fetchone()
        self._at = None if row is None else Cursor(int(row[0], 16), row[1])
        return self._at

    def move(self, to: Cursor) -> None:
        """Store the place behind what was applied since the last `load` or `move`. Raises `Refused` when it is not
        where this object left it."""
        if self._at is None:
            done = self.connection.execute(
                f"INSERT OR IGNORE INTO {self.table} (name, uid, place) VALUES (?, ?, ?)",
                (self.name, f"{to.uid:016x}", to.offset),
            )
        else:
            done = self.connection.execute(
                f"UPDATE {self.table} SET uid = ?, place = ? WHERE name = ? AND uid = ? AND place = ?",
                (f"{to.uid:016x}", to.offset, self.name, f"{self._at.uid:016x}", self._at.offset),
            )
        if done.rowcount != 1:
            raise Refused(f"the cursor {self.name!r} was moved by another program: roll back, and load it again")
        self._at = to

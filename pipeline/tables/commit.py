"""One table of Delta (delta-rs, no JVM) as a sink sees it: its newest batch, and one transaction for a batch's files.

Delta keeps for each application a version: here the sink's newest batch, and the number of the query that wrote it.
`write_deltalake` appends again under the same version: what is there already has to be looked up before, on the very
snapshot that is then committed on. Of two commits of one sink on one snapshot Delta refuses the second; so both
together are a fence. Used by `jobs.tables`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sink.record import Fenced, SinkError
from .files import Added, partitioned
from .kv_schema import BadTable
from .rules import Rules

if TYPE_CHECKING:
    import pyarrow

NOTES = "logyard"
"""Under this name a commit says what it is of, for people and for a batch that is repeated."""
TRIES = 10
HISTORY = 16
"""Commits that are looked through for a note; twice as many if it is not in them, and so on."""


def number_of(query: str) -> int:
    """Return a query's number, which Delta can keep."""
    return int.from_bytes(hashlib.blake2b(query.encode(), digest_size=7).digest())


class Table:
    """A snapshot of a table, loaded once, and committed on at most once. `sink` has no colon in it."""

    def __init__(self, path: Path, sink: str) -> None:
        self.path = path
        self.sink = sink
        self._load()

    def _load(self) -> None:
        import deltalake

        self._delta = deltalake.DeltaTable(str(self.path))
        self.batch: int | None = self._delta.transaction_version(self.sink)
        """The sink's newest batch; None: there is none."""
        self._query: int | None = self._delta.transaction_version(f"query:{self.sink}")

    def is_of(self, query: str) -> bool:
        """Return whether the sink's newest batch is this query's."""
        return self._query == number_of(query)

    def has(self, batch: int, query: str) -> bool:
        """Return whether a query's batch is there."""
        return self.is_of(query) and self.batch is not None and self.batch >= batch

    def commit(self, batch: int, query: str, added: Iterable[Added], notes: Mapping[str, Any]) -> None:
        """Add a batch's files, all in one transaction. Raises `Fenced` where another driver of this sink was faster."""
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import AddAction, CommitProperties, Transaction

        now = time.time_ns() // 1_000_000
        actions: list[Any] = [
            AddAction(one.path, one.size, one.values, now, True, json.dumps({"numRecords": one.rows})) for one in added
        ]
        properties = CommitProperties(
            {NOTES: {"sink": self.sink, "batch": batch, "query": query, **notes}},
            app_transactions=[Transaction(self.sink, batch), Transaction(f"query:{self.sink}", number_of(query))],
        )
        seen = self.batch, self._query
        for _ in range(TRIES):
            schema, columns = self._delta.schema(), self._delta.metadata().partition_columns
            try:
                self._delta.create_write_transaction(actions, "append", schema, columns, commit_properties=properties)
                return
            except CommitFailedError as error:
                failure = error
            # Another sink's columns came in between, or another driver of this one.
            self._load()
            if (self.batch, self._query) != seen:
                raise Fenced(
                    f"sink {self.sink!r}: {self.path}: another driver has committed batch {self.batch} meanwhile"
                )
        raise SinkError(f"sink {self.sink!r}: {self.path}: batch {batch} could not be committed: {failure}")

    def notes(self, batch: int, query: str) -> Mapping[str, Any]:
        """Return what the commit of a batch noted. Raises `SinkError`."""
        limit = HISTORY
        while True:
            found: list[dict[str, Any]] = self._delta.history(limit)
            for commit in found:
                notes = commit.get(NOTES, {})
                if (notes.get("sink"), notes.get("batch"), notes.get("query")) == (self.sink, batch, query):
                    return dict(notes)
            if len(found) < limit:
                raise SinkError(
                    f"sink {self.sink!r}: {self.path} has batch {batch}, and its history no longer says by which rules"
                )
            limit *= 2


def prepare(path: Path, schema: pyarrow.Schema, columns: list[str]) -> None:
    """Make a table that is not there. Raises `BadTable` where one is there that is partitioned otherwise."""
    import deltalake
    from deltalake.exceptions import DeltaError

    if not deltalake.DeltaTable.is_deltatable(str(path)):
        try:
            deltalake.DeltaTable.create(str(path), partitioned(schema, columns), mode="ignore", partition_by=columns)
        except DeltaError:
            # Another job was faster.
            if not deltalake.DeltaTable.is_deltatable(str(path)):
                raise
    there = list(deltalake.DeltaTable(str(path)).metadata().partition_columns)
    if there != columns:
        raise BadTable(
            f"{path}: the table is partitioned by {', '.join(there)}, and by {', '.join(columns)} from now on: that "
            "can't be changed, give the table another name"
        )


def fit(path: Path, rules: Rules) -> Rules:
    """Add columns for fields that a table has none for; return the rules with those that clash with its columns."""
    import deltalake
    from deltalake.exceptions import CommitFailedError
    from deltalake.schema import PrimitiveType

    for again in reversed(range(TRIES)):
        delta = deltalake.DeltaTable(str(path))
        there = {one.name: _kind(one) for one in delta.schema().fields}
        spelled = {name.lower(): name for name in there}
        clashes: dict[str, str] = {}
        new: list[deltalake.Field] = []
        for name, kind in rules.fields.items():
            wanted = "string" if kind == "json" else kind
            if name.lower() not in spelled:
                new.append(deltalake.Field(name, PrimitiveType(wanted), nullable=True))
            elif there.get(name) != wanted:
                clashes[name] = there.get(name) or f"it as {spelled[name.lower()]}"
        try:
            if new:
                delta.alter.add_columns(new)
            break
        except CommitFailedError:
            # Another job was faster.
            if not again:
                raise
    return replace(rules, clashes=clashes)


def _kind(field: Any) -> str:
    """Return the name of a column's type; of what is made of parts, its kind."""
    return str(getattr(field.type, "type", field.type))

"""Writing entries into an open environment: transactions of bounded size, each with its ledger, statistics and job
position.

Invariant: a committed transaction adds whole entries to ledger, statistics and job position together; rows of an
entry that is not whole yet are in neither, are rewritten by the redone job, and never counted. Called by
`generation.Generation.write_entries`, one writer at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

import lmdb
import xxhash

from logyard.protocol.errors import GenerationFailed, PayloadCorrupt

from . import ends, layout
from .bodies import Bodies
from .layout import KEY, Buffer, Plan, SourceRow, SourceUnit
from .ledger import ENTRY_SLOT, Columns

_STATISTICS = struct.Struct("<QQQQQ")
_JOB = struct.Struct("<QQQQQQQ")

Step = Callable[[str, int], None]
"""Told of each step of a job with the bytes it made durable: pacing hangs here, and crash tests."""


def quiet(step: str, size: int) -> None:
    """Do nothing, as the step callback of a job nobody watches."""


class GenerationConfig(NamedTuple):
    """Limits, in bytes: the map's fixed size, which bounds the file beside it too, and what one transaction writes (it
    is one fdatasync). `beside`: new generations have such a file."""

    map_bytes: int = 1 << 30
    transaction_bytes: int = 8 << 20
    beside: bool = False


class Statistics(NamedTuple):
    """What was ever written: whole entries, units, bytes (the ledgers' sizes), the highest run, the number of
    ledger rows."""

    entries: int
    units: int
    total: int
    run: int
    ledgers: int

    @classmethod
    def decode(cls, body: bytes) -> Statistics:
        """Return the statistics of a row's body."""
        return cls(*_STATISTICS.unpack(body))

    def put(self, txn: lmdb.Transaction[bytes]) -> None:
        """Write the row."""
        key = layout.own_key(layout.STATISTICS)
        txn.put(key, layout.wrap(key, _STATISTICS.pack(*self)))


class JobState(NamedTuple):
    """How far a job came here: (uid, index) of its first and last whole entry, and the generation it came from (0:
    none)."""

    job: int
    run: int
    previous: int
    first: tuple[int, int]
    last: tuple[int, int]

    @classmethod
    def decode(cls, body: bytes) -> JobState:
        """Return the state of a row's body."""
        job, run, previous, first_uid, first_index, last_uid, last_index = _JOB.unpack(body)
        return cls(job, run, previous, (first_uid, first_index), (last_uid, last_index))

    def put(self, txn: lmdb.Transaction[bytes]) -> None:
        """Write the row."""
        key = layout.own_key(layout.JOB, self.job)
        txn.put(key, layout.wrap(key, _JOB.pack(self.job, self.run, self.previous, *self.first, *self.last)))


class WriteReport(NamedTuple):
    """What was written here: entries and bytes now durable, the damaged source that ended it, if one did, and, if full,
    what did not fit."""

    entries: int
    written: int
    damaged: list[tuple[int, int, str]]
    full: bool
    unwritten: list[SourceRow]


class Writing:
    """One call of `write_entries`."""

    __slots__ = (
        "path", "_env", "_config", "_statistics", "_state", "_run", "_job", "_previous", "_step",
        "_txn", "_columns", "_rows", "_map_bytes", "_tail", "_entries", "_bytes", "_damaged",
        "_batch_bytes", "_entry_count", "_last", "_form", "_bodies",
    )  # fmt: skip

    def __init__(
        self,
        path: str,
        env: lmdb.Environment,
        config: GenerationConfig,
        statistics: Statistics,
        state: JobState | None,
        run: int,
        job: int,
        previous: int,
        step: Step,
        form: int,
        bodies: Bodies,
    ) -> None:
        assert run > layout.OWN and (state is None or state.run == run)
        self.path = path
        self._env = env
        self._config = config
        self._statistics = statistics
        self._state = state
        self._run = run
        self._job = job
        self._previous = previous if state is None else state.previous
        self._step = step
        self._form = form
        self._bodies = bodies
        self._txn: lmdb.Transaction[bytes] | None = None
        self._columns = Columns()
        self._rows: list[SourceRow] = []
        self._map_bytes = 0
        self._batch_bytes = 0
        self._entry_count = 0
        self._tail = b""
        self._last = (0, 0) if state is None else state.last
        self._entries = self._bytes = 0
        self._damaged: list[tuple[int, int, str]] = []

    def write(self, rows: Iterable[SourceRow]) -> WriteReport:
        """Write until the rows or the map end, or a source is damaged."""
        current: SourceRow | None = None
        try:
            for row in rows:
                planned = layout.plan(row, self._form)
                if not planned.units:
                    continue
                assert (row.uid, row.index) > self._last, "rows rise in (uid, index)"
                self._last = (row.uid, row.index)
                current = row
                if self._map_bytes and self._map_bytes + planned.map_bytes > self._config.transaction_bytes:
                    self._commit()
                if not self._room(planned.map_bytes):
                    self._commit()
                    if not self._room(planned.map_bytes):
                        return self._full([row])
                self._rows.append(row)
                try:
                    self._put(row, planned)
                except PayloadCorrupt as error:
                    self._withdraw(row, planned)
                    self._damaged.append((row.uid, row.index, str(error)))
                current = None
                if self._damaged:
                    # Nothing is committed behind it: who goes on after a crash has to meet it again.
                    break
            self._commit()
        except lmdb.MapFullError:
            # The estimate was too low. The aborted transaction left nothing; its entries go to the next generation.
            unwritten = self._rows
            if current is not None and (not unwritten or unwritten[-1] is not current):
                unwritten.append(current)
            if unwritten:
                return self._full(unwritten)
            # What was to be committed is what was taken back of a damaged one.
        finally:
            self._abort()
        return WriteReport(self._entries, self._bytes, self._damaged, False, [])

    def _full(self, unwritten: list[SourceRow]) -> WriteReport:
        self._abort()
        if not self._statistics.entries:
            row = unwritten[0]
            entry = f"entry {row.index} of group {row.uid:016x}"
            raise GenerationFailed(
                self.path, f"{entry} does not fit into an empty map of {self._config.map_bytes} bytes"
            )
        return WriteReport(self._entries, self._bytes, self._damaged, True, list(unwritten))

    def _room(self, more: int) -> bool:
        """Return whether `more` bytes of map fit, with what commits and the own rows need kept free."""
        map_bytes = self._config.map_bytes
        reserve = max(64 * layout.PAGE, min(map_bytes >> 6, 4 << 20))
        used = (self._env.info()["last_pgno"] + 1) * layout.PAGE
        return used + self._bodies.end + self._map_bytes + more + reserve <= map_bytes

    def _begin(self) -> lmdb.Transaction[bytes]:
        if self._txn is None:
            self._txn = self._env.begin(write=True)
            with self._txn.cursor() as cursor:
                self._tail = cursor.key() if cursor.last() else b""
        return self._txn

    def _put_row(self, key: bytes, value: bytes) -> None:
        """Write one row; appended while keys rise, which a redone entry's need not."""
        txn = self._begin()
        if key > self._tail:
            txn.put(key, value, append=True)
            self._tail = key
        else:
            txn.put(key, value)
        self._batch_bytes += len(value)

    def _put(self, row: SourceRow, planned: Plan) -> None:
        """Write all rows of one entry. An entry above the transaction size spans several; only the last makes it
        count."""
        units = planned.units
        inline: list[Buffer] = []
        for unit, offset, is_inline in units:
            if is_inline:
                # What is read is good until the next read.
                body = bytes(_exactly(row, offset, unit.length))
                if unit.hash and (got := xxhash.xxh3_128_digest(body, unit.seed)) != unit.hash:
                    raise self._rotten(row, unit, got)
                inline.append(body)
        key = KEY.pack(self._run, row.uid, row.index, row.term, 0, 0)
        self._put_row(key, layout.entry_value(key, row.term, row.data, planned, inline))
        self._map_bytes += planned.map_bytes
        since = 0
        for unit, offset, is_inline in units:
            if is_inline:
                continue
            hasher = xxhash.xxh3_128(seed=unit.seed) if unit.hash else None
            beside = layout.is_beside(unit.length, self._form)
            for piece, length in enumerate(layout.piece_lengths(unit.length, self._form)):
                # Before a piece, never behind the last: an entry is whole in no transaction but the one that counts it.
                if since >= self._config.transaction_bytes:
                    self._flush("part")
                    since = 0
                part = _exactly(row, offset, length)
                if hasher is not None:
                    hasher.update(part)
                key = KEY.pack(self._run, row.uid, row.index, row.term, unit.number + 1, piece)
                if beside:
                    place = self._bodies.append(part)
                    self._put_row(key, layout.place_value(key, unit.length, place, part))
                    self._batch_bytes += length
                else:
                    self._put_row(key, layout.piece_value(key, unit.length, part))
                offset += length
                since += length
            if hasher is not None and hasher.digest() != unit.hash:
                raise self._rotten(row, unit, hasher.digest())
        for unit, _, _ in units:
            self._columns.add(row.uid, row.index, unit.number, unit.length)
        self._columns.add(row.uid, row.index, ENTRY_SLOT, planned.overhead + len(row.data))
        self._entry_count += 1

    def _rotten(self, row: SourceRow, unit: SourceUnit, got: bytes) -> PayloadCorrupt:
        what = f"the source of unit {unit.number} of entry {row.index} of group {row.uid:016x}"
        return PayloadCorrupt(self.path, what, unit.hash.hex(), got.hex(), row.uid, row.index)

    def _withdraw(self, row: SourceRow, planned: Plan) -> None:
        """Take back what was put of an entry whose source is damaged."""
        self._rows.pop()
        txn = self._begin()
        for unit, _, is_inline in planned.units:
            if not is_inline:
                for piece in range(len(layout.piece_lengths(unit.length, self._form))):
                    txn.delete(KEY.pack(self._run, row.uid, row.index, row.term, unit.number + 1, piece))
        txn.delete(KEY.pack(self._run, row.uid, row.index, row.term, 0, 0))

    def _flush(self, step: str) -> None:
        """Commit the rows so far."""
        txn, size = self._txn, self._batch_bytes
        if txn is not None:
            if self._bodies.waits:
                # Durable before the rows that say where they are.
                ends.put_end(txn, self._bodies.flush())
            self._step(f"before {step}", 0)
            txn.commit()
            self._txn = None
            self._batch_bytes = 0
            self._step(f"after {step}", size)

    def _commit(self) -> None:
        """Commit whole entries with their ledger, statistics and the job's position."""
        if self._columns.slots:
            txn = self._begin()
            old, columns = self._statistics, self._columns
            key = layout.own_key(layout.LEDGER, self._run, old.ledgers)
            txn.put(key, layout.wrap(key, columns.encode()))
            entries = old.entries + self._entry_count
            units = old.units + columns.slots - self._entry_count
            run = max(old.run, self._run)
            statistics = Statistics(entries, units, old.total + columns.total, run, old.ledgers + 1)
            statistics.put(txn)
            first, last = (self._rows[0].uid, self._rows[0].index), (self._rows[-1].uid, self._rows[-1].index)
            if self._state is not None:
                first = self._state.first
            state = JobState(self._job, self._run, self._previous, first, last)
            state.put(txn)
            self._flush("commit")
            self._entries += self._entry_count
            self._bytes += columns.total
            self._statistics, self._state = statistics, state
        else:
            self._flush("commit")
        self._columns = Columns()
        self._rows = []
        self._map_bytes = self._entry_count = 0

    def _abort(self) -> None:
        self._bodies.drop()
        if self._txn is not None:
            self._txn.abort()
            self._txn = None


def _exactly(row: SourceRow, offset: int, length: int) -> Buffer:
    """Return bytes from the source; fewer than asked for is damage there."""
    body = row.read(offset, length)
    if len(body) != length:
        what = f"the source of entry {row.index} of group {row.uid:016x}"
        raise PayloadCorrupt("source", what, f"{length} bytes at {offset}", len(body), row.uid, row.index)
    return body

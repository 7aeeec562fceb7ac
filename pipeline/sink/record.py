"""The sink's own log: which batch is under way, by whose run, where its manifest stands and which batch is done.

Every record holds all that is needed to go on, and is appended only at the end that was just read (a conditional
append): so the last record is the state, two writers cannot both move it, and older ones can go. Kinds: `reset` begins
an incarnation, `run` says that a run of a query takes a batch up, `manifest` is the point from which on a staged batch
will be in its logs, `done` is behind all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import msgpack

from logyard.client.numbering import epoch_of
from logyard.protocol.errors import Gone, LogyardError, OutOfRange, UnknownGroup
from logyard.protocol.frame import Buffer, Epoch
from logyard.protocol.records import Record

T = TypeVar("T")
FORMAT = 2
FORMATS = (1, FORMAT)
"""1: ranges of a manifest without the uids of their stages."""
KEPT = 64
"""Records before the state's that are kept for whoever looks."""
RUNS_KEPT = 16
"""Runs of the query that are remembered: one that comes back behind another is fenced."""
AHEAD_MS = 3_600_000
"""A reset's incarnation is that much above its time: where the sink's log is deleted afterwards, and clocks went back,
the next reset's must still be above it. (A log forgets who was silent for a week, so far below.)"""
RESET, RUN, MANIFEST, DONE = "reset", "run", "manifest", "done"
KINDS = (b"reset", b"run", b"manifest", b"done")
"""What its records have as metadata."""
NOTHING = -1


class SinkError(LogyardError):
    """A sink that cannot go on, and what to do."""

    code = "sink"


class Fenced(SinkError):
    """Another run of the query, or another driver, has gone on with this sink."""

    code = "fenced"


class Cut(NamedTuple):
    """How rows become frames: the most records and about the most bytes of one. Kept in the sink's log, so that a
    repeated batch is cut alike by every version and setting."""

    rows: int = 4096
    size: int = 4 << 20


CUT = Cut()


class Stored(NamedTuple):
    """Records of one target log in a stage: offsets `first` to `end`, without. `uid`: of the stage's log; 0: an earlier
    build stored them, and did not say."""

    log: str
    stage: int
    first: int
    end: int
    uid: int = 0


@dataclass(frozen=True)
class State:
    """What the sink's log says. `batch`: the newest batch of which there is anything, `done` the newest that is
    finished. `runs`: who wrote to it, the newest last. `ranges`: of the manifest, None unless `batch` has one that is
    not done. `at`: the log's end. `guarantee`: that of `batch`, "" where an earlier build began it."""

    at: int
    incarnation: int
    query: str = ""
    batch: int = NOTHING
    done: int = NOTHING
    runs: tuple[str, ...] = ()
    ranges: tuple[Stored, ...] | None = None
    cut: Cut = CUT
    stages: int = 8
    guarantee: str = ""

    def packed(self, kind: str) -> bytes:
        """Return the record of that kind that leads to this state."""
        ranges = None if self.ranges is None else pack_ranges(self.ranges)
        rest = [self.query, self.batch, self.done, list(self.runs), ranges, list(self.cut), self.stages, self.guarantee]
        packed: bytes = msgpack.packb([FORMAT, kind, self.incarnation, *rest])
        return packed


def pack_ranges(ranges: Sequence[Stored]) -> list[Any]:
    """Return ranges with each log's name and each stage's uid once."""
    names: dict[str, int] = {}
    uids: dict[int, int] = {}
    rows = [
        [names.setdefault(one.log, len(names)), one.stage, one.first, one.end, uids.setdefault(one.uid, len(uids))]
        for one in ranges
    ]
    return [list(names), rows, list(uids)]


def unpack_ranges(packed: Sequence[Any]) -> tuple[Stored, ...]:
    """Return them as they were packed."""
    names, rows, *more = packed
    uids = more[0] if more else [0]
    return tuple(
        Stored(names[log], stage, first, end, uids[uid[0] if uid else 0]) for log, stage, first, end, *uid in rows
    )


def read_state(record: Record) -> State:
    """Return what a record says. Raises `SinkError` for another format, and for a record that no sink wrote."""
    try:
        found = msgpack.unpackb(bytes(record.payload or b""))
    except ValueError:
        found = None
    if not is_record(record, found):
        raise SinkError(
            f"record {record.offset} of the sink's log is no sink's: somebody else appended to that log. Copy out what "
            "is wanted and delete it; sinkReset=true goes on, and the batch under way may be there twice"
        )
    if found[0] not in FORMATS:
        raise SinkError(f"the sink's log has a record of format {found[0]}, not {FORMAT}: update")
    _, kind, incarnation, query, batch, done, runs, ranges, cut, stages, *more = found
    if kind == RESET and incarnation <= 0:
        # By the log's own time, which the writer of the record did not know.
        incarnation = max(-incarnation, record.timestamp + AHEAD_MS) if incarnation else record.timestamp
    return State(
        record.offset + 1, incarnation,
        query, batch, done, tuple(runs), None if ranges is None else unpack_ranges(ranges), Cut(*cut), stages, *more,
    )  # fmt: skip


def is_record(record: Record, found: Any) -> bool:
    """Return whether a record, with what its payload says, is one of a sink's log."""
    return record.metadata in KINDS and isinstance(found, list) and bool(found) and type(found[0]) is int


def is_own(log: OwnLog) -> bool:
    """Return whether a log is one that a sink keeps itself in, by its newest record. Raises what reading does."""
    try:
        start, end = log.latest()
        if start == end:
            return False
        record = log.read(end - 1)
        return is_record(record, msgpack.unpackb(bytes(record.payload or b"")))
    except (UnknownGroup, OutOfRange, Gone, ValueError):
        return False


class OwnLog(Protocol):
    """The sink's log, as `client.sync` has it."""

    def latest(self) -> tuple[int, int]:
        """Return (start, end)."""

    def read(self, offset: int) -> Record:
        """Return a record."""

    def append_many(self, records: list[tuple[Buffer, Buffer | None]], *, at: int | None = None) -> range:
        """Append, if the log ends at `at`."""

    def truncate(self, before: int) -> int:
        """Drop what lies before an offset."""


class SinkLog:
    """The record of one sink. Blocking."""

    def __init__(self, log: OwnLog, number: int, name: str) -> None:
        self._log = log
        self.number = number
        self.name = name

    def load(self) -> State | None:
        """Return the state; None for a log without any record."""
        while True:
            start, end = self._log.latest()
            if not end:
                return None
            if start == end:
                # The sink itself always leaves its last record there.
                raise SinkError(
                    f"{self.name}: the records of its log were truncated, by hand or by a retention: delete that log, "
                    "and sinkReset=true goes on; the batch under way may be there twice"
                )
            try:
                return read_state(self._log.read(end - 1))
            except (OutOfRange, Gone):
                # Somebody appended and truncated in between.
                continue

    def move(self, kind: str, state: State) -> bool:
        """Append the record that leads to `state`, if nobody moved it since; return whether it is there."""
        try:
            self._log.append_many([(kind.encode(), state.packed(kind))], at=state.at)
        except OutOfRange:
            return False
        if kind == DONE and state.at > KEPT:
            self._log.truncate(state.at - KEPT)
        return True

    def update(self, kind: str, change: Callable[[State], State | None], known: State | None = None) -> State:
        """Move the state, `known` if it was read before, as `change` says (None: it is there already), again as long
        as others move it meanwhile; return the state behind it. What `change` raises goes through."""
        while True:
            state, known = known or self.load(), None
            if state is None:
                raise SinkError(f"{self.name}: the sink's log has no record; sinkReset=true begins anew")
            wanted = change(state)
            if wanted is None:
                return state
            if self.move(kind, wanted):
                return replace(wanted, at=wanted.at + 1)

    def begin(self, cut: Cut, stages: int, query: str = "", *, ahead: bool = False) -> State:
        """Return the state of a sink, a new one's if its log is empty; `ahead`: there may have been one before it,
        which was reset, and whose log was deleted."""
        found = self.load()
        if found is None:
            self.move(RESET, State(0, -1 if ahead else 0, query, cut=cut, stages=stages))
            found = self.load()
            assert found is not None
        return found

    def reset(self, query: str, batch: int, cut: Cut, stages: int, *, again: bool = False) -> State:
        """Begin a new incarnation at `batch`, which fences all before it, unless the sink is this query's already. Then
        only `again`, where the batch's manifest can't be followed any more, and nobody else has begun one."""

        def change(state: State) -> State | None:
            if state.query == query and (state.batch != NOTHING or not batch) and not (again and state.ranges):
                return None
            # "At least that": the log's time decides, see `read_state`.
            least = -(state.incarnation + 1)
            return State(state.at, least, query, batch - 1, batch - 1, state.runs, None, cut, stages)

        found = self.update(RESET, change)
        while found.incarnation < 0:
            loaded = self.load()
            assert loaded is not None, "it has a record"
            found = loaded
        return found

    def take_up(self, known: State, batch: int, query: str, run: str, guarantee: str) -> State | None:
        """Note that a run writes a batch; return the state, None when that batch is done already. Raises `Fenced` when
        a later run took it up, `SinkError` when this is no batch of this sink's query, or was begun with another
        `guarantee`: its rows lie elsewhere, under other numbers."""

        def change(state: State) -> State | None:
            taken = self._taken(state, batch, query, run, guarantee)
            return None if taken == state else taken

        state = self.update(RUN, change, known)
        return None if batch <= state.done else state

    def _taken(self, state: State, batch: int, query: str, run: str, guarantee: str) -> State:
        """Return the state in which `run` has the batch: the same one if it has it, or if the batch is done. A commit
        without tasks does not know its run ("")."""
        check_batch(self.name, state, batch, query)
        if run in state.runs[:-1]:
            raise Fenced(
                f"{self.name}: another run of this query has taken over at batch {state.batch}; two drivers must not "
                "write to one sinkId"
            )
        if batch <= state.done:
            if not query and batch < state.done:
                # Of a stream all numbers were written; of plain writes nobody knows that.
                raise SinkError(
                    f"{self.name}: batchId {batch} is below {state.done}, the newest that was written: numbers have to "
                    "rise; write what is late under a higher number, or another sinkId"
                )
            earlier = state.runs[-1] if state.runs else ""
            job = run.partition("/")[0]
            if batch == state.done and job and job == earlier.partition("/")[0] and run != earlier:
                raise SinkError(f"{self.name}: batch {batch} was written by another write of it: one sinkId per write")
            return state
        if batch < state.batch:
            raise Fenced(f"{self.name}: batch {batch} is past, the sink is at {state.batch}")
        if batch == state.batch and state.guarantee not in ("", guarantee):
            raise SinkError(
                f"{self.name}: batch {batch} was begun with deliveryGuarantee={state.guarantee}: put that back until "
                "it is done, or its rows may be there twice"
            )
        if batch > state.batch and state.ranges is not None:
            raise SinkError(
                f"{self.name}: batch {state.batch} was committed and is not finished: write it again first (what was "
                "stored of it counts, whatever rows are given)"
            )
        if run and state.runs[-1:] != (run,):
            state = replace(state, runs=(*state.runs, run)[-RUNS_KEPT:])
        if batch > state.batch:
            state = replace(state, query=query or state.query, batch=batch, ranges=None, guarantee=guarantee)
        return state

    def store(
        self, known: State, batch: int, query: str, run: str, guarantee: str, ranges: tuple[Stored, ...]
    ) -> State:
        """Store the manifest of a batch, unless one stands: then that one counts. Return the state with it, or with
        the batch done. Raises `Fenced` as `take_up`."""

        def change(state: State) -> State | None:
            taken = self._taken(state, batch, query, run, guarantee)
            if batch > state.done and taken.ranges is None:
                taken = replace(taken, ranges=ranges)
            # A manifest that an earlier commit stored is what will be there.
            return None if taken == state else taken

        return self.update(MANIFEST, change, known)

    def finish(self, known: State, batch: int) -> State:
        """Note that a batch is done. Raises `Fenced` when a later one is there, or another incarnation than `known`
        is of: its batches have the same numbers."""

        def change(state: State) -> State | None:
            if state.incarnation != known.incarnation:
                raise Fenced(f"{self.name}: the sink was reset while batch {batch} was committed")
            if batch <= state.done:
                return None
            if batch < state.batch:
                raise Fenced(f"{self.name}: batch {batch} is past, the sink is at {state.batch}")
            return replace(state, batch=batch, done=batch, ranges=None)

        return self.update(DONE, change, known)

    def epoch(self, state: State, batch: int) -> Epoch:
        """Return what the batch's frames are called in the target logs."""
        return epoch_of(self.number, state.incarnation, batch)


def check_batch(name: str, state: State, batch: int, query: str) -> None:
    """Raise `SinkError` for a batch that is none of the query that has written to this sink."""
    if query and state.query and query != state.query:
        raise SinkError(
            f"{name}: another query has written to this sinkId up to batch {state.done} (a checkpoint that was deleted "
            "makes another query, too): sinkReset=true begins anew, and what is written again is there twice"
        )
    if state.batch == NOTHING:
        if query and batch > 0:
            raise SinkError(
                f"{name}: this query is at batch {batch}, and the sink knows none of it: was its log deleted? "
                "sinkReset=true goes on, and the batch under way may be there twice"
            )
        return
    if query and batch > state.done + 1:
        raise SinkError(
            f"{name}: batch {batch} was asked for, and {state.done + 1} was never finished: is this the checkpoint of "
            "another sink?"
        )

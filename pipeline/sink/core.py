"""What a sink does with a batch, without Spark: tasks write, a commit makes it visible, and any of it may be repeated.

`exactly-once`: tasks append to stage logs; the commit stores a manifest in the sink's log, then writes the rows that it
names to their logs, as one fenced epoch, then notes that the batch is done, then truncates the stages. A crash anywhere
means that the next commit goes on from the stored manifest, whatever its own messages say. `exactly-once-direct`: tasks
write to the logs themselves, as lanes of the batch's epoch; that needs rows which are cut into the same tasks again.
`at-least-once`: plain appends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from logyard.client.log import appended, flags_of, offsets_of
from logyard.client.producer import producer_number
from logyard.client.sync import Yard
from logyard.client.sync_log import Log
from logyard.client.upload import WHOLE_BYTES
from logyard.protocol import wire
from logyard.protocol.compression import SMALLEST
from logyard.protocol.errors import GroupExists, LogyardError, UnknownGroup
from logyard.protocol.frame import Epoch, epoch_append_command

from ..errors import DataLoss
from ..network import NetworkSource
from ..option_table import tls_of
from ..sources import Reading, Wanted
from .options import DIRECT, LEAST, ONCE, SinkOptions
from .record import CUT, Cut, Fenced, SinkError, SinkLog, State, Stored, is_own, pack_ranges
from .rows import PAYLOAD_MAX, Batch, frames
from .sending import Sending

if TYPE_CHECKING:
    import pyarrow

OWN = re.compile(r"(.+)\.(?:log|stage-\d+)")
"""Names of the logs that a sink keeps itself in."""
RANGES_MAX = 1_000_000
MANIFEST_BYTES_MAX = 32 << 20
STAGED = Reading(payloads=True, inline_bytes=PAYLOAD_MAX)
FOR_LOG = wire.for_kind("log")
HOOK: Callable[[str], None] | None = None
"""Of tests alone: called with the name of each step that a crash may come before."""


def at(step: str) -> None:
    """Tell the tests' hook, if there is one, which step comes next."""
    if HOOK is not None:
        HOOK(step)


class Writing(NamedTuple):
    """Which batch a task or a commit is of, as far as it knows: the query's id in its checkpoint, the run of it."""

    batch: int
    query: str = ""
    run: str = ""


@dataclass(frozen=True)
class Written:
    """What a task did: `ranges` in stages, the logs and rows that it wrote to."""

    writing: Writing
    ranges: tuple[Stored, ...] = ()
    rows: int = 0


class Sink:
    """A sink with its cluster. Blocking; one task's or one commit's."""

    def __init__(self, yard: Yard, options: SinkOptions) -> None:
        self.yard = yard
        self.options = options
        self.name = f"sink {options.sink!r}"
        self.number = producer_number(options.sink) if options.sink else 0
        self._known: set[str] = set()

    # The sink's own logs.

    def own(self) -> SinkLog:
        """Return the sink's log."""
        return SinkLog(self.yard.log(f"{self.options.sink}.log"), self.number, self.name)

    def begin(self, writing: Writing) -> tuple[SinkLog, State]:
        """Return the sink's log, made if it is not there, and its state; the first batch founds it, or resets it."""
        own = self.own()
        try:
            state = own.begin(CUT, self.options.stages, writing.query, ahead=self.options.reset)
        except UnknownGroup:
            self._make(f"{self.options.sink}.log", start=0)
            state = own.begin(CUT, self.options.stages, writing.query, ahead=self.options.reset)
        if self.options.reset and (writing.query or writing.run):
            again = writing.batch == state.batch and self._has_lost(state)
            state = own.reset(writing.query, writing.batch, CUT, self.options.stages, again=again)
        return own, state

    def _has_lost(self, state: State) -> bool:
        """Return whether a stage that the manifest under way names is not there any more."""
        named = {(one.stage, one.uid) for one in state.ranges or () if one.uid}
        return any(self._uid(number) != uid for number, uid in named)

    def _uid(self, number: int) -> int:
        """Return the uid of a stage; 0: there is none."""
        try:
            return int(self.yard.locate(self._stage(number))["uid"])
        except UnknownGroup:
            return 0

    def _stage(self, number: int) -> str:
        return f"{self.options.sink}.stage-{number}"

    def _make(self, name: str, **arguments: Any) -> None:
        try:
            self.yard.create_many([name], members=self.options.members, **arguments)
        except GroupExists:
            pass

    # A task.

    def write(self, batches: Iterable[pyarrow.RecordBatch], writing: Writing, task: int) -> Written:
        """Write a task's rows; return what the commit has to know."""
        if self.options.guarantee == LEAST:
            return self._write_plain(batches, writing)
        own, state = self.begin(writing)
        taken = own.take_up(state, writing.batch, writing.query, writing.run, self.options.guarantee)
        if taken is None:
            # It was committed, and Spark does not remember.
            return Written(writing)
        if self.options.guarantee == DIRECT:
            return self._write_direct(batches, writing, task, own.epoch(taken, writing.batch), taken.cut)
        return self._write_staged(batches, writing, task, taken)

    def _write_plain(self, batches: Iterable[pyarrow.RecordBatch], writing: Writing) -> Written:
        rows = 0
        with Sending() as sending:
            for one in frames(batches, self.options.log, CUT):
                log = self._target(one.log)
                rows += one.rows
                sending.put(one.log, partial(append, log, one), one.size)
        return Written(writing, rows=rows)

    def _write_direct(
        self, batches: Iterable[pyarrow.RecordBatch], writing: Writing, task: int, epoch: Epoch, cut: Cut
    ) -> Written:
        rows = 0
        writers: dict[str, Lane] = {}
        with Sending() as sending:
            for one in frames(batches, self.options.log, cut):
                writer = writers.get(one.log)
                if writer is None:
                    writer = writers[one.log] = self._lane(self._target(one.log), epoch, task)
                rows += one.rows
                at("mid-write")
                sending.put(one.log, partial(self._fenced, writer, one), one.size)
        at("after-write")
        return Written(writing, rows=rows)

    def _lane(self, log: Log, epoch: Epoch, lane: int) -> Lane:
        """Return a lane of an epoch, which begins where the log does not have it yet. Raises as `Log.epoch`."""
        return Lane(log, log.epoch(*epoch, lane, timeout=self.options.timeout_s).epoch, lane, self.options.timeout_s)

    def _fenced(self, lane: Lane, one: Batch) -> None:
        try:
            lane.append(one)
        except LogyardError as error:
            raise told(self.name, one.log, error) from error

    def _write_staged(
        self, batches: Iterable[pyarrow.RecordBatch], writing: Writing, task: int, state: State
    ) -> Written:  # fmt: skip
        number = task % state.stages
        stage = self.yard.log(self._stage(number))
        # Of one log in the order of its rows; how the logs lie among one another is nobody's business.
        found: list[Stored] = []
        uid = rows = 0

        def store(one: Batch) -> None:
            offsets = append(stage, one)
            found.append(Stored(one.log, number, offsets.start, offsets.stop, uid))

        with Sending() as sending:
            for one in frames(batches, self.options.log, state.cut):
                if not rows:
                    uid = self._ready_stage(number)
                rows += one.rows
                at("mid-write")
                sending.put(one.log, partial(store, one), one.size)
        at("after-write")
        if rows and self._uid(number) != uid:
            raise SinkError(
                f"{self.name}: {self._stage(number)!r} was deleted while this task wrote to it: write again"
            )
        return Written(writing, tuple(merged(sorted(found))), rows)

    def _ready_stage(self, number: int) -> int:
        """Return the uid of a stage, which is made if it is not there."""
        while not (uid := self._uid(number)):
            self._make(self._stage(number), stage=True)
        return uid

    def _target(self, name: str) -> Log:
        """Return a log that rows go to. Raises `SinkError` for one that is not there, unless logs are made."""
        log = self.yard.log(name)
        if name not in self._known:
            self._check_foreign(name)
            try:
                self.yard.locate(name)
            except UnknownGroup:
                if not self.options.create:
                    raise SinkError(f"{self.name}: there is no log {name!r}; createLogs=true makes it") from None
                self._make(name)
            self._known.add(name)
        return log

    def _check_foreign(self, name: str) -> None:
        """Raise `SinkError` for a row's log that a sink keeps itself in: it could not read its state any more."""
        found = OWN.fullmatch(name)
        if found is None:
            return
        own = found[1] == self.options.sink and self.options.guarantee != LEAST
        if own or is_own(self.yard.log(f"{found[1]}.log")):
            raise SinkError(
                f"{self.name}: log {name!r} is {'the' if own else 'another'} sink's own, and no row may go to it"
            )

    # The commit.

    def commit(self, written: Sequence[Written], batch: int) -> State | None:
        """Make a batch visible, or find that it is. Raises `Fenced` when another driver has taken over."""
        if self.options.guarantee == LEAST:
            return None
        writing = next((one.writing for one in written), Writing(batch))
        own, state = self.begin(writing)
        if self.options.guarantee == DIRECT:
            taken = own.take_up(state, batch, writing.query, writing.run, self.options.guarantee)
            at("before-done")
            return own.finish(taken, batch) if taken is not None else own.load()
        ranges = tuple(merged(chunk for one in written for chunk in one.ranges))
        if batch > state.batch or state.ranges is None:
            self._check(ranges, own.epoch(state, batch))
        at("before-commit")
        state = own.store(state, batch, writing.query, writing.run, self.options.guarantee, ranges)
        if batch <= state.done:
            return state
        at("after-manifest")
        ends: dict[int, int] = {}
        for chunk in state.ranges or ():
            ends[chunk.stage] = max(ends.get(chunk.stage, 0), chunk.end)
        self._fan_out(own.epoch(state, batch), state)
        at("before-done")
        found = own.finish(state, batch)
        at("before-truncation")
        for number, end in ends.items():
            self.yard.log(self._stage(number)).truncate(end)
        at("after-truncation")
        return found

    def _check(self, ranges: Sequence[Stored], epoch: Epoch) -> None:
        """Refuse what can't be committed before anything of it is visible."""
        size = len(msgpack.packb(pack_ranges(ranges)))
        if len(ranges) > RANGES_MAX or size > MANIFEST_BYTES_MAX:
            raise SinkError(
                f"{self.name}: this batch has {len(ranges)} pieces ({size} bytes of manifest): a smaller one is "
                "needed, by maxOffsetsPerTrigger of its source or fewer tasks"
            )
        with Sending() as sending:
            for name in sorted({one.log for one in ranges}):
                sending.put(name, partial(self._check_log, name, epoch), 1)

    def _check_log(self, name: str, epoch: Epoch) -> None:
        """Refuse a log that takes no frame of the batch: behind the manifest the batch could not be finished, nor
        written otherwise."""
        try:
            self._lane(self._target(name), epoch, 0)
        except LogyardError as error:
            raise told(self.name, name, error) from error

    def _fan_out(self, epoch: Epoch, state: State) -> None:
        by_log: dict[str, list[Stored]] = {}
        for chunk in state.ranges or ():
            by_log.setdefault(chunk.log, []).append(chunk)
        with closing(open_stages(self.options)) as source, Sending() as sending:
            for name in sorted(by_log):
                sending.put(name, partial(self._publish, source, name, by_log[name], epoch, state.cut), 1)

    def _publish(
        self, source: NetworkSource, name: str, chunks: Sequence[Stored], epoch: Epoch, cut: Cut
    ) -> None:  # fmt: skip
        """Write one log's rows of a manifest. A frame that is there already is left as it is."""
        try:
            log = self._target(name)
        except SinkError:
            if self.options.drop:
                return
            raise SinkError(
                f"{self.name}: log {name!r} was deleted after batch {epoch.epoch} was committed: createLogs=true makes "
                "it anew, dropMissing=true leaves its rows out"
            ) from None
        try:
            lane = self._lane(log, epoch, 0)
            for one in frames(self._staged(source, chunks), name, cut):
                at("mid-fan-out")
                lane.append(one)
        except DataLoss as error:
            state = self.own().load()
            if state is None or state.done >= epoch.epoch:
                # Whoever truncated the stages has finished the batch.
                raise Fenced(f"{self.name}: batch {epoch.epoch} was finished by another commit meanwhile") from error
            raise SinkError(
                f"{self.name}: rows of batch {epoch.epoch}, which is committed, are not in their stage any more "
                f"({error}): was {error.details['log']!r} deleted? sinkReset=true writes the batch again, and what is "
                "in its logs by now is there twice"
            ) from error
        except LogyardError as error:
            raise told(self.name, name, error) from error

    def _staged(self, source: NetworkSource, chunks: Sequence[Stored]) -> Iterator[pyarrow.RecordBatch]:
        nodes = source.yard.nodes()
        for chunk in chunks:
            turn = chunk.stage % len(nodes)
            wanted = Wanted(self._stage(chunk.stage), chunk.uid, chunk.first, chunk.end, (*nodes[turn:], *nodes[:turn]))
            yield from source.read([wanted], STAGED)


class Lane:
    """One task's frames of an epoch in one log, numbered as they come."""

    def __init__(self, log: Log, epoch: Epoch, lane: int, timeout_s: float) -> None:
        self._log = log
        self._epoch = epoch
        self._lane = lane
        self._timeout_s = timeout_s
        self._last = 0

    def append(self, one: Batch) -> None:
        """Append the next frame, unless it is there. Raises as `client.producer.EpochWriter.append_many`."""
        self._last += 1
        append(self._log, one, epoch_append_command(self._epoch, self._lane, self._last, one.content), self._timeout_s)


def append(log: Log, one: Batch, command: bytes = b"", timeout_s: float | None = None) -> range:
    """Append a frame, by a producer's `command`; a payload above 1 MiB in pieces."""
    if one.largest > WHOLE_BYTES:
        return log.append_many(one.records, timeout=timeout_s, command=command) if command else _in_pieces(log, one)
    if _is_compressed(log, one):
        return log.append_many(one.records, timeout=timeout_s, command=command)
    flags = flags_of("consensus", "normal") | FOR_LOG
    reply, _ = log.yard.append(log.name, one.frame(command), timeout_s, flags)
    found = appended(log.name, flags, reply)
    return offsets_of(found.first, found.given)


def _in_pieces(log: Log, one: Batch) -> range:
    ((metadata, payload),) = one.records
    offset = log.append(metadata, payload)
    return range(offset, offset + 1)


def _is_compressed(log: Log, one: Batch) -> bool:
    """Return whether a log wants payloads to be compressed; it is asked where one could be."""
    option = log.yard.compresses(log.name)
    if option is None and one.largest >= SMALLEST:
        # Whatever it answers, finding the log tells.
        log.latest()
        option = log.yard.compresses(log.name)
    return bool(option)


def merged(chunks: Iterable[Stored]) -> Iterator[Stored]:
    """Yield ranges, those that follow one another in the same log and stage as one."""
    last: Stored | None = None
    for chunk in chunks:
        if last is not None and last[:2] == chunk[:2] and (last.end, last.uid) == (chunk.first, chunk.uid):
            last = last._replace(end=chunk.end)
            continue
        if last is not None:
            yield last
        last = chunk
    if last is not None:
        yield last


def told(sink: str, log: str, error: LogyardError) -> LogyardError:
    """Return the sink's sentence for what a log answered."""
    if error.code == "sequence_differs":
        return SinkError(
            f"{sink}: log {log!r} has other rows of this batch already ({error}): its source is not pure, or it was "
            "cut otherwise (minPartitions, maxPartitionRows: put them back until this batch is done); from the next "
            f"batch on deliveryGuarantee={ONCE} needs nothing of its source",
            code="sequence_differs",
        )
    if error.code == "fenced":
        return Fenced(f"{sink}: log {log!r}: {error}")
    return error


def open_stages(options: SinkOptions) -> NetworkSource:
    """Return a source that reads stages; any member of one serves. Close it."""
    tls = tls_of(options.tls_ca, options.tls_certificate, options.tls_key)
    source = NetworkSource(options.servers, tls=tls, timeout_s=options.timeout_s)
    # Connected before threads share it.
    source.yard.nodes()
    return source


def open_sink(options: SinkOptions) -> Sink:
    """Return a sink with a cluster of its own. Close its yard."""
    from logyard.client.sync import connect_sync

    tls = tls_of(options.tls_ca, options.tls_certificate, options.tls_key)
    # Sessions would protect what the epochs protect already.
    yard = connect_sync(options.servers, timeout=options.timeout_s, tls=tls, exactly_once=options.guarantee == LEAST)
    return Sink(yard, options)


def write_task(options: SinkOptions, batches: Iterable[Any], writing: Writing, task: int) -> Written:
    """Write one task's rows."""
    sink = open_sink(options)
    with closing(sink.yard):
        return sink.write(batches, writing, task)


def commit_batch(options: SinkOptions, written: Sequence[Written], batch: int) -> None:
    """Commit one batch."""
    sink = open_sink(options)
    with closing(sink.yard):
        sink.commit(written, batch)

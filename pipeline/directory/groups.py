"""Each group's log, put together from checkpoint, segments and WAL as a start would do it, and judged.

Invariant: what is read here is what `engine.host.recovery` would make the member's log; the rules are the invariants of
architecture section 5 (snapshot and log meet, terms never fall, no gap). Called by `service.check_process` and
`reading`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from logyard.engine.entry import COMMANDS, CONFIGURATION, Entry, frames_of, is_guarded, records_in, timestamp_of
from logyard.engine.errors import WrongIdentity
from logyard.engine.host import replica, rows
from logyard.engine.host.machine_state import MachineState
from logyard.engine.host.member import Spec
from logyard.engine.host.sessions import Sessions, apply_guarded, run_batch
from logyard.engine.host.uploads import Uploads
from logyard.engine.log.meta_rows import Run, StateRow
from logyard.engine.log.recovered import Recovered
from logyard.engine.machine import Batch, BatchMachine, Context, Effect, Frame, Machine, Release, Timer
from logyard.engine.snapshot import format as snapshot_format
from logyard.engine.snapshot.format import Snapshot
from logyard.machines.registry import create_machine
from logyard.payloads.homes import Home
from logyard.payloads.liveness import Liveness, decode_live_set

from .files import Segments, WalFacts, segment_path, wal_path
from .meta import Facts
from .report import Report, some

Hole: TypeAlias = tuple[int, int, int]
"""(first index, last index, the segment that should have them; 0: no checkpoint names one)"""
RECORDS_MAX = 1 << 31
"""More records than any entry has."""


class GroupLog:
    """One group as it would come up. `live` is what its snapshot says lives, `live_at_end` what is left when the whole
    log is applied: at least those payloads must be here. `commit`: what this directory alone proves to be committed.
    `machine`: as of the log's end; None where that is not known."""

    __slots__ = (
        "spec", "state", "snapshot", "base", "base_term", "flushed", "runs", "terms", "entries", "last", "term",
        "commit", "floor", "whole", "alone", "live", "live_at_end", "machine",
    )  # fmt: skip

    def __init__(self, spec: Spec, state: StateRow) -> None:
        self.spec = spec
        self.state = state
        self.snapshot: Snapshot | None = None
        self.base, self.base_term = map(int, state.extra.get("log", (0, 0)))
        self.flushed = max(int(state.extra.get("flushed", 0)), self.base)
        self.runs = list(state.runs)
        self.terms: list[tuple[int, int]] = []
        self.entries: list[Entry] = []
        self.last = 0
        self.term = state.term
        self.commit = state.commit
        self.floor = state.floor
        self.whole = True
        self.alone = False
        self.live = Liveness()
        self.live_at_end = Liveness()
        self.machine: Machine | None = None

    @property
    def name(self) -> str:
        """The group's name."""
        return self.spec.name

    @property
    def resolves(self) -> bool:
        """Whether the member may have to serve payloads: below its floor they may be missing (law 4)."""
        return self.last >= self.floor

    def term_at(self, index: int) -> int:
        """The term of an entry that is in the log; 0: it is not."""
        if index == self.base:
            return self.base_term
        if self.entries and self.entries[0].index <= index <= self.entries[-1].index:
            return self.entries[index - self.entries[0].index].term
        if not self.base < index <= self.flushed:
            return 0
        return next((term for first, term in reversed(self.terms) if first <= index), 0)


class Placed(NamedTuple):
    """An entry, None where it is damaged or missing, and the file it belongs to; `segment` is 0 for the WAL."""

    index: int  # type: ignore[assignment]  # tuple.index is not missed
    entry: Entry | None
    path: str
    segment: int


def check_group(
    uid: int, facts: Facts, wal: WalFacts, segments: Segments, homes: Sequence[Home], report: Report
) -> GroupLog:
    """Put one group together, report what does not fit, and apply its log. `homes`: its payloads in generations."""
    group = build_group(uid, facts, wal, report)
    _judge(group, report)
    _apply(group, facts, segments, homes, report)
    return group


def build_group(uid: int, facts: Facts, wal: WalFacts, report: Report) -> GroupLog:
    """Put one group together from its rows and the WAL. What does not fit is reported; then the group is not `whole`,
    or the report has damage under its name."""
    spec = facts.groups[uid]
    group = GroupLog(spec, facts.states.get(uid) or StateRow(uid))
    known = facts.damaged.get(uid)
    group.whole = uid not in wal.hurt and uid not in wal.suspects and uid not in facts.lost
    group.whole = group.whole and (known is None or known.sound)
    configurations = group.state.extra.get("configurations") or [[0, 0, b""]]
    group.alone = spec.voters == (facts.node,) and len(configurations) == 1 and configurations[0][0] == 0
    _read_snapshot(group, facts, report)
    recovered = wal.groups.get(uid) or Recovered()
    group.floor = max(group.floor, recovered.floor)
    if recovered.hard_state is not None:
        group.term = max(group.term, recovered.hard_state[0])
        group.commit = max(group.commit, recovered.hard_state[2])
    if group.snapshot is not None:
        group.commit = max(group.commit, group.snapshot.index)
    _join(group, recovered, report)
    if group.alone and not any(entry.kind == CONFIGURATION for entry in group.entries):
        group.commit = group.last
    group.commit = min(group.commit, group.last)
    return group


def _read_snapshot(group: GroupLog, facts: Facts, report: Report) -> None:
    row = facts.snapshots.get(group.spec.uid)
    if row is not None:
        try:
            group.snapshot = snapshot_format.decode(
                row.data, row.uid, lambda name: facts.chunks.get(rows.chunk_key(row.uid, name))
            )
            group.live = decode_live_set(group.snapshot.live, f"the snapshot of group {group.name}").liveness
            group.live_at_end = decode_live_set(group.snapshot.live).liveness
            report.count("snapshots")
            if (group.snapshot.index, group.snapshot.term) != (row.index, row.term):
                text = f"its row says {row.index}@{row.term}, it says {group.snapshot.index}@{group.snapshot.term}"
                report.damage("snapshot", text, path="meta", group=group.name)
        except WrongIdentity:
            raise
        except Exception as error:  # a checksum of nonsense may hold, and nonsense may raise anything
            report.damage("snapshot", f"{type(error).__name__}: {error}", path="meta", group=group.name)
            group.whole = False
            return
    index = group.snapshot.index if group.snapshot is not None else 0
    if group.spec.uid in facts.lost:
        return
    if group.state.snapshot_index > index:
        text = f"the checkpoint names a snapshot at {group.state.snapshot_index}; the newest there is, is at {index}"
        report.damage("snapshot", text, path="meta", group=group.name)
    elif group.base > index:
        text = f"the log begins above {group.base}, and the newest snapshot is at {index}"
        report.damage("snapshot", text, path="meta", group=group.name)


def _join(group: GroupLog, recovered: Recovered, report: Report) -> None:
    """Base, flushed part and WAL: the same steps as recovery's, with findings in place of an exception."""
    if recovered.lowest and recovered.lowest <= group.flushed:
        group.flushed = max(recovered.lowest - 1, group.base)
        group.runs = _cut(group.runs, group.flushed)
    group.terms = [run for run in group.state.term_runs if run[0] <= group.flushed]
    entries = [entry for entry in recovered.entries if entry.index > group.flushed]
    snapshot = group.snapshot
    gap = bool(entries) and entries[0].index > group.flushed + 1
    restarted = snapshot is not None and recovered.restart == snapshot.index + 1
    group.entries = entries
    group.last = entries[-1].index if entries else group.flushed
    if gap and (snapshot is None or entries[0].index != snapshot.index + 1 or not restarted):
        if group.whole:
            text = f"entries {group.flushed + 1} to {entries[0].index - 1} are in no file"
            report.damage("log", text, path=wal_path(entries[0].file) if entries[0].file else "wal", group=group.name)
        group.whole = False
        return
    if snapshot is None or snapshot.index <= group.base:
        return
    if restarted or group.term_at(snapshot.index) != snapshot.term:
        # A snapshot that came from another member: the log starts over above it. What was committed before keeps its
        # payloads where they are.
        if group.alone and group.whole:
            where = f"{snapshot.index}@{snapshot.term}"
            text = f"the snapshot is at {where}, which is not in the log (it ends at {group.last})"
            report.damage("snapshot", text, path="meta", group=group.name)
        group.runs = _cut(group.runs, min(group.flushed, group.state.commit))
        group.base, group.base_term, group.terms = snapshot.index, snapshot.term, []
        group.flushed = snapshot.index
        group.entries = entries if restarted else []
        group.last = group.entries[-1].index if group.entries else snapshot.index


def _cut(runs: list[Run], last: int) -> list[Run]:
    """Runs up to an index."""
    return [(first, min(end, last), number) for first, end, number in runs if first <= last]


def _judge(group: GroupLog, report: Report) -> None:
    """What a checkpoint may say of a log."""
    state = group.state
    if group.whole and state.commit > group.last:
        text = f"{state.commit} is committed, the log ends at {group.last}"
        report.damage("log", text, path="meta", group=group.name)
    before = (group.base, group.base_term)
    for first, term in group.terms:
        if term < before[1] or (group.base < first <= before[0]):
            text = f"term {term} from entry {first} on comes after term {before[1]} from {before[0]} on"
            report.damage("log", text, path="meta", group=group.name)
        before = (first, term)
    if group.flushed > group.base and (not group.terms or group.terms[0][0] > group.base + 1):
        report.damage("log", f"no term is known for entry {group.base + 1}", path="meta", group=group.name)
    last_term = group.entries[-1].term if group.entries else before[1]
    if last_term > group.term and group.whole:
        text = f"its log ends in term {last_term}, its stored term is {group.term}"
        report.damage("log", text, path="meta", group=group.name)
    end = 0
    for first, last, number in group.runs:
        if first <= end or last < first:
            text = f"entries {first} to {last} in segment {number} overlap what comes before them"
            report.damage("log", text, path="meta", group=group.name)
        end = max(end, last)


def in_order(group: GroupLog, segments: Segments) -> Iterator[Placed]:
    """Every entry of the group whose metadata is, or should be, in a segment or in the WAL; rising in index."""
    for first, last, number in group.runs:
        path = segment_path(number)
        for found in segments.entries(number, group.spec.uid, first, last):
            if isinstance(found, int):
                yield Placed(found, None, path, number)
            else:
                yield Placed(found.index, found, path, number)
    for entry in group.entries:
        yield Placed(entry.index, entry, wal_path(entry.file) if entry.file else "wal", 0)


def _apply(group: GroupLog, facts: Facts, segments: Segments, homes: Sequence[Home], report: Report) -> None:
    """Walk the log once: no gap, terms as the checkpoint says, and the releases that its commands bring."""
    replay: Replay | None = None
    with report.guarded("machine", group=group.name):
        replay = Replay(group)
    applied = group.snapshot.index if group.snapshot is not None else 0
    holes: list[Hole] = []
    expected, before = group.base + 1, group.base_term
    for index, entry, path, number in in_order(group, segments):
        if index <= group.base:
            # Here a segment is kept for payloads only, and need not have every index.
            if entry is None and number not in segments.numbers:
                _extend(holes, index, index, number)
            continue
        _extend(holes, expected, min(index - 1, group.flushed), 0)
        expected = index + 1
        if entry is None:
            if (number, group.spec.uid, index) not in segments.bad:
                _extend(holes, index, index, number)
            continue
        term = group.term_at(index)
        if entry.term < before or (term and term != entry.term):
            text = f"entry {index} is of term {entry.term} and not of term {term or before}"
            report.damage("log", text, path=path, group=group.name)
        before = max(before, entry.term)
        if index == applied + 1:
            applied = index
            if replay is not None and entry.kind == COMMANDS:
                with report.guarded("machine", path=path, group=group.name):
                    _release(group, replay, entry)
    if replay is not None and replay.exact and applied == group.last:
        group.machine = replay.machine
    _extend(holes, expected, group.flushed, 0)
    spared = [hole for hole in holes if _missing(group, hole, facts, homes, report)]
    if spared:
        names = some([segment_path(number) if number else "none" for _, _, number in spared])
        text = f"its checkpoint names segments that are gone; the snapshot covers their entries: {names}"
        report.warning("stale_run", text, path="meta", group=group.name)


def _missing(group: GroupLog, hole: Hole, facts: Facts, homes: Sequence[Home], report: Report) -> bool:
    """Entries that the checkpoint says are in a segment, and are not. True when some of them are not needed any more.

    The snapshot may cover them, but a WAL file that is still a home needs its segment to find what lives in it.
    """
    first, last, number = hole
    path = segment_path(number) if number else "meta"
    snapshot = group.snapshot.index if group.snapshot is not None else 0
    stretches: list[Hole] = []
    spared = False
    for index in range(first, last + 1):
        dead = group.live_at_end.is_entry_dead(index, RECORDS_MAX)
        moved = dead or number not in facts.wal_files or any(home.first <= index <= home.last for home in homes)
        if index <= snapshot and moved:
            spared = True
        else:
            _extend(stretches, index, index, number)
    for low, high, _ in stretches:
        group.whole = False
        text = f"entries {low} to {high} are missing" if low < high else f"entry {low} is missing"
        report.damage("log", text, path=path, group=group.name)
    return spared


def _release(group: GroupLog, replay: Replay, entry: Entry) -> None:
    """What a command releases may be gone already, also when nobody can say yet that it is committed."""
    for effect in replay.entry(entry):
        if isinstance(effect, Release):
            for first, end in replay.uploads.spared(*effect) if replay.uploads is not None else (effect,):
                group.live_at_end.release(first, end)
    # What a command of the engine's own did is not known here, so what is missing below may be its doing.
    group.whole = group.whole and replay.exact


class Replay:
    """A group's machine and the engine's tables: as of its snapshot, then moved on entry by entry. `exact`: nothing
    was applied that only a running node can apply."""

    __slots__ = ("uid", "machine", "version", "sessions", "uploads", "kept", "exact")

    def __init__(self, group: GroupLog) -> None:
        self.uid = group.spec.uid
        self.machine: Machine = create_machine(group.spec.machine, group.spec.arguments)
        self.sessions: Sessions | None = None
        self.uploads: Uploads | None = None
        self.kept = MachineState()
        self.version = 1
        self.exact = isinstance(self.machine, BatchMachine)
        if group.snapshot is not None:
            sections, engine = replica.split(group.snapshot.sections)
            self.machine.restore(sections)
            self.version = group.snapshot.version
            self.kept = MachineState.of_sections(engine) or self.kept
            self.sessions = replica.sessions_of(engine)
            self.uploads = replica.uploads_of(self.uid, engine)

    def entry(self, entry: Entry) -> Sequence[Effect]:
        """Apply an entry of commands; returns its effects."""
        if not isinstance(self.machine, BatchMachine):
            return ()
        data = entry.data
        context = Context(self.uid, entry.index, entry.term, timestamp_of(data), self.version, records_in(data))
        batch_of, frames = self.machine.apply_batch, list(frames_of(data))
        own_effects: list[Effect] = []

        def run(context: Context, shown: list[Frame]) -> Batch:
            return run_batch(batch_of, context, shown)

        def own(context: Context, command: list[Any]) -> bytes:
            own_effects.extend(self._own(context, *command))
            return b""

        if is_guarded(data):
            guarded = apply_guarded(self.sessions, context, frames, run, own, uploads=self.uploads, data=data)
            self.sessions, batch, self.uploads = guarded
        else:
            batch = run(context, frames)
        effects = [*own_effects, *batch.effects]
        for effect in effects:
            if isinstance(effect, Timer):
                self.kept.set_timer(effect.name, effect.due_ms, False)
        return effects

    def _own(self, context: Context, name: str, *arguments: Any) -> Sequence[Effect]:
        """A command of the engine's own, as far as a stopped log can apply it."""
        machine: Any = self.machine
        if name == "upgrade":
            if self.version < arguments[0] <= machine.version:
                if hasattr(machine, "upgrade"):
                    machine.upgrade(self.version, arguments[0])
                self.version = arguments[0]
        elif name == "timer" and hasattr(machine, "on_timer"):
            timer, due = arguments
            if self.kept.timers.get(timer) == due:
                del self.kept.timers[timer]
                found: Sequence[Effect] = machine.on_timer(context, timer).effects
                return found
        else:
            self.exact = False
        return ()


def _extend(holes: list[Hole], first: int, last: int, segment: int) -> None:
    """One more missing stretch; it may continue the last one."""
    if first > last:
        return
    if holes and holes[-1][1] + 1 == first and holes[-1][2] == segment:
        holes[-1] = (holes[-1][0], last, segment)
    else:
        holes.append((first, last, segment))

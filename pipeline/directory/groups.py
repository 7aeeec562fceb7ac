"""Each group of a stopped directory, judged: its image, as a start would make it, then its log applied from there.

Invariant: how rows, segments and WAL become a log is known to `engine.recovery` alone; here is what only a reader asks:
what of it is proven to be committed, whether every entry is there, and what lives at its end. Called by
`service.check.process` and `reading`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from logyard.engine.entry import COMMANDS, CONFIGURATION, Entry
from logyard.engine.machine import Machine, Release, check_effect
from logyard.engine.recovery.inspect import Facts, Wal, image_of
from logyard.engine.recovery.rebuild import Image, log_base
from logyard.engine.replica import snapshot_sections
from logyard.engine.replica.apply import REPLICATED, Replicated, UnknownVersion, bounded, claims_of, context_of
from logyard.engine.replica.skips import in_force, skips_in
from logyard.engine.snapshot.format import Snapshot
from logyard.engine.types import Spec
from logyard.machines.kv import KV
from logyard.machines.log import AppendLog
from logyard.machines.mux import Mux
from logyard.machines.queue import Queue
from logyard.machines.registry import create_machine
from logyard.payloads.homes import Home
from logyard.payloads.liveness import Liveness, decode_live_set
from logyard.protocol.errors import BadRequest, Corrupt, LogyardError

from .files import Segments, ring_path, segment_path, wal_path
from .report import DAMAGE, UNKNOWN, Report, lacks, some

Hole: TypeAlias = tuple[int, int, int]
"""(first index, last index, the segment that should have them; 0: no checkpoint names one)"""
MachineFactory: TypeAlias = Callable[[str, dict[str, Any]], Machine]
"""Name, arguments -> a fresh machine. Raises `BadRequest` for one that is not at hand."""
RECORDS_MAX = 1 << 31
"""More records than any entry has."""


class GroupLog:
    """One group as it would come up. `whole`: nothing of it is damaged. `live` is what its snapshot says lives,
    `live_at_end` what is left when the whole log is applied: at least those payloads must be here. `commit`: what this
    directory alone proves to be committed. `replay`: as of the log's end; None where that is not known, for the reason
    `unknown`: then more may have died than `live_at_end` says."""

    __slots__ = ("image", "log", "whole", "alone", "commit", "live", "live_at_end", "replay", "unknown")

    def __init__(self, image: Image, whole: bool, node: int) -> None:
        self.image = image
        self.log = image.log
        self.whole = whole
        configurations = image.state.extra.get("configurations") or [[0, 0, b""]]
        self.alone = image.spec.voters == (node,) and len(configurations) == 1 and configurations[0][0] == 0
        self.commit = image.proven_commit
        if self.alone and not any(entry.kind == CONFIGURATION for entry in self.log.entries):
            self.commit = self.last
        self.live = Liveness()
        self.live_at_end = Liveness()
        self.replay: Replay | None = None
        self.unknown = ""

    def damage(self) -> None:
        """Note that something of it is damaged."""
        self.whole = False

    def stop_at(self, why: str) -> None:
        """Note why not all of its log can be applied."""
        self.unknown = why

    def apply_all(self, replay: Replay) -> None:
        """Take its state as of the log's end."""
        self.replay = replay

    @property
    def spec(self) -> Spec:
        """The group's definition."""
        return self.image.spec

    @property
    def name(self) -> str:
        """The group's name."""
        return self.image.spec.name

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest one."""
        return self.image.snapshot

    @property
    def last(self) -> int:
        """The last entry of the log."""
        return self.log.last_index

    @property
    def floor(self) -> int:
        """The payload floor: below it payloads may be missing."""
        return self.image.floor

    @property
    def resolves(self) -> bool:
        """Whether the member may have to serve payloads: below its floor they may be missing (law 4)."""
        return self.last >= self.floor


class Placed(NamedTuple):
    """An entry, None where it is damaged or missing, and the file it belongs to; `segment` is 0 for the WAL and for the
    group's ring."""

    index: int  # type: ignore[assignment]  # tuple.index is not missed
    entry: Entry | None
    path: str
    segment: int


def check_group(
    uid: int,
    facts: Facts,
    wal: Wal,
    segments: Segments,
    homes: Sequence[Home],
    report: Report,
    make: MachineFactory = create_machine,
) -> GroupLog:
    """Put one group together, report what does not fit, and apply its log. `homes`: its payloads in generations.
    `make`: its machine, by name and arguments."""
    group = build_group(uid, facts, wal, report)
    _apply(group, facts, segments, homes, report, make)
    return group


def build_group(uid: int, facts: Facts, wal: Wal, report: Report) -> GroupLog:
    """Put one group together from its rows and the WAL. What does not fit is reported; then the group is not `whole`,
    or the report has damage under its name."""
    image = image_of(uid, facts, wal)
    known = uid in wal.damaged
    group = GroupLog(image, not known and not image.findings, facts.node)
    for finding in image.findings:
        # What follows from damage that is reported already says nothing new.
        if not known or finding.kind == "snapshot":
            report.damage(finding.kind, finding.message, path="meta", group=group.name)
    for text in image.doubts():
        report.damage("log", text, path="meta", group=group.name)
    snapshot, row = image.snapshot, facts.snapshots.get(uid)
    if snapshot is None or row is None:
        return group
    report.count("snapshots")
    if (snapshot.index, snapshot.term) != (row.index, row.term):
        text = f"its row says {row.index}@{row.term}, it says {snapshot.index}@{snapshot.term}"
        report.damage("snapshot", text, path="meta", group=group.name)
    with report.guarded("snapshot", path="meta", group=group.name):
        group.live = decode_live_set(snapshot.live, f"the snapshot of group {group.name}").liveness
        group.live_at_end = decode_live_set(snapshot.live).liveness
    if group.alone and group.whole and group.log.snapshot_index == snapshot.index > log_base(image.state)[0]:
        text = f"the snapshot is at {snapshot.index}@{snapshot.term}, which is not in the log"
        report.damage("snapshot", text, path="meta", group=group.name)
    return group


def in_order(group: GroupLog, segments: Segments) -> Iterator[Placed]:
    """Yield every entry of the group whose metadata is, or should be, in a segment, its ring or the WAL; rising in
    index."""
    uid, terms = group.spec.uid, {run.first: run.term for run in group.image.ring}
    for first, last, number in group.image.places:
        if number:
            path, entries = segment_path(number), segments.entries(number, uid, first, last)
        else:
            path, entries = ring_path(uid), segments.rings.entries(uid, first, last, terms[first])
        for found in entries:
            if isinstance(found, int):
                yield Placed(found, None, path, number)
            else:
                yield Placed(found.index, found, path, number)
    for entry in group.log.entries:
        yield Placed(entry.index, entry, wal_path(entry.file) if entry.file else "wal", 0)


def _apply(
    group: GroupLog, facts: Facts, segments: Segments, homes: Sequence[Home], report: Report, make: MachineFactory
) -> None:
    """Walk the log once: no gap, terms as the checkpoint says, and the releases that its commands bring."""
    replay = _replay_of(group, report, make)
    applied = group.snapshot.index if group.snapshot is not None else 0
    holes: list[Hole] = []
    expected, before = group.log.first_index, group.log.snapshot_term
    for index, entry, path, number in in_order(group, segments):
        if index < group.log.first_index:
            # Here a segment is kept for payloads only, and need not have every index; a ring has nothing to keep.
            if entry is None and number and number not in segments.numbers:
                _extend(holes, index, index, number)
            continue
        _extend(holes, expected, min(index - 1, group.image.flushed), 0)
        expected = index + 1
        if entry is None:
            if (number, group.spec.uid, index) not in segments.bad:
                _extend(holes, index, index, number)
            continue
        term = group.log.term(index) or 0
        if entry.term < before or (term and term != entry.term):
            text = f"entry {index} is of term {entry.term} and not of term {term or before}"
            report.damage("log", text, path=path, group=group.name)
        before = max(before, entry.term)
        if index == applied + 1:
            applied = index
            if entry.kind == COMMANDS and not group.unknown:
                with report.guarded("machine", path=path, group=group.name):
                    _release(group, replay, entry, segments, report)
    if applied < group.last and not group.unknown:
        group.stop_at(f"entry {applied + 1} is not there to be applied")
    if not group.unknown and isinstance(replay, Replay):
        group.apply_all(replay)
    _extend(holes, expected, group.image.flushed, 0)
    spared = [hole for hole in holes if _missing(group, hole, facts, homes, report)]
    if spared:
        names = some([_file_of(group, number) or "none" for _, _, number in spared])
        text = f"its checkpoint names files that are gone; the snapshot covers their entries: {names}"
        report.warning("stale_run", text, path="meta", group=group.name)


def _file_of(group: GroupLog, segment: int) -> str:
    """Return the path of a segment, or of the ring that is there in place of them."""
    return segment_path(segment) if segment else ring_path(group.spec.uid) if group.image.ring else ""


def _replay_of(group: GroupLog, report: Report, make: MachineFactory) -> Replay | str:
    """Return the group as of its snapshot, or why nothing can be applied to it."""
    try:
        return Replay(group, make)
    except UnknownVersion as error:
        return f"its snapshot {error}"
    except BadRequest as error:
        machine = group.spec.machine
        return f"its machine {machine!r} is not at hand ({error}); name it: --machine {machine}=MODULE:CLASS"
    except Exception as error:  # a machine's restore may raise anything
        if lacks(error):
            raise
        text = f"its snapshot can't be restored: {type(error).__name__}: {error}"
        report.damage("machine", text, path="meta", group=group.name)
        return text


def _missing(group: GroupLog, hole: Hole, facts: Facts, homes: Sequence[Home], report: Report) -> bool:
    """Report entries that the checkpoint says are in a segment, and are not. True when some of them are not needed any
    more.

    The snapshot may cover them, but a WAL file that is still a home needs its segment to find what lives in it.
    """
    first, last, number = hole
    path = _file_of(group, number) or "meta"
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
        group.damage()
        text = f"entries {low} to {high} are missing" if low < high else f"entry {low} is missing"
        # Below the snapshot they are needed for what lives of them, and that may be nothing.
        severity = UNKNOWN if group.unknown and high <= snapshot else DAMAGE
        report.add(severity, "log", text, path=path, group=group.name)
    return spared


def _release(group: GroupLog, replay: Replay | str, entry: Entry, segments: Segments, report: Report) -> None:
    """Release what a command releases: it may be gone already, also when nobody can say yet that it is committed."""
    try:
        if isinstance(replay, str):
            raise CannotApply(f"entry {entry.index}: {replay}")
        for first, end in replay.apply(entry, lambda: above_snapshot(group, segments)):
            group.live_at_end.release(first, end)
    except CannotApply as error:
        group.stop_at(str(error))
        text = f"what lives from there on is not known: {error}"
        report.unknown("machine", text, group=group.name)


def above_snapshot(group: GroupLog, segments: Segments) -> Iterator[Entry]:
    """Return the entries that a start would apply, as far as they can be read."""
    base = group.snapshot.index if group.snapshot is not None else 0
    return (one.entry for one in in_order(group, segments) if one.entry is not None and one.index > base)


class CannotApply(LogyardError):
    """A group stands still at an entry: its machine failed there, or is too old or not at hand."""


class Replay(Replicated):
    """A group's replicated state (`engine.replica.apply`): as of its snapshot, then moved on entry by entry, as on a
    member. `deleted`: by an entry of its own log."""

    def __init__(self, group: GroupLog, make: MachineFactory = create_machine) -> None:
        super().__init__(group.spec, make(group.spec.machine, group.spec.arguments))
        self._group = group
        self.deleted = False
        if group.snapshot is not None:
            snapshot_sections.restore(self, group.snapshot)

    def apply(
        self, entry: Entry, log: Callable[[], Iterator[Entry]]
    ) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Apply an entry of commands; return the ranges of payloads that it releases. `log`: all entries above the
        snapshot. What an operator had skipped is left out. Raises `CannotApply` for a command that fails."""
        if self.deleted:
            return iter(())
        if self.left_out is None:
            # As at a start: what is skipped may not fail in the program that is at hand.
            self.foretell(-1, in_force(list(skips_in(log()))))
        try:
            effects = self._effects(entry)
        except Corrupt:
            raise
        except Exception as error:  # a machine may raise anything
            cause = error.__cause__ or error
            raise CannotApply(f"entry {entry.index}: {type(cause).__name__}: {cause}") from error
        if self.deleted:
            # With the group all of its payloads went.
            return iter([((0, 0), (self._group.last + 1, 0))])
        return (part for effect in effects for part in self._released(effect))

    def named(self) -> Iterator[tuple[int, int]]:
        """Yield (first, end) of entries that the state names one by one: each of them has payload."""
        if names_entries(self.machine):
            yield from ((claim.first.index, claim.first.index + 1) for claim in claims_of(self))
        if isinstance(self.machine, AppendLog):
            yield from ((first, first + count) for one in self.machine.long.values() for first, _, count in one.runs)
        if self.uploads is not None:
            yield from ((index, index + 1) for index in self.uploads.indexes)

    def spans(self) -> list[tuple[int, int]]:
        """Return (first, end) of the stretches that the state needs as a whole: entries in them may have no payload."""
        if names_entries(self.machine):
            return []
        return [(one.first.index, one.end.index + 1) for one in claims_of(self) if one.first < one.end]

    def _released(self, effect: Release) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]:
        return self.uploads.spared(*effect) if self.uploads is not None else (effect,)

    def _effects(self, entry: Entry) -> list[Release]:
        context = context_of(self, entry)
        released = []
        for effect in self.run_again(context, entry, self._delete).effects:
            # A member halts at what is none.
            check_effect(effect)
            if isinstance(effect, Release):
                released.append(bounded(context, effect))
            elif isinstance(effect, REPLICATED):
                self.keep(context, effect)
        return released

    def _delete(self, _: object, index: int) -> bytes:
        self.deleted = True
        return b""


def names_entries(machine: Machine) -> bool:
    """Return whether each claim of a machine is of payloads of one entry. A log's is a range, with whatever lies in it;
    what machines of somebody else mean is not known."""
    if isinstance(machine, Mux):
        return all(map(names_entries, machine.parts.values()))
    return isinstance(machine, KV | Queue) or (isinstance(machine, AppendLog) and machine.keys is not None)


def _extend(holes: list[Hole], first: int, last: int, segment: int) -> None:
    """Add one more missing stretch; it may continue the last one."""
    if first > last:
        return
    if holes and holes[-1][1] + 1 == first and holes[-1][2] == segment:
        holes[-1] = (holes[-1][0], last, segment)
    else:
        holes.append((first, last, segment))

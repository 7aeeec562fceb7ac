"""One group, put together from its rows in the meta store and from what the WAL says on top of them: an image of the
replica, and findings where they do not fit together.

Pure: nothing here reads a file, waits or changes what it is given. The only place that knows the rules: a start makes
its member of the image and raises on findings (`engine.recovery.open`), `logyard check` prints them and Spark reads the
log (`inspect`). What departed, what is being mended and what slept are inputs, decided by whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from logyard.protocol.errors import Corrupt

from ..log.meta_rows import Departed, GroupRow, RingRun, SegmentRun, SnapshotRow, StateRow, cut_runs, places
from ..log.recovered import Recovered
from ..raft.configuration import Configuration
from ..raft.raft_log import RaftLog
from ..snapshot.format import Snapshot
from ..types import Spec


class Finding(NamedTuple):
    """Records that do not fit together. `kind`: log or snapshot; `error`: what a start raises."""

    kind: str
    message: str
    error: Exception


class Image:
    """One replica as of its directory. `term`, `vote` and `commit` are as stored: the core raises them to what log and
    snapshot prove. `base` is the configuration in force at an index, `configurations` are later ones that lie in
    segments; `runs` locate entries in segments and `ring` in the group's ring, which reach up to `flushed`; `promise`
    is (term, index) of the last entry that an earlier replica held.

    With findings, it is what is left when the records that do not fit are passed over.
    """

    __slots__ = (
        "spec", "state", "snapshot", "term", "vote", "commit", "floor", "compactable", "promise", "log", "runs",
        "ring", "flushed", "base", "configurations", "findings", "mended",
    )  # fmt: skip

    def __init__(self, spec: Spec, state: StateRow, snapshot: Snapshot | None, mended: bool) -> None:
        self.spec = spec
        self.state = state
        self.snapshot = snapshot
        self.mended = mended
        self.term, self.vote, self.commit, self.floor = state.term, state.vote, state.commit, state.floor
        self.compactable = 0
        self.promise = (0, 0)
        self.log = RaftLog() if snapshot is None else RaftLog(snapshot.index, snapshot.term)
        self.runs: list[SegmentRun] = list(state.runs)
        self.ring: list[RingRun] = []
        self.flushed = self.log.last_index
        self.base = (0, Configuration(spec.voters))
        self.configurations: list[tuple[int, Configuration]] = []
        self.findings: list[Finding] = []

    def check(self) -> None:
        """Raise what is wrong, if anything is."""
        if self.findings:
            raise self.findings[0].error

    def doubts(self) -> Iterator[str]:
        """Find what a start lives with, and no start would have written: others mend nothing of it."""
        state, log = self.state, self.log
        if not self.mended and state.commit > log.last_index:
            yield f"{state.commit} is committed, the log ends at {log.last_index}"
        if not self.mended and state.snapshot_index > self.snapshot_index:
            at = state.snapshot_index
            yield f"the checkpoint names a snapshot at {at}; the newest there is, is at {self.snapshot_index}"
        before = (log.snapshot_index, log.snapshot_term)
        for first, term in log.runs:
            if term < before[1] or (log.snapshot_index < first <= before[0]):
                yield f"term {term} from entry {first} on comes after term {before[1]} from {before[0]} on"
            before = (first, term)
        end = 0
        for first, last, number in self.runs:
            if first <= end or last < first:
                yield f"entries {first} to {last} in segment {number} overlap what comes before them"
            end = max(end, last)
        end = 0
        for first, last, term in self.ring:
            # Terms never fall, so those at the ends are those of all in between.
            ends = {log.term(index) for index in (max(first, log.first_index), last) if index >= log.first_index}
            if first <= end or last < first or last > self.flushed or ends - {term}:
                yield f"entries {first} to {last} of term {term} in the ring do not fit the log"
            end = max(end, last)

    @property
    def places(self) -> list[SegmentRun]:
        """Return which file has which entries, rising and disjoint; segment 0 is the group's ring."""
        return places(self.runs, self.ring)

    @property
    def snapshot_index(self) -> int:
        """Return the index of the snapshot; 0: there is none."""
        return self.snapshot.index if self.snapshot is not None else 0

    @property
    def proven_term(self) -> int:
        """Return the term that the core begins in: a snapshot may be durable before the term that came with it."""
        return max(self.term, self.log.last_term)

    @property
    def proven_commit(self) -> int:
        """Return the commit index that the core begins with: a stored one may speak of entries that are not here."""
        return max(min(self.commit, self.log.last_index), self.log.snapshot_index)

    def guarded(self, step: Callable[[], None]) -> None:
        """Take one step. Rows that verify may say anything, and nonsense may raise anything."""
        try:
            step()
        except Exception as error:
            self.findings.append(Finding("log", f"{type(error).__name__}: {error}", error))

    def take_promises(self, recovered: Recovered, departed: Departed | None) -> None:
        """Take over what this replica, and the one before it, promised."""
        self.floor = max(self.floor, recovered.floor)
        if recovered.hard_state is not None:
            term, vote, commit = recovered.hard_state
            self.commit = max(self.commit, commit)
            if (term, vote) >= (self.term, self.vote):
                self.term, self.vote = term, vote
        if departed is not None:
            self.promise = (departed.last_term, departed.last_index)
            if self.term <= departed.term:
                # What it promised holds (see `host.replica_gc`).
                kept = self.vote if self.term == departed.term and self.vote else departed.vote
                self.term, self.vote = departed.term, kept
        if self.mended:
            # The commit index may speak of entries that took the place of those which are left.
            self.commit = 0
        if self.snapshot is not None:
            stored = self.snapshot.index
            self.commit = max(self.commit, stored)
            self.compactable = min(int(self.state.extra.get("compactable", stored)), stored)

    def join(self, recovered: Recovered) -> None:
        """Put the log together: the snapshot's base, segments and ring, and the WAL as memory."""
        spec, state, snapshot = self.spec, self.state, self.snapshot
        self.ring = state.ring
        base_index, base_term = log_base(state)
        if base_index > self.snapshot_index:
            newest = snapshot and snapshot.index
            error = Corrupt(f"group {spec.name}", 0, f"a snapshot at {base_index} or above", newest)
            text = f"the log begins above {base_index}, and the newest snapshot is at {self.snapshot_index}"
            self.findings.append(Finding("snapshot", text, error))
        self.flushed = flushed = flushed_through(state, recovered)
        if recovered.lowest:
            self.runs, self.ring = cut_runs(self.runs, flushed + 1), cut_runs(self.ring, flushed + 1)
        entries = recovered.entries
        if entries and entries[0].index <= flushed:
            entries = [entry for entry in entries if entry.index > flushed]
        jumped = bool(entries) and entries[0].index > flushed + 1
        if jumped and (snapshot is None or entries[0].index != snapshot.index + 1):
            error = Corrupt(f"group {spec.name}", 0, f"entry {flushed + 1} in the WAL", f"entry {entries[0].index}")
            text = f"entries {flushed + 1} to {entries[0].index - 1} are in no file"
            self.findings.append(Finding("log", text, error))
            entries, jumped = [], False
        term_runs = [run for run in state.term_runs if run[0] <= flushed]
        if snapshot is not None and snapshot.index > base_index:
            restarted = recovered.restart == snapshot.index + 1
            if not jumped and not restarted:
                self.log = RaftLog(base_index, base_term, term_runs, entries, last_index=flushed)
                if self.log.term(snapshot.index) == snapshot.term:
                    return
            # An installed snapshot: the log starts over above it, whatever stood there before. What was committed still
            # has its payloads where they were; those above came with the snapshot.
            self.runs, self.ring = cut_runs(self.runs, placed_through(state, recovered) + 1), []
            self.log = RaftLog(snapshot.index, snapshot.term, (), entries if restarted else [])
            self.flushed = snapshot.index
            return
        self.log = RaftLog(base_index, base_term, term_runs, entries, last_index=flushed)

    def check_term(self) -> None:
        """Find a log that is ahead of the stored term. An installed snapshot may be durable before the term that came
        with it; the core takes that over from the log."""
        term_in_log, snapshot = self.log.last_term, self.snapshot
        if term_in_log > max(self.term, snapshot.term if snapshot is not None else 0):
            error = Corrupt(f"group {self.spec.name}", 0, f"a stored term of at least {term_in_log}", self.term)
            text = f"its log ends in term {term_in_log}, its stored term is {self.term}"
            self.findings.append(Finding("log", text, error))

    def configure(self) -> None:
        """Find the configuration in force and the later ones that are in segments."""
        stored, log, snapshot = self.state.extra.get("configurations", []), self.log, self.snapshot
        if stored:
            index, _, data = stored[0]
            self.base = (int(index), Configuration.decode(data))
        self.configurations = [
            (int(index), Configuration.decode(data)) for index, term, data in stored[1:] if log.term(index) == term
        ]
        if snapshot is not None and snapshot.index >= self.base[0] and log.snapshot_index == snapshot.index:
            self.base = (snapshot.index, Configuration.decode(snapshot.configuration))
            self.configurations = [pair for pair in self.configurations if pair[0] > snapshot.index]


def rebuild(
    spec: Spec,
    state: StateRow | None,
    snapshot: Snapshot | None,
    recovered: Recovered,
    departed: Departed | None = None,
    mended: bool = False,
) -> Image:
    """Return a replica's image from its checkpoint, its snapshot and what the WAL says on top. `departed`: what the
    replica before it promised; `mended`: it lost what came after that, and others will bring it."""
    state = state or StateRow(spec.uid)
    image = Image(spec, state, snapshot, mended)
    image.guarded(lambda: image.take_promises(recovered, departed))
    image.guarded(lambda: image.join(recovered))
    if not image.findings and not mended:
        image.check_term()
    image.guarded(image.configure)
    return image


def log_base(state: StateRow | None) -> tuple[int, int]:
    """Return (index, term) that the stored log starts above."""
    index, term = state.extra.get("log", (0, 0)) if state is not None else (0, 0)
    return index, term


def flushed_through(state: StateRow, recovered: Recovered) -> int:
    """Return the last entry that segments have of the log: what the WAL wrote after the last flush overwrote the end of
    what was flushed."""
    base = log_base(state)[0]
    flushed = max(int(state.extra.get("flushed", 0)), base)
    return max(recovered.lowest - 1, base) if recovered.lowest and recovered.lowest <= flushed else flushed


def placed_through(state: StateRow, recovered: Recovered) -> int:
    """Return the last entry whose payload is where the rows say, whatever a snapshot put in the place of the log."""
    return min(flushed_through(state, recovered), state.commit)


def slept_on(state: StateRow, snapshot: SnapshotRow | None, recovered: Recovered) -> bool:
    """Return whether a group hibernated, and the WAL says nothing of it but what happened before."""
    last = int(log_base(state)[0])
    if "asleep" not in state.extra or state.runs or state.ring or snapshot is None or snapshot.index != last:
        return False
    hard = recovered.hard_state or (0, 0, 0)
    newer = hard[0] > state.term or (hard[0] == state.term and hard[1] not in (0, state.vote))
    return not newer and recovered.end <= last and recovered.restart <= last + 1 and recovered.floor <= state.floor


def never_used(
    state: StateRow | None, snapshot: SnapshotRow | None, recovered: Recovered | None, departed: Departed | None
) -> bool:
    """Return whether a group's definition is all there is of it: whoever promised anything has one of these."""
    return state is None and snapshot is None and recovered is None and departed is None


def spec_of(row: GroupRow, decoded: dict[bytes, tuple[int, ...]] | None = None) -> Spec:
    """Return the definition that a row holds. Raises `Corrupt`. `decoded`: what the configurations of other rows say,
    of which there are few; this row's is added."""
    voters = decoded.get(row.configuration) if decoded is not None else None
    if voters is None:
        voters = Configuration.decode(row.configuration).voters
        if decoded is not None:
            decoded[row.configuration] = voters
    return Spec(row.uid, row.name, row.machine, row.arguments, voters, row.created)

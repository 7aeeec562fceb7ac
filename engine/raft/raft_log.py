"""The group's log as the core sees it, and at the same time the group's memtable.

Invariants: snapshot_index <= memory_first - 1 <= last_index and stable <= last_index; entries
memory_first..last_index are in memory, what lies between snapshot_index and memory_first is in segments and only its
terms are known here, as runs; terms never fall along the log. When the log is truncated, `stable` falls first (Ra bug
637): nobody can see a stable index above the end. Used by every verb here; the host releases memory when a segment is
durable and compacts when a snapshot is.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..entry import Entry

SEGMENT_ENTRIES = 64
"""Entries asked of segments at once while nothing is known of their size."""
SEGMENT_ENTRIES_MAX = 4096


class RaftLog:
    """Entries in memory, term runs [(first index, term)] for the whole log above the snapshot.

    `runs` need only cover what lies below the first of `entries`; `last_index` must be given when `runs` are and
    `entries` are not. What the constructor is given is durable: `stable` starts at the end.
    """

    __slots__ = (
        "snapshot_index", "snapshot_term", "runs", "entries", "memory_first", "last_index", "last_term", "stable",
        "mean_bytes",
    )  # fmt: skip

    def __init__(
        self,
        snapshot_index: int = 0,
        snapshot_term: int = 0,
        runs: Sequence[tuple[int, int]] = (),
        entries: Sequence[Entry] = (),
        *,
        last_index: int = 0,
    ) -> None:
        below = entries[0].index - 1 if entries else max(last_index, snapshot_index)
        assert below >= snapshot_index, "entries start above the snapshot"
        kept = [run for run in runs if run[0] <= below]
        assert bool(kept) == (below > snapshot_index), "term runs cover exactly what lies between snapshot and memory"
        assert not kept or kept[0][0] <= snapshot_index + 1, "term runs start right above the snapshot"
        self.snapshot_index = snapshot_index
        self.snapshot_term = snapshot_term
        self.runs: tuple[tuple[int, int], ...] = tuple(kept)
        self.entries: list[Entry] = []
        self.memory_first = below + 1
        self.last_index = below
        self.last_term = kept[-1][1] if kept else snapshot_term
        self.mean_bytes = 0
        self.append(entries)
        self.stable = self.last_index

    @property
    def first_index(self) -> int:
        """The first index above the snapshot; the log may be empty."""
        return self.snapshot_index + 1

    def term(self, index: int) -> int | None:
        """Return the term of the entry at `index`; None when it is compacted or not there. The snapshot's own index has
        its term."""
        if index > self.last_index or index < self.snapshot_index:
            return None
        if index == self.snapshot_index:
            return self.snapshot_term
        runs = self.runs
        if index >= runs[-1][0]:
            return runs[-1][1]
        return next(term for first, term in reversed(runs) if first <= index)

    def entry(self, index: int) -> Entry | None:
        """Return the entry at `index`; None unless it is in memory."""
        if self.memory_first <= index <= self.last_index:
            return self.entries[index - self.memory_first]
        return None

    def slice(self, first: int, last: int, max_bytes: int) -> list[Entry] | None:
        """Return entries first..last (inclusive), at most `max_bytes` of them but always one (pitfall 35).

        None when `first` is below memory: the host reads it from segments. Empty only when first > last.
        """
        found = self.window(first, last, max_bytes)
        return None if found is None else found[0]

    def window(self, first: int, last: int, max_bytes: int) -> tuple[list[Entry], int] | None:
        """Return what `slice` does, with the bytes of what was found."""
        at = first - self.memory_first
        if at < 0:
            return None
        if first == last:
            entry = self.entries[at]
            return [entry], len(entry.data) + entry.body_bytes
        found = self.entries[at : last + 1 - self.memory_first]
        total = 0
        for count, entry in enumerate(found):
            size = len(entry.data) + entry.body_bytes
            if total + size > max_bytes and count:
                return found[:count], total
            total += size
        return found, total

    def bytes_of(self, first: int, last: int) -> int:
        """Return bytes of entries first..last; of those that left memory only the mean is known."""
        below = max(0, min(self.memory_first, last + 1) - first)
        found = self.window(max(first, self.memory_first), last, 1 << 62) if last >= self.memory_first else None
        return below * self.mean_bytes + (found[1] if found is not None else 0)

    def segment_last(self, first: int, max_bytes: int) -> int:
        """Return the last entry to ask of segments together with `first`: about `max_bytes`, going by what left memory
        so far."""
        count = max_bytes // self.mean_bytes if self.mean_bytes else SEGMENT_ENTRIES
        return min(self.memory_first - 1, first + max(1, min(count, SEGMENT_ENTRIES_MAX)) - 1)

    def push(self, entry: Entry) -> None:
        """Append one entry: `append` without its loop."""
        index = self.last_index + 1
        assert entry.index == index and entry.term >= self.last_term, f"{entry} does not continue {self}"
        if entry.term != self.last_term or not self.runs:
            self.runs = (*self.runs, (index, entry.term))
            self.last_term = entry.term
        self.entries.append(entry)
        self.last_index = index

    def append(self, entries: Sequence[Entry]) -> None:
        """Append a contiguous run. Only its ends are looked at unless the term changes within it."""
        if not entries:
            return
        first, last = entries[0], entries[-1]
        assert first.index == self.last_index + 1, f"{first} does not continue {self}"
        assert last.index == self.last_index + len(entries), f"a gap before {last}"
        assert first.term >= self.last_term, f"the term falls at {first}"
        if last.term != self.last_term or not self.runs:
            runs = list(self.runs)
            term = runs[-1][1] if runs else -1
            for entry in entries:
                if entry.term != term:
                    assert entry.term > term, f"the term falls at {entry}"
                    term = entry.term
                    runs.append((entry.index, term))
            self.runs = tuple(runs)
            self.last_term = last.term
        self.entries += entries
        self.last_index = last.index

    def truncate(self, from_index: int) -> None:
        """Drop entries >= `from_index`. The stable index falls before anything else."""
        assert self.snapshot_index < from_index <= self.last_index, f"can not truncate {self} from {from_index}"
        self.stable = min(self.stable, from_index - 1)
        if from_index > self.memory_first:
            del self.entries[from_index - self.memory_first :]
        else:
            self.entries = []
            self.memory_first = from_index
        self.last_index = from_index - 1
        self.runs = tuple(run for run in self.runs if run[0] < from_index)
        self.last_term = self.runs[-1][1] if self.runs else self.snapshot_term

    def release_memory(self, upto: int) -> None:
        """Drop entries <= `upto`, which are in a durable segment, from memory; keep their terms. Never what is not
        stable."""
        count = min(upto, self.stable) + 1 - self.memory_first
        if count <= 0:
            return
        released = self.entries[:count]
        self.mean_bytes = max(1, sum(len(entry.data) + entry.body_bytes for entry in released) // count)
        del self.entries[:count]
        self.memory_first += count

    def compact(self, index: int, term: int) -> None:
        """Forget entries and terms at and below `index`, where a durable snapshot stands. Older or equal ones change
        nothing."""
        if index <= self.snapshot_index:
            return
        assert index <= self.last_index and self.term(index) == term, f"no entry {index}@{term} in {self}"
        if index >= self.memory_first:
            del self.entries[: index + 1 - self.memory_first]
            self.memory_first = index + 1
        above = tuple(run for run in self.runs if run[0] > index)
        if index < self.last_index and (not above or above[0][0] > index + 1):
            following = self.term(index + 1)
            assert following is not None
            above = ((index + 1, following), *above)
        self.snapshot_index = index
        self.snapshot_term = term
        self.runs = above
        # The snapshot is durable, and with it everything it stands for.
        self.stable = max(self.stable, index)

    def reset(self, index: int, term: int) -> None:
        """Start over above `index`, where a snapshot was installed that does not continue this log."""
        self.stable = index
        self.entries = []
        self.runs = ()
        self.memory_first = index + 1
        self.last_index = self.snapshot_index = index
        self.last_term = self.snapshot_term = term

    def conflict_hint(self, index: int, term: int) -> int:
        """Return the largest index <= `index` whose term is <= `term`: no entry above it can match one of `term` (etcd
        findConflictByTerm).

        Where the log is compacted nothing is known, so `index` or the snapshot's index is the answer.
        """
        index = min(index, self.last_index)
        end = self.last_index
        for first, run_term in reversed(self.runs):
            if run_term <= term and first <= index:
                return min(index, end)
            end = first - 1
        return min(index, self.snapshot_index)

    def check(self) -> None:
        """Assert the invariants of this module's head."""
        assert self.snapshot_index <= self.memory_first - 1 <= self.last_index
        assert self.stable <= self.last_index
        assert len(self.entries) == self.last_index + 1 - self.memory_first
        assert bool(self.runs) == (self.last_index > self.snapshot_index)
        for offset, entry in enumerate(self.entries):
            assert entry.index == self.memory_first + offset and self.term(entry.index) == entry.term
        assert self.term(self.last_index) == self.last_term
        pairs = list(zip(self.runs, self.runs[1:], strict=False))
        assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairs), self.runs

    def __repr__(self) -> str:
        return (
            f"RaftLog({self.snapshot_index}@{self.snapshot_term} memory {self.memory_first}.. last {self.last_index}"
            f"@{self.last_term} stable {self.stable})"
        )

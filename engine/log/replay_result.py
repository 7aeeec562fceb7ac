"""What a replay of the WAL found, and what its caller knew before. Plain data, made by `wal_replay`, read by the host.

Invariant: whatever was acknowledged and is not in here is named by a `Damage`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from ..entry import Entry
from .record import FileHead
from .wal_files import Sealed

LIFE_BATCHES = 1 << 36
"""More batches than a process writes in its life."""


class Damage(NamedTuple):
    """Bytes that do not verify. `uid` 0: nobody knows whose they were, and every group not in `cleared` is suspect."""

    uid: int
    file: int
    offset: int
    reason: str

    @property
    def mark(self) -> int:
        """A number that this damage alone has, in every replay that meets it."""
        return int(xxh3_64_intdigest(f"{self.file}:{self.offset}:{self.reason}".encode()))


class Cut(NamedTuple):
    """The host's word for one group: its damage up to and with batch `through` is known, namely what has one of the
    marks `seen` (None: all of it). `whole`: nothing up to there is its log any more."""

    through: int
    whole: bool
    seen: Container[int] | None = None

    def covers(self, batch: int, mark: int) -> bool:
        """Return whether damage that is met in a batch is known."""
        return batch <= self.through and (self.whole or self.seen is None or mark in self.seen)


class Current(NamedTuple):
    """The file that takes the next batches. `idle`: its last batch is empty or missing; `torn`: bytes were cut."""

    head: FileHead
    tail: int
    entries: list[tuple[int, Entry]]
    idle: bool
    torn: bool


class ReplayResult:
    """What `Wal.open` continues from, and what the host has to repair.

    `sealed` are the replayed files before the current one; `healed` is damage that cost nothing, thanks to a second
    copy. `cleared` are the groups known to have lost nothing to damage without a name. `last_index` has no damaged
    group. `sure` are the groups with a hard state behind all damage that may have been theirs. `spoiled` are the files
    of which something was left out, `first_batch` is the number of the first batch replayed.
    """

    __slots__ = (
        "sealed", "current", "damage", "healed", "cleared", "last_index", "last_batch", "next_epoch", "next_batch",
        "previous", "unknown_through", "sure", "spoiled", "first_batch",
    )  # fmt: skip

    def __init__(self) -> None:
        self.sealed: list[Sealed] = []
        self.current: Current | None = None
        self.damage: list[Damage] = []
        self.healed: list[Damage] = []
        self.cleared: set[int] = set()
        self.last_index: dict[int, int] = {}
        self.last_batch: dict[int, int] = {}
        self.next_epoch = 1
        self.next_batch = 1
        # (epoch, end) of the newest file that is not continued.
        self.previous = (0, 0)
        self.unknown_through = 0
        self.sure: set[int] = set()
        self.spoiled: set[int] = set()
        self.first_batch = 0

    def begin_file(self, epoch: int) -> None:
        """Note the newest file; nothing of it is continued yet."""
        self.next_epoch = epoch + 1
        self.previous = (epoch, 0)

    def begin_batches(self, number: int) -> None:
        """Note the number of a batch that is replayed; the first one counts."""
        self.first_batch = self.first_batch or number

    def go_on(self, number: int) -> None:
        """Let the next batch have this number."""
        self.next_batch = number

    def follow(self, epoch: int, end: int, number: int) -> None:
        """Let another file follow the newest one, which is flushed and ends there."""
        self.previous = (epoch, end)
        self.next_batch = number

    def continue_in(self, current: Current) -> None:
        """Let this file take the next batches."""
        self.current = current

    def conclude(
        self,
        last_index: dict[int, int],
        last_batch: dict[int, int],
        hurt: set[int],
        newest: int,
        cuts: Mapping[int, Cut],
    ) -> None:
        """Take over where each group ended, and clear those that lost nothing: `newest` is the last batch that may have
        held anybody's records, if there is damage without a name."""
        self.last_index, self.last_batch = last_index, last_batch
        self.cleared = set(last_batch) - hurt
        self.spoiled |= {damage.file for damage in self.damage}
        marks = [damage.mark for damage in self.damage if damage.uid == 0]
        if marks:
            self.unknown_through = newest
            seen = {uid for uid, cut in cuts.items() if all(cut.covers(newest, mark) for mark in marks)}
            self.cleared = ({uid for uid, batch in last_batch.items() if batch > newest} | seen) - hurt
            # Suspects of this run stay suspects of the next one: their next row will point into the hole.
            self.last_batch = {uid: max(batch, newest) for uid, batch in last_batch.items()}

    def look_for_last_file(self, flushed: int, cuts: Mapping[int, Cut], lives: int) -> None:
        """Add the damage of a directory that has had so many `lives` and has no file behind those up to `flushed`,
        which are in segments: the newest file is made before the one before it gets its segment. The one that is made
        now has a number above those, and its batches numbers above all there were: a replay passes over those that
        rows of damaged groups speak of, and other nodes take who has fewer than it had for an older copy."""
        replayed = {sealed.file for sealed in self.sealed} | ({self.current.head.epoch} if self.current else set())
        if flushed + 1 in replayed:
            return
        text = "the file is missing, and with it what groups had written last"
        self.damage.append(Damage(0, flushed + 1, 0, text))
        if self.current is None:
            self.next_epoch = max(self.next_epoch, flushed + 1)
            self.previous = (0, 0)
            through = max((cut.through for cut in cuts.values()), default=0)
            self.next_batch = max(self.next_batch, through + 1, lives * LIFE_BATCHES)
        # Nobody can tell which of the batches that later rows speak of were in it.
        marks = [one.mark for one in self.damage if one.uid == 0]
        first = self.first_batch
        self.cleared = {uid for uid, cut in cuts.items() if first and all(cut.covers(first, mark) for mark in marks)}

"""What a WAL says of each group, gathered during a replay: entries, hard state, floor, and where the log was cut.

The sink of `wal_replay.replay`; from it a start builds members (`host.recovery`), and who reads a stopped directory its
logs (`pipeline.directory`).
"""

from __future__ import annotations

from ..entry import Entry


class Recovered:
    """What the WAL says of one group, gathered in write order.

    `lowest` is the lowest index written or voided, `end` where the log ended last (-1: not known), `restart` where it
    started over above an installed snapshot (0: it did not).
    """

    __slots__ = ("entries", "hard_state", "floor", "lowest", "end", "restart")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.hard_state: tuple[int, int, int] | None = None
        self.floor = 0
        self.lowest = 0
        self.end = -1
        self.restart = 0

    def say(self, hard_state: tuple[int, int, int]) -> None:
        """Take a newer hard state."""
        self.hard_state = hard_state

    def cut(self, index: int) -> None:
        """Void the entries from `index` on."""
        entries = self.entries
        if entries and index <= entries[-1].index:
            del entries[max(0, index - entries[0].index) :]
        self.lowest = min(self.lowest or index, index)


class Collector:
    """The sink of replay."""

    def __init__(self) -> None:
        self.groups: dict[int, Recovered] = {}

    def of(self, uid: int) -> Recovered:
        """Return one group's record."""
        found = self.groups.get(uid)
        if found is None:
            found = self.groups[uid] = Recovered()
        return found

    def hard_state(self, uid: int, term: int, vote: int, commit: int) -> None:
        """Take a hard state: the newest wins; within a term a set vote never changes."""
        self.of(uid).say((term, vote, commit))

    def entry(self, uid: int, entry: Entry) -> None:
        """Append, voiding what it overwrites."""
        group = self.of(uid)
        if entry.index != group.end + 1:
            group.cut(entry.index)
        group.entries.append(entry)
        group.end = entry.index

    def truncate(self, uid: int, from_index: int) -> None:
        """Void a tail; the log may go on above where it ended (a snapshot was installed)."""
        group = self.of(uid)
        if 0 <= group.end < from_index - 1:
            group.entries = []
            group.restart = from_index
        group.cut(from_index)
        group.end = from_index - 1

    def floor(self, uid: int, p: int) -> None:
        """Raise the payload floor."""
        group = self.of(uid)
        group.floor = max(group.floor, p)

"""What the log tests share: real entries, and a sink that keeps what a memtable would, also fed by WAL items."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from logyard.engine.disk.door import Disk
from logyard.engine.entry import Entry, build_commands
from logyard.engine.log.wal import Wal, WalConfig, WalItem
from logyard.engine.log.wal_replay import ReplayResult, replay
from logyard.engine.types import Buffer
from logyard.protocol.frame import encode_frame

SMALL = WalConfig(file_bytes=64 * 1024, batch_bytes=16 * 1024, stock=2)


def command(uid: int, index: int, term: int = 1, bodies: Sequence[bytes] = (), tombstone: int = 0) -> Entry:
    """An entry as a leader makes it, with a payload per body."""
    records: list[tuple[bytes, Buffer | None]] = [(b"head", body) for body in bodies] or [(b"head", None)]
    frame = memoryview(b"".join(encode_frame(records, command=b"put %d@%d" % (index, term), sequence=index)))
    entry = build_commands(uid, index, term, 1_700_000_000_000 + index, [frame])
    if tombstone:
        entry.tombstone, entry.bodies = tombstone, None
    return entry


def commands(uid: int, first: int, last: int, term: int = 1) -> list[Entry]:
    return [command(uid, index, term) for index in range(first, last + 1)]


class Memory:
    """A sink: per group, what it would hold in memory after a restart."""

    def __init__(self) -> None:
        self.hard: dict[int, tuple[int, int, int]] = {}
        self.log: dict[int, dict[int, tuple[int, bytes, int]]] = {}
        self.floors: dict[int, int] = {}
        self.found: list[tuple[int, Entry]] = []

    def hard_state(self, uid: int, term: int, vote: int, commit: int) -> None:
        self.hard[uid] = (term, vote, commit)

    def entry(self, uid: int, entry: Entry) -> None:
        self.truncate(uid, entry.index)
        self.log[uid][entry.index] = (entry.term, entry.data, entry.tombstone)
        self.found.append((uid, entry))

    def truncate(self, uid: int, from_index: int) -> None:
        entries = self.log.setdefault(uid, {})
        for index in [index for index in entries if index >= from_index]:
            del entries[index]

    def floor(self, uid: int, p: int) -> None:
        self.floors[uid] = p

    def take(self, items: Sequence[WalItem]) -> None:
        """The model: what the WAL must give back for items it acknowledged."""
        for item in items:
            if item.hard_state is not None:
                self.hard_state(item.uid, *item.hard_state)
            if item.floor:
                self.floor(item.uid, item.floor)
            if item.truncate:
                self.truncate(item.uid, item.truncate)
            for entry in item.entries:
                self.entry(item.uid, entry)

    def group(self, uid: int) -> tuple[object, ...]:
        return self.hard.get(uid), self.log.get(uid, {}), self.floors.get(uid)

    def state(self) -> dict[int, tuple[object, ...]]:
        uids = self.hard.keys() | self.log.keys() | self.floors.keys()
        return copy.deepcopy({uid: self.group(uid) for uid in uids})


def recover(disk: Disk, directory: str, flushed_through: int = 0) -> tuple[Memory, ReplayResult]:
    memory = Memory()
    return memory, replay(disk, directory, memory, flushed_through)


def open_wal(
    disk: Disk, directory: str, config: WalConfig = SMALL, salt: int = 0, flushed_through: int = 0
) -> tuple[Wal, Memory, ReplayResult]:
    """Recover and open; `salt` makes the bytes repeatable."""
    memory, result = recover(disk, directory, flushed_through)
    wal = Wal(disk, directory, config, (lambda: salt)) if salt else Wal(disk, directory, config)
    wal.adopt(result)
    wal.open()
    return wal, memory, result


def payload(entry: Entry) -> bytes:
    return b"".join(entry.bodies or ())

"""Where an entry's payload is found, and what is made of bytes that are missing, without a node: a log in memory,
segments, generations and a WAL that are dictionaries."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import trio

from logyard.engine.entry import Entry, build_commands, units_of
from logyard.engine.log.meta_rows import SegmentRun
from logyard.engine.raft.raft_log import RaftLog
from logyard.engine.replica import reader
from logyard.engine.replica.member import Member
from logyard.engine.replica.reader import THREAD_BYTES, Located, Reader, Wanted
from logyard.protocol.errors import Busy, Corrupt, Gone, LogyardError, PayloadCorrupt
from logyard.protocol.frame import encode_frame

from .doubles import TERM, UID, Recorder, member_of


class Home(NamedTuple):
    first: int
    last: int
    generation: int


def entry_of(index: int, body: bytes = b"body", stamp: int = 5) -> Entry:
    frame = memoryview(b"".join(encode_frame([(b"", body)], command=b"put")))
    return build_commands(UID, index, TERM, stamp, [frame])


class Bench:
    """A member of which entries 1 to `memory` - 1 left memory; `segments` are (number, entries) that have them."""

    def __init__(self, count: int = 9, memory: int = 1) -> None:
        self.entries = {index: entry_of(index, b"body %d" % index) for index in range(1, count + 1)}
        self.wal: dict[tuple[int, int], bytes] = {}
        self.homes_: list[Home] = []
        self.damaged: set[int] = set()
        self.asked: list[LogyardError] = []
        self.pinned: list[tuple[str, int]] = []
        self.seen: list[list[tuple[str, int]]] = []
        segments: Any = SimpleNamespace(reader=lambda number: SimpleNamespace(entries=self.segment))
        self.reader = Reader(cast(Any, self), segments, cast(Any, None), self, self.read_wal, self.mend)
        self.member: Member = member_of(Recorder())[0]
        later = [self.entries[index] for index in range(memory, count + 1)]
        log = RaftLog(runs=[(1, TERM)] if memory > 1 else [], entries=later, last_index=memory - 1)
        cast(Any, self.member.raft).log = log
        self.member.raft.applied = count
        self.member.segments = [SegmentRun(1, memory - 1, 7)] if memory > 1 else []

    # The payload store

    def home(self, uid: int, index: int) -> Home | None:
        return next((one for one in self.homes_ if one.first <= index <= one.last), None)

    def homes(self, uid: int) -> list[Home]:
        return self.homes_

    def scan(self, uid: int, first: int, last: int) -> Iterator[Any]:
        for index in range(first, last + 1):
            yield SimpleNamespace(index=index, term=TERM, data=self.entries[index].data)

    def read_unit(self, uid: int, index: int, number: int, start: int, stop: int) -> bytes:
        self.look()
        if index in self.damaged:
            raise Corrupt("generation", 0, "this", "that")
        bodies = self.entries[index].bodies
        assert bodies is not None
        return bytes(bodies[number])[start:stop]

    # Segments, the WAL, pins, peers

    def segment(self, uid: int, first: int, last: int, bytes_max: int) -> list[Entry]:
        return [self.entries[index] for index in range(first, last + 1) if index not in self.damaged]

    def read_wal(self, file: int, offset: int, length: int) -> bytes:
        self.look()
        base = max(at for number, at in self.wal if number == file and at <= offset)
        return self.wal[file, base][offset - base :][:length]

    def look(self) -> None:
        self.seen.append(sorted(self.pinned))

    def pin(self, home: tuple[str, int]) -> None:
        self.pinned.append(home)

    def unpin(self, home: tuple[str, int]) -> None:
        self.pinned.remove(home)

    async def mend(self, member: Member, wanted: Wanted, error: LogyardError) -> bytes:
        self.asked.append(error)
        return b"from a peer"

    def in_wal(self, index: int, file: int = 3) -> Entry:
        """An entry whose bytes are in a WAL file alone."""
        entry = self.entries[index]
        assert entry.bodies is not None
        self.wal[file, 100 * index] = b"".join(bytes(body) for body in entry.bodies)
        entry.bodies, entry.file, entry.offset = None, file, 100 * index
        return entry

    def found(self, first: int, last: int) -> list[tuple[int, int]]:
        """(index, generation or 0) of the entries with payload."""
        located = self.reader.payload_entries(self.member, first, last)
        return [(one.index, one.home.generation if one.home else 0) for one in located]

    def wanted(self, index: int, start: int = 0, stop: int | None = None) -> Wanted:
        (located,) = self.reader.payload_entries(self.member, index, index)
        (unit,) = units_of(located.data)
        return Wanted(located, unit, start, unit.length if stop is None else stop)


def test_entries_come_from_memory_and_from_segments_where_they_left_it() -> None:
    bench = Bench(memory=5)
    assert [one.index for one in bench.reader.log_entries(bench.member, 6, 8, 1 << 20)] == [6, 7, 8]
    assert [one.index for one in bench.reader.log_entries(bench.member, 2, 8, 1 << 20)] == [2, 3, 4]
    bench.damaged = {2}
    with pytest.raises(Corrupt):
        bench.reader.log_entries(bench.member, 2, 8, 1 << 20)
    bench.member.segments = []
    with pytest.raises(Corrupt):
        bench.reader.log_entries(bench.member, 3, 8, 1 << 20)


def test_payloads_are_met_in_order_wherever_they_are() -> None:
    bench = Bench(count=12, memory=6)
    bench.homes_ = [Home(1, 2, 40), Home(4, 4, 41), Home(9, 10, 42)]
    assert bench.found(1, 12) == [
        (1, 40), (2, 40), (3, 0), (4, 41), (5, 0), (6, 0), (7, 0), (8, 0), (9, 42), (10, 42), (11, 0), (12, 0),
    ]  # fmt: skip
    assert bench.found(0, 3) == [(1, 40), (2, 40), (3, 0)] and bench.found(10, 11) == [(10, 42), (11, 0)]
    bench.member.segments = []
    assert bench.found(1, 7) == [(1, 40), (2, 40), (4, 41), (6, 0), (7, 0)], "what was given back is a hole"


def test_a_damaged_row_of_what_does_not_live_is_passed_over() -> None:
    """No peer gives it, so a log could not be read any more (seed 4352610)."""
    bench = Bench(count=8, memory=1)
    bench.homes_ = [Home(1, 4, 40), Home(5, 8, 41)]
    rotten = {2, 4, 5}

    def scan(uid: int, first: int, last: int) -> Iterator[Any]:
        for index in range(first, last + 1):
            if index in rotten:
                raise PayloadCorrupt("a generation", f"entry {index}", 1, 2, uid, index)
            yield SimpleNamespace(index=index, term=TERM, data=bench.entries[index].data)

    bench.scan = scan  # type: ignore[method-assign]
    assert bench.found(1, 8) == [(1, 40), (3, 40), (6, 41), (7, 41), (8, 41)]
    cast(Any, bench.member.liveness).places = {(5, 0)}
    with pytest.raises(PayloadCorrupt):
        bench.found(1, 8)
    assert bench.found(1, 4) == [(1, 40), (3, 40)]


def test_the_newest_time_counts_what_is_not_applied_and_says_nothing_of_what_cannot_be_read() -> None:
    bench = Bench(count=4, memory=4)
    bench.member.log_time = 9
    assert bench.reader.newest_time(bench.member) == 9
    bench.member.raft.applied = 3
    bench.entries[4] = entry_of(4, stamp=12)
    cast(Any, bench.member.raft).log = RaftLog(runs=[(1, TERM)], entries=[bench.entries[4]], last_index=3)
    assert bench.reader.newest_time(bench.member) == 12
    cast(Any, bench.member.raft).log = RaftLog(runs=[(1, TERM)], last_index=4)
    bench.member.segments = []
    assert bench.reader.newest_time(bench.member) is None


async def test_bytes_are_read_from_memory_the_wal_and_a_generation_whose_homes_are_pinned_meanwhile() -> None:
    bench = Bench()
    bench.in_wal(2)
    bench.homes_ = [Home(5, 6, 40)]
    whole = bench.wanted(1)
    wanted = [whole, bench.wanted(2, 4), bench.wanted(5, stop=10)]
    found = [bytes(one) for one in await bench.reader.read(bench.member, wanted)]
    assert found[0].endswith(b"body 1") and found[1].endswith(b"body 2") and len(found[0]) - len(found[1]) == 4
    assert len(found[2]) == 10 and bench.seen == [[("generation", 40), ("wal", 3)]] * 2 and not bench.pinned


async def test_what_is_damaged_here_comes_from_a_peer_unless_nobody_wants_that() -> None:
    bench = Bench()
    entry = bench.in_wal(2)
    bench.wal[3, entry.offset] = b"X" + bench.wal[3, entry.offset][1:]
    bench.homes_ = [Home(5, 6, 40)]
    bench.damaged = {5}
    wanted = [bench.wanted(2), bench.wanted(6), bench.wanted(5)]
    found = await bench.reader.read(bench.member, wanted)
    assert [one == b"from a peer" for one in found] == [True, False, True]
    assert [type(one) for one in bench.asked] == [Corrupt, Corrupt] and not bench.pinned
    with pytest.raises(Corrupt):
        await bench.reader.read(bench.member, wanted, mend=False)
    assert not bench.pinned


async def test_several_members_are_read_at_once_and_what_one_lacks_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, handed = Bench(), []
    behind = member_of(Recorder())[0]
    behind.raise_floor(10)
    run = trio.to_thread.run_sync

    async def hand_over(*given: Any) -> Any:
        handed.append(given)
        return await run(*given)

    monkeypatch.setattr(trio.to_thread, "run_sync", hand_over)
    monkeypatch.setattr(reader, "THREAD_BYTES", 5)
    bench.in_wal(2)
    parts = [(bench.member, [bench.wanted(1), bench.wanted(2)]), (behind, [bench.wanted(1)])]
    found = await bench.reader.read_all([*parts, (bench.member, [bench.wanted(2)])])
    assert isinstance(found[1], Gone) and len(handed) == 1 and not bench.pinned
    assert isinstance(found[0], list) and isinstance(found[2], list) and bytes(found[0][1]) == bytes(found[2][0])
    assert await bench.reader.read_all([]) == []
    # In memory, or little: no thread.
    await bench.reader.read_all([(bench.member, [bench.wanted(1)])] * 9)
    assert len(handed) == 1


async def test_a_process_that_lacks_descriptors_has_lost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.homes_ = [Home(5, 6, 40)]

    def busy(*_: object) -> bytes:
        raise Busy("descriptors", 1.0)

    monkeypatch.setattr(bench, "read_unit", busy)
    with pytest.raises(Busy):
        await bench.reader.read(bench.member, [bench.wanted(5)])
    assert not bench.asked and not bench.pinned


async def test_a_payload_that_was_not_sent_here_is_gone() -> None:
    bench = Bench()
    bench.in_wal(2)
    bench.entries[2].file = 0
    with pytest.raises(Gone):
        await bench.reader.read(bench.member, [bench.wanted(2)], mend=False)


def test_behind_the_end_of_a_log_there_is_nothing() -> None:
    """It was overwritten while somebody waited for his turn to have it mended."""
    bench = Bench()
    for first, last in ((10, 10), (10, 12), (9, 12)):
        assert [one.index for one in bench.reader.payload_entries(bench.member, first, last)] == [9][: 10 - first]


async def test_who_has_not_caught_up_with_a_release_reads_nothing_but_for_another_members_log() -> None:
    bench = Bench()
    bench.homes_ = [Home(5, 6, 40)]
    bench.member.raise_floor(10)
    with pytest.raises(Gone):
        await bench.reader.read(bench.member, [bench.wanted(1)])
    located = list(bench.reader.payload_entries(bench.member, 4, 6))
    assert [len(units) for units in await bench.reader.whole(bench.member, located)] == [1, 1, 1]
    bench.damaged = {6}
    with pytest.raises(Corrupt):
        await bench.reader.whole(bench.member, located)
    assert not bench.asked, "what is released nobody fetches"


async def test_much_is_read_in_a_thread() -> None:
    bench = Bench()
    bench.entries[2] = entry_of(2, b"x" * (THREAD_BYTES + 1))
    cast(Any, bench.member.raft).log = RaftLog(entries=list(bench.entries.values()))
    bench.in_wal(2)
    located = Located(2, TERM, bench.entries[2].data, bench.entries[2], None)
    (units,) = await bench.reader.whole(bench.member, [located])
    assert bytes(units[-1]).endswith(b"x" * THREAD_BYTES) and not bench.pinned
    assert bench.seen == [[("wal", 3)]] * len(units)

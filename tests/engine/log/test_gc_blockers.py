"""Who holds the oldest files, alone: who is named, in which order, and whom a node with many segments asks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from logyard.engine.log import gc_blockers
from logyard.engine.log.gc_blockers import NAMED_MAX, GcBlockers
from logyard.engine.log.location import SealedFile, Share
from logyard.engine.log.meta_rows import SegmentRun
from logyard.engine.replica.member import HALTED, RUNNING


class Bench:
    """Files and segments of a node, by hand; a snapshot that is taken covers all of its log, unless `refused`."""

    def __init__(self, segments_max: int = 1) -> None:
        self.members: dict[int, Any] = {}
        self.files: dict[int, SealedFile] = {}
        self.users: dict[int, set[int]] = {}
        self.released: list[int] = []
        self.asked: list[list[int]] = []
        self.refused: set[int] = set()
        segments = SimpleNamespace(users=self.users, release=self.released.append)
        self.blockers = GcBlockers(
            self.members, cast(Any, SimpleNamespace(backlog_files=4)), cast(Any, SimpleNamespace(files=self.files)),
            cast(Any, segments), segments_max, self.take,
        )  # fmt: skip

    def group(self, uid: int, commit: int = 10, damaged: bool = False, snapshot: int = 0, compactable: int = 0) -> Any:
        self.members[uid] = SimpleNamespace(
            uid=uid, spec=SimpleNamespace(name=f"log-{uid}"), damaged=damaged, state=RUNNING, segments=[],
            raft=SimpleNamespace(commit=commit), snapshot_index=snapshot, compactable=compactable,
        )  # fmt: skip
        return self.members[uid]

    def file(self, number: int, *uids: int, live: int = 500) -> None:
        self.files[number] = SealedFile(number, 1 << 20)
        for uid in uids:
            self.files[number].add(uid, Share(1, 10, live), live)

    def segment(self, number: int, *uids: int, last: int = 10) -> None:
        self.users[number] = set(uids)
        for uid in uids:
            if uid in self.members:
                self.members[uid].segments.append(SegmentRun(1, last, number))

    async def take(self, members: Sequence[Any]) -> dict[str, int]:
        self.asked.append([one.uid for one in members])
        for one in members:
            if one.uid not in self.refused:
                one.snapshot_index = one.compactable = 100
        return {"taken": sum(one.uid not in self.refused for one in members)}


def test_nothing_holds_up_a_node_without_files() -> None:
    assert Bench().blockers.status() == {
        "unflushed_files": 4, "wal_file": 0, "wal_groups": 0, "wal_names": [], "segment": 0, "segment_groups": 0,
        "segment_names": [], "asked": 0,
    }  # fmt: skip


def test_who_holds_the_oldest_file_against_migration_is_named_first() -> None:
    bench = Bench()
    bench.group(1)
    bench.group(2, commit=9)
    bench.group(3, commit=9, damaged=True)
    bench.group(5, commit=0)
    bench.file(8, 5)
    # Of 4 the replica went.
    bench.file(7, 1, 2, 3, 4)
    status = bench.blockers.status()
    assert (status["wal_file"], status["wal_groups"]) == (7, 4)
    assert status["wal_names"] == [
        ["log-2", "entry 10 is not committed"], ["log-3", "its records are damaged"], ["log-1", "500 bytes of payload"],
    ]  # fmt: skip


def test_who_needs_the_oldest_segment_is_named_with_what_it_lacks() -> None:
    bench = Bench()
    bench.group(1)
    bench.group(2, snapshot=10, compactable=4)
    bench.group(3, snapshot=10, compactable=10)
    bench.group(4, snapshot=9)
    bench.segment(3, 1, 2, 3, 9)
    bench.segment(5, 4)
    status = bench.blockers.status()
    assert (status["segment"], status["segment_groups"]) == (3, 4)
    assert sorted(status["segment_names"]) == [
        ["log-1", "no snapshot at 10"],
        ["log-2", "its snapshot is a checkpoint"],
    ]


def test_few_are_named_of_many() -> None:
    bench = Bench()
    for uid in range(1, 2 * NAMED_MAX):
        bench.group(uid)
    bench.file(1, *bench.members)
    bench.segment(1, *bench.members)
    status = bench.blockers.status()
    assert len(status["wal_names"]) == len(status["segment_names"]) == NAMED_MAX
    assert status["wal_groups"] == status["segment_groups"] == 2 * NAMED_MAX - 1


async def test_the_groups_of_what_is_too_much_are_asked_the_oldest_first() -> None:
    bench = Bench(segments_max=2)
    for uid in (1, 2, 3, 4):
        bench.group(uid)
    for number, uid in ((9, 4), (5, 1), (7, 2), (8, 3)):
        bench.segment(number, uid)
    await bench.blockers.ask()
    assert bench.asked == [[1], [2]] and bench.released == [5, 7] and bench.blockers.asked == 2
    bench.asked.clear()
    await bench.blockers.ask()
    assert not bench.asked, "who was asked has what is needed; the segment goes when its WAL file does"


async def test_few_segments_are_no_reason_to_ask() -> None:
    bench = Bench(segments_max=1)
    bench.group(1)
    bench.segment(5, 1)
    await bench.blockers.ask()
    assert not bench.asked and not bench.released


async def test_who_can_take_no_snapshot_is_not_asked_for_one() -> None:
    bench = Bench(segments_max=0)
    bench.group(1).state = HALTED
    bench.segment(5, 1)
    await bench.blockers.ask()
    assert not bench.asked and not bench.released and bench.blockers.asked == 0


async def test_what_was_not_taken_does_not_count_and_is_asked_for_again() -> None:
    bench = Bench(segments_max=0)
    bench.group(1)
    bench.refused = {1}
    bench.segment(5, 1)
    for _ in range(2):
        await bench.blockers.ask()
    assert bench.asked == [[1], [1]] and bench.blockers.asked == 0


async def test_one_look_asks_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_blockers, "ASKED_MAX", 3)
    bench = Bench(segments_max=0)
    for uid in range(1, 7):
        bench.group(uid)
    bench.segment(5, 1, 2, 3, 4)
    bench.segment(6, 5, 6)
    await bench.blockers.ask()
    assert [len(asked) for asked in bench.asked] == [3]
    await bench.blockers.ask()
    assert [len(asked) for asked in bench.asked] == [3, 1, 2]

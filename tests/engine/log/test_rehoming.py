"""Where payloads go that get a home in a generation, without a system: the order of it, and who is too late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from logyard.engine.jobs import Jobs
from logyard.engine.log.location import SealedFile
from logyard.engine.log.rehoming import Rehoming
from logyard.protocol.errors import LogyardError, NoSpace


class Replica:
    """A member, as whoever moves payloads sees it."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.spec = SimpleNamespace(name=f"g{uid}")
        self.segments: list[Any] = []


class Bench:
    """Members 7 and 8, a store and accounts that write down what they were told, in order."""

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.full = False
        self.lock = trio.Lock()
        self.members: dict[int, Any] = {7: Replica(7), 8: Replica(8)}
        self.files: dict[int, SealedFile] = {}
        location: Any = SimpleNamespace(files=self.files)
        store: Any = SimpleNamespace(jobs=Jobs(lambda: 0.0), homes=lambda uid: [f"old home of {uid}"], write=self.write)
        homes: Any = SimpleNamespace(
            hidden_by=lambda member, before, dense: lambda first, last: not dense,
            open_segments=lambda member, runs: self.did.append(("open", member.uid, list(runs))),
            rehomed=lambda member, first, last, before: self.did.append(("rehomed", member.uid, first, last, before)),
            settle=lambda member, first, last: self.did.append(("settle", member.uid, first, last)),
        )
        books: Any = SimpleNamespace(commit=self.commit)
        self.rehoming = Rehoming(self.members, store, books, location, homes, self.lock)

    async def write(self, ranges: Any, read: Any) -> None:
        assert self.lock.locked(), "beside no job of the janitor"
        if self.full:
            raise NoSpace("full")
        self.did.append(("write", [(*one, [entry.index for entry in read(*one)]) for one in ranges]))

    async def commit(self, build: Any, store: bool = False) -> None:
        assert store and not list(build())
        self.did.append("commit")


def entries(*indexes: int) -> list[Any]:
    return [SimpleNamespace(index=index) for index in indexes]


async def test_an_old_home_forgets_what_the_new_one_has_durable() -> None:
    bench = Bench()
    await bench.rehoming.store_payloads(bench.members[7], entries(3, 4, 9))
    before = ["old home of 7"]
    assert bench.did == [
        ("open", 7, [(3, 4), (9, 9)]),
        ("write", [(7, 3, 4, [3, 4]), (7, 9, 9, [9])]),
        ("rehomed", 7, 3, 4, before), ("settle", 7, 3, 4), ("rehomed", 7, 9, 9, before), ("settle", 7, 9, 9),
    ]  # fmt: skip


async def test_without_room_every_home_stays_and_a_replica_that_went_gets_none() -> None:
    bench = Bench()
    bench.full = True
    with pytest.raises(NoSpace):
        await bench.rehoming.store_payloads(bench.members[7], entries(3))
    assert bench.did == [("open", 7, [(3, 3)])] and not bench.lock.locked()
    gone = bench.members.pop(7)
    with pytest.raises(LogyardError, match="does not run"):
        await bench.rehoming.store_payloads(gone, entries(3))
    assert len(bench.did) == 1


async def test_a_file_whose_damaged_entries_came_back_may_be_emptied_after_all() -> None:
    bench = Bench()
    member = bench.members[7]
    member.segments = [SimpleNamespace(segment=1)]
    files = bench.files
    for number in (1, 2, 3):
        files[number] = SealedFile(number, 100)
    files[1].fail()
    files[2].fail()
    await bench.rehoming.write_back(member, entries(3, 9))
    assert bench.did[-1] == "commit" and [files[number].failed for number in (1, 2, 3)] == [False, True, False]


async def test_what_sleepers_leave_moves_in_one_write_but_for_those_that_went_meanwhile() -> None:
    bench = Bench()
    seven, eight = bench.members[7], bench.members.pop(8)
    read = {(7, 1, 2): entries(1, 2)}
    await bench.rehoming.move([seven, eight], [(7, 1, 2), (8, 5, 6)], lambda *one: read[one])
    assert bench.did == [
        ("open", 7, [(1, 2)]), ("write", [(7, 1, 2, [1, 2])]), ("rehomed", 7, 1, 2, ["old home of 7"]),
        ("settle", 7, 1, 2),
    ]  # fmt: skip

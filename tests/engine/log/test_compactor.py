"""The compactor without a system: files, a store and accounts that are doubles of a few lines."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from logyard.engine.config import SystemConfig
from logyard.engine.jobs import TRIES, Jobs
from logyard.engine.log.compactor import GROUPS_PER_JOB, Compactor, name_of
from logyard.engine.log.location import Location, SealedFile, Share, Unflushed
from logyard.payloads.liveness import Liveness
from logyard.protocol.errors import Corrupt, JobFailed, LogyardError, NoSpace

MIB = 1 << 20
CONFIG = SystemConfig(migrate_budget_bytes=0, migrate_dead_ratio=1.0)


class Bench:
    """A compactor, and what it asked of others in order."""

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.members: dict[int, Any] = {}
        self.homes: dict[int, list[Any]] = {}
        self.fails: dict[str, Exception] = {}
        self.sources: list[Any] = []
        self.dead: list[int] = []
        self.sparse: dict[int, int] = {}
        self.room, self.most, self.now = True, MIB, 0.0
        self.jobs = Jobs(lambda: self.now)
        store: Any = SimpleNamespace(
            jobs=self.jobs, migrate=self.migrate, homes=lambda uid: self.homes.get(uid, []), pin=None, unpin=None,
            rewrite_sparse=self.rewrite, dead_generations=lambda: self.dead, seal_current=self.note("seal"),
            unlink_dead=self.unlink,
        )  # fmt: skip
        wal: Any = SimpleNamespace(current=100, current_entries=[], recycle=lambda file: self.did.append(("go", file)))
        self.wal = wal
        space: Any = SimpleNamespace(
            may_copy=lambda size: self.room and size <= self.most,
            defer_copies=self.note("defer"),
            allow_copies=self.note("allow"),
            is_short=False,
            full=False,
            is_low=lambda: False,
        )
        self.space = space
        books: Any = SimpleNamespace(
            commit_members=self.commit, raise_floors=lambda uids: self.did.append(("floors", sorted(uids)))
        )
        segments: Any = SimpleNamespace(
            users={}, source=lambda file, groups: list(groups), release=lambda file: self.did.append(("release", file))
        )
        self.unflushed = Unflushed(wal)
        self.location = Location(store, self.unflushed, 10.0)
        self.compactor = Compactor(CONFIG, self.members, store, space, books, self.location, segments, lambda debt: 7)

    def note(self, what: str) -> Any:
        return lambda: self.did.append(what)

    def may(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]

    async def migrate(self, build: Any, rate: int) -> None:
        self.may("migrate")
        self.sources.append(build())
        self.did.append(("copy", rate))

    async def rewrite(self, ratio: float, rate: int, may_copy: Any, drop: Any) -> bool:
        self.did.append(("rewrite", ratio))
        self.may("rewrite")
        for number in [number for number, live in self.sparse.items() if may_copy(live)]:
            self.did.append(("copy", number))
            del self.sparse[number]
            self.dead.append(number)
            await drop()
        return not self.sparse

    def unlink(self, dead: Any) -> None:
        self.did.append(("unlink", list(dead)))
        self.dead = [number for number in self.dead if number not in dead]

    async def commit(self, members: Any, sealed_files: Any = (), gone_files: Any = ()) -> None:
        self.may("commit")
        self.did.append(("commit", list(gone_files)))

    def group(self, uid: int, commit: int = 100, damaged: bool = False) -> Any:
        member = SimpleNamespace(uid=uid, liveness=Liveness(), damaged=damaged, raft=SimpleNamespace(commit=commit))
        self.members[uid] = member
        return member

    def file(self, number: int, *uids: int, live: int = 1000, length: int = MIB) -> SealedFile:
        file = SealedFile(number, length)
        for uid in uids:
            file.add(uid, Share(1, 10, live), live)
        self.location.add(file)
        return file


async def test_a_file_is_copied_committed_and_then_given_back() -> None:
    bench = Bench()
    bench.group(1).liveness.release((1, 0), (3, 0))
    file = bench.file(7, 1)
    await bench.compactor.migrate(file)
    assert bench.did == [("copy", 7), ("floors", []), ("commit", [7]), ("go", 7), ("release", 7)]
    ((group,),) = bench.sources
    assert (group.uid, group.first, group.last) == (1, 3, 10) and group.live == ((3, 0, 11, 0),)
    assert not bench.location.files and (bench.compactor.files, bench.compactor.bytes) == (1, 1000)


async def test_nothing_is_copied_of_a_file_that_is_dead_nor_of_what_has_a_home_elsewhere() -> None:
    bench = Bench()
    await bench.compactor.migrate(bench.file(7))
    assert bench.did == [("floors", []), ("commit", [7]), ("go", 7), ("release", 7)]
    bench.group(1)
    bench.homes[1] = [SimpleNamespace(first=4, last=6)]
    await bench.compactor.migrate(bench.file(8, 1))
    assert [(one.first, one.last) for one in bench.sources[0]] == [(1, 3), (7, 10)]


async def test_many_groups_are_copied_in_portions() -> None:
    bench = Bench()
    count = GROUPS_PER_JOB + 5
    for uid in range(1, count + 1):
        bench.group(uid)
    await bench.compactor.migrate(bench.file(7, *range(1, count + 1)))
    assert [len(source) for source in bench.sources] == [GROUPS_PER_JOB, 5]


async def test_a_reader_keeps_a_file_until_it_is_done() -> None:
    bench = Bench()
    file = bench.file(7)
    bench.location.pin(("wal", 7))
    await bench.compactor.migrate(file)
    assert ("go", 7) not in bench.did
    bench.location.unpin(("wal", 7))
    assert bench.did[-1] == ("go", 7)


async def test_a_file_whose_commit_failed_is_a_home_still() -> None:
    bench = Bench()
    file = bench.file(7)
    bench.fails["commit"] = NoSpace("full")
    with pytest.raises(NoSpace):
        await bench.compactor.migrate(file)
    assert bench.location.files == {7: file} and ("go", 7) not in bench.did
    bench.fails.clear()
    await bench.compactor.migrate(file)
    assert not bench.location.files


@pytest.mark.parametrize("error", [Corrupt("a file", 0, "this", "that"), NoSpace("full")], ids=["damage", "space"])
async def test_a_copy_that_the_world_stops(error: LogyardError) -> None:
    bench = Bench()
    bench.group(1)
    file = bench.file(7, 1)
    bench.fails["migrate"] = error
    with pytest.raises(type(error)):
        await bench.compactor.migrate(file)
    # Trying again would fill generations with half copies; for want of room it is tried again later.
    assert file.failed == isinstance(error, Corrupt) and ("defer" in bench.did) == isinstance(error, NoSpace)
    assert bool(bench.compactor.victims()) == isinstance(error, NoSpace)


async def test_a_defect_is_tried_some_times_and_then_set_aside() -> None:
    bench = Bench()
    bench.group(1)
    file = bench.file(7, 1)
    bench.fails["migrate"] = KeyError("a defect")
    for number in range(TRIES):
        assert bench.compactor.victims() == [file] and not file.failed
        with pytest.raises(JobFailed, match=f"try {number + 1}"):
            await bench.compactor.migrate(file)
        assert bench.compactor.victims() == []
        bench.now += 1000.0
    assert file.failed and bench.compactor.victims() == []
    file.remove(1)
    assert bench.compactor.victims() == [file], "nothing in it lives any more"


def test_what_may_not_go() -> None:
    bench = Bench()
    bench.group(1)
    bench.group(2, commit=5)
    bench.group(3, commit=5, damaged=True)
    good, kept, failed = bench.file(1, 1), bench.file(2, 1), bench.file(3, 1)
    uncommitted, damaged, gone = bench.file(4, 2), bench.file(5, 3), bench.file(6, 9)
    bench.file(100, 1)
    kept.keep()
    failed.fail()
    assert {file.file for file in bench.compactor.victims()} == {good.file, damaged.file, gone.file}
    assert uncommitted not in bench.compactor.victims()
    bench.room = False
    assert bench.compactor.victims() == [], "all of it lives, and has to be copied"
    dead = bench.file(8)
    assert bench.compactor.victims() == [dead]
    bench.jobs.freeze("a switch", KeyError())
    assert bench.compactor.victims() == []


def test_the_debt_is_what_could_move() -> None:
    bench = Bench()
    bench.group(1)
    bench.group(2, commit=5)
    for number, uid in ((1, 1), (2, 1), (3, 2)):
        bench.file(number, uid)
    bench.compactor.book()
    assert bench.compactor.debt == 2 * MIB
    assert name_of(SealedFile(3, MIB)) == "migration of WAL file 3"


async def test_a_flushed_file_in_which_nothing_lives_goes_at_once() -> None:
    bench = Bench()
    bench.group(1)
    kept = bench.file(8)
    kept.keep()
    for file in (bench.file(7), kept, bench.file(9, 1)):
        await bench.compactor.flushed(file)
    assert sorted(bench.location.files) == [8, 9]


async def test_dead_generations_go_after_the_floors_are_stored_and_before_anything_is_copied() -> None:
    bench = Bench()
    bench.group(1)
    bench.dead = [4]
    gone = [("floors", [1]), ("commit", [])]
    assert await bench.compactor.collect(0.5)
    assert bench.did == [*gone, ("unlink", [4]), ("rewrite", 0.5)]
    bench.did.clear()
    bench.dead = [5]
    bench.fails["rewrite"] = NoSpace("full")
    with pytest.raises(NoSpace):
        await bench.compactor.collect(0.5)
    assert bench.did == [*gone, ("unlink", [5]), ("rewrite", 0.5), "defer"], "what is dead goes all the same"


async def test_each_generation_that_was_rewritten_goes_before_the_next_is_copied() -> None:
    bench = Bench()
    bench.group(1)
    bench.sparse = {4: 100, 5: 200, 6: 2 * MIB}
    gone = [("floors", [1]), ("commit", [])]
    assert not await bench.compactor.collect(0.5), "there is no room for one of them"
    assert bench.did == [
        ("rewrite", 0.5), ("copy", 4), *gone, ("unlink", [4]), ("copy", 5), *gone, ("unlink", [5]),
    ]  # fmt: skip


async def test_by_hand_it_is_told_that_there_was_no_room_for_copies() -> None:
    bench = Bench()
    bench.group(1)
    bench.sparse = {4: 2 * MIB}

    async def nothing() -> None:
        pass

    files, trouble = await bench.compactor.compact(nothing, nothing)
    assert files == 0 and isinstance(trouble, NoSpace)


async def test_by_hand_everything_goes_and_trouble_is_told_at_the_end() -> None:
    bench = Bench()
    bench.group(1)
    live, dead = bench.file(1, 1), bench.file(2)
    order: list[str] = []

    async def roll() -> None:
        order.append("roll")

    async def flush() -> None:
        order.append("flush")

    bench.fails["migrate"] = Corrupt("a file", 0, "this", "that")
    files, trouble = await bench.compactor.compact(roll, flush)
    assert files == 2 and isinstance(trouble, Corrupt)
    assert order == ["roll"] and bench.location.files == {1: live} and dead.file not in bench.location.files
    assert ("rewrite", 1.0) in bench.did and "seal" not in bench.did
    bench.fails.clear()
    assert await bench.compactor.compact(roll, flush) == (1, None)
    assert "seal" in bench.did and not bench.location.files


async def test_by_hand_on_a_full_disk_what_is_dead_makes_room_for_the_next_file() -> None:
    bench = Bench()
    bench.file(2)
    tried: list[float] = []

    async def roll() -> None:
        tried.append(time.monotonic())
        if len(tried) == 1:
            raise NoSpace("no room for the next file")
        assert not bench.location.files

    async def flush() -> None:
        assert len(tried) == 1

    await bench.compactor.compact(roll, flush)
    assert len(tried) == 2
    bench.space.is_short = True
    await bench.compactor.compact(roll, flush)
    assert len(tried) == 2, "a file of the reserve is not put aside for another one of it"

"""The janitor without a system: jobs that are doubles of a line, and what it makes of their failures."""

from __future__ import annotations

import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.jobs import Jobs
from logyard.engine.log.janitor import QUIET_SECONDS, Janitor
from logyard.protocol.errors import Corrupt, LogyardError, NoSpace


class Bench:
    """A janitor all of whose jobs write down that they ran, and do what `does` has for them."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.does: dict[str, Callable[[], Any]] = {}
        self.victims: list[Any] = []
        self.backlog: list[Any] = []
        self.rooms = 0
        self.quiet: list[bool] = []
        self.full: list[str] = []
        self.now = 0.0
        self.trouble: LogyardError | None = None
        self.jobs = Jobs(lambda: self.now)
        flush: Any = SimpleNamespace(
            run=self.job("flush"), unflushed=SimpleNamespace(add=self.backlog.extend, backlog_files=0)
        )
        self.flush = flush
        compactor: Any = SimpleNamespace(
            victims=lambda: self.victims, book=lambda: self.ran.append("book"), collect=self.job("collect"),
            migrate=self.migrate, compact=self.compact,
        )  # fmt: skip
        self.stock = SimpleNamespace(short=False)
        wal = SimpleNamespace(roll=lambda: "sealed", stock=self.stock)

        async def exclusive(call: Callable[[], Any]) -> Any:
            return call()

        group_commit: Any = SimpleNamespace(wal=wal, exclusive=exclusive)
        space: Any = SimpleNamespace(look=self.look_at_space, found=self.found, is_short=False, note=self.full.append)
        self.space = space
        segments: Any = SimpleNamespace(remove_unused=self.remove)
        books: Any = SimpleNamespace(commit_members="commit")
        self.janitor = Janitor(
            group_commit, space, books, segments, flush, compactor, self.jobs, [("later", self.job("later"))],
            self.no_room,
        )  # fmt: skip

    def job(self, name: str) -> Callable[[], Any]:
        async def run() -> None:
            self.ran.append(name)
            if name in self.does:
                self.does[name]()

        return run

    async def migrate(self, file: Any) -> None:
        self.ran.append(f"migrate {file.file}")

    async def compact(self, roll: Callable[[], Any], flush: Callable[[], Any]) -> tuple[int, LogyardError | None]:
        assert self.janitor.lock.locked()
        await roll()
        return 3, self.trouble

    async def remove(self, commit: object) -> None:
        assert commit == "commit"
        self.ran.append("remove")

    async def look_at_space(self, quiet: bool) -> None:
        self.quiet.append(quiet)

    def found(self, what: str, error: BaseException) -> bool:
        return isinstance(error, NoSpace)

    def no_room(self) -> None:
        self.rooms += 1

    async def round(self) -> list[str]:
        """Have it look once; what ran."""
        self.ran.clear()
        self.janitor.look()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.janitor.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        return self.ran


def failing(error: Exception) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


async def test_a_round_has_an_order() -> None:
    bench = Bench()
    bench.victims = [SimpleNamespace(file=1), SimpleNamespace(file=2)]
    assert await bench.round() == ["flush", "migrate 1", "migrate 2", "book", "collect", "remove", "later"]
    bench.flush.unflushed.backlog_files = 1
    assert await bench.round() == [
        "flush", "migrate 1", "flush", "migrate 2", "flush", "book", "collect", "remove", "later",
    ]  # fmt: skip


async def test_nobody_has_the_lock_while_it_does_what_comes_later() -> None:
    bench = Bench()
    locked: list[bool] = []
    bench.does = {
        "flush": lambda: locked.append(bench.janitor.lock.locked()),
        "later": lambda: locked.append(bench.janitor.lock.locked()),
    }
    await bench.round()
    assert locked == [True, False]


async def test_what_the_world_does_to_a_job_stops_no_other_and_is_tried_at_once() -> None:
    bench = Bench()
    bench.does["flush"] = failing(OSError(errno.EIO, "the disk"))
    bench.does["collect"] = failing(Corrupt("a file", 0, "this", "that"))
    for _ in range(2):
        assert await bench.round() == ["flush", "book", "collect", "remove", "later"]
    assert not bench.rooms and not bench.jobs.failed


async def test_a_job_without_room_ends_every_promise() -> None:
    bench = Bench()
    bench.does["flush"] = failing(NoSpace("the disk is full"))
    assert await bench.round() == ["flush", "book", "collect", "remove", "later"]
    assert bench.rooms == 1


async def test_a_defect_is_counted_and_tried_again_after_a_pause() -> None:
    bench = Bench()
    bench.does["flush"] = failing(KeyError("a defect"))
    assert "flush" in await bench.round() and bench.jobs.failed == 1
    assert "flush" not in await bench.round(), "not before a pause"
    bench.now += 2.0
    bench.does.clear()
    assert "flush" in await bench.round() and not bench.jobs.status()["waiting"]


async def test_nothing_is_collected_or_removed_while_liveness_is_unknown() -> None:
    bench = Bench()
    bench.jobs.freeze("a switch", KeyError("a defect"))
    assert await bench.round() == ["flush", "book", "later"]


async def test_the_disk_has_time_when_no_file_was_filled_for_long(autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench()
    await trio.sleep(100.0)
    one: Any = SimpleNamespace(file=7)
    bench.janitor.rolled([one])
    await bench.round()
    await trio.sleep(QUIET_SECONDS)
    await bench.round()
    assert bench.quiet == [False, True] and bench.backlog == [one]


async def test_files_that_a_start_found_are_looked_at_without_being_asked() -> None:
    bench = Bench()
    bench.janitor.adopt([])
    assert not bench.janitor._wake.is_set()
    one: Any = SimpleNamespace(file=7)
    bench.janitor.adopt([one])
    assert bench.janitor._wake.is_set() and bench.backlog == [one]


async def test_compacting_by_hand_rolls_and_flushes_under_the_lock_and_says_when_the_reserve_is_in_use() -> None:
    bench = Bench()
    bench.space.is_short = True
    assert await bench.janitor.compact() == 3
    assert bench.ran == ["flush", "remove"] and bench.backlog == ["sealed"] and len(bench.full) == 1
    assert bench.janitor._wake.is_set()
    bench.trouble = NoSpace("full")
    with pytest.raises(NoSpace):
        await bench.janitor.compact()
    assert bench.ran == ["flush", "remove", "flush"]


async def test_sealing_that_may_wait_is_done_later_when_the_node_is_short_of_something() -> None:
    """Who wants a log to go for a follower's sake ended the node with it (seed 4310950)."""
    bench = Bench()
    bench.does["flush"] = failing(OSError(errno.EMFILE, "too many open files"))
    async with bench.janitor.lock:
        await bench.janitor.try_roll()
        with pytest.raises(OSError, match="too many"):
            await bench.janitor.roll()
    assert bench.backlog == ["sealed", "sealed"] and bench.ran == ["flush", "flush"]

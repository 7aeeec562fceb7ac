"""The ticker alone: what is done at each tick, and when it rests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing

from logyard.engine.config import SystemConfig
from logyard.engine.host.elections import Elections
from logyard.engine.host.ticker import REST_SECONDS, Chores, Groups, Ticker

CONFIG = SystemConfig(tick_ms=100, wal_seal_idle_ms=100, machine_tick_ms=1000)


class Member(SimpleNamespace):
    """One of its kind, whatever it has."""

    __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]


class Bench:
    """A ticker all of whose chores write down that they ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.active: set[Any] = set()
        self.members: list[Any] = []
        self.healthy = True
        self.needed = False
        self.due_s = 1e9
        self.group_commit: Any = SimpleNamespace(sealed=True, last_write=0.0, seal=self.seal)
        self.effects: Any = SimpleNamespace(
            timed=set(), ticking=set(), tick=self.says("timers"), tick_machines=self.says("machines")
        )
        disk: Any = SimpleNamespace(
            look=lambda is_resting: self.ran.append("disk"), healthy=lambda: self.healthy, stalled_s=lambda: 1.0
        )
        groups = Groups(
            self.active, lambda member: self.ran.append("marked"), self.walk, lambda member: self.ran.append("rests"),
            Elections(1, {1}, 256),
        )  # fmt: skip
        chores = Chores(
            lambda: self.needed, lambda: self.due_s, self.says("first"), (self.says("healthy"),), (self.says("each"),),
            self.says("sessions"), (self.says("second"),), self.says("storage"),
        )  # fmt: skip
        self.ticker = Ticker(CONFIG, groups, disk, self.group_commit, self.effects, chores)

    def says(self, what: str) -> Any:
        return lambda: self.ran.append(what)

    def walk(self, act: Callable[[Any], None]) -> None:
        for member in self.members:
            act(member)

    def seal(self) -> None:
        self.group_commit.sealed = True
        self.ran.append("sealed")

    def member(self, *, has_ready: bool = False, quiet: bool = False) -> Any:
        def tick() -> bool:
            self.ran.append("ticked")
            return quiet

        raft = SimpleNamespace(stopped=False, leader=1, dirty=has_ready, has_ready=has_ready, tick=tick)
        return Member(raft=raft)

    def look(self) -> list[str]:
        self.ran.clear()
        self.ticker._look()
        return self.ran


def test_a_tick_has_an_order() -> None:
    bench = Bench()
    bench.look()
    assert bench.look() == ["disk", "first", "healthy", "each"], "the rest has been done just now"
    bench.effects.timed.add("a group")
    assert bench.look() == ["disk", "first", "healthy", "timers", "each"]


def test_only_active_members_are_ticked_and_a_quiet_one_rests() -> None:
    bench = Bench()
    busy, quiet, stopped = bench.member(has_ready=True), bench.member(quiet=True), bench.member()
    stopped.raft.stopped = True
    bench.active.update((busy, quiet, stopped))
    ran = bench.look()
    assert (ran.count("ticked"), ran.count("marked"), ran.count("rests")) == (2, 1, 1)
    assert bench.active == {busy}


def test_while_the_disk_hangs_nobody_is_ticked_and_leaderships_go_once() -> None:
    bench = Bench()
    member = bench.member()
    bench.members.append(member)
    member.raft.has_ready = True
    bench.active.add(member)
    bench.healthy = False
    given: list[Any] = []
    member.raft.abdicate = lambda: given.append(member.raft)
    ran = [*bench.look(), *bench.look()]
    assert given == [member.raft] and "ticked" not in ran and "healthy" not in ran and ran.count("marked") == 1


def test_the_log_is_sealed_when_writing_stops() -> None:
    bench = Bench()
    bench.group_commit.sealed, bench.group_commit.last_write = False, float("inf")
    assert "sealed" not in bench.look()
    bench.group_commit.last_write = 0.0
    assert "sealed" in bench.look() and "sealed" not in bench.look()


async def test_it_rests_when_there_is_nothing_to_tick_and_stirs(autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.ticker.run)
        await trio.testing.wait_all_tasks_blocked()
        assert bench.ticker.is_resting()
        await trio.sleep(10 * REST_SECONDS)
        assert 8 <= bench.ran.count("disk") <= 13, "a look now and then, no ticks"
        bench.needed = True
        bench.ticker.stir()
        assert not bench.ticker.is_resting()
        bench.ran.clear()
        await trio.sleep(10 * CONFIG.tick_ms / 1000)
        assert 8 <= bench.ran.count("disk") <= 11 and not bench.ticker.is_resting()
        bench.ticker.end()


async def test_the_timer_of_a_group_that_sleeps_ends_the_rest(autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.ticker.run)
        await trio.sleep(1.01)
        bench.ran.clear()
        bench.due_s = 0.0
        await trio.sleep(REST_SECONDS + 0.3)
        assert bench.ran.count("disk") >= 3, "it does not rest while one is due"
        bench.ticker.end()

"""A slow disk's leaderships move to nodes with faster ones, and nothing moves between equals or flaps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.disk.door import Disk
from logyard.engine.disk.slow_disk import DiskPace
from logyard.engine.host.engine import System
from logyard.engine.raft import election
from logyard.engine.raft.core import LEADER, Raft

from .cluster import Cluster, cluster, until

SLOW: dict[str, Any] = {"disk_slow_ms": 20, "disk_slow_for_ms": 1000, "disk_probe_ms": 20, "disk_stall_ms": 5000}


class SlowDisk(Disk):
    """Each sync takes at least `delay_s`."""

    __slots__ = ("delay_s", "never")

    def __init__(self) -> None:
        super().__init__()
        self.delay_s = 0.0
        self.never = threading.Event()

    def datasync(self, fd: int) -> None:
        if self.delay_s:
            self.never.wait(self.delay_s)
        super().datasync(fd)


def make_slow(c: Cluster, disks: dict[int, SlowDisk], *numbers: int) -> None:
    for number in numbers:
        # Its loop is this test's, and must not wait for its disk.
        c.system(number).storage.group_commit.sync_seconds = c.system(number).storage.group_commit.pace_seconds = 1.0
        disks[number].delay_s = 0.05


def moved(system: System) -> int:
    return system.host.slow_disk.handed_over


@pytest.mark.long
async def test_leaderships_move_off_a_slow_disk_and_stay_when_it_is_fast_again(tmp_path: Path) -> None:
    disks = {number: SlowDisk() for number in (1, 2, 3)}
    async with cluster(tmp_path, disks=disks, **SLOW) as c:
        names = ["log", "a", "b"]
        for name in names[1:]:
            await c.create(name)
        for name in names:
            await c.lead(1, name)
        system = c.system(1)
        make_slow(c, disks, 1)
        await until(lambda: not any(c.leads(1, name) for name in names), "all of its leaderships move")
        assert system.host.slow_disk.slow and system.host.slow_disk.status()["slow"] and moved(system) >= 3
        leaders = {name: await c.leader(name) for name in names}
        assert 1 not in leaders.values()
        await until(lambda: any(row.node == 1 and row.slow for row in c.system(2).peers.status()), "the others know")
        assert system.limits.patience
        for name in names:
            await c.append(leaders[name], [(b"", b"x")], name)
        disks[1].delay_s = 0.0
        await until(lambda: not system.host.slow_disk.slow, "it is fast again")
        assert system.host.slow_disk.changes == 2
        assert {name: await c.leader(name) for name in names} == leaders, "nothing comes back by itself"


async def test_equally_slow_disks_keep_their_leaderships(tmp_path: Path) -> None:
    disks = {number: SlowDisk() for number in (1, 2, 3)}
    async with cluster(tmp_path, disks=disks, **SLOW) as c:
        await c.lead(1)
        make_slow(c, disks, 1, 2, 3)
        await until(lambda: all(c.system(number).host.slow_disk.slow for number in c.ids), "all are slow")
        looked = c.system(1).host.slow_disk._looked
        await until(lambda: c.system(1).host.slow_disk._looked > looked, "it has looked again")
        assert c.leads(1) and not moved(c.system(1)), "nobody is better"
        limits = c.system(1).limits
        assert limits is not None and not limits.patience


async def test_a_slow_node_leads_when_nobody_else_can(tmp_path: Path) -> None:
    """It has an entry that the other live voter lacks: it waits longer than usual, but not for good."""
    disks = {number: SlowDisk() for number in (1, 2, 3)}
    async with cluster(tmp_path, disks=disks, **SLOW) as c:
        await c.lead(3)
        c.network.partition([2], [1, 3])
        await c.append(3, [(b"", b"committed without node 2")])
        await until(lambda: c.member(1).raft.commit == c.member(3).raft.commit)
        make_slow(c, disks, 1)
        await until(lambda: c.system(1).host.slow_disk.slow)
        await c.crash(3)
        c.network.heal()
        assert await c.leader(among=(1, 2)) == 1
        # Then the other one catches up, and takes over.
        await until(lambda: c.leads(2), "it is handed over once the other has everything")
        assert len(await c.read(2)) == 1


async def test_a_slow_node_campaigns_after_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stood: list[int] = []
    stand = election._stand

    def seen(raft: Raft, context: int) -> None:
        stood.append(raft.node)
        stand(raft, context)

    disks = {number: SlowDisk() for number in (1, 2, 3)}
    async with cluster(tmp_path, disks=disks, **SLOW) as c:
        await c.lead(3)
        make_slow(c, disks, 1)
        limits = c.system(1).limits
        await until(lambda: limits is not None and limits.patience)
        monkeypatch.setattr(election, "_stand", seen)
        await c.crash(3)
        assert await c.leader(among=(1, 2)) == 2
        # A vote is durable when a slow disk says so: node 2 may have to stand more than once.
        assert set(stood) == {2}, "node 1 did not stand"


def feed(pace: DiskPace, now: float, syncs: int, each_s: float, state: list[float]) -> float:
    """Syncs one after the other, looked at after each; returns the time after."""
    for _ in range(syncs):
        now += max(each_s, 0.01)
        state[0] += 1
        state[1] += each_s
        pace.look(now, int(state[0]), state[1], 0, 0.0)
    return now


def test_the_measure_has_hysteresis_and_needs_time_both_ways() -> None:
    pace, state = DiskPace(0.1, 5.0), [0.0, 0.0]
    now = feed(pace, 100.0, 1000, 0.001, state)
    now = feed(pace, now, 10, 0.2, state)
    assert not pace.slow, "two seconds are not five"
    now = feed(pace, now, 60, 0.2, state)
    assert pace.slow and pace.mean_s == pytest.approx(0.2, rel=0.1)
    now = feed(pace, now, 300, 0.06, state)
    assert pace.slow, "below the bound, above half of it: still slow"
    now = feed(pace, now, 1000, 0.001, state)
    assert pace.slow, "ten seconds are not fifteen"
    now = feed(pace, now, 1500, 0.001, state)
    assert not pace.slow
    # One hiccup is none of it.
    now = feed(pace, now, 1, 3.0, state)
    feed(pace, now, 1000, 0.001, state)
    assert not pace.slow


def test_bytes_are_given_their_time_and_a_sync_under_way_counts() -> None:
    pace = DiskPace(0.1, 1.0)
    for step in range(100):
        # 50 MiB in half a second each: a slow disk for bytes, a fast one for syncs.
        pace.look(step / 2, step, step * 0.5, step * (50 << 20), 0.0)
    assert not pace.slow and pace.mean_s < 0.05
    owed = DiskPace(0.1, 1.0)
    assert [owed.look(step / 4, 5, 0.005, 0, step / 4) for step in range(12)].count(True) == 1 and owed.slow
    never = DiskPace(0.0, 1.0)
    assert not any(never.look(step, step, step * 9.0, 0, 5.0) for step in range(50))


async def test_a_slow_disk_alone_hands_nothing_over(tmp_path: Path) -> None:
    disks = {1: SlowDisk()}
    async with cluster(tmp_path, 1, disks=disks, **SLOW) as c:
        make_slow(c, disks, 1)
        await until(lambda: c.system(1).host.slow_disk.slow)
        with trio.fail_after(10):
            await c.append(1, [(b"", b"x")])
        assert c.member(1).raft.role == LEADER and not moved(c.system(1))

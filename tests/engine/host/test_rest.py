"""A node with nothing to tick rests, and gets up when there is something; what is for all members is done in steps."""

from __future__ import annotations

import time
from pathlib import Path

import trio

from logyard.engine.host import walks
from logyard.engine.raft.core import LEADER
from logyard.engine.replica.member import Member

from .cluster import cluster, until
from .slow_disk import SlowDisk


async def test_a_node_at_rest_gets_up_for_its_groups(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="") as c:
        tickers = [c.system(number).host.ticker for number in c.ids]
        await until(lambda: all(ticker.resting for ticker in tickers), "no group, nothing to tick")
        await c.create("log")
        assert await c.fill(await c.leader(), 3, 100)
        await until(lambda: all(ticker.resting for ticker in tickers), "the group is quiet, the WAL sealed")
        assert all(c.system(number).storage.group_commit.sealed and not c.system(number).active for number in c.ids)
        leader = await c.leader()
        await c.crash(leader)
        await c.leader(among=[number for number in c.ids if number != leader])


async def test_an_alarm_rings_a_node_out_of_its_rest(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, hibernate_after_ms=20) as c:
        system = c.system(1)
        uid = system.names["log"]
        await until(lambda: uid in system.quiescence.table and system.host.ticker.resting, "it sleeps")
        packed = system.quiescence.table.pop(uid)
        assert packed is not None
        due = time.time_ns() // 1_000_000 + 20
        system.quiescence.table.add(uid, packed._replace(due=due))
        system.quiescence.timers.adopt(uid, due, 0)
        assert system.quiescence.timers.next_s() <= 0.02
        await until(lambda: uid in system.members, "it is due")
        assert system.members[uid].raft.role == LEADER


async def test_what_concerns_all_members_is_done_in_steps(tmp_path: Path) -> None:
    count = 3 * walks.STEP + 1
    async with cluster(tmp_path, 1, group="") as c:
        await c.nodes[1].create_groups([{"name": f"log-{n}", "members": [1], "machine": "log"} for n in range(count)])
        system = c.system(1)
        done: list[Member] = []
        again: list[Member] = []
        system.host.walks.over_members(done.append)
        system.host.walks.over_members(again.append)
        assert len(done) == walks.STEP and not again, "the first step is taken at once, the rest has to wait"
        last = list(system.members.values())[-1]
        last.stop("a test")
        await until(lambda: len(again) == count - 1, "all have had their turn")
        assert done == again and last not in done and len(set(done)) == count - 1


async def test_a_late_loop_is_no_slow_disk(tmp_path: Path) -> None:
    disk = SlowDisk()
    async with cluster(tmp_path, 1, disks={1: disk}, disk_stall_ms=1000) as c:
        system = c.system(1)
        await c.fill(1, 1, 100)
        group_commit = system.storage.group_commit
        disk.hang(group_commit)
        batches = group_commit.batches
        async with trio.open_nursery() as nursery:
            nursery.start_soon(c.fill, 1, 1, 100)
            await until(lambda: group_commit.busy, "a write is under way")
            disk.gate.set()
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                """The loop does nothing else, until the thread is done and for longer."""
            assert group_commit.batches > batches and group_commit.busy, "the loop has not heard"
            assert system.host.disk_health.healthy(), "the disk has done its part"


async def test_a_group_with_a_promotable_learner_that_is_away_is_quiet(tmp_path: Path) -> None:
    async with cluster(tmp_path, 4, group="") as c:
        await until(lambda: all(len(one.system.live) == 4 for one in c.nodes.values()))
        await c.create("log", [1, 2, 3])
        await c.lead(1)
        await c.crash(4)
        await until(lambda: 4 not in c.system(1).live)
        await c.nodes[1].change_members("log", "add_promotable", 4)
        await c.applied(among=[1, 2, 3])
        await until(lambda: not any(c.system(number).active for number in (1, 2, 3)), "nobody needs a tick")
        await c.start(4)
        await until(lambda: c.member(1).raft.configuration.voters == (1, 2, 3, 4), "it is promoted when it is back")


async def test_a_group_that_waits_for_room_is_asked_when_another_ones_answer_made_it(tmp_path: Path) -> None:
    """Nothing else would make its core look again: its own followers have answered everything."""
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.applied()
        system, member = c.system(1), c.member(1)
        await until(lambda: member not in system.active and not member.dirty)
        for at_an_answer in (True, False):
            system.windows[2].waiting[member.uid] = None
            if at_an_answer:
                system.host.outbound.resume(2)
            else:
                system.host.outbound.resume_all()
            assert not system.windows[2].waiting and member.raft.has_ready
            await until(lambda: not member.dirty)

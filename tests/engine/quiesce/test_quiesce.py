"""Hibernation: idle groups become rows, wake for whatever needs them, and never sleep under a leader that is none."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.transport.blobs import AWAKE, SLEEPING
from logyard.protocol.errors import Busy, GroupExists, LogyardError, NotLeader

from ..host.cluster import PATIENCE, Cluster, cluster, payload_books, until

QUICK: dict[str, Any] = {"hibernate_after_ms": 30}


def sleeps(c: Cluster, number: int, name: str = "log") -> bool:
    system = c.system(number)
    return system.names.get(name, 0) in system.quiescence.table


async def asleep(c: Cluster, name: str = "log", among: list[int] | None = None) -> None:
    """Until a group sleeps on all of its nodes, and they agree on it."""
    numbers = among or sorted(c.nodes)
    await until(lambda: all(sleeps(c, number, name) for number in numbers), f"{name} sleeps on {numbers}")
    for number in numbers:
        uid = c.system(number).names[name]
        assert uid not in c.system(number).members


async def crash_all_asleep(c: Cluster) -> None:
    """Crash every node while a group sleeps: its leader last, whose death would wake it on the others."""
    leader = sleeping_leader(c)
    for number in sorted(c.ids, key=lambda number: number == leader):
        await c.crash(number)


def row(c: Cluster, number: int, name: str = "log") -> Any:
    system = c.system(number)
    return system.quiescence.table.row(system.names[name])


def sleeping_leader(c: Cluster, name: str = "log") -> int:
    (found,) = {row(c, number, name).leader for number in c.nodes if sleeps(c, number, name)}
    return int(found)


def in_accord(c: Cluster) -> bool:
    """Every follower's sums are those of its leaders' renewals."""
    return all(
        c.system(a).quiescence.table.led_with.get(b, 0) == c.system(b).quiescence.table.under.get(a, 0)
        for a in c.nodes
        for b in c.nodes
        if a != b
    )


async def empty_log(c: Cluster, name: str = "log") -> None:
    """Records that live in the WAL would keep it awake: write some and truncate them all."""
    leader = await c.leader(name)
    await c.fill(leader, 3, 20, name)
    await c.nodes[leader].truncate(name, c.log(leader, name).end)


async def test_a_group_sleeps_wakes_by_an_append_and_sleeps_again(tmp_path: Path) -> None:
    async with cluster(tmp_path, **QUICK) as c:
        await asleep(c)
        leader = sleeping_leader(c)
        assert leader in c.ids and all(row(c, number).leader == leader for number in c.ids)
        terms = {row(c, number).term for number in c.ids}
        assert await c.append(leader, [(b"", b"one")]) == range(1)
        await c.applied()
        assert {c.member(number).raft.term for number in c.ids} == terms, "nobody had to be elected"
        await c.nodes[leader].truncate("log", 1)
        await asleep(c)
        assert [row(c, number).end for number in c.ids] == [1, 1, 1]
        await until(lambda: in_accord(c))
        assert all(c.system(number).quiescence.digests.exchanges == 0 for number in c.ids)


async def test_a_follower_redirects_to_a_leader_that_sleeps(tmp_path: Path) -> None:
    async with cluster(tmp_path, **QUICK) as c:
        await empty_log(c)
        await asleep(c)
        leader = sleeping_leader(c)
        follower = next(number for number in c.ids if number != leader)
        with pytest.raises(NotLeader) as caught:
            await c.append(follower, [(b"", b"x")])
        assert caught.value.leader == leader
        ((_, _, located, members, _, _),) = c.nodes[follower].locate(["log"])
        assert (located, members) == (leader, [1, 2, 3])
        assert await c.append(leader, [(b"", b"x")]) == range(3, 4)


async def test_a_status_wakes_nobody(tmp_path: Path) -> None:
    async with cluster(tmp_path, **QUICK) as c:
        await empty_log(c)
        awake = c.nodes[1].groups()
        await asleep(c)
        ((found),) = c.nodes[1].groups()
        assert found["state"] == "hibernating" and (found["start"], found["end"]) == (3, 3)
        assert {key for key in awake[0]} == {key for key in found}
        status = c.nodes[1].status()
        assert (status["groups"], status["hibernating"]) == (1, 1)
        assert sum(c.nodes[number].status()["led"] for number in c.ids) == 1
        system = c.system(1)
        assert found["last"] == status["applied"]
        spec = {"name": "log", "members": c.ids, "machine": "log"}
        (again,) = await c.nodes[1].create_groups([spec])
        assert again["uid"] == system.names["log"] and sleeps(c, 1), "an equal definition is known from its row"


async def test_what_lives_in_the_wal_keeps_a_group_awake_until_it_moved_out(tmp_path: Path) -> None:
    async with cluster(tmp_path, hibernate_move_bytes=1000, **QUICK) as c:
        leader = await c.leader()
        bodies = await c.fill(leader, 5, 2000)
        before = [c.system(number).quiescence.transitions.slept for number in c.ids]
        # Asking for it by name would be using it.
        member, patient = c.member(leader), c.system(leader).quiescence.quiesce._patient
        await until(lambda: member in patient, "it was looked at")
        assert [c.system(number).quiescence.transitions.slept for number in c.ids] == before
        for number in c.ids:
            await c.nodes[number].compact()
        await asleep(c)
        for number in c.ids:
            assert [body for _, body in await c.read(number)] == bodies
            member = c.member(number)
            assert not member.segments and member.raft.log.first_index > 5
        await c.append(await c.leader(), [(b"", b"more")])


async def test_a_few_payloads_in_the_wal_move_out_when_their_group_goes_to_sleep(tmp_path: Path) -> None:
    async with cluster(tmp_path, **QUICK) as c:
        leader = await c.leader()
        bodies = await c.fill(leader, 5, 2000)
        await asleep(c)
        for number in c.ids:
            assert [body for _, body in await c.read(number)] == bodies
        bodies += await c.fill(leader, 2, 100)
        await c.roll(leader)
        await asleep(c)
        await crash_all_asleep(c)
        for number in c.ids:
            await c.start(number)
            assert sleeps(c, number)
        for number in c.ids:
            assert [body for _, body in await c.read(number)] == bodies
            assert not payload_books(c.system(number))["wal"]
            books = payload_books(c.system(number))["generations"]
            store = c.system(number).store._store  # type: ignore[attr-defined]
            assert {one: found.live for one, found in store.recount().items()} == books


async def test_a_lone_group_sleeps_and_leads_on(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, **QUICK) as c:
        await asleep(c)
        term = row(c, 1).term
        assert await c.append(1, [(b"", b"x")]) == range(1)
        assert c.member(1).raft.term == term
        await c.nodes[1].truncate("log", 1)
        await asleep(c)
        await c.restart(1)
        assert sleeps(c, 1) and row(c, 1).leader == 0
        await c.leader()
        assert await c.append(1, [(b"", b"y")]) == range(1, 2)


async def test_everything_crashes_while_it_sleeps(tmp_path: Path) -> None:
    async with cluster(tmp_path, **QUICK) as c:
        await empty_log(c)
        await asleep(c)
        await crash_all_asleep(c)
        for number in c.ids:
            await c.start(number)
            assert sleeps(c, number) and not c.system(number).members, "no member is built"
        await until(lambda: all(len(c.system(number).live) == 3 for number in c.ids))
        assert all(sleeps(c, number) and row(c, number).leader == 0 for number in c.ids), "nobody leads, nobody asked"
        leader = await c.leader()
        assert await c.append(leader, [(b"", b"x")]) == range(3, 4)
        await c.applied()


async def test_a_follower_that_restarts_sleeps_on_under_its_leader(tmp_path: Path) -> None:
    async with cluster(tmp_path, **QUICK) as c:
        await asleep(c)
        leader = sleeping_leader(c)
        follower = next(number for number in c.ids if number != leader)
        await until(lambda: in_accord(c))
        woken = c.system(leader).quiescence.transitions.woken
        await c.restart(follower)
        assert row(c, follower).leader == 0
        await until(lambda: sleeps(c, follower) and row(c, follower).leader == leader, "it meets its leader again")
        await until(lambda: in_accord(c))
        assert c.system(leader).quiescence.transitions.woken == woken and not c.system(follower).members


async def test_a_dead_leaders_groups_wake_and_elect(tmp_path: Path) -> None:
    async with cluster(tmp_path, **QUICK) as c:
        await c.create("other")
        for name in ("log", "other"):
            await asleep(c, name)
        leader = sleeping_leader(c)
        await c.crash(leader)
        others = sorted(c.nodes)
        await until(lambda: any(c.system(number).members for number in others), "its groups wake")
        new = await c.leader(among=others)
        await c.append(new, [(b"", b"x")])
        await c.nodes[new].truncate("log", 1)
        # The absent one is remembered: its return wakes the group, and it learns what it missed.
        await asleep(c)
        assert row(c, new).shape.absent == (leader,)
        await c.start(leader)
        await c.applied()
        await asleep(c)
        assert row(c, sleeping_leader(c)).shape.absent == ()


async def test_a_lost_wake_up_is_mended_by_the_digest(tmp_path: Path) -> None:
    async with cluster(tmp_path, **QUICK) as c:
        await asleep(c)
        leader = sleeping_leader(c)
        lose(c, leader, AWAKE)
        followers = [number for number in c.ids if number != leader]

        def used() -> bool:
            # A leader that wakes for something of its own says so in vain; used on and on, it does not offer sleep.
            c.member(leader)
            return all(not sleeps(c, number) for number in followers)

        await until(used, "the followers wake")
        assert all(c.system(number).quiescence.digests.exchanges for number in followers)
        assert c.leads(leader)


@pytest.mark.long
async def test_a_leader_that_does_not_hear_that_its_followers_sleep_wakes_them(tmp_path: Path) -> None:
    async with cluster(tmp_path, hibernate_after_ms=200) as c:
        leader = await c.leader()
        follower = next(number for number in c.ids if number != leader)
        heal = lose(c, follower, SLEEPING)
        await until(lambda: sleeps(c, follower), "it sleeps, and its answer is lost")
        await until(lambda: not sleeps(c, follower), "the digest wakes it")
        assert not sleeps(c, leader)
        heal()
        await c.append(leader, [(b"", b"x")])
        await c.nodes[leader].truncate("log", 1)
        await asleep(c)


def lose(c: Cluster, number: int, kind: int) -> Callable[[], None]:
    """A node's blobs of one kind are lost without a trace."""
    peers = c.network.nodes[number]
    send_blob = peers.send_blob

    def losing(node: int, found: int, request: int, header: Any, body: Any = (), *, control: bool = False) -> bool:
        return found == kind or send_blob(node, found, request, header, body, control=control)

    peers.send_blob = losing  # type: ignore[method-assign, assignment]
    return lambda: setattr(peers, "send_blob", send_blob)


async def test_a_leader_group_that_stops_on_a_live_node_is_led_by_others(tmp_path: Path) -> None:
    async with cluster(tmp_path, **QUICK) as c:
        await asleep(c)
        leader = sleeping_leader(c)
        lose(c, leader, AWAKE)
        member = c.member(leader)
        # Its farewell is lost, too.
        member.stop("a fault of this group alone")
        member.raft.ready()
        others = [number for number in c.ids if number != leader]
        new = await c.leader(among=others)
        assert await c.append(new, [(b"", b"x")]) == range(1)


async def test_a_link_that_works_one_way_only_wakes_those_behind_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, **QUICK) as c:
        await asleep(c)
        leader = sleeping_leader(c)
        others = [number for number in c.ids if number != leader]
        c.network.partition([leader], others, one_way=True)
        new = await c.leader(among=others)
        await c.append(new, [(b"", b"x")])
        await until(lambda: not sleeps(c, leader) or row(c, leader).leader == 0, "the old one leads no more")
        c.network.heal()
        await c.applied()
        assert not c.leads(leader) or c.member(leader).raft.term > c.member(new).raft.term


async def test_a_group_deleted_and_made_again_while_a_follower_sleeps(tmp_path: Path) -> None:
    async with cluster(tmp_path, **QUICK) as c:
        await asleep(c)
        leader = sleeping_leader(c)
        away = next(number for number in c.ids if number != leader)
        rest = [number for number in c.ids if number != away]
        old = c.system(away).names["log"]
        await c.crash(away)
        with trio.move_on_after(10):
            await c.system(leader).host.groups.delete([old])
        await until(lambda: all(not c.system(number).has(old) for number in rest), "it is gone on the others")
        await c.start(away)
        assert sleeps(c, away)
        c.member(away)
        await until(lambda: not c.system(away).has(old), "it hears of the deletion when it speaks")
        await c.create("log")
        assert c.system(away).names["log"] != old
        assert await c.append(await c.leader(), [(b"", b"new")]) == range(1)


@pytest.mark.parametrize("how", ["made there", "made elsewhere", "made in a batch"])
async def test_a_group_deleted_while_the_node_that_led_its_sleep_was_away(tmp_path: Path, how: str) -> None:
    async with cluster(tmp_path, **QUICK) as c:
        await asleep(c)
        away = sleeping_leader(c)
        rest = [number for number in c.ids if number != away]
        old = c.system(away).names["log"]
        await c.crash(away)
        await c.system(await c.leader(among=rest)).host.groups.delete([old])
        await until(lambda: not any(c.system(number).has(old) for number in rest))
        await c.start(away)
        await until(lambda: all(len(one.system.live) == 3 for one in c.nodes.values()))
        # Its row there has no leader, so no digest says that it is gone.
        node = c.nodes[away if how == "made there" else rest[0]]

        async def created() -> bool:
            try:
                if how == "made in a batch":
                    return await node.create_batch(["log"], c.ids, "log", {}) == 1
                (made,) = await node.create_groups([{"name": "log", "members": c.ids, "machine": "log"}])
            except (GroupExists, Busy):
                return False
            return bool(made["uid"] != old)

        with trio.fail_after(PATIENCE):
            while not await created():
                await trio.sleep(0.01)
        await until(lambda: not c.system(away).has(old))
        assert await c.append(await c.leader(), [(b"", b"new")]) == range(1)


async def test_a_deleted_group_that_sleeps(tmp_path: Path) -> None:
    async with cluster(tmp_path, **QUICK) as c:
        await asleep(c)
        uid = c.system(1).names["log"]
        await c.system(1).host.groups.delete([uid])
        await until(lambda: not any(c.system(number).has(uid) for number in c.ids))
        await c.restart(1)
        assert not c.system(1).has(uid)


@pytest.mark.long
async def test_many_groups_cost_little_and_start_as_rows(tmp_path: Path) -> None:
    count = 2000
    async with cluster(tmp_path, 1, group="", hibernate_after_ms=50) as c:
        specs = [{"name": f"log-{number:05}", "members": [1], "machine": "log"} for number in range(count)]
        await c.nodes[1].create_groups(specs)
        await until(lambda: len(c.system(1).quiescence.table) == count, "all sleep")
        assert not c.system(1).members and not c.system(1).active
        await c.crash(1)
        gc.collect()
        tracemalloc.start()
        began = time.process_time()
        await c.start(1)
        started = time.process_time() - began
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        system = c.system(1)
        assert len(system.quiescence.table) == count and not system.members
        assert held / count < 2048, f"{held / count:.0f} bytes a group"
        assert started < 5
        began = time.process_time()
        for number in range(100):
            assert system.member(f"log-{number:05}").raft.voter
        assert (time.process_time() - began) / 100 < 0.005
        await until(lambda: c.leads(1, "log-00007"))
        assert await c.append(1, [(b"", b"x")], "log-00007") == range(1)


@pytest.mark.parametrize("seed", range(3))
async def test_groups_come_and_go_and_nothing_is_lost(tmp_path: Path, seed: int) -> None:
    """Appends, restarts and cuts while groups fall asleep and wake all the time."""
    import random

    draw = random.Random(seed)
    names = [f"log-{number}" for number in range(6)]
    async with cluster(tmp_path, group="", hibernate_after_ms=10) as c:
        for name in names:
            await c.create(name)
        written: dict[str, list[bytes]] = {name: [] for name in names}
        for step in range(40):
            name = draw.choice(names)
            verb = draw.choice(["append"] * 5 + ["truncate", "restart", "part", "rest", "rest"])
            try:
                with trio.move_on_after(2):
                    if verb == "restart":
                        with trio.CancelScope(shield=True):
                            await c.restart(draw.choice(c.ids))
                    elif verb == "part":
                        c.partition(draw.choice(c.ids))
                        await c.leader(name)
                        c.network.heal()
                    elif verb == "rest":
                        await until(lambda: any(c.system(number).quiescence.table for number in c.ids))
                    elif verb == "truncate":
                        leader = await c.leader(name)
                        await c.nodes[leader].truncate(name, c.log(leader, name).end)
                    else:
                        body = b"%d" % step
                        (offset,) = await c.append(await c.leader(name), [(b"", body)], name)
                        written[name] += [b""] * (offset - len(written[name]))
                        written[name].append(body)
            except LogyardError:
                pass
        c.network.heal()
        for name in names:
            await c.append(await c.leader(name), [(b"", b"last")], name)
            await c.applied(name)
            logs = [c.log(number, name) for number in c.ids]
            assert len({(log.start, log.end) for log in logs}) == 1
            for number in c.ids:
                start = logs[0].start
                found = [body for _, body in await c.read(number, start, name=name)]
                for offset, body in enumerate(written[name]):
                    if body and offset >= start:
                        assert found[offset - start] == body
                c.member(number, name).raft.check()

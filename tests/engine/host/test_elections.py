"""Whose turn it is to stand for election when many groups lose their leader at once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio

from logyard.engine.host.elections import TURN, Elections
from logyard.engine.raft.configuration import Configuration
from logyard.engine.raft.state import FOLLOWER, LEADER, Limits

from .cluster import cluster, until

LIVE = {2, 3}
TURN_TICKS = TURN * Limits().election_ticks


class Member:
    """A member of a group of three whose leader, node 1, is gone."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.campaigns = 0
        self.raft = SimpleNamespace(
            stopped=False, leader=0, is_quiet=False, mend=None, voter=True, may_lead=True, role=FOLLOWER,
            limits=Limits(), configuration=Configuration((1, 2, 3)), campaign=self.campaign,
        )  # fmt: skip

    def campaign(self) -> None:
        self.campaigns += 1


def members(count: int) -> list[Any]:
    return [Member(uid) for uid in range(count)]


def tick(turns: Elections, active: list[Any]) -> list[Any]:
    """One tick of those that are active, as the ticker does it; return who is active then."""
    turns_now = [*active, *turns.begin()]
    return [member for member in turns_now if member.raft.leader or turns.stands(member)]


def test_a_few_stand_at_once_and_nobody_is_asked_to_campaign() -> None:
    every = members(8)
    turns = Elections(2, LIVE, 8)
    assert tick(turns, every) == every and not turns.is_waiting
    assert not turns.begin() and not sum(member.campaigns for member in every)


def test_the_others_wait_and_come_first_where_this_node_is_to_lead() -> None:
    every = members(20)
    turns = Elections(2, LIVE, 4)
    active = tick(turns, every)
    assert active == every[:4] and turns.is_waiting
    assert not turns.begin(), "the other node may not know it yet"
    order: list[int] = []
    while active:
        for member in active:
            member.raft.leader = 2
        active = turns.begin()
        assert len(active) <= 4
        order += [member.uid for member in active]
        assert all(turns.stands(member) for member in active)
    # Of nodes 2 and 3 each leads every other group first.
    assert order == [*range(4, 20, 2), *range(5, 20, 2)] and not turns.is_waiting
    # Who had a place before there were too many does not wait for its time, either.
    assert [member.uid for member in every if member.campaigns] == list(range(4, 20, 2)), "others are given time"


def test_whom_another_node_does_not_come_to_lead_campaigns_at_its_turn() -> None:
    every = members(6)
    turns = Elections(2, LIVE, 2)
    active = tick(turns, every)
    for _ in range(TURN_TICKS):
        tick(turns, active)
    for member in every[:5]:
        member.raft.leader = 2
    assert turns.begin() == [every[5]] and every[5].campaigns == 1


def test_who_had_a_place_before_there_were_too_many_campaigns_when_there_are() -> None:
    every = members(6)
    turns = Elections(2, LIVE, 2)
    active = tick(turns, every)
    assert not turns.begin() and not sum(member.campaigns for member in every)
    # Nor does one that another node is to lead keep its place.
    assert turns.begin() == [every[2]]
    assert active == every[:2] and [member.campaigns for member in every] == [1, 0, 1, 0, 0, 0]
    assert turns.stands(every[0]) and not turns.stands(every[1])


def test_who_has_a_turn_keeps_it_although_another_node_is_to_lead() -> None:
    every = [Member(uid) for uid in range(1, 12, 2)]
    turns = Elections(2, LIVE, 2)
    active = tick(turns, every)
    turns_had: Counter[int] = Counter()
    for _ in range(3 * (TURN_TICKS + 1)):
        turns_had.update(member.uid for member in active)
        active = tick(turns, active)
    assert turns_had == dict.fromkeys((1, 3, 5, 7, 9, 11), TURN_TICKS)


def test_who_got_a_leader_meanwhile_or_is_gone_takes_nobodys_turn() -> None:
    every = members(12)
    turns = Elections(3, LIVE, 2)
    tick(turns, every)
    for member in every[:10]:
        member.raft.leader = 2
    every[10].raft.stopped = True
    turns.begin()
    assert turns.begin() == [every[11]] and not turns.is_waiting


def test_who_is_asked_for_comes_first() -> None:
    every = members(12)
    turns = Elections(2, LIVE, 2)
    tick(turns, every)
    turns.ask(every[11])
    turns.ask(every[8])
    turns.ask(every[0])
    assert not turns.stands(every[11]), "news of nodes had it looked at once more"
    for member in every[:2]:
        member.raft.leader = 2
    # Who stands already needs no turn.
    turns.begin()
    assert turns.begin() == [every[11], every[8]]
    # Whoever asks here asks the other node, too, which is to lead one of them.
    assert [member.uid for member in every if member.campaigns] == [8]


def test_who_waited_before_all_nodes_were_seen_waits_in_one_place() -> None:
    live = {2}
    every = members(12)
    turns = Elections(2, live, 2)
    tick(turns, every)
    live.update((1, 3))
    # News of nodes has all of them looked at once more: of three nodes every third group is this one's.
    assert tick(turns, every) == every[:2]
    order: list[int] = []
    for member in every[:2]:
        member.raft.leader = 1
    while found := turns.begin():
        order += [member.uid for member in found]
        for member in found:
            member.raft.leader = 1
    assert order[:3] == [4, 7, 10] and sorted(order) == list(range(2, 12))


def test_who_cannot_be_elected_makes_room_and_has_its_turn_again() -> None:
    every = members(6)
    turns = Elections(2, LIVE, 2)
    active = tick(turns, every)
    seen: list[int] = []
    for _ in range(6 * TURN_TICKS):
        active = tick(turns, active)
        assert len(active) <= 2
        seen += [member.uid for member in active if member.uid not in seen[-2:]]
    assert set(seen) == set(range(6)), "all had a turn"
    assert seen.count(0) >= 2, "and again"


def test_who_cannot_be_elected_keeps_its_turn_while_nobody_waits() -> None:
    every = members(2)
    turns = Elections(2, LIVE, 2)
    active = tick(turns, every)
    for _ in range(3 * TURN_TICKS):
        active = tick(turns, active)
    assert active == every


async def test_all_groups_of_a_dead_node_are_led_again_a_few_at_a_time(tmp_path: Path) -> None:
    count = 40
    async with cluster(tmp_path, group="", election_groups=3) as c:
        specs = [{"name": f"log-{number}", "members": [1, 2, 3], "machine": "log"} for number in range(count)]
        await c.nodes[1].create_groups(specs)

        def led(among: list[int]) -> int:
            return sum(member.raft.role == LEADER for node in among for member in c.system(node).members.values())

        await until(lambda: led([1, 2, 3]) == count, "all are led")
        for node in (2, 3):
            for member in list(c.system(node).members.values()):
                if member.raft.role == LEADER:
                    await c.lead(1, member.spec.name)
        await until(lambda: led([1]) == count, "by node 1")
        await c.crash(1)
        crowd = 0
        with trio.fail_after(60):
            while led([2, 3]) < count:
                for node in (2, 3):
                    campaigning = [
                        member
                        for member in c.system(node).members.values()
                        if member.raft.role not in (FOLLOWER, LEADER)
                    ]
                    crowd = max(crowd, len(campaigning))
                await trio.sleep(0)
        assert 1 <= crowd <= 3

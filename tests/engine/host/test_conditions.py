"""Tables of conditions that random histories rarely reach: who wakes as what, who is put to sleep, which homes hide."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logyard.engine.log.liveness_accounting import Homes
from logyard.engine.quiesce import unquiesce
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.engine.raft.state import PRECANDIDATE
from logyard.engine.replica.member import HALTED, Member
from logyard.payloads.homes import Home
from logyard.payloads.liveness import Liveness

from ..quiesce.test_quiesce import QUICK, asleep, row, sleeping_leader
from .cluster import cluster, until

WAKES = [
    # what differs from the stored row of a group that slept under this very node -> its role when it wakes
    ({}, LEADER),
    ({"term": 1}, FOLLOWER),
    ({"term": -1}, FOLLOWER),
    ({"vote": 1}, FOLLOWER),
    ({"leader": 1}, FOLLOWER),
    ({"leader": 0}, FOLLOWER),
    ({"term": 1, "use": True}, PRECANDIDATE),
    ({"leader": 0, "use": True}, PRECANDIDATE),
]


@pytest.mark.parametrize(("differs", "role"), WAKES)
async def test_who_wakes_leads_only_in_the_term_that_it_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differs: dict[str, Any], role: int
) -> None:
    async with cluster(tmp_path, **QUICK) as c:
        await c.lead(2)
        await asleep(c)
        assert sleeping_leader(c) == 2
        system = c.system(2)
        uid = system.names["log"]
        slept = row(c, 2)
        changed = slept._replace(term=slept.term + differs.get("term", 0), leader=differs.get("leader", 2))
        system.hibernation.sleepers.pop(uid)
        system.hibernation.sleepers.add(uid, changed)
        revive = unquiesce.revive

        def revived(*arguments: Any) -> Member:
            member = revive(*arguments)
            member.raft.vote = differs.get("vote", member.raft.vote)
            return member

        monkeypatch.setattr(unquiesce, "revive", revived)
        member = system.hibernation.find(uid, use=differs.get("use", False), by=0 if differs.get("use") else 3)
        assert member is not None and member.raft.role == role
        assert (member.raft.leader == 2) == (role == LEADER)


async def test_only_a_leader_at_rest_is_put_to_sleep(tmp_path: Path) -> None:
    async with cluster(tmp_path, hibernate_after_ms=60_000) as c:
        await c.lead(1)
        await c.applied()

        def due(number: int, member: Member) -> bool:
            found = c.system(number).hibernation
            found._resting.clear()
            found._resting[member] = 0.0
            return found._due_batch() == [member]

        members = {number: c.member(number) for number in c.ids}
        for number, member in members.items():
            await until(lambda number=number, member=member: member not in c.system(number).active, "it rests")
            await until(
                lambda number=number, member=member: c.system(number).hibernation._may_sleep(member), "nothing is left"
            )
        assert due(1, members[1])
        for number in (2, 3):
            # It could sleep, and whether the group may is not its to say.
            assert c.system(number).hibernation._may_sleep(members[number]) and not due(number, members[number])
        c.system(1).active.add(members[1])
        assert not due(1, members[1])
        c.system(1).active.discard(members[1])
        members[1].state = HALTED
        assert not due(1, members[1])


HIDES = [
    # homes, log's end, released before, gap, dense -> does a new home over the gap hide what is stored elsewhere?
    ([], 0, 0, (5, 6), False, False),
    ([], 0, 0, (5, 6), True, True),
    ([(5, 6)], 0, 0, (5, 6), False, True),
    ([(1, 5)], 0, 0, (5, 9), False, True),
    ([(9, 12)], 0, 0, (5, 9), False, True),
    ([(1, 4)], 0, 0, (5, 9), False, False),
    ([(10, 12)], 0, 0, (5, 9), False, False),
    ([(1, 4), (10, 12)], 0, 0, (5, 9), False, False),
    ([], 9, 0, (5, 9), False, True),
    ([], 5, 0, (5, 9), False, True),
    ([], 4, 0, (5, 9), False, False),
    ([], 9, 10, (5, 9), False, False),
    ([], 9, 9, (5, 9), False, True),
]


@pytest.mark.parametrize(("homes", "end", "released", "gap", "dense", "hides"), HIDES)
def test_what_a_new_home_would_hide(
    homes: list[tuple[int, int]], end: int, released: int, gap: tuple[int, int], dense: bool, hides: bool
) -> None:
    liveness = Liveness()
    if released:
        liveness.release((1, 0), (released, 0))
    member: Any = SimpleNamespace(raft=SimpleNamespace(log=SimpleNamespace(last_index=end)), liveness=liveness)
    nothing: Any = None
    location: Any = SimpleNamespace(files={})
    counters = Homes({}, nothing, location, nothing, nothing, nothing, nothing)
    before = [Home(first, last, 1, 1) for first, last in homes]
    assert counters.hidden_by(member, before, dense)(*gap) is hides

"""When a session ends, alone: a full time to live of silence, by a clock that runs only while the node does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from logyard.engine.config import SystemConfig
from logyard.engine.quiesce.quiesced_sessions import QuiescedSessions
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.engine.replica import heartbeats
from logyard.engine.replica.heartbeats import EXPIRE_AT_ONCE, LOOK_SECONDS_MAX, Heartbeats
from logyard.engine.replica.member import ASLEEP, Member
from logyard.engine.replica.sessions import EXPIRE, REGISTER, Sessions
from logyard.protocol.errors import BadRequest, Busy, NotLeader

from .doubles import Core, Recorder, member_of

TTL_MS = 10_000


class Rig:
    """One node's clients; time passes by `wait`, with a look twice a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 5000.0
        monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=lambda: self.time))
        self.config = SystemConfig()
        self.proposed: list[tuple[Any, ...]] = []
        self.committed: list[tuple[Any, ...]] = []
        self.refusal: Exception | None = None
        self.hearts = Heartbeats(self.config, self)

    def propose(self, member: Member, name: str, *arguments: object) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.proposed.append((name, *arguments))

    async def commit(self, member: Member, name: str, *arguments: object) -> bytes:
        self.committed.append((name, *arguments))
        return b""

    def group(self, *clients: int, ttl_ms: int = TTL_MS) -> tuple[Member, Core]:
        """A group that is led here from now on, with a session a client, numbered 101 and so on."""
        member, core = member_of(Recorder())
        core.applied = core.lead_index
        if clients:
            member.sessions = Sessions()
            for number, client in enumerate(clients):
                member.sessions.register(101 + number, client, ttl_ms)
        self.hearts.leads(member)
        return member, core

    def wait(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.time += 0.5
            self.hearts.look()

    def ended(self) -> list[int]:
        """The sessions whose end was proposed since this was asked last."""
        found = [number for name, *numbers in self.proposed for number in numbers if name == EXPIRE]
        self.proposed.clear()
        return found


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_a_session_ends_after_its_time_to_live_without_a_sign_and_not_before(rig: Rig) -> None:
    rig.group(1, 2)
    rig.wait(8)
    rig.hearts.heard(1)
    rig.wait(2)
    assert rig.ended() == []
    rig.wait(0.5)
    assert rig.ended() == [102]
    rig.wait(0.5)
    assert rig.ended() == [102], "until it is applied: what was proposed may be lost"
    rig.hearts.seen(2)
    rig.wait(7)
    assert rig.ended() == []
    rig.wait(0.5)
    assert rig.ended() == [101]


def test_a_node_that_stood_still_ends_nobody_for_that(rig: Rig) -> None:
    rig.group(1)
    rig.wait(5)
    rig.time += 3600.0
    assert rig.hearts.now() == pytest.approx(5.0 + LOOK_SECONDS_MAX)
    rig.hearts.look()
    rig.wait(10 - 5 - LOOK_SECONDS_MAX)
    assert rig.ended() == []
    rig.wait(0.5)
    assert rig.ended() == [101]


def test_a_new_leader_gives_everybody_the_whole_time(rig: Rig) -> None:
    member, core = rig.group(1)
    rig.wait(9)
    core.role = FOLLOWER
    rig.wait(60)
    assert rig.ended() == []
    core.role = LEADER
    rig.hearts.leads(member)
    rig.wait(10)
    assert rig.ended() == []
    rig.wait(0.5)
    assert rig.ended() == [101]


def test_who_leads_on_after_a_sleep_counts_on(rig: Rig) -> None:
    member, _ = rig.group(1)
    rig.wait(4)
    member.state = ASLEEP
    rig.wait(4)
    member.state = "running"
    rig.hearts.began(member)
    rig.wait(2.5)
    assert rig.ended() == [101]


def test_who_does_not_lead_has_nothing_to_count(rig: Rig) -> None:
    member, core = rig.group(1)
    core.role = FOLLOWER
    rig.wait(0.5)
    core.role = LEADER
    rig.wait(60)
    assert rig.ended() == [], "it was let go of, and nobody said that it leads again"
    core.role = FOLLOWER
    rig.hearts.began(member)
    core.role = LEADER
    rig.wait(60)
    assert rig.ended() == []


def test_nothing_is_proposed_before_what_earlier_leaders_committed_is_applied(rig: Rig) -> None:
    _, core = rig.group(1)
    core.applied = core.lead_index - 1
    rig.wait(60)
    assert rig.ended() == []
    core.applied = core.lead_index
    rig.wait(0.5)
    assert rig.ended() == [101]


def test_many_end_in_several_looks(rig: Rig) -> None:
    member, _ = rig.group(*range(1, EXPIRE_AT_ONCE + 11))
    rig.wait(10.5)
    first = rig.ended()
    assert len(first) == EXPIRE_AT_ONCE and member.sessions is not None
    for number in first:
        member.sessions.expire(number)
    rig.wait(0.5)
    assert len(rig.ended()) == 10


def test_a_leadership_that_ends_meanwhile_is_no_error(rig: Rig) -> None:
    member, _ = rig.group(1)
    rig.refusal = NotLeader(2)
    rig.wait(11)
    rig.refusal = None
    rig.wait(1)
    assert rig.ended() == [], "another node counts now"
    rig.hearts.began(member)
    rig.wait(0.5)
    assert rig.ended() == [101]


def test_groups_without_sessions_are_not_looked_at(rig: Rig) -> None:
    member, _ = rig.group()
    assert not rig.hearts._groups
    rig.hearts.began(member)
    rig.wait(0.5)
    assert not rig.hearts._groups and not rig.proposed


# Sessions begin


async def test_a_session_is_registered_and_its_client_heard_of(rig: Rig) -> None:
    member, _ = rig.group()
    await rig.hearts.open(member, 7, 1, TTL_MS)
    assert rig.committed == [(REGISTER, 7, 1, TTL_MS)] and rig.hearts.last_seen == {1: rig.hearts.now()}


@pytest.mark.parametrize(("session", "ttl_ms"), [(0, TTL_MS), (7, 0), (7, -1), (7, 1 << 40)])
async def test_what_is_no_session_is_refused_before_anybody_is_remembered(rig: Rig, session: int, ttl_ms: int) -> None:
    member, _ = rig.group()
    with pytest.raises(BadRequest):
        await rig.hearts.open(member, session, 1, ttl_ms)
    assert not rig.committed and not rig.hearts.last_seen
    await rig.hearts.open(member, 7, 1, rig.config.session_ttl_ms_max)
    assert len(rig.committed) == 1


async def test_only_a_leader_registers(rig: Rig) -> None:
    member, core = rig.group()
    core.role = FOLLOWER
    with pytest.raises(NotLeader):
        await rig.hearts.open(member, 7, 1, TTL_MS)
    assert not rig.committed and not rig.hearts.last_seen


@pytest.mark.parametrize("what", ["sessions", "replies"])
async def test_a_full_group_takes_nobody_new_and_knows_who_is_there(rig: Rig, what: str) -> None:
    member, _ = rig.group(1, 2)
    assert member.sessions is not None
    if what == "sessions":
        object.__setattr__(rig.config, "sessions_max", 2)
    else:
        member.sessions.bytes = rig.config.session_reply_bytes_max
    with pytest.raises(Busy, match="number of sessions" if what == "sessions" else "memory of replies"):
        await rig.hearts.open(member, 7, 3, TTL_MS)
    await rig.hearts.open(member, 101, 1, TTL_MS)
    assert rig.committed == [(REGISTER, 101, 1, TTL_MS)]


# Memory


def test_who_has_no_session_is_forgotten_for_who_comes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "CLIENTS_MAX", 3)
    rig.group(1)
    for client in (1, 2, 3):
        rig.hearts.heard(client)
    rig.hearts.heard(2)
    assert sorted(rig.hearts.last_seen) == [1, 2, 3], "who is known takes no new place"
    rig.hearts.heard(4)
    assert sorted(rig.hearts.last_seen) == [1, 4]


def test_who_has_a_session_here_is_never_forgotten(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "CLIENTS_MAX", 2)
    rig.group(1, 2)
    for client in (1, 2):
        rig.hearts.heard(client)
    with pytest.raises(Busy, match="memory of clients"):
        rig.hearts.heard(3)
    assert sorted(rig.hearts.last_seen) == [1, 2]


def test_who_has_a_session_of_a_group_that_sleeps_here_is_not_forgotten(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node with very many clients forgot them, and ended their sessions as if they were silent."""
    monkeypatch.setattr(heartbeats, "CLIENTS_MAX", 2)
    quiesced = QuiescedSessions(rig.hearts)
    rig.hearts.spare(quiesced.clients)
    member, _ = rig.group(1)
    rig.wait(20)
    rig.hearts.heard(1)
    quiesced.sleep(member)
    member.state = ASLEEP
    rig.wait(1)
    for client in (2, 3, 4):
        rig.hearts.heard(client)
    assert 1 in rig.hearts.last_seen and not list(quiesced.overdue())
    quiesced.wake(member)
    rig.hearts.heard(5)
    rig.hearts.heard(6)
    assert 1 not in rig.hearts.last_seen, "its group is led elsewhere"

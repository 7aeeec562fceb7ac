"""Sessions of groups that sleep, without a system: whose client's silence keeps a group awake, or wakes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from logyard.engine.quiesce.quiesced_sessions import QuiescedSessions
from logyard.engine.replica.member import Member

from .doubles import UID, VOTERS, Heard, member_of

TTL_MS = 10_000


def guest(uid: int, *clients: int, since: float = 0.0) -> Member:
    """A group with a session of each of these clients, led here since then."""
    member = member_of(set(VOTERS), uid)
    sessions = {number: SimpleNamespace(client=client, ttl_ms=TTL_MS) for number, client in enumerate(clients)}
    member.sessions = cast(Any, SimpleNamespace(by_id=sessions)) if clients else None
    member.leads_since(since)
    return member


def test_half_a_time_to_live_of_silence_keeps_a_group_awake() -> None:
    heard = Heard()
    sessions, member = QuiescedSessions(heard), guest(UID, 1, 2)
    heard.last_seen = {1: 0.0, 2: 3.0}
    heard.clock = 5.0
    assert not sessions.is_silent(member) and not sessions.is_silent(guest(UID))
    heard.clock = 5.1
    assert sessions.is_silent(member)
    member.leads_since(0.2)
    assert not sessions.is_silent(member), "who leads since then heard nobody before"


def test_a_client_that_falls_silent_ends_the_sleep_of_its_groups_and_of_no_other() -> None:
    heard = Heard()
    sessions = QuiescedSessions(heard)
    groups = [guest(1, 5), guest(2, 5, 6), guest(3, 6), guest(4)]
    for member in groups:
        sessions.sleep(member)
    heard.clock = 10.0
    assert not list(sessions.overdue())
    heard.last_seen[6] = heard.clock = 10.1
    assert list(sessions.overdue()) == [1, 2]
    sessions.wake(groups[0])
    assert list(sessions.overdue()) == [2]
    heard.clock = 21.0
    assert sorted(set(sessions.overdue())) == [2, 3]
    for member in groups:
        sessions.wake(member)
    assert not list(sessions.overdue()) and not sessions._clients and not sessions._since


class Counted(Heard):
    """Counts how often somebody looks at the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def now(self) -> float:
        self.looks += 1
        return super().now()


def test_the_groups_of_a_client_that_lives_are_not_looked_at() -> None:
    """A node looked at each sleeping session once a second: 53 ms of 100,000."""
    heard = Counted()
    sessions = QuiescedSessions(heard)
    groups = [guest(uid, 5, 6) for uid in range(1, 1001)]
    for member in groups:
        sessions.sleep(member)
    heard.clock = 100.0
    heard.last_seen = {5: 100.0, 6: 95.0}
    assert not list(sessions.overdue()) and heard.looks < 10
    # Of one with a shorter time to live only that counts.
    brief = guest(1001, 5)
    cast(Any, brief).sessions.by_id[0].ttl_ms = TTL_MS // 10
    sessions.sleep(brief)
    heard.clock = 101.5
    assert list(sessions.overdue()) == [1001]
    sessions.wake(brief)
    heard.last_seen[6], heard.clock = 110.0, 110.1
    assert list(sessions.overdue()) == list(range(1, 1001))
    for member in groups:
        sessions.wake(member)
    assert not sessions._clients and not sessions._shortest


def test_silence_counts_from_when_the_group_was_led_here_first_however_often_it_slept() -> None:
    heard = Heard()
    sessions = QuiescedSessions(heard)
    sessions.sleep(guest(UID, 5, since=3.0))
    woken = guest(UID, 5)
    sessions.wake(woken)
    assert woken.lead_since == 3.0
    sessions.wake(guest(UID + 1, 5, since=4.0))
    heard.clock = 8.1
    assert sessions.is_silent(woken)

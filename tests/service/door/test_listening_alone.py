"""Calls that listen to a session, alone: one connection each, the newest, and why a call ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.engine.raft.state import FOLLOWER
from logyard.engine.replica.delivery import Delivery
from logyard.engine.replica.member import Member
from logyard.protocol.errors import LogyardError, NotLeader, Refused, SessionExpired, UnknownGroup
from logyard.service.door.pushes import ALIVE_S, Groups, Listening
from tests.engine.replica.doubles import UID, Recorder, member_of

SESSION = 5


class Sink:
    """A connection that counts how often it was told that the node lives."""

    def __init__(self) -> None:
        self.alive = 0

    def push(self, uid: int, session: int, header: Any, body: Any) -> bool:
        assert (uid, session, header["kind"]) == (UID, SESSION, "alive")
        self.alive += 1
        return True

    async def room(self, size: int) -> None:
        pass

    def missed(self) -> None:
        raise AssertionError("nothing is lost")


class Rig:
    """A group that leads here; `members` are those that are awake."""

    def __init__(self) -> None:
        self.member, self.core = member_of(Recorder())
        self.member.sessions = cast(Any, SimpleNamespace(by_id={SESSION: None}))
        self.member.lead()
        self.members: dict[int, Member] = {UID: self.member}
        self.here = True
        self.began: list[int] = []
        self.delivery = Delivery(cast(Any, self), cast(Any, self), cast(Any, self), cast(Any, self), 1)
        groups = Groups(7, self.members, lambda name: self.member, lambda uid: self.here)
        self.listening = Listening(groups, self.delivery, lambda member, session: self.began.append(session))
        self.ended: list[LogyardError] = []

    @asynccontextmanager
    async def call(self, sink: Sink) -> AsyncIterator[None]:
        async def listen() -> None:
            try:
                await self.listening.listen("a", SESSION, sink)
            except LogyardError as error:
                self.ended.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            await trio.testing.wait_all_tasks_blocked()
            yield
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()


async def test_who_listens_is_greeted_once_and_told_that_the_node_lives(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig, sink = Rig(), Sink()
    async with rig.call(sink):
        assert rig.delivery.sinks == {SESSION: sink} and rig.began == [SESSION]
        await trio.sleep(3.5 * ALIVE_S)
        assert sink.alive == 4
    assert rig.began == [SESSION] and not rig.delivery.sinks and not rig.ended


async def test_a_leader_that_has_not_applied_all_greets_when_it_has() -> None:
    rig = Rig()
    rig.member.lead_no_more()
    rig.member.sessions = None
    async with rig.call(Sink()):
        assert not rig.began and not rig.ended
        rig.member.lead()
        rig.member.sessions = cast(Any, SimpleNamespace(by_id={SESSION: None}))
        rig.delivery.stir(UID)
        await trio.testing.wait_all_tasks_blocked()
        assert rig.began == [SESSION]


async def test_a_group_that_sleeps_is_left_alone() -> None:
    rig, sink = Rig(), Sink()
    async with rig.call(sink):
        rig.members.clear()
        rig.member.sessions = None
        rig.delivery.stir(UID)
    assert sink.alive == 2 and not rig.ended


async def test_the_newest_connection_listens() -> None:
    rig, first, second = Rig(), Sink(), Sink()
    async with rig.call(first), rig.call(second):
        rig.delivery.stir(UID)
        await trio.testing.wait_all_tasks_blocked()
        assert [type(one) for one in rig.ended] == [Refused]
        assert rig.delivery.sinks == {SESSION: second}, "the one that ends takes nothing along"


def deposed(rig: Rig) -> None:
    rig.core.role, rig.core.leader = FOLLOWER, 2


def deleted(rig: Rig) -> None:
    rig.here = False


def expired(rig: Rig) -> None:
    rig.member.sessions = cast(Any, SimpleNamespace(by_id={}))


@pytest.mark.parametrize(("what", "kind"), [(deposed, NotLeader), (deleted, UnknownGroup), (expired, SessionExpired)])
async def test_why_a_call_ends(what: Callable[[Rig], None], kind: type[LogyardError]) -> None:
    rig = Rig()
    async with rig.call(Sink()):
        what(rig)
        rig.delivery.stir(UID)
    assert [type(one) for one in rig.ended] == [kind] and not rig.delivery.sinks

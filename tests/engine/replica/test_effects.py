"""Effects, performed with doubles for what they leave the node by: who does what, and what is done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from logyard.engine.machine import (
    Append,
    Applied,
    Aux,
    Checkpoint,
    Context,
    Deliver,
    Effect,
    End,
    Machine,
    Monitor,
    PayloadRange,
    Position,
    Release,
    Send,
    Timer,
)
from logyard.engine.raft.state import FOLLOWER, LEADER
from logyard.engine.replica.effects import Effects
from logyard.engine.replica.member import HALTED, RUNNING, Member
from logyard.engine.replica.uploads import Uploads
from logyard.payloads.reference import PayloadRef
from logyard.protocol.pending import DROP, FAILED, Sink

from .doubles import TERM, UID, Living, Recorder, member_of


class Sessions:
    def __init__(self) -> None:
        self.sent: list[Effect] = []
        self.stirred: list[int] = []

    def send(self, member: Member, index: int, effect: Send) -> None:
        self.sent.append(effect)

    def deliver(self, member: Member, index: int, effect: Deliver) -> None:
        self.sent.append(effect)

    def stir(self, uid: int) -> None:
        self.stirred.append(uid)


class Commands:
    def __init__(self) -> None:
        self.queued: list[tuple[Any, ...]] = []
        self.sinks: list[Any] = []

    def propose(self, member: Member, name: str, *arguments: object, sink: Sink = DROP) -> None:
        self.queued.append((name, *arguments))
        self.sinks.append(sink)


class Outside(Recorder):
    """A machine with all that is asked of a leader's."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []
        self.said: Sequence[Effect] = ()

    def on_role(self, role: str) -> Sequence[Effect]:
        self.heard.append(role)
        return self.said

    def on_tick(self, context: Context) -> Sequence[Effect]:
        self.heard.append(context.timestamp)
        return self.said

    def on_listen(self, session: int) -> Sequence[Effect]:
        raise RuntimeError("a fault that is no part of the log")

    def on_aux(self, data: bytes) -> None:
        self.heard.append(data)


class Rig:
    def __init__(self) -> None:
        self.machine, self.sessions, self.commands = Outside(), Sessions(), Commands()
        self.member, self.core = member_of(self.machine)
        self.died: list[PayloadRange] = []
        self.tasks: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.now = 100
        self.effects = Effects(
            self.sessions, lambda member, died: self.died.extend(died), self.commands,
            lambda member: self.now, cast(Any, None), lambda task, *given: self.tasks.append((task, given)),
        )  # fmt: skip

    def perform(self, *effects: Effect, index: int = 10, term: int = TERM) -> None:
        self.effects.perform(self.member, Context(UID, index, term, 5, 1, 1), effects)

    def lead(self) -> None:
        self.effects.on_leading(self.member)


def test_what_leaves_the_node_is_the_leaders_of_its_own_term_above_the_floor() -> None:
    rig = Rig()
    rig.perform(Send(1, b"follower"))
    rig.lead()
    rig.perform(Send(1, b"older"), term=TERM - 1)
    rig.member.floor = 10
    rig.perform(Send(1, b"below"), index=10)
    rig.perform(Send(1, b"now"), Deliver(2, []), Aux(b"aux"), End(), Checkpoint(True), index=11)
    assert rig.sessions.sent == [Send(1, b"now"), Deliver(2, [])]
    assert rig.machine.heard == ["leader", b"aux"] and rig.commands.queued == [("delete",)]
    assert [given for _, given in rig.tasks] == [(rig.member, True)]
    rig.effects.on_following(rig.member)
    rig.perform(Send(1, b"no more"), index=12)
    assert len(rig.sessions.sent) == 2 and rig.sessions.stirred == [UID] and rig.machine.heard[-1] == "follower"


def test_only_a_leader_that_runs_ends_its_group() -> None:
    rig = Rig()
    rig.lead()
    for state, role in ((HALTED, LEADER), (RUNNING, FOLLOWER), (HALTED, FOLLOWER)):
        cast(Any, rig.member).state, cast(Any, rig.core).role = state, role
        rig.perform(End(), index=11)
    assert rig.commands.queued == []
    cast(Any, rig.member).state, cast(Any, rig.core).role = RUNNING, LEADER
    rig.perform(End(), index=11)
    assert rig.commands.queued == [("delete",)]


def test_a_release_books_exactly_what_lived_and_spares_pieces_that_no_record_owns() -> None:
    rig = Rig()
    cast(Living, rig.member.liveness).places = {(2, 0), (2, 1), (4, 0), (5, 0)}
    everything = Release(Position(1, 0), Position(9, 0))
    uploads = rig.member.uploads = Uploads()
    assert uploads.add((7, 1), 0, PayloadRef(UID, 4, 0, TERM, 100, b"")) is None
    rig.perform(everything)
    assert rig.died == [((2, 0), (2, 1)), ((2, 1), (2, 2)), ((5, 0), (5, 1))] and rig.member.last_release == 10
    rig.perform(everything, index=11)
    assert len(rig.died) == 3 and rig.member.last_release == 10, "nothing dies twice"


@pytest.mark.parametrize("uploads", [None, Uploads()])
def test_what_is_not_written_yet_is_not_released(uploads: Uploads | None) -> None:
    rig = Rig()
    rig.member.uploads = uploads
    cast(Living, rig.member.liveness).places = {(9, 0), (10, 0), (11, 0), (12, 0)}
    rig.perform(Release(Position(11, 0), Position(12, 0)))
    assert not rig.died and not rig.member.last_release
    rig.perform(Release(Position(9, 0), Position(1 << 44, 0)))
    assert rig.died == [((9, 0), (9, 1)), ((10, 0), (10, 1))]


def test_a_new_leader_asks_again_for_all_that_is_not_applied() -> None:
    rig = Rig()
    rig.perform(Append(b"one"), Append(b"two"), Timer("t", 150), Monitor(3))
    assert rig.commands.queued == [] and not rig.effects.timed
    rig.lead()
    assert rig.commands.queued == [("append", 10, 0, b"one"), ("append", 10, 1, b"two")]
    assert rig.effects.timed == rig.effects.ticking == {rig.member}
    rig.effects.tick()
    assert len(rig.commands.queued) == 2, "each once, and the timer is not due"
    rig.now = 150
    rig.effects.tick()
    assert rig.commands.queued[2:] == [("timer", "t", 150)]
    rig.effects.on_following(rig.member)
    assert not rig.effects.timed and not rig.effects.ticking
    rig.lead()
    assert len(rig.commands.queued) == 6


def test_what_could_not_be_proposed_stays_due() -> None:
    rig = Rig()
    rig.lead()
    rig.perform(Append(b"one"), Timer("t", 90))
    rig.effects.tick()
    assert rig.commands.queued == [("append", 10, 0, b"one"), ("timer", "t", 90)]
    for sink in rig.commands.sinks:
        sink.reply(0, FAILED, b"")
    rig.effects.tick()
    assert rig.commands.queued[2:] == rig.commands.queued[:2]


def test_a_timer_that_was_moved_or_cancelled_does_not_ring() -> None:
    rig = Rig()
    rig.lead()
    rig.perform(Timer("moved", 90), Timer("gone", 90))
    rig.perform(Timer("moved", 200), Timer("gone", None), index=11)
    rig.effects.tick()
    assert rig.commands.queued == []


def test_machines_are_ticked_while_they_lead_and_may_not_change_the_log_but_by_commands() -> None:
    rig = Rig()
    rig.lead()
    rig.machine.said = [Append(b"by a tick"), Send(1, b"hello"), Monitor(3), Timer("t", 1)]
    rig.effects.tick_machines()
    assert rig.machine.heard == ["leader", 100] and rig.sessions.sent == [Send(1, b"hello")]
    assert rig.commands.queued == [("append", 0, 0, b"by a tick")] and rig.member.kept is None
    rig.member.state = HALTED
    rig.effects.tick_machines()
    assert rig.machine.heard == ["leader", 100], "not while it is halted"
    rig.member.state = RUNNING
    rig.effects.tick_machines()
    assert rig.machine.heard == ["leader", 100, 100]
    rig.member.lead_no_more()
    rig.effects.tick_machines()
    assert not rig.effects.ticking


def test_below_its_floor_a_leader_does_nothing_of_a_tick_that_leaves_the_node() -> None:
    rig = Rig()
    rig.lead()
    rig.machine.said = [Append(b"by a tick"), Send(1, b"hello")]
    rig.member.floor = rig.member.raft.applied + 1
    rig.effects.tick_machines()
    assert rig.sessions.sent == [] and rig.commands.queued == [("append", 0, 0, b"by a tick")]
    rig.member.floor = rig.member.raft.applied
    rig.effects.tick_machines()
    assert rig.sessions.sent == [Send(1, b"hello")]


def test_what_a_machine_raises_outside_the_log_stops_nobody() -> None:
    rig = Rig()
    rig.lead()
    rig.effects.on_listening(rig.member, 3)
    assert rig.sessions.sent == []


def test_what_is_no_effect_is_an_error() -> None:
    with pytest.raises(TypeError):
        Rig().perform(cast(Any, Applied(b"")))


ODD_EFFECTS = [
    Timer("bell", cast(Any, "soon")), Timer("bell", 1 << 70), Timer("bell", cast(Any, float("nan"))),
    Timer(cast(Any, (1,)), 5), Append(cast(Any, "text")), Append(cast(Any, 3.5)), Monitor(cast(Any, [1])),
    Send(1, cast(Any, "text")), Send(cast(Any, [1]), b"x"), Deliver(1, cast(Any, None)), cast(Any, b"x"),
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD_EFFECTS, ids=repr)
def test_an_effect_with_odd_fields_is_its_entrys_fault_on_every_member_and_nobodys_later(odd: Effect) -> None:
    for leads in (False, True):
        rig = Rig()
        if leads:
            rig.lead()
        with pytest.raises(TypeError, match="is no effect"):
            rig.perform(odd)
        assert rig.member.kept is None and not rig.sessions.sent and not rig.commands.queued
        rig.effects.tick()


class Yielding(Outside):
    """Gives what it wants one by one, and fails on the way."""

    def on_role(self, role: str) -> Any:
        self.heard.append(role)
        yield Send(1, b"role")
        raise RuntimeError("a fault that is no part of the log")

    def on_tick(self, context: Context) -> Any:
        yield from self.on_role("tick")


@pytest.mark.parametrize("said", [5, [5], *([one] for one in ODD_EFFECTS)], ids=repr)
def test_whatever_a_local_method_gives_stops_nobody(said: Any) -> None:
    rig = Rig()
    rig.machine.said = said
    rig.lead()
    rig.effects.tick_machines()
    rig.effects.on_following(rig.member)
    assert rig.machine.heard == ["leader", 100, "follower"] and not rig.sessions.sent and not rig.commands.queued


def test_only_a_leader_that_runs_proposes_what_a_local_method_asks_for() -> None:
    """Who could not propose it raised, into the node's own tasks."""
    rig = Rig()
    rig.machine.said = [Append(b"a command"), Send(1, b"role")]
    for state, role in ((HALTED, LEADER), (RUNNING, FOLLOWER), (RUNNING, LEADER)):
        assert not rig.commands.queued
        cast(Any, rig.member).state, cast(Any, rig.core).role = state, role
        rig.lead()
    assert rig.commands.queued == [("append", 0, 0, b"a command")] and len(rig.sessions.sent) == 3


def test_a_local_method_that_yields_and_fails_stops_nobody() -> None:
    rig = Rig()
    rig.machine = Yielding()
    rig.member.begin_anew(cast(Machine, rig.machine))
    rig.lead()
    rig.effects.tick_machines()
    rig.effects.on_following(rig.member)
    assert rig.sessions.sent == [Send(1, b"role")] * 2 and rig.machine.heard[-1] == "follower"

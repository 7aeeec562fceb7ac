"""The applier, with what it tells and asks: committed entries become replies and effects, in order, each once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.engine.entry import CONFIGURATION, NOOP, encode_system
from logyard.engine.machine import (
    Append,
    Applied,
    Batch,
    Context,
    Effect,
    Frame,
    Machine,
    Monitor,
    PayloadRef,
    Position,
    Reject,
    Release,
)
from logyard.engine.replica.applier import Applier, Host
from logyard.engine.replica.apply import bounded
from logyard.engine.replica.effects import Effects
from logyard.engine.replica.member import DELETED, HALTED, RUNNING, Member
from logyard.engine.replica.proposals import Owed, Proposal
from logyard.engine.replica.quarantine import Quarantine
from logyard.engine.replica.sessions import Sessions
from logyard.protocol.errors import Busy, Corrupt

from .doubles import TERM, UID, Client, Entries, Recorder, frame, member_of


class Performed:
    """Effects, noted; `leading`: who was told that it leads."""

    def __init__(self) -> None:
        self.done: list[tuple[int, Sequence[Effect]]] = []
        self.leading: list[Member] = []

    def perform(self, member: Member, context: Context, effects: Sequence[Effect]) -> None:
        self.done.append((context.index, effects))

    def on_leading(self, member: Member) -> None:
        self.leading.append(member)


class Rig:
    def __init__(self) -> None:
        self.machine, self.entries, self.effects, self.client = Recorder(), Entries(), Performed(), Client()
        self.member, self.core = member_of(self.machine)
        self.told: list[tuple[Any, ...]] = []
        self.later: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.queued: list[tuple[Any, ...]] = []
        host = Host(
            self._deleted, lambda *what: self._tell("configured", *what[1:]), lambda *what: self._tell("damaged"),
            lambda *what: self._tell("stop", what[1]), lambda member: self._tell("sessions"), lambda member: True,
            lambda member: self._tell("mark"), lambda member: None,
            lambda task, *given: self.later.append((task, given)),
        )  # fmt: skip
        self.quarantine = Quarantine(
            self.entries, lambda kind, arguments: cast(Machine, self.machine), cast(Any, None), cast(Any, self._own)
        )
        self.applier = Applier(self.entries, cast(Effects, self.effects), self.quarantine, host)

    def _deleted(self, state: Any, index: int) -> bytes:
        cast(Member, state).state = DELETED
        self._tell("deleted", index)
        return b"gone"

    def _own(self, member: Member, name: str, *arguments: object, sink: object) -> None:
        self.queued.append((name, *arguments))

    def _tell(self, *what: Any) -> None:
        self.told.append(what)

    def owe(self, index: int, *requests: int, term: int = TERM) -> None:
        """Somebody waits for the frames of an entry."""
        frames = [Proposal(memoryview(b""), self.client, request, 1) for request in requests]
        self.member.proposals.waiting = {**(self.member.proposals.waiting or {}), index: Owed(term, 0, frames)}

    def apply(self) -> None:
        self.core.commit = len(self.entries.entries)
        self.applier.apply_all([self.member])


def test_entries_are_applied_in_order_and_who_waits_is_answered() -> None:
    rig = Rig()
    one, other = Release(Position(2, 0), Position(2, 1)), Release(Position(2, 1), Position(2, 2))
    rig.machine.answers = {b"no": Reject("never", "not this"), b"two": Applied(b"2", [one])}
    rig.owe(rig.entries.add(b"one"), 1)
    rig.owe(rig.entries.add(b"two", b"no"), 2, 3)
    rig.entries.add(b"four")
    rig.apply()
    assert rig.machine.given == [(1, b"one"), (2, b"two"), (2, b"no"), (3, b"four")]
    assert rig.client.once() == {1: b"did one", 2: b"2", 3: "never"}
    dead = [effect for _, effects in rig.effects.done for effect in effects]
    assert dead == [one, other], "and what is refused"
    assert rig.applier.entries == rig.core.applied == 3 and rig.member.log_time == 5


def test_what_another_leader_committed_in_its_place_is_no_answer() -> None:
    rig = Rig()
    rig.owe(rig.entries.add(b"theirs", term=TERM + 1), 1)
    rig.owe(rig.entries.add_plain(NOOP), 2)
    rig.apply()
    assert rig.client.once() == {1: "not_leader", 2: "not_leader"}


def test_the_entry_that_a_leader_began_with_makes_it_lead() -> None:
    rig = Rig()
    rig.core.lead_index = 2
    rig.entries.add(b"before")
    rig.entries.add_plain(NOOP)
    rig.apply()
    assert rig.effects.leading == [rig.member]


def test_a_configuration_is_told_with_who_was_there_before() -> None:
    rig = Rig()
    rig.entries.add_plain(CONFIGURATION)
    rig.apply()
    assert rig.told == [("configured", {1, 2, 3})] and rig.core.applied == 1


def test_nothing_is_applied_behind_a_deletion() -> None:
    rig = Rig()
    rig.owe(rig.entries.add_own(encode_system("delete")), 1)
    rig.owe(rig.entries.add(b"later"), 2)
    rig.apply()
    assert rig.client.once() == {1: b"gone"} and rig.machine.given == [] and rig.core.applied == 1
    rig.apply()
    assert rig.machine.given == []


def test_the_first_session_is_told_and_a_frame_of_it_is_applied_once() -> None:
    rig = Rig()
    rig.entries.add_own(encode_system("register", 7, 1, 60_000))
    first = rig.entries.add_frames(frame(b"x", 7, 1))
    again = rig.entries.add_frames(frame(b"x", 7, 1))
    rig.owe(first, 1)
    rig.owe(again, 2)
    rig.apply()
    assert rig.told == [("sessions",)] and rig.machine.given == [(first, b"x")]
    assert rig.client.once() == {1: b"did x", 2: b"did x"}
    assert [index for index, _ in rig.effects.done] == [again], "the copy's payload is released"


def test_a_machine_that_refuses_a_sessions_end_is_told_of_it_and_goes_on() -> None:
    class Refusing(Recorder):
        def on_session_end(self, context: Context, session: int) -> Applied:
            self.given.append((context.index, b"end"))
            raise Reject("no", "it ended all the same")

    rig = Rig()
    rig.member.begin_anew(cast(Machine, machine := Refusing()))
    rig.member.keep(Context(UID, 1, TERM, 5, 1, 1), Monitor(7))
    rig.entries.add_own(encode_system("register", 7, 1, 60_000))
    ended = rig.entries.add_own(encode_system("expire", 7))
    rig.entries.add(b"later")
    rig.apply()
    assert machine.given == [(ended, b"end"), (3, b"later")] and rig.member.state == RUNNING
    assert rig.member.sessions is None and rig.member.kept is not None and not rig.member.kept.monitors


@pytest.mark.parametrize("session", [0, 7])
@pytest.mark.parametrize("reply", [None, "text", 5])
def test_a_reply_that_is_no_bytes_halts_its_group_and_never_comes_to_a_connection(reply: object, session: int) -> None:
    rig = Rig()
    rig.entries.add_own(encode_system("register", 7, 1, 60_000))
    rig.machine.answers = {b"odd": Applied(cast(Any, reply))}
    odd = rig.entries.add_frames(frame(b"odd", session, session and 1))
    rig.owe(odd, 1)
    rig.apply()
    assert rig.client.once() == {1: "unknown"} and rig.core.applied == odd - 1
    assert rig.member.state == HALTED and "reply is a" in rig.member.reason


class Reuser(Recorder):
    """Says all that it says with one buffer, which it writes anew for each command."""

    def __init__(self) -> None:
        super().__init__()
        self.out = bytearray(1)

    def apply(self, context: Context, command: bytes, payloads: Sequence[PayloadRef]) -> Applied:
        self.out[:] = command
        return Applied(cast(bytes, self.out), [Append(cast(bytes, self.out))])


class BatchReuser(Reuser):
    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        (found,) = [self.apply(context, one.commands, ()) for one in frames]
        return Batch([found.reply], found.effects)


@pytest.mark.parametrize("session", [0, 7])
@pytest.mark.parametrize("make", [Reuser, BatchReuser])
def test_a_buffer_that_a_machine_uses_again_changes_nothing_that_it_said(
    monkeypatch: pytest.MonkeyPatch, make: type[Reuser], session: int
) -> None:
    def keep(self: Performed, member: Member, context: Context, effects: Sequence[Effect]) -> None:
        for effect in effects:
            member.keep(context, effect)

    rig = Rig()
    rig.member.begin_anew(cast(Machine, make()))
    monkeypatch.setattr(Performed, "perform", keep)
    rig.entries.add_own(encode_system("register", 7, 1, 60_000))
    frames = [frame(command, session, session and number) for number, command in enumerate((b"a", b"b"), 1)]
    if make is Reuser and not session:
        rig.owe(rig.entries.add_frames(*frames), 1, 2)
    else:
        for number, one in enumerate(frames, 1):
            rig.owe(rig.entries.add_frames(one), number)
    rig.apply()
    assert rig.client.once() == {1: b"a", 2: b"b"}
    assert rig.member.kept is not None and list(rig.member.kept.appends.values()) == [b"a", b"b"]
    if session:
        assert rig.member.sessions is not None
        assert [rig.member.sessions.known(7, number) for number in (1, 2)] == [b"a", b"b"]


@pytest.mark.parametrize("session", [0, 7])
@pytest.mark.parametrize("message", ["no \ud800", ValueError("no \ud800"), 5])
def test_a_refusal_whose_message_no_wire_can_carry_is_told_all_the_same(message: object, session: int) -> None:
    rig = Rig()
    rig.entries.add_own(encode_system("register", 7, 1, 60_000))
    rig.machine.answers = {b"odd": Reject("odd", cast(Any, message))}
    rig.owe(rig.entries.add_frames(frame(b"odd", session, session and 1)), 1)
    rig.apply()
    assert rig.client.once() == {1: "odd"} and rig.member.state == RUNNING
    assert rig.member.sessions is not None
    kept = Sessions.decode(rig.member.sessions.encode())
    assert (kept.known(7, 1) is not None) == bool(session), "in a snapshot as well"


@pytest.mark.parametrize("session", [0, 7])
def test_a_fault_whose_message_no_wire_can_carry_halts_its_group_as_any_other(session: int) -> None:
    rig = Rig()
    rig.entries.add_own(encode_system("register", 7, 1, 60_000))
    rig.machine.faults, rig.machine.fault = {b"bad"}, ValueError("no \ud800")
    rig.owe(rig.entries.add_frames(frame(b"bad", session, session and 1)), 1)
    rig.apply()
    assert rig.client.once() == {1: "unknown"}
    assert rig.member.state == HALTED and rig.member.reason == "ValueError while applying command (2, 0): no ?"


def test_a_want_of_descriptors_applies_it_later_and_damage_is_told() -> None:
    rig = Rig()
    rig.entries.add(b"one")
    rig.entries.fault = Busy("descriptors", 0.5)
    rig.apply()
    assert rig.machine.given == [] and rig.later[0][1] == (rig.member, 0.5) and rig.told == []
    rig.entries.fault = Busy("descriptors", 0.5)
    rig.apply()
    assert len(rig.later) == 1, "it is tried again once, however many turns come"
    rig.entries.fault = Corrupt("a segment", 0, "x", "y")
    rig.apply()
    assert rig.told == [("damaged",)] and rig.machine.given == []
    rig.apply()
    assert rig.machine.given == [(1, b"one")]


async def test_what_is_applied_later_waits_for_as_long_as_was_said(autojump_clock: trio.testing.MockClock) -> None:
    """Whoever tries again at once spins where the node has least to spare."""
    rig = Rig()
    rig.entries.add(b"one")
    rig.entries.fault = Busy("descriptors", 0.5)
    rig.apply()
    ((task, given),) = rig.later
    began = trio.current_time()
    await task(*given)
    assert trio.current_time() - began == pytest.approx(0.5) and rig.machine.given == [(1, b"one")]


def test_what_the_engine_itself_fails_at_stops_the_group() -> None:
    rig = Rig()
    rig.entries.add(b"one")
    rig.entries.fault = ZeroDivisionError("ours")
    rig.apply()
    assert rig.told == [("stop", "ZeroDivisionError while applying entry 1: ours")]


@pytest.mark.parametrize("place", [0, 1])
def test_a_fault_halts_its_group_there_until_the_command_is_skipped(place: int) -> None:
    rig = Rig()
    commands = [b"good", b"good"]
    commands[place] = b"bad"
    rig.machine.faults = {b"bad"}
    rig.entries.add(b"before")
    rig.owe(rig.entries.add(*commands), 1, 2)
    rig.entries.add(b"after")
    rig.apply()
    halt = rig.member.halt
    assert rig.member.state == HALTED and halt is not None and (halt.index, halt.ordinal) == (2, place)
    assert rig.core.applied == 1 and not rig.core.stopped, "its core runs on"
    assert rig.client.once() == {1: "unknown", 2: "unknown"}
    rig.apply()
    assert rig.core.applied == 1
    rig.quarantine.request(rig.member, 2, place, Client())
    assert rig.queued == [("skip", 2, place)]
    rig.machine.given.clear()
    rig.owe(rig.entries.add_own(encode_system("skip", 2, place)), 3)
    rig.apply()
    assert rig.member.halt is None and rig.core.applied == 4
    assert rig.machine.given == [(1, b"before"), (2, b"good"), (3, b"after")], "built anew, without what was skipped"
    assert rig.client.once()[3] == b""


def test_a_command_for_a_newer_machine_waits_and_is_not_skipped() -> None:
    rig = Rig()
    rig.entries.add_own(encode_system("upgrade", 2))
    rig.apply()
    assert rig.member.halt is not None and rig.member.halt.version == 2 and not rig.core.may_lead
    rig.entries.add_own(encode_system("skip", 1, 0))
    rig.apply()
    assert rig.core.applied == 0


@pytest.mark.parametrize(("first", "end"), [((3, 0), (9, 0)), ((0, 0), (5, 0)), ((5, 0), (6, 0)), ((7, 1), (9, 2))])
def test_a_release_is_bounded_to_a_range_whatever_it_names(first: tuple[int, int], end: tuple[int, int]) -> None:
    """One that begins above its entry was reversed: an offline check called that damage."""
    found = bounded(Context(7, 5, 1, 0, 1, 1), Release(Position(*first), Position(*end)))
    assert found.first <= found.end <= (6, 0) and found.first <= first

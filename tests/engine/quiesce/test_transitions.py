"""Members that become rows and rows that become members, without a system: all that goes with a group goes with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from logyard.engine.log import checkpoint_rows, meta_rows
from logyard.engine.log.recovered import Recovered
from logyard.engine.quiesce.quiesced_table import row_again, row_fresh, row_of
from logyard.engine.quiesce.transitions import Rebuild
from logyard.engine.replica.member import ASLEEP, STOPPED, Member
from logyard.engine.types import Spec
from logyard.protocol.errors import Corrupt

from .doubles import LAST, OWN, TERM, UID, VOTERS, Yard, member_of, row

SPEC = Spec(UID, "a", "log", {}, VOTERS, 0)


def kept(**timers: int) -> Any:
    return SimpleNamespace(timers=timers)


def test_a_member_becomes_a_row_and_that_row_the_same_member() -> None:
    yard = Yard()
    member = yard.members[UID] = member_of(yard.live)
    yard.names["a"] = UID
    yard.leaders.led(UID, OWN, TERM, 77)
    member.kept = kept(bell=1_000_050_000, later=2_000_000_000)
    session = SimpleNamespace(client=5, ttl_ms=1000)
    member.sessions = cast(Any, SimpleNamespace(by_id={1: session}))
    slept = row_of(member, OWN, {3, 1}, ())
    yard.transitions.sleep(member, slept)
    assert member.state == ASLEEP and not yard.members and not yard.names and not yard.leaders.rows
    assert yard.table.named("a") == UID and yard.table.row(UID) == slept._replace(since_ms=77)
    assert yard.timers.next_s() == 50.0
    yard.heard.clock = 1.1
    assert list(yard.sessions.overdue()) == [UID]
    yard.rebuilt = lambda member: setattr(member, "sessions", SimpleNamespace(by_id={1: session}))
    found = yard.table.pop(UID)
    assert found is not None
    again, clock = yard.transitions.wake(UID, found, OWN)
    assert clock is not None and yard.members == {UID: again} and yard.names == {"a": UID}
    assert yard.leaders.rows == {UID: (OWN, TERM, 77)} and not list(yard.sessions.overdue())
    yard.clocks.move(60.0)
    assert not list(yard.timers.due()) and (yard.transitions.slept, yard.transitions.woken) == (1, 1)


def test_a_follower_looks_after_no_session_and_who_wakes_without_a_leader_is_said_to_have_none() -> None:
    yard = Yard()
    member = yard.members[UID] = member_of(yard.live)
    yard.names["a"] = UID
    member.sessions = cast(Any, SimpleNamespace(by_id={1: SimpleNamespace(client=5, ttl_ms=1000)}))
    yard.transitions.sleep(member, row_of(member, 1))
    yard.heard.clock = 100.0
    assert not list(yard.sessions.overdue())
    found = yard.table.pop(UID)
    assert found is not None and found.leader == 1
    yard.transitions.wake(UID, found, 0)
    assert not yard.leaders.rows


def test_a_row_says_what_the_members_machine_does() -> None:
    member = member_of({OWN})
    assert row_of(member, 1)[:7] == (TERM, LAST, 0, 0, 0, 1, 0)
    machine = cast(Any, member.machine)
    machine.start, machine.end = "a race", {"begun"}
    assert row_of(member, 1)[:7] == (TERM, LAST, 0, 0, 0, 1, 0), "everyday names are the machine's own"
    machine.log_bounds = lambda: (3, 8)
    member.covered(LAST, TERM, 123)
    member.kept = kept()
    assert row_of(member, 1)[:7] == (TERM, LAST, 0, 3, 8, 1, 123)


def test_a_group_that_slept_before_a_restart_sleeps_on_without_a_leader() -> None:
    for leader, under in ((1, 1), (OWN, 0)):
        yard = Yard()
        member = member_of(yard.live)
        member.covered(LAST, TERM, 123)
        member.kept = kept(bell=1_000_050_000)
        member.log_time = 1_000_020_000
        slept = row_of(member, leader)
        key, value = checkpoint_rows.state(member, asleep=slept.stored(6))
        assert value is not None
        state = meta_rows.StateRow.unpack(key, value)
        assert row_again(SPEC, state) == (slept._replace(leader=0, under=leader, epoch=6), 1_000_020_000)
        yard.transitions.adopt(SPEC, state)
        assert yard.table.row(UID).under == under and yard.table.leader_of(UID) == 0 and not yard.members
        assert yard.timers.next_s() == 30.0


class Store:
    """Rows of the meta store, and what `Rebuild` made of them."""

    def __init__(self, *puts: tuple[bytes, bytes | None]) -> None:
        self.rows = {key: value for key, value in puts if value is not None}
        self.built: list[Any] = []
        self.unfit: list[Exception] = []
        self.learnt: list[Member] = []
        self.fault: Exception | None = None
        self.rebuild = Rebuild(
            "meta", cast(Any, self.rows), self.build, lambda member, reason: member.quarantine(reason), self.mend,
            self.learnt.append,
        )  # fmt: skip

    def build(self, spec: Spec, state: Any, snapshot: Any, recovered: Recovered) -> Member:
        self.built.append((spec, state and state.uid, snapshot and snapshot.index))
        if self.fault is not None:
            raise self.fault
        return member_of({OWN}, spec.uid, spec.name)

    def mend(self, spec: Spec, error: Exception) -> Member:
        self.unfit.append(error)
        return member_of({OWN}, spec.uid, spec.name)


GROUP = checkpoint_rows.group(SPEC)
SNAPSHOT = checkpoint_rows.snapshot(UID, LAST, TERM, b"")
STATE = checkpoint_rows.state(member_of({OWN}))


def test_a_member_is_built_from_its_three_rows_alone() -> None:
    store = Store(GROUP, STATE, SNAPSHOT)
    member = store.rebuild(UID, row())
    assert store.built == [(SPEC, UID, LAST)] and store.learnt == [member] and not store.unfit
    assert store.rebuild.spec(UID) == SPEC


def test_a_group_whose_definition_is_lost_comes_up_stopped() -> None:
    store = Store(STATE, SNAPSHOT)
    member = store.rebuild(UID, row())
    assert member.state == STOPPED and member.damaged and member.spec.name == "a" and not store.learnt
    assert store.built == [(Spec(UID, "a", "log", {}, (), 0), None, None)]


def test_a_group_whose_other_rows_are_lost_or_make_no_member_is_mended() -> None:
    for rows in ((GROUP, STATE), (GROUP, SNAPSHOT)):
        store = Store(*rows)
        store.rebuild(UID, row())
        assert not store.built and isinstance(store.unfit[0], Corrupt) and not store.learnt
    store = Store(GROUP, STATE, SNAPSHOT)
    store.fault = KeyError("a defect")
    store.rebuild(UID, row())
    assert store.unfit == [store.fault] and not store.learnt


def test_groups_that_nobody_uses_yet_are_rows_and_become_members_of_their_definition_alone() -> None:
    yard = Yard()
    specs = [SPEC._replace(uid=UID + number, name=f"g{number}") for number in range(3)]
    yard.names.update((spec.name, spec.uid) for spec in specs)
    yard.transitions.lay(specs)
    assert not yard.names and not yard.members and len(yard.table) == 3 and yard.table.named("g2") == UID + 2
    assert yard.table.row(UID) == row_fresh(specs[0]) and yard.table.leader_of(UID) == 0
    assert not yard.table.led and not yard.table.led_with and not yard.table.under
    store = Store(GROUP)
    member = store.rebuild(UID, row_fresh(SPEC))
    assert store.built == [(SPEC, None, None)] and store.learnt == [member] and not store.unfit

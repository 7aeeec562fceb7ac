"""Waking without a system: who wakes as what, whom it tells, and what nodes that come and go mean for those asleep."""

from __future__ import annotations

from typing import Any

import pytest

from logyard.engine.quiesce import unquiesce
from logyard.engine.quiesce.quiesced_table import Row, Shape
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.engine.raft.mending import Mend
from logyard.engine.raft.messages import DAMAGED, LEADER_GONE, Message
from logyard.engine.raft.quiescence import is_quiet
from logyard.engine.raft.state import CANDIDATE, PRECANDIDATE
from logyard.engine.replica.log_time import LogTime
from logyard.engine.replica.member import HALTED, Halt, Member
from logyard.engine.transport.blobs import AWAKE

from ..host.cluster import raft_of
from .doubles import LAST, LIMITS, MS, OWN, SHAPE, TERM, UID, VOTERS, S, Yard, row

WAKES = [
    # what differs from the stored row of a group that slept under this very node -> its role when it wakes
    ({}, LEADER),
    ({"term": TERM + 1}, FOLLOWER),
    ({"term": TERM - 1}, FOLLOWER),
    ({"vote": 1}, FOLLOWER),
    ({"leader": 1}, FOLLOWER),
    ({"leader": 0}, FOLLOWER),
    ({"term": TERM + 1, "use": True}, PRECANDIDATE),
    ({"leader": 0, "use": True}, PRECANDIDATE),
]


@pytest.mark.parametrize(("differs", "role"), WAKES)
def test_who_wakes_leads_only_in_the_term_that_it_won(differs: dict[str, Any], role: int) -> None:
    yard = Yard()
    use, vote = differs.pop("use", False), differs.pop("vote", OWN)
    yard.rebuilt = lambda member: setattr(member.raft, "vote", vote)
    yard.table.add(UID, row(**differs))
    member = yard.unquiesce.find(UID, use=use, by=0 if use else 3)
    assert member is not None and member.raft.role == role and yard.members == {UID: member} and UID not in yard.table
    assert (member.raft.leader == OWN) == (role == LEADER) == (yard.leading == [member])
    assert yard.marked == [member] and yard.names == {"a": UID} and yard.transitions.woken == 1


def test_a_leader_that_wakes_knows_its_followers_and_tells_them_but_not_whom_it_was_told_by() -> None:
    yard = Yard()
    yard.table.add(UID, row(since_ms=77))
    member = yard.unquiesce.find(UID, by=3)
    assert member is not None and {one.match for one in member.raft.progress.values()} == {LAST}
    assert yard.leaders.rows == {UID: (OWN, TERM, 77)} and yard.unquiesce.is_busy and not yard.sent
    yard.unquiesce.tick()
    assert yard.sent == [(1, AWAKE, {"groups": [UID]})] and not yard.unquiesce.is_busy
    assert yard.unquiesce.find(UID) is member and yard.unquiesce.find(UID + 1) is None


@pytest.mark.parametrize("by", [0, 1])
def test_a_follower_trusts_a_leader_that_woke_it_and_asks_one_that_did_not(by: int) -> None:
    yard = Yard()
    yard.table.add(UID, row(1))
    member = yard.unquiesce.find(UID, by=by)
    assert member is not None and member.raft.leader == 1 and raft_of(member).doubt == (not by)


def test_nobody_follows_a_leader_that_is_gone_whatever_its_row_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unquiesce, "SCAN_SECONDS", 0.0)
    yard = Yard()
    yard.unquiesce.on_liveness(set(VOTERS))
    yard.unquiesce.tick()
    while yard.unquiesce.is_busy:
        yard.unquiesce.tick()
    for uid in (UID, UID + 1, UID + 2):
        yard.table.add(uid, row(1, name=f"g{uid}"))
    # The core still thinks it alive: only the scan knows.
    yard.unquiesce.on_liveness({2, 3})
    assert yard.table.leader_of(UID) == 0 and yard.table.leader_of(UID + 2) == 1 and yard.stirred
    member = yard.unquiesce.find(UID + 2)
    assert member is not None and not member.raft.leader
    while yard.unquiesce.is_busy:
        yard.unquiesce.tick()
    assert len(yard.members) == 3, "a quorum is left"


def test_nobody_follows_a_leader_of_which_the_node_just_heard_that_it_is_gone() -> None:
    yard = Yard(live=(2, 3))
    yard.table.add(UID, row(1))
    member = yard.unquiesce.find(UID)
    assert member is not None and not member.raft.leader and member.raft.role == FOLLOWER


def test_a_node_at_rest_gets_up_to_go_on_with_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unquiesce, "SCAN_SECONDS", 0.0)
    yard = Yard()
    yard.unquiesce.on_liveness(set(VOTERS))
    while yard.unquiesce.is_busy:
        yard.unquiesce.tick()
    for uid in (UID, UID + 1):
        yard.table.add(uid, row(1, shape=SHAPE._replace(voters=(1, 2)), name=f"g{uid}"))
    before = yard.stirred
    yard.unquiesce.on_liveness({2, 3})
    assert yard.stirred == before + 1 and yard.unquiesce.is_busy and yard.table.leader_of(UID + 1) == 1
    yard.unquiesce.tick()
    assert yard.table.leader_of(UID + 1) == 0 and not yard.members


def test_a_lone_voter_campaigns_when_it_wakes_and_others_wait_to_be_asked() -> None:
    yard = Yard()
    yard.table.add(UID, row(0))
    yard.table.add(UID + 1, row(0, name="b"))
    member = yard.unquiesce.find(UID)
    assert member is not None and member.raft.role == FOLLOWER
    yard.voters = (OWN,)
    member = yard.unquiesce.find(UID + 1)
    assert member is not None and (member.raft.role, member.raft.term) == (CANDIDATE, TERM + 1)


def test_a_member_that_is_mended_or_stopped_takes_up_nothing() -> None:
    yard = Yard()
    for uid in (UID, UID + 1):
        yard.table.add(uid, row(name=f"g{uid}"))

    def damage(member: Member) -> None:
        if member.uid == UID:
            member.quarantine("its rows are damaged")
        else:
            member.raft.mend = Mend(1, False)

    yard.rebuilt = damage
    for uid in (UID, UID + 1):
        member = yard.unquiesce.find(uid, use=True)
        assert member is not None and member.raft.role == FOLLOWER
    assert [one.uid for one in yard.marked] == [UID + 1] and not yard.leading


def test_a_leader_that_wakes_without_its_machine_acts_for_nobody() -> None:
    """It leads until another one does; its machine, which knows nothing, was asked what there is to do as a leader, and
    what it wanted proposed ended the node."""
    yard = Yard()
    yard.table.add(UID, row())
    yard.rebuilt = lambda member: member.suspend(Halt(LAST, 0, 0, -1, "this program has no machine for it", 1))
    member = yard.unquiesce.find(UID)
    assert member is not None and (member.state, member.raft.role) == (HALTED, LEADER)
    assert yard.marked == [member] and not yard.leading


def test_a_leaders_death_wakes_its_groups_where_a_quorum_is_left() -> None:
    yard = Yard()
    yard.unquiesce.on_liveness(set(VOTERS))
    pair = SHAPE._replace(voters=(1, 2))
    yard.table.add(UID, row(1))
    yard.table.add(UID + 1, row(1, shape=pair, name="b"))
    yard.table.add(UID + 2, row(3, name="c"))
    yard.live.discard(1)
    yard.unquiesce.on_liveness({2, 3})
    assert [yard.table.leader_of(uid) for uid in (UID, UID + 1, UID + 2)] == [0, 0, 3]
    assert not yard.members, "with the next tick"
    yard.unquiesce.tick()
    assert list(yard.members) == [UID]


def test_a_leader_without_a_quorum_leads_no_more_and_who_comes_back_wakes_what_slept_without_it() -> None:
    yard = Yard()
    yard.unquiesce.on_liveness({1, 2})
    yard.table.add(UID, row(shape=SHAPE._replace(asleep=(1,), absent=(3,))))
    yard.table.add(UID + 1, row(shape=SHAPE._replace(voters=(1, 2), asleep=(1,)), name="b"))
    yard.unquiesce.on_liveness({1, 2, 3})
    yard.unquiesce.tick()
    assert list(yard.members) == [UID] and yard.members[UID].raft.role == LEADER
    yard.unquiesce.on_liveness({2, 3})
    yard.unquiesce.tick()
    assert yard.table.leader_of(UID + 1) == 0 and UID + 1 not in yard.members


def test_the_same_nodes_mean_nothing() -> None:
    yard = Yard()
    yard.unquiesce.on_liveness({OWN})
    assert not yard.unquiesce.is_busy and not yard.stirred


@pytest.mark.parametrize(("epoch", "leader"), [(6, 1), (7, 0)])
def test_after_a_restart_groups_sleep_on_under_the_process_that_led_them_and_under_no_other(
    epoch: int, leader: int
) -> None:
    yard = Yard()
    yard.table.add(UID, row(0, under=1, epoch=6))
    yard.epochs[1] = epoch
    yard.unquiesce.on_liveness({1, 2})
    assert yard.table.leader_of(UID) == leader and not yard.members


def test_a_scan_goes_on_in_later_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unquiesce, "SCAN_SECONDS", 0.0)
    monkeypatch.setattr(unquiesce, "WAKE_SECONDS", 0.0)
    yard = Yard()
    yard.unquiesce.on_liveness({1, 2, 3})
    while yard.unquiesce.is_busy:
        yard.unquiesce.tick()
    for uid in range(UID, UID + 5):
        yard.table.add(uid, row(1, name=f"g{uid}"))
    yard.live.discard(1)
    yard.unquiesce.on_liveness({2, 3})
    ticks = 0
    while yard.unquiesce.is_busy:
        before = len(yard.members)
        yard.unquiesce.tick()
        assert len(yard.members) - before <= 1, "no more than there is time for"
        ticks += 1
    assert ticks >= 5 and len(yard.members) == 5


def test_who_is_awake_elsewhere_wakes_here_by_that_nodes_word() -> None:
    yard = Yard()
    yard.table.add(UID, row(1))
    yard.unquiesce.on_awake(1, [UID, UID + 1])
    assert yard.stirred == 1, "of a group that does not sleep here there is nothing to do"
    # What it is told meanwhile changes nothing: it is going to say so itself.
    yard.unquiesce.tell_awake(1, UID)
    yard.unquiesce.tick()
    assert not raft_of(yard.members[UID]).doubt and not yard.sent


def test_who_lost_its_rows_says_so_to_whoever_holds_it_to_be_asleep() -> None:
    """The members that it knows may be the first ones, none of which leads any more."""
    yard = Yard()
    yard.table.add(UID, row(0))
    member = yard.unquiesce.find(UID, by=3)
    assert member is not None
    raft, stranger = raft_of(member), max(VOTERS) + 1
    raft.ready()
    yard.marked.clear()
    yard.unquiesce.on_awake(stranger, [UID])
    assert not yard.marked and not raft.outbox
    raft.mend = Mend(5, True)
    yard.unquiesce.on_awake(stranger, [UID])
    assert yard.marked == [member] and [(one.kind, one.to) for one in raft.outbox] == [(DAMAGED, stranger)]
    raft.outbox.clear()
    raft.leader = 1
    yard.unquiesce.on_awake(stranger, [UID])
    assert not raft.outbox, "that one hears of it anyway"


@pytest.mark.parametrize(("sender", "term", "trusts"), [(1, TERM, False), (3, TERM, True), (1, TERM - 1, True)])
def test_nobody_trusts_in_a_leader_that_says_it_is_damaged(sender: int, term: int, trusts: bool) -> None:
    """Woken by the word of the very leader it slept under, which led no more: it waited for good, and so denied others
    their election."""
    yard = Yard()
    yard.table.add(UID, row(1))
    member = yard.unquiesce.find(UID, by=1)
    assert member is not None and member.raft.leader == 1 and is_quiet(raft_of(member))
    raft_of(member).step(Message(DAMAGED, UID, OWN, sender, term, context=5))
    assert (member.raft.leader == 1) == is_quiet(raft_of(member)) == trusts
    assert [(one.kind, one.to, one.term) for one in raft_of(member).outbox] == [(LEADER_GONE, sender, TERM)]


FRESH = Row(0, 0, 0, 0, 0, 0, 0, Shape(VOTERS, (), (), (), "log"), "a")
HERE, THERE = (next(uid for uid in range(100, 103) if VOTERS[uid % 3] == node) for node in (OWN, 3))


@pytest.mark.parametrize(
    ("uid", "differs", "role", "told"),
    [
        (HERE, {"use": True}, PRECANDIDATE, []),
        (HERE, {"by": 3}, PRECANDIDATE, []),
        (THERE, {"use": True}, FOLLOWER, [3]),
        (THERE, {"by": 1}, FOLLOWER, []),
        # Who takes a creation back looks at it, and nobody waits.
        (HERE, {}, FOLLOWER, []),
        (THERE, {}, FOLLOWER, []),
    ],
)
def test_a_group_that_was_never_used_is_led_first_by_whom_its_uid_picks(
    uid: int, differs: dict[str, Any], role: int, told: list[int]
) -> None:
    yard = Yard()
    yard.table.add(uid, FRESH)
    member = yard.unquiesce.find(uid, **differs)
    assert member is not None and member.raft.role == role and not member.raft.term
    assert yard.sent == [(node, AWAKE, {"groups": [uid]}) for node in told]


def test_a_group_that_was_never_used_does_not_wait_for_a_first_leader_that_is_gone() -> None:
    yard = Yard()
    yard.live.discard(3)
    yard.table.add(THERE, FRESH)
    member = yard.unquiesce.find(THERE, use=True)
    assert member is not None and member.raft.role == PRECANDIDATE and not yard.sent
    # One that lives, and does not get to it, is not waited for either.
    yard = Yard()
    yard.table.add(THERE, FRESH)
    member = yard.unquiesce.find(THERE, use=True)
    assert member is not None
    for _ in range(2 * LIMITS.election_ticks):
        member.raft.tick()
    assert member.raft.role == PRECANDIDATE


def test_who_is_told_of_the_first_use_of_its_group_campaigns_at_once() -> None:
    yard = Yard()
    yard.table.add(HERE, FRESH)
    yard.unquiesce.on_awake(3, [HERE])
    assert yard.members[HERE].raft.role == PRECANDIDATE


def test_a_timer_wakes_its_group_and_the_clock_goes_on() -> None:
    yard = Yard()
    yard.table.add(UID, row(due=1_000_005_000))
    yard.timers.adopt(UID, 1_000_005_000, 1_000_000_000)
    yard.unquiesce.ring()
    assert not yard.members and yard.timers.next_s() == 5.0
    yard.clocks.move(5.0)
    yard.unquiesce.ring()
    assert yard.members[UID].raft.role == LEADER


def test_a_leader_that_wakes_goes_on_by_the_clock_that_it_slept_by() -> None:
    yard = Yard()
    yard.rebuilt = lambda member: setattr(member, "log_time", 900_000)
    clock = LogTime(900_000, yard.clocks.wall, yard.clocks.monotonic)
    asleep = yard.rebuild(UID, row())
    asleep.begin_clock(clock)
    yard.timers.set(UID, 2_000_000, asleep)
    yard.table.add(UID, row(due=2_000_000))
    heard = yard.clocks.monotonic
    yard.clocks.move(60.0)
    clock.now(yard.clocks.monotonic)
    member = yard.unquiesce.find(UID)
    assert member is not None and member.clock is clock and member.heard_ns == heard
    assert clock.now(yard.clocks.monotonic) * MS == 900 * S + 60 * S


def test_silent_clients_wake_the_group_that_has_to_end_their_session_once() -> None:
    yard = Yard()
    yard.sessions._clients, yard.sessions._shortest = {5: {UID: 1000}}, {5: 1000}
    yard.sessions._since = {UID: 0.0}
    yard.table.add(UID, row())
    yard.unquiesce.look()
    assert not yard.unquiesce.is_busy
    yard.heard.clock = 1.5
    yard.unquiesce.look()
    yard.unquiesce.look()
    assert yard.stirred == 1
    yard.unquiesce.tick()
    assert yard.members[UID].raft.role == LEADER

"""Members that lost records (docs/internals/repair.md): nothing that they forgot is taken back, and a minority of them
costs nothing that was acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from logyard.engine.entry import CONFIGURATION, NOOP, build_plain
from logyard.engine.raft import election, membership, mending
from logyard.engine.raft.core import FOLLOWER, LEADER, Raft, RaftLog
from logyard.engine.raft.membership import Configuration
from logyard.engine.raft.mending import Mend
from logyard.engine.raft.messages import (
    APPEND,
    APPEND_REPLY,
    DAMAGED,
    MEND,
    MENDED,
    PREVOTE,
    READ,
    READ_REPLY,
    TERMS,
    TERMS_REPLY,
    VOTE,
    VOTE_REPLY,
    Message,
)
from logyard.engine.raft.progress import Progress
from logyard.engine.raft.state import Limits

from .network import UID, Host, Network, encode
from .test_random_cluster import Chaos, run


def hurt(network: Network, node: int, keep: int = 0, term: int | None = None, round_: int = 5) -> Raft:
    """Crash a member, lose part of its disk, start it again."""
    network.crash(node)
    network.hosts[node].hurt(round_, keep, term)
    network.restart(node)
    return network[node]


def only(network: Network, *kinds: int) -> None:
    """Deliver what there is, and what comes of it, of these kinds; everything else is lost."""
    while True:
        for host in network.up():
            host.turn()
            host.write(len(host.unwritten))
        found, network.queue = [m for m in network.queue if m.kind in kinds], []
        if not found:
            return
        for message in found:
            network.deliver(message)


def test_a_damaged_follower_is_brought_up_and_counts_again() -> None:
    network = Network(3)
    leader = network.elect(1)
    for name in (b"a", b"b", b"c"):
        network.hosts[1].propose(name)
        network.drain()
    raft = hurt(network, 3, keep=1)
    assert raft.mend is not None and raft.log.last_index == 1 and not raft.is_quiet
    network.tick(10)
    assert raft.mend is None and raft.log.stable == leader.commit and network.hosts[3].state == [b"a", b"b", b"c"]
    assert not leader.progress[3].round and leader.pair is not None
    assert leader.is_quiet and raft.is_quiet
    network.crash(2)
    network.hosts[1].propose(b"d")
    network.tick(3)
    assert network.hosts[3].state[-1] == b"d", "it counts for commits"
    network.crash(1)
    network.restart(2)
    network.tick(60)
    assert network.leader() in (network[2], network[3]), "it votes"


def test_a_leader_acts_on_a_damage_although_nothing_is_to_be_sent_at_once() -> None:
    """The member says that it has more than the leader: there is no place to go on from, and nothing of it counts."""
    network = Network(3)
    leader = network.elect(1)
    network.drain()
    assert not leader.dirty and leader.pair is not None
    leader.step(Message(DAMAGED, UID, 1, 3, leader.term, leader.log.last_index + 9, last=1, context=7))
    assert leader.dirty and leader.pair is None and leader.progress[3].match == 0


def test_a_damaged_leader_hears_of_its_successor() -> None:
    network = Network(3)
    network.elect(1)
    network.hosts[1].propose(b"a")
    network.drain()
    raft = hurt(network, 1)
    network.tick(60)
    assert raft.mend is None and network.leader() in (network[2], network[3]) and network.hosts[1].state == [b"a"]


@pytest.mark.parametrize("lost", [False, True])
def test_a_damaged_member_neither_votes_nor_acknowledges_nor_confirms(lost: bool) -> None:
    network = Network(3)
    network.elect(1)
    raft = hurt(network, 3, term=0 if lost else None)
    network.queue.clear()
    for message in (
        Message(PREVOTE, UID, 3, 2, 9, 9, 9),
        Message(VOTE, UID, 3, 2, 9, 9, 9),
        Message(APPEND, UID, 3, 1, 9, 0, 0, 0, first=1, last=0, entries=[]),
        Message(READ, UID, 3, 1, 9, context=4),
    ):
        raft.live.clear()  # type: ignore[attr-defined]
        raft.step(message)
    said = network.said(3)
    assert {m.kind for m in said} & {READ_REPLY, APPEND_REPLY} == set() and DAMAGED in {m.kind for m in said}
    assert [m.reject for m in said if m.kind == VOTE_REPLY and m.index] == [True]
    for _ in range(100):
        raft.tick()
        assert raft.role == FOLLOWER and raft.vote == 0


def test_the_leader_confirms_itself_without_the_damaged_member() -> None:
    """With a third member down nobody can confirm that this leader leads: the index it would name is worth nothing."""
    network = Network(3)
    leader = network.elect(1)
    network.crash(2)
    raft = hurt(network, 3)
    network.tick(60)
    assert raft.mend is not None and leader.progress[3].round == 5 and leader.progress[3].fence == -1
    # A forged or late confirmation of its own does not help.
    assert leader.reads is not None and leader.reads.number
    leader.step(Message(READ_REPLY, UID, 1, 3, leader.term, context=leader.reads.number))
    assert leader.progress[3].fence == -1
    before = leader.commit
    network.hosts[1].propose(b"a")
    network.tick(20)
    assert leader.commit == before, "its copy does not count"
    network.restart(2)
    network.tick(60)
    assert raft.mend is None and network.states() == [[b"a"]] * 3


def test_an_acknowledgement_from_before_the_damage_does_not_count() -> None:
    network = Network(3)
    leader = network.elect(1)
    network.crash(2)
    network.hosts[1].propose(b"a")
    old = Message(APPEND_REPLY, UID, 1, 3, leader.term, leader.log.last_index + 1, 0, leader.commit, last=2)
    network.hosts[1].turn()
    network.hosts[1].write()
    index = leader.log.last_index
    hurt(network, 3, keep=1)
    network.tick(1)
    assert leader.progress[3].round == 5
    old.index = index
    leader.step(old)
    assert leader.commit < index


def test_a_lost_word_of_soundness_is_said_again() -> None:
    network = Network(3)
    leader = network.elect(1)
    raft = hurt(network, 3)
    lost = 0
    for _ in range(40):
        for host in network.up():
            if not host.raft.is_quiet:
                host.raft.tick()
        for host in network.up():
            host.turn()
            host.write(len(host.unwritten))
        batch, network.queue = network.queue, []
        for message in batch:
            if message.context == MENDED and message.kind == APPEND_REPLY and not lost:
                lost += 1
                continue
            network.deliver(message)
    assert lost == 1 and raft.mend is None and not leader.progress[3].round


def test_a_member_that_has_everything_but_its_leader_is_mended() -> None:
    network = Network(3)
    leader = network.elect(1)
    raft = hurt(network, 3)
    # All the way, but for the last word: then it forgets who leads.
    for _ in range(40):
        raft.tick()
        leader.tick()
        only(network, DAMAGED, APPEND, READ, READ_REPLY)
    progress, last = leader.progress[3], leader.log.last_index
    assert raft.mend is not None and raft.validated == last == progress.match == progress.commit
    election.forget_leader(raft)
    network.queue.clear()
    for _ in range(200):
        raft.tick()
        leader.tick()
        only(network, DAMAGED, APPEND, MEND, READ, READ_REPLY, APPEND_REPLY)
    assert raft.mend is None and raft.leader == 1 and not leader.progress[3].round


def test_a_second_damage_is_not_mended_by_words_about_the_first() -> None:
    network = Network(3)
    leader = network.elect(1)
    raft = hurt(network, 3, round_=6)
    raft.step(Message(APPEND, UID, 3, 1, leader.term, 0, 0, 0, first=1, last=0, entries=[]))
    raft.step(Message(MEND, UID, 3, 1, leader.term, 0, context=5))
    network.said(3)
    assert raft.mend is not None and raft.mend.fence_term == 0


def test_a_damaged_member_is_no_heir_and_no_target() -> None:
    network = Network(3)
    leader = network.elect(1)
    network.crash(2)
    hurt(network, 3)
    network.tick(2)
    with pytest.raises(Exception, match="being repaired"):
        leader.transfer(3)
    leader.may_lead = False
    network.tick(30)
    assert leader.role == LEADER
    with pytest.raises(Exception, match="lost records"):
        network[3].force_shrink()


def test_a_learner_is_mended_too() -> None:
    network = Network(4, voters=(1, 2, 3), learners=(4,))
    network.elect(1)
    network.hosts[1].propose(b"a")
    network.drain()
    raft = hurt(network, 4, term=0)
    network.tick(20)
    assert raft.mend is None and network.hosts[4].state == [b"a"]


def test_acknowledged_entries_survive_a_damaged_minority() -> None:
    network = Network(5)
    network.elect(1)
    network.isolate(4, 5)
    network.hosts[1].propose(b"kept")
    network.drain()
    assert network[1].commit == 2
    # Two of the three copies are lost, one after the other, and the leader goes.
    network.crash(1)
    hurt(network, 2, round_=7)
    network.heal()
    network.tick(60)
    assert network.leader() is network[3], "only who has the entry is elected, and without the damaged member"
    assert network[2].mend is None
    assert all(network.hosts[node].state == [b"kept"] for node in (2, 3, 4, 5))


def test_when_a_majority_is_damaged_nobody_leads() -> None:
    network = Network(3)
    network.elect(1)
    network.hosts[1].propose(b"a")
    network.drain()
    hurt(network, 2)
    hurt(network, 3)
    network.crash(1)
    network.restart(1)
    network.tick(200)
    assert network.leader() is None and network[2].mend is not None and network[1].log.last_index == 2


def any_fence(raft: Raft, m: Message, verb: Callable[[Raft, Message], None] = mending.on_mend) -> None:
    m.index = 0
    verb(raft, m)


def any_index(raft: Raft, m: Message, progress: Progress) -> bool:
    progress.round = 0
    membership.track(raft)
    return True


def leader_goes_early(network: Network) -> None:
    """What is committed is on nodes 1 and 3. Node 3 loses it, and node 1 goes when it is confirmed by node 2, before it
    has sent an entry to anybody."""
    network.elect(1)
    network.isolate(2)
    network.hosts[1].propose(b"kept")
    network.drain()
    assert network[1].commit == 2
    network.cut.clear()
    network.see()
    hurt(network, 3, keep=1)
    for _ in range(40):
        for host in network.up():
            host.raft.tick()
            host.turn()
            host.write(len(host.unwritten))
        found, network.queue = network.queue, []
        for message in found:
            if message.kind != APPEND or not message.entries:
                network.deliver(message)
    network.crash(1)
    network.tick(100)
    assert network.leader() is None, "a leader that lacks what was committed"
    network.restart(1)
    network.tick(100)
    assert network.states() == [[b"kept"]] * 3


def test_it_does_not_vote_before_it_has_all_up_to_the_index() -> None:
    leader_goes_early(Network(3))


def test_that_history_tells_a_member_that_does_not_wait_for_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending, "on_mend", any_fence)
    monkeypatch.setattr(mending, "counts", any_index)
    with pytest.raises(AssertionError, match="lacks"):
        leader_goes_early(Network(3))


# ---- lost terms and votes


def lost_vote(network: Network) -> tuple[Raft, Raft]:
    """Node 1 leads term 1; node 4 was granted node 3's vote in term 2, and has not heard anything since; node 3 lost
    that. Returns the candidate and the damaged member."""
    network.elect(1)
    candidate = network[4]
    candidate.campaign(transfer=True)
    for host in network.up():
        host.turn()
        host.write(len(host.unwritten))
    network.queue = [m for m in network.queue if m.to in (3, 4)]
    only(network, VOTE, VOTE_REPLY)
    assert network[3].vote == 4 and network[3].term == 2 and candidate.votes == {4: True, 3: True}
    network.isolate(4)
    return candidate, hurt(network, 3, keep=1, term=1)


def bring_up(network: Network) -> None:
    """Time for the damaged member to be mended, while the old candidate waits for votes."""
    for _ in range(100):
        for host in network.up():
            if host.node != 4 and not host.raft.is_quiet:
                host.raft.tick()
        network.drain()


def weak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a leader was heard, and that shall be enough."""
    monkeypatch.setattr(mending, "_knows_terms", lambda raft, mend: True)


def double_vote(network: Network) -> None:
    """Node 5 and the old candidate both stand in term 2; the damaged member is asked again."""
    candidate, damaged = lost_vote(network)
    bring_up(network)
    # Node 1 dies. Node 5 stands in the very term whose vote was lost, with the damaged member's vote; node 2 was asked
    # by the old candidate first.
    network.crash(1)
    other = network[5]
    other.campaign(transfer=True)
    for host in network.up():
        host.turn()
        host.write(len(host.unwritten))
    assert other.term == candidate.term == 2
    network.cut.clear()
    network.queue = [m for m in network.queue if (m.sender, m.to) in ((5, 3), (3, 5), (4, 2), (2, 4))]
    network[2].step(Message(VOTE, UID, 2, 4, 2, candidate.log.last_index, candidate.log.last_term, context=1))
    for _ in range(6):
        for host in network.up():
            host.turn()
            host.write(len(host.unwritten))
            network.check_leader(host)
        batch, network.queue = network.queue, []
        for message in batch:
            if (message.sender, message.to) in ((5, 3), (3, 5), (4, 2), (2, 4)):
                network.deliver(message)
    assert damaged.vote != 5 or damaged.term != 2, "it voted twice in term 2"


def test_a_lost_vote_is_not_given_a_second_time() -> None:
    network = Network(5)
    double_vote(network)
    assert network[3].mend is not None, "a voter has not reported its term"


def test_the_history_of_the_lost_vote_tells_the_rule_from_a_weaker_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weak(monkeypatch)
    with pytest.raises(AssertionError, match=r"voted twice|two leaders"):
        double_vote(Network(5))


def test_acknowledgements_wait_for_the_terms_as_well() -> None:
    """A vote that was forgotten may elect its candidate later: an acknowledgement to an older leader meanwhile would be
    part of a commit that this candidate does not have. What bars from voting alone is not enough."""
    network = Network(5)
    candidate, _ = lost_vote(network)
    bring_up(network)
    network.crash(2)
    network.hosts[1].propose(b"x")
    bring_up(network)
    assert network[1].commit < network[1].log.last_index, "nodes 1 and 5 alone are no quorum"
    elect_old_candidate(network, candidate)
    assert candidate.role == LEADER


def test_that_history_tells_the_rule_from_a_weaker_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weak(monkeypatch)
    network = Network(5)
    candidate, _ = lost_vote(network)
    bring_up(network)
    network.crash(2)
    network.hosts[1].propose(b"x")
    bring_up(network)
    assert network[1].commit == network[1].log.last_index
    with pytest.raises(AssertionError, match="lacks committed"):
        elect_old_candidate(network, candidate)


def elect_old_candidate(network: Network, candidate: Raft) -> None:
    """Node 2, which has been away, votes for the old candidate in term 2: with node 3's lost vote that is a quorum."""
    network.restart(2)
    network.queue.clear()
    network[2].step(Message(VOTE, UID, 2, 4, 2, candidate.log.last_index, candidate.log.last_term, context=1))
    host = network.hosts[2]
    host.turn()
    host.write(len(host.unwritten))
    for message in [m for m in network.queue if m.to == 4 and m.kind == VOTE_REPLY]:
        candidate.step(message)
    network.check_leader(network.hosts[4])


def test_terms_are_told_when_durable_and_only_by_who_knows_them() -> None:
    network = Network(3)
    network.elect(1)
    raft = hurt(network, 3, term=0)
    network.tick(1)
    other = network[2]
    other.step(Message(VOTE, UID, 2, 1, 7, 9, 9, context=1))
    digest = mending._digest(other)
    other.step(Message(TERMS, UID, 2, 3, 0, digest, context=5))
    ready = other.ready()
    assert ready is not None and not ready.messages and TERMS_REPLY in [m.kind for m in ready.after]
    told = next(m for m in ready.after if m.kind == TERMS_REPLY)
    assert told.term == 7 and not told.reject
    other.step(Message(TERMS, UID, 2, 3, 0, digest + 1, context=5))
    raft = hurt(network, 3, term=0)
    raft.step(Message(TERMS, UID, 3, 2, 0, digest, context=9))
    assert [m.reject for m in network.said(3) if m.kind == TERMS_REPLY] == [True]


def test_with_all_reports_it_votes_and_acknowledges_again() -> None:
    network = Network(3)
    leader = network.elect(1)
    raft = hurt(network, 3, term=0)
    network.tick(30)
    assert raft.mend is None and raft.term == leader.term == 1 and leader.role == LEADER, "nobody had to go"
    assert raft.vote == 3, "its vote in the highest term is spent"
    network.crash(1)
    network.tick(60)
    assert network.leader() in (network[2], raft)


def test_a_higher_term_among_the_reports_is_taken_over() -> None:
    network = Network(3)
    network.elect(1)
    host = network.hosts[2]
    network.isolate(2)
    host.raft.campaign(transfer=True)
    while host.raft.has_ready or host.unwritten:
        host.turn()
        host.write(len(host.unwritten))
    network.queue.clear()
    assert host.disk.term == 2
    raft = hurt(network, 3, term=0)
    network.tick(20)
    assert raft.mend is not None
    network.heal()
    network.tick(100)
    assert raft.mend is None and raft.term >= 2
    assert len({network[node].term for node in (1, 2, 3)}) == 1


# ---- random histories


class Hurt(Chaos):
    """Disks lose records, at most of a minority at a time, and of one member the hard state."""

    damages = 0
    lost_terms = 0
    mended = 0

    def fault(self, host: Host) -> None:
        if self.random.random() < 0.25:
            self.spoil(host)
        else:
            super().fault(host)

    def spoil(self, host: Host) -> None:
        rng = self.random
        others = [one for one in self.hosts.values() if one is not host and one.damage is not None]
        if host.node in self.down or len(others) + 1 > (len(self.hosts) - 1) // 2:
            return
        disk = host.disk
        base, last = disk.snapshot[0], disk.entries[-1].index if disk.entries else disk.snapshot[0]
        lose_all = rng.random() < 0.2
        keep = rng.randrange(base, last + 1)
        terms = rng.random() < 0.4 and not any(one.damage[1] for one in others if one.damage is not None)
        left = max([entry.term for entry in disk.entries if entry.index <= keep], default=disk.snapshot[1])
        term = rng.randrange(0 if lose_all else left, disk.term + 1) if terms else None
        self.crash(host.node)
        self.damages += 1
        self.lost_terms += terms
        host.hurt(self.damages, keep, term, snapshot=lose_all)

    def look(self, host: Host) -> None:
        if host.node not in self.down and host.raft.mend is not None:
            # It has lost its own commit index and term, so they may fall once.
            self.seen.pop(host.node, None)
        super().look(host)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("count", [3, 5])
def test_a_random_history_with_damaged_disks(count: int, seed: int) -> None:
    network = Hurt(count, 11_000 + seed)
    network.trouble = max(network.trouble, 0.01)
    run(network, 2500)
    assert all(host.raft.mend is None for host in network.hosts.values())


def test_those_histories_are_worth_something() -> None:
    network = Hurt(5, 11_501)
    network.trouble = 0.02
    run(network, 6000)
    assert network.damages > 10 and network.lost_terms > 2 and len(network.log) > 30, (
        network.damages, network.lost_terms, len(network.log),
    )  # fmt: skip


def as_if_sound(verb: Callable[[Raft, Message], None]) -> Callable[[Raft, Message], None]:
    """A verb that does not look at `Raft.mend`."""

    def bug(raft: Raft, m: Message) -> None:
        mend, raft.mend = raft.mend, None
        verb(raft, m)
        raft.mend = mend if mend is not None and raft.role == FOLLOWER else raft.mend

    return bug


Patch = tuple[ModuleType, str, Callable[..., object]]
PLANTED: dict[str, list[Patch]] = {
    "takes part at once": [(mending, "look", lambda raft: setattr(raft, "mend", None))],
    "votes": [(election, name, as_if_sound(getattr(election, name))) for name in ("on_vote", "on_prevote")],
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_caught_by_random_histories(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, attribute, bug in PLANTED[name]:
        monkeypatch.setattr(module, attribute, bug)
    with pytest.raises(AssertionError):
        for seed in range(100):
            network = Hurt(3, 12_000 + seed)
            network.trouble = 0.03
            run(network, 1500)


OLD, NEW = Configuration((1, 2, 4)), Configuration((2, 3, 4))


def test_a_snapshot_below_what_a_mended_member_knows_brings_no_older_configuration_back() -> None:
    entries = [build_plain(index, 1, NOOP, 0, b"") for index in range(1, 9)]
    entries[3] = build_plain(4, 1, CONFIGURATION, 0, NEW.encode())
    # What it committed counts for nothing until it is mended; its checkpoint says what it is a member of.
    raft = Raft(
        UID, 2, NEW, RaftLog(0, 0, (), entries), term=1, live={1, 2, 3, 4}, draw=lambda n: 0, encode=encode,
        limits=Limits(), configuration_index=4, mend=Mend(5, False),
    )  # fmt: skip
    assert raft.install_snapshot(2, 1, OLD)
    assert (raft.configuration_index, raft.configuration) == (4, NEW)
    raft.check()


def test_a_late_word_of_damage_about_who_lags_is_worked_off() -> None:
    # One entry a message: what a probe brings is not all there is.
    network = Network(3, limits=Limits(append_bytes=1))
    leader = network.elect(1)
    network.hosts[1].propose(b"a")
    network.drain()
    raft = hurt(network, 3, keep=1)
    network.tick(10)
    assert raft.mend is None and not leader.progress[3].round
    for name in (b"b", b"c", b"d"):
        network.hosts[1].propose(name)
        for host in network.up():
            host.turn()
            host.write(len(host.unwritten))
        # What is for node 3 gets lost.
        found, network.queue = [one for one in network.queue if one.to != 3], []
        for message in found:
            network.deliver(message)
    assert raft.mend is None and raft.log.last_index < leader.log.last_index
    # Its first word after the damage, when nothing was known to agree, comes once more.
    leader.step(Message(DAMAGED, leader.uid, 1, 3, leader.term, 0, 0, 0, 5))
    network.tick(60)
    assert network.hosts[3].state == [b"a", b"b", b"c", b"d"] and not leader.progress[3].round

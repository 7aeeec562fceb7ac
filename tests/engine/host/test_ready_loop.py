"""The ready loop alone: cores that say what they have, a log that is durable when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.engine.entry import COMMANDS, build_plain
from logyard.engine.host.ready_loop import PASSES_MAX, TELL_FEW, TELL_SECONDS, TELL_SECONDS_MAX, Driven, ReadyLoop
from logyard.engine.log.wal import WalItem
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.engine.raft.messages import APPEND, APPEND_REPLY, VOTE_REPLY, Message
from logyard.engine.raft.ready import Ready
from logyard.engine.raft.state import LEFT, NOTED, UNTOLD
from logyard.engine.replica.log_clock import Clocks
from logyard.engine.replica.member import Member as RealMember
from logyard.engine.replica.proposals import Shape
from logyard.protocol.errors import NotLeader
from logyard.protocol.pending import PendingReply

from .cluster import cluster, until


def message(kind: int = APPEND_REPLY, to: int = 2) -> Message:
    return Message(kind, 7, to, 1, 1)


def work(**fields: Any) -> Ready:
    every: dict[str, Any] = {
        "hard_state": None, "entries": (), "messages": (), "after": (), "commit": 0, "reads": (), "failed_reads": (),
        "role_changed": False, "truncated": 0, "token": None,
    }  # fmt: skip
    return Ready(**{**every, **fields})


class Core:
    """A core that has what `has` holds, one a turn."""

    def __init__(self, role: int) -> None:
        self.uid, self.role, self.leader, self.commit, self.untold = 7, role, 3, 4, 0
        self.log = SimpleNamespace(last_index=4, stable=4)
        self.stopped = False
        self.dirty = True
        self.told = 3
        self.has: list[Ready] = []
        self.durable: list[tuple[int, ...]] = []

    def hand_out(self, out: list[Message]) -> None:
        """What there is comes as a `Ready`."""

    def ready(self) -> Ready | None:
        self.dirty = False
        return self.has.pop(0) if self.has else None

    def on_persisted(self, *token: Any) -> None:
        *known, messages = token
        self.durable.append(tuple(known))
        messages.append(message(to=9))

    def note_untold(self, many: bool) -> None:
        self.untold = LEFT if many else NOTED

    def has_told(self, index: int) -> bool:
        return self.told >= index

    def tell(self) -> bool:
        return self.untold in (NOTED, LEFT) and self.told < self.commit


class Member(SimpleNamespace):
    """One of its kind, whatever it has; it counts as a real one does."""

    __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]
    real: Any = RealMember
    mark, unmark, heard = real.mark, real.unmark, real.heard
    persisting, persisted = real.persisting, real.persisted


class Bench:
    """A loop, and all that it drives: `told` says what it did."""

    def __init__(self, queueing_s: float = 0.0) -> None:
        self.told: list[Any] = []
        self.items: list[WalItem] = []
        self.active: set[Any] = set()
        self.clocks = Clocks()
        self.clocks.monotonic_ns = lambda: 77
        self.can_go = True
        self.applies: Callable[[], None] = lambda: None
        cache: Any = SimpleNamespace(hold=lambda: None, release=lambda: self.told.append("released"))
        self.loop = ReadyLoop(cast(Shape, "shape"), cache, self.active, self.clocks, queueing_s, 2)
        self.ticker: Any = SimpleNamespace(resting=False, stir=lambda: self.told.append("stirred"))
        group_commit: Any = SimpleNamespace(add=self.items.append, kick=lambda: self.told.append("kicked"))
        peers: Any = SimpleNamespace(send=lambda messages: self.told.append([one.to for one in messages]))
        self.loop.drive(
            Driven(
                peers, group_commit, self.apply, lambda member, one: self.can_go, lambda member: 1000,
                lambda client: None, lambda member, index: self.told.append(("cut", index)),
                lambda member: self.told.append("hard"), lambda member: self.told.append("role"), self.ticker,
            )
        )  # fmt: skip

    def apply(self, batch: Sequence[Any]) -> None:
        self.told.append(("applied", len(batch)))
        self.applies()

    def member(self, *has: Ready, role: int = LEADER, uploads: object = None) -> Any:
        core = Core(role)
        core.has += has

        def propose(now: int, shape: Any) -> None:
            self.told.append(("proposed", now, shape))
            core.log.last_index += 1

        proposals = SimpleNamespace(
            own=[], low=None, queue=[], guarded=False, early=None, urgent=False,
            fail=lambda error: self.told.append(type(error)),
            propose=propose,
            propose_own=lambda now: self.told.append(("own", now)),
        )  # fmt: skip
        return Member(
            raft=core, proposals=proposals, uploads=uploads, slow_sends=None, dirty=False, unpersisted=0, floor=0,
            heard_ns=0, reads=None, sessions=None, overwritten=lambda index: self.told.append(("overwritten", index)),
        )  # fmt: skip

    def turn(self, *members: Any) -> list[Any]:
        """Run one turn of these; what happened in it."""
        self.told.clear()
        for member in members:
            member.raft.dirty = True
            self.loop.mark(member)
        self.loop.turn()
        return self.told


def test_one_turn_is_one_send_one_kick_and_one_apply_for_all_groups() -> None:
    bench = Bench()
    members = [bench.member(work(messages=[message(to=number)])) for number in (2, 3)]
    assert bench.turn(*members) == [[2, 3], "kicked", ("applied", 2), "released"]
    assert bench.active == set(members), "whether they are quiet is asked at the next tick"


def test_a_member_marked_twice_is_drained_once() -> None:
    bench = Bench()
    member = bench.member(work(messages=[message()]), work(messages=[message()]))
    assert bench.turn(member, member) == [[2], "kicked", ("applied", 1), "released"]
    assert len(member.raft.has) == 1


def test_groups_with_pieces_under_way_go_after_the_others_in_a_frame_of_their_own() -> None:
    bench = Bench()
    pieces = bench.member(work(messages=[message(to=8)]), uploads=object())
    assert bench.turn(pieces, bench.member(work(messages=[message(to=2)])))[:2] == [[2], [8]]


def test_what_needs_what_is_written_waits_until_that_is_stable() -> None:
    bench = Bench()
    entry = build_plain(5, 1, COMMANDS, 0)
    member = bench.member(work(hard_state=(2, 1), entries=[entry], after=[message(VOTE_REPLY)], token=(5, 2, 1, 0)))
    assert bench.turn(member) == ["hard", "kicked", ("applied", 1), "released"]
    (item,) = bench.items
    assert item.hard_state == (2, 1, 4) and item.entries == [entry]
    assert (member.unpersisted, member.heard_ns) == (1, 77)
    bench.told.clear()
    bench.loop.persisted([item])
    assert bench.told == [[9, 2], "released"] and member.raft.durable == [(5, 2, 1, 0)] and not member.unpersisted


def test_an_answer_waits_behind_what_the_member_queued_before_it() -> None:
    bench = Bench()
    member = bench.member(work(entries=[build_plain(5, 1, COMMANDS, 0)], token=(5, 1, 0, 0)), work(after=[message()]))
    bench.turn(member)
    assert [2] not in bench.turn(member) and len(bench.items) == 2
    bench.told.clear()
    bench.loop.persisted(bench.items)
    assert bench.told[0] == [9, 2]
    # With nothing under way it goes at once.
    member.raft.has.append(work(after=[message()]))
    assert bench.turn(member)[0] == [2]


def test_the_floor_travels_with_the_tombstone_that_raises_it() -> None:
    bench = Bench()
    entries = [build_plain(5, 1, COMMANDS, 0), build_plain(6, 1, COMMANDS, 0)]
    entries[0].tombstone, entries[1].tombstone = 12, 3
    member = bench.member(work(entries=entries, token=(6, 1, 0, 0)))
    bench.turn(member)
    assert (member.floor, bench.items[0].floor) == (12, 12)


def test_an_overwritten_log_is_cut_before_it_is_written() -> None:
    bench = Bench()
    member = bench.member(work(truncated=6, entries=[build_plain(6, 2, COMMANDS, 0)], token=(6, 2, 0, 0)))
    assert bench.turn(member)[:2] == [("overwritten", 6), ("cut", 5)] and bench.items[0].truncate == 6


def test_who_does_not_lead_proposes_nothing() -> None:
    bench = Bench()
    member = bench.member(role=FOLLOWER)
    member.proposals.queue, member.proposals.own = ["a"], ["b"]
    assert bench.turn(member)[:2] == [NotLeader, NotLeader]
    leader = bench.member()
    leader.proposals.queue, leader.proposals.own = ["a"], ["b"]
    assert bench.turn(leader)[:2] == [("own", 1000), ("proposed", 1000, "shape")]


def test_appends_that_are_not_at_hand_stay_behind() -> None:
    bench = Bench()
    bench.can_go = False
    member = bench.member(work(messages=[message(APPEND, 2), message(APPEND_REPLY, 3)], role_changed=True))
    assert bench.turn(member)[:2] == ["role", [3]]


def test_reads_are_answered_once() -> None:
    bench = Bench()
    member = bench.member(work(reads=[(1, 40), (2, 40)], failed_reads=[3]))
    good, failed = PendingReply[int](), PendingReply[int]()
    member.reads = {1: good, 3: failed}
    bench.turn(member)
    assert good.value == 40 and isinstance(failed.error, NotLeader) and not member.reads


def test_work_that_makes_work_ends() -> None:
    bench = Bench()
    member = bench.member()
    bench.applies = lambda: bench.loop.mark(member)
    assert bench.turn(member).count("kicked") == PASSES_MAX
    assert bench.loop.dirty == [member], "the rest is the next turn's"


def test_a_turn_within_a_turn_is_none_and_last_words_come_at_its_end() -> None:
    bench = Bench()
    member = bench.member(work())

    def within() -> None:
        bench.loop.turn()
        assert bench.loop.at_turn_end(lambda: bench.told.append("last"))

    bench.applies = within
    assert bench.turn(member) == ["kicked", ("applied", 1), "last", "released"]
    assert not bench.loop.at_turn_end(lambda: None)


def test_a_turn_wakes_a_ticker_that_rests() -> None:
    bench = Bench()
    bench.ticker.resting = True
    assert bench.turn(bench.member(work()))[-1] == "stirred"


def test_after_the_end_nothing_is_sent_written_or_told() -> None:
    bench = Bench()
    member = bench.member(work(entries=[build_plain(5, 1, COMMANDS, 0)], token=(5, 1, 0, 0)), work(after=[message()]))
    bench.turn(member)
    bench.loop.end()
    assert bench.turn(member) == [] and not bench.loop.dirty
    bench.loop.persisted(bench.items)
    assert bench.told == [] and member.raft.durable == []


async def test_bytes_of_one_connection_are_handled_before_the_turn_they_cause(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bench = Bench()
    member = bench.member(work(messages=[message()]))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.loop.run)
        await trio.testing.wait_all_tasks_blocked()
        bench.loop.hold()
        bench.loop.mark(member)
        await trio.testing.wait_all_tasks_blocked()
        assert not bench.told
        bench.loop.release()
        await trio.testing.wait_all_tasks_blocked()
        assert bench.told[0] == [2]
        nursery.cancel_scope.cancel()


async def test_a_fault_of_a_turn_in_place_is_the_loops_own(autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench()

    def fault() -> None:
        raise ZeroDivisionError("a bug")

    bench.applies = fault
    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.loop.run)
            await trio.testing.wait_all_tasks_blocked()
            bench.loop.hold()
            bench.loop.mark(bench.member(work()))
            bench.loop.release()
    assert caught.group_contains(ZeroDivisionError)


async def test_followers_hear_of_a_commit_that_no_entry_told_them_of(autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench()
    member = bench.member()
    member.raft.untold = UNTOLD
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.loop.tell)
        await trio.testing.wait_all_tasks_blocked()
        bench.turn(member)
        assert member.raft.untold == NOTED and not bench.loop.dirty
        await trio.sleep(1.0)
        assert bench.loop.dirty == [member] and not bench.loop.untold
        nursery.cancel_scope.cancel()


async def test_nobody_wakes_up_while_there_is_nothing_to_tell(autojump_clock: trio.testing.MockClock) -> None:
    """The timer begins with the first commit, whenever that comes."""
    bench = Bench()
    member = bench.member()
    member.raft.untold = UNTOLD
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.loop.tell)
        await trio.sleep(TELL_SECONDS * 0.4)
        bench.turn(member)
        await trio.sleep(TELL_SECONDS * 0.9)
        assert not bench.loop.dirty
        await trio.sleep(TELL_SECONDS * 0.2)
        assert bench.loop.dirty == [member]
        nursery.cancel_scope.cancel()


async def test_where_many_groups_wait_entries_carry_the_commit_index(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bench = Bench()
    members = [bench.member() for _ in range(TELL_FEW + 2)]
    for member in members:
        member.raft.untold = UNTOLD
    carried, again, *others = members
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.loop.tell)
        await trio.testing.wait_all_tasks_blocked()
        bench.turn(*members)
        assert [member.raft.untold for member in members] == [NOTED] * TELL_FEW + [LEFT] * 2, "ticks tell of few"
        await trio.sleep(TELL_SECONDS * 1.5)
        assert not bench.loop.dirty, "they are given time"
        # An entry carried it; another one carried it, and more is committed since.
        carried.raft.told = again.raft.told = 4
        again.raft.commit = 5
        await trio.sleep(TELL_SECONDS_MAX)
        assert bench.loop.dirty == [*others, again], "who was told by entries is looked at again"
        assert not bench.loop.untold
        nursery.cancel_scope.cancel()


async def test_a_fault_of_the_turn_ends_the_node_and_not_the_connection_that_started_it(tmp_path: Path) -> None:
    """Bytes of a client or a peer start a turn in place; the bug is the engine's, and is not lost."""
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.applied()
        system = c.system(1)
        await until(lambda: not system.storage.group_commit.busy)

        def broken(_: object) -> None:
            raise ZeroDivisionError("a bug")

        system.peers.send = broken  # type: ignore[assignment]
        ready_loop = system.ready_loop
        ready_loop._ended = 0.0
        ready_loop.hold()
        c.member(1).raft.on_link_reset(2)
        ready_loop.mark(c.member(1))
        ready_loop.release()
        error = ready_loop._error
        ready_loop._error = None
        assert isinstance(error, ZeroDivisionError)
        del system.peers.send
        assert not ready_loop.running


async def test_a_busy_nodes_turn_waits_for_what_other_sockets_bring_and_a_quiet_ones_does_not(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bench = Bench()
    soon: list[Callable[[], None]] = []
    bench.loop.share(soon.append)

    def receive() -> None:
        bench.loop.hold()
        bench.loop.mark(bench.member(work(messages=[message()])))
        bench.loop.release()

    receive()
    assert bench.told[0] == [2] and not soon
    bench.told.clear()
    receive()
    receive()
    assert not bench.told and len(soon) == 1
    soon.pop()()
    assert bench.told[0] == [2, 2] and not bench.loop.dirty
    soon += [lambda: None]
    # What another turn did meanwhile is not done again.
    receive()
    bench.loop.turn()
    bench.told.clear()
    soon.pop()()
    assert not any(isinstance(one, list) for one in bench.told)


async def test_a_fault_of_a_turn_that_waited_is_the_loops_own(autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench()
    soon: list[Callable[[], None]] = []
    bench.loop.share(soon.append)

    def fault() -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.loop.run)
            await trio.testing.wait_all_tasks_blocked()
            bench.turn(bench.member())
            bench.applies = fault
            bench.loop.hold()
            bench.loop.mark(bench.member(work()))
            bench.loop.release()
            soon.pop()()
    assert caught.group_contains(ZeroDivisionError)

"""Log repair, alone: what is kept of a damaged group, what is durable before what, and whose turn it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.engine.entry import Entry, build_plain
from logyard.engine.log import meta_rows
from logyard.engine.log.meta_rows import SegmentRun
from logyard.engine.log.recovered import Recovered
from logyard.engine.raft.core import FOLLOWER, LEADER, Raft
from logyard.engine.raft.membership import Configuration
from logyard.engine.raft.mending import Mend
from logyard.engine.raft.raft_log import RaftLog
from logyard.engine.raft.state import Limits
from logyard.engine.recovery.damage import Damaged
from logyard.engine.repair.log_repair import HELD_S, Host, LogRepair, MendTurns
from logyard.engine.replica.member import STOPPED, Member
from logyard.engine.transport.blobs import MEND_ASK, MEND_STOPPED, MEND_TURN, check_shape
from logyard.engine.types import Spec
from logyard.protocol.errors import Corrupt, LogyardError

UID = 9
LAST = 10
THROUGH = 41
"""The newest batch of the WAL."""


def encode(index: int, term: int, kind: int, content: bytes) -> Entry:
    return build_plain(index, term, kind, 0, content)


def spec(voters: tuple[int, ...] = (1, 2, 3)) -> Spec:
    return Spec(UID, "log", "log", {}, voters, 0)


def member_of(raft_log: RaftLog, mend: Mend | None = None, voters: tuple[int, ...] = (1, 2, 3)) -> Member:
    raft = Raft(
        UID, 3, Configuration(voters), raft_log, term=4, vote=2, live={1, 2, 3}, draw=lambda n: 0, encode=encode,
        limits=Limits(), mend=mend,
    )  # fmt: skip
    return Member(spec(voters), raft, cast(Any, object()), cast(Any, object()), cast(Any, object()))


def healthy(voters: tuple[int, ...] = (1, 2, 3)) -> Member:
    """A member with all of its log in segment 5."""
    member = member_of(RaftLog(0, 0, [(1, 1), (4, 3)], last_index=LAST), voters=voters)
    member.segments, member.flushed = [SegmentRun(1, LAST, 5)], LAST
    return member


class Meta:
    """Rows; `lost` names those that verify in no copy."""

    def __init__(self, events: list[Any]) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.lost: set[bytes] = set()
        self.get = self.rows.get
        self._events = events

    def commit(self, puts: Iterable[tuple[bytes, bytes | None]]) -> None:
        for key, value in puts:
            self._events.append(("row", key[:1]))
            if value is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = value

    def scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        return sorted(pair for pair in self.rows.items() if pair[0].startswith(prefix))


class Rig:
    """Log repair on node 3, with what it was asked and told, in order. Entries above `good` can't be read."""

    def __init__(self, *members: Member, good: int = LAST) -> None:
        self.events: list[Any] = []
        self.meta = Meta(self.events)
        self.good = good
        self.members = {member.uid: member for member in members}
        self.janitor_lock = trio.Lock()
        self.nursery: trio.Nursery
        self.built: list[tuple[meta_rows.StateRow | None, Mend | None]] = []
        self.fails = ""
        self.told: list[list[int]] = []
        host = Host(
            self.build, lambda member: self.events.append("enlivened"), self.silence,
            lambda member, reason: self.events.append("stopped"), self.spawn,
            lambda members: self.told.append([one.uid for one in members]),
        )  # fmt: skip
        self.repair = self.again(host)

    def again(self, host: Host | None = None) -> LogRepair:
        """What the next life of the node has."""
        host = host or self.repair._host
        self.repair = LogRepair(3, self.members, cast(Any, self), cast(Any, self), cast(Any, self), host)
        self.repair.load(7)
        return self.repair

    def known(self) -> Damaged:
        return Damaged.unpack(self.meta.rows[meta_rows.DAMAGED + meta_rows.KEY.pack(UID)])

    def build(self, spec: Spec, state: Any, snapshot_row: Any, recovered: Any, mend: Mend | None = None) -> Member:
        if self.fails and mend is not None:
            raise Corrupt("group", 0, "no gap", self.fails)
        self.built.append((state, mend))
        last = max((run[1] for run in state.runs), default=0) if state is not None else 0
        return member_of(RaftLog(0, 0, [(1, 1)] if last else (), last_index=last), mend, spec.voters)

    def silence(self, member: Member, reason: str, state: str) -> None:
        self.events.append("silenced")
        member.state = state
        member.raft.stop()

    def spawn(self, task: Callable[..., Any], *arguments: Any) -> None:
        self.nursery.start_soon(task, *arguments)

    async def run(self, call: Callable[[], object]) -> None:
        """Until everything that `call` began is over."""
        async with trio.open_nursery() as self.nursery:
            call()

    # The books, the storage and the reader

    async def commit(
        self, build: Callable[[], Iterable[Any]], store: bool = False, then: Callable[[], None] | None = None
    ) -> None:
        self.meta.commit(build())
        if then is not None:
            then()

    def snapshot(self, uid: int) -> Any:
        raise LogyardError("there is none")

    def load_snapshot(self, row: Any) -> Any:
        raise Corrupt("snapshot", 0, "it", "another")

    async def void(self, uid: int) -> tuple[int, Callable[[], None]]:
        assert self.janitor_lock.locked(), "the janitor rests"
        self.events.append("voided")
        return THROUGH, lambda: self.events.append("taken back")

    def restart(self, uid: int) -> int:
        return THROUGH

    def leave_chunks(self, uid: int, names: Sequence[bytes]) -> None:
        if names:
            self.events.append(("chunks", names))

    def stored_through(self, member: Member) -> int:
        return member.flushed

    def take_over(self, old: Member, member: Member) -> None:
        self.events.append("taken over")

    def stored_entries(self, member: Member, first: int, last: int) -> list[Entry]:
        if last > self.good:
            raise Corrupt("segment", 0, "entries", f"damage behind {self.good}")
        return [encode(index, 1, 1, b"") for index in range(first, last + 1)]


async def test_a_group_begins_anew_with_what_can_be_read_and_the_row_is_durable_first() -> None:
    old = healthy()
    rig = Rig(old, good=6)
    await rig.run(lambda: rig.repair.found(old, Corrupt("segment 5", 8, "this", "that")))
    state_key, snapshot_key = meta_rows.state_key(UID)[:1], meta_rows.snapshot_key(UID)[:1]
    assert rig.events == [
        "silenced", "voided", ("row", state_key), ("row", meta_rows.DAMAGED), ("row", snapshot_key), "taken over",
        "enlivened",
    ]  # fmt: skip
    (state, mend) = rig.built[0]
    assert state is not None and [run[:2] for run in state.runs] == [(1, 6)] and (state.term, state.vote) == (4, 2)
    assert mend is not None and not mend.terms
    new = rig.members[UID]
    assert new is not old and new.raft.mend is mend and "segment 5" in new.reason
    assert rig.known() == Damaged(new.reason, False, THROUGH, True)


async def test_each_damage_has_a_number_of_its_own_in_each_life() -> None:
    rig = Rig()
    numbers = [rig.repair.new_round() for _ in range(3)]
    rig.again().load(8)
    assert len({*numbers, rig.repair.new_round()}) == 4


async def test_what_only_this_node_has_is_left_as_it_is() -> None:
    alone = healthy(voters=(3,))
    rig = Rig(alone)
    await rig.run(lambda: rig.repair.found(alone, Corrupt("segment 5", 8, "this", "that")))
    assert rig.events == ["stopped"] and rig.members[UID] is alone
    # Nor at a start: a log with a gap is not given up where nobody could bring it back.
    rig.fails = "a gap"
    member = rig.repair.build(spec((3,)), Damaged("rot", True, 1, False), None, None, Recovered())
    assert member.state == STOPPED and member.damaged and rig.repair.is_left(member) and rig.built == [(None, None)]


async def test_that_it_is_mended_is_stored_and_a_start_forgets_it_when_the_wal_has_nothing_of_it() -> None:
    old = healthy()
    rig = Rig(old, good=3)
    await rig.run(lambda: rig.repair.found(old, Corrupt("segment 5", 8, "this", "that")))
    new = rig.members[UID]
    assert rig.repair.status() == {"mending": 1, "stopped": 0, "mended": 0}
    new.raft.mend = None
    await rig.run(lambda: rig.repair.sound(new))
    assert rig.known().sound and new.reason == "" and rig.repair.status()["mended"] == 1
    await rig.run(lambda: rig.repair.sound(new))
    assert rig.repair.mended == 1, "said once"
    assert rig.again().known[UID].sound


async def test_one_that_can_not_be_mended_now_stays_stopped_and_says_why() -> None:
    old = healthy()
    rig = Rig(old, good=3)
    rig.fails = "a gap"
    await rig.run(lambda: rig.repair.found(old, Corrupt("segment 5", 8, "this", "that")))
    assert rig.members[UID] is old and old.state == STOPPED and "can't be mended now" in old.reason
    assert "enlivened" not in rig.events
    rig.repair.tell_stopped()
    rig.members[UID] = healthy()
    rig.repair.tell_stopped()
    assert rig.told == [[UID]], "nobody else may stop for as long as it does not count"


async def test_who_waits_to_be_made_anew_says_that_it_has_stopped() -> None:
    """Ten seconds after it had stopped its leader let another one go, and nobody was left to mend either."""
    old = healthy()
    rig = Rig(old, good=6)

    async def wait() -> None:
        async with rig.janitor_lock:
            rig.repair.found(old, Corrupt("segment 5", 8, "this", "that"))
            await trio.testing.wait_all_tasks_blocked()
            rig.repair.tell_stopped()

    await rig.run(lambda: rig.nursery.start_soon(wait))
    rig.repair.tell_stopped()
    assert rig.told == [[UID]] and rig.events[-1] == "enlivened" and rig.members[UID] is not old


async def test_a_group_whose_definition_is_lost_waits_for_it() -> None:
    rig = Rig()
    damaged = Damaged("lost", True, THROUGH, True)
    state = meta_rows.StateRow(UID, 6, 1, 3, 0, 0, 2)
    rig.meta.commit([state.put()])
    rig.meta.lost.add(meta_rows.group_key(UID))
    rig.repair.bar(UID, damaged, Recovered())
    assert rig.repair.barred == {UID} and rig.known() == damaged
    member = rig.repair.admit(spec())
    (kept, mend) = rig.built[0]
    assert kept is not None and (kept.term, kept.vote, kept.floor) == (6, 1, 2), "its promises outlive the damage"
    assert mend is not None and mend.terms and member.raft.mend is mend and not rig.repair.barred


class Post:
    """Blobs, kept."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, Any]] = []

    def __call__(self, node: int, kind: int, request: int, header: Any, body: Any = ()) -> bool:
        self.sent.append((node, kind, header))
        return True


async def test_a_leader_lets_one_go_at_a_time() -> None:
    member = healthy()
    member.raft.role = LEADER
    post = Post()
    turns = MendTurns(3, {1, 2, 3}, {UID: member}.get, post)
    for node in (1, 2, 1):
        turns.on_blob(node, MEND_ASK, 5, {"uid": UID, "first": 4})
    assert [(node, header["ok"]) for node, _, header in post.sent] == [(1, True), (2, False), (1, True)]
    assert not await turns.may_begin(member, 4), "nor itself, while another one may"


async def test_nobody_is_let_go_whom_a_quorum_needs_beside_those_that_have_stopped(
    autojump_clock: trio.testing.MockClock,
) -> None:
    member, post, woken = healthy(), Post(), []
    member.raft.role = LEADER

    def find(uid: int) -> Member:
        woken.append(uid)
        return member

    turns = MendTurns(3, {1, 2, 3}, find, post)

    def deliver(node: int, kind: int, request: int, header: Any, body: Any = ()) -> bool:
        if node == 3:
            turns.on_blob(1, kind, request, header)
        return True

    stopped = MendTurns(1, {1, 2, 3}, lambda uid: None, deliver)
    turns.on_blob(1, MEND_ASK, 5, {"uid": UID, "first": 4})
    for _ in range(3):
        await trio.sleep(HELD_S - 1.0)
        stopped.tell_stopped([member])
        turns.on_blob(2, MEND_ASK, 6, {"uid": UID, "first": 4})
    await trio.sleep(HELD_S + 1.0)
    turns.on_blob(2, MEND_ASK, 7, {"uid": UID, "first": 4})
    assert [(node, header["ok"]) for node, _, header in post.sent] == [(1, True), *[(2, False)] * 3, (2, True)]
    assert len(woken) == 5, "and no group is woken by it"
    check_shape(MEND_STOPPED, {"uids": [UID]})


@pytest.mark.parametrize(
    ("voters", "stopped", "asks", "ok"),
    [
        ((2, 3, 4), (1,), 2, True),
        ((1, 2, 3, 4, 5), (1,), 2, True),
        ((1, 2, 3, 4, 5), (1, 2), 4, False),
        ((1, 2, 3), (1,), 2, False),
        ((1, 2, 3), (2,), 2, True),
    ],
    ids=["of who is no member any more", "of one of five", "of two of five", "of one of three", "its own"],
)
async def test_a_word_of_having_stopped_holds_up_whom_it_concerns(
    voters: tuple[int, ...], stopped: tuple[int, ...], asks: int, ok: bool
) -> None:
    member, post = healthy(voters=voters), Post()
    member.raft.role = LEADER
    turns = MendTurns(3, {1, 2, 3, 4, 5}, {UID: member}.get, post)
    for node in stopped:
        turns.on_blob(node, MEND_STOPPED, 0, {"uids": [UID, 77]})
    turns.on_blob(asks, MEND_ASK, 5, {"uid": UID, "first": 4})
    assert post.sent == [(asks, MEND_TURN, {"ok": ok})]


async def test_no_quorum_without_it_no_turn() -> None:
    member = healthy()
    member.raft.role = LEADER
    post = Post()
    turns = MendTurns(3, {1, 3}, {UID: member}.get, post)
    turns.on_blob(1, MEND_ASK, 5, {"uid": UID, "first": 4})
    assert post.sent == [(1, MEND_TURN, {"ok": False})]


@pytest.mark.parametrize("ok", [True, False])
async def test_a_follower_asks_its_leader(ok: bool) -> None:
    member = healthy()
    member.raft.role, member.raft.leader = FOLLOWER, 2

    def answer(node: int, kind: int, request: int, header: Any, body: Any = ()) -> bool:
        assert (node, kind, header) == (2, MEND_ASK, {"uid": UID, "first": 4})
        turns.on_blob(2, MEND_TURN, request, {"ok": ok})
        return True

    turns = MendTurns(3, {1, 2, 3}, {UID: member}.get, answer)
    assert await turns.may_begin(member, 4) == ok

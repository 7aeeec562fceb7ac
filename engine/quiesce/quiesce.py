"""Quiescence: a group that nobody uses becomes a row on each of its nodes (docs/internals/hosting.md).

Invariants: a member is given up only when the state row just committed says all that it knows, with a snapshot at its
last entry; a follower sleeps only with the log, term and commit of the leader that asked it to; a leader sleeps only
when every living follower does; each renewal's digest says which groups those are, so that whatever message is lost,
both sides find out. Nothing here decides a commit or a read (law 10). Called by `inbound` and `ticker`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import trio

from logyard.protocol.errors import LogyardError

from ..log import checkpoint_rows as rows
from ..raft.state import LEADER
from ..replica.member import RUNNING, Member
from ..transport.blobs import AWAKE, SLEEP, SLEEPING
from .quiesced_table import QuiescedTable, row_of
from .transitions import Transitions
from .unquiesce import Unquiesce

log = logging.getLogger(__name__)

BATCH = 64
"""Groups that go to sleep together: two commits of the meta store, some milliseconds of the loop."""
PATIENCE = 6
"""A group that can't sleep, or has an absent member, is looked at again after this many times the usual quiet."""
ANSWER_SECONDS = 3.0
LOOK_SECONDS = 0.1
TIDY_MIN = 256
"""Groups that went to sleep since memory was given back last: it costs tens of milliseconds."""


class Storage(NamedTuple):
    """What keeps members' state. `has_moved_out(member)`: nothing of it lives in WAL files alone; `move_out(members)`:
    give what does another home; `snapshot(members)`: take snapshots; `leave_log(member)`: its snapshot is all it needs,
    which `may_leave_log(member)` says; `commit(build)`: make the rows durable that `build` gives; `slept(member)`:
    store nothing more for it; `forget_slept(count)`: let go of what is in memory of so many."""

    has_moved_out: Callable[[Member], bool]
    move_out: Callable[[Sequence[Member]], Awaitable[object]]
    snapshot: Callable[[Sequence[Member]], Awaitable[object]]
    may_leave_log: Callable[[Member], bool]
    leave_log: Callable[[Member], None]
    commit: Callable[[Callable[[], Iterable[rows.Put]]], Awaitable[None]]
    slept: Callable[[Member], None]
    forget_slept: Callable[[int], None]


class Hibernation:
    """How this node's members become rows. `is_held(member)`: something beside its own state needs it awake;
    `epoch_of(node)`: which life of a node leads; `left(member)`: it takes no part in anything any more; `shrunk()`:
    there is memory to give back."""

    def __init__(
        self,
        members: Mapping[int, Member],
        transitions: Transitions,
        storage: Storage,
        is_held: Callable[[Member], bool],
        epoch_of: Callable[[int], int],
        left: Callable[[Member], None],
        shrunk: Callable[[], None],
    ) -> None:
        self._members = members
        self._transitions = transitions
        self._storage = storage
        self._is_held = is_held
        self._epoch_of = epoch_of
        self._left = left
        self._shrunk = shrunk
        self._preparing = trio.Lock()
        self._tidied = 0

    def may_sleep(self, member: Member) -> bool:
        """Return whether nothing is under way, nobody waits, nothing is to be done before the next timer."""
        if (
            member.state != RUNNING or member.dirty or not member.proposals.is_idle
            or member.unpersisted or member.waiters or member.reads or member.transfers or member.slow_sends
        ):  # fmt: skip
            return False
        kept = member.kept
        if member.uploads is not None and member.uploads.open:
            return False
        if self._is_held(member) or (kept is not None and (kept.todo or kept.appends)):
            return False
        return member.resolves and member.raft.log.last_index > 0 and member.raft.may_hibernate()

    async def prepare(self, members: Sequence[Member], leader: int) -> dict[Member, rows.Put]:
        """Take snapshots at the last entry, and store state rows that say all there is; return those, durable, of
        the members that may sleep."""
        storage = self._storage
        found: dict[Member, rows.Put] = {}
        async with self._preparing:
            full = [member for member in members if not storage.has_moved_out(member)]
            if full:
                await storage.move_out(full)
            await storage.snapshot([one for one in members if one.snapshot_index < one.raft.log.last_index])

            def build() -> list[rows.Put]:
                for member in members:
                    stands = member.raft.log.last_index == member.snapshot_index == member.snapshot_stored
                    stands = stands and self.may_sleep(member) and storage.has_moved_out(member)
                    if stands and storage.may_leave_log(member):
                        storage.leave_log(member)
                        found[member] = self._put(member, leader)
                return list(found.values())

            await storage.commit(build)
        return found

    def _put(self, member: Member, leader: int) -> rows.Put:
        return rows.state(member, asleep=row_of(member, leader).stored(self._epoch_of(leader)))

    def give_up(
        self, member: Member, put: rows.Put, leader: int, asleep: Iterable[int] = (), absent: Iterable[int] = ()
    ) -> bool:
        """Let the member become a row, if what was stored is still all there is to say. In one step of the loop."""
        if self._members.get(member.uid) is not member or not self.may_sleep(member):
            return False
        if self._put(member, leader) != put:
            return False
        row = row_of(member, leader, asleep, absent)
        self._left(member)
        self._storage.slept(member)
        self._transitions.sleep(member, row)
        return True

    def tidy(self) -> None:
        """Give memory back, when most of it is that of groups which sleep now."""
        slept = self._transitions.slept
        count = slept - self._tidied
        if count > 0:
            self._storage.forget_slept(count)
            if count >= max(TIDY_MIN, 4 * len(self._members)):
                self._tidied = slept
                self._shrunk()


class Host(NamedTuple):
    """What putting groups to sleep needs of the node: `is_active(member)`, it needs ticks; `send_blob` says something
    to another node; `spawn` runs a task."""

    is_active: Callable[[Member], bool]
    send_blob: Callable[[int, int, int, Mapping[str, Any]], bool]
    spawn: Callable[..., None]


class Quiesce:
    """Both ends of going to sleep: one node's. A group sleeps after `after_s` of rest, never where that is 0; `live`:
    the nodes that are up, this one among them."""

    def __init__(
        self,
        node: int,
        after_s: float,
        members: Mapping[int, Member],
        live: Set[int],
        table: QuiescedTable,
        hibernation: Hibernation,
        unquiesce: Unquiesce,
        host: Host,
    ) -> None:
        self._node = node
        self._after_s = after_s
        self._members = members
        self._live = live
        self._table = table
        self._hibernation = hibernation
        self._unquiesce = unquiesce
        self._host = host
        # Quiet groups led here, by when they are looked at: those of the usual wait, and those that were looked at.
        self._resting: dict[Member, float] = {}
        self._patient: dict[Member, float] = {}
        self._rested = trio.lowlevel.ParkingLot()
        self._offers: dict[int, _Offer] = {}
        self._offer = 0

    # The leader's side

    def rest(self, member: Member) -> None:
        """Note that a member needs no ticks any more. Called by the ticker, now and whenever it came to rest again."""
        if self._after_s and member.raft.role == LEADER:
            self._resting.pop(member, None)
            self._resting[member] = time.monotonic() + self._after_s
            self._rested.unpark_all()

    async def run(self) -> None:
        """Put groups to sleep, a batch at a time, for at most a quarter of the time. Until cancelled."""
        pause = min(LOOK_SECONDS, self._after_s / 2)
        while True:
            while not (self._resting or self._patient):
                await self._rested.park()
            dues = [due for queue in (self._resting, self._patient) for due in itertools.islice(queue.values(), 1)]
            await trio.sleep(max(pause, min(dues) - time.monotonic()))
            while found := self._due_batch():
                began = time.monotonic()
                try:
                    # An answer that was lost cost nothing but time: it is no reason to pause for long.
                    began += await self._put_to_sleep(found)
                except (LogyardError, OSError) as error:
                    log.warning("hibernation of %d groups: %s", len(found), error)
                    for member in found:
                        if self._members.get(member.uid) is member:
                            self._wait(member)
                await trio.sleep(3 * (time.monotonic() - began))

    def _due_batch(self) -> list[Member]:
        now = time.monotonic()
        found: list[Member] = []
        for queue in (self._resting, self._patient):
            for member, due in list(itertools.islice(queue.items(), 2 * BATCH)):
                if due > now or len(found) == BATCH:
                    break
                del queue[member]
                if self._host.is_active(member) or member.state != RUNNING or member.raft.role != LEADER:
                    # It comes back when it rests again.
                    continue
                alone = not member.raft.configuration.nodes() <= self._live
                if not self._hibernation.may_sleep(member) or (alone and queue is self._resting):
                    self._wait(member)
                    continue
                found.append(member)
        return found

    def _wait(self, member: Member) -> None:
        if member.state == RUNNING:
            self._patient.pop(member, None)
            self._patient[member] = time.monotonic() + PATIENCE * self._after_s

    async def _put_to_sleep(self, members: Sequence[Member]) -> float:
        """Offer sleep to a batch; return the seconds in which nothing was done but wait for an answer that never
        came."""
        ready = await self._hibernation.prepare(members, self._node)
        by_node: dict[int, list[Member]] = {}
        for member in ready:
            for node in member.raft.progress:
                if node in self._live:
                    by_node.setdefault(node, []).append(member)
        slept, lost = await self._ask(by_node)
        for member in members:
            if member not in ready:
                self._wait(member)
        for member, put in ready.items():
            asked = {node for node, its in by_node.items() if member in its}
            asleep = {node for node in asked if member.uid in slept.get(node, ())}
            absent = member.raft.configuration.nodes() - asleep - {self._node}
            agreed = asleep == asked and absent.isdisjoint(self._live)
            if agreed and self._hibernation.give_up(member, put, self._node, asleep, absent):
                self._forget(member)
                continue
            # Who is woken by its leader trusts it. Where the group was deleted meanwhile, or another one leads it, the
            # digests differ, and it wakes with a question.
            leads = self._members.get(member.uid) is member and member.raft.role == LEADER
            for node in asleep if leads else ():
                self._unquiesce.note_awake(node, member.uid)
            self._wait(member)
        return lost

    async def _ask(self, by_node: Mapping[int, Sequence[Member]]) -> tuple[Mapping[int, Container[int]], float]:
        """Ask nodes whether these groups may sleep; return which do, by node, and the seconds that nobody used to
        answer."""
        self._offer += 1
        number, lost = self._offer, 0.0
        offer = self._offers[number] = _Offer()
        try:
            for node, asked in by_node.items():
                table = [[one.uid, one.raft.term, one.raft.log.last_index] for one in asked]
                if self._host.send_blob(node, SLEEP, number, {"groups": table}):
                    offer.waiting.add(node)
            if offer.waiting:
                with trio.move_on_after(ANSWER_SECONDS) as scope:
                    await offer.done.wait()
                lost = ANSWER_SECONDS if scope.cancelled_caught else 0.0
        finally:
            del self._offers[number]
        return offer.slept, lost

    def look(self) -> None:
        """Give back the memory of those asleep. Called once a second."""
        self._hibernation.tidy()

    def _forget(self, member: Member) -> None:
        self._resting.pop(member, None)
        self._patient.pop(member, None)

    # The follower's side

    async def _asked(self, node: int, number: int, table: Sequence[Sequence[int]]) -> None:
        """Put to sleep, of the groups that the leader on `node` would let sleep, those that may, and say which."""
        slept: list[int] = []
        members: list[Member] = []
        for uid, term, last in table:
            if uid in self._table:
                row = self._table.row(uid)
                if (row.leader, row.term, row.last) == (node, term, last):
                    slept.append(uid)
                    continue
            member = self._unquiesce.find(uid)
            if member is not None and self._agrees(member, node, term, last):
                members.append(member)
        try:
            ready = await self._hibernation.prepare(members, node)
            for member, put in ready.items():
                if member.raft.leader == node and self._hibernation.give_up(member, put, node):
                    self._forget(member)
                    slept.append(member.uid)
        except (LogyardError, OSError) as error:
            log.warning("hibernation of %d groups of node %d: %s", len(members), node, error)
        self._host.send_blob(node, SLEEPING, number, {"groups": slept})

    def _agrees(self, member: Member, node: int, term: int, last: int) -> bool:
        raft = member.raft
        same = (raft.leader, raft.term, raft.log.last_index) == (node, term, last)
        return same and node != self._node and self._hibernation.may_sleep(member)

    def on_blob(self, node: int, kind: int, request: int, header: Mapping[str, Any]) -> None:
        """Take in what another node says of groups that go to sleep or wake; its shape was checked."""
        if kind == SLEEP:
            self._host.spawn(self._asked, node, request, header["groups"])
        elif kind == SLEEPING:
            offer = self._offers.get(request)
            if offer is not None:
                offer.answer(node, header["groups"])
        elif kind == AWAKE:
            self._unquiesce.on_awake(node, header["groups"])


class _Offer:
    """One batch that was offered sleep: who has not answered, and what each said."""

    __slots__ = ("waiting", "slept", "done")

    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self.slept: dict[int, set[int]] = {}
        self.done = trio.Event()

    def answer(self, node: int, uids: Sequence[int]) -> None:
        """Note a node's answer."""
        if node in self.waiting:
            self.slept[node] = set(uids)
            self.waiting.discard(node)
            if not self.waiting:
                self.done.set()

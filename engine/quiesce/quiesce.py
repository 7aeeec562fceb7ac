"""Hibernation: a group that nobody uses becomes a row on each of its nodes, and a member again when it is needed
(docs/internals/hosting.md).

Invariants: a member is given up only when the state row just committed says all that it knows, with a snapshot at its
last entry; a follower sleeps only with the log, term and commit of the leader that asked it to; a leader sleeps only
when every living follower does; each renewal's digest says which groups those are, so that whatever message is lost,
both sides find out. Nothing here decides a commit or a read (law 10). Called by `system`, `inbound` and `ticker`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import trio

from logyard.protocol.errors import LogyardError

from ..host import payload_flush
from ..host.leader_cache import UNKNOWN, Standing
from ..log import checkpoint_rows as rows
from ..raft import quiescence
from ..raft.core import LEADER
from ..replica.member import ASLEEP, RUNNING, STOPPED, Member
from ..transport.blobs import AWAKE, DIGEST, SLEEP, SLEEPERS, SLEEPING
from . import unquiesce
from .digest import Digests
from .liveness_scan import LivenessScan
from .quiesced_sessions import QuiescedSessions
from .quiesced_table import QuiescedTable, Row, Shape
from .timers import Timers

if TYPE_CHECKING:
    from ..host.system import System

log = logging.getLogger(__name__)

BATCH = 64
"""Groups that go to sleep together: two commits of the meta store, some milliseconds of the loop."""
PATIENCE = 6
"""A group that can't sleep, or has an absent member, is looked at again after this many times the usual quiet."""
ANSWER_SECONDS = 3.0
LOOK_SECONDS = 0.1
WAKE_SECONDS = 0.02
"""What a tick may spend waking groups that nobody waits for."""
NOTICE_MAX = 4096
TIDY_MIN = 256
"""Groups that went to sleep since memory was given back last: it costs tens of milliseconds."""


class Quiesce:
    """Both ends of going to sleep, and every way to wake."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.sleepers = QuiescedTable(system.node_id)
        self.slept = 0
        self.woken = 0
        self._tidied = 0
        # Quiet groups led here, by when they are looked at: those of the usual wait, and those that were looked at.
        self._resting: dict[Member, float] = {}
        self._patient: dict[Member, float] = {}
        self._rested = trio.lowlevel.ParkingLot()
        self._offers: dict[int, _Offer] = {}
        self._offer = 0
        self._preparing = trio.Lock()
        # What waking has to say to other nodes, by node; it leaves with the next tick.
        self._notices: dict[int, list[int]] = {}
        # Groups to wake when there is time: (leader that each slept under, 0 for one that is gone; by whose word).
        self._waking: dict[int, tuple[int, int]] = {}
        self.guests = QuiescedSessions(system)
        self.alarms = Timers(self)
        self.accord = Digests(self)
        self.sweeps = LivenessScan(self)

    # Going to sleep: the leader's side

    def rest(self, member: Member) -> None:
        """Take note that a member needs no ticks any more. Called by the ticker, now and whenever it came to rest
        again."""
        after = self.system.config.hibernate_after_ms / 1000
        if after and member.raft.role == LEADER:
            self._resting.pop(member, None)
            self._resting[member] = time.monotonic() + after
            self._rested.unpark_all()

    async def run(self) -> None:
        """Put groups to sleep, a batch at a time, for at most a quarter of the time. Until cancelled."""
        pause = min(LOOK_SECONDS, self.system.config.hibernate_after_ms / 2000)
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
                await trio.sleep(3 * (time.monotonic() - began))

    def _tidy(self) -> None:
        """Give memory back, when most of it is that of groups which sleep now."""
        system = self.system
        count = self.slept - self._tidied
        system.storage.forget_slept(count)
        if count >= max(TIDY_MIN, 4 * len(system.members)):
            self._tidied = self.slept
            system.shrunk()

    def _due_batch(self) -> list[Member]:
        now = time.monotonic()
        found: list[Member] = []
        for queue in (self._resting, self._patient):
            for member, due in list(itertools.islice(queue.items(), 2 * BATCH)):
                if due > now or len(found) == BATCH:
                    break
                del queue[member]
                if member in self.system.active or member.state != RUNNING or member.raft.role != LEADER:
                    # It comes back when it rests again.
                    continue
                alone = not member.raft.configuration.nodes() <= self.system.live
                if not self._may_sleep(member) or (alone and queue is self._resting):
                    self._wait(member)
                    continue
                found.append(member)
        return found

    def _wait(self, member: Member) -> None:
        if member.state == RUNNING:
            self._patient.pop(member, None)
            self._patient[member] = time.monotonic() + PATIENCE * self.system.config.hibernate_after_ms / 1000

    def _may_sleep(self, member: Member) -> bool:
        """Return whether nothing is under way, nobody waits, and nothing is to be done before the next timer."""
        if (
            member.state != RUNNING or member.dirty or not member.proposals.is_idle
            or member.unpersisted or member.waiters or member.reads or member.transfers or member.slow_sends
        ):  # fmt: skip
            return False
        kept = member.kept
        if member.uploads is not None and member.uploads.open:
            return False
        if member.raft.role == LEADER and self.guests.is_silent(member):
            return False
        if member in self.system.effects.ticking or (kept is not None and (kept.todo or kept.appends)):
            return False
        return member.resolves and member.raft.log.last_index > 0 and quiescence.may_hibernate(member.raft)

    def look(self) -> None:
        """Wake, once a second, groups whose sessions of silent clients have to end; free the memory of those
        asleep."""
        if self.slept > self._tidied:
            self._tidy()
        for uid in self.guests.overdue():
            if uid not in self._waking:
                self.wake_soon(uid, self.system.node_id)

    def _has_moved_out(self, member: Member) -> bool:
        """Return whether nothing that lives is at home in a WAL file without a segment: only a member in memory can
        locate that."""
        raft_log = member.raft.log
        if any(member.uid in one.shares for one in self.system.storage.files.values()):
            # Migration needs its liveness.
            return False
        home = self.system.store.home
        for entry in reversed(raft_log.entries):
            if entry.index <= member.flushed:
                break
            lives = entry.body_bytes and not entry.tombstone and not member.is_dead(entry)
            if lives and home(member.uid, entry.index) is None:
                return False
        return True

    async def _put_to_sleep(self, members: Sequence[Member]) -> float:
        """Offer sleep to a batch; returns the seconds in which nothing was done but wait for an answer that never
        came."""
        system, lost = self.system, 0.0
        ready = await self._prepare(members, system.node_id)
        offer = _Offer()
        by_node: dict[int, list[Member]] = {}
        for member in ready:
            for node in member.raft.progress:
                if node in system.live:
                    by_node.setdefault(node, []).append(member)
        self._offer += 1
        number = self._offer
        self._offers[number] = offer
        try:
            for node, asked in by_node.items():
                table = [[one.uid, one.raft.term, one.raft.log.last_index] for one in asked]
                if system.peers.send_blob(node, SLEEP, number, {"groups": table}):
                    offer.waiting.add(node)
            if offer.waiting:
                with trio.move_on_after(ANSWER_SECONDS) as scope:
                    await offer.done.wait()
                lost = ANSWER_SECONDS if scope.cancelled_caught else 0.0
        finally:
            del self._offers[number]
        for member in members:
            if member not in ready:
                self._wait(member)
        for member, put in ready.items():
            asked_nodes = {node for node, asked in by_node.items() if member in asked}
            asleep = {node for node in asked_nodes if member.uid in offer.slept.get(node, ())}
            absent = member.raft.configuration.nodes() - asleep - {system.node_id}
            agreed = asleep == asked_nodes and not absent & system.live
            if not agreed or not self._give_up(member, put, system.node_id, asleep, absent):
                # Who is woken by its leader trusts it. Where the group was deleted meanwhile the digests differ, and it
                # wakes with a question.
                for node in asleep if system.members.get(member.uid) is member else ():
                    self._notices.setdefault(node, []).append(member.uid)
                self._wait(member)
        return lost

    async def _prepare(self, members: Sequence[Member], leader: int) -> dict[Member, rows.Put]:
        """Prepare snapshots at the last entry, and state rows that say all there is: durable when this returns."""
        system = self.system
        found: dict[Member, rows.Put] = {}
        async with self._preparing:
            full = [member for member in members if not self._has_moved_out(member)]
            if full:
                found_payloads = payload_flush.Leftovers(
                    system.store, system.wal, system.storage.location, system.reader
                )
                await payload_flush.move_out(found_payloads, system.storage, full, system.config.hibernate_move_bytes)
            await system.snapshots.take([one for one in members if one.snapshot_index < one.raft.log.last_index])

            def build() -> list[rows.Put]:
                for member in members:
                    stands = member.raft.log.last_index == member.snapshot_index == member.snapshot_stored
                    if stands and self._may_sleep(member) and self._has_moved_out(member):
                        system.checkpoints.move_out(member)
                        found[member] = self._row_put(member, leader)
                return list(found.values())

            await system.storage.books.commit(build, store=True)
        return found

    def _row_put(self, member: Member, leader: int) -> rows.Put:
        epoch = self.system.epoch if leader == self.system.node_id else self.system.peers.epoch_of(leader)
        machine = member.machine
        start, end = getattr(machine, "start", 0), getattr(machine, "end", 0)
        return rows.state(member, asleep=[leader, epoch, _next_due(member), start, end, member.snapshot_bytes])

    def _give_up(
        self, member: Member, put: rows.Put, leader: int, asleep: set[int] | None = None, absent: set[int] | None = None
    ) -> bool:
        """Make the member a row, if what was stored is still all there is to say. In one step of the loop."""
        system = self.system
        if system.members.get(member.uid) is not member or not self._may_sleep(member):
            return False
        if self._row_put(member, leader) != put:
            return False
        row = row_of(member, leader, asleep or (), absent or ())
        member.state = ASLEEP
        del system.members[member.uid]
        system.active.discard(member)
        system.effects.timed.discard(member)
        self._resting.pop(member, None)
        self._patient.pop(member, None)
        system.storage.slept(member)
        standing = system.leaderboard.rows.pop(member.uid, UNKNOWN)
        self.sleepers.add(member.uid, row._replace(name=member.spec.name, since_ms=standing.since_ms))
        del system.names[member.spec.name]
        if leader == system.node_id:
            self.guests.sleep(member)
        if row.due:
            self.alarms.set(member.uid, row.due, member)
        self.slept += 1
        return True

    # Going to sleep: the follower's side

    async def _asked(self, node: int, number: int, table: Sequence[Sequence[int]]) -> None:
        """Answer the leader on `node`, which would let these groups sleep."""
        slept: list[int] = []
        members: list[Member] = []
        for uid, term, last in table:
            if uid in self.sleepers:
                row = self.sleepers.row(uid)
                if (row.leader, row.term, row.last) == (node, term, last):
                    slept.append(uid)
                    continue
            member = self.find(uid)
            if member is not None and self._agrees(member, node, term, last):
                members.append(member)
        try:
            ready = await self._prepare(members, node)
            for member, put in ready.items():
                if member.raft.leader == node and self._give_up(member, put, node):
                    slept.append(member.uid)
        except (LogyardError, OSError) as error:
            log.warning("hibernation of %d groups of node %d: %s", len(members), node, error)
        self.system.peers.send_blob(node, SLEEPING, number, {"groups": slept})

    def _agrees(self, member: Member, node: int, term: int, last: int) -> bool:
        raft = member.raft
        same = (raft.leader, raft.term, raft.log.last_index) == (node, term, last)
        return same and node != self.system.node_id and self._may_sleep(member)

    # Waking

    def find(self, uid: int, use: bool = False, by: int = 0) -> Member | None:
        """Return a group's member, woken if it sleeps; None when this node has none. `use`: somebody waits for it, so
        without a leader it campaigns at once. `by`: the node whose word this is."""
        member = self.system.members.get(uid)
        if member is None and uid in self.sleepers:
            member = self._wake(uid, use, by)
        return member

    def _wake(self, uid: int, use: bool, by: int) -> Member:
        system = self.system
        row = self.sleepers.pop(uid)
        assert row is not None
        leader, by = self._waking.pop(uid, (row.leader, by))
        if self.sweeps.gives_up(leader):
            leader = 0
        clock = self.alarms.pop(uid)
        self.woken += 1
        system.names[row.name] = uid
        if leader:
            system.leaderboard.rows[uid] = Standing(leader, row.term, row.since_ms)
        member = system.members[uid] = unquiesce.revive(system, uid, row.name)
        if member.state == STOPPED:
            return member
        if member.raft.mend is not None:
            system.active.add(member)
            system.scheduler.mark(member)
            return member
        self.guests.wake(member)
        if clock is not None:
            # Who is elected now goes on from there.
            member.heard_ns = clock.read_at(member.log_time)
        raft = member.raft
        own = system.node_id
        if leader == own and raft.vote == own and raft.term == row.term:
            quiescence.resume_leader(raft, row.shape.asleep)
            if clock is not None:
                member.begin_clock(clock)
            system.effects.on_leading(member)
            for node in row.shape.asleep:
                if node != by:
                    self._notices.setdefault(node, []).append(uid)
        elif leader and leader != own and raft.term == row.term and leader in system.live:
            quiescence.resume_follower(raft, leader)
            if by != leader:
                # It hears of this, and the group is awake on all its nodes.
                raft.on_link_reset(leader)
        elif use or raft.configuration.voters == (own,):
            raft.campaign()
        elif not by:
            quiescence.orphan(raft)
        system.active.add(member)
        system.scheduler.mark(member)
        return member

    @property
    def is_busy(self) -> bool:
        """Whether the next tick has groups to wake, or to speak of."""
        return bool(self._waking or self._notices or self.sweeps.pending)

    def tick(self) -> None:
        """Wake, once a tick, what is due, as much as there is time for; say what there is to say; compare digests."""
        self.sweeps.go_on()
        end = time.monotonic() + WAKE_SECONDS
        while self._waking:
            uid = next(iter(self._waking))
            self.find(uid)
            self._waking.pop(uid, None)
            if time.monotonic() >= end:
                break
        self.alarms.ring()
        if self._notices:
            notices, self._notices = self._notices, {}
            for node, uids in notices.items():
                for at in range(0, len(uids), NOTICE_MAX):
                    self.system.peers.send_blob(node, AWAKE, 0, {"groups": uids[at : at + NOTICE_MAX]})
        self.accord.compare()

    def wake_soon(self, uid: int, leader: int, by: int = 0) -> None:
        """Wake a group when there is time. `leader` is whom it slept under; it is believed if `by` is the same."""
        self._waking[uid] = (leader, by)
        self.system.ticker.stir()

    def tell_awake(self, node: int, uid: int) -> None:
        """Tell a node, with the next tick, that a group it sleeps in is awake here."""
        if uid not in self._waking:
            self._notices.setdefault(node, []).append(uid)
            self.system.ticker.stir()

    def on_blob(self, node: int, kind: int, request: int, header: Mapping[str, Any]) -> None:
        """Take what another node says of groups that sleep or wake; its shape was checked."""
        if kind == SLEEP:
            self.system.nursery.start_soon(self._asked, node, request, header["groups"])
        elif kind == SLEEPING:
            offer = self._offers.get(request)
            if offer is not None:
                offer.answer(node, header["groups"])
        elif kind == AWAKE:
            for uid in header["groups"]:
                if uid in self.sleepers:
                    self.wake_soon(uid, self.sleepers.row(uid).leader, node)
        elif kind == DIGEST:
            self.accord.differing(node, {int(number): int(total) for number, total in header["parts"]})
        elif kind == SLEEPERS:
            self.accord.corrected(node, header["parts"], header["groups"])

    def adopt(self, uid: int, row: Row, leader: int, epoch: int, slept_ms: int) -> None:
        """Adopt, at recovery, a group that slept when this node ended. Nobody leads it until its leader is met
        again."""
        under = leader if leader != self.system.node_id else 0
        self.sleepers.add(uid, row._replace(leader=0, under=under, epoch=epoch))
        if row.due:
            self.alarms.adopt(uid, row.due, slept_ms)


class _Offer:
    """One batch that was offered sleep: who has not answered, and what each said."""

    __slots__ = ("waiting", "slept", "done")

    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self.slept: dict[int, set[int]] = {}
        self.done = trio.Event()

    def answer(self, node: int, uids: Sequence[int]) -> None:
        """Take a node's answer."""
        if node in self.waiting:
            self.slept[node] = set(uids)
            self.waiting.discard(node)
            if not self.waiting:
                self.done.set()


def _next_due(member: Member) -> int:
    """Log time of a group's next timer; 0 for none."""
    return min(member.kept.timers.values(), default=0) if member.kept is not None else 0


def row_of(member: Member, leader: int, asleep: Sequence[int] | set[int], absent: Sequence[int] | set[int]) -> Row:
    """Return what is left of a member."""
    raft, machine = member.raft, member.machine
    configuration = raft.configuration
    shape = Shape(
        configuration.voters, configuration.learners, tuple(sorted(asleep)), tuple(sorted(absent)), member.spec.machine
    )
    start, end = getattr(machine, "start", 0), getattr(machine, "end", 0)
    return Row(raft.term, raft.log.last_index, _next_due(member), start, end, leader, member.snapshot_bytes, shape)

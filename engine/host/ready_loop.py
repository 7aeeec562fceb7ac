"""One turn for all groups: propose, ready, send, make durable, apply.

Everything that changes a core (a frame, a message, a tick, a finished sync) only marks its member dirty; the turn
then drains every dirty member,
so a thousand groups share one frame a peer, one fdatasync and one reply frame a connection. Invariants:
`Ready.messages` leave at
once, `Ready.after` only when everything the member queued before it is stable (law 2). The turn is plain code: no
await inside.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import trio

from logyard.protocol.errors import NotLeader

from ..log.wal import WalItem
from ..raft.core import LEADER
from ..raft.messages import APPEND, SNAPSHOT, Message
from ..raft.ready import Ready
from ..raft.replication import NOTED, UNTOLD
from ..replica.member import Member
from ..replica.proposals import Shape

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)

PASSES_MAX = 64
QUIET_SECONDS = 0.0002
"""Input that comes this long after the last turn is drained at once; else it waits for what else is readable."""
TELL_SECONDS = 0.005
"""A commit index that no entry carried to the followers by then goes alone."""

Token: TypeAlias = tuple[Member, Sequence[Message], tuple[int, int, int, int] | None]
"""What comes back with a durable item: whose it is, what waited for it, what to tell the core (None: nothing)."""


class Scheduler:
    """Owns the turn. `mark` from anywhere on the loop; `run` is the one task that drains."""

    def __init__(self, system: System) -> None:
        self.system = system
        config = system.config
        self._shape = Shape(
            config.entry_bytes_max, config.entry_records_max, system.cache.keep, system.counters.refused
        )
        self.dirty: list[Member] = []
        self.running = False
        self.untold: list[Member] = []
        self._task: trio.lowlevel.Task | None = None
        self._held = False
        self._ended = 0.0
        self._error: BaseException | None = None
        self._last_words: list[Callable[[], None]] = []
        self._telling = trio.lowlevel.ParkingLot()

    def mark(self, member: Member) -> None:
        """Mark a member that has something to do; the next turn does it."""
        if not member.dirty:
            member.dirty = True
            self.dirty.append(member)
            if self._task is not None and not self._held:
                self._wake()

    def _wake(self) -> None:
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)
            self._task = None

    def hold(self) -> None:
        """Hold back marks while bytes of one connection are handled: they wake nobody until `release`."""
        self._held = True

    def release(self) -> None:
        """Release the marks: the bytes were handled. A node with little to do drains at once: a task switch would cost
        a lone client as much as its append. A busy one lets the other connections have their say first, so that their
        work shares a sync.
        """
        self._held = False
        if not self.dirty or self.running:
            return
        if time.monotonic() - self._ended < QUIET_SECONDS:
            self._wake()
            return
        try:
            self.turn()
        except BaseException as error:
            # A fault of the turn is the engine's, not that of the connection whose bytes happened to start it.
            self._error = error
        if self.dirty or self._error is not None:
            self._wake()

    def at_turn_end(self, call: Callable[[], None]) -> bool:
        """Run `call` when the turn that is under way ends; return False when there is none."""
        if self.running:
            self._last_words.append(call)
        return self.running

    async def run(self) -> None:
        """Drain whenever something is dirty. The task parks without a timer."""
        while True:
            if self._error is not None:
                raise self._error
            if self.dirty:
                await trio.lowlevel.cancel_shielded_checkpoint()
                self.turn()
            else:
                self._task = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._abort)

    async def tell(self) -> None:
        """Tell followers of commits that no entry told them of: one short timer for all groups."""
        while True:
            if not self.untold:
                await self._telling.park()
            await trio.sleep(TELL_SECONDS)
            untold, self.untold = self.untold, []
            for member in untold:
                if not member.raft.stopped and member.raft.tell():
                    self.mark(member)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def turn(self) -> None:
        """Drain every dirty member. A sync done in place makes members dirty again, hence the passes; they are
        bounded."""
        if self.running:
            return
        system = self.system
        if system.failure is not None:
            # Nothing is promised any more.
            self.dirty.clear()
            return
        self.running = True
        system.cache.hold()
        try:
            for _ in range(PASSES_MAX):
                if not self.dirty:
                    break
                batch, self.dirty = self.dirty, []
                messages: list[Message] = []
                # Groups with pieces of large payloads under way go after the others, in frames of their own.
                late: list[Message] = []
                for member in batch:
                    member.dirty = False
                    if not member.raft.stopped:
                        self._drain(member, messages if member.uploads is None else late)
                if messages:
                    system.peers.send(messages)
                if late:
                    system.peers.send(late)
                system.durability.kick()
                system.applier.apply_all(batch)
            if self._last_words:
                calls, self._last_words = self._last_words, []
                for call in calls:
                    call()
        finally:
            self.running = False
            system.cache.release()
            if system.ticker.resting:
                system.ticker.stir()
            self._ended = time.monotonic()

    def _drain(self, member: Member, messages: list[Message]) -> None:
        raft = member.raft
        proposals = member.proposals
        if proposals.own:
            if raft.role != LEADER:
                proposals.fail(NotLeader(raft.leader))
            else:
                proposals.propose_own(self.system.log_clock.now(member))
        if proposals.low and proposals.let_low():
            self.mark(member)
        if proposals.queue:
            if raft.role != LEADER:
                proposals.fail(NotLeader(raft.leader))
            elif not proposals.guarded or proposals.sort(member.sessions, self.system.heartbeats.seen):
                proposals.propose(self.system.log_clock.now(member), self._shape)
        ready = raft.ready()
        if raft.untold == UNTOLD:
            raft.untold = NOTED
            if not self.untold:
                self._telling.unpark_all()
            self.untold.append(member)
        if ready is None:
            return
        if ready.truncated:
            member.overwritten(ready.truncated)
            self.system.storage.homes.cut(member, ready.truncated - 1)
        if ready.role_changed:
            self._role_changed(member)
        for message in ready.messages:
            kind = message.kind
            if (kind != APPEND and kind != SNAPSHOT) or self.system.outbound.prepare(member, message):
                messages.append(message)
        if ready.hard_state is not None or ready.entries:
            self._persist(member, ready)
        elif ready.after:
            if member.unpersisted:
                self._persist(member, ready)
            else:
                messages.extend(ready.after)
        if ready.reads and member.reads:
            for context, index in ready.reads:
                done = member.reads.pop(context, None)
                if done is not None:
                    done(None, index)
        if ready.failed_reads and member.reads:
            for context in ready.failed_reads:
                done = member.reads.pop(context, None)
                if done is not None:
                    done(NotLeader(raft.leader), 0)
        # Whether it is quiet is asked at the next tick: asking now would cost more than the tick.
        self.system.active.add(member)

    def _persist(self, member: Member, ready: Ready) -> None:
        raft = member.raft
        entries = ready.entries
        item = WalItem(raft.uid)
        if ready.hard_state is not None:
            item.hard_state = (*ready.hard_state, raft.commit)
            self.system.storage.flush.hard_state_written(member)
        item.entries = entries
        item.truncate = ready.truncated
        floor = 0
        if entries:
            member.heard_ns = self.system.clocks.monotonic_ns()
        for entry in entries:
            if entry.tombstone > floor:
                floor = entry.tombstone
        if floor > member.floor:
            # The floor is durable in the same batch as the tombstone that raised it (law 4).
            item.floor = member.floor = floor
        item.token = (member, ready.after, ready.token)
        member.unpersisted += 1
        self.system.durability.add(item)

    def persist_alone(self, member: Member, item: WalItem) -> None:
        """Persist something of the host's own (a truncation mark) with the next batch."""
        item.token = (member, (), None)
        member.unpersisted += 1
        self.system.durability.add(item)
        self.system.durability.kick()

    def _role_changed(self, member: Member) -> None:
        self.system.leaderboard.note(member)
        if member.uid in self.system.damages.known and member.raft.mend is None:
            self.system.damages.sound(member)
        if member.leading and (member.raft.role != LEADER or member.raft.applied < member.raft.lead_index):
            self.system.effects.on_following(member)
        if member.raft.role == LEADER:
            if member.raft.applied < member.raft.lead_index:
                self.system.heartbeats.leads(member)
            elif member.sessions is not None:
                self.system.heartbeats.began(member)
        else:
            member.follow()
        member.wake()

    def persisted(self, items: Sequence[WalItem]) -> None:
        """Tell the cores that a batch is stable, and let go of what waited for it."""
        if self.system.failure is not None:
            return
        messages: list[Message] = []
        for item in items:
            member, after, token = cast(Token, item.token)
            member.unpersisted -= 1
            raft = member.raft
            if raft.stopped:
                continue
            if token is not None:
                raft.on_persisted(*token, messages)
                if member.proposals.early:
                    member.proposals.durable()
            if after:
                messages.extend(after)
            if raft.dirty:
                self.mark(member)
        if messages:
            self.system.peers.send(messages)
        self.turn()

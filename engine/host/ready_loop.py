"""One turn for all groups: propose, ready, send, make durable, apply.

Everything that changes a core (a frame, a message, a tick, a finished sync) only marks its member dirty; the turn
then drains every dirty member, so a thousand groups share one frame a peer, one fdatasync and one reply frame a
connection. Invariants: `Ready.messages` leave at once, `Ready.after` only when everything the member queued before it
is stable (law 2). The turn is plain code: no await inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, cast

import trio

from logyard.protocol.errors import NotLeader

from ..entry import Entry
from ..log.record import HardState
from ..log.wal import WalItem
from ..raft.messages import APPEND, SNAPSHOT, Message
from ..raft.ready import Ready
from ..raft.state import LEADER, UNTOLD
from ..replica.log_clock import Clocks
from ..replica.member import Member
from ..replica.proposals import Shape
from .entry_window import EntryWindow

PASSES_MAX = 64
QUIET_SECONDS = 0.0002
"""Input that comes this long after the last turn is drained at once; else it waits for what else is readable."""
TELL_SECONDS = 0.005
"""A commit index that no entry carried to the followers by then goes alone."""
TELL_FEW = 32
"""Groups that are told so at once. Where more wait, entries get this long for each of them to carry it, up to a
bound: a message of its own costs as much as an entry does."""
TELL_SECONDS_EACH = 0.0002
TELL_SECONDS_MAX = 0.2

Token: TypeAlias = tuple[Member, Sequence[Message], tuple[int, int, int, int] | None]
"""What comes back with a durable item: whose it is, what waited for it, what to tell the core (None: nothing)."""


class Cache(Protocol):
    """What the loop needs of the payload cache: it lets nothing go while a turn is under way."""

    def hold(self) -> None:
        """Let nothing go."""
        ...

    def release(self) -> None:
        """Let go of what is too much."""
        ...


class GroupCommit(Protocol):
    """What the loop needs of group commit."""

    def add(self, item: WalItem) -> None:
        """Queue an item; `persisted` hears of it when it is durable."""
        ...

    def kick(self) -> None:
        """Write what is queued."""
        ...


class Ticker(Protocol):
    """What the loop needs of the ticker."""

    resting: bool

    def stir(self) -> None:
        """Tick again: there is something to tick."""
        ...


class Peers(Protocol):
    """The way to the other nodes."""

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages, or lose them."""
        ...


class Driven(NamedTuple):
    """What a turn drives, when it is all there."""

    peers: Peers
    group_commit: GroupCommit
    apply: Callable[[Sequence[Member]], None]
    """Apply what is committed."""
    prepare: Callable[[Member, Message], bool]
    """Return whether a message with entries can go now; otherwise it is sent later."""
    log_time: Callable[[Member], int]
    seen: Callable[[int], None]
    """A client said something."""
    cut: Callable[[Member, int], None]
    """A log ends here: other entries take the place of those above."""
    hard_state_written: Callable[[Member], None]
    role_changed: Callable[[Member], None]
    """A member leads, follows another one, or takes part again."""
    ticker: Ticker


class ReadyLoop:
    """One node's. `mark` from anywhere on the loop; `run` is the one task that drains. Everybody below marks members,
    so what a turn drives comes by `drive`, when all is built. `active`: members to be looked at by the next tick.
    `queueing_s` and `groups`: see `EntryWindow`."""

    def __init__(
        self,
        shape: Shape,
        cache: Cache,
        active: set[Member],
        clocks: Clocks,
        queueing_s: float = 0.0,
        groups: int = 1,
    ) -> None:
        self._shape = shape
        self.window = EntryWindow(queueing_s, groups, self.mark)
        self._cache = cache
        self._active = active
        self._clocks = clocks
        self._driven: Driven
        self.dirty: list[Member] = []
        self.running = False
        self.over = False
        """Nothing is promised any more."""
        self.untold: list[Member] = []
        self._task: trio.lowlevel.Task | None = None
        self._held = self._due = False
        self._soon: Callable[[Callable[[], None]], None] | None = None
        self._ended = 0.0
        self._error: BaseException | None = None
        self._last_words: list[Callable[[], None]] = []
        self._telling = trio.lowlevel.ParkingLot()

    def drive(self, driven: Driven) -> None:
        """Take what turns drive from now on."""
        self._driven = driven

    def share(self, soon: Callable[[Callable[[], None]], None]) -> None:
        """Use `soon` for the turns of a busy node: it makes a call when each socket was looked at once more."""
        self._soon = soon

    def end(self) -> None:
        """Do nothing any more: this node stops."""
        self.over = True

    def mark(self, member: Member) -> None:
        """Mark a member that has something to do; the next turn does it."""
        if not member.dirty:
            member.mark()
            self.dirty.append(member)
            if self._task is not None and not self._held:
                self._wake()

    def rouse(self, member: Member) -> None:
        """Let a member be looked at in the next turn, and at the next tick."""
        self._active.add(member)
        self.mark(member)

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
        if not self.dirty or self.running or self._due:
            return
        if time.monotonic() - self._ended >= QUIET_SECONDS:
            self._turn_here()
        elif self._soon is not None:
            self._due = True
            self._soon(self._turn_due)
        else:
            self._wake()

    def _turn_due(self) -> None:
        self._due = False
        if not self.running:
            self._turn_here()

    def _turn_here(self) -> None:
        """Drain outside of the task that drains."""
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
            if len(untold) > TELL_FEW:
                untold = await self._leave_to_entries(untold)
            for member in untold:
                if not member.raft.stopped and member.raft.tell():
                    self.mark(member)

    async def _leave_to_entries(self, untold: list[Member]) -> list[Member]:
        """Give entries time to carry what is committed now; return those whose followers were told all, or nothing. The
        others are looked at again: more was committed since."""
        committed = [(member, member.raft.commit) for member in untold]
        await trio.sleep(min(TELL_SECONDS_MAX, len(untold) * TELL_SECONDS_EACH))
        due: list[Member] = []
        for member, commit in committed:
            raft = member.raft
            if raft.has_told(commit) and not raft.has_told(raft.commit):
                self._note_untold(member)
            else:
                due.append(member)
        return due

    def _note_untold(self, member: Member) -> None:
        member.raft.note_untold(len(self.untold) >= TELL_FEW)
        if not self.untold:
            self._telling.unpark_all()
        self.untold.append(member)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def turn(self) -> None:
        """Drain every dirty member. A sync done in place makes members dirty again, hence the passes; they are
        bounded."""
        if self.running:
            return
        if self.over:
            self.dirty.clear()
            return
        driven = self._driven
        self.running = True
        self._cache.hold()
        try:
            for _ in range(PASSES_MAX):
                if not self.dirty:
                    break
                batch, self.dirty = self.dirty, []
                messages: list[Message] = []
                # Groups with pieces of large payloads under way go after the others, in frames of their own.
                late: list[Message] = []
                for member in batch:
                    member.unmark()
                    if not member.raft.stopped:
                        self._drain(member, messages if member.uploads is None else late)
                if messages:
                    driven.peers.send(messages)
                if late:
                    driven.peers.send(late)
                driven.group_commit.kick()
                driven.apply(batch)
                if self.window.busy:
                    self.window.settle(batch)
            if self._last_words:
                calls, self._last_words = self._last_words, []
                for call in calls:
                    call()
        finally:
            self.running = False
            self._cache.release()
            if driven.ticker.resting:
                driven.ticker.stir()
            self._ended = time.monotonic()

    def _drain(self, member: Member, messages: list[Message]) -> None:
        driven = self._driven
        raft = member.raft
        proposals = member.proposals
        if proposals.own:
            if raft.role != LEADER:
                proposals.fail(NotLeader(raft.leader))
            else:
                proposals.propose_own(driven.log_time(member))
        if proposals.low and proposals.let_low():
            self.mark(member)
        if proposals.queue:
            if raft.role != LEADER:
                proposals.fail(NotLeader(raft.leader))
            elif self.window.closed and not (self.window.admits(member) or proposals.urgent):
                self.window.wait(member)
            elif not proposals.guarded or proposals.sort(member.sessions, driven.seen):
                proposals.propose(driven.log_time(member), self._shape)
                self.window.enter(member)
        if not raft.dirty:
            return
        handed = raft.hand_out(messages) if member.slow_sends is None else None
        ready = raft.ready() if handed is None else None
        if raft.untold == UNTOLD:
            self._note_untold(member)
        if handed is not None:
            entries, token = handed
            if entries:
                self._store(member, entries, None, 0, (member, (), token))
            self._active.add(member)
            return
        if ready is None:
            return
        if ready.truncated:
            member.overwritten(ready.truncated)
            driven.cut(member, ready.truncated - 1)
        if ready.role_changed:
            driven.role_changed(member)
        for message in ready.messages:
            kind = message.kind
            if (kind != APPEND and kind != SNAPSHOT) or driven.prepare(member, message):
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
                pending = member.reads.pop(context, None)
                if pending is not None:
                    pending.set(index)
        if ready.failed_reads and member.reads:
            for context in ready.failed_reads:
                pending = member.reads.pop(context, None)
                if pending is not None:
                    pending.fail(NotLeader(raft.leader))
        # Whether it is quiet is asked at the next tick: asking now would cost more than the tick.
        self._active.add(member)

    def _persist(self, member: Member, ready: Ready) -> None:
        hard_state = None
        if ready.hard_state is not None:
            hard_state = (*ready.hard_state, member.raft.commit)
            self._driven.hard_state_written(member)
        self._store(member, ready.entries, hard_state, ready.truncated, (member, ready.after, ready.token))

    def _store(
        self, member: Member, entries: Sequence[Entry], hard_state: HardState | None, truncate: int, token: Token
    ) -> None:
        floor = 0
        for entry in entries:
            if entry.tombstone > floor:
                floor = entry.tombstone
        # The floor is durable in the same batch as the tombstone that raised it (law 4).
        raised = member.persisting(floor, self._clocks.monotonic_ns() if entries else 0)
        self._driven.group_commit.add(WalItem(member.raft.uid, entries, hard_state, truncate, raised, token))

    def persist_alone(self, member: Member, item: WalItem) -> None:
        """Persist something of the host's own (a truncation mark) with the next batch."""
        item.belong((member, (), None))
        member.persisting()
        self._driven.group_commit.add(item)
        self._driven.group_commit.kick()

    def persisted(self, items: Sequence[WalItem]) -> None:
        """Tell the cores that a batch is stable, and let go of what waited for it."""
        if self.over:
            return
        messages: list[Message] = []
        for item in items:
            member, after, token = cast(Token, item.token)
            member.persisted()
            raft = member.raft
            if raft.stopped:
                continue
            if token is not None:
                raft.on_persisted(*token, messages)
                if member.proposals.early:
                    member.proposals.durable()
                if member is self.window.timed:
                    self.window.persisted(member)
            if after:
                messages.extend(after)
            if raft.dirty:
                self.mark(member)
        if messages:
            self._driven.peers.send(messages)
        # Within the turn that wrote in place the next pass takes what is dirty.
        if not self.running:
            self.turn()

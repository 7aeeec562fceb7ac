"""Effects: what a machine asks for beside its reply, performed by the host. Data in, nothing awaited.

Invariant (law 11): what is replicated state happens on every member, at every apply of its entry and so again at
replay; what leaves the node is done only by the leader, only for entries of its own term, only above the floor. So
each is done at most once, and `on_role` and `MachineState.lead` re-issue what must not be lost with a leader.
Called by `applier` after each entry and with the engine's own commands, by the ready loop at a change of role, and by
the ticker.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from logyard.protocol.errors import LogyardError
from logyard.protocol.pending import FAILED, Sink

from ..machine import (
    Append,
    Aux,
    Checkpoint,
    Context,
    Deliver,
    Effect,
    End,
    PayloadRange,
    Release,
    Send,
    check_effect,
)
from ..raft.state import LEADER
from .apply import REPLICATED, bounded, newest_of, says
from .member import HALTED, RUNNING, Member

log = logging.getLogger(__name__)

LEADERS = (Send, Deliver, Aux, Checkpoint, End)


class Sessions(Protocol):
    """The way to clients that listen."""

    def send(self, member: Member, index: int, effect: Send) -> None:
        """Send a message."""
        ...

    def deliver(self, member: Member, index: int, effect: Deliver) -> None:
        """Send records by reference."""
        ...

    def stir(self, uid: int) -> None:
        """Let who listens look again for the leader."""
        ...


class Commands(Protocol):
    """The way to commands of the engine's own."""

    def propose(self, member: Member, name: str, *arguments: object, sink: Sink = ...) -> None:
        """Queue one. Raises `NotLeader`, `GroupStopped`."""
        ...


def _outside(member: Member, name: str, *arguments: Any) -> Any:
    """Call an optional method that is no part of the replicated state: what it raises is reported, and stops nobody."""
    try:
        method = getattr(member.machine, name, None)
        return None if method is None else method(*arguments)
    except Exception:
        log.exception("group %s: %s of its machine failed", member.spec.name, name)
        return None


def _asked(member: Member, name: str, *arguments: Any) -> list[Effect]:
    """Return what an optional local method asks for. Whatever else it gives, a generator that raises too, is reported
    like what it raises: it is called by the node's own tasks."""
    found: list[Effect] = []
    try:
        method = getattr(member.machine, name, None)
        for effect in (() if method is None else method(*arguments)) or ():
            check_effect(effect)
            found.append(effect)
    except Exception:
        log.exception("group %s: %s of its machine failed", member.spec.name, name)
    return found


class _Again:
    """A sink that puts something back when it could not be proposed (a transfer is under way, say)."""

    __slots__ = ("_member", "_put", "_what")

    def __init__(self, member: Member, put: Callable[[Any], None], what: Any) -> None:
        self._member = member
        self._put = put
        self._what = what

    def reply(self, request: int, status: int, data: bytes) -> None:
        """Put it back when it failed: the state says at the next try whether it is still to be done."""
        if status == FAILED and self._member.leading:
            self._put(self._what)


class Effects:
    """Performs effects. `timed` are the members that lead and have timers or follow-ups pending, `ticking` those whose
    machine wants ticks. `released` books what died; `log_time` is that of a group led here."""

    def __init__(
        self,
        sessions: Sessions,
        released: Callable[[Member, Sequence[PayloadRange]], None],
        commands: Commands,
        log_time: Callable[[Member], int],
        take_snapshot: Callable[[Member, bool], Awaitable[object]],
        spawn: Callable[..., None],
    ) -> None:
        self.timed: set[Member] = set()
        self.ticking: set[Member] = set()
        self._sessions = sessions
        self._released = released
        self._commands = commands
        self._log_time = log_time
        self._take_snapshot = take_snapshot
        self._spawn = spawn

    def perform(self, member: Member, context: Context, effects: Sequence[Effect]) -> None:
        """Perform the effects of one entry, in order; called on every member. Raises `TypeError` for what is none."""
        outside: list[Effect] = []
        for effect in effects:
            # All of them first: what a halted member says of its payloads is of what it has applied.
            if type(effect) is not Release:
                check_effect(effect)
        for effect in effects:
            if type(effect) is Release:
                # Homes book exactly what lived: a second release of the same payloads would be counted twice, and a
                # file given up with others in it that live.
                dead = bounded(context, effect)
                if member.uploads is None:
                    self._released(member, member.release(context.index, *dead))
                else:
                    for first, end in member.uploads.spared(*dead):
                        self._released(member, member.release(context.index, first, end))
                continue
            if isinstance(effect, REPLICATED):
                self._keep(member, context, effect)
            else:
                outside.append(effect)
        if outside and member.leading and context.term == member.raft.term and context.index > member.floor:
            self._act(member, context.index, outside)

    def _keep(self, member: Member, context: Context, effect: Effect) -> None:
        """Change the replicated state beside the machine; a leader sees to what is to be proposed of it."""
        state = member.keep(context, effect)
        if member.leading and state.waits:
            self.timed.add(member)
            if state.todo:
                self.propose_due(member)

    def _act(self, member: Member, index: int, effects: Sequence[Effect]) -> None:
        """Do what leaves the node: the leader's part."""
        for effect in effects:
            if isinstance(effect, Send):
                self._sessions.send(member, index, effect)
            elif isinstance(effect, Deliver):
                try:
                    self._sessions.deliver(member, index, effect)
                except Exception:
                    # Refs that are none, which only a leader looks at: its state is as everywhere.
                    log.exception("group %s: what its machine delivers can't be found", member.spec.name)
            elif isinstance(effect, Aux):
                _outside(member, "on_aux", effect.data)
            elif isinstance(effect, End):
                if member.state == RUNNING and member.raft.role == LEADER:
                    self._commands.propose(member, "delete")
            elif isinstance(effect, Checkpoint):
                self._spawn(self._checkpoint, member, effect.keep_log)

    async def _checkpoint(self, member: Member, keep_log: bool) -> None:
        try:
            await self._take_snapshot(member, keep_log)
        except LogyardError as error:
            log.warning("group %s: no snapshot although its machine asked for one: %s", member.spec.name, error)

    def _act_local(self, member: Member, effects: Sequence[Effect]) -> None:
        """Perform effects of `on_role` and `on_tick`: they are no part of the log, so they must not change what is."""
        outside: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Append):
                # Key (0, 0) is never pending: applied whenever it is committed, and not re-issued when it gets lost.
                if member.state == RUNNING and member.raft.role == LEADER:
                    self._commands.propose(member, "append", 0, 0, effect.command)
            elif isinstance(effect, LEADERS):
                outside.append(effect)
            else:
                name = member.spec.name
                log.error("group %s: %r can't come from on_role or on_tick, it is ignored", name, effect)
        if outside and member.resolves:
            self._act(member, member.raft.applied, outside)

    def on_leading(self, member: Member) -> None:
        """Re-issue what was earlier leaders' to do: this member leads, and has applied all of theirs."""
        member.lead()
        state = member.kept
        if state is not None:
            state.lead()
            if state.waits:
                self.timed.add(member)
                self.propose_due(member)
        if says(member.machine, "on_tick"):
            self.ticking.add(member)
        self._act_local(member, _asked(member, "on_role", "leader"))

    def on_listening(self, member: Member, session: int) -> None:
        """Let the machine say once more what must not be missed: a session's client listens here, perhaps again."""
        self._act_local(member, _asked(member, "on_listen", session))

    def on_following(self, member: Member) -> None:
        """Give up the leader's part: this member led, and does no more."""
        self._sessions.stir(member.uid)
        member.lead_no_more()
        self.timed.discard(member)
        self.ticking.discard(member)
        if member.kept is not None:
            member.kept.follow()
        if member.state == RUNNING:
            _asked(member, "on_role", "follower")

    def tick(self) -> None:
        """Propose the timers that are due. Called by the ticker; costs only groups that have something pending."""
        for member in list(self.timed):
            state = member.kept
            if member.state == HALTED:
                # It goes on when what failed is skipped, and still leads then.
                continue
            if member.state != RUNNING or not member.leading or state is None or not state.waits:
                self.timed.discard(member)
            elif member.raft.role == LEADER:
                self.propose_due(member)

    def tick_machines(self) -> None:
        """Call `on_tick` of the machines that have it and lead. Called by the ticker every `machine_tick_ms`."""
        for member in list(self.ticking):
            if member.state == HALTED:
                continue
            if member.state != RUNNING or not member.leading:
                self.ticking.discard(member)
            elif member.raft.role == LEADER:
                now = self._log_time(member)
                context = Context(member.uid, member.raft.applied, member.raft.term, now, member.version)
                self._act_local(member, _asked(member, "on_tick", context))

    def propose_due(self, member: Member) -> None:
        """Propose what is due of the kept state. What can't be proposed now stays due."""
        state = member.kept
        if state is None or member.raft.role != LEADER or member.state != RUNNING:
            return
        for key in state.take_todo():
            command = state.appends.get(key)
            if command is not None:
                self._commands.propose(member, "append", *key, command, sink=_Again(member, state.put_append, key))
        due = state.due
        now = self._log_time(member) if due else 0
        while due and due[0][0] <= now:
            timer = heapq.heappop(due)
            if state.timers.get(timer[1]) == timer[0]:
                self._commands.propose(member, "timer", timer[1], timer[0], sink=_Again(member, state.put_timer, timer))


def describe(member: Member) -> dict[str, Any]:
    """Return what `describe` shows of the machine and of what is kept for it; never raises."""
    state = member.kept
    shown: dict[str, Any] = {"version": member.version, "newest": newest_of(member.machine)}
    if state is not None:
        shown |= {"timers": len(state.timers), "appends": len(state.appends), "monitors": len(state.monitors)}
    overview = _outside(member, "overview") if member.state == RUNNING else None
    if overview is not None:
        shown["overview"] = overview
    return shown

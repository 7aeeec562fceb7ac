"""Effects: what a machine asks for beside its reply, performed by the host. Data in, nothing awaited.

Invariant (law 11): what is replicated state happens on every member, at every apply of its entry and so again at
replay; what leaves the node is done only by the leader, only for entries of its own term, only above the floor. So
each is done at most once, and `on_role` and `MachineState.lead` re-issue what must not be lost with a leader.
Called by `applier` after each entry and with the engine's own commands, by `scheduler` at a change of role, and by
`ticker`.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from logyard.protocol.errors import LogyardError

from ..machine import (
    Append,
    Aux,
    Checkpoint,
    Context,
    Deliver,
    Effect,
    End,
    Position,
    Release,
    Send,
)
from ..raft.core import LEADER
from ..replica.apply import REPLICATED, keep
from ..replica.member import RUNNING, Member
from ..replica.proposals import FAILED

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)

LEADERS = (Send, Deliver, Aux, Checkpoint, End)


def perform(system: System, member: Member, context: Context, effects: Sequence[Effect]) -> None:
    """Perform the effects of one entry, in order; called on every member. Raises `TypeError` for what is no effect."""
    outside: list[Effect] = []
    for effect in effects:
        if type(effect) is Release:
            if member.uploads is None:
                release(system, member, context.index, effect.first, effect.end)
            else:
                for first, end in member.uploads.spared(effect.first, effect.end):
                    release(system, member, context.index, first, end)
        elif isinstance(effect, REPLICATED):
            _keep(system, member, context, effect)
        elif isinstance(effect, LEADERS):
            outside.append(effect)
        else:
            raise TypeError(f"{effect!r} is no effect")
    if outside and member.leading and context.term == member.raft.term and context.index > member.floor:
        _act(system, member, context.index, outside)


def release(system: System, member: Member, index: int, first: Position, end: Position) -> None:
    """What lives of a range is dead from `index` on; homes book exactly that, or a second release of the same
    payloads would be counted twice, and a file given up with others in it that live."""
    died = member.liveness.live_within(first, end)
    if died:
        member.liveness.release(first, end)
        member.last_release = index
        for one in died:
            system.storage.homes.released(member, one.first, one.end)


def _keep(system: System, member: Member, context: Context, effect: Effect) -> None:
    """Change the replicated state beside the machine; a leader sees to what is to be proposed of it."""
    state = keep(member, context, effect)
    if member.leading and state.waits:
        system.timed.add(member)
        if state.todo:
            propose_due(system, member)


def _act(system: System, member: Member, index: int, effects: Sequence[Effect]) -> None:
    """What leaves the node: the leader's part."""
    for effect in effects:
        if isinstance(effect, Send):
            system.delivery.send(member, index, effect)
        elif isinstance(effect, Deliver):
            system.delivery.deliver(member, index, effect)
        elif isinstance(effect, Aux):
            _outside(member, "on_aux", effect.data)
        elif isinstance(effect, End):
            if member.state == RUNNING and member.raft.role == LEADER:
                system.propose(member, "delete")
        elif isinstance(effect, Checkpoint):
            system.nursery.start_soon(_checkpoint, system, member, effect.keep_log)


async def _checkpoint(system: System, member: Member, keep_log: bool) -> None:
    try:
        await system.snapshots.take([member], keep_log)
    except LogyardError as error:
        log.warning("group %s: no snapshot although its machine asked for one: %s", member.spec.name, error)


def _outside(member: Member, name: str, *arguments: Any) -> Any:
    """Call an optional method that is no part of the replicated state: what it raises is reported, and stops nobody."""
    method = getattr(member.machine, name, None)
    if method is None:
        return None
    try:
        return method(*arguments)
    except Exception:
        log.exception("group %s: %s of its machine failed", member.spec.name, name)
        return None


def _act_local(system: System, member: Member, effects: Sequence[Effect] | None) -> None:
    """The effects of `on_role` and `on_tick`: they are no part of the log, so they must not change what is."""
    outside: list[Effect] = []
    for effect in effects or ():
        if isinstance(effect, Append):
            # Key (0, 0) is never pending: applied whenever it is committed, and not re-issued when it gets lost.
            system.propose(member, "append", 0, 0, effect.command)
        elif isinstance(effect, LEADERS):
            outside.append(effect)
        else:
            log.error("group %s: %r can't come from on_role or on_tick, it is ignored", member.spec.name, effect)
    if outside and member.resolves:
        _act(system, member, member.raft.applied, outside)


# Who leads


def on_leading(system: System, member: Member) -> None:
    """This member leads and has applied everything of earlier leaders: re-issue what was theirs to do."""
    member.leading = True
    state = member.kept
    if state is not None:
        state.lead()
        if state.waits:
            system.timed.add(member)
            propose_due(system, member)
    if hasattr(member.machine, "on_tick"):
        system.ticking.add(member)
    _act_local(system, member, _outside(member, "on_role", "leader"))


def on_listening(system: System, member: Member, session: int) -> None:
    """A session's client listens here, for the first time or again: what it must not miss can be said once more."""
    _act_local(system, member, _outside(member, "on_listen", session))


def on_following(system: System, member: Member) -> None:
    """This member led, and does no more."""
    system.delivery.stir(member.uid)
    member.leading = False
    system.timed.discard(member)
    system.ticking.discard(member)
    if member.kept is not None:
        member.kept.follow()
    if member.state == RUNNING:
        _outside(member, "on_role", "follower")


# What the leader proposes by itself


def tick(system: System) -> None:
    """Propose the timers that are due. Called by the ticker; costs only groups that have something pending."""
    for member in list(system.timed):
        state = member.kept
        if member.state != RUNNING or not member.leading or state is None or not state.waits:
            system.timed.discard(member)
        elif member.raft.role == LEADER:
            propose_due(system, member)


def tick_machines(system: System) -> None:
    """Call `on_tick` of the machines that have it and lead. Called by the ticker every `machine_tick_ms`."""
    for member in list(system.ticking):
        if member.state != RUNNING or not member.leading:
            system.ticking.discard(member)
        elif member.raft.role == LEADER:
            now = system.log_clock.now(member)
            context = Context(member.uid, member.raft.applied, member.raft.term, now, member.version)
            _act_local(system, member, _outside(member, "on_tick", context))


def propose_due(system: System, member: Member) -> None:
    """Propose what is due of the kept state. What can't be proposed now stays due."""
    state = member.kept
    if state is None or member.raft.role != LEADER or member.state != RUNNING:
        return
    todo, state.todo = state.todo, []
    for key in todo:
        command = state.appends.get(key)
        if command is not None:
            system.propose(member, "append", *key, command, sink=_Again(member, state.put_append, key))
    due = state.due
    now = system.log_clock.now(member) if due else 0
    while due and due[0][0] <= now:
        timer = heapq.heappop(due)
        if state.timers.get(timer[1]) == timer[0]:
            system.propose(member, "timer", timer[1], timer[0], sink=_Again(member, state.put_timer, timer))


class _Again:
    """A sink that puts something back when it could not be proposed (a transfer is under way, say)."""

    __slots__ = ("_member", "_put", "_what")

    def __init__(self, member: Member, put: Callable[[Any], None], what: Any) -> None:
        self._member = member
        self._put = put
        self._what = what

    def reply(self, request: int, status: int, data: bytes) -> None:
        """Failed before or while it was under way: the state says at the next try whether it is still to be done."""
        if status == FAILED and self._member.leading:
            self._put(self._what)


def describe(member: Member) -> dict[str, Any]:
    """What `describe` shows of the machine and of what is kept for it; never raises."""
    state = member.kept
    shown: dict[str, Any] = {"version": member.version, "newest": member.machine.version}
    if state is not None:
        shown |= {"timers": len(state.timers), "appends": len(state.appends), "monitors": len(state.monitors)}
    overview = _outside(member, "overview") if member.state == RUNNING else None
    if overview is not None:
        shown["overview"] = overview
    return shown

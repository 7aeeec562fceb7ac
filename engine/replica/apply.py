"""What an entry does to a group's replicated state: the pure part of apply, for a member and for an offline reader.

Pure and deterministic: (state, entry) -> replies and effects; nothing here knows a node. `applier` and `effects` run it
for members and do what leaves the node; `pipeline.directory` runs it over a stopped node's log, so that both always
come to the same state, the same releases and the same follow-ups.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from logyard.protocol.frame import SYSTEM

from ..entry import Entry, Frame, frames_of, records_in, system_command, timestamp_of, units_of
from ..machine import (
    Append,
    Applied,
    Batch,
    Context,
    Effect,
    Machine,
    Monitor,
    PayloadRange,
    PayloadRef,
    Position,
    Reject,
    Release,
    Timer,
)
from ..types import Spec
from .machine_state import MachineState
from .sessions import ApplyBatch, CommandFault, OnEnd, Sessions, apply_guarded, run_batch
from .uploads import Uploads

log = logging.getLogger(__name__)

REPLICATED = (Timer, Append, Monitor)


class Replicated(Protocol):
    """The replicated state of one group: its machine and what the engine keeps beside it. `leading`: who has it leads,
    and queues what it is to propose. `left_out`: ordinals that an operator had skipped, by index."""

    spec: Spec
    machine: Machine
    apply_batch: ApplyBatch | None
    version: int
    sessions: Sessions | None
    uploads: Uploads | None
    kept: MachineState | None
    leading: bool
    left_out: dict[int, tuple[int, ...]] | None


class UnknownVersion(Exception):
    """The log asks for a machine version that this process does not have."""

    def __init__(self, version: int, newest: int) -> None:
        super().__init__(f"needs machine version {version}, this node has {newest}; it waits for a newer logyard")
        self.version = version


OnDelete: TypeAlias = Callable[[Any, int], bytes]
"""Apply the deletion of a group, (state, index); its reply."""


def context_of(state: Replicated, entry: Entry) -> Context:
    """Where an entry of commands stands."""
    data = entry.data
    return Context(state.spec.uid, entry.index, entry.term, timestamp_of(data), state.version, records_in(data))


def run_machine(state: Replicated, context: Context, entry: Entry, frames: list[Frame]) -> Batch:
    """What the machine says to frames of one entry; what it refuses is released at that index."""
    if state.apply_batch is None:
        return _apply_each(state.machine, context, entry, frames)
    return run_batch(state.apply_batch, context, frames)


def run_guarded(
    state: Replicated,
    context: Context,
    entry: Entry,
    frames: list[Frame],
    on_delete: OnDelete,
    left_out: Sequence[int] = (),
) -> Batch:
    """An entry with frames of sessions or of the engine's own: the machine sees what it shall apply."""
    own: list[Effect] = []
    guarded = apply_guarded(
        state.sessions,
        context,
        frames,
        lambda context, shown: run_machine(state, context, entry, shown),
        lambda context, command: _on_system(state, context, command, own, on_delete),
        _session_end_of(state),
        left_out,
        state.uploads,
        entry.data,
    )
    state.sessions, state.uploads = guarded.sessions, guarded.uploads
    return Batch(guarded.batch.replies, [*own, *guarded.batch.effects]) if own else guarded.batch


def run_again(state: Replicated, context: Context, entry: Entry, on_delete: OnDelete) -> Batch:
    """Any entry of commands, without what an operator had skipped."""
    left_out = (state.left_out or {}).get(entry.index, ())
    frames = frames_of(entry.data)
    for frame in frames if left_out else ():
        if frame.flags & SYSTEM and frame.first in left_out:
            _on_left_out(state, system_command(frame))
    return run_guarded(state, context, entry, frames, on_delete, left_out)


def keep(state: Replicated, context: Context, effect: Effect) -> MachineState:
    """Change the replicated state beside the machine by one of the effects `REPLICATED`."""
    kept = state.kept
    if kept is None:
        kept = state.kept = MachineState()
    if isinstance(effect, Timer):
        kept.set_timer(effect.name, effect.due_ms, state.leading)
    elif isinstance(effect, Append):
        kept.add_append(context.index, effect.command, state.leading)
    elif isinstance(effect, Monitor):
        kept.monitors.add(effect.session)
    return kept


def claims_of(state: Replicated) -> Iterator[PayloadRange]:
    """What the machine needs, but for pieces of uploads that ended before it heard of them."""
    for needed in state.machine.live_refs():
        if state.uploads is None:
            yield needed
        else:
            yield from state.uploads.claims(needed)


def _session_end_of(state: Replicated) -> OnEnd | None:
    """The machine's optional `on_session_end(context, session)`, called for sessions that it monitors."""
    hook = getattr(state.machine, "on_session_end", None)
    if hook is None:
        return None
    return lambda context, session: hook(context, session).effects if _wants_end(state, session) else ()


def _wants_end(state: Replicated, session: int) -> bool:
    """Whether the machine monitors a session that has ended now; asked once, by the one who tells it."""
    kept = state.kept
    if kept is None or session not in kept.monitors:
        return False
    kept.monitors.discard(session)
    return True


def _apply_each(machine: Machine, context: Context, entry: Entry, frames: list[Frame]) -> Batch:
    """One `apply` a command, for machines without `apply_batch`. A frame's reply is that of its last command."""
    hashes: dict[int, tuple[int, bytes]] = {}
    packs: dict[int, bytes] = {}
    for unit in units_of(entry.data):
        if unit.records:
            packs[unit.first_ordinal] = unit.hash
        else:
            hashes[unit.first_ordinal] = (unit.length, unit.hash)
    replies: list[bytes | Reject] = []
    found: list[Effect] = []
    for frame in frames:
        ordinal = frame.first
        pack_hash = packs[ordinal]
        reply: bytes | Reject = b""
        for command in frame.split_commands():
            size, digest = hashes.get(ordinal, (0, pack_hash))
            ref = PayloadRef(context.uid, context.index, ordinal, context.term, size, digest)
            try:
                applied = machine.apply(context, command, (ref, *frame.pieces))
                reply = applied.reply
                found.extend(applied.effects)
            except Reject as reject:
                reply = reject
                # A refused command's payload is nobody's: it dies at this very index, or it would leak.
                found.append(Release(Position(context.index, ordinal), Position(context.index, ordinal + 1)))
            except Exception as error:
                raise CommandFault(ordinal) from error
            ordinal += 1
        replies.append(reply)
    return Batch(replies, found)


# The engine's own commands


def _on_system(
    state: Replicated, context: Context, command: list[Any], effects: list[Effect], on_delete: OnDelete
) -> bytes | Reject:
    """Apply a command of the engine's own, [name, ...arguments], that is not about sessions. Its effects go to
    `effects`, to be performed with the entry's.

    A `Reject` is its reply, like a machine's; what else a machine raises is a fault like in `apply`.
    """
    name, *arguments = command
    try:
        if name == "timer":
            return _on_timer(state, context, effects, *arguments)
        if name == "append":
            return _on_append(state, context, effects, *arguments)
        if name == "upgrade":
            return _on_upgrade(state, *arguments)
        if name == "skip":
            return _on_skip(state, *arguments)
        if name == "delete":
            return on_delete(state, context.index)
    except Reject as reject:
        return reject
    return Reject("unknown_command", f"this version of the engine knows no command {name!r}")


def _on_timer(state: Replicated, context: Context, effects: list[Effect], name: str, due: int) -> bytes:
    kept = state.kept
    if kept is None or kept.timers.get(name) != due:
        return b""
    del kept.timers[name]
    method = getattr(state.machine, "on_timer", None)
    return _took(effects, method(context, name)) if method is not None else b""


def _on_append(
    state: Replicated, context: Context, effects: list[Effect], index: int, number: int, command: bytes
) -> bytes:
    if index:
        kept = state.kept
        if kept is None or kept.appends.pop((index, number), None) is None:
            return b""
    return _took(effects, state.machine.apply(context, command, ()))


def _took(effects: list[Effect], applied: Applied) -> bytes:
    effects += applied.effects
    return applied.reply


def _on_upgrade(state: Replicated, to: int) -> bytes:
    """Apply ["upgrade", to]. Raises `UnknownVersion` where the machine is too old."""
    if to <= state.version:
        return b""
    if to > state.machine.version:
        raise UnknownVersion(to, state.machine.version)
    upgrade = getattr(state.machine, "upgrade", None)
    if upgrade is not None:
        upgrade(state.version, to)
    state.version = to
    log.info("group %s: machine version %d is in force", state.spec.name, to)
    return b""


def _on_skip(state: Replicated, index: int, ordinal: int) -> bytes | Reject:
    """The skip itself did its work when its command failed (`quarantine`); here it is only answered."""
    if ordinal in (state.left_out or {}).get(index, ()):
        return b""
    return Reject("not_failed", f"command ({index}, {ordinal}) did not fail here; nothing was skipped")


def _on_left_out(state: Replicated, command: list[Any]) -> None:
    """An operator had a command of the engine's own skipped: it is not asked for again."""
    name, *arguments = command
    kept = state.kept
    if kept is not None and name == "timer" and kept.timers.get(arguments[0]) == arguments[1]:
        del kept.timers[arguments[0]]
    elif kept is not None and name == "append":
        kept.appends.pop((arguments[0], arguments[1]), None)

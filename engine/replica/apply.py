"""What an entry does to a group's replicated state: the pure part of apply, for a member and for an offline reader.

Pure and deterministic: (state, entry) -> replies and effects; nothing here knows a node. `applier` and `effects` run it
for members and do what leaves the node; `pipeline.directory` runs it over a stopped node's log, so that both always
come to the same state, the same releases and the same follow-ups.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from logyard.protocol.errors import LogyardError
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
    check_reply,
    owned,
)
from ..types import Spec
from .machine_state import MachineState
from .sessions import CommandFault, OnEnd, Sessions, apply_guarded, batch_of, run_batch
from .skips import Skip
from .uploads import Uploads

log = logging.getLogger(__name__)

REPLICATED = (Timer, Append, Monitor)


class NotRestored(LogyardError):
    """A machine found no memory for its snapshot: nothing is wrong with what is stored, and none is given up."""

    def __init__(self, name: str, machine: str, index: int) -> None:
        super().__init__(
            f"group {name!r}: no memory for its machine {machine!r} to be restored from its snapshot at {index}; "
            "nothing of it was changed: start again when the process may have more"
        )


class Unfit(Exception):
    """A machine can't be made of its snapshot, whose bytes are whole: the program is at fault."""

    def __init__(self, index: int, error: Exception) -> None:
        super().__init__(
            f"this program can't restore its snapshot at {index} ({type(error).__name__}: {error}); nothing of it was "
            "changed: start a repaired program"
        )


class UnknownVersion(Exception):
    """The log asks for a machine version that this process does not have."""

    def __init__(self, version: int, newest: int) -> None:
        super().__init__(f"needs machine version {version}, this node has {newest}; it waits for a newer logyard")
        self.version = version


class AppliedBefore(Exception):
    """A skip names a command that this member has applied, as its program was another one than that of those that
    failed at it: it has what the others have not."""

    def __init__(self, index: int, ordinal: int) -> None:
        super().__init__(
            f"it skips command ({index}, {ordinal}), which was applied here: this member is not what the others are; "
            "restart this node, which leaves it out then, or have the member removed and added again (or, where all "
            "have applied it, skip this)"
        )


OnDelete: TypeAlias = Callable[[Any, int], bytes]
"""Apply the deletion of a group, (state, index); its reply."""


class Replicated:
    """The replicated state of one group: its machine and what the engine keeps beside it. `leading`: who has it leads,
    and queues what it is to propose. `left_out`: ordinals that an operator had skipped, by index: left out again
    whenever their entry is applied anew."""

    __slots__ = (
        "spec", "machine", "apply_batch", "version", "sessions", "uploads", "kept", "leading", "left_out",
    )  # fmt: skip

    def __init__(self, spec: Spec, machine: Machine) -> None:
        self.spec = spec
        self.leading = False
        self.left_out: dict[int, tuple[int, ...]] | None = None
        self.begin_anew(machine)

    def begin_anew(self, machine: Machine) -> None:
        """Take a fresh machine, with nothing beside it."""
        self.machine = machine
        # Asked once: a protocol's instance check costs more than applying a batch.
        self.apply_batch = batch_of(machine)
        # The machine version in force (`versions`).
        self.version = 1
        self.sessions: Sessions | None = None
        # Large payloads whose pieces no record owns yet.
        self.uploads: Uploads | None = None
        # What the machine asked the engine to keep: timers, follow-ups, monitored sessions.
        self.kept: MachineState | None = None

    def restore(
        self, version: int, sessions: Sessions | None, uploads: Uploads | None, kept: MachineState | None
    ) -> None:
        """Take what a snapshot has beside the machine."""
        self.version, self.sessions, self.uploads, self.kept = version, sessions, uploads, kept

    def forget_uploads(self, before: Position) -> None:
        """Drop what only a machine that claims dead payloads could ask for."""
        if self.uploads is not None and self.uploads.forget(before):
            self.uploads = None

    def leave_out(self, index: int, ordinal: int) -> None:
        """Skip a command: a committed skip names it."""
        if self.left_out is None:
            self.left_out = {}
        self.left_out[index] = (*self.left_out.get(index, ()), ordinal)

    def foretell(self, applied: int, skips: Iterable[Skip]) -> None:
        """Have of the entries above `applied` what these name be left out, and nothing else."""
        told = {index: ordinals for index, ordinals in (self.left_out or {}).items() if index <= applied}
        for one in skips:
            if one.entry > applied:
                told[one.entry] = (*told.get(one.entry, ()), one.ordinal)
        self.left_out = told

    def run_guarded(
        self,
        context: Context,
        entry: Entry,
        frames: list[Frame],
        on_delete: OnDelete,
        left_out: Sequence[int] = (),
    ) -> Batch:
        """Apply an entry with frames of sessions or of the engine's own: the machine sees what it shall apply."""
        own: list[Effect] = []
        guarded = apply_guarded(
            self.sessions,
            context,
            frames,
            lambda context, shown: run_machine(self, context, entry, shown),
            lambda context, command: _on_system(self, context, command, own, on_delete),
            _session_end_of(self),
            left_out,
            self.uploads,
            entry.data,
        )
        self.sessions, self.uploads = guarded.sessions, guarded.uploads
        return Batch(guarded.batch.replies, [*own, *guarded.batch.effects]) if own else guarded.batch

    def run_again(self, context: Context, entry: Entry, on_delete: OnDelete) -> Batch:
        """Apply any entry of commands, without what an operator had skipped."""
        left_out = (self.left_out or {}).get(entry.index, ())
        frames = frames_of(entry.data)
        if left_out:
            self.kept = self.kept or MachineState()
            self.kept.leave_out(entry.index, left_out, frames)
        for frame in frames if left_out else ():
            if frame.flags & SYSTEM and frame.first in left_out:
                _on_left_out(self, system_command(frame))
        return self.run_guarded(context, entry, frames, on_delete, left_out)

    def keep(self, context: Context, effect: Effect) -> MachineState:
        """Change the replicated state beside the machine by one of the effects `REPLICATED`."""
        kept = self.kept
        if kept is None:
            kept = self.kept = MachineState()
        if isinstance(effect, Timer):
            kept.set_timer(effect.name, effect.due_ms, self.leading)
        elif isinstance(effect, Append):
            kept.add_append(context.index, effect.command, self.leading)
        elif isinstance(effect, Monitor):
            kept.monitors.add(effect.session)
        return kept

    def upgrade(self, to: int) -> bytes:
        """Apply ["upgrade", to]. Raises `UnknownVersion` where the machine is too old."""
        if to <= self.version:
            return b""
        if to > newest_of(self.machine):
            raise UnknownVersion(to, newest_of(self.machine))
        upgrade = getattr(self.machine, "upgrade", None)
        if upgrade is not None:
            upgrade(self.version, to)
        self.version = to
        log.info("group %s: machine version %d is in force", self.spec.name, to)
        return b""


def newest_of(machine: Machine) -> int:
    """Return the newest version that a machine knows: 1 where it says something else than a number, which other groups
    of the node, and other nodes, shall not stumble over."""
    try:
        version: object = machine.version
    except Exception:
        log.exception("the version of a %s failed", type(machine).__name__)
        version = None
    return version if isinstance(version, int) and 0 < version < 1 << 32 else 1


def says(machine: Machine, name: str) -> bool:
    """Return whether a machine has an optional attribute that holds, or an optional method. What asking for it raises
    is reported: no."""
    try:
        return bool(getattr(machine, name, False))
    except Exception:
        log.exception("%s of a %s failed", name, type(machine).__name__)
        return False


def context_of(state: Replicated, entry: Entry) -> Context:
    """Return where an entry of commands stands."""
    data = entry.data
    return Context(state.spec.uid, entry.index, entry.term, timestamp_of(data), state.version, records_in(data))


def run_machine(state: Replicated, context: Context, entry: Entry, frames: list[Frame]) -> Batch:
    """Return what the machine says to frames of one entry; what it refuses is released at that index."""
    if state.apply_batch is None:
        return _apply_each(state.machine, context, entry, frames)
    return run_batch(state.apply_batch, context, frames)


def bounded(context: Context, release: Release) -> Release:
    """Return a machine's release, of nothing above its own entry: what is not written yet is not its to let go, and
    would be dead before somebody is told that it is stored."""
    top = Position(context.index + 1, 0)
    return release if release.end <= top else Release(min(release.first, top), top)


def claims_of(state: Replicated) -> Iterator[PayloadRange]:
    """Yield what the machine needs, but for pieces of uploads that ended before it heard of them."""
    for needed in state.machine.live_refs():
        if state.uploads is None:
            yield needed
        else:
            yield from state.uploads.claims(needed)


def _session_end_of(state: Replicated) -> OnEnd | None:
    """Return the machine's optional `on_session_end(context, session)`, called for sessions that it monitors."""
    hook = getattr(state.machine, "on_session_end", None)
    if hook is None:
        return None

    def on_end(context: Context, session: int) -> Sequence[Effect]:
        if not _wants_end(state, session):
            return ()
        try:
            ended: Applied = hook(context, session)
        except Reject:
            # As of a timer: it changes nothing, and the session has ended all the same.
            return ()
        return [owned(one) for one in ended.effects]

    return on_end


def _wants_end(state: Replicated, session: int) -> bool:
    """Return whether the machine monitors a session that has ended now; asked once, by the one who tells it."""
    kept = state.kept
    if kept is None or session not in kept.monitors:
        return False
    kept.monitors.discard(session)
    return True


def _apply_each(machine: Machine, context: Context, entry: Entry, frames: list[Frame]) -> Batch:
    """Call `apply` once a command, for machines without `apply_batch`. A frame's reply is that of its last command."""
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
                if type(reply) is not bytes:
                    reply = check_reply(reply)
                for effect in applied.effects:
                    found.append(effect if type(effect) is Release else owned(effect))
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
            return state.upgrade(*arguments)
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
    effects += [owned(one) for one in applied.effects]
    return applied.reply


def _on_skip(state: Replicated, index: int, ordinal: int) -> bytes:
    """Answer a skip, which itself did its work when its command failed, or was replayed (`quarantine`). Raises
    `AppliedBefore`."""
    if state.kept is None or not state.kept.was_left_out(index, ordinal):
        raise AppliedBefore(index, ordinal)
    return b""


def _on_left_out(state: Replicated, command: list[Any]) -> None:
    """Forget a command of the engine's own that an operator had skipped: it is not asked for again."""
    name, *arguments = command
    kept = state.kept
    if kept is not None and name == "timer" and kept.timers.get(arguments[0]) == arguments[1]:
        del kept.timers[arguments[0]]
    elif kept is not None and name == "append":
        kept.appends.pop((arguments[0], arguments[1]), None)

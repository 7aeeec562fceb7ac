"""Applies committed entries: metadata only, in index order, one call an entry (law 5).

A `Reject` is a reply. Any other exception of a machine halts that group (`halt`), and no other (law 7). What belongs
to a session or is the engine's own goes through `sessions` first; effects go to `effects`. Called in the turn by
`scheduler`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..entry import (
    COMMANDS,
    CONFIGURATION,
    ENTRY,
    GUARDED,
    SYSTEM,
    Entry,
    frames_of,
    records_in,
    system_command,
    timestamp_of,
    units_of,
)
from ..errors import Corrupt, LogyardError, NotLeader
from ..machine import Batch, Context, Effect, Frame, PayloadRef, Position, Reject, Release
from . import effects, halt
from .intake import answer
from .member import DELETED, OK, RUNNING, Member, Owed, Queued
from .sessions import CommandFault, OnEnd, apply_guarded, apply_next, run_batch

if TYPE_CHECKING:
    from .system import System

APPLY_BYTES = 4 * 1024 * 1024


class Applier:
    """Owns the way from a committed entry to replies, and two counters: `entries` applied and the processor time of
    that in `nanoseconds`, replay included."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.entries = 0
        self.nanoseconds = 0

    def apply_all(self, members: Sequence[Member]) -> None:
        """Apply what is committed in any of `members`."""
        began = 0
        for member in members:
            raft = member.raft
            if raft.commit > raft.applied and not raft.stopped:
                # Processor time of this thread: what the WAL's thread does meanwhile is none of it. Looked at once for
                # all, because it is a system call.
                began = began or time.thread_time_ns()
                before = raft.applied
                self.apply(member)
                self.entries += max(0, raft.applied - before)
        if began:
            self.nanoseconds += time.thread_time_ns() - began

    def apply(self, member: Member) -> None:
        """Apply what is committed. Entries that left memory (a restart) are read back from segments."""
        raft = member.raft
        try:
            if member.state != RUNNING and (member.state == DELETED or not halt.resume(self.system, member)):
                return
            while raft.applied < raft.commit:
                for entry in self.system.reader.log_entries(member, raft.applied + 1, raft.commit, APPLY_BYTES):
                    try:
                        self._entry(member, entry)
                    except Corrupt:
                        raise
                    except Exception as error:
                        if not halt.failed(self.system, member, entry, error):
                            return
                    if entry.kind == CONFIGURATION:
                        before = raft.base[1].nodes()
                        raft.on_applied(entry.index)
                        self.system.departures.applied(member, before)
                    else:
                        raft.on_applied(entry.index)
                        if member.state == DELETED:
                            # What was proposed after its deletion is answered when the replica goes.
                            return
        except Corrupt as error:
            self.system.damages.found(member, error)
            return
        except Exception as error:
            self.system.stop_member(member, f"{type(error).__name__} while applying entry {raft.applied + 1}: {error}")
            return
        member.wake()
        # Whether it is quiet now is asked at the next tick.
        self.system.active.add(member)
        # Frames of sessions wait until this leader has applied what was there before it.
        if raft.dirty or member.guarded:
            self.system.scheduler.mark(member)

    def _entry(self, member: Member, entry: Entry) -> None:
        if entry.kind != COMMANDS:
            owed = _settle(member, entry.index)
            if owed is not None:
                _fail(owed.frames, NotLeader(member.raft.leader))
            if entry.index == member.raft.lead_index:
                effects.on_leading(self.system, member)
            return
        data = entry.data
        _, flags, _, _, records, _, index, term, stamp, _ = ENTRY.unpack_from(data)
        if stamp > member.log_time:
            member.log_time = stamp
        frames = frames_of(data)
        context = Context(member.spec.uid, index, term, stamp, member.version, records)
        batch: Batch | None = None
        if not flags & GUARDED:
            batch = run_machine(member, context, entry, frames)
        elif member.sessions is not None and member.apply_batch is not None and len(frames) == 1:
            batch = apply_next(member.sessions, context, frames, member.apply_batch)
        if batch is None:
            batch = self._guarded(member, context, entry, frames)
        self._done(member, context, entry, batch)

    def _done(self, member: Member, context: Context, entry: Entry, batch: Batch) -> None:
        if batch.effects:
            effects.perform(self.system, member, context, batch.effects)
        # Only now: who waits for an entry that its machine could not apply is told so when the group stops.
        owed = _settle(member, entry.index)
        if owed is None:
            return
        if owed.term != entry.term:
            _fail(owed.frames, NotLeader(member.raft.leader))
            return
        for queued, reply in zip(owed.frames, batch.replies, strict=True):
            if isinstance(reply, Reject):
                answer(queued, reply)
            else:
                queued.sink.reply(queued.request, OK, reply)

    def apply_again(self, member: Member, entry: Entry) -> None:
        """Apply an entry of commands anew after a fault, or for a machine that is built anew, without what was
        skipped; who still waits for it is answered."""
        stamp = timestamp_of(entry.data)
        member.log_time = max(member.log_time, stamp)
        context = Context(member.uid, entry.index, entry.term, stamp, member.version, records_in(entry.data))
        left_out = (member.left_out or {}).get(entry.index, ())
        frames = frames_of(entry.data)
        for frame in frames:
            if frame.flags & SYSTEM and frame.first in left_out:
                effects.on_left_out(member, system_command(frame))
        self._done(member, context, entry, self._guarded(member, context, entry, frames, left_out))

    def try_frame(self, member: Member, entry: Entry, frame: Frame) -> None:
        """Let a machine that is thrown away afterwards apply one frame: no reply, no effects."""
        stamp = timestamp_of(entry.data)
        context = Context(member.uid, entry.index, entry.term, stamp, member.version, records_in(entry.data))
        self._guarded(member, context, entry, [frame])

    def _guarded(
        self, member: Member, context: Context, entry: Entry, frames: list[Frame], left_out: Sequence[int] = ()
    ) -> Batch:
        """An entry with frames of sessions or of the engine's own: the machine sees what it shall apply."""
        own: list[Effect] = []
        guarded = apply_guarded(
            member.sessions,
            context,
            frames,
            lambda context, shown: run_machine(member, context, entry, shown),
            lambda context, command: effects.on_system(self.system, member, context, command, own),
            session_end_of(member),
            left_out,
            member.uploads,
            entry.data,
        )
        if guarded.sessions is not None and member.sessions is None:
            self.system.heartbeats.began(member)
        member.sessions, member.uploads = guarded.sessions, guarded.uploads
        return Batch(guarded.batch.replies, [*own, *guarded.batch.effects]) if own else guarded.batch


def session_end_of(member: Member) -> OnEnd | None:
    """The machine's optional `on_session_end(context, session)`, called for sessions that it monitors."""
    hook = getattr(member.machine, "on_session_end", None)
    if hook is None:
        return None
    return lambda context, session: hook(context, session).effects if effects.wants_end(member, session) else ()


def run_machine(member: Member, context: Context, entry: Entry, frames: list[Frame]) -> Batch:
    """What the machine says to frames of one entry; what it refuses is released at that index."""
    if member.apply_batch is None:
        return _apply_each(member, context, entry, frames)
    return run_batch(member.apply_batch, context, frames)


def _settle(member: Member, index: int) -> Owed | None:
    """Who waits for an entry, if anybody does; from now on nobody."""
    owed = member.waiting.pop(index, None) if member.waiting else None
    if owed is not None:
        member.inflight_bytes -= owed.size
        member.budget.settle(owed.size)
    return owed


def _fail(frames: Sequence[Queued], error: LogyardError) -> None:
    for queued in frames:
        queued.fail(error)


def _apply_each(member: Member, context: Context, entry: Entry, frames: list[Frame]) -> Batch:
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
                applied = member.machine.apply(context, command, (ref, *frame.pieces))
                reply = applied.reply
                found.extend(applied.effects)
            except Reject as reject:
                reply = reject
                # A refused command's payload is nobody's: it dies at this very index (section 6, "nothing leaks").
                found.append(Release(Position(context.index, ordinal), Position(context.index, ordinal + 1)))
            except Exception as error:
                raise CommandFault(ordinal) from error
            ordinal += 1
        replies.append(reply)
    return Batch(replies, found)

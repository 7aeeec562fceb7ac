"""Applies committed entries: metadata only, in index order, one call an entry (law 5).

A `Reject` is a reply. Any other exception of a machine halts that group (`quarantine`), and no other. What belongs
to a session or is the engine's own goes through `sessions` first; effects go to `effects`. Called in the turn by
`ready_loop`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import trio

from logyard.protocol.errors import Busy, Corrupt, LogyardError, NotLeader, plain
from logyard.protocol.pending import OK

from ..entry import COMMANDS, CONFIGURATION, ENTRY, GUARDED, Entry, frames_of, timestamp_of
from ..machine import Batch, Context, Frame, Reject
from .apply import context_of, run_machine
from .effects import Effects
from .member import DELETED, RUNNING, Member
from .proposals import Proposal
from .quarantine import Log, Quarantine
from .sessions import apply_next

log = logging.getLogger(__name__)

APPLY_BYTES = 4 * 1024 * 1024
_new: Callable[[type[Context], tuple[Any, ...]], Context] = tuple.__new__
"""Makes a `Context` of all its fields, without the Python call that its class is."""


class Host(NamedTuple):
    """Whom an applier tells: `deleted` a group was deleted by its log, `configured` its members changed, from those
    given; `damaged`, `stop`: nothing more can be applied; `sessions_began`: it has a first session; `mark`: there is
    something to do, `stir`: at the next tick; `spawn` runs a task."""

    deleted: Callable[[Any, int], bytes]
    configured: Callable[[Member, set[int]], None]
    damaged: Callable[[Member, Corrupt], None]
    stop: Callable[[Member, str], None]
    sessions_began: Callable[[Member], None]
    is_here: Callable[[Member], bool]
    mark: Callable[[Member], None]
    stir: Callable[[Member], None]
    spawn: Callable[..., None]


class Applier:
    """Owns the way from a committed entry to replies, and two counters: `entries` applied and the processor time of
    that in `nanoseconds`, replay included."""

    def __init__(self, log: Log, effects: Effects, quarantine: Quarantine, host: Host) -> None:
        self._log = log
        self._effects = effects
        self._quarantine = quarantine
        self._host = host
        self._on_delete = host.deleted
        self.entries = 0
        self.nanoseconds = 0
        # Members whose next entries can't be read just now: each is tried again once, however many turns come.
        self._waiting: set[Member] = set()

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
            if member.state != RUNNING and (member.state == DELETED or not self._quarantine.resume(self, member)):
                return
            halt, replays, foreseen = None, raft.applied < member.replayed, False
            while raft.applied < raft.commit:
                entries = self._log.log_entries(member, raft.applied + 1, raft.commit, APPLY_BYTES)
                assert entries, "what is committed is in the log"
                if replays:
                    # Once: it sees all that there is, and so what later batches of this turn have.
                    if not foreseen:
                        halt, foreseen = self._quarantine.foresee(member, entries), True
                elif len(entries) > 1:
                    self._quarantine.note_skips(member, entries)
                for entry in entries:
                    if halt is not None and entry.index == halt.index:
                        member.suspend(halt)
                        return
                    try:
                        self._entry(member, entry)
                    except Corrupt:
                        raise
                    except Exception as error:
                        if not self._quarantine.failed(self, member, entry, error):
                            return
                    if entry.kind == CONFIGURATION:
                        before = raft.base[1].nodes()
                        raft.on_applied(entry.index)
                        self._host.configured(member, before)
                    else:
                        raft.on_applied(entry.index)
                        if member.state == DELETED:
                            # What was proposed after its deletion is answered when the replica goes.
                            return
        except Corrupt as error:
            self._host.damaged(member, error)
            return
        except Busy as error:
            log.warning("group %s: entries are applied later: %s", member.spec.name, error)
            if member not in self._waiting:
                self._waiting.add(member)
                self._host.spawn(self._later, member, error.retry_after)
            return
        except Exception as error:
            self._host.stop(member, f"{type(error).__name__} while applying entry {raft.applied + 1}: {plain(error)}")
            return
        if member.waiters:
            member.wake()
        # Whether it is quiet now is asked at the next tick.
        self._host.stir(member)
        # Frames of sessions wait until this leader has applied what was there before it.
        if raft.dirty or member.proposals.guarded:
            self._host.mark(member)

    async def _later(self, member: Member, seconds: float) -> None:
        """Go on with what could not be read for want of descriptors or memory."""
        await trio.sleep(seconds)
        self._waiting.discard(member)
        if not member.raft.stopped and self._host.is_here(member):
            self.apply_all((member,))

    def _entry(self, member: Member, entry: Entry) -> None:
        if entry.kind != COMMANDS:
            member.reach(timestamp_of(entry.data))
            owed = member.proposals.settle(entry.index)
            if owed is not None:
                _fail(owed.frames, NotLeader(member.raft.leader))
            if entry.index == member.raft.lead_index:
                self._effects.on_leading(member)
            return
        if member.left_out is not None and entry.index in member.left_out:
            self.apply_again(member, entry)
            return
        data = entry.data
        _, flags, _, _, records, _, index, term, stamp, _ = ENTRY.unpack_from(data)
        if stamp > member.log_time:
            member.reach(stamp)
        frames = frames_of(data)
        context = _new(Context, (member.spec.uid, index, term, stamp, member.version, records, ()))
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
            self._effects.perform(member, context, batch.effects)
        # Only now: who waits for an entry that its machine could not apply is told so when the group stops.
        owed = member.proposals.settle(entry.index)
        if owed is None:
            return
        if owed.term != entry.term:
            _fail(owed.frames, NotLeader(member.raft.leader))
            return
        for proposal, reply in zip(owed.frames, batch.replies, strict=True):
            if isinstance(reply, Reject):
                proposal.answer(reply)
            else:
                proposal.sink.reply(proposal.request, OK, reply)

    def apply_again(self, member: Member, entry: Entry) -> None:
        """Apply an entry of commands anew after a fault, or for a machine that is built anew, without what was
        skipped; who still waits for it is answered."""
        context = context_of(member, entry)
        member.reach(context.timestamp)
        began = member.sessions is None
        batch = member.run_again(context, entry, self._on_delete)
        self._table_began(member, began)
        self._done(member, context, entry, batch)

    def try_frame(self, member: Member, entry: Entry, frame: Frame) -> None:
        """Let a machine that is thrown away afterwards apply one frame: no reply, no effects."""
        self._guarded(member, context_of(member, entry), entry, [frame])

    def _guarded(self, member: Member, context: Context, entry: Entry, frames: list[Frame]) -> Batch:
        """Apply an entry with frames of sessions or of the engine's own."""
        began = member.sessions is None
        batch = member.run_guarded(context, entry, frames, self._on_delete)
        self._table_began(member, began)
        return batch

    def _table_began(self, member: Member, had_none: bool) -> None:
        if had_none and member.sessions is not None:
            self._host.sessions_began(member)


def _fail(frames: Sequence[Proposal], error: LogyardError) -> None:
    for proposal in frames:
        proposal.fail(error)

"""When a machine can not apply a command: the member halts at that entry, and goes on after a replicated skip (law 7).

Invariants: a halted member's core runs on (it votes, acknowledges, may lead) while nothing above the failed entry is
applied; what is left out is exactly the failed command's frame, on every member, at every replay; an entry that is
retried meets a machine rebuilt from its snapshot and the log, never one that a fault left half changed. A member that
waits for a newer machine halts in the same way, and nothing but a newer process lets it go on. Called by `applier`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from logyard.protocol.errors import Busy, Corrupt, GroupStopped, NotLeader, Refused, plain
from logyard.protocol.pending import Sink

from ..entry import COMMANDS, Entry, Frame, frames_of
from ..machine import Machine
from ..raft.state import LEADER
from ..snapshot.format import Snapshot
from . import snapshot_sections
from .apply import Unfit, UnknownVersion
from .member import HALTED, RUNNING, Halt, Member
from .sessions import CommandFault
from .skips import in_force, skips_in, undecided

log = logging.getLogger(__name__)

SCAN_BYTES = 4 * 1024 * 1024


class Log(Protocol):
    """Where entries are read."""

    def log_entries(self, member: Member, first: int, last: int, bytes_max: int) -> list[Entry]:
        """Return entries from `first`, at least one. Raises `Corrupt`."""
        ...


class Again(Protocol):
    """Who applies entries, and is asked to do it once more."""

    def apply_again(self, member: Member, entry: Entry) -> None:
        """Apply an entry of commands anew, without what was skipped; answer who still waits for it."""
        ...

    def try_frame(self, member: Member, entry: Entry, frame: Frame) -> None:
        """Let a machine that is thrown away afterwards apply one frame."""
        ...


class QueueOwn(Protocol):
    """The way to commands of the engine's own, for a leader that is halted."""

    def __call__(self, member: Member, name: str, *arguments: object, sink: Sink = ...) -> None:
        """Queue one."""
        ...


class Quarantine:
    """Halts members, and lets them go on. `load_snapshot` reads a group's stored snapshot."""

    def __init__(
        self,
        log: Log,
        create_machine: Callable[[str, dict[str, Any]], Machine],
        load_snapshot: Callable[[int], Snapshot],
        queue_own: QueueOwn,
    ) -> None:
        self._log = log
        self._create_machine = create_machine
        self._load_snapshot = load_snapshot
        self._queue_own = queue_own

    def foresee(self, member: Member, entries: Sequence[Entry] = ()) -> Halt | None:
        """Note the skips in what a start is to apply: what they name may not fail in this program, and is left out all
        the same. Return where to halt until it is known which of them are committed; None: nowhere. `entries`: those
        that were read of the log above what is applied; the others are read."""
        raft = member.raft
        skips = list(skips_in(entries))
        index = entries[-1].index + 1 if entries else raft.applied + 1
        while index <= raft.log.last_index:
            entries = self._log.log_entries(member, index, raft.log.last_index, SCAN_BYTES)
            skips += skips_in(entries)
            index = entries[-1].index + 1
        if not skips and not member.left_out:
            return None
        member.foretell(raft.applied, in_force([one for one in skips if one.at <= raft.commit]))
        waits = [one for one in undecided(skips, raft.commit) if raft.applied < one <= raft.commit]
        if not waits:
            return None
        reason = f"whether a command of entry {min(waits)} is skipped is not known yet"
        return Halt(min(waits), 0, 0, -1, reason, undecided=True)

    def note_skips(self, member: Member, entries: Sequence[Entry]) -> None:
        """Note the skips among committed entries that are applied together, as whoever catches up does."""
        skips = list(skips_in(entries))
        if skips:
            member.foretell(member.raft.applied, in_force(skips))

    def failed(self, again: Again, member: Member, entry: Entry, error: Exception) -> bool:
        """Judge what the machine raised at `entry`. True when committed skips let the entry be applied without what
        failed; else the member is halted. Raises `Corrupt` for damage found on the way; `Busy`: it is halted until
        `resume`."""
        while True:
            try:
                halt = self._diagnose(again, member, entry, error)
                if not self._skipped(member, halt):
                    log.error("group %s halted: %s", member.spec.name, halt.reason)
                    member.suspend(halt)
                    return False
                try:
                    self._retry(again, member, entry)
                    return True
                except (Busy, Corrupt):
                    raise
                except Exception as another:
                    error = another
            except Busy as short:
                # Nothing may be applied to what there is of the machine.
                halt = Halt(entry.index, 0, 0, -1, f"its machine could not be built anew: {short}")
                member.suspend(halt)
                member.stand_still(halt)
                raise

    def resume(self, again: Again, member: Member) -> bool:
        """Look for a skip of the command that halted a member in what was committed since; return True when it goes on.

        Raises `Corrupt` for damage found on the way; `Busy`: it stays halted until it is asked again.
        """
        halt = member.halt
        assert halt is not None
        if halt.undecided:
            if self.foresee(member) is not None:
                return False
            member.go_on()
            member.forget_halt()
            return True
        if halt.version or not (halt.half_built or self._skipped(member, halt)):
            return False
        try:
            entry = self._log.log_entries(member, halt.index, halt.index, SCAN_BYTES)[0]
            member.go_on()
            try:
                self._retry(again, member, entry)
            except (Busy, Corrupt):
                raise
            except Exception as error:
                if not self.failed(again, member, entry, error):
                    return False
        except Busy:
            # Who waits for the skip is answered when it has done its work.
            member.stand_still(halt)
            raise
        member.raft.on_applied(entry.index)
        return True

    def request(self, member: Member, index: int, ordinal: int, sink: Sink) -> None:
        """Propose the skip of a failed command; `sink` hears when it was applied. Raises `NotLeader`, `Refused`."""
        if member.state not in (RUNNING, HALTED):
            raise GroupStopped(f"group {member.spec.name!r} is {member.state}: {member.reason}")
        if member.raft.role != LEADER:
            raise NotLeader(member.raft.leader)
        halt = member.halt
        if member.state != HALTED or halt is None:
            raise Refused(f"group {member.spec.name!r} is not halted at any command: there is nothing to skip")
        if halt.version:
            name, reason = member.spec.name, halt.reason
            raise Refused(f"group {name!r} waits for another program, no command is at fault: {reason}")
        if halt.half_built or halt.undecided:
            until = "its machine is built anew" if halt.half_built else "it is known what was skipped"
            raise Refused(f"group {member.spec.name!r} goes on by itself when {until}")
        if not halt.covers(index, ordinal):
            raise Refused(f"group {member.spec.name!r} is halted at command {halt.place}, not at ({index}, {ordinal})")
        self._queue_own(member, "skip", index, ordinal, sink=sink)

    def _retry(self, again: Again, member: Member, entry: Entry) -> None:
        self.rebuild(again, member, entry.index - 1)
        again.apply_again(member, entry)
        member.forget_halt()

    def _skipped(self, member: Member, halt: Halt) -> bool:
        """Return whether a committed skip names what failed; it is then noted in `member.left_out`."""
        commit = member.raft.commit
        while halt.scanned < commit:
            entries = self._log.log_entries(member, halt.scanned + 1, commit, SCAN_BYTES)
            halt.searched(entries[-1].index, skips_in(entries))
        for one in in_force(halt.skips):
            if halt.covers(one.entry, one.ordinal) and not _used(member, one.entry, one.ordinal):
                member.leave_out(one.entry, one.ordinal)
                return True
        return False

    def _diagnose(self, again: Again, member: Member, entry: Entry, error: Exception) -> Halt:
        """Return which command failed, as exactly as the machine lets it be known."""
        if isinstance(error, CommandFault) and isinstance(error.__cause__, UnknownVersion):
            error = error.__cause__
        if isinstance(error, UnknownVersion):
            return Halt(entry.index, 0, 0, -1, f"entry {entry.index} {error}", error.version)
        if isinstance(error, Unfit):
            return Halt(entry.index, 0, 0, -1, str(error), max(1, member.version))
        frames = frames_of(entry.data)
        frame: Frame | None = None
        ordinal = -1
        cause: BaseException = error
        if isinstance(error, CommandFault):
            ordinal = error.ordinal
            cause = error.__cause__ or error
            frame = next(one for one in frames if one.first <= ordinal < one.first + one.records)
        elif len(frames) == 1:
            frame, ordinal = frames[0], frames[0].first
        else:
            frame = self._probe(again, member, entry, frames)
            ordinal = frame.first if frame is not None else -1
        first, records = (frame.first, frame.records) if frame is not None else (0, 0)
        place = f"({entry.index}, {ordinal})" if frame is not None else f"{entry.index} (its place is not known)"
        reason = f"{type(cause).__name__} while applying command {place}: {plain(cause)}"
        return Halt(entry.index, first, records, ordinal, reason)

    def _probe(self, again: Again, member: Member, entry: Entry, frames: list[Frame]) -> Frame | None:
        """Return the first frame of a batch that fails alone, tried one by one on a machine that is thrown away
        afterwards."""
        self.rebuild(again, member, entry.index - 1)
        for frame in frames:
            try:
                again.try_frame(member, entry, frame)
            except (Busy, Corrupt):
                raise
            except Exception:
                return frame
        return None

    def rebuild(self, again: Again, member: Member, through: int) -> None:
        """Build a fresh machine, and what is kept beside it, from the stored snapshot and the log up to `through`.

        Liveness stays: releases only add up, and those of what is replayed were made already. Nothing leaves the node.
        """
        member.begin_anew(self._create_machine(member.spec.machine, member.spec.arguments))
        index = 1
        if member.snapshot_index or member.snapshot_stored:
            # It may be newer than the one that the log begins at.
            snapshot = self._load_snapshot(member.uid)
            if snapshot.index > through:
                raise Corrupt.told(f"the stored snapshot is of entry {snapshot.index}, behind what is applied")
            snapshot_sections.restore(member, snapshot)
            index = snapshot.index + 1
        leading = member.leading
        member.lead_no_more()
        try:
            while index <= through:
                for entry in self._log.log_entries(member, index, through, SCAN_BYTES):
                    if entry.kind == COMMANDS:
                        again.apply_again(member, entry)
                    index = entry.index + 1
        finally:
            if leading:
                member.lead()
        if leading and member.kept is not None:
            member.kept.lead()


def _used(member: Member, index: int, ordinal: int) -> bool:
    """Return whether a skip was used: each does its work once, and one that did not help must not be tried for ever."""
    return ordinal in (member.left_out or {}).get(index, ())

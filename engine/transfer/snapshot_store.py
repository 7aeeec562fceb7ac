"""Taking snapshots (docs/life-of-a-snapshot.md).

A snapshot is metadata: machine sections and the exact live set. A leader offers it to a member that is too far behind
(`snapshot_sender`), which pulls what it lacks (`snapshot_receiver`) from any member.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import trio

from ..log.checkpoint_rows import Captured
from ..machine import Frozen, PayloadRange, Position
from ..ports import LivenessPort
from ..replica import snapshot_sections
from ..replica.apply import claims_of
from ..replica.member import RUNNING, Member
from ..snapshot import format as snapshot_format
from ..snapshot.format import Snapshot

log = logging.getLogger(__name__)

TAKE_CHUNK = 500


class _Frozen(NamedTuple):
    """A snapshot whose machine's sections are not written yet; `decode` reads its live set."""

    member: Member
    snapshot: Snapshot
    view: Frozen
    decode: Callable[[bytes], LivenessPort]
    keep_log: bool


def _write(one: _Frozen) -> tuple[Captured, int]:
    """Return the whole snapshot in bytes, and how many payloads its machine needs that it released. In a thread."""
    snapshot = one.snapshot
    live = one.decode(snapshot.live)
    strange = sum(not _lives(live, needed) for needed in one.view.payloads())
    snapshot = snapshot._replace(sections=snapshot_sections.merge(one.view.sections(), snapshot.sections))
    return Captured(one.member, snapshot, snapshot_format.split(snapshot), one.keep_log), strange


def _lives(live: LivenessPort, needed: PayloadRange | tuple[int, int]) -> bool:
    """Return whether all that is needed of one entry lives."""
    if isinstance(needed, PayloadRange):
        found = live.live_within(*needed)
        return len(found) == 1 and found[0] == needed
    index, ordinal = needed
    return not live.is_dead_range((index, ordinal), (index, ordinal + 1))


class Keeper(Protocol):
    """What stores snapshots, and the logs above them."""

    async def store_snapshots(self, captured: Sequence[Captured]) -> None:
        """Make snapshots durable; then the logs below them may go (invariant 3)."""
        ...

    def let_log_go(self, member: Member) -> None:
        """Keep the log up to a stored snapshot, which may have been a checkpoint, no longer."""
        ...


class SnapshotStore:
    """The taking. `decode` reads a live set, `settle` returns when the batch under way is durable, `stop` stops a
    member for a reason."""

    def __init__(
        self,
        keeper: Keeper,
        decode: Callable[[bytes], LivenessPort],
        settle: Callable[[], Awaitable[None]],
        stop: Callable[[Member, str], None],
    ) -> None:
        self.taken = 0
        # Ranges that a machine named as live after releasing some of them; 0 unless a machine is wrong.
        self.mismatches = 0
        self._keeper = keeper
        self._decode = decode
        self._settle = settle
        self._stop = stop

    async def take(self, members: Sequence[Member], keep_log: bool = False) -> dict[str, Any]:
        """Snapshot what advanced since its last one; durable when this returns. Members that may not (law 4) are left
        out. `keep_log`: a checkpoint, the log below it stays until a snapshot without it."""
        taken = size = skipped = 0
        for at in range(0, len(members), TAKE_CHUNK):
            captured: list[Captured] = []
            frozen: list[_Frozen] = []
            chunk = members[at : at + TAKE_CHUNK]
            if any(member.raft.applied > member.raft.log.stable for member in chunk):
                # A quorum may commit what is not durable here yet; a snapshot of it would promise too much.
                await self._settle()
            for member in chunk:
                if member.state != RUNNING or not member.resolves or member.raft.applied > member.raft.log.stable:
                    skipped += 1
                elif member.raft.applied > member.snapshot_index:
                    one = self._state_of(member, keep_log)
                    if isinstance(one, _Frozen):
                        frozen.append(one)
                    elif one is not None:
                        captured.append(one)
                elif not keep_log and member.compactable < member.snapshot_index:
                    self._keeper.let_log_go(member)
            for view in frozen:
                captured += await self._written(view)
            await self._keeper.store_snapshots(captured)
            taken += len(captured)
            self.taken += len(captured)
            await trio.lowlevel.checkpoint()
        size = sum(member.snapshot_bytes for member in members)
        return {"taken": taken, "skipped": skipped, "bytes": size}

    async def renew(self, member: Member) -> bool:
        """Store what a member has in memory in place of a snapshot that can't be read; return False where it may
        not."""
        raft = member.raft
        if raft.applied > raft.log.stable:
            await self._settle()
        if member.state != RUNNING or not member.resolves or raft.mend is not None or raft.applied > raft.log.stable:
            return False
        one = self._state_of(member, False)
        if one is None:
            return False
        found = await self._written(one) if isinstance(one, _Frozen) else [one]
        for captured in found:
            # It may stand where the damaged one does; and none of its chunks is taken to be there.
            member.doubt_snapshot(captured.snapshot.index)
            await self._keeper.store_snapshots([captured._replace(anew=True)])
        return bool(found) and member.snapshot_stored >= found[0].snapshot.index

    def compare(self, member: Member, index: int) -> int:
        """Count and report ranges that a machine still needs after it released them: a bug of its own."""
        before = self.mismatches
        live = list(member.liveness.live_ranges(index))
        for needed in claims_of(member):
            first, end = max(needed.first, Position(1, 0)), min(needed.end, Position(index + 1, 0))
            at = bisect_right(live, first, key=_first) - 1
            if first < end and (at < 0 or end > live[at].end):
                self.mismatches += 1
                log.error("group %s: the machine needs %s..%s, some of which it released", member.spec.name, first, end)
        return self.mismatches - before

    async def _written(self, one: _Frozen) -> list[Captured]:
        """Return a large state's snapshot, put into bytes by a thread; none when that failed, which stops its
        member."""
        member = one.member
        try:
            captured, strange = await trio.to_thread.run_sync(_write, one)
        except Exception as error:
            self._stop(member, f"{type(error).__name__} while writing a snapshot: {error}")
            return []
        if strange:
            self.mismatches += strange
            log.error("group %s: the machine needs %d payloads that it released", member.spec.name, strange)
        return [captured]

    def _state_of(self, member: Member, keep_log: bool) -> _Frozen | Captured | None:
        """Return a member's snapshot, or a view of it where the state is large; None where its machine failed, which
        stops it."""
        try:
            return self._freeze(member, keep_log) or self._capture(member, keep_log)
        except Exception as error:
            self._stop(member, f"{type(error).__name__} while taking a snapshot: {error}")
            return None

    def _freeze(self, member: Member, keep_log: bool) -> _Frozen | None:
        """Return a view of a large state; None of one that is written at once."""
        freeze = getattr(member.machine, "freeze", None)
        view = freeze() if freeze is not None and member.uploads is None else None
        return None if view is None else _Frozen(member, self._head(member, {}), view, self._decode, keep_log)

    def _capture(self, member: Member, keep_log: bool = False) -> Captured:
        self.compare(member, member.raft.applied)
        snapshot = self._head(member, member.machine.snapshot())
        inline_bytes = getattr(member.machine, "inline_bytes", snapshot_format.INLINE_BYTES)
        return Captured(member, snapshot, snapshot_format.split(snapshot, inline_bytes), keep_log)

    def _head(self, member: Member, machine: Mapping[str, bytes]) -> Snapshot:
        """Return a snapshot with the sections of the machine that are written, and the engine's own."""
        raft = member.raft
        index = raft.applied
        term = raft.log.term(index)
        assert term is not None, "what was applied is in the log or is the snapshot"
        own = snapshot_sections.sections(member)
        sections = snapshot_sections.merge(machine, own)
        # A section's own version: the machine may give some theirs, the engine's have that of their format.
        theirs: Mapping[str, int] = getattr(member.machine, "section_versions", {})
        if not all(isinstance(version, int) for version in theirs.values()):
            raise TypeError(f"versions of sections are whole numbers, not {theirs}")
        versions = {**theirs, **dict.fromkeys(own, snapshot_sections.VERSION)}
        return Snapshot(
            member.uid, index, term, raft.configuration_at(index).encode(), member.version, member.last_release,
            member.log_time, sections, member.liveness.encode_live_set(index), versions,
        )  # fmt: skip


def _first(one: PayloadRange) -> Position:
    return one.first

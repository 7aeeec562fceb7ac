"""Taking snapshots, and offering one to a member that is too far behind (docs/life-of-a-snapshot.md).

A snapshot is metadata: machine sections and the exact live set. The leader offers it and keeps it while the receiver
makes progress; the receiver pulls what it lacks (`receiving`) from any member (`serving`). One task an offer, which
ends with the transfer.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from logyard.protocol.errors import LogyardError

from ..machine import Frozen, PayloadRange, Position
from ..ports import LivenessPort
from ..raft.core import LEADER
from ..replica import snapshot_sections
from ..replica.apply import claims_of
from ..replica.member import RUNNING, Member
from ..snapshot import format as snapshot_format
from ..snapshot.format import Manifest, Snapshot
from ..transport.blobs import SNAPSHOT_DONE, SNAPSHOT_OFFER, SNAPSHOT_PROGRESS
from . import rows
from .books import Captured
from .pulling import LATE_PIECES

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)

TRANSFERS_MAX = 4
CHANNEL_MAX = 64
TAKE_CHUNK = 500


class _Frozen(NamedTuple):
    """A snapshot whose machine's sections are not written yet; `decode` reads its live set."""

    member: Member
    snapshot: Snapshot
    view: Frozen
    decode: Callable[[bytes], LivenessPort]
    keep_log: bool


def _write(one: _Frozen) -> tuple[Captured, int]:
    """In a thread: the whole snapshot in bytes, and how many payloads its machine needs that it released."""
    snapshot = one.snapshot
    live = one.decode(snapshot.live)
    strange = sum(live.is_dead_range((index, ordinal), (index, ordinal + 1)) for index, ordinal in one.view.payloads())
    snapshot = snapshot._replace(sections=snapshot_sections.merge(one.view.sections(), snapshot.sections))
    return Captured(one.member, snapshot, snapshot_format.split(snapshot), one.keep_log), strange


class Snapshots:
    """The taking, and the offering end of a transfer."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._next = 0
        # Ranges that a machine named as live after releasing some of them; 0 unless a machine is wrong.
        self.mismatches = 0
        self._limit = trio.CapacityLimiter(TRANSFERS_MAX)
        self._channels: dict[tuple[int, int], trio.MemorySendChannel[tuple[int, Mapping[str, Any]]]] = {}

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
                await self.system.durability.exclusive(_nothing)
            for member in chunk:
                if member.state != RUNNING or not member.resolves or member.raft.applied > member.raft.log.stable:
                    skipped += 1
                elif member.raft.applied > member.snapshot_index:
                    try:
                        if member.uploads is None and hasattr(member.machine, "freeze"):
                            frozen.append(self._freeze(member, keep_log))
                        else:
                            captured.append(self._capture(member, keep_log))
                    except Exception as error:
                        self.system.stop_member(member, f"{type(error).__name__} while taking a snapshot: {error}")
                elif not keep_log and member.compactable < member.snapshot_index:
                    self.system.storage.let_log_go(member)
            for one in frozen:
                captured += await self._written(one)
            await self.system.storage.store_snapshots(captured)
            taken += len(captured)
            self.system.counters.snapshots_taken += len(captured)
            await trio.lowlevel.checkpoint()
        size = sum(member.snapshot_bytes for member in members)
        return {"taken": taken, "skipped": skipped, "bytes": size}

    async def renew(self, member: Member) -> bool:
        """Store what a member has in memory in place of a snapshot that can't be read; False where it may not."""
        raft = member.raft
        if raft.applied > raft.log.stable:
            await self.system.durability.exclusive(_nothing)
        if member.state != RUNNING or not member.resolves or raft.mend is not None or raft.applied > raft.log.stable:
            return False
        if member.uploads is None and hasattr(member.machine, "freeze"):
            found = await self._written(self._freeze(member, False))
        else:
            found = [self._capture(member)]
        for captured in found:
            # It may stand where the damaged one does; and none of its chunks is taken to be there.
            member.snapshot_stored = min(member.snapshot_stored, captured.snapshot.index - 1)
            await self.system.storage.store_snapshots([captured._replace(anew=True)])
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
        """A large state's snapshot, put into bytes by a thread; none when that failed, which stops its member."""
        member = one.member
        try:
            captured, strange = await trio.to_thread.run_sync(_write, one)
        except Exception as error:
            self.system.stop_member(member, f"{type(error).__name__} while writing a snapshot: {error}")
            return []
        if strange:
            self.mismatches += strange
            log.error("group %s: the machine needs %d payloads that it released", member.spec.name, strange)
        return [captured]

    def _freeze(self, member: Member, keep_log: bool) -> _Frozen:
        head = self._head(member, {})
        machine: Any = member.machine
        return _Frozen(member, head, machine.freeze(), self.system.store.decode_liveness, keep_log)

    def _capture(self, member: Member, keep_log: bool = False) -> Captured:
        self.compare(member, member.raft.applied)
        snapshot = self._head(member, member.machine.snapshot())
        return Captured(member, snapshot, snapshot_format.split(snapshot), keep_log)

    def _head(self, member: Member, machine: Mapping[str, bytes]) -> Snapshot:
        """A snapshot with the sections of the machine that are written, and the engine's own."""
        raft = member.raft
        index = raft.applied
        term = raft.log.term(index)
        assert term is not None, "what was applied is in the log or is the snapshot"
        own = snapshot_sections.sections(member)
        sections = snapshot_sections.merge(machine, own)
        # A section's own version: the machine may give some theirs, the engine's have that of their format.
        versions = {**getattr(member.machine, "section_versions", {}), **dict.fromkeys(own, snapshot_sections.VERSION)}
        return Snapshot(
            member.uid, index, term, raft.configuration_at(index).encode(), member.version, member.last_release,
            member.log_time, sections, member.liveness.encode_live_set(index), versions,
        )  # fmt: skip

    # The leader's end

    def start_transfer(self, member: Member, node: int) -> None:
        """The core wants `node` brought up to a snapshot. One transfer a group and node at a time."""
        if member.transfers is None:
            member.transfers = set()
        if node not in member.transfers:
            member.transfers.add(node)
            self.system.nursery.start_soon(self._transfer, member, node)

    async def _transfer(self, member: Member, node: int) -> None:
        index = 0
        try:
            async with self._limit:
                if not member.raft.stopped and member.raft.role == LEADER:
                    index = await self._send(member, node)
                    self.system.counters.snapshots_sent += 1
        except LogyardError as error:
            log.warning("snapshot of group %s to node %d: %s", member.spec.name, node, error)
        finally:
            if member.transfers is not None:
                member.transfers.discard(node)
            if not member.raft.stopped and member.raft.role == LEADER:
                member.raft.snapshot_sent(node, index or member.snapshot_index, bool(index))
                self.system.active.add(member)
                self.system.scheduler.mark(member)

    async def _send(self, member: Member, node: int) -> int:
        """Offer a snapshot, and wait while the other node pulls what it lacks, from here or from others."""
        system = self.system
        # Below its payload floor a source takes a newer one first (law 4). One below the last release would do, by
        # tombstones; a newer one spares the receiver a time in which it resolves nothing.
        needed = max(member.raft.log.first_index - 1, member.floor, member.last_release, 1)
        if member.snapshot_index < needed:
            await self.take([member])
        if member.snapshot_index < max(member.raft.log.first_index - 1, member.floor, 1):
            raise LogyardError(f"this node has no snapshot at or above {needed} to send")
        data, manifest = await self._leased(member, node)
        self._next += 1
        request = self._next
        send, receive = trio.open_memory_channel[tuple[int, Mapping[str, Any]]](CHANNEL_MAX)
        self._channels[node, request] = send
        try:
            index = manifest.snapshot.index
            if not system.peers.send_blob(node, SNAPSHOT_OFFER, request, {"uid": member.uid, "index": index}, [data]):
                raise LogyardError(f"the link to node {node} is down or full")
            while True:
                kind, header = await self._answer(receive)
                if kind == SNAPSHOT_DONE:
                    break
                system.chunks.touch(member.uid, node, trio.current_time())
            if not header.get("ok"):
                raise LogyardError(f"node {node} refused it: {header.get('error')}")
            return index
        finally:
            del self._channels[node, request]
            system.chunks.sent(member.uid, node)

    async def _leased(self, member: Member, node: int) -> tuple[bytes, Manifest]:
        """The stored snapshot, its chunks kept for a node; between two commits, for the next one may drop some."""
        found: list[tuple[bytes, Manifest]] = []

        def read() -> Iterable[rows.Put]:
            data = self.system.storage.books.snapshot(member.uid).data
            found.append((data, snapshot_format.read_manifest(data, member.uid)))
            self.system.chunks.lease(member.uid, node, found[0][1], trio.current_time())
            return ()

        await self.system.storage.books.commit(read)
        return found[0]

    async def _answer(self, receive: Any) -> tuple[int, Mapping[str, Any]]:
        """Progress, or the end. Silence is judged by what the receiver may wait for one piece itself."""
        config = self.system.config
        late = 2 * LATE_PIECES * config.snapshot_piece_bytes / config.snapshot_bytes_per_s
        patience = config.snapshot_stall_ms / 500 + late
        with trio.move_on_after(patience):
            try:
                found: tuple[int, Mapping[str, Any]] = await receive.receive()
            except trio.EndOfChannel:
                raise LogyardError("the link was lost") from None
            return found
        raise LogyardError(f"no progress for {patience:g} s")

    def on_link_lost(self, node: int) -> None:
        """What was under way to a node may be lost: the offer ends now, not when an answer is overdue. The receiver
        goes on by itself, from whoever has it."""
        for key, channel in self._channels.items():
            if key[0] == node:
                channel.close()

    def on_blob(self, node: int, kind: int, request: int, header: Mapping[str, Any]) -> None:
        """Route what a receiver says to its offer."""
        channel = self._channels.get((node, request))
        if channel is None or kind not in (SNAPSHOT_PROGRESS, SNAPSHOT_DONE):
            return
        with suppress(trio.ClosedResourceError, trio.WouldBlock):
            channel.send_nowait((kind, header))


def _first(one: PayloadRange) -> Position:
    return one.first


def _nothing() -> None:
    """What `exclusive` runs for a caller that only wants the batch under way to be over."""

"""The giving end of a snapshot: offers it, and answers pulls (docs/life-of-a-snapshot.md).

A leader offers its snapshot to a member that is too far behind, and keeps it while the receiver makes progress; one
task an offer, which ends with the transfer. The receiver pulls what it lacks from any member: what another member
lacks of a snapshot, or of a damaged payload, from whoever has it.

Law 4, and why nothing need start over when something is released meanwhile. An answer covers a stretch of entries. It
brings every unit in it that lives *here* when it is built, and names d, the newest release applied here, and a digest
of what lives here of that stretch. Only a member that has applied all it knows to be missing (`resolves`) answers, and
d is applied here, hence committed. So whatever lives in the receiver's snapshot (at some index S) and is not in the
answer died by a release in (S, d]: the answer is its tombstone. The receiver raises its floor to d with the install
(`snapshot_receiver`), and until it has applied d it votes and acknowledges, but resolves nothing: exactly what a member
does that got the tombstone with an entry. Bytes are pinned before the first await, so what lived when the answer was
built is in it. A stretch of which something was lost here is not answered for: the receiver asks another member.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import trio

from logyard.protocol.errors import Corrupt, Gone, LogyardError

from ..config import SystemConfig
from ..entry import Entry, Unit, units_of
from ..log import checkpoint_rows as rows
from ..log.meta_rows import SnapshotRow
from ..ports import StorePort
from ..raft.state import LEADER
from ..ranges import Range, covered
from ..replica.member import HALTED, RUNNING, Member
from ..replica.reader import Located, Wanted
from ..snapshot import format as snapshot_format
from ..snapshot.format import Manifest
from ..transport.blobs import SNAPSHOT_DONE, SNAPSHOT_OFFER, SNAPSHOT_PIECE, SNAPSHOT_PROGRESS, SendBlob
from ..types import Buffer
from .chunks import Chunks
from .pull import LATE_PIECES, RANGES_MAX, live_digest
from .snapshot_store import SnapshotStore

log = logging.getLogger(__name__)

TRANSFERS_MAX = 4
CHANNEL_MAX = 64
SERVED_MAX = 4
"""Answers being built at a time; each is at most one piece of memory."""
WAITING_MAX = 64
"""Pulls of one node that may wait for that; an honest one has as many as it receives transfers."""
LOOKED_AT_MAX = 4096
"""Entries looked at for one answer: those without payload cost time as well."""
METADATA_BYTES = 4 << 20
"""Of the entries in one answer: half of what a blob's header may be. What one entry alone has above it is in the body,
if who asks can read that."""


class MetaBatch(Protocol):
    """What offers need of the meta store's batches."""

    async def commit(self, build: Callable[[], Iterable[rows.Put]]) -> None:
        """Call `build` between two commits, and store what it gives."""
        ...

    def snapshot(self, uid: int) -> SnapshotRow:
        """Return a group's stored snapshot, its chunks apart."""
        ...


class SnapshotSender:
    """The offering end of transfers. `sent`: snapshots that others have by now; `mark` has a member looked at in the
    next turn."""

    def __init__(
        self,
        config: SystemConfig,
        snapshots: SnapshotStore,
        meta_batch: MetaBatch,
        chunks: Chunks,
        send: SendBlob,
        spawn: Callable[..., None],
        mark: Callable[[Member], None],
    ) -> None:
        self.sent = 0
        self._config = config
        self._snapshots = snapshots
        self._meta_batch = meta_batch
        self._chunks = chunks
        self._send_blob = send
        self._spawn = spawn
        self._mark = mark
        self._next = 0
        self._limit = trio.CapacityLimiter(TRANSFERS_MAX)
        self._channels: dict[tuple[int, int], trio.MemorySendChannel[tuple[int, Mapping[str, Any]]]] = {}

    def start_transfer(self, member: Member, node: int) -> None:
        """Bring `node` up to a snapshot, as the core wants. One transfer a group and node at a time."""
        if member.begin_transfer(node):
            self._spawn(self._transfer, member, node)

    async def _transfer(self, member: Member, node: int) -> None:
        index = 0
        try:
            async with self._limit:
                if not member.raft.stopped and member.raft.role == LEADER:
                    index = await self._send(member, node)
                    self.sent += 1
        except LogyardError as error:
            log.warning("snapshot of group %s to node %d: %s", member.spec.name, node, error)
        finally:
            member.end_transfer(node)
            if not member.raft.stopped and member.raft.role == LEADER:
                member.raft.snapshot_sent(node, index or member.snapshot_index, bool(index))
                self._mark(member)

    async def _send(self, member: Member, node: int) -> int:
        """Offer a snapshot, and wait while the other node pulls what it lacks, from here or from others."""
        # Below its payload floor a source takes a newer one first (law 4). One below the last release would do, by
        # tombstones; a newer one spares the receiver a time in which it resolves nothing.
        needed = max(member.raft.log.first_index - 1, member.floor, member.last_release, 1)
        if member.snapshot_index < needed:
            await self._snapshots.take([member])
        if member.snapshot_index < max(member.raft.log.first_index - 1, member.floor, 1):
            raise LogyardError(f"this node has no snapshot at or above {needed} to send")
        data, manifest = await self._leased(member, node)
        self._next += 1
        request = self._next
        send, receive = trio.open_memory_channel[tuple[int, Mapping[str, Any]]](CHANNEL_MAX)
        self._channels[node, request] = send
        try:
            index = manifest.snapshot.index
            header: dict[str, Any] = {"uid": member.uid, "index": index}
            if not self._send_blob(node, SNAPSHOT_OFFER, request, header, [data]):
                raise LogyardError(f"the link to node {node} is down or full")
            while True:
                kind, said = await self._answer(receive)
                if kind == SNAPSHOT_DONE:
                    break
                self._chunks.touch(member.uid, node, trio.current_time())
            if not said.get("ok"):
                raise LogyardError(f"node {node} refused it: {said.get('error')}")
            return index
        finally:
            del self._channels[node, request]
            self._chunks.sent(member.uid, node)

    async def _leased(self, member: Member, node: int) -> tuple[bytes, Manifest]:
        """Return the stored snapshot, its chunks kept for a node; between two commits, for the next one may drop
        some."""
        found: list[tuple[bytes, Manifest]] = []

        def read() -> Iterable[rows.Put]:
            data = self._meta_batch.snapshot(member.uid).data
            found.append((data, snapshot_format.read_manifest(data, member.uid)))
            self._chunks.lease(member.uid, node, found[0][1], trio.current_time())
            return ()

        await self._meta_batch.commit(read)
        return found[0]

    async def _answer(self, receive: Any) -> tuple[int, Mapping[str, Any]]:
        """Wait for progress, or the end. Silence is judged by what the receiver may wait for one piece itself."""
        config = self._config
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
        """End the offers to a node now, not when an answer is overdue: what was under way may be lost. The receiver
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


class Reader(Protocol):
    """What answers need of the reader."""

    def payload_entries(self, member: Member, first: int, last: int) -> Iterator[Located]:
        """Yield the entries with payload, and where they are."""
        ...

    async def read(self, member: Member, wanted: Sequence[Wanted], mend: bool = True) -> list[Buffer]:
        """Return the bytes of each wanted range, verified; every home is pinned before the first await."""
        ...


class PullAnswers:
    """Every member's duty towards the others. `find` wakes a group's member, by the word of a node; `holds` says
    whether an entry's payload is in memory or in a WAL file that is still a home."""

    def __init__(
        self,
        config: SystemConfig,
        find: Callable[[int, int], Member | None],
        store: StorePort,
        reader: Reader,
        holds: Callable[[Entry | None], bool],
        chunks: Chunks,
        send: SendBlob,
        spawn: Callable[..., None],
    ) -> None:
        self.pieces = 0
        self.bytes = 0
        self._config = config
        self._find = find
        self._store = store
        self._reader = reader
        self._holds = holds
        self._chunks = chunks
        self._send = send
        self._spawn = spawn
        self._limit = trio.CapacityLimiter(SERVED_MAX)
        self._waiting: dict[int, int] = {}

    def on_pull(self, node: int, request: int, header: Mapping[str, Any]) -> None:
        """Answer a pull, in a task of its own."""
        if self._waiting.get(node, 0) >= WAITING_MAX:
            self._refuse(node, request, int(header["uid"]), "too many pulls at once")
            return
        self._waiting[node] = self._waiting.get(node, 0) + 1
        self._spawn(self._serve, node, request, header)

    async def _serve(self, node: int, request: int, header: Mapping[str, Any]) -> None:
        uid = int(header["uid"])
        try:
            async with self._limit:
                answer, body = await self._answer(node, header)
            self.pieces += 1
            self.bytes += sum(map(len, body))
            self._send(node, SNAPSHOT_PIECE, request, answer, body)
        except LogyardError as error:
            self._refuse(node, request, uid, str(error))
        finally:
            self._waiting[node] -= 1

    def _refuse(self, node: int, request: int, uid: int, reason: str) -> None:
        answer = {"uid": uid, "entries": [], "through": 0, "release": 0, "live": 0, "chunks": [], "error": reason}
        self._send(node, SNAPSHOT_PIECE, request, answer, ())

    async def _answer(self, node: int, header: Mapping[str, Any]) -> tuple[dict[str, Any], list[Buffer]]:
        uid = int(header["uid"])
        member = self._find(uid, node)
        if member is None or not _may_serve(member):
            raise LogyardError(f"group {uid:016x} does not run on this node")
        if node not in member.raft.configuration.nodes():
            raise LogyardError(f"node {node} is no member of group {uid:016x}")
        self._chunks.touch(uid, node, trio.current_time())
        limit = min(int(header["limit"]), self._config.snapshot_piece_bytes)
        chunks: list[tuple[bytes, bytes]] = []
        size = 0
        for name in header["chunks"]:
            if size >= limit:
                break
            data = await trio.to_thread.run_sync(self._chunks.read, uid, name)
            if data is None:
                raise Gone(f"chunk {name.hex()} is not stored any more")
            chunks.append((name, data))
            size += len(data)
        ranges = [(int(first), int(last)) for first, last in header["ranges"][:RANGES_MAX]]
        if not member.resolves:
            raise LogyardError("this member is below its payload floor")
        # From here to the pins of `read` nothing is awaited: what lives now is what is sent.
        batch, through = self._collect(member, ranges, limit - size) if size < limit else ([], 0)
        release = member.last_release
        live = live_digest(member.liveness, covered(ranges, through))
        try:
            body = await self._bodies(member, batch)
        except Corrupt:
            # What is damaged here may be whole elsewhere, and what comes before it there damaged: each gives its part.
            if len(batch) < 2:
                raise
            batch, through = batch[:1], batch[0][0].index
            live = live_digest(member.liveness, covered(ranges, through))
            body = await self._bodies(member, batch)
        metadata: list[bytes | int] = [one.data for one, _ in batch]
        beside = []
        if header.get("beside") and len(batch) == 1 and len(batch[0][0].data) > METADATA_BYTES:
            beside, metadata = [batch[0][0].data], [len(batch[0][0].data)]
        answer = {
            "uid": uid,
            "entries": [
                [one.index, one.term, data, [unit.number for unit in units]]
                for (one, units), data in zip(batch, metadata, strict=True)
            ],
            "through": through, "release": release, "live": live,
            "chunks": [[name, len(data)] for name, data in chunks], "error": None,
        }  # fmt: skip
        return answer, [*(data for _, data in chunks), *beside, *body]

    async def _bodies(self, member: Member, batch: Sequence[tuple[Located, list[Unit]]]) -> list[Buffer]:
        wanted = [Wanted(one, unit, 0, unit.length) for one, units in batch for unit in units]
        return await self._reader.read(member, wanted, mend=False) if wanted else []

    def _collect(
        self, member: Member, ranges: Sequence[Range], limit: int
    ) -> tuple[list[tuple[Located, list[Unit]]], int]:
        """Return what lives here of the first entries of `ranges`, about `limit` bytes and never more metadata than a
        header has room for but of one entry alone, and up to which index that is all: up to damage, if something comes
        before it."""
        applied = member.raft.applied
        batch: list[tuple[Located, list[Unit]]] = []
        size = metadata = looked = through = 0
        for first, last in ranges:
            last = min(last, applied)
            if first > last:
                break
            if self._store.lost(member.uid, first, last):
                raise LogyardError(f"payloads of entries {first} to {last} were lost here")
            entries = self._reader.payload_entries(member, first, last)
            while True:
                try:
                    located = next(entries, None)
                except Corrupt:
                    if not batch:
                        raise
                    return batch, batch[-1][0].index
                if located is None or located.index > last:
                    break
                looked += 1
                found = [(unit.number, unit.first_ordinal, unit.records) for unit in units_of(located.data)]
                live = member.liveness.live_units(located.index, found) if found else set()
                if live:
                    metadata += len(located.data)
                    if batch and metadata > METADATA_BYTES:
                        return batch, batch[-1][0].index
                    if located.home is None and not self._holds(located.entry):
                        raise LogyardError(f"the payload of entry {located.index} is neither stored nor released here")
                    units = [unit for unit in units_of(located.data) if unit.number in live]
                    batch.append((located, units))
                    size += sum(unit.length for unit in units)
                if size >= limit or looked >= LOOKED_AT_MAX:
                    return batch, located.index
            through = last
        if not through and ranges:
            raise LogyardError(f"this member has not applied entry {ranges[0][0]}")
        return batch, through


def _may_serve(member: Member) -> bool:
    """Return whether what a member has applied can be sent. One that is halted at a command has what was before it: the
    others may need it to form the quorum that skips the command."""
    halt = member.halt
    return member.state == RUNNING or (member.state == HALTED and halt is not None and not halt.half_built)

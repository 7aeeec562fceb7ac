"""Taking snapshots, and bringing a laggard up to one: offered, diffed, filled, installed (docs/life-of-a-snapshot.md).

A snapshot is metadata: machine sections and the exact live set. A transfer sends the snapshot, the receiver answers
with the live payloads
it lacks, those come in pieces of about 1 MiB, each durable in a generation before the next but one leaves; it is
installed only when
state and every live payload are durable (invariant 5). One task a transfer, which ends with it.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import trio

from ..entry import Unit, parse_entry, units_of
from ..errors import Corrupt, Gone, LogyardError, Unknown
from ..machine import PayloadRange, Position
from ..ports import SourceEntry
from ..raft.core import LEADER
from ..raft.membership import Configuration
from ..snapshot import format as snapshot_format
from ..snapshot.format import Snapshot
from ..types import Buffer
from . import replica
from .inbound import SNAPSHOT_DATA, SNAPSHOT_DONE, SNAPSHOT_NEED, SNAPSHOT_OFFER, SNAPSHOT_TAKEN
from .member import RUNNING, Member
from .reader import Located, Wanted
from .versions import UnknownVersion

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)

ANSWER_SECONDS = 20.0
PIECES_IN_FLIGHT = 2
TRANSFERS_MAX = 4
TAKE_CHUNK = 500


class Snapshots:
    """Both ends of a transfer, and the taking."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._next = 0
        # Ranges that a machine named as live after releasing some of them; 0 unless a machine is wrong.
        self.mismatches = 0
        self._limit = trio.CapacityLimiter(TRANSFERS_MAX)
        self._channels: dict[
            tuple[int, int], trio.MemorySendChannel[tuple[int, Mapping[str, Any], bytes | memoryview]]
        ] = {}

    async def take(self, members: Sequence[Member]) -> dict[str, Any]:
        """Snapshot what advanced since its last one; durable when this returns. Members that may not (law 4) are left
        out."""
        taken = size = skipped = 0
        for at in range(0, len(members), TAKE_CHUNK):
            captured: list[tuple[Member, Snapshot, bytes]] = []
            chunk = members[at : at + TAKE_CHUNK]
            if any(member.raft.applied > member.raft.log.stable for member in chunk):
                # A quorum may commit what is not durable here yet; a snapshot of it would promise too much.
                await self.system.durability.exclusive(_nothing)
            for member in chunk:
                if member.state != RUNNING or not member.resolves or member.raft.applied > member.raft.log.stable:
                    skipped += 1
                elif member.raft.applied > member.snapshot_index:
                    try:
                        captured.append(self._capture(member))
                    except Exception as error:
                        self.system.stop_member(member, f"{type(error).__name__} while taking a snapshot: {error}")
            await self.system.storage.store_snapshots(captured)
            taken += len(captured)
            self.system.counters.snapshots_taken += len(captured)
            await trio.lowlevel.checkpoint()
        size = sum(member.snapshot_bytes for member in members)
        return {"taken": taken, "skipped": skipped, "bytes": size}

    def _compare(self, member: Member, index: int) -> None:
        """Count and report a machine that still needs what it released (section 8): a bug of the machine's."""
        live = list(member.liveness.live_ranges(index))
        for needed in claims_of(member):
            first, end = max(needed.first, Position(1, 0)), min(needed.end, Position(index + 1, 0))
            at = bisect_right(live, first, key=_first) - 1
            if first < end and (at < 0 or end > live[at].end):
                self.mismatches += 1
                log.error("group %s: the machine needs %s..%s, some of which it released", member.spec.name, first, end)

    def _capture(self, member: Member) -> tuple[Member, Snapshot, bytes]:
        raft = member.raft
        index = raft.applied
        term = raft.log.term(index)
        assert term is not None, "what was applied is in the log or is the snapshot"
        self._compare(member, index)
        sections = replica.merge(member.machine.snapshot(), replica.sections(member))
        snapshot = Snapshot(
            member.uid, index, term, raft.configuration_at(index).encode(), member.version, member.last_release,
            member.log_time, sections, member.liveness.encode_live_set(index),
        )  # fmt: skip
        return member, snapshot, snapshot_format.encode(snapshot)

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
                for _ in range(3):
                    if member.raft.stopped or member.raft.role != LEADER:
                        break
                    try:
                        index = await self._send(member, node)
                        self.system.counters.snapshots_sent += 1
                        break
                    except Gone:
                        # Something in the set was released meanwhile: a newer snapshot does not name it.
                        await self.take([member])
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
        system = self.system
        # Below its own last release a snapshot names payloads that may be gone: a newer one is taken first (law 4).
        needed = max(member.raft.log.first_index - 1, member.floor, member.last_release, 1)
        if member.snapshot_index < needed:
            await self.take([member])
        if member.snapshot_index < needed:
            raise LogyardError(f"this node has no snapshot at or above {needed} to send")
        data = system.storage.books.snapshot(member.uid)
        found = snapshot_format.decode(data, member.uid)
        self._next += 1
        request = self._next
        send, receive = trio.open_memory_channel[tuple[int, Mapping[str, Any], bytes | memoryview]](64)
        self._channels[node, request] = send
        try:
            self._blob(node, SNAPSHOT_OFFER, request, {"uid": member.uid, "index": found.index}, [data])
            kind, header, _ = await self._answer(receive)
            if kind == SNAPSHOT_NEED:
                await self._fill(member, node, request, found, header["ranges"], receive)
                if member.last_release > found.index:
                    raise Gone("payloads of this snapshot were released while they were sent")
                self._blob(node, SNAPSHOT_DATA, request, {"uid": member.uid, "entries": [], "last": True}, [])
                while kind != SNAPSHOT_DONE:
                    kind, header, _ = await self._answer(receive)
            if not header.get("ok"):
                raise LogyardError(f"node {node} refused it: {header.get('error')}")
            return found.index
        finally:
            del self._channels[node, request]

    async def _fill(
        self, member: Member, node: int, request: int, snapshot: Snapshot, ranges: Sequence[Sequence[int]], answers: Any
    ) -> None:
        """Send the payloads the receiver named, at most `PIECES_IN_FLIGHT` pieces ahead of what it has made durable."""
        limit = self.system.config.snapshot_piece_bytes
        liveness = self.system.store.decode_liveness(snapshot.live)
        in_flight = 0
        for first, last in ranges:
            batch: list[tuple[Located, list[Unit]]] = []
            size = 0
            position = int(first)
            while position <= last:
                # Located anew for each piece: what is pinned is only what is being read.
                for located in self.system.reader.payload_entries(member, position, int(last)):
                    position = located.index + 1
                    units = units_of(located.data)
                    live = liveness.live_units(
                        located.index, [(one.number, one.first_ordinal, one.records) for one in units]
                    )
                    units = [unit for unit in units if unit.number in live]
                    if not units:
                        continue
                    batch.append((located, units))
                    size += sum(unit.length for unit in units)
                    if size >= limit:
                        break
                else:
                    position = int(last) + 1
                if not batch:
                    continue
                if in_flight >= PIECES_IN_FLIGHT:
                    await self._answer(answers)
                    in_flight -= 1
                wanted = [Wanted(one, unit, 0, unit.length) for one, units in batch for unit in units]
                body = await self.system.reader.read(member, wanted)
                rows = [[one.index, one.term, one.data, [unit.number for unit in units]] for one, units in batch]
                self._blob(node, SNAPSHOT_DATA, request, {"uid": member.uid, "entries": rows, "last": False}, body)
                in_flight += 1
                batch, size = [], 0
        while in_flight:
            await self._answer(answers)
            in_flight -= 1

    async def _answer(self, receive: Any) -> tuple[int, Mapping[str, Any], bytes | memoryview]:
        with trio.move_on_after(ANSWER_SECONDS):
            try:
                found: tuple[int, Mapping[str, Any], bytes | memoryview] = await receive.receive()
            except trio.EndOfChannel:
                raise LogyardError("the link was lost") from None
            if found[0] == SNAPSHOT_DONE and not found[1].get("ok"):
                raise LogyardError(f"the other node gave up: {found[1].get('error')}")
            return found
        raise LogyardError(f"no answer for {ANSWER_SECONDS:g} s")

    def _blob(self, node: int, kind: int, request: int, header: Mapping[str, Any], body: Sequence[Buffer]) -> None:
        if not self.system.peers.send_blob(node, kind, request, header, body):
            raise LogyardError(f"the link to node {node} is down or full")

    def on_link_lost(self, node: int) -> None:
        """What was under way to or from a node may be lost: its transfers end now, not when an answer is overdue."""
        for key, channel in self._channels.items():
            if key[0] == node:
                channel.close()

    # The receiver's end

    def on_blob(self, node: int, kind: int, request: int, header: Mapping[str, Any], body: bytes | memoryview) -> None:
        """Route a blob to its transfer; an offer starts one."""
        if kind == SNAPSHOT_OFFER:
            self.system.nursery.start_soon(self._receive, node, request, header, body)
            return
        # The two ends count requests apart: a receiver's channel lies under the negative number.
        key = (node, -request) if kind == SNAPSHOT_DATA else (node, request)
        channel = self._channels.get(key)
        if channel is None:
            return
        try:
            channel.send_nowait((kind, header, body))
        except trio.ClosedResourceError:
            pass
        except trio.WouldBlock:
            log.warning("node %d sent more of snapshot transfer %d than was agreed", node, request)

    async def _receive(self, node: int, request: int, header: Mapping[str, Any], data: bytes | memoryview) -> None:
        if (node, -request) in self._channels:
            log.warning("node %d offered snapshot transfer %d twice", node, request)
            return
        send, receive = trio.open_memory_channel[tuple[int, Mapping[str, Any], bytes | memoryview]](64)
        self._channels[node, -request] = send
        error = ""
        try:
            await self._take_in(node, request, int(header["uid"]), bytes(data), receive)
        except LogyardError as failed:
            error = str(failed)
            log.warning("snapshot from node %d for group %x: %s", node, header["uid"], error)
        finally:
            del self._channels[node, -request]
        answer = {"uid": header["uid"], "ok": not error, "error": error}
        self.system.peers.send_blob(node, SNAPSHOT_DONE, request, answer, ())

    async def _take_in(self, node: int, request: int, uid: int, data: bytes, receive: Any) -> None:
        member = self.system.hibernation.find(uid)
        if member is None:
            # A leader that compacted its log may have nothing but snapshots to say to a new member.
            self.system.inbound.ask(node, uid)
        if member is None or member.raft.stopped:
            raise LogyardError(f"group {uid:016x} does not run on this node")
        snapshot = snapshot_format.decode(data, uid)
        if snapshot.version > member.machine.version:
            raise LogyardError(f"{member.spec.name!r} {UnknownVersion(snapshot.version, member.machine.version)}")
        if member.raft.applied >= snapshot.index:
            return

        # What is applied and in a segment here keeps its payloads where they are; below a floor they may be missing.
        # What is
        # only in the open WAL files is asked for again: a log that starts over can't locate it any more.
        have = min(member.raft.applied, member.flushed) if member.resolves else 0
        ranges = self.system.store.missing(snapshot.live, have)
        self._blob(node, SNAPSHOT_NEED, request, {"uid": uid, "ranges": ranges}, [])
        while True:
            _, header, body = await self._answer(receive)
            rows = _rows(uid, header["entries"], memoryview(body))
            if rows:
                await self.system.storage.store_payloads(member, rows)
            if header["last"]:
                break
            self._blob(node, SNAPSHOT_TAKEN, request, {"uid": uid}, [])
        await self.system.storage.store_installed(member, snapshot, data)
        # What the core has to hand out comes first: entries of before and after must not meet in one `Ready`.
        self.system.scheduler.turn()
        if not member.raft.stopped and member.raft.applied < snapshot.index:
            self._install(member, snapshot, len(data), have)

    def _install(self, member: Member, snapshot: Snapshot, size: int, have: int) -> None:
        """State and payloads are durable: switch, in one step of the loop."""
        system = self.system
        if not member.raft.install_snapshot(
            snapshot.index, snapshot.term, Configuration.decode(snapshot.configuration)
        ):
            return
        before = member.liveness
        try:
            restore(member, snapshot, system)
        except Exception as error:
            system.stop_member(member, f"{type(error).__name__} while installing a snapshot: {error}")
            return
        # Whatever this member was halted at lies below: the snapshot's sender got over it.
        member.state, member.reason, member.halt, member.left_out = RUNNING, "", None, None
        system.storage.replaced(member, before, snapshot.index)
        system.storage.installed(member, snapshot, size, have)
        system.counters.snapshots_installed += 1
        member.fail_waiting(Unknown("a snapshot replaced this member's log; the command's outcome is unknown"))
        log.info("group %s: snapshot at %d installed", member.spec.name, snapshot.index)
        member.wake()
        system.active.add(member)
        system.scheduler.mark(member)


def _first(one: PayloadRange) -> Position:
    return one.first


def claims_of(member: Member) -> Iterator[PayloadRange]:
    """What the machine needs, but for pieces of uploads that ended before it heard of them."""
    for needed in member.machine.live_refs():
        if member.uploads is None:
            yield needed
        else:
            yield from member.uploads.claims(needed)


def _nothing() -> None:
    """What `exclusive` runs for a caller that only wants the batch under way to be over."""


def restore(member: Member, snapshot: Snapshot, system: System) -> None:
    """Machine and liveness as of a snapshot; used at recovery, too. Raises `UnknownVersion`, with liveness restored."""
    member.liveness = system.store.decode_liveness(snapshot.live)
    member.last_release = snapshot.release
    member.log_time = max(member.log_time, snapshot.timestamp)
    replica.restore(member, snapshot)


def _rows(uid: int, entries: Sequence[Sequence[Any]], body: memoryview) -> list[SourceEntry]:
    """The entries of one piece with their live units, whose bytes are sliced from `body`. Raises `Corrupt`; hashes
    are checked
    by the store."""
    where = f"snapshot piece of group {uid:016x}"
    rows = []
    at = 0
    for index, term, data, numbers in entries:
        entry = parse_entry(data, where)
        live = set(numbers)
        count = 0
        # (offset in the entry's payload, bytes) of each unbroken stretch of live units.
        parts: list[tuple[int, memoryview]] = []
        begin = start = end = 0
        for unit in units_of(entry.data):
            if unit.number not in live:
                continue
            count += 1
            if unit.offset != end or not parts:
                begin, start = at, unit.offset
                parts.append((start, body[at:at]))
            at += unit.length
            end = unit.offset + unit.length
            parts[-1] = (start, body[begin:at])
        if (entry.index, entry.term) != (index, term) or count != len(live) or at > len(body):
            raise Corrupt(where, at, "entries and bytes that add up", f"{len(body)} bytes")
        rows.append(SourceEntry(uid, entry.index, entry.term, bytes(data), live, _slicer(parts)))
    return rows


def _slicer(parts: list[tuple[int, memoryview]]) -> Callable[[int, int], Buffer]:
    """Bytes of an entry's payload by offset. A reader may ask for a stretch with released units in it, which it then
    ignores."""

    def read(offset: int, length: int) -> Buffer:
        found = bytearray()
        for start, data in parts:
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
            found = found or bytearray(length)
            low, high = max(start, offset), min(start + len(data), offset + length)
            if low < high:
                found[low - offset : high - offset] = data[low - start : high - start]
        return found

    return read

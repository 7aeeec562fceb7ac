"""Answers pulls: what another member lacks of a snapshot, or of a damaged payload, from whoever has it.

Law 4, and why nothing need start over when something is released meanwhile. An answer covers a stretch of entries. It
brings every unit in it that lives *here* when it is built, and names d, the newest release applied here, and a digest
of what lives here of that stretch. Only a member that has applied all it knows to be missing (`resolves`) answers, and
d is applied here, hence committed. So whatever lives in the receiver's snapshot (at some index S) and is not in the
answer died by a release in (S, d]: the answer is its tombstone. The receiver raises its floor to d with the install
(`receiving`), and until it has applied d it votes and acknowledges, but resolves nothing: exactly what a member does
that got the tombstone with an entry. Bytes are pinned before the first await, so what lived when the answer was built
is in it. A stretch of which something was lost here is not answered for: the receiver asks another member.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import trio

from logyard.protocol.errors import Corrupt, Gone, LogyardError

from ..entry import Unit, units_of
from ..log import meta_rows
from ..ranges import Range, covered
from ..replica.member import RUNNING, Member
from ..transport.blobs import SNAPSHOT_PIECE
from ..types import Buffer
from .pieces import RANGES_MAX, live_digest
from .reader import Located, Wanted

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)

SERVED_MAX = 4
"""Answers being built at a time; each is at most one piece of memory."""
WAITING_MAX = 64
"""Pulls of one node that may wait for that; an honest one has as many as it receives transfers."""
LOOKED_AT_MAX = 4096
"""Entries looked at for one answer: those without payload cost time as well."""


class Serving:
    """Every member's duty towards the others."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.pieces = 0
        self.bytes = 0
        self._limit = trio.CapacityLimiter(SERVED_MAX)
        self._waiting: dict[int, int] = {}

    def on_pull(self, node: int, request: int, header: Mapping[str, Any]) -> None:
        """Answer, in a task of its own."""
        if self._waiting.get(node, 0) >= WAITING_MAX:
            self._refuse(node, request, int(header["uid"]), "too many pulls at once")
            return
        self._waiting[node] = self._waiting.get(node, 0) + 1
        self.system.nursery.start_soon(self._serve, node, request, header)

    async def _serve(self, node: int, request: int, header: Mapping[str, Any]) -> None:
        uid = int(header["uid"])
        try:
            async with self._limit:
                answer, body = await self._answer(node, header)
            self.pieces += 1
            self.bytes += sum(map(len, body))
            self.system.peers.send_blob(node, SNAPSHOT_PIECE, request, answer, body)
        except LogyardError as error:
            self._refuse(node, request, uid, str(error))
        finally:
            self._waiting[node] -= 1

    def _refuse(self, node: int, request: int, uid: int, reason: str) -> None:
        answer = {"uid": uid, "entries": [], "through": 0, "release": 0, "live": 0, "chunks": [], "error": reason}
        self.system.peers.send_blob(node, SNAPSHOT_PIECE, request, answer, ())

    async def _answer(self, node: int, header: Mapping[str, Any]) -> tuple[dict[str, Any], list[Buffer]]:
        system, uid = self.system, int(header["uid"])
        member = system.hibernation.find(uid, by=node)
        if member is None or member.state != RUNNING:
            raise LogyardError(f"group {uid:016x} does not run on this node")
        if node not in member.raft.configuration.nodes():
            raise LogyardError(f"node {node} is no member of group {uid:016x}")
        system.chunks.touch(uid, node, trio.current_time())
        limit = min(int(header["limit"]), system.config.snapshot_piece_bytes)
        chunks: list[tuple[bytes, bytes]] = []
        size = 0
        for name in header["chunks"]:
            if size >= limit:
                break
            data = await trio.to_thread.run_sync(system.storage.books.meta.get, meta_rows.chunk_key(uid, name))
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
        answer = {
            "uid": uid,
            "entries": [[one.index, one.term, one.data, [unit.number for unit in units]] for one, units in batch],
            "through": through, "release": release, "live": live,
            "chunks": [[name, len(data)] for name, data in chunks], "error": None,
        }  # fmt: skip
        return answer, [*(data for _, data in chunks), *body]

    async def _bodies(self, member: Member, batch: Sequence[tuple[Located, list[Unit]]]) -> list[Buffer]:
        wanted = [Wanted(one, unit, 0, unit.length) for one, units in batch for unit in units]
        return await self.system.reader.read(member, wanted, mend=False) if wanted else []

    def _collect(
        self, member: Member, ranges: Sequence[Range], limit: int
    ) -> tuple[list[tuple[Located, list[Unit]]], int]:
        """What lives here of the first entries of `ranges`, about `limit` bytes, and up to which index that is all: up
        to damage, if something comes before it."""
        system, applied = self.system, member.raft.applied
        batch: list[tuple[Located, list[Unit]]] = []
        size = looked = through = 0
        for first, last in ranges:
            last = min(last, applied)
            if first > last:
                break
            if system.store.lost(member.uid, first, last):
                raise LogyardError(f"payloads of entries {first} to {last} were lost here")
            entries = system.reader.payload_entries(member, first, last)
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
                    if located.home is None and not system.storage.homes.holds(located.entry):
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

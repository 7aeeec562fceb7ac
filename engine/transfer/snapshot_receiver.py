"""The receiving end of a snapshot: offered -> diffed -> filled -> installed (docs/life-of-a-snapshot.md).

An offer becomes a durable *intent*. The receiver works out what it lacks (chunks of sections by name, payloads by
ranges of entries), pulls that in pieces from whoever has it, and each piece is durable, together with the intent that
says so, before it counts: after a cut or a restart at most the one piece under way is sent again. A newer offer takes
the intent over with what is there. It is installed only when state and every live payload are durable (invariant 5),
or released at their source: then the intent knows the release, and the floor rises to it in the very commit that stores
the snapshot (law 4, argued in `snapshot_sender`). One task a group, which ends with the transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import trio

from logyard.protocol.errors import Corrupt, LogyardError, Unknown

from ..entry import units_of
from ..ports import LivenessPort, SourceEntry, StorePort
from ..raft.configuration import Configuration
from ..ranges import Range, covered, subtract, union
from ..replica.apply import UnknownVersion, newest_of
from ..replica.member import Member
from ..snapshot import format as snapshot_format
from ..snapshot.format import Encoded, Manifest, Snapshot
from ..transport.blobs import SNAPSHOT_DONE, SNAPSHOT_PROGRESS, SendBlob
from .chunks import Chunks, Intent
from .pull import INDEX_MAX, RANGES_MAX, Piece, Pulls, Sources, live_digest

log = logging.getLogger(__name__)

RECEIVED_MAX = 4
CHUNKS_ASKED = 16
TELL_SECONDS = 1.0


class Offer:
    """A snapshot as it was offered, and the nodes to tell of it, with the request of each."""

    __slots__ = ("manifest", "data", "askers")

    def __init__(self, node: int, request: int, manifest: Manifest, data: bytes) -> None:
        self.manifest = manifest
        self.data = data
        self.askers = {node: request}


class Checkpoints(Protocol):
    """What the receiver needs of what stores snapshots."""

    def stored_through(self, member: Member) -> int:
        """Return up to which entry a log is in segments, and its payloads where the stored rows say."""
        ...

    async def store_installed(self, member: Member, snapshot: Snapshot, encoded: Encoded) -> None:
        """Store a snapshot from another member, with the homes of the payloads that came with it."""
        ...

    def installed(self, member: Member, before: LivenessPort, snapshot: Snapshot, size: int, keep: int) -> None:
        """Switch to it: payloads up to `keep` stay where they are, of what lived `before`."""
        ...

    async def settle_installed(self) -> None:
        """Store what died by it."""
        ...


class Host(NamedTuple):
    """What the receiver asks of whoever runs the members, and tells it."""

    find: Callable[[int], Member | None]
    """Return a group's member, woken."""
    ask: Callable[[int, int], None]
    """Ask a node for the definition of a group that is not here."""
    turn: Callable[[], None]
    """Let every core hand out what it has, now."""
    restore: Callable[[Member, Snapshot], None]
    """Set machine and liveness back to a snapshot."""
    stop: Callable[[Member, str], None]
    """Stop a member, for this reason."""
    mark: Callable[[Member], None]
    """Look at a member in the next turn."""
    store_payloads: Callable[[Member, Sequence[SourceEntry]], Awaitable[None]]
    """Make payloads that came from a peer durable, and their homes."""


class SnapshotReceiver:
    """All transfers to this node. `installed`: snapshots since the start; `resumed`: transfers that went on where an
    earlier one had stopped."""

    def __init__(
        self,
        members: Mapping[int, Member],
        store: StorePort,
        checkpoints: Checkpoints,
        chunks: Chunks,
        pulls: Pulls,
        host: Host,
        send: SendBlob,
        spawn: Callable[..., None],
    ) -> None:
        self.installed = 0
        self.resumed = 0
        self._members = members
        self._store = store
        self._checkpoints = checkpoints
        self._chunks = chunks
        self._pulls = pulls
        self._host = host
        self._send = send
        self._spawn = spawn
        self._limit = trio.CapacityLimiter(RECEIVED_MAX)
        self._offers: dict[int, Offer] = {}
        self._newer: dict[int, Offer] = {}
        self._told = 0.0

    def on_offer(self, node: int, request: int, header: Mapping[str, Any], body: bytes | memoryview) -> None:
        """Begin, join the transfer of the same snapshot, or let it take over from that of another."""
        uid, data = int(header["uid"]), bytes(body)
        try:
            offer = Offer(node, request, self._read(uid, data), data)
        except LogyardError as error:
            self._tell(uid, {node: request}, str(error))
            return
        present = self._offers.get(uid)
        if present is None:
            self._offers[uid] = offer
            self._spawn(self._run, uid)
            return
        new, old = offer.manifest.snapshot, present.manifest.snapshot
        if data == present.data:
            present.askers[node] = request
        elif new.index > old.index or self._leads(uid, node):
            waiting = self._newer.get(uid)
            if waiting is not None:
                self._tell(uid, waiting.askers, "a newer snapshot was offered")
            self._newer[uid] = offer
        else:
            self._tell(uid, offer.askers, "a newer snapshot is on its way")

    def _leads(self, uid: int, node: int) -> bool:
        member = self._members.get(uid)
        return member is not None and member.raft.leader == node

    def _read(self, uid: int, data: bytes) -> Manifest:
        """Return the manifest of an offer, judged as far as can be at once. Raises `Corrupt`."""
        try:
            manifest = snapshot_format.read_manifest(data, uid)
            Configuration.decode(manifest.snapshot.configuration)
        except LogyardError:
            raise
        except Exception as error:  # a checksum of nonsense may hold, and nonsense may raise anything
            raise Corrupt(
                f"snapshot of group {uid:016x}", 0, "a manifest", f"{type(error).__name__}: {error}"
            ) from error
        snapshot = manifest.snapshot
        if not 0 < snapshot.index < INDEX_MAX or not 0 <= snapshot.term < INDEX_MAX:
            raise Corrupt(f"snapshot of group {uid:016x}", 0, "an index that may be", snapshot.index)
        if not 0 <= snapshot.timestamp < INDEX_MAX:
            # Log time goes on from there, and has to fit into entries.
            raise Corrupt(f"snapshot of group {uid:016x}", 0, "a log time that may be", snapshot.timestamp)
        self._store.decode_liveness(snapshot.live)
        return manifest

    def _tell(self, uid: int, askers: Mapping[int, int], error: str) -> None:
        answer = {"uid": uid, "ok": not error, "error": error}
        for node, request in askers.items():
            self._send(node, SNAPSHOT_DONE, request, answer, ())

    async def _run(self, uid: int) -> None:
        """Take in offers until none is left: a newer one goes on where the last one stopped."""
        try:
            while True:
                offer, error = self._offers[uid], ""
                try:
                    async with self._limit:
                        await self._take_in(uid, offer)
                except (LogyardError, OSError) as failed:
                    error = str(failed)
                    log.warning("snapshot at %d for group %x: %s", offer.manifest.snapshot.index, uid, error)
                self._tell(uid, offer.askers, error)
                newer = self._newer.pop(uid, None)
                if newer is None:
                    return
                self._offers[uid] = newer
        finally:
            del self._offers[uid]

    async def _take_in(self, uid: int, offer: Offer) -> None:
        member = self._host.find(uid)
        if member is None:
            # A leader that compacted its log may have nothing but snapshots to say to a new member.
            for node in offer.askers:
                self._host.ask(node, uid)
        if member is None or member.raft.stopped:
            raise LogyardError(f"group {uid:016x} does not run on this node")
        manifest, snapshot = offer.manifest, offer.manifest.snapshot
        if snapshot.version > newest_of(member.machine):
            raise LogyardError(f"{member.spec.name!r} {UnknownVersion(snapshot.version, newest_of(member.machine))}")
        if member.raft.applied >= snapshot.index:
            await self._chunks.abandon(uid)
            return
        # What is applied and in a segment here keeps its payloads where they are; below a floor they may be missing.
        # What is only in the open WAL files is asked for again: a log that starts over can't locate it any more.
        have = min(member.raft.applied, self._checkpoints.stored_through(member)) if member.resolves else 0
        wanted = self._store.missing(snapshot.live, have)
        intent = Intent(snapshot.index, snapshot.term)
        if wanted or manifest.chunks or uid in self._chunks.intents:
            intent, resumed = await self._chunks.intend(uid, manifest, self._store.lost)
            self.resumed += resumed
        configuration = Configuration.decode(snapshot.configuration)
        # Who became a member after the snapshot is asked last: nobody here knows of it yet.
        sources = Sources((*offer.askers, *self._pulls.others(configuration), *self._pulls.neighbours()))
        await self._pull_chunks(member, offer, sources)
        await self._pull_payloads(member, offer, intent, sources, wanted)
        chunks = self._chunks
        state = await trio.to_thread.run_sync(snapshot_format.assemble, manifest, lambda name: chunks.read(uid, name))
        if member.raft.stopped or uid in self._newer:
            raise LogyardError("a newer snapshot was offered")
        if snapshot.index <= member.raft.commit:
            # The log came first: this would be stored and not installed.
            await self._chunks.abandon(uid)
            return
        # With the snapshot, in one commit: the releases that explain what did not come (law 4).
        member.raise_floor(intent.release)
        encoded = Encoded(offer.data, {}, manifest.chunks, len(offer.data) + manifest.chunk_bytes)
        await self._checkpoints.store_installed(member, snapshot, encoded)
        if self._members.get(uid) is not member:
            # It fell asleep, or another one was made: what that has, and said, is not this one's to start over.
            raise LogyardError(f"group {uid:016x} has another member on this node by now")
        # Its row went in the same commit.
        self._chunks.forget(uid)
        # What the core has to hand out comes first: entries of before and after must not meet in one `Ready`.
        self._host.turn()
        if member.raft.stopped:
            return
        if member.raft.applied < snapshot.index:
            self._install(member, state, encoded.size, have)
            await self._checkpoints.settle_installed()
        elif member.snapshot_index < snapshot.index:
            # The log came while it was being stored: it says what that does all the same.
            member.covered(snapshot.index, snapshot.term, encoded.size)

    async def _ask(
        self, member: Member, offer: Offer, sources: Sources, ranges: list[Range], names: list[bytes]
    ) -> tuple[int, Piece]:
        """Return one piece from whoever has it, and who that was. Raises the last peer's reason when nobody does."""
        uid = member.uid
        reason: LogyardError = LogyardError("no member to ask")
        while True:
            if uid in self._newer:
                raise LogyardError("a newer snapshot was offered")
            if member.raft.stopped:
                raise LogyardError(f"group {uid:016x} does not run on this node any more")
            sources.include(offer.askers)
            node = sources.next()
            if not node:
                raise reason
            try:
                return node, await self._pulls.ask(node, uid, offer.manifest.snapshot.index, ranges, names)
            except LogyardError as error:
                sources.fail(node)
                reason = error

    def _progress(self, uid: int, offer: Offer) -> None:
        """Tell that a piece is durable; who offered what still waits for its turn hears of it as well, now and then."""
        told = {uid: offer}
        if trio.current_time() >= self._told + TELL_SECONDS:
            self._told, told = trio.current_time(), self._offers
        for group, one in told.items():
            for node, request in one.askers.items():
                self._send(node, SNAPSHOT_PROGRESS, request, {"uid": group}, ())

    async def _pull_chunks(self, member: Member, offer: Offer, sources: Sources) -> None:
        """Pull every chunk of the manifest that is not stored here, or can't be read."""
        uid, has = member.uid, self._chunks.has
        missing = [name for name in offer.manifest.chunks if not await trio.to_thread.run_sync(has, uid, name)]
        while missing:
            node, piece = await self._ask(member, offer, sources, [], missing[:CHUNKS_ASKED])
            if not piece.chunks:
                sources.fail(node)
                continue
            await self._chunks.store_chunks(uid, piece.chunks)
            missing = [name for name in missing if name not in piece.chunks]
            self._progress(uid, offer)

    async def _pull_payloads(
        self, member: Member, offer: Offer, intent: Intent, sources: Sources, wanted: Iterable[Range]
    ) -> None:
        """Pull every payload that lives in the snapshot and is not stored here."""
        uid, snapshot = member.uid, offer.manifest.snapshot
        liveness = self._store.decode_liveness(snapshot.live)
        rest = subtract(wanted, intent.covered)
        at = 0
        while ranges := rest[at : at + RANGES_MAX]:
            node, piece = await self._ask(member, offer, sources, ranges, [])
            try:
                kept, release = judge(piece, snapshot, liveness, ranges)
            except Corrupt as error:
                log.warning("group %s: a piece from node %d: %s", member.spec.name, node, error)
                sources.fail(node)
                continue
            if kept:
                await self._host.store_payloads(member, kept)
            through = min(piece.through, ranges[-1][1])
            sources.came()
            # With the gaps between the ranges: nothing in them lives, or it was here before.
            intent.cover(union([*intent.covered, (ranges[0][0], through)]), release)
            while at < len(rest) and rest[at][1] <= through:
                at += 1
            if at < len(rest) and rest[at][0] <= through:
                rest[at] = (through + 1, rest[at][1])
            if kept or release:
                await self._chunks.store(uid, intent)
            self._progress(uid, offer)

    def _install(self, member: Member, snapshot: Snapshot, size: int, have: int) -> None:
        """Switch to a snapshot whose state and payloads are durable, in one step of the loop."""
        if not member.raft.install_snapshot(
            snapshot.index, snapshot.term, Configuration.decode(snapshot.configuration)
        ):
            return
        before = member.liveness
        try:
            self._host.restore(member, snapshot)
        except Exception as error:
            self._host.stop(member, f"{type(error).__name__} while installing a snapshot: {error}")
            return
        member.recover()
        self._checkpoints.installed(member, before, snapshot, size, have)
        self.installed += 1
        lost = Unknown("a snapshot replaced this member's log; the command's outcome is unknown")
        member.proposals.fail_proposed(lost)
        log.info("group %s: snapshot at %d installed", member.spec.name, snapshot.index)
        member.wake()
        self._host.mark(member)

    async def collect(self, is_here: Callable[[int], bool]) -> None:
        """Drop the intents that nothing will come of. Called by the janitor, which knows the groups of this node."""
        for uid, intent in list(self._chunks.intents.items()):
            member = self._members.get(uid)
            if uid not in self._offers and (
                not is_here(uid) or (member is not None and member.raft.applied >= intent.index)
            ):
                await self._chunks.abandon(uid)

    def status(self) -> dict[str, int]:
        """Return transfers under way, intents kept, pieces and bytes pulled, transfers that went on where another had
        stopped."""
        pulls = self._pulls
        return {
            "under_way": len(self._offers), "intents": len(self._chunks.intents), "resumed": self.resumed,
            "pieces": pulls.pieces, "bytes": pulls.bytes, "failed": pulls.failed,
        }  # fmt: skip


def judge(
    piece: Piece, snapshot: Snapshot, liveness: LivenessPort, ranges: Iterable[Range]
) -> tuple[list[SourceEntry], int]:
    """Return what to keep of a piece, and the release that explains what of the snapshot is missing in it (0: nothing
    is). Raises `Corrupt` when nothing explains it."""
    where = f"snapshot piece of group {snapshot.uid:016x}"
    asked = covered(ranges, piece.through)
    if not asked:
        raise Corrupt(where, 0, "entries that were asked for", f"entries up to {piece.through}")
    kept: list[SourceEntry] = []
    incomplete = False
    for row in piece.rows:
        if row.term > snapshot.term or row.index > snapshot.index:
            raise Corrupt(where, 0, f"entries up to {snapshot.index}@{snapshot.term}", f"{row.index}@{row.term}")
        units = [(unit.number, unit.first_ordinal, unit.records) for unit in units_of(row.data)]
        live, sent = liveness.live_units(row.index, units), row.live or set()
        incomplete = incomplete or not live <= sent
        if live & sent:
            kept.append(row._replace(live=live & sent))
    if piece.release > snapshot.index:
        same = piece.live == live_digest(liveness, asked)
        return kept, piece.release if incomplete or not same else 0
    if incomplete:
        raise Corrupt(where, 0, "what lives, or the release that killed it", f"release {piece.release}")
    return kept, 0

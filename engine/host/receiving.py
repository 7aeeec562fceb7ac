"""The receiving end of a snapshot: offered -> diffed -> filled -> installed (docs/life-of-a-snapshot.md).

An offer becomes a durable *intent*. The receiver works out what it lacks (chunks of sections by name, payloads by
ranges of entries), pulls that in pieces from whoever has it, and each piece is durable, together with the intent that
says so, before it counts: after a cut or a restart at most the one piece under way is sent again. A newer offer takes
the intent over with what is there. It is installed only when state and every live payload are durable (invariant 5),
or released at their source: then the intent knows the release, and the floor rises to it in the very commit that stores
the snapshot (law 4, argued in `serving`). One task a group, which ends with the transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgpack
import trio

from logyard.protocol.errors import Corrupt, LogyardError, Unknown

from ..entry import units_of
from ..log import meta_rows
from ..ports import LivenessPort, SourceEntry
from ..raft.membership import Configuration
from ..ranges import Range, covered, subtract, union
from ..snapshot import format as snapshot_format
from ..snapshot.format import Encoded, Manifest, Snapshot
from ..transport.blobs import SNAPSHOT_DONE, SNAPSHOT_PROGRESS
from . import chunks, replica, rows
from .apply import UnknownVersion
from .member import RUNNING, Member
from .pieces import INDEX_MAX, RANGES_MAX, Piece, live_digest
from .pulling import Sources, others

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)

RECEIVED_MAX = 4
CHUNKS_ASKED = 16
TELL_SECONDS = 1.0


class Intent:
    """What is durable here of a snapshot at `index`: the payloads of the entries in `covered`, but for those that died
    by `release` at the latest; and which chunks it wants."""

    __slots__ = ("index", "term", "release", "covered", "chunks")

    def __init__(
        self, index: int, term: int, release: int = 0, covered: Iterable[Range] = (), chunks: Iterable[bytes] = ()
    ) -> None:
        self.index = index
        self.term = term
        self.release = release
        self.covered = list(covered)
        self.chunks = tuple(chunks)

    def put(self, uid: int) -> rows.Put:
        """Its row."""
        fields = [self.index, self.term, self.release, self.covered, self.chunks]
        return meta_rows.intent_key(uid), msgpack.packb(fields)

    @classmethod
    def unpack(cls, value: bytes) -> Intent:
        """From its row."""
        index, term, release, ranges, names = msgpack.unpackb(value)
        return cls(index, term, release, [(first, last) for first, last in ranges], names)

    def taken_over(self, index: int, term: int, names: Iterable[bytes]) -> Intent:
        """For another snapshot: what is stored is stored, and what a release at or below it killed it does not name. An
        older one (another leader's) may name what the newer one did not, and nobody asked for: that died by then."""
        release = self.release if self.index <= index else max(self.release, self.index)
        return Intent(index, term, release if release > index else 0, self.covered, names)


class Offer:
    """A snapshot as it was offered, and the nodes to tell of it, with the request of each."""

    __slots__ = ("manifest", "data", "askers")

    def __init__(self, node: int, request: int, manifest: Manifest, data: bytes) -> None:
        self.manifest = manifest
        self.data = data
        self.askers = {node: request}


class Receiving:
    """All transfers to this node."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.intents: dict[int, Intent] = {}
        self.resumed = 0
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
            self.system.nursery.start_soon(self._run, uid)
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
        member = self.system.members.get(uid)
        return member is not None and member.raft.leader == node

    def _read(self, uid: int, data: bytes) -> Manifest:
        """A manifest of an offer, with what can be judged at once. Raises `Corrupt`."""
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
        self.system.store.decode_liveness(snapshot.live)
        return manifest

    def _tell(self, uid: int, askers: Mapping[int, int], error: str) -> None:
        answer = {"uid": uid, "ok": not error, "error": error}
        for node, request in askers.items():
            self.system.peers.send_blob(node, SNAPSHOT_DONE, request, answer, ())

    async def _run(self, uid: int) -> None:
        """Until no offer is left: a newer one goes on where the last one stopped."""
        try:
            while True:
                offer, error = self._offers[uid], ""
                try:
                    async with self._limit:
                        await self._take_in(uid, offer)
                except LogyardError as failed:
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
        member = self.system.hibernation.find(uid)
        if member is None:
            # A leader that compacted its log may have nothing but snapshots to say to a new member.
            for node in offer.askers:
                self.system.inbound.ask(node, uid)
        if member is None or member.raft.stopped:
            raise LogyardError(f"group {uid:016x} does not run on this node")
        manifest, snapshot = offer.manifest, offer.manifest.snapshot
        if snapshot.version > member.machine.version:
            raise LogyardError(f"{member.spec.name!r} {UnknownVersion(snapshot.version, member.machine.version)}")
        if member.raft.applied >= snapshot.index:
            await self._drop(uid)
            return
        # What is applied and in a segment here keeps its payloads where they are; below a floor they may be missing.
        # What is only in the open WAL files is asked for again: a log that starts over can't locate it any more.
        have = min(member.raft.applied, member.flushed) if member.resolves else 0
        wanted = self.system.store.missing(snapshot.live, have)
        intent = Intent(snapshot.index, snapshot.term)
        if wanted or manifest.chunks or uid in self.intents:
            intent = await self._intend(uid, manifest)
        configuration = Configuration.decode(snapshot.configuration)
        # Who became a member after the snapshot is asked last: nobody here knows of it yet.
        later = sorted(self.system.live - {self.system.node_id})
        sources = Sources((*offer.askers, *others(self.system, configuration), *later))
        await self._pull_chunks(member, offer, sources)
        await self._pull_payloads(member, offer, intent, sources, wanted)
        meta = self.system.storage.books.meta
        state = await trio.to_thread.run_sync(
            snapshot_format.assemble, manifest, lambda name: meta.get(meta_rows.chunk_key(uid, name))
        )
        if member.raft.stopped or uid in self._newer:
            raise LogyardError("a newer snapshot was offered")
        # With the snapshot, in one commit: the releases that explain what did not come (law 4).
        member.floor = max(member.floor, intent.release)
        encoded = Encoded(offer.data, {}, manifest.chunks, len(offer.data) + manifest.chunk_bytes)
        await self.system.storage.store_installed(member, snapshot, encoded)
        # Its row went in the same commit.
        self.intents.pop(uid, None)
        # What the core has to hand out comes first: entries of before and after must not meet in one `Ready`.
        self.system.scheduler.turn()
        if not member.raft.stopped and member.raft.applied < snapshot.index:
            self._install(member, state, encoded.size, have)

    async def _intend(self, uid: int, manifest: Manifest) -> Intent:
        """A durable intent, with what an earlier one brought."""
        index, term, names = manifest.snapshot.index, manifest.snapshot.term, manifest.chunks
        before = self.intents.get(uid)
        intent = Intent(index, term, 0, (), names)
        if before is not None:
            intent = before.taken_over(index, term, names)
            # What a failing generation took with it is not here any more.
            lost = self.system.store.lost
            intent.covered = [one for one in intent.covered if not lost(uid, *one)]
            if before.covered:
                self.resumed += 1
            self.system.chunks.dropped(uid, set(before.chunks) - set(names))
        self.intents[uid] = intent
        await self._store(uid, intent)
        return intent

    async def _store(self, uid: int, intent: Intent) -> None:
        """Its row, and those of the payloads that it speaks of. Raises `LogyardError` when the replica it is for went:
        another one that has its uid must not rely on it."""
        await self.system.storage.books.commit(
            lambda: [intent.put(uid)] if self.intents.get(uid) is intent else [], store=True
        )
        if self.intents.get(uid) is not intent:
            raise LogyardError(f"group {uid:016x} does not run on this node any more")

    def forget(self, uid: int) -> None:
        """A replica goes, and what came for it."""
        intent = self.intents.pop(uid, None)
        if intent is not None:
            self.system.chunks.dropped(uid, intent.chunks)

    async def _ask(
        self, member: Member, offer: Offer, sources: Sources, ranges: list[Range], names: list[bytes]
    ) -> tuple[int, Piece]:
        """One piece from whoever has it, and who that was. Raises the last peer's reason when nobody does."""
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
                return node, await self.system.pulls.ask(node, uid, offer.manifest.snapshot.index, ranges, names)
            except LogyardError as error:
                sources.fail(node)
                reason = error

    def _progress(self, uid: int, offer: Offer) -> None:
        """A piece is durable. Who offered what still waits for its turn hears of it as well, now and then."""
        told = {uid: offer}
        if trio.current_time() >= self._told + TELL_SECONDS:
            self._told, told = trio.current_time(), self._offers
        for group, one in told.items():
            for node, request in one.askers.items():
                self.system.peers.send_blob(node, SNAPSHOT_PROGRESS, request, {"uid": group}, ())

    async def _pull_chunks(self, member: Member, offer: Offer, sources: Sources) -> None:
        """Every chunk of the manifest that is not stored here."""
        uid = member.uid
        meta = self.system.storage.books.meta
        keys = {name: meta_rows.chunk_key(uid, name) for name in offer.manifest.chunks}
        missing = [
            name for name in offer.manifest.chunks if await trio.to_thread.run_sync(meta.get, keys[name]) is None
        ]
        while missing:
            node, piece = await self._ask(member, offer, sources, [], missing[:CHUNKS_ASKED])
            if not piece.chunks:
                sources.fail(node)
                continue
            got = [(keys[name], bytes(data)) for name, data in piece.chunks.items()]
            await self.system.storage.books.commit(lambda got=got: got)  # type: ignore[misc]
            missing = [name for name in missing if name not in piece.chunks]
            self._progress(uid, offer)

    async def _pull_payloads(
        self, member: Member, offer: Offer, intent: Intent, sources: Sources, wanted: Iterable[Range]
    ) -> None:
        """Every payload that lives in the snapshot and is not stored here."""
        uid, snapshot = member.uid, offer.manifest.snapshot
        liveness = self.system.store.decode_liveness(snapshot.live)
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
                await self.system.storage.store_payloads(member, kept)
            through = min(piece.through, ranges[-1][1])
            sources.came()
            intent.release = max(intent.release, release)
            # With the gaps between the ranges: nothing in them lives, or it was here before.
            intent.covered = union([*intent.covered, (ranges[0][0], through)])
            while at < len(rest) and rest[at][1] <= through:
                at += 1
            if at < len(rest) and rest[at][0] <= through:
                rest[at] = (through + 1, rest[at][1])
            if kept or release:
                await self._store(uid, intent)
            self._progress(uid, offer)

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
        system.storage.homes.replaced(member, before, snapshot.index)
        system.storage.installed(member, snapshot, size, have)
        system.counters.snapshots_installed += 1
        member.fail_waiting(Unknown("a snapshot replaced this member's log; the command's outcome is unknown"))
        log.info("group %s: snapshot at %d installed", member.spec.name, snapshot.index)
        member.wake()
        system.active.add(member)
        system.scheduler.mark(member)

    async def _drop(self, uid: int) -> None:
        """The log got there without it: what came is at home as if it had come with the log."""
        intent = self.intents.pop(uid, None)
        if intent is not None:
            self.system.chunks.dropped(uid, intent.chunks)
            await self.system.storage.books.commit(lambda: [(meta_rows.intent_key(uid), None)])

    async def collect(self) -> None:
        """Drop the intents that nothing will come of. Called by the janitor."""
        for uid, intent in list(self.intents.items()):
            member = self.system.members.get(uid)
            if uid not in self._offers and (
                not _is_known(self.system, uid) or (member is not None and member.raft.applied >= intent.index)
            ):
                await self._drop(uid)

    def status(self) -> dict[str, int]:
        """Under way, intents kept, pieces and bytes pulled, transfers that went on where another had stopped."""
        pulls = self.system.pulls
        return {
            "under_way": len(self._offers), "intents": len(self.intents), "resumed": self.resumed,
            "pieces": pulls.pieces, "bytes": pulls.bytes, "failed": pulls.failed,
        }  # fmt: skip


def judge(
    piece: Piece, snapshot: Snapshot, liveness: LivenessPort, ranges: Iterable[Range]
) -> tuple[list[SourceEntry], int]:
    """What to keep of a piece, and the release that explains what of the snapshot is missing in it (0: nothing is).
    Raises `Corrupt` when nothing explains it."""
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


def restore(member: Member, snapshot: Snapshot, system: System) -> None:
    """Machine and liveness as of a snapshot; used at recovery, too. Raises `UnknownVersion`, with liveness restored."""
    member.liveness = system.store.decode_liveness(snapshot.live)
    member.last_release = snapshot.release
    member.log_time = max(member.log_time, snapshot.timestamp)
    member.heard_ns = system.monotonic_ns()
    replica.restore(member, snapshot)


def _is_known(system: System, uid: int) -> bool:
    return uid in system.members or uid in system.hibernation.sleepers


def recover(system: System) -> None:
    """At a start: intents that a crash left, and chunks that it left to nobody. BLOCKING."""
    meta = system.storage.books.meta
    gone: list[rows.Put] = []
    for key, value in meta.scan(meta_rows.INTENT):
        uid = int.from_bytes(key[1:], "big")
        if not _is_known(system, uid):
            gone.append((key, None))
        else:
            system.receiving.intents[uid] = Intent.unpack(value)
    gone += chunks.orphans(system)
    if gone:
        meta.commit(gone)

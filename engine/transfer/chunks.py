"""Which chunks of large snapshot sections are stored, and for whom; and what is kept for transfers under way.

A chunk's row stays while a stored snapshot, an intent (a snapshot that is on its way here) or a lease names it; what
loses a name is looked at again before it goes, some chunks in a commit. The first two are rows themselves, so the
counts survive a crash: a start drops the chunks that no row names. A lease is a pin: a laggard's claim to the snapshot
it was offered, and to the log above it, so that it need no other one afterwards. It lasts while the transfer makes
progress, is bounded in time and bytes, and the first to go when the disk is full; a laggard whose lease ended hears
that a chunk is gone, and is offered a newer snapshot. Payload bytes need no such pin: what is released during a
transfer is answered with a tombstone (`snapshot_sender`). Called by `meta_batch` (changes), `snapshot_sender` (leases),
`snapshot_receiver` (intents), and `checkpoints` (how far a log may go, and its janitor).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Protocol

import msgpack

from logyard.protocol.errors import Corrupt, LogyardError

from ..config import SystemConfig
from ..log import checkpoint_rows as rows
from ..log import meta_rows
from ..log.meta import MetaStore
from ..log.meta_rows import SnapshotRow
from ..ranges import Range
from ..replica.member import Member
from ..snapshot import format as snapshot_format
from ..snapshot.format import Encoded, Manifest

LOG_ENTRIES_MAX = 1_000_000
"""Entries of a log kept for a transfer: about 100 MB of segments. Their payloads go when they are released."""
DELETED_MAX = 16
"""Chunks that go in one commit, 16 MiB at most: others wait for it."""
COMMITS_MAX = 8
"""Of these in one turn of the janitor, which has WAL files to look after."""
ANY = 1 << 63
"""Above every index."""
Owner = tuple[int, int]
"""(group, node)"""


class MetaBatch(Protocol):
    """What chunks need of the meta store's batches."""

    meta: MetaStore

    def commit(self, build: Callable[[], Iterable[rows.Put]], store: bool = False) -> Awaitable[None]:
        """Store rows that are built under the lock; with `store` the payload store's, too."""
        ...

    def has_snapshot(self, uid: int) -> bool:
        """Return whether a group has a stored snapshot."""
        ...

    def snapshot(self, uid: int) -> SnapshotRow:
        """Return a group's stored snapshot."""
        ...


class Lease:
    """What one node may still ask for: the chunks of a snapshot at `index`, and later the log above it."""

    __slots__ = ("names", "size", "until", "index")

    def __init__(self, index: int, names: Iterable[bytes], size: int, until: float) -> None:
        self.index = index
        self.names = frozenset(names)
        self.size = size
        self.until = until

    def let_go(self) -> None:
        """Name no chunks any more."""
        self.names, self.size = frozenset(), 0

    def promise_no_log(self) -> None:
        """Keep the chunks only."""
        self.index = ANY

    def extend(self, until: float) -> None:
        """Prolong the lease to `until`."""
        self.until = until


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
        """Return its row."""
        fields = [self.index, self.term, self.release, self.covered, self.chunks]
        return meta_rows.intent_key(uid), msgpack.packb(fields)

    @classmethod
    def unpack(cls, value: bytes) -> Intent:
        """Read it from its row."""
        index, term, release, ranges, names = msgpack.unpackb(value)
        return cls(index, term, release, [(first, last) for first, last in ranges], names)

    def cover(self, covered: Iterable[Range], release: int) -> None:
        """Note what is durable by now, and the newest release that explains what of it is not."""
        self.covered = list(covered)
        self.release = max(self.release, release)

    def taken_over(self, index: int, term: int, names: Iterable[bytes]) -> Intent:
        """Return the intent for another snapshot: what is stored is stored, and what a release at or below it killed it
        does not name. An older one (another leader's) may name what the newer one did not, and nobody asked for: that
        died by then."""
        release = self.release if self.index <= index else max(self.release, self.index)
        return Intent(index, term, release if release > index else 0, self.covered, names)


class Chunks:
    """References to chunks: leases, and intents by group. All calls on the loop; `clock` in seconds. `unpinned` is told
    of a member whose log nobody waits for any more."""

    def __init__(
        self,
        config: SystemConfig,
        members: Mapping[int, Member],
        meta_batch: MetaBatch,
        unpinned: Callable[[Member], None],
    ) -> None:
        self.leases: dict[Owner, Lease] = {}
        self.intents: dict[int, Intent] = {}
        # Chunks written, and those that an earlier snapshot had stored already.
        self.written = 0
        self.reused = 0
        self._config = config
        self._members = members
        self._meta_batch = meta_batch
        self._unpinned = unpinned
        self._maybe_gone: set[tuple[int, bytes]] = set()

    def read(self, uid: int, name: bytes) -> bytes | None:
        """Return a stored chunk. BLOCKING."""
        return self._meta_batch.meta.get(meta_rows.chunk_key(uid, name))

    def has(self, uid: int, name: bytes) -> bool:
        """Return whether a chunk is stored, and is what its name says. BLOCKING."""
        try:
            data = self.read(uid, name)
        except Corrupt:
            return False
        return data is not None and snapshot_format.is_chunk(name, data)

    def recover(self, is_here: Callable[[int], bool], deleted: Container[int]) -> None:
        """Read the intents that a crash left; drop those of groups that are not here, and chunks that it left to
        nobody. BLOCKING, at a start."""
        gone: list[rows.Put] = []
        for key, value in self._meta_batch.meta.scan(meta_rows.INTENT):
            uid = int.from_bytes(key[1:], "big")
            if not is_here(uid):
                gone.append((key, None))
            else:
                self.intents[uid] = Intent.unpack(value)
        gone += self._orphans(deleted)
        if gone:
            self._meta_batch.meta.commit(gone)

    def _orphans(self, deleted: Container[int]) -> list[rows.Put]:
        """Return the deletion of chunks that neither a stored snapshot nor an intent names."""
        found: dict[int, list[bytes]] = {}
        for key in self._meta_batch.meta.keys(meta_rows.CHUNK):
            found.setdefault(int.from_bytes(key[-8:], "big"), []).append(key)
        gone: list[rows.Put] = []
        for uid, keys in found.items():
            member = self._members.get(uid)
            if member is not None and member.damaged:
                continue
            intent = self.intents.get(uid)
            kept = set(intent.chunks) if intent is not None else set()
            if uid not in deleted:
                kept |= self._stored(uid)
            gone += [(key, None) for key in keys if key[len(meta_rows.CHUNK) : -8] not in kept]
        return gone

    # Leases: snapshots on their way to other nodes

    @property
    def leased_bytes(self) -> int:
        """What all leases name, chunks in several counted several times."""
        return sum(lease.size for lease in self.leases.values())

    def lease(self, uid: int, node: int, manifest: Manifest, now: float) -> None:
        """Keep a snapshot for a node. What is too much for the budget ends the oldest leases."""
        self.end(uid, node)
        config = self._config
        self.leases[uid, node] = Lease(
            manifest.snapshot.index, manifest.chunks, manifest.chunk_bytes, now + config.snapshot_stall_ms / 500
        )
        while len(self.leases) > 1 and self.leased_bytes > config.snapshot_lease_bytes:
            self.end(*next(iter(self.leases)))

    def touch(self, uid: int, node: int, now: float) -> None:
        """Let a lease last: the transfer makes progress."""
        lease = self.leases.get((uid, node))
        if lease is not None:
            lease.extend(now + self._config.snapshot_stall_ms / 500)

    def end(self, uid: int, node: int) -> None:
        """End a lease: the transfer is over."""
        lease = self.leases.pop((uid, node), None)
        if lease is not None:
            self._maybe_gone.update((uid, name) for name in lease.names)
            member = self._members.get(uid)
            if member is not None and not member.raft.stopped:
                self._unpinned(member)

    def sent(self, uid: int, node: int) -> None:
        """Let the chunks go: the node has what the snapshot says, or gave it up; it still needs the log above it."""
        lease = self.leases.get((uid, node))
        if lease is not None:
            self._maybe_gone.update((uid, name) for name in lease.names)
            lease.let_go()

    def promise_no_log(self, member: Member, index: int) -> None:
        """Keep no log for nodes that need an entry which can't be sent, at `index` at the latest: they need a newer
        snapshot. Those on their way to the one that they were offered may have that."""
        for (uid, node), lease in list(self.leases.items()):
            if uid == member.uid and lease.index < index and not self._has(member, node, index):
                if member.is_transferring(node):
                    lease.promise_no_log()
                else:
                    self.end(uid, node)

    @staticmethod
    def _has(member: Member, node: int, index: int) -> bool:
        progress = member.raft.progress.get(node)
        return progress is not None and progress.match >= index

    def log_kept_above(self, member: Member) -> int:
        """Return how far the log may go. A node that is very far behind, or has caught up, is not waited for."""
        last = member.raft.log.last_index
        kept = [
            lease.index
            for (uid, node), lease in self.leases.items()
            if uid == member.uid and not self._has_caught_up(member, node)
        ]
        return min(max(min(kept), last - LOG_ENTRIES_MAX), last) if kept else last

    def _has_caught_up(self, member: Member, node: int) -> bool:
        progress = member.raft.progress.get(node)
        return progress is None or progress.match >= member.compactable

    def expire(self, now: float) -> None:
        """End the leases of transfers without progress, and of nodes that have caught up."""
        for owner, lease in list(self.leases.items()):
            member = self._members.get(owner[0])
            if lease.until <= now or (not lease.names and (member is None or self._has_caught_up(member, owner[1]))):
                self.end(*owner)

    def give_up(self) -> None:
        """End every lease: the disk is full."""
        for owner in list(self.leases):
            self.end(*owner)

    # Intents: snapshots on their way here

    async def intend(self, uid: int, manifest: Manifest, lost: Callable[[int, int, int], bool]) -> tuple[Intent, bool]:
        """Return a durable intent, with what an earlier one brought, and whether that was anything; what is `lost` is
        not here any more."""
        index, term, names = manifest.snapshot.index, manifest.snapshot.term, manifest.chunks
        before = self.intents.get(uid)
        intent = Intent(index, term, 0, (), names)
        if before is not None:
            intent = before.taken_over(index, term, names)
            # What a failing generation took with it is not here any more.
            intent.cover([one for one in intent.covered if not lost(uid, *one)], 0)
            self.drop(uid, set(before.chunks) - set(names))
        self.intents[uid] = intent
        await self.store(uid, intent)
        return intent, before is not None and bool(before.covered)

    async def store(self, uid: int, intent: Intent) -> None:
        """Store its row, and those of the payloads that it speaks of. Raises `LogyardError` when the replica it is for
        went: another one that has its uid must not rely on it."""
        await self._meta_batch.commit(lambda: [intent.put(uid)] if self.intents.get(uid) is intent else [], store=True)
        if self.intents.get(uid) is not intent:
            raise LogyardError(f"group {uid:016x} does not run on this node any more")

    async def store_chunks(self, uid: int, chunks: Mapping[bytes, memoryview]) -> None:
        """Store chunks that came for an intent: if it went meanwhile, nobody would delete them."""
        found = {name: bytes(data) for name, data in chunks.items()}

        def build() -> list[rows.Put]:
            intent = self.intents.get(uid)
            wanted = found.keys() & intent.chunks if intent is not None else ()
            return [(meta_rows.chunk_key(uid, name), found[name]) for name in wanted]

        await self._meta_batch.commit(build)

    def forget(self, uid: int) -> bool:
        """Forget an intent whose row goes or went: of a replica that goes, or as a snapshot was stored, be it a newer
        one than what came, which may not name its chunks. Return whether there was one."""
        intent = self.intents.pop(uid, None)
        if intent is not None:
            self.drop(uid, intent.chunks)
        return intent is not None

    async def abandon(self, uid: int) -> None:
        """Give an intent up: the log got there without it. What came is at home as if it had come with the log."""
        if self.forget(uid):
            await self._meta_batch.commit(lambda: [(meta_rows.intent_key(uid), None)])

    def drop(self, uid: int, names: Iterable[bytes]) -> None:
        """Have chunks deleted unless something names them when it is their turn. What named them does so no more, also
        after a crash."""
        self._maybe_gone.update((uid, name) for name in names)

    # Rows

    def _held(self, uid: int) -> set[bytes]:
        held = {name for (owner, _), lease in self.leases.items() if owner == uid for name in lease.names}
        intent = self.intents.get(uid)
        return held | set(intent.chunks) if intent is not None else held

    def changed(self, member: Member, index: int, encoded: Encoded, anew: bool = False) -> Iterator[rows.Put]:
        """Yield the rows to write and to delete when a snapshot at `index` takes the stored one's place; `anew`: that
        may be damaged."""
        intent = self.intents.get(member.uid)
        if intent is not None and intent.index <= index:
            yield meta_rows.intent_key(member.uid), None
        if not encoded.names and not member.chunks:
            return
        stored, needed, held = set(member.chunks), set(encoded.names), self._held(member.uid)
        for name in encoded.names:
            if (name in stored and not anew) or name not in encoded.chunks:
                self.reused += 1
            else:
                self.written += 1
                yield meta_rows.chunk_key(member.uid, name), bytes(encoded.chunks[name])
        for name in stored - needed - held:
            yield meta_rows.chunk_key(member.uid, name), None

    def _stored(self, uid: int) -> set[bytes]:
        """Return what a group's stored snapshot names, if it has one. Raises `LogyardError`."""
        if not self._meta_batch.has_snapshot(uid):
            return set()
        return set(snapshot_format.read_manifest(self._meta_batch.snapshot(uid).data, uid).chunks)

    def _needed(self, uid: int) -> set[bytes] | None:
        """Return which chunks of a group something names; None where only a start can tell. Between two commits."""
        member = self._members.get(uid)
        if member is not None:
            # What is left of a damaged one is evidence.
            return None if member.damaged else self._held(uid) | set(member.chunks)
        try:
            # It sleeps, or it went, and another replica may be on its way here.
            return self._held(uid) | self._stored(uid)
        except LogyardError:
            return None

    def _unneeded(self, asked: Sequence[tuple[int, bytes]]) -> list[rows.Put]:
        found: list[rows.Put] = []
        for uid in {uid for uid, _ in asked}:
            needed = self._needed(uid)
            if needed is not None:
                names = [name for owner, name in asked if owner == uid and name not in needed]
                found += [(meta_rows.chunk_key(uid, name), None) for name in names]
        return found

    async def collect(self) -> bool:
        """Delete what is to go and nothing names, some chunks in a commit: others have theirs in between. Return
        whether there is more. Called by the janitor."""
        for _ in range(COMMITS_MAX):
            if not self._maybe_gone:
                break
            asked = list(islice(self._maybe_gone, DELETED_MAX))
            self._maybe_gone.difference_update(asked)
            try:
                await self._meta_batch.commit(partial(self._unneeded, asked))
            except BaseException:
                self._maybe_gone.update(asked)
                raise
        return bool(self._maybe_gone)

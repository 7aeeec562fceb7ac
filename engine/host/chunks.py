"""Which chunks of large snapshot sections are stored, and for whom; and what is kept for transfers under way.

A chunk's row stays while a stored snapshot, a snapshot that is on its way here (`receiving`) or a lease names it. The
first two are rows themselves, so the counts survive a crash: a start drops the chunks that no row names. A lease is a
pin: a laggard's claim to the snapshot it was offered, and to the log above it, so that it need no other one
afterwards. It lasts while the transfer makes progress, is bounded in time and bytes, and the first to go when the disk
is full; a laggard whose lease ended hears that a chunk is gone, and is offered a newer snapshot. Payload bytes need no
such pin: what is released during a transfer is answered with a tombstone (`serving`). Called by `books` (changes),
`snapshots` (leases), and `storage` (how far a log may go, and its janitor).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..log import meta_rows
from ..snapshot import format as snapshot_format
from ..snapshot.format import Encoded, Manifest
from . import rows
from .member import Member

if TYPE_CHECKING:
    from .system import System

LOG_ENTRIES_MAX = 1_000_000
"""Entries of a log kept for a transfer: about 100 MB of segments. Their payloads go when they are released."""
Owner = tuple[int, int]
"""(group, node)"""


class Lease:
    """What one node may still ask for: the chunks of a snapshot at `index`, and later the log above it."""

    __slots__ = ("names", "size", "until", "index")

    def __init__(self, index: int, names: Iterable[bytes], size: int, until: float) -> None:
        self.index = index
        self.names = frozenset(names)
        self.size = size
        self.until = until


class Chunks:
    """References to chunks. All calls on the loop; `clock` in seconds."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.leases: dict[Owner, Lease] = {}
        # Chunks written, and those that an earlier snapshot had stored already.
        self.written = 0
        self.reused = 0
        self._maybe_gone: set[tuple[int, bytes]] = set()

    @property
    def leased_bytes(self) -> int:
        """What all leases name, chunks in several counted several times."""
        return sum(lease.size for lease in self.leases.values())

    def lease(self, uid: int, node: int, manifest: Manifest, now: float) -> None:
        """Keep a snapshot for a node. What is too much for the budget ends the oldest leases."""
        self.end(uid, node)
        config = self.system.config
        self.leases[uid, node] = Lease(
            manifest.snapshot.index, manifest.chunks, manifest.chunk_bytes, now + config.snapshot_stall_ms / 500
        )
        while len(self.leases) > 1 and self.leased_bytes > config.snapshot_lease_bytes:
            self.end(*next(iter(self.leases)))

    def touch(self, uid: int, node: int, now: float) -> None:
        """The transfer makes progress."""
        lease = self.leases.get((uid, node))
        if lease is not None:
            lease.until = now + self.system.config.snapshot_stall_ms / 500

    def end(self, uid: int, node: int) -> None:
        """A transfer is over."""
        lease = self.leases.pop((uid, node), None)
        if lease is not None:
            self._maybe_gone.update((uid, name) for name in lease.names)
            member = self.system.members.get(uid)
            if member is not None and not member.raft.stopped:
                self.system.storage.compact_log(member)

    def sent(self, uid: int, node: int) -> None:
        """The node has what the snapshot says, or gave it up: it still needs the log above it."""
        lease = self.leases.get((uid, node))
        if lease is not None:
            self._maybe_gone.update((uid, name) for name in lease.names)
            lease.names, lease.size = frozenset(), 0

    def log_kept_above(self, member: Member) -> int:
        """The log may go up to here. A node that is very far behind, or has caught up, is not waited for."""
        last = member.raft.log.last_index
        kept = [
            lease.index
            for (uid, node), lease in self.leases.items()
            if uid == member.uid and not self._has_caught_up(member, node)
        ]
        return max(min(kept), last - LOG_ENTRIES_MAX) if kept else last

    def _has_caught_up(self, member: Member, node: int) -> bool:
        progress = member.raft.progress.get(node)
        return progress is None or progress.match >= member.compactable

    def expire(self, now: float) -> None:
        """End the leases of transfers without progress, and of nodes that have caught up."""
        members = self.system.members
        for owner, lease in list(self.leases.items()):
            member = members.get(owner[0])
            if lease.until <= now or (not lease.names and (member is None or self._has_caught_up(member, owner[1]))):
                self.end(*owner)

    def give_up(self) -> None:
        """The disk is full: no lease holds it up."""
        for owner in list(self.leases):
            self.end(*owner)

    def _held(self, uid: int) -> set[bytes]:
        held = {name for (owner, _), lease in self.leases.items() if owner == uid for name in lease.names}
        intent = self.system.receiving.intents.get(uid)
        return held | set(intent.chunks) if intent is not None else held

    def changed(self, member: Member, encoded: Encoded, anew: bool = False) -> Iterator[rows.Put]:
        """The rows to write and to delete when a snapshot takes the stored one's place; `anew`: that may be damaged."""
        stored, needed, held = set(member.chunks), set(encoded.names), self._held(member.uid)
        for name in encoded.names:
            if (name in stored and not anew) or name not in encoded.chunks:
                self.reused += 1
            else:
                self.written += 1
                yield meta_rows.chunk_key(member.uid, name), bytes(encoded.chunks[name])
        for name in stored - needed - held:
            yield meta_rows.chunk_key(member.uid, name), None

    def dropped(self, uid: int, names: Iterable[bytes]) -> None:
        """An intent named these and does no more."""
        self._maybe_gone.update((uid, name) for name in names)

    async def collect(self) -> None:
        """Delete what leases and intents let go, unless something else names it. Called by the janitor."""
        if not self._maybe_gone:
            return
        asked, self._maybe_gone = self._maybe_gone, set()

        def build() -> list[rows.Put]:
            found: list[rows.Put] = []
            for uid in {uid for uid, _ in asked}:
                # A group that sleeps, or is being deleted: at the next start.
                member = self.system.members.get(uid)
                if member is not None:
                    names = {name for owner, name in asked if owner == uid} - self._held(uid) - set(member.chunks)
                    found += [(meta_rows.chunk_key(uid, name), None) for name in names]
            return found

        try:
            await self.system.storage.books.commit(build)
        except BaseException:
            self._maybe_gone |= asked
            raise


def orphans(system: System) -> list[rows.Put]:
    """At a start: chunks that neither a stored snapshot nor an intent names, to be deleted."""
    meta = system.storage.books.meta
    found: dict[int, list[bytes]] = {}
    for key in meta.keys(meta_rows.CHUNK):
        found.setdefault(int.from_bytes(key[-8:], "big"), []).append(key)
    gone: list[rows.Put] = []
    for uid, keys in found.items():
        if uid in system.members and system.members[uid].damaged:
            continue
        intent = system.receiving.intents.get(uid)
        kept = set(intent.chunks) if intent is not None else set()
        if uid not in system.directory.deleted and system.storage.books.has_snapshot(uid):
            kept |= set(snapshot_format.read_manifest(system.storage.books.snapshot(uid).data, uid).chunks)
        gone += [(key, None) for key in keys if key[len(meta_rows.CHUNK) : -8] not in kept]
    return gone

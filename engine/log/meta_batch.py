"""What a node commits to its meta store, and in which order.

Invariant: rows are built under one lock, so that a row built before another's commit never undoes that one; the
payload store's rows travel with the rows that rely on them (invariants 3 and 6); what is decided is in the first commit
that succeeds after it, so that no row that goes by it is stored before. Called by `segment_writer`, `compactor` and
`groups`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import trio

from logyard.protocol.errors import LogyardError, NoSpace, WalFailed

from ..identity import Acquaintances, Origin
from ..ports import StorePort
from ..replica.member import Member
from ..snapshot import format as snapshot_format
from ..snapshot.format import Encoded, Snapshot
from ..types import Spec
from . import checkpoint_rows as rows
from . import meta_rows
from .location import SealedFile
from .meta import MetaStore
from .meta_rows import SnapshotRow, snapshot_key
from .space import Space

log = logging.getLogger(__name__)

PEERS_SECONDS = 60.0
"""How old the stored counts of other nodes' batches may get while nothing else is committed."""


class Decided(NamedTuple):
    """Rows that no failed commit takes back, and what is to be done once they are stored."""

    build: Callable[[], Iterable[rows.Put]]
    then: Callable[[], None] | None


class MetaBatch:
    """One commit at a time. `failed(error)` hears of a disk that fails, `spawn` starts a task of the node. What a
    snapshot needs beside its row, `beside(member, index, encoded, anew)` gives."""

    def __init__(
        self,
        members: Mapping[int, Member],
        meta: MetaStore,
        store: StorePort,
        space: Space,
        acquaintances: Acquaintances,
        failed: Callable[[LogyardError], None],
        spawn: Callable[[Callable[[], Awaitable[None]]], None],
        beside: Callable[[Member, int, Encoded, bool], Iterable[rows.Put]],
    ) -> None:
        self.meta = meta
        self._members = members
        self._store = store
        self._space = space
        self._acquaintances = acquaintances
        self._failed = failed
        self._spawn = spawn
        self._beside = beside
        # Members whose floor was raised and is not stored yet: the next commit brings their rows along.
        self._floors: set[Member] = set()
        self._owed: dict[bytes, bytes | None] = {}
        self._decided: list[Decided] = []
        # The store lost something that a state row may name no more: its rows go with whatever is next.
        self.store_due = False
        self._lock = trio.Lock()
        self._peers_at = 0.0
        self._looking = False

    def owe_store(self) -> None:
        """Let the payload store's rows go with whatever is next."""
        self.store_due = True

    def decide(self, build: Callable[[], Iterable[rows.Put]], then: Callable[[], None] | None = None) -> None:
        """Let these rows go with whatever is next: what they say is so already. `then` is called when they are
        durable."""
        self._decided.append(Decided(build, then))

    async def settle(self) -> None:
        """Store what is decided, if something is."""
        if self._decided:
            await self.commit_store()

    async def commit_store(self) -> None:
        """Store the payload store's rows."""
        await self.commit(tuple, store=True)

    async def commit(
        self,
        build: Callable[[], Iterable[rows.Put]],
        store: bool = False,
        then: Callable[[], None] | None = None,
        thrice: Collection[int] = (),
    ) -> None:
        """Make one meta commit. Rows are built under the lock: a row that was built before another's commit must not
        undo that one.

        `then` is called under the lock when they are durable. `store` brings the payload store's rows along; they are
        asked for once, so those of a failed commit go with the next. `thrice`: groups whose snapshots have a third
        copy, as of when the rows are built.
        """
        async with self._lock:
            decided = self._decided[:]
            # Payloads of who went are dead with the row that says so, and not before.
            store, self.store_due = store or self.store_due or bool(decided), False
            if store:
                self._owed.update(rows.store_rows(self._store.changes()))
                # What they say is dead has no home after a restart: the floor has to say so with them (law 4).
                self.raise_floors(int.from_bytes(key[-8:], "big") for key in self._owed)
            floors, self._floors = self._floors, set()
            met: list[tuple[int, Origin]] = []
            try:
                # The last row of a key counts: what is asked for now before what is stored once in a while, and what is
                # decided before both.
                puts = [rows.state(member) for member in floors if self._stands(member)]
                met = self._acquaintances.take()
                puts += [rows.peer(node, origin) for node, origin in met]
                if counts := self._acquaintances.answered and not self._acquaintances.counts:
                    puts.append(rows.LIFE_COUNTS)
                puts += build()
                owed = list(self._owed.items()) if store else []
                try:
                    await self._put([*puts, *_rows_of(decided), *owed], thrice)
                except NoSpace:
                    if not decided:
                        raise
                    # All of it may be too much where each by itself is not, and what waits behind it may give room.
                    await self._store_decided(owed)
                    await self._put([*puts, *owed], thrice)
            except BaseException as error:
                # Also when `build` itself has nothing to store: what was due with it goes with the next.
                self._floors |= floors
                self.store_due = self.store_due or store
                self._acquaintances.fresh.update(node for node, _ in met)
                if isinstance(error, WalFailed):
                    self._failed(error)
                raise
            self._peers_at = time.monotonic()
            if counts:
                self._acquaintances.count()
            if store:
                self._owed.clear()
            self._end(decided)
            if then is not None:
                then()

    async def _put(self, puts: Sequence[rows.Put], thrice: Collection[int] = ()) -> None:
        if puts:
            await self._space.out_of_reserve(
                "the meta store", lambda: trio.to_thread.run_sync(self.meta.commit, puts, thrice)
            )

    async def _store_decided(self, owed: Sequence[rows.Put]) -> None:
        """Store what is decided in parts as large as there is room for, the payload store's rows with the first."""
        size = len(self._decided)
        while self._decided:
            part = self._decided[:size]
            try:
                await self._put([*_rows_of(part), *owed])
            except NoSpace:
                if size == 1:
                    raise
                size = (size + 1) // 2
            else:
                owed = ()
                self._end(part)

    def _end(self, decided: Sequence[Decided]) -> None:
        """Take note that the first of what is decided is stored, as far as it is not known yet."""
        for one in decided:
            if self._decided and self._decided[0] is one:
                del self._decided[0]
                if one.then is not None:
                    one.then()

    def _stands(self, member: Member) -> bool:
        """Return whether a member's rows say what its group has here: it did not go, no other one was made in its
        place, and it is not damaged."""
        return self._members.get(member.uid) is member and not member.is_gone and not member.damaged

    def raise_floors(self, uids: Iterable[int]) -> None:
        """Let floors cover every release that made payload bytes of these groups dead, before they are destroyed
        (law 4).

        The next commit stores it: make one before the bytes go. A floor at or below the snapshot means nothing any
        more.
        """
        for uid in uids:
            member = self._members.get(uid)
            if member is not None and member.cover_releases():
                self._floors.add(member)

    def forget(self, member: Member) -> None:
        """Store no floor of a member that is gone."""
        self._floors.discard(member)

    def look(self) -> None:
        """Store, once a second, what is new of the other nodes."""
        known = self._acquaintances
        late = known.stale and time.monotonic() - self._peers_at >= PEERS_SECONDS
        if (known.unstored or late) and not self._looking:
            self._looking = True
            self._spawn(self._store_peers)

    async def _store_peers(self) -> None:
        try:
            await self.commit(tuple)
        except LogyardError as error:
            log.warning("what is known of the other nodes is not stored: %s", error)
        finally:
            self._looking = False

    async def commit_members(
        self, members: Iterable[Member], sealed_files: Sequence[SealedFile] = (), gone_files: Sequence[int] = ()
    ) -> None:
        """Make one meta commit: state rows of `members`, files sealed or gone, and the payload store's counters."""

        def build() -> Iterator[rows.Put]:
            yield from (rows.state(member) for member in members if self._stands(member))
            yield from (rows.sealed_file(file.file, file.length) for file in sealed_files)
            yield from map(rows.gone_file, gone_files)
            if sealed_files:
                yield rows.flushed(max(file.file for file in sealed_files))

        await self.commit(build, store=True)

    async def raise_format(self, number: int) -> None:
        """Have older programs refuse the directory from here on."""
        if self.meta.raised(number):
            await self.commit(lambda: self.meta.raised(number), then=self.meta.note_format)

    async def store_specs(self, specs: Sequence[Spec], more: Sequence[rows.Put] = (), asleep: bool = False) -> None:
        """Register groups, all in one commit, with `more` rows that belong to them. `asleep`: they begin so."""
        await self.commit(lambda: [*(rows.group(spec, asleep) for spec in specs), *more])

    async def commit_snapshots(self, captured: Sequence[rows.Captured]) -> list[rows.Captured]:
        """Commit those that are newer than what is stored: the log may have started over above a stored one."""
        stored: list[rows.Captured] = []
        thrice: set[int] = set()

        def build() -> Iterator[rows.Put]:
            for one in captured:
                member, snapshot, encoded, keep_log, anew = one
                if self._stands(member) and snapshot.index > member.snapshot_stored:
                    stored.append(one)
                    if member.spec.is_system:
                        thrice.add(member.uid)
                    yield rows.snapshot(member.uid, snapshot.index, snapshot.term, encoded.manifest)
                    yield rows.state(member, snapshot, keep_log=keep_log)
                    yield from self._beside(member, snapshot.index, encoded, anew)

        def then() -> None:
            for member, snapshot, encoded, *_ in stored:
                member.stored(snapshot.index, encoded.names)

        # With the store's rows: what is dead below the snapshot is not marked again by a restart that begins at it.
        await self.commit(build, store=True, then=then, thrice=thrice)
        return stored

    def snapshot(self, uid: int) -> SnapshotRow:
        """Return a group's newest snapshot, its chunks apart. Raises `LogyardError` when there is none."""
        key = snapshot_key(uid)
        value = self.meta.get(key)
        if value is None:
            raise LogyardError(f"group {uid:016x} has no snapshot on this node")
        return SnapshotRow.unpack(key, value)

    def has_snapshot(self, uid: int) -> bool:
        """Return whether there is one."""
        return self.meta.get(snapshot_key(uid)) is not None

    def load_snapshot(self, row: SnapshotRow) -> Snapshot:
        """Return what a row says, with its chunks. Raises `Corrupt`."""
        uid = row.uid
        return snapshot_format.decode(row.data, uid, lambda name: self.meta.get(meta_rows.chunk_key(uid, name)))


def _rows_of(decided: Iterable[Decided]) -> Iterator[rows.Put]:
    for one in decided:
        yield from one.build()

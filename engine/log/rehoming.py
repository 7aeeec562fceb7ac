"""Where the payloads go that get a home in a generation: those that come from peers, and those of groups that sleep.

Invariant: a payload has its new home, durable and in the books, before its old one forgets it. Nothing here runs beside
a job of the janitor. Called by `snapshot_receiver`, `payload_repair` and `payload_flush`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import trio

from logyard.protocol.errors import LogyardError

from ..ports import SourceEntry, StorePort
from ..ranges import runs_of
from ..replica.member import Member
from .liveness_accounting import LivenessAccounting
from .location import Location
from .meta_batch import MetaBatch


class Rehoming:
    """One node's. Who holds `lock` has the files to itself: the janitor's."""

    def __init__(
        self,
        members: Mapping[int, Member],
        store: StorePort,
        meta_batch: MetaBatch,
        location: Location,
        accounting: LivenessAccounting,
        lock: trio.Lock,
    ) -> None:
        self._members = members
        self._store = store
        self._meta_batch = meta_batch
        self._location = location
        self._accounting = accounting
        self._lock = lock

    async def store_payloads(self, member: Member, entries: Sequence[SourceEntry], dense: bool = False) -> None:
        """Store payloads that came from a peer, rising, durable in a generation; their home from now on. Between them
        nothing that has a home in a generation, or lives in this log, changes it; with `dense` nothing at all. Raises
        `NoSpace`, and `LogyardError` for a replica that went."""
        async with self._lock:
            if self._members.get(member.uid) is not member:
                raise LogyardError(f"group {member.uid:016x} does not run on this node any more")
            before = list(self._store.homes(member.uid))
            hides = self._accounting.hidden_by(member, before, dense)
            runs = runs_of([one.index for one in entries], hides)
            self._accounting.open_segments(member, runs)
            await self._store.write(
                [(member.uid, first, last) for first, last in runs],
                lambda _, low, high: [one for one in entries if low <= one.index <= high],
            )
            with self._store.jobs.switching(f"payloads of group {member.spec.name}"):
                for first, last in runs:
                    self._accounting.rehomed(member, first, last, before)
                    self._accounting.settle(member, first, last)

    async def write_back(self, member: Member, entries: Sequence[SourceEntry]) -> None:
        """Store repaired payloads, which bring all that lives of their entries, as `store_payloads`."""
        await self.store_payloads(member, entries, dense=True)
        await self._meta_batch.commit(tuple, store=True)
        mended = {run.segment for run in member.segments}
        for file in self._location.files.values():
            # Its damaged entries have another home now: it may be emptied after all.
            file.fail(file.failed and file.file not in mended)

    async def move(
        self,
        members: Sequence[Member],
        ranges: Sequence[tuple[int, int, int]],
        read: Callable[[int, int, int], Iterable[SourceEntry]],
    ) -> None:
        """Move payloads of several groups from WAL files to a generation: (uid, first, last) of each, one a member."""
        async with self._lock:
            here = [self._members.get(member.uid) is member for member in members]
            members = [member for member, is_here in zip(members, here, strict=True) if is_here]
            ranges = [one for one, is_here in zip(ranges, here, strict=True) if is_here]
            before = {member: list(self._store.homes(member.uid)) for member in members}
            for member, (_, first, last) in zip(members, ranges, strict=True):
                self._accounting.open_segments(member, [(first, last)])
            await self._store.write(ranges, read)
            with self._store.jobs.switching("payloads of groups that go to sleep"):
                for member, (_, first, last) in zip(members, ranges, strict=True):
                    self._accounting.rehomed(member, first, last, before[member])
                    self._accounting.settle(member, first, last)

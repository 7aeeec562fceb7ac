"""The scrub: reads what lies still on this node's disk, verifies it, and hands what is damaged to those who repair it.

One task and one pass at a time; what is read is bounded in bytes a second, in portions, off the loop, and waits while
the disk is slow or clients fill it. Invariants: a walk only looks, and what it finds is judged again on the loop, where
files come and go: what vanished under it, was replaced or died is no damage; nobody waits for a walk, as it pins
nothing. A pass that a restart cut off begins anew; when the last one ended is stored. The walks are in `scrub_walks`
and `scrub_files`. Called by `system`, and by the service for `logyard scrub`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import trio

from logyard.protocol.errors import Corrupt, LogyardError

from ..log import meta_rows
from ..raft.core import LEADER

if TYPE_CHECKING:
    from ..replica.member import Member
    from .system import System

log = logging.getLogger(__name__)

KINDS = ("meta", "snapshot", "segment", "wal", "generation")
FIRST_S = 3600.0
"""A directory that was never scrubbed waits so long after a start."""
RETRY_S = 600.0
"""After a pass that an error ended."""
GIVE_WAY_S = 0.25
GIVE_WAY_MAX_S = 10.0
"""For one portion: under load that lasts, a pass gets slow and still ends."""
REPAIR_S = 120.0
"""So long after its last byte a pass waits for what it found to be whole again."""
LOOK_S = 0.1
LEADER_S = 3.0
"""A damaged leader waits so long for followers that lack more of the log: they need it, as it is now."""
ASK_S = 1.0
"""Between two questions whether it is a member's turn to be mended."""
NAMED_MAX = 100
"""Findings of a pass that are named; all are counted."""


class Counts:
    """One kind's, since the start."""

    __slots__ = ("bytes", "found", "repaired")

    def __init__(self) -> None:
        self.bytes = self.found = self.repaired = 0


class Finding(NamedTuple):
    """What is damaged, of which group ("": the node), and whether it is whole again."""

    kind: str
    group: str
    text: str
    is_repaired: Callable[[], bool]

    def shown(self) -> dict[str, Any]:
        """For the status."""
        return {"kind": self.kind, "group": self.group, "text": self.text, "repaired": self.is_repaired()}


class _Due:
    """A member with damaged records, which is to be mended when it is its turn."""

    def __init__(self, member: Member, error: Corrupt, first: int) -> None:
        self.member = member
        self.error = error
        self.first = first
        self.begun = False
        self.not_before = trio.current_time() + (LEADER_S if member.raft.role == LEADER else 0.0)


class Scrub:
    """One node's. `passes` are those that ended."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.counts = {kind: Counts() for kind in KINDS}
        self.passes = 0
        self.findings: list[Finding] = []
        self.error = ""
        self.finished_ms = 0
        self._due: dict[int, _Due] = {}
        self._kind = ""
        # The counts as this pass, or the last one, began.
        self._begun = {kind: Counts() for kind in KINDS}
        self._asked = trio.Event()
        self._wanted = 0

    def ask(self) -> int:
        """A whole pass that begins from here on; the number of `passes` by which it has ended."""
        self._wanted = self.passes + 1 + bool(self._kind)
        self._asked.set()
        return self._wanted

    async def run(self) -> None:
        """Pass by pass, until cancelled."""
        meta, system = self.system.storage.books.meta, self.system
        try:
            stored = meta.get(meta_rows.SCRUB)
            self.finished_ms = int(msgpack.unpackb(stored)) if stored is not None else 0
        except (LogyardError, ValueError) as error:
            log.warning("when the last scrub was is not known: %s", error)
        every = system.config.scrub_every_s
        passed = max(0.0, system.clocks.wall_ns() / 1e9 - self.finished_ms / 1000)
        wait = max(0.0, every - passed) if self.finished_ms else min(FIRST_S, every)
        while True:
            with trio.move_on_after(wait if every else math.inf):
                await self._asked.wait()
            self._asked = trio.Event()
            try:
                await self._pass()
                wait = float(every)
            except Exception as error:  # who only looks ends nothing else, whatever damaged bytes provoke
                self.error = f"{type(error).__name__}: {error}"
                log.exception("the scrub ended early: %s", self.error)
                wait = min(RETRY_S, every or math.inf)
            self._kind = ""
            self.passes += 1
            if self.passes < self._wanted:
                self._asked.set()

    async def _pass(self) -> None:
        from . import scrub_files, scrub_walks

        walks: dict[str, Callable[[Scrub], Awaitable[None]]] = {
            "meta": scrub_walks.meta, "snapshot": scrub_walks.snapshots, "segment": scrub_files.segments,
            "wal": scrub_files.wal, "generation": scrub_walks.generations,
        }  # fmt: skip
        self.findings, self.error, self._due = [], "", {}
        self.system.mend_turns.waiting.clear()
        self._begun = {kind: copy(one) for kind, one in self.counts.items()}
        began = time.monotonic()
        for kind in KINDS:
            self._kind = kind
            await walks[kind](self)
        self._kind = "repair"
        await self._repaired()
        self.finished_ms = self.system.clocks.wall_ns() // 1_000_000
        size = sum(one["bytes"] for one in self._pass_counts().values())
        left = sum(not one.is_repaired() for one in self.findings)
        log.info(
            "scrub: %d bytes read in %.1f s, %d damaged, %d of them are left",
            size, time.monotonic() - began, len(self.findings), left,
        )  # fmt: skip
        put = meta_rows.SCRUB, bytes(msgpack.packb(self.finished_ms))
        await self.system.storage.books.commit(lambda: [put])

    async def _repaired(self) -> None:
        """Until all that was found is whole again, or for `REPAIR_S`."""
        waiting = list(self.findings)
        with trio.move_on_after(REPAIR_S):
            while waiting:
                self.system.refill.look()
                for uid, due in self._due.items():
                    await self._begin(uid, due)
                waiting = [one for one in waiting if not one.is_repaired()]
                # What nobody can repair is not waited for.
                if all(one.is_repaired is never for one in waiting):
                    break
                await trio.sleep(LOOK_S)
        for one in self.findings:
            if one.is_repaired():
                self.counts[one.kind].repaired += 1

    def _pass_counts(self) -> dict[str, dict[str, int]]:
        return {
            kind: {name: getattr(one, name) - getattr(self._begun[kind], name) for name in Counts.__slots__}
            for kind, one in self.counts.items()
        }

    # For the walks

    async def read(self, kind: str, size: int) -> None:
        """`size` bytes were read: wait as long as the rate asks for, and while the disk is busy."""
        self.counts[kind].bytes += size
        await trio.sleep(size / self.system.config.scrub_bytes_per_s)
        with trio.move_on_after(GIVE_WAY_MAX_S):
            while self._under_load():
                await trio.sleep(GIVE_WAY_S)

    def _under_load(self) -> bool:
        system = self.system
        return bool(system.slow_disk.slow or system.budget.full or system.storage.flush.unflushed.backlog_files > 1)

    def found(self, kind: str, group: str, text: str, is_repaired: Callable[[], bool]) -> None:
        """Damage, which is on its way to be repaired; `never` where nobody can."""
        log.error("scrub: %s%s", f"group {group}: " if group else "", text)
        self.counts[kind].found += 1
        if len(self.findings) < NAMED_MAX or is_repaired is not never:
            self.findings.append(Finding(kind, group, text, is_repaired))

    def lose(self, kind: str, uid: int, indexes: list[int], text: str) -> None:
        """Payloads of these entries, rising, are damaged: those that live come from peers, stretch by stretch."""
        system, store = self.system, self.system.store
        member = system.hibernation.find(uid)
        if member is None:
            return
        live = [index for index in indexes if member.liveness.live_within((index, 0), (index + 1, 0))]
        for first, last in stretches(live):
            what = f"payloads of entries {first} to {last}, {text}"
            if is_alone(system, member):
                self.found(kind, member.spec.name, f"{what}; no other node has this group", never)
                continue
            system.refill.lose(uid, first, last)

            def whole(first: int = first, last: int = last) -> bool:
                return not store.lost(uid, first, last)

            self.found(kind, member.spec.name, what, whole)

    async def renew(self, kind: str, member: Member, error: Exception) -> None:
        """A stored snapshot is damaged. While the member runs, what it said is in memory: the copy counts on, and if
        there is no other, nothing is lost."""
        if await self.system.snapshots.renew(member):
            self.found(kind, member.spec.name, f"{error}; written anew", always)
        else:
            self.mend(kind, member, error)

    def mend(self, kind: str, member: Member, error: Exception, first: int = 0, last: int = 0) -> None:
        """Records of a group are damaged, those of entries `first` to `last` among them: what is certain of it stays,
        the rest comes from the others, when all was read and its leader says that it is this member's turn."""
        system, uid, text = self.system, member.uid, str(error)
        if system.members.get(uid) is not member or member.raft.stopped:
            return
        corrupt = error if isinstance(error, Corrupt) else Corrupt(text, 0, "a whole file", text)
        if is_alone(system, member):
            system.damages.found(member, corrupt)
            self.found(kind, member.spec.name, text, never)
            return
        due = self._due.setdefault(uid, _Due(member, corrupt, first))
        due.first = min(due.first, first)
        waiting = system.mend_turns.waiting
        waiting[uid] = max(waiting.get(uid, 0), last)

        def sound() -> bool:
            now = system.members.get(uid)
            again = now is None or (now is not due.member and now.raft.mend is None and not now.raft.stopped)
            return due.begun and again

        self.found(kind, member.spec.name, text, sound)

    async def _begin(self, uid: int, due: _Due) -> None:
        """Mend one if it may be."""
        if due.begun or trio.current_time() < due.not_before:
            return
        turns, member = self.system.mend_turns, self.system.hibernation.find(uid)
        if member is None or member.raft.stopped or member.raft.mend is not None:
            # It is gone, or somebody else met the damage.
            due.begun = True
        elif await turns.may_begin(member, due.first) and self.system.members.get(uid) is member:
            due.member, due.begun = member, True
            self.system.damages.found(member, due.error)
        else:
            due.not_before = trio.current_time() + ASK_S
        if due.begun:
            turns.waiting.pop(uid, None)

    def status(self) -> dict[str, Any]:
        """What is under way ("": nothing), and what the pass found until now, or the last one."""
        last = self._pass_counts()
        return {
            "running": self._kind,
            "passes": self.passes,
            "finished_ms": self.finished_ms,
            "error": self.error,
            "pass_bytes": sum(one["bytes"] for one in last.values()),
            "last": last,
            "kinds": {
                kind: {name: getattr(one, name) for name in Counts.__slots__} for kind, one in self.counts.items()
            },
            "left": sum(not one.is_repaired() for one in self.findings),
            "findings": [one.shown() for one in self.findings[:NAMED_MAX]],
        }


def never() -> bool:
    """Of what nobody can repair."""
    return False


def always() -> bool:
    """Of what is repaired already."""
    return True


def is_alone(system: System, member: Member) -> bool:
    """Whether nobody else has the group."""
    return member.raft.configuration.nodes() <= {system.node_id}


def stretches(indexes: list[int]) -> list[tuple[int, int]]:
    """(first, last) of neighbours among rising numbers."""
    found: list[tuple[int, int]] = []
    for index in indexes:
        if found and found[-1][1] == index - 1:
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    return found

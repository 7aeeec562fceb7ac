"""The scrub: reads what lies still on this node's disk, verifies it, and hands what is damaged to those who repair it.

One task and one pass at a time; what is read is bounded in bytes a second, in portions, off the loop, and waits while
the disk is slow or clients fill it. Invariants: a walk only looks, and what it finds is judged again on the loop, where
files come and go: what vanished under it, was replaced or died is no damage; nobody waits for a walk, as it pins
nothing. A pass that a restart cut off begins anew; when the last one ended is stored. The walks, one for each kind of
file, are in `scrub_walks`. Run by the engine, and by the service for `logyard scrub`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import msgpack
import trio

from logyard.protocol.errors import Corrupt, LogyardError

from ..log import checkpoint_rows as rows
from ..log import meta_rows
from ..log.meta import MetaStore
from ..raft.state import LEADER
from ..ranges import union
from ..replica.member import Member

log = logging.getLogger(__name__)

COUNTS = ("bytes", "found", "repaired")
KINDS = ("meta", "snapshot", "segment", "ring", "wal", "generation")
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


class Finding(NamedTuple):
    """What is damaged, of which group ("": the node), and whether it is whole again."""

    kind: str
    group: str
    text: str
    is_repaired: Callable[[], bool]

    def shown(self) -> dict[str, Any]:
        """Return it for the status."""
        return {"kind": self.kind, "group": self.group, "text": self.text, "repaired": self.is_repaired()}


def never() -> bool:
    """Return False, of what nobody can repair."""
    return False


def always() -> bool:
    """Return True, of what is repaired already."""
    return True


class Findings:
    """What passes read and found: by kind, and of this pass or the last one. What is read is read at `bytes_per_s`,
    and slower while `is_busy()`."""

    def __init__(self, bytes_per_s: int, is_busy: Callable[[], bool]) -> None:
        # Since the start.
        self.counts = {kind: dict.fromkeys(COUNTS, 0) for kind in KINDS}
        self.named: list[Finding] = []
        self._bytes_per_s = bytes_per_s
        self._is_busy = is_busy
        # The counts as this pass, or the last one, began.
        self._begun = deepcopy(self.counts)

    def begin(self) -> None:
        """Begin a pass."""
        self.named = []
        self._begun = deepcopy(self.counts)

    async def read(self, kind: str, size: int) -> None:
        """Note that `size` bytes were read: wait as long as the rate asks for, and while the disk is busy."""
        self.counts[kind]["bytes"] += size
        await trio.sleep(size / self._bytes_per_s)
        with trio.move_on_after(GIVE_WAY_MAX_S):
            while self._is_busy():
                await trio.sleep(GIVE_WAY_S)

    def add(self, kind: str, group: str, text: str, is_repaired: Callable[[], bool]) -> None:
        """Note damage, which is on its way to be repaired; `never` where nobody can."""
        log.error("scrub: %s%s", f"group {group}: " if group else "", text)
        self.counts[kind]["found"] += 1
        if len(self.named) < NAMED_MAX or is_repaired is not never:
            self.named.append(Finding(kind, group, text, is_repaired))

    def end(self) -> None:
        """Count what is whole again of this pass."""
        for one in self.named:
            if one.is_repaired():
                self.counts[one.kind]["repaired"] += 1

    def left(self) -> int:
        """Count what is not whole again."""
        return sum(not one.is_repaired() for one in self.named)

    def of_pass(self) -> dict[str, dict[str, int]]:
        """Return the counts of this pass, or of the last one."""
        return {
            kind: {name: count - self._begun[kind][name] for name, count in one.items()}
            for kind, one in self.counts.items()
        }

    def status(self) -> dict[str, Any]:
        """Return what the status shows of them."""
        last = self.of_pass()
        return {
            "pass_bytes": sum(one["bytes"] for one in last.values()),
            "last": last,
            "kinds": deepcopy(self.counts),
            "left": self.left(),
            "findings": [one.shown() for one in self.named[:NAMED_MAX]],
        }


class Turns(Protocol):
    """Who says whose turn it is to be mended."""

    @property
    def waiting(self) -> MutableMapping[int, int]:
        """By uid: the highest damaged entry of a member here that waits for its turn."""
        ...

    async def may_begin(self, member: Member, first: int) -> bool:
        """Return whether a member, which needs all entries from `first` on, may stop counting now."""
        ...


class Host(NamedTuple):
    """Who repairs."""

    find: Callable[[int], Member | None]
    """Return a group's member, woken if it hibernates."""
    damaged: Callable[[Member, Corrupt], None]
    """Have a member mended, or stop it where nobody can."""
    renew: Callable[[Member], Awaitable[bool]]
    """Write a member's snapshot anew from memory; return whether that could be done."""
    lose: Callable[[int, int, int], None]
    """Have the payloads of these entries (uid, first, last) come from peers."""
    is_lost: Callable[[int, int, int], bool]
    """Return whether some of these are not back yet."""


class _Due:
    """A member with damaged records, which is to be mended when it is its turn."""

    def __init__(self, member: Member, error: Corrupt, first: int) -> None:
        self.member = member
        self.error = error
        self.first = first
        self.begun = False
        self.not_before = trio.current_time() + (LEADER_S if member.raft.role == LEADER else 0.0)

    def need(self, first: int) -> None:
        """Need all entries from `first` on, too."""
        self.first = min(self.first, first)

    def begin(self, member: Member) -> None:
        """Be mended, as whom the group has now."""
        self.member, self.begun = member, True

    def put_off(self) -> None:
        """Ask again in a while."""
        self.not_before = trio.current_time() + ASK_S


class Repairs:
    """The way of what a pass found to who repairs it, and what still waits for its turn."""

    def __init__(
        self, node_id: int, members: Mapping[int, Member], findings: Findings, turns: Turns, host: Host
    ) -> None:
        self.found = findings.add
        self._node_id = node_id
        self._members = members
        self._turns = turns
        self._host = host
        self._due: dict[int, _Due] = {}

    def begin(self) -> None:
        """Begin a pass: who was not mended is found again, if it is still damaged."""
        self._due = {}
        self._turns.waiting.clear()

    def is_alone(self, member: Member) -> bool:
        """Return whether nobody else has the group."""
        return member.raft.configuration.nodes() <= {self._node_id}

    def until_found(self, ranges: Iterable[tuple[int, int, int]]) -> Callable[[], bool]:
        """Return what tells whether all payloads of these entries (uid, first, last) are back."""
        wanted, is_lost = list(ranges), self._host.is_lost
        return lambda: not any(is_lost(*one) for one in wanted)

    def lose(self, kind: str, uid: int, indexes: list[int], text: str) -> None:
        """Have payloads of these entries, rising, which are damaged, come from peers, stretch by stretch: those that
        live."""
        member = self._host.find(uid)
        if member is None:
            return
        live = [index for index in indexes if member.liveness.live_within((index, 0), (index + 1, 0))]
        for first, last in union((index, index) for index in live):
            what = f"payloads of entries {first} to {last}, {text}"
            if self.is_alone(member):
                self.found(kind, member.spec.name, f"{what}; no other node has this group", never)
                continue
            self._host.lose(uid, first, last)
            self.found(kind, member.spec.name, what, self.until_found([(uid, first, last)]))

    async def renew(self, kind: str, member: Member, error: Exception) -> None:
        """Have a damaged stored snapshot written anew. While the member runs, what it said is in memory: the copy
        counts on, and if there is no other, nothing is lost."""
        if await self._host.renew(member):
            self.found(kind, member.spec.name, f"{error}; written anew", always)
        else:
            self.mend(kind, member, error)

    def mend(self, kind: str, member: Member, error: Exception, first: int = 0, last: int = 0) -> None:
        """Have a group mended whose records are damaged, those of entries `first` to `last` among them: what is certain
        of it stays, the rest comes from the others, when all was read and its leader says that it is this member's
        turn."""
        uid, text, members = member.uid, str(error), self._members
        if members.get(uid) is not member or member.raft.stopped:
            return
        corrupt = error if isinstance(error, Corrupt) else Corrupt(text, 0, "a whole file", text)
        if self.is_alone(member):
            self._host.damaged(member, corrupt)
            self.found(kind, member.spec.name, text, never)
            return
        due = self._due.setdefault(uid, _Due(member, corrupt, first))
        due.need(first)
        waiting = self._turns.waiting
        waiting[uid] = max(waiting.get(uid, 0), last)

        def sound() -> bool:
            now = members.get(uid)
            again = now is None or (now is not due.member and now.raft.mend is None and not now.raft.stopped)
            return due.begun and again

        self.found(kind, member.spec.name, text, sound)

    async def look(self) -> None:
        """Begin to mend whoever may be."""
        for uid, due in self._due.items():
            await self._begin(uid, due)

    async def _begin(self, uid: int, due: _Due) -> None:
        if due.begun or trio.current_time() < due.not_before:
            return
        member = self._host.find(uid)
        if member is None or member.raft.stopped or member.raft.mend is not None:
            # It is gone, or somebody else met the damage.
            due.begin(due.member)
        elif await self._turns.may_begin(member, due.first) and self._members.get(uid) is member:
            due.begin(member)
            self._host.damaged(member, due.error)
        else:
            due.put_off()
        if due.begun:
            self._turns.waiting.pop(uid, None)


class MetaBatch(Protocol):
    """What the scrub needs of the meta store's batches."""

    meta: MetaStore

    async def commit(self, build: Callable[[], Iterable[rows.Put]]) -> None:
        """Store rows that are built under the lock."""
        ...


class Scrub:
    """One node's. `passes` are those that ended, `every_s` apart (0: only when asked); `look()` has lost payloads
    fetched."""

    def __init__(
        self,
        every_s: float,
        wall_ns: Callable[[], int],
        meta_batch: MetaBatch,
        findings: Findings,
        repairs: Repairs,
        walks: Mapping[str, Callable[[], Awaitable[None]]],
        look: Callable[[], None],
    ) -> None:
        self.passes = 0
        self.error = ""
        self.finished_ms = 0
        self._every_s = every_s
        self._wall_ns = wall_ns
        self._meta_batch = meta_batch
        self._findings = findings
        self._repairs = repairs
        self._walks = walks
        self._look = look
        self._kind = ""
        self._asked = trio.Event()
        self._wanted = 0

    def ask(self) -> int:
        """Ask for a whole pass that begins from here on; return the number of `passes` by which it has ended."""
        self._wanted = self.passes + 1 + bool(self._kind)
        self._asked.set()
        return self._wanted

    async def run(self) -> None:
        """Scrub pass by pass, until cancelled."""
        try:
            stored = self._meta_batch.meta.get(meta_rows.SCRUB)
            self.finished_ms = int(msgpack.unpackb(stored)) if stored is not None else 0
        except (LogyardError, ValueError) as error:
            log.warning("when the last scrub was is not known: %s", error)
        every = self._every_s
        passed = self._wall_ns() / 1e9 - self.finished_ms / 1000
        # One that ended in the future, by a wall clock that was ahead, says nothing.
        wait = max(0.0, every - passed) if self.finished_ms and passed >= 0 else min(FIRST_S, every)
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
        findings = self._findings
        self.error = ""
        findings.begin()
        self._repairs.begin()
        began = time.monotonic()
        for kind in KINDS:
            self._kind = kind
            await self._walks[kind]()
        self._kind = "repair"
        await self._repaired()
        self.finished_ms = self._wall_ns() // 1_000_000
        size = sum(one["bytes"] for one in findings.of_pass().values())
        log.info(
            "scrub: %d bytes read in %.1f s, %d damaged, %d of them are left",
            size, time.monotonic() - began, len(findings.named), findings.left(),
        )  # fmt: skip
        put = meta_rows.SCRUB, bytes(msgpack.packb(self.finished_ms))
        await self._meta_batch.commit(lambda: [put])

    async def _repaired(self) -> None:
        """Wait until all that was found is whole again, or for `REPAIR_S`."""
        waiting = list(self._findings.named)
        with trio.move_on_after(REPAIR_S):
            while waiting:
                self._look()
                await self._repairs.look()
                waiting = [one for one in waiting if not one.is_repaired()]
                # What nobody can repair is not waited for.
                if all(one.is_repaired is never for one in waiting):
                    break
                await trio.sleep(LOOK_S)
        self._findings.end()

    def status(self) -> dict[str, Any]:
        """Return what is under way ("": nothing), and what the pass found until now, or the last one."""
        return {
            "running": self._kind,
            "passes": self.passes,
            "finished_ms": self.finished_ms,
            "error": self.error,
            **self._findings.status(),
        }

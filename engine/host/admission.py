"""Bytes per stage (law 9): what is held where, what may still come in, and when to come back.

Invariant: every byte that a client's frame costs is counted from its admission until its answer; what is over a limit
by itself and is alone is let in, so that nothing is stuck for ever. A share of every limit is kept for what frees
space: truncations, deletions, configurations. `Submit.submit` calls `admit`; the numbers come from counters that
their owners keep anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, NoReturn, Protocol

from logyard.protocol.errors import Busy

from ..config import SystemConfig
from ..core import Core
from ..log.cache import PayloadCache
from ..log.group_commit import GroupCommit
from ..log.space import Space
from ..raft.progress import Window

GROUP: Final = "the group's byte budget"
NODE: Final = "the node's byte budget"
WAL_QUEUE: Final = "the write-ahead log's queue"
WAL_UNFLUSHED: Final = "the write-ahead log without segments"
APPLY: Final = "the group's queue of committed entries"
MEMORY: Final = "the node's memory"
MIGRATION: Final = "the WAL that waits to be migrated"

RETRY_S_MIN: Final = 0.01
RETRY_S_MAX: Final = 2.0
"""Bounds of a retry time: below, a refusal costs more than it saves; above, a client sleeps through free space."""
RETRY_S_UNKNOWN: Final = 0.05
"""While nothing is known of the rate at which bytes leave."""
SAMPLE_S: Final = 0.02
"""Between two looks at the rate."""
FILES_S: Final = 2.0
"""An average of what whole files make room for forgets in so long: some of them."""
PACED_FROM: Final = 0.75
"""Of the debt that makes clients wait: from here on their large frames are spaced out."""
PACE: Final = 4.0
"""Times the rate of copying: what clients may write where that begins."""
DELAY_S_MAX: Final = 0.2
"""No frame waits longer for that, however long the line is: what comes behind it on its connection waits too."""
LOOK_BYTES: Final = 1 << 20
"""Memory is added up once for so many admitted bytes: more often says nothing new."""


class Stages(NamedTuple):
    """One limit a stage, bytes."""

    group: int
    node: int
    wal_queue: int
    wal_unflushed: int
    apply: int
    memory: int
    migration: int


def stages(config: SystemConfig, share: float) -> Stages:
    """Return the limits of a config, each times `share`."""
    return Stages(
        *(
            int(limit * share)
            for limit in (
                config.group_inflight_bytes,
                config.node_inflight_bytes,
                config.wal_queue_bytes_max,
                config.wal_unflushed_bytes_max,
                config.apply_lag_bytes_max,
                config.node_memory_bytes,
                config.migrate_debt_bytes_max,
            )
        )
    )


class Drain:
    """How fast bytes leave (an average that forgets in some `forget_s`), and who was told to come back for the room."""

    __slots__ = ("rate", "known", "_forget_s", "_total", "_at", "_promised", "_promised_at")

    def __init__(self, now: float, forget_s: float = 5 * SAMPLE_S, rate: float = 0.0) -> None:
        self.rate = rate
        self.known = rate > 0
        self._forget_s = forget_s
        self._total = 0
        self._at = now
        self._promised: dict[str, float] = {}
        self._promised_at = now

    def sample(self, total: int, now: float) -> None:
        """Take a sample: `total` bytes have left since the start."""
        passed = now - self._at
        if passed < SAMPLE_S:
            return
        rate = (total - self._total) / passed
        weight = min(1.0, passed / self._forget_s) if self.known else 1.0
        self.rate += (rate - self.rate) * weight
        self.known = self.known or total > 0
        self._total, self._at = total, now

    def retry(self, cause: str, over: int, size: int, now: float) -> float:
        """Return the seconds until there is room: `over` bytes have to leave first, and what others were promised
        before."""
        passed, self._promised_at = now - self._promised_at, now
        for name in list(self._promised):
            left = self._promised[name] - passed * self.rate
            if left > 0:
                self._promised[name] = left
            else:
                del self._promised[name]
        promised = self._promised.get(cause, 0.0)
        if not self.known:
            return RETRY_S_UNKNOWN
        if self.rate <= 0:
            return RETRY_S_MAX
        wait = (over + promised) / self.rate
        if wait < RETRY_S_MAX:
            self._promised[cause] = promised + size
        return round(min(max(wait, RETRY_S_MIN), RETRY_S_MAX), 3)


class Debtor(Protocol):
    """Show what the accounts see of a group."""

    inflight_bytes: int
    queue_bytes: int
    raft: Core


class Backlog(Protocol):
    """What waits to be flushed."""

    @property
    def backlog_files(self) -> int:
        """Sealed WAL files that have no segment yet."""
        ...


class Debt(Protocol):
    """What waits to be migrated, and what no longer does, since the start, bytes of files."""

    debt: int
    repaid: int


class Admission:
    """The books of one node. `inflight` counts what is queued or proposed and not answered, all groups; `queued`
    is the part of it that waits for its turn. `receiving()` gives what the client door has allocated for frames that
    are not complete; who opens a door says so (`door`)."""

    __slots__ = (
        "inflight", "queued", "settled", "receiving", "full", "_group_commit", "_space", "_backlog", "_debt", "_cache",
        "_windows", "_counted", "_file_bytes", "_most", "_whole", "_admitted", "_drain", "_copying",
        "_copy_bytes_s_min", "_paced_from", "_free_at", "_clock",
    )  # fmt: skip

    def __init__(
        self,
        config: SystemConfig,
        group_commit: GroupCommit,
        space: Space,
        backlog: Backlog,
        debt: Debt,
        cache: PayloadCache,
        windows: Mapping[int, Window],
        counted: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group_commit = group_commit
        self._space = space
        self._backlog = backlog
        self._debt = debt
        self._cache = cache
        self._windows = windows
        self._counted = counted
        self._file_bytes = config.wal_file_bytes
        self.inflight = 0
        self.queued = 0
        self.settled = 0
        self.receiving: Callable[[], int] = _nothing
        # The memory is full, as of the last look.
        self.full = False
        self._whole = stages(config, 1.0)
        self._most = stages(config, 1.0 - config.reserved_ratio)
        self._admitted = 0
        self._clock = clock
        self._drain = Drain(clock())
        self._copying = Drain(clock(), FILES_S, config.migrate_bytes_s_min)
        self._copy_bytes_s_min = config.migrate_bytes_s_min
        # Debt from which on frames are spaced out, and when the next one may come.
        self._paced_from = int(PACED_FROM * self._most.migration)
        self._free_at = 0.0

    def admit(self, member: Debtor, size: int, reserved: bool = False) -> None:
        """Take `size` bytes for a frame of `member`, or raise `Busy` naming the stage that is full, or `NoSpace`.

        `reserved`: what frees space or keeps the group going may use all of a limit, the rest only most of it.
        """
        limits = self._whole if reserved else self._most
        held = member.inflight_bytes + member.queue_bytes
        if held and held + size > limits.group:
            self._refuse(GROUP, held + size - limits.group, size)
        held = self.inflight
        if held:
            # A frame that is alone on this node is let in whatever its size.
            if held + size > limits.node:
                self._refuse(NODE, held + size - limits.node, size)
            group_commit = self._group_commit
            # What is proposed in this turn comes to the disk with it.
            queued = group_commit.bytes + group_commit.writing_bytes + self.queued
            if queued and queued + size > limits.wal_queue:
                self._refuse(WAL_QUEUE, queued + size - limits.wal_queue, size)
            self._admitted += size
            if (self.full or self._admitted >= LOOK_BYTES) and self._is_full(limits.memory):
                self._refuse(MEMORY, size, size)
        space = self._space
        if space.full and not reserved and not space.takes(size):
            raise space.refusal()
        files = self._backlog.backlog_files
        if files and files * self._file_bytes > limits.wal_unflushed:
            self._refuse(WAL_UNFLUSHED, self._file_bytes, size)
        debt = self._debt.debt
        if debt > limits.migration:
            self._refuse_debt(debt - limits.migration, size)
        raft = member.raft
        if raft.commit > raft.applied and apply_lag(member) > limits.apply:
            self._refuse(APPLY, size, size)
        self.inflight = held + size
        self.queued += size

    def door(self, receiving: Callable[[], int]) -> None:
        """Let clients come in from here on: `receiving()` bytes are allocated for frames that are not complete."""
        self.receiving = receiving

    def delay(self, size: int) -> float:
        """Return the seconds that a client's large frame of `size` bytes should wait before it is received. Where much
        waits to be migrated clients get a multiple of the rate at which that is done, which falls to nothing at the
        limit: so both go on side by side, where to stop all clients and let them go in turns leaves the processors
        idle half of the time. At the limit nobody waits: frames are received, and refused."""
        debt, limit = self._debt.debt, self._most.migration
        if not self._paced_from < debt < limit:
            return 0.0
        now = self._clock()
        self._copying.sample(self._debt.repaid, now)
        room = (limit - debt) / (limit - self._paced_from)
        rate = PACE * room * max(self._copying.rate, self._copy_bytes_s_min)
        wait = max(0.0, self._free_at - now) + size / rate
        self._free_at = now + min(wait, DELAY_S_MAX)
        return self._free_at - now

    def unqueue(self, size: int) -> None:
        """Take frames of `size` bytes from what waits for its turn: they are proposed."""
        self.queued -= size

    def drop(self, size: int) -> None:
        """Drop frames of `size` bytes that waited for their turn and were answered without one."""
        self.queued -= size
        self.settle(size)

    def settle(self, size: int) -> None:
        """Settle a frame of `size` bytes that was answered."""
        self.inflight -= size
        self.settled += size

    def memory(self) -> int:
        """Return the bytes of entries and frames that this node holds: metadata of the memtables, payload bytes in the
        cache's books, frames of clients, what is on its way to peers. Bytes that two of them share count twice."""
        on_the_way = sum(window.bytes for window in self._windows.values())
        return self._group_commit.metadata_bytes + self._cache.bytes + self.inflight + self.receiving() + on_the_way

    def look(self) -> None:
        """Look once a tick at the rate, and the memory."""
        now = self._clock()
        self._drain.sample(self.settled, now)
        self._copying.sample(self._debt.repaid, now)
        self._is_full(self._most.memory)

    def _is_full(self, limit: int) -> bool:
        self._admitted = 0
        over = self.memory() - limit
        if over > 0:
            # The cache is the one holder that can give way at once: what it lets go is read from its file.
            over -= self._cache.shrink_by(over)
        self.full = over > 0
        return self.full

    def _refuse(self, cause: str, over: int, size: int) -> NoReturn:
        now = self._clock()
        self._drain.sample(self.settled, now)
        self._counted(cause)
        raise Busy(cause, self._drain.retry(cause, over, size, now))

    def _refuse_debt(self, over: int, size: int) -> NoReturn:
        """Refuse until so much is copied: while nobody is let in, what leaves otherwise says nothing of that."""
        now = self._clock()
        self._copying.sample(self._debt.repaid, now)
        self._counted(MIGRATION)
        raise Busy(MIGRATION, self._copying.retry(MIGRATION, over, size, now))

    def status(self) -> dict[str, Any]:
        """Return bytes a stage, with its limit, for `logyard status`."""
        group_commit = self._group_commit
        held = {
            "node": self.inflight,
            "wal_queue": group_commit.queued_bytes,
            "wal_unflushed": self._backlog.backlog_files * self._file_bytes,
            "memory": self.memory(),
            "migration": self._debt.debt,
        }
        return {
            "bytes": held,
            "limits": {name: getattr(self._whole, name) for name in held},
            "receiving": self.receiving(),
            "metadata": group_commit.metadata_bytes,
            "drain_bytes_s": round(self._drain.rate),
        }


def _nothing() -> int:
    return 0


def apply_lag(member: Debtor) -> int:
    """Return the bytes that are committed and not applied; of those that left memory only the number is known."""
    raft = member.raft
    return raft.log.bytes_of(raft.applied + 1, raft.commit)

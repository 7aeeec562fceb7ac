"""Bytes per stage (law 9): what is held where, what may still come in, and when to come back.

Invariant: every byte that a client's frame costs is counted from its admission until its answer; what is over a limit
by itself and is alone is let in, so that nothing is stuck for ever. A share of every limit is kept for what frees
space: truncations, deletions, configurations. `System.submit` calls `admit`; the numbers come from counters that
their owners keep anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from logyard.protocol.errors import Busy

from ..config import SystemConfig

if TYPE_CHECKING:
    from .member import Member
    from .system import System

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
    """The limits of a config, each times `share`."""
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
    """How fast bytes leave (an average that forgets in some 100 ms), and who was told to come back for the room."""

    __slots__ = ("rate", "known", "_total", "_at", "_promised", "_promised_at")

    def __init__(self, now: float) -> None:
        self.rate = 0.0
        self.known = False
        self._total = 0
        self._at = now
        self._promised: dict[str, float] = {}
        self._promised_at = now

    def sample(self, total: int, now: float) -> None:
        """`total` bytes have left since the start."""
        passed = now - self._at
        if passed < SAMPLE_S:
            return
        rate = (total - self._total) / passed
        weight = min(1.0, passed / (5 * SAMPLE_S)) if self.known else 1.0
        self.rate += (rate - self.rate) * weight
        self.known = self.known or total > 0
        self._total, self._at = total, now

    def retry(self, cause: str, over: int, size: int, now: float) -> float:
        """Seconds until there is room: `over` bytes have to leave first, and what others were promised before."""
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


class Budget:
    """The books of one node. `inflight` counts what is queued or proposed and not answered, all groups; `queued`
    is the part of it that waits for its turn. `receiving()` gives what the client door has allocated for frames that
    are not complete; who opens a door sets it."""

    __slots__ = (
        "inflight", "queued", "settled", "receiving", "full", "_system", "_most", "_whole", "_admitted",
        "_drain", "_clock",
    )  # fmt: skip

    def __init__(self, system: System, clock: Callable[[], float] = time.monotonic) -> None:
        config = system.config
        self.inflight = 0
        self.queued = 0
        self.settled = 0
        self.receiving: Callable[[], int] = _nothing
        # The memory is full, as of the last look.
        self.full = False
        self._system = system
        self._whole = stages(config, 1.0)
        self._most = stages(config, 1.0 - config.reserved_ratio)
        self._admitted = 0
        self._clock = clock
        self._drain = Drain(clock())

    def admit(self, member: Member, size: int, reserved: bool = False) -> None:
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
            durability = self._system.durability
            # What is proposed in this turn comes to the disk with it.
            queued = durability.bytes + durability.writing_bytes + self.queued
            if queued and queued + size > limits.wal_queue:
                self._refuse(WAL_QUEUE, queued + size - limits.wal_queue, size)
            self._admitted += size
            if (self.full or self._admitted >= LOOK_BYTES) and self._is_full(limits.memory):
                self._refuse(MEMORY, size, size)
        space = self._system.space
        if space.full and not reserved and not space.takes(size):
            raise space.refusal()
        storage = self._system.storage
        if storage.backlog_files and storage.backlog_files * self._system.config.wal_file_bytes > limits.wal_unflushed:
            self._refuse(WAL_UNFLUSHED, self._system.config.wal_file_bytes, size)
        if storage.migration.debt > limits.migration:
            self._refuse(MIGRATION, storage.migration.debt - limits.migration, size)
        raft = member.raft
        if raft.commit > raft.applied and apply_lag(member) > limits.apply:
            self._refuse(APPLY, size, size)
        self.inflight = held + size
        self.queued += size

    def settle(self, size: int) -> None:
        """A frame of `size` bytes was answered."""
        self.inflight -= size
        self.settled += size

    def memory(self) -> int:
        """Bytes of entries and frames that this node holds: metadata of the memtables, payload bytes in the cache's
        books, frames of clients, what is on its way to peers. Bytes that two of them share count twice."""
        system = self._system
        on_the_way = sum(window.bytes for window in system.windows.values())
        return system.durability.metadata_bytes + system.cache.bytes + self.inflight + self.receiving() + on_the_way

    def look(self) -> None:
        """Once a tick: the rate, and the memory."""
        self._drain.sample(self.settled, self._clock())
        self._is_full(self._most.memory)

    def _is_full(self, limit: int) -> bool:
        self._admitted = 0
        over = self.memory() - limit
        if over > 0:
            # The cache is the one holder that can give way at once: what it lets go is read from its file.
            over -= self._system.cache.shrink_by(over)
        self.full = over > 0
        return self.full

    def _refuse(self, cause: str, over: int, size: int) -> NoReturn:
        now = self._clock()
        self._drain.sample(self.settled, now)
        self._system.counters.refused(cause)
        raise Busy(cause, self._drain.retry(cause, over, size, now))

    def status(self) -> dict[str, Any]:
        """Bytes a stage, with its limit, for `logyard status`."""
        system = self._system
        durability = system.durability
        held = {
            "node": self.inflight,
            "wal_queue": durability.bytes + durability.writing_bytes,
            "wal_unflushed": system.storage.backlog_files * system.config.wal_file_bytes,
            "memory": self.memory(),
            "migration": system.storage.migration.debt,
        }
        return {
            "bytes": held,
            "limits": {name: getattr(self._whole, name) for name in held},
            "receiving": self.receiving(),
            "metadata": durability.metadata_bytes,
            "drain_bytes_s": round(self._drain.rate),
        }


def _nothing() -> int:
    return 0


def apply_lag(member: Member) -> int:
    """Bytes that are committed and not applied; of those that left memory only the number is known."""
    raft = member.raft
    return raft.log.bytes_of(raft.applied + 1, raft.commit)

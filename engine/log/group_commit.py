"""Durable before told (law 2): everything a turn wants stable goes to the WAL as one batch, with one fdatasync for
all groups.

Natural group commit: what queues up during a sync is the next batch; there is no timer. A small batch on a disk whose
syncs are fast is
written in place, because a hand-over to the thread (32 us) costs as much as such a sync (33-49 us);
everything else goes to the WAL thread, so that the loop never waits for a slow disk. Only when a whole batch waits
already is it handed over ahead, so that the disk does not wait for the loop either. Called by `ready_loop`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import trio

from logyard.protocol.errors import LogyardError, NoSpace, WalFailed

from ..entry import Entry
from .wal import Rolled, Wal, WalItem

T = TypeVar("T")
log = logging.getLogger(__name__)

INLINE_BYTES = 48 * 1024
INLINE_SECONDS = 0.001
SLOW_SECONDS = 0.005
"""A slower sync counts as this one."""
MIXED_BYTES = 256 * 1024
"""A batch up to this size is not worth sorting."""
SMALL_BYTES = 64 * 1024
"""A group's items up to this size are never put off for others' sake."""
FULL_SECONDS = 0.01
"""What waits behind a full batch, a vote too, waits for about so long, twice where one was handed over ahead."""
FULL_BYTES_MIN = 1 << 20
"""A slow disk takes longer than that for so many bytes, and smaller batches would only be more syncs."""
PACE_MIN = 1e-12
AHEAD = 2
"""Batches with the WAL thread: one that is being written, and a full one behind it."""
ENTRY_OVERHEAD = 256
"""Bytes of an entry in memory beside its metadata: its object, its bytes' header, its places in lists."""


def metadata_bytes(entries: Iterable[Entry]) -> int:
    """Return the bytes that entries without their payloads hold in memory."""
    return sum(len(entry.data) + ENTRY_OVERHEAD for entry in entries)


class FullBatch:
    """How many bytes make a batch full: as many as the disk has lately written in `FULL_SECONDS`, from `FULL_BYTES_MIN`
    up to the limit. `look` is told of batches, from whichever thread writes them."""

    __slots__ = ("bytes", "_least", "_most", "_pace")

    def __init__(self, most: int) -> None:
        self._most = most
        self._least = self.bytes = min(most, FULL_BYTES_MIN)
        # Mean seconds a byte: one write that hangs counts for more than one that is fast.
        self._pace = FULL_SECONDS / self._least

    def look(self, size: int, seconds: float) -> None:
        """Learn from a batch, if it was large: a small one is nothing but its sync."""
        if size >= self._least // 2:
            self._pace += (seconds / size - self._pace) * 0.1
            self.bytes = int(min(self._most, max(self._least, FULL_SECONDS / max(self._pace, PACE_MIN))))


class GroupCommit:
    """Owns the WAL's writing side. `persisted(items)`, `rolled(rolled)`, `failed(error)`, `no_space(reason)` are called
    on the loop. With an `error` nothing more is written."""

    def __init__(
        self,
        wal: Wal,
        persisted: Callable[[Sequence[WalItem]], None],
        rolled: Callable[[Rolled], None],
        failed: Callable[[LogyardError], None],
        no_space: Callable[[str], None],
        batch_bytes_max: int = 1 << 20,
    ) -> None:
        self.wal = wal
        self.persisted = persisted
        self.rolled = rolled
        self.failed = failed
        self.no_space = no_space
        # A full disk refused what is first in line; `resume` tries again.
        self.held = False
        self.items: list[WalItem] = []
        self.full = FullBatch(batch_bytes_max)
        self._put_off = False
        self.bytes = 0
        # Of all entries that came by, with what their objects cost; whoever keeps them gives back.
        self.metadata_bytes = 0
        # Of the batches that are with the thread, oldest first.
        self._sizes: deque[int] = deque()
        self.writing_bytes = 0
        # So many of the first items came back from a full disk; those handed over behind them belong next.
        self._back = 0
        # Replicas that went while a write was under way.
        self._gone: set[int] = set()
        self._alone = False
        self.sync_seconds = self.pace_seconds = 0.001
        self.sync_seconds_max = 0.0
        self.batches = 0
        self.syncs = 0
        self.batch_bytes = 0
        self.write_seconds = 0.0
        self.last_write = time.monotonic()
        self._begun = 0.0
        self.sealed = True
        self.error: LogyardError | None = None
        self._jobs: queue.SimpleQueue[tuple[Sequence[WalItem], int] | None] = queue.SimpleQueue()
        # Why the thread writes nothing more: what stands behind a batch that failed is not written before it.
        self._refusal: LogyardError | None = None
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._idle: list[Callable[[], None]] = []

    def start(self) -> None:
        """Start the WAL thread. Call inside trio."""
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.Thread(target=self._run, name="logyard-wal", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish what was handed over, then end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def add(self, item: WalItem) -> None:
        """Queue one member's records for the next batch."""
        self.items.append(item)
        for entry in item.entries:
            size = len(entry.data)
            self.bytes += size + entry.body_bytes
            self.metadata_bytes += size + ENTRY_OVERHEAD

    def drop(self, uid: int) -> None:
        """Drop what is queued of a replica that is gone: it is never written, as a new one's records must not come
        before it."""
        kept = []
        if self._sizes:
            # What is with the thread may come back, where it finds no room.
            self._gone.add(uid)
        self._back = sum(item.uid != uid for item in self.items[: self._back])
        for item in self.items:
            if item.uid != uid:
                kept.append(item)
                continue
            self.bytes -= sum(len(entry.data) + entry.body_bytes for entry in item.entries)
            self.metadata_bytes -= metadata_bytes(item.entries)
        self.items = kept

    @property
    def busy(self) -> bool:
        """A batch is under way, or somebody has the WAL to itself."""
        return self._alone or bool(self._sizes)

    def held_back(self, entries: Iterable[tuple[int, Entry]]) -> None:
        """Count what is kept of entries that came by in an earlier life."""
        self.metadata_bytes += metadata_bytes(entry for _, entry in entries)

    def let_go(self, entries: Iterable[tuple[int, Entry]]) -> None:
        """Give back what these held in memory: their segment is durable, or nobody needs them."""
        self.metadata_bytes -= metadata_bytes(entry for _, entry in entries)

    def leave_out(self, uid: int, lists: Iterable[list[tuple[int, Entry]]]) -> None:
        """Leave what is kept of a group for segments out of all of them."""
        for entries in lists:
            gone = [entry for owner, entry in entries if owner == uid]
            if gone:
                entries[:] = [pair for pair in entries if pair[0] != uid]
                self.metadata_bytes -= metadata_bytes(gone)

    def put_back(self, pairs: Sequence[tuple[int, Entry]], entries: list[tuple[int, Entry]]) -> None:
        """Keep in a list what was left out of it."""
        entries += pairs
        self.metadata_bytes += metadata_bytes(entry for _, entry in pairs)

    def kick(self) -> None:
        """Write what is queued, unless a batch is under way (then its end does, or the thread when this is a whole
        batch)."""
        sizes = self._sizes
        while self.items and not (self._alone or self.held) and self.error is None:
            if sizes and (len(sizes) >= AHEAD or self.bytes < self.full.bytes or self._idle):
                return
            items, size = self._take()
            self.bytes -= size
            self.writing_bytes += size
            self.sealed = False
            if sizes or size > INLINE_BYTES or self.pace_seconds > INLINE_SECONDS:
                self._hand_over(items, size)
                continue
            self._begun = time.monotonic()
            self._finish(items, size, *self._write(items, size))

    def _hand_over(self, items: Sequence[WalItem], size: int) -> None:
        if not self._sizes:
            self._begun = time.monotonic()
        self._sizes.append(size)
        self._jobs.put((items, size))

    def refuse(self, error: LogyardError) -> None:
        """Begin no batch any more, as this node ends; refuse who waits to have the WAL to itself."""
        self.error = self.error or error

    def resume(self) -> None:
        """Resume, as there may be space again, what a full disk refused."""
        if self.held and not self._sizes:
            self.held = False
            self.kick()

    def _hold(self, items: Sequence[WalItem], error: NoSpace) -> None:
        """Hold what was not written at the head of the line: nobody was told anything of it."""
        done = self.wal.written(items) if items else 0
        rest = [item for item in items[done:] if item.uid not in self._gone]
        self.metadata_bytes -= sum(metadata_bytes(item.entries) for item in items[done:] if item.uid in self._gone)
        self.items[self._back : self._back] = rest
        self._back += len(rest)
        self.bytes += sum(len(entry.data) + entry.body_bytes for item in rest for entry in item.entries)
        self.held = True
        self.sealed = False
        if len(self._sizes) <= 1:
            self._back = 0
            self._refusal = None
        self.no_space(str(error))
        if done:
            self.persisted(items[:done])

    def _take(self) -> tuple[list[WalItem], int]:
        """Return the next batch: all of it, unless it is many bytes. Then small items go first, in every other batch
        without the large ones, of which no more are taken than fit, and at least one: a small group waits for one
        batch of large records, not for all of them. The items of one group keep their order."""
        if self.bytes <= MIXED_BYTES:
            items, self.items = self.items, []
            return items, self.bytes
        sizes = [sum([len(entry.data) + entry.body_bytes for entry in item.entries]) for item in self.items]
        most = self.full.bytes
        alone = self._put_off or min(sizes) > SMALL_BYTES or max(sizes) <= SMALL_BYTES
        self._put_off = not alone
        taken: list[WalItem] = []
        left: list[WalItem] = []
        held: set[int] = set()
        total = large = 0
        for item, size in zip(self.items, sizes, strict=True):
            if item.uid in held or (size > SMALL_BYTES and (not alone or (large and large + size > most))):
                held.add(item.uid)
                left.append(item)
                continue
            if size > SMALL_BYTES:
                large += size
            total += size
            taken.append(item)
        if not taken:
            # Every small item stands behind a large one of its own group.
            return self._take()
        self.items = left
        return taken, total

    async def write_alone(self, items: Sequence[WalItem]) -> None:
        """Write these with the WAL to itself, ahead of what is queued."""
        rolled = await self.exclusive(lambda: self.wal.write(items))
        if rolled is not None:
            self.rolled(rolled)

    async def exclusive(self, call: Callable[[], T]) -> T:
        """Run `call` in a thread with the WAL to itself: for the rare verbs that are no batch. Raises what it
        raises."""
        while self.busy:
            free = trio.Event()
            self._idle.append(free.set)
            try:
                await free.wait()
            except BaseException:
                # Whose turn it is writes or passes it on: nobody who has given up may be asked.
                if free.set in self._idle:
                    self._idle.remove(free.set)
                elif not self.busy:
                    self._freed()
                raise
        if self.error is not None:
            raise self.error
        self._alone = True
        self._begun = time.monotonic()
        try:
            return await trio.to_thread.run_sync(call)
        except WalFailed as error:
            # As in a batch: nobody may have to write before this node finds out.
            self.error = error
            self.failed(error)
            raise
        finally:
            self._alone = False
            self._freed()

    def seal(self) -> None:
        """Write an empty batch, so that an acknowledged batch is soon never the last (law 8)."""
        if not (self.sealed or self.busy or self.held or self.items) and self.error is None:
            self.sealed = True
            self._hand_over((), 0)

    @property
    def batch(self) -> int:
        """The number of the newest batch."""
        return self.wal.next_batch

    @property
    def queued_bytes(self) -> int:
        """What waits for a batch, and the batch that is being written."""
        return self.bytes + self.writing_bytes

    def stalled_s(self) -> float:
        """Return the seconds that the oldest unfinished write has been under way; 0.0 when there is none.

        A disk that hangs never says so: renewals stop when this grows (docs/internals/hosting.md).
        """
        # A write that the thread has done and the loop has not heard of is the loop's delay, not the disk's.
        return time.monotonic() - self._begun if self._begun > self.last_write else 0.0

    def status(self) -> dict[str, float]:
        """Return counters since the start, for `logyard status`: `stalled_ms` is that of `stalled_s`, `write_s` the
        time spent in writes and syncs."""
        return {
            "queued_bytes": self.queued_bytes,
            "queued_items": len(self.items),
            "batches": self.batches,
            "written_bytes": self.batch_bytes,
            "write_s": round(self.write_seconds, 6),
            "sync_ms": round(self.sync_seconds * 1000, 3),
            "sync_ms_max": round(self.sync_seconds_max * 1000, 3),
            "stalled_ms": round(self.stalled_s() * 1000, 1),
        }

    def _write(self, items: Sequence[WalItem], size: int) -> tuple[Rolled | None, LogyardError | None]:
        start = time.monotonic()
        number = self.wal.next_batch
        try:
            rolled = self.wal.write(items) if items else self.wal.seal()
        except LogyardError as error:
            return None, error
        except Exception as error:
            # A bug of ours. A thread that just ended would leave everybody waiting for a batch that never comes.
            log.exception("the write-ahead log failed by a bug")
            return None, WalFailed(f"{type(error).__name__}: {error}")
        end = time.monotonic()
        # The second average decides between writing in place and by thread. A disk that got slow moves it within a few
        # syncs; one slow sync does not, for the thread costs a lone client more than the sync.
        self.sync_seconds += (end - start - self.sync_seconds) * 0.1
        self.pace_seconds += (min(end - start, SLOW_SECONDS) - self.pace_seconds) * 0.1
        self.full.look(size, end - start)
        self.batches += 1
        self.batch_bytes += size
        self.syncs += self.wal.next_batch - number
        self.write_seconds += end - start
        if end - start > self.sync_seconds_max:
            self.sync_seconds_max = end - start
        self.last_write = end
        return rolled, None

    def _run(self) -> None:
        assert self._token is not None
        while (job := self._jobs.get()) is not None:
            items, size = job
            rolled, error = self._write(items, size) if self._refusal is None else (None, self._refusal)
            self._refusal = error
            try:
                self._token.run_sync_soon(self._finished, items, size, rolled, error)
            except trio.RunFinishedError:
                return

    def _finished(self, items: Sequence[WalItem], size: int, rolled: Rolled | None, error: LogyardError | None) -> None:
        # Until all of its end is handled it counts as under way: what that brings belongs into one batch.
        self._finish(items, size, rolled, error)
        self._sizes.popleft()
        self._freed()

    def _freed(self) -> None:
        if self._sizes:
            self.kick()
            return
        self._begun = 0.0
        self._gone.clear()
        if self._idle:
            self._idle.pop(0)()
        else:
            self.kick()

    def _finish(self, items: Sequence[WalItem], size: int, rolled: Rolled | None, error: LogyardError | None) -> None:
        self._begun = time.monotonic() if len(self._sizes) > 1 else 0.0
        self.writing_bytes -= size
        if isinstance(error, NoSpace):
            self._hold(items, error)
            return
        if error is not None:
            if self.error is None:
                self.error = error
                self.failed(error)
            return
        if rolled is not None:
            self.rolled(rolled)
        self.persisted(items)

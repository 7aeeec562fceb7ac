"""The shared WAL: one stream of batches for all groups of a node, one write and one sync each (laws 2, 3, 6, 8).

Invariant: batch n+1 is not written before the sync of batch n returned, and `write` returns after the sync of what it
was given, or raises. After a failed write or sync nothing is ever written again (law 7): the descriptor may lie about
what it holds. Batches of one Wal have rising numbers over all files. Called by `group_commit`, from one thread at a
time; reads, pins, `recycle` and `prepare_next` may come from any other.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from logyard.protocol.errors import LogyardError, NoSpace, WalFailed

from ..config import SystemConfig
from ..disk.door import HUGE_PAGE, Disk, is_full, is_short
from ..entry import Entry
from .record import (
    BLOCK,
    DATA_START,
    RECORD_BYTES,
    FileHead,
    Run,
    WalItem,
    batch_bytes,
    draw_salt,
    encode_batch,
    metadata_bytes,
    own_sizes,
)
from .wal_ahead import Ahead
from .wal_files import Sealed, SyncFailed, WalFiles
from .wal_replay import ReplayResult

__all__ = ["Gap", "Rolled", "Sealed", "Wal", "WalConfig", "WalItem"]

STAGE_BYTES = HUGE_PAGE
"""What one write takes of a batch; a larger one takes several, and one sync all the same."""
SMALL_STAGE_BYTES = 32 * BLOCK
"""A batch that is no larger has memory of its own, so that a node that never sees another one has no huge page."""


@dataclass(frozen=True, slots=True)
class WalConfig:
    """Limits of the WAL, in bytes and files."""

    file_bytes: int = 64 << 20
    """A file's size. Small enough to zero-fill in a tenth of a second, large enough that rolling is rare."""
    batch_bytes: int = 1 << 20
    """The most one sync carries, one oversized entry apart."""
    stock: int = 2
    """Spare files kept for the next rolls."""
    reserve: int = 0
    """Spare files kept for the rolls of a full disk, beside those."""

    @classmethod
    def of(cls, config: SystemConfig) -> WalConfig:
        """Return the WAL's part of a system's limits: batches of a quarter of a file, or of 1 MiB, at most."""
        batch = min(config.wal_batch_bytes, max(1 << 20, config.wal_file_bytes // 4))
        return cls(config.wal_file_bytes, batch, config.wal_stock_files, config.wal_reserve_files)


class Gap(NamedTuple):
    """An item that was not written: its entries do not continue the group's. The member resends from `expected`."""

    uid: int
    expected: int


@dataclass(slots=True)
class Rolled:
    """What a write brought about besides durability: files that were sealed, items that were refused."""

    sealed: list[Sealed] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)


class _Plan:
    """The batch being put together."""

    __slots__ = ("runs", "records", "contents", "payload", "last")

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.records = 0
        self.contents = 0
        self.payload = 0
        # uid -> last index this batch leaves behind.
        self.last: dict[int, int] = {}

    def measured(self, records: int, contents: int, payload: int) -> _Plan:
        """Set the sums over `runs`."""
        self.records, self.contents, self.payload = records, contents, payload
        return self


class Wal:
    """The writing side. The constructor does no I/O; `adopt` and `open` come first. `next_batch` is its number."""

    __slots__ = (
        "_ahead", "_direct", "_draw_salt", "_entries", "_error", "_fd", "_files", "_from", "_head", "_idle", "_last",
        "_limit", "_recovered", "_rolled", "_seen", "_size", "_small_stage", "_stage", "_tail",
        "_unknown", "disk", "next_batch",
    )  # fmt: skip

    def __init__(
        self,
        disk: Disk,
        directory: str,
        config: WalConfig,
        draw_salt: Callable[[], int] = draw_salt,
    ) -> None:
        assert config.file_bytes % BLOCK == 0 and config.file_bytes >= DATA_START + 2 * BLOCK
        self.disk = disk
        self._limit = config.batch_bytes
        self._draw_salt = draw_salt
        self._files = WalFiles(disk, directory, config.file_bytes, config.stock, config.reserve)
        self._recovered: ReplayResult | None = None
        # Per group: the last index the WAL has seen, and the number of the batch that held its newest record.
        self._last: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        # A batch that replay could not attribute counts as every unseen group's newest: see wal_replay.
        self._unknown = 0
        self.next_batch = 0
        self._head = FileHead(0, 0, 0, 0, 0)
        self._fd = -1
        # Of the current file, for writing around the page cache; -1 where the file system has no such thing.
        self._direct = -1
        self._stage = disk.direct_memory(STAGE_BYTES)
        self._small_stage = disk.direct_memory(SMALL_STAGE_BYTES)
        self._size = self._tail = 0
        self._ahead = Ahead(disk)
        # The last batch is empty, or there is none: nothing to seal.
        self._idle = True
        self._entries: list[tuple[int, Entry]] = []
        self._rolled = Rolled()
        self._error: LogyardError | None = None
        self._from: WalItem | None = None  # The first of the last `write` that is not durable, once some are.

    def adopt(self, recovered: ReplayResult) -> None:
        """Take over what replay found; `open` goes on from there."""
        self._recovered = recovered
        self._last = dict(recovered.last_index)
        self._seen = dict(recovered.last_batch)
        self._unknown = recovered.unknown_through
        self.next_batch = recovered.next_batch

    def open(self) -> None:
        """Continue behind the recovered tail, in a new batch, or start the first file. Raises `NoSpace` or `WalFailed`.

        The batch written here is empty and lies over whatever a torn one left at the tail, so that what replay cut off
        can't come back once this node has told anyone anything.
        """
        recovered, self._recovered = self._recovered, None
        assert recovered is not None, "adopt comes before open, which is called once"
        try:
            self._files.open()
            current = recovered.current
            if current is None:
                self._start(FileHead(recovered.next_epoch, self._draw_salt(), *recovered.previous, self.next_batch), 0)
                return
            self._head = current.head
            self._fd, self._size = self._files.descriptor(current.head.epoch)
            self._open_direct()
            self._tail = current.tail
            self._entries = current.entries
            self._idle = current.idle and not current.torn
            if self._idle:
                return
            if self._tail + BLOCK > self._size:
                self._roll(0)
            else:
                self._put(_Plan())
        except OSError as error:
            self._fail(error)

    def _open_direct(self) -> None:
        if self._direct >= 0:
            self.disk.close(self._direct)
            self._direct = -1
        try:
            self._direct = self.disk.open_direct(self._files.path(self._head.epoch))
        except OSError as error:
            if not is_short(error):
                raise
            # The file is in use already, and can be written through the page cache.
        self._ahead.begin(self._fd, self._direct, self._size)

    def close(self) -> None:
        """Close the files. Nothing is pending: every write was synced when it returned."""
        if self._direct >= 0:
            self.disk.close(self._direct)
            self._direct = -1
        self._files.close()

    def write(self, items: Sequence[WalItem]) -> Rolled | None:
        """Make the items durable: BLOCKING; one batch and one fdatasync per `batch_bytes`.

        On return every entry with a payload has `.file` and `.offset`. None when nothing else happened. Raises
        `NoSpace` when the disk is full: `written` says how many of the items are durable all the same. Raises
        `WalFailed` for every other `OSError`, now and forever.
        """
        self._check()
        self._from = None
        try:
            self._write(items)
        except OSError as error:
            if not self._from:
                self._rolled.gaps.clear()
            self._fail(error)
        return self.take()

    def written(self, items: Sequence[WalItem]) -> int:
        """Return how many of the items that `write` refused with `NoSpace` are durable all the same: the first so
        many."""
        return next((number for number, item in enumerate(items) if item is self._from), 0)

    def _write(self, items: Sequence[WalItem]) -> None:
        """Put items into batches. One pass, locals only: with many small groups this loop is what a batch costs."""
        plan = _Plan()
        runs, lasts = plan.runs, plan.last
        limit, overhead, last_seen, seen, unknown = self._limit, RECORD_BYTES, self._last, self._seen, self._unknown
        records = contents = payload = 0
        for item in items:
            uid = item.uid
            entries = item.entries
            known = lasts.get(uid)
            if known is None:
                known = last_seen.get(uid)
            if item.truncate:
                known = item.truncate - 1
            count = len(entries)
            content = body = 0
            if count:
                entry = entries[0]
                first = entry.index
                if known is not None and first > known + 1:
                    self._rolled.gaps.append(Gap(uid, known + 1))
                    continue
                content = len(entry.data)
                if not entry.tombstone:
                    body = entry.body_bytes
                if count > 1:
                    for entry in entries[1:]:
                        content += len(entry.data)
                        if not entry.tombstone:
                            body += entry.body_bytes
                known = entry.index
                assert known - first == count - 1, f"entries of group {uid:016x} are not contiguous"
            if item.truncate or item.floor or item.hard_state is not None:
                own, own_content = own_sizes(item)
                count += own
                content += own_content
            if not count:
                continue
            if contents + payload + content + body + (records + count) * overhead > limit:
                if runs:
                    self._put(plan.measured(records, contents, payload))
                    plan = _Plan()
                    records = contents = payload = 0
                self._from = item
                if content + body + count * overhead > limit and len(entries) > 1:
                    plan = self._split(item)
                    runs, lasts = plan.runs, plan.last
                    records, contents, payload = plan.records, plan.contents, plan.payload
                    continue
                runs, lasts = plan.runs, plan.last
            runs.append((item, entries, True, seen.get(uid, unknown)))
            records += count
            contents += content
            payload += body
            if known is not None:
                lasts[uid] = known
        if runs:
            self._put(plan.measured(records, contents, payload))

    def _split(self, item: WalItem) -> _Plan:
        """Split an item above a batch's limit, entry by entry, into an empty plan; return the plan left open."""
        plan = _Plan()
        plan.records, plan.contents = own_sizes(item)
        taken: list[Entry] = []
        first = True
        entries = item.entries
        for number, entry in enumerate(entries):
            payload = 0 if entry.tombstone else entry.body_bytes
            taken.append(entry)
            plan.records += 1
            plan.contents += len(entry.data)
            plan.payload += payload
            after = entries[number + 1] if number + 1 < len(entries) else None
            size = plan.contents + plan.payload + plan.records * RECORD_BYTES
            if after is None or size + after.size + RECORD_BYTES > self._limit:
                plan.runs.append((item, taken, first, self._seen.get(item.uid, self._unknown)))
                plan.last[item.uid] = entry.index
                first = False
                if after is not None:
                    self._put(plan)
                    plan, taken = _Plan(), []
                    # Should the rest find the disk full, it alone is written again: these may leave memory from now on.
                    item.keep_rest(entries[number + 1 :])
        return plan

    def _put(self, plan: _Plan) -> None:
        """Write one batch and sync it. Nothing of the plan counts before that."""
        runs = plan.runs
        metadata = metadata_bytes(len(runs), plan.records, plan.contents)
        total = batch_bytes(metadata, plan.payload, len(runs))
        # The last block is an empty batch's: a full file can still be sealed.
        reserve = BLOCK if runs else 0
        if self._tail + total + reserve > self._size:
            self._roll(total)
        encoded = encode_batch(self._head, self.next_batch, self._tail, runs, metadata, plan.payload, plan.records)
        if self._direct >= 0:
            stage = self._small_stage if total <= SMALL_STAGE_BYTES else self._stage
            written = self.disk.aligned_write(self._direct, encoded.buffers, self._tail, stage)
        else:
            written = self.disk.gather_write(self._fd, encoded.buffers, self._tail)
        assert written == total == encoded.total
        self._ahead.follow(self._tail + total, total)
        try:
            self.disk.datasync(self._fd)
        except OSError as error:
            # Also for a full disk: after a failed sync nobody knows what the file holds.
            raise SyncFailed(error) from error
        epoch = self._head.epoch
        for entry, offset in encoded.placed:
            entry.place(epoch, offset)
        current, seen, number = self._entries, self._seen, self.next_batch
        for item, entries, _, _ in runs:
            uid = item.uid
            seen[uid] = number
            for entry in entries:
                current.append((uid, entry))
        self._last.update(plan.last)
        self._tail += total
        self.next_batch += 1
        self._idle = not runs

    def seal(self) -> Rolled | None:
        """Write an empty batch behind the last one, unless that is empty itself (law 8). For 100 ms of quiet."""
        self._check()
        if not self._idle and self._tail + BLOCK <= self._size:
            try:
                self._put(_Plan())
            except OSError as error:
                self._fail(error)
        return self.take()

    def roll(self) -> Sealed | None:
        """Close the current file and start the next one, whatever room is left; return None when it holds no batch."""
        self._check()
        if self._tail == DATA_START:
            return None
        try:
            self._roll(0)
        except OSError as error:
            self._fail(error)
        return self._rolled.sealed.pop()

    def take(self) -> Rolled | None:
        """Return what happened since the last call; a sealed file is never lost to an exception that came after it."""
        rolled = self._rolled
        if not rolled.sealed and not rolled.gaps:
            return None
        self._rolled = Rolled()
        return rolled

    def _roll(self, need: int) -> None:
        epoch = self._head.epoch
        sealed = Sealed(epoch, epoch, self._tail, self._entries)
        self._start(FileHead(epoch + 1, self._draw_salt(), epoch, self._tail, self.next_batch), need)
        self._rolled.sealed.append(sealed)

    def _start(self, head: FileHead, need: int) -> None:
        fd, size = self._files.start(head, need)
        self._head, self._fd, self._size, self._tail = head, fd, size, DATA_START
        self._open_direct()
        self._entries = []
        self._idle = True

    def _check(self) -> None:
        if self._error is not None:
            raise WalFailed(str(self._error))

    def _fail(self, error: OSError) -> NoReturn:
        """Fail this write only, where a full disk, or a process without descriptors or memory, refuses it; everything
        else ends this WAL for good."""
        if not isinstance(error, SyncFailed) and (is_full(error) or is_short(error)):
            raise NoSpace(f"no room for the WAL: {error.strerror}") from error
        self._error = WalFailed(f"WAL file {self._head.epoch}: {error}; this node acknowledges nothing more")
        raise self._error from error

    def prepare_next(self, fill: bool = True) -> bool:
        """Make the next file ahead of need, on a thread of the caller's; `fill` it when the disk has nothing better
        to do. False: the disk refused; a roll will retry."""
        try:
            self._files.prepare(fill)
        except OSError:
            return False
        return True

    def forget(self, uid: int) -> None:
        """Forget a group that is deleted, or hibernates and owns nothing here."""
        self._seen.pop(uid, None)
        self.restart(uid)

    def restart(self, uid: int) -> None:
        """Let the group's next write start anywhere."""
        self._last.pop(uid, None)

    def keep_only(self, uids: Container[int]) -> None:
        """Keep only these groups: others own nothing in the current file, and need no segment. The list stays the same,
        whoever has it. Not beside a write."""
        self._entries[:] = [pair for pair in self._entries if pair[0] in uids]

    def recycle(self, file: int) -> bool:
        """Recycle `file`, of which everything is durable elsewhere or dead, once no pin holds it (False: one does)."""
        assert file != self._head.epoch, "the current file is in use"
        return self._files.recycle(file)

    def pin(self, file: int) -> None:
        """Keep `file` until `unpin`. Raises `Gone`."""
        self._files.pin(file)

    def unpin(self, file: int) -> None:
        """End one `pin`."""
        self._files.unpin(file)

    def read_payload(self, file: int, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`, from any thread; the caller checks the hash. Raises `Gone` or
        `Corrupt`."""
        return self._files.read(file, offset, length)

    @property
    def current_entries(self) -> list[tuple[int, Entry]]:
        """What the current file got so far, in write order."""
        return self._entries

    @property
    def files(self) -> list[tuple[int, int]]:
        """(file, bytes) in use, oldest first; the last one is the current one."""
        return self._files.listing

    @property
    def current(self) -> int:
        """The file that takes the next batch."""
        return self._head.epoch

    @property
    def room(self) -> int:
        """Bytes left in the current file."""
        return self._size - self._tail

    @property
    def stock(self) -> WalFiles:
        """The files: what is spare, what is missing, whether the reserve is in use."""
        return self._files

    def allocated_bytes(self) -> int:
        """Return the bytes of disk held, spares included."""
        return self._files.allocated_bytes()

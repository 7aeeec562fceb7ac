"""Which file is the home of which payloads, how much in it still lives, and who is reading it.

A sealed WAL file stays the home of its payloads until they are dead or migrated. A home that is given up
waits for its last pin. How the counters of a file come about is in `liveness_accounting`. All calls on the loop.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ..entry import Entry
from ..ports import StorePort
from .wal import Sealed, Wal

log = logging.getLogger(__name__)

Home = tuple[str, int]


class Share:
    """What one group has in one sealed WAL file: entries first..last, `live` payload bytes."""

    __slots__ = ("first", "last", "live")

    def __init__(self, first: int, last: int, live: int) -> None:
        self.first = first
        self.last = last
        self.live = live

    def reduce(self, size: int) -> None:
        """Count `size` bytes as dead."""
        assert 0 <= size <= self.live, "more bytes died than lived"
        self.live -= size

    def end(self, last: int) -> None:
        """End at `last` from now on."""
        self.last = last


class SealedFile:
    """A sealed WAL file that is the home of payloads. The segment of the same number holds its entries' metadata."""

    __slots__ = ("file", "length", "sealed_at", "died_at", "shares", "live", "total", "failed", "kept")

    def __init__(self, file: int, length: int) -> None:
        self.file = file
        self.length = length
        # When something of it died last; what is sealed with a part dead may go on dying.
        self.sealed_at = self.died_at = time.monotonic()
        self.shares: dict[int, Share] = {}
        self.live = 0
        # Payload bytes, dead ones included; and whether they could not be migrated.
        self.total = 0
        self.failed = False
        # A group that nobody can mend has something here: it is for people to judge.
        self.kept = False

    @property
    def dead_ratio(self) -> float:
        """The share of the file's payload bytes that is dead; 1 when it has none."""
        return 1 - self.live / self.total if self.total else 1.0

    def add(self, uid: int, share: Share, total: int) -> None:
        """Book a group's share of `total` bytes, unless all of it is dead."""
        self.total += total
        self.put(uid, share)

    def put(self, uid: int, share: Share) -> None:
        """Book what a group has here after all, of bytes that count already."""
        if share.live:
            self.shares[uid] = share
            self.live += share.live

    def reduce(self, uid: int, size: int) -> None:
        """Book the death of `size` bytes of a group."""
        share = self.shares[uid]
        share.reduce(size)
        self.live -= size
        self.died_at = time.monotonic()
        if not share.live:
            del self.shares[uid]

    def shorten(self, uid: int, last: int, gone: int) -> None:
        """End a group's share at `last` from now on; at most `gone` bytes lived above that."""
        share = self.shares[uid]
        share.end(last)
        self.reduce(uid, min(share.live, gone))

    def remove(self, uid: int) -> None:
        """Remove a group that is gone, or all of which here is dead."""
        share = self.shares.pop(uid, None)
        if share is not None:
            self.live -= share.live
            self.died_at = time.monotonic()

    def fail(self, failed: bool = True) -> None:
        """Set whether it waits for a repair, a start or `compact`, as it could not be migrated."""
        self.failed = failed

    def keep(self) -> None:
        """Keep the file: never migrate it, nor let it go."""
        self.kept = True


class Unflushed:
    """Sealed WAL files that have no segment yet, oldest first: each is the home of all its entries."""

    def __init__(self, wal: Wal) -> None:
        self.wal = wal
        self._waiting: deque[Sealed] = deque()
        self._under_way: Sealed | None = None

    @property
    def backlog_files(self) -> int:
        """How many wait for their turn."""
        return len(self._waiting)

    def add(self, sealed: Sequence[Sealed]) -> None:
        """Take in files that were sealed. They come in order, but for one that was rolled by hand."""
        self._waiting.extend(sealed)
        if len(self._waiting) > 1 and self._waiting[-2].file > self._waiting[-1].file:
            # The row of a later file would say that this one is flushed.
            self._waiting = deque(sorted(self._waiting, key=lambda one: one.file))

    def begin(self) -> Sealed:
        """Take the oldest for the time of a flush."""
        assert self._under_way is None, "one flush at a time"
        self._under_way = self._waiting.popleft()
        return self._under_way

    def end(self, flushed: bool) -> None:
        """End the flush that began; one that failed is begun again later."""
        assert self._under_way is not None
        if not flushed:
            self._waiting.appendleft(self._under_way)
        self._under_way = None

    def is_open(self, file: int) -> bool:
        """Return whether a WAL file has no segment yet."""
        return file == self.wal.current or any(sealed.file == file for sealed in self.files())

    def files(self) -> Iterator[Sealed]:
        """Yield those that are sealed, the one under way first."""
        if self._under_way is not None:
            yield self._under_way
        yield from self._waiting

    def entries(self) -> Iterator[tuple[int, Entry]]:
        """Yield (uid, entry) of every file that has no segment, the current one last."""
        for sealed in self.files():
            yield from sealed.entries
        yield from list(self.wal.current_entries)


class Pin:
    """How many read a home, and until when it waits for the last of them (monotonic seconds)."""

    __slots__ = ("count", "until")

    def __init__(self) -> None:
        self.count = 0
        self.until = 0.0

    def add(self, until: float) -> None:
        """Count one more reader, who may take until then."""
        self.count += 1
        self.until = until

    def drop(self) -> bool:
        """Count one reader less; return whether that was the last."""
        self.count -= 1
        return not self.count


class Location:
    """Every home on this node: `files` by number, and who reads what. A pin lasts `pin_s` at most."""

    def __init__(self, store: StorePort, unflushed: Unflushed, pin_s: float) -> None:
        self.files: dict[int, SealedFile] = {}
        self.expired = 0
        self._store = store
        self._unflushed = unflushed
        self._pin_s = pin_s
        self._pins: dict[Home, Pin] = {}
        # Of pins that ended by themselves: how many will still be taken off.
        self._late: dict[Home, int] = {}
        self._doomed: dict[Home, Callable[[], None]] = {}

    def add(self, file: SealedFile) -> None:
        """Take in a file that is a home from now on, or still."""
        self.files[file.file] = file

    def pin(self, home: Home) -> None:
        """Promise not to destroy a home until `unpin`, or for `pin_s` at most. A slower reader hears `Gone`, and never
        gets other bytes: each single read holds the file or environment itself."""
        pin = self._pins.get(home)
        if pin is None:
            pin = self._pins[home] = Pin()
            if home[0] == "generation":
                self._store.pin(home[1])
        pin.add(time.monotonic() + self._pin_s)

    def unpin(self, home: Home) -> None:
        """End the promise; what waited for it happens now."""
        late = self._late.get(home, 0)
        if late:
            self._late[home] = late - 1
            if late == 1:
                del self._late[home]
            return
        if self._pins[home].drop():
            self._let_go(home)

    def expire(self, now: float) -> None:
        """End the promises that were not kept in time: nobody waits for a stuck reader."""
        for home, pin in list(self._pins.items()):
            if pin.until <= now:
                self._late[home] = self._late.get(home, 0) + pin.count
                self.expired += 1
                self._let_go(home)

    def _let_go(self, home: Home) -> None:
        del self._pins[home]
        if home[0] == "generation":
            self._store.unpin(home[1])
        give_up = self._doomed.pop(home, None)
        if give_up is not None:
            give_up()

    def recycle(self, file: int) -> None:
        """Give a WAL file that is no home any more back to the stock, when nobody reads it. Its entries in memory must
        not name it any more."""
        home = ("wal", file)
        if home in self._pins:
            self._doomed[home] = lambda: self._recycle(file)
        else:
            self._recycle(file)

    def _recycle(self, file: int) -> None:
        """Recycle a file, perhaps for a reader that gives its pin back: nothing of the janitor's trouble is the
        reader's."""
        jobs = self._store.jobs
        if jobs.frozen:
            return
        try:
            self._unflushed.wal.recycle(file)
        except OSError as error:
            log.error("storage: WAL file %d could not be recycled: %s", file, error)
        except Exception as error:
            jobs.freeze(f"the recycling of WAL file {file}", error)

    def unsealed(self) -> Iterator[tuple[int, Entry]]:
        """Yield (uid, entry) of every WAL file that has no segment yet."""
        return self._unflushed.entries()

    def is_open(self, file: int) -> bool:
        """Return whether a WAL file has no segment yet: it is then the home of all its entries."""
        return self._unflushed.is_open(file)

    def holds(self, entry: Entry | None) -> bool:
        """Return whether an entry's bytes are in memory or in a WAL file that is still a home."""
        if entry is None or entry.tombstone:
            return False
        return bool(entry.bodies) or entry.file in self.files or self._unflushed.is_open(entry.file)

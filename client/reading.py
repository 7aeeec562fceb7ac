"""What a member of a consumer group knows: its standing, the partitions that it reads, and how far. Sans-IO.

Invariants: a record is given only of a partition that is owned and not asked back; `done` is behind the last record
that the loop came back from, `given` behind the last one that it was given, `committed` is what a coordinator counted:
committed <= done <= given. A partition that is asked back is given up when all that was given of it is committed; one
that has slots of partitions which ended is read from there on when its coordinator says that those were. Used by the
consumers of all faces (`_async.consumer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, takewhile
from typing import NamedTuple

from logyard.protocol.groups import NO_OFFSET, Commit, Key, Owned, PartitionShape, Shape, Standing
from logyard.protocol.records import Page, Record
from logyard.protocol.topics import Partition, Topic, opened_envelope

STARTS = ("earliest", "latest", "error")


class Consumed:
    """A record of a topic. `key` is None for one that was sent without; the rest is as in `records.Record`."""

    __slots__ = ("topic", "partition", "epoch", "offset", "key", "metadata", "record")

    def __init__(self, topic: str, partition: int, epoch: int, record: Record) -> None:
        self.topic = topic
        self.partition = partition
        self.epoch = epoch
        self.offset = record.offset
        self.key, self.metadata = opened_envelope(record.metadata)
        self.record = record

    @property
    def payload(self) -> bytes | None:
        """The body, a copy; None for a record without one."""
        return self.record.payload

    @property
    def timestamp(self) -> int:
        """Log time of its partition when it was appended, in ms since 1970."""
        return self.record.timestamp

    def __repr__(self) -> str:
        return f"<{self.topic}.{self.partition} @{self.offset} key={self.key!r}>"


class Committed(NamedTuple):
    """What a commit came to: `offsets` by partition, as they count now; `lost`: partitions that others own by now, who
    read them from what was committed before."""

    offsets: dict[int, int]
    lost: tuple[int, ...]


class Reading:
    """One partition that is owned. `uid`: of its log, 0: not known; `born`: which one of its number it is;
    `known`: where to read from is clear; `put_off`: until then it is not asked where to begin; `limit`: from there on
    it may not be read yet; `end`: there is nothing from there on; `slow`: so often its pages did not arrive in time."""

    __slots__ = (
        "key", "epoch", "log", "uid", "born", "known", "put_off", "given", "done", "committed", "revoking", "records",
        "following", "passed", "limit", "end", "slow",
    )  # fmt: skip

    def __init__(self, owned: Owned, partition: Partition) -> None:
        self.key = owned.key
        self.epoch = owned.epoch
        self.log = partition.log
        self.uid = partition.uid
        self.put_off = 0.0
        self.born = partition.born
        self.passed = owned.passed
        self.limit: int | None = None
        self.end: int | None = None
        self.slow = 0
        self.known = owned.offset != NO_OFFSET
        self.revoking = owned.revoking
        self.records: Iterator[Record] = iter(())
        self.committed = self.done = self.given = self.following = max(owned.offset, 0)

    @property
    def number(self) -> int:
        """The partition's number."""
        return self.key[1]

    def begin(self, offset: int) -> None:
        """Read from here on."""
        self.done = self.given = self.following = offset
        self.records, self.known = iter(()), True

    def leave_until(self, until: float) -> None:
        """Note that it can't be asked where to begin, on the member's own clock."""
        self.put_off = until

    def fill(self, page: Page) -> None:
        """Take records that were fetched, those that may be read."""
        self.records, self.following, limit = iter(page), page.next, self.limit
        if limit is not None and limit < page.next:
            self.records, self.following = takewhile(lambda record: record.offset < limit, page), limit

    def slow_down(self) -> None:
        """Note that a page did not arrive in time: the next one is smaller, and has more time."""
        self.slow += 1

    def hurry(self) -> None:
        """Note that a page arrived in much less than its time."""
        self.slow -= 1

    def bound(self, partition: Partition | None, passed: int) -> None:
        """Take what its topic's row and its coordinator say of where it may be read; None: it is not in the row."""
        self.passed = passed
        if partition is None or partition.born != self.born:
            self.end = self.following
            return
        self.end = partition.end
        self.limit = min((join.offset for join in partition.joins if join.epoch > passed), default=None)

    @property
    def at_rest(self) -> bool:
        """There is nothing to be fetched of it, for now or for good."""
        return any(bound is not None and self.following >= bound for bound in (self.limit, self.end))

    def ask_back(self) -> None:
        """Note that it is to be given up: what was fetched is for whoever is next."""
        self.revoking, self.records = True, iter(())

    def give(self, offset: int) -> None:
        """Note that the loop got this record."""
        self.given = offset + 1

    def put_back(self, record: Record) -> None:
        """Have a record that was not given be the next one again."""
        self.records = chain((record,), self.records)

    def take_back(self, offset: int) -> None:
        """Note that the loop did not get this record after all: it is fetched again."""
        self.given = self.following = offset
        self.records = iter(())

    def finish(self, offset: int) -> None:
        """Note that the loop is done with everything up to this record."""
        self.done = max(self.done, min(offset + 1, self.given))

    def count(self, offset: int) -> None:
        """Note what a coordinator counted."""
        self.committed = max(self.committed, offset)

    @property
    def settled(self) -> bool:
        """All that was given of it is committed."""
        return (self.known and self.given == self.committed) or not self.known


class Membership:
    """The standing of a member. `member` 0: it has none. `version`: of the standing that it knows, 0: it is to be told
    again; `newest`: of those that it was told, none older than which counts. `lease`: until when it may give records,
    on its own clock. `revision`: the newest of the topic that it was told of; `looked_up`: the newest after which the
    topic was looked at."""

    __slots__ = ("member", "version", "newest", "lease", "readings", "revision", "looked_up")

    def __init__(self) -> None:
        self.member = 0
        self.version = self.newest = 0
        self.lease = 0.0
        self.readings: dict[Key, Reading] = {}
        self.revision = self.looked_up = 0

    def lose(self) -> None:
        """Own nothing, as no member."""
        self.member = self.version = self.newest = 0
        self.lease = 0.0
        self.readings = {}

    def hold(self, until: float) -> None:
        """Note that the coordinator answered."""
        self.lease = max(self.lease, until)

    def become(self, member: int) -> None:
        """Be a member."""
        self.member, self.version, self.newest = member, 0, 0

    def take(self, standing: Standing, row: Topic) -> None:
        """Take what the coordinator answered, unless something newer is known."""
        if standing.member != self.member:
            return
        self.revision = max(self.revision, standing.revisions.get(row.id, 0))
        if standing.owned is None or standing.version < self.newest:
            return
        self.version = self.newest = standing.version
        there = {one.number: one for one in row.readable}
        found = {}
        for owned in standing.owned:
            reading = self.readings.get(owned.key)
            partition = there.get(owned.key[1])
            if reading is None or reading.epoch != owned.epoch:
                told = standing.revisions.get(row.id, 0)
                if partition is None or told > max(row.revision, self.looked_up):
                    # A partition that this process has not heard of yet, maybe one that has a number which another one
                    # had before: it asks, and then is told again. Where nobody knows such a revision, as topics were
                    # restored, once is enough.
                    self.version, self.revision = 0, max(self.revision, row.revision + 1)
                    continue
                if partition.born and told < row.revision:
                    # The coordinator may mean the one that had its number before: it is told, and then says it again.
                    self.version = 0
                    continue
                reading = Reading(owned, partition)
            reading.bound(partition, owned.passed)
            if owned.revoking and not reading.revoking:
                reading.ask_back()
            found[owned.key] = reading
        self.readings = found

    def know(self, row: Topic, told: int = 0) -> None:
        """Take a row of the topic that was looked up after a coordinator had told of revision `told`."""
        self.looked_up = max(self.looked_up, told)
        there = {one.number: one for one in row.readable}
        for key, reading in self.readings.items():
            reading.bound(there.get(key[1]), reading.passed)

    def owns(self, reading: Reading) -> bool:
        """Return whether this is still its partition, in this ownership."""
        return self.readings.get(reading.key) is reading

    def commits(self) -> list[Commit]:
        """Return what may be committed, and is not."""
        return [
            Commit(one.key, one.epoch, one.done)
            for one in self.readings.values()
            if one.known and one.done > one.committed
        ]

    def awaited(self, row: Topic) -> list[int]:
        """Return the partitions of which the loop is done with all before a fence, or their end, and the coordinator
        does not know it: what comes behind that is read only then."""
        fences = [(one.number, one.end) for one in row.readable if one.end is not None]
        for one in row.readable:
            fences += chain(one.sources, *(join.sources for join in one.joins))
        found = set()
        for number, fence in fences:
            reading = self.readings.get((row.id, number))
            if reading is not None and reading.committed < fence <= reading.done:
                found.add(number)
        return sorted(found)

    def confirms(self) -> list[tuple[Key, int]]:
        """Return what can be given up now."""
        return [(one.key, one.epoch) for one in self.readings.values() if one.revoking and one.settled]

    def counted(self, commits: Sequence[Commit], refused: Sequence[Key]) -> Committed:
        """Take note of what came of commits."""
        lost = set(refused)
        offsets = {}
        for one in commits:
            if one.key in lost:
                continue
            offsets[one.key[1]] = one.offset
            reading = self.readings.get(one.key)
            if reading is not None and reading.epoch == one.epoch:
                reading.count(one.offset)
        return Committed(offsets, tuple(sorted(key[1] for key in lost if any(one.key == key for one in commits))))


def shape_of(row: Topic) -> Shape:
    """Return a topic as its groups need to know it."""
    partitions = (
        PartitionShape(one.number, one.zone, one.sources, one.born, one.joins, one.end) for one in row.readable
    )
    return Shape(row.id, row.name, row.revision, tuple(partitions))

"""Topics as they travel: rows, the layout of slots, the envelope of a key, commands of partition logs and of the
catalogue's section.

A key lies in one of 16,384 slots, a slot in one partition, a partition in one log. Which slot is where is the topic's
*layout*, of an *epoch* that rises with each change: an append says by which epoch it was routed, and a log that was
fenced at a later one refuses it. Pure; used by clients, `machines.catalog.topics` and `machines.log`.
docs/wire-client.md has every format.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgpack

from .errors import BadRequest, LogyardError, error_of
from .frame import Buffer, view_of

SLOTS = 16_384
PARTITIONS_MAX = 1024
"""Of one topic."""
NAME = re.compile(r"(?!_)[A-Za-z0-9._-]{1,120}")
"""Of a topic; a log's name has 128 characters."""
KEY_BYTES_MAX = 1024
TOPICS_LOG = "_topics"
"""The group that keeps the topics where no catalogue does."""
SECTION = "topics"
MAKING, LIVE, ADDING, REMOVING, DELETING = "making", "live", "adding", "removing", "deleting"

ENVELOPE = struct.Struct("<BBH")
"""Before a record's metadata: `MAGIC`, flags (1: there is a key), bytes of the key. The key follows."""
MAGIC = 0xF5
HAS_KEY = 1

KEYED_APPEND = struct.Struct("<BQQ")
KEYED_APPEND_CODE = 10
"""KEYED_APPEND_CODE, the topic's id, the epoch of the layout by which its records were routed."""
KEYED_PRODUCE = struct.Struct("<BQQQQ")
KEYED_PRODUCE_CODE = 11
"""The same, and a producer with its sequence."""
FENCE = struct.Struct("<BQQI")
FENCE_CODE = 12
"""FENCE_CODE, the topic's id, the new epoch, the partition's number; the new layout, packed. Its reply is FENCED."""
INHERIT = struct.Struct("<BQ")
INHERIT_CODE = 13
"""INHERIT_CODE, the topic's id; producers' windows, packed: before OPEN, into a new partition's log."""
OPEN = struct.Struct("<BQQI")
OPEN_CODE = 14
"""As FENCE, of a log that becomes a partition: from then on it takes keyed appends."""
ADOPT = struct.Struct("<BQQ")
ADOPT_CODE = 15
"""ADOPT_CODE, the topic's id, an epoch; producers' windows, packed: before the FENCE of that epoch, into the log of a
partition that gets slots of others then."""
FENCED = struct.Struct("<Q")
"""Where the log ended when it was fenced, or opened, at that epoch."""
PARTITION_CODES = (FENCE_CODE, INHERIT_CODE, OPEN_CODE, ADOPT_CODE)
STALE_PARTITIONS = "stale_partitions"
PARTITION_OPENING = "partition_opening"

Layout = tuple[tuple[int, int], ...]
"""Runs of (slots, partition) in the order of slots; together `SLOTS`."""


Sources = tuple[tuple[int, int], ...]
"""(partition, offset of its fence) of partitions that slots came from: whoever reads in a key's order has read them up
to there before."""


class Join(NamedTuple):
    """From `offset` on a partition has, since `epoch`, slots of partitions that ended."""

    epoch: int
    offset: int
    sources: Sources


class Partition(NamedTuple):
    """One log of a topic. `sources`: of those that its slots came from when it was added. `born`: the epoch in which a
    number came to be used again; 0: nobody had it before. `end`: it takes no records since it ended there, and is read
    up to there; `retired`: it is not even read, and its log goes."""

    number: int
    log: str
    uid: int = 0
    zone: str = ""
    sources: Sources = ()
    born: int = 0
    joins: tuple[Join, ...] = ()
    end: int | None = None
    retired: bool = False


PARTITION_BASE = 5
"""Fields that a packed partition always has; of the others those up to the last one that says anything."""


class Ended(NamedTuple):
    """A partition that ended and whose log is gone: a stream that had read it up to `end` has lost nothing."""

    log: str
    uid: int
    end: int


class Topic(NamedTuple):
    """A row of the section. `revision` rises with every change of any topic. While partitions are added (`adding`) or
    taken away (`removing`) `layout` and `epoch` are the old ones, and `coming` has the new ones and the numbers of the
    partitions that come or go. `ended`: the newest of those that are gone."""

    id: int
    name: str
    revision: int
    state: str
    epoch: int
    layout: Layout
    partitions: tuple[Partition, ...]
    next_partition: int
    members: tuple[int, ...] = ()
    options: Mapping[str, Any] = {}
    coming: tuple[int, Layout, tuple[int, ...]] | None = None
    ended: tuple[Ended, ...] = ()

    @property
    def live(self) -> tuple[Partition, ...]:
        """The partitions that take records: neither those that are being added nor those that ended."""
        new = self.coming[2] if self.coming is not None and self.state == ADDING else ()
        return tuple(one for one in self.partitions if one.end is None and one.number not in new)

    @property
    def draining(self) -> tuple[Partition, ...]:
        """The partitions that ended and still have records to be read."""
        return tuple(one for one in self.partitions if one.end is not None and not one.retired)

    @property
    def readable(self) -> tuple[Partition, ...]:
        """The partitions that are read."""
        return self.live + self.draining


def partition_log(topic: str, number: int) -> str:
    """Return the name of a partition's log."""
    return f"{topic}.{number}"


def check_topic_name(name: str) -> str:
    """Return a topic's name. Raises `BadRequest`."""
    if not NAME.fullmatch(name):
        raise BadRequest(f"{name[:128]!r} is no topic: at most 120 letters, digits, '.', '_', '-', not '_' first")
    return name


# Layouts


def first_layout(partitions: Sequence[int]) -> Layout:
    """Return the layout of a new topic: slots in even runs."""
    count = len(partitions)
    return tuple((SLOTS * (at + 1) // count - SLOTS * at // count, one) for at, one in enumerate(partitions))


def grown_layout(layout: Layout, new: Sequence[int]) -> Layout:
    """Return a layout in which the partitions `new` have their even share, taken from the others: no slot moves from
    an old one to another old one."""
    held = _held(layout)
    count = len(held) + len(new)
    wanted = [SLOTS * (at + 1) // count - SLOTS * at // count for at in range(len(new))]
    # Whoever has most gives: it is as if those that have least took, from below.
    give = _levelled({one: -slots for one, slots in held.items()}, sum(wanted))
    takers = [*zip(wanted, new, strict=True)]
    found: list[tuple[int, int]] = []
    # The last slots of each go, so that what stays is one run.
    for slots, owner in reversed(layout):
        goes = min(slots, give[owner])
        give[owner] -= goes
        found += _taken(takers, goes)
        found.append((slots - goes, owner))
    return _joined(reversed(found))


def shrunk_layout(layout: Layout, gone: Collection[int]) -> Layout:
    """Return a layout without the partitions `gone`: their slots go to whoever has least, no other slot moves."""
    held = {one: slots for one, slots in _held(layout).items() if one not in gone}
    takes = _levelled(held, SLOTS - sum(held.values()))
    # Each one's in a run, so that the layout stays short.
    takers = sorted(((slots, one) for one, slots in takes.items() if slots), key=itemgetter(1), reverse=True)
    found: list[tuple[int, int]] = []
    for slots, owner in layout:
        found += [(slots, owner)] if owner in held else _taken(takers, slots)
    return _joined(found)


def _held(layout: Layout) -> dict[int, int]:
    """Return how many slots each partition has, by rising number."""
    found = dict.fromkeys(sorted({partition for _, partition in layout}), 0)
    for slots, owner in layout:
        found[owner] += slots
    return found


def _levelled(counts: Mapping[int, int], more: int) -> dict[int, int]:
    """Return how many each gets of `more`, one after the other to whoever has least, of equals to the lowest number."""
    order = sorted(counts.values())
    level, left = order[0], more
    # Up to the level that all who have less can be filled to.
    for at, step in enumerate([*order[1:], order[-1] + more], 1):
        rise = min((step - level), left // at)
        level, left = level + rise, left - rise * at
        if level < step:
            break
    found = {one: max(0, level - count) for one, count in counts.items()}
    for one in sorted(one for one, count in counts.items() if count <= level)[:left]:
        found[one] += 1
    return found


def _taken(takers: list[tuple[int, int]], slots: int) -> list[tuple[int, int]]:
    """Return runs of so many slots for the last of those that take, which have them then."""
    found = []
    while slots:
        share, one = takers.pop()
        some = min(share, slots)
        if some < share:
            takers.append((share - some, one))
        found.append((some, one))
        slots -= some
    return found


def _joined(runs: Iterable[tuple[int, int]]) -> Layout:
    """Return runs as a layout: none is empty, no two neighbours are of one partition."""
    found: list[tuple[int, int]] = []
    for slots, one in runs:
        if found and found[-1][1] == one:
            found[-1] = (found[-1][0] + slots, one)
        elif slots:
            found.append((slots, one))
    return tuple(found)


def moved_slots(old: Layout, new: Layout) -> Iterator[tuple[int, int]]:
    """Yield (who had them, who has them) for runs of slots that go from one partition to another."""
    before, after = iter(old), iter(new)
    left = right = 0
    source = target = -1
    for _ in range(len(old) + len(new)):
        if not left:
            left, source = next(before, (0, -1))
        if not right:
            right, target = next(after, (0, -1))
        run = min(left, right)
        left, right = left - run, right - run
        if run and source != target:
            yield source, target


def slots_of(layout: Layout) -> list[int]:
    """Return the partition of each slot."""
    return [partition for slots, partition in layout for _ in range(slots)]


def pack_layout(layout: Layout) -> bytes:
    """Return a layout as a FENCE carries it."""
    data: bytes = msgpack.packb(layout)
    return data


def unpack_layout(data: bytes) -> Layout:
    """Return a layout as it was packed. Raises `BadRequest`."""
    try:
        found = tuple((int(slots), int(partition)) for slots, partition in msgpack.unpackb(data))
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise BadRequest("a layout is a list of (slots, partition)") from error
    if sum(slots for slots, _ in found) != SLOTS or min(slots for slots, _ in found) < 1:
        raise BadRequest(f"a layout has {SLOTS} slots")
    return found


# The envelope


def enveloped(key: Buffer | None, metadata: Buffer) -> bytes:
    """Return a record's metadata with its key in front. Raises `BadRequest`."""
    if key is not None and len(key) > KEY_BYTES_MAX:
        raise BadRequest(f"a key has at most {KEY_BYTES_MAX} bytes, not {len(key)}")
    try:
        if key is None:
            return b"".join((ENVELOPE.pack(MAGIC, 0, 0), metadata))
        return b"".join((ENVELOPE.pack(MAGIC, HAS_KEY, len(key)), key, metadata))
    except TypeError:
        view_of("a key", key or b"")
        view_of("metadata", metadata)
        raise


def opened_envelope(metadata: bytes) -> tuple[bytes | None, bytes]:
    """Return (key, metadata) of a record of a partition; what has no envelope was appended to the log directly."""
    if len(metadata) < ENVELOPE.size or metadata[0] != MAGIC:
        return None, metadata
    _, flags, size = ENVELOPE.unpack_from(metadata)
    end = ENVELOPE.size + size
    if flags & ~HAS_KEY or end > len(metadata):
        return None, metadata
    return (metadata[ENVELOPE.size : end] if flags & HAS_KEY else None), metadata[end:]


# Commands of partition logs


def keyed_append_command(topic: int, epoch: int) -> bytes:
    """Return the command of records that were routed by the layout of that epoch."""
    return KEYED_APPEND.pack(KEYED_APPEND_CODE, topic, epoch)


def keyed_produce_command(topic: int, epoch: int, producer: int, sequence: int) -> bytes:
    """Return the same, unless this producer wrote that sequence before."""
    return KEYED_PRODUCE.pack(KEYED_PRODUCE_CODE, topic, epoch, producer, sequence)


def fence_command(topic: int, epoch: int, partition: int, layout: Layout) -> bytes:
    """Return the command that makes a partition's log refuse what was routed before `epoch`."""
    return FENCE.pack(FENCE_CODE, topic, epoch, partition) + pack_layout(layout)


def inherit_command(topic: int, producers: Sequence[Any]) -> bytes:
    """Return the command by which a log that is not open yet learns what its sources' producers wrote."""
    return INHERIT.pack(INHERIT_CODE, topic) + bytes(msgpack.packb(producers))


def adopt_command(topic: int, epoch: int, producers: Sequence[Any]) -> bytes:
    """Return the command by which a partition's log learns what producers wrote to those that end at `epoch`; with none
    of them, that it takes nothing of that epoch before it is fenced for it."""
    return ADOPT.pack(ADOPT_CODE, topic, epoch) + bytes(msgpack.packb(producers))


def open_command(topic: int, epoch: int, partition: int, layout: Layout) -> bytes:
    """Return the command that makes a log a topic's partition."""
    return OPEN.pack(OPEN_CODE, topic, epoch, partition) + pack_layout(layout)


# The catalogue's section


ENDS_VERSION = 2
"""Of the section, and of the machine `groups`: the first one that knows partitions that end."""
SHRINKING = ("remove", "removed", "retire", "drained")
"""Commands of the section's version 2."""


def section_command(command: str, values: Mapping[str, Any], request: bytes) -> bytes:
    """Return a command of the section `topics`, as the catalogue's machine takes it."""
    version = ENDS_VERSION if command in SHRINKING else 1
    data: bytes = msgpack.packb([SECTION, version, command, values, request])
    return data


def section_question(question: str, values: Mapping[str, Any]) -> bytes:
    """Return a question to the section."""
    data: bytes = msgpack.packb([SECTION, question, values])
    return data


def section_answer(reply: bytes) -> Any:
    """Return what a command or a question came to. Raises the `LogyardError` that it was refused with."""
    code, value = msgpack.unpackb(reply, use_list=False, strict_map_key=False)
    if code is None:
        return value
    raise error_of({"code": code, "message": value, "retry": "never"})


def topic_of(packed: Sequence[Any]) -> Topic:
    """Return a row as `packed_topic` gave it, its arrays as tuples. Raises `LogyardError`."""
    try:
        number, name, revision, state, epoch, layout, partitions, following, members, options, coming, *more = packed
        (ended,) = more or ((),)
        found = Topic(
            number, name, revision, state, epoch, layout, tuple(map(_partition_of, partitions)), following, members,
            options, coming, tuple(Ended(*one) for one in ended),
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise LogyardError(f"a topic's row cannot be read: {error!r}") from error
    return found


def _partition_of(packed: Sequence[Any]) -> Partition:
    found = Partition(*packed)
    return found._replace(joins=tuple(Join(*one) for one in found.joins)) if found.joins else found


def packed_topic(topic: Topic) -> list[Any]:
    """Return a row as plain values: what only topics have from which partitions were taken, only where they have it."""
    row = [*topic[:6], [_packed_partition(one) for one in topic.partitions], *topic[7:11]]
    return [*row, topic.ended] if topic.ended else row


def _packed_partition(one: Partition) -> tuple[Any, ...]:
    count = len(one)
    while count > PARTITION_BASE and one[count - 1] == EMPTY[count - 1]:
        count -= 1
    return tuple(one[:count])


EMPTY = Partition(0, "")

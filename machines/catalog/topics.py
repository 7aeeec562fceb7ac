"""The topics of a cluster: names, partitions, and which partition each slot of keys lies in.

A section of the catalogue. A topic is an intent first (`making`, and `adding` or `removing` while partitions come or
go), which whoever comes by may finish: its logs are made or fenced, and then `made`, `added` or `removed` says so. A
partition that was taken away (version 2) is read until somebody finds that it was, and retires it; its number is free
when its log is gone (`drained`), and the lowest free one is the next to be used. Invariants: a slot lies in one
partition; adding partitions moves slots to new ones only, taking them away moves theirs only, and one change is
finished before the next begins; ids of topics are never used again, so an offset that is committed late hits no other
topic. A refused command changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any, ClassVar

import msgpack

from logyard.engine.machine import Reject
from logyard.protocol.errors import BadRequest
from logyard.protocol.topics import (
    ADDING,
    DELETING,
    LIVE,
    MAKING,
    PARTITIONS_MAX,
    REMOVING,
    SECTION,
    SHRINKING,
    Ended,
    Join,
    Layout,
    Partition,
    Topic,
    check_topic_name,
    first_layout,
    grown_layout,
    moved_slots,
    packed_topic,
    partition_log,
    shrunk_layout,
    topic_of,
)

from ..numbers import whole
from .section import At

TOPICS_MAX = 10_000
OPTIONS = ("age", "bytes", "records")
"""What a topic's logs keep (`Log.retain`): options of the whole topic."""
ENDED_MAX = 64
"""Partitions of a topic that are gone, and remembered."""
SHARD_IDS = 64


class Topics:
    """All topics, by name and id."""

    name: ClassVar[str] = SECTION
    version: ClassVar[int] = 2
    commands: ClassVar[Collection[str]] = (
        "create", "made", "add", "added", "options", "delete", "deleted", *SHRINKING,
    )  # fmt: skip
    questions: ClassVar[Collection[str]] = ("find", "list")

    def __init__(self) -> None:
        self.by_id: dict[int, Topic] = {}
        self.ids: dict[str, int] = {}
        self.next_id = 1
        self.revision = 0
        self._encoded: dict[int, bytes] = {}

    def apply(self, at: At, command: str, values: Mapping[str, Any]) -> Any:
        """Apply one of `commands`; return the topic's row afterwards. Raises `Reject`."""
        handlers: Mapping[str, Callable[[Mapping[str, Any]], Topic]] = {
            "create": self._create,
            "made": self._made,
            "add": self._add if at.version > 1 else self._add_next,
            "added": self._added,
            "remove": self._remove,
            "removed": self._removed,
            "retire": self._retire,
            "drained": self._drained,
            "options": self._options,
            "delete": self._delete,
            "deleted": self._deleted,
        }
        try:
            return packed_topic(handlers[command](values))
        except BadRequest as error:
            raise Reject(error.code, str(error)) from error

    def ask(self, question: str, values: Mapping[str, Any]) -> Any:
        """Answer `find` (a `name`) with a row, `list` with [revision, rows]. Raises `Reject`."""
        if question == "find":
            return packed_topic(self._named(values))
        return [self.revision, [packed_topic(self.by_id[number]) for _, number in sorted(self.ids.items())]]

    # Commands

    def _create(self, values: Mapping[str, Any]) -> Topic:
        name, wanted = check_topic_name(str(values["name"])), int(values["partitions"])
        if not 0 < wanted <= PARTITIONS_MAX:
            raise Reject("bad_request", f"a topic has 1 to {PARTITIONS_MAX} partitions, not {wanted}")
        options = _checked(values.get("options", {}))
        if name in self.ids:
            there = self.by_id[self.ids[name]]
            has = sum(one.end is None for one in there.partitions)
            # What it keeps may have been said anew since.
            if there.state == DELETING or has != wanted:
                raise Reject("group_exists", f"topic {name!r} is {there.state}, with {has} partitions")
            return there
        if len(self.by_id) >= TOPICS_MAX:
            raise Reject("too_many_topics", f"there are {TOPICS_MAX} topics")
        numbers = range(wanted)
        members = tuple(whole(one) for one in values.get("members", ()))
        partitions = tuple(Partition(number, partition_log(name, number)) for number in numbers)
        found = Topic(self.next_id, name, 0, MAKING, 1, first_layout(numbers), partitions, wanted, members, options)
        self.next_id += 1
        return self._put(found)

    def _made(self, values: Mapping[str, Any]) -> Topic:
        found = self._numbered(values)
        if found.state != MAKING:
            return found
        return self._put(found._replace(state=LIVE, partitions=_with_uids(found, values["uids"])))

    def _add(self, values: Mapping[str, Any]) -> Topic:
        """Begin to add partitions, of the lowest free numbers."""
        found = self._named(values)
        taken = {one.number for one in found.partitions}
        free = (number for number in count() if number not in taken)
        return self._coming(found, int(values["partitions"]), free)

    def _add_next(self, values: Mapping[str, Any]) -> Topic:
        """Begin to add partitions as in version 1: of numbers that nobody had."""
        found = self._named(values)
        return self._coming(found, int(values["partitions"]), count(found.next_partition))

    def _coming(self, found: Topic, wanted: int, free: Iterator[int]) -> Topic:
        there = sum(one.end is None for one in found.partitions)
        if found.state in (ADDING, LIVE) and there == wanted:
            return found
        self._check_settled(found)
        most = PARTITIONS_MAX - len(found.partitions) + there
        if not there < wanted <= most:
            raise Reject(
                "bad_request",
                f"topic {found.name!r} has {there} partitions: from there to {most} can be wanted, not {wanted}",
            )
        new = tuple(islice(free, wanted - there))
        layout, epoch = grown_layout(found.layout, new), found.epoch + 1
        added = tuple(
            Partition(number, partition_log(found.name, number), born=epoch if number < found.next_partition else 0)
            for number in new
        )
        return self._put(
            found._replace(
                state=ADDING, partitions=(*found.partitions, *added),
                next_partition=max(found.next_partition, new[-1] + 1), coming=(epoch, layout, new),
            )
        )  # fmt: skip

    def _check_settled(self, found: Topic) -> None:
        if found.state != LIVE:
            raise Reject("busy", f"topic {found.name!r} is {found.state}: finish that first (`logyard topic alter`)")

    def _added(self, values: Mapping[str, Any]) -> Topic:
        found = self._numbered(values)
        if found.state != ADDING or found.coming is None or found.coming[0] != int(values["epoch"]):
            return found
        epoch, layout, new = found.coming
        fences = {int(number): whole(offset) for number, offset in values["fences"]}
        if missing := [one.number for one in found.live if one.number not in fences]:
            raise Reject("bad_request", f"partition {missing[0]} of topic {found.name!r} has no fence yet")
        gave = _sources(found.layout, layout)
        partitions = tuple(
            one._replace(sources=tuple((source, fences[source]) for source in gave.get(one.number, ())))
            if one.number in new
            else one
            for one in _with_uids(found, values["uids"])
        )
        return self._put(
            found._replace(state=LIVE, epoch=epoch, layout=layout, partitions=partitions, coming=None)
        )  # fmt: skip

    def _remove(self, values: Mapping[str, Any]) -> Topic:
        """Begin to take partitions away, those of the highest numbers."""
        found, wanted = self._named(values), int(values["partitions"])
        there = [one.number for one in found.live]
        if found.state == REMOVING and found.coming is not None and len(there) - len(found.coming[2]) == wanted:
            return found
        if found.state == LIVE and len(there) == wanted:
            return found
        self._check_settled(found)
        if not 0 < wanted < len(there):
            raise Reject(
                "bad_request", f"topic {found.name!r} has {len(there)} partitions: at least one is left, not {wanted}"
            )
        gone = tuple(sorted(there)[wanted:])
        coming = found.epoch + 1, shrunk_layout(found.layout, gone), gone
        return self._put(found._replace(state=REMOVING, coming=coming))

    def _removed(self, values: Mapping[str, Any]) -> Topic:
        """Note where those that go ended, and from where on the others have their slots."""
        found = self._numbered(values)
        if found.state != REMOVING or found.coming is None or found.coming[0] != int(values["epoch"]):
            return found
        epoch, layout, gone = found.coming
        fences = {int(number): whole(offset) for number, offset in values["fences"]}
        if missing := [one.number for one in found.live if one.number not in fences]:
            raise Reject("bad_request", f"partition {missing[0]} of topic {found.name!r} has no fence yet")
        gave = _sources(found.layout, layout)
        partitions = []
        for one in found.partitions:
            if one.number in gone:
                one = one._replace(end=fences[one.number])
            elif one.number in gave:
                sources = tuple((source, fences[source]) for source in gave[one.number])
                one = one._replace(joins=(*one.joins, Join(epoch, fences[one.number], sources)))
            partitions.append(one)
        return self._put(
            found._replace(state=LIVE, epoch=epoch, layout=layout, partitions=tuple(partitions), coming=None)
        )  # fmt: skip

    def _retire(self, values: Mapping[str, Any]) -> Topic:
        """Have partitions that ended not be read any more: their logs may go."""
        found = self._numbered(values)
        gone = {one.number for one in _meant(found, values) if one.end is not None and not one.retired}
        if not gone:
            return found
        partitions = (one._replace(retired=True) if one.number in gone else one for one in found.partitions)
        return self._put(found._replace(partitions=tuple(partitions)))

    def _drained(self, values: Mapping[str, Any]) -> Topic:
        """Note that logs of retired partitions are gone: their numbers are free, and nobody waits for them."""
        found = self._numbered(values)
        gone = [one for one in _meant(found, values) if one.retired]
        if not gone:
            return found
        numbers = {one.number for one in gone}
        ended = tuple(Ended(one.log, one.uid, one.end or 0) for one in gone)
        partitions = tuple(_without(one, numbers) for one in found.partitions if one.number not in numbers)
        return self._put(found._replace(partitions=partitions, ended=(*found.ended, *ended)[-ENDED_MAX:]))

    def _options(self, values: Mapping[str, Any]) -> Topic:
        found = self._named(values)
        return self._put(found._replace(options=_checked(values["options"])))

    def _delete(self, values: Mapping[str, Any]) -> Topic:
        found = self._named(values)
        return found if found.state == DELETING else self._put(found._replace(state=DELETING, coming=None))

    def _deleted(self, values: Mapping[str, Any]) -> Topic:
        found = self._numbered(values)
        if found.state != DELETING:
            raise Reject("refused", f"topic {found.name!r} is {found.state}, not deleted")
        self.revision += 1
        del self.by_id[found.id], self.ids[found.name]
        self._encoded.pop(found.id // SHARD_IDS, None)
        return found._replace(revision=self.revision)

    # Rows

    def _named(self, values: Mapping[str, Any]) -> Topic:
        name = str(values.get("name", ""))
        if name not in self.ids:
            raise Reject("unknown_topic", f"there is no topic {name!r}")
        return self.by_id[self.ids[name]]

    def _numbered(self, values: Mapping[str, Any]) -> Topic:
        found = self.by_id.get(int(values["id"]))
        if found is None:
            raise Reject("unknown_topic", f"there is no topic with id {values['id']}")
        return found

    def _put(self, topic: Topic) -> Topic:
        self.revision += 1
        found = topic._replace(revision=self.revision)
        self.by_id[found.id], self.ids[found.name] = found, found.id
        self._encoded.pop(found.id // SHARD_IDS, None)
        return found

    # Snapshots

    def snapshot(self) -> Mapping[str, bytes]:
        """Return the shards by name: a shard that nothing happened to is the same object as before."""
        shards: dict[int, list[Topic]] = {}
        for number in sorted(self.by_id):
            shards.setdefault(number // SHARD_IDS, []).append(self.by_id[number])
        for shard, topics in shards.items():
            if shard not in self._encoded:
                self._encoded[shard] = msgpack.packb([packed_topic(one) for one in topics])
        own = msgpack.packb([self.next_id, self.revision])
        return {"own": own, **{f"rows{shard}": self._encoded[shard] for shard in shards}}

    def restore(self, shards: Mapping[str, bytes], version: int) -> None:
        """Take the place of what was packed."""
        self.next_id, self.revision = msgpack.unpackb(shards["own"])
        for name, data in shards.items():
            if name == "own":
                continue
            for packed in msgpack.unpackb(data, use_list=False, strict_map_key=False):
                found = topic_of(packed)
                self.by_id[found.id], self.ids[found.name] = found, found.id
            self._encoded[int(name.removeprefix("rows"))] = data

    def upgrade(self, from_version: int, to_version: int) -> None:
        """Have nothing to do: what version 2 keeps of a topic comes with its commands."""


def _checked(options: Any) -> dict[str, Any]:
    """Return a topic's options. Raises `Reject`."""
    if not isinstance(options, Mapping):
        raise Reject("bad_request", "a topic's options are a map")
    for name, value in options.items():
        kinds = (int, float) if name == "age" else (int,)
        if name not in OPTIONS or type(value) not in kinds or value < 0:
            raise Reject("bad_request", f"a topic's options are {', '.join(OPTIONS)}, numbers from 0 up; not {name!r}")
    return {name: value for name, value in sorted(options.items()) if value}


def _meant(topic: Topic, values: Mapping[str, Any]) -> list[Partition]:
    """Return the partitions that a command means: whoever was stopped on the way means none that has their number now.
    Without `uids` it is whichever has it."""
    numbers = [whole(number) for number in values["numbers"]]
    meant = dict(zip(numbers, values.get("uids") or (None,) * len(numbers), strict=True))
    return [one for one in topic.partitions if one.number in meant and meant[one.number] in (None, one.uid)]


def _with_uids(topic: Topic, uids: Sequence[Sequence[int]]) -> tuple[Partition, ...]:
    known = {int(number): whole(uid) for number, uid in uids}
    return tuple(one._replace(uid=known.get(one.number, one.uid)) for one in topic.partitions)


def _without(one: Partition, gone: Collection[int]) -> Partition:
    """Return a partition whose records nobody has to read after those of partitions that are gone."""
    joins = tuple(
        join._replace(sources=left)
        for join in one.joins
        if (left := tuple(source for source in join.sources if source[0] not in gone))
    )
    sources = tuple(source for source in one.sources if source[0] not in gone)
    return one._replace(joins=joins, sources=sources)


def _sources(old: Layout, new: Layout) -> dict[int, list[int]]:
    """Return, by partition that has slots which it had not, those that they came from."""
    found: dict[int, set[int]] = {}
    for before, after in moved_slots(old, new):
        found.setdefault(after, set()).add(before)
    return {number: sorted(sources) for number, sources in found.items()}

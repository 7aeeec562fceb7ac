"""The topics of a cluster: names, partitions, and which partition each slot of keys lies in.

A section of the catalogue. A topic is an intent first (`making`, and
`adding` while partitions are added), which whoever comes by may finish: its logs are made, and then `made` or `added`
says so, with their uids. Invariants: a slot lies in one partition; adding partitions moves slots to new ones only, and
one change is finished before the next begins; ids are never used again, so an offset that is committed late hits no
other topic. A refused command changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
    SECTION,
    Layout,
    Partition,
    Topic,
    check_topic_name,
    first_layout,
    grown_layout,
    packed_topic,
    partition_log,
    slots_of,
    topic_of,
)

from .section import At

TOPICS_MAX = 10_000
OPTIONS = ("age", "bytes", "records")
"""What a topic's logs keep (`Log.retain`): options of the whole topic."""
SHARD_IDS = 64


class Topics:
    """All topics, by name and id."""

    name: ClassVar[str] = SECTION
    version: ClassVar[int] = 1
    commands: ClassVar[Collection[str]] = ("create", "made", "add", "added", "options", "delete", "deleted")
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
            "add": self._add,
            "added": self._added,
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
        name, count = check_topic_name(str(values["name"])), int(values["partitions"])
        if not 0 < count <= PARTITIONS_MAX:
            raise Reject("bad_request", f"a topic has 1 to {PARTITIONS_MAX} partitions, not {count}")
        options = _checked(values.get("options", {}))
        if name in self.ids:
            there = self.by_id[self.ids[name]]
            # What it keeps may have been said anew since.
            if there.state == DELETING or len(there.partitions) != count:
                raise Reject(
                    "group_exists", f"topic {name!r} is {there.state}, with {len(there.partitions)} partitions"
                )
            return there
        if len(self.by_id) >= TOPICS_MAX:
            raise Reject("too_many_topics", f"there are {TOPICS_MAX} topics")
        numbers = range(count)
        members = tuple(int(one) for one in values.get("members", ()))
        partitions = tuple(Partition(number, partition_log(name, number)) for number in numbers)
        found = Topic(self.next_id, name, 0, MAKING, 1, first_layout(numbers), partitions, count, members, options)
        self.next_id += 1
        return self._put(found)

    def _made(self, values: Mapping[str, Any]) -> Topic:
        found = self._numbered(values)
        if found.state != MAKING:
            return found
        return self._put(found._replace(state=LIVE, partitions=_with_uids(found, values["uids"])))

    def _add(self, values: Mapping[str, Any]) -> Topic:
        found, wanted = self._named(values), int(values["partitions"])
        if found.state == ADDING and len(found.partitions) == wanted:
            return found
        if found.state == LIVE and len(found.partitions) == wanted:
            return found
        if found.state != LIVE:
            raise Reject("busy", f"topic {found.name!r} is {found.state}: finish that first (`logyard topic alter`)")
        if not len(found.partitions) < wanted <= PARTITIONS_MAX:
            raise Reject(
                "bad_request",
                f"topic {found.name!r} has {len(found.partitions)} partitions: from there to {PARTITIONS_MAX} can be "
                f"wanted, not {wanted}",
            )
        new = tuple(range(found.next_partition, found.next_partition + wanted - len(found.partitions)))
        layout = grown_layout(found.layout, new)
        partitions = (*found.partitions, *(Partition(number, partition_log(found.name, number)) for number in new))
        return self._put(
            found._replace(
                state=ADDING, partitions=partitions, next_partition=new[-1] + 1, coming=(found.epoch + 1, layout, new)
            )
        )

    def _added(self, values: Mapping[str, Any]) -> Topic:
        found = self._numbered(values)
        if found.coming is None or found.coming[0] != int(values["epoch"]):
            return found
        epoch, layout, new = found.coming
        fences = {int(number): int(offset) for number, offset in values["fences"]}
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
        """Have nothing to do: there is one version."""


def _checked(options: Any) -> dict[str, Any]:
    """Return a topic's options. Raises `Reject`."""
    if not isinstance(options, Mapping):
        raise Reject("bad_request", "a topic's options are a map")
    for name, value in options.items():
        kinds = (int, float) if name == "age" else (int,)
        if name not in OPTIONS or type(value) not in kinds or value < 0:
            raise Reject("bad_request", f"a topic's options are {', '.join(OPTIONS)}, numbers from 0 up; not {name!r}")
    return {name: value for name, value in sorted(options.items()) if value}


def _with_uids(topic: Topic, uids: Sequence[Sequence[int]]) -> tuple[Partition, ...]:
    known = {int(number): int(uid) for number, uid in uids}
    return tuple(one._replace(uid=known.get(one.number, one.uid)) for one in topic.partitions)


def _sources(old: Layout, new: Layout) -> dict[int, list[int]]:
    """Return, by new partition, those that its slots came from."""
    found: dict[int, set[int]] = {}
    for before, after in zip(slots_of(old), slots_of(new), strict=True):
        if before != after:
            found.setdefault(after, set()).add(before)
    return {number: sorted(sources) for number, sources in found.items()}

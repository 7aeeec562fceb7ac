"""Topics: `Topic` sends records to partitions by key, exactly once, and makes, alters and deletes a topic.

A record's key says its slot, the topic's layout its partition, and the append says by which epoch of the layout it was
routed: a log that was fenced since refuses it, tells the new layout, and the record goes where its slot lies now. What
is to be made of a topic is an intent in the catalogue's section first, so whoever finds it unfinished finishes it.
Handles are made by a yard's `topic`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import msgpack

from logyard.protocol.errors import BadRequest, GroupExists, LogyardError, Refused, Unknown, UnknownGroup
from logyard.protocol.frame import Buffer
from logyard.protocol.groups import NO_OFFSET, coordinators, offsets_question, unpacked
from logyard.protocol.topics import (
    ADDING,
    DELETING,
    ENDS_VERSION,
    FENCED,
    MAKING,
    PARTITION_OPENING,
    REMOVING,
    STALE_PARTITIONS,
    TOPICS_LOG,
    Layout,
    Partition,
    adopt_command,
    check_topic_name,
    enveloped,
    fence_command,
    inherit_command,
    keyed_append_command,
    keyed_produce_command,
    open_command,
    partition_log,
    section_answer,
    section_command,
    section_question,
    slots_of,
    topic_of,
    unpack_layout,
)
from logyard.protocol.topics import (
    Topic as Row,
)

from ..log import FORGOTTEN, delete_partition_call, latest_call, partition_call
from ..numbering import Numbering, Turn, producer_number, slot_of
from ..upload import WHOLE_BYTES
from .caller import Caller
from .log import LogVerbs
from .machine import MachineVerbs
from .producer import wait_for_turn

COPIES = 3
"""Members of the groups that a yard makes for topics and consumer groups themselves."""
OPENING_PAUSE_S = 0.05
RESUME_S = 2.0
"""A partition that is not open for so long is perhaps nobody's business any more: who waits for it opens it."""
UPGRADE_S = 5.0
"""A system group that was just made, or whose nodes were just updated, takes a second to come to a version."""
LET_GO_S = 10.0
"""So long it is waited until nodes have let the log go that had a partition's name before."""
AGE_S_MIN, AGE_S_MAX = 1, (1 << 50) // 1000
KEPT_MAX = (1 << 63) - 1
"""What logs take as a limit on what they keep."""
INHERIT_ROWS = 64
"""Producers of one INHERIT: some 64 KiB."""


class TopicsYard(Caller, Protocol):
    """A yard, as topics and consumers need it."""

    def log(self, name: str) -> LogVerbs:
        """Return an append log."""

    def machine(self, name: str) -> MachineVerbs:
        """Return a group of any machine."""

    async def nodes(self) -> list[int]:
        """Return the nodes of the cluster."""

    async def create(
        self, name: str, *, members: Sequence[int] | None = None, machine: str = "log", **arguments: object
    ) -> None:
        """Create a group."""

    async def create_many(
        self, names: Iterable[str], *, members: Sequence[int] | None = None, machine: str = "log", **arguments: object
    ) -> None:
        """Create groups."""

    async def delete(self, name: str, force_on: int | None = None) -> None:
        """Delete a group."""


class Sent(NamedTuple):
    """Where a record lies."""

    partition: int
    offset: int


class Routing(NamedTuple):
    """Which partition each slot lies in, by one epoch of a topic's layout."""

    topic: int
    epoch: int
    slots: list[int]
    partitions: list[int]


async def system_group(yard: TopicsYard, name: str, machine: str) -> None:
    """Make one of the groups that topics and consumer groups are kept in, if it is not there."""
    try:
        await yard.create(name, machine=machine, members=sorted(await yard.nodes())[:COPIES])
    except GroupExists:
        # By somebody who saw other nodes.
        return


async def upgraded(yard: TopicsYard, name: str, patience: float = UPGRADE_S) -> None:
    """Wait until a system group knows partitions that end: its machine comes to that version by itself, soon after
    enough of its nodes know it. Raises `Refused` after so many seconds."""
    until = yard.clock() + patience
    while (await yard.describe(name))["machine_state"]["version"] < ENDS_VERSION:
        if yard.clock() >= until:
            raise Refused(f"group {name!r} does not know partitions that end yet: too few of its nodes do, update them")
        await yard.pause(OPENING_PAUSE_S)


async def nobody_has(yard: TopicsYard, error: UnknownGroup) -> bool:
    """Return whether no node has a group: that one does not says nothing of others, to which it may have moved."""
    return error.retry == "never" or len(await yard.nodes()) == 1


async def look_up(yard: TopicsYard, name: str, timeout: float | None = None) -> Row:
    """Return a topic's row. Raises a `LogyardError` of code ``unknown_topic``."""
    question = section_question("find", {"name": name})
    try:
        reply = await yard.machine(TOPICS_LOG).query(question, consistency="linearizable", timeout=timeout)
    except UnknownGroup as error:
        if not await nobody_has(yard, error):
            raise
        raise unknown_topic(name) from None
    return topic_of(section_answer(reply))


async def all_topics(yard: TopicsYard) -> list[Row]:
    """Return the rows of all topics, by name."""
    try:
        reply = await yard.machine(TOPICS_LOG).query(section_question("list", {}), consistency="linearizable")
    except UnknownGroup as error:
        if not await nobody_has(yard, error):
            raise
        return []
    return [topic_of(one) for one in section_answer(reply)[1]]


def unknown_topic(name: str) -> LogyardError:
    """Return the error of a topic that is not there."""
    return LogyardError(f"there is no topic {name!r}", code="unknown_topic")


class Topic:
    """The topic `name`; nothing is asked until it is used."""

    __slots__ = ("yard", "name", "_routing", "_turn")

    def __init__(self, yard: TopicsYard, name: str) -> None:
        self.yard = yard
        self.name = check_topic_name(name)
        self._routing: Routing | None = None
        self._turn = 0

    # Records

    async def send(
        self,
        key: Buffer | None,
        metadata: Buffer = b"",
        payload: Buffer | None = None,
        *,
        timeout: float | None = None,
        compress: str | None = None,
    ) -> Sent:
        """Append one record to the partition of its key, exactly once as `Log.append`; return where it lies, once a
        quorum has it. Records of one key that are sent one after the other are read in that order. Without a key: to
        one partition after the other. `timeout` (seconds) is that of each piece of a payload above 1 MiB. Raises a
        `LogyardError`."""
        head = enveloped(key, metadata)
        slot = None if key is None else slot_of(key)
        deadline = self.yard.clock() + (self.yard.timeout if timeout is None else timeout)
        while True:
            routing = self._routing or await self._route()
            number = self._partition(routing, slot)
            command = keyed_append_command(routing.topic, routing.epoch)
            log, began = self.yard.log(partition_log(self.name, number)), self.yard.clock()
            try:
                left = max(0.001, deadline - began)
                offset = await log.append(head, payload, timeout=left, compress=compress, command=command)
                return Sent(number, offset)
            except LogyardError as error:
                deadline = _put_off(deadline, self.yard.clock() - began, [(head, payload)])
                await self._reroute(error, number, routing, deadline)

    async def send_many(
        self, records: Iterable[tuple[Buffer | None, Buffer, Buffer | None]], *, timeout: float | None = None
    ) -> list[Sent]:
        """Append (key, metadata, payload) records: those of one partition together or not at all; return where each of
        them lies. Raises a `LogyardError`: then those of other partitions may lie there."""
        left = [
            (at, None if key is None else slot_of(key), (enveloped(key, metadata), payload))
            for at, (key, metadata, payload) in enumerate(records)
        ]
        found: list[Sent | None] = [None] * len(left)
        deadline = self.yard.clock() + (self.yard.timeout if timeout is None else timeout)
        while left:
            routing = self._routing or await self._route()
            number = self._partition(routing, left[0][1])
            mine = [one for one in left if one[1] is None or routing.slots[one[1]] == number]
            command = keyed_append_command(routing.topic, routing.epoch)
            log, began = self.yard.log(partition_log(self.name, number)), self.yard.clock()
            pairs = [pair for _, _, pair in mine]
            try:
                offsets = await log.append_many(pairs, timeout=max(0.001, deadline - began), command=command)
            except LogyardError as error:
                deadline = _put_off(deadline, self.yard.clock() - began, pairs)
                await self._reroute(error, number, routing, deadline)
                continue
            deadline = _put_off(deadline, self.yard.clock() - began, pairs)
            for (at, _, _), offset in zip(mine, offsets, strict=True):
                found[at] = Sent(number, offset)
            left = [one for one in left if found[one[0]] is None]
        return [one for one in found if one is not None]

    async def producer(self, name: int | str) -> TopicProducer:
        """Return an idempotent producer of this topic, by its number or a name: what it sends again under the same
        sequence, also as another process, is in the topic once, in whichever partition its key lies by then. Its `last`
        is the highest sequence that it has written."""
        number, last = producer_number(name), 0
        asked = msgpack.packb(["producer", number])
        row, seen = await self.describe(), list[Row]()
        while row not in seen:
            # One that is being added may be open already, and takes records.
            for one in row.partitions:
                if one.end is not None:
                    continue
                try:
                    reply = await self.yard.log(one.log).query(asked, consistency="linearizable")
                except UnknownGroup:
                    if one in row.live:
                        raise
                    continue
                last = max(last, msgpack.unpackb(reply))
            row, seen = await self.describe(), [row]
        return TopicProducer(self, number, last)

    async def produce(
        self,
        producer: int,
        turn: Turn,
        key: Buffer | None,
        metadata: Buffer,
        payload: Buffer | None,
        deadline: float,
    ) -> Sent:
        """Append a producer's record; the offset is -1 where it was written before, it is not known where."""
        if key is None:
            raise BadRequest("a record of a producer needs a key: it is looked for in the partition of that")
        head, slot = enveloped(key, metadata), slot_of(key)
        while True:
            routing = self._routing or await self._route()
            number = self._partition(routing, slot)
            command = keyed_produce_command(routing.topic, routing.epoch, producer, turn.sequence)
            log, began = self.yard.log(partition_log(self.name, number)), self.yard.clock()
            try:
                left = max(0.001, deadline - began)
                offsets = await log.append_many([(head, payload)], timeout=left, command=command)
                return Sent(number, offsets[0] if offsets else -1)
            except LogyardError as error:
                if error.code == FORGOTTEN and turn.trusted:
                    return Sent(number, -1)
                deadline = _put_off(deadline, self.yard.clock() - began, [(head, payload)])
                await self._reroute(error, number, routing, deadline)

    def _partition(self, routing: Routing, slot: int | None) -> int:
        if slot is not None:
            return routing.slots[slot]
        self._turn += 1
        return routing.partitions[self._turn % len(routing.partitions)]

    async def _route(self) -> Routing:
        """Find out where slots lie."""
        row = await look_up(self.yard, self.name)
        if row.state == MAKING:
            row = await self.finish(row)
        if row.state == DELETING:
            raise unknown_topic(self.name)
        slots = slots_of(row.layout)
        found = self._routing = Routing(row.id, row.epoch, slots, sorted(set(slots)))
        return found

    async def _reroute(self, error: LogyardError, number: int, routing: Routing, deadline: float) -> None:
        """Find the way anew after a refusal that says that it changed. Raises what else it was."""
        if isinstance(error, UnknownGroup):
            # Deleted, made anew, or its partition was taken away: whether there is another way the row says.
            if self._routing is routing:
                self._routing = None
            found = self._routing or await self._route()
            if (found.topic, found.epoch) != (routing.topic, routing.epoch):
                return
            raise error
        if error.code not in (STALE_PARTITIONS, PARTITION_OPENING) or self.yard.clock() >= deadline:
            if error.code == STALE_PARTITIONS and self._routing is routing:
                # Whoever sends it again is not to go there once more.
                self._routing = None
            raise error
        if self._routing is not routing and self._routing is not None and error.code == STALE_PARTITIONS:
            return
        if error.code == PARTITION_OPENING:
            await self._wait_open(number, routing, deadline)
            return
        told = await self._told(partition_log(self.name, number))
        if told is None or told[0] != routing.topic:
            self._routing = None
            return
        slots = slots_of(unpack_layout(told[3]))
        self._routing = Routing(routing.topic, told[2], slots, sorted(set(slots)))

    async def _wait_open(self, number: int, routing: Routing, deadline: float) -> None:
        """Wait until a partition takes records of that layout; do what is left to be done for that where nobody
        does."""
        patience = min(deadline, self.yard.clock() + RESUME_S)
        log = self.yard.log(partition_log(self.name, number))
        while self.yard.clock() < patience:
            try:
                told = msgpack.unpackb(await log.query(msgpack.packb(["partition"])))
                if told is not None and told[2] >= routing.epoch:
                    return
            except UnknownGroup:
                # It is about to be made.
                pass
            await self.yard.pause(OPENING_PAUSE_S)
        await self.finish(await look_up(self.yard, self.name))

    # What it is

    async def describe(self) -> Row:
        """Return the topic's row: its partitions, their logs, the layout. Raises ``unknown_topic``."""
        return await look_up(self.yard, self.name)

    async def create(
        self,
        partitions: int = 1,
        *,
        members: Sequence[int] | None = None,
        age: float = 0.0,
        bytes: int = 0,
        records: int = 0,
    ) -> Row:
        """Make the topic and its logs, `TOPIC.0` and so on, on `members` (all nodes); what they keep as in
        `Log.retain`. Raises `GroupExists` when it is there with another number of partitions, or a log of such a name
        with another definition; `Refused` when such a log has records of its own."""
        values = {
            "name": self.name,
            "partitions": partitions,
            "members": sorted(members or ()),
            "options": _options(age, bytes, records),
        }
        return await self.finish(await self._tell("create", values))

    async def grow(self, partitions: int) -> Row:
        """Add partitions until there are so many. Keys move to new partitions only, and consumers read them in order:
        a new partition is read when everything before it was. Raises `Refused` where a log of such a name has records
        of its own, `GroupExists` where it has another definition: all keys can be sent as before."""
        row = await self.finish()
        if len(row.live) < len(row.partitions):
            # A number that is free again is used again.
            await self.retire(row)
        return await self.finish(await self._tell("add", {"name": self.name, "partitions": partitions}))

    async def shrink(self, partitions: int, *, force: bool = False) -> Row:
        """Take partitions away until there are so many, those of the highest numbers. Their keys move to the others,
        and are read in their order: what was in a partition stays to be read until each consumer group has committed
        all of it, or it is empty, and goes then. `force`: it goes at once, also what nobody has read."""
        await self.finish()
        await upgraded(self.yard, TOPICS_LOG)
        row = await self.finish(await self._tell("remove", {"name": self.name, "partitions": partitions}))
        return await self.retire(row, force=force)

    async def alter(self, partitions: int, *, force: bool = False) -> Row:
        """Add or take away partitions until there are so many: `grow`, or `shrink` with `force`. With as many as there
        are it lets those go that ended and were read since."""
        row = await self.finish()
        if partitions > len(row.live):
            if force:
                raise BadRequest(f"topic {self.name!r} has {len(row.live)} partitions: `force` is to have fewer")
            return await self.grow(partitions)
        return await self.shrink(partitions, force=force)

    async def retain(self, *, age: float = 0.0, bytes: int = 0, records: int = 0) -> Row:
        """Say what each partition keeps from now on, as `Log.retain`; 0 is no limit."""
        row = await self._tell("options", {"name": self.name, "options": _options(age, bytes, records)})
        for one in row.readable:
            await self.yard.log(one.log).retain(age=age, bytes=bytes, records=records)
        return row

    async def purge(self) -> int:
        """Drop all records that are in the topic; return how many those were."""
        count = 0
        for one in (await self.describe()).readable:
            log = self.yard.log(one.log)
            start, end = await log.latest()
            await log.truncate(end)
            count += end - start
        return count

    async def delete(self) -> None:
        """Delete the topic with all of its logs; what had such a name before it, and is somebody's own, stays. Offsets
        of consumer groups are of no more use, and are forgotten with their groups."""
        row = await self._tell("delete", {"name": self.name})
        for one in row.partitions:
            await self._give_up(row, one.log)
        self._routing = None
        try:
            await self._tell("deleted", {"id": row.id})
        except LogyardError as error:
            if error.code != "unknown_topic":
                raise

    # How it comes to be

    async def _tell(self, command: str, values: dict[str, Any]) -> Row:
        data = section_command(command, values, os.urandom(16))
        try:
            reply = await self.yard.machine(TOPICS_LOG).command(data)
        except UnknownGroup:
            await system_group(self.yard, TOPICS_LOG, "topics")
            reply = await self.yard.machine(TOPICS_LOG).command(data)
        return topic_of(section_answer(reply))

    async def finish(self, row: Row | None = None) -> Row:
        """Do what is left of a change that somebody began; several may do it at once. Return the row as it is then.
        `row`: as it was seen last."""
        row = row or await self.describe()
        try:
            return await self._finished(row)
        except LogyardError as error:
            if error.code == "unknown_topic" or isinstance(error, UnknownGroup):
                await self._clear_up(row)
            raise

    async def _finished(self, row: Row) -> Row:
        if row.state == MAKING:
            numbers = [one.number for one in row.partitions]
            layout, epoch = row.layout, row.epoch
            await self._make(row, numbers, lambda one: open_command(row.id, epoch, one.number, layout))
            await self._keep(row, numbers)
            return await self._tell("made", {"id": row.id, "uids": await self._uids(row)})
        if row.state == ADDING:
            row = await self._add(row)
            self._routing = None
        if row.state == REMOVING:
            row = await self._remove(row)
            self._routing = None
        return row

    async def _clear_up(self, row: Row) -> None:
        """Delete logs that were made for a topic behind its deletion: nobody else would, and its name would never be
        free again."""
        try:
            if (found := await look_up(self.yard, self.name)).id == row.id and found.state != DELETING:
                return
        except LogyardError as error:
            if error.code != "unknown_topic":
                return
        for one in row.partitions:
            with suppress(Refused):
                await self._delete_log(row, one.log)

    async def _add(self, row: Row) -> Row:
        """Make new partitions, fence the others, let the new ones know their producers, and open them."""
        assert row.coming is not None
        epoch, layout, numbers = row.coming
        # From then on it knows what a topic's record is, so that those who come too early are told to wait.
        await self._make(row, numbers, lambda one: inherit_command(row.id, []))
        new = [one for one in row.partitions if one.number in numbers]
        for one in new:
            # Before any fence: behind that the keys that are to move to it could not be sent anywhere.
            await self._check_empty(one.log)
        fences = []
        for source in row.live:
            fences.append((source.number, await self._fence(row, source, epoch, layout)))
            for some in await self._producers(source):
                for one in new:
                    await self._command(one, inherit_command(row.id, some))
        await self._open(row, epoch, layout, numbers)
        for one in new:
            if (await self._told(one.log))[2] < epoch:
                # Whoever had been stopped since an earlier change opened it, before it knew its producers.
                for source in row.live:
                    for some in await self._producers(source):
                        await self._command(one, adopt_command(row.id, epoch, some))
                await self._fence(row, one, epoch, layout)
        values = {"id": row.id, "epoch": epoch, "fences": fences, "uids": await self._uids(row)}
        return await self._tell("added", values)

    async def _check_empty(self, name: str) -> None:
        """Check that a log is a partition, or can become one. Raises `Refused`."""
        # In this order: what others open meanwhile has records of the topic at once.
        if (await self.yard.log(name).latest()).end and await self._told(name) is None:
            raise Refused(f"log {name!r} has records of its own: delete it, then the topic can grow")

    async def _told(self, name: str) -> Any:
        """Return what a log says of the partition that it is; None for one that is none."""
        return msgpack.unpackb(
            await self.yard.log(name).query(msgpack.packb(["partition"]), consistency="linearizable")
        )

    async def _remove(self, row: Row) -> Row:
        """Fence partitions that go, let those that stay know their producers, and have them take their slots."""
        assert row.coming is not None
        epoch, layout, numbers = row.coming
        stay = [one for one in row.live if one.number not in numbers]
        for one in stay:
            # From now on it takes nothing of that layout before it knows what the others' producers wrote.
            await self._command(one, adopt_command(row.id, epoch, []))
        fences = []
        for source in row.live:
            if source.number in numbers:
                fences.append((source.number, await self._fence(row, source, epoch, layout)))
                for some in await self._producers(source):
                    for one in stay:
                        await self._command(one, adopt_command(row.id, epoch, some))
        for one in stay:
            fences.append((one.number, await self._fence(row, one, epoch, layout)))
        return await self._tell("removed", {"id": row.id, "epoch": epoch, "fences": fences})

    async def _command(self, one: Partition, command: bytes) -> bytes:
        return await self.yard.run(partition_call(one.log, command))

    async def _fence(self, row: Row, one: Partition, epoch: int, layout: Layout) -> int:
        """Have a partition's log refuse what was routed before; return where it stands."""
        offset: int = FENCED.unpack(await self._command(one, fence_command(row.id, epoch, one.number, layout)))[0]
        return offset

    async def _producers(self, one: Partition) -> list[list[Any]]:
        """Return what a partition's producers wrote, in parts."""
        asked = msgpack.packb(["producers"])
        found = msgpack.unpackb(await self.yard.log(one.log).query(asked, consistency="linearizable"))
        return [found[at : at + INHERIT_ROWS] for at in range(0, len(found), INHERIT_ROWS)]

    # How partitions go

    async def retire(self, row: Row | None = None, *, force: bool = False, timeout: float | None = None) -> Row:
        """Let partitions go that ended and were read: each consumer group that knows the topic has committed up to
        their ends, or they are empty; with `force` all that ended. Return the row as it is then. `row`: as it was seen
        last. `timeout` (seconds): for each question whether one was read."""
        row = row or await self.describe()
        gone = [one.number for one in row.draining if force or await self._is_empty(one, timeout)]
        left = [one for one in row.draining if one.number not in gone]
        if left:
            gone += await self._read_by_all(row, left, timeout)
        if gone:
            # First nobody is to begin with it; then its log goes; then its number is free.
            row = await self._tell("retire", _named(row, [one for one in row.partitions if one.number in gone]))
        retired = [one for one in row.partitions if one.retired]
        for one in retired:
            await self._delete_log(row, one.log, one.uid)
        if retired:
            row = await self._tell("drained", _named(row, retired))
        return row

    async def _is_empty(self, one: Partition, timeout: float | None) -> bool:
        bounds = await self.yard.run(latest_call(one.log, None, None), timeout)
        return bounds.start >= bounds.end

    async def _read_by_all(self, row: Row, draining: Sequence[Partition], timeout: float | None) -> list[int]:
        """Return the numbers of those that each group has read; none where there is no group, or nobody can tell."""
        groups: list[dict[tuple[int, int], int]] = []
        for name in coordinators():
            try:
                question = offsets_question(row.id)
                reply = await self.yard.machine(name).query(question, consistency="linearizable", timeout=timeout)
            except UnknownGroup as error:
                if not await nobody_has(self.yard, error):
                    # It may know groups that lack records.
                    return []
                # It coordinates nobody.
                continue
            for _, offsets in unpacked(reply):
                groups.append({(number, born[0] if born else 0): offset for number, offset, *born in offsets})
        if not groups:
            return []
        # A group that has not heard of this one yet may have read another one of its number.
        return [
            one.number
            for one in draining
            if all(own.get((one.number, one.born), NO_OFFSET) >= (one.end or 0) for own in groups)
        ]

    async def _give_up(self, row: Row, name: str) -> None:
        """Delete a partition's log, or what a former topic of this name left there; what is somebody's own stays."""
        try:
            await self._delete_log(row, name)
        except Refused:
            with suppress(LogyardError):
                told = await self._told(name)
                if told is not None and told[0] != row.id:
                    await self._delete_log(row._replace(id=told[0]), name)

    async def _delete_log(self, row: Row, name: str, uid: int = 0) -> None:
        """Delete a partition's log; with `uid` that one only: its name may be another's by now."""
        call = delete_partition_call(name, row.id, uid)
        try:
            try:
                await self.yard.run(call)
            except Unknown:
                # An answer was lost on the way: asked anew, what was deleted by that is not there.
                await self.yard.run(call)
        except UnknownGroup:
            # By whoever began this.
            return

    async def _make(self, row: Row, numbers: Sequence[int], first: Callable[[Partition], bytes]) -> None:
        """Make logs, and give each its first command."""
        new = [one for one in row.partitions if one.number in numbers]
        until = self.yard.clock() + LET_GO_S
        while not await self._made(row, new, first, self.yard.clock() >= until):
            await self.yard.pause(OPENING_PAUSE_S * 4)

    async def _made(self, row: Row, new: Sequence[Partition], first: Callable[[Partition], bytes], late: bool) -> bool:
        """Return whether that could be done: nodes let the former log of a name go soon after it was deleted. Raises
        what stands in the way of it, if it is `late`."""
        try:
            await self.yard.create_many([one.log for one in new], members=row.members or None)
        except (GroupExists, Refused):
            # A node that was away has the former one still, until others tell it.
            if late or not any(one.born for one in new):
                raise
            return False
        try:
            for one in new:
                await self._command(one, first(one))
        except UnknownGroup:
            # Who was asked to make it had the former one still, and took it for the same.
            now = await self.describe()
            if late or (now.id, now.state, now.coming) != (row.id, row.state, row.coming):
                raise
            return False
        return True

    async def _open(self, row: Row, epoch: int, layout: Layout, numbers: Sequence[int]) -> None:
        """Make logs the topic's partitions; only then they keep what it says: one that was somebody's own is refused,
        and loses nothing."""
        for one in row.partitions:
            if one.number in numbers:
                await self._command(one, open_command(row.id, epoch, one.number, layout))
        await self._keep(row, numbers)

    async def _keep(self, row: Row, numbers: Sequence[int]) -> None:
        for one in row.partitions:
            if row.options and one.number in numbers:
                await self.yard.log(one.log).retain(**row.options)

    async def _uids(self, row: Row) -> list[tuple[int, int]]:
        there = [one for one in row.partitions if not one.retired]
        return [(one.number, int((await self.yard.locate(one.log))["uid"])) for one in there]


class TopicProducer(Numbering):
    """An idempotent producer, made by `Topic.producer`."""

    __slots__ = ("_topic",)

    def __init__(self, topic: Topic, number: int, last: int) -> None:
        super().__init__(number, last)
        self._topic = topic

    async def send(
        self, key: Buffer, metadata: Buffer = b"", payload: Buffer | None = None, *, sequence: int | None = None
    ) -> Sent:
        """Append one record unless this producer wrote that sequence (default: the next one) before; return where it
        lies. The offset is -1 for one that was written, it is not known where.

        A sequence waits while one that comes 64 before it is not written. Raises a `LogyardError` of code
        `sequence_forgotten` as `Producer.append_many` does.
        """
        yard, turn = self._topic.yard, self.begin(sequence)
        try:
            deadline = yard.clock() + yard.timeout
            await wait_for_turn(yard, self, turn, deadline)
            found = await self._topic.produce(self.number, turn, key, metadata, payload, deadline)
        except BaseException as error:
            self.end(turn, yard.clock(), error)
            raise
        self.end(turn, yard.clock())
        return found


def _put_off(deadline: float, spent: float, records: Sequence[tuple[Buffer, Buffer | None]]) -> float:
    """Return until when there is time for the rest, after so many seconds were spent on an append: a record that
    travels in pieces has its time for each of them, and takes none of what is left to find its way."""
    payload = records[0][1] if len(records) == 1 else None
    return deadline + spent if payload is not None and len(payload) > WHOLE_BYTES else deadline


def _named(row: Row, partitions: Sequence[Partition]) -> dict[str, Any]:
    """Return what names partitions in a command, so that it means no others that have their numbers by then."""
    return {"id": row.id, "numbers": [one.number for one in partitions], "uids": [one.uid for one in partitions]}


def _options(age: float, size: int, records: int) -> dict[str, float | int]:
    """Return what a topic keeps. Raises `BadRequest` for what its logs would refuse when the topic is made already."""
    if age and not AGE_S_MIN <= age <= AGE_S_MAX:
        raise BadRequest(f"records are kept for {AGE_S_MIN} to {AGE_S_MAX} seconds, not for {age}")
    if not (0 <= size <= KEPT_MAX and 0 <= records <= KEPT_MAX):
        raise BadRequest(f"what is kept are 0 to {KEPT_MAX} bytes and records, not {size} and {records}")
    return {name: value for name, value in (("age", age), ("bytes", size), ("records", records)) if value}

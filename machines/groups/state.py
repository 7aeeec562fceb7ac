"""One consumer group: members, whose each partition is, and how far it was read. Written by this file only.

Invariants (`check`): a partition has at most one owner, who is a member; its epoch rises whenever its owner changes, so
an ownership is (partition, epoch) for ever; an owner that is asked to give it up keeps it, and may commit, until it
confirms or `due` has come, and who is asked once is asked until then, whoever joins meanwhile; an offset only grows,
but for a reset, when there are no members. A partition that was added later has no owner before the group has committed
everything before the fences of those that its slots came from; one that has slots of partitions which ended is read
from there on when those were (`passed`); one that ended has no owner when it was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from logyard.engine.machine import Reject
from logyard.protocol.groups import (
    NO_OFFSET,
    UNKNOWN_MEMBER,
    Commit,
    Key,
    Owned,
    PartitionShape,
    Shape,
)
from logyard.protocol.topics import Join, Sources

from ..numbers import whole
from .assign import Place, Reader, assign

MEMBERS_MAX = 256
PARTITIONS_MAX = 2048
"""Of all topics that one group reads."""
OFFSET_MAX = (1 << 63) - 1


class Member:
    """A process that consumes. `version` rises with every change of what it owns; `deadline`: when it is given up."""

    __slots__ = ("number", "name", "instance", "ttl", "zone", "topics", "deadline", "version", "since")

    def __init__(
        self, number: int, name: str, instance: int, ttl: int, zone: str, topics: Sequence[int], now: int
    ) -> None:  # fmt: skip
        self.number = number
        self.name = name
        self.instance = instance
        self.ttl = ttl
        self.zone = zone
        self.topics = tuple(topics)
        self.deadline = now + ttl
        self.version = 1
        self.since = now

    def heard(self, now: int) -> None:
        """Begin its time to live anew."""
        self.deadline = now + self.ttl

    def changed(self) -> None:
        """Note that what it owns is another thing now."""
        self.version += 1


class Part:
    """A partition, as this group has it. `owner` 0: nobody; `due`: when it is taken from an owner that was asked to
    give it up, 0 while none was; `target`: whose it is to be then; `born`: which one of its number it is."""

    __slots__ = ("owner", "epoch", "target", "due", "offset", "born")

    def __init__(self, born: int = 0, epoch: int = 0) -> None:
        self.owner = 0
        self.epoch = epoch
        self.target = 0
        self.due = 0
        self.offset = NO_OFFSET
        self.born = born

    def become(self, born: int) -> None:
        """Be another partition of the same number: nobody's, and not read."""
        self.grant(0)
        self.offset, self.born = NO_OFFSET, born

    def grant(self, member: int) -> None:
        """Give it to a member, or to nobody, in a new epoch."""
        self.owner, self.due, self.target = member, 0, member
        self.epoch += 1

    def ask_back(self, target: int, due: int) -> None:
        """Ask the owner for it; who was asked before has the time that it had."""
        self.target = target
        self.due = self.due or due

    def aim(self, target: int) -> None:
        """Say whose it is to be when its owner has given it up."""
        self.target = target

    def commit(self, offset: int) -> None:
        """Note how far it was read."""
        self.offset = max(self.offset, offset)

    def reset(self, offset: int) -> None:
        """Have it read from here on."""
        self.offset = offset

    def wait(self, until: int) -> None:
        """Leave its owner time until then at least."""
        if self.due:
            self.due = max(self.due, until)


class Group:
    """See the module. `idle_since`: since when it has no members."""

    __slots__ = ("name", "members", "names", "shapes", "parts", "idle_since", "rebalances", "_floor", "_joins", "_ends")

    def __init__(self, name: str, now: int) -> None:
        self.name = name
        self.members: dict[int, Member] = {}
        self.names: dict[str, int] = {}
        self.shapes: dict[int, Shape] = {}
        self.parts: dict[Key, Part] = {}
        self.idle_since = now
        self.rebalances = 0
        # The highest epoch of a partition that went: no ownership of a later one of its number is an earlier one's.
        self._floor = 0
        # Of the shapes: partitions that have slots of others, and those that ended.
        self._joins: dict[Key, tuple[Join, ...]] = {}
        self._ends: dict[Key, int] = {}

    # Members

    def join(
        self, number: int, name: str, instance: int, ttl: int, zone: str, shapes: Sequence[Shape], now: int,
        patience: int, from_start: bool = False,
    ) -> Member:  # fmt: skip
        """Take a member in, or one's newer process in its place; return it, or the one that joined as this instance
        before. `from_start` as in `learn`. Raises `Reject`."""
        older = self.members.get(self.names.get(name, 0)) if name else None
        for one in self.members.values():
            if one.instance == instance and one.name == name:
                one.heard(now)
                return one
        if older is None and len(self.members) >= MEMBERS_MAX:
            raise Reject("too_many_members", f"consumer group {self.name!r} has {MEMBERS_MAX} members")
        self.check_room(shapes)
        member = Member(number, name, instance, ttl, zone, [shape.topic for shape in shapes], now)
        self.members[member.number] = member
        if name:
            self.names[name] = member.number
        if older is not None:
            self._replace(older, member)
        self._learn(shapes, from_start)
        if older is None or older.topics != member.topics or self._waits() or self._holds_read():
            self.rebalance(now, patience)
        return member

    def _replace(self, older: Member, newer: Member) -> None:
        """Give a newer process what the older one had, each in a new epoch: nothing else moves."""
        del self.members[older.number]
        for part in self.parts.values():
            if part.target == older.number:
                part.aim(newer.number)
            if part.owner == older.number:
                # What it was asked for, nobody holds any more.
                part.grant(newer.number if not part.due else 0)

    def member(self, name: str, number: int) -> Member:
        """Return a member. Raises `Reject`: ``fenced`` when a newer process has its name."""
        found = self.members.get(number)
        if found is not None and found.name == name:
            return found
        if name and self.names.get(name, 0) > number:
            raise Reject("fenced", f"a newer process is member {name!r} of consumer group {self.name!r}")
        raise Reject(
            UNKNOWN_MEMBER, f"member {number} of consumer group {self.name!r} was silent for too long, or left"
        )

    def drop(self, numbers: Iterable[int], now: int, patience: int) -> None:
        """Let members go; others take what they had."""
        gone = set(numbers)
        for number in gone:
            member = self.members.pop(number)
            if self.names.get(member.name) == number:
                del self.names[member.name]
        for part in self.parts.values():
            if part.owner in gone:
                part.grant(0)
        if not self.members:
            self.idle_since = now
        self.rebalance(now, patience)

    # What they read

    def check_room(self, shapes: Sequence[Shape]) -> None:
        """Check that it may read these, too. Raises `Reject`."""
        known = {**self.shapes, **{shape.topic: shape for shape in shapes}}
        if sum(len(shape.partitions) for shape in known.values()) > PARTITIONS_MAX:
            raise Reject("too_many_partitions", f"a consumer group reads {PARTITIONS_MAX} partitions at most")

    def _learn(self, shapes: Sequence[Shape], from_start: bool) -> bool:
        """Take topics as they are now, unless they are known as newer; return whether any changed."""
        changed = False
        for shape in shapes:
            known = self.shapes.get(shape.topic)
            if known is not None and known.revision >= shape.revision:
                continue
            self.shapes[shape.topic] = shape
            changed = True
            there = {one.number: one.born for one in shape.partitions}
            for key in [key for key in self.parts if key[0] == shape.topic and key[1] not in there]:
                part = self.parts.pop(key)
                self._floor = max(self._floor, part.epoch)
                self._owner_changed(part.owner)
            for number, born in there.items():
                came = (shape.topic, number) not in self.parts
                part = self.parts.setdefault((shape.topic, number), Part(born, self._floor))
                if part.born != born:
                    came = True
                    self._owner_changed(part.owner)
                    part.become(born)
                if came and known is not None and from_start:
                    part.reset(0)
        if changed:
            self._index()
            for key in self._joins:
                # From where on it may not be read yet is news.
                self._owner_changed(self.parts[key].owner)
        return changed

    def _index(self) -> None:
        rows = [((shape.topic, one.number), one) for shape in self.shapes.values() for one in shape.partitions]
        self._joins = {key: one.joins for key, one in rows if one.joins}
        self._ends = {key: one.end for key, one in rows if one.end is not None}

    def _owner_changed(self, number: int) -> None:
        owner = self.members.get(number)
        if owner is not None:
            owner.changed()

    def learn(self, shapes: Sequence[Shape], now: int, patience: int, from_start: bool = False) -> None:
        """Take topics as they are now. `from_start`: a partition that comes to a topic which it knew is read from its
        start, wherever a member would begin with one: it has what came behind that of others."""
        if self._learn(shapes, from_start):
            self.rebalance(now, patience)

    def _readable(self) -> dict[Key, str]:
        """Return the zone of each partition that may be read: those before it, by their fences, were, and it was not
        read to its end."""
        found = {}
        for shape in self.shapes.values():
            for one in shape.partitions:
                key = shape.topic, one.number
                if not self._is_read(key) and self._are_past(shape.topic, one.sources):
                    found[key] = one.zone
        return found

    def _is_read(self, key: Key) -> bool:
        """Return whether a partition ended, and there is nothing left of it."""
        end = self._ends.get(key)
        return end is not None and self.parts[key].offset >= end

    def _holds_read(self) -> bool:
        """Return whether somebody has, or is to have, a partition of which nothing is left."""
        return any(self._is_read(key) and self.parts[key].target for key in self._ends)

    def _are_past(self, topic: int, sources: Sources) -> bool:
        return all(self._past((topic, source), fence) for source, fence in sources)

    def _passed(self, key: Key) -> int:
        """Return up to which epoch a partition's joins may be read."""
        passed = 0
        for join in self._joins.get(key, ()):
            if not self._are_past(key[0], join.sources):
                break
            passed = join.epoch
        return passed

    def _waits(self) -> bool:
        """Return whether somebody could have a partition that nobody has."""
        if all(part.owner for part in self.parts.values()):
            return False
        wanted = {topic for member in self.members.values() for topic in member.topics}
        return any(key[0] in wanted and not self.parts[key].owner for key in self._readable())

    def _past(self, key: Key, fence: int) -> bool:
        part = self.parts.get(key)
        return part is None or part.offset >= fence

    def rebalance(self, now: int, patience: int) -> None:
        """Decide whose each partition is to be; what nobody owns is granted at once, the rest when its owner has given
        it up, or `patience` ms from now."""
        self.rebalances += 1
        zones = self._readable()
        readers = {number: Reader(one.zone, one.topics) for number, one in self.members.items()}
        places = {
            key: Place(part.target if part.due else part.owner, zones[key])
            for key, part in self.parts.items()
            if key in zones
        }
        wanted = assign(readers, places)
        changed: set[int] = set()
        for key in sorted(self.parts):
            part, to = self.parts[key], wanted.get(key, 0)
            if not part.owner:
                if to:
                    part.grant(to)
                    changed.add(to)
            elif part.due:
                part.aim(to)
            elif part.owner != to:
                part.ask_back(to, now + patience)
                changed.add(part.owner)
        for number in changed:
            self.members[number].changed()

    def confirm(self, member: Member, confirms: Iterable[tuple[Key, int]]) -> list[Key]:
        """Take back what a member gives up, for whoever is next; return those that it does not own."""
        refused = []
        for key, epoch in confirms:
            part = self._owned(member, key, epoch)
            if part is None:
                refused.append(key)
                continue
            self._pass_on(part)
            member.changed()
        return refused

    def _pass_on(self, part: Part) -> None:
        to = self.members.get(part.target)
        part.grant(to.number if to is not None else 0)
        if to is not None:
            to.changed()

    def commit(self, member: Member, commits: Iterable[Commit], now: int, patience: int) -> list[Key]:
        """Note how far a member has read what it owns; return the partitions that it does not own (any more). Raises
        `Reject`."""
        refused = []
        counted: dict[Key, Part] = {}
        offsets: dict[Key, int] = {}
        for one in commits:
            part = self._owned(member, one.key, one.epoch)
            if part is None:
                refused.append(one.key)
            elif not 0 <= one.offset <= OFFSET_MAX:
                raise Reject("bad_request", f"an offset is a number from 0 up, not {one.offset}")
            else:
                counted[one.key], offsets[one.key] = part, max(one.offset, offsets.get(one.key, 0))
        passed = {key: self._passed(key) for key in self._joins}
        for key, part in counted.items():
            part.commit(offsets[key])
        for key, before in passed.items():
            if self._passed(key) != before:
                self._owner_changed(self.parts[key].owner)
        if counted and (self._waits() or self._holds_read()):
            # It may have come past a fence that a partition waited for, or to the end of one.
            self.rebalance(now, patience)
        return refused

    def _owned(self, member: Member, key: Key, epoch: int) -> Part | None:
        part = self.parts.get(key)
        return part if part is not None and part.owner == member.number and part.epoch == epoch else None

    def reset(self, offsets: Iterable[tuple[Key, int, int]]) -> None:
        """Have partitions read from other offsets. Raises `Reject` while there are members."""
        self.check_idle("reset")
        wanted = list(offsets)
        if any(not 0 <= offset <= OFFSET_MAX for _, offset, _ in wanted):
            raise Reject("bad_request", "an offset is a number from 0 up")
        if len({key for key, _, _ in wanted} - self.parts.keys()) + len(self.parts) > PARTITIONS_MAX:
            raise Reject("too_many_partitions", f"a consumer group reads {PARTITIONS_MAX} partitions at most")
        for key, offset, born in wanted:
            part = self.parts.setdefault(key, Part(born, self._floor))
            if part.born < born:
                part.become(born)
            if part.born == born:
                part.reset(offset)

    def check_idle(self, what: str) -> None:
        """Check that it has no members. Raises `Reject`."""
        if self.members:
            raise Reject(
                "group_active",
                f"consumer group {self.name!r} has {len(self.members)} members: stop them, or wait until their time to "
                f"live is over, to {what} it",
            )

    # Time

    def due(self, idle_ms: int) -> int:
        """Return when something has to happen if nothing else does, in ms of log time."""
        if not self.members:
            return self.idle_since + idle_ms
        first = min(one.deadline for one in self.members.values())
        return min((part.due for part in self.parts.values() if 0 < part.due < first), default=first)

    def pass_time(self, now: int, patience: int) -> None:
        """Give up members that were silent for too long, and take what was not given up in time."""
        for part in self.parts.values():
            if part.due and part.due <= now:
                owner = self.members.get(part.owner)
                if owner is not None:
                    owner.changed()
                self._pass_on(part)
        silent = [one.number for one in self.members.values() if one.deadline <= now]
        if silent:
            self.drop(silent, now, patience)

    def renew(self, now: int) -> None:
        """Give every member all of its time again, and what is asked back a time to live: nobody could reach whoever
        led before."""
        for one in self.members.values():
            one.heard(now)
        for part in self.parts.values():
            owner = self.members.get(part.owner)
            if owner is not None:
                part.wait(now + owner.ttl)

    # What is told

    def standing(self, member: Member, known: int, refused: Sequence[Key] = ()) -> list[Any]:
        """Return what a member is answered, a `Standing` as plain values."""
        owned = None
        if known != member.version:
            owned = tuple(
                _packed_owned(Owned(key, part.epoch, part.offset, part.due > 0, self._passed(key)))
                for key, part in sorted(self.parts.items())
                if part.owner == member.number
            )
        revisions = {topic: self.shapes[topic].revision for topic in member.topics if topic in self.shapes}
        return [member.number, member.version, owned, refused, revisions]

    def offsets(self, topic: int) -> list[list[int]] | None:
        """Return [number, offset, born], without `born` where it is 0, of the partitions of a topic that it reads, or
        was to read; None of one that it does not know."""
        parts = sorted(self.parts.items())
        found = [[key[1], part.offset, *_told_born(part)] for key, part in parts if key[0] == topic]
        return found if found or topic in self.shapes else None

    def positions(self) -> Iterator[tuple[int, str, int, int, int]]:
        """Yield (topic, its name, number, born, offset) of the partitions that it has read something of. Of topics of
        one name the newest, which has the name now: what was read of a deleted one stays."""
        newest = {shape.name: topic for topic, shape in sorted(self.shapes.items())}
        for (topic, number), part in self.parts.items():
            shape = self.shapes.get(topic)
            if shape is not None and newest[shape.name] == topic and part.offset >= 0:
                yield topic, shape.name, number, part.born, part.offset

    def described(self) -> dict[str, Any]:
        """Return everything about it, in plain values."""
        return {
            "group": self.name,
            "state": "stable" if self.members and not any(part.due for part in self.parts.values())
            else "rebalancing" if self.members else "empty",
            "rebalances": self.rebalances,
            "topics": [[shape.topic, shape.name, shape.revision] for _, shape in sorted(self.shapes.items())],
            "members": [
                [one.number, one.name, one.zone, one.ttl, one.since,
                 sum(part.owner == one.number for part in self.parts.values())]
                for _, one in sorted(self.members.items())
            ],
            "partitions": [
                [*key, part.owner, part.epoch, part.offset, part.due > 0, part.target]
                for key, part in sorted(self.parts.items())
            ],
            "born": [[*key, part.born] for key, part in sorted(self.parts.items()) if part.born],
        }  # fmt: skip

    def check(self) -> None:
        """Check the invariants."""
        for key, part in self.parts.items():
            assert not part.owner or part.owner in self.members, f"{key} is owned by {part.owner}, who is no member"
            assert not part.due or part.owner, f"{key} is asked back from nobody"
            assert part.offset >= NO_OFFSET
        for name, number in self.names.items():
            assert self.members[number].name == name
        counts = {number: 0 for number in self.members}
        for part in self.parts.values():
            whose = part.target if part.due else part.owner
            if whose:
                counts[whose] = counts.get(whose, 0) + 1
        if len({one.topics for one in self.members.values()}) == 1 and counts:
            assert max(counts.values()) - min(counts.values()) <= 1, f"uneven: {counts}"

    # Snapshots

    def pack(self) -> list[Any]:
        """Return it for a snapshot."""
        members = [
            [one.number, one.name, one.instance, one.ttl, one.zone, one.topics, one.deadline, one.version, one.since]
            for one in self.members.values()
        ]
        parts = [
            [key, part.owner, part.epoch, part.target, part.due, part.offset, *_told_born(part)]
            for key, part in self.parts.items()
        ]
        shapes = [shape.packed() for shape in self.shapes.values()]
        more = [self._floor] if self._floor else []
        return [self.name, self.idle_since, self.rebalances, members, shapes, parts, *more]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Group:
        """Return it as it was packed."""
        name, idle, rebalances, members, shapes, parts, *floor = packed
        found = cls(name, idle)
        found.rebalances = rebalances
        found._floor = floor[0] if floor else 0
        for number, own, instance, ttl, zone, topics, deadline, version, since in members:
            one = Member(number, own, instance, ttl, zone, topics, deadline - ttl)
            one.version, one.since = version, since
            found.members[number] = one
            if own:
                found.names[own] = number
        found.shapes = {shape.topic: shape for shape in shapes_of(shapes)}
        for key, owner, epoch, target, due, offset, *born in parts:
            part = found.parts[key] = Part(*born)
            part.owner, part.epoch, part.target, part.due, part.offset = owner, epoch, target, due, offset
        found._index()
        return found


def _told_born(part: Part) -> Sequence[int]:
    """Return which one of its number a partition is, behind what else is told of it; nothing of the first one."""
    return (part.born,) if part.born else ()


def shapes_of(packed: Iterable[Sequence[Any]], ends: bool = True) -> list[Shape]:
    """Return topics as a member told them. `ends`: partitions may end, and get slots of those that do. Raises what
    numbers that are none raise."""
    found = []
    for topic, name, revision, partitions in packed:
        rows = tuple(_partition_of(*one) for one in partitions if ends or _is_plain(one))
        found.append(Shape(whole(topic), str(name), whole(revision), rows))
    return found


def _partition_of(
    number: Any, zone: Any, sources: Any, born: Any = 0, joins: Any = (), end: Any = None
) -> PartitionShape:  # fmt: skip
    return PartitionShape(
        whole(number), str(zone), _sources_of(sources), whole(born),
        tuple(Join(whole(epoch), whole(offset), _sources_of(told)) for epoch, offset, told in joins),
        None if end is None else whole(end),
    )  # fmt: skip


def _is_plain(packed: Sequence[Any]) -> bool:
    """Return True for a partition as the first version knows it. Raises ValueError for another one."""
    _, _, _ = packed
    return True


def _sources_of(packed: Any) -> Sources:
    return tuple((whole(source), whole(fence)) for source, fence in packed)


def _packed_owned(one: Owned) -> tuple[Any, ...]:
    return tuple(one) if one.passed else tuple(one[:4])


def commits_of(packed: Iterable[Sequence[Any]]) -> list[Commit]:
    """Return commits as a member told them."""
    return [Commit((whole(topic), whole(number)), int(epoch), int(offset)) for (topic, number), epoch, offset in packed]


def rows_of(packed: Iterable[Sequence[Any]]) -> list[tuple[Key, int]]:
    """Return (partition, number) pairs as they were told."""
    return [((whole(topic), whole(number)), int(value)) for (topic, number), value in packed]


def resets_of(packed: Iterable[Sequence[Any]], ends: bool) -> list[tuple[Key, int, int]]:
    """Return (partition, offset, when it was born) as they were told. `ends` as in `shapes_of`."""
    rows = [(key, int(value), *map(whole, born)) for key, value, *born in packed]
    if any(len(row) > (3 if ends else 2) for row in rows):
        raise ValueError("an offset is of a partition")
    return [((whole(row[0][0]), whole(row[0][1])), row[1], row[2] if len(row) > 2 else 0) for row in rows]


__all__ = ["Group", "Member", "Part", "commits_of", "resets_of", "rows_of", "shapes_of"]

"""Consumer groups as they travel: what members tell their coordinator, and what it answers.

A group's coordinator is one of 16 groups of the machine `groups`, by a hash of its name. Commands and answers are
msgpack arrays; a partition is named by (topic id, number), an ownership by that and its epoch. Pure; used by clients
and by `machines.groups`. docs/machines/groups.md says what each does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

from .errors import BadRequest, LogyardError
from .topics import Join, Sources

COORDINATORS = 16
MACHINE = "groups"
NAME_MAX = 200
TTL_MS_MIN, TTL_MS_MAX = 1000, 300_000
JOIN, BEAT, LEAVE, RESET, DELETE = "join", "beat", "leave", "reset", "delete"
NO_OFFSET = -1
FENCED, UNKNOWN_MEMBER, GROUP_ACTIVE = "fenced", "unknown_member", "group_active"

Key = tuple[int, int]
"""A partition: (topic id, number)."""


class PartitionShape(NamedTuple):
    """A partition as a group needs to know it: what `topics.Partition` has under the same names."""

    number: int
    zone: str = ""
    sources: Sources = ()
    born: int = 0
    joins: tuple[Join, ...] = ()
    end: int | None = None


PARTITION_BASE = 3
"""Fields that one always has where it is packed; of the others those up to the last one that says anything."""
EMPTY = PartitionShape(0)


class Shape(NamedTuple):
    """A topic as a group needs to know it: its partitions that are read."""

    topic: int
    name: str
    revision: int
    partitions: tuple[PartitionShape, ...]

    @property
    def is_plain(self) -> bool:
        """Whether no partition ended or has what others had: the machine's first version knows it."""
        return all(len(_packed_partition(one)) == PARTITION_BASE for one in self.partitions)

    def packed(self) -> list[Any]:
        """Return it as plain values."""
        return [*self[:3], [_packed_partition(one) for one in self.partitions]]


class Owned(NamedTuple):
    """A partition that a member owns. `offset`: where its next record is, as far as was committed; `revoking`: it is to
    be given up, and confirmed, as soon as what was read of it is committed. `passed`: of its joins, those up to this
    epoch may be read: what has to be read before was."""

    key: Key
    epoch: int
    offset: int
    revoking: bool
    passed: int = 0


class Standing(NamedTuple):
    """What a coordinator answers a member. `version`: of what it owns; `owned` is None where that is the version that
    the member knows. `refused`: commits and confirmations of ownerships that it has not. `revisions`: of its topics, as
    the group knows them."""

    member: int
    version: int
    owned: tuple[Owned, ...] | None
    refused: tuple[Key, ...]
    revisions: Mapping[int, int]


class Commit(NamedTuple):
    """An offset of a partition, counted if the member owns it in that epoch."""

    key: Key
    epoch: int
    offset: int


def check_group_name(name: str) -> str:
    """Return a consumer group's name. Raises `BadRequest`."""
    if not 0 < len(name) <= NAME_MAX:
        raise BadRequest(f"a consumer group has a name of 1 to {NAME_MAX} characters")
    return name


def coordinator_of(group: str) -> str:
    """Return the name of the group that coordinates a consumer group."""
    digest = hashlib.blake2b(check_group_name(group).encode(), digest_size=2).digest()
    return f"_groups-{int.from_bytes(digest, 'little') % COORDINATORS}"


def coordinators() -> list[str]:
    """Return the names of all coordinators."""
    return [f"_groups-{number}" for number in range(COORDINATORS)]


def join_command(
    group: str, name: str, instance: int, ttl_ms: int, zone: str, shapes: Sequence[Shape]
) -> bytes:  # fmt: skip
    """Return the command of a process that begins to consume. `name`: of its member, or nothing; `instance`: its own
    number, another one each time that it joins."""
    return _packed([JOIN, group, name, instance, ttl_ms, zone, [shape.packed() for shape in shapes]])


def beat_command(
    group: str,
    name: str,
    member: int,
    version: int,
    commits: Sequence[Commit] = (),
    confirms: Sequence[tuple[Key, int]] = (),
    shapes: Sequence[Shape] = (),
) -> bytes:
    """Return a sign of life, with what is committed, then what is given up (with its epoch), and topics that changed.
    `version`: the newest standing that the member knows."""
    told = [shape.packed() for shape in shapes]
    return _packed([BEAT, group, name, member, version, commits, confirms, told])


def leave_command(group: str, name: str, member: int, commits: Sequence[Commit] = ()) -> bytes:
    """Return the command of a member that goes."""
    return _packed([LEAVE, group, name, member, commits])


def reset_command(group: str, offsets: Sequence[tuple[Key, int, int]]) -> bytes:
    """Return the command that sets a group's offsets, each with when its partition was `born`; it has no members
    then."""
    return _packed([RESET, group, [row if row[2] else row[:2] for row in offsets]])


def delete_command(group: str) -> bytes:
    """Return the command that forgets a group; it has no members then."""
    return _packed([DELETE, group])


def describe_question(group: str) -> bytes:
    """Return the question for everything about one group."""
    return _packed(["group", group])


def list_question() -> bytes:
    """Return the question for all groups of a coordinator."""
    return _packed(["groups"])


def offsets_question(topic: int) -> bytes:
    """Return the question how far each group of a coordinator has read a topic's partitions."""
    return _packed(["offsets", topic])


def standing_of(reply: bytes) -> Standing:
    """Return what a coordinator answered. Raises `LogyardError`."""
    try:
        member, version, owned, refused, revisions = msgpack.unpackb(reply, use_list=False, strict_map_key=False)
        owns = None if owned is None else tuple(Owned(key, *rest) for key, *rest in owned)
        return Standing(member, version, owns, refused, revisions)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise LogyardError(f"a coordinator's answer cannot be read: {error!r}") from None


def unpacked(reply: bytes) -> Any:
    """Return an answer's plain values."""
    return msgpack.unpackb(reply, use_list=False, strict_map_key=False)


def _packed_partition(one: PartitionShape) -> tuple[Any, ...]:
    count = len(one)
    while count > PARTITION_BASE and one[count - 1] == EMPTY[count - 1]:
        count -= 1
    return tuple(one[:count])


def _packed(values: Sequence[Any]) -> bytes:
    data: bytes = msgpack.packb(values)
    return data

"""Coordinates consumer groups: members with a time to live, whose each partition is, and how far it was read.

The machine of the coordinator logs `_groups-0..15`. Log time is the only clock: a timer rings at the first thing that
is due. Who begins to lead gives every member its whole time to live again, for nobody could say that it lives; but not
so what a group may be without members, so there is no `renews_terms`, and log time jumps only where there is no group.
Invariants: see `state`. Members and their commands: docs/machines/groups.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgpack

from logyard.engine.machine import (
    Applied,
    Batch,
    Context,
    Effect,
    Frame,
    PayloadRange,
    PayloadRef,
    Position,
    Reject,
    Release,
    Sections,
    Timer,
)
from logyard.protocol.errors import BadRequest
from logyard.protocol.groups import BEAT, DELETE, JOIN, LEAVE, NAME_MAX, RESET, TTL_MS_MAX, TTL_MS_MIN, check_group_name

from .state import Group, commits_of, resets_of, rows_of, shapes_of

SECTION = "groups"
TIMER = "due"
GROUPS_MAX = 10_000
"""Of one coordinator."""
REBALANCE_MS = 60_000
"""So long an owner that is asked to give a partition up may take."""
IDLE_MS = 7 * 24 * 3_600_000
"""A group without members for so long is forgotten, with its offsets."""


class Groups:
    """Consumer groups by name. `rebalance_ms`, `idle_ms`: in place of `REBALANCE_MS`, `IDLE_MS`."""

    __slots__ = ("rebalance_ms", "idle_ms", "groups", "term", "timer", "next_member", "ends", "from_start")
    version = 3
    stays_awake = True
    """Its node says how far groups are behind: those without members most of all."""
    exclusive = True
    """It releases all that came before: payloads of another machine in its group would go with that."""

    def __init__(self, rebalance_ms: int = REBALANCE_MS, idle_ms: int = IDLE_MS) -> None:
        self.rebalance_ms = rebalance_ms
        self.idle_ms = idle_ms
        self.groups: dict[str, Group] = {}
        self.term = 0
        # Never used again, so that a process that was away for long meets no other member under its number.
        self.next_member = 1
        # What the timer is set to; 0: it is not.
        self.timer = 0
        # From version 2 on partitions may end, and get slots of those that do.
        self.ends = False
        # From version 3 on a partition that comes to a topic which a group knew is read from its start.
        self.from_start = False

    # What is replicated

    def upgrade(self, from_version: int, to_version: int) -> None:
        """Go on as a newer version."""
        self.ends = to_version > 1
        self.from_start = to_version > 2

    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        """Apply one entry; no payload of it is kept."""
        self._renew(context)
        replies: list[bytes | Reject] = []
        for frame in frames:
            try:
                if not frame.uniform or frame.records != 1:
                    raise Reject("bad_request", "a coordinator's command comes alone, without a payload")
                replies.append(self._command(context.timestamp, frame.commands))
            except Reject as reject:
                replies.append(reject)
        gone: list[Effect] = [Release(Position(0, 0), Position(context.index + 1, 0))]
        return Batch(replies, gone + self._timers(context.timestamp))

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        """Apply one command: `apply_batch` is what the engine calls."""
        self._renew(context)
        reply = self._command(context.timestamp, command)
        return Applied(reply, self._timers(context.timestamp))

    def on_timer(self, context: Context, name: str) -> Applied:
        """Do what is due."""
        now = context.timestamp
        self.timer = 0
        self._renew(context)
        for group in list(self.groups.values()):
            if group.due(self.idle_ms) > now:
                continue
            if group.members:
                group.pass_time(now, self.rebalance_ms)
            elif group.idle_since + self.idle_ms <= now:
                del self.groups[group.name]
        return Applied(b"", self._timers(now))

    def _renew(self, context: Context) -> None:
        if context.term != self.term:
            self.term = context.term
            for group in self.groups.values():
                group.renew(context.timestamp)

    def _timers(self, now: int) -> list[Effect]:
        """Return what sets the timer, where it is not set to ring early enough."""
        if not self.groups:
            return []
        if self.timer > now:
            return []
        self.timer = max(now + 1, min(group.due(self.idle_ms) for group in self.groups.values()))
        return [Timer(TIMER, self.timer)]

    def _sooner(self, group: Group) -> None:
        """See that the timer rings when this group is due."""
        if group.due(self.idle_ms) < self.timer:
            self.timer = 0

    # Commands

    def _command(self, now: int, command: bytes) -> bytes:
        handlers: Mapping[str, Callable[..., object]] = {
            JOIN: self._join, BEAT: self._beat, LEAVE: self._leave, RESET: self._reset, DELETE: self._delete,
        }  # fmt: skip
        try:
            kind, name, *rest = msgpack.unpackb(command, use_list=False, strict_map_key=False)
            handler = handlers[kind]
            found = handler(now, check_group_name(name), *rest)
        except (
            ValueError, TypeError, KeyError, AttributeError, OverflowError, msgpack.UnpackException, BadRequest
        ) as error:  # fmt: skip
            raise Reject("bad_request", f"not a coordinator's command: {error!r}"[:300]) from error
        if name in self.groups:
            self._sooner(self.groups[name])
        reply: bytes = msgpack.packb(found)
        return reply

    def _join(self, now: int, name: str, own: str, instance: int, ttl: int, zone: str, shapes: Any) -> object:
        wanted = shapes_of(shapes, self.ends)
        if not (type(own) is str and type(zone) is str and len(own) <= NAME_MAX and len(zone) <= NAME_MAX):
            raise Reject("bad_request", f"names of members and zones have at most {NAME_MAX} characters")
        if not (type(instance) is int and type(ttl) is int and TTL_MS_MIN <= ttl <= TTL_MS_MAX and wanted):
            raise Reject("bad_request", f"a time to live is {TTL_MS_MIN} to {TTL_MS_MAX} ms, and there are topics")
        group = self.groups.get(name)
        if group is None:
            if len(self.groups) >= GROUPS_MAX:
                raise Reject("too_many_groups", f"this coordinator has {GROUPS_MAX} consumer groups")
            group = Group(name, now)
        member = group.join(
            self.next_member, own, instance, ttl, zone, wanted, now, self.rebalance_ms, self.from_start
        )  # fmt: skip
        self.next_member = max(self.next_member, member.number + 1)
        self.groups[name] = group
        return group.standing(member, 0)

    def _beat(
        self, now: int, name: str, own: str, number: int, known: int, commits: Any, confirms: Any, shapes: Any
    ) -> object:
        told, given, newer = commits_of(commits), rows_of(confirms), shapes_of(shapes, self.ends)
        group = self._of(name)
        member = group.member(own, number)
        group.check_room(newer)
        refused = group.commit(member, told, now, self.rebalance_ms)
        member.heard(now)
        refused += group.confirm(member, given)
        if newer:
            group.learn(newer, now, self.rebalance_ms, self.from_start)
        return group.standing(member, known, refused)

    def _leave(self, now: int, name: str, own: str, number: int, commits: Any) -> object:
        told = commits_of(commits)
        group = self._of(name)
        member = group.member(own, number)
        refused = group.commit(member, told, now, self.rebalance_ms)
        group.drop([number], now, self.rebalance_ms)
        return group.standing(member, 0, refused)

    def _reset(self, now: int, name: str, offsets: Any) -> object:
        wanted = resets_of(offsets, self.ends)
        group = self.groups.get(name)
        if group is None:
            if len(self.groups) >= GROUPS_MAX:
                raise Reject("too_many_groups", f"this coordinator has {GROUPS_MAX} consumer groups")
            group = Group(name, now)
        group.reset(wanted)
        self.groups[name] = group
        return len(wanted)

    def _delete(self, now: int, name: str) -> object:
        group = self._known(name)
        group.check_idle("delete")
        del self.groups[name]
        return True

    def _known(self, name: str) -> Group:
        found = self.groups.get(name)
        if found is None:
            raise Reject("unknown_consumer_group", f"there is no consumer group {name!r}")
        return found

    def _of(self, name: str) -> Group:
        """Return a member's group; who was silent until it was forgotten is no member of it."""
        return self.groups.get(name) or Group(name, 0)

    # The rest

    def snapshot(self) -> Sections:
        """Return one section."""
        groups = [group.pack() for group in self.groups.values()]
        more = [flag for flag in (self.ends, self.from_start) if flag]
        return {SECTION: msgpack.packb([self.term, self.timer, self.next_member, groups, *more])}

    def restore(self, sections: Sections) -> None:
        """Replace the state."""
        term, timer, following, groups, *more = msgpack.unpackb(
            sections[SECTION], use_list=False, strict_map_key=False
        )  # fmt: skip
        found = {packed[0]: Group.unpack(packed) for packed in groups}
        self.ends, self.from_start = len(more) > 0, len(more) > 1
        self.term, self.timer, self.next_member, self.groups = term, timer, following, found

    def live_refs(self) -> Iterable[PayloadRange]:
        """Return nothing."""
        return ()

    def query(self, request: bytes) -> bytes:
        """Answer in msgpack: ``["group", name]`` -> everything about one; ``["groups"]`` -> rows ``[name, members,
        partitions, rebalances]``; ``["offsets", topic]`` -> rows ``[name, [[partition, offset, born], ...]]`` of those
        that read a topic. Raises `Reject`."""
        try:
            asked = msgpack.unpackb(request, use_list=False)
        except (ValueError, msgpack.UnpackException):
            asked = None
        answer: object
        match asked:
            case ("group", str(name)):
                answer = self._known(name).described()
            case ("groups",):
                answer = [[one.name, len(one.members), len(one.parts), one.rebalances] for one in self._sorted()]
            case ("offsets", int(topic)):
                answer = [[one.name, offsets] for one in self._sorted() if (offsets := one.offsets(topic)) is not None]
            case _:
                raise Reject("bad_request", "a coordinator answers group, groups and offsets")
        packed: bytes = msgpack.packb(answer)
        return packed

    def _sorted(self) -> list[Group]:
        """Return the groups by name; a client may have told one that is no text."""
        return sorted(self.groups.values(), key=lambda group: str(group.name))

    def overview(self) -> dict[str, Any]:
        """Return how much there is."""
        groups = self.groups.values()
        return {
            "groups": len(groups),
            "members": sum(len(one.members) for one in groups),
            "partitions": sum(len(one.parts) for one in groups),
            "rebalances": sum(one.rebalances for one in groups),
        }

    def check(self) -> None:
        """Check the invariants."""
        for group in self.groups.values():
            group.check()

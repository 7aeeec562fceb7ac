"""Drives a KV machine as an engine would, and keeps the books: what lives, which follow-ups and timers wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from logyard.engine.machine import Append, Context, Effect, Frame, Release, Timer
from logyard.machines.kv import KV, command
from logyard.machines.kv.digest import digest

UNIFORM = 1


def frame_of(operations: Sequence[tuple[bytes, int]], first: int) -> Frame:
    """A frame of operations with so many records each."""
    if len(operations) == 1:
        return Frame(UNIFORM, 0, operations[0][1], 0, 0, 0, 0, 0, operations[0][0], first)
    commands = [part for data, records in operations for part in (data, *[b""] * (records - 1))]
    lengths = b"".join(len(one).to_bytes(4, "little") for one in commands)
    return Frame(0, 0, len(commands), 0, 0, 0, 0, 0, lengths + b"".join(commands), first)


class Driver:
    """`live` holds (index, ordinal) of the payloads that are not released."""

    def __init__(self, machine: KV | None = None) -> None:
        self.machine = machine or KV()
        self.index = 0
        self.term = 1
        self.now = 1_000_000
        self.live: set[tuple[int, int]] = set()
        self.timers: dict[str, int] = {}
        self.appends: list[bytes] = []
        self.entries: list[Any] = []

    def entry(self, *frames: Sequence[tuple[bytes, int]]) -> list[list[list[Any]]]:
        """Apply one entry of frames; the replies of each frame's operations."""
        self.index += 1
        found, first = [], 0
        for operations in frames:
            found.append(frame_of(operations, first))
            first += found[-1].records
        self.live |= {(self.index, ordinal) for ordinal in range(first)}
        context = Context(7, self.index, self.term, self.now, 1, first)
        self.entries.append(("entry", context, found))
        batch = self.machine.apply_batch(context, found)
        self.perform(batch.effects)
        replies = []
        for data in batch.replies:
            assert isinstance(data, bytes)
            unpacker = msgpack.Unpacker()
            unpacker.feed(data)
            replies.append(list(unpacker))
        self.follow()
        return replies

    def follow(self) -> None:
        while self.appends:
            self.index += 1
            context = Context(7, self.index, self.term, self.now, 1)
            data = self.appends.pop(0)
            self.entries.append(("append", context, data))
            self.perform(self.machine.apply(context, data, ()).effects)

    def perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Release):
                dead = {one for one in self.live if effect.first <= one < effect.end}
                assert dead, f"{effect} releases nothing"
                self.live -= dead
            elif isinstance(effect, Timer):
                if effect.due_ms is None:
                    del self.timers[effect.name]
                else:
                    self.timers[effect.name] = effect.due_ms
            else:
                assert isinstance(effect, Append)
                self.appends.append(effect.command)

    def pass_time(self, milliseconds: int) -> None:
        """Log time goes on, and rings what is due."""
        end = self.now + milliseconds
        while self.timers and min(self.timers.values()) <= end:
            name = min(self.timers, key=self.timers.__getitem__)
            self.now = max(self.now, self.timers.pop(name))
            self.index += 1
            context = Context(7, self.index, self.term, self.now, 1)
            self.entries.append(("timer", context, name))
            self.perform(self.machine.on_timer(context, name).effects)
            self.follow()
        self.now = end

    def do(self, *operation: Any, records: int = 1) -> list[Any]:
        """One operation in an entry of its own; its reply."""
        ((reply,),) = self.entry([(msgpack.packb(operation), records)])
        return reply

    def put(self, key: bytes, value: bytes, lease: int = 0, flags: int = 0) -> list[Any]:
        return self.do(command.PUT, key, value, lease, flags)

    def put_payload(self, key: bytes, data: bytes, lease: int = 0) -> list[Any]:
        return self.do(command.PUT, key, [0, len(data), digest(data)], lease, 0)

    def ask(self, *question: Any) -> list[Any]:
        found: list[Any] = msgpack.unpackb(self.machine.fetch(msgpack.packb(question), self.now).answer)
        return found

    def rows(self, key: bytes = b"\0", end: bytes = b"\0", revision: int = 0) -> list[Any]:
        reply = self.ask(command.RANGE, key, end, revision)
        assert reply[0] == 0, reply
        rows: list[Any] = reply[2]
        return rows

    def check(self) -> None:
        """What the machine needs is exactly what was not released."""
        needed = {
            (first.index, ordinal) for first, end in self.machine.live_refs() for ordinal in range(first[1], end[1])
        }
        assert needed == self.live
        state = self.machine.state
        assert list(state.live) == sorted(key for key, version in state.keys.items() if version[6] is not None)
        assert (
            not state.changing
            and {
                lease: {key for key, version in state.keys.items() if version[5] == lease and version[6] is not None}
                for lease in {version[5] for version in state.keys.values() if version[6] is not None} - {0}
            }
            == state.leases.attached
        )
        assert list(state.gone) == sorted(key for key, version in state.keys.items() if version[6] is None)

"""What the engine keeps for a machine: timers, follow-ups, monitored sessions, and what was left out of it. Replicated,
in every snapshot.

Invariant: it changes only at apply, equally on every member. A group whose machine uses none of it has no such object
and pays nothing. Changed by `effects`; `replica` puts it into snapshots.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

import msgpack

from ..machine import Frame

TIMERS = "@timers"
APPENDS = "@appends"
MONITORS = "@monitors"
SKIPPED = "@skipped"
SECTIONS = (TIMERS, APPENDS, MONITORS, SKIPPED)
STALE_MAX = 64


class MachineState:
    """`timers`: due log time (ms) by name. `appends`: follow-ups not applied yet, by (index, number) of the effect that
    asked for them. `monitors`: sessions whose end the machine wants to hear of. `skipped`: frames that an operator
    had left out, (index, first ordinal, end).

    `due` (a heap of timers) and `todo` (follow-ups) are the leader's own: what it has not proposed yet.
    """

    __slots__ = ("timers", "appends", "monitors", "skipped", "due", "todo", "_index", "_number")

    def __init__(self) -> None:
        self.timers: dict[str, int] = {}
        self.appends: dict[tuple[int, int], bytes] = {}
        self.monitors: set[int] = set()
        self.skipped: set[tuple[int, int, int]] = set()
        self.due: list[tuple[int, str]] = []
        self.todo: list[tuple[int, int]] = []
        self._index = self._number = 0

    @property
    def waits(self) -> bool:
        """Whether the leader has something to propose, now or later."""
        return bool(self.timers or self.appends)

    def lead(self) -> None:
        """Have everything proposed anew by a new leader: what the old one proposed may be lost."""
        self.due = [(due, name) for name, due in self.timers.items()]
        heapq.heapify(self.due)
        self.todo = list(self.appends)

    def follow(self) -> None:
        """Leave proposing to somebody else."""
        self.due, self.todo = [], []

    def set_timer(self, name: str, due_ms: int | None, leading: bool) -> None:
        """Set, replace or cancel (None)."""
        if due_ms is None:
            self.timers.pop(name, None)
            return
        self.timers[name] = due_ms
        if leading:
            if len(self.due) > 2 * len(self.timers) + STALE_MAX:
                # A timer that is moved on and on leaves its old times behind.
                self.due = [(due, name) for name, due in self.timers.items()]
                heapq.heapify(self.due)
            else:
                heapq.heappush(self.due, (due_ms, name))

    def put_timer(self, timer: tuple[int, str]) -> None:
        """Put back a timer whose proposal failed."""
        heapq.heappush(self.due, timer)

    def put_append(self, key: tuple[int, int]) -> None:
        """Put back an append whose proposal failed."""
        self.todo.append(key)

    def take_todo(self) -> list[tuple[int, int]]:
        """Hand over the follow-ups that are to be proposed now."""
        todo, self.todo = self.todo, []
        return todo

    def leave_out(self, index: int, ordinals: Iterable[int], frames: Iterable[Frame]) -> None:
        """Note that commands of an entry were left out, each with all of its frame."""
        whole = [(one.first, one.first + one.records) for one in frames]
        for ordinal in ordinals:
            spans = [(first, end) for first, end in whole if first <= ordinal < end]
            self.skipped |= {(index, *span) for span in spans or [(ordinal, ordinal + 1)]}

    def was_left_out(self, index: int, ordinal: int) -> bool:
        """Return whether a command was left out."""
        return any(one == index and first <= ordinal < end for one, first, end in self.skipped)

    def add_append(self, index: int, command: bytes, leading: bool) -> None:
        """Remember a follow-up of the entry at `index`. Numbers of one index count from 0."""
        if index != self._index:
            self._index, self._number = index, 0
        key = (index, self._number)
        self._number += 1
        # The machine may use its buffer again.
        self.appends[key] = bytes(command)
        if leading:
            self.todo.append(key)

    def sections(self) -> dict[str, bytes]:
        """Return, in msgpack, ``[[name, due], ...]``, ``[[index, number, command], ...]``, ``[session, ...]`` and
        ``[[index, first, end], ...]``; what is empty has no section."""
        found: dict[str, bytes] = {}
        if self.timers:
            found[TIMERS] = msgpack.packb(list(self.timers.items()))
        if self.appends:
            found[APPENDS] = msgpack.packb([(*key, command) for key, command in self.appends.items()])
        if self.monitors:
            found[MONITORS] = msgpack.packb(sorted(self.monitors))
        if self.skipped:
            found[SKIPPED] = msgpack.packb(sorted(self.skipped))
        return found

    @classmethod
    def of_sections(cls, sections: Mapping[str, bytes]) -> MachineState | None:
        """Return the state of a snapshot's sections; None when there is none of these."""
        if not any(name in sections for name in SECTIONS):
            return None
        found = cls()
        if TIMERS in sections:
            found.timers = {name: due for name, due in msgpack.unpackb(sections[TIMERS])}
        if APPENDS in sections:
            found.appends = {(index, number): command for index, number, command in msgpack.unpackb(sections[APPENDS])}
        if MONITORS in sections:
            found.monitors = set(msgpack.unpackb(sections[MONITORS]))
        if SKIPPED in sections:
            found.skipped = {(index, first, end) for index, first, end in msgpack.unpackb(sections[SKIPPED])}
        return found

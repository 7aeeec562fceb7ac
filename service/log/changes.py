"""Which append logs of this node changed since somebody asked last: what a stream over many logs asks at each trigger.

A mark stands for a moment of this process. Nothing is noted on the way of an append: each question compares all logs
with what the last question saw, a microsecond a log, and only what differs travels. Wakes no hibernating group. Used
by `verbs`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import trio

from logyard.engine.quiesce.names import Names
from logyard.engine.quiesce.quiesced_table import QuiescedTable
from logyard.engine.replica.member import RUNNING, Member
from logyard.machines.log import AppendLog

STEP = 1000
GONE_MAX = 10_000
"""So many names of logs that went are kept; who asks about a time before them is told everything."""


class LogChanges:
    """The logs of a node as the last question saw them, and since which mark each is so."""

    def __init__(self, names: Names, members: Mapping[int, Member], quiesced: QuiescedTable) -> None:
        self._names = names
        self._members = members
        self._quiesced = quiesced
        # 0 until somebody asks: who is only built reads no clock.
        self._first = self._mark = 0
        # By name: (uid, leader, start, end), and the mark of the question that first saw it so.
        self._rows: dict[str, tuple[tuple[int, int, int, int], int]] = {}
        self._gone: dict[str, int] = {}
        self._asking = trio.Lock()

    async def since(self, mark: int) -> list[Any]:
        """Return ``[mark, whole, rows, gone]``: rows [name, uid, leader, start, end] that changed after `mark` (all of
        them if `whole`: the mark is none of this process), and names of logs that are no more."""
        async with self._asking:
            await self._look()
            now, whole = self._mark, not self._first <= mark <= self._mark
            rows = [[name, *row] for name, (row, seen) in self._rows.items() if whole or seen > mark]
            return [now, whole, rows, [] if whole else [name for name, seen in self._gone.items() if seen > mark]]

    async def _look(self) -> None:
        if not self._first:
            # Greater than any mark of an earlier process on this node.
            self._first = self._mark = time.time_ns()
        self._mark += 1
        mark, known, count = self._mark, self._rows, 0
        listed: set[str] = set()
        for name, uid in list(self._names.awake.items()):
            count += 1
            if not count % STEP:
                await trio.lowlevel.checkpoint()
            member = self._members.get(uid)
            if member is None or member.state != RUNNING or not isinstance(machine := member.machine, AppendLog):
                continue
            row = uid, member.raft.leader, machine.start, machine.end
            listed.add(name)
            if name not in known or known[name][0] != row:
                known[name] = row, mark
        for name, uid, leader, start, end in self._quiesced.bounds("log"):
            count += 1
            if not count % STEP:
                await trio.lowlevel.checkpoint()
            # Who fell asleep or woke meanwhile is as it was.
            if name not in listed:
                row = uid, leader, start, end
                listed.add(name)
                if name not in known or known[name][0] != row:
                    known[name] = row, mark
        for name in listed & self._gone.keys():
            del self._gone[name]
        for name in known.keys() - listed:
            if name in self._names and self._asleep_again(name):
                continue
            del known[name]
            self._gone[name] = mark
        if len(self._gone) > GONE_MAX:
            self._gone.clear()
            self._first = mark

    def _asleep_again(self, name: str) -> bool:
        """Return whether a log was passed over because it woke while the sleepers were walked."""
        uid = self._names[name]
        member = self._members.get(uid)
        return uid in self._quiesced or (
            member is not None and member.state == RUNNING and isinstance(member.machine, AppendLog)
        )

"""How far consumer groups are behind, from a node's own tables: no group is asked.

Said by the node that leads a group's coordinator, so that one node of the cluster says it. Where a partition ends is
what this node has applied of its log, so only partitions with a copy here have a lag. Part of `status`, and of
`metrics`.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest
from typing import NamedTuple

from logyard.engine.raft.state import LEADER
from logyard.machines.groups import Groups as Coordinator
from logyard.machines.log import AppendLog
from logyard.protocol.groups import coordinators
from logyard.protocol.topics import partition_log

from .status import Groups

ROWS_MAX = 1000
"""Of a node: enough to find who is behind, and not a label set for each of a million partitions."""


class Lag(NamedTuple):
    """One partition, as a consumer group has read it: committed up to `offset`, `lag` records before its end."""

    group: str
    topic: str
    partition: int
    offset: int
    lag: int


def consumer_lags(groups: Groups, rows_max: int = ROWS_MAX) -> list[Lag]:
    """Return the partitions that are furthest behind, worst first, of the groups that this node coordinates."""
    return nlargest(rows_max, _lags(groups), key=lambda row: row.lag)


def _lags(groups: Groups) -> Iterator[Lag]:
    for name in coordinators():
        member = groups.members.get(groups.names.get(name, 0))
        if member is None or member.raft.role != LEADER or not isinstance(member.machine, Coordinator):
            continue
        for group in member.machine.groups.values():
            for topic, number, offset in group.positions():
                end = _end(groups, partition_log(topic, number))
                if end is not None:
                    yield Lag(group.name, topic, number, offset, max(0, end - offset))


def _end(groups: Groups, name: str) -> int | None:
    """Return where a log ends, as far as this node has applied it; None of one that it has no copy of."""
    uid = groups.names.get(name, 0)
    member = groups.members.get(uid)
    if member is not None:
        return member.machine.end if isinstance(member.machine, AppendLog) else None
    return groups.quiesced.row(uid).end if uid in groups.quiesced else None

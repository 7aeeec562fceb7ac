"""How far consumer groups are behind, from a node's own tables: no group is asked.

Said by the node that leads a group's coordinator, so that one node of the cluster says it. Where a partition ends is
what this node has applied of its log, so only partitions with a copy here have a lag. Offsets are a topic's by its
id, and a partition's by when its number came to be used: what was read of one that is gone says nothing of another
that has its name or number now, and of a log whose topic is not known here there is no lag. Part of `status`, and of
`metrics`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import nlargest
from typing import NamedTuple

from logyard.engine.raft.state import LEADER
from logyard.machines.catalog.topics import Topics
from logyard.machines.catalog.topics_alone import TopicsAlone
from logyard.machines.groups import Groups as Coordinator
from logyard.machines.log import AppendLog
from logyard.protocol.groups import coordinators
from logyard.protocol.topics import SECTION, TOPICS_LOG, Partition, partition_log

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
    rows: dict[int, Mapping[int, Partition]] = {}
    for name in coordinators():
        member = groups.members.get(groups.names.get(name, 0))
        if member is None or member.raft.role != LEADER or not isinstance(member.machine, Coordinator):
            continue
        for group in member.machine.groups.values():
            for topic, title, number, born, offset in group.positions():
                if topic not in rows:
                    rows[topic] = _partitions_of(groups, topic)
                row = rows[topic].get(number)
                if row is not None and row.born != born:
                    # It has read another one of this number, and nothing of this one.
                    continue
                end = _end(groups, partition_log(title, number), topic, row)
                if end is not None:
                    # A client may have told one that is no text, and labels are.
                    yield Lag(str(group.name), title, number, offset, max(0, end - offset))


def _partitions_of(groups: Groups, topic: int) -> Mapping[int, Partition]:
    """Return a topic's partitions by number; none where it is gone, or this node does not keep the topics."""
    member = groups.members.get(groups.names.get(TOPICS_LOG, 0))
    if member is None or not isinstance(member.machine, TopicsAlone):
        return {}
    section = member.machine.sections[SECTION]
    assert isinstance(section, Topics)
    row = section.by_id.get(topic)
    return {one.number: one for one in row.partitions} if row is not None else {}


def _end(groups: Groups, name: str, topic: int, row: Partition | None) -> int | None:
    """Return where a topic's log ends, as far as this node has applied it; None where it has no copy, or that is
    another topic's. `row`: what the topic says of it, by which this is known although it sleeps."""
    uid = groups.names.get(name, 0)
    member = groups.members.get(uid)
    if member is not None:
        machine = member.machine
        if not isinstance(machine, AppendLog) or machine.partition is None or machine.partition.topic != topic:
            return None
        return machine.end
    known = row is not None and uid == row.uid and uid in groups.quiesced
    return groups.quiesced.row(uid).end if known else None

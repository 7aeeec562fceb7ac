"""What the reconciler would do: a pure function from the catalogue's rows to moves, and to what it can't help.

What is wanted of a log is compared with what was seen of it; nothing is asked of a group. In this order: members on
dead nodes are replaced, what is short is filled up, nodes that drain are emptied, members spread over zones, then
members and leaderships are evened, which only begins beyond a margin (`UNEVEN`) and ends at the even share, so nothing
goes to and fro. System logs come first. Invariants: a plan has no move for a log without a majority that lives, none
that makes a log smaller than what lives of it, none that ends a replica by deleting it, and none at all while
`too_many` are silent; on what a plan leads to, planning again finds nothing. Called by the catalogue's leader, and
shown by `logyard plan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import ceil
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from logyard.machines.catalog.logs import LIVE, RESERVED, SYSTEM, Log
from logyard.machines.catalog.nodes import ACTIVE, DEAD, DRAINING, REMOVED, SILENT, Node

from .silence import too_many
from .steps import Steps

T = TypeVar("T")

UNEVEN = 1.05
ROWS_AT_ONCE = 128
REPLACE, ADD, REMOVE, LEAD = "replace", "add", "remove", "lead"
MORE_NODES = "add a node: logyard nodes invite"
GONE = (DEAD, REMOVED)
UNKNOWN = "unknown"
"""Of a node that has never said who it is: one that starts later than the others with its logs is not gone."""


class Proposed(NamedTuple):
    """A move: `source` and `target` are nodes, 0 for none."""

    uid: int
    name: str
    kind: str
    source: int
    target: int
    why: str


class Stuck(NamedTuple):
    """A log that the reconciler can't help, why, and what an operator may type."""

    uid: int
    name: str
    why: str
    hint: str


class Plan(NamedTuple):
    """Everything there is to do, the most urgent first. `held`: why none of it is begun, or nothing."""

    moves: list[Proposed]
    stuck: list[Stuck]
    held: str


class _Row:
    """What counts of a log, and where its members are as the plan goes on: there may be a hundred thousand of these.
    One whose leader was never heard is where it was to be made."""

    __slots__ = ("uid", "name", "copies", "learners", "zones", "pins", "voters", "moved")

    def __init__(self, log: Log) -> None:
        self.uid = log.uid
        self.name = log.name
        self.copies = log.copies
        self.learners = log.learners if log.seen else ()
        self.zones = log.zones
        self.pins = log.pins
        self.voters = log.voters if log.seen else log.members
        self.moved = False

    def without(self, source: int, target: int) -> tuple[int, ...]:
        """Return the voters with another one among them; 0: none."""
        return (*(node for node in self.voters if node not in (source, target)), *((target,) if target else ()))

    def replace(self, source: int, target: int) -> None:
        """Have another voter."""
        self.voters = self.without(source, target)
        self.moved = True


class Planner:
    """One plan. `leaders`: who leads, by uid; `moving`: logs that have a move under way, with the node that comes and
    the one that goes (0 for none); `avoid`: nodes that have refused to get a log, by uid."""

    def __init__(
        self,
        nodes: Mapping[int, Node],
        logs: Iterable[Log],
        leaders: Mapping[int, int],
        moving: Mapping[int, tuple[int, int]],
        avoid: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> None:
        self._nodes = nodes
        self._states = {number: row.state for number, row in nodes.items()}
        self._zones = {number: "" if row.zone == "-" else row.zone for number, row in nodes.items()}
        self._targets = sorted(number for number, state in self._states.items() if state == ACTIVE)
        self._active = frozenset(self._targets)
        self._leaders = leaders
        self._moves: list[Proposed] = []
        self._stuck: list[Stuck] = []
        self._load: Counter[int] = Counter()
        self._logs = logs
        self._moving = moving
        self._avoid = avoid
        self._rows: list[_Row] = []

    def plan(self) -> Plan:
        """Return everything there is to do, in one go."""
        for _ in self.steps():
            pass
        return self.found()

    def steps(self) -> Steps[None]:
        """Make the plan, in steps of `ROWS_AT_ONCE` logs, which are a millisecond or two: others have their turn in
        between."""
        yield from self._load_rows()
        for row in _in_steps(self._rows):
            if row is None:
                yield
            elif not row.moved:
                self._repair(row)
        if self._targets:
            yield from self._spread()
            yield from self._even_members()
            yield from self._even_leaders()

    def found(self) -> Plan:
        """Return what was planned."""
        return Plan(self._moves, self._stuck, too_many(self._states, self._zones))

    def _load_rows(self) -> Iterator[None]:
        """Take the logs that count, the cluster's own first, and where each is, or is to be when it has moved."""
        others: list[_Row] = []
        for log in _in_steps(self._logs):
            if log is None:
                yield
            elif log.state == LIVE and log.name != RESERVED:
                row = _Row(log)
                self._load.update(row.voters)
                if log.uid in self._moving:
                    target, source = self._moving[log.uid]
                    self._count(source, target)
                    row.replace(source, target)
                (self._rows if log.name.startswith(SYSTEM) else others).append(row)
        self._rows += others

    def _move(self, row: _Row, kind: str, source: int, target: int, why: str) -> None:
        self._moves.append(Proposed(row.uid, row.name, kind, source, target, why))
        if kind == LEAD:
            return
        self._count(source, target)
        row.replace(source, target)

    def _count(self, source: int, target: int) -> None:
        if source:
            self._load[source] -= 1
        if target:
            self._load[target] += 1

    def _state(self, node: int) -> str:
        return self._states.get(node, UNKNOWN)

    # What one log lacks.

    def _repair(self, row: _Row) -> None:
        """Plan one move at most for a log that has a dead member, is short, or stands on a node that drains."""
        if self._active.issuperset(row.voters) and len(row.voters) >= row.copies and not row.learners:
            return
        gone = sorted(node for node in row.voters if self._state(node) in GONE)
        here = [node for node in row.voters if self._state(node) not in (*GONE, SILENT, UNKNOWN)]
        if gone and len(here) * 2 <= len(row.voters):
            if all(self._state(node) in GONE or node in here for node in row.voters):
                self._no_quorum(row, here)
            return
        for source in gone:
            self._replace(row, source, f"node {source} is dead")
            return
        for node in sorted(row.learners):
            state = self._state(node)
            if state in GONE or state == DRAINING:
                self._move(row, REMOVE, node, 0, f"node {node} {'drains' if state == DRAINING else 'is dead'}")
                return
        if len(row.voters) < row.copies:
            short = f"{len(row.voters)} of {row.copies} copies"
            target = self._target(row, 0)
            if target:
                self._move(row, ADD, 0, target, short)
                return
            why = f"{short}, and no node can take one{self._refused(row)}"
            self._stuck.append(Stuck(row.uid, row.name, why, MORE_NODES))
        for source in sorted(row.voters):
            if self._state(source) == DRAINING:
                self._replace(row, source, f"node {source} drains")
                return
        for node in sorted(row.voters):
            if self._state(node) == UNKNOWN:
                hint = f"start node {node}, or: logyard members replace {row.name} --node {node} --with NODE"
                self._stuck.append(Stuck(row.uid, row.name, f"node {node} has not said yet who it is", hint))
                return

    def _no_quorum(self, row: _Row, here: Collection[int]) -> None:
        if here:
            why = f"a majority of its voters {sorted(row.voters)} is dead"
            hint = f"logyard force-shrink {row.name} --node {min(here)} --yes-the-quorum-is-lost"
        else:
            why, hint = f"all of its voters {sorted(row.voters)} are dead", "bring back one of their directories"
        self._stuck.append(Stuck(row.uid, row.name, why, hint))

    def _replace(self, row: _Row, source: int, why: str) -> None:
        target = self._target(row, source)
        if target:
            self._move(row, REPLACE, source, target, why)
        else:
            hint = MORE_NODES
            if len(row.voters) > 1:
                hint += f"; or have one copy fewer: logyard members remove --all --node {source}"
            why = f"{why}, and no node can take its place{self._refused(row)}"
            self._stuck.append(Stuck(row.uid, row.name, why, hint))

    def _refused(self, row: _Row) -> str:
        return "".join(f"; node {node} refused it" for node in sorted(self._avoid.get(row.uid, ())))

    def _target(self, row: _Row, source: int, most: int = 1 << 62) -> int:
        """Return the node that should get a member: the one that replaces `source`, a pinned one, one in the zone that
        has the fewest of this log, the one with the fewest members; 0 where there is none below `most`."""
        zones = self._zones
        there = Counter(zones[node] for node in row.voters if node != source and node in zones)
        best, found = (True, True, 0, 0, 0), 0
        for node in self._targets:
            load = self._load[node]
            if node in row.voters or load >= most or node in self._avoid.get(row.uid, ()):
                continue
            if row.zones and zones[node] not in row.zones:
                continue
            replaces = bool(source) and self._nodes[node].replaces == source
            rank = (not replaces, node not in row.pins, there[zones[node]], load, node)
            if not found or rank < best:
                best, found = rank, node
        return found

    # What all logs together are.

    def _spread(self) -> Iterator[None]:
        """Plan moves out of zones that have two members of a log while another has none."""
        zones = {self._zones[node] for node in self._targets}
        if len(zones) < 2:
            return
        for row in _in_steps(self._rows):
            if row is None:
                yield
                continue
            if row.moved or not self._active.issuperset(row.voters):
                continue
            there = Counter(self._zones[node] for node in row.voters)
            zone, count = max(there.items(), key=lambda item: (item[1], item[0]))
            if count < 2:
                continue
            crowded = [node for node in row.voters if self._zones[node] == zone and node not in row.pins]
            if not crowded:
                continue
            source = max(crowded, key=lambda node: (self._load[node], node))
            target = self._target(row, source)
            if target and there[self._zones[target]] < count - 1:
                self._move(row, REPLACE, source, target, f"{count} members in zone {zone!r}")

    def _even_members(self) -> Iterator[None]:
        """Plan moves from nodes above the even share to those below it."""
        if len(self._targets) < 2:
            return
        total = sum(self._load[node] for node in self._targets)
        share = ceil(total / len(self._targets))
        least = total // len(self._targets)
        if not self._is_uneven([self._load[node] for node in self._targets], share):
            return
        surplus = {node: self._load[node] - share for node in self._targets if self._load[node] > share}
        for row in _in_steps(self._rows):
            if not surplus:
                return
            if row is None:
                yield
                continue
            if row.moved or surplus.keys().isdisjoint(row.voters) or not self._active.issuperset(row.voters):
                continue
            sources = [node for node in row.voters if node in surplus and node not in row.pins]
            if not sources:
                continue
            source = max(sources, key=lambda node: (surplus[node], node))
            target = self._target(row, source, least or 1) or self._target(row, source, share)
            if not target or self._crowding(row.without(source, target)) > self._crowding(row.voters):
                continue
            self._move(row, REPLACE, source, target, f"node {source} has more than {share} members")
            surplus[source] -= 1
            if not surplus[source]:
                del surplus[source]

    def _crowding(self, nodes: Collection[int]) -> int:
        """Return how far from spread over zones these are."""
        return sum(count * count for count in Counter(self._zones[node] for node in nodes).values())

    def _even_leaders(self) -> Iterator[None]:
        """Plan handing leaderships over from nodes that lead more than the even share."""
        leads = Counter(dict.fromkeys(self._targets, 0))
        led: list[tuple[_Row, int]] = []
        for row in _in_steps(self._rows):
            if row is None:
                yield
                continue
            leader = self._leaders.get(row.uid, 0)
            if leader in leads and not row.moved:
                leads[leader] += 1
                led.append((row, leader))
        if len(self._targets) < 2 or not led:
            return
        share = ceil(len(led) / len(self._targets))
        if not self._is_uneven(list(leads.values()), share):
            return
        for one in _in_steps(led):
            if one is None:
                yield
                continue
            row, leader = one
            if leads[leader] <= share:
                continue
            avoid = self._avoid.get(row.uid, ())
            able = [node for node in row.voters if node in leads and node != leader and node not in avoid]
            target = min(able, key=lambda node: (leads[node], node), default=0)
            if target and leads[target] < leads[leader] - 1:
                leads[leader] -= 1
                leads[target] += 1
                self._move(row, LEAD, leader, target, f"node {leader} leads more than {share}")

    @staticmethod
    def _is_uneven(counts: Collection[int], share: int) -> bool:
        return max(counts) > max(share + 1, UNEVEN * sum(counts) / len(counts))


def _in_steps(found: Iterable[T]) -> Iterator[T | None]:
    """Yield what there is, and None after each so many."""
    for number, one in enumerate(found, 1):
        yield one
        if number % ROWS_AT_ONCE == 0:
            yield None

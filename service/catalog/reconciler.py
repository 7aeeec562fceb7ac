"""What the catalogue's leader does with plans: makes one in steps, proposes its moves as far as there is room, gives up
those whose reason is gone.

Everything that is under way stands in the plan itself, so a new leader goes on where the old one stood; what is planned
and not begun yet is only here, and planned anew. A plan of a hundred thousand logs is half a second's work, so it is
made in steps, over several looks, and only where something has changed since the last one that found nothing.
Invariants: at most `AT_ONCE` moves, and `PER_NODE` on each node that lives, are under way; a move is begun only where
the log still is as it was planned for; none while too many nodes are silent. How many bytes a second a node takes for
its new members is the engine's (`snapshot_bytes_per_s`). Called by the keeper, where it leads.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from logyard.machines.catalog.logs import LEAVING, LIVE, Log
from logyard.machines.catalog.nodes import ACTIVE, DEAD, REMOVED, RETURNED, Node
from logyard.machines.catalog.plan import REFUSED, Ended, Move

from .mover import UNDO
from .planner import ADD, LEAD, REMOVE, Plan, Planner, Proposed
from .silence import too_many
from .steps import ITEMS, Steps

AVOID_S = 3600.0
"""A node that refused a move of a log gets none of that log for so long."""
AT_ONCE = 384
PER_NODE = 192
STEPS_MAX = 512
"""Steps of a plan in one look: half a second's work."""
LOGS_PER_S = 5000
"""Plans are so far apart that they look at no more logs a second on the whole."""
SHOWN = 1000


class Seen(NamedTuple):
    """The catalogue, as whoever plans sees it."""

    nodes: Mapping[int, Node]
    logs: Iterable[Log]
    find: Callable[[int], Log | None]
    """A log by uid."""
    size: int
    """How many logs there are."""
    revision: int
    """Another one whenever a log has changed."""
    leaders: Callable[[], Mapping[int, int]]
    moves: Mapping[int, Move]
    ended: Sequence[Ended] = ()
    """The newest moves that are over."""


class Doing(NamedTuple):
    """What is to be told to the plan: moves to propose, and numbers of those to give up, or to end."""

    propose: list[dict[str, Any]]
    undo: list[int]
    end: list[int]


def planner_of(seen: Seen, avoid: Mapping[int, Collection[int]] = MappingProxyType({})) -> Planner:
    """Return a planner, beside what is under way. `avoid`: nodes that are no targets of a log, by its uid."""
    moving = {move.uid: (move.target, move.source) for move in seen.moves.values() if move.kind != LEAD}
    return Planner(seen.nodes, seen.logs, seen.leaders(), moving, avoid)


class Reconciler:
    """Plans, and what of them is not begun yet. `every_s`: from one plan to the next, at least."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._planner: Planner | None = None
        self._steps: Iterator[None] = iter(())
        self._backlog: deque[Proposed] = deque()
        self._at = 0.0
        # Until when a node gets nothing of a log, by uid; and the numbers of moves that are over and were looked at:
        # they do not end in their order.
        self._avoided: dict[int, dict[int, float]] = {}
        self._ended: frozenset[int] = frozenset()
        # Of the last plan: the nodes it was for, and the revision and leaders of one that found nothing.
        self._nodes: object = None
        self._settled: object = None

    def look(self, now: float, seen: Seen) -> Steps[Doing]:
        """Go on with a plan, if one is due or being made; return what of it is begun now, and which moves are over."""
        self._avoid(now, seen.ended)
        yield from self._plan(now, seen)
        undo: list[int] = []
        end: list[int] = []
        load: Counter[int] = Counter()
        for count, (number, move) in enumerate(seen.moves.items(), 1):
            if count % ITEMS == 0:
                yield
            load.update(_touched(move.source, move.target, seen.nodes))
            log = seen.find(move.uid)
            if log is None or log.state in LEAVING:
                # What is deleted has no leader that could step, and may wait for a dead node for ever.
                end.append(number)
            elif move.step != UNDO and _is_vain(move, seen.nodes):
                undo.append(number)
        return Doing((yield from self._begun(seen, load)), undo, end)

    @property
    def avoided(self) -> Mapping[int, Collection[int]]:
        """The nodes that get nothing of a log for now, by its uid."""
        return self._avoided

    def _avoid(self, now: float, ended: Sequence[Ended]) -> None:
        """Note which nodes have refused what."""
        for uid, nodes in list(self._avoided.items()):
            left = {node: until for node, until in nodes.items() if until > now}
            if len(left) < len(nodes):
                self._settled = None
                self._avoided.update({uid: left})
            if not left:
                del self._avoided[uid]
        for one in ended:
            if one.number not in self._ended and one.outcome.startswith(REFUSED):
                move = Move(*one.move)
                self._avoided.setdefault(move.uid, {})[move.target] = now + AVOID_S
        self._ended = frozenset(one.number for one in ended)

    def _plan(self, now: float, seen: Seen) -> Steps[None]:
        nodes = {number: (row.state, row.zone, row.replaces) for number, row in seen.nodes.items()}
        if nodes != self._nodes:
            self._nodes, self._planner, self._settled, self._at = nodes, None, None, now
            self._backlog.clear()
        if self._planner is None and not self._backlog and now >= self._at:
            self._begin(now, seen)
        if self._planner is None:
            return
        for number, _ in enumerate(self._steps, 1):
            if number >= STEPS_MAX:
                return
            yield
        found, self._planner = self._planner.found(), None
        self._backlog.extend(found.moves)
        if found.moves or seen.moves:
            self._settled = None

    def _begin(self, now: float, seen: Seen) -> None:
        state = seen.revision, seen.leaders(), len(seen.moves)
        if state == self._settled:
            return
        self._settled = state
        self._at = now + max(self._every_s, seen.size / LOGS_PER_S)
        self._planner = planner_of(seen, self._avoided)
        self._steps = self._planner.steps()

    def _begun(self, seen: Seen, load: Counter[int]) -> Steps[list[dict[str, Any]]]:
        """Take from the backlog what there is room for; what a node has no room for waits."""
        states = {number: row.state for number, row in seen.nodes.items()}
        zones = {number: row.zone for number, row in seen.nodes.items()}
        if not self._backlog or too_many(states, zones):
            return []
        busy = {move.uid for move in seen.moves.values()}
        found: list[dict[str, Any]] = []
        waiting: list[Proposed] = []
        while self._backlog and len(seen.moves) + len(found) < AT_ONCE and len(waiting) < AT_ONCE:
            if (len(found) + len(waiting) + 1) % ITEMS == 0:
                yield
            one = self._backlog.popleft()
            touched = _touched(one.source, one.target, seen.nodes)
            if any(load[node] >= PER_NODE for node in touched):
                waiting.append(one)
            elif (
                one.uid not in busy
                and one.target not in self._avoided.get(one.uid, ())
                and _fits(one, seen.find(one.uid), states)
            ):
                busy.add(one.uid)
                load.update(touched)
                found.append(_proposal(one))
        self._backlog.extendleft(reversed(waiting))
        return found


def _touched(source: int, target: int, nodes: Mapping[int, Node]) -> set[int]:
    """Return the nodes that a move is work for: a dead one does none."""
    return {number for number in (source, target) if number in nodes and nodes[number].state not in (DEAD, REMOVED)}


def _fits(one: Proposed, log: Log | None, states: Mapping[int, str]) -> bool:
    """Return whether a move still is what its log needs: it was planned some time ago."""
    if log is None or log.state != LIVE:
        return False
    voters = log.voters if log.seen else log.members
    if one.kind == REMOVE:
        return one.source in log.learners
    if states.get(one.target) != ACTIVE:
        return False
    if one.kind == LEAD:
        return one.target in voters
    if one.target in voters:
        return False
    return len(voters) < log.copies if one.kind == ADD else one.source in voters


def _is_vain(move: Move, nodes: Mapping[int, Node]) -> bool:
    """Return whether a move has lost its reason, or can't come to its end: who was dead is back, or its target is."""
    source, target = nodes.get(move.source), nodes.get(move.target)
    back = move.why.endswith("is dead") and source is not None and source.state in (ACTIVE, RETURNED)
    return back or (bool(move.target) and (target is None or target.state in (DEAD, REMOVED)))


def _proposal(one: Proposed) -> dict[str, Any]:
    return {"uid": one.uid, "kind": one.kind, "source": one.source, "target": one.target, "why": one.why}


def shown(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values, its first moves only."""
    return {
        "held": plan.held,
        "count": len(plan.moves),
        "moves": [one._asdict() for one in plan.moves[:SHOWN]],
        "stuck": [one._asdict() for one in plan.stuck[:SHOWN]],
        "stuck_count": len(plan.stuck),
    }

"""What the catalogue's leader does with the plan: proposes moves as far as there is room, gives up those whose reason
is gone.

Everything that is under way stands in the plan itself, so a new leader goes on where the old one stood. Invariants: at
most `AT_ONCE` moves, and `PER_NODE` on each node, are under way; none is proposed while the plan is paused or held.
Called by the keeper, where it leads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from logyard.machines.catalog.logs import Log
from logyard.machines.catalog.nodes import ACTIVE, DEAD, RETURNED, Node
from logyard.machines.catalog.plan import Move

from .mover import UNDO
from .planner import LEAD, Plan, Planner, Proposed

AT_ONCE = 32
PER_NODE = 8
SHOWN = 1000


class Doing(NamedTuple):
    """What is to be told to the plan: moves to propose, and numbers of those to give up, or to end."""

    propose: list[dict[str, Any]]
    undo: list[int]
    end: list[int]


def planned(
    nodes: Mapping[int, Node], logs: Iterable[Log], leaders: Mapping[int, int], moves: Mapping[int, Move]
) -> Plan:
    """Return the plan, beside what is under way."""
    moving = {move.uid: (move.target, move.source) for move in moves.values() if move.kind != LEAD}
    return Planner(nodes, logs, leaders, moving).plan()


def doing(plan: Plan, nodes: Mapping[int, Node], logs: Mapping[int, Log | None], moves: Mapping[int, Move]) -> Doing:
    """Return what of a plan is begun now, and which moves are over. `logs`: those of the moves, by uid, None: gone."""
    undo: list[int] = []
    end: list[int] = []
    for number, move in moves.items():
        if logs.get(move.uid) is None:
            end.append(number)
        elif move.step != UNDO and _is_vain(move, nodes):
            undo.append(number)
    load: Counter[int] = Counter()
    for move in moves.values():
        load.update({move.source, move.target} - {0})
    busy = {move.uid for move in moves.values()}
    found: list[dict[str, Any]] = []
    for one in plan.moves if not plan.held else ():
        if len(moves) + len(found) >= AT_ONCE:
            break
        touched = {one.source, one.target} - {0}
        if one.uid in busy or any(load[node] >= PER_NODE for node in touched):
            continue
        busy.add(one.uid)
        load.update(touched)
        found.append(_proposal(one))
    return Doing(found, undo, end)


def _is_vain(move: Move, nodes: Mapping[int, Node]) -> bool:
    """Return whether a move has lost its reason, or can't come to its end: who was dead is back, or its target is."""
    source, target = nodes.get(move.source), nodes.get(move.target)
    back = move.why.endswith("is dead") and source is not None and source.state in (ACTIVE, RETURNED)
    return back or (bool(move.target) and (target is None or target.state == DEAD))


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

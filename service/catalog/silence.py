"""Which nodes are silent, and which are dead: what the catalogue's leader makes of whom the nodes hear. Pure.

Silent is who is not heard by a quorum of the catalogue's voters; dead, who was silent for `replace_after_s` of this
leader's own time, and whom no other live node hears either. What a node has not said yet counts as hearing: a new
leader declares nobody dead on what it does not know. What is heard of a dead node may be from before its death, so it
is back only when it was not heard in between, or is heard still after `BACK_AFTER_S`. Invariant: while too many are
silent at once (`too_many`) nobody is declared dead, because then the fault is rather here, or in what lies between.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from logyard.machines.catalog.nodes import ACTIVE, DEAD, DRAINING, JOINING, RETURNED, SILENT

REPLACE_AFTER_S = 600.0
BACK_AFTER_S = 10.0
"""By then everybody has noticed that a node is gone, and has told the leader."""


def too_many(states: Mapping[int, str], zones: Mapping[int, str]) -> str:
    """Return why nothing may be done by itself: two or more nodes are silent, and they are a third, or a whole zone.
    One silent node never stops anything."""
    silent = {node for node, state in states.items() if state == SILENT}
    there = {node for node, state in states.items() if state in (ACTIVE, SILENT)}
    if len(silent) < 2:
        return ""
    if len(silent) * 3 >= len(there):
        return f"nodes {sorted(silent)} are silent, a third or more of {len(there)}"
    for zone in sorted({zones.get(node, "") for node in silent}):
        of_zone = {node for node in there if zones.get(node, "") == zone}
        if zone not in ("", "-") and of_zone <= silent:
            return f"all nodes of zone {zone!r} are silent"
    return ""


class Silence:
    """Since when nodes are silent, by the monotonic clock of a leader of the catalogue; made anew with each."""

    def __init__(self, node_id: int, replace_after_s: float = REPLACE_AFTER_S) -> None:
        self._node_id = node_id
        self._replace_after_s = replace_after_s
        self._since: dict[int, float] = {}
        # Since when dead nodes are heard as dead ones; -inf: they were not heard in between.
        self._dead: dict[int, float] = {}

    def look(
        self,
        now: float,
        states: Mapping[int, str],
        zones: Mapping[int, str],
        voters: Collection[int],
        views: Mapping[int, Set[int]],
    ) -> list[tuple[str, int]]:
        """Return commands, (name, node). `views`: whom each node hears, this one's among them."""
        own = views[self._node_id]
        live = {node for node in own if node in states}
        quorum = len(voters) // 2 + 1
        found: list[tuple[str, int]] = []
        self._dead = {node: since for node, since in self._dead.items() if states.get(node) == DEAD}
        for node, state in sorted(states.items()):
            hearing = {voter for voter in voters if voter in live and node in views.get(voter, states)}
            if len(hearing) >= quorum or node == self._node_id:
                self._since.pop(node, None)
                back = state == DEAD and now - self._dead.setdefault(node, now) >= BACK_AFTER_S
                if state in (JOINING, SILENT) or back:
                    found.append(("heard", node))
                continue
            if state == DEAD:
                self._dead[node] = float("-inf")
            since = self._since.setdefault(node, now)
            if state == ACTIVE:
                found.append(("silent", node))
            due = state in (SILENT, DRAINING, RETURNED) and now - since >= self._replace_after_s
            heard = any(node in views.get(other, states) for other in live if other != node)
            if due and not heard and not too_many(states, zones):
                found.append(("declare_dead", node))
        return found

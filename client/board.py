"""Who leads what: the rows of a node's own table, and the one row a group that several nodes' tables make.

Called by `admin`; the engine's side is `engine/host/leader_cache.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias


class Standing(NamedTuple):
    """One group as a node's tables have it: no group was asked. `leader` 0: none known.

    `since_ms` is the answering node's wall clock when it learned of the leader; `role` and `state` are those of the
    answering node's member; `outgoing` is the other half of a joint configuration.
    """

    name: str
    uid: int
    leader: int
    term: int
    since_ms: int
    role: str
    state: str
    voters: tuple[int, ...]
    learners: tuple[int, ...]
    outgoing: tuple[int, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """Everyone who holds a copy."""
        return tuple(sorted({*self.voters, *self.learners, *self.outgoing}))


Board: TypeAlias = list[Standing]
"""Standings by name."""


def standings(value: Any) -> list[Standing]:
    """Return the rows of a ``board`` answer."""
    return [Standing(*row[:7], *(tuple(nodes) for nodes in row[7:10])) for row in value]


def merge_board(boards: Iterable[Iterable[Standing]]) -> list[Standing]:
    """Return one row a group, by name: its leader's own, in the newest term; without one, that of who knows most."""
    merged: dict[str, Standing] = {}
    for rows in boards:
        for row in rows:
            known = merged.get(row.name)
            if known is None or _weight(row) > _weight(known):
                merged[row.name] = row
    return [merged[name] for name in sorted(merged)]


def _weight(row: Standing) -> tuple[bool, int, bool]:
    # A stopped leader's row is its last word, not the group's; one that is halted or hibernates leads on.
    return (row.role == "leader" and row.state not in ("stopped", "deleted"), row.term, bool(row.leader))

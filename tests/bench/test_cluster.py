"""What the cases and the demo wait for before they read back what was acknowledged."""

from __future__ import annotations

from typing import Any

from logyard.bench.cluster import holds_everything
from logyard.engine.replica.member import ASLEEP


def row(role: str, last: int, commit: int, applied: int, state: str = "running") -> dict[str, Any]:
    return {"name": "a", "role": role, "state": state, "last": last, "commit": commit, "applied": applied}


def test_a_leader_that_does_not_know_yet_what_is_committed_is_waited_for() -> None:
    """Right after its election its commit index is an old one: what was acknowledged may lie behind it."""
    behind, there = row("follower", 7, 3, 3), row("follower", 8, 8, 8)
    assert not holds_everything([[row("leader", 8, 3, 3)], [behind], [behind]], 1)
    assert not holds_everything([[row("leader", 8, 8, 8)], [behind], [there]], 1)
    assert holds_everything([[row("leader", 8, 8, 8)], [there], [there]], 1)
    asleep = row("follower", 8, 8, 8, ASLEEP)
    assert holds_everything([[asleep], [asleep], [asleep]], 1)
    assert not holds_everything([[behind], [behind], [behind]], 1), "no leader"
    assert not holds_everything([[row("leader", 8, 8, 8)], [], [there]], 1), "not on every node"

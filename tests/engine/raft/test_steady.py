"""What the lane hands out is what a `Ready` would have, and the core is left as `ready` leaves it: in random histories
with faults, each time a core is asked, a copy of it is asked the other way."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from logyard.engine.entry import Entry
from logyard.engine.raft import steady
from logyard.engine.raft.core import LEADER, Raft
from logyard.engine.raft.messages import Message, describe
from logyard.engine.raft.progress import PROBE, SNAPSHOTTING
from logyard.engine.raft.ready import Ready

from .network import Network, check_message
from .test_random_cluster import LAZY, TIGHT, Chaos

KEPT = {"draw", "encode", "live", "log", "progress", "pair", "windows", "reads", "outbox"}


def state_of(raft: Raft) -> dict[str, Any]:
    """Return everything that a core holds, as plain values."""
    found = {name: repr(getattr(raft, name)) for name in Raft.__slots__ if name not in KEPT}
    log = raft.log
    found["log"] = repr([[getattr(log, name) for name in log.__slots__ if name != "entries"], len(log.entries)])
    found["progress"] = repr(
        {
            node: [getattr(one, name) for name in one.__slots__ if name != "window"] + [one.window.bytes]
            for node, one in raft.progress.items()
        }
    )
    found["waiting"] = repr({node: list(window.waiting) for node, window in raft.windows.items()})
    found["outbox"] = repr([describe(message) for message in raft.outbox])
    return found


def said(messages: Sequence[Message]) -> list[str]:
    """Return messages for comparison, their entries by index and term."""
    return [f"{describe(m)} {[(one.index, one.term) for one in m.entries or ()]}" for m in messages]


def places(entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """Return entries for comparison."""
    return [(entry.index, entry.term) for entry in entries]


class Judge:
    """Asks a copy of each core the other way. `taken` counts what the lane did, by what it was."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self._ready = Raft.ready

    def ready(self, raft: Raft) -> Ready | None:
        """Stand for `Raft.ready`."""
        if not raft.dirty:
            return self._ready(raft)
        kept = {id(value): value for value in (raft.live, raft.draw, raft.encode, raft.limits, raft.configuration)}
        twin = copy.deepcopy(raft, {**kept, **{id(entry): entry for entry in raft.log.entries}})
        before = state_of(twin)
        out: list[Message] = []
        handed = steady.hand_out(twin, out)
        found = self._ready(raft)
        if handed is None:
            assert state_of(twin) == before and not out, "it refused, and changed something"
            return found
        entries, token = handed
        assert said(out) == said(found.messages if found is not None else ())
        assert state_of(twin) == state_of(raft)
        if found is None:
            assert (entries, token) == steady.NOTHING
            return None
        assert (places(entries), token) == (places(found.entries), found.token)
        assert not (found.hard_state or found.after or found.reads or found.failed_reads)
        assert not (found.role_changed or found.truncated)
        self.taken[f"{'leader' if raft.role == LEADER else 'follower'}, {'entries' if entries else 'commit'}"] += 1
        return found


@pytest.mark.parametrize("limits", [LAZY, TIGHT], ids=["lazy", "tight"])
def test_the_lane_does_what_a_ready_would(limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge()
    monkeypatch.setattr(Raft, "ready", lambda raft: judge.ready(raft))
    for seed in range(12):
        network = Chaos(3, seed, membership=seed % 2 == 1, limits=limits)
        for _ in range(2500):
            network.step()
    assert min(judge.taken[what] for what in ("leader, entries", "leader, commit", "follower, entries")) > 20


def test_the_lane_leaves_to_the_core_what_is_not_its_own() -> None:
    network = Network(3, limits=LAZY)
    leader = network.elect(1)
    for what in ("changed", "truncated", "held", "outbox", "confirmed_reads", "failed_reads", "chores", "leaving"):
        twin = copy.deepcopy(leader)
        twin.dirty = True
        setattr(twin, what, [1] if what in ("held", "outbox") else ((1, 1),) if "reads" in what else 1)
        assert steady.hand_out(twin, []) is None and twin.dirty, what
    twin = copy.deepcopy(leader)
    twin.term += 1
    assert steady.hand_out(twin, []) is None, "a new term goes by the core"
    assert steady.hand_out(copy.deepcopy(leader), []) == steady.NOTHING


def test_only_a_probe_that_is_due_takes_a_leader_off_the_lane() -> None:
    network = Network(3, limits=LAZY)
    leader = network.elect(1)
    progress = leader.progress[3]
    for entries in (False, True):
        if entries:
            network.hosts[1].propose(b"x")
        for state, paused, alive in itertools.product((PROBE, SNAPSHOTTING), (False, True), (False, True)):
            progress.state, progress.paused = state, paused
            leader.live = {1, 2, 3} if alive else {1, 2}
            due = state == PROBE and not paused and alive
            assert (steady.hand_out(copy.deepcopy(leader), []) is None) == due, (entries, state, paused, alive)


def test_the_lane_says_nothing_that_an_append_does_not() -> None:
    network = Network(3, limits=LAZY)
    leader = network.elect(1)
    network.hosts[1].propose(b"x")
    out: list[Message] = []
    assert steady.hand_out(copy.deepcopy(leader), out) is not None and [m.to for m in out] == [2, 3]
    for m in out:
        check_message(m)

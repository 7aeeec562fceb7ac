"""Two nodes' digests over a network that is a function call: whatever word is lost, both find out who sleeps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from logyard.engine.quiesce.digest import PATIENCE_SECONDS, STEADY_INTERVALS, Digests
from logyard.engine.quiesce.quiesced_table import QuiescedTable, Row, Shape
from logyard.engine.transport.blobs import DIGEST

SHAPE = Shape((1, 2), (), (2,), (), "log")
INTERVAL_S = 0.5


def row(term: int = 4, leader: int = 1) -> Row:
    return Row(term, 7, 0, 0, 0, leader, 100, SHAPE)


class Side:
    """One node; its blobs are at the other one at once, unless `deaf`, and renewals go out when the test says so."""

    def __init__(self, node: int) -> None:
        self.node, self.other = node, 3 - node
        self.nodes = {3 - node}
        self.live = {1, 2}
        self.table = QuiescedTable(node)
        self.renewed = 0
        self.woken: list[tuple[int, int]] = []
        self.told: list[tuple[int, int]] = []
        self.blobs: list[int] = []
        self.peer: Side
        self.digests = Digests(
            node, self.table, self.live, INTERVAL_S, self, lambda *soon: self.woken.append(soon),
            lambda *awake: self.told.append(awake),
        )  # fmt: skip

    def digest_of(self, node: int) -> int:
        assert node == self.other
        return self.renewed

    def send_blob(self, node: int, kind: int, request: int, header: Mapping[str, Any]) -> bool:
        self.blobs.append(kind)
        self.peer.digests.on_blob(self.node, kind, header)
        return True

    def renew(self) -> None:
        self.peer.renewed = self.digests.digest(self.other)


class Pair:
    def __init__(self, clock: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock.setattr(time, "monotonic", lambda: self.now)
        self.leader, self.follower = Side(1), Side(2)
        self.leader.peer, self.follower.peer = self.follower, self.leader

    def pass_by(self, seconds: float) -> None:
        """Ticks on both nodes."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.1
            for side in (self.leader, self.follower):
                side.renew()
                side.digests.compare()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(monkeypatch)


def test_who_agrees_says_nothing(pair: Pair) -> None:
    for uid in range(1, 600):
        pair.leader.table.add(uid, row())
        pair.follower.table.add(uid, row())
    pair.pass_by(20)
    assert not pair.leader.blobs and not pair.follower.blobs and not pair.follower.digests.exchanges
    assert pair.leader.digests.digest(2) and not pair.follower.digests.digest(1)


def test_what_the_leader_does_not_know_of_wakes_and_what_is_awake_here_wakes_there(pair: Pair) -> None:
    for uid in (300, 600, 900):
        pair.leader.table.add(uid, row())
    for uid in (600, 900, 1200, 1500):
        pair.follower.table.add(uid, row(5 if uid == 900 else 4))
    pair.pass_by(STEADY_INTERVALS * INTERVAL_S + 0.2)
    assert pair.follower.digests.exchanges == 1
    assert pair.follower.woken == [(900, 1), (1200, 1), (1500, 1)], "a group of another term is another group"
    assert pair.follower.told == [(1, 300)] and not pair.leader.woken


def test_a_difference_that_goes_away_is_none(pair: Pair) -> None:
    pair.leader.table.add(9, row())
    pair.pass_by(STEADY_INTERVALS * INTERVAL_S - 0.3)
    pair.follower.table.add(9, row())
    pair.pass_by(10)
    assert not pair.follower.blobs


def test_one_that_changes_all_the_time_is_looked_into_in_the_end(pair: Pair) -> None:
    uid = 0
    began = pair.now
    while not pair.follower.digests.exchanges:
        uid += 1
        pair.leader.table.add(uid, row())
        pair.pass_by(0.5)
    assert PATIENCE_SECONDS <= pair.now - began < PATIENCE_SECONDS + 1
    assert pair.follower.told == [(1, one) for one in range(1, uid + 1)]


def test_of_a_node_that_is_away_nothing_is_asked(pair: Pair) -> None:
    pair.follower.table.add(9, row())
    pair.follower.live.discard(1)
    pair.pass_by(20)
    assert not pair.follower.blobs
    pair.follower.live.add(1)
    pair.pass_by(STEADY_INTERVALS * INTERVAL_S - 0.3)
    assert not pair.follower.blobs, "what was before does not count"
    pair.pass_by(0.5)
    assert pair.follower.blobs == [DIGEST] and pair.follower.woken == [(9, 1)]

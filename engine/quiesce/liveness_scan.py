"""What a node's coming or going means for the groups that sleep: walks over their table, as far as there is time.

Invariant: until a dead node's walk is over, a group that wakes takes it for gone, whatever its row says yet. What a
walk finds is the state of then, so walks that overlap do no harm. Called by `inbound` (liveness) and `quiesce`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .quiesced_table import quorum_lives

if TYPE_CHECKING:
    from .quiesce import Quiesce

SWEEP_SECONDS = 0.02
"""What a tick may spend on it."""


class LivenessScan:
    """One node's, in the order they were begun."""

    __slots__ = ("hibernation", "system", "sleepers", "_live", "_queue")

    def __init__(self, hibernation: Quiesce) -> None:
        self.hibernation = hibernation
        self.system = hibernation.system
        self.sleepers = hibernation.sleepers
        self._live: set[int] = {self.system.node_id}
        # Beside each: the node whose groups it gives up, 0 for none.
        self._queue: deque[tuple[int, Iterator[None]]] = deque()

    @property
    def pending(self) -> bool:
        """Whether the next tick has to go on."""
        return bool(self._queue)

    def gives_up(self, leader: int) -> bool:
        """Return whether the groups of a dead node are not all given up yet."""
        return any(leader == node for node, _ in self._queue if node)

    def on_liveness(self, live: set[int]) -> None:
        """Act on nodes that appeared or went. A leader's death wakes its groups, where a quorum is left; a leader
        without a quorum leads no more; who comes back wakes what went to sleep without it."""
        died, came = self._live - live, live - self._live
        self._live = set(live)
        if not died and not came:
            return
        for node in died:
            self._queue.append((node, self._bereave(node)))
        self._queue.append((0, self._recount(set(live), came)))
        for node in came:
            self._queue.append((0, self._meet(node, self.system.peers.epoch_of(node))))
        self.go_on()

    def go_on(self) -> None:
        """Go on as far as there is time; the ticker asks again."""
        end = time.monotonic() + SWEEP_SECONDS
        while self._queue:
            for _ in self._queue[0][1]:
                if time.monotonic() >= end:
                    self.system.ticker.stir()
                    return
            self._queue.popleft()

    def _bereave(self, node: int) -> Iterator[None]:
        """Leave the groups that slept under a node which is gone without a leader; they wake where a quorum is left."""
        for uid, row in self.sleepers.rows("leader = ?", node):
            self.sleepers.follow(uid, 0)
            if quorum_lives(row.shape, self._live):
                self.hibernation.wake_soon(uid, 0)
            yield

    def _recount(self, live: set[int], came: set[int]) -> Iterator[None]:
        """Count anew the groups that sleep under this node: without a quorum it leads them no more, and who comes back
        wakes those that went to sleep without it."""
        for uid, _ in self.sleepers.led_where(lambda shape: not quorum_lives(shape, live)):
            self.sleepers.follow(uid, 0)
            yield
        for uid, _ in self.sleepers.led_where(lambda shape: not came.isdisjoint(shape.absent)):
            self.hibernation.wake_soon(uid, self.system.node_id)
            yield

    def _meet(self, node: int, epoch: int) -> Iterator[None]:
        """Meet `node`, under which some groups slept before a restart of this node: they still do, if it is the same
        process. If not, nobody leads them until somebody needs them."""
        for uid, _ in self.sleepers.rows("leader = 0 AND under = ? AND epoch = ?", node, epoch):
            self.sleepers.follow(uid, node)
            yield

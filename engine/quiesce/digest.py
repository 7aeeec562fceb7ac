"""Two nodes agree on which groups sleep between them: digests with each renewal, and an exchange when they differ.

Invariant: a follower that sleeps in a group which its leader does not know to sleep (it stopped, stepped down, was
deleted, or its word was lost) finds out within a few renewals, and so does a leader whose follower is awake. It costs
one comparison a peer and tick, an exchange 256 sums and the rows of the parts that differ. Called by
`quiesce`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..transport.blobs import DIGEST, SLEEPERS
from .quiesced_table import bucket

if TYPE_CHECKING:
    from .quiesce import Quiesce

STEADY_INTERVALS = 3
"""A difference is looked into when it stays the same for so many renewals: what is under way is over by then."""
PATIENCE_SECONDS = 5.0
"""Or when there has been one for so long, while groups came and went."""


class _Difference:
    """Since when two sums differ, and since when they are these."""

    __slots__ = ("began", "since", "sums")

    def __init__(self, now: float, sums: tuple[int, int]) -> None:
        self.began = self.since = now
        self.sums = sums


class Digests:
    """This node's side, with every peer."""

    def __init__(self, hibernation: Quiesce) -> None:
        self.hibernation = hibernation
        self.system = hibernation.system
        self.sleepers = hibernation.sleepers
        self.exchanges = 0
        self._differences: dict[int, _Difference] = {}

    def digest(self, node: int) -> int:
        """Return what a renewal to `node` says: the groups that this node leads and `node` sleeps in."""
        return self.sleepers.led_with.get(node, 0)

    def compare(self) -> None:
        """Compare the digests, on the follower's side, once a tick."""
        peers = self.system.peers
        for node in peers.nodes:
            sums = (self.sleepers.under.get(node, 0), peers.digest_of(node))
            if sums[0] == sums[1] or node not in self.system.live:
                self._differences.pop(node, None)
                continue
            now = time.monotonic()
            known = self._differences.setdefault(node, _Difference(now, sums))
            if known.sums != sums:
                known.since, known.sums = now, sums
            steady = STEADY_INTERVALS * self.system.config.liveness_interval_ms / 1000
            if now - known.since >= steady or now - known.began >= PATIENCE_SECONDS:
                del self._differences[node]
                self.exchanges += 1
                parts = self.sleepers.parts(node, self.system.node_id)
                peers.send_blob(node, DIGEST, 0, {"parts": [list(pair) for pair in parts.items()]})

    def differing(self, node: int, parts: Mapping[int, int]) -> None:
        """Answer, on the leader's side, that `node` sleeps in other groups than this node thinks; its sums by
        bucket."""
        own = self.sleepers.parts(self.system.node_id, node)
        differ = {number for number in own.keys() | parts.keys() if own.get(number) != parts.get(number)}
        table = [
            [uid, row.term]
            for uid, row in self.sleepers.between(self.system.node_id, node)
            if bucket(uid) in differ
        ]  # fmt: skip
        self.system.peers.send_blob(node, SLEEPERS, 0, {"parts": sorted(differ), "groups": table})

    def corrected(self, node: int, parts: Sequence[int], table: Sequence[Sequence[int]]) -> None:
        """Act, on the follower's side, on the leader's account of some buckets. What it does not know of wakes here,
        and asks it; what is awake here wakes there."""
        theirs = {int(uid): int(term) for uid, term in table}
        differ = set(parts)
        for uid, row in self.sleepers.between(node, self.system.node_id):
            if bucket(uid) in differ and theirs.pop(uid, -1) != row.term:
                self.hibernation.wake_soon(uid, node)
        for uid in theirs:
            self.hibernation.tell_awake(node, uid)

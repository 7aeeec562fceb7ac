"""Two nodes agree on which groups sleep between them: digests with each renewal, and an exchange when they differ.

Invariant: a follower that sleeps in a group which its leader does not know to sleep (it stopped, stepped down, was
deleted, or its word was lost) finds out within a few renewals, and so does a leader whose follower is awake. It costs
one comparison a peer and tick, an exchange 256 sums and the rows of the parts that differ. Called by `ticker` and
`inbound`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ..transport.blobs import DIGEST, SLEEPERS
from .quiesced_table import QuiescedTable, bucket

STEADY_INTERVALS = 3
"""A difference is looked into when it stays the same for so many renewals: what is under way is over by then."""
PATIENCE_SECONDS = 5.0
"""Or when there has been one for so long, while groups came and went."""


class Peers(Protocol):
    """The other nodes, and what their renewals say."""

    @property
    def nodes(self) -> Iterable[int]:
        """All of them, without this one."""
        ...

    def digest_of(self, node: int) -> int:
        """Return what a node's last renewal said of the quiesced groups that it leads with this node."""
        ...

    def send_blob(self, node: int, kind: int, request: int, header: Mapping[str, Any]) -> bool:
        """Send one blob; return False when it was dropped."""
        ...


class _Difference:
    """Since when two sums differ, and since when they are these."""

    __slots__ = ("began", "since", "sums")

    def __init__(self, now: float, sums: tuple[int, int]) -> None:
        self.began = self.since = now
        self.sums = sums

    def is_due(self, now: float, sums: tuple[int, int], steady_s: float) -> bool:
        """Note the sums of `now`; return whether it is time to look into them."""
        if self.sums != sums:
            self.since, self.sums = now, sums
        return now - self.since >= steady_s or now - self.began >= PATIENCE_SECONDS


class Digests:
    """This node's side, with every peer. `wake_soon(uid, leader)` wakes a group here, `tell_awake(node, uid)` there;
    `interval_s`: the time from renewal to renewal."""

    def __init__(
        self,
        node: int,
        table: QuiescedTable,
        live: Container[int],
        interval_s: float,
        peers: Peers,
        wake_soon: Callable[[int, int], None],
        tell_awake: Callable[[int, int], None],
    ) -> None:
        self.exchanges = 0
        self._node = node
        self._table = table
        self._live = live
        self._steady_s = STEADY_INTERVALS * interval_s
        self._peers = peers
        self._wake_soon = wake_soon
        self._tell_awake = tell_awake
        self._differences: dict[int, _Difference] = {}

    def digest(self, node: int) -> int:
        """Return what a renewal to `node` says: the groups that this node leads and `node` sleeps in."""
        return self._table.led_with.get(node, 0)

    def compare(self) -> None:
        """Compare what leaders say with what sleeps here: the follower's side, once a tick."""
        peers = self._peers
        for node in peers.nodes:
            sums = (self._table.under.get(node, 0), peers.digest_of(node))
            if sums[0] == sums[1] or node not in self._live:
                self._differences.pop(node, None)
                continue
            now = time.monotonic()
            if self._differences.setdefault(node, _Difference(now, sums)).is_due(now, sums, self._steady_s):
                del self._differences[node]
                self.exchanges += 1
                parts = self._table.parts(node, self._node)
                peers.send_blob(node, DIGEST, 0, {"parts": [list(pair) for pair in parts.items()]})

    def on_blob(self, node: int, kind: int, header: Mapping[str, Any]) -> None:
        """Take in what another node says of the groups that sleep between the two; its shape was checked."""
        if kind == DIGEST:
            self._differing(node, {int(number): int(total) for number, total in header["parts"]})
        elif kind == SLEEPERS:
            self._corrected(node, header["parts"], header["groups"])

    def _differing(self, node: int, parts: Mapping[int, int]) -> None:
        """Answer, as the leader, `node`, which sleeps in other groups than this node thinks; its sums by bucket."""
        own = self._table.parts(self._node, node)
        differ = {number for number in own.keys() | parts.keys() if own.get(number) != parts.get(number)}
        table = [[uid, row.term] for uid, row in self._table.between(self._node, node) if bucket(uid) in differ]
        self._peers.send_blob(node, SLEEPERS, 0, {"parts": sorted(differ), "groups": table})

    def _corrected(self, node: int, parts: Sequence[int], table: Sequence[Sequence[int]]) -> None:
        """Go, as a follower, by the leader's account of some buckets. What it does not know of wakes here, and asks it;
        what is awake here wakes there."""
        theirs = {int(uid): int(term) for uid, term in table}
        differ = set(parts)
        for uid, row in self._table.between(node, self._node):
            if bucket(uid) in differ and theirs.pop(uid, -1) != row.term:
                self._wake_soon(uid, node)
        for uid in theirs:
            self._tell_awake(node, uid)

"""Asks other members for pieces: one question at a time, of one peer after the other, at a bounded rate.

Invariant: a question ends with an answer, a lost link or a time-out, never later; what is asked of one peer in vain is
asked of the next. The rate is this node's, over all of its transfers and repairs. Called by `receiving` and `repair`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import trio

from logyard.protocol.errors import Corrupt, LogyardError

from ..config import SystemConfig
from ..raft.membership import Configuration
from ..ranges import Range
from ..transport.blobs import SNAPSHOT_PULL, SendBlob
from .pieces import Piece, read_piece

LATE_PIECES = 4
"""A peer may be busy with so many pieces of others before ours, each at the whole rate."""


class Pace:
    """A rate in bytes per second: what went too fast is waited for afterwards."""

    def __init__(self, bytes_per_s: int, clock: Callable[[], float] = trio.current_time) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0

    def take(self, size: int) -> float:
        """Book `size` bytes and return the seconds to wait before the next."""
        now = self._clock()
        self._free_at = max(now, self._free_at) + size / self.bytes_per_s
        return self._free_at - now


class Question:
    """One pull that waits for its answer."""

    __slots__ = ("node", "answered", "header", "body")

    def __init__(self, node: int) -> None:
        self.node = node
        self.answered = trio.Event()
        self.header: Mapping[str, Any] | None = None
        self.body: bytes | memoryview = b""

    def answer(self, header: Mapping[str, Any], body: bytes | memoryview) -> None:
        """Take the answer; the first one counts."""
        if not self.answered.is_set():
            self.header, self.body = header, body
            self.answered.set()


class Pulls:
    """The questions of this node. `live`: the nodes that are up, this one among them, kept by whoever knows."""

    def __init__(self, config: SystemConfig, node_id: int, live: Set[int], send: SendBlob) -> None:
        self.pace = Pace(config.snapshot_bytes_per_s)
        self.pieces = 0
        self.bytes = 0
        self.failed = 0
        self._config = config
        self._node_id = node_id
        self._live = live
        self._send = send
        self._next = 0
        self._questions: dict[int, Question] = {}

    def on_piece(self, node: int, request: int, header: Mapping[str, Any], body: bytes | memoryview) -> None:
        """Take an answer; one that nobody waits for is dropped."""
        question = self._questions.get(request)
        if question is not None and question.node == node:
            question.answer(header, body)

    def on_link_lost(self, node: int) -> None:
        """End the questions to a node: they may never be answered."""
        for question in self._questions.values():
            if question.node == node:
                question.answered.set()

    async def ask(
        self, node: int, uid: int, index: int, ranges: Sequence[Range] = (), chunks: Sequence[bytes] = ()
    ) -> Piece:
        """Return one piece from a node. `index`: of the snapshot it is for, 0 for a repair. Raises `LogyardError`,
        `Corrupt` for an answer that does not add up."""
        config = self._config
        self._next += 1
        request = self._next
        question = self._questions[request] = Question(node)
        header = {
            "uid": uid, "index": index, "ranges": [list(one) for one in ranges], "chunks": list(chunks),
            "limit": config.snapshot_piece_bytes,
        }  # fmt: skip
        patience = config.snapshot_stall_ms / 1000 + LATE_PIECES * config.snapshot_piece_bytes / self.pace.bytes_per_s
        try:
            if not self._send(node, SNAPSHOT_PULL, request, header):
                raise LogyardError(f"the link to node {node} is down or full")
            with trio.move_on_after(patience):
                await question.answered.wait()
            if question.header is None:
                raise LogyardError(f"node {node} does not answer")
            if question.header["uid"] != uid:
                raise Corrupt(f"an answer of node {node}", 0, f"group {uid:016x}", question.header["uid"])
            if question.header["error"]:
                raise LogyardError(f"node {node}: {question.header['error']}")
            piece = read_piece(uid, ranges, chunks, question.header, question.body)
        except LogyardError:
            self.failed += 1
            raise
        finally:
            del self._questions[request]
        self.pieces += 1
        self.bytes += piece.size
        await trio.sleep(self.pace.take(piece.size))
        return piece

    def others(self, configuration: Configuration) -> list[int]:
        """Return the other members' nodes, those that live first: whether the rest do is not known right after a
        start."""
        nodes = configuration.nodes() - {self._node_id}
        return [*sorted(nodes & self._live), *sorted(nodes - self._live)]

    def neighbours(self) -> list[int]:
        """Return all other nodes that live, members or not."""
        return sorted(self._live - {self._node_id})


class Sources:
    """The peers that may have something, in turn. One that failed is asked no more, unless all have and something came
    since: then what is asked is something else, which one that failed may have."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self._nodes = list(dict.fromkeys(nodes))
        self._failed: set[int] = set()
        self._at = 0
        self._came = False

    def include(self, nodes: Iterable[int]) -> None:
        """Ask these as well."""
        self._nodes += [node for node in nodes if node not in self._nodes]

    def next(self) -> int:
        """Return whom to ask now; 0 when everybody failed."""
        if self._came and self._failed.issuperset(self._nodes):
            self._came = False
            self._failed.clear()
        for _ in range(len(self._nodes)):
            node = self._nodes[self._at % len(self._nodes)]
            self._at += 1
            if node not in self._failed:
                return node
        return 0

    def came(self) -> None:
        """Note that a part of it is here."""
        self._came = True

    def fail(self, node: int) -> None:
        """Note that a node did not have it, or does not answer."""
        self._failed.add(node)

"""Pulls: the pieces of a transfer that a member asks others for, one question at a time, at a bounded rate.

Invariants: a question ends with an answer, a lost link or a time-out, never later; what is asked of one peer in vain is
asked of the next; nothing of an answer is believed before it adds up: entries rise within what was asked for, every
unit matches the hash in its entry, every chunk its name. The rate is this node's, over all of its transfers and
repairs. Called by `snapshot_receiver` and `engine.repair`; `snapshot_sender` answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import trio
import xxhash

from logyard.protocol.errors import Corrupt, LogyardError
from logyard.protocol.pending import PendingReply

from ..config import SystemConfig
from ..entry import parse_entry, unit_hash, units_of
from ..machine import PayloadRange
from ..ports import LivenessPort, SourceEntry
from ..raft.configuration import Configuration
from ..ranges import Range, covered
from ..transport.blobs import SNAPSHOT_PULL, SendBlob
from ..types import Buffer

RANGES_MAX = 256
"""In one question."""
INDEX_MAX = 1 << 62
"""Above what any honest node says."""


class Piece(NamedTuple):
    """An answer. It covers what was asked for up to and with `through`; `release` is the newest release its sender has
    applied (0: none), `live` names what lives there of the covered ranges."""

    rows: list[SourceEntry]
    through: int
    release: int
    live: int
    chunks: dict[bytes, memoryview]
    size: int


def live_digest(liveness: LivenessPort, ranges: Iterable[Range]) -> int:
    """Return a number that two members share if and only if, but for chance, the same lives for both in these
    ranges."""
    found: list[PayloadRange] = []
    for first, last in ranges:
        found += liveness.live_within((first, 0), (last + 1, 0))
    return xxhash.xxh3_64_intdigest(repr([(*first, *end) for first, end in found]).encode())


def read_piece(
    uid: int, ranges: Sequence[Range], names: Sequence[bytes], header: Mapping[str, Any], body: Any
) -> Piece:
    """Return an answer to a pull of `ranges` and chunks `names`. Raises `Corrupt` unless all of it adds up."""
    where = f"snapshot piece of group {uid:016x}"
    data = memoryview(body)
    chunks: dict[bytes, memoryview] = {}
    at = 0
    for name, size in header["chunks"]:
        chunk = data[at : at + size]
        at += size
        if name not in names or len(chunk) != size or xxhash.xxh3_128_digest(chunk) != name:
            raise Corrupt(where, at, f"chunk {name.hex()}", "another")
        chunks[name] = chunk
    through, release = header["through"], header["release"]
    if through >= INDEX_MAX or release >= INDEX_MAX:
        raise Corrupt(where, 0, "indexes that may be", max(through, release))
    rows = _rows(uid, header["entries"], data[at:])
    asked = covered(ranges, through)
    last = 0
    for row in rows:
        if row.index <= last or not any(first <= row.index <= end for first, end in asked):
            raise Corrupt(where, at, "rising entries of what was asked for", f"entry {row.index}")
        last = row.index
    return Piece(rows, through, release, header["live"], chunks, len(data))


def _rows(uid: int, entries: Sequence[Sequence[Any]], body: memoryview) -> list[SourceEntry]:
    """Return the entries of one piece with their live units, whose bytes are sliced from `body` and verified. Raises
    `Corrupt`."""
    where = f"snapshot piece of group {uid:016x}"
    rows = []
    at = 0
    for index, term, data, numbers in entries:
        if isinstance(data, int):
            # Too much for a header: so many bytes of the body.
            size, data = data, bytes(body[at : at + data])
            at += size
        entry = parse_entry(data, where)
        live = set(numbers)
        count = 0
        # (offset in the entry's payload, bytes) of each unbroken stretch of live units.
        parts: list[tuple[int, memoryview]] = []
        begin = start = end = 0
        for unit in units_of(entry.data):
            if unit.number not in live:
                continue
            count += 1
            if unit.offset != end or not parts:
                begin, start = at, unit.offset
                parts.append((start, body[at:at]))
            if unit_hash(uid, entry.index, entry.term, unit.number, body[at : at + unit.length]) != unit.hash:
                raise Corrupt(where, at, unit.hash.hex(), "another hash")
            at += unit.length
            end = unit.offset + unit.length
            parts[-1] = (start, body[begin:at])
        if (entry.index, entry.term) != (index, term) or count != len(live) or at > len(body):
            raise Corrupt(where, at, "entries and bytes that add up", f"{len(body)} bytes")
        rows.append(SourceEntry(uid, entry.index, entry.term, bytes(data), live, slicer(parts)))
    if at != len(body):
        raise Corrupt(where, at, "entries and bytes that add up", f"{len(body)} bytes")
    return rows


def slicer(parts: Sequence[tuple[int, Buffer]]) -> Callable[[int, int], Buffer]:
    """Return what gives bytes of an entry's payload by offset. A reader may ask for a stretch with released units in
    it, which it then ignores."""

    def read(offset: int, length: int) -> Buffer:
        found = bytearray()
        for start, data in parts:
            if start <= offset and offset + length <= start + len(data):
                return memoryview(data)[offset - start : offset - start + length]
            found = found or bytearray(length)
            low, high = max(start, offset), min(start + len(data), offset + length)
            if low < high:
                found[low - offset : high - offset] = memoryview(data)[low - start : high - start]
        return found

    return read


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
        # Whom each is for, and what waits for its header and its body.
        self._questions: dict[int, tuple[int, PendingReply[tuple[Mapping[str, Any], bytes | memoryview]]]] = {}

    def on_piece(self, node: int, request: int, header: Mapping[str, Any], body: bytes | memoryview) -> None:
        """Take an answer; one that nobody waits for is dropped."""
        asked, pending = self._questions.get(request, (0, None))
        if pending is not None and asked == node:
            pending.set((header, body))

    def on_link_lost(self, node: int) -> None:
        """End the questions to a node: they may never be answered."""
        for asked, pending in self._questions.values():
            if asked == node:
                pending.cut(LogyardError(f"node {node} does not answer"))

    async def ask(
        self, node: int, uid: int, index: int, ranges: Sequence[Range] = (), chunks: Sequence[bytes] = ()
    ) -> Piece:
        """Return one piece from a node. `index`: of the snapshot it is for, 0 for a repair. Raises `LogyardError`,
        `Corrupt` for an answer that does not add up."""
        config = self._config
        self._next += 1
        request = self._next
        pending: PendingReply[tuple[Mapping[str, Any], bytes | memoryview]] = PendingReply()
        self._questions[request] = node, pending
        header = {
            "uid": uid, "index": index, "ranges": [list(one) for one in ranges], "chunks": list(chunks),
            "limit": config.snapshot_piece_bytes, "beside": True,
        }  # fmt: skip
        patience = config.snapshot_stall_ms / 1000 + LATE_PIECES * config.snapshot_piece_bytes / self.pace.bytes_per_s
        try:
            if not self._send(node, SNAPSHOT_PULL, request, header):
                raise LogyardError(f"the link to node {node} is down or full")
            with trio.move_on_after(patience):
                await pending.wait(trio.Event)
            if not pending.done:
                raise LogyardError(f"node {node} does not answer")
            found, body = pending.result()
            if found["uid"] != uid:
                raise Corrupt(f"an answer of node {node}", 0, f"group {uid:016x}", found["uid"])
            if found["error"]:
                raise LogyardError(f"node {node}: {found['error']}")
            piece = read_piece(uid, ranges, chunks, found, body)
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

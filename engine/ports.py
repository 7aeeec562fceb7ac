"""What the engine needs from others, as protocols: the payload store, a group's liveness, the peers. `service` wires the real ones.

Invariant: the engine imports neither `payloads.store` nor a particular transport; each port has an in-memory or empty twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from logyard.payloads.reference import PayloadRange, Position

from .raft.messages import Message
from .types import Buffer


class StoredEntry(NamedTuple):
    """Metadata of an entry whose payload is in a generation."""

    index: int
    term: int
    data: bytes


class SourceEntry(NamedTuple):
    """An entry to be written to a generation. `live` names the units to keep (None: all); `read(offset, length)` gives payload bytes."""

    uid: int
    index: int
    term: int
    data: bytes
    live: set[int] | None
    read: Callable[[int, int], Buffer]


class PlacedRun(NamedTuple):
    """Entries first..last of a group now lie in `generation` under `run`."""

    uid: int
    first: int
    last: int
    generation: int
    run: int


class GenerationStatus(NamedTuple):
    """One generation; sizes in bytes, `disk` as allocated."""

    generation: int
    total: int
    live: int
    disk: int
    sealed: bool


class LivenessPort(Protocol):
    """Which payloads of one group are dead. Deadness is monotone (law 4)."""

    released_before: Position

    def release(self, first: Position, end: Position) -> bool:
        """Mark a range dead; False when all of it was."""
        ...

    def is_live(self, index: int, ordinal: int) -> bool:
        """Whether one record's payload is live."""
        ...

    def is_entry_dead(self, index: int, records: int) -> bool:
        """Whether every payload of an entry with this many records is dead."""
        ...

    def live_ranges(self, upto_index: int) -> Iterable[PayloadRange]:
        """What lives at or below an index."""
        ...

    def encode_live_set(self, upto_index: int) -> bytes:
        """The exact live set at or below an index, checksummed."""
        ...


class StorePort(Protocol):
    """The payload store. Blocking calls are marked; everything else may be called in a turn."""

    def open(self) -> None:
        """BLOCKING. Open what is there."""
        ...

    def close(self) -> None:
        """Close every environment."""
        ...

    def new_liveness(self) -> LivenessPort:
        """An empty liveness: everything lives."""
        ...

    def decode_liveness(self, live_set: bytes, index: int) -> LivenessPort:
        """The liveness at a snapshot's index. Raises on a missing or damaged live set."""
        ...

    def missing(self, live_set: bytes, index: int, have: Callable[[int], bool]) -> list[tuple[int, int]]:
        """Ranges (first, last) of entry indexes in a live set that `have` denies."""
        ...

    def adopt(self, uid: int, runs: Iterable[tuple[int, int, int, int]]) -> None:
        """At recovery: the runs (first, last, generation, run) that the meta store names for a group."""
        ...

    def scan(self, uid: int, first: int, last: int, generation: int, run: int) -> Iterator[StoredEntry]:
        """Metadata of the stored entries first..last of one run."""
        ...

    def read_unit(self, uid: int, index: int, term: int, unit: int, start: int, stop: int, generation: int, run: int) -> Buffer:
        """Bytes start..stop of a unit, verified. Raises `Gone`, `Corrupt`."""
        ...

    def write(self, job: int, rows: Iterable[SourceEntry]) -> list[PlacedRun]:
        """BLOCKING. Make entries durable in the current generation; redoing a job is harmless."""
        ...

    def rewrite(self, job: int, generation: int) -> list[PlacedRun]:
        """BLOCKING. Copy a generation's survivors to the current one."""
        ...

    def mark_dead(self, uid: int, first: tuple[int, int], end: tuple[int, int]) -> None:
        """(index, unit) up to, but without, (index, unit): these payloads are dead in every run that is adopted."""
        ...

    def forget(self, uid: int) -> None:
        """The group is deleted: all of its payloads are dead."""
        ...

    def drop_run(self, uid: int, first: int, last: int, generation: int, run: int) -> None:
        """A run is not a home any more (rewritten, or its tail was overwritten): its bytes there are dead."""
        ...

    def checkpoint(self) -> list[tuple[bytes, bytes]]:
        """Counters to keep in the meta store, as (name, value) pairs that changed since the last call."""
        ...

    def restore(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """The counters of the last checkpoint. Call before `adopt`."""
        ...

    def empty_generations(self) -> list[int]:
        """Generations with nothing live, the current one apart."""
        ...

    def sparse_generations(self, live_ratio: float) -> list[int]:
        """Sealed generations, or the current one, below a live ratio: to be rewritten."""
        ...

    def seal_current(self) -> None:
        """BLOCKING. The next write starts a new generation."""
        ...

    def drop(self, generation: int) -> None:
        """BLOCKING. Delete a generation's files, once its last reader has left."""
        ...

    def generations(self) -> list[GenerationStatus]:
        """What there is."""
        ...

    def disk_bytes(self) -> int:
        """Allocated bytes of all generations."""
        ...


class PeersPort(Protocol):
    """The other nodes."""

    @property
    def nodes(self) -> frozenset[int]:
        """Nodes with an address, without this one."""
        ...

    def send(self, messages: Sequence[Message]) -> None:
        """A turn's messages of all groups."""
        ...

    def send_blob(self, node: int, kind: int, request: int, header: bytes, body: Sequence[Buffer] = ()) -> bool:
        """One typed blob; False when it was dropped."""
        ...

    def status(self) -> Sequence[Any]:
        """A row a peer."""
        ...


class NoPeers:
    """A node alone: messages go nowhere."""

    nodes: frozenset[int] = frozenset()

    def send(self, messages: Sequence[Message]) -> None:
        """Drop them: a group of one member sends none that matter."""

    def send_blob(self, node: int, kind: int, request: int, header: bytes, body: Sequence[Buffer] = ()) -> bool:
        """Nobody is there."""
        return False

    def status(self) -> Sequence[Any]:
        """No peers."""
        return ()

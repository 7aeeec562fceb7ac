"""What the engine needs from others, as protocols: the payload store, a group's liveness, the peers. `service` wires
the real ones.

Invariant: the engine imports neither `payloads.store` nor a particular transport; each port has an in-memory or empty
twin.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from logyard.payloads.reference import PayloadRange, Position

from .jobs import Jobs
from .raft.messages import Message
from .types import Buffer


class HomePort(Protocol):
    """Entries first..last of a group lie in `generation`, under `run`."""

    @property
    def first(self) -> int:
        """First index."""
        ...

    @property
    def last(self) -> int:
        """Last index."""
        ...

    @property
    def generation(self) -> int:
        """Which environment."""
        ...


class StoredPort(Protocol):
    """Metadata of an entry whose payload is in a generation."""

    @property
    def index(self) -> int:
        """Raft index."""
        ...

    @property
    def term(self) -> int:
        """Raft term."""
        ...

    @property
    def data(self) -> bytes:
        """The encoded entry without its payload."""
        ...


class GenerationPort(Protocol):
    """One generation; sizes in bytes, `disk` as allocated."""

    @property
    def id(self) -> int:
        """Its number."""
        ...

    @property
    def total(self) -> int:
        """Bytes ever stored."""
        ...

    @property
    def live(self) -> int:
        """Bytes that live."""
        ...

    @property
    def sealed(self) -> bool:
        """Whether it is written no more."""
        ...


class SourceEntry(NamedTuple):
    """An entry to be written to a generation. `live` names the units to keep (None: all); `read(offset, length)`
    gives payload bytes, which stay as they are until the next read of any entry of that source."""

    uid: int
    index: int  # type: ignore[assignment]  # tuple.index is not missed
    term: int
    data: bytes
    live: set[int] | None
    read: Callable[[int, int], Buffer]


class LivenessPort(Protocol):
    """Which payloads of one group are dead: a released prefix, and exceptions behind it. Deadness is monotone (law
    4)."""

    @property
    def released_before(self) -> Position:
        """The first position that may live."""
        ...

    def release(self, first: Position, end: Position) -> bool:
        """Mark a range dead; return False when all of it was."""
        ...

    def is_dead_range(self, first: tuple[int, int], end: tuple[int, int]) -> bool:
        """Return whether all of a range within one entry is dead."""
        ...

    def live_units(self, index: int, units: Iterable[tuple[int, int, int]]) -> set[int]:
        """Return the live ones of an entry's units, given as (number, first ordinal, records)."""
        ...

    def live_ranges(self, upto_index: int) -> Iterable[PayloadRange]:
        """Return what is not dead up to and with an index, as rising, disjoint ranges."""
        ...

    def live_within(self, first: tuple[int, int], end: tuple[int, int]) -> Sequence[PayloadRange]:
        """Return what is not dead of a range, rising and disjoint."""
        ...

    def encode_live_set(self, upto: int) -> bytes:
        """Return the exact live set at or below an index, checksummed."""
        ...


class StorePort(Protocol):
    """The payload store. What is marked BLOCKING runs in a thread; everything else may be called in a turn."""

    jobs: Jobs
    """What failed of its jobs, and of the janitor's."""

    def open(self) -> Sequence[int]:
        """Open what is there; return the generations set aside. BLOCKING."""
        ...

    def close(self) -> None:
        """Close every environment."""
        ...

    def restore(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """Restore, at recovery, the rows that `changes` gave and the meta store kept."""
        ...

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """Return rows for the meta store: homes, dead marks and counters of the groups that changed since the last
        call."""
        ...

    def new_liveness(self) -> LivenessPort:
        """Return an empty liveness: everything lives."""
        ...

    def decode_liveness(self, live_set: bytes) -> LivenessPort:
        """Return the liveness at a snapshot's index. Raises `Corrupt` on a missing or damaged live set."""
        ...

    def missing(self, live_set: bytes, have_through: int) -> list[tuple[int, int]]:
        """Return ranges (first, last) of entry indexes in a live set, above `have_through`."""
        ...

    def lost(self, uid: int, first: int, last: int) -> bool:
        """Return whether payloads of the entries first..last went with a generation that failed, and are not back."""
        ...

    def lost_ranges(self) -> Sequence[tuple[int, int, int]]:
        """Return (uid, first, last) of everything that was lost and is not known to be back."""
        ...

    def lose(self, uid: int, first: int, last: int) -> None:
        """Count the home of these entries' payloads, or its place, as lost."""
        ...

    def found(self, uid: int, first: int, last: int) -> None:
        """Count none of these entries as lost any more: all that lives of them is here again, or the group is gone."""
        ...

    def home(self, uid: int, index: int) -> HomePort | None:
        """Return where an entry's payload is, if it was migrated."""
        ...

    def homes(self, uid: int) -> Sequence[HomePort]:
        """Return all homes of a group, rising."""
        ...

    def scan(self, uid: int, first: int, last: int) -> Iterator[StoredPort]:
        """Yield the metadata of the stored entries first..last."""
        ...

    def read_unit(self, uid: int, index: int, unit: int, start: int, stop: int) -> Buffer:
        """Return bytes start..stop of a unit, verified. Raises `Gone`, `Corrupt`."""
        ...

    def pin(self, generation: int) -> None:
        """Keep a generation while somebody reads it."""
        ...

    def unpin(self, generation: int) -> None:
        """Undo one `pin`."""
        ...

    async def write(
        self, ranges: Sequence[tuple[int, int, int]], read: Callable[[int, int, int], Iterable[SourceEntry]]
    ) -> None:
        """Make the entries of `ranges` = (uid, first, last) durable in the current generation; it is their home from
        then on.

        `read(uid, first, last)` is called in a thread. Commit `changes` before the source goes.
        """
        ...

    async def migrate(self, build: Callable[[], Any], bytes_s: int) -> None:
        """Write, as `write` does, what the `log.payload_source.FileSource` of `build` names, wherever jobs run; at most
        `bytes_s` bytes a second (0: no limit). `build` is called when it is this job's turn. Raises `Corrupt`,
        `NoSpace`, `JobPoisoned`."""
        ...

    async def rewrite_sparse(
        self,
        live_ratio: float,
        bytes_s: int,
        may_copy: Callable[[int], bool],
        drop: Callable[[], Awaitable[object]],
    ) -> bool:
        """Copy the survivors of each sealed generation below `live_ratio` to the current one, the least live first, and
        wait for `drop` after each, which lets go of what is dead; return False where `may_copy(bytes)` said no to
        some."""
        ...

    def mark_dead(self, uid: int, first: tuple[int, int], end: tuple[int, int]) -> object:
        """Mark the payloads from (index, unit) up to, but without, (index, unit) as dead in every copy."""
        ...

    def truncate(self, uid: int, from_index: int) -> object:
        """Count the copies as dead and end the homes: the log was overwritten from here on."""
        ...

    def delete_group(self, uid: int) -> object:
        """Count all payloads of a group as dead."""
        ...

    def seal_current(self) -> None:
        """Have the next write start a new generation. BLOCKING. The next write starts a new generation."""
        ...

    def dead_generations(self) -> Sequence[int]:
        """Return the generations of which nothing lives and which may go now."""
        ...

    def unlink_dead(self, generations: Sequence[int]) -> int:
        """Unlink these, unless something keeps them; return the bytes of disk given back. BLOCKING."""
        ...

    def generations(self) -> Sequence[GenerationPort]:
        """Return what there is."""
        ...

    def disk_bytes(self) -> int:
        """Return the allocated bytes of all generations."""
        ...

    def data_file(self, generation: int) -> str:
        """Return where a generation's bytes lie."""
        ...

    def bodies_file(self, generation: int) -> str:
        """Return where its large bodies lie, if it has such a file."""
        ...

    async def verify(self, generation: int) -> tuple[Sequence[tuple[int, int]], str]:
        """Read all of a generation beside what runs; return (uid, index) of entries at home there that are damaged or
        gone, and why nothing of it can be trusted ("": it can). Of one that goes meanwhile: nothing. Raises OSError
        when that can't be told now."""
        ...

    def at_home(self, generation: int) -> Sequence[tuple[int, int, int]]:
        """Return (uid, first, last) of what is at home there."""
        ...

    def fail(self, generation: int, reason: str) -> None:
        """Serve nothing more of a generation: what is at home there is lost."""
        ...


class WriterPort(Protocol):
    """A process of its own for segment and payload jobs (docs/internals/hosting.md, "The writer process"). Without one
    they run in threads."""

    async def run(self, lock_fd: int, task_status: Any) -> None:
        """Keep the process running until cancelled; `lock_fd` is the directory's lock, which it inherits. Started at
        once: nobody waits for the process."""
        ...

    async def write_segment(self, job: Any, entries: Sequence[Any]) -> Any:
        """Return a `log.segment_job.SegmentRunner`."""
        ...

    def status(self) -> dict[str, Any]:
        """Return its process id, restarts, jobs, and jobs set aside with their reasons."""
        ...


class PeersPort(Protocol):
    """The other nodes."""

    @property
    def nodes(self) -> frozenset[int]:
        """Nodes with an address, without this one."""
        ...

    def send(self, messages: Sequence[Message]) -> None:
        """Send a turn's messages of all groups."""
        ...

    def send_blob(
        self, node: int, kind: int, request: int, header: Mapping[str, Any], body: Sequence[Buffer] = ()
    ) -> bool:
        """Send one typed blob; return False when it was dropped."""
        ...

    def epoch_of(self, node: int) -> int:
        """Return the highest epoch seen of a peer; 0 before the first."""
        ...

    def digest_of(self, node: int) -> int:
        """Return what a peer's last renewal said of the hibernating groups it leads with this node; 0 before the
        first."""
        ...

    def vitals_of(self, node: int) -> Any:
        """Return what a peer's last renewal said of its disk (`engine.identity.Vitals`)."""
        ...

    def forget(self, node: int) -> None:
        """Believe whoever comes next under this number, whatever its data directory."""
        ...

    def status(self) -> Sequence[Any]:
        """Return a row a peer."""
        ...


class NoPeers:
    """A node alone: messages go nowhere."""

    nodes: frozenset[int] = frozenset()

    def send(self, messages: Sequence[Message]) -> None:
        """Drop them: a group of one member sends none that matter."""

    def send_blob(
        self, node: int, kind: int, request: int, header: Mapping[str, Any], body: Sequence[Buffer] = ()
    ) -> bool:
        """Return False: nobody is there."""
        return False

    def epoch_of(self, node: int) -> int:
        """Return 0: never seen."""
        return 0

    def digest_of(self, node: int) -> int:
        """Return 0: nothing said."""
        return 0

    def vitals_of(self, node: int) -> Any:
        """Return None: never asked."""
        raise AssertionError("a node alone has no peers")

    def forget(self, node: int) -> None:
        """Do nothing: nobody is known."""

    def status(self) -> Sequence[Any]:
        """Return no rows."""
        return ()

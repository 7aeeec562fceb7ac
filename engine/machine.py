"""The machine protocol: what a user writes to build something on logyard.

A machine is deterministic: it sees metadata and names of payloads, never payload bytes (law 5), no clock but
`context.timestamp`, and no randomness. It returns replies and effects; only the leader performs effects, and none is
needed for safety.
Called by `engine.host.applier`, always from one thread, in index order, one call an entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from logyard.payloads.reference import PayloadRange, PayloadRef, Position

from .entry import Frame

__all__ = [
    "Applied", "Batch", "BatchMachine", "Context", "Effect", "Frame", "Machine", "PayloadRange", "PayloadRef",
    "Position", "Reject", "Release", "Sections",
]  # fmt: skip

Sections: TypeAlias = Mapping[str, bytes]
"""A snapshot's parts by name; each is stored with a hash of its own."""


class Context(NamedTuple):
    """Where a command stands: `timestamp` is the leader's log time in milliseconds since 1970, `version` the machine
    version in force (not the newest this node has), `records` how many ordinals the whole entry has."""

    uid: int
    index: int  # type: ignore[assignment]  # tuple.index is not missed
    term: int
    timestamp: int
    version: int
    records: int = 0


class Release(NamedTuple):
    """Effect: the payloads from `first` up to, but without, `end` are dead from this index on."""

    first: Position
    end: Position


Effect: TypeAlias = Release


class Applied(NamedTuple):
    """What one command did."""

    reply: bytes
    effects: Sequence[Effect] = ()


class Batch(NamedTuple):
    """What one entry did: a reply for each frame, in order, and the effects of all."""

    replies: Sequence[bytes | Reject]
    effects: Sequence[Effect] = ()


class Reject(Exception):
    """A deterministic, committed refusal: it is the reply, the state is unchanged and the command's payload is
    released."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Machine(Protocol):
    """Required of every machine."""

    version: int

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        """Apply one command. Raise `Reject` for a refusal that is part of the machine's logic."""
        ...

    def snapshot(self) -> Sections:
        """A frozen view of the state."""
        ...

    def restore(self, sections: Sections) -> None:
        """Replace the state by a snapshot's."""
        ...

    def live_refs(self) -> Iterable[PayloadRange]:
        """Every payload the state still needs, as ranges."""
        ...


@runtime_checkable
class BatchMachine(Protocol):
    """A machine that takes a whole entry at once: no call per command on the hot path."""

    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        """Apply all frames of one entry; one reply a frame. Ordinals run over the frames in order."""
        ...

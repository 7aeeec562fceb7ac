"""The name of a payload, and ranges of names. Standard library only: the engine and machines import this, nothing
else of payloads."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """A record's place in a group: the Raft index of its entry and its ordinal within that entry. Ordered."""

    index: int  # type: ignore[assignment]  # tuple.index is not missed
    ordinal: int


class PayloadRef(NamedTuple):
    """The name of one payload: which group (uid), where (index, ordinal), written in which term, with what size and
    hash.

    `size` is in bytes; `hash` is the xxh3-128 of the unit that holds it (16 bytes).
    """

    uid: int
    index: int  # type: ignore[assignment]  # tuple.index is not missed
    ordinal: int
    term: int
    size: int
    hash: bytes


class PayloadRange(NamedTuple):
    """All payloads of a group from `first` up to, but without, `end`."""

    first: Position
    end: Position

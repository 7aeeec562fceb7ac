"""What is kept of damage: the row of a group that lost records, and the checkpoint of one that begins with nothing.

Invariant: what a member has promised, (term, vote) and its payload floor, is kept as far as it is known, whatever else
is given up. Plain data; the verbs are in `damage`.
"""

from __future__ import annotations

from typing import NamedTuple

import msgpack

from ..log import meta_rows
from ..log.recovered import Recovered
from ..raft.membership import Configuration
from ..replica.member import Member
from ..types import Spec

KINDS = (b"g", b"s", b"n", meta_rows.STORE, meta_rows.CHUNK, meta_rows.DAMAGED, meta_rows.DEPARTED)
"""Rows about one group that it can't do without."""


class Damaged(NamedTuple):
    """The row: why; whether the term or vote may be lost; the last WAL batch it is about; whether nothing of the group
    up to there is its log; whether the member has been mended since; the marks of what was damaged up to there (None:
    all there is), rising."""

    reason: str
    terms: bool
    through: int
    whole: bool
    sound: bool = False
    seen: tuple[int, ...] | None = None

    def pack(self) -> bytes:
        """The row's value."""
        return bytes(msgpack.packb(list(self)))

    @classmethod
    def unpack(cls, value: bytes) -> Damaged:
        """From a row. One of a version that knew no repair is a text; nothing is known of such a group."""
        try:
            found = cls(*msgpack.unpackb(value))
            return found if found.seen is None else found._replace(seen=tuple(found.seen))
        except Exception:
            return cls(value.decode("utf-8", "replace"), True, 0, True)


def blank(
    uid: int, state: meta_rows.StateRow | None, recovered: Recovered, member: Member | None = None
) -> meta_rows.StateRow:
    """A checkpoint that says nothing but the newest (term, vote), the highest floor and the last configuration that are
    known."""
    hard = [(state.term, state.vote)] if state is not None else []
    floors = [recovered.floor, state.floor if state is not None else 0]
    configuration = state.extra["configurations"][0][2] if state is not None and state.extra else b""
    if recovered.hard_state is not None:
        hard.append(recovered.hard_state[:2])
    if member is not None:
        hard.append((member.raft.term, member.raft.vote))
        floors += [member.floor, member.last_release]
        # One that is not committed may never be, and nothing in the log that comes would take it back.
        configuration = member.raft.base[1].encode()
    row = meta_rows.StateRow(uid, floor=max(floors))
    row.term, row.vote = max(hard, default=(0, 0))
    if configuration:
        row.extra = {"configurations": [[0, 0, configuration]]}
    return row


def configuration_of(spec: Spec, state: meta_rows.StateRow) -> Configuration:
    """The members, as far as a checkpoint knows them, or else as the group began."""
    found = state.extra.get("configurations")
    return Configuration.decode(found[0][2]) if found else Configuration(spec.voters)

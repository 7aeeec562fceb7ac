"""Which groups lost records here, and what is kept of that: the row of such a group, the checkpoint of one that begins
with nothing, and the judgement of what a replay met.

Invariant: what a member has promised, (term, vote) and its payload floor, is kept as far as it is known, whatever else
is given up. Pure; a start stores what it finds and has it mended (`engine.repair.log_repair`), `inspect` says it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

import msgpack

from ..log import meta_rows
from ..log.recovered import Recovered
from ..log.replay_result import Cut, ReplayResult
from ..raft.configuration import Configuration
from ..types import Spec

KINDS = (b"g", b"s", b"n", meta_rows.STORE, meta_rows.CHUNK, meta_rows.DAMAGED, meta_rows.DEPARTED)
"""Rows about one group that it can't do without."""
MARKS_MAX = 512
"""With more damage in the WAL than that, nothing of a group's log is kept rather than all of it told apart."""


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
        """Return the row's value."""
        return bytes(msgpack.packb(list(self)))

    @classmethod
    def unpack(cls, value: bytes) -> Damaged:
        """Read a row. One of a version that knew no repair is a text; nothing is known of such a group."""
        try:
            found = cls(*msgpack.unpackb(value))
            return found if found.seen is None else found._replace(seen=tuple(found.seen))
        except Exception:
            return cls(value.decode("utf-8", "replace"), True, 0, True)


def cuts_of(known: Mapping[int, Damaged]) -> dict[int, Cut]:
    """Return what a replay has to leave out by the rows of damaged groups."""
    return {
        uid: Cut(one.through, one.whole, None if one.seen is None else frozenset(one.seen))
        for uid, one in known.items()
    }


def judge(
    known: Mapping[int, Damaged],
    result: ReplayResult,
    hard_states: Container[int],
    uids: Iterable[int],
    lost: Iterable[bytes],
) -> dict[int, Damaged]:
    """Return all groups that are damaged now: by their rows `known`, by what replay met, by rows that are `lost` in
    both copies of the meta store. `uids` are those of all groups."""
    through = result.next_batch - 1
    found = {uid: one for uid, one in known.items() if not one.sound}
    named: dict[int, str] = {}
    marks: dict[int, set[int]] = {}
    anonymous = ""
    for one in result.damage:
        text = f"WAL file {one.file} is damaged at byte {one.offset}: {one.reason}"
        marks.setdefault(one.uid, set()).add(one.mark)
        if one.uid:
            named.setdefault(one.uid, text)
        else:
            anonymous = anonymous or text
    if anonymous:
        for uid in uids:
            if uid not in result.cleared:
                named.setdefault(uid, anonymous)
    for uid, text in named.items():
        before = found.get(uid)
        terms = uid not in result.sure or (before is not None and before.terms)
        seen = tuple(sorted(marks.get(0, set()) | marks.get(uid, set())))
        # What is behind an older damage would be left out together with it the next time.
        whole = uid in known or len(seen) > MARKS_MAX
        found[uid] = Damaged(text, terms, through, whole, seen=None if whole else seen)
    for uid, kinds in _lost_rows(lost).items():
        before = found.get(uid)
        # A checkpoint that is lost had the newest hard state unless the WAL has one.
        terms = (b"s" in kinds and uid not in hard_states) or bool({meta_rows.DAMAGED, meta_rows.DEPARTED} & kinds)
        text = "its rows in the meta store are damaged in both copies"
        found[uid] = Damaged(text, terms or (before is not None and before.terms), through, True)
    return found


def _lost_rows(lost: Iterable[bytes]) -> dict[int, set[bytes]]:
    """Return, by uid, the kinds of rows that verify in no copy. Every kind of row about one group ends with its uid."""
    found: dict[int, set[bytes]] = {}
    for key in lost:
        if key[:1] in KINDS:
            found.setdefault(int.from_bytes(key[-8:], "big"), set()).add(key[:1])
    return found


def blank(
    uid: int,
    state: meta_rows.StateRow | None,
    recovered: Recovered,
    promised: tuple[int, int] = (0, 0),
    floors: Iterable[int] = (),
    configuration: bytes = b"",
) -> meta_rows.StateRow:
    """Return a checkpoint that says nothing but the newest (term, vote), the highest floor and the last configuration
    that are known. `promised`, `floors` and `configuration` are of a member that runs: a configuration that is not
    committed may never be, and nothing in the log that comes would take it back."""
    hard = [promised]
    floor = max(recovered.floor, *floors, state.floor if state is not None else 0)
    if state is not None:
        hard.append((state.term, state.vote))
        if state.extra and not configuration:
            configuration = state.extra["configurations"][0][2]
    if recovered.hard_state is not None:
        hard.append(recovered.hard_state[:2])
    row = meta_rows.StateRow(uid, floor=floor)
    row.term, row.vote = max(hard)
    if configuration:
        row.extra = {"configurations": [[0, 0, configuration]]}
    return row


def configuration_of(spec: Spec, state: meta_rows.StateRow) -> Configuration:
    """Return the members, as far as a checkpoint knows them, or else as the group began."""
    found = state.extra.get("configurations")
    return Configuration.decode(found[0][2]) if found else Configuration(spec.voters)

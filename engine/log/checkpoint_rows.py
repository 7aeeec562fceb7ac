"""What the host keeps in the meta store, as rows: the one place that knows which field holds what.

A state row is a checkpoint: everything of a group that must survive when the WAL files that said it are recycled. It
is written before they go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgpack

from ..core import Core
from ..identity import Origin
from ..raft.configuration import Configuration
from ..replica.member import Member
from ..snapshot.format import Encoded, Snapshot
from ..types import Spec
from . import meta_rows

Put = tuple[bytes, bytes | None]


class Captured(NamedTuple):
    """A member, its snapshot, and that encoded. `keep_log`: a checkpoint, the log below it stays. `anew`: no chunk of
    the stored one counts."""

    member: Member
    snapshot: Snapshot
    encoded: Encoded
    keep_log: bool = False
    anew: bool = False


LIFE_COUNTS: Put = meta_rows.UNMET, None
"""Another node knows this life."""


def peer(node: int, origin: Origin) -> Put:
    """Return the row of another node's directory: which it had, in which epoch and start, and how many batches were
    durable there."""
    return meta_rows.peer_key(node), msgpack.packb(list(origin))


def group(spec: Spec, asleep: bool = False) -> Put:
    """Return the row of a group's definition; `asleep`: until somebody uses it, that is all there is of it."""
    configuration, extra = Configuration(spec.voters).encode(), {"asleep": True} if asleep else {}
    row = meta_rows.GroupRow(spec.uid, spec.name, spec.machine, spec.arguments, configuration, spec.created, extra)
    return row.put()


def state(member: Member, snapshot: Snapshot | None = None, asleep: Sequence[int] = (), keep_log: bool = False) -> Put:
    """Return the row of a group's checkpoint; `snapshot` is one that becomes durable in the same commit, `keep_log`:
    and the log below it is not free to go.

    `asleep`: the group may hibernate by this row: [leader, its node's epoch, next timer, start, end, snapshot bytes].
    """
    raft = member.raft
    log = raft.log
    row = meta_rows.StateRow(
        member.uid,
        raft.term,
        raft.vote,
        # A commit index above what is durable here is of no use to a restart (Ra ffe3016a).
        min(raft.commit, log.stable),
        snapshot.index if snapshot else member.snapshot_index,
        snapshot.term if snapshot else member.snapshot_term,
        member.floor,
        list(member.segments),
        list(log.runs),
    )
    row.extra = {
        "log": [log.snapshot_index, log.snapshot_term],
        "flushed": member.flushed,
        "configurations": _configurations(raft),
    }
    if member.ring:
        row.extra["ring"] = [list(run) for run in member.ring_runs]
    if asleep:
        row.extra["asleep"], row.extra["slept"] = list(asleep), member.log_time
    if member.compactable < row.snapshot_index and (keep_log or snapshot is None):
        row.extra["compactable"] = member.compactable
    return row.put()


def _configurations(raft: Core) -> list[list[object]]:
    """Return (index, term, configuration) of the one in force and of those after it; at a restart only what is still in
    the log counts."""
    index, base = raft.base
    found: list[list[object]] = [[index, 0, base.encode()]]
    found += [[at, raft.log.term(at) or 0, later.encode()] for at, later in raft.history]
    return found


def sealed_file(number: int, length: int) -> Put:
    """Return the row of a WAL file whose metadata is in a segment, and which is a home."""
    return meta_rows.FileRow("wal", number, {"length": length}).put()


def gone_file(number: int) -> Put:
    """Return the row of a WAL file that is no home any more. The row stays as the mark of how far files were flushed,
    until a later one replaces it."""
    return meta_rows.file_key("wal", number), None


def flushed(number: int) -> Put:
    """Return the row that says that files up to this one have their metadata in segments."""
    return meta_rows.FileRow("flushed", 0, {"file": number}).put()


def snapshot(uid: int, index: int, term: int, data: bytes) -> Put:
    """Return the row of a group's newest snapshot."""
    return meta_rows.SnapshotRow(uid, index, term, data).put()


def deleted(uid: int) -> list[Put]:
    """Return what removes all of a group's rows and remembers its uid. Its chunks are nobody's, and go at a start."""
    return [
        *_without(uid),
        (meta_rows.DEPARTED + meta_rows.KEY.pack(uid), None),
        (meta_rows.DELETED + meta_rows.KEY.pack(uid), b""),
    ]


def departed(uid: int, left: Sequence[int]) -> list[Put]:
    """Return what removes all of a group's rows but the promises of its replica."""
    return [*_without(uid), departed_row(uid, left)]


def departed_row(uid: int, left: Sequence[int]) -> Put:
    """Return what is kept of a replica that went: the fields of `Departed`."""
    return meta_rows.DEPARTED + meta_rows.KEY.pack(uid), msgpack.packb(list(left))


def _without(uid: int) -> list[Put]:
    return [
        (meta_rows.group_key(uid), None),
        (meta_rows.state_key(uid), None),
        (meta_rows.snapshot_key(uid), None),
        (meta_rows.DAMAGED + meta_rows.KEY.pack(uid), None),
        (meta_rows.intent_key(uid), None),
    ]


def damaged(uid: int, known: bytes | None) -> Put:
    """Return the row of a group that lost records: it takes no part until it is deleted or repaired. None: of that
    nothing is left."""
    return meta_rows.DAMAGED + meta_rows.KEY.pack(uid), known


def store_rows(pairs: Iterable[tuple[bytes, bytes | None]]) -> list[Put]:
    """Return the payload store's own rows."""
    return [(meta_rows.STORE + key, value) for key, value in pairs]

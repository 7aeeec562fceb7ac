"""What the third copy of a system group's snapshot is worth at a start: the newest that can be used is taken, and the
others are written anew.

Invariant: nothing is guessed. A file counts only while the group's checkpoint names a snapshot at all (who was deleted,
left or begins with nothing has none), only with all of its chunks, and only if the log begins at or below the index
after it; where no copy counts the row stays lost, and the group is mended by others or takes no part. Called by a
start before anything reads the rows, and by `logyard check` on a copy of the store.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from logyard.protocol.errors import Busy, Corrupt, LogyardError, WrongIdentity

from ..log.meta import MetaStore
from ..log.meta_rows import GroupRow, SnapshotRow, StateRow, chunk_key, group_key, snapshot_key, state_key
from ..snapshot import format as snapshot_format
from .rebuild import log_base

R = TypeVar("R", GroupRow, SnapshotRow, StateRow)


TAKEN, REWRITTEN, NOBODYS, USELESS = "taken", "rewritten", "nobodys", "useless"
"""The file is what counts now; the rows are; the file is removed; neither counts."""


class Finding(NamedTuple):
    """What is the matter with one group's copies; `kind` is one of the four."""

    uid: int
    kind: str
    message: str


def mend(meta: MetaStore) -> list[Finding]:
    """Let the newest copy that can be used of each snapshot that has a file be what all say. BLOCKING. Raises
    `WrongIdentity` for a file of a newer format, and as `MetaStore.commit` does."""
    found = [_judge(meta, uid) for uid in sorted(meta.manifests.uids)]
    return [one for one in found if one is not None]


def _judge(meta: MetaStore, uid: int) -> Finding | None:
    if group_key(uid) not in meta.lost and meta.get(group_key(uid)) is None:
        meta.drop_file(uid)
        return Finding(uid, NOBODYS, "there is no such group here")
    row, wrong = _row(meta, SnapshotRow, snapshot_key(uid)), ""
    kept = None
    try:
        kept = meta.manifests.load(uid)
        wrong = _useless(meta, kept)
    except (Busy, WrongIdentity):
        raise
    except LogyardError as error:
        wrong = f"{error}"
    if kept is not None and not wrong and (row is None or row.index < kept.index):
        meta.commit([kept.put()])
        meta.found_again(snapshot_key(uid))
        before = "in neither copy of the meta store" if row is None else f"at {row.index} in the meta store"
        return Finding(uid, TAKEN, f"its snapshot at {kept.index} is {before}; the file has it")
    if row is None:
        return Finding(uid, USELESS, wrong or "its checkpoint names no snapshot")
    if kept == row:
        return None
    meta.keep_thrice(uid)
    what = wrong or f"it has the snapshot at {kept.index if kept else 0}"
    return Finding(uid, REWRITTEN, f"{what}; the meta store has that at {row.index}")


def _row(meta: MetaStore, kind: type[R], key: bytes) -> R | None:
    """Return a row; None where there is none, or none that says anything."""
    try:
        value = meta.get(key)
        return None if value is None else kind.unpack(key, value)
    except Exception:  # a row that verifies may say anything
        return None


def _useless(meta: MetaStore, kept: SnapshotRow) -> str:
    """Return why a snapshot does not count; "" if it does."""
    uid = kept.uid
    state = _row(meta, StateRow, state_key(uid))
    if state is None or not state.snapshot_index:
        return "the checkpoint names no snapshot"
    base = log_base(state)[0]
    if base > kept.index:
        return f"it has the snapshot at {kept.index}, and the log begins above {base}"

    def load(name: bytes) -> bytes | None:
        try:
            return meta.get(chunk_key(uid, name))
        except Corrupt:
            return None

    try:
        snapshot = snapshot_format.decode(kept.data, uid, load)
    except WrongIdentity:
        raise
    except Exception as error:  # bytes that verify may say anything
        return f"{type(error).__name__}: {error}"
    return "" if (snapshot.index, snapshot.term) == (kept.index, kept.term) else "its row names another index"

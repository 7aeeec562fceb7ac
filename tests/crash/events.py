"""Disk calls as data: what `recorder` writes down at the disk door and `trace` reads from the kernel's side."""

from __future__ import annotations

from typing import NamedTuple

WRITE, SIZE, CREATE, DIRECTORY, RENAME, UNLINK, SYNC, SYNC_DIRECTORY, THROUGH, MARK = (
    "write", "size", "create", "directory", "rename", "unlink", "sync", "sync_directory", "through", "mark",
)  # fmt: skip


class Event(NamedTuple):
    """`path` is relative to the data directory. `offset`: of a write; of a SIZE the new length, at least (`data`
    empty) or exactly (`data` b"="). RENAME: `data` is the new path. SYNC covers what was asked for before event
    number `offset`. THROUGH: write number `offset` of that file (O_DSYNC) is durable. MARK: `data` is what the
    workload says of itself."""

    kind: str
    path: str
    offset: int = 0
    data: bytes = b""

"""The beginning of a process's life on a data directory: what it may believe of the disk, and who it is (fault D12).

Invariants: what a failed sync left in the page cache is never taken for what the disk has; the epoch is durable before
the first frame; a directory that the other nodes refuse is not started on. Called by `recovery`.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from logyard.protocol.errors import BadRequest, Outdated, WalFailed

from ..identity import Origin, plausible
from ..log import meta_rows
from ..log.meta import MetaStore
from .ending import MARK

if TYPE_CHECKING:
    from pathlib import Path

    from ..disk.door import Disk
    from .system import System

log = logging.getLogger(__name__)

NEWEST = 2
"""WAL files that the last process may have left a batch in whose sync failed: the current one, or the one it rolled
from."""
KINDS = (".wal", ".mdb", ".seg")


def revalidate(system: System) -> None:
    """Validate, before anything is read, what the page cache holds: the kernel calls pages clean whose sync failed, and
    reads them back as if the disk had them. The newest files of the log always, everything if the last process left the
    mark of a failed disk. Raises `WalFailed` where the disk still fails. BLOCKING."""
    disk, root = system.disk, system.path
    wal = root / "wal"
    names = disk.list_directory(str(wal)) if wal.is_dir() else []
    paths = [str(wal / name) for name in [name for name in names if name.endswith(".wal")][-NEWEST:]]
    if os.path.exists(root / MARK):
        log.warning("the last process here ended by a failed disk: everything is read anew from it")
        found = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
        paths = [path for path in found if path.endswith(KINDS)]
    try:
        for path in paths:
            disk.revalidate(path)
    except OSError as error:
        raise WalFailed(f"the disk of {root} fails: {error}") from error


def begin(system: System, meta: MetaStore) -> bool:
    """Begin a new epoch, which `recovered` stores; learn who this directory is, and who the others are. False when it
    is the directory's first life. What a release without proofs let anybody store is left out. Raises `Outdated` for
    one that the others refused. BLOCKING."""
    refused = meta.get(meta_rows.OUTDATED)
    if refused is not None:
        where = f"see {system.path} and docs/operating.md, 'A node that lost its data'"
        raise Outdated(system.node_id, f"{refused.decode()}; {where}")
    stored = meta.get(meta_rows.EPOCH)
    number = meta.get(meta_rows.DIRECTORY) or os.urandom(8)
    start = int.from_bytes(os.urandom(8), "little")
    system.epoch = int.from_bytes(stored or b"", "little") + 1
    system.origin = Origin(int.from_bytes(number, "little"), system.epoch, start, 0)
    known = meta_rows.peers(meta.scan(meta_rows.PEER))
    for node, origin in known.items():
        if not plausible(origin):
            log.warning("what was stored of node %d was never said by it: whoever proves to be it is believed", node)
    system.acquaintances.remember({node: origin for node, origin in known.items() if plausible(origin)})
    return stored is not None


def readmit(disk: Disk, path: Path) -> str:
    """Let a stopped directory that the others refused start again; return why they had refused it, or nothing. They
    judge anew at its next start: who did forget is refused again. Raises `DirectoryInUse`, `BadRequest`. BLOCKING."""
    if not (path / "meta").is_dir():
        raise BadRequest(f"{path} is no data directory")
    lock = disk.lock_directory(str(path))
    meta = MetaStore(disk, str(path / "meta"))
    try:
        meta.open(began=True)
        refused = meta.get(meta_rows.OUTDATED)
        if refused is not None:
            meta.commit([(meta_rows.OUTDATED, None)])
        return (refused or b"").decode()
    finally:
        meta.close()
        disk.close(lock)


def recovered(system: System, damaged: bool) -> None:
    """Store who this node is, as everything was read. Who lost batches knows it, and claims none: its groups are
    mended. BLOCKING."""
    origin = system.origin
    # The first commit, unless a group was found damaged: what was read of the store is mapped no more from here on.
    system.storage.books.meta.commit(
        [
            (meta_rows.EPOCH, origin.epoch.to_bytes(8, "little")),
            (meta_rows.DIRECTORY, origin.directory.to_bytes(8, "little")),
        ]
    )
    if not damaged:
        system.origin = system.origin._replace(written=system.wal.position[0])
    system.disk.unlink(str(system.path / MARK))

"""The beginning of a process's life on a data directory: what it may believe of the disk, and who it is (fault D12).

Invariants: what a failed sync left in the page cache is never taken for what the disk has; the epoch is durable before
the first frame; a directory that the other nodes refuse is not started on. Called by `open`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from logyard.protocol.errors import BadRequest, Outdated, WalFailed

from ..disk.door import Disk
from ..identity import Acquaintances, Origin, plausible
from ..log import meta_rows
from ..log.meta import MetaStore
from ..log.wal_files import wal_epochs

log = logging.getLogger(__name__)

MARK = "failed"
"""Name of the file that says that a process ended by a failed disk, and why."""
NEWEST = 2
"""WAL files that the last process may have left a batch in whose sync failed: the current one, or the one it rolled
from."""
KINDS = (".wal", ".mdb", ".seg", ".ring", ".manifest", "/bodies")
"""How the paths of files end that are read anew after a failed disk."""


def revalidate(disk: Disk, root: Path) -> None:
    """Read from the disk what the page cache may have made up, before anything is read: the kernel calls pages clean
    whose sync failed, and reads them back as if the disk had them. The newest files of the log always, everything if
    the last process left the mark of a failed disk. BLOCKING. Raises `WalFailed` where the disk still fails."""
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


class Incarnation:
    """Which life of which directory this process is, and what is known of the other nodes'. All zero before `begin`."""

    def __init__(self, node_id: int, cluster_id: str, disk: Disk, path: Path, meta: MetaStore) -> None:
        self.node_id = node_id
        self.cluster_id = cluster_id
        self.origin = Origin(0, 0, 0, 0)
        self.acquaintances = Acquaintances()
        self._claimed = meta_rows.ALL
        self._disk = disk
        self._path = path
        self._meta = meta

    @property
    def epoch(self) -> int:
        """Return the number of this life: one more than the last one's."""
        return self.origin.epoch

    def begin(self) -> int:
        """Open the meta store, and begin a new epoch, which `recovered` stores; return how many lives the directory has
        had. What a release without proofs let anybody store is left out. BLOCKING. Raises `WrongIdentity`, and
        `Outdated` for a directory that the others refused."""
        meta, wal = self._meta, str(self._path / "wal")
        # The log's first file is made after the first commit.
        meta.open(self.cluster_id, self.node_id, bool(wal_epochs(self._disk.list_directory(wal))))
        refused = meta.get(meta_rows.OUTDATED)
        if refused is not None:
            where = f"see {self._path} and docs/operating.md, 'A node that lost its data'"
            raise Outdated(self.node_id, f"{refused.decode()}; {where}")
        stored = meta.get(meta_rows.EPOCH)
        number = meta.get(meta_rows.DIRECTORY) or os.urandom(8)
        start = int.from_bytes(os.urandom(8), "little")
        epoch = int.from_bytes(stored or b"", "little") + 1
        self._claimed = meta_rows.claimed(meta.get(meta_rows.UNMET), epoch - 1)
        self.origin = Origin(int.from_bytes(number, "little"), epoch, start, 0)
        known = meta_rows.peers(meta.scan(meta_rows.PEER))
        for node, origin in known.items():
            if not plausible(origin):
                log.warning(
                    "what was stored of node %d was never said by it: whoever proves to be it is believed", node
                )
        self.acquaintances.remember({node: origin for node, origin in known.items() if plausible(origin)})
        return epoch - 1

    def recovered(self, written: int) -> None:
        """Make this life durable: everything was read. It claims to have `written` so many batches, without those of
        lives that no other node knew; who lost some knows it, and claims none: its groups are mended. BLOCKING."""
        origin = self.origin
        claim = min(written, self._claimed)
        # The first commit, unless a group was found damaged: what was read of the store is mapped no more from here on.
        self._meta.commit(
            [
                (meta_rows.EPOCH, origin.epoch.to_bytes(8, "little")),
                (meta_rows.DIRECTORY, origin.directory.to_bytes(8, "little")),
                (meta_rows.UNMET, meta_rows.unmet(origin.epoch, claim)),
            ]
        )
        self.origin = origin._replace(written=claim)
        self._disk.unlink(str(self._path / MARK))

    def claim(self, written: int) -> int:
        """Return how many of so many durable batches the others may be told: those of its start, until it is stored
        that one of them knows this life. What a copy of the directory writes while nobody hears it would otherwise make
        up for what it lacks of the life that was lost."""
        return written if self.acquaintances.counts else self.origin.written


def readmit(disk: Disk, path: Path) -> str:
    """Let a stopped directory that the others refused start again; return why they had refused it, or nothing. They
    judge anew at its next start: who did forget is refused again. BLOCKING. Raises `DirectoryInUse`, `BadRequest`."""
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

"""The third copy of the snapshots of system groups, beside the two environments of the meta store: a file a group.

Nobody above the catalogue and the groups like it could say what is in them, so the row that names their sections is in
one place more than those of other groups. Invariant: a file is written when both environments have the row, and removed
before they lose it, so none says what never was durable, nor speaks for a replica that went. What a start makes of it
is in `engine.recovery.manifests`. Called by `meta`, under its lock.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from logyard.protocol.errors import Corrupt, WrongIdentity

from ..disk.door import Disk, is_full, is_short, unreadable
from .meta_copies import HEADER_BYTES, holds
from .meta_rows import SnapshotRow, snapshot_key

FOLDER = "manifests"
SUFFIX = ".manifest"
HEAD = struct.Struct("<4sHH")
"""magic, format, 0; then the row, as it stands in the environments."""
MAGIC = b"LYMF"
FORMAT = 1


def uid_of(name: str) -> int:
    """Return the group that a file of this name is of; 0: it is not one of ours."""
    stem = name.removesuffix(SUFFIX)
    return int(stem, 16) if name != stem and len(stem) == 16 and not stem.strip("0123456789abcdef") else 0


class ManifestFiles:
    """The files of one directory, which is made with the first of them. `uids`: groups that have one, whatever it is
    worth."""

    __slots__ = ("uids", "_disk", "_directory", "_late")

    def __init__(self, disk: Disk, directory: str) -> None:
        self.uids: set[int] = set()
        self._disk = disk
        self._directory = directory
        # Rows that there was no room for: they are written with the next.
        self._late: dict[int, bytes] = {}

    @property
    def is_used(self) -> bool:
        """Whether there is, or will be, any file."""
        return bool(self.uids or self._late)

    def path(self, uid: int) -> str:
        """Return where a group's file is."""
        return os.path.join(self._directory, f"{uid:016x}{SUFFIX}")

    def scan(self) -> None:
        """Look which files there are; remove what is unfinished."""
        self.uids.clear()
        if not os.path.exists(self._directory):
            return
        for name in self._disk.list_directory(self._directory):
            if name.endswith(".tmp"):
                self._disk.unlink(os.path.join(self._directory, name))
            elif uid := uid_of(name):
                self.uids.add(uid)

    def load(self, uid: int) -> SnapshotRow:
        """Return the row that a group's file holds. Raises `Corrupt`, or `WrongIdentity` for a newer format."""
        path, key = self.path(uid), snapshot_key(uid)
        try:
            fd = self._disk.open_file(path)
            try:
                data = self._disk.read(fd, self._disk.size(fd), 0)
            finally:
                self._disk.close(fd)
        except OSError as error:
            raise unreadable(path, 0, "a manifest", error) from error
        magic, version, _ = HEAD.unpack_from(data) if len(data) >= HEAD.size else (b"", 0, 0)
        raw = data[HEAD.size :]
        if magic != MAGIC or version < 1:
            raise Corrupt(path, 0, MAGIC, magic)
        if version > FORMAT:
            raise WrongIdentity(f"{path} has format {version}; this logyard reads up to {FORMAT}: update it")
        if not holds(key, raw):
            raise Corrupt(path, HEAD.size, "a row that its checksum fits", f"{len(raw)} bytes")
        return SnapshotRow.unpack(key, raw[HEADER_BYTES:])

    def store(self, raws: Iterable[tuple[int, bytes]] = ()) -> None:
        """Write the rows of groups, and those that there was no room for before. Where there is none now, the other two
        copies have to do for a while. Raises `OSError` for a disk that fails."""
        self._late.update(raws)
        for uid, raw in list(self._late.items()):
            try:
                if not self.uids:
                    self._disk.make_directory(self._directory)
                self._disk.write_file(self.path(uid), [HEAD.pack(MAGIC, FORMAT, 0), raw])
            except OSError as error:
                if not (is_full(error) or is_short(error)):
                    raise
                return
            self.uids.add(uid)
            del self._late[uid]

    def remove(self, uids: Iterable[int]) -> None:
        """Remove the files of groups, durably. Raises `OSError`."""
        gone = [uid for uid in uids if uid in self.uids or uid in self._late]
        for uid in gone:
            self._late.pop(uid, None)
            self._disk.unlink(self.path(uid))
        if gone and self.uids:
            self._disk.sync_directory(self._directory)
        self.uids.difference_update(gone)

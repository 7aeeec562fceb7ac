"""The meta store: two LMDB environments that both hold every row. What is small and must survive without the WAL lives
here.

Invariant: `commit` returns after both environments have synced it; each row carries the number of its commit and an
xxh3 over key and value, so that at open a row that is bad or old in one environment is taken from the other. Each
environment is entered in a journal while it is scanned: one that kills the process twice (a page the disk can't read)
is set aside and refilled from its twin. Snapshots of system groups are in a file as well (`manifest_files`). Called by
the host: reads from any thread, commits from one at a time.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple, TypeVar

import lmdb
import msgpack

from logyard.protocol.errors import (
    SHORT,
    SHORT_RETRY_S,
    SHORTAGE,
    Busy,
    Corrupt,
    LogyardError,
    NoSpace,
    WalFailed,
    WrongIdentity,
)

from ..disk.door import Disk, is_full, is_short
from .manifest_files import FOLDER, ManifestFiles
from .meta_copies import HEADER_BYTES, Fixes, commit_of, holds, judge, seal
from .meta_rows import FileRow, GroupRow, SnapshotRow, StateRow, snapshot_key

__all__ = ["HEADER_BYTES", "FileRow", "GroupRow", "Identity", "MetaStore", "SnapshotRow", "StateRow"]

T = TypeVar("T")

FORMAT = 2
"""The newest that is read. 2: logs of system groups are in rings."""
FIRST_FORMAT = 1
"""Of a new store, so that an older logyard may be gone back to until something needs more."""
IDENTITY = b"\x00identity"
COMMIT = b"\x00commit"
FULL_BELOW_BYTES = 1 << 20
"""With less free space an I/O error of LMDB is taken for that of a full disk."""
SCAN_ROWS = 1024
MAP_BYTES = 16 << 30
"""Address space, not disk: a map is never grown while it is open."""
NAMES = ("a", "b")
JOURNAL = "scanning"


class Identity(NamedTuple):
    """Whose directory this is."""

    cluster: str
    node: int
    format: int


class Verified(NamedTuple):
    """Where to go on (None: that was the end), bytes read, (row, environment) written over with the twin's, and rows
    that verify in neither."""

    next: bytes | None
    size: int
    mended: list[tuple[bytes, str]]
    lost: list[bytes]


class MetaStore:
    """Keys and values are bytes; typed rows stand in `meta_rows`. `open` comes first."""

    __slots__ = ("_disk", "_directory", "_environments", "_writable", "_commit", "_lock", "_map_bytes", "_owed",
                 "identity", "repaired", "lost", "manifests")  # fmt: skip

    def __init__(self, disk: Disk, directory: str, map_bytes: int = MAP_BYTES) -> None:
        self._disk = disk
        self._directory = directory
        self._map_bytes = map_bytes
        self._environments: list[lmdb.Environment] = []
        self._writable = False
        self._commit = 0
        # The one commit that the first environment has and the second refused: it comes before the next one.
        self._owed: dict[bytes, bytes | None] = {}
        self._lock = threading.Lock()
        self.identity: Identity | None = None
        self.repaired = 0
        """Rows that `open` took from the twin."""
        self.lost: list[bytes] = []
        """Keys that verify in neither environment: their groups need repair."""
        self.manifests = ManifestFiles(disk, os.path.join(directory, FOLDER))
        """The third copies there are."""

    def open(self, cluster: str = "", node: int = 0, began: bool = False) -> None:
        """Open or create; compare and repair. `cluster` and `node` are written to a new store, and must match an old
        one's; empty `cluster` and `node` 0 take what there is. `began`: there must be one, in either copy.

        Raises `WrongIdentity` for another node or a newer format, before any row is touched; `Corrupt`."""
        disk = self._disk
        disk.make_directory(self._directory)
        self._writable = False
        for name in NAMES:
            path = os.path.join(self._directory, name)
            # One at a time: a scan that kills the process must not be held against the twin as well.
            if os.path.exists(os.path.join(path, "data.mdb")):
                if self._killed_twice(name):
                    self._set_aside(path)
                else:
                    self._refuse(path, cluster, node)
            disk.make_directory(path)
            try:
                environment = self._scan(path)
            except (lmdb.Error, OSError) as error:
                if is_short(error) or getattr(error, "code", 0) in SHORT:
                    raise Busy(SHORTAGE, SHORT_RETRY_S) from error
                if is_full(error) or isinstance(error, lmdb.DiskError):
                    # Nothing is wrong with it.
                    raise NoSpace(f"the disk of the meta store is full: {error}") from error
                self._set_aside(path)
                disk.make_directory(path)
                environment = self._scan(path)
            self._environments.append(environment)
            disk.unlink(self._journal(name))
        disk.sync_directory(self._directory)
        self.manifests.scan()
        self._reconcile()
        if began and not self._commit:
            # The node would begin anew over what its files hold, and forget what it promised.
            want = "one of two copies of the meta store; this node has to be replaced"
            raise Corrupt(self._directory, 0, want, "neither")
        stored = self.get(IDENTITY)
        if stored is None:
            self.identity = Identity(cluster, node, FIRST_FORMAT)
            self.commit([(IDENTITY, msgpack.packb(list(self.identity)))])
        else:
            self.identity = Identity(*msgpack.unpackb(stored))

    def close(self) -> None:
        """Close both environments."""
        environments, self._environments = self._environments, []
        for environment in environments:
            environment.close()

    def _open(self, path: str, readonly: bool = False) -> lmdb.Environment:
        return lmdb.open(
            path, map_size=self._map_bytes, max_dbs=0, mode=0o600, readahead=False, readonly=readonly, lock=not readonly
        )

    def _refuse(self, path: str, cluster: str, node: int) -> None:
        """Read the identity without a lock file or a write; refuse what is not ours."""
        try:
            environment = self._open(path, readonly=True)
            try:
                if self._is_cut(environment, path):
                    return
                with environment.begin() as transaction:
                    raw = transaction.get(IDENTITY)
            finally:
                environment.close()
        except lmdb.Error:
            return
        if raw is None or not holds(IDENTITY, raw):
            return
        found = Identity(*msgpack.unpackb(raw[HEADER_BYTES:])[:3])
        wanted = ""
        if found.format > FORMAT:
            wanted = f"has format {found.format}, newer than {FORMAT}; use a newer logyard"
        elif (cluster and found.cluster != cluster) or (node and found.node != node):
            wanted = f"belongs to node {found.node} of cluster {found.cluster!r}, not to node {node} of {cluster!r}"
        if wanted:
            for name in NAMES:
                self._disk.unlink(self._journal(name))
            raise WrongIdentity(f"{self._directory} {wanted}")

    def _is_cut(self, environment: lmdb.Environment, path: str) -> bool:
        """Return whether a file is shorter than it says: touching what is not there would kill the process."""
        fd = self._disk.open_file(os.path.join(path, "data.mdb"))
        try:
            return self._disk.size(fd) < (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        finally:
            self._disk.close(fd)

    def _journal(self, name: str) -> str:
        return os.path.join(self._directory, f"{JOURNAL}-{name}")

    def _killed_twice(self, name: str) -> bool:
        """Enter the scan in the journal. True when the last two starts died in this scan: one may be a kill."""
        path = self._journal(name)
        try:
            with open(path, "rb") as journal:
                before = journal.read().decode("ascii", "replace").strip()
        except FileNotFoundError:
            before = "0"
        deaths = int(before) if before.isdigit() else 0
        try:
            self._disk.write_file(path, [str(1 if deaths >= 2 else deaths + 1).encode()])
        except OSError as error:
            # On a full disk the scan goes unnoted: a start that is refused would not find out anything, either.
            if not is_full(error):
                raise
        return deaths >= 2

    def _set_aside(self, path: str) -> None:
        number = 0
        while os.path.exists(aside := f"{path}.bad-{number}"):
            number += 1
        if os.path.exists(path):
            self._disk.rename(path, aside)
            self._disk.sync_directory(self._directory)

    def _scan(self, path: str) -> lmdb.Environment:
        """Open an environment and read every row, so that a bad page shows now and not in the middle of the work."""
        if not os.path.exists(os.path.join(path, "data.mdb")):
            self._open(path).close()
        # LMDB syncs the file, not its name; also when it was there: its maker may have died before this.
        self._disk.sync_directory(path)
        environment = lmdb.open(path, map_size=self._map_bytes, max_dbs=0, readahead=False, readonly=True)
        try:
            environment.reader_check()
            if self._is_cut(environment, path):
                raise OSError(errno.EIO, "it was cut")
            with environment.begin() as transaction:
                deque(transaction.cursor(), maxlen=0)
        except BaseException:
            environment.close()
            raise
        return environment

    def _open_for_writing(self) -> None:
        """Open the store, which until its first commit is open for reading only, for writing. Opened anew it has mapped
        nothing, so what recovery read of it does not count as this process's memory. Not beside a read."""
        if self._writable:
            return
        for number, name in enumerate(NAMES):
            self._environments[number].close()
            self._environments[number] = self._open(os.path.join(self._directory, name))
        self._writable = True

    def _reconcile(self) -> None:
        """Give both environments the better copy of each row, in one commit each. Both are read in key order, side by
        side, so that this takes no memory."""
        fixes: Fixes = ([], [])
        with self._environments[0].begin() as first, self._environments[1].begin() as second:
            newest = [0, 0]
            for side, transaction in enumerate((first, second)):
                raw = transaction.get(COMMIT)
                if raw is not None and holds(COMMIT, raw):
                    newest[side] = commit_of(raw)
            self._commit = max(newest)
            rows, others = iter(first.cursor()), iter(second.cursor())
            one, two = next(rows, None), next(others, None)
            while one is not None or two is not None:
                if one == two:
                    assert one is not None
                    if not holds(*one):
                        self.lost.append(one[0])
                    one, two = next(rows, None), next(others, None)
                elif two is None or (one is not None and one[0] < two[0]):
                    assert one is not None
                    self._fix(one[0], one[1], None, newest, fixes)
                    one = next(rows, None)
                elif one is None or two[0] < one[0]:
                    self._fix(two[0], None, two[1], newest, fixes)
                    two = next(others, None)
                else:
                    self._fix(one[0], one[1], two[1], newest, fixes)
                    one, two = next(rows, None), next(others, None)
        for number, changes in enumerate(fixes):
            if changes:
                self._open_for_writing()
                self.repaired += len(changes)
                self._apply(self._environments[number], changes)

    def _fix(self, key: bytes, one: bytes | None, two: bytes | None, newest: list[int], fixes: Fixes) -> None:
        judged = judge(key, one, two, newest)
        if judged is None:
            self.lost.append(key)
        else:
            fixes[judged[0]].append((key, judged[1]))

    def _apply(self, environment: lmdb.Environment, changes: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Apply the changes as one durable transaction. Raises `NoSpace` when the disk or the map is full; nothing of
        it is then kept; and `WalFailed` for every other failure, after which nobody knows what the pages in memory are
        worth (law 7)."""
        try:
            with environment.begin(write=True) as transaction:
                cursor = transaction.cursor()
                cursor.putmulti([(key, raw) for key, raw in changes if raw is not None])
                for key, raw in changes:
                    if raw is None:
                        transaction.delete(key)
        except lmdb.MapFullError as error:
            raise NoSpace(f"the meta store's map of {self._map_bytes} bytes is full") from error
        except (lmdb.Error, OSError) as error:
            code = getattr(error, "errno", 0) or getattr(error, "code", 0)
            if code in SHORT or isinstance(error, lmdb.MemoryError):
                raise NoSpace(f"no room for the meta store: {error}") from error
            if code in (errno.ENOSPC, errno.EDQUOT) or "No space" in str(error) or "quota" in str(error):
                raise NoSpace("the disk of the meta store is full") from error
            # A write that the kernel cuts short is an I/O error to LMDB, full disk or not.
            if isinstance(error, lmdb.Error) and self._disk.free_bytes(self._directory) < FULL_BELOW_BYTES:
                raise NoSpace(f"the disk of the meta store is full: {error}") from error
            raise WalFailed(
                f"the meta store {self._directory}: {error}; this node acknowledges nothing more"
            ) from error

    def commit(self, puts: Sequence[tuple[bytes, bytes | None]], thrice: Collection[int] = ()) -> None:
        """Write rows (None: delete) to both environments, atomically in each and durable on return; the snapshots of
        the groups in `thrice` to their files, too.

        The last one of a key wins. After `NoSpace` nothing was taken. Where the second environment has no room, and the
        first can't give the rows back, they are stored: in one copy, until the next commit.
        """
        with self._lock:
            if not self._environments:
                raise LogyardError("the meta store is closed")
            number = self._commit + 1
            changes: dict[bytes, bytes | None] = {
                key: None if value is None else seal(key, value, number) for key, value in puts
            }
            changes[COMMIT] = seal(COMMIT, b"", number)
            self._remove_files(changes)
            self._open_for_writing()
            first, second = self._environments
            if self._owed:
                self._apply(second, sorted(self._owed.items()))
                self._owed.clear()
            rows = sorted(changes.items())
            self._apply(first, rows)
            try:
                self._apply(second, rows)
            except NoSpace:
                if self._take_back(changes):
                    raise
                self._owed.update(changes)
            self._commit = number
            self._store_files([(uid, raw) for uid in thrice if (raw := changes.get(snapshot_key(uid))) is not None])

    def _take_back(self, changes: Mapping[bytes, bytes | None]) -> bool:
        """Give the first environment what the second one has, which had no room for a commit: a start on a full disk
        can't make up for what differs. Return whether there was room for that."""
        first, second = self._environments
        with second.begin() as transaction:
            before = [(key, transaction.get(key)) for key in sorted(changes)]
        try:
            self._apply(first, before)
        except NoSpace:
            return False
        return True

    def raised(self, number: int) -> list[tuple[bytes, bytes]]:
        """Return what says that the directory is of this format at least; nothing where it says so."""
        identity = self.identity
        assert identity is not None and number <= FORMAT
        if identity.format >= number:
            return []
        return [(IDENTITY, msgpack.packb(list(identity._replace(format=number))))]

    def note_format(self) -> None:
        """Read again of which format the directory is."""
        self.identity = Identity(*msgpack.unpackb(self.get(IDENTITY) or b""))

    def _remove_files(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Remove the files of snapshots that go. Raises `NoSpace` when nothing was done, and `WalFailed`."""
        if not self.manifests.is_used:
            return
        try:
            self.manifests.remove(
                int.from_bytes(key[1:], "big")
                for key, raw in changes.items()
                if raw is None and key[:1] == SnapshotRow.PREFIX
            )
        except OSError as error:
            if is_short(error) or is_full(error):
                raise NoSpace(f"a snapshot's file can't be removed: {error}") from error
            raise self._file_failed(error) from error

    def _store_files(self, raws: Sequence[tuple[int, bytes]]) -> None:
        try:
            self.manifests.store(raws)
        except OSError as error:
            raise self._file_failed(error) from error

    def _file_failed(self, error: OSError) -> WalFailed:
        return WalFailed(f"the meta store {self._directory}: {error}; this node acknowledges nothing more")

    def keep_thrice(self, uid: int) -> None:
        """Write the file of a group's snapshot, as it stands in the environments. BLOCKING."""
        with self._lock:
            key = snapshot_key(uid)
            for environment in self._environments:
                with environment.begin() as transaction:
                    raw = transaction.get(key)
                if raw is not None and holds(key, raw):
                    self._store_files([(uid, bytes(raw))])
                    return

    def drop_file(self, uid: int) -> None:
        """Remove the file of a group that is not here. BLOCKING. Raises as `commit`."""
        with self._lock:
            self._remove_files({snapshot_key(uid): None})

    def found_again(self, key: bytes) -> None:
        """Take note that a row which verified in neither environment was stored anew."""
        self.lost = [one for one in self.lost if one != key]

    def verify(self, start: bytes, count: int) -> Verified:
        """Compare both copies of about `count` rows from key `start` on, and write the better one over the other.
        BLOCKING; commits wait. Raises as `commit`, and `Corrupt` where an environment can't be read."""
        with self._lock:
            if not self._environments:
                raise LogyardError("the meta store is closed")
            sides: list[dict[bytes, bytes]] = []
            try:
                for environment in self._environments:
                    with environment.begin() as transaction, transaction.cursor() as cursor:
                        sides.append(dict(islice(cursor, count)) if cursor.set_range(start) else {})
            except lmdb.Error as error:
                raise Corrupt(self._directory, 0, "an environment that can be read", error) from error
            one, two = sides
            # Up to the first of the two ends, both copies were read.
            ends = [max(side) for side in sides if len(side) == count]
            end = min(ends, default=None)
            keys = sorted(key for key in one.keys() | two.keys() if end is None or key <= end)
            size = sum(len(key) + len(side.get(key, b"")) for key in keys for side in sides)
            fixes: Fixes = ([], [])
            lost: list[bytes] = []
            for key in keys:
                good = one.get(key)
                if key in self._owed or (good is not None and good == two.get(key) and holds(key, good)):
                    continue
                judged = judge(key, good, two.get(key), (self._commit, self._commit))
                if judged is None:
                    lost.append(key)
                else:
                    fixes[judged[0]].append((key, judged[1]))
            for number, changes in enumerate(fixes):
                if changes:
                    self._open_for_writing()
                    self.repaired += len(changes)
                    self._apply(self._environments[number], changes)
            mended = [(key, NAMES[number]) for number, changes in enumerate(fixes) for key, _ in changes]
            if not start:
                mended += [(key, FOLDER) for key in self._verify_files()]
            return Verified(None if end is None else end + b"\0", size, mended, lost)

    def _verify_files(self) -> Iterator[bytes]:
        """Write the files anew that do not say what both environments do; yield the keys of their rows."""
        for uid in sorted(self.manifests.uids):
            key, raws = snapshot_key(uid), []
            for environment in self._environments:
                with environment.begin() as transaction:
                    raws.append(bytes(transaction.get(key) or b""))
            if raws[0] != raws[1] or not holds(key, raws[0]):
                # The walk over the rows says so.
                continue
            try:
                if self.manifests.load(uid) == SnapshotRow.unpack(key, raws[0][HEADER_BYTES:]):
                    continue
            except Busy:
                continue
            except LogyardError:
                pass
            self._store_files([(uid, raws[0])])
            yield key

    def get(self, key: bytes) -> bytes | None:
        """Return a row's value, or None. Raises `Corrupt` when neither copy verifies."""
        bad, failed = False, 0
        for environment in self._environments:
            try:
                with environment.begin() as transaction:
                    raw = transaction.get(key)
            except lmdb.Error:
                # A damaged page: the twin is all there is.
                failed += 1
                continue
            if raw is None and not bad:
                return None
            if raw is not None and holds(key, raw):
                return bytes(raw[HEADER_BYTES:])
            bad = bad or raw is not None
        if bad or failed:
            raise Corrupt(self._directory, 0, f"row {key!r}", "two bad copies")
        return None

    def keys(self, prefix: bytes) -> list[bytes]:
        """Return the keys that start with `prefix`, in order; their rows are not read. Raises `Corrupt`."""

        def read(cursor: lmdb.Cursor[bytes]) -> list[bytes]:
            there = cursor.set_range(prefix)
            return list(takewhile(lambda key: key.startswith(prefix), cursor.iternext(True, False))) if there else []

        return self._either(read)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield rows whose keys start with `prefix`, in key order; rows lost in both copies are left out (`lost` names
        them). Raises `Corrupt`.

        They are read in portions: no read transaction outlives one, which would let the file grow.
        """
        start: bytes | None = prefix
        while start is not None:
            at = start

            def read(cursor: lmdb.Cursor[bytes], at: bytes = at) -> list[tuple[bytes, bytes]]:
                rows = islice(cursor, SCAN_ROWS) if cursor.set_range(at) else ()
                return [pair for pair in rows if pair[0].startswith(prefix)]

            found = self._either(read)
            start = found[-1][0] + b"\0" if len(found) == SCAN_ROWS else None
            yield from self._verified(found)

    def _either(self, read: Callable[[lmdb.Cursor[bytes]], list[T]]) -> list[T]:
        """Return what the first environment says, or, where a page of it is damaged, its twin."""
        failed: object = "nothing is open"
        for environment in self._environments:
            try:
                with environment.begin() as transaction, transaction.cursor() as cursor:
                    return read(cursor)
            except lmdb.Error as error:
                failed = error
        raise Corrupt(self._directory, 0, "an environment that can be read", failed)

    def _verified(self, found: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        for key, raw in found:
            if holds(key, raw):
                yield key, raw[HEADER_BYTES:]
                continue
            try:
                value = self.get(key)
            except Corrupt:
                continue
            if value is not None:
                yield key, value

    def files(self) -> list[str]:
        """Return the environments' data files."""
        return [os.path.join(self._directory, name, "data.mdb") for name in NAMES]

    def info(self) -> dict[str, Any]:
        """Return rows, commit number and bytes on disk of each environment, for status and metrics."""
        sizes = [os.path.getsize(path) for path in self.files()]
        return {"rows": int(self._environments[0].stat()["entries"]), "commit": self._commit, "bytes": sizes}


def read_environment(path: str) -> tuple[dict[bytes, bytes], int]:
    """Return all raw rows of one environment, and how many it says it has; leaves no trace. For the offline check.
    Raises `Corrupt`, and `Busy` for want of memory or descriptors."""
    found: dict[bytes, bytes] = {}
    try:
        environment = lmdb.open(
            path, map_size=MAP_BYTES, max_dbs=0, readonly=True, lock=False, create=False, readahead=False
        )
        with environment, environment.begin() as transaction:
            # A damaged tree can lead in a circle; a whole one has no more rows than it says.
            most = int(environment.stat()["entries"])
            for key, raw in transaction.cursor():
                found[key] = raw
                if len(found) > most:
                    raise Corrupt(path, 0, f"{most} rows", "more")
    except lmdb.Error as error:
        if isinstance(error, lmdb.MemoryError) or getattr(error, "code", 0) in SHORT:
            raise Busy(SHORTAGE, SHORT_RETRY_S) from error
        raise Corrupt(path, 0, "an environment that can be read", error) from error
    return found, most


def fill_environment(path: str, rows: dict[bytes, bytes]) -> None:
    """Write a fresh environment with these raw rows, not synced: the check's own copy, in a temporary directory.
    Raises `NoSpace`."""
    os.mkdir(path, 0o700)
    try:
        environment = lmdb.open(path, map_size=MAP_BYTES, max_dbs=0, sync=False)
        with environment, environment.begin(write=True) as transaction:
            transaction.cursor().putmulti(sorted(rows.items()))
    except lmdb.BadValsizeError:
        raise
    except lmdb.Error as error:
        # It is new, so whatever is wrong is wrong with the place.
        raise NoSpace(f"no room for a copy of the rows in {os.path.dirname(path)} (TMPDIR): {error}") from error

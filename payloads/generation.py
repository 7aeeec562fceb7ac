"""One generation: a bounded LMDB environment of payload rows. The only place that opens payload environments (law
12).

Invariants: the map never grows and is sealed before it is full; rows are written in transactions of bounded size
together with their ledger, the statistics and the job's position, so that a crash leaves whole entries only and a
redone job continues; every read verifies; no read transaction outlives a call or a chunk. Called by `catalog`,
`store` and `compaction`; one writer at a time, readers from any thread.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterable, Iterator

import lmdb

from logyard.protocol.errors import (
    SHORT,
    FormatNewer,
    GenerationFailed,
    GenerationUnfinished,
    PayloadCorrupt,
    PayloadMissing,
    StoreFull,
    StoreShort,
)

from . import ends, layout
from .bodies import Bodies, BodiesDoor, Unwritten
from .journal import Journal
from .layout import KEY, SourceRow, StoredEntry
from .ledger import Columns
from .measuring import Measured, Measuring, check_file
from .writing import GenerationConfig, JobState, Statistics, Step, WriteReport, Writing, quiet

LOCK_BYTES = 64 * 1024
"""More than LMDB uses for 64 readers."""
HALF_MADE = ".new"
"""Ends the name of a generation that is being created."""
_HEADER = struct.Struct("<IIQQQ")
"""format, reserved, generation, map bytes, highest run given out before this generation."""
_CHUNK_BYTES = 1 << 20
_CHUNK_ROWS = 512


class Generation:
    """Directory `gen-<number>`. The constructor does no I/O; one of `create`, `open_writer`, `open_reader` makes it
    usable."""

    __slots__ = (
        "path", "number", "config", "writable", "form", "_env", "_journal", "_slot", "_lock", "_inside", "_closing",
        "_door", "_bodies",
    )  # fmt: skip

    def __init__(
        self,
        path: str,
        number: int,
        config: GenerationConfig,
        journal: Journal | None = None,
        door: BodiesDoor | None = None,
    ) -> None:
        self.path = path
        self.number = number
        self.config = config
        self.writable = False
        # Of an existing one: what its header says.
        self.form = layout.BESIDE if config.beside and door is not None else layout.FORMAT
        self._door = door
        self._bodies = Bodies(path)
        self._env: lmdb.Environment | None = None
        self._journal = journal
        self._slot = -1
        self._lock = threading.Lock()
        self._inside = 0
        self._closing = False

    # Opening and closing

    @property
    def sealed(self) -> bool:
        """Nothing will be written here any more. A file, not a row: it needs no room in the map."""
        return os.path.exists(os.path.join(self.path, "sealed"))

    def create(self, base_run: int, sync_directory: Callable[[str], object]) -> None:
        """Create an empty environment, durable with its name: it has it only when it is whole, so that what a crash
        left of one is not taken for a damaged one. A half-made one is replaced."""
        path, self.path = self.path, self.path + HALF_MADE
        try:
            for half_made in (self.path, path):
                if os.path.isdir(half_made):
                    shutil.rmtree(half_made)
            os.makedirs(self.path, mode=0o700)
            self._open(writable=True, lock=True)
            key = layout.own_key(layout.HEADER)
            body = _HEADER.pack(self.form, 0, self.number, self.config.map_bytes, base_run)
            try:
                with self._writing() as txn:
                    txn.put(key, layout.wrap(key, body))
                    Statistics(0, 0, 0, base_run, 0).put(txn)
                    if self.form >= layout.BESIDE:
                        ends.put_end(txn, 0)
                if self.form >= layout.BESIDE:
                    self._open_bodies(create=True)
                sync_directory(self.path)
                os.rename(self.path, path)
                self._bodies.moved(path)
            except BaseException as error:
                # Whoever tries again opens it anew, and a path is open once in a process.
                self.close()
                if isinstance(error, lmdb.Error):
                    raise self._failure(error) from error
                raise
        finally:
            self.path = path
        sync_directory(os.path.dirname(path))

    def open_writer(self) -> None:
        """Open for writing and reading; readers left over from killed processes are cleared."""
        assert not self.sealed, "a sealed generation is never written"
        self._open(writable=True, lock=True)
        self._check_header()

    def open_reader(self) -> None:
        """Open read-only: with LMDB's lock while another process may write, without it once sealed."""
        self._open(writable=False, lock=not self.sealed)
        self._check_header()

    def _claim_lock_file(self) -> None:
        """Allocate the lock file: LMDB maps it and writes to it, which on a full disk is a signal that kills; here it
        is an error."""
        try:
            fd = os.open(os.path.join(self.path, "lock.mdb"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in SHORT:
                raise StoreShort(f"{self.path}: {error}") from error
            raise
        try:
            os.posix_fallocate(fd, 0, LOCK_BYTES)
        except OSError as error:
            raise StoreFull(f"{self.path}: the disk is full: {error}") from error
        finally:
            os.close(fd)

    def _open(self, *, writable: bool, lock: bool) -> None:
        assert self._env is None, "open already"
        data = os.path.join(self.path, "data.mdb")
        if _is_there(data):
            check_file(data)
        elif not writable:
            if os.path.isdir(self.path) and not os.path.exists(os.path.join(self.path, "sealed")):
                raise GenerationUnfinished(self.path, "it has no file: its creation did not finish")
            raise GenerationFailed(data, "it is not there")
        if writable and lock:
            self._claim_lock_file()
        if self._journal is not None:
            try:
                self._slot = self._journal.enter(self.number)
            except OSError as error:
                raise self._failure(error) from error
        try:
            self._env = lmdb.open(
                self.path, map_size=self.config.map_bytes, readonly=not writable, lock=lock, create=writable,
                max_dbs=0, mode=0o600, max_readers=64,
            )  # fmt: skip
            if lock:
                self._env.reader_check()
        except lmdb.Error as error:
            self._forget_slot()
            if self._env is not None:
                self._env.close()
                self._env = None
            raise self._failure(error) from error
        self.writable = writable
        self._closing = False
        if self._journal is not None:
            self._journal.mark(self._slot, False)

    def _check_header(self) -> None:
        try:
            body = self._own(layout.own_key(layout.HEADER))
            if body is None:
                raise GenerationUnfinished(self.path, "it has no header: its creation did not finish")
            version, _, number, _, _ = _HEADER.unpack(body)
            if not 1 <= version <= layout.NEWEST:
                text = f"format {version}; this version reads 1 to {layout.NEWEST}: use a newer logyard"
                raise FormatNewer(self.path, text)
            self.form = version
            if number != self.number:
                raise GenerationFailed(self.path, f"it says it is generation {number}")
            if self.form >= layout.BESIDE:
                self._open_bodies()
        except (GenerationFailed, PayloadCorrupt, StoreShort):
            self.close()
            raise

    def _open_bodies(self, create: bool = False) -> None:
        self._bodies = Bodies(self.path)
        door = self._door if self.writable else None
        try:
            if create:
                assert door is not None
                self._bodies.create(door)
            size = self._bodies.open(door)
            if door is not None:
                self._bodies.begin(self._end(size))
        except OSError as error:
            raise self._failure(error) from error

    def _reopen_bodies(self) -> None:
        try:
            size = self._bodies.reopen()
        except OSError as error:
            raise self._failure(error) from error
        self._bodies.begin(self._end(size))

    def _end(self, size: int) -> int:
        """Return where the file beside ends that is `size` bytes long."""
        env = self._enter()
        try:
            return ends.find_end(self.path, env, self.form, size, self.config.map_bytes)
        except lmdb.Error as error:
            raise self._failure(error) from error
        finally:
            self._leave()

    def close(self) -> None:
        """Close the environment, now or when the last reader has left."""
        with self._lock:
            self._closing = True
            if not self._inside:
                self._close()

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None
            self._bodies.close()
            self._forget_slot()

    def _forget_slot(self) -> None:
        if self._journal is not None and self._slot >= 0:
            self._journal.leave(self._slot)
            self._slot = -1

    def _enter(self) -> lmdb.Environment:
        with self._lock:
            env = self._env
            if env is None or self._closing:
                raise GenerationFailed(self.path, "it is not open")
            if not self._inside and self._journal is not None:
                self._journal.mark(self._slot, True)
            self._inside += 1
            return env

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                if self._journal is not None and self._slot >= 0:
                    self._journal.mark(self._slot, False)
                if self._closing:
                    self._close()

    def _failure(self, error: lmdb.Error | OSError) -> GenerationFailed | StoreFull | StoreShort:
        """Return an error of LMDB's, or of the file beside, in our words. A commit that the kernel cuts short is an I/O
        error to LMDB, full disk or not."""
        code = getattr(error, "errno" if isinstance(error, OSError) else "code", 0)
        if isinstance(error, lmdb.DiskError):
            code = errno.ENOSPC
        if code in SHORT or isinstance(error, lmdb.MemoryError):
            return StoreShort(f"{self.path}: {error}")
        if code == errno.EIO and self.writable:
            space = os.statvfs(self.path)
            if space.f_bavail * space.f_frsize < 2 * self.config.transaction_bytes:
                code = errno.ENOSPC
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StoreFull(f"{self.path}: the disk is full: {error}")
        return GenerationFailed(self.path, str(error))

    def seal(self, sync_directory: Callable[[str], object]) -> None:
        """Seal the generation: nothing will be written to it any more."""
        try:
            fd = os.open(os.path.join(self.path, "sealed"), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            kind = StoreShort if error.errno in SHORT else StoreFull
            raise kind(f"{self.path}: it cannot be sealed: {error}") from error
        os.close(fd)
        sync_directory(self.path)

    # The generation's own rows

    def _own(self, key: bytes) -> bytes | None:
        env = self._enter()
        try:
            with env.begin(buffers=True) as txn:
                value = txn.get(key)
                return None if value is None else bytes(layout.unwrap(self.path, key, value))
        except lmdb.Error as error:
            raise self._failure(error) from error
        finally:
            self._leave()

    def statistics(self) -> Statistics:
        """Return the counts of everything whole that was ever written here."""
        body = self._own(layout.own_key(layout.STATISTICS))
        if body is None:
            raise GenerationFailed(self.path, "it has no statistics")
        return Statistics.decode(body)

    def job_state(self, job: int) -> JobState | None:
        """Return how far a job came here, or None."""
        body = self._own(layout.own_key(layout.JOB, job))
        if body is None:
            return None
        return JobState.decode(body)

    def columns(self, run: int) -> Columns:
        """Return the ledger of a run: slots and sizes of every group in it."""
        columns = Columns()
        env = self._enter()
        try:
            with env.begin(buffers=True) as txn, txn.cursor() as cursor:
                found = cursor.set_range(layout.own_key(layout.LEDGER, run))
                while found:
                    key = bytes(cursor.key())
                    if KEY.unpack(key)[:3] != (layout.OWN, layout.LEDGER, run):
                        break
                    columns.merge(layout.unwrap(self.path, key, cursor.value()))
                    found = cursor.next()
        except lmdb.Error as error:
            raise self._failure(error) from error
        finally:
            self._leave()
        return columns

    # Writing

    def _writing(self) -> lmdb.Transaction[bytes]:
        assert self._env is not None and self.writable, "not open for writing"
        return self._env.begin(write=True)

    def write_entries(
        self, run: int, rows: Iterable[SourceRow], job: int, *, previous: int = 0, step: Step = quiet
    ) -> WriteReport:
        """Append entries, rising in (uid, index), as `run`. What `job_state(job)` covers must not be given again.

        `previous` is the generation that holds the job's earlier rows. Raises `StoreFull` (disk),
        `GenerationFailed`; both leave whole transactions only. A full map is no error: the report says `full` and
        gives the rows of the aborted transaction back. A damaged source ends it, too: the report says which.
        """
        env = self._enter()
        try:
            assert self.writable and not self.sealed, "not open for writing"
            if self._bodies.doubtful:
                self._reopen_bodies()
            writing = Writing(
                self.path, env, self.config, self.statistics(), self.job_state(job), run, job, previous, step,
                self.form, self._bodies,
            )  # fmt: skip
            return writing.write(rows)
        except lmdb.Error as error:
            if self.form >= layout.BESIDE:
                self._bodies.doubt()
            raise self._failure(error) from error
        except Unwritten as error:
            raise self._failure(error.cause) from error.cause
        finally:
            self._leave()

    # Reading

    def entry(self, run: int, uid: int, index: int) -> StoredEntry:
        """Return metadata and packs of one entry. Raises `PayloadMissing`, `PayloadCorrupt`."""
        prefix = KEY.pack(run, uid, index, 0, 0, 0)
        env = self._enter()
        try:
            with env.begin(buffers=True) as txn, txn.cursor() as cursor:
                if cursor.set_range(prefix):
                    key = bytes(cursor.key())
                    if key[:24] == prefix[:24] and key[32:36] == prefix[32:36]:
                        return layout.parse_entry(self.path, key, cursor.value())
        except lmdb.Error as error:
            raise self._failure(error) from error
        finally:
            self._leave()
        raise PayloadMissing(uid, index)

    def read_unit(self, run: int, uid: int, index: int, unit: int, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes start to stop of a unit; every piece touched is verified. Raises `PayloadMissing`,
        `PayloadCorrupt`.

        One short transaction a piece: a slow disk never holds a reader open over many megabytes.
        """
        assert start >= 0
        first = start // layout.PIECE_BYTES
        try:
            length, body = self._piece(run, uid, index, unit, first, start, stop)
        except PayloadMissing:
            if first:
                length, _ = self._piece(run, uid, index, unit, 0, 0, 0)
                if start >= length:
                    return b""
                raise
            pack = self.entry(run, uid, index).pack(unit)
            if pack is None:
                raise
            return bytes(pack[start:stop])
        stop = length if stop is None else min(stop, length)
        parts = [body]
        for piece, _, _ in layout.pieces_between(length, start, stop, self.form):
            if piece > first:
                parts.append(self._piece(run, uid, index, unit, piece, start, stop)[1])
        return body if len(parts) == 1 else b"".join(parts)

    def _piece(
        self, run: int, uid: int, index: int, unit: int, piece: int, start: int, stop: int | None
    ) -> tuple[int, bytes]:
        """Return (the unit's length, what piece `piece` holds between the unit offsets start and stop)."""
        prefix = KEY.pack(run, uid, index, 0, 0, 0)
        env = self._enter()
        try:
            with env.begin(buffers=True) as txn, txn.cursor() as cursor:
                if not cursor.set_range(prefix) or (found := bytes(cursor.key()))[:24] != prefix[:24]:
                    raise PayloadMissing(uid, index, unit)
                key = KEY.pack(run, uid, index, KEY.unpack(found)[3], unit + 1, piece)
                value = txn.get(key)
                if value is None:
                    raise PayloadMissing(uid, index, unit)
                if layout.parse_place(self.path, key, value, self.form) is None:
                    length, body = layout.parse_piece(self.path, key, value)
                    lengths = layout.piece_lengths(length, self.form)
                    if piece >= len(lengths) or lengths[piece] != len(body):
                        raise layout.corrupt(self.path, key, f"a piece of {length} bytes", len(body))
                    at = sum(lengths[:piece])
                    return length, bytes(body[max(start - at, 0) : len(body) if stop is None else max(stop - at, 0)])
                placed = bytes(value)
            # Of the file nothing is read while a transaction is open.
            length, whole = self._placed(key, placed)
            at = piece * layout.PIECE_BYTES
            return length, whole[max(start - at, 0) : len(whole) if stop is None else max(stop - at, 0)]
        except lmdb.Error as error:
            raise self._failure(error) from error
        finally:
            self._leave()

    def _placed(self, key: bytes, value: bytes) -> tuple[int, bytes]:
        """Return (the whole unit's length, the bytes) of a piece in the file beside, by its row; verified. Raises
        `PayloadCorrupt`."""
        found = layout.parse_place(self.path, key, memoryview(value), self.form)
        assert found is not None
        length, place = found
        try:
            body = self._bodies.read(place, layout.placed_length(self.path, key, length))
        except OSError as error:
            if error.errno in SHORT:
                raise StoreShort(f"{self._bodies.path}: {error}") from error
            raise layout.corrupt(self._bodies.path, key, "bytes that can be read", error) from error
        layout.check_placed(self._bodies.path, key, value, body)
        return length, body

    def scan(self, run: int, uid: int, first: int, last: int, *, bodies: bool = True) -> Iterator[StoredEntry]:
        """Yield the entries of a group between two indexes, rising. Copied out in chunks of about 1 MiB, one short
        transaction each."""
        at = KEY.pack(run, uid, first, 0, 0, 0)
        end = KEY.pack(run, uid, last + 1, 0, 0, 0)
        while at < end:
            chunk, at = self._chunk(at, end, bodies)
            yield from chunk

    def _chunk(self, at: bytes, end: bytes, bodies: bool) -> tuple[list[StoredEntry], bytes]:
        """Return entries from a key on, and the key to go on from (`end`: nothing is left)."""
        chunk: list[StoredEntry] = []
        size = 0
        env = self._enter()
        try:
            with env.begin(buffers=True) as txn, txn.cursor() as cursor:
                found = cursor.set_range(at)
                while found and (key := bytes(cursor.key())) < end:
                    if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_ROWS:
                        return chunk, key
                    try:
                        entry = layout.parse_entry(self.path, key, cursor.value(), bodies=bodies)
                    except PayloadCorrupt:
                        if not chunk:
                            raise
                        return chunk, key  # What is whole comes first; the next call meets the damage.
                    chunk.append(entry)
                    size += len(entry.data) + len(entry.inline)
                    if any(unit.at < 0 for unit in entry.units):
                        found = cursor.set_range(KEY.pack(*KEY.unpack(key)[:2], entry.index + 1, 0, 0, 0))
                    else:
                        found = cursor.next()
        except lmdb.Error as error:
            raise self._failure(error) from error
        finally:
            self._leave()
        return chunk, end

    def measure(self) -> Measured:
        """Scan and verify every row: the slots as they really are. Costs a read of the whole file, in transactions
        of a chunk each."""
        scan = Measuring(self.path, self.form, self._placed)
        at: bytes | None = bytes(KEY.size)
        while at is not None:
            env = self._enter()
            try:
                with env.begin(buffers=True) as txn, txn.cursor() as cursor:
                    found, size = cursor.set_range(at), 0
                    at = None
                    while found:
                        key, value = bytes(cursor.key()), cursor.value()
                        if size >= 8 * _CHUNK_BYTES:
                            at = key
                            break
                        size += scan.visit(key, value)
                        found = cursor.next()
            except lmdb.Error as error:
                raise self._failure(error) from error
            finally:
                self._leave()
        # Looked for at last: of an older release it comes with the first bytes, maybe during the scan.
        lost = scan.places and self._own(layout.own_key(layout.BODIES)) is None
        return scan.finish("the row that says where its large bodies end" if lost else "")


def _is_there(path: str) -> bool:
    """Return whether a file is there; whoever opens one that can't be looked at learns why."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True

"""LMDB's twin: environments as sorted rows in a simulated file. A commit is durable when it returns, or did not happen.

Only what the engine uses. Write transactions change the rows in place and remember how to undo it: no reader runs
beside them, as a job runs in one piece. Installed in place of the module `lmdb` by `patches`.
"""

from __future__ import annotations

import errno
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import lmdb

from logyard.engine.log.meta_rows import file_key

from .disk import SimDisk, files_of
from .files import File
from .loop import Loop

PAGE = 4096
SEALS = file_key("flushed", 0)
"""A commit with this row says of a WAL file that it is in a segment."""


class Rows:
    """Key -> value with the keys in order; `bad` ones can't be read, as a page of theirs is damaged."""

    __slots__ = ("values", "_keys", "size")

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self._keys: list[bytes] | None = None
        self.size = 0

    @property
    def keys(self) -> list[bytes]:
        if self._keys is None:
            self._keys = sorted(self.values)
        return self._keys

    def put(self, key: bytes, value: bytes) -> bytes | None:
        old = self.values.get(key)
        if old is None:
            keys = self._keys
            if keys is not None:
                if not keys or key > keys[-1]:
                    keys.append(key)
                else:
                    self._keys = None
        else:
            self.size -= len(old)
        self.values[key] = value
        self.size += len(value)
        return old

    def delete(self, key: bytes) -> bytes | None:
        old = self.values.pop(key, None)
        if old is not None:
            self.size -= len(old)
            self._keys = None
        return old

    @property
    def pages(self) -> int:
        """About as many as LMDB would take."""
        return (self.size + 64 * len(self.values)) * 5 // 4 // PAGE + 4


class Cursor:
    """Over one transaction's rows."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._rows = transaction.rows
        self._at = -1

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def set_range(self, key: bytes) -> bool:
        self._at = bisect_left(self._rows.keys, bytes(key))
        return self._at < len(self._rows.keys)

    def next(self) -> bool:
        self._at += 1
        return self._at < len(self._rows.keys)

    def last(self) -> bool:
        self._at = len(self._rows.keys) - 1
        return self._at >= 0

    def key(self) -> Any:
        return self._rows.keys[self._at]

    def value(self) -> Any:
        return self._transaction.give(self._rows.values[self._rows.keys[self._at]])

    def iternext(self, keys: bool = True, values: bool = True) -> Iterator[Any]:
        self._at = max(self._at, 0)
        while self._at < len(self._rows.keys):
            key = self._rows.keys[self._at]
            value = self._transaction.give(self._rows.values[key])
            yield (key, value) if keys and values else key if keys else value
            self._at += 1

    def __iter__(self) -> Iterator[Any]:
        return self.iternext()

    def putmulti(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        for key, value in pairs:
            self._transaction.put(key, value)


class Transaction:
    """`undo` holds what the rows were, when it writes."""

    def __init__(self, environment: Environment, write: bool, buffers: bool) -> None:
        self._environment = environment
        self.rows = environment.rows
        self._buffers = buffers
        self._undo: list[tuple[bytes, bytes | None]] | None = [] if write else None

    def give(self, value: bytes) -> Any:
        return memoryview(value) if self._buffers else value

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._undo is not None:
            if kind is None:
                self.commit()
            else:
                self.abort()

    def get(self, key: bytes) -> Any:
        value = self.rows.values.get(bytes(key))
        return None if value is None else self.give(value)

    def put(self, key: bytes, value: Any, append: bool = False) -> bool:
        assert self._undo is not None
        # A row that is not committed is no part of the environment for whoever opens it next.
        self._undo.append((key, self.rows.put(bytes(key), bytes(value))))
        if self.rows.pages * PAGE > self._environment.map_size:
            raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL: Environment mapsize limit reached (simulated)")
        return True

    def delete(self, key: bytes) -> bool:
        assert self._undo is not None
        old = self.rows.delete(bytes(key))
        self._undo.append((key, old))
        return old is not None

    def cursor(self) -> Cursor:
        return Cursor(self)

    def commit(self) -> None:
        disk = self._environment.disk
        try:
            # Before it nothing of it is there, after it everything: LMDB's last write is its meta page.
            disk.step("commit")
            if disk.faults.map_full and self._undo and self._environment.is_generation:
                disk.faults.map_full = False
                disk.faults.hits["D6.map_full"] += 1
                raise lmdb.MapFullError("mdb_txn_commit: MDB_MAP_FULL: mapsize limit reached (simulated)")
            if disk.faults.no_commit and self._undo:
                disk.refuse_commit("generation" if self._environment.is_generation else "meta")
                if any(key.startswith(SEALS) for key, _ in self._undo):
                    disk.refuse_commit("sealing")
            if disk.faults.quota >= 0 and self._undo:
                disk.claim(self._environment.growth)
        except OSError as error:
            self.abort()
            if error.errno == errno.ENOSPC:
                raise lmdb.DiskError("mdb_txn_commit: No space left on device (simulated)") from error
            raise lmdb.Error(f"mdb_txn_commit: {error.strerror}") from error
        except BaseException:
            self.abort()
            raise
        self._undo = None
        self._environment.grow()
        # It may die once it is durable, and before it is told so.
        disk.step("committed")

    def abort(self) -> None:
        undo, self._undo = self._undo, None
        for key, old in reversed(undo or ()):
            if old is None:
                self.rows.delete(key)
            else:
                self.rows.put(key, old)


class Environment:
    """An open one."""

    def __init__(self, disk: SimDisk, file: File, map_size: int, is_generation: bool) -> None:
        self.disk = disk
        self.is_generation = is_generation
        if file.rows is None:
            file.rows = Rows()
        self.rows: Rows = file.rows
        self.map_size = map_size
        self._file = file

    @property
    def growth(self) -> int:
        """Bytes by which the file has to grow for what the rows are now."""
        return PAGE * self.rows.pages - len(self._file.seen)

    def begin(self, write: bool = False, buffers: bool = False) -> Transaction:
        return Transaction(self, write, buffers)

    def grow(self) -> None:
        """The file is as large as its rows need."""
        if self.growth > 0:
            self._file.resize(len(self._file.seen) + self.growth)

    def close(self) -> None:
        """Nothing is pending."""

    def reader_check(self) -> int:
        return 0

    def stat(self) -> dict[str, int]:
        return {"entries": len(self.rows.values), "psize": PAGE}

    def info(self) -> dict[str, int]:
        # Of the file, as the last commit left it.
        return {"last_pgno": len(self._file.seen) // PAGE - 1}

    def __enter__(self) -> Environment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def module(loop: Loop) -> Any:
    """What stands for the module."""

    def open_(path: str, map_size: int, readonly: bool = False, create: bool = True, **_: Any) -> Environment:
        files = files_of(loop)
        disk: SimDisk = loop.life.disk  # type: ignore[union-attr]
        where = f"{path}/data.mdb"
        if files.find(where) is None:
            if readonly or not create:
                raise lmdb.Error(f"{path}: No such file or directory (simulated)")
            disk.step("names")
            files.create(f"{path}/lock.mdb", exclusive=False)
            files.create(where).resize(2 * PAGE)
        return Environment(disk, files.file(where), map_size, "/gen-" in path)

    return SimpleNamespace(
        open=open_, Error=lmdb.Error, MapFullError=lmdb.MapFullError, DiskError=lmdb.DiskError,
        MemoryError=lmdb.MemoryError,
        Environment=Environment, Transaction=Transaction,
    )  # fmt: skip

"""Rows of the meta store with their types: groups, their durable state, small snapshots, files. msgpack, fields in
order.

Invariant: fields are only ever added at the end, so an older row reads with defaults. Keys start with one letter for
the kind and sort by group or file number. Called by the host, which commits what `put` gives.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgpack

if TYPE_CHECKING:
    from .meta import MetaStore

Run = tuple[int, int, int]
"""(first index, last index, segment)"""

KEY = struct.Struct(">Q")


def _pack(values: list[Any]) -> bytes:
    packed: bytes = msgpack.packb(values)
    return packed


def _unpack(value: bytes) -> list[Any]:
    found: list[Any] = msgpack.unpackb(value, strict_map_key=False, use_list=True)
    return found


@dataclass(slots=True)
class GroupRow:
    """A group of this node, registered before its first WAL record (invariant 6). `created`: ms since 1970."""

    PREFIX: ClassVar[bytes] = b"g"

    uid: int
    name: str
    machine: str
    arguments: dict[str, Any] = field(default_factory=dict)
    configuration: bytes = b""
    created: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def put(self) -> tuple[bytes, bytes]:
        """Key and value for `MetaStore.commit`."""
        values = [self.name, self.machine, self.arguments, self.configuration, self.created, self.extra]
        return group_key(self.uid), _pack(values)

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> GroupRow:
        """From a row of `scan`."""
        return cls(KEY.unpack(key[1:])[0], *_unpack(value))


@dataclass(slots=True)
class StateRow:
    """A checkpoint of a group's durable state: what stays true when its WAL files are recycled.

    `runs` locate entries in segments, `term_runs` are (first index, term), `payload_runs` whatever the payload side
    keeps: lists of plain values.
    """

    PREFIX: ClassVar[bytes] = b"s"

    uid: int
    term: int = 0
    vote: int = 0
    commit: int = 0
    snapshot_index: int = 0
    snapshot_term: int = 0
    floor: int = 0
    runs: list[Run] = field(default_factory=list)
    term_runs: list[tuple[int, int]] = field(default_factory=list)
    payload_runs: list[Any] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def put(self) -> tuple[bytes, bytes]:
        """Key and value for `MetaStore.commit`."""
        return state_key(self.uid), _pack(
            [
                self.term, self.vote, self.commit, self.snapshot_index, self.snapshot_term, self.floor,
                self.runs, self.term_runs, self.payload_runs, self.extra,
            ]
        )  # fmt: skip

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> StateRow:
        """From a row of `scan`."""
        row = cls(KEY.unpack(key[1:])[0], *_unpack(value))
        row.runs = [(first, last, segment) for first, last, segment in row.runs]
        row.term_runs = [(first, term) for first, term in row.term_runs]
        return row


@dataclass(slots=True)
class SnapshotRow:
    """A snapshot small enough to need no file; `data` is its encoding by the snapshot store."""

    PREFIX: ClassVar[bytes] = b"n"

    uid: int
    index: int
    term: int
    data: bytes

    def put(self) -> tuple[bytes, bytes]:
        """Key and value for `MetaStore.commit`."""
        return snapshot_key(self.uid), _pack([self.index, self.term, self.data])

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> SnapshotRow:
        """From a row of `scan`."""
        return cls(KEY.unpack(key[1:])[0], *_unpack(value))


@dataclass(slots=True)
class FileRow:
    """A file whose existence is a fact others rely on: `kind` is wal, segment or generation; `fields` are its own."""

    PREFIX: ClassVar[bytes] = b"f"

    kind: str
    id: int
    fields: dict[str, Any] = field(default_factory=dict)

    def put(self) -> tuple[bytes, bytes]:
        """Key and value for `MetaStore.commit`."""
        return file_key(self.kind, self.id), _pack([self.fields])

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> FileRow:
        """From a row of `scan`."""
        kind, _, number = key[1:].partition(b"\0")
        return cls(kind.decode(), KEY.unpack(number)[0], *_unpack(value))


def group_key(uid: int) -> bytes:
    """The key of a `GroupRow`."""
    return GroupRow.PREFIX + KEY.pack(uid)


def state_key(uid: int) -> bytes:
    """The key of a `StateRow`."""
    return StateRow.PREFIX + KEY.pack(uid)


def snapshot_key(uid: int) -> bytes:
    """The key of a `SnapshotRow`."""
    return SnapshotRow.PREFIX + KEY.pack(uid)


def file_key(kind: str, number: int) -> bytes:
    """The key of a `FileRow`."""
    return FileRow.PREFIX + kind.encode() + b"\0" + KEY.pack(number)


def group_rows(store: MetaStore) -> Iterator[GroupRow]:
    """All groups, by uid."""
    return (GroupRow.unpack(key, value) for key, value in store.scan(GroupRow.PREFIX))


def state_rows(store: MetaStore) -> Iterator[StateRow]:
    """All states, by uid."""
    return (StateRow.unpack(key, value) for key, value in store.scan(StateRow.PREFIX))


def snapshot_rows(store: MetaStore) -> Iterator[SnapshotRow]:
    """All small snapshots, by uid."""
    return (SnapshotRow.unpack(key, value) for key, value in store.scan(SnapshotRow.PREFIX))


def file_rows(store: MetaStore, kind: str = "") -> Iterator[FileRow]:
    """All files, or those of one kind, by number."""
    prefix = FileRow.PREFIX + (kind.encode() + b"\0" if kind else b"")
    return (FileRow.unpack(key, value) for key, value in store.scan(prefix))

"""Bugs in what stands on disks: the WAL, segments, the books, payloads. Planted by `planted`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from logyard.engine import identity
from logyard.engine.disk.door import Disk
from logyard.engine.log import meta, ring, segment_job, wal, wal_files, wal_scan
from logyard.engine.log.compactor import Compactor
from logyard.engine.log.group_commit import GroupCommit
from logyard.engine.log.segment_writer import SegmentWriter
from logyard.engine.recovery import inspect
from logyard.engine.repair import log_repair
from logyard.engine.replica.reader import Reader
from logyard.payloads import layout
from logyard.protocol.errors import LogyardError

from .bugs import Bug, nothing, without


class _Through:
    """A disk with another `datasync`."""

    def __init__(self, disk: Disk, datasync: Callable[[int], None]) -> None:
        self._disk = disk
        self.datasync = datasync

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


def _retries_a_failed_sync(old: Any) -> Any:
    def put(self: Any, plan: Any) -> None:
        disk = self.disk
        real = disk.datasync

        def datasync(fd: int) -> None:
            try:
                real(fd)
            except OSError:
                real(fd)

        self.disk = _Through(disk, datasync)
        try:
            old(self, plan)
        finally:
            self.disk = disk

    return put


def _drops_hard_states(old: Any) -> Any:
    def add(self: Any, item: Any) -> None:
        if item.hard_state is not None and not item.entries:
            item.hard_state = None
        old(self, item)

    return add


def _ignores_damage(old: Any) -> Any:
    def replay(*arguments: Any, **named: Any) -> Any:
        result = old(*arguments, **named)
        result.damage.clear()
        return result

    return replay


def _recycles_early(old: Any) -> Any:
    async def flush(self: Any, sealed: Any) -> Any:
        stored = await old(self, sealed)
        if sealed.file in self._location.files:
            self._location.recycle(sealed.file)
        return stored

    return flush


class _Late:
    """Writes slots when the flush is over."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def write(self, old: Any) -> Any:
        return lambda disk, *what: self.calls.append((old, disk, *what))

    def flush(self, old: Any) -> Any:
        async def flush(writer: Any, sealed: Any) -> Any:
            stored = await old(writer, sealed)
            calls, self.calls = self.calls, []
            for write, disk, *what in calls:
                # Of a process that died meanwhile nothing is written.
                if disk.life.alive:
                    with suppress(OSError):
                        write(disk, *what)
            return stored

        return flush


def _names_the_file_first(old: Any) -> Any:
    """The row of the file is with the rows of the first groups, not of the last."""

    async def store(self: Any, switch: Any, hard_states: Any) -> Any:
        await self._meta_batch.commit_members((), sealed_files=[switch.file])
        return await old(self, switch, hard_states)

    return store


def _believes_slots(old: Any) -> Any:
    """An entry is what its slot says, whether a row names it or not."""

    def from_files(self: Any, member: Any, index: int, *rest: int) -> Any:
        if member.spec.is_system:
            with suppress(LogyardError):
                reader = self._rings.reader(member.uid)
                if header := _header_of(reader, index):
                    return [reader.find(index, header.term).entry]
        return old(self, member, index, *rest)

    return from_files


def _header_of(reader: Any, index: int) -> Any:
    """What stands in the place of an entry's header, if it says that it is that."""
    place = reader.geometry.header_at(index)
    header = ring.parse_header(reader._read(place, ring.HEADER_BYTES), reader.uid, place)
    return header if header is not None and header.index == index else None


def _serves_unchecked(old: Any) -> Any:
    def parse(path: str, key: bytes, value: Any) -> Any:
        try:
            return old(path, key, value)
        except Exception:
            return layout.PIECE_ROW.unpack_from(value)[1], value[layout.PIECE_ROW.size :]

    return parse


LATE = _Late()
BUGS = (
    Bug("wal_without_sync", "what is acknowledged is durable", [(wal.Wal, "_put", without("datasync"))]),
    Bug(
        "wal_name_without_sync",
        "a file in use has a durable name",
        [(wal_files.WalFiles, "start", without("sync_directory"))],
    ),
    Bug(
        "meta_name_without_sync",
        "a store's file has a durable name",
        [(meta.MetaStore, "_scan", without("sync_directory"))],
    ),
    Bug(
        "segment_without_sync",
        "a segment is durable before its WAL file goes",
        [(segment_job, "write_segment", without("datasync"))],
    ),
    Bug(
        "segment_name_without_sync",
        "a segment's name is durable before its WAL file goes",
        [(segment_job, "write_segment", without("sync_directory"))],
    ),
    Bug(
        "file_before_its_groups",
        "a file has its segment when the rows of all its groups are stored",
        [(SegmentWriter, "_store", _names_the_file_first)],
        featured=frozenset({"steps"}),
    ),
    Bug(
        "ring_without_sync",
        "slots are durable before their WAL file goes",
        [(segment_job, "write_slots", without("datasync"))],
        featured=frozenset({"rings"}),
    ),
    Bug(
        "ring_behind_the_wal",
        "slots are written before their WAL file goes",
        [(segment_job, "_write_ring", LATE.write), (SegmentWriter, "_flush", LATE.flush)],
        featured=frozenset({"rings"}),
    ),
    Bug(
        "stale_slot_believed",
        "a slot counts by its run, not by itself",
        [(Reader, "_from_files", _believes_slots)],
        featured=frozenset({"rings"}),
    ),
    Bug("retried_sync", "a failed sync is never tried again", [(wal.Wal, "_put", _retries_a_failed_sync)]),
    Bug(
        "whole_batch_cut",
        "only a torn batch is cut",
        [(wal_scan.FileScan, "whole", lambda old: lambda self, frame: False)],
    ),
    Bug("hard_state_dropped", "term and vote are durable", [(GroupCommit, "add", _drops_hard_states)]),
    Bug(
        "hard_state_not_checkpointed",
        "a file goes when the store has what it says",
        [(SegmentWriter, "hard_state_written", nothing)],
    ),
    Bug("damage_taken_for_torn", "a damaged record is mended, not cut", [(inspect, "replay", _ignores_damage)]),
    Bug("mend_forgotten", "who lost records acknowledges nothing before it is mended", [(log_repair, "Mend", nothing)]),
    Bug("recycled_before_migration", "a home goes when it is empty", [(SegmentWriter, "_flush", _recycles_early)]),
    Bug(
        "uncommitted_migrated",
        "a generation holds only what is committed",
        [(Compactor, "_may_go", lambda old: lambda self, file: True)],
    ),
    Bug("rotten_piece_served", "no payload is served unchecked", [(layout, "parse_piece", _serves_unchecked)]),
    Bug("old_directory_believed", "who forgot takes no part", [(identity, "difference", lambda old: lambda *_: "")]),
    Bug(
        "no_descriptor_is_a_failed_disk",
        "a want of descriptors ends no node",
        [(wal, "is_short", nothing)],
        featured=frozenset({"descriptors"}),
    ),
)

"""The logs of a stopped node as records can be read from them: machine, entries and payload bytes, all hash-checked.

Invariant: only what the directory proves to be committed is there, and nothing in it is touched. Whatever does not
verify is a `Corrupt` that names log, file and place, and concerns that log alone. One environment per process and
path: open a directory once at a time. Used by `source`.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from logyard.engine.disk.door import Disk
from logyard.engine.entry import COMMANDS, Entry, Unit, unit_hash, units_of
from logyard.engine.log.ring import RingReader
from logyard.engine.log.segment import SegmentReader
from logyard.engine.recovery.inspect import Facts
from logyard.machines.log import AppendLog
from logyard.payloads.homes import Home
from logyard.payloads.layout import StoredEntry
from logyard.protocol.errors import Corrupt, DirectoryInUse, LogyardError, OutOfRange, PayloadError

from ..errors import DataLoss, OptionError
from .files import Segments, check_wal, ring_path, segment_path, wal_path
from .generations import Generations
from .groups import GroupLog, Replay, build_group
from .lock import held
from .meta import read_meta
from .report import DAMAGE, Report

SCAN_BYTES = 1 << 20
COMPARED = 256
"""Entries at the end of what two copies have in common that are looked at for one whose term both know."""
APPEND_LOG = "log"
ADVICE = "read another member's directory, or run `logyard check` on this one"


class Located(NamedTuple):
    """An entry with payload and where its bytes are: in WAL file `entry.file`, or, `stored`, in generation `home`."""

    index: int  # type: ignore[assignment]  # tuple.index is not missed
    term: int
    data: bytes
    entry: Entry | None
    stored: StoredEntry | None
    home: Home | None


class StoppedNode:
    """A stopped node's data directory, open for reading; a context manager. Raises `DirectoryInUse`, `Corrupt` where
    not even the groups are known, `LogyardError` for a newer format."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = contextlib.ExitStack()
        self._fds: dict[int, int] = {}
        self._logs: dict[int, StoppedLog] = {}
        self.report = Report(lambda stage, done, total: None, lambda path: None)
        self.facts: Facts
        self.segments: Segments
        self.generations: Generations

    def __enter__(self) -> StoppedNode:
        if not (self.directory / "meta").is_dir():
            raise LogyardError(f"{self.directory} is no data directory of a node: it has no meta store")
        try:
            with plain_errors(f"directory {self.directory}"):
                self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        directory, report = self.directory, self.report
        self._stack.enter_context(held(directory))
        self.facts = read_meta(directory, frozenset(), report)
        if not self.facts.node:
            raise corrupt("all logs", directory / "meta", "no group is known here")
        self.wal = check_wal(directory, self.facts, report, shapes=False)
        self.segments = Segments(directory, report)
        self._stack.callback(self.segments.close)
        self.generations = Generations(directory, self.facts, frozenset(), report)
        self._stack.callback(self.generations.close)
        # Damage of which nobody knows whose it was concerns the groups it may have hit, not all.
        known = {wal_path(one.file) for one in self.wal.result.damage}
        for finding in report.findings:
            whole = finding["kind"] == "meta" or (finding["kind"] == "wal" and finding["path"] not in known)
            if finding["severity"] == DAMAGE and whole and not finding["group"]:
                raise corrupt("all logs", self.directory / finding["path"], finding["message"])

    def close(self) -> None:
        """Close every file; closing twice is harmless."""
        self._stack.close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self._logs.clear()

    @property
    def node(self) -> int:
        """The node's number."""
        return self.facts.node

    def uids(self) -> list[int]:
        """Return the append logs there are."""
        groups = self.facts.groups
        return [uid for uid in sorted(groups) if uid not in self.facts.deleted and groups[uid].machine == APPEND_LOG]

    def log(self, uid: int) -> StoppedLog:
        """Return one log, as of the newest record that is known to be committed. Raises `Corrupt`."""
        found = self._logs.get(uid)
        if found is None:
            name = self.facts.name(uid)
            with plain_errors(f"log {name!r}", self.directory):
                found = self._logs[uid] = self._build(uid, name)
        return found

    def _build(self, uid: int, name: str) -> StoppedLog:
        group = build_group(uid, self.facts, self.wal, self.report)
        for finding in self.report.findings:
            about = finding["group"] in (name, f"{uid:016x}") or (
                not finding["group"] and uid in self.wal.suspects(self.facts)
            )
            if finding["severity"] == DAMAGE and about:
                raise corrupt(f"log {name!r}", self.directory / finding["path"], finding["message"])
        if not group.whole:
            raise corrupt(f"log {name!r}", self.directory, "its records are not all there")
        log = StoppedLog(self, group, self.generations.homes.get(uid, []))
        log.replay()
        return log

    def unread(self, uid: int) -> StoppedLog | None:
        """Return one log whose machine is still empty; None where it is damaged."""
        group = build_group(uid, self.facts, self.wal, self.report)
        return StoppedLog(self, group, self.generations.homes.get(uid, [])) if group.whole else None

    def wal_file(self, number: int) -> int:
        """Return a descriptor of a WAL file that is a home. Raises `OSError`."""
        fd = self._fds.get(number)
        if fd is None:
            fd = self._fds[number] = Disk().open_file(str(self.directory / wal_path(number)))
        return fd


class StoppedLog:
    """One append log. `machine` is as of entry `applied`."""

    __slots__ = ("node", "group", "machine", "applied", "homes", "bytes", "_starts")

    def __init__(self, node: StoppedNode, group: GroupLog, homes: Sequence[Home]) -> None:
        self.node = node
        self.group = group
        self.homes = sorted(homes)
        self._starts = [home.first for home in self.homes]
        self.machine = AppendLog()
        self.applied = 0
        self.bytes = 0

    @property
    def name(self) -> str:
        """The log's name."""
        return self.group.name

    @property
    def uid(self) -> int:
        """The group's uid."""
        return self.group.spec.uid

    def replay(self) -> None:
        """Bring the machine from the snapshot to what is committed. Raises `Corrupt`."""
        group = self.group
        replay = Replay(group)
        at = group.snapshot.index if group.snapshot is not None else 0
        for generation, run, uid in self.node.generations.marks:
            if uid == self.uid:
                self.bytes += self.node.generations.marks[generation, run, uid].live
        above = at + 1
        for entry in self.entries(above, group.commit):
            if entry.index != at + 1:
                raise self._hole(at + 1, entry.index - 1)
            at = entry.index
            self.bytes += len(entry.data) + entry.body_bytes
            if entry.kind == COMMANDS:
                replay.apply(entry, lambda: self.entries(above, group.commit))
        if at < group.commit:
            raise self._hole(at + 1, group.commit)
        assert isinstance(replay.machine, AppendLog)
        if replay.machine.keys is not None:
            raise LogyardError(f"log {self.name!r} is keyed, which can't be read from a directory yet: start the node")
        self.machine, self.applied = replay.machine, at

    def _hole(self, first: int, last: int) -> Corrupt:
        where = next((number for low, high, number in self.group.image.places if low <= first <= high), -1)
        path = self.node.directory / (segment_path(where) if where > 0 else "wal" if where else ring_path(self.uid))
        return self.corrupt(path, f"entries {first} to {last} are missing")

    def entries(self, first: int, last: int) -> Iterator[Entry]:
        """Yield entries of the Raft log, rising, from segments, its ring and the WAL; holes where it begins later.
        Raises `Corrupt`."""
        group = self.group
        terms = {run.first: run.term for run in group.image.ring}
        for low, high, number in group.image.places:
            at, stop = max(first, low), min(last, high, group.image.flushed)
            while at <= stop:
                if number:
                    chunk = self._segment(number).entries(self.uid, at, stop, SCAN_BYTES)
                else:
                    chunk = self._ring().entries(at, stop, terms[low], SCAN_BYTES)
                yield from chunk
                at = chunk[-1].index + 1 if chunk else stop + 1
        if group.log.entries:
            base = group.log.entries[0].index
            yield from group.log.entries[max(0, first - base) : max(0, last + 1 - base)]

    def _ring(self) -> RingReader:
        reader = self.node.segments.rings.reader(self.uid)
        if reader is None:
            raise self.corrupt(self.node.directory / ring_path(self.uid), "it is missing or has no readable head")
        return reader

    def _segment(self, number: int) -> SegmentReader:
        reader = self.node.segments.reader(number)
        if reader is None:
            raise self.corrupt(self.node.directory / segment_path(number), "it is missing or has no readable index")
        return reader

    def parts_from(self, other: StoppedLog) -> int:
        """Return the index of an entry that both directories know to be committed and that is of another term here than
        there; 0: none is known. Equal terms at one index mean equal logs up to there (Raft's log matching)."""
        last = min(self.group.commit, other.group.commit)
        for index in range(last, max(0, last - COMPARED), -1):
            mine, theirs = self._term(index), other._term(index)
            if mine and theirs:
                return index if mine != theirs else 0
        return 0

    def _term(self, index: int) -> int:
        """Return the term of a committed entry, as far as log or payload still tell; 0: they do not."""
        found = self.group.log.term(index) or 0
        snapshot = self.group.snapshot
        if not found and snapshot is not None and index == snapshot.index:
            return snapshot.term
        return found or next((one.term for one in self.located(index, index)), 0)

    def located(self, first: int, last: int) -> Iterator[Located]:
        """Yield entries from `first` to `last` that may have payload, rising. Those that were released may be
        missing."""
        at = max(first, 1)
        while at <= last:
            number = bisect_right(self._starts, at) - 1
            if number >= 0 and self.homes[number].last >= at:
                home = self.homes[number]
                stop = min(last, home.last)
                for stored in self.node.generations.reader(home.generation).scan(home.run, self.uid, at, stop):
                    yield Located(stored.index, stored.term, stored.data, None, stored, home)
            else:
                stop = min(last, self._starts[number + 1] - 1) if number + 1 < len(self._starts) else last
                for entry in self.entries(at, stop):
                    yield Located(entry.index, entry.term, entry.data, entry, None, None)
            at = stop + 1

    def unit(self, located: Located, unit: Unit) -> bytes | memoryview:
        """Return one unit's bytes, verified. Raises `Corrupt`."""
        data: bytes | memoryview
        stored, home, entry = located.stored, located.home, located.entry
        if stored is not None and home is not None:
            generation = self.node.generations.reader(home.generation)
            where, at = Path(generation.path) / "data.mdb", 0
            pack = stored.pack(unit.number)
            data = generation.read_unit(home.run, self.uid, located.index, unit.number) if pack is None else pack
        else:
            assert entry is not None
            if not entry.file:
                raise self.corrupt(self.node.directory, f"entry {entry.index} came without its payload")
            where, at = self.node.directory / wal_path(entry.file), entry.offset + unit.offset
            data = Disk().read(self.node.wal_file(entry.file), unit.length, at)
        if len(data) != unit.length or unit_hash(self.uid, located.index, located.term, unit.number, data) != unit.hash:
            raise self.corrupt(where, f"unit {unit.number} of entry {located.index} does not match its hash", at)
        return data

    def piece(self, index: int, size: int) -> bytes | memoryview:
        """Return the piece of a long payload at entry `index`, `size` bytes. Raises `Corrupt`."""
        for located in self.located(index, index):
            unit = units_of(located.data)[-1]
            data = memoryview(self.unit(located, unit))
            # A small piece lies in its pack, behind its table.
            if len(data) >= size:
                return data[len(data) - size :]
        raise self.corrupt(self.node.directory, f"the piece of a payload at entry {index} is missing")

    def corrupt(self, path: Path, text: str, offset: int = 0) -> Corrupt:
        """Return damage in this log."""
        return corrupt(f"log {self.name!r}", path, text, offset)


class Placed(Corrupt):
    """Damage whose message begins with the log, the file and the place."""


class Unreadable(LogyardError):
    """What cannot be read for another reason, said in the same way."""


def corrupt(who: str, path: Path, text: str, offset: int = 0) -> Placed:
    """Return damage, with file and place in the first line."""
    place = f"{path} at byte {offset}" if offset else str(path)
    return Placed.told(f"{who}: {place}: {text}; {ADVICE}", {"path": str(path), "offset": offset})


@contextlib.contextmanager
def plain_errors(who: str, directory: Path = Path()) -> Iterator[None]:
    """Raise errors of engine, payload store and disk with `who` in the first line."""
    try:
        yield
    except (Placed, Unreadable, DirectoryInUse, OutOfRange, DataLoss, OptionError):
        raise
    except PayloadError as error:
        path = getattr(error, "path", str(directory))
        raise Placed.told(f"{who}: {error}; {ADVICE}", {"path": path, "offset": 0}) from error
    except Corrupt as error:
        raise Placed.told(f"{who}: {error}", error.details) from error
    except LogyardError as error:
        raise Unreadable.told(f"{who}: {error}", error.details, code=error.code) from error
    except (OSError, AssertionError, ValueError) as error:
        path = getattr(error, "filename", None) or directory
        raise Placed.told(f"{who}: {path}: {type(error).__name__}: {error}; {ADVICE}", {"path": str(path)}) from error

"""Directories of stopped nodes as a source of logs: no server, every byte that is returned checked by its hash.

A path is a node's data directory, its node directory, or the directory of a local cluster: then each log is read from
the member that knows most of it to be committed, and from another one where that one is damaged. Implements
`sources.LogSource`.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from logyard.engine.entry import timestamp_of
from logyard.protocol.errors import LogyardError, OutOfRange, UnknownGroup

from ..errors import DataLoss
from ..sources import LogInfo, Reading, Wanted
from .places import data_directories
from .reading import StoppedLog, StoppedNode, plain_errors

if TYPE_CHECKING:
    import pyarrow

    from .records import Rows

log = logging.getLogger(__name__)


class DirectorySource:
    """`sources.LogSource` over directories. Opened when it is first used."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._stack = contextlib.ExitStack()
        self._nodes: list[StoppedNode] | None = None

    def close(self) -> None:
        """Give up files and locks; closing twice is harmless."""
        self._stack.close()
        self._nodes = None

    @property
    def nodes(self) -> list[StoppedNode]:
        """The directories, open. Raises `DirectoryInUse`, `Corrupt`, `LogyardError`."""
        if self._nodes is None:
            if not self._path.is_dir():
                raise LogyardError(f"path: {self._path} is not a directory")
            self._nodes = [self._stack.enter_context(StoppedNode(found)) for found in data_directories(self._path)]
            known = {(node.facts.cluster, node.node) for node in self._nodes}
            if len({cluster for cluster, _ in known}) > 1 or len(known) < len(self._nodes):
                raise LogyardError(f"path: {self._path} holds directories of different clusters, or a node twice")
        return self._nodes

    def logs(self, names: Collection[str] | None = None, pattern: str | None = None) -> list[LogInfo]:
        """See `LogSource.logs`; `leader` is the node to read from. A log that is damaged everywhere raises
        `Corrupt`."""
        wanted = None if names is None else set(names)
        matches = re.compile(pattern).fullmatch if pattern is not None else None
        copies: dict[tuple[str, int], list[StoppedNode]] = {}
        for node in self.nodes:
            for uid in node.uids():
                name = node.facts.name(uid)
                if (wanted is None or name in wanted) and (matches is None or matches(name)):
                    copies.setdefault((name, uid), []).append(node)
        found: dict[str, LogInfo] = {}
        for (name, uid), nodes in sorted(copies.items(), key=lambda item: item[0]):
            for problem in differences(uid, nodes):
                raise LogyardError(problem, code="copies_differ")
            best = self._best(uid, nodes)
            machine = best.machine
            members = tuple(node.node for node in nodes)
            info = LogInfo(name, uid, machine.start, machine.end, best.bytes, best.node.node, members)
            known = found.get(name)
            if known is not None and len(known.members) == len(members):
                other = next(node for node in self.nodes if node.node == known.leader)
                raise LogyardError(
                    f"log {name!r}: {other.directory} and {best.node.directory} hold different logs of this name "
                    f"({known.uid:016x}, {uid:016x}); name the directory to be read",
                    code="copies_differ",
                )
            if known is None or len(known.members) < len(members):
                found[name] = info
        return list(found.values())

    def _best(self, uid: int, nodes: Sequence[StoppedNode]) -> StoppedLog:
        """Return the copy that knows most; copies that are damaged or below their payload floor are passed over while
        there is another."""
        logs: list[StoppedLog] = []
        problem: LogyardError | None = None
        for node in nodes:
            try:
                copy = node.log(uid)
            except LogyardError as error:
                if error.code not in ("corrupt", "error"):
                    raise
                log.warning("%s", error)
                problem = error
                continue
            if copy.applied >= copy.group.floor:
                logs.append(copy)
            else:
                problem = LogyardError(
                    f"log {copy.name!r}: {node.directory} has not caught up with a release (its payload floor is "
                    f"{copy.group.floor}, it has applied {copy.applied}): read another member's directory"
                )
        if not logs:
            assert problem is not None
            raise problem
        return max(logs, key=lambda one: (one.applied, -one.node.node))

    def offsets_at(self, times: Mapping[str, int]) -> dict[str, int]:
        """See `LogSource.offsets_at`."""
        found: dict[str, int] = {}
        for info in self.logs(set(times)):
            best = self._copies(info.uid)[0]
            with plain_errors(f"log {info.name!r}", best.node.directory):
                found[info.name] = _offset_at(best, times[info.name])
        for name in times:
            if name not in found:
                raise UnknownGroup(f"no log {name!r} in {self._path}")
        return found

    def _copies(self, uid: int) -> list[StoppedLog]:
        """Return all usable copies of a log, the best one first. Raises the last one's error when there is none."""
        nodes = [node for node in self.nodes if uid in node.facts.groups and uid not in node.facts.deleted]
        best = self._best(uid, nodes)
        others = []
        for node in nodes:
            with contextlib.suppress(LogyardError):
                if node is not best.node and node.log(uid).applied >= node.log(uid).group.floor:
                    others.append(node.log(uid))
        return [best, *others]

    def read(self, wanted: Sequence[Wanted], reading: Reading) -> Iterator[pyarrow.RecordBatch]:
        """See `LogSource.read`."""
        from .records import Rows

        rows = Rows(reading)
        for one in wanted:
            if one.first < one.end:
                yield from self._one(one, reading, rows)
        yield from rows.rest()

    def body(self, wanted: Wanted, offset: int, size: int) -> Iterator[bytes]:
        """See `LogSource.body`."""
        from .records import body_of

        copy = self._copies(self._uid(wanted))[0]
        with plain_errors(f"log {wanted.log!r}", copy.node.directory):
            yield from body_of(copy, offset)

    def _uid(self, wanted: Wanted) -> int:
        """Return the group that a range is of; 0: it is not here."""
        uids = {uid for node in self.nodes for uid in node.uids() if node.facts.name(uid) == wanted.log}
        return (wanted.uid if wanted.uid in uids else 0) if wanted.uid else min(uids, default=0)

    def _one(self, wanted: Wanted, reading: Reading, rows: Rows) -> Iterator[pyarrow.RecordBatch]:
        uid = self._uid(wanted)
        if not uid:
            yield from _lost(wanted, wanted.first, wanted.end, "it is not in the directory", reading, rows)
            return
        copies = self._copies(uid)
        first = wanted.first
        if first < copies[0].machine.start:
            stop = min(copies[0].machine.start, wanted.end)
            yield from _lost(wanted, first, stop, "they were truncated before they were read", reading, rows)
            first = stop
        for number, copy in enumerate(copies):
            end = min(wanted.end, copy.machine.end)
            try:
                with plain_errors(f"log {wanted.log!r}", copy.node.directory):
                    for _ in rows.read(copy, first, end):
                        yield from rows.full()
                first = max(first, end)
            except LogyardError as error:
                if error.code != "corrupt" or number + 1 == len(copies):
                    raise
                log.warning("%s; going on with the directory of node %d", error, copies[number + 1].node.node)
                first = rows.next
            if first >= wanted.end:
                return
        raise OutOfRange(
            f"log {wanted.log!r}: records {first}..{wanted.end - 1} are not known to be committed in {self._path}; it "
            f"ends at {first}"
        )


def differences(uid: int, nodes: Sequence[StoppedNode]) -> Iterator[str]:
    """Yield what keeps copies of one log from being one log: an entry that two directories know to be committed, in
    different terms (a member that was cut off by a forced change of members, say)."""
    logs = [log for node in nodes if (log := node.unread(uid)) is not None]
    for number, one in enumerate(logs):
        for other in logs[:number]:
            index = one.parts_from(other)
            if index:
                yield (
                    f"log {one.name!r}: {other.node.directory} and {one.node.directory} hold different entries "
                    f"{index}, and both as committed: they are no copies of each other; name the directory to be read"
                )


def _lost(
    wanted: Wanted, first: int, stop: int, why: str, reading: Reading, rows: Rows
) -> Iterator[pyarrow.RecordBatch]:
    if not reading.gaps:
        raise DataLoss(
            f"log {wanted.log!r}: records {first}..{stop - 1}: {why}; read from a later offset, or set "
            "failOnDataLoss=false to go on with a row of kind 'gap'",
            log=wanted.log,
            first=first,
            end=stop,
        )
    rows.gap(wanted.log, first, stop - first)
    yield from rows.full()


def _offset_at(found: StoppedLog, time_ms: int) -> int:
    """Return the first offset at or after a time: anchors do not know times, so the entries are walked; their times
    never fall."""
    from .records import walk

    machine = found.machine
    for located, slices in walk(found, machine.start, machine.end):
        if slices and timestamp_of(located.data) >= time_ms:
            return slices[0].offset
    return machine.end

"""Spark's place in a test of a stream without a JVM: offsets and commits in a directory, tasks run here.

What counts is what Spark does, as tried: `initialOffset` each time when the beginning of a new query is needed, also
by a later process, since it is kept nowhere; a first batch even if there is nothing in it; the offset is written before
its batch runs and the commit after it; `commit` of the source at the start of the next batch and never for the last
one; a batch without a commit is planned and read again from its two offsets, by a new reader; nobody calls `stop`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logyard.pipeline.datasource import LogyardDataSource
from logyard.pipeline.stream import StreamPartition, StreamReader

Rows = list[dict[str, Any]]


class Killed(Exception):
    """The query died here."""


class PlainQuery:
    """A query over a checkpoint `path`; each one is a restart. `sink` gets each batch's number and rows."""

    def __init__(self, path: Path, options: dict[str, str], sink: Callable[[int, Rows], object]) -> None:
        self.offsets = path / "offsets"
        self.commits = path / "commits"
        self.offsets.mkdir(parents=True, exist_ok=True)
        self.commits.mkdir(exist_ok=True)
        self.sink = sink
        source = LogyardDataSource(options)
        reader = source.streamReader(source.schema())
        assert isinstance(reader, StreamReader)
        self.reader = reader
        self.pinned = False
        self.kill_after: str = ""

    def available_now(self) -> int:
        """Run until there is nothing new; returns how many batches."""
        self.reader.prepareForTriggerAvailableNow()
        count = 0
        while self.trigger():
            count += 1
            assert count < 10_000, "it does not end"
        return count

    def trigger(self) -> bool:
        """Run one batch, the unfinished one first; returns whether there was one."""
        number = len(list(self.offsets.iterdir()))
        done = len(list(self.commits.iterdir()))
        if done < number:
            self.run(number - 1)
            return True
        start = self.start(number)
        limit = self.reader.getDefaultReadLimit()
        end = through_json(self.reader.latestOffset(start, limit))
        self.reader.reportLatestOffset()
        if end == start and number:
            return False
        (self.offsets / str(number)).write_text(json.dumps(end), "utf-8")
        if number:
            self.reader.commit(start)
        self.die("offset")
        self.run(number)
        return True

    def run(self, number: int) -> None:
        start, end = self.start(number), self.offset(number)
        rows = [row for task in self.tasks(start, end) for row in self.read(task)]
        self.die("read")
        self.sink(number, rows)
        self.die("sink")
        (self.commits / str(number)).touch()

    def tasks(self, start: Any, end: Any) -> list[StreamPartition]:
        found = self.reader.partitions(start, end)
        assert all(isinstance(one, StreamPartition) for one in found)
        return found  # type: ignore[return-value]

    def read(self, task: StreamPartition) -> Rows:
        """In another process, as far as objects go."""
        reader, task = pickle.loads(pickle.dumps((self.reader, task)))
        return [row for batch in reader.read(task) for row in batch.to_pylist()]

    def start(self, number: int) -> Any:
        """Where a batch begins: Spark keeps that of the first one nowhere, and asks each time."""
        return through_json(self.reader.initialOffset()) if not number else self.offset(number - 1)

    def offset(self, number: int) -> Any:
        return json.loads((self.offsets / str(number)).read_text("utf-8"))

    def die(self, point: str) -> None:
        if self.kill_after == point:
            raise Killed(point)


def through_json(value: Any) -> Any:
    """As it comes back from Spark."""
    return json.loads(json.dumps(value))

"""Spark's place in a test without a JVM: tasks run here, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow


class Here:
    """As much of a session as `jobs.running` uses."""

    def __init__(self) -> None:
        self._numbers = 0
        self._run: Callable[[Iterator[Any]], Iterator[Any]] = iter

    def range(self, first: int, end: int, step: int, partitions: int) -> Here:
        assert (first, step, partitions) == (0, 1, end)
        self._numbers = end
        return self

    def mapInArrow(self, run: Callable[[Iterator[Any]], Iterator[Any]], schema: str) -> Here:
        self._run = run
        return self

    def collect(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = []
        for number in range(self._numbers):
            batch = pyarrow.RecordBatch.from_pydict({"id": [number]})
            found += (row for part in self._run(iter([batch])) for row in part.to_pylist())
        return found

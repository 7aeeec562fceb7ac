"""Tasks of a job in Spark: a function and a list of its arguments, results as plain values while the job goes on.

Works on a local session, a cluster and Spark Connect alike: nothing but `range` and `mapInArrow` is used. Tasks run in
waves, so that whoever waits sees progress. Called by the jobs.
"""

from __future__ import annotations

import heapq
import json
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..options import Options

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import SparkSession

T = TypeVar("T")
Result: TypeAlias = dict[str, Any]
Progress: TypeAlias = Callable[[int], object]
"""Called with how much more is done, in the unit of the job's total."""
Work: TypeAlias = Callable[[T], Iterable[Result]]
WAVE = 8
"""Tasks of one wave, at least: a wave costs a tenth of a second, and at its end cores wait for the slowest."""
WAVES = 16


def silent(_: int) -> None:
    """Do nothing with progress that nobody looks at."""


def run_tasks(spark: SparkSession, work: Work[T], tasks: Sequence[T]) -> Iterator[Result]:
    """Yield the results of `work(task)` for each task, in no order. `work` is a function of a module (or a partial of
    one); results are what JSON can say."""
    wave = max(WAVE, -(-len(tasks) // WAVES))
    for first in range(0, len(tasks), wave):
        packed = [pickle.dumps(task) for task in tasks[first : first + wave]]
        numbers = spark.range(0, len(packed), 1, len(packed))
        for row in numbers.mapInArrow(_runner(work, packed), "result string").collect():
            yield json.loads(row["result"])


def _runner(work: Work[Any], packed: Sequence[bytes]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def run(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow

        for batch in batches:
            for number in batch.column(0).to_pylist():
                for result in work(pickle.loads(packed[number])):
                    yield pyarrow.RecordBatch.from_pydict({"result": [json.dumps(result)]})

    return run


def not_there(options: Options, there: Collection[str]) -> list[str]:
    """Return what is wrong where logs that are named are nowhere."""
    return [f"log {name!r} is not there" for name in sorted({*(options.names or ())} - {*there})]


def bins(items: Iterable[tuple[int, T]], count: int) -> list[list[T]]:
    """Distribute (weight, item) pairs over at most `count` bins of about equal weight."""
    heap: list[tuple[int, int]] = [(0, number) for number in range(count)]
    found: list[list[T]] = [[] for _ in range(count)]
    for weight, item in sorted(items, key=lambda pair: -pair[0]):
        load, number = heap[0]
        found[number].append(item)
        heapq.heapreplace(heap, (load + max(weight, 1), number))
    return [one for one in found if one]

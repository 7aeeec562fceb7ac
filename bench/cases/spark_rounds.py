"""What the cases of `logyard bench spark` share: where they run, alternating rounds, and what is asked of a figure."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from ..cluster import Cluster
from ..processes import cpu_seconds
from ..settings import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from logyard.client.sync import Yard

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Ground:
    """Where a case runs. `numbers` tells its tables, sinks and logs from those of another round; `filled` are the logs
    that a case has filled for those behind it."""

    spark: SparkSession
    cluster: Cluster
    yard: Yard
    settings: SparkSettings
    directory: Path
    say: Callable[[str], None]
    numbers: list[int] = field(default_factory=list)
    filled: set[str] = field(default_factory=set)

    @property
    def servers(self) -> dict[str, str]:
        """Return the cluster as options of the format."""
        return {"servers": ",".join(self.cluster.addresses)}

    def number(self) -> int:
        """Return a number that no other round has."""
        self.numbers.append(len(self.numbers))
        return self.numbers[-1]


class Demand(NamedTuple):
    """What is asked of a figure; `nodes`: on so many nodes alone."""

    figure: str
    least: float | None = None
    most: float | None = None
    nodes: int | None = None

    def missed(self, figures: Mapping[str, Any], nodes: int) -> str | None:
        """Return what to say of a figure that is not there or not as asked."""
        if self.nodes not in (None, nodes):
            return None
        found = figures.get(self.figure)
        if found is None:
            return f"{self.figure}: was not measured"
        if self.least is not None and found < self.least:
            return f"{self.figure}: {found}; at least {self.least:g} is asked for"
        if self.most is not None and found > self.most:
            return f"{self.figure}: {found}; at most {self.most:g} is asked for"
        return None


class Took(NamedTuple):
    """What a run took: seconds, and the processor time of all of this program's processes, the nodes' and Spark's among
    them. The second tells more on a machine that has other work."""

    wall_s: float
    cpu_s: float


def took(run: Callable[[], object]) -> Took:
    """Return what a run takes."""
    began, used = time.monotonic(), cpu_seconds(os.getpid())
    run()
    return Took(time.monotonic() - began, cpu_seconds(os.getpid()) - used)


def alternating(measures: Mapping[str, Callable[[], Took]], rounds: int = ROUNDS) -> dict[str, Took]:
    """Return the medians of each measure over rounds of all of them in turn. The round before them counts for nothing:
    workers start, classes load."""
    found: dict[str, list[Took]] = {name: [] for name in measures}
    for number in range(rounds + 1):
        for name, measure in measures.items():
            got = measure()
            if number:
                found[name].append(got)
    return {name: Took(*map(median, zip(*values, strict=True))) for name, values in found.items()}


def with_ratio(name: str, units: float, ours: Took, null: Took) -> dict[str, Any]:
    """Return the figures of a rate: ours, what costs nothing, and how they compare, by time and by processor time."""
    return {
        name: round(units / ours.wall_s), f"{name}_null": round(units / null.wall_s),
        f"{name}_ratio": round(null.wall_s / ours.wall_s, 3), f"{name}_cpu_ratio": round(null.cpu_s / ours.cpu_s, 3),
    }  # fmt: skip

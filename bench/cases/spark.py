"""`logyard bench spark`: the format logyard on ``local[2]`` beside what PySpark itself takes from a source that costs
nothing, or gives to a sink that drops it (`spark_ceiling`).

Each case is medians of alternating rounds in one session, and can be run alone. What is asked of its figures stands
beside it in `CASES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..calibrate import describe_machine
from ..cluster import Cluster
from ..settings import SPARK_CASES, SparkSettings
from .spark_batch import audit_case, memory_case, payload_case, plan_case, rows_case
from .spark_rounds import Demand, Ground
from .spark_sinks import direct_case, once_case
from .spark_stream import dead_case, idle_case, live_case, stream_case
from .spark_tables import tables_case

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Case(NamedTuple):
    """One case: on how many nodes it runs unless told, what it does, and what is asked of its figures."""

    nodes: tuple[int, ...]
    run: Callable[[Ground], dict[str, Any]]
    demands: tuple[Demand, ...]


CASES: Mapping[str, Case] = {
    "rows": Case((1,), rows_case, (Demand("rows_per_s", 500_000),)),
    "payload": Case((1,), payload_case, (Demand("mb_per_s", 300),)),
    "plan": Case((1,), plan_case, (Demand("plan_s", most=2),)),
    "audit": Case((1,), audit_case, (Demand("audit_worker_peak_mib", most=1024),)),
    "memory": Case((1,), memory_case, (Demand("worker_peak_mib", most=300),)),
    "stream": Case(
        (3,), stream_case, (Demand("stream_rows_per_s", 800_000), Demand("stream_limited_rows_per_s", 400_000))
    ),
    "live": Case(
        (3,), live_case,
        (Demand("stream_batch_ms", most=400), Demand("stream_batch_p90_ms", most=600),
         Demand("stream_driver_process_mib", most=150)),
    ),
    "idle": Case(
        (3,), idle_case,
        (Demand("idle_calls_per_node_and_trigger", most=1), Demand("idle_source_core_percent", most=2),
         Demand("idle_nodes_core_percent", most=2)),
    ),
    "direct": Case(
        (1, 3), direct_case,
        (Demand("direct_rows_per_s_ratio", 0.7, nodes=1), Demand("direct_mb_per_s_ratio", 0.7, nodes=1),
         Demand("direct_rows_per_s_ratio", 0.6, nodes=3), Demand("direct_rows_per_s", 400_000, nodes=3),
         Demand("direct_mb_per_s_ratio", 0.45, nodes=3), Demand("direct_mb_per_s", 130, nodes=3)),
    ),
    "once": Case(
        (3,), once_case,
        (Demand("once_rows_per_s", 70_000), Demand("once_alone_rows_per_s", 100_000), Demand("once_mb_per_s", 65)),
    ),
    "tables": Case((3,), tables_case, (Demand("tables_ratio", 0.6),)),
    "dead": Case((3,), dead_case, (Demand("dead_node_ratio", most=1.5),)),
}  # fmt: skip
assert tuple(CASES) == SPARK_CASES


def counts_of(cases: Iterable[str], nodes: int | None) -> list[tuple[int, list[str]]]:
    """Return which cases run on how many nodes."""
    counts = sorted({count for name in cases for count in (CASES[name].nodes if nodes is None else (nodes,))})
    return [
        (count, [name for name in cases if count in (CASES[name].nodes if nodes is None else (nodes,))])
        for count in counts
    ]


def run_spark(
    settings: SparkSettings, cases: Iterable[str], cluster: Cluster, directory: Path, spark: SparkSession,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Run cases on one cluster; return the figures of each, with `problems`."""
    from logyard.client.sync import connect_sync

    from .spark_ceiling import CeilingSource

    spark.dataSource.register(CeilingSource)
    found = []
    with connect_sync(cluster.addresses) as yard:
        ground = Ground(spark, cluster, yard, settings, directory, say)
        for name in cases:
            say(f"{name}, {cluster.count} nodes")
            figures = CASES[name].run(ground)
            missed = (demand.missed(figures, cluster.count) for demand in CASES[name].demands)
            problems = [*figures.pop("problems", ()), *(said for said in missed if said)]
            found.append({"case": name, "nodes": cluster.count, **figures, "problems": problems})
    return found


def report_of(settings: SparkSettings, results: list[dict[str, Any]], directory: Path) -> dict[str, Any]:
    """Return the report with `ok`."""
    machine = describe_machine(directory)
    problems = [f"{one['case']}, {one['nodes']} nodes: {problem}" for one in results for problem in one["problems"]]
    return {
        "ok": not problems, "case": "spark", **asdict(settings), "results": results, "problems": problems,
        "filesystem": machine["filesystem"], "machine": machine,
    }  # fmt: skip

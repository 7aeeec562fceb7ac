"""From the load processes' results to the figures of the report, and the checks that a figure must pass.

ops/s times mean latency must give the window (Little's law): a stalled or miscounted run does not. Called by
`bench.cases.append`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .histogram import Histogram


def merged(results: Sequence[Mapping[str, Any]]) -> Histogram:
    """Return one histogram of all processes."""
    total = Histogram()
    for result in results:
        total.merge(Histogram.load(**result["histogram"]))
    return total


def append_figures(
    results: Sequence[Mapping[str, Any]], *, size: int, clients: int, window: int, seconds: float
) -> dict[str, Any]:
    """Return the keys of `bench append` that the load processes know. `window_agreement` is 1.0 in a sound run."""
    latency = merged(results)
    counted = sum(int(result["counted"]) for result in results)
    rate = counted / seconds
    return {
        "ops_per_s": round(rate, 1),
        "mb_per_s": round(rate * size / 1e6, 3),
        "p50_ms": round(latency.quantile(0.50) * 1e3, 3),
        "p99_ms": round(latency.quantile(0.99) * 1e3, 3),
        "mean_ms": round(latency.mean * 1e3, 3),
        "worst_ms": round(latency.worst_seconds * 1e3, 3),
        "window_agreement": round(rate * latency.mean / (clients * window), 3),
        "acknowledged": sum(int(result["acknowledged"]) for result in results),
        "failed": sum(int(result["failed"]) for result in results),
        "verified": sum(int(result["verified"]) for result in results),
        "client_cpu_s": round(sum(float(result["cpu_s"]) for result in results), 3),
        "problems": [problem for result in results for problem in result["problems"]],
    }


def shares(total: int, parts: int) -> list[int]:
    """Split `total` into `parts` that differ by at most one."""
    return [total // parts + (number < total % parts) for number in range(parts)]

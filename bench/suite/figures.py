"""From raw samples to medians with their spread, and from two runs to ratios. Pure: no file, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .table import CASES, Case, case_of

CLIENT_BOUND = 0.85
"""From this share of a core on, a load process is suspected of being what is measured."""
CARRIED = (
    "p50_ms", "p99_ms", "mb_per_s", "server_cpu_us_per_op", "written_bytes_per_op", "server_resident_bytes",
    "client_share",
)  # fmt: skip
"""Shown beside a figure, each as its own median."""


class Row(NamedTuple):
    """A case and a system: the median of its rounds, the least and the most. `failed`: what was said of rounds
    without a figure; `ours` of one's report; `beside`: medians of what is shown beside it."""

    case: Case
    system: str
    version: str
    rounds: int
    median: float
    low: float
    high: float
    beside: Mapping[str, float]
    failed: Sequence[str]
    notes: Sequence[str]


def rows(samples: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return one row for each case and system, in the table's order; a system that gave no figure has median 0."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for sample in samples:
        found.setdefault((str(sample["case"]), str(sample["system"])), []).append(sample)
    order = {case.name: number for number, case in enumerate(CASES)}
    return [_row(case_of(name), system, found[name, system]) for name, system in sorted(
        found, key=lambda key: (order[key[0]], key[1])
    )]  # fmt: skip


def _row(case: Case, system: str, samples: Sequence[Mapping[str, Any]]) -> Row:
    good = [sample["figures"] for sample in samples if not sample.get("failed")]
    values = [float(one[case.figure]) for one in good if one.get(case.figure) is not None]
    beside = {}
    for key in CARRIED:
        there = [float(one[key]) for one in good if one.get(key) is not None]
        if there:
            beside[key] = statistics.median(there)
    notes = list(dict.fromkeys(note for sample in samples for note in sample.get("notes", [])))
    if beside.get("client_share", 0.0) >= CLIENT_BOUND:
        notes.append("the load processes were busy: the system may do more")
    return Row(
        case,
        system,
        str(next((sample["version"] for sample in samples if sample.get("version")), "")),
        len(values),
        statistics.median(values) if values else 0.0,
        min(values, default=0.0),
        max(values, default=0.0),
        beside,
        list(dict.fromkeys(str(sample["failed"]) for sample in samples if sample.get("failed"))),
        notes,
    )


class Change(NamedTuple):
    """A case and system in two runs. `ratio` is B over A as a gain: above 1 is better, whatever the figure counts;
    `low` and `high`: the least and the most that the rounds allow. `worse`: beyond the tolerance."""

    case: str
    system: str
    before: Row
    after: Row
    ratio: float
    low: float
    high: float
    worse: bool


def compare(before: Sequence[Row], after: Sequence[Row], tolerance: float) -> tuple[list[Change], list[str]]:
    """Return what both runs have, and in words what only one of them has."""
    olds = {(row.case.name, row.system): row for row in before if row.rounds}
    news = {(row.case.name, row.system): row for row in after if row.rounds}
    changes = [_change(olds[key], news[key], tolerance) for key in olds if key in news]
    missing = [f"{key[0]} of {key[1]} is only in A" for key in olds if key not in news]
    missing += [f"{key[0]} of {key[1]} is only in B" for key in news if key not in olds]
    return changes, missing


def _change(old: Row, new: Row, tolerance: float) -> Change:
    gain = _over if old.case.more else lambda after, before: _over(before, after)
    ends = [gain(after, before) for after in (new.low, new.high) for before in (old.low, old.high)]
    ratio = gain(new.median, old.median)
    return Change(old.case.name, old.system, old, new, ratio, min(ends), max(ends), ratio < 1.0 - tolerance)


def _over(value: float, other: float) -> float:
    return value / other if other else (1.0 if not value else float("inf"))

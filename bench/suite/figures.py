"""From raw samples to medians with their spread, and from two runs to ratios. Pure: no file, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from .table import CASES, OURS, Case, case_of

CLIENT_BOUND = 0.85
"""From this share of a core on, a load process is suspected of being what is measured."""
TIME = "%Y-%m-%dT%H:%M:%SZ"
APART_S = 3600.0
"""Between two samples of a round: a shared machine's hours differ by more than most systems do."""
CARRIED = (
    "p50_ms", "p99_ms", "mb_per_s", "server_cpu_us_per_op", "written_bytes_per_op", "server_resident_bytes",
    "client_share", "consumed_per_s",
)  # fmt: skip
"""Shown beside a figure, each as its own median."""
SPEEDS = ("loop_millions_per_s", "fdatasync_us", "disk_mb_per_s", "loopback_us")
"""Of the machine right before a sample, likewise: a machine that changed explains a figure."""


class Row(NamedTuple):
    """A case and a system: the median of its rounds, the least and the most. `failed`: what was said of rounds
    without a figure; `beside`: medians of what is shown beside it; `apart`: rounds that were not made in the hour of
    ours, which no ratio is made of; `speeds`: of the machine, before these rounds."""

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
    apart: Sequence[int]
    speeds: Mapping[str, float]


def medians(keys: Sequence[str], found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median of each key over those that have it."""
    values = {key: [float(one[key]) for one in found if one.get(key) is not None] for key in keys}
    return {key: statistics.median(some) for key, some in values.items() if some}


def rows(samples: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return one row for each case and system, in the table's order; a system that gave no figure has median 0."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    known = list(samples)
    for sample in known:
        found.setdefault((str(sample["case"]), str(sample["system"])), []).append(sample)
    ours = {(one["case"], one["round"]): str(one["at"]) for one in known if one["system"] == OURS and one.get("at")}
    order = {case.name: number for number, case in enumerate(CASES)}
    return [_row(case_of(name), system, found[name, system], ours) for name, system in sorted(
        found, key=lambda key: (order[key[0]], key[1])
    )]  # fmt: skip


def _row(case: Case, system: str, samples: Sequence[Mapping[str, Any]], ours: Mapping[tuple[str, int], str]) -> Row:
    timed = [one for one in samples if one.get("at") and not one.get("failed")]
    apart = [
        int(one["round"]) for one in timed if _seconds_between(one["at"], ours.get((case.name, one["round"]))) > APART_S
    ]
    made = [sample for sample in samples if not sample.get("failed")]
    good = [sample["figures"] for sample in made]
    values = [float(one[case.figure]) for one in good if one.get(case.figure) is not None]
    beside = medians(CARRIED, good)
    notes = list(dict.fromkeys(note for sample in samples for note in sample.get("notes", [])))
    if beside.get("client_share", 0.0) >= CLIENT_BOUND:
        notes.append("the load processes were busy: the system may do more")
    if apart:
        notes.append(f"not made in the hour of ours: rounds {', '.join(map(str, apart))}")
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
        apart,
        medians(SPEEDS, [sample.get("machine") or {} for sample in made]),
    )


def _seconds_between(at: str, other: str | None) -> float:
    return abs((_time_of(at) - _time_of(other)).total_seconds()) if other else 0.0


def _time_of(at: str) -> datetime:
    return datetime.strptime(at, TIME)


class Change(NamedTuple):
    """A case and system in two runs. `ratio` is B over A as a gain: above 1 is better, whatever the figure counts;
    `low` and `high`: the least and the most that the rounds allow. `worse`: beyond the tolerance, or of our own a
    round of B failed and none of A."""

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
    news = {(row.case.name, row.system): row for row in after if row.rounds or (row.system == OURS and row.failed)}
    changes = [_change(olds[key], news[key], tolerance) for key in olds if key in news]
    missing = [f"{key[0]} of {key[1]} is only in A" for key in olds if key not in news]
    missing += [f"{key[0]} of {key[1]} is only in B" for key in news if key not in olds and news[key].rounds]
    return changes, missing


def _change(old: Row, new: Row, tolerance: float) -> Change:
    if not new.rounds:
        return Change(old.case.name, old.system, old, new, 0.0, 0.0, 0.0, True)
    gain = _over if old.case.more else lambda after, before: _over(before, after)
    ends = [gain(after, before) for after in (new.low, new.high) for before in (old.low, old.high)]
    ratio = gain(new.median, old.median)
    broken = old.system == OURS and bool(new.failed) and not old.failed
    return Change(old.case.name, old.system, old, new, ratio, min(ends), max(ends), broken or ratio < 1.0 - tolerance)


def _over(value: float, other: float) -> float:
    return value / other if other else (1.0 if not value else float("inf"))

"""Seeds in processes of their own, so that all cores are used. Called by `__main__`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeAlias

from .run import Result, Run

Job: TypeAlias = tuple[int, float, int, tuple[str, ...] | None, int, tuple[str, ...] | None]
"""Seed, minutes, groups, verbs (None: all), how many of them are forced, features (None: as before there were any)."""


def run_one(job: Job) -> Result:
    """One seed, in whatever process."""
    seed, minutes, groups, verbs, share, features = job
    allowed = None if verbs is None else frozenset(verbs)
    try:
        return _run(seed, minutes, groups, allowed, share, features)
    finally:
        # A run makes circles of everything it has, and collects nothing while it lasts.
        gc.collect()


def _run(
    seed: int, minutes: float, groups: int, allowed: frozenset[str] | None, share: int, features: tuple[str, ...] | None
) -> Result:
    return Run(seed, minutes, groups, allowed, share, None if features is None else frozenset(features)).go()


def results(jobs: Sequence[Job], workers: int) -> Iterator[Result]:
    """In the order of the jobs."""
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    if workers == 1:
        yield from map(run_one, jobs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_one, jobs)

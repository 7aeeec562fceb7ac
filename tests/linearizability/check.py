"""A whole history: one verdict a key, keys in parallel where there is enough to do, early exit at the first bad one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

from .cell import solve_cell
from .fifo import solve_queue
from .history import Histories, Operation, Value, read_histories
from .transactions import solve_transactions
from .verdict import CONFIGURATIONS_MAX, Verdict

PARALLEL_FROM = 5_000
"""Operations below which starting processes costs more than they save."""
Solver = Callable[[list[Operation], int], Verdict]
SOLVERS: dict[str, Solver] = {"register": solve_cell, "kv": solve_cell, "queue": solve_queue, "txn": solve_transactions}


class Outcome(NamedTuple):
    """`valid` is None if a key was not decided; `key` and `reason` are those of the first key that is not valid."""

    valid: bool | None
    operations: int
    keys: int
    key: Value = None
    reason: str = ""


def check(lines: Iterable[str], model: str, configurations: int = CONFIGURATIONS_MAX) -> Outcome:
    """Check a history. Raises `BadHistory`."""
    histories, operations = read_histories(lines, model)
    undecided: tuple[Value, str] | None = None
    verdicts = _verdicts(histories, model, configurations, operations >= PARALLEL_FROM and len(histories) > 1)
    for key, verdict in verdicts:
        if verdict.valid is False:
            verdicts.close()
            return Outcome(False, operations, len(histories), key, verdict.reason)
        if verdict.valid is None and undecided is None:
            undecided = key, verdict.reason
    if undecided is not None:
        return Outcome(None, operations, len(histories), *undecided)
    return Outcome(True, operations, len(histories))


def _verdicts(histories: Histories, model: str, configurations: int, parallel: bool):  # type: ignore[no-untyped-def]
    """(key, verdict) pairs, as they come."""
    solve = SOLVERS[model]
    if not parallel:
        for key, items in histories.items():
            yield key, solve(items, configurations)
        return
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        futures = {pool.submit(solve, items, configurations): key for key, items in histories.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

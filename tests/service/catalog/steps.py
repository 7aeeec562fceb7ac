"""Work in steps where there is no loop."""

from __future__ import annotations

from typing import TypeVar

from logyard.service.catalog.steps import Steps

Result = TypeVar("Result")


def counted(steps: Steps[Result]) -> tuple[Result, int]:
    """Return what work comes to, and its steps."""
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Result = end.value
            return found, count
        count += 1

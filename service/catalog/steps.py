"""Work in steps, for whoever has much to look at: others have their turn in between, so what an earlier step read may
have changed. Called by the keeper; its planner, reconciler and sleepers work so."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeVar

import trio

Result = TypeVar("Result")
Item = TypeVar("Item")

Steps = Generator[None, None, Result]
"""Work that stops after each step, of a millisecond or so, and returns something at its end."""
ITEMS = 64
"""So many rows of the catalogue, read or looked for, are a step."""


async def in_turns(steps: Steps[Result]) -> Result:
    """Return what work comes to; every other task that can run does so after each step."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Result = end.value
            return found
        await trio.sleep(0)


def listed(items: Iterable[Item]) -> Steps[list[Item]]:
    """Return all items, read in steps."""
    found: list[Item] = []
    for number, item in enumerate(items, 1):
        found.append(item)
        if number % ITEMS == 0:
            yield
    return found

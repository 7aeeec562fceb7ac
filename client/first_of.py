"""The first of several questions that has an answer, under either library. Used by the asynchronous yards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from logyard.protocol.errors import LogyardError
from logyard.protocol.records import Page

from .runtime import Runtime


async def first_of(
    runtime: Runtime, polls: Sequence[Callable[[float], Any]], wait: float
) -> tuple[int, Page] | None:  # fmt: skip
    """Ask all at once, each of which waits so many seconds at most; return which one had records first, and those. None
    when none had. Raises what the first one to fail was refused with."""
    found: list[tuple[int, Page]] = []
    failed: list[LogyardError] = []

    async def ask(number: int, poll: Callable[[float], Any]) -> None:
        try:
            page = await poll(wait)
        except LogyardError as error:
            failed.append(error)
            page = None
        if failed or (page is not None and len(page)):
            if not failed:
                found.append((number, page))
            nursery.cancel_scope.cancel()

    async with runtime.nursery() as nursery:
        for number, poll in enumerate(polls):
            nursery.start_soon(ask, number, poll)
    if found:
        return found[0]
    if failed:
        raise failed[0]
    return None

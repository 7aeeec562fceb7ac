"""A nursery beside a caller's block, which the caller's exceptions leave as they were raised.

A nursery of either library wraps whatever leaves it in an `ExceptionGroup`, so that an ``except ValueError`` around a
client or an embedded system would not catch its own block's error. Used by `aio.connect`, `service.embedded` and
`service.memory_cluster`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

from .runtime import Nursery

N = TypeVar("N", bound=Nursery)


@asynccontextmanager
async def background(
    opening: AbstractAsyncContextManager[N], cancelled: type[BaseException]
) -> AsyncIterator[N]:  # fmt: skip
    """Give a nursery, `opening` when it is entered, whose tasks are cancelled when the block ends. `cancelled`: what
    its library throws at a cancelled task.

    What the block raises leaves as it is; what a task failed with beside it is the end of its chain of contexts. A
    task's failure ends the block, and leaves as it is if it is the only one; several are a group.
    """
    failure: BaseException | None = None
    beside: BaseException | None = None
    try:
        async with opening as nursery:
            try:
                yield nursery
            except BaseException as error:
                if _is_cancelled(error, cancelled):
                    # For the scope that was cancelled: this nursery's, or one further out.
                    raise
                failure = error
            nursery.cancel_scope.cancel()
    except BaseException as error:
        beside = _only(error)
    if failure is None:
        failure, beside = beside, None
    if failure is not None:
        if beside is not None:
            _last(failure).__context__ = beside
        raise failure


def _is_cancelled(error: BaseException, cancelled: type[BaseException]) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_is_cancelled(one, cancelled) for one in error.exceptions)
    return isinstance(error, cancelled)


def _only(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _last(error: BaseException) -> BaseException:
    seen = {id(error)}
    while error.__context__ is not None and id(error.__context__) not in seen:
        error = error.__context__
        seen.add(id(error))
    return error

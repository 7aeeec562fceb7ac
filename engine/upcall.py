"""Calls from a floor of the engine up to one that stands on it, and so is not there yet while it is built.

A floor is composed with nothing but what lies below it. What it tells those above, or asks them, is declared in its
`Above`, one `Upcall` each; its parts are given the upcall as a plain callable. Whoever composes the engine binds each
of them, once, when there is somebody to hear it; whoever tries a floor alone binds doubles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Upcall(Generic[P, R]):
    """One call, `Upcall[[int, str], bool]()`: bound before it is made."""

    __slots__ = ("_to",)

    def __init__(self) -> None:
        self._to: Callable[P, R] | None = None

    def bind(self, to: Callable[P, R]) -> None:
        """Have `to` called from now on."""
        assert self._to is None, "somebody hears it already"
        self._to = to

    @property
    def is_bound(self) -> bool:
        """Whether somebody hears it."""
        return self._to is not None

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        """Make the call."""
        assert self._to is not None, "nobody hears it yet"
        return self._to(*arguments, **named)


class Upcalls:
    """The calls of one floor, as attributes."""

    def unbound(self) -> list[str]:
        """Name those that nobody hears."""
        return sorted(name for name, one in vars(self).items() if isinstance(one, Upcall) and not one.is_bound)

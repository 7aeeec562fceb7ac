"""What a planted bug is: product code with one thing in it replaced. Used by the lists of bugs and by `planted`."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from .disk import SimDisk


class Stale(Exception):
    """The product has changed where a planted bug changes it: the bug has to be planted anew."""


Swap = tuple[Any, str, Callable[[Any], Any]]
"""Where, which name, and what the old one becomes."""


class Bug(NamedTuple):
    """`rule`: what it breaks. `swaps`: the override."""

    name: str
    rule: str
    swaps: Sequence[Swap]
    # Whether it takes the features of fresh seeds to see it, or which ones.
    featured: bool | frozenset[str] = False


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Product code with this bug in it."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, make in bug.swaps:
            before = owner.__dict__.get(name)
            if before is None:
                raise Stale(f"{bug.name}: {owner.__name__} has no {name} any more")
            swapped = make(before)
            swapped.original = before
            undo.append((owner, name, before))
            setattr(owner, name, swapped)
        yield
    finally:
        for owner, name, before in reversed(undo):
            setattr(owner, name, before)


@contextmanager
def unplanted(bug: Bug) -> Iterator[None]:
    """Within `planted`: the product as it is."""
    inside = [(owner, name, owner.__dict__[name]) for owner, name, _ in bug.swaps]
    for owner, name, swapped in inside:
        setattr(owner, name, swapped.original if hasattr(swapped, "original") else swapped)
    try:
        yield
    finally:
        for owner, name, swapped in inside:
            setattr(owner, name, swapped)


def edited(*edits: tuple[str, str]) -> Callable[[Any], Any]:
    """A function with some of its text replaced: a mended bug put back. Raises `Stale` where the text is not found."""

    def make(old: Any) -> Any:
        text = textwrap.dedent(inspect.getsource(old))
        for before, after in edits:
            if text.count(before) != 1:
                raise Stale(f"{old.__qualname__} has {text.count(before)} times: {before}")
            text = text.replace(before, after)
        found: dict[str, Any] = {}
        exec(
            compile(text, f"<planted in {old.__qualname__}>", "exec", __future__.annotations.compiler_flag),
            old.__globals__,
            found,
        )
        return found[old.__name__]

    return make


@contextmanager
def hidden(objects: Iterable[Any], name: str, empty: Callable[[], Any]) -> Iterator[None]:
    """One attribute of some objects is empty meanwhile."""
    kept = [(one, getattr(one, name)) for one in objects]
    for one, _ in kept:
        setattr(one, name, empty())
    try:
        yield
    finally:
        for one, value in kept:
            setattr(one, name, value)


def nothing(old: Any) -> Any:
    """A step that is left out."""
    return lambda *arguments, **named: None


def without(method: str) -> Callable[[Any], Any]:
    """A call during which the disk leaves out one kind of sync."""

    def make(old: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            before = SimDisk.__dict__[method]
            setattr(SimDisk, method, lambda self, target: None)
            try:
                return old(*arguments, **named)
            finally:
                setattr(SimDisk, method, before)

        return call

    return make

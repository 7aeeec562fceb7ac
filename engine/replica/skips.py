"""Which commands an operator had left out, as a log says it: the skips among its entries. Pure.

A skip is itself a command, and can be skipped: where all members had applied what it names. Used by `quarantine` and by
the offline reader, so that both come to the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from logyard.protocol.frame import SYSTEM

from ..entry import COMMANDS, Entry, frames_of, is_guarded, system_command


class Skip(NamedTuple):
    """The frame at (`at`, `frame`) says that command (`entry`, `ordinal`) is left out."""

    at: int
    frame: int
    entry: int
    ordinal: int


def skips_in(entries: Iterable[Entry]) -> Iterator[Skip]:
    """Yield the skips among entries."""
    for entry in entries:
        if entry.kind == COMMANDS and is_guarded(entry.data):
            for frame in frames_of(entry.data):
                if frame.flags & SYSTEM:
                    name, *arguments = system_command(frame)
                    if name == "skip":
                        yield Skip(entry.index, frame.first, arguments[0], arguments[1])


def in_force(skips: Sequence[Skip]) -> list[Skip]:
    """Return those, in the order of the log, that no later one names."""
    named: set[tuple[int, int]] = set()
    found: list[Skip] = []
    for one in reversed(skips):
        if (one.at, one.frame) not in named:
            named.add((one.entry, one.ordinal))
            found.append(one)
    return found[::-1]


def undecided(skips: Sequence[Skip], commit: int) -> set[int]:
    """Return the entries of which it is not known whether they are applied whole: skips above `commit` name them, or
    skips that name them."""
    found: set[int] = set()
    for one in reversed(skips):
        if one.at > commit or one.at in found:
            found.add(one.entry)
    return found

"""The names of a node's groups: a dictionary of those awake, the table of quiesced groups for the others.

Invariant: a name is in one of the two; it is taken here before its group is durable, and so before there is a member.
Called by `groups`, `quiesce` and recovery.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from heapq import merge, nsmallest
from itertools import islice

from .quiesced_table import QuiescedTable


class Names(MutableMapping[str, int]):
    """name -> uid."""

    __slots__ = ("awake", "_quiesced")

    def __init__(self, quiesced: QuiescedTable) -> None:
        self.awake: dict[str, int] = {}
        self._quiesced = quiesced

    def __getitem__(self, name: str) -> int:
        uid = self.awake.get(name) or self._quiesced.named(name)
        if not uid:
            raise KeyError(name)
        return uid

    def __setitem__(self, name: str, uid: int) -> None:
        self.awake[name] = uid

    def __delitem__(self, name: str) -> None:
        # Who sleeps is woken before it goes.
        del self.awake[name]

    def drop(self, name: str, uid: int) -> None:
        """Let a name go if it is this group's."""
        if self.get(name) == uid:
            del self[name]

    def __len__(self) -> int:
        return len(self.awake) + len(self._quiesced)

    def __iter__(self) -> Iterator[str]:
        yield from list(self.awake)
        yield from self._quiesced.names()

    def behind(self, after: str, limit: int) -> list[str]:
        """Return at most `limit` of them that are greater than `after`, in order."""
        awake = nsmallest(limit, (name for name in self.awake if name > after))
        return list(islice(merge(awake, self._quiesced.names(after, limit)), limit))

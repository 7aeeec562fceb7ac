"""Which payloads of which entries a KV machine keeps, and what it releases.

Invariant: when the last payload of an entry dies, the whole entry is released at once: books of what is dead are kept
by entry where they can be, and would grow for good otherwise. Only an entry that is all of one machine's is released
so: in a mux the others' payloads lie beside its own. Used by `kv`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from logyard.engine.machine import Context, Frame, PayloadRange, Position, Release


class Keeping:
    """`counts`: payloads that live, by entry; `shared`: entries of which others have a part."""

    __slots__ = ("counts", "shared", "_kept")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.shared: set[int] = set()
        self._kept: set[int] = set()

    def keep(self, ordinal: int) -> None:
        """Keep a payload of the entry that is being applied: it is a value now."""
        self._kept.add(ordinal)

    def finish(
        self, context: Context, spans: Sequence[tuple[int, int]], died: Iterable[tuple[int, int]]
    ) -> Iterator[Release]:
        """Yield what the entry releases: `died`, and of its own records, `spans` (rising), those that are not kept."""
        index, kept = context.index, self._kept
        self._kept = set()
        for at, ordinal in died:
            if at == index and ordinal in kept:
                # Written and overwritten by one entry.
                kept.discard(ordinal)
            else:
                yield self._dies(at, ordinal)
        if not spans:
            return
        shown = sum([end - first for first, end in spans]) + sum([records for _, records in context.skipped])
        whole = shown >= context.records
        if kept:
            if not whole:
                self.shared.add(index)
            self.counts[index] = self.counts.get(index, 0) + len(kept)
            yield from _unused(index, spans, sorted(kept))
        elif whole:
            yield Release(Position(index, 0), Position(index + 1, 0))
        else:
            yield from _unused(index, spans, [])

    def _dies(self, index: int, ordinal: int) -> Release:
        left = self.counts[index] - 1
        if left:
            self.counts[index] = left
            return Release(Position(index, ordinal), Position(index, ordinal + 1))
        del self.counts[index]
        if index in self.shared:
            self.shared.discard(index)
            return Release(Position(index, ordinal), Position(index, ordinal + 1))
        return Release(Position(index, 0), Position(index + 1, 0))

    def restore(self, named: Iterable[tuple[int, int]], shared: Iterable[int]) -> None:
        """Begin with the payloads that a state names."""
        self.counts = {}
        for index, _ in set(named):
            self.counts[index] = self.counts.get(index, 0) + 1
        self.shared = set(shared)


def spans_of(frames: Sequence[Frame]) -> list[tuple[int, int]]:
    """Return the ordinals of frames as ranges, neighbours together."""
    spans: list[tuple[int, int]] = []
    for frame in frames:
        first = spans.pop()[0] if spans and spans[-1][1] == frame.first else frame.first
        spans.append((first, frame.first + frame.records))
    return spans


def _unused(index: int, spans: Sequence[tuple[int, int]], kept: list[int]) -> Iterator[Release]:
    """Yield releases of all ordinals of `spans` but those that are `kept` (rising)."""
    at = 0
    for first, end in spans:
        while at < len(kept) and kept[at] < end:
            if first < kept[at]:
                yield Release(Position(index, first), Position(index, kept[at]))
            first = kept[at] + 1
            at += 1
        if first < end:
            yield Release(Position(index, first), Position(index, end))


def ranges(named: Iterable[tuple[int, int]]) -> Iterator[PayloadRange]:
    """Yield payloads as ranges, each once, neighbours together."""
    first: Position | None = None
    end = Position(0, 0)
    for index, ordinal in sorted(set(named)):
        if first is None or end != (index, ordinal):
            if first is not None:
                yield PayloadRange(first, end)
            first = Position(index, ordinal)
        end = Position(index, ordinal + 1)
    if first is not None:
        yield PayloadRange(first, end)

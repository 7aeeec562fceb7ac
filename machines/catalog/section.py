"""A section of the catalogue: rows, the commands that change them, and how they are kept, with a version of its own.

`Catalog` hosts sections and knows nothing of what is in them; only a section decodes its own rows and commands.
Invariant: a command of a section either changes everything that it is about or raises `Reject` and changes nothing, so
it checks first and writes after. A section that needs another one is given, at its construction, a protocol that it
declares itself, and keeps to check-then-write across both. Rows live in `Table`s, which encode themselves in shards: a
shard that nothing happened to gives the same bytes again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import msgpack

ROWS_PER_SHARD = 256
"""Some 20 KiB of rows of logs, and one of 400 shards of 100,000: a change writes as much of the one as of the names of
the others. Numbers are never reused, so a row never changes its shard."""


class At(NamedTuple):
    """Where a command stands: the only clock is `now`, the leader's log time in ms since 1970; `version` is the
    section's that is in force."""

    index: int  # type: ignore[assignment]  # tuple.index is not missed
    now: int
    version: int


class Section(Protocol):
    """What the catalogue hosts."""

    name: ClassVar[str]
    """In commands, and in the names of its shards: letters only."""
    version: ClassVar[int]
    """The newest that this code knows; the first one is 1."""
    commands: ClassVar[Collection[str]]
    """What `apply` takes."""
    questions: ClassVar[Collection[str]]
    """What `ask` answers."""

    def apply(self, at: At, command: str, values: Mapping[str, Any]) -> Any:
        """Apply one of `commands`; return plain values. Raises `Reject`: then nothing has changed."""
        ...

    def ask(self, question: str, values: Mapping[str, Any]) -> Any:
        """Answer one of `questions` from this member's state, in plain values. Raises `Reject`."""
        ...

    def snapshot(self) -> Mapping[str, bytes]:
        """Return the shards by name; those that nothing happened to since the last time are the same objects."""
        ...

    def restore(self, shards: Mapping[str, bytes], version: int) -> None:
        """Take the place of what shards say that were written in `version`; called once, on a fresh section."""
        ...

    def upgrade(self, from_version: int, to_version: int) -> None:
        """Go on as a newer version: at this index on every member."""
        ...


NOTHING = array("I", bytes(4 * ROWS_PER_SHARD))
"""The sizes of a shard without rows."""

Row = TypeVar("Row", bound=tuple[Any, ...])


class Table(Generic[Row]):
    """Rows by number, kept as bytes, in shards of `ROWS_PER_SHARD` numbers each. Numbers are given out once.

    `make` builds a row of the values that were packed: tuples come back as tuples, at any depth. `defaults` are those
    of its last fields: where a row ends with them, they are left out, so they never change. A row is never changed in
    place: `put` another one. A shard is one object of bytes, numbers before their rows, which is what a snapshot
    stores, beside the sizes of what it has, 0 where there is none. A change makes a new one, by copying: some
    microseconds of its 20 KiB, where to take it apart would be hundreds.
    """

    __slots__ = ("name", "next", "changes", "_make", "_defaults", "_shards", "_sizes", "_count")

    def __init__(self, name: str, make: Callable[..., Row], first: int = 1, defaults: Sequence[object] = ()) -> None:
        self.name = name
        self.next = first
        self.changes = 0
        """Counts what came and went of this copy: not part of what is replicated."""
        self._make = make
        self._defaults = tuple(reversed(defaults))
        self._shards: dict[int, bytes] = {}
        self._sizes: dict[int, array[int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        sizes = self._sizes.get(number // ROWS_PER_SHARD)
        return sizes is not None and sizes[number % ROWS_PER_SHARD] > 0

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        """Yield (number, row), by number; rows may come and go meanwhile."""
        for key in sorted(self._shards):
            for number, data in _rows(self._shards.get(key, b"")):
                yield number, self._unpacked(data)

    def get(self, number: int) -> Row | None:
        """Return a row, or None."""
        data = self._packed(number)
        return self._unpacked(data) if data else None

    def add(self, row: Row) -> int:
        """Store a row under a number that no row ever had, and return it."""
        number = self.next
        self.put(number, row)
        return number

    def put(self, number: int, row: Row) -> None:
        """Store a row, in place of the one of that number."""
        # First: what can't be packed changes nothing.
        data: bytes = msgpack.packb(number) + self._packed_row(row)
        self._count += number not in self
        self._splice(number, data)
        self.next = max(self.next, number + 1)

    def skip(self, number: int) -> None:
        """Give out no number up to this one: somebody has it already."""
        self.next = max(self.next, number + 1)

    def drop(self, number: int) -> None:
        """Forget a row; its number is not given out again."""
        if number in self:
            self._splice(number, b"")
            self._count -= 1

    def shards(self) -> dict[str, bytes]:
        """Return the whole table, by names that begin with its own."""
        found = {self.name: msgpack.packb(self.next)}
        found |= {f"{self.name}-{key}": self._shards[key] for key in sorted(self._shards)}
        return found

    def restore(self, shards: Mapping[str, bytes]) -> None:
        """Take the rows that `shards` gave, other tables' shards left aside; they may be of another size. Raises
        ValueError for what is none."""
        self.next = int(msgpack.unpackb(shards[self.name]))
        for name, data in shards.items():
            if name.rpartition("-")[0] == self.name:
                rows = list(_rows(data))
                numbers = [number for number, _ in rows]
                if numbers != sorted({*numbers}) or (numbers and numbers[-1] >= self.next):
                    raise ValueError(f"shard {name!r} has rows of another table")
                for key, found in groupby(rows, lambda row: row[0] // ROWS_PER_SHARD):
                    if key in self._shards:
                        raise ValueError(f"shard {name!r} has rows of another one")
                    packed = [(number, msgpack.packb(number) + data) for number, data in found]
                    sizes = self._sizes[key] = NOTHING[:]
                    for number, data in packed:
                        sizes[number % ROWS_PER_SHARD] = len(data)
                    self._shards[key] = b"".join(data for _, data in packed)
        self._count = sum(len(sizes) - sizes.count(0) for sizes in self._sizes.values())

    def _packed_row(self, row: Row) -> bytes:
        end = len(row)
        for default in self._defaults:
            if row[end - 1] != default:
                break
            end -= 1
        return bytes(msgpack.packb(row[:end]))

    def _packed(self, number: int) -> bytes:
        """Return a row's bytes; none where there is no such row."""
        key, place = divmod(number, ROWS_PER_SHARD)
        sizes = self._sizes.get(key)
        if sizes is None or not (size := sizes[place]):
            return b""
        end = sum(sizes[: place + 1])
        return self._shards[key][end - size + len(msgpack.packb(number)) : end]

    def _splice(self, number: int, data: bytes) -> None:
        """Put a row's bytes, with its number before them, in the place of what was there; none: it goes."""
        key, place = divmod(number, ROWS_PER_SHARD)
        sizes = self._sizes.get(key)
        if sizes is None:
            sizes = self._sizes[key] = NOTHING[:]
        end = sum(sizes[: place + 1])
        shard = self._shards.get(key, b"")
        shard = b"".join((shard[: end - sizes[place]], data, shard[end:]))
        sizes[place] = len(data)
        if shard:
            self._shards[key] = shard
        else:
            del self._shards[key], self._sizes[key]
        self.changes += 1

    def _unpacked(self, data: bytes) -> Row:
        return self._make(*msgpack.unpackb(data, use_list=False, strict_map_key=False))


def _rows(data: bytes) -> Iterable[tuple[int, bytes]]:
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(data)
    while unpacker.tell() < len(data):
        number = unpacker.unpack()
        first = unpacker.tell()
        unpacker.skip()
        yield number, data[first : unpacker.tell()]

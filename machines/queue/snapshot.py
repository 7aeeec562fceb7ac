"""A queue's state as a snapshot's section, and back.

Invariant: a restored queue goes on exactly as the one it was taken of, with the same replies, effects and timers. What
is captured are lists of the runs, which is all that takes time on the loop; the bytes are made by a thread, run by run,
so that it never holds the interpreter for long. A run that changes meanwhile is kept as it was (`runs.Views`). Used by
`machines.queue`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgpack

from logyard.engine.machine import PayloadRange, Position

from .consumers import Consumer, Held
from .options import QueueOptions
from .runs import Kept, Run, Shelf, in_order
from .state import Delayed, QueueState

SECTION = "queue"
ID, COUNT = 1, 2
"""Where they are among a run's fields."""
FIELDS = 15
"""Of the section, where nothing waits for a time of the wall clock."""
PIECE = 1024
"""Rows."""
header = msgpack.Packer().pack_array_header


class Frozen(NamedTuple):
    """A queue as it was. `rest`: the fields behind consumers that are numbers, or short."""

    kept: Kept
    shelves: Sequence[tuple[list[tuple[int, Run]], list[Run]]]
    delayed: list[Delayed]
    consumers: list[tuple[tuple[Any, ...], list[Held]]]
    rest: tuple[Any, ...]

    def sections(self) -> dict[str, bytes]:
        """Return the section: msgpack. From version 2 on, where any wait for a time of the wall clock: their ids at its
        end."""
        fields = self.kept.fields
        at = [fields(one.run)[ID] for one in self.delayed if one.at]
        parts = [header(FIELDS + bool(at)), header(len(self.shelves))]
        for returned, fresh in self.shelves:
            parts += [header(2), *_array(self._there(in_order(returned))), *_array(self._there(fresh))]
        parts += _array((due, ttl_ms, fields(run)) for due, ttl_ms, run, _ in self.delayed)
        parts += _array(
            (own, [(tag, fields(run), deadline) for tag, run, deadline in held]) for own, held in self.consumers
        )
        parts += map(msgpack.packb, (*self.rest, *([at] if at else ())))
        return {SECTION: b"".join(parts)}

    def _there(self, runs: Iterable[Run]) -> Iterator[tuple[Any, ...]]:
        """Yield what runs were, without those that were empty."""
        return (found for found in map(self.kept.fields, runs) if found[COUNT])

    def payloads(self) -> Iterator[PayloadRange]:
        """Yield the bodies of all messages."""
        lying = chain.from_iterable(chain((run for _, run in returned), fresh) for returned, fresh in self.shelves)
        held = chain.from_iterable(held for _, held in self.consumers)
        runs = chain(lying, (one.run for one in self.delayed), (one.run for one in held))
        for _, _, count, index, first, *_ in self._there(runs):
            yield PayloadRange(Position(index, first), Position(index, first + count))


def _array(rows: Iterable[Any]) -> list[bytes]:
    """Return an array of msgpack in pieces: the interpreter is held for none of them for long."""
    packer = msgpack.Packer(autoreset=False)
    pieces = [b""]
    count = 0
    for row in rows:
        packer.pack(row)
        count += 1
        if not count % PIECE:
            pieces.append(packer.bytes())
            packer.reset()
    pieces.append(packer.bytes())
    pieces[0] = header(count)
    return pieces


def freeze(state: QueueState) -> Frozen:
    """Return the state as it is."""
    return Frozen(
        state.views.begin(),
        [shelf.lying() for shelf in (*state.shelves, state.dead)],
        list(state.delayed.values()),
        [(consumer.own(), list(consumer.held)) for consumer in state.consumers.values()],
        (
            list(state.publishers.items()), list(state.counts.items()), state.next_number, state.next_dead,
            state.next_serial, state.turn, list(state.served), state.active, state.unused_since, state.ended,
            state.timer, state.last_index,
        ),
    )  # fmt: skip


def decode(options: QueueOptions, data: bytes) -> QueueState:
    """Return the state of a section."""
    state = QueueState(options)
    shelves, delayed, consumers, publishers, counts, *rest = msgpack.unpackb(data)
    low, high, state.dead = (Shelf.decode(rows, state.views) for rows in shelves)
    state.shelves = (low, high)
    for due, ttl, fields in delayed:
        run = Run(*fields, views=state.views)
        state.delayed[run.id] = Delayed(due, ttl, run)
        state.delayed_bytes += run.bytes
    for one in consumers:
        consumer = Consumer.decode(one, state.views)
        state.consumers[consumer.key] = consumer
    state.publishers = {number: last for number, last in publishers}
    state.counts |= {name: count for name, count in counts}
    (
        state.next_number, state.next_dead, state.next_serial, state.turn, state.served, active, state.unused_since,
        state.ended, state.timer, state.last_index, *more,
    ) = rest  # fmt: skip
    for number in more[0] if more else ():
        state.delayed[number] = state.delayed[number]._replace(at=True)
    state.active = (active[0], active[1]) if active is not None else None
    state.restored()
    return state

"""A queue's state as a snapshot's section, and back.

Invariant: a restored queue goes on exactly as the one it was taken of, with the same replies, effects and timers. Used
by `machines.queue`.
"""

from __future__ import annotations

import msgpack

from .consumers import Consumer
from .options import QueueOptions
from .runs import Run, Shelf
from .state import Delayed, QueueState


def encode(state: QueueState) -> bytes:
    """Return the section: msgpack. From version 2 on, where any wait for a time of the wall clock: their ids at its
    end."""
    at = [number for number, one in state.delayed.items() if one.at]
    packed: bytes = msgpack.packb(
        (
            [shelf.encode() for shelf in (*state.shelves, state.dead)],
            [(one.due, one.ttl_ms, one.run.fields()) for one in state.delayed.values()],
            [consumer.encode() for consumer in state.consumers.values()],
            list(state.publishers.items()), list(state.counts.items()), state.next_number, state.next_dead,
            state.next_serial, state.turn, state.served, state.active, state.unused_since, state.ended, state.timer,
            state.last_index, *([at] if at else ()),
        )
    )  # fmt: skip
    return packed


def decode(options: QueueOptions, data: bytes) -> QueueState:
    """Return the state that `encode` gave."""
    state = QueueState(options)
    shelves, delayed, consumers, publishers, counts, *rest = msgpack.unpackb(data)
    low, high, state.dead = (Shelf.decode(rows) for rows in shelves)
    state.shelves = (low, high)
    for due, ttl, fields in delayed:
        run = Run(*fields)
        state.delayed[run.id] = Delayed(due, ttl, run)
        state.delayed_bytes += run.bytes
    for one in consumers:
        consumer = Consumer.decode(one)
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

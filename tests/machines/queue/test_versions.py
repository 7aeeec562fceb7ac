"""A group's members may run programs from before and after a change of the machine: below the version that brought it,
the machine does what the program before did, to the byte."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import xxhash

from logyard.engine.machine import Context, Frame
from logyard.machines.queue import Queue
from logyard.machines.queue import command as qc
from logyard.machines.queue.options import QueueOptions

from . import model

KEYS = [(1, 1), (1, 2), (2, 1), (3, 1)]
BEFORE_3 = "9e17a911e73ec247"
"""Of what programs did that knew version 2 at most: the digest of `history` at 56daa9fa."""


def drawn(draw: random.Random, queue: Queue) -> Frame:
    """A command of any kind that hands something out, or makes room."""
    key = draw.choice(KEYS)
    consumer = queue.state.consumers.get(key)
    if consumer is None or draw.random() < 0.05:
        return model.attach(
            key, credit=draw.randint(0, 6), size=draw.choice((4, 10, 10, 30)),
            auto=draw.random() < 0.7, dead=draw.random() < 0.1,
        )  # fmt: skip
    if draw.random() < 0.5:
        sizes = [draw.choice((0, 2, 4, 4, 11))] * draw.randint(1, 4)
        return model.publish(sizes, priority=draw.randint(0, 1))
    if not consumer.held or draw.random() < 0.2:
        return model.credit(key, draw.randint(0, 5), draw.choice((4, 10, 30)))
    first = draw.choice(consumer.held).tag
    return model.settle(key, draw.choice((qc.ACK, qc.ACK, qc.REQUEUE, qc.REJECT)), (first, first + draw.randint(0, 2)))


def history(version: int) -> Iterator[bytes]:
    """What a queue does in some thousand entries."""
    draw = random.Random(3)
    for options in (QueueOptions(), QueueOptions(dead_letters=True, delivery_limit=2)):
        queue = Queue(options)
        for index in range(1, 1500):
            frame = drawn(draw, queue)
            batch = queue.apply_batch(Context(1, index, 1, 1_000_000 + index, version, frame.records), [frame])
            yield repr((batch.replies, batch.effects)).encode()
        yield repr(sorted(queue.snapshot().items())).encode()


def digest(version: int) -> str:
    return xxhash.xxh3_64(b"".join(history(version))).hexdigest()


@pytest.mark.parametrize("version", [1, 2])
def test_below_version_3_it_hands_out_as_programs_did_that_do_not_know_it(version: int) -> None:
    assert digest(version) == BEFORE_3


def test_version_3_hands_out_otherwise() -> None:
    assert digest(3) != BEFORE_3

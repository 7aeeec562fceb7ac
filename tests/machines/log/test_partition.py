"""A log as a topic's partition: fences, and what new partitions know of producers."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from logyard.engine.machine import Context, Frame, Reject
from logyard.machines.log import AppendLog
from logyard.machines.log.command import APPEND, APPEND_REPLY, NO_OFFSET
from logyard.protocol.frame import UNIFORM
from logyard.protocol.topics import (
    FENCED,
    fence_command,
    first_layout,
    grown_layout,
    inherit_command,
    keyed_append_command,
    keyed_produce_command,
    open_command,
    pack_layout,
)

OLD = first_layout([0, 1])
NEW = grown_layout(OLD, [2])


class Run:
    def __init__(self) -> None:
        self.log = AppendLog()
        self.log.upgrade(1, 4)
        self.index = 0

    def apply(self, command: bytes, records: int = 1) -> bytes | Reject:
        self.index += 1
        frame = Frame(UNIFORM, 0, records, len(command), 10, 0, 0, 0, command)
        reply = self.log.apply_batch(Context(1, self.index, 1, 5, 4, records), [frame]).replies[0]
        copy = AppendLog()
        copy.restore(self.log.snapshot())
        assert copy.snapshot() == self.log.snapshot() and list(copy.live_refs()) == list(self.log.live_refs())
        self.log = copy
        return reply

    def refused(self, command: bytes) -> str:
        before = self.log.snapshot(), self.log.end
        reply = self.apply(command)
        assert isinstance(reply, Reject), reply
        assert self.log.end == before[1]
        return reply.code

    def query(self, *asked: object) -> Any:
        return msgpack.unpackb(self.log.query(msgpack.packb(asked)))


@pytest.fixture
def run() -> Run:
    made = Run()
    assert made.apply(open_command(9, 1, 0, OLD)) == FENCED.pack(0)
    return made


def test_records_of_an_older_epoch_are_refused_behind_the_fence(run: Run) -> None:
    assert run.apply(keyed_append_command(9, 1), 3) == APPEND_REPLY.pack(0, 3)
    assert run.query("partition") == [9, 0, 1, pack_layout(OLD), 0]
    assert run.apply(fence_command(9, 2, 0, NEW)) == FENCED.pack(3)
    assert run.refused(keyed_append_command(9, 1)) == "stale_partitions"
    assert run.refused(keyed_append_command(8, 2)) == "stale_partitions", "a topic that had the name before"
    assert run.apply(keyed_append_command(9, 2)) == APPEND_REPLY.pack(3, 1)
    assert run.apply(fence_command(9, 2, 0, NEW)) == FENCED.pack(3), "a fence stands where it stood"
    assert run.refused(fence_command(9, 1, 0, OLD)) == "stale_partitions"
    assert run.query("partition") == [9, 0, 2, pack_layout(NEW), 3]
    # What was routed by a layout that this log will hear of lies here in that, too.
    assert run.apply(keyed_append_command(9, 3)) == APPEND_REPLY.pack(4, 1)


def test_a_log_takes_a_topics_records_when_it_is_open() -> None:
    run = Run()
    for command in (keyed_append_command(9, 2), keyed_produce_command(9, 2, 7, 1), fence_command(9, 2, 2, NEW)):
        assert run.refused(command) == "partition_opening"
    assert run.apply(open_command(9, 2, 2, NEW)) == FENCED.pack(0)
    assert run.apply(keyed_append_command(9, 2)) == APPEND_REPLY.pack(0, 1)
    assert run.apply(open_command(9, 2, 2, NEW)) == FENCED.pack(0), "opening again is no error"
    assert run.refused(open_command(8, 2, 2, NEW)) == "refused"
    assert run.refused(open_command(9, 2, 1, NEW)) == "refused"


def test_a_log_with_records_is_nobodys_partition() -> None:
    run = Run()
    run.apply(APPEND)
    assert run.refused(open_command(9, 1, 0, OLD)) == "refused"
    assert run.query("partition") is None


def test_a_producers_records_are_known_where_their_slots_went(run: Run) -> None:
    for sequence in (1, 2, 5):
        run.apply(keyed_produce_command(9, 1, 7, sequence))
    assert run.apply(keyed_produce_command(9, 1, 7, 2)) == APPEND_REPLY.pack(1, 1)
    run.apply(fence_command(9, 2, 0, NEW))
    assert run.refused(keyed_produce_command(9, 1, 7, 6)) == "stale_partitions"
    other, new = Run(), Run()
    other.apply(open_command(9, 1, 1, OLD))
    for sequence in (3, 4):
        other.apply(keyed_produce_command(9, 1, 7, sequence))
    for source in (run, other):
        assert new.apply(inherit_command(9, source.query("producers"))) == FENCED.pack(0)
    new.apply(open_command(9, 2, 2, NEW))
    assert new.apply(inherit_command(9, [])) == FENCED.pack(0)
    for sequence in range(1, 6):
        assert new.apply(keyed_produce_command(9, 2, 7, sequence)) == APPEND_REPLY.pack(NO_OFFSET, 0), sequence
    assert new.apply(keyed_produce_command(9, 2, 7, 6)) == APPEND_REPLY.pack(0, 1)
    assert new.log.end == 1


def test_a_window_that_was_inherited_from_many_knows_all_of_theirs() -> None:
    new = Run()
    for source in range(4):
        new.apply(inherit_command(9, [[7, 5, [[sequence, 0, 1] for sequence in range(source + 1, 800, 8)]]]))
    new.apply(open_command(9, 2, 2, NEW))
    # One that nobody wrote, between those that they wrote.
    assert new.apply(keyed_produce_command(9, 2, 7, 12)) == APPEND_REPLY.pack(NO_OFFSET, 0)
    assert new.apply(keyed_produce_command(9, 2, 7, 781)) == APPEND_REPLY.pack(0, 1)


@pytest.mark.parametrize(
    "command",
    [
        open_command(9, 1, 0, ((5, 0),)),
        open_command(9, 1, 0, OLD)[:-1],
        open_command(9, 1, 0, OLD)[:5],
        open_command(0, 1, 0, OLD),
        inherit_command(9, [[1]]),
        inherit_command(9, [])[:-1] + b"\xc1",
    ],
)  # fmt: skip
def test_what_can_not_be_read_is_refused(command: bytes) -> None:
    assert Run().refused(command) in ("bad_request", "refused")

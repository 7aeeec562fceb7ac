"""A log as a topic's partition: fences, and what new partitions know of producers."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from logyard.engine.machine import Context, Frame, Reject
from logyard.machines.log import AppendLog
from logyard.machines.log.command import APPEND, APPEND_REPLY, truncate_command
from logyard.payloads.reference import Position
from logyard.protocol.frame import NO_OFFSET, NOT_KNOWN, UNIFORM, Epoch, epoch_append_command, produce_command
from logyard.protocol.topics import (
    FENCED,
    adopt_command,
    fence_command,
    first_layout,
    grown_layout,
    inherit_command,
    keyed_append_command,
    keyed_produce_command,
    open_command,
    pack_layout,
    shrunk_layout,
)

OLD = first_layout([0, 1])
NEW = grown_layout(OLD, [2])
LESS = shrunk_layout(OLD, [0])


class Run:
    def __init__(self, version: int = 6) -> None:
        self.log = AppendLog()
        self.log.upgrade(1, version)
        self.index = 0

    def apply(self, command: bytes, records: int = 1) -> bytes | Reject:
        self.index += 1
        frame = Frame(UNIFORM, 0, records, len(command), 10, 0, 0, 0, command)
        reply = self.log.apply_batch(Context(1, self.index, 1, 5, 5, records), [frame]).replies[0]
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

    @property
    def joined(self) -> int | None:
        assert self.log.partition is not None
        return self.log.partition.joined

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
    assert run.refused(keyed_append_command(9, 3)) == "partition_opening", "it will be told of that layout"


def test_in_version_4_a_log_takes_what_was_routed_by_a_layout_that_it_will_hear_of() -> None:
    run = Run(4)
    run.apply(open_command(9, 1, 0, OLD))
    assert run.apply(keyed_append_command(9, 3)) == APPEND_REPLY.pack(0, 1)
    assert run.refused(adopt_command(9, 2, [])) == "bad_request"
    run.apply(fence_command(9, 2, 0, LESS))
    assert run.apply(APPEND) == APPEND_REPLY.pack(1, 1) and run.log.partition is not None
    assert run.log.partition.pack() == [9, 0, 2, pack_layout(LESS), 1]
    run.log.upgrade(4, 5)
    assert run.apply(fence_command(9, 3, 0, OLD)) == FENCED.pack(2) and run.joined == 3


def test_a_partition_that_ends_takes_nothing_behind_its_fence(run: Run) -> None:
    run.apply(keyed_append_command(9, 1), 3)
    assert run.apply(fence_command(9, 2, 0, LESS)) == FENCED.pack(3)
    for epoch in (1, 2, 3):
        assert run.refused(keyed_append_command(9, epoch)) == "stale_partitions"
        assert run.refused(keyed_produce_command(9, epoch, 7, 1)) == "stale_partitions"
    for command in (APPEND, produce_command(7, 1), epoch_append_command(Epoch(7, 1, 0), 0, 1, bytes(16))):
        assert run.refused(command) == "refused", "it would go with the log"
    assert run.query("partition") == [9, 0, 2, pack_layout(LESS), 3]
    assert run.apply(truncate_command(2, Position(2, 2))) == (2).to_bytes(8, "little"), (
        "what is kept of it is another matter"
    )


def test_a_partition_gets_slots_of_those_that_end_when_it_knows_their_producers() -> None:
    goes, stays = Run(), Run()
    goes.apply(open_command(9, 1, 0, OLD))
    stays.apply(open_command(9, 1, 1, OLD))
    assert stays.joined == 1
    for sequence in (1, 2):
        goes.apply(keyed_produce_command(9, 1, 7, sequence))
        stays.apply(keyed_produce_command(9, 1, 7, sequence + 10))
    assert stays.refused(keyed_append_command(9, 2)) == "partition_opening", "the other one takes records of this epoch"
    goes.apply(fence_command(9, 2, 0, LESS))
    assert stays.apply(adopt_command(9, 2, goes.query("producers"))) == FENCED.pack(0)
    assert stays.apply(keyed_append_command(9, 1)) == APPEND_REPLY.pack(2, 1), "what it had goes on"
    assert stays.apply(fence_command(9, 2, 1, LESS)) == FENCED.pack(3) and stays.joined == 2
    assert stays.apply(fence_command(9, 2, 1, LESS)) == FENCED.pack(3)
    assert stays.apply(adopt_command(9, 2, [[7, 5, [[99, 0, 1]]]])) == FENCED.pack(3), "it was told by another"
    assert stays.apply(keyed_produce_command(9, 2, 7, 2)) == APPEND_REPLY.pack(NO_OFFSET, 0)
    assert stays.apply(keyed_produce_command(9, 2, 7, 99)) == APPEND_REPLY.pack(3, 1)
    assert stays.refused(adopt_command(8, 3, [])) == "refused"
    assert stays.refused(adopt_command(9, 3, [])[:-1] + b"\xc1") == "bad_request"


def test_only_who_gets_slots_is_joined(run: Run) -> None:
    assert run.joined == 1
    run.apply(fence_command(9, 2, 0, NEW))
    assert run.joined == 1, "it gave some away"
    run.apply(fence_command(9, 3, 0, OLD))
    assert run.joined == 3


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
    new = Run(5)
    for source in range(4):
        new.apply(inherit_command(9, [[7, 5, [[sequence, 0, 1] for sequence in range(source + 1, 800, 8)]]]))
    new.apply(open_command(9, 2, 2, NEW))
    # One that nobody wrote, between those that they wrote.
    assert new.apply(keyed_produce_command(9, 2, 7, 12)) == APPEND_REPLY.pack(NO_OFFSET, 0)
    assert new.apply(keyed_produce_command(9, 2, 7, 781)) == APPEND_REPLY.pack(0, 1)


@pytest.mark.parametrize("way", ["inherits", "inherits in turn", "adopts", "is upgraded"])
def test_of_a_producer_a_partition_keeps_one_window_wherever_that_wrote(way: str) -> None:
    """With the windows of two logs, one far below the other, what the higher one had forgotten was appended again."""
    low, high, new = Run(), Run(), Run(5 if way == "is upgraded" else 6)
    low.apply(open_command(9, 1, 0, OLD))
    high.apply(open_command(9, 1, 1, OLD))
    for sequence in range(1, 101):
        low.apply(keyed_produce_command(9, 1, 7, sequence))
        high.apply(keyed_produce_command(9, 1, 7, 100 + sequence))
    if way == "adopts":
        new = high
        assert new.apply(adopt_command(9, 2, low.query("producers"))) == FENCED.pack(0)
        assert new.apply(fence_command(9, 2, 1, LESS)) == FENCED.pack(100)
    else:
        for source in (high, low) if way == "inherits in turn" else (low, high):
            assert new.apply(inherit_command(9, source.query("producers"))) == FENCED.pack(0)
        assert new.apply(open_command(9, 2, 2, NEW)) == FENCED.pack(0)
    if way == "is upgraded":
        new.log.upgrade(5, 6)
    end = new.log.end
    for sequence in (1, 50, 120):
        assert new.apply(keyed_produce_command(9, 2, 7, sequence)) == APPEND_REPLY.pack(NO_OFFSET, NOT_KNOWN)
    known = APPEND_REPLY.pack(49, 1) if new is high else APPEND_REPLY.pack(NO_OFFSET, 0)
    assert new.apply(keyed_produce_command(9, 2, 7, 150)) == known
    assert new.apply(keyed_produce_command(9, 2, 7, 201)) == APPEND_REPLY.pack(end, 1)


def test_in_version_5_a_partition_keeps_all_windows_until_it_appends() -> None:
    """As its members of older builds do."""
    new = Run(5)
    for first in (100, 1000):
        new.apply(inherit_command(9, [[7, 5, [[sequence, 0, 1] for sequence in range(first, first + 64)]]]))
    new.apply(open_command(9, 2, 2, NEW))
    assert new.apply(keyed_produce_command(9, 2, 7, 500)) == APPEND_REPLY.pack(0, 1)
    assert new.apply(keyed_produce_command(9, 2, 7, 501)) == APPEND_REPLY.pack(NO_OFFSET, NOT_KNOWN)


@pytest.mark.parametrize(
    "command",
    [
        open_command(9, 1, 0, ((5, 0),)),
        open_command(9, 1, 0, OLD)[:-1],
        open_command(9, 1, 0, OLD)[:5],
        open_command(0, 1, 0, OLD),
        inherit_command(9, [[1]]),
        inherit_command(9, [])[:-1] + b"\xc1",
        # What no snapshot could hold.
        inherit_command(9, [[float("inf"), 1, []]]),
        inherit_command(9, [[1, 1e30, []]]),
        inherit_command(9, [[1, 1, [["9" * 40]]]]),
        open_command(9, 1, 0, ((float("inf"), 0),)),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_what_can_not_be_read_is_refused(command: bytes) -> None:
    assert Run().refused(command) in ("bad_request", "refused")

"""Idempotent producers: what was sent twice is in the log once, and its second copy is nobody's."""

from __future__ import annotations

import random

import msgpack
import pytest

from logyard.engine.machine import Context, Frame, PayloadRef, Position, Reject, Release
from logyard.machines.log import AppendLog
from logyard.machines.log import producers as table
from logyard.machines.log.command import APPEND, APPEND_REPLY
from logyard.machines.log.producers import IDLE_MS, WINDOW
from logyard.machines.log.slices import Slice, slices
from logyard.protocol.frame import NO_OFFSET, NOT_KNOWN, UNIFORM, produce_command


class Run:
    def __init__(self) -> None:
        self.log = AppendLog()
        self.log.upgrade(1, 2)
        self.index = 0
        self.now = 0
        self.effects: list[object] = []

    def apply(self, *frames: Frame) -> list[bytes | Reject]:
        self.index += 1
        count = sum(frame.records for frame in frames)
        batch = self.log.apply_batch(Context(1, self.index, 1, self.now, 2, count), frames)
        self.effects = list(batch.effects)
        return list(batch.replies)

    def produce(self, producer: int, sequence: int, records: int = 1) -> bytes | Reject:
        return self.apply(frame(producer, sequence, records))[0]


def frame(producer: int, sequence: int, records: int = 1, first: int = 0) -> Frame:
    command = produce_command(producer, sequence)
    return Frame(UNIFORM, 0, records, len(command), 10, 0, 0, 0, command, first)


def test_a_sequence_is_appended_once_and_answered_as_often_as_it_comes() -> None:
    run = Run()
    assert run.produce(7, 1, 3) == APPEND_REPLY.pack(0, 3)
    assert run.produce(7, 2) == APPEND_REPLY.pack(3, 1)
    assert run.produce(7, 1, 3) == APPEND_REPLY.pack(0, 3)
    assert run.effects == [Release(Position(3, 0), Position(4, 0))], "the second copy's payload is nobody's"
    assert run.produce(8, 1) == APPEND_REPLY.pack(4, 1), "another producer has sequences of its own"
    assert run.log.end == 5 and run.log.holes == [(3, 0, 0)]
    live = [tuple(one) for one in run.log.live_refs()]
    assert live == [((0, 0), (3, 0)), ((4, 0), (5, 0))]


def test_a_replay_that_is_cut_elsewhere_loses_and_doubles_records() -> None:
    """As docs/guides/from-kafka.md warns: a sequence stands for a batch, whatever is in it."""
    run, sent = Run(), [*range(12)]
    stored: list[int] = []

    def send(size: int, until: int) -> None:
        for sequence, at in enumerate(range(0, until, size), 1):
            batch = sent[at : at + size]
            reply = run.produce(7, sequence, len(batch))
            assert isinstance(reply, bytes)
            offset, _ = APPEND_REPLY.unpack(reply)
            if offset == len(stored):
                stored.extend(batch)

    send(3, 6)
    send(2, 12)
    assert stored == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9, 10, 11]
    run, stored = Run(), []
    send(2, 8)
    send(4, 12)
    assert stored == [0, 1, 2, 3, 4, 5, 6, 7], "8 to 11 are lost, and nobody was told"


def test_a_copy_in_the_same_entry_leaves_the_other_frames_alone() -> None:
    run = Run()
    frames = [frame(7, 1, 2, 0), frame(7, 1, 2, 2), Frame(UNIFORM, 0, 1, 1, 10, 0, 0, 0, APPEND, 4)]
    replies = run.apply(*frames)
    assert replies == [APPEND_REPLY.pack(0, 2), APPEND_REPLY.pack(0, 2), APPEND_REPLY.pack(2, 1)]
    assert run.effects == [Release(Position(1, 2), Position(1, 4))]
    assert slices(frames, 0, 0, run.log.holes_of(1)) == ([Slice(0, 0, 0, 0, 2), Slice(2, 2, 4, 0, 1)], 3)


def test_the_copy_of_a_long_payload_releases_its_pieces() -> None:
    run = Run()
    pieces = tuple(PayloadRef(1, index, 0, 1, 1000, b"") for index in (1, 2))
    run.index = 2
    bound = frame(7, 1)._replace(pieces=pieces, extent=2000)
    run.apply(bound)
    again = tuple(ref._replace(index=ref.index + 3) for ref in pieces)
    run.index = 5
    assert run.apply(bound._replace(pieces=again)) == [APPEND_REPLY.pack(0, 1)]
    assert run.effects == [Release(Position(6, 0), Position(7, 0)), Release(Position(4, 0), Position(6, 0))]
    assert list(run.log.long) == [0] and run.log.long[0].first == 1


def test_sequences_under_way_together_may_come_in_any_order() -> None:
    run = Run()
    order = list(range(1, 40))
    random.Random(3).shuffle(order)
    for sequence in (*order, *order):
        run.produce(7, sequence)
    assert run.log.end == len(order)


def test_of_what_left_the_window_it_is_not_known_whether_it_was_written() -> None:
    """It was said to be: a record that came late was acknowledged, and lost."""
    run = Run()
    for sequence in range(10, 10 * (WINDOW + 5), 10):
        run.produce(7, sequence)
    end = run.log.end
    for sequence in (10, 15):
        assert run.produce(7, sequence) == APPEND_REPLY.pack(NO_OFFSET, NOT_KNOWN) and run.log.end == end
        assert run.effects == [Release(Position(run.index, 0), Position(run.index + 1, 0))]
    assert run.produce(7, 10 * (WINDOW + 4)) == APPEND_REPLY.pack(end - 1, 1)
    assert msgpack.unpackb(run.log.query(msgpack.packb(["producer", 7]))) == 10 * (WINDOW + 4)
    assert msgpack.unpackb(run.log.query(msgpack.packb(["producer", 8]))) == 0


def test_a_restored_log_knows_its_producers() -> None:
    run = Run()
    for sequence in range(1, 100):
        run.produce(sequence % 3 + 1, sequence)
    copy = Run()
    copy.log.restore(run.log.snapshot())
    copy.index = run.index
    for sequence in (1, 50, 99, 100, 200):
        assert copy.produce(sequence % 3 + 1, sequence) == run.produce(sequence % 3 + 1, sequence)
    assert copy.log.snapshot() == run.log.snapshot()


def test_producers_are_limited_and_silent_ones_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "PRODUCERS_MAX", 3)
    run = Run()
    for producer in (1, 2, 3):
        run.produce(producer, 1)
    refused = run.produce(4, 1)
    assert isinstance(refused, Reject) and refused.code == "too_many_producers" and run.log.end == 3
    run.now = IDLE_MS
    run.produce(2, 2)
    run.now = IDLE_MS + 1
    assert run.produce(4, 1) == APPEND_REPLY.pack(4, 1)
    assert run.log.producers is not None and sorted(run.log.producers.by_number) == [2, 4]


@pytest.mark.parametrize(("producer", "sequence"), [(0, 1), (1, 0)])
def test_zero_is_no_number(producer: int, sequence: int) -> None:
    run = Run()
    reply = run.produce(producer, sequence)
    assert isinstance(reply, Reject) and reply.code == "bad_request" and run.log.holes == [(1, 0, 0)]


def test_version_1_refuses_a_producer_s_append() -> None:
    log = AppendLog()
    batch = log.apply_batch(Context(1, 1, 1, 0, 1, 1), [frame(7, 1)])
    assert isinstance(batch.replies[0], Reject) and log.end == 0 and log.holes == [(1, 0, 0)]

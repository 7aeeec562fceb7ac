"""Fenced producers: a batch that is written again is in the log once, and what differs is refused, never lost."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgpack
import pytest

from logyard.engine.machine import Context, Effect, Frame, PayloadRef, Position, Reject, Release
from logyard.machines.log import AppendLog
from logyard.machines.log import fenced as table
from logyard.machines.log.command import APPEND, APPEND_REPLY, TRUNCATE_REPLY
from logyard.machines.log.fenced import HASHES_MAX, IDLE_MS, LANES_MAX, PRODUCERS_MAX
from logyard.protocol.frame import NO_OFFSET, UNIFORM, Epoch, epoch_append_command, epoch_done_command, produce_command

BORN = 1_700_000_000_000


class Run:
    def __init__(self) -> None:
        self.log = AppendLog()
        self.log.upgrade(1, 3)
        self.index = 0
        self.now = BORN
        self.effects: list[object] = []

    def apply(self, command: bytes, records: int = 1) -> bytes | Reject:
        self.index += 1
        frame = Frame(UNIFORM, 0, records, len(command), 10, 0, 0, 0, command)
        batch = self.log.apply_batch(Context(1, self.index, 1, self.now, 3, records), [frame])
        self.effects = list(batch.effects)
        return batch.replies[0]

    def write(self, epoch: Epoch, lane: int, number: int, content: bytes = b"x", records: int = 1) -> bytes | Reject:
        return self.apply(epoch_append_command(epoch, lane, number, content.ljust(16)), records)

    def refused(self, *asked: object, **more: int) -> str:
        reply = self.write(*asked, **more)  # type: ignore[arg-type]
        assert isinstance(reply, Reject), reply
        return reply.code

    def restart(self) -> None:
        log = AppendLog()
        log.restore(self.log.snapshot())
        assert log.snapshot() == self.log.snapshot()
        self.log = log

    def query(self, *asked: object) -> object:
        return msgpack.unpackb(self.log.query(msgpack.packb(asked)))


ONE = Epoch(7, BORN - 1000, 0)


def later(by: int = 1, incarnation: int = 0) -> Epoch:
    return ONE._replace(epoch=by, incarnation=ONE.incarnation + incarnation)


@pytest.fixture(params=["as it is", "from a snapshot"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """A log; in the second case every step is taken by one that was restored from a snapshot."""
    made = Run()
    if request.param == "from a snapshot":
        plain = made.apply

        def apply(command: bytes, records: int = 1) -> bytes | Reject:
            made.restart()
            return plain(command, records)

        made.apply = apply  # type: ignore[method-assign]
    yield made


def test_a_frame_is_in_the_log_once_and_answered_as_often_as_it_comes(run: Run) -> None:
    assert run.write(ONE, 3, 1, b"a", records=2) == APPEND_REPLY.pack(0, 2)
    assert run.write(ONE, 3, 2, b"b") == APPEND_REPLY.pack(2, 1)
    assert run.write(ONE, 4, 1, b"c") == APPEND_REPLY.pack(3, 1), "another lane has numbers of its own"
    assert run.write(ONE, 3, 1, b"a", records=2) == APPEND_REPLY.pack(0, 2)
    assert run.effects == [Release(Position(4, 0), Position(5, 0))], "the second copy's payload is nobody's"
    assert run.log.end == 4 and run.log.holes == [(4, 0, 0)]
    assert run.query("epoch", 7) == [ONE.incarnation, 0, True] and run.query("unverified") == 0


def test_other_contents_under_the_same_number_are_refused_with_the_place_of_the_first(run: Run) -> None:
    run.write(ONE, 0, 1, b"a", records=3)
    reply = run.write(ONE, 0, 1, b"b", records=3)
    assert isinstance(reply, Reject) and reply.code == "sequence_differs" and "3 records from offset 0" in reply.message
    assert run.log.end == 3


def test_a_gap_is_refused_and_can_be_filled(run: Run) -> None:
    run.write(ONE, 0, 1)
    assert run.refused(ONE, 0, 3) == "sequence_gap" and run.refused(ONE, 1, 2) == "sequence_gap"
    assert run.write(ONE, 0, 2) == APPEND_REPLY.pack(1, 1) and run.write(ONE, 0, 3) == APPEND_REPLY.pack(2, 1)


def test_a_later_epoch_fences_and_a_later_incarnation_begins_anew(run: Run) -> None:
    run.write(later(5), 0, 1, b"a")
    assert run.refused(later(4), 0, 1, b"a") == "fenced"
    assert run.write(later(6), 0, 1, b"a") == APPEND_REPLY.pack(1, 1), "the same contents in the next batch are new"
    assert run.refused(later(5), 0, 2) == "fenced"
    assert run.write(later(0, incarnation=1), 0, 1, b"a") == APPEND_REPLY.pack(2, 1)
    assert run.refused(later(7), 0, 1) == "fenced", "the old incarnation is past, whatever its epoch"


def test_a_closed_epoch_takes_nothing_more_and_closing_it_again_is_no_error(run: Run) -> None:
    run.write(ONE, 0, 1)
    for _ in range(2):
        assert run.apply(epoch_done_command(ONE)) == TRUNCATE_REPLY.pack(0)
        assert run.refused(ONE, 0, 1) == "fenced" and run.refused(ONE, 0, 2) == "fenced"
    assert run.write(later(1), 0, 1) == APPEND_REPLY.pack(1, 1)
    reply = run.apply(epoch_done_command(ONE))
    assert isinstance(reply, Reject) and reply.code == "fenced", "it is not this one that is open"
    assert run.apply(epoch_done_command(Epoch(9, BORN, 4))) == TRUNCATE_REPLY.pack(0), "one that wrote nothing here"
    assert run.refused(Epoch(9, BORN, 4), 0, 1) == "fenced"


def test_two_thousand_tasks_of_65_frames_pass_and_what_came_long_ago_is_counted() -> None:
    run = Run()
    for number in range(1, 66):
        for lane in range(2000):
            assert run.write(ONE, lane, number, b"%d" % lane) == APPEND_REPLY.pack(run.log.end - 1, 1)
    run.restart()
    assert run.log.fenced is not None and len(run.log.fenced.hashes) == HASHES_MAX
    assert run.write(ONE, 1999, 65, b"1999") == APPEND_REPLY.pack(run.log.end - 1, 1)
    assert run.refused(ONE, 1999, 65, b"2000") == "sequence_differs"
    assert run.write(ONE, 0, 1, b"other") == APPEND_REPLY.pack(NO_OFFSET, 0) and run.query("unverified") == 1
    assert run.log.end == 2000 * 65


def test_lanes_and_producers_are_limited_and_an_epoch_gives_its_lanes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LANES_MAX >= 2000 and PRODUCERS_MAX == 1024
    monkeypatch.setattr(table, "LANES_MAX", 3)
    monkeypatch.setattr(table, "PRODUCERS_MAX", 2)
    run = Run()
    for lane in range(3):
        run.write(ONE, lane, 1)
    assert run.refused(ONE, 3, 1) == "too_many_lanes" and run.write(ONE, 2, 2) == APPEND_REPLY.pack(3, 1)
    assert run.refused(ONE._replace(producer=8), 0, 1) == "too_many_lanes"
    assert isinstance(run.write(later(1), 3, 1), bytes), "its own lanes of the epoch before do not count"
    assert isinstance(run.write(ONE._replace(producer=8), 0, 1), bytes)
    assert run.refused(ONE._replace(producer=9), 0, 1) == "too_many_producers"


def test_who_was_idle_for_a_week_goes_and_is_not_taken_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "PRODUCERS_MAX", 2)
    run = Run()
    run.write(ONE, 0, 1)
    run.now += IDLE_MS // 2
    second = Epoch(8, run.now, 0)
    run.write(second, 0, 1)
    run.now += IDLE_MS // 2
    assert run.refused(Epoch(9, run.now, 0), 0, 1) == "too_many_producers", "exactly a week is not over it"
    run.now += 1
    third = Epoch(9, run.now + 1, 0)
    assert isinstance(run.write(third, 0, 1), bytes)
    assert run.query("epoch", 7) is None and run.query("epoch", 8) is not None
    assert run.refused(later(1), 0, 1) == "producer_forgotten"
    run.restart()
    assert run.refused(later(1), 0, 1) == "producer_forgotten"


@pytest.mark.parametrize("form", ["a producer's", "a fenced one's"])
def test_the_pieces_of_a_second_copy_are_nobody_s(form: str) -> None:
    """The log claimed them in its snapshots, although it had released them."""
    run = Run()
    command = produce_command(7, 1) if form == "a producer's" else epoch_append_command(ONE, 0, 1, bytes(16))

    def bind(first: int) -> list[Effect]:
        pieces = tuple(PayloadRef(1, index, 0, 1, 1 << 20, b"") for index in (first, first + 1, first + 2))
        plain = Frame(UNIFORM, 0, 1, len(command), 10, 0, 0, 0, command)
        frame = plain._replace(pieces=pieces, extent=3 << 20)
        return list(run.log.apply_batch(Context(1, first + 3, 1, run.now, 3, 1), [frame]).effects)

    assert bind(10) == []
    released = bind(20)
    assert released == [Release(Position(23, 0), Position(24, 0)), Release(Position(20, 0), Position(23, 0))]
    run.restart()
    needed = list(run.log.live_refs())
    for index in range(10, 14):
        assert any(one.first <= (index, 0) < one.end for one in needed), index
    for index in range(20, 24):
        assert not any(one.first <= (index, 0) < one.end for one in needed), index


def test_a_number_writes_in_one_form_only(run: Run) -> None:
    run.apply(produce_command(5, 1))
    run.write(ONE, 0, 1)
    assert run.refused(Epoch(5, BORN, 0), 0, 1) == "bad_request"
    reply = run.apply(produce_command(7, 1))
    assert isinstance(reply, Reject) and reply.code == "bad_request"
    assert run.apply(produce_command(5, 1)) == APPEND_REPLY.pack(0, 1), "the older form answers as it always did"


@pytest.mark.parametrize("asked", [Epoch(0, 1, 0), Epoch(1, 0, 0)])
def test_nobody_is_number_nought(asked: Epoch) -> None:
    run = Run()
    assert run.refused(asked, 0, 1) == "bad_request" and run.refused(ONE, 0, 0) == "bad_request"


def test_a_keyed_log_has_no_producers() -> None:
    log = AppendLog(keyed=True)
    log.upgrade(1, 3)
    command = epoch_append_command(ONE, 0, 1, bytes(16))
    frame = Frame(UNIFORM, 0, 1, len(command), 10, 0, 0, 0, command)
    (reply,) = log.apply_batch(Context(1, 1, 1, BORN, 3, 1), [frame]).replies
    assert isinstance(reply, Reject) and reply.code == "bad_request"


@pytest.mark.parametrize("seed", range(20))
def test_replays_leave_each_batch_once_and_in_order(seed: int) -> None:
    """Batches of several tasks are written by drivers that die anywhere and begin again, frames of the dead ones come
    late, plain appends come between: the log holds each batch's frames once, each lane's in order."""
    draw = random.Random(seed)
    run = Run()
    stored: list[tuple[int, int, int]] = []
    others = 0

    def send(epoch: Epoch, lane: int, number: int) -> str:
        content = b"%d %d %d" % (epoch.epoch, lane, number)
        reply = run.write(epoch, lane, number, content)
        if isinstance(reply, Reject):
            return reply.code
        first, _ = APPEND_REPLY.unpack(reply)
        if first == run.log.end - 1 and len(stored) + others < run.log.end:
            stored.append((epoch.epoch, lane, number))
        return ""

    late: list[tuple[Epoch, int, int]] = []
    wanted: list[tuple[int, int, int]] = []
    for batch in range(12):
        epoch, lanes = later(batch), {lane: draw.randint(1, 5) for lane in range(draw.randint(1, 4))}
        wanted += [(batch, lane, number) for lane, count in lanes.items() for number in range(1, count + 1)]
        for attempt in range(draw.randint(1, 4)):
            left = [(lane, number) for lane, count in lanes.items() for number in range(1, count + 1)]
            dies = draw.randint(0, len(left)) if attempt else None
            for lane, number in left[:dies] if dies is not None else left:
                assert send(epoch, lane, number) == ""
                late.append((epoch, lane, number))
            if draw.random() < 0.3:
                run.apply(APPEND)
                others += 1
            if draw.random() < 0.3:
                run.restart()
            for old in draw.sample(late, min(3, len(late))):
                assert send(*old) == ("" if old[0] == epoch else "fenced")
        if draw.random() < 0.5:
            assert run.apply(epoch_done_command(epoch)) == TRUNCATE_REPLY.pack(0)
            assert send(epoch, 0, 1) == "fenced"
            late.clear()
    assert sorted(stored) == sorted(wanted) and len(stored) + others == run.log.end
    for batch in range(12):
        for lane in range(4):
            assert [one for one in stored if one[:2] == (batch, lane)] == sorted(
                one for one in stored if one[:2] == (batch, lane)
            )

"""Which sequences of a producer are sent: a log knows a window of those that it has, and can't tell a lower one that it
never had from one that it had long ago."""

from __future__ import annotations

import random
import sys
import threading

import pytest

from logyard.client.numbering import HOLD_S, REMEMBERED, WINDOW, Numbering, Turn
from logyard.engine.machine import Reject
from logyard.machines.log import producers as table
from logyard.machines.log.command import APPEND_REPLY
from logyard.protocol.errors import BadRequest, LogyardError, SessionExpired, Unknown
from logyard.protocol.frame import NO_OFFSET, NOT_KNOWN

NUMBER = 7


class Run:
    def __init__(self, last: int = 0) -> None:
        self.numbers = Numbering(NUMBER, last)
        self.now = 100.0

    def begin(self, *sequences: int) -> list[Turn]:
        return [self.numbers.begin(one) for one in sequences]

    def goes(self, turn: Turn) -> bool:
        return self.numbers.must_wait(turn, self.now, threading.Event) is None

    def end(self, turn: Turn, error: BaseException | None = None) -> None:
        self.numbers.end(turn, self.now, error)


def test_a_log_remembers_as_many() -> None:
    assert WINDOW == table.WINDOW


def test_none_is_sent_that_is_a_window_above_one_that_is_not_finished() -> None:
    run = Run()
    turns = [run.numbers.begin(None) for _ in range(WINDOW + 2)]
    assert [one.sequence for one in turns] == list(range(1, WINDOW + 3))
    assert all(map(run.goes, turns[:WINDOW]))
    for one in turns[1:WINDOW]:
        run.end(one)
    events = [run.numbers.must_wait(one, run.now, threading.Event) for one in turns[WINDOW:]]
    assert all(event is not None and not event.is_set() for event in events)
    run.end(turns[0])
    assert all(event is not None and event.is_set() for event in events)
    assert all(map(run.goes, turns[WINDOW:]))


def test_gaps_are_no_part_of_a_window() -> None:
    run = Run()
    turns = run.begin(*range(10, 10 * (WINDOW + 2), 10))
    assert [run.goes(one) for one in turns] == [True] * WINDOW + [False]


def test_who_is_woken_waits_anew_when_a_lower_one_came() -> None:
    run = Run()
    turns = run.begin(*range(10, 10 * (WINDOW + 2), 10))
    event = run.numbers.must_wait(turns[-1], run.now, threading.Event)
    run.end(turns[0])
    assert event is not None and event.is_set()
    run.begin(15)
    assert not run.goes(turns[-1])
    run.end(turns[1])
    assert not run.goes(turns[-1]), "15 is not finished"


@pytest.mark.parametrize("error", [Unknown("cut"), SessionExpired("over"), KeyboardInterrupt()])
def test_a_sequence_that_failed_is_waited_for_until_it_is_sent_again_or_for_some_time(error: BaseException) -> None:
    for again in (True, False):
        run = Run()
        turns = run.begin(*range(1, WINDOW + 2))
        run.end(turns[0], error)
        assert not run.goes(turns[-1])
        if again:
            (turn,) = run.begin(1)
            assert run.goes(turn)
            run.now += 2 * HOLD_S
            assert not run.goes(turns[-1])
            run.end(turn)
        else:
            run.now += HOLD_S
        assert run.goes(turns[-1])


@pytest.mark.parametrize(
    "error", [BadRequest("no record"), LogyardError("full", code="too_many_producers"), ValueError()]
)
def test_one_that_is_refused_for_good_is_not_waited_for(error: Exception) -> None:
    run = Run()
    turns = run.begin(*range(1, WINDOW + 2))
    run.end(turns[0], error)
    assert run.goes(turns[-1])


def test_nor_is_one_that_its_caller_did_not_number() -> None:
    run = Run()
    turns = [run.numbers.begin(None) for _ in range(WINDOW + 1)]
    run.end(turns[0], Unknown("cut"))
    assert run.goes(turns[-1])


def test_what_an_earlier_run_left_open_is_finished_before_anything_new_is_sent() -> None:
    run = Run(100)
    old, new = run.begin(90, 101)
    assert run.goes(old) and not run.goes(new)
    run.end(old)
    assert run.goes(new)


def test_what_a_log_does_not_know_any_more_it_has_only_if_that_can_be_told() -> None:
    run = Run(100)
    (old,) = run.begin(3)
    assert old.trusted, "an earlier run wrote a window above it"
    run.end(old, Unknown("cut"))
    (old,) = run.begin(3)
    assert old.trusted, "nothing new was sent since"
    run.end(old)
    (new,) = run.begin(101)
    assert not new.trusted
    (late,) = run.begin(5)
    assert late.trusted and not run.goes(new)
    run.end(late)
    assert run.goes(new)
    assert run.begin(3)[0].trusted, "it was answered"
    assert not run.begin(6)[0].trusted, "it was passed over"
    run.end(new)
    assert run.begin(101)[0].trusted
    for turn in run.begin(*range(102, 102 + REMEMBERED)):
        run.end(turn)
    assert not run.begin(101)[0].trusted and run.begin(102)[0].trusted


@pytest.mark.parametrize("sequence", [0, -1, 1 << 63])
def test_what_is_no_sequence(sequence: int) -> None:
    run = Run()
    with pytest.raises(BadRequest):
        run.begin(sequence)
    assert run.numbers.last == 0


def test_threads_are_never_given_the_same_sequence() -> None:
    """What two of them sent under one number was in the log once."""
    run, found, before = Run(), list[int](), sys.getswitchinterval()

    def draw() -> None:
        for _ in range(2000):
            turn = run.numbers.begin(None)
            found.append(turn.sequence)
            run.end(turn)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=draw) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert sorted(found) == list(range(1, 8001)) and run.numbers.last == 8000


class History:
    """Producers of one number, one run of its program after the other, and the log that they write to."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.log = table.Producers()
        self.appended: list[int] = []
        self.gap = self.draw.choice([1, 1, 3, 1000])
        self.acknowledged: set[int] = set()

    def deliver(self, sequence: int, trusted: bool) -> None:
        """A record comes to the log, which answers that it has it, whatever comes of the answer."""
        known = self.log.known(NUMBER, sequence, 0)
        assert not isinstance(known, Reject)
        if known is None:
            self.log.keep(NUMBER, sequence, len(self.appended), 1, 0)
            self.appended.append(sequence)
        assert sequence in self.appended, f"{sequence} is lost: the log takes it for written"
        first, records = APPEND_REPLY.unpack(known) if known is not None else (0, 1)
        assert (first, records) != (NO_OFFSET, NOT_KNOWN) or trusted, f"{sequence} is not known to be there"

    def live(self, most: int) -> None:
        """One run: it sends what is not acknowledged, in order, a hundred at once; some of it fails, and it dies."""
        draw, run = self.draw, Run(self.log.last(NUMBER))
        following = max(self.acknowledged, default=0) + self.gap
        before = range(self.gap, following, self.gap)
        wanted = [one for one in before if draw.random() < 0.2 or one not in self.acknowledged]
        waiting, sent = list[Turn](), list[Turn]()
        for _ in range(most):
            while len(waiting) + len(sent) < 100:
                if not wanted:
                    wanted.append(following)
                    following += self.gap
                waiting += run.begin(wanted.pop(0))
            may_go = [one for one in waiting if run.goes(one)]
            assert may_go or sent, "nothing goes on"
            sent += may_go
            waiting = [one for one in waiting if one not in may_go]
            # The lowest is the last one to come, more often than not.
            turn = sent.pop(draw.randrange(len(sent)) if draw.random() < 0.3 else -1)
            if draw.random() < 0.9:
                self.deliver(turn.sequence, turn.trusted)
                if draw.random() < 0.9:
                    run.end(turn)
                    self.acknowledged.add(turn.sequence)
                    continue
            run.end(turn, Unknown("cut"))
            waiting += run.begin(turn.sequence)
        for turn in sent:
            # What is on its way when a run ends comes, or does not.
            if draw.random() < 0.5:
                self.deliver(turn.sequence, turn.trusted)


@pytest.mark.parametrize("seed", range(20))
def test_histories_of_runs_that_fail_lose_nothing_and_double_nothing(seed: int) -> None:
    history = History(seed)
    for _ in range(4):
        history.live(history.draw.randrange(50, 300))
    assert len(history.appended) == len(set(history.appended)) and history.acknowledged <= set(history.appended)

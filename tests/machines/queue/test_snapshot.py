"""A queue's state is captured at once and written by a thread while the queue goes on."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from logyard.engine.machine import Context, PayloadRange, Position
from logyard.machines.queue import Queue
from logyard.machines.queue import machine as queue_module
from logyard.machines.queue.runs import Run, Views
from logyard.machines.queue.snapshot import PIECE, freeze

from . import model

A = (1, 1)


def filled(count: int, delayed: int = 0, consumer: bool = False) -> Queue:
    """A queue of messages that came one an entry."""
    machine = Queue()
    for at in range(1, count + delayed + 1):
        frame = model.publish([at % 7 + 1], delay=5_000 if at > count else 0)
        machine.apply_batch(Context(1, at, 1, 1000, 1, 1), [frame])
    if consumer:
        attach = model.attach(A, credit=count // 2)
        machine.apply_batch(Context(1, count + delayed + 1, 1, 1000, 1, 1), [attach])
    return machine


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count calls of functions."""
    calls = [0]

    def count(frame: object, event: str, argument: object) -> None:
        calls[0] += 1

    gc.disable()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        gc.enable()


def test_a_capture_calls_nothing_for_a_message() -> None:
    found = []
    for count in (10, 2000):
        machine = filled(count, count, True)
        with counted() as calls:
            view = freeze(machine.state)
        found.append(calls[0])
        assert view.sections() == machine.snapshot()
    assert found[0] == found[1]


def test_a_small_state_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = filled(20, 5, True)
    assert machine.freeze() is None
    monkeypatch.setattr(queue_module, "WRITTEN_AT_ONCE", 24)
    view = machine.freeze()
    assert view is not None and view.sections() == machine.snapshot()


def test_many_rows_are_written_in_pieces() -> None:
    machine = filled(2 * PIECE + 3)
    other = Queue()
    other.restore(machine.snapshot())
    assert other.snapshot() == machine.snapshot() and other.state.ready == 2 * PIECE + 3
    assert next(freeze(other.state).payloads()) == PayloadRange(Position(1, 0), Position(1, 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run.cut(2), lambda run: run.enter(9, 9, 1), lambda run: run.prolong(5), lambda run: run.fail(),
        lambda run: run.extend(3),
    ],
)  # fmt: skip
def test_whatever_changes_a_run_keeps_what_it_was(change: Callable[[Run], object]) -> None:
    views = Views()
    run = Run(1, 1, 5, 1, 0, 10, expires=7, views=views)
    first, was = views.begin(), run.fields()
    change(run)
    second, then = views.begin(), run.fields()
    change(run)
    assert was != then
    assert (first.fields(run), second.fields(run)) == (was, then)
    del first, second
    change(run)
    assert not views.open


def test_a_thread_reads_what_was_while_the_queue_goes_on() -> None:
    """Every kind of change, with the interpreter handed over at every chance."""
    machine = filled(3000, 500, True)
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    wrong: list[int] = []
    try:
        for turn in range(6):
            written, needed = machine.snapshot(), sorted(machine.live_refs())
            view = freeze(machine.state)

            def read(view: Any = view, written: Any = written, needed: Any = needed) -> None:
                if sorted(view.payloads()) != needed or view.sections() != written:
                    wrong.append(len(written))

            thread = threading.Thread(target=read)
            thread.start()
            index, now = 10_000 * (turn + 1), 1000 + 1000 * turn
            while thread.is_alive():
                index += 1
                tag = 1 + index % 3000
                frames = [
                    model.publish([3, 4], ttl=300), model.settle(A, index % 3, (tag, tag + 5)), model.publish([2] * 3)
                ]  # fmt: skip
                machine.apply_batch(Context(1, index, 1, now, 1, 8), frames)
                if not index % 50:
                    now += 200
                    machine.on_timer(Context(1, index, 1, now, 1, 1), "due")
                    machine.state.prolong(3)
            thread.join()
    finally:
        sys.setswitchinterval(switching)
    assert not wrong

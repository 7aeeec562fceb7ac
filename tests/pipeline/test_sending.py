"""Frames on their way, without a cluster: what happens where a thread can't be started."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from logyard.pipeline.sink.sending import Sending


class Limit:
    """The limit of threads is reached after `left` more of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            if self.left <= 0:
                raise RuntimeError("can't start new thread")
            self.left -= 1
            start(thread)

        self.left = left
        monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.mark.parametrize("left", [0, 1])
def test_a_task_that_gets_no_thread_fails_and_does_not_wait(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[BaseException] = []
    sent: list[str] = []
    gate = threading.Event()

    def task() -> None:
        try:
            with Sending() as sending:
                try:
                    for log in "abc":
                        sending.put(log, partial(send, log), 1)
                finally:
                    gate.set()
        except RuntimeError as error:
            failures.append(error)

    def send(log: str) -> None:
        gate.wait(20.0)
        sent.append(log)

    work = threading.Thread(target=task, daemon=True)
    # One is the task's own.
    Limit(monkeypatch, left + 1)
    work.start()
    work.join(20.0)
    assert not work.is_alive(), "it waits for what nobody will send"
    assert [str(one) for one in failures] == ["can't start new thread"]
    assert sent in ([], ["a"][:left]), "what is behind a failure is not sent"

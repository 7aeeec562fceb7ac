"""What a failed storage job does: a table of pauses, and what freezes."""

from __future__ import annotations

import pytest

from logyard.engine.jobs import PAUSE_S_MAX, TRIES, Jobs
from logyard.protocol.errors import JobFailed


def test_each_failure_in_a_row_doubles_the_pause() -> None:
    now = [0.0]
    jobs = Jobs(lambda: now[0])
    assert jobs.is_due("a")
    for number, pause in enumerate((1, 2, 4, 8, 16, 32, 60, 60), 1):
        failed = jobs.fail("a", KeyError(7))
        assert f"KeyError: 7 (try {number})" in str(failed) and jobs.failed == number
        assert jobs.is_hopeless("a") == (number >= TRIES) and jobs.is_due("b") and pause <= PAUSE_S_MAX
        now[0] += pause - 0.01
        assert not jobs.is_due("a")
        now[0] += 0.01
        assert jobs.is_due("a")
    assert jobs.status() == {"failed": 8, "last": "a: KeyError: 7", "waiting": ["a"], "frozen": ""}
    jobs.done("a")
    assert jobs.is_due("a") and not jobs.is_hopeless("a") and not jobs.status()["waiting"]


def test_a_job_may_fail_for_days() -> None:
    """At the 1,025th failure in a row, within a day, the next pause had no number any more, and that ended the node."""
    now = [0.0]
    jobs = Jobs(lambda: now[0])
    for _ in range(3000):
        jobs.fail("a", KeyError(7))
        now[0] += PAUSE_S_MAX
        assert jobs.is_due("a")


def test_a_switch_that_was_cut_short_freezes_for_good() -> None:
    jobs = Jobs()
    jobs.check()
    with jobs.switching("a"):
        pass
    with pytest.raises(JobFailed, match="until this node is restarted"), jobs.switching("a"):
        raise AssertionError("half done")
    jobs.done("a")
    with pytest.raises(JobFailed, match="the switch of a: AssertionError: half done"):
        jobs.check()
    jobs.freeze("b", KeyError(1))
    assert jobs.frozen.startswith("the switch of a"), "the first reason stays"

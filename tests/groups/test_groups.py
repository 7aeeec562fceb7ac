"""The judge of consumer groups' histories finds what was planted; a short run of real processes passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from logyard.service.demo.judge import Commit, Given, History, judge

from .consumer import REBORN
from .run import places, run

RECORDS = 12


def history() -> History:
    """Two partitions, two consumers; the first one gives partition 1 up after it has committed all that it had."""
    sent = {(partition, offset): (partition, offset) for partition in (0, 1) for offset in range(RECORDS)}
    given = [Given(1 + offset, 1, 1, 0, 1, offset, 0, offset) for offset in range(RECORDS)]
    given += [Given(1.5 + offset, 1, 1, 1, 1, offset, 1, offset) for offset in range(6)]
    given += [Given(20 + offset, 2, 2, 1, 2, offset, 1, offset) for offset in range(6, RECORDS)]
    commits = [Commit(8, 8.1, 1, 1, 1, 6), Commit(14, 14.1, 1, 0, 1, RECORDS), Commit(40, 40.1, 2, 1, 2, RECORDS)]
    return History(sent, given, commits, {}, {}, {1: [1], 2: [2]})


def test_a_good_history_passes() -> None:
    verdict = judge(history())
    assert verdict.passed and (verdict.records, verdict.given, verdict.doubled) == (2 * RECORDS, 2 * RECORDS, 0)


def test_what_was_not_committed_is_given_again_after_a_kill() -> None:
    good = history()
    again = [Given(20 + 0.01 * offset, 2, 2, 1, 2, offset, 1, offset) for offset in range(2, 6)]
    commits = [good.commits[0]._replace(offset=2), *good.commits[1:]]
    killed = good._replace(given=[*good.given, *again], commits=commits, killed={1: 16.0})
    verdict = judge(killed)
    assert verdict.passed and verdict.doubled == 4 and not verdict.doubled_without_cause
    assert judge(killed._replace(killed={}, members={1: [1, 3], 2: [2]})).passed, "it was given up, and came again"
    assert not judge(killed._replace(killed={})).passed


def test_what_nobody_was_given_is_lost_also_where_its_partitions_number_is_anothers() -> None:
    sent = {(1, 1): (0, 0), (2, 1): (0, 0), (3, 1): (0, 0), (3, 2): (1, 0)}
    given = [Given(1, 1, 1, 0, 1, 0, 1, 1), Given(2, 1, 1, 7 * REBORN, 2, 0, 2, 1)]
    found = places(sent, given)
    assert found == {(0, 0): (1, 1), (7 * REBORN, 0): (2, 1), (-1, 0): (3, 1), (1, 0): (3, 2)}
    verdict = judge(history()._replace(sent=found, given=given, commits=[]))
    assert verdict.lost == 2 and len(verdict.violations) == 2


def _without(good: History) -> History:
    return good._replace(given=[one for one in good.given if (one.partition, one.offset) != (0, 5)])


def _ahead(good: History) -> History:
    """A commit that covers what was fetched, and not given."""
    return good._replace(commits=[good.commits[0]._replace(offset=8), *good.commits[1:]])


def _lost_owner(good: History) -> History:
    return good._replace(commits=[*good.commits, Commit(30, 30.1, 1, 1, 1, 6)])


def _two(good: History) -> History:
    return good._replace(given=[*good.given, Given(26.5, 1, 1, 1, 1, 7, 1, 7)])


def _twice(good: History) -> History:
    return good._replace(given=[*good.given, Given(12.9, 1, 1, 0, 1, 3, 0, 3)])


def _again_though_committed(good: History) -> History:
    return good._replace(given=[*good.given, Given(19.5, 2, 2, 1, 2, 3, 1, 3)], killed={1: 16.0})


def _reordered(good: History) -> History:
    """A key's newer record lies in a partition that was read too early."""
    sent = {**good.sent, (2, 0): (1, 99)}
    early = Given(2.2, 2, 2, 2, 1, 0, 1, 99)
    return good._replace(sent=sent, given=[*good.given, early])


def _mixed_up(good: History) -> History:
    return good._replace(given=[good.given[0]._replace(key=7), *good.given[1:]])


PLANTED: dict[str, tuple[Callable[[History], History], str]] = {
    "a record is given to nobody": (_without, "lost"),
    "a commit covers what was fetched ahead": (_ahead, "skipped"),
    "a commit of a lost ownership counts": (_lost_owner, "stale"),
    "an older owner goes on": (_two, "two owners"),
    "an ownership gives a record twice": (_twice, "given twice by one ownership"),
    "what was committed is given again": (_again_though_committed, "given again although committed"),
    "a key's records are given out of order": (_reordered, "out of order"),
    "records are mixed up": (_mixed_up, "mixed up"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_judge_finds(name: str) -> None:
    plant, said = PLANTED[name]
    verdict = judge(plant(history()))
    assert any(one.startswith(said) for one in verdict.violations), verdict.violations


@pytest.mark.long
def test_a_short_run(tmp_path: Path) -> None:
    found = run(tmp_path, 30.0, 5)
    assert found.passed, found.row()

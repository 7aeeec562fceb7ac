"""What a history of a consumer group must be like (docs/machines/groups.md), and what is wrong with one. Pure.

Times are of one machine's monotonic clock, of whichever process. A history is what producers were told, what each
consumer's loop was given, what its commits came to, and what was done to it. Called by `service.demo.cluster`, and by
the tests of consumer groups under faults.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

Place = tuple[int, int]
"""Partition, offset."""


class Given(NamedTuple):
    """A record that a loop was given."""

    at: float
    consumer: int
    member: int
    partition: int
    epoch: int
    offset: int
    key: int
    number: int


class Commit(NamedTuple):
    """An offset that counted."""

    asked: float
    answered: float
    consumer: int
    partition: int
    epoch: int
    offset: int


class History(NamedTuple):
    """`sent`: (key, its number) of each acknowledged record, by place; `killed`: when each consumer was killed;
    `stops`: from when to when each was stopped."""

    sent: Mapping[Place, tuple[int, int]]
    given: Sequence[Given]
    commits: Sequence[Commit]
    killed: Mapping[int, float]
    stops: Mapping[int, Sequence[tuple[float, float]]]
    members: Mapping[int, Sequence[int]]
    """The numbers that each consumer was a member under: a new one when it was given up, and came again."""
    fenced: Collection[int] = ()
    """Consumers that a newer process of their name took over while they ran: they learn of it with their next sign of
    life."""


class Verdict(NamedTuple):
    """`violations` in words; the rest are counts."""

    records: int
    given: int
    doubled: int
    doubled_without_cause: int
    lost: int
    skipped: int
    violations: list[str]

    @property
    def passed(self) -> bool:
        """Return whether there is nothing to say."""
        return not self.violations


def judge(history: History) -> Verdict:
    """Return what is wrong."""
    given = sorted(history.given)
    found: list[str] = []
    first: dict[Place, Given] = {}
    for one in given:
        first.setdefault((one.partition, one.offset), one)
    lost = [place for place in history.sent if place not in first]
    found += [f"lost: {place}, which is {history.sent[place]}, was given to nobody" for place in lost]
    for place, one in first.items():
        sent = history.sent.get(place)
        if sent is not None and sent != (one.key, one.number):
            found.append(f"mixed up: {place} was sent as {sent} and given as {(one.key, one.number)}")
    skipped = _skipped(history, first)
    found += skipped
    found += _stale(history, given)
    found += _two_owners(history, given)
    found += _out_of_order(given)
    doubled, without = _doubles(history, given, found)
    return Verdict(len(history.sent), len(given), doubled, without, len(lost), len(skipped), found)


def _skipped(history: History, first: Mapping[Place, Given]) -> list[str]:
    """Return each commit that covers what nobody was given."""
    found = []
    by_partition: dict[int, list[int]] = {}
    for partition, offset in sorted(history.sent):
        by_partition.setdefault(partition, []).append(offset)
    checked: dict[int, int] = {}
    for commit in sorted(history.commits):
        begin = checked.get(commit.partition, 0)
        for offset in by_partition.get(commit.partition, ()):
            if not begin <= offset < commit.offset:
                continue
            one = first.get((commit.partition, offset))
            if one is None or one.at > commit.asked:
                found.append(f"skipped: {commit} covers offset {offset}, which nobody had been given")
        checked[commit.partition] = max(begin, commit.offset)
    return found


def _stale(history: History, given: Sequence[Given]) -> list[str]:
    """Return each commit that counted although its ownership was lost."""
    begun: dict[int, list[tuple[int, float]]] = {}
    for one in given:
        epochs = begun.setdefault(one.partition, [])
        if all(epoch != one.epoch for epoch, _ in epochs):
            epochs.append((one.epoch, one.at))
    return [
        f"stale: {commit} counted, although epoch {epoch} had begun at {at:.3f}"
        for commit in history.commits
        for epoch, at in begun.get(commit.partition, ())
        if epoch > commit.epoch and at < commit.asked
    ]


def _two_owners(history: History, given: Sequence[Given]) -> list[str]:
    """Return each record that was given after the partition's next owner was given one, but for the one that a consumer
    was being given when it was stopped."""
    found = []
    newest: dict[int, Given] = {}
    before: dict[int, float] = {}
    for one in given:
        last = newest.get(one.partition)
        if last is not None and one.epoch < last.epoch:
            since = before.get(one.consumer, 0.0)
            if one.consumer not in history.fenced and not any(
                since <= end and start <= one.at for start, end in history.stops.get(one.consumer, ())
            ):
                found.append(f"two owners: {one} after {last}")
        elif last is None or one.epoch > last.epoch:
            newest[one.partition] = one
        before[one.consumer] = one.at
    return found


def _out_of_order(given: Sequence[Given]) -> list[str]:
    """Return each record of a key that was given, for the first time, before an earlier one of it."""
    found = []
    newest: dict[int, Given] = {}
    seen: set[tuple[int, int]] = set()
    for one in given:
        if (one.key, one.number) in seen:
            continue
        seen.add((one.key, one.number))
        last = newest.get(one.key)
        if last is not None and one.number < last.number:
            found.append(f"out of order: {one} after {last}")
        else:
            newest[one.key] = one
    return found


def _doubles(history: History, given: Sequence[Given], found: list[str]) -> tuple[int, int]:
    """Count records that were given again; they may be where their owner ended without giving its partition up, and
    only if they were not committed."""
    of: dict[Place, Given] = {}
    began: dict[tuple[int, int], float] = {}
    for one in given:
        began.setdefault((one.partition, one.epoch), one.at)
    doubled = without = 0
    for one in given:
        place = one.partition, one.offset
        last = of.get(place)
        of[place] = one
        if last is None:
            continue
        doubled += 1
        if last.epoch == one.epoch:
            found.append(f"given twice by one ownership: {one}")
            continue
        begin = began[one.partition, one.epoch]
        covered = max(
            (
                commit.offset
                for commit in history.commits
                if commit.partition == one.partition and commit.answered < begin
            ),
            default=0,
        )
        if one.offset < covered:
            found.append(f"given again although committed up to {covered}: {one}")
        replaced = max(history.members.get(last.consumer, (0,))) > last.member
        overtaken = one.epoch < last.epoch and one.consumer in history.fenced
        if last.consumer not in (*history.killed, *history.fenced) and not replaced and not overtaken:
            without += 1
            found.append(f"given again although its owner was well: {one} after {last}")
    return doubled, without

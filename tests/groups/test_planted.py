"""Bugs planted into the coordinator and the consumers show in the judgement of a short history, inside one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.client._async import consumer
from logyard.client._async.consumer import GroupConsumer
from logyard.client.reading import Membership, Reading
from logyard.machines.groups.state import Group, Part
from logyard.protocol.groups import Commit as Told
from logyard.service.demo.judge import Commit, Given, History, Place, Verdict, judge
from logyard.service.embedded import EmbeddedSystem, open_system

KEYS = 8
TTL_S = 1.5


class Story:
    """Sends, consumes and remembers."""

    def __init__(self, yard: EmbeddedSystem) -> None:
        self.yard = yard
        self.topic = yard.topic("t")
        self.sent: dict[Place, tuple[int, int]] = {}
        self.given: list[Given] = []
        self.commits: list[Commit] = []
        self.members: dict[int, list[int]] = {}
        self.numbers = [0] * KEYS

    async def send(self, rounds: int) -> None:
        """Send each key's next numbers."""
        for _ in range(rounds):
            for key in range(KEYS):
                self.numbers[key] += 1
                found = await self.topic.send(b"%d" % key, b"", b"%d" % self.numbers[key])
                self.sent[found.partition, found.offset] = key, self.numbers[key]

    def consumer(self) -> GroupConsumer:
        """Make a member."""
        return self.yard.consume("t", group="g", ttl=TTL_S, max_records=10)

    async def take(self, number: int, records: GroupConsumer, count: int, commit: int = 7) -> None:
        """Consume so many records, as long as any come; commit some."""
        for at in range(count):
            record = await records.get(1.0)
            if record is None:
                break
            member = records._own.member
            if member not in self.members.setdefault(number, []):
                self.members[number].append(member)
            assert record.key is not None and record.payload is not None
            row = (record.partition, record.epoch, record.offset, int(record.key), int(record.payload))
            self.given.append(Given(self.yard.clock(), number, member, *row))
            if at % commit == commit - 1:
                await self.commit(number, records)
        await self.commit(number, records)

    async def commit(self, number: int, records: GroupConsumer) -> None:
        """Commit, and note what counts."""
        epochs = {one.number: one.epoch for one in records._own.readings.values()}
        asked = self.yard.clock()
        done = await records.commit()
        rows = [(partition, epochs[partition], offset) for partition, offset in done.offsets.items()]
        self.commits += (Commit(asked, self.yard.clock(), number, *row) for row in rows)

    def judged(self) -> Verdict:
        """Return what the judge says."""
        return judge(History(self.sent, self.given, self.commits, {}, {}, self.members))


@pytest.fixture
async def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Story]:
    monkeypatch.setattr(consumer, "REFRESH_S", 0.05)
    async with open_system(tmp_path / "yard") as yard:
        yield Story(yard)


async def tell(story: Story) -> Verdict:
    """A member reads; another one comes; partitions are added, with records before them that nobody has read."""
    await story.topic.create(2)
    await story.send(8)
    first, second = story.consumer(), story.consumer()
    async with first, second:
        await story.take(1, first, 21)
        with trio.move_on_after(4):
            while len(second.assignment) < 1:
                await story.take(2, second, 1)
                await story.take(1, first, 3)
        await story.take(2, second, 5)
        await story.send(20)
        await story.topic.grow(4)
        await story.send(8)
        for _ in range(12):
            await story.take(2, second, 5)
            await story.take(1, first, 5)
        await story.send(2)
        with trio.move_on_after(8):
            while len({(one.partition, one.offset) for one in story.given}) < len(story.sent):
                await story.take(2, second, 30)
                await story.take(1, first, 30)
    return story.judged()


async def test_as_it_is(story: Story) -> None:
    verdict = await tell(story)
    assert verdict.passed and verdict.records == 38 * KEYS, verdict.violations


async def tell_ends(story: Story) -> Verdict:
    """Two members read; partitions are taken away with records that nobody has read, and what is sent then lies behind
    them elsewhere."""
    await story.topic.create(4)
    await story.send(4)
    first, second = story.consumer(), story.consumer()
    async with first, second:
        with trio.move_on_after(4):
            while len(second.assignment) < 2:
                await story.take(2, second, 1)
                await story.take(1, first, 1)
        await story.send(20)
        await story.topic.shrink(2)
        await story.send(8)
        # Who has the first partition is far ahead.
        numbers = [(1, first), (2, second)] if 0 in first.assignment else [(2, second), (1, first)]
        for number, member in numbers:
            await story.take(number, member, 1000)
        with trio.move_on_after(8):
            while len({(one.partition, one.offset) for one in story.given}) < len(story.sent):
                await story.take(2, second, 30)
                await story.take(1, first, 30)
    return story.judged()


@pytest.mark.long
async def test_partitions_that_end_as_it_is(story: Story) -> None:
    verdict = await tell_ends(story)
    assert verdict.passed and verdict.records == 32 * KEYS, verdict.violations


def _fetched(self: Membership) -> list[Told]:
    return [Told(one.key, one.epoch, one.following) for one in self.readings.values() if one.following > one.committed]


def _at_once(self: Part, target: int, due: int) -> None:
    self.grant(target)


def _all_read(self: Group, key: Any, fence: int) -> bool:
    return True


def _given_up(self: Membership) -> list[tuple[Any, int]]:
    return [(one.key, one.epoch) for one in self.readings.values() if one.revoking]


PLANTED: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "commits cover what was fetched": (Membership, "commits", _fetched, "skipped"),
    "a partition moves without being given up": (Part, "ask_back", _at_once, "given again"),
    "new partitions are read at once": (Group, "_past", _all_read, "out of order"),
    "a partition is given up with uncommitted records": (Membership, "confirms", _given_up, "given again"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
async def test_a_planted_bug_shows(story: Story, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, bug, said = PLANTED[name]
    monkeypatch.setattr(owner, method, bug)
    verdict = await tell(story)
    assert any(said in one for one in verdict.violations), verdict.violations


def _all_passed(self: Group, key: Any) -> int:
    return 1_000_000


def _no_bound(self: Reading, partition: Any, passed: int) -> None:
    self.passed = passed


ENDS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "survivors do not wait for partitions that ended": (Group, "_passed", _all_passed, "out of order"),
    "members read on behind a fence": (Reading, "bound", _no_bound, "out of order"),
    "partitions that ended are nobody's": (Group, "_is_read", lambda self, key: key in self._ends, "lost"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ENDS)
async def test_a_planted_bug_of_partitions_that_end_shows(
    story: Story, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method, bug, said = ENDS[name]
    monkeypatch.setattr(owner, method, bug)
    verdict = await tell_ends(story)
    assert any(said in one for one in verdict.violations), verdict.violations

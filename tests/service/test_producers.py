"""Producers of logs and topics on real engines: what is acknowledged is there, however late it comes beside others."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.client._async.topics import Sent, Topic
from logyard.client.aio import connect
from logyard.client.numbering import WINDOW, _comes_again, slot_of
from logyard.client.sync import connect_sync
from logyard.protocol.errors import LogyardError
from logyard.protocol.topics import PARTITION_OPENING, partition_log
from logyard.service.embedded import EmbeddedLog, EmbeddedSystem, open_system
from tests.engine.host.cluster import until

from .test_exactly_once import served
from .test_topics import served as topics_served

COUNT = 2 * WINDOW


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[EmbeddedSystem]:
    async with open_system(tmp_path / "yard") as found:
        yield found


@pytest.fixture
def others_wait(monkeypatch: pytest.MonkeyPatch) -> trio.Event:
    """Set when a sequence has to wait for a lower one."""
    found, wait = trio.Event(), EmbeddedSystem.wait_for

    async def waits(self: EmbeddedSystem, event: trio.Event, seconds: float) -> None:
        found.set()
        await wait(self, event, seconds)

    monkeypatch.setattr(EmbeddedSystem, "wait_for", waits)
    return found


async def numbers_of(yard: EmbeddedSystem, name: str) -> list[int]:
    """The numbers in the payloads of a log, in their order; a long payload is 0."""
    found = [bytes(record.payload or b"") async for record in yard.log(name).records()]
    return [0 if len(one) > 100 else int(one) for one in found]


async def test_a_payload_that_takes_long_to_travel_is_not_taken_for_written(
    yard: EmbeddedSystem, others_wait: trio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = EmbeddedLog._upload

    async def slowly(self: EmbeddedLog, *more: Any) -> int:
        await others_wait.wait()
        return await upload(self, *more)

    monkeypatch.setattr(EmbeddedLog, "_upload", slowly)
    await yard.create("log")
    producer = await yard.log("log").producer("p")
    offsets: list[range] = []

    async def send_large() -> None:
        offsets.append(await producer.append(b"", bytes(2 << 20)))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_large)
            await until(lambda: producer.last == 1, "the first has its sequence")
            for number in range(1, COUNT):
                assert len(await producer.append(b"", b"%d" % number)) == 1
            others_wait.set()
    numbers = await numbers_of(yard, "log")
    assert sorted(numbers) == list(range(COUNT)) and numbers.index(0) == offsets[0][0] == WINDOW - 1


async def test_a_record_that_waits_for_its_partition_to_open_is_not_taken_for_written(
    yard: EmbeddedSystem, others_wait: trio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked again late, behind a window of later ones, and was acknowledged with the offset -1, and lost."""
    append, refused = EmbeddedLog.append_many, list[Any]()

    async def closed(self: EmbeddedLog, records: Any, **more: Any) -> range:
        if records[0][1] == b"0" and not refused:
            refused.append(records)
            await others_wait.wait()
            raise LogyardError("it is not open yet", code=PARTITION_OPENING)
        return await append(self, records, **more)

    monkeypatch.setattr(EmbeddedLog, "append_many", closed)
    topic = yard.topic("orders")
    await topic.create(1)
    producer = await topic.producer("p")
    found: list[Sent] = []

    async def send_late() -> None:
        found.append(await producer.send(b"late", b"", b"0"))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_late)
            await until(lambda: producer.last == 1, "the first has its sequence")
            for number in range(1, COUNT):
                assert (await producer.send(b"%d" % number, b"", b"%d" % number)).offset >= 0
            others_wait.set()
    numbers = await numbers_of(yard, partition_log("orders", 0))
    assert sorted(numbers) == list(range(COUNT)) and numbers.index(0) == found[0].offset == WINDOW - 1


async def test_a_sequence_that_comes_too_late_is_refused_and_not_said_to_be_written(yard: EmbeddedSystem) -> None:
    await yard.create("log")
    topic = yard.topic("orders")
    await topic.create(1)
    log, first = yard.log("log"), await topic.producer("p")
    producer = await log.producer("p")
    for number in range(3, COUNT):
        await producer.append(b"", b"%d" % number, sequence=number)
        await first.send(b"k", b"", b"%d" % number, sequence=number)
    for sequence, payload in ((1, b"1"), (2, bytes(2 << 20))):
        with pytest.raises(LogyardError, match="not known") as refused:
            await producer.append(b"", payload, sequence=sequence)
        assert refused.value.code == "sequence_forgotten"
        with pytest.raises(LogyardError, match="not known") as refused:
            await first.send(b"k", b"", payload, sequence=sequence)
        assert refused.value.code == "sequence_forgotten"
    # What it was told of it still knows; and another run of the program may send all of it again.
    assert await producer.append(b"", b"3", sequence=3) == range(0)
    assert (await first.send(b"k", b"", b"3", sequence=3)).offset == -1
    again, other = await log.producer("p"), await topic.producer("p")
    for number in range(3, COUNT):
        offsets = await again.append(b"", b"%d" % number, sequence=number)
        assert offsets == (range(0) if number < COUNT - WINDOW else range(number - 3, number - 2))
        assert (await other.send(b"k", b"", b"%d" % number, sequence=number)).offset == (offsets or [-1])[0]
    for name in ("log", partition_log("orders", 0)):
        assert await numbers_of(yard, name) == list(range(3, COUNT))


async def test_threads_share_a_producer(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, doors):
        seeds = list(doors.addresses.values())

        def work() -> None:
            with connect_sync(seeds) as yard:
                producer = yard.log("log").producer("p")

                def send(lane: int) -> None:
                    for number in range(6):
                        assert len(producer.append(b"%d %d" % (lane, number), b"")) == 1

                threads = [threading.Thread(target=send, args=(lane,)) for lane in range(72)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

        await trio.to_thread.run_sync(work)
        records = await run.read(await run.leader())
        assert sorted(head for head, _ in records) == sorted(
            b"%d %d" % (lane, number) for lane in range(72) for number in range(6)
        )


@pytest.mark.parametrize(("before", "after", "low", "high"), [(2, 3, 0, 1), (3, 2, 0, 2)], ids=["added", "taken away"])
async def test_a_replay_after_partitions_changed_doubles_nothing(
    yard: EmbeddedSystem, before: int, after: int, low: int, high: int
) -> None:
    """First many records for one partition, then many for another: slots of both lie in one log afterwards."""
    topic = yard.topic("orders")
    await topic.create(before)
    slots = (await topic._route()).slots
    keys = {number: list[bytes]() for number in range(before)}
    for number in range(2000):
        keys[slots[slot_of(b"%d" % number)]].append(b"%d" % number)
    records = list(enumerate(keys[low][:100] + keys[high][:100], 1))
    producer = await topic.producer("p")
    for sequence, key in records:
        await producer.send(key, b"", b"%d" % sequence, sequence=sequence)
    row = await topic.alter(after)
    producer = await yard.topic("orders").producer("p")
    for sequence, key in records:
        await producer.send(key, b"", b"%d" % sequence, sequence=sequence)
    found = [number for one in row.readable for number in await numbers_of(yard, one.log)]
    assert sorted(found) == [sequence for sequence, _ in records]


@pytest.mark.long
async def test_histories_of_a_producer_through_changes_and_crashes(tmp_path: Path) -> None:
    """More tasks than a window send by one producer, and again what failed, while partitions come and go and their
    leaders die."""
    async with topics_served(tmp_path, 3) as (run, doors, servers), connect(servers, timeout=3.0) as yard:
        topic = yard.topic("orders")
        await topic.create(2)
        producer, numbers, sent = await topic.producer("p"), itertools.count(1), set[int]()
        over = False

        async def send() -> None:
            while not over:
                number = next(numbers)
                while number not in sent:
                    try:
                        await producer.send(b"%d" % (number % 50), b"", b"%d" % number, sequence=number)
                        sent.add(number)
                    except LogyardError as error:
                        assert error.code != "sequence_forgotten" and _comes_again(error), error

        async def altered(count: int) -> None:
            while True:
                try:
                    await yard.topic("orders").alter(count)
                    return
                except LogyardError as error:
                    assert error.retry != "never" or error.code == "refused", error
                await yard.pause(0.1)

        with trio.fail_after(180):
            async with trio.open_nursery() as nursery:
                for _ in range(WINDOW + 30):
                    nursery.start_soon(send)
                for step, count in enumerate((3, 2, 4)):
                    await until(lambda least=150 * (step + 1): len(sent) > least, "some are sent")
                    leader = await run.leader(partition_log("orders", step % 2))
                    await doors.crash(leader)
                    await doors.start(leader)
                    await altered(count)
                over = True
        found = Counter[int]()
        for one in (await topic.describe()).readable:
            async for record in yard.log(one.log).records():
                found[int(record.payload or b"")] += 1
        assert found == Counter(sent) and sent == set(range(1, len(sent) + 1))


async def test_a_producer_knows_what_it_wrote_to_a_partition_that_is_being_added(
    yard: EmbeddedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next sequences were those of records that are there, and what was sent under them was taken for these."""
    topic, tell = yard.topic("orders"), Topic._tell

    async def half(self: Topic, command: str, values: dict[str, Any]) -> Any:
        if command == "added":
            raise LogyardError("killed here", code="killed")
        return await tell(self, command, values)

    await topic.create(1)
    producer = await topic.producer("p")
    with monkeypatch.context() as patched:
        patched.setattr(Topic, "_tell", half)
        with pytest.raises(LogyardError, match="killed"):
            await topic.grow(2)
        while (await producer.send(b"%d" % producer.last)).partition == 0:
            assert producer.last < 100
    assert (await yard.topic("orders").producer("p")).last == producer.last

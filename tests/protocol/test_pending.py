"""A reply that somebody waits for: the first outcome counts, and everybody hears of it once."""

from __future__ import annotations

import asyncio

import pytest
import trio
import trio.testing

from logyard.protocol.errors import Busy, NotLeader, encode_error
from logyard.protocol.pending import DROP, FAILED, OK, PendingReply
from logyard.protocol.wire import ProtocolError


def test_the_first_outcome_counts() -> None:
    pending: PendingReply[bytes] = PendingReply()
    assert not pending.done
    pending.reply(7, OK, memoryview(b"first"))
    pending.fail(NotLeader(2))
    pending.cut(NotLeader(2))
    pending.set(b"second")
    assert pending.done and pending.result() == b"first" and type(pending.value) is bytes and not pending.was_cut


def test_a_refusal_comes_as_its_class_and_anew_for_each_who_asks() -> None:
    pending: PendingReply[bytes] = PendingReply()
    pending.reply(7, FAILED, encode_error(Busy("a queue", 0.5)))
    caught = []
    for _ in range(2):
        with pytest.raises(Busy) as info:
            pending.result()
        caught.append(info.value)
    assert caught[0] is not caught[1] and caught[0].retry_after == caught[1].retry_after == 0.5


def test_what_cannot_be_read_settles_nothing() -> None:
    pending: PendingReply[bytes] = PendingReply()
    with pytest.raises(ProtocolError):
        pending.reply(7, FAILED, b"\xc1")
    assert not pending.done


def test_the_end_of_a_connection_says_that_it_may_have_happened() -> None:
    pending: PendingReply[bytes] = PendingReply()
    pending.cut(NotLeader(0))
    assert pending.was_cut and isinstance(pending.error, NotLeader)


def test_callbacks_are_called_once_before_and_after() -> None:
    pending: PendingReply[int] = PendingReply()
    told: list[str] = []
    pending.on_done(lambda: told.append("first"))
    pending.on_done(lambda: told.append("second"))
    pending.set(1)
    pending.set(2)
    pending.on_done(lambda: told.append("late"))
    assert told == ["first", "second", "late"]


async def test_all_who_wait_share_one_event() -> None:
    pending: PendingReply[int] = PendingReply()
    made: list[trio.Event] = []
    found: list[int] = []

    def event() -> trio.Event:
        made.append(trio.Event())
        return made[-1]

    async def waiter() -> None:
        found.append(await pending.wait(event))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(waiter)
        await trio.testing.wait_all_tasks_blocked()
        pending.set(5)
    assert found == [5, 5, 5] and len(made) == 1
    assert await pending.wait(event) == 5 and len(made) == 1, "what is settled is not waited for"


def test_it_is_waited_for_under_asyncio_as_well() -> None:
    async def main() -> int:
        pending: PendingReply[int] = PendingReply()
        asyncio.get_running_loop().call_soon(pending.set, 5)
        return await pending.wait(asyncio.Event)

    assert asyncio.run(main()) == 5


def test_what_nobody_waits_for_is_dropped() -> None:
    DROP.reply(1, OK, b"")

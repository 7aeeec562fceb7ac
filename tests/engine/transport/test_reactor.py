"""Sockets read from within the loop's wait: nothing is lost, faults meet their own task, and tasks go on beside it."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
import trio
import trio.testing

from logyard.engine.transport import reactor as module
from logyard.engine.transport.reactor import RUN, Reactor, reactor, receive_each

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no epoll elsewhere")


def the_reactor() -> Reactor:
    """Return this run's. There is one with the trio that is installed: an upgrade under which there is none is seen."""
    found = reactor()
    assert found is not None
    return found


@contextmanager
def connected() -> Iterator[tuple[socket.socket, trio.socket.SocketType]]:
    """Yield two ends; the second one's is read."""
    left, right = socket.socketpair()
    left.setblocking(False)
    reading = trio.socket.from_stdlib_socket(right)
    with left, reading:
        yield left, reading


class Reader:
    """Reads `size` bytes at a time; says that it is enough after `enough` reads."""

    def __init__(self, size: int = 8, enough: int = 1 << 30) -> None:
        self.got = bytearray()
        self.reads = 0
        self.enough = enough
        self.into = memoryview(bytearray(size))
        self.inside: list[object] = []
        self.then: Callable[[], None] = lambda: None

    def buffer(self) -> memoryview | None:
        """Return where the next bytes go."""
        return None if self.reads == self.enough else self.into

    def received(self, count: int) -> bool:
        """Take bytes."""
        self.reads += bool(count)
        self.got += self.into[:count]
        self.inside.append(trio.lowlevel.in_trio_task())
        self.then()
        return count > 0


async def run(sock: trio.socket.SocketType, reader: Reader) -> bool:
    return await receive_each(sock, reader.buffer, reader.received)


async def test_bytes_are_handed_over_outside_of_any_task_and_the_end_is_seen() -> None:
    the_reactor()
    with connected() as (left, right):
        reader = Reader(1000)
        sent = bytes(range(256)) * 40
        over: list[bool] = []

        async def read() -> None:
            over.append(await run(right, reader))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for at in range(0, len(sent), 999):
                await trio.testing.wait_all_tasks_blocked()
                left.sendall(sent[at : at + 999])
            left.close()
        assert reader.got == sent and over == [False]
        assert not any(reader.inside)


async def test_who_has_to_wait_for_room_gets_its_task_back_and_loses_nothing() -> None:
    with connected() as (left, right):
        reader = Reader(4, enough=2)
        left.sendall(b"abcdefghij")
        assert await run(right, reader)
        assert reader.got == b"abcdefgh"
        reader.enough = 9
        left.close()
        assert not await run(right, reader)
        assert reader.got == b"abcdefghij"


@pytest.mark.parametrize("error", [ValueError("bad bytes"), ConnectionResetError(), KeyboardInterrupt()])
async def test_what_a_call_raises_is_raised_in_its_own_task_alone(error: BaseException) -> None:
    with connected() as (left, right), connected() as (other, good):
        bad, fine = Reader(), Reader()

        def fault() -> None:
            raise error

        bad.then = fault
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, good, fine)
            await trio.testing.wait_all_tasks_blocked()
            left.sendall(b"x")
            other.sendall(b"one")
            with pytest.raises(type(error)):
                await run(right, bad)
            other.sendall(b"two")
            other.close()
        assert fine.got == b"onetwo"


async def test_a_cancelled_reader_is_called_no_more_and_may_read_again() -> None:
    with connected() as (left, right):
        reader = Reader()
        with trio.move_on_after(0) as scope:
            await run(right, reader)
        assert scope.cancelled_caught
        left.sendall(b"later")
        await trio.testing.wait_all_tasks_blocked()
        assert not reader.got
        left.close()
        await run(right, reader)
        assert reader.got == b"later"


async def test_a_call_that_cancels_its_own_task_or_another_one() -> None:
    with connected() as (left, right), connected() as (other, victim):
        mine, theirs = trio.CancelScope(), trio.CancelScope()
        reader, silent = Reader(), Reader()

        def cancel() -> None:
            mine.cancel()
            theirs.cancel()

        reader.then = cancel

        async def under(scope: trio.CancelScope, sock: trio.socket.SocketType, what: Reader) -> None:
            with scope:
                await run(sock, what)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(under, mine, right, reader)
            nursery.start_soon(under, theirs, victim, silent)
            await trio.testing.wait_all_tasks_blocked()
            left.sendall(b"x")
        assert reader.got == b"x" and mine.cancelled_caught and theirs.cancelled_caught
        other.sendall(b"y")
        await trio.testing.wait_all_tasks_blocked()
        assert not silent.got


async def test_a_socket_closed_under_its_reader_or_in_its_call_ends_it_and_its_number_is_not_read_again() -> None:
    with connected() as (left, right):
        reader = Reader()
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await run(right, reader)

            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            number = right.fileno()
            right.close()
            with connected() as (again, successor):
                assert number in (again.fileno(), successor.fileno())
                again.sendall(b"not yours")
                await trio.testing.wait_all_tasks_blocked()
        assert not reader.got
        with pytest.raises(trio.ClosedResourceError):
            await run(right, reader)
    with connected() as (left, right):
        reader = Reader()
        reader.then = right.close
        left.sendall(b"x")
        with pytest.raises(trio.ClosedResourceError):
            await run(right, reader)


async def test_two_readers_of_one_socket_are_refused() -> None:
    with connected() as (_, right):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, right, Reader())
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await run(right, Reader())
            nursery.cancel_scope.cancel()


async def test_tasks_timers_and_other_sockets_go_on_beside_a_peer_that_never_stops() -> None:
    """The socket is readable at each look: trio's own timers, sockets and tasks come all the same."""
    with connected() as (left, right), connected() as (other, beside):
        reader = Reader(64)

        def more() -> None:
            left.send(b"x" * 64)

        reader.then = more
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, right, reader)
            more()
            await trio.sleep(0.01)
            other.sendall(b"hello")
            assert await beside.recv(5) == b"hello"
            event = trio.Event()
            trio.lowlevel.current_trio_token().run_sync_soon(event.set)
            await event.wait()
            for _ in range(10):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert reader.reads > 5


async def test_a_call_may_wake_tasks_and_begin_some() -> None:
    with connected() as (left, right):
        reader, seen = Reader(), trio.Event()
        async with trio.open_nursery() as nursery:

            async def task() -> None:
                await trio.lowlevel.checkpoint()
                seen.set()

            reader.then = lambda: nursery.start_soon(task)
            nursery.start_soon(run, right, reader)
            await trio.testing.wait_all_tasks_blocked()
            left.sendall(b"x")
            with trio.fail_after(5):
                await seen.wait()
            nursery.cancel_scope.cancel()


async def test_what_is_to_be_done_soon_comes_behind_what_the_others_brought_and_once() -> None:
    there = the_reactor()
    with connected() as (left, right), connected() as (other, second):
        order: list[str] = []
        first, later = Reader(), Reader()

        def on_first() -> None:
            order.append("first")
            there.soon(lambda: order.append("soon"))
            other.sendall(b"y")

        first.then = on_first
        later.then = lambda: order.append("second")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, right, first)
            nursery.start_soon(run, second, later)
            await trio.testing.wait_all_tasks_blocked()
            left.sendall(b"x")
            await trio.testing.wait_all_tasks_blocked()
            assert order == ["first", "second", "soon"]
            nursery.cancel_scope.cancel()


async def test_all_is_quiet_only_when_no_call_brought_anything() -> None:
    """`wait_all_tasks_blocked` is what virtual time stands on: a socket that was read is something that happened."""
    with connected() as (left, right), connected() as (back, other):
        reader, answers = Reader(), Reader()
        rounds = 20

        def answer() -> None:
            if reader.reads < rounds:
                back.sendall(b"y")

        reader.then = answer
        answers.then = lambda: left.sendall(b"x")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, right, reader)
            nursery.start_soon(run, other, answers)
            await trio.testing.wait_all_tasks_blocked()
            left.sendall(b"x")
            await trio.testing.wait_all_tasks_blocked()
            assert reader.reads == rounds
            nursery.cancel_scope.cancel()


async def under_another_clock() -> None:
    with connected() as (left, right):
        reader = Reader()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, right, reader)
            left.sendall(b"x")
            await trio.sleep(3600)
            assert reader.got == b"x"
            nursery.cancel_scope.cancel()


def test_virtual_time_jumps_all_the_same() -> None:
    trio.run(under_another_clock, clock=trio.testing.MockClock(autojump_threshold=0.0))


def test_each_run_has_its_own_and_gives_its_descriptors_back() -> None:
    async def used() -> Reactor:
        assert RUN.get(None) is None
        with connected() as (left, right):
            left.close()
            await run(right, Reader())
        assert RUN.get() is the_reactor()
        return the_reactor()

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    assert trio.run(used) is not trio.run(used)
    assert len(os.listdir("/proc/self/fd")) == before


def without_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_installed", lambda: None)


@pytest.mark.parametrize(
    "check",
    [
        test_who_has_to_wait_for_room_gets_its_task_back_and_loses_nothing,
        test_a_cancelled_reader_is_called_no_more_and_may_read_again,
    ],
)
async def test_without_one_a_task_reads(monkeypatch: pytest.MonkeyPatch, check: Callable[[], Awaitable[None]]) -> None:
    without_parts(monkeypatch)
    assert reactor() is None
    await check()

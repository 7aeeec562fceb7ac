"""The scopes, nurseries, handovers and sockets that the client has under asyncio: what trio would do."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from logyard.client.runtime import running
from logyard.client.runtime_asyncio import AsyncioRuntime, Socket


def loops() -> list[Callable[[], asyncio.AbstractEventLoop]]:
    """asyncio's own loop, and uvloop's where it is installed."""
    found: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop]
    try:
        import uvloop
    except ImportError:
        return found
    return [*found, uvloop.new_event_loop]


LOOPS = pytest.mark.parametrize("loop", loops(), ids=lambda one: one.__module__.split(".")[0])


def run(loop: Callable[[], asyncio.AbstractEventLoop], task: Coroutine[Any, Any, None]) -> None:
    """Run a task under a loop, for ten seconds at most."""
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(task, 10))


def runtime() -> AsyncioRuntime:
    found = running()
    assert isinstance(found, AsyncioRuntime)
    return found


def test_outside_of_both_libraries_there_is_none() -> None:
    with pytest.raises(RuntimeError, match="connect_sync"):
        running()


@LOOPS
def test_a_scope_ends_at_its_deadline_and_swallows_only_that(loop: Any) -> None:
    async def main() -> None:
        one = runtime()
        with one.scope(one.now() + 0.01) as scope:
            await asyncio.Event().wait()
        assert scope.cancelled_caught
        with one.scope(one.now() + 100) as outer, one.scope(one.now() - 1) as inner:
            await asyncio.Event().wait()
        assert inner.cancelled_caught and not outer.cancelled_caught
        with one.scope() as early:
            early.cancel()
        assert not early.cancelled_caught, "it did not wait any more"
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()

    run(loop, main())


@LOOPS
def test_a_scope_that_was_cancelled_before_it_began_ends_at_once(loop: Any) -> None:
    async def main() -> None:
        scope = runtime().scope()
        scope.cancel()
        with scope:
            await asyncio.Event().wait()
        assert scope.cancelled_caught

    run(loop, main())


@LOOPS
def test_a_scope_leaves_alone_what_others_cancel(loop: Any) -> None:
    async def waits() -> None:
        one = runtime()
        with one.scope(one.now() + 100):
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(loop, main())


@LOOPS
def test_a_nursery_that_is_cancelled_ends_with_its_tasks_and_leaves_nothing(loop: Any) -> None:
    async def main() -> None:
        ended: list[str] = []

        async def waits(name: str) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(name)
                nursery.start_soon(waits, "late")

        async with runtime().nursery() as nursery:
            nursery.start_soon(waits, "a")
            nursery.start_soon(waits, "b")
            await asyncio.sleep(0)
            nursery.cancel_scope.cancel()
        assert sorted(ended) == ["a", "b"]
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()

    run(loop, main())


@LOOPS
def test_a_tasks_failure_ends_its_nursery(loop: Any) -> None:
    async def main() -> None:
        async def fails() -> None:
            raise OSError("the disk")

        with pytest.raises(ExceptionGroup) as found:
            async with runtime().nursery() as nursery:
                nursery.start_soon(fails)
                await asyncio.Event().wait()
        assert [type(one) for one in found.value.exceptions] == [OSError]

    run(loop, main())


@LOOPS
def test_what_is_handed_to_a_task_that_is_cancelled_meanwhile_comes_back(loop: Any) -> None:
    async def main() -> None:
        back: list[int] = []
        one = runtime().handover(back.append)
        task = asyncio.create_task(one.take())
        await asyncio.sleep(0)
        assert one.waited and one.give(7) and not one.give(8)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert back == [7]
        task = asyncio.create_task(one.take())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not one.waited and not one.give(9) and back == [7]

    run(loop, main())


@LOOPS
def test_all_who_are_parked_are_woken_together(loop: Any) -> None:
    async def main() -> None:
        lot = runtime().lot()
        tasks = [asyncio.create_task(lot.park()) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        assert lot
        lot.unpark_all()
        await asyncio.gather(*tasks[1:])
        assert not lot

    run(loop, main())


def pair() -> tuple[Socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return Socket(asyncio.get_running_loop(), ours), theirs


@LOOPS
def test_a_socket_moves_more_than_it_holds_both_ways_at_once(loop: Any) -> None:
    async def main() -> None:
        one, theirs = pair()
        size = 8 << 20

        def echo() -> None:
            left = size
            while left:
                data = theirs.recv(1 << 16)
                theirs.sendall(data)
                left -= len(data)
            theirs.close()

        async def sends() -> None:
            left = memoryview(bytes(size))
            while left:
                left = left[await one.sendmsg([left[:100], left[100:]]) :]

        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(echo))
            group.create_task(sends())
            found, buffer = 0, memoryview(bytearray(1 << 16))
            while count := await one.recv_into(buffer):
                found += count
        assert found == size
        one.close()

    run(loop, main())


@LOOPS
def test_closing_a_socket_wakes_who_reads_and_who_writes(loop: Any) -> None:
    async def main() -> None:
        one, theirs = pair()

        async def writes() -> None:
            while True:
                await one.send(bytes(1 << 20))

        reading, writing = asyncio.create_task(one.recv(10)), asyncio.create_task(writes())
        for _ in range(5):
            await asyncio.sleep(0)
        one.close()
        one.close()
        for task in (reading, writing):
            with pytest.raises(OSError):
                await task
        with pytest.raises(OSError):
            await one.recv(10)
        theirs.close()

    run(loop, main())


def test_the_client_under_asyncio_does_not_import_trio() -> None:
    program = """
import asyncio, sys
from logyard.client.aio import connect
from logyard.protocol.errors import LogyardError

async def main():
    try:
        async with connect(["127.0.0.1:1"], timeout=0.1):
            pass
    except LogyardError as error:
        print(error.retry, "trio" in sys.modules)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["elsewhere", "False"], done

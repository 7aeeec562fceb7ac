"""What a caller sees of exceptions: one is not wrapped in a group, and all that clients raise is of their family."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.client import errors
from logyard.client.aio import connect
from logyard.client.background import background
from logyard.client.sync import connect_sync
from logyard.protocol.frame import encode_frame
from logyard.service import memory_cluster
from logyard.service.embedded import open_system

from .fake_system import FakeCluster, fake_cluster

Opened = Callable[[FakeCluster, Path], AbstractAsyncContextManager[object]]


def connected(found: FakeCluster, path: Path) -> AbstractAsyncContextManager[object]:
    return connect(list(found.addresses.values()))


def embedded(found: FakeCluster, path: Path) -> AbstractAsyncContextManager[object]:
    return open_system(path)


def in_memory(found: FakeCluster, path: Path) -> AbstractAsyncContextManager[object]:
    return memory_cluster.cluster(path, 1)


BOTH = pytest.mark.parametrize("opened", [connected, embedded, in_memory])


@BOTH
async def test_one_exception_of_a_body_comes_as_it_is(tmp_path: Path, opened: Opened) -> None:
    mine = ValueError("mine")
    async with fake_cluster(1) as fake:
        with pytest.raises(ValueError, match="mine") as found:
            async with opened(fake, tmp_path):
                raise mine
        assert found.value is mine


@BOTH
async def test_several_stay_a_group(tmp_path: Path, opened: Opened) -> None:
    async with fake_cluster(1) as fake:
        with pytest.raises(ExceptionGroup) as found:
            async with opened(fake, tmp_path):
                raise ExceptionGroup("both", [ValueError("one"), KeyError("two")])
    assert [type(one) for one in found.value.exceptions] == [ValueError, KeyError]


@BOTH
async def test_a_cancelled_body_is_cancelled_and_nothing_else(tmp_path: Path, opened: Opened) -> None:
    async with fake_cluster(1) as fake:
        with trio.CancelScope() as scope:
            async with opened(fake, tmp_path):
                scope.cancel()
                await trio.sleep_forever()
    assert scope.cancelled_caught


async def fail(error: Exception, when: trio.Event, told: trio.Event) -> None:
    await when.wait()
    told.set()
    raise error


async def test_a_failure_beside_the_body_is_its_context() -> None:
    when, told = trio.Event(), trio.Event()
    with pytest.raises(ValueError, match="mine") as found:
        async with background(trio.open_nursery(), trio.Cancelled) as nursery:
            nursery.start_soon(fail, OSError("the disk"), when, told)
            when.set()
            try:
                await trio.sleep_forever()
            finally:
                try:
                    raise KeyError("before")
                except KeyError:
                    raise ValueError("mine") from None
    chain: list[type[BaseException]] = []
    at: BaseException | None = found.value
    while at is not None:
        chain.append(type(at))
        at = at.__context__
    assert chain[:2] == [ValueError, KeyError] and OSError in chain


async def test_a_failure_without_the_bodys_fault_comes_as_it_is() -> None:
    when, told = trio.Event(), trio.Event()
    with pytest.raises(OSError, match="the disk"):
        async with background(trio.open_nursery(), trio.Cancelled) as nursery:
            nursery.start_soon(fail, OSError("the disk"), when, told)
            when.set()
            await trio.sleep_forever()


async def test_a_session_that_ended_under_a_command_is_an_error_of_the_family() -> None:
    """Consumers and large appends have sessions of their own, and no other one to move to."""
    async with fake_cluster(1) as found:
        log, system = found.create("log", [1], 1), found.nodes[1]
        once = system._once

        def ends(of: Any, frame: memoryview) -> Any:
            reply = once(of, frame)
            if system.lose:
                # It is applied, its answer is lost, and by the next try its session has ended.
                for session in list(log.sessions.by_id):
                    log.sessions.expire(session)
            return reply

        system._once = ends  # type: ignore[method-assign,assignment]

        def blocking() -> None:
            with connect_sync(list(found.addresses.values())) as yard:
                session = yard.begin_session("log")
                system.lose = 1
                frame = encode_frame([(b"", None)], command=b"\x01", session=session, sequence=1)
                with pytest.raises(errors.SessionExpired, match="may or may not"):
                    yard.command("log", frame)
                system.lose = 1
                with pytest.raises(errors.SessionExpired, match="may or may not"):
                    yard.log("log").append(b"x")
                assert yard.log("log").append(b"y") == 2, "in another session"
                system.lose = 1
                with pytest.raises(errors.SessionExpired, match="may or may not"):
                    yard.log("log").append(b"z", bytes(2 << 20))

        await trio.to_thread.run_sync(blocking)

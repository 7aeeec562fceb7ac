"""Calls of the asynchronous client, beside a network that is made up: who gives up when, and who does not; and its
lanes, which somebody always looks after."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.client.admin import Call, call_leader
from logyard.client.aio import Yard, connect
from logyard.client.network import Network
from logyard.client.sequences import Sequences
from logyard.client.session import Pushed, not_secured
from logyard.client.session_keeper import SessionKeeper
from logyard.client.sync import connect_sync
from logyard.protocol import wire
from logyard.protocol.errors import (
    BadRequest,
    Busy,
    LogyardError,
    NotLeader,
    SessionExpired,
    Unknown,
    UnknownGroup,
    encode_error,
)
from logyard.protocol.frame import Buffer

from .test_link import UID, Wire

ADDRESS = ("a", 1)


class Net(Network):
    """A client of nobody. `targets`: what each try meets in turn."""

    def __init__(self) -> None:
        super().__init__(["a:1"], cast(Any, None), timeout=5.0, retry=True, window_bytes=1 << 20)
        self.targets: list[Callable[[], Any]] = []

    async def _target(self, call: Call[Any], retry: Any) -> Any:
        return self.targets.pop(0)()


def untrusted() -> Any:
    raise not_secured(ADDRESS, "the connection was closed within the TLS handshake")


def heard_and_cut() -> Any:
    """A node that pushes something, and is gone then."""

    async def call(method: str, arguments: Any, deadline: float, pushed: Pushed) -> tuple[Any, bool]:
        pushed({"kind": "alive"}, memoryview(b""))
        return None, True

    return SimpleNamespace(call=call, address=ADDRESS)


def over() -> Any:
    async def call(method: str, arguments: Any, deadline: float, pushed: Pushed) -> tuple[Any, bool]:
        raise SessionExpired("it ended")

    return SimpleNamespace(call=call, address=ADDRESS)


async def test_who_listens_for_long_bears_a_handshake_that_fails(autojump_clock: Any) -> None:
    """Also when connections ended often before: that was in its long life, not in a row."""
    net = Net()
    net.targets = [*[heard_and_cut] * 9, untrusted, over]
    call = call_leader("session_listen", "a", session=1)
    with pytest.raises(SessionExpired):
        await net.run(call, inf, lambda header, data: None)
    net.targets = [untrusted] * 9
    with pytest.raises(LogyardError, match="no TLS"):
        await net.run(call, inf, lambda header, data: None)


def without_it() -> Any:
    async def call(method: str, arguments: Any, deadline: float, pushed: Pushed) -> tuple[Any, bool]:
        raise UnknownGroup("no group 'a' on node 1")

    return SimpleNamespace(call=call, address=ADDRESS)


def without_a_leader() -> Any:
    raise NotLeader.told("a: no leader found in time")


async def test_who_finds_no_leader_at_last_says_what_it_was_told_before(autojump_clock: Any) -> None:
    net = Net()
    net.targets = [without_it, *[without_a_leader] * 99]
    with pytest.raises(NotLeader, match="no leader found in time; told before: no group 'a' on node 1"):
        await net.run(call_leader("latest", "a"), 0.5)


def too_slow() -> Any:
    async def call(method: str, arguments: Any, deadline: float, pushed: Pushed) -> tuple[Any, bool]:
        raise Unknown(f"{method}: node 2 did not answer in time")

    return SimpleNamespace(call=call, address=ADDRESS)


async def test_a_group_that_moved_to_a_node_that_hangs_is_not_unknown(autojump_clock: Any) -> None:
    """Who lists topics took that for none."""
    net = Net()
    net.targets = [without_it, *[too_slow] * 99]
    with pytest.raises(Unknown):
        await net.run(call_leader("latest", "a"), 0.5)


async def test_that_another_group_has_the_name_says_more_than_silence(autojump_clock: Any) -> None:
    async def call(method: str, arguments: Any, deadline: float, pushed: Pushed) -> tuple[Any, bool]:
        raise UnknownGroup("log 'a' is gone", another=True)

    net = Net()
    net.targets = [lambda: SimpleNamespace(call=call, address=ADDRESS), *[too_slow] * 99]
    with pytest.raises(UnknownGroup, match="is gone"):
        await net.run(call_leader("latest", "a"), 0.5)


async def test_what_is_no_name_of_a_host_is_told_as_that() -> None:
    for text in ("a..b:1", "x" * 64 + ".org:1"):
        with pytest.raises(BadRequest, match="no name of a host"):
            async with connect([text]):
                pass
        with pytest.raises(BadRequest, match="no name of a host"):
            connect_sync([text])


class Node(Wire):
    """A node that leads one log, and answers its frames when the test does."""

    def _take(self, who: str, buffers: list[Buffer], room: int) -> int:
        data = b"".join(buffers)[:room]
        view = self._receiver.buffer()
        view[: len(data)] = data
        for frame in self._receiver.received(len(data)):
            if frame.type == wire.APPEND:
                self.requests.append(frame.request)
            elif frame.type == wire.CALL:
                self.push([wire.encode_result(frame.request, [["log", UID, 1, [1], False, "log"]])])
        return len(data)

    def push(self, buffers: list[Buffer]) -> None:
        self._come += b"".join(buffers)
        self._bell.set()
        self._bell = trio.Event()

    def replies(self, *items: tuple[int, LogyardError | None]) -> None:
        """Answer frames, all in one: that they are there, or with an error."""
        self.push(
            wire.encode_replies(
                [
                    (request, 0, wire.REPLY.pack(0, 1)) if error is None else (request, 1, encode_error(error))
                    for request, error in items
                ]
            )
        )


@asynccontextmanager
async def one_node(exactly_once: bool = False) -> AsyncIterator[tuple[Node, Yard]]:
    node = Node()

    async def dial(host: str, port: int) -> Node:
        await trio.lowlevel.checkpoint()
        return node

    yard = Yard(["127.0.0.1:1"], timeout=30.0, retry=True, window_bytes=1 << 20, exactly_once=exactly_once)
    yard.dial = dial
    async with trio.open_nursery() as nursery:
        nursery.start_soon(yard.serve)
        await yard.first_contact()
        yield node, yard
        nursery.cancel_scope.cancel()


async def refused_while_it_stands_in_its_links_list(node: Node, yard: Yard, error: LogyardError) -> None:
    """Have the answer to one frame give a record, and the last of those under way refused right behind it."""
    log = yard.log("log")

    def another() -> None:
        log.append_nowait(b"r", b"3")

    first = log.append_nowait(b"r", b"1")
    await trio.testing.wait_all_tasks_blocked()
    log.append_nowait(b"r", b"2")
    await trio.testing.wait_all_tasks_blocked()
    first.on_done(another)
    a, b = node.requests
    node.replies((a, None), (b, error))
    await trio.sleep(1.0)


async def test_a_lane_that_is_refused_while_it_stands_in_its_links_list_is_not_forgotten(autojump_clock: Any) -> None:
    async with one_node() as (node, yard):
        await refused_while_it_stands_in_its_links_list(node, yard, Busy("a test", 0.002))
        assert len(node.requests) == 4, "both are sent when the time is over"


async def test_a_lane_whose_session_ends_while_it_stands_in_its_links_list_gets_another(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[object] = []
    monkeypatch.setattr(SessionKeeper, "want", lambda self, lane, nursery: wanted.append(lane))
    async with one_node(exactly_once=True) as (node, yard):
        lane = yard.log("log").lane
        lane.numbers = Sequences(9)
        await refused_while_it_stands_in_its_links_list(node, yard, SessionExpired("a test"))
        assert wanted == [lane]


async def test_what_waits_for_a_session_behind_what_needs_none_gets_one(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is never answered shares their lane's turn, and nothing comes after it that would remind of them."""
    wanted: list[object] = []
    monkeypatch.setattr(SessionKeeper, "want", lambda self, lane, nursery: wanted.append(lane))
    async with one_node(exactly_once=True) as (node, yard):
        log = yard.log("log")
        # What left last was not alone, so the next ones leave in the next turn.
        for number in range(2):
            log.append_nowait(b"r", b"%d" % number, reply="none")
        await trio.testing.wait_all_tasks_blocked()
        log.append_nowait(b"r", b"2", reply="none")
        log.append_nowait(b"r", b"3")
        await trio.sleep(1.0)
        assert len(node.requests) == 2 and wanted == [log.lane]

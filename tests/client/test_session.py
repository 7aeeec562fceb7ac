"""Requests without a connection, what a client knows of a cluster, blocking sessions as they begin, one heartbeat."""

from __future__ import annotations

import threading
from contextlib import suppress
from math import inf
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from logyard.client import errors
from logyard.client.sequences import Sequences
from logyard.client.session import Channel, Routes
from logyard.client.session_keeper import SessionKeeper
from logyard.client.sync_session import SyncSession
from logyard.protocol import wire
from logyard.protocol.pending import PendingReply


def test_who_does_not_know_kinds_is_told_none() -> None:
    """Neither an older server nor an older client meets a byte that it refuses."""
    channel = Channel()
    for hello, flags in (
        (wire.Hello("c", 1, {}, 1 << 20), wire.LOW_PRIORITY),
        (wire.Hello("c", 1, {}, 1 << 20, wire.KNOWS_KINDS), wire.LOW_PRIORITY | wire.for_kind("log")),
    ):
        channel.hello = hello
        channel.outgoing = wire.Outgoing()
        channel.append(7, [b"frame"], object(), wire.LOW_PRIORITY | wire.for_kind("log"))  # type: ignore[arg-type]
        assert channel.outgoing.window()[0][5] == flags
    old = wire.pack([wire.VERSION, "c", 1, [], 1 << 20])
    assert wire.decode_hello(old).features == 0
    assert wire.unpack(wire.encode_hello("c", 1, (), 1 << 20, wire.KNOWS_KINDS)[wire.HEADER_BYTES :])[:5] == [
        wire.VERSION, "c", 1, [], 1 << 20
    ]  # fmt: skip
    routes = Routes(["h:1"])
    routes.located([["old", 5, 1, [1, 2]]])
    routes.require("old", "kv")
    routes.located([["new", 5, 1, [1, 2], False, "log"]])
    with pytest.raises(errors.WrongKind):
        routes.require("new", "kv")


def test_each_request_has_the_next_number() -> None:
    channel = Channel()
    pending: PendingReply[Any] = PendingReply()
    channel.call("locate", {"names": ["log"]}, pending)
    channel.append(7, [], cast(Any, object()))
    channel.call("locate", {"names": ["log"]}, pending)
    assert list(channel.pending) == [1, 2, 3] and channel.asked == 3


def test_a_frame_may_have_just_as_many_bytes_as_the_server_takes() -> None:
    channel = Channel()
    channel.hello = wire.Hello("c", 1, {}, 100)
    pending: PendingReply[Any] = PendingReply()
    channel.append(7, [bytes(100 - wire.UID.size)], cast(Any, pending))
    assert list(channel.pending) == [1]


def test_a_log_is_compressed_as_its_servers_say_last() -> None:
    routes = Routes(["h:1"])
    told: list[list[object]] = [[False, "log"], [True], [], [True, "log"], [False, "log"]]
    for more in told:
        routes.located([["a", 5, 1, [1, 2], *more]])
        assert routes.compressed == ({"a"} if True in more else set()), more


def test_the_servers_are_a_list() -> None:
    """connect_sync("127.0.0.1:7001") said that an address is HOST:PORT, not '1'."""
    with pytest.raises(errors.BadRequest, match=r"a list of HOST:PORT, \['127.0.0.1:7001'\] for instance, not a str"):
        Routes("127.0.0.1:7001")


def test_a_server_is_known_where_it_was_met_unless_it_says_another_address() -> None:
    routes = Routes(["h:1"])
    routes.greeted(wire.Hello("c", 1, {2: "i:2"}, 1 << 20), ("h", 1))
    assert routes.addresses == {1: ("h", 1), 2: ("i", 2)}
    routes.greeted(wire.Hello("c", 2, {}, 1 << 20), ("seen", 9))
    assert routes.addresses[2] == ("i", 2)


def test_the_first_session_takes_the_place_of_none() -> None:
    begun: list[int] = []

    def begin(stale: int, deadline: float) -> int:
        begun.append(stale)
        return 6 + len(begun)

    session = SyncSession(begin, 60.0)
    ticket = session.take(monotonic() + 60)
    assert (ticket[0].session, ticket[1], begun) == (7, 1, [0])


def test_who_could_not_begin_a_session_leaves_it_to_the_next() -> None:
    begun: list[int] = []

    def begin(stale: int, deadline: float) -> int:
        begun.append(stale)
        if len(begun) == 1:
            raise errors.NotLeader(0)
        return 7

    session = SyncSession(begin, 60.0)
    with pytest.raises(errors.NotLeader):
        session.take(monotonic() + 60)
    assert session.take(monotonic() + 60)[0].session == 7 and begun == [0, 0]


@pytest.mark.parametrize("seconds", [5.0, inf])
def test_who_waits_for_a_session_is_woken_when_it_has_begun(seconds: float) -> None:
    waiting, found = threading.Event(), list[int]()

    class Condition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waiting.set()
            return super().wait(timeout)

    def wait() -> None:
        with suppress(errors.Busy):
            found.append(session.take(monotonic() + seconds)[0].session)

    waiter = threading.Thread(target=wait)

    def begin(stale: int, deadline: float) -> int:
        waiter.start()
        assert waiting.wait(5)
        return 7

    session = SyncSession(begin, 60.0)
    session._changed = Condition(session._lock)
    assert session.take(monotonic() + 60)[0].session == 7
    waiter.join()
    assert found == [7]


@pytest.mark.parametrize("open_", [False, True])
async def test_a_beat_names_a_client_with_an_open_session_and_ends_before_the_next(open_: bool) -> None:
    asked: list[tuple[object, ...]] = []
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        if slept:
            raise StopAsyncIteration
        slept.append(seconds)

    async def ask(*what: object) -> None:
        asked.append(what)

    network = SimpleNamespace(
        runtime=SimpleNamespace(sleep=sleep, nursery=trio.open_nursery),
        routes=SimpleNamespace(addresses={1: ("h", 1)}),
        lanes=[SimpleNamespace(numbers=Sequences(7) if open_ else None)],
        ask=ask,
        clock=lambda: 100.0,
    )
    keeper = SessionKeeper(cast(Any, network), 6.0)
    with pytest.raises(StopAsyncIteration):
        await keeper.beat()
    assert slept == [2.0]
    assert asked == ([(("h", 1), "heartbeat", {"client": keeper.client}, 102.0)] if open_ else [])

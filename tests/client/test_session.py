"""One connection's requests without a connection, what a client knows of a cluster, and the first blocking session."""

from __future__ import annotations

from time import monotonic
from typing import Any, cast

import pytest

from logyard.client import errors
from logyard.client.session import Channel, Routes
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

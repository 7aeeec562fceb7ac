"""Calls of the asynchronous client, beside a network that is made up: who gives up when, and who does not."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from logyard.client.admin import Call, call_leader
from logyard.client.aio import connect
from logyard.client.network import Network
from logyard.client.session import Pushed, not_secured
from logyard.client.sync import connect_sync
from logyard.protocol.errors import BadRequest, LogyardError, SessionExpired

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


async def test_what_is_no_name_of_a_host_is_told_as_that() -> None:
    for text in ("a..b:1", "x" * 64 + ".org:1"):
        with pytest.raises(BadRequest, match="no name of a host"):
            async with connect([text]):
                pass
        with pytest.raises(BadRequest, match="no name of a host"):
            connect_sync([text])

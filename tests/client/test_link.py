"""Who sends what a client has: the caller when it is alone, the task that reads, or the task that sends."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import trio
import trio.testing

from logyard.client.lane import Lane, Window
from logyard.client.link import Link, Owner
from logyard.client.runtime_trio import TrioRuntime
from logyard.protocol import wire
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import Buffer
from logyard.protocol.pending import PendingReply

UID = 7


class Wire:
    """A server's end, in memory: `sent` says by whom each write came, and how many records its frames brought."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[int]]] = []
        self.requests: list[int] = []
        self.room = 1 << 30
        self.broken = False
        self._come = b"".join([wire.encode_hello("c", 1, [(1, "127.0.0.1:1")], 1 << 20)])
        self._bell = trio.Event()
        self._receiver = wire.Receiver(wire.server_limits())
        self._receiver.limits = (0, wire.HELLO_BYTES_MAX, *wire.server_limits()[2:])

    async def recv_into(self, buffer: memoryview) -> int:
        while not self._come:
            await self._bell.wait()
        count = min(len(buffer), len(self._come))
        buffer[:count], self._come = self._come[:count], self._come[count:]
        return count

    def answer(self, *requests: int) -> None:
        """Answer appends."""
        items: list[tuple[int, int, Buffer]] = [(request, 0, wire.REPLY.pack(0, 1)) for request in requests]
        self._come += b"".join(wire.encode_replies(items))
        self._bell.set()
        self._bell = trio.Event()

    async def sendmsg(self, buffers: list[Buffer]) -> int:
        await trio.lowlevel.checkpoint()
        return self._take("task", buffers, 1 << 30)

    def sendmsg_now(self, buffers: list[Buffer]) -> int:
        """Take what there is room for."""
        if self.broken:
            raise BrokenPipeError
        if not self.room:
            raise BlockingIOError
        return self._take("caller", buffers, self.room)

    def _take(self, who: str, buffers: list[Buffer], room: int) -> int:
        data = b"".join(buffers)[:room]
        records: list[int] = []
        view = self._receiver.buffer()
        view[: len(data)] = data
        for frame in self._receiver.received(len(data)):
            if frame.type == wire.APPEND:
                self.requests.append(frame.request)
                # The heads of the records are all that has this letter.
                records.append(bytes(frame.body).count(b"r"))
        self.sent.append((who, records))
        return len(data)

    def close(self) -> None:
        """Say nothing more."""


class Client:
    """A link with one lane; `owner` is what it knows of its network."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.lost = False
        routes: Any = SimpleNamespace(greeted=lambda hello, address: None)
        owner: Any = SimpleNamespace(
            runtime=TrioRuntime(), routes=routes, dial=self.dial, clock=trio.current_time,
            opened=lambda link: None, lost=lambda link: None, kick=self.kick,
        )  # fmt: skip
        self.link = Link(cast(Owner, owner), 1, ("127.0.0.1", 1))
        window = Window(1 << 30, lambda: None)
        self.lane = Lane("log", window, trio.current_time, self.kick, random.Random(1), event=trio.Event)
        self.lane.uid, self.lane.leader = UID, 1

    async def dial(self, host: str, port: int) -> Wire:
        await trio.lowlevel.checkpoint()
        return self.wire

    def kick(self, lane: Lane) -> None:
        if not lane.dirty:
            self.link.queue(lane)

    def append(self, then: Callable[[], None] = lambda: None) -> Any:
        """Append one record without waiting."""
        batch, _ = self.lane.add(b"r", None, 60.0)
        batch.pending.on_done(then)
        self.kick(self.lane)
        return batch.pending

    @property
    def sent(self) -> list[tuple[str, list[int]]]:
        """Return what was sent since this was asked last."""
        sent, self.wire.sent = self.wire.sent, []
        return [(who, records) for who, records in sent if records]


@asynccontextmanager
async def connected() -> AsyncIterator[Client]:
    client = Client()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.link.run)
        await client.link.opened.wait()
        await trio.testing.wait_all_tasks_blocked()
        yield client
        nursery.cancel_scope.cancel()


async def test_who_is_alone_sends_at_once() -> None:
    async with connected() as client:
        for number in range(3):
            pending = client.append()
            assert client.sent == [("caller", [1])]
            client.wire.answer(client.wire.requests[-1])
            await trio.testing.wait_all_tasks_blocked()
            assert pending.done and not client.sent, number


async def test_what_is_given_while_something_is_under_way_shares_a_frame() -> None:
    async with connected() as client:
        for _ in range(5):
            client.append()
        assert client.sent == [("caller", [1])]
        await trio.testing.wait_all_tasks_blocked()
        assert client.sent == [("task", [4])]
        client.wire.answer(*client.wire.requests)
        await trio.testing.wait_all_tasks_blocked()
        # Whoever came together comes together again: nobody goes ahead of the others.
        for _ in range(5):
            client.append()
        assert not client.sent
        await trio.testing.wait_all_tasks_blocked()
        assert client.sent == [("task", [5])]


async def test_what_an_answer_makes_one_give_leaves_when_all_answers_were_read() -> None:
    async with connected() as client:
        client.append(client.append)
        client.append(client.append)
        await trio.testing.wait_all_tasks_blocked()
        assert client.sent == [("caller", [1]), ("task", [1])]
        client.wire.answer(*client.wire.requests)
        await trio.testing.wait_all_tasks_blocked()
        assert client.sent == [("caller", [2])]


async def test_what_a_full_socket_does_not_take_is_sent_later_and_in_order() -> None:
    async with connected() as client:
        client.wire.room = 0
        client.append()
        assert not client.sent
        client.append()
        await trio.testing.wait_all_tasks_blocked()
        # Both by the task that sends: the first one's frame was made already.
        assert client.sent == [("task", [1, 1])] and client.wire.requests == [1, 2]
        client.wire.answer(1, 2)
        await trio.testing.wait_all_tasks_blocked()
        client.link._lone = True
        client.wire.room = 10
        client.append()
        assert client.wire.sent[-1][0] == "caller"
        await trio.testing.wait_all_tasks_blocked()
        assert client.wire.requests == [1, 2, 3] and client.wire.sent[-1] == ("task", [1])


async def test_a_broken_socket_is_left_to_the_task_that_ends_the_connection() -> None:
    async with connected() as client:
        client.wire.broken = True

        async def broken(buffers: list[Buffer]) -> int:
            raise BrokenPipeError("gone")

        client.wire.sendmsg = broken  # type: ignore[method-assign]
        client.append()
        assert client.link.failure is None
        await trio.testing.wait_all_tasks_blocked()
        failure: LogyardError | None = client.link.failure
        assert failure is not None and "gone" in str(failure)


async def test_an_append_out_of_the_middle_of_making_frames_comes_behind_them() -> None:
    """A frame above the server's limit is refused while the others are made, and tells its caller at once."""
    async with connected() as client:
        client.lane.add_many([(b"", b"x" * (2 << 20))], 60.0).pending.on_done(client.append)
        client.lane.add_many([(b"rr", None)], 60.0)
        client.kick(client.lane)
        await trio.testing.wait_all_tasks_blocked()
        assert [count for _, records in client.sent for count in records] == [2, 1]
        assert client.wire.requests == sorted(client.wire.requests)


async def test_after_its_end_a_link_sends_nothing() -> None:
    async with connected() as client:
        pass
    client.append()
    assert not client.link.open and not client.sent


async def test_what_others_give_meanwhile_is_no_sign_of_life(autojump_clock: trio.testing.MockClock) -> None:
    """Requests that came in pairs kept the connection to a process that was stopped, and nobody looked elsewhere."""
    async with connected() as client:
        client.wire.room = 0
        began, send, more = trio.current_time(), client.wire.sendmsg, ["list", "list"]

        async def taking(buffers: list[Buffer]) -> int:
            if more:
                client.link.channel.call(more.pop(), {}, PendingReply())
            return await send(buffers)

        client.append()
        await trio.testing.wait_all_tasks_blocked()
        client.wire.sendmsg = taking  # type: ignore[method-assign]
        await trio.sleep(5.0)
        client.append()
        await trio.testing.wait_all_tasks_blocked()
        assert client.link.progress == began and not more and not client.link.channel.outgoing.size


async def test_what_leaves_slowly_is_no_silence(autojump_clock: trio.testing.MockClock) -> None:
    """A connection without progress is cut, and a large frame may take its time."""
    async with connected() as client:
        send, client.wire.room = client.wire.sendmsg, 0
        began = trio.current_time()
        whole, moments = False, []

        async def slowly(buffers: list[Buffer]) -> int:
            moments.append(client.link.progress - began)
            await trio.sleep(8.0)
            return await send(buffers) if whole else client.wire._take("task", buffers, 1)

        client.wire.sendmsg = slowly  # type: ignore[method-assign]
        client.append()
        while len(moments) < 3:
            await trio.sleep(1.0)
        # After each piece but the last: what takes all that is left may be the buffer of a socket alone.
        whole = True
        assert moments[1:] == [8.0, 16.0]
        await trio.sleep(9.0)
        assert len(moments) == 3 and client.wire.requests == [1]
        assert client.link.progress - began == 16.0

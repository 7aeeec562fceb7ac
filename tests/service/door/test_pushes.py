"""Messages and payloads from a machine to its client: real engines, leader changes, slow readers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.client import errors, messages
from logyard.client.aio import Yard, connect
from logyard.client.messages import Delivered, Message, Session, decode_push
from logyard.client.session import Channel
from logyard.engine.machine import Effect, Send
from logyard.protocol import wire
from logyard.protocol.frame import Buffer
from logyard.protocol.pending import PendingReply
from logyard.service.door import pushes
from logyard.service.door.pushes import WAITING_BYTES_MAX, Listener
from tests.engine.host.cluster import Cluster, cluster, until
from tests.engine.host.scribe import Scribe, command

from ..test_exactly_once import Doors


class Caller(Scribe):
    """A scribe that greets whoever listens."""

    def on_listen(self, session: int) -> Sequence[Effect]:
        return [Send(session, b"welcome %d" % len(self.written("note")))]


def machines(name: str, arguments: dict[str, Any]) -> Any:
    return {"scribe": Scribe, "caller": Caller}[name]()


@asynccontextmanager
async def served(path: Path, count: int = 1, machine: str = "scribe") -> AsyncIterator[tuple[Cluster, Doors, Yard]]:
    async with cluster(path, count, group="", machines=machines) as run, trio.open_nursery() as nursery:
        await until(lambda: all(len(one.system.live) == count for one in run.nodes.values()), "all are live")
        await run.create("s", machine=machine)
        doors = Doors(run, nursery)
        for number in run.ids:
            await doors.open(number)
        async with connect(list(doors.addresses.values())) as yard:
            yield run, doors, yard
        nursery.cancel_scope.cancel()


def listens(run: Cluster, session: Session, among: Sequence[int] = ()) -> bool:
    return any(session.id in run.system(number).replicas.delivery.sinks for number in among or run.nodes)


async def following(session: Session, count: int) -> list[messages.Received]:
    found: list[messages.Received] = []
    with trio.fail_after(20):
        async for received in session.messages():
            found.append(received)
            if len(found) == count:
                break
    return found


async def test_messages_and_payloads_reach_their_client_in_order(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, _, yard):
        session, other = await yard.open_session("s"), await yard.open_session("s")
        await until(lambda: listens(run, session) and listens(run, other), "both listen")
        large = bytes(range(256)) * 1024
        for metadata, body in ((b"h0", b"small"), (b"h1", large), (b"h2", None)):
            assert await session.command(command("keep"), body, metadata=metadata) == b"kept"
        await session.command(command("send", session.id, b"before"))
        await session.command(command("deliver", session.id))
        await session.command(command("send", session.id, b"after"))
        await session.command(command("send", other.id, b"for another"))
        before, delivered, after = await following(session, 3)
        assert isinstance(before, Message) and before.data == b"before"
        assert isinstance(delivered, Delivered) and delivered.tag == b"tag"
        assert [row[2:] for row in delivered.records] == [(b"h0", b"small"), (b"h1", large), (b"h2", None)]
        assert isinstance(after, Message) and after.data == b"after" and after.index > delivered.index > before.index
        (only,) = await following(other, 1)
        assert isinstance(only, Message) and only.data == b"for another"
        assert (session.dropped, session.lost) == (0, 0)


async def test_a_session_follows_the_leader_and_is_greeted_there(tmp_path: Path) -> None:
    async with served(tmp_path, 3, "caller") as (run, doors, yard):
        session = await yard.open_session("s")
        assert [one.data for one in await following(session, 1) if isinstance(one, Message)] == [b"welcome 0"]
        first = await run.leader("s")
        await session.command(command("note", "one"))
        # A leader that hands over, and is still there.
        second = 1 + first % 3
        await run.lead(second, "s")
        assert [one.data for one in await following(session, 1) if isinstance(one, Message)] == [b"welcome 1"]
        assert listens(run, session, [second]) and not listens(run, session, [first])
        # A leader that dies.
        await session.command(command("note", "two"))
        await doors.crash(second)
        assert [one.data for one in await following(session, 1) if isinstance(one, Message)] == [b"welcome 2"]
        await session.command(command("send", session.id, b"still here"))
        assert [one.data for one in await following(session, 1) if isinstance(one, Message)] == [b"still here"]


async def test_a_closed_session_stops(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, _, yard):
        session = await yard.open_session("s")
        await until(lambda: listens(run, session), "it listens")
        await session.command(command("send", session.id, b"last"))
        await session.close()
        assert len([one async for one in session.messages()]) <= 1, "what had come, then the end"
        await until(lambda: not listens(run, session), "nobody listens")
        assert run.member(1, "s").sessions is None and not yard.sessions.held
        with pytest.raises(errors.SessionExpired):
            await session.command(command("note", "too late"))


async def test_a_session_that_the_group_ended_says_so(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, _, yard):
        session = await yard.open_session("s")
        await until(lambda: listens(run, session), "it listens")
        await run.nodes[1].close_session("s", session.id)
        with trio.fail_after(20), pytest.raises(errors.SessionExpired):
            async for _ in session.messages():
                pass


async def test_what_a_slow_reader_has_no_room_for_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "BUFFER_BYTES", 1000)
    async with served(tmp_path) as (run, _, yard):
        session = await yard.open_session("s")
        await until(lambda: listens(run, session), "it listens")
        for number in range(10):
            await session.command(command("send", session.id, b"%d" % number * 300))
        await until(lambda: session.dropped == 8, "two were kept")
        assert [one.data[:1] for one in await following(session, 2) if isinstance(one, Message)] == [b"0", b"1"]
        await session.command(command("send", session.id, b"again"))
        assert [one.data for one in await following(session, 1) if isinstance(one, Message)] == [b"again"]


async def test_a_client_that_does_not_read_costs_a_bound_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushes, "WAITING_BYTES_MAX", 100_000)
    async with served(tmp_path) as (run, doors, yard):
        other = await yard.open_session("s")
        host, _, port = doors.addresses[1].rpartition(":")
        with trio.socket.socket() as deaf:
            await deaf.connect((host, int(port)))
            await deaf.send(wire.encode_hello())
            assert await deaf.recv(4096)
            await run.nodes[1].open_session("s", 77, 7, 60_000)
            await deaf.send(wire.encode_call(1, "session_listen", {"name": "s", "session": 77}))
            delivery = run.system(1).replicas.delivery
            await until(lambda: 77 in delivery.sinks and listens(run, other), "both listen")
            with trio.fail_after(20):
                while not delivery.dropped:
                    await other.command(command("send", 77, bytes(60_000)))
            await other.command(command("send", other.id, b"not late"))
            (received,) = await following(other, 1)
            assert isinstance(received, Message) and received.data == b"not late"
            assert run.nodes[1].status()["pushes_dropped"] > 0 and run.nodes[1].status()["listening"] == 2
        await until(lambda: 77 not in delivery.sinks, "its connection ended")


class Taking:
    """A connection that takes nothing until it is told to."""

    def __init__(self, sent: wire.Outgoing) -> None:
        self.sent = sent
        self.lot = trio.lowlevel.ParkingLot()

    @property
    def unsent(self) -> int:
        return self.sent.size

    async def drained(self, size: int) -> None:
        while self.sent.size > size:
            await self.lot.park()

    def queue(self, frame: list[Buffer]) -> None:
        self.sent.push(frame)

    def take(self, size: int) -> None:
        self.sent.sent(size)
        self.lot.unpark_all()


async def test_records_wait_for_room_and_none_is_dropped() -> None:
    connection = Taking(wire.Outgoing())
    sinks = [Listener(number, connection) for number in (1, 2, 3)]
    size = WAITING_BYTES_MAX // 4

    async def deliver(sink: Listener) -> None:
        for at in range(4):
            await sink.room(size)
            assert sink.push(1, 2, {"kind": "records", "index": at}, [bytes(size)])

    async with trio.open_nursery() as nursery:
        for sink in sinks:
            nursery.start_soon(deliver, sink)
        with trio.fail_after(5):
            while nursery.child_tasks:
                await trio.testing.wait_all_tasks_blocked()
                assert connection.unsent <= WAITING_BYTES_MAX
                connection.take(min(connection.unsent, size))
    assert not any(sink.dropped for sink in sinks)


def test_a_connection_that_takes_nothing_loses_pushes() -> None:
    sent = wire.Outgoing()
    listener = Listener(3, Taking(sent))
    part = bytes(WAITING_BYTES_MAX // 4)
    given = [listener.push(1, 2, {"kind": "message", "index": at}, [part]) for at in range(6)]
    assert given == [True, True, True, False, False, False] and listener.dropped == 3
    assert sent.size <= WAITING_BYTES_MAX
    sent.sent(sent.size)
    assert not listener.push(1, 2, {"kind": "message", "index": 1}, [bytes(wire.PUSH_BYTES_MAX)]), (
        "no client takes that"
    )
    assert listener.push(1, 2, {"kind": "message", "index": 1}, [bytes(WAITING_BYTES_MAX + 1)]), "one alone may"


def test_a_push_is_for_a_call_that_listens_and_bounded() -> None:
    def channel() -> tuple[Channel, list[Any]]:
        one, found = Channel(), list[Any]()
        feed(one, wire.encode_hello("c", 1))
        one.call("session_listen", {}, PendingReply(), lambda header, data: found.append((header, bytes(data))))
        one.call("list", {}, PendingReply())
        return one, found

    def feed(one: Channel, data: bytes) -> None:
        one.receiver.buffer()[: len(data)] = data
        one.received(len(data))

    one, found = channel()
    for at in range(2):
        feed(one, b"".join(wire.encode_push(1, {"kind": "message", "index": at}, [b"a", b"b"])))
    assert found == [({"kind": "message", "index": at}, b"ab") for at in range(2)] and 1 in one.pending
    for request in (2, 9):
        with pytest.raises(wire.ProtocolError):
            feed(channel()[0], b"".join(wire.encode_push(request, {}, [])))
    with pytest.raises(wire.ProtocolError, match="limit"):
        feed(channel()[0], wire.HEADER.pack(wire.PUSH_BYTES_MAX + 1, wire.PUSH, 0, 0, 1))


@pytest.mark.parametrize(
    "header",
    [
        7,
        {"kind": "message"},
        {"kind": "records", "index": 1, "tag": b"", "records": [[1, 0, 9, -1]]},
        {"kind": "records", "index": 1, "tag": b"", "records": [[1, 0, -1, 1]]},
        {"kind": "records", "index": 1, "tag": b"", "records": [[1, 0, 1]]},
        {"kind": "records", "index": 1, "records": []},
    ],
)
def test_a_push_that_makes_no_sense_is_a_protocol_error(header: object) -> None:
    with pytest.raises(wire.ProtocolError):
        decode_push(header, memoryview(b"abc"))

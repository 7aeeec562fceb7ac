"""Large payloads through both clients: against real nodes, in pieces, from memory and streams, and what is left of
those that fail."""

from __future__ import annotations

import io
import random
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.client.aio import connect
from logyard.client.sync import Yard, connect_sync
from logyard.client.upload import Cutter, Upload, pieces_of
from logyard.protocol.errors import BadRequest, LogyardError
from logyard.protocol.frame import PAYLOAD_BYTES_MAX, PIECE_BYTES_MAX
from logyard.protocol.records import BlockError, encode_long, records_of, split_blocks
from logyard.service.local_cluster import LocalCluster

from .fake_system import fake_cluster

MIB = 1 << 20


# Cutting


@pytest.mark.parametrize(
    "sizes", [[1], [PIECE_BYTES_MAX], [PIECE_BYTES_MAX + 1], [3 * PIECE_BYTES_MAX + 5], [10] * 7, [0, 7, 0]]
)
def test_pieces_are_full_but_for_the_last(sizes: list[int]) -> None:
    chance = random.Random(1)
    parts = [chance.randbytes(size) for size in sizes]
    cutter = Cutter()
    pieces = [bytes(piece) for piece in pieces_of(parts, cutter)]
    assert b"".join(pieces) == b"".join(parts) and cutter.size == sum(sizes)
    assert all(len(piece) == PIECE_BYTES_MAX for piece in pieces[:-1]) and all(pieces)


def test_odd_buffers_are_gathered_and_large_ones_are_not_copied() -> None:
    parts = [b"a" * 700_000] * 6
    assert b"".join(pieces_of(parts, Cutter())) == b"".join(parts)
    whole = bytes(4 * PIECE_BYTES_MAX)
    assert all(isinstance(piece, memoryview) and piece.obj is whole for piece in pieces_of([whole], Cutter()))


async def test_a_source_may_use_one_buffer_for_all_it_yields() -> None:
    """It is asked for what comes next while a piece of what came before is under way."""
    parts = [bytes((number,)) * (PIECE_BYTES_MAX + 1000) for number in range(4)]

    def again() -> Iterator[memoryview]:
        buffer = bytearray(len(parts[0]))
        for part in parts:
            buffer[:] = part
            yield memoryview(buffer)

    async def asked() -> AsyncIterator[memoryview]:
        for part in again():
            yield part

    def blocking(address: str) -> None:
        with connect_sync([address]) as yard:
            yard.log("a").append_stream(b"", again())

    async with fake_cluster(1) as c, connect([c.addresses[1]]) as yard:
        log = c.create("a", [1], 1)
        await yard.log("a").append_stream(b"", asked())
        await trio.to_thread.run_sync(blocking, c.addresses[1])
        assert [body == b"".join(parts) for _, body in log.records] == [True, True]


def test_one_piece_is_under_way() -> None:
    one = Upload("a", b"m", random.Random(1))
    one.piece(b"x")
    with pytest.raises(AssertionError):
        one.piece(b"x")
    with pytest.raises(AssertionError):
        one.bind()
    one.done()
    one.piece(b"x")


def test_a_payload_above_4_gib_is_refused() -> None:
    with pytest.raises(BadRequest):
        Cutter().size = 0
        cutter = Cutter()
        cutter.size = PAYLOAD_BYTES_MAX
        list(cutter.feed(b"x"))
    with pytest.raises(BadRequest):
        Upload("a", b"m" * (64 * 1024 + 1), random.Random(1))


def test_a_record_of_4_gib_is_described_without_its_bytes() -> None:
    [block] = split_blocks(b"".join(encode_long(7, 9, 2, 1, b"head", PAYLOAD_BYTES_MAX, None, True)))
    [record] = records_of(block)
    assert (record.offset, record.metadata, record.size, record.left_out) == (7, b"head", 4 << 30, True)
    with pytest.raises(BadRequest):
        record.payload  # noqa: B018
    for data in (encode_long(7, 9, 2, 1, b"", 10, [b"x" * 9], False), encode_long(7, 9, 2, 1, b"", 0, [b"x"], False)):
        with pytest.raises(BlockError):
            split_blocks(b"".join(data))


# Failing


async def test_what_fails_leaves_nothing() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield bytes(3 * MIB)
        raise RuntimeError("the source broke")

    async with fake_cluster(1) as c, connect([c.addresses[1]]) as yard:
        c.create("a", [1], 1)
        log = yard.log("a")
        with pytest.raises(RuntimeError, match="the source broke"):
            await log.append_stream(b"m", broken())
        assert not c.pieces and not c.sessions and not c.logs["a"].records
        with pytest.raises(BadRequest, match="3 bytes and not 4"):
            await log.append_stream(b"m", io.BytesIO(b"abc"), size=4)
        with pytest.raises(BadRequest, match="above its limit"):
            await log.append_stream(b"m", io.BytesIO(b"abc"), size=PAYLOAD_BYTES_MAX + 1)
        assert not c.sessions and yard.window.used == 0
        c.nodes[1].silent = True
        with trio.move_on_after(0.3) as scope:
            await log.append(b"m", bytes(3 * MIB))
        assert scope.cancelled_caught and not c.sessions and not c.pieces and yard.window.used == 0
        c.nodes[1].silent = False
        assert await log.append_stream(b"m", io.BytesIO(b"abc"), size=3) == 0


async def test_a_session_whose_opening_was_given_up_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer did not come; it may have begun all the same, and would stay for ten minutes."""
    opened: list[int] = []

    def blocking(address: str) -> None:
        with connect_sync([address]) as yard, pytest.raises(LogyardError):
            yard.log("a").append(b"m", bytes(2 * MIB), timeout=0.3)

    async with fake_cluster(1) as c, connect([c.addresses[1]]) as yard:
        c.create("a", [1], 1)
        log = yard.log("a")
        node = type(c.nodes[1])
        real = node.open_session

        async def late(self: Any, name: str, session: int, client: int, ttl_ms: int) -> object:
            await real(self, name, session, client, ttl_ms)
            opened.append(session)
            await trio.sleep_forever()

        with monkeypatch.context() as slow:
            slow.setattr(node, "open_session", late)
            with trio.move_on_after(0.3) as scope:
                await log.append(b"m", bytes(2 * MIB))
            assert scope.cancelled_caught and len(opened) == 1 and not c.sessions
            with pytest.raises(LogyardError):
                await log.append(b"m", bytes(2 * MIB), timeout=0.3)
            assert len(opened) >= 2 and not c.sessions
            opened.clear()
            await trio.to_thread.run_sync(blocking, c.addresses[1])
            assert opened and not c.sessions
        assert await log.append(b"m", bytes(2 * MIB)) == 0


async def test_a_node_says_how_long_sessions_live_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocking(address: str) -> int:
        with connect_sync([address]) as yard:
            return yard.log("a").append(b"m", bytes(2 * MIB))

    async with fake_cluster(1) as c, connect([c.addresses[1]]) as yard:
        c.create("a", [1], 1)
        node = type(c.nodes[1])
        real = node.open_session
        lives: list[int] = []
        told: dict[str, Any] = {"ttl_ms_max": 5000}

        async def strict(self: Any, name: str, session: int, client: int, ttl_ms: int) -> object:
            if ttl_ms > 5000:
                raise BadRequest("too long", **told)
            lives.append(ttl_ms)
            return await real(self, name, session, client, ttl_ms)

        monkeypatch.setattr(node, "open_session", strict)
        assert await yard.log("a").append(b"m", bytes(2 * MIB)) == 0
        assert await trio.to_thread.run_sync(blocking, c.addresses[1]) == 1
        assert lives == [5000, 5000]
        for most in (None, 600_000, "5000", 0):
            told["ttl_ms_max"] = most
            with pytest.raises(BadRequest, match="too long"):
                await yard.log("a").append(b"m", bytes(2 * MIB))
        assert len(lives) == 2 and not c.sessions


# Real nodes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("yard"), 3, limits={"payload_cache_bytes": "16 MiB"}) as found:
        found.start()
        yield found


@pytest.fixture
def yard(cluster: LocalCluster) -> Iterator[Yard]:
    with connect_sync(cluster.addresses) as found:
        yield found


def caught_up(yard: Yard, name: str, end: int) -> None:
    for node in (1, 2, 3):
        while (now := yard.log(name).latest(node=node).end) < end:
            yard.log(name).poll(now, wait=1.0, max_bytes=1, node=node)


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [MIB + 1, 4 * MIB, 30 * MIB + 17])
def test_both_clients_write_and_every_member_reads(yard: Yard, cluster: LocalCluster, size: int) -> None:
    name = f"sizes-{size}"
    yard.create(name)
    body = random.Random(size).randbytes(size)
    log = yard.log(name)
    assert log.append(b"small", b"s") == 0
    assert log.append(b"sync", body) == 1
    assert log.append_stream(b"stream", io.BytesIO(body), size=size) == 2

    async def by_trio() -> None:
        async with connect(cluster.addresses) as other:
            mine = other.log(name)
            assert await mine.append(b"aio", memoryview(body)) == 3
            assert (await mine.read(3)).payload == body
            found = [one async for one in mine.records()]
            assert [(one.metadata, one.size) for one in found] == [
                (b"small", 1), (b"sync", size), (b"stream", size), (b"aio", size)
            ]  # fmt: skip
            assert found[2].payload == body

    trio.run(by_trio)
    caught_up(yard, name, 4)
    for node in (1, 2, 3):
        for offset in (1, 2, 3):
            assert log.read_body(offset, node=node) == body
        assert log.read_body(1, MIB - 5000, MIB + 1, node=node) == body[MIB - 5000 : MIB + 1]
        page = log.poll(0, node=node, max_bytes=MIB)
        assert [one.left_out for one in page] == [False, True, True, True]
        with pytest.raises(BadRequest, match="body_pieces"):
            page.records[1].payload  # noqa: B018
    assert log.truncate(3) == 3
    assert log.read(3).payload == body
    assert log.truncate(4) == 4


@pytest.mark.long
def test_a_leader_killed_in_the_middle(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 3) as cluster:
        cluster.start()
        with connect_sync(cluster.addresses) as yard:
            yard.create("a")
            body = random.Random(7).randbytes(12 * MIB)
            killed: list[int] = []

            def source() -> Iterator[bytes]:
                for at in range(0, len(body), MIB):
                    if at == 5 * MIB:
                        killed.append(int(str(yard.describe("a")["leader"])))
                        cluster.kill9(killed[0])
                    yield body[at : at + MIB]

            log = yard.log("a")
            assert log.append_stream(b"m", source()) == 0
            for node in {1, 2, 3} - set(killed):
                assert log.read_body(0, node=node) == body
            cluster.restart(killed[0])
            caught_up(yard, "a", 1)
            assert log.read_body(0, node=killed[0]) == body


def test_a_long_stream_needs_no_memory(yard: Yard, cluster: LocalCluster) -> None:
    """96 MiB pass; what the client holds of them at any time is a few pieces."""
    yard.create("stream")
    size = 96 * MIB
    part = random.Random(3).randbytes(MIB)

    async def source() -> AsyncIterator[bytes]:
        for number in range(size // MIB):
            yield number.to_bytes(8, "little") + part[8:]

    async def by_trio() -> None:
        async with connect(cluster.addresses) as other:
            assert await other.log("stream").append_stream(b"m", source(), size) == 0

    tracemalloc.start()
    try:
        trio.run(by_trio)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 * MIB, f"{most >> 20} MiB were held"
    log = yard.log("stream")
    number = 0
    for piece in log.body_pieces(0):
        for at in range(0, len(piece), MIB):
            assert piece[at : at + MIB] == number.to_bytes(8, "little") + part[8:]
            number += 1
    assert number == size // MIB
    log.truncate(1)


def test_an_unknown_log_is_said_at_once(yard: Yard) -> None:
    with pytest.raises(LogyardError):
        yard.log("nobody").append(b"m", bytes(2 * MIB), timeout=2.0)

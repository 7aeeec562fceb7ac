"""Compressed payloads through real nodes: every client, every way of reading, in one frame and in pieces."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from logyard import connect, connect_sync, open_system
from logyard.client.sync import Yard
from logyard.machines.log import AppendLog
from logyard.protocol.compression import SMALLEST
from logyard.protocol.errors import OutOfRange
from logyard.service.cli.root import cli
from logyard.service.local_cluster import LocalCluster
from tests.client.test_compression import text

MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("yard"), 3) as found:
        found.start()
        yield found


@pytest.fixture
def yard(cluster: LocalCluster) -> Iterator[Yard]:
    with connect_sync(cluster.addresses) as found:
        yield found


BODIES = [text(300), text(5000, 2), text(900_000, 3), b"", b"short", text(2 * MIB + 17, 4), text(7 * MIB, 5)]


def test_the_blocking_client_and_every_range(yard: Yard) -> None:
    yard.create("blocking", members=(1, 2, 3))
    log = yard.log("blocking")
    for number, body in enumerate(BODIES):
        assert log.append(b"m%d" % number, body, compress="zstd") == number
    small = [(b"a", text(400)), (b"b", None), (b"c", b"tiny"), (b"d", text(70_000))]
    first = len(BODIES)
    assert list(log.append_many(small, compress="zstd")) == list(range(first, first + 4))
    everything = [*((b"m%d" % number, body) for number, body in enumerate(BODIES)), *small]
    assert [(record.metadata, record.payload) for record in log.records()] == everything
    for node in (1, 2, 3):
        log.wait_applied(1, node=node)
        for number, body in enumerate(BODIES):
            record = log.read(number, bodies=False)
            assert record.size == len(body) and (record.stored < len(body) or len(body) < SMALLEST)
            for start, stop in ((0, len(body)), (len(body) // 3, len(body) // 2), (max(0, len(body) - 9), len(body))):
                assert log.read_body(number, start, stop) == body[start:stop]
            assert b"".join(log.body_pieces(number)) == body
            with pytest.raises(OutOfRange):
                log.read_body(number, 0, len(body) + 1)


def test_streams_are_stored_in_compressed_pieces(yard: Yard) -> None:
    yard.create("streams", members=(1, 2, 3))
    log = yard.log("streams")
    body = text(5 * MIB + 3, 6)
    assert log.append_stream(b"m", io.BytesIO(body), len(body), compress="zstd") == 0
    record = log.read(0)
    assert record.payload == body and record.stored < 0.8 * len(body)
    assert log.read_body(0, 3 * MIB, 3 * MIB + 10) == body[3 * MIB : 3 * MIB + 10]


def test_a_logs_option_is_every_clients_default(yard: Yard, cluster: LocalCluster) -> None:
    yard.create("option", members=(1, 2, 3), compress="zstd")
    with connect_sync(cluster.addresses) as other:
        log = other.log("option")
        body = text(50_000)
        log.append(b"", body)
        log.append(b"", body, compress="none")
        log.append_stream(b"", [body, body, body, text(2 * MIB)])
        found = [(record.size, record.stored < record.size) for record in log.records(bodies=False)]
        assert found == [(50_000, True), (50_000, False), (150_000 + 2 * MIB, True)]
        assert [record.payload for record in log.records(0, 2)] == [body, body]


async def test_the_trio_client(cluster: LocalCluster) -> None:
    async with connect(cluster.addresses) as yard:
        await yard.create("trio", members=(1, 2, 3), compress="zstd")
        log = yard.log("trio")
        body, large = text(60_000), text(3 * MIB)
        assert await log.append(b"a", body) == 0
        assert await log.append(b"b", large) == 1
        assert list(await log.append_many([(b"c", body), (b"d", b"tiny")])) == [2, 3]
        assert await log.append_nowait(b"e", body).wait() == 4
        assert await log.append(b"f", body, compress="none") == 5
        found = [record async for record in log.records()]
        assert [record.payload for record in found] == [body, large, body, b"tiny", body, body]
        assert [record.stored < record.size for record in found] == [True, True, True, False, True, False]
        assert await log.read_body(1, 2 * MIB, 2 * MIB + 100) == large[2 * MIB : 2 * MIB + 100]
        assert b"".join([piece async for piece in log.body_pieces(1)]) == large


async def test_an_embedded_log(tmp_path: Path) -> None:
    async with open_system(tmp_path / "data") as system:
        log = await system.start_group("embedded", AppendLog())
        body = text(60_000)
        assert await log.append(b"m", body, compress="zstd") == 0 and await log.append(b"m", body) == 1
        record = await log.read(0)
        assert record.payload == body and record.stored < len(body)
        assert await log.read_body(0, 100, 300) == await log.read_body(1, 100, 300) == body[100:300]


def run(cluster: LocalCluster, *words: str, data: bytes | None = None) -> Any:
    done = CliRunner().invoke(cli, [*words, "--servers", ",".join(cluster.addresses), "--json"], input=data)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def test_the_command_line(cluster: LocalCluster, tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(text(2 * MIB))
    run(cluster, "create", "lines", "--compress", "zstd")
    run(cluster, "append", "lines", str(file))
    run(cluster, "append", "lines", "--whole", data=text(3000))
    run(cluster, "append", "lines", "--whole", "--compress", "none", data=text(3000))
    rows = run(cluster, "read", "lines", "--metadata-only")["records"]
    shown = [(row["size"], row["stored"] < row["size"]) for row in rows]
    assert shown == [(2 * MIB, True), (3000, True), (3000, False)]
    rows = run(cluster, "read", "lines", "--from", "1")["records"]
    assert {row["payload"].encode() for row in rows} == {text(3000)}

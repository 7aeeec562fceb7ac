"""The metrics door over a real socket: every metric of the table is there, whatever state the groups are in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from logyard.machines.log.command import APPEND
from logyard.protocol.errors import BadRequest, Busy
from logyard.protocol.frame import encode_frame
from logyard.service import metrics, metrics_http
from logyard.service.config import build_config
from logyard.service.local_cluster import LocalCluster
from logyard.service.metrics import METRICS, PREFIX, metrics_reference
from logyard.service.metrics_http import MetricsServer
from tests.engine.host.cluster import KIB, Cluster, cluster
from tests.source_tree import ROOT


@asynccontextmanager
async def door(c: Cluster, number: int = 1) -> AsyncIterator[MetricsServer]:
    server = MetricsServer(("127.0.0.1", 0), c.nodes[number].metrics)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve)
        yield server
        nursery.cancel_scope.cancel()


async def ask(server: MetricsServer | int, request: bytes) -> tuple[int, bytes, bytes]:
    """(status, head, body) of one exchange; status 0: closed without an answer."""
    data = b""
    port = server if isinstance(server, int) else server.port
    with trio.fail_after(10):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request)
            try:
                while part := await stream.receive_some(65536):
                    data += part
            except trio.BrokenResourceError:
                pass
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, head, body


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode()


def values(body: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found[sample.name, tuple(sample.labels.values())] = sample.value
    return found


async def scrape(server: MetricsServer) -> dict[tuple[str, tuple[str, ...]], float]:
    status, head, body = await ask(server, get("/metrics"))
    assert status == 200 and b"text/plain" in head
    return values(body)


def test_the_table_in_the_docs_is_the_code() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text("utf-8") == metrics_reference()
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)


async def test_every_metric_is_shown_and_counts(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c, door(c) as server:
        await c.lead(1)
        await c.fill(1, 5, 40 * KIB)
        await c.applied()
        before = await scrape(server)
        _, _, body = await ask(server, get("/metrics"))
        shown = {family.name for family in text_string_to_metric_families(body.decode())}
        assert shown == {PREFIX + metric.name for metric in METRICS}
        assert before["logyard_groups", ()] == before["logyard_groups_led", ()] == 1
        assert before["logyard_elections_won_total", ()] >= 1
        assert before["logyard_payload_live_bytes", ("wal",)] >= 200 * KIB
        assert before["logyard_peer_up", ("2",)] == before["logyard_peer_live", ("3",)] == 1
        assert before["logyard_live_nodes", ()] == 3
        await c.fill(1, 1, 100)
        await c.nodes[1].truncate("log", 3)
        await c.nodes[1].snapshot()
        await c.nodes[1].compact()
        await c.nodes[1].transfer("log", 2)
        after = await scrape(server)
        for name in ("fdatasyncs", "wal_batches", "wal_written_bytes", "snapshots_taken", "migrated_files"):
            key = (f"{PREFIX}{name}_total", ())
            assert after[key] > before[key], name
        assert after["logyard_migrated_bytes_total", ()] >= 80 * KIB
        assert after["logyard_leaderships_lost_total", ()] == before["logyard_leaderships_lost_total", ()] + 1
        assert after["logyard_payload_live_bytes", ("generations",)] >= 80 * KIB
        assert after["logyard_group_bytes", ("log", "snapshot")] > 0


async def test_a_scrape_answers_while_a_group_is_stopped_and_refusals_count(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group_inflight_bytes=64 * KIB) as c, door(c) as server:
        node = c.nodes[1]
        await c.create("log", by=1)
        await c.create("other", by=1)
        system = c.system(1)
        system.replicas.retire.stop(c.member(1, "log"), "a test")

        frame = memoryview(b"".join(encode_frame([(b"", bytes(60 * KIB))], command=APPEND)))
        node.submit(c.member(1, "other").uid, frame, Sink(), 1)
        for _ in range(3):
            with pytest.raises(Busy) as refusal:
                node.submit(c.member(1, "other").uid, frame, Sink(), 1)
        found = await scrape(server)
        assert found["logyard_groups", ()] == 2 and found["logyard_groups_stopped", ()] == 1
        assert found["logyard_busy_total", (refusal.value.cause,)] == 3
        rows = {row["name"]: row for row in node.key_metrics(["log", "other", "absent"])}
        assert rows.keys() == {"log", "other"}
        assert rows["log"]["state"] == "stopped" and rows["log"]["reason"] == "a test"
        assert rows["other"]["role"] == "leader" and rows["other"]["leader_since_ms"] > 0


class Sink:
    def reply(self, request: int, status: int, data: bytes) -> None:
        assert status == 0


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get("/health"), 200),
        (get("/metrics?x=1", "HEAD"), 200),
        (get("/"), 404),
        (get("/metrics", "POST"), 405),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 not http\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: here\r\nX: " + b"x" * 20_000, 431),
        (b"GET /metrics HTTP/1.1\r\nHost: here\r\nHost: there\r\n\r\n", 400),
    ],
)
async def test_a_stranger_gets_an_answer_and_the_door_stays_open(
    tmp_path: Path, request_bytes: bytes, status: int
) -> None:
    async with cluster(tmp_path, 1) as c, door(c) as server:
        found, _, body = await ask(server, request_bytes)
        assert found == status
        assert bool(body) == (b"HEAD" not in request_bytes)
        assert (await ask(server, get("/health")))[0] == 200


async def test_connections_that_stall_are_few_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_http, "REQUEST_S", 0.2)
    async with cluster(tmp_path, 1) as c, door(c) as server:
        streams = [await trio.open_tcp_stream("127.0.0.1", server.port) for _ in range(20)]
        with trio.fail_after(10):
            for stream in streams:
                try:
                    assert await stream.receive_some(1) == b""
                except trio.BrokenResourceError:
                    pass
                await stream.aclose()
        assert (await ask(server, get("/health")))[0] == 200


def test_the_door_is_off_by_default_and_loopback_only(tmp_path: Path) -> None:
    node: Mapping[str, Any] = {"id": 1, "directory": "data"}
    assert build_config({"node": node}, {}, tmp_path).metrics_listen is None
    found = build_config({"node": node}, {"LOGYARD_NODE_METRICS_LISTEN": "127.0.0.1:9464"}, tmp_path)
    assert found.metrics_listen == ("127.0.0.1", 9464)
    with pytest.raises(BadRequest, match="metrics_listen"):
        build_config({"node": {**node, "metrics_listen": "0.0.0.0:9464"}}, {}, tmp_path)


def test_reading_a_metric_needs_no_field_that_is_not_there() -> None:
    with pytest.raises(KeyError):
        list(metrics.field("absent")({}))


async def test_a_daemon_says_where_it_is_scraped(tmp_path: Path) -> None:
    node = LocalCluster(tmp_path, 1)
    node.prepare()
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "logyard.service.cli", "serve", "--config", str(node.nodes[1].config_path)],
        stdout=subprocess.PIPE, env={**os.environ, "LOGYARD_NODE_METRICS_LISTEN": "127.0.0.1:0"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        with trio.fail_after(30):
            line = b""
            while not line.endswith(b"\n"):
                line += await process.stdout.receive_some()
        found = re.search(rb"^ready client=\S+ pid=\d+ metrics=127\.0\.0\.1:(\d+)$", line.strip())
        assert found is not None and int(found[1]) > 0
        status, _, body = await ask(int(found[1]), get("/metrics"))
        assert status == 200 and values(body)["logyard_groups", ()] == 0
    finally:
        process.terminate()
        with trio.fail_after(30):
            assert await process.wait() == 0

"""Payloads that their client compressed, through both sources: rows are those of what the client was given."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from logyard.client.sync import connect_sync
from logyard.pipeline.directory.source import DirectorySource
from logyard.pipeline.network import NetworkSource
from logyard.pipeline.sources import LogSource, Reading, Wanted
from logyard.service.local_cluster import LocalCluster

MIB = 1 << 20
CHANCE = random.Random(5)
NOISE = CHANCE.randbytes(3 * MIB)
TEXT = b"".join(b"line %d of a text that gets shorter\n" % n for n in range(100_000))
BODIES: list[bytes | None] = [
    TEXT[:100], TEXT[:600], None, b"", TEXT[:50_000], NOISE[:2000], TEXT[:MIB], NOISE[:50_000] + TEXT[:200_000],
    TEXT[: 2 * MIB + 17], TEXT[:MIB] + NOISE[: MIB + 1] + TEXT[:5000], NOISE, TEXT[5:700],
]  # fmt: skip
READINGS = (
    Reading(payloads=True, verify=True, inline_bytes=64 * MIB),
    Reading(payloads=True, inline_bytes=60_000),
    Reading(payloads=True, inline_bytes=60_000, verify=True),
    Reading(verify=True),
    Reading(),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("yard"), 1) as found:
        found.start()
        yield found


@pytest.fixture(scope="module")
def filled(cluster: LocalCluster) -> LocalCluster:
    with connect_sync(cluster.addresses) as yard:
        yard.create("zipped", compress="zstd")
        log = yard.log("zipped")
        half = len(BODIES) // 2
        log.append_many([(b"m%d" % n, body) for n, body in enumerate(BODIES[:half])])
        for n, body in enumerate(BODIES[half:], half):
            log.append(b"m%d" % n, body)
        stored = [log.read(n, bodies=False).stored for n in range(len(BODIES))]
    # It is about compressed ones of each kind: in a pack, beside it, of several chunks, and in pieces.
    shrunk = {n for n, body in enumerate(BODIES) if body is not None and stored[n] < len(body)}
    assert shrunk == {1, 4, 6, 7, 8, 9, 11} and stored[1] < 4096 < stored[7] and stored[9] > MIB
    return cluster


def wanted(source: LogSource, first: int = 0, end: int = 1 << 40) -> Wanted:
    (info,) = source.logs(["zipped"])
    return Wanted(info.name, info.uid, max(first, info.start), min(end, info.end))


def check(source: LogSource) -> None:
    for reading in READINGS:
        rows = [row for batch in source.read([wanted(source)], reading) for row in batch.to_pylist()]
        assert [row["offset"] for row in rows] == list(range(len(BODIES)))
        for row, body in zip(rows, BODIES, strict=True):
            assert row["meta"] == b"m%d" % row["offset"]
            assert row["payload_size"] == (None if body is None else len(body))
            inline = reading.payloads and body is not None and len(body) <= reading.inline_bytes
            assert row.get("payload") == (body if inline else None)
            digest = None if body is None else xxhash.xxh3_128_digest(body)
            assert row["payload_hash"] == digest or (row["payload_hash"] is None and not (reading.verify or inline))
    for offset, body in enumerate(BODIES):
        if body is not None:
            assert b"".join(source.body(wanted(source), offset, len(body))) == body
    for first in range(len(BODIES)):
        (row,) = [r for b in source.read([wanted(source, first, first + 1)], READINGS[0]) for r in b.to_pylist()]
        assert row["payload"] == BODIES[first]


def test_over_the_network(filled: LocalCluster) -> None:
    source = NetworkSource(filled.addresses, timeout_s=10.0)
    try:
        check(source)
    finally:
        source.close()


def test_from_the_directory_of_a_stopped_node(filled: LocalCluster) -> None:
    filled.stop()
    source = DirectorySource(Path(filled.nodes[1].data))
    try:
        check(source)
    finally:
        source.close()

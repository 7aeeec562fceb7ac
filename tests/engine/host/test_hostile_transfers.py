"""A member's messages of a transfer: whatever they say, the node and its other groups go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
import xxhash

from logyard.engine.snapshot.format import FORMAT, HEAD, MAGIC
from logyard.engine.transport.blobs import SNAPSHOT_OFFER, SNAPSHOT_PIECE

from .cluster import KIB, MIB, Cluster, cluster, until
from .test_sections import put, shelves
from .test_transfers import LIMITS, answer_of, laggard, served

FIELDS = ["uid", "index", "term", "configuration", "machine", "release", "timestamp", "sections", "live"]
VALUES: list[Any] = [None, "text", b"bytes", -1, 0, 1 << 40, 1 << 61, (1 << 64) - 1, [], [[]], [None], {"a": 1}, 1.5]


def manifest(uid: int, fields: Any) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return HEAD.pack(MAGIC, FORMAT, 0, len(packed), xxhash.xxh3_64_intdigest(packed, uid)) + packed


async def goes_on(c: Cluster) -> None:
    leader = await c.leader("other")
    with trio.fail_after(10):
        await c.append(leader, [(b"", b"goes on")], "other")
        await c.applied("other")
    assert not c.failures


@pytest.mark.sample(2)
@pytest.mark.parametrize("field", FIELDS)
async def test_offers_with_any_field_of_another_kind(tmp_path: Path, field: str) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        await c.create("other")
        bodies = await laggard(c, 5)
        data = c.system(1).storage.meta_batch.snapshot(c.member(1).uid).data
        uid = c.member(1).uid
        fields = msgpack.unpackb(data[HEAD.size :])
        await c.start(3)
        c.partition(3)
        system = c.system(3)
        for value in VALUES:
            if type(value) is int and value >= 0 and field not in ("uid", "configuration", "sections", "live"):
                # A lie, but a well-formed one: members are believed in what only they can know.
                continue
            fields_now = list(fields)
            fields_now[FIELDS.index(field)] = value
            system.host.inbound.on_blob(1, SNAPSHOT_OFFER, 1, {"uid": uid, "index": 3}, manifest(uid, fields_now))
            await until(lambda: not system.transfers.snapshot_receiver._offers)
        rows = [[b"name"], ["a", "b", b"", b""], ["a", 1, b"", None, -1, []], ["a", 1, b"", None, 1 << 60, [b"x" * 16]]]
        rows += [["a", 1, b"", None, 5, [b"x" * 600]], ["a", [], b"", None, 5, [b"x" * 16]], ["a", 1, 5, b""]]
        for row in rows:
            fields_now = list(fields)
            fields_now[FIELDS.index("sections")] = [row]
            system.host.inbound.on_blob(1, SNAPSHOT_OFFER, 1, {"uid": uid, "index": 3}, manifest(uid, fields_now))
            await until(lambda: not system.transfers.snapshot_receiver._offers)
        assert 3 in c.nodes and not c.failures
        c.network.heal()
        await goes_on(c)
        await c.applied()
        await served(c, 3, bodies)


async def test_pulls_of_any_chunk_and_range(tmp_path: Path) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        await c.create("other")
        await c.lead(1)
        await c.fill(1, 5, 20 * KIB)
        await c.applied()
        uid = c.member(1).uid
        top = (1 << 64) - 1
        pull = {"uid": uid, "index": 0, "ranges": [], "chunks": [], "limit": top}
        for chunks in ([b""], [b"x" * 600], [b"x" * 4000], [b"q" * 16] * 1000):
            assert (await answer_of(c, 2, 3, {**pull, "chunks": chunks}))[0]["error"]
        for ranges in ([[0, 0]], [[top, top]], [[5, 3]], [[0, top]] * 300, [[top, 0]], [[1 << 62, 1 << 63]]):
            await answer_of(c, 2, 3, {**pull, "ranges": ranges})
        await answer_of(c, 2, 3, {**pull, "limit": 0, "ranges": [[1, 9]]})
        await goes_on(c)


async def test_a_chunk_of_other_bytes_is_not_kept_under_its_name(tmp_path: Path) -> None:
    async with shelves(tmp_path, 3) as c:
        await c.lead(1)
        await put(c, 1, "large", 1, 2 * MIB)
        await c.applied()
        await c.crash(3)
        await put(c, 1, "other", 2, 2 * MIB)
        await c.applied(among=[1, 2])
        for number in (1, 2):
            await c.nodes[number].snapshot()
            await c.nodes[number].compact()
        peers = c.network.nodes[1]
        send_blob = peers.send_blob
        lies: list[int] = []

        def lying(to: int, kind: int, request: int, header: Any, body: Any = (), **options: Any) -> Any:
            if kind == SNAPSHOT_PIECE and header["chunks"] and not lies:
                data = bytearray(b"".join(bytes(part) for part in body))
                data[10] ^= 1
                body = [bytes(data)]
                lies.append(to)
            return send_blob(to, kind, request, header, body, **options)

        peers.send_blob = lying
        await c.start(3)
        await c.applied()
        assert lies == [3] and c.system(3).transfers.pulls.failed
        assert c.system(3).transfers.snapshot_receiver.installed == 1 and c.log(3).books == c.log(1).books


ANSWERS: list[dict[str, Any]] = [
    {"entries": [[1, 1, b"", []]]},
    {"entries": [[1, 1, b"x" * 48, [0]]]},
    {"entries": [[1, 1, bytes([1]) + b"\xff" * 200, [0, 1, 2]]]},
    {"entries": [[(1 << 64) - 1, 1, b"", [(1 << 64) - 1]]]},
    {"chunks": [[b"", (1 << 64) - 1]]},
    {"chunks": [[b"x" * 16, (1 << 64) - 1]]},
    {"through": 0},
]


@pytest.mark.parametrize("number", range(len(ANSWERS)))
async def test_answers_of_any_kind(tmp_path: Path, number: int) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        await c.create("other")
        bodies = await laggard(c, 6)
        for node in (1, 2):
            peers = c.network.nodes[node]
            state = {"lies": 2}

            def lying(
                to: int, kind: int, request: int, header: Any, body: Any = (), send: Any = peers.send_blob,
                state: dict[str, int] = state, **options: Any,
            ) -> Any:  # fmt: skip
                if kind == SNAPSHOT_PIECE and state["lies"] and not header["error"]:
                    state["lies"] -= 1
                    header = {**header, **ANSWERS[number]}
                return send(to, kind, request, header, body, **options)

            peers.send_blob = lying  # type: ignore[method-assign, assignment]
        await c.start(3)
        await goes_on(c)
        await c.applied()
        await served(c, 3, bodies)

"""A peer with a valid certificate that lies: terms and indexes up to the last bit, roles it does not have, blobs of any
shape. It may hurt the groups that it is a member of; the node and every other group go on."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.raft.messages import (
    APPEND,
    PREVOTE,
    READ,
    SNAPSHOT,
    TERMS_REPLY,
    TRANSFER,
    VOTE,
    Message,
)
from logyard.engine.snapshot import format as snapshot_format
from logyard.engine.transport.blobs import SHAPES, SNAPSHOT_OFFER, SNAPSHOT_PIECE
from logyard.engine.transport.codec import decode_messages, encode_messages
from logyard.engine.transport.config import TransportConfig
from logyard.engine.transport.frame import BULK, HEADER_BYTES, decode_blob, encode_blob, parse_header
from logyard.protocol.errors import BadRequest, LogyardError
from tests.engine.transport.recorder import make_entry

from .cluster import Cluster, cluster

HUGE = (0, 1, 2, 3, 5, 2**31, 2**32, 2**47, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def lie(chance: random.Random, uid: int, to: int, sender: int, term: int, last: int) -> Message:
    """A message that any decoder lets through, but whose numbers mean nothing."""

    def number() -> int:
        near = (0, 1, last - 1, last, last + 1, term, term + 1)
        return max(0, chance.choice(near if chance.random() < 0.6 else HUGE))

    kind = chance.choice([kind for kind in range(PREVOTE, TERMS_REPLY + 1) if kind != SNAPSHOT])
    told = chance.choice((term, term, term, term + 1, max(0, term - 1), number()))
    index, log_term, commit, context = number(), number(), number(), number()
    entries: list[Any] | None = None
    first = ended = 0
    if kind == APPEND:
        # Most are what a leader of that term could have said.
        first = chance.choice((index + 1, number())) % 2**64
        log_term = chance.choice((log_term, min(term, told)))
        count = chance.randrange(4) if 0 < first < 2**63 else 0
        body: list[bytes | bytearray | memoryview] = [b"x" * chance.choice((0, 10, 9000))]
        entries = [make_entry(uid, first + n, body, term=chance.choice((told, max(1, term)))) for n in range(count)]
        ended = (first + count - 1) % 2**64 if first else 0
    reject = chance.random() < 0.3
    return Message(kind, uid, to, sender, told, index, log_term, commit, context, reject, entries, first, ended)


def receive(c: Cluster, node: int, data: bytes) -> None:
    """A frame from node 3, as the transport would take it."""
    header = parse_header(data[:HEADER_BYTES], BULK, TransportConfig())
    section = memoryview(data)[HEADER_BYTES : HEADER_BYTES + header.section]
    body = memoryview(data)[HEADER_BYTES + header.section :]
    c.system(node).host.inbound.on_messages(3, decode_messages(section, body, 3, node))


async def unharmed(c: Cluster) -> None:
    """Every node runs, and the group that the liar is no member of goes on."""
    assert not c.failures and sorted(c.nodes) == [1, 2, 3]
    leader = await c.leader("safe", among=(1, 2))
    assert len(await c.append(leader, [(b"m", b"safe")], name="safe")) == 1


@pytest.mark.parametrize("seed", range(6))
async def test_lying_messages(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with cluster(tmp_path) as c:
        await c.create("safe", members=(1, 2))
        await c.fill(await c.leader(), 3, 100)
        await c.lead(1)
        uid = c.member(1).uid
        for _ in range(40):
            for node in (1, 2):
                member = c.member(node)
                raft = member.raft
                lies = [lie(chance, uid, node, 3, raft.term, raft.log.last_index) for _ in range(8)]
                for one in lies:
                    (frame,) = encode_messages([one], 1 << 20)
                    with suppress(LogyardError):
                        receive(c, node, b"".join(frame))
            await trio.sleep(0.002)
        await unharmed(c)
        if not seed % 3:
            # What was taken for true is on disk now.
            for node in (1, 2):
                await c.restart(node)
            await unharmed(c)


def anything(chance: random.Random, depth: int = 0) -> Any:
    """Some value that msgpack can carry."""
    kind = chance.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return chance.choice(HUGE)
    if kind == 1:
        return -chance.randrange(1, 1 << 62)
    if kind == 2:
        return chance.choice(("", "../../etc/passwd", "a/b", "log", "..", "\x00", "x" * 5000, "log\n"))
    if kind == 3:
        return chance.choice((None, True, False, 1.5, float("nan")))
    if kind == 4:
        return chance.randbytes(chance.choice((0, 1, 40, 300)))
    if kind == 5:
        return chance.choice(("log", "none", "safe"))
    if kind == 6:
        return {anything(chance, 3) if chance.random() < 0.2 else "uid": anything(chance, depth + 1) for _ in range(2)}
    return [anything(chance, depth + 1) for _ in range(chance.randrange(4))]


def plausible(chance: random.Random, kind: int, uid: int) -> dict[Any, Any]:
    """A header of the right shape, or one with something wrong in it."""
    number = chance.choice((uid, *HUGE))
    spec: list[Any] = [
        number,
        chance.choice(("odd", "../x", "log", "safe", "new")),
        chance.choice(("log", "none")),
        {},
        [1, 2],
        5,
    ]
    if chance.random() < 0.4:
        spec[chance.randrange(len(spec))] = anything(chance)
    ranges = [[chance.choice(HUGE), chance.choice(HUGE)] for _ in range(chance.randrange(3))]
    piece = [number, number, chance.choice((chance.randbytes(60), number)), [0, 1]]
    header: dict[Any, Any] = {
        "limit": chance.choice(HUGE), "through": number, "release": chance.choice(HUGE), "live": 5,
        "chunks": chance.choice(([], [b"x" * 16], [[b"x" * 16, 5]], [[b"", 2**63]], [b""])),
        "uid": number, "uids": [chance.choice(HUGE)], "specs": [spec], "index": number, "ranges": ranges,
        "entries": [piece] * chance.randrange(2), "last": chance.random() < 0.5, "ok": chance.random() < 0.5,
        "error": chance.choice((None, "no")), "machines": {"log": chance.choice(HUGE), "odd": 3},
        "admitted": [[uid, chance.choice(HUGE)]], "groups": [[number, chance.choice(HUGE), chance.choice(HUGE)]],
    }  # fmt: skip
    if chance.random() < 0.5:
        header[chance.choice(list(header))] = anything(chance)
    if chance.random() < 0.1:
        del header[chance.choice(list(header))]
    return header


@pytest.mark.parametrize("seed", range(6))
async def test_blobs_of_any_shape(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with cluster(tmp_path) as c:
        await c.create("safe", members=(1, 2))
        await c.fill(await c.leader(), 3, 100)
        await c.nodes[1].snapshot()
        uid = c.member(1).uid
        data = bytes(c.system(1).storage.meta_batch.snapshot(uid).data)
        kinds = [*SHAPES, 0, 5, 9, 15, 29, 31, 65535]
        refused = 0
        for _ in range(150):
            for node in (1, 2):
                kind = chance.choice(kinds)
                body = bytearray(chance.choice((b"", data, chance.randbytes(100))))
                if body and chance.random() < 0.5:
                    body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
                header = plausible(chance, kind, uid) if chance.random() < 0.8 else {"x": anything(chance)}
                try:
                    frame = b"".join(encode_blob(kind, chance.randrange(4), header, bytes(body)))
                except (TypeError, ValueError, OverflowError):
                    continue
                section = HEADER_BYTES + parse_header(frame[:HEADER_BYTES], BULK, TransportConfig()).section
                try:
                    blob = decode_blob(frame[HEADER_BYTES:section], memoryview(frame)[section:])
                    c.system(node).host.inbound.on_blob(3, *blob)
                except LogyardError:
                    refused += 1
            await trio.sleep(0.001)
        await unharmed(c)
        assert refused > 20
        for node in (1, 2):
            await c.restart(node)
        await unharmed(c)


@pytest.mark.parametrize("seed", range(6))
async def test_snapshots_that_check_and_lie(tmp_path: Path, seed: int) -> None:
    """Sound checksums, senseless content: sections with path names, indexes up to the last bit."""
    chance = random.Random(seed)
    before = {path.name for path in tmp_path.parent.iterdir()}
    async with cluster(tmp_path) as c:
        await c.create("safe", members=(1, 2))
        await c.fill(await c.leader(), 3, 100)
        await c.nodes[1].snapshot()
        uid = c.member(1).uid
        found = snapshot_format.decode(bytes(c.system(1).storage.meta_batch.snapshot(uid).data), uid)
        for request in range(1, 13):
            fields: dict[str, Any] = {
                "index": chance.choice([found.index, *(number for number in HUGE if number < 2**63)]),
                "term": chance.choice([found.term, *(number for number in HUGE if number < 2**63)]),
                "sections": chance.choice(
                    (
                        found.sections,
                        {},
                        {"../../evil": b"x"},
                        {"@sessions": b"\xc1"},
                        {"@odd": b""},
                        {"": b"", "a/b": b"1"},
                    )
                ),
                "live": chance.choice((found.live, b"", chance.randbytes(50))),
                "configuration": chance.choice((found.configuration, b"", b"\x80", chance.randbytes(9))),
                "release": chance.choice((0, 2**63 - 1)),
                "timestamp": chance.choice((0, 2**63 - 1)),
            }
            wrong = dict(chance.sample(sorted(fields.items(), key=lambda pair: pair[0]), chance.randrange(1, 4)))
            data = bytes(snapshot_format.encode(found._replace(index=found.index + request)._replace(**wrong)))
            for node in (1, 2):
                inbound = c.system(node).host.inbound
                with suppress(LogyardError):
                    inbound.on_blob(3, SNAPSHOT_OFFER, request, {"uid": uid, "index": found.index}, data)
                    await trio.sleep(0.002)
                    answer = {"uid": uid, "entries": [], "through": found.index, "release": 0, "live": 0}
                    answer |= {"chunks": [], "error": None}
                    inbound.on_blob(3, SNAPSHOT_PIECE, request, answer, b"")
            await trio.sleep(0.003)
        await unharmed(c)
        for node in (1, 2):
            await c.restart(node)
        await unharmed(c)
    assert {path.name for path in tmp_path.parent.iterdir()} == before, "no name of a section became a path"


async def test_a_lie_about_one_group_takes_nothing_from_the_others_of_its_frame(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.create("other")
        for name in ("log", "other"):
            await c.lead(1, name)
            await c.applied(name)
        log, other = c.member(2), c.member(2, "other")
        lie_ = Message(READ, log.uid, 2, 3, log.raft.term, 0, 0, 0, 1)
        # Node 3 asks for votes of the other group, in the term after this one, as node 1's heir may.
        true = Message(
            VOTE, other.uid, 2, 3, other.raft.term + 1, other.raft.log.last_index, other.raft.log.last_term, 0, TRANSFER
        )
        terms = log.raft.term, other.raft.term
        with pytest.raises(BadRequest, match="group log: two leaders"):
            c.system(2).host.inbound.on_messages(3, [lie_, true])
        assert (log.raft.term, other.raft.term) == (terms[0], terms[1] + 1) and log.raft.leader == 1

"""Every parser of bytes from outside: how it is called, whole examples of what it reads, and the errors it may raise.

Anything else that it raises is a defect: it would end a task or a node. Rows of the meta store and of generations are
behind a checksum of their own and are spoilt as such (`golden`, `tests/engine/log/test_meta.py`, `tests/payloads`).
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from logyard.engine.entry import parse_entry
from logyard.engine.log.record import BLOCK
from logyard.engine.log.ring import HEAD_BYTES, Geometry, parse_head, parse_header
from logyard.engine.snapshot.format import decode as decode_snapshot
from logyard.engine.transport import codec, frame
from logyard.engine.transport.config import TransportConfig
from logyard.engine.transport.frame import CONTROL, HEADER_BYTES, Hello
from logyard.machines.kv.command import COMPACT, DELETE, GRANT, PUT, REVOKE, TXN
from logyard.machines.log.command import APPEND, RETAIN, RETAIN_COMMAND, TRUNCATE, TRUNCATE_COMMAND
from logyard.machines.queue import command as qc
from logyard.machines.registry import create_machine
from logyard.payloads.liveness import Liveness, decode_live_set
from logyard.protocol import wire
from logyard.protocol.compression import encode, inflate_whole, parse
from logyard.protocol.errors import BadRequest, LogyardError, PayloadError, error_of
from logyard.protocol.frame import check_frame, encode_frame
from logyard.protocol.records import BlockError, encode_block, records_of, split_blocks
from logyard.service.config import build_config
from logyard.service.writer.wire import HEAD, WireBroken, decode_head, decode_header
from logyard.testing import Command, Refused, Rehearsal, Wait
from tests.engine.transport.recorder import append, make_entry, reply
from tests.formats.regenerate import MAIL, ORDERS, RING, ROWS, entries

LONGEST = 1 << 16
SEPARATOR = b"\xfe\xff\xfe"
PAYLOADS = (13, 13)
"""Sizes of the records of each command: heads' and bodies' lengths included, so 10 bytes of a queue's messages."""
EDGES = (0, 1, 0x7F, 0x80, 0xFF, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)


class Target(NamedTuple):
    """`errors`: what `parse` may raise."""

    name: str
    parse: Callable[[bytes], object]
    samples: tuple[bytes, ...]
    errors: tuple[type[Exception], ...]


def section_of(frames: list[Any]) -> tuple[bytes, bytes]:
    """(section, body) of an encoded frame."""
    whole = b"".join(map(bytes, frames))
    header = frame.parse_header(whole[:HEADER_BYTES], CONTROL, TransportConfig())
    end = HEADER_BYTES + header.section
    return whole[HEADER_BYTES:end], whole[end:]


def messages(body: bytes, count: int, data: bytes) -> object:
    """A MESSAGES section with the body and the count that its header would say."""
    found = codec.check_messages(data, len(body), count)
    return found, codec.decode_messages(data, memoryview(body), 1, 2)


def blocks(data: bytes) -> object:
    """What a poll answers, to the last record."""
    return [list(records_of(block)) for block in split_blocks(data)]


def configuration(data: bytes) -> object:
    """node.toml as it may be written by hand."""
    try:
        tables = tomllib.loads(data.decode())
    except ValueError as error:
        raise BadRequest(str(error)) from error
    return build_config(tables, {}, Path("/nowhere"))


def compressed(data: bytes) -> object:
    """An envelope, and a body that it may belong to."""
    head, _, stored = data.partition(b"|")
    return inflate_whole(parse(head), memoryview(stored))


def peer_header(data: bytes) -> object:
    """The first bytes of a peer's frame."""
    return frame.parse_header(data.ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES], CONTROL, TransportConfig())


def joined(frames: Iterable[Any]) -> bytes:
    """Buffers as one."""
    return b"".join(map(bytes, frames))


def client_body(whole: bytes) -> bytes:
    """A client frame without its head."""
    return whole[wire.HEADER.size :]


def peer_targets() -> list[Target]:
    """What other nodes and the writer process send."""
    ours = (LogyardError,)
    (sent,) = codec.encode_messages([append(1, 5, [make_entry(5, 10, [b"x" * 300])]), reply(1)], 1 << 20)
    section, entry_bodies = section_of([*sent])
    blob, body = section_of(frame.encode_blob(1, 1, {"uids": [1, 2]}, [b"y" * 100]))
    hello = frame.encode_hello(Hello("orders", 1, 2, 3, CONTROL))
    renewal = frame.encode_renewal(frame.Renewal(1, 2, 3, 4, 5))[HEADER_BYTES:]
    packed: bytes = msgpack.packb(["segment", 1, [2, b"x"]])
    return [
        Target("peer header", peer_header, (hello[:HEADER_BYTES],), ours),
        Target("peer hello", frame.decode_hello, (hello[HEADER_BYTES:],), ours),
        Target("peer renewal", frame.decode_renewal, (renewal,), ours),
        Target("peer blob", lambda data: frame.decode_blob(data, memoryview(body)), (blob,), ours),
        Target("peer messages", partial(messages, entry_bodies, 2), (section,), ours),
        Target("writer head", lambda data: decode_head(data.ljust(HEAD.size, b"\0")[: HEAD.size]), (), (WireBroken,)),
        Target("writer header", decode_header, (packed,), (WireBroken,)),
    ]


def client_targets() -> list[Target]:
    """What clients and servers say to each other."""
    theirs = (wire.ProtocolError,)
    head, inner = encode(b"head", bytes(5000))
    hello = client_body(wire.encode_hello("orders", 1, [(1, "a:1")], 5))
    call = client_body(wire.encode_call(1, "poll", {"name": "a", "offset": 5}))
    data = client_body(joined(wire.encode_data(1, {"a": [1]}, [b"x"])))
    replies = client_body(joined(wire.encode_replies([(1, 0, b"abc"), (2, 1, b"")])))
    refusal = wire.pack({"code": "busy", "message": "m", "details": {}})
    return [
        Target("client hello", wire.decode_hello, (hello,), theirs),
        Target("client call", wire.decode_call, (call,), theirs),
        Target("client data", wire.decode_data, (data,), theirs),
        Target("client replies", wire.decode_replies, (replies,), theirs),
        Target("client error", lambda found: error_of(wire.unpack(found)), (refusal,), theirs),
        Target("client blocks", blocks, (block_sample(),), (BlockError, LogyardError)),
        Target("compressed", compressed, (bytes(head) + b"|" + bytes(inner),), (LogyardError,)),
    ]


def machine(name: str, arguments: dict[str, Any], data: bytes) -> object:
    """Commands from anywhere, two records each, at a machine; then entries of which it is shown nothing."""
    run = Rehearsal(lambda: create_machine(name, arguments))
    run.run(
        step for part in data.split(SEPARATOR)[:20] for step in (Command(part, PAYLOADS, 1), Refused(2), Wait(1000))
    )
    restored = run.restored()
    assert restored.snapshot() == run.snapshot(), "a restored machine has another state"
    return restored.step(Refused())


def machine_targets() -> list[Target]:
    """Every built-in machine: what a client may have put into a frame reaches `apply_batch`, refused or not."""
    kv = [
        [PUT, b"k", b"v", 0, 0], [PUT, b"p", [0, 9, bytes(16)], 0, 0], [GRANT, 5000, 6], [PUT, b"k", b"w", 6, 0],
        [DELETE, b"k", b"", 0], [TXN, [[b"k", b"", 0, 0, 1]], [[PUT, b"t", b"", 0, 0]], []], [REVOKE, 6], [COMPACT, 2],
    ]  # fmt: skip
    queue = [
        qc.PUBLISH_COMMAND.pack(qc.PUBLISH, 0, 0, 0, 500, 0, 0, 0) + (5).to_bytes(4, "little"),
        qc.ATTACH_COMMAND.pack(qc.ATTACH, 1, 0, 0, 5, 1 << 20, 1000),
        qc.SETTLE_HEAD.pack(qc.SETTLE, 1, qc.ACK) + qc.RANGE.pack(1, 1),
        qc.PURGE_COMMAND.pack(qc.PURGE, qc.READY),
    ]  # fmt: skip
    log = [APPEND, TRUNCATE_COMMAND.pack(TRUNCATE, 1, 1, 0), RETAIN_COMMAND.pack(RETAIN, 0, 10, 0)]
    samples = {"log": log, "kv": [msgpack.packb(one) for one in kv], "queue": queue}
    return [
        Target(f"machine {name}", partial(machine, name, {}), (SEPARATOR.join(found), *found), ())
        for name, found in samples.items()
    ]


def targets() -> list[Target]:
    """All of them."""
    ours = (LogyardError,)
    one = joined(encode_frame([(b"k1", b"body"), (b"k2", None)], command=b"put", session=5, sequence=1))
    large = joined(encode_frame([(b"", b"L" * 5000)], commands=[b"put"], session=5, sequence=3))
    manifest = msgpack.unpackb(ROWS.read_bytes())[0]
    toml = b'[node]\nid = 1\ndirectory = "d"\n[machines]\nx = "a:B"\n[limits]\ntick_ms = 50\n'
    return [
        Target("frame", lambda data: check_frame(memoryview(data)), (one, large), ours),
        Target("entry", parse_entry, tuple(bytes(made.data) for made in entries().values()), ours),
        Target("snapshot", lambda data: decode_snapshot(data, ORDERS), (manifest,), (LogyardError,)),
        Target("live set", decode_live_set, (live_set(),), (PayloadError,)),
        Target("configuration", configuration, (toml,), ours),
        *ring_targets(),
        *peer_targets(),
        *client_targets(),
        *machine_targets(),
    ]


def ring_head(data: bytes) -> object:
    """The head of a ring."""
    return parse_head(data, "a ring")


def ring_targets() -> list[Target]:
    """What lies in a ring of system groups: heads, and headers in both of their places."""
    whole, shape = RING.read_bytes(), Geometry(2, BLOCK)
    at, copy = shape.header_at(8), shape.copy_at(8)
    return [
        Target("ring head", ring_head, (whole[:BLOCK], whole[:HEAD_BYTES]), (LogyardError,)),
        Target("ring header", lambda data: parse_header(data, MAIL, at), (whole[at : at + 64],), ()),
        Target("ring copy", lambda data: parse_header(data, MAIL, copy), (whole[copy : copy + 64],), ()),
    ]


def live_set() -> bytes:
    """What a snapshot says of its payloads."""
    liveness = Liveness(3, 1)
    liveness.release((5, 0), (6, 0))
    return liveness.encode_live_set(9)


def block_sample() -> bytes:
    """A block of three records."""
    table = (2, 3, 0, 0xFFFFFFFF, 1, 0)
    return joined(encode_block(7, 3, 9, 1_700_000_000_000, table, [b"abc"], [b"xyz"]))


def mutate(draw: random.Random, target: Target) -> bytes:
    """Bytes near an example, or any."""
    if not target.samples or draw.random() < 0.2:
        return draw.randbytes(draw.choice([0, 1, 7, 16, 40, 200]))
    data = bytearray(draw.choice(target.samples))
    for _ in range(draw.choice([1, 1, 2, 5])):
        kind = draw.randrange(6)
        at = draw.randrange(len(data) + 1)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at : at + draw.choice([1, 4, 8])]
        elif kind == 3:
            data[at:at] = draw.randbytes(draw.choice([1, 4, 8]))
        elif kind == 4:
            size = draw.choice([1, 2, 4, 8])
            value = draw.choice(EDGES) % (1 << 8 * size)
            data[at : at + size] = value.to_bytes(size, "little" if draw.random() < 0.5 else "big")
        else:
            other = draw.choice(target.samples)
            data[at:] = other[draw.randrange(len(other) + 1) :]
    return bytes(data[:LONGEST])


def attempt(target: Target, data: bytes) -> str:
    """What is wrong with how a parser took some bytes; empty if nothing is."""
    try:
        target.parse(data)
    except target.errors:
        return ""
    except Exception as error:
        return f"{target.name}: {type(error).__name__}: {error}: {data.hex()}"
    return ""

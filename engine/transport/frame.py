"""The frame: a checked header, a hashed section, and a body of raw bytes; and the small frames (hello, renewal, blob).

Every length a header names is under the header's own hash and under the lane's limit before a byte is allocated for it,
so damage on the wire costs the connection and nothing else (faults N4). Message frames are in `codec`.
Called by `link`, `listener` and `memory`. docs/wire.md has the tables.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import xxhash

from logyard.protocol.errors import BadRequest, Corrupt, WrongIdentity

from ..identity import Origin
from ..types import Buffer
from .config import TransportConfig

MAGIC = 0x5059474C
"""`LGYP` in the order of the bytes on the wire."""
VERSION = 2
HELLO = 1
REFUSED = 2
MESSAGES = 3
LIVENESS = 4
BLOB = 5
CHALLENGE = 6
PROVED = 7
GREETINGS = (HELLO, REFUSED, CHALLENGE, PROVED)
"""Types of frames before both sides know each other."""
CONTROL = 0
BULK = 1
LANES = ("control", "bulk")

HEADER = struct.Struct("<IBBHIIQQ")
"""magic, version, type, reserved (0), count, section bytes, body bytes, section hash; then the hash of these bytes."""
HASH = struct.Struct("<Q")
HASHED = struct.Struct(HEADER.format + "Q")
"""Both at once."""
HEADER_BYTES = HEADER.size + HASH.size
HELLO_STRUCT = struct.Struct("<HBBIIQQQQ")
"""protocol version, lane, bytes of the cluster's name, node, node expected, epoch, directory, start, durable batches;
then the name."""
OUTDATED = 1
"""First byte of a REFUSED frame: the directory of who dials is older than what the listener knows of it; 0: other."""
HELLO_BYTES_MAX = 1024
"""Largest section of a frame before both sides know each other."""
REASON_BYTES_MAX = HELLO_BYTES_MAX - 64
"""Of a refusal, so that a proof has room beside it."""
LIVENESS_STRUCT = struct.Struct("<QQQQQQII")
"""sender's epoch, sender's counter, receiver's epoch as the sender knows it, receiver's counter echoed, digest; the
sender's durable batches, the time of a sync of its disk (us), flags (1: it holds that for slow)."""
SYNC_US_MAX = 0xFFFFFFFF
BLOB_STRUCT = struct.Struct("<HHIQQ")
"""kind, reserved (0), header bytes, request, body hash (xxh3-64); then the header."""
BLOB_HEADER_BYTES_MAX = 8 << 20
"""A blob's header is unpacked into objects, many times its size: what is large belongs in the body."""
BLOB_ITEMS_MAX = 1 << 20
"""Elements of one array or map in a blob's header."""
JOINED = 1024
"""Buffers below this many bytes are joined with their neighbours: an iovec costs more than the copy."""

hash64 = xxhash.xxh3_64_intdigest


class Header(NamedTuple):
    """A frame's checked header; sizes in bytes."""

    type: int
    messages: int
    section: int
    body: int
    hash: int

    @property
    def total(self) -> int:
        """Bytes of the whole frame."""
        return HEADER_BYTES + self.section + self.body


class Hello(NamedTuple):
    """Who opens a lane (or answers on it), and whom it believes to talk to; `directory` to `written`: see
    `identity.Origin`. `proved` is not on the wire: whether the sender showed to be who it says (TLS, or `proof`)."""

    cluster: str
    node: int
    expected: int
    epoch: int
    lane: int
    directory: int = 0
    start: int = 0
    written: int = 0
    proved: bool = False

    @property
    def origin(self) -> Origin:
        """Which life of which directory speaks."""
        return Origin(self.directory, self.epoch, self.start, self.written)


class Renewal(NamedTuple):
    """One liveness frame: `counter` of the sender, and the receiver's own `echo` that the sender saw last. The last
    three: see `identity.Vitals`."""

    epoch: int
    counter: int
    echo_epoch: int
    echo: int
    digest: int
    written: int = 0
    sync_us: int = 0
    slow: int = 0


class Blob(NamedTuple):
    """A typed blob: `header` was msgpack, its meaning belongs to `kind`; `body` is raw and already verified."""

    kind: int
    request: int
    header: dict[str, Any]
    body: memoryview


def encode_header(kind: int, count: int, section: Buffer, body_bytes: int) -> bytes:
    """Return the header of a frame with this section and so many bytes of body."""
    head = HEADER.pack(MAGIC, VERSION, kind, 0, count, len(section), body_bytes, hash64(section))
    return head + HASH.pack(hash64(head))


def parse_header(data: Buffer, lane: int, config: TransportConfig) -> Header:
    """Check the first `HEADER_BYTES` of a frame on `lane`; raise `Corrupt` or `BadRequest`."""
    magic, version, kind, reserved, count, section, body, digest, want = HASHED.unpack_from(data)
    got = hash64(data[: HEADER.size])
    if got != want or magic != MAGIC:
        raise Corrupt("peer frame header", 0, f"{want:016x}", f"{got:016x}")
    if version != VERSION:
        raise BadRequest(f"peer frame version {version} is not {VERSION}; update the older node")
    if reserved or not HELLO <= kind <= PROVED:
        raise BadRequest(f"peer frame of type {kind}, reserved {reserved}")
    if kind == LIVENESS or kind in GREETINGS:
        fits = section <= HELLO_BYTES_MAX and not body and not count
    elif lane == CONTROL:
        fits = section + body <= config.control_frame_bytes
    else:
        # Only a single message (or piece) may pass the size at which senders split.
        fits = section + body <= (config.frame_bytes if count > 1 else config.frame_bytes_max)
    if not fits:
        raise BadRequest(f"peer frame of {section + body} bytes on the {LANES[lane]} lane is above its limit")
    return Header(kind, count, section, body, digest)


def check_section(header: Header, section: Buffer) -> None:
    """Raise `Corrupt` unless these are the bytes the header speaks of."""
    got = hash64(section)
    if got != header.hash:
        raise Corrupt("peer frame section", HEADER_BYTES, f"{header.hash:016x}", f"{got:016x}")


def gather(bodies: Sequence[Buffer]) -> list[Buffer]:
    """Return bodies as buffers for one gather-write: large ones as they are, runs of small ones joined."""
    found: list[Buffer] = []
    run: list[Buffer] = []
    for body in bodies:
        if len(body) < JOINED:
            run.append(body)
            continue
        if run:
            found.append(b"".join(run))
            run = []
        found.append(body)
    if run:
        found.append(b"".join(run))
    return found


def encode_hello(hello: Hello) -> bytes:
    """Return a whole HELLO frame."""
    name = hello.cluster.encode()
    assert 0 < len(name) <= 255, "a cluster's name is 1 to 255 bytes"
    head = HELLO_STRUCT.pack(
        VERSION, hello.lane, len(name), hello.node, hello.expected, hello.epoch,
        hello.directory, hello.start, hello.written,
    )  # fmt: skip
    return encode_header(HELLO, 0, head + name, 0) + head + name


def decode_hello(section: Buffer) -> Hello:
    """Return the other side's HELLO; raise `BadRequest`, or `WrongIdentity` for another protocol version."""
    if len(section) < HELLO_STRUCT.size:
        raise BadRequest(f"a hello of {len(section)} bytes is too short")
    version, lane, length, node, expected, epoch, *origin = HELLO_STRUCT.unpack_from(section)
    if version != VERSION:
        raise WrongIdentity(f"the peer speaks protocol {version}, this node {VERSION}")
    name = bytes(section[HELLO_STRUCT.size :])
    if lane not in (CONTROL, BULK) or not length or len(name) != length or not node or not epoch:
        raise BadRequest("a hello does not add up")
    try:
        return Hello(name.decode(), node, expected, epoch, lane, *origin)
    except UnicodeDecodeError:
        raise BadRequest("a hello's cluster name is not UTF-8") from None


def encode_refused(reason: str, code: int = 0) -> bytes:
    """Return a whole REFUSED frame: why the listener closes the connection."""
    section = bytes((code,)) + reason.encode()[:REASON_BYTES_MAX]
    return encode_header(REFUSED, 0, section, 0) + section


def encode_renewal(renewal: Renewal) -> bytes:
    """Return a whole LIVENESS frame."""
    section = LIVENESS_STRUCT.pack(*renewal)
    return encode_header(LIVENESS, 0, section, 0) + section


def decode_renewal(section: Buffer) -> Renewal:
    """Return a LIVENESS frame's section; raise `BadRequest`."""
    if len(section) != LIVENESS_STRUCT.size:
        raise BadRequest(f"a renewal of {len(section)} bytes")
    return Renewal._make(LIVENESS_STRUCT.unpack(section))


def encode_blob(
    kind: int, request: int, header: Mapping[str, Any] | bytes, body: Buffer | Sequence[Buffer] = ()
) -> list[Buffer]:
    """Return the buffers of a BLOB frame; the body's buffers are gathered, never joined.

    `header` is a mapping of plain values, or the msgpack of one. Raises `BadRequest` when it is too large.
    """
    if not isinstance(header, bytes):
        packed: bytes = msgpack.packb(header)
        header = packed
    if len(header) > BLOB_HEADER_BYTES_MAX:
        raise BadRequest(f"a blob's header of {len(header)} bytes is above {BLOB_HEADER_BYTES_MAX}: use its body")
    if isinstance(body, bytes | bytearray | memoryview):
        body = (body,) if len(body) else ()
    digest = xxhash.xxh3_64()
    size = 0
    for part in body:
        digest.update(part)
        size += len(part)
    section = BLOB_STRUCT.pack(kind, 0, len(header), request, digest.intdigest()) + header
    return [encode_header(BLOB, 1, section, size) + section, *gather(body)]


def decode_blob(section: Buffer, body: memoryview) -> Blob:
    """Return a BLOB frame; raise `BadRequest`, or `Corrupt` when the body is not what was sent."""
    if len(section) < BLOB_STRUCT.size:
        raise BadRequest(f"a blob's section of {len(section)} bytes is too short")
    kind, reserved, length, request, digest = BLOB_STRUCT.unpack_from(section)
    if reserved or BLOB_STRUCT.size + length != len(section) or length > BLOB_HEADER_BYTES_MAX:
        raise BadRequest("a blob's lengths do not add up to its section")
    got = hash64(body)
    if got != digest:
        raise Corrupt("peer blob body", HEADER_BYTES + len(section), f"{digest:016x}", f"{got:016x}")
    try:
        header = msgpack.unpackb(
            section[BLOB_STRUCT.size :], max_array_len=BLOB_ITEMS_MAX, max_map_len=BLOB_ITEMS_MAX, max_ext_len=0
        )
    except ValueError as error:
        raise BadRequest(f"a blob's header is not msgpack: {error}") from None
    if not isinstance(header, dict):
        raise BadRequest("a blob's header is not a map")
    return Blob(kind, request, header, body)

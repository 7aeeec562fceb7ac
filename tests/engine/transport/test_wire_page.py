"""docs/wire.md says what the code does, and the bytes of version 1 stay what they are."""

from __future__ import annotations

import re
from pathlib import Path

import xxhash

from logyard.engine.entry import NOOP, build_plain
from logyard.engine.transport import codec, frame
from logyard.engine.transport.config import TransportConfig
from logyard.engine.transport.liveness import ANSWER_SECONDS

from .recorder import append, make_entry, reply

PAGE = (Path(__file__).parents[3] / "docs" / "wire.md").read_text("utf-8").partition("## Between nodes")[2]


def test_the_page_names_every_struct_and_its_size() -> None:
    structs = (
        frame.HEADER, frame.HASH, frame.HELLO_STRUCT, frame.LIVENESS_STRUCT, frame.BLOB_STRUCT,
        codec.SECTION, codec.MESSAGE, codec.ENTRY_ROW,
    )  # fmt: skip
    formats = set(re.findall(r"`(<[A-Z]+)`", PAGE))
    assert {struct.format for struct in structs} <= formats
    assert f"a header of {frame.HEADER_BYTES} bytes" in PAGE
    assert f"message row, {codec.MESSAGE_BYTES} bytes" in PAGE and f"entry row, {codec.ENTRY_ROW_BYTES} bytes" in PAGE
    assert frame.MAGIC.to_bytes(4, "little") == b"LGYP"


def test_the_page_names_the_limits() -> None:
    config = TransportConfig()
    mib = 1 << 20
    for text in (
        f"| {config.control_frame_bytes // mib} MiB | {config.control_queue_bytes // mib} MiB, then",
        f"| {config.frame_bytes // mib} MiB; a single message or blob {config.frame_bytes_max // mib} MiB |",
        f"| {config.bulk_queue_bytes // mib} MiB, then whole frames",
        f"each {config.liveness_interval_ms} ms",
        f"each {ANSWER_SECONDS * 1000:g} ms",
        f"for {config.liveness_timeout_ms} ms",
        f"after {config.refused_timeout_ms} ms",
        f"within {config.handshake_timeout_ms // 1000} s",
        f"at most {frame.BLOB_HEADER_BYTES_MAX // mib} MiB",
    ):
        assert text in PAGE, text


def test_the_bytes_of_version_2() -> None:
    """A change here is a change of the protocol: it needs a new version."""
    tombstone = make_entry(5, 12, [b"dead"])
    tombstone.bodies, tombstone.tombstone = None, 40
    entries = [make_entry(5, 11, [b"body", b"z" * 4096]), tombstone, build_plain(13, 3, NOOP, 1)]
    (messages,) = codec.encode_messages([reply(2, 4), append(2, 5, entries)], 8 << 20)
    found = [
        frame.encode_hello(frame.Hello("yard", 1, 2, 3, frame.BULK, 4, 5, 6)),
        frame.encode_refused("no", frame.OUTDATED),
        b"".join(messages),
        frame.encode_renewal(frame.Renewal(1, 2, 3, 4, 5, 6, 7, 1)),
        b"".join(frame.encode_blob(6, 7, {"uid": 8}, [b"a", b"b" * 2000])),
    ]
    assert [xxhash.xxh3_64_hexdigest(data) for data in found] == [
        "33ca6270ef662f87",
        "29a8a2ac6cc5d680",
        "b2c0db2f198bd644",
        "360b15eb370bcc00",
        "58a9656755051981",
    ]

"""Messages to and from the writer process: bounded, exact, and typed errors for what is none."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.engine.entry import build_commands
from logyard.engine.ports import SourceEntry
from logyard.payloads.compaction import MigrateReport
from logyard.protocol.errors import (
    SHORT_RETRY_S,
    Busy,
    Corrupt,
    GenerationFailed,
    JobStale,
    LogyardError,
    NoSpace,
    StoreFull,
    StoreShort,
)
from logyard.protocol.frame import encode_frame
from logyard.service.writer import wire as writer_wire
from logyard.service.writer.jobs import (
    decode_failure,
    encode_failure,
    pack_report,
    pack_rows,
    unpack_report,
    unpack_rows,
)
from logyard.service.writer.wire import HEAD, MAGIC, Message, WireBroken, encode, receive, send


def through_a_pipe(data: bytes) -> list[Message | None]:
    """What the reading end makes of bytes, until they end."""
    reading, writing = os.pipe()

    def write() -> None:
        try:
            send(writing, data)
        except BrokenPipeError:
            pass
        os.close(writing)

    thread = threading.Thread(target=write)
    thread.start()
    found: list[Message | None] = []
    try:
        while (message := receive(reading)) is not None:
            found.append(message)
        found.append(None)
    finally:
        os.close(reading)
        thread.join()
    return found


def test_messages_arrive_one_after_another_and_a_cut_one_not_at_all() -> None:
    body = os.urandom(3 << 20)
    whole = encode(["job", 1, [2, b"x"]], len(body)) + body + encode(["next"])
    first, second, end = through_a_pipe(whole)
    assert first is not None and second is not None and end is None
    assert first.header == ["job", 1, [2, b"x"]] and first.body == body
    assert second.header == ["next"] and not second.body
    for cut in (1, HEAD.size, HEAD.size + 3, len(whole) - 100):
        assert through_a_pipe(whole[:cut])[-1] is None


@given(st.binary(max_size=64))
def test_anything_else_is_refused(data: bytes) -> None:
    for text in (data, HEAD.pack(MAGIC, len(data), 0) + data):
        try:
            through_a_pipe(text)
        except WireBroken:
            pass


def test_what_is_too_long_is_never_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    for head in (HEAD.pack(MAGIC, 1 << 31, 0), HEAD.pack(MAGIC, 1, 1 << 62), HEAD.pack(b"LYw9", 1, 1)):
        with pytest.raises(WireBroken):
            through_a_pipe(head)
    monkeypatch.setattr(writer_wire, "HEADER_BYTES_MAX", 100)
    with pytest.raises(WireBroken, match="too long"):
        encode(["job", b"x" * 100])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Corrupt("f", 3, "a", "b"), Corrupt), (StoreFull("full"), NoSpace), (NoSpace("full"), NoSpace),
        (OSError(errno.EIO, "bad"), OSError), (FileNotFoundError(errno.ENOENT, "none"), FileNotFoundError),
        (StoreShort("no descriptors"), Busy),
        (JobStale("stale"), LogyardError), (GenerationFailed("p", "why"), LogyardError),
    ],
)  # fmt: skip
def test_failures_come_back_as_what_they_were(error: Exception, kind: type[Exception]) -> None:
    packed: list[Any] = msgpack.unpackb(msgpack.packb(encode_failure(error)))
    again = decode_failure(*packed)
    assert type(again) is kind and str(error) in str(again)
    assert not isinstance(again, Busy) or again.retry_after == SHORT_RETRY_S


def test_reports_and_rows_travel() -> None:
    report = MigrateReport(9, 3, 100, [(1, 2, 3, 4, 9)], [(1, 3, "rotten")], 2)
    assert unpack_report(msgpack.unpackb(msgpack.packb(pack_report(report)))) == report
    frame = b"".join(encode_frame([(b"a", b"x" * 5000), (b"b", b"small")], command=b"c"))
    entry = build_commands(7, 1, 2, 0, [memoryview(frame)])
    payload = b"".join(bytes(body) for body in entry.bodies or ())
    sources = [
        SourceEntry(7, 1, 2, entry.data, None, lambda at, size: payload[at : at + size]),
        SourceEntry(8, 1, 2, entry.data, {1}, lambda at, size: payload[at : at + size]),
    ]
    rows, bodies = pack_rows(sources)
    again = unpack_rows(msgpack.unpackb(msgpack.packb(rows)), memoryview(b"".join(map(bytes, bodies))))
    assert [one[:5] for one in again] == [one[:5] for one in sources]
    assert [bytes(one.read(10, 20)) for one in again] == [payload[10:30]] * 2

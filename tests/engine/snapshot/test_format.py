"""A snapshot's bytes: whole or refused; never taken for one with nothing live."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.engine.snapshot.format import (
    CHUNK_BYTES,
    FORMAT,
    HEAD,
    INLINE_BYTES,
    MAGIC,
    MANIFEST_BYTES,
    Snapshot,
    assemble,
    decode,
    encode,
    read_manifest,
    split,
)
from logyard.protocol.errors import Corrupt, LogyardError, WrongIdentity

sections = st.dictionaries(st.text(max_size=8), st.binary(max_size=50), max_size=4)
numbers = st.integers(0, 2**64 - 1)


@given(numbers, numbers, numbers, numbers, sections, st.binary(max_size=60))
def test_it_comes_back(uid: int, index: int, term: int, release: int, parts: dict[str, bytes], live: bytes) -> None:
    snapshot = Snapshot(uid, index, term, b"conf", 3, release, 12345, parts, live)
    assert decode(encode(snapshot), uid) == snapshot


def sample() -> bytes:
    return encode(Snapshot(7, 100, 3, b"conf", 1, 90, 5, {"log": b"state", "sessions": b""}, b"live set"))


def test_every_damaged_bit_and_every_cut_is_noticed() -> None:
    data = sample()
    for at in range(len(data)):
        with pytest.raises((Corrupt, WrongIdentity)):
            decode(data[:at], 7)
        if 6 <= at < 8:
            continue  # Reserved: nobody reads it.
        for bit in range(8):
            with pytest.raises((Corrupt, WrongIdentity)):
                decode(data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :], 7)
    with pytest.raises(Corrupt):
        decode(data + b"x", 7)


def test_another_groups_snapshot_is_refused() -> None:
    with pytest.raises(Corrupt):
        decode(sample(), 8)


def test_a_newer_format_is_refused_as_such() -> None:
    data = sample()
    magic, _, zero, length, check = HEAD.unpack_from(data)
    assert magic == MAGIC
    with pytest.raises(WrongIdentity):
        decode(HEAD.pack(magic, FORMAT + 1, zero, length, check) + data[HEAD.size :], 7)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(LogyardError):
        decode(data, 7)


@given(st.dictionaries(st.text(max_size=4), st.binary(max_size=400), max_size=4), st.integers(0, 300))
def test_sections_beside_the_manifest_come_back(parts: dict[str, bytes], inline: int) -> None:
    snapshot = Snapshot(7, 100, 3, b"conf", 3, 90, 5, parts, b"live", dict.fromkeys(list(parts)[:1], 9))
    found = split(snapshot, inline)
    manifest = read_manifest(found.manifest, 7)
    assert manifest.chunks == found.names == tuple(found.chunks)
    stored = {name: bytes(data) for name, data in found.chunks.items()}
    assert assemble(manifest, stored.get) == snapshot == decode(found.manifest, 7, stored.get)
    assert found.size == len(found.manifest) + manifest.chunk_bytes
    if not found.names:
        assert found.manifest == encode(snapshot), "as it always was"


def test_a_chunk_that_is_missing_or_another_is_refused() -> None:
    data = bytes(range(256)) * (CHUNK_BYTES // 128)
    found = split(Snapshot(7, 1, 1, b"", 1, 0, 0, {"a": data, "b": data[: CHUNK_BYTES + 1]}, b""))
    # The same bytes have the same name.
    assert len(found.names) == 2 and len(found.manifest) < 500
    stored = {name: bytes(part) for name, part in found.chunks.items()}
    assert decode(found.manifest, 7, stored.get).sections["a"] == data
    first, second = found.names
    for wrong in ({first: stored[first]}, {**stored, second: stored[first]}, {**stored, second: stored[second] + b"x"}):
        with pytest.raises(Corrupt):
            decode(found.manifest, 7, wrong.get)


@pytest.mark.parametrize("inline", [INLINE_BYTES, 1 << 10, CHUNK_BYTES])
def test_a_manifest_has_a_bound_however_many_small_sections_there_are(inline: int) -> None:
    parts = {f"{number:05d}": number.to_bytes(4, "big") * 15_000 for number in range(1300)}
    snapshot = Snapshot(7, 100, 3, b"conf", 3, 90, 5, parts, b"live")
    found = split(snapshot, inline)
    assert len(found.manifest) < MANIFEST_BYTES and len(found.names) == len(parts)
    assert decode(found.manifest, 7, {name: bytes(data) for name, data in found.chunks.items()}.get) == snapshot
    few = snapshot._replace(sections={name: parts[name] for name in list(parts)[:100]})
    assert not split(few, INLINE_BYTES).chunks, "nothing else is different where there is room"
    assert not read_manifest(encode(snapshot), 7).chunks

"""Frames made of columns are those that the rule makes row by row, and on the wire what a client makes of records."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow
import pytest

from logyard.client.numbering import content_hash
from logyard.pipeline.sink import rows as sink_rows
from logyard.pipeline.sink.record import Cut
from logyard.pipeline.sink.rows import Batch, frames
from logyard.protocol.frame import Frame, check_frame

Row = tuple[str, bytes, bytes | None]
SCHEMA = pyarrow.schema([("log", pyarrow.string()), ("meta", pyarrow.binary()), ("payload", pyarrow.binary())])
SMALL, LARGE, ALONE, HELD = 20, 4096, 20_000, 60_000


def by_rows(rows: Iterable[Row], cut: Cut, alone_bytes: int, held_bytes: int) -> Iterator[tuple[str, list[Any]]]:
    """The rule: a frame ends before the row that is too much for it; a payload that travels in pieces is alone; the
    largest unfinished frame goes when all of them are too much."""
    held: dict[str, tuple[list[Any], int]] = {}
    total = 0
    for name, meta, payload in rows:
        size = len(meta) + len(payload or b"")
        records, weight = held.get(name, ([], 0))
        alone = len(payload or b"") > alone_bytes
        if records and (alone or len(records) >= cut.rows or weight + size > cut.size):
            yield name, records
            total -= weight
            records, weight = [], 0
        held[name] = [*records, (meta, payload)], weight + size
        total += size
        if alone or total > held_bytes:
            largest = name if alone else max(held, key=lambda one: held[one][1])
            records, weight = held.pop(largest)
            yield largest, records
            total -= weight
    for name in sorted(held):
        yield name, held[name][0]


def random_rows(chance: random.Random, count: int, logs: int, run: int) -> list[Row]:
    rows: list[Row] = []
    while len(rows) < count:
        name = f"log{chance.randrange(logs)}"
        for _ in range(chance.randrange(1, 2 * run)):
            size = chance.choice((0, 1, SMALL, SMALL, SMALL, LARGE - 1, LARGE, ALONE, ALONE + 1))
            payload = None if chance.random() < 0.1 else chance.randbytes(size)
            rows.append((name, chance.randbytes(chance.randrange(9)), payload))
    return rows


def arrow(rows: Sequence[Row], size: int) -> Iterator[pyarrow.RecordBatch]:
    """In batches that are parts of larger ones, as Spark may bring them."""
    for first in range(0, len(rows), size):
        some = [("other", b"x", b"y"), *rows[first : first + size], ("other", b"", None)]
        batch = pyarrow.RecordBatch.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in some], SCHEMA)
        yield batch.slice(1, len(some) - 2)


def by_log(found: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    frames_of: dict[str, list[Any]] = {}
    for name, records in found:
        frames_of.setdefault(name, []).append(records)
    return frames_of


@pytest.mark.sample(2)
@pytest.mark.parametrize("held", [HELD, 1 << 30])
@pytest.mark.parametrize("run", [1, 40])
def test_frames_of_columns_are_those_of_the_rule(run: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_rows, "WHOLE_BYTES", ALONE)
    monkeypatch.setattr(sink_rows, "HELD_BYTES", held)
    cut = Cut(rows=20, size=10_000)
    for seed in range(15):
        chance = random.Random(seed)
        rows = random_rows(chance, 400, chance.choice((1, 3, 30)), run)
        wanted = by_log(by_rows(rows, cut, ALONE, held))
        for size in (1, 7, 1000):
            found = list(frames(arrow(rows, size), None, cut))
            assert by_log((one.log, one.records) for one in found) == wanted, (seed, size)
            assert all(one.size == sum(len(m) + len(p or b"") for m, p in one.records) for one in found)


A, B = ("a", b"", bytes(1000)), ("b", b"", b"few")


@pytest.mark.parametrize("rows", [[A] * 999 + [B], ([A] * 499 + [B]) * 2])
def test_what_is_held_keeps_no_batch_in_memory(rows: list[Row]) -> None:
    before = pyarrow.total_allocated_bytes()

    def batches() -> Iterator[pyarrow.RecordBatch]:
        for _ in range(20):
            yield from arrow(rows, 1000)
            assert pyarrow.total_allocated_bytes() - before < 5 << 20

    found = by_log((one.log, one.rows) for one in frames(batches(), None, Cut(rows=1000)))
    assert sum(found["a"]) == 20 * rows.count(A) and found["b"] == [20 * rows.count(B)]


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_a_frame_and_its_hash_are_what_a_client_makes_of_the_records(count: int) -> None:
    chance = random.Random(count)
    sizes = (0, 1, 99, LARGE - 1, LARGE, LARGE + 1)
    bodies = [None if chance.random() < 0.2 else chance.randbytes(chance.choice(sizes)) for _ in range(count)]
    records = [(chance.randbytes(chance.randrange(5)), body) for body in bodies]
    rows: list[Row] = [("a", *record) for record in records]
    (one,) = frames(arrow(rows, 10_000), None, Cut(rows=10_000, size=1 << 30))
    assert one.records == records and one.content == content_hash(records)
    assert one.largest == max(len(payload or b"") for _, payload in records)
    wanted = Frame(None, b"command")
    wanted.put_many(records)
    made = one.frame(b"command")
    assert made.count == count and made.size == wanted.size
    whole = b"".join(made.encode(3, 4))
    assert whole == b"".join(wanted.encode(3, 4)) and check_frame(memoryview(whole))[0] == count


def test_text_is_its_bytes_and_a_column_that_is_not_there_is_empty() -> None:
    batch = pyarrow.RecordBatch.from_pydict({"payload": ["ä", None, ""], "meta": [None, "x", None]})
    (one,) = frames([batch], "a", Cut())
    assert one.records == [(b"", "ä".encode()), (b"x", None), (b"", b"")]
    (bare,) = frames([batch.select(["payload"])], "a", Cut())
    assert isinstance(bare, Batch) and bare.records == [(b"", "ä".encode()), (b"", None), (b"", b"")]
    assert bare.content == content_hash(bare.records)

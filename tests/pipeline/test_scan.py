"""A node's scans, decoded: the same records as its polls, from memory, WAL files and generations; and their limits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import xxhash

from logyard.client.scans import Outcome, Scan
from logyard.engine.config import SystemConfig
from logyard.engine.replica.reader import Wanted
from logyard.machines.log import AppendLog
from logyard.pipeline.frames import Damaged, decode, gap_batch
from logyard.pipeline.schema import arrow_schema
from logyard.pipeline.sources import GAP, Reading
from logyard.protocol.errors import error_of
from logyard.service.embedded import EmbeddedLog, EmbeddedSystem, open_system
from logyard.service.log import scan as log_scan
from tests.inside import engine_of, node_of

SMALL = SystemConfig(
    wal_file_bytes=1 << 20, generation_bytes=16 << 20, generation_transaction_bytes=1 << 20, payload_cache_bytes=0
)
ALL = Reading(payloads=True, verify=True)


def no_fetch(number: int, offset: int, size: int) -> Iterator[bytes]:
    raise AssertionError("everything came along")


async def scan(
    system: EmbeddedSystem, ranges: Sequence[tuple[str, int, int, int]], body_bytes: int | None = 1 << 20,
    max_bytes: int = 8 << 20, max_records: int = 100_000,
) -> Scan:  # fmt: skip
    header, parts = await system.node.scan(ranges, max_bytes, max_records, body_bytes)
    outcomes = [
        Outcome(following, start, end, uid, None if error is None else error_of(error))
        for following, start, end, uid, error in header["ranges"]
    ]
    return Scan(header["node"], outcomes, header, memoryview(b"".join(parts)))


def rows_of(scan: Scan, names: Sequence[str], reading: Reading = ALL, fetch: Any = no_fetch) -> list[dict[str, Any]]:
    batches = list(decode(scan, names, reading, fetch))
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema == arrow_schema(reading.payloads) and 0 < batch.num_rows <= reading.batch_rows
    found: list[dict[str, Any]] = pyarrow.Table.from_batches(batches, arrow_schema(reading.payloads)).to_pylist()
    return found


async def filled(system: EmbeddedSystem, name: str, chance: random.Random, frames: int = 30) -> EmbeddedLog:
    log = await system.start_group(name, AppendLog())
    sizes = (0, 1, 100, 4095, 4096, 20_000)
    for _ in range(frames):
        bodies = [
            None if chance.random() < 0.2 else chance.randbytes(chance.choice(sizes))
            for _ in range(chance.randrange(1, 9))
        ]
        await log.append_many([(chance.randbytes(chance.randrange(20)), body) for body in bodies])
    return log


async def expected(log: EmbeddedLog, first: int, end: int) -> list[tuple[Any, ...]]:
    found = []
    async for record in log.records(first, end):
        body = record.payload
        digest = None if body is None else xxhash.xxh3_128_digest(body)
        size = None if body is None else record.size
        found.append((log.name, record.offset, record.index, record.term, record.metadata, size, digest, body))
    return found


def shown(rows: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    columns = ("log", "offset", "index", "term", "meta", "payload_size", "payload_hash", "payload")
    return [tuple(row[name] for name in columns) for row in rows]


@pytest.mark.parametrize(("moved", "step"), [(False, 256), (True, 256), (False, 2), (True, 3)])
async def test_a_scan_gives_what_a_poll_gives(
    tmp_path: Path, moved: bool, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_scan, "STEP_PACKS", step)
    monkeypatch.setattr(log_scan, "STEP_BYTES", step * 20_000)
    chance = random.Random(step)
    async with open_system(tmp_path, SMALL) as system:
        logs = [await filled(system, name, chance) for name in ("a", "b", "c")]
        await logs[1].truncate(17)
        if moved:
            for log in logs:
                await log.snapshot()
            await system.compact()
            await filled(system, "a", chance, 3)
        ranges = [(log.name, 0, *log.bounds()) for log in logs]
        want = [row for log in logs for row in await expected(log, *log.bounds())]
        found = await scan(system, ranges)
        rows = rows_of(found, [log.name for log in logs])
        assert shown(rows) == want and all(row["kind"] == "record" for row in rows)
        assert [one.next for one in found.outcomes] == [log.bounds()[1] for log in logs]
        page = await logs[0].poll(0, max_records=1)
        assert rows[0]["timestamp"].timestamp() * 1000 == pytest.approx(page.records[0].timestamp)
        # Any part of it, also of one frame.
        for _ in range(30):
            log = chance.choice(logs)
            low, high = log.bounds()
            first = chance.randrange(low, high)
            end = chance.randrange(first, high) + 1
            rows = rows_of(await scan(system, [(log.name, 0, first, end)]), [log.name])
            assert shown(rows) == await expected(log, first, end)


async def test_limits_cut_anywhere_and_nothing_is_lost_or_twice(tmp_path: Path) -> None:
    chance = random.Random(7)
    async with open_system(tmp_path, SMALL) as system:
        logs = [await filled(system, name, chance) for name in ("a", "b")]
        want = [row for log in logs for row in await expected(log, *log.bounds())]
        for max_bytes, max_records in ((1, 100_000), (5000, 100_000), (8 << 20, 1), (8 << 20, 7), (30_000, 50)):
            left: list[tuple[str, int, int, int]] = [(log.name, 0, *log.bounds()) for log in logs]
            rows: list[dict[str, Any]] = []
            while left:
                found = await scan(system, left, max_bytes=max_bytes, max_records=max_records)
                got = rows_of(found, [one[0] for one in left])
                assert 0 < len(got) <= max_records
                rows += got
                for number, outcome in enumerate(found.outcomes):
                    left[number] = (*left[number][:2], outcome.next, left[number][3])
                left = [one for one in left if one[2] < one[3]]
            assert shown(rows) == want


async def test_without_bodies_none_is_read_but_sizes_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_system(tmp_path, SMALL) as system:
        log = await system.start_group("a", AppendLog())
        await log.append_many([(b"m%d" % n, bytes([n]) * 50_000) for n in range(10)] + [(b"", None)])
        touched: list[int] = []
        reader = engine_of(system).replicas.reader
        load = reader._load

        def watched(uid: int, want: Wanted, held: Any = None) -> Any:
            touched.append(want.unit.number)
            return load(uid, want, held)

        monkeypatch.setattr(reader, "_load", watched)
        found = await scan(system, [("a", 0, 0, 11)], body_bytes=None)
        assert len(found.data) < 500 and touched == [0], "the pack, which is the metadata, and nothing else"
        rows = rows_of(found, ["a"], Reading())
        assert [row["payload_size"] for row in rows] == [50_000] * 10 + [None]
        assert [row["meta"] for row in rows] == [b"m%d" % n for n in range(10)] + [b""]
        assert {row["payload_hash"] for row in rows} == {None} and "payload" not in rows[0]
        hashed = rows_of(await scan(system, [("a", 0, 0, 11)]), ["a"], Reading(verify=True))
        assert [row["payload_hash"] for row in hashed[:10]] == [
            xxhash.xxh3_128_digest(bytes([n]) * 50_000) for n in range(10)
        ]


async def test_bodies_above_the_limit_stay_and_are_fetched_where_they_are_wanted(tmp_path: Path) -> None:
    async with open_system(tmp_path, SMALL) as system:
        log = await system.start_group("a", AppendLog())
        await log.append_many([(b"", b"s"), (b"", b"L" * 9000), (b"", b"t"), (b"", b"H" * 50_000), (b"", b"u")])
        asked: list[int] = []

        def fetch(number: int, offset: int, size: int) -> Iterator[bytes]:
            asked.append(offset)
            yield b"H" * (size - 10)
            yield b"H" * 10

        found = await scan(system, [("a", 0, 0, 5)], body_bytes=10_000)
        assert len(found.data) < 10_000
        few = rows_of(found, ["a"], Reading(payloads=True, inline_bytes=10_000), fetch)
        assert [row["payload"] for row in few] == [b"s", b"L" * 9000, b"t", None, b"u"] and not asked
        assert few[3]["payload_size"] == 50_000 and few[3]["payload_hash"] is None
        few = rows_of(found, ["a"], Reading(payloads=True, inline_bytes=5000, verify=True), fetch)
        assert [row["payload"] for row in few] == [b"s", None, b"t", None, b"u"] and asked == [3]
        assert [row["payload_hash"] for row in few] == [
            xxhash.xxh3_128_digest(body) for body in (b"s", b"L" * 9000, b"t", b"H" * 50_000, b"u")
        ]
        every = rows_of(found, ["a"], ALL, fetch)
        assert every[3]["payload"] == b"H" * 50_000


async def test_a_changed_byte_is_found_wherever_it_is(tmp_path: Path) -> None:
    async with open_system(tmp_path, SMALL) as system:
        log = await system.start_group("a", AppendLog())
        await log.append_many([(b"metadata", b"small"), (b"", b"L" * 5000)])
        await log.append(b"second", b"body")
        found = await scan(system, [("a", 0, 0, 3)])
        rows_of(found, ["a"])
        header, data = found.header, bytes(found.data)
        runs, table = header["sections"][:2]
        for at in range(runs + table, len(data)):
            if at in range(sum(header["sections"][:4]), sum(header["sections"])):
                continue
            changed = bytearray(data)
            changed[at] ^= 1
            with pytest.raises(Damaged, match="'a'"):
                rows_of(found._replace(data=memoryview(bytes(changed))), ["a"])


async def test_what_can_not_be_read_is_said_for_each_range(tmp_path: Path) -> None:
    async with open_system(tmp_path, SMALL) as system:
        log = await system.start_group("a", AppendLog())
        await log.append_many([(b"", b"x")] * 10)
        await log.truncate(4)
        empty = await system.start_group("empty", AppendLog())
        found = await scan(
            system,
            [("gone", 0, 0, 5), ("a", 0, 0, 5), ("a", 77, 4, 5), ("a", 0, 4, 99), ("empty", 0, 0, 0), ("a", 0, 11, 12)],
        )
        assert [one.error.code if one.error else "" for one in found.outcomes] == [
            "unknown_group", "out_of_range", "unknown_group", "", "", "out_of_range",
        ]  # fmt: skip
        assert (found.outcomes[1].start, found.outcomes[1].end) == (4, 10)
        assert found.outcomes[3].next == 10 and empty.bounds() == (0, 0)
        assert [row["offset"] for row in rows_of(found, ["gone", "a", "a", "a", "empty", "a"])] == list(range(4, 10))


async def test_rows_of_logs_wake_nobody(tmp_path: Path) -> None:
    async with open_system(tmp_path, SMALL) as system:
        for name in ("a", "b"):
            log = await system.start_group(name, AppendLog())
            await log.append_many([(b"", b"x" * 300_000)] * 2)
        rows = await system.node.log_rows("", None, 10)
        assert [(row[0], row[3], row[4]) for row in rows] == [("a", 0, 2), ("b", 0, 2)]
        assert all(row[5] >= 256 << 10 for row in rows)
        assert [row[0] for row in await system.node.log_rows("a", None, 10)] == ["b"]
        assert [row[0] for row in await system.node.log_rows("", None, 1)] == ["a"]
        assert [row[0] for row in await system.node.log_rows("", ["b", "none"], 10)] == ["b"]


async def test_offsets_by_time(tmp_path: Path) -> None:
    async with open_system(tmp_path, SMALL) as system:
        log = await system.start_group("a", AppendLog())
        clock = engine_of(system).clocks
        base = clock.monotonic_ns
        ahead = 0
        clock.monotonic_ns = lambda: base() + ahead
        # Each has an anchor of its own by its size, but for the small ones between.
        for number in range(40):
            ahead += 1_000_000_000
            await log.append_many([(b"", b"x" * (300_000 if number % 4 == 0 else 10))] * 2)
        await log.truncate(7)
        stamps = {record.offset: record.timestamp async for record in log.records()}
        assert len(set(stamps.values())) > 30
        for stamp in (0, *(one + more for one in sorted(set(stamps.values())) for more in (-1, 0, 1))):
            want = min((offset for offset, at in stamps.items() if at >= stamp), default=80)
            assert await system.node.seek([("a", 0, stamp)]) == [want]
        (error,) = await system.node.seek([("b", 0, 5)])
        assert isinstance(error, dict) and error["code"] == "unknown_group"


def test_a_gap_is_a_row() -> None:
    (row,) = gap_batch("a", 5, 10, True).to_pylist()
    assert (row["log"], row["offset"], row["kind"], row["payload_size"]) == ("a", 5, GAP, 10)
    assert {row[name] for name in ("index", "term", "timestamp", "meta", "payload_hash", "payload")} == {None}


async def test_what_changed_since_a_mark(tmp_path: Path) -> None:
    async with open_system(tmp_path, SMALL) as system:
        node = node_of(system)
        first = await system.start_group("a", AppendLog())
        mark, whole, rows, gone = await node.changed_logs(0)
        assert whole and [(row[0], row[3], row[4]) for row in rows] == [("a", 0, 0)] and gone == []
        assert (await node.changed_logs(mark))[1:] == [False, [], []]
        await system.start_group("b", AppendLog())
        await first.append(b"", b"x")
        again, whole, rows, gone = await node.changed_logs(mark)
        assert not whole and [(row[0], row[3], row[4]) for row in rows] == [("a", 0, 1), ("b", 0, 0)]
        await first.truncate(1)
        await node.delete_group("b")
        # Two who ask are told the same; a mark of another process is told everything.
        for since, expected in ((mark, ["b"]), (again, ["b"]), (5, []), (again + 10**9, [])):
            _, whole, rows, gone = await node.changed_logs(since)
            assert [(row[0], row[3], row[4]) for row in rows] == [("a", 1, 1)] and gone == expected
            assert whole is (since not in (mark, again))
        await system.start_group("b", AppendLog())
        _, whole, rows, gone = await node.changed_logs(again)
        assert not whole and [row[0] for row in rows] == ["a", "b"] and gone == []

"""Keyed logs over real engines: what gave way is gone and its space with it, the rest is read by offset, anywhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from logyard.client import errors
from logyard.client._async.log import LogVerbs
from logyard.client.aio import connect
from logyard.client.log import POLL_BYTES
from logyard.client.sync import connect_sync
from logyard.engine.config import SystemConfig
from logyard.machines.log import AppendLog
from logyard.machines.log.command import KEYED
from logyard.pipeline.directory.source import DirectorySource
from logyard.protocol.errors import Gone
from logyard.service.check.run import check_directory
from logyard.service.cli.root import cli
from logyard.service.embedded import open_system

from .test_exactly_once import served

SMALL = SystemConfig(
    wal_file_bytes=1 << 20, generation_bytes=16 << 20, generation_transaction_bytes=1 << 20, payload_cache_bytes=0,
    rewrite_live_ratio=0.9,
)  # fmt: skip


async def test_the_last_values_stay_through_compaction_and_restarts(tmp_path: Path) -> None:
    draw = random.Random(1)
    newest: dict[bytes, tuple[int, bytes | None]] = {}
    end = 0
    for life in range(4):
        async with open_system(tmp_path / "data", SMALL) as system:
            log = await system.start_group("k", AppendLog(keyed=True))
            for _ in range(150):
                keys = [b"%d" % draw.randrange(30) for _ in range(draw.choice([1, 1, 4]))]
                bodies = [None if draw.random() < 0.1 else draw.randbytes(draw.choice([10, 3000, 9000])) for _ in keys]
                found = await log.append_many([(key, body) for key, body in zip(keys, bodies, strict=True)], keys=keys)
                assert found == range(end, end + len(keys))
                for offset, key, body in zip(found, keys, bodies, strict=True):
                    newest[key] = (offset, body)
                end += len(keys)
            if life % 2:
                await log.snapshot()
            freed = (await system.compact())[1]
            kept = sum(len(body or b"") for _, body in newest.values())
            assert freed["live_bytes_in_generations"] < kept + 60_000, "what gave way gave its space back"
            want = sorted((offset, key, body) for key, (offset, body) in newest.items())
            got = [(record.offset, record.metadata, record.payload) async for record in log.records(0)]
            assert got == want
            rest = [record.offset async for batch in log.tail(follow=False, max_records=3) for record in batch.records]
            assert rest == [offset for offset, _, _ in want]
            gone = next(offset for offset in range(end) if offset not in rest)
            with pytest.raises(Gone):
                await log.read(gone)
            with pytest.raises(Gone):
                await log.read_body(gone)
            assert (await log.poll(gone, max_records=1)).records[0].offset > gone
            (audit,) = [await system.node.audit("k", 0, 0, 0, 1 << 30)]
            assert not audit["problems"], audit["problems"]
    report = check_directory(tmp_path / "data")
    assert report["ok"] and not report["findings"], report["findings"]
    source = DirectorySource(tmp_path / "data")
    try:
        with pytest.raises(errors.LogyardError, match="keyed"):
            source.logs(pattern="k")
    finally:
        source.close()


async def test_records_are_read_up_to_where_they_are_wanted_and_no_further(tmp_path: Path) -> None:
    async with open_system(tmp_path / "data", SMALL) as system:
        log = await system.start_group("k", AppendLog(keyed=True))
        for key in b"abaacbbd":
            await log.append_many([(b"", b"x")], keys=[bytes([key])])
        for stop in range(9):
            assert [one.offset async for one in log.records(0, stop)] == [one for one in (3, 4, 6, 7) if one < stop]


@pytest.mark.parametrize("verb", ["records", "tail", "read"])
async def test_a_long_record_that_gives_way_while_it_is_read_ends_no_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    async with open_system(tmp_path / "data", SMALL) as system:
        log = await system.start_group("k", AppendLog(keyed=True))
        keyed = bytes([KEYED]) + b"a"
        assert await log.append(b"long", bytes(POLL_BYTES + 1), command=keyed) == 0
        whole, came = LogVerbs.read_body, list[int]()

        async def read_body(self: LogVerbs, offset: int, *given: Any, **more: Any) -> bytes:
            if not came:
                came.append(await log.append(b"new", b"short", command=keyed))
            return await whole(self, offset, *given, **more)

        monkeypatch.setattr(LogVerbs, "read_body", read_body)
        if verb == "read":
            with pytest.raises(Gone, match="newer one with its key"):
                await log.read(0)
        elif verb == "tail":
            batches = [batch async for batch in log.tail(follow=False)]
            assert [(batch.cursor.offset, [one.payload for one in batch.records]) for batch in batches] == [
                (2, [b"short"])
            ]
        else:
            assert [(one.offset, one.payload) async for one in log.records()] == [(1, b"short")]
        assert came == [1]


async def test_a_follower_that_was_away_has_the_same(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, doors), connect(list(doors.addresses.values())) as yard:
        await yard.create("k", members=[1, 2, 3], compact="key")
        log = yard.log("k")
        with pytest.raises(errors.LogyardError, match="needs a key"):
            await log.append(b"", b"x")
        await doors.crash(3)
        for number in range(60):
            await log.append_many([(b"%d" % number, b"x" * 5000)], keys=[b"%d" % (number % 7)])
        await log.truncate(5)
        for number in (1, 2):
            await run.nodes[number].snapshot(["k"])
            await run.nodes[number].compact()
        await doors.start(3)
        await run.applied("k")
        want = list(range(53, 60))
        for node in (1, 2, 3):
            page = await log.poll(5, node=node, staleness=0)
            assert [record.offset for record in page] == want and page.next == 60
            assert all(record.payload == b"x" * 5000 for record in page)
        assert run.log(3, "k").snapshot() == run.log(1, "k").snapshot()
        with pytest.raises(errors.Gone):
            await log.read(20)
        (outcome,) = (await run.nodes[1].scan([("k", 0, 53, 60)], 1 << 20, 100, None))[0]["ranges"]
        assert outcome[4]["code"] == "refused" and "keyed" in outcome[4]["message"]
        seeds = list(doors.addresses.values())

        def blocking() -> None:
            with connect_sync(seeds) as other:
                found = other.log("k").append_many([(b"", b"new"), (b"", None)], keys=[b"0", b"1"])
                assert found == range(60, 62)
                assert [one.offset for one in other.log("k").records(5)] == [53, 54, 55, 58, 59, 60, 61]

        await trio.to_thread.run_sync(blocking)


async def test_a_log_without_keys_says_that_it_has_none(tmp_path: Path) -> None:
    said = "p: this log was created without keys"

    def blocking(servers: list[str]) -> None:
        with connect_sync(servers) as yard, pytest.raises(errors.BadRequest, match=said):
            yard.log("p").append_many([(b"", b"x")], keys=[b"k"])
        words = ["append", "p", "--key", "k", "--servers", ",".join(servers)]
        done = CliRunner().invoke(cli, words, input="line\n")
        assert done.exit_code == 2 and said in done.stderr and "--compact key" in done.stderr

    async with served(tmp_path) as (_, doors), connect(list(doors.addresses.values())) as yard:
        await yard.create("p", members=[1, 2, 3])
        with pytest.raises(errors.BadRequest, match=said):
            await yard.log("p").append_many([(b"", b"x")], keys=[b"k"])
        # What else it does not know is another thing.
        with pytest.raises(errors.LogyardError, match="the append log knows"):
            await yard.log("p").append(b"", b"x", command=b"\x7f")
        await trio.to_thread.run_sync(blocking, list(doors.addresses.values()))
    async with open_system(tmp_path / "data", SMALL) as system:
        await system.create("p")
        with pytest.raises(errors.BadRequest, match=said):
            await system.log("p").append_many([(b"", b"x")], keys=[b"k"])


async def test_what_lives_in_parts_of_an_entry_reaches_a_member_by_a_snapshot(tmp_path: Path) -> None:
    """Of one entry the first and the last record live: two ranges of the live set, and one entry to ask for."""
    async with served(tmp_path) as (run, doors), connect(list(doors.addresses.values())) as yard:
        await yard.create("k", members=[1, 2, 3], compact="key")
        await run.lead(1, "k")
        await doors.crash(3)
        log = yard.log("k")
        for keys in ([b"a", b"b", b"c", b"d", b"e"], [b"b", b"d"], [b"f", b"b", b"g"]):
            await log.append_many([(key, key * 5000) for key in keys], keys=keys)
        await run.applied("k")
        for number in (1, 2):
            await run.nodes[number].snapshot(["k"])
            await run.roll(number)
            assert run.member(number, "k").raft.log.first_index > 1
        await doors.start(3)
        await run.applied("k")
        assert run.member(3, "k").snapshot_index > 0, "it came by a snapshot"
        page = await log.poll(0, node=3, staleness=0)
        assert [record.metadata for record in page] == [b"a", b"c", b"e", b"d", b"f", b"b", b"g"]
        assert all(record.payload == record.metadata * 5000 for record in page)


async def test_records_end_where_they_were_said_to_though_offsets_are_missing(tmp_path: Path) -> None:
    async with open_system(tmp_path / "data", SMALL) as system:
        log = await system.start_group("k", AppendLog(keyed=True))
        for key in (b"first", b"often", b"often", b"often", b"often", b"last"):
            await log.append_many([(key, b"value")], keys=[key])
        for stop in range(7):
            found = [record.offset async for record in log.records(0, stop)]
            assert found == [offset for offset in (0, 4, 5) if offset < stop]

"""`DirectorySource`: what a stopped node holds and nothing else; damage is named by log, file and place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import msgpack
import pytest
import trio
from xxhash import xxh3_128_digest

from logyard.engine.config import SystemConfig
from logyard.engine.disk.door import Disk
from logyard.engine.log.meta import IDENTITY, MetaStore
from logyard.machines.log import AppendLog
from logyard.pipeline.directory.reading import StoppedLog, StoppedNode
from logyard.pipeline.directory.source import DirectorySource
from logyard.pipeline.errors import DataLoss
from logyard.pipeline.jobs.audit_directory import differing
from logyard.pipeline.options import parse_options
from logyard.pipeline.sources import GAP, LogInfo, Reading, Wanted
from logyard.protocol.errors import Corrupt, DirectoryInUse, LogyardError, OutOfRange
from logyard.service.embedded import EmbeddedLog, open_system
from tests.inside import engine_of

from ..service.check.test_run import flip, traces

CONFIG = SystemConfig(
    wal_file_bytes=1 << 20, wal_batch_bytes=1 << 18, wal_stock_files=1, generation_bytes=16 << 20,
    generation_transaction_bytes=1 << 20, migrate_dead_ratio=1.0, rewrite_live_ratio=0.0,
)  # fmt: skip
ALL = Reading(payloads=True, verify=True)
RECORDS = [
    (f"meta {n}".encode(), None if n % 7 == 3 else (b"%d." % n) * (900 if n % 3 == 0 else n % 40)) for n in range(120)
]


async def put(log: EmbeddedLog, first: int, stop: int) -> None:
    for at in range(first, stop, 4):
        await log.append_many(RECORDS[at : min(at + 4, stop)])


async def build(path: Path) -> None:
    """Records 0..39 in a generation, then sealed WAL files, the newest in the current one; `cut` starts at 30."""
    async with open_system(path, CONFIG) as system:
        logs = [await system.start_group(name, AppendLog()) for name in ("whole", "cut", "empty")]
        for log in logs[:2]:
            await put(log, 0, 40)
        await system.compact()
        await logs[1].truncate(30)
        await logs[1].snapshot()
        for log in logs[:2]:
            await put(log, 40, 100)
        filler = await system.start_group("filler", AppendLog())
        with trio.fail_after(30):
            while not engine_of(system).storage.location.files:
                await filler.append_many([(b"", b"x" * 200_000)])
        # Who switched to the segment stores the rows that say so before the lock is free.
        async with engine_of(system).storage.janitor.lock:
            pass
    async with open_system(path, CONFIG) as system:
        for log in [await system.start_group(name, AppendLog()) for name in ("whole", "cut")]:
            await put(log, 100, 120)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("directory") / "data"
    trio.run(build, path)
    return path


@pytest.fixture
def data(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "data"))


@pytest.fixture
def source(data: Path) -> Iterator[DirectorySource]:
    found = DirectorySource(data)
    yield found
    found.close()


def wanted(info: LogInfo, first: int | None = None, end: int | None = None) -> Wanted:
    return Wanted(info.name, info.uid, info.start if first is None else first, info.end if end is None else end)


def rows(source: DirectorySource, one: Wanted, reading: Reading = ALL) -> list[dict[str, object]]:
    return [row for batch in source.read([one], reading) for row in batch.to_pylist()]


def test_ranges_and_all_records_from_every_kind_of_home(data: Path, source: DirectorySource) -> None:
    before = traces(data)
    found = {info.name: info for info in source.logs(pattern="whole|cut|empty")}
    assert {name: (info.start, info.end) for name, info in found.items()} == {
        "whole": (0, 120), "cut": (30, 120), "empty": (0, 0),
    }  # fmt: skip
    for name in ("whole", "cut"):
        info = found[name]
        got = rows(source, wanted(info))
        assert [row["offset"] for row in got] == list(range(info.start, 120))
        for row, (meta, body) in zip(got, RECORDS[info.start :], strict=True):
            assert (row["meta"], row["payload"]) == (meta, body)
            assert row["payload_hash"] == (None if body is None else xxh3_128_digest(body))
            assert row["payload_size"] == (None if body is None else len(body))
    assert rows(source, wanted(found["empty"])) == []
    source.close()
    assert traces(data) == before


def test_metadata_only_reads_no_large_body(source: DirectorySource) -> None:
    info = source.logs(["whole"])[0]
    got = rows(source, wanted(info, 57, 63), Reading())
    assert [row["offset"] for row in got] == list(range(57, 63))
    assert [row["meta"] for row in got] == [meta for meta, _ in RECORDS[57:63]]
    assert all(row["payload_hash"] is None and "payload" not in row for row in got)


def test_batches_end_at_their_limits(source: DirectorySource) -> None:
    info = source.logs(["whole"])[0]
    batches = list(source.read([wanted(info)], ALL._replace(batch_rows=16)))
    assert sum(batch.num_rows for batch in batches) == 120
    assert max(batch.num_rows for batch in batches) <= 16 + 4
    assert len(list(source.read([wanted(info)], ALL._replace(batch_bytes=4000)))) > 10


def test_a_payload_above_the_inline_limit_keeps_its_hash(source: DirectorySource) -> None:
    info = source.logs(["whole"])[0]
    got = rows(source, wanted(info, 99, 100), ALL._replace(inline_bytes=100))[0]
    body = RECORDS[99][1]
    assert body is not None and len(body) > 100
    assert (got["payload"], got["payload_hash"]) == (None, xxh3_128_digest(body))


def test_truncated_ranges_are_an_error_or_a_counted_gap(source: DirectorySource) -> None:
    info = source.logs(["cut"])[0]
    with pytest.raises(DataLoss, match=r"records 10\.\.29"):
        rows(source, wanted(info, 10, 35))
    got = rows(source, wanted(info, 10, 35), ALL._replace(gaps=True))
    assert (got[0]["kind"], got[0]["offset"], got[0]["payload_size"]) == (GAP, 10, 20)
    assert [row["offset"] for row in got[1:]] == list(range(30, 35))
    with pytest.raises(DataLoss, match="nowhere"):
        rows(source, Wanted("nowhere", 0, 0, 5))
    with pytest.raises(OutOfRange, match="ends at 120"):
        rows(source, wanted(info, 110, 130))


def test_offsets_by_time(source: DirectorySource) -> None:
    info = source.logs(["cut"])[0]
    stamps = [row["timestamp"] for row in rows(source, wanted(info), Reading())]
    middle = stamps[50]
    found = source.offsets_at({"cut": int(middle.timestamp() * 1000)})["cut"]  # type: ignore[attr-defined]
    assert found == info.start + stamps.index(middle)
    assert source.offsets_at({"cut": 1 << 50}) == {"cut": info.end}


def test_a_directory_in_use_is_refused(template: Path, data: Path) -> None:
    async def use() -> None:
        async with open_system(data, CONFIG):
            with pytest.raises(DirectoryInUse, match="in use by process"):
                DirectorySource(data).logs()

    trio.run(use)
    readers = [DirectorySource(data), DirectorySource(template)]
    ends = [[(info.name, info.start, info.end) for info in reader.logs()] for reader in readers]
    assert ends[0] == ends[1] and len(ends[0]) == 4
    with pytest.raises(LogyardError, match="no data directory"):
        DirectorySource(data / "wal").logs()
    for reader in readers:
        reader.close()


@pytest.mark.parametrize(
    ("number", "place"), [(9, r"gen-\d+: entry 4"), (48, r"\.wal at byte \d+"), (111, r"\.wal at byte \d+")]
)
def test_a_damaged_payload_is_named(data: Path, number: int, place: str) -> None:
    body = RECORDS[number][1]
    assert body is not None and len(body) > 200
    hit = 0
    for path in [*data.glob("wal/*.wal"), *data.glob("payloads/gen-*/[bd]*")]:
        raw = path.read_bytes()
        at = raw.find(body[:200])
        while at >= 0:
            flip(path, at + 100)
            hit += 1
            at = raw.find(body[:200], at + 1)
    assert hit
    source = DirectorySource(data)
    info = source.logs(["whole"])[0]
    with pytest.raises(Corrupt, match=f"log 'whole': .*{place}"):
        rows(source, wanted(info))
    assert len(rows(source, wanted(info, 0, number - number % 4))) == number - number % 4
    assert len(rows(source, wanted(source.logs(["filler"])[0]))) > 1
    source.close()


def test_damaged_metadata_stops_its_log_only(data: Path) -> None:
    segment = next(iter(data.glob("segments/*.seg")))
    raw = segment.read_bytes()
    source = DirectorySource(data)
    good = source.logs(["whole"])[0]
    source.close()
    flip(segment, raw.find(good.uid.to_bytes(8, "little")), 8)
    source = DirectorySource(data)
    with pytest.raises(Corrupt, match=r"log 'whole': .*segments/"):
        source.logs(["whole"])
    cut = source.logs(["cut"])[0]
    assert len(rows(source, wanted(cut))) == cut.end - cut.start
    source.close()


def test_nothing_is_known_without_a_meta_store(data: Path) -> None:
    for name in ("a", "b"):
        (data / "meta" / name / "data.mdb").write_bytes(b"")
    with pytest.raises(Corrupt, match="meta"):
        DirectorySource(data).logs()


def test_copies_that_differ_are_refused_with_both_names(tmp_path: Path) -> None:
    """Two directories that say they are members of one log, and went apart after an entry."""

    async def life() -> None:
        common = tmp_path / "common"
        async with open_system(common, CONFIG) as system:
            await put(await system.start_group("log", AppendLog()), 0, 20)
        for number, starts in ((1, 1), (2, 2)):
            path = Path(shutil.copytree(common, tmp_path / f"node-{number}" / "data"))
            (path.parent / "node.toml").touch()
            for start in range(starts):
                # Each start is a term of its own.
                async with open_system(path, CONFIG) as system:
                    log = await system.start_group("log", AppendLog())
                    if start == starts - 1:
                        await put(log, 20, 40)
            renumber(path, number)
        shutil.rmtree(common)

    trio.run(life)
    both = ["node-1", "node-2"]
    source = DirectorySource(tmp_path)
    with pytest.raises(LogyardError, match="hold different entries") as caught:
        source.logs()
    source.close()
    assert caught.value.code == "copies_differ" and all(str(tmp_path / name) in str(caught.value) for name in both)
    (problem,) = differing(tmp_path, parse_options({"path": str(tmp_path), "subscribePattern": ".*"}))
    assert all(str(tmp_path / name) in problem for name in both)
    shutil.rmtree(tmp_path / "node-1")
    shutil.copytree(tmp_path / "node-2", tmp_path / "node-3")
    renumber(tmp_path / "node-3" / "data", 3)
    with closing(DirectorySource(tmp_path)) as one:
        assert [info.members for info in one.logs()] == [(2, 3)]


def renumber(path: Path, node: int) -> None:
    """Make a directory one of another node."""
    store = MetaStore(Disk(), str(path / "meta"))
    store.open()
    assert store.identity is not None
    store.commit([(IDENTITY, msgpack.packb(list(store.identity._replace(node=node))))])
    store.close()


def test_a_damaged_copy_is_passed_over_while_there_is_another(source: DirectorySource) -> None:
    class Bad:
        """A stopped node whose copies can't be read."""

        directory = "bad"

        def __init__(self, code: str) -> None:
            self.code = code

        def log(self, uid: int) -> StoppedLog:
            raise LogyardError(f"a page of {uid}", code=self.code)

    (uid,) = [info.uid for info in source.logs({"whole"})]
    for code in ("corrupt", "error"):
        bad = cast(StoppedNode, Bad(code))
        for copies in ([bad, *source.nodes], [*source.nodes, bad]):
            assert source._best(uid, copies).node is source.nodes[0]
        with pytest.raises(LogyardError, match="a page of"):
            source._best(uid, [bad])
    with pytest.raises(LogyardError, match="a page of"):
        source._best(uid, [cast(StoppedNode, Bad("unknown_group")), *source.nodes])

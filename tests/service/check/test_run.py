"""`check_directory`: a clean directory passes untouched; every kind of damage is found and named."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import pytest
import trio
from xxhash import xxh3_64_digest

from logyard.client.log import open_call
from logyard.client.sync import connect_sync
from logyard.engine.config import SystemConfig
from logyard.engine.disk.door import Disk
from logyard.engine.log.meta import FORMAT, HEADER_BYTES, IDENTITY, MetaStore
from logyard.engine.log.meta_copies import seal
from logyard.engine.log.meta_rows import (
    DAMAGED,
    KEY,
    STORE,
    StateRow,
    group_rows,
    snapshot_key,
    snapshot_rows,
    state_key,
    state_rows,
)
from logyard.engine.log.record import BATCH_BYTES, BLOCK, DATA_START, FILE, HEADER_MAGIC
from logyard.engine.log.segment import HEAD, HEAD_BYTES
from logyard.engine.recovery.damage import Damaged
from logyard.machines.log import AppendLog
from logyard.payloads import checkpoints
from logyard.payloads.ledger import Ledger, Marks
from logyard.payloads.writing import GenerationConfig
from logyard.pipeline.directory.generations import Stopped
from logyard.protocol.errors import DirectoryInUse, LogyardError, WrongIdentity
from logyard.service.check.process import inspect
from logyard.service.check.run import check_directory
from logyard.service.embedded import EmbeddedLog, EmbeddedSystem, open_system
from logyard.service.local_cluster import LocalCluster
from tests.crash.agree import disagreements
from tests.inside import engine_of

NAMES = ("alpha", "beta", "gamma")
CONFIG = SystemConfig(
    wal_file_bytes=1 << 20, wal_batch_bytes=1 << 18, wal_stock_files=1, generation_bytes=16 << 20,
    generation_transaction_bytes=1 << 20, migrate_dead_ratio=1.0, rewrite_live_ratio=0.0,
)  # fmt: skip


def small(name: str, number: int) -> bytes:
    return f"<small {name} {number}>".encode() * 5


def large(name: str, number: int) -> bytes:
    return f"<large {name} {number}>".encode() * 1500


async def fill(logs: list[EmbeddedLog], first: int, count: int) -> None:
    for number in range(first, first + count):
        for log in logs:
            await log.append_many([(b"h", small(log.name, number)), (b"big", large(log.name, number)), (b"bare", None)])


async def start(system: EmbeddedSystem) -> list[EmbeddedLog]:
    return [await system.start_group(name, AppendLog()) for name in NAMES]


async def build(path: Path) -> None:
    """Three groups with payloads in a generation (0..3), in sealed WAL files (10..) and in the current one (90..)."""
    async with open_system(path, CONFIG) as system:
        logs = await start(system)
        await fill(logs, 0, 4)
        await system.compact()
        await logs[0].truncate(4)
        await logs[1].truncate(3)
        # The counters of what died go with the next commit.
        await engine_of(system).storage.meta_batch.commit_members(())
        await logs[0].snapshot()
        number, files = 10, len(wal_files(path))
        with trio.fail_after(20):
            # No more than fills one file: what comes later must find room in the next.
            while len(wal_files(path)) == files:
                await fill(logs, number, 1)
                number += 1
            while not engine_of(system).storage.location.files:
                await trio.sleep(0.01)
        # Who switched to the segment stores the rows that say so before the lock is free.
        async with engine_of(system).storage.janitor.lock:
            pass
    async with open_system(path, CONFIG) as system:
        logs = await start(system)
        await fill(logs, 90, 3)
        assert engine_of(system).storage.location.files


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check") / "data"
    trio.run(build, path)
    return path


@pytest.fixture
def data(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "data"))


def traces(path: Path) -> dict[str, tuple[int, int, int, str]]:
    """Everything that a reader could have changed."""
    found = {}
    for one in [path, *sorted(path.rglob("*"))]:
        stat = one.stat()
        digest = hashlib.sha256(one.read_bytes()).hexdigest() if one.is_file() else ""
        found[str(one.relative_to(path))] = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, digest)
    return found


def inspected(path: Path) -> dict[str, Any]:
    """The reading alone, in this process: for damage that kills nobody."""
    return inspect(path, frozenset(), lambda line: None)


def named(report: dict[str, Any], severity: str) -> list[dict[str, str]]:
    return [finding for finding in report["findings"] if finding["severity"] == severity]


def flip(path: Path, offset: int, length: int = 1) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(length)
        assert len(old) == length
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in old))


def holding(folder: Path, pattern: str, text: bytes) -> tuple[Path, int]:
    """The file, and the place in it, where some bytes stand."""
    for path in sorted(folder.glob(pattern)):
        at = path.read_bytes().find(text)
        if at >= 0:
            return path, at
    raise AssertionError(f"no file of {folder}/{pattern} has {text[:20]!r}")


def batches(path: Path) -> list[int]:
    """Where batches begin in a WAL file."""
    body = path.read_bytes()
    return [at for at in range(DATA_START, len(body), BLOCK) if body[at : at + 4] == HEADER_MAGIC]


def wal_files(path: Path) -> list[Path]:
    return sorted((path / "wal").glob("*.wal"))


def meta_of(path: Path) -> MetaStore:
    store = MetaStore(Disk(), str(path / "meta"))
    store.open()
    return store


def uid_of(path: Path, name: str) -> int:
    found = next(group["uid"] for group in inspected(path)["groups"] if group["name"] == name)
    return int(found, 16)


# Clean directories


def test_a_clean_directory_passes_and_is_not_touched(data: Path) -> None:
    before = traces(data)
    stages: list[str] = []
    report = check_directory(data, progress=lambda stage, done, total: stages.append(stage))
    assert report["ok"] and report["findings"] == []
    assert traces(data) == before
    assert (report["node"], report["cluster"], report["epoch"]) == (1, "embedded", 2)
    assert [group["name"] for group in sorted(report["groups"], key=lambda group: group["name"])] == list(NAMES)
    counts = report["counts"]
    assert counts["groups"] == 3 and counts["snapshots"] == 1 and counts["generations"] == 1 and counts["segments"] >= 2
    assert min(counts[name] for name in ("wal_files", "wal_batches", "wal_entries", "segment_entries", "units")) > 0
    # Everything that lives was hashed: three logs, less what was truncated.
    assert counts["bytes"] > 3 * len(large("alpha", 10)) * 10
    assert {"wal", "segments", "generations", "groups"} <= set(stages)


def test_a_first_start_that_was_cut_off_leaves_no_damage(tmp_path: Path) -> None:
    """A power cut before the first commit: the next start is the first. Where there is more, it is damage."""
    for name in ("meta/a", "meta/b", "wal", "segments"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "meta/a/data.mdb").touch()
    report = inspected(tmp_path)
    assert not named(report, "damage") and not report["complete"]
    assert [one["kind"] for one in named(report, "warning")][-1] == "unborn"
    (tmp_path / "segments" / "0000000000000001.seg").touch()
    expect(inspected(tmp_path), "meta", "", "neither")


def test_every_state_of_a_life_passes(tmp_path: Path) -> None:
    """And a start makes of each the same groups as who reads it stopped."""

    async def life() -> None:
        path = tmp_path / "data"

        async def look() -> None:
            assert await disagreements(path, tmp_path / "copy", CONFIG) == []
            report = inspected(path)
            # A checkpoint may name a segment that went when the snapshot took its place.
            assert {finding["kind"] for finding in report["findings"]} <= {"stale_run"}, report["findings"]
            assert named(report, "damage") == []

        async with open_system(path, CONFIG) as system:
            pass
        await look()
        async with open_system(path, CONFIG) as system:
            logs = await start(system)
        await look()
        for round_ in range(3):
            async with open_system(path, CONFIG) as system:
                logs = await start(system)
                await fill(logs, 10 * round_, 5)
            await look()
            async with open_system(path, CONFIG) as system:
                logs = await start(system)
                await system.compact()
                await fill(logs, 10 * round_ + 5, 2)
            await look()
            async with open_system(path, CONFIG) as system:
                logs = await start(system)
                for log in logs[round_:]:
                    low, end = log.bounds()
                    await log.truncate((low + end) // 2)
                    await log.snapshot()
                await system.compact()
            await look()
        async with open_system(path, CONFIG) as system:
            logs = await start(system)
            await system.delete_group("beta")
            await logs[0].truncate(logs[0].bounds()[1])
            await logs[0].snapshot()
            await system.compact()
        await look()

    trio.run(life)


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_system(tmp_path / "data", CONFIG) as system:
            await start(system)
            with pytest.raises(DirectoryInUse, match=str(os.getpid())):
                check_directory(tmp_path / "data")
            with pytest.raises(DirectoryInUse):
                check_directory(tmp_path / "data", repair=True)

    trio.run(main)


def test_what_is_no_data_directory(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    report = check_directory(tmp_path / "empty")
    assert not report["ok"] and report["findings"][0]["kind"] == "directory"
    assert list((tmp_path / "empty").iterdir()) == []
    with pytest.raises(LogyardError):
        check_directory(tmp_path / "nowhere")


# Newer formats


def newer_wal(path: Path) -> None:
    file = wal_files(path)[-1]
    with open(file, "r+b") as stream:
        fields = list(FILE.unpack(stream.read(FILE.size)))
        fields[1] += 1
        head = FILE.pack(*fields)
        for at in (0, BLOCK):
            stream.seek(at)
            stream.write(head + xxh3_64_digest(head))


def newer_segment(path: Path) -> None:
    file = sorted((path / "segments").iterdir())[0]
    with open(file, "r+b") as stream:
        fields = list(HEAD.unpack(stream.read(HEAD.size)))
        fields[1] += 1
        head = HEAD.pack(*fields)
        stream.seek(0)
        stream.write(head + xxh3_64_digest(head))


def newer_meta(path: Path) -> None:
    with lmdb.open(str(path / "meta" / "a"), map_size=1 << 30) as environment, environment.begin(write=True) as txn:
        raw = txn.get(IDENTITY)
        assert raw is not None
        values = msgpack.unpackb(raw[HEADER_BYTES:])
        values[2] = FORMAT + 1
        txn.put(IDENTITY, seal(IDENTITY, msgpack.packb(values), 9))


@pytest.mark.parametrize("make", [newer_wal, newer_segment, newer_meta])
def test_a_newer_format_is_refused(data: Path, make: Callable[[Path], None]) -> None:
    make(data)
    before = traces(data)
    with pytest.raises(WrongIdentity, match="newer"):
        check_directory(data, repair=True)
    assert traces(data) == before


# Damage


def expect(report: dict[str, Any], path: str, group: str, *words: str) -> None:
    """Some damage is named with this file and group."""
    assert not report.get("ok", False)
    found = [finding for finding in named(report, "damage") if path in finding["path"] and finding["group"] == group]
    assert any(all(word in finding["message"] for word in words) for finding in found), report["findings"]


def test_payload_in_the_current_wal_file(data: Path) -> None:
    path, at = holding(data / "wal", "*.wal", large("beta", 91))
    flip(path, at + 777)
    expect(check_directory(data), f"wal/{path.name}", "beta", f"at byte {at}", "hash")


def test_payload_in_a_sealed_wal_file(data: Path) -> None:
    path, at = holding(data / "wal", "*.wal", large("gamma", 11))
    assert path != wal_files(data)[-1]
    flip(path, at + 5)
    expect(inspected(data), f"wal/{path.name}", "gamma", f"at byte {at}", "hash")


def test_a_small_payload_in_a_sealed_wal_file(data: Path) -> None:
    path, at = holding(data / "wal", "*.wal", small("gamma", 11))
    flip(path, at)
    expect(inspected(data), f"wal/{path.name}", "gamma", "hash")


def test_metadata_in_an_old_batch(data: Path) -> None:
    path = wal_files(data)[-1]
    start_ = batches(path)[0]
    body = path.read_bytes()
    rows = struct.unpack_from("<I", body, start_ + 32)[0]
    flip(path, start_ + BATCH_BYTES + rows * 32 + 20)
    report = inspected(data)
    found = [finding for finding in named(report, "damage") if finding["kind"] == "wal"]
    assert found and found[0]["path"] == f"wal/{path.name}" and found[0]["group"] in NAMES
    assert "at byte" in found[0]["message"]


def test_a_batch_header_is_healed_by_its_trailer(data: Path) -> None:
    path = wal_files(data)[-1]
    start_ = batches(path)[1]
    flip(path, start_ + 10)
    report = check_directory(data)
    assert report["ok"]
    assert any(f"at byte {start_}" in finding["message"] for finding in named(report, "healed")), report["findings"]


def test_a_whole_batch_that_is_gone_names_its_suspects(data: Path) -> None:
    path = wal_files(data)[-1]
    first, second = batches(path)[1:3]
    with open(path, "r+b") as file:
        file.seek(first)
        file.write(os.urandom(second - first))
    report = inspected(data)
    found = [finding for finding in named(report, "damage") if finding["kind"] == "wal"]
    assert found and all(finding["path"] == f"wal/{path.name}" for finding in found)


def test_one_copy_of_a_wal_head_is_healed_and_two_are_damage(data: Path) -> None:
    path = wal_files(data)[-1]
    flip(path, 16)
    report = inspected(data)
    assert named(report, "damage") == [] and named(report, "healed")[0]["path"] == f"wal/{path.name}"
    flip(path, BLOCK + 16)
    assert any(finding["path"] == f"wal/{path.name}" for finding in named(inspected(data), "damage"))


def test_a_torn_last_batch_is_a_warning(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_system(tmp_path / "data", CONFIG) as system:
            logs = await start(system)
            await fill(logs, 0, 2)

    trio.run(main)
    path = wal_files(tmp_path / "data")[-1]
    last = batches(path)[-1]
    flip(path, last + 24 + BLOCK - BATCH_BYTES)
    flip(path, last + BATCH_BYTES + 5)
    total = struct.unpack_from("<Q", path.read_bytes(), last + 56)[0]
    flip(path, last + total - 20)
    report = check_directory(tmp_path / "data")
    assert report["ok"], report["findings"]
    (torn,) = named(report, "warning")
    assert torn["kind"] == "torn_batch" and torn["path"] == f"wal/{path.name}" and str(last) in torn["message"]


def test_deleted_wal_files(data: Path) -> None:
    home, _ = holding(data / "wal", "*.wal", large("gamma", 11))
    home.unlink()
    report = check_directory(data)
    for name in NAMES:
        expect(report, f"wal/{home.name}", name, "gone")
    current = wal_files(data)[-1]
    current.unlink()
    expect(inspected(data), f"wal/{current.name}", "", "missing")


def test_a_cut_wal_file(data: Path) -> None:
    path, _ = holding(data / "wal", "*.wal", large("gamma", 11))
    os.truncate(path, 100_000)
    report = inspected(data)
    expect(report, f"wal/{path.name}", "", "cut")
    expect(report, f"wal/{path.name}", "gamma", "hash")


def test_a_cut_of_the_wal_file_in_use(tmp_path: Path) -> None:
    async def main(number: int) -> None:
        async with open_system(tmp_path / "data", CONFIG) as system:
            await fill(await start(system), number, 1)

    trio.run(main, 0)
    # A start begins with an empty batch.
    trio.run(main, 1)
    path = wal_files(tmp_path / "data")[-1]
    whole, starts = path.read_bytes(), batches(path)
    full, size = next(at for at in starts if struct.unpack_from("<I", whole, at + 36)[0]), len(whole)
    end = full + struct.unpack_from("<Q", whole, full + 56)[0]
    with open(path.parent / "new-9.spare", "wb") as spare:
        spare.truncate(size)

    def found(length: int) -> list[dict[str, str]]:
        path.write_bytes(whole[:length].ljust(length, b"\0"))
        report = inspected(tmp_path / "data")
        return [one for one in report["findings"] if one["severity"] in ("damage", "warning") and one["kind"] != "ring"]

    assert found(size) == []
    for length in (5000, BLOCK, DATA_START, end, end - BLOCK, end - 1, size - 1, size - BLOCK - 7):
        cut = [one for one in found(length) if one["severity"] == "damage" and one["path"] == f"wal/{path.name}"]
        assert cut and "cut" in cut[0]["message"], length
        assert not any("spare" in one["path"] for one in found(length)), length
    # Behind an empty batch it may have been made so; behind all of them nothing is lost, whatever the configuration.
    empty = next(at for at in starts if not struct.unpack_from("<I", whole, at + 36)[0]) + BLOCK
    short = [(one["kind"], one["path"]) for one in found(empty) if one["severity"] == "warning"]
    assert short == [("short_file", f"wal/{path.name}")]
    assert found(size - BLOCK) == []
    (path.parent / "new-9.spare").unlink()
    assert found(size + (1 << 20)) == []


def segment_of(path: Path, text: bytes) -> Path:
    home, _ = holding(path / "wal", "*.wal", text)
    return path / "segments" / f"{home.stem}.seg"


def test_segment_data(data: Path) -> None:
    path = segment_of(data, large("gamma", 11))
    flip(path, BLOCK + 3)
    report = inspected(data)
    found = [finding for finding in named(report, "damage") if finding["kind"] == "segment"]
    assert found and found[0]["path"] == f"segments/{path.name}" and found[0]["group"] in NAMES
    assert "at byte" in found[0]["message"]


def test_segment_row(data: Path) -> None:
    path = segment_of(data, large("gamma", 11))
    index = HEAD.unpack(path.read_bytes()[: HEAD.size])[6]
    flip(path, index + 9)
    report = inspected(data)
    found = [finding for finding in named(report, "damage") if finding["path"] == f"segments/{path.name}"]
    assert found and f"at byte {index}" in found[0]["message"]
    # A row that proves nothing names no group, but the log that lacks it does.
    assert any(finding["group"] in NAMES and "missing" in finding["message"] for finding in found)


def test_segment_head_foot_and_group_table_are_healed(data: Path) -> None:
    path = segment_of(data, large("gamma", 11))
    size = path.stat().st_size
    for at in (20, size - HEAD_BYTES - 3):
        flip(path, at)
        report = inspected(data)
        assert named(report, "damage") == [] and named(report, "healed")[0]["path"] == f"segments/{path.name}"
        flip(path, at)
    flip(path, 20)
    flip(path, size - 20)
    report = inspected(data)
    expect(report, f"segments/{path.name}", "")
    expect(report, f"segments/{path.name}", "gamma", "missing")


def test_a_deleted_segment(data: Path) -> None:
    path = segment_of(data, large("gamma", 11))
    path.unlink()
    report = check_directory(data)
    for name in NAMES:
        expect(report, f"segments/{path.name}", name, "missing")


def test_payload_in_a_generation(data: Path) -> None:
    path, at = holding(data / "payloads", "gen-*/bodies", large("gamma", 2)[:2000])
    flip(path, at + 9)
    report = check_directory(data)
    expect(report, str(path.relative_to(data)), "gamma", "entry")
    damaged = {finding["path"] for finding in named(report, "damage") if finding["group"] == "gamma"}
    assert damaged == {str(path.relative_to(data))}, report["findings"]


def test_small_payload_in_a_generation(data: Path) -> None:
    text = small("gamma", 2)
    path, at = holding(data / "payloads", "gen-*/data.mdb", text)
    # Copy-on-write leaves older copies of a page behind.
    while at >= 0:
        flip(path, at + 9)
        at = path.read_bytes().find(text)
    expect(check_directory(data), str(path.relative_to(data)), "gamma", "entry")


def test_a_deleted_generation(data: Path) -> None:
    shutil.rmtree(data / "payloads" / "gen-0000000001")
    report = check_directory(data)
    expect(report, "payloads/gen-0000000001", "gamma", "lost")
    expect(report, "payloads/gen-0000000001", "beta", "lost")


def test_a_cut_generation(data: Path) -> None:
    path = data / "payloads" / "gen-0000000001" / "data.mdb"
    os.truncate(path, path.stat().st_size - 4096)
    report = check_directory(data)
    expect(report, "payloads/gen-0000000001", "", "cut")
    expect(report, "payloads/gen-0000000001", "gamma", "lost")


def test_pages_of_memory_maps_never_end_a_check(data: Path) -> None:
    """Whole pages of nonsense: LMDB may kill its reader, and does, for some of them."""
    draw = random.Random(7)
    for relative in ("payloads/gen-0000000001/data.mdb", "meta/a/data.mdb"):
        path = data / relative
        whole = path.read_bytes()
        for page in draw.sample(range(2, len(whole) // 4096), 2):
            with open(path, "r+b") as file:
                file.seek(page * 4096 + 8)
                file.write(draw.randbytes(4088))
            check_directory(data)
            path.write_bytes(whole)


def test_a_map_that_kills_its_reader_is_named(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a bad block of the disk does: the process that touches it dies. The next one leaves that map alone."""
    stub = tmp_path / "stub"
    stub.mkdir()
    # Started by every Python of this test; it kills the reader at the first look into the generation.
    (stub / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "def hook(event, arguments):\n"
        "    if event == 'open' and str(arguments[0]).endswith('gen-0000000001/data.mdb'):\n"
        "        os.kill(os.getpid(), signal.SIGBUS)\n"
        "sys.addaudithook(hook)\n"
    )
    monkeypatch.setattr(sys, "path", [str(stub), *sys.path])
    report = check_directory(data)
    expect(report, "payloads/gen-0000000001", "", "kills")
    expect(report, "payloads/gen-0000000001", "gamma", "lost")


STUB = """
import os, signal, sys
def hook(event, arguments):
    if event == {event!r} and {part!r} in str(arguments[0]):
        {act}
sys.addaudithook(hook)
"""


def hooked(monkeypatch: pytest.MonkeyPatch, directory: Path, event: str, part: str, act: str) -> None:
    """Have each Python of this test do something when it opens, or makes, what has `part` in its name."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(STUB.format(event=event, part=part, act=act))
    monkeypatch.setattr(sys, "path", [str(directory), *sys.path])


def test_who_ends_the_reader_from_outside_says_nothing_of_a_map(
    data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The killer of a machine without memory, say: the generation that was being read is as good as any."""
    act = "os.kill(os.getpid(), signal.SIGKILL)"
    with monkeypatch.context() as patch:
        hooked(patch, tmp_path / "stub", "open", "gen-0000000001/data.mdb", act)
        with pytest.raises(LogyardError, match="SIGKILL"):
            check_directory(data)
    assert check_directory(data)["ok"]


@pytest.mark.parametrize(
    ("event", "part", "number"),
    [
        ("os.mkdir", "logyard-check-", errno.ENOSPC), ("open", "meta/a/data.mdb", errno.EMFILE),
        ("open", ".wal", errno.EMFILE), ("open", ".seg", errno.ENFILE), ("open", "gen-0000000001", errno.EMFILE),
        ("open", "meta/b/data.mdb", errno.EACCES),
    ],
)  # fmt: skip
def test_what_the_check_lacks_is_no_damage(
    data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, event: str, part: str, number: int
) -> None:
    """A full temporary directory, too few descriptors, the wrong user: nobody may replace a good node for that."""
    before = traces(data)
    with monkeypatch.context() as patch:
        hooked(patch, tmp_path / "stub", event, part, f"raise OSError({number}, os.strerror({number}))")
        with pytest.raises(LogyardError, match=rf"not judged.*({os.strerror(number)}|descriptors or memory)"):
            check_directory(data, repair=True)
    assert traces(data) == before
    assert check_directory(data)["ok"]


def test_a_temporary_directory_that_fills_up_is_no_damage(
    data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rows are copied there: what does not fit is not lost."""
    act = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, -1))"
    with monkeypatch.context() as patch:
        hooked(patch, tmp_path / "stub", "os.mkdir", "logyard-check-", act)
        with pytest.raises(LogyardError, match=r"not judged.*TMPDIR"):
            check_directory(data)


# The meta store


def damage_row(path: Path, copy: str, key: bytes) -> None:
    with lmdb.open(str(path / "meta" / copy), map_size=1 << 30) as environment, environment.begin(write=True) as txn:
        raw = bytearray(txn.get(key) or b"")
        raw[-1] ^= 0xFF
        txn.put(key, bytes(raw))


def test_a_row_bad_in_one_copy_is_healed_and_in_both_is_damage(data: Path) -> None:
    uid = uid_of(data, "alpha")
    key = state_key(uid)
    damage_row(data, "a", key)
    report = inspected(data)
    assert named(report, "damage") == []
    (healed,) = named(report, "healed")
    assert (healed["path"], healed["group"]) == ("meta/a/data.mdb", f"{uid:016x}")
    assert "checkpoint" in healed["message"]
    damage_row(data, "b", key)
    report = check_directory(data)
    expect(report, "meta", f"{uid:016x}", "checkpoint")


def test_a_snapshot_row_bad_in_both_copies(data: Path) -> None:
    uid = uid_of(data, "alpha")
    for copy in "ab":
        damage_row(data, copy, snapshot_key(uid))
    expect(inspected(data), "meta", f"{uid:016x}", "snapshot")


def test_a_snapshot_that_does_not_verify(data: Path) -> None:
    uid = uid_of(data, "alpha")
    store = meta_of(data)
    value = bytearray(store.get(snapshot_key(uid)) or b"")
    value[len(value) // 2] ^= 0xFF
    store.commit([(snapshot_key(uid), bytes(value))])
    store.close()
    expect(inspected(data), "meta", "alpha")


def test_a_lost_snapshot(data: Path) -> None:
    uid = uid_of(data, "alpha")
    store = meta_of(data)
    store.commit([(snapshot_key(uid), None)])
    store.close()
    expect(inspected(data), "meta", "alpha", "snapshot")


def test_one_copy_of_the_meta_store_is_enough(data: Path) -> None:
    (data / "meta" / "a" / "data.mdb").unlink()
    before = traces(data)
    report = check_directory(data)
    assert report["ok"] and any(finding["path"] == "meta/a" for finding in named(report, "healed"))
    assert traces(data) == before
    os.truncate(data / "meta" / "b" / "data.mdb", 9000)
    report = check_directory(data)
    expect(report, "meta", "", "neither")


def test_a_group_that_an_earlier_start_stopped(data: Path) -> None:
    uid = uid_of(data, "beta")
    store = meta_of(data)
    store.commit([(DAMAGED + KEY.pack(uid), b"batch 7 is lost")])
    store.close()
    expect(inspected(data), "meta", "beta", "batch 7 is lost")
    uid = uid_of(data, "beta")
    known = Damaged("batch 7 is lost", False, 7, False)
    store = meta_of(data)
    store.commit([(DAMAGED + KEY.pack(uid), known.pack())])
    store.close()
    expect(inspected(data), "meta", "beta", "waits for others")
    store = meta_of(data)
    store.commit([(DAMAGED + KEY.pack(uid), known._replace(through=0, sound=True).pack())])
    store.close()
    report = inspected(data)
    assert not named(report, "damage") and any("mended" in finding["message"] for finding in named(report, "healed"))


def test_payloads_whose_home_is_lost(data: Path) -> None:
    """An earlier start found their generation gone: the row of their homes says so, and no file does."""
    uid = uid_of(data, "alpha")
    store = meta_of(data)
    key = STORE + checkpoints.key(uid)
    _, homes, _ = checkpoints.decode(key[1:], store.get(key) or b"")
    first, last = homes[0][:2]
    store.commit([(key, checkpoints.encode(uid, [checkpoints.Home(first, last, 0, 0), *homes[1:]], []))])
    store.close()
    expect(inspected(data), "payloads", "alpha", f"entries {first} to {last} were lost with their generation")


def test_rows_that_contradict_the_files(data: Path) -> None:
    """Counters, terms and indexes: the row verifies, and what it says is wrong."""
    uid = uid_of(data, "gamma")
    store = meta_of(data)
    row = next(row for row in state_rows(store) if row.uid == uid)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("committed", {"commit": 10_000}),
        ("missing", {"runs": row.runs[:-1]}),
        ("overlap", {"runs": [*row.runs, row.runs[-1]]}),
        ("snapshot", {"snapshot_index": 3}),
        ("term", {"term_runs": [row.term_runs[0], (row.term_runs[0][0] + 1, 0), *row.term_runs[1:]]}),
    ]
    for word, changes in wrong:
        fields = {name: getattr(row, name) for name in row.__slots__}
        store.commit([type(row)(**{**fields, **changes}).put()])
        store.close()
        expect(inspected(data), "", "gamma", word)
        store = meta_of(data)
        store.commit([row.put()])
    store.close()
    assert named(inspected(data), "damage") == []


async def test_a_snapshot_may_be_durable_before_its_term(tmp_path: Path) -> None:
    """As an installed one may be where the process ended next: a start takes the term over from it."""
    for name in ("full", "fresh"):
        async with open_system(tmp_path / name, CONFIG) as system:
            if name == "full":
                log = await system.start_group("alpha", AppendLog())
                await log.append_many([(b"", None)])
                await log.snapshot()
    full, fresh = meta_of(tmp_path / "full"), meta_of(tmp_path / "fresh")
    (group,), (snapshot,) = group_rows(full), snapshot_rows(full)
    base = {"log": [snapshot.index, snapshot.term], "flushed": snapshot.index}
    state = StateRow(group.uid, snapshot_index=snapshot.index, snapshot_term=snapshot.term, extra=base)
    fresh.commit([group.put(), snapshot.put(), state.put()])
    fresh.close()
    full.close()
    assert snapshot.term > state.term == 0 and not named(inspected(tmp_path / "fresh"), "damage")


def recount(path: Path, name: str, change: Callable[[Marks, Ledger], Marks]) -> None:
    """Store other counters for a group's copy in the generation."""
    uid = uid_of(path, name)
    generation = Stopped(str(path / "payloads" / "gen-0000000001"), 1, GenerationConfig())
    generation.open_reader()
    store = meta_of(path)
    key = checkpoints.key(uid)
    _, homes, [(number, run, marks)] = checkpoints.decode(key, store.get(STORE + key) or b"")
    ledger = dict(generation.columns(run).ledgers())[uid]
    generation.close()
    store.commit([(STORE + key, checkpoints.encode(uid, homes, [(number, run, change(marks, ledger))]))])
    store.close()


def test_a_counter_that_is_wrong(data: Path) -> None:
    recount(data, "gamma", lambda marks, ledger: Marks(marks.live + 1, marks.prefix, marks.dead))
    expect(inspected(data), "meta", "gamma", "live bytes are counted")


def test_what_lives_and_is_counted_as_dead(data: Path) -> None:
    recount(data, "gamma", lambda marks, ledger: Marks(0, len(ledger)))
    expect(inspected(data), "meta", "gamma", "lives and is counted as dead")


def test_dead_bytes_that_nobody_will_ever_count_again(data: Path) -> None:
    recount(data, "alpha", lambda marks, ledger: Marks(ledger.total))
    report = inspected(data)
    assert named(report, "damage") == []
    (leak,) = named(report, "warning")
    assert (leak["kind"], leak["group"]) == ("leak", "alpha") and "gen-0000000001" in leak["path"]


def test_homes_that_are_lost(data: Path) -> None:
    """Without its homes row, nothing says where the payloads below the log are; the live set says that they are."""
    uid = uid_of(data, "alpha")
    store = meta_of(data)
    store.commit([(STORE + checkpoints.key(uid), None)])
    store.close()
    report = inspected(data)
    assert any(finding["group"] == "alpha" for finding in named(report, "damage")), report["findings"]


# Robustness and repair


def spots(path: Path, count: int) -> Iterator[int]:
    draw = random.Random(path.name)
    size = path.stat().st_size
    yield from draw.sample(range(size), min(count, size))


def test_flipped_bytes_anywhere_in_wal_and_segments_never_end_a_check(data: Path) -> None:
    """And no byte with a checksum is missed: in segments, only the padding of the head block has none."""
    for path in sorted((data / "segments").iterdir()):
        for at in spots(path, 12):
            flip(path, at)
            found = inspected(data)["findings"]
            assert HEAD_BYTES <= at < BLOCK or any(finding["path"] == f"segments/{path.name}" for finding in found)
            flip(path, at)
    for path in wal_files(data):
        used = batches(path)[-1]
        for at in random.Random(3).sample(range(used), 8):
            flip(path, at)
            inspected(data)
            flip(path, at)
    assert inspected(data)["findings"] == []


def test_repair_removes_orphans_only(data: Path) -> None:
    orphans = {
        "segments/00000000000000ff.seg.tmp": b"x",
        "wal/new-7.spare.tmp": b"x",
        "wal/new-8.spare": bytes(4096),
        "payloads/gen-0000000000.dead/data.mdb": b"x",
        "payloads/gen-0000000009.new/data.mdb": bytes(8192),
    }
    # A stop may cut a segment job short of its commit: what it wrote is one more.
    left = check_directory(data)["orphans"]
    for name, body in orphans.items():
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_bytes(body)
    unused = sorted((data / "segments").glob("*.seg"))[0]
    shutil.copy(unused, data / "segments" / "0000000000000001.seg.copy")
    kept = traces(data)
    report = check_directory(data)
    assert report["ok"] and report["removed"] == [] and traces(data) == kept
    expected = sorted([*left, *(name.removesuffix("/data.mdb") for name in orphans)])
    assert sorted(report["orphans"]) == expected
    report = check_directory(data, repair=True)
    assert sorted(report["removed"]) == expected
    assert not any((data / name).exists() for name in orphans)
    assert check_directory(data)["orphans"] == []
    # A file with a name nobody gives is somebody's: it is reported and stays.
    assert (data / "segments" / "0000000000000001.seg.copy").exists()


def test_repair_removes_nothing_while_rows_are_lost(data: Path) -> None:
    """Who knows what a lost row named?"""
    uid = uid_of(data, "alpha")
    for copy in "ab":
        damage_row(data, copy, state_key(uid))
    (data / "segments" / "00000000000000ff.seg.tmp").write_bytes(b"x")
    before = traces(data)
    report = check_directory(data, repair=True)
    assert not report["ok"] and report["orphans"] and report["removed"] == []
    assert traces(data) == before


@pytest.mark.parametrize("lost", [False, True])
def test_entries_of_the_engines_own_leave_no_trace_and_no_finding(tmp_path: Path, lost: bool) -> None:
    """Sessions that begin and end are entries without payload: a stretch of them is not a loss, a lost record is."""
    with LocalCluster(tmp_path, 1) as cluster:
        cluster.start()
        with connect_sync(cluster.addresses, exactly_once=False) as yard:
            yard.create("log")
            log = yard.log("log")
            for number in range(3):
                log.append(b"meta", b"body %d" % number)
            yard.compact()
            for session in range(1, 8):
                yard.run(open_call("log", session, 1, 60_000))
            yard.snapshot()
            yard.compact()
            log.append(b"meta", b"last")
            yard.compact()
            yard.snapshot()
            assert yard.status(1)["wal_bytes_live"] == 0
        cluster.stop()
        data = cluster.nodes[1].data
        if lost:
            lose_home(data, 3)
        report = check_directory(data)
        texts = [one["message"] for one in named(report, "damage") + named(report, "warning")]
        assert report["ok"] is not lost and any("nothing is known of them" in text for text in texts) is lost, texts


def lose_home(data: Path, index: int) -> None:
    """No row says any more where entry `index` and those before it are."""
    meta = MetaStore(Disk(), str(data / "meta"))
    meta.open()
    for key, value in list(meta.scan(STORE)):
        uid, homes, marks = checkpoints.decode(key[1:], value)
        kept = [home._replace(first=max(home.first, index + 1)) for home in homes if home.last > index]
        meta.commit([(key, checkpoints.encode(uid, kept, marks))])
    meta.close()

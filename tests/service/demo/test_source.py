"""The demo's source: which files are taken, what a record is, and that a changing source is noticed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import trio
import trio.testing
import xxhash

from logyard.service.demo import source as demo_source
from logyard.service.demo.ingest import ByteBudget, Ledger
from logyard.service.demo.source import SourceChanged, content, default_source, plan, scan, walk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, data in {"b.py": b"bb", "a.py": b"a", "empty": b"", "sub/c.py": b"ccc"}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    for left_out in ("site-packages/x.py", "sub/__pycache__/c.pyc"):
        path = tmp_path / left_out
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no")
    (tmp_path / "link").symlink_to(tmp_path / "a.py")
    return tmp_path


def test_the_walk_is_ordered_and_leaves_out_what_is_not_source(root: Path) -> None:
    assert [path.relative_to(root).as_posix() for path in walk(root)] == ["a.py", "b.py", "empty", "sub/c.py"]


def test_files_are_hashed_and_described(root: Path) -> None:
    seen: list[int] = []
    source = scan(root, seen.append)
    assert [file.name for file in source.files] == ["a.py", "b.py", "empty", "sub/c.py"]
    assert seen == [1, 2, 0, 3]
    assert source.files[3].digest == xxhash.xxh3_128_digest(b"ccc")
    assert source.files[3].mode == (root / "sub/c.py").stat().st_mode & 0o7777


def test_too_large_files_are_counted_not_taken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_source, "FILE_BYTES_MAX", 2)
    source = scan(root)
    assert [file.name for file in source.files] == ["a.py", "b.py", "empty"]
    assert source.skipped == 1


def test_record_i_goes_to_log_i_mod_l_and_the_walk_repeats_as_copies(root: Path) -> None:
    records = plan(scan(root).files, 3)
    assert len(records) == 12
    assert [record.log for record in records] == [number % 3 for number in range(12)]
    assert [record.copy for record in records] == [0] * 4 + [1] * 4 + [2] * 4
    first, repeated = json.loads(records[1].metadata), json.loads(records[9].metadata)
    assert "copy" not in first
    assert repeated["copy"] == 2
    assert first["path"] == repeated["path"] == "b.py"
    assert {"path", "mode", "mtime", "size"} <= set(first)
    assert len({record.metadata for record in records}) == 12


def test_with_files_enough_nothing_repeats(root: Path) -> None:
    records = plan(scan(root).files, 1)
    assert len(records) == 4
    assert not any(record.copy for record in records)
    assert plan([], 5) == []


def test_a_file_that_changes_is_refused(root: Path) -> None:
    file = scan(root).files[0]
    assert content(file) == b"a"
    path = root / "a.py"
    path.write_bytes(b"A")
    os.utime(path, ns=(file.mtime_ns + 1, file.mtime_ns + 1))
    with pytest.raises(SourceChanged, match=r"a\.py changed"):
        content(file)
    path.unlink()
    with pytest.raises(SourceChanged):
        content(file)


def test_the_default_source_is_the_standard_library() -> None:
    assert (default_source() / "json" / "decoder.py").is_file()


def test_the_ledger_names_an_offset_acknowledged_twice(root: Path) -> None:
    records = plan(scan(root).files, 2)
    ledger = Ledger(records, 2)
    ledger.acknowledge(records[0], 5)
    ledger.acknowledge(records[1], 5)
    assert not ledger.problems
    ledger.acknowledge(records[2], 5)
    assert ledger.problems == ["demo-000000 acknowledged offset 5 twice"]


@pytest.mark.parametrize("log", range(3))
def test_an_extra_record_keeps_the_rule_of_numbers(root: Path, log: int) -> None:
    files = scan(root).files
    ledger = Ledger(plan(files, 3), 3)
    extra = ledger.extra(log, files[0])
    assert extra.number % 3 == extra.log == log
    assert ledger.records[extra.number] is extra
    assert [record.number for record in ledger.records] == list(range(len(ledger.records)))
    assert sum(record.copy >= 0 for record in ledger.records) == 13


async def test_the_byte_budget_lets_an_oversized_record_through_alone() -> None:
    budget = ByteBudget(10)
    order: list[int] = []

    async def take(size: int) -> None:
        await budget.take(size)
        order.append(size)

    async with trio.open_nursery() as nursery:
        await take(6)
        nursery.start_soon(take, 50)
        await trio.testing.wait_all_tasks_blocked()
        assert order == [6]
        budget.give(6)
        await trio.testing.wait_all_tasks_blocked()
        assert order == [6, 50]
        nursery.start_soon(take, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert order == [6, 50]
        budget.give(50)

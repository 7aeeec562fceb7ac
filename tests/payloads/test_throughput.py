"""Prints what this machine reaches; asserts only that the bytes are right."""

from __future__ import annotations

import os
import time
from pathlib import Path

from logyard.payloads.layout import SourceRow, SourceUnit
from logyard.payloads.store import PayloadStore, StoreConfig

from .support import MIB, Door


def pour(path: Path, size: int, count: int, small: bool, units: int = 1) -> str:
    store = PayloadStore(path, StoreConfig(generation_bytes=512 * MIB), Door())
    store.open()
    block = os.urandom(size * units)
    given = [SourceUnit(number, size, small) for number in range(units)]
    rows = (
        SourceRow(1, index, 1, b"m" * 100, given, None, lambda at, length: block[at : at + length])
        for index in range(1, count + 1)
    )
    begin = time.perf_counter()
    store.adopt(store.run(store.migrate_job(), rows=rows))
    wrote = time.perf_counter() - begin
    begin = time.perf_counter()
    for index in range(1, count + 1):
        got = store.read_unit(1, index, units - 1)
    read = time.perf_counter() - begin
    assert got == block[-size:]
    begin = time.perf_counter()
    store.mark_dead(1, (0, 0), (count // 2, 0))
    marked = time.perf_counter() - begin
    total = size * count * units
    waste = store.disk_bytes() / total
    store.close()
    return (
        f"{count} x {units} x {size} B: write {total / wrote / 1e6:.0f} MB/s, {count / wrote:.0f} rows/s, "
        f"read {size * count / read / 1e6:.0f} MB/s, {1e6 * read / count:.1f} us, "
        f"mark {1e3 * marked:.2f} ms, disk {waste:.3f}x"
    )


def test_throughput(tmp_path: Path) -> None:
    lines = [
        pour(tmp_path / "a", 65536, 1500, False),
        pour(tmp_path / "b", MIB, 100, False),
        pour(tmp_path / "c", 256, 20_000, True),
        pour(tmp_path / "d", 16384, 500, False, units=8),
    ]
    print("\n" + "\n".join(lines))

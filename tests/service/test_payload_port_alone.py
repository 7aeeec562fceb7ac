"""The node's payload store over a `PayloadStore`, without a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from logyard.engine.config import SystemConfig
from logyard.engine.disk.door import Disk
from logyard.payloads.catalog import Catalog
from logyard.service.payload_port import StoreAdapter


def refuse(*_: object) -> Any:
    raise AssertionError("nobody asks for that")


async def test_who_looks_for_sparse_generations_asks_the_disk_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a second each file of each generation was asked for its size, in the event loop: 63 ms of 1,024."""
    asked: list[int] = []
    monkeypatch.setattr("logyard.payloads.store.allocated", refuse)
    monkeypatch.setattr(Catalog, "numbers", lambda self: range(1, 1001))
    monkeypatch.setattr(Catalog, "sealed", lambda self, number: asked.append(number))
    store = StoreAdapter(tmp_path, SystemConfig(), Disk())
    store._store._totals = dict.fromkeys(range(1, 1001), 100)
    store._store._placement.copies._live = {number: 0 if number < 500 else 90 for number in range(1, 1001)} | {7: 10}
    assert await store.rewrite_sparse(0.5, 0, refuse, refuse) and asked == [7]

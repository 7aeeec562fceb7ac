"""Limits: units in names, reasons, bounds, and errors that name the key."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from logyard.engine.config import MIB, SystemConfig
from logyard.engine.log.wal import WalConfig
from logyard.protocol.errors import BadRequest

from ..source_tree import product_sources

UNITS = {"bytes", "files", "records", "messages", "entries", "ticks", "connections", "groups", "sessions", "segments"}
UNITS |= {"slots", "us", "ms", "s", "ratio", "percent"}


@pytest.mark.parametrize("entry", fields(SystemConfig), ids=lambda entry: entry.name)
def test_every_limit_has_a_unit_bounds_and_a_reason(entry: Any) -> None:
    assert UNITS & set(entry.name.split("_"))
    low, high, reason = (entry.metadata[key] for key in ("low", "high", "reason"))
    assert low < high
    assert len(reason) > 20
    assert reason.endswith(".")
    assert type(entry.default) in (int, float)
    for outside in (low - 1, high + 1):
        with pytest.raises(BadRequest, match=entry.name) as caught:
            SystemConfig(**{entry.name: outside})
        assert caught.value.details["key"] == entry.name


def test_every_limit_limits_something() -> None:
    """A key that nobody reads is a promise that nobody keeps."""
    places = ("engine/config.py", "service/config.py")
    text = "\n".join(source.text for source in product_sources() if source.path not in places)
    unread = [entry.name for entry in fields(SystemConfig) if not re.search(rf"\.{entry.name}\b", text)]
    assert not unread, f"read these where they belong, or remove them: {unread}"


def test_the_defaults_are_valid() -> None:
    assert SystemConfig().wal_file_bytes == 64 * MIB
    assert SystemConfig.from_mapping({}) == SystemConfig()


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"wal_batch_bytes": 8 * MIB, "wal_file_bytes": 4 * MIB}, "wal_batch_bytes"),
        ({"wal_batch_bytes": 3 * MIB, "wal_file_bytes": 2 * MIB}, "wal_batch_bytes"),
        ({"group_inflight_bytes": 512 * MIB}, "group_inflight_bytes"),
        ({"generation_bytes": 16 * MIB, "generation_transaction_bytes": 32 * MIB}, "generation_transaction_bytes"),
        ({"liveness_interval_ms": 300}, "liveness_timeout_ms"),
        ({"reconnect_ms_min": 5000}, "reconnect_ms_min"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(values: dict[str, int], key: str) -> None:
    with pytest.raises(BadRequest, match=f"^{key} = ") as caught:
        SystemConfig(**values)
    assert caught.value.details["key"] == key


@pytest.mark.parametrize(
    ("values", "batch"),
    [
        ({}, 4 * MIB),
        ({"wal_file_bytes": 8 * MIB}, 2 * MIB),
        ({"wal_file_bytes": MIB}, MIB),
        ({"wal_batch_bytes": 64 * MIB}, 16 * MIB),
        ({"wal_batch_bytes": MIB // 2, "wal_file_bytes": MIB}, MIB // 2),
    ],
)
def test_a_sync_carries_no_more_than_its_files_have_room_for(values: dict[str, int], batch: int) -> None:
    assert WalConfig.of(SystemConfig(**values)).batch_bytes == batch


@pytest.mark.parametrize(
    ("text", "bytes_"), [("67108864", 64 * MIB), ("64 MiB", 64 * MIB), ("64MiB", 64 * MIB), ("65_536 KiB", 64 * MIB)]
)
def test_sizes_may_be_text(text: str, bytes_: int) -> None:
    assert SystemConfig.from_mapping({"wal_file_bytes": text}).wal_file_bytes == bytes_


def test_ratios_and_times_may_be_text() -> None:
    config = SystemConfig.from_mapping({"rewrite_live_ratio": "0.25", "tick_ms": "20", "migrate_dead_ratio": 1})
    assert (config.rewrite_live_ratio, config.tick_ms) == (0.25, 20)
    assert type(config.migrate_dead_ratio) is float


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("wal_file_bytes", "64 MB"), ("wal_file_bytes", "-1"), ("wal_file_bytes", "1.5 MiB"), ("wal_file_bytes", ""),
        ("tick_ms", "fast"), ("tick_ms", 20.5), ("tick_ms", True), ("tick_ms", None), ("tick_ms", [50]),
        ("rewrite_live_ratio", "nan"), ("rewrite_live_ratio", "half"),
    ],
)  # fmt: skip
def test_values_of_the_wrong_kind_are_refused(key: str, value: object) -> None:
    with pytest.raises(BadRequest, match=f"^{key} = ") as caught:
        SystemConfig.from_mapping({key: value})
    assert caught.value.details["key"] == key


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadRequest, match=r"unknown key wal_file_byte; did you mean wal_file_bytes\?"):
        SystemConfig.from_mapping({"wal_file_byte": 1})
    with pytest.raises(BadRequest, match=r"unknown key zzzz$"):
        SystemConfig.from_mapping({"zzzz": 1})

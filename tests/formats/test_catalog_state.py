"""The catalogue's bytes are what they were, and are read."""

from __future__ import annotations

import msgpack

from logyard.machines.catalog import Catalog

from .catalog_state import GOLDEN, WHOLE_ROWS, packed, state


def test_the_golden_bytes() -> None:
    assert packed(state()) == GOLDEN.read_bytes()


def test_they_are_read() -> None:
    _, shards = msgpack.unpackb(GOLDEN.read_bytes())
    whole = dict(state().snapshot())
    found = Catalog()
    found.restore({**whole, **dict(shards)})
    assert found.snapshot() == whole
    states = {row["name"]: row["state"] for row in found.sections["logs"].ask("list", {})}
    assert states == {"a": "live", "b": "undoing", "c": "deleting", "old": "live"}


def test_rows_that_were_stored_whole_are_read() -> None:
    _, shards = msgpack.unpackb(WHOLE_ROWS.read_bytes())
    found, there = Catalog(), state()
    found.restore({**dict(there.snapshot()), **dict(shards)})
    for asked in ({}, {"state": "undoing"}, {"state": "deleting"}):
        rows = found.sections["logs"].ask("list", asked)
        assert rows and rows == there.sections["logs"].ask("list", asked)
    assert len(dict(shards)["logs.rows-0"]) > len(there.snapshot()["logs.rows-0"])

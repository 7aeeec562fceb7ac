"""What a migration reads: spans of what lives say the same as a group's liveness; damage is a typed error."""

from __future__ import annotations

import os
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.engine.disk.door import Disk
from logyard.engine.entry import Unit
from logyard.engine.log.payload_source import FileReader, FileSource, LiveGroup, _live_units
from logyard.payloads.liveness import Liveness
from logyard.protocol.errors import Corrupt

positions = st.tuples(st.integers(1, 5), st.integers(0, 6))
releases = st.lists(st.tuples(positions, positions).map(lambda pair: (min(pair), max(pair))), max_size=10)


@given(releases, st.integers(1, 5), st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_spans_say_what_the_liveness_says(
    calls: list[tuple[tuple[int, int], tuple[int, int]]], index: int, sizes: list[int]
) -> None:
    liveness = Liveness()
    for first, end in calls:
        liveness.release(first, end)
    units, at = [], 0
    for number, records in enumerate(sizes):
        units.append(Unit(number, b"", 1, at, records, 0))
        at += max(records, 1)
    spans = liveness.live_within((1, 0), (6, 0))
    live = [(low.index, low.ordinal, high.index, high.ordinal) for low, high in spans]
    found = _live_units(index, units, live, [span[2:] for span in live])
    assert found == liveness.live_units(index, [(unit.number, unit.first_ordinal, unit.records) for unit in units])


def test_a_source_travels() -> None:
    source = FileSource("s", "w", 7, (LiveGroup(1, 2, 9, ((2, 0, 4, 1), (5, 0, 10, 0))), LiveGroup(2**63, 1, 1, ())))
    assert FileSource.unpack(msgpack.unpackb(msgpack.packb(source.pack()))) == source
    assert source.ranges == [(1, 2, 9), (2**63, 1, 1)]


def test_missing_files_are_damage_and_leave_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Corrupt):
        FileReader(Disk(), FileSource(str(tmp_path / "none.seg"), str(tmp_path), 1, ()))
    assert len(os.listdir("/proc/self/fd")) == before

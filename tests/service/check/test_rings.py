"""What the offline check says of a stopped node's rings: what is damaged, what a copy heals, what is nobody's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logyard.engine.disk.door import Disk
from logyard.engine.log import ring
from logyard.engine.log.meta_rows import RingRun, StateRow
from logyard.engine.log.record import BLOCK
from logyard.engine.log.recovered import Recovered
from logyard.engine.log.ring import Geometry, RingReader, make_ring
from logyard.engine.recovery.inspect import Facts, Wal
from logyard.engine.types import Spec
from logyard.pipeline.directory.files import rings_of
from logyard.pipeline.directory.reading import StoppedNode
from logyard.protocol.errors import WrongIdentity
from logyard.service.check.process import inspect
from logyard.service.check.run import check_directory
from tests.engine.host.rings import note, noted, notes, ring_of, ring_path, said
from tests.notes import NAME, machines

Found = list[tuple[str, str, str]]


def inspected(path: Path) -> dict[str, Any]:
    return inspect(path / "node-1", frozenset(), lambda line: None, machines)


def findings(path: Path) -> Found:
    return [(one["severity"], one["kind"], one["path"]) for one in inspected(path)["findings"]]


def spoil(path: Path, offset: int, data: bytes = b"\xff" * 16) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


class Stopped:
    """A directory with ten notes in a ring, and one in a segment."""

    def __init__(self, path: Path, file: Path, shape: Geometry, last: int) -> None:
        self.path = path
        self.file = file
        self.shape = shape
        self.last = last
        self.relative = str(file.relative_to(path / "node-1"))


@pytest.fixture
async def stopped(tmp_path: Path) -> Stopped:
    async with noted(tmp_path, 1) as c:
        await note(c, 1, *said(1, 4), b"L" * 5000, *said(6, 10))
        await c.roll(1)
        await note(c, 1, *said(11, 12))
        reader, last = ring_of(c, 1), c.member(1, NAME).flushed
        await c.crash(1)
    return Stopped(tmp_path, Path(reader.path), reader.geometry, last)


async def test_a_sound_ring_is_verified_and_its_log_applied(stopped: Stopped) -> None:
    report = inspected(stopped.path)
    assert report["findings"] == [] and report["counts"]["rings"] == 1
    assert report["counts"]["ring_entries"] == stopped.last - 1, "one lies in the segment"
    (row,) = report["groups"]
    assert row["last"] > stopped.last
    with StoppedNode(stopped.path / "node-1") as node:
        log = node.unread(next(iter(node.facts.groups)))
        assert log is not None and [one.index for one in log.entries(1, row["last"])] == list(range(1, row["last"] + 1))


async def test_a_bad_slot_is_damage_of_its_entry(stopped: Stopped) -> None:
    spoil(stopped.file, stopped.shape.slot_at(3))
    report = inspected(stopped.path)
    damage = [one for one in report["findings"] if one["severity"] == "damage"]
    assert [(one["kind"], one["path"], one["group"]) for one in damage] == [("ring", stopped.relative, NAME)]
    assert "entry 3" in damage[0]["message"]


async def test_a_copy_heals_a_header_and_a_head(stopped: Stopped) -> None:
    spoil(stopped.file, 0)
    spoil(stopped.file, stopped.shape.header_at(3))
    spoil(stopped.file, stopped.shape.copy_at(4))
    assert findings(stopped.path) == [("healed", "ring", stopped.relative)] * 3


async def test_what_no_run_names_is_nobodys(stopped: Stopped) -> None:
    spoil(stopped.file, stopped.shape.slot_at(stopped.last + 1))
    spoil(stopped.file, stopped.shape.header_at(stopped.last + 1))
    assert findings(stopped.path) == []


@pytest.mark.parametrize("how", ["gone", "no head", "cut"])
async def test_a_ring_that_can_not_be_read_is_damage(stopped: Stopped, how: str) -> None:
    if how == "gone":
        stopped.file.unlink()
    elif how == "no head":
        spoil(stopped.file, 0, bytes(2 * BLOCK))
    else:
        spoil(stopped.file, 0, b"")
        with stopped.file.open("r+b") as file:
            file.truncate(stopped.shape.slot_at(2))
    found = [one for one in findings(stopped.path) if one[0] == "damage"]
    assert found and {path for _, _, path in found} == {stopped.relative}


async def test_rings_of_nobody_are_orphans_and_only_they_are_removed(stopped: Stopped) -> None:
    folder = stopped.file.parent
    make_ring(Disk(), str(folder / "00000000000000b2.ring"), 0xB2, stopped.shape)
    shutil.copy(stopped.file, folder / "00000000000000b3.ring.tmp")
    (folder / "notes.txt").write_text("x")
    assert sorted(findings(stopped.path)) == [
        ("warning", "orphan", "rings/00000000000000b2.ring"),
        ("warning", "orphan", "rings/00000000000000b3.ring.tmp"),
        ("warning", "unknown_file", "rings/notes.txt"),
    ]
    report = check_directory(stopped.path / "node-1", repair=True)
    assert sorted(report["removed"]) == ["rings/00000000000000b2.ring", "rings/00000000000000b3.ring.tmp"]
    assert sorted(path.name for path in folder.iterdir()) == [stopped.file.name, "notes.txt"]


async def test_a_newer_ring_is_refused(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(ring, "FORMAT", ring.FORMAT + 1)
        head = ring.head_bytes(int(stopped.file.stem, 16), stopped.shape)
    spoil(stopped.file, 0, head * 2)
    with pytest.raises(WrongIdentity, match="newer"):
        inspected(stopped.path)
    with pytest.raises(WrongIdentity, match="newer"):
        check_directory(stopped.path / "node-1", repair=True)


@pytest.mark.parametrize("row", ["term", "empty", "overlap"])
async def test_runs_that_do_not_fit_the_log_are_said(
    stopped: Stopped, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[[StateRow], list[RingRun]] = StateRow.ring.fget  # type: ignore[attr-defined]

    def other(self: StateRow) -> list[RingRun]:
        *_, last = found = real(self)
        if row == "term":
            return [*found[:-1], last._replace(term=last.term + 1)]
        return [*found[:-1], last._replace(first=last.last + 1)] if row == "empty" else [*found, last]

    monkeypatch.setattr(StateRow, "ring", property(other))
    texts = [one["message"] for one in inspected(stopped.path)["findings"] if one["severity"] == "damage"]
    assert any("in the ring do not fit the log" in text for text in texts)


async def test_a_ring_that_never_had_a_run_is_no_damage(tmp_path: Path) -> None:
    """As a start leaves it that could not name what it made: the next one makes it anew."""
    async with noted(tmp_path, 1) as c:
        await note(c, 1, *said(1, 4))
        path = ring_path(c, 1, c.member(1, NAME).uid)
        await c.crash(1)
        path.parent.mkdir(exist_ok=True)
        relative = str(path.relative_to(tmp_path / "node-1"))
        make_ring(Disk(), str(path), int(path.stem, 16), Geometry(16, BLOCK))
        report = inspected(tmp_path)
        assert report["counts"]["rings"] == 1 and not report["findings"]
        spoil(path, 0, bytes(2 * BLOCK))
        assert findings(tmp_path) == [("warning", "ring", relative)]
        await c.start(1)
        await c.applied(NAME)
        await note(c, 1, *said(5, 6))
        await c.roll(1)
        assert c.member(1, NAME).ring_runs and notes(c, 1) == said(1, 6)
        await c.crash(1)
        assert relative not in {path for _, _, path in findings(tmp_path)}


def test_only_what_the_log_needs_of_a_ring_is_judged(tmp_path: Path) -> None:
    uid, facts, wal = 7, Facts(), Wal()
    facts.groups[uid] = Spec(uid, "_s", "log", {}, (1,), 0)
    row = facts.states[uid] = StateRow(uid, 1, extra={"log": [3, 1], "flushed": 9, "ring": [[1, 2, 1], [3, 9, 1]]})
    row.term_runs = [(4, 1)]
    assert rings_of(facts, wal) == {uid: [RingRun(4, 9, 1)]}, "not what lies below the log"
    said_by_wal = wal.groups[uid] = Recovered()
    said_by_wal.cut(7)
    assert rings_of(facts, wal) == {uid: [RingRun(4, 6, 1)]}, "nor what the WAL voids"
    said_by_wal.cut(4)
    assert rings_of(facts, wal) == {}


def test_a_reader_names_the_place_of_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.ring"
    make_ring(Disk(), str(path), 7, Geometry(16, BLOCK))
    reader = RingReader(Disk(), str(path), 7)
    seen = reader.verify(1, 2, 1)
    assert sorted(seen.bad) == [1, 2] and all(str(path) in str(error) for error in seen.bad.values())
    reader.close()

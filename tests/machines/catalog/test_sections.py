"""How sections are hosted: apart in snapshots, refused together, answered once; and the table that rows live in."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from logyard.engine.machine import Context, Reject
from logyard.machines.catalog import At, Catalog, Section
from logyard.machines.catalog.command import command, question, result_of
from logyard.machines.catalog.cursors import Cursors
from logyard.machines.catalog.section import ROWS_PER_SHARD, Table
from logyard.protocol.errors import BadRequest, LogyardError, Refused

from .told import Told


class Tallies:
    """A section that needs another one: each ``count`` moves a cursor on, or nothing at all."""

    name: ClassVar[str] = "tallies"
    version: ClassVar[int] = 2
    commands: ClassVar[Collection[str]] = ("count",)
    questions: ClassVar[Collection[str]] = ("all",)

    def __init__(self, cursors: Cursors) -> None:
        self.cursors = cursors
        self.rows: Table[tuple[Any, ...]] = Table("rows", lambda *values: values)
        self.upgraded = 0

    def apply(self, at: At, command: str, values: Mapping[str, Any]) -> Any:
        if values["by"] < 0:
            raise Reject("refused", "only upwards")
        before = self.cursors.apply(at, "advance", {"name": "all", "by": values["by"]})
        return [self.rows.add((before, at.version)), before]

    def ask(self, question: str, values: Mapping[str, Any]) -> Any:
        return list(self.rows)

    def snapshot(self) -> Mapping[str, bytes]:
        return {**self.rows.shards(), "up": bytes([self.upgraded])}

    def restore(self, shards: Mapping[str, bytes], version: int) -> None:
        self.rows.restore(shards)
        self.upgraded = shards["up"][0]

    def upgrade(self, from_version: int, to_version: int) -> None:
        self.upgraded = to_version


def make() -> Sequence[Section]:
    cursors = Cursors()
    return cursors, Tallies(cursors)


VERSIONS = ({"cursors": 1}, {"cursors": 1, "tallies": 1}, {"cursors": 1, "tallies": 2})


def catalog(in_force: int = 2) -> Catalog:
    found = Catalog(make, VERSIONS)
    found.upgrade(1, in_force)
    return found


def restored(machine: Catalog) -> Catalog:
    found = Catalog(make, VERSIONS)
    found.restore(machine.snapshot())
    return found


def test_a_section_may_use_another_and_both_are_refused_together() -> None:
    machine = catalog()
    told = Told(machine)
    assert told("tallies", "count", by=3) == [1, 0]
    before = machine.snapshot()
    with pytest.raises(Refused, match="only upwards"):
        told("tallies", "count", by=-1)
    assert machine.snapshot() == before
    assert result_of(machine.query(question("cursors", "read", {"name": "all"}))) == 3


def test_a_section_comes_with_the_version_that_has_it_and_goes_on_as_a_newer_one() -> None:
    machine = catalog(1)
    told = Told(machine)
    with pytest.raises(LogyardError, match="no section 'tallies' in version 1"):
        told("tallies", "count", by=1)
    machine.upgrade(1, 2)
    with pytest.raises(LogyardError, match="of version 1, the command is for 2"):
        told("tallies", "count", None, 2, by=1)
    told("tallies", "count", by=1)
    machine.upgrade(2, 3)
    told("tallies", "count", None, 2, by=1)
    again = restored(machine)
    assert again.snapshot() == machine.snapshot() and again.in_force == 3
    assert again.sections["tallies"].ask("all", {}) == [(1, (0, 1)), (2, (1, 2))]


def test_a_section_that_nothing_happened_to_gives_the_same_bytes() -> None:
    machine = catalog()
    told = Told(machine)
    for _ in range(3 * ROWS_PER_SHARD):
        told("tallies", "count", by=1)
    before = machine.snapshot()
    told("tallies", "count", by=1)
    after = machine.snapshot()
    changed = {name for name in after if after[name] is not before.get(name)}
    assert {"tallies.rows-0", "tallies.rows-1", "tallies.rows-2"}.isdisjoint(changed)
    assert changed >= {"tallies.rows-3", "cursors.all"}


def test_who_asks_again_gets_the_same_answer_and_nothing_changes() -> None:
    machine = catalog()
    told = Told(machine)
    one, two = bytes(16), bytes([1] * 16)
    assert told("tallies", "count", one, by=5) == [1, 0]
    with pytest.raises(Refused):
        told("tallies", "count", two, by=-1)
    machine = told.machine = restored(machine)
    before = machine.snapshot()
    assert told("tallies", "count", one, by=5) == [1, 0]
    with pytest.raises(Refused, match="only upwards"):
        told("tallies", "count", two, by=7)
    assert machine.snapshot() == before


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x91\x01", command("tallies", "count", {})[:-1], command("tallies", "count", {}, b"short")]
)
def test_what_is_no_command(data: bytes) -> None:
    with pytest.raises(Reject, match=r"catalogue's command|16 bytes"):
        catalog().apply(Context(1, 1, 1, 1, 1), data, ())


def test_a_command_that_lacks_something() -> None:
    with pytest.raises(BadRequest, match="tallies count: KeyError"):
        Told(catalog())("tallies", "count")
    with pytest.raises(LogyardError, match="no command 'boom'"):
        Told(catalog())("tallies", "boom")
    with pytest.raises(Reject, match=r"no question tallies\.boom"):
        catalog().query(question("tallies", "boom", {}))


def test_what_can_not_be_packed_changes_nothing() -> None:
    table: Table[tuple[Any, ...]] = Table("rows", lambda *values: values)
    with pytest.raises(OverflowError):
        table.add((1 << 64,))
    assert (len(table), table.next, table.changes) == (0, 1, 0)


def test_shards_of_nobody_are_refused() -> None:
    machine = catalog()
    sections = dict(machine.snapshot())
    for wrong, message in (({"boom.x": b""}, "belongs to no section"), ({"tallies.rows-0": b"\x09\x90"}, "another")):
        with pytest.raises(ValueError, match=message):
            machine.restore({**sections, **wrong})
    assert machine.snapshot() == sections


def test_a_table_gives_each_number_once() -> None:
    table: Table[tuple[Any, ...]] = Table("rows", lambda *values: values)
    assert [table.add((name, (1, 2), {"a": (3,)})) for name in "abc"] == [1, 2, 3]
    table.drop(3)
    table.drop(99)
    assert len(table) == 2 and 3 not in table and table.get(3) is None
    again: Table[tuple[Any, ...]] = Table("rows", lambda *values: values)
    again.restore({**table.shards(), "other": b"x", "other-0": b"x"})
    assert again.add(("d",)) == 4
    assert list(again) == [(1, ("a", (1, 2), {"a": (3,)})), (2, ("b", (1, 2), {"a": (3,)})), (4, ("d",))]


@pytest.mark.parametrize("seed", range(5))
def test_a_table_is_what_a_dictionary_would_be(seed: int) -> None:
    """Numbers of each size that they are packed in, rows of any length, shards that become empty and come back."""
    draw = random.Random(seed)
    table: Table[tuple[Any, ...]] = Table("rows", lambda *values: values)
    model: dict[int, tuple[Any, ...]] = {}
    numbers = [*range(1, 12), *range(120, 135), *range(250, 262), 511, 512, 65_535, 65_536, 65_537, 1 << 31]
    for turn in range(2000):
        number = draw.choice(numbers)
        if draw.random() < 0.4:
            table.drop(number)
            model.pop(number, None)
        else:
            row = tuple(
                draw.choice([0, "x" * draw.randrange(300), b"\x01", (1, ("a",))]) for _ in range(draw.randrange(4))
            )
            table.put(number, row)
            model[number] = row
        assert table.get(number) == model.get(number) and len(table) == len(model)
        if turn % 100 == 0:
            assert list(table) == sorted(model.items())
            assert [n for n in numbers if n in table] == [n for n in numbers if n in model]
            shards = table.shards()
            assert {*shards} == {"rows", *(f"rows-{n // ROWS_PER_SHARD}" for n in model)}
            again: Table[tuple[Any, ...]] = Table("rows", lambda *values: values)
            again.restore(shards)
            assert again.shards() == shards and again.next == table.next and len(again) == len(model)
            table = draw.choice([table, again])


def test_a_table_takes_shards_of_another_size() -> None:
    """Those of 512 rows, which there were before."""
    table: Table[tuple[Any, ...]] = Table("rows", lambda *values: values)
    for number in range(1, 3 * ROWS_PER_SHARD):
        table.add((number,))
    shards = table.shards()
    large = {"rows": shards["rows"], "rows-0": shards["rows-0"] + shards["rows-1"], "rows-1": shards["rows-2"]}
    again: Table[tuple[Any, ...]] = Table("rows", lambda *values: values)
    again.restore(large)
    assert again.shards() == shards and len(again) == len(table) and list(again) == list(table)
    with pytest.raises(ValueError, match="another"):
        Table[tuple[Any, ...]]("rows", lambda *values: values).restore({**large, "rows-2": shards["rows-2"]})


def test_a_row_ends_where_its_defaults_begin() -> None:
    """A log's row is some 58 bytes instead of 69, and what was stored whole is read as before."""

    def row(name: str, count: int = 0, kind: str = "plain") -> tuple[Any, ...]:
        return name, count, kind

    table: Table[tuple[Any, ...]] = Table("rows", row, defaults=(0, "plain"))
    for values in (row("a"), row("b", 7), row("c", 0, "odd")):
        table.add(values)
    assert [row for _, row in table] == [("a", 0, "plain"), ("b", 7, "plain"), ("c", 0, "odd")]
    whole: Table[tuple[Any, ...]] = Table("rows", row)
    for _, values in table:
        whole.add(values)
    shards = table.shards()
    assert len(shards["rows-0"]) == len(whole.shards()["rows-0"]) - len("\0" + "xplain" + "xplain")
    for stored in (shards, whole.shards()):
        again: Table[tuple[Any, ...]] = Table("rows", row, defaults=(0, "plain"))
        again.restore(stored)
        assert list(again) == list(table)


def test_answers_of_one_section_are_taken() -> None:
    machine = catalog()
    told = Told(machine)
    told("tallies", "count", bytes(16), by=5)
    sections = dict(machine.snapshot())
    sections["answers"] = sections.pop("answers-0")
    machine.restore(sections)
    assert told("tallies", "count", bytes(16), by=5) == [1, 0]


@pytest.mark.parametrize(
    "reply", [b"", b"\xc0", b"\x92\x90\x01", b"\x91\xc0", b"\xff" * 4, b"\x92\xa4busy\xc0"], ids=repr
)
def test_what_is_no_answer_of_the_catalogue_is_said_so(reply: bytes) -> None:
    """Any node may send one; a task that took it for a command's ended the node."""
    with pytest.raises(LogyardError):
        result_of(reply)

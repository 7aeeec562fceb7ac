"""Which sleeping groups the catalogue has woken: not known, never seen, no member any more, or to be moved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from logyard.engine.quiesce.quiesced_table import QuiescedTable, Row, Shape
from logyard.engine.types import Spec
from logyard.machines.catalog.logs import Logs
from logyard.machines.catalog.section import At
from logyard.service.catalog import sleepers
from logyard.service.catalog.sleepers import ROWS_MAX, WOKEN_AT_ONCE, WOKEN_MAX, Groups, Sleepers
from logyard.service.catalog.steps import ITEMS

from .steps import counted

SHAPE = Shape((1, 2, 3), (), (), (), "log")


def row(leader: int, last: int = 5, under: int = 0) -> Row:
    return Row(1, last, 0, 0, 0, leader, 0, SHAPE, "", under=under)


class Night:
    """Node 1's groups, all of which sleep."""

    def __init__(self) -> None:
        self.table = QuiescedTable(1)
        self.woken: list[int] = []
        self.logs = Logs()
        self.sleepers = Sleepers(1, Groups(self.table, self.woken.append, self.spec))

    def spec(self, uid: int) -> Spec | None:
        return Spec(uid, f"log-{uid}", "log", {}, (1, 2, 3), 7)

    def known(self, uid: int, *voters: int, index: int = 1) -> None:
        found = {"name": f"log-{uid}", "uid": uid, "machine": "log", "created": 7, "voters": voters, "index": index}
        self.logs.apply(At(1, 1, 1), "import", {"logs": [found]})

    def look(self) -> list[int]:
        return [spec.uid for spec in counted(self.sleepers.look(self.logs))[0]]


def test_what_nobody_knows_is_woken_where_it_is_led_or_nobody_leads_it() -> None:
    night = Night()
    for uid, one in enumerate((row(1), row(2), row(0, under=2), row(0), row(0, last=0)), 1):
        night.table.add(uid, one)
    assert night.look() == [5], "nobody ever used it: its definition is all there is to say"
    assert night.woken == [1, 3, 4]
    assert night.look() == [] and night.woken == [1, 3, 4], "and not at once again"


def test_what_was_never_seen_and_what_has_no_member_here_is_woken() -> None:
    night = Night()
    for uid in (1, 2, 3, 4):
        night.table.add(uid, row(2 if uid == 3 else 1, last=0 if uid == 4 else 5))
    night.known(1, 1, 2, 3)
    night.known(2, 1, 2, 3, index=0)
    night.known(3, 2, 3)
    night.known(4, 1, 2, 3, index=0)
    assert night.look() == [] and night.woken == [2, 3], "one that was never used has nothing to say"


def test_a_look_is_bounded_and_goes_on_where_it_was() -> None:
    night = Night()
    night.table.extend((uid, row(1)) for uid in range(1, 2 * WOKEN_MAX + 11))
    for count in (WOKEN_MAX, 2 * WOKEN_MAX, 2 * WOKEN_MAX + 10, 2 * WOKEN_MAX + 10):
        night.look()
        assert len(night.woken) == count == len(set(night.woken))
    night = Night()
    night.table.extend((uid, row(0, last=0)) for uid in range(1, ROWS_MAX + 5))
    assert [len(night.look()) for _ in range(3)] == [ROWS_MAX, 4, 0]


def test_a_look_is_made_in_steps() -> None:
    night = Night()
    night.table.extend((uid, row(1)) for uid in range(1, WOKEN_MAX))
    night.table.extend((uid, row(0, last=0)) for uid in range(WOKEN_MAX, 10 * ITEMS))
    _, steps = counted(night.sleepers.look(night.logs))
    assert steps >= (WOKEN_MAX - 1) // WOKEN_AT_ONCE + 8, "one for a few that are woken, and for some rows"


def test_with_another_leader_of_the_catalogue_all_are_looked_at_again() -> None:
    night = Night()
    night.table.add(1, row(1))
    night.look()
    night.sleepers.begin()
    night.look()
    assert night.woken == [1, 1]


def test_later_those_that_it_leads_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    night = Night()
    asked: list[str] = []

    class Rows:
        def rows(self, where: str = "1", *values: int) -> Iterator[tuple[int, Row]]:
            asked.append(where)
            return iter(())

        def leader_of(self, uid: int) -> int:
            raise KeyError(uid)

        def led_here(self) -> list[int]:
            return []

    night.sleepers = Sleepers(1, Groups(Rows(), night.woken.append, night.spec))
    monkeypatch.setattr(sleepers, "SCAN_S", 0.0)
    night.look()
    night.look()
    assert asked[0] == "1" and "leader = ?" in asked[1]


def test_what_is_to_be_moved_is_woken_by_who_leads_it() -> None:
    night = Night()
    for uid, leader in ((1, 1), (2, 2), (3, 0)):
        night.table.add(uid, row(leader))
    for uid in (1, 2, 3, 4):
        night.sleepers.rouse(uid)
    assert night.woken == [1, 3] and night.sleepers.led() == [1]

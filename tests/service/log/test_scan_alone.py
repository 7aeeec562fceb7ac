"""Many logs at once, alone: each range has an outcome of its own, and an answer has its limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from logyard.engine.replica.member import Member
from logyard.machines.kv import KV
from logyard.machines.log import AppendLog
from logyard.protocol.columns import RUN
from logyard.protocol.errors import Corrupt, UnknownGroup
from logyard.service.log import scan as log_scan
from logyard.service.log.reader import LogReader
from logyard.service.log.scan import Groups, LogScan

from ..rig import Group

HUGE = 1 << 30
RECORDS = 5
"""Which field of a run."""


class Rig:
    """Logs of a node; `asleep` are rows of those that hibernate."""

    def __init__(self, **machines: Any) -> None:
        self.groups = {name: Group(machine, name) for name, machine in machines.items()}
        self.uids = {name: number for number, name in enumerate(self.groups, 1)}
        members = {self.uids[name]: group.member for name, group in self.groups.items()}
        groups = Groups(self.uids, members, cast(Any, {}), self.find)
        self.reads: list[list[str]] = []
        self.rotten: set[str] = set()
        reader = LogReader(7, cast(Any, self), self.stretch, lambda member, error: None)
        self.scans = LogScan(7, 1 << 20, groups, cast(Any, self), reader.offset_since)

    def find(self, name: str, uid: int) -> Member:
        if name not in self.groups:
            raise UnknownGroup(f"no group {name!r}", name=name)
        return self.groups[name].member

    def _of(self, member: Member) -> Group:
        return self.groups[self.name_of(member)]

    def name_of(self, member: Member) -> str:
        return next(name for name, group in self.groups.items() if group.member is member)

    def payload_entries(self, member: Member, first: int, last: int) -> Any:
        return self._of(member).payload_entries(member, first, last)

    async def stretch(self, member: Member, first: int, last: int) -> int:
        return await self._of(member).stretch(member, first, last)

    async def read_all(self, parts: Any) -> list[Any]:
        self.reads.append([self.name_of(member) for member, _ in parts])
        return [
            Corrupt(self.name_of(member), 0, "its bytes", "others") if self.name_of(member) in self.rotten
            else await self._of(member).read(member, wanted)
            for member, wanted in parts
        ]  # fmt: skip

    async def scan(self, *ranges: tuple[str, int, int], size: int = HUGE, records: int = HUGE) -> dict[str, Any]:
        header, parts = await self.scans.scan([(name, 0, at, end) for name, at, end in ranges], size, records, HUGE)
        assert header["node"] == 7
        return {**header, "rows": sum(run[RECORDS] for run in RUN.iter_unpack(parts[0]))}


def ends(header: dict[str, Any]) -> Sequence[Any]:
    """(where to go on, the code of an error) of each range."""
    return [(one[0], one[4]["code"] if one[4] else None) for one in header["ranges"]]


async def test_each_range_ends_where_it_was_asked_to_or_where_its_log_does() -> None:
    rig = Rig(a=AppendLog(), b=AppendLog())
    rig.groups["a"].append(b"0", b"1", b"2")
    rig.groups["b"].append(b"x" * 9000)
    found = await rig.scan(("a", 1, 2), ("b", 0, HUGE))
    assert ends(found) == [(2, None), (1, None)] and found["rows"] == 2


async def test_what_goes_wrong_with_one_range_is_its_own_outcome() -> None:
    rig = Rig(a=AppendLog(), keyed=AppendLog(keyed=True), kv=KV(), holey=AppendLog())
    rig.groups["a"].append(b"0")
    for _ in range(3):
        rig.groups["holey"].append(b"0")
    rig.groups["holey"].lost = {2}
    asked = [(name, 0, HUGE) for name in ("none", "keyed", "kv", "holey", "a")]
    found = ends(await rig.scan(*asked, ("a", 5, HUGE)))
    assert [code for _, code in found] == ["unknown_group", "refused", "wrong_kind", "corrupt", None, "out_of_range"]
    assert found[4] == (1, None)
    # What is left of it would make two records, one of them another's.
    assert ends(await rig.scan(("holey", 0, 2))) == [(0, "corrupt")]


@pytest.mark.parametrize("limit", [{"records": 3}, {"size": 2000}])
async def test_an_answer_ends_at_its_limit_and_says_where_to_go_on(limit: dict[str, int]) -> None:
    rig = Rig(a=AppendLog(), b=AppendLog())
    for name in ("a", "b"):
        for _ in range(4):
            rig.groups[name].append(b"x" * 700)
    rest, total = [("a", 0), ("b", 0)], 0
    for _ in range(20):
        header = await rig.scan(*((name, at, HUGE) for name, at in rest), **limit)
        total += header["rows"]
        assert header["rows"] <= 3
        # A range that was not begun has no outcome.
        for number, (following, code) in enumerate(ends(header)):
            assert code is None
            rest[number] = (rest[number][0], following)
        rest = [one for one in rest if one[1] < 4]
        if not rest:
            break
    assert total == 8 and not rest


async def test_steps_of_a_scan_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_scan, "STEP_PACKS", 1)
    rig = Rig(a=AppendLog())
    for number in range(5):
        rig.groups["a"].append(b"%d" % number, b"+")
    found = await rig.scan(("a", 3, 9))
    assert ends(found) == [(9, None)] and found["rows"] == 6


async def test_many_logs_are_read_at_once_and_what_is_rotten_is_its_own_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(a=AppendLog(), b=AppendLog(), c=AppendLog())
    for name in ("a", "b", "c", "b"):
        rig.groups[name].append(b"0", b"1")
    rig.rotten = {"b"}
    found = await rig.scan(("a", 0, 2), ("b", 1, 4), ("c", 0, 2))
    assert rig.reads == [["a", "b", "c"]] and found["rows"] == 4
    assert ends(found) == [(2, None), (1, "corrupt"), (2, None)]
    # Where the first of a range's steps fails, nothing behind it counts, also not what is read with it.
    monkeypatch.setattr(log_scan, "STEP_PACKS", 2)
    assert ends(await rig.scan(("a", 0, 2), ("b", 0, 4), ("c", 0, 2))) == [(2, None), (0, "corrupt"), (2, None)]


async def test_offsets_by_time_and_what_has_none() -> None:
    rig = Rig(a=AppendLog(), kv=KV())
    for number in range(3):
        rig.groups["a"].append(b"x", stamp=100 * number)
    found = await rig.scans.seek([("a", 0, 150), ("kv", 0, 0), ("a", 0, 999)])
    assert found[0] == 2 and found[2] == 3 and isinstance(found[1], dict) and found[1]["code"] == "wrong_kind"
    rig.groups["a"].lost = {2}
    assert await rig.scans.seek([("a", 0, 50)]) == [1] and rig.groups["a"].fetched == [(0, 3)]
    rig.groups["a"].lost = rig.groups["a"].absent = {2}
    (found_none,) = await rig.scans.seek([("a", 0, 50)])
    assert isinstance(found_none, dict) and found_none["code"] == "corrupt"


async def test_logs_are_listed_by_name_and_nothing_else_is() -> None:
    rig = Rig(c=AppendLog(), b=KV(), a=AppendLog())
    rig.groups["a"].append(b"0")
    assert [(row[0], row[4]) for row in await rig.scans.log_rows("", None, 9)] == [("a", 1), ("c", 0)]
    assert [row[0] for row in await rig.scans.log_rows("a", None, 9)] == ["c"]
    assert [row[0] for row in await rig.scans.log_rows("", ["c", "none"], 9)] == ["c"]
    assert [row[0] for row in await rig.scans.log_rows("", None, 1)] == ["a"]

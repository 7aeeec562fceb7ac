"""Groups found by uid and by name, awake or asleep, alone: who is woken, and who is not."""

from __future__ import annotations

from typing import Any

import pytest

from logyard.engine.quiesce.lookup import Lookup
from logyard.engine.quiesce.names import Names
from logyard.protocol.errors import UnknownGroup

from .doubles import OWN, UID, Yard, member_of, row

AWAKE = 5


class Bench(Yard):
    """A group that sleeps, "a", and one that is awake, "b"."""

    def __init__(self) -> None:
        super().__init__()
        self.active: set[Any] = set()
        self.all_names = Names(self.table)
        self.table.add(UID, row())
        self.members[AWAKE] = member_of(self.live, AWAKE, "b")
        self.all_names["b"] = AWAKE
        self.asked: list[Any] = []
        self.lookup = Lookup(
            OWN, self.members, self.active, self.all_names, self.table, self.unquiesce, lambda uid: f"spec of {uid}",  # type: ignore[arg-type,return-value]
            self.asked.append,
        )  # fmt: skip


def test_what_is_only_asked_about_wakes_nobody() -> None:
    bench = Bench()
    lookup = bench.lookup
    assert lookup.has(UID) and lookup.has(AWAKE) and not lookup.has(77) and lookup.count() == 2
    assert lookup.spec(AWAKE) is bench.members[AWAKE].spec and lookup.spec(77) is None
    assert str(lookup.spec(UID)) == f"spec of {UID}" and UID in bench.table


def test_who_is_found_is_awake() -> None:
    bench = Bench()
    member = bench.lookup.find(UID)
    assert member is not None and bench.members[UID] is member and UID not in bench.table
    assert bench.lookup.find(UID) is member and bench.lookup.find(77) is None and bench.lookup.count() == 2


def test_who_is_asked_for_by_name_does_not_rest_just_now() -> None:
    bench = Bench()
    member = bench.lookup.member("a")
    assert member.uid == UID and bench.active == {member} and UID not in bench.table
    assert bench.lookup.member("b") is bench.members[AWAKE] in bench.active
    with pytest.raises(UnknownGroup, match="no group 'c' on node 2"):
        bench.lookup.member("c")


def test_who_is_asked_for_by_name_and_has_no_leader_is_said() -> None:
    bench = Bench()
    awake = bench.members[AWAKE]
    awake.raft.leader = OWN
    assert bench.lookup.member("b") is awake and not bench.asked
    awake.raft.leader = 0
    bench.lookup.member("b")
    bench.lookup.find(AWAKE)
    assert bench.asked == [awake]


def test_a_name_that_is_taken_has_no_member_before_its_group_is_durable() -> None:
    bench = Bench()
    bench.all_names["soon"] = 78
    with pytest.raises(UnknownGroup):
        bench.lookup.member("soon")

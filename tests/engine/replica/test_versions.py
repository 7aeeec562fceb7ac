"""Which version of a machine comes into force, and when: what nodes say of themselves, without a node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from logyard.engine.raft.core import FOLLOWER
from logyard.engine.replica.member import HALTED, Halt, Member
from logyard.engine.replica.versions import Versions
from logyard.engine.transport.blobs import MACHINE_VERSIONS
from logyard.protocol.errors import Busy, GroupStopped, NotLeader, Refused

from .doubles import Core, member_of

KIND = "recorder"


class Bench:
    """What node 1 knows, which leads one group of nodes 1, 2 and 3."""

    def __init__(self, percent: int = 0, own: int = 2, on_demand: bool = False) -> None:
        self.live = {1, 2, 3}
        self.machine = SimpleNamespace(version=own, upgrade_on_demand=on_demand)
        self.member, self.core = member_of(self.machine)
        self.member.leading = True
        self.transfers: list[int] = []
        self.core.transfer = self.transfers.append  # type: ignore[attr-defined]
        self.members = {self.member.uid: self.member}
        self.proposed: list[tuple[object, ...]] = []
        self.sent: list[tuple[int, dict[str, int]]] = []
        self.away: set[int] = set()
        self.marked: list[Member] = []
        self.fault: Exception | None = None
        self.versions = Versions(
            1, percent, self.members, self.live, lambda: (2, 3), cast(Any, self), cast(Any, self.send),
            self.marked.append,
        )  # fmt: skip

    def send(self, node: int, kind: int, request: int, header: dict[str, Any]) -> bool:
        assert kind == MACHINE_VERSIONS
        self.sent.append((node, dict(header["machines"])))
        return node not in self.away

    def propose(self, member: Member, name: str, *arguments: object) -> None:
        if self.fault is not None:
            raise self.fault
        self.proposed.append((name, *arguments))

    async def commit(self, member: Member, name: str, *arguments: object) -> None:
        self.propose(member, name, *arguments)

    def says(self, **versions: int) -> None:
        """What nodes n2 and n3 know of the machine."""
        for node, version in versions.items():
            self.versions.on_blob(int(node[1:]), {"machines": {KIND: version}})

    def look(self) -> list[tuple[object, ...]]:
        self.proposed.clear()
        self.versions.look()
        return self.proposed


def test_each_node_is_told_what_is_new_here_until_it_was() -> None:
    bench = Bench()
    bench.versions.learn(bench.member)
    bench.away = {3}
    bench.versions.look()
    assert sorted(bench.sent) == [(2, {KIND: 2}), (3, {KIND: 2})]
    bench.sent.clear()
    bench.away.clear()
    bench.versions.learn(bench.member)
    bench.versions.look()
    assert bench.sent == [(3, {KIND: 2})]
    bench.versions.on_link_up(2)
    bench.versions.look()
    bench.versions.look()
    assert bench.sent[1:] == [(2, {KIND: 2})], "who comes back may have forgotten"


def test_a_version_is_in_force_when_a_majority_knows_it() -> None:
    bench = Bench()
    bench.versions.learn(bench.member)
    assert bench.look() == [], "nobody else has said so"
    bench.says(n2=2)
    assert bench.look() == [("upgrade", 2)]
    bench.member.version = 2
    assert bench.look() == []


def test_more_than_a_majority_may_be_asked_for() -> None:
    bench = Bench(percent=100)
    bench.versions.learn(bench.member)
    bench.says(n2=2)
    assert bench.look() == []
    bench.says(n3=3)
    assert bench.look() == [("upgrade", 2)], "the newest that all know"


def test_of_a_joint_configuration_both_sets_have_to_know_it() -> None:
    bench = Bench()
    bench.versions.learn(bench.member)
    bench.core.configuration = cast(Any, SimpleNamespace(voters=(1, 2, 3), outgoing=(1, 4, 5)))
    bench.says(n2=2, n3=2)
    assert bench.versions.supported(bench.member) == 0
    bench.says(n4=1)
    assert bench.versions.supported(bench.member) == 1
    bench.says(n5=2)
    assert bench.versions.supported(bench.member) == 2


@pytest.mark.parametrize("what", ["follows", "does not lead yet", "fails"])
def test_only_who_leads_proposes_and_a_refusal_waits_for_the_next_look(what: str) -> None:
    bench = Bench()
    bench.versions.learn(bench.member)
    bench.says(n2=2)
    if what == "follows":
        bench.core.role = FOLLOWER
    elif what == "does not lead yet":
        bench.member.leading = False
    else:
        bench.fault = GroupStopped("not now")
    assert bench.look() == []
    bench.core.role, bench.member.leading, bench.fault = Core().role, True, None
    assert bench.look() == [("upgrade", 2)]


def test_a_leader_with_an_older_program_hands_over_to_the_newest_that_lives() -> None:
    bench = Bench(own=1)
    bench.versions.learn(bench.member)
    bench.says(n2=2, n3=2)
    bench.live.discard(2)
    bench.versions.look()
    assert bench.transfers == [3] and bench.marked == [bench.member] and not bench.proposed
    bench.core.transferring = True
    bench.versions.look()
    assert bench.transfers == [3], "one at a time"


def test_who_waits_for_a_newer_program_hands_over_and_who_halted_for_a_fault_does_not() -> None:
    bench = Bench(own=1)
    bench.versions.learn(bench.member)
    bench.says(n2=2, n3=1)
    for version in (0, 2):
        bench.member.state, bench.member.halt = HALTED, Halt(5, 0, 0, -1, "why", version)
        bench.versions.look()
        assert bench.transfers == ([2] if version else [])


def test_a_kind_on_demand_is_upgraded_by_nobody_who_does_not_need_it() -> None:
    bench = Bench(own=2, on_demand=True)
    bench.versions.learn(bench.member)
    bench.says(n2=2, n3=2)
    assert bench.look() == [] and not bench.transfers


async def test_who_needs_a_version_gets_it_or_hears_why_not() -> None:
    bench = Bench(own=2, on_demand=True)
    bench.versions.learn(bench.member)
    with pytest.raises(Busy):
        await bench.versions.require(bench.member, 2)
    bench.says(n2=1, n3=1)
    with pytest.raises(Refused):
        await bench.versions.require(bench.member, 2)
    bench.says(n3=2)
    await bench.versions.require(bench.member, 2)
    assert bench.proposed == [("upgrade", 2)]
    bench.member.version = 2
    await bench.versions.require(bench.member, 2)
    assert len(bench.proposed) == 1, "it is there"
    bench.core.role, bench.core.leader = FOLLOWER, 3
    with pytest.raises(NotLeader):
        await bench.versions.require(bench.member, 3)


async def test_of_a_node_that_is_down_nothing_is_waited_for() -> None:
    bench = Bench(own=2)
    bench.versions.learn(bench.member)
    bench.says(n2=1)
    bench.live.discard(3)
    with pytest.raises(Refused):
        await bench.versions.require(bench.member, 2)
    bench.says(n2=3)
    with pytest.raises(Refused):
        await bench.versions.require(bench.member, 3)
    assert bench.versions.knows(1, KIND) == 2 and bench.versions.knows(3, KIND) == 0


def test_a_machine_that_could_not_be_made_says_nothing_of_its_kind() -> None:
    bench = Bench()
    bench.versions.learn(bench.member)
    bench.machine.version = 1
    bench.versions.learn(bench.member)
    assert bench.versions.own == {KIND: 2}

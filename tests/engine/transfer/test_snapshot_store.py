"""Taking snapshots, alone: who may, what is durable first, and whose fault stops whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from logyard.engine.log.checkpoint_rows import Captured
from logyard.engine.machine import PayloadRange, Position
from logyard.engine.raft.membership import Configuration
from logyard.engine.replica.member import RUNNING, STOPPED
from logyard.engine.transfer.snapshot_store import SnapshotStore
from logyard.payloads.liveness import Liveness, decode_live_set


class Machine:
    """Needs `needed`; its state is one section."""

    def __init__(self, *needed: PayloadRange) -> None:
        self.needed = needed
        self.breaks = False

    def snapshot(self) -> dict[str, bytes]:
        if self.breaks:
            raise ZeroDivisionError("its own bug")
        return {"state": b"all of it"}

    def live_refs(self) -> Sequence[PayloadRange]:
        return self.needed


class Large(Machine):
    """Its sections are written by a thread; `payloads` are those it needs."""

    def __init__(self, *payloads: tuple[int, int] | PayloadRange) -> None:
        super().__init__()
        self.found = payloads

    def freeze(self) -> Any:
        def sections() -> dict[str, bytes]:
            return self.snapshot()

        return SimpleNamespace(sections=sections, payloads=lambda: self.found)


class Rig:
    """A keeper that stores at once."""

    def __init__(self) -> None:
        self.stored: list[Captured] = []
        self.let_go: list[int] = []
        self.stopped: list[str] = []
        self.members: list[Any] = []
        self.settled = 0
        self.store = SnapshotStore(
            self, lambda data: decode_live_set(data).liveness, self.settle,
            lambda member, reason: self.stopped.append(reason),
        )  # fmt: skip

    def member(self, machine: Machine, applied: int = 10, stable: int = 10, **more: Any) -> Any:
        log = SimpleNamespace(stable=stable, term=lambda index: 3)
        raft = SimpleNamespace(
            applied=applied, log=log, mend=None, configuration_at=lambda index: Configuration((1, 2, 3))
        )
        found = SimpleNamespace(
            uid=len(self.members) + 1, spec=SimpleNamespace(name="log"), machine=machine, raft=raft, state=RUNNING,
            resolves=True, snapshot_index=0, snapshot_bytes=0, snapshot_stored=0, compactable=0, uploads=None,
            sessions=None, kept=None, version=1, last_release=4, log_time=5, liveness=Liveness(),
            forget_uploads=lambda before: None,
        )  # fmt: skip
        found.doubt_snapshot = lambda index: setattr(found, "snapshot_index", min(found.snapshot_index, index - 1))
        found.__dict__.update(more)
        self.members.append(found)
        return found

    async def settle(self) -> None:
        self.settled += 1
        for member in self.members:
            member.raft.log.stable = member.raft.applied

    async def store_snapshots(self, captured: Sequence[Captured]) -> None:
        self.stored += captured
        for one in captured:
            member: Any = one.member
            member.snapshot_index = member.snapshot_stored = one.snapshot.index
            member.snapshot_bytes = len(one.encoded.manifest)

    def let_log_go(self, member: Any) -> None:
        self.let_go.append(member.uid)


@pytest.mark.parametrize("machine", [Machine, Large])
async def test_what_advanced_is_taken_once(machine: Callable[[], Machine]) -> None:
    rig = Rig()
    member = rig.member(machine())
    found = await rig.store.take([member])
    assert found["taken"] == 1 and found["bytes"] == member.snapshot_bytes and not rig.stopped
    (one,) = rig.stored
    assert (one.snapshot.index, one.snapshot.term, one.snapshot.release) == (10, 3, 4)
    assert one.snapshot.sections == {"state": b"all of it"} and not one.keep_log and not one.anew
    member.compactable = 10
    assert (await rig.store.take([member]))["taken"] == 0 and not rig.let_go


async def test_nothing_is_promised_that_is_not_durable_here() -> None:
    """A quorum may have committed it."""
    rig = Rig()
    member = rig.member(Machine(), applied=10, stable=8)
    assert (await rig.store.take([member]))["taken"] == rig.settled == 1
    ahead = rig.member(Machine(), applied=10, stable=8)
    rig.members.remove(ahead)
    assert (await rig.store.take([ahead]))["skipped"] == 1, "it is not durable even so"


@pytest.mark.parametrize("more", [{"state": STOPPED}, {"resolves": False}])
async def test_who_may_not_is_left_out(more: dict[str, Any]) -> None:
    rig = Rig()
    assert await rig.store.take([rig.member(Machine(), **more)]) == {"taken": 0, "skipped": 1, "bytes": 0}
    assert not await rig.store.renew(rig.members[0]) and not rig.stored


async def test_a_checkpoint_keeps_the_log_until_it_is_a_snapshot() -> None:
    rig = Rig()
    member = rig.member(Machine())
    await rig.store.take([member], keep_log=True)
    assert rig.stored[0].keep_log
    await rig.store.take([member], keep_log=True)
    assert not rig.let_go
    await rig.store.take([member])
    assert rig.let_go == [member.uid] and len(rig.stored) == 1


@pytest.mark.parametrize("machine", [Machine, Large])
async def test_a_machine_that_fails_stops_its_own_group(machine: Callable[[], Machine]) -> None:
    rig = Rig()
    broken = rig.member(machine())
    broken.machine.breaks = True
    found = await rig.store.take([broken, rig.member(Machine())])
    assert found["taken"] == 1 and len(rig.stopped) == 1 and "ZeroDivisionError" in rig.stopped[0]


async def test_a_damaged_snapshot_is_written_anew_where_it_stands() -> None:
    for machine in (Machine(), Large()):
        rig = Rig()
        member = rig.member(machine, snapshot_index=10, snapshot_stored=10)
        assert await rig.store.renew(member)
        assert rig.stored[0].anew and rig.stored[0].snapshot.index == 10
        member.raft.mend = object()
        assert not await rig.store.renew(member), "what is in memory is not all there was"


async def test_a_machine_that_needs_what_it_released_is_reported() -> None:
    dead = Liveness()
    dead.release(Position(1, 0), Position(5, 0))
    rig = Rig()
    wrong = PayloadRange(Position(4, 0), Position(6, 0))
    right = PayloadRange(Position(5, 0), Position(30, 0))
    await rig.store.take([rig.member(Machine(wrong, right), liveness=dead)])
    assert rig.store.mismatches == 1
    await rig.store.take([rig.member(Large((4, 0), (5, 0)), liveness=dead)])
    assert rig.store.mismatches == 2 and len(rig.stored) == 2 and not rig.stopped


async def test_what_a_large_state_needs_is_compared_in_ranges_too() -> None:
    rig = Rig()
    for needed, wrong in (((2, 0), (2, 5)), 0), (((2, 0), (2, 6)), 1), (((3, 1), (3, 2)), 1), (((4, 0), (4, 9)), 0):
        machine = Large(PayloadRange(Position(*needed[0]), Position(*needed[1])))
        member = rig.member(machine)
        member.liveness.release((2, 5), (2, 7))
        member.liveness.release((3, 0), (4, 0))
        before = rig.store.mismatches
        assert (await rig.store.take([member]))["taken"] == 1
        assert rig.store.mismatches - before == wrong, needed


async def test_a_state_that_has_little_to_write_is_written_at_once() -> None:
    class Sometimes(Machine):
        def freeze(self) -> None:
            return None

    rig = Rig()
    assert (await rig.store.take([rig.member(Sometimes())]))["taken"] == 1
    assert rig.stored[0].snapshot.sections == {"state": b"all of it"}

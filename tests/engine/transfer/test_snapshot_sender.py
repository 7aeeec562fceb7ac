"""The offering end of a transfer, alone: which snapshot is offered, for how long one waits, and what the core hears."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.engine.config import SystemConfig
from logyard.engine.log.meta_rows import SnapshotRow
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.engine.raft.membership import Configuration
from logyard.engine.snapshot.format import Snapshot, split
from logyard.engine.transfer.snapshot_sender import SnapshotSender
from logyard.engine.transport.blobs import SNAPSHOT_DONE, SNAPSHOT_OFFER, SNAPSHOT_PROGRESS
from logyard.payloads.liveness import Liveness

UID = 7


class Rig:
    """A leader whose stored snapshot is at `member.snapshot_index`; `take` brings it to 20. What node 3 answers to an
    offer is `answers`, a second apart."""

    def __init__(self, snapshot: int = 10) -> None:
        self.offers: list[tuple[int, int]] = []
        self.events: list[Any] = []
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.transfers: set[int] = set()
        self.up = True
        raft = SimpleNamespace(
            role=LEADER, stopped=False, log=SimpleNamespace(first_index=5),
            snapshot_sent=lambda node, index, ok: self.events.append(("sent", node, index, ok)),
        )  # fmt: skip
        self.member: Any = SimpleNamespace(
            uid=UID, spec=SimpleNamespace(name="log"), raft=raft, snapshot_index=snapshot, floor=0, last_release=0,
            begin_transfer=self.begin, end_transfer=self.transfers.discard,
        )  # fmt: skip
        chunks: Any = SimpleNamespace(
            lease=lambda uid, node, manifest, now: self.events.append(("lease", node)),
            touch=lambda uid, node, now: self.events.append(("touch", node)),
            sent=lambda uid, node: self.events.append(("let go", node)),
        )  # fmt: skip
        self.config = SystemConfig()
        self.sender = SnapshotSender(
            self.config, cast(Any, self), cast(Any, self), chunks, self.send, self.spawn,
            lambda member: self.events.append("mark"),
        )  # fmt: skip
        self.nursery: trio.Nursery

    def begin(self, node: int) -> bool:
        begun = node not in self.transfers
        self.transfers.add(node)
        return begun

    def spawn(self, task: Callable[..., Any], *arguments: Any) -> None:
        self.nursery.start_soon(task, *arguments)

    async def take(self, members: list[Any]) -> None:
        self.events.append("take")
        self.member.snapshot_index = 20

    async def commit(self, build: Callable[[], Iterable[Any]]) -> None:
        assert not list(build())

    def snapshot(self, uid: int) -> SnapshotRow:
        index = self.member.snapshot_index
        live = Liveness().encode_live_set(index)
        found = Snapshot(UID, index, 1, Configuration((1, 2, 3)).encode(), 1, 0, 5, {"state": b"x"}, live)
        return SnapshotRow(UID, index, 1, split(found).manifest)

    def send(self, node: int, kind: int, request: int, header: Any, body: Any = ()) -> bool:
        assert kind == SNAPSHOT_OFFER and body
        self.offers.append((node, header["index"]))
        if self.up:
            self.spawn(self.reply, node, request)
        return self.up

    async def reply(self, node: int, request: int) -> None:
        for kind, header in self.answers:
            await trio.sleep(1)
            self.sender.on_blob(9, kind, request, {"ok": False, "error": "of another node"})
            self.sender.on_blob(node, kind, request, header)

    async def transfer(self) -> list[Any]:
        async with trio.open_nursery() as self.nursery:
            self.sender.start_transfer(self.member, 3)
        return self.events


DONE = (SNAPSHOT_DONE, {"ok": True, "error": None})
PROGRESS = (SNAPSHOT_PROGRESS, {"done": 1})


async def test_a_transfer_is_kept_alive_and_ends_with_what_the_core_hears(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig()
    rig.answers = [PROGRESS, PROGRESS, DONE]
    assert await rig.transfer() == [
        ("lease", 3), ("touch", 3), ("touch", 3), ("let go", 3), ("sent", 3, 10, True), "mark",
    ]  # fmt: skip
    assert rig.offers == [(3, 10)] and rig.sender.sent == 1 and not rig.transfers


@pytest.mark.parametrize("why", ["floor", "last_release"])
async def test_a_newer_snapshot_is_taken_where_the_stored_one_says_too_little(
    why: str, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig()
    setattr(rig.member, why, 15)
    rig.answers = [DONE]
    assert (await rig.transfer())[0] == "take" and rig.offers == [(3, 20)]


async def test_nothing_is_offered_that_does_not_reach_the_log(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    rig.member.raft.log.first_index = 50
    assert await rig.transfer() == ["take", ("sent", 3, 20, False), "mark"] and not rig.offers


@pytest.mark.parametrize("how", ["refused", "silent", "link down", "link lost"])
async def test_a_transfer_that_comes_to_nothing_is_asked_for_again(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig()
    rig.up = how != "link down"
    if how == "refused":
        rig.answers = [(SNAPSHOT_DONE, {"ok": False, "error": "no room"})]
    began = trio.current_time()
    if how == "link lost":
        async with trio.open_nursery() as rig.nursery:
            rig.sender.start_transfer(rig.member, 3)
            await trio.testing.wait_all_tasks_blocked()
            rig.sender.on_link_lost(2)
            await trio.testing.wait_all_tasks_blocked()
            assert rig.transfers
            rig.sender.on_link_lost(3)
    else:
        await rig.transfer()
    assert rig.events == [("lease", 3), ("let go", 3), ("sent", 3, 10, False), "mark"]
    assert not rig.sender.sent and not rig.transfers
    assert (trio.current_time() - began >= rig.config.snapshot_stall_ms / 500) == (how == "silent")


async def test_one_transfer_at_a_time_and_none_of_who_leads_no_more(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    rig.answers = [DONE]
    async with trio.open_nursery() as rig.nursery:
        rig.sender.start_transfer(rig.member, 3)
        rig.sender.start_transfer(rig.member, 3)
    assert rig.offers == [(3, 10)]
    rig.member.raft.role = FOLLOWER
    rig.events.clear()
    assert await rig.transfer() == [] and not rig.transfers

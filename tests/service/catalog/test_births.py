"""Creations by way of the catalogue that fail: it decides what becomes of them, and the nodes do what it says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.engine.machine import Reject
from logyard.machines.catalog.logs import DELETING, LIVE, MAKING, Log, Logs
from logyard.machines.catalog.section import At
from logyard.protocol.errors import Busy, GroupExists, LogyardError, classes
from logyard.service.catalog.births import Births
from logyard.service.catalog.calls import busy

from ...engine.host.rig_groups import Network

WANTED: Mapping[str, Any] = {"name": "log", "members": [1, 2, 3], "machine": "log", "arguments": {}}


class Catalogue:
    """The catalogue's logs. `before` has what happens just before a command, once; those in `lost` get no answer."""

    def __init__(self) -> None:
        self.logs = Logs()
        self.before: dict[str, Callable[[], object]] = {}
        self.lost: set[str] = set()
        self._index = 0

    async def change(self, section: str, name: str, values: Mapping[str, Any]) -> Any:
        await trio.lowlevel.checkpoint()
        self.before.pop(name, lambda: None)()
        if name in self.lost:
            raise busy()
        return self.apply(name, **values)

    def apply(self, name: str, **values: Any) -> Any:
        self._index += 1
        try:
            return self.logs.apply(At(self._index, 0, 1), name, values)
        except Reject as refusal:
            raise classes().get(refusal.code, LogyardError).told(refusal.message, code=refusal.code) from None

    def row(self) -> Log:
        (row,) = self.logs
        return row

    def led(self) -> None:
        """The group's leader reports."""
        self.apply("report", logs=[[self.row().uid, 1, (1, 2, 3), ()]])


@asynccontextmanager
async def rig() -> AsyncIterator[tuple[Network, Catalogue]]:
    async with trio.open_nursery() as nursery:
        yield Network(3, nursery), Catalogue()
        nursery.cancel_scope.cancel()


def births(net: Network, catalogue: Catalogue, node: int) -> Births:
    return Births(cast(Any, catalogue), net.nodes[node].registry)


async def takes_the_name(net: Network, node: int) -> int:
    """A node has a log of that name, which the catalogue does not know."""
    (spec,) = await net.nodes[node].registry.create([{**WANTED, "members": [node]}])
    return spec.uid


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_what_is_refused_where_the_name_is_taken_is_gone_for_good() -> None:
    async with rig() as (net, catalogue):
        taken = await takes_the_name(net, 2)
        with pytest.raises(GroupExists, match="node 2"):
            await births(net, catalogue, 1).create([WANTED])
        await settled()
        row = catalogue.row()
        assert row.state == DELETING and not net.having(row.uid) and net.having(taken) == {2}
        catalogue.led()
        assert catalogue.row().state == DELETING, "a word of its leader that was long under way"
        for node in (1, 2, 3):
            catalogue.apply("gone", uids=[row.uid], node=node)
        assert not list(catalogue.logs)


async def test_what_had_a_leader_before_it_was_refused_lives() -> None:
    """The catalogue called it live, and every node had deleted it: its name was taken by nothing."""
    async with rig() as (net, catalogue):
        await takes_the_name(net, 2)
        catalogue.before["undo"] = catalogue.led
        (spec,) = await births(net, catalogue, 1).create([WANTED])
        await settled()
        assert catalogue.row().state == LIVE and net.having(spec.uid) == {1, 3}


async def test_a_creation_whose_creator_went_when_it_was_refused_is_decided_by_who_finishes_it() -> None:
    async with rig() as (net, catalogue):
        await takes_the_name(net, 2)
        catalogue.lost = {"undo"}
        with pytest.raises(Busy):
            await births(net, catalogue, 1).create([WANTED])
        await settled()
        assert catalogue.row().state == MAKING
        catalogue.lost = set()
        await births(net, catalogue, 3).finish([catalogue.row()])
        await settled()
        assert catalogue.row().state == DELETING and not net.having(catalogue.row().uid)


@pytest.mark.parametrize("lost", ["delete", ""])
async def test_a_refused_creation_whose_deletion_is_cut_off_lives_when_its_leader_is_heard(lost: str) -> None:
    async with rig() as (net, catalogue):
        await takes_the_name(net, 2)
        catalogue.before["delete"] = catalogue.led
        catalogue.lost = {lost}
        with pytest.raises(GroupExists):
            await births(net, catalogue, 1).create([WANTED])
        await settled()
        row = catalogue.row()
        assert (row.state, net.having(row.uid)) == ((LIVE, {1, 3}) if lost else (DELETING, set()))


async def test_who_was_cut_off_from_a_creation_takes_nothing_back_of_what_another_finished(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Groups of a batch sleep, so nobody led them: they went, and the catalogue called them live."""
    async with rig() as (net, catalogue):
        net.fall(2, 3)
        catalogue.lost = {"undo"}
        with pytest.raises(Busy):
            await births(net, catalogue, 1).create_batch(["log"], [1, 2, 3], "log", {})
        catalogue.lost = set()
        net.down = {1}
        net.live.clear()
        net.live.update({2, 3})
        assert await births(net, catalogue, 2).create_batch(["log"], [1, 2, 3], "log", {}) == 1
        net.rise()
        for node in (2, 3):
            net.nodes[1].registry.on_link_up(node)
        await settled()
        row = catalogue.row()
        assert row.state == LIVE and net.having(row.uid) >= {2, 3}


async def test_without_answers_nothing_is_taken_back_before_the_catalogue_says_so(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with rig() as (net, catalogue):
        net.fall(2, 3)
        with pytest.raises(Busy, match="only nodes"):
            await births(net, catalogue, 1).create([WANTED])
        row = catalogue.row()
        assert row.state == "undoing" and row.waiting == (1, 2, 3) and net.having(row.uid) == {1}
        for node in net.nodes.values():
            await node.registry.take_back([row.uid])
        assert not net.having(row.uid)

"""Groups whose creation failed half-way: nobody ever led them, their creator is gone, and others may have the name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.host import groups as groups_module
from logyard.engine.transport.blobs import DEFINED
from logyard.engine.types import Spec
from logyard.protocol.errors import Busy, GroupExists

from .cluster import KIB, Cluster, cluster, until


def spec_of(uid: int, name: str, voters: tuple[int, ...]) -> Spec:
    return Spec(uid, name, "log", {}, voters, 0)


async def store(c: Cluster, number: int, spec: Spec) -> None:
    """As the creator's question does, which is not heard of again."""
    await c.system(number).host.groups._store([spec])


async def test_an_orphan_whose_name_others_have_goes_and_frees_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3, group="") as c:
        await until(lambda: all(len(one.system.live) == 3 for one in c.nodes.values()))
        await c.create("a", [1, 2])
        orphan = spec_of(99, "a", (1, 2, 3))
        await store(c, 3, orphan)
        await until(lambda: 99 not in c.system(3).members, "the orphan goes")
        assert not c.system(3).names and 99 not in c.system(3).host.groups.deleted
        assert all(not c.system(n).host.replica_gc.departed[99].removed_at for n in c.ids)
        for number in c.ids:
            await c.restart(number)
        assert all(not c.system(n).host.replica_gc.departed[99].removed_at for n in c.ids)
        await until(lambda: all(len(one.system.live) == 3 for one in c.nodes.values()))
        # Also its creator, should it live after all, is refused by all of them.
        with pytest.raises(GroupExists):
            await store(c, 3, orphan)
        await c.create("b", [1, 2, 3])
        await c.nodes[1].delete_group("a", force=True)
        await until(lambda: "a" not in c.system(2).names)
        await c.create("a", [1, 2, 3])


async def test_an_orphan_that_nobody_minds_is_born(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3, group="") as c:
        await until(lambda: all(len(one.system.live) == 3 for one in c.nodes.values()))
        await store(c, 3, spec_of(99, "a", (1, 2, 3)))
        await until(lambda: all(99 in c.system(n).members for n in c.ids))
        await c.leader("a")


async def test_one_refusal_of_two_others_is_not_enough_and_ends_with_the_name(tmp_path: Path) -> None:
    """Two of three have it: it is born. The third takes part as soon as its name is free."""
    async with cluster(tmp_path, 3, group="") as c:
        await until(lambda: all(len(one.system.live) == 3 for one in c.nodes.values()))
        await c.create("a", [1])
        await store(c, 3, spec_of(99, "a", (1, 2, 3)))
        await until(lambda: 99 in c.system(2).members)
        number = await c.leader("a", among=[2, 3])
        await until(lambda: 99 in c.system(1).host.replica_gc.departed)
        await c.append(number, [(b"", b"." * KIB)], "a")
        await c.nodes[1].delete_group("a", force=True)
        await until(lambda: 99 in c.system(1).members, "it is let in")
        await until(lambda: c.member(1, "a").raft.applied >= c.member(number, "a").raft.commit > 1)


async def test_a_creation_without_answers_does_not_take_back_what_was_born(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The members stored it, elected a leader and acknowledged an entry; only their answers were lost."""
    monkeypatch.setattr(groups_module, "DEFINE_SECONDS", 1.0)
    async with cluster(tmp_path, 4, group="") as c:
        await until(lambda: all(len(one.system.live) == 4 for one in c.nodes.values()))
        for number in (1, 2, 3):
            _lose(c, number, DEFINED)
        refused: list[Busy] = []

        async def create() -> None:
            with pytest.raises(Busy) as caught:
                await c.nodes[4].create_groups([{"name": "a", "members": [1, 2, 3], "machine": "log"}])
            refused.append(caught.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(create)
            number = await c.leader("a", among=[1, 2, 3])
            await c.append(number, [(b"", b"." * KIB)], "a")
        assert refused
        await c.append(number, [(b"", b"." * KIB)], "a")
        await until(lambda: all("a" in c.system(n).names for n in (1, 2, 3)))
        assert len(await c.read(number, name="a")) == 2


def _lose(c: Cluster, number: int, lost: int) -> None:
    send = c.system(number).peers.send_blob

    def lossy(node: int, kind: int, *rest: Any, **more: Any) -> bool:
        return True if kind == lost else send(node, kind, *rest, **more)

    c.system(number).peers.send_blob = lossy  # type: ignore[method-assign]

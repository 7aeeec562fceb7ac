"""Random histories in which groups are created, deleted, moved, shrunk and put to sleep while nodes crash and links
break.

In the end each group is on all its members, in agreement, or is gone from every node for good; no call of a
client hangs; nothing under way is counted for ever. Where a group moved, or was made while a node was away, there may
be two of a name, on majorities that have no node in common (docs/operating.md); no node has both.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio
import trio.testing

from logyard.engine.raft.core import LEADER
from logyard.engine.replica.member import RUNNING
from logyard.protocol.errors import LogyardError
from logyard.service.node import Node

from .cluster import KIB, Cluster, cluster, until

NAMES = ("a", "b", "c")
STEPS = 40
CALL_SECONDS = 8.0


class Frenzy:
    """One run. Calls are not waited for: several are under way at once, as clients' are."""

    def __init__(self, c: Cluster, draw: random.Random, nursery: trio.Nursery) -> None:
        self.c = c
        self.draw = draw
        self.nursery = nursery
        self.created = self.deleted = self.appended = 0
        self.hung: list[str] = []

    async def step(self) -> None:
        verbs = ["append"] * 6 + ["create"] * 3 + ["delete", "delete", "change", "change", "change"]
        verbs += ["transfer", "snapshot", "roll", "crash", "start", "start", "part", "heal", "heal", "wait"]
        verb = self.draw.choice(verbs)
        if verb in ("crash", "start"):
            with trio.CancelScope(shield=True):
                await getattr(self, verb)()
        elif verb in ("part", "heal"):
            self.c.network.heal()
            if verb == "part":
                self.c.partition(self.draw.choice(self.c.ids))
        elif verb == "wait":
            await trio.sleep(self.draw.random() * 0.1)
        else:
            self.nursery.start_soon(self.call, verb, self.draw.choice(NAMES))

    async def call(self, verb: str, name: str) -> None:
        number = self.draw.choice(sorted(self.c.nodes))
        led = [one for one in sorted(self.c.nodes) if self.c.leads(one, name)]
        if led and self.draw.random() < 0.8:
            number = led[0]
        node = self.c.nodes[number]
        try:
            with trio.move_on_after(CALL_SECONDS) as scope:
                await getattr(self, verb)(number, node, name)
            if scope.cancelled_caught and self.c.nodes.get(number) is node and not node.system.host.fail_stop.failure:
                self.hung.append(f"{verb} {name} on {number}")
        except LogyardError as error:
            # A node that was killed under the call answers nobody.
            killed = self.c.nodes.get(number) is not node
            assert killed or error.code not in ("corrupt", "error"), (verb, error)

    async def append(self, number: int, node: Node, name: str) -> None:
        await self.c.append(number, [(b"", b"." * self.draw.choice((10, 5 * KIB)))], name)
        self.appended += 1

    async def create(self, number: int, node: Node, name: str) -> None:
        members = sorted(self.draw.sample(self.c.ids, self.draw.choice((1, 3, 3, 3))))
        await node.create_groups([{"name": name, "members": members, "machine": "log"}])
        self.created += 1

    async def delete(self, number: int, node: Node, name: str) -> None:
        await node.delete_group(name)
        self.deleted += 1

    async def force_delete(self, number: int, node: Node, name: str) -> None:
        await node.delete_group(name, force=True)
        self.deleted += 1

    async def change(self, number: int, node: Node, name: str) -> None:
        raft = node.system.member(name).raft
        count = self.draw.randint(1, 2)
        changes = []
        for one in self.draw.sample(self.c.ids, count):
            kinds = ("remove", "demote") if one in raft.configuration.voters else ("add", "add_promotable", "promote")
            changes.append((self.draw.choice(kinds), one))
        await node.change_membership(name, changes)

    async def transfer(self, number: int, node: Node, name: str) -> None:
        await node.transfer(name, self.draw.choice(self.c.ids))

    async def snapshot(self, number: int, node: Node, name: str) -> None:
        await node.snapshot()

    async def roll(self, number: int, node: Node, name: str) -> None:
        await self.c.roll(number)

    async def crash(self) -> None:
        if len(self.c.nodes) > 2:
            await self.c.crash(self.draw.choice(sorted(self.c.nodes)))

    async def start(self) -> None:
        for number in self.c.ids:
            if number not in self.c.nodes:
                await self.c.start(number)
                return

    def taken(self, uid: int) -> set[int]:
        """Nodes that can't have this group because another one of its name lives there."""
        spec = next(m.spec for n in self.c.ids if (m := self.c.system(n).quiescence.unquiesce.find(uid)) is not None)
        names = {number: self.c.system(number).names.get(spec.name, uid) for number in self.c.ids}
        return {number for number, other in names.items() if other != uid}

    def wrong(self) -> list[str]:
        """What does not add up yet."""
        found = []
        uids = {uid for number in self.c.ids for uid in self.c.system(number).names.values()}
        for uid in uids:
            members = {n: m for n in self.c.ids if (m := self.c.system(n).quiescence.unquiesce.find(uid)) is not None}
            leaders = [m.raft for m in members.values() if m.raft.role == LEADER and m.raft.commit >= m.raft.lead_index]
            if any(uid in self.c.system(number).host.groups.deleted for number in self.c.ids):
                found.append(f"{uid:x} is deleted and alive on {[*members]}")
            elif len(leaders) != 1:
                found.append(f"{uid:x} has leaders {leaders}, members {members.keys()}")
            else:
                (raft,) = leaders
                taken, voters = self.taken(uid), {*raft.configuration.voters}
                if raft.configuration.joint and 2 * len(voters - taken) <= len(voters):
                    # Most of those who are to vote can't have it: the change waits until the other group is gone.
                    continue
                if members.keys() != raft.configuration.nodes() - taken or raft.configuration.joint:
                    found.append(f"{uid:x} is on {[*members]}, should be {raft.configuration}, barred from {taken}")
                last = raft.log.last_index
                behind = {n: m.raft for n, m in members.items() if not last == m.raft.applied == m.raft.commit}
                found += [f"{uid:x} on {n}: {behind[n]}" for n in behind]
        for number in self.c.ids:
            system = self.c.system(number)
            found += [f"{number}: {m.spec.name} {m.reason}" for m in system.members.values() if m.state != RUNNING]
            barred = {n for uid in system.members for n in self.taken(uid)}
            found += [
                f"{number}: window of {n}: {w.bytes}" for n, w in system.windows.items() if w.bytes and n not in barred
            ]
            if system.admission.inflight or system.admission.queued:
                found.append(f"{number}: {system.admission.inflight} bytes are never answered")
        return found


@pytest.mark.parametrize("seed", range(4))
async def test_groups_come_and_go_while_nodes_crash(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    async with cluster(tmp_path, 4, group="", payload_cache_bytes=0) as c:
        await until(lambda: all(len(one.system.live) == 4 for one in c.nodes.values()))
        async with trio.open_nursery() as nursery:
            frenzy = Frenzy(c, draw, nursery)
            for name in NAMES:
                await c.create(name, [1, 2, 3])
            for _ in range(STEPS):
                await frenzy.step()
            c.network.heal()
            for number in c.ids:
                if number not in c.nodes:
                    await c.start(number)
        await until(lambda: not frenzy.wrong(), lambda: "\n".join(frenzy.wrong()))
        assert not frenzy.hung, frenzy.hung
        for number in c.ids:
            await c.restart(number)
        await until(lambda: not frenzy.wrong(), lambda: "\n".join(frenzy.wrong()))

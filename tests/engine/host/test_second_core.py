"""A core that is not Raft under the real host: a group of one member, which leads itself and commits what is stable.

It has no votes, no rounds, no followers and no fast lane, and stays in one term; beside it on the same node runs a Raft
group. What the host asks of a core is `engine.core.Core`, which mypy holds this one to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from logyard.engine.core import Core
from logyard.engine.entry import CONFIGURATION, NOOP, Entry
from logyard.engine.raft.configuration import Change, Configuration
from logyard.engine.raft.core import Encode
from logyard.engine.raft.mending import Mend
from logyard.engine.raft.messages import Message
from logyard.engine.raft.progress import Progress
from logyard.engine.raft.ready import Ready
from logyard.engine.raft.state import FOLLOWER, LEADER
from logyard.engine.recovery.rebuild import Image
from logyard.engine.replica.build import Cores, make_raft
from logyard.engine.types import Spec
from logyard.protocol.errors import NotLeader, Refused

from .cluster import Cluster, cluster, raft_of, until

TERM = 1
LONE = "lone"


class Lone:
    """One member alone."""

    untold = 0
    history: tuple[tuple[int, Configuration], ...] = ()
    voter = may_lead = True
    promise = (0, 0)
    mend: Mend | None = None
    transferring = False

    def __init__(self, cores: Cores, uid: int, image: Image, encode: Encode) -> None:
        self.uid, self.node, self.limits = uid, cores.node_id, cores.limits
        self.base = self.configuration_index, self.configuration = image.base
        assert self.configuration.nodes() == {self.node}
        self.log = log = image.log
        self.term, self.vote = TERM, self.node
        self.role: int = FOLLOWER
        self.leader = self.lead_index = 0
        # What was recovered is stable, and nobody else has to agree.
        self.commit = log.last_index
        self.applied = log.snapshot_index
        self.stopped = False
        self.dirty = True
        self.progress: Mapping[int, Progress] = {}
        self._encode = encode
        self._stored_term = image.term
        self._offered = log.last_index
        self._told = (self.role, self.commit)
        self._reads: list[int] = []

    # ---- leads itself

    def campaign(self, transfer: bool = False) -> None:
        if self.role != LEADER and not self.stopped:
            self.role, self.leader, self.lead_index = LEADER, self.node, self.log.last_index + 1
            self.log.push(self._encode(self.lead_index, self.term, NOOP, b""))
            self.dirty = True

    def tick(self) -> bool:
        self.campaign()
        return self.is_quiet

    def stop(self) -> None:
        self.resign(False)
        self.stopped = True

    def resign(self, name_heir: bool) -> None:
        self.role, self.leader, self.dirty = FOLLOWER, 0, True

    @property
    def is_quiet(self) -> bool:
        return self.stopped or (self.role == LEADER and self.commit == self.log.last_index)

    # ---- what there is to do

    @property
    def has_ready(self) -> bool:
        return self.dirty

    def hand_out(self, out: list[Message]) -> None:
        """It has no fast lane."""

    def propose(self, entry: Entry, urgent: bool = False) -> None:
        if self.role != LEADER:
            raise NotLeader(self.leader)
        assert entry.term == self.term and entry.kind != CONFIGURATION
        self.log.push(entry)
        self.dirty = True

    def read(self, context: int) -> None:
        if self.role != LEADER:
            raise NotLeader(self.leader)
        self._reads.append(context)
        self.dirty = True

    def ready(self) -> Ready | None:
        if not self.dirty:
            return None
        self.dirty = False
        log, before = self.log, self._offered
        entries = log.entries[before + 1 - log.memory_first :] if before < log.last_index else []
        hard_state = (TERM, self.node) if entries and self._stored_term < TERM else None
        if hard_state is not None:
            self._stored_term = TERM
        self._offered = log.last_index
        told, self._told = self._told, (self.role, self.commit)
        reads, self._reads = [(context, self.commit) for context in self._reads], []
        token = (self.term, self.vote, log.last_index, log.last_term) if entries else None
        return Ready(hard_state, entries, (), (), self.commit, reads, (), told[0] != self.role, 0, token)

    def on_persisted(self, term: int, vote: int, index: int, entry_term: int, out: list[Message] | None = None) -> None:
        assert self.log.term(index) == entry_term
        self.log.stable = self.commit = index
        self.dirty = True

    def on_applied(self, index: int) -> None:
        assert self.applied <= index <= self.commit
        self.applied = index

    def check(self) -> None:
        self.log.check()
        assert self.applied <= self.commit <= self.log.stable <= self._offered <= self.log.last_index

    # ---- sleep

    def may_hibernate(self) -> bool:
        return not self.dirty and self.role == LEADER and self.applied == self.log.last_index == self.log.stable

    def fall_asleep(self) -> None: ...

    def resume_leader(self, asleep: Collection[int]) -> None:
        self.role, self.leader, self.lead_index, self.dirty = LEADER, self.node, self.log.last_index, True

    def resume_follower(self, leader: int) -> None:
        raise AssertionError("nobody else leads")

    def orphan(self) -> None:
        self.campaign()

    # ---- there is nobody else

    def step(self, m: Message) -> str | None:
        return f"a message from node {m.sender} to a member that is alone"

    def on_liveness(self) -> None: ...

    def on_link_reset(self, node: int) -> None: ...

    def resume(self) -> None: ...

    def abdicate(self) -> None: ...

    def give_way(self) -> None: ...

    def on_awake(self, node: int) -> None: ...

    def stand_again(self) -> None: ...

    def tell(self) -> bool:
        return False

    def has_told(self, index: int) -> bool:
        return True

    def note_untold(self, many: bool) -> None: ...

    def heirs(self) -> list[int]:
        return []

    def snapshot_sent(self, node: int, index: int, ok: bool) -> NoReturn:
        raise AssertionError("it asks for no transfer")

    def install_snapshot(self, index: int, term: int, configuration: Configuration) -> bool:
        return False

    def transfer(self, to: int) -> None:
        if to != self.node:
            raise Refused("this group has one member for good")

    def propose_membership(self, changes: Change | Sequence[Change], *, auto_leave: bool = True) -> int:
        raise Refused("this group has one member for good")

    def leave_joint(self) -> int:
        raise Refused("this group has one member for good")

    def force_shrink(self) -> int:
        raise Refused("this group has one member for good")

    @property
    def applied_configuration(self) -> Configuration:
        return self.configuration

    def configuration_at(self, index: int) -> Configuration:
        return self.configuration

    def all_nodes(self) -> set[int]:
        return self.configuration.nodes()


def make_core(cores: Cores, spec: Spec, image: Image, encode: Encode, mend: Mend | None) -> Core:
    """A node may have groups of both kinds."""
    if spec.name == LONE:
        return Lone(cores, spec.uid, image, encode)
    return make_raft(cores, spec, image, encode, mend)


async def holds(c: Cluster, bodies: list[bytes]) -> None:
    """It leads, and has these records and no more, and its core's invariants hold."""
    await c.leader(LONE)
    assert (await c.nodes[1].bounds(LONE, "linearizable"))["end"] == len(bodies)
    assert [body for _, body in await c.read(1, name=LONE)] == bodies
    core = c.member(1, LONE).raft
    assert isinstance(core, Lone)
    core.check()


async def test_a_core_that_is_not_raft_appends_reads_restarts_and_snapshots(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, make_core=make_core) as c:
        await c.create(LONE)
        bodies = await c.fill(1, 5, 3000, LONE)
        await c.fill(1, 3, 100)
        await holds(c, bodies)
        # Killed: what was acknowledged is in the WAL alone.
        await c.restart(1)
        await holds(c, bodies)
        # Killed with segments, and with a snapshot, entries above it, and a log that begins there.
        bodies += await c.fill(1, 5, 200, LONE)
        await c.roll(1)
        await c.restart(1)
        await holds(c, bodies)
        member = c.member(1, LONE)
        await c.system(1).transfers.snapshots.take([member])
        assert member.snapshot_index == member.raft.applied > 0
        bodies += await c.fill(1, 1, 200, LONE)
        await c.roll(1)
        assert member.raft.log.snapshot_index == member.snapshot_index
        await c.restart(1)
        await holds(c, bodies)
        assert c.member(1, LONE).raft.log.snapshot_index > 0
        await c.nodes[1].truncate(LONE, 4)
        assert [body for _, body in await c.read(1, 4, name=LONE)] == bodies[4:]
        with pytest.raises(Refused, match="one member for good"):
            await c.nodes[1].change_members(LONE, "remove", 1)
        # The Raft group beside it went through the same.
        await c.leader()
        assert len(await c.read(1)) == 3 and raft_of(c.member(1)).role == LEADER


async def test_its_group_sleeps_and_wakes(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", make_core=make_core, hibernate_after_ms=30) as c:
        await c.create(LONE)
        await c.fill(1, 3, 20, LONE)
        await c.nodes[1].truncate(LONE, 3)
        system = c.system(1)
        uid = system.names[LONE]
        await until(lambda: uid in system.quiescence.table and uid not in system.members, "it sleeps")
        assert (await c.append(1, [(b"", b"again")], LONE)).start == 3
        await until(lambda: uid in system.quiescence.table and uid not in system.members, "it sleeps again")
        await c.restart(1)
        assert LONE in c.system(1).names and not c.system(1).members
        assert (await c.append(1, [(b"", b"more")], LONE)).start == 4

"""Terms (leases of both machines, delays, sessions) are never early, and late by no more than they may be.

Clocks are moved by hand: what passes between two moves is nothing. Both bounds are looked at: just before its time a
term runs, just after it is over.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from logyard.engine.replica.log_clock import none_runs
from logyard.machines.kv import KV
from logyard.machines.kv import command as kv
from logyard.machines.queue import Queue
from logyard.machines.queue import command as queue
from logyard.machines.rehearsal import Rehearsal
from logyard.protocol.frame import encode_frame

from ..quiesce.test_quiesce import asleep
from .cluster import Cluster, cluster, until
from .test_effects import Clocks

LEASE_MS = 6000
SESSION, OTHER = 71, 72
TTL_MS = 600_000


class Rig:
    """A cluster by clocks of its own, with one group, whose machine is `kind`."""

    def __init__(self, c: Cluster, kind: str) -> None:
        self.c = c
        self.kind = kind
        self.clocks = Clocks(c)
        self.sequences: dict[int, int] = {}
        build = c.build

        def ruled(number: int) -> Any:
            system = build(number)
            system.clocks.wall_ns, system.clocks.monotonic_ns = lambda: self.clocks.wall, lambda: self.clocks.monotonic
            return system

        cast(Any, c).build = ruled

    async def leader(self) -> int:
        return await self.c.leader(self.kind)

    @property
    async def machine(self) -> Any:
        return self.c.member(await self.leader(), self.kind).machine

    async def order(self, *command: object) -> list[Any]:
        """A KV command; its reply."""
        number = await self.leader()
        packed = msgpack.packb(command)
        reply = await self.c.nodes[number].command(self.c.member(number, self.kind), packed)
        found: list[Any] = msgpack.unpackb(reply)
        assert found[0] == 0, found
        return found

    async def say(self, session: int, command: bytes, bodies: int = 0) -> None:
        """A queue's command."""
        number = await self.leader()
        sequence = self.sequences[session] = self.sequences.get(session, 0) + 1
        records: list[tuple[bytes, bytes | None]] = [(b"", b"x")] * bodies or [(b"", None)]
        frame = encode_frame(records, command=command, session=session, sequence=sequence)
        await self.c.nodes[number].commit(self.c.member(number, self.kind), frame)

    async def consumer(self, session: int, lease_ms: int = LEASE_MS) -> None:
        number = await self.leader()
        await self.c.nodes[number].open_session(self.kind, session, session, TTL_MS)
        await self.say(session, queue.ATTACH_COMMAND.pack(queue.ATTACH, 1, queue.AUTO, 0, 10, 1 << 20, lease_ms))

    async def publish(self, session: int, due: int = 0, flags: int = 0) -> None:
        head = queue.PUBLISH_COMMAND.pack(queue.PUBLISH, 0, flags, 0, 0, due, 0, 0)
        await self.say(session, head + (1).to_bytes(4, "little"), 1)

    async def pass_by(self, seconds: float, wall: float | None = None) -> None:
        """Time passes, and everything that is due by now happens, whichever member leads."""
        self.clocks.move(seconds, wall)
        await self.look()

    async def look(self) -> None:
        number = await self.leader()
        member, system = self.c.member(number, self.kind), self.c.system(number)
        await until(lambda: member.leading, "it leads")
        system.replicas.effects.propose_due(member)
        # A timer that is not there: an entry that changes nothing.
        await system.replicas.commands.commit(member, "timer", "", 0)

    async def leases(self) -> int:
        machine = await self.machine
        assert isinstance(machine, KV)
        return len(machine.state.leases.rows)

    async def holders(self) -> list[int]:
        """The sessions that hold a message."""
        machine = await self.machine
        assert isinstance(machine, Queue)
        return [one.key[0] for one in machine.state.consumers.values() if one.held]


async def rig_of(c: Cluster, kind: str) -> Rig:
    rig = Rig(c, kind)
    await c.create(kind, machine=kind)
    return rig


async def test_a_kv_lease_is_whole_after_its_group_slept(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", hibernate_after_ms=30) as c:
        rig = await rig_of(c, "kv")
        await rig.order(kv.PUT, b"k", b"v", 0, 0)
        await asleep(c, "kv")
        rig.clocks.move(45)
        await rig.order(kv.GRANT, LEASE_MS, 7)
        for _ in range(5):
            await rig.pass_by(1.19)
            assert await rig.leases() == 1
        await rig.pass_by(0.06)
        assert await rig.leases() == 0


@pytest.mark.parametrize("step", [3600, -3600])
async def test_a_step_of_the_wall_clock_ends_and_prolongs_no_lease(tmp_path: Path, step: float) -> None:
    async with cluster(tmp_path, 1, group="") as c:
        rig = await rig_of(c, "kv")
        await rig.order(kv.GRANT, LEASE_MS, 7)
        await rig.pass_by(3, step)
        await rig.pass_by(2.9)
        assert await rig.leases() == 1
        await rig.pass_by(0.11)
        assert await rig.leases() == 0


@pytest.mark.parametrize("step", [0, 3600, -3600])
async def test_a_new_leader_gives_a_kv_lease_one_whole_term(tmp_path: Path, step: float) -> None:
    async with cluster(tmp_path, group="") as c:
        rig = await rig_of(c, "kv")
        await rig.order(kv.GRANT, LEASE_MS, 7)
        await c.applied("kv")
        rig.clocks.move(5, 5 + step)
        await c.lead(1 + await rig.leader() % 3, "kv")
        await rig.pass_by(1.01)
        await rig.pass_by(4.89)
        assert await rig.leases() == 1
        await rig.pass_by(1.12)
        assert await rig.leases() == 0, "a whole term after its time at the latest"


@pytest.mark.parametrize("step", [0, 3600, -3600])
async def test_a_queues_lease_goes_on_under_a_new_leader(tmp_path: Path, step: float) -> None:
    """What passed under the one before counts, though it wrote nothing meanwhile."""
    async with cluster(tmp_path, group="") as c:
        rig = await rig_of(c, "queue")
        await rig.consumer(SESSION)
        await rig.publish(SESSION)
        await rig.consumer(OTHER)
        await c.applied("queue")
        rig.clocks.move(3, 3 + step)
        await c.lead(1 + await rig.leader() % 3, "queue")
        await rig.pass_by(2.9)
        assert await rig.holders() == [SESSION]
        await rig.pass_by(0.21)
        assert await rig.holders() == [OTHER]


@pytest.mark.parametrize("step", [0, 3600, -3600])
async def test_no_queue_lease_or_delay_is_early_after_all_were_restarted(tmp_path: Path, step: float) -> None:
    async with cluster(tmp_path, group="") as c:
        rig = await rig_of(c, "queue")
        await rig.consumer(SESSION)
        await rig.publish(SESSION)
        await rig.consumer(OTHER, 600_000)
        await rig.publish(OTHER, LEASE_MS)
        for number in c.ids:
            await c.crash(number)
        rig.clocks.move(45, 45 + step)
        for number in c.ids:
            await c.start(number)
        await rig.look()
        await rig.pass_by(5.9)
        machine = await rig.machine
        assert await rig.holders() == [SESSION] and machine.state.delayed
        await rig.pass_by(0.21)
        assert not machine.state.delayed and OTHER in await rig.holders()


async def test_queue_leases_and_delays_are_whole_after_the_group_slept(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", hibernate_after_ms=30) as c:
        rig = await rig_of(c, "queue")
        await rig.consumer(SESSION)
        await rig.consumer(OTHER, 600_000)
        await asleep(c, "queue")
        rig.clocks.move(45)
        await rig.publish(SESSION)
        await rig.publish(OTHER, LEASE_MS)
        assert await rig.holders() == [SESSION]
        for _ in range(5):
            await rig.pass_by(1.19)
            assert await rig.holders() == [SESSION] and (await rig.machine).state.delayed
        await rig.pass_by(0.16)
        assert OTHER in await rig.holders() and not (await rig.machine).state.delayed


async def test_a_term_that_runs_while_its_group_sleeps_ends_in_time(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", hibernate_after_ms=30) as c:
        rig = await rig_of(c, "kv")
        await rig.order(kv.GRANT, LEASE_MS, 7)
        await asleep(c, "kv")
        slept = {number: c.system(number).quiescence.transitions.woken for number in c.ids}
        rig.clocks.move(5.9, -3600)
        for number in c.ids:
            c.system(number).quiescence.unquiesce.ring()
        assert slept == {number: c.system(number).quiescence.transitions.woken for number in c.ids}, (
            "its time has not come"
        )
        rig.clocks.move(0.11)
        await until(
            lambda: all(c.system(number).quiescence.transitions.woken > slept[number] for number in c.ids), "it wakes"
        )
        await until(lambda: not c.member(1, "kv").machine.state.leases.rows, "and ends")  # type: ignore[attr-defined]


async def test_whoever_follows_a_sleeping_leader_knows_how_long_that_slept(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", hibernate_after_ms=30) as c:
        rig = await rig_of(c, "queue")
        await rig.consumer(SESSION)
        await rig.publish(SESSION)
        await rig.consumer(OTHER)
        leader = await rig.leader()
        await asleep(c, "queue")
        rig.clocks.move(5)
        await c.crash(leader)
        await rig.look()
        assert await rig.leader() != leader and await rig.holders() == [SESSION]
        await rig.pass_by(0.9)
        assert await rig.holders() == [SESSION]
        await rig.pass_by(0.21)
        assert await rig.holders() == [OTHER]


async def test_log_time_jumps_only_when_nothing_that_was_granted_is_running(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="") as c:
        rig = await rig_of(c, "kv")
        leader = await rig.leader()
        member, system = c.member(leader, "kv"), c.system(leader)
        before = member.log_time
        await rig.order(kv.GRANT, LEASE_MS, 7)
        await rig.pass_by(1, 3600)
        assert member.log_time - before < 1100, "a lease is running"
        await rig.order(kv.REVOKE, 7)
        await rig.look()
        assert member.log_time - before >= 3_600_000
        # One that is proposed and not applied may be running just as well.
        c.network.partition([leader], [number for number in c.ids if number != leader])
        last, now = member.raft.log.last_index, system.replicas.log_clock.now(member)
        (frame,) = encode_frame([(b"", None)], command=msgpack.packb((kv.GRANT, LEASE_MS, 8)))
        system.replicas.commands.submit(member.uid, memoryview(frame), cast(Any, Nobody()), 1)
        await until(lambda: member.raft.log.last_index > last, "it is proposed")
        rig.clocks.move(1, 3600)
        assert not none_runs(member)
        assert member.raft.role != 2 or system.replicas.log_clock.now(member) - now < 1100


class Nobody:
    def reply(self, request: int, status: int, data: bytes) -> None:
        """Not wanted."""


async def test_a_log_goes_by_the_wall_clock(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        rig = Rig(c, "log")
        leader = await rig.leader()
        await c.append(leader, [(b"", b"x")])
        rig.clocks.move(1, 3600)
        await c.append(leader, [(b"", b"y")])
        assert c.member(leader).log_time == rig.clocks.wall // 1_000_000


async def test_a_session_is_not_early_by_when_its_leader_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path, 1, tick_ms=1000) as c:
        beats = c.system(1).replicas.heartbeats
        now = beats._looked
        monkeypatch.setattr("logyard.engine.replica.heartbeats.time", SimpleNamespace(monotonic=lambda: now))
        await c.nodes[1].open_session("log", SESSION, SESSION, 2000)
        member = c.member(1)
        now += 0.9
        c.nodes[1].heartbeat(SESSION)
        for seconds in (0.1, 1.0, 0.8):
            now += seconds
            beats.look()
            assert not member.proposals.own, "1.9 s since it was heard of"

        def ended() -> bool:
            """Look on: it counts anew where a busy disk has cost this node its place meanwhile."""
            nonlocal now
            now += 0.2
            beats.look()
            return member.sessions is None

        await until(ended, "it ends")


async def test_a_session_of_a_group_that_slept_does_not_begin_anew(tmp_path: Path) -> None:
    async with cluster(tmp_path, hibernate_after_ms=30) as c:
        await c.nodes[await c.leader()].open_session("log", SESSION, SESSION, 10_000)
        leader = await c.leader()
        beats = c.system(leader).replicas.heartbeats
        c.nodes[leader].heartbeat(SESSION)
        await asleep(c)
        heard = beats.last_seen[SESSION]
        beats.clock += 10.5
        c.system(leader).quiescence.quiesce.look()
        await until(lambda: c.replica(leader) is not None and not c.member(leader).sessions, "it ends")
        assert beats.clock - heard < 15


async def jumps(rig: Rig) -> None:
    """The leader looks whether log time can catch up, until it has."""
    member, system = rig.c.member(await rig.leader(), rig.kind), rig.c.system(await rig.leader())

    def caught_up() -> bool:
        system.replicas.log_clock.catch_up(system.replicas.effects.timed)
        return member.log_time >= rig.clocks.wall // 1_000_000 - 1

    await until(caught_up, "log time catches up")


async def test_a_queue_comes_to_the_newest_version_by_itself(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="") as c:
        await rig_of(c, "queue")
        await until(lambda: {c.member(one, "queue").version for one in c.ids} == {Queue.version})


@pytest.fixture
def queues_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave queues in their version, as machines that say so, until it is asked for."""
    monkeypatch.setattr(Queue, "upgrade_on_demand", True, raising=False)


@pytest.mark.usefixtures("queues_on_demand")
async def test_a_queue_whose_terms_never_end_learns_to_prolong_them_over_a_jump(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="") as c:
        rig = await rig_of(c, "queue")
        await rig.consumer(SESSION)
        await rig.publish(SESSION)
        await rig.consumer(OTHER, 600_000)
        await rig.publish(OTHER, LEASE_MS)
        await until(
            lambda: all(c.system(n).replicas.versions.knows(m, "queue") >= 2 for n in c.ids for m in c.ids), "all know"
        )
        await rig.pass_by(3, 3603)
        machine = await rig.machine
        assert machine.state.now < rig.clocks.wall // 1_000_000 - 3_000_000 and rig.c.member(1, "queue").version == 1
        await jumps(rig)
        await rig.pass_by(2.9)
        assert c.member(await rig.leader(), "queue").version == 2
        assert await rig.holders() == [SESSION] and machine.state.delayed
        await rig.pass_by(0.21)
        assert not machine.state.delayed and OTHER in await rig.holders()
        await c.applied("queue")
        assert len({c.member(number, "queue").machine.snapshot()["queue"] for number in c.ids}) == 1
        # From now on what waits for a time of the wall clock is known as such, also by who restores it.
        due = rig.clocks.wall // 1_000_000 + 3_600_000
        await rig.publish(OTHER, due, queue.AT)
        await rig.pass_by(1, 3601)
        await jumps(rig)
        await rig.pass_by(0.1)
        assert not machine.state.delayed, "it follows the wall clock"


@pytest.mark.usefixtures("queues_on_demand")
async def test_a_queue_does_not_jump_while_a_node_has_the_program_before(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="") as c:
        rig = await rig_of(c, "queue")
        await rig.consumer(SESSION)
        await rig.publish(SESSION)
        number = await rig.leader()
        system, member = c.system(number), c.member(number, "queue")
        system.replicas.versions.nodes[1 + number % 3] = {"queue": 1}
        rig.clocks.move(1, 3601)
        for _ in range(3):
            system.replicas.log_clock.catch_up(system.replicas.effects.timed)
            await rig.look()
        assert member.version == 1 and member.log_time < rig.clocks.wall // 1_000_000 - 3_000_000


def test_what_a_prolonged_queue_keeps_is_in_its_snapshot() -> None:
    run = Rehearsal(lambda: Queue(), now=1_000_000, version=2)
    for due, flags in ((5000, 0), (9_000_000, queue.AT)):
        head = queue.PUBLISH_COMMAND.pack(queue.PUBLISH, 0, flags, 0, 0, due, 0, 0)
        run.command(head + (1).to_bytes(4, "little"), 8 + 1)
    machine = run.machine
    assert isinstance(machine, Queue) and machine.state.delays == 1
    again = Queue()
    again.restore(machine.snapshot())
    assert [one.at for one in again.state.delayed.values()] == [False, True] and again.state.delays == 1
    assert again.snapshot() == machine.snapshot()
    again.state.prolong(1000)
    assert [one.due for one in again.state.delayed.values()] == [1_006_000, 9_000_000] and again.has_terms()


# What a jump may meet


async def prolonging(rig: Rig) -> None:
    """The queue's machine is of the version that prolongs, with a lease and a delay running."""
    await rig.consumer(SESSION)
    await rig.publish(SESSION)
    await rig.consumer(OTHER, 600_000)
    await rig.publish(OTHER, LEASE_MS)
    c = rig.c
    await until(
        lambda: all(c.system(n).replicas.versions.knows(m, "queue") >= 2 for n in c.ids for m in c.ids), "all know"
    )
    number = await rig.leader()
    await c.system(number).replicas.versions.require(c.member(number, "queue"), 2)
    await c.applied("queue")


async def lasts(rig: Rig, seconds: float) -> None:
    """The lease and the delay are over in so many seconds, not before."""
    await rig.pass_by(seconds - 0.1)
    assert await rig.holders() == [SESSION] and (await rig.machine).state.delayed
    await rig.pass_by(0.21)
    assert OTHER in await rig.holders() and not (await rig.machine).state.delayed


async def test_a_jump_that_nobody_else_heard_of_ends_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="") as c:
        rig = await rig_of(c, "queue")
        await prolonging(rig)
        old = await rig.leader()
        member, last = c.member(old, "queue"), c.member(old, "queue").raft.log.last_index
        c.network.partition([old], [number for number in c.ids if number != old])
        rig.clocks.move(1, 3601)
        c.system(old).replicas.log_clock.catch_up(c.system(old).replicas.effects.timed)
        await until(lambda: member.raft.log.last_index > last, "it is in one log")
        stamp = c.system(old).replicas.reader.newest_time(member)
        assert stamp is not None and stamp >= rig.clocks.wall // 1_000_000 - 1 and (await rig.machine).state.delayed
        new = await c.leader("queue", among=[number for number in c.ids if number != old])
        c.network.heal()
        await until(lambda: member.raft.leader == new and member.raft.applied > last, "it follows")
        await lasts(rig, 5)


async def test_a_member_that_got_the_jump_in_a_snapshot_goes_on(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", snapshot_entries=16) as c:
        rig = await rig_of(c, "queue")
        await prolonging(rig)
        late = 1 + await rig.leader() % 3
        await c.crash(late)
        rig.clocks.move(1, 3601)
        await jumps(rig)
        number = await rig.leader()
        for _ in range(40):
            await rig.look()
        await c.nodes[number].snapshot()
        await c.nodes[number].compact()
        log = c.member(number, "queue").raft.log
        await until(lambda: log.snapshot_index > c.member(number, "queue").raft.lead_index, "its log is short")
        await c.start(late)
        await c.applied("queue")
        assert c.system(late).transfers.snapshot_receiver.installed == 1
        assert c.member(late, "queue").log_time >= rig.clocks.wall // 1_000_000 - 1
        await c.lead(late, "queue")
        await lasts(rig, 5)


async def test_what_was_proposed_and_lost_does_not_move_log_time(tmp_path: Path) -> None:
    """A leader stamps by its wall clock, nobody hears of it, and the entry gives way to another one's."""
    async with cluster(tmp_path, group="") as c:
        rig = await rig_of(c, "queue")
        old = await rig.leader()
        member, system = c.member(old, "queue"), c.system(old)
        # Log time jumps to the wall clock where nothing is under way that could grant a term.
        await until(lambda: member.raft.applied == member.raft.log.last_index, "all of it is applied")
        last = member.raft.log.last_index
        c.network.partition([old], [number for number in c.ids if number != old])
        system.clocks.wall_ns = lambda: rig.clocks.wall + 3600 * 10**9
        system.replicas.commands.propose(member, "timer", "", 0)
        await until(lambda: member.raft.log.last_index > last, "it is in one log")
        assert (system.replicas.reader.newest_time(member) or 0) > rig.clocks.wall // 1_000_000 + 3_590_000
        system.clocks.wall_ns = lambda: rig.clocks.wall
        new = await c.leader("queue", among=[number for number in c.ids if number != old])
        c.network.heal()
        await until(lambda: member.raft.leader == new, "it follows")
        await rig.consumer(SESSION)
        await rig.publish(SESSION)
        await rig.consumer(OTHER, 600_000)
        await rig.publish(OTHER, LEASE_MS)
        await c.applied("queue")
        await c.lead(old, "queue")
        await lasts(rig, 6)
        await c.applied("queue")
        assert len({c.member(number, "queue").log_time for number in c.ids}) == 1


async def test_who_follows_a_leader_of_the_program_before_ends_nothing_that_it_granted_itself(tmp_path: Path) -> None:
    """That slews: its log time may be behind the wall clock, and ahead of what passed."""
    async with cluster(tmp_path, group="") as c:
        rig = await rig_of(c, "queue")
        old = await rig.leader()
        system = c.system(old)
        start, at = rig.clocks.wall // 1_000_000, rig.clocks.monotonic

        def slewed(member: Any) -> int:
            passed = (rig.clocks.monotonic - at) // 1_000_000
            return int(max(member.log_time, min(rig.clocks.wall // 1_000_000, start + 2 * passed)))

        cast(Any, system.replicas.log_clock).now = slewed
        rig.clocks.move(20, 3600)
        await rig.consumer(OTHER, 600_000)
        assert c.member(old, "queue").log_time >= start + 40_000
        await c.applied("queue")
        await c.lead(1 + old % 3, "queue")
        await rig.consumer(SESSION)
        await rig.say(OTHER, queue.DETACH_COMMAND.pack(queue.DETACH, 1))
        await rig.publish(SESSION)
        await rig.consumer(OTHER, 600_000)
        await rig.publish(OTHER, LEASE_MS)
        await lasts(rig, 6)
        await c.applied("queue")
        assert len({c.member(number, "queue").machine.snapshot()["queue"] for number in c.ids}) == 1


async def test_a_sleeping_queue_hears_that_the_wall_clock_was_set_forward(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", hibernate_after_ms=30) as c:
        rig = await rig_of(c, "queue")
        await rig.consumer(SESSION)
        number = await rig.leader()
        await until(
            lambda: all(c.system(number).replicas.versions.knows(one, "queue") >= 2 for one in c.ids), "all know"
        )
        await c.system(number).replicas.versions.require(c.member(number, "queue"), 2)
        await rig.publish(SESSION, rig.clocks.wall // 1_000_000 + 3_600_000, queue.AT)
        await asleep(c, "queue")
        c.system(number).quiescence.unquiesce.ring()
        rig.clocks.move(0.1, 3601)
        woken = c.system(number).quiescence.transitions.woken
        await until(lambda: c.system(number).quiescence.transitions.woken > woken, "it wakes")
        await until(lambda: not c.member(number, "queue").machine.state.delayed, "it is due")  # type: ignore[attr-defined]

"""Effects (law 11): each does what it says, on the leader alone where it leaves the node, and once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from logyard.engine.machine import Append, Release, Send
from logyard.engine.replica.log_time import LogTime
from logyard.engine.replica.machine_state import STALE_MAX, MachineState
from logyard.engine.replica.member import Member
from logyard.engine.replica.reader import Located, Reader
from logyard.payloads.reference import Position
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import LARGE, encode_frame

from .cluster import Cluster, cluster, until
from .scribe import Ear, Scribe, command, machines

HOUR = 3600 * 1_000_000_000
SECOND = 1_000_000_000


class Clocks:
    """Wall and monotonic time (ns) of all nodes of a cluster, moved by hand."""

    def __init__(self, c: Cluster) -> None:
        self.wall, self.monotonic = time.time_ns(), time.monotonic_ns()
        for number in c.nodes:
            self.rule(c, number)

    def rule(self, c: Cluster, number: int) -> None:
        """A node goes by these clocks; what it led by its own before does not count."""
        system = c.system(number)
        system.clocks.wall_ns, system.clocks.monotonic_ns = lambda: self.wall, lambda: self.monotonic
        for member in system.members.values():
            member.clock, member.heard_ns = None, self.monotonic

    def move(self, monotonic: float, wall: float | None = None) -> None:
        """Forward by so many seconds; the wall clock may do something else."""
        self.monotonic += int(monotonic * SECOND)
        self.wall += int((monotonic if wall is None else wall) * SECOND)


async def tell(c: Cluster, name: str, verb: str, *arguments: Any) -> bytes:
    """One command without payload, through the leader."""
    leader = await c.leader(name)
    return await c.nodes[leader].command(c.member(leader, name), command(verb, *arguments))


async def keep(c: Cluster, name: str, records: Sequence[tuple[bytes, bytes | None]]) -> None:
    """Records whose payload the machine keeps."""
    leader = await c.leader(name)
    frame = encode_frame(records, command=command("keep"))
    assert await c.nodes[leader].commit(c.member(leader, name), frame) == b"kept"


def scribe(c: Cluster, number: int, name: str = "s") -> Scribe:
    found = c.log(number, name)
    assert isinstance(found, Scribe)
    return found


async def same(c: Cluster, name: str = "s") -> list[Any]:
    """The notes, once every member has the same."""
    await c.applied(name)
    first, *others = (scribe(c, number, name).notes for number in c.nodes)
    assert all(one == first for one in others)
    return first


# Follow-ups


async def test_a_follow_up_is_applied_once_on_every_member(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        await tell(c, "s", "append", "one", "two")
        await until(lambda: len(scribe(c, c.ids[0]).written("note")) == 2)
        await same(c)
        assert scribe(c, 1).written("note") == ["one", "two"]
        assert all(not c.member(number, "s").kept.appends for number in c.ids)  # type: ignore[union-attr]


async def test_a_new_leader_issues_the_follow_ups_that_the_old_one_did_not(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        await c.lead(1, "s")
        # The old leader's proposals get lost, as in a crash between the two entries.
        c.system(1).replicas.commands.propose = lambda *_, **__: None  # type: ignore[method-assign]
        await tell(c, "s", "append", "one", "two")
        await c.applied("s")
        assert scribe(c, 2).written("note") == [] and len(c.member(2, "s").kept.appends) == 2  # type: ignore[union-attr]
        await c.lead(2, "s")
        await until(lambda: len(scribe(c, 2).written("note")) == 2)
        await same(c)
        assert scribe(c, 1).written("note") == ["one", "two"]


async def test_follow_ups_survive_crashes_of_leaders_and_are_never_doubled(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        expected = []
        for turn in range(4):
            names = [f"{turn}.{number}" for number in range(20)]
            expected += names
            leader = await c.leader("s")
            await tell(c, "s", "append", *names)
            # Some of them are under way, some committed, when the leader goes.
            await c.restart(leader)
            await c.leader("s")
        await until(lambda: all(len(scribe(c, n).written("note")) >= len(expected) for n in c.ids))
        await same(c)
        assert sorted(scribe(c, 1).written("note")) == sorted(expected)


async def test_pending_follow_ups_and_timers_are_in_the_snapshot(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        clocks = Clocks(c)
        c.system(1).replicas.commands.propose = lambda *_, **__: None  # type: ignore[method-assign]
        await tell(c, "s", "append", "late")
        await tell(c, "s", "in", "bell", 10_000)
        await tell(c, "s", "monitor", 7)
        assert (await c.nodes[1].snapshot())["taken"] == 1
        await c.restart(1)
        clocks.rule(c, 1)
        await until(lambda: scribe(c, 1).written("note") == ["late"])
        assert scribe(c, 1).restored == 1 and c.member(1, "s").kept.monitors == {7}  # type: ignore[union-attr]
        clocks.move(11)
        await until(lambda: scribe(c, 1).written("rang") == ["bell"])


# Timers and log time


async def test_a_timer_rings_when_log_time_has_come_whatever_the_wall_clock_does(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        clocks = Clocks(c)
        await tell(c, "s", "in", "forward", 100_000)
        # An hour forward at once: log time goes on at its pace while a timer is set.
        clocks.move(90, 3600)
        await tell(c, "s", "note", "90 s later")
        await tell(c, "s", "in", "cancelled", 1000)
        await tell(c, "s", "timer", "cancelled", None)
        assert scribe(c, 1).written("rang") == []
        clocks.move(11)
        await until(lambda: scribe(c, await_leader(c)).written("rang") == ["forward"])
        await tell(c, "s", "in", "back", 10_000)
        # Two hours back: the same.
        clocks.move(9, -7200)
        await tell(c, "s", "note", "9 s later")
        assert scribe(c, await_leader(c)).written("rang") == ["forward"]
        clocks.move(2)
        await until(lambda: scribe(c, await_leader(c)).written("rang") == ["forward", "back"])
        await same(c)


def await_leader(c: Cluster) -> int:
    return next(number for number in c.nodes if c.leads(number, "s"))


async def test_a_timer_is_the_groups_not_its_leaders_and_rings_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        clocks = Clocks(c)
        await tell(c, "s", "in", "bell", 60_000)
        await tell(c, "s", "in", "moved", 70_000)
        await tell(c, "s", "in", "moved", 600_000)
        leader = await c.leader("s")
        await c.restart(leader)
        clocks.rule(c, leader)
        leader = await c.leader("s")
        c.member(leader, "s").clock = None
        await tell(c, "s", "note", "a new leader")
        assert scribe(c, leader).written("rang") == []
        clocks.move(100)
        await until(lambda: scribe(c, leader).written("rang") == ["bell"])
        await tell(c, "s", "note", "long after")
        assert [note[2] for note in await same(c) if note[1] == "rang"] == ["bell"]


def test_log_time_never_runs_back_and_is_never_faster_than_the_monotonic_clock_but_for_jumps() -> None:
    wall, monotonic = 1_700_000_000 * SECOND, 0
    clock = LogTime(0, wall, monotonic)
    assert clock.now(monotonic) == wall // 1_000_000, "a log without any time begins at the wall clock"
    start = clock.now(monotonic)
    assert clock.now(monotonic + 10 * SECOND) == start + 10_000
    assert clock.now(monotonic + 9 * SECOND) == start + 10_000, "a reading out of order changes nothing"
    assert clock.follow(wall - HOUR, monotonic + 20 * SECOND) == start + 15_000, "it waits for the wall clock"
    assert clock.follow(wall + 18 * SECOND, monotonic + 30 * SECOND) == start + 20_000, "at half its pace at least"
    assert clock.follow(wall + HOUR, monotonic + 30 * SECOND) == start + 3_600_000, "and catches up with it at once"
    assert clock.now(monotonic + 31 * SECOND) == start + 3_601_000
    assert clock.read_at(start + 3_600_000) == 30 * SECOND
    # A new leader goes on where the log ended, from when it heard of that.
    later = LogTime(start + 50_000, start * 1_000_000, 2 * SECOND)
    assert later.now(6 * SECOND) == start + 54_000


async def test_a_new_leader_stamps_above_what_it_has_not_applied_yet(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        await c.lead(1, "s")
        clocks = Clocks(c)
        clocks.move(1000)
        await tell(c, "s", "note", "an hour ahead")
        ahead = c.member(1, "s").log_time
        await c.applied("s")
        clocks.move(0, -3600)
        await c.lead(2, "s")
        await tell(c, "s", "note", "by another")
        assert ahead <= c.member(2, "s").log_time < ahead + 1000
        assert c.member(1, "s").clock is None


def test_moved_timers_leave_no_heap_behind() -> None:
    state = MachineState()
    for due in range(10 * STALE_MAX):
        state.set_timer("same", due, True)
    assert len(state.due) <= STALE_MAX + 3 and (due, "same") in state.due


# What leaves the node


async def test_a_message_leaves_once_from_the_leader_to_a_session_that_is_there(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        ears = {number: Ear() for number in c.ids}
        for number, ear in ears.items():
            c.system(number).replicas.delivery.sinks[5] = ear
        leader = await c.leader("s")
        await tell(c, "s", "send", 5, b"hello")
        await tell(c, "s", "send", 6, b"nobody there")
        await same(c)
        session, header, body = ears[leader].pushed[0]
        assert (session, header["kind"], body) == (5, "message", b"hello")
        # A restart replays the entry, and a new leader applies old ones: neither says it again.
        await c.restart(leader)
        again = Ear()
        c.system(leader).replicas.delivery.sinks[5] = again
        await c.lead(leader, "s")
        await tell(c, "s", "note", "later")
        assert [len(ear.pushed) for number, ear in ears.items() if number != leader] == [0, 0]
        assert again.pushed == [] and len(ears[leader].pushed) == 1


async def test_payloads_go_from_their_home_to_the_session(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        ear = c.system(1).replicas.delivery.sinks[5] = Ear()
        large = bytes(range(256)) * (LARGE // 64)
        await keep(c, "s", [(b"h0", b"small"), (b"h1", large), (b"h2", None), (b"h3", b""), (b"h4", b"gone")])
        await keep(c, "s", [(b"h5", b"another entry")])
        await tell(c, "s", "forget", 4)
        await tell(c, "s", "deliver", 5)
        await tell(c, "s", "send", 5, b"after it")
        await until(lambda: len(ear.pushed) == 2)
        session, header, body = ear.pushed[0]
        assert (session, header["kind"], header["tag"]) == (5, "records", b"tag")
        found, at = [], 0
        for _, ordinal, head, size in header["records"]:
            found.append(
                (ordinal, body[at : at + head], body[at + head : at + head + max(size, 0)] if size >= 0 else None)
            )
            at += head + max(size, 0)
        assert found == [
            (0, b"h0", b"small"), (1, b"h1", large), (2, b"h2", None), (3, b"h3", b""), (0, b"h5", b"another entry"),
        ]  # fmt: skip
        assert ear.pushed[1][2] == b"after it", "in order within a session"
        # From a generation as well.
        await c.roll(1)
        await c.nodes[1].compact()
        await tell(c, "s", "deliver", 5)
        await until(lambda: len(ear.pushed) == 3)
        assert ear.pushed[2][2] == body


async def test_a_record_whose_place_is_lost_is_delivered_from_a_peers_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, 3, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        leader = await c.leader("s")
        ear = c.system(leader).replicas.delivery.sinks[5] = Ear()
        await keep(c, "s", [(b"", b"lost here")])
        await keep(c, "s", [(b"", b"found here")])
        await c.applied("s")
        reader, whole, index = c.system(leader).replicas.reader, Reader.payload_entries, scribe(c, leader).refs[0].index

        def lossy(self: Reader, member: Member, first: int, last: int) -> Iterator[Located]:
            """What a peer sends gets a home in a generation."""
            found = whole(self, member, first, last)
            return (one for one in found if self is not reader or one.home is not None or one.index != index)

        monkeypatch.setattr(Reader, "payload_entries", lossy)
        await tell(c, "s", "deliver", 5)
        await until(lambda: len(ear.pushed) == 1)
        assert ear.pushed[0][2] == b"lost herefound here"
        assert not c.system(leader).storage.location._pins, "nothing stays behind"


async def test_what_waits_for_a_session_is_bounded(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", machines=machines, delivery_queue_bytes=64 * 1024) as c:
        await c.create("s", machine="scribe")
        ear = c.system(1).replicas.delivery.sinks[5] = Ear()
        await keep(c, "s", [(b"", bytes(60_000))])
        system, member = c.system(1), c.member(1, "s")
        for _ in range(10):
            system.replicas.delivery.deliver(member, 1, scribe(c, 1).effects_of(None, "deliver", [5], ())[0])  # type: ignore[arg-type]
        assert system.replicas.delivery.dropped == ear.lost == 9, "who listens is told"
        await until(lambda: len(ear.pushed) == 1)
        await until(
            lambda: not system.replicas.delivery._queues and not system.storage.location._pins, "nothing stays behind"
        )


async def test_effects_at_or_below_the_floor_are_dropped_for_good(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        ear = c.system(1).replicas.delivery.sinks[5] = Ear()
        member = c.member(1, "s")
        member.floor = member.raft.log.last_index + 2
        await tell(c, "s", "send", 5, b"below")
        await tell(c, "s", "send", 5, b"at")
        await tell(c, "s", "send", 5, b"above")
        assert [body for _, _, body in ear.pushed] == [b"above"]


async def test_checkpoint_takes_a_snapshot(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        await tell(c, "s", "checkpoint")
        await until(lambda: c.member(1, "s").snapshot_index > 0)


async def test_aux_and_roles_are_the_leaders_own(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        await c.lead(1, "s")
        # The machine hears of it in a later turn.
        await until(lambda: [number for number in c.ids if scribe(c, number).heard[-1:] == ["leader"]] == [1])
        for number in c.ids:
            scribe(c, number).heard.clear()
        await tell(c, "s", "aux", b"work")
        await tell(c, "s", "aux", b"fail")
        await tell(c, "s", "note", "still there")
        await c.applied("s")
        assert [scribe(c, number).heard for number in c.ids] == [[b"work", b"fail"], [], []]
        ear = c.system(2).replicas.delivery.sinks[5] = Ear()
        scribe(c, 2).wishes = [
            Send(5, b"who leads now"),
            Append(command("note", "by on_role")),
            Release(Position(1, 0), Position(2, 0)),
        ]
        await c.lead(2, "s")
        await until(lambda: scribe(c, 1).heard[-1] == "follower")
        await until(lambda: scribe(c, 1).written("note")[-1:] == ["by on_role"])
        assert scribe(c, 2).heard == ["leader"] and [body for *_, body in ear.pushed] == [b"who leads now"]


async def test_the_end_of_a_monitored_session_is_told_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        leader = await c.leader("s")
        system, member = c.system(leader), c.member(leader, "s")
        for session in (7, 8):
            system.replicas.commands.propose(member, "register", session, 1, 60_000)
        await tell(c, "s", "monitor", 7)
        system.replicas.commands.propose(member, "expire", 7, 8)
        await until(lambda: scribe(c, leader).written("note") == ["after the end"])
        await same(c)
        assert scribe(c, leader).written("ended") == [7]


async def test_what_is_no_effect_halts_its_group(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        with pytest.raises(LogyardError):
            await tell(c, "s", "odd")
        row = c.nodes[1].describe("s")
        assert row["state"] == "halted" and "TypeError" in row["reason"]


async def test_describe_shows_what_a_machine_says_of_itself(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        await tell(c, "s", "in", "bell", 600_000)
        assert c.nodes[1].describe("s")["machine_state"] == {
            "version": 1, "newest": 1, "timers": 1, "appends": 0, "monitors": 0, "overview": {"notes": 1},
        }  # fmt: skip


async def test_a_command_one_of_whose_effects_is_none_releases_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        await keep(c, "s", [(b"", b"x" * 5000)])
        with pytest.raises(LogyardError):
            await tell(c, "s", "forget oddly", 0)
        await until(lambda: all(c.member(number, "s").state == "halted" for number in c.nodes))
        assert all(c.member(number, "s").last_release <= c.member(number, "s").raft.applied for number in c.nodes)
        leader = await c.leader("s")
        await c.nodes[leader].skip("s", c.member(leader, "s").raft.applied + 1, 0)
        await same(c)
        for number in c.nodes:
            (ref,) = scribe(c, number).refs
            assert not c.member(number, "s").liveness.is_dead_range((ref.index, 0), (ref.index, 1))


async def test_a_release_of_what_is_not_written_yet_leaves_it_alone(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        await keep(c, "s", [(b"", b"x" * 5000)])
        await tell(c, "s", "forget beyond", 0)
        await keep(c, "s", [(b"", b"y" * 5000)])
        await same(c)
        for number in c.nodes:
            (ref,) = scribe(c, number).refs
            live = c.member(number, "s").liveness
            assert live.live_within(Position(2, 0), Position(99, 0)) == [((ref.index, 0), (99, 0))]

"""What the parts of the host make of one another: sessions, uploads, timers, halted machines, hibernation, log time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from logyard.engine.entry import timestamp_of
from logyard.engine.machine import Applied, Batch, Context, Frame
from logyard.engine.raft.core import LEADER
from logyard.engine.replica.log_time import LogTime
from logyard.engine.replica.proposals import PLACE
from logyard.machines.log.command import APPEND
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import encode_frame
from logyard.protocol.pending import PendingReply

from ..quiesce.test_quiesce import asleep, sleeps
from .cluster import Cluster, cluster, until
from .scribe import Scribe, command
from .scribe import machines as scribes
from .test_effects import Clocks, same, scribe, tell
from .test_uploads import SIZE, begin, upload, whole

SESSION, TTL = 4242, 60_000


class Grudge(Scribe):
    """A batch machine that fails at no frame, only at entries of three or more; and at all when it is told so."""

    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        if len(frames) >= 3:
            raise ZeroDivisionError("three are too many")
        replies = []
        for frame in frames:
            for one in frame.split_commands():
                replies.append(self.apply(context, one, ()).reply)
        return Batch(replies)


class Sullen(Scribe):
    """Fails at an entry even when nothing of it is shown."""

    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        if not frames or frames[0].commands == command("boom"):
            raise ZeroDivisionError("no")
        return Batch([self.apply(context, frame.commands, ()).reply for frame in frames])


class Repeater(Scribe):
    """Its follow-ups and timers fail."""

    def apply(self, context: Context, command: bytes, refs: tuple[Any, ...]) -> Applied:
        applied = super().apply(context, command, refs)
        if self.notes[-1][1:] == ["note", "poison"]:
            raise ZeroDivisionError("the follow-up can't")
        return applied


def machines(name: str, arguments: dict[str, Any]) -> Any:
    kinds: dict[str, Any] = {"grudge": Grudge, "sullen": Sullen, "repeater": Repeater}
    return kinds[name]() if name in kinds else scribes(name, arguments)


def submit(c: Cluster, number: int, name: str, *commands: bytes) -> list[PendingReply[bytes]]:
    """Frames of one turn: one entry."""
    answers = []
    for one in commands:
        answer: PendingReply[bytes] = PendingReply()
        frame = memoryview(b"".join(encode_frame([(b"", b"x")], command=one)))
        c.system(number).replicas.commands.submit(c.member(number, name).uid, frame, answer, 1)
        answers.append(answer)
    return answers


async def halted(c: Cluster, name: str) -> int:
    await until(lambda: all(c.member(number, name).state == "halted" for number in c.ids), "all halt")
    return c.member(1, name).raft.applied + 1


async def try_skip(c: Cluster, name: str, index: int, ordinal: int) -> None:
    """Whoever leads; that it halts again is an outcome, too."""
    leader = next(number for number in c.ids if c.member(number, name).raft.role == LEADER)
    with trio.move_on_after(2):
        try:
            await c.nodes[leader].skip(name, index, ordinal)
        except LogyardError:
            pass


# Halted groups


async def test_a_skip_that_does_not_help_leaves_the_node_alive(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="grudge")
        await tell(c, "s", "note", "before")
        leader = await c.leader("s")
        submit(c, leader, "s", *(command("note", number) for number in range(4)))
        index = await halted(c, "s")
        assert "its place is not known" in c.member(leader, "s").reason
        # Four frames: one less is still too many. Each skip is used once.
        await try_skip(c, "s", index, 0)
        assert c.member(leader, "s").state == "halted"
        await try_skip(c, "s", index, 1)
        await tell(c, "s", "note", "after")
        assert [note[2] for note in await same(c)] == ["before", 2, 3, "after"]


async def test_a_machine_that_fails_at_nothing_at_all_halts_only_its_group(tmp_path: Path) -> None:
    async with cluster(tmp_path, machines=machines) as c:
        await c.create("s", machine="sullen")
        leader = await c.leader("s")
        submit(c, leader, "s", command("boom"))
        index = await halted(c, "s")
        await try_skip(c, "s", index, 0)
        assert c.member(leader, "s").state == "halted"
        await c.append(await c.leader(), [(b"", b"the other group goes on")])


async def test_a_follow_up_that_was_skipped_is_not_issued_again(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="repeater")
        await tell(c, "s", "append", "poison")
        index = await halted(c, "s")
        await try_skip(c, "s", index, 0)
        await until(lambda: all(c.member(number, "s").state == "running" for number in c.ids), "the skip helps")
        await tell(c, "s", "note", "after")
        leader = await c.leader("s")
        await c.lead(leader % 3 + 1, "s")
        await tell(c, "s", "note", "again")
        assert all(not c.member(n, "s").kept.appends for n in c.ids)  # type: ignore[union-attr]
        assert (await same(c))[-1][2] == "again"


# Hibernation


async def test_a_timer_rings_in_a_group_that_slept_for_a_long_time(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines, hibernate_after_ms=30) as c:
        await c.create("s", machine="scribe")
        clocks = Clocks(c)
        await tell(c, "s", "in", "bell", 3_600_000)
        await asleep(c, "s")
        slept = sum(c.system(number).quiescence.transitions.slept for number in c.ids)
        clocks.move(3601)
        await until(lambda: any(not sleeps(c, n, "s") and scribe(c, n).written("rang") for n in c.ids), "it rings")
        await asleep(c, "s")
        assert sum(c.system(number).quiescence.transitions.slept for number in c.ids) - slept <= 3
        assert [note[2] for note in await same(c) if note[1] == "rang"] == ["bell"]


async def test_a_timer_rings_although_the_whole_cluster_was_down(tmp_path: Path) -> None:
    """Nobody led meanwhile, which does not count: the rest passes while the group sleeps again."""
    async with cluster(tmp_path, group="", machines=machines, hibernate_after_ms=30) as c:
        await c.create("s", machine="scribe")
        clocks = Clocks(c)
        await tell(c, "s", "in", "bell", 3_600_000)
        await asleep(c, "s")
        for number in c.ids:
            await c.crash(number)
        clocks.move(3601)
        for number in c.ids:
            await c.start(number)
            clocks.rule(c, number)
        await until(lambda: any(c.leads(number, "s") for number in c.ids), "due, it wakes")
        for seconds in (1000, 1000, 1000, 700):
            await asleep(c, "s")
            assert not any(scribe(c, number).written("rang") for number in c.ids if not sleeps(c, number, "s"))
            clocks.move(seconds)
        await until(lambda: any(not sleeps(c, n, "s") and scribe(c, n).written("rang") for n in c.ids), "it rings")


async def test_a_group_that_had_an_upload_sleeps(tmp_path: Path) -> None:
    async with cluster(tmp_path, hibernate_after_ms=30, hibernate_move_bytes=1 << 20) as c:
        leader = await begin(c)
        body = b"b" * (3 * SIZE)
        await c.append(leader, [(b"", b"first")])
        assert await upload(c, 1, 1, body) == 1
        c.nodes[leader].heartbeat(77)
        await asleep(c)
        assert await whole(c, leader, 1, len(body)) == body


# Log time


async def test_a_new_leaders_no_op_is_not_older_than_what_it_has_not_applied(tmp_path: Path) -> None:
    """Else the next leader, which looks at the last entry only, would let log time run back."""
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        clocks = Clocks(c)
        await c.lead(1, "s")
        await tell(c, "s", "note", "before")
        await c.applied("s")
        clocks.move(1000)
        last = c.member(1, "s").raft.log.last_index
        # On two logs, and its leader does not hear that: nobody else knows it to be committed.
        c.partition(3)
        c.network.partition([2], [1], one_way=True)
        submit(c, 1, "s", command("note", "late"))
        await until(lambda: c.member(2, "s").raft.log.last_index > last, "it arrives")
        clocks.move(0, -1000)
        await c.crash(1)
        assert c.member(2, "s").raft.applied <= last
        c.network.heal()
        assert await c.leader("s") == 2
        member = c.member(2, "s")
        entries = c.system(2).replicas.reader.log_entries(member, 1, member.raft.log.last_index, 1 << 20)
        stamps = [timestamp_of(entry.data) for entry in entries]
        assert len(stamps) > last + 1 and stamps == sorted(stamps)


async def test_an_early_answer_to_a_sessions_frame_names_its_place(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        leader = await c.leader()
        await c.nodes[leader].open_session("log", SESSION, 77, TTL)
        for sequence in (1, 2):
            answer: PendingReply[bytes] = PendingReply()
            frame = memoryview(
                b"".join(encode_frame([(b"", b"x")], command=APPEND, session=SESSION, sequence=sequence))
            )
            c.system(leader).replicas.commands.submit(c.member(leader).uid, frame, answer, 1, early=True)
            index, term = PLACE.unpack(await answer.wait(trio.Event))
            assert c.member(leader).raft.log.term(index) == term


def test_how_long_log_time_takes_to_a_timer() -> None:
    """Whatever the wall clock says, a clock read after that time has reached it, and one read before has not."""
    for wall_s in (-500, -90, 0, 90, 500):
        for due_s in (0, 1, 100, 1000):
            start, second = 1_700_000_000 * 1000, 1_000_000_000
            wall = start * 1_000_000 + wall_s * second
            due, early = start + due_s * 1000, 2_000_000
            wait = LogTime(start, wall, 0).until(due)
            assert LogTime(start, wall, 0).now(wait) >= due
            assert wait < early or LogTime(start, wall, 0).now(wait - early) < due
            wait = LogTime(start, wall, 0).until_by(due, wall)
            assert LogTime(start, wall, 0).follow(wall + wait, wait) >= due
            assert wait < early or LogTime(start, wall, 0).follow(wall + wait - early, wait - early) < due


async def test_a_machine_rebuilt_without_any_snapshot_sees_its_sessions_frames_again(tmp_path: Path) -> None:
    """The table of before would take what is replayed for duplicates."""
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("s", machine="scribe")
        leader = await c.leader("s")
        await c.nodes[leader].open_session("s", SESSION, 77, TTL)
        (frame,) = encode_frame([(b"", None)], command=command("note", "in session"), session=SESSION, sequence=1)
        assert await c.nodes[leader].commit(c.member(leader, "s"), [frame])
        assert not c.member(leader, "s").snapshot_index
        submit(c, leader, "s", command("boom"))
        await try_skip(c, "s", await halted(c, "s"), 0)
        await until(lambda: all(c.member(number, "s").state == "running" for number in c.ids), "the skip helps")
        await tell(c, "s", "note", "after")
        assert [note[2] for note in await same(c)] == ["in session", "after"]

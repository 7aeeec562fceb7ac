"""A machine that raises halts its member (law 7): the core runs on, and a replicated skip leaves out that command
only, on every member, at every replay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.entry import build_system, encode_system
from logyard.engine.machine import Batch, Context, Frame, Reject
from logyard.engine.raft.core import LEADER
from logyard.engine.replica.leadership import wait
from logyard.engine.replica.member import Halt
from logyard.engine.snapshot import format as snapshot_format
from logyard.engine.snapshot.format import Encoded
from logyard.protocol.errors import Busy, GroupStopped, LogyardError, NotLeader, Refused, Unknown
from logyard.protocol.frame import encode_frame
from logyard.protocol.pending import PendingReply

from .cluster import PATIENCE, Cluster, cluster, until
from .scribe import Scribe, TickingScribe, command
from .scribe import machines as scribes
from .test_effects import keep, same, scribe, tell


class BatchScribe(Scribe):
    """Takes whole entries, and is left half changed when it raises."""

    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        replies: list[bytes | Reject] = []
        for frame in frames:
            for one in frame.split_commands():
                reply = self.apply(context, one, ()).reply
            replies.append(reply)
        return Batch(replies)


def machines(name: str, arguments: dict[str, Any]) -> Any:
    return BatchScribe() if name == "batch" else scribes(name, arguments)


async def group(c: Cluster, kind: str = "scribe") -> None:
    await c.create("s", machine=kind)
    await tell(c, "s", "note", "before")


async def blow(c: Cluster, *records: bytes) -> int:
    """A command at which every member halts; its index."""
    leader = await c.leader("s")
    with pytest.raises(LogyardError) as caught:
        await tell(c, "s", "boom")
    assert caught.value.code == "unknown"
    index = c.member(leader, "s").raft.applied + 1
    await until(lambda: all(c.member(number, "s").state == "halted" for number in c.nodes))
    return index


async def skip(c: Cluster, index: int, ordinal: int = 0) -> None:
    """By whoever leads, once somebody does."""
    with trio.fail_after(PATIENCE):
        while True:
            leader = next((n for n in c.nodes if c.member(n, "s").raft.role == LEADER), 0)
            try:
                if leader:
                    return await c.nodes[leader].skip("s", index, ordinal)
            except NotLeader:
                pass
            await trio.sleep(0.01)


async def test_a_halted_group_votes_acknowledges_and_refuses(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await group(c)
        index = await blow(c)
        leader = next(number for number in c.ids if c.member(number, "s").raft.role == LEADER)
        node, member = c.nodes[leader], c.member(leader, "s")
        row = node.describe("s")
        assert row["state"] == "halted" and f"({index}, 0)" in row["reason"] and "ZeroDivisionError" in row["reason"]
        for refused in (
            lambda: tell(c, "s", "note", "x"),
            lambda: c.system(leader).replicas.leadership.read_index(member),
            lambda: wait(member, lambda: False),
        ):
            with pytest.raises(GroupStopped, match="ZeroDivisionError"):
                await refused()
        assert (await node.snapshot())["taken"] == 0
        # The core elects and commits as ever.
        term = member.raft.term
        other = next(number for number in c.ids if number != leader)
        await until(lambda: other in c.system(leader).live)
        member.raft.transfer(other)
        c.system(leader).ready_loop.mark(member)
        await until(lambda: c.leads(other, "s"))
        assert c.member(other, "s").raft.term > term and c.member(other, "s").state == "halted"
        assert [c.member(number, "s").raft.applied for number in c.ids] == [index - 1] * 3


async def test_halted_members_bring_up_the_one_that_the_skip_needs(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await group(c)
        await c.lead(1, "s")
        await c.applied("s")
        await c.crash(3)
        for number in range(3):
            await keep(c, "s", [(b"", b"%d" % number * 5000)])
        await c.applied("s")
        for number in (1, 2):
            await c.nodes[number].snapshot()
            await c.nodes[number].compact()
            member = c.member(number, "s")
            await until(lambda member=member: member.raft.log.snapshot_index == member.snapshot_index > 0)
        index = await blow(c)
        # It needs a snapshot with payloads, which only halted members have; and one of them goes before it is there.
        await c.start(3)
        await until(lambda: c.member(3, "s").state == "halted", "it has all that is before the command")
        assert c.member(3, "s").snapshot_index == index - 1
        await c.crash(2)
        await skip(c, index)
        await tell(c, "s", "note", "after")
        refs = [(ref.index, ref.ordinal) for ref in scribe(c, 3).refs]
        assert len(refs) == 3


async def test_a_skip_leaves_out_one_command_on_every_member(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await group(c)
        index = await blow(c)
        with pytest.raises(Refused, match="not at"):
            await skip(c, index, 1)
        with pytest.raises(Refused, match="not at"):
            await skip(c, index + 1)
        await skip(c, index)
        await tell(c, "s", "note", "after")
        notes = await same(c)
        assert [note[2] for note in notes if note[1] == "note"] == ["before", "after"]
        assert not [note for note in notes if note[1] == "boom"], "a machine half changed by the fault is not used"
        assert all(c.member(number, "s").state == "running" for number in c.ids)
        with pytest.raises(Refused, match="not halted"):
            await skip(c, index)


async def test_followers_and_unknown_groups_skip_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await group(c)
        index = await blow(c)
        leader = next(number for number in c.ids if c.member(number, "s").raft.role == LEADER)
        follower = next(number for number in c.ids if number != leader)
        with pytest.raises(NotLeader):
            await c.nodes[follower].skip("s", index, 0)


async def test_a_member_that_had_applied_what_is_skipped_halts_at_the_skip(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", machines=machines) as c:
        await group(c)
        sink: PendingReply[bytes] = PendingReply()
        # As from a leader that was halted when it proposed it, while this member's program was a repaired one.
        c.system(1).replicas.commands.propose(c.member(1, "s"), "skip", 2, 0, sink=sink)
        with pytest.raises(LogyardError, match="halted"):
            await sink.wait(trio.Event)
        member = c.member(1, "s")
        assert member.state == "halted" and "command (2, 0)" in member.reason and "was applied" in member.reason
        # Where all are so, they go on together.
        assert member.halt is not None
        await c.nodes[1].skip("s", member.halt.index, 0)
        await tell(c, "s", "note", "after")
        assert scribe(c, 1).written("note") == ["before", "after"]


@pytest.mark.parametrize("snapshot", [False, True])
async def test_what_was_skipped_stays_out_where_the_program_is_repaired_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: bool
) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await group(c)
        await c.lead(1, "s")
        index = await blow(c)
        await c.crash(3)
        await skip(c, index)
        await tell(c, "s", "note", "after")
        if snapshot:
            await c.nodes[2].snapshot()
        monkeypatch.setattr(Scribe, "boom", lambda self: None)
        # One replays what it had left out; one may apply what is skipped before it hears of that.
        await c.restart(2)
        await c.start(3)
        await tell(c, "s", "note", "repaired")
        member, last = c.member(3, "s"), c.member(1, "s").raft.applied
        await until(lambda: member.raft.applied >= last or member.state == "halted")
        if member.state == "halted":
            assert "restart this node" in member.reason
            await c.restart(3)
        notes = await same(c)
        assert [note[2] for note in notes if note[1] == "note"] == ["before", "after", "repaired"]
        assert all(c.member(number, "s").state == "running" for number in c.ids)
        sections = [c.member(number, "s").kept for number in c.ids]
        assert all(one is not None and one.skipped == {(index, 0, 1)} for one in sections)


async def running(c: Cluster) -> None:
    """All members of the group run, and have applied what there is: who replays may wait for what is committed."""
    await until(lambda: all(c.member(number, "s").state == "running" for number in c.ids), "all run")
    await same(c)


async def test_a_skip_that_was_skipped_leaves_out_nothing_at_a_replay(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await group(c)
        await c.lead(1, "s")
        await c.applied("s")
        # As from a leader that was halted at a command that the others' programs had applied.
        c.system(1).replicas.commands.propose(c.member(1, "s"), "skip", 2, 0, sink=PendingReply())
        await until(lambda: all(c.member(number, "s").state == "halted" for number in c.ids))
        halt = c.member(1, "s").halt
        assert halt is not None
        await skip(c, halt.index)
        await tell(c, "s", "note", "after")
        for number in (2, 3):
            await c.restart(number)
        await running(c)
        assert scribe(c, 2).written("note") == ["before", "after"]


async def test_two_skips_of_one_frame_are_one(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", machines=machines) as c:
        await group(c)
        member = c.member(1, "s")
        (frame,) = encode_frame([(b"", None)] * 2, command=command("boom"))
        c.system(1).replicas.commands.submit(member.uid, memoryview(frame), PendingReply(), 0)
        await until(lambda: member.state == "halted")
        assert member.halt is not None
        async with trio.open_nursery() as nursery:
            for ordinal in (0, 1):
                nursery.start_soon(c.nodes[1].skip, "s", member.halt.index, ordinal)
        await tell(c, "s", "note", "after")
        assert scribe(c, 1).written("note") == ["before", "after"]


async def test_two_skips_of_one_entry_hold_after_all_nodes_were_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await group(c)
        await c.lead(1, "s")
        for verb in (command("note", "a"), command("boom"), command("note", "b"), command("boom")):
            (frame,) = encode_frame([(b"", b"body")], command=verb)
            c.system(1).replicas.commands.submit(c.member(1, "s").uid, memoryview(frame), PendingReply(), 0)
        await until(lambda: all(c.member(number, "s").state == "halted" for number in c.ids))
        halt = c.member(1, "s").halt
        assert halt is not None
        for number in c.ids:
            # What is stored of commits is the entry at which they halted.
            await c.roll(number)
        with pytest.raises(Unknown):
            await c.nodes[1].skip("s", halt.index, 1)
        await c.nodes[1].skip("s", halt.index, 3)
        await running(c)
        monkeypatch.setattr(Scribe, "boom", lambda self: None)
        for number in c.ids:
            await c.crash(number)
        for number in c.ids:
            await c.start(number)
        await running(c)
        assert scribe(c, 1).written("note") == ["before", "a", "b"] and not scribe(c, 1).written("boom")


async def replays_the_same(c: Cluster, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Node 1 starts again with a repaired program, and replays batches of so many bytes."""
    before = scribe(c, 1).written("note")
    monkeypatch.setattr(Scribe, "boom", lambda self: None)
    for module, name in (("applier", "APPLY_BYTES"), ("quarantine", "SCAN_BYTES")):
        monkeypatch.setattr(f"logyard.engine.replica.{module}.{name}", size)
    await c.restart(1)
    await running(c)
    assert scribe(c, 1).written("note") == before
    assert "boom" not in [verb for _, verb, *_ in scribe(c, 1).notes]


async def test_a_machine_built_anew_goes_on_from_the_snapshot_that_is_stored(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await group(c)
        await c.applied("s")
        await c.nodes[3].snapshot()
        await tell(c, "s", "note", "between")
        await c.applied("s")
        await c.nodes[1].snapshot()
        member, system = c.member(3, "s"), c.system(3)
        data = bytes(c.system(1).storage.meta_batch.snapshot(member.uid).data)
        found = snapshot_format.decode(data, member.uid)
        await system.storage.checkpoints.store_installed(member, found, Encoded(data, {}, (), len(data)))
        assert member.snapshot_index < member.snapshot_stored == found.index
        await skip(c, await blow(c))
        await tell(c, "s", "note", "after")
        await same(c)
        assert scribe(c, 3).written("note") == ["before", "between", "after"]


async def test_a_skip_far_behind_its_command_is_seen_at_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, 1, group="", machines=machines) as c:
        await group(c)
        member = c.member(1, "s")
        for verb in [command("boom"), *(command("note", "x" * 1000) for _ in range(20))]:
            (frame,) = encode_frame([(b"", None)], command=verb)
            c.system(1).replicas.commands.submit(member.uid, memoryview(frame), PendingReply(), 0)
        await until(lambda: member.state == "halted")
        assert member.halt is not None
        await c.nodes[1].skip("s", member.halt.index, member.halt.ordinal)
        await tell(c, "s", "note", "after")
        await replays_the_same(c, monkeypatch, 4096)


async def test_two_skips_far_from_one_another_are_both_seen_at_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one's command lies in a later batch than the first one's skip, and its skip in a later one still."""
    async with cluster(tmp_path, 1, group="", machines=machines) as c:
        await group(c)
        member = c.member(1, "s")
        for _ in range(2):
            for _ in range(8):
                await tell(c, "s", "note", "x" * 1000)
            for verb in [command("boom"), *(command("note", "x" * 1000) for _ in range(20))]:
                (frame,) = encode_frame([(b"", None)], command=verb)
                c.system(1).replicas.commands.submit(member.uid, memoryview(frame), PendingReply(), 0)
            await until(lambda: member.state == "halted")
            assert member.halt is not None
            await c.nodes[1].skip("s", member.halt.index, member.halt.ordinal)
            await running(c)
        await replays_the_same(c, monkeypatch, 3000)


async def test_who_waits_whether_a_skip_is_committed_goes_on_when_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await group(c)
        await c.lead(1, "s")
        index = await blow(c)
        for number in c.ids:
            await c.roll(number)
        c.partition(1)
        member = c.member(1, "s")
        for name, *arguments in (("upgrade", 1), ("upgrade", 1), ("skip", index, 0)):
            at = member.raft.log.last_index
            member.raft.propose(build_system(at + 1, member.raft.term, 0, [encode_system(name, *arguments)]), True)
            c.system(1).ready_loop.mark(member)
            await until(lambda at=at: member.raft.log.stable > at)
        await c.crash(1)
        monkeypatch.setattr(Scribe, "boom", lambda self: None)
        for number in (2, 3):
            await c.restart(number)
        # They apply it, and what their next leader has begun with is in the place of the skip.
        await c.leader("s", among=(2, 3))
        await until(lambda: all(c.member(number, "s").raft.applied > index for number in (2, 3)))
        await c.start(1)
        c.network.heal()
        await running(c)
        await c.lead(1, "s")
        await tell(c, "s", "note", "after")
        await same(c)
        assert [note[1] for note in scribe(c, 1).notes] == ["note", "boom", "note"]


async def test_who_waits_whether_a_skip_is_committed_takes_no_other(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", machines=machines) as c:
        await group(c)
        member = c.member(1, "s")
        last = member.raft.log.last_index
        member.suspend(Halt(last, 0, 0, -1, "not known yet", undecided=True))
        with pytest.raises(Refused, match="goes on by itself when it is known"):
            await c.nodes[1].skip("s", last, 0)
        assert member.raft.log.last_index == last, "nothing was proposed"


async def test_a_skip_holds_after_restarts_and_snapshots(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await group(c)
        index = await blow(c)
        await skip(c, index)
        await tell(c, "s", "note", "after")
        await c.applied("s")
        for number in c.ids:
            await c.restart(number)
        await tell(c, "s", "note", "again")
        await same(c)
        assert scribe(c, 2).written("note") == ["before", "after", "again"] and not scribe(c, 2).written("boom")
        for number in c.ids:
            await c.nodes[number].snapshot()
            await c.restart(number)
        await tell(c, "s", "note", "at last")
        await same(c)
        assert scribe(c, 3).written("note") == ["before", "after", "again", "at last"]


async def test_members_restarted_while_halted_and_one_that_was_away(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await group(c)
        await c.lead(1, "s")
        await c.crash(3)
        with pytest.raises(LogyardError):
            await tell(c, "s", "boom")
        await until(lambda: all(c.member(number, "s").state == "halted" for number in (1, 2)))
        index = c.member(1, "s").raft.applied + 1
        for number in (1, 2):
            await c.restart(number)
        await until(lambda: all(c.member(number, "s").state == "halted" for number in (1, 2)))
        await skip(c, index)
        await tell(c, "s", "note", "after")
        # It meets the failing command when the skip is long committed.
        await c.start(3)
        await tell(c, "s", "note", "all three")
        await same(c)
        assert scribe(c, 3).written("note") == ["before", "after", "all three"]
        assert c.member(3, "s").state == "running"


async def test_a_member_too_far_behind_gets_over_it_by_a_snapshot(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await group(c)
        await c.lead(1, "s")
        index = await blow(c)
        await c.crash(3)
        await skip(c, index)
        await tell(c, "s", "note", "after")
        for number in (1, 2):
            await c.roll(number)
            await c.nodes[number].snapshot()
        await c.start(3)
        await until(lambda: c.member(3, "s").state == "running")
        await tell(c, "s", "note", "together")
        await same(c)
        assert scribe(c, 3).written("note") == ["before", "after", "together"]


async def test_two_faults_in_a_row_and_a_fault_in_one_entry_twice(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", machines=machines) as c:
        await group(c)
        member, node = c.member(1, "s"), c.nodes[1]
        sinks: list[PendingReply[bytes]] = [PendingReply() for _ in range(5)]
        verbs = [command("note", "a"), command("boom"), command("note", "b"), command("boom"), command("note", "c")]
        for sink, verb in zip(sinks, verbs, strict=True):
            (frame,) = encode_frame([(b"", b"body")], command=verb)
            c.system(1).replicas.commands.submit(member.uid, memoryview(frame), sink, 0)
        await until(lambda: member.state == "halted")
        index = member.raft.applied + 1
        assert member.halt is not None and member.halt.ordinal == 1
        with pytest.raises(Unknown, match=rf"\({index}, 3\)"):
            await node.skip("s", index, 1)
        assert member.state == "halted" and member.halt is not None and member.halt.ordinal == 3
        with pytest.raises(Refused):
            await node.skip("s", index, 1)
        await node.skip("s", index, 3)
        await tell(c, "s", "note", "d")
        assert scribe(c, 1).written("note") == ["before", "a", "b", "c", "d"]
        # What was left out is nobody's: its payload died at its index.
        live = list(member.liveness.live_ranges(member.raft.applied))
        assert not any(one.first <= (index, 1) < one.end for one in live)
        assert any(one.first <= (index, 2) < one.end for one in live)
        await c.restart(1)
        await until(lambda: scribe(c, 1).written("note") == ["before", "a", "b", "c", "d"])


async def test_the_failing_frame_of_a_batch_is_found(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", machines=machines) as c:
        await group(c, "batch")
        member = c.member(1, "s")
        for verb in (command("note", "a"), command("note", "b"), command("boom"), command("note", "c")):
            (frame,) = encode_frame([(b"", None)] * 2, command=verb)
            c.system(1).replicas.commands.submit(member.uid, memoryview(frame), PendingReply(), 0)
        await until(lambda: member.state == "halted")
        assert member.halt is not None
        assert (member.halt.ordinal, member.halt.records) == (4, 2)
        await c.nodes[1].skip("s", member.halt.index, 5)
        assert scribe(c, 1).written("note") == ["before", "a", "a", "b", "b", "c", "c"]


async def test_a_rebuilt_machine_keeps_sessions_timers_and_payloads(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", machines=machines) as c:
        await group(c)
        system, member = c.system(1), c.member(1, "s")
        await tell(c, "s", "in", "bell", 3_600_000)
        assert (await c.nodes[1].snapshot())["taken"] == 1
        await keep(c, "s", [(b"head", b"body")])
        system.replicas.commands.propose(member, "register", 9, 1, 60_000)
        (frame,) = encode_frame([(b"", None)], command=command("note", "in session"), session=9, sequence=1)
        assert await c.nodes[1].commit(member, [frame])
        before = list(member.liveness.live_ranges(member.raft.applied))
        (frame,) = encode_frame([(b"", None)], command=command("boom"), session=9, sequence=2)
        with pytest.raises(LogyardError):
            await c.nodes[1].commit(member, [frame])
        assert member.halt is not None
        await c.nodes[1].skip("s", member.halt.index, 0)
        assert member.kept is not None and list(member.kept.timers) == ["bell"]
        assert scribe(c, 1).restored == 1 and len(scribe(c, 1).refs) == 1
        assert member.liveness.is_dead_range((member.raft.applied, 0), (member.raft.applied, 0)) is not None
        assert [one for one in before if one in member.liveness.live_ranges(before[-1].end[0] - 1)]
        # The skipped frame was one of its session's: asked for again, it is told the same and is not applied.
        for _ in range(2):
            (frame,) = encode_frame([(b"", None)], command=command("boom"), session=9, sequence=2)
            with pytest.raises(LogyardError) as caught:
                await c.nodes[1].commit(member, [frame])
            assert caught.value.code == "skipped"
        assert scribe(c, 1).written("note") == ["before", "in session"]


async def test_who_was_halted_while_it_led_rings_timers_and_ends_sessions_when_it_goes_on(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", machines=lambda name, arguments: TickingScribe()) as c:
        await group(c)
        replicas, member = c.system(1).replicas, c.member(1, "s")
        await tell(c, "s", "in", "bell", 1500)
        await replicas.heartbeats.open(member, 9, 1, 1500)
        index = await blow(c)
        replicas.effects.tick()
        replicas.effects.tick_machines()
        replicas.heartbeats.look()
        await skip(c, index)
        ticks = scribe(c, 1).written("note").count("tick")
        await until(lambda: scribe(c, 1).written("rang") == ["bell"], "the timer rings")
        await until(lambda: not (member.sessions and member.sessions.by_id), "the session ends")
        await until(lambda: scribe(c, 1).written("note").count("tick") > ticks, "it ticks")


async def test_a_fault_in_a_timer_is_skipped_like_a_command(tmp_path: Path) -> None:
    class Bell(Scribe):
        def on_timer(self, context: Context, name: str) -> Any:
            raise KeyError(name)

    async with cluster(tmp_path, 1, group="", machines=lambda name, arguments: Bell()) as c:
        await group(c)
        member = c.member(1, "s")
        await tell(c, "s", "in", "bell", 1)
        await until(lambda: member.state == "halted")
        assert member.halt is not None and "KeyError" in member.reason
        await c.nodes[1].skip("s", member.halt.index, member.halt.ordinal)
        await tell(c, "s", "note", "after")
        assert member.kept is not None and not member.kept.timers, "it would ring for ever"


@pytest.mark.parametrize("skipped_first", [False, True])
async def test_a_machine_that_is_built_anew_short_of_descriptors_is_built_later(
    tmp_path: Path, skipped_first: bool
) -> None:
    """It went on with what was built of it, and without the skip: the member stayed halted, or behind the others."""
    async with cluster(tmp_path, group="", machines=machines) as c:
        await group(c)
        if skipped_first:
            # The skip is committed before one member comes to the command.
            leader = await c.leader("s")
            held = next(number for number in c.ids if number != leader)
            c.system(held).replicas.applier.apply_all = lambda members: None  # type: ignore[method-assign]
            with pytest.raises(LogyardError):
                await tell(c, "s", "boom")
            index = c.member(leader, "s").raft.applied + 1
        else:
            index = await blow(c)
            held = await c.leader("s")
        reader = c.system(held).replicas.reader
        real = reader.log_entries
        met: list[int] = []

        def short(member: Any, first: int, last: int, most: int) -> Any:
            if last == index - 1 and len(met) < 2:
                met.append(first)
                raise Busy("the node's file descriptors or memory", 0.05)
            return real(member, first, last, most)

        reader.log_entries = short  # type: ignore[assignment,method-assign]
        await skip(c, index)
        if skipped_first:
            del c.system(held).replicas.applier.apply_all
            c.system(held).replicas.applier.apply_all((c.member(held, "s"),))
        await until(lambda: len(met) == 2, "it was built twice in vain")
        await until(lambda: c.member(held, "s").state == "running", "it goes on")
        await tell(c, "s", "note", "after")
        notes = await same(c)
        assert [note[2] for note in notes if note[1] == "note"] == ["before", "after"]

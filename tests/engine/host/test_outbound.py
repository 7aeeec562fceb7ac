"""Messages that wait for the disk: what they name may be gone when it is their turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.entry import Entry
from logyard.engine.raft.messages import APPEND, Message
from logyard.engine.replica.member import Member
from logyard.engine.replica.reader import Located, Reader
from logyard.engine.transfer.chunks import Chunks, Lease
from logyard.engine.types import Buffer
from logyard.protocol.errors import Corrupt, Gone

from .cluster import KIB, cluster, until


async def test_a_message_whose_entries_a_snapshot_let_go_meanwhile_is_dropped(tmp_path: Path) -> None:
    """The log below a snapshot is gone by design: taken for damage, it would cost a healthy leader its group."""
    async with cluster(tmp_path, 3) as c:
        await c.create()
        leader = await c.leader()
        await c.fill(leader, 20, 100)
        await c.applied()
        member, system = c.member(leader), c.system(leader)
        other = next(number for number in c.ids if number != leader)
        message = Message(APPEND, member.uid, other, leader, member.raft.term, first=2, last=5)
        await c.nodes[leader].compact()
        await c.nodes[leader].snapshot()
        await until(lambda: member.raft.log.first_index > 5 and not member.segments)
        assert not system.host.outbound.prepare(member, message)
        await until(lambda: not member.slow_sends)
        assert member.raft.mend is None and not system.repair.log_repair.known
        await c.append(leader, [(b"", b"after")])


async def test_what_waits_for_the_disk_waits_once(tmp_path: Path) -> None:
    """While answers stay away the core asks anew, again and again: the slow disk must not get more to do by that."""
    async with cluster(tmp_path, 3, payload_cache_bytes=0) as c:
        await c.create()
        await c.lead(1)
        await c.fill(1, 4, 2000)
        await c.applied()
        member, sender = c.member(1), c.system(1).host.outbound
        disk = trio.Event()
        asked = [0]
        load, defer = sender._load, sender._defer

        async def slow(member: Member, message: Message) -> list[Entry]:
            await disk.wait()
            return await load(member, message)

        def counted(member: Member, message: Message) -> bool:
            asked[0] += message.kind == APPEND and message.to == 3
            return defer(member, message)

        sender._load, sender._defer = slow, counted  # type: ignore[method-assign]
        c.partition(3)
        bodies = await c.fill(1, 12, 2000)
        c.network.heal()
        await until(lambda: member.slow_sends and member.slow_sends.get(3), "a message waits for the disk")
        for _ in range(3):
            bodies += await c.fill(1, 4, 2000)
            before = asked[0]
            await until(lambda before=before: asked[0] >= before + 4, "the core asks anew")
        # One more is being loaded.
        waiting = [at for _, one in sender._queues[3] for at in range(one.first, one.last + 1)]
        assert waiting and len(waiting) == len(set(waiting)), waiting
        disk.set()
        await c.applied()
        assert [body for _, body in await c.read(3)][-len(bodies) :] == bodies
        await until(lambda: member.slow_sends is None, "the leader takes the short way again")


async def test_a_laggard_catches_up_through_entries_far_above_the_mean(tmp_path: Path) -> None:
    """What it was sent went by the mean of what left memory last: large entries below small ones were one message above
    what a frame may be, and it stayed behind for good."""
    limits: dict[str, Any] = {"record_bytes_max": 64 * KIB, "peer_frame_bytes": 64 * KIB, "append_bytes_max": 16 * KIB}
    async with cluster(tmp_path, 3, payload_cache_bytes=0, **limits) as c:
        await c.create()
        await c.lead(1)
        await c.crash(3)
        bodies = await c.fill(1, 40, 8 * KIB)
        await c.roll(1)
        bodies += await c.fill(1, 40, 10)
        await c.roll(1)
        log, frame = c.member(1).raft.log, c.network.config.frame_bytes_max
        assert log.memory_first > 80 and log.segment_last(1, 16 * KIB) > 40 and 2 * frame < sum(map(len, bodies))
        await c.start(3)
        await c.applied()
        assert [body for _, body in await c.read(3)] == bodies


async def test_what_is_released_travels_as_a_tombstone_though_its_row_is_damaged(tmp_path: Path) -> None:
    """No peer gives what is released: the leader asked for it without end, and the follower stayed behind for good."""
    async with cluster(tmp_path, 3, payload_cache_bytes=0) as c:
        await c.create()
        await c.lead(1)
        c.partition(3)
        await c.fill(1, 6, 2000)
        await c.nodes[1].truncate("log", 3)
        await until(lambda: c.member(1).raft.applied == c.member(1).raft.commit, "the truncation is applied")
        member, reader = c.member(1), c.system(1).replicas.reader
        real = reader.payload_entries
        met: list[int] = []

        def damaged(of: Member, first: int, last: int) -> Iterator[Located]:
            for located in real(of, first, last):
                if of is member and not member.liveness.live_within((located.index, 0), (located.index + 1, 0)):
                    met.append(located.index)
                    raise Corrupt("a generation", 0, f"entry {located.index}", "others")
                yield located

        reader.payload_entries = damaged  # type: ignore[assignment,method-assign]
        c.network.heal()
        await c.applied()
        assert met and member.state == "running" and len(await c.read(3, 3)) == 3


@pytest.mark.parametrize("another", [False, True], ids=["alone", "another's transfer under way"])
async def test_a_node_that_was_promised_a_log_which_can_not_be_sent_gets_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    """After a transfer its lease keeps the log above the snapshot. Where a part of an entry there is released and gone,
    that log is of no use to it, nor to whoever is on its way to that snapshot: it was waited for until the leases were
    over."""
    async with cluster(tmp_path, 3, payload_cache_bytes=0, snapshot_stall_ms=600_000) as c:
        await c.create()
        await c.lead(1)
        await c.fill(1, 4, 2000)
        await c.applied()
        system, member = c.system(1), c.member(1)
        chunks, owner, base = system.transfers.chunks, (member.uid, 3), member.raft.applied
        c.partition(3)
        # A transfer to it ended, and the next snapshot was taken meanwhile.
        chunks.leases[owner] = Lease(base, [bytes(16)], 0, 1e9)
        if another:
            # Of a node that is far behind.
            caught_up = Chunks._has_caught_up
            monkeypatch.setattr(Chunks, "_has_caught_up", lambda *of: of[2] != 9 and caught_up(*of))
            chunks.leases[member.uid, 9] = Lease(base, [bytes(16)], 0, 1e9)
            member.begin_transfer(9)
        await c.fill(1, 4, 2000)
        await c.nodes[1].compact()
        await c.nodes[1].snapshot()
        chunks.sent(*owner)
        gone = member.raft.log.last_index - 1
        assert member.snapshot_index > gone > member.raft.log.first_index == base + 1
        whole = Reader.whole

        async def some(reader: Reader, of: Member, located: Sequence[Located]) -> list[tuple[Buffer, ...]]:
            if of is member and any(one.index == gone for one in located):
                raise Gone(f"a part of entry {gone} is released")
            return await whole(reader, of, located)

        monkeypatch.setattr(Reader, "whole", some)
        c.network.heal()
        await c.applied()
        assert c.member(3).snapshot_index > gone
        assert not another or chunks.leases[member.uid, 9].names, "what it was offered is there"

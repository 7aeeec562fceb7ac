"""Messages that wait for the disk: what they name may be gone when it is their turn."""

from __future__ import annotations

from pathlib import Path

from logyard.engine.raft.messages import APPEND, Message

from .cluster import cluster, until


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
        assert not system.sender.prepare(member, message)
        await until(lambda: not member.slow_sends)
        assert member.raft.mend is None and not system.damages.known
        await c.append(leader, [(b"", b"after")])

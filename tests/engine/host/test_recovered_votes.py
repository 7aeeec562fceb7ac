"""What a process promised before a restart is stored before the file that says so is given up, also when the group
wrote nothing since: found by the simulator (a member voted twice in one term)."""

from __future__ import annotations

from pathlib import Path

from logyard.engine.raft.messages import TRANSFER, VOTE, Message

from .cluster import cluster


async def test_a_vote_without_entries_outlives_the_file_that_holds_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.append(await c.leader(), [(b"", b"x")])
        await c.applied()
        await c.roll(3)
        c.partition(3)
        member = c.member(3)
        raft = member.raft
        term = raft.term + 5
        last = raft.log.last_index
        vote = Message(VOTE, member.uid, 3, 2, term, last, raft.log.last_term, context=TRANSFER)
        c.system(3).inbound.on_messages(2, [vote])
        assert (raft.term, raft.vote) == (term, 2)
        # Its only record of that is in the file in use; then that file gets its segment in another life.
        await c.restart(3)
        assert (c.member(3).raft.term, c.member(3).raft.vote) == (term, 2)
        await c.roll(3)
        await c.restart(3)
        assert (c.member(3).raft.term, c.member(3).raft.vote) == (term, 2)

"""When a command is answered, which one goes first, and reads that wait for an index or for a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio

from logyard.engine.replica.proposals import LOW_BATCH, PLACE
from logyard.machines.log.command import APPEND, APPEND_REPLY
from logyard.protocol.errors import BadRequest, Busy, LogyardError, NotLeader, Refused
from logyard.protocol.frame import encode_frame
from logyard.protocol.pending import PendingReply

from .cluster import Cluster, cluster, raft_of, until


def submit(run: Cluster, number: int, body: bytes, name: str = "log", **options: Any) -> PendingReply[bytes]:
    answer: PendingReply[bytes] = PendingReply()
    frame = memoryview(b"".join(encode_frame([(b"", body)], command=APPEND)))
    run.system(number).replicas.commands.submit(run.member(number, name).uid, frame, answer, 1, **options)
    return answer


async def test_an_early_answer_names_a_place_that_is_confirmed_later(tmp_path: Path) -> None:
    async with cluster(tmp_path) as run:
        leader = await run.leader()
        for _ in range(20):
            index, term = PLACE.unpack(await submit(run, leader, b"x", early=True).wait(trio.Event))
            assert run.member(leader).raft.log.term(index) == term
        for number in run.ids:
            assert await run.nodes[number].wait_applied("log", index, term, 10.0) >= index
            assert run.log(number).end == 20
        assert not run.member(leader).proposals.early


async def test_an_early_answer_of_an_overwritten_entry_is_never_confirmed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as run:
        await run.lead(1)
        run.partition(1)
        index, term = PLACE.unpack(await submit(run, 1, b"lost", early=True).wait(trio.Event))
        with pytest.raises(Busy):
            await run.nodes[1].wait_applied("log", index, term, 0.01)
        new = await run.leader(among=[2, 3])
        for body in (b"a", b"b", b"c"):
            await run.append(new, [(b"", body)])
        run.network.heal()
        await run.applied()
        for number in run.ids:
            with pytest.raises(Refused):
                await run.nodes[number].wait_applied("log", index, term, 10.0)
            assert [body for _, body in await run.read(number)] == [b"a", b"b", b"c"]


async def test_low_priority_waits_for_the_others_but_not_for_ever(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as run:
        low = [submit(run, 1, b"low%d" % number, low=True) for number in range(2 * LOW_BATCH + 1)]
        normal = [submit(run, 1, b"normal%d" % number) for number in range(5)]
        last = [APPEND_REPLY.unpack(await answer.wait(trio.Event))[0] for answer in normal]
        first = [APPEND_REPLY.unpack(await answer.wait(trio.Event))[0] for answer in low]
        assert last == [0, 1, 2, 3, 4] and first == list(range(5, 5 + len(low)))


async def test_one_round_serves_all_reads_that_wait(tmp_path: Path) -> None:
    async with cluster(tmp_path) as run:
        leader = await run.leader()
        await run.append(leader, [(b"", b"x")])
        await run.nodes[leader].bounds("log", "linearizable")
        reads = raft_of(run.member(leader)).reads
        assert reads is not None
        before, ends = reads.last_number, []

        async def read() -> None:
            ends.append((await run.nodes[leader].bounds("log", "linearizable"))["end"])

        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(read)
        assert ends == [1] * 200
        assert reads.last_number - before <= 2, "one round, and one for those who came while it was under way"


async def test_queries_are_answered_by_the_machine(tmp_path: Path) -> None:
    async with cluster(tmp_path) as run:
        leader = await run.leader()
        await run.append(leader, [(b"", b"x")] * 3)
        asked = msgpack.packb(["bounds"])
        for consistency in ("leader", "linearizable"):
            assert msgpack.unpackb(await run.nodes[leader].query("log", asked, consistency)) == [0, 3]
        index = run.member(leader).raft.applied
        for number in run.ids:
            found = await run.nodes[number].query("log", asked, "local", index)
            assert msgpack.unpackb(found) == [0, 3], "a member waits until it has applied what is asked for"
        follower = next(number for number in run.ids if number != leader)
        with pytest.raises(NotLeader):
            await run.nodes[follower].query("log", asked)
        for bad in (b"\xc1", msgpack.packb(["what"])):
            with pytest.raises(LogyardError) as caught:
                await run.nodes[leader].query("log", bad)
            assert caught.value.code == "bad_request"
        run.member(leader).machine = object()  # type: ignore[assignment]
        with pytest.raises(BadRequest):
            await run.nodes[leader].query("log", asked)


async def test_a_members_own_answer_to_a_sessions_frame(tmp_path: Path) -> None:
    async with cluster(tmp_path) as run:
        leader = await run.leader()
        await run.nodes[leader].open_session("log", 5, 6, 60_000)
        answer: PendingReply[bytes] = PendingReply()
        frame = memoryview(b"".join(encode_frame([(b"", b"x")], command=APPEND, session=5, sequence=1)))
        run.system(leader).replicas.commands.submit(run.member(leader).uid, frame, answer, 1)
        want = await answer.wait(trio.Event)
        for number in run.ids:
            assert await run.nodes[number].session_reply("log", 5, 1, 10.0) == want
            with pytest.raises(Busy):
                await run.nodes[number].session_reply("log", 5, 2, 0.01)
        await until(lambda: not run.member(leader).proposals.under_way, "nothing is under way")

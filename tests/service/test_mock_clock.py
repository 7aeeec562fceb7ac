"""The host under a clock that jumps: what takes minutes is tried in moments, and at its exact times."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path

import pytest
import trio
import trio.testing

from logyard.machines.log.command import APPEND
from logyard.protocol.errors import Busy, LogyardError, NotLeader, Unknown

from .virtual_time import LIMITS, Replies, VirtualCluster, client, frame, virtual_cluster

TTL_S = 60.0
LIVENESS_S = LIMITS["liveness_timeout_ms"] / 1000
ELECTION_S = LIMITS["election_ticks"] * LIMITS["tick_ms"] / 1000
ELECTED_S = LIVENESS_S + 4 * ELECTION_S
"""Two timeouts at their longest; no election is split here (`virtual_time.apart`)."""
Clock = trio.testing.MockClock


def terms(found: VirtualCluster, name: str) -> set[int]:
    return {found.run.member(number, name).raft.term for number in found.run.nodes}


async def test_a_session_ends_when_its_client_was_silent_for_its_time(tmp_path: Path, mock_clock: Clock) -> None:
    async with virtual_cluster(tmp_path, mock_clock) as found:
        leader = await found.create("g")
        node = found.run.nodes[leader]
        await node.open_session("g", 7, 70, int(TTL_S * 1000))
        await node.open_session("g", 8, 80, int(TTL_S * 1000))
        table = found.run.member(leader, "g").sessions
        assert table is not None
        for _ in range(3):
            await trio.sleep(TTL_S / 2)
            node.heartbeat(80)
        assert 7 not in table.by_id and 8 in table.by_id
        took = await found.until(lambda: 8 not in table.by_id, 2 * TTL_S)
        assert TTL_S <= took <= TTL_S + 1
        sink = Replies()
        found.submit(leader, "g", sink, 1, frame(b"late", command=APPEND, session=8, sequence=1))
        await found.until(lambda: sink.found)
        assert sink.code(1) == "session_expired"


async def test_a_new_leader_gives_sessions_their_whole_time_again(tmp_path: Path, mock_clock: Clock) -> None:
    async with virtual_cluster(tmp_path, mock_clock) as found:
        leader = await found.create("g")
        await found.run.nodes[leader].open_session("g", 7, 70, int(TTL_S * 1000))
        await trio.sleep(TTL_S * 0.9)
        await found.stop(leader)
        await found.until(lambda: found.leaders("g"))
        table = found.run.member(found.leaders("g")[0], "g").sessions
        assert table is not None
        await trio.sleep(TTL_S * 0.9)
        assert 7 in table.by_id
        await found.until(lambda: 7 not in table.by_id, TTL_S)


async def test_nobody_is_elected_while_the_leader_is_heard(tmp_path: Path, mock_clock: Clock) -> None:
    async with virtual_cluster(tmp_path, mock_clock) as found:
        leader = await found.create("g")
        # A member that nobody asked for its vote hears of the term from the leader.
        await found.until(lambda: len(terms(found, "g")) == 1)
        before = terms(found, "g")
        await trio.sleep(100)
        assert terms(found, "g") == before and found.leaders("g") == [leader]


async def test_a_leader_that_is_cut_off_is_replaced_in_time_and_steps_down(tmp_path: Path, mock_clock: Clock) -> None:
    async with virtual_cluster(tmp_path, mock_clock) as found:
        leader = await found.create("g")
        found.run.partition(leader)
        took = await found.until(lambda: [one for one in found.leaders("g") if one != leader])
        assert LIVENESS_S - 0.3 <= took <= ELECTED_S
        await found.until(lambda: leader not in found.leaders("g"), LIVENESS_S)
        with pytest.raises(NotLeader):
            await found.run.nodes[leader].query("g", b"\x91\xa6bounds", "linearizable")
        found.run.heal()
        await found.until(lambda: len({found.run.member(one, "g").raft.leader for one in found.run.ids}) == 1)
        assert leader not in found.leaders("g") and len(found.leaders("g")) == 1


async def test_who_is_refused_for_want_of_room_is_let_in_when_it_was_told(tmp_path: Path, mock_clock: Clock) -> None:
    async with virtual_cluster(tmp_path, mock_clock, group_inflight_bytes=64 << 10) as found:
        leader = await found.create("g")
        others = [number for number in found.run.ids if number != leader]
        found.run.partition(leader)
        sink, sent, busy = Replies(), 0, None
        while busy is None:
            try:
                found.submit(leader, "g", sink, sent, frame(b"%d" % sent + bytes(4000), command=APPEND))
                sent += 1
            except Busy as error:
                busy = error
        assert 5 < sent < 20 and not sink.found and busy.retry_after > 0
        await trio.sleep(busy.retry_after)
        with pytest.raises(Busy):
            # Nothing was settled, so there is no more room than before.
            found.submit(leader, "g", sink, sent, frame(bytes(4000), command=APPEND))
        found.run.heal()
        await found.until(lambda: len(sink.found) == sent)
        assert others and all(not sink.code(one) for one in range(sent))
        found.submit(found.leaders("g")[0], "g", sink, sent, frame(b"more", command=APPEND))
        await found.until(lambda: sent in sink.found)
        assert not sink.code(sent)


async def test_a_client_waits_as_long_as_it_is_told_and_gets_through(tmp_path: Path, mock_clock: Clock) -> None:
    async with virtual_cluster(tmp_path, mock_clock, group_inflight_bytes=64 << 10) as found:
        await found.create("g")
        async with client(found, timeout=120.0) as yard:
            log = yard.log("g")
            offsets: list[int] = []

            async def append(number: int) -> None:
                offsets.append(await log.append(b"", b"%d;" % number + bytes(8000)))

            async with trio.open_nursery() as nursery:
                for number in range(60):
                    nursery.start_soon(append, number)
            assert sorted(offsets) == list(range(60))


async def test_a_lease_takes_its_keys_along_within_a_second_of_its_time(tmp_path: Path, mock_clock: Clock) -> None:
    async with virtual_cluster(tmp_path, mock_clock) as found:
        leader = await found.create("kv", "kv")
        async with client(found, timeout=30.0) as yard:
            kv = yard.kv("kv")
            lease = await kv.grant(30)
            await kv.put(b"short", b"x", lease=lease.id)
            await kv.put(b"long", b"x")
            await trio.sleep(20)
            assert await kv.keep_alive(lease.id) == 30
            kept = trio.current_time()
            await trio.sleep(29)
            assert await kv.get(b"short") is not None
            while await kv.get(b"short") is not None:
                await trio.sleep(0.05)
            assert 30 <= trio.current_time() - kept <= 31.1
            other = await kv.grant(30)
            await kv.put(b"moved", b"x", lease=other.id)
            granted = trio.current_time()
            await found.stop(leader)
            await trio.sleep(20)
            assert await kv.get(b"moved") is not None and await kv.get(b"long") is not None
            while await kv.get(b"moved") is not None:
                await trio.sleep(0.05)
            # Whoever leads next gives a lease at least what was left of it, and not much more than all of it again.
            assert 30 <= trio.current_time() - granted <= 30 + 30 + ELECTED_S


async def test_a_node_that_is_told_to_end_leaves_no_client_waiting(tmp_path: Path, mock_clock: Clock) -> None:
    async with virtual_cluster(tmp_path, mock_clock) as found:
        leader = await found.create("g")
        async with client(found, timeout=600.0) as yard, client(found, timeout=600.0, retry=False) as other:
            log = yard.log("g")
            assert await log.append(b"", b"first") == 0
            assert await other.log("g").append(b"", b"second") == 1
            found.run.partition(leader)
            ended: dict[str, object] = {}

            async def wait(name: str, call: Awaitable[object]) -> None:
                try:
                    ended[name] = await call
                except LogyardError as error:
                    ended[name] = error

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, "append", log.append(b"", b"third"))
                nursery.start_soon(wait, "poll", log.poll(2, wait=300))
                nursery.start_soon(wait, "once", other.log("g").append(b"", b"fourth"))
                await trio.sleep(0.1)
                assert not ended
                began = trio.current_time()
                await found.stop(leader)
            # Nobody waited for a timeout of minutes: the connection's end told them, and another leader answered.
            assert trio.current_time() - began < ELECTED_S + 10
            assert isinstance(ended["append"], int) and ended["append"] >= 2
            assert isinstance(ended["once"], Unknown | int)
            assert not isinstance(ended["poll"], LogyardError)
        found.run.heal()
        await found.run.start(leader)
        await found.until(lambda: len({found.run.machine(one, "g").end for one in found.run.ids}) == 1)
        assert found.run.machine(leader, "g").end >= 3

"""What was acknowledged is there, on every member, after every crash (laws 2 and 3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio

from logyard.protocol.errors import LogyardError

from .cluster import KIB, MIB, Replies, cluster, frame, until


async def test_every_member_serves_what_one_acknowledged(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        leader = await c.leader()
        records = [
            (b"small", b"x" * 100),
            (b"none", None),
            (b"empty", b""),
            (b"large", b"L" * 70 * KIB),
            (b"", b"tail"),
        ]
        assert await c.append(leader, records) == range(0, 5)
        assert await c.append(leader, [(b"next", b"y")]) == range(5, 6)
        await c.applied()
        for number in c.ids:
            assert await c.read(number) == [*records, (b"next", b"y")]
            assert await c.read(number, 3) == [*records[3:], (b"next", b"y")]


async def test_a_leader_that_dies_with_appends_in_flight_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        leader = await c.leader()
        acknowledged: dict[int, bytes] = {}

        async def write(tag: int) -> None:
            for number in range(200):
                body = b"%d-%d" % (tag, number)
                try:
                    with trio.move_on_after(1):
                        acknowledged[(await c.append(leader, [(b"", body)])).start] = body
                except (LogyardError, KeyError):
                    return

        async with trio.open_nursery() as nursery:
            for tag in range(8):
                nursery.start_soon(write, tag)
            await until(lambda: len(acknowledged) > 40)
            await c.crash(leader)
        new = await c.leader()
        await c.append(new, [(b"", b"end")])
        await c.start(leader)
        await c.applied()
        for number in c.ids:
            records = await c.read(number)
            assert all(records[offset][1] == body for offset, body in acknowledged.items())
            assert records[-1] == (b"", b"end")


async def test_all_crash_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        leader = await c.leader()
        bodies = await c.fill(leader, 30, 500)
        for number in c.ids:
            await c.crash(number)
        for number in c.ids:
            await c.start(number)
        await c.append(await c.leader(), [(b"", b"after")])
        await c.applied()
        for number in c.ids:
            assert [body for _, body in await c.read(number)] == [*bodies, b"after"]


async def test_two_restarts_give_the_same_state(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        await c.fill(1, 40, 40 * KIB)
        await c.nodes[1].truncate("log", 7)
        await c.nodes[1].snapshot()
        await c.fill(1, 5, 100)
        states = []
        for _ in range(2):
            await c.restart(1)
            await c.leader()
            member, system = c.member(1), c.system(1)
            await until(lambda raft=member.raft: raft.applied == raft.log.last_index)
            # Every file but the current one has its segment.
            await until(
                lambda one=system: list(filter(one.storage.location.is_open, dict(one.wal.files))) == [one.wal.current]
            )
            wal = {number: file.live for number, file in system.storage.location.files.items()}
            states.append((member.machine.snapshot(), member.liveness, member.segments, wal, await c.read(1, 7)))
        assert states[0] == states[1]


async def test_law_7_more_frames_than_an_entry_can_count_are_several_entries(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"entry_bytes_max": 16 * MIB, "entry_records_max": 1 << 18, "wal_file_bytes": 64 * MIB}
    async with cluster(tmp_path, 1, **limits) as c:
        replies, one = Replies(), frame()
        for number in range(66_000):
            c.system(1).replicas.commands.submit(c.member(1).uid, one, replies, number)
        await until(lambda: len(replies.found) == 66_000 or 1 in c.failures, "replies")
        assert c.log(1).end == 66_000 and not any(status for _, status in replies.found)

"""Payloads in pieces: stored once, bound whole or not at all, read across pieces, and nothing of them leaks.

Pieces are small here: what counts is where they lie, not how long they are.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import trio

from logyard.engine.machine import PayloadRange, PayloadRef, Position, Reject, Release
from logyard.engine.replica.uploads import PIECE_COUNTS, Uploads, runs
from logyard.machines.log.command import APPEND, APPEND_REPLY
from logyard.protocol.errors import BadRequest, Busy, LogyardError, NotLeader, Unknown
from logyard.protocol.frame import ABSENT, BINDS, LARGE, PIECE, PIECED, UNIFORM, Buffer, check_frame, encode_parts
from logyard.protocol.pending import PendingReply
from logyard.protocol.records import records_of, split_blocks
from logyard.service.check.run import check_directory

from .cluster import KIB, Cluster, cluster, payload_books, plain, until

SESSION = 4242
TTL = 60_000
SIZE = 20 * KIB


def piece(sequence: int, upload: int, offset: int, body: bytes | None, session: int = SESSION) -> memoryview:
    """A piece's frame; without a body it gives the upload up."""
    small = [body] if body is not None and len(body) < LARGE else []
    large: list[Buffer] = [body] if body is not None and len(body) >= LARGE else []
    table = [0, ABSENT if body is None else len(body)]
    region = PIECED.pack(upload, offset)
    return memoryview(
        b"".join(
            encode_parts(table, [b""], small, large, region, flags=UNIFORM | PIECE, session=session, sequence=sequence)
        )
    )


def bind(
    sequence: int, upload: int, size: int, head: bytes = b"m", session: int = SESSION, command: bytes = APPEND
) -> memoryview:
    region = PIECED.pack(upload, size) + command
    table = [len(head), ABSENT]
    return memoryview(
        b"".join(encode_parts(table, [head], [], [], region, flags=UNIFORM | BINDS, session=session, sequence=sequence))
    )


async def send(c: Cluster, number: int, frame: memoryview, name: str = "log") -> bytes:
    answer: PendingReply[bytes] = PendingReply()
    c.system(number).replicas.commands.submit(c.member(number, name).uid, frame, answer, 1)
    with trio.fail_after(20):
        return await answer.wait(trio.Event)


async def insist(c: Cluster, frame: memoryview) -> bytes:
    while True:
        try:
            return await send(c, await c.leader(), frame)
        except (NotLeader, Unknown, Busy):
            await trio.sleep(0.002)


async def begin(c: Cluster, session: int = SESSION) -> int:
    leader = await c.leader()
    await c.nodes[leader].open_session("log", session, 77, TTL)
    return leader


def cut(body: bytes, size: int) -> list[tuple[int, bytes]]:
    return [(at, body[at : at + size]) for at in range(0, len(body), size)]


async def upload(c: Cluster, first: int, number: int, body: bytes, size: int = SIZE) -> int:
    """Upload and bind with sequences from `first` on; the offset."""
    for sequence, (at, part) in enumerate(cut(body, size), first):
        assert await insist(c, piece(sequence, number, at, part)) == b""
    last = first + len(cut(body, size))
    return int(APPEND_REPLY.unpack(await insist(c, bind(last, number, len(body))))[0])


async def arrived(c: Cluster, leader: int) -> None:
    """Until what the leader appended last is with another one, too."""
    last = c.member(leader).raft.log.last_index
    others = [number for number in c.ids if number != leader]
    await until(lambda: any(c.member(one).raft.log.last_index > last for one in others))


async def whole(c: Cluster, node: int, offset: int, size: int) -> bytes:
    """A payload, read in ranges that cut pieces."""
    step = 3 * SIZE // 2 + 1
    parts = [
        plain((await c.nodes[node].read_body("log", offset, at, min(size, at + step)))[1])
        for at in range(0, size, step)
    ]
    return b"".join(parts)


def live_bytes(c: Cluster, number: int) -> int:
    books = payload_books(c.system(number))
    return int(sum(books["wal"].values()) + sum(books["generations"].values()))


async def check(c: Cluster, path: Path) -> None:
    """Snapshots agree with what the machine needs; a start counts what was counted along the way; files are good."""
    for number in c.ids:
        assert not c.system(number).transfers.snapshots.mismatches
        await c.roll(number)
        books = payload_books(c.system(number))
        last = c.member(number).raft.log.last_index
        await c.restart(number)
        member = c.member(number)
        await until(lambda member=member, last=last: member.raft.applied >= last, "it applies again")
        assert payload_books(c.system(number)) == books
    await c.close()
    for number in c.ids:
        report = await trio.to_thread.run_sync(check_directory, path / f"node-{number}")
        assert report["ok"], report


# The table


def ref(index: int, size: int = 10) -> PayloadRef:
    return PayloadRef(1, index, 0, 1, size, b"h" * 16)


def test_an_upload_is_bound_whole_or_not_at_all() -> None:
    table = Uploads()
    assert isinstance(table.bind((1, 1), 10), Reject), "nobody began it"
    assert table.add((1, 1), 10, ref(3)) is None and table.add((1, 1), 0, ref(5)) is None
    assert isinstance(table.add((1, 1), 0, ref(6)), Reject), "that place is taken"
    assert isinstance(table.add((1, 1), 4 << 30, ref(6)), Reject), "behind the end of the largest payload"
    assert table.add((1, 2), 5, ref(7)) is None
    for size in (0, 10, 19, 21):
        assert isinstance(table.bind((1, 1), size), Reject)
    copy = Uploads.decode(1, table.encode())
    for one in (table, copy):
        assert isinstance(one.bind((1, 2), 15), Reject), "it does not begin at 0"
        assert one.bind((1, 1), 20) == (ref(5), ref(3)) and one.bytes == 10
        assert isinstance(one.bind((1, 1), 20), Reject), "it is bound already"
        assert one.end([1]) == [Release(Position(7, 0), Position(8, 0))] and not one.open and not one.bytes
        assert one.discarded == [(7, 8)] and not one.forget(Position(7, 0)) and one.forget(Position(8, 0))


def test_a_piece_that_overlaps_another_makes_the_upload_useless() -> None:
    table = Uploads()
    assert table.add((1, 1), 0, ref(3)) is None and table.add((1, 1), 5, ref(4)) is None
    for size in (10, 15, 20):
        assert isinstance(table.bind((1, 1), size), Reject)


def test_an_end_of_a_session_goes_through_the_table_once() -> None:
    """It is one step of apply on every member, and again at each replay."""
    uploads, others = 60_000, 100
    table = Uploads()
    for number in range(uploads):
        table.add((2 + number % 2, number), 0, ref(2 * number))
    for number in range(others):
        table.add((9, 1), number * 10, ref(2 * uploads + number))
    began = time.process_time()
    released = table.end([2, 2, 4])
    released += table.end([3])
    assert time.process_time() - began < 5, "it took half a minute"
    assert sorted(one.first.index for one in released) == list(range(0, 2 * uploads, 2))
    assert table.discarded == [(index, index + 1) for index in range(0, 2 * uploads, 2)]
    assert table.indexes == list(range(2 * uploads, 2 * uploads + others)) and table.bytes == others * 10
    began = time.process_time()
    claims = [claim for at in range(uploads) for claim in table.claims(range_of(2 * at, 2 * at + 2))]
    assert time.process_time() - began < 5, "nor is the rest of the table gone through for each range of a machine's"
    assert claims == [range_of(2 * at + 1, 2 * at + 2) for at in range(uploads)]
    assert list(table.open) == [(9, 1)] and not table.is_full((9, 1))
    assert table.counted == others * PIECE_COUNTS and Uploads.decode(1, table.encode()).counted == table.counted


def range_of(first: int, end: int) -> PayloadRange:
    return PayloadRange(Position(first, 0), Position(end, 0))


def test_releases_spare_unbound_pieces() -> None:
    table = Uploads()
    for index in (4, 5, 9):
        table.add((1, 1), index * 10, ref(index))

    def spared(first: tuple[int, int], end: tuple[int, int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        return [(tuple(a), tuple(b)) for a, b in table.spared(Position(*first), Position(*end))]  # type: ignore[misc]

    assert spared((1, 0), (12, 3)) == [((1, 0), (4, 0)), ((6, 0), (9, 0)), ((10, 0), (12, 3))]
    assert spared((4, 0), (10, 0)) == [((6, 0), (9, 0))] and spared((4, 0), (6, 0)) == []
    assert spared((6, 2), (9, 0)) == [((6, 2), (9, 0))] and spared((9, 0), (9, 1)) == []
    table.discard([ref(20), ref(21), ref(30)])
    claims = list(table.claims(PayloadRange(Position(1, 0), Position(30, 0))))
    assert claims == [((1, 0), (20, 0)), ((22, 0), (30, 0))]
    assert list(runs([1, 2, 3, 7, 9, 10])) == [(1, 4), (7, 8), (9, 11)] and not list(runs([]))


@pytest.mark.parametrize(
    "frame",
    [
        piece(1, 1, 0, b"x", session=0),
        piece(1, 1, 0, b""),
        piece(1, 1, 0, b"x" * (1 << 20)),
        bind(1, 1, 10, session=0),
        memoryview(b"".join(encode_parts([1, 1], [b"m"], [b"x"], [], PIECED.pack(1, 0), flags=5, session=1))),
        memoryview(b"".join(encode_parts([0, 1], [b""], [b"x"], [], PIECED.pack(1, 0) + b"c", flags=5, session=1))),
        memoryview(
            b"".join(encode_parts([0, 1] * 2, [b""] * 2, [b"x"] * 2, [], PIECED.pack(1, 0), flags=5, session=1))
        ),
        memoryview(b"".join(encode_parts([0, 1], [b""], [b"x"], [], b"short", flags=5, session=1))),
        memoryview(b"".join(encode_parts([0, 1], [b""], [b"x"], [], PIECED.pack(1, 0), flags=13, session=1))),
        memoryview(b"".join(encode_parts([1, 1], [b"m"], [b"x"], [], PIECED.pack(1, 1) + APPEND, flags=9, session=1))),
    ],
)
def test_hostile_frames_are_refused_before_they_are_kept(frame: memoryview) -> None:
    with pytest.raises(BadRequest):
        check_frame(frame)


# A cluster


async def test_a_payload_in_pieces_is_read_from_every_member_in_every_home(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        leader = await begin(c)
        body = random.Random(1).randbytes(5 * SIZE + 77)
        await c.append(leader, [(b"before", b"b")])
        assert await upload(c, 1, 9, body) == 1
        assert (await c.append(leader, [(b"after", b"a")])).start == 2
        await c.applied()

        async def read_all() -> None:
            for number in c.ids:
                assert await whole(c, number, 1, len(body)) == body
                assert await c.read(number) == [(b"before", b"b"), (b"m", body), (b"after", b"a")]
                assert await c.read(number, 1, 1) == [(b"m", body)]

        await read_all()
        for number in c.ids:
            assert c.member(number).uploads is None or not c.member(number).uploads.open  # type: ignore[union-attr]
            await c.roll(number)
        await read_all()
        for number in c.ids:
            await c.nodes[number].snapshot()
            await c.nodes[number].compact()
        await read_all()
        await check(c, tmp_path)


async def test_a_poll_brings_a_payload_along_only_if_it_fits(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        await begin(c)
        body = b"x" * (3 * SIZE)
        await c.append(1, [(b"small", b"s")])
        await upload(c, 1, 1, body)
        await c.append(1, [(b"last", b"l")])

        async def poll(most: int, bodies: bool = True) -> list[tuple[bytes, int, bool, bool]]:
            _, blocks = await c.nodes[1].poll("log", 0, 100, most, 0.0, bodies, "local")
            found = [one for block in split_blocks(b"".join(blocks)) for one in records_of(block)]
            return [(one.metadata, one.size, one.view is not None, one.left_out) for one in found]

        fits = [(b"small", 1, True, False), (b"m", 3 * SIZE, True, False), (b"last", 1, True, False)]
        assert await poll(4 * SIZE) == fits
        assert await poll(3 * SIZE) == fits[:1], "it fits into the next page"
        assert await poll(2 * SIZE) == [fits[0], (b"m", 3 * SIZE, False, True), fits[2]], "it fits into none"
        assert [(size, left) for _, size, _, left in await poll(4 * SIZE, False)] == [
            (1, False),
            (3 * SIZE, False),
            (1, False),
        ]
        with pytest.raises(LogyardError):
            await c.nodes[1].read_body("log", 1, 0, 3 * SIZE + 1)


async def test_a_leader_crash_in_the_middle_stores_no_piece_twice(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await begin(c)
        body = random.Random(2).randbytes(8 * SIZE)
        frames = [piece(n, 3, at, part) for n, (at, part) in enumerate(cut(body, SIZE), 1)]
        for number, frame in enumerate(frames):
            if number == 4:
                # The answer is lost with the leader, the piece is not.
                leader = await c.leader()
                c.system(leader).replicas.commands.submit(c.member(leader).uid, frame, PendingReply(), 1)
                await arrived(c, leader)
                await c.crash(leader)
            assert await insist(c, frame) == b""
            assert await insist(c, frame) == b"", "a copy has the same answer"
        assert APPEND_REPLY.unpack(await insist(c, bind(9, 3, len(body))))[0] == 0
        await c.start(leader)
        await c.applied()
        for number in c.ids:
            assert await whole(c, number, 0, len(body)) == body
            await c.roll(number)
        overhead = 8 * 8 + 9
        assert {live_bytes(c, number) for number in c.ids} == {len(body) + overhead}, "each piece once, and no more"
        await check(c, tmp_path)


async def test_unbound_pieces_end_with_their_session_or_when_given_up(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        leader = await begin(c)
        await c.nodes[leader].open_session("log", SESSION + 1, 78, TTL)
        await c.append(leader, [(b"", b"kept")])
        for number in (1, 2):
            for at in range(3):
                await insist(c, piece(3 * number + at, number, at * SIZE, b"p" * SIZE))
        for at in range(3):
            await insist(c, piece(1 + at, 1, at * SIZE, b"q" * SIZE, SESSION + 1))
        await c.append(leader, [(b"", b"too")])
        # A truncation passes over all of them.
        assert await c.nodes[leader].truncate("log", 1) == 1
        await insist(c, piece(20, 1, 0, None))
        await c.applied()
        for number in c.ids:
            table = c.member(number).uploads
            assert table is not None and table.bytes == 6 * SIZE and len(table.open) == 2
            await c.nodes[number].snapshot()
            assert not c.system(number).transfers.snapshots.mismatches
        body = b"q" * (3 * SIZE)
        await insist(c, bind(4, 1, len(body), session=SESSION + 1))
        await c.nodes[await c.leader()].close_session("log", SESSION)
        await c.applied()
        for number in c.ids:
            table = c.member(number).uploads
            assert table is not None and not table.open and not table.bytes
            assert await whole(c, number, 2, len(body)) == body
            await c.nodes[number].snapshot()
            assert not c.system(number).transfers.snapshots.mismatches
            await c.roll(number)
            assert len(body) <= live_bytes(c, number) < len(body) + 200
        await c.nodes[await c.leader()].truncate("log", 3)
        await c.applied()
        for number in c.ids:
            await c.roll(number)
            assert live_bytes(c, number) < 100
        await check(c, tmp_path)


async def test_a_binding_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        await begin(c)
        await c.append(1, [(b"", b"kept")])
        for number, frame in enumerate(
            [
                bind(10, 7, SIZE),
                bind(11, 1, SIZE + 1),
                bind(12, 2, SIZE, command=b"nonsense"),
                bind(13, 3, SIZE, session=99),
            ]
        ):
            await insist(c, piece(number + 1, number, 0, b"p" * SIZE))
            with pytest.raises(LogyardError):
                await send(c, 1, frame)
        await c.nodes[1].close_session("log", SESSION)
        await c.nodes[1].snapshot()
        assert not c.system(1).transfers.snapshots.mismatches
        await c.roll(1)
        assert live_bytes(c, 1) < 200
        assert await c.read(1) == [(b"", b"kept")]
        await check(c, tmp_path)


async def test_unfinished_uploads_have_a_budget(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group_upload_bytes=1 << 20) as c:
        await begin(c)
        body = b"p" * (300 * KIB)
        for number in range(3):
            await send(c, 1, piece(number + 1, 1, number * len(body), body))
        with pytest.raises(Busy, match="unfinished uploads"):
            await send(c, 1, piece(4, 2, 0, body))
        await send(c, 1, piece(5, 1, 0, None))
        assert await send(c, 1, piece(4, 2, 0, body)) == b""


async def test_a_laggard_gets_bound_and_unbound_pieces_with_the_snapshot(tmp_path: Path) -> None:
    async with cluster(tmp_path, snapshot_entries=16) as c:
        leader = await begin(c)
        away = next(number for number in c.ids if number != leader)
        await c.crash(away)
        bound, rest = random.Random(3).randbytes(4 * SIZE), random.Random(4).randbytes(4 * SIZE)
        for sequence, (at, part) in enumerate(cut(rest, SIZE)[:3], 1):
            await insist(c, piece(sequence, 1, at, part))
        await c.append(leader, [(b"", b"first")])
        assert await upload(c, 10, 2, bound) == 1
        # The record's pieces lie before what stays, among what goes.
        await c.fill(leader, 20, 100)
        await c.nodes[leader].truncate("log", 1)
        await c.applied(among=[number for number in c.ids if number != away])
        for number in c.nodes:
            await c.nodes[number].snapshot()
            await c.roll(number)
        await c.start(away)
        await c.applied()
        assert c.member(away).snapshot_index, "it came by snapshot"
        assert await whole(c, away, 1, len(bound)) == bound
        await insist(c, piece(4, 1, 3 * SIZE, rest[3 * SIZE :]))
        offset = int(APPEND_REPLY.unpack(await insist(c, bind(5, 1, len(rest))))[0])
        await c.applied()
        for number in c.ids:
            assert await whole(c, number, offset, len(rest)) == rest
        await check(c, tmp_path)


async def test_the_offline_check_knows_pieces_that_no_record_owns(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await begin(c)
        for number, at in ((1, 0), (2, SIZE), (3, 2 * SIZE)):
            await insist(c, piece(number, 1, at, b"p" * SIZE))
        await c.append(1, [(b"", b"r" * SIZE)])
        await c.roll(1)
        await c.nodes[1].snapshot()
        await insist(c, piece(4, 1, 3 * SIZE, b"p" * SIZE))
        # All records go, the pieces before, between and behind them stay; and so it is found after a restart.
        await c.nodes[1].truncate("log", 1)
        await c.nodes[1].compact()
        await c.append(1, [(b"", b"s" * SIZE)])
        await check(c, tmp_path)
        await c.start(1)
        await c.leader()
        assert await upload_rest(c) == 2
        assert await whole(c, 1, 2, 4 * SIZE) == b"p" * (4 * SIZE)


async def upload_rest(c: Cluster) -> int:
    return int(APPEND_REPLY.unpack(await insist(c, bind(5, 1, 4 * SIZE)))[0])


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_the_order_of_pieces_records_and_truncations(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await begin(c)
        records: dict[int, bytes] = {}
        open_uploads: dict[int, bytearray] = {}
        start = sequence = number = 0

        async def step() -> None:
            nonlocal start, sequence, number
            node, what = c.nodes[1], chance.random()
            if what < 0.25:
                body = bytes([chance.randrange(256)]) * chance.choice((10, 5000))
                records[(await c.append(1, [(b"m", body)])).start] = body
            elif what < 0.65:
                if not open_uploads or chance.random() < 0.3:
                    number += 1
                    open_uploads[number] = bytearray()
                one = chance.choice(list(open_uploads))
                part = chance.randbytes(chance.choice((50, 6000, 9000, 9000)))
                sequence += 1
                assert await send(c, 1, piece(sequence, one, len(open_uploads[one]), part)) == b""
                open_uploads[one] += part
            elif what < 0.78 and open_uploads:
                one = chance.choice(list(open_uploads))
                body = bytes(open_uploads.pop(one))
                sequence += 1
                if body and chance.random() < 0.85:
                    records[APPEND_REPLY.unpack(await send(c, 1, bind(sequence, one, len(body))))[0]] = body
                else:
                    await send(c, 1, piece(sequence, one, 0, None))
            elif what < 0.86:
                start = chance.randint(start, c.log(1).end)
                assert await node.truncate("log", start) == start
                for offset in [offset for offset in records if offset < start]:
                    del records[offset]
            elif what < 0.90:
                await c.roll(1)
            elif what < 0.93:
                await node.snapshot()
            elif what < 0.95:
                await node.compact()
            elif what < 0.97:
                await c.restart(1)
                await c.leader()
                await until(lambda: c.member(1).raft.applied == c.member(1).raft.log.last_index)

        async def look() -> None:
            assert c.log(1).start == start
            assert [body for _, body in await c.read(1, start)] == [records[at] for at in sorted(records)]
            for offset, body in records.items():
                assert await whole(c, 1, offset, len(body)) == body

        for number_of_step in range(160):
            await step()
            if number_of_step % 40 == 39:
                await look()
        await look()
        # Only what a record or an open upload needs is left, but for heads, tables and the entries of commands.
        await c.roll(1)
        needed = sum(map(len, records.values())) + sum(map(len, open_uploads.values()))
        table = c.member(1).uploads
        entries = len(table.indexes if table is not None else ()) + sum(
            count for one in c.log(1).long.values() for _, _, count in one.runs
        )
        assert needed <= live_bytes(c, 1) < needed + 300 * (entries + len(records) + 5), (
            "a row has its entry's metadata"
        )
        await c.nodes[1].close_session("log", SESSION)
        await c.nodes[1].truncate("log", c.log(1).end)
        await c.roll(1)
        assert live_bytes(c, 1) < 160 * 64
        await c.nodes[1].snapshot()
        await check(c, tmp_path)

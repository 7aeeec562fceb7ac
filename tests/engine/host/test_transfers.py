"""Transfers of snapshots: resumed and not repeated, from any member, whatever is released, cut, lost or lied about."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio

from logyard.engine.entry import units_of
from logyard.engine.log import meta_rows
from logyard.engine.replica.reader import Wanted
from logyard.engine.transfer import snapshot_receiver
from logyard.engine.transfer.chunks import Intent
from logyard.engine.transfer.pull import Pace
from logyard.engine.transport.blobs import SNAPSHOT_DONE, SNAPSHOT_OFFER, SNAPSHOT_PIECE, SNAPSHOT_PULL
from logyard.protocol.errors import Gone, LogyardError
from logyard.protocol.frame import encode_frame
from logyard.service.check.run import check_directory

from .cluster import KIB, Cluster, cluster, payload_books, until
from .test_mending import SIZE, flip, metadata
from .test_scattered import Scattered
from .test_snapshots import compacted

PIECE = 64 * KIB
LIMITS: dict[str, Any] = {"payload_cache_bytes": 0, "snapshot_piece_bytes": PIECE, "snapshot_stall_ms": 1000}
PATIENT = {**LIMITS, "snapshot_stall_ms": 60_000}
"""For a transfer that is held up by the test: nobody gives it up."""


class Wire:
    """Every piece that arrives at a node, and what to do before or instead of taking it in."""

    def __init__(self, c: Cluster, number: int) -> None:
        self.c = c
        self.number = number
        self.pieces: list[tuple[int, int]] = []
        self.indexes: list[int] = []
        self.chunks: list[bytes] = []
        self.drop: Callable[[int], bool] = lambda count: False
        self.hold_after = 1 << 30
        self._held: list[Callable[[], None]] = []
        self.attach()

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.pieces)

    async def held(self, count: int) -> None:
        """Until `count` pieces arrived and the next one waits."""
        self.hold_after = count
        await until(lambda: bool(self._held))

    def let_go(self) -> None:
        """What waits goes on."""
        self.hold_after = 1 << 30
        for call in self._held:
            call()
        self._held.clear()

    def sources(self) -> set[int]:
        return {node for node, _ in self.pieces}

    def attach(self) -> None:
        """To a node that was just started: what waited went with the old one."""
        self._held.clear()
        pulls = self.c.system(self.number).transfers.pulls
        on_piece = pulls.on_piece

        def take(node: int, request: int, header: Any, body: Any) -> None:
            if self.drop(len(self.pieces)):
                return
            if len(self.pieces) >= self.hold_after:
                self._held.append(lambda: take(node, request, header, body))
                return
            if not header["error"]:
                self.pieces.append((node, len(body)))
                self.indexes += [row[0] for row in header["entries"]]
                self.chunks += [name for name, _ in header["chunks"]]
            on_piece(node, request, header, body)

        pulls.on_piece = take  # type: ignore[method-assign]


async def laggard(c: Cluster, count: int = 40, size: int = 20 * KIB) -> list[bytes]:
    """Node 3 is down and needs a snapshot with `count` payloads, 800 KiB in all; what they are."""
    await c.lead(1)
    await c.applied()
    await c.crash(3)
    bodies = await c.fill(1, count, size)
    await c.applied(among=[1, 2])
    for number in (1, 2):
        await compacted(c, number)
    return bodies


async def served(c: Cluster, number: int, bodies: list[bytes], first: int = 0) -> None:
    assert [body for _, body in await c.read(number, first)] == bodies


def quiet(c: Cluster, number: int) -> bool:
    """Nothing of a transfer is left on a node."""
    system = c.system(number)
    chunks = system.storage.meta_batch.meta.keys(meta_rows.CHUNK)
    left = {name for member in system.members.values() for name in member.chunks}
    stored = list(system.storage.meta_batch.meta.scan(meta_rows.INTENT))
    return not (system.transfers.chunks.intents or stored or system.transfers.chunks.leases) and len(chunks) == len(
        left
    )


# Resuming


@pytest.mark.parametrize("how", ["link", "receiver", "source", "leader"])
async def test_after_a_cut_half_way_at_most_one_piece_is_sent_again(tmp_path: Path, how: str) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        bodies = await laggard(c)
        await c.start(3)
        wire = Wire(c, 3)
        half = trio.Event()

        def stop_at_half(count: int) -> bool:
            if wire.bytes >= 400 * KIB:
                half.set()
            # The piece under way at the cut is lost, whichever it is.
            return half.is_set()

        wire.drop = stop_at_half
        with trio.fail_after(20):
            await half.wait()
        if how == "link":
            c.partition(3)
            await until(lambda: c.system(3).live == {3})
            c.network.heal()
        elif how == "receiver":
            await c.restart(3)
            wire.attach()
        elif how == "source":
            # Whoever is asked next.
            await c.restart(2)
        else:
            await c.crash(1)
            assert wire is not None
            wire.drop = lambda count: False
            await c.leader(among=[2])
        assert wire is not None
        wire.drop = lambda count: False
        if how == "leader":
            await c.start(1)
        await c.applied()
        assert c.member(3).snapshot_index
        assert len(wire.indexes) == len(set(wire.indexes)), "what arrived was durable, and is not sent again"
        # Of the pieces that arrived none came twice: all that may be lost is the one under way.
        assert wire.bytes <= 40 * 20 * KIB + 40 * 64 + PIECE
        await served(c, 3, bodies)
        await c.restart(3)
        await c.applied()
        await served(c, 3, bodies)
        await until(lambda: quiet(c, 3))


async def test_every_crash_of_the_receiver_keeps_what_is_durable(tmp_path: Path) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        bodies = await laggard(c)
        wire: Wire | None = None
        for step in range(1, 14):
            await c.start(3)
            if wire is None:
                wire = Wire(c, 3)
            else:
                wire.attach()
            arrived, found = trio.Event(), c.member(3)
            before = len(wire.pieces)

            def at(count: int, before: int = before, arrived: trio.Event = arrived) -> bool:
                if count > before:
                    arrived.set()
                return arrived.is_set()

            wire.drop = at
            with trio.fail_after(20):
                while not arrived.is_set() and found.raft.applied < c.member(1).snapshot_index:
                    await trio.sleep(0.001)
            if step % 3 == 0:
                # Crash in the recovery as well.
                await c.crash(3)
                opened = c.build(3)
                await opened.open()
                opened.close()
            else:
                await c.crash(3)
        assert wire is not None
        wire.drop = lambda count: False
        await c.start(3)
        await c.applied()
        assert len(wire.indexes) == len(set(wire.indexes)), "one piece a life is enough to get there"
        await served(c, 3, bodies)


STEPS = ["store_payloads", "store_installed", "intend", "_install", "judge"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
async def test_a_crash_at_any_step_of_the_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        bodies = await laggard(c, 12)
        system = (await c.start(3)).system
        reached = trio.Event()
        owners = {
            "judge": snapshot_receiver, "intend": system.transfers.chunks,
            "_install": system.transfers.snapshot_receiver,
            "store_installed": system.storage.checkpoints, "store_payloads": system.storage.rehoming,
        }  # fmt: skip
        owner: Any = owners[step]
        plain = getattr(owner, step)

        async def stop(*arguments: Any) -> None:
            if after:
                await plain(*arguments)
            reached.set()
            await trio.sleep_forever()

        def refuse(*arguments: Any) -> Any:
            if after:
                plain(*arguments)
            reached.set()
            raise LogyardError("crashed here")

        with monkeypatch.context() as patch:
            patch.setattr(owner, step, refuse if step in ("judge", "_install") else stop)
            if step == "store_payloads":
                # What the receiver was given when it was made.
                host = system.transfers.snapshot_receiver._host
                patch.setattr(system.transfers.snapshot_receiver, "_host", host._replace(store_payloads=stop))
            with trio.fail_after(10):
                await reached.wait()
            await c.crash(3)
        await c.start(3)
        await c.applied()
        await served(c, 3, bodies)
        await c.append(await c.leader(), [(b"", b"after")])
        await c.applied()
        await c.restart(3)
        await c.applied()
        await served(c, 3, [*bodies, b"after"])
        await until(lambda: quiet(c, 3))


@pytest.mark.long
async def test_a_newer_offer_takes_over_what_is_there(tmp_path: Path) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        bodies = await laggard(c)
        await c.start(3)
        wire = Wire(c, 3)
        await wire.held(5)
        await c.crash(3)
        held = set(wire.indexes)
        bodies += await c.fill(1, 5, 20 * KIB)
        await c.applied(among=[1, 2])
        await compacted(c, 1)
        index = c.member(1).snapshot_index
        await c.start(3)
        wire.attach()
        wire.let_go()
        await c.applied()
        assert c.member(3).snapshot_index == index
        assert c.system(3).transfers.snapshot_receiver.resumed == 1
        assert len(wire.indexes) == len(set(wire.indexes)) and held < set(wire.indexes)
        await served(c, 3, bodies)


async def test_an_intent_that_the_log_overtook_goes(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.fill(1, 5, 100)
        system, member = c.system(1), c.member(1)
        intent = Intent(3, 1, 0, [(1, 3)], [b"c" * 16])
        key = meta_rows.chunk_key(member.uid, b"c" * 16)
        system.storage.meta_batch.meta.commit([intent.put(member.uid), (key, b"of nobody soon")])
        await c.restart(1)
        await c.leader()
        system = c.system(1)
        assert system.transfers.chunks.intents[member.uid].covered == [(1, 3)]
        system.storage.janitor.look()
        await until(lambda: quiet(c, 1))
        assert not list(system.storage.meta_batch.meta.scan(meta_rows.INTENT))


async def test_chunks_that_a_crash_left_to_nobody_go_at_the_start(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        uid = c.member(1).uid
        meta = c.system(1).storage.meta_batch.meta
        meta.commit([(meta_rows.chunk_key(uid, b"x" * 16), b"1"), (meta_rows.chunk_key(77, b"y" * 16), b"2")])
        meta.commit([Intent(9, 1).put(77)])
        await c.restart(1)
        assert not c.system(1).storage.meta_batch.meta.keys(meta_rows.CHUNK)
        assert not list(c.system(1).storage.meta_batch.meta.scan(meta_rows.INTENT)), "of a group that is not here"


# From any member


@pytest.mark.parametrize("fault", ["refuses", "silent", "crashes"])
async def test_a_member_that_does_not_answer_is_passed_over(tmp_path: Path, fault: str) -> None:
    async with cluster(tmp_path, **{**LIMITS, "snapshot_stall_ms": 2000}) as c:
        bodies = await laggard(c)
        serving = c.system(2).transfers.pull_answers
        if fault == "silent":
            serving.on_pull = lambda *arguments: None  # type: ignore[method-assign]
        elif fault == "refuses":
            c.member(2).floor = 1 << 40
        await c.start(3)
        wire = Wire(c, 3)
        if fault == "crashes":
            await until(lambda: len(wire.pieces) > 3)
            await c.crash(2)
            await c.applied(among=[1, 3])
        else:
            await c.applied(among=[1, 3])
            assert wire.sources() == {1} and c.system(3).transfers.pulls.failed == 1
        await served(c, 3, bodies)


async def test_a_receiver_finishes_without_the_node_that_offered(tmp_path: Path) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        bodies = await laggard(c)
        await c.start(3)
        wire = Wire(c, 3)
        gone = trio.Event()

        def stop(count: int) -> bool:
            if count == 3:
                gone.set()
            return gone.is_set() and 1 in c.nodes

        wire.drop = stop
        with trio.fail_after(10):
            await gone.wait()
        await c.crash(1)
        await until(lambda: c.system(3).transfers.snapshot_receiver.installed == 1)
        leader = await c.leader(among=[2, 3])
        await c.append(leader, [(b"", b"after")])
        await c.applied(among=[2, 3])
        await served(c, 3, [*bodies, b"after"])


# Releases meanwhile


async def test_what_is_released_during_a_transfer_comes_as_a_tombstone(tmp_path: Path) -> None:
    async with cluster(tmp_path, **PATIENT) as c:
        bodies = await laggard(c)
        index = c.member(1).snapshot_index
        await c.start(3)
        wire = Wire(c, 3)
        await wire.held(3)
        # Most of what was sent, and of what was not, dies, and its bytes are destroyed.
        await c.nodes[1].truncate("log", 30)
        release = c.member(1).last_release
        assert release > index
        await c.applied(among=[1, 2])
        for number in (1, 2):
            await c.nodes[number].compact()
        installed: list[tuple[int, int, bool]] = []
        system = c.system(3)
        install = system.transfers.snapshot_receiver._install

        def look(member: Any, snapshot: Any, size: int, have: int) -> None:
            install(member, snapshot, size, have)
            installed.append((snapshot.index, member.floor, member.resolves))

        system.transfers.snapshot_receiver._install = look  # type: ignore[method-assign]
        wire.let_go()
        await c.applied()
        # The offer stands: nothing started over, and below the release nothing is resolved.
        assert installed == [(index, release, False)]
        await until(lambda: c.system(1).transfers.snapshot_sender.sent == 1, "the source hears of it")
        assert c.member(3).resolves
        await served(c, 3, bodies[30:], 30)
        await c.restart(3)
        assert c.member(3).floor >= release
        await c.applied()
        await served(c, 3, bodies[30:], 30)
        live = [c.member(number).liveness.encode_live_set(c.member(number).raft.applied) for number in c.ids]
        assert live[0] == live[1] == live[2]


async def test_a_transfer_ends_under_constant_truncation(tmp_path: Path) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        await laggard(c)
        await c.start(3)
        wire = Wire(c, 3)
        log, start = c.log(1), 0
        while not c.system(3).transfers.snapshot_receiver.installed:
            await c.fill(1, 1, 10 * KIB)
            start = min(start + 2, log.end - 1)
            await c.nodes[1].truncate("log", start)
            if start % 6 == 0:
                await c.nodes[1].compact()
        assert c.system(1).transfers.snapshot_sender.sent + len(c.system(3).transfers.snapshot_receiver._offers) <= 2
        await c.applied()
        assert len(wire.indexes) == len(set(wire.indexes))
        assert await c.read(3, log.start) == await c.read(1, log.start)
        await c.restart(3)
        await c.applied()
        assert await c.read(3, log.start) == await c.read(1, log.start)


@pytest.mark.long
async def test_the_log_above_an_offer_stays_until_the_transfer_ends(tmp_path: Path) -> None:
    async with cluster(tmp_path, **PATIENT) as c:
        await laggard(c)
        index = c.member(1).snapshot_index
        await c.start(3)
        wire = Wire(c, 3)
        await wire.held(2)
        await c.fill(1, 3, 100)
        await c.nodes[1].snapshot()
        await c.nodes[1].compact()
        raft = c.member(1).raft
        assert c.member(1).snapshot_index > index == raft.log.snapshot_index
        wire.let_go()
        await c.applied()
        assert c.member(3).snapshot_index == index, "no second transfer"
        await until(lambda: raft.log.snapshot_index > index)


async def test_a_lease_without_progress_ends_and_a_full_disk_ends_all(tmp_path: Path) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        await laggard(c)
        await c.start(3)
        wire = Wire(c, 3)
        wire.drop = lambda count: True
        chunks = c.system(1).transfers.chunks
        await until(lambda: bool(chunks.leases))
        chunks.expire(trio.current_time())
        assert chunks.leases, "it made progress just now"
        chunks.expire(trio.current_time() + 2.1)
        assert not chunks.leases
        wire.drop = lambda count: False
        await c.applied()
        assert c.system(1).transfers.snapshots.mismatches == 0
        member = c.member(1)
        _, found = await c.system(1).transfers.snapshot_sender._leased(member, 3)
        assert found.snapshot.index == member.snapshot_index and chunks.leases
        chunks.give_up()
        assert not chunks.leases


# Sources that lie


def tampered(kind: str, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """An answer with something wrong in it."""
    header = dict(header)
    entries = [list(row) for row in header["entries"]]
    if kind == "bytes":
        body = body[:-1] + bytes([body[-1] ^ 1])
    elif kind == "short":
        body = body[:-10]
    elif kind == "uid":
        header["uid"] += 1
    elif kind == "left out":
        # It neither sends nor says why.
        entries[0][3] = []
        body = body[-len(body) :]
        header["entries"] = entries[1:]
        first = entries[0]
        assert first
        return {**header, "entries": [[first[0], first[1], first[2], []], *entries[1:]]}, body[20 * KIB + 8 + 8 :]
    elif kind == "elsewhere":
        entries[0][0] += 1000
    elif kind == "through":
        header["through"] = 1 << 63
    elif kind == "release":
        header["release"] = 1 << 63
    elif kind == "nothing":
        return {**header, "entries": [], "through": 0}, b""
    elif kind == "chunk":
        header["chunks"] = [[b"z" * 16, 5]]
    header["entries"] = entries
    return header, body


LIES = ["bytes", "short", "uid", "left out", "elsewhere", "through", "release", "nothing", "chunk"]


@pytest.mark.parametrize("kind", LIES)
async def test_a_lying_source_is_passed_over(tmp_path: Path, kind: str) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        await c.create("other")
        bodies = await laggard(c, 10)
        peers = c.network.nodes[2]
        send_blob, lies = peers.send_blob, []

        def lying(node: int, what: int, request: int, header: Any, body: Any = (), **options: Any) -> bool:
            if what == SNAPSHOT_PIECE and header["entries"]:
                lies.append(kind)
                header, data = tampered(kind, header, b"".join(bytes(part) for part in body))
                body = [data]
            return send_blob(node, what, request, header, body, **options)

        peers.send_blob = lying  # type: ignore[method-assign, assignment]
        await c.start(3)
        await c.applied()
        assert lies and c.member(3).floor < 1 << 60
        await served(c, 3, bodies)
        leader = await c.leader("other")
        await c.append(leader, [(b"", b"goes on")], "other")
        await c.applied("other")


async def test_offers_of_nonsense_leave_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        await c.fill(await c.leader(), 3, 100)
        await c.applied()
        await c.nodes[1].snapshot()
        data = c.system(1).storage.meta_batch.snapshot(c.member(1).uid).data
        answers: list[dict[str, Any]] = []
        peers = c.network.nodes[2]
        send_blob = peers.send_blob

        def watch(node: int, kind: int, request: int, header: Any, body: Any = (), **options: Any) -> bool:
            if kind == SNAPSHOT_DONE:
                answers.append(header)
            return send_blob(node, kind, request, header, body, **options)

        peers.send_blob = watch  # type: ignore[method-assign]
        inbound, uid = c.system(2).host.inbound, c.member(2).uid
        for body in (b"", data[:-1], b"x" * 200, data.replace(b"LYSN", b"LYSX")):
            inbound.on_blob(3, SNAPSHOT_OFFER, 1, {"uid": uid, "index": 3}, body)
        assert [answer["ok"] for answer in answers] == [False] * 4
        assert not c.system(2).transfers.chunks.intents
        # And pulls of nonsense are answered with an error.
        refused: list[dict[str, Any]] = []
        pull = {"index": 0, "ranges": [[1, 2**63], [3, 1]], "chunks": [b"q" * 16], "limit": 2**64 - 1}
        for asked in ({**pull, "uid": uid}, {**pull, "uid": 1}, {**pull, "uid": uid, "chunks": []}):
            _, body = (await answer_of(c, 2, 3, asked))[0:2]
            refused.append(_)
        assert refused[0]["error"] and refused[1]["error"]
        assert not refused[2]["error"] and refused[2]["through"] <= c.member(2).raft.applied


async def answer_of(c: Cluster, node: int, asker: int, header: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What a node answers to a pull."""
    peers = c.network.nodes[node]
    send_blob = peers.send_blob
    found: list[tuple[dict[str, Any], Any]] = []

    def watch(to: int, kind: int, request: int, header: Any, body: Any = (), **options: Any) -> bool:
        if kind == SNAPSHOT_PIECE:
            found.append((header, body))
        return send_blob(to, kind, request, header, body, **options)

    peers.send_blob = watch  # type: ignore[method-assign, assignment]
    c.system(node).host.inbound.on_blob(asker, SNAPSHOT_PULL, 1 << 20, header, b"")
    await until(lambda: bool(found))
    peers.send_blob = send_blob  # type: ignore[method-assign]
    return found[0]


async def test_a_member_below_its_floor_or_outside_of_the_group_serves_and_gets_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, 4, group="", **LIMITS) as c:
        await until(lambda: all(len(c.system(number).live) == 4 for number in c.ids))
        await c.create("log", [1, 2, 3])
        leader = await c.leader()
        await c.fill(leader, 3, 5 * KIB)
        await c.applied(among=[1, 2, 3])
        uid = c.member(2).uid
        pull = {"uid": uid, "index": 0, "ranges": [[1, 9]], "chunks": [], "limit": PIECE}
        assert (await answer_of(c, 2, 3, pull))[0]["entries"]
        assert "no member" in (await answer_of(c, 2, 4, pull))[0]["error"]
        c.member(2).floor = c.member(2).raft.applied + 1
        assert "floor" in (await answer_of(c, 2, 3, pull))[0]["error"]


# Rates and order


async def test_the_pace_is_kept(tmp_path: Path) -> None:
    now = 0.0
    pace = Pace(1000, lambda: now)
    assert pace.take(500) == 0.5
    assert pace.take(500) == 1.0
    now = 3.0
    assert pace.take(100) == pytest.approx(0.1), "what was not used is not saved up"


async def test_a_transfer_is_slowed_down_to_the_configured_rate(tmp_path: Path) -> None:
    async with cluster(tmp_path, **{**LIMITS, "snapshot_bytes_per_s": 1024 * KIB}) as c:
        bodies = await laggard(c, 20)
        await c.start(3)
        began = trio.current_time()
        await until(lambda: c.system(3).transfers.snapshot_receiver.installed == 1)
        assert trio.current_time() - began > 0.3, "400 KiB at 1 MiB/s"
        await c.applied()
        await served(c, 3, bodies)


@pytest.mark.parametrize("seed", range(4))
async def test_lost_doubled_and_late_answers_do_no_harm(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with cluster(tmp_path, **{**LIMITS, "snapshot_stall_ms": 100}) as c:
        bodies = await laggard(c, 20)
        await c.start(3)
        system = c.system(3)
        on_piece, kept = system.transfers.pulls.on_piece, []

        def odd(*arguments: Any) -> None:
            what = chance.random()
            if what < 0.15:
                return
            if what < 0.3:
                kept.append(arguments)
                return
            on_piece(*arguments)
            if what < 0.5:
                on_piece(*arguments)
            if kept and what < 0.7:
                on_piece(*kept.pop(0))

        system.transfers.pulls.on_piece = odd  # type: ignore[method-assign, assignment]
        await c.applied()
        await served(c, 3, bodies)
        assert payload_books(c.system(3))["generations"]


@pytest.mark.parametrize("seed", range(int(os.environ.get("LOGYARD_SEEDS", "3"))))
async def test_random_transfers_under_truncation_add_up(tmp_path: Path, seed: int) -> None:
    """A follower is cut off, crashes and returns while the log is written, cut, snapshotted and compacted."""
    chance = random.Random(seed + int(os.environ.get("LOGYARD_SEED_BASE", "0")))
    async with cluster(tmp_path, **{**LIMITS, "snapshot_stall_ms": 300}) as c:
        await c.lead(1)
        down, cut = 0, False
        for _ in range(30):
            verb = chance.choice(("fill", "fill", "fill", "truncate", "compact", "crash", "start", "cut", "heal"))
            leader = await c.leader(among=[1, 2] if cut else c.nodes)
            with trio.move_on_after(3):
                try:
                    if verb == "fill":
                        await c.append(leader, [(b"", chance.randbytes(chance.choice((50, 9 * KIB, 30 * KIB))))])
                    elif verb == "truncate":
                        log = c.log(leader)
                        await c.nodes[leader].truncate("log", chance.randint(log.start, log.end))
                    elif verb == "compact":
                        number = chance.choice(sorted(c.nodes))
                        await c.nodes[number].snapshot()
                        await c.nodes[number].compact()
                    elif verb == "crash" and not down and not cut:
                        down = chance.choice((1, 2, 3))
                        with trio.CancelScope(shield=True):
                            await c.crash(down)
                    elif verb == "start" and down:
                        with trio.CancelScope(shield=True):
                            await c.start(down)
                        down = 0
                    elif verb == "cut" and not down:
                        c.partition(3)
                        cut = True
                    elif verb == "heal":
                        c.network.heal()
                        cut = False
                except Gone:
                    pass
                except LogyardError as error:
                    assert error.code not in ("corrupt", "error", "bad_request"), (verb, error)
            if verb == "cut":
                await trio.sleep(0.02)
        c.network.heal()
        if down:
            await c.start(down)
        leader = await c.leader()
        for _ in range(20):
            try:
                await c.append(leader, [(b"", b"last")])
                break
            except LogyardError:
                leader = await c.leader()
        await c.applied()
        for number in c.ids:
            c.member(number).raft.check()
            assert c.member(number).state == "running", c.member(number).reason
            await until(lambda number=number: c.member(number).resolves)
        start = c.log(1).start
        reads = [await c.read(number, start) for number in c.ids]
        assert reads[0] == reads[1] == reads[2]
        live = [c.member(number).liveness.encode_live_set(c.member(number).raft.applied) for number in c.ids]
        assert live[0] == live[1] == live[2]
        for number in c.ids:
            await c.restart(number)
        await c.applied()
        assert [await c.read(number, start) for number in c.ids] == reads


async def test_the_check_finds_a_half_done_transfer_sound(tmp_path: Path) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        bodies = await laggard(c)
        await c.start(3)
        wire = Wire(c, 3)
        await wire.held(4)
        await c.crash(3)
        for repair in (False, True):
            report = check_directory(tmp_path / "node-3", repair=repair)
            assert report["ok"], report["findings"]
        await c.start(3)
        wire.attach()
        wire.let_go()
        await c.applied()
        assert len(wire.indexes) == len(set(wire.indexes))
        await served(c, 3, bodies)


@pytest.mark.parametrize("step", ["_collect", "_answer", "read"])
async def test_a_crash_of_a_source_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    async with cluster(tmp_path, **{**LIMITS, "snapshot_stall_ms": 300}) as c:
        bodies = await laggard(c, 20)
        system = c.system(2)
        reached = trio.Event()
        owner: Any = system.replicas.reader if step == "read" else system.transfers.pull_answers
        plain = getattr(owner, step)

        async def stop(*arguments: Any, **named: Any) -> None:
            await plain(*arguments, **named)
            reached.set()
            await trio.sleep_forever()

        def fail(*arguments: Any) -> None:
            plain(*arguments)
            reached.set()
            raise LogyardError("crashed here")

        with monkeypatch.context() as patch:
            patch.setattr(owner, step, fail if step == "_collect" else stop)
            await c.start(3)
            wire = Wire(c, 3)
            with trio.fail_after(10):
                await reached.wait()
            await c.crash(2)
        await c.applied(among=[1, 3])
        assert wire.sources() == {1}
        await served(c, 3, bodies)
        await c.start(2)
        await c.applied()
        assert await c.read(2) == await c.read(3)


async def test_a_leader_that_crashes_after_its_offer_leaves_nothing_behind(tmp_path: Path) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        bodies = await laggard(c, 20)
        await c.start(3)
        wire = Wire(c, 3)
        await wire.held(0)
        await c.restart(1)
        assert not c.system(1).transfers.chunks.leases
        wire.let_go()
        await c.applied()
        await served(c, 3, bodies)
        await until(lambda: quiet(c, 3))


async def test_the_offer_of_another_leader_with_an_older_snapshot(tmp_path: Path) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        await c.lead(1)
        await c.applied()
        await c.crash(3)
        await c.fill(1, 20, 20 * KIB)
        await c.applied(among=[1, 2])
        await compacted(c, 2)
        old = c.member(2).snapshot_index
        await c.nodes[1].truncate("log", 10)
        bodies = await c.fill(1, 5, 20 * KIB)
        await c.applied(among=[1, 2])
        await compacted(c, 1)
        newer = c.member(1).snapshot_index
        assert newer > old
        # Node 1 has offered the newer one, and half of it is there, when node 2 takes over with its older one.
        await c.start(3)
        wire = Wire(c, 3)
        await wire.held(3)
        await c.crash(3)
        system = c.build(3)
        await system.open()
        try:
            intent = system.transfers.chunks.intents[system.member("log").uid]
            assert intent.index == newer and intent.covered
            again = intent.taken_over(old, intent.term, [])
            assert again.release >= newer > old, "what was left out died by then"
        finally:
            system.close()
        await c.lead(2)
        await c.crash(1)
        await c.start(3)
        wire.attach()
        wire.let_go()
        await c.applied(among=[2, 3])
        assert [body for _, body in await c.read(3, 20)] == bodies
        assert await c.read(3, 10) == await c.read(2, 10)


async def test_a_snapshots_payloads_come_from_who_became_a_member_after_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, 4, group="", payload_cache_bytes=0) as c:
        await until(lambda: all(len(one.system.live) == 4 for one in c.nodes.values()), "all are live")
        await c.create(members=[1, 2])
        await c.lead(1)
        bodies = await c.fill(1, 6, SIZE)
        await until(lambda: c.member(1).raft.log.stable == c.member(1).raft.applied == c.member(1).raft.log.last_index)
        damaged = metadata(c, 1, c.member(1).raft.log.last_index - 2)
        await c.roll(1)
        await c.nodes[1].compact()
        await c.crash(1)
        assert sum(flip(path, damaged) for path in (c.path / "node-1" / "payloads").glob("gen-*/data.mdb")) == 1
        await c.start(1)
        await c.lead(1)
        await c.nodes[1].snapshot(["log"])
        assert c.member(1).raft.log.first_index > 6
        assert (await c.nodes[1].change_members("log", "add", 3))["voters"]
        await until(lambda: c.replica(3, "log") is not None and c.log(3).end == len(bodies), "node 3 has it all")
        await c.crash(2)
        # The snapshot's members are node 1, which lost a row, and node 2, which is away.
        await c.nodes[1].change_members("log", "add", 4)
        await until(lambda: c.replica(4, "log") is not None and c.log(4).end == len(bodies), "node 4 has it all")
        assert [body for _, body in await c.read(4)] == bodies


async def payloads(c: Cluster, number: int) -> dict[int, bytes]:
    """Every payload that lives on a node, by index."""
    system, member = c.system(number), c.member(number)
    found: dict[int, bytes] = {}
    for one in system.replicas.reader.payload_entries(member, 1, member.raft.log.last_index):
        units = units_of(one.data)
        live = member.liveness.live_units(
            one.index, [(unit.number, unit.first_ordinal, unit.records) for unit in units]
        )
        wanted = [Wanted(one, unit, 0, unit.length) for unit in units if unit.number in live]
        if wanted:
            parts = await system.replicas.reader.read(member, wanted, mend=False)
            found[one.index] = b"".join(map(bytes, parts))
    return found


async def test_a_cut_transfer_takes_nothing_away_from_what_the_receiver_serves(tmp_path: Path) -> None:
    """Between two survivors of the snapshot lie payloads that are dead for its sender and alive for its receiver."""
    async with cluster(tmp_path, machines=lambda name, arguments: Scattered(), **LIMITS) as c:
        await c.lead(1)

        async def append(command: bytes = b"") -> int:
            frame = encode_frame([(b"", os.urandom(5 * KIB))], command=command)
            return int(await c.nodes[1].commit(c.member(1), frame))

        indexes = [await append() for _ in range(8)]
        await c.applied()
        before = await payloads(c, 3)
        assert indexes == sorted(before)
        await c.crash(3)
        await append(msgpack.packb([((indexes[2], 0), (indexes[6], 0))]))
        for _ in range(40):
            await append()
        await c.applied(among=[1, 2])
        for number in (1, 2):
            await compacted(c, number)
        await c.start(3)
        wire = Wire(c, 3)
        await wire.held(2)
        member = c.member(3)
        await until(lambda: c.system(3).store.home(member.uid, indexes[1]) is not None)
        assert member.resolves and member.raft.applied < indexes[-1] + 2
        assert await payloads(c, 3) == before
        # Also when nothing comes of it, after a start.
        c.partition(3)
        await c.restart(3)
        c.partition(3)
        assert (await payloads(c, 3)).items() <= before.items()
        await c.roll(3)
        await c.restart(3)
        c.partition(3)
        member = c.member(3)
        home, located = c.system(3).store.home, c.system(3).replicas.reader.payload_entries
        assert [one.index for one in located(member, indexes[2], indexes[5])] == indexes[2:6]
        c.network.heal()
        await c.applied()
        assert await payloads(c, 3) == await payloads(c, 1)
        assert home(member.uid, indexes[3]) is None


async def test_a_replica_that_went_and_came_back_does_not_go_on_with_the_old_ones_transfer(tmp_path: Path) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        bodies = await laggard(c)
        await c.start(3)
        wire = Wire(c, 3)
        await wire.held(5)
        uid = c.member(3).uid
        assert c.system(3).transfers.chunks.intents[uid].covered
        await c.nodes[1].change_members("log", "remove", 3)
        await until(lambda: c.replica(3) is None)
        await c.nodes[1].change_members("log", "add", 3)
        wire.let_go()
        await until(lambda: c.replica(3) is not None)
        await c.applied()
        await served(c, 3, bodies)
        assert not c.system(3).repair.payload_repair.fetched, "it came with the snapshot (invariant 5)"
        await until(lambda: quiet(c, 3))
        await c.restart(3)
        await c.applied()
        await served(c, 3, bodies)
        assert not c.system(3).transfers.chunks.intents

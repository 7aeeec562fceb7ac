"""The receiving end of a snapshot, alone: what it asks for, what is durable when, and what it says of the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from logyard.engine.config import SystemConfig
from logyard.engine.entry import build_commands
from logyard.engine.log import meta_rows
from logyard.engine.ports import SourceEntry
from logyard.engine.raft.membership import Configuration
from logyard.engine.ranges import Range
from logyard.engine.snapshot.format import Encoded, Snapshot, split
from logyard.engine.transfer.chunks import Chunks, Intent
from logyard.engine.transfer.pull import Piece, live_digest
from logyard.engine.transfer.snapshot_receiver import Host, SnapshotReceiver
from logyard.engine.transport.blobs import SNAPSHOT_DONE, SNAPSHOT_PROGRESS
from logyard.payloads.liveness import Liveness, decode_live_set
from logyard.protocol.errors import Corrupt, LogyardError
from logyard.protocol.frame import encode_frame

UID = 77
INDEX = 6
STATE = {"large": bytes(range(256)) * 1024, "small": b"state"}


def entry(index: int) -> SourceEntry:
    body = b"payload of %d" % index
    made = build_commands(UID, index, 1, 0, [memoryview(b"".join(encode_frame([(b"", body)], command=b"")))])
    payload = b"".join(made.bodies or ())
    return SourceEntry(UID, index, 1, made.data, {0}, lambda at, size: payload[at : at + size])


def snapshot(index: int = INDEX, live: Liveness | None = None) -> Encoded:
    live_set = (live or Liveness()).encode_live_set(index)
    return split(Snapshot(UID, index, 1, Configuration((1, 2, 3)).encode(), 1, 0, 5, STATE, live_set))


class Books:
    """The meta store: rows, each commit at once."""

    def __init__(self) -> None:
        self.meta: Any = self
        self.rows: dict[bytes, bytes] = {}
        self.get = self.rows.get
        self.intents: list[list[Range]] = []

    async def commit(self, build: Callable[[], Iterable[tuple[bytes, bytes | None]]], store: bool = False) -> None:
        for key, value in build():
            if value is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = value
            if key[:1] == b"i" and value is not None:
                self.intents.append(Intent.unpack(value).covered)


class Rig:
    """A receiver on node 3 whose sources are `answer(node, ranges, names)`; it keeps what it was told, in order."""

    def __init__(self, applied: int = 0) -> None:
        self.told: list[tuple[int, int, Any]] = []
        self.asked: list[tuple[int, list[Range]]] = []
        self.events: list[Any] = []
        self.books = Books()
        # Up to where segments are stored, where that is not all that was flushed.
        self.stored: int | None = None
        self.answer: Callable[[int, Sequence[Range], Sequence[bytes]], Piece] = self.honest
        self.live = Liveness()
        self.release = 0
        raft = SimpleNamespace(
            applied=applied, commit=applied, stopped=False, leader=1, install_snapshot=self._install
        )  # fmt: skip
        self.member = SimpleNamespace(
            uid=UID, spec=SimpleNamespace(name="log"), raft=raft, machine=SimpleNamespace(version=1), flushed=applied,
            resolves=True, liveness=Liveness(), wake=lambda: None, snapshot_index=0,
            covered=lambda index, term, size: self._note("covered", index),
            proposals=SimpleNamespace(fail_proposed=lambda error: None),
            recover=lambda: None, raise_floor=lambda release: self._note("floor", release),
        )  # fmt: skip
        members = cast(Any, {UID: self.member})
        self.chunks = Chunks(SystemConfig(), members, cast(Any, self.books), lambda member: None)
        store = SimpleNamespace(
            decode_liveness=lambda data: decode_live_set(data).liveness,
            missing=lambda live, have: [(have + 1, INDEX)],
            lost=lambda uid, first, last: False,
        )
        host = Host(
            members.get, lambda node, uid: self.events.append(("ask", node)), lambda: self._note("turn"),
            lambda member, found: self._note("restore", found.sections), lambda member, reason: self._note("stop"),
            lambda member: self._note("mark"), self.store_payloads,
        )  # fmt: skip
        self.receiver = SnapshotReceiver(
            members, cast(Any, store), cast(Any, self), self.chunks, cast(Any, self), host, self.send, self.spawn
        )
        self.nursery: trio.Nursery

    def _note(self, *event: Any) -> None:
        self.events.append(event)

    def _install(self, index: int, term: int, configuration: Configuration) -> bool:
        self.member.raft.applied = index
        return True

    def spawn(self, task: Callable[..., Any], *arguments: Any) -> None:
        self.nursery.start_soon(task, *arguments)

    def send(self, node: int, kind: int, request: int, header: Any, body: Any = ()) -> bool:
        self.told.append((node, kind, header))
        return True

    async def offer(self, *offers: tuple[int, Encoded]) -> None:
        """Until the transfers of these are over."""
        async with trio.open_nursery() as self.nursery:
            for request, (node, encoded) in enumerate(offers):
                self.receiver.on_offer(node, request, {"uid": UID}, encoded.manifest)

    def outcome(self) -> list[tuple[int, str]]:
        return [(node, header["error"]) for node, kind, header in self.told if kind == SNAPSHOT_DONE]

    # The pulls

    def others(self, configuration: Configuration) -> list[int]:
        return sorted(configuration.nodes() - {3})

    def neighbours(self) -> list[int]:
        return [1, 2]

    async def ask(self, node: int, uid: int, index: int, ranges: Sequence[Range], chunks: Sequence[bytes]) -> Piece:
        self.asked.append((node, list(ranges)))
        await trio.lowlevel.checkpoint()
        return self.answer(node, ranges, chunks)

    def honest(self, node: int, ranges: Sequence[Range], names: Sequence[bytes]) -> Piece:
        """Two entries a piece, of what lives at the source."""
        if names:
            data = snapshot().chunks
            return Piece([], 0, 0, 0, {name: data[name] for name in names}, 1)
        first, last = ranges[0]
        through = min(first + 1, last)
        rows = [entry(index) for index in range(first, through + 1) if self.live.is_live(index, 0)]
        return Piece(rows, through, self.release, live_digest(self.live, [(first, through)]), {}, 1)

    # The storage

    async def store_payloads(self, member: Any, entries: Sequence[SourceEntry]) -> None:
        self.events.append(("stored", [one.index for one in entries]))

    def stored_through(self, member: Any) -> int:
        return int(member.flushed) if self.stored is None else self.stored

    async def store_installed(self, member: Any, found: Snapshot, encoded: Encoded) -> None:
        self.events.append(("snapshot", found.index))

    def installed(self, member: Any, before: Any, found: Snapshot, size: int, keep: int) -> None:
        self.events.append(("installed", found.index, keep))

    async def settle_installed(self) -> None:
        self.events.append(("settled",))


async def test_what_is_installed_is_durable_first() -> None:
    rig = Rig()
    await rig.offer((1, snapshot()))
    assert rig.events == [
        ("stored", [1, 2]), ("stored", [3, 4]), ("stored", [5, 6]), ("floor", 0), ("snapshot", INDEX), ("turn",),
        ("restore", STATE), ("installed", INDEX, 0), ("mark",), ("settled",),
    ]  # fmt: skip
    # An intent before the first piece, and one that names each piece before the next is asked for.
    assert rig.books.intents == [[], [(1, 2)], [(1, 4)], [(1, 6)]]
    assert {node for node, ranges in rig.asked} == {1, 2}, "from all members in turn"
    assert rig.outcome() == [(1, "")] and rig.receiver.installed == 1 and not rig.chunks.intents
    assert any(kind == SNAPSHOT_PROGRESS for _, kind, _ in rig.told)


async def test_what_is_here_is_not_asked_for() -> None:
    rig = Rig(applied=4)
    await rig.offer((1, snapshot()))
    assert [ranges for _, ranges in rig.asked] == [[], [(5, 6)]] and ("installed", INDEX, 4) in rig.events
    await rig.offer((2, snapshot()))
    assert len(rig.asked) == 2 and rig.outcome() == [(1, ""), (2, "")], "it is there: that is the end"


async def test_what_the_log_is_known_to_have_by_then_is_not_stored() -> None:
    """It would not be installed: a machine that is built anew would be built on it, and be given its commands again."""
    rig = Rig()
    rig.member.raft.commit = INDEX - 1
    offered = rig.honest

    def committed(node: int, ranges: Sequence[Range], names: Sequence[bytes]) -> Piece:
        rig.member.raft.commit = INDEX
        return offered(node, ranges, names)

    rig.answer = committed
    await rig.offer((1, snapshot()))
    assert {event[0] for event in rig.events} == {"stored"} and not rig.chunks.intents
    assert rig.outcome() == [(1, "")] and not rig.receiver.installed


async def test_what_no_stored_segment_has_is_asked_for_again() -> None:
    """A log that starts over can't locate it any more when its file gets its segment."""
    rig = Rig(applied=4)
    rig.stored = 2
    await rig.offer((1, snapshot()))
    assert [ranges for _, ranges in rig.asked] == [[], [(3, 6)], [(5, 6)]] and ("installed", INDEX, 2) in rig.events


def lie(ranges: Sequence[Range]) -> Piece:
    """An answer without a unit that lives, and no release that would explain it."""
    return Piece([entry(ranges[0][0])._replace(live=set())], INDEX, 0, 0, {}, 0)


async def test_who_lies_is_passed_over() -> None:
    rig = Rig()
    rig.answer = lambda node, ranges, names: lie(ranges) if node == 1 and not names else rig.honest(node, ranges, names)
    await rig.offer((1, snapshot()))
    assert [node for node, ranges in rig.asked if ranges].count(1) == 1 and rig.receiver.installed == 1
    assert [event for event in rig.events if event[0] == "stored"] == [
        ("stored", [1, 2]), ("stored", [3, 4]), ("stored", [5, 6]),
    ]  # fmt: skip


async def test_without_an_honest_source_it_ends_and_nothing_is_installed() -> None:
    rig = Rig()
    rig.answer = lambda node, ranges, names: rig.honest(node, ranges, names) if names else lie(ranges)
    await rig.offer((1, snapshot()))
    assert rig.outcome()[0][1] and not rig.receiver.installed and not rig.events


async def test_when_nobody_answers_the_leader_hears_why() -> None:
    rig = Rig()

    def silent(node: int, ranges: Sequence[Range], names: Sequence[bytes]) -> Piece:
        raise LogyardError(f"node {node} does not answer")

    rig.answer = silent
    await rig.offer((1, snapshot()))
    assert rig.outcome() == [(1, "node 2 does not answer")] and not rig.receiver.installed
    assert UID in rig.chunks.intents, "what came stays, for the next offer"


async def test_a_release_explains_what_did_not_come_and_the_floor_rises_with_the_install() -> None:
    rig = Rig()
    rig.live.release((0, 0), (4, 0))
    rig.release = INDEX + 3
    await rig.offer((1, snapshot()))
    assert [event for event in rig.events if event[0] in ("stored", "floor", "snapshot")] == [
        ("stored", [4]), ("stored", [5, 6]), ("floor", INDEX + 3), ("snapshot", INDEX),
    ]  # fmt: skip


async def test_a_newer_offer_takes_over_what_is_there() -> None:
    rig = Rig()

    def gone(node: int, ranges: Sequence[Range], names: Sequence[bytes]) -> Piece:
        if ranges and ranges[0][0] > 2:
            raise LogyardError("the snapshot is gone")
        return rig.honest(node, ranges, names)

    rig.answer = gone
    await rig.offer((1, snapshot()))
    assert rig.chunks.intents[UID].covered == [(1, 2)] and not rig.receiver.installed
    rig.answer, rig.asked = rig.honest, []
    await rig.offer((1, snapshot(INDEX + 2)))
    assert [ranges[0][0] for _, ranges in rig.asked if ranges] == [3, 5] and rig.receiver.resumed == 1
    assert ("installed", INDEX + 2, 0) in rig.events


@pytest.mark.parametrize("data", [b"", b"LYSN" + bytes(40), snapshot().manifest[:-1]])
async def test_a_manifest_that_does_not_add_up_begins_nothing(data: bytes) -> None:
    rig = Rig()
    rig.receiver.on_offer(1, 5, {"uid": UID}, data)
    assert [node for node, error in rig.outcome() if error] == [1] and not rig.asked and not rig.events


async def test_a_machine_that_can_not_restore_it_stops_its_group_alone() -> None:
    rig = Rig()

    def fails(member: Any, found: Snapshot) -> None:
        raise ValueError("not mine")

    rig.receiver._host = rig.receiver._host._replace(restore=fails)
    await rig.offer((1, snapshot()))
    assert ("stop",) in rig.events and not rig.receiver.installed


async def test_an_older_offer_of_another_node_is_answered_at_once() -> None:
    """Who leads no more and is not told would wait for it, and offer nothing else until it gives up."""
    rig = Rig()
    await rig.offer((1, snapshot()), (2, snapshot(INDEX - 2)))
    assert rig.outcome() == [(2, "a newer snapshot is on its way"), (1, "")]


@pytest.mark.parametrize("damage", ["changed", "unreadable"])
async def test_a_chunk_that_is_damaged_here_is_pulled_anew(damage: str) -> None:
    """Each transfer of its snapshot failed, for as long as the intent kept it."""
    rig = Rig()
    (name,) = snapshot().names
    key, get = meta_rows.chunk_key(UID, name), rig.books.get
    rig.books.rows[key] = b"not what its name says"

    def read(asked: bytes) -> bytes | None:
        found = get(asked)
        if damage == "unreadable" and found == b"not what its name says":
            raise Corrupt("the meta store", 0, f"row {asked!r}", "two bad copies")
        return found

    rig.books.get = read  # type: ignore[assignment]
    await rig.offer((1, snapshot()))
    assert rig.outcome() == [(1, "")] and rig.receiver.installed == 1
    assert rig.books.rows[key] == bytes(snapshot().chunks[name])


async def test_what_the_log_overtakes_while_it_is_stored_stands_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's own snapshots up to there are no newer, and without one that stands for its log it never sleeps."""
    rig = Rig()
    store = rig.store_installed

    async def overtaken(member: Any, found: Snapshot, encoded: Encoded) -> None:
        await store(member, found, encoded)
        member.raft.commit = member.raft.applied = INDEX

    monkeypatch.setattr(rig, "store_installed", overtaken)
    await rig.offer((1, snapshot()))
    assert ("covered", INDEX) in rig.events and rig.outcome() == [(1, "")]
    assert not [event for event in rig.events if event[0] in ("restore", "installed")]

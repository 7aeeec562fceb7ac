"""The answering end of pulls, alone: an answer has all that lives of what it covers, or says that it has not.

Answers are read as a receiver reads them (`pull.read_piece`), so what does not add up fails here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
import xxhash

from logyard.engine.config import SystemConfig
from logyard.engine.entry import Entry, build_commands
from logyard.engine.ports import SourceEntry
from logyard.engine.ranges import Range, covered
from logyard.engine.replica.member import HALTED, RUNNING
from logyard.engine.replica.reader import Located, Wanted
from logyard.engine.transfer import snapshot_sender
from logyard.engine.transfer.pull import Piece, live_digest, read_piece
from logyard.engine.transfer.snapshot_sender import SERVED_MAX, WAITING_MAX, PullAnswers
from logyard.engine.transport.blobs import SNAPSHOT_PIECE, check_shape
from logyard.engine.transport.config import TransportConfig
from logyard.engine.transport.frame import BULK, HEADER_BYTES, decode_blob, encode_blob, parse_header
from logyard.engine.types import Buffer
from logyard.payloads.liveness import Liveness
from logyard.protocol.errors import Corrupt
from logyard.protocol.frame import encode_frame

UID, TERM, LAST = 7, 2, 10
ROT = Corrupt("a file", 0, "it", "rot")


def entry(index: int, command: bytes = b"") -> Entry:
    """An entry of two units, each of one record with this command."""
    bodies = [b"%d of %d" % (at, index) for at in range(2)]
    frames = [memoryview(b"".join(encode_frame([(b"", body)], command=command))) for body in bodies]
    return build_commands(UID, index, TERM, 0, frames)


class Rig:
    """Node 1 with entries 1 to 10, all applied; node 3 asks it. The disk answers when `disk` is set; entries in
    `rotten` can't be read, those in `unlocated` not even be found."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, dict[str, Any], bytes]] = []
        self.entries = {index: entry(index) for index in range(1, LAST + 1)}
        self.stored: dict[bytes, bytes] = {}
        self.disk = trio.Event()
        self.disk.set()
        self.rotten: set[int] = set()
        self.unlocated: set[int] = set()
        self.lost: set[int] = set()
        self.held = True
        self.more: dict[str, Any] = {"beside": True}
        self.reading = self.most = self.touched = 0
        self.liveness = Liveness()
        configuration = SimpleNamespace(nodes=lambda: {1, 2, 3})
        self.member: Any = SimpleNamespace(
            uid=UID, state=RUNNING, halt=None, resolves=True, last_release=4, liveness=self.liveness,
            raft=SimpleNamespace(applied=LAST, configuration=configuration),
        )  # fmt: skip
        store: Any = SimpleNamespace(lost=lambda uid, first, last: bool(self.lost & {*range(first, last + 1)}))
        chunks: Any = SimpleNamespace(touch=self.touch, read=lambda uid, name: self.stored.get(name))
        self.config = SystemConfig()
        self.answers = PullAnswers(
            self.config, lambda uid, node: self.member if uid == UID else None, store, cast(Any, self),
            lambda one: self.held, chunks, self.send, self.spawn,
        )  # fmt: skip
        self.nursery: trio.Nursery

    def touch(self, uid: int, node: int, now: float) -> None:
        self.touched += 1

    def spawn(self, task: Callable[..., Any], *arguments: Any) -> None:
        self.nursery.start_soon(task, *arguments)

    def send(self, node: int, kind: int, request: int, header: Any, body: Sequence[Buffer] = ()) -> bool:
        assert kind == SNAPSHOT_PIECE
        self.sent.append((node, request, header, b"".join(body)))
        return True

    # The reader

    def payload_entries(self, member: Any, first: int, last: int) -> Iterator[Located]:
        for index in range(first, last + 1):
            if index in self.unlocated:
                raise ROT
            one = self.entries[index]
            yield Located(index, TERM, one.data, one, None)

    async def read(self, member: Any, wanted: Sequence[Wanted], mend: bool = True) -> list[Buffer]:
        assert not mend, "who asks has others to ask; this member asks nobody for it"
        bodies = [(one.located.entry, one.unit.number) for one in wanted]
        self.reading += 1
        self.most = max(self.most, self.reading)
        await self.disk.wait()
        self.reading -= 1
        if self.rotten & {one.located.index for one in wanted}:
            raise ROT
        return [found.bodies[number] for found, number in bodies if found is not None and found.bodies]

    # The one who asks

    async def ask(
        self, ranges: Sequence[Range], chunks: Sequence[bytes] = (), limit: int = 1 << 30, uid: int = UID, node: int = 3
    ) -> Piece:
        """What a question brings, checked as a receiver does it. Raises AssertionError with the reason it was refused
        for."""
        header = {"uid": uid, "index": 10, "ranges": ranges, "chunks": chunks, "limit": limit, **self.more}
        async with trio.open_nursery() as self.nursery:
            self.answers.on_pull(node, 77, header)
        ((to, request, answer, body),) = self.sent
        self.sent.clear()
        assert (to, request, answer["uid"]) == (node, 77, uid)
        assert answer["error"] is None, answer["error"]
        return read_piece(UID, ranges, chunks, answer, body)

    async def refusal(self, *arguments: Any, **named: Any) -> str:
        with pytest.raises(AssertionError) as caught:
            await self.ask(*arguments, **named)
        return str(caught.value)


def kept(piece: Piece) -> dict[int, set[int]]:
    """The units of each entry that came."""
    return {row.index: set(row.live or ()) for row in piece.rows}


BOTH = {0, 1}


class Wired(Rig):
    """With the transport between: what is no blob is not sent, and what comes has its shape."""

    def send(self, node: int, kind: int, request: int, header: Any, body: Sequence[Buffer] = ()) -> bool:
        frame = b"".join(encode_blob(kind, request, header, body))
        at = HEADER_BYTES + parse_header(frame[:HEADER_BYTES], BULK, TransportConfig()).section
        blob = decode_blob(frame[HEADER_BYTES:at], memoryview(frame)[at:])
        check_shape(kind, blob.header)
        return super().send(node, kind, request, blob.header, [blob.body])


@pytest.mark.parametrize(
    ("mib", "asked", "pieces"), [(1, True, 2), (2, True, 6), (9, True, 6), (1, False, 2), (2, False, 6)]
)
async def test_entries_come_however_much_command_they_have(mib: int, asked: bool, pieces: int) -> None:
    rig = Wired()
    rig.more = {"beside": True} if asked else {}
    rig.entries = {index: entry(index, bytes(mib << 19)) for index in range(1, 7)}
    rig.liveness.release((2, 0), (2, 1))
    came: list[SourceEntry] = []
    while len(came) < 6:
        piece = await rig.ask([(len(came) + 1, 6)])
        assert piece.rows and piece.through == piece.rows[-1].index
        came += piece.rows
    assert [one.data for one in came] == [one.data for one in rig.entries.values()] and came[1].live == {1}
    assert rig.answers.pieces == pieces


async def test_who_knows_of_no_metadata_beside_the_header_is_told_what_is_too_large_for_it() -> None:
    rig = Wired()
    rig.more = {}
    rig.entries[1] = entry(1, bytes(5 << 20))
    assert "a blob's header" in await rig.refusal([(1, 2)])
    assert kept(await rig.ask([(2, 3)])) == {2: BOTH, 3: BOTH}


async def test_all_that_lives_comes_with_the_release_that_explains_the_rest() -> None:
    rig = Rig()
    rig.liveness.release((1, 0), (3, 0))
    rig.liveness.release((5, 1), (6, 0))
    piece = await rig.ask([(1, 6), (8, 9)])
    assert kept(piece) == {3: BOTH, 4: BOTH, 5: {0}, 6: BOTH, 8: BOTH, 9: BOTH}
    assert (piece.through, piece.release) == (9, 4) and piece.live == live_digest(rig.liveness, [(1, 6), (8, 9)])
    assert rig.answers.pieces == 1 and rig.answers.bytes == piece.size > 0 and rig.touched == 1


async def test_what_is_asked_of_nothing_is_answered_with_nothing() -> None:
    piece = await Rig().ask([])
    assert (piece.rows, piece.through, piece.chunks, piece.size) == ([], 0, {}, 0)
    rig = Rig()
    rig.liveness.release((1, 0), (LAST + 1, 0))
    assert (await rig.ask([(1, LAST)])).through == LAST, "all of it is dead, and so all is covered"


@pytest.mark.parametrize(("applied", "through"), [(5, 5), (8, 8), (9, 9), (100, 9)])
async def test_nothing_is_said_of_what_is_not_applied_here(applied: int, through: int) -> None:
    rig = Rig()
    rig.member.raft.applied = applied
    piece = await rig.ask([(1, 5), (8, 9)])
    assert piece.through == through and max(kept(piece)) == through
    assert piece.live == live_digest(rig.liveness, covered([(1, 5), (8, 9)], through))


async def test_who_has_applied_nothing_of_it_says_so() -> None:
    rig = Rig()
    rig.member.raft.applied = 7
    assert "has not applied entry 8" in await rig.refusal([(8, 9)])


async def test_an_answer_ends_with_the_entry_that_fills_it() -> None:
    rig = Rig()
    size = rig.entries[1].body_bytes
    assert kept(await rig.ask([(1, LAST)], limit=2 * size)) == {1: BOTH, 2: BOTH}
    piece = await rig.ask([(1, LAST)], limit=1)
    assert kept(piece) == {1: BOTH} and piece.through == 1, "at least one, however large"


async def test_no_answer_is_larger_than_a_piece_whoever_asks() -> None:
    rig = Rig()
    object.__setattr__(rig.config, "snapshot_piece_bytes", rig.entries[1].body_bytes + 1)
    assert kept(await rig.ask([(1, LAST)])) == {1: BOTH, 2: BOTH}


async def test_looking_at_what_is_dead_has_an_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_sender, "LOOKED_AT_MAX", 3)
    rig = Rig()
    rig.liveness.release((1, 0), (9, 0))
    piece = await rig.ask([(1, LAST)])
    assert (piece.rows, piece.through) == ([], 3)
    assert kept(await rig.ask([(7, LAST)])) == {9: BOTH}


def name_of(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


async def test_chunks_come_first_and_leave_what_room_there_is() -> None:
    rig = Rig()
    chunks = [b"a" * 1000, b"b" * 1000, b"c" * 1000]
    names = [name_of(one) for one in chunks]
    rig.stored = dict(zip(names, chunks, strict=True))
    piece = await rig.ask([(1, LAST)], names, limit=1500)
    assert list(piece.chunks) == names[:2] and (piece.rows, piece.through) == ([], 0)
    piece = await rig.ask([(1, LAST)], names[2:], limit=1001)
    assert list(piece.chunks) == names[2:] and kept(piece) == {1: BOTH}
    del rig.stored[names[1]]
    assert "not stored any more" in await rig.refusal([], names)


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("not here", "does not run"), ("half built", "does not run"), ("a stranger", "no member"), ("floor", "floor"),
        ("lost", "lost here"), ("nowhere", "neither stored nor released"),
    ],
)  # fmt: skip
async def test_who_can_not_answer_for_it_says_why(why: str, said: str) -> None:
    rig = Rig()
    uid, node = UID, 3
    if why == "not here":
        uid = 8
    elif why == "half built":
        rig.member.state, rig.member.halt = HALTED, SimpleNamespace(half_built=True)
    elif why == "a stranger":
        node = 4
    elif why == "floor":
        rig.member.resolves = False
    elif why == "lost":
        rig.lost = {2}
    else:
        rig.held = False
    assert said in await rig.refusal([(1, 3)], uid=uid, node=node)
    assert rig.answers.pieces == 0 and rig.answers.bytes == 0


async def test_who_is_halted_at_a_command_gives_what_came_before_it() -> None:
    rig = Rig()
    rig.member.state, rig.member.halt = HALTED, SimpleNamespace(half_built=False)
    assert (await rig.ask([(1, 4)])).through == 4


async def test_what_is_lost_elsewhere_is_in_nobodys_way() -> None:
    rig = Rig()
    rig.lost = {5}
    assert (await rig.ask([(1, 4), (6, 9)])).through == 9


async def test_what_lived_when_the_answer_was_built_is_in_it() -> None:
    rig = Rig()
    rig.disk = trio.Event()
    digest = live_digest(rig.liveness, [(1, 4)])

    async def release() -> None:
        await trio.testing.wait_all_tasks_blocked()
        rig.liveness.release((1, 0), (4, 0))
        rig.member.last_release = 9
        rig.disk.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(release)
        piece = await rig.ask([(1, 4)])
    assert set(kept(piece)) == {1, 2, 3, 4} and (piece.release, piece.live) == (4, digest)


@pytest.mark.parametrize(("rotten", "came"), [({3}, {1: BOTH}), ({1}, None)])
async def test_of_a_batch_with_damage_the_first_entry_comes_if_it_is_whole(
    rotten: set[int], came: dict[int, set[int]] | None
) -> None:
    rig = Rig()
    rig.rotten = rotten
    if came is None:
        assert "rot" in await rig.refusal([(1, 4)])
        return
    piece = await rig.ask([(1, 4)])
    assert kept(piece) == came and piece.through == 1 and piece.live == live_digest(rig.liveness, [(1, 1)])
    rig.rotten = {2}
    assert "rot" in await rig.refusal([(2, 2)]), "it alone is asked for: there is nothing else to give"


async def test_what_comes_before_a_place_that_can_not_be_read_comes() -> None:
    rig = Rig()
    rig.unlocated = {3}
    piece = await rig.ask([(1, 4)])
    assert set(kept(piece)) == {1, 2} and piece.through == 2
    assert "rot" in await rig.refusal([(3, 4)])
    rig.liveness.release((1, 0), (3, 0))
    assert "rot" in await rig.refusal([(1, 4)]), "nothing lives before it: nobody would get any further"


async def test_one_node_may_have_so_many_questions_and_another_one_as_many() -> None:
    rig = Rig()
    rig.disk = trio.Event()
    header = {"uid": UID, "index": 10, "ranges": [(1, 1)], "chunks": [], "limit": 1}
    async with trio.open_nursery() as rig.nursery:
        for request in range(WAITING_MAX + 1):
            rig.answers.on_pull(3, request, header)
        ((node, request, answer, _),) = rig.sent
        assert (node, request, answer["error"]) == (3, WAITING_MAX, "too many pulls at once")
        rig.answers.on_pull(2, 0, header)
        assert len(rig.sent) == 1
        await trio.testing.wait_all_tasks_blocked()
        assert rig.reading == SERVED_MAX, "so many at a time"
        rig.disk.set()
    assert len(rig.sent) == WAITING_MAX + 2 and rig.most == SERVED_MAX
    assert rig.answers.pieces == WAITING_MAX + 1
    rig.sent.clear()
    assert kept(await rig.ask([(1, 1)])) == {1: BOTH}, "those that were answered count no more"


async def test_a_question_that_is_cut_off_gives_its_place_back() -> None:
    rig = Rig()
    rig.disk = trio.Event()
    header = {"uid": UID, "index": 10, "ranges": [(1, 1)], "chunks": [], "limit": 1}
    async with trio.open_nursery() as rig.nursery:
        for request in range(WAITING_MAX):
            rig.answers.on_pull(3, request, header)
        await trio.testing.wait_all_tasks_blocked()
        rig.nursery.cancel_scope.cancel()
    assert not rig.sent
    rig.disk.set()
    assert kept(await rig.ask([(1, 1)])) == {1: BOTH}

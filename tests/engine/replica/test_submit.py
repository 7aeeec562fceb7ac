"""The way in, alone: what is let in is queued once, and what is refused was not queued."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.config import SystemConfig
from logyard.engine.entry import encode_system
from logyard.engine.machine import PayloadRef
from logyard.engine.raft.core import FOLLOWER
from logyard.engine.replica.member import HALTED, Member
from logyard.engine.replica.sessions import Sessions
from logyard.engine.replica.submit import Submit, check_leader
from logyard.engine.replica.uploads import UPLOADS_MAX, Uploads
from logyard.protocol.errors import BadRequest, Busy, GroupStopped, NotLeader, UnknownGroup, encode_error
from logyard.protocol.frame import ABSENT, PIECE, PIECED, UNIFORM, encode_frame, encode_parts
from logyard.protocol.pending import FAILED, OK

from .doubles import UID, Admission, Client, Core, Recorder, member_of

KIB = 1024


def frame(records: int = 1, body: bytes = b"x", session: int = 0) -> memoryview:
    return memoryview(b"".join(encode_frame([(b"", body)] * records, command=b"c", session=session, sequence=session)))


def piece(size: int, upload: int = 1, session: int = 1, sequence: int = 0) -> memoryview:
    """A piece of a large payload; of size 0 it gives its upload up."""
    large = [bytes(size)] if size >= 4 * KIB else []
    small = [bytes(size)] if 0 < size < 4 * KIB else []
    table, region = [0, size or ABSENT], PIECED.pack(upload, 0)
    parts = encode_parts(table, [b""], small, large, region, flags=UNIFORM | PIECE, session=session, sequence=sequence)
    return memoryview(b"".join(parts))


class Rig:
    """One node with a group that is awake and led here, and one, 8, that sleeps."""

    def __init__(self, **limits: int) -> None:
        self.member, self.core = member_of(Recorder())
        self.asleep, _ = member_of(Recorder())
        self.members: dict[int, Member] = {UID: self.member}
        self.found: list[int] = []
        self.marked: list[Member] = []
        self.client = Client()
        self.config = SystemConfig()
        for name, limit in limits.items():
            object.__setattr__(self.config, name, limit)
        self.submit = Submit(1, self.config, self.members, self.find, self.mark)

    @property
    def books(self) -> Admission:
        books = self.member.proposals.admission
        assert isinstance(books, Admission)
        return books

    def find(self, uid: int) -> Member | None:
        self.found.append(uid)
        return self.asleep if uid == 8 else None

    def mark(self, member: Member) -> None:
        member.dirty = True
        self.marked.append(member)

    def send(self, sent: memoryview | None = None, uid: int = UID, **how: bool) -> None:
        self.submit.submit(uid, frame() if sent is None else sent, self.client, 5, **how)

    def check_nothing(self, queued: int = 0) -> None:
        proposals = self.member.proposals
        assert len(proposals.queue or ()) == queued and not proposals.own and not proposals.low
        assert not self.client.told, "who is refused hears it at once, and nothing later"


def test_a_frame_is_queued_and_its_member_marked_once() -> None:
    rig = Rig()
    sent = frame(3)
    rig.send(sent)
    rig.send()
    queue = rig.member.proposals.queue
    assert queue is not None and [(one.request, one.records) for one in queue] == [(5, 3), (5, 1)]
    assert queue[0].frame is sent and queue[0].sink is rig.client, "nothing is copied"
    assert rig.marked == [rig.member] and not rig.found
    assert rig.member.proposals.queue_bytes == rig.books.queued == len(sent) + len(frame())


def test_how_a_frame_is_to_be_treated_goes_with_it() -> None:
    rig = Rig()
    rig.books.full = True
    rig.send(reserved=True)
    assert rig.member.proposals.urgent
    rig.books.full = False
    rig.send(low=True)
    rig.send(early=True)
    rig.send(frame(session=4))
    proposals = rig.member.proposals
    assert len(proposals.low or ()) == 1 and len(proposals.queue or ()) == 3
    assert proposals.early is not None and proposals.guarded


def test_a_group_that_sleeps_is_woken_and_one_that_is_not_here_is_unknown() -> None:
    rig = Rig()
    rig.send(uid=8)
    assert rig.marked == [rig.asleep] and rig.found == [8]
    with pytest.raises(UnknownGroup, match="on node 1"):
        rig.send(uid=3)
    assert rig.marked == [rig.asleep]


@pytest.mark.parametrize("why", ["stopped", "follows", "full", "records", "malformed", "short"])
def test_what_is_refused_was_not_queued(why: str) -> None:
    rig = Rig(entry_records_max=10)
    sent = frame(11) if why == "records" else frame()
    error: type[Exception] = BadRequest
    if why == "stopped":
        rig.member.state, error = HALTED, GroupStopped
    elif why == "follows":
        rig.core.role, rig.core.leader, error = FOLLOWER, 2, NotLeader
    elif why == "full":
        rig.books.full, error = True, Busy
    elif why == "malformed":
        sent = memoryview(bytes(sent[:-1]))
    elif why == "short":
        sent = memoryview(b"")
    with pytest.raises(error) as caught:
        rig.send(sent)
    if isinstance(caught.value, NotLeader):
        assert caught.value.leader == 2
    rig.check_nothing()
    assert not rig.marked and rig.books.queued == 0
    rig.member.state, rig.core.role, rig.books.full = "running", Core().role, False
    rig.send(frame(10))
    rig.check_nothing(queued=1)


def test_a_piece_is_alone_in_its_entry_and_bounded_with_the_unfinished_ones() -> None:
    rig = Rig(group_upload_bytes=300 * KIB, entry_records_max=50)
    rig.send(piece(200 * KIB))
    queue = rig.member.proposals.queue
    assert queue is not None and queue[0].records == 50, "as many as an entry may have"
    rig.member.uploads = Uploads()
    rig.member.uploads.bytes = 200 * KIB
    with pytest.raises(Busy, match="unfinished uploads"):
        rig.send(piece(100 * KIB))
    rig.check_nothing(queued=1)
    rig.send(piece(0))
    assert len(queue) == 2, "what gives an upload up is what makes room"
    rig.send(frame(body=bytes(200 * KIB)))
    assert len(queue) == 3, "what is no piece has nothing to do with it"


def test_small_pieces_are_bounded_too_and_so_are_the_uploads_of_a_session() -> None:
    rig = Rig(group_upload_bytes=80 * 64 * KIB, entry_records_max=50)
    table = rig.member.uploads = Uploads()
    for number in range(1, UPLOADS_MAX + 1):
        assert table.add((1, number), 0, PayloadRef(UID, number, 0, 1, 1, b"h" * 16)) is None
    with pytest.raises(Busy, match="the session's unfinished uploads"):
        rig.send(piece(1, upload=UPLOADS_MAX + 1))
    rig.check_nothing()
    rig.send(piece(0, upload=UPLOADS_MAX + 1))
    rig.send(piece(1, upload=UPLOADS_MAX))
    rig.send(piece(1, upload=1, session=2))
    rig.check_nothing(queued=3)
    for number in range(80 - UPLOADS_MAX):
        assert table.add((2, 1), number, PayloadRef(UID, 100 + number, 0, 1, 1, b"h" * 16)) is None
    with pytest.raises(Busy, match="the group's unfinished uploads"):
        rig.send(piece(1, session=3))
    rig.send(piece(0, session=3))
    rig.check_nothing(queued=4)


def test_a_piece_that_was_applied_before_is_let_in_to_be_answered_again() -> None:
    rig = Rig(entry_records_max=50)
    table = rig.member.uploads = Uploads()
    for number in range(2, UPLOADS_MAX + 2):
        assert table.add((1, number), 0, PayloadRef(UID, number, 0, 1, 1, b"h" * 16)) is None
    sessions = rig.member.sessions = Sessions()
    sessions.register(1, 77, 1000)
    with pytest.raises(Busy):
        rig.send(piece(1, sequence=5))
    assert sessions.take(1, 5) is None
    sessions.keep(1, 5, b"")
    rig.send(piece(1, sequence=5))
    rig.check_nothing(queued=1)


# Commands of the engine's own


def test_the_engines_own_commands_come_before_all_others() -> None:
    rig = Rig()
    rig.books.full = True
    rig.submit.propose(rig.member, "timer", "t", 5, sink=rig.client, request=7)
    own = rig.member.proposals.own
    assert own is not None and [(bytes(one.frame), one.request) for one in own] == [
        (bytes(encode_system("timer", "t", 5)), 7)
    ]
    assert rig.marked == [rig.member] and rig.books.queued == 0, "they are in nobody's budget"


@pytest.mark.parametrize(("error", "state"), [(GroupStopped, HALTED), (NotLeader, "running")])
def test_only_a_running_leader_is_told_to_and_a_halted_one_may_all_the_same(error: type[Exception], state: str) -> None:
    rig = Rig()
    rig.member.state = state
    if error is NotLeader:
        rig.core.role = FOLLOWER
    with pytest.raises(error):
        check_leader(rig.member)
    with pytest.raises(error):
        rig.submit.propose(rig.member, "skip")
    rig.check_nothing()
    rig.submit.queue_own(rig.member, "skip")
    assert rig.marked == [rig.member] and len(rig.member.proposals.own or ()) == 1


@pytest.mark.parametrize("status", [OK, FAILED])
async def test_a_commit_waits_for_its_one_reply(status: int) -> None:
    rig = Rig()
    outcome: list[Any] = []

    async def commit() -> None:
        try:
            outcome.append(await rig.submit.commit(rig.member, "register", 1))
        except NotLeader as error:
            outcome.append(error.leader)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(commit)
        await trio.testing.wait_all_tasks_blocked()
        (pending,) = rig.member.proposals.own or []
        assert not outcome
        pending.sink.reply(pending.request, status, b"done" if status == OK else encode_error(NotLeader(2)))
    assert outcome == [b"done" if status == OK else 2]


async def test_a_commit_that_is_given_up_is_answered_to_nobody() -> None:
    rig = Rig()
    with trio.move_on_after(0):
        await rig.submit.commit(rig.member, "register", 1)
    (pending,) = rig.member.proposals.own or []
    pending.sink.reply(pending.request, OK, b"done")
    with pytest.raises(NotLeader):
        rig.core.role = FOLLOWER
        await rig.submit.commit(rig.member, "register", 1)

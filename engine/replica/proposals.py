"""The proposal queue of one group: frames from their admission until somebody is told what came of them.

Only what is new becomes part of the log. Invariants: a frame of a session is judged by a state that holds everything
earlier leaders committed, so it waits until this leader has applied its own no-op. An answer given here is final:
replies of applied frames never change. The rule at apply (`sessions`) would come to the same; this only keeps
duplicates and their payloads out of the log. Each byte of a client's frame is counted in the books from `add` until
the frame is answered. Filled by `submit`, drained in the turn, settled by the applier.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from logyard.protocol.errors import Busy, LogyardError, encode_error
from logyard.protocol.frame import FRAME_SESSION, FRAME_SESSION_AT
from logyard.protocol.pending import DROP, FAILED, OK, Sink

from ..core import Core
from ..entry import FRAMES_MAX, Entry, build_commands, build_system
from ..machine import Reject
from .sessions import Sessions

PLACE = struct.Struct("<QQ")
"""index, term: the early answer to a command."""
LOW_BATCH = 16
"""Low-priority frames that are let through at a time (Ra's flush of its low-priority queue)."""
LOW_TURNS = 64
"""Turns after which some are let through although others wait: low priority is not never."""


class Admission(Protocol):
    """Where the bytes of frames are counted, those that wait for their turn and those that were not answered yet."""

    def admit(self, holder: ProposalQueue, size: int, reserved: bool) -> None:
        """Count a frame, or raise what says why it can't be taken."""
        ...

    def unqueue(self, size: int) -> None:
        """Count frames as proposed that waited for their turn."""
        ...

    def drop(self, size: int) -> None:
        """Count frames as answered that waited for their turn."""
        ...

    def settle(self, size: int) -> None:
        """Count a frame as answered."""
        ...


class CommandRejected(LogyardError):
    """A machine's own, committed refusal; `code` is the machine's."""

    def __init__(self, reject: Reject) -> None:
        super().__init__(reject.message)
        self.code = reject.code


class Proposal:
    """A frame, from its admission until its one reply.

    `sink` gets the reply: the client's own sink, or this object where there is more to do than to tell it: a session's
    frame tells everybody who sent it meanwhile, an early one tells its place before. What is kept for that is set only
    then, so that a plain frame costs four fields.
    """

    __slots__ = ("frame", "sink", "request", "records", "_client", "_copies", "_key", "_under_way", "_place")

    def __init__(self, frame: memoryview, sink: Sink, request: int, records: int) -> None:
        self.frame = frame
        self.sink = sink
        self.request = request
        self.records = records

    def fail(self, error: LogyardError) -> None:
        """Say why there is no reply."""
        self.sink.reply(self.request, FAILED, encode_error(error))

    def answer(self, reply: bytes | Reject) -> None:
        """Tell what came of the frame."""
        if isinstance(reply, Reject):
            self.fail(CommandRejected(reply))
        else:
            self.sink.reply(self.request, OK, reply)

    def _intercept(self) -> None:
        self._client: Sink | None = self.sink
        self._copies: list[tuple[Sink, int]] | None = None
        self._under_way: dict[tuple[int, int], Proposal] | None = None
        self._place: bytes | None = None
        self.sink = self

    def answer_early(self) -> None:
        """Answer when the leader itself has the frame's entry on disk, not yet committed: with where it lies. What
        comes of the entry later is told nobody."""
        self._intercept()
        self._place = b""

    def share(self, key: tuple[int, int], under_way: dict[tuple[int, int], Proposal]) -> None:
        """Stand for everybody who sends the same frame, `key`, until it is answered."""
        if self.sink is not self:
            self._intercept()
        self._key = key
        self._under_way = under_way
        under_way[key] = self

    def join(self, copy: Proposal) -> None:
        """Tell the sender of a copy as well. Its bytes are let go of."""
        if self._copies is None:
            self._copies = []
        self._copies.append((copy.sink, copy.request))

    def proposed(self, index: int, term: int) -> bool:
        """Note where the frame lies; return True when it is to be answered early."""
        if self.sink is not self or self._place is None:
            return False
        self._place = PLACE.pack(index, term)
        return True

    def durable(self) -> None:
        """Answer early: the entry is on this node's disk now."""
        client, self._client = self._client, None
        if client is not None:
            client.reply(self.request, OK, self._place or b"")

    def reply(self, request: int, status: int, data: bytes) -> None:
        """Take the one outcome for all who wait. An early answer that was given counts."""
        client, self._client = self._client, None
        # Nothing comes any more; and an object that holds itself would wait for the garbage collector.
        self.sink = DROP
        if self._under_way is not None:
            self._under_way.pop(self._key, None)
        if client is not None:
            # A quorum may be quicker than the own disk. Copies have no place of their own.
            client.reply(request, status, data if status or not self._place else self._place)
        for sink, number in self._copies or ():
            sink.reply(number, status, data)


class Owed(NamedTuple):
    """The replies owed when an index is applied; `term` says whose entry it was."""

    term: int
    size: int
    frames: list[Proposal]


class Shape(NamedTuple):
    """How frames become entries: the most of an entry, what keeps its payload in memory, who counts a refusal."""

    bytes_max: int
    records_max: int
    keep: Callable[[Entry], None]
    refused: Callable[[str], None]


class ProposalQueue:
    """What one member was asked to propose. `queue_bytes` and `inflight_bytes` are what back-pressure counts for the
    group: waiting for a turn, and proposed but not answered. An idle group has no queue at all."""

    __slots__ = (
        "raft", "admission", "queue", "queue_bytes", "waiting", "inflight_bytes", "own", "guarded", "urgent",
        "under_way", "low", "low_waited", "early",
    )  # fmt: skip

    def __init__(self, raft: Core, admission: Admission) -> None:
        self.raft = raft
        self.admission = admission
        self.queue: deque[Proposal] | None = None
        self.queue_bytes = 0
        # By index, the replies owed for entries that this member proposed as leader.
        self.waiting: dict[int, Owed] | None = None
        self.inflight_bytes = 0
        # Commands of the engine's own: not in the budget of clients, proposed before them, in entries of their own.
        self.own: list[Proposal] | None = None
        # Frames of sessions are queued, and which of them are proposed and not answered.
        self.guarded = False
        self.under_way: dict[tuple[int, int], Proposal] | None = None
        # Something that waits may use the reserved share of the budgets.
        self.urgent = False
        # Frames of low priority, and how many turns they have waited; frames to be answered when they are on disk here.
        self.low: deque[Proposal] | None = None
        self.low_waited = 0
        self.early: list[tuple[int, int, Proposal]] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything."""
        return not (self.queue or self.own or self.waiting or self.low or self.early or self.urgent or self.under_way)

    @property
    def bytes(self) -> int:
        """What of this group's frames is not answered."""
        return self.queue_bytes + self.inflight_bytes

    def add(
        self, frame: memoryview, sink: Sink, request: int, records: int, session: int, reserved: bool, early: bool,
        low: bool,
    ) -> None:  # fmt: skip
        """Queue a client frame. Raises what the books refuse it with; nothing was queued then."""
        size = len(frame)
        self.admission.admit(self, size, reserved)
        if reserved:
            self.urgent = True
        proposal = Proposal(frame, sink, request, records)
        if early:
            proposal.answer_early()
            if self.early is None:
                self.early = []
        if low:
            if self.low is None:
                self.low = deque()
            self.low.append(proposal)
        elif self.queue is None:
            self.queue = deque((proposal,))
        else:
            self.queue.append(proposal)
        if session:
            self.guarded = True
        self.queue_bytes += size

    def add_own(self, frame: memoryview, sink: Sink, request: int) -> None:
        """Queue a command of the engine's own."""
        if self.own is None:
            self.own = []
        self.own.append(Proposal(frame, sink, request, 1))

    def let_low(self) -> bool:
        """Let frames of low priority join the queue when nothing else waits, a few at a time; and now and then anyway.
        True when more of them wait."""
        low = self.low
        assert low is not None
        self.low_waited += 1
        if self.queue and self.low_waited < LOW_TURNS:
            return False
        self.low_waited = 0
        queue = self.queue
        if queue is None:
            queue = self.queue = deque()
        for _ in range(min(LOW_BATCH, len(low))):
            queue.append(low.popleft())
        # Some of them may belong to sessions.
        self.guarded = True
        if not low:
            self.low = None
        return self.low is not None

    def sort(self, table: Sessions | None, seen: Callable[[int], None]) -> bool:
        """Answer duplicates of applied frames, let those of frames under way wait with them. `seen` hears of clients:
        who sends frames is alive, whatever became of its heartbeats.

        False: nothing of the queue may be proposed yet.
        """
        raft = self.raft
        if raft.applied < raft.lead_index:
            return False
        self.guarded = False
        queue = self.queue
        assert queue is not None
        under_way = self.under_way
        if under_way is None:
            under_way = self.under_way = {}
        fresh: deque[Proposal] = deque()
        for proposal in queue:
            session, sequence = key = FRAME_SESSION.unpack_from(proposal.frame, FRAME_SESSION_AT)
            if not session:
                fresh.append(proposal)
                continue
            reply = None
            if table is not None and session in table.by_id:
                seen(table.by_id[session].client)
                reply = table.known(session, sequence)
            first = under_way.get(key)
            if reply is None and first is None:
                proposal.share(key, under_way)
                fresh.append(proposal)
                continue
            size = len(proposal.frame)
            self.queue_bytes -= size
            self.admission.drop(size)
            if reply is not None:
                proposal.answer(reply)
            elif first is not None:
                first.join(proposal)
        self.queue = fresh or None
        return bool(fresh)

    def propose(self, now: int, shape: Shape) -> None:
        """Make all frames that wait one entry, or a few when they are many bytes. `now`: log time."""
        raft, admission, queue = self.raft, self.admission, self.queue
        limit, records_max, keep, refused = shape
        while queue:
            frames: list[Proposal] = []
            size = records = 0
            while queue and (
                not frames
                or (
                    size + len(queue[0].frame) <= limit
                    and records + queue[0].records <= records_max
                    and len(frames) < FRAMES_MAX
                )
            ):
                proposal = queue.popleft()
                frames.append(proposal)
                size += len(proposal.frame)
                records += proposal.records
            self.queue_bytes -= size
            admission.unqueue(size)
            index = raft.log.last_index + 1
            entry = build_commands(raft.uid, index, raft.term, now, [proposal.frame for proposal in frames])
            try:
                raft.propose(entry, self.urgent)
            except LogyardError as error:
                admission.settle(size)
                if isinstance(error, Busy):
                    refused(error.cause)
                for proposal in frames:
                    proposal.fail(error)
                continue
            if self.waiting is None:
                self.waiting = {}
            self.waiting[index] = Owed(raft.term, size, frames)
            self.inflight_bytes += size
            if self.early is not None:
                self.early += [(index, raft.term, one) for one in frames if one.proposed(index, raft.term)]
            keep(entry)
        self.queue = None
        self.urgent = False

    def propose_own(self, now: int) -> None:
        """Make the commands of the engine's own entries without payload."""
        raft = self.raft
        queue, self.own = self.own or [], None
        for at in range(0, len(queue), FRAMES_MAX):
            frames = queue[at : at + FRAMES_MAX]
            index = raft.log.last_index + 1
            entry = build_system(index, raft.term, now, [proposal.frame for proposal in frames])
            try:
                raft.propose(entry, True)
            except LogyardError as error:
                for proposal in frames:
                    proposal.fail(error)
                continue
            if self.waiting is None:
                self.waiting = {}
            self.waiting[index] = Owed(raft.term, 0, frames)

    def durable(self) -> None:
        """Answer the early frames whose entry is on this node's disk now."""
        log, waiting = self.raft.log, []
        for index, term, proposal in self.early or ():
            if index > log.stable:
                waiting.append((index, term, proposal))
            elif log.term(index) == term:
                proposal.durable()
        self.early = waiting

    def settle(self, index: int) -> Owed | None:
        """Return who waits for an entry, if anybody does; from now on nobody."""
        owed = self.waiting.pop(index, None) if self.waiting else None
        if owed is not None:
            self.inflight_bytes -= owed.size
            self.admission.settle(owed.size)
        return owed

    def fail(self, error: LogyardError) -> None:
        """Refuse what is queued: nothing of it was proposed, so every frame may be sent again."""
        queue, self.queue = self.queue, None
        self.admission.drop(self.queue_bytes)
        self.queue_bytes = 0
        self.urgent = False
        self.guarded = False
        own, self.own = self.own, None
        low, self.low = self.low, None
        for proposal in (*(own or ()), *(queue or ()), *(low or ())):
            proposal.fail(error)

    def fail_proposed(self, error: LogyardError, first: int = 0) -> None:
        """Answer everything that was proposed from index `first` on with `error`."""
        if not self.waiting:
            return
        for index in [index for index in self.waiting if index >= first]:
            owed = self.settle(index)
            assert owed is not None
            for proposal in owed.frames:
                proposal.fail(error)

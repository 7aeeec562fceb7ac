"""A member: one group's replica on this node, as the host sees it. Data and small verbs; the turn that drives it is
in `scheduler`.

Invariants: applied <= raft.commit; a member that is STOPPED or DELETED takes no part (law 7), one that is HALTED runs
its core and applies nothing; only a RUNNING one takes frames and answers reads;
`waiting` holds the replies owed for entries this member proposed as leader, by index.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from logyard.protocol.errors import GroupStopped, LogyardError, NotLeader, Unknown, encode_error

from ..entry import Entry, records_in
from ..log.meta_rows import SegmentRun, cut_runs
from ..machine import Machine
from ..ports import LivenessPort
from ..raft.core import Raft
from ..types import Spec
from .budget import Budget
from .log_time import LogTime
from .machine_state import MachineState
from .sessions import Sessions, batch_of
from .uploads import Uploads

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..raft.messages import Message

RUNNING = "running"
HALTED = "halted"
STOPPED = "stopped"
DELETED = "deleted"
MENDING = "mending"
ASLEEP = "hibernating"
"""This object stands for nothing any more: the group is a row of `sleepers`, or another object since."""
OK = 0
FAILED = 1


class Sink(Protocol):
    """Where replies go: a connection, or an embedded caller. Called in a turn of the loop, never blocks."""

    def reply(self, request: int, status: int, data: bytes) -> None:
        """The answer to one frame: status OK and the machine's reply, or FAILED and an encoded error."""
        ...


class Dropped:
    """A sink for what nobody waits for."""

    def reply(self, request: int, status: int, data: bytes) -> None:
        """Nobody waits."""


DROP = Dropped()


class Queued(NamedTuple):
    """A client frame that waits to become part of an entry."""

    frame: memoryview
    sink: Sink
    request: int
    records: int

    def fail(self, error: LogyardError) -> None:
        """Say why there is no reply."""
        self.sink.reply(self.request, FAILED, encode_error(error))


class Shared:
    """The sink of a session's frame that is proposed: its outcome goes to everybody who sent it meanwhile."""

    __slots__ = ("member", "key", "targets")

    def __init__(self, member: Member, key: tuple[int, int], first: Queued) -> None:
        self.member = member
        self.key = key
        # Without their frames: the copies' bytes are let go of.
        self.targets = [(first.sink, first.request)]

    def reply(self, request: int, status: int, data: bytes) -> None:
        """The one outcome."""
        if self.member.under_way is not None:
            self.member.under_way.pop(self.key, None)
        for sink, number in self.targets:
            sink.reply(number, status, data)


class Owed(NamedTuple):
    """The replies owed when an index is applied; `term` says whose entry it was."""

    term: int
    size: int
    frames: list[Queued]


class Halt:
    """Why a member applies nothing from entry `index` on: a failed command in the frame first..first + records
    (records 0: it is not known which), or, if `version` is not 0, a machine that this process does not know.

    `scanned`: the entries up to here were searched for a skip of it.
    """

    __slots__ = ("index", "first", "records", "ordinal", "reason", "version", "scanned")

    def __init__(self, index: int, first: int, records: int, ordinal: int, reason: str, version: int = 0) -> None:
        self.index = index
        self.first = first
        self.records = records
        self.ordinal = ordinal
        self.reason = reason
        self.version = version
        self.scanned = index

    @property
    def place(self) -> str:
        """For people: (index, ordinal)."""
        return f"({self.index}, {self.ordinal if self.records else '?'})"

    def covers(self, index: int, ordinal: int) -> bool:
        """Whether a skip of (index, ordinal) is one of the frame that failed."""
        return index == self.index and (not self.records or self.first <= ordinal < self.first + self.records)


class Member:
    """One replica. `queue_bytes` and `inflight_bytes` are what back-pressure counts for this group."""

    __slots__ = (
        "spec", "raft", "machine", "liveness", "state", "reason", "dirty", "queue", "queue_bytes", "waiting",
        "inflight_bytes", "unpersisted", "segments", "floor", "last_release", "snapshot_index", "snapshot_term",
        "snapshot_bytes", "flushed", "waiters", "reads", "transfers", "slow_sends", "log_time", "apply_batch",
        "damaged", "snapshot_stored", "sessions", "system_queue", "kept", "version", "clock", "leading", "halt",
        "uploads", "left_out", "budget", "urgent", "guarded", "under_way", "lead_since",
        "low", "low_waited", "early", "chunks", "compactable", "heard_ns", "wall_time",
    )  # fmt: skip

    def __init__(self, spec: Spec, raft: Raft, machine: Machine, liveness: LivenessPort, budget: Budget) -> None:
        self.spec = spec
        self.budget = budget
        # Something that waits may use the reserved share of the budgets.
        self.urgent = False
        self.raft = raft
        self.machine = machine
        self.liveness = liveness
        self.state = RUNNING
        self.reason = ""
        self.dirty = False
        self.queue: deque[Queued] | None = None
        self.queue_bytes = 0
        self.waiting: dict[int, Owed] | None = None
        self.inflight_bytes = 0
        self.unpersisted = 0
        self.segments: list[SegmentRun] = []
        self.floor = 0
        self.last_release = 0
        self.snapshot_index = 0
        self.snapshot_term = 0
        self.snapshot_bytes = 0
        self.flushed = 0
        # Stopped at recovery: what is known here is not what this member promised, and is never stored.
        self.damaged = False
        # The names of the stored snapshot's chunks; and up to where the log may go: a checkpoint leaves it as it is.
        self.chunks: tuple[bytes, ...] = ()
        self.compactable = 0
        # The index of the snapshot in the meta store; ahead of `snapshot_index` while one is being installed.
        self.snapshot_stored = 0
        self.waiters: list[tuple[Callable[[], bool], Callable[[], None]]] | None = None
        self.reads: dict[int, Callable[[LogyardError | None, int], None]] | None = None
        self.transfers: set[int] | None = None
        # By node, the messages that wait for the disk (`sender`).
        self.slow_sends: dict[int, list[Message]] | None = None
        # Of what is applied: an entry that was proposed here may be lost, and says nothing then.
        self.log_time = 0
        # When the newest entry, or a snapshot, came to this process, by its monotonic clock: log time had come as far
        # as that entry's then (`log_time`).
        self.heard_ns = 0
        self.sessions: Sessions | None = None
        # Frames of sessions are queued, and which of them are proposed and not answered (`intake`).
        self.guarded = False
        self.under_way: dict[tuple[int, int], Shared] | None = None
        # Frames of low priority, and how many turns they have waited; frames to be answered when they are on disk here.
        self.low: deque[Queued] | None = None
        self.low_waited = 0
        self.early: list[tuple[int, int, Queued]] | None = None
        # When this member began to lead, by the clock of `heartbeats`.
        self.lead_since = 0.0
        # Large payloads whose pieces no record owns yet.
        self.uploads: Uploads | None = None
        # Commands of the engine's own: not in the budget of clients, proposed before them, in entries of their own.
        self.system_queue: list[Queued] | None = None
        # What the machine asked the engine to keep: timers, follow-ups, monitored sessions.
        self.kept: MachineState | None = None
        # The machine version in force (`versions`), and the clock of this member's leadership.
        self.version = 1
        self.clock: LogTime | None = None
        # Leads and has applied everything of earlier leaders: from then on it performs effects.
        self.leading = False
        self.halt: Halt | None = None
        # Ordinals of skipped commands by index: left out again whenever their entry is applied anew.
        self.left_out: dict[int, tuple[int, ...]] | None = None
        # Nothing that its machine grants is a length of time: log time is the wall clock's at any moment.
        self.wall_time: bool = getattr(machine, "wall_time", False)
        # Asked once: a protocol's instance check costs more than applying a batch.
        self.apply_batch = batch_of(machine)

    @property
    def uid(self) -> int:
        """The group's incarnation."""
        return self.spec.uid

    @property
    def is_gone(self) -> bool:
        """Whether nothing of this object may be stored: its group was deleted, or hibernated with all it knew."""
        return self.state == DELETED or self.state == ASLEEP

    @property
    def resolves(self) -> bool:
        """Whether this member may resolve refs, perform effects and take snapshots: applied >= floor (law 4)."""
        return self.raft.applied >= self.floor

    @property
    def shown_state(self) -> str:
        """For people: a member that lost records runs, and counts for nothing yet."""
        return MENDING if self.state == RUNNING and self.raft.mend is not None else self.state

    def check_running(self) -> None:
        """Raise `GroupStopped` unless the member runs."""
        if self.state != RUNNING:
            raise GroupStopped(f"group {self.spec.name!r} is {self.state} on this node: {self.reason}")

    def new_queue(self) -> deque[Queued]:
        """An idle group has no queue at all; the first frame makes one."""
        self.queue = deque()
        return self.queue

    def owe(self, index: int, term: int, size: int, frames: list[Queued]) -> None:
        """Remember who waits for the entry at `index`."""
        if self.waiting is None:
            self.waiting = {}
        self.waiting[index] = Owed(term, size, frames)
        self.inflight_bytes += size

    def fail_queue(self, error: LogyardError) -> None:
        """Nothing queued was proposed: every frame may be sent again."""
        queue, self.queue = self.queue, None
        self.budget.drop(self.queue_bytes)
        self.queue_bytes = 0
        self.urgent = False
        self.guarded = False
        own, self.system_queue = self.system_queue, None
        low, self.low = self.low, None
        for queued in (*(own or ()), *(queue or ()), *(low or ())):
            queued.fail(error)

    def overwritten(self, index: int) -> None:
        """Entries from `index` on were replaced by another leader's: they are not committed and never will be."""
        self.fail_waiting(NotLeader(self.raft.leader), index)
        self.segments = cut_runs(self.segments, index)
        self.flushed = min(self.flushed, index - 1)
        self.wake()

    def fail_waiting(self, error: LogyardError, first: int = 0) -> None:
        """Answer everything owed from `first` on with `error`."""
        if not self.waiting:
            return
        for index in [index for index in self.waiting if index >= first]:
            owed = self.waiting.pop(index)
            self.inflight_bytes -= owed.size
            self.budget.settle(owed.size)
            for queued in owed.frames:
                queued.fail(error)

    def stop(self, reason: str, state: str = STOPPED) -> None:
        """This group's fault stops this group only (law 7). The core tells its followers, if it led."""
        self.state = state
        self.reason = reason
        self.raft.stop()
        error = GroupStopped(f"group {self.spec.name!r} stopped: {reason}")
        self.fail_queue(error)
        self.fail_waiting(Unknown(f"group {self.spec.name!r} stopped while the command was under way: {reason}"))
        for done in list((self.reads or {}).values()):
            done(error, 0)
        self.reads = None
        self.wake()

    def suspend(self, halt: Halt) -> None:
        """Apply nothing more and serve nobody, until a skip or a newer process; the core runs on, but who waits for a
        newer machine had better not lead."""
        self.halt = halt
        self.state = HALTED
        self.reason = reason = halt.reason
        if halt.version:
            self.raft.may_lead = False
        error = GroupStopped(f"group {self.spec.name!r} is halted: {reason}")
        self.fail_queue(error)
        self.fail_waiting(Unknown(f"group {self.spec.name!r} halted while the command was under way: {reason}"))
        for done in list((self.reads or {}).values()):
            done(error, 0)
        self.reads = None
        self.wake()

    def quarantine(self, reason: str) -> None:
        """Take no part, and have nothing stored: this replica's records are damaged."""
        self.state, self.reason, self.damaged = STOPPED, reason, True
        self.raft.stop()

    def rebase(self, liveness: LivenessPort, release: int, log_time: int, now_ns: int) -> None:
        """Begin anew at a snapshot: what lives there, the last release, and the log time, heard at `now_ns`."""
        self.liveness = liveness
        self.last_release = release
        self.log_time = max(self.log_time, log_time)
        self.heard_ns = now_ns

    def recover(self) -> None:
        """Run again: a snapshot lies above whatever this member was halted at; its sender got over it."""
        self.state, self.reason, self.halt, self.left_out = RUNNING, "", None, None

    def raise_floor(self, release: int) -> None:
        """Resolve nothing before this release is applied (law 4)."""
        self.floor = max(self.floor, release)

    def doubt_snapshot(self, index: int) -> None:
        """Let the next snapshot, at `index` or above, take the place of the stored one, which can't be read."""
        self.snapshot_stored = min(self.snapshot_stored, index - 1)

    def begin_transfer(self, node: int) -> bool:
        """Note that a snapshot is on its way to `node`; False when one is already."""
        if self.transfers is None:
            self.transfers = set()
        begun = node not in self.transfers
        self.transfers.add(node)
        return begun

    def end_transfer(self, node: int) -> None:
        """Note that it is there, or given up."""
        if self.transfers is not None:
            self.transfers.discard(node)

    def leave_out(self, index: int, ordinal: int) -> None:
        """A committed skip names this command."""
        if self.left_out is None:
            self.left_out = {}
        self.left_out[index] = (*self.left_out.get(index, ()), ordinal)

    def wake(self) -> None:
        """Call the waiters whose condition holds now (all of them, once the member stopped)."""
        if not self.waiters:
            return
        still = []
        for condition, call in self.waiters:
            if self.state != RUNNING or condition():
                call()
            else:
                still.append((condition, call))
        self.waiters = still or None

    def add_segment(self, run: SegmentRun) -> None:
        """A newer segment overrides what older ones say from its first index on."""
        self.segments = [*cut_runs(self.segments, run.first), run]

    def is_dead(self, entry: Entry) -> bool:
        """Whether every payload of an entry was released."""
        return self.liveness.is_dead_range((entry.index, 0), (entry.index, records_in(entry.data)))

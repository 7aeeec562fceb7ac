"""A member: one group's replica on this node, as the host sees it. Data and small verbs; the turn that drives it is
in `ready_loop`.

Invariants: applied <= raft.commit; a member that is STOPPED or DELETED takes no part (law 7), one that is HALTED runs
its core and applies nothing; only a RUNNING one takes frames and answers reads;
what it was asked to propose is in `proposals`. What one part alone changes (`transfers`, `slow_sends`, `reads`,
`unpersisted`) is a field all the same: whoever puts the group to sleep asks for each, and a stop gives it up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logyard.protocol.errors import GroupStopped, NotLeader, Unknown, plain
from logyard.protocol.pending import PendingReply

from ..core import Core
from ..entry import Entry, records_in
from ..log.meta_rows import RingRun, SegmentRun, cut_runs, join_runs, runs_above
from ..machine import Machine, PayloadRange, Position
from ..ports import LivenessPort
from ..types import Spec
from .apply import Replicated, says
from .log_time import LogTime
from .proposals import Admission, ProposalQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..raft.messages import Message
    from .skips import Skip

RUNNING = "running"
HALTED = "halted"
STOPPED = "stopped"
DELETED = "deleted"
MENDING = "mending"
ASLEEP = "hibernating"
"""This object stands for nothing any more: the group is a row of `quiesced_table`, or another object since."""


class Halt:
    """Why a member applies nothing from entry `index` on: a failed command in the frame first..first + records
    (records 0: it is not known which), or, if `version` is not 0, a machine that this process does not know.

    `scanned`: the entries up to here were searched for a skip of it. `half_built`: nothing is at fault but that its
    machine could not be built anew, which is tried again. `undecided`: nothing failed, but the log has a skip of it,
    and whether that is committed decides. `skips`: those among the entries that were searched.
    """

    __slots__ = (
        "index", "first", "records", "ordinal", "reason", "version", "scanned", "half_built", "undecided", "skips",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        first: int,
        records: int,
        ordinal: int,
        reason: str,
        version: int = 0,
        undecided: bool = False,
    ) -> None:
        self.index = index
        self.first = first
        self.records = records
        self.ordinal = ordinal
        self.reason = plain(reason)
        self.version = version
        self.scanned = index
        self.half_built = False
        self.undecided = undecided
        self.skips: list[Skip] = []

    @property
    def place(self) -> str:
        """For people: (index, ordinal)."""
        return f"({self.index}, {self.ordinal if self.records else '?'})"

    def searched(self, index: int, skips: Iterable[Skip]) -> None:
        """Note that the entries up to this one were searched for a skip of it, and which they have."""
        self.scanned = index
        self.skips += skips

    def built_half(self) -> None:
        """Note that its command is done with, and the machine is to be built anew."""
        self.half_built = True

    def covers(self, index: int, ordinal: int) -> bool:
        """Return whether a skip of (index, ordinal) is one of the frame that failed."""
        return index == self.index and (not self.records or self.first <= ordinal < self.first + self.records)


class Member(Replicated):
    """One replica: the replicated state of its group, and this node's part of it."""

    __slots__ = (
        "raft", "liveness", "state", "reason", "dirty", "proposals", "unpersisted", "segments", "floor", "last_release",
        "snapshot_index", "snapshot_term", "snapshot_bytes", "flushed", "waiters", "reads", "transfers", "slow_sends",
        "log_time", "damaged", "snapshot_stored", "clock", "halt", "lead_since", "chunks", "compactable", "heard_ns",
        "wall_time", "ring", "replayed",
    )  # fmt: skip

    def __init__(self, spec: Spec, raft: Core, machine: Machine, liveness: LivenessPort, admission: Admission) -> None:
        # Its `leading`: has applied everything of earlier leaders, and from then on performs effects.
        super().__init__(spec, machine)
        self.raft = raft
        self.proposals = ProposalQueue(raft, admission)
        self.liveness = liveness
        self.state = RUNNING
        self.reason = ""
        self.dirty = False
        self.unpersisted = 0
        self.segments: list[SegmentRun] = []
        # Of a system group: what its ring has of the log, and what a stored row may still name of it below the log.
        self.ring: list[RingRun] = []
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
        self.reads: dict[int, PendingReply[int]] | None = None
        self.transfers: set[int] | None = None
        # By node, the messages that wait for the disk (`outbound`).
        self.slow_sends: dict[int, list[Message]] | None = None
        # Of what is applied: an entry that was proposed here may be lost, and says nothing then.
        self.log_time = 0
        # When the newest entry, or a snapshot, came to this process, by its monotonic clock: log time had come as far
        # as that entry's then (`log_time`).
        self.heard_ns = 0
        # When this member began to lead, by the clock of `heartbeats`.
        self.lead_since = 0.0
        # The clock of this member's leadership.
        self.clock: LogTime | None = None
        self.halt: Halt | None = None
        # Entries up to here were stored when this object was made: they are applied anew, or were not known to be
        # committed.
        self.replayed = raft.log.last_index
        # Nothing that its machine grants is a length of time: log time is the wall clock's at any moment.
        self.wall_time: bool = says(machine, "wall_time")

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

    def adopt(self, runs: list[SegmentRun], ring: list[RingRun], flushed: int, floor: int, now_ns: int) -> None:
        """Take over what a checkpoint and the WAL say: what segments and the ring have, up to where, and the payload
        floor; as heard at `now_ns`."""
        self.segments, self.ring, self.flushed, self.floor, self.heard_ns = runs, ring, flushed, floor, now_ns

    def begin_clock(self, clock: LogTime) -> LogTime:
        """Let log time go by this clock while the member leads."""
        self.clock = clock
        return clock

    def follow(self) -> None:
        """Give up what only a leader has: another node leads, or nobody."""
        self.clock = None
        self.proposals.fail(NotLeader(self.raft.leader))
        self.slow_sends = None

    def lead(self) -> None:
        """Perform effects from now on: all of earlier leaders is applied."""
        self.leading = True

    def lead_no_more(self) -> None:
        """Perform no effects any more."""
        self.leading = False

    def release(self, index: int, first: Position, end: Position) -> Sequence[PayloadRange]:
        """Let what lives of a range be dead from `index` on; return it."""
        died = self.liveness.live_within(first, end)
        if died:
            self.liveness.release(first, end)
            self.last_release = index
        return died

    def leads_since(self, moment: float) -> None:
        """Note when this member began to lead, by the clock of the heartbeats."""
        self.lead_since = moment

    def check_running(self) -> None:
        """Raise `GroupStopped` unless the member runs."""
        if self.state != RUNNING:
            raise GroupStopped(f"group {self.spec.name!r} is {self.state} on this node: {self.reason}")

    def overwritten(self, index: int) -> None:
        """Forget what waited for entries from `index` on, which another leader's replaced. They may be committed all
        the same: what replaced them is neither committed nor, here, on the disk yet."""
        lost = f"another leader replaced it on node {self.raft.node}: whether others commit it is not known"
        self.proposals.fail_proposed(Unknown(lost), index)
        self.segments = cut_runs(self.segments, index)
        self.cut_ring(index)
        self.flushed = min(self.flushed, index - 1)
        self.wake()

    def stop(self, reason: str, state: str = STOPPED) -> None:
        """Stop this group for its own fault, and only this group (law 7). The core tells its followers, if it led."""
        self.state = state
        self.reason = reason = plain(reason)
        self.raft.stop()
        error = GroupStopped(f"group {self.spec.name!r} stopped: {reason}")
        self.proposals.fail(error)
        lost = f"group {self.spec.name!r} stopped while the command was under way: {reason}"
        self.proposals.fail_proposed(Unknown(lost))
        for pending in list((self.reads or {}).values()):
            pending.fail(error)
        self.reads = None
        self.wake()

    def is_to_go(self) -> None:
        """Apply nothing more: the group is deleted, and its replica goes when the turn that said so is over."""
        self.state = DELETED

    def suspend(self, halt: Halt) -> None:
        """Apply nothing more and serve nobody, until a skip or a newer process; the core runs on, but who waits for a
        newer machine had better not lead."""
        self.halt = halt
        self.state = HALTED
        self.reason = reason = halt.reason
        if halt.version:
            self.raft.give_way()
        error = GroupStopped(f"group {self.spec.name!r} is halted: {reason}")
        self.proposals.fail(error)
        lost = f"group {self.spec.name!r} halted while the command was under way: {reason}"
        self.proposals.fail_proposed(Unknown(lost))
        for pending in list((self.reads or {}).values()):
            pending.fail(error)
        self.reads = None
        self.wake()

    def hibernate(self) -> None:
        """Stand for nothing any more: the group is a row now."""
        self.state = ASLEEP
        self.raft.fall_asleep()

    def reach(self, stamp: int) -> None:
        """Note the log time of an entry that is applied."""
        if stamp > self.log_time:
            self.log_time = stamp

    def mark(self) -> None:
        """Note that there is something to do."""
        self.dirty = True

    def unmark(self) -> None:
        """Note that a turn does it."""
        self.dirty = False

    def persisting(self, floor: int = 0, heard_ns: int = 0) -> int:
        """Count an item on its way to the disk, which has entries if they were heard at `heard_ns`; return the payload
        floor that it raises, 0 if none."""
        self.unpersisted += 1
        if heard_ns:
            self.heard_ns = heard_ns
        if floor <= self.floor:
            return 0
        self.floor = floor
        return floor

    def persisted(self) -> None:
        """Count an item that is durable."""
        self.unpersisted -= 1

    def heard(self, now_ns: int) -> None:
        """Note when log time had come as far as it is known here."""
        self.heard_ns = now_ns

    def explain(self, reason: str) -> None:
        """Show people this as what is the matter with the member; nothing is, if it is empty."""
        self.reason = reason

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
        """Run again: a snapshot lies above whatever this member was halted at; its sender got over it. One that waited
        for another program may lead again: this one could restore it."""
        if self.halt is not None and self.halt.version:
            self.raft.stand_again()
        self.state, self.reason, self.halt, self.left_out = RUNNING, "", None, None

    def raise_floor(self, release: int) -> None:
        """Resolve nothing before this release is applied (law 4)."""
        self.floor = max(self.floor, release)

    def doubt_snapshot(self, index: int) -> None:
        """Let the next snapshot, at `index` or above, take the place of the stored one, which can't be read."""
        self.snapshot_stored = min(self.snapshot_stored, index - 1)

    def begin_transfer(self, node: int) -> bool:
        """Note that a snapshot is on its way to `node`; return False when one is already."""
        if self.transfers is None:
            self.transfers = set()
        begun = node not in self.transfers
        self.transfers.add(node)
        return begun

    def is_transferring(self, node: int) -> bool:
        """Return whether a snapshot is on its way to a node."""
        return self.transfers is not None and node in self.transfers

    def end_transfer(self, node: int) -> None:
        """Note that it is there, or given up."""
        if self.transfers is not None:
            self.transfers.discard(node)

    def slow_messages(self, node: int) -> list[Message]:
        """Return the messages to `node` that wait for the disk, to be added to."""
        if self.slow_sends is None:
            self.slow_sends = {}
        return self.slow_sends.setdefault(node, [])

    def sent_slow(self, node: int, message: Message) -> None:
        """Let a message to `node` wait for the disk no more, whether it was sent or not."""
        slow = self.slow_sends
        if slow is None:
            return
        waiting = slow.get(node, [])
        # Those of an earlier leadership are not in it.
        if message in waiting:
            waiting.remove(message)
        if not waiting:
            slow.pop(node, None)
        if not slow:
            # A turn takes the short way only where nothing waits.
            self.slow_sends = None

    def go_on(self) -> None:
        """Apply again what is committed."""
        self.state, self.reason = RUNNING, ""

    def stand_still(self, halt: Halt) -> None:
        """Wait at a halt until the machine could be built anew; a skip that was found is not looked for once more."""
        halt.built_half()
        self.halt, self.state, self.reason = halt, HALTED, halt.reason

    def forget_halt(self) -> None:
        """Forget what halted the member: it was applied."""
        self.halt = None

    def add_waiter(self, pair: tuple[Callable[[], bool], Callable[[], None]]) -> None:
        """Call the second of a pair at the first `wake` at which the other one says so."""
        self.waiters = [*(self.waiters or ()), pair]

    def drop_waiter(self, pair: tuple[Callable[[], bool], Callable[[], None]]) -> None:
        """Forget a pair, called or not."""
        if self.waiters:
            self.waiters = [one for one in self.waiters if one is not pair] or None

    def add_read(self, context: int, pending: PendingReply[int]) -> None:
        """Settle `pending` with the index when the core has answered the read `context`."""
        if self.reads is None:
            self.reads = {}
        self.reads[context] = pending

    def drop_read(self, context: int) -> None:
        """Forget a read, answered or not."""
        if self.reads:
            self.reads.pop(context, None)

    def wake(self) -> None:
        """Call the waiters whose condition holds now (all of them, once the member stopped)."""
        if not self.waiters:
            return
        still = []
        for pair in self.waiters:
            condition, call = pair
            if self.state != RUNNING or condition():
                call()
            else:
                still.append(pair)
        self.waiters = still or None

    def add_segment(self, run: SegmentRun | None, ring: Sequence[RingRun] = ()) -> None:
        """Add what a newer segment has (None: nothing), and the ring beside it, which override what was said from their
        first index on."""
        added = [one for one in (run, *ring) if one is not None]
        first = min(one.first for one in added)
        self.segments = [*cut_runs(self.segments, first), *(() if run is None else (run,))]
        self.ring = join_runs(cut_runs(self.ring, first), ring)
        self.flush_through(max(one.last for one in added))

    def keep_runs(self, runs: list[SegmentRun]) -> None:
        """Say anew which segments have what of the log."""
        self.segments = runs

    def free_ring(self, index: int) -> None:
        """Let the ring be free up to an index: no stored row names anything of it any more."""
        self.ring = runs_above(self.ring, index)

    def cut_ring(self, index: int) -> None:
        """Let the ring have nothing of the log from an index on, as the log has other entries there, or starts over."""
        self.ring = cut_runs(self.ring, index)

    @property
    def ring_runs(self) -> list[RingRun]:
        """What the ring has of the log as it is now."""
        return runs_above(self.ring, self.raft.log.snapshot_index)

    def flush_through(self, index: int) -> None:
        """Note that entries up to `index` need no WAL file, nor memory."""
        self.flushed = max(self.flushed, index)

    def restart_flush(self) -> None:
        """Restart the flush, as the log starts over above the snapshot."""
        self.flushed = self.snapshot_index

    def stored(self, index: int, chunks: tuple[bytes, ...]) -> None:
        """Note that a snapshot at `index` is durable, and so are its chunks."""
        self.snapshot_stored = index
        self.chunks = chunks

    def covered(self, index: int, term: int, size: int) -> None:
        """Note that from now on a snapshot of `size` bytes says what the log up to `index` says."""
        self.snapshot_index, self.snapshot_term, self.snapshot_bytes = index, term, size

    def need_no_log(self) -> None:
        """Let the log up to the snapshot go."""
        self.compactable = self.snapshot_index

    def need_log_above(self, index: int) -> None:
        """Keep the log above an index, which a stored snapshot covers."""
        self.compactable = index

    def cover_releases(self) -> bool:
        """Raise the floor to the newest release that is applied (law 4); return False when it says so, or needs not."""
        if self.last_release <= max(self.floor, self.snapshot_index):
            return False
        self.floor = self.last_release
        return True

    def is_dead(self, entry: Entry) -> bool:
        """Return whether every payload of an entry was released."""
        return self.liveness.is_dead_range((entry.index, 0), (entry.index, records_in(entry.data)))

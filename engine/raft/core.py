"""One member of one group: the state, and the door to the verbs. Messages and ticks in, one `Ready` out (law 1).

Invariants (run by `check`): applied <= commit <= last index; stable <= offered <= last index; acked <= validated;
term never falls; a message made while (term, vote) is not durable waits for it (law 2). The host calls every method
from one thread; none blocks, reads a clock or raises for what a peer said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from typing import TypeAlias

from logyard.protocol.errors import Busy, NotLeader

from ..entry import CONFIGURATION, NOOP, Entry
from . import dispatch, election, membership, mending, quiescence, reads, replication, snapshots, steady
from .membership import Change, Configuration
from .messages import APPEND, APPEND_REPLY, CONFIRM, Message
from .progress import PROBE, Progress, Window
from .raft_log import RaftLog
from .ready import Ready
from .state import CANDIDATE, FOLLOWER, LEADER, LEFT, NOTED, PRECANDIDATE, ROLE_NAMES, Lie, Limits

__all__ = [
    "CANDIDATE", "FOLLOWER", "LEADER", "PRECANDIDATE", "Change", "Configuration", "Limits", "Raft", "RaftLog", "Ready",
]  # fmt: skip

Draw: TypeAlias = Callable[[int], int]
Encode: TypeAlias = Callable[[int, int, int, bytes], Entry]

TRANSFER_RETRY_SECONDS = 0.05
UNCOMMITTED_RETRY_SECONDS = 0.05
NO_MESSAGES: tuple[Message, ...] = ()
NO_ENTRIES: tuple[Entry, ...] = ()


class Raft:
    """See the package's docstring for how to drive it.

    `live` is shared with the host and holds every node that node-level liveness holds alive, this one included.
    `draw(n)` gives an integer in [0, n). `encode(index, term, kind, content)` makes the no-ops and configuration
    entries.
    `configuration` is the one set at `configuration_index` (0: at creation, or by the snapshot), at or below
    `commit`; later ones are found in the entries in memory; those in segments, if any, are given as `configurations`,
    ascending. `windows`, one a node, are shared by all cores of this process.
    `promise` is (term, index) of the last entry that an earlier replica of this member held here: a member that was
    removed, forgot its log and was added again votes as if it had it still, and is not a candidate before it has.
    `mend`: this member lost records (`mending`); None again when it is sound, which a `Ready` says as a changed role.
    `log` may then be any earlier one of its own, and `commit` no more than its snapshot says.
    `may_lead` False: it never campaigns, and hands leadership over (a member of an older machine version, say). Who
    sets it has the member ticked.
    """

    __slots__ = (
        # identity and what is injected
        "uid", "node", "live", "draw", "encode", "limits", "windows", "may_lead", "promise", "mend",
        # durable: handed out as hard state and entries
        "term", "vote", "log",
        # volatile: every member
        "role", "leader", "commit", "applied", "configuration", "configuration_index", "base", "history", "voter",
        "elapsed", "timeout", "denials", "hearers", "doubt", "votes", "stopped",
        # follower: what the current leader's appends validated, and what was acknowledged of it
        "validated", "acked",
        # leader
        "progress", "pair", "lead_index", "uncommitted_bytes", "transferee", "transfer_ticks", "transfer_sent",
        "lost_ticks", "leaving", "chores", "reads", "turned_down", "untold",
        # between two Readys: `safe` says that (term, vote) is durable; `pending` are Readys handed out and not yet
        # durable
        "dirty", "changed", "safe", "offered", "pending", "truncated", "told_term", "told_vote", "told_commit",
        "outbox", "held", "confirmed_reads", "failed_reads",
    )  # fmt: skip

    def __init__(
        self,
        uid: int,
        node: int,
        configuration: Configuration,
        log: RaftLog,
        *,
        term: int = 0,
        vote: int = 0,
        commit: int = 0,
        live: Set[int],
        draw: Draw,
        encode: Encode,
        limits: Limits,
        windows: dict[int, Window] | None = None,
        configuration_index: int = 0,
        configurations: Sequence[tuple[int, Configuration]] = (),
        promise: tuple[int, int] = (0, 0),
        mend: mending.Mend | None = None,
    ) -> None:
        self.uid = uid
        self.node = node
        self.live = live
        self.draw = draw
        self.encode = encode
        self.limits = limits
        self.may_lead = True
        self.promise = promise
        self.mend = mend
        self.windows = {} if windows is None else windows
        # A snapshot may be durable before the term that came with it.
        self.term = max(term, log.last_term)
        self.vote = vote if self.term == term else 0
        self.log = log
        self.role: int = FOLLOWER
        self.leader = 0
        # A commit index may have been stored before the entries it speaks of: it is a hint, no more (Ra ffe3016a).
        self.commit = max(min(commit, log.last_index), log.snapshot_index)
        self.applied = log.snapshot_index
        self.configuration = configuration
        self.configuration_index = configuration_index
        self.base = (configuration_index, configuration)
        self.history: tuple[tuple[int, Configuration], ...] = ()
        self.voter = configuration.votes(node)
        self.elapsed = self.timeout = self.denials = self.hearers = 0
        self.doubt = False
        self.votes: dict[int, bool] | None = None
        self.stopped = False
        self.validated = self.acked = 0
        self.progress: dict[int, Progress] = {}
        self.pair: tuple[Progress, Progress] | None = None
        self.lead_index = self.uncommitted_bytes = 0
        self.transferee = self.transfer_ticks = self.lost_ticks = 0
        self.transfer_sent = self.leaving = self.chores = False
        self.untold = 0
        self.turned_down: tuple[int, ...] = ()
        self.reads: reads.Reads | None = None
        self.changed = False
        self.safe = self.term == term
        self.dirty = not self.safe
        self.offered = log.last_index
        self.pending: list[tuple[int, int, int, int, int]] = []
        self.truncated = 0
        self.told_term = term
        self.told_vote = vote
        self.told_commit = self.commit
        self.outbox: list[Message] = []
        self.held = NO_MESSAGES
        self.confirmed_reads: tuple[tuple[int, int], ...] = ()
        self.failed_reads: tuple[int, ...] = ()
        for index, later in (*configurations, *membership.decode_entries(log.entries)):
            if index > self.configuration_index:
                membership.adopt(self, index, later)
        election.draw_timeout(self)

    # ---- in: messages

    def step(self, m: Message) -> str | None:
        """Take one message. Anything malformed, misdirected or out of date is dropped: the network may do that, too.
        What only a lie explains (two leaders in a term, a committed entry overwritten) changes nothing and is returned:
        the host had better not listen to that node. Returned as well: why this member stopped, whose leader is of
        another lineage."""
        if m.uid != self.uid or self.stopped:
            return None
        try:
            if m.term == self.term:
                kind = m.kind
                if kind == APPEND_REPLY:
                    if self.role == LEADER:
                        replication.on_append_reply(self, m)
                    elif m.context == CONFIRM and not m.reject:
                        election.deny_leading(self, m)
                    return None
                if kind == APPEND:
                    if self.role != FOLLOWER:
                        dispatch.doubt_sender(self, m)
                        election.follow(self, m.term, m.sender)
                    replication.on_append(self, m)
                    return None
            dispatch.settle(self, m)
        except Lie as lie:
            return str(lie)
        return None

    def send(self, message: Message) -> None:
        """Queue `message` for the next `Ready`: at once if (term, vote) is durable, else after it is (law 2)."""
        if self.safe:
            self.outbox.append(message)
        else:
            self.held = (*self.held, message)
        self.dirty = True

    # ---- in: the host's requests

    def propose(self, entry: Entry, urgent: bool = False) -> None:
        """Append `entry`, encoded by the host for index last_index + 1 and the current term. `urgent` ones may use the
        reserve of uncommitted bytes, too.

        Raises `NotLeader`, or `Busy` while leadership is being transferred or too many bytes wait for a quorum. Both
        leave the log unchanged.
        """
        if self.role != LEADER:
            raise NotLeader(self.leader)
        if self.transferee:
            raise Busy("leadership transfer", TRANSFER_RETRY_SECONDS)
        assert entry.term == self.term and entry.kind != CONFIGURATION
        size = len(entry.data) + entry.body_bytes
        waiting = self.uncommitted_bytes
        # One entry always moves, however large; a no-op is never held up (pitfall 36).
        if (
            waiting
            and waiting + size > self.limits.uncommitted_bytes
            and entry.kind != NOOP
            and not (urgent and waiting + size <= self.limits.uncommitted_bytes + self.limits.uncommitted_reserve)
        ):
            raise Busy("the group's budget of uncommitted bytes", UNCOMMITTED_RETRY_SECONDS)
        self.log.push(entry)
        self.uncommitted_bytes = waiting + size
        self.dirty = True

    def propose_membership(self, changes: Change | Sequence[Change], *, auto_leave: bool = True) -> int:
        """Append one change, or a list that takes effect as one; return its index. See `membership.propose`.

        Raises `NotLeader`, or `Refused` with the reason.
        """
        return membership.propose(self, (changes,) if isinstance(changes, Change) else changes, auto_leave)

    def leave_joint(self) -> int:
        """End a joint configuration that was entered with `auto_leave` False; return the entry's index. Raises
        `NotLeader`, `Refused`."""
        return membership.leave(self)

    def force_shrink(self) -> int:
        """Make this member the group's only voter, whatever the others say; return the entry's index. See
        `election.force`."""
        return election.force(self)

    def window(self, node: int) -> Window:
        """Return what all groups together may have under way to `node`."""
        found = self.windows.get(node)
        if found is None:
            found = self.windows[node] = Window(self.limits.follower_bytes)
        return found

    def read(self, context: int) -> None:
        """Ask for a linearizable read index under any `context`. Raises `NotLeader`."""
        reads.read(self, context)

    def tell(self) -> bool:
        """Tell followers of the commit index if nothing has told them yet (`Limits.lazy_commit`); return whether there
        is a `Ready` for it."""
        self.untold = 0
        return self.role == LEADER and replication.tell(self)

    def has_told(self, index: int) -> bool:
        """Return whether entries have told all followers that this index is committed, so that `tell` need not yet."""
        return self.role == LEADER and min([one.told for one in self.progress.values()], default=index) >= index

    def note_untold(self, many: bool) -> None:
        """Note that somebody will call `tell`; where many groups wait for it, entries are given time, and ticks do not
        tell before."""
        self.untold = LEFT if many else NOTED

    def resume(self) -> None:
        """Look for what can be sent, as a node's window has room again."""
        self.dirty = True

    def transfer(self, to: int) -> None:
        """Hand leadership to `to`; meanwhile proposals are `Busy`. Raises `NotLeader`, `Refused`. To itself: nothing,
        or cancel."""
        election.transfer(self, to)

    def campaign(self, transfer: bool = False) -> None:
        """Ask to be elected now; `transfer`: without pre-vote and against a living leader. Nothing unless a voter
        that does not lead."""
        if not self.stopped:
            election.campaign(self, transfer)

    def heirs(self) -> list[int]:
        """Return the members that may lead in its place, the best first."""
        return election.heirs(self)

    def resign(self, name_heir: bool) -> None:
        """Give up leading, as the host is about to end. See `election.resign`."""
        election.resign(self, name_heir)

    def abdicate(self) -> None:
        """Give up leading while another voter can: this node's disk hangs."""
        quiescence.abdicate(self)

    def stop(self) -> None:
        """Take no more part. A leader's last `Ready` tells its followers so."""
        if self.role == LEADER:
            election.step_down(self, self.term)
        self.stopped = True

    def give_way(self) -> None:
        """Campaign no more, and hand leadership over. The host has the member ticked."""
        self.may_lead = False

    def stand_again(self) -> None:
        """Campaign again where nobody leads: what `give_way` was for is over. The host has the member ticked."""
        self.may_lead = True

    # ---- in: time, nodes, links

    def tick(self) -> bool:
        """Count one tick of the host's clock; return whether this member `is_quiet` now, and needs no more of them."""
        return self.stopped or quiescence.tick(self)

    def on_liveness(self) -> None:
        """Take note that `live` has changed."""
        if not self.stopped:
            quiescence.on_liveness(self)

    def on_link_reset(self, node: int) -> None:
        """Take note that the connection to or from `node` was lost, made anew, or dropped messages. No message of the
        old one comes after this."""
        if not self.stopped:
            quiescence.on_link_reset(self, node)

    def on_awake(self, node: int) -> None:
        """Take note that the group woke on `node`, which holds this member to be asleep."""
        if self.mend is not None and not self.leader and not self.stopped:
            # The configuration may be lost with the rest: it need not name who leads.
            mending.say(self, node)

    def may_hibernate(self) -> bool:
        """Return whether nothing at all is under way here."""
        return quiescence.may_hibernate(self)

    def fall_asleep(self) -> None:
        """Take note that only a row is left of this member: nobody waits for what is under way to others."""
        quiescence.fall_asleep(self)

    def resume_leader(self, asleep: Collection[int]) -> None:
        """Lead on after a sleep in this process; who is in `asleep` has everything."""
        quiescence.resume_leader(self, asleep)

    def resume_follower(self, leader: int) -> None:
        """Follow on after a sleep."""
        quiescence.resume_follower(self, leader)

    def orphan(self) -> None:
        """Campaign soon: the leader before the sleep is gone."""
        quiescence.orphan(self)

    @property
    def is_quiet(self) -> bool:
        """No tick is needed until a message, a request, or news of nodes and links comes in."""
        return quiescence.is_quiet(self)

    @property
    def has_ready(self) -> bool:
        """Whether `ready()` may have something."""
        return self.dirty

    # ---- in: what the host has done

    def on_persisted(self, term: int, vote: int, index: int, entry_term: int, out: list[Message] | None = None) -> None:
        """Take note that the oldest `Ready` with a hard state or entries that was not reported yet is durable; the
        arguments are its `token`.

        What was overwritten since it was handed out does not count, even if the same entry stands there again
        (pitfall 11). `out` takes the acknowledgement that this makes due when it is all there is to do, so that no
        `Ready` is made for it; it may leave at once.
        """
        handed = self.pending.pop(0)
        assert handed[0] == term and handed[1] == vote, f"reported {(term, vote)}, oldest is {handed}"
        log = self.log
        if handed[4] > log.stable:
            log.stable = handed[4]
        if not self.safe and term == self.term and vote == self.vote:
            self.safe = True
            if self.held:
                self.dirty = True
            if self.role == CANDIDATE:
                assert self.votes is not None and vote == self.node
                self.votes[self.node] = True
                election.tally(self)
        if self.role == LEADER:
            if log.stable > self.commit:
                replication.advance_commit(self)
        elif self.mend is not None:
            mending.came_on(self)
        elif self.leader and min(log.stable, self.validated) > self.acked:
            if out is not None and self.safe and not self.dirty:
                out.append(replication.acknowledgement(self))
            else:
                replication.acknowledge(self)

    def on_applied(self, index: int) -> None:
        """Take note that the machine has applied everything up to `index`."""
        assert self.applied <= index <= self.commit
        self.applied = index
        if self.history and self.history[0][0] <= index:
            membership.settle(self, index)

    def snapshot_sent(self, node: int, index: int, ok: bool) -> None:
        """Take note that the transfer that a SNAPSHOT message asked for ended; the snapshot stood at `index`. A failed
        one is asked for again."""
        snapshots.sent(self, node, index, ok)

    def install_snapshot(self, index: int, term: int, configuration: Configuration) -> bool:
        """Go on from a snapshot at `index`@`term` that is durable on this node with its state; `configuration` is in
        force there.

        Returns False, and changes nothing, when it is not newer than the commit index, or this member leads or is
        stopped: the host keeps its own state then.
        """
        return not self.stopped and snapshots.install(self, index, term, configuration)

    # ---- out

    hand_out = steady.hand_out
    """A method as it stands there: the host asks it once a group and turn, and it costs no second call."""

    def ready(self) -> Ready | None:
        """Return what there is to do, or None. See `Ready` for what may be done when."""
        if not self.dirty:
            return None
        self.dirty = False
        if self.role == LEADER:
            if self.chores:
                membership.attend(self)
            asked = self.reads
            if asked is not None and (asked.waiting or asked.number):
                reads.open_round(self, asked)
            replication.feed(self)
            if self.leaving:
                # The removed leader has told everyone that its removal is committed (thesis 4.2.2).
                election.step_down(self, self.term)
            self.dirty = False
        log = self.log
        term, vote = self.term, self.vote
        hard_state = None
        if term != self.told_term or vote != self.told_vote:
            hard_state = (term, vote)
            self.told_term = term
            self.told_vote = vote
        entries: Sequence[Entry] = NO_ENTRIES
        if self.offered < log.last_index:
            entries = log.entries[self.offered + 1 - log.memory_first :]
            self.offered = log.last_index
        messages: Sequence[Message] = NO_MESSAGES
        if self.outbox:
            messages, self.outbox = self.outbox, []
        after: Sequence[Message] = NO_MESSAGES
        if self.held:
            if hard_state is not None:
                after, self.held = self.held, NO_MESSAGES
            elif self.safe:
                messages, self.held = [*self.held, *messages], NO_MESSAGES
        token = None
        if entries or hard_state is not None:
            entry_term = entries[-1].term if entries else log.term(self.offered) or 0
            token = (term, vote, self.offered, entry_term)
            self.pending.append((*token, self.offered))
        elif not (
            messages
            or self.commit != self.told_commit
            or self.changed
            or self.truncated
            or self.confirmed_reads
            or self.failed_reads
        ):
            return None
        return self._hand_out(hard_state, entries, messages, after, token)

    def _hand_out(
        self,
        hard_state: tuple[int, int] | None,
        entries: Sequence[Entry],
        messages: Sequence[Message],
        after: Sequence[Message],
        token: tuple[int, int, int, int] | None,
    ) -> Ready:
        confirmed, self.confirmed_reads = self.confirmed_reads, ()
        failed, self.failed_reads = self.failed_reads, ()
        found = Ready(
            hard_state, entries, messages, after, self.commit, confirmed, failed, self.changed, self.truncated, token
        )
        self.told_commit = self.commit
        self.changed = False
        self.truncated = 0
        return found

    @property
    def transferring(self) -> bool:
        """Leadership was asked to move, and its outcome is not known here yet."""
        return bool(self.transferee) or (self.transfer_sent and not self.leader)

    @property
    def applied_configuration(self) -> Configuration:
        """The configuration in force at `applied`: what a snapshot taken now carries."""
        return membership.configuration_at(self, self.applied)

    def all_nodes(self) -> set[int]:
        """Return the members by any configuration that may be in force somewhere."""
        return membership.all_nodes(self)

    # ---- for people and tests

    def configuration_at(self, index: int) -> Configuration:
        """Return the configuration in force at `index`, applied <= index <= last index."""
        return membership.configuration_at(self, index)

    def check(self) -> None:
        """Assert the invariants of this module's head and of the log."""
        log = self.log
        log.check()
        assert log.snapshot_index <= self.applied <= self.commit <= log.last_index, self
        assert log.stable <= self.offered <= log.last_index, self
        assert self.acked <= self.validated, self
        assert log.last_term <= self.term, self
        assert bool(self.progress) <= (self.role == LEADER), self
        assert self.mend is None or self.role == FOLLOWER, self
        assert (self.leader == self.node) == (self.role == LEADER), self
        assert not self.vote or self.term, self
        for node, progress in self.progress.items():
            assert node != self.node and 0 <= progress.match < progress.next <= log.last_index + 1, progress
            assert progress.state != PROBE or not progress.inflight, progress
            assert progress.inflight_bytes == sum(size for _, size in progress.inflight), progress
            assert progress.window.bytes >= progress.inflight_bytes + progress.probed >= 0, progress

    def __repr__(self) -> str:
        return (
            f"Raft({self.node} {ROLE_NAMES[self.role]} term {self.term} vote {self.vote} leader {self.leader} "
            f"commit {self.commit} applied {self.applied} {self.log}{' damaged' if self.mend else ''})"
        )

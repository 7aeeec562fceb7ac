"""Every way to wake: a quiesced group becomes a member again for whatever needs it, and its other nodes hear of it.

Invariants: who wakes leads only in the term that it won in this very process, and follows only a leader that lives;
until a dead node's scan is over, a group that wakes takes it for gone, whatever its row says yet. Nothing here decides
a commit or a read (law 10). Called by `inbound` (messages, liveness), by `ticker`, and by whoever uses a group.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, NamedTuple

from ..raft.quorum import first_leader
from ..replica.log_time import LogTime
from ..replica.member import RUNNING, STOPPED, Member
from ..transport.blobs import AWAKE
from .quiesced_sessions import QuiescedSessions
from .quiesced_table import LED, QuiescedTable, Row, quorum_lives
from .timers import Timers
from .transitions import Transitions, takes_part

SCAN_SECONDS = 0.02
"""What a tick may spend on scans of the table."""
WAKE_SECONDS = 0.02
"""What a tick may spend waking groups that nobody waits for."""
NOTICE_MAX = 4096


class LivenessScan:
    """What a node's coming or going means for the groups that sleep: walks over their table, as far as there is time,
    in the order they were begun. What a walk finds is the state of then, so walks that overlap do no harm.

    `epoch_of(node)`: which life of it this node knows.
    """

    __slots__ = ("_node", "_table", "_epoch_of", "_live", "_queue")

    def __init__(self, node: int, table: QuiescedTable, epoch_of: Callable[[int], int]) -> None:
        self._node = node
        self._table = table
        self._epoch_of = epoch_of
        self._live: set[int] = {node}
        # Beside each: the node whose groups it gives up, 0 for none.
        self._queue: deque[tuple[int, Iterator[tuple[int, int] | None]]] = deque()

    @property
    def is_pending(self) -> bool:
        """Whether the next tick has to go on."""
        return bool(self._queue)

    def gives_up(self, leader: int) -> bool:
        """Return whether the groups of a dead node are not all given up yet."""
        return any(leader == node for node, _ in self._queue if node)

    def begin(self, live: set[int]) -> bool:
        """Begin to look what these live nodes mean; return False when they are the same. A leader's death wakes its
        groups, where a quorum is left; a leader without a quorum leads no more; who comes back wakes what went to sleep
        without it."""
        died, came = self._live - live, live - self._live
        self._live = set(live)
        for node in died:
            self._queue.append((node, self._bereave(node)))
        if died or came:
            self._queue.append((0, self._recount(set(live), came)))
        for node in came:
            self._queue.append((0, self._meet(node, self._epoch_of(node))))
        return bool(died or came)

    def go_on(self) -> Iterator[tuple[int, int]]:
        """Go on as far as there is time; yield (uid, leader) of groups to wake."""
        end = time.monotonic() + SCAN_SECONDS
        while self._queue:
            for found in self._queue[0][1]:
                if found is not None:
                    yield found
                if time.monotonic() >= end:
                    return
            self._queue.popleft()

    def _bereave(self, node: int) -> Iterator[tuple[int, int] | None]:
        """Leave without a leader the groups that slept under a node which is gone; they wake where a quorum is left."""
        for uid, row in self._table.rows(f"leader = ? AND {LED}", node):
            self._table.follow(uid, 0)
            yield (uid, 0) if quorum_lives(row.shape, self._live) else None

    def _recount(self, live: set[int], came: set[int]) -> Iterator[tuple[int, int] | None]:
        """Look at the groups that sleep under this node: without a quorum it leads them no more, and who comes back
        wakes those that went to sleep without it."""
        for uid, _ in self._table.led_where(lambda shape: not quorum_lives(shape, live)):
            self._table.follow(uid, 0)
            yield None
        for uid, _ in self._table.led_where(lambda shape: not came.isdisjoint(shape.absent)):
            yield uid, self._node

    def _meet(self, node: int, epoch: int) -> Iterator[None]:
        """Let groups that slept under `node` before a restart of this node still do, if that is the same process. If
        not, nobody leads them until somebody needs them."""
        for uid, _ in self._table.rows(f"leader = 0 AND {LED} AND under = ? AND epoch = ?", node, epoch):
            self._table.follow(uid, node)
            yield


class Host(NamedTuple):
    """What waking tells the node: `mark(member)`, it has something to do; `on_leading(member)`, it leads on;
    `stir()`, the next tick has something to do; `send_blob` says something to another node."""

    mark: Callable[[Member], None]
    on_leading: Callable[[Member], None]
    stir: Callable[[], None]
    send_blob: Callable[[int, int, int, Mapping[str, Any]], bool]


class Unquiesce:
    """One node's. `live`: the nodes that are up, this one among them."""

    def __init__(
        self,
        node: int,
        members: Mapping[int, Member],
        live: Container[int],
        table: QuiescedTable,
        timers: Timers,
        sessions: QuiescedSessions,
        scan: LivenessScan,
        transitions: Transitions,
        host: Host,
    ) -> None:
        self._node = node
        self._members = members
        self._live = live
        self._table = table
        self._timers = timers
        self._sessions = sessions
        self._scan = scan
        self._transitions = transitions
        self._host = host
        # What waking has to say to other nodes, by node; it leaves with the next tick.
        self._notices: dict[int, list[int]] = {}
        # Groups to wake when there is time: (leader that each slept under, 0 for one that is gone; by whose word).
        self._waking: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def find(self, uid: int, use: bool = False, by: int = 0) -> Member | None:
        """Return a group's member, woken if it sleeps; None when this node has none. `use`: somebody waits for it, so
        without a leader it campaigns at once. `by`: the node whose word this is."""
        member = self._members.get(uid)
        if member is None:
            row = self._table.pop(uid)
            if row is not None:
                member = self._wake(uid, row, use, by)
        return member

    def _wake(self, uid: int, row: Row, use: bool, by: int) -> Member:
        leader, by = self._waking.pop(uid, (row.leader, by))
        if self._scan.gives_up(leader):
            leader = 0
        member, clock = self._transitions.wake(uid, row, leader)
        if member.state == STOPPED:
            return member
        if takes_part(member):
            self._resume(member, row, clock, leader, use, by)
        self._host.mark(member)
        return member

    def _resume(self, member: Member, row: Row, clock: LogTime | None, leader: int, use: bool, by: int) -> None:
        """Let it take up the part that it had."""
        raft, own = member.raft, self._node
        if clock is not None:
            # Who is elected now goes on from there.
            member.heard(clock.read_at(member.log_time))
        if leader == own and raft.vote == own and raft.term == row.term:
            raft.resume_leader(row.shape.asleep)
            if clock is not None:
                member.begin_clock(clock)
            if member.state == RUNNING:
                self._host.on_leading(member)
            for node in row.shape.asleep:
                if node != by:
                    self.note_awake(node, member.uid)
        elif leader and leader != own and raft.term == row.term and leader in self._live:
            raft.resume_follower(leader)
            if by != leader:
                # It hears of this, and the group is awake on all its nodes.
                raft.on_link_reset(leader)
        elif not row.last and raft.configuration.voters != (own,):
            self._begin(member, use, by)
        elif use or raft.configuration.voters == (own,):
            raft.campaign()
        elif not by:
            raft.orphan()

    def _begin(self, member: Member, use: bool, by: int) -> None:
        """Let a group that was never used be led: first by the node that its uid picks, so that leaders are spread; by
        whoever is asked where that one is away, or does not get to it."""
        raft, own = member.raft, self._node
        first = first_leader(member.uid, raft.configuration.voters)
        if (first == own and (use or by)) or (use and first not in self._live):
            raft.campaign()
        elif use:
            # If that comes to nothing, this node campaigns after an election timeout.
            self._host.send_blob(first, AWAKE, 0, {"groups": [member.uid]})
        elif not by:
            raft.orphan()

    @property
    def is_busy(self) -> bool:
        """Whether the next tick has groups to wake, or to speak of."""
        return bool(self._waking or self._notices or self._scan.is_pending)

    def tick(self) -> None:
        """Wake what is due, as much as there is time for, and say what there is to say. Called once a tick."""
        self._go_on_scanning()
        end = time.monotonic() + WAKE_SECONDS
        while self._waking:
            uid = next(iter(self._waking))
            self.find(uid)
            self._waking.pop(uid, None)
            if time.monotonic() >= end:
                break
        self.ring()
        if self._notices:
            notices, self._notices = self._notices, {}
            for node, uids in notices.items():
                for at in range(0, len(uids), NOTICE_MAX):
                    self._host.send_blob(node, AWAKE, 0, {"groups": uids[at : at + NOTICE_MAX]})

    def ring(self) -> None:
        """Wake the groups whose timers are due."""
        for uid in self._timers.stepped():
            self.soon(uid, self._node)
        for uid in self._timers.due():
            self.find(uid, use=True)

    def look(self) -> None:
        """Wake the groups that have to end sessions of silent clients. Called once a second."""
        for uid in self._sessions.overdue():
            if uid not in self._waking:
                self.soon(uid, self._node)

    def on_liveness(self, live: set[int]) -> None:
        """Look what it means for the groups that sleep that nodes appeared or went."""
        if self._scan.begin(live):
            self._go_on_scanning()

    def _go_on_scanning(self) -> None:
        for uid, leader in self._scan.go_on():
            self.soon(uid, leader)
        if self._scan.is_pending:
            self._host.stir()

    def soon(self, uid: int, leader: int, by: int = 0) -> None:
        """Wake a group when there is time. `leader` is whom it slept under; it is believed if `by` is the same."""
        self._waking[uid] = (leader, by)
        self._host.stir()

    def tell_awake(self, node: int, uid: int) -> None:
        """Tell a node, with the next tick, that a group it sleeps in is awake here."""
        if uid not in self._waking:
            self.note_awake(node, uid)
            self._host.stir()

    def note_awake(self, node: int, uid: int) -> None:
        """Tell a node so with a tick that comes anyway: the group was just active here."""
        self._notices.setdefault(node, []).append(uid)

    def on_awake(self, node: int, uids: list[int]) -> None:
        """Take in that these groups, some of which may sleep here, are awake on `node`."""
        for uid in uids:
            member = self._members.get(uid)
            if member is not None:
                member.raft.on_awake(node)
                if member.raft.dirty:
                    self._host.mark(member)
            elif uid in self._table:
                row = self._table.row(uid)
                if row.last:
                    self.soon(uid, row.leader, node)
                else:
                    # Somebody waits there for its first leader.
                    self.find(uid, by=node)

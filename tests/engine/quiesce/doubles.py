"""What the parts of quiescence are built on in their tests: one node's table and timers, members whose core is real and
that nobody drives; no disk, no network, no loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from logyard.engine.quiesce import unquiesce
from logyard.engine.quiesce.quiesced_sessions import QuiescedSessions
from logyard.engine.quiesce.quiesced_table import QuiescedTable, Row, Shape
from logyard.engine.quiesce.timers import Timers
from logyard.engine.quiesce.transitions import Transitions
from logyard.engine.quiesce.unquiesce import LivenessScan, Unquiesce
from logyard.engine.raft.configuration import Configuration
from logyard.engine.raft.core import Raft
from logyard.engine.raft.raft_log import RaftLog
from logyard.engine.raft.state import Limits
from logyard.engine.replica.log_clock import Clocks
from logyard.engine.replica.log_time import LogTime
from logyard.engine.replica.member import Member
from logyard.engine.types import Spec

from ..replica.doubles import Admission, Living, Recorder

VOTERS = (1, 2, 3)
OWN, UID, TERM, LAST = 2, 9, 4, 7
MS, S = 1_000_000, 1_000_000_000
SHAPE = Shape(VOTERS, (), (1, 3), (), "log")
LIMITS = Limits()


def row(leader: int = OWN, **differs: Any) -> Row:
    """A group that sleeps under this very node, unless it differs."""
    return Row(TERM, LAST, 0, 2, 5, leader, 100, SHAPE, "a")._replace(**differs)


def member_of(
    live: set[int], uid: int = UID, name: str = "a", voters: tuple[int, ...] = VOTERS, last: int = LAST
) -> Member:
    """A member as its rows make it: all it has is applied, and in its snapshot. `last` 0: it was never used."""
    term, vote = (TERM, OWN) if last else (0, 0)
    raft = Raft(
        uid, OWN, Configuration(voters), RaftLog(last, term), term=term, vote=vote, commit=last, live=live,
        draw=lambda _: 0, encode=cast(Any, None), limits=LIMITS,
    )  # fmt: skip
    return Member(Spec(uid, name, "log", {}, voters, 0), raft, cast(Any, Recorder()), cast(Any, Living()), Admission())


class SetClocks(Clocks):
    """Clocks that stand still until they are moved; `step` sets the wall clock alone."""

    def __init__(self) -> None:
        super().__init__()
        self.wall, self.monotonic = 1_000_000 * S, 5_000 * S
        self.wall_ns = lambda: self.wall
        self.monotonic_ns = lambda: self.monotonic

    def move(self, seconds: float, step: float = 0.0) -> None:
        self.monotonic += int(seconds * S)
        self.wall += int((seconds + step) * S)


class Heard:
    def __init__(self) -> None:
        self.last_seen: dict[int, float] = {}
        self.clock = 0.0

    def now(self) -> float:
        return self.clock


class Leaders:
    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, int, int]] = {}

    def led(self, uid: int, leader: int, term: int, since_ms: int) -> None:
        self.rows[uid] = leader, term, since_ms

    def pop(self, uid: int) -> int:
        return self.rows.pop(uid, (0, 0, 0))[2]


class Yard:
    """One node's side of quiescence, but for what puts groups to sleep. `rebuilt` changes a member that wakes."""

    def __init__(self, live: tuple[int, ...] = VOTERS) -> None:
        self.live = set(live)
        self.members: dict[int, Member] = {}
        self.names: dict[str, int] = {}
        self.clocks = SetClocks()
        self.heard = Heard()
        self.leaders = Leaders()
        self.epochs: dict[int, int] = {}
        self.sent: list[tuple[int, int, Mapping[str, Any]]] = []
        self.marked: list[Member] = []
        self.leading: list[Member] = []
        self.stirred = 0
        self.rebuilt: Any = lambda member: None
        self.voters: tuple[int, ...] = VOTERS
        self.table = QuiescedTable(OWN)
        self.timers = Timers(OWN, self.clocks, self.table.leader_of, self.fresh, self.stir)
        self.sessions = QuiescedSessions(self.heard)
        self.transitions = Transitions(
            OWN, self.members, self.names, self.leaders, self.table, self.timers, self.sessions, self.rebuild
        )
        self.unquiesce = Unquiesce(
            OWN, self.members, self.live, self.table, self.timers, self.sessions,
            LivenessScan(OWN, self.table, lambda node: self.epochs.get(node, 0)), self.transitions,
            unquiesce.Host(self.marked.append, self.leading.append, self.stir, self.send),
        )  # fmt: skip

    def fresh(self, member: Member) -> LogTime:
        return LogTime(member.log_time, self.clocks.wall, self.clocks.monotonic)

    def stir(self) -> None:
        self.stirred += 1

    def send(self, node: int, kind: int, request: int, header: Mapping[str, Any]) -> bool:
        self.sent.append((node, kind, header))
        return node in self.live

    def rebuild(self, uid: int, found: Row) -> Member:
        member = member_of(self.live, uid, found.name, self.voters, found.last)
        self.rebuilt(member)
        return member

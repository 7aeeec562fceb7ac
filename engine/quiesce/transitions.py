"""A member becomes a row of the quiesced table, and a row a member.

Invariant: a group is in the table or among the members, never both, and wherever it goes, its name, its leader, its
timer and its clients' sessions go with it. A member is rebuilt from its stored rows by the very code of recovery.
Called by `quiesce`, `unquiesce` and recovery, in one step of the loop each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Protocol

from logyard.protocol.errors import Corrupt, LogyardError

from ..log import meta_rows
from ..log.recovered import Recovered
from ..recovery.rebuild import spec_of
from ..replica.log_time import LogTime
from ..replica.member import STOPPED, Member
from ..types import Spec
from .quiesced_sessions import QuiescedSessions
from .quiesced_table import QuiescedTable, Row, row_again, row_fresh
from .timers import Timers


class Leaders(Protocol):
    """Who leads what, as far as this node knows."""

    def led(self, uid: int, leader: int, term: int, since_ms: int) -> None:
        """Note who leads a group, and since when."""
        ...

    def pop(self, uid: int) -> int:
        """Forget a group; return since when its leader leads."""
        ...


class Transitions:
    """One node's; `slept` and `woken` count them. `rebuild(uid, row)` makes a member from a group's stored rows."""

    def __init__(
        self,
        node: int,
        members: MutableMapping[int, Member],
        names: MutableMapping[str, int],
        leaders: Leaders,
        table: QuiescedTable,
        timers: Timers,
        sessions: QuiescedSessions,
        rebuild: Callable[[int, Row], Member],
    ) -> None:
        self.slept = 0
        self.woken = 0
        self._node = node
        self._members = members
        self._names = names
        self._leaders = leaders
        self._table = table
        self._timers = timers
        self._sessions = sessions
        self._rebuild = rebuild

    def sleep(self, member: Member, row: Row) -> None:
        """Let a member become this row."""
        member.hibernate()
        del self._members[member.uid]
        self._table.add(member.uid, row._replace(since_ms=self._leaders.pop(member.uid)))
        del self._names[row.name]
        if row.leader == self._node:
            self._sessions.sleep(member)
        if row.due:
            self._timers.set(member.uid, row.due, member)
        self.slept += 1

    def wake(self, uid: int, row: Row, leader: int) -> tuple[Member, LogTime | None]:
        """Let a row that was taken out of the table become a member; return it, and the clock of its log time. Under
        `leader` it slept on, 0 for nobody. A member that is stopped, or lost records, is as a start would have it."""
        clock = self._timers.pop(uid)
        self.woken += 1
        self._names[row.name] = uid
        if leader:
            self._leaders.led(uid, leader, row.term, row.since_ms)
        member = self._members[uid] = self._rebuild(uid, row)
        if takes_part(member):
            self._sessions.wake(member)
        return member, clock

    def lay(self, specs: Sequence[Spec]) -> None:
        """Let groups that were just registered sleep until somebody uses them: no member is built."""
        for spec in specs:
            del self._names[spec.name]
        self.adopt_fresh(specs)

    def adopt_fresh(self, specs: Iterable[Spec]) -> None:
        """Let groups sleep on that nobody had used when this node ended."""
        self._table.extend((spec.uid, row_fresh(spec)) for spec in specs)

    def adopt(self, spec: Spec, state: meta_rows.StateRow) -> None:
        """Let a group sleep on that slept when this node ended: no member is built."""
        row, slept_ms = row_again(spec, state)
        self._table.add(spec.uid, row if row.under != self._node else row._replace(under=0))
        if row.due:
            self._timers.adopt(spec.uid, row.due, slept_ms)


def takes_part(member: Member) -> bool:
    """Return whether a member that woke is whole."""
    return member.state != STOPPED and member.raft.mend is None


class Rows(Protocol):
    """Reads the meta store."""

    def get(self, key: bytes) -> bytes | None:
        """Return one row, None when there is none."""
        ...


Build = Callable[[Spec, meta_rows.StateRow | None, meta_rows.SnapshotRow | None, Recovered], Member]


class Rebuild:
    """Makes members from the rows that they went to sleep by: recovery of one group, with nothing in the WAL.

    `build` makes a member; `stop(member, reason)` lets it take no part; `unfit(spec, error)` makes one whose rows make
    none, for the others to mend; `learn(member)` notes how new its machine is.
    """

    def __init__(
        self,
        path: str,
        rows: Rows,
        build: Build,
        stop: Callable[[Member, str], None],
        unfit: Callable[[Spec, Exception], Member],
        learn: Callable[[Member], None],
    ) -> None:
        self._path = path
        self._rows = rows
        self._build = build
        self._stop = stop
        self._unfit = unfit
        self._learn = learn

    def spec(self, uid: int) -> Spec:
        """Return a group's definition from its stored row. Raises `Corrupt`."""
        key = meta_rows.group_key(uid)
        value = self._rows.get(key)
        if value is None:
            raise Corrupt(self._path, 0, f"a definition of group {uid:016x}", "none")
        return spec_of(meta_rows.GroupRow.unpack(key, value))

    def __call__(self, uid: int, row: Row) -> Member:
        """Return a group's member. One whose rows are damaged comes up stopped."""
        try:
            spec = self.spec(uid)
        except LogyardError as error:
            member = self._build(Spec(uid, row.name, "log", {}, (), 0), None, None, Recovered())
            self._stop(member, str(error))
            return member
        try:
            state_key, snapshot_key = meta_rows.state_key(uid), meta_rows.snapshot_key(uid)
            state, snapshot = self._rows.get(state_key), self._rows.get(snapshot_key)
            if row.last and (state is None or snapshot is None):
                raise Corrupt(f"group {spec.name}", 0, "its rows", "none")
            member = self._build(
                spec, None if state is None else meta_rows.StateRow.unpack(state_key, state),
                None if snapshot is None else meta_rows.SnapshotRow.unpack(snapshot_key, snapshot), Recovered(),
            )  # fmt: skip
        except Exception as error:
            return self._unfit(spec, error)
        self._learn(member)
        return member

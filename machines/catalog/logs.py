"""The names of the cluster's logs: which group each one is, what is wanted of it, and what was seen.

A creation is an intent first (`making`), with uid, definition and members, so that whoever finishes it makes this very
group. It ends as `live` or `undoing`, whichever is committed first; what had a leader is never undone. What is wanted
(copies, zones, pins) comes from commands of users; what is seen is what a group's leader reported, at the index of its
configuration, and an older report changes nothing. Names are unique; uids are those of groups and never come again.
Invariant: a name is one log's that is neither `undoing`, `deleting` nor `conflicting`.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import msgpack

from logyard.engine.machine import Reject
from logyard.engine.types import times_forced

from .index import Index
from .section import At, Table

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
SYSTEM = "_"
"""How names begin that are not for clients."""
RESERVED = "_catalog"
OF_CLIENTS = ("topics", "groups")
"""Machines of the cluster's own groups that clients make when they are first needed."""
MAKING, LIVE, UNDOING, DELETING, CONFLICTING = "making", "live", "undoing", "deleting", "conflicting"
NAMED, LEAVING = (MAKING, LIVE), (UNDOING, DELETING)
PAGE_MAX = 1000
OPTIONS_BYTES_MAX = 16 << 10


class Log(NamedTuple):
    """One group. `members` is where it was to be made; `voters` and `learners` are what was seen of the configuration
    at position `seen` (`engine.types`; 0: its leader was never heard); `waiting`: nodes that have not said yet that
    they have nothing of it."""

    name: str
    uid: int
    machine: str
    arguments: Mapping[str, Any]
    members: tuple[int, ...]
    created: int
    state: str
    revision: int
    owner: str = ""
    options: Mapping[str, Any] = {}
    copies: int = 0
    zones: tuple[str, ...] = ()
    pins: tuple[int, ...] = ()
    seen: int = 0
    voters: tuple[int, ...] = ()
    learners: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    mode: str = "quorum"

    def nodes(self) -> set[int]:
        """Return where it has a member, as far as anybody knows; before its leader was heard, where it was to have."""
        return {*self.voters, *self.learners} if self.seen else set(self.members)


class Logs:
    """All logs, by number, name and uid. `moving(uid)`: the plan has a move for it."""

    name: ClassVar[str] = "logs"
    version: ClassVar[int] = 1
    commands: ClassVar[Collection[str]] = (
        "create", "live", "undo", "gone", "want", "options", "rename", "delete", "report", "import",
    )  # fmt: skip
    questions: ClassVar[Collection[str]] = ("find", "list")

    def __init__(self, moving: Callable[[int], bool] = lambda uid: False) -> None:
        self._moving = moving
        self.rows: Table[Log] = Table("rows", Log, defaults=[*Log._field_defaults.values()])
        self.names = Index(self._kept, lambda row: row.name)
        """Numbers of those that have their name."""
        self.uids = Index(self._kept, lambda row: row.uid)
        self.unsettled: set[int] = set()
        """Numbers of those that are being made, taken back or deleted."""
        self.conflicting: set[int] = set()
        """Numbers of those whose name is another one's."""
        self.revision = 0
        """Counts changes of this copy: not part of what is replicated."""
        self._held: Counter[int] = Counter()
        # Names of logs that are going, with their numbers: their members may still have them.
        self._going: dict[str, set[int]] = {}
        self._order: array[int] | None = None

    def apply(self, at: At, command: str, values: Mapping[str, Any]) -> Any:
        """Apply a command; see the method of its name."""
        if command == "create":
            return self._create(at, values)
        if command == "import":
            return [self._import(at, row) for row in values["logs"]]
        if command == "report":
            return [self._report(at, *row) for row in values["logs"]]
        if command in ("live", "undo"):
            return [self._decide(at, command, int(uid)) for uid in values["uids"]]
        if command == "gone":
            return [self._gone(at, int(uid), int(values["node"])) for uid in values["uids"]]
        if command == "rename":
            return self._rename(at, int(values["uid"]), str(values["name"]))
        if command == "delete":
            return self._delete(at, values)
        return self._want(at, command, values)

    # Looking up.

    def find(self, name: str) -> Log | None:
        """Return the log that has a name."""
        found = self.names.find(name)
        return None if found is None else found[1]

    def of_uid(self, uid: int) -> Log | None:
        """Return a group's log, whatever its state."""
        found = self.uids.find(uid)
        return None if found is None else found[1]

    def held(self, node: int) -> int:
        """Count the logs that have, or are to have, a member on a node, and those that it has not let go."""
        return self._held[node]

    def awaited(self, node: int) -> int:
        """Count those of `held` that are going, and wait for the node to let them go."""
        return sum(row.state in LEAVING and node in row.waiting for row in self.going_on())

    def __iter__(self) -> Iterator[Log]:
        """Yield all logs, in the order in which they came."""
        return (row for _, row in self.rows)

    def going_on(self) -> list[Log]:
        """Return those that are being made, taken back or deleted."""
        return [self._kept(number) for number in sorted(self.unsettled)]

    def ask(self, question: str, values: Mapping[str, Any]) -> Any:
        """Answer `find` (name or uid) with a log as a map, and `list` (after, limit, state) with many, by name."""
        if question == "find":
            found = self.of_uid(int(values["uid"])) if "uid" in values else self.find(str(values["name"]))
            if found is None:
                raise Reject("unknown_group", f"the catalogue knows no log {values.get('name', values.get('uid'))!r}")
            return shown(found)
        state, after = values.get("state"), str(values.get("after", ""))
        behind: Iterator[Log]
        if state in (None, LIVE):
            order = self._by_name()
            behind = map(self._kept, islice(order, bisect_right(order, after, key=self._name_of), None))
        else:
            few = map(self._kept, self.unsettled | self.conflicting)
            behind = iter(sorted(row for row in few if row.name > after))
        limit = max(0, min(int(values.get("limit", PAGE_MAX)), PAGE_MAX))
        return [shown(row) for row in islice((row for row in behind if state is None or row.state == state), limit)]

    def _by_name(self) -> array[int]:
        """Return the numbers of all logs, by name: made when it is first asked for and again when names have changed,
        so that the pages of a long list cost what is on them."""
        if self._order is None:
            self._order = array("I", (number for *_, number in sorted((row.name, row.uid, n) for n, row in self.rows)))
        return self._order

    def _name_of(self, number: int) -> str:
        return self._kept(number).name

    # Births.

    def check_free(self, name: str, members: Collection[int], system: bool = False) -> None:
        """Raise `Reject` unless a log of this name can be made on these nodes now. For other sections too, which check
        all their names first and then `intend` each."""
        if not NAME.fullmatch(name):
            raise Reject("bad_request", f"{name[:140]!r} is no name: letters, digits, '.', '_' and '-', at most 128")
        if name.startswith(SYSTEM) and not system:
            raise Reject("bad_request", f"{name!r}: names that begin with {SYSTEM!r} are the cluster's own")
        if name in self.names:
            raise Reject("group_exists", f"a log of the name {name!r} exists")
        for number in sorted(self._going.get(name, ())):
            row = self.rows.get(number)
            if row is not None and (left := set(row.waiting) & set(members)):
                raise Reject("refused", f"{name!r} was deleted, and nodes {sorted(left)} have not let it go yet")

    def intend(self, at: At, wanted: Mapping[str, Any]) -> Log:
        """Store the intent of a log whose name was found free: name, uid, machine, arguments, members, and perhaps
        copies, zones, pins, options, owner."""
        members = tuple(sorted({int(node) for node in wanted["members"]}))
        row = Log(
            str(wanted["name"]), int(wanted["uid"]), str(wanted["machine"]), wanted.get("arguments") or {},
            members, at.now, MAKING, at.index, str(wanted.get("owner", "")), wanted.get("options") or {},
            int(wanted.get("copies", 0)) or len(members), tuple(wanted.get("zones", ())),
            tuple(wanted.get("pins", ())),
        )  # fmt: skip
        self._put(self.rows.next, row)
        return row

    def _create(self, at: At, values: Mapping[str, Any]) -> list[Any]:
        """Store the intents of `logs`; each has an answer of its own: its log (an equal one may be there already, whose
        uid is the one to make), or [code, message]."""
        found: list[Any] = []
        for wanted in values["logs"]:
            try:
                found.append(shown(self._created(at, wanted, bool(values.get("system")))))
            except Reject as refusal:
                found.append([refusal.code, refusal.message])
        return found

    def _created(self, at: At, wanted: Mapping[str, Any], system: bool) -> Log:
        name, uid = str(wanted["name"]), int(wanted["uid"])
        old = self.find(name)
        if old is not None:
            same = old.machine == str(wanted["machine"]) and dict(old.arguments) == dict(wanted.get("arguments") or {})
            if not same or set(old.members) != {int(node) for node in wanted["members"]} or old.owner:
                raise Reject("group_exists", f"group {name!r} exists with another definition")
            return old
        self.check_free(name, wanted["members"], system or str(wanted["machine"]) in OF_CLIENTS)
        if uid in self.uids or not wanted["members"]:
            raise Reject("bad_request", f"{name!r} needs a number that no log ever had, and members")
        return self.intend(at, wanted)

    def _decide(self, at: At, command: str, uid: int) -> str:
        """Decide an intent, once: `live`, or `undo` unless its group had a leader. Return the state that holds."""
        number, row = self._row(uid)
        if command == "live" and row.state == MAKING:
            self._put(number, row._replace(state=LIVE, revision=at.index))
        if command == "undo" and row.state == MAKING and not row.seen:
            self._put(number, row._replace(state=UNDOING, revision=at.index, waiting=row.members))
        decided = self.rows.get(number)
        return decided.state if decided is not None else UNDOING

    # What is seen.

    def _report(self, at: At, uid: int, seen: int, voters: Sequence[int], learners: Sequence[int]) -> bool:
        """Take what a group's leader says of its members; return whether it was news. What is being made, or taken
        back, and has a leader, lives."""
        number = self.uids.get(int(uid))
        row = None if number is None else self.rows.get(number)
        if number is None or row is None or seen <= 0:
            return False
        news = seen > row.seen
        if news:
            by_hand = row.seen and len(voters) != len(row.voters) and not self._moving(row.uid)
            if by_hand and times_forced(seen) == times_forced(row.seen):
                # What an operator made of it is what is wanted, and nothing undoes it; but where there was no other way
                # than to force it, as many copies are wanted as before.
                row = row._replace(copies=len(voters))
            row = row._replace(
                seen=seen, voters=tuple(sorted(voters)), learners=tuple(sorted(learners)), revision=at.index
            )
        if row.state in (MAKING, UNDOING):
            taken = self.names.get(row.name) not in (None, number)
            row = row._replace(state=CONFLICTING if taken else LIVE, waiting=(), revision=at.index)
            news = True
        if news:
            self._put(number, row)
        return news

    def _import(self, at: At, found: Mapping[str, Any]) -> str:
        """Take a group that a node has and the catalogue has not; return its state. Of two of one name the older
        definition, then the lower uid, keeps it. At index 0 nobody ever led it: it is an intent, which may have been
        taken back elsewhere."""
        name, uid, created = str(found["name"]), int(found["uid"]), int(found["created"])
        voters, learners, index = found["voters"], found.get("learners", ()), int(found.get("index", 0))
        if name == RESERVED:
            raise Reject("refused", f"a log of this cluster is called {RESERVED!r}: rename or delete it first")
        if uid in self.uids:
            self._report(at, uid, index, voters, learners)
            return self._row(uid)[1].state
        state = LIVE if index else MAKING
        holder = self.find(name)
        if holder is not None:
            if (holder.created, holder.uid) < (created, uid) or holder.state == MAKING:
                state = CONFLICTING
            else:
                self._put(self._row(holder.uid)[0], holder._replace(state=CONFLICTING, revision=at.index))
        members = tuple(sorted(found.get("members") or voters))
        row = Log(
            name, uid, str(found["machine"]), found.get("arguments") or {}, members, created, state, at.index,
            copies=len(voters), seen=index, voters=tuple(sorted(voters)), learners=tuple(sorted(learners)),
        )  # fmt: skip
        self._put(self.rows.next, row)
        return state

    # What is wanted.

    def _want(self, at: At, command: str, values: Mapping[str, Any]) -> Any:
        """Change copies, zones and pins (`want`), or `options`; what is not named stays."""
        number, row = self._named(values)
        if command == "options":
            row = row._replace(options={**row.options, **values["options"]})
            if (size := len(msgpack.packb(row.options))) > OPTIONS_BYTES_MAX:
                raise Reject("bad_request", f"{size} bytes of options; a log has {OPTIONS_BYTES_MAX} at most")
        else:
            copies = int(values.get("copies", row.copies))
            if not 0 < copies <= 9:
                raise Reject("bad_request", "a log has 1 to 9 copies")
            zones, pins = values.get("zones", row.zones), values.get("pins", row.pins)
            row = row._replace(copies=copies, zones=tuple(zones), pins=tuple(sorted(pins)))
        self._put(number, row._replace(revision=at.index))
        return shown(row._replace(revision=at.index))

    def _rename(self, at: At, uid: int, name: str) -> Any:
        number, row = self._row(uid)
        if row.state not in (LIVE, CONFLICTING) or row.owner:
            raise Reject("refused", f"{row.name!r} is {row.owner or row.state}: it can't be renamed")
        if name != row.name or row.state == CONFLICTING:
            self.check_free(name, row.nodes(), system=name == row.name)
        self._put(number, row._replace(name=name, state=LIVE, revision=at.index))
        return shown(row._replace(name=name, state=LIVE, revision=at.index))

    # Ends.

    def _delete(self, at: At, values: Mapping[str, Any]) -> Any:
        """Mark a log as going, by name or by uid; `owner` is whose it must be."""
        number, row = self._row(int(values["uid"])) if "uid" in values else self._named(values)
        if row.owner != str(values.get("owner", "")):
            raise Reject("refused", f"{row.name!r} belongs to {row.owner or 'nobody'}: it is deleted with that")
        if row.state == MAKING:
            raise Reject("refused", f"{row.name!r} is being made: try again when it is live")
        if row.state != DELETING:
            self.let_go(at, number)
        return shown(self._row(row.uid)[1])

    def let_go(self, at: At, number: int) -> None:
        """Mark a log as going: its name is free, and its nodes are waited for. For other sections too."""
        row = self.rows.get(number)
        if row is not None:
            nodes = tuple(sorted(row.nodes() | set(row.members)))
            self._put(number, row._replace(state=DELETING, waiting=nodes, revision=at.index))

    def _gone(self, at: At, uid: int, node: int) -> bool:
        """Note that a node has nothing of a group that is going; return whether that was the last one."""
        number = self.uids.get(uid)
        row = None if number is None else self.rows.get(number)
        if number is None or row is None or row.state not in LEAVING:
            return row is None
        left = tuple(one for one in row.waiting if one != node)
        if left:
            self._put(number, row._replace(waiting=left, revision=at.index))
            return False
        self.rows.drop(number)
        self._index(number, row, None)
        return True

    # Keeping.

    def snapshot(self) -> Mapping[str, bytes]:
        """Return the rows in shards."""
        return self.rows.shards()

    def restore(self, shards: Mapping[str, bytes], version: int) -> None:
        """Take the rows, and index them."""
        self.rows.restore(shards)
        for number, row in self.rows:
            self._index(number, None, row)

    def upgrade(self, from_version: int, to_version: int) -> None:
        """Have nothing to do: there is one version."""

    def _row(self, uid: int) -> tuple[int, Log]:
        found = self.uids.find(uid)
        if found is None:
            raise Reject("unknown_group", f"the catalogue knows no log of uid {uid:016x}")
        return found

    def _named(self, values: Mapping[str, Any]) -> tuple[int, Log]:
        name = str(values["name"])
        found = self.names.find(name)
        if found is None:
            raise Reject("unknown_group", f"the catalogue knows no log {name!r}")
        return found

    def _kept(self, number: int) -> Log:
        """Return the row of a number that an index has."""
        row = self.rows.get(number)
        assert row is not None, number
        return row

    def _put(self, number: int, row: Log) -> None:
        old = self.rows.get(number)
        self.rows.put(number, row)
        self._index(number, old, row)

    def _index(self, number: int, old: Log | None, row: Log | None) -> None:
        """Find a row in place of what it was; None: it was not, or is no more."""
        self.revision += 1
        if old is None or row is None or old.name != row.name:
            self._order = None
        if old is None and row is not None:
            self.uids.add(row.uid, number)
        elif old is not None and row is None:
            self.uids.discard(old.uid, number)
        if (held := _name(old, NAMED)) != (name := _name(row, NAMED)):
            if held is not None:
                self.names.discard(held, number)
            if name is not None:
                self.names.add(name, number)
        if (left := _name(old, LEAVING)) != (name := _name(row, LEAVING)):
            if left is not None:
                self._going[left].discard(number)
                if not self._going[left]:
                    del self._going[left]
            if name is not None:
                self._going.setdefault(name, set()).add(number)
        self.unsettled.discard(number)
        self.conflicting.discard(number)
        if row is not None and row.state == CONFLICTING:
            self.conflicting.add(number)
        elif row is not None and row.state != LIVE:
            self.unsettled.add(number)
        if (before := _holders(old)) != (after := _holders(row)):
            self._held.subtract(before)
            self._held.update(after)


def _name(row: Log | None, states: Collection[str]) -> str | None:
    return row.name if row is not None and row.state in states else None


def _holders(row: Log | None) -> set[int]:
    if row is None:
        return set()
    return set(row.waiting) if row.state in LEAVING else row.nodes()


def shown(row: Log) -> dict[str, Any]:
    """Return a log as a map of plain values."""
    return row._asdict()

"""What a node does of itself for the catalogue: finds it or founds it, says who it is, reports what it leads, imports
what the catalogue does not know, lets go what was deleted, and, where it leads, looks after the catalogue's members.

Everything is read from this node's own copy and compared with what is here, so a look that was cut off is made up for
by the next one; nothing is asked of a group. Invariants: there is one founder, the lowest number that this node is
configured with, and its uid is derived from the cluster's name; a look that fails leaves the data plane alone.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import trio

from logyard.engine.raft.state import LEADER
from logyard.engine.replica.member import Member
from logyard.engine.types import Spec, position
from logyard.machines.catalog import Catalog
from logyard.machines.catalog.logs import DELETING, MAKING, RESERVED, UNDOING, Log, Logs
from logyard.machines.catalog.nodes import NODE_REMOVED, REMOVED, Node, Nodes
from logyard.machines.catalog.plan import Move
from logyard.machines.catalog.plan import Plan as PlanSection
from logyard.machines.catalog.section import Table
from logyard.protocol.errors import LogyardError, Refused

from .calls import CatalogCalls
from .electorate import next_step
from .mover import UNDO, Mover, report_of
from .planner import GONE, Plan
from .reconciler import Reconciler, Seen, planner_of
from .silence import REPLACE_AFTER_S, Silence, too_many
from .sleepers import WOKEN_AT_ONCE, Sleepers
from .steps import in_turns, listed

log = logging.getLogger(__name__)

VERSIONS: Mapping[str, int] = MappingProxyType({"catalog": 1})
"""What a node of this release says that it knows."""
LOOK_S = 1.0
MOVING_LOOK = 0.2
"""So much of the usual time is between two looks at moves while there are any: there is room for others as they end."""
UID = struct.Struct("<Q")
LED_MAX = 500_000
"""Groups that a node names as led by it: 4 MB."""
LED_LOOKS = 5
"""It looks once in so many looks which those are."""
SAY_LOOKS = 15
"""A node's view is told again after so many: what was told can be lost with its connection."""
PLAN_LOOKS = 10
"""A plan is made once in so many looks, at most."""
LOOKED_AT = 256
"""Groups that are looked at in one step: half a millisecond of the loop."""
REPORTS_MAX = 2000
"""Groups in one command: some 100 KiB."""
HELLO_S = 2.0
STILL_S = 30.0
"""Who did nothing for so long stood still: it knows of nobody whether others heard it meanwhile."""
FINISH_S = 30.0
"""After so long the catalogue's leader finishes a creation whose creator says nothing."""
FINISHED_MAX = 64
"""Of these, so many a look: each is a question to its members' nodes."""


def catalog_uid(cluster: str, incarnation: int = 0) -> int:
    """Return the number of a cluster's catalogue: the same wherever it is asked."""
    digest = hashlib.blake2b(f"{cluster}/{incarnation}".encode(), digest_size=8, person=b"logyard catalog")
    return int.from_bytes(digest.digest(), "little") | 1


def catalog_of(member: Member | None) -> Catalog | None:
    """Return the state that a member holds, if it is whole."""
    machine = member.machine if member is not None else None
    return machine if isinstance(machine, Catalog) else None


def logs_of(catalog: Catalog) -> Logs:
    """Return the catalogue's logs."""
    found = catalog.sections["logs"]
    assert isinstance(found, Logs)
    return found


def plan_of(catalog: Catalog) -> PlanSection:
    """Return the catalogue's plan."""
    found = catalog.sections["plan"]
    assert isinstance(found, PlanSection)
    return found


def nodes_of(catalog: Catalog) -> Nodes:
    """Return the catalogue's nodes."""
    found = catalog.sections["nodes"]
    assert isinstance(found, Nodes)
    return found


class Registry(Protocol):
    """Who makes groups on this node and on others: `engine.host.groups.GroupRegistry`."""

    async def found(self, spec: Spec) -> str:
        """Make a group of this node alone; return why not, or nothing."""
        ...

    async def take_back(self, uids: Sequence[int]) -> None:
        """Let none of these be born here."""
        ...

    async def delete(self, uids: Sequence[int], tell: bool = True) -> None:
        """Let groups go."""
        ...


class Here(NamedTuple):
    """This node, and its groups."""

    node_id: int
    cluster: str
    said: Callable[[], Mapping[str, Any]]
    """What it says of itself: directory, addresses, epoch, versions, space, labels."""
    names: MutableMapping[str, int]
    members: Mapping[int, Member]
    has: Callable[[int], bool]
    live: Set[int]
    configured: Collection[int]
    """The nodes of its configuration, this one among them."""
    denied: Callable[[Collection[int]], bool] = lambda having: False
    """Whether some refuse this one as it was removed, and none of the nodes that have a catalogue (given) does not."""


class Doors(NamedTuple):
    """What the keeper does things by."""

    say: Callable[[int, Mapping[str, Any]], bool]
    """Tell a node whom this one hears."""

    calls: CatalogCalls
    sleepers: Sleepers
    mover: Mover
    registry: Registry
    finish: Callable[[Sequence[Log]], Awaitable[None]]
    """Finish creations."""
    change: Callable[[str, Sequence[tuple[str, int]]], Awaitable[object]]
    """Change a group's members, on its leader."""
    meet: Callable[[int, str, str], Awaitable[None]]
    """Take note of a node's peer and client addresses."""
    part: Callable[[int], Awaitable[None]]
    """Know a node no more."""


class Keeper:
    """One node's."""

    def __init__(
        self, here: Here, doors: Doors, look_s: float = LOOK_S, replace_after_s: float = REPLACE_AFTER_S
    ) -> None:
        self.uid = catalog_uid(here.cluster)
        self.trouble = ""
        """Why there is no catalogue here yet, or why the last look was not whole; nothing when all is well."""
        self._here = here
        self._doors = doors
        self._look_s = look_s
        self._replace_after_s = replace_after_s
        # By uid of groups led here: the configuration index that the catalogue has.
        self._reported: dict[int, int] = {}
        self._term = 0
        # By uid of creations: since when this node sees them, by the monotonic clock.
        self._making: dict[int, float] = {}
        self._silence: Silence | None = None
        # When this process was last seen to go on, by the monotonic clock.
        self._noted = 0.0
        self._is_unwanted = False
        """It was told that it was removed, as it said who it is, or has said so itself: its copy goes after that."""
        self._said: dict[int, Mapping[str, Any]] = {}
        # By node: whom it hears, by its last word.
        self.views: dict[int, frozenset[int]] = {}
        self._others: dict[int, int] = {}
        # By node: the groups that it leads, as it said; and what this one says.
        self._leads: dict[int, bytes] = {}
        self._led = b""
        self._led_at = 0.0
        self._say_at = 0.0
        self._reconciler: Reconciler | None = None
        # A table of nodes, how much had changed of it, and whether too many of them were silent.
        self._counted: tuple[Table[Node] | None, int, bool] = (None, 0, False)
        self._stir = trio.Event()

    def member(self) -> Member | None:
        """Return this node's member of the catalogue. A group of the name that is somebody's own is none."""
        found = self._here.members.get(self.uid)
        return found if found is not None and found.spec.name == RESERVED else None

    @property
    def catalog(self) -> Catalog | None:
        """Return what this node knows of the catalogue."""
        return catalog_of(self.member())

    @property
    def removed(self) -> str:
        """Return that this node was removed, and what to do, as its own copy says, or others by refusing it, or,
        without a copy, whoever it told who it is; nothing else."""
        here, catalog = self._here, self.catalog
        row = None if catalog is None else nodes_of(catalog).rows.get(here.node_id)
        gone = self._is_unwanted if row is None else row.state == REMOVED
        # Others that were removed have to do with it as before, and know nothing.
        having = [node for node, founded in self._others.items() if founded]
        return _removed(here.node_id) if gone or here.denied(having) else ""

    def check(self, nodes: Collection[int] = ()) -> None:
        """Raise `Refused` where this node, or one of `nodes`, was removed from the cluster."""
        if removed := self.removed:
            self._is_unwanted = True
            raise Refused(removed)
        catalog = self.catalog
        rows: Mapping[int, Node] | Table[Node] = {} if catalog is None else nodes_of(catalog).rows
        for node in nodes:
            row = rows.get(node)
            if row is not None and row.state == REMOVED:
                raise Refused(_removed(node))

    def stir(self) -> None:
        """Look now."""
        self._stir.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look, once in a while, until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._note_times)
            await self._look_now_and_then()

    async def _note_times(self) -> None:
        """Note the time also while a look takes long: that is no standstill."""
        while True:
            self._note_time()
            await trio.sleep(self._look_s)

    def _note_time(self) -> None:
        """Begin silences anew where this process stood still (it was stopped, or its machine was)."""
        now = time.monotonic()
        if now - self._noted > STILL_S:
            self._silence = None
        self._noted = now

    async def _look_now_and_then(self) -> None:
        while True:
            try:
                await self._look()
            except LogyardError as error:
                self._complain(str(error))
            self._stir = trio.Event()
            deadline = trio.current_time() + self._look_s
            while (left := deadline - trio.current_time()) > 0:
                moving = self._is_moving()
                with trio.move_on_after(min(left, self._look_s * MOVING_LOOK) if moving else left):
                    await self._stir.wait()
                if self._stir.is_set() or not moving:
                    break
                await self._look_at_moves()

    def _is_moving(self) -> bool:
        catalog = self.catalog
        return catalog is not None and len(plan_of(catalog).rows) > 0 and self._may_move(catalog)

    async def _look_at_moves(self) -> None:
        """Have others begin as some end, and take them up."""
        catalog = self.catalog
        try:
            if catalog is not None:
                await self._lead(catalog)
                await self._move(catalog)
        except LogyardError as error:
            self._complain(str(error))

    def _complain(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            log.warning("the catalogue: %s", trouble)
        self.trouble = trouble

    async def _look(self) -> None:
        self._tell()
        catalog, trouble = self.catalog, ""
        self._is_unwanted |= bool(self.removed)
        if catalog is None:
            trouble = await self._find()
            try:
                await self._introduce(None)
            except LogyardError as error:
                trouble = str(error)
            self._complain(self.removed or trouble)
            return
        for part in (self._introduce, self._acquaint, self._lead, self._report, self._let_go, self._move):
            try:
                await part(catalog)
            except LogyardError as error:
                # Who is refused under its number, say, still has groups to report; and where the catalogue has no room
                # for one thing it has some for what frees space.
                trouble = trouble or str(error)
        self._complain(self.removed or trouble or self._other_founder())

    # What nodes tell one another.

    def _tell(self) -> None:
        """Tell the other nodes whom this one hears, where they have not been told, and once in a while again."""
        here, member = self._here, self.member()
        # Who was removed hears no more of what its copy is of, and has none for others.
        plain = {"live": sorted(here.live), "founded": 0 if self.removed else _founding(member)}
        leader = member.raft.leader if member is not None else 0
        now = time.monotonic()
        if here.live - {here.node_id} and now >= self._led_at:
            self._led, self._led_at = self._leads_now(), now + LED_LOOKS * self._look_s
        if now >= self._say_at:
            self._said.clear()
            self._say_at = now + SAY_LOOKS * self._look_s
        for node in here.live - {here.node_id}:
            view = {**plain, "led": self._led} if node == leader else plain
            if self._said.get(node) != view and self._doors.say(node, view):
                self._said[node] = view
        for node in self._said.keys() - here.live:
            del self._said[node]

    def _leads_now(self) -> bytes:
        """Return the groups that this node leads, awake or not, as they travel."""
        led = [uid for uid, member in self._here.members.items() if member.raft.role == LEADER and uid != self.uid]
        led = sorted((led + self._doors.sleepers.led())[:LED_MAX])
        return struct.pack(f"<{len(led)}Q", *led)

    def leaders(self) -> dict[int, int]:
        """Return who leads what, as far as the nodes that live have said."""
        here = self._here
        said = {**self._leads, here.node_id: self._leads_now()}
        return {uid: node for node in sorted(here.live & said.keys()) for (uid,) in UID.iter_unpack(said[node])}

    def hears(self, node: int) -> bool:
        """Return whether this node, or one that it hears, hears a node."""
        return any(node in self.views.get(other, ()) for other in self._here.live) or node in self._here.live

    def on_view(self, node: int, view: Mapping[str, Any]) -> None:
        """Hear whom a node hears, and when its catalogue was founded."""
        self.views[node] = frozenset(view["live"])
        self._others[node] = view["founded"]
        if "led" in view:
            self._leads[node] = view["led"]

    def _other_founder(self) -> str:
        """Return a complaint when a node has a catalogue that another founder made, which has the same number."""
        own = _founding(self.member())
        nodes = sorted(node for node, founded in self._others.items() if founded not in (0, own))
        return f"that of nodes {nodes} was founded by another node: see docs/operating.md" if own and nodes else ""

    # Finding it, and being known.

    async def _find(self) -> str:
        """Found the catalogue, if that is this node's to do; return why there is none here."""
        here = self._here
        if here.names.get(RESERVED, self.uid) != self.uid:
            return f"a log of this node is called {RESERVED!r}: rename or delete it, and the import goes on"
        if here.node_id != min(here.configured):
            return "not heard of yet"
        if len(here.live & set(here.configured)) * 2 <= len(here.configured):
            return "not founded yet: that takes a majority of the configured nodes"
        spec = Spec(self.uid, RESERVED, "catalog", {}, (here.node_id,), time.time_ns() // 1_000_000)
        return await self._doors.registry.found(spec)

    async def _introduce(self, catalog: Catalog | None) -> None:
        """Say who this node is, unless the catalogue has it so."""
        here = self._here
        said = here.said()
        if catalog is not None:
            row = nodes_of(catalog).rows.get(here.node_id)
            if row is not None and all(getattr(row, key) == value for key, value in said.items()):
                return
        elif not here.live - {here.node_id}:
            return
        # Where nobody here knows who leads, whoever is asked may.
        try:
            await self._doors.calls.change("nodes", "hello", {"node": here.node_id, **said}, HELLO_S)
            self._is_unwanted = False
        except LogyardError as error:
            self._is_unwanted |= error.code == NODE_REMOVED
            raise

    async def _acquaint(self, catalog: Catalog) -> None:
        """Know the other nodes by the addresses that the catalogue has."""
        nodes = nodes_of(catalog)
        for number, row in nodes.rows:
            if number == self._here.node_id:
                continue
            if row.state == "removed":
                await self._doors.part(number)
            else:
                await self._doors.meet(number, row.peer, row.client)

    # What is here, and what the catalogue has of it.

    async def _report(self, catalog: Catalog) -> None:
        """Tell what groups led here have as members, where that is news; import those that nobody told of."""
        here, logs, own = self._here, logs_of(catalog), self.member()
        if own is not None and own.raft.term != self._term:
            # Another leader, perhaps of a copy that was recovered and knows less than was told.
            self._term = own.raft.term
            self._reported.clear()
            self._doors.sleepers.begin()
        reports: list[Any] = []
        imports: list[dict[str, Any]] = []
        for number, (uid, member) in enumerate(list(here.members.items()), 1):
            if number % LOOKED_AT == 0:
                # Ten thousand at once would hold up everybody's appends.
                await trio.lowlevel.checkpoint()
            if here.members.get(uid) is not member:
                continue
            raft = member.raft
            if raft.role != LEADER or not member.leading or uid == self.uid:
                continue
            mark = position(raft.term, raft.base[0])
            if self._reported.get(uid) == mark or (found := report_of(member)) is None:
                continue
            row = logs.of_uid(uid)
            if row is not None and row.seen >= found[1] and row.state not in (MAKING, UNDOING):
                self._reported[uid] = mark
            elif row is not None:
                if not row.seen and len(found[2]) != len(row.members):
                    # What was made comes first: the catalogue sees what an operator does by what it was told before.
                    reports.append((uid, 1, row.members, ()))
                reports.append(found)
            else:
                imports.append(_imported(member.spec, *found[1:]))
            if len(reports) + len(imports) >= REPORTS_MAX:
                break
        # Index 0: an intent, that the catalogue's leader sees to, as nobody knows whether it was finished.
        told = await in_turns(self._doors.sleepers.look(logs))
        imports += (_imported(spec, 0, spec.voters, ()) for spec in told)
        if reports:
            await self._doors.calls.change("logs", "report", {"logs": reports})
        for at in range(0, len(imports), REPORTS_MAX):
            await self._doors.calls.change("logs", "import", {"logs": imports[at : at + REPORTS_MAX]})
        if len(self._reported) > 2 * len(here.members) + REPORTS_MAX:
            self._reported = {uid: index for uid, index in self._reported.items() if uid in here.members}

    async def _let_go(self, catalog: Catalog) -> None:
        """Let go what was deleted or is taken back, and say so; as the leader, say so for nodes that were removed, and
        finish what nobody finishes."""
        here, registry = self._here, self._doors.registry
        rows = logs_of(catalog).going_on()
        gone: list[int] = []
        for row in rows:
            if row.state in (UNDOING, DELETING) and here.node_id in row.waiting:
                if row.state == UNDOING:
                    await registry.take_back([row.uid])
                elif here.has(row.uid):
                    await registry.delete([row.uid])
                if not here.has(row.uid):
                    gone.append(row.uid)
        if gone:
            await self._doors.calls.change("logs", "gone", {"uids": gone, "node": here.node_id})
        if rows and self._doors.calls.leads():
            await self._let_go_for_removed(catalog, rows)
        now = time.monotonic()
        self._making = {row.uid: self._making.get(row.uid, now) for row in rows if row.state == MAKING}
        late = [row for row in rows if row.state == MAKING and now - self._making[row.uid] > FINISH_S]
        if late and self._doors.calls.leads():
            await self._finish(catalog, late)

    async def _finish(self, catalog: Catalog, late: Sequence[Log]) -> None:
        """Finish creations of whose members a majority lives, and take those back of which none ever will again. The
        others wait: each would be asked for as long as anybody may take to answer, and what is imported was perhaps
        made long ago."""
        live = self._here.live
        # Who was declared dead and has returned is there, if nobody has let it in again yet.
        gone = {number for number, known in nodes_of(catalog).rows if known.state in GONE} - live
        lost = [row.uid for row in late if len(gone & set(row.members)) * 2 >= len(row.members)]
        if lost:
            await self._doors.calls.change("logs", "undo", {"uids": lost[:REPORTS_MAX]})
        near = [row for row in late if len(live & set(row.members)) * 2 > len(row.members)]
        if near:
            await self._doors.finish(near[:FINISHED_MAX])

    async def _let_go_for_removed(self, catalog: Catalog, rows: Sequence[Log]) -> None:
        """Say of nodes that were removed that they have nothing any more: they never will themselves."""
        awaited = {node for row in rows for node in row.waiting}
        for node, known in nodes_of(catalog).rows if awaited else ():
            if node in awaited and known.state == REMOVED:
                uids = [row.uid for row in rows if node in row.waiting]
                await self._doors.calls.change("logs", "gone", {"uids": uids, "node": node})

    # Where it leads.

    async def _lead(self, catalog: Catalog) -> None:
        """Look after the catalogue itself, where it is led: whose it is, who is silent, who votes."""
        member = self.member()
        if member is None or not self._doors.calls.leads():
            self._silence = self._reconciler = None
            return
        nodes = nodes_of(catalog)
        if nodes.uid != self.uid:
            await self._doors.calls.change("nodes", "found", {"uid": self.uid, "nodes": sorted(self._here.configured)})
        raft = member.raft
        states = {number: row.state for number, row in nodes.rows}
        if self._here.node_id not in states or raft.configuration_index > raft.commit:
            return
        caught_up = {node for node, progress in raft.progress.items() if progress.match >= raft.commit}
        # Whoever comes first after a standstill notes it.
        self._note_time()
        self._silence = self._silence or Silence(self._here.node_id, self._replace_after_s)
        views = {**self.views, self._here.node_id: self._here.live}
        zones = {number: row.zone for number, row in nodes.rows}
        for name, node in self._silence.look(time.monotonic(), states, zones, raft.configuration.voters, views):
            await self._doors.calls.change("nodes", name, {"node": node})
        await self._reconcile(catalog)
        changes = next_step(raft.configuration, states, self._here.live, caught_up)
        if changes:
            log.info("the catalogue's members change: %s", changes)
            await self._doors.change(RESERVED, changes)

    async def plan(self) -> Plan | None:
        """Return what the reconciler would do, by what this node knows; others have their turn meanwhile."""
        catalog = self.catalog
        if catalog is None:
            return None
        avoid: Mapping[int, Collection[int]] = {} if self._reconciler is None else self._reconciler.avoided
        planner = planner_of(await self._seen_in(catalog), avoid)
        await in_turns(planner.steps())
        return planner.found()

    async def _seen_in(self, catalog: Catalog) -> Seen:
        moves = dict(await in_turns(listed(plan_of(catalog).rows)))
        logs, nodes = logs_of(catalog), dict(nodes_of(catalog).rows)
        ended = plan_of(catalog).ended
        return Seen(nodes, logs, logs.of_uid, len(logs.rows), logs.revision, self.leaders, moves, ended)

    async def _reconcile(self, catalog: Catalog) -> None:
        """Have moves begun, as far as there is room for them, and those given up that are in vain."""
        change = self._doors.calls.change
        if plan_of(catalog).paused:
            return
        self._reconciler = self._reconciler or Reconciler(PLAN_LOOKS * self._look_s)
        todo = await in_turns(self._reconciler.look(time.monotonic(), await self._seen_in(catalog)))
        for number in todo.undo:
            if number in plan_of(catalog).rows:
                await change("plan", "step", {"number": number, "step": UNDO})
        if todo.end:
            await change("plan", "finish", {"moves": [(number, "its log is gone") for number in todo.end]})
        if todo.propose:
            await change("plan", "propose", {"moves": todo.propose})

    async def _move(self, catalog: Catalog) -> None:
        """Take the next step of moves of groups led here."""
        rows = plan_of(catalog)
        if len(rows.rows) and self._may_move(catalog):
            for number, uid in enumerate(rows.of.keys() - self._here.members.keys(), 1):
                self._doors.sleepers.rouse(uid)
                if number % WOKEN_AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
            self._doors.mover.look(dict(await in_turns(listed(rows.rows))))

    def _may_move(self, catalog: Catalog) -> bool:
        # Asked for each step of each move: the nodes are counted when something of them has changed.
        rows = nodes_of(catalog).rows
        if self._counted[:2] != (rows, rows.changes):
            nodes = dict(rows)
            states = {number: row.state for number, row in nodes.items()}
            zones = {number: row.zone for number, row in nodes.items()}
            self._counted = rows, rows.changes, bool(too_many(states, zones))
        return not plan_of(catalog).paused and not self._counted[2]

    def move(self, number: int) -> Move | None:
        """Return a move that is under way; None for one that is over, or stands still with all others."""
        catalog = self.catalog
        return None if catalog is None or not self._may_move(catalog) else plan_of(catalog).rows.get(number)


def _removed(node: int) -> str:
    return f"node {node} was removed from this cluster: ask another one, and stop it; an empty directory may join"


def _founding(member: Member | None) -> int:
    """Return what tells one founding from another; 0 for none. Two may be of the same millisecond."""
    if member is None:
        return 0
    spec = member.spec
    return int.from_bytes(hashlib.blake2b(f"{spec.created} {spec.voters}".encode(), digest_size=8).digest(), "little")


def _imported(spec: Spec, index: int, voters: Sequence[int], learners: Sequence[int]) -> dict[str, Any]:
    return {
        "name": spec.name, "uid": spec.uid, "machine": spec.machine, "arguments": spec.arguments,
        "members": spec.voters, "created": spec.created, "index": index, "voters": voters, "learners": learners,
    }  # fmt: skip

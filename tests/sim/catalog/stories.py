"""What changes a cluster, each as a story that is told with one fault at any of its steps.

A story prepares a cluster without faults, acts, and says what must be so in the end; `told` runs one. Whoever acts
either asks until it is answered, or asks once and never comes back: both are tried. Used by `enumerate` and the tests.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from logyard.client._async.topics import upgraded
from logyard.machines.catalog.logs import CONFLICTING, LIVE, Log
from logyard.machines.catalog.nodes import ACTIVE, DEAD, REMOVED, RETURNED
from logyard.machines.log.command import APPEND
from logyard.protocol.frame import encode_frame
from logyard.protocol.groups import PartitionShape, Shape, join_command
from logyard.protocol.kv import Put
from logyard.protocol.kv import encode as encode_kv
from logyard.protocol.topics import TOPICS_LOG
from logyard.service.node import Node

from ..loop import Stop
from ..offline import complaints
from ..patches import installed
from .judge import founders, lost, rows, unsettled
from .topics import Client, SimYard, grown, records_of, sends
from .yard import STOP_S, Asked, Fault, Yard

PREPARE_S = 60.0
SETTLE_S = 180.0
QUIET_S = 3.0
"""So long it must stay as it is."""


class Told(NamedTuple):
    """What came of a story: complaints; the steps that each node took (0: frames on the network); whether the fault
    came; what it took."""

    wrong: list[str]
    counts: Mapping[int, int]
    hit: bool
    simulated_s: float
    cpu_s: float


class Story:
    """One story. `name`: as it is asked for; `count`: nodes; `voters`: of the catalogue in the end."""

    name: ClassVar[str]
    count: ClassVar[int] = 3
    faults: ClassVar[bool] = True
    """Whether it is told with faults at all of its steps: a long one is with some."""
    lasts_s: ClassVar[float] = 180.0
    """Creations that nobody finishes are finished after 30 s, and plans are made every 10 s."""

    def __init__(self, yard: Yard, again: bool) -> None:
        self.yard = yard
        self.again = again
        self.ended: set[str] = set()
        self.states: dict[int, str] = dict.fromkeys(yard.hosts, ACTIVE)

    def prepare(self) -> None:
        """Bring about what is there before."""
        self.begin()

    def act(self) -> None:
        """Begin what the story is about."""
        raise NotImplementedError

    def going_on(self) -> str:
        """Return why it is not over yet, or nothing."""
        return ""

    def judged(self) -> Iterator[str]:
        """Yield what is wrong in the end, besides what always is."""
        yield from ()

    # What stories are made of.

    def begin(self, *numbers: int) -> None:
        """Start nodes (all), and wait for their catalogue."""
        for number in numbers or self.yard.hosts:
            self.yard.start(number)
        self.must(self.unsettled, "a catalogue")

    def unsettled(self) -> str:
        """Return what is not as it must be, or nothing."""
        return next(unsettled(self.yard, self.states), "")

    def must(self, reason: Callable[[], str], what: str) -> None:
        """Wait, before the story begins."""
        why = self.yard.until(reason, PREPARE_S)
        assert not why, f"{what}: {why}"

    def ask(self, make: Callable[[Node], Any], *nodes: int) -> Asked:
        """Ask until it is answered, before the story begins."""
        asked = Asked(self.yard, make, nodes or tuple(self.yard.hosts))
        self.must(asked.reason, "a call")
        assert asked.done, asked.refused
        return asked

    def create(self, name: str, *members: int, via: int = 1) -> None:
        """Make a log with a record in it, which every node of the catalogue knows."""
        self.ask(creating(name, *members), via)
        self.append(name)
        self.must(self.unsettled, f"{name} is known")

    def append(self, name: str) -> None:
        """Append one record."""
        self.ask(lambda node: appended(node, name))

    def log(self, name: str) -> Log | None:
        """Return a log as the catalogue's newest copy has it."""
        catalog = self.yard.newest()
        found = [] if catalog is None else [row for row in rows(catalog) if row.name == name]
        return next((row for row in found if row.state != CONFLICTING), None)

    def ends(self, name: str, records: int) -> Iterator[str]:
        """Yield a complaint unless a log has so many records, on every one of its nodes."""
        row = self.log(name)
        if row is None:
            yield f"{name!r} is not there"
            return
        for number in sorted(row.nodes() & set(self.yard.up)):
            member = self.yard.member(number, name)
            machine: Any = None if member is None else member.machine
            if machine is None or machine.end != records:
                yield f"{name!r} has {getattr(machine, 'end', None)} records on node {number}, not {records}"

    def cut(self, *numbers: int) -> None:
        """Cut nodes off from the others."""
        others = [number for number in self.yard.hosts if number not in numbers]
        pairs = [(a, b) for a in numbers for b in others]
        self.yard.network.cut("away", [*pairs, *((b, a) for a, b in pairs)])

    def change(self, section: str, command: str, *nodes: int, **values: Any) -> Asked:
        """Ask for what operators may change, until it is answered."""
        return Asked(self.yard, lambda node: node.catalog_change(section, command, values), nodes or (1, 2, 3))


def creating(name: str, *members: int) -> Callable[[Node], Any]:
    """Return a call that creates a log."""
    spec = {"name": name, "members": list(members), "machine": "log", "arguments": {}}
    return lambda node: node.create_groups([spec])


async def appended(node: Node, name: str) -> bytes:
    """Append one record here. Raises `NotLeader`."""
    member = node.system.member(name)
    return await node.commit(member, encode_frame([(b"", None)], command=APPEND))


async def commanded(node: Node, name: str, command: bytes) -> bytes:
    """Have a command applied here. Raises `NotLeader`."""
    return await node.command(node.system.member(name), command)


class Creation(Story):
    """A log is created by way of a node that does not lead the catalogue."""

    name = "create"
    count = 4

    def prepare(self) -> None:
        """Found."""
        self.begin()

    def act(self) -> None:
        """Create."""
        self.asked = Asked(self.yard, creating("a", 2, 3, 4), (2, 3, 1, 4), self.again)

    def going_on(self) -> str:
        """Wait for the answer."""
        return self.asked.reason()

    def judged(self) -> Iterator[str]:
        """What was answered holds; else it is there or not."""
        row = self.log("a")
        if self.asked.done and (row is None or row.state != LIVE):
            yield f"it was said to be made: {row}"
        if self.asked.refused is not None:
            yield f"it was refused: {self.asked.refused}"
        if row is None:
            # Its name is nobody's.
            self.ask(creating("a", 1, 2, 3))


class Undoing(Story):
    """A log can't be made, as most of its members' nodes are away; they come back at a time that is drawn."""

    name = "undo"
    count = 5

    def act(self) -> None:
        """Create on three nodes, two of which are away."""
        self.cut(4, 5)
        self.yard.loop.at(self.yard.loop.now + self.yard.random.uniform(4.0, 20.0), None, self.yard.network.heal)
        self.asked = Asked(self.yard, creating("a", 3, 4, 5), (3,), again=False)
        self.yard.loop.at(self.yard.loop.now + 22.0, None, self._after)
        self.other: Asked | None = None

    def _after(self) -> None:
        """Somebody takes the name, if it is free by then."""
        self.other = Asked(self.yard, creating("a", 1, 2, 3), (1, 2), self.again)

    def going_on(self) -> str:
        """Wait for both."""
        return "another one comes" if self.other is None else self.other.reason()

    def judged(self) -> Iterator[str]:
        """One of the two is there, or none."""
        row = self.log("a")
        assert self.other is not None
        if (self.asked.done or self.other.done) and row is None:
            yield "it was said to be made, and is not there"
        if self.asked.done and row is not None and set(row.members) != {3, 4, 5}:
            yield f"it was said to be made, and is {row}"
        if self.other.done and row is not None and set(row.members) != {1, 2, 3}:
            yield f"it was said to be made, and is {row}"


class Deletion(Story):
    """A log is deleted while one of its nodes is away, and made anew."""

    name = "delete"
    count = 4

    def prepare(self) -> None:
        """Make a log."""
        self.begin()
        self.create("a", 2, 3, 4)

    def act(self) -> None:
        """Delete it."""
        self.cut(4)
        self.yard.loop.at(self.yard.loop.now + self.yard.random.uniform(5.0, 20.0), None, self.yard.network.heal)
        self.ended.add("a")
        row = self.log("a")
        assert row is not None
        self.uid = row.uid
        self.yard.until(lambda: "" if self.yard.leader("a") in (2, 3) else "led elsewhere", 20.0)
        leader = self.yard.leader("a") or 2
        self.asked = Asked(self.yard, deleting("a", self.uid), (leader, 5 - leader), self.again)
        self.anew: Asked | None = None

    def going_on(self) -> str:
        """Wait for the answer; then make it anew, on the same nodes, as soon as all have let it go."""
        row = self.log("a")
        if self.anew is None:
            if not self.asked.over and row is not None and row.state == LIVE:
                return "it is not deleted yet"
            if row is not None and row.state == LIVE and not self.asked.done:
                return ""
        if self.anew is None or self.anew.refused is not None:
            self.anew = Asked(self.yard, creating("a", 2, 3, 4), (1, 2, 3))
        return "" if self.anew.done else f"it is not made anew: {self.anew.refused}"

    def judged(self) -> Iterator[str]:
        """It is there or not, as was said; made anew, it has nothing of what was deleted."""
        if self.anew is not None:
            yield from self.ends("a", 0)
        elif self.log("a") is None or self.again or self.asked.done:
            yield f"it was said to be deleted, and is there: {self.log('a')}"
        else:
            yield from self.ends("a", 1)


def deleting(name: str, uid: int) -> Callable[[Node], Any]:
    """Return a call that deletes that very log; one that is gone is deleted."""

    async def call(node: Node) -> None:
        if node.system.names.get(name) == uid:
            await node.delete_group(name)

    return call


class Dead(Story):
    """A node dies for good: its members are replaced."""

    name = "dead"
    count = 4

    def prepare(self) -> None:
        """Make two logs."""
        self.begin()
        for name in ("a", "b"):
            self.create(name, 1, 2, 3)

    def act(self) -> None:
        """It dies, and somebody says so."""
        self.yard.away.add(3)
        self.yard.crash(3)
        self.states[3] = DEAD
        self.asked = self.change("nodes", "declare_dead", 1, 2, node=3, force=True)

    def going_on(self) -> str:
        """Wait until they are elsewhere."""
        if reason := self.asked.reason():
            return reason
        return next((f"{name} has another member" for name in ("a", "b") if self.members(name) != {1, 2, 4}), "")

    def members(self, name: str) -> set[int]:
        """Return where a log is."""
        row = self.log(name)
        return set(row.voters) if row is not None else set()

    def judged(self) -> Iterator[str]:
        """All there is, is there."""
        for name in ("a", "b"):
            yield from self.ends(name, 1)


class Returned(Dead):
    """It comes back with its directory while that goes on, and is admitted."""

    name = "returned"

    def act(self) -> None:
        """It dies, and is back after a time that is drawn."""
        super().act()
        self.admitted: Asked | None = None
        self.yard.loop.at(self.yard.loop.now + self.yard.random.uniform(0.5, 25.0), None, self._return)

    def _return(self) -> None:
        if not self.asked.over:
            # Who says once more that it is dead would say so of one that is back.
            self.yard.loop.at(self.yard.loop.now + 1.0, None, self._return)
            return
        self.yard.away.discard(3)
        self.yard.revive(3)

    def going_on(self) -> str:
        """Wait until it is admitted, and everything is on three nodes."""
        catalog = self.yard.newest()
        found = {} if catalog is None else {row["node"]: row["state"] for row in _nodes(catalog)}
        if self.admitted is None and found.get(3) == RETURNED:
            self.admitted = self.change("nodes", "admit", 1, 2, node=3)
            self.states[3] = ACTIVE
        if self.admitted is None:
            return f"it is {found.get(3)}"
        return self.admitted.reason() or next(
            (f"{name} is on {self.members(name)}" for name in ("a", "b") if len(self.members(name)) != 3), ""
        )


def _nodes(catalog: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = catalog.sections["nodes"].ask("list", {"removed": True})
    return found


class Drained(Dead):
    """A node is emptied, and removed."""

    name = "drain"

    def act(self) -> None:
        """Drain it."""
        self.asked = self.change("nodes", "drain", 1, 2, node=3)
        self.removed: Asked | None = None

    def going_on(self) -> str:
        """Wait until it is removed."""
        waits = super().going_on()
        if not waits and self.removed is None:
            self.removed = self.change("nodes", "remove", 1, 2, node=3)
            self.states[3] = REMOVED
        if self.removed is None:
            return waits
        if self.removed.refused is not None:
            # A copy that is behind counts a member still.
            self.removed = self.change("nodes", "remove", 1, 2, node=3)
        if self.removed.done and 3 not in self.yard.away:
            self.yard.away.add(3)
            self.yard.crash(3)
        return self.removed.reason()


class Import(Story):
    """Nodes that have logs take part in a catalogue from a restart on; two of the logs have one name."""

    name = "import"
    count = 4

    def prepare(self) -> None:
        """Make logs without a catalogue."""
        self.yard.keeps.clear()
        for number in self.yard.hosts:
            self.yard.start(number)
        self.must(lambda: "" if len(self.yard.up) == self.count else "not up", "all are up")
        self.yard.pass_time(3.0)
        for name, members in (("a", (1, 2, 3)), ("b", (2, 3, 4)), ("x", (1,))):
            self.ask(creating(name, *members), members[0])
            self.append(name)
        self.ask(creating("x", 4), 4)

    def act(self) -> None:
        """Restart them."""
        self.yard.keeps.update(self.yard.hosts)
        for number in list(self.yard.up):
            self.yard.crash(number)
            self.yard.start(number)

    def judged(self) -> Iterator[str]:
        """All four are there; the older one of a name has it."""
        catalog = self.yard.catalog(1)
        assert catalog is not None
        found = sorted((row.name, row.state, row.voters) for row in rows(catalog))
        wanted = [
            ("a", LIVE, (1, 2, 3)), ("b", LIVE, (2, 3, 4)), ("x", CONFLICTING, (4,)), ("x", LIVE, (1,)),
        ]  # fmt: skip
        if found != wanted:
            yield f"the catalogue has {found}"
        for name in "abx":
            yield from self.ends(name, 1)


class Founding(Story):
    """Nodes without anything found their catalogue."""

    name = "found"

    def prepare(self) -> None:
        """Have nothing."""

    def act(self) -> None:
        """Begin."""
        for number in self.yard.hosts:
            self.yard.start(number)

    def judged(self) -> Iterator[str]:
        """There is one, and it works."""
        if len(founders(self.yard)) != 1:
            yield f"founded by {founders(self.yard)}"
        self.ask(creating("a", 1, 2, 3))


class Founders(Story):
    """Five nodes, of which two know {1, 2, 3} and three {3, 4, 5}: both have a majority, and a number of their own that
    is the lowest."""

    name = "founders"
    count = 5

    def prepare(self) -> None:
        """Have one log, without a catalogue."""
        self.yard.configured = {1: (1, 2, 3), 2: (1, 2, 3), 3: (3, 4, 5), 4: (3, 4, 5), 5: (3, 4, 5)}
        # Whatever it founds by, all have links with it.
        self.yard.knows[3] = (1, 2, 3, 4, 5)
        self.yard.keeps.clear()
        for number in self.yard.hosts:
            self.yard.start(number)
        self.must(lambda: "" if len(self.yard.up) == self.count else "not up", "all are up")
        self.yard.pass_time(3.0)
        self.ask(creating("a", 2, 3), 3)
        self.append("a")

    def act(self) -> None:
        """Restart them with a catalogue; which configuration the one between has is drawn, and when each begins."""
        # Whose leader is in neither of two catalogues is reported to none.
        self.ended.add("a")
        self.yard.configured[3] = self.yard.random.choice([(1, 2, 3), (3, 4, 5)])
        self.yard.keeps.update(self.yard.hosts)
        for number in list(self.yard.up):
            self.yard.crash(number)
            self.yard.loop.at(self.yard.loop.now + self.yard.random.uniform(0.0, 2.0), None, self.yard.revive, number)

    def unsettled(self) -> str:
        """Return what is not as it must be: everybody takes part in one, or says that there are two."""
        yard = self.yard
        if len(yard.up) < self.count:
            return "not all are up"
        found = founders(yard)
        without = [number for number in yard.up if yard.catalog(number) is None]
        said = " ".join(node.keeper.trouble for node in yard.nodes.values() if node.keeper is not None)
        if not found:
            return "nobody founded one"
        if len(found) > 2:
            return f"founded by {found}"
        if len(found) == 2 and "founded by another" not in said:
            return f"founded by {found}, and nobody says so"
        if len(found) == 1 and without and not said:
            return f"nodes {without} have none, and nobody says why"
        return "" if yard.leader("a") else "a has no leader"

    def judged(self) -> Iterator[str]:
        """Data is not concerned."""
        yard = self.yard
        before = {number: yard.system(number).names.get("_catalog") for number in yard.up}  # type: ignore[union-attr]
        members = {
            number: keeper.member().spec  # type: ignore[union-attr]
            for number, node in yard.nodes.items()
            if (keeper := node.keeper) is not None and keeper.member() is not None
        }
        self.append("a")
        yard.pass_time(10.0)
        for number, spec in members.items():
            keeper = yard.nodes[number].keeper
            member = keeper.member() if keeper is not None else None
            if member is not None and member.spec != spec:
                yield f"node {number} went over from {spec} to {member.spec}"
        if len(set(before.values()) - {None}) > 1:
            yield f"the catalogue has more numbers than one: {before}"


class Joining(Story):
    """A node joins by an invitation."""

    name = "join"
    count = 4

    def prepare(self) -> None:
        """Be three."""
        yard = self.yard
        yard.configured = {number: (1, 2, 3) for number in (1, 2, 3)} | {4: (4, 1, 2, 3)}
        yard.away.add(4)
        del self.states[4]
        self.begin(1, 2, 3)
        self.create("a", 1, 2, 3)
        self.token = hashlib.sha256(b"a token").digest()
        self.directory = 4242

    def act(self) -> None:
        """Invite, join, begin."""
        values = {"hash": hashlib.sha256(self.token).digest(), "until": 1 << 62, "replaces": 0}
        self.invited = Asked(self.yard, lambda node: node.catalog_change("nodes", "invite", values), (2, 1, 3))
        self.joined: Asked | None = None
        self.states[4] = ACTIVE

    def going_on(self) -> str:
        """Take one step after the other."""
        if reason := self.invited.reason():
            return reason
        if self.joined is None:
            self.joined = Asked(
                self.yard, lambda node: node.join(self.token, self.directory, "peer:4", "client:4", "", 0), (3, 2, 1)
            )
        if not self.joined.done:
            return f"it has not joined: {self.joined.refused}"
        if 4 in self.yard.away:
            self.yard.away.discard(4)
            self.yard.said[4] = {"directory": self.directory}
            self.yard.start(4)
        return ""

    def judged(self) -> Iterator[str]:
        """It is node 4, and there is no other; another directory does not come in by that token."""
        assert self.joined is not None
        if self.joined.result["node"] != 4:
            yield f"it is {self.joined.result}"
        again = Asked(
            self.yard, lambda node: node.join(self.token, self.directory + 1, "peer:5", "client:5", "", 0), (1, 2, 3)
        )
        self.yard.until(again.reason, 30.0)
        if again.refused is None:
            yield f"another directory used its token: {again.result}"
        self.ask(creating("b", 2, 3, 4))


class Silent(Dead):
    """One node of five is not heard for longer than ten minutes."""

    name = "silent"
    count = 5
    faults = False
    lasts_s = 900.0
    away_s = 640.0

    def act(self) -> None:
        """Cut it off."""
        self.cut(3)
        self.yard.loop.at(self.yard.loop.now + self.away_s, None, self.yard.network.heal)
        self.until = self.yard.loop.now + self.away_s
        self.states[3] = RETURNED

    def going_on(self) -> str:
        """Wait until it is heard again."""
        return "" if self.yard.loop.now >= self.until else "it is away"

    def judged(self) -> Iterator[str]:
        """Its members were replaced, and it has none."""
        for name in ("a", "b"):
            if 3 in self.members(name) or len(self.members(name)) != 3:
                yield f"{name!r} is on {self.members(name)}"
        yield from super().judged()


class Third(Silent):
    """Two nodes of five are not heard for that long: the fault is rather in between, so nobody is declared dead, and
    nothing moves."""

    name = "third"

    def act(self) -> None:
        """Cut them off."""
        super().act()
        self.cut(3, 4)
        self.states[3] = ACTIVE

    def judged(self) -> Iterator[str]:
        """Everything is where it was."""
        for name in ("a", "b"):
            if self.members(name) != {1, 2, 3}:
                yield f"{name!r} is on {self.members(name)}"
            yield from self.ends(name, 1)


class Without(Story):
    """The catalogue has no majority for ten minutes under load, with a restart of a node that has logs in between."""

    name = "without"
    count = 6
    faults = False
    lasts_s = 900.0
    seconds = 600.0

    @property
    def patience_s(self) -> float:
        """How long a call may take: an election of the simulated nodes takes up to three seconds, and who has asked a
        node that is stopped then hears of it when that goes on."""
        fault = self.yard.steps.fault
        return 6.0 + (STOP_S if fault is not None and fault.kind == "stop" else 0.0)

    def prepare(self) -> None:
        """Make a log, a KV group and a coordinator of consumer groups, none of which needs nodes 1 and 2."""
        self.begin()
        self.create("a", 3, 4, 5)
        for name, machine in (("k", "kv"), ("_groups-0", "groups")):
            spec = {"name": name, "members": [4, 5, 6], "machine": machine, "arguments": {}}
            self.ask(lambda node, spec=spec: node.create_groups([spec]), 3)  # type: ignore[misc]
        self.must(self.unsettled, "all are known")
        self.records = 1
        self.calls = 0

    def act(self) -> None:
        """Take the majority away, and go on working."""
        for number in (1, 2):
            self.yard.away.add(number)
            self.yard.crash(number)
        self.until = self.yard.loop.now + self.seconds
        self.yard.loop.at(self.yard.loop.now + self.seconds / 2, None, self._restart)
        self._next()

    def _restart(self) -> None:
        self.yard.crash(4)
        self.yard.start(4)

    def _next(self) -> None:
        """Make one call of each kind, and judge how long they take."""
        if self.yard.loop.now >= self.until:
            return
        self.calls += 1
        shapes = [Shape(1, "t", 1, (PartitionShape(0), PartitionShape(1)))]
        join = join_command("g", "m", self.calls, 60_000, "", shapes)
        calls = (
            (lambda node: appended(node, "a"), (3, 4, 5)),
            (lambda node: node.bounds("a", "linearizable"), (3, 4, 5)),
            (lambda node: commanded(node, "k", encode_kv(Put(b"key", b"%d" % self.calls))[0]), (4, 5, 6)),
            (lambda node: commanded(node, "_groups-0", join), (4, 5, 6)),
            (lambda node: node.open_session("a", 1000 + self.calls, 1, 2000), (3, 4, 5)),
        )  # fmt: skip
        for make, nodes in calls:
            asked = Asked(self.yard, make, nodes)
            self.yard.loop.at(self.yard.loop.now + self.patience_s, None, self._answered, asked)
        self.records += 1
        self.yard.loop.at(self.yard.loop.now + 1.0, None, self._next)

    def _answered(self, asked: Asked) -> None:
        if not asked.done:
            self.yard.wrong.append(f"t={self.yard.loop.now:.1f}: a call failed: {asked.refused}, after {asked.tries}")

    def going_on(self) -> str:
        """Wait until the majority is back."""
        if self.yard.loop.now < self.until + self.patience_s:
            return "ten minutes are not over"
        for number in (1, 2):
            self.yard.away.discard(number)
            self.yard.revive(number)
        return ""

    def judged(self) -> Iterator[str]:
        """Every record is there, on every node."""
        yield from self.ends("a", self.records)


class Shrinking(Story):
    """Partitions of a topic are taken away while a producer that knows nothing of it sends; the ones that ended are
    let go, and their numbers used again."""

    name = "shrink"
    lasts_s = 400.0
    keys = tuple(b"key-%d" % number for number in range(6))
    rounds = 6

    def prepare(self) -> None:
        """Make a topic of three partitions with a record of each key."""
        self.begin()
        self.client = SimYard(self.yard)
        self.sent: dict[tuple[bytes, int], Any] = {}
        self._finished(self.client.topic("t").create(3))
        self._finished(sends(self.client.topic("t"), self.keys, 1, self.sent))
        # The topics' group comes to its version.
        self._finished(upgraded(self.client, TOPICS_LOG, 30.0))  # type: ignore[arg-type]
        self.must(self.unsettled, "all are known")

    def _finished(self, work: Any) -> Any:
        client = Client(self.yard, work)
        self.must(lambda: "" if client.over else "it is under way", "a client")
        assert client.done, client.refused
        return client.result

    def act(self) -> None:
        """Take two of them away."""
        self.producer = Client(self.yard, sends(self.client.topic("t"), self.keys, self.rounds, self.sent))
        self.asked = Client(self.yard, self.client.topic("t").shrink(1))
        if not self.again:
            at = self.yard.loop.now + self.yard.random.uniform(0.0, 6.0)
            self.yard.loop.at(at, None, self.asked.die)
        self.then: list[Client] = []

    def going_on(self) -> str:
        """Wait for both; then read all of it, let it go, and add partitions again."""
        if not (self.asked.over and self.producer.over):
            return f"the shrinking: {self.asked.over}, the producer: {self.producer.over}"
        topic = self.client.topic("t")
        steps = (lambda: topic.shrink(1), lambda: records_of(self.client, "t"), lambda: topic.shrink(1, force=True),
                 lambda: grown(topic, 2), lambda: topic.finish())  # fmt: skip
        if len(self.then) < len(steps) and (not self.then or self.then[-1].over):
            self.then.append(Client(self.yard, steps[len(self.then)]()))
        return "" if len(self.then) == len(steps) and self.then[-1].over else f"step {len(self.then)} is under way"

    def judged(self) -> Iterator[str]:
        """Each record lies there once, those of a key in their order; what ended is gone, and its number used again."""
        clients = [self.producer, *([self.asked] if self.again else []), *self.then]
        yield from (f"a client failed: {one.refused!r}" for one in clients if one.refused is not None)
        if any(one.refused is not None for one in clients):
            return
        found: dict[int, list[tuple[int, bytes, int]]] = self.then[1].result
        row = self.then[0].result
        yield from out_of_order(row, found)
        all_of = sorted((key, number) for records in found.values() for _, key, number in records)
        if all_of != sorted((key, number) for key in self.keys for number in range(1, self.rounds + 1)):
            yield f"records are lost or doubled: {all_of}"
        last = self.then[-1].result
        if [(one.number, one.born) for one in last.partitions] != [(0, 0), (1, 3)] or last.state != "live":
            yield f"in the end the topic is {last}"
        names = {name for number in self.yard.up for name in self.yard.system(number).names}  # type: ignore[union-attr]
        if names & {"t.2"}:
            yield "the log of a partition that went is still there"

    def unsettled(self) -> str:
        """Return what is not as it must be, or nothing; logs that were taken away had leaders, and are gone."""
        self.ended |= {"t.1", "t.2"}
        return super().unsettled()


def out_of_order(row: Any, found: Mapping[int, Sequence[tuple[int, bytes, int]]]) -> Iterator[str]:
    """Yield each key whose records are out of order, read as a consumer group reads: what ended first, then what lies
    behind the fences of those that got its slots."""
    ended = {one.number for one in row.partitions if one.end is not None}
    newest: dict[bytes, int] = {}
    for one in sorted(row.partitions, key=lambda one: one.number not in ended):
        fence = max((join.offset for join in one.joins), default=0)
        for offset, key, number in found[one.number]:
            if key in newest and one.number not in ended and offset < fence and newest[key] > number:
                # It is read before the fence, so before what ended: its key was never there.
                yield f"{key!r} lies in {one.log} before its fence, and in one that ended"
            if number <= newest.get(key, 0):
                yield f"out of order: {key!r}, {number} at {offset} of {one.log}, after {newest[key]}"
            newest[key] = max(number, newest.get(key, 0))


STORIES: Mapping[str, type[Story]] = {
    story.name: story
    for story in (
        Creation, Undoing, Deletion, Dead, Returned, Drained, Import, Founding, Founders, Joining, Shrinking, Silent,
        Third, Without,
    )
}  # fmt: skip


def told(name: str, seed: int, fault: Fault | None = None, again: bool = True, check: bool = False) -> Told:
    """Tell a story, with a fault or without; `check`: look at the directories with `logyard check` in the end."""
    began = time.process_time()
    kind = STORIES[name]
    sleep = random.Random(seed).choice((0, 1500))
    yard = Yard(seed, kind.count, {"hibernate_after_ms": sleep})
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with installed(yard.loop, random.Random(seed), True):
            try:
                _tell(kind(yard, again), yard, fault)
            except Stop:
                pass
            finally:
                yard.loop.on_event = lambda life: None
                yard.stop_all()
    finally:
        logging.disable(before)
        if collecting:
            gc.enable()
    if check and not yard.wrong:
        yard.wrong += complaints(yard, (), ())
    return Told(
        yard.wrong, dict(yard.steps.counts), yard.steps.hit, yard.loop.now, time.process_time() - began
    )  # fmt: skip


def _tell(story: Story, yard: Yard, fault: Fault | None) -> None:
    story.prepare()
    yard.steps.begin(fault)
    story.act()
    if why := yard.until(story.going_on, story.lasts_s):
        yard.wrong.append(f"it does not come to its end: {why}")
        return
    # A fault may come after the answer as well.
    yard.pass_time(QUIET_S)
    yard.steps.end()
    yard.pass_time(yard.steps.fault.after_s if yard.steps.fault is not None else 0.0)
    yard.network.heal()
    if why := yard.until(story.unsettled, SETTLE_S):
        yard.wrong.append(f"it does not settle: {why}")
        return
    yard.pass_time(QUIET_S)
    if why := yard.until(story.unsettled, SETTLE_S):
        yard.wrong.append(f"it does not stay so: {why}")
        return
    yard.wrong += lost(yard, story.ended)
    yard.wrong += story.judged()


__all__ = ["STORIES", "Story", "Told", "told"]

"""Simulated nodes that take part in a catalogue, each with its real keeper, and a count of every step that they take.

A step of a node is one of its disk, a frame that it sends or one that it is about to receive. From `Steps.begin` on all
are counted, and one fault may come with one of them: the process is killed, killed together with the power, or stands
still for a while; or a frame between two nodes is lost. Used by `stories` and `judge`.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from logyard.engine.raft.state import LEADER
from logyard.engine.replica.member import Member
from logyard.engine.transport.frame import LIVENESS
from logyard.engine.transport.memory import Lane
from logyard.machines.catalog import Catalog
from logyard.machines.catalog.logs import MAKING
from logyard.protocol.errors import LogyardError
from logyard.service.catalog.keeper import catalog_of, logs_of
from logyard.service.node import Node

from ..cluster import Cluster, Host, HostDisk
from ..loop import Crashed, Life, Loop, Stop
from ..machine import machines
from ..network import KIND_AT, SimNetwork

T = TypeVar("T")

LOOK_S = 0.25
AGAIN_S = 1.0
SILENT_S = 25.0
"""After so long nobody answers any more: the call is made again, elsewhere."""
STOP_S = 12.0
POWER = (0.5, 0.5, False)
"""What a power cut leaves of what was not synced: half of the sectors, half of the names."""


class Fault(NamedTuple):
    """`kind`: ``kill``, ``power`` (a kill with a power cut), ``stop`` of `node` at its step; or ``lose``, the frame of
    that number among all that nodes send one another (`node` 0). `after_s`: until a dead process begins again."""

    kind: str
    node: int
    step: int
    after_s: float = 2.0


class Steps:
    """Steps by node since `begin`, those of the network as node 0. `fault` is told to `bring` when its step has come:
    then the process that takes it does not get past it."""

    def __init__(self, bring: Callable[[Fault], None]) -> None:
        self.counts: Counter[int] = Counter()
        self.fault: Fault | None = None
        self.hit = False
        self._bring = bring
        self._begun = False

    def begin(self, fault: Fault | None) -> None:
        """Count from here on."""
        self.fault, self._begun = fault, True

    def end(self) -> None:
        """Count no more."""
        self._begun = False

    def take(self, node: int) -> str:
        """Count a step; return the kind of fault that comes with it, or nothing."""
        if not self._begun:
            return ""
        self.counts[node] += 1
        fault = self.fault
        if fault is None or self.hit or fault.node != node or fault.step != self.counts[node]:
            return ""
        self.hit = True
        self._bring(fault)
        return fault.kind


class StepDisk(HostDisk):
    """Counts its steps."""

    __slots__ = ("plot",)

    plot: Steps

    def step(self, operation: str) -> None:
        """One step."""
        if self.life.alive and self.plot.take(self.life.node) in ("kill", "power"):
            raise Crashed
        super().step(operation)


class StepNetwork(SimNetwork):
    """Counts frames, but for signs of life."""

    plot: Steps

    def carry(self, lane: Lane, data: bytes) -> None:
        """Take one frame."""
        if data[KIND_AT] != LIVENESS:
            if self.plot.take(lane[0]) in ("kill", "power"):
                if self.loop.life is not None and self.loop.life.node == lane[0]:
                    raise Crashed
                return
            if self.plot.take(0):
                self._lose(lane[:2])
                return
        super().carry(lane, data)

    def _arrive(self, lane: Lane, data: bytes, link: int, damaged: bool = False) -> None:
        node: Any = self.nodes.get(lane[1])
        if node is not None and lane[0] in node.up and data[KIND_AT] != LIVENESS:
            self.plot.take(lane[1])
        # Whoever died by that is gone before it is looked for.
        super()._arrive(lane, data, link, damaged)


class Yard(Cluster):
    """Nodes 1..n. `configured`: the nodes of each one's configuration when it founds a catalogue; `knows`: those that
    it dials, where that is more; `keeps`: those that take part in a catalogue from their next start on; `said`: what a
    node says of itself besides."""

    disk_type = StepDisk
    network_type = StepNetwork
    network: StepNetwork

    def __init__(self, seed: int, count: int, limits: Mapping[str, Any]) -> None:
        draw = random.Random(seed)
        super().__init__(Loop(draw.getrandbits(64)), draw.getrandbits(64), count, limits, machines)
        self.random = random.Random(draw.getrandbits(64))
        self.steps = self.network.plot = Steps(self._bring)
        self.nodes: dict[int, Node] = {}
        self.configured: dict[int, Sequence[int]] = dict.fromkeys(self.hosts, tuple(self.hosts))
        self.knows: dict[int, Sequence[int]] = {}
        self.keeps = set(self.hosts)
        self.said: dict[int, dict[str, Any]] = {}
        # Nodes that do not begin again by themselves.
        self.away: set[int] = set()
        # Groups that somebody ever led, and their names.
        self.led: set[int] = set()
        self.led_as: dict[int, str] = {}
        self.wrong: list[str] = []
        # By copy of the catalogue and group: the newest configuration index that was seen.
        self.seen: dict[tuple[int, int], int] = {}
        self.on_ready, self.on_gone, self.on_bug = self._begun, self._ended_here, self.bug
        self.loop.on_defect, self.loop.on_event = self.bug, self._look

    # Processes

    def start(self, number: int, crash_in: int = -1) -> None:
        """Begin a process."""
        super().start(number, crash_in)
        life = self.hosts[number].life
        assert life is not None and isinstance(life.disk, StepDisk)
        life.disk.plot = self.steps

    def known_to(self, host: Host) -> list[int]:
        """Those of its configuration; it meets others by the catalogue, and is met by those that know it."""
        own = {*self.configured[host.number], *self.knows.get(host.number, ())}
        return sorted(own - {host.number})

    def _begun(self, host: Host) -> None:
        assert host.system is not None
        node = self.nodes[host.number] = Node(host.system)
        if host.number not in self.keeps:
            return
        said = {"peer": f"peer:{host.number}", "client": f"client:{host.number}", **self.said.get(host.number, {})}

        async def meet(number: int, peer: str, client: str) -> None:
            own = self.network.nodes.get(host.number)
            if own is not None and number not in own.known:
                own.add_peer(number)

        keeper = node.keep_catalogue(said, self.configured[host.number], meet, _nothing)
        self.spawn(host.number, keeper.run(), f"keeper of node {host.number}")

    def _ended_here(self, host: Host) -> None:
        self.nodes.pop(host.number, None)
        self.seen = {key: index for key, index in self.seen.items() if key[0] != host.number}

    def _bring(self, fault: Fault) -> None:
        host = self.hosts[fault.node] if fault.node else None
        if host is None or host.life is None:
            return
        if fault.kind == "stop":
            host.life.paused_until = self.loop.now + STOP_S
            return
        if fault.kind == "power":
            host.cut_next = POWER
        if self.loop.life is not host.life:
            # A frame that it would have received, or one that another one's event has it send.
            self.loop.soon(None, self._crashed, host.life)
        self.loop.at(self.loop.now + fault.after_s, None, self.revive, fault.node)

    def revive(self, number: int) -> None:
        """Begin a process that is down, unless it is to stay away."""
        if self.hosts[number].life is None and number not in self.away:
            self.start(number)

    def bug(self, what: str, error: BaseException) -> None:
        """Note that something raised what nothing should raise; the run is over."""
        where = "".join(traceback.format_exception(error)[-6:])
        self.wrong.append(f"{what}: {type(error).__name__}: {error}\n{where}")
        raise Stop(what)

    def _look(self, life: Life | None) -> None:
        """Note who leads, after each event."""
        host = self.hosts[life.node] if life is not None else None
        if host is not None and host.life is life and host.ready and host.system is not None:
            for member in host.system.members.values():
                if member.raft.role == LEADER and member.uid not in self.led:
                    self.led.add(member.uid)
                    self.led_as[member.uid] = member.spec.name

    # Time

    def pass_time(self, seconds: float) -> None:
        """Let everything happen for so long."""
        self.loop.run(self.loop.now + seconds)

    def until(self, reason: Callable[[], str], seconds: float) -> str:
        """Let everything happen until there is no reason left to wait; return the last one after so long."""
        deadline = self.loop.now + seconds
        while (why := reason()) and self.loop.now < deadline:
            self.pass_time(LOOK_S)
            self._look_at_copies()
        return why

    def _look_at_copies(self) -> None:
        """Look at what each copy of the catalogue says: what was seen of a group never falls back to something older,
        and no node is to have a log of a name that it has not let go."""
        for number in self.up:
            catalog = self.catalog(number)
            rows = [] if catalog is None else list(logs_of(catalog))
            kept = {(row.name, node) for row in rows for node in row.waiting}
            for row in rows:
                if row.seen < self.seen.get((number, row.uid), 0):
                    self.break_off(f"node {number} has {row.name!r} as it was, {row}")
                self.seen[number, row.uid] = row.seen
                if row.state == MAKING and any((row.name, node) in kept for node in row.members):
                    self.break_off(f"{row} is to be made where one of its name is not gone yet")

    def break_off(self, what: str) -> None:
        """Note what is wrong, and end the run."""
        self.wrong.append(what)
        raise Stop(what)

    # Looking

    def catalog(self, number: int) -> Catalog | None:
        """Return a node's copy of the catalogue."""
        node = self.nodes.get(number)
        return node.keeper.catalog if node is not None and node.keeper is not None else None

    def newest(self) -> Catalog | None:
        """Return the copy of the catalogue that has applied most: one that has just begun again has nothing."""
        members = [node.keeper.member() for node in self.nodes.values() if node.keeper is not None]
        newest = max((one for one in members if one is not None), key=lambda one: one.raft.applied, default=None)
        return catalog_of(newest)

    def leader(self, name: str) -> int:
        """Return a node that leads a log and knows what is committed, or 0; wakes it."""
        for number in self.up:
            self.member(number, name)
        return next((number for number in self.up if self.leads(number, name)), 0)

    def member(self, number: int, name: str) -> Member | None:
        """Return a node's member of a log, woken."""
        system = self.system(number)
        if system is None or name not in system.names:
            return None
        return self.as_node(number, lambda: system.find(system.names[name]))

    def as_node(self, number: int, call: Callable[[], T]) -> T:
        """Call something as that node's process: by its clock."""
        before, self.loop.life = self.loop.life, self.hosts[number].life
        try:
            return call()
        finally:
            self.loop.life = before


class Asked:
    """What a client asks of one node after the other until it is answered; with `again` False of one node, once, and
    it waits for so long. `done` or `refused` tells how it ended; neither: nobody knows."""

    def __init__(
        self, yard: Yard, make: Callable[[Node], Coroutine[Any, Any, Any]], nodes: Sequence[int], again: bool = True
    ) -> None:
        self.done = False
        self.refused: LogyardError | None = None
        self.result: Any = None
        self.tries = 0
        self.given_up = False
        self._yard = yard
        self._make = make
        self._nodes = list(nodes)
        self._again = again
        self._ask()

    @property
    def over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.done or self.refused is not None or self.given_up

    def reason(self) -> str:
        """Return why it is waited for, if it is."""
        return "" if self.over else "a call is not answered"

    def _ask(self) -> None:
        yard = self._yard
        number = self._nodes[self.tries % len(self._nodes)]
        if self.over:
            return
        node = yard.nodes.get(number)
        if node is None:
            self.tries += 1
            self.given_up = not self._again
            yard.loop.at(yard.loop.now + AGAIN_S, None, self._ask)
            return
        self.tries += 1
        attempt = self.tries
        call = yard.as_node(number, lambda: self._make(node))
        yard.spawn(number, call, "a call", self._answered)
        yard.loop.at(yard.loop.now + SILENT_S, None, self._unanswered, attempt)

    def _unanswered(self, attempt: int) -> None:
        self.given_up = not self._again
        if attempt == self.tries:
            self._ask()

    def _answered(self, result: Any, error: BaseException | None) -> None:
        if error is None:
            self.done, self.result = True, result
        elif not isinstance(error, LogyardError):
            self._yard.bug("a call", error)
        elif error.code in FINAL:
            self.refused = error
        else:
            self.given_up = not self._again
            self._yard.loop.at(self._yard.loop.now + AGAIN_S, None, self._ask)


FINAL = ("group_exists", "refused", "bad_request", "wrong_identity")
"""What asking again does not change."""


async def _nothing(*what: object) -> None:
    """Learn nothing."""

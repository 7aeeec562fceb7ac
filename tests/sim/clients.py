"""Groups, their clients with sessions, and what these were told: the model that everything is checked against.

A client keeps a few frames under way; what is not answered is sent again, to another node or twice, in any order. What
the frames of a kind of machine hold, and what must be true of it, is in `clients_log`, `clients_kv` and
`clients_queue`. Driven by `run`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from logyard.protocol.errors import LogyardError, decode_error

from .cluster import Cluster
from .loop import Timer

PATIENCE_S = 1.5
WINDOW = 32
"""Frames of one session under way; the engine remembers the replies of 64."""
TTL_MS = 60_000
SHORT_TTL_MS = (1500, 4000, TTL_MS)
NO_FEATURES: frozenset[str] = frozenset()
REFUSED = frozenset({"not_leader", "unknown", "busy", "group_stopped", "no_space", "unknown_group", "wal_failed"})


class Group:
    """A group as its clients know it. `machine`: the kind."""

    machine = "log"

    def __init__(self, work: Workload, name: str) -> None:
        self.work = work
        self.name = name
        self.uid = 0
        # A boom was sent and not skipped yet.
        self.poisoned = False
        self.created = False
        # It may have been deleted, and is to be made again.
        self.recreate = False
        # Until then its clients say nothing of their own accord, so that it may fall asleep.
        self.quiet_until = 0.0

    def reset(self) -> None:
        """It was made anew: nothing of what was there is there."""

    def read(self, number: int, consistency: str) -> None:
        """Ask a node, and check the answer."""

    def lacks(self, machine: Any) -> str:
        """What a leader's machine does not have of what was acknowledged, or nothing."""
        return ""

    def pending(self) -> list[str]:
        """What has to come before a round is over."""
        return []

    def judge(self) -> None:
        """At the end of a run: the whole history. Calls `work.fault`."""


class Frame:
    """One command under one sequence number: `data` as on the wire, `what` is its client's."""

    __slots__ = ("what", "data", "sequence", "session", "sends", "timer")

    def __init__(self, what: Any, data: memoryview, session: int, sequence: int) -> None:
        self.what = what
        self.data = data
        self.session = session
        self.sequence = sequence
        self.sends = 0
        self.timer: Timer | None = None


class Workload:
    """All clients and groups. `fault(text)` is called when a promise was broken."""

    def __init__(
        self,
        cluster: Cluster,
        draw: random.Random,
        kinds: Sequence[Callable[[Workload, str], Group]],
        rate: float,
        fault: Callable[[str], None],
        features: frozenset[str] = NO_FEATURES,
        more: random.Random | None = None,
    ) -> None:
        self.cluster = cluster
        self.loop = cluster.loop
        self.draw = draw
        self.fault = fault
        self.rate = rate
        # Who was the last to lead a group's newest term, by uid.
        self.newest_leader: Callable[[int], int] = lambda uid: 0
        self.features = features
        # What features draw from.
        self.more = more or random.Random(0)
        self.clients: list[Client] = []
        system = "_" if "rings" in features else ""
        self.groups = [kind(self, f"{system}g{number}") for number, kind in enumerate(kinds)]
        self.tags = 0
        self.sizes: dict[int, int] = {}
        self.sessions = 1000
        self.operations = 0
        self.acknowledged = 0
        self.hits: Counter[str] = Counter()
        # Reads that wait for a node to go on: its number, the group's name, until when.
        self.waiting: set[tuple[int, str, float]] = set()
        self.stopping = False
        self.begun = 0
        # Swarm: how many records go in a frame, how large they are, how likely a frame is sent twice or its reply lost.
        self.burst = draw.choice((16, 32, 32, 48))
        self.large = draw.choice((0.0, 0.01, 0.05))
        self.twice = draw.choice((0.0, 0.05, 0.2))
        self.deaf = draw.choice((0.0, 0.02, 0.1))

    def begin(self) -> None:
        """From now on they talk, until `stopping`."""
        self.stopping = False
        self.begun += 1
        for client in self.clients:
            self.loop.at(self.loop.now + self.draw.random(), None, client.talk, self.begun)

    def body(self, tag: int) -> bytes:
        """What a record holds; a function of its tag."""
        return (b"%d;" % tag) * self.sizes[tag]

    def invent(self, count: int) -> int:
        """New records; the first one's tag."""
        first = self.tags + 1
        for _ in range(count):
            self.tags += 1
            dice = self.draw.random()
            self.sizes[self.tags] = 1 if dice < 0.5 else 20 if dice < 1 - self.large else self.draw.choice((300, 3000))
        return first

    def leader_of(self, group: Group) -> int:
        """A node that seems to lead, or any that is up, or 0."""
        up = self.cluster.up
        led = [number for number in up if self.cluster.leads(number, group.name)]
        if led and self.draw.random() < 0.97:
            return self.draw.choice(led)
        return self.draw.choice(up) if up else 0

    @property
    def pending(self) -> list[Frame]:
        """What was sent and not answered."""
        return [frame for client in self.clients for frame in client.pending.values()]

    def join(self, client: Client) -> int:
        """A client takes part; its number."""
        self.clients.append(client)
        return len(self.clients)

    def ask_leaders(self, group: Group) -> None:
        """When more than one node believes that it leads: what was just acknowledged is read from all of them."""
        led = [number for number in self.cluster.up if self.cluster.leads(number, group.name)]
        if len(led) > 1:
            for number in led:
                self.read(group, number, "linearizable")

    def read(self, group: Group, number: int, consistency: str) -> None:
        """Ask a node of a group. One that stands still is asked in the moment in which it goes on."""
        host = self.cluster.hosts.get(number)
        if host is None or not host.ready or host.life is None:
            return
        until = host.life.paused_until
        if until <= self.loop.now:
            group.read(number, consistency)
        elif (number, group.name, until) not in self.waiting:
            self.waiting.add((number, group.name, until))
            self.loop.at(until, None, self.read, group, number, consistency)


class Client:
    """One session at a time on one group. `talks`: it says something of its own accord."""

    talks = True

    def __init__(self, workload: Workload, group: Group) -> None:
        self.work = workload
        self.group = group
        self.number = workload.join(self)
        self.session = 0
        self.sequence = 0
        # The session that is being opened, while an answer to that may come.
        self.opening = 0
        self.pending: dict[int, Frame] = {}
        self.ttl_ms = workload.more.choice(SHORT_TTL_MS) if "sessions" in workload.features else TTL_MS

    def talk(self, begun: int) -> None:
        """One burst, and the next one later."""
        work = self.work
        if work.stopping or begun != work.begun:
            return
        if work.loop.now < self.group.quiet_until:
            work.loop.at(self.group.quiet_until, None, self.talk, begun)
            return
        said = work.burst // 2
        if self.group.created and not self.session:
            self.open()
        elif self.group.created and not self.full:
            said = self.say(work.burst)
        per_client = work.rate / sum(client.talks for client in work.clients)
        work.loop.at(work.loop.now + said / per_client * work.draw.uniform(0.5, 1.5), None, self.talk, begun)

    def say(self, burst: int) -> int:
        """About so many operations; how many it was."""
        return burst

    def answered(self, frame: Frame, data: bytes) -> None:
        """A frame's reply."""

    def began(self) -> None:
        """There is a session."""

    def forget(self) -> None:
        """The group was made anew: whatever this client had there is gone."""
        for frame in self.pending.values():
            if frame.timer is not None:
                frame.timer.cancel()
        self.session, self.pending = 0, {}

    def lost(self, frames: Sequence[Frame]) -> None:
        """The session is over: these were applied, or never will be."""

    @property
    def full(self) -> bool:
        """As many frames as may be are under way."""
        return bool(self.pending) and self.sequence - min(self.pending) >= WINDOW

    def put(self, what: Any, data: bytes) -> None:
        """A new frame, whose sequence `data` has."""
        frame = self.pending[self.sequence] = Frame(what, memoryview(data), self.session, self.sequence)
        self.send(frame)

    def open(self) -> None:
        """A session, on whatever node seems to lead."""
        work = self.work
        number = work.leader_of(self.group)
        if self.opening or not number or work.cluster.hosts[number].life is None:
            return
        work.sessions += 1
        session = work.sessions
        self.opening = session

        def done(result: Any, error: BaseException | None) -> None:
            give_up()
            if error is None and not self.session:
                self.session, self.sequence, self.pending = session, 0, {}
                self.began()
            elif error is not None and not isinstance(error, LogyardError):
                work.cluster.on_bug("opening a session", error)

        def give_up() -> None:
            # Nobody answers, as from a process that stood still and is gone: another one is opened.
            if self.opening == session:
                self.opening = 0

        work.cluster.spawn(number, self._open(number, session), "session", done)
        work.loop.at(work.loop.now + 2.0, None, give_up)

    async def _open(self, number: int, session: int) -> None:
        await self.work.cluster.node(number).open_session(self.group.name, session, self.number, self.ttl_ms)

    def send(self, frame: Frame, number: int = 0) -> None:
        """To a node; again after a while if no answer comes."""
        work = self.work
        if frame.timer is not None:
            frame.timer.cancel()
        frame.sends += 1
        frame.timer = work.loop.at(work.loop.now + PATIENCE_S * work.draw.uniform(0.7, 1.3), None, self.retry, frame)
        number = number or work.leader_of(self.group)
        if frame.sends > 1:
            work.hits["Q1.retry"] += 1
        if not number:
            return
        work.loop.at(work.loop.now + 0.0002, None, self.hand, frame, number)
        if work.twice and work.draw.random() < work.twice:
            work.hits["Q1.duplicate"] += 1
            work.loop.at(work.loop.now + work.draw.random() * 0.3, None, self.hand, frame, number)

    def retry(self, frame: Frame) -> None:
        """It was not answered."""
        if self.pending.get(frame.sequence) is frame:
            self.send(frame)

    def hand(self, frame: Frame, number: int) -> None:
        """It arrives at a node, if that is up."""
        host = self.work.cluster.hosts[number]
        life = host.life
        if not host.ready or life is None or self.pending.get(frame.sequence) is not frame:
            return
        if life.paused_until > self.work.loop.now:
            self.work.loop.at(life.paused_until, None, self.hand, frame, number)
            return
        self.work.loop.perform(life, self._submit, (frame, number))

    def _submit(self, frame: Frame, number: int) -> None:
        system = self.work.cluster.system(number)
        assert system is not None
        try:
            system.replicas.commands.submit(self.group.uid, frame.data, self, frame.sequence)
        except LogyardError as error:
            self._refused(frame, error)

    def reply(self, request: int, status: int, data: bytes) -> None:
        """The sink: an answer leaves the node, and may get lost on the way."""
        work = self.work
        frame = self.pending.get(request)
        if frame is None:
            return
        if work.deaf and work.draw.random() < work.deaf:
            work.hits["Q1.lost_reply"] += 1
            return
        work.loop.soon(None, self._answered, frame, status, data)

    def _answered(self, frame: Frame, status: int, data: bytes) -> None:
        if self.pending.get(frame.sequence) is not frame:
            return
        if status:
            self._refused(frame, decode_error(data))
            return
        del self.pending[frame.sequence]
        if frame.timer is not None:
            frame.timer.cancel()
        self.answered(frame, data)

    def _refused(self, frame: Frame, error: LogyardError) -> None:
        work = self.work
        work.hits[f"refused.{error.code}"] += 1
        if error.code == "session_expired":
            # What is pending was applied, or never will be.
            for one in self.pending.values():
                if one.timer is not None:
                    one.timer.cancel()
            lost, self.session, self.pending = list(self.pending.values()), 0, {}
            self.lost(lost)
        elif error.code not in REFUSED:
            work.fault(f"{self.group.name}: a frame was refused with {error.code}: {error}")
        else:
            if frame.timer is not None:
                frame.timer.cancel()
            wait = 0.15 if error.code == "not_leader" else 0.3
            frame.timer = work.loop.at(work.loop.now + wait * work.draw.uniform(0.5, 3.0), None, self.retry, frame)

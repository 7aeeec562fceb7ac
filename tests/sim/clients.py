"""Clients of append logs with sessions, and what they were told: the model that everything is checked against.

A client keeps a few frames under way; what is not answered is sent again, to another node or twice, in any order. Every
answered record is at its offset exactly once; what is not answered is in the log once or not at all. A linearizable
read sees at least what was acknowledged, or read, before it began. Driven by `run`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from logyard.client.records import Page
from logyard.client.wire import encode_frame
from logyard.engine.errors import LogyardError, decode_error
from logyard.machines.command import APPEND, APPEND_REPLY

from .cluster import Cluster
from .loop import Timer

PATIENCE_S = 1.5
WINDOW = 32
"""Frames of one session under way; the engine remembers the replies of 64."""
TTL_MS = 60_000
REFUSED = frozenset({"not_leader", "unknown", "busy", "group_stopped", "no_space", "unknown_group", "wal_failed"})


class Group:
    """A group as its clients know it. `records` is the log they were told of: offset -> the record's tag."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.uid = 0
        self.records: dict[int, int] = {}
        self.start = 0
        self.acked_end = 0
        self.read_end = 0
        self.machine = "log"
        # A boom was sent and not skipped yet.
        self.poisoned = False
        self.created = False
        # It may have been deleted, and is to be made again.
        self.recreate = False


class Frame:
    """Some records under one sequence number. `tags` of consecutive numbers, `data` as on the wire."""

    __slots__ = ("first", "count", "data", "sequence", "session", "sends", "timer", "boom")

    def __init__(self, first: int, count: int, data: memoryview, session: int, sequence: int) -> None:
        self.first = first
        self.count = count
        self.data = data
        self.session = session
        self.sequence = sequence
        self.sends = 0
        self.timer: Timer | None = None
        self.boom = False


class Workload:
    """All clients and groups. `fault(text)` is called when a promise was broken."""

    def __init__(
        self, cluster: Cluster, draw: random.Random, groups: int, rate: float, fault: Callable[[str], None]
    ) -> None:
        self.cluster = cluster
        self.loop = cluster.loop
        self.draw = draw
        self.fault = fault
        self.rate = rate
        self.groups = [Group(f"g{number}") for number in range(groups)]
        self.clients = [Client(self, number, group) for number, group in enumerate(self.groups, 1)]
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

    def acked(self, group: Group, frame: Frame, first: int, count: int) -> None:
        """An append was answered."""
        if count != frame.count:
            self.fault(f"{group.name}: an append of {frame.count} records was answered with {count}")
        for at in range(count):
            tag, offset = frame.first + at, first + at
            if group.records.setdefault(offset, tag) != tag:
                self.fault(f"{group.name}: offset {offset} was given to records {group.records[offset]} and {tag}")
        group.acked_end = max(group.acked_end, first + count)
        self.acknowledged += count
        self.ask_leaders(group)

    # Reads

    def ask_leaders(self, group: Group) -> None:
        """When more than one node believes that it leads: what was just acknowledged is read from all of them."""
        led = [number for number in self.cluster.up if self.cluster.leads(number, group.name)]
        if len(led) > 1:
            for number in led:
                self.read(group, number, "linearizable")

    def read(self, group: Group, number: int, consistency: str) -> None:
        """A read of some records from a node, checked against the model. A node that stands still is asked in the
        moment in which it goes on."""
        host = self.cluster.hosts.get(number)
        if host is None or not host.ready or host.life is None:
            return
        until = host.life.paused_until
        if until > self.loop.now:
            if (number, group.name, until) not in self.waiting:
                self.waiting.add((number, group.name, until))
                self.loop.at(until, None, self.read, group, number, consistency)
            return
        self.operations += 1
        least = max(group.acked_end, group.read_end) if consistency == "linearizable" else 0
        start, uid = group.start, group.uid

        def done(result: Any, error: BaseException | None) -> None:
            if error is None:
                if uid == group.uid:
                    self._look(group, result, least, start, number)
            elif not isinstance(error, LogyardError):
                self.cluster.on_bug(f"a read of {group.name} from node {number}", error)
            elif error.code in ("corrupt", "error", "bad_request"):
                self.hits[f"read.{error.code}"] += 1

        self.cluster.spawn(number, self._poll(group, number, consistency), "read", done)

    async def _poll(self, group: Group, number: int, consistency: str) -> Any:
        node = self.cluster.node(number)
        bounds = await node.bounds(group.name, consistency)
        if bounds["end"] <= bounds["start"]:
            return bounds, None
        low = max(bounds["start"], bounds["end"] - 400)
        offset = self.draw.randrange(low, bounds["end"])
        header, blocks = await node.poll(group.name, offset, 20, 1 << 20, 0.0, True, "local")
        page = Page(b"".join(blocks), header["start"], header["end"], header["node"], offset, 20)
        return bounds, [(record.offset, record.payload) for record in page]

    def _look(self, group: Group, result: Any, least: int, start: int, number: int) -> None:
        bounds, records = result
        if least and bounds["end"] < least:
            self.fault(f"{group.name}: a linearizable read at node {number} saw {bounds['end']}, {least} was known")
        if least:
            group.read_end = max(group.read_end, bounds["end"])
        self.compare(group, records or (), number)

    def compare(self, group: Group, records: Any, number: int) -> None:
        """Records as a node gives them."""
        for offset, payload in records:
            tag = int(bytes(payload).partition(b";")[0])
            if self.body(tag) != payload:
                self.fault(f"{group.name}: record {offset} at node {number} has wrong bytes")
            known = group.records.get(offset)
            if known is not None and known != tag:
                self.fault(f"{group.name}: record {offset} at node {number} is {tag}, acknowledged was {known}")


class Client:
    """One session at a time on one group."""

    def __init__(self, workload: Workload, number: int, group: Group) -> None:
        self.work = workload
        self.number = number
        self.group = group
        self.session = 0
        self.sequence = 0
        self.opening = False
        self.pending: dict[int, Frame] = {}

    def talk(self, begun: int) -> None:
        """One burst, and the next one later."""
        work = self.work
        if work.stopping or begun != work.begun:
            return
        per_client = work.rate / len(work.clients)
        work.loop.at(work.loop.now + work.burst / per_client * work.draw.uniform(0.5, 1.5), None, self.talk, begun)
        if not self.group.created:
            return
        if not self.session:
            self.open()
            return
        frames = work.draw.choice((1, 1, 1, 2, 3))
        for _ in range(frames):
            if len(self.pending) and self.sequence - min(self.pending) >= WINDOW:
                return
            count = max(1, work.burst // frames)
            self.sequence += 1
            first = work.invent(count)
            records = [(b"", work.body(tag)) for tag in range(first, first + count)]
            data = b"".join(encode_frame(records, command=APPEND, session=self.session, sequence=self.sequence))
            frame = Frame(first, count, memoryview(data), self.session, self.sequence)
            self.pending[self.sequence] = frame
            work.operations += count
            self.send(frame)
        if work.draw.random() < 0.4:
            # Also of a leader that was: it must not answer.
            for number in work.cluster.up:
                if work.cluster.leads(number, self.group.name):
                    work.read(self.group, number, "linearizable")
        if work.draw.random() < 0.1 and work.cluster.up:
            work.read(self.group, work.draw.choice(work.cluster.up), "local")

    def open(self) -> None:
        """A session, on whatever node seems to lead."""
        work = self.work
        number = work.leader_of(self.group)
        if self.opening or not number or work.cluster.hosts[number].life is None:
            return
        work.sessions += 1
        session = work.sessions
        self.opening = True
        host = work.cluster.hosts[number]
        life = host.life

        def done(result: Any, error: BaseException | None) -> None:
            self.opening = False
            if error is None and not self.session:
                self.session, self.sequence, self.pending = session, 0, {}
            elif error is not None and not isinstance(error, LogyardError):
                work.cluster.on_bug("opening a session", error)

        def forget() -> None:
            # Nobody answers: another one is opened.
            if self.opening and (host.life is not life or work.sessions == session):
                self.opening = False

        work.cluster.spawn(number, self._open(number, session), "session", done)
        work.loop.at(work.loop.now + 2.0, None, forget)

    async def _open(self, number: int, session: int) -> None:
        await self.work.cluster.node(number).open_session(self.group.name, session, self.number, TTL_MS)

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
            system.submit(self.group.uid, frame.data, self, frame.sequence)
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
        if len(data) != APPEND_REPLY.size:
            self.work.fault(f"{self.group.name}: an append was answered with {data!r}")
            return
        self.work.acked(self.group, frame, *APPEND_REPLY.unpack(data))

    def _refused(self, frame: Frame, error: LogyardError) -> None:
        work = self.work
        work.hits[f"refused.{error.code}"] += 1
        if error.code == "session_expired":
            # What is pending was applied, or never will be.
            for one in self.pending.values():
                if one.timer is not None:
                    one.timer.cancel()
            self.session, self.pending = 0, {}
        elif error.code not in REFUSED:
            work.fault(f"{self.group.name}: a frame was refused with {error.code}: {error}")
        else:
            if frame.timer is not None:
                frame.timer.cancel()
            wait = 0.15 if error.code == "not_leader" else 0.3
            frame.timer = work.loop.at(work.loop.now + wait * work.draw.uniform(0.5, 3.0), None, self.retry, frame)

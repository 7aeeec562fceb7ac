"""What the parts of a replica are built on in their tests: a core, the books, a client, a machine; no node, no disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from logyard.engine.entry import COMMANDS, Entry, build_commands, build_plain, build_system
from logyard.engine.machine import Applied, Context, PayloadRange, PayloadRef, Position, Reject
from logyard.engine.raft.core import LEADER
from logyard.engine.replica.member import Member
from logyard.engine.replica.proposals import ProposalQueue
from logyard.engine.types import Spec
from logyard.protocol.errors import Busy, LogyardError, decode_error
from logyard.protocol.frame import encode_frame

UID, TERM = 9, 3


class Log:
    """The end of a log, and how far it is on disk."""

    def __init__(self) -> None:
        self.last_index = self.stable = 0
        self.terms: dict[int, int] = {}

    def term(self, index: int) -> int | None:
        return self.terms.get(index)


class Configuration:
    voters, outgoing = (1, 2, 3), ()

    def nodes(self) -> set[int]:
        return set(self.voters)


class Core:
    """A leader's core that takes every proposal, unless `refusal` says why not."""

    def __init__(self) -> None:
        self.uid, self.node, self.term, self.role, self.leader = UID, 1, TERM, LEADER, 1
        self.commit = self.applied = 0
        self.lead_index = 1
        self.stopped = self.dirty = self.transferring = self.has_ready = False
        self.may_lead = True
        self.log = Log()
        self.configuration = Configuration()
        self.base = (0, self.configuration)
        self.refusal: LogyardError | None = None
        self.proposed: list[tuple[Entry, bool]] = []

    def propose(self, entry: Entry, reserved: bool) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.log.last_index = entry.index
        self.log.terms[entry.index] = self.term
        self.proposed.append((entry, reserved))

    def give_way(self) -> None:
        self.may_lead = False

    def stand_again(self) -> None:
        self.may_lead = True

    def on_applied(self, index: int) -> None:
        assert index == self.applied + 1, "in order, each once"
        self.applied = index


class Admission:
    def __init__(self) -> None:
        self.queued = self.inflight = 0
        self.full = False

    def admit(self, holder: ProposalQueue, size: int, reserved: bool) -> None:
        if self.full and not reserved:
            raise Busy("full", 0.1)
        self.queued += size
        self.inflight += size

    def unqueue(self, size: int) -> None:
        self.queued -= size

    def drop(self, size: int) -> None:
        self.queued -= size
        self.settle(size)

    def settle(self, size: int) -> None:
        self.inflight -= size


class Client:
    """A connection that keeps what it is told, by request."""

    def __init__(self) -> None:
        self.told: list[tuple[int, bytes | str]] = []

    def reply(self, request: int, status: int, data: bytes) -> None:
        self.told.append((request, decode_error(data).code if status else data))

    def once(self) -> dict[int, bytes | str]:
        found = dict(self.told)
        assert len(found) == len(self.told), "each is answered once"
        return found


class Living:
    """Payloads that live, by (index, ordinal)."""

    def __init__(self) -> None:
        self.places: set[tuple[int, int]] = set()

    def live_within(self, first: tuple[int, int], end: tuple[int, int]) -> list[PayloadRange]:
        return [
            PayloadRange(Position(index, ordinal), Position(index, ordinal + 1))
            for index, ordinal in sorted(self.places)
            if first <= (index, ordinal) < end
        ]

    def release(self, first: tuple[int, int], end: tuple[int, int]) -> None:
        self.places = {place for place in self.places if not first <= place < end}


class Recorder:
    """A machine that notes what it is given; `faults` are commands that it fails at, with `fault` if that is set;
    `answers` is what it says to some."""

    version = 1

    def __init__(self) -> None:
        self.given: list[tuple[int, bytes]] = []
        self.faults: set[bytes] = set()
        self.fault: Exception | None = None
        self.answers: dict[bytes, Applied | Reject] = {}

    def apply(self, context: Context, command: bytes, payloads: Sequence[PayloadRef]) -> Applied:
        if command in self.faults:
            raise self.fault or ValueError(f"cannot {command!r}")
        answer = self.answers.get(command, Applied(b"did " + command))
        self.given.append((context.index, command))
        if isinstance(answer, Reject):
            raise answer
        return answer

    def on_timer(self, context: Context, name: str) -> Applied:
        return self.apply(context, b"timer " + name.encode(), ())


def member_of(machine: Any) -> tuple[Member, Core]:
    """A member that leads, and its core."""
    core = Core()
    spec = Spec(UID, "a", "recorder", {}, (1, 2, 3), 0)
    return Member(spec, cast(Any, core), machine, cast(Any, Living()), Admission()), core


def frame(command: bytes, session: int = 0, sequence: int = 0) -> memoryview:
    return memoryview(b"".join(encode_frame([(b"", b"x")], command=command, session=session, sequence=sequence)))


class Entries:
    """A log that a replica reads its entries from; `fault` is raised instead, once."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.fault: Exception | None = None

    def add(self, *commands: bytes, term: int = TERM, stamp: int = 5) -> int:
        """An entry with a frame a command; returns its index."""
        return self.add_frames(*(frame(command) for command in commands), term=term, stamp=stamp)

    def add_frames(self, *frames: memoryview, term: int = TERM, stamp: int = 5) -> int:
        index = len(self.entries) + 1
        self.entries.append(build_commands(UID, index, term, stamp, list(frames)))
        return index

    def add_own(self, *frames: memoryview, term: int = TERM) -> int:
        index = len(self.entries) + 1
        self.entries.append(build_system(index, term, 5, list(frames)))
        return index

    def add_plain(self, kind: int, term: int = TERM) -> int:
        assert kind != COMMANDS
        index = len(self.entries) + 1
        self.entries.append(build_plain(index, term, kind, 5, b""))
        return index

    def log_entries(self, member: Member, first: int, last: int, bytes_max: int) -> list[Entry]:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        return self.entries[first - 1 : last]

"""The client without sockets: requests and answers of a connection, routes, and when to try again.

Both faces drive these objects: `aio` from trio tasks, `sync` from whatever thread calls. Nothing here waits, reads a
clock (the time is passed in) or opens anything. Invariant: an answer resolves its request exactly once, and an answer
to nothing is a protocol error.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, TypeGuard

from logyard.protocol import wire
from logyard.protocol.errors import (
    ANOTHER,
    BadRequest,
    Busy,
    LogyardError,
    NoSpace,
    NotLeader,
    SessionExpired,
    Unknown,
    UnknownGroup,
    WrongIdentity,
    WrongKind,
    error_of,
)  # fmt: skip
from logyard.protocol.frame import FRAME_BYTES_MAX, Buffer
from logyard.protocol.groups import coordinators
from logyard.protocol.pending import FAILED, PendingReply
from logyard.protocol.topics import TOPICS_LOG
from logyard.protocol.wire import APPEND, CLIENT_LIMITS, DATA, ERROR, PUSH, REPLIES, RESULT, ProtocolError

from .admin import CATALOG, Call, T

COORDINATORS = frozenset(coordinators())
BACKOFF_FIRST = 0.01
BACKOFF_LAST = 0.25
TLS_TRIES = 4
"""Tries after which a failed TLS handshake is told at once: enough to have asked the other nodes."""
ATTEMPT_S = 0.05
"""No further try begins with less time left: cut short, it would turn a plain refusal into an unknown outcome."""


def backoff(failures: int, chance: random.Random) -> float:
    """Return the seconds until the next try after so many failures: doubled each time, bounded, and with jitter."""
    delay: float = min(BACKOFF_LAST, BACKOFF_FIRST * 2 ** min(failures, 10))
    return delay * (0.5 + chance.random())


UNIX = "unix:"
"""Begins the address of a node's socket in its data directory: who may read the files there needs no TLS."""


@contextmanager
def unix_target(host: str) -> Iterator[str]:
    """Yield what to connect to for "unix:PATH": a socket's own address is short, the way through a descriptor always
    is."""
    path = host.removeprefix(UNIX)
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)


def parse_address(text: str) -> tuple[str, int]:
    """Return ("host", port) of "host:port" or "[host]:port", ("unix:PATH", 0) of "unix:PATH"; raise `BadRequest`."""
    if text.startswith(UNIX) and len(text) > len(UNIX):
        return text, 0
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise BadRequest(f"an address is HOST:PORT, not {text!r}")
    try:
        host.encode("idna")
    except UnicodeError as error:
        # No resolver takes it, and what those say is no error of the network.
        raise BadRequest(f"{host!r} is no name of a host: {error}") from None
    return host.strip("[]"), int(port)


Pushed: TypeAlias = Callable[[Any, memoryview], None]
"""Takes a PUSH's header and raw bytes; raises `ProtocolError` for what it can't read."""


class Completion(Protocol):
    """What waits for an answer: a `PendingReply`, or a frame of a lane, which may have to be sent again first."""

    def reply(self, request: int, status: int, data: Buffer) -> None:
        """Take a command's reply: see `protocol.pending.Sink`."""

    def cut(self, error: LogyardError) -> None:
        """Take note that the connection ended before an answer came."""


class Channel:
    """One connection's requests: frames out through `outgoing`, bytes in through `receiver`, answers to completions."""

    __slots__ = ("outgoing", "receiver", "pending", "_listening", "_request", "hello", "greeted")

    def __init__(self, features: int = 0) -> None:
        self.outgoing = wire.Outgoing()
        self.receiver = wire.Receiver(CLIENT_LIMITS)
        self.pending: dict[int, Completion] = {}
        # Who takes what the server sends before it answers.
        self._listening: dict[int, Pushed] = {}
        self._request = 0
        self.hello = wire.Hello(None, 0, {}, FRAME_BYTES_MAX)
        self.greeted = False
        self.outgoing.push((wire.encode_hello(features=features),))

    @property
    def asked(self) -> int:
        """How many requests there were so far."""
        return self._request

    def call(
        self, method: str, arguments: dict[str, object], pending: PendingReply[Any], pushed: Pushed | None = None
    ) -> None:
        """Queue a call; `pending` gets a RESULT's value or DATA's (header, bytes), `pushed` what is sent before that.
        Raises `BadRequest` when its arguments are too long for one, or have half a surrogate pair."""
        request = self._request + 1
        try:
            frame = wire.encode_call(request, method, arguments)
        except UnicodeEncodeError as error:
            raise BadRequest(f"{method} has a text that is not UTF-8: {error}") from None
        if len(frame) - wire.HEADER_BYTES > wire.CALL_BYTES_MAX:
            raise BadRequest(f"the arguments of {method} are longer than {wire.CALL_BYTES_MAX} bytes; split the call")
        self._request = request
        self.pending[request] = pending
        if pushed is not None:
            self._listening[request] = pushed
        self.outgoing.push((frame,))

    def append(self, uid: int, frame: list[Buffer], completion: Completion, flags: int = 0) -> None:
        """Queue a command frame for the group `uid`; one above the server's limit is refused here. `flags` as on the
        wire: one that is never answered is open no longer than it takes to send it."""
        size = sum(map(len, frame)) + wire.UID.size
        if size > self.hello.frame_bytes_max:
            why = f"a frame of {size} bytes is above the server's limit of {self.hello.frame_bytes_max}"
            completion.reply(0, FAILED, wire.pack({"code": BadRequest.code, "message": why, "retry": "never"}))
            return
        if not self.hello.features & wire.KNOWS_KINDS:
            flags &= ~wire.KIND_FLAGS
        self._request = request = self._request + 1
        if flags & wire.REPLY_MODE != wire.REPLY_NONE:
            self.pending[request] = completion
        self.outgoing.push((wire.HEADER.pack(size, APPEND, flags, 0, request) + wire.UID.pack(uid), *frame))

    def received(self, count: int) -> None:
        """Take `count` received bytes; completions are told at once. Raises `ProtocolError`."""
        for frame in self.receiver.received(count):
            kind = frame.type
            if not self.greeted:
                if kind == ERROR:
                    raise error_of(wire.unpack(frame.body))
                if kind != wire.HELLO:
                    raise ProtocolError("the server did not begin with HELLO")
                self.hello = wire.decode_hello(frame.body)
                self.greeted = True
            elif kind == REPLIES:
                for request, status, data in wire.decode_replies(frame.body):
                    completion = self.pending.get(request)
                    if completion is None:
                        raise ProtocolError(f"an answer to request {request}, which is not open")
                    completion.reply(request, status, data)
                    # Only an answer that could be read closes its request: the end of the connection cuts the others.
                    self.pending.pop(request, None)
            elif kind == PUSH:
                pushed = self._listening.get(frame.request)
                if pushed is None:
                    raise ProtocolError(f"a push for request {frame.request}, which does not listen")
                pushed(*wire.decode_data(frame.body))
            elif kind == wire.HELLO:
                raise ProtocolError("a second HELLO")
            else:
                self._answered(frame.request, kind, frame.body)

    def _answered(self, request: int, kind: int, body: Buffer) -> None:
        """Settle a call."""
        pending = self.pending.get(request)
        if not isinstance(pending, PendingReply):
            raise ProtocolError(f"an answer to request {request}, which is {'a command' if pending else 'not open'}")
        if kind == RESULT:
            pending.set(wire.unpack(body))
        elif kind == DATA:
            pending.set(wire.decode_data(body))
        elif kind == ERROR:
            pending.fail(error_of(wire.unpack(body)))
        else:
            raise ProtocolError(f"a frame of type {kind} is no answer")
        self.pending.pop(request, None)
        if self._listening:
            self._listening.pop(request, None)

    def cut(self, error: LogyardError) -> None:
        """Tell everything open that the connection ended."""
        pending, self.pending = self.pending, {}
        for completion in pending.values():
            completion.cut(error)


class Routes:
    """What a client knows about the cluster: addresses of nodes, and each group's uid, leader and members."""

    __slots__ = ("seeds", "addresses", "cluster", "groups", "compressed", "kinds", "asked", "named", "greetings")

    def __init__(self, servers: Iterable[str]) -> None:
        if isinstance(servers, str):
            raise BadRequest(f"the servers are a list of HOST:PORT, [{servers!r}] for instance, not a str")
        self.seeds = [parse_address(server) for server in servers]
        if not self.seeds:
            raise BadRequest("at least one server address is needed")
        self.addresses: dict[int, tuple[str, int]] = {}
        self.cluster: object = None
        self.groups: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        # Logs whose option says that payloads are to be compressed.
        self.compressed: set[str] = set()
        # What each group is, as far as its server tells.
        self.kinds: dict[str, str] = {}
        self.asked = 0
        # Which nodes each server ever named: one that it names no more was removed.
        self.named: dict[int, set[int]] = {}
        # Which node answered at an address: a seed may be another name of the one that the node has.
        self.greetings: dict[tuple[str, int], int] = {}

    def greeted(self, hello: wire.Hello, address: tuple[str, int]) -> None:
        """Take note that a server introduced itself at `address`; raise `WrongIdentity` when it is of another
        cluster."""
        if self.cluster is None:
            self.cluster = hello.cluster
        elif self.cluster != hello.cluster:
            raise WrongIdentity(f"{address[0]}:{address[1]} belongs to cluster {hello.cluster}, not {self.cluster}")
        self.told(hello.clients, hello.node)
        self.greetings[address] = hello.node
        self.addresses.setdefault(hello.node, address)

    def told(self, nodes: object, by: int = 0) -> None:
        """Take addresses of nodes as server `by` knows them: nodes come while clients are connected."""
        for other, text in nodes.items() if isinstance(nodes, dict) else ():
            self.addresses[int(other)] = parse_address(text)
            self.named.setdefault(by, set()).add(int(other))

    def others(
        self, addresses: Iterable[tuple[str, int]], unheard: Collection[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        """Return those addresses that are no name of a node that can't be reached."""
        away = {node for node, address in self.addresses.items() if address in unheard}
        return [one for one in addresses if one not in unheard and self.greetings.get(one) not in away]

    def left(self, answers: Iterable[Mapping[str, Any]], unheard: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
        """Forget nodes that can't be reached, and that none of these ``cluster`` answers names, although one of those
        servers did before: they were removed. Return where they were. One that nobody ever named but itself stays: not
        all servers know where the others are."""
        now, before = set[int](), set[int]()
        for answer in answers:
            now.update(map(int, answer["nodes"]))
            before |= self.named.get(answer.get("node", 0), set())
        gone = {node for node in before - now if self.addresses.get(node) in unheard}
        places = {self.addresses.pop(node) for node in gone}
        places |= {address for address, node in self.greetings.items() if node in gone}
        self.seeds = [seed for seed in self.seeds if seed not in places] or self.seeds
        return places

    def strange(self, rows: Iterable[Iterable[Any]]) -> bool:
        """Return whether a group of a ``locate`` answer is led by a node whose address is not known."""
        return any(leader and leader not in self.addresses for _, _, leader, *_ in rows)

    def located(self, rows: Iterable[Iterable[Any]]) -> None:
        """Take the rows of a ``locate`` answer."""
        for name, uid, leader, members, *more in rows:
            self.groups[name] = (uid, leader, tuple(members))
            if more and more[0]:
                self.compressed.add(name)
            else:
                self.compressed.discard(name)
            if len(more) > 1:
                self.kinds[name] = more[1]
            else:
                self.kinds.pop(name, None)

    def leader(self, name: str, kind: str = "") -> int:
        """Return the node that leads a group as far as is known, or 0: also where what has that name was of another
        kind."""
        if name not in self.groups or (kind and self.kinds.get(name, kind) != kind):
            return 0
        return self.groups[name][1]

    def require(self, name: str, kind: str) -> None:
        """Raise `WrongKind` for a group that was just found to be of another kind; "": any will do."""
        found = self.kinds.get(name, kind)
        if kind and found != kind:
            raise WrongKind(name, found, kind)

    def spread(self, call: Call[T], chance: random.Random) -> Call[T]:
        """Return a read with a bound on its age that names no node for any member of its group, not only the leader."""
        if "staleness_s" not in call.arguments or call.pinned or call.group not in self.groups:
            return call
        members = self.groups[call.group][2]
        return call._replace(group="", nodes=tuple(chance.sample(members, len(members))))

    def stumbled(self, name: str, error: LogyardError) -> None:
        """Forget the leader, at which a request failed, unless it is the right one and merely busy."""
        if name in self.groups and error.retry != "same_session":
            uid, _, members = self.groups[name]
            self.groups[name] = (uid, error.leader if isinstance(error, NotLeader) else 0, members)

    def is_nowhere(self, name: str, unknown: int, unheard: int) -> bool:
        """Return whether a group is nowhere that `unknown` nodes do not have, and no other one of those that answered,
        where `unheard` did not. One node that is down keeps nobody from making a coordinator: it has as many members
        as the topics' log, which is made before it, and so it is on another node as well as soon as anything is in it.
        Where that log is not known, or has one member, its cluster may have grown since, and nothing is certain."""
        _, _, members = self.groups.get(TOPICS_LOG, (0, 0, ()))
        return not unheard or (name in COORDINATORS and len(members) > 1 and unheard == 1 < unknown)


def not_found(name: str, unheard: Iterable[tuple[str, int]]) -> LogyardError:
    """Return the error of a group that no node has that answers."""
    if name == CATALOG:
        return UnknownGroup(f"{name!r} is the cluster's own: no client reads or writes it", retry="never")
    those = ", ".join(f"{host}:{port}" for host, port in unheard)
    if not those:
        return UnknownGroup(f"no group {name!r} on any node", retry="never")
    return UnknownGroup(f"no group {name!r} on any node that answers; {those} can't be reached", retry="never")


def unreachable(address: tuple[str, int], why: object) -> LogyardError:
    """Return the error of no connection to a server: nothing was sent, another one may do."""
    return LogyardError(f"cannot reach {address[0]}:{address[1]}: {why}", retry="elsewhere")


def not_secured(address: tuple[str, int], why: object) -> LogyardError:
    """Return the error of no TLS with a server. Another one may do, but asking again and again will not: see
    `Retry.after`."""
    return LogyardError(f"no TLS with {address[0]}:{address[1]}: {why}", tls=True, retry="elsewhere")


def outcome(error: LogyardError, ambiguous: bool, name: str) -> LogyardError:
    """Return what the caller of a command is told when `error` ends it.

    `ambiguous`: an earlier try may have been applied, its answer was lost. A server's refusal to take the command (no
    such group, not its leader, no room) says nothing of that try; a committed refusal does, and has a code of the
    machine's own.
    """
    committed = type(error) is LogyardError and error.code != LogyardError.code
    if not ambiguous or committed or isinstance(error, Unknown | SessionExpired):
        return error
    return Unknown(f"{name}: not acknowledged, and not known whether it happened: {error}")


def says_more(said: LogyardError | None) -> TypeGuard[LogyardError]:
    """Return whether what an earlier try was answered says more than that a later one was not answered in time. That
    one node does not have the group any more does not, for whoever has it was asked behind that; that another one has
    its name does."""
    return said is not None and not (isinstance(said, UnknownGroup) and ANOTHER not in said.details)


def last_of(error: LogyardError, said: LogyardError | None) -> LogyardError:
    """Return the error of a try, for who has no other one: where it found no leader, with what was `said` before by one
    that did not have the group. Whether nobody has it is not known, so that is no `UnknownGroup`."""
    if type(error) is not NotLeader or not isinstance(said, UnknownGroup):
        return error
    return NotLeader.told(f"{error.message}; told before: {said.message}", error.details)


class Retry:
    """When a call may be tried again: until a deadline, with back-off, and only after errors that allow it."""

    __slots__ = ("deadline", "failures", "chance", "pinned")

    def __init__(self, deadline: float, chance: random.Random, pinned: bool) -> None:
        self.deadline = deadline
        self.failures = 0
        self.chance = chance
        self.pinned = pinned

    def heard(self, pushed: Pushed, header: Any, data: memoryview) -> None:
        """Take a PUSH: what went before is over, so it is no reason to give up later."""
        self.failures = 0
        pushed(header, data)

    def after(self, error: LogyardError, cut: bool, now: float) -> float:
        """Return the seconds to wait before the next try; raise the error when there is none."""
        wanted = 0.0
        if "tls" in error.details and self.failures >= TLS_TRIES:
            # Certificates do not get better by themselves within a caller's patience.
            raise error
        if error.retry == "never" or (self.pinned and not cut and error.retry == "elsewhere"):
            raise error
        if isinstance(error, Busy | NoSpace):
            wanted = error.retry_after
        elif not (isinstance(error, NotLeader) and error.leader and not self.failures):
            wanted = backoff(self.failures, self.chance)
        self.failures += 1
        if now + wanted + ATTEMPT_S >= self.deadline:
            raise error
        return wanted

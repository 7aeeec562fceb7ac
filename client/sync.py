"""The blocking client: `with connect_sync([...]) as yard`, usable from any thread, without trio.

Each call takes a connection of its own from a pool and gives it back, so threads never wait for one another's answers.
The frames, the answers and the rules of retrying are those of `session`; appends are exactly-once, as `aio` explains.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from logyard.protocol import wire
from logyard.protocol.errors import BadRequest, LogyardError, NotLeader, Unknown, UnknownGroup
from logyard.protocol.frame import Buffer, Frame
from logyard.protocol.queue import time_to_live
from logyard.protocol.records import Page
from logyard.protocol.tls import TlsConfig, client_context
from logyard.protocol.verbs import NAME

from ._sync.admin import AdminVerbs
from ._sync.consumer import TopicVerbs
from .admin import Call, T, call_node
from .fork import HERE, elsewhere
from .kv_sync import KV
from .log import SESSION_TTL_S, close_call, open_call
from .machine_sync import Machine
from .queue_sync import Queue
from .sequences import RENEW, STRUCK, Ticket, expired, final, new_number
from .session import ATTEMPT_S, Pushed, Retry, Routes, last_of, not_found, outcome, says_more
from .sync_link import Connection
from .sync_log import Log
from .sync_session import SyncSession

__all__ = ["Log", "Yard", "connect_sync"]

TIMEOUT_S = 30.0
END_S = 5.0
"""One try to close a session."""
CLOSE_S = 1.0
"""Closing waits no longer than this for sessions to end: what is left open ends by itself."""
IDLE_CONNECTIONS = 8
"""Connections kept for each node when nobody uses them."""
NODES_S = 2.0
"""To ask others whether a node that can't be reached is still one of them."""


def connect_sync(
    servers: Sequence[str],
    *,
    timeout: float = TIMEOUT_S,
    retry: bool = True,
    tls: TlsConfig | None = None,
    exactly_once: bool = True,
    session_ttl: float = SESSION_TTL_S,
) -> Yard:
    """Connect a client of the cluster that `servers` ("host:port") belong to; one that answers is enough.

    Use it in a ``with`` block or `close` it. `timeout` (seconds) bounds every verb that is not given its own.
    `retry=False`: a cut connection raises `Unknown` for commands whose outcome it hid. `tls`: the files of a client's
    certificate; without it only loopback addresses are dialled. `exactly_once` and `session_ttl` as in `aio.connect`.
    """
    yard = Yard(servers, timeout=timeout, retry=retry, tls=tls, exactly_once=exactly_once, session_ttl=session_ttl)
    try:
        yard.cluster()
    except BaseException:
        yard.close()
        raise
    return yard


class Yard(AdminVerbs, TopicVerbs):
    """The cluster as a blocking client sees it; admin verbs are in `_sync.admin`. Safe to share among threads, not with
    the child of a fork: there every verb raises `BadRequest`, and `close` closes only that process's sockets."""

    __slots__ = (
        "timeout", "retry", "exactly_once", "_context", "_routes", "_idle", "_lock", "_chance", "closed", "_client",
        "_session_ttl", "_sessions", "_pid", "_features", "_away",
    )  # fmt: skip

    def __init__(
        self,
        servers: Sequence[str],
        *,
        timeout: float = TIMEOUT_S,
        retry: bool = True,
        tls: TlsConfig | None = None,
        exactly_once: bool = False,
        session_ttl: float = SESSION_TTL_S,
        features: int = 0,
    ) -> None:
        self._features = features
        self.exactly_once = exactly_once
        self._pid = HERE.pid
        self._client = new_number()
        self._session_ttl = time_to_live(session_ttl)
        self._sessions: dict[tuple[str, str], SyncSession] = {}
        self._context = client_context(tls)
        self.timeout = timeout
        self.retry = retry
        self._routes = Routes(servers)
        self._idle: dict[tuple[str, int], list[Connection]] = {}
        # Which servers could not be connected to, since somebody asked for the nodes.
        self._away: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._chance = random.Random()
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the sessions of logs with nothing under way, as far as that is quick, and close all connections that are
        not in use; those in use close when they are given back."""
        if self._pid != HERE.pid:
            # The sessions are the other process's, and who held the lock there is not here to let go of it.
            self._sessions, self._lock = {}, threading.Lock()
        deadline = time.monotonic() + CLOSE_S
        for (name, _), session in list(self._sessions.items()):
            left = deadline - time.monotonic()
            number = session.close() if left > 0 and not self.closed else 0
            if number:
                # What is left open ends by itself.
                with suppress(LogyardError):
                    self.run(close_call(name, number), left)
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def log(self, name: str) -> Log:
        """Return the append log `name`; nothing is asked until it is used."""
        if not name:
            raise BadRequest("a log has a name")
        return Log(self, name)

    def queue(self, name: str) -> Queue:
        """Return the queue `name`; nothing is asked until it is used."""
        if not name:
            raise BadRequest("a queue has a name")
        return Queue(self, name)

    def machine(self, name: str) -> Machine:
        """Return the group `name`, whatever its machine, one's own too; nothing is asked until it is used."""
        if not name:
            raise BadRequest("a group has a name")
        return Machine(self, name)

    def kv(self, name: str) -> KV:
        """Return the KV group `name`; nothing is asked until it is used."""
        if not name:
            raise BadRequest("a group has a name")
        return KV(self, name)

    def background(self, task: Callable[[], Any]) -> None:
        """Run something in a thread of its own until it ends."""
        threading.Thread(target=task, name="logyard consumer", daemon=True).start()

    def pause(self, seconds: float) -> None:
        """Wait."""
        threading.Event().wait(seconds)

    def event(self) -> threading.Event:
        """Make what a thread can wait for."""
        return threading.Event()

    def wait_for(self, event: threading.Event, seconds: float) -> None:
        """Wait until it is set, so long at most."""
        event.wait(seconds)

    def to_its_end(self, task: Callable[[], Any], seconds: float) -> None:
        """Do something, which takes no longer by itself; a thread is not cancelled."""
        task()

    def first_of(self, polls: Sequence[Callable[[float], Any]], wait: float) -> tuple[int, Page] | None:
        """Ask one after the other, each for its share of the time: a thread waits for one answer at a time. Return
        which one had records first, and those; None when none had."""
        for number, poll in enumerate(polls):
            page = poll(wait / len(polls))
            if page is not None and len(page):
                return number, page
        return None

    def clock(self) -> float:
        """Return the time, in seconds."""
        return time.monotonic()

    def nodes(self) -> list[int]:
        """Return the nodes whose addresses are known. Where one could not be reached the others are asked once whether
        it is still one of them."""
        if self._pid != HERE.pid:
            raise elsewhere(self._pid)
        with self._lock:
            away, self._away = self._away.intersection(self._routes.addresses.values()), set()
        if away:
            self._hears_of_more(self._everyone(), time.monotonic() + NODES_S, away)
        with self._lock:
            return sorted(self._routes.addresses)

    def run(self, call: Call[T], timeout: float | None = None) -> T:
        """Ask, again where that is allowed, until answered or out of time. Raises a `LogyardError`."""
        if self._pid != HERE.pid:
            raise elsewhere(self._pid)
        with self._lock:
            call = self._routes.spread(call, self._chance)
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        retry = Retry(deadline, self._chance, call.pinned)
        ambiguous = False
        said: LogyardError | None = None
        while True:
            connection: Connection | None = None
            cut = False
            try:
                connection = self._take(self._address(call, retry), deadline)
                answer = connection.call(call.method, call.arguments, deadline)
                cut = answer.was_cut
                if answer.error is None:
                    # What is answered may say that another node is to be asked.
                    return call.decode(answer.value)
                error = answer.error
                if cut and time.monotonic() >= deadline:
                    # Asked, and not answered in time: another thing than a node that is not there.
                    error.details["late"] = True
                if call.idempotent and cut and says_more(said) and time.monotonic() >= deadline:
                    # Out of time over asking again.
                    raise said
                said = error if not cut else said
                ambiguous |= (cut or isinstance(error, Unknown)) and not call.idempotent
                if cut and ambiguous and not self.retry:
                    raise Unknown(f"{call.method}: the connection ended before the answer: {error}")
            except LogyardError as refusal:
                if isinstance(refusal, Unknown):
                    raise
                error, cut = refusal, connection is None
            finally:
                if connection is not None:
                    self._give(connection, cut)
            try:
                self._stumbled(call.group, last_of(error, said), retry, cut)
            except LogyardError as last:
                raise outcome(last, ambiguous, call.method) from last

    def append(
        self, name: str, frame: Frame, timeout: float | None = None, flags: int = 0
    ) -> tuple[bytes, Ticket | None]:
        """Send a frame to a group's leader, exactly once where this yard and `flags` (the wire's) allow it.

        Returns the machine's reply, and the session and number that the frame had.
        """
        if self._pid != HERE.pid:
            raise elsewhere(self._pid)
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        if not self.exactly_once or flags & wire.REPLY_MODE:
            return self._command(name, frame.encode(), deadline, flags), None
        kind = wire.kind_of(flags)
        with self._lock:
            session = self._sessions.get((name, kind))
            if session is None:
                session = self._sessions[name, kind] = SyncSession(partial(self._begin, name, kind), self._session_ttl)
        while True:
            ticket = session.take(deadline)
            try:
                return self._command(name, frame.encode(ticket[0].session, ticket[1]), deadline, flags), ticket
            except LogyardError as error:
                if error.code not in RENEW:
                    raise final(name, error) from None
                session.renew(ticket, error.details.get(STRUCK, error.code))
                if STRUCK in error.details:
                    # It may have been applied: in another session it might be so twice.
                    raise
            finally:
                session.done(ticket)

    def _begin(self, name: str, kind: str, stale: int, deadline: float) -> int:
        """Close a session and open another one."""
        left = max(ATTEMPT_S, deadline - time.monotonic())
        if stale:
            self.run(close_call(name, stale), left)
        number = new_number()
        self.run(open_call(name, number, self._client, int(self._session_ttl * 1000), kind), left)
        return number

    def listen(
        self,
        name: str,
        session: int,
        pushed: Pushed,
        held: Callable[[Connection | None], object],
    ) -> None:
        """Take what a session is sent, at whoever leads its group, until it is over: raises why. `held` is told each
        connection, so that another thread may interrupt it, and None before each try; what it raises ends this."""
        if self._pid != HERE.pid:
            raise elsewhere(self._pid)
        retry = Retry(float("inf"), self._chance, False)
        while True:
            held(None)
            connection: Connection | None = None
            cut = True
            try:
                _, address = self._leader(name, retry)
                connection = self._take(address, time.monotonic() + self.timeout)
                held(connection)
                began = time.monotonic()
                answer = connection.listen("session_listen", {"name": name, "session": session}, pushed)
                if time.monotonic() - began > 1.0:
                    retry.failures = 0
                cut = answer.was_cut
                error = answer.error or LogyardError(f"{name}: listening ended")
            except LogyardError as refusal:
                error = refusal
            finally:
                if connection is not None:
                    connection.close()
            self._stumbled(name, error, retry, cut)

    def begin_session(self, name: str, kind: str = "") -> int:
        """Open a session that nothing but heartbeats in its own name keeps alive; return its number. `kind`: what the
        group must be."""
        number = new_number()
        self.run(open_call(name, number, number, int(self._session_ttl * 1000), kind))
        return number

    def end_session(self, name: str, session: int) -> None:
        """Close a session; one that nobody takes this for ends by itself."""
        with suppress(LogyardError):
            self.run(close_call(name, session), END_S)

    def beat(self, client: int) -> None:
        """Tell every node that a client lives. Those that do not answer take no more than a third of the time that it
        is believed for."""
        nodes = self.nodes()
        for node in nodes:
            with suppress(LogyardError):
                share = self._session_ttl / 3 / len(nodes)
                self.run(call_node("heartbeat", node, client=client), share)

    @property
    def session_ttl(self) -> float:
        """How long its sessions outlive its last sign of life, in seconds."""
        return self._session_ttl

    def command(self, name: str, frame: list[Buffer], timeout: float | None = None, flags: int = 0) -> bytes:
        """Send a command frame to a group's leader; return the machine's reply. It is sent again after a cut (unless
        `retry` is off): at-least-once, unless it has a session's number."""
        if self._pid != HERE.pid:
            raise elsewhere(self._pid)
        return self._command(name, frame, time.monotonic() + (self.timeout if timeout is None else timeout), flags)

    def _command(self, name: str, frame: list[Buffer], deadline: float, flags: int) -> bytes:
        retry = Retry(deadline, self._chance, False)
        again = self.retry and not flags & wire.REPLY_MODE
        kind = wire.kind_of(flags)
        ambiguous = False
        while True:
            connection = None
            cut = False
            try:
                uid, address = self._leader(name, retry, kind)
                connection = self._take(address, deadline)
                answer = connection.command(uid, frame, deadline, flags)
                cut = answer.was_cut
                if answer.error is None:
                    return answer.result()
                error = answer.error
                if ambiguous and error.code in RENEW:
                    raise expired(name, error.code)
                ambiguous |= cut or isinstance(error, Unknown)
                if ambiguous and not again:
                    raise Unknown(f"{name}: not known whether it happened: {error}")
            except LogyardError as refusal:
                if isinstance(refusal, Unknown):
                    raise
                error = refusal
            finally:
                if connection is not None:
                    self._give(connection, cut)
            try:
                self._stumbled(name, error, retry, cut)
            except LogyardError as last:
                raise outcome(last, ambiguous, name) from last

    def _stumbled(self, group: str, error: LogyardError, retry: Retry, cut: bool) -> None:
        """Wait before the next try, or raise when there is none."""
        if group:
            with self._lock:
                self._routes.stumbled(group, error)
        delay = retry.after(error, cut, time.monotonic())
        if delay:
            # A blocking client has nothing else to do in a back-off.
            threading.Event().wait(delay)
            if time.monotonic() + ATTEMPT_S > retry.deadline:
                # The machine stood still: asked again it could not be answered in time, and nobody knew of what.
                raise error

    def _take(self, address: tuple[str, int], deadline: float) -> Connection:
        with self._lock:
            if self.closed:
                raise LogyardError("the client is closed")
            idle = self._idle.get(address, [])
            while idle:
                connection = idle.pop()
                if connection.alive():
                    return connection
                connection.close()
        try:
            connection = Connection(address, deadline, self._context, self._features)
        except LogyardError:
            with self._lock:
                self._away.add(address)
            raise
        try:
            with self._lock:
                self._away.discard(address)
                self._routes.greeted(connection.channel.hello, address)
        except BaseException:
            connection.close()
            raise
        return connection

    def _give(self, connection: Connection, broken: bool) -> None:
        channel = connection.channel
        # Whoever was interrupted leaves an answer to come, or the rest of a frame to be sent.
        if not (broken or channel.pending or channel.outgoing.size):
            with self._lock:
                idle = self._idle.setdefault(connection.address, [])
                if not self.closed and len(idle) < IDLE_CONNECTIONS:
                    idle.append(connection)
                    return
        elif broken:
            # Its siblings were opened to the same process: a restart has cut them all.
            with self._lock:
                stale = self._idle.pop(connection.address, [])
            for other in stale:
                other.close()
        connection.close()

    def _address(self, call: Call[Any], retry: Retry) -> tuple[str, int]:
        if call.group and not call.pinned:
            return self._leader(call.group, retry, call.kind)[1]
        with self._lock:
            known = [self._routes.addresses[node] for node in call.nodes if node in self._routes.addresses]
        if call.pinned:
            if not known:
                raise LogyardError(f"the address of node {call.nodes[0]} is not known")
            return known[0]
        order = [*known, *(address for address in self._everyone() if address not in known)]
        return order[retry.failures % len(order)]

    def compresses(self, name: str) -> bool | None:
        """Return what a log's option says about compression; None until the log was found."""
        if self._pid != HERE.pid:
            raise elsewhere(self._pid)
        with self._lock:
            return name in self._routes.compressed if name in self._routes.groups else None

    def _hears_of_more(
        self, everyone: Sequence[tuple[str, int]], deadline: float, unheard: Collection[tuple[str, int]] = ()
    ) -> bool:
        """Ask which nodes there are; return whether that is more, less, or elsewhere, than this client knew: those that
        came later have to be asked as well. Whom all others name no more is forgotten, if it is `unheard`."""
        with self._lock:
            before = dict(self._routes.addresses)
            others = self._routes.others(everyone, unheard)
        answers = []
        for address in others:
            try:
                connection = self._take(address, deadline)
            except LogyardError:
                continue
            answer = connection.call("cluster", {}, min(deadline, time.monotonic() + 2.0))
            self._give(connection, answer.was_cut)
            found = answer.value if answer.error is None else None
            if isinstance(found, dict) and isinstance(found.get("nodes"), dict):
                with self._lock:
                    self._routes.told(found["nodes"], found.get("node", 0))
                answers.append(found)
                if not unheard:
                    break
        with self._lock:
            if unheard and len(answers) == len(others):
                for address in self._routes.left(answers, unheard):
                    for connection in self._idle.pop(address, ()):
                        connection.close()
            return self._routes.addresses != before

    def _everyone(self) -> list[tuple[str, int]]:
        with self._lock:
            return list(dict.fromkeys([*self._idle, *self._routes.addresses.values(), *self._routes.seeds]))

    def _leader(self, name: str, retry: Retry, kind: str = "") -> tuple[int, tuple[str, int]]:
        """Return (uid, address) of a group's leader: from the cache, else asked of node after node. Raises
        `WrongKind`, and `BadRequest` for what is no name."""
        with self._lock:
            leader = self._routes.leader(name, kind)
            if leader in self._routes.addresses:
                return self._routes.groups[name][0], self._routes.addresses[leader]
        NAME.check(name)
        unknown = 0
        unheard: list[tuple[str, int]] = []
        everyone = self._everyone()
        self._chance.shuffle(everyone)
        for address in everyone:
            if unheard and time.monotonic() >= retry.deadline:
                # Who is not asked for want of time is nobody that can't be reached.
                break
            try:
                connection = self._take(address, retry.deadline)
            except LogyardError:
                unheard.append(address)
                continue
            deadline = min(retry.deadline, time.monotonic() + 2.0)
            answer = connection.call("locate", {"names": [name]}, deadline)
            if answer.error is None and isinstance(answer.value, list) and self._routes.strange(answer.value):
                others = connection.call("cluster", {}, deadline)
                if isinstance(others.value, dict):
                    self._routes.told(others.value.get("nodes"), others.value.get("node", 0))
            self._give(connection, answer.was_cut)
            if answer.error is not None or not isinstance(answer.value, list):
                if isinstance(answer.error, UnknownGroup):
                    unknown += 1
                else:
                    unheard.append(address)
                continue
            with self._lock:
                self._routes.located(answer.value)
                uid, leader, _ = self._routes.groups.get(name, (0, 0, ())) if answer.value else (0, 0, ())
                if answer.value:
                    self._routes.require(name, kind)
                if leader in self._routes.addresses:
                    return uid, self._routes.addresses[leader]
            unknown += not answer.value
        if unknown and unknown + len(unheard) == len(everyone):
            more = self._hears_of_more(everyone, retry.deadline, unheard)
            if not more and self._routes.is_nowhere(name, unknown, len(unheard)):
                raise not_found(name, unheard)
            if unheard:
                raise NotLeader.told(not_found(name, unheard).message)
        raise NotLeader.told(f"{name}: no leader known")

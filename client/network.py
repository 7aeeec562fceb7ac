"""Routing of the asynchronous client: which node leads a group, a connection to it, and what to do when it dies.

Tasks: one that finds leaders (for all logs together, so that a failover of a thousand logs is a few calls), one clock
(held and late commands, hung connections), two for each connection. None for a log or an append. Called by `aio`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from logyard.protocol.errors import BadRequest, LogyardError, NotLeader, Unknown, WrongKind
from logyard.protocol.frame import Buffer
from logyard.protocol.pending import PendingReply
from logyard.protocol.records import Page
from logyard.protocol.verbs import NAME

from ._async.admin import AdminVerbs
from .admin import Call, T
from .first_of import first_of
from .fork import HERE, elsewhere
from .lane import Lane, Window
from .link import Bell, Dial, Link
from .log import SESSION_TTL_S
from .runtime import Event, Nursery, Runtime, running
from .session import ATTEMPT_S, Pushed, Retry, Routes, backoff, last_of, not_found, outcome, says_more, unreachable
from .session_keeper import SessionKeeper

TIMEOUT_S = 30.0
WINDOW_BYTES = 64 << 20
STALL_S = 10.0
"""A connection with open requests that brought no byte, and took no part of a longer frame, for so long is cut: a
stopped process holds its sockets open."""
LOCATE_S = 2.0
LOCATE_NAMES = 1000
TICK_S = 0.25


class Wanted(PendingReply[None]):
    """Is settled when a group's leader was found. `tasks`: how many wait for that; `lanes`: those that wait as long as
    they have something to send."""

    __slots__ = ("tasks", "lanes")

    def __init__(self) -> None:
        super().__init__()
        self.tasks = 0
        self.lanes: list[Lane] = []

    @property
    def needed(self) -> bool:
        """Somebody still waits."""
        return self.tasks > 0 or any(lane.waiting for lane in self.lanes)


class Network(AdminVerbs):
    """Links, routes and lanes of one client. `aio.Yard` adds the logs."""

    __slots__ = (
        "runtime", "clock", "timeout", "retry", "window", "routes", "chance", "closed", "exactly_once", "sessions",
        "kvs", "dial", "_nursery", "_links", "_down", "_lanes", "_wanted", "_locate_bell", "_lacking", "_clock_bell",
        "_held", "_freed", "_started", "_pid",
    )  # fmt: skip

    def __init__(
        self,
        servers: Sequence[str],
        dial: Dial,
        *,
        timeout: float,
        retry: bool,
        window_bytes: int,
        exactly_once: bool = False,
        session_ttl: float = SESSION_TTL_S,
    ) -> None:
        self.runtime: Runtime = running()
        self._pid = HERE.pid
        self.clock = self.runtime.now
        self.exactly_once = exactly_once
        self.sessions = SessionKeeper(self, session_ttl)
        self.timeout = timeout
        self.dial = dial
        self.retry = retry
        self.window = Window(window_bytes, self._give_back)
        self.routes = Routes(servers)
        self.chance = random.Random()
        self.closed = False
        self.kvs: dict[str, Any] = {}
        self._nursery: Nursery | None = None
        self._links: dict[tuple[str, int], Link] = {}
        self._down: dict[tuple[str, int], tuple[float, int, LogyardError]] = {}
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._wanted: dict[str, Wanted] = {}
        self._locate_bell = Bell(self.runtime)
        # Of groups that no node had that was asked last: who did not answer.
        self._lacking: dict[str, list[tuple[str, int]]] = {}
        self._clock_bell = Bell(self.runtime)
        self._held: set[Lane] = set()
        self._freed = self.runtime.lot()
        self._started = self.runtime.event()

    # The life of the client.

    async def serve(self) -> None:
        """Run all tasks until cancelled. Nothing is answered any more then, so nothing is asked."""
        try:
            async with self.runtime.nursery() as nursery:
                self._nursery = nursery
                self._started.set()
                nursery.start_soon(self._locator)
                nursery.start_soon(self._ticks)
                nursery.start_soon(self.sessions.beat)
        finally:
            self.close()

    async def first_contact(self) -> None:
        """Wait until one of the servers has answered; raise when none does in time."""
        await self._started.wait()
        retry = Retry(self.clock() + self.timeout, self.chance, False)
        while True:
            error = unreachable(self.routes.seeds[0], "no server answers")
            for address in self.routes.seeds:
                try:
                    await self._ready(self._dial(0, address), retry.deadline)
                    return
                except LogyardError as found:
                    error = found
            await self.runtime.sleep(retry.after(error, True, self.clock()))

    def spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task until the client ends; not at all when it did."""
        if self.closed:
            return
        assert self._nursery is not None
        self._nursery.start_soon(task)

    def close(self) -> None:
        """Fail what is unfinished."""
        self.closed = True
        # Nobody looks after their time any more; what is given from now on is refused by `kick`.
        held, self._held = self._held, set()
        for lane in held:
            lane.unmark()
        gone = Unknown("the client was closed before the answer")
        for lane in list(self._lanes.values()):
            lane.give_up(gone)
        for kv in list(self.kvs.values()):
            kv.fail(gone)
        for name in list(self._wanted):
            self._tell(name, gone)
        for link in list(self._links.values()):
            link.fail("the client is closing")
            link.channel.cut(gone)

    def compresses(self, name: str) -> bool | None:
        """Return what a log's option says about compression; None until the log was found."""
        return name in self.routes.compressed if name in self.routes.groups else None

    async def nodes(self) -> list[int]:
        """Return the nodes whose addresses are known. Where one can't be reached the others are asked whether it is
        still one of them."""
        if self._pid != HERE.pid:
            raise elsewhere(self._pid)
        away = [address for address in self.routes.addresses.values() if address in self._down]
        if away and not self.closed:
            await self._hears_of_more(away)
        return sorted(self.routes.addresses)

    async def ask(self, address: tuple[str, int], method: str, arguments: dict[str, object], deadline: float) -> None:
        """Ask one server once; raise what stands in its way."""
        link = await self._ready(self._dial(0, address), deadline)
        await link.call(method, arguments, deadline)

    # Lanes.

    @property
    def lanes(self) -> Iterable[Lane]:
        """All of them."""
        return self._lanes.values()

    def lane(self, name: str, kind: type[Lane] = Lane) -> Lane:
        """Return the pipeline of a group; `kind`: what its machine's commands need."""
        lane = self._lanes.get((name, kind.kind))
        if lane is None:
            if self._pid != HERE.pid:
                raise elsewhere(self._pid)
            lane = self._lanes[name, kind.kind] = kind(
                name, self.window, self.clock, self.kick, self.chance, self.retry, self.exactly_once, self.runtime.event
            )
        return lane

    def kick(self, lane: Lane) -> None:
        """See that what a lane has to send is sent: now, when it is located, or when its hold ends."""
        if lane.dirty or not lane.waiting or (lane.recovering and lane.sent):
            return
        if self.closed:
            lane.fail(LogyardError("the client is closed"))
            return
        if lane.needs_session:
            assert self._nursery is not None
            self.sessions.want(lane, self._nursery)
            return
        if lane.held_until > self.clock():
            lane.mark()
            self._held.add(lane)
            self._clock_bell.ring()
            return
        link = lane.link
        if link is None or link.failure is not None or link.node != lane.leader or not lane.uid:
            link = self._route(lane)
            if link is None:
                return
        link.queue(lane)

    def _route(self, lane: Lane) -> Link | None:
        if lane.leader and lane.uid:
            link = self._link(lane.leader)
            if link is not None:
                lane.reached(link)
                return link
        lane.mark()
        wanted = self._want(lane.name)
        wanted.lanes.append(lane)
        wanted.on_done(lambda: self._routed(lane, wanted.error))
        return None

    def _go_on(self, lane: Lane) -> None:
        """Send what waits in a lane that was held up. What this turn comes too late for is not sent any more: nobody
        could say what became of it; whoever hears so may send anew, in a lane that is still held up."""
        lane.expire(self.clock())
        lane.unmark()
        self.kick(lane)

    def _routed(self, lane: Lane, error: LogyardError | None) -> None:
        if error is not None:
            lane.unmark()
            lane.fail(error)
            return
        try:
            self.routes.require(lane.name, lane.kind)
        except WrongKind as refusal:
            lane.unmark()
            lane.fail(refusal)
            return
        uid, leader, _ = self.routes.groups[lane.name]
        lane.routed(uid, leader)
        self._go_on(lane)

    def _give_back(self) -> None:
        if self._freed:
            self._freed.unpark_all()

    def background(self, task: Callable[[], Any]) -> None:
        """Run a task until it or the client ends."""
        self.spawn(task)

    async def pause(self, seconds: float) -> None:
        """Wait."""
        await self.runtime.sleep(seconds)

    def event(self) -> Event:
        """Make what a task can wait for."""
        return self.runtime.event()

    async def wait_for(self, event: Event, seconds: float) -> None:
        """Wait until it is set, so long at most."""
        with self.runtime.scope(self.runtime.now() + seconds):
            await event.wait()

    async def to_its_end(self, task: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Do something although the caller is cancelled, for so long."""
        with self.runtime.scope(self.runtime.now() + seconds, shield=True):
            await task()

    async def first_of(self, polls: Sequence[Callable[[float], Any]], wait: float) -> tuple[int, Page] | None:
        """Ask all at once; see `first_of`."""
        return await first_of(self.runtime, polls, wait)

    async def freed(self) -> None:
        """Wait until some append is finished."""
        await self._freed.park()

    async def room(self) -> None:
        """Wait for room in the window. Raises `LogyardError` when the client is closed."""
        self._check()
        while self.window.used >= self.window.limit:
            await self._freed.park()
            self._check()

    # Links.

    def _link(self, node: int) -> Link | None:
        """Return a link to a node, open or opening; None while its address is unknown or it was found down just now."""
        address = self.routes.addresses.get(node)
        if address is None:
            return None
        link = self._links.get(address)
        if link is None:
            if address in self._down and self._down[address][0] > self.clock():
                return None
            link = self._dial(node, address)
        return link

    def _dial(self, node: int, address: tuple[str, int]) -> Link:
        link = self._links.get(address)
        if link is None:
            assert self._nursery is not None
            link = self._links[address] = Link(self, node, address)
            self._nursery.start_soon(link.run)
        return link

    async def _ready(self, link: Link, deadline: float) -> Link:
        if not link.opened.is_set():
            with self.runtime.scope(deadline):
                await link.opened.wait()
        if link.failure is not None:
            raise link.failure.again()
        if not link.open:
            raise unreachable(link.address, "no answer in time")
        return link

    def opened(self, link: Link) -> None:
        """Take note that a link greeted its server."""
        self._down.pop(link.address, None)

    def lost(self, link: Link) -> None:
        """Take note that a link died: its requests are cut, its lanes find another way."""
        if self._links.get(link.address) is link:
            del self._links[link.address]
        assert link.failure is not None
        failures = self._down[link.address][1] + 1 if link.address in self._down else 0
        self._down[link.address] = (self.clock() + backoff(failures, self.chance), failures, link.failure)
        lanes = link.unqueue()
        link.channel.cut(link.failure)
        for lane in lanes:
            self.kick(lane)

    # Who leads what.

    def _want(self, name: str) -> Wanted:
        """Have a group's leader found; return what is settled when it is, and can be reached."""
        wanted = self._wanted.get(name)
        if wanted is None:
            wanted = Wanted()
            try:
                # Others are asked for by the same call, which is refused whole.
                NAME.check(name)
            except BadRequest as refusal:
                wanted.fail(refusal)
                return wanted
            self._wanted[name] = wanted
            self._locate_bell.ring()
        return wanted

    def _give_up(self, name: str) -> None:
        """Look no longer for a group's leader if nobody waits for it any more: who asks for what can't be found keeps
        others waiting."""
        wanted = self._wanted.get(name)
        if wanted is not None and not wanted.needed:
            self._tell(name, NotLeader.told(f"{name}: no leader found in time"))

    async def _locator(self) -> None:
        failures = 0
        while True:
            if not self._wanted:
                failures = 0
                await self._locate_bell.wait()
                continue
            before = len(self._wanted)
            await self._locate_round()
            if self._wanted:
                failures = 0 if len(self._wanted) < before else failures + 1
                await self.runtime.sleep(backoff(failures, self.chance))

    async def _locate_round(self) -> None:
        """Ask node after node until every wanted group has a leader that can be reached."""
        names = list(self._wanted)[:LOCATE_NAMES]
        unknown = set(names)
        heard, unheard = 0, []
        for address in self._candidates():
            if not names:
                break
            rows = await self._locate(address, names)
            if rows is None:
                unheard.append(address)
                continue
            heard += 1
            self.routes.located(rows)
            named = {row[0] for row in rows}
            # Whoever else does not have it: a group that one node names is there, with a leader or before it has one.
            unknown -= named
            for name in names:
                if name in named and self._link(self.routes.leader(name)) is not None:
                    self._tell(name, None)
            names = [name for name in names if name in self._wanted]
        for name in names:
            # Others have their turn: more may have no leader than are asked for at once.
            if name in self._wanted:
                self._wanted[name] = self._wanted.pop(name)
        self._lacking = {name: unheard for name in names if name in unknown and unheard}
        lacking = [name for name in names if name in unknown]
        if lacking and heard and not await self._hears_of_more(unheard):
            for name in lacking:
                if self.routes.is_nowhere(name, heard, len(unheard)):
                    self._tell(name, not_found(name, unheard))

    async def _hears_of_more(self, unheard: Sequence[tuple[str, int]] = ()) -> bool:
        """Ask which nodes there are; return whether that is more, less, or elsewhere, than this client knew. Who is to
        say that no node has a group has to ask those that came later as well, and none that was removed: whom all
        others name no more is forgotten, if it is `unheard`."""
        before = dict(self.routes.addresses)
        others = self.routes.others(self._candidates(), unheard)
        answers = []
        for address in others:
            deadline = self.clock() + LOCATE_S
            try:
                link = await self._ready(self._dial(0, address), deadline)
                found, _ = await link.call("cluster", {}, deadline)
            except LogyardError:
                continue
            if isinstance(found, dict) and isinstance(found.get("nodes"), dict):
                self.routes.told(found["nodes"], found.get("node", 0))
                answers.append(found)
                if not unheard:
                    break
        if unheard and len(answers) == len(others):
            self.routes.left(answers, unheard)
        return self.routes.addresses != before

    def _tell(self, name: str, error: LogyardError | None) -> None:
        wanted = self._wanted.pop(name, None)
        if wanted is None:
            return
        if error is None:
            wanted.set(None)
        else:
            wanted.fail(error)

    def _candidates(self) -> list[tuple[str, int]]:
        """Return addresses to ask: open links first, in random order, then the rest."""
        known = list(dict.fromkeys([*self.routes.addresses.values(), *self._unnamed()]))
        self.chance.shuffle(known)
        return sorted(known, key=lambda address: not (address in self._links and self._links[address].open))

    def _unnamed(self) -> list[tuple[str, int]]:
        # A seed may be another name of a known address ("localhost"): ask it only while some node is not known.
        known = self.routes.addresses.values()
        return [seed for seed in self.routes.seeds if seed not in known] if len(known) < len(self.routes.seeds) else []

    async def _locate(self, address: tuple[str, int], names: list[str]) -> list[Any] | None:
        down = self._down.get(address)
        if address not in self._links and down is not None and down[0] > self.clock():
            return None
        deadline = self.clock() + LOCATE_S
        try:
            link = await self._ready(self._dial(0, address), deadline)
            rows, cut = await link.call("locate", {"names": names}, deadline)
            if isinstance(rows, list) and self.routes.strange(rows):
                found, _ = await link.call("cluster", {}, deadline)
                if isinstance(found, dict):
                    self.routes.told(found.get("nodes"), found.get("node", 0))
        except LogyardError:
            return None
        return None if cut or not isinstance(rows, list) else rows

    # Calls.

    async def run(self, call: Call[T], timeout: float | None = None, pushed: Pushed | None = None) -> T:
        """Ask, again where that is allowed, until answered or out of time. Raises a `LogyardError`. `pushed`: see
        `Link.call`."""
        call = self.routes.spread(call, self.chance)
        deadline = self.clock() + (self.timeout if timeout is None else timeout)
        retry = Retry(deadline, self.chance, call.pinned)
        ambiguous = False
        said: LogyardError | None = None
        heard = None if pushed is None else partial(retry.heard, pushed)
        while True:
            reached = False
            try:
                link = await self._target(call, retry)
                reached = True
                value, cut = await link.call(call.method, call.arguments, deadline, heard)
                if not cut:
                    return call.decode(value)
                reached, ambiguous = False, not call.idempotent
                error: LogyardError = unreachable(link.address, f"it closed the connection over {call.method}")
                if not call.idempotent and not self.retry:
                    raise Unknown(f"{call.method}: not known whether it happened: {error}")
            except LogyardError as refusal:
                error = refusal
                if call.idempotent and isinstance(error, Unknown) and says_more(said):
                    # Out of time over asking again.
                    raise said from None
                said = error if reached else said
                ambiguous |= isinstance(error, Unknown) and not call.idempotent
                if ambiguous and not self.retry:
                    raise
            if call.group:
                self.routes.stumbled(call.group, error)
            await self._pause(retry, last_of(error, said), not reached, ambiguous, call.method)

    async def listen(self, call: Call[Any], retry: Retry, pushed: Pushed) -> None:
        """Ask once, for as long as the answer takes, which only says why it is over: raises that."""
        error: LogyardError
        try:
            link = await self._target(call, retry)
            _, cut = await link.call(call.method, call.arguments, math.inf, pushed)
            error = unreachable(link.address, f"it ended {call.method}" if not cut else "it closed the connection")
        except LogyardError as refusal:
            error = refusal
        if call.group:
            self.routes.stumbled(call.group, error)
        raise error

    async def command(self, name: str, frame: list[Buffer], timeout: float | None = None) -> bytes:
        """Send a session's frame to a group's leader; return the machine's reply. Sent again after anything that allows
        it, for it is applied once. Raises a `LogyardError`."""
        deadline = self.clock() + (self.timeout if timeout is None else timeout)
        retry = Retry(deadline, self.chance, False)
        ambiguous = False
        while True:
            reached = False
            try:
                link = await self._leader_link(name, retry)
                reached = True
                value, cut = await link.command(self.routes.groups[name][0], frame, deadline)
                if not cut:
                    reply: bytes = value
                    return reply
                reached, ambiguous = False, True
                error: LogyardError = unreachable(link.address, "it closed the connection over a command")
            except LogyardError as refusal:
                error = refusal
                ambiguous |= isinstance(error, Unknown)
            self.routes.stumbled(name, error)
            await self._pause(retry, error, not reached, ambiguous, name)

    async def _pause(self, retry: Retry, error: LogyardError, cut: bool, ambiguous: bool, name: str) -> None:
        """Wait for the next try; raise `outcome` of the error when there is none."""
        try:
            wait = retry.after(error, cut, self.clock())
        except LogyardError as last:
            raise outcome(last, ambiguous, name) from None
        await self.runtime.sleep(wait)
        if self.clock() + ATTEMPT_S > retry.deadline:
            # The machine stood still: asked again it could not be answered in time, and nobody knew of what.
            raise outcome(error, ambiguous, name)

    async def _target(self, call: Call[T], retry: Retry) -> Link:
        """Return an open link to whom the call is for; raise what stands in the way."""
        self._check()
        if call.group and not call.pinned:
            return await self._leader_link(call.group, retry, call.kind)
        known = [self.routes.addresses[node] for node in call.nodes if node in self.routes.addresses]
        if call.pinned:
            if not known:
                raise LogyardError(f"the address of node {call.nodes[0]} is not known")
            return await self._ready(self._dial(call.nodes[0], known[0]), retry.deadline)
        # Anyone will do, those named first; each failure moves on to the next.
        order = [*known, *(address for address in self._candidates() if address not in known)]
        up = [address for address in order if address not in self._down] or order
        return await self._ready(self._dial(0, up[retry.failures % len(up)]), retry.deadline)

    def _check(self) -> None:
        if self._pid != HERE.pid:
            raise elsewhere(self._pid)
        # Nobody looks for a leader any more, or opens a connection.
        if self.closed:
            raise LogyardError("the client is closed")

    async def _leader_link(self, name: str, retry: Retry, kind: str = "") -> Link:
        self._check()
        leader = self.routes.leader(name, kind)
        link = self._link(leader) if leader else None
        if link is None:
            wanted = self._want(name)
            wanted.tasks += 1
            try:
                with self.runtime.scope(retry.deadline):
                    await wanted.wait(self.runtime.event)
                if not wanted.done:
                    lacking = self._lacking.get(name)
                    raise NotLeader.told(
                        f"{name}: no leader found in time" if lacking is None else not_found(name, lacking).message
                    )
            finally:
                wanted.tasks -= 1
                self._give_up(name)
            self.routes.require(name, kind)
            link = self._link(self.routes.leader(name))
            if link is None:
                raise NotLeader.told(f"{name}: its leader is out of reach")
        return await self._ready(link, retry.deadline)

    # Time.

    async def _ticks(self) -> None:
        """Release held lanes when their time comes; look for what is late or hangs a few times a second."""
        scan = self.clock() + TICK_S
        while True:
            wake = min([scan, *(lane.held_until for lane in self._held)])
            with self.runtime.scope(wake):
                await self._clock_bell.wait()
            now = self.clock()
            for lane in [lane for lane in self._held if lane.held_until <= now]:
                self._held.discard(lane)
                self._go_on(lane)
            if now >= scan:
                scan = now + TICK_S
                # A copy: what is told of its end may make another lane.
                for lane in list(self._lanes.values()):
                    if lane.sent or lane.waiting:
                        lane.expire(now)
                        if lane.dirty and not lane.waiting:
                            self._give_up(lane.name)
                for link in list(self._links.values()):
                    waits = link.open and link.channel.pending and not link.patience
                    if waits and now - link.progress > STALL_S:
                        link.fail(f"no byte for {STALL_S:g} s with requests open")

"""What leaves a leader that is not at hand: entries that left memory, payload bytes that left the cache, and
tombstones for dead ones.

The fast path is a check: everything is in memory and the message goes. The slow path is one task a peer that loads
one message at a time, so a
laggard costs at most one message of memory; while it works for a group, that group's later entries to that peer queue
behind it, in order.
Called in the turn by `ready_loop`.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import trio

from logyard.protocol.errors import Corrupt, Gone, LogyardError

from ..entry import Entry, units_of
from ..raft.messages import SNAPSHOT, Message
from ..raft.progress import Window
from ..raft.state import LEADER
from ..replica.member import Member
from ..replica.reader import Located
from ..types import Buffer

log = logging.getLogger(__name__)

RESUMED_MAX = 64
"""Groups that try again at one answer: the first few fill the window, so a thousand need not be looked at."""


class Reader(Protocol):
    """What the sender needs of the reader."""

    def log_entries(self, member: Member, first: int, last: int, bytes_max: int) -> list[Entry]:
        """Return entries of the log from `first`, at least one."""
        ...

    def payload_entries(self, member: Member, first: int, last: int) -> Iterator[Located]:
        """Yield the entries with payload, and where they are."""
        ...

    async def whole(self, member: Member, located: Sequence[Located]) -> list[tuple[Buffer, ...]]:
        """Return all units of each entry."""
        ...


class Host(NamedTuple):
    """What the sender asks of whoever runs the members, and tells it."""

    send: Callable[[Sequence[Message]], None]
    """Send messages now."""
    transfer: Callable[[Member, int], None]
    """Bring a node up to a snapshot."""
    let_log_go: Callable[[Member, int], Awaitable[None]]
    """Have a snapshot at this entry or above it, and the log below it go now, whoever waits for it."""
    damaged: Callable[[Member, Corrupt], None]
    """A record of a member can't be read."""
    fetch: Callable[[Member, int, int], Awaitable[int]]
    """Have the payloads of entries come from a peer; how many came."""
    holds: Callable[[Entry | None], bool]
    """Return whether an entry's payload is in memory or in a WAL file that is still a home."""
    spawn: Callable[..., None]


class Outbound:
    """Prepares APPENDs for the wire; starts snapshot transfers. `mark` has a member looked at in the next turn, `wake`
    at the next tick as well."""

    def __init__(
        self,
        append_bytes_max: int,
        members: Mapping[int, Member],
        windows: Mapping[int, Window],
        reader: Reader,
        host: Host,
        mark: Callable[[Member], None],
        wake: Callable[[Member], None],
    ) -> None:
        self._append_bytes_max = append_bytes_max
        self._members = members
        self._windows = windows
        self._reader = reader
        self._host = host
        self._mark = mark
        self._wake = wake
        self._queues: dict[int, deque[tuple[Member, Message]]] = {}

    def prepare(self, member: Member, message: Message) -> bool:
        """Return whether `message` can go now; otherwise it goes later from here."""
        if message.kind == SNAPSHOT:
            self._host.transfer(member, message.to)
            return False
        entries = message.entries
        slow = member.slow_sends
        if slow is not None and message.last >= message.first and slow.get(message.to):
            return self._defer(member, message)
        if entries is None:
            return message.last < message.first or self._defer(member, message)
        for entry in entries:
            if entry.bodies is None or entry.tombstone:
                return self._defer(member, message)
        return True

    def resume(self, node: int) -> None:
        """Let groups that wait for room in the window of `node` try again, those that waited longest first. Whoever
        finds it full again waits behind the others."""
        window = self._windows[node]
        waiting = window.waiting
        for uid in list(itertools.islice(waiting, RESUMED_MAX)):
            if window.bytes >= window.limit:
                return
            del waiting[uid]
            member = self._members.get(uid)
            if member is not None and member.raft.role == LEADER:
                member.raft.resume()
                self._mark(member)

    def resume_all(self) -> None:
        """Look, once a tick, for room that no answer made, such as a leadership's end."""
        for node, window in self._windows.items():
            if window.waiting and window.bytes < window.limit:
                self.resume(node)

    def status(self) -> list[dict[str, Any]]:
        """Return a row a follower's node: bytes sent and not acknowledged, groups that wait for room, messages that
        wait for the disk. One that pulls is served only as it answers."""
        return [
            {
                "node": node,
                "inflight_bytes": window.bytes,
                "limit_bytes": window.limit,
                "pulling": bool(window.waiting) or window.bytes >= window.limit,
                "waiting_groups": len(window.waiting),
                "waiting_messages": len(self._queues.get(node, ())),
            }
            for node, window in sorted(self._windows.items())
        ]

    def _defer(self, member: Member, message: Message) -> bool:
        # Loaded when it is its turn: it must not keep in memory what it waits for.
        message.fill(None)
        waiting = member.slow_messages(message.to)
        if not _is_news(member, waiting, message):
            return False
        waiting.append(message)
        queue = self._queues.get(message.to)
        if queue is None:
            queue = self._queues[message.to] = deque()
            self._host.spawn(self._run, message.to, queue)
        queue.append((member, message))
        return False

    async def _run(self, node: int, queue: deque[tuple[Member, Message]]) -> None:
        """Work the queue off and end; the next deferred message starts another."""
        while queue:
            member, message = queue.popleft()
            try:
                if self._is_due(member, message):
                    message.fill(await self._load(member, message))
                    if self._is_due(member, message):
                        self._host.send([message])
            except Gone:
                # A released part of an entry is gone, the rest is not: only a snapshot can say that. With a new one
                # the log below it
                # goes, and the core asks for a transfer when its probe finds nothing.
                await self._let_log_go(member, message.last)
            except (LogyardError, OSError) as error:
                log.warning("group %s: can not send entries to node %d: %s", member.spec.name, node, error)
                if isinstance(error, Corrupt) and message.last > member.raft.commit:
                    self._pass_on(member)
            finally:
                member.sent_slow(node, message)
            await trio.lowlevel.checkpoint()
        if self._queues.get(node) is queue:
            del self._queues[node]

    def _pass_on(self, member: Member) -> None:
        """Let somebody else lead, who has a good copy of what is damaged here, or does without it: of what is not
        committed no peer gives one, and who waits to be mended can't."""
        raft = member.raft
        if raft.role == LEADER and not raft.stopped:
            raft.resign(True)
            self._wake(member)

    def _is_due(self, member: Member, message: Message) -> bool:
        """Return whether a message that waited still is this leader's to send. Not where a snapshot has let the log go
        since: the core learns from the next probe that it needs a transfer."""
        raft = member.raft
        leads = not raft.stopped and raft.role == LEADER and raft.term == message.term
        return leads and message.first >= raft.log.first_index

    async def _load(self, member: Member, message: Message) -> list[Entry]:
        """Return the entries of a message up to the limit of one, or the first alone if that is larger: the core knows
        no sizes of what left memory."""
        entries: list[Entry] = []
        index, room = message.first, self._append_bytes_max
        while index <= message.last and room > 0:
            try:
                found = self._reader.log_entries(member, index, message.last, room)
            except Corrupt as error:
                if any(progress.round for progress in member.raft.progress.values()):
                    # One that is being mended waits for this: without this member, too, nobody could lead. Another one
                    # may have it.
                    self._pass_on(member)
                else:
                    self._host.damaged(member, error)
                raise
            room -= sum(entry.size for entry in found)
            if entries and room < 0:
                # The first of another file, above what is left.
                break
            entries += found
            index = entries[-1].index + 1
        # What is in memory now is held on to before the first await: the cache may let it go meanwhile.
        ready = [entry if entry.tombstone or entry.bodies is None else _held(entry) for entry in entries]
        for position, entry in enumerate(ready):
            if entry.bodies is None or entry.tombstone:
                ready[position] = await self._with_bodies(member, entry)
        return ready

    async def _let_log_go(self, member: Member, index: int) -> None:
        try:
            await self._host.let_log_go(member, index)
        except (LogyardError, OSError) as error:
            log.warning("group %s: no snapshot for a follower: %s", member.spec.name, error)

    async def _with_bodies(self, member: Member, entry: Entry) -> Entry:
        """Return a copy of `entry` that carries its payload, or a tombstone where that is released here (law 4)."""
        copy = _held(entry)
        try:
            located = await self._locate(member, entry.index)
        except Corrupt:
            # A damaged row of what is released is in nobody's way, and no peer has a better one.
            if not member.is_dead(entry):
                raise
            located = None
        if (
            located is not None
            # Where a snapshot of a later leader is just being installed, its payloads are there before its log.
            and (located.index, located.term) == (entry.index, entry.term)
            and (located.home is not None or self._host.holds(located.entry))
        ):
            try:
                copy.bodies = (await self._reader.whole(member, [located]))[0]
                return copy
            except Corrupt as error:
                # Of what is released nobody may have a copy: it travels as a tombstone, or, as a part of an entry
                # that lives, not at all.
                if not member.is_dead(entry):
                    if self._lives(member, entry):
                        raise
                    raise Gone(f"released payloads of entry {entry.index} are damaged here") from error
        # What came as a tombstone is released by an entry that may be above what is applied here. Below its floor a
        # leader sends on: nothing is committed, and so applied, before others have its log.
        copy.tombstone = member.last_release if member.is_dead(entry) else 0
        if not member.resolves:
            copy.tombstone = max(copy.tombstone, entry.tombstone)
        if copy.tombstone:
            copy.bodies = ()
            return copy
        raise LogyardError(f"the payload of entry {entry.index} is neither stored nor released on this node")

    def _lives(self, member: Member, entry: Entry) -> bool:
        """Return whether something of every unit lives, so that a peer gives what is damaged."""
        units = [(unit.number, unit.first_ordinal, unit.records) for unit in units_of(entry.data)]
        return len(member.liveness.live_units(entry.index, units)) == len(units)

    async def _locate(self, member: Member, index: int) -> Located | None:
        """Return where an entry's payload is; a damaged row that should say so comes from a peer first."""
        try:
            return next(self._reader.payload_entries(member, index, index), None)
        except Corrupt:
            if not await self._host.fetch(member, index, index):
                raise
        return next(self._reader.payload_entries(member, index, index), None)


def _is_news(member: Member, waiting: Sequence[Message], message: Message) -> bool:
    """Leave out of a message what waits for the same node in earlier ones; return whether anything is left. The core
    asks anew when answers stay away, and sends all again that nobody has: a disk that is slow would get more and more
    to do."""
    if not waiting:
        return True
    last = waiting[-1]
    if last.term != message.term or not waiting[0].first <= message.first <= last.last:
        return True
    if message.last <= last.last:
        # What it says of the commit index goes with the other.
        last.tell(message.commit)
        return False
    term = member.raft.log.term(last.last)
    if term is not None:
        message.follow(last.last, term)
    return True


def _held(entry: Entry) -> Entry:
    """Copy an entry, with bodies that nobody takes away."""
    return Entry(entry.index, entry.term, entry.kind, entry.data, entry.bodies, entry.body_bytes)

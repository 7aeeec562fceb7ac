"""Watches: the events of a KV machine, by revision, to whoever listens.

The machine's history is the buffer: a listener that is slow is read to later, from where it stands, and costs nothing
meanwhile; when what it needs is compacted it is told so. Events of one revision travel together, in order, without a
gap and without repetition; those of a long one in pushes that follow one another, which its client joins. One task a
listener, none a watch. Used by `verbs`; a listening call is a sink of `door.pushes`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import trio

from logyard.engine.replica.leadership import wait
from logyard.engine.replica.member import Member
from logyard.engine.replica.submit import check_leader
from logyard.engine.types import Buffer
from logyard.machines.kv import KV
from logyard.machines.kv.command import Refusal, end_of, key_of, number
from logyard.machines.kv.history import Events, History
from logyard.protocol.errors import BadRequest, Gone, Refused, UnknownGroup, WrongKind

from ..door.answers import give_back
from .reads import SMALL_BYTES, Place
from .tracks import Found, Track, Tracks, Watch, collect

ALIVE_S = 1.0
"""So often a listener is told how far it is, and looked after."""
WAITING_BYTES_MAX = 4 << 20
"""Nothing is read for a connection that has so much to send."""
PAYLOAD_BYTES_MAX = 8 << 20
"""Of one push; what is beyond that is named only: its client asks for it."""
SCAN_REVISIONS = 5000
"""History looked at in one turn for those who come from behind."""
FIRST_REVISION = 2
"""What the first change makes; an empty group has revision 1."""
WATCHES_MAX = 100_000
"""Of one listener."""


class WatchSink(Protocol):
    """The connection that listens."""

    def push(self, header: Mapping[str, Any], parts: Sequence[Buffer]) -> None:
        """Queue a push."""

    async def room(self, size: int) -> None:
        """Wait until less than `size` bytes wait to be sent."""


class Begun(NamedTuple):
    """A revision that goes in parts: to the watches of a track as it was, `rest` of its events are shown."""

    track: Track
    revision: int
    events: Events
    rest: int


class Stream:
    """One listener and its watches. `stirred`: somebody changed them; `begun`: what comes before anything else."""

    __slots__ = ("name", "tracks", "stirred", "member", "fresh", "closed", "told", "begun")

    def __init__(self, name: str, member: Member) -> None:
        self.name = name
        self.tracks = Tracks()
        self.stirred = False
        self.closed = False
        self.member = member
        # Watches that were not told yet where they begin.
        self.fresh: list[int] = []
        # When its client last heard how far it is.
        self.told = trio.current_time()
        self.begun: Begun | None = None

    def add(self, rows: Sequence[Any]) -> None:
        """Add watches ``[number, key, end, revision or 0: from now on, flags]``. Raises `BadRequest`."""
        state = machine_of(self.member).state
        try:
            found = [
                (Watch(number(which), key_of(key), end_of(end), number(flags)), number(revision))
                for which, key, end, revision, flags in rows
            ]
        except (Refusal, TypeError, ValueError):
            raise BadRequest("a watch is its number, key, end, revision and flags") from None
        if len(self.tracks.place) + len(found) > WATCHES_MAX:
            raise BadRequest(f"one connection has at most {WATCHES_MAX} watches of a group")
        for watch, revision in found:
            self.tracks.add(watch, max(revision, FIRST_REVISION) if revision else state.revision + 1)
            self.fresh.append(watch.number)
        self.stir()

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove watches that nobody wants any more."""
        for one in numbers:
            self.tracks.remove(one)

    def stir(self) -> None:
        """Let the task look again."""
        self.stirred = True
        self.member.wake()

    def change(self, add: Sequence[Any], remove: Sequence[int], close: bool) -> None:
        """Remove watches, and add others; `close`: it ends when its task looks. Raises `BadRequest`."""
        self.closed = self.closed or close
        self.remove(remove)
        self.add(add)

    def read_from(self, member: Member) -> None:
        """Go on with another object of the same group: it slept meanwhile, and has the same revisions."""
        self.member = member

    def look(self) -> None:
        """Begin to look at what there is now."""
        self.stirred = False

    def take_fresh(self) -> list[int]:
        """Return the watches that are told now where they begin."""
        fresh, self.fresh = self.fresh, []
        return fresh

    def go_on(self, begun: Begun | None) -> None:
        """Note the revision of which parts are left, if there is one."""
        self.begun = begun

    def heard(self) -> None:
        """Note that its client hears now how far it is."""
        self.told = trio.current_time()


class Groups(NamedTuple):
    """This node's groups."""

    node_id: int
    find: Callable[[str], Member]
    """A group's member, woken. Raises `UnknownGroup`."""
    has: Callable[[int], bool]
    """Whether a group is here, awake or not."""


Read = Callable[[Member, Iterable[Place]], Awaitable[Mapping[Place, Buffer]]]
"""Gives the bytes of payloads, by place, as many as go together: `reads.KvReads.read`."""


class Watches:
    """The streams of one node, by the number that their client drew."""

    __slots__ = ("_groups", "_read", "streams")

    def __init__(self, groups: Groups, read: Read) -> None:
        self._groups = groups
        self._read = read
        self.streams: dict[int, Stream] = {}

    def change(self, stream: int, add: Sequence[Any], remove: Sequence[int], close: bool = False) -> None:
        """Give a stream more watches, or less, or none for good. Raises `Refused` when it is over."""
        found = self.streams.get(stream)
        if found is None:
            raise Refused("the stream of watches has ended")
        found.change(add, remove, close)

    async def listen(self, name: str, number: int, add: Sequence[Any], local: bool, sink: WatchSink) -> NoReturn:
        """Push what the watches see, until this raises why that is over: `NotLeader` (unless `local`: any member will
        do), `UnknownGroup`, `GroupStopped`."""
        groups = self._groups
        member = groups.find(name)
        if number in self.streams:
            raise BadRequest("a stream of that number is open")
        stream = self.streams[number] = Stream(name, member)
        uid = member.uid
        try:
            stream.add(add)
            # They are not kept as long as the watches last.
            del add
            while not stream.closed:
                if not groups.has(uid):
                    raise UnknownGroup(f"no group {name!r} on node {groups.node_id}", name=name)
                member = groups.find(name)
                stream.read_from(member)
                if not local:
                    check_leader(member)
                await self._step(stream, member, sink)
            raise Refused("its client closed the stream of watches")
        finally:
            del self.streams[number]

    async def _step(self, stream: Stream, member: Member, sink: WatchSink) -> None:
        await sink.room(WAITING_BYTES_MAX)
        state = machine_of(member).state
        stream.look()
        begun = stream.begun
        if begun is not None:
            found = collect(begun.track, [(begun.revision, begun.events)], begun.revision, begun.rest)
            stream.go_on(begun._replace(rest=found.rest) if found.rest else None)
            await self._push(stream, member, found, sink)
            return
        self._greet(stream, state.revision, member.uid, sink)
        at = stream.tracks.lowest()
        if at is not None and at <= state.compacted:
            gone = stream.tracks.drop(at)
            sink.push({"kind": "compacted", "watches": gone, "compacted": state.compacted}, ())
            return
        if at is None or at > state.revision:
            woken = False
            with trio.move_on_after(ALIVE_S):
                await wait(member, lambda: stream.stirred or _newer(member, at))
                woken = True
            if not woken:
                self._tell(stream, at, state.revision, sink)
            return
        above = stream.tracks.above(at)
        end = min(state.revision + 1, at + SCAN_REVISIONS, above if above is not None else at + SCAN_REVISIONS)
        track = stream.tracks.tracks[at]
        found = collect(track, _revisions(state.history, at, end), at)
        if found.rest:
            stream.go_on(Begun(track, found.next, state.history.at(found.next), found.rest))
        # Who joins from here on, to see a revision that goes in parts, sees it from its beginning.
        stream.tracks.move(at, found.next + 1 if found.rest else found.next)
        if found.revisions:
            await self._push(stream, member, found, sink)
        else:
            if trio.current_time() - stream.told >= ALIVE_S:
                # Others write all the time: who sees nothing of it has to know from where to resume.
                self._tell(stream, stream.tracks.lowest(), state.revision, sink)
            await trio.lowlevel.checkpoint()

    async def _push(self, stream: Stream, member: Member, found: Found, sink: WatchSink) -> None:
        stream.heard()
        # A client that was cut in the midst of a revision has not seen it.
        low = found.next if found.rest else stream.tracks.lowest() or 0
        header: dict[str, Any] = {"kind": "events", "low": low}
        try:
            sink.push(*await self._filled(member, found, header))
        except Gone:
            # Compacted while it waited for room: clients ask for what does not come along, and are told so.
            sink.push(*await self._filled(member, found._replace(payloads={}), header))
        give_back()

    def _tell(self, stream: Stream, at: int | None, revision: int, sink: WatchSink) -> None:
        stream.heard()
        sink.push({"kind": "alive", "next": 0 if at is None else at, "revision": revision}, ())

    def _greet(self, stream: Stream, revision: int, uid: int, sink: WatchSink) -> None:
        fresh = stream.take_fresh()
        tracks = stream.tracks
        places = {id(track): at for at, track in tracks.tracks.items()} if fresh else {}
        rows = [(one, places[id(tracks.place[one])]) for one in fresh if one in tracks.place]
        if rows:
            sink.push({"kind": "created", "watches": rows, "revision": revision, "uid": uid}, ())

    async def _filled(
        self, member: Member, found: Found, header: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Buffer]]:
        """Return events as they travel, with the payloads that fit."""
        taken: list[tuple[int, int]] = []
        size = 0
        for place, length in found.payloads.items():
            size += max(length, SMALL_BYTES)
            if size > PAYLOAD_BYTES_MAX and taken:
                break
            taken.append(place)
        bodies = await self._read(member, taken) if taken and member.resolves else {}
        header |= {
            "revisions": found.revisions,
            "next": found.next,
            "places": [(*place, len(body)) for place, body in bodies.items()],
        }
        if found.rest:
            header["rest"] = found.rest
        return header, list(bodies.values())

    async def events(
        self, member: Member, watch: Watch, start: int, wait_s: float, skip: int = 0
    ) -> tuple[dict[str, Any], list[Buffer]]:
        """Return what one watch sees from revision `start` on, for who asks again and again; waits for something to
        see. `skip`: so many of its events were answered already."""
        track = Track()
        track.add(watch)
        at = max(start, FIRST_REVISION) if start else machine_of(member).state.revision + 1
        found = Found([], {}, at)
        with trio.move_on_after(wait_s):
            while True:
                state = machine_of(member).state
                if at <= state.compacted:
                    return {"kind": "compacted", "compacted": state.compacted}, []
                end = min(state.revision + 1, at + SCAN_REVISIONS)
                found = collect(track, _revisions(state.history, at, end), at, skip)
                if found.revisions:
                    break
                at = found.next
                if at > state.revision:
                    await _until_newer(member, at)
                else:
                    await trio.lowlevel.checkpoint()
        # Values are read however long that takes: who asks again would wait for them as long.
        try:
            return await self._filled(member, found, {"kind": "events", "uid": member.uid})
        except Gone:
            compacted = machine_of(member).state.compacted
            if at > compacted:
                raise
            return {"kind": "compacted", "compacted": compacted}, []


def _newer(member: Member, at: int | None) -> bool:
    machine = member.machine
    return at is not None and isinstance(machine, KV) and machine.state.revision >= at


def machine_of(member: Member) -> KV:
    """Return the member's machine, if it is a KV. Raises `WrongKind`, `GroupStopped`."""
    member.check_running()
    if not isinstance(member.machine, KV):
        raise WrongKind(member.spec.name, member.spec.machine, "kv")
    return member.machine


def _revisions(history: History, start: int, end: int) -> Iterator[tuple[int, Events]]:
    return ((revision, history.at(revision)) for revision in range(start, end))


async def _until_newer(member: Member, at: int) -> None:
    await wait(member, lambda: _newer(member, at))

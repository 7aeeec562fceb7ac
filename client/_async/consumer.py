"""Consumers of a topic: `async for record in yard.consume("orders", group="g")`, and consumer groups from outside.

A consumer is a member of a group, and reads the partitions that its coordinator gave it. Invariants: it gives nothing
after half of its time to live without an answered sign of life, so that whoever is given its partitions then reads
alone; what `commit` covers is what the loop came back from, never what was fetched ahead; a partition that is asked
back gives nothing more, and is given up when all that was given of it is committed. Signs of life go on beside the
loop's body (`TopicsYard.background`); everything else happens where the loop asks for the next record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from logyard.protocol.errors import BadRequest, Gone, LogyardError, OutOfRange, SessionExpired, Unknown, UnknownGroup
from logyard.protocol.frame import FRAME_BYTES_MAX
from logyard.protocol.groups import (
    FENCED,
    MACHINE,
    NO_OFFSET,
    TTL_MS_MAX,
    TTL_MS_MIN,
    UNKNOWN_MEMBER,
    Commit,
    Standing,
    beat_command,
    check_group_name,
    coordinator_of,
    coordinators,
    delete_command,
    describe_question,
    join_command,
    leave_command,
    list_question,
    reset_command,
    standing_of,
    unpacked,
)
from logyard.protocol.records import Page, Record
from logyard.protocol.topics import DELETING, MAKING
from logyard.protocol.topics import Topic as Row

from ..log import POLL_BYTES, POLL_RECORDS, latest_call, poll_call
from ..reading import STARTS, Committed, Consumed, Membership, Reading, shape_of
from ..sequences import new_number
from .topics import RESUME_S, Topic, TopicsYard, all_topics, look_up, system_group, unknown_topic, upgraded

TTL_S = 10.0
BEAT_S_MAX = 1.0
"""Signs of life are at least so frequent, so that a rebalance takes no longer."""
WAIT_S = 0.5
"""Where there is nothing to read it is looked so often what the coordinator said."""
REFRESH_S = 5.0
"""So often a member looks whether its topic has new partitions."""
RETIRE_S = 10.0
"""So often a member of each group looks whether partitions that ended were read by all groups."""
POLL_S = 2.0
"""One try to fetch: a partition that nobody leads just now does not keep the others waiting."""
PAGE_BYTES_MIN = 64 << 10
"""Pages that do not arrive in time are asked for in parts down to this, and waited for as long as the yard waits."""
PUT_OFF_S = 5.0
"""So long one that can't be begun with is left alone, for the same reason."""
AWAY_S = 300.0
"""A loop that did not come back for so long is not waited for: its partitions go to others."""
LEAVE_S = 5.0


def passing(error: LogyardError) -> bool:
    """Return whether what is in the way goes by itself."""
    return error.retry != "never" or isinstance(error, Unknown | SessionExpired)


class ConsumersYard(TopicsYard, Protocol):
    """A yard, as consumers need it."""

    @property
    def closed(self) -> bool:
        """Return whether its connections are gone for good."""

    def background(self, task: Callable[[], Any]) -> None:
        """Run something beside the caller until it returns, or the yard ends."""

    async def to_its_end(self, task: Callable[[], Any], seconds: float) -> None:
        """Do something although the caller is cancelled, for so long."""

    async def first_of(self, polls: Sequence[Callable[[float], Any]], wait: float) -> tuple[int, Page] | None:
        """Ask all at once, each with the seconds that it may wait; return which one had records first, and those; None
        when none had in time."""


class GroupConsumer:
    """What `consume` gives: an iterator over records, for one task or thread. Use it in an ``async with`` block (in the
    blocking face ``with``), or `close` it: until then, and at most five minutes after the last record was asked for, it
    keeps its partitions.

    `assignment`: the partitions that it has; `trouble`: what kept it from asking for records when it tried last, which
    it tries again (nobody leads, no node answers), None when it could; with code ``uncommitted`` nothing is in the way
    but that what was given is not committed. It ends by itself with a `LogyardError` of code ``fenced`` when a newer
    process is this `member`, and with ``no_offset`` where `start` is ``error``.
    """

    __slots__ = (
        "yard", "topic", "group", "start", "member", "ttl", "zone", "commit_every", "bodies", "failure", "trouble",
        "closed", "_coordinator", "_row", "_own", "_news", "_given", "_beat_at", "_refresh_at", "_commit_at", "_called",
        "_turn", "_beating", "_max_records", "_max_bytes", "_reading", "_retire_at", "_stale_at", "_knows_ends",
        "_instance",
    )  # fmt: skip

    def __init__(
        self,
        yard: ConsumersYard,
        topic: str,
        group: str,
        start: str,
        member: str,
        ttl: float,
        zone: str,
        commit_every: float | None,
        bodies: bool,
        max_records: int,
        max_bytes: int,
    ) -> None:
        if start not in STARTS:
            raise BadRequest(f"start is one of {', '.join(STARTS)}, not {start!r}")
        if not TTL_MS_MIN <= ttl * 1000 <= TTL_MS_MAX:
            raise BadRequest(f"a time to live is {TTL_MS_MIN // 1000} to {TTL_MS_MAX // 1000} seconds, not {ttl}")
        self.yard = yard
        self.topic = topic
        self.group = check_group_name(group)
        self.start = start
        self.member = member
        self.ttl = ttl
        self.zone = zone
        self.commit_every = commit_every
        self.bodies = bodies
        self.failure: LogyardError | None = None
        self.trouble: LogyardError | None = None
        self.closed = False
        self._max_records, self._max_bytes = max_records, max_bytes
        self._coordinator = coordinator_of(group)
        self._row: Row | None = None
        self._own = Membership()
        # What was answered to signs of life beside the loop, for the loop to take: (member, answer or refusal).
        self._news: deque[tuple[int, Standing | LogyardError]] = deque()
        # The record that the loop has, and of what.
        self._given: tuple[Reading, int] | None = None
        # Whose page is being given.
        self._reading: Reading | None = None
        self._beat_at = self._refresh_at = self._commit_at = self._retire_at = 0.0
        # Since when records come by a layout that the topic's row does not have yet; 0: they do not.
        self._stale_at = 0.0
        self._knows_ends = False
        # The topic and the number with which it asked to join, until that was answered.
        self._instance = 0, 0
        self._called = 0.0
        self._turn = 0
        self._beating = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.yard.to_its_end(self.close, LEAVE_S)

    def __aiter__(self) -> AsyncIterator[Consumed]:
        return self

    @property
    def assignment(self) -> list[int]:
        """The numbers of the partitions that it has."""
        return sorted(one.number for one in self._own.readings.values())

    async def __anext__(self) -> Consumed:
        """Return the next record; waits for one."""
        found = self._at_hand() or await self._next(None)
        if found is None:
            raise StopAsyncIteration
        return found

    async def get(self, wait: float) -> Consumed | None:
        """Return the next record, or None when none comes within `wait` seconds. Asking for it says, as the loop does,
        that the one before is done with."""
        return self._at_hand() or await self._next(self.yard.clock() + wait)

    async def commit(self, record: Consumed | None = None, *, timeout: float | None = None) -> Committed:
        """Commit what the loop came back from: of each partition everything before the record that it has now, and with
        `record` that one as well. Returns, once a quorum knows, the offsets that count, and the partitions that others
        own by now; waits `timeout` seconds for that, by default the client's. Raises a `LogyardError`."""
        self._check()
        over: set[int] = set()
        if record is not None:
            over.add(record.partition)
            for reading in self._own.readings.values():
                if reading.number == record.partition and reading.epoch == record.epoch:
                    reading.finish(record.offset)
                    over.clear()
        commits = self._own.commits()
        done = await self._beat(commits, timeout) if commits else Committed({}, ())
        return done._replace(lost=tuple(sorted({*done.lost, *over})))

    async def close(self, *, leave: bool | None = None) -> None:
        """Stop consuming; nothing is committed by that. `leave`: the partitions go to others at once; by default so,
        unless this is a `member` with a name, whose next process is waited for until its time to live is over."""
        if self.closed:
            return
        self.closed = True
        if self._own.member and (not self.member if leave is None else leave):
            command = leave_command(self.group, self.member, self._own.member)
            try:
                await self.yard.machine(self._coordinator).command(command, timeout=min(LEAVE_S, self.ttl))
            except LogyardError:
                # Its time to live ends by itself.
                pass
        self._own.lose()

    # The loop

    async def _next(self, deadline: float | None) -> Consumed | None:
        self._came_back()
        while True:
            self._check()
            if self.closed:
                return None
            now = self._called = self.yard.clock()
            live = now < self._own.lease
            self._take_news()
            left = WAIT_S if deadline is None else deadline - now
            try:
                if not live or not self._own.member or self._is_due(now) or self._is_behind(now):
                    await self._attend(now)
                    continue
                found = self._ready()
                if found is not None:
                    if await self._is_whole(found):
                        return found
                    continue
                if self._own.confirms():
                    await self._beat([])
                    continue
                if left <= 0:
                    return None
                self.trouble = None if await self._fetch(min(left, WAIT_S)) else self._uncommitted()
            except LogyardError as error:
                # Who can't be reached now may be reached later: nothing is given before.
                if not passing(error):
                    raise
                self.trouble = error
                if left <= 0:
                    return None
                await self.yard.pause(min(left, WAIT_S))

    def _is_due(self, now: float) -> bool:
        """Return whether it is to say that it lives, or to commit: with nothing to commit a moment later, so that a
        commit that is due as soon as the one before it was answered leaves room for records."""
        late = self._commit_at if self._own.commits() else self._commit_at + WAIT_S / 10
        return now >= self._beat_at or now >= late

    def _is_behind(self, now: float) -> bool:
        """Return whether the topic is to be looked at: other beats put off the one that would do it. One that can't be
        looked at now is tried again a little later."""
        if now >= self._refresh_at:
            return True
        behind = self._row is not None and self._own.revision > self._row.revision
        return behind and now >= self._refresh_at - REFRESH_S + self.ttl / 20

    def _at_hand(self) -> Consumed | None:
        """Return the next record of the page that is being given; None where there is none, or something else is
        due: most records need nothing more than this."""
        self._came_back()
        reading, now, own = self._reading, self.yard.clock(), self._own
        if reading is None or self._news or now >= self._beat_at or now >= own.lease or now >= self._commit_at:
            return None
        if reading.revoking or self.closed or self.failure is not None or not own.owns(reading):
            return None
        record = next(reading.records, None)
        if record is None:
            return None
        if record.left_out:
            # Its payload is waited for in the loop.
            reading.put_back(record)
            return None
        self._called = now
        reading.give(record.offset)
        self._given = reading, record.offset
        return Consumed(self.topic, reading.number, reading.epoch, record)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure.again()

    def _came_back(self) -> None:
        if self._given is not None:
            reading, offset = self._given
            reading.finish(offset)
            self._given = None

    def _ready(self) -> Consumed | None:
        """Return a record that was fetched: one partition until it has no more, then the next."""
        readings = self._own.readings
        for reading in readings.values():
            if reading.revoking:
                continue
            record = next(reading.records, None)
            if record is not None:
                self._reading = reading
                reading.give(record.offset)
                self._given = reading, record.offset
                return Consumed(self.topic, reading.number, reading.epoch, record)
        return None

    async def _is_whole(self, found: Consumed) -> bool:
        """Fetch the payload of a record if that was too long for a page; return whether it may still be given then.
        One that is not given, whatever the reason, is fetched again."""
        record: Record = found.record
        if not record.left_out or record.size > FRAME_BYTES_MAX or self._given is None:
            return True
        reading, offset = self._given
        done = False
        try:
            record.fill(await self.yard.log(reading.log).read_body(offset, 0, record.size, uid=reading.uid))
            self._take_news()
            done = self._own.owns(reading) and not reading.revoking and self.yard.clock() < self._own.lease
        except (UnknownGroup, OutOfRange, Gone):
            # Truncated meanwhile, or gone with its log: the next fetch says where it goes on.
            await self._look_again()
        finally:
            if not done:
                self._given = None
                reading.take_back(offset)
        return done

    async def _attend(self, now: float) -> None:
        """Do what is due: join, say that it lives, commit, look for new partitions."""
        if not self._own.member:
            await self._join()
            return
        if self._row is None or now >= self._refresh_at or self._own.revision > self._row.revision:
            await self._refresh(now)
            if not self._own.member:
                # The topic was made anew: it joins for that one.
                return
        commits: list[Commit] = []
        if self.commit_every is not None and now >= self._commit_at:
            commits = self._own.commits()
        if self._commit_at <= now:
            self._commit_at = now + self.commit_every if self.commit_every is not None else float("inf")
        await self._beat(commits)
        if self.commit_every is not None:
            self._commit_at = max(self._commit_at, self.yard.clock())

    async def _fetch(self, wait: float) -> bool:
        """Fetch records of one partition that has some; where none has, wait for whichever is first. Return False when
        there was nothing."""
        readings = [one for one in self._own.readings.values() if not one.revoking]
        now = self.yard.clock()
        for reading in readings:
            if not reading.known and now >= reading.put_off:
                await self._begin(reading)
                return True
        readings = [one for one in readings if one.known and not one.at_rest]
        if not readings:
            await self.yard.pause(min(wait, self.ttl / 20))
            return False
        self._turn += 1
        for at in range(len(readings)):
            reading = readings[(self._turn + at) % len(readings)]
            if await self._poll(reading, 0.0) is not None:
                return True
        found = await self.yard.first_of([partial(self._asked, reading) for reading in readings], wait)
        if found is not None:
            readings[found[0]].fill(found[1])
        return found is not None

    def _uncommitted(self) -> LogyardError | None:
        """Return what the loop has to do where records come only then."""
        numbers = self._own.awaited(self._row) if self.commit_every is None and self._row is not None else []
        if not numbers:
            return None
        return LogyardError(
            f"more of topic {self.topic!r} may be read when consumer group {self.group!r} has committed all that was "
            f"given of partition {', '.join(map(str, numbers))}: commit(record) covers the record in hand, too",
            code="uncommitted",
        )

    async def _poll(self, reading: Reading, wait: float) -> Page | None:
        page = await self._asked(reading, wait)
        if page is not None and len(page):
            reading.fill(page)
            return page
        return None

    async def _asked(self, reading: Reading, wait: float) -> Page | None:
        """Return what comes next of a partition; None where that is not there any more, and it goes on elsewhere."""
        log, asked = self.yard.log(reading.log), self.yard.clock()
        size = max(min(PAGE_BYTES_MIN, self._max_bytes), self._max_bytes >> reading.slow)
        patience = min(POLL_S * 2**reading.slow, max(self.yard.timeout, POLL_S))
        try:
            # Of this very log: one that was made anew under its name is another topic's, which is read from its start.
            call = poll_call(
                reading.log, reading.following, self._max_records, size, wait, None, self.bodies, None,
                uid=reading.uid,
            )  # fmt: skip
            page = await self.yard.run(call, wait + patience)
            if reading.slow and self.yard.clock() - asked - wait < patience / 4:
                # Twice as much in half the time would have come as well.
                reading.hurry()
            if self._row is not None and page.joined > self._row.epoch:
                # Some of these may have to wait for what lies elsewhere, and only the newest row says for what.
                self._stale_at = self._stale_at or self.yard.clock()
                await self._look_again()
                return None
            return page
        except UnknownGroup:
            # A partition that ended and was read, or a topic that was deleted.
            await self._look_again()
            return None
        except (OutOfRange, Gone):
            start, end = await log.latest()
            if start <= reading.following <= end:
                # A member that is behind.
                await self.yard.pause(WAIT_S / 10)
                return None
            if self.start == "error":
                raise
            reading.begin(start if self.start == "earliest" else end)
            return None
        except LogyardError as error:
            late = isinstance(error, Unknown) or "late" in error.details
            if late and (size > PAGE_BYTES_MIN or patience < self.yard.timeout):
                reading.slow_down()
            raise

    async def _look_again(self) -> None:
        """Have the topic be looked at, in a moment."""
        self._refresh_at = self.yard.clock()
        await self.yard.pause(WAIT_S / 10)

    async def _begin(self, reading: Reading) -> None:
        """Find out where to begin with a partition that the group has no offset of, and commit that, so that whoever
        reads it next begins there too."""
        if self.start == "error":
            self.failure = LogyardError(
                f"consumer group {self.group!r} has no offset of partition {reading.number} of topic {self.topic!r}",
                code="no_offset",
            )
            raise self.failure.again()
        try:
            bounds = await self.yard.run(latest_call(reading.log, None, None), POLL_S)
        except UnknownGroup:
            await self._look_again()
            return
        except LogyardError as error:
            if not passing(error):
                raise
            reading.leave_until(self.yard.clock() + PUT_OFF_S)
            return
        offset = bounds.start if self.start == "earliest" else bounds.end
        done = await self._beat([Commit(reading.key, reading.epoch, offset)])
        if reading.number in done.offsets and self._own.owns(reading):
            reading.begin(offset)

    # The coordinator

    async def _join(self) -> None:
        self._row = await self._found()
        if self._row.state == MAKING:
            self._row = await Topic(self.yard, self.topic).finish(self._row)
        shape = shape_of(self._row)
        await self._check_coordinator(shape.is_plain)
        now = self.yard.clock()
        if self._instance[0] != shape.topic:
            # Who asks again because no answer came is the same member.
            self._instance = shape.topic, new_number()
        instance = self._instance[1]
        command = join_command(self.group, self.member, instance, round(self.ttl * 1000), self.zone, [shape])
        try:
            reply = await self.yard.machine(self._coordinator).command(command)
        except UnknownGroup:
            await system_group(self.yard, self._coordinator, MACHINE)
            reply = await self.yard.machine(self._coordinator).command(command)
        standing = standing_of(reply)
        self._instance = 0, 0
        self._own.become(standing.member)
        self._answered(standing, now)
        self._refresh_at = now + REFRESH_S
        self._commit_at = now + self.commit_every if self.commit_every is not None else float("inf")

    async def _found(self, timeout: float | None = None) -> Row:
        """Return the topic's row; one that is being deleted is as good as gone, also if nobody goes on with that."""
        row = await look_up(self.yard, self.topic, timeout)
        if row.state == DELETING:
            raise unknown_topic(self.topic)
        return row

    async def _check_coordinator(self, plain: bool) -> None:
        """Wait until the coordinator knows partitions that end, where it has to. Raises `Refused`."""
        if not plain and not self._knows_ends:
            await coordinator_with_ends(self.yard, self._coordinator)
            self._knows_ends = True

    async def _refresh(self, now: float) -> None:
        """Look whether the topic has other partitions, and tell the coordinator; the group goes on without that."""
        self._refresh_at, told = now + REFRESH_S, self._own.revision
        try:
            row = await self._found(self.ttl / 4)
        except LogyardError as error:
            if error.code == "unknown_topic":
                raise
            return
        if self._row is not None and row.id != self._row.id:
            self._lost()
        row = await self._tended(row, now)
        try:
            await self._check_coordinator(shape_of(row).is_plain)
        except LogyardError:
            # It reads on as far as the row that it has says.
            return
        if self._row is None or row.epoch > self._row.epoch:
            self._stale_at = 0.0
        self._row = row
        self._own.know(row, told)

    async def _tended(self, row: Row, now: float) -> Row:
        """Finish a change of the topic that somebody left half done, and let partitions go that all groups have read;
        one member of each group looks after that. Return the row as it is then."""
        topic = Topic(self.yard, self.topic)
        try:
            if self._stale_at and now - self._stale_at > RESUME_S:
                return await topic.finish(row)
            first = min(one.number for one in row.live)
            if len(row.live) < len(row.partitions) and first in self.assignment and now >= self._retire_at:
                self._retire_at = now + RETIRE_S
                # Records wait meanwhile: what has no leader now is asked again by and by.
                return await topic.retire(row, timeout=POLL_S)
        except LogyardError:
            # It goes on without that, and somebody comes by later.
            pass
        return row

    async def _beat(self, commits: Sequence[Commit], timeout: float | None = None) -> Committed:
        """Say that it lives, with what is committed and what is given up by that."""
        own, row = self._own, self._row
        assert row is not None
        own_before, now = own.member, self.yard.clock()
        # What is given up may be settled by these very commits.
        for one in commits:
            reading = own.readings.get(one.key)
            if reading is not None and reading.epoch == one.epoch and reading.known:
                reading.finish(one.offset - 1)
        after = {one.key: one.offset for one in commits}
        confirms = own.confirms() + [
            (one.key, one.epoch)
            for one in own.readings.values()
            if one.revoking and not one.settled and after.get(one.key) == one.given
        ]
        shapes = [shape_of(row)] if own.revision < row.revision else []
        command = beat_command(self.group, self.member, own.member, own.version, commits, confirms, shapes)
        try:
            standing = standing_of(await self._told(command, timeout))
        except LogyardError as error:
            self._refused(own_before, error)
            return Committed({}, tuple(sorted(one.key[1] for one in commits)))
        # Before what is owned now: it is a commit of what was owned then.
        done = own.counted(commits, standing.refused)
        self._answered(standing, now)
        return done

    async def _told(self, command: bytes, timeout: float | None = None) -> bytes:
        """Tell the coordinator something; said twice it is as said once."""
        try:
            return await self.yard.machine(self._coordinator).command(command, timeout=timeout)
        except SessionExpired:
            return await self.yard.machine(self._coordinator).command(command, timeout=timeout)

    def _answered(self, standing: Standing, asked: float) -> None:
        assert self._row is not None
        self._own.take(standing, self._row)
        self._own.hold(asked + self.ttl / 2)
        self._beat_at = asked + min(self.ttl / 4, BEAT_S_MAX)
        if not self._beating:
            self._beating = True
            self.yard.background(self._beats)

    def _refused(self, member: int, error: LogyardError) -> None:
        """Take a refusal: somebody else has what this member had. Raises what else it is."""
        if member != self._own.member:
            return
        if error.code == UNKNOWN_MEMBER or isinstance(error, UnknownGroup):
            self._lost()
            return
        if error.code == FENCED:
            self.failure = error
            self._own.lose()
        raise error

    def _lost(self) -> None:
        self._own.lose()
        self._given = None

    def _take_news(self) -> None:
        while self._news:
            member, said = self._news.popleft()
            if isinstance(said, Standing):
                if self._row is not None:
                    self._own.take(said, self._row)
            else:
                self._refused(member, said)

    async def _beats(self) -> None:
        """Say that it lives while the loop's body runs: a task, or a thread."""
        period = min(self.ttl / 4, BEAT_S_MAX)
        while not self.closed and self.failure is None and not self.yard.closed:
            await self.yard.pause(period)
            now, own = self.yard.clock(), self._own
            if now - self._called > AWAY_S:
                # A loop that comes back after all has it begin again.
                self._beating = False
                return
            if self.closed or self.yard.closed or not own.member or now < self._beat_at:
                continue
            member = own.member
            command = beat_command(self.group, self.member, member, own.version)
            try:
                reply = await self.yard.machine(self._coordinator).command(command, timeout=self.ttl / 2)
            except LogyardError as error:
                if error.code in (UNKNOWN_MEMBER, FENCED):
                    self._news.append((member, error))
                continue
            standing = standing_of(reply)
            # What it says is there before the lease is, for whoever looks at both.
            self._news.append((member, standing))
            if own.member == member:
                own.hold(now + self.ttl / 2)
                self._beat_at = now + period


async def coordinator_with_ends(yard: TopicsYard, name: str) -> None:
    """Wait until a coordinator is there, and knows partitions that end. Raises `Refused`."""
    try:
        await upgraded(yard, name)
    except UnknownGroup:
        await system_group(yard, name, MACHINE)
        await upgraded(yard, name)


class ConsumerGroup:
    """A consumer group, from outside; nothing is asked until it is used."""

    __slots__ = ("yard", "name")

    def __init__(self, yard: ConsumersYard, name: str) -> None:
        self.yard = yard
        self.name = check_group_name(name)

    async def describe(self) -> dict[str, Any]:
        """Return its members, and of each partition who owns it, how far it was committed, where it ends, and the lag;
        nothing of topics that are deleted, also where another has the name now. Raises a
        `LogyardError` of code ``unknown_consumer_group``."""
        # First: who knows the topics' log is sure of a coordinator that is not there.
        rows = {row.id: row for row in await all_topics(self.yard)}
        found = await self._known()
        partitions = []
        born = {(topic, number): epoch for topic, number, epoch in found.get("born", ())}
        for topic, number, owner, epoch, offset, revoking, _ in found["partitions"]:
            if (row := rows.get(topic)) is None:
                continue
            there = next((one for one in row.readable if one.number == number), None)
            end = (await self.yard.log(there.log).latest()).end if there is not None else None
            if there is not None and there.born != born.get((topic, number), 0):
                # What was committed is of another one that had its number before.
                offset = NO_OFFSET
            partitions.append(
                {
                    "topic": row.name, "partition": number,
                    "owner": owner or None, "epoch": epoch, "offset": offset if offset >= 0 else None, "end": end,
                    "lag": None if end is None or offset < 0 else max(0, end - offset), "revoking": revoking,
                }
            )  # fmt: skip
        members = [
            {"member": number, "name": name, "zone": zone, "ttl": ttl / 1000, "since": since, "partitions": count}
            for number, name, zone, ttl, since, count in found["members"]
        ]
        return {
            "group": self.name, "state": found["state"], "rebalances": found["rebalances"],
            "coordinator": coordinator_of(self.name), "members": members, "partitions": partitions,
        }  # fmt: skip

    async def reset(self, topic: str, to: str | int = "earliest", *, partition: int | None = None) -> dict[int, int]:
        """Have a topic read from elsewhere: ``earliest``, ``latest``, or an offset, of each partition the nearest one
        that it has; return the offsets by partition. Raises a `LogyardError` of code ``group_active`` while it has
        members."""
        if to < 0 if isinstance(to, int) else to not in ("earliest", "latest"):
            raise BadRequest(f"a group is reset to earliest, latest or an offset, not to {to!r}")
        row = await look_up(self.yard, topic)
        chosen = [one for one in row.readable if partition is None or one.number == partition]
        if not chosen:
            raise BadRequest(f"topic {topic!r} has no partition {partition}")
        offsets = {}
        for one in chosen:
            start, end = await self.yard.log(one.log).latest()
            if isinstance(to, int):
                # Behind the end nothing would be committed before the partition came to there.
                offsets[one.number] = min(max(to, start), end)
            else:
                offsets[one.number] = start if to == "earliest" else end
        command = reset_command(self.name, [((row.id, one.number), offsets[one.number], one.born) for one in chosen])
        coordinator = coordinator_of(self.name)
        if any(one.born for one in chosen):
            await coordinator_with_ends(self.yard, coordinator)
        try:
            await self.yard.machine(coordinator).command(command)
        except UnknownGroup:
            await system_group(self.yard, coordinator, MACHINE)
            await self.yard.machine(coordinator).command(command)
        return offsets

    async def delete(self) -> None:
        """Forget it and its offsets. Raises a `LogyardError` of code ``group_active`` while it has members."""
        try:
            await self.yard.machine(coordinator_of(self.name)).command(delete_command(self.name))
        except UnknownGroup:
            raise self._unknown() from None

    async def _known(self) -> Any:
        try:
            question = describe_question(self.name)
            reply = await self.yard.machine(coordinator_of(self.name)).query(question, consistency="linearizable")
        except UnknownGroup:
            raise self._unknown() from None
        return unpacked(reply)

    def _unknown(self) -> LogyardError:
        return LogyardError(f"there is no consumer group {self.name!r}", code="unknown_consumer_group")


async def all_groups(yard: ConsumersYard) -> list[dict[str, Any]]:
    """Return a row of each consumer group."""
    found = []
    # First: who knows the topics' log is sure of coordinators that are not there.
    await all_topics(yard)
    for name in coordinators():
        try:
            rows = unpacked(await yard.machine(name).query(list_question()))
        except UnknownGroup:
            continue
        found += [
            {"group": group, "members": members, "partitions": partitions, "rebalances": rebalances,
             "coordinator": name}
            for group, members, partitions, rebalances in rows
        ]  # fmt: skip
    return sorted(found, key=lambda row: str(row["group"]))


class TopicVerbs:
    """What a yard has for topics. Mixed into `network.Network`'s and `sync`'s yards, and `service.embedded`'s."""

    __slots__ = ()

    def topic(self: ConsumersYard, name: str) -> Topic:
        """Return the topic `name`; nothing is asked until it is used."""
        return Topic(self, name)

    async def topics(self: ConsumersYard) -> list[Row]:
        """List all topics, by name."""
        return await all_topics(self)

    def consume(
        self: ConsumersYard,
        topic: str,
        *,
        group: str,
        start: str = "earliest",
        member: str = "",
        ttl: float = TTL_S,
        zone: str = "",
        commit_every: float | None = None,
        bodies: bool = True,
        max_records: int = POLL_RECORDS,
        max_bytes: int = POLL_BYTES,
    ) -> GroupConsumer:
        """Read a topic as a member of a consumer group: ``async with yard.consume("orders", group="g") as records``,
        then ``async for record in records`` and ``await records.commit(record)``.

        `start`: where to begin with a partition that the group has no offset of, or whose records there were truncated:
        ``earliest``, ``latest``, or ``error``; partitions that are added later are read from their start. `member`: a
        name that is the same in the next process, which then takes over at once what this one had. `ttl` (seconds): a
        member that was silent for so long is given up. `zone`: where this is, for partitions that are led there.
        `commit_every` (seconds): the loop commits by itself what it came back from; without it `commit` does.
        """
        return GroupConsumer(
            self, topic, group, start, member, ttl, zone, commit_every, bodies, max_records, max_bytes
        )  # fmt: skip

    def consumer_group(self: ConsumersYard, name: str) -> ConsumerGroup:
        """Return the consumer group `name`, from outside; nothing is asked until it is used."""
        return ConsumerGroup(self, name)

    async def consumer_groups(self: ConsumersYard) -> list[dict[str, Any]]:
        """List all consumer groups: ``{group, members, partitions, rebalances, coordinator}`` of each."""
        return await all_groups(self)

"""What leaves a leader and is not at hand, alone: what waits for the disk waits once, in order, and may be void by
then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.engine.entry import Entry, build_commands
from logyard.engine.host.outbound import Host, Outbound
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.engine.raft.messages import APPEND, SNAPSHOT, Message
from logyard.engine.raft.progress import Window
from logyard.engine.replica.member import Member
from logyard.engine.replica.reader import Located
from logyard.protocol.errors import Corrupt, Gone, LogyardError
from logyard.protocol.frame import encode_frame

UID = 7


def entry(index: int, bodies: bool = True) -> Entry:
    frame = memoryview(b"".join(encode_frame([(b"", b"payload of %d" % index)], command=b"")))
    made = build_commands(UID, index, 2, 0, [frame])
    return made if bodies else Entry(index, 2, made.kind, made.data, None, made.body_bytes)


class Rig:
    """What a leader sends; its disk answers when `disk` is set, with `error` if there is one."""

    def __init__(self, append_bytes_max: int = 1 << 20) -> None:
        self.sent: list[tuple[int, int, int]] = []
        self.events: list[Any] = []
        self.disk = trio.Event()
        self.error: LogyardError | None = None
        self.released: set[int] = set()
        self.file_last = 0
        log = SimpleNamespace(first_index=1, term=lambda index: 2)
        self.member: Any = cast(
            Any,
            SimpleNamespace(
                uid=UID, spec=SimpleNamespace(name="log"), slow_sends=None, last_release=9, resolves=True,
                slow_messages=lambda node: Member.slow_messages(self.member, node),
                sent_slow=lambda node, message: Member.sent_slow(self.member, node, message),
                is_dead=lambda one: one.index in self.released,
                liveness=SimpleNamespace(live_units=lambda index, units: {number for number, _, _ in units}),
                raft=SimpleNamespace(
                    role=LEADER, stopped=False, term=2, log=log, progress={}, commit=100,
                    resume=lambda: self.events.append("looks again"),
                ),
            ),
        )  # fmt: skip
        host = Host(
            lambda messages: self.sent.extend((one.to, one.first, one.last) for one in messages),
            lambda member, node: self.events.append(("transfer", node)), self.let_log_go,
            lambda member, error: self.events.append("damaged"), self.fetch, lambda one: True, self.spawn,
        )  # fmt: skip
        self.windows = {2: Window(1000)}
        self.outbound = Outbound(
            append_bytes_max, {UID: self.member}, self.windows, cast(Any, self), host,
            lambda member: self.events.append("marked"), lambda member: self.events.append("woken"),
        )  # fmt: skip
        self.nursery: trio.Nursery

    @property
    def slow(self) -> dict[int, list[Message]] | None:
        found: dict[int, list[Message]] | None = self.member.slow_sends
        return found

    def spawn(self, task: Callable[..., Any], *arguments: Any) -> None:
        self.nursery.start_soon(task, *arguments)

    async def let_log_go(self, member: Any, index: int) -> None:
        self.events.append(("log goes", index))

    async def fetch(self, member: Any, first: int, last: int) -> int:
        return 0

    def message(self, first: int, last: int, term: int = 2, bodies: bool = False) -> Message:
        entries = [entry(index, bodies) for index in range(first, last + 1)]
        return Message(APPEND, UID, 2, 1, term, first - 1, 2, entries=entries, first=first, last=last)

    # The reader

    def log_entries(self, member: Any, first: int, last: int, bytes_max: int) -> list[Entry]:
        last = self.file_last if first <= self.file_last else last
        count = max(1, bytes_max // entry(first).size)
        return [entry(index, bodies=False) for index in range(first, min(last, first + count - 1) + 1)]

    def payload_entries(self, member: Any, first: int, last: int) -> Iterator[Located]:
        found = entry(first)
        yield Located(first, 2, found.data, found, None)

    async def whole(self, member: Any, located: Sequence[Located]) -> list[tuple[Any, ...]]:
        await self.disk.wait()
        if self.error is not None:
            raise self.error
        return [tuple(one.entry.bodies or ()) for one in located if one.entry is not None]


async def test_what_is_in_memory_goes_at_once() -> None:
    rig = Rig()
    assert rig.outbound.prepare(rig.member, rig.message(1, 3, bodies=True))
    assert rig.outbound.prepare(rig.member, Message(APPEND, UID, 2, 1, 2, first=4, last=3))
    assert not rig.outbound.prepare(rig.member, Message(SNAPSHOT, UID, 2, 1, 2))
    assert rig.events == [("transfer", 2)] and not rig.sent


async def test_what_waits_for_the_disk_waits_once_and_keeps_its_order() -> None:
    rig = Rig()
    async with trio.open_nursery() as rig.nursery:
        for first, last in [(1, 3), (1, 3), (1, 5), (1, 5)]:
            assert not rig.outbound.prepare(rig.member, rig.message(first, last))
        # Behind what waits, though it is at hand.
        assert not rig.outbound.prepare(rig.member, rig.message(6, 6, bodies=True))
        await trio.testing.wait_all_tasks_blocked()
        (row,) = rig.outbound.status()
        assert row["waiting_messages"] == 2 and not rig.sent
        rig.disk.set()
    assert rig.sent == [(2, 1, 3), (2, 4, 5), (2, 6, 6)] and rig.slow is None


@pytest.mark.parametrize(
    ("room", "file_last", "last"), [(2.0, 0, 2), (0.5, 0, 1), (2.5, 1, 2), (1.5, 1, 1)],
    ids=["two", "one above the limit", "of two files", "one above the rest"],
)  # fmt: skip
async def test_a_message_carries_no_more_than_its_limit_or_one_entry(room: float, file_last: int, last: int) -> None:
    """The core knows a mean size at best of what left memory: thousands of larger entries were one message, above what
    a frame may be, and the link was reset again and again."""
    rig = Rig(int(room * entry(1).size))
    rig.file_last = file_last
    rig.disk.set()
    message = rig.message(1, 5)
    async with trio.open_nursery() as rig.nursery:
        assert not rig.outbound.prepare(rig.member, message)
    assert rig.sent == [(2, 1, last)] and rig.slow is None
    assert message.entries is not None and [one.index for one in message.entries] == list(range(1, last + 1))


@pytest.mark.parametrize("what", ["term", "log", "stopped"])
async def test_what_is_void_by_then_is_not_sent(what: str) -> None:
    rig = Rig()
    async with trio.open_nursery() as rig.nursery:
        assert not rig.outbound.prepare(rig.member, rig.message(1, 3))
        rig.disk.set()
        if what == "term":
            rig.member.raft.term = 3
        elif what == "log":
            rig.member.raft.log.first_index = 2
        else:
            rig.member.raft.stopped = True
    assert not rig.sent and not rig.events and rig.slow is None


async def test_who_stops_leading_while_it_loads_sends_no_more() -> None:
    """Behind its farewell a follower took it for word of a leader, and waited for it for good."""
    rig = Rig()
    async with trio.open_nursery() as rig.nursery:
        assert not rig.outbound.prepare(rig.member, rig.message(1, 3))
        await trio.testing.wait_all_tasks_blocked()
        rig.member.raft.role = FOLLOWER
        rig.disk.set()
    assert not rig.sent and not rig.events and rig.slow is None


@pytest.mark.parametrize("released", [True, False])
async def test_a_released_payload_is_a_tombstone_and_a_damaged_one_is_not_sent(released: bool) -> None:
    rig = Rig()
    rig.error = Corrupt("generation", 0, "it", "rot")
    rig.released = {2} if released else set()
    rig.disk.set()
    message = rig.message(2, 2)
    async with trio.open_nursery() as rig.nursery:
        assert not rig.outbound.prepare(rig.member, message)
    assert rig.sent == ([(2, 2, 2)] if released else []) and rig.slow is None
    if released:
        assert message.entries is not None and message.entries[0].tombstone == 9


async def test_bytes_of_a_later_term_that_a_snapshot_brought_are_not_sent_for_an_entry_of_this_one() -> None:
    """A leader that was cut off got a later leader's payloads, and its log does not start over yet: a codec's assertion
    ended the node."""
    rig = Rig()
    rig.disk.set()
    later = entry(1)
    rig.payload_entries = lambda member, first, last: iter([Located(1, 3, later.data, later, None)])  # type: ignore[method-assign]
    async with trio.open_nursery() as rig.nursery:
        rig.outbound.prepare(rig.member, rig.message(1, 1))
    assert not rig.sent and not rig.events and rig.slow is None


async def test_where_no_tombstone_says_it_the_log_goes_and_a_snapshot_comes() -> None:
    rig = Rig()
    rig.error = Corrupt("generation", 0, "it", "rot")
    # One of its units is released, the other one lives.
    rig.member.liveness.live_units = lambda index, units: set()
    rig.disk.set()
    async with trio.open_nursery() as rig.nursery:
        assert not rig.outbound.prepare(rig.member, rig.message(2, 2))
    assert rig.events == [("log goes", 2)] and not rig.sent
    rig.error = Gone("it is")


def test_room_wakes_those_that_waited_longest_until_it_is_full_again() -> None:
    rig = Rig()
    window = rig.windows[2]
    window.waiting[UID] = None
    window.bytes = window.limit
    rig.outbound.resume(2)
    assert not rig.events and UID in window.waiting
    window.bytes = 0
    rig.outbound.resume_all()
    assert rig.events == ["looks again", "marked"] and not window.waiting

"""The window that all groups of a node share towards one follower's node: exact, whatever becomes of what was sent."""

from __future__ import annotations

import pytest

from logyard.engine.raft.core import Change, Limits, Raft
from logyard.engine.raft.messages import APPEND, APPEND_REPLY, Message
from logyard.engine.raft.progress import PROBE, REPLICATE, Progress, Window
from logyard.protocol.errors import Busy

from .network import UID, Network, command, drain
from .test_pitfalls_protocol import ack, leading

LIMITS = Limits(follower_bytes=1000, append_bytes=300)


def fed(limits: Limits = LIMITS) -> Raft:
    """A leader whose followers are up to date."""
    raft = leading(limits=limits)
    ack(raft, 2)
    ack(raft, 3)
    drain(raft)
    ack(raft, 2, raft.log.last_index)
    ack(raft, 3, raft.log.last_index)
    drain(raft)
    return raft


def held(raft: Raft, stable: int, last: int) -> None:
    """Node 3 holds everything up to `last`, and has synced it up to `stable`."""
    raft.step(Message(APPEND_REPLY, UID, 1, 3, raft.term, stable, last=last, commit=raft.commit))


def push(raft: Raft, count: int, size: int = 150) -> list[Message]:
    """Propose entries of about `size` bytes; what goes to node 3."""
    for _ in range(count):
        raft.propose(command(raft.log.last_index + 1, raft.term, bytes(size)))
    return [m for m in drain(raft) if m.to == 3 and m.kind == APPEND]


def test_a_full_window_stops_the_group_and_says_who_waits() -> None:
    raft = fed()
    window = raft.windows[3]
    assert window.bytes == 0 and window.limit == 1000
    push(raft, 20)
    # Above the limit by less than one message.
    assert 1000 <= window.bytes < 1000 + 300
    assert list(window.waiting) == [raft.uid] and raft.progress[3].next <= raft.log.last_index
    # Another group's bytes count as well: nothing is sent although this group has nothing under way.
    ack(raft, 3, raft.progress[3].next - 1)
    window.waiting.clear()
    other = Progress(1, window)
    other.take(1, 5000)
    raft.dirty = True
    before = raft.progress[3].next
    assert [m for m in drain(raft) if m.to == 3 and m.entries] == [] and raft.progress[3].next == before
    assert list(window.waiting) == [raft.uid]
    other.free(1)
    raft.dirty = True
    assert [m for m in drain(raft) if m.to == 3 and m.entries]


def test_what_a_silent_follower_holds_is_counted_until_it_is_acknowledged() -> None:
    """Found with a hanging disk: each probe emptied the books, and the follower was sent a window more."""
    raft = fed()
    window, progress = raft.windows[3], raft.progress[3]
    push(raft, 20)
    full, sent, match = window.bytes, progress.next - 1, progress.match
    for _ in range(5):
        for _ in range(raft.limits.probe_ticks):
            raft.tick()
        assert progress.state == PROBE and window.bytes == full
        assert not [m for m in drain(raft) if m.to == 3 and m.entries]
        # It has everything, and has not synced any of it.
        held(raft, match, sent)
        assert progress.state == REPLICATE and window.bytes == full
        assert not [m for m in drain(raft) if m.to == 3 and m.entries]
    held(raft, sent, sent)
    assert window.bytes == 0
    assert next(m.first for m in drain(raft) if m.to == 3 and m.entries) == sent + 1


def test_a_probe_without_room_carries_nothing() -> None:
    raft = fed()
    window, progress = raft.windows[3], raft.progress[3]
    push(raft, 3)
    other = Progress(1, window)
    other.take(1, 5000)
    raft.on_link_reset(3)
    assert window.bytes == 5000
    (probe,) = [m for m in drain(raft) if m.to == 3]
    assert not probe.entries and progress.probed == 0
    raft.on_link_reset(3)
    other.free(1)
    (probe,) = [m for m in drain(raft) if m.to == 3]
    assert probe.entries and window.bytes == progress.probed == sum(entry.size for entry in probe.entries)
    raft.on_link_reset(3)
    assert window.bytes == 0


def test_the_end_of_a_leadership_or_of_a_member_gives_its_bytes_back() -> None:
    raft = fed()
    push(raft, 20)
    raft.stop()
    assert [window.bytes for window in raft.windows.values()] == [0, 0]
    raft = fed()
    push(raft, 1)
    ack(raft, 2, raft.log.last_index)
    assert raft.windows[3].bytes
    raft.propose_membership(Change("remove", 3))
    drain(raft)
    assert raft.windows[3].bytes == 0 and raft.windows[2].bytes


def test_a_group_behind_a_small_window_catches_up() -> None:
    network = Network(3, limits=Limits(follower_bytes=500, append_bytes=100))
    network.elect(1)
    for _ in range(50):
        network.hosts[1].propose(b"x" * 90)
        network.drain()
    assert [len(state) for state in network.states()] == [50, 50, 50]
    assert all(not window.bytes for window in network.hosts[1].raft.windows.values())


def test_the_books_of_a_window_are_the_sum_of_its_groups() -> None:
    window = Window(100)
    one, two = Progress(1, window), Progress(1, window)
    one.take(3, 30)
    one.take(5, 20)
    two.take(9, 40)
    assert window.bytes == 90
    one.free(4)
    assert window.bytes == one.inflight_bytes + two.inflight_bytes == 60
    one.probe(4, hollow=True)
    assert window.bytes == 60 and one.probed == 20
    one.probe(4)
    assert window.bytes == 40 and one.probed == 0
    two.replicate(10)
    assert window.bytes == 40
    two.forget()
    assert window.bytes == 0


def test_what_frees_space_has_a_reserve_of_uncommitted_bytes() -> None:
    raft = leading(limits=Limits(uncommitted_bytes=1000, uncommitted_reserve=300))
    raft.propose(command(raft.log.last_index + 1, raft.term, bytes(800)))
    entry = command(raft.log.last_index + 1, raft.term, bytes(150))
    with pytest.raises(Busy, match="uncommitted"):
        raft.propose(entry)
    raft.propose(entry, urgent=True)
    with pytest.raises(Busy, match="uncommitted"):
        raft.propose(command(raft.log.last_index + 1, raft.term, bytes(300)), urgent=True)
    # All of the reserve, and not a byte more.
    index, left = raft.log.last_index + 1, 1300 - raft.uncommitted_bytes
    empty = command(index, raft.term, b"")
    exact = left - len(empty.data) - empty.body_bytes
    with pytest.raises(Busy, match="uncommitted"):
        raft.propose(command(index, raft.term, bytes(exact + 1)), urgent=True)
    raft.propose(command(index, raft.term, bytes(exact)), urgent=True)
    assert raft.uncommitted_bytes == 1300

"""What an append log gives up, and when: whole stretches, never a record that a limit covers; alike on every member."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.engine.machine import Context, Frame, Position, Reject, Release, Timer
from logyard.machines.log.command import APPEND, TRUNCATE_REPLY, retain_command, truncate_command
from logyard.machines.log.machine import ANCHOR_BYTES, AppendLog
from logyard.machines.log.retention import TIMER
from logyard.protocol.frame import UNIFORM

MINUTE = 60_000


class Run:
    """A log of version 2 on which time passes: `records` has (index, stamp, size) of every record that was appended."""

    def __init__(self, version: int = 2) -> None:
        self.log = AppendLog()
        self.version = version
        if version == 2:
            self.log.upgrade(1, 2)
        self.index = 0
        self.now = 1_000_000
        self.records: list[tuple[int, int, int]] = []
        self.timer: int | None = None
        self.released: list[Release] = []

    def apply(self, *frames: Frame) -> list[bytes | Reject]:
        self.index += 1
        batch = self.log.apply_batch(Context(1, self.index, 1, self.now, self.version, len(frames)), frames)
        self.take(batch.effects)
        return list(batch.replies)

    def take(self, effects: Any) -> None:
        for effect in effects:
            if isinstance(effect, Timer):
                assert effect.name == TIMER
                self.timer = effect.due_ms
            else:
                assert isinstance(effect, Release)
                self.released.append(effect)

    def append(self, size: int = 100) -> None:
        self.apply(Frame(UNIFORM, 0, 1, 1, size, 0, 0, 0, APPEND))
        self.records.append((self.index, self.now, size))

    def retain(self, ms: int = 0, size: int = 0, records: int = 0) -> bytes | Reject:
        command = retain_command(ms, size, records)
        (reply,) = self.apply(Frame(UNIFORM, 0, 1, len(command), 8, 0, 0, 0, command))
        return reply

    def wait(self, ms: int) -> int:
        """Let time pass; how often the timer rang."""
        rang, until = 0, self.now + ms
        while self.timer is not None and self.timer <= until:
            self.now, self.timer = max(self.now, self.timer), None
            self.index += 1
            self.take(self.log.on_timer(Context(1, self.index, 1, self.now, 2), TIMER).effects)
            rang += 1
        self.now = until
        return rang

    def check(self, ms: int, size: int, records: int) -> None:
        """Nothing went that all of the limits cover, and what is left is little more than that."""
        gone, kept = self.records[: self.log.start], self.records[self.log.start :]
        assert self.log.end == len(self.records)
        for number, (_, stamp, _) in enumerate(gone):
            behind = self.records[number + 1 :]
            covered = (
                (ms and self.now - stamp <= ms)
                or (size and sum(one for _, _, one in behind) < size)
                or (records and len(behind) < records)
            )
            limits = [bool(ms), bool(size), bool(records)]
            if sum(limits) == 1:
                assert not covered, (number, stamp, self.now)
        if records:
            assert len(kept) <= records + records // 8 + 2
        if size:
            assert sum(one for _, _, one in kept) <= size + size // 8 + 2 * max(
                (one for _, _, one in self.records), default=0
            )
        # The first kept record lies where the machine says, and all before it is released.
        if kept:
            assert self.log.start_position <= Position(kept[0][0], 0)
            assert self.log.anchor(self.log.start)[1] == self.log.start_position


def test_records_grow_old_while_others_come() -> None:
    run = Run()
    assert run.retain(ms=10 * MINUTE) == TRUNCATE_REPLY.pack(0)
    for _ in range(100):
        run.append()
        run.now += MINUTE
        run.check(10 * MINUTE, 0, 0)
    oldest = run.records[run.log.start][1]
    assert 10 * MINUTE <= run.now - oldest <= 12 * MINUTE + MINUTE


def test_an_idle_log_empties_itself() -> None:
    run = Run()
    run.retain(ms=10 * MINUTE)
    for _ in range(20):
        run.append()
        run.now += 10_000
    end = run.log.end
    assert run.wait(9 * MINUTE) <= 12 and run.log.start < end
    run.wait(2 * MINUTE)
    assert run.log.start == run.log.end == end and run.timer is None, "nothing waits for an empty log"
    assert run.wait(100 * MINUTE) == 0
    run.append()
    assert run.timer is not None and run.log.anchor(end)[0] == end


@pytest.mark.long
def test_the_newest_bytes_and_the_newest_records_stay() -> None:
    run = Run()
    run.retain(size=10_000)
    for _ in range(1000):
        run.append(100)
        run.check(0, 10_000, 0)
    assert 100 <= run.log.end - run.log.start <= 115
    run = Run()
    run.retain(records=50)
    for _ in range(1000):
        run.append(3)
        run.check(0, 0, 50)
    assert 50 <= run.log.end - run.log.start <= 58


def test_whatever_any_limit_gives_up_goes() -> None:
    run = Run()
    run.retain(ms=10 * MINUTE, records=1000)
    for _ in range(100):
        run.append()
    run.wait(11 * MINUTE)
    assert run.log.start == 100


def test_limits_can_be_changed_and_taken_away() -> None:
    run = Run()
    for _ in range(40):
        run.append()
        run.now += MINUTE
    assert run.timer is None and run.log.start == 0
    run.retain(ms=5 * MINUTE)
    # One stretch that began before there was a limit: it goes when its last record does.
    assert run.log.start == 0 and run.timer is not None
    run.retain()
    assert run.timer is None and run.wait(100 * MINUTE) == 0 and run.log.start == 0
    run.retain(records=10)
    assert run.log.start == 0
    for _ in range(20):
        run.append()
    assert run.log.end - run.log.start < 20
    assert msgpack.unpackb(run.log.query(msgpack.packb(["retention"]))) == [0, 0, 10]


@pytest.mark.parametrize("ms", [1, 999, (1 << 50) + 1, (1 << 64) - 1])
def test_an_age_that_makes_no_sense_is_refused(ms: int) -> None:
    run = Run()
    run.append()
    reply = run.retain(ms=ms)
    assert isinstance(reply, Reject) and reply.code == "bad_request" and run.timer is None


def test_the_largest_limits_can_be_stored() -> None:
    run = Run()
    run.append()
    run.retain(ms=1 << 50, size=(1 << 64) - 1, records=(1 << 64) - 1)
    copy = AppendLog()
    copy.restore(run.log.snapshot())
    assert copy.snapshot() == run.log.snapshot() and run.timer == run.now + (1 << 50) + 1


def test_version_1_knows_no_limits() -> None:
    run = Run(version=1)
    reply = run.retain(records=1)
    assert isinstance(reply, Reject) and reply.code == "bad_request" and run.log.holes


def test_what_an_older_version_wrote_counts_as_new() -> None:
    run = Run(version=1)
    for _ in range(5):
        run.append(ANCHOR_BYTES)
    before = run.log.snapshot()
    assert len(msgpack.unpackb(before["log"])) == 9, "as the first version has it"
    run.log.restore(before)
    run.log.upgrade(1, 2)
    run.version = 2
    run.now += MINUTE
    upgraded = run.now
    run.retain(ms=10 * MINUTE)
    assert run.log.start == 0
    run.wait(9 * MINUTE)
    assert run.log.start == 0, "younger than the upgrade is all that is known"
    run.wait(3 * MINUTE)
    assert run.log.start == run.log.end == 5 and run.now - upgraded > 10 * MINUTE


def test_bytes_of_an_older_version_go_when_the_newer_ones_are_enough() -> None:
    run = Run(version=1)
    for _ in range(5):
        run.append(ANCHOR_BYTES)
    run.log.upgrade(1, 2)
    run.version = 2
    run.retain(size=1000)
    assert run.log.start == 0
    for _ in range(15):
        run.append(100)
    assert run.log.start >= 5


def test_a_truncation_and_a_limit_leave_anchors_and_marks_together() -> None:
    run = Run()
    run.retain(size=100_000)
    for _ in range(60):
        run.append(5000)
        assert run.log.retention is not None and len(run.log.retention.marks) == len(run.log.anchors)
    offset = run.log.end - 5
    command = truncate_command(offset, Position(run.records[offset][0], 0))
    run.apply(Frame(UNIFORM, 0, 1, len(command), 8, 0, 0, 0, command))
    assert run.log.start == offset and run.log.retention is not None
    assert len(run.log.retention.marks) == len(run.log.anchors)


moves = st.lists(
    st.one_of(
        st.integers(1, 3000).map(lambda size: ("append", size)),
        st.integers(1, 5 * MINUTE).map(lambda ms: ("wait", ms)),
        st.just(("restore", 0)),
    ),
    max_size=60,
)
limits = st.sampled_from([(10 * MINUTE, 0, 0), (0, 9000, 0), (0, 0, 7), (3 * MINUTE, 20_000, 12)])


@given(moves, limits)
def test_every_member_gives_up_the_same(history: list[tuple[str, int]], limit: tuple[int, int, int]) -> None:
    one, other = Run(), Run()
    for run in (one, other):
        run.retain(*limit)
    for verb, number in history:
        if verb == "append":
            one.append(number)
            other.append(number)
        elif verb == "wait":
            one.wait(number)
            other.wait(number)
        else:
            # Only one of them starts anew.
            fresh = AppendLog()
            fresh.restore(one.log.snapshot())
            one.log = fresh
        assert one.log.snapshot() == other.log.snapshot() and one.released == other.released
        assert one.timer == other.timer and list(one.log.live_refs()) == list(other.log.live_refs())
        one.check(*limit)
    ends = [release.end for release in one.released]
    assert ends == sorted(ends), "what is released is released once, from the front"


@pytest.mark.parametrize("count", [1, 500])
def test_timers_of_an_idle_log_are_few(count: int) -> None:
    run = Run()
    run.retain(ms=64 * MINUTE)
    for _ in range(count):
        run.append(ANCHOR_BYTES)
        run.now += 7
    assert run.wait(200 * MINUTE) <= 10 and run.log.start == count


def test_a_sinks_stage_refuses_limits_and_keeps_everything() -> None:
    run = Run()
    run.log.stage = True
    run.append()
    refused = run.retain(records=1)
    assert isinstance(refused, Reject) and refused.code == "refused"
    assert (run.log.start, run.log.end) == (0, 1) and run.timer is None

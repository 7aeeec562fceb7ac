"""Where log time of a leadership begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from logyard.engine.entry import NOOP
from logyard.engine.raft.state import LEADER
from logyard.engine.replica.log_clock import JUMPS_VERSION, Clocks, LogClock
from logyard.engine.replica.member import Member

from .doubles import Recorder, member_of

SECOND = 1_000_000_000
WALL = 1_700_000_000 * SECOND


def fresh_ms(newest_ms: int, heard_ns: int, now_ns: int) -> int:
    """Return what the clock of a new leadership says first, in ms."""
    clocks = Clocks()
    clocks.wall_ns, clocks.monotonic_ns = (lambda: WALL), (lambda: now_ns)
    clock = LogClock(clocks, lambda member: newest_ms, cast(Any, None), cast(Any, None), cast(Any, None))
    fresh = clock.fresh(cast(Member, SimpleNamespace(heard_ns=heard_ns)))
    assert fresh is not None
    return fresh.now(now_ns)


@pytest.mark.parametrize("waited_s", [0, 3, 3600])
def test_an_empty_log_begins_at_the_wall_clock_however_long_its_member_waited_for_a_leader(waited_s: int) -> None:
    assert fresh_ms(0, 5 * SECOND, (5 + waited_s) * SECOND) == WALL // 1_000_000


def test_a_log_goes_on_from_when_its_end_came() -> None:
    assert fresh_ms(1_000, 5 * SECOND, 12 * SECOND) == 8_000


def test_no_clock_begins_while_nobody_can_tell_where_the_log_ends() -> None:
    """Begun at a wall clock that had been set back, log time stood still for as long (seed 4340552)."""
    newest: list[int | None] = [None]
    clocks = Clocks()
    clocks.wall_ns, clocks.monotonic_ns = (lambda: WALL), (lambda: 7 * SECOND)
    nobody = cast(Any, None)
    clock = LogClock(clocks, lambda member: newest[0], nobody, nobody, nobody)
    member = member_of(Recorder())[0]
    member.log_time, member.heard_ns = 40, 5 * SECOND
    assert clock.of_own_entry(member, NOOP) == 40 and clock.now(member) == 40 and member.clock is None
    # It is far behind the wall clock, and the machine could be told: not before there is a clock to set.
    member.raft.role, member.leading, member.version = LEADER, True, JUMPS_VERSION
    cast(Any, member.machine).jumped = nobody
    clock.catch_up([member])
    newest[0] = end = 2 * WALL // 1_000_000
    assert clock.now(member) == end + 2_000 and member.clock is not None

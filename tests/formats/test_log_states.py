"""Snapshots of append logs on users' disks: today's code writes those of each machine version byte for byte, and reads
them."""

from __future__ import annotations

import pytest

from logyard.machines.log import AppendLog
from logyard.machines.log.command import APPEND, retain_command
from logyard.protocol.frame import Epoch, epoch_append_command, epoch_done_command, produce_command
from logyard.protocol.topics import (
    fence_command,
    first_layout,
    inherit_command,
    keyed_append_command,
    keyed_produce_command,
    open_command,
)

from .log_states import KEYED, frame, golden, keyed_state, state


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_log_is_snapshotted_byte_for_byte(version: int) -> None:
    """The file of version 1 was written by a program that knew no other."""
    assert state(version).snapshot() == {"log": golden(version).read_bytes()}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_an_old_snapshot_is_read_and_goes_on(version: int) -> None:
    log = AppendLog()
    log.restore({"log": golden(version).read_bytes()})
    assert log.snapshot() == state(version).snapshot()
    end = 1136 if version == 3 else 1131
    assert (log.start, log.end, log.retention is None, log.producers is None) == (10, end, version == 1, version == 1)
    assert (log.fenced is None) is (version < 3)
    assert list(log.live_refs()) == list(state(version).live_refs())


def test_a_keyed_log_is_snapshotted_byte_for_byte_and_read() -> None:
    assert keyed_state().snapshot() == {"log": KEYED.read_bytes()}
    log = AppendLog(keyed=True)
    log.restore({"log": KEYED.read_bytes()})
    assert log.snapshot() == keyed_state().snapshot() and list(log.live_refs()) == list(keyed_state().live_refs())
    assert log.keys is not None and log.keys.newest == {b"c": (7, 2), b"b": (8, 0), b"d": (9, 1), b"a": (10, 0)}
    assert log.keys.removals == {b"a": 1_700_000_000_003}


def test_an_upgraded_log_keeps_what_it_had() -> None:
    log = AppendLog()
    log.restore({"log": golden(1).read_bytes()})
    log.upgrade(1, 2)
    copy = AppendLog()
    copy.restore(log.snapshot())
    for one in (log, copy):
        assert (one.start, one.end, one.anchors) == (10, 1131, state(1).anchors)
        assert list(one.live_refs()) == list(state(1).live_refs())
    assert copy.snapshot() == log.snapshot()


def test_version_1_answers_the_commands_of_version_2_as_it_always_did() -> None:
    """A member with a newer program and one with an older must agree until the new version is in force."""
    more = [frame(produce_command(7, 1)), frame(retain_command(0, 0, 5)), frame(APPEND)]
    log = state(1, more)
    assert log.end == 1132 and log.retention is None and [at for at, _, _ in log.holes[-2:]] == [1212, 1213]


def test_version_2_answers_the_commands_of_version_3_as_it_always_did() -> None:
    epoch = Epoch(7, 1, 0)
    more = [frame(epoch_append_command(epoch, 0, 1, bytes(16))), frame(epoch_done_command(epoch)), frame(APPEND)]
    log = state(2, more)
    assert log.end == 1132 and log.fenced is None and [at for at, _, _ in log.holes[-2:]] == [1212, 1213]


def test_version_3_answers_the_commands_of_version_4_as_it_always_did() -> None:
    layout = first_layout([0])
    commands = (open_command(1, 1, 0, layout), fence_command(1, 2, 0, layout), inherit_command(1, []))
    more = [*map(frame, (*commands, keyed_append_command(1, 1), keyed_produce_command(1, 1, 7, 1))), frame(APPEND)]
    before, log = state(3), state(3, more)
    assert log.end == before.end + 1 and log.partition is None
    assert [at for at, _, _ in log.holes[-5:]] == list(range(before.last_index + 1, before.last_index + 6))


def test_a_log_of_version_3_comes_to_version_4_with_what_it_had() -> None:
    at_once, by_way = state(1), state(1)
    at_once.upgrade(1, 4)
    by_way.upgrade(1, 3)
    by_way.upgrade(3, 4)
    assert at_once.snapshot() == by_way.snapshot()
    log = state(3)
    before = log.fenced
    log.upgrade(3, 4)
    assert log.fenced is before
    copy = AppendLog()
    copy.restore(log.snapshot())
    assert copy.snapshot() == log.snapshot() and copy.partition is not None and copy.partition.told() is None


def test_a_log_of_version_1_comes_to_version_3_at_once_or_by_way_of_2() -> None:
    at_once, by_way = state(1), state(1)
    at_once.upgrade(1, 3)
    by_way.upgrade(1, 2)
    by_way.upgrade(2, 3)
    assert at_once.snapshot() == by_way.snapshot()
    assert at_once.fenced is not None and at_once.producers is not None

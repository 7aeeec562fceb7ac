"""Keyed logs: the newest record of each key stays, the others are released at once, offsets stay what they were."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest

from logyard.engine.machine import Context, Frame, PayloadRef, Position, Reject, Release
from logyard.machines.log import AppendLog, keyed
from logyard.machines.log.command import APPEND, APPEND_REPLY, KEYED, KEYED_REMOVAL, retain_command, truncate_command
from logyard.machines.log.keyed import REMOVAL_MS
from logyard.machines.log.slices import Slice
from logyard.machines.registry import create_machine
from logyard.testing import Command, Entry, Rehearsal, Step, Upgrade, Wait, check_deterministic, check_restore


def put(*keys: bytes, first: int = 0, removal: bool = False) -> Frame:
    """A frame of one record a key."""
    commands = [bytes((KEYED_REMOVAL if removal else KEYED,)) + key for key in keys]
    region = b"".join(len(one).to_bytes(4, "little") for one in commands) + b"".join(commands)
    return Frame(0, 0, len(keys), len(region), 10, 0, 0, 0, region, first)


class Run:
    def __init__(self) -> None:
        self.log = AppendLog(keyed=True)
        self.index = 0
        self.now = 0

    def apply(self, *frames: Frame) -> tuple[list[bytes | Reject], list[object]]:
        self.index += 1
        records = sum(frame.records for frame in frames)
        batch = self.log.apply_batch(Context(1, self.index, 1, self.now, 1, records), frames)
        return list(batch.replies), list(batch.effects)

    def live(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        return [(tuple(one.first), tuple(one.end)) for one in self.log.live_refs()]  # type: ignore[misc]


def one(index: int, ordinal: int) -> Release:
    return Release(Position(index, ordinal), Position(index, ordinal + 1))


def test_the_newest_record_of_a_key_stays() -> None:
    run = Run()
    assert run.apply(put(b"a", b"b", b"c"), put(b"d", first=3)) == (
        [APPEND_REPLY.pack(0, 3), APPEND_REPLY.pack(3, 1)],
        [],
    )
    assert run.live() == [((1, 0), (1, 4))]
    assert run.apply(put(b"b")) == ([APPEND_REPLY.pack(4, 1)], [one(1, 1)])
    assert run.live() == [((1, 0), (1, 1)), ((1, 2), (1, 4)), ((2, 0), (2, 1))]
    # Twice in one frame: only the later one stays.
    assert run.apply(put(b"x", b"x"))[1] == [one(3, 0)] and run.log.end == 7
    frames = [put(b"a", b"b", b"c"), put(b"d", first=3)]
    assert run.log.keys is not None
    assert run.log.keys.slices(1, frames) == [Slice(0, 0, 0, 0, 1), Slice(2, 0, 2, 2, 1), Slice(3, 1, 3, 0, 1)]
    assert run.log.keys.slices(2, [put(b"b")]) == [Slice(4, 0, 0, 0, 1)] and run.log.keys.slices(9, frames) == []


def test_a_key_that_is_taken_away_is_heard_of_for_a_day() -> None:
    run = Run()
    run.apply(put(b"a", b"b"))
    assert run.apply(put(b"a", removal=True))[1] == [one(1, 0)]
    run.now += 2 * REMOVAL_MS
    assert run.log.keys is not None and run.apply(put(b"b", removal=True))[1] == [one(1, 1), one(2, 0)]
    assert run.log.keys.newest == {b"b": (3, 0)}
    run.now += 2 * REMOVAL_MS
    # The last record stays, so that the log's end is known.
    assert run.apply(put(b"b"))[1] == [one(3, 0)] and run.log.keys.removals == {}


def test_removals_that_are_not_due_cost_an_entry_nothing() -> None:
    run = Run()
    run.apply(put(*(b"%d" % number for number in range(1000)), removal=True))
    assert run.log.keys is not None
    walked: list[bytes] = []

    class Counted(dict[bytes, int]):
        def items(self) -> Any:
            for key, stamp in super().items():
                walked.append(key)
                yield key, stamp

    run.log.keys.removals = Counted(run.log.keys.removals)
    run.apply(put(b"new"))
    assert len(walked) == 1
    run.now = REMOVAL_MS + 1
    run.apply(put(b"new"))
    assert len(walked) == 1001 and list(run.log.keys.newest) == [b"new"]


def test_what_a_keyed_log_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed, "KEYS_MAX", 2)
    monkeypatch.setattr("logyard.machines.log.machine.KEYS_MAX", 2)
    run = Run()
    for frame in (
        Frame(1, 0, 1, 1, 9, 0, 0, 0, APPEND),
        put(b""),
        put(b"k" * 1025),
        Frame(1, 0, 1, 0, 9, 0, 0, 0, b""),
    ):
        (reply,), _ = run.apply(frame)
        assert isinstance(reply, Reject) and reply.code == "bad_request" and run.log.end == 0
    run.apply(put(b"a", b"b"))
    (reply,), _ = run.apply(put(b"a", b"c"))
    assert isinstance(reply, Reject) and reply.code == "too_many_keys" and run.log.end == 2
    assert run.apply(put(b"a", b"b"))[0] == [APPEND_REPLY.pack(2, 2)]
    plain = AppendLog()
    batch = plain.apply_batch(Context(1, 1, 1, 0, 1, 1), [put(b"a")])
    assert isinstance(batch.replies[0], Reject), "a log without keys takes none"


def test_a_truncation_forgets_the_keys_before_it() -> None:
    run = Run()
    for key in (b"a", b"b", b"c", b"a"):
        run.apply(put(key))
    command = truncate_command(2, Position(3, 0))
    frame = Frame(1, 0, 1, len(command), 8, 0, 0, 0, command)
    _, effects = run.apply(frame)
    assert effects == [Release(Position(0, 0), Position(3, 0))]
    assert run.log.keys is not None and sorted(run.log.keys.newest) == [b"a", b"c"]
    assert run.live() == [((3, 0), (3, 1)), ((4, 0), (4, 1))]
    assert run.apply(put(b"b"))[1] == []


def test_a_long_payload_goes_with_its_record() -> None:
    run = Run()
    run.index = 2
    pieces = tuple(PayloadRef(1, index, 0, 1, 1000, b"") for index in (1, 2))
    run.apply(Frame(9, 0, 1, 2, 8, 0, 0, 0, bytes((KEYED,)) + b"a", 0, 1, 2000, pieces))
    assert run.live() == [((3, 0), (3, 1)), ((1, 0), (3, 0))]
    assert run.apply(put(b"a"))[1] == [one(3, 0), Release(Position(1, 0), Position(3, 0))]
    assert run.live() == [((4, 0), (4, 1))]
    command = truncate_command(2, Position(5, 0))
    _, effects = run.apply(Frame(1, 0, 1, len(command), 8, 0, 0, 0, command))
    assert effects == [Release(Position(0, 0), Position(5, 0))] and run.log.start == 2


def test_the_registry_makes_them() -> None:
    log = create_machine("log", {"compact": "key", "start": 5})
    assert isinstance(log, AppendLog) and log.keys is not None and log.start == 5
    plain = create_machine("log", {"compact": "none"})
    assert isinstance(plain, AppendLog) and plain.keys is None
    with pytest.raises(Exception, match="compact"):
        create_machine("log", {"compact": "yes"})


def keyed_log() -> AppendLog:
    """A keyed log, for the checkers."""
    return AppendLog(keyed=True)


def script(upgraded: bool) -> list[Step]:
    draw = random.Random(5)
    steps: list[Step] = [Upgrade(2), Command(retain_command(0, 0, 60))] if upgraded else []
    for _ in range(120):
        key = b"%d" % draw.randrange(12)
        code = KEYED_REMOVAL if draw.random() < 0.2 else KEYED
        step = Command(bytes((code,)) + key, (draw.randrange(1, 5000),))
        some: list[Step] = [step, Entry((step, Command(b"?", (5,)), step)), Wait(REMOVAL_MS // 9)]
        steps.append(draw.choice(some))
    return steps


@pytest.mark.sample(1)
@pytest.mark.parametrize("upgraded", [False, True])
def test_keyed_logs_pass_the_checks(upgraded: bool) -> None:
    check_deterministic(keyed_log, script(upgraded))
    # What a change of limits brought has no key, and goes when the log's start passes it.
    run: Rehearsal = check_restore(keyed_log, script(upgraded), check_live=not upgraded)
    log: AppendLog = run.machine  # type: ignore[assignment]
    assert log.keys is not None and len(log.keys.newest) <= 12 and (log.start > 0) == upgraded
    assert msgpack.unpackb(log.query(msgpack.packb(["bounds"]))) == [log.start, log.end]

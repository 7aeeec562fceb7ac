"""The golden snapshots of an append log, one a machine version, from nothing: `python -m tests.formats.log_states`
writes them anew.

Each is the state after the same history. A change of one of them is a change on users' disks, and of what members of
one version agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from logyard.engine.machine import Context, Frame, PayloadRef, Position
from logyard.machines.log import AppendLog
from logyard.machines.log.command import APPEND, truncate_command
from logyard.protocol.frame import UNIFORM, Epoch, epoch_append_command, epoch_done_command

HERE = Path(__file__).parent
UID = 0x3333333333333333


def golden(version: int) -> Path:
    """The file of a version."""
    return HERE / f"log-{version}.bin"


def frame(command: bytes, records: int = 1, size: int = 100, first: int = 0) -> Frame:
    """A frame of `records` with one command for all."""
    return Frame(UNIFORM, 0, records, len(command), size, 0, 0, 0, command, first)


def entries() -> list[tuple[list[Frame], tuple[tuple[int, int], ...]]]:
    """(frames, what a session's guard left out) of each entry: appends of all sizes, a payload in pieces, refusals, a
    truncation into a frame."""
    pieces = tuple(PayloadRef(UID, index, 0, 1, 1 << 20, b"") for index in (40, 41, 42))
    made: list[tuple[list[Frame], tuple[tuple[int, int], ...]]] = [([frame(APPEND, 3, 200_000)], ()) for _ in range(9)]
    made.append(([frame(APPEND, 2), frame(b"?", 1, 50, 2), frame(APPEND, 1, 100, 3)], ()))
    made.append(([frame(APPEND)._replace(pieces=pieces, extent=3 << 20)], ()))
    made += [([frame(APPEND, 1)], ((1, 2),)) for _ in range(1100)]
    made.append(([frame(truncate_command(10, Position(103, 1)), 1, 8)], ()))
    return made


def fenced() -> list[tuple[list[Frame], tuple[tuple[int, int], ...]]]:
    """Entries of version 3: two lanes of one producer, a copy, and another producer whose epoch is done."""
    one, other = Epoch(7, 1_600_000_000_000, 3), Epoch(8, 1_600_000_000_001, 0)
    copied = frame(epoch_append_command(one, 0, 1, b"a" * 16))
    return [
        ([copied, frame(epoch_append_command(one, 4, 1, b"b" * 16), 2, 100, 1)], ()),
        ([frame(epoch_append_command(one, 0, 2, b"c" * 16)), copied._replace(first=1)], ()),
        ([frame(epoch_append_command(other, 0, 1, b"d" * 16))], ()),
        ([frame(epoch_done_command(other), 1, 8)], ()),
    ]


def state(version: int, more: Sequence[Frame] = ()) -> AppendLog:
    """The log after all of it, and after one more entry a frame of `more`."""
    log = AppendLog()
    if version > 1:
        log.upgrade(1, version)
    at = 0
    made = [*entries(), *(fenced() if version > 2 else ()), *(([one], ()) for one in more)]
    for number, (frames, skipped) in enumerate(made):
        at = 100 + number
        records = sum(one.records for one in frames) + sum(count for _, count in skipped)
        log.apply_batch(Context(UID, at, 1, 1_700_000_000_000 + 1000 * number, version, records, skipped), frames)
    return log


KEYED = HERE / "log-keyed.bin"


def keyed_state() -> AppendLog:
    """A keyed log of version 1: records that gave way, one that takes its key away, a key that came twice."""
    log = AppendLog(keyed=True)
    for number, keys in enumerate([[b"a", b"b", b"c"], [b"b"], [b"d", b"d"], [b"a"]]):
        commands = [(b"\x07" if number == 3 else b"\x06") + key for key in keys]
        region = b"".join(len(one).to_bytes(4, "little") for one in commands) + b"".join(commands)
        one = Frame(0, 0, len(keys), len(region), 100, 0, 0, 0, region)
        log.apply_batch(Context(UID, 7 + number, 1, 1_700_000_000_000 + number, 1, len(keys)), [one])
    return log


if __name__ == "__main__":
    KEYED.write_bytes(keyed_state().snapshot()["log"])
    for number in (1, 2, 3):
        golden(number).write_bytes(state(number).snapshot()["log"])

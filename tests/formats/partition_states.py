"""The golden snapshots of topics before partitions could end, from nothing: a log that is a partition (machine version
4), the topics (version 1) and a coordinator (version 1). `python -m tests.formats.partition_states` writes them anew.

The files were written by a program that knew no later versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack

from logyard.engine.machine import Context, Frame
from logyard.machines.catalog.topics_alone import TopicsAlone
from logyard.machines.groups import Groups
from logyard.machines.log import AppendLog
from logyard.protocol.frame import UNIFORM
from logyard.protocol.topics import (
    fence_command,
    first_layout,
    grown_layout,
    inherit_command,
    keyed_append_command,
    keyed_produce_command,
    open_command,
    section_command,
)

HERE = Path(__file__).parent
LOG, TOPICS, GROUPS = (HERE / name for name in ("partition-4.bin", "topics-1.bin", "groups-1.bin"))
FIRST = first_layout([0, 1])
GROWN = grown_layout(FIRST, [2])


def _applied(machine: Any, version: int, commands: Sequence[bytes]) -> Any:
    if version > 1:
        machine.upgrade(1, version)
    for index, command in enumerate(commands, 1):
        frame = Frame(UNIFORM, 0, 1, len(command), 100, 0, 0, 0, command, 0)
        context = Context(1, index, 1, 1_700_000_000_000 + index, version, 1)
        if hasattr(machine, "apply_batch"):
            machine.apply_batch(context, [frame])
        else:
            machine.apply(context, command, ())
    return machine


def log(version: int = 4, more: Sequence[bytes] = ()) -> AppendLog:
    """A partition that was opened, written to, and fenced once."""
    commands = [
        inherit_command(9, [[5, 1_600_000_000_000, [[3, 0, 0]]]]), open_command(9, 1, 0, FIRST),
        keyed_append_command(9, 1), keyed_produce_command(9, 1, 7, 1), fence_command(9, 2, 0, GROWN),
        keyed_append_command(9, 1), keyed_append_command(9, 2), *more,
    ]  # fmt: skip
    found: AppendLog = _applied(AppendLog(), version, commands)
    return found


def topics() -> TopicsAlone:
    """Topics of each state."""
    steps: list[tuple[str, Mapping[str, Any]]] = [
        ("create", {"name": "a", "partitions": 2, "members": [1, 2, 3], "options": {"age": 5.0}}),
        ("made", {"id": 1, "uids": [[0, 10], [1, 11]]}),
        ("add", {"name": "a", "partitions": 3}),
        ("added", {"id": 1, "epoch": 2, "fences": [[0, 100], [1, 200]], "uids": [[0, 10], [1, 11], [2, 12]]}),
        ("create", {"name": "b", "partitions": 1}),
        ("made", {"id": 2, "uids": [[0, 20]]}),
        ("add", {"name": "b", "partitions": 4}),
        ("create", {"name": "c", "partitions": 2}),
        ("create", {"name": "d", "partitions": 1}),
        ("delete", {"name": "d"}),
    ]
    commands = [section_command(name, values, bytes([at]) * 16) for at, (name, values) in enumerate(steps)]
    found: TopicsAlone = _applied(TopicsAlone(), 1, commands)
    return found


def groups() -> Groups:
    """A group with two members, one of which has committed; a partition that waits for others; and another group."""
    shape = [1, "a", 2, [[0, "", []], [1, "z", []], [2, "", [[0, 100], [1, 200]]]]]
    rows: list[list[Any]] = [
        ["join", "g", "m", 1, 10_000, "z", [shape]],
        ["join", "g", "", 2, 10_000, "", [shape]],
        ["beat", "g", "m", 1, 0, [[[1, 0], 1, 100]], [], []],
        ["reset", "h", [[[1, 0], 5]]],
    ]
    found: Groups = _applied(Groups(), 1, [msgpack.packb(row) for row in rows])
    return found


def packed(sections: Mapping[str, bytes]) -> bytes:
    """Return a snapshot as one file has it."""
    data: bytes = msgpack.packb(sorted(sections.items()))
    return data


MADE: Mapping[Path, Callable[[], Any]] = {LOG: log, TOPICS: topics, GROUPS: groups}

if __name__ == "__main__":
    for path, make in MADE.items():
        path.write_bytes(packed(make().snapshot()))

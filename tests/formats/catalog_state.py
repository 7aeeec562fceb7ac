"""The catalogue's rows and commands as bytes, version 1, from nothing: `python -m tests.formats.catalog_state` writes
the golden file anew. A change of it is a change on users' disks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack

from logyard.engine.machine import Context
from logyard.machines.catalog import Catalog
from logyard.machines.catalog.command import command

GOLDEN = Path(__file__).parent / "catalog-1.bin"
WHOLE_ROWS = Path(__file__).parent / "catalog-1-whole-rows.bin"
"""The same as it was stored before rows of logs ended where their defaults begin."""
SECTIONS = ("logs", "nodes", "plan", "cursors")
REQUEST = bytes(range(16))


def commands() -> list[bytes]:
    """A history that leaves a row of each kind, and each state of a log."""
    create: dict[str, Any] = {"machine": "log", "members": [1, 2, 3]}
    found: dict[str, Any] = {"name": "old", "machine": "kv", "index": 3, "voters": [1], "learners": [2]}
    hello = {"peer": "10.0.0.1:7001", "client": "10.0.0.1:7101", "versions": {"catalog": 1}, "space": [100, 50]}
    join = {"hash": b"h" * 32, "directory": 44, "peer": "10.0.0.4:7001", "client": "10.0.0.4:7101", "zone": "b"}
    return [
        command("nodes", "found", {"uid": 0x1122334455667788}, REQUEST),
        command("nodes", "hello", {"node": 1, "directory": 11, "epoch": 2, "labels": {"rack": "a"}, **hello}),
        command("nodes", "invite", {"hash": b"h" * 32, "until": 10**13, "replaces": 1}),
        command("nodes", "join", join),
        command("nodes", "finalise", {"version": 0}),
        command(
            "logs", "create", {"logs": [{**create, "name": name, "uid": uid} for uid, name in enumerate("abc", 1)]}
        ),
        command("logs", "live", {"uids": [1]}),
        command("logs", "undo", {"uids": [2]}),
        command("logs", "report", {"logs": [[3, 9, [2, 3, 4], [5]]]}),
        command("logs", "import", {"logs": [{**found, "uid": 8, "created": 5}, {**found, "uid": 9, "created": 4}]}),
        command("logs", "want", {"name": "a", "copies": 5, "pins": [4], "zones": ["b"]}),
        command("logs", "delete", {"name": "c"}),
        command(
            "plan", "propose", {"moves": [{"uid": 1, "kind": "add", "source": 0, "target": 4, "why": "short"}] * 2}
        ),
        command("plan", "propose", {"moves": [{"uid": 9, "kind": "lead", "source": 1, "target": 2, "why": "even"}]}),
        command("plan", "finish", {"number": 2, "outcome": "done"}),
        command("plan", "pause", {"why": "a restore"}),
        command("cursors", "advance", {"name": "place", "by": 3}),
    ]


def state() -> Catalog:
    """The catalogue after all of it."""
    found = Catalog()
    for index, data in enumerate(commands(), 1):
        found.apply(Context(1, index, 1, 1_700_000_000_000 + index, 1), data, ())
    return found


def packed(found: Catalog) -> bytes:
    """The shards of the sections that are looked at here, by name."""
    shards = {name: data for name, data in found.snapshot().items() if name.partition(".")[0] in SECTIONS}
    data: bytes = msgpack.packb([commands(), sorted(shards.items())])
    return data


if __name__ == "__main__":
    GOLDEN.write_bytes(packed(state()))

"""What users may build their own tests on: machines without an engine, clusters without sockets, and checkers.

`Rehearsal` is one machine under the engine's rules and a clock that the test moves; `check_deterministic` and
`check_restore` try a script of steps on it; `cluster` runs real engines on real directories, joined by the in-memory
twin of the network. Imported by tests only.
"""

from __future__ import annotations

from .engine.transport.memory import MemoryNetwork
from .machines.checks import Parted, check_deterministic, check_restore
from .machines.rehearsal import Command, EndSession, Entry, Refused, Rehearsal, Seen, Step, Upgrade, Wait
from .service.memory_cluster import MemoryCluster, cluster, until

__all__ = [
    "Command", "EndSession", "Entry", "MemoryCluster", "MemoryNetwork", "Parted", "Refused", "Rehearsal", "Seen",
    "Step", "Upgrade", "Wait", "check_deterministic", "check_restore", "cluster", "until",
]  # fmt: skip

"""Planted bugs that strangers at the doors have to find: mendings undone. `rule` is the door at which it shows."""

from __future__ import annotations

from typing import Any

from logyard.engine.disk.door import Disk
from logyard.engine.log import wal
from logyard.engine.transport import listener
from logyard.engine.transport.peers import Peers
from logyard.service.door import server as rpc
from tests.sim.bugs import Bug


def _believing(meet: Any) -> Any:
    """What a peer says counts as said with a proof."""
    return lambda self, theirs: meet(self, theirs._replace(proved=True))


def _optional(begin: Any) -> Any:
    """Nobody has to prove anything."""

    def begun(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        self._listener._required = False

    return begun


BUGS = (
    Bug(
        "unproved_peers_believed", "peers",
        [(Peers, "_meet", _believing), (Peers, "__init__", _optional)],
    ),
    Bug(
        "descriptors_to_connections", "crowd",
        [
            (rpc, "has_room", lambda old: lambda fd, share: True),
            (listener, "has_room", lambda old: lambda fd, share: True),
            (Disk, "hold", lambda old: lambda self, count=0: None),
            (wal, "is_short", lambda old: lambda error: False),
        ],
    ),
)  # fmt: skip

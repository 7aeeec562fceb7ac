"""The ground that all floors of a node stand on: its values, its doors, its members, and the loop that drives them.

Only the composing functions of the floors are given it; a part gets by its constructor what it needs of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from ..config import SystemConfig
from ..disk.door import Disk
from ..log.cache import PayloadCache
from ..log.wal import Wal, WalItem
from ..ports import StorePort
from ..raft.progress import Window
from ..raft.state import Limits
from ..transport.network import Network
from .log_clock import Clocks
from .member import Member


class Loop(Protocol):
    """What floors need of the ready loop."""

    def mark(self, member: Member) -> None:
        """Have a member looked at in the next turn."""
        ...

    def rouse(self, member: Member) -> None:
        """Have a member looked at in the next turn, and at the next tick."""
        ...

    def turn(self) -> None:
        """Let every core hand out what it has, now."""
        ...

    def persisted(self, items: Sequence[WalItem]) -> None:
        """Hear of what is durable."""
        ...

    def persist_alone(self, member: Member, item: WalItem) -> None:
        """Have a record of its own written for a member."""
        ...


class Ground(NamedTuple):
    """One node's."""

    node_id: int
    path: Path
    config: SystemConfig
    disk: Disk
    store: StorePort
    wal: Wal
    clocks: Clocks
    members: dict[int, Member]
    """By uid: those that are awake."""
    live: set[int]
    """Nodes that are up, this one among them."""
    active: set[Member]
    """Members that are looked at by the next tick."""
    windows: dict[int, Window]
    """Bytes under way, by follower's node."""
    limits: Limits
    """Of all cores."""
    cache: PayloadCache
    loop: Loop
    network: Network
    spawn: Callable[..., None]
    """Run a task until it ends, or the node does."""

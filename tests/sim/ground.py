"""What all faults stand on: the cluster, the draw, the counts, and how things are said to nodes.

Invariant: what is lost for good is lost on one node of a run (`victim`; payloads of some entries on others), so that
every record keeps a good copy that a quorum knows of. The faults themselves are in the `faults_` files;
`nemesis` puts them together.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from logyard.protocol.errors import LogyardError

from .checks import Checker
from .clients import Group, Workload
from .cluster import Cluster, Host
from .files import FileSystem


class Ground:
    """One run's faults."""

    def __init__(self, cluster: Cluster, work: Workload, checker: Checker, draw: random.Random) -> None:
        self.cluster = cluster
        self.loop = cluster.loop
        self.network = cluster.network
        self.work = work
        self.checker = checker
        self.draw = draw
        self.hits: Counter[str] = Counter()
        # The node whose disk may be damaged, and whether it was in this round.
        self.victim = 0
        self.hurt = False
        self.membership = False
        self.active = False
        # Nodes that a revival is under way for.
        self.reviving: set[int] = set()
        # Nodes with another file system than theirs for a while: theirs.
        self.true_files: dict[int, FileSystem] = {}
        # Copies of directories.
        self.old_files: dict[int, FileSystem] = {}

    def after(self, seconds: float, call: Callable[..., Any], *arguments: Any) -> None:
        """Later in this round, if it is still on."""

        def act() -> None:
            if self.active:
                call(*arguments)

        self.loop.at(self.loop.now + seconds, None, act)

    def some(self) -> Host | None:
        """A node that is up."""
        up = self.cluster.up
        return self.cluster.hosts[self.draw.choice(up)] if up else None

    def leader(self, kind: type[Group] = Group) -> tuple[Any, int] | None:
        """A group of a kind, and the node that leads it."""
        groups = [group for group in self.work.groups if isinstance(group, kind)]
        self.draw.shuffle(groups)
        for group in groups:
            for number in self.cluster.up:
                if self.cluster.leads(number, group.name):
                    return group, number
        return None

    def as_node(self, number: int, call: Callable[..., Any], *arguments: Any) -> Any:
        """Do something as a node's process."""
        life = self.cluster.hosts[number].life
        return self.loop.perform(life, call, arguments) if life is not None else None

    def ask(self, number: int, coro: Any, kind: str = "") -> None:
        """A verb of an operator; refusals are fine."""

        def done(result: Any, error: BaseException | None) -> None:
            if error is None:
                if kind:
                    self.hits[kind] += 1
            elif not isinstance(error, LogyardError):
                self.cluster.on_bug(kind or "a verb", error)

        self.cluster.spawn(number, coro, kind, done)

    def down(self, host: Host, cut: Callable[[FileSystem], None] | None = None, pause: float = 0.0) -> None:
        """A node goes, and comes back later in the round (or at its end)."""
        self.cluster.crash(host.number, cut)
        self.revive_later(host, pause)

    def revive_later(self, host: Host, pause: float = 0.0) -> None:
        """Start a node again after a while."""
        self.after(pause or self.draw.uniform(0.2, 2.5), self.revive, host, -1)

    def revive(self, host: Host, crash_in: int = -1) -> None:
        """Start a node that is down."""
        if host.life is None:
            self.cluster.start(host.number, crash_in)

    def _roll(self, number: int) -> None:
        system = self.cluster.system(number)
        if system is not None:

            async def roll() -> None:
                async with system.storage.janitor.lock:
                    await system.storage.janitor.roll()

            self.ask(number, roll())

"""What is done to the cluster, one fault at a time: each method does it, waits a while under load, and undoes it.

Which faults, on which node and for how long is drawn from the seed; the rest is real processes' time. A fault counts
if it hit something: a method returns how often it did. `BREAKING` faults leave no healthy quorum while they last.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from logyard.client.admin import Call, leaders_view, members_call
from logyard.client.sync import Yard
from logyard.protocol.errors import LogyardError
from logyard.service.daemon import EXIT_WAL_FAILED

from .cluster import ChaosCluster
from .load import NAMES, QUEUES

BREAKING = frozenset({"kill9_all", "partition_all", "pause_some", "kill_in_recovery"})
PAGE = 4096


class Torment:
    """The faults. `calm` waits between them are the caller's."""

    def __init__(self, cluster: ChaosCluster, yard: Yard, seed: int) -> None:
        self.cluster = cluster
        self.yard = yard
        self.draw = random.Random(f"{seed} faults")
        self.never = threading.Event()
        self.refusal = ""
        """The last one that `tried` met."""
        # Damage that nobody has read yet lies still: on one node only, every record keeps two good copies.
        self.rotten = self.victim()

    def kinds(self) -> dict[str, Callable[[], int]]:
        """Every kind by its name."""
        return {
            "kill9": self.kill9, "kill9_all": self.kill9_all, "pause": self.pause, "partition": self.partition,
            "partition_one_way": self.partition_one_way, "partition_all": self.partition_all, "bridge": self.bridge,
            "flapping": self.flapping, "reset": self.reset, "wire_bit": self.wire_bit, "slow_disk": self.slow_disk,
            "disk_error": self.disk_error, "membership": self.membership, "transfer": self.transfer,
            "rolling_restart": self.rolling_restart, "snapshot_lag": self.snapshot_lag,
            "wal_bytes": lambda: self.spoil("wal", "*.wal"),
            "segment_bytes": lambda: self.spoil("segments", "*.seg"),
            "payload_bytes": lambda: self.spoil("payloads", "data.mdb", "bodies"),
            "writer_kill": self.writer_kill, "kill9_with_writer": self.kill9_with_writer,
            "kill_in_recovery": self.kill_in_recovery, "pause_some": self.pause_some, "learner": self.learner,
            "queue_membership": lambda: self.membership(QUEUES),
        }  # fmt: skip

    def last(self, low: float, high: float) -> None:
        """Let a fault last: its length is what is wanted here."""
        self.never.wait(self.draw.uniform(low, high))

    def victim(self) -> int:
        """A node."""
        return self.draw.choice(sorted(self.cluster.nodes))

    def kill9(self) -> int:
        """One node dies."""
        node = self.victim()
        self.cluster.kill9(node)
        self.last(0, 2)
        self.cluster.restart(node)
        return 1

    def kill9_all(self) -> int:
        """All nodes die at once: what was acknowledged is on their disks."""
        nodes = sorted(self.cluster.nodes)
        self.cluster.kill9(*nodes)
        for node in nodes:
            self.cluster.spawn(node)
        for node in nodes:
            self.cluster.wait_ready(node)
        return len(nodes)

    def pause(self) -> int:
        """A node stands still, and wakes up with what it believed."""
        node = self.victim()
        self.cluster.signal(node, signal.SIGSTOP)
        self.last(0.2, 5)
        self.cluster.signal(node, signal.SIGCONT)
        return 1

    def pause_some(self) -> int:
        """Some nodes stand still at once, perhaps all of them."""
        nodes = self.draw.sample(sorted(self.cluster.nodes), self.draw.randint(2, len(self.cluster.nodes)))
        for node in nodes:
            self.cluster.signal(node, signal.SIGSTOP)
        self.last(0.2, 5)
        for node in self.draw.sample(nodes, len(nodes)):
            self.cluster.signal(node, signal.SIGCONT)
        return len(nodes)

    def kill9_with_writer(self) -> int:
        """A node dies and its writer process with it, in the middle of whatever job it had."""
        node = self.victim()
        writer = self.cluster.writer(node)
        if writer is not None:
            try:
                writer.kill()
            except psutil.NoSuchProcess:
                writer = None
        self.cluster.kill9(node)
        self.last(0, 1)
        self.cluster.restart(node)
        return int(writer is not None)

    def kill_in_recovery(self) -> int:
        """All nodes die, and some die again while they recover."""
        nodes = sorted(self.cluster.nodes)
        self.cluster.kill9(*nodes)
        again = self.draw.sample(nodes, self.draw.randint(1, len(nodes)))
        for node in nodes:
            self.cluster.spawn(node)
        self.last(0.05, 0.8)
        self.cluster.kill9(*again)
        for node in again:
            self.cluster.spawn(node)
        for node in nodes:
            self.cluster.wait_ready(node)
        return len(again)

    def hold(self, *directions: tuple[int, int]) -> None:
        """Only these directions carry nothing."""
        self.cluster.wires.order(held=directions)

    def hits(self, kind: str) -> int:
        """End what the wires do; how often it hit."""
        return self.cluster.wires.order(held=[])[kind]

    def others(self, node: int) -> list[int]:
        """The other nodes."""
        return [other for other in sorted(self.cluster.nodes) if other != node]

    def partition(self) -> int:
        """One node alone."""
        node = self.victim()
        self.hold(*((node, other) for other in self.others(node)), *((other, node) for other in self.others(node)))
        self.last(1, 5)
        return self.hits("held")

    def partition_one_way(self) -> int:
        """One node that is only heard, or only hears."""
        node = self.victim()
        pairs = [(node, other) for other in self.others(node)]
        if self.draw.random() < 0.5:
            pairs = [(target, source) for source, target in pairs]
        self.hold(*pairs)
        self.last(1, 5)
        return self.hits("held")

    def partition_all(self) -> int:
        """Nobody hears anybody."""
        self.hold(*((one, other) for one in self.cluster.nodes for other in self.others(one)))
        self.last(1, 3)
        return self.hits("held")

    def bridge(self) -> int:
        """Two nodes that only the third can reach."""
        one, other = self.others(self.victim())[:2]
        self.hold((one, other), (other, one))
        self.last(1, 5)
        return self.hits("held")

    def flapping(self, node: int = 0) -> int:
        """A node's wires, on and off."""
        node = node or self.victim()
        pairs = [(node, other) for other in self.others(node)] + [(other, node) for other in self.others(node)]
        found = 0
        for _ in range(8):
            self.hold(*pairs)
            self.never.wait(0.1)
            found += self.hits("held")
            self.never.wait(0.1)
        return found

    def reset(self) -> int:
        """A node's connections end in the middle of whatever they carry."""
        node = self.victim()
        self.cluster.wires.order(reset=[(node, other) for other in self.others(node)])
        self.last(0, 1)
        return self.hits("reset")

    def wire_bit(self) -> int:
        """A bit flips in what a node sends."""
        node = self.victim()
        self.cluster.wires.order(flip=[(node, other) for other in self.others(node)])
        self.last(0.5, 1)
        return self.hits("flip")

    def order(self, node: int, text: str) -> None:
        """Tell a node's disk; whole or not at all."""
        path = self.cluster.orders(node)
        written = path.with_suffix(".new")
        written.write_text(text, "ascii")
        os.replace(written, path)

    def slow_disk(self) -> int:
        """One node's syncs take long."""
        node = self.victim()
        self.order(node, f"slow {self.draw.choice([0.01, 0.05, 0.3])}")
        self.last(2, 5)
        self.cluster.orders(node).unlink()
        return 1

    def disk_error(self) -> int:
        """One node's log can't be synced: it ends with its own exit code."""
        node = self.victim()
        self.order(node, "fail")
        try:
            code = self.cluster.end(node)
        finally:
            self.cluster.orders(node).unlink()
        assert code == EXIT_WAL_FAILED, f"node {node} ended with {code} after a failed sync"
        self.cluster.restart(node)
        return 1

    def tried(self, call: Callable[[], object], times: int = 8) -> bool:
        """A verb that may be refused for a while."""
        for _ in range(times):
            try:
                call()
                return True
            except LogyardError as error:
                self.refusal = f"{error.code}: {error}"
                self.never.wait(0.3)
        return False

    def membership(self, names: Sequence[str] = NAMES) -> int:
        """A member goes and comes back."""
        name, node = self.draw.choice(names), self.victim()

        def away() -> None:
            if node in self.yard.members(name)["members"]:
                self.yard.remove_member(name, node)

        def back() -> None:
            if node not in self.yard.members(name)["members"]:
                self.yard.add_member(name, node)

        gone = self.tried(away)
        self.last(0, 2)
        assert self.tried(back, 60), f"{name}: node {node} can't be added again: {self.refusal}"
        return int(gone)

    def learner(self) -> int:
        """A member goes, comes back as a learner whose wires come and go, and is promoted."""
        name, node = self.draw.choice(NAMES), self.victim()

        def change(kind: str) -> Callable[[], None]:
            def apply() -> None:
                role = self.role(name, node)
                if role != {"remove": "", "add_learner": "learner", "promote": "voter"}[kind]:
                    self.yard.run(members_call(name, [(kind, node)]))

            return apply

        gone = self.tried(change("remove"))
        added = self.tried(change("add_learner"), 60)
        assert added or not gone, f"{name}: node {node} can't be added as a learner: {self.refusal}"
        found = self.flapping(node)
        assert self.tried(change("promote"), 60), f"{name}: node {node} can't be promoted: {self.refusal}"
        return found * gone

    def role(self, name: str, node: int) -> str:
        """What the leader's configuration says of a node; "" where it is no member."""
        view = self.yard.run(Call("describe", {"name": name}, leaders_view, group=name))
        return "voter" if node in view["voters"] else "learner" if node in view["learners"] else ""

    def transfer(self) -> int:
        """Leaderships move."""
        return sum(
            self.tried(lambda name=name: self.yard.transfer(name, self.victim()), 2)  # type: ignore[misc]
            for name in self.draw.sample(NAMES, 4)
        )

    def rolling_restart(self) -> int:
        """Every node stops cleanly and starts again, one after the other."""
        for node in sorted(self.cluster.nodes):
            self.cluster.signal(node, signal.SIGTERM)
            assert self.cluster.end(node) == 0
            self.cluster.restart(node)
        return len(self.cluster.nodes)

    def snapshot_lag(self) -> int:
        """A node is away while the others snapshot and truncate: it comes back by snapshots."""
        node = self.victim()
        self.cluster.kill9(node)
        self.last(1, 3)
        taken = 0
        for other in self.others(node):
            taken += self.tried(lambda other=other: self.yard.snapshot(node=other), 3)  # type: ignore[misc]
        self.cluster.restart(node)
        return taken

    def writer_kill(self) -> int:
        """The writer process dies, wherever it is."""
        found = 0
        for node in sorted(self.cluster.nodes):
            writer = self.cluster.writer(node)
            if writer is not None:
                try:
                    writer.kill()
                    found += 1
                except psutil.NoSuchProcess:
                    pass
        return found

    def spoil(self, folder: str, *patterns: str) -> int:
        """Bits rot in the stopped files of the one node whose disk does that; what it loses must come from the others.

        It is stopped cleanly, so that the last batch is sealed: rot in an unsealed last batch is law 8's known rest.
        """
        node = self.rotten
        self.cluster.signal(node, signal.SIGTERM)
        assert self.cluster.end(node) == 0
        found = 0
        files = self.cluster.nodes[node].data / folder
        for path in sorted(path for pattern in patterns for path in files.rglob(pattern)):
            found += self.rot(path)
        self.cluster.restart(node)
        return found

    def rot(self, path: Path) -> int:
        """Flip a bit in the first two thirds of what a file has in use."""
        with path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            used = size
            while used > 0:
                file.seek(max(0, used - PAGE))
                if any(file.read(PAGE)):
                    break
                used -= PAGE
            if used < 4 * PAGE:
                return 0
            at = self.draw.randrange(2 * PAGE, max(2 * PAGE + 1, used * 2 // 3))
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << self.draw.randrange(8)]))
        return 1

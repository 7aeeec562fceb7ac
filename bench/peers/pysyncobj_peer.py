"""PySyncObj: commands into its replicated state machine, from inside the leader's process, as its users have it.

It keeps a journal but does not sync it, and has no logs to spread over: one object is one group. Each node is a run of
this module: it reads a load (one JSON line) from standard input; who leads runs it and answers with one line.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..cluster import reach
from ..histogram import Histogram
from ..workload import Workload
from .load import free_ports
from .peer import Load, Peer, PeerFailed, PeerSpec, this_python

LEADER_S = 30.0
DRAIN_S = 30.0
TICK_S = 0.002
QUEUE = 1_000_000


class PySyncObj(Peer):
    """Python processes with one replicated object."""

    name = "pysyncobj"
    install = "pip install pysyncobj"
    notes = ("does not sync", "its load runs inside the leader", "one group only")

    @classmethod
    def version(cls) -> str:
        """Return the version of the package."""
        return importlib.metadata.version("pysyncobj")

    def start(self) -> None:
        """Start all nodes and wait until each knows a leader."""
        self.ports = [f"127.0.0.1:{port}" for port in free_ports(self.nodes)]
        for at, address in enumerate(self.ports):
            others = [other for other in self.ports if other != address]
            told = json.dumps({"self": address, "others": others, "journal": str(self.directory / f"n{at}.journal")})
            log = self.directory / f"n{at}.log"
            with log.open("ab") as stream:
                process = subprocess.Popen(
                    this_python("-m", "logyard.bench.peers.pysyncobj_peer", told), stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=stream, start_new_session=True,
                )  # fmt: skip
            self.processes.append(process)
            self.logs.append(log)
        for process in self.processes:
            self.hear(process, b"ready")

    def hear(self, process: subprocess.Popen[bytes], word: bytes = b"") -> bytes:
        """Return a node's next line."""
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line or (word and line != word):
            raise PeerFailed(f"pysyncobj: a node ended early: {line[:200]!r} {self.tail()}")
        return line

    @property
    def addresses(self) -> list[str]:
        """All nodes."""
        return self.ports

    def drive(self, load: Load, specs: Sequence[PeerSpec], say: Callable[[str], None]) -> list[dict[str, Any]]:
        """Tell every node the load; who leads runs it."""
        if load.logs > 1 or load.rate:
            raise PeerFailed("pysyncobj: its load is a closed loop over one object")
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(specs[0]._replace(clients=load.clients)._asdict()).encode() + b"\n")
            process.stdin.flush()
        found: list[dict[str, Any]] = [json.loads(self.hear(process)) for process in self.processes]
        return [one for one in found if one] or [{}]

    def stop(self) -> None:
        """End the nodes, and close what they were told through."""
        pipes = [pipe for process in self.processes for pipe in (process.stdin, process.stdout) if pipe]
        super().stop()
        for pipe in pipes:
            pipe.close()


class InLeader:
    """The load inside the leader. Answers come in the object's own thread."""

    def __init__(self, spec: PeerSpec, node: Any) -> None:
        self.spec = spec
        self.node = node
        self.workload = Workload(spec.size, spec.seed, spec.lane)
        self.histogram = Histogram()
        self.number = self.outstanding = self.acknowledged = self.counted = self.failed = 0
        self.measure_from = self.measure_until = 0.0
        self.drained = threading.Event()

    def submit(self) -> None:
        """Submit one command."""
        self.number += 1
        self.outstanding += 1
        began = time.perf_counter()
        self.node.take(self.workload.body(self.number), callback=lambda _, error: self.done(began, error))

    def done(self, began: float, error: object) -> None:
        """Count one answer, and submit the next."""
        now = time.perf_counter()
        self.outstanding -= 1
        if error:
            self.failed += 1
        else:
            self.acknowledged += 1
            if self.measure_from <= now < self.measure_until:
                self.counted += 1
                self.histogram.add(now - began)
        if now < self.measure_until and not error:
            self.submit()
        elif not self.outstanding:
            self.drained.set()

    def run(self) -> dict[str, Any]:
        """Load, and return what was counted."""
        spec = self.spec
        self.measure_from = time.perf_counter() + spec.warmup_s
        self.measure_until = self.measure_from + spec.seconds
        for _ in range(spec.clients * spec.window):
            self.submit()
        self.drained.wait(spec.warmup_s + spec.seconds + DRAIN_S)
        return {
            "counted": self.counted, "acknowledged": self.acknowledged, "failed": self.failed + self.outstanding,
            "verified": 0, "lost": 0, "histogram": self.histogram.dump(), "problems": [], "cpu_s": 0.0,
        }  # fmt: skip


def main() -> None:
    """Run one node until its standard input ends."""
    library = importlib.import_module("pysyncobj")
    told = json.loads(sys.argv[1])

    class Taken(library.SyncObj):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            self.taken = 0
            config = library.SyncObjConf(journalFile=told["journal"], commandsQueueSize=QUEUE, autoTickPeriod=TICK_S)
            super().__init__(told["self"], told["others"], config)

        # The decorator leaves a second name in the class's body, so it has to be used here.
        @library.replicated  # type: ignore[untyped-decorator]
        def take(self, body: bytes) -> int:
            self.taken += 1
            return 0

    node = Taken()
    reach("a leader", node.isReady, LEADER_S)
    print("ready", flush=True)
    for line in sys.stdin:
        leads = not told["others"] or str(node._getLeader()) == told["self"]
        found = InLeader(PeerSpec(**json.loads(line)), node).run() if leads else {}
        print(json.dumps(found), flush=True)


PEERS: dict[str, type[Peer]] = {"pysyncobj": PySyncObj}


if __name__ == "__main__":
    main()

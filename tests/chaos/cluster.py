"""Three real daemons whose disks obey orders, whose peers are reached through `proxy`, and who know `register`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from logyard.service.local_cluster import STOP_S, LocalCluster, free_ports

from .proxy import Proxy

LIMITS = {
    "wal_file_bytes": 4 << 20,
    "generation_bytes": 64 << 20,
    "hibernate_after_ms": 1000,
    "snapshot_entries": 512,
}
"""Small files and short times, so that rolling, migration, compaction, snapshots and sleep happen within seconds."""

MACHINES = """[machines]
registers = "tests.chaos.register:Registers"
hashed-kv = "tests.chaos.hashed:HashedKV"
hashed-queue = "tests.chaos.hashed:HashedQueue"
"""


class ChaosCluster(LocalCluster):
    """A `LocalCluster` that can be tormented. Leave it as a context: then everything is let go and stopped."""

    def __init__(self, directory: Path, count: int = 3) -> None:
        super().__init__(directory, count, limits=LIMITS)
        self.proxy: Proxy | None = None

    def prepare(self) -> None:
        """Also the wires: each node dials the others through ports of its own. A cluster that is there keeps them."""
        wires = self.directory / "wires.json"
        super().prepare()
        if wires.exists():
            self.proxy = Proxy(json.loads(wires.read_text("utf-8")))
            return
        ordered = [(one, other) for one in self.nodes for other in self.nodes if one != other]
        ports = dict(zip(ordered, free_ports(len(ordered)), strict=True))
        for one, node in self.nodes.items():
            text = node.config_path.read_text("utf-8")
            head, clients, tail = text.partition("[clients]")
            for other, found in self.nodes.items():
                if other != one:
                    line = f'"{other}" = "{found.peer_address}"'
                    assert head.count(line) == 1
                    head = head.replace(line, f'"{other}" = "127.0.0.1:{ports[one, other]}"')
            tail = tail.replace("[limits]", f"{MACHINES}\n[limits]")
            node.config_path.write_text(head + clients + tail, "utf-8")
        dials = {number: int(node.peer_address.rpartition(":")[2]) for number, node in self.nodes.items()}
        pairs = [(one, other, port, dials[other]) for (one, other), port in ports.items()]
        wires.write_text(json.dumps(pairs), "utf-8")
        self.proxy = Proxy(pairs)

    @property
    def wires(self) -> Proxy:
        """The proxy, once the cluster is prepared."""
        assert self.proxy is not None
        return self.proxy

    def orders(self, node_id: int) -> Path:
        """The file that a node's disk obeys."""
        return self.nodes[node_id].directory / "orders"

    def spawn(self, node_id: int) -> None:
        """Start a node's process with its obedient disk."""
        node = self.nodes[node_id]
        command = [sys.executable, "-m", "tests.chaos.node", str(node.config_path), str(self.orders(node_id))]
        with node.log_path.open("ab") as log:
            node.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        node.pids.append(node.process.pid)

    def signal(self, node_id: int, number: signal.Signals) -> None:
        """Send a running node a signal."""
        process = self.nodes[node_id].process
        assert process is not None
        process.send_signal(number)

    def end(self, node_id: int, timeout_s: float = STOP_S) -> int:
        """Wait until a node has ended; its exit code. Raises `subprocess.TimeoutExpired`."""
        node = self.nodes[node_id]
        assert node.process is not None
        code = node.process.wait(timeout_s)
        node.forget()
        return code

    def writer(self, node_id: int) -> psutil.Process | None:
        """A node's writer process, if it runs."""
        process = self.nodes[node_id].process
        try:
            children = psutil.Process(process.pid).children() if process is not None else []
        except psutil.NoSuchProcess:
            return None
        return children[0] if children else None

    def stop(self) -> dict[int, int]:
        """Let everything go, then stop."""
        for number, node in self.nodes.items():
            self.orders(number).unlink(missing_ok=True)
            if node.process is not None and node.process.poll() is None:
                node.process.send_signal(signal.SIGCONT)
        codes = super().stop()
        if self.proxy is not None:
            self.proxy.close()
            self.proxy = None
        return codes

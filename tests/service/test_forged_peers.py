"""Real daemons whose peer ports anybody on the machine may dial."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from logyard import connect_sync
from logyard.engine.transport.frame import CONTROL, Hello, encode_hello
from logyard.service.local_cluster import LocalCluster


def say(address: str, data: bytes) -> None:
    """Send this to a port, and hear it out."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as sock, suppress(OSError):
        sock.sendall(data)
        while sock.recv(4096):
            pass


def test_forged_hellos_end_no_cluster(tmp_path: Path) -> None:
    """Two frames of a hundred bytes said that node 2 is in its epoch 2^62: the real one ended, for good. The directory
    was written by a release that had no secrets."""
    cluster = LocalCluster(tmp_path, 3)
    cluster.prepare()
    for node in cluster.nodes.values():
        lines = node.config_path.read_text().splitlines(keepends=True)
        node.config_path.write_text("".join(line for line in lines if "secret" not in line))
    cluster.secret.unlink()
    with LocalCluster(tmp_path, 3) as cluster:
        cluster.start()
        assert cluster.secret.stat().st_mode & 0o777 == 0o600
        with connect_sync(cluster.addresses) as yard:
            yard.create("orders")
            yard.log("orders").append(b"one")
            for target in (1, 3):
                forged = Hello("local", 2, target, 2**62, CONTROL)
                say(cluster.nodes[target].peer_address, encode_hello(forged))
            cluster.kill9(2)
            cluster.restart(2)
            cluster.kill9(1)
            assert yard.log("orders").append(b"two") == 1, "node 2 is one of the two that are left"
            cluster.restart(1)
        assert cluster.stop() == {1: 0, 2: 0, 3: 0}

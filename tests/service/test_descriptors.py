"""A node that runs out of file descriptors: connections give way, files do not, and no disk is blamed."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from logyard import connect_sync
from logyard.client.sync import Yard
from logyard.protocol import wire
from logyard.service.local_cluster import LocalCluster

LIMIT = 192
LIMITS = {"wal_file_bytes": 1 << 20, "connections_max": 4096, "hibernate_after_ms": 0}


@contextmanager
def one_node(path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(path, 1, limits=LIMITS) as cluster:
        cluster.start()
        yield cluster


def pid_of(cluster: LocalCluster) -> int:
    process = cluster.nodes[1].process
    assert process is not None
    return process.pid


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def crowd(stack: ExitStack, address: str, count: int) -> list[socket.socket]:
    """So many idle clients that said who they are."""
    host, _, port = address.rpartition(":")
    found = []
    for _ in range(count):
        sock = stack.enter_context(socket.create_connection((host, int(port)), 5))
        with suppress(OSError):
            sock.sendall(wire.encode_hello())
        found.append(sock)
    return found


def roll(yard: Yard, times: int) -> None:
    """Fill so many WAL files: each roll opens files."""
    log = yard.log("orders")
    for _ in range(times):
        log.append_many([(b"", bytes(256 << 10))] * 5)


def test_idle_clients_leave_descriptors_for_the_log(tmp_path: Path) -> None:
    """1,100 of them took what the next WAL file needed, and the node ended as if its disk had failed."""
    with one_node(tmp_path) as cluster, connect_sync(cluster.addresses) as yard:
        yard.create("orders")
        roll(yard, 2)
        pid = pid_of(cluster)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        with ExitStack() as stack:
            crowd(stack, cluster.addresses[0], 2 * LIMIT)
            roll(yard, 8)
            assert descriptors(pid) < LIMIT
            assert not cluster.exited(), cluster.nodes[1].log_tail()
            yard.compact()
            assert yard.log("orders").latest().end == 50
        assert cluster.stop() == {1: 0}


def test_the_soft_limit_is_raised_at_the_start(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        with one_node(tmp_path) as cluster:
            found = resource.prlimit(pid_of(cluster), resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == (hard, hard)

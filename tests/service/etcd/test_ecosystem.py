"""Programs that run on etcd, on three gateways of which the leader's is killed: patroni's driver, tooz' own tests.

They come with the extra `ecosystem`; where it is not installed, these say so.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from .server import EtcdServer, spawned
from .test_launcher import free_peers

NAMES = ("a", "b", "c")
BEFORE_KILL = 12
"""Tests of tooz that are over when the leader is killed."""


def needs(*modules: str) -> None:
    """Skip where a package is missing."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"not run: {', '.join(absent)} is not installed (pip install 'logyard[ecosystem]')")


@contextmanager
def three(directory: Path) -> Iterator[dict[str, EtcdServer]]:
    """Three nodes, each with its gateway."""
    urls = [f"http://127.0.0.1:{port}" for port in free_peers(3)]
    cluster = "--initial-cluster=" + ",".join(f"{name}={url}" for name, url in zip(NAMES, urls, strict=True))
    with ExitStack() as running:
        started = {
            name: running.enter_context(
                spawned(directory / name, f"--name={name}", cluster, "--listen-client-urls=http://127.0.0.1:0")
            )
            for name in NAMES
        }
        yield {name: EtcdServer(process, directory / name / "errors.txt") for name, process in started.items()}


def leader_of(servers: dict[str, EtcdServer]) -> str:
    """The name of the member that leads."""
    one = next(iter(servers.values()))
    status = one.call("/v3/maintenance/status")
    (name,) = [row["name"] for row in one.call("/v3/cluster/member/list")["members"] if row["ID"] == status["leader"]]
    return str(name)


def test_patroni_follows_three_gateways_over_a_failover(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    needs("patroni", "etcd", "psycopg")
    from patroni.dcs import get_dcs

    caplog.set_level(logging.WARNING, "patroni")
    with three(tmp_path) as servers:
        urls = {name: server.url for name, server in servers.items()}
        hosts = [url.removeprefix("http://") for url in urls.values()]
        dcs: Any = get_dcs({
            "etcd3": {"hosts": hosts}, "scope": "batman", "name": "pg1", "namespace": "service",
            "ttl": 60, "loop_wait": 1, "retry_timeout": 30,
        })  # fmt: skip
        assert dcs.initialize(create_new=True, sysid="1") and not dcs.initialize(create_new=True, sysid="2")
        assert dcs.attempt_to_acquire_leader()
        terms = set()
        for turn in range(12):
            if turn == 4:
                killed = leader_of(servers)
                servers[killed].process.send_signal(signal.SIGKILL)
                del urls[killed]
            # Another gateway each time, as after each of its errors.
            dcs._client.set_base_uri(list(urls.values())[turn % len(urls)])
            assert dcs.touch_member({"conn_url": "postgres://pg1", "state": "running", "turn": turn})
            assert dcs.update_leader(dcs.get_cluster(), turn + 1)
            cluster = dcs.get_cluster()
            assert cluster.leader.name == "pg1" and cluster.status.last_lsn == turn + 1
            assert [(one.name, one.data["turn"]) for one in cluster.members] == [("pg1", turn)]
            terms.add(dcs._client._raft_term)
        assert dcs.delete_leader(cluster.leader) and dcs.get_cluster().leader is None
        assert len(terms) >= 2, "another term, of another leader"
        # What patroni says before it raises StaleEtcdNode.
        assert "Old known term" not in caplog.text
        # Its thread goes on watching, and has nothing to say to other tests.
        logging.getLogger("patroni").disabled = True


def test_tooz_coordinates_over_a_failover(tmp_path: Path) -> None:
    needs("tooz", "testtools", "fixtures", "sysv_ipc", "pymemcache", "redis")
    with three(tmp_path) as servers:
        leader = leader_of(servers)
        other = next(server for name, server in servers.items() if name != leader)
        words = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "--pyargs", "tooz.tests.test_coordination")
        command = [sys.executable, *words]
        environment = {**os.environ, "TOOZ_TEST_URL": f"etcd3+http://{other.host}:{other.port}?api_version=v3"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=tmp_path
        ) as process:
            assert process.stdout is not None
            lines: list[str] = []
            passed = 0
            for line in process.stdout:
                lines.append(line)
                passed += "PASSED" in line
                if passed == BEFORE_KILL:
                    servers[leader].process.send_signal(signal.SIGKILL)
        assert process.returncode == 0 and passed > 4 * BEFORE_KILL, "".join(lines[-100:])

"""Who is asked while a read is planned: all at once, a silent one once, a refused address by name."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logyard.client.admin import Call
from logyard.client.sync import Yard, connect_sync
from logyard.pipeline import network
from logyard.pipeline.datasource import LogyardDataSource, plan
from logyard.pipeline.errors import OptionError
from logyard.pipeline.network import NetworkSource
from logyard.pipeline.options import parse_options
from logyard.protocol.errors import LogyardError
from logyard.service.local_cluster import LocalCluster

from .support import fill, reach

PATIENCE_S = 3.0


def asked_of(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], object] = lambda node: None) -> list[int]:
    """The nodes that are asked whether they are there."""
    asked: list[int] = []
    run = Yard.run

    def noted(self: Yard, call: Call[Any], timeout: float | None = None) -> Any:
        if call.method == "cluster" and call.pinned:
            asked.append(call.nodes[0])
            before(call.nodes[0])
        return run(self, call, timeout)

    monkeypatch.setattr(Yard, "run", noted)
    return asked


def test_all_nodes_are_asked_at_once_and_a_silent_one_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "NODE_PATIENCE_S", PATIENCE_S)
    with LocalCluster(tmp_path, 3) as cluster:
        cluster.start()
        with connect_sync(cluster.addresses) as yard:
            fill(yard, ["a"], 10)
            reach(lambda: all(yard.log("a").latest(node=node).end == 10 for node in (1, 2, 3)))
        meeting = threading.Barrier(3)
        asked = asked_of(monkeypatch, lambda node: meeting.wait(20) if not meeting.broken else None)
        with_all = NetworkSource(cluster.addresses)
        assert [info.members for info in with_all.logs()] == [(1, 2, 3)] and sorted(asked) == [1, 2, 3]
        with_all.close()
        meeting.abort()
        process = cluster.nodes[3].process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        try:
            # The silent one comes first: it may not be in the way of the others.
            options = parse_options({"servers": ",".join(reversed(cluster.addresses)), "subscribe": "a"})
            asked.clear()
            for _ in range(3):
                tasks = plan(options)
                assert [3 in one.nodes for task in tasks for one in task] == [False]
            assert asked.count(3) == 1 and asked.count(1) == asked.count(2) == 3
            monkeypatch.setattr(network, "SILENT_S", 0.0)
            plan(options)
            assert asked.count(3) == 2
        finally:
            os.kill(process.pid, signal.SIGCONT)


def test_an_address_that_refuses_is_an_error_at_once_that_names_it() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        options = parse_options({"servers": address, "subscribe": "a", "timeoutSeconds": "60"})
        began = time.monotonic()
        with pytest.raises(LogyardError, match=f"^servers: none of them answers: .*{address}"):
            plan(options)
        # Not after a minute of trying.
        assert time.monotonic() - began < 20


def test_a_log_that_is_not_there_is_refused_by_load(tmp_path: Path) -> None:
    """And not by the first action: `load()` asks for the schema."""
    with LocalCluster(tmp_path, 1) as cluster:
        cluster.start()
        with connect_sync(cluster.addresses) as yard:
            fill(yard, ["a"], 1)
        given = {"servers": cluster.addresses[0]}
        assert LogyardDataSource(given | {"subscribe": "a"}).schema().names[0] == "log"
        for option, value in (("subscribe", "a,none"), ("assign", '["none"]')):
            with pytest.raises(OptionError, match=f"^{option}: there is no append log 'none'"):
                LogyardDataSource(given | {option: value}).schema()

"""What takes seconds to start: one Spark for all tests that need one, and a cluster of processes for each file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from logyard.client.sync import Yard, connect_sync
from logyard.pipeline import local_session, network, stream
from logyard.pipeline.jobs import audit_cluster
from logyard.service.local_cluster import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session of two threads. Without Java this fails, and says what to install."""
    found = local_session("tests", memory="1g")
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def nobody_is_silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A node that a busy machine has stand still is waited for (so is one that was killed, each time), and one that a
    test stopped is forgotten after it."""
    for module in (network, audit_cluster):
        monkeypatch.setattr(module, "NODE_PATIENCE_S", 6.0)
    for name in ("LEADER_PATIENCE_S", "HINT_PATIENCE_S"):
        monkeypatch.setattr(stream, name, 30.0)
    network.SILENT.clear()
    yield
    network.SILENT.clear()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes, of one file's tests."""
    with LocalCluster(tmp_path_factory.mktemp("yard"), 3) as found:
        found.start()
        yield found


@pytest.fixture(scope="module")
def yard(cluster: LocalCluster) -> Iterator[Yard]:
    """A client of the cluster."""
    with connect_sync(cluster.addresses) as found:
        yield found

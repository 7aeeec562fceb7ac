"""`logyard check` on directories of the storm's nodes, killed or stopped: no false alarm, whatever they went through.

One node's disk rots on purpose; its check has to come to an end and may find what it likes. On the others nothing may
be damaged, nor unknown: the machines are at hand. Called by `run` during the storm and when it is over.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator
from typing import Any

from logyard.pipeline.directory.report import DAMAGE, UNKNOWN
from logyard.protocol.errors import DirectoryInUse
from logyard.service.check.run import check_directory

from . import judge
from .cluster import MACHINES, ChaosCluster

OWN: dict[str, str] = tomllib.loads(MACHINES)["machines"]


def complaints(cluster: ChaosCluster, nodes: Collection[int], rotten: int) -> Iterator[str]:
    """What is wrong with the directories of `nodes`, none of which runs."""
    for node in nodes:
        report: dict[str, Any] = {}

        def read(node: int = node, report: dict[str, Any] = report) -> str:
            try:
                report |= check_directory(cluster.nodes[node].data, machines=OWN)
            except DirectoryInUse as error:
                # Its writer has not seen yet that it is alone.
                return str(error)
            return ""

        if complaint := judge.until(read):
            yield f"offline check of node {node}: {complaint}"
        for finding in report.get("findings", ()):
            if finding["severity"] in (DAMAGE, UNKNOWN) and node != rotten:
                yield f"offline check of node {node}: {finding}"


def look(cluster: ChaosCluster, node: int, rotten: int) -> list[str]:
    """Kill a node, check what it leaves, and start it again."""
    cluster.kill9(node)
    found = list(complaints(cluster, [node], rotten))
    cluster.restart(node)
    return found

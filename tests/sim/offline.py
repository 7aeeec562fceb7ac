"""The offline check of every node's directory when a run has ended: `logyard check` on what the simulated disks hold.

Each file system is written out as real files and environments, as its process left them (no power cut), and read in
this process. What is damaged on purpose may be found damaged; without such a fault no finding may be damage, nor
unknown: every machine is at hand. Called by `run` for runs with the feature `offline`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from logyard.engine.log.meta import fill_environment
from logyard.pipeline.directory.report import DAMAGE, UNKNOWN
from logyard.protocol.errors import LogyardError
from logyard.service.check import process as check_process

from .cluster import Cluster, Host
from .files import Directory, File

POISON = "G1.poison"
"""A command at which a machine fails: its group stands still until it is skipped, and what lives then is not known."""


def complaints(cluster: Cluster, damaged: Collection[int], hits: Collection[str]) -> Iterator[str]:
    """What the check says of directories to which nothing was done; `damaged`: nodes to whose something was."""
    wrong = (DAMAGE,) if POISON in hits else (DAMAGE, UNKNOWN)
    for host in cluster.hosts.values():
        if host.number in damaged:
            # It may find what it likes, but it has to come to an end.
            with suppress(LogyardError):
                _findings(host, cluster)
            continue
        for finding in _findings(host, cluster):
            if finding["severity"] in wrong:
                yield f"offline check of node {host.number}: {finding}"


def _findings(host: Host, cluster: Cluster) -> list[dict[str, str]]:
    root = host.files.directory(host.files.prefix)
    with tempfile.TemporaryDirectory(prefix="logyard-sim-") as temporary:
        target = Path(temporary) / "data"
        target.mkdir()
        _write(root, target)
        if not (target / "meta").is_dir():
            return []
        found: list[dict[str, str]] = check_process.inspect(target, frozenset(), lambda line: None, cluster.machines)[
            "findings"
        ]
        return found


def _write(directory: Directory, target: Path) -> None:
    """One directory as real files; one with an environment is that environment, and what lies beside it."""
    data = directory.names.get("data.mdb")
    if isinstance(data, File) and data.rows is not None:
        target.rmdir()
        fill_environment(str(target), {bytes(key): bytes(value) for key, value in data.rows.values.items()})
    for name, node in directory.names.items():
        if isinstance(node, File) and (target / name).exists():
            # The environment's own.
            continue
        if isinstance(node, Directory):
            (target / name).mkdir()
            _write(node, target / name)
        else:
            (target / name).write_bytes(node.seen)

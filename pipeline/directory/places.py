"""Where data directories are. Used by `source`, the audit and the command line."""

from __future__ import annotations

from pathlib import Path


def data_directories(path: Path) -> list[Path]:
    """Return the data directories meant by `path`: itself, that of a node's directory, or those of a local cluster."""
    found = [(one.parent.name.partition("-")[2], one.parent) for one in path.glob("node-*/node.toml")]
    # A copy that somebody laid beside them ("node-2.bak") is no node of the cluster.
    nodes = sorted((int(number), node) for number, node in found if number.isascii() and number.isdigit())
    if nodes:
        return [node / "data" for _, node in nodes]
    if (path / "node.toml").exists():
        return [path / "data"]
    return [path]

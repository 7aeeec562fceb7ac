"""Where data directories are. Used by `source`, the audit and the command line."""

from __future__ import annotations

from pathlib import Path


def data_directories(path: Path) -> list[Path]:
    """Return the data directories meant by `path`: itself, that of a node's directory, or those of a local cluster."""
    nodes = sorted(path.glob("node-*/node.toml"), key=lambda found: int(found.parent.name.partition("-")[2]))
    if nodes:
        return [found.parent / "data" for found in nodes]
    if (path / "node.toml").exists():
        return [path / "data"]
    return [path]

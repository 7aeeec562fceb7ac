"""What all nodes of a cluster know together: nodes, names of logs, moves, and what other sections hold."""

from __future__ import annotations

from .machine import Catalog
from .section import At, Section, Table

__all__ = ["At", "Catalog", "Section", "Table"]

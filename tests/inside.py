"""What only tests reach for: the engine inside of an embedded system."""

from __future__ import annotations

from logyard.engine.host.engine import System
from logyard.service.embedded import EmbeddedSystem
from logyard.service.node import Node


def node_of(system: EmbeddedSystem) -> Node:
    """The node behind the verbs."""
    assert isinstance(system.node, Node)
    return system.node


def engine_of(system: EmbeddedSystem) -> System:
    return node_of(system).system

"""What users of the engine may build their own tests on: in-memory twins of the doors to the world.

Every twin keeps the real codec and the real state machines and leaves out only the kernel. Imported by tests only.
"""

from __future__ import annotations

from .engine.transport.memory import MemoryNetwork

__all__ = ["MemoryNetwork"]

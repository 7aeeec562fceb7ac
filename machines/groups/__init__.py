"""Consumer groups: who reads which partition, and how far."""

from __future__ import annotations

from .machine import Groups

__all__ = ["Groups"]

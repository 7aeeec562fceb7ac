"""A queue: messages with leases, delays, priorities and dead letters, handed to consumers."""

from __future__ import annotations

from .machine import Queue

__all__ = ["Queue"]

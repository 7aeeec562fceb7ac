"""Keys with values: revisions, transactions, history, watches, leases."""

from __future__ import annotations

from .machine import KV

__all__ = ["KV"]

"""The append log: records with dense offsets, keys, producers, retention."""

from __future__ import annotations

from .machine import AppendLog

__all__ = ["AppendLog"]

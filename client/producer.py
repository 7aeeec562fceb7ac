"""Idempotent producers of an append log: their numbers, and the appends of both clients.

What a producer sent under a sequence is in the log once, however often it is sent, also by a program that was started
anew and whose sessions ended. A program keeps a name of its own, numbers what it sends by something that it can tell
again (a line number, a database's log position), and after a restart sends everything above `last`, or all of it again.
"""

from __future__ import annotations

from ._async.producer import Producer
from ._sync.producer import Producer as SyncProducer
from .numbering import NUMBER_MAX, Numbering, producer_number

__all__ = ["NUMBER_MAX", "Numbering", "Producer", "SyncProducer", "producer_number"]

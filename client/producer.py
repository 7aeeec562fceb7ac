"""Idempotent producers of an append log: their numbers, and the appends of both clients.

What a producer sent under a sequence is in the log once, however often it is sent, also by a program that was started
anew and whose sessions ended. A program keeps a name of its own, numbers what it sends by something that it can tell
again (a line number, a database's log position), and after a restart sends everything above `last`, or all of it again.

A fenced producer (`Log.epoch`) is for sinks that write the same batch again after a failure, with several tasks: the
batch is an epoch, a task's part of it a lane, whose frames are numbered from 1 on and compared by their contents. A
later epoch, or `close_epoch`, fences whoever still writes an earlier one; a higher incarnation begins anew.
"""

from __future__ import annotations

from ._async.producer import EpochWriter, Producer
from ._sync.producer import EpochWriter as SyncEpochWriter
from ._sync.producer import Producer as SyncProducer
from .numbering import NUMBER_MAX, Numbering, producer_number

__all__ = [
    "NUMBER_MAX", "EpochWriter", "Numbering", "Producer", "SyncEpochWriter", "SyncProducer", "producer_number",
]  # fmt: skip

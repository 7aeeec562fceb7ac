"""What the payload store raises for the world's faults; its own bugs are assertions.

The package imports nothing of ours, so the host translates these into the engine's errors. Nothing here ever
carries payload bytes.
"""

from __future__ import annotations

import errno

SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What the system says when the process or the machine lacks descriptors or memory."""


class PayloadError(Exception):
    """The root of this package's errors."""


class PayloadCorrupt(PayloadError):
    """Stored bytes do not match their hash: never served; fetch the payload from a peer. (uid, index) name the
    entry, or are 0."""

    def __init__(self, path: str, what: str, want: object, got: object, uid: int = 0, index: int = 0) -> None:
        super().__init__(f"{path}: {what} is damaged: want {want}, got {got}; fetch it from a peer")
        self.path = path
        self.what = what
        self.uid = uid
        self.index = index


class PayloadMissing(PayloadError):
    """No such entry or unit here. If it was not released, that is damage: fetch it from a peer."""

    def __init__(self, uid: int, index: int, unit: int | None = None) -> None:
        where = f"entry {index}" if unit is None else f"unit {unit} of entry {index}"
        super().__init__(f"group {uid:016x}: {where} is not in the payload store")
        self.uid = uid
        self.index = index
        self.unit = unit


class GenerationFailed(PayloadError):
    """An environment cannot be opened, read or written; it is set aside and its content fetched from peers."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class GenerationUnfinished(GenerationFailed):
    """Its creation was cut off by a crash: nothing was ever stored there, and it may simply be removed."""


class FormatNewer(GenerationFailed):
    """Written by a newer version: nothing is touched."""


class StoreShort(PayloadError):
    """The process or the machine lacks descriptors or memory, which says nothing about a file: to be done again."""


class JobStale(PayloadError):
    """A redone job names rows that are gone: build a new job under a new number."""


class StoreFull(PayloadError):
    """The disk has no room; the transaction was aborted whole. Dropping dead generations still works."""

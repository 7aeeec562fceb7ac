"""Records and pages of them, under the name that users import them by; they live in `protocol.records`."""

from __future__ import annotations

from logyard.protocol.records import (
    BlockError,
    Page,
    Record,
)  # fmt: skip

__all__ = [
    "BlockError", "Page", "Record",
]  # fmt: skip

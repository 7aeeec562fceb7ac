"""A queue's messages, under the name that users import them by; they live in `protocol.queue`."""

from __future__ import annotations

from logyard.protocol.queue import (
    Message,
    NotHeld,
)  # fmt: skip

__all__ = [
    "Message", "NotHeld",
]  # fmt: skip

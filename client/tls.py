"""The files of a TLS identity, under the name that users import them by; they live in `protocol.tls`."""

from __future__ import annotations

from logyard.protocol.tls import (
    TlsConfig,
    TlsError,
)  # fmt: skip

__all__ = [
    "TlsConfig", "TlsError",
]  # fmt: skip

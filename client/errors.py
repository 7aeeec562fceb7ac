"""The errors under the name that clients know them by; they live in `protocol.errors`, one family for everybody."""

from __future__ import annotations

from logyard.protocol.errors import (
    KINDS,
    BadRequest,
    Busy,
    Corrupt,
    DirectoryInUse,
    Gone,
    GroupExists,
    GroupStopped,
    JobFailed,
    JobPoisoned,
    LogyardError,
    NoSpace,
    NotLeader,
    Outdated,
    OutOfRange,
    Refused,
    SessionExpired,
    Unknown,
    UnknownGroup,
    WalFailed,
    WrongIdentity,
    WrongKind,
    classes,
    error_of,
)  # fmt: skip

__all__ = [
    "KINDS", "BadRequest", "Busy", "Corrupt", "DirectoryInUse", "Gone", "GroupExists", "GroupStopped", "JobFailed",
    "JobPoisoned", "LogyardError", "NoSpace", "NotLeader", "OutOfRange", "Outdated", "Refused", "SessionExpired",
    "Unknown", "UnknownGroup", "WalFailed", "WrongIdentity", "WrongKind", "classes", "error_of",
]  # fmt: skip

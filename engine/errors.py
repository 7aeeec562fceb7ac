"""The errors under the name that embedders know them by; they live in `protocol.errors`, one family for everybody."""

from __future__ import annotations

from logyard.protocol.errors import (
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
    decode_error,
    encode_error,
)  # fmt: skip

__all__ = [
    "BadRequest", "Busy", "Corrupt", "DirectoryInUse", "Gone", "GroupExists", "GroupStopped", "JobFailed",
    "JobPoisoned", "LogyardError", "NoSpace", "NotLeader", "OutOfRange", "Outdated", "Refused", "SessionExpired",
    "Unknown", "UnknownGroup", "WalFailed", "WrongIdentity", "WrongKind", "decode_error", "encode_error",
]  # fmt: skip

"""Every error for the world's faults (our own bugs are assertions), one class a code, for whoever meets it.

An embedded engine, a client on the network and the payload store raise the same classes. `code` travels on the wire
and never changes; `retry` says what a caller may do: ``never`` (the request is wrong, or its answer final),
``same_session`` (again, here, later, under the same session and sequence) or ``elsewhere`` (another node). A code that
is not known here (a machine's own refusal, say) becomes the root class with that code, so nothing is lost on the way.
Raised on every floor; `error_value` and `encode_error` put one on a wire, `error_of` takes it off.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, Self

import msgpack

__all__ = [
    "BadRequest", "Busy", "Corrupt", "DirectoryInUse", "Gone", "GroupExists", "GroupStopped", "JobFailed",
    "JobPoisoned", "LogyardError", "NoSpace", "NotLeader", "OutOfRange", "Outdated", "Refused", "SessionExpired",
    "Unknown", "UnknownGroup", "WalFailed", "WrongIdentity", "WrongKind",
]  # fmt: skip
# What users catch, by this one list: as `logyard.Busy`, `logyard.client.errors.Busy`, `logyard.engine.errors.Busy`.

RETRIES = ("never", "same_session", "elsewhere")
KINDS = ("log", "kv", "queue")
"""Of groups, as far as the clients have a handle of each."""
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What the system says when the process or the machine lacks descriptors or memory."""
SHORTAGE = "the node's file descriptors or memory"
SHORT_RETRY_S = 0.5


class LogyardError(Exception):
    """The root. Subclasses set `code` and `retry`, which an instance may have of its own; `details` travels to the
    client as plain values."""

    code = "error"
    retry = "never"

    def __init__(
        self, message: str, /, *, code: str | None = None, retry: str | None = None, **details: object
    ) -> None:
        super().__init__(message)
        self.details: dict[str, object] = details
        if code is not None:
            self.code = code
        if retry is not None:
            self.retry = retry

    @classmethod
    def told(
        cls,
        message: str,
        details: Mapping[str, object] | None = None,
        *,
        code: str | None = None,
        retry: str | None = None,
    ) -> Self:
        """Return an error of this class with a message that somebody else wrote, past the class's own constructor."""
        error = cls.__new__(cls)
        LogyardError.__init__(error, message, code=code, retry=retry)
        error.details = dict(details or {})
        return error

    @property
    def message(self) -> str:
        """The text."""
        return str(self)

    def again(self) -> Self:
        """Return the same error as a new object, for a second task to raise (a traceback grows with each raise)."""
        error = type(self).told(str(self))
        error.__dict__.update(self.__dict__, details=dict(self.details))
        error.__dict__.pop("__notes__", None)
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).told, (str(self),), self.__dict__

    def _number(self, key: str) -> float:
        value = self.details.get(key)
        return value if isinstance(value, (int, float)) else 0


class Corrupt(LogyardError):
    """Bytes on disk or wire that do not match their checksum; names path, offset, want and got."""

    code = "corrupt"

    def __init__(self, path: str, offset: int, want: object, got: object) -> None:
        super().__init__(
            f"{path}: damaged at byte {offset}: want {want}, got {got}; run `logyard check` on the directory",
            path=path,
            offset=offset,
        )


class Busy(LogyardError):
    """A byte budget is used up; try again after `retry_after` seconds. `cause` names the budget."""

    code = "busy"
    retry = "same_session"

    def __init__(self, cause: str, retry_after: float) -> None:
        super().__init__(f"busy: {cause} is full; try again in {retry_after:g} s", cause=cause, retry_after=retry_after)

    @property
    def cause(self) -> str:
        """The budget."""
        return str(self.details.get("cause", ""))

    @property
    def retry_after(self) -> float:
        """Seconds to wait before the next try."""
        return self._number("retry_after")


class NotLeader(LogyardError):
    """This member does not lead its group; `leader` is the node that may (0: unknown)."""

    code = "not_leader"
    retry = "elsewhere"

    def __init__(self, leader: int) -> None:
        super().__init__(
            f"not the leader; try node {leader}" if leader else "no leader known; try again", leader=leader
        )

    @property
    def leader(self) -> int:
        """The node that may lead, or 0."""
        return int(self._number("leader"))


class Unknown(LogyardError):
    """The outcome of a command is not known: it may or may not have been committed."""

    code = "unknown"
    retry = "same_session"


class SessionExpired(LogyardError):
    """The client's session ended; what was in flight under it may or may not have been applied."""

    code = "session_expired"


class NoSpace(LogyardError):
    """The disk is full: reads, truncation and deletion go on, writes are refused until there is space."""

    code = "no_space"
    retry = "same_session"

    @property
    def retry_after(self) -> float:
        """Seconds to wait before the next try: nothing changes sooner."""
        return self._number("retry_after") or 1.0


class JobPoisoned(LogyardError):
    """A storage job killed the writer process again and again; it is set aside, and the reason is in the status."""

    code = "job_poisoned"


class JobFailed(LogyardError):
    """A storage job failed by a defect of this program; `logyard status` names it under `jobs`."""

    code = "job_failed"


class Gone(LogyardError):
    """What was asked for was released or truncated."""

    code = "gone"


class OutOfRange(LogyardError):
    """An offset outside of the log; `start` and `end` name what there is."""

    code = "out_of_range"


class UnknownGroup(LogyardError):
    """No group of that name on this node."""

    code = "unknown_group"
    retry = "elsewhere"


ANOTHER = "another"
"""Among an `UnknownGroup`'s details: its name is that of another group by now, made anew."""


class GroupExists(LogyardError):
    """A group of that name is there already, with another definition."""

    code = "group_exists"


class GroupStopped(LogyardError):
    """This member was stopped by damage or by an exception of its machine; `describe` says why."""

    code = "group_stopped"
    retry = "elsewhere"


class BadRequest(LogyardError):
    """A malformed name, number, frame or option; the message says what is expected."""

    code = "bad_request"


class WrongKind(BadRequest):
    """The group is of another kind than was asked for; nothing was proposed. `kind` and `wanted` in `details`."""

    code = "wrong_kind"

    def __init__(self, name: str, kind: str, wanted: str) -> None:
        face = f"use the verbs of a {kind}" if kind in KINDS else "its commands go through a session (open_session)"
        super().__init__(
            f"group {name!r} is a {kind} group, and this is for a {wanted} group: {face}, or name another group",
            name=name,
            kind=kind,
            wanted=wanted,
        )


class Refused(LogyardError):
    """A well-formed request that the present state forbids (an illegal membership change, say)."""

    code = "refused"


class DirectoryInUse(LogyardError):
    """Another process holds the data directory."""

    code = "directory_in_use"


class WrongIdentity(LogyardError):
    """A directory or a peer of another node or cluster, or of a newer format."""

    code = "wrong_identity"


class Outdated(WrongIdentity):
    """A node's data directory is not the one that the others know it by: wiped, or restored from a copy. It has
    forgotten what it promised, and takes no part (exit code 76)."""

    code = "outdated"
    reason = ""

    def __init__(self, node: int, reason: str) -> None:
        super().__init__(f"node {node} takes no part: {reason}", node=node)
        self.reason = reason

    @property
    def node(self) -> int:
        """The node that takes no part."""
        return int(self._number("node"))


class WalFailed(LogyardError):
    """A write or a sync of the WAL failed: this node acknowledges nothing more and exits (law 7)."""

    code = "wal_failed"
    retry = "elsewhere"


class PayloadError(LogyardError):
    """The root of what only the payload store raises: each of its errors is also the one that callers know. None
    carries payload bytes."""


class PayloadCorrupt(PayloadError, Corrupt):
    """Stored bytes do not match their hash: never served; fetch the payload from a peer. (uid, index) name the
    entry, or are 0."""

    def __init__(self, path: str, what: str, want: object, got: object, uid: int = 0, index: int = 0) -> None:
        LogyardError.__init__(
            self,
            f"{path}: {what} is damaged: want {want}, got {got}; fetch it from a peer",
            path="payload store",
            offset=0,
        )
        self.path = path
        self.what = what
        self.uid = uid
        self.index = index


class PayloadMissing(PayloadError, Gone):
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


class StoreShort(PayloadError, Busy):
    """The process or the machine lacks descriptors or memory, which says nothing about a file: to be done again.
    `reason` says where."""

    def __init__(self, reason: str) -> None:
        Busy.__init__(self, SHORTAGE, SHORT_RETRY_S)
        self.reason = reason


class JobStale(PayloadError):
    """A redone job names rows that are gone: build a new job under a new number."""


class StoreFull(PayloadError, NoSpace):
    """The disk has no room; the transaction was aborted whole. Dropping dead generations still works."""


def classes() -> dict[str, type[LogyardError]]:
    """Return the class of each code that travels; what others derive is theirs, and never comes off a wire."""
    found: dict[str, type[LogyardError]] = {}
    pending = [LogyardError]
    while pending:
        kind = pending.pop()
        if kind.__module__ == __name__:
            if "code" in kind.__dict__:
                found[kind.code] = kind
            pending += kind.__subclasses__()
    return found


def plain(text: object) -> str:
    """Return text that can be stored and sent: what is none is named by its type if it can't say more, half of a
    surrogate pair is a question mark. Never raises."""
    try:
        found = str(text)
    except Exception:
        found = type(text).__name__
    return found if found.isascii() else found.encode(errors="replace").decode()


def error_value(error: LogyardError) -> dict[str, object]:
    """Return the wire form, as a map: code, message, retry, details."""
    return {"code": plain(error.code), "message": plain(error), "retry": error.retry, "details": _details(error)}


def encode_error(error: LogyardError) -> bytes:
    """Return the wire form in msgpack, with plain details only."""
    value = error_value(error)
    value["details"] = {key: one for key, one in _details(error).items() if isinstance(one, str | int | float | bool)}
    encoded: bytes = msgpack.packb(value)
    return encoded


def _details(error: LogyardError) -> dict[str, object]:
    return {key: plain(one) if isinstance(one, str) else one for key, one in error.details.items()}


def error_of(value: object) -> LogyardError:
    """Return the error in a decoded wire form; never raises, whatever the value is."""
    if not isinstance(value, dict):
        return LogyardError("the server sent an error that cannot be read")
    code = str(value.get("code", LogyardError.code))
    details = value.get("details")
    kind = classes().get(code, LogyardError)
    retry = value.get("retry")
    return kind.told(
        str(value.get("message", code)),
        details if isinstance(details, dict) else None,
        code=code,
        retry=retry if retry in RETRIES else kind.retry,
    )


def decode_error(data: bytes) -> LogyardError:
    """Return the error that `encode_error` packed."""
    return error_of(msgpack.unpackb(data))

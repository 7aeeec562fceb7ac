"""What a client sees when something goes wrong: one class for each error code that travels on the wire.

The codes are those of the engine's errors; a test keeps both sets equal. The client has classes of its own because it
must install where the engine does not. A code that is not known here (a machine's own refusal, say) becomes the root
class with that code, so nothing is ever lost in translation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

KINDS = ("log", "kv", "queue")
"""Of groups, as far as the clients have a handle of each."""


class LogyardError(Exception):
    """The root. `code` names the error, `retry` says what may be done: ``never``, ``same_session`` or ``elsewhere``."""

    code = "error"
    retry = "never"

    def __init__(
        self,
        message: str,
        details: Mapping[str, object] | None = None,
        *,
        code: str | None = None,
        retry: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, object] = dict(details or {})
        if code is not None:
            self.code = code
        if retry is not None:
            self.retry = retry

    def again(self) -> Self:
        """The same error as a new object, for a second task to raise (a traceback grows with each raise)."""
        return type(self)(self.message, self.details, code=self.code, retry=self.retry)

    def _number(self, key: str) -> float:
        value = self.details.get(key)
        return value if isinstance(value, (int, float)) else 0


class Corrupt(LogyardError):
    """Stored bytes do not match their checksum; the server says where."""

    code = "corrupt"


class Busy(LogyardError):
    """A byte budget is used up; `retry_after` (seconds) says when to come back."""

    code = "busy"
    retry = "same_session"

    @property
    def retry_after(self) -> float:
        """Seconds to wait before the next try."""
        return self._number("retry_after")


class NotLeader(LogyardError):
    """The member asked does not lead its group; `leader` is the node that may (0: unknown)."""

    code = "not_leader"
    retry = "elsewhere"

    @property
    def leader(self) -> int:
        """The node that may lead, or 0."""
        return int(self._number("leader"))


class Unknown(LogyardError):
    """The outcome is not known: the command may or may not have been committed."""

    code = "unknown"
    retry = "same_session"


class SessionExpired(LogyardError):
    """The client's session ended."""

    code = "session_expired"


class NoSpace(LogyardError):
    """The node's disk is full; reads, truncation and deletion go on."""

    code = "no_space"
    retry = "same_session"

    @property
    def retry_after(self) -> float:
        """Seconds to wait before the next try: nothing changes sooner."""
        return self._number("retry_after") or 1.0


class JobPoisoned(LogyardError):
    """A storage job of the node was set aside, because it ended its writer process again and again."""

    code = "job_poisoned"


class JobFailed(LogyardError):
    """A storage job of the node failed by a defect; the node's status names it under `jobs`."""

    code = "job_failed"


class Gone(LogyardError):
    """What was asked for was truncated or released."""

    code = "gone"


class OutOfRange(LogyardError):
    """An offset outside of the log."""

    code = "out_of_range"


class UnknownGroup(LogyardError):
    """No group of that name on the node asked."""

    code = "unknown_group"
    retry = "elsewhere"


class GroupExists(LogyardError):
    """A group of that name is there already, with another definition."""

    code = "group_exists"


class GroupStopped(LogyardError):
    """The member asked was stopped by damage or by an exception of its machine."""

    code = "group_stopped"
    retry = "elsewhere"


class BadRequest(LogyardError):
    """A malformed name, number, frame or option."""

    code = "bad_request"


class WrongKind(BadRequest):
    """The group is of another kind than was asked for; `kind` and `wanted` in `details` name both."""

    code = "wrong_kind"

    @classmethod
    def of(cls, name: str, kind: str, wanted: str) -> Self:
        """Group `name` is of `kind`, and `wanted` was asked for."""
        face = f"use the verbs of a {kind}" if kind in KINDS else "its commands go through a session (open_session)"
        message = f"group {name!r} is a {kind} group, and this is for a {wanted} group: {face}, or name another group"
        return cls(message, {"name": name, "kind": kind, "wanted": wanted})


class Refused(LogyardError):
    """A well-formed request that the present state forbids."""

    code = "refused"


class DirectoryInUse(LogyardError):
    """Another process holds the data directory."""

    code = "directory_in_use"


class WrongIdentity(LogyardError):
    """The server belongs to another cluster than expected, or speaks another version."""

    code = "wrong_identity"


class WalFailed(LogyardError):
    """The node's WAL failed: it acknowledges nothing more."""

    code = "wal_failed"
    retry = "elsewhere"


def classes() -> dict[str, type[LogyardError]]:
    """Every class of this module by its code; what others derive is theirs, and never comes from a server."""
    found: dict[str, type[LogyardError]] = {LogyardError.code: LogyardError}
    pending = LogyardError.__subclasses__()
    while pending:
        kind = pending.pop()
        if kind.__module__ == __name__:
            found.setdefault(kind.code, kind)
            pending += kind.__subclasses__()
    return found


def error_of(value: object) -> LogyardError:
    """The error in a decoded wire value ``{code, message, retry, details}``; never raises, whatever the value is."""
    if not isinstance(value, dict):
        return LogyardError("the server sent an error that cannot be read")
    code = str(value.get("code", LogyardError.code))
    details = value.get("details")
    kind = classes().get(code, LogyardError)
    retry = value.get("retry")
    return kind(
        str(value.get("message", code)),
        details if isinstance(details, dict) else None,
        code=code,
        retry=retry if retry in ("never", "same_session", "elsewhere") else kind.retry,
    )

"""Every error the engine raises for the world's faults (its own bugs are assertions).

`retry` says what a client may do: ``never`` (the request is wrong), ``same_session`` (again, here, later, under the
same session and sequence) or ``elsewhere`` (another node). `code` travels on the wire and never changes.
"""

from __future__ import annotations

import msgpack


class LogyardError(Exception):
    """The root. Subclasses set `code` and `retry`; `details` travels to the client as plain values."""

    code = "error"
    retry = "never"

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.details = details


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
        self.cause = cause
        self.retry_after = retry_after


class NotLeader(LogyardError):
    """This member does not lead its group; `leader` is the node that may (0: unknown)."""

    code = "not_leader"
    retry = "elsewhere"

    def __init__(self, leader: int) -> None:
        super().__init__(
            f"not the leader; try node {leader}" if leader else "no leader known; try again", leader=leader
        )
        self.leader = leader


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
    """The group is of another kind than was asked for; nothing was proposed."""

    code = "wrong_kind"

    def __init__(self, name: str, kind: str, wanted: str) -> None:
        super().__init__(
            f"group {name!r} is a {kind} group, and this is for a {wanted} group: use the verbs of a {kind}, or name "
            "another group",
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

    def __init__(self, node: int, reason: str) -> None:
        super().__init__(f"node {node} takes no part: {reason}", node=node)
        self.node = node
        self.reason = reason


class WalFailed(LogyardError):
    """A write or a sync of the WAL failed: this node acknowledges nothing more and exits (law 7)."""

    code = "wal_failed"
    retry = "elsewhere"


def encode_error(error: LogyardError) -> bytes:
    """The wire form, msgpack: code, message, retry, details (plain values only)."""
    details = {key: value for key, value in error.details.items() if isinstance(value, str | int | float | bool)}
    encoded: bytes = msgpack.packb(
        {"code": error.code, "message": str(error), "retry": error.retry, "details": details}
    )
    return encoded


def decode_error(data: bytes) -> LogyardError:
    """The error of a wire form, as its own class where there is one: for callers in this process."""
    found = msgpack.unpackb(data)
    pending: list[type[LogyardError]] = [LogyardError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.code == found["code"]:
            error = kind.__new__(kind)
            Exception.__init__(error, found["message"])
            error.details = found["details"]
            if isinstance(error, NotLeader):
                error.leader = int(found["details"].get("leader", 0))
            return error
    error = LogyardError(found["message"], **found["details"])
    error.code = found["code"]
    return error

"""Reads over many logs at once: what there is (`logs`), columns of records (`scan`), offsets by time (`seek`).

Each is one question to one node about any number of logs, answered from that node's own members as far as they have
applied: what `pipeline.network` is made of. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from logyard.protocol.errors import LogyardError, error_of
from logyard.protocol.verbs import LOG_ROWS, Range

from .admin import Call, ask


class LogRow(NamedTuple):
    """One append log as a node has it, applied and so committed: offsets `start` up to, without, `end`. `bytes` is
    a rough size, 0 when the group hibernates; `leader` 0: none known."""

    name: str
    uid: int
    leader: int
    start: int
    end: int
    bytes: int
    members: tuple[int, ...]


class Outcome(NamedTuple):
    """What came of one range: its records before `next` are in the answer. `start` and `end` are the log's bounds on
    that member; `error` says why there is no more."""

    next: int
    start: int
    end: int
    uid: int
    error: LogyardError | None


class Scan(NamedTuple):
    """A scan's answer. Ranges that it did not get to have no outcome."""

    node: int
    outcomes: list[Outcome]
    header: Any
    data: memoryview


def logs_call(node: int, after: str = "", names: Sequence[str] | None = None, limit: int = LOG_ROWS) -> Call[Any]:
    """Return a call for the append logs of a node behind the name `after` (of `names`), by name; a full answer has more
    behind it."""
    chosen = None if names is None else list(names)
    return ask("logs", _log_rows, at=node, after=after or " ", limit=limit, names=chosen)


def _log_rows(value: Any) -> list[LogRow]:
    return [LogRow(*row[:6], *(tuple(nodes) for nodes in row[6:7])) for row in value]


class Changed(NamedTuple):
    """What a node says of its append logs: `rows` changed since the mark that it was asked about, and logs `gone` are
    no more; if `whole`, these are all there are. `mark` is for the next question."""

    mark: int
    whole: bool
    rows: list[LogRow]
    gone: list[str]


def changed_call(node: int, since: int) -> Call[Changed]:
    """Ask for the append logs of a node that changed since the mark `since`, 0: all."""

    def decode(value: Any) -> Changed:
        try:
            mark, whole, rows, gone = value
            found = [LogRow(name, uid, leader, start, end, 0, (node,)) for name, uid, leader, start, end in rows]
            return Changed(mark, whole, found, gone)
        except (TypeError, ValueError) as error:
            raise LogyardError(f"an answer about changed logs cannot be read: {error!r}") from None

    return ask("changed_logs", decode, at=node, since=since)


def scan_call(
    nodes: Sequence[int], ranges: Iterable[Range], *, max_bytes: int, max_records: int, body_bytes: int | None
) -> Call[Scan]:
    """Return a call for records of `ranges`, in their order, up to about `max_bytes`; at least one. The first of
    `nodes` that can be reached answers. `body_bytes`: bodies up to that size come along, None: none is read at all."""

    def decode(value: Any) -> Scan:
        header, data = value
        try:
            outcomes = [_outcome(*row) for row in header["ranges"]]
            return Scan(header["node"], outcomes, header, data)
        except (KeyError, TypeError, ValueError) as error:
            raise LogyardError(f"a scan's answer cannot be read: {error!r}") from None

    return ask(
        "scan", decode, among=nodes, ranges=[list(one) for one in ranges], max_bytes=max_bytes, max_records=max_records,
        body_bytes=body_bytes,
    )  # fmt: skip


def _outcome(following: int, start: int, end: int, uid: int, error: Any) -> Outcome:
    return Outcome(following, start, end, uid, None if error is None else error_of(error))


def seek_call(nodes: Sequence[int], times: Iterable[tuple[str, int, int]]) -> Call[Any]:
    """Return a call for the first offset, of each (log, uid, ms since 1970), stamped at or after it, or the log's end;
    or why not."""

    def decode(value: Any) -> list[int | LogyardError]:
        return [one if isinstance(one, int) else error_of(one) for one in value]

    return ask("seek", decode, among=nodes, times=[list(one) for one in times])


class AuditStep(NamedTuple):
    """A step of an audit of one node's copy: entries up to `next` (0: all) were looked at, `units` of `bytes` that live
    were read and hashed, `dead` bytes are there that do not. `offset` goes into the next step. `digest` adds up over
    steps; equal for members that have applied the same. `problems` spells out some of what is counted.
    `offset`, `start` and `end` are an append log's, 0 for other machines."""

    next: int
    offset: int
    entries: int
    units: int
    bytes: int
    dead: int
    missing: int
    corrupt: int
    mismatches: int
    digest: int
    problems: tuple[str, ...]
    applied: int
    start: int
    end: int


def audit_call(node: int, name: str, uid: int, index: int, offset: int, max_bytes: int) -> Call[AuditStep]:
    """Return a call for a step of an audit of the member of group `name` on `node`, from entry `index` on (0: the
    first)."""

    def decode(value: Any) -> AuditStep:
        try:
            fields = {key: value[key] for key in AuditStep._fields}
            fields["digest"] = int.from_bytes(value["digest"], "big")
            return AuditStep(**{**fields, "problems": tuple(value["problems"])})
        except (KeyError, TypeError) as error:
            raise LogyardError(f"an audit's answer cannot be read: {error!r}") from None

    return ask("audit", decode, at=node, range=[[name, uid, index, offset]], max_bytes=max_bytes)

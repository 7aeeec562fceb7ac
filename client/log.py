"""The append log's verbs, sans-IO: what they ask a server, and how its answers are read.

Shared by the logs of `aio` and `sync`. A read that names a node is answered by that member itself and never redirected;
one that names none goes to the leader.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .admin import Call
from .errors import BadRequest, LogyardError
from .records import BlockError, Page

POLL_RECORDS = 1000
POLL_BYTES = 4 << 20
POLL_WAIT_S = 5.0
"""The longest a server is asked to wait; longer waits are several polls, so that a dead connection is noticed."""
BODY_BYTES = 8 << 20
"""A body is read in ranges of at most this many bytes."""
LATEST = -1
"""As an offset: behind the last record."""
CONSISTENCY = ("local", "leader", "linearizable")


class Bounds(NamedTuple):
    """A log's first offset and its next free one."""

    start: int
    end: int


def consistency_of(node: int | None, consistency: str | None) -> str:
    """The consistency of a read: what was asked for, else ``local`` from a chosen member and ``leader`` otherwise."""
    if consistency is None:
        return "leader" if node is None else "local"
    if consistency not in CONSISTENCY:
        raise BadRequest(f"a consistency is one of {', '.join(CONSISTENCY)}, not {consistency!r}")
    return consistency


def read_call(method: str, name: str, node: int | None, arguments: dict[str, object], decode: Any) -> Call[Any]:
    """A read of group `name`, pinned to `node` or for its leader."""
    arguments["name"] = name
    return Call(method, arguments, decode, group=name, nodes=() if node is None else (node,), pinned=node is not None)


def poll_call(
    name: str,
    offset: int,
    max_records: int,
    max_bytes: int,
    wait: float,
    node: int | None,
    bodies: bool,
    consistency: str | None,
) -> Call[Page]:
    """One poll: records from `offset` on (-1: behind the last), at least one if any, bounded by both limits."""
    if offset < LATEST or max_records < 0 or max_bytes < 0 or wait < 0:
        raise BadRequest("offsets, limits and waits are not negative (an offset of -1 is behind the last record)")

    def decode(value: Any) -> Page:
        header, data = value
        try:
            return Page(data, header["start"], header["end"], header["node"], offset, max_records)
        except (BlockError, KeyError, TypeError) as error:
            raise LogyardError(f"{name}: a poll's answer cannot be read: {error!r}") from None

    arguments: dict[str, object] = {
        "offset": offset,
        "max_records": max_records,
        "max_bytes": max_bytes,
        "wait_s": min(wait, POLL_WAIT_S),
        "bodies": bodies,
        "consistency": consistency_of(node, consistency),
    }
    call: Call[Page] = read_call("poll", name, node, arguments, decode)
    return call


def body_call(name: str, offset: int, start: int, stop: int, node: int | None) -> Call[bytes]:
    """One range of a record's body: bytes `start` up to `stop`, shorter at its end."""
    if offset < 0 or not 0 <= start <= stop:
        raise BadRequest("a body's range is not negative and not backwards")
    arguments: dict[str, object] = {"offset": offset, "start": start, "stop": stop}
    call: Call[bytes] = read_call("read_body", name, node, arguments, lambda value: bytes(value[1]))
    return call


def latest_call(name: str, node: int | None, consistency: str | None) -> Call[Bounds]:
    """The log's bounds."""
    arguments: dict[str, object] = {"consistency": consistency_of(node, consistency)}
    call: Call[Bounds] = read_call("latest", name, node, arguments, lambda value: Bounds(value["start"], value["end"]))
    return call


def truncate_call(name: str, before: int) -> Call[int]:
    """Truncation: the leader looks up where the record at `before` lies and commits that."""
    if before < 0:
        raise BadRequest(f"an offset is not negative: {before}")
    return Call("truncate", {"name": name, "before": before}, int, group=name)


def ranges(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The ranged reads that a longer range of a body is made of."""
    for at in range(start, stop, BODY_BYTES):
        yield at, min(stop, at + BODY_BYTES)

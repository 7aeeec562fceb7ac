"""The append log's verbs, sans-IO: what they ask a server, and how its answers are read.

Shared by the logs of `aio` and `sync`. A read that names a node is answered by that member itself and never redirected;
one that names none goes to the leader.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from logyard.protocol.compression import Encoding, parse, ranges_of
from logyard.protocol.errors import BadRequest, LogyardError, OutOfRange, error_of
from logyard.protocol.frame import Buffer, Epoch
from logyard.protocol.records import BlockError, Page
from logyard.protocol.wire import LOW_PRIORITY, REPLY_APPEND, REPLY_CONSENSUS, REPLY_NONE

from .admin import Call, plain

POLL_RECORDS = 1000
POLL_BYTES = 4 << 20
POLL_WAIT_S = 5.0
"""The longest a server is asked to wait; longer waits are several polls, so that a dead connection is noticed."""
ANSWER_S = 0.1
"""For an answer on its way, of the time that a caller waits."""
BODY_BYTES = 8 << 20
"""A body is read in ranges of at most this many bytes."""
LATEST = -1
"""As an offset: behind the last record."""
NO_OFFSET = (1 << 64) - 1
"""As a reply's first offset: a producer's records that are in the log since long ago."""
CONSISTENCY = ("local", "leader", "linearizable", "bounded")


SESSION_TTL_S = 60.0
"""How long a session outlives its client's last sign of life."""
PRIORITIES = {"normal": 0, "low": LOW_PRIORITY}
REPLIES = {"consensus": REPLY_CONSENSUS, "append": REPLY_APPEND, "none": REPLY_NONE}


class Place(NamedTuple):
    """Where a command lies that is on its leader's disk: committed if the entry at `index` is of `term` for good."""

    index: int  # type: ignore[assignment]  # tuple.index is not missed
    term: int


def flags_of(reply: str, priority: str, exactly_once: bool = True, reply_from: int | None = None) -> int:
    """Return the wire's flags of an append. Raises `BadRequest`."""
    if reply not in REPLIES or priority not in PRIORITIES:
        raise BadRequest(f"reply is one of {', '.join(REPLIES)}, priority one of {', '.join(PRIORITIES)}")
    if reply_from is not None and (reply != "consensus" or not exactly_once):
        raise BadRequest("reply_from needs a session (exactly_once) and an answer (reply='consensus')")
    return REPLIES[reply] | PRIORITIES[priority]


class Bounds(NamedTuple):
    """A log's first offset and its next free one."""

    start: int
    end: int


def offsets_of(first: int, count: int) -> range:
    """Return the offsets that an append's reply names; empty for `NO_OFFSET`."""
    return range(0) if first == NO_OFFSET else range(first, first + count)


def consistency_of(
    node: int | None, consistency: str | None, staleness: float | None = None, default: str = "leader"
) -> str:
    """Return the consistency of a read: what was asked for, else ``local`` from a chosen member and `default`
    otherwise. ``bounded`` goes with a `staleness` in seconds, and only with that."""
    if consistency is None and staleness is None:
        return default if node is None else "local"
    found = "bounded" if consistency is None else consistency
    if found not in CONSISTENCY or (found == "bounded") != (staleness is not None) or (staleness or 0) < 0:
        raise BadRequest(
            f"a consistency is one of {', '.join(CONSISTENCY)}, bounded with a staleness in seconds, not "
            f"{consistency!r} with {staleness!r}"
        )
    return found


def read_call(
    method: str, name: str, node: int | None, arguments: dict[str, object], decode: Any, kind: str = "log"
) -> Call[Any]:
    """Return a read of group `name`, pinned to `node` or for its leader; "" for a group of any kind."""
    arguments["name"] = name
    nodes = () if node is None else (node,)
    return Call(method, arguments, decode, group=name, nodes=nodes, pinned=node is not None, kind=kind)


def poll_call(
    name: str,
    offset: int,
    max_records: int,
    max_bytes: int,
    wait: float,
    node: int | None,
    bodies: bool,
    consistency: str | None,
    staleness: float | None = None,
    since: int | None = None,
    uid: int = 0,
) -> Call[Page]:
    """Return a call for one poll: records from `offset` on (-1: behind the last), at least one if any, bounded by both
    limits. `since` (ms since 1970): instead from the first one stamped then or later. `uid`: of the log of that name
    with this uid."""
    if offset < LATEST or max_records < 0 or max_bytes < 0 or wait < 0:
        raise BadRequest("offsets, limits and waits are not negative (an offset of -1 is behind the last record)")

    def decode(value: Any) -> Page:
        header, data = value
        try:
            asked = offset if since is None else header["offset"]
            return Page(data, header["start"], header["end"], header["node"], asked, max_records)
        except (BlockError, KeyError, TypeError) as error:
            raise LogyardError(f"{name}: a poll's answer cannot be read: {error!r}") from None

    arguments: dict[str, object] = {
        "offset": offset,
        "max_records": max_records,
        "max_bytes": max_bytes,
        "wait_s": min(wait, POLL_WAIT_S),
        "bodies": bodies,
        "consistency": consistency_of(node, consistency, staleness),
    }
    if staleness is not None:
        arguments["staleness_s"] = staleness
    if since is not None:
        arguments["since"] = max(0, since)
    if uid:
        arguments["uid"] = uid
    call: Call[Page] = read_call("poll", name, node, arguments, decode)
    return call


class Encoded(NamedTuple):
    """The answer to `body_call` where the payload is encoded: how, and how many bytes are stored."""

    encoding: Encoding
    stored: int


def body_call(name: str, offset: int, start: int, stop: int, node: int | None, stored: bool = False) -> Call[Any]:
    """Return a call for one range of a record's body: bytes `start` up to `stop`, shorter at its end; or `Encoded`,
    unless the `stored` bytes are asked for."""
    if offset < 0 or not 0 <= start <= stop:
        raise BadRequest("a body's range is not negative and not backwards")
    arguments: dict[str, object] = {"offset": offset, "start": start, "stop": stop}
    if stored:
        arguments["stored"] = True

    def decode(value: Any) -> bytes | Encoded:
        header, data = value
        envelope = header.get("envelope")
        return Encoded(parse(envelope), int(header["stored"])) if envelope else bytes(data)

    return read_call("read_body", name, node, arguments, decode)


def body_steps(
    name: str, offset: int, start: int, stop: int, node: int | None
) -> Generator[Call[Any] | Buffer, Any, None]:
    """Yield calls, whose answers are to be sent in, and between them the bytes start..stop of a body."""
    for first, end in ranges(start, max(start, stop)):
        answer = yield body_call(name, offset, first, end, node)
        if isinstance(answer, Encoded):
            encoding, stored = answer
            if stop > encoding.size:
                raise OutOfRange(f"bytes {start}..{stop} of record {offset}: its body has {encoding.size} bytes")
            steps = ranges_of(encoding, stored, start, stop)
            step = next(steps, None)
            while step is not None:
                if isinstance(step, tuple):
                    step = steps.send((yield body_call(name, offset, *step, node, stored=True)))
                else:
                    yield step
                    step = next(steps, None)
            return
        yield answer


def latest_call(
    name: str, node: int | None, consistency: str | None, staleness: float | None = None, uid: int = 0
) -> Call[Bounds]:
    """Return a call for the log's bounds: behind nothing that was acknowledged, unless something less is asked for."""
    arguments: dict[str, object] = {"consistency": consistency_of(node, consistency, staleness, "linearizable")}
    if staleness is not None:
        arguments["staleness_s"] = staleness
    if uid:
        arguments["uid"] = uid
    call: Call[Bounds] = read_call("latest", name, node, arguments, lambda value: Bounds(value["start"], value["end"]))
    return call


def of_kind(arguments: dict[str, object], kind: str) -> dict[str, object]:
    """Return arguments of a call that any machine answers, for a server to look at what the group is."""
    return {**arguments, "kind": kind} if kind else arguments


def open_call(name: str, session: int, client: int, ttl_ms: int, kind: str = "") -> Call[Any]:
    """Begin a session, in a group of that kind if one is named."""
    arguments: dict[str, object] = {"name": name, "session": session, "client": client, "ttl_ms": ttl_ms}
    return Call("session_open", of_kind(arguments, kind), plain, group=name, kind=kind)


def close_call(name: str, session: int) -> Call[Any]:
    """End a session."""
    return Call("session_close", {"name": name, "session": session}, plain, group=name)


def wait_of(patience: float) -> float:
    """Return how long a server is asked to wait for a caller with so much patience: its answer shall come in time."""
    return max(0.0, min(patience - ANSWER_S, POLL_WAIT_S))


def reply_call(name: str, session: int, sequence: int, node: int, wait: float) -> Call[bytes]:
    """Return a call that asks one member what came of a session's frame."""
    arguments: dict[str, object] = {"session": session, "sequence": sequence, "wait_s": wait_of(wait)}
    call: Call[bytes] = read_call("session_reply", name, node, arguments, bytes, "")
    return call


def applied_call(name: str, index: int, term: int, node: int | None, wait: float) -> Call[int]:
    """Wait until a member (the leader) has applied an index."""
    if index < 0 or term < 0:
        raise BadRequest("an index and a term are not negative")
    arguments: dict[str, object] = {"index": index, "term": term, "wait_s": wait_of(wait)}
    call: Call[int] = read_call("wait_applied", name, node, arguments, int, "")
    return call


def query_call(
    name: str,
    request: bytes,
    node: int | None,
    consistency: str | None,
    index: int,
    staleness: float | None = None,
    kind: str = "",
) -> Call[bytes]:
    """Ask a machine something, of that kind if one is named."""
    arguments: dict[str, object] = {
        "request": request, "consistency": consistency_of(node, consistency, staleness), "index": index
    }  # fmt: skip
    if staleness is not None:
        arguments["staleness_s"] = staleness
    call: Call[bytes] = read_call("query", name, node, of_kind(arguments, kind), bytes, kind)
    return call


def truncate_call(name: str, before: int) -> Call[int]:
    """Return a call that truncates: the leader looks up where the record at `before` lies and commits that."""
    if before < 0:
        raise BadRequest(f"an offset is not negative: {before}")
    return Call("truncate", {"name": name, "before": before}, int, group=name, kind="log")


def seek_call(name: str, since: int, node: int | None) -> Call[int]:
    """Return a call for the first offset stamped at `since` (ms since 1970) or later, or the log's end; of a member, or
    the leader."""
    nodes = () if node is None else (node,)

    def decode(value: Any) -> int:
        (found,) = value
        if isinstance(found, int):
            return found
        raise error_of(found)

    times: dict[str, object] = {"times": [[name, 0, max(0, since)]]}
    return Call("seek", times, decode, group=name, nodes=nodes, pinned=node is not None, kind="log")


def retain_call(name: str, age_s: float, size: int, records: int) -> Call[int]:
    """Return a call that limits what a log keeps; 0 is no limit."""
    if age_s < 0 or size < 0 or records < 0:
        raise BadRequest("limits are not negative; 0 is no limit")
    arguments: dict[str, object] = {"name": name, "ms": round(age_s * 1000), "bytes": size, "records": records}
    return Call("retain", arguments, int, group=name, kind="log")


def producer_call(name: str, producer: int) -> Call[int]:
    """Return a call for the highest sequence that a producer has written."""
    return Call("producer", {"name": name, "producer": producer}, int, group=name, kind="log")


def epoch_call(name: str, epoch: Epoch) -> Call[object]:
    """Return the call that asks whether an epoch takes frames."""
    return Call("epoch", {"name": name, **epoch._asdict()}, lambda value: value, group=name, kind="log")


def close_epoch_call(name: str, epoch: Epoch) -> Call[object]:
    """Return the call that closes an epoch."""
    return Call("epoch_done", {"name": name, **epoch._asdict()}, lambda value: value, group=name, kind="log")


def epoch_state_call(name: str, producer: int) -> Call[tuple[int, int, bool] | None]:
    """Return the call that asks where a fenced producer is."""

    def decode(value: Any) -> tuple[int, int, bool] | None:
        return None if value is None else (int(value[0]), int(value[1]), bool(value[2]))

    return Call("epoch_state", {"name": name, "producer": producer}, decode, group=name, kind="log")


def ranges(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranged reads that a longer range of a body is made of."""
    for at in range(start, stop, BODY_BYTES):
        yield at, min(stop, at + BODY_BYTES)

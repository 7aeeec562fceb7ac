"""The append log's verbs, sans-IO: what they ask a server, and how its answers are read.

Shared by the logs of `aio` and `sync`. A read that names a node is answered by that member itself and never redirected;
one that names none goes to the leader.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from logyard.protocol.compression import Encoding, parse, ranges_of
from logyard.protocol.errors import BadRequest, LogyardError, OutOfRange, error_of
from logyard.protocol.frame import NO_OFFSET, NOT_KNOWN, Buffer, Epoch
from logyard.protocol.records import BlockError, Page
from logyard.protocol.wire import LOW_PRIORITY, PLACE, REPLY, REPLY_APPEND, REPLY_CONSENSUS, REPLY_MODE, REPLY_NONE

from .admin import Call, ask, plain

POLL_RECORDS = 1000
POLL_BYTES = 4 << 20
POLL_WAIT_S = 5.0
"""The longest a server is asked to wait; longer waits are several polls, so that a dead connection is noticed."""
ANSWER_S = 1.0
"""For an answer on its way, of the time that a caller waits."""
BODY_BYTES = 8 << 20
"""A body is read in ranges of at most this many bytes."""
LATEST = -1
"""As an offset: behind the last record."""
FORGOTTEN = "sequence_forgotten"
"""The code of the error when a log does not know whether it has a producer's sequence."""
CONSISTENCY = ("local", "leader", "linearizable", "bounded")


SESSION_TTL_S = 60.0
"""How long a session outlives its client's last sign of life."""
PRIORITIES = {"normal": 0, "low": LOW_PRIORITY}
REPLIES = {"consensus": REPLY_CONSENSUS, "append": REPLY_APPEND, "none": REPLY_NONE}


class Place(NamedTuple):
    """Where a command lies that is on its leader's disk: committed if the entry at `index` is of `term` for good."""

    index: int  # type: ignore[assignment]  # tuple.index is not missed
    term: int


class Appended(NamedTuple):
    """What came of a frame of records: the offset of the first one, and how many have one. `place`, where they have
    none yet: where the command lies."""

    first: int
    given: int
    place: tuple[int, int] = (0, 0)


NOT_TOLD = Appended(-1, 0)
"""Of a frame that is never answered."""


def appended(name: str, flags: int, reply: Buffer, whose: str = "an append log's") -> Appended:
    """Return what the reply to a frame with those flags (the wire's) says. Raises a `LogyardError`."""
    mode = flags & REPLY_MODE
    if mode == REPLY_NONE:
        return NOT_TOLD
    if mode == REPLY_APPEND and len(reply) == PLACE.size:
        return Appended(-1, 0, PLACE.unpack(reply))
    if len(reply) != REPLY.size:
        raise LogyardError(f"{name}: the machine's answer is not {whose}")
    found = Appended(*REPLY.unpack(reply))
    if found.first == NO_OFFSET and found.given == NOT_KNOWN:
        raise LogyardError(
            f"{name}: it is not known whether these records are in the log: their producer has written so many later "
            "sequences since, that this one is not remembered",
            code=FORGOTTEN,
        )
    return found


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

    def decode(value: Any) -> Page:
        header, data = value
        try:
            asked = offset if since is None else header["offset"]
            bounds = header["start"], header["end"], header["node"]
            return Page(data, *bounds, asked, max_records, header.get("joined", 0), header.get("uid", 0))
        except (BlockError, KeyError, TypeError) as error:
            raise LogyardError(f"{name}: a poll's answer cannot be read: {error!r}") from None

    return ask(
        "poll", decode, at=node, kind="log", name=name, offset=offset, max_records=max_records, max_bytes=max_bytes,
        wait_s=min(wait, POLL_WAIT_S), bodies=bodies, consistency=consistency_of(node, consistency, staleness),
        staleness_s=staleness, since=None if since is None else max(0, since), uid=uid or None,
    )  # fmt: skip


class Encoded(NamedTuple):
    """The answer to `body_call` where the payload is encoded: how, and how many bytes are stored."""

    encoding: Encoding
    stored: int


def body_call(
    name: str, offset: int, start: int, stop: int, node: int | None, uid: int = 0, stored: bool = False
) -> Call[tuple[int, bytes | Encoded]]:
    """Return a call for one range of a record's body: bytes `start` up to `stop`, shorter at its end; or `Encoded`,
    unless the `stored` bytes are asked for. `uid`: of the log of that name with this uid; the answer says whose it is
    (0: its node did not say)."""
    if start > stop:
        raise BadRequest("a body's range is not backwards")

    def decode(value: Any) -> tuple[int, bytes | Encoded]:
        header, data = value
        envelope = header.get("envelope")
        body = Encoded(parse(envelope), int(header["stored"])) if envelope else bytes(data)
        return header.get("uid", 0), body

    return ask(
        "read_body", decode, at=node, kind="log", name=name, offset=offset, start=start, stop=stop,
        stored=stored or None, uid=uid or None,
    )  # fmt: skip


def body_steps(
    name: str, offset: int, start: int, stop: int, node: int | None, uid: int = 0
) -> Generator[Call[Any] | Buffer, Any, None]:
    """Yield calls, whose answers are to be sent in, and between them the bytes start..stop of a body: all of the log
    with this `uid`, or of the one that answers first."""
    for first, end in ranges(start, max(start, stop)):
        uid, answer = yield body_call(name, offset, first, end, node, uid)
        if isinstance(answer, Encoded):
            encoding, stored = answer
            if stop > encoding.size:
                raise OutOfRange(f"bytes {start}..{stop} of record {offset}: its body has {encoding.size} bytes")
            steps = ranges_of(encoding, stored, start, stop)
            step = next(steps, None)
            while step is not None:
                if isinstance(step, tuple):
                    _, piece = yield body_call(name, offset, *step, node, uid, stored=True)
                    step = steps.send(piece)
                else:
                    yield step
                    step = next(steps, None)
            return
        yield answer


def latest_call(
    name: str, node: int | None, consistency: str | None, staleness: float | None = None, uid: int = 0
) -> Call[Bounds]:
    """Return a call for the log's bounds: behind nothing that was acknowledged, unless something less is asked for."""

    def decode(value: Any) -> Bounds:
        return Bounds(value["start"], value["end"])

    asked = consistency_of(node, consistency, staleness, "linearizable")
    return ask(
        "latest", decode, at=node, kind="log", name=name, consistency=asked, staleness_s=staleness, uid=uid or None
    )


def open_call(name: str, session: int, client: int, ttl_ms: int, kind: str = "") -> Call[Any]:
    """Begin a session, in a group of that kind if one is named."""
    return ask("session_open", plain, kind=kind, name=name, session=session, client=client, ttl_ms=ttl_ms)


def close_call(name: str, session: int) -> Call[Any]:
    """End a session."""
    return ask("session_close", plain, name=name, session=session)


def wait_of(patience: float) -> float:
    """Return how long a server is asked to wait for a caller with so much patience: its answer shall come in time."""
    return max(0.0, min(max(patience - ANSWER_S, patience / 2), POLL_WAIT_S))


def reply_call(name: str, session: int, sequence: int, node: int, wait: float) -> Call[bytes]:
    """Return a call that asks one member what came of a session's frame."""
    wait_s = wait_of(wait)
    return ask("session_reply", bytes, at=node, name=name, session=session, sequence=sequence, wait_s=wait_s)


def applied_call(name: str, index: int, term: int, node: int | None, wait: float) -> Call[int]:
    """Wait until a member (the leader) has applied an index."""
    return ask("wait_applied", int, at=node, name=name, index=index, term=term, wait_s=wait_of(wait))


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
    asked = consistency_of(node, consistency, staleness)
    return ask(
        "query", bytes, at=node, kind=kind, name=name, request=request, consistency=asked, index=index,
        staleness_s=staleness,
    )  # fmt: skip


def truncate_call(name: str, before: int) -> Call[int]:
    """Return a call that truncates: the leader looks up where the record at `before` lies and commits that."""
    return ask("truncate", int, kind="log", name=name, before=before)


def seek_call(name: str, since: int, node: int | None) -> Call[int]:
    """Return a call for the first offset stamped at `since` (ms since 1970) or later, or the log's end; of a member, or
    the leader."""

    def decode(value: Any) -> int:
        (found,) = value
        if isinstance(found, int):
            return found
        raise error_of(found)

    return ask("seek", decode, at=node, leader_of=name, kind="log", times=[[name, 0, max(0, since)]])


def retain_call(name: str, age_s: float, size: int, records: int) -> Call[int]:
    """Return a call that limits what a log keeps; 0 is no limit. Raises `BadRequest` for an age that is no number of
    seconds."""
    if not math.isfinite(age_s):
        raise BadRequest(f"an age is a number of seconds, 0 for no limit, not {age_s}")
    return ask("retain", int, kind="log", name=name, ms=round(age_s * 1000), bytes=size, records=records)


def producer_call(name: str, producer: int) -> Call[int]:
    """Return a call for the highest sequence that a producer has written."""
    return ask("producer", int, kind="log", name=name, producer=producer)


def epoch_call(name: str, epoch: Epoch) -> Call[object]:
    """Return the call that asks whether an epoch takes frames."""
    return ask("epoch", plain, kind="log", name=name, **epoch._asdict())


def close_epoch_call(name: str, epoch: Epoch) -> Call[object]:
    """Return the call that closes an epoch."""
    return ask("epoch_done", plain, kind="log", name=name, **epoch._asdict())


def epoch_state_call(name: str, producer: int) -> Call[tuple[int, int, bool] | None]:
    """Return the call that asks where a fenced producer is."""

    def decode(value: Any) -> tuple[int, int, bool] | None:
        return None if value is None else (int(value[0]), int(value[1]), bool(value[2]))

    return ask("epoch_state", decode, kind="log", name=name, producer=producer)


def partition_call(name: str, command: bytes) -> Call[bytes]:
    """Return the call that makes a log a topic's partition, or fences it, by a command of `protocol.topics`."""
    return ask("partition", bytes, kind="log", name=name, command=command)


def delete_partition_call(name: str, topic: int, uid: int = 0) -> Call[Any]:
    """Return the call that deletes the log of a topic's partition, which nobody else may. `uid`: of that log, 0:
    whichever has the name."""
    return ask("delete", plain, name=name, topic=topic, uid=uid)


def ranges(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranged reads that a longer range of a body is made of."""
    for at in range(start, stop, BODY_BYTES):
        yield at, min(stop, at + BODY_BYTES)

"""What both KV clients do the same way, as steps: each yields what is to be asked and gets the answer sent in.

A step is a `Command` (goes through consensus, exactly once) or a `Question` (is read); the blocking and the
asynchronous client run them. Used by `kv` and `kv_sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from logyard.protocol.errors import BadRequest, LogyardError, Unknown, UnknownGroup
from logyard.protocol.frame import Buffer
from logyard.protocol.kv import (
    COMPACT,
    GRANT,
    KEEP,
    LEASES,
    PAGE_BYTES,
    RANGE,
    REFERENCES,
    REVOKE,
    STATUS,
    TIME_TO_LIVE,
    UNCOUNTED,
    Bodies,
    Decoder,
    Delete,
    Get,
    GetResult,
    KeyValue,
    Lease,
    Operation,
    Result,
    Txn,
    answer_of,
    behind,
    check_bytes,
    encode,
    encode_numbers,
    get_array,
    kind_of,
    pack_order,
    value_questions,
)

from .admin import Call, ask, plain

LEASE_S_MAX = 1 << 40
"""What can be said; what a group takes, it says itself."""
ORDERED_BYTES = 32 << 20
"""Of a range that is not in the order of its keys: if there is more, it is read by key and put in order here."""
ORDERS: Mapping[str, Callable[[KeyValue], Any]] = MappingProxyType(
    {
        "version": lambda one: (one.version, one.key),
        "create": lambda one: (one.create_revision, one.key),
        "mod": lambda one: (one.mod_revision, one.key),
        "value": lambda one: (one.value, one.key),
    }
)
"""As the machine orders them."""
CONSISTENCY = ("linearizable", "leader", "local")


class Command(NamedTuple):
    """For the machine; its answer is unpacked. `long`: that may be so long that it is not kept."""

    data: bytes
    bodies: Sequence[Buffer] = ()
    long: bool = False


class Question(NamedTuple):
    """For a member; its answer is (packed answer, payloads)."""

    data: bytes


T = TypeVar("T")
D = TypeVar("D")
Steps: TypeAlias = Generator[Command | Question, Any, T]


def write(operation: Operation) -> Steps[Result]:
    """Return the steps of a put, a delete, a transaction, or a read that goes through consensus. What fails once it was
    done raises `Unknown`: who is told of a failure may take it for one."""
    answer = yield Command(*encode(operation), _reads_many(operation))
    try:
        revision, *fields = answer_of(answer)
    except LogyardError:
        check_bytes(operation)
        raise
    try:
        return (yield from _decoded(kind_of(operation), revision, fields, {}))
    except LogyardError as error:
        raise Unknown(f"done at revision {revision}, but what it read could not be fetched: {error}") from error


def _reads_many(operation: Operation) -> bool:
    """Return whether the answer has a range of keys."""
    if isinstance(operation, Txn):
        return any(map(_reads_many, (*operation.then, *operation.otherwise)))
    if isinstance(operation, Delete):
        return operation.previous and bool(operation.end)
    return isinstance(operation, Get) and bool(operation.end)


def _decoded(kind: int, revision: int, fields: Sequence[Any], bodies: Bodies) -> Steps[Result]:
    decoder = Decoder(bodies)
    found = decoder.result(kind, revision, fields)
    while decoder.missing:
        for question in value_questions(decoder.missing):
            packed, more = yield Question(question)
            answer_of(packed)
            bodies |= more
        lost = decoder.missing.keys() - bodies.keys()
        if lost:
            raise LogyardError(f"the payloads {sorted(lost)} did not come with their answer")
        decoder = Decoder(bodies)
        found = decoder.result(kind, revision, fields)
    return found


def question_of(key: bytes, revision: int) -> bytes:
    """Return the question for one key."""
    return pack_order((RANGE, key, b"", revision))


def only(packed: bytes, bodies: Bodies) -> KeyValue | None:
    """Return the key that was asked for, if it is there."""
    rows = answer_of(packed)[1]
    if not rows:
        return None
    key, create, mod, version, lease, value = rows[0]
    if type(value) is bytes:
        return KeyValue(key, value, create, mod, version, lease)
    decoder = Decoder(bodies)
    found = decoder.row(rows[0])
    if decoder.missing:
        raise LogyardError("a value did not come with its answer")
    return found


def read(get: Get, bytes_max: int = 0) -> Steps[GetResult]:
    """Return the steps that read a range; a long one page after page, all as of one revision. `bytes_max`: keys and
    values that are read in all; raises ``too_large`` beyond that, 0: whatever there is."""
    if not get.end or get.count_only:
        found = yield from _page(get, REFERENCES if get.end else 0, 0)
        _within(bytes_max, found.kvs)
        return found
    if get.sort == "key":
        return (yield from _by_key(get, bytes_max))
    found = yield from _page(get, REFERENCES, ORDERED_BYTES)
    if found.more and (not get.limit or len(found.kvs) < get.limit):
        # Such an order has no place to go on from.
        kvs = yield from _ordered(get._replace(revision=get.revision or found.revision), bytes_max)
        return GetResult(found.revision, tuple(kvs), len(kvs) < found.count, found.count)
    _within(bytes_max, found.kvs)
    return found


def _page(get: Get, flags: int, size: int) -> Steps[GetResult]:
    array = get_array(get, flags, size)
    answer, bodies = yield Question(pack_order(array))
    revision, *fields = answer_of(answer)
    page = yield from _decoded(array[0], revision, fields, bodies)
    assert isinstance(page, GetResult)
    return page


def _by_key(get: Get, bytes_max: int) -> Steps[GetResult]:
    """Read a range in the order of its keys, page after page."""
    kvs: list[KeyValue] = []
    size = 0
    first: GetResult | None = None
    while True:
        left = get.limit - len(kvs) if get.limit else 0
        page = yield from _page(get._replace(limit=left), UNCOUNTED if first else 0, PAGE_BYTES)
        first = first or page
        kvs += page.kvs
        size += _within(bytes_max, page.kvs, size)
        if not page.more or (get.limit and len(kvs) >= get.limit) or not page.kvs:
            return GetResult(first.revision, tuple(kvs), page.more, first.count)
        get = _behind(get._replace(revision=get.revision or first.revision), page)


def _ordered(get: Get, bytes_max: int) -> Steps[list[KeyValue]]:
    """Read a range as of a revision by its keys, and put it in its order here; of more than its limit only what comes
    first is kept meanwhile."""
    order, descending, limit = ORDERS[get.sort], get.descending, get.limit
    # Without values there is no order by them.
    blank = get.keys_only and get.sort == "value"
    get = get._replace(sort="key", descending=False, limit=0, keys_only=get.keys_only and not blank)
    kvs: list[KeyValue] = []
    size = 0
    while True:
        page = yield from _page(get, UNCOUNTED, PAGE_BYTES)
        kvs += page.kvs
        if limit:
            kvs = sorted(kvs, key=order, reverse=descending)[:limit]
            # Smaller ones may take their places.
            _within(2 * bytes_max, kvs)
        else:
            size += _within(bytes_max, page.kvs, size)
        if not page.more or not page.kvs:
            break
        get = _behind(get, page)
    kvs.sort(key=order, reverse=descending)
    if blank:
        kvs = [one._replace(value=b"") for one in kvs]
    _within(bytes_max, kvs)
    return kvs


def _behind(get: Get, page: GetResult) -> Get:
    """Return what is left to be read, by key, behind a page."""
    last = page.kvs[-1].key
    return get._replace(end=last) if get.descending else get._replace(key=behind(last))


def _within(bytes_max: int, kvs: Sequence[KeyValue], before: int = 0) -> int:
    """Return the bytes of keys and values. Raises ``too_large`` if they are too many, with those before them."""
    if not bytes_max:
        return 0
    size = sum([len(one.key) + len(one.value) for one in kvs])
    if before + size > bytes_max:
        raise LogyardError(f"the answer is larger than {bytes_max} bytes", code="too_large")
    return size


def numbers(*order: int) -> Steps[list[Any]]:
    """Return the steps of a command of numbers, which give the fields of its answer."""
    return answer_of((yield Command(encode_numbers(*order))))


def question(*order: int) -> Steps[list[Any]]:
    """Return the steps of a question of numbers, which give the fields of its answer."""
    packed, _ = yield Question(encode_numbers(*order))
    return answer_of(packed)


def compact(revision: int) -> Steps[int]:
    """Forget what was before a revision."""
    return int((yield from numbers(COMPACT, revision))[0])


def grant(ttl: float, lease: int) -> Steps[Lease]:
    """Return the steps that grant a lease of `ttl` seconds."""
    if not 0 < ttl < LEASE_S_MAX or lease < 0:
        raise BadRequest(f"a lease has a number and lasts for some seconds, fewer than {LEASE_S_MAX}")
    _, number, granted = yield from numbers(GRANT, round(ttl * 1000), lease)
    return Lease(number, granted / 1000, granted / 1000)


def keep(lease: int) -> Steps[float]:
    """Begin a lease's time anew."""
    return float((yield from numbers(KEEP, lease))[1] / 1000)


def revoke(lease: int) -> Steps[int]:
    """End a lease; return how many keys went with it."""
    return int((yield from numbers(REVOKE, lease))[1])


def time_to_live(lease: int, keys: bool) -> Steps[Lease]:
    """Return the steps that ask what is left of a lease."""
    answer, _ = yield Question(pack_order((TIME_TO_LIVE, lease, keys)))
    _, ttl, left, attached = answer_of(answer)
    return Lease(lease, ttl / 1000, left / 1000, tuple(attached))


def leases() -> Steps[tuple[int, ...]]:
    """Return the steps that ask for all leases."""
    packed, _ = yield Question(encode_numbers(LEASES))
    return tuple(answer_of(packed)[1])


def status() -> Steps[Mapping[str, int]]:
    """Return the steps that ask for numbers of the whole group."""
    packed, _ = yield Question(encode_numbers(STATUS))
    return dict(answer_of(packed)[1])


def anew(name: str) -> UnknownGroup:
    """Return what ends a watch whose group was deleted, when another one has its name."""
    return UnknownGroup(f"{name!r} was deleted and made anew: watch it from its beginning", retry="never", anew=True)


def near(node: int | None) -> str:
    """Return the consistency of what a watch asks for, of the leader or of the member that was named."""
    return "leader" if node is None else "local"


def events_call(
    name: str,
    key: bytes,
    end: bytes,
    flags: int,
    start: int,
    node: int | None,
    wait: float | None = None,
    skip: int = 0,
) -> Call[Any]:
    """Return a call for what a watch sees from the revision `start` on, of that behind `skip` events; `wait`: for it to
    happen."""
    return ask(
        "kv_events", plain, at=node, kind="kv", name=name, key=key, end=end, flags=flags, start=start, wait_s=wait,
        consistency=near(node), skip=skip or None,
    )  # fmt: skip


def fetch_call(
    name: str, requests: list[bytes], consistency: str, node: int | None, decode: Callable[[Any], D]
) -> Call[D]:
    """Return a call that asks questions."""
    return ask("fetch", decode, at=node, kind="kv", name=name, consistency=consistency, requests=requests)


def check_consistency(consistency: str) -> str:
    """Check the consistency of a read; raise `BadRequest`."""
    if consistency not in CONSISTENCY:
        raise BadRequest(f"a consistency is one of {', '.join(CONSISTENCY)}, not {consistency!r}")
    return consistency

"""The KV machine's operations and answers as a client has them, sans-IO: what is asked, and what came back.

Values of `PAYLOAD_BYTES` or more travel as payloads beside their command; answers name them by entry and ordinal, and
their bytes come along or are asked for. The numbers are those of `machines.kv.command` (a test compares them). Shared
by `kv` (asynchronous) and `kv_sync` (blocking).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgpack

from .errors import BadRequest, LogyardError, classes
from .frame import Buffer

PUT, DELETE, RANGE, TXN, COMPACT, GRANT, KEEP, REVOKE = range(1, 9)
TIME_TO_LIVE, LEASES, VALUES, STATUS = range(20, 24)
PREVIOUS, KEEP_LEASE, KEYS_ONLY, COUNT_ONLY, REFERENCES, UNCOUNTED = 1, 2, 4, 8, 16, 256
NO_PUT, NO_DELETE, PARTS = 32, 64, 128
DESCENDING = 2
FROM_KEY = b"\0"
PAYLOAD_BYTES = 1024
"""A value of this many bytes or more is a payload."""
VALUE_BYTES_MAX = 32 << 20
"""All values of one frame have to fit into it."""
PAGE_BYTES = 4 << 20
"""Of one page of a range."""
KEY_BYTES_MAX = 16 << 10
NUMBER_MAX = (1 << 63) - 1
VALUES_BYTES = 8 << 20
VALUES_MAX = 1000
SORTS = {"key": 0, "version": 1, "create": 2, "mod": 3, "value": 4}
TARGETS = {"version": 0, "create": 1, "mod": 2, "value": 3, "lease": 4}
RELATIONS = {"=": 0, ">": 1, "<": 2, "!=": 3}
_BYTES = {"key": "a key", "end": "the end of a range", "value": "a value", "operand": "an operand"}

Place: TypeAlias = tuple[int, int]
Bodies: TypeAlias = dict[Place, bytes]


class Compacted(LogyardError):
    """The revision that was asked for is gone; `revision`: reads go back to it, watches to the one after it."""

    code = "compacted"

    @property
    def revision(self) -> int:
        """Up to where the history is compacted."""
        return int(self._number("compacted"))


class KeyValue(NamedTuple):
    """A key as of some revision. `value` is empty where only keys were asked for."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


class Event(NamedTuple):
    """One change. `kv` is None for a deletion; `previous` is None unless asked for, and for a key that is new."""

    key: bytes
    kv: KeyValue | None
    previous: KeyValue | None = None


class Changes(NamedTuple):
    """What one revision changed, of the keys that are watched; empty: nothing came up to `revision`."""

    revision: int
    events: tuple[Event, ...]


class Put(NamedTuple):
    """`value` None: keep the one there is; `keep_lease`: as well."""

    key: bytes
    value: bytes | None
    lease: int = 0
    previous: bool = False
    keep_lease: bool = False


class Delete(NamedTuple):
    """Keys from `key` up to, but without, `end` (empty: `key` alone; `FROM_KEY`: all from it on)."""

    key: bytes
    end: bytes = b""
    previous: bool = False


class Get(NamedTuple):
    """A read. `revision` 0: now; `limit` 0: all; `sort`: key, version, create, mod, value; `bounds`: least and greatest
    mod revision, least and greatest create revision, 0 for none."""

    key: bytes
    end: bytes = b""
    revision: int = 0
    limit: int = 0
    sort: str = "key"
    descending: bool = False
    keys_only: bool = False
    count_only: bool = False
    bounds: tuple[int, int, int, int] = (0, 0, 0, 0)


class Compare(NamedTuple):
    """`target`: value, version, create, mod, lease; `relation`: =, !=, <, >. A key that is not there has version 0 and
    no value."""

    key: bytes
    target: str
    relation: str
    operand: int | bytes
    end: bytes = b""


class Txn(NamedTuple):
    """`then` if all compares hold, else `otherwise`, at one revision."""

    compares: Sequence[Compare]
    then: Sequence[Operation]
    otherwise: Sequence[Operation] = ()


Operation: TypeAlias = "Put | Delete | Get | Txn"


class PutResult(NamedTuple):
    """`previous`: what was there, if asked for."""

    revision: int
    previous: KeyValue | None


class DeleteResult(NamedTuple):
    """How many keys were deleted, and what they were, if asked for."""

    revision: int
    deleted: int
    previous: tuple[KeyValue, ...]


class GetResult(NamedTuple):
    """`count`: keys of the range, whatever the limit; `more`: some were left out."""

    revision: int
    kvs: tuple[KeyValue, ...]
    more: bool
    count: int  # type: ignore[assignment]  # tuple.count is not missed


class TxnResult(NamedTuple):
    """`results`: of the operations of the branch that was taken."""

    revision: int
    succeeded: bool
    results: tuple[Result, ...]


class Lease(NamedTuple):
    """`ttl` seconds were granted; `left` seconds are left of it; `keys` are attached, if asked for."""

    id: int
    ttl: float
    left: float
    keys: tuple[bytes, ...] = ()


Result: TypeAlias = "PutResult | DeleteResult | GetResult | TxnResult"


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin with `prefix`."""
    cut = prefix.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else FROM_KEY


def behind(key: bytes) -> bytes:
    """Return where a range goes on behind a key: no key is between the two. `FROM_KEY`: there is none behind it."""
    return key + b"\0" if len(key) < KEY_BYTES_MAX else prefix_end(key)


def range_of(key: bytes, end: bytes | None, prefix: bool) -> tuple[bytes, bytes]:
    """Return key and end as they travel; a prefix may be empty: all keys. Raises `BadRequest`."""
    if type(key) is not bytes or (end is not None and type(end) is not bytes):
        check_bytes(Get(key, end or b""))
    if prefix:
        if end:
            raise BadRequest("a range has an end, or is a prefix")
        return (key, prefix_end(key)) if key else (FROM_KEY, FROM_KEY)
    return key, end or b""


def check_watch(key: bytes, end: bytes, start: int) -> None:
    """Raise `BadRequest` for a watch that no node takes: with it, it would refuse the others of its stream."""
    if not 0 < len(key) <= KEY_BYTES_MAX or len(end) > KEY_BYTES_MAX + 1:
        raise BadRequest(f"a key is 1 to {KEY_BYTES_MAX} bytes (all keys are those of the empty prefix)")
    if not 0 <= start <= NUMBER_MAX:
        raise BadRequest(f"a watch begins with a revision from 1 to {NUMBER_MAX}, or 0: from now on")


def check_bytes(operation: Operation | Compare) -> None:
    """Raise `BadRequest` where anything is in the place of bytes. For what was refused: what is taken costs no look."""
    for name, value in zip(operation._fields, operation, strict=True):
        what = _BYTES.get(name)
        if what is None or value is None or isinstance(value, bytes | bytearray | memoryview):
            continue
        if name != "operand" or not isinstance(value, int):
            raise BadRequest(f"{what} is bytes, not {type(value).__name__}")
    if isinstance(operation, Txn):
        for one in (*operation.compares, *operation.then, *operation.otherwise):
            check_bytes(one)


def encode(operation: Operation) -> tuple[bytes, list[Buffer]]:
    """Return a command and the payloads that go with it. Raises `BadRequest`."""
    bodies: list[Buffer] = []
    try:
        return pack_order(_array(operation, bodies)), bodies
    except TypeError:
        check_bytes(operation)
        raise


def encode_numbers(*numbers: int) -> bytes:
    """Return a command or question of numbers."""
    return pack_order(numbers)


def pack_order(order: object) -> bytes:
    """Return a command or question as it travels. Raises `BadRequest` for a number that can't."""
    try:
        found: bytes = msgpack.packb(order)
    except OverflowError:
        raise BadRequest("a number has more than 64 bits") from None
    return found


def digest(data: Buffer) -> bytes:
    """Return what a payload is compared by."""
    return hashlib.sha256(data).digest()[:16]


def _array(operation: Operation, bodies: list[Buffer]) -> Any:
    if isinstance(operation, Put):
        value: Any = operation.value
        if value is not None and len(value) >= PAYLOAD_BYTES:
            if len(value) > VALUE_BYTES_MAX:
                raise BadRequest(f"a value of {len(value)} bytes is above its limit of {VALUE_BYTES_MAX}")
            bodies.append(value)
            value = (len(bodies) - 1, len(value), digest(value))
        flags = (PREVIOUS if operation.previous else 0) | (KEEP_LEASE if operation.keep_lease else 0)
        return PUT, operation.key, value, operation.lease, flags
    if isinstance(operation, Delete):
        return DELETE, operation.key, operation.end, PREVIOUS if operation.previous else 0
    if isinstance(operation, Get):
        return get_array(operation, 0, 0)
    return (
        TXN,
        [_compare(one) for one in operation.compares],
        [_array(one, bodies) for one in operation.then],
        [_array(one, bodies) for one in operation.otherwise],
    )


def get_array(get: Get, more_flags: int, max_bytes: int) -> tuple[Any, ...]:
    """Return a read as it travels."""
    if get.sort not in SORTS:
        raise BadRequest(f"a range is sorted by {', '.join(SORTS)}")
    flags = (KEYS_ONLY if get.keys_only else 0) | (COUNT_ONLY if get.count_only else 0) | more_flags
    order = DESCENDING if get.descending else 0
    return RANGE, get.key, get.end, get.revision, get.limit, flags, SORTS[get.sort], order, max_bytes, get.bounds


def _compare(compare: Compare) -> tuple[Any, ...]:
    if compare.target not in TARGETS or compare.relation not in RELATIONS:
        raise BadRequest(f"a compare is of {', '.join(TARGETS)}, with one of {' '.join(RELATIONS)}")
    operand: Any = compare.operand
    if isinstance(operand, bytes) and len(operand) >= PAYLOAD_BYTES and compare.relation in ("=", "!="):
        operand = (len(operand), digest(operand))
    return compare.key, compare.end, TARGETS[compare.target], RELATIONS[compare.relation], operand


def answer_of(packed: Buffer | Any) -> list[Any]:
    """Return the fields of an answer behind its status: revision first. Raises what a refusal says."""
    found = msgpack.unpackb(packed) if isinstance(packed, bytes | bytearray | memoryview) else packed
    if not isinstance(found, list) or len(found) < 2:
        raise LogyardError("the KV machine's answer cannot be read")
    if found[0] == 0:
        return found[1:]
    _, code, message, details = found
    kind = Compacted if code == Compacted.code else classes().get(code, LogyardError)
    raise kind.told(message, details, code=code, retry="never")


class Decoder:
    """Answers to results. `missing`: payloads that they name and `bodies` lacks, with their sizes; decode again when
    they are there."""

    __slots__ = ("bodies", "missing")

    def __init__(self, bodies: Bodies | None = None) -> None:
        self.bodies: Bodies = {} if bodies is None else bodies
        self.missing: dict[Place, int] = {}

    def result(self, kind: int, revision: int, fields: Sequence[Any]) -> Result:
        """Return what became of one operation."""
        if kind == PUT:
            return PutResult(revision, self.optional(fields[0]))
        if kind == DELETE:
            return DeleteResult(revision, fields[0], tuple([self.row(row) for row in fields[1]]))
        if kind == RANGE:
            return GetResult(revision, tuple([self.row(row) for row in fields[0]]), fields[1], fields[2])
        results = tuple([self.result(one, revision, rest) for one, *rest in fields[1]])
        return TxnResult(revision, fields[0], results)

    def optional(self, row: Sequence[Any] | None) -> KeyValue | None:
        """Return a row, or none."""
        return None if row is None else self.row(row)

    def row(self, row: Sequence[Any]) -> KeyValue:
        """Return one key."""
        key, create, mod, version, lease, value = row
        if type(value) is not bytes:
            value = self.value(value)
        return KeyValue(key, value, create, mod, version, lease)

    def value(self, named: Sequence[int]) -> bytes:
        """Return a payload's bytes."""
        index, ordinal, size = named
        found = self.bodies.get((index, ordinal))
        if found is None:
            self.missing[index, ordinal] = size
            return b""
        return found

    def changes(self, found: Sequence[Any]) -> dict[int, Changes]:
        """Return the events of one revision, by watch: each sees what it asked for."""
        revision, shown = found
        events: dict[int, list[Event]] = {}
        if len(shown) == 1:
            # Many watches of one key share what they see.
            watches, row, previous = shown[0]
            return dict.fromkeys(watches, Changes(revision, (self._event(row, previous),)))
        for watches, row, previous in shown:
            event = self._event(row, previous)
            for watch in watches:
                events.setdefault(watch, []).append(event)
        return {watch: Changes(revision, tuple(some)) for watch, some in events.items()}

    def _event(self, row: Sequence[Any], previous: Sequence[Any] | None) -> Event:
        deleted = row[5] is None
        return Event(row[0], None if deleted else self.row(row), self.optional(previous))


class Parts:
    """Joins the parts in which a long revision comes. `rest`: the next part begins with that event; 0: all is whole."""

    __slots__ = ("rest", "_shown", "_bodies")

    def __init__(self) -> None:
        self.rest = 0
        self._shown: list[Any] = []
        self._bodies: Bodies = {}

    def add(self, header: Any, bodies: Bodies) -> tuple[list[Any], Bodies]:
        """Return the revisions that are whole with this answer, and the payloads of them that came."""
        begun, self.rest = self.rest, header.get("rest", 0)
        if not begun and not self.rest:
            return header["revisions"], bodies
        if not header["revisions"]:
            # Of a member that has not applied so much yet: the next part is asked for again.
            self.rest = begun
            return [], {}
        ((revision, shown),) = header["revisions"]
        self._shown += shown
        self._bodies |= bodies
        if self.rest:
            return [], {}
        whole, bodies = [[revision, self._shown]], self._bodies
        self._shown, self._bodies = [], {}
        return whole, bodies


def kind_of(operation: Operation) -> int:
    """Return the number of an operation."""
    if isinstance(operation, Put):
        return PUT
    if isinstance(operation, Delete):
        return DELETE
    return RANGE if isinstance(operation, Get) else TXN


def bodies_of(places: Iterable[Sequence[int]], data: memoryview) -> Bodies:
    """Return the payloads that came with an answer."""
    found: Bodies = {}
    at = 0
    for index, ordinal, size in places:
        found[index, ordinal] = bytes(data[at : at + size])
        at += size
    return found


def value_questions(missing: dict[Place, int]) -> Iterable[bytes]:
    """Yield questions for payloads, none for more than a bounded number of bytes."""
    some: list[Place] = []
    size = 0
    for place, length in missing.items():
        if some and (size + length > VALUES_BYTES or len(some) >= VALUES_MAX):
            yield msgpack.packb((VALUES, some))
            some, size = [], 0
        some.append(place)
        size += length
    if some:
        yield msgpack.packb((VALUES, some))

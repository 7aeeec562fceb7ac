"""The commands of the KV machine as bytes, checked: a msgpack array each, whose first element says what it is.

Clients write them (`client.kv_wire` has the same numbers), `machines.kv` applies them. What comes from a stranger is
looked at here, completely, before anything of the state is touched. Shapes: docs/machines/kv.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import msgpack

PUT = 1
"""``[PUT, key, value, lease, flags]``: value is bytes, ``[record, size, digest]`` of a payload, or nil: keep it."""
PUT_ELEMENTS = 5
DELETE = 2
"""``[DELETE, key, end, flags]``"""
RANGE = 3
"""``[RANGE, key, end, revision, limit, flags, sort by, order, max bytes, bounds]``; bounds: least and greatest mod
revision, least and greatest create revision, 0 for none."""
TXN = 4
"""``[TXN, compares, then, else]``"""
COMPACT = 5
"""``[COMPACT, revision]``"""
GRANT = 6
"""``[GRANT, milliseconds, lease or 0]``"""
KEEP = 7
"""``[KEEP, lease]``"""
REVOKE = 8
"""``[REVOKE, lease]``"""
PURGE = 9
"""``[PURGE]``: the machine's own follow-up, while there is history left to drop."""

TIME_TO_LIVE = 20
"""A question: ``[TIME_TO_LIVE, lease, keys too]``."""
LEASES = 21
VALUES = 22
"""A question: ``[VALUES, [[index, ordinal], ...]]``: the bytes of payloads that a reply named."""
STATUS = 23

PREVIOUS = 1
"""A flag of put and delete: answer what was there before."""
KEEP_LEASE = 2
"""A flag of put: the key stays with the lease that it has."""
KEYS_ONLY = 4
COUNT_ONLY = 8
REFERENCES = 16
"""A flag of a range: payloads are named, their bytes do not come along."""
UNCOUNTED = 256
"""A flag of a range that is a question: how many keys there are need not be said. A command has it for nothing: all
members answer it the same, also those of a version that does not know it."""

BY_KEY, BY_VERSION, BY_CREATE, BY_MOD, BY_VALUE = range(5)
ASCENDING, DESCENDING = 1, 2
EQUAL, GREATER, LESS, DIFFERENT = range(4)
OF_VERSION, OF_CREATE, OF_MOD, OF_VALUE, OF_LEASE = range(5)
FROM_KEY = b"\0"
"""As the end of a range: every key from the first one on."""

KEY_BYTES_MAX = 16 << 10
"""A key is kept in memory on every member, and travels in every event."""
INLINE_BYTES_MAX = 64 << 10
"""A longer value is a payload: state and snapshots hold metadata."""
OPERATIONS_MAX = 65_536
"""Of one transaction: all of it is applied in one turn."""
DEPTH_MAX = 8
"""Of transactions within transactions."""
NUMBER_MAX = (1 << 63) - 1
LEASE_MS_MAX = 9_000_000_000_000
DIGEST_BYTES = 16

Payload: TypeAlias = tuple[int, int, int, bytes]
"""A value that is a payload: index, ordinal, size, digest of its bytes (the first half of their SHA-256; its client
says so)."""
Value: TypeAlias = bytes | Payload | None
"""None: the key is deleted."""


class Refusal(Exception):
    """An operation that is refused, deterministically: part of the reply, and nothing is changed. `details` are
    numbers that its client can act on."""

    def __init__(self, code: str, message: str, **details: int) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details


class Put(NamedTuple):
    """`value`: bytes, a `Payload` in this entry, or None: keep the one there is."""

    key: bytes
    value: Value
    lease: int
    flags: int


class Delete(NamedTuple):
    """Keys from `key` up to, but without, `end`; an empty `end`: `key` alone."""

    key: bytes
    end: bytes
    flags: int


class Range(NamedTuple):
    """A read. `revision` 0: now; `limit` 0: all; `max_bytes` 0: no bound; `bounds`: of mod and create revision."""

    key: bytes
    end: bytes = b""
    revision: int = 0
    limit: int = 0
    flags: int = 0
    sort: int = BY_KEY
    order: int = 0
    max_bytes: int = 0
    bounds: tuple[int, int, int, int] = (0, 0, 0, 0)


class Compare(NamedTuple):
    """True if every key of the range (and a missing single key, as version 0) has `relation` to `operand`."""

    key: bytes
    end: bytes
    target: int
    relation: int
    operand: Any


class Txn(NamedTuple):
    """`then` if all compares hold, else `other`; all of it at one revision."""

    compares: tuple[Compare, ...]
    then: tuple[Operation, ...]
    other: tuple[Operation, ...]


class Order(NamedTuple):
    """Any other command: COMPACT, GRANT, KEEP, REVOKE, PURGE with its numbers."""

    code: int
    first: int = 0
    second: int = 0


Operation: TypeAlias = "Put | Delete | Range | Txn"
Command: TypeAlias = "Put | Delete | Range | Txn | Order"

NUMBERS = {COMPACT: 1, GRANT: 2, KEEP: 1, REVOKE: 1, PURGE: 0}


def unpacked(data: bytes) -> list[Any]:
    """Return a msgpack array that begins with a number; raise `Refusal`."""
    try:
        found = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        found = None
    if type(found) is not list or not found or type(found[0]) is not int:
        raise Refusal("bad_request", "a command of the KV machine is a msgpack array that begins with its number")
    return found


def is_plain(found: list[Any]) -> bool:
    """Tell whether a put is all in order and has no payload, no lease and no flags."""
    if len(found) != PUT_ELEMENTS:
        return False
    _, key, value, lease, flags = found
    return (
        lease == 0 == flags
        and type(lease) is type(flags) is int
        and type(key) is type(value) is bytes
        and 0 < len(key) <= KEY_BYTES_MAX
        and len(value) <= INLINE_BYTES_MAX
    )


def parse(found: list[Any], index: int, first: int, records: int) -> Command:
    """Return an unpacked command whose own records are ordinals `first` up to `first` + `records` of entry `index`."""
    if found[0] in NUMBERS:
        return _order(found)
    return operation(found, index, first, records, 0)


def _order(found: list[Any]) -> Order:
    code, *numbers = found
    if len(numbers) != NUMBERS[code]:
        raise Refusal("bad_request", f"command {code} has {NUMBERS[code]} numbers")
    return Order(code, *map(number, numbers))


def operation(found: Any, index: int, first: int, records: int, depth: int) -> Operation:
    """Return one read, write or transaction."""
    if type(found) is not list or not found or type(found[0]) is not int:
        raise Refusal("bad_request", "an operation is an array that begins with its number")
    code = found[0]
    if code == PUT and len(found) == PUT_ELEMENTS:
        _, key, value, lease, flags = found
        if type(value) is not bytes:
            value = _payload(value, index, first, records)
        elif len(value) > INLINE_BYTES_MAX:
            raise Refusal("bad_request", f"a value above {INLINE_BYTES_MAX} bytes is a payload")
        return Put(key_of(key), value, number(lease), number(flags))
    if code == DELETE and len(found) == 4:
        _, key, end, flags = found
        return Delete(key_of(key), end_of(end), number(flags))
    if code == RANGE:
        wanted = range_of(found)
        return wanted._replace(flags=wanted.flags & ~UNCOUNTED)
    if code == TXN and len(found) == 4:
        return _txn(found, index, first, records, depth)
    raise Refusal("bad_request", f"no operation {code} of {len(found)} elements")


def range_of(found: list[Any]) -> Range:
    """Return a read."""
    if not 2 <= len(found) <= 10:
        raise Refusal("bad_request", "a range has 1 to 9 arguments")
    key, *rest = found[1:]
    end = end_of(rest[0]) if rest else b""
    if len(rest) <= 2:
        return Range(key_of(key), end, number(rest[1]) if len(rest) > 1 else 0)
    numbers = [number(one) for one in rest[1:7]]
    bounds = rest[7] if len(rest) > 7 else (0, 0, 0, 0)
    if type(bounds) not in (list, tuple) or len(bounds) != 4:
        raise Refusal("bad_request", "the bounds of a range are four revisions")
    numbers += [0] * (6 - len(numbers))
    if numbers[3] > BY_VALUE or numbers[4] > DESCENDING:
        raise Refusal("bad_request", "a range is sorted by key, version, create, mod or value, up or down")
    low, high, least, most = map(number, bounds)
    revision, limit, flags, sort, order, max_bytes = numbers
    return Range(key_of(key), end, revision, limit, flags, sort, order, max_bytes, (low, high, least, most))


def _payload(value: Any, index: int, first: int, records: int) -> Payload | None:
    if value is None:
        return None
    if type(value) is list and len(value) == 3:
        record, size, digest = value
        if type(record) is int and 0 <= record < records and type(digest) is bytes and len(digest) == DIGEST_BYTES:
            return index, first + record, number(size), digest
    raise Refusal("bad_request", "a value is bytes, or the record, size and digest of a payload that came along")


def _txn(found: list[Any], index: int, first: int, records: int, depth: int) -> Txn:
    _, compares, then, other = found
    if depth >= DEPTH_MAX or not type(compares) is type(then) is type(other) is list:
        raise Refusal("bad_request", f"a transaction has compares and two lists of operations, {DEPTH_MAX} deep")
    if len(compares) + len(then) + len(other) > OPERATIONS_MAX:
        raise Refusal("too_many_operations", f"a transaction has at most {OPERATIONS_MAX} compares and operations")
    return Txn(
        tuple([_compare(one) for one in compares]),
        tuple([operation(one, index, first, records, depth + 1) for one in then]),
        tuple([operation(one, index, first, records, depth + 1) for one in other]),
    )


def _compare(found: Any) -> Compare:
    if type(found) is not list or len(found) != 5:
        raise Refusal("bad_request", "a compare is key, end, target, relation and operand")
    key, end, target, relation, operand = found
    if number(target) > OF_LEASE or number(relation) > DIFFERENT:
        raise Refusal("bad_request", "a compare is of version, create, mod, value or lease, with one of four relations")
    if target != OF_VALUE:
        number(operand)
    elif type(operand) is list and len(operand) == 2 and type(operand[1]) is bytes:
        number(operand[0])
    elif type(operand) is not bytes:
        raise Refusal("bad_request", "a value is compared with bytes, or with a size and a digest")
    return Compare(key_of(key), end_of(end), target, relation, operand)


def key_of(value: Any) -> bytes:
    """Return a key; raise `Refusal`."""
    if type(value) is not bytes or not 0 < len(value) <= KEY_BYTES_MAX:
        raise Refusal("bad_request", f"a key is 1 to {KEY_BYTES_MAX} bytes")
    return value


def end_of(value: Any) -> bytes:
    """Return the end of a range; raise `Refusal`."""
    if type(value) is not bytes or len(value) > KEY_BYTES_MAX + 1:
        raise Refusal("bad_request", f"the end of a range is up to {KEY_BYTES_MAX + 1} bytes")
    return value


def number(value: Any) -> int:
    """Return a number that is not negative; raise `Refusal`."""
    if type(value) is not int or not 0 <= value <= NUMBER_MAX:
        raise Refusal("bad_request", f"a number is 0 to {NUMBER_MAX}")
    return value

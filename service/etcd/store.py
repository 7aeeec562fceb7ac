"""The KV part of the gateway: range, put, deleterange, txn, compaction; what is asked and what is answered, as JSON.

A function a path: from the request's `Message` to the answer's fields. Limits are etcd's own: bytes of a request,
operations of a transaction. What etcd does on its own side of a range (bounds, orders, what is cut off) is done here
(`Reading`); what is checked before anything is asked holds for both paths of a transaction. Used by `app`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from logyard.client import kv_requests
from logyard.protocol.kv import (
    COMPACT,
    Compare,
    Delete,
    DeleteResult,
    Get,
    GetResult,
    KeyValue,
    Operation,
    Put,
    PutResult,
    Result,
    Txn,
    TxnResult,
)

from .gateway import Gateway
from .words import (
    INT64_MAX,
    INVALID,
    OVERHEAD_BYTES,
    REFUSALS,
    TOO_LARGE,
    GatewayError,
    Message,
    Schema,
    choice,
    data,
    flag,
    key_value,
    malformed,
    many,
    number,
    one,
    too_long,
)

NONE, ASCEND, DESCEND = range(3)
BY_KEY, BY_VERSION, BY_CREATE, BY_MOD, BY_VALUE = range(5)
SORTED: dict[int, Callable[[KeyValue], Any]] = {
    BY_VERSION: lambda kv: kv.version,
    BY_CREATE: lambda kv: kv.create_revision,
    BY_MOD: lambda kv: kv.mod_revision,
    BY_VALUE: lambda kv: kv.value,
}
RELATIONS = ("=", ">", "<", "!=")
COMPARED = ("version", "create", "mod", "value", "lease")
OPERANDS = ("version", "create_revision", "mod_revision", "value", "lease")
REQUESTS = ("request_range", "request_put", "request_delete_range", "request_txn")
VALUE = COMPARED.index("value")

ANSWER_BYTES_MAX = 512 << 20
"""Keys and values of one answer, which is built in memory; base64 and JSON make more of it."""
DEPTH_MAX = 8
"""Of transactions in transactions; the KV machine's own limit."""
TOO_MANY_OPERATIONS = "etcdserver: too many operations in txn request"
DUPLICATE_KEY = "etcdserver: duplicate key given in txn request"

RANGE = Schema(
    key=data, range_end=data, limit=number, revision=number, sort_order=choice("NONE", "ASCEND", "DESCEND"),
    sort_target=choice("KEY", "VERSION", "CREATE", "MOD", "VALUE"), serializable=flag, keys_only=flag, count_only=flag,
    min_mod_revision=number, max_mod_revision=number, min_create_revision=number, max_create_revision=number,
)  # fmt: skip
PUT = Schema(key=data, value=data, lease=number, prev_kv=flag, ignore_value=flag, ignore_lease=flag)
DELETE = Schema(key=data, range_end=data, prev_kv=flag)
COMPARE = Schema(
    result=choice("EQUAL", "GREATER", "LESS", "NOT_EQUAL"), key=data, range_end=data, version=number,
    target=choice("VERSION", "CREATE", "MOD", "VALUE", "LEASE"), create_revision=number, mod_revision=number,
    value=data, lease=number,
)  # fmt: skip
REQUEST = Schema(request_range=one(RANGE), request_put=one(PUT), request_delete_range=one(DELETE))
TXN = Schema(compare=many(one(COMPARE)), success=many(one(REQUEST)), failure=many(one(REQUEST)))
REQUEST.add("request_txn", one(TXN))
COMPACTION = Schema(revision=number, physical=flag)


async def range_(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Return the keys of a range, now or as of a revision; `serializable`: as this node has them."""
    asked.key()
    reading = reading_of(asked)
    consistency = "local" if asked.flag("serializable") else "linearizable"
    node = gateway.node if consistency == "local" else None
    steps = kv_requests.read(reading.get, ANSWER_BYTES_MAX)
    found = reading.finish(await gateway.run(steps, consistency=consistency, node=node))
    return {"header": gateway.header.at(found.revision), **_range_fields(found)}


async def put(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Set a key."""
    check_put(asked)
    check_size(gateway, _size(asked))
    found = await gateway.run(kv_requests.write(put_of(asked)))
    assert isinstance(found, PutResult)
    return {"header": gateway.header.at(found.revision), **_put_fields(found)}


async def deleterange(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Delete a range of keys."""
    asked.key()
    found = await gateway.run(kv_requests.write(delete_of(asked)))
    assert isinstance(found, DeleteResult)
    return {"header": gateway.header.at(found.revision), **_delete_fields(found)}


async def txn(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Compare, then do the one or the other."""
    check_txn(asked, gateway.limits.txn_operations)
    # First how deep it is: each level looks at all that is below it.
    size = _txn_size(asked, 0)
    for name in ("success", "failure"):
        check_intervals(asked.rows(name))
    check_size(gateway, size)
    plan = plan_of(asked)
    found = await gateway.run(kv_requests.write(plan.txn))
    assert isinstance(found, TxnResult)
    fields = Answering(found).txn(found, plan)
    return {"header": gateway.header.at(found.revision), **fields}


async def compaction(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Forget history."""
    revision = asked.number("revision")
    if revision < 0:
        raise GatewayError(*REFUSALS["compacted"])
    found = await gateway.run(kv_requests.numbers(COMPACT, revision))
    return {"header": gateway.header.at(found[0])}


# What is checked first


def check_put(asked: Message) -> None:
    """Check a put; raise `GatewayError`."""
    asked.key()
    if asked.flag("ignore_value") and asked.data("value"):
        raise malformed("etcdserver: value is provided")
    if asked.flag("ignore_lease") and asked.number("lease"):
        raise malformed("etcdserver: lease is provided")


def check_txn(asked: Message, operations_max: int) -> None:
    """Raise `GatewayError` for what neither path may hold. What is inside has what is left of the operations."""
    lists = [asked.rows(name) for name in ("compare", "success", "failure")]
    most = max([len(rows) for rows in lists])
    if most > operations_max:
        raise GatewayError(INVALID, TOO_MANY_OPERATIONS)
    compares, *paths = lists
    for compare in compares:
        compare.key()
    for path in paths:
        for request in path:
            name = request.which(REQUESTS)
            if not name:
                raise GatewayError(INVALID, "etcdserver: key not found")
            inner: Message = request.fields[name]
            if name == "request_put":
                check_put(inner)
            elif name == "request_txn":
                check_txn(inner, operations_max - most)
            else:
                inner.key()


Interval: TypeAlias = tuple[bytes, bytes]


def check_intervals(requests: Sequence[Message]) -> tuple[set[bytes], list[Interval]]:
    """Return the keys that a path puts and the ranges that it deletes, with all paths of transactions in it. Raises
    `GatewayError` where two puts, or a put and a deletion, are of one key and not of paths that exclude each other.

    As etcd, it lets a deletion within a transaction pass that is behind, in the list, one that puts its keys."""
    inner = [(request.which(REQUESTS), request) for request in requests]
    # With the place of the operation from which on puts may not be in the range.
    deleted = [
        (one.data("key"), one.data("range_end") or one.data("key") + b"\0", 0)
        for name, request in inner
        if name == "request_delete_range"
        for one in [request.fields[name]]
    ]
    puts: set[bytes] = set()
    placed: list[tuple[bytes, int]] = []
    for place, (name, request) in enumerate(inner):
        if name == "request_txn":
            nested: Message = request.fields[name]
            then, then_deleted = check_intervals(nested.rows("success"))
            otherwise, otherwise_deleted = check_intervals(nested.rows("failure"))
            _add(then | otherwise, place, puts, placed)
            deleted += [(*one, place + 1) for one in (*then_deleted, *otherwise_deleted)]
    for name, request in inner:
        if name == "request_put":
            _add({request.fields[name].data("key")}, len(inner), puts, placed)
    if deleted and _is_any_within(placed, deleted):
        raise GatewayError(INVALID, DUPLICATE_KEY)
    return puts, [(first, end) for first, end, _ in deleted]


def _add(keys: set[bytes], place: int, puts: set[bytes], placed: list[tuple[bytes, int]]) -> None:
    """Add the keys that the operation at `place` puts. Raises `GatewayError` where they are there already."""
    if not keys.isdisjoint(puts):
        raise GatewayError(INVALID, DUPLICATE_KEY)
    puts |= keys
    placed += [(key, place) for key in keys]


def _is_any_within(placed: list[tuple[bytes, int]], ranges: list[tuple[bytes, bytes, int]]) -> bool:
    """Return whether a key is in any range that counts at its place. A pass in order of the keys: of the ranges that
    have begun, the one that counts for most is at hand."""
    ranges = sorted(ranges)
    begun: list[tuple[int, bytes]] = []
    at = 0
    for key, place in sorted(placed):
        while at < len(ranges) and ranges[at][0] <= key:
            _, end, since = ranges[at]
            heapq.heappush(begun, (since, end))
            at += 1
        while begun and begun[0][1] <= key:
            heapq.heappop(begun)
        if begun and begun[0][0] <= place:
            return True
    return False


def check_size(gateway: Gateway, size: int) -> None:
    """Raise `GatewayError` for what etcd would not take into its log."""
    limit = gateway.limits.request_bytes
    if size > limit + OVERHEAD_BYTES:
        raise too_long(size, limit + OVERHEAD_BYTES)
    if size > limit:
        raise GatewayError(INVALID, TOO_LARGE)


def _size(asked: Message) -> int:
    return len(asked.data("key")) + len(asked.data("value")) + len(asked.data("range_end"))


def _txn_size(asked: Message, depth: int) -> int:
    if depth >= DEPTH_MAX:
        raise malformed(f"logyard: transactions are at most {DEPTH_MAX} deep")
    size = sum([_size(one) for one in asked.rows("compare")])
    for path in ("success", "failure"):
        for request in asked.rows(path):
            name = request.which(REQUESTS)
            inner = request.fields[name]
            size += _txn_size(inner, depth + 1) if name == "request_txn" else _size(inner)
    return size


# What is asked of the machine


class Reading(NamedTuple):
    """A read: what is asked of the machine, and what is left to do here. `bounds`: least and greatest mod and create
    revision, 0 for none; `sort`: 0, or of `SORTED`; `limit`: of what is left then."""

    get: Get
    bounds: tuple[int, int, int, int] = (0, 0, 0, 0)
    sort: int = 0
    descending: bool = False
    limit: int = 0
    keys_only: bool = False

    def finish(self, found: GetResult) -> GetResult:
        """Return the answer. As etcd's: `count` is of the range whatever the bounds; keys that are equal stay in
        order."""
        kvs: Sequence[KeyValue] = found.kvs
        low, high, least, most = self.bounds
        if any(self.bounds):
            kvs = [
                one
                for one in kvs
                if (not low or one.mod_revision >= low)
                and (not high or one.mod_revision <= high)
                and (not least or one.create_revision >= least)
                and (not most or one.create_revision <= most)
            ]
        if self.sort:
            kvs = sorted(kvs, key=SORTED[self.sort], reverse=self.descending)
        elif self.descending:
            kvs = kvs[::-1]
        more = found.more
        if self.limit:
            kvs, more = kvs[: self.limit], len(kvs) > self.limit
        if self.keys_only:
            kvs = [one._replace(value=b"") for one in kvs]
        return found._replace(kvs=tuple(kvs), more=more)


def reading_of(asked: Message) -> Reading:
    """Return a range's reading."""
    names = ("min_mod_revision", "max_mod_revision", "min_create_revision", "max_create_revision")
    low, high, least, most = (asked.number(name) for name in names)
    bounds = (low, high, least, most)
    order, target = asked.number("sort_order"), asked.number("sort_target")
    if not 0 <= target <= BY_VALUE:
        raise malformed(f"logyard: unknown sort_target {target}")
    limit = max(0, asked.number("limit"))
    keys_only, count_only = asked.flag("keys_only"), asked.flag("count_only")
    get = Get(
        asked.data("key"), asked.data("range_end"), max(0, asked.number("revision")), keys_only=keys_only,
        count_only=count_only,
    )  # fmt: skip
    if count_only:
        return Reading(get)
    # An order that etcd does not know is none, but it reads the whole range for it.
    sort = target if order in (NONE, ASCEND, DESCEND) else 0
    if not any(bounds) and not sort:
        return Reading(get._replace(limit=limit, descending=order == DESCEND))
    if sort == BY_VALUE:
        get = get._replace(keys_only=False)
    if sort and order == NONE and not any(bounds):
        # Of what the limit leaves, in order of the keys, etcd sorts one more than it then shows.
        get = get._replace(limit=limit and min(limit + 1, INT64_MAX))
    return Reading(get, bounds, sort, order == DESCEND, limit, keys_only)


def put_of(asked: Message) -> Put:
    """Return a write."""
    value = None if asked.flag("ignore_value") else asked.data("value")
    lease = lease_of(asked.number("lease"))
    return Put(asked.data("key"), value, lease, asked.flag("prev_kv"), asked.flag("ignore_lease"))


def lease_of(number: int) -> int:
    """Return a lease's number as the KV machine has it: those below zero do not exist, as little as the last one."""
    return number if number >= 0 else INT64_MAX


def delete_of(asked: Message) -> Delete:
    """Return a deletion."""
    return Delete(asked.data("key"), asked.data("range_end"), asked.flag("prev_kv"))


class Plan(NamedTuple):
    """A transaction as the machine gets it, and how the answer of each operation, by path, is finished."""

    txn: Txn
    then: list[Reading | Plan | None]
    otherwise: list[Reading | Plan | None]


def plan_of(asked: Message) -> Plan:
    """Return a transaction, with those in it."""
    compares = [found for one in asked.rows("compare") for found in _compare(one)]
    (then, then_plans), (otherwise, otherwise_plans) = (_path(asked.rows(name)) for name in ("success", "failure"))
    return Plan(Txn(compares, then, otherwise), then_plans, otherwise_plans)


def _path(requests: Sequence[Message]) -> tuple[list[Operation], list[Reading | Plan | None]]:
    operations: list[Operation] = []
    plans: list[Reading | Plan | None] = []
    for request in requests:
        name = request.which(REQUESTS)
        found: Message = request.fields[name]
        plan: Reading | Plan | None = None
        if name == "request_range":
            plan = reading_of(found)
            operations.append(plan.get)
        elif name == "request_put":
            operations.append(put_of(found))
        elif name == "request_delete_range":
            operations.append(delete_of(found))
        else:
            plan = plan_of(found)
            operations.append(plan.txn)
        plans.append(plan)
    return operations, plans


def _compare(asked: Message) -> list[Compare]:
    """Return what the machine has to compare, all of it: nothing for what is always true."""
    key, end = asked.data("key"), asked.data("range_end")
    result, target = asked.number("result"), asked.number("target")
    never = Compare(key, "version", "=", INT64_MAX, end)
    known = 0 <= result < len(RELATIONS)
    if target == VALUE:
        # What no key has is not compared: that there is one is all that an unknown relation asks for.
        given = asked.data("value") if asked.which(OPERANDS) == "value" else b""
        return [Compare(key, "value", RELATIONS[result], given, end) if known else Compare(key, "version", ">", 0, end)]
    if not known:
        return []
    relation = RELATIONS[result]
    if not 0 <= target < len(COMPARED):
        return [] if relation == "=" else [never]
    name = OPERANDS[target]
    operand = asked.number(name) if asked.which(OPERANDS) == name else 0
    if operand < 0:
        # Everything the machine has is above it.
        return [] if relation in (">", "!=") else [never]
    return [Compare(key, COMPARED[target], relation, operand, end)]


# What is answered


class Answering:
    """The answers of a transaction's operations, in order: what each says the revision is depends on what was written
    before it."""

    __slots__ = ("revision", "wrote")

    def __init__(self, found: TxnResult) -> None:
        self.revision = found.revision
        self.wrote = not _writes(found)

    def txn(self, found: TxnResult, plan: Plan) -> dict[str, Any]:
        """Return the fields of a transaction's answer, without a header."""
        fields: dict[str, Any] = {"succeeded": True} if found.succeeded else {}
        plans = plan.then if found.succeeded else plan.otherwise
        rows = [self._operation(one, how) for one, how in zip(found.results, plans, strict=True)]
        return fields | ({"responses": rows} if rows else {})

    def _operation(self, found: Result, how: Reading | Plan | None) -> dict[str, Any]:
        if isinstance(found, GetResult):
            assert isinstance(how, Reading)
            return {"response_range": {**self._header(), **_range_fields(how.finish(found))}}
        if isinstance(found, PutResult):
            self.wrote = True
            return {"response_put": {**self._header(), **_put_fields(found)}}
        if isinstance(found, DeleteResult):
            self.wrote = self.wrote or found.deleted > 0
            return {"response_delete_range": {**self._header(), **_delete_fields(found)}}
        assert isinstance(how, Plan)
        # As etcd's: the header of a transaction within one says nothing.
        return {"response_txn": {"header": {}, **self.txn(found, how)}}

    def _header(self) -> dict[str, Any]:
        return {"header": {"revision": str(self.revision if self.wrote else self.revision - 1)}}


def _writes(found: TxnResult) -> bool:
    """Return whether a transaction made a revision."""
    return any(
        [
            isinstance(one, PutResult)
            or (isinstance(one, DeleteResult) and one.deleted > 0)
            or (isinstance(one, TxnResult) and _writes(one))
            for one in found.results
        ]
    )


def _range_fields(found: GetResult) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if found.kvs:
        fields["kvs"] = [key_value(one) for one in found.kvs]
    if found.more:
        fields["more"] = True
    return fields | ({"count": str(found.count)} if found.count else {})


def _put_fields(found: PutResult) -> dict[str, Any]:
    return {} if found.previous is None else {"prev_kv": key_value(found.previous)}


def _delete_fields(found: DeleteResult) -> dict[str, Any]:
    fields: dict[str, Any] = {"deleted": str(found.deleted)} if found.deleted else {}
    return fields | ({"prev_kvs": [key_value(one) for one in found.previous]} if found.previous else {})

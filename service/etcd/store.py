"""The KV part of the gateway: range, put, deleterange, txn, compaction; what is asked and what is answered, as JSON.

A function a path: from the request's `Message` to the answer's fields. Limits are etcd's own: bytes of a request,
operations of a transaction. Used by `app`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from logyard.client import kv_requests
from logyard.client.kv_wire import (
    COMPACT,
    Compare,
    Delete,
    DeleteResult,
    Get,
    GetResult,
    Operation,
    Put,
    PutResult,
    Result,
    Txn,
    TxnResult,
)

from .words import INVALID, TOO_LARGE, GatewayError, Message, key_value, malformed

if TYPE_CHECKING:
    from .app import Gateway

ORDERS = ("NONE", "ASCEND", "DESCEND")
TARGETS = ("KEY", "VERSION", "CREATE", "MOD", "VALUE")
SORTS = ("key", "version", "create", "mod", "value")
RELATIONS = {"EQUAL": "=", "GREATER": ">", "LESS": "<", "NOT_EQUAL": "!="}
COMPARED = ("VERSION", "CREATE", "MOD", "VALUE", "LEASE")
OPERANDS = ("version", "create_revision", "mod_revision", "value", "lease")
ANSWER_BYTES_MAX = 512 << 20
"""Keys and values of one answer, which is built in memory; base64 and JSON make more of it."""
DEPTH_MAX = 8
"""Of transactions in transactions; the KV machine's own limit."""


async def range_(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Keys of a range, now or as of a revision; `serializable`: as this node has them."""
    get = get_of(asked)
    consistency = "local" if asked.flag("serializable") else "linearizable"
    node = gateway.node if consistency == "local" else None
    # Large values are not in the state: what is ordered by value is ordered here.
    by_value = get.sort == "value" and bool(get.end)
    wanted = get._replace(sort="key", descending=False, limit=0, keys_only=False) if by_value else get
    steps = kv_requests.read(wanted, ANSWER_BYTES_MAX)
    found = await gateway.kv.run(steps, consistency=consistency, node=node)
    if by_value:
        kvs = sorted(found.kvs, key=lambda one: (one.value, one.key), reverse=get.descending)
        if get.keys_only:
            kvs = [one._replace(value=b"") for one in kvs]
        limit = get.limit or len(kvs)
        found = found._replace(kvs=tuple(kvs[:limit]), more=len(kvs) > limit)
    return {"header": gateway.header.at(found.revision), **_range_fields(found)}


async def put(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Set a key."""
    operation = put_of(asked, gateway.limits.request_bytes)
    found = await gateway.kv.run(kv_requests.write(operation))
    assert isinstance(found, PutResult)
    return {"header": gateway.header.at(found.revision), **_fields(found)}


async def deleterange(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Delete a range of keys."""
    found = await gateway.kv.run(kv_requests.write(delete_of(asked)))
    assert isinstance(found, DeleteResult)
    return {"header": gateway.header.at(found.revision), **_fields(found)}


async def txn(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Compare, then do the one or the other."""
    limits = gateway.limits
    found = await gateway.kv.run(kv_requests.write(txn_of(asked, limits.txn_operations, limits.request_bytes, 0)))
    assert isinstance(found, TxnResult)
    return {"header": gateway.header.at(found.revision), **_fields(found)}


async def compaction(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Forget history."""
    found = await gateway.kv.run(kv_requests.numbers(COMPACT, positive(asked, "revision")))
    return {"header": gateway.header.at(found[0])}


def positive(asked: Message, name: str) -> int:
    """A number that is not negative."""
    found = asked.number(name)
    if found < 0:
        raise malformed(f"etcdserver: {name} is negative")
    return found


def get_of(asked: Message) -> Get:
    """A read."""
    names = ("min_mod_revision", "max_mod_revision", "min_create_revision", "max_create_revision")
    bounds = [positive(asked, name) for name in names]
    return Get(
        asked.key(), asked.data("range_end"), max(0, asked.number("revision")), max(0, asked.number("limit")),
        SORTS[asked.choice("sort_target", TARGETS)], asked.choice("sort_order", ORDERS) == 2,
        asked.flag("keys_only"), asked.flag("count_only"), (bounds[0], bounds[1], bounds[2], bounds[3]),
    )  # fmt: skip


def put_of(asked: Message, bytes_max: int) -> Put:
    """A write."""
    key, value, lease = asked.key(), asked.data("value"), asked.number("lease")
    keep_value, keep_lease = asked.flag("ignore_value"), asked.flag("ignore_lease")
    if len(key) + len(value) > bytes_max:
        raise GatewayError(INVALID, TOO_LARGE)
    if keep_value and value:
        raise malformed("etcdserver: value is provided")
    if keep_lease and lease:
        raise malformed("etcdserver: lease is provided")
    return Put(key, None if keep_value else value, lease_of(lease), asked.flag("prev_kv"), keep_lease)


def lease_of(number: int) -> int:
    """A lease's number as the KV machine has it: those below zero do not exist."""
    if number < 0:
        raise GatewayError(5, "etcdserver: requested lease not found")
    return number


def delete_of(asked: Message) -> Delete:
    """A deletion."""
    return Delete(asked.key(), asked.data("range_end"), asked.flag("prev_kv"))


def txn_of(asked: Message, operations_max: int, bytes_max: int, depth: int) -> Txn:
    """A transaction, with those in it."""
    lists = [asked.messages(name) for name in ("compare", "success", "failure")]
    if any(len(one) > operations_max for one in lists):
        raise GatewayError(INVALID, "etcdserver: too many operations in txn request")
    if depth >= DEPTH_MAX:
        raise malformed(f"etcdserver: transactions are at most {DEPTH_MAX} deep")
    then, otherwise = (
        [_operation(one, operations_max, bytes_max, depth + 1) for one in operations] for operations in lists[1:]
    )
    return Txn([_compare(one) for one in lists[0]], then, otherwise)


def _operation(asked: Message, operations_max: int, bytes_max: int, depth: int) -> Operation:
    for name in ("request_range", "request_put", "request_delete_range", "request_txn"):
        found = asked.message(name)
        if found is None:
            continue
        if name == "request_range":
            return get_of(found)
        if name == "request_put":
            return put_of(found, bytes_max)
        if name == "request_delete_range":
            return delete_of(found)
        return txn_of(found, operations_max, bytes_max, depth)
    raise GatewayError(INVALID, "etcdserver: key not found")


def _compare(asked: Message) -> Compare:
    target = asked.choice("target", COMPARED)
    relation = list(RELATIONS)[asked.choice("result", list(RELATIONS))]
    name = OPERANDS[target]
    operand: int | bytes = asked.data("value") if name == "value" else positive(asked, name)
    return Compare(asked.key(), COMPARED[target].lower(), RELATIONS[relation], operand, asked.data("range_end"))


def _range_fields(found: GetResult) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if found.kvs:
        fields["kvs"] = [key_value(one) for one in found.kvs]
    if found.more:
        fields["more"] = True
    return fields | ({"count": str(found.count)} if found.count else {})


def _fields(found: Result) -> dict[str, Any]:
    """What an operation's answer has behind its header."""
    if isinstance(found, GetResult):
        return _range_fields(found)
    if isinstance(found, PutResult):
        return {} if found.previous is None else {"prev_kv": key_value(found.previous)}
    if isinstance(found, DeleteResult):
        fields: dict[str, Any] = {"deleted": str(found.deleted)} if found.deleted else {}
        return fields | ({"prev_kvs": [key_value(one) for one in found.previous]} if found.previous else {})
    fields = {"succeeded": True} if found.succeeded else {}
    return fields | ({"responses": _responses(found.results)} if found.results else {})


def _responses(results: Sequence[Result]) -> list[dict[str, Any]]:
    names = {GetResult: "response_range", PutResult: "response_put", DeleteResult: "response_delete_range"}
    return [
        {names.get(type(one), "response_txn"): {"header": {"revision": str(one.revision)}, **_fields(one)}}
        for one in results
    ]

"""The lease part of the gateway: grant, revoke, timetolive, leases, and keepalive, whose answer is a stream.

Times are whole seconds, as etcd has them; a lease whose time is over is an answer (TTL -1, or none), not an error.
Used by `app`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logyard.client import kv_requests
from logyard.client.errors import LogyardError
from logyard.client.kv_wire import GRANT, KEEP, LEASES, REVOKE, STATUS, TIME_TO_LIVE

from .store import lease_of
from .words import RANGE, GatewayError, Message, text

if TYPE_CHECKING:
    from .app import Gateway

TTL_MAX_S = 9_000_000_000
TTL_MIN_S = 1
"""A shorter one is made this long, as etcd does with its own least time."""
NOT_FOUND = "lease_not_found"


async def grant(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """A new lease; ID 0: with a number of its own."""
    ttl = asked.number("TTL")
    if ttl > TTL_MAX_S:
        raise GatewayError(RANGE, "etcdserver: too large lease TTL")
    order = (GRANT, max(ttl, TTL_MIN_S) * 1000, lease_of(asked.number("ID")))
    revision, lease, granted = await gateway.kv.run(kv_requests.numbers(*order))
    return {"header": gateway.header.at(revision), "ID": str(lease), "TTL": str(granted // 1000)}


async def revoke(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """End a lease; its keys go."""
    found = await gateway.kv.run(kv_requests.numbers(REVOKE, lease_of(asked.number("ID"))))
    return {"header": gateway.header.at(found[0])}


async def keepalive(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """One message of the stream: begin a lease's time anew. One that is not there has no TTL."""
    lease = asked.number("ID")
    fields = {"ID": str(lease)} if lease else {}
    try:
        revision, granted = await gateway.kv.run(kv_requests.numbers(KEEP, max(0, lease)))
    except LogyardError as error:
        if error.code != NOT_FOUND:
            raise
        return {"header": gateway.header.at(await revision_of(gateway)), **fields}
    return {"header": gateway.header.at(revision), **fields, "TTL": str(granted // 1000)}


async def timetolive(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """What is left of a lease, in seconds, rounded down; -1 when it is over."""
    lease, keys = asked.number("ID"), asked.flag("keys")
    fields: dict[str, Any] = {"ID": str(lease)} if lease else {}
    try:
        found = await gateway.kv.run(kv_requests.question(TIME_TO_LIVE, max(0, lease), int(keys)))
    except LogyardError as error:
        if error.code != NOT_FOUND:
            raise
        return {"header": gateway.header.at(await revision_of(gateway)), **fields, "TTL": "-1"}
    revision, granted, left, attached = found
    if left >= 1000:
        fields["TTL"] = str(left // 1000)
    fields["grantedTTL"] = str(granted // 1000)
    if attached:
        fields["keys"] = [text(key) for key in attached]
    return {"header": gateway.header.at(revision), **fields}


async def leases(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """The numbers of all leases."""
    revision, numbers = await gateway.kv.run(kv_requests.question(LEASES))
    found: dict[str, Any] = {"header": gateway.header.at(revision)}
    return found | ({"leases": [{"ID": str(one)} for one in numbers]} if numbers else {})


async def revision_of(gateway: Gateway) -> int:
    """The revision there is now, linearizable."""
    return int((await gateway.kv.run(kv_requests.question(STATUS)))[0])

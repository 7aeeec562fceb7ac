"""The lease part of the gateway: grant, revoke, timetolive, leases, and keepalive, whose answer is a stream.

Times are whole seconds, as etcd has them; a lease whose time is over is an answer (TTL -1, or none), not an error.
Used by `app`.
"""

from __future__ import annotations

import secrets
from typing import Any

from logyard.client import kv_requests
from logyard.protocol.errors import LogyardError
from logyard.protocol.kv import GRANT, KEEP, LEASES, REVOKE, STATUS, TIME_TO_LIVE

from .gateway import Gateway
from .store import lease_of
from .words import INT64_MAX, RANGE, GatewayError, Message, Schema, flag, malformed, number, text

TTL_MAX_S = 9_000_000_000
NOT_FOUND = "lease_not_found"
EXISTS = "lease_exists"
NUMBER_BITS = 62
"""Of a lease that the gateway numbers: by chance, so that it is none of the small ones that clients choose."""

GRANT_REQUEST = Schema(TTL=number, ID=number)
LEASE = Schema(ID=number)
TIME_TO_LIVE_REQUEST = Schema(ID=number, keys=flag)
LEASES_REQUEST = Schema()


async def grant(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Grant a lease; ID 0: with a number of its own. A short one lasts for etcd's least time."""
    ttl = asked.number("TTL")
    if ttl > TTL_MAX_S:
        raise GatewayError(RANGE, "etcdserver: too large lease TTL")
    wanted = asked.number("ID")
    if lease_of(wanted) == INT64_MAX:
        raise malformed("logyard: a lease has a number from 1 to 2^63 - 2")
    revision, lease, granted = await granted_of(gateway, ttl, wanted)
    return {"header": gateway.header.at(revision), "ID": str(lease), "TTL": str(granted // 1000)}


async def granted_of(gateway: Gateway, ttl: int, lease: int = 0) -> tuple[int, int, int]:
    """Grant a lease and return its (revision, number, milliseconds). Raises a `LogyardError`."""
    while True:
        wanted = lease or secrets.randbits(NUMBER_BITS) | 1 << NUMBER_BITS - 1
        order = (GRANT, max(ttl, gateway.limits.lease_s_min) * 1000, wanted)
        try:
            revision, found, granted = await gateway.run(kv_requests.numbers(*order))
            return revision, found, granted
        except LogyardError as error:
            if error.code != EXISTS or lease:
                raise


async def revoke(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """End a lease; its keys go."""
    found = await gateway.run(kv_requests.numbers(REVOKE, lease_of(asked.number("ID"))))
    return {"header": gateway.header.at(found[0])}


async def keepalive(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Begin a lease's time anew: one message of the stream. One that is not there has no TTL."""
    lease = asked.number("ID")
    fields = {"ID": str(lease)} if lease else {}
    try:
        revision, granted = await gateway.run(kv_requests.numbers(KEEP, lease_of(lease)))
    except LogyardError as error:
        if error.code != NOT_FOUND:
            raise
        return {"header": gateway.header.at(await revision_of(gateway)), **fields}
    return {"header": gateway.header.at(revision), **fields, "TTL": str(granted // 1000)}


async def timetolive(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Return what is left of a lease, in seconds, rounded down; -1 when it is over."""
    lease, keys = asked.number("ID"), asked.flag("keys")
    fields: dict[str, Any] = {"ID": str(lease)} if lease else {}
    try:
        found = await gateway.run(kv_requests.question(TIME_TO_LIVE, lease_of(lease), int(keys)))
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
    """Return the numbers of all leases."""
    revision, numbers = await gateway.run(kv_requests.question(LEASES))
    found: dict[str, Any] = {"header": gateway.header.at(revision)}
    return found | ({"leases": [{"ID": str(one)} for one in numbers]} if numbers else {})


async def revision_of(gateway: Gateway, consistency: str = "linearizable", node: int | None = None) -> int:
    """Return the revision there is now."""
    return int((await gateway.run(kv_requests.question(STATUS), consistency=consistency, node=node))[0])

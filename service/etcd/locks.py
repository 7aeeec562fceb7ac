"""Locks and elections as etcd has them: keys under a name, each with its lease; the one that was created first holds.

What etcd's `concurrency` package does on its clients' side is done here, with the same keys, so that both kinds of
clients see one another. A call that waits ends with its connection, and takes its key back. Used by `app`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from logyard.client import kv_requests
from logyard.protocol.errors import LogyardError
from logyard.protocol.kv import Compacted, Compare, Delete, Get, GetResult, KeyValue, Put, Txn, TxnResult, prefix_end

from .gateway import Gateway
from .leases import granted_of
from .store import lease_of
from .words import NO_KEY, UNKNOWN, GatewayError, Message, Schema, data, key_value, number, one, text

SESSION_S = 60
"""Of a lease that nobody named."""
NO_LEADER_KEY = '"leader" field must be provided'
NOT_LEADER = "election: not leader"
NO_LEADER = "election: no leader"
EXPIRED = "mutex: session is expired"

LOCK = Schema(name=data, lease=number)
UNLOCK = Schema(key=data)
LEADER_KEY = Schema(name=data, key=data, rev=number, lease=number)
CAMPAIGN = Schema(name=data, lease=number, value=data)
PROCLAIM = Schema(leader=one(LEADER_KEY), value=data)
LEADER = Schema(name=data)
RESIGN = Schema(leader=one(LEADER_KEY))


async def lock(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Wait until the lock is this lease's; return the key whose deletion gives it back."""
    key, mine, revision = await _entered(gateway, asked, None)
    async with _given_back(gateway, key, mine.create_revision):
        there = await gateway.run(kv_requests.read(Get(key)))
    if not there.kvs:
        raise GatewayError(UNKNOWN, EXPIRED)
    return {"header": gateway.header.at(revision or there.revision), "key": text(key)}


async def unlock(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Give a lock back."""
    if not asked.data("key"):
        raise GatewayError(UNKNOWN, NO_KEY)
    found = await gateway.run(kv_requests.write(Delete(asked.data("key"))))
    return {"header": gateway.header.at(found.revision)}


async def campaign(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Wait until elected; then `value` is what the leader says."""
    key, mine, _ = await _entered(gateway, asked, asked.data("value"))
    leader = {
        "name": text(asked.data("name")), "key": text(key), "rev": str(mine.create_revision), "lease": str(mine.lease)
    }  # fmt: skip
    kept = {name: one for name, one in leader.items() if one}
    return {"header": gateway.header.at(mine.mod_revision), "leader": kept}


async def proclaim(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Say something else as the leader."""
    held = _leader_key(asked)
    found = await _if_held(gateway, held, Put(held.data("key"), asked.data("value"), lease_of(held.number("lease"))))
    if not found.succeeded:
        raise GatewayError(UNKNOWN, NOT_LEADER)
    return {"header": gateway.header.at(found.revision)}


async def resign(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Lead no more."""
    held = _leader_key(asked)
    found = await _if_held(gateway, held, Delete(held.data("key")))
    return {"header": gateway.header.at(found.revision)}


async def leader(gateway: Gateway, asked: Message) -> dict[str, Any]:
    """Return who leads, and what it says."""
    found = await gateway.run(kv_requests.read(_first(asked.data("name") + b"/")))
    if not found.kvs:
        raise GatewayError(UNKNOWN, NO_LEADER)
    return {"header": gateway.header.at(found.revision), "kv": key_value(found.kvs[0])}


async def while_connected(
    receive: Callable[[], Awaitable[Any]], call: Callable[[], Awaitable[dict[str, Any]]]
) -> dict[str, Any] | None:
    """Return the answer of a call that may wait for long; None: its client has gone, and the call was cancelled."""
    answer: dict[str, Any] | None = None

    async def watch(scope: trio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, nursery.cancel_scope)
        try:
            answer = await call()
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return answer


def _leader_key(asked: Message) -> Message:
    held = asked.message("leader")
    if held is None:
        raise GatewayError(UNKNOWN, NO_LEADER_KEY)
    if not held.data("key"):
        raise GatewayError(UNKNOWN, NO_KEY)
    return held


async def _if_held(gateway: Gateway, held: Message, operation: Put | Delete) -> TxnResult:
    """Do it if the leader's key is the one it was."""
    return await _txn(gateway, Compare(held.data("key"), "create", "=", max(0, held.number("rev"))), operation)


def _said(error: LogyardError) -> GatewayError:
    """Return what etcd's own server of locks answers with: it is a client, and all that it hears is unknown to it."""
    if error.code == "lease_not_found":
        return GatewayError(UNKNOWN, "etcdserver: requested lease not found")
    raise error


def _first(prefix: bytes, descending: bool = False) -> Get:
    # The machine sorts by create revision, and these ranges are short.
    return Get(prefix, prefix_end(prefix), 0, 1, "create", descending)


async def _entered(gateway: Gateway, asked: Message, value: bytes | None) -> tuple[bytes, KeyValue, int]:
    """Enter a key under the name and wait until it is the first one; return it, what it is, and the revision of that, 0
    if it had to wait."""
    lease = asked.number("lease")
    if not lease:
        _, lease, _ = await granted_of(gateway, SESSION_S)
    prefix = asked.data("name") + b"/"
    key = prefix + b"%x" % lease
    put = Put(key, value or b"", lease_of(lease))
    found = await _txn(gateway, Compare(key, "create", "=", 0), put, Get(key))
    mine = KeyValue(key, value or b"", found.revision, found.revision, 1, lease)
    if not found.succeeded:
        there = found.results[0]
        assert isinstance(there, GetResult)
        mine = there.kvs[0]._replace(mod_revision=found.revision)
    if value is not None and value != mine.value:
        # As etcd's answer, at the revision before it.
        await _txn(gateway, Compare(key, "create", "=", mine.create_revision), put)
        mine = mine._replace(value=value)
    async with _given_back(gateway, key, mine.create_revision):
        waited = await _first_of(gateway, prefix, mine.create_revision)
    return key, mine, 0 if waited else found.revision


@asynccontextmanager
async def _given_back(gateway: Gateway, key: bytes, revision: int) -> AsyncIterator[None]:
    """Take the key back that was created at a revision, if the block ends by an error: nobody will be told of it."""
    try:
        yield
    except BaseException:
        with trio.CancelScope(shield=True), trio.move_on_after(SESSION_S):
            await _txn(gateway, Compare(key, "create", "=", revision), Delete(key))
        raise


async def _txn(gateway: Gateway, compare: Compare, then: Put | Delete, *otherwise: Get) -> TxnResult:
    try:
        found = await gateway.run(kv_requests.write(Txn([compare], [then], otherwise)))
    except LogyardError as error:
        raise _said(error) from None
    assert isinstance(found, TxnResult)
    return found


async def _first_of(gateway: Gateway, prefix: bytes, revision: int) -> bool:
    """Wait until no key under the prefix was created before `revision`; return whether there was one."""
    waited = False
    while True:
        get = Get(prefix, prefix_end(prefix), 0, 1, "create", True, bounds=(0, 0, 0, revision - 1))
        found = await gateway.run(kv_requests.read(get))
        if not found.kvs:
            return waited
        waited = True
        last = found.kvs[0].key
        async with gateway.kv.watch(last, b"", start=found.revision + 1, puts=False) as changes:
            try:
                await anext(changes)
            except Compacted:
                # Nobody knows when it went: look again.
                continue

"""The paths of the gateway as a starlette application: one request a call, streams for watch and keepalive.

A body is read up to a limit, all bodies together up to another, and within a time; what fails is answered as etcd's own
gateway does (`words`). A leader change is the client's business below: a call waits for the next leader, and a
write is applied once. Made by `serving`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from logyard.protocol.errors import LogyardError

from . import cluster, leases, locks, store, streams, watching
from .cluster import CLUSTER_VERSION, SERVER_VERSION
from .gateway import Gateway, Take
from .guard import Guard
from .leases import revision_of
from .words import (
    EXHAUSTED,
    INVALID,
    NOT_FOUND,
    UNIMPLEMENTED,
    UNKNOWN,
    GatewayError,
    Message,
    Schema,
    decoded,
    packed,
    too_long,
    translated,
)

PREFIXES = ("/v3", "/v3beta", "/v3alpha")
JSON = "application/json"
BODY_S = 30.0
"""A request whose body takes longer is given up."""
HEALTH_S = 5.0

log = logging.getLogger("logyard.etcd")


class Call(NamedTuple):
    """A path: what is asked, and who answers."""

    schema: Schema
    answer: Callable[[Gateway, Message], Awaitable[dict[str, Any]]]


CALLS: Mapping[str, Call] = {
    "/kv/range": Call(store.RANGE, store.range_),
    "/kv/put": Call(store.PUT, store.put),
    "/kv/deleterange": Call(store.DELETE, store.deleterange),
    "/kv/txn": Call(store.TXN, store.txn),
    "/kv/compaction": Call(store.COMPACTION, store.compaction),
    "/lease/grant": Call(leases.GRANT_REQUEST, leases.grant),
    "/lease/revoke": Call(leases.LEASE, leases.revoke),
    "/kv/lease/revoke": Call(leases.LEASE, leases.revoke),
    "/lease/timetolive": Call(leases.TIME_TO_LIVE_REQUEST, leases.timetolive),
    "/kv/lease/timetolive": Call(leases.TIME_TO_LIVE_REQUEST, leases.timetolive),
    "/lease/leases": Call(leases.LEASES_REQUEST, leases.leases),
    "/kv/lease/leases": Call(leases.LEASES_REQUEST, leases.leases),
    "/lock/unlock": Call(locks.UNLOCK, locks.unlock),
    "/election/proclaim": Call(locks.PROCLAIM, locks.proclaim),
    "/election/leader": Call(locks.LEADER, locks.leader),
    "/election/resign": Call(locks.RESIGN, locks.resign),
    "/cluster/member/list": Call(cluster.MEMBER_LIST, cluster.member_list),
    "/maintenance/status": Call(cluster.NOTHING, cluster.status),
    "/maintenance/alarm": Call(cluster.ALARM, cluster.alarm),
    "/maintenance/defragment": Call(cluster.NOTHING, cluster.defragment),
    "/auth/status": Call(cluster.NOTHING, cluster.auth_status),
    "/auth/authenticate": Call(cluster.AUTHENTICATE, cluster.not_enabled),
}
STREAMS: Mapping[str, tuple[Schema, streams.Streaming]] = {
    "/watch": (watching.REQUEST, streams.watch),
    "/lease/keepalive": (leases.LEASE, streams.keepalive),
}
WAITING: Mapping[str, Call] = {
    "/lock/lock": Call(locks.LOCK, locks.lock),
    "/election/campaign": Call(locks.CAMPAIGN, locks.campaign),
}
"""Calls that wait for others, and end with their client."""
ABSENT = (
    "/election/observe",
    "/maintenance/hash", "/maintenance/snapshot", "/maintenance/transfer-leadership", "/maintenance/downgrade",
    "/cluster/member/add", "/cluster/member/remove", "/cluster/member/update", "/cluster/member/promote",
    "/auth/enable", "/auth/disable",
    *(f"/auth/user/{verb}" for verb in ("add", "get", "list", "delete", "changepw", "grant", "revoke")),
    *(f"/auth/role/{verb}" for verb in ("add", "get", "list", "delete", "grant", "revoke")),
)  # fmt: skip
"""Paths of etcd that are answered with "unimplemented"."""


async def body_of(gateway: Gateway, request: Request, take: Take) -> bytes:
    """Return a request's body. Raises `GatewayError` for one that takes too long, and for one that is too long: when it
    was read to its end, unless it says that it goes on for much longer."""
    limit = gateway.limits.body_bytes
    size = length_of(request)
    refusal = too_long(size, limit) if size > limit else None
    parts: list[bytes] = []
    size = 0
    try:
        with trio.fail_after(BODY_S):
            if refusal is None:
                async for part in request.stream():
                    size += len(part)
                    take(len(part))
                    if size > limit:
                        raise too_long(size, limit)
                    parts.append(part)
                return b"".join(parts)
    except trio.TooSlowError:
        raise GatewayError(INVALID, "the request's body did not come", 408) from None
    except GatewayError as error:
        refusal = error
    if length_of(request) <= streams.DRAINED_BYTES:
        await streams.drain(request.receive)
    raise refusal


def length_of(request: Request) -> int:
    """Return what a request says of the length of its body."""
    said = request.headers.get("content-length", "0")
    return int(said) if said.isdecimal() and len(said) < 20 else 0


def failure(error: Exception) -> GatewayError:
    """Return any error as the gateway says it; one that is a bug of ours is logged."""
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, LogyardError):
        return translated(error)
    log.exception("a call failed by a bug of ours", exc_info=error)
    return GatewayError(UNKNOWN, "logyard: internal error")


def refused(error: GatewayError) -> Response:
    """Return the answer to a call that failed. A body that was not read is no next request."""
    close = {"connection": "close"} if error.code == EXHAUSTED or error.status == 408 else {}
    return Response(error.body, error.status, close, media_type=JSON)


async def answer(gateway: Gateway, call: Call, request: Request) -> Response:
    """Answer one unary call."""
    try:
        with gateway.under_way() as take:
            asked = decoded(await body_of(gateway, request, take), call.schema)
            return Response(packed(await call.answer(gateway, asked)), media_type=JSON)
    except ClientDisconnect:
        # Nobody reads it.
        return Response(status_code=400)
    except Exception as error:
        return refused(failure(error))


async def answer_later(gateway: Gateway, call: Call, request: Request) -> Response:
    """Answer one unary call that may wait for as long as its client does."""
    try:
        with gateway.under_way() as take:
            asked = decoded(await body_of(gateway, request, take), call.schema)
            found = await locks.while_connected(request.receive, partial(call.answer, gateway, asked))
            return Response(status_code=400) if found is None else Response(packed(found), media_type=JSON)
    except ClientDisconnect:
        return Response(status_code=400)
    except Exception as error:
        return refused(failure(error))


async def _unimplemented(gateway: Gateway, asked: Message) -> dict[str, Any]:
    raise GatewayError(UNIMPLEMENTED, "logyard: not implemented")


async def _version(request: Request) -> Response:
    return Response(packed({"etcdserver": SERVER_VERSION, "etcdcluster": CLUSTER_VERSION}), media_type=JSON)


async def _health(gateway: Gateway, request: Request) -> Response:
    """Answer healthy where a linearizable read is answered in time."""
    reason = "RAFT NO LEADER"
    with trio.move_on_after(HEALTH_S):
        try:
            await revision_of(gateway)
            reason = ""
        except LogyardError as error:
            reason = error.message
    found = {"health": "false" if reason else "true", "reason": reason}
    return Response(packed(found), 503 if reason else 200, media_type=JSON)


async def _other(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: NOT_FOUND, 405: UNIMPLEMENTED}.get(error.status_code, INVALID)
    return refused(GatewayError(code, error.detail, error.status_code))


def make_app(gateway: Gateway) -> Guard:
    """Return the application."""
    routes: list[BaseRoute] = [Route("/version", _version), Route("/health", partial(_health, gateway))]
    for prefix in PREFIXES:
        for path, call in {**CALLS, **dict.fromkeys(ABSENT, Call(cluster.NOTHING, _unimplemented))}.items():
            routes.append(Route(prefix + path, partial(answer, gateway, call), methods=["POST"]))
        for path, call in WAITING.items():
            routes.append(Route(prefix + path, partial(answer_later, gateway, call), methods=["POST"]))
        for path, (schema, handler) in STREAMS.items():
            routes.append(Route(prefix + path, streams.Stream(gateway, handler, schema, failure), methods=["POST"]))
    app = Starlette(routes=routes, exception_handlers={404: _other, 405: _other})
    app.router.redirect_slashes = False
    return Guard(app, gateway.origins, gateway.hosts)

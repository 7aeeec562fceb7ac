"""The paths of the gateway as a starlette application: one request a call, streams for watch and keepalive.

A body is read up to a limit, all bodies together up to another, and within a time; what fails is answered as etcd's own
gateway does (`words`). A leader change is the client's business below: a call waits for the next leader, and a
write is applied once. Made by `serving`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from logyard.client.kv import KV
from logyard.client.kv_requests import Steps, T
from logyard.client.kv_wire import Changes
from logyard.protocol.errors import LogyardError

from . import cluster, leases, locks, store, streams, watching
from .cluster import CLUSTER_VERSION, SERVER_VERSION, Member
from .guard import Guard
from .leases import revision_of
from .words import (
    EXHAUSTED,
    INVALID,
    NOT_FOUND,
    OVERHEAD_BYTES,
    TOO_MANY,
    UNIMPLEMENTED,
    UNKNOWN,
    GatewayError,
    Header,
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
BODIES_BYTES_MAX = 128 << 20
"""Of all requests that are under way, and of what streams hold of messages that are not complete."""
CALLS_MAX = 4096
"""Requests under way, streams among them."""
HEALTH_S = 5.0
TERM_S = 2.0
"""So old the term in a header may be."""

log = logging.getLogger("logyard.etcd")

Take = Callable[[int], None]


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


class Limits(NamedTuple):
    """`request_bytes`: keys and values of a request; `progress_s`: between two notifications of a quiet watch;
    `lease_s_min`: a shorter lease lasts so long."""

    request_bytes: int = 1_572_864
    txn_operations: int = 128
    progress_s: float = 600.0
    lease_s_min: int = 2

    @property
    def body_bytes(self) -> int:
        """Of a request as JSON: base64 is a third longer."""
        return (self.request_bytes + OVERHEAD_BYTES) * 4 // 3


class Gateway:
    """What all calls share. `by_token`: the token alone says which cluster it is, not also the group. `node`: the node
    beside it, 0 if there is none; `named`: members that the command line names, by node; `members`: the group where
    gateways announce themselves. `stopping`: streams end; `ended`: all have.
    `origins`, `hosts`: see `Guard`."""

    __slots__ = (
        "kv", "members", "header", "limits", "node", "token", "by_token", "name", "named", "origins", "hosts",
        "stopping", "ended", "watches", "encoded", "_bytes", "_calls",
    )  # fmt: skip

    def __init__(
        self,
        kv: KV,
        members: KV,
        *,
        name: str = "default",
        token: str = "etcd-cluster",
        by_token: bool = False,
        node: int = 0,
        named: tuple[Member, ...] = (),
        limits: Limits | None = None,
        origins: Sequence[str] = (),
        hosts: Sequence[str] = (),
    ) -> None:
        self.kv = kv
        self.members = members
        self.limits = limits or Limits()
        self.node = node or None
        self.name = name
        self.token = token
        self.by_token = by_token
        self.named = named
        self.origins = origins
        self.hosts = hosts
        self.header = Header(cluster.number_of(token), cluster.number_of(token, name), 0)
        self.stopping = trio.Event()
        self.ended = trio.Event()
        self.watches = 0
        # The events of the newest change, as JSON: all watches of one key share them.
        self.encoded: tuple[Changes | None, bool, bytes] = (None, False, b"")
        self._bytes = 0
        self._calls = 0

    async def run(self, steps: Steps[T], *, consistency: str = "linearizable", node: int | None = None) -> T:
        """What `kv_requests` wants to ask of the group. The header knows the term of the answer then: clients compare
        those of several gateways (a question's answer has it; of a command's it is known while the leader stays)."""
        found = await self.kv.run(steps, consistency=consistency, node=node)
        if not self.kv.same_leader:
            await self.kv.status()
        self._learn(self.kv.term)
        return found

    def _learn(self, term: int) -> None:
        if term > self.header.term:
            self.header = self.header._replace(term=term)

    async def describe(self) -> dict[str, Any]:
        """The group below, as its leader sees it; also gives the header its term."""
        found = await self.kv.yard.describe(self.kv.name)
        if not self.by_token:
            # Whoever names no token has a cluster of its own nevertheless.
            self.header = self.header._replace(cluster=cluster.number_of(self.token, str(found.get("uid", ""))))
        self._learn(int(found.get("term", 0)))
        return found

    def id_of(self, node: int) -> int:
        """The number of the member whose node that is."""
        if 0 < node <= len(self.named):
            return cluster.number_of(self.token, self.named[node - 1].name)
        return self.header.member if node == (self.node or node) else cluster.number_of(self.token, str(node))

    @contextmanager
    def under_way(self) -> Iterator[Take]:
        """Count a call; what makes room for bytes of its body (negative: gives it back) until it is over. Raises
        `GatewayError`, as that does, when there is too much."""
        if self._calls >= CALLS_MAX:
            raise GatewayError(EXHAUSTED, TOO_MANY)
        held = 0

        def take(size: int) -> None:
            nonlocal held
            if size > 0 and self._bytes + size > BODIES_BYTES_MAX:
                raise GatewayError(EXHAUSTED, TOO_MANY)
            self._bytes += size
            held += size

        self._calls += 1
        try:
            yield take
        finally:
            self._calls -= 1
            self._bytes -= held


async def body_of(gateway: Gateway, request: Request, take: Take) -> bytes:
    """A request's body. Raises `GatewayError` for one that takes too long, and for one that is too long: when it
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
    """What a request says of the length of its body."""
    said = request.headers.get("content-length", "0")
    return int(said) if said.isdigit() and len(said) < 20 else 0


def failure(error: Exception) -> GatewayError:
    """Any error as the gateway says it; one that is a bug of ours is logged."""
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, LogyardError):
        return translated(error)
    log.exception("a call failed by a bug of ours", exc_info=error)
    return GatewayError(UNKNOWN, "logyard: internal error")


def refused(error: GatewayError) -> Response:
    """The answer to a call that failed. A body that was not read is no next request."""
    close = {"connection": "close"} if error.code == EXHAUSTED or error.status == 408 else {}
    return Response(error.body, error.status, close, media_type=JSON)


async def answer(gateway: Gateway, call: Call, request: Request) -> Response:
    """One unary call."""
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
    """One unary call that may wait for as long as its client does."""
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
    """Healthy is who can answer a linearizable read in time."""
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
    """The application."""
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

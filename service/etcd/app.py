"""The paths of the gateway as a starlette application: one request a call, streams for watch and keepalive.

A body is read up to a limit, all bodies together up to another, and within a time; what fails is answered as etcd's own
gateway does (`words`). A leader change is the client's business below: a call waits for the next leader, and a
write is applied once. Made by `serving`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from logyard.client.errors import LogyardError
from logyard.client.kv import KV
from logyard.client.kv_wire import Changes

from . import cluster, leases, store, streams
from .cluster import CLUSTER_VERSION, SERVER_VERSION, Member
from .leases import revision_of
from .words import (
    EXHAUSTED,
    INVALID,
    NOT_FOUND,
    TOO_LARGE,
    TOO_MANY,
    UNIMPLEMENTED,
    UNKNOWN,
    GatewayError,
    Header,
    Message,
    decoded,
    packed,
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
OVERHEAD_BYTES = 512 << 10
"""What a request may have beside keys and values."""
HEALTH_S = 5.0
TERM_S = 2.0
"""So old the term in a header may be."""

log = logging.getLogger("logyard.etcd")

Take = Callable[[int], None]
Call = Callable[["Gateway", Message], Awaitable[dict[str, Any]]]

CALLS: Mapping[str, Call] = {
    "/kv/range": store.range_,
    "/kv/put": store.put,
    "/kv/deleterange": store.deleterange,
    "/kv/txn": store.txn,
    "/kv/compaction": store.compaction,
    "/lease/grant": leases.grant,
    "/lease/revoke": leases.revoke,
    "/kv/lease/revoke": leases.revoke,
    "/lease/timetolive": leases.timetolive,
    "/kv/lease/timetolive": leases.timetolive,
    "/lease/leases": leases.leases,
    "/kv/lease/leases": leases.leases,
    "/cluster/member/list": cluster.member_list,
    "/maintenance/status": cluster.status,
    "/maintenance/alarm": cluster.alarm,
    "/maintenance/defragment": cluster.defragment,
    "/auth/status": cluster.auth_status,
    "/auth/authenticate": cluster.not_enabled,
}
STREAMS: Mapping[str, streams.Streaming] = {"/watch": streams.watch, "/lease/keepalive": streams.keepalive}
ABSENT = (
    "/maintenance/hash", "/maintenance/snapshot", "/maintenance/transfer-leadership", "/maintenance/downgrade",
    "/cluster/member/add", "/cluster/member/remove", "/cluster/member/update", "/cluster/member/promote",
    "/auth/enable", "/auth/disable",
    *(f"/auth/user/{verb}" for verb in ("add", "get", "list", "delete", "changepw", "grant", "revoke")),
    *(f"/auth/role/{verb}" for verb in ("add", "get", "list", "delete", "grant", "revoke")),
)  # fmt: skip
"""Paths of etcd that are answered with "unimplemented"."""


class Limits(NamedTuple):
    """`request_bytes`: key and value of a put; `progress_s`: between two notifications of a quiet watch."""

    request_bytes: int = 1_572_864
    txn_operations: int = 128
    progress_s: float = 600.0

    @property
    def body_bytes(self) -> int:
        """Of a request as JSON: base64 is a third longer."""
        return (self.request_bytes + OVERHEAD_BYTES) * 4 // 3


class Gateway:
    """What all calls share. `node`: the node beside it, 0 if there is none; `named`: members that the command line
    names, by node; `members`: the group where gateways announce themselves. `stopping`: streams end; `ended`: all
    have."""

    __slots__ = (
        "kv", "members", "header", "limits", "node", "token", "name", "named", "stopping", "ended", "watches",
        "encoded", "_bytes", "_calls",
    )  # fmt: skip

    def __init__(
        self,
        kv: KV,
        members: KV,
        *,
        name: str = "default",
        token: str = "etcd-cluster",
        node: int = 0,
        named: tuple[Member, ...] = (),
        limits: Limits | None = None,
    ) -> None:
        self.kv = kv
        self.members = members
        self.limits = limits or Limits()
        self.node = node or None
        self.name = name
        self.token = token
        self.named = named
        self.header = Header(cluster.number_of(token), cluster.number_of(token, name), 0)
        self.stopping = trio.Event()
        self.ended = trio.Event()
        self.watches = 0
        # The events of the newest change, as JSON: all watches of one key share them.
        self.encoded: tuple[Changes | None, bool, bytes] = (None, False, b"")
        self._bytes = 0
        self._calls = 0

    async def describe(self) -> dict[str, Any]:
        """The group below, as its leader sees it; also gives the header its term."""
        found = await self.kv.yard.describe(self.kv.name)
        self.header = self.header._replace(term=int(found.get("term", 0)))
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
    """A request's body. Raises `GatewayError` for one that is too long, before it is there, or takes too long."""
    limit = gateway.limits.body_bytes
    said = request.headers.get("content-length", "0")
    if int(said if said.isdigit() else "0") > limit:
        raise GatewayError(INVALID, TOO_LARGE)
    parts: list[bytes] = []
    size = 0
    try:
        with trio.fail_after(BODY_S):
            async for part in request.stream():
                take(len(part))
                size += len(part)
                if size > limit:
                    raise GatewayError(INVALID, TOO_LARGE)
                parts.append(part)
    except trio.TooSlowError:
        raise GatewayError(INVALID, "the request's body did not come", 408) from None
    return b"".join(parts)


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
    close = {"connection": "close"} if error.message in (TOO_LARGE, TOO_MANY) or error.status == 408 else {}
    return Response(error.body, error.status, close, media_type=JSON)


async def answer(gateway: Gateway, call: Call, request: Request) -> Response:
    """One unary call."""
    try:
        with gateway.under_way() as take:
            asked = decoded(await body_of(gateway, request, take))
            return Response(packed(await call(gateway, asked)), media_type=JSON)
    except ClientDisconnect:
        raise
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


def make_app(gateway: Gateway) -> Starlette:
    """The application."""
    routes: list[BaseRoute] = [Route("/version", _version), Route("/health", partial(_health, gateway))]
    for prefix in PREFIXES:
        for path, call in {**CALLS, **dict.fromkeys(ABSENT, _unimplemented)}.items():
            routes.append(Route(prefix + path, partial(answer, gateway, call), methods=["POST"]))
        for path, handler in STREAMS.items():
            routes.append(Route(prefix + path, streams.Stream(gateway, handler, failure), methods=["POST"]))
    return Starlette(routes=routes, exception_handlers={404: _other, 405: _other})

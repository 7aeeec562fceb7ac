"""Serving the gateway: hypercorn on trio over a client of the cluster below. Used by `launcher`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio
from hypercorn.config import Config

from logyard.client.aio import Yard
from logyard.protocol.errors import BadRequest, GroupExists, LogyardError

from .app import make_app
from .cluster import MEMBERS, announce
from .connections import connections_max, serve_http
from .gateway import Gateway, Member

GRACE_S = 2.0
IDLE_S = 600.0
"""A connection without a request is kept so long: clients keep theirs, and lose calls when it is cut under them."""
RETRY_S = 0.5
TERM_S = 2.0
"""So old the term in a header may be."""

log = logging.getLogger("logyard.etcd")


def hypercorn_config(binds: Sequence[str]) -> Config:
    """Return the configuration of plain HTTP on (host:port)s."""
    config = Config()
    config.bind = list(binds)
    config.errorlog = logging.getLogger("logyard.etcd.http")
    config.errorlog.setLevel(logging.WARNING)
    config.accesslog = None
    config.include_server_header = False
    config.keep_alive_timeout = IDLE_S
    config.keep_alive_max_requests = 1 << 62
    config.graceful_timeout = GRACE_S
    config.backlog = 1024
    return config


async def create_group(yard: Yard, name: str, create: bool) -> None:
    """Make the KV groups when they are not there, or wait until somebody else has; tries until the cluster can. As a
    rule one gateway may `create`: what two make at once under one name is taken back, and tried again."""
    for one in (name, MEMBERS):
        while True:
            try:
                if create:
                    await _create(yard, one)
                await yard.kv(one).status()
                break
            except BadRequest:
                raise
            except LogyardError as error:
                log.info("the group %s is not there yet: %s", one, error)
                await trio.sleep(RETRY_S * (1 + yard.chance.random()))


async def _create(yard: Yard, name: str) -> None:
    try:
        await yard.create(name, machine="kv")
    except GroupExists as error:
        # By another definition: its members were changed since, say. Whether it is a KV group is seen next.
        log.debug("%s", error)


async def keep_term(gateway: Gateway, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Keep the term of the headers, looked at now and then: a task; `started` when it is known."""
    known = False
    while True:
        try:
            await gateway.describe()
            if not known:
                task_status.started()
            known = True
        except LogyardError as error:
            log.debug("the term is not known: %s", error)
        await trio.sleep(TERM_S)


async def keep_announced(gateway: Gateway, member: Member) -> None:
    """Tell the others what this one is reached by, once: a task."""
    while True:
        try:
            await announce(gateway.members, member)
            return
        except LogyardError as error:
            log.debug("not announced yet: %s", error)
            await trio.sleep(RETRY_S)


async def serve(
    gateway: Gateway,
    binds: Sequence[str],
    member: Member,
    stop: Callable[[], Awaitable[None]],
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `stop` returns; `started` with the URLs. Streams end cleanly before."""

    async def stopped() -> None:
        await stop()
        gateway.stopping.set()

    async with trio.open_nursery() as nursery:
        await nursery.start(keep_term, gateway)
        run = partial(serve_http, make_app(gateway), hypercorn_config(binds), stopped, connections_max())
        async with trio.open_nursery() as http:
            urls = await http.start(run)
            said = member._replace(client_urls=member.client_urls or tuple(urls))
            gateway.serve_as(said)
            nursery.start_soon(keep_announced, gateway, said)
            task_status.started(urls)
        gateway.ended.set()
        nursery.cancel_scope.cancel()

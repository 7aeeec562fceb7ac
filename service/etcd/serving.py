"""Serving the gateway: hypercorn on trio over a client of the cluster below. Used by `launcher`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio
from hypercorn.config import Config
from hypercorn.trio import serve as serve_http

from logyard.client.aio import Yard
from logyard.client.errors import LogyardError

from .app import TERM_S, Gateway, make_app
from .cluster import MEMBERS, Member, announce

GRACE_S = 2.0
IDLE_S = 600.0
"""A connection without a request is kept so long: clients keep theirs, and lose calls when it is cut under them."""
RETRY_S = 0.5

log = logging.getLogger("logyard.etcd")


def hypercorn_config(binds: Sequence[str]) -> Config:
    """Plain HTTP on (host:port)s."""
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
    """Make the KV groups when they are not there, or wait until another node has; tries until the cluster can."""
    while True:
        try:
            if create:
                await yard.create_many([name, MEMBERS], machine="kv")
            for one in (name, MEMBERS):
                await yard.kv(one).status()
            return
        except LogyardError as error:
            if error.code in ("group_exists", "bad_request"):
                raise
            log.info("the group is not made yet: %s", error)
            await trio.sleep(RETRY_S)


async def keep_term(gateway: Gateway, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """A task: the term of the headers, looked at now and then; `started` when it is known."""
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
    """A task: tell the others what this one is reached by, once."""
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
        run = partial(serve_http, make_app(gateway), hypercorn_config(binds), shutdown_trigger=stopped)  # type: ignore[arg-type]
        async with trio.open_nursery() as http:
            urls = await http.start(run)
            said = member._replace(client_urls=member.client_urls or tuple(urls))
            nursery.start_soon(keep_announced, gateway, said)
            task_status.started(urls)
        gateway.ended.set()
        nursery.cancel_scope.cancel()

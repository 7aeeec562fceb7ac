"""What all calls of the gateway share: the groups below, the head of every answer, and what is under way. Made by
`launcher`, given to every handler; it knows none of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import trio

from logyard.client import kv_requests
from logyard.client.kv import KV
from logyard.client.kv_requests import Steps, T
from logyard.protocol.errors import LogyardError
from logyard.protocol.kv import Changes

from .words import EXHAUSTED, OVERHEAD_BYTES, TOO_MANY, GatewayError, Header

BODIES_BYTES_MAX = 128 << 20
"""Of all requests that are under way, and of what streams hold of messages that are not complete."""
CALLS_MAX = 4096
"""Requests under way, streams among them."""
SOON_S = 0.4
"""What is answered without a quorum as well waits so long for one."""

Take = Callable[[int], None]


class Member(NamedTuple):
    """A gateway: its name, and the URLs that peers and clients know it by."""

    name: str
    peer_urls: tuple[str, ...] = ()
    client_urls: tuple[str, ...] = ()


def number_of(*words: str) -> int:
    """Return a 64-bit number for a cluster or a member, the same on every node."""
    return int.from_bytes(hashlib.sha256("\0".join(words).encode()).digest()[:8], "big") >> 1 | 1


class Limits(NamedTuple):
    """`request_bytes`: keys and values of a request; `progress_s`: between two notifications of a quiet watch;
    `lease_s_min`: a shorter lease lasts so long; `request_s`: what has no answer by then is told to have timed out."""

    request_bytes: int = 1_572_864
    txn_operations: int = 128
    progress_s: float = 600.0
    lease_s_min: int = 2
    request_s: float = 7.0

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
        self.header = Header(number_of(token), number_of(token, name), 0)
        self.stopping = trio.Event()
        self.ended = trio.Event()
        self.watches = 0
        # The events of the newest change, as JSON: all watches of one key share them.
        self.encoded: tuple[Changes | None, bool, bytes] = (None, False, b"")
        self._bytes = 0
        self._calls = 0

    async def run(self, steps: Steps[T], *, consistency: str = "linearizable", node: int | None = None) -> T:
        """Ask the group what `kv_requests` wants to ask of it. The header knows the term of the answer then: clients
        compare those of several gateways (a question's answer has it; of a command's it is known while the leader
        stays)."""
        found = await self.kv.run(steps, self.limits.request_s, consistency, node)
        if consistency != "local" and not self.kv.same_leader:
            # What was asked is done: nobody is told of a failure because the term is not known yet.
            with suppress(LogyardError):
                await self.kv.run(kv_requests.status(), self.limits.request_s)
        self._learn(self.kv.term)
        return found

    async def reach(self) -> tuple[str, int | None]:
        """Return the (consistency, node) with which to ask what etcd answers without a quorum, too: linearizable where
        that is answered soon, else as the node beside this gateway has it, or any that answers. Raises what it says."""
        try:
            await self.kv.run(kv_requests.status(), SOON_S)
            return "linearizable", None
        except LogyardError as error:
            failure = error
        for node in [self.node] if self.node else await self.kv.yard.nodes():
            try:
                await self.kv.run(kv_requests.status(), SOON_S, "local", node)
                return "local", node
            except LogyardError as error:
                failure = error
        raise failure

    def _learn(self, term: int) -> None:
        if term > self.header.term:
            self.header = self.header._replace(term=term)

    async def describe(self, node: int | None = None) -> dict[str, Any]:
        """Describe the group below, as its leader (or `node`) sees it; also gives the header its term."""
        found = await self.kv.yard.describe(self.kv.name, node)
        if not self.by_token:
            # Whoever names no token has a cluster of its own nevertheless.
            self.header = self.header._replace(cluster=number_of(self.token, str(found.get("uid", ""))))
        self._learn(int(found.get("term", 0)))
        return found

    def serve_as(self, member: Member) -> None:
        """Take the place that the command line names for this member, or be the only one."""
        self.named = tuple([member if one.name == member.name else one for one in self.named]) or (member,)

    def count_watches(self, count: int) -> None:
        """Count so many watches more, or less."""
        self.watches += count

    def share(self, changes: Changes, previous: bool, events: bytes) -> None:
        """Keep the newest change's events as JSON for the other watches of its key."""
        self.encoded = (changes, previous, events)

    def id_of(self, node: int) -> int:
        """Return the number of the member whose node that is."""
        if 0 < node <= len(self.named):
            return number_of(self.token, self.named[node - 1].name)
        return self.header.member if node == (self.node or node) else number_of(self.token, str(node))

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

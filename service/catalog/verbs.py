"""The verbs of operators about the cluster: what the catalogue says, what may be changed in it by hand, and joining.

Invariant: only what `OPERATORS` lists is changed by a client; births, reports and moves are the nodes' own. Called by
`door.dispatch`, by way of `node`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Set
from types import MappingProxyType
from typing import Any

from logyard.engine.machine import Reject
from logyard.engine.replica.member import Member
from logyard.machines.catalog.command import question as question_of
from logyard.machines.catalog.command import result_of
from logyard.machines.catalog.nodes import REMOVED
from logyard.protocol.errors import BadRequest, Busy, Refused

from .calls import CatalogCalls
from .keeper import Keeper, catalog_of, nodes_of
from .mover import UNDO
from .places import address
from .reconciler import shown

OPERATORS: Mapping[str, Set[str]] = MappingProxyType(
    {
        "nodes": frozenset({"invite", "update", "replace", "drain", "declare_dead", "admit", "remove", "finalise"}),
        "logs": frozenset({"want", "options", "rename"}),
        "plan": frozenset({"pause", "resume", "step"}),
    }
)
FOR_MS_MAX = 1 << 48
NO_CATALOG = "this node has no catalogue: set catalog = true in [node] of node.toml, on every node"


class CatalogVerbs:
    """One node's. `within(member, seconds)` waits until a member knows what was committed so long ago; `latest` is the
    latest log time that a member's group may have by now; `cluster` is the name that all nodes share."""

    def __init__(
        self,
        node_id: int,
        cluster: str,
        keeper: Keeper,
        calls: CatalogCalls,
        within: Callable[[Member, float], Awaitable[None]],
        latest: Callable[[Member | None], int],
    ) -> None:
        self._node_id = node_id
        self._cluster = cluster
        self._keeper = keeper
        self._calls = calls
        self._within = within
        self._latest = latest

    async def ask(self, section: str, question: str, values: Mapping[str, Any], consistency: str) -> dict[str, Any]:
        """Answer from this node's own memory, with how fresh it is: as it is (`local`), or when it holds everything
        that was committed before (`linearizable`)."""
        if consistency not in ("local", "linearizable"):
            raise BadRequest(f"consistency is local or linearizable, not {consistency!r}")
        if consistency == "linearizable":
            self._keeper.check()
        member = self._keeper.member()
        catalog = catalog_of(member)
        if member is None or catalog is None:
            raise Busy(f"the catalogue ({self._keeper.trouble})", 1.0)
        if consistency == "linearizable":
            await self._within(member, 0.0)
        if (section, question) == ("plan", "wanted"):
            plan = await self._keeper.plan()
            found = {} if plan is None else shown(plan)
        else:
            try:
                found = result_of(catalog.query(question_of(section, question, values)))
            except Reject as reject:
                raise BadRequest(reject.message) from None
        return {
            "node": self._node_id, "applied": member.raft.applied, "leader": member.raft.leader,
            "trouble": self._keeper.trouble, "result": found,
        }  # fmt: skip

    async def change(self, section: str, change: str, values: Mapping[str, Any]) -> Any:
        """Change what operators may. Raises what the catalogue refuses it with."""
        self._keeper.check()
        if change not in OPERATORS.get(section, ()):
            raise Refused(f"{section} {change}: nodes do that by themselves")
        if change == "step" and values.get("step") != UNDO:
            raise Refused("a move is only given up by hand")
        node = values.get("node")
        if change == "declare_dead" and isinstance(node, int) and self._keeper.hears(node) and not values.get("force"):
            raise Refused(f"node {node} is heard of: drain it (logyard nodes drain {node}), or give --force")
        _check_addresses(values)
        if change == "invite" and "for_ms" in values:
            values = self._invitation(values)
        return await self._calls.change(section, change, values)

    def _invitation(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an invitation that holds for `for_ms`. The catalogue goes by its log time, which stays ahead of all
        wall clocks where one of them once was."""
        for_ms = values["for_ms"]
        if type(for_ms) is not int or not 0 < for_ms < FOR_MS_MAX:
            raise BadRequest(f"for_ms is how long an invitation holds, in ms, not {for_ms!r}")
        until = self._latest(self._keeper.member()) + for_ms
        return {key: value for key, value in values.items() if key != "for_ms"} | {"until": until}

    async def join(
        self, token: bytes, directory: int, peer: str, client: str, zone: str, replaces: int
    ) -> dict[str, Any]:
        """Let an empty directory become a node: its number, and where the others are. The token proves that somebody
        invited it; only its hash is known here."""
        self._keeper.check()
        _check_addresses({"peer": peer, "client": client})
        catalog = self._keeper.catalog
        if catalog is None or not nodes_of(catalog).rows:
            # Whoever joins begins with the addresses that it is told here.
            raise Busy(f"the catalogue ({self._keeper.trouble})", 1.0)
        values = {"hash": hashlib.sha256(token).digest(), "directory": directory, "peer": peer, "client": client}
        number = await self._calls.change("nodes", "join", {**values, "zone": zone, "replaces": replaces})
        rows = list(nodes_of(self._keeper.catalog or catalog).rows)
        return {
            "node": number, "cluster": self._cluster,
            "nodes": [[other, row.peer, row.client] for other, row in rows if row.state != REMOVED and other != number],
        }  # fmt: skip


def _check_addresses(values: Mapping[str, Any]) -> None:
    """Raise `BadRequest` for addresses of a node that are none, or that not all programs read alike: all others would
    go by them."""
    for key in ("peer", "client"):
        if text := str(values.get(key) or ""):
            address(text)
            if not (text.isascii() and text.isprintable()):
                raise BadRequest(f"{text!r} is no address for all: give HOST:PORT in ASCII (a name's form xn--...)")

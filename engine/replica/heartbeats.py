"""When a session ends: its client's heartbeat was unseen on the leader's node for a full time-to-live.

Invariants: silence is counted from this leader's election at the earliest, and only while this process runs: a node
that slept, or a new leader, gives every client its whole time again (docs/machines/queue.md). Nothing ends but by a
replicated `expire`. Costs nothing for groups without sessions. Called by `ticker` twice a second.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Protocol

from logyard.protocol.errors import BadRequest, Busy, NotLeader

from ..config import SystemConfig
from ..raft.state import LEADER
from .member import HALTED, RUNNING, Member
from .sessions import EXPIRE, REGISTER
from .submit import check_leader

LOOK_SECONDS_MAX = 2.0
"""What one look adds to the clock at most: more means that the process was not running."""
CLIENTS_MAX = 65_536
"""Clients whose heartbeats are remembered; those with sessions here are never forgotten in favour of others."""
EXPIRE_AT_ONCE = 1000
FULL_RETRY_SECONDS = 1.0


class Commands(Protocol):
    """The way to commands of the engine's own."""

    def propose(self, member: Member, name: str, *arguments: object) -> None:
        """Queue one. Raises `NotLeader`, `GroupStopped`."""
        ...

    async def commit(self, member: Member, name: str, *arguments: object) -> bytes:
        """Return the reply of one, committed and applied."""
        ...


class Heartbeats:
    """One node's clients: client -> when it was last heard of, by a clock that stands still while the node does."""

    __slots__ = ("clock", "last_seen", "_asleep", "_config", "_commands", "_groups", "_looked")

    def __init__(self, config: SystemConfig, commands: Commands) -> None:
        self._config = config
        self._commands = commands
        self.clock = 0.0
        self.last_seen: dict[int, float] = {}
        # Groups with sessions that this node leads; those that it does not lead any more leave at the next look.
        self._groups: set[Member] = set()
        # Clients with sessions of groups that sleep under this node.
        self._asleep: Collection[int] = ()
        self._looked = time.monotonic()

    def spare(self, asleep: Collection[int]) -> None:
        """Remember these clients whoever else comes: their groups sleep here, with their sessions."""
        self._asleep = asleep

    def now(self) -> float:
        """Return the clock between two looks."""
        return self.clock + min(time.monotonic() - self._looked, LOOK_SECONDS_MAX)

    def seen(self, client: int) -> None:
        """Note a sign of life of a client that has a session here."""
        self.last_seen[client] = self.now()

    def heard(self, client: int) -> None:
        """Note that somebody says that it is alive. Raises `Busy` when too many without a session here are
        remembered."""
        if client not in self.last_seen and len(self.last_seen) >= CLIENTS_MAX:
            self._forget()
        self.last_seen[client] = self.now()

    async def open(self, member: Member, session: int, client: int, ttl_ms: int) -> None:
        """Register a session: committed when this returns. Raises `BadRequest`, `Busy`, `NotLeader`."""
        config = self._config
        if not session or not 0 < ttl_ms <= config.session_ttl_ms_max:
            raise BadRequest(
                f"a session has a number, and a time to live of 1 to {config.session_ttl_ms_max} ms",
                ttl_ms_max=config.session_ttl_ms_max,
            )
        check_leader(member)
        self.heard(client)
        table = member.sessions
        if table is not None and session not in table.by_id:
            if len(table.by_id) >= config.sessions_max:
                raise Busy("the group's number of sessions", FULL_RETRY_SECONDS)
            if table.bytes >= config.session_reply_bytes_max:
                raise Busy("the group's memory of replies", FULL_RETRY_SECONDS)
        await self._commands.commit(member, REGISTER, session, client, ttl_ms)

    def leads(self, member: Member) -> None:
        """Give every session its whole time to live again: this node was elected."""
        member.leads_since(self.now())
        if member.sessions is not None:
            self.began(member)

    def began(self, member: Member) -> None:
        """Count silence on, as a group has its first session, or is led on after it slept."""
        if member.raft.role == LEADER:
            self._groups.add(member)

    def look(self) -> None:
        """Propose the end of what was silent for too long."""
        now = time.monotonic()
        self.clock += min(now - self._looked, LOOK_SECONDS_MAX)
        self._looked = now
        for member in list(self._groups):
            table = member.sessions
            if member.state == HALTED:
                continue
            if table is None or member.state != RUNNING or member.raft.role != LEADER:
                self._groups.discard(member)
                continue
            silent = [
                number
                for number, session in table.by_id.items()
                if (self.clock - max(member.lead_since, self.last_seen.get(session.client, 0.0))) * 1000
                > session.ttl_ms
            ]
            if silent and member.raft.applied >= member.raft.lead_index:
                try:
                    self._commands.propose(member, EXPIRE, *silent[:EXPIRE_AT_ONCE])
                except NotLeader:
                    self._groups.discard(member)

    def _forget(self) -> None:
        needed = {one.client for member in self._groups if member.sessions for one in member.sessions.by_id.values()}
        needed.update(self._asleep)
        self.last_seen = {client: seen for client, seen in self.last_seen.items() if client in needed}
        if len(self.last_seen) >= CLIENTS_MAX:
            raise Busy("the node's memory of clients", 1.0)

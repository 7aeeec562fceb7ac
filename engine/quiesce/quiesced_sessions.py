"""Sessions of quiesced groups: clients say that they live to the node, not to a group, so a group with sessions may
sleep; when a client falls silent, the groups that have to end its sessions wake.

Invariant: a group is here with every client of its sessions exactly while it sleeps under this node. Called by
`transitions`, and asked by `quiesce` and `unquiesce`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from ..replica.member import Member


class Heard(Protocol):
    """When clients were last heard of, by a clock that stands still while the node does."""

    @property
    def last_seen(self) -> Mapping[int, float]:
        """By client."""
        ...

    def now(self) -> float:
        """Read that clock."""
        ...


class QuiescedSessions:
    """client -> (group, time to live in ms) of its sessions; client -> a time to live that none of these is below;
    group -> since when silence counts."""

    __slots__ = ("_heard", "_clients", "_shortest", "_since")

    def __init__(self, heard: Heard) -> None:
        self._heard = heard
        self._clients: dict[int, dict[int, int]] = {}
        self._shortest: dict[int, int] = {}
        self._since: dict[int, float] = {}

    @property
    def clients(self) -> Collection[int]:
        """Those with a session here, as of now and later."""
        return self._clients.keys()

    def _silent_ms(self, client: int, since: float) -> float:
        return 1000 * (self._heard.now() - max(since, self._heard.last_seen.get(client, 0.0)))

    def is_silent(self, member: Member) -> bool:
        """Return whether a session's client was not heard of for half its time to live: its end may have to be proposed
        soon."""
        return member.sessions is not None and any(
            2 * self._silent_ms(one.client, member.lead_since) > one.ttl_ms for one in member.sessions.by_id.values()
        )

    def sleep(self, member: Member) -> None:
        """Look after the sessions of a group that this node leads, and that goes to sleep."""
        for session in member.sessions.by_id.values() if member.sessions is not None else ():
            self._clients.setdefault(session.client, {})[member.uid] = session.ttl_ms
            self._shortest[session.client] = min(self._shortest.get(session.client, session.ttl_ms), session.ttl_ms)
            self._since[member.uid] = member.lead_since

    def wake(self, member: Member) -> None:
        """Leave them to the group again: it is awake."""
        member.leads_since(self._since.pop(member.uid, member.lead_since))
        for session in member.sessions.by_id.values() if member.sessions is not None else ():
            groups = self._clients.get(session.client, {})
            groups.pop(member.uid, None)
            if not groups:
                self._clients.pop(session.client, None)
                self._shortest.pop(session.client, None)

    def overdue(self) -> Iterator[int]:
        """Yield the groups with a session to end. Asked once a second."""
        for client, groups in self._clients.items():
            if self._silent_ms(client, 0.0) <= self._shortest[client]:
                continue
            for uid, ttl_ms in groups.items():
                if self._silent_ms(client, self._since[uid]) > ttl_ms:
                    yield uid

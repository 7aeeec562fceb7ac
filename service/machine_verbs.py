"""The verbs that every machine has: questions, sessions and what came of their frames, waiting for an index. Made by
`node`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import trio

from logyard.engine.machine import Reject, check_reply
from logyard.engine.replica.leadership import wait
from logyard.engine.replica.member import Member
from logyard.engine.replica.proposals import CommandRejected
from logyard.engine.replica.sessions import EXPIRE
from logyard.protocol.errors import BadRequest, Busy, Gone, Refused

from .consistency import Consistency

RETRY_S = 0.02
"""When a client asks again for what this member has not applied yet: it has waited here already."""


class Commit(Protocol):
    """Commits a command of the engine's own."""

    async def __call__(self, member: Member, name: str, *arguments: object) -> bytes:
        """Return its reply. Raises what refuses it."""
        ...


class Sessions(NamedTuple):
    """How sessions of a group begin and end, on its leader."""

    open: Callable[[Member, int, int, int], Awaitable[None]]
    """Register one: member, session, client, time to live in ms."""
    commit: Commit
    stir: Callable[[int], None]
    """Wake who listens to a group."""


class MachineVerbs:
    """Any machine's. `find` gives a group's member, or raises `UnknownGroup`; nothing is waited for longer than
    `wait_s_max`."""

    def __init__(
        self, find: Callable[[str], Member], wait_s_max: float, reads: Consistency, sessions: Sessions
    ) -> None:
        self._find = find
        self._wait_s_max = wait_s_max
        self._reads = reads
        self._sessions = sessions

    async def open_session(self, name: str, session: int, client: int, ttl_ms: int) -> None:
        """Begin a session of `client` in a group; an equal one may exist. On the leader; raises `NotLeader`, `Busy`."""
        await self._sessions.open(self._find(name), session, client, ttl_ms)

    async def close_session(self, name: str, session: int) -> None:
        """End a session; one that ended already is no error. On the leader; raises `NotLeader`."""
        member = self._find(name)
        await self._sessions.commit(member, EXPIRE, session)
        self._sessions.stir(member.uid)

    async def session_reply(self, name: str, session: int, sequence: int, wait_s: float) -> bytes:
        """Return what came of a session's frame, once this member itself has applied it. Raises `Busy` after `wait_s`,
        and what the frame was refused with."""
        member = self._find(name)

        def known() -> bytes | Reject | None:
            return member.sessions.known(session, sequence) if member.sessions is not None else None

        await self._until(member, lambda: known() is not None, wait_s)
        reply = known()
        if reply is None:
            raise Busy("the way to the command", RETRY_S)
        if isinstance(reply, Reject):
            raise CommandRejected(reply)
        return reply

    async def wait_applied(self, name: str, index: int, term: int = 0, wait_s: float = 0.0) -> int:
        """Wait until this member has applied `index`; return what it has applied then. Raises `Busy` after `wait_s`;
        with a `term` `Refused` when that entry was overwritten by another leader's, `Gone` when nobody can tell any
        more."""
        member = self._find(name)
        member.check_running()
        await self._until(member, lambda: member.raft.applied >= index, wait_s)
        if member.raft.applied < index:
            raise Busy("the way to the index", RETRY_S)
        if term:
            found = member.raft.log.term(index)
            if found is None:
                raise Gone(f"group {name!r}: which term wrote entry {index} is not known any more")
            if found != term:
                raise Refused(f"group {name!r}: entry {index} of term {term} was overwritten in term {found}")
        return member.raft.applied

    async def query(
        self, name: str, request: bytes, consistency: str = "leader", index: int = 0, *, staleness_s: float = 0.0
    ) -> bytes:
        """Ask a machine something: its own `query` method answers. `index`: not before this member has applied it.

        `consistency` as in `consistency`. Raises `BadRequest` for a machine without queries, what a `Reject` says,
        `Busy`; `TypeError` for an answer that is no bytes.
        """
        member = await self._reads.member(name, consistency, staleness_s)
        if index:
            await self.wait_applied(name, index, wait_s=self._wait_s_max)
        member.check_running()
        ask = getattr(member.machine, "query", None)
        if ask is None:
            raise BadRequest(f"a {member.spec.machine} answers no queries")
        try:
            answer: bytes = ask(request)
        except Reject as reject:
            raise CommandRejected(reject) from None
        # A client would make something else of a number, and raise nothing.
        return check_reply(answer)

    async def _until(self, member: Member, condition: Callable[[], bool], wait_s: float) -> None:
        with trio.move_on_after(min(wait_s, self._wait_s_max)):
            await wait(member, condition)

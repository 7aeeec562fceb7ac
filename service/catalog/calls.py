"""Commands to the catalogue from any node: applied by whoever leads it, asked for until somebody does.

A command carries a request number of its own, so that it comes to one outcome however often it is sent. Invariants:
without a leader of the catalogue a call ends as `Busy` within `PATIENCE_S`, and nothing else waits for it; what makes
the catalogue smaller (`FREES`) is taken where it is too full for anything else. Called by what changes the cluster:
creations, deletions, the node's keeper, the verbs of operators.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any, NamedTuple, Protocol

import trio

from logyard.engine.machine import Reject
from logyard.engine.raft.state import LEADER
from logyard.engine.replica.member import Member
from logyard.engine.transport.blobs import CATALOG_ANSWER, CATALOG_ASK, SendBlob
from logyard.machines.catalog.command import REQUEST_BYTES, command, command_of, refused, result_of
from logyard.protocol.errors import BadRequest, Busy, LogyardError, NotLeader
from logyard.protocol.pending import PendingReply

PATIENCE_S = 5.0
ASK_S = 1.0
PAUSE_S = 0.05
ANSWERS_MAX = 256
"""Commands of other nodes at once: a task each, while it lasts."""
FREES = frozenset(
    {
        ("logs", "live"), ("logs", "undo"), ("logs", "delete"), ("logs", "gone"), ("logs", "report"),
        ("nodes", "drain"), ("nodes", "replace"), ("nodes", "declare_dead"), ("nodes", "remove"),
        ("plan", "propose"), ("plan", "step"), ("plan", "finish"), ("plan", "cancel"),
    }
)  # fmt: skip
"""(section, command) of what frees space, and of what that waits for: a log is deleted when it is no intent any more, a
node is drained by moves, and a move is over when its members were reported."""


def busy() -> Busy:
    """Return what a call without a catalogue ends with."""
    cause = "the catalogue has no leader, or no majority, just now"
    return Busy.told(f"busy: {cause}; try again in 1 s", {"cause": cause, "retry_after": 1.0})


def frees(data: bytes) -> bool:
    """Return whether a command may use what is reserved for those that free space."""
    try:
        found = command_of(data)
    except Reject:
        return False
    return (found.section, found.command) in FREES


class Commit(Protocol):
    """Has a command committed by a member that leads."""

    async def __call__(self, member: Member, command: bytes, *, reserved: bool) -> bytes:
        """Return the reply. `reserved`: it frees space."""
        ...


class Network(NamedTuple):
    """The other nodes."""

    live: Set[int]
    """Those that are up, this one among them."""
    send: SendBlob
    known: Callable[[], Collection[int]] = tuple
    """Those that are dialled."""


class CatalogCalls:
    """One node's. `find` returns its member of the catalogue, if it has one; `spawn` runs a task."""

    def __init__(
        self,
        node_id: int,
        find: Callable[[], Member | None],
        commit: Commit,
        network: Network,
        spawn: Callable[..., None],
    ) -> None:
        self._node_id = node_id
        self._find = find
        self._commit = commit
        self._network = network
        self._spawn = spawn
        self._asked: dict[int, PendingReply[Mapping[str, Any]]] = {}
        self._next = 0
        self._answering = 0
        self._hint = 0

    async def change(self, section: str, name: str, values: Mapping[str, Any], patience_s: float = PATIENCE_S) -> Any:
        """Have one command applied; return its result. Raises what it is refused with, `Busy` without a catalogue."""
        data = command(section, name, values, os.urandom(REQUEST_BYTES))
        with trio.move_on_after(patience_s):
            while True:
                reply = await self._once(data)
                if reply is not None:
                    return result_of(reply)
                await trio.sleep(PAUSE_S)
        raise busy()

    def leads(self) -> bool:
        """Return whether this node leads the catalogue, and has applied all of its earlier leaders."""
        member = self._find()
        return member is not None and member.raft.role == LEADER and member.leading

    def leader(self) -> int:
        """Return the node that leads the catalogue, as far as this one knows, or 0."""
        member = self._find()
        return member.raft.leader if member is not None else self._hint

    async def _once(self, data: bytes) -> bytes | None:
        """Try the node that may lead; return its answer, None where there was none."""
        leader = self.leader() or self._hint or self._anybody()
        if leader == self._node_id:
            reply, _ = await self._here(data)
            if reply is None:
                # Whoever named this node may be mistaken.
                self._hint = 0
            return reply
        self._next += 1
        request = self._next
        pending = self._asked[request] = PendingReply()
        try:
            if not leader or not self._network.send(leader, CATALOG_ASK, request, {"command": data}):
                self._hint = 0
                return None
            with trio.move_on_after(ASK_S):
                answer = await pending.wait(trio.Event)
                self._hint = int(answer["leader"])
                found: bytes | None = answer["reply"]
                return found
            self._hint = 0
            return None
        finally:
            del self._asked[request]

    def _anybody(self) -> int:
        """Return a live node that may know who leads, another one each time. Where none lives, whoever is dialled: a
        node that has moved is heard, and hears nobody before it has said where it is."""
        others = sorted(self._network.live - {self._node_id}) or sorted(self._network.known())
        return others[self._next % len(others)] if others else 0

    async def _here(self, data: bytes) -> tuple[bytes | None, str | None]:
        """Have a command applied by this node's member; return the reply, or why there is none."""
        member = self._find()
        if member is None:
            return None, "the catalogue is not here"
        try:
            return await self._commit(member, data, reserved=frees(data)), None
        except NotLeader as error:
            return None, str(error)
        except LogyardError as error:
            # Busy, or an outcome that is not known: the same request is asked again.
            return None, str(error)

    def on_blob(self, node: int, kind: int, request: int, header: Mapping[str, Any]) -> None:
        """Apply another node's command, or take its answer."""
        if kind == CATALOG_ANSWER:
            if request in self._asked:
                self._asked[request].set(header)
        elif kind == CATALOG_ASK:
            if self._answering >= ANSWERS_MAX:
                self._say(node, request, None, "too many ask")
            else:
                self._answering += 1
                self._spawn(self._answer, node, request, header["command"])

    async def _answer(self, node: int, request: int, data: bytes) -> None:
        reply, error = None, None
        try:
            with trio.move_on_after(ASK_S):
                reply, error = await self._here(data)
            self._say(node, request, reply, error)
        finally:
            self._answering -= 1

    def _say(self, node: int, request: int, reply: bytes | None, error: str | None) -> None:
        header = {"reply": reply, "error": error, "leader": self.leader()}
        try:
            self._network.send(node, CATALOG_ANSWER, request, header)
        except BadRequest as large:
            # It would be as large whenever it is asked for again, so this is the answer.
            told = Reject(large.code, f"it was carried out, but its answer is too large: {large}")
            self._network.send(node, CATALOG_ANSWER, request, {**header, "reply": refused(told)})

"""What peers say to this node: messages for cores, links going up and down, node liveness, typed blobs.

Implements the transport's handler. Payload hashes are checked here, before a core hears of the entry; a bad one
closes the connection it came
by and nothing else. A message for a group this node does not have asks its sender for the group's definition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from logyard.protocol.errors import BadRequest, LogyardError, Outdated

from ..entry import Entry, verify_bodies
from ..raft.messages import APPEND, APPEND_REPLY, Message
from ..raft.progress import Window
from ..raft.state import LEADER
from ..replica.member import Member
from ..transport.blobs import DELETE_GROUPS, UNKNOWN_GROUPS, Handler, SendBlob, check_shape

log = logging.getLogger(__name__)

ASK_UNKNOWN_MAX = 1024


class Loop(Protocol):
    """What arrives at the ready loop. `over`: nothing is promised any more."""

    over: bool

    def mark(self, member: Member) -> None:
        """Have a member looked at in the next turn."""
        ...

    def hold(self) -> None:
        """Begin no turn until `release`."""
        ...

    def release(self) -> None:
        """Begin the turn, now or soon."""
        ...


class Space(Protocol):
    """What is left of the disk's space."""

    @property
    def full(self) -> bool:
        """Return whether it is full."""
        ...

    def accepts(self, entries: Sequence[Entry]) -> int:
        """Return how many of these may be stored."""
        ...


class Groups(NamedTuple):
    """The members that messages are for. `live`: nodes that are up."""

    node_id: int
    members: Mapping[int, Member]
    live: set[int]
    active: set[Member]
    find: Callable[[int, int], Member | None]
    """A group's member, woken by the word of a node."""
    deleted: Container[int]
    walk: Callable[[Callable[[Member], None]], None]
    """Call something with every member, in steps."""
    stranger: Callable[[int, Member], None]
    """A node speaks for a group whose configuration lacks it."""
    stop: Callable[[Member, str], None]
    """Stop a replica, for this reason."""


class Windows(NamedTuple):
    """Bytes under way by follower's node, and what goes on when there is room."""

    by_node: Mapping[int, Window]
    resume: Callable[[int], None]


class Links(NamedTuple):
    """Who hears of links and nodes."""

    up: Sequence[Callable[[int], None]]
    down: Sequence[Callable[[int], None]]
    live: Callable[[set[int]], None]
    outdated: Callable[[Outdated], None]
    """The others refuse this directory."""


class Inbound:
    """The transport's handler. `keep` has the payloads of an entry cached; `handlers` take blobs, by kind."""

    def __init__(
        self,
        groups: Groups,
        loop: Loop,
        keep: Callable[[Entry], None],
        space: Space,
        windows: Windows,
        links: Links,
        handlers: Mapping[int, Handler],
        send_blob: SendBlob,
    ) -> None:
        self._groups = groups
        self._loop = loop
        self._keep = keep
        self._space = space
        self._windows = windows
        self._links = links
        self._handlers = dict(handlers)
        self._send_blob = send_blob
        self._asked: dict[int, set[int]] = {}

    def hear(self, kinds: Iterable[int], handler: Handler) -> None:
        """Give blobs of more kinds to a part above the engine."""
        self._handlers.update(dict.fromkeys(kinds, handler))

    def on_messages(self, node: int, messages: Sequence[Message]) -> None:
        """Step every message into its core and mark it; the turn follows. Raises `BadRequest` for a lie, when all are
        taken."""
        loop = self._loop
        if loop.over:
            return
        groups = self._groups
        members = groups.members
        mark = loop.mark
        keep = self._keep
        space = self._space
        lie = ""
        loop.hold()
        try:
            for message in messages:
                member = members.get(message.uid)
                if member is None:
                    member = groups.find(message.uid, node)
                    if member is None:
                        self.ask(node, message.uid)
                        continue
                raft = member.raft
                if raft.stopped:
                    continue
                entries = message.entries
                if entries and space.full and (taken := space.accepts(entries)) < len(entries):
                    # As lost: the leader's window stays closed, and its probes without entries say that it leads.
                    if not taken:
                        continue
                    message = _first_of(message, taken)
                    entries = message.entries
                if entries:
                    for entry in entries:
                        if entry.body_bytes and not entry.tombstone:
                            verify_bodies(message.uid, entry)
                if (
                    node not in raft.progress
                    if raft.role == LEADER
                    else (message.kind < APPEND or message.kind == APPEND_REPLY)
                    and node not in raft.configuration.nodes()
                ):
                    groups.stranger(node, member)
                said = raft.step(message)
                if said is not None:
                    if raft.stopped:
                        groups.stop(member, said)
                    else:
                        lie = f"group {member.spec.name}: {said}"
                if entries:
                    # Not what was sent twice: no log holds it, so it is never written.
                    log_entry = raft.log.entry
                    for entry in entries:
                        if entry.body_bytes and not entry.tombstone and log_entry(entry.index) is entry:
                            keep(entry)
                if raft.dirty:
                    mark(member)
            window = self._windows.by_node.get(node)
            if window is not None and window.waiting and window.bytes < window.limit:
                self._windows.resume(node)
        finally:
            loop.release()
        if lie:
            # The other groups' messages are taken; no more comes by this connection.
            raise BadRequest(lie)

    def ask(self, node: int, uid: int) -> None:
        """Ask `node` about a group that is not here, or tell it: deleted, which its sender should know, or created
        while this node was away."""
        asked = self._asked.setdefault(node, set())
        if uid in asked or len(asked) >= ASK_UNKNOWN_MAX:
            return
        asked.add(uid)
        kind = DELETE_GROUPS if uid in self._groups.deleted else UNKNOWN_GROUPS
        self._send_blob(node, kind, 0, {"uids": [uid]})

    def forget_asked(self) -> None:
        """Ask again for what is still unknown: called by the ticker every second."""
        self._asked.clear()

    def on_link_up(self, node: int) -> None:
        """Take note of a fresh link: what was in flight on the old one may be lost."""
        for tell in self._links.up:
            tell(node)
        self._reset(node)

    def on_link_down(self, node: int) -> None:
        """Take note that a link was lost, or dropped messages because its queue was full."""
        self._reset(node)
        for tell in self._links.down:
            tell(node)

    def _reset(self, node: int) -> None:
        groups, mark = self._groups, self._loop.mark

        def reset(member: Member) -> None:
            raft = member.raft
            if node in raft.progress or (
                node == raft.leader
                if raft.leader
                else (raft.limits.patience or not (raft.voter and raft.may_lead)) and node in raft.configuration.nodes()
            ):
                raft.on_link_reset(node)
                groups.active.add(member)
                mark(member)

        groups.walk(reset)

    def on_liveness(self, live: set[int]) -> None:
        """Take note that nodes appeared or went: groups that a lost node led, or that this node leads, look again."""
        groups, mark = self._groups, self._loop.mark
        groups.live.clear()
        groups.live.update(live)
        groups.live.add(groups.node_id)

        def look(member: Member) -> None:
            member.raft.on_liveness()
            groups.active.add(member)
            mark(member)

        groups.walk(look)
        self._links.live(groups.live)

    def on_outdated(self, node: int, reason: str) -> None:
        """Take note that `node` knows a newer life of this node, or another directory: what was promised there is not
        known here."""
        if not self._loop.over:
            self._links.outdated(Outdated(self._groups.node_id, f"{reason} (says node {node})"))

    def on_blob(self, node: int, kind: int, request: int, header: Mapping[str, Any], body: bytes | memoryview) -> None:
        """Take typed requests beside the consensus stream: group definitions and snapshot transfers."""
        check_shape(kind, header)
        if self._loop.over:
            return
        try:
            handler = self._handlers.get(kind)
            # What a newer program says beside, an older one does without.
            if handler is not None:
                handler(node, kind, request, header, body)
        except LogyardError as error:
            log.warning("blob kind %d from node %d refused: %s", kind, node, error)


def _first_of(message: Message, count: int) -> Message:
    """Return an APPEND with the first `count` of its entries."""
    entries = message.entries
    assert entries is not None
    return Message(
        message.kind, message.uid, message.to, message.sender, message.term, message.index, message.log_term,
        message.commit, message.context, message.reject, entries[:count], message.index + 1, message.index + count,
    )  # fmt: skip

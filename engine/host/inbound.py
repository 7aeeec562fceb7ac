"""What peers say to this node: messages for cores, links going up and down, node liveness, typed blobs.

Implements the transport's handler. Payload hashes are checked here, before a core hears of the entry; a bad one
closes the connection it came
by and nothing else. A message for a group this node does not have asks its sender for the group's definition.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from logyard.protocol.errors import BadRequest, LogyardError, Outdated

from ..entry import verify_bodies
from ..raft.core import LEADER
from ..raft.messages import APPEND, APPEND_REPLY, Message
from ..transport.blobs import (
    DELETE_GROUPS,
    DIGEST,
    MACHINE_VERSIONS,
    MEND_ASK,
    MEND_TURN,
    READ_ASK,
    READ_INDEX,
    SLEEP,
    SLEEPERS,
    SNAPSHOT_OFFER,
    SNAPSHOT_PIECE,
    SNAPSHOT_PULL,
    UNKNOWN_GROUPS,
    check_shape,
)

if TYPE_CHECKING:
    from ..replica.member import Member
    from .system import System

log = logging.getLogger(__name__)

ASK_UNKNOWN_MAX = 1024


class Inbound:
    """The transport's handler for one system."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._asked: dict[int, set[int]] = {}

    def on_messages(self, node: int, messages: Sequence[Message]) -> None:
        """Step every message into its core and mark it; the turn follows. Raises `BadRequest` for a lie, when all are
        taken."""
        system = self.system
        if system.failure is not None:
            return
        members = system.members
        scheduler = system.scheduler
        mark = scheduler.mark
        keep = system.cache.keep
        space = system.space
        lie = ""
        scheduler.hold()
        try:
            for message in messages:
                member = members.get(message.uid)
                if member is None:
                    member = system.unquiesce.find(message.uid, by=node)
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
                    system.departures.tell(node, member)
                said = raft.step(message)
                if said is not None:
                    lie = f"group {member.spec.name}: {said}"
                if entries:
                    # Not what was sent twice: no log holds it, so it is never written.
                    log_entry = raft.log.entry
                    for entry in entries:
                        if entry.body_bytes and not entry.tombstone and log_entry(entry.index) is entry:
                            keep(entry)
                if raft.dirty:
                    mark(member)
            window = system.windows.get(node)
            if window is not None and window.waiting and window.bytes < window.limit:
                system.outbound.resume(node)
        finally:
            scheduler.release()
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
        kind = DELETE_GROUPS if uid in self.system.directory.deleted else UNKNOWN_GROUPS
        self.system.peers.send_blob(node, kind, 0, {"uids": [uid]})

    def forget_asked(self) -> None:
        """Ask again for what is still unknown: called by the ticker every second."""
        self._asked.clear()

    def on_link_up(self, node: int) -> None:
        """Take note of a fresh link: what was in flight on the old one may be lost."""
        self.system.departures.forget_told(node)
        self.system.directory.on_link_up(node)
        self._reset(node)
        self.system.versions.on_link_up(node)

    def on_link_down(self, node: int) -> None:
        """Take note that a link was lost, or dropped messages because its queue was full."""
        self._reset(node)
        self.system.snapshot_sender.on_link_lost(node)
        self.system.pulls.on_link_lost(node)

    def _reset(self, node: int) -> None:
        system = self.system

        def reset(member: Member) -> None:
            raft = member.raft
            if node in raft.progress or (
                node == raft.leader
                if raft.leader
                else (raft.limits.patience or not (raft.voter and raft.may_lead)) and node in raft.configuration.nodes()
            ):
                raft.on_link_reset(node)
                system.active.add(member)
                system.scheduler.mark(member)

        system.walks.over_members(reset)

    def on_liveness(self, live: set[int]) -> None:
        """Take note that nodes appeared or went: groups that a lost node led, or that this node leads, look again."""
        system = self.system
        system.live.clear()
        system.live.update(live)
        system.live.add(system.node_id)

        def look(member: Member) -> None:
            member.raft.on_liveness()
            system.active.add(member)
            system.scheduler.mark(member)

        system.walks.over_members(look)
        system.unquiesce.on_liveness(system.live)

    def on_outdated(self, node: int, reason: str) -> None:
        """Take note that `node` knows a newer life of this node, or another directory: what was promised there is not
        known here."""
        system = self.system
        if system.failure is None:
            system.fail(Outdated(system.node_id, f"{reason} (says node {node})"))

    def on_blob(self, node: int, kind: int, request: int, header: Mapping[str, Any], body: bytes | memoryview) -> None:
        """Take typed requests beside the consensus stream: group definitions and snapshot transfers."""
        check_shape(kind, header)
        if self.system.failure is not None:
            return
        try:
            if kind < SNAPSHOT_OFFER:
                self.system.directory.on_blob(node, kind, request, header)
            elif kind == MACHINE_VERSIONS:
                self.system.versions.on_blob(node, header)
            elif kind in (READ_ASK, READ_INDEX):
                self.system.follower_reads.on_blob(node, kind, request, header)
            elif kind in (MEND_ASK, MEND_TURN):
                self.system.mend_turns.on_blob(node, kind, request, header)
            elif kind in (DIGEST, SLEEPERS):
                self.system.digests.on_blob(node, kind, header)
            elif kind >= SLEEP:
                self.system.quiesce.on_blob(node, kind, request, header)
            elif kind == SNAPSHOT_OFFER:
                self.system.receiving.on_offer(node, request, header, body)
            elif kind == SNAPSHOT_PULL:
                self.system.serving.on_pull(node, request, header)
            elif kind == SNAPSHOT_PIECE:
                self.system.pulls.on_piece(node, request, header, body)
            else:
                self.system.snapshot_sender.on_blob(node, kind, request, header)
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

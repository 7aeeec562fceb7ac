"""Machine versions and rolling upgrade: which version of a machine is in force is replicated state.

Invariant: it starts at 1 and rises by a committed ["upgrade", to] only, which a leader proposes when enough voters'
nodes have said that they know it. A member whose machine does not know a version waits at that entry
(`quarantine`): it never skips it. Called by `inbound` (what nodes say), `ticker`, and `effects` at apply. Ra:
`ra_machine` versions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from logyard.protocol.errors import Busy, LogyardError, Refused

from ..raft.state import LEADER
from ..transport.blobs import MACHINE_VERSIONS, SendBlob
from .apply import newest_of, says
from .heartbeats import Commands
from .member import RUNNING, Member
from .submit import check_leader

log = logging.getLogger(__name__)


SAID_S = 0.2
"""Nodes tell each other what they know within a second after they meet."""


class Versions:
    """What this node and the others know. `own`: newest version by machine kind; `on_demand`: kinds whose machines say
    `upgrade_on_demand`: a group of them is upgraded by `require`, when somebody needs it."""

    def __init__(
        self,
        node_id: int,
        percent: int,
        members: Mapping[int, Member],
        live: Set[int],
        nodes: Callable[[], Iterable[int]],
        commands: Commands,
        send_blob: SendBlob,
        mark: Callable[[Member], None],
    ) -> None:
        """Take what it needs: `percent` of the voters have to know a version; `live` of the other `nodes` are up;
        `mark` says that a member has something to do."""
        self._node_id = node_id
        self._percent = percent
        self._members = members
        self._live = live
        self._nodes = nodes
        self._commands = commands
        self._send_blob = send_blob
        self._mark = mark
        self.own: dict[str, int] = {}
        self.on_demand: set[str] = set()
        self.nodes: dict[int, dict[str, int]] = {}
        self._unsaid: set[int] = set()

    def learn(self, member: Member) -> None:
        """Learn how new a member's machine kind is here; a kind that is new here is told to all nodes."""
        kind = member.spec.machine
        newest = newest_of(member.machine)
        if says(member.machine, "upgrade_on_demand"):
            self.on_demand.add(kind)
        # One that could not be made, for its arguments say, knows no less than the others of its kind.
        if self.own.get(kind, 0) < newest:
            self.own[kind] = newest
            self._unsaid.update(self._nodes())

    def on_link_up(self, node: int) -> None:
        """Have a node that came (back) told at the next look."""
        self._unsaid.add(node)

    def on_blob(self, node: int, header: Mapping[str, Any]) -> None:
        """Take what another node knows; it replaces what it said before."""
        self.nodes[node] = {str(kind): int(version) for kind, version in header["machines"].items()}

    def knows(self, node: int, kind: str) -> int:
        """Return the newest version of a machine kind on a node; 0 when it has not said."""
        return self.own.get(kind, 0) if node == self._node_id else self.nodes.get(node, {}).get(kind, 0)

    def look(self) -> None:
        """Tell, once a second, who was not told; propose upgrades, or hand over to a node that can. Costs groups only
        where some node's machine is newer than 1."""
        if self._unsaid:
            say, self._unsaid = self._unsaid, set()
            for node in say:
                if not self._send_blob(node, MACHINE_VERSIONS, 0, {"machines": self.own}):
                    self._unsaid.add(node)
        newest = dict(self.own)
        for known in self.nodes.values():
            for kind, version in known.items():
                newest[kind] = max(version, newest.get(kind, 0))
        # Of a kind on demand only members that wait for a newer program are of interest: here that can be none.
        moving = {
            kind
            for kind, version in newest.items()
            if version > 1 and not (kind in self.on_demand and self.own.get(kind) == version)
        }
        if moving:
            for member in list(self._members.values()):
                if member.raft.role == LEADER and member.spec.machine in moving:
                    self._look_at(member, newest[member.spec.machine])

    def _look_at(self, member: Member, newest: int) -> None:
        if newest <= member.version and member.state == RUNNING:
            return
        if member.state == RUNNING and member.spec.machine in self.on_demand:
            return
        raft = member.raft
        target = self.supported(member)
        try:
            if member.state == RUNNING and target <= newest_of(member.machine):
                if target > member.version and member.leading:
                    self._commands.propose(member, "upgrade", target)
            elif member.state == RUNNING or (member.halt is not None and member.halt.version):
                self._hand_over(member)
        except LogyardError as error:
            log.info("group %s: its upgrade waits: %s", member.spec.name, error)
        if raft.has_ready:
            self._mark(member)

    def _hand_over(self, member: Member) -> None:
        """Hand over to a leader that knows a newer machine, which can come into force only under such a one."""
        raft, kind = member.raft, member.spec.machine
        if raft.transferring:
            return
        able = [node for node in raft.configuration.voters if node in self._live and node != raft.node]
        able = [node for node in able if self.knows(node, kind) > newest_of(member.machine)]
        if able:
            raft.transfer(max(able, key=lambda node: (self.knows(node, kind), -node)))
            self._mark(member)

    async def require(self, member: Member, version: int) -> None:
        """Bring a group's machine to a version, if it is not there yet; on the leader. Raises `Refused` while too few
        voters' nodes know it, `Busy` while some that are up have not said yet, `NotLeader`."""
        if member.version >= version:
            return
        check_leader(member)
        short = self.supported(member) < version
        voters = {*member.raft.configuration.voters, *member.raft.configuration.outgoing} & self._live
        if short and any(not self.knows(node, member.spec.machine) for node in voters):
            raise Busy("what other nodes know of machines", SAID_S)
        if short or newest_of(member.machine) < version:
            raise Refused(
                f"group {member.spec.name!r} needs version {version} of its machine for this, which too few of its "
                "nodes know: update them, or try again when they are up"
            )
        await self._commands.commit(member, "upgrade", version)

    def supported(self, member: Member) -> int:
        """Return the newest version that enough voters know: a majority or `machine_upgrade_percent`, of both sets in a
        joint configuration."""
        configuration = member.raft.configuration
        sets = [configuration.voters, configuration.outgoing]
        return min((self._of(voters, member.spec.machine) for voters in sets if voters), default=0)

    def _of(self, voters: Sequence[int], kind: str) -> int:
        known = sorted((self.knows(node, kind) for node in voters), reverse=True)
        enough = -(-len(known) * self._percent // 100)
        return known[max(enough, len(known) // 2 + 1) - 1]

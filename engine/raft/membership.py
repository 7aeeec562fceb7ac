"""Who is in the group, and how that changes one server at a time (Raft paper 6, thesis 4.1; Ongaro's fix of 2015).

Invariants: a configuration counts from its append on, not from its commit, and is taken back with its entry; at most
one is uncommitted; none is proposed before an entry of the leader's own term is committed. `outgoing` is the seam for
joint consensus: quorums honour it already. Plain functions over `Configuration`, then the verbs that `replication`
and `core` call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from ..entry import CONFIGURATION, Entry, plain_content
from ..errors import BadRequest, NotLeader, Refused
from .progress import Progress
from .state import LEADER

if TYPE_CHECKING:
    from .core import Raft

NODE_MAX = (1 << 32) - 1
NODES_MAX = 64


class Change(NamedTuple):
    """One step; kind is add (a voter), remove (a voter or learner), add_learner, or promote (a learner to voter)."""

    kind: str
    node: int


@dataclass(slots=True, frozen=True)
class Configuration:
    """The members of a group by node id, ascending. `outgoing`: the other half of a joint configuration, () outside
    one."""

    voters: tuple[int, ...]
    learners: tuple[int, ...] = ()
    outgoing: tuple[int, ...] = ()

    def nodes(self) -> set[int]:
        """Everyone who receives the log."""
        return {*self.voters, *self.learners, *self.outgoing}

    def votes(self, node: int) -> bool:
        """Whether `node` may vote and campaign."""
        return node in self.voters or node in self.outgoing

    def encode(self) -> bytes:
        """The content of a CONFIGURATION entry: msgpack of three arrays."""
        return bytes(msgpack.packb((self.voters, self.learners, self.outgoing)))

    @staticmethod
    def decode(data: bytes) -> Configuration:
        """What `encode` gave. Raises `BadRequest` for anything else."""
        try:
            parts = msgpack.unpackb(
                data, max_array_len=NODES_MAX, max_map_len=0, max_ext_len=0, max_str_len=0, max_bin_len=0
            )
            voters, learners, outgoing = (tuple(part) for part in parts)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise BadRequest(f"not a configuration: {error}") from error
        for part in (voters, learners, outgoing):
            for node in part:
                if type(node) is not int or not 0 < node <= NODE_MAX:
                    raise BadRequest(f"not a node id in a configuration: {node!r}")
            if len(set(part)) != len(part):
                raise BadRequest("a node stands twice in a configuration")
        return Configuration(voters, learners, outgoing)


def apply_change(configuration: Configuration, change: Change) -> Configuration:
    """The configuration after `change`. Raises `Refused` when that makes no sense."""
    kind, node = change
    voters, learners = configuration.voters, configuration.learners
    if configuration.outgoing:
        raise Refused("a joint configuration change is under way; wait until it is finished")
    if not 0 < node <= NODE_MAX:
        raise Refused(f"{node} is not a node id (1 to {NODE_MAX})")
    if kind in ("add", "add_learner"):
        if node in voters:
            raise Refused(f"node {node} is a voter already")
        if node in learners:
            raise Refused(f"node {node} is a learner already" + ("; promote it" if kind == "add" else ""))
        if len(voters) + len(learners) >= NODES_MAX:
            raise Refused(f"a group has at most {NODES_MAX} members")
        if kind == "add":
            return Configuration(tuple(sorted((*voters, node))), learners)
        return Configuration(voters, tuple(sorted((*learners, node))))
    if kind == "promote":
        if node not in learners:
            raise Refused(f"node {node} is not a learner")
        return Configuration(tuple(sorted((*voters, node))), tuple(other for other in learners if other != node))
    if kind != "remove":
        raise Refused(f"{kind!r} is not a membership change")
    if node not in voters and node not in learners:
        raise Refused(f"node {node} is not a member")
    if voters == (node,):
        raise Refused(f"node {node} is the last voter; delete the group instead")
    return Configuration(
        tuple(other for other in voters if other != node), tuple(other for other in learners if other != node)
    )


def decode_entries(entries: Sequence[Entry]) -> list[tuple[int, Configuration]]:
    """The (index, configuration) of every CONFIGURATION entry of a run. Raises `BadRequest`."""
    return [
        (entry.index, Configuration.decode(plain_content(entry))) for entry in entries if entry.kind == CONFIGURATION
    ]


def adopt(raft: Raft, index: int, configuration: Configuration) -> None:
    """The entry at `index` was appended: from now on its configuration counts (paper section 6)."""
    raft.history = (*raft.history, (index, configuration))
    use(raft, index, configuration)


def use(raft: Raft, index: int, configuration: Configuration) -> None:
    """Make `configuration`, set at `index`, the one that counts; a leader adds and drops followers."""
    raft.configuration = configuration
    raft.configuration_index = index
    raft.voter = configuration.votes(raft.node)
    if raft.role == LEADER:
        track(raft)


def track(raft: Raft) -> None:
    """Give every other member a `Progress`, and take it from those who left."""
    nodes = raft.configuration.nodes()
    nodes.discard(raft.node)
    progress = raft.progress
    for node in [node for node in progress if node not in nodes]:
        del progress[node]
    for node in sorted(nodes):
        if node not in progress:
            progress[node] = Progress(raft.log.last_index + 1)
    if raft.transferee not in raft.configuration.voters:
        raft.transferee = 0
    voters = raft.configuration.voters
    others = [progress[node] for node in voters if node != raft.node]
    simple = len(voters) == 3 and len(others) == 2 and not raft.configuration.outgoing
    raft.pair = (others[0], others[1]) if simple else None
    raft.dirty = True


def revert(raft: Raft, from_index: int) -> None:
    """Entries >= `from_index` are overwritten: so are their configurations, and this member's right to vote by them
    (Ra 82e5ca2f)."""
    if not raft.history or raft.history[-1][0] < from_index:
        return
    raft.history = tuple(item for item in raft.history if item[0] < from_index)
    use(raft, *(raft.history[-1] if raft.history else raft.base))


def settle(raft: Raft, applied: int) -> None:
    """Entries <= `applied` can not be taken back: the newest configuration among them becomes the base."""
    while raft.history and raft.history[0][0] <= applied:
        raft.base = raft.history[0]
        raft.history = raft.history[1:]


def configuration_at(raft: Raft, index: int) -> Configuration:
    """The configuration in force at `index` >= applied's: what a snapshot taken there carries."""
    found = raft.base[1]
    for at, configuration in raft.history:
        if at <= index:
            found = configuration
    return found


def propose(raft: Raft, change: Change) -> int:
    """Append the configuration after `change`; return its index. Raises `NotLeader`, `Refused`.

    Not counted against the uncommitted bytes: a full group can still lose a dead member (law 9).
    """
    if raft.role != LEADER:
        raise NotLeader(raft.leader)
    if raft.transferee:
        raise Refused(f"leadership is on its way to node {raft.transferee}")
    if raft.commit < raft.lead_index:
        raise Refused("this leader has not committed an entry of its own term yet; try again")
    if raft.configuration_index > raft.commit:
        raise Refused(f"the change at index {raft.configuration_index} is not committed yet; one at a time")
    configuration = apply_change(raft.configuration, change)
    index = raft.log.last_index + 1
    entry = raft.encode(index, raft.term, CONFIGURATION, configuration.encode())
    assert entry.index == index and entry.term == raft.term and entry.kind == CONFIGURATION
    raft.log.push(entry)
    raft.uncommitted_bytes += entry.size
    raft.dirty = True
    adopt(raft, index, configuration)
    return index

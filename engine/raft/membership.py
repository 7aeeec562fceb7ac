"""The verbs of membership: adopt, take back, propose, leave, promote (Raft paper 6, thesis 4; etcd confchange).

Invariants: a configuration counts from its append on, not from its commit, and is taken back with its entry; at most
one is uncommitted; none is proposed before an entry of the leader's own term is committed (Ongaro's fix of 2015). What
a leader owes the configuration (leaving a joint one, promoting who caught up) is read off the configuration itself, so
a later leader owes it, too. The values stand in `configuration`. Called by `core`, `replication` and `election`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from logyard.protocol.errors import NotLeader, Refused

from ..entry import CONFIGURATION, Entry, plain_content
from .configuration import (
    NODE_MAX,
    NODES_MAX,
    Change,
    Configuration,
    apply_change,
    apply_changes,
    enter_joint,
    leave_joint,
    with_targets,
)
from .progress import REPLICATE, Progress
from .state import LEADER

if TYPE_CHECKING:
    from .core import Raft

__all__ = [
    "NODES_MAX", "NODE_MAX", "Change", "Configuration", "adopt", "apply_change", "apply_changes", "attend",
    "configuration_at", "decode_entries", "enter_joint", "is_stranger", "leave", "leave_joint", "owes", "propose",
    "revert", "settle", "track", "use",
]  # fmt: skip


def decode_entries(entries: Sequence[Entry]) -> list[tuple[int, Configuration]]:
    """Return the (index, configuration) of every CONFIGURATION entry of a run. Raises `BadRequest`."""
    return [
        (entry.index, Configuration.decode(plain_content(entry))) for entry in entries if entry.kind == CONFIGURATION
    ]


def adopt(raft: Raft, index: int, configuration: Configuration) -> None:
    """Put the configuration of the entry at `index`, just appended, in force (paper section 6)."""
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
        progress.pop(node).forget()
    for node in sorted(nodes):
        if node not in progress:
            progress[node] = Progress(raft.log.last_index + 1, raft.window(node))
    if raft.transferee and raft.transferee not in raft.configuration.voters:
        raft.transferee = 0
        raft.changed = True
    voters = raft.configuration.voters
    others = [progress[node] for node in voters if node != raft.node]
    simple = len(voters) == 3 and len(others) == 2 and not raft.configuration.outgoing
    simple = simple and not any(one.round for one in others)
    raft.pair = (others[0], others[1]) if simple else None
    raft.chores = raft.configuration.auto_leave or bool(raft.configuration.promotable)
    raft.dirty = True


def revert(raft: Raft, from_index: int) -> None:
    """Take back the configurations of entries >= `from_index`, which are overwritten, and this member's right to vote
    by them (Ra 82e5ca2f)."""
    if not raft.history or raft.history[-1][0] < from_index:
        return
    raft.history = tuple(item for item in raft.history if item[0] < from_index)
    use(raft, *(raft.history[-1] if raft.history else raft.base))


def settle(raft: Raft, applied: int) -> None:
    """Make the newest configuration among entries <= `applied`, which can not be taken back, the base."""
    while raft.history and raft.history[0][0] <= applied:
        raft.base = raft.history[0]
        raft.history = raft.history[1:]


def configuration_at(raft: Raft, index: int) -> Configuration:
    """Return the configuration in force at `index` >= applied's: what a snapshot taken there carries."""
    found = raft.base[1]
    for at, configuration in raft.history:
        if at <= index:
            found = configuration
    return found


def all_nodes(raft: Raft) -> set[int]:
    """Return the members by any configuration that may be in force somewhere: the newest applied one, and those above
    it."""
    return raft.base[1].nodes().union(*(configuration.nodes() for _, configuration in raft.history))


def before_newest(raft: Raft) -> Configuration:
    """Return the configuration that the newest one took the place of. It is committed, whatever a restart knows of the
    commit index: one change at a time."""
    return raft.history[-2][1] if len(raft.history) > 1 else raft.base[1]


def propose(raft: Raft, changes: Sequence[Change], auto_leave: bool = True) -> int:
    """Append the configuration after `changes`; return its index. Raises `NotLeader`, `Refused`.

    One voter at most is one simple step. More, or any list with `auto_leave` False, is a joint one: this leader, or a
    later one, leaves it when it is committed, or with `auto_leave` False when `leave` is asked for. Not counted
    against the uncommitted bytes: a full group can still lose a dead member (law 9).
    """
    _check_may_change(raft)
    changes = with_targets(changes, raft.log.last_index)
    for change in changes:
        if change.kind == "promote":
            _check_caught_up(raft, change.node)
    if auto_leave:
        return _append(raft, apply_changes(raft.configuration, changes))
    return _append(raft, enter_joint(raft.configuration, changes, False))


def leave(raft: Raft) -> int:
    """Append what the joint configuration in force leads to; return its index. Raises `NotLeader`, `Refused`."""
    _check_may_change(raft)
    return _append(raft, leave_joint(raft.configuration))


def _check_may_change(raft: Raft) -> None:
    if raft.role != LEADER or raft.leaving:
        raise NotLeader(raft.leader if raft.role != LEADER else 0)
    if raft.transferee:
        raise Refused(f"leadership is on its way to node {raft.transferee}")
    if raft.commit < raft.lead_index:
        raise Refused("this leader has not committed an entry of its own term yet; try again")
    if raft.configuration_index > raft.commit:
        raise Refused(f"the change at index {raft.configuration_index} is not committed yet; one at a time")


def _check_caught_up(raft: Raft, node: int) -> None:
    """Refuse to promote a learner by hand unless what it lacks fits one follower's window and is still in memory.

    Else the group could wait for it at its next commit. (etcd's rule, nine tenths of the leader's index, allows a lag
    of a million entries in a log of ten.) Who is further behind is better made `promotable`.
    """
    progress = raft.progress.get(node)
    if node not in raft.configuration.learners or progress is None:
        return
    last = raft.log.last_index
    lag = f"learner {node} has stored {progress.match} of {last} entries"
    if node not in raft.live or progress.state != REPLICATE or progress.round:
        raise Refused(f"{lag} and does not receive now; make it promotable, or try again later")
    if progress.match < last:
        found = raft.log.window(progress.match + 1, last, raft.limits.inflight_bytes)
        if found is None or len(found[0]) < last - progress.match:
            raise Refused(f"{lag}: more than {raft.limits.inflight_bytes} bytes behind; make it promotable instead")


def _append(raft: Raft, configuration: Configuration) -> int:
    index = raft.log.last_index + 1
    entry = raft.encode(index, raft.term, CONFIGURATION, configuration.encode())
    assert entry.index == index and entry.term == raft.term and entry.kind == CONFIGURATION
    raft.log.push(entry)
    raft.uncommitted_bytes += entry.size
    raft.dirty = True
    adopt(raft, index, configuration)
    return index


def owes(raft: Raft) -> int:
    """Return what a leader has to do for its configuration: -1 leave the joint one, n promote learner n, 0 nothing
    now."""
    configuration = raft.configuration
    if configuration.outgoing:
        return -1 if configuration.auto_leave else 0
    for node, target in configuration.promotable:
        progress = raft.progress.get(node)
        if progress is not None and progress.match >= target and node in raft.live and not progress.round:
            return node
    return 0


def attend(raft: Raft) -> None:
    """Do what `owes` says, as soon as a change may be proposed. Asked again in each `Ready` and tick until done."""
    if raft.commit < raft.lead_index or raft.configuration_index > raft.commit or raft.transferee or raft.leaving:
        return
    due = owes(raft)
    if due < 0:
        _append(raft, leave_joint(raft.configuration))
    elif due:
        _append(raft, apply_change(raft.configuration, Change("promote", due)))


def is_stranger(raft: Raft, node: int) -> bool:
    """Return whether `node` can have nothing to say: this member is the only voter, and `node` is neither member nor
    leader.

    Whoever leads after a sole voter needs an entry that this voter stored first, and knows as a configuration. So what
    comes from outside is of a lineage that ended: a removed member, or the others after a `force_shrink`.
    """
    configuration = raft.configuration
    return (
        configuration.voters == (raft.node,)
        # A replica made anew begins with the group's first configuration, which says nothing yet.
        and (raft.log.last_term, raft.log.last_index) >= raft.promise
        and raft.configuration_index <= raft.log.stable
        and node != raft.leader
        and node not in configuration.nodes()
    )

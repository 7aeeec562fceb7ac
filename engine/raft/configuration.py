"""Configurations as values: who is in a group, and what a list of changes makes of it (Raft paper 6, thesis 4).

Pure functions: a configuration and changes in, the new configuration or a `Refused` with the reason out. One step
that changes at most one voter is *simple* (thesis 4.1: its quorums meet those before it); anything more is *joint*
(thesis 4.3: two majorities at once, until it is left). Invariants: voters, learners and outgoing voters hold no node
twice; a learner is in neither half; `promotable` names learners; `demoted` names outgoing voters that stay as
learners. Called by `membership` and the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgpack

from logyard.protocol.errors import BadRequest, Refused

NODE_MAX = (1 << 32) - 1
NODES_MAX = 64
TARGET_MAX = (1 << 63) - 1

KINDS = ("add", "add_learner", "add_promotable", "promote", "demote", "remove")


class Change(NamedTuple):
    """One step for one node.

    ============== ==========================================================================================
    add            a new voter (a learner is promoted instead)
    add_learner    receives the log, never votes
    add_promotable a learner (also one that is there) that the leader makes a voter when it has stored `target`;
                   0: the leader's last index when the change is proposed (Ra: promotable)
    promote        a learner becomes a voter
    demote         a voter becomes a learner
    remove         a voter or learner leaves
    ============== ==========================================================================================
    """

    kind: str
    node: int
    target: int = 0


@dataclass(slots=True, frozen=True)
class Configuration:
    """The members of a group by node id, ascending.

    `outgoing`: the other half of a joint configuration, () outside one. `promotable`: (learner, target index) of
    learners that become voters when they have caught up. `demoted`: outgoing voters that are learners when the joint
    phase ends (etcd learners_next). `auto_leave`: the leader ends the joint phase by itself.
    """

    voters: tuple[int, ...]
    learners: tuple[int, ...] = ()
    outgoing: tuple[int, ...] = ()
    promotable: tuple[tuple[int, int], ...] = ()
    demoted: tuple[int, ...] = ()
    auto_leave: bool = False

    @property
    def joint(self) -> bool:
        """Whether two majorities must agree."""
        return bool(self.outgoing)

    def nodes(self) -> set[int]:
        """Return all members, of both configurations while two are in force."""
        return {*self.voters, *self.learners, *self.outgoing}

    def votes(self, node: int) -> bool:
        """Return whether `node` may vote and campaign."""
        return node in self.voters or node in self.outgoing

    def encode(self) -> bytes:
        """Return the content of a CONFIGURATION entry: msgpack of three arrays; of six fields where the rest says
        anything, so that what the first release wrote, and reads, stays as it was."""
        parts: tuple[object, ...] = (self.voters, self.learners, self.outgoing)
        if self.promotable or self.demoted or self.auto_leave:
            parts = (*parts, self.promotable, self.demoted, self.auto_leave)
        return bytes(msgpack.packb(parts))

    @staticmethod
    def decode(data: bytes) -> Configuration:
        """Return what `encode` gave. Raises `BadRequest` for anything else."""
        try:
            parts = msgpack.unpackb(
                data, max_array_len=NODES_MAX, max_map_len=0, max_ext_len=0, max_str_len=0, max_bin_len=0
            )
            if len(parts) == 3:
                parts = [*parts, (), (), False]
            voters, learners, outgoing, pairs, demoted = (tuple(part) for part in parts[:5])
            (auto_leave,) = parts[5:]
            promotable = tuple((node, target) for node, target in pairs)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise BadRequest(f"not a configuration: {error}") from error
        for part in (voters, learners, outgoing, demoted, tuple(node for node, _ in promotable)):
            for node in part:
                if type(node) is not int or not 0 < node <= NODE_MAX:
                    raise BadRequest(f"not a node id in a configuration: {node!r}")
            if len(set(part)) != len(part):
                raise BadRequest("a node stands twice in a configuration")
        if any(type(target) is not int or not 0 <= target <= TARGET_MAX for _, target in promotable):
            raise BadRequest("not an index in a configuration")
        if type(auto_leave) is not bool or (auto_leave and not outgoing):
            raise BadRequest("only a joint configuration can be left")
        if {*learners} & {*voters, *outgoing}:
            raise BadRequest("a node is a voter and a learner of a configuration")
        if not {node for node, _ in promotable} <= {*learners} or not {*demoted} <= {*outgoing} - {*voters}:
            raise BadRequest("a configuration promotes or demotes who can not be")
        return Configuration(voters, learners, outgoing, promotable, demoted, auto_leave)


class _Draft:
    """The members while a list of changes is applied; `learners` gives each one's target, None: it stays one."""

    __slots__ = ("voters", "learners")

    def __init__(self, configuration: Configuration) -> None:
        self.voters = {*configuration.voters}
        targets = dict(configuration.promotable)
        self.learners: dict[int, int | None] = {node: targets.get(node) for node in configuration.learners}

    def apply(self, change: Change) -> None:
        kind, node, target = change
        if kind not in KINDS:
            raise Refused(f"{kind!r} is not a membership change; use one of {', '.join(KINDS)}")
        if not 0 < node <= NODE_MAX:
            raise Refused(f"{node} is not a node id (1 to {NODE_MAX})")
        if kind in ("add", "add_learner", "add_promotable"):
            if node in self.voters:
                raise Refused(f"node {node} is a voter already" + ("; demote it" if kind == "add_learner" else ""))
            if kind == "add":
                if node in self.learners:
                    raise Refused(f"node {node} is a learner already; promote it")
                self.voters.add(node)
            elif kind == "add_learner":
                if node in self.learners:
                    raise Refused(f"node {node} is a learner already")
                self.learners[node] = None
            else:
                if not 0 <= target <= TARGET_MAX:
                    raise Refused(f"{target} is not a target index")
                if self.learners.get(node) is not None:
                    raise Refused(f"node {node} is promotable already")
                self.learners[node] = target
        elif kind == "promote":
            if node not in self.learners:
                raise Refused(f"node {node} is not a learner")
            del self.learners[node]
            self.voters.add(node)
        elif kind == "demote":
            if node not in self.voters:
                raise Refused(f"node {node} is not a voter")
            self.voters.discard(node)
            self.learners[node] = None
        elif node in self.voters:
            self.voters.discard(node)
        elif node in self.learners:
            del self.learners[node]
        else:
            raise Refused(f"node {node} is not a member")


def _drafted(configuration: Configuration, changes: Sequence[Change]) -> _Draft:
    """Check `changes` one by one and as a list. Raises `Refused`."""
    if configuration.outgoing:
        raise Refused("a joint configuration change is under way; wait until it is finished")
    if not changes:
        raise Refused("a membership change without a change")
    named = [change.node for change in changes]
    twice = sorted({node for node in named if named.count(node) > 1})
    if twice:
        raise Refused(f"contradictory: node {twice[0]} is named twice in one list of changes")
    draft = _Draft(configuration)
    for change in changes:
        draft.apply(change)
    if not draft.voters:
        last = next((change.node for change in changes if change.kind in ("remove", "demote")), 0)
        if not last:
            raise Refused("a group without voters can not decide on a change")
        raise Refused(f"node {last} is the last voter; delete the group instead")
    if len(draft.voters | draft.learners.keys() | {*configuration.voters}) > NODES_MAX:
        raise Refused(f"a group has at most {NODES_MAX} members")
    return draft


def _targets(learners: dict[int, int | None]) -> tuple[tuple[int, int], ...]:
    return tuple((node, target) for node, target in sorted(learners.items()) if target is not None)


def apply_changes(configuration: Configuration, changes: Sequence[Change]) -> Configuration:
    """Return the configuration after `changes`: in one step if at most one voter comes or goes (etcd's rule for simple
    changes; learners may be many), else joint, to be left by the leader. Raises `Refused` with the reason."""
    draft = _drafted(configuration, changes)
    if len(draft.voters ^ {*configuration.voters}) > 1:
        return _joined(configuration, draft, True)
    return Configuration(tuple(sorted(draft.voters)), tuple(sorted(draft.learners)), (), _targets(draft.learners))


def apply_change(configuration: Configuration, change: Change) -> Configuration:
    """Apply one change, as `apply_changes` does."""
    return apply_changes(configuration, (change,))


def enter_joint(configuration: Configuration, changes: Sequence[Change], auto_leave: bool = True) -> Configuration:
    """Return the joint configuration on the way to `changes`, however few. Raises `Refused`."""
    return _joined(configuration, _drafted(configuration, changes), auto_leave)


def _joined(configuration: Configuration, draft: _Draft, auto_leave: bool) -> Configuration:
    outgoing = configuration.voters
    if not outgoing:
        raise Refused("a group without voters can not decide on a change")
    # Still a voter of the outgoing half, it becomes a learner only when that is left.
    demoted = tuple(sorted(draft.learners.keys() & {*outgoing}))
    learners = {node: target for node, target in draft.learners.items() if node not in outgoing}
    return Configuration(
        tuple(sorted(draft.voters)), tuple(sorted(learners)), outgoing, _targets(learners), demoted, auto_leave
    )


def leave_joint(configuration: Configuration) -> Configuration:
    """Return what a joint configuration leads to: the outgoing half goes, its demoted voters stay as learners. Raises
    `Refused` outside one."""
    if not configuration.outgoing:
        raise Refused("no joint configuration change is under way")
    learners = tuple(sorted({*configuration.learners, *configuration.demoted}))
    return replace(configuration, learners=learners, outgoing=(), demoted=(), auto_leave=False)


def with_targets(changes: Iterable[Change], last_index: int) -> list[Change]:
    """Return `changes` with the leader's last index for each target that was left open."""
    return [
        change._replace(target=last_index) if change.kind == "add_promotable" and not change.target else change
        for change in changes
    ]

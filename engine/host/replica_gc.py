"""Members that left: how a node learns that its replica is none any more, drops it, and is let in again.

A leader stops sending to a member as soon as its removal is appended, so the member itself mostly never hears of it.
Who has applied the configuration without it says so: when that is applied, and whenever the member speaks.
Invariants: a replica goes only when its node is not in the configuration at a *committed* position beyond the newest
configuration it knows (if it leads: of a term beyond its own); of what goes, (term, vote) and the position of the last
entry stay for good, and a replica made anew votes by them (`Raft.promise`), so that dropping one is, for elections, as
if it were still there; a new one is made only when a member's configuration above has it again. Called by `inbound`,
`applier` and `groups`.

A node may also never have been a member in deed: the definition came when its name was another group's. Then it
refuses for good (`Departed` at index 0), until a member offers the group with a log that is not empty: somebody led it,
so it exists. A replica with an empty log that is refused by so many voters that the rest is no majority is of a
creation that failed, whose creator could not say so: it goes, and refuses as well.

Why the position matters: two of three may leave in one joint change. With their logs forgotten they would help the
third, which has heard of nothing, to be elected by the old configuration, and committed entries would be taken back.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from logyard.protocol.errors import LogyardError

from ..log import checkpoint_rows as rows
from ..log.meta_rows import Departed
from ..log.wal import WalItem
from ..raft.state import LEADER
from ..replica.member import STOPPED, Member
from ..transport.blobs import REFUSED_GROUPS, REMOVED_GROUPS, SendBlob
from ..types import position
from . import forks

log = logging.getLogger(__name__)

REFUSES = (0, 0, 0, 0, 0)


class Retire(Protocol):
    """Who ends members."""

    def silence(self, member: Member, reason: str, state: str) -> None:
        """Let a replica take no part from now on."""
        ...

    def detach(self, member: Member, reason: str) -> None:
        """Silence a replica that this node has no more."""
        ...


class Keeper(Protocol):
    """Who keeps what only a replica has that goes."""

    async def keep(self, member: Member, first: int, lineage: forks.Lineage) -> str:
        """Write everything of a stopped replica from `first` on to a file, and return its path. Raises `LogyardError`,
        `OSError`."""
        ...


class Rows(NamedTuple):
    """What makes it durable that replicas go, and come back."""

    commit: Callable[[Callable[[], Iterable[rows.Put]]], Awaitable[None]]
    """Store rows that are built when it is their turn."""
    forget: Callable[[Sequence[Member], Mapping[int, Callable[[], Iterable[rows.Put]]]], Awaitable[None]]
    """Let replicas go, with the rows, by uid, that say so; their payloads are dead."""
    settle: Callable[[], Awaitable[None]]
    """Store what is decided and was not stored yet. Raises `NoSpace`."""
    write: Callable[[Sequence[WalItem]], Awaitable[None]]
    """Write these records to the WAL, durable on return."""


class ReplicaGC:
    """Replicas that left this node, and those that are to. `departed` by uid, filled by recovery from the meta store;
    `forked`: what only they had of so many of them was kept. `find` wakes a group's member."""

    def __init__(
        self,
        node_id: int,
        find: Callable[[int], Member | None],
        retire: Retire,
        forks: Keeper,
        rows: Rows,
        send: SendBlob,
        spawn: Callable[..., None],
    ) -> None:
        self.departed: dict[int, Departed] = {}
        self.forked = 0
        self._node_id = node_id
        self._find = find
        self._retire = retire
        self._forks = forks
        self._rows = rows
        self._send = send
        self._spawn = spawn
        self._told: set[tuple[int, int]] = set()
        # By uid of an unborn group here: the nodes that refuse it.
        self._refused_by: dict[int, set[int]] = {}

    def forget_told(self, node: int = 0) -> None:
        """Tell again who still speaks: called by the ticker every second, and for one node when its link is new."""
        self._told = {pair for pair in self._told if node and pair[0] != node}

    # Telling others

    def tell(self, node: int, member: Member) -> None:
        """Say to `node`, which speaks for a group whose configuration here lacks it, that it is out, if that is
        committed."""
        raft = member.raft
        if not raft.applied or node in raft.base[1].nodes() or node in raft.configuration.nodes():
            return
        if (node, member.uid) in self._told:
            return
        index = raft.applied
        groups = [[member.uid, index, raft.log.term(index) or 0]]
        header = {"groups": groups, "lineages": [forks.lineage_of(member)]}
        if self._send(node, REMOVED_GROUPS, 0, header):
            # Else it is told when it speaks again, and a learner that comes back speaks once.
            self._told.add((node, member.uid))

    def applied(self, member: Member, before: Iterable[int]) -> None:
        """Tell who is out by a configuration that was applied; `before` are the members under the one before it."""
        nodes = member.raft.configuration.nodes()
        if self._node_id in nodes:
            for node in {*before} - nodes:
                self._told.discard((node, member.uid))
                self.tell(node, member)

    # Being told

    def on_told(self, groups: Sequence[Sequence[int]], lineages: Sequence[forks.Lineage] = ()) -> None:
        """Hear that another member has applied configurations without this node. `lineages`: what it has applied of
        each group; programs of the first release do not say."""
        for number, (uid, index, term) in enumerate(groups):
            lineage = lineages[number] if number < len(lineages) else ()
            member = self._find(uid)
            if member is not None and not member.raft.stopped and self._is_out(member, index, term):
                self._spawn(self._drop, uid, index, term, lineage)

    def _is_out(self, member: Member, index: int, term: int) -> bool:
        raft = member.raft
        left = self.departed.get(member.uid)
        if left is not None and position(term, index) <= left.admitted:
            return False
        if raft.role == LEADER:
            # Whatever is committed up to its own term it has. Above that it was deposed, or its lineage ended in a
            # `force_shrink`.
            return term > raft.term
        known = raft.configuration_index
        # None: compacted here, so committed; else an entry of an earlier term can't stand above a committed one of a
        # later term: it will be overwritten.
        known_term = raft.log.term(known)
        here, there = (0 if known_term is None else known_term, known), (0 if known_term is None else term, index)
        return there > here or (there == here and self._node_id not in raft.configuration.nodes())

    async def _drop(self, uid: int, index: int, term: int, lineage: forks.Lineage = ()) -> None:
        # What came before this task ran may have made it a member, and been acknowledged, or let it fall asleep.
        member = self._find(uid)
        if member is None or member.raft.stopped or not self._is_out(member, index, term):
            return
        first = forks.first_of(member, lineage)
        if first and not (await self._keep_fork(member, first, lineage) and self._find(uid) is member):
            return
        log.info("group %s: node %d is no member since index %d", member.spec.name, self._node_id, index)
        await self._leave(
            member, position(term, index), f"this node is no member of the group any more (index {index})"
        )

    async def _keep_fork(self, member: Member, first: int, lineage: forks.Lineage) -> bool:
        """Keep what only this replica has, before it goes; return False where it can't be kept: then it stays,
        stopped."""
        name, last = member.spec.name, member.raft.log.last_index
        self._retire.silence(member, "forked: what its group's lineage has not is being kept", STOPPED)
        try:
            path = await self._forks.keep(member, first, lineage)
        except (LogyardError, OSError) as error:
            member.explain(forks.why_it_stays(error))
            log.error("group %s stopped: %s", name, member.reason)
            return False
        self.forked += 1
        log.error("group %s: entries %d to %d are not in its lineage; kept in %s", name, first, last, path)
        return True

    async def _leave(self, member: Member, removed_at: int, reason: str) -> None:
        raft = member.raft
        last = max((raft.log.last_term, raft.log.last_index), raft.promise)
        left = self.departed[member.uid] = Departed(raft.term, raft.vote, *last, removed_at)
        self._retire.detach(member, reason)
        await self._rows.forget([member], {member.uid: lambda: rows.departed(member.uid, left)})

    # Groups that were never born

    @staticmethod
    def admission(member: Member) -> int:
        """Return what a definition is offered with: the position of the configuration it stands for, 0 if the group is
        unborn."""
        raft = member.raft
        return position(raft.term, max(raft.configuration_index, min(raft.log.last_index, 1)))

    async def refuse(self, uids: Sequence[int]) -> None:
        """Let unborn groups get no replica here as long as they are that: durable on return. The caller sees to it that
        none of them is here, or being stored."""
        fresh = [uid for uid in uids if uid not in self.departed]
        if fresh:
            await self._rows.commit(lambda: [rows.departed_row(uid, REFUSES) for uid in fresh])
            self.departed.update((uid, Departed(*REFUSES)) for uid in fresh)

    def on_refused(self, node: int, uids: Sequence[int]) -> None:
        """Hear that `node` will have no replica of these before somebody led them."""
        for uid in uids:
            member = self._find(uid)
            if member is None or not self.unborn(member):
                self._refused_by.pop(uid, None)
                continue
            voters = {*member.spec.voters}
            refused_by = self._refused_by.setdefault(uid, set())
            refused_by.update({node} & voters)
            if (len(voters) - len(refused_by)) * 2 <= len(voters):
                self._spawn(self.drop_unborn, uid)

    def unborn(self, member: Member) -> bool:
        """Return whether nobody is known here who ever led it: its log is empty, it does not lead, and this node was
        not let in again, which takes one who did."""
        raft = member.raft
        empty = not raft.log.last_index and not raft.configuration_index and member.uid not in self.departed
        return empty and raft.role != LEADER and not raft.stopped and not member.damaged

    async def drop_unborn(self, uid: int) -> None:
        """Let a group go whose creation failed: this node refuses it from here on, and keeps its vote."""
        self._refused_by.pop(uid, None)
        member = self._find(uid)
        if member is not None and self.unborn(member):
            log.info("group %s, whose creation failed, goes", member.spec.name)
            await self._leave(member, 0, "its creation failed")

    def forget(self, uid: int) -> None:
        """Promise nothing of a group any more, as it is deleted."""
        self.departed.pop(uid, None)
        self._refused_by.pop(uid, None)

    # Coming back

    def admits(self, uid: int, admitted: Mapping[int, int]) -> bool:
        """Return whether a definition may make a replica: this node never left, or `admitted` names a configuration
        that has it again."""
        left = self.departed.get(uid)
        return left is None or admitted.get(uid, 0) > left.removed_at

    def refuses(self, uid: int, admitted: Mapping[int, int]) -> bool:
        """Return whether no replica is made here because the group is unborn, for all that `admitted` says."""
        left = self.departed.get(uid)
        return left is not None and not left.removed_at and not self.admits(uid, admitted)

    async def readmit(self, uids: Iterable[int], admitted: Mapping[int, int]) -> list[rows.Put]:
        """Make what the WAL has of old replicas void, before groups that this node left get new ones. Returns the rows
        to store with their definitions."""
        back = [uid for uid in uids if uid in self.departed]
        if not back:
            return []
        # That they left is decided, and may not be stored yet: without it their void records would break a promise.
        await self._rows.settle()
        await self._rows.write([WalItem(uid, truncate=1) for uid in back])
        # Who was deleted meanwhile promises nothing any more.
        back = [uid for uid in back if uid in self.departed]
        for uid in back:
            self.departed[uid] = self.departed[uid]._replace(admitted=admitted[uid])
        return [rows.departed_row(uid, self.departed[uid]) for uid in back]

    def on_blob(self, node: int, kind: int, header: Mapping[str, Any]) -> None:
        """Take what another node says of replicas that are to go."""
        if kind == REFUSED_GROUPS:
            self.on_refused(node, header["uids"])
        else:
            groups = [(int(uid), int(index), int(term)) for uid, index, term in header["groups"]]
            self.on_told(groups, header.get("lineages", ()))

"""What a node says of itself: counters, sizes, one row a group. Reads memory only, so it never waits for a group or a
disk.

`NodeStatus` sums what the groups have and adds what the node's parts say, by key; `node` composes which part says what.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from logyard.engine.host.leader_cache import LeaderCache
from logyard.engine.log.wal import Wal
from logyard.engine.ports import HomePort, StorePort
from logyard.engine.quiesce.names import Names
from logyard.engine.quiesce.quiesced_table import QuiescedTable, Row
from logyard.engine.raft.state import FOLLOWER, LEADER, ROLE_NAMES
from logyard.engine.replica import effects
from logyard.engine.replica.member import ASLEEP, HALTED, RUNNING, Member
from logyard.machines.log import AppendLog

NO_WRITER: Mapping[str, Any] = {
    "pid": 0, "starts": 0, "jobs": 0, "poisoned": 0, "job": "", "last_end": "", "set_aside": ()
}  # fmt: skip
"""The writer's row of a node whose storage jobs run in threads."""


class Groups(NamedTuple):
    """This node's groups, awake and asleep."""

    node_id: int
    names: Names
    members: Mapping[int, Member]
    quiesced: QuiescedTable
    leader_cache: LeaderCache
    homes: Callable[[int], Sequence[HomePort]]
    """Which generations have a group's payloads."""


class Stored(NamedTuple):
    """Where payloads lie on this node."""

    wal: Wal
    store: StorePort
    wal_live: Callable[[], int]
    """Payload bytes in WAL files that no release has named yet."""

    def disk_bytes(self) -> int:
        """Return the allocated bytes of everything that holds payloads: WAL files (spares included) and generations."""
        return self.wal.allocated_bytes() + self.store.disk_bytes()


class _Sums:
    """Over the members of a node, in one pass: there may be a hundred thousand."""

    def __init__(self, members: Iterable[Member]) -> None:
        self.led = self.stopped = self.halted = self.applied = self.commit = 0
        self.inflight_bytes = self.snapshot_bytes = self.snapshots = 0
        for member in members:
            raft = member.raft
            self.led += raft.role == LEADER
            self.stopped += member.state != RUNNING
            self.halted += member.state == HALTED
            self.applied += raft.applied
            self.commit += raft.commit
            self.inflight_bytes += member.proposals.bytes
            self.snapshot_bytes += member.snapshot_bytes
            self.snapshots += member.snapshot_index > 0


class NodeStatus:
    """The node's figures. `said`: what its parts say, by key."""

    def __init__(self, groups: Groups, stored: Stored, said: Mapping[str, Callable[[], Any]]) -> None:
        self._groups = groups
        self._stored = stored
        self._said = said

    def read(self) -> dict[str, Any]:
        """Return the node's figures, sizes in bytes; `live` are payload bytes that no release has named yet."""
        here, stored = self._groups, self._stored
        sums, sleepers = _Sums(here.members.values()), here.quiesced
        in_wal = stored.wal_live()
        generations = stored.store.generations()
        in_generations = sum(one.live for one in generations)
        return {
            "node": here.node_id,
            "pid": os.getpid(),
            "groups": len(here.members) + len(sleepers),
            "hibernating": len(sleepers),
            "led": sums.led + sleepers.led,
            "stopped": sums.stopped,
            "halted": sums.halted,
            "applied": sums.applied + sleepers.entries,
            "commit": sums.commit + sleepers.entries,
            "elections": here.leader_cache.elections,
            "leaderships_lost": here.leader_cache.lost,
            "inflight_bytes": sums.inflight_bytes,
            "wal_bytes_live": in_wal,
            "generations_bytes_live": in_generations,
            "payload_live_bytes": in_wal + in_generations,
            "payload_disk_bytes": stored.disk_bytes(),
            "snapshot_bytes": sums.snapshot_bytes + sleepers.bytes,
            "snapshots": sums.snapshots + len(sleepers),
            "generations": [
                {"id": one.id, "total": one.total, "live": one.live, "sealed": one.sealed} for one in generations
            ],
            "memory_rss": _resident_bytes(),
            **{key: say() for key, say in self._said.items()},
        }


class GroupStatus:
    """What this node says of its groups. Asks and wakes none."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def _behind(self, after: str, limit: int) -> Iterator[tuple[str, int, Member | None, Row | None]]:
        """Yield name, uid and member or row of at most `limit` groups behind a name, in order; fewer: there are no
        more. A name is taken before its group is durable, and is none of these then."""
        here = self._groups
        while limit:
            wanted = limit
            names = here.names.behind(after, wanted)
            for name in names:
                uid = here.names[name]
                member, row = here.members.get(uid), None
                if member is None:
                    try:
                        row = here.quiesced.row(uid)
                    except KeyError:
                        continue
                limit -= 1
                yield name, uid, member, row
            if len(names) < wanted:
                return
            after = names[-1]

    def page(self, after: str, limit: int) -> list[dict[str, Any]]:
        """Return a row for each of at most `limit` groups behind a name, in the order of their names; fewer: there are
        no more."""
        found = []
        for _, uid, member, row in self._behind(after, limit):
            if member is not None:
                found.append(self.describe(member, brief=True))
            elif row is not None:
                found.append(self._asleep(uid, row))
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return a row a group."""
        here = self._groups
        return [self.describe(member, brief=True) for member in here.members.values()] + [
            self._asleep(uid, row) for uid, row in here.quiesced.rows()
        ]

    def describe(self, member: Member, brief: bool) -> dict[str, Any]:
        """Describe one group on this node."""
        raft = member.raft
        row: dict[str, Any] = {
            "name": member.spec.name,
            "uid": member.uid,
            "node": self._groups.node_id,
            "machine": member.spec.machine,
            "state": member.shown_state,
            "reason": member.reason,
            "role": ROLE_NAMES[raft.role],
            "leader": raft.leader,
            "term": raft.term,
            "last": raft.log.last_index,
            "commit": raft.commit,
            "applied": raft.applied,
            "snapshot": member.snapshot_index,
            "snapshot_bytes": member.snapshot_bytes,
        }
        machine = member.machine
        if isinstance(machine, AppendLog):
            row |= {"start": machine.start, "end": machine.end}
        if brief:
            return row
        if isinstance(machine, AppendLog) and machine.retention is not None and machine.producers is not None:
            row |= {"retention": machine.retention.policy._asdict(), "producers": len(machine.producers.by_number)}
        row["machine_state"] = effects.describe(member)
        configuration = raft.configuration
        row |= {
            "voters": list(configuration.voters),
            "learners": list(configuration.learners),
            "outgoing": list(configuration.outgoing),
            "promotable": [list(pair) for pair in configuration.promotable],
            "first": raft.log.first_index,
            "stable": raft.log.stable,
            # One that a snapshot covers is stored still, and means nothing any more.
            "floor": member.floor if member.floor > member.snapshot_index else 0,
            "created": member.spec.created,
            "inflight_bytes": member.proposals.inflight_bytes,
            "queued_bytes": member.proposals.queue_bytes,
            "sessions": len(member.sessions.by_id) if member.sessions is not None else 0,
            "session_reply_bytes": member.sessions.bytes if member.sessions is not None else 0,
            "segments": [run._asdict() for run in member.segments],
            "ring": [run._asdict() for run in member.ring_runs],
            "homes": [[home.first, home.last, home.generation] for home in self._groups.homes(member.uid)],
            "released_before": list(member.liveness.released_before),
            "quiet": raft.is_quiet,
        }
        if raft.role == LEADER:
            row["progress"] = {node: {"match": one.match, "next": one.next} for node, one in raft.progress.items()}
        return row

    def board(self, after: str, limit: int) -> list[list[Any]]:
        """Return at most `limit` groups of this node by name, those behind `after` (fewer: there are no more): see
        `client.board.Standing` for the columns.

        From this node's own tables: no group is asked, whatever state it is in.
        """
        here = self._groups
        found: list[list[Any]] = []
        for name, uid, member, row in self._behind(after, limit):
            if row is not None:
                found.append(self._sleeper_standing(name, uid, row))
            elif member is not None:
                raft, configuration = member.raft, member.raft.configuration
                standing = here.leader_cache.of(member.uid)
                found.append(
                    [
                        name, member.uid, raft.leader, raft.term, standing.since_ms, ROLE_NAMES[raft.role],
                        member.shown_state,
                        list(configuration.voters), list(configuration.learners), list(configuration.outgoing),
                    ]
                )  # fmt: skip
        return found

    def key_metrics(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Return what is known of each group without asking it (Ra's key_metrics): also of stopped and of busy ones.

        `leader_since_ms` is a wall-clock time of this node, `pending_bytes` are queued or not yet committed here,
        `last_term` is the last entry's (0: not known, of one that sleeps). Names without a group are left out.
        """
        here = self._groups
        found = []
        for name in names:
            uid = here.names.get(name, 0)
            member = here.members.get(uid)
            if member is None:
                if uid in here.quiesced:
                    found.append(self._sleeper_metrics(uid))
                continue
            raft = member.raft
            found.append(
                {
                    "name": name,
                    "uid": member.uid,
                    "state": member.shown_state,
                    "reason": member.reason,
                    "role": ROLE_NAMES[raft.role],
                    "membership": "voter" if raft.voter else "learner",
                    "leader": raft.leader,
                    "leader_since_ms": here.leader_cache.of(member.uid).since_ms,
                    "term": raft.term,
                    "last": raft.log.last_index,
                    "last_term": raft.log.last_term,
                    "stable": raft.log.stable,
                    "commit": raft.commit,
                    "applied": raft.applied,
                    "snapshot": member.snapshot_index,
                    "snapshot_bytes": member.snapshot_bytes,
                    "pending_bytes": member.proposals.bytes,
                }
            )
        return found

    def _asleep(self, uid: int, row: Row) -> dict[str, Any]:
        """Describe one hibernating group on this node, as briefly as its row says it."""
        node = self._groups.node_id
        found: dict[str, Any] = {
            "name": row.name,
            "uid": uid,
            "node": node,
            "machine": row.shape.machine,
            "state": ASLEEP,
            "reason": "",
            "role": ROLE_NAMES[LEADER if row.leader == node else FOLLOWER],
            "leader": row.leader,
            "term": row.term,
            "last": row.last,
            "commit": row.last,
            "applied": row.last,
            "snapshot": row.last,
            "snapshot_bytes": row.size,
        }
        if row.shape.machine == "log":
            found |= {"start": row.start, "end": row.end}
        return found

    def _sleeper_standing(self, name: str, uid: int, row: Row) -> list[Any]:
        role = ROLE_NAMES[LEADER if row.leader == self._groups.node_id else FOLLOWER]
        voters, learners = list(row.shape.voters), list(row.shape.learners)
        return [name, uid, row.leader, row.term, row.since_ms, role, ASLEEP, voters, learners, []]

    def _sleeper_metrics(self, uid: int) -> dict[str, Any]:
        here = self._groups
        row = here.quiesced.row(uid)
        brief = self._asleep(uid, row)
        for key in ("node", "machine", "start", "end"):
            brief.pop(key, None)
        return brief | {
            "membership": "voter" if here.node_id in row.shape.voters else "learner",
            "leader_since_ms": row.since_ms,
            "last_term": 0,
            "stable": row.last,
            "pending_bytes": 0,
        }


def _resident_bytes() -> int:
    """Return the resident memory of this process; 0 where there is no descriptor left to ask with: all else can be
    told all the same."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0

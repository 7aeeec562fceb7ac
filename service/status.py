"""What a node says of itself: counters, sizes, one row a group. Reads memory only, so it never waits for a group or a
disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from logyard.engine.host.engine import System
from logyard.engine.log.wal import Wal
from logyard.engine.ports import StorePort
from logyard.engine.quiesce.quiesced_table import Row
from logyard.engine.raft.core import LEADER
from logyard.engine.raft.state import FOLLOWER, ROLE_NAMES
from logyard.engine.replica import effects
from logyard.engine.replica.member import ASLEEP, HALTED, RUNNING, Member
from logyard.machines.log import AppendLog

NO_WRITER: Mapping[str, Any] = {
    "pid": 0, "starts": 0, "jobs": 0, "poisoned": 0, "job": "", "last_end": "", "set_aside": ()
}  # fmt: skip
"""The writer's row of a node whose storage jobs run in threads."""


class _Sums:
    """Over the members of a node, in one pass: there may be a hundred thousand."""

    def __init__(self, system: System) -> None:
        self.led = self.stopped = self.halted = self.applied = self.commit = 0
        self.inflight_bytes = self.snapshot_bytes = self.snapshots = 0
        for member in system.members.values():
            raft = member.raft
            self.led += raft.role == LEADER
            self.stopped += member.state != RUNNING
            self.halted += member.state == HALTED
            self.applied += raft.applied
            self.commit += raft.commit
            self.inflight_bytes += member.proposals.bytes
            self.snapshot_bytes += member.snapshot_bytes
            self.snapshots += member.snapshot_index > 0


def payload_disk_bytes(wal: Wal, store: StorePort) -> int:
    """Return the allocated bytes of everything that holds payloads: WAL files (spares included) and generations."""
    return wal.allocated_bytes() + store.disk_bytes()


def node_status(system: System) -> dict[str, Any]:
    """Return the node's figures, sizes in bytes; `live` are payload bytes that no release has named yet. `apply` is of
    this process: entries it applied since its start, the processor time of that, and of the start's replay of the
    write-ahead log."""
    sums = _Sums(system)
    sleepers = system.quiesced
    storage = system.storage
    in_wal = storage.accounting.live_bytes()
    generations = system.store.generations()
    in_generations = sum(one.live for one in generations)
    disk = system.disk
    return {
        "node": system.node_id,
        "pid": os.getpid(),
        "epoch": system.incarnation.epoch,
        "groups": system.group_count,
        "hibernating": len(sleepers),
        "led": sums.led + sleepers.led,
        "stopped": sums.stopped,
        "damage": system.log_repair.status() | system.refill.status(),
        "halted": sums.halted,
        "active": len(system.active),
        "live_nodes": sorted(system.live),
        "fdatasyncs": disk.fdatasyncs,
        "bytes_written": disk.bytes_written,
        "applied": sums.applied + sleepers.entries,
        "commit": sums.commit + sleepers.entries,
        "elections": system.leader_cache.elections,
        "leaderships_lost": system.leader_cache.lost,
        "busy": dict(system.counters.busy),
        "listening": len(system.delivery.sinks),
        "pushes_dropped": system.delivery.dropped,
        "inflight_bytes": sums.inflight_bytes,
        "wal_bytes_live": in_wal,
        "generations_bytes_live": in_generations,
        "payload_live_bytes": in_wal + in_generations,
        "payload_disk_bytes": payload_disk_bytes(system.wal, system.store),
        "snapshot_bytes": sums.snapshot_bytes + sleepers.bytes,
        "liveness_mismatches": system.snapshots.mismatches,
        "snapshots": sums.snapshots + len(sleepers),
        "forks": system.replica_gc.forked,
        "snapshots_taken": system.snapshots.taken,
        "snapshots_sent": system.snapshot_sender.sent,
        "snapshots_installed": system.snapshot_receiver.installed,
        "migrated_files": storage.compactor.files,
        "migrated_bytes": storage.compactor.bytes,
        "apply": {
            "entries": system.applier.entries,
            "cpu_us": system.applier.nanoseconds // 1000,
            "replay_cpu_us": system.counters.replay_nanoseconds // 1000,
        },
        "wal": {
            "files": len(system.wal.files),
            "allocated_bytes": system.wal.allocated_bytes(),
            "sealed": len(storage.location.files),
            **system.group_commit.status(),
        },
        "segments": storage.segments.status(),
        "jobs": storage.jobs.status(),
        "holders": storage.gc_blockers.status(),
        "writer": system.writer.status() if system.writer is not None else dict(NO_WRITER),
        "generations": [
            {"id": one.id, "total": one.total, "live": one.live, "sealed": one.sealed} for one in generations
        ],
        "cache_bytes": system.cache.bytes,
        "memory_rss": _resident_bytes(),
        "budget": system.admission.status(),
        "space": system.space.status(),
        "disk": system.slow_disk.status(),
        "followers": system.outbound.status(),
        "transfers": system.snapshot_receiver.status(),
        "pieces_served": system.pull_answers.pieces,
        "pins_expired": storage.location.expired,
        "repaired_entries": system.repair.fetched,
        "repairs_failed": system.repair.failed,
        "scrub": system.scrub.status(),
        "peers": [one._asdict() for one in system.peers.status()],
    }


def describe_sleeper(system: System, uid: int, row: Row) -> dict[str, Any]:
    """Describe one hibernating group on this node, as briefly as its row says it."""
    found: dict[str, Any] = {
        "name": row.name,
        "uid": uid,
        "node": system.node_id,
        "machine": row.shape.machine,
        "state": ASLEEP,
        "reason": "",
        "role": ROLE_NAMES[LEADER if row.leader == system.node_id else FOLLOWER],
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


def _sleeper_standing(system: System, name: str, uid: int) -> list[Any]:
    row = system.quiesced.row(uid)
    role = ROLE_NAMES[LEADER if row.leader == system.node_id else FOLLOWER]
    voters, learners = list(row.shape.voters), list(row.shape.learners)
    return [name, uid, row.leader, row.term, row.since_ms, role, ASLEEP, voters, learners, []]


def _sleeper_metrics(system: System, uid: int) -> dict[str, Any]:
    row = system.quiesced.row(uid)
    brief = describe_sleeper(system, uid, row)
    for key in ("node", "machine", "start", "end"):
        brief.pop(key, None)
    return brief | {
        "membership": "voter" if system.node_id in row.shape.voters else "learner",
        "leader_since_ms": row.since_ms,
        "stable": row.last,
        "pending_bytes": 0,
    }


def describe_member(system: System, member: Member, brief: bool) -> dict[str, Any]:
    """Describe one group on this node."""
    raft = member.raft
    row: dict[str, Any] = {
        "name": member.spec.name,
        "uid": member.uid,
        "node": system.node_id,
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
        "homes": [[home.first, home.last, home.generation] for home in system.store.homes(member.uid)],
        "released_before": list(member.liveness.released_before),
        "quiet": raft.is_quiet,
    }
    if raft.role == LEADER:
        row["progress"] = {node: {"match": one.match, "next": one.next} for node, one in raft.progress.items()}
    return row


def board_rows(system: System, after: str, limit: int) -> list[list[Any]]:
    """Return at most `limit` groups of this node by name, those behind `after`: see `client.board.Standing` for the
    columns.

    From this node's own tables: no group is asked, whatever state it is in.
    """
    found: list[list[Any]] = []
    for name in system.names.behind(after, limit):
        uid = system.names[name]
        member = system.members.get(uid)
        # A name is taken before its group is durable.
        if member is None and uid in system.quiesced:
            found.append(_sleeper_standing(system, name, uid))
        elif member is not None:
            raft, configuration = member.raft, member.raft.configuration
            standing = system.leader_cache.of(member.uid)
            found.append(
                [
                    name, member.uid, raft.leader, raft.term, standing.since_ms, ROLE_NAMES[raft.role],
                    member.shown_state,
                    list(configuration.voters), list(configuration.learners), list(configuration.outgoing),
                ]
            )  # fmt: skip
    return found


def key_metrics(system: System, names: Iterable[str]) -> list[dict[str, Any]]:
    """Return what is known of each group without asking it (Ra's key_metrics): also of stopped and of busy ones.

    `leader_since_ms` is a wall-clock time of this node, `pending_bytes` are queued or not yet committed here. Names
    without a group are left out.
    """
    found = []
    for name in names:
        uid = system.names.get(name, 0)
        member = system.members.get(uid)
        if member is None:
            if uid in system.quiesced:
                found.append(_sleeper_metrics(system, uid))
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
                "leader_since_ms": system.leader_cache.of(member.uid).since_ms,
                "term": raft.term,
                "last": raft.log.last_index,
                "stable": raft.log.stable,
                "commit": raft.commit,
                "applied": raft.applied,
                "snapshot": member.snapshot_index,
                "snapshot_bytes": member.snapshot_bytes,
                "pending_bytes": member.proposals.bytes,
            }
        )
    return found


def _resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

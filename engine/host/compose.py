"""How the host is built, the top floor: what watches the disk and ends the node, what knows its groups, what speaks
with other nodes, and the ticker. The ready loop is there before all floors, which mark members in it.

Nothing stands on it, so it has no upcalls: what it is told comes from outside, or from the floors below (`Upcalls`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from logyard.protocol.errors import LogyardError

from ..disk.health import DiskHealth
from ..disk.slow_disk import SlowDisk
from ..log.compose import Storage
from ..quiesce.compose import Quiescence
from ..repair.compose import Repair
from ..replica.compose import Replicas
from ..replica.ground import Ground
from ..replica.member import Member
from ..transfer.compose import Transfers
from ..transport import blobs
from ..types import Spec
from . import groups, inbound, outbound, replica_gc, ticker
from .admission import Admission
from .decommission import Decommission
from .elections import Elections
from .follower_reads import FollowerReads
from .forks import Forks
from .groups import GroupRegistry
from .hand_over import HandOver
from .inbound import Inbound
from .leader_cache import LeaderCache, RoleChanges
from .outbound import Outbound
from .ready_loop import Driven, ReadyLoop
from .replica_gc import ReplicaGC
from .shutdown import FailStop
from .ticker import Ticker
from .walks import Walks


class Floors(NamedTuple):
    """What the host stands on."""

    ground: Ground
    storage: Storage
    replicas: Replicas
    transfers: Transfers
    repair: Repair
    quiescence: Quiescence


class Host(NamedTuple):
    """The parts, by name."""

    disk_health: DiskHealth
    slow_disk: SlowDisk
    fail_stop: FailStop
    walks: Walks
    replica_gc: ReplicaGC
    groups: GroupRegistry
    decommission: Decommission
    follower_reads: FollowerReads
    outbound: Outbound
    inbound: Inbound
    ticker: Ticker
    driven: Driven
    """What a turn drives; `peers` are the node's, when it runs."""


def compose_host(
    floors: Floors,
    ready_loop: ReadyLoop,
    admission: Admission,
    leader_cache: LeaderCache,
    machines: Callable[[str, dict[str, Any]], object],
    known: Callable[[int], bool],
    grown: Callable[[], None],
) -> Host:
    """Build a node's. `machines` makes a machine, as a trial; `known(node)`: something is known of a node;
    `grown()`: many groups came."""
    ground, storage, replicas, transfers, repair, quiescence = floors
    config, members, network, loop = ground.config, ground.members, ground.network, ground.loop
    disk_health = DiskHealth(ground.disk, ground.path, config, storage.group_commit, ground.spawn)
    leaderships = HandOver(members, ground.limits.be_patient, loop.rouse)
    slow_disk = SlowDisk(config, storage.group_commit, disk_health, network.others, leaderships)

    def over(error: LogyardError) -> None:
        """Let nothing be promised any more."""
        storage.group_commit.refuse(error)
        ready_loop.end()
        tick.end()

    fail_stop = FailStop(
        ground.disk, ground.path, members, storage.meta_batch, over, network.send, network.is_talking
    )  # fmt: skip
    walks = Walks(members, ground.spawn)
    gc, registry = _groups(floors, machines, grown)
    decommission = Decommission(
        ground.node_id, members, quiescence.table, storage.meta_batch.commit, known, network
    )  # fmt: skip
    follower_reads = FollowerReads(
        quiescence.lookup.find, replicas.leadership.read_index, network.send_blob, ground.spawn, ground.clocks
    )  # fmt: skip

    async def let_log_go(member: Member, index: int) -> None:
        transfers.chunks.promise_no_log(member, index)
        if member.snapshot_index < index:
            await transfers.snapshots.take([member])
        else:
            storage.checkpoints.let_log_go(member)
        await storage.group_logs.roll_out(member)

    sending = outbound.Host(
        network.send, transfers.snapshot_sender.start_transfer, let_log_go, repair.log_repair.found,
        repair.payload_repair.stretch, storage.location.holds, ground.spawn,
    )  # fmt: skip
    out = Outbound(
        config.append_bytes_max, members, ground.windows, replicas.reader, sending, loop.mark, loop.rouse
    )  # fmt: skip
    links = inbound.Links(
        (gc.forget_told, registry.on_link_up, replicas.versions.on_link_up),
        (transfers.snapshot_sender.on_link_lost, transfers.pulls.on_link_lost),
        quiescence.unquiesce.on_liveness, fail_stop.begin,
    )  # fmt: skip
    here = inbound.Groups(
        ground.node_id, members, ground.live, ground.active, quiescence.lookup.find_by, registry.deleted,
        walks.over_members, gc.tell, replicas.retire.stop,
    )  # fmt: skip
    handlers = {
        **dict.fromkeys(blobs.GROUPS, blobs.without_body(registry.on_blob)),
        **dict.fromkeys((blobs.READ_ASK, blobs.READ_INDEX), blobs.without_body(follower_reads.on_blob)),
        **replicas.handlers(), **transfers.handlers(), **repair.handlers(), **quiescence.handlers(),
    }  # fmt: skip
    in_ = Inbound(
        here, ready_loop, ground.cache.keep, storage.space, inbound.Windows(ground.windows, out.resume), links,
        handlers, network.send_blob,
    )  # fmt: skip
    chores = _chores(floors, admission, slow_disk, out, in_, gc, leader_cache)
    elections = Elections(ground.node_id, ground.live, config.election_groups)
    ticked = ticker.Groups(ground.active, loop.mark, walks.over_members, quiescence.quiesce.rest, elections)
    tick = Ticker(config, ticked, disk_health, storage.group_commit, replicas.effects, chores)
    roles = RoleChanges(leader_cache, repair.log_repair.sound, replicas.effects, replicas.heartbeats)
    driven = Driven(
        network, storage.group_commit, replicas.applier.apply_all, out.prepare, replicas.log_clock.now,
        replicas.heartbeats.seen, storage.accounting.cut, storage.segment_writer.hard_state_written, roles.tell, tick,
    )  # fmt: skip
    return Host(
        disk_health, slow_disk, fail_stop, walks, gc, registry, decommission, follower_reads, out, in_, tick, driven
    )  # fmt: skip


def _groups(
    floors: Floors, machines: Callable[[str, dict[str, Any]], object], grown: Callable[[], None]
) -> tuple[ReplicaGC, GroupRegistry]:
    """Build what knows which groups this node has, has no more, and may have again."""
    ground, storage, replicas, _, repair, quiescence = floors
    network, lookup, retire = ground.network, quiescence.lookup, replicas.retire
    forget, logs = storage.group_logs.forget, repair.log_repair
    forks = Forks(ground.disk, ground.path, ground.config.disk_reserve_bytes, ground.node_id, replicas.reader)
    rows = replica_gc.Rows(
        storage.meta_batch.commit, forget, storage.meta_batch.settle, storage.group_commit.write_alone
    )
    gc = ReplicaGC(ground.node_id, lookup.find, retire, forks, rows, network.send_blob, ground.spawn)

    def start(spec: Spec) -> None:
        """Let a group that was just registered come alive; one whose definition was lost here is mended."""
        if spec.uid in logs.barred:
            replicas.enliven(logs.admit(spec))
        else:
            replicas.enliven(replicas.builder.fresh(spec), fresh=True)

    def told(spec: Spec) -> None:
        """Let a group be led that the others have by now, too."""
        member = ground.members.get(spec.uid)
        if member is not None:
            replicas.enliven.others_have(member)

    def lay(specs: Sequence[Spec]) -> None:
        """Let groups that were just registered sleep; all are awake on a node where none ever sleeps."""
        if ground.config.hibernate_after_ms:
            quiescence.transitions.lay(specs)
        else:
            for spec in specs:
                start(spec)

    def doubt(uid: int) -> None:
        """Wake a group that sleeps without a leader: whoever knows better tells it when it asks for votes."""
        if uid in quiescence.table and not quiescence.table.leader_of(uid):
            quiescence.unquiesce.soon(uid, 0)

    def unsettled(uid: int) -> bool:
        """Return whether nobody is known who led a group, and doubt it if it sleeps."""
        member = ground.members.get(uid)
        if member is not None:
            return gc.unborn(member)
        doubt(uid)
        return uid in quiescence.table and not quiescence.table.row(uid).last

    here = groups.Groups(
        quiescence.names, lookup.find, lookup.has, lookup.spec, lookup.count, doubt, unsettled, logs.barred
    )  # fmt: skip
    registry = GroupRegistry(
        ground.node_id, ground.config.groups_max, machines, here, gc, storage.meta_batch,
        groups.Peers(lambda: network.nodes, ground.live, network.send_blob),
        groups.Host(start, told, lay, grown, retire.detach, forget, ground.spawn),
    )  # fmt: skip
    return gc, registry


def _chores(
    floors: Floors,
    admission: Admission,
    slow_disk: SlowDisk,
    out: Outbound,
    in_: Inbound,
    gc: ReplicaGC,
    leader_cache: LeaderCache,
) -> ticker.Chores:
    """Return what the ticker does beside ticking members, in this order."""
    ground, storage, replicas, _, repair, quiescence = floors
    members, waking, timed = ground.members, quiescence.unquiesce, replicas.effects.timed

    def needed() -> bool:
        if waking.is_busy or admission.full or storage.space.full:
            return True
        return any(window.waiting for window in ground.windows.values())

    return ticker.Chores(
        needed,
        quiescence.timers.next_s,
        first=slow_disk.tick,
        healthy=(waking.tick, quiescence.digests.compare),
        each_tick=(admission.look, out.resume_all),
        sessions=replicas.heartbeats.look,
        each_second=(
            in_.forget_asked, gc.forget_told, quiescence.quiesce.look, waking.look,
            lambda: leader_cache.prune(members, len(members)), replicas.versions.look,
            lambda: replicas.log_clock.catch_up(timed), repair.refill.look, storage.meta_batch.look,
            repair.log_repair.tell_stopped,
        ),
        storage=storage.janitor.look,
    )  # fmt: skip

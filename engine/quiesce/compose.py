"""How quiescence is built: what lets groups sleep, wakes them, and finds them meanwhile.

What goes further up is in `Above`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ..log.compose import Storage
from ..log.meta import MetaStore
from ..raft.state import LEADER
from ..repair import log_repair
from ..repair.log_repair import LogRepair
from ..replica.apply import says
from ..replica.compose import Replicas
from ..replica.ground import Ground
from ..replica.member import Member
from ..transfer.snapshot_store import SnapshotStore
from ..transport import blobs
from ..upcall import Upcall, Upcalls
from . import quiesce, unquiesce
from .digest import Digests
from .lookup import Lookup
from .names import Names
from .payload_flush import PayloadFlush
from .quiesce import Hibernation, Quiesce
from .quiesced_sessions import QuiescedSessions
from .quiesced_table import QuiescedTable
from .timers import Timers
from .transitions import Leaders, Rebuild, Transitions
from .unquiesce import LivenessScan, Unquiesce


class Above(Upcalls):
    """What quiescence tells the floor above."""

    def __init__(self) -> None:
        self.stir = Upcall[[], None]()
        """The next tick has something to do."""
        self.asked = Upcall[[Member], None]()
        """Somebody is going to use a member that knows no leader."""
        self.shrunk = Upcall[[], None]()
        """Many groups went to sleep: there is memory to give back."""


class Quiescence(NamedTuple):
    """The parts, by name."""

    above: Above
    table: QuiescedTable
    names: Names
    """Of all groups, awake or not."""
    lookup: Lookup
    timers: Timers
    transitions: Transitions
    unquiesce: Unquiesce
    digests: Digests
    quiesce: Quiesce

    def handlers(self) -> dict[int, blobs.Handler]:
        """Return who takes which blobs."""
        digests = self.digests
        return {
            **dict.fromkeys(blobs.QUIESCE, blobs.without_body(self.quiesce.on_blob)),
            **dict.fromkeys(
                blobs.DIGESTS, lambda node, kind, number, header, body: digests.on_blob(node, kind, header)
            ),
        }


def compose_quiescence(
    ground: Ground,
    meta: MetaStore,
    storage: Storage,
    replicas: Replicas,
    snapshots: SnapshotStore,
    repair: LogRepair,
    leaders: Leaders,
    epoch_of: Callable[[int], int],
) -> Quiescence:
    """Build a node's. `leaders` knows who leads what; `epoch_of(node)` which life of a node this is."""
    node, config, members, live, send_blob = (
        ground.node_id, ground.config, ground.members, ground.live, ground.network.send_blob,
    )  # fmt: skip
    above, table, effects = Above(), QuiescedTable(node), replicas.effects
    names = Names(table)
    rebuild = Rebuild(
        str(ground.path / "meta"), meta, replicas.builder.build, log_repair.stop, repair.revive, replicas.versions.learn
    )
    timers = Timers(node, ground.clocks, table.leader_of, replicas.log_clock.fresh, above.stir)
    sessions = QuiescedSessions(replicas.heartbeats)
    replicas.heartbeats.spare(sessions.clients)
    transitions = Transitions(node, members, names, leaders, table, timers, sessions, rebuild)
    waking = Unquiesce(
        node, members, live, table, timers, sessions, LivenessScan(node, table, epoch_of), transitions,
        unquiesce.Host(ground.loop.rouse, effects.on_leading, above.stir, send_blob),
    )  # fmt: skip
    digests = Digests(
        node, table, live, config.liveness_interval_ms / 1000, ground.network, waking.soon, waking.tell_awake
    )  # fmt: skip

    def is_held(member: Member) -> bool:
        if says(member.machine, "stays_awake"):
            return True
        return member in effects.ticking or (member.raft.role == LEADER and sessions.is_silent(member))

    def left(member: Member) -> None:
        ground.active.discard(member)
        effects.timed.discard(member)

    hibernation = Hibernation(
        members, transitions, _storage(ground, storage, replicas, snapshots), is_held, epoch_of, left, above.shrunk
    )
    asleep = Quiesce(
        node, config.hibernate_after_ms / 1000, members, live, table, hibernation, waking,
        quiesce.Host(ground.active.__contains__, send_blob, ground.spawn),
    )  # fmt: skip
    lookup = Lookup(node, members, ground.active, names, table, waking, rebuild.spec, above.asked)
    return Quiescence(above, table, names, lookup, timers, transitions, waking, digests, asleep)


def _storage(ground: Ground, storage: Storage, replicas: Replicas, snapshots: SnapshotStore) -> quiesce.Storage:
    """Return what keeps the state of who goes to sleep."""
    location, logs = storage.location, storage.group_logs
    flush = PayloadFlush(
        ground.store, location.files, location, replicas.reader, ground.wal.read_payload, storage.rehoming.move,
        ground.config.hibernate_move_bytes,
    )  # fmt: skip
    return quiesce.Storage(
        flush.is_done, flush.run, snapshots.take, storage.checkpoints.may_move_out, storage.checkpoints.move_out,
        partial(storage.meta_batch.commit, store=True), logs.slept, logs.forget_slept,
    )  # fmt: skip

"""How repair is built: what brings lost records and payloads back from other members, and what looks for damage.

What goes further up is in `Above`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from ..log.compose import Storage
from ..replica.compose import Replicas
from ..replica.ground import Ground
from ..replica.member import Member
from ..transfer.compose import Transfers
from ..transport import blobs
from ..types import Spec
from ..upcall import Upcall, Upcalls
from . import log_repair, scrub, scrub_walks
from .log_repair import LogRepair, MendTurns
from .payload_repair import PayloadRepair, Refill
from .scrub import Findings, Repairs, Scrub


class Above(Upcalls):
    """What repair asks the floors above."""

    def __init__(self) -> None:
        self.find = Upcall[[int], Member | None]()
        """Find a group's member, woken if it hibernates."""
        self.spec = Upcall[[int], Spec | None]()
        """Find a group's definition; wakes nobody."""
        self.is_busy = Upcall[[], bool]()
        """Is the disk slow, or is memory full of what clients write?"""


class Repair(NamedTuple):
    """The parts, by name."""

    above: Above
    payload_repair: PayloadRepair
    refill: Refill
    log_repair: LogRepair
    mend_turns: MendTurns
    scrub: Scrub

    def handlers(self) -> dict[int, blobs.Handler]:
        """Return who takes which blobs."""
        return dict.fromkeys(
            (blobs.MEND_ASK, blobs.MEND_TURN, blobs.MEND_STOPPED), blobs.without_body(self.mend_turns.on_blob)
        )


def compose_repair(ground: Ground, storage: Storage, replicas: Replicas, transfers: Transfers) -> Repair:
    """Build a node's."""
    store, spawn, meta_batch, above = ground.store, ground.spawn, storage.meta_batch, Above()
    reader, retire = replicas.reader, replicas.retire
    payload_repair = PayloadRepair(transfers.pulls, reader, store, storage.rehoming.write_back)
    turns = MendTurns(ground.node_id, ground.live, above.find, ground.network.send_blob)
    host = log_repair.Host(
        replicas.builder.build, replicas.enliven, retire.silence, retire.stop, spawn, turns.tell_stopped
    )
    logs = LogRepair(ground.node_id, ground.members, meta_batch, storage.group_logs, reader, host)
    refill = Refill(
        store, payload_repair, above.find, logs.barred, meta_batch.commit_store, meta_batch.owe_store, spawn
    )  # fmt: skip

    def is_busy() -> bool:
        return above.is_busy() or storage.segment_writer.unflushed.backlog_files > 1

    findings = Findings(ground.config.scrub_bytes_per_s, is_busy)
    repairs = Repairs(
        ground.node_id, ground.members, findings, turns,
        scrub.Host(above.find, logs.found, transfers.snapshots.renew, refill.lose, store.lost),
    )  # fmt: skip
    walks = _walks(ground, storage, findings, repairs, above)
    whole = Scrub(
        ground.config.scrub_every_s, ground.clocks.wall_ns, meta_batch, findings, repairs, walks, refill.look
    )  # fmt: skip
    return Repair(above, payload_repair, refill, logs, turns, whole)


def _walks(
    ground: Ground, storage: Storage, findings: Findings, repairs: Repairs, above: Above
) -> dict[str, Callable[[], Awaitable[None]]]:
    """Build what a scrub walks over, by kind."""
    disk, store, members, meta_batch = ground.disk, ground.store, ground.members, storage.meta_batch
    segments, files, read = storage.segments, storage.location.files, findings.read
    here = scrub_walks.Groups(members, above.find, above.spec)
    return {
        "meta": scrub_walks.MetaWalk(disk, meta_batch, here, read, repairs).run,
        "snapshot": scrub_walks.SnapshotWalk(meta_batch, here, read, repairs).run,
        "segment": scrub_walks.SegmentWalk(
            disk, segments, files, members, storage.janitor.lock, storage.accounting.recount, read, repairs
        ).run,
        "ring": scrub_walks.RingWalk(disk, storage.rings.path, members, storage.janitor.lock, read, repairs).run,
        "wal": scrub_walks.WalWalk(
            disk, ground.path / "wal", segments.path, files, members,
            lambda uid, index: store.home(uid, index) is not None, read, repairs,
        ).run,
        "generation": scrub_walks.GenerationWalk(disk, store, meta_batch, here, read, repairs).run,
    }  # fmt: skip

"""How the transfer of snapshots is built: taking, offering and pulling them, and what is kept for that meanwhile.

What goes further up is in `Above`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import trio

from ..log.compose import Storage
from ..replica import snapshot_sections
from ..replica.compose import Replicas
from ..replica.ground import Ground
from ..replica.member import Member
from ..snapshot.format import Snapshot
from ..transport import blobs
from ..upcall import Upcall, Upcalls
from . import snapshot_receiver
from .chunks import Chunks
from .pull import Pulls
from .snapshot_receiver import SnapshotReceiver
from .snapshot_sender import PullAnswers, SnapshotSender
from .snapshot_store import SnapshotStore


class Above(Upcalls):
    """What transfers tell the floors above, and ask them."""

    def __init__(self) -> None:
        self.find = Upcall[[int], Member | None]()
        """Find a group's member, woken if it hibernates."""
        self.find_by = Upcall[[int, int], Member | None]()
        """Find it by the word of a node."""
        self.unknown = Upcall[[int, int], None]()
        """A node offers what is of a group that is not here."""


class Transfers(NamedTuple):
    """The parts, by name."""

    above: Above
    snapshots: SnapshotStore
    chunks: Chunks
    pulls: Pulls
    snapshot_sender: SnapshotSender
    pull_answers: PullAnswers
    snapshot_receiver: SnapshotReceiver

    async def collect(self, is_here: Callable[[int], bool]) -> bool:
        """Give back what was kept for other members' transfers, or for one that came to nothing; return whether
        there is more of it."""
        self.chunks.expire(trio.current_time())
        await self.snapshot_receiver.collect(is_here)
        return await self.chunks.collect()

    def handlers(self) -> dict[int, blobs.Handler]:
        """Return who takes which blobs."""
        receiver, answers, pulls = self.snapshot_receiver, self.pull_answers, self.pulls
        progress = blobs.without_body(self.snapshot_sender.on_blob)
        return {
            blobs.SNAPSHOT_OFFER: lambda node, kind, *rest: receiver.on_offer(node, *rest),
            blobs.SNAPSHOT_PULL: lambda node, kind, number, header, body: answers.on_pull(node, number, header),
            blobs.SNAPSHOT_PIECE: lambda node, kind, *rest: pulls.on_piece(node, *rest),
            blobs.SNAPSHOT_PROGRESS: progress,
            blobs.SNAPSHOT_DONE: progress,
        }


def compose_transfers(ground: Ground, storage: Storage, replicas: Replicas) -> Transfers:
    """Build a node's."""
    config, store, loop, above = ground.config, ground.store, ground.loop, Above()
    send_blob, spawn, meta_batch = ground.network.send_blob, ground.spawn, storage.meta_batch
    retire = replicas.retire

    async def settle() -> None:
        await storage.group_commit.exclusive(lambda: None)

    def restore(member: Member, snapshot: Snapshot) -> None:
        liveness = store.decode_liveness(snapshot.live)
        snapshot_sections.restore_member(member, snapshot, liveness, ground.clocks.monotonic_ns())

    snapshots = SnapshotStore(storage.checkpoints, store.decode_liveness, settle, retire.stop)
    chunks = Chunks(config, ground.members, meta_batch, storage.checkpoints.compact_log)
    pulls = Pulls(config, ground.node_id, ground.live, send_blob)
    sender = SnapshotSender(config, snapshots, meta_batch, chunks, send_blob, spawn, loop.rouse)
    answers = PullAnswers(
        config, above.find_by, store, replicas.reader, storage.location.holds, chunks, send_blob, spawn
    )  # fmt: skip
    host = snapshot_receiver.Host(
        above.find, above.unknown, loop.turn, restore, retire.stop, loop.rouse, storage.rehoming.store_payloads
    )
    receiver = SnapshotReceiver(
        ground.members, store, storage.checkpoints, chunks, pulls, host, send_blob, spawn
    )  # fmt: skip
    return Transfers(above, snapshots, chunks, pulls, sender, answers, receiver)

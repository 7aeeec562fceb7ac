"""How what makes replicas live is built: the way in, building and ending members, applying, effects and reading.

What goes further up is in `Above`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from logyard.protocol.errors import Corrupt, LogyardError

from ..log.compose import Storage
from ..log.meta_rows import Departed
from ..machine import Machine
from ..transport import blobs
from ..types import Buffer
from ..upcall import Upcall, Upcalls
from . import applier
from .applier import Applier
from .build import Builder, Cores, Enliven, MakeCore
from .delivery import Delivery
from .effects import Effects
from .ground import Ground
from .heartbeats import Heartbeats
from .leadership import Leadership
from .log_clock import LogClock
from .member import Member
from .proposals import Admission
from .quarantine import Quarantine
from .reader import Reader, Wanted
from .retire import Retire
from .ring_room import RingRoom
from .submit import Submit
from .versions import Versions


class Above(Upcalls):
    """What replicas tell the floors above, and ask them."""

    def __init__(self) -> None:
        self.wake = Upcall[[int], Member | None]()
        """Find a group's member for somebody who uses it, woken if it hibernates."""
        self.named = Upcall[[str], Member]()
        """Find a member by its group's name, woken. Raises `UnknownGroup`."""
        self.departed = Upcall[[int], Departed | None]()
        """What did an earlier replica of a group here promise?"""
        self.mend = Upcall[[Member, Wanted, LogyardError], Awaitable[Buffer]]()
        """Have bytes come from a peer which can't be read here."""
        self.fetch = Upcall[[Member, int, int], Awaitable[object]]()
        """Have the payloads of entries come from a peer which have no place here."""
        self.snapshot = Upcall[[Member, bool], Awaitable[object]]()
        """Take a snapshot; keep the log below it, or not."""
        self.damaged = Upcall[[Member, Corrupt], None]()
        """A record of a member can't be read."""
        self.deleted = Upcall[[Any, int], bytes]()
        """A group was deleted by its log, at this index; who answers whom?"""
        self.configured = Upcall[[Member, set[int]], None]()
        """The members of a group changed, from these."""
        self.gone = Upcall[[str, int], None]()
        """A replica goes; its name may be had by others."""


class Replicas(NamedTuple):
    """The parts, by name."""

    above: Above
    reader: Reader
    retire: Retire
    commands: Submit
    leadership: Leadership
    versions: Versions
    log_clock: LogClock
    builder: Builder
    enliven: Enliven
    heartbeats: Heartbeats
    delivery: Delivery
    effects: Effects
    quarantine: Quarantine
    applier: Applier

    def handlers(self) -> dict[int, blobs.Handler]:
        """Return who takes which blobs."""
        versions = self.versions
        return {blobs.MACHINE_VERSIONS: lambda node, kind, number, header, body: versions.on_blob(node, header)}


def compose_replicas(
    ground: Ground,
    storage: Storage,
    machines: Callable[[str, dict[str, Any]], Machine],
    draw: Callable[[int], int],
    make_core: MakeCore,
    admission: Admission,
    refused: Callable[[str], None],
) -> Replicas:
    """Build a node's. `machines` turns a machine's name and arguments into a fresh machine; `draw` is the random source
    of elections; `make_core` makes cores; `admission` counts what members are asked to propose, `refused(cause)` what
    is sent back."""
    node_id, config, members, live, loop = ground.node_id, ground.config, ground.members, ground.live, ground.loop
    store, location, meta_batch, above = ground.store, storage.location, storage.meta_batch, Above()
    reader = Reader(store, storage.segments, storage.rings, location, ground.wal.read_payload, above.mend)
    retire = Retire(members, ground.active, ground.network.send, storage.group_commit.drop, above.gone, loop.mark)
    commands = Submit(node_id, config, members, above.wake, loop.mark)
    election_s = config.election_ticks * config.tick_ms / 1000
    leadership = Leadership(node_id, election_s, above.named, loop.rouse)
    versions = Versions(
        node_id, config.machine_upgrade_percent, members, live, lambda: ground.network.nodes, commands,
        ground.network.send_blob, loop.rouse,
    )  # fmt: skip
    log_clock = LogClock(ground.clocks, reader.newest_time, versions.knows, commands.propose, loop.mark)

    def own_time(uid: int, kind: int) -> int:
        """Return log time of an entry of a core's own: of one that is being built there is none yet."""
        member = members.get(uid)
        return log_clock.of_own_entry(member, kind) if member is not None else 0

    make_own = partial(make_core, Cores(node_id, live, draw, ground.limits, ground.windows))
    builder = Builder(
        make_own, machines, store, meta_batch.load_snapshot, above.departed, own_time, admission,
        lambda: RingRoom(admission, config, refused, storage.janitor.look), ground.clocks,
    )  # fmt: skip
    enliven = Enliven(node_id, members, versions.learn, loop.rouse)
    heartbeats = Heartbeats(config, commands)
    delivery = Delivery(reader, location, above.fetch, ground.spawn, config.delivery_queue_bytes)
    effects = Effects(
        delivery, storage.accounting.released, commands, log_clock.now, above.snapshot, ground.spawn
    )  # fmt: skip
    quarantine = Quarantine(
        reader, machines, lambda uid: meta_batch.load_snapshot(meta_batch.snapshot(uid)), commands.queue_own
    )
    host = applier.Host(
        above.deleted, above.configured, above.damaged, retire.stop, heartbeats.began,
        lambda member: members.get(member.uid) is member, loop.mark, ground.active.add, ground.spawn,
    )  # fmt: skip
    return Replicas(
        above, reader, retire, commands, leadership, versions, log_clock, builder, enliven, heartbeats, delivery,
        effects, quarantine, Applier(reader, effects, quarantine, host),
    )  # fmt: skip

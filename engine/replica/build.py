"""How a member is made: of its checkpoint, its snapshot and what the WAL says on top, and how it comes alive.

The rules of what the three say together are in `recovery.rebuild`; here the image becomes a core, a machine and what
lives of its payloads. Used by a start, by the waking of a hibernating group, by log repair and by a new group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, NamedTuple, TypeAlias

from logyard.protocol.errors import Busy, NoSpace

from ..config import SystemConfig
from ..core import Core
from ..entry import build_plain
from ..log.meta_rows import Departed, SnapshotRow, StateRow
from ..log.recovered import Recovered
from ..machine import Applied, Context, Machine, PayloadRange, PayloadRef, Sections
from ..ports import StorePort
from ..raft.core import Encode, Raft
from ..raft.mending import Mend
from ..raft.progress import Window
from ..raft.quorum import first_leader
from ..raft.state import FOLLOWER, LEADER, PRECANDIDATE, Limits
from ..recovery.rebuild import Image, rebuild
from ..snapshot import format as snapshot_format
from ..snapshot.format import Snapshot
from ..types import Spec
from . import snapshot_sections
from .apply import NotRestored, Unfit, UnknownVersion
from .log_clock import Clocks
from .member import STOPPED, Halt, Member
from .proposals import Admission
from .ring_room import RingRoom


class Cores(NamedTuple):
    """What all cores of a node share."""

    node_id: int
    live: set[int]
    """Nodes that are up, this one among them."""
    draw: Callable[[int], int]
    """The random source of elections, in [0, n)."""
    limits: Limits
    windows: dict[int, Window]
    """Bytes under way, by follower's node."""


MakeCore: TypeAlias = Callable[[Cores, Spec, Image, Encode, Mend | None], Core]
"""Makes a group's core of what was recovered of it, with no member lead yet; `encode` makes entries of its own."""


def make_raft(cores: Cores, spec: Spec, image: Image, encode: Encode, mend: Mend | None) -> Raft:
    """Return a Raft core."""
    index, configuration = image.base
    return Raft(
        spec.uid, cores.node_id, configuration, image.log,
        term=image.term, vote=image.vote, commit=image.commit,
        live=cores.live, draw=cores.draw, encode=encode, limits=cores.limits, windows=cores.windows,
        configuration_index=index, configurations=image.configurations, promise=image.promise, mend=mend,
    )  # fmt: skip


def limits_of(config: SystemConfig) -> Limits:
    """Return the limits of a node's cores: one object for all groups."""
    return Limits(
        election_ticks=config.election_ticks,
        append_bytes=config.append_bytes_max,
        inflight_bytes=config.append_inflight_bytes,
        inflight_messages=config.append_inflight_messages,
        follower_bytes=config.follower_inflight_bytes,
        uncommitted_bytes=config.uncommitted_bytes_max,
        uncommitted_reserve=int(config.uncommitted_bytes_max * config.reserved_ratio),
        lazy_commit=True,
        staggered=True,
    )


class Absent:
    """Stands for a machine that this program can't make: its member is halted, and nothing is asked of it."""

    version = 1

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        """Apply nothing: who is halted does not get here."""
        raise NotImplementedError

    def snapshot(self) -> Sections:
        """Give nothing."""
        raise NotImplementedError

    def restore(self, sections: Sections) -> None:
        """Take nothing."""
        raise NotImplementedError

    def live_refs(self) -> Iterable[PayloadRange]:
        """Name nothing."""
        raise NotImplementedError


class Builder:
    """Builds members. `make_core` makes their cores; `machines` gives a fresh machine by its name and arguments;
    `load(row)` a stored snapshot with its chunks; `departed(uid)` what an earlier replica here promised;
    `own_time(uid, kind)` the log time of an entry of a core's own; `admission` counts what members are asked to
    propose; `ring_room` gives what does so for a system group."""

    def __init__(
        self,
        make_core: Callable[[Spec, Image, Encode, Mend | None], Core],
        machines: Callable[[str, dict[str, Any]], Machine],
        store: StorePort,
        load: Callable[[SnapshotRow], Snapshot],
        departed: Callable[[int], Departed | None],
        own_time: Callable[[int, int], int],
        admission: Admission,
        ring_room: Callable[[], RingRoom],
        clocks: Clocks,
    ) -> None:
        self._make_core = make_core
        self._machines = machines
        self._store = store
        self._load = load
        self._departed = departed
        self._own_time = own_time
        self._admission = admission
        self._ring_room = ring_room
        self._clocks = clocks

    def fresh(self, spec: Spec) -> Member:
        """Return a member that has nothing yet. Raises what its machine can't be made for."""
        return self.build(spec, None, None, Recovered(), fresh=True)

    def build(
        self,
        spec: Spec,
        state: StateRow | None,
        snapshot_row: SnapshotRow | None,
        recovered: Recovered,
        mend: Mend | None = None,
        *,
        fresh: bool = False,
    ) -> Member:
        """Return the member of a checkpoint, a snapshot and what the WAL says on top; with `mend`, one that lost what
        came after that. Raises `Corrupt` when they leave a gap, and `NotRestored`."""
        now = self._clocks.monotonic_ns()
        snapshot = self._load(snapshot_row) if snapshot_row else None
        image = rebuild(spec, state, snapshot, recovered, self._departed(spec.uid), mend is not None)
        image.check()
        raft = self._make_core(spec, image, self._encoder(spec.uid), mend)
        lacking = ""
        try:
            machine = self._machines(spec.machine, spec.arguments)
        except (MemoryError, Busy, NoSpace):
            raise
        except Exception as error:
            if fresh:
                raise
            machine = Absent()
            lacking = f"this program has no machine {spec.machine!r} for it ({type(error).__name__}: {error})"
        room = self._ring_room() if spec.is_system else None
        member = Member(spec, raft, machine, self._store.new_liveness(), room or self._admission)
        if room is not None:
            room.watch(member)
        member.adopt(image.runs, image.ring, image.flushed, image.floor, now)
        if snapshot is not None and snapshot_row is not None:
            manifest = snapshot_format.read_manifest(snapshot_row.data, spec.uid)
            member.stored(snapshot.index, manifest.chunks)
            member.covered(snapshot.index, snapshot.term, len(snapshot_row.data) + manifest.chunk_bytes)
            member.need_log_above(image.compactable)
            liveness = self._store.decode_liveness(snapshot.live)
            try:
                if lacking:
                    member.rebase(liveness, snapshot.release, snapshot.timestamp, now)
                else:
                    snapshot_sections.restore_member(member, snapshot, liveness, now)
            except MemoryError as error:
                raise NotRestored(spec.name, spec.machine, snapshot.index) from error
            except UnknownVersion as error:
                reason = f"its snapshot at {snapshot.index} {error}"
                member.suspend(Halt(snapshot.index, 0, 0, -1, reason, error.version))
            except Unfit as error:
                member.suspend(Halt(snapshot.index, 0, 0, -1, str(error), max(1, snapshot.version)))
            if snapshot.index > raft.applied:
                raft.on_applied(snapshot.index)
        if lacking:
            member.suspend(Halt(raft.applied, 0, 0, -1, lacking, 1))
        return member

    def _encoder(self, uid: int) -> Encode:
        """Return what encodes entries of a core's own."""
        own_time = self._own_time
        return lambda index, term, kind, content: build_plain(index, term, kind, own_time(uid, kind), content)


class Enliven:
    """Lets members take part. `learn` hears of their machines, `mark` has a member looked at in the next turn and at
    the next tick."""

    def __init__(
        self,
        node_id: int,
        members: MutableMapping[int, Member],
        learn: Callable[[Member], None],
        mark: Callable[[Member], None],
    ) -> None:
        self._node_id = node_id
        self._members = members
        self._learn = learn
        self._mark = mark

    def __call__(self, member: Member, fresh: bool = False) -> None:
        """Let a member take part. A lone voter campaigns at once; a fresh group is first led by the node its uid picks,
        so that leaders are spread and nobody waits for an election timeout."""
        self._members[member.uid] = member
        self._learn(member)
        raft = member.raft
        voters = raft.configuration.voters
        alone = voters == (self._node_id,)
        picked = fresh and first_leader(member.uid, voters) == self._node_id
        if alone or picked:
            raft.campaign()
        self._mark(member)
        assert raft.role != LEADER or alone

    def others_have(self, member: Member) -> None:
        """Let a fresh group be led whose other members have it by now: what this node asked them when it began was
        before that, and lost. Without it an election timeout passes."""
        raft = member.raft
        asks = raft.role in (FOLLOWER, PRECANDIDATE) and not raft.leader
        if asks and first_leader(member.uid, raft.configuration.voters) == self._node_id:
            raft.campaign()
            self._mark(member)

    def recovered(self) -> None:
        """Let all members that a start found begin to run."""
        for member in list(self._members.values()):
            if member.state != STOPPED:
                self(member)

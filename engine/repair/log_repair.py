"""Groups that lost records on this node: what is known of the damage, what is kept, and how they are sound again
(docs/internals/repair.md; the rules are in `raft.mending`).

A damaged group keeps what it certainly once had: the log in front of the damage, or nothing (`whole`), and takes part
as a member that is being mended. Invariants: the row that says so is durable before anything that would hide the
damage is written, and it stays until the WAL has nothing more of the damaged batches, so that a start meets it in the
same way however often, and wherever it was cut off; a group of which this node has the only copy is stopped, because
nobody can mend it. Called by `recovery` and `unquiesce` at starts, by `applier` and `outbound` while running.

Whose turn it is to be mended, when a scrub found damage in records of a group that runs (`MendTurns`): a member that
lost records does not count until it is mended, and two of three at once would leave nobody to mend them, although each
has what the other lacks. So who finds damage asks its leader, which lets one go at a time, and only while a quorum goes
on without it; until then the member serves on as it did before anybody looked. A leader that is damaged itself first
lets go those who lack nothing that it lacks. This is about availability alone: damage that a read or a start meets is
mended at once, and what one leader allowed the next does not know. Called by `scrub` and `inbound`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import trio

from logyard.protocol.errors import Busy, Corrupt, LogyardError, NoSpace
from logyard.protocol.pending import PendingReply

from ..disk.door import is_short
from ..entry import Entry
from ..log import checkpoint_rows as rows
from ..log import meta_rows
from ..log.meta import MetaStore
from ..log.recovered import Recovered
from ..log.replay_result import ReplayResult
from ..raft.mending import Mend
from ..raft.quorum import has_quorum
from ..raft.state import LEADER
from ..recovery.damage import Damaged, blank, configuration_of, judge
from ..replica.apply import NotRestored
from ..replica.member import RUNNING, STOPPED, Member
from ..snapshot import format as snapshot_format
from ..snapshot.format import Snapshot
from ..transport.blobs import MEND_ASK, MEND_STOPPED, MEND_TURN, SendBlob
from ..types import Spec

log = logging.getLogger(__name__)

SCAN_ENTRIES = 256
PASSING = (NotRestored, NoSpace, Busy, MemoryError)
"""What says nothing of a group's records."""
AGAIN_S = 1.0
"""A member that can't be made anew for want of something is tried again after so long."""
ROUNDS = 1 << 16
"""Damages that one life of a node can number."""


class MetaBatch(Protocol):
    """What log repair needs of the meta store's batches."""

    meta: MetaStore

    async def commit(
        self, build: Callable[[], Iterable[rows.Put]], store: bool = False, then: Callable[[], None] | None = None
    ) -> None:
        """Store rows that are built under the lock, and call `then` under it when they are durable."""
        ...

    def snapshot(self, uid: int) -> meta_rows.SnapshotRow:
        """Return a group's stored snapshot, its chunks apart."""
        ...

    def load_snapshot(self, row: meta_rows.SnapshotRow) -> Snapshot:
        """Return what a row says, with its chunks. Raises `Corrupt`."""
        ...


class Storage(Protocol):
    """What log repair needs of what stores."""

    janitor_lock: trio.Lock

    async def void(self, uid: int) -> tuple[int, Callable[[], None]]:
        """Give up all that the WAL has of a group; return the newest batch's number, and what takes that back. The
        janitor must rest until one of both is for good."""
        ...

    def restart(self, uid: int) -> int:
        """Let the log of a group, of which the WAL has nothing, begin anywhere; return the newest batch's number."""
        ...

    def leave_chunks(self, uid: int, names: Sequence[bytes]) -> None:
        """Let the chunks go that a snapshot named which is stored no more."""
        ...

    def take_over(self, old: Member, member: Member) -> None:
        """Put a member made anew, with less in segments, in an old one's place."""
        ...

    def stored_through(self, member: Member) -> int:
        """Return up to which entry a log is in segments that are stored as such."""
        ...


class Reader(Protocol):
    """What log repair needs of the reader."""

    def stored_entries(self, member: Member, first: int, last: int) -> list[Entry]:
        """Return entries of the log as segments have them, at least one. Raises `Corrupt`."""
        ...


class Build(Protocol):
    """Build a member from its checkpoint, its snapshot and what the WAL says on top."""

    def __call__(
        self,
        spec: Spec,
        state: meta_rows.StateRow | None,
        snapshot_row: meta_rows.SnapshotRow | None,
        recovered: Recovered,
        mend: Mend | None = None,
    ) -> Member:
        """Raise `Corrupt` when they leave a gap."""
        ...


class Host(NamedTuple):
    """What log repair asks of whoever runs the members, and tells it."""

    build: Build
    enliven: Callable[[Member], None]
    """Let a member take part."""
    silence: Callable[[Member, str, str], None]
    """Let a member take no part any more, for a reason, in a state; what it led is told so."""
    stop: Callable[[Member, str], None]
    """Stop a member for good, for this reason."""
    spawn: Callable[..., None]
    tell_stopped: Callable[[Iterable[Member]], object]
    """Tell the other nodes of members that have stopped, and are not made anew."""


class LogRepair:
    """What this node knows of damage, by uid. `barred`: groups whose definition is lost."""

    def __init__(
        self,
        node_id: int,
        members: MutableMapping[int, Member],
        meta_batch: MetaBatch,
        storage: Storage,
        reader: Reader,
        host: Host,
    ) -> None:
        self._node_id = node_id
        self._members = members
        self._meta_batch = meta_batch
        self._storage = storage
        self._reader = reader
        self._host = host
        self.known: dict[int, Damaged] = {}
        self.barred: set[int] = set()
        # Groups that begin with nothing at this start, whatever the WAL says of them.
        self.blank: set[int] = set()
        self.through = 0
        self.mended = 0
        self._epoch = 0
        self._rounds = 0
        # Damaged while the directory was opened: mended as soon as the node runs.
        self._waiting: list[tuple[Member, str]] = []
        # By uid: stopped, and not made anew yet.
        self._off: dict[int, Member] = {}
        # Mended, and that is not stored yet.
        self._sound: dict[Member, Damaged] = {}

    # At a start

    def load(self, epoch: int) -> None:
        """Read the rows, in this life of the node."""
        self._epoch = epoch
        meta = self._meta_batch.meta
        for key, value in meta.scan(meta_rows.DAMAGED):
            self.known[int.from_bytes(key[1:], "big")] = Damaged.unpack(value)

    def judge(self, result: ReplayResult, hard_states: Container[int]) -> dict[int, Damaged]:
        """Return all groups that are damaged now. Those mended for good are forgotten."""
        meta = self._meta_batch.meta
        self.through = result.next_batch - 1
        uids = (row.uid for row in meta_rows.group_rows(meta))
        found = judge(self.known, result, hard_states, uids, meta.lost)
        gone = [uid for uid, one in self.known.items() if one.sound and one.through < result.first_batch]
        for uid in gone:
            del self.known[uid]
        if gone:
            meta.commit([rows.damaged(uid, None) for uid in gone])
        return found

    def new_round(self) -> int:
        """Return a number that no damage of this node's had before."""
        self._rounds += 1
        return self._epoch * ROUNDS + self._rounds

    def unfit(self, spec: Spec, row: meta_rows.SnapshotRow | None, error: Exception) -> Damaged:
        """Judge a group whose records make no member. Where it is the snapshot that can't be read, the rest is
        whole. Raises what says nothing of its records: then the node does not start, and nothing is given up."""
        if isinstance(error, PASSING):
            raise error
        reason = f"its records do not fit together: {type(error).__name__}: {error}"
        try:
            if row is not None:
                self._meta_batch.load_snapshot(row)
        except Exception:  # whatever damaged bytes provoke: one fault, one group
            return Damaged(reason, False, self.through, True)
        return Damaged(reason, True, self.through, True)

    def bar(self, uid: int, damaged: Damaged, recovered: Recovered) -> None:
        """Keep a group out whose definition is lost: it is mended as soon as another member has told it. BLOCKING."""
        if uid not in self.known and meta_rows.group_key(uid) not in self._meta_batch.meta.lost:
            return
        log.error("group %016x: its definition is damaged in both copies", uid)
        self.barred.add(uid)
        state = self._stored_state(uid)
        start = blank(uid, state, recovered)
        # Its promises outlive the WAL; the rest is given up only when somebody can bring it back.
        kept = start if state is None else replace(state, term=start.term, vote=start.vote, floor=start.floor)
        self._store(uid, damaged, [kept.put()])

    def admit(self, spec: Spec) -> Member:
        """Return the member of a group that was barred, whose definition another member told."""
        state = self._stored_state(spec.uid)
        known = self.known[spec.uid]
        start, chunks = blank(spec.uid, state, Recovered()), self._named(spec.uid)
        self._store(spec.uid, known, [start.put(), (meta_rows.snapshot_key(spec.uid), None)])
        self._storage.leave_chunks(spec.uid, chunks)
        self.barred.discard(spec.uid)
        mend = Mend(self.new_round(), known.terms)
        return self._host.build(spec, start, None, Recovered(), mend)

    def build(
        self,
        spec: Spec,
        damaged: Damaged,
        state: meta_rows.StateRow | None,
        snapshot: meta_rows.SnapshotRow | None,
        recovered: Recovered,
    ) -> Member:
        """Return the member of a damaged group, from what is certain; its row is durable when this returns.
        BLOCKING."""
        before = self.known.get(spec.uid)
        if not damaged.whole or damaged == before:
            try:
                mend = Mend(self.new_round(), damaged.terms)
                member = self._host.build(spec, state, snapshot, recovered, mend)
                return self._settle(member, damaged, [])
            except PASSING:
                # Nothing is wrong with what was kept.
                raise
            except Exception as error:  # as above
                log.warning("group %s: nothing of its log can be kept: %s", spec.name, error)
        start = blank(spec.uid, state, recovered)
        if configuration_of(spec, start).nodes() <= {self._node_id}:
            # Nobody could bring back what would be given up here.
            return self._settle(self._host.build(spec, None, None, Recovered()), damaged, [])
        damaged = damaged._replace(whole=True, through=max(damaged.through, self.through))
        mend = Mend(self.new_round(), damaged.terms)
        member = self._host.build(spec, start, None, Recovered(), mend)
        suffix = meta_rows.KEY.pack(spec.uid)
        puts: list[rows.Put] = [(key, None) for key in self._meta_batch.meta.lost if key.endswith(suffix)]
        chunks = self._named(spec.uid)
        member = self._settle(member, damaged, [*puts, (meta_rows.snapshot_key(spec.uid), None), start.put()])
        self._storage.leave_chunks(spec.uid, chunks)
        self.blank.add(spec.uid)
        return member

    def _settle(self, member: Member, damaged: Damaged, puts: list[rows.Put]) -> Member:
        """Store what is known, and have others mend the member, or stop it where there are none. BLOCKING."""
        if self.known.get(member.uid) != damaged or puts:
            self._store(member.uid, damaged, puts)
        member.explain(damaged.reason)
        if self.is_alone(member):
            stop(member, damaged.reason)
        else:
            log.error("group %s lost records here and is being mended: %s", member.spec.name, damaged.reason)
        return member

    def _stored_state(self, uid: int) -> meta_rows.StateRow | None:
        """Return a group's checkpoint, if there is one that can be read."""
        key = meta_rows.state_key(uid)
        try:
            value = self._meta_batch.meta.get(key)
            return meta_rows.StateRow.unpack(key, value) if value is not None else None
        except Exception:  # as above
            return None

    def _named(self, uid: int) -> tuple[bytes, ...]:
        """Return the chunks that a stored snapshot names, as far as it can be read. BLOCKING."""
        try:
            return snapshot_format.read_manifest(self._meta_batch.snapshot(uid).data, uid).chunks
        except Exception:  # as above
            return ()

    def _store(self, uid: int, damaged: Damaged, puts: list[rows.Put]) -> None:
        self._meta_batch.meta.commit([*puts, rows.damaged(uid, damaged.pack())])
        self.known[uid] = damaged

    def is_alone(self, member: Member) -> bool:
        """Return whether nobody else has the group: what is lost here is lost, and what is left is for people to
        judge."""
        return member.raft.configuration.nodes() <= {self._node_id}

    def is_left(self, member: Member) -> bool:
        """Return whether a group lost records at the start and nobody can mend it: all that there is of it is kept,
        also what no row names any more. One that `later` stopped lost none."""
        return member.damaged and self.is_alone(member)

    def later(self, member: Member, reason: str) -> bool:
        """Note damage that was met when the members had been made: this one does nothing before the node runs. Return
        whether nobody can mend it: then what is known of it, which is all that there is, is stored as ever, for a later
        start may read the rest."""
        if self.is_alone(member):
            log.error("group %s is stopped: %s", member.spec.name, reason)
            member.stop(reason)
            return True
        stop(member, reason)
        self._waiting.append((member, reason))
        return False

    def start(self) -> None:
        """Mend what `later` noted: the node runs."""
        waiting, self._waiting = self._waiting, []
        for member, reason in waiting:
            self._make_anew(member, reason)

    def revive(self, spec: Spec, error: Exception) -> Member:
        """Return the member of a hibernating group whose rows do not make one. BLOCKING, a commit of the meta store."""
        reason = f"its rows do not fit together: {type(error).__name__}: {error}"
        if isinstance(error, (*PASSING, OSError)):
            return self._stopped(spec, str(error) or reason)
        state = self._stored_state(spec.uid)
        damaged = Damaged(reason, state is None, self._storage.restart(spec.uid), True)
        try:
            return self.build(spec, damaged, state, None, Recovered())
        except LogyardError as error:
            return self._stopped(spec, f"{reason}; and it can't be mended now: {error}")

    def _stopped(self, spec: Spec, reason: str) -> Member:
        """Return a member that takes no part. Nothing of it is stored, so the next start has what there is."""
        member = self._host.build(spec, None, None, Recovered())
        stop(member, reason)
        return member

    # While running

    def found(self, member: Member, error: Corrupt) -> None:
        """Mend a group, and no other, as a read met damage in its segments or snapshot (law 7)."""
        if member.raft.stopped:
            return
        reason = str(error)
        if self.is_alone(member):
            self._host.stop(member, reason)
            return
        log.error("group %s lost records here: %s", member.spec.name, reason)
        self._host.silence(member, reason, STOPPED)
        self._make_anew(member, reason)

    def _make_anew(self, member: Member, reason: str) -> None:
        self._off[member.uid] = member
        self._host.spawn(self._rebuild, member, reason)

    def tell_stopped(self) -> None:
        """Say once more, once a second, which members have stopped: one that is not made anew yet does not say that it
        is damaged, and may wait for the janitor, for all of its log to be read, for room on the disk, or for good."""
        self._off = {uid: one for uid, one in self._off.items() if self._members.get(uid) is one}
        if self._off:
            self._host.tell_stopped(self._off.values())

    async def _rebuild(self, old: Member, reason: str) -> None:
        """Make a new member, which is mended by the others, of what is certain of a stopped one."""
        try:
            while True:
                try:
                    await self._rebuild_alone(old, reason)
                    return
                except (NoSpace, Busy) as error:
                    if self._members.get(old.uid) is not old:
                        raise
                    old.explain(f"{reason}; and it can't be mended now: {type(error).__name__}: {error}")
                    log.warning("group %s: %s", old.spec.name, old.reason)
                await trio.sleep(AGAIN_S)
        except Exception as error:
            # Of this group alone (law 7): it stays stopped until the next start.
            old.explain(f"{reason}; and it can't be mended now: {type(error).__name__}: {error}")
            log.exception("group %s: %s", old.spec.name, old.reason)

    async def _rebuild_alone(self, old: Member, reason: str) -> None:
        storage, uid = self._storage, old.uid
        async with storage.janitor_lock:
            if self._members.get(uid) is not old:
                return
            snapshot = await trio.to_thread.run_sync(self._snapshot, uid)
            if snapshot is not None and old.raft.log.term(snapshot.index) == snapshot.term:
                # What it covers is not needed of the log.
                old.raft.log.compact(snapshot.index, snapshot.term)
            good = await trio.to_thread.run_sync(self._good_through, old)
            through, take_back = await storage.void(uid)
            whole = old.raft.log.snapshot_index > 0 and snapshot is None
            state = self._cut_row(old, good) if not whole else _blank(old)
            before = self.known.get(uid)
            terms = before is not None and not before.sound and before.terms
            # The log goes on behind what segments have: nothing of it is in the WAL any more.
            damaged = Damaged(reason, terms, through, True)
            puts = [state.put(), rows.damaged(uid, damaged.pack())]
            if snapshot is None:
                puts.append((meta_rows.snapshot_key(uid), None))
            # It may be deleted meanwhile.
            try:
                await self._meta_batch.commit(lambda: puts if self._members.get(uid) is old else ())
            except BaseException:
                # No row says that the WAL's records do not count: they get their segment, as a start would have it.
                take_back()
                raise
            if self._members.get(uid) is not old:
                return
            self.known[uid] = damaged
            mend = Mend(self.new_round(), terms)
            member = self._host.build(old.spec, state, snapshot, Recovered(), mend)
            member.explain(reason)
            self._members[uid] = member
            storage.take_over(old, member)
            if snapshot is None:
                storage.leave_chunks(uid, old.chunks)
        self._host.enliven(member)

    def _snapshot(self, uid: int) -> meta_rows.SnapshotRow | None:
        """Return the stored snapshot, if it is whole."""
        meta_batch = self._meta_batch
        try:
            row = meta_batch.snapshot(uid)
            meta_batch.load_snapshot(row)
            return row
        except Busy:
            raise
        except LogyardError:
            return None

    def _good_through(self, member: Member) -> int:
        """Return the last entry up to which all of the log that is in segments can be read. Raises `Busy`."""
        reader = self._reader
        index = member.raft.log.snapshot_index + 1
        step = SCAN_ENTRIES
        # What a segment has that no commit stored goes with it at a start.
        end = self._storage.stored_through(member)
        while index <= end:
            try:
                entries = reader.stored_entries(member, index, min(end, index + step - 1))
            except (LogyardError, OSError) as error:
                if isinstance(error, Busy) or is_short(error):
                    # The rest may be as good as what was read.
                    raise Busy("the node's file descriptors or memory", AGAIN_S) from error
                if step == 1:
                    return index - 1
                step = 1
                continue
            index = entries[-1].index + 1
        return index - 1

    def _cut_row(self, member: Member, good: int) -> meta_rows.StateRow:
        """Return the checkpoint of a member whose log ends at `good`."""
        key, value = rows.state(member)
        assert value is not None
        row = meta_rows.StateRow.unpack(key, value)
        row.cut(good + 1)
        row.term_runs = [run for run in row.term_runs if run[0] <= good]
        row.commit = min(row.commit, good)
        row.extra["flushed"] = good
        first, *later = row.extra["configurations"]
        # The newest one is nearest to the truth, wherever the log ends: what comes again brings those in between.
        row.extra["configurations"] = [[min(first[0], good), 0, first[2]], *(one for one in later if one[0] <= good)]
        row.extra.pop("asleep", None)
        return row

    # Sound again

    def sound(self, member: Member) -> None:
        """Note that this member takes part again, as its core says."""
        known = self.known.get(member.uid)
        if known is None or known.sound:
            return
        member.explain("")
        self.mended += 1
        log.warning("group %s is mended: all up to entry %d is here", member.spec.name, member.raft.log.stable)
        self._sound[member] = known
        if len(self._sound) == 1:
            self._host.spawn(self._store_sound)

    async def _store_sound(self) -> None:
        """Store who is mended: until this is durable a start mends the groups once more, which costs nothing but
        that."""
        done: dict[int, Damaged] = {}

        def build() -> list[rows.Put]:
            mended, self._sound = self._sound, {}
            for member, known in mended.items():
                if self.known.get(member.uid) is known and member.raft.mend is None:
                    done[member.uid] = known._replace(sound=True, terms=False)
            return [rows.damaged(uid, one.pack()) for uid, one in done.items()]

        try:
            await self._meta_batch.commit(build, then=lambda: self.known.update(done))
        except LogyardError as error:
            log.warning("that groups are mended is not stored: %s", error)

    def status(self) -> dict[str, int]:
        """Return groups being mended, groups that nobody can mend, and how many were."""
        members = [self._members[uid] for uid in self.known if uid in self._members]
        return {
            "mending": sum(1 for member in members if member.raft.mend is not None and member.state != STOPPED),
            "stopped": sum(1 for member in members if member.state == STOPPED),
            "mended": self.mended,
        }


def _blank(member: Member) -> meta_rows.StateRow:
    """Return the checkpoint of a member that runs and begins with nothing."""
    raft, floors = member.raft, (member.floor, member.last_release)
    return blank(member.uid, None, Recovered(), (raft.term, raft.vote), floors, raft.base[1].encode())


def stop(member: Member, reason: str) -> None:
    """Let a group whose records are damaged take no part; what is known of it here is never stored."""
    log.error("group %s is stopped: %s", member.spec.name, reason)
    member.quarantine(reason)


ANSWER_S = 2.0
HELD_S = 10.0
"""So long a turn is kept until its holder says that it is damaged, from when on the leader sees for itself; and so long
one that has said that it stopped counts for nothing."""
UIDS_AT_ONCE = 1000


class MendTurns:
    """One node's: what it asks, and what it allows for the groups that it leads. `live`: the nodes that are up, this
    one among them; `find` wakes a group's member."""

    def __init__(self, node_id: int, live: Set[int], find: Callable[[int], Member | None], send: SendBlob) -> None:
        self._node_id = node_id
        self._live = live
        self._find = find
        self._send = send
        self._asked: dict[int, PendingReply[bool]] = {}
        self._next = 0
        # By uid: who may, until when.
        self._turns: dict[int, tuple[int, float]] = {}
        # By uid and node: until when a member there counts for nothing, as it has said that it stopped.
        self._stopped: dict[tuple[int, int], float] = {}
        # By uid: the highest damaged entry of a member here that waits for its turn.
        self.waiting: dict[int, int] = {}

    async def may_begin(self, member: Member, first: int) -> bool:
        """Return whether this node's member, which needs all entries from `first` on, may stop counting now. False,
        too, while no leader answers."""
        leader = member.raft.leader
        if member.raft.role == LEADER:
            return self._allow(member, self._node_id, first)
        self._next += 1
        request = self._next
        pending: PendingReply[bool] = PendingReply()
        self._asked[request] = pending
        try:
            if leader and self._send(leader, MEND_ASK, request, {"uid": member.uid, "first": first}):
                with trio.move_on_after(ANSWER_S):
                    return await pending.wait(trio.Event)
            return False
        finally:
            del self._asked[request]

    def tell_stopped(self, members: Iterable[Member]) -> None:
        """Tell the other nodes of this node's members that have stopped and are not made anew. These hear no more who
        leads, nor whom their groups consist of: all are told."""
        uids = [member.uid for member in members]
        for node in self._live - {self._node_id}:
            for at in range(0, len(uids), UIDS_AT_ONCE):
                self._send(node, MEND_STOPPED, 0, {"uids": uids[at : at + UIDS_AT_ONCE]})

    def on_blob(self, node: int, kind: int, request: int, header: Mapping[str, Any]) -> None:
        """Take the question of another node, its answer, or which of its members have stopped."""
        if kind == MEND_STOPPED:
            # Whoever leads them, or is to. No group is woken by it.
            now = trio.current_time()
            self._stopped = {one: until for one, until in self._stopped.items() if until > now}
            self._stopped |= {(uid, node): now + HELD_S for uid in header["uids"]}
        elif kind == MEND_ASK:
            member = self._find(header["uid"])
            ok = member is not None and self._allow(member, node, header["first"])
            self._send(node, MEND_TURN, request, {"ok": ok})
        elif request in self._asked:
            self._asked[request].set(header["ok"])

    def _allow(self, member: Member, node: int, first: int) -> bool:
        raft, now = member.raft, trio.current_time()
        if raft.role != LEADER or member.state != RUNNING:
            return False
        if node != self._node_id and self.waiting.get(member.uid, -1) >= first:
            return False
        if any(progress.round for other, progress in raft.progress.items() if other != node):
            return False
        stopped = {one for one in raft.configuration.nodes() if self._stopped.get((member.uid, one), now) > now}
        if not has_quorum(raft.configuration, set(self._live) - stopped - {node}):
            return False
        self._turns = {uid: turn for uid, turn in self._turns.items() if turn[1] > now}
        holder, _ = self._turns.setdefault(member.uid, (node, now + HELD_S))
        return holder == node

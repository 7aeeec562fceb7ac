"""Every limit of the engine: its unit in its name, its bounds, its default and the reason for it (law 9).

A limit that is reached gives `Busy` and never drops anything silently; what exceeds a limit by itself and is alone is
still let through, so that nothing is stuck for ever. `SystemConfig` is checked when it is made, so the rest of the
engine trusts it. Made by `service.config` from node.toml and the environment, or by `open_system`'s caller.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import TypeVar

from logyard.protocol.errors import BadRequest

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
BATCH_BYTES = 4 * MIB
"""Of `wal_batch_bytes`, where nobody chose: decision 0045."""
RING_ENTRIES_DUE = 128
"""Of a system group, above its snapshot: the less changed, the less is written, and kept by LMDB, at a time."""

_Number = TypeVar("_Number", int, float)
_SIZE = re.compile(r"([0-9][0-9_]*)\s*(B|KiB|MiB|GiB)?", re.ASCII)


def _limit(default: _Number, low: _Number, high: _Number, reason: str) -> _Number:
    return field(default=default, metadata={"low": low, "high": high, "reason": reason})


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig:
    """The limits of one system. Raises `BadRequest` naming the key of a value out of its bounds or against another."""

    # The shared WAL.
    wal_file_bytes: int = _limit(
        64 * MIB,
        MIB,
        4 * GIB,
        "A full file is sealed; larger files seal less often and take longer to replay and to empty.",
    )
    wal_batch_bytes: int = _limit(
        BATCH_BYTES,
        64 * KIB,
        64 * MIB,
        "Bytes of one sync at most, as far as the disk writes them in 10 ms (1 MiB if it does not), and no more than a "
        "quarter of a file (1 MiB where files are below 4 MiB): no disk gets faster with more than 1 MiB, but between "
        "two batches the WAL's thread waits for the interpreter.",
    )
    wal_stock_files: int = _limit(
        2,
        0,
        64,
        "Emptied files kept for reuse: writing into space written before is about three times as fast as into "
        "new space.",
    )
    wal_reserve_files: int = _limit(
        1,
        1,
        16,
        "Spare files that only a full disk uses, for truncations, deletions, configurations, terms and votes, so that "
        "it can be emptied.",
    )
    disk_reserve_bytes: int = _limit(
        64 * MIB,
        0,
        64 * GIB,
        "Allocated and given up when the disk is full, so that segments, snapshots and the meta store can go on.",
    )
    wal_unflushed_bytes_max: int = _limit(
        512 * MIB,
        4 * MIB,
        64 * GIB,
        "Sealed WAL whose entries are in no segment yet; bounds memtables and the time to recover.",
    )
    ring_slots: int = _limit(
        1024,
        16,
        65_536,
        "Entries that the ring of a system group has room for: with half of them, or 128, above its last snapshot the "
        "next one is due, with seven eighths commands wait. A ring that is there keeps its size.",
    )
    ring_slot_bytes: int = _limit(
        4 * KIB,
        4 * KIB,
        MIB,
        "Of one such entry, in blocks of 4 KiB; a larger one lies in a segment. A ring reserves slots times this.",
    )
    wal_queue_bytes_max: int = _limit(
        64 * MIB, MIB, 4 * GIB, "What may wait for the next batch while one is being synced, all groups together."
    )
    wal_seal_idle_ms: int = _limit(
        100,
        10,
        60_000,
        "After this long without writes an empty batch seals the last one, so that rot of it can't look like "
        "a torn tail (law 8).",
    )

    # Entries and records.
    entry_bytes_max: int = _limit(
        MIB + 64 * KIB,
        4 * KIB,
        64 * MIB,
        "Commands that wait for a group become one entry up to this size, which two full frames of a client with their "
        "tables fit; a larger command is an entry of its own.",
    )
    entry_records_max: int = _limit(16_384, 1, 1 << 20, "Records in one entry; bounds the time of one apply call.")
    record_bytes_max: int = _limit(
        64 * MIB,
        4 * KIB,
        GIB,
        "The largest frame a client or a peer may announce; checked before anything is allocated.",
    )

    # What may be in flight: received and not yet answered.
    client_inflight_bytes: int = _limit(64 * MIB, 64 * KIB, 4 * GIB, "One connection; above it its socket is not read.")
    group_inflight_bytes: int = _limit(
        48 * MIB,
        64 * KIB,
        4 * GIB,
        "One group, so that a busy log leaves room for the others; less than a client keeps under way costs its "
        "refused frames a second journey.",
    )
    node_inflight_bytes: int = _limit(
        256 * MIB, MIB, 64 * GIB, "All groups of this node; the bulk of its memory under load."
    )

    group_upload_bytes: int = _limit(
        16 * GIB,
        MIB,
        1024 * GIB,
        "Pieces of one group's large payloads that no record owns yet; a payload of 4 GiB must fit, and what clients "
        "leave behind is kept until their sessions end.",
    )
    apply_lag_bytes_max: int = _limit(
        64 * MIB,
        64 * KIB,
        4 * GIB,
        "Committed and not applied, one group: above it the machine is given time to follow.",
    )
    node_memory_bytes: int = _limit(
        GIB,
        32 * MIB,
        1024 * GIB,
        "Everything that entries and frames hold in memory: the payload cache gives way first, then clients wait.",
    )
    reserved_ratio: float = _limit(
        0.1,
        0.01,
        0.5,
        "Of each of these limits; kept for truncations, deletions, configurations and the engine's own commands, so "
        "that a full node can be emptied.",
    )

    # Replication.
    linger_ms: int = _limit(
        8,
        0,
        1000,
        "Where a node takes so much longer to write an entry than at best, since many groups have some under way, "
        "commands gather, to share entries; 0: never.",
    )
    linger_groups: int = _limit(
        150, 1, 1 << 20, "So many groups may have entries under way at least; commands of the others may gather."
    )
    append_bytes_max: int = _limit(
        MIB, 4 * KIB, 64 * MIB, "Entries in one append message; a larger entry travels alone."
    )
    append_inflight_bytes: int = _limit(
        16 * MIB,
        64 * KIB,
        GIB,
        "Sent to one follower of one group and not answered; a few round trips of a fast link, so that a follower "
        "keeps up also when no commit waits for it.",
    )
    append_inflight_messages: int = _limit(64, 1, 4096, "The same window in messages, for small entries.")
    follower_inflight_bytes: int = _limit(
        48 * MIB,
        MIB,
        4 * GIB,
        "Sent to one node and not acknowledged, all groups together; above it that node is served as it answers, "
        "from disk where need be, and the leader holds nothing for it.",
    )
    uncommitted_bytes_max: int = _limit(
        64 * MIB,
        MIB,
        4 * GIB,
        "Appended by a leader and not committed; bounds what a leader without a quorum piles up.",
    )
    peer_frame_bytes: int = _limit(8 * MIB, 64 * KIB, 64 * MIB, "One frame to a peer; a larger entry travels alone.")
    peer_queue_bytes: int = _limit(
        64 * MIB, MIB, 4 * GIB, "Waiting for one peer's socket; above it the link is reset and Raft probes again."
    )

    # Payloads.
    payload_cache_bytes: int = _limit(
        128 * MIB,
        0,
        64 * GIB,
        "Recent payload bytes in memory, all groups together: followers and tailing readers need no disk.",
    )
    generation_bytes: int = _limit(
        GIB,
        16 * MIB,
        16 * GIB,
        "Map size of one LMDB generation, fixed when it is made; also the unit in which disk is given back.",
    )
    generation_transaction_bytes: int = _limit(
        8 * MIB, MIB, 64 * MIB, "One LMDB commit: below 1 MiB the sync dominates, above 16 MiB nothing is won."
    )
    generation_files: int = _limit(
        1,
        0,
        1,
        "1: bodies of 16 KiB and more go to a file beside LMDB in new generations, around the page cache; 0: all "
        "bodies lie in LMDB, as in data directories of older builds.",
    )
    migrate_budget_bytes: int = _limit(
        4 * GIB,
        0,
        1024 * GIB,
        "Sealed WAL that may stay home of payloads; what dies before this fills up is never written twice.",
    )
    migrate_age_s: int = _limit(
        3600, 1, 365 * 86_400, "A sealed file older than this is migrated although the budget is not used up."
    )
    migrate_dead_ratio: float = _limit(
        0.5,
        0.0,
        1.0,
        "A sealed file with more than this share of dead payload bytes is migrated when nothing of it has died for ten "
        "seconds: its survivors cost little.",
    )
    segments_max: int = _limit(
        64,
        1,
        65_536,
        "With more segments than these the groups that need the oldest are asked for a snapshot, so that one slow log "
        "does not keep a file of all.",
    )
    migrate_bytes_s_min: int = _limit(
        128 * MIB,
        MIB,
        64 * GIB,
        "Copying to generations is never slowed below this: an idle disk should be done soon, a busy one keeps most "
        "of its speed.",
    )
    migrate_rate_ratio: float = _limit(
        1.5,
        1.0,
        100.0,
        "How fast payloads are copied, times the rate at which clients write: at 1 the debt never falls, more takes "
        "from the clients' share.",
    )
    migrate_debt_bytes_max: int = _limit(
        4 * GIB,
        MIB,
        1024 * GIB,
        "Sealed WAL above migrate_budget_bytes that waits to be migrated: from half of it on copying is not slowed "
        "down, towards the whole of it clients' large frames are, at the whole of it clients wait.",
    )
    rewrite_live_ratio: float = _limit(
        0.5,
        0.0,
        1.0,
        "A generation with less than this share alive is rewritten; 0.5 bounds space to twice the live bytes.",
    )

    pin_ms: int = _limit(
        30_000,
        10,
        600_000,
        "What is being read is kept so long at most: a stuck reader holds up no space, a slower one hears gone.",
    )

    # What lies on the disk is read again now and then, and repaired.
    scrub_every_s: int = _limit(604_800, 0, 31_536_000, "From the end of one scrub to the next; 0: only when asked.")
    scrub_bytes_per_s: int = _limit(32 * MIB, 64 * KIB, 64 * GIB, "How fast it reads at most; it gives way to clients.")

    # Snapshots.
    snapshot_entries: int = _limit(10_000, 16, 1 << 40, "Entries of a group since its last snapshot that make one due.")
    snapshot_piece_bytes: int = _limit(
        MIB, 64 * KIB, 8 * MIB, "One piece of a transfer; nothing urgent waits behind more than one."
    )
    snapshot_bytes_per_s: int = _limit(
        128 * MIB,
        64 * KIB,
        64 * GIB,
        "What one node pulls for snapshots and repairs; a node that returns leaves disk and network to clients.",
    )
    snapshot_stall_ms: int = _limit(
        10_000,
        100,
        600_000,
        "A peer that answers no pull for so long is passed over; a transfer without progress for twice this is over, "
        "and with it the pins of what it was offered.",
    )
    snapshot_lease_bytes: int = _limit(
        4 * GIB,
        MIB,
        1024 * GIB,
        "Sections of snapshots kept for transfers under way; beyond that the oldest transfer gets a newer snapshot.",
    )

    # Time. Timers decide when to campaign or to wake, never a commit or a read.
    tick_ms: int = _limit(50, 5, 10_000, "The clock of active groups; quiet ones are not ticked.")
    election_ticks: int = _limit(
        10, 2, 1000, "Ticks without a leader before a campaign, drawn from once to twice this."
    )
    election_groups: int = _limit(
        256,
        1,
        1_048_576,
        "Of the groups that know no leader so many at most stand for election at a time; the others wait for their "
        "turn.",
    )
    liveness_interval_ms: int = _limit(100, 10, 10_000, "Renewals between two nodes, however many groups they share.")
    liveness_timeout_ms: int = _limit(
        600, 50, 600_000, "A node without a counted renewal for this long is taken for dead."
    )
    hibernate_after_ms: int = _limit(
        10_000,
        0,
        86_400_000,
        "A group at rest for this long becomes a row on each of its nodes until it is used again; 0: never.",
    )
    hibernate_move_bytes: int = _limit(
        64 * KIB,
        0,
        64 * MIB,
        "Live payload of a group in WAL files that is copied to a generation so that the group may hibernate; one with "
        "more stays in memory until its files are migrated.",
    )
    disk_stall_ms: int = _limit(
        500,
        20,
        600_000,
        "A sync that takes longer stops this node's renewals, so that its leaderships move to nodes whose disks work; "
        "slower disks need more.",
    )
    disk_slow_ms: int = _limit(
        100,
        0,
        600_000,
        "A mean time of a sync at or above this makes a disk slow: leaderships move to nodes that need half as long at "
        "most; 0: never.",
    )
    disk_slow_for_ms: int = _limit(
        5000,
        50,
        600_000,
        "For how long it must be slow before that, and three times as long below half of the bound before it is fast "
        "again: nothing flaps.",
    )
    disk_probe_ms: int = _limit(
        500, 20, 60_000, "A disk that nothing is written to proves itself by a small sync this often."
    )
    handshake_timeout_ms: int = _limit(5000, 100, 60_000, "A connection that has not said who it is by then is closed.")
    reconnect_ms_min: int = _limit(50, 1, 60_000, "First pause before a peer is dialled again; doubles, with jitter.")
    reconnect_ms_max: int = _limit(2000, 10, 600_000, "Longest such pause: how late a returned node may be noticed.")

    # Machines.
    machine_tick_ms: int = _limit(
        1000, 10, 3_600_000, "How often the leader calls on_tick of the machines that have it; the others cost nothing."
    )
    machine_upgrade_percent: int = _limit(
        51,
        51,
        100,
        "Of a group's voters, how many must have a newer machine before it comes into force: 51 is a majority (the "
        "others vote on and wait until they are upgraded), 100 all.",
    )
    delivery_queue_bytes: int = _limit(
        16 * MIB,
        64 * KIB,
        GIB,
        "What may wait for one session's connection; more is dropped, as deliveries are at most once.",
    )

    # Sessions. Asked only when one is opened: what is replicated never depends on one node's configuration.
    sessions_max: int = _limit(
        10_000, 1, 1_000_000, "Sessions of one group; each costs its window of 64 replies in memory and snapshots."
    )
    session_reply_bytes_max: int = _limit(
        64 * MIB, 64 * KIB, 4 * GIB, "Kept replies of one group's sessions; above it no further session is opened."
    )
    session_ttl_ms_max: int = _limit(
        86_400_000,
        1000,
        2_592_000_000,
        "The longest a silent client's session may be kept; bounds what a crash leaves.",
    )

    # Clients and the process.
    poll_bytes_max: int = _limit(8 * MIB, 64 * KIB, GIB, "One answer to a poll; a larger record is answered alone.")
    poll_wait_s_max: int = _limit(60, 1, 3600, "The longest a poll may wait for new records.")
    connections_max: int = _limit(
        1024, 1, 65_536, "Client connections of a node; one file descriptor and two tasks each."
    )
    groups_max: int = _limit(
        100_000,
        1,
        10_000_000,
        "Groups of a node; an idle one costs bytes, but not none. What others create with it as a member comes all the "
        "same.",
    )
    switch_interval_us: int = _limit(
        50,
        5,
        5000,
        "Interpreter switch interval in the daemon: at the default 5000 a helper thread starves beside a busy loop.",
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            _check_bounds(entry, getattr(self, entry.name))
        if self.ring_slot_bytes % (4 * KIB):
            raise BadRequest(
                f"ring_slot_bytes = {self.ring_slot_bytes}: must be a multiple of 4 KiB", key="ring_slot_bytes"
            )
        if self.wal_batch_bytes != BATCH_BYTES:
            # The default follows the files (`log.wal.WalConfig.of`); what somebody chose must not contradict them.
            self._not_above("wal_batch_bytes", "wal_file_bytes")
        self._not_above("wal_file_bytes", "wal_unflushed_bytes_max")
        self._not_above("group_inflight_bytes", "node_inflight_bytes")
        self._not_above("append_bytes_max", "append_inflight_bytes")
        self._not_above("append_bytes_max", "follower_inflight_bytes")
        self._not_above("follower_inflight_bytes", "peer_queue_bytes")
        self._not_above("payload_cache_bytes", "node_memory_bytes")
        self._not_above("append_bytes_max", "peer_frame_bytes")
        self._not_above("peer_frame_bytes", "peer_queue_bytes")
        self._not_above("generation_transaction_bytes", "generation_bytes")
        self._not_above("reconnect_ms_min", "reconnect_ms_max")
        if self.liveness_timeout_ms < 3 * self.liveness_interval_ms:
            raise BadRequest(
                f"liveness_timeout_ms = {self.liveness_timeout_ms}: must be at least three times liveness_interval_ms "
                f"({self.liveness_interval_ms}), or one late renewal looks like a death",
                key="liveness_timeout_ms",
            )

    def _not_above(self, lower: str, upper: str) -> None:
        if getattr(self, lower) > getattr(self, upper):
            raise BadRequest(
                f"{lower} = {getattr(self, lower)}: must not exceed {upper} ({getattr(self, upper)})", key=lower
            )

    @property
    def ring_entries_due(self) -> int:
        """Entries of a system group since its last snapshot that make the next one due."""
        return min(self.snapshot_entries, self.ring_slots // 2, RING_ENTRIES_DUE)

    @property
    def ring_entries_max(self) -> int:
        """Entries of one above its snapshot at which ordinary commands wait."""
        return self.ring_slots - self.ring_slots // 8

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> SystemConfig:
        """Build from named values: numbers, or text ("67108864", "64 MiB", "0.5") as files and the environment have it.

        Raises `BadRequest` for an unknown key (suggesting the nearest), a value of the wrong kind or out of bounds.
        """
        known = {entry.name: entry for entry in fields(cls)}
        found: dict[str, int | float] = {}
        for key, value in values.items():
            if key not in known:
                raise unknown_key(key, known)
            found[key] = _number(known[key], value)
        return cls(**found)  # type: ignore[arg-type]  # _number gave each key its own kind


def unknown_key(key: str, known: Iterable[str], where: str = "") -> BadRequest:
    """Return the error for a key that does not exist, with the nearest that does. `where` names its table or file."""
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return BadRequest(f"unknown key {key}{f' in {where}' if where else ''}{hint}", key=key)


def _number(entry: Field[object], value: object) -> int | float:
    whole = isinstance(entry.default, int)
    if isinstance(value, str):
        return _parse(entry.name, whole, value.strip())
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{entry.name} = {value!r}: must be a number", key=entry.name)
    if whole and not isinstance(value, int):
        raise BadRequest(f"{entry.name} = {value!r}: must be a whole number", key=entry.name)
    return value if whole else float(value)


def _parse(name: str, whole: bool, text: str) -> int | float:
    if "_bytes" in name:
        match = _SIZE.fullmatch(text)
        if match is None:
            expected = 'must be bytes, as a number or as "64 MiB" (B, KiB, MiB, GiB)'
            raise BadRequest(f'{name} = "{text}": {expected}', key=name)
        return int(match[1]) * {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}[match[2] or "B"]
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise BadRequest(f'{name} = "{text}": must be a {"whole " if whole else ""}number', key=name) from None


def _check_bounds(entry: Field[object], value: float) -> None:
    low, high = entry.metadata["low"], entry.metadata["high"]
    if not low <= value <= high:
        raise BadRequest(f"{entry.name} = {value}: must be between {low} and {high}", key=entry.name)

"""The kinds of faults: what each is called in the counts, and which verb of the nemesis brings it about."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

VERBS: dict[str, tuple[str, ...]] = {
    "loss": ("N1.loss",),
    "replay": ("N1.replay",),
    "delay": ("N1.delay",),
    "halves": ("N2.halves",),
    "isolate": ("N2.isolate",),
    "ring": ("N2.ring",),
    "bridge": ("N2.bridge",),
    "one_way": ("N2.one_way",),
    "flap": ("N3.flap",),
    "clog": ("N3.clog",),
    "half_open": ("N3.half_open",),
    "reset": ("N3.reset",),
    "corrupt": ("N4.bit_flip", "N4.truncation", "N4.garbage", "N4.oversized"),
    "strangers": ("N5.unknown", "N5.removed"),
    "old_incarnation": ("N5.old_incarnation",),
    "kill": ("P1.kill",),
    "writer_dies": ("P2.wal_writer",),
    "segment_writer_dies": ("P2.segment_writer",),
    "snapshot_writer_dies": ("P2.snapshot_writer",),
    "pause": ("P3.pause",),
    "at_step": ("P5.crash_at_step", "P5.crash_in_recovery"),
    "wall_jump": ("C1.wall_jump",),
    "drift": ("C1.drift",),
    "freeze": ("C1.freeze",),
    "power_cut": ("D1.power_cut",),
    "torn": ("D2.torn",),
    "stale_tail": ("D2.zero_tail",),
    "lost_names": ("D3.lost_names",),
    "sync_error": ("D4.sync_EIO",),
    "write_error": ("D5.write_EIO",),
    "short_writes": ("D5.short",),
    "full": ("D6.full",),
    "slow_disk": ("D11.slow_sync",),
    "wiped": ("D12.wiped",),
    "old_copy": ("D12.old_copy",),
    "crash_in_migration": ("L1.crash_in_migration",),
    "crash_in_compaction": ("L2.crash_in_compaction",),
    "kill_all": ("G1.restart_all",),
    "poison": ("G1.poison",),
    "recreate": ("G2.recreated",),
    "transfer": ("M1.transfer",),
    "change_members": ("M1.remove", "M1.add"),
    "wal_middle": ("D7.wal_middle",),
    "segment": ("D8.segment",),
    "segment_index": ("D8.segment_index",),
    "meta": ("D8.meta",),
    "snapshot_row": ("D8.snapshot",),
    "vote_row": ("D8.vote",),
    "generation": ("D8.generation",),
    "atlas": ("D9.atlas",),
    "lost_write": ("D10.lost_write",),
    "misdirected": ("D10.misdirected",),
    "stale_read": ("D10.stale_read",),
    "payload": ("L4.payload",),
}
"""By verb, the kinds that it can hit."""
CLIENTS = ("Q1.retry", "Q1.duplicate", "Q1.lost_reply")
KINDS = frozenset(kind for kinds in VERBS.values() for kind in kinds) | set(CLIENTS)
FORCED = 12
"""So many at most of a seed's forced verbs are in one round."""


def forced_of(seed: int, share: int) -> tuple[str, ...]:
    """The `share` verbs that a seed tries until each has hit something: neighbouring seeds have neighbouring ones, so
    that a few seeds together try all."""
    verbs = sorted(VERBS)
    share = min(share, len(verbs))
    return tuple(verbs[(seed * share + at) % len(verbs)] for at in range(share))


def verbs_for(
    draw: random.Random, hits: Counter[str], forced: Sequence[str], allowed: frozenset[str] | None
) -> tuple[list[str], bool]:
    """The verbs of a round, and whether some of them are there because they hit nothing so far."""
    missing = [verb for verb in forced if any(not hits[kind] for kind in VERBS[verb])]
    draw.shuffle(missing)
    chosen = missing[:FORCED]
    rest = [verb for verb in VERBS if verb not in chosen]
    chosen += draw.sample(rest, draw.choice((1, 2, 4)))
    if allowed is not None:
        chosen = [verb for verb in chosen if verb in allowed]
    return sorted(chosen), bool(missing)

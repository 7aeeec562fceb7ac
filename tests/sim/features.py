"""What a run may have beyond what the first recorded seeds drew: each is on or off for a whole run.

Invariant: a run without features draws exactly what it drew before there were any, so that recorded seeds replay; which
features a fresh seed has comes from a random stream of its own. Used by `run`, the clients and `faults_features`.
"""

from __future__ import annotations

import random

FEATURES: dict[str, dict[str, tuple[str, ...]]] = {
    # Members that receive the log and do not vote, that are to vote when they have caught up, that may not lead.
    "roles": {
        "learner": ("M2.learner", "M2.promotable"),
        "demote": ("M2.demoted",),
        "swap": ("M2.joint",),
        "may_not_lead": ("M3.may_not_lead",),
    },
    # A node's renewals do not arrive while everything else does: liveness flaps, and no link breaks.
    "mute": {"mute": ("N6.mute",)},
    # A lock that is free, and a channel that has something, let others run first, as trio's do.
    "checkpoints": {},
    # Several logs are truncated beside migration and compaction.
    "truncations": {"truncate_beside": ("L5.truncated_beside",)},
    # Generations fill up between two entries, in small transactions.
    "maps": {"map_full": ("D6.map_full",)},
    # Commits of a store find no space, while WAL files and segments still do.
    "commits": {"commit_full": ("D6.commit_full",)},
    # A process has no descriptor left for a while.
    "descriptors": {"descriptors": ("P4.descriptors",)},
    # Groups fall asleep while everything goes on around them.
    "sleep": {},
    # Sessions with a short time to live, and sessions that are closed under load.
    "sessions": {"close_session": ("Q2.closed",)},
    # More than one consumer of a queue.
    "consumers": {},
    # Reads from whoever leads, without a round of its own.
    "reads": {},
    # Some nodes run the program before: an older version of a machine, and log time that catches up at double pace.
    "versions": {"old_program": ("U1.old",), "new_program": ("U1.new",), "use_new": ("U1.used",)},
    # Leases and delays, with both bounds, in two groups of their own; clocks that are set and nodes that stand still.
    "terms": {"wall_jump": ("C1.wall_jump",), "pause": ("P3.pause",)},
    # Each node's directory is checked offline when the run has ended.
    "offline": {},
    # All groups are system groups: what of their logs has no payload that lives lies in small rings.
    "rings": {"rot_ring": ("D8.ring",), "ring_tail": ("R1.ring_tail",)},
    # One group at a time has an entry under way, or a few, so that the proposals of the others wait and gather.
    "linger": {},
    # One group at a time stands for election, or a few, so that the others wait for their turn.
    "turns": {},
    # Who outlives a leader campaigns at times of its own.
    "staggered": {},
    # Groups go by a new segment, and their rows are stored, one or two at a time.
    "steps": {},
    # Large bodies of generations lie in files beside LMDB.
    "bodies": {},
    # In the end a group is poisoned, its command skipped, and all nodes get a program that does not fail at it.
    "repairs": {},
}
"""By feature, its verbs with the kinds that each can hit."""
LATER = ("rings", "linger", "bodies", "commits", "turns", "staggered", "steps", "repairs")
"""Features that came after histories were recorded, whose seeds do not have them."""
MORE_VERBS = {verb: kinds for verbs in FEATURES.values() for verb, kinds in verbs.items()}
MORE_KINDS = frozenset(kind for kinds in MORE_VERBS.values() for kind in kinds)
CHANCE = 0.6


def recorded(seed: int) -> frozenset[str]:
    """Return the features that a seed had when histories were recorded."""
    draw = random.Random(f"features of {seed}")
    return frozenset(name for name in FEATURES if name not in LATER and draw.random() < CHANCE)


def drawn(seed: int) -> frozenset[str]:
    """Return the features of a fresh seed."""
    return recorded(seed) | {name for name in LATER if random.Random(f"{name} of {seed}").random() < CHANCE / 2}

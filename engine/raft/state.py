"""The words that all verbs of the core share: roles and limits.

Invariant: every limit has a unit and a reason, and reaching one never drops anything silently (law 9). Read by every
module here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FOLLOWER: Final = 0
PRECANDIDATE: Final = 1
CANDIDATE: Final = 2
LEADER: Final = 3

ROLE_NAMES: Final = ("follower", "precandidate", "candidate", "leader")

UNTOLD: Final = 1
"""`Raft.untold`: a follower has everything and was not told the commit index; 0: none."""
NOTED: Final = 2
"""The host knows: it calls `tell` soon, which looks at all of them."""
LEFT: Final = 3
"""The host knows, and leaves it to entries for a while."""


class Lie(Exception):
    """What a peer said contradicts what is known for certain: only a broken or hostile one says it, or this member has
    stopped, as the group went on without it. Leaves `core.step` as its answer; nothing is changed then that matters."""


TERM_MAX: Final = (1 << 63) - 1
"""Terms and indexes beyond this are refused: a lying peer must not make a number overflow a fixed-width field."""


@dataclass(slots=True)
class Limits:
    """What one member may use. Ticks are the host's; bytes count metadata and payload (`Entry.size`). All members of a
    host may share one."""

    election_ticks: int = 10
    """Ticks without a leader before a campaign: drawn from [election_ticks, 2 * election_ticks) for each election."""
    append_bytes: int = 1 << 20
    """Bytes of entries in one APPEND: long enough for full disk speed, short enough not to hold up others."""
    inflight_bytes: int = 8 << 20
    """Bytes sent to one follower and not acknowledged: what a slow follower may pin in buffers."""
    inflight_messages: int = 64
    """APPENDs sent to one follower and not acknowledged."""
    follower_bytes: int = 64 << 20
    """Bytes sent to one node and not acknowledged, all groups together."""
    uncommitted_bytes: int = 64 << 20
    """Bytes proposed and not committed: a leader without a quorum must not grow without bound (etcd
    MaxUncommittedEntriesSize)."""
    lazy_commit: bool = False
    """The host asks for commit messages (`Raft.tell`) instead of getting one a follower with every `Ready`: entries
    that follow soon carry the commit index for nothing."""
    uncommitted_reserve: int = 4 << 20
    """Beyond that, for urgent entries only: what frees space must not wait for what fills it."""
    staggered: bool = False
    """Of the voters that outlive a leader the one that the uid picks campaigns before the others do, so that no two of
    them share the votes."""
    patience: int = 0
    """How often election timeouts are doubled, while this node should be the last to lead."""
    probe_ticks: int = 5
    """Ticks without an answer before a follower is asked again. There is no heartbeat that would notice a lost
    message."""

    def be_patient(self, doublings: int) -> None:
        """Double election timeouts so often from now on."""
        self.patience = doublings

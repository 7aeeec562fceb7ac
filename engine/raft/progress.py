"""What a leader knows of one follower (etcd tracker.Progress).

Invariants: match < next; PROBE has at most one APPEND under way, REPLICATE sends ahead of the answers within the
window, SNAPSHOT sends nothing until the host reports. `match` never counts what the follower did not say is stable.
Held by a leading `Raft` only.
"""

from __future__ import annotations

from typing import Final

PROBE: Final = 0
REPLICATE: Final = 1
SNAPSHOTTING: Final = 2

STATE_NAMES: Final = ("probe", "replicate", "snapshot")


class Progress:
    """`inflight` holds (last index, bytes) of each APPEND sent and not acknowledged; `waited` counts ticks without an
    answer.

    `told` is the commit index that was sent last, `commit` the one the follower says it has. `hollow`: the next probe
    carries no entries, because nothing says that the last ones were lost.
    """

    __slots__ = ("match", "next", "state", "paused", "hollow", "waited", "told", "commit", "inflight", "inflight_bytes")

    def __init__(self, next_index: int) -> None:
        self.match = 0
        self.next = next_index
        self.state: int = PROBE
        self.paused = False
        self.hollow = False
        self.waited = 0
        self.told = 0
        self.commit = 0
        self.inflight: list[tuple[int, int]] = []
        self.inflight_bytes = 0

    def probe(self, next_index: int, *, hollow: bool = False) -> None:
        """Ask anew from `next_index`: nothing that was sent is taken for received."""
        self.state = PROBE
        self.next = max(next_index, 1)
        self.paused = False
        self.hollow = hollow
        self.waited = 0
        self.told = 0
        self.inflight = []
        self.inflight_bytes = 0

    def replicate(self, next_index: int) -> None:
        """The logs agree below `next_index`: send ahead."""
        self.state = REPLICATE
        self.next = next_index
        self.paused = False
        self.waited = 0

    def free(self, match: int) -> None:
        """Everything up to `match` arrived."""
        inflight = self.inflight
        if inflight[-1][0] <= match:
            inflight.clear()
            self.inflight_bytes = 0
            return
        count = 0
        while inflight[count][0] <= match:
            self.inflight_bytes -= inflight[count][1]
            count += 1
        del inflight[:count]

    def __repr__(self) -> str:
        return (
            f"Progress({STATE_NAMES[self.state]} match {self.match} next {self.next} commit {self.commit}/{self.told}"
            f"{' paused' if self.paused else ''})"
        )

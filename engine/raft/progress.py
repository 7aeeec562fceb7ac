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


class Window:
    """Bytes sent to one node and not acknowledged, all groups of this node together, against their `limit`.

    `waiting` holds the uids of groups that have more to send, in the order in which they found the window full: its
    owner lets them try again when `bytes` has fallen. Exact: each `Progress` takes and gives back what is its own.
    """

    __slots__ = ("bytes", "limit", "waiting")

    def __init__(self, limit: int) -> None:
        self.bytes = 0
        self.limit = limit
        self.waiting: dict[int, None] = {}


class Progress:
    """`inflight` holds (last index, bytes) of each APPEND sent and not acknowledged; `waited` counts ticks without an
    answer.

    `told` is the commit index that was sent last, `commit` the one the follower says it has. `hollow`: the next probe
    carries no entries, because nothing says that the last ones were lost. `probed` is what the probe under way carries,
    in bytes; `window` is shared by all groups with a member on that node. `round`: the member on that node is damaged
    and says so under this number (0: it is sound); then `match` counts for sending only, and `fence` is the index from
    which on it counts again, -1 while none is confirmed (`mending`). `failed`: so did a transfer of a snapshot, and
    nothing was asked since: what is refused now is no answer to a probe.
    """

    __slots__ = (
        "match", "next", "state", "paused", "hollow", "waited", "told", "commit", "inflight", "inflight_bytes",
        "probed", "window", "round", "fence", "failed",
    )  # fmt: skip

    def __init__(self, next_index: int, window: Window) -> None:
        self.window = window
        self.probed = 0
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
        self.round = 0
        self.fence = -1
        self.failed = False

    def probe(self, next_index: int, *, hollow: bool = False) -> None:
        """Ask anew from `next_index`: nothing that was sent is taken for received."""
        self.state = PROBE
        self.next = max(next_index, 1)
        self.paused = self.failed = False
        self.hollow = hollow
        self.waited = 0
        self.told = 0
        if hollow:
            # Nothing says that it is lost: it is counted until the answer tells.
            self.probed += self.inflight_bytes
            self.inflight = []
            self.inflight_bytes = 0
        else:
            self.forget()

    def resume(self) -> None:
        """Ask anew after what was under way was lost. A probe goes on where it was: as long as nothing is known of the
        follower, its match says that it has nothing, and that would be a snapshot."""
        self.probe(self.match + 1 if self.state == REPLICATE else max(self.match + 1, self.next))

    def forget(self) -> None:
        """Forget what is under way: nothing is any more, or nobody here waits for it."""
        self.window.bytes -= self.inflight_bytes + self.probed
        self.inflight = []
        self.inflight_bytes = self.probed = 0

    def take_probe(self, size: int) -> None:
        """Count the probe under way, which carries `size` bytes."""
        self.window.bytes += size - self.probed
        self.probed = size

    def replicate(self, next_index: int) -> None:
        """Send ahead from now on: the logs agree below `next_index`."""
        self.state = REPLICATE
        self.next = next_index
        self.paused = False
        self.waited = 0
        self.take_probe(0)

    def take(self, last: int, size: int) -> None:
        """Count entries up to `last`, `size` bytes of them, as under way."""
        self.inflight.append((last, size))
        self.inflight_bytes += size
        self.window.bytes += size

    def free(self, match: int) -> None:
        """Take what arrived, everything up to `match`, out of the window."""
        inflight = self.inflight
        if inflight[-1][0] <= match:
            inflight.clear()
            self.window.bytes -= self.inflight_bytes
            self.inflight_bytes = 0
            return
        count = size = 0
        while inflight[count][0] <= match:
            size += inflight[count][1]
            count += 1
        del inflight[:count]
        self.inflight_bytes -= size
        self.window.bytes -= size

    def __repr__(self) -> str:
        return (
            f"Progress({STATE_NAMES[self.state]} match {self.match} next {self.next} commit {self.commit}/{self.told}"
            f"{' paused' if self.paused else ''}{f' damaged {self.round}/{self.fence}' if self.round else ''})"
        )

"""Who a peer is, and whether its data directory is the one it was: a pure table, one row a node (fault D12).

A directory has a random number of its own, drawn when it is made; a process has an epoch (raised and durable before
its first frame) and a random number of its start; and it says how many batches of its write-ahead log are durable. A
peer that comes with another directory, with an epoch that was used already, or with fewer batches than it once had
durable was wiped or restored from a copy: it has forgotten votes and acknowledgements, and must not take part under
its old name. Batches of a life that no other node knew do not count: a copy would make up with them for what it lacks.
Invariant: an honest restart is never refused, because everything compared was durable there before it was said here.
Only what was said with proof (`transport.proof`, TLS) is kept, in the meta store by the host. Called by the transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from logyard.protocol.errors import Outdated

EPOCH_MAX = 2**32
"""No node starts more often: a higher epoch is not one."""


class Origin(NamedTuple):
    """What a process says of itself when it meets another. `directory` 0: it does not say. `written` counts durable
    batches, 0: it knows that it lost some (their groups are in repair) and claims none."""

    directory: int
    epoch: int
    start: int
    written: int


NOBODY = Origin(0, 0, 0, 0)


class Vitals(NamedTuple):
    """What goes with each renewal: durable batches, how long the disk takes for a sync (us, 0: not known), and whether
    the node holds that for slow."""

    written: int = 0
    sync_us: int = 0
    slow: bool = False


class Acquaintances:
    """What this node knows of the others. `outdated` says, by node, why it is refused; `fresh` names nodes whose rows
    should be stored soon, `stale` those whose count alone has grown. `answered`: another node knows this life of this
    one; `counts`: that is stored, and batches written since its start may be told."""

    __slots__ = ("known", "outdated", "fresh", "stale", "answered", "counts")

    def __init__(self, known: Mapping[int, Origin] | None = None) -> None:
        self.known: dict[int, Origin] = dict(known or {})
        self.outdated: dict[int, str] = {}
        self.fresh: set[int] = set()
        self.stale: set[int] = set()
        self.answered = False
        self.counts = False

    @property
    def unstored(self) -> bool:
        """Whether something should be stored soon."""
        return bool(self.fresh) or (self.answered and not self.counts)

    def remember(self, known: Mapping[int, Origin]) -> None:
        """Take over what an earlier life of this directory knew."""
        self.known.update(known)

    def meet(self, node: int, origin: Origin, *, proved: bool = True) -> None:
        """Meet a process that introduces itself; raise `Outdated` when it is not the successor of the one that is
        known. Nothing is kept of one that did not prove to be that node."""
        known = self.known.get(node, NOBODY)
        reason = difference(known, origin)
        if not proved:
            if reason:
                raise Outdated(node, reason)
            return
        if reason:
            self.outdated[node] = reason
            raise Outdated(node, reason)
        self.outdated.pop(node, None)
        if origin == known or (origin.epoch == known.epoch and origin.written <= known.written):
            return
        self.known[node] = origin
        self.fresh.add(node)

    def heard(self, node: int, written: int) -> None:
        """Take a renewal of the process that was met: so much is durable there."""
        known = self.known.get(node)
        if known is not None and written > known.written:
            self.known[node] = known._replace(written=written)
            self.stale.add(node)

    def answer(self) -> None:
        """Take note that another node knows this life."""
        self.answered = True

    def count(self) -> None:
        """Take note that it is stored that another node knows this life."""
        self.counts = True

    def forget(self, node: int) -> None:
        """Forget a node: whoever comes next under this number is believed."""
        self.known.pop(node, None)
        self.outdated.pop(node, None)
        self.fresh.discard(node)
        self.stale.discard(node)

    def take(self) -> list[tuple[int, Origin]]:
        """Return what is to be stored; it counts as stored from now on."""
        nodes = sorted(self.fresh | self.stale)
        self.fresh.clear()
        self.stale.clear()
        return [(node, self.known[node]) for node in nodes]


def difference(known: Origin, origin: Origin) -> str:
    """Return why `origin` can't be a later start of `known`, or nothing."""
    if known.directory and known.directory != origin.directory:
        return f"its data directory {origin.directory:016x} is not the one it had, {known.directory:016x}"
    if origin.epoch > EPOCH_MAX:
        return f"no node started {origin.epoch} times"
    if origin.epoch < known.epoch:
        return f"its epoch {origin.epoch} is before {known.epoch}: an older copy of its data directory"
    if origin.epoch == known.epoch:
        if origin.start and known.start and origin.start != known.start:
            return f"it used epoch {origin.epoch} before, in another life: an older copy of its data directory"
    elif origin.written and origin.written < known.written:
        return f"its log has {origin.written} batches and had {known.written}: an older copy of its data directory"
    return ""


def plausible(origin: Origin) -> bool:
    """Return whether a node can have said this of itself. What can't be was stored by a release that asked for no
    proof."""
    return bool(origin.directory) and origin.epoch <= EPOCH_MAX

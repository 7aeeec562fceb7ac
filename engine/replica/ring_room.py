"""Back-pressure before a system group's ring wraps over entries that no snapshot covers.

Invariant: with half of the slots used above the newest snapshot one is asked for, at seven eighths ordinary commands
wait; the rest is for the engine's own, and for what frees space. A leader's rule: what a ring has no room for on a
follower goes to a segment (`log.ring_files`). It stands in front of the books of the node (`Admission`), for the
members of system groups alone, so nobody else's commands pay for it. Made by `build`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from logyard.protocol.errors import Busy

from ..config import SystemConfig
from .member import Member
from .proposals import Admission, ProposalQueue

RING: Final = "the ring of a system group"
RETRY_S: Final = 0.05
"""About what a snapshot takes."""


class RingRoom:
    """One member's. `counted(cause)` hears of each refusal; `look` has due snapshots taken soon."""

    __slots__ = ("_admission", "_due", "_most", "_counted", "_look", "_member", "_asked")

    def __init__(
        self, admission: Admission, config: SystemConfig, counted: Callable[[str], None], look: Callable[[], None]
    ) -> None:
        self._admission = admission
        self._due = config.ring_entries_due
        self._most = config.ring_entries_max
        self._counted = counted
        self._look = look
        self._member: Member | None = None
        # The snapshot above which the next one was asked for.
        self._asked = -1

    def watch(self, member: Member) -> None:
        """Judge by what this member has in its log."""
        self._member = member

    def admit(self, holder: ProposalQueue, size: int, reserved: bool) -> None:
        """Count a frame, or raise what says why it can't be taken."""
        member = self._member
        assert member is not None
        covered = member.compactable
        used = holder.raft.log.last_index - covered
        if used >= self._due and self._asked != covered:
            self._asked = covered
            self._look()
        if used >= self._most and not reserved:
            self._counted(RING)
            raise Busy(RING, RETRY_S)
        self._admission.admit(holder, size, reserved)

    def unqueue(self, size: int) -> None:
        """Count frames as proposed that waited for their turn."""
        self._admission.unqueue(size)

    def drop(self, size: int) -> None:
        """Count frames as answered that waited for their turn."""
        self._admission.drop(size)

    def settle(self, size: int) -> None:
        """Count a frame as answered."""
        self._admission.settle(size)

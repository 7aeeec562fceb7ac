"""Effects: what a machine asks for beside its reply, performed by the host. Data in, nothing awaited.

Invariant (law 11): what is replicated state happens on every member, at every apply of its entry and so again at
replay; what leaves the node is done only by the leader, only for entries of its own term, only above the floor.
Called by `applier` after each entry, and with the engine's own commands (SYSTEM frames).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..machine import Context, Effect, Position, Reject, Release
from .member import Member

if TYPE_CHECKING:
    from .system import System


def perform(system: System, member: Member, context: Context, effects: Sequence[Effect]) -> None:
    """Perform the effects of one entry, in order; called on every member."""
    for effect in effects:
        assert isinstance(effect, Release), effect
        release(system, member, context.index, effect.first, effect.end)


def release(system: System, member: Member, index: int, first: Position, end: Position) -> None:
    """What lives of a range is dead from `index` on; homes book exactly that, or a second release of the same
    payloads would be counted twice, and a file given up with others in it that live."""
    died = member.liveness.live_within(first, end)
    if died:
        member.liveness.release(first, end)
        member.last_release = index
        for one in died:
            system.storage.released(member, one.first, one.end)


def on_system(system: System, member: Member, context: Context, command: list[Any]) -> bytes | Reject:
    """Apply a command of the engine's own, [name, ...arguments], that is not about sessions. What effects it has are
    performed here. A `Reject` is its reply, like a machine's."""
    return Reject("unknown_command", f"this version of the engine knows no command {command[0]!r}")

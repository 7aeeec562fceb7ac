"""Effects: what a machine asks for beside its reply, performed by the host. Data in, nothing awaited.

Invariant (law 11): what is replicated state happens on every member, at every apply of its entry and so again at
replay; what leaves the node is done only by the leader, only for entries of its own term, only above the floor.
Called by `applier` after each entry, and with the engine's own commands (SYSTEM frames).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..machine import Context, Effect, Reject, Release
from .member import Member

if TYPE_CHECKING:
    from .system import System


def perform(system: System, member: Member, context: Context, effects: Sequence[Effect]) -> None:
    """Perform the effects of one entry, in order; called on every member."""
    for effect in effects:
        assert isinstance(effect, Release), effect
        if member.liveness.release(effect.first, effect.end):
            member.last_release = context.index
            system.storage.released(member, effect.first, effect.end)


def on_system(system: System, member: Member, context: Context, command: list[Any]) -> bytes | Reject:
    """Apply a command of the engine's own, [name, ...arguments], that is not about sessions. What effects it has are
    performed here. A `Reject` is its reply, like a machine's."""
    return Reject("unknown_command", f"this version of the engine knows no command {command[0]!r}")

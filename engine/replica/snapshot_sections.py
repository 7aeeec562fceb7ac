"""Replicated engine state beside the machine (sessions ...) as sections of a snapshot.

Invariant: names of these sections begin with "@", a machine's never do, so neither can hide the other; a section that
is not known is an error, never dropped. Called by `snapshot_store` at capture and restore.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..snapshot.format import Snapshot
from .apply import Unfit, UnknownVersion, newest_of
from .machine_state import MachineState
from .sessions import Sessions
from .uploads import Uploads

if TYPE_CHECKING:
    from ..ports import LivenessPort
    from .apply import Replicated
    from .member import Member

VERSION = 1
"""Of the engine's sections: another one is another format."""
SESSIONS = "@sessions"
UPLOADS = "@uploads"


def restore(member: Replicated, snapshot: Snapshot) -> None:
    """Restore machine and engine state as of a snapshot. Raises `UnknownVersion` before anything is changed, `Unfit`
    for what the machine raises."""
    if snapshot.version > newest_of(member.machine):
        raise UnknownVersion(snapshot.version, newest_of(member.machine))
    machine, engine = split(snapshot.sections)
    try:
        member.machine.restore(machine)
    except MemoryError:
        raise
    except Exception as error:
        raise Unfit(snapshot.index, error) from error
    # What has no section is empty.
    member.restore(
        snapshot.version, sessions_of(engine), uploads_of(member.spec.uid, engine), MachineState.of_sections(engine)
    )


def restore_member(member: Member, snapshot: Snapshot, liveness: LivenessPort, now_ns: int) -> None:
    """Set a member back to a snapshot, whose live set is `liveness`. Raises `UnknownVersion` and `Unfit`, with that
    restored."""
    member.rebase(liveness, snapshot.release, snapshot.timestamp, now_ns)
    restore(member, snapshot)


def sections(member: Member) -> dict[str, bytes]:
    """Return the engine's sections; none for a group that uses nothing of it."""
    found: dict[str, bytes] = {}
    if member.sessions is not None:
        found[SESSIONS] = member.sessions.encode()
    member.forget_uploads(member.liveness.released_before)
    if member.uploads is not None:
        found[UPLOADS] = member.uploads.encode()
    if member.kept is not None:
        found |= member.kept.sections()
    return found


def sessions_of(sections: Mapping[str, bytes]) -> Sessions | None:
    """Return the sessions' table; None for a group without any."""
    data = sections.get(SESSIONS)
    return Sessions.decode(data) if data is not None else None


def uploads_of(uid: int, sections: Mapping[str, bytes]) -> Uploads | None:
    """Return the table of unfinished uploads; None for a group without any."""
    data = sections.get(UPLOADS)
    return Uploads.decode(uid, data) if data is not None else None


def split(sections: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return (the machine's sections, the engine's)."""
    machine = {name: data for name, data in sections.items() if not name.startswith("@")}
    engine = {name: data for name, data in sections.items() if name.startswith("@")}
    return machine, engine


def merge(machine: Mapping[str, bytes], engine: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return all sections of one snapshot."""
    odd = [name for name in machine if name.startswith("@")]
    if odd:
        raise ValueError(f"a machine's section must not begin with '@': {', '.join(odd)}")
    return {**machine, **engine}

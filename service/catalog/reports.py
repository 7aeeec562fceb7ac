"""What a group's leader tells the catalogue of its members. Used by `keeper` and `mover`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from logyard.engine.raft.state import FORCED_TERMS
from logyard.engine.replica.member import Member


class Report(NamedTuple):
    """The members of group `uid`, by its configuration at entry `at`. `forced`: how often its members were forced
    before that (`force-shrink`): what was seen with less is older, whatever its index."""

    uid: int
    at: int
    voters: Sequence[int]
    learners: Sequence[int]
    forced: int = 0

    def plain(self) -> list[Any]:
        """Return it as the command has it; builds before 2026-11-28 know the first four fields alone."""
        return list(self) if self.forced else list(self[:4])


def report_of(member: Member) -> Report | None:
    """Return what a leader knows; None while its configuration is changing."""
    index, configuration = member.raft.base
    if configuration.joint:
        return None
    forced = member.raft.term // FORCED_TERMS
    return Report(member.uid, max(index, 1), configuration.voters, configuration.learners, forced)

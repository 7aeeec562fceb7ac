"""Bugs in replicated state: releases, sessions, snapshots, deletions. Planted by `planted`."""

from __future__ import annotations

from typing import Any

from logyard.engine.log.compactor import Compactor
from logyard.engine.log.group_logs import GroupLogs
from logyard.engine.replica import sessions, snapshot_sections
from logyard.engine.replica.member import Member
from logyard.engine.transfer import snapshot_store
from logyard.machines.log import AppendLog
from logyard.payloads.liveness import Liveness
from logyard.payloads.reference import Position
from logyard.pipeline.directory import groups

from .bugs import Bug, edited, hidden, nothing

KEPT = 8
"""Replies that a window cut too short keeps."""


def _releases_too_far(old: Any) -> Any:
    def release(member: Any, index: int, first: Any, end: Any) -> Any:
        return old(member, index, first, Position(end[0] + 1, 0))

    return release


def _encodes_no_replies(old: Any) -> Any:
    def encode(self: Any) -> bytes:
        with hidden(self.by_id.values(), "replies", dict):
            return bytes(old(self))

    return encode


def _cuts_the_window(old: Any) -> Any:
    def take(self: Any, session: int, sequence: int) -> Any:
        found = old(self, session, sequence)
        one = self.by_id.get(session)
        for number in [] if one is None else [number for number in one.replies if number <= one.highest - KEPT]:
            self._drop(one, number)
        return found

    return take


def _forgets_who_lives(old: Any) -> Any:
    def head(self: Any, member: Any, machine: Any) -> Any:
        snapshot = old(self, member, machine)
        return snapshot._replace(live=Liveness().encode_live_set(snapshot.index))

    return head


def _restores_less(old: Any) -> Any:
    def restore(self: Any, sections: Any) -> None:
        old(self, sections)
        self.start = max(0, self.start - 1)

    return restore


def _stores_nothing(old: Any) -> Any:
    async def forget(self: Any, members: Any, build: Any) -> None:
        """The rows stay."""

    return forget


BUGS = (
    Bug("released_too_far", "what lives is kept", [(Member, "release", _releases_too_far)]),
    Bug("sequence_taken_twice", "a session's frame is applied once", [(sessions.Sessions, "known", nothing)]),
    Bug("window_cut_short", "replies are kept for a whole window", [(sessions.Sessions, "take", _cuts_the_window)]),
    Bug(
        "replies_not_in_snapshots",
        "sessions are part of the state",
        [(sessions.Sessions, "encode", _encodes_no_replies)],
    ),
    Bug("sessions_not_restored", "sessions come back with a snapshot", [(snapshot_sections, "sessions_of", nothing)]),
    Bug(
        "snapshot_without_live_set",
        "a snapshot knows what lives",
        [(snapshot_store.SnapshotStore, "_head", _forgets_who_lives)],
    ),
    Bug("truncation_not_restored", "a snapshot is the whole state", [(AppendLog, "restore", _restores_less)]),
    # The offline check, asking for more than a state needs. (Less than a member applies: service/check/test_machines)
    Bug(
        "check_takes_sessions_for_losses",
        "the offline check looks for what the state names",
        [(groups, "names_entries", lambda old: lambda machine: True)],
        frozenset({"offline", "sessions"}),
    ),
    Bug(
        "shares_chosen_too_early",
        "what a migration copies is chosen when it is its turn",
        [
            (
                Compactor,
                "_migrate",
                edited(
                    ("some: list[int] = []", "some = sorted(file.shares)[:GROUPS_PER_JOB]"),
                    ("some += sorted(file.shares)[:GROUPS_PER_JOB]", "pass"),
                ),
            )
        ],
        featured=frozenset({"truncations", "checkpoints"}),
    ),
    Bug("deletion_not_stored", "a deleted group stays deleted", [(GroupLogs, "forget", _stores_nothing)]),
)

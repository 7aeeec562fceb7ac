"""Planted bugs: one override of product code each, which the simulator has to find from seeds it never saw.

`python -m tests.sim.planted [--bug NAME] [--seed S] [--cpu SECONDS] [--json]` tries fresh seeds until a check speaks.
Each row names the rule that the bug breaks; `test_planted` replays the seeds that are recorded in `planted.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from logyard.engine import identity
from logyard.engine.disk import Disk
from logyard.engine.errors import NotLeader
from logyard.engine.host import damage, effects, recovery, sessions, storage
from logyard.engine.host.durability import Durability
from logyard.engine.host.inbound import Inbound
from logyard.engine.host.system import System
from logyard.engine.log import meta, wal, wal_files
from logyard.engine.raft import core, election, quorum, raft_log, reads, replication
from logyard.engine.raft.core import LEADER
from logyard.payloads import layout
from logyard.payloads.reference import Position

from .disk import SimDisk
from .run import Result, Run

Swap = tuple[Any, str, Callable[[Any], Any]]
"""Where, which name, and what the old one becomes."""


class Bug(NamedTuple):
    """`rule`: what it breaks. `swaps`: the override."""

    name: str
    rule: str
    swaps: Sequence[Swap]


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Product code with this bug in it."""
    undo = []
    for owner, name, make in bug.swaps:
        before = owner.__dict__[name]
        undo.append((owner, name, before))
        swapped = make(before)
        swapped.original = before
        setattr(owner, name, swapped)
    try:
        yield
    finally:
        for owner, name, before in reversed(undo):
            setattr(owner, name, before)


@contextmanager
def unplanted(bug: Bug) -> Iterator[None]:
    """Within `planted`: the product as it is."""
    inside = [(owner, name, owner.__dict__[name]) for owner, name, _ in bug.swaps]
    for owner, name, swapped in inside:
        setattr(owner, name, swapped.original if hasattr(swapped, "original") else swapped)
    try:
        yield
    finally:
        for owner, name, swapped in inside:
            setattr(owner, name, swapped)


def nothing(old: Any) -> Any:
    """A step that is left out."""
    return lambda *arguments, **named: None


def _without(method: str) -> Callable[[Any], Any]:
    """A call during which the disk leaves out one kind of sync."""

    def make(old: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            before = SimDisk.__dict__[method]
            setattr(SimDisk, method, lambda self, target: None)
            try:
                return old(*arguments, **named)
            finally:
                setattr(SimDisk, method, before)

        return call

    return make


def _told_early(old: Any) -> Any:
    def ready(self: Any) -> Any:
        found = old(self)
        if found is not None and found.after:
            found.messages, found.after = [*found.messages, *found.after], ()
        return found

    return ready


def _votes_again(old: Any) -> Any:
    def on_vote(raft: Any, message: Any) -> None:
        if not raft.leader:
            raft.vote = 0
        old(raft, message)

    return on_vote


def _counts_prior_terms(old: Any) -> Any:
    def advance_commit(raft: Any) -> None:
        lead, raft.lead_index = raft.lead_index, 0
        try:
            old(raft)
        finally:
            raft.lead_index = lead

    return advance_commit


def _counts_unstable(old: Any) -> Any:
    def acknowledgement(raft: Any, context: int = 0) -> Any:
        message = old(raft, context)
        message.index = max(message.index, min(message.last, raft.validated))
        return message

    return acknowledgement


def _commits_alone(old: Any) -> Any:
    def advance_commit(raft: Any) -> None:
        if raft.log.stable >= raft.lead_index and raft.commit < raft.log.stable:
            raft.commit, raft.dirty = raft.log.stable, True

    return advance_commit


def _commits_unvalidated(old: Any) -> Any:
    def on_append(raft: Any, message: Any) -> None:
        old(raft, message)
        commit = min(message.commit, raft.log.last_index)
        if commit > raft.commit and raft.leader == message.sender and message.term == raft.term:
            raft.commit, raft.dirty = commit, True

    return on_append


def _stays_stable(old: Any) -> Any:
    def truncate(self: Any, from_index: int) -> None:
        stable = self.stable
        old(self, from_index)
        self.stable = stable

    return truncate


def _reads_at_once(old: Any) -> Any:
    async def read_index(self: Any, member: Any) -> int:
        if member.raft.role != LEADER:
            raise NotLeader(member.raft.leader)
        return int(member.raft.applied)

    return read_index


def _reads_without_own_term(old: Any) -> Any:
    def on_start(raft: Any, context: int) -> None:
        if raft.role != LEADER:
            raise NotLeader(raft.leader)
        raft.confirmed_reads = (*raft.confirmed_reads, (context, raft.commit))
        raft.dirty = True

    return on_start


def _releases_too_far(old: Any) -> Any:
    def release(system: Any, member: Any, index: int, first: Any, end: Any) -> None:
        old(system, member, index, first, Position(end[0] + 1, 0))

    return release


def _encodes_no_replies(old: Any) -> Any:
    def encode(self: Any) -> bytes:
        kept = {number: one.replies for number, one in self.by_id.items()}
        for one in self.by_id.values():
            one.replies = {}
        try:
            return bytes(old(self))
        finally:
            for number, one in self.by_id.items():
                one.replies = kept[number]

    return encode


def _retries_a_failed_sync(old: Any) -> Any:
    def put(self: Any, plan: Any) -> None:
        disk = self.disk
        real = disk.datasync

        def datasync(fd: int) -> None:
            try:
                real(fd)
            except OSError:
                real(fd)

        self.disk = _Through(disk, datasync)
        try:
            old(self, plan)
        finally:
            self.disk = disk

    return put


class _Through:
    """A disk with another `datasync`."""

    def __init__(self, disk: Disk, datasync: Callable[[int], None]) -> None:
        self._disk = disk
        self.datasync = datasync

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


def _drops_hard_states(old: Any) -> Any:
    def add(self: Any, item: Any) -> None:
        if item.hard_state is not None and not item.entries:
            item.hard_state = None
        old(self, item)

    return add


def _ignores_damage(old: Any) -> Any:
    def replay(*arguments: Any, **named: Any) -> Any:
        result = old(*arguments, **named)
        result.damage.clear()
        return result

    return replay


def _believes_anything(old: Any) -> Any:
    return lambda *arguments, **named: True


def _majority_of_one_less(old: Any) -> Any:
    def outcome(configuration: Any, votes: Any) -> int:
        return quorum.WON if sum(votes.values()) * 2 >= len(configuration.voters) else old(configuration, votes)

    return outcome


def _recycles_early(old: Any) -> Any:
    async def seal(self: Any, sealed: Any) -> None:
        await old(self, sealed)
        file = self.homes.files.get(sealed.file)
        if file is not None:
            self.recycle(sealed.file)

    return seal


def _sends_less(old: Any) -> Any:
    def on_messages(self: Any, node: int, messages: Any) -> None:
        for message in messages:
            if message.entries and len(message.entries) > 1:
                message.entries = [message.entries[0], *message.entries[2:]]
        old(self, node, messages)

    return on_messages


def _serves_unchecked(old: Any) -> Any:
    def parse(path: str, key: bytes, value: Any) -> Any:
        try:
            return old(path, key, value)
        except Exception:
            return layout.PIECE_ROW.unpack_from(value)[1], value[layout.PIECE_ROW.size :]

    return parse


BUGS = (
    Bug("wal_without_sync", "what is acknowledged is durable", [(wal.Wal, "_put", _without("datasync"))]),
    Bug(
        "wal_name_without_sync",
        "a file in use has a durable name",
        [(wal_files.WalFiles, "start", _without("sync_directory"))],
    ),
    Bug(
        "meta_name_without_sync",
        "a store's file has a durable name",
        [(meta.MetaStore, "_scan", _without("sync_directory"))],
    ),
    Bug("retried_sync", "a failed sync is never tried again", [(wal.Wal, "_put", _retries_a_failed_sync)]),
    Bug("vote_told_before_durable", "votes are durable before they are told", [(core.Raft, "ready", _told_early)]),
    Bug("votes_twice", "one vote a term", [(election, "on_vote", _votes_again)]),
    Bug("vote_for_shorter_log", "a leader has all that is committed", [(election, "_up_to_date", _believes_anything)]),
    Bug("elected_by_half", "a leader has a majority", [(election, "vote_outcome", _majority_of_one_less)]),
    Bug(
        "counts_prior_terms",
        "only entries of the own term are counted",
        [(replication, "advance_commit", _counts_prior_terms)],
    ),
    Bug(
        "acknowledges_unstable",
        "only stable entries are acknowledged",
        [(replication, "acknowledgement", _counts_unstable)],
    ),
    Bug("commits_alone", "a majority has what is committed", [(replication, "advance_commit", _commits_alone)]),
    Bug(
        "commits_unvalidated",
        "a follower commits what the leader validated",
        [(replication, "on_append", _commits_unvalidated)],
    ),
    Bug("stable_after_truncation", "stable falls with the log", [(raft_log.RaftLog, "truncate", _stays_stable)]),
    Bug("read_without_round", "a read is confirmed by a quorum", [(System, "read_index", _reads_at_once)]),
    Bug("read_before_own_entry", "a new leader knows what is committed", [(reads, "read", _reads_without_own_term)]),
    Bug("hard_state_dropped", "term and vote are durable", [(Durability, "add", _drops_hard_states)]),
    Bug(
        "hard_state_not_checkpointed",
        "a file goes when the store has what it says",
        [(storage.Storage, "hard_state_written", nothing)],
    ),
    Bug("damage_taken_for_torn", "a damaged record is mended, not cut", [(recovery, "replay", _ignores_damage)]),
    Bug("mend_forgotten", "who lost records acknowledges nothing before it is mended", [(damage, "Mend", nothing)]),
    Bug("released_too_far", "what lives is kept", [(effects, "release", _releases_too_far)]),
    Bug("sequence_taken_twice", "a session's frame is applied once", [(sessions.Sessions, "known", nothing)]),
    Bug(
        "replies_not_in_snapshots",
        "sessions are part of the state",
        [(sessions.Sessions, "encode", _encodes_no_replies)],
    ),
    Bug("recycled_before_migration", "a home goes when it is empty", [(storage.Storage, "_seal", _recycles_early)]),
    Bug("entry_lost_on_the_way", "a log has no holes", [(Inbound, "on_messages", _sends_less)]),
    Bug("rotten_piece_served", "no payload is served unchecked", [(layout, "parse_piece", _serves_unchecked)]),
    Bug("old_directory_believed", "who forgot takes no part", [(identity, "difference", lambda old: lambda *_: "")]),
)


def hunt(bug: Bug, seed: int, cpu_s: float, minutes: float = 1.0) -> tuple[Result | None, float, int]:
    """Fresh seeds until a check speaks: the failing result, the CPU it took, the seeds tried. A seed that the product
    itself does not pass counts for nothing."""
    began, tried = time.process_time(), 0

    def passes(seed: int, minutes: float) -> bool:
        with unplanted(bug):
            return not Run(seed, minutes).go().violations

    with planted(bug):
        while time.process_time() - began < cpu_s:
            tried += 1
            result = Run(seed, minutes).go()
            if result.violations and passes(seed, minutes):
                return result, time.process_time() - began, tried
            seed += 1
    return None, time.process_time() - began, tried


def main(arguments: Sequence[str]) -> int:
    """Hunt, print, judge."""
    parser = argparse.ArgumentParser("python -m tests.sim.planted", description=__doc__)
    parser.add_argument("--bug", default="", help="only this one")
    parser.add_argument("--seed", type=int, default=1000, help="the first seed")
    parser.add_argument("--cpu", type=float, default=60.0, help="seconds of CPU for each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows = []
    for bug in BUGS:
        if options.bug and bug.name != options.bug:
            continue
        result, spent, tried = hunt(bug, options.seed, options.cpu)
        first = result.violations[0].splitlines()[0] if result is not None else ""
        seed = result.seed if result is not None else None
        rows.append(
            {"bug": bug.name, "rule": bug.rule, "seed": seed, "cpu_s": round(spent, 2), "seeds": tried, "found": first}
        )
        if not options.json:
            print(f"{bug.name:28} {spent:6.1f} s  seed {seed}  {first[:150] or 'NOT FOUND'}", flush=True)
    if options.json:
        print(json.dumps({"bugs": rows, "caught": sum(row["seed"] is not None for row in rows)}))
    return 0 if all(row["seed"] is not None for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

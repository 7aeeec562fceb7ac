"""The log's way from the leader to its followers and back (Raft paper 5.3, 5.4.2; etcd handleAppendEntries).

Invariants: a follower acknowledges only what is stable and what the *current* leader's appends validated; only
entries of the leader's own term commit by counting; a leader's own share is its stable index. Called by `core` with
the term already settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from logyard.protocol.errors import BadRequest

from ..entry import CONFIGURATION, Entry
from . import membership, mending
from .configuration import Configuration
from .messages import APPEND, APPEND_REPLY, CONFIRM, SNAPSHOT, TIMEOUT_NOW, Message
from .progress import PROBE, REPLICATE, SNAPSHOTTING, Progress
from .quorum import committed_index
from .state import UNTOLD, Lie

if TYPE_CHECKING:
    from .core import Raft

Run: TypeAlias = tuple[int, int, list[Entry], int]
"""First index, the term before it, the entries, their bytes."""

NOTHING: tuple[Entry, ...] = ()
NONE: tuple[tuple[int, Configuration], ...] = ()


# ---- leader: sending


def feed(raft: Raft) -> None:
    """Build what every follower is due, within its window. Called once a `Ready`, so that a turn's entries share
    messages."""
    log = raft.log
    last = log.last_index
    commit = raft.commit
    limits = raft.limits
    run: Run | None = None
    for node, progress in raft.progress.items():
        if progress.state == REPLICATE:
            while progress.next <= last:
                window = progress.window
                if window.bytes >= window.limit:
                    window.waiting[raft.uid] = None
                    break
                if (
                    len(progress.inflight) >= limits.inflight_messages
                    or progress.inflight_bytes >= limits.inflight_bytes
                ):
                    break
                if run is None or run[0] != progress.next:
                    run = _run(raft, progress.next, last)
                    if run is None:
                        progress.probe(progress.next)
                        break
                _send_run(raft, node, progress, run)
            # While something is under way its answer comes first, and entries may carry the commit index by then.
            if progress.told < commit and (progress.match == last or (raft.leaving and progress.state == REPLICATE)):
                if limits.lazy_commit and not raft.leaving:
                    raft.untold = raft.untold or UNTOLD
                else:
                    _send_commit(raft, node, progress)
        if progress.state == PROBE and not progress.paused and node in raft.live:
            send_probe(raft, node, progress)


def tell(raft: Raft) -> bool:
    """Send the commit index to every follower that has everything and was not told it."""
    last = raft.log.last_index
    told = False
    for node, progress in raft.progress.items():
        if progress.state == REPLICATE and progress.told < raft.commit and progress.match == last:
            _send_commit(raft, node, progress)
            told = True
    return told


def _send_commit(raft: Raft, node: int, progress: Progress) -> None:
    index = progress.next - 1
    term = raft.log.term(index)
    if term is not None:
        _send(raft, node, progress, index, term, NOTHING, index)


def _send(
    raft: Raft, node: int, progress: Progress, prev: int, prev_term: int, entries: Sequence[Entry] | None, last: int
) -> None:
    progress.told = raft.commit
    raft.send(
        Message(
            APPEND,
            raft.uid,
            node,
            raft.node,
            raft.term,
            prev,
            prev_term,
            raft.commit,
            0,
            False,
            entries,
            prev + 1,
            last,
        )
    )


def _run(raft: Raft, first: int, last: int) -> Run | None:
    """Return what one APPEND of new entries from `first` on carries. None: a follower that wants them has to be
    probed."""
    log = raft.log
    found = log.window(first, last, raft.limits.append_bytes)
    prev_term = log.term(first - 1)
    return None if found is None or prev_term is None else (first, prev_term, *found)


def _send_run(raft: Raft, node: int, progress: Progress, run: Run) -> None:
    """Send one APPEND of new entries, ahead of the answers. Followers at the same place get the same list."""
    first, prev_term, entries, size = run
    end = first + len(entries) - 1
    _send(raft, node, progress, first - 1, prev_term, entries, end)
    progress.next = end + 1
    progress.take(end, size)


def send_probe(raft: Raft, node: int, progress: Progress) -> None:
    """Send one APPEND that finds out where the logs agree; the next one waits for its answer. A snapshot where the log
    is gone."""
    log = raft.log
    first = progress.next
    prev_term = log.term(first - 1)
    progress.paused = True
    progress.failed = False
    progress.waited = 0
    if prev_term is None:
        progress.state = SNAPSHOTTING
        # The host takes the snapshot's way: the follower hears of no leader by it, and one may follow upon another.
        declare(raft, node)
        raft.send(
            Message(SNAPSHOT, raft.uid, node, raft.node, raft.term, log.snapshot_index, log.snapshot_term, raft.commit)
        )
        return
    window = progress.window
    if progress.hollow or first > log.last_index or window.bytes >= window.limit:
        # While the window is full it finds out what it can without entries.
        _send(raft, node, progress, first - 1, prev_term, NOTHING, first - 1)
        return
    found = log.window(first, log.last_index, raft.limits.append_bytes)
    if found is None:
        progress.take_probe(raft.limits.append_bytes)
        _send(raft, node, progress, first - 1, prev_term, None, log.segment_last(first, raft.limits.append_bytes))
        return
    entries, size = found
    progress.take_probe(size)
    _send(raft, node, progress, first - 1, prev_term, entries, first + len(entries) - 1)


def declare(raft: Raft, node: int) -> None:
    """Say that this member leads, by an APPEND without entries: it waits for no disk, no window and no snapshot."""
    log = raft.log
    last = log.last_index
    raft.send(
        Message(
            APPEND, raft.uid, node, raft.node, raft.term, last, log.last_term, raft.commit, 0, False, NOTHING, last + 1,
            last,
        )
    )  # fmt: skip


def remind(raft: Raft, node: int) -> None:
    """Tell `node`, which does not know it, that this member leads: at once, whatever is under way to it, and also where
    its node is not held alive: it has just spoken."""
    progress = raft.progress.get(node)
    if progress is None:
        return
    declare(raft, node)
    if progress.state != SNAPSHOTTING:
        progress.resume()
        raft.dirty = True


def confirm(raft: Raft, node: int, progress: Progress) -> None:
    """Send an empty APPEND to `node`, which doubts that this member leads."""
    index = progress.next - 1
    term = raft.log.term(index)
    if progress.state == REPLICATE and term is not None:
        _send(raft, node, progress, index, term, NOTHING, index)
    else:
        remind(raft, node)


# ---- leader: answers


def on_append_reply(raft: Raft, m: Message) -> None:
    """Count what a follower's answer in this term says is stable there, move the window, commit (paper 5.3, 5.4.2)."""
    progress = raft.progress.get(m.sender)
    if progress is None:
        return
    progress.waited = 0
    if m.reject:
        _on_reject(raft, m, progress)
        return
    if m.index > raft.log.last_index or (progress.round and not mending.counts(raft, m, progress)):
        return
    match = flow(raft, progress, m)
    if match > raft.commit:
        advance_commit(raft)
    if raft.transferee == m.sender:
        push_transfer(raft)
    if m.context == CONFIRM:
        confirm(raft, m.sender, progress)


def flow(raft: Raft, progress: Progress, m: Message) -> int:
    """Count what a follower holds, whether it counts or not: move the window, send on. Returns what it has stable."""
    log = raft.log
    match = m.index
    last = log.last_index
    progress.commit = m.commit
    if match > progress.match:
        progress.match = match
        if progress.inflight:
            progress.free(match)
        if progress.next <= match:
            progress.next = match + 1
    state = progress.state
    if state != REPLICATE and (state == PROBE or progress.match >= log.snapshot_index):
        # What the follower holds but has not synced is not sent again.
        held = max(progress.match, min(m.last, last))
        progress.replicate(held + 1)
        if held > progress.match:
            # It is under way until it is acknowledged: a follower whose disk hangs must not be sent more and more.
            progress.take(held, log.bytes_of(progress.match + 1, held))
        raft.dirty = True
    elif progress.next <= last or (progress.told < raft.commit and not raft.untold):
        raft.dirty = True
    return match


def _on_reject(raft: Raft, m: Message, progress: Progress) -> None:
    """Step back to where the logs may agree: one step a term, not one an entry (paper 5.3 end; etcd
    findConflictByTerm)."""
    if progress.state == SNAPSHOTTING:
        return
    if progress.state == REPLICATE:
        if m.index <= progress.match:
            return
    elif progress.failed or m.index != progress.next - 1:
        return
    hint = min(m.context, m.index)
    if m.log_term > 0:
        # Never below what it has committed, which agrees with every leader of its lineage: asked there, it looks.
        hint = max(raft.log.conflict_hint(hint, m.log_term), min(m.commit, m.index))
    next_index = max(min(m.index, hint + 1), 1)
    if next_index <= progress.match:
        if progress.state == REPLICATE:
            next_index = progress.match + 1
        else:
            # It stored this once and has lost it, an older disk say: it does not count any more (pitfall 40).
            progress.match = next_index - 1
    progress.probe(next_index)
    raft.dirty = True


def push_transfer(raft: Raft) -> None:
    """Hand leadership to the target when it has everything (thesis 3.10)."""
    progress = raft.progress[raft.transferee]
    if progress.match == raft.log.last_index and not raft.transfer_sent:
        raft.transfer_sent = True
        raft.send(Message(TIMEOUT_NOW, raft.uid, raft.transferee, raft.node, raft.term))


def advance_commit(raft: Raft) -> None:
    """Commit what a quorum has stable, if it is of this leader's own term (paper 5.4.2, figure 8)."""
    log = raft.log
    if raft.pair is not None:
        a = log.stable
        b = raft.pair[0].match
        c = raft.pair[1].match
        if a > b:
            a, b = b, a
        index = a if c < a else (c if c < b else b)
    else:
        match = {node: progress.match for node, progress in raft.progress.items() if not progress.round}
        match[raft.node] = log.stable
        index = committed_index(raft.configuration, match)
    before = raft.commit
    if index <= before or index < raft.lead_index:
        return
    raft.commit = index
    raft.dirty = True
    if index == log.last_index:
        raft.uncommitted_bytes = 0
    else:
        done = log.window(max(before + 1, log.memory_first), index, 1 << 62)
        if done is not None:
            raft.uncommitted_bytes = max(0, raft.uncommitted_bytes - done[1])
    if before < raft.configuration_index <= index and not raft.voter:
        raft.leaving = True


# ---- follower


def on_append(raft: Raft, m: Message) -> None:
    """Take entries, or the commit index, from this term's leader (paper 5.3). Malformed runs are dropped like lost
    ones."""
    log = raft.log
    entries = m.entries
    end = prev = m.index
    if entries:
        tail = entries[-1]
        end += len(entries)
        if tail.index != end or entries[0].index != prev + 1 or tail.term > m.term or entries[0].term < m.log_term:
            return
    elif m.last > prev:
        return
    if raft.leader != m.sender:
        if raft.leader:
            raise Lie(f"two leaders in term {m.term}: {raft.leader} and {m.sender}")
        raft.leader = m.sender
        raft.transfer_sent = False
        raft.changed = raft.dirty = True
    raft.elapsed = raft.denials = 0
    raft.doubt = False
    fresh: Sequence[Entry] | None
    if prev == log.last_index and m.log_term == log.last_term:
        fresh = entries
    else:
        fresh = _reconcile(raft, m, prev, end)
        if fresh is None:
            return
    if fresh:
        configurations: Sequence[tuple[int, Configuration]] = NONE
        for entry in fresh:
            if entry.kind == CONFIGURATION:
                try:
                    configurations = membership.decode_entries(fresh)
                except BadRequest:
                    return
                break
        if fresh[0].index <= log.last_index:
            overwrite(raft, fresh[0].index)
        log.append(fresh)
        for index, configuration in configurations:
            membership.adopt(raft, index, configuration)
        raft.dirty = True
    if end > raft.validated:
        raft.validated = end
    # Never beyond what this leader's appends validated: an unvalidated tail may be another leader's (Ra 3aa50f29).
    if m.commit > raft.commit:
        commit = min(m.commit, raft.validated)
        if commit > raft.commit:
            raft.commit = commit
            raft.dirty = True
    if not fresh:
        acknowledge(raft)


def _reconcile(raft: Raft, m: Message, prev: int, end: int) -> Sequence[Entry] | None:
    """Return what of an APPEND, in the general case, is new here (from the first real conflict on). None: refused."""
    log = raft.log
    entries: Sequence[Entry] = m.entries or NOTHING
    if prev <= raft.commit:
        _check_lineage(raft, prev, m.log_term, entries)
    if prev < raft.commit:
        # What is committed agrees with every leader.
        if raft.commit > raft.validated:
            raft.validated = raft.commit
        entries = entries[raft.commit - prev :]
    elif log.term(prev) != m.log_term:
        hint = max(log.conflict_hint(min(prev, log.last_index), m.log_term), raft.commit)
        raft.send(
            Message(
                APPEND_REPLY,
                raft.uid,
                m.sender,
                raft.node,
                raft.term,
                prev,
                log.term(hint) or 0,
                raft.commit,
                hint,
                True,
            )
        )
        return None
    # Equal index and term mean equal logs up to there: a stale, shorter append ends here and truncates nothing
    # (pitfall 12).
    if not entries or (end <= log.last_index and log.term(end) == entries[-1].term):
        return NOTHING
    for at, entry in enumerate(entries):
        if log.term(entry.index) != entry.term:
            return entries[at:]
    return NOTHING


def _check_lineage(raft: Raft, prev: int, prev_term: int, entries: Sequence[Entry]) -> None:
    """Stop where a leader has, of what is committed here, something in another term: it is of a lineage that began
    below that (`force_shrink`), and this member's state is not its own. Of what is compacted only the end's term is
    known."""
    if raft.mend is not None:
        return
    log = raft.log
    base = log.snapshot_index
    for index, term in ((prev, prev_term), *((one.index, one.term) for one in entries[: raft.commit - prev])):
        known = log.term(max(index, base))
        if known is not None and (term > known if index < base else term != known):
            raft.stop()
            raise Lie(
                f"entry {max(index, base)} is committed here in term {known}, and entry {index} of its leader is of "
                f"term {term}: the group went on without this replica"
            )


def overwrite(raft: Raft, from_index: int) -> None:
    """Drop entries >= `from_index`: another leader's take their place. What is under way to the disk of them counts
    for nothing."""
    if from_index <= raft.commit:
        # No leader of ours lacks a committed entry (paper 5.4.3): the sender lies.
        raise Lie(f"entry {from_index} is committed (commit {raft.commit}) and would be overwritten")
    raft.log.truncate(from_index)
    void(raft, from_index)
    membership.revert(raft, from_index)


def void(raft: Raft, from_index: int) -> None:
    """Void what was handed out of entries >= `from_index`: it will not count when it is reported durable (ABA, pitfall
    11)."""
    raft.offered = min(raft.offered, from_index - 1)
    raft.truncated = min(raft.truncated, from_index) if raft.truncated else from_index
    raft.pending = [(*handed[:4], min(handed[4], from_index - 1)) for handed in raft.pending]
    raft.dirty = True


def acknowledge(raft: Raft, context: int = 0) -> None:
    """Tell the leader the last stable index that its appends validated, and the last one held at all."""
    if raft.mend is not None:
        mending.came_on(raft)
        return
    raft.send(acknowledgement(raft, context))


def acknowledgement(raft: Raft, context: int = 0) -> Message:
    """Return the message of `acknowledge`, for who sends it."""
    stable, validated = raft.log.stable, raft.validated
    raft.acked = match = stable if stable < validated else validated
    return Message(
        APPEND_REPLY, raft.uid, raft.leader, raft.node, raft.term, match, 0, raft.commit, context, False, None, 0,
        validated,
    )  # fmt: skip

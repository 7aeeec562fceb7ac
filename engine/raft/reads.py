"""Linearizable reads without a log entry: ReadIndex (Raft paper 8, thesis 6.4; etcd read_only.go).

Invariants: a read's index is the commit index when its round started, the round started after the read came in and
after an entry of the leader's own term was committed, and a quorum has answered that round in this term. No clock, no
lease: a paused process serves nothing stale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logyard.protocol.errors import NotLeader

from . import mending
from .messages import READ, READ_REPLY, Message
from .quorum import has_quorum
from .state import LEADER, Lie

if TYPE_CHECKING:
    from .core import Raft


class Reads:
    """`waiting` for the next round; `contexts` are in round `number`, which `acks` have answered (number 0: none
    under way). A negative context is the engine's own: see `confirm`."""

    __slots__ = ("waiting", "contexts", "number", "last_number", "index", "acks", "waited")

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.contexts: list[int] = []
        self.number = 0
        self.last_number = 0
        self.index = 0
        self.acks: set[int] = set()
        self.waited = 0

    @property
    def idle(self) -> bool:
        """Nobody waits."""
        return not self.waiting and not self.number


def read(raft: Raft, context: int) -> None:
    """Ask for a read index; it comes as a `Ready.reads`, or the context as a `Ready.failed_reads`. Raises `NotLeader`.

    Before the own no-op is committed a leader does not know the commit index: the read waits (paper 8).
    """
    if raft.role != LEADER:
        raise NotLeader(raft.leader)
    if raft.reads is None:
        raft.reads = Reads()
    raft.reads.waiting.append(context)
    raft.dirty = True


def confirm(raft: Raft, node: int) -> None:
    """Begin a round of its own, after this call, for the damaged member on `node`: who that is answers for nothing, so
    its quorum is one without it (`mending`)."""
    if raft.reads is None:
        raft.reads = Reads()
    found = raft.reads
    found.contexts = [context for context in found.contexts if context != -node]
    if -node not in found.waiting:
        found.waiting.append(-node)
    raft.dirty = True


def open_round(raft: Raft, reads: Reads) -> None:
    """Open one round for everybody who waits; those who come later wait for the next."""
    if reads.number:
        # A configuration change may have made the answers that came a quorum.
        _close_round(raft, reads)
    if reads.number or not reads.waiting or raft.commit < raft.lead_index:
        return
    reads.contexts, reads.waiting = reads.waiting, []
    reads.last_number += 1
    reads.number = reads.last_number
    reads.index = raft.commit
    reads.acks = {raft.node}
    _ask(raft, reads)
    _close_round(raft, reads)


def _ask(raft: Raft, reads: Reads) -> None:
    reads.waited = 0
    for node in raft.progress:
        if node not in reads.acks and raft.configuration.votes(node):
            ask_node(raft, reads, node)


def ask_node(raft: Raft, reads: Reads, node: int) -> None:
    """Send one voter the probe of the round under way."""
    raft.send(Message(READ, raft.uid, node, raft.node, raft.term, 0, 0, 0, reads.number))


def ask_again(raft: Raft, node: int) -> None:
    """Ask `node` again: the link to it was lost, and perhaps the round's probe with it."""
    reads = raft.reads
    if reads is not None and reads.number and node not in reads.acks and raft.configuration.votes(node):
        ask_node(raft, reads, node)


def tick(raft: Raft, reads: Reads) -> None:
    """Ask those again who have not answered for a while."""
    if reads.number:
        reads.waited += 1
        if reads.waited >= raft.limits.probe_ticks:
            _ask(raft, reads)


def on_read(raft: Raft, m: Message) -> None:
    """Count a follower's confirmation that it knows of no later term."""
    if raft.leader != m.sender:
        if raft.leader:
            raise Lie(f"two leaders in term {m.term}: {raft.leader} and {m.sender}")
        raft.leader = m.sender
        raft.changed = raft.dirty = True
    raft.elapsed = 0
    raft.doubt = False
    if raft.mend is None:
        raft.send(Message(READ_REPLY, raft.uid, m.sender, raft.node, raft.term, 0, 0, 0, m.context))


def on_read_reply(raft: Raft, m: Message) -> None:
    """Count an answer to the round under way."""
    reads = raft.reads
    if reads is None or not reads.number or m.context != reads.number or m.reject:
        return
    progress = raft.progress.get(m.sender)
    if progress is None or progress.round:
        return
    reads.acks.add(m.sender)
    _close_round(raft, reads)


def _close_round(raft: Raft, reads: Reads) -> None:
    if not has_quorum(raft.configuration, reads.acks):
        return
    index = reads.index
    contexts, reads.contexts = reads.contexts, []
    reads.number = 0
    raft.confirmed_reads += tuple((context, index) for context in contexts if context >= 0)
    for context in contexts:
        if context < 0:
            mending.confirmed(raft, -context, index)
    raft.dirty = True


def fail_all(raft: Raft) -> None:
    """Fail everything that waits: leadership is lost, and nothing of it can be answered here (pitfall 4)."""
    reads = raft.reads
    if reads is not None:
        raft.failed_reads += tuple(context for context in (*reads.contexts, *reads.waiting) if context >= 0)
        raft.reads = None

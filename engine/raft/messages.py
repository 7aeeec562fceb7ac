"""What members of a group say to each other: one slots class for all kinds, so that thousands cost little.

Invariant: a message states only what its sender holds in its own term (`term`), with two exceptions: a PREVOTE and a
granted PREVOTE_REPLY carry the term that *would be* campaigned for. Built by the verbs of this package, encoded by
`engine.transport.codec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..entry import Entry

PREVOTE: Final = 1
PREVOTE_REPLY: Final = 2
VOTE: Final = 3
VOTE_REPLY: Final = 4
APPEND: Final = 5
APPEND_REPLY: Final = 6
SNAPSHOT: Final = 7
READ: Final = 8
READ_REPLY: Final = 9
TIMEOUT_NOW: Final = 10
LEADER_GONE: Final = 11
DAMAGED: Final = 12
MEND: Final = 13
TERMS: Final = 14
TERMS_REPLY: Final = 15

NAMES: Final = (
    "", "PREVOTE", "PREVOTE_REPLY", "VOTE", "VOTE_REPLY", "APPEND", "APPEND_REPLY", "SNAPSHOT", "READ", "READ_REPLY",
    "TIMEOUT_NOW", "LEADER_GONE", "DAMAGED", "MEND", "TERMS", "TERMS_REPLY",
)  # fmt: skip

TRANSFER: Final = 1
"""`context` of a VOTE that the leader itself asked for (thesis 3.10): stickiness to that leader does not apply."""

HEARS: Final = 1
"""`context` of a denied PREVOTE_REPLY: its sender hears a leader, whose node is alive."""

CONFIRM: Final = 1
"""`context` of an APPEND_REPLY whose sender has reason to doubt that the receiver still leads, and wants to hear."""

MENDED: Final = 2
"""`context` of an APPEND_REPLY whose sender was damaged and is sound again; `log_term` names the damage (`Mend.round`).
"""


class Message:
    """One message of group `uid` from node `sender` to node `to`.

    ============= ==========================================================================================
    PREVOTE, VOTE index, log_term: the sender's last entry; context: `TRANSFER` or 0
    *_REPLY       index: the term that was asked for; reject: not granted; context of a pre-vote's: `HEARS` or 0
    APPEND        index, log_term: the entry before `first`; commit; entries first..last (last = first - 1: none).
                  entries None with last >= first: the host reads them from segments, then sends; it may send fewer
                  and lower `last`
    APPEND_REPLY  index: last *stable* index that matches; last: last matching index, stable or not; commit: the
                  follower's; context: `CONFIRM` or 0. reject: index is the refused `index`, context and log_term
                  the hint (index, term) below which the logs may agree
    SNAPSHOT      never sent: asks the host to bring `to` a snapshot at `index` (term log_term) or newer
    READ, reply   context: the round (thesis 6.4); reject: the sender of the READ is not the leader any more
    TIMEOUT_NOW   the receiver campaigns at once (thesis 3.10)
    LEADER_GONE   the sender led `term` and does not any more
    DAMAGED       the sender lost records, nothing it said counts; index, last, commit: as in an APPEND_REPLY, but no
                  promise; log_term: the last index of its log; context: which damage
    MEND          index: the commit index of the leader, confirmed since damage `context` was known to it
    TERMS, reply  which durable term has the receiver? index: digest of the sender's configuration; context: which
                  damage. Moves no term; reject: the sender can't tell
    ============= ==========================================================================================

    Messages that share one list of entries differ in `to` only.
    """

    __slots__ = (
        "kind", "uid", "to", "sender", "term", "index", "log_term", "commit", "context", "reject", "entries", "first",
        "last",
    )  # fmt: skip

    def __init__(
        self,
        kind: int,
        uid: int,
        to: int,
        sender: int,
        term: int,
        index: int = 0,
        log_term: int = 0,
        commit: int = 0,
        context: int = 0,
        reject: bool = False,
        entries: Sequence[Entry] | None = None,
        first: int = 0,
        last: int = 0,
    ) -> None:
        self.kind = kind
        self.uid = uid
        self.to = to
        self.sender = sender
        self.term = term
        self.index = index
        self.log_term = log_term
        self.commit = commit
        self.context = context
        self.reject = reject
        self.entries = entries
        self.first = first
        self.last = last

    def fill(self, entries: Sequence[Entry] | None) -> None:
        """Carry these entries, the first of those it names; None: what it carries is read when it is sent."""
        self.entries = entries
        if entries:
            self.last = entries[-1].index

    def tell(self, commit: int) -> None:
        """Say a newer commit index."""
        self.commit = commit

    def follow(self, index: int, term: int) -> None:
        """Leave out the entries up to this one, which go before."""
        self.index, self.log_term, self.first = index, term, index + 1

    def __repr__(self) -> str:
        return f"<{describe(self)}>"


def describe(message: Message) -> str:
    """Return one line for people: transcripts, logs, failures of tests."""
    m = message
    parts = [f"{NAMES[m.kind]} {m.sender}->{m.to} term {m.term}"]
    if m.kind in (PREVOTE, VOTE, APPEND, SNAPSHOT):
        parts.append(f"at {m.index}@{m.log_term}")
    elif m.kind == APPEND_REPLY:
        parts.append(f"at {m.index} last {m.last}" if not m.reject else f"at {m.index} hint {m.context}@{m.log_term}")
    elif m.kind in (DAMAGED, MEND, TERMS, TERMS_REPLY):
        parts.append(f"at {m.index} damage {m.context}" + (f" last {m.last}" if m.kind == DAMAGED else ""))
    if m.kind in (APPEND, APPEND_REPLY):
        parts.append(f"commit {m.commit}")
    if m.kind in (READ, READ_REPLY):
        parts.append(f"round {m.context}")
    elif m.kind in (PREVOTE, VOTE) and m.context:
        parts.append("transfer")
    elif m.kind == APPEND_REPLY and m.context == CONFIRM and not m.reject:
        parts.append("confirm?")
    elif m.kind == APPEND_REPLY and m.context == MENDED and not m.reject:
        parts.append(f"sound after damage {m.log_term}")
    if m.reject:
        parts.append("rejected")
    if m.kind == APPEND and m.last >= m.first > 0:
        if m.entries is None:
            parts.append(f"from segments {m.first}..{m.last}")
        else:
            parts.append("entries " + " ".join(f"{entry.index}@{entry.term}" for entry in m.entries))
    return " ".join(parts)

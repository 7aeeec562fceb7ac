"""The work a core hands its host, one object a turn (etcd's `Ready`).

Invariant: whatever a `Ready` says may be done in any order *except* as its fields state. Built by `core.Raft.ready`,
consumed by `engine.host.ready_loop`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..entry import Entry
from .messages import Message


class Ready:
    """Fields, by when they may be acted on.

    `truncated`
        Before anything is written: the log was overwritten from this index on (0: it was not). What the WAL, segments
        and the owed replies say of this index and above is void. It comes with the entries that replace the old ones,
        except after an installed snapshot, when it may come alone.
    `hard_state`
        (term, vote) to make durable, together, or None when unchanged.
    `entries`
        To make durable after (or with) `hard_state`; they are in the core's log already. Shape: contiguous, ascending.
    `messages`
        May leave at once, before `hard_state` and `entries` are durable (law 2 allows a leader's APPENDs that).
    `after`
        May leave only when this `hard_state` and these `entries` are durable. Never without a `hard_state`.
    `commit`
        The commit index: the host may apply up to here, also what is not yet durable on this node.
    `reads`, `failed_reads`
        (context, index): the read may be served once `index` is applied. Contexts that will not be answered: the
        leader changed.
    `role_changed`
        `role`, `leader` or `term` of the core are not what they were, or `Raft.mend` is None again.

    After the `hard_state` and `entries` of a `Ready` that has either are durable, the host calls
    `Raft.on_persisted(*ready.token)`: once for each such `Ready`, in order.
    """

    __slots__ = (
        "hard_state", "entries", "messages", "after", "commit", "reads", "failed_reads", "role_changed", "truncated",
        "token",
    )  # fmt: skip

    def __init__(
        self,
        hard_state: tuple[int, int] | None,
        entries: Sequence[Entry],
        messages: Sequence[Message],
        after: Sequence[Message],
        commit: int,
        reads: Sequence[tuple[int, int]],
        failed_reads: Sequence[int],
        role_changed: bool,
        truncated: int,
        token: tuple[int, int, int, int] | None,
    ) -> None:
        self.hard_state = hard_state
        self.entries = entries
        self.messages = messages
        self.after = after
        self.commit = commit
        self.reads = reads
        self.failed_reads = failed_reads
        self.role_changed = role_changed
        self.truncated = truncated
        self.token = token

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name in self.__slots__ if (value := getattr(self, name)))
        return f"Ready({fields})"

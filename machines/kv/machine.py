"""The KV machine: keys with revisions, transactions, history, leases (what users of etcd know).

Commands, questions and replies are msgpack (`command`, docs/machines/kv.md). A frame holds operations: each record
that has a command begins one, records without any are more payloads of the one before. A frame's reply is the replies
of its operations, one behind the other: ``[0, revision, ...]``, or ``[1, code, message, details]`` for one that was
refused and changed nothing. State holds metadata only; what is not kept of an entry's payloads is released with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

from logyard.engine.machine import (
    Append,
    Applied,
    Batch,
    Context,
    Effect,
    Frame,
    PayloadRange,
    PayloadRef,
    Reject,
    Timer,
)

from . import txn
from .budget import Budget
from .command import (
    COMPACT,
    GRANT,
    KEEP,
    KEYS_ONLY,
    LEASES,
    PURGE,
    PUT,
    RANGE,
    REFERENCES,
    REVOKE,
    STATUS,
    TIME_TO_LIVE,
    VALUES,
    Operation,
    Order,
    Put,
    Range,
    Refusal,
    is_plain,
    number,
    parse,
    range_of,
    unpacked,
)
from .history import VALUE
from .keeping import Keeping, ranges, spans_of
from .range import row, select
from .snapshot import Frozen, freeze, thaw
from .state import State

HISTORY_REVISIONS = 100_000
HISTORY_BYTES = 256 << 20
PURGE_REVISIONS = 5000
"""History dropped by one follow-up command: a compaction never stops the node for long."""
PURGE_FACTOR = 4
"""Old revisions that an entry may drop for each operation of its own: history shrinks faster than it grows."""
TIMER = "leases"
PURGE_COMMAND: bytes = msgpack.packb([PURGE])
VALUES_MAX = 10_000
SINGLE = 4
"""Elements of a question for one key: its number, the key, no end, a revision."""
pack = msgpack.Packer().pack
"""`msgpack.packb` without a new buffer each time."""


class Fetched(NamedTuple):
    """The answer to a question, and the payloads whose bytes belong to it, with their `size` together."""

    answer: bytes
    payloads: Sequence[tuple[int, int]] = ()
    size: int = 0


class KV:
    """See the module. `history`, `history_bytes`: older revisions and their values beyond that are compacted by
    itself."""

    __slots__ = (
        "state", "history", "history_bytes", "term", "armed", "purging", "keeping", "_effects", "_index", "_budget",
        "_fresh",
    )  # fmt: skip
    version = 1
    renews_terms = True
    """`_begin`: a new leader's first command gives every lease all of its time again."""

    def __init__(self, history: int = HISTORY_REVISIONS, history_bytes: int = HISTORY_BYTES) -> None:
        self.state = State()
        self.history = history
        self.history_bytes = history_bytes
        # Of the newest command: another one says that the leader changed.
        self.term = 0
        self.armed: int | None = None
        # A follow-up that goes on dropping history is under way.
        self.purging = False
        self.keeping = Keeping()
        self._effects: list[Effect] = []
        # What the entry at `_index` may cost still, once something asked; a frame of it has begun since.
        self._index = 0
        self._budget: Budget | None = None
        self._fresh = True

    # Commands

    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        """Apply one entry: a reply a frame; whatever payload is not kept is released. One in pieces is refused: it is
        no value."""
        self._begin(context)
        replies: list[bytes | Reject] = []
        work = 0
        for frame in frames:
            if frame.pieces:
                replies.append(_in_pieces())
                continue
            self._fresh = True
            if frame.uniform:
                replies.append(self._operation(context, frame.commands, frame.first, frame.records))
                work += 1
            else:
                parts = [
                    self._operation(context, command, frame.first + at, records)
                    for command, at, records in _operations(frame)
                ]
                replies.append(b"".join(parts))
                work += len(parts)
        return Batch(replies, self._end(context, work, spans_of([frame for frame in frames if not frame.pieces])))

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        """Apply one command: a follow-up, or one that another machine (a mux) passes on."""
        if any(ref.index != context.index for ref in refs):
            raise _in_pieces()
        self._begin(context)
        first = refs[0].ordinal if refs else 0
        reply = self._operation(context, command, first, len(refs))
        return Applied(reply, self._end(context, 1, [(first, first + len(refs))] if refs else []))

    def _begin(self, context: Context) -> None:
        self._effects = []
        self._fresh = True
        if context.index != self._index:
            # A mux applies the commands of one entry one by one.
            self._index, self._budget = context.index, None
        if context.term != self.term:
            self.term = context.term
            self.state.leases.extend(context.timestamp)

    def _end(self, context: Context, work: int, spans: Sequence[tuple[int, int]]) -> list[Effect]:
        """Return what the entry leaves behind: history that shrinks, a timer, releases."""
        state, effects = self.state, self._effects
        state.shrink(self.history, self.history_bytes, PURGE_FACTOR * work)
        if state.purgeable and not self.purging:
            self.purging = True
            effects.append(Append(PURGE_COMMAND))
        due = state.leases.due()
        if due != self.armed:
            self.armed = due
            effects.append(Timer(TIMER, due))
        effects += self.keeping.finish(context, spans, state.released)
        state.released.clear()
        return effects

    def _operation(self, context: Context, data: bytes, first: int, records: int) -> bytes:
        state = self.state
        try:
            asked = unpacked(data)
            if asked[0] == PUT and is_plain(asked):
                # Most of what comes: there is nothing to decide, and no payload.
                state.put_alone(asked[1], asked[2])
                written: bytes = pack((0, state.revision, None))
                return written
            command = parse(asked, context.index, first, records)
            if isinstance(command, Order):
                found = self._order(context, command)
            else:
                found = self._write(command, context.index)
        except Refusal as refusal:
            refused: bytes = pack((1, refusal.code, refusal.message, refusal.details))
            return refused
        done: bytes = pack((0, state.revision, *found))
        return done

    def _write(self, command: Operation, index: int) -> tuple[Any, ...]:
        state, budget = self.state, self._frame_budget()
        planned = txn.plan(state, command, budget)
        txn.check(state, planned)
        left = budget.bytes
        try:
            found = txn.perform(state, planned, budget)
        except Refusal:
            # By a read, of what the writes before it made, or for want of room.
            budget.undo(left, state.abandon())
            raise
        state.commit()
        for one in txn.leaves(planned):
            if type(one) is Put and type(one.value) is tuple and one.value[0] == index:
                self.keeping.keep(one.value[1])
        return found

    def _frame_budget(self) -> Budget:
        """Return what the frame under way may cost still."""
        if self._budget is None:
            self._budget = Budget.of_entry(len(self.state.keys))
        elif self._fresh:
            self._budget.begin_frame()
        self._fresh = False
        return self._budget

    def _order(self, context: Context, order: Order) -> tuple[Any, ...]:
        state, leases = self.state, self.state.leases
        if order.code == COMPACT:
            state.compact(order.first)
        elif order.code == PURGE:
            self.purging = False
            state.purge(PURGE_REVISIONS)
        elif order.code == GRANT:
            lease = leases.grant(order.first, order.second, context.timestamp)
            return lease, leases.rows[lease].ttl
        elif order.code == KEEP:
            return (leases.keep(order.first, context.timestamp),)
        elif order.code == REVOKE:
            leases.check(order.first)
            return (self._revoke(order.first),)
        return ()

    def _revoke(self, lease: int) -> int:
        keys = self.state.leases.end(lease)
        for key in keys:
            self.state.delete(key)
        self.state.commit()
        return len(keys)

    def on_timer(self, context: Context, name: str) -> Applied:
        """End the leases whose time is over: each one's keys go at a revision of their own."""
        self._begin(context)
        self.armed = None
        for lease in self.state.leases.over(context.timestamp):
            self._revoke(lease)
        return Applied(b"", self._end(context, 1, ()))

    # Snapshots

    def snapshot(self) -> Mapping[str, bytes]:
        """Return all sections, written now."""
        return self.freeze().sections()

    def freeze(self) -> Frozen:
        """Return a view of the state that later commands do not change: any thread may write its sections."""
        return freeze(self.state, (self.term, self.armed, self.purging, sorted(self.keeping.shared)))

    def restore(self, sections: Mapping[str, bytes]) -> None:
        """Replace the state."""
        self.state, (self.term, self.armed, self.purging, shared) = thaw(sections)
        self.keeping.restore(self.state.payloads(), shared)
        self._index, self._budget = 0, None

    def live_refs(self) -> Iterator[PayloadRange]:
        """Yield the values that are payloads: the newest ones and those that history can still read."""
        return ranges(self.state.payloads())

    # Questions

    def fetch(self, request: bytes, now: int) -> Fetched:
        """Answer a question: RANGE, TIME_TO_LIVE (`now`: log time), LEASES, VALUES, STATUS. Raises `Reject`."""
        state = self.state
        try:
            asked = unpacked(request)
            if len(asked) == SINGLE and asked[0] == RANGE:
                # Most of what is asked: one key, as it is now.
                _, key, end, revision = asked
                now_there = type(key) is bytes and end == b"" and type(revision) is int and not revision
                version = state.keys.get(key) if now_there else None
                if version is not None and type(version[VALUE]) is bytes:
                    return Fetched(pack((0, state.revision, (row(version),), False, 1)))
            found, named, size = self._answer(state, asked, now)
        except Refusal as refusal:
            return Fetched(pack((1, refusal.code, refusal.message, refusal.details)))
        return Fetched(pack((0, state.revision, *found)), named, size)

    def _answer(self, state: State, asked: list[Any], now: int) -> tuple[tuple[Any, ...], list[tuple[int, int]], int]:
        code = asked[0]
        if code == RANGE:
            wanted: Range = range_of(asked)
            found = select(state, wanted, Budget.of_question())
            if wanted.flags & (KEYS_ONLY | REFERENCES):
                return found, [], 0
            large = [row[5] for row in found[0] if type(row[5]) is tuple]
            return found, [value[:2] for value in large], sum([value[2] for value in large])
        if code == TIME_TO_LIVE and len(asked) == 3:
            lease = number(asked[1])
            row = state.leases.check(lease)
            keys = sorted(state.leases.attached.get(lease, ())) if asked[2] else []
            return (row.ttl, max(0, row.deadline - now), keys), [], 0
        if code == LEASES:
            return (sorted(state.leases.rows),), [], 0
        if code == VALUES and len(asked) == 2 and type(asked[1]) is list and len(asked[1]) <= VALUES_MAX:
            return (), [(number(index), number(ordinal)) for index, ordinal in map(_pair, asked[1])], 0
        if code == STATUS:
            return (list(self.overview().items()),), [], 0
        raise Refusal("bad_request", f"the KV machine knows no question {code}")

    def query(self, request: bytes) -> bytes:
        """Answer a question as metadata: payloads are named only, and a lease's rest counts from the newest command."""
        return self.fetch(request, 0).answer

    def overview(self) -> dict[str, int]:
        """Return the numbers of `describe`."""
        state = self.state
        return {
            "revision": state.revision,
            "compacted": state.compacted,
            "keys": len(state.live),
            "deleted": len(state.gone),
            "leases": len(state.leases.rows),
            "history": state.history.end - state.history.first,
            "history_bytes": state.history.size,
        }


def _in_pieces() -> Reject:
    return Reject("bad_request", "payloads of a KV group travel in one piece")


def _pair(value: Any) -> list[Any]:
    if type(value) is not list or len(value) != 2:
        raise Refusal("bad_request", "a payload is named by index and ordinal")
    return value


def _operations(frame: Frame) -> Iterator[tuple[bytes, int, int]]:
    """Yield (command, number of its first record, records) of each operation of a frame."""
    commands = frame.split_commands()
    at = 0
    for number_of, command in enumerate(commands[1:], 1):
        if command:
            yield commands[at], at, number_of - at
            at = number_of
    yield commands[at], at, len(commands) - at

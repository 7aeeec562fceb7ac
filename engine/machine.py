"""The machine protocol: what a user writes to build something on logyard.

A machine is deterministic: it sees metadata and names of payloads, never payload bytes (law 5), no clock but
`context.timestamp`, and no randomness. It returns replies and effects; what leaves the node only the leader does, and
none of it is needed for safety.
Called by `engine.replica.applier` and `engine.replica.effects`, always from one thread, in index order, one call an
entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from logyard.payloads.reference import PayloadRange, PayloadRef, Position
from logyard.protocol.errors import plain

from .entry import Frame

__all__ = [
    "Append", "Applied", "Aux", "Batch", "BatchMachine", "Checkpoint", "Context", "Deliver", "Effect", "End", "Frame",
    "Frozen", "Machine", "Monitor", "PayloadRange", "PayloadRef", "Position", "Reject", "Release", "Sections", "Send",
    "Timer", "check_effect", "check_reply", "owned",
]  # fmt: skip

Sections: TypeAlias = Mapping[str, bytes]
"""A snapshot's parts by name; each is stored with a hash of its own."""


class Context(NamedTuple):
    """Where a command stands: `timestamp` is the leader's log time in milliseconds since 1970, `version` the machine
        version in force (not the newest this node has), `records` how many ordinals the whole entry has.

    `skipped` are the client frames of this entry that are not shown (duplicates of a session, refusals), as (first
    ordinal, records): their payloads are released already."""

    uid: int
    index: int  # type: ignore[assignment]  # tuple.index is not missed
    term: int
    timestamp: int
    version: int
    records: int = 0
    skipped: tuple[tuple[int, int], ...] = ()


class Release(NamedTuple):
    """Effect: the payloads from `first` up to, but without, `end` are dead from this index on; none above it, whatever
    `end` says."""

    first: Position
    end: Position


class Send(NamedTuple):
    """Effect: `message` for the client that owns `session`. At most once: dropped unless that client is connected to
    the leader's node."""

    session: int
    message: bytes


class Deliver(NamedTuple):
    """Effect: the records behind `refs`, heads and bodies, for the client that owns `session`, with `tag` to tell what
    they are. A range is one of ordinals within one entry: it costs less than a ref a record.

    At most once, as `Send`. The bytes go from the payload's home to the socket; what was released meanwhile is left
    out.
    """

    session: int
    refs: Sequence[PayloadRef | PayloadRange]
    tag: bytes = b""


class Timer(NamedTuple):
    """Effect: call `on_timer(context, name)` once log time (ms since 1970) has reached `due_ms`; None cancels.

    Replicated state, one timer a name; a later one under the same name replaces it.
    """

    name: str
    due_ms: int | None


class Append(NamedTuple):
    """Effect: apply `command` as a follow-up of this one, exactly once, at a later index: whoever leads by then
    proposes it."""

    command: bytes


class Checkpoint(NamedTuple):
    """Effect: this is a good moment for a snapshot (much state is gone, say). `keep_log`: for a quick start only, the
    log below it stays, so that a follower that is behind still needs no snapshot."""

    keep_log: bool = False


class End(NamedTuple):
    """Effect: this group has done its work, and is deleted with all that is in it, on every member. At most once, so
    a machine that has ended says it again in `on_role`."""


class Aux(NamedTuple):
    """Effect: call the machine's `on_aux(data)` on the leader's node: work outside of the replicated state."""

    data: bytes


class Monitor(NamedTuple):
    """Effect: tell this machine by `on_session_end` when `session` has ended. Replicated state; once per session."""

    session: int


Effect: TypeAlias = Release | Send | Deliver | Timer | Append | Checkpoint | Aux | Monitor | End


class Applied(NamedTuple):
    """What one command did."""

    reply: bytes
    effects: Sequence[Effect] = ()


class Batch(NamedTuple):
    """What one entry did: a reply for each frame, in order, and the effects of all."""

    replies: Sequence[bytes | Reject]
    effects: Sequence[Effect] = ()


RESERVED_CODES = frozenset({"session_expired", "sequence_out_of_window", "stale_sequence", "not_leader", "unknown"})
"""Refusals that clients take for the engine's: they would begin a session anew, or send a command again."""


class Reject(Exception):
    """A deterministic, committed refusal: it is the reply, the state is unchanged and the command's payload is
    released. It is kept and sent as `plain` text, an exception as what it says. Raises ValueError for one of
    `RESERVED_CODES`, which are the engine's own (`OwnReject`)."""

    def __init__(self, code: str, message: object) -> None:
        code, message = plain(code), plain(message)
        if code in RESERVED_CODES and type(self) is Reject:
            raise ValueError(f"{code!r} is a code of the engine's own: a machine's refusal has another one")
        super().__init__(message)
        self.code = code
        self.message = message


class OwnReject(Reject):
    """A refusal by the engine."""


class Frozen(Protocol):
    """A state as it was when it was captured. Both are called once, by another thread."""

    def sections(self) -> Sections:
        """Return what `snapshot` would have returned."""
        ...

    def payloads(self) -> Iterable[tuple[int, int] | PayloadRange]:
        """Yield every payload that the state needed, as (index, ordinal) or in ranges, each within one entry, in any
        order, some perhaps twice."""
        ...


class Machine(Protocol):
    """Required of every machine. Optional methods, each looked up by name when it is due:

    `apply_batch(context, frames) -> Batch`
        A whole entry of clients' commands at once (`BatchMachine`); `frames` is empty when every frame of it was
        refused. `apply` is called for follow-ups only then.
    `on_timer(context, name) -> Applied`
        A timer is due. Replicated: part of the state like `apply`.
    `on_session_end(context, session) -> Applied`
        A session that the machine monitors has ended. Replicated.
    `upgrade(from_version, to_version)`
        The version in force changes here and at this index on every member; before that the machine has to behave as
        version `from_version` of it did. Replicated. With the attribute `upgrade_on_demand` true it stays as it is
        until the host asks for more (`Versions.require`); otherwise the leader upgrades as soon as enough nodes can.
    `on_role(role) -> effects`
        "leader": everything of earlier leaders is applied here; "follower": this member does not lead any more. Local:
        no change of state, and of effects only Send, Deliver, Append, Aux, Checkpoint, End, for "leader".
    `on_listen(session) -> effects`
        On the leader: the client of `session` begins to listen, for the first time or after a leader change or a cut
        connection. What it must not miss is sent again here. Local, as `on_role`.
    `on_tick(context) -> effects`
        On the leader, every `machine_tick_ms`. Local, as `on_role`.
    `on_aux(data)`
        What `Aux` asks for. Local.
    `overview() -> dict`
        What `describe` shows of the state: plain values.
    `freeze() -> Frozen | None`
        For a large state, in place of `snapshot`: a view that later commands do not change, written by a thread. None
        while there is little to write: `snapshot` is asked.
    `has_terms() -> bool`
        Whether anything that was granted for a length of log time is running: the leader asks before log time jumps to
        the wall clock. Without it: whether a timer is set. Local.
    `has_terms_beside(timers) -> bool`
        The same for a machine that goes by the names of the timers that are set: of which of its parts they are. Local.
    `jumped(ms) -> bytes`
        A command that prolongs everything granted for a length of log time: from version 2 of its kind on the leader
        has it applied, in an entry in which log time jumps ahead by `ms`. Local.
    `log_bounds() -> (start, end)`
        Of a log: its first offset and the next one, which a list of logs shows while the group sleeps.
    `query(request) -> bytes`
        A read of this member's state; changes nothing.

    With the attribute `stays_awake` true its group never hibernates: its node looks at the state itself. The attribute
    `inline_bytes` says up to which size a section is written with each snapshot (64 KiB): larger ones only when they
    changed.
    """

    version: int
    """The newest version this code knows; `Context.version` says which one is in force. The first one is 1."""

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        """Apply one command. Raise `Reject` for a refusal that is part of the machine's logic."""
        ...

    def snapshot(self) -> Sections:
        """Return a frozen view of the state."""
        ...

    def restore(self, sections: Sections) -> None:
        """Replace the state by a snapshot's."""
        ...

    def live_refs(self) -> Iterable[PayloadRange]:
        """Yield every payload the state still needs, as ranges."""
        ...


@runtime_checkable
class BatchMachine(Protocol):
    """A machine that takes a whole entry at once: no call per command on the hot path."""

    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        """Apply all frames of one entry; return one reply a frame. Ordinals run over the frames in order.

        `frames` may be empty: no frame of the entry is shown, `context.skipped` says what it had, and its log time
        counts as any other's.
        """
        ...


_BYTES = (bytes, bytearray, memoryview)
_TIME_MAX = 1 << 63
"""Above every time (ms) that can be stored."""


def check_effect(effect: object) -> None:
    """Raise `TypeError` for what is no effect, or could not be kept, sent or compared as one: found later it would be
    its node's fault, and not its machine's."""
    if isinstance(effect, Timer):
        due = effect.due_ms
        is_time = due is None or (isinstance(due, int | float) and -_TIME_MAX <= due < _TIME_MAX)
        fits = is_time and isinstance(effect.name, str) and effect.name == plain(effect.name)
    elif isinstance(effect, Append):
        fits = isinstance(effect.command, _BYTES)
    elif isinstance(effect, Monitor):
        fits = isinstance(effect.session, int)
    elif isinstance(effect, Send):
        fits = isinstance(effect.session, int) and isinstance(effect.message, _BYTES)
    elif isinstance(effect, Deliver):
        fits = isinstance(effect.session, int) and isinstance(effect.tag, _BYTES) and isinstance(effect.refs, Sequence)
    else:
        fits = isinstance(effect, Release | Aux | Checkpoint | End)
    if not fits:
        raise TypeError(f"{effect!r} is no effect: it is none of them, or a field is of another type")


def owned(effect: Effect) -> Effect:
    """Return an effect with bytes of its own: a machine may use its buffer again for the next command. What is no
    effect comes as it is, for `check_effect`."""
    if isinstance(effect, Append):
        return Append(_own(effect.command))
    if isinstance(effect, Send):
        return Send(effect.session, _own(effect.message))
    if isinstance(effect, Deliver):
        return Deliver(effect.session, effect.refs, _own(effect.tag))
    return Aux(_own(effect.data)) if isinstance(effect, Aux) else effect


def _own(data: bytes) -> bytes:
    return bytes(data) if isinstance(data, bytearray | memoryview) else data


def check_reply(reply: object) -> bytes:
    """Return a reply as bytes of its own: a machine may use its buffer again. Raise `TypeError` for what no client can
    be told: found on its way out, it would be its node's fault, and not its machine's."""
    if not isinstance(reply, _BYTES):
        raise TypeError(f"the machine's reply is a {type(reply).__name__}, not bytes")
    return bytes(reply)

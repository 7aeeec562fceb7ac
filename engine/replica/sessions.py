"""Exactly-once sessions: the replicated table, and the one rule by which an entry's frames reach the machine.

Pure and deterministic: every member, a replay and the offline check come to the same table, the same replies and the
same releases. A frame (session, sequence) is applied at most once; its reply is kept for as long as its client may ask
again (a window of 64 sequences; Ra's and dragonboat's client sessions, Raft thesis 6.3). Called by `applier`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgpack

from logyard.protocol.frame import BINDS, PIECE, SYSTEM

from ..entry import Frame, system_command
from ..machine import (
    Batch,
    BatchMachine,
    Context,
    Effect,
    Machine,
    OwnReject,
    Position,
    Reject,
    Release,
    check_reply,
)
from .uploads import Uploads

WINDOW = 64
"""Sequences of a session whose replies are kept; its client has at most so many frames under way."""
REPLY_BYTES = 64 * 1024
"""A longer reply is not kept: a duplicate learns that the frame was applied, not with what result. Fixed, because all
members must keep the same."""
REGISTER = "register"
EXPIRE = "expire"

Reply: TypeAlias = bytes | Reject


class CommandFault(Exception):
    """What a machine raised for one command, as `__cause__`; `ordinal` is the command's in its entry."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self.ordinal = ordinal


SKIPPED = Reject("skipped", "the machine failed at this command, and an operator had it skipped")
OnSystem: TypeAlias = Callable[[Context, list[Any]], Reply]
ApplyBatch: TypeAlias = Callable[[Context, Sequence[Frame]], Batch]
OnEnd: TypeAlias = Callable[[Context, int], Sequence[Effect]]


class Session:
    """One client's session in one group. `replies`: by sequence, of the last `WINDOW` up to `highest`."""

    __slots__ = ("client", "ttl_ms", "highest", "replies")

    def __init__(self, client: int, ttl_ms: int) -> None:
        self.client = client
        self.ttl_ms = ttl_ms
        self.highest = 0
        self.replies: dict[int, Reply] = {}


class Sessions:
    """The sessions of one group; `bytes` is what their kept replies take. A group without any has no table."""

    __slots__ = ("by_id", "bytes")

    def __init__(self) -> None:
        self.by_id: dict[int, Session] = {}
        self.bytes = 0

    def known(self, session: int, sequence: int) -> Reply | None:
        """Return the answer to a frame when it is certain now and for good; None for one that must be proposed."""
        found = self.by_id.get(session)
        if found is None:
            return None
        reply = found.replies.get(sequence)
        return _stale(sequence) if reply is None and sequence <= found.highest - WINDOW else reply

    def take(self, session: int, sequence: int) -> Reply | None:
        """Claim a sequence for the frame that is about to be applied: None; or say why it must not be."""
        found = self.by_id.get(session)
        if found is None:
            return OwnReject("session_expired", f"there is no session {session:016x}: it ended, or never began")
        highest = found.highest
        if highest < sequence <= highest + WINDOW:
            replies = found.replies
            for old in range(max(1, highest - WINDOW + 1), sequence - WINDOW + 1):
                gone = replies.pop(old, None)
                if gone is not None:
                    self.bytes -= len(gone) if type(gone) is bytes else reply_bytes(gone)
            found.highest = sequence
            return None
        reply = self.known(session, sequence)
        if reply is not None:
            return reply
        if not 0 < sequence <= highest:
            text = f"sequence {sequence} is not within {WINDOW} of {highest}"
            return OwnReject("sequence_out_of_window", text)
        return None

    def keep(self, session: int, sequence: int, reply: Reply) -> None:
        """Keep the reply of a claimed sequence."""
        found = self.by_id.get(session)
        if found is not None and sequence > found.highest - WINDOW:
            size = len(reply) if type(reply) is bytes else reply_bytes(reply)
            if size > REPLY_BYTES:
                reply = Reject("reply_not_kept", f"it was applied; its reply of {size} bytes was not kept")
                size = reply_bytes(reply)
            found.replies[sequence] = reply
            self.bytes += size

    def register(self, session: int, client: int, ttl_ms: int) -> Reply:
        """Begin a session; again with the same client, it is the same one."""
        found = self.by_id.get(session)
        if not session or (found is not None and found.client != client):
            return Reject("refused", f"session {session:016x} belongs to another client")
        if found is None:
            self.by_id[session] = Session(client, ttl_ms)
        return b""

    def expire(self, session: int) -> bool:
        """End a session; return False when there is none."""
        found = self.by_id.pop(session, None)
        if found is None:
            return False
        self.bytes -= sum(map(reply_bytes, found.replies.values()))
        return True

    def encode(self) -> bytes:
        """Return the snapshot section: msgpack ``[[id, client, ttl_ms, highest, replies], ...]``, a reply being
        ``[sequence, code or nil, bytes or message]``."""
        rows = [
            (number, one.client, one.ttl_ms, one.highest, [_packed(*item) for item in one.replies.items()])
            for number, one in self.by_id.items()
        ]
        encoded: bytes = msgpack.packb(rows)
        return encoded

    @classmethod
    def decode(cls, data: bytes) -> Sessions:
        """Return the sessions that `encode` gave."""
        table = cls()
        for number, client, ttl_ms, highest, replies in msgpack.unpackb(data):
            session = table.by_id[number] = Session(client, ttl_ms)
            session.highest = highest
            for sequence, code, content in replies:
                reply: Reply = content if code is None else OwnReject(code, content)
                session.replies[sequence] = reply
                table.bytes += reply_bytes(reply)
        return table


def _packed(sequence: int, reply: Reply) -> tuple[int, str | None, bytes | str]:
    return (sequence, reply.code, reply.message) if isinstance(reply, Reject) else (sequence, None, reply)


def _stale(sequence: int) -> Reject:
    return OwnReject("stale_sequence", f"sequence {sequence} left its session's window: its reply is not kept any more")


def reply_bytes(reply: Reply) -> int:
    """Return the bytes that a kept reply counts."""
    return len(reply.message) + len(reply.code) if isinstance(reply, Reject) else len(reply)


class Guarded(NamedTuple):
    """What an entry did: the tables afterwards (None: no sessions, no uploads), and a reply for each of its frames."""

    sessions: Sessions | None
    batch: Batch
    uploads: Uploads | None = None


def apply_next(sessions: Sessions, context: Context, frames: Sequence[Frame], apply_batch: ApplyBatch) -> Batch | None:
    """Apply the usual entry as `apply_guarded` does: its one frame is a session's, whole, and new. None for any other:
    nothing was changed."""
    frame = frames[0]
    session = frame.session
    if not session or frame.flags & (SYSTEM | PIECE | BINDS) or sessions.take(session, frame.sequence) is not None:
        return None
    batch = apply_batch(context, frames)
    reply = batch.replies[0]
    if type(reply) is not bytes:
        batch = _checked(context, frames, batch)
        reply = batch.replies[0]
    sessions.keep(session, frame.sequence, reply)
    return batch


def apply_guarded(
    sessions: Sessions | None,
    context: Context,
    frames: Sequence[Frame],
    run: Callable[[Context, list[Frame]], Batch],
    on_system: OnSystem,
    on_end: OnEnd | None = None,
    left_out: Sequence[int] = (),
    uploads: Uploads | None = None,
    data: bytes = b"",
) -> Guarded:
    """Apply an entry some of whose frames are the engine's own or belong to sessions.

    The engine's own frames go first, so that the machine sees the others in one call. `run` is the machine on the
    frames that it shall see; `on_system` applies what is not about sessions; `on_end` tells the machine of an end.
    `left_out` are ordinals whose frames an operator had skipped: they are never run. `data` is the entry's metadata.
    """
    replies: list[Reply | None] = [None] * len(frames)
    effects: list[Effect] = []
    for number, frame in enumerate(frames):
        if frame.flags & SYSTEM:
            command = system_command(frame)
            try:
                if left_out and _holds_any(frame, left_out):
                    replies[number] = SKIPPED
                elif command[0] in (REGISTER, EXPIRE):
                    sessions, replies[number] = _change(sessions, uploads, context, command, on_end, effects)
                else:
                    replies[number] = on_system(context, command)
            except Exception as error:
                raise CommandFault(frame.first) from error
    shown: list[Frame] = []
    places: list[int] = []
    copies: dict[int, int] = {}
    claimed: dict[tuple[int, int], int] = {}
    skipped: list[tuple[int, int]] = []
    for number, frame in enumerate(frames):
        if frame.flags & SYSTEM:
            continue
        if frame.session:
            key = (frame.session, frame.sequence)
            first = claimed.get(key)
            if first is not None:
                copies[number] = first
            else:
                replies[number] = (sessions or Sessions()).take(*key)
            if first is not None or replies[number] is not None:
                skipped.append((frame.first, frame.records))
                effects.append(release_of(context, frame))
                continue
            claimed[key] = number
        if left_out and _holds_any(frame, left_out):
            replies[number] = SKIPPED
            skipped.append((frame.first, frame.records))
            effects.append(release_of(context, frame))
            continue
        if frame.flags & (PIECE | BINDS):
            uploads = uploads or Uploads()
            found = uploads.take(context, frame, data, effects, skipped)
            if not isinstance(found, Frame):
                replies[number] = found
                continue
            frame = found
        shown.append(frame)
        places.append(number)
    if shown or skipped:
        batch = run(context._replace(skipped=tuple(skipped)) if skipped else context, shown)
        effects += batch.effects
        for number, frame, reply in zip(places, shown, batch.replies, strict=True):
            replies[number] = reply
            if frame.pieces and isinstance(reply, Reject):
                assert uploads is not None
                effects += uploads.discard(frame.pieces)
    return Guarded(sessions, Batch(_keep(sessions, claimed, copies, replies), effects), uploads)


def _keep(
    sessions: Sessions | None, claimed: dict[tuple[int, int], int], copies: dict[int, int], replies: list[Reply | None]
) -> list[Reply]:
    """Return the replies of an entry's frames, and keep those of sessions."""
    for (session, sequence), number in claimed.items():
        kept = replies[number]
        assert sessions is not None and kept is not None
        sessions.keep(session, sequence, kept)
    for number, first in copies.items():
        replies[number] = replies[first]
    answers = [reply for reply in replies if reply is not None]
    assert len(answers) == len(replies)
    return answers


def _change(
    sessions: Sessions | None,
    uploads: Uploads | None,
    context: Context,
    command: list[Any],
    on_end: OnEnd | None,
    effects: list[Effect],
) -> tuple[Sessions | None, Reply]:
    name, *arguments = command
    if name == REGISTER:
        table = sessions or Sessions()
        reply = table.register(*arguments)
        return (table if table.by_id else None), reply
    if uploads is not None:
        effects += uploads.end(arguments)
    for session in arguments:
        if sessions is not None and sessions.expire(session) and on_end is not None:
            effects += on_end(context, session)
    return (sessions if sessions is not None and sessions.by_id else None), b""


def _holds_any(frame: Frame, ordinals: Sequence[int]) -> bool:
    return any(frame.first <= ordinal < frame.first + frame.records for ordinal in ordinals)


def release_of(context: Context, frame: Frame) -> Release:
    """Return the payloads of one frame, dead at its own index or they would leak."""
    if frame.records == context.records:
        return Release(Position(context.index, 0), Position(context.index + 1, 0))
    return Release(Position(context.index, frame.first), Position(context.index, frame.first + frame.records))


def batch_of(machine: Machine) -> ApplyBatch | None:
    """Return a machine's `apply_batch`, if it has one. Ask once: a protocol's instance check costs more than
    applying."""
    return machine.apply_batch if isinstance(machine, BatchMachine) else None


def run_batch(apply_batch: ApplyBatch, context: Context, frames: Sequence[Frame]) -> Batch:
    """Run a batch machine on frames of one entry; what it refuses is released at that index."""
    batch = apply_batch(context, frames)
    for reply in batch.replies:
        if type(reply) is not bytes:
            return _checked(context, frames, batch)
    return batch


def _checked(context: Context, frames: Sequence[Frame], batch: Batch) -> Batch:
    """Return a batch whose replies are bytes or refusals, with the payloads of refused frames released. Raises
    `TypeError` for a reply that is none."""
    replies = [reply if isinstance(reply, Reject) else check_reply(reply) for reply in batch.replies]
    refused = [
        release_of(context, frame) for frame, reply in zip(frames, replies, strict=True) if isinstance(reply, Reject)
    ]
    return Batch(replies, [*batch.effects, *refused])

"""A machine without an engine: the engine's rules of apply, on one machine, under a clock that the test moves.

What is kept to: index order, one apply a command, a `Reject` changes nothing and its payloads are dead, timers ring at
their log time, follow-ups come exactly once at a later index, a session's end is told once to who monitors it, versions
come into force at an index. Nothing of this waits or draws a number, so two runs of one script are equal, or the
machine is at fault (`checks`). Shipped as `logyard.testing.Rehearsal`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from logyard.engine.machine import (
    Append,
    Batch,
    BatchMachine,
    Context,
    Effect,
    Frame,
    Machine,
    Monitor,
    PayloadRef,
    Position,
    Reject,
    Release,
    Timer,
    check_effect,
    check_reply,
    owned,
)
from logyard.protocol.frame import UNIFORM

START_MS = 1_700_000_000_000
UID = 0x10C7A2D


class Command(NamedTuple):
    """Step: one command, with payloads of so many bytes (None: a record without one); a client's frame of its own."""

    command: bytes
    payloads: tuple[int | None, ...] = (None,)
    session: int = 0


class Entry(NamedTuple):
    """Step: several commands in one entry."""

    commands: tuple[Command, ...]


class Refused(NamedTuple):
    """Step: an entry of so many records none of which is shown to the machine: duplicates of a session, or one that
    has ended. A machine with `apply_batch` is called with an empty batch."""

    records: int = 1


class Wait(NamedTuple):
    """Step: log time passes; what is due rings on the way."""

    ms: int


class EndSession(NamedTuple):
    """Step: a client's session ends."""

    session: int


class Upgrade(NamedTuple):
    """Step: a newer version of the machine comes into force."""

    version: int


Step: TypeAlias = Command | Entry | Wait | EndSession | Upgrade | Refused
"""One thing that happens to a machine. Steps are plain values: another process can be given them."""


class Seen(NamedTuple):
    """What one index did: the replies of its commands and its effects."""

    index: int  # type: ignore[assignment]  # tuple.index is not missed
    replies: tuple[bytes | Reject, ...]
    effects: tuple[Effect, ...]


class Rehearsal:
    """One machine and what the engine would keep beside it. `make` gives a fresh machine; `now` is log time (ms since
    1970). `live`: the names of payloads that were written and not released, with their sizes; `dead`: of those that
    were released."""

    def __init__(self, make: Callable[[], Machine], *, now: int = START_MS, version: int = 1) -> None:
        self.make = make
        self.machine = make()
        if isinstance(self.machine, BatchMachine):
            # It may be the first entry that a fresh machine sees; one that is thrown away tries it.
            trial = make()
            assert isinstance(trial, BatchMachine)
            _refused(trial, Context(UID, 1, 1, now, 1, 1, ((0, 1),)))
        self.now = now
        self.version = version
        self.index = 0
        self.live: dict[Position, int] = {}
        self.dead: set[Position] = set()
        self.timers: dict[str, int] = {}
        self.follow_ups: list[bytes] = []
        self.monitors: set[int] = set()
        self.seen: list[Seen] = []

    # What happens.

    def step(self, step: Step) -> list[Seen]:
        """Let one thing happen, and whatever is due after it; return what was seen of each index."""
        before = len(self.seen)
        if isinstance(step, Command):
            self._entry((step,))
        elif isinstance(step, Entry):
            self._entry(step.commands)
        elif isinstance(step, Wait):
            self._wait(step.ms)
        elif isinstance(step, EndSession):
            self._end(step.session)
        elif isinstance(step, Refused):
            self._refuse(step.records)
        else:
            self._upgrade(step.version)
        return self.seen[before:]

    def run(self, steps: Iterable[Step]) -> list[Seen]:
        """Run all of the steps; return what was seen."""
        return [seen for step in steps for seen in self.step(step)]

    def command(self, command: bytes, *payloads: int | None, session: int = 0) -> bytes:
        """Run one command; return its reply. Raises what it was refused with."""
        reply = self.step(Command(command, payloads or (None,), session))[0].replies[-1]
        if isinstance(reply, Reject):
            raise reply
        return reply

    def wait(self, ms: int) -> list[Seen]:
        """Let log time pass."""
        return self.step(Wait(ms))

    # What there is.

    def effects(self, kind: type[Any]) -> list[Any]:
        """Return all effects of a kind so far."""
        return [effect for seen in self.seen for effect in seen.effects if isinstance(effect, kind)]

    def claimed(self) -> set[Position]:
        """Return the payloads that the machine says it needs."""
        ranges = list(self.machine.live_refs())
        return {at for at in self.live if any(one.first <= at < one.end for one in ranges)}

    def check(self) -> None:
        """Check that the machine needs exactly what it did not release. Raises `AssertionError`."""
        leaked = sorted(set(self.live) - self.claimed())
        assert not leaked, f"neither released nor in live_refs (they would stay for ever): {leaked[:10]}"
        dead = sorted(self.dead)
        for one in self.machine.live_refs():
            assert one.first <= one.end, f"live_refs gives the range {one}"
            lost = dead[bisect_left(dead, one.first) : bisect_left(dead, one.end)]
            assert not lost, f"released, and still in live_refs (they are gone): {lost[:10]}"

    def snapshot(self) -> dict[str, bytes]:
        """Return the machine's sections."""
        return {name: bytes(data) for name, data in self.machine.snapshot().items()}

    def restored(self) -> Rehearsal:
        """Return a fresh machine from a snapshot of this one, and what the engine keeps as it is here."""
        other = Rehearsal(self.make, now=self.now, version=self.version)
        other.machine.restore(self.snapshot())
        other.index = self.index
        other.live, other.dead, other.timers = dict(self.live), set(self.dead), dict(self.timers)
        other.follow_ups, other.monitors = list(self.follow_ups), set(self.monitors)
        return other

    # How.

    def _context(self, records: int = 1) -> Context:
        self.index += 1
        return Context(UID, self.index, 1, self.now, self.version, records)

    def _entry(self, commands: Sequence[Command]) -> None:
        context = self._context(sum(len(one.payloads) for one in commands))
        first = 0
        frames: list[Frame] = []
        for one in commands:
            for number, size in enumerate(one.payloads):
                if size is not None:
                    self.live[Position(context.index, first + number)] = size
            sizes = sum(size or 0 for size in one.payloads)
            frames.append(
                Frame(
                    UNIFORM, 0, len(one.payloads), len(one.command), sizes, 0, one.session, context.index, one.command,
                    first,
                )
            )  # fmt: skip
            first += len(one.payloads)
        self._did(context, self._batch(context, frames))
        self._due()

    def _refuse(self, records: int) -> None:
        context = self._context(records)
        batch = Batch(())
        if isinstance(self.machine, BatchMachine):
            batch = _refused(self.machine, context._replace(skipped=((0, records),)))
        self._did(context, batch)
        self._due()

    def _batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        if isinstance(self.machine, BatchMachine):
            batch = self.machine.apply_batch(context, frames)
            assert len(batch.replies) == len(frames), "apply_batch gives one reply a frame"
            refused = [
                Release(Position(context.index, frame.first), Position(context.index, frame.first + frame.records))
                for frame, reply in zip(frames, batch.replies, strict=True)
                if isinstance(reply, Reject)
            ]
            return Batch(batch.replies, [*batch.effects, *refused])
        replies: list[bytes | Reject] = []
        effects: list[Effect] = []
        for frame in frames:
            reply: bytes | Reject = b""
            for ordinal in range(frame.first, frame.first + frame.records):
                size = self.live.get(Position(context.index, ordinal), 0)
                ref = PayloadRef(UID, context.index, ordinal, 1, size, bytes(16))
                before = self.snapshot()
                try:
                    applied = self.machine.apply(context, frame.commands, (ref,))
                    reply = check_reply(applied.reply)
                    effects += [owned(one) for one in applied.effects]
                except Reject as refusal:
                    reply = refusal
                    assert self.snapshot() == before, f"a command that was refused ({refusal}) changed the state"
                    effects.append(Release(Position(context.index, ordinal), Position(context.index, ordinal + 1)))
            replies.append(reply)
        return Batch(replies, effects)

    def _did(self, context: Context, batch: Batch) -> None:
        """Keep the replicated part of an index's effects. Raises `TypeError` for effects and replies that are none."""
        replies = [reply if isinstance(reply, Reject) else check_reply(reply) for reply in batch.replies]
        for effect in batch.effects:
            check_effect(effect)
            if isinstance(effect, Release):
                last = context.index
                assert effect.end <= (last + 1, 0), (
                    f"index {last}: released up to {effect.end}, which is not written yet"
                )
                for at in [at for at in self.live if effect.first <= at < effect.end]:
                    del self.live[at]
                    self.dead.add(at)
            elif isinstance(effect, Timer):
                if effect.due_ms is None:
                    self.timers.pop(effect.name, None)
                else:
                    self.timers[effect.name] = effect.due_ms
            elif isinstance(effect, Append):
                self.follow_ups.append(bytes(effect.command))
            elif isinstance(effect, Monitor):
                self.monitors.add(effect.session)
        self.seen.append(Seen(context.index, tuple(replies), tuple(batch.effects)))

    def _due(self) -> None:
        """Run follow-ups, and timers whose time has come, in order."""
        while True:
            if self.follow_ups:
                command = self.follow_ups.pop(0)
                context = self._context(0)
                self._own(context, partial(self.machine.apply, context, command, ()))
                continue
            due = min(((due, name) for name, due in self.timers.items() if due <= self.now), default=None)
            if due is None:
                return
            del self.timers[due[1]]
            hook = getattr(self.machine, "on_timer", None)
            if hook is not None:
                context = self._context(0)
                self._own(context, partial(hook, context, due[1]))

    def _own(self, context: Context, call: Callable[[], Any]) -> None:
        try:
            applied = call()
            self._did(context, Batch([applied.reply], applied.effects))
        except Reject as refusal:
            self._did(context, Batch([refusal]))

    def _wait(self, ms: int) -> None:
        until = self.now + ms
        while True:
            due = min(self.timers.values(), default=until + 1)
            if due > until:
                break
            self.now = max(self.now, due)
            self._due()
        self.now = until

    def _end(self, session: int) -> None:
        if session in self.monitors:
            self.monitors.discard(session)
            hook = getattr(self.machine, "on_session_end", None)
            if hook is not None:
                context = self._context(0)
                self._own(context, partial(hook, context, session))
        self._due()

    def _upgrade(self, version: int) -> None:
        assert self.version < version <= self.machine.version, f"from {self.version} to {version}, it knows no such one"
        self.index += 1
        hook = getattr(self.machine, "upgrade", None)
        if hook is not None:
            hook(self.version, version)
        self.version = version


def _refused(machine: BatchMachine, context: Context) -> Batch:
    """Return what a machine makes of an entry that is all skipped."""
    batch = machine.apply_batch(context, [])
    assert not batch.replies, "apply_batch gives one reply a frame, and there was none"
    return batch

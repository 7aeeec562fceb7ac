"""A machine for tests: it writes down what it is told, and asks for the effects its commands name.

Commands are msgpack lists ``[verb, ...]``; the state is the list of notes, equal on every member.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack

from logyard.engine.machine import (
    Append,
    Applied,
    Aux,
    Checkpoint,
    Context,
    Deliver,
    Effect,
    Monitor,
    PayloadRange,
    PayloadRef,
    Position,
    Reject,
    Release,
    Sections,
    Send,
    Timer,
)
from logyard.engine.types import Buffer
from logyard.machines.log import AppendLog


def command(verb: str, *arguments: Any) -> bytes:
    """One command."""
    encoded: bytes = msgpack.packb([verb, *arguments])
    return encoded


class Scribe:
    """See the module. `heard` is what is not replicated: roles, aux calls, ticks."""

    version = 1

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.refs: list[PayloadRef] = []
        self.heard: list[Any] = []
        self.wishes: list[Effect] = []
        self.restored = 0

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        verb, *arguments = msgpack.unpackb(command)
        if verb == "no":
            raise Reject("refused", "not this one")
        self.notes.append([context.index, verb, *arguments])
        if verb == "boom":
            self.boom()
        if verb == "keep":
            self.refs += refs
            return Applied(b"kept")
        return Applied(b"%d" % len(self.notes), self.effects_of(context, verb, arguments, refs))

    def boom(self) -> None:
        """Fail, as a program with a defect does."""
        raise ZeroDivisionError("the machine can't")

    def effects_of(
        self, context: Context, verb: str, arguments: Sequence[Any], refs: tuple[PayloadRef, ...]
    ) -> Sequence[Effect]:
        if verb == "append":
            return [Append(command("note", text)) for text in arguments]
        if verb == "timer":
            return [Timer(*arguments)]
        if verb == "in":
            return [Timer(arguments[0], context.timestamp + arguments[1])]
        if verb == "send":
            return [Send(*arguments)]
        if verb == "deliver":
            return [Deliver(arguments[0], tuple(self.refs), b"tag")]
        if verb == "forget":
            gone = self.refs.pop(arguments[0])
            at = Position(gone.index, gone.ordinal)
            return [Release(at, Position(gone.index, gone.ordinal + 1))]
        if verb == "forget beyond":
            gone = self.refs.pop(arguments[0])
            return [Release(Position(gone.index, gone.ordinal), Position(gone.index + 100, 0))]
        if verb == "forget oddly":
            gone = self.refs[arguments[0]]
            at = Position(gone.index, gone.ordinal)
            return [Release(at, Position(gone.index, gone.ordinal + 1)), "odd"]  # type: ignore[list-item]
        if verb == "checkpoint":
            return [Checkpoint()]
        if verb == "aux":
            return [Aux(*arguments)]
        if verb == "monitor":
            return [Monitor(*arguments)]
        if verb == "odd":
            return ["no effect at all"]  # type: ignore[list-item]
        return ()

    def snapshot(self) -> Sections:
        return {"notes": msgpack.packb(self.notes), "refs": msgpack.packb([tuple(ref) for ref in self.refs])}

    def restore(self, sections: Sections) -> None:
        self.notes = msgpack.unpackb(sections["notes"])
        self.refs = [PayloadRef(*ref) for ref in msgpack.unpackb(sections["refs"])]
        self.restored += 1

    def live_refs(self) -> Iterable[PayloadRange]:
        return [
            PayloadRange(Position(ref.index, ref.ordinal), Position(ref.index, ref.ordinal + 1)) for ref in self.refs
        ]

    def on_timer(self, context: Context, name: str) -> Applied:
        self.notes.append([context.index, "rang", name])
        return Applied(b"")

    def on_session_end(self, context: Context, session: int) -> Applied:
        self.notes.append([context.index, "ended", session])
        return Applied(b"", [Append(command("note", "after the end"))])

    def on_role(self, role: str) -> Sequence[Effect]:
        self.heard.append(role)
        return self.wishes if role == "leader" else ()

    def on_aux(self, data: bytes) -> None:
        self.heard.append(data)
        if data == b"fail":
            raise ValueError("an aux call that fails is no fault of the group's")

    def overview(self) -> dict[str, Any]:
        return {"notes": len(self.notes)}

    def written(self, verb: str) -> list[Any]:
        """The arguments of all notes of one kind."""
        return [note[2] for note in self.notes if note[1] == verb]


class TickingScribe(Scribe):
    """A scribe that asks for something at every tick."""

    def on_tick(self, context: Context) -> Sequence[Effect]:
        self.heard.append(context.timestamp)
        return [Append(command("note", "tick")), Timer("never", 1)]


class Ear:
    """A session's connection: keeps what is pushed."""

    def __init__(self) -> None:
        self.pushed: list[tuple[int, Mapping[str, Any], bytes]] = []
        self.lost = 0

    def push(self, uid: int, session: int, header: Mapping[str, Any], body: Sequence[Buffer]) -> None:
        self.pushed.append((session, header, b"".join(bytes(part) for part in body)))

    async def room(self, size: int) -> None:
        pass

    def missed(self) -> None:
        self.lost += 1


def machines(name: str, arguments: dict[str, Any]) -> Any:
    """The factory for clusters of these tests."""
    kinds: dict[str, Any] = {"scribe": Scribe, "ticking": TickingScribe, "log": AppendLog}
    return kinds[name]()

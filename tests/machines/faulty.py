"""A sound machine, and one for each fault that the checkers of `logyard.testing` must find."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from logyard.engine.machine import (
    Append,
    Applied,
    Context,
    Monitor,
    PayloadRange,
    PayloadRef,
    Position,
    Reject,
    Release,
    Sections,
    Timer,
)


def range_of(ref: PayloadRef) -> PayloadRange:
    return PayloadRange(Position(ref.index, ref.ordinal), Position(ref.index, ref.ordinal + 1))


class Sound:
    """Words, each with a payload: ``add W``, ``drop W``, ``later MS W`` (a drop by timer), ``twice W`` (a follow-up),
    ``watch N`` (a session whose end drops all)."""

    version = 2

    def __init__(self) -> None:
        self.words: dict[str, Any] = {}
        self.count = 0

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        verb, *rest = command.decode().split()
        if verb == "add":
            (word,), (ref,) = rest, refs or (None,)
            old = self.words.get(word)
            self.words[word] = ref and list(ref[1:3])
            self.count += 1
            return Applied(b"%d" % self.count, self.released(old))
        if verb == "twice":
            dead = [Release(*range_of(ref)) for ref in refs]
            return Applied(b"", [*dead, Append(b"add " + rest[0].encode())])
        dead = [Release(*range_of(ref)) for ref in refs]
        if verb == "drop":
            if rest[0] not in self.words:
                raise Reject("unknown_name", rest[0])
            return Applied(b"", dead + self.released(self.words.pop(rest[0])))
        if verb == "later":
            return Applied(b"", [*dead, Timer(rest[1], context.timestamp + int(rest[0]))])
        if verb == "watch":
            return Applied(b"", [*dead, Monitor(int(rest[0]))])
        if verb == "list":
            return Applied(" ".join(sorted(self.words)).encode(), dead)
        raise Reject("bad", verb)

    def released(self, place: Any) -> list[Any]:
        return [Release(Position(*place), Position(place[0], place[1] + 1))] if place else []

    def on_timer(self, context: Context, name: str) -> Applied:
        return Applied(b"", self.released(self.words.pop(name, None)))

    def on_session_end(self, context: Context, session: int) -> Applied:
        effects = [effect for place in self.words.values() for effect in self.released(place)]
        self.words.clear()
        return Applied(b"", effects)

    def upgrade(self, from_version: int, to_version: int) -> None:
        self.count += 1000

    def snapshot(self) -> Sections:
        return {"words": json.dumps([self.words, self.count]).encode()}

    def restore(self, sections: Sections) -> None:
        self.words, self.count = json.loads(sections["words"])

    def live_refs(self) -> Iterable[PayloadRange]:
        for place in self.words.values():
            if place:
                yield PayloadRange(Position(*place), Position(place[0], place[1] + 1))


class Unordered(Sound):
    """It answers in the order of a set."""

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        found = super().apply(context, command, refs)
        return found._replace(reply=" ".join(set(self.words)).encode()) if command == b"list" else found


class UnorderedState(Sound):
    """Its snapshot is in the order of a set."""

    def snapshot(self) -> Sections:
        return {"words": json.dumps([{word: self.words[word] for word in set(self.words)}, self.count]).encode()}


class Addressed(Sound):
    """An effect depends on where an object lies in memory."""

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        found = super().apply(context, command, refs)
        return found._replace(effects=[*found.effects, Timer("x", id(self) + context.index)])


class Talking(Sound):
    """It says what it does, by Python and past it. No fault at all."""

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        print("apply", command)
        os.write(1, b"apply\n")
        return super().apply(context, command, refs)


class Forgetful(Sound):
    """Its snapshot leaves the count out."""

    def snapshot(self) -> Sections:
        return {"words": json.dumps([self.words, 0]).encode()}


class Leaking(Sound):
    """It forgets a word without releasing it."""

    def released(self, place: Any) -> list[Any]:
        return []


class Careless(Sound):
    """It releases a word that it keeps."""

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        found = super().apply(context, command, refs)
        dead = [Release(*range_of(ref)) for ref in refs] if command == b"add three" else []
        return found._replace(effects=[*found.effects, *dead])


class Ahead(Sound):
    """It releases what is not written yet."""

    def released(self, place: Any) -> list[Any]:
        return [Release(Position(*place), Position(place[0] + 100, 0))] if place else []


class Shared(Sound):
    """A snapshot that later commands change."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, bytes] = {}

    def snapshot(self) -> Sections:
        self.held["words"] = super().snapshot()["words"]
        return self.held


class Hasty(Sound):
    """It changes its state before it refuses."""

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        self.count += 1
        return super().apply(context, command, refs)

"""A KV group of the blocking client: what `kv` has, without await, usable from any thread. Made by `sync.Yard.kv`.

A watch asks again and again for what comes next, each time from the revision after the last one that it has seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from logyard.protocol.kv import (
    KEYS_ONLY,
    NO_DELETE,
    NO_PUT,
    PARTS,
    PREVIOUS,
    Bodies,
    Changes,
    Compacted,
    Decoder,
    Parts,
    answer_of,
    bodies_of,
    range_of,
    value_questions,
)

from ._sync.frames import Appends, FramedKV
from .kv_requests import anew, events_call, near
from .log import POLL_WAIT_S


class KV(FramedKV):
    """See `kv.KV`: the same verbs with the same options."""

    __slots__ = ()

    def __init__(self, yard: Appends, name: str) -> None:
        self.yard = yard
        self.name = name

    def watch(
        self,
        key: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bool = False,
        start: int = 0,
        previous: bool = False,
        values: bool = True,
        puts: bool = True,
        deletes: bool = True,
        progress: bool = False,
        node: int | None = None,
        wait: float = POLL_WAIT_S,
    ) -> Iterator[Changes]:
        """Yield what changes, for ever, one revision after the other; `start` 0: from now (the call) on. Options as in
        `kv.KV.watch`; with `progress` something comes every `wait` seconds. Raises `Compacted` when what comes next is
        gone."""
        key, end = range_of(key, end, prefix)
        flags = (
            (PREVIOUS if previous else 0)
            | (0 if values else KEYS_ONLY)
            | (0 if puts else NO_PUT)
            | (0 if deletes else NO_DELETE)
            | PARTS
        )
        following = start or self.status()["revision"] + 1
        return self._watch(key, end, flags, following, progress, node, min(wait, POLL_WAIT_S))

    def _watch(
        self, key: bytes, end: bytes, flags: int, following: int, progress: bool, node: int | None, wait: float
    ) -> Iterator[Changes]:
        uid, parts = 0, Parts()
        while True:
            call = events_call(self.name, key, end, flags, following, node, wait, parts.rest)
            # Silence may last as long as it likes: one question lasts a few seconds, and a leader may have to be found.
            header, data = self.yard.run(call, POLL_WAIT_S + self.yard.timeout)
            if header["kind"] == "compacted":
                raise Compacted("what comes next is compacted", compacted=header["compacted"])
            said = header.get("uid", 0)
            if uid and said and uid != said:
                raise anew(self.name)
            uid = said or uid
            yield from self._changes(*parts.add(header, bodies_of(header["places"], data)), node)
            if progress and not header["revisions"]:
                yield Changes(header["next"] - 1, ())
            following = header["next"]

    def _changes(self, revisions: list[Any], bodies: Bodies, node: int | None) -> Iterator[Changes]:
        for one in revisions:
            decoder = Decoder(bodies)
            found = decoder.changes(one)
            if decoder.missing:
                for question in value_questions(decoder.missing):
                    packed, more = self.ask(question, self.yard.timeout, near(node), node)
                    answer_of(packed)
                    bodies |= more
                found = Decoder(bodies).changes(one)
            yield from found.values()

"""A handler that keeps what it is told and lets a test wait for a condition; makers of messages and entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from logyard.engine.entry import Entry, build_commands
from logyard.engine.raft.messages import APPEND, APPEND_REPLY, Message
from logyard.engine.types import Buffer
from logyard.protocol.frame import encode_frame


class Recorder:
    """What a node's handler was called with, in order."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, Message]] = []
        self.ups: list[int] = []
        self.downs: list[int] = []
        self.lives: list[frozenset[int]] = []
        self.blobs: list[tuple[int, int, int, dict[str, Any], memoryview]] = []
        self.outdated: list[tuple[int, str]] = []
        self._changed = trio.Event()

    async def until(self, condition: Callable[[], bool], seconds: float = 5) -> None:
        """Wait for a condition on this recorder; fails when it takes longer than `seconds`."""
        with trio.fail_after(seconds):
            while not condition():
                await self._changed.wait()

    def _note(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def on_messages(self, node: int, messages: list[Message]) -> None:
        self.messages += ((node, message) for message in messages)
        self._note()

    def on_link_up(self, node: int) -> None:
        self.ups.append(node)
        self._note()

    def on_link_down(self, node: int) -> None:
        self.downs.append(node)
        self._note()

    def on_liveness(self, live: set[int]) -> None:
        self.lives.append(frozenset(live))
        self._note()

    def on_outdated(self, node: int, reason: str) -> None:
        self.outdated.append((node, reason))
        self._note()

    def on_blob(self, node: int, kind: int, request: int, header: dict[str, Any], body: memoryview) -> None:
        self.blobs.append((node, kind, request, header, body))
        self._note()


def reply(to: int, uid: int = 7, index: int = 9) -> Message:
    """An APPEND_REPLY."""
    return Message(APPEND_REPLY, uid, to, 0, 3, index, 2, 8, 0, False, None, 0, 0)


def make_entry(uid: int, index: int, bodies: list[Buffer], term: int = 3) -> Entry:
    """An entry of one frame a body."""
    frames = [memoryview(b"".join(encode_frame([(b"head", body)], command=b"put"))) for body in bodies]
    return build_commands(uid, index, term, 1_700_000_000_000, frames)


def append(to: int, uid: int, entries: list[Entry]) -> Message:
    """An APPEND of these entries."""
    first = entries[0].index if entries else 10
    return Message(APPEND, uid, to, 0, 3, first - 1, 2, 5, 0, False, entries, first, first + len(entries) - 1)


def values(message: Message) -> tuple[object, ...]:
    """Everything a message says, but who it is between and its entries."""
    m = message
    return (m.kind, m.uid, m.term, m.index, m.log_term, m.commit, m.context, bool(m.reject), m.first, m.last)


def entry_values(entry: Entry) -> tuple[object, ...]:
    """Everything an entry says."""
    body = None if entry.bodies is None else b"".join(entry.bodies)
    return (entry.index, entry.term, entry.kind, entry.data, body, entry.body_bytes, entry.tombstone)

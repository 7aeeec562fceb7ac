"""A small machine for the chaos tests: registers by key, written, compared and set, and read by query.

A write may carry a payload; it lives until the next one of its key, so that liveness is checked beside values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgpack

from logyard.engine.machine import Applied, Context, PayloadRange, PayloadRef, Position, Reject, Release, Sections

WRITE, CAS = 1, 2
OK, DIFFERENT = b"\x01", b"\x00"


def encode(kind: int, key: str, *values: object) -> bytes:
    """(WRITE, key, new) or (CAS, key, expected, new)."""
    packed: bytes = msgpack.packb((kind, key, *values))
    return packed


class Registers:
    """Values by key; `places` holds the (index, ordinal) of the payload that belongs to a value."""

    version = 1

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.places: dict[str, tuple[int, int]] = {}

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        """OK or DIFFERENT; payloads of what is not written are released."""
        try:
            kind, key, *values = msgpack.unpackb(command)
        except ValueError as error:
            raise Reject("bad_request", str(error)) from error
        mine = [Position(ref.index, ref.ordinal) for ref in refs]
        if kind == CAS and self.values.get(key) != values[0]:
            return Applied(DIFFERENT, [Release(at, Position(at.index, at.ordinal + 1)) for at in mine])
        self.values[key] = values[-1]
        effects = [self._release(key)] if key in self.places else []
        if mine:
            self.places[key] = (mine[0].index, mine[0].ordinal)
        return Applied(OK, effects)

    def _release(self, key: str) -> Release:
        index, ordinal = self.places.pop(key)
        return Release(Position(index, ordinal), Position(index, ordinal + 1))

    def query(self, request: bytes) -> bytes:
        """The value of a key, or, for an empty request, a hash of the whole state."""
        if not request:
            return hashlib.sha256(self._packed()).digest()
        packed: bytes = msgpack.packb(self.values.get(request.decode()))
        return packed

    def _packed(self) -> bytes:
        packed: bytes = msgpack.packb((sorted(self.values.items()), sorted(self.places.items())))
        return packed

    def snapshot(self) -> Sections:
        """One section."""
        return {"registers": self._packed()}

    def restore(self, sections: Sections) -> None:
        """Take a snapshot's state."""
        values, places = msgpack.unpackb(sections["registers"])
        self.values = dict(values)
        self.places = {key: (index, ordinal) for key, (index, ordinal) in places}

    def live_refs(self) -> Iterable[PayloadRange]:
        """Every key's payload."""
        for index, ordinal in sorted(self.places.values()):
            yield PayloadRange(Position(index, ordinal), Position(index, ordinal + 1))

"""The number of a producer, and the sequences of what it appends. Sans-IO; used by the producers of both faces."""

from __future__ import annotations

import hashlib

from logyard.protocol.errors import BadRequest
from logyard.protocol.frame import produce_command

NUMBER_MAX = (1 << 63) - 1


def producer_number(name: int | str) -> int:
    """A producer's number: as given, or made of its name."""
    if isinstance(name, str):
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") & NUMBER_MAX or 1
    if not 0 < name <= NUMBER_MAX:
        raise BadRequest("a producer is a text or a number from 1 up")
    return name


class Numbering:
    """`last` is the highest sequence that was given or is known to be written."""

    __slots__ = ("number", "last")

    def __init__(self, number: int, last: int) -> None:
        self.number = number
        self.last = last

    def command(self, sequence: int | None) -> bytes:
        """The command of an append with that sequence, or with the next one."""
        chosen = self.last + 1 if sequence is None else sequence
        if not 0 < chosen <= NUMBER_MAX:
            raise BadRequest("a sequence is a number from 1 up")
        self.last = max(self.last, chosen)
        return produce_command(self.number, chosen)

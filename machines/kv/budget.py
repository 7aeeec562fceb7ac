"""What the commands of one entry may cost: every member pays it in one turn of its loop, and again at each replay.

Invariant: what is refused follows from the state and the entry alone, so all members refuse the same. A frame has a
share of its own, because its answers travel together; what it leaves goes back to its entry. Used by `machine`, which
hands it to `txn` and `range`.
"""

from __future__ import annotations

from .command import Refusal

ANSWER_BYTES_MAX = 32 << 20
"""Rows in the answers of one frame. No client takes more than 64 MiB of replies (`protocol.wire`)."""
QUESTION_BYTES_MAX = 112 << 20
"""Rows in the answer to one question, which only the node that is asked builds: what a client takes, less what else
travels with it."""
ENTRY_FRAMES = 4
"""Frames of one entry that may cost as much as a frame may, together."""


class Budget:
    """`bytes`: of rows that the answers of the frame under way may still have."""

    __slots__ = ("bytes", "_bytes_max", "_entry_bytes")

    def __init__(self, bytes_max: int, frames: int) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max
        self._entry_bytes = frames * bytes_max
        self.begin_frame()

    @classmethod
    def of_entry(cls) -> Budget:
        """Return what an entry may cost."""
        return cls(ANSWER_BYTES_MAX, ENTRY_FRAMES)

    @classmethod
    def of_question(cls) -> Budget:
        """Return what a question may cost."""
        return cls(QUESTION_BYTES_MAX, 1)

    def begin_frame(self) -> None:
        """Begin with another frame."""
        left = self._entry_bytes + self.bytes
        self.bytes = min(left, self._bytes_max)
        self._entry_bytes = left - self.bytes

    def answer(self, size: int) -> None:
        """Count bytes of rows. Raises `Refusal`."""
        if size > self.bytes:
            raise Refusal("too_large", f"the answer has more than {self._bytes_max} bytes, or those beside it have")
        self.bytes -= size

    def take_back(self, left: int) -> None:
        """Have `left` bytes again: what was counted since then is not answered."""
        self.bytes = left

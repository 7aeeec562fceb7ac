"""What the commands of one entry may cost: every member pays it in one turn of its loop, and again at each replay.

Invariant: what is refused follows from the state and the entry alone, so all members refuse the same. A frame has a
share of its own, because its answers travel together; what it leaves goes back to its entry. Used by `machine`, which
hands it to `txn` and `range`.
"""

from __future__ import annotations

from .command import Refusal

ANSWER_BYTES_MAX = 32 << 20
"""Rows in the answers of one frame. No client takes more than 64 MiB of replies (`protocol.wire`)."""
STEPS_MAX = 1_000_000
"""Keys of ranges and versions that one frame may look at, beside all the keys there are, twice: a transaction may
compare all of them and then change all of them."""
QUESTION_BYTES_MAX = 112 << 20
"""Rows in the answer to one question, which only the node that is asked builds: what a client takes, less what else
travels with it."""
QUESTION_STEPS_MAX = 1 << 62
ENTRY_FRAMES = 4
"""Frames of one entry that may cost as much as a frame may, together."""
STEP_BYTES = 256
"""What is hashed in the time of a step, about."""
UNDO_STEPS = 8
"""What a write costs that is undone: it was done for nothing, and takes as long again."""


class Budget:
    """`bytes`: of rows that the answers of the frame under way may still have; `steps` that it may still take."""

    __slots__ = ("bytes", "steps", "_bytes_max", "_steps_max", "_entry_bytes", "_entry_steps")

    def __init__(self, bytes_max: int, steps_max: int, frames: int) -> None:
        self.bytes = self.steps = 0
        self._bytes_max = bytes_max
        self._steps_max = steps_max
        self._entry_bytes = frames * bytes_max
        self._entry_steps = frames * steps_max
        self.begin_frame()

    @classmethod
    def of_entry(cls, keys: int) -> Budget:
        """Return what an entry may cost where there are so many keys."""
        return cls(ANSWER_BYTES_MAX, STEPS_MAX + 2 * keys, ENTRY_FRAMES)

    @classmethod
    def of_question(cls) -> Budget:
        """Return what a question may cost."""
        return cls(QUESTION_BYTES_MAX, QUESTION_STEPS_MAX, 1)

    def begin_frame(self) -> None:
        """Begin with another frame."""
        size, steps = self._entry_bytes + self.bytes, self._entry_steps + self.steps
        self.bytes, self.steps = min(size, self._bytes_max), min(steps, self._steps_max)
        self._entry_bytes, self._entry_steps = size - self.bytes, steps - self.steps

    def answer(self, size: int) -> None:
        """Count bytes of rows. Raises `Refusal`."""
        if size > self.bytes:
            raise Refusal("too_large", f"the answer has more than {self._bytes_max} bytes, or those beside it have")
        self.bytes -= size

    def walk(self, steps: int = 1) -> None:
        """Count keys or versions that are looked at. Raises `Refusal`: whoever wants more than is left uses it up."""
        self.steps -= steps
        if self.steps < 0:
            self.steps = 0
            message = f"more than {self._steps_max} keys and versions are looked at, with the operations beside it"
            raise Refusal("too_many_operations", message)

    def undo(self, left: int, changes: int) -> None:
        """Have `left` bytes again, since what was counted after that is not answered; count the changes that are
        undone."""
        self.bytes = left
        self.steps = max(0, self.steps - UNDO_STEPS * changes)

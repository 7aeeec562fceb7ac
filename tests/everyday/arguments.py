"""What the verbs of the matrix are given: usual, largest and empty arguments, by the names that its calls use."""

from __future__ import annotations

from io import BytesIO
from typing import Any, BinaryIO

import msgpack

from logyard.client.log import latest_call
from logyard.engine.machine import Machine
from logyard.machines.log import AppendLog
from logyard.machines.log.command import APPEND
from logyard.protocol.kv import Compare, Get, Put

MANY = 4096
"""Records of one frame."""
ANSWER_S = 2.0
"""Of what a caller waits, for an answer on its way: all faces ask at once."""
SEEDED = 3
"""Records that each log has."""


class Arguments:
    """Of a face in a situation; `size`: "usual", "largest" or "empty"."""

    def __init__(self, name: str, size: str) -> None:
        self.name = name
        self.size = size
        self._made = 0
        usual, largest = size == "usual", size == "largest"

        def one(of_usual: Any, of_largest: Any, of_empty: Any) -> Any:
            return of_usual if usual else of_largest if largest else of_empty

        self.metadata: bytes = one(b"metadata", b"m" * 65_535, b"")
        self.body: bytes = one(b"body", b"B" * ((2 << 20) + 1), b"")
        self.small: bytes = one(b"body", b"B" * (256 << 10), b"")
        self.value: bytes = one(b"value", b"V" * (2 << 20), b"")
        self.key: bytes = one(b"key", b"k" * (16 << 10), b"")
        self.records: list[tuple[bytes, bytes | None]] = one(
            [(b"m", b"one"), (b"", None)], [(b"m", b"b" * 64)] * MANY, []
        )
        self.count: int = one(10, MANY, 0)
        self.offset: int = one(0, 1 << 62, 0)
        self.stop: int = one(4, 4, 0)
        self.since: int = one(0, 1 << 62, 0)
        self.index: int = one(1, 1 << 62, 0)
        self.patience: float = 5.0 if usual else ANSWER_S + 0.2
        self.seconds: float = one(60.0, 9e9, 0.0)
        self.revision: int = one(1, 1 << 62, 0)
        self.lease: int = one(5, (1 << 63) - 1, 0)
        self.ids: tuple[int, ...] = one((10_001,), tuple(range(1 << 40, (1 << 40) + 20_000)), ())
        self.credit: int = one(100, 65_535, 0)
        self.few: int = one(2, 20, 0)
        self.options: dict[str, Any] = one({}, {"start": (1 << 62) - 1}, {})
        self.changes: list[tuple[str, int]] = one([("add_learner", 3)], [("add", node) for node in range(1, 200)], [])
        many = range(500)
        absent = [Compare(b"k%d" % number, "version", "=", 0) for number in many]
        self.compares = one([Compare(b"key", "version", ">", 0)], absent, [])
        puts = [Put(b"k%d" % number, b"v" * 500) for number in many]
        self.operations = one([Put(b"key", b"v"), Get(b"key")], puts, [])
        self.question: bytes = msgpack.packb(["bounds"])
        self.append = APPEND

    def stream(self) -> BinaryIO:
        """The body as a file."""
        return BytesIO(self.body)

    def name_of(self, kind: str) -> str:
        """The face's group of a kind."""
        return f"{kind}-{self.name}"

    @property
    def topic_name(self) -> str:
        """The face's topic."""
        return f"topic-{self.name}"

    @property
    def spare(self) -> str:
        """A group on two of the nodes, which is to be changed."""
        return f"spare-{self.name}"

    @property
    def another(self) -> str:
        """One of an embedded system, to be deleted in its old way."""
        return f"another-{self.name}"

    @property
    def some_names(self) -> list[str]:
        """Names of groups."""
        return [] if self.size == "empty" else [self.name_of("log")]

    def fresh(self) -> str:
        """A name that no group has."""
        self._made += 1
        return f"fresh-{self.name}-{self._made}"

    def machine(self) -> Machine:
        """Of a group to be made."""
        return AppendLog()

    def latest_call(self) -> Any:
        """A call for `run`."""
        return latest_call(self.name_of("log"), None, None)

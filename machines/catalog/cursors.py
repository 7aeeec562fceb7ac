"""Where each round robin stands: of placing copies, and leaders."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import msgpack

from logyard.engine.machine import Reject

from .section import At

CURSORS_MAX = 1024


class Cursors:
    """Numbers by name, which only grow."""

    name: ClassVar[str] = "cursors"
    version: ClassVar[int] = 1
    commands: ClassVar[Collection[str]] = ("advance",)
    questions: ClassVar[Collection[str]] = ("read",)

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def apply(self, at: At, command: str, values: Mapping[str, Any]) -> Any:
        """Move a cursor on; return where it stood."""
        name, by = str(values["name"]), int(values["by"])
        if by < 0 or (name not in self._numbers and len(self._numbers) >= CURSORS_MAX):
            raise Reject("bad_request", f"a cursor moves on, and there are at most {CURSORS_MAX} of them")
        before = self._numbers.get(name, 0)
        self._numbers[name] = before + by
        return before

    def ask(self, question: str, values: Mapping[str, Any]) -> Any:
        """Return where a cursor stands."""
        return self._numbers.get(str(values["name"]), 0)

    def snapshot(self) -> Mapping[str, bytes]:
        """Return one shard."""
        return {"all": msgpack.packb(sorted(self._numbers.items()))}

    def restore(self, shards: Mapping[str, bytes], version: int) -> None:
        """Take the place of what was packed."""
        self._numbers = dict(msgpack.unpackb(shards["all"]))

    def upgrade(self, from_version: int, to_version: int) -> None:
        """Have nothing to do: there is one version."""

"""The plan: moves that are under way or wait, each with what, why, since when and how far, and whether the reconciler
is paused.

Whoever leads the catalogue proposes and steps; as everything is here, a new leader goes on where the old one stood.
Invariant: a log has at most one move, and numbers of moves are never used again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

import msgpack

from logyard.engine.machine import Reject

from .section import At, Table

KINDS = ("replace", "add", "remove", "lead")
MOVES_MAX = 4096
ENDED_MAX = 256
REFUSED = "refused: "
"""How the outcome of a move begins whose target does not do what it is to."""


class Move(NamedTuple):
    """One log's: `source` and `target` are nodes (0: none), `step` how far it is, `since` in ms of log time."""

    uid: int
    kind: str
    source: int
    target: int
    why: str
    since: int
    step: str = "proposed"


class Ended(NamedTuple):
    """A move that is over, and how it came out; the newest of them are kept to be shown."""

    number: int
    move: tuple[Any, ...]
    outcome: str
    at: int


class Plan:
    """Moves by number."""

    name: ClassVar[str] = "plan"
    version: ClassVar[int] = 1
    commands: ClassVar[Collection[str]] = ("propose", "step", "finish", "cancel", "pause", "resume")
    questions: ClassVar[Collection[str]] = ("list",)

    def __init__(self) -> None:
        self.rows: Table[Move] = Table("rows", Move)
        self.of: dict[int, int] = {}
        """Moves by the log's uid."""
        self.ended: list[Ended] = []
        self.paused = ""
        """Why nothing is begun, or nothing."""

    def apply(self, at: At, command: str, values: Mapping[str, Any]) -> Any:
        """Apply a command."""
        if command == "propose":
            return [self._propose(at, move) for move in values["moves"]]
        if command in ("pause", "resume"):
            self.paused = str(values.get("why", "paused by hand"))[:256] if command == "pause" else ""
            return self.paused
        if command == "cancel" and "number" not in values:
            return [self._end(at, number, "cancelled") for number, _ in list(self.rows)]
        if command == "finish" and "moves" in values:
            rows = [(int(number), str(outcome)[:256]) for number, outcome in values["moves"]]
            return [self._end(at, number, outcome) if number in self.rows else 0 for number, outcome in rows]
        number = int(values["number"])
        row = self.rows.get(number)
        if row is None:
            raise Reject("refused", f"there is no move {number}: it has ended, or never was")
        if command == "step":
            self.rows.put(number, row._replace(step=str(values["step"])[:256]))
            return number
        return self._end(at, number, "cancelled" if command == "cancel" else str(values["outcome"])[:256])

    def has(self, uid: int) -> bool:
        """Return whether a log has a move."""
        return uid in self.of

    def ask(self, question: str, values: Mapping[str, Any]) -> Any:
        """Return the moves, those that ended, and whether the reconciler is paused."""
        return {
            "paused": self.paused,
            "moves": [{"number": number, **row._asdict()} for number, row in self.rows],
            "ended": [
                {"number": one.number, **Move(*one.move)._asdict(), "outcome": one.outcome, "at": one.at}
                for one in self.ended
            ],
        }

    def _propose(self, at: At, move: Mapping[str, Any]) -> int:
        """Store a move and return its number; 0 for a log that has one, or when there are too many."""
        uid, kind = int(move["uid"]), str(move["kind"])
        if kind not in KINDS:
            raise Reject("bad_request", f"{kind[:64]!r} is no move; there are {', '.join(KINDS)}")
        if uid in self.of or len(self.rows) >= MOVES_MAX:
            return 0
        number = self.rows.add(
            Move(uid, kind, int(move["source"]), int(move["target"]), str(move["why"])[:256], at.now)
        )
        self.of[uid] = number
        return number

    def _end(self, at: At, number: int, outcome: str) -> int:
        row = self.rows.get(number)
        assert row is not None
        self.rows.drop(number)
        self.of.pop(row.uid, None)
        self.ended = [*self.ended, Ended(number, tuple(row), outcome, at.now)][-ENDED_MAX:]
        return number

    def snapshot(self) -> Mapping[str, bytes]:
        """Return the moves in shards, and what is there once."""
        return {"once": msgpack.packb([self.paused, self.ended]), **self.rows.shards()}

    def restore(self, shards: Mapping[str, bytes], version: int) -> None:
        """Take the place of what was packed."""
        self.paused, ended = msgpack.unpackb(shards["once"], use_list=False)
        self.ended = [Ended(*one) for one in ended]
        self.rows.restore(shards)
        self.of = {row.uid: number for number, row in self.rows}

    def upgrade(self, from_version: int, to_version: int) -> None:
        """Have nothing to do: there is one version."""

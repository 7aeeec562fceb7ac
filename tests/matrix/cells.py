"""The cells of the matrix, and what came of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

KINDS = ("wal", "segment", "segment index", "ring", "snapshot", "meta", "generation", "bodies", "config")
FAULTS = ("bit flip", "zeroed block", "truncation", "EIO on read", "EIO on write", "ENOSPC", "stale copy")
ROLES = ("leader", "follower")
INJECTED = ("EIO on read", "EIO on write", "ENOSPC")
"""Faults of the kernel's answers: strace gives them."""


class Cell(NamedTuple):
    """One of 126."""

    kind: str
    fault: str
    role: str

    def __str__(self) -> str:
        return " / ".join(self)


CELLS = tuple(Cell(kind, fault, role) for kind in KINDS for fault in FAULTS for role in ROLES)


@dataclass
class Result:
    """What came of a cell. `hits`: damages done, or calls that failed; `steps`: what was seen, in order. `reason`: why
    it does not apply, or was not run (`not_run`)."""

    cell: Cell
    victim: int = 0
    hits: int = 0
    steps: list[str] = field(default_factory=list)
    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    reason: str = ""
    not_run: bool = False
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Nothing lost, no wrong byte, the cluster whole again, and the fault hit something if it can."""
        return not (self.lost or self.wrong or self.problems) and bool(self.hits or self.reason)

    def row(self) -> dict[str, Any]:
        """For people and machines."""
        problems = [*self.problems, *self.lost[:3], *self.wrong[:3]]
        return {
            "kind": self.cell.kind, "fault": self.cell.fault, "role": self.cell.role, "victim": self.victim,
            "hits": self.hits, "outcome": "; ".join(self.steps), "acknowledged": self.acknowledged,
            "lost": len(self.lost), "wrong": len(self.wrong), "problems": problems,
            "not_applicable": "" if self.not_run else self.reason, "not_run": self.reason if self.not_run else "",
            "seconds": round(self.seconds, 1), "passed": self.passed,
        }  # fmt: skip

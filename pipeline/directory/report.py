"""What a check found: findings that name file, offset and group, and counts of what was verified.

Invariant: a damaged directory never stops a check; whatever reading it raises becomes a finding (`guarded`), and a
flood of equal findings is cut short and counted. What this process lacks is no finding: it ends the check (`lacks`).
Filled by `meta`, `files` and `payloads`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from logyard.protocol.errors import SHORT, Busy, NoSpace, WrongIdentity

DAMAGE = "damage"
"""Something acknowledged is lost or unreadable here: it must come from a peer."""
WARNING = "warning"
"""Worth knowing, and nothing is lost: a torn last batch, leftovers of a crash."""
UNKNOWN = "unknown"
"""What is here can't be judged: its machine is not at hand, or stands still before the end of its log."""
HEALED = "healed"
"""Bytes that do not verify, of which a second copy does: the next start puts them right."""
CAP = 20
"""Findings of one kind for one group and file that are listed; the rest is counted."""
COUNTS = (
    "groups", "wal_files", "wal_batches", "wal_entries", "segments", "segment_entries", "rings", "ring_entries",
    "snapshots", "generations", "units", "bytes",
)  # fmt: skip

_LACKS = (*SHORT, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM)

Finding: TypeAlias = dict[str, str]
Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


class Report:
    """Findings, counts, and the leftovers that `--repair` may remove. Paths are relative to the directory."""

    __slots__ = ("findings", "counts", "orphans", "progress", "inside", "_many")

    def __init__(self, progress: Progress, inside: Callable[[str], None]) -> None:
        self.findings: list[Finding] = []
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.orphans: list[str] = []
        self.progress = progress
        self.inside = inside
        """Called with the path of a memory map before it is read and with "" after: reading a bad one may kill us."""
        self._many: dict[tuple[str, str, str, str], int] = {}

    def add(self, severity: str, kind: str, message: str, *, path: str = "", group: str = "") -> None:
        """Add one finding; beyond `CAP` of a kind for one group and file it is counted only."""
        key = (severity, kind, group, path)
        self._many[key] = self._many.get(key, 0) + 1
        if self._many[key] <= CAP:
            finding = {"severity": severity, "kind": kind, "group": group, "path": path, "message": message}
            self.findings.append(finding)

    def damage(self, kind: str, message: str, *, path: str = "", group: str = "") -> None:
        """Report that something is lost here."""
        self.add(DAMAGE, kind, message, path=path, group=group)

    def warning(self, kind: str, message: str, *, path: str = "", group: str = "") -> None:
        """Report what is wrong where nothing is lost."""
        self.add(WARNING, kind, message, path=path, group=group)

    def unknown(self, kind: str, message: str, *, path: str = "", group: str = "") -> None:
        """Report that it can't be known here whether anything is lost."""
        self.add(UNKNOWN, kind, message, path=path, group=group)

    def healed(self, kind: str, message: str, *, path: str = "", group: str = "") -> None:
        """Report damage of which a second copy is good."""
        self.add(HEALED, kind, message, path=path, group=group)

    def orphan(self, path: str, message: str) -> None:
        """Report a file that nobody needs: a start removes it or writes it again, and so may a repair."""
        self.warning("orphan", message, path=path)
        self.orphans.append(path)

    def count(self, name: str, more: int = 1) -> None:
        """Count more of something as verified."""
        self.counts[name] += more

    @contextmanager
    def guarded(self, kind: str, *, path: str = "", group: str = "") -> Iterator[None]:
        """Report whatever the reading of damaged bytes raises as a finding; only a newer format ends the check, and
        what `lacks` says."""
        try:
            yield
        except WrongIdentity:
            raise
        except Exception as error:  # bytes from a damaged disk may break any assumption of a reader
            if lacks(error):
                raise
            self.damage(kind, f"it cannot be checked further: {type(error).__name__}: {error}", path=path, group=group)

    def finish(self) -> None:
        """Say how much was left out."""
        for (severity, kind, group, path), many in self._many.items():
            if many > CAP:
                text = f"and {many - CAP} more like these"
                row = {"severity": severity, "kind": kind, "group": group, "path": path, "message": text}
                self.findings.append(row)

    def fields(self) -> dict[str, Any]:
        """Return plain values."""
        return {"findings": self.findings, "counts": self.counts, "orphans": self.orphans}


def lacks(error: BaseException | None) -> bool:
    """Return whether an error is a want of this process or machine: of memory, descriptors, rights, or of room for the
    check's own copy. It says nothing about the directory, which may be as good as any."""
    while error is not None:
        code = getattr(error, "errno", None) or getattr(error, "code", None)
        if code in _LACKS or isinstance(error, (MemoryError, Busy, NoSpace)):
            return True
        error = error.__cause__
    return False


def some(names: Sequence[str], most: int = 5) -> str:
    """Return a few names of many, for a message."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"

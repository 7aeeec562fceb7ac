"""The job that is running, and what died meanwhile: its copies are of before, and must not bring anything back.

Invariant: at most one job runs; every mark that may concern its copies is kept until they are adopted. Called by
`store`, under its lock.
"""

from __future__ import annotations

from collections.abc import Iterable

from .compaction import MigrateJob, RewriteJob
from .copies import Place


class Running:
    """`job` is None while none runs. A mark is (first, end, truncated)."""

    __slots__ = ("job", "_stakes", "_marks")

    def __init__(self) -> None:
        self.job: MigrateJob | RewriteJob | None = None
        self._stakes: dict[int, tuple[int, int]] = {}
        self._marks: dict[int, list[tuple[Place, Place, bool]]] = {}

    def start(self, job: MigrateJob | RewriteJob) -> None:
        """Count marks for this job's copies, too, from now on."""
        assert self.job is None, "one job at a time"
        self.job = job
        self._marks = {}
        self._stakes = {}
        for uid, first, last, *_ in job.homes if isinstance(job, RewriteJob) else job.ranges:
            known = self._stakes.get(uid, (first, last))
            self._stakes[uid] = (min(known[0], first), max(known[1], last))

    def remember(self, uid: int, first: Place, end: Place, truncated: bool) -> None:
        """Keep a mark if the job may copy what it names (a job without ranges: always). Marks that join are one."""
        if self.job is None:
            return
        if self._stakes:
            stake = self._stakes.get(uid)
            if stake is None or end <= (stake[0], 0) or first[0] > stake[1]:
                return
        marks = self._marks.setdefault(uid, [])
        if marks and not truncated and not marks[-1][2] and marks[-1][1] == first:
            marks[-1] = (marks[-1][0], end, False)
        else:
            marks.append((first, end, truncated))

    def marks(self, uid: int) -> Iterable[tuple[Place, Place, bool]]:
        """Return what died of a group since the job began."""
        return self._marks.get(uid, ())

    def stop(self) -> None:
        """Stop counting: adopted, or given up."""
        self.job = None
        self._marks = {}
        self._stakes = {}

    def may_touch(self, generation: int) -> bool:
        """Return whether the job reads a generation or may have written to it."""
        job = self.job
        if job is None:
            return False
        return generation >= job.generation or (isinstance(job, RewriteJob) and generation == job.source)

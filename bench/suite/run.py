"""One run of the suite: sample by sample, in alternating rounds; what is finished is not run again.

A system that fails at a case is a row that says so, and the run goes on. Called by `service.cli.bench_suite`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..calibrate import describe_machine
from .figures import CLIENT_BOUND, TIME
from .samples import Sample, Samples, plan
from .table import OURS, SPLIT, Case, Profile, case_of

PROCESSES_MAX = 2
"""Of `bench append`; rivals' loads have as many as that at most too."""

RunOne = Callable[[Case, Profile, Path, int], dict[str, Any]]
"""Run a case once, in an empty directory, with so many load processes; return its figures."""


class Contender:
    """One that is measured. `why_not`: how to install it, if it is not here; `notes` stand beside its figures."""

    __slots__ = ("name", "notes", "run_one", "version", "why_not")

    def __init__(
        self, name: str, version: str, run_one: RunOne | None, why_not: str = "", notes: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.version = version
        self.run_one = run_one
        self.why_not = why_not
        self.notes = list(notes)


def run_suite(
    profile: Profile,
    systems: Sequence[Contender],
    samples: Samples,
    say: Callable[[str], None],
    step: Callable[[int], None],
    work: Path | None = None,
) -> list[Sample]:
    """Make every sample that is not finished; return those that gave no figure."""
    known = {system.name: system for system in systems}
    cases = [case_of(name) for name in profile.cases]
    failed = []
    for sample in plan(cases, [system.name for system in systems], profile.rounds, OURS):
        if not samples.finished(sample):
            case, system = case_of(sample.case), known[sample.system]
            say(f"{sample.case}, {sample.system}, round {sample.round} of {profile.rounds}")
            earlier = [samples.read(sample._replace(round=number)) for number in range(1, sample.round)]
            processes = max((int(one["processes"]) for one in earlier if one and one.get("processes")), default=1)
            found = make(case, system, profile, (work or samples.directory) / "work", processes)
            samples.keep(sample, found)
            if found.get("failed"):
                say(f"  {found['failed']}")
        if not samples.finished(sample):
            failed.append(sample)
        step(1)
    return failed


def make(case: Case, system: Contender, profile: Profile, work: Path, processes: int) -> dict[str, Any]:
    """Return one sample; once more with twice the load processes where those were what was busy, unless the case says
    how many there are, or it can't have more."""
    if system.run_one is None:
        return {"failed": f"not installed: {system.why_not}", "version": "", "notes": []}
    if "processes" in case.settings or case.kind not in SPLIT:
        return attempt(case, system, profile, work, int(str(case.settings.get("processes", 1))))
    found = attempt(case, system, profile, work, processes)
    share = found.get("figures", {}).get("client_share")
    if share is not None and share >= CLIENT_BOUND and processes < PROCESSES_MAX:
        again = attempt(case, system, profile, work, processes * 2)
        if not again.get("failed") and again["figures"][case.figure] > found["figures"][case.figure]:
            return again
    return found


def attempt(case: Case, system: Contender, profile: Profile, work: Path, processes: int) -> dict[str, Any]:
    """Run a case once in an empty directory, with the machine's speeds of that moment."""
    assert system.run_one is not None
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    found: dict[str, Any] = {
        "version": system.version, "at": time.strftime(TIME, time.gmtime()),
        "processes": processes, "notes": system.notes, "machine": describe_machine(work),
    }  # fmt: skip
    try:
        figures = system.run_one(case, profile, work / "nodes", processes)
    except Exception as error:
        # Whatever a rival's client meets, or a case's check: the next sample may still be good.
        found["failed"] = f"{type(error).__name__}: {error}"[:500]
    else:
        found["figures"] = {**figures, "client_share": client_share(figures, processes)}
        # A figure beyond its aim is a figure.
        if not figures.get("sound", figures.get("ok", True)):
            found["failed"] = "; ".join(map(str, figures.get("problems", [])))[:500] or "a check of the case failed"
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return found


def client_share(figures: Mapping[str, Any], processes: int) -> float | None:
    """Return how much of a core a load process used while it ran, of a queue's two the busier one; None where that is
    not known."""
    spent = max(figures.get("client_cpu_s") or 0.0, figures.get("consumer_cpu_s") or 0.0)
    seconds = figures.get("seconds")
    if not spent or not seconds:
        return None
    return round(float(spent) / (float(seconds) + float(figures.get("warmup_s", 0.0))) / processes, 3)

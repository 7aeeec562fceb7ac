"""`python -m tests.sim --seed S [--seeds N] [--minutes M] [--groups G] [--json]`: simulated clusters under faults.

Each of the seeds S..S+N-1 is M simulated minutes of one cluster. Exit 1 on a violation, or when a kind of fault hit
nothing though there was a minute or more of it; the failing seed is minimised and printed with the command that repeats
it. `--regressions` runs the recorded seeds. `--hashes` runs those of hashes.json and names each whose history is not
the recorded one: nothing that only moves or renames code changes any; `--record` writes them down.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from .features import FEATURES, MORE_KINDS, drawn
from .features import recorded as recorded_features
from .kinds import KINDS, VERBS
from .minimise import minimise
from .run import Result, Run
from .workers import Job, results

REGRESSIONS = Path(__file__).with_name("regressions.json")
HASHES = Path(__file__).with_name("hashes.json")
COVERED_MINUTES = 1.0
TRIED = 4
"""In so many seeds each fault is forced, when there are many seeds."""
SHARE_MIN = 3
ALL_FEATURES = 20
"""So many seeds together have every feature."""
NONE = "none"
"""As `--verbs`: no fault at all; as `--features`: as before there were any."""
PLAIN = "plain"
"""As `--features`: none of them, but with their checks."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--minutes", type=float, default=1.0, help="simulated minutes of each")
    parser.add_argument("--groups", type=int, default=4, help="groups of each cluster")
    parser.add_argument("--verbs", default="", help="only these faults, comma-separated; `none`: none")
    parser.add_argument(
        "--features", default="", help=f"only these of {', '.join(FEATURES)}; `none`: none; default: drawn by the seed"
    )
    parser.add_argument(
        "--share", type=int, default=0, help="faults that each seed is forced to try; 0: enough for all"
    )
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one a core")
    parser.add_argument("--json", action="store_true", help="one object instead of lines")
    parser.add_argument("--no-minimise", action="store_true", help="leave a failing seed as it is")
    parser.add_argument("--regressions", action="store_true", help="run the recorded seeds instead")
    parser.add_argument("--hashes", action="store_true", help="compare the histories of recorded seeds instead")
    parser.add_argument("--record", action="store_true", help="with --hashes: write down what they are now")
    found = parser.parse_args(arguments)
    if found.minutes <= 0 or found.seeds < 1 or not 1 <= found.groups <= 64:
        parser.error("give at least one seed, some minutes, and 1 to 64 groups")
    # Together the seeds try each fault a few times; a seed alone tries all.
    unknown = set(filter(None, found.features.split(","))) - {*FEATURES, NONE, PLAIN}
    if unknown:
        parser.error(f"no feature is called {', '.join(sorted(unknown))}; there are {', '.join(FEATURES)}")
    found.share = found.share or max(SHARE_MIN, min(len(VERBS), -(-TRIED * len(VERBS) // found.seeds)))
    return found


def recorded(row: dict[str, Any]) -> Job:
    """A recorded seed."""
    verbs, features = row.get("verbs"), row.get("features")
    return (
        row["seed"],
        row["minutes"],
        row["groups"],
        None if verbs is None else tuple(verbs),
        row["share"],
        None if features is None else tuple(features),
    )


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """What to run."""
    if options.regressions:
        rows = json.loads(REGRESSIONS.read_text())
        return [recorded(row) for row in rows]
    verbs = tuple(verb for verb in options.verbs.split(",") if verb != NONE) if options.verbs else None
    seeds = range(options.seed, options.seed + options.seeds)
    return [
        (seed, options.minutes, options.groups, verbs, options.share, features_of(seed, options.features))
        for seed in seeds
    ]


def features_of(seed: int, asked: str) -> tuple[str, ...] | None:
    """The features of one seed: those asked for, or what it draws."""
    if asked == NONE:
        return None
    return tuple(name for name in asked.split(",") if name != PLAIN) if asked else tuple(sorted(drawn(seed)))


def command_of(job: Job) -> str:
    """Return the command that repeats one seed exactly: what is forced depends on `--share`, which `--seeds` sets."""
    seed, minutes, groups, verbs, share, features = job
    command = f"python -m tests.sim --seed {seed} --minutes {minutes} --groups {groups} --share {share}"
    command += f" --features {NONE if features is None else ','.join(sorted(features)) or PLAIN}"
    return command if verbs is None else f"{command} --verbs {','.join(sorted(verbs)) or NONE}"


def summary(jobs: Sequence[Job], found: Sequence[Result]) -> dict[str, Any]:
    """What is printed. `speed`: simulated cluster seconds per second of CPU, over all workers."""
    faults: Counter[str] = Counter()
    hashes = xxhash.xxh3_64()
    for result in found:
        faults += result.faults
        hashes.update(f"{result.seed}:{result.event_hash};".encode())
    cpu = sum(result.cpu_s for result in found)
    simulated = sum(result.simulated_s for result in found)
    return {
        "seeds": len(found),
        "sim_hours": round(simulated / 3600, 4),
        "speed": round(simulated / cpu, 1) if cpu else 0.0,
        "operations": sum(result.operations for result in found),
        "acknowledged": sum(result.acknowledged for result in found),
        "commits": sum(result.commits for result in found),
        "elections": sum(result.elections for result in found),
        "events": sum(result.events for result in found),
        "faults": {kind: faults[kind] for kind in sorted(KINDS | MORE_KINDS if any(job[5] for job in jobs) else KINDS)},
        "violations": [
            {"seed": result.seed, "what": what, "command": command_of(job)}
            for job, result in zip(jobs, found, strict=True)
            for what in result.violations
        ],
        "event_hash": hashes.hexdigest(),
    }


def shrink(job: Job) -> str:
    """A smaller run that fails as well, as a command."""
    seed, minutes, groups, verbs, share, features = job
    own = None if features is None else frozenset(features)
    more = {verb for name in own or () for verb in FEATURES[name]}
    kept, smaller = minimise(
        lambda fewer: Run(seed, minutes, groups, fewer, share, own).go(), of=verbs or {*VERBS, *more}
    )
    if smaller is None:
        return command_of(job)
    again = (seed, minutes, groups, tuple(kept), share, features)
    return f"{command_of(again)}   # {smaller.violations[0].splitlines()[0]}"


def hash_jobs(recorded: dict[str, Any], count: int) -> list[Job]:
    """The first `count` seeds of hashes.json."""
    minutes, groups, share = recorded["minutes"], recorded["groups"], recorded["share"]
    seeds = [int(seed) for seed in recorded["hashes"]][:count]
    return [(seed, minutes, groups, None, share, tuple(sorted(recorded_features(seed)))) for seed in seeds]


def compare_hashes(workers: int, record: bool) -> int:
    """Run the seeds of hashes.json; print those that differ, or write what they are."""
    kept = json.loads(HASHES.read_text())
    jobs = hash_jobs(kept, len(kept["hashes"]))
    now = {str(job[0]): result.event_hash for job, result in zip(jobs, results(jobs, workers), strict=True)}
    other = [seed for seed, found in now.items() if kept["hashes"][seed] != found]
    if record:
        HASHES.write_text(json.dumps({**kept, "hashes": now}, indent=0) + "\n")
    print(json.dumps({"seeds": len(now), "other": other}))
    return 1 if other and not record else 0


def main(arguments: Sequence[str]) -> int:
    """Run, print, judge."""
    options = parse(arguments)
    if options.hashes:
        return compare_hashes(options.workers, options.record)
    jobs = jobs_of(options)
    found: list[Result] = []
    for job, result in zip(jobs, results(jobs, options.workers), strict=True):
        found.append(result)
        if not options.json:
            verdict = f"{'; '.join(result.violations)}\n  again: {command_of(job)}" if result.violations else "ok"
            speed = result.simulated_s / result.cpu_s if result.cpu_s else 0.0
            print(f"seed {result.seed}: {result.simulated_s:.0f} s at {speed:.0f}x, {result.operations} operations, "
                  f"{result.commits} commits, {result.elections} elections, {sum(result.faults.values())} faults, "
                  f"{result.event_hash}: {verdict}", flush=True)  # fmt: skip
    report = summary(jobs, found)
    failing = next((job for job, result in zip(jobs, found, strict=True) if result.violations), None)
    if failing is not None and not options.no_minimise and not options.regressions:
        report["smaller"] = shrink(failing)
    covered = not options.regressions and not options.verbs and options.minutes * options.seeds >= COVERED_MINUTES
    # Features are drawn, not forced: together some seeds have all.
    wanted = KINDS | MORE_KINDS if options.seeds >= ALL_FEATURES else KINDS
    report["missed"] = (
        [kind for kind, count in report["faults"].items() if not count and kind in wanted] if covered else []
    )
    if options.json:
        print(json.dumps(report))
    else:
        for kind, count in report["faults"].items():
            print(f"{kind:28} {count}")
        for key in ("seeds", "sim_hours", "speed", "operations", "commits", "elections"):
            print(f"{key}: {report[key]}")
        print(f"missed: {', '.join(report['missed']) or 'none'}\nevent_hash: {report['event_hash']}")
        if "smaller" in report:
            print(f"smaller: {report['smaller']}")
    return 1 if report["violations"] or report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

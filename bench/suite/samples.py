"""What a run of the suite is made of, and where its raw samples are kept: a file for each finished case, system, round.

A directory says in `suite.json` which run it holds; a run that was broken off goes on where it stopped. Files are
written beside and renamed, so a sample is whole or not there.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from .table import CASES, SHIPPED, BadSuite, Case, Profile

FORMAT = 1
PLAN = "suite.json"
PACKAGE = Path(__file__).parents[2]


class Sample(NamedTuple):
    """One measurement that is to be made. `round` counts from 1."""

    case: str
    system: str
    round: int


def plan(cases: Sequence[Case], systems: Sequence[str], rounds: int, ours: str) -> list[Sample]:
    """Return all samples in order: rounds alternate between the systems, and each begins with another one."""
    found = []
    for case in cases:
        asked = [system for system in systems if system == ours or case.is_for(system)]
        for number in range(rounds):
            at = number % len(asked)
            found += [Sample(case.name, system, number + 1) for system in asked[at:] + asked[:at]]
    return found


class Samples:
    """The directory of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def begin(self, profile: Profile, systems: Sequence[str]) -> bool:
        """Take a new or empty directory, or go on in one of the same run; return whether it goes on."""
        told = {
            "format": FORMAT, "profile": profile.name, "systems": list(systems), "build": build(),
            "host": machine_name(),
        }  # fmt: skip
        place = self.directory / PLAN
        if place.exists():
            found = self.told()
            # Whether a rival is less durable as it comes is known once it is installed.
            plain = [
                [name for name in one if not name.endswith(SHIPPED)] for one in (found.get("systems", []), systems)
            ]
            if found.get("profile") != profile.name or plain[0] != plain[1]:
                raise BadSuite(
                    f"{self.directory} holds a run {found.get('profile')} of {', '.join(found.get('systems', []))}: "
                    "give the same, or another --report"
                )
            for key, what in (("build", "build of logyard"), ("host", "machine")):
                if found.get(key) != told[key]:
                    raise BadSuite(
                        f"{self.directory} holds a run of another {what} ({found.get(key)}, this one is {told[key]}), "
                        "and rounds of both make no median: give another --report"
                    )
            if len(systems) > len(found["systems"]):
                write(place, told)
            return True
        if self.directory.exists() and any(self.directory.iterdir()):
            raise BadSuite(f"{self.directory} is not empty, and holds no run of the suite")
        self.directory.mkdir(parents=True, exist_ok=True)
        write(place, told)
        return False

    def told(self) -> dict[str, Any]:
        """Return what the directory says of its run; raise `BadSuite` if it holds none."""
        try:
            found = json.loads((self.directory / PLAN).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BadSuite(f"{self.directory} holds no run of the suite ({PLAN} is not there)") from None
        except ValueError as error:
            raise BadSuite(f"{self.directory / PLAN} cannot be read: {error}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise BadSuite(f"{self.directory / PLAN} is not of a release that this one knows")
        return found

    def place(self, sample: Sample) -> Path:
        """Return where a sample is kept."""
        return self.directory / "raw" / sample.case / f"{sample.system}-{sample.round}.json"

    def finished(self, sample: Sample) -> bool:
        """Return whether it was made, and told a figure: what failed is run again."""
        found = self.read(sample)
        return found is not None and not found.get("failed")

    def read(self, sample: Sample) -> dict[str, Any] | None:
        """Return what was kept; None if there is nothing whole."""
        try:
            found = json.loads(self.place(sample).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def keep(self, sample: Sample, found: dict[str, Any]) -> None:
        """Store what a sample gave."""
        place = self.place(sample)
        place.parent.mkdir(parents=True, exist_ok=True)
        write(place, {"case": sample.case, "system": sample.system, "round": sample.round, **found})

    def all(self) -> Iterator[dict[str, Any]]:
        """Yield every sample of a case that is known here, in order of case, system and round."""
        known = _names()
        for path in sorted(self.directory.glob("raw/*/*.json")):
            system, _, number = path.stem.rpartition("-")
            if not number.isdigit():
                continue
            found = self.read(Sample(path.parent.name, system, int(number)))
            if found is not None and path.parent.name in known:
                yield found

    def strangers(self) -> list[str]:
        """Return the cases that are kept here and not in this release's table."""
        return sorted({path.parent.name for path in self.directory.glob("raw/*/*.json")} - _names())


def _names() -> set[str]:
    return {case.name for case in CASES}


def build() -> str:
    """Return which build of logyard this is: a digest of the package's sources."""
    found = xxhash.xxh3_64()
    for directory, folders, names in os.walk(PACKAGE, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                found.update(name.encode())
                found.update((Path(directory) / name).read_bytes())
    return found.hexdigest()


def machine_name() -> str:
    """Return which machine this is, as far as it can tell: cores, kernel, and the system's own identity."""
    try:
        identity = Path("/etc/machine-id").read_text(encoding="utf-8").strip()[:12]
    except OSError:
        identity = ""
    return f"{len(os.sched_getaffinity(0))} cores, Linux {platform.release()} {identity}".strip()


def write(place: Path, found: object) -> None:
    """Write a JSON file so that it is whole or not there."""
    beside = place.with_suffix(".new")
    beside.write_text(json.dumps(found, indent=1, default=str), encoding="utf-8")
    os.replace(beside, place)

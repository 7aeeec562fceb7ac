"""The generations of a directory as bytes: every row, every ledger, and the checkpoint rows that name them.

Invariant: an environment is opened read-only and without LMDB's lock file, which nobody needs once the directory's lock
is held. What of it must live is judged by `payloads`. Called by `service.check.process` and `reading`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from logyard.engine.disk.door import Disk
from logyard.engine.recovery.inspect import Facts
from logyard.payloads import checkpoints
from logyard.payloads.bodies import NAME as BODIES
from logyard.payloads.catalog import Catalog
from logyard.payloads.generation import HALF_MADE, Generation
from logyard.payloads.homes import Home
from logyard.payloads.ledger import Columns, Ledger, Marks
from logyard.payloads.measuring import Measured
from logyard.payloads.placement import NOWHERE
from logyard.payloads.writing import GenerationConfig
from logyard.protocol.errors import FormatNewer, GenerationUnfinished, PayloadError, WrongIdentity

from .report import Report, lacks, some

PAYLOADS = "payloads"
GROUP = re.compile(r"group ([0-9a-f]{16})")
UNFINISHED = re.compile(r"entry \d+ of group [0-9a-f]{16} lacks \d+ rows")


class Stopped(Generation):
    """A generation of a directory that no process has open: read without LMDB's lock, sealed or not."""

    __slots__ = ()

    @property
    def sealed(self) -> bool:
        """Nobody writes it."""
        return True


class Generations:
    """The generations of a directory. `homes` and `marks` are what the checkpoint rows say, by group and by copy."""

    def __init__(self, directory: Path, facts: Facts, skip: frozenset[str], report: Report) -> None:
        self._directory = directory
        self._report = report
        self._skip = skip
        self._catalog = Catalog(str(directory / PAYLOADS), GenerationConfig(), Disk(), writer=False)
        self._open: dict[int, Stopped] = {}
        self._ledgers: dict[tuple[int, int], dict[int, Ledger]] = {}
        self.homes: dict[int, list[Home]] = {}
        # (first, last) of what went with a generation before the last start, by group.
        self.lost: dict[int, list[tuple[int, int]]] = {}
        self.marks: dict[tuple[int, int, int], Marks] = {}
        present = (directory / PAYLOADS).is_dir()
        self.numbers = self._catalog.numbers() if present else []
        self.aside = self._catalog.set_aside_numbers() if present else []
        self._read_rows(facts)

    def path(self, number: int) -> str:
        """Return the path of a generation, relative to the data directory."""
        return os.path.relpath(self._catalog.path(number), self._directory)

    def data(self, number: int) -> str:
        """Return a generation's file."""
        return f"{self.path(number)}/data.mdb"

    def damaged(self, generation: Generation, text: str) -> tuple[str, str]:
        """Return the file of a generation that an error is about, and what it says of it."""
        for prefix, name in ((f"{generation.path}/{BODIES}: ", BODIES), (f"{generation.path}: ", "data.mdb")):
            if text.startswith(prefix):
                return f"{self.path(generation.number)}/{name}", text.removeprefix(prefix)
        return self.data(generation.number), text

    def _read_rows(self, facts: Facts) -> None:
        report = self._report
        for key, value in facts.store:
            before = len(report.findings)
            with report.guarded("payload_homes", path="meta", group=facts.name(int.from_bytes(key[-8:], "big"))):
                uid, homes, marks = checkpoints.decode(key, value)
                self.homes[uid] = [home for home in homes if home.generation != NOWHERE]
                self.lost[uid] = [(home.first, home.last) for home in homes if home.generation == NOWHERE]
                for generation, run, found in marks:
                    self.marks[generation, run, uid] = found
            if len(report.findings) > before:
                facts.miss()

    def get(self, number: int) -> Stopped | None:
        """Return an open generation; None when it is not there or can't be read."""
        return self._open.get(number)

    def reader(self, number: int) -> Stopped:
        """Return a generation, opened when it is first asked for. Raises `GenerationFailed`."""
        found = self._open.get(number)
        if found is None:
            found = Stopped(self._catalog.path(number), number, GenerationConfig())
            found.open_reader()
            self._open[number] = found
        return found

    def close(self) -> None:
        """Close all of them."""
        for generation in self._open.values():
            generation.close()

    def prepare(self) -> None:
        """Open every generation that is a home and load what it lists, without a scan; what can't be is damage."""
        report = self._report
        named = {(home.generation, home.run) for homes in self.homes.values() for home in homes}
        for number, run in sorted(named):
            with report.guarded("generation", path=self.data(number)):
                self._ledgers[number, run] = dict(self.reader(number).columns(run).ledgers())

    def verify(self, facts: Facts) -> None:
        """Open and scan every generation; compare ledgers, statistics and rows."""
        report = self._report
        named = {home.generation for homes in self.homes.values() for home in homes}
        for position, number in enumerate(self.numbers):
            report.progress("generations", position, len(self.numbers))
            if number not in named and number != self.numbers[-1]:
                report.orphan(self.path(number), "no group has its home here")
            if self.path(number) in self._skip:
                text = "reading it kills the process: a page is unreadable or nonsense"
                report.damage("generation", text, path=self.data(number))
                continue
            report.inside(self.path(number))
            try:
                self._scan(number, named, facts)
            finally:
                report.inside("")
        if not (self._directory / PAYLOADS).is_dir():
            return
        for name in sorted(os.listdir(self._directory / PAYLOADS)):
            if name.startswith("gen-") and name.endswith(".dead"):
                report.orphan(f"{PAYLOADS}/{name}", "it was dropped, and its space not yet given back")
            elif name.startswith("gen-") and name.endswith(HALF_MADE):
                report.orphan(f"{PAYLOADS}/{name}", "its creation did not finish")
            elif name.startswith("gen-") and not name[4:].isdecimal():
                report.warning("set_aside", "an earlier start set it aside", path=f"{PAYLOADS}/{name}")

    def _scan(self, number: int, named: set[int], facts: Facts) -> None:
        report, path = self._report, self.data(number)
        generation = Stopped(self._catalog.path(number), number, GenerationConfig())
        try:
            generation.open_reader()
            self._open[number] = generation
            measured = generation.measure()
            report.count("generations")
            for text in measured.damage:
                found = GROUP.search(text)
                group = facts.name(int(found[1], 16)) if found else ""
                where, text = self.damaged(generation, text)
                if UNFINISHED.search(text):
                    # Of an entry that the ledger has, `_compare` says so; else a job was cut off while it wrote it.
                    report.warning("unfinished", text, path=where, group=group)
                else:
                    report.damage("generation", text, path=where, group=group)
            self._compare(number, generation, measured, facts)
        except FormatNewer as error:
            raise WrongIdentity(str(error)) from None
        except GenerationUnfinished as error:
            if number in named:
                report.damage("generation", error.reason, path=path)
            else:
                report.orphan(self.path(number), error.reason)
        except (PayloadError, OSError, AssertionError, ValueError) as error:
            if lacks(error):
                raise
            report.damage("generation", f"{type(error).__name__}: {error}", path=path)

    def _compare(self, number: int, generation: Stopped, measured: Measured, facts: Facts) -> None:
        """Report what the ledgers list and is not there as rows."""
        report, path = self._report, self.data(number)
        runs = set(measured.runs)
        runs |= {home.run for homes in self.homes.values() for home in homes if home.generation == number}
        total = 0
        for run in sorted(runs):
            columns = generation.columns(run)
            total += columns.total
            self._ledgers[number, run] = dict(columns.ledgers())
            rows = measured.runs.get(run) or Columns()
            for uid, listed in columns.groups.items():
                there = set(zip(*rows.groups[uid], strict=True)) if uid in rows.groups else set()
                gone = {slot[0] for slot in zip(*listed, strict=True) if slot not in there}
                # Of what is damaged it was said already.
                lacking = sorted(index for index in gone if (run, uid, index) not in measured.bad)
                if lacking:
                    text = f"run {run} lists entries whose rows are gone: {some(list(map(str, lacking)))}"
                    report.damage("generation", text, path=path, group=facts.name(uid))
        statistics = generation.statistics()
        if statistics.total != total:
            text = f"its statistics say {statistics.total} bytes, its ledgers {total}"
            report.damage("counter", text, path=path)

    def ledger(self, number: int, run: int, uid: int) -> Ledger | None:
        """Return the sizes of one copy; None when there are none."""
        return self._ledgers.get((number, run), {}).get(uid)

"""`logyard bench run | compare`: the suite of `logyard.bench.suite` on clusters of real processes, and two of its runs
side by side. Registered by `service.cli.bench`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from logyard.bench.suite.table import OURS, PROFILES, RIVALS

from .output import Output, json_option

if TYPE_CHECKING:
    from logyard.bench.cluster import Cluster
    from logyard.bench.suite.figures import Row
    from logyard.bench.suite.run import Contender
    from logyard.bench.suite.samples import Samples
    from logyard.bench.suite.table import Case, Profile

REPORT = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@contextlib.contextmanager
def local_cluster(
    nodes: int, directory: Path, limits: Mapping[str, object] | None, environment: Mapping[str, str]
) -> Iterator[Cluster]:
    """Run nodes in a directory, as the suite asks for them."""
    from ..local_cluster import LocalCluster

    with LocalCluster(directory, nodes, limits=limits, environment=environment) as cluster:
        cluster.start()
        yield cluster


def our_system() -> Contender:
    """Return logyard itself as the suite runs it."""
    from logyard import __version__
    from logyard.bench.suite.ours import run_ours
    from logyard.bench.suite.run import Contender

    def run_one(case: Case, profile: Profile, directory: Path, processes: int) -> dict[str, Any]:
        return run_ours(case, profile, local_cluster, directory, lambda text: None, processes)

    return Contender(OURS, __version__, run_one)


def rivals_of(profile: Profile, against: str | None) -> list[str]:
    """Return who is measured beside us: those that were named, else the profile's."""
    if against is None:
        return list(profile.rivals)
    names = [name.strip() for name in against.split(",") if name.strip()]
    wrong = [name for name in names if name not in RIVALS]
    if wrong:
        raise click.BadParameter(f"{', '.join(wrong)}: one of {', '.join(RIVALS)}", param_hint="--against")
    return list(dict.fromkeys(names))


def narrowed(profile: Profile, cases: str | None) -> Profile:
    """Return the profile with the cases that were named alone."""
    from logyard.bench.suite.table import case_of

    if cases is None:
        return profile
    names = tuple(case_of(name.strip()).name for name in cases.split(",") if name.strip())
    if not names:
        raise click.BadParameter("name at least one case of the table", param_hint="--cases")
    return dataclasses.replace(profile, cases=names)


@click.command("run")
@click.argument("profile", type=click.Choice(list(PROFILES)))
@click.option("--against", metavar="LIST", help=f"Rivals, by commas: {', '.join(RIVALS)}. Empty: none.")
@click.option("--cases", metavar="LIST", help="Only these cases of the table, by commas.")
@click.option("--report", "directory", type=REPORT, help="Samples and report; goes on where it stopped.")
@click.option("--readme", type=FILE, help="Put one plot and one line into this file's marked place.")
@click.option("--volatile", is_flag=True, help="Allow a directory in memory (tmpfs).")
@json_option
def bench_run(
    profile: str,
    against: str | None,
    cases: str | None,
    directory: Path | None,
    readme: Path | None,
    volatile: bool,
    output: Output,
) -> None:
    """Measure many cases, beside rivals in alternating rounds: smoke 2 minutes, standard 20, large 2 hours,
    full 6 hours.

    A run that was broken off goes on with the same --report. A rival that is not installed is a row that says how
    to install it. Exit 1 if a case of ours gave no figure.

    \b
    Example:
      logyard bench run standard --against etcd,ra --report ./figures --json
    """
    from logyard.bench.calibrate import VOLATILE, filesystem_of
    from logyard.bench.peers.catalogue import contenders
    from logyard.bench.suite.run import run_suite
    from logyard.bench.suite.samples import Samples, plan
    from logyard.bench.suite.table import case_of

    if readme is not None:
        check_readme(readme)
    chosen = narrowed(PROFILES[profile], cases)
    systems = [our_system(), *contenders(rivals_of(chosen, against), chosen.shipped)]
    where = directory or Path(time.strftime(f"bench-{profile}-%Y%m%d-%H%M%S", time.gmtime()))
    kind = filesystem_of(where)
    if kind in VOLATILE and not volatile:
        raise click.BadParameter(f"{where} is in memory ({kind}): give another, or --volatile", param_hint="--report")
    samples = Samples(where)
    names = [system.name for system in systems]
    goes_on = samples.begin(chosen, names)
    output.say(f"going on with what {where} has" if goes_on else f"samples go to {where}, where --report goes on")
    total = len(plan([case_of(name) for name in chosen.cases], names, chosen.rounds, OURS))
    with output.progress("samples", total) as step:
        failed = run_suite(chosen, systems, samples, output.say, step)
    narrow = {"--cases": cases, "--against": against}
    words = " ".join([profile, *(f"{flag} {value}" for flag, value in narrow.items() if value is not None)])
    conclude(samples, words, [str(sample.case) for sample in failed if sample.system == OURS], readme, output)


def check_readme(readme: Path) -> None:
    """Raise a usage error for a file without a place for the plot, before hours are spent."""
    from logyard.bench.suite.page import BEGIN, END, with_block

    if with_block(readme.read_text(encoding="utf-8"), "", "") is None:
        raise click.BadParameter(f'{readme} has no lines "{BEGIN}" and "{END}"', param_hint="--readme")


def conclude(samples: Samples, words: str, failed: Sequence[str], readme: Path | None, output: Output) -> None:
    """Write the report, show the medians and the outcome. `words`: what was asked for."""
    from logyard.bench.suite import page
    from logyard.bench.suite.figures import rows

    raw = list(samples.all())
    found = rows(raw)
    place = samples.directory / "report.html"
    place.write_text(page.report(f"logyard bench run {words}", found, raw), encoding="utf-8")
    if readme is not None:
        docs = readme.parent / "docs"
        picture = (docs if docs.is_dir() else readme.parent) / "bench.svg"
        picture.write_text(page.svg("Measured beside others", page.for_readme(found)) + "\n", encoding="utf-8")
        where = picture.relative_to(readme.parent).as_posix()
        text = page.with_block(readme.read_text(encoding="utf-8"), where, page.honest_line(found, raw, words))
        assert text is not None, "looked at before the run"
        readme.write_text(text, encoding="utf-8")
    output.table(
        "bench run", ("case", "system", "median", "least - most", "p50 / p99 ms", "note"),
        [cells(row) for row in found],
    )  # fmt: skip
    output.result(
        {
            "ok": not failed,
            "report": str(place),
            "rows": [plain_row(row) for row in found],
            "failed": list(dict.fromkeys(failed)),
        },
        f"report: {place}",
    )


def cells(row: Row) -> tuple[str, ...]:
    """Return a row's cells for a human."""
    unit = f" {row.case.unit}" if row.rounds else ""
    times = [f"{row.beside[key]:.4g}" for key in ("p50_ms", "p99_ms") if key in row.beside]
    return (
        row.case.name, f"{row.system} {row.version}", f"{row.median:,.6g}{unit}" if row.rounds else "-",
        f"{row.low:,.6g} - {row.high:,.6g}" if row.rounds else "-", " / ".join(times),
        "; ".join([*row.failed, *row.notes]),
    )  # fmt: skip


def plain_row(row: Row) -> dict[str, Any]:
    """Return a row for --json."""
    return {**row._asdict(), "case": row.case.name, "figure": row.case.figure, "unit": row.case.unit}


@click.command("compare")
@click.argument("before", metavar="A", type=REPORT)
@click.argument("after", metavar="B", type=REPORT)
@click.option(
    "--tolerance", type=click.FloatRange(0.0, 1.0), default=0.2, show_default=True,
    help="Share of the median by which a case may be worse.",
)  # fmt: skip
@json_option
def bench_compare(before: Path, after: Path, tolerance: float, output: Output) -> None:
    """Compare two runs: B over A as a gain, from the medians of each case, with what their rounds' spread allows.

    Above 1 is better, whatever a case counts. Exit 1 if one is worse than the tolerance, a rival too: then it was the
    machine. Its speeds before the samples stand beside each case with --json, and it is said if it was another one.

    \b
    Example:
      logyard bench compare ./figures-monday ./figures-today --tolerance 0.3
    """
    from logyard.bench.suite.figures import compare, rows
    from logyard.bench.suite.samples import Samples
    from logyard.bench.suite.table import SuiteFailed

    kept = [Samples(place) for place in (before, after)]
    hosts = [samples.told()["host"] for samples in kept]
    runs = [rows(samples.all()) for samples in kept]
    changes, missing = compare(runs[0], runs[1], tolerance)
    for samples in kept:
        missing += [f"{name} in {samples.directory} is no case of this release" for name in samples.strangers()]
    if not changes:
        raise SuiteFailed(f"{before} and {after} have no case of a system in common")
    output.table(
        "bench compare", ("case", "system", "A", "B", "gain", "least - most", ""),
        [
            (
                one.case, one.system, f"{one.before.median:,.6g}", f"{one.after.median:,.6g} {one.after.case.unit}",
                f"{one.ratio:.3g}", f"{one.low:.3g} - {one.high:.3g}",
                "; ".join(["worse"] * one.worse + list(one.after.failed)),
            )
            for one in changes
        ],
    )  # fmt: skip
    if hosts[0] != hosts[1]:
        output.say(f"  A was made on {hosts[0]}, B on {hosts[1]}: no gain says what became of logyard")
    for said in missing:
        output.say(f"  {said}")
    worse = [f"{one.case} of {one.system}" for one in changes if one.worse]
    cases = [
        {**one._asdict(), "before": plain_row(one.before), "after": plain_row(one.after), "rounds": one.after.rounds}
        for one in changes
    ]
    output.result(
        {"ok": not worse, "tolerance": tolerance, "worse": worse, "missing": missing, "hosts": hosts, "cases": cases},
        f"worse: {', '.join(worse)}" if worse else f"nothing is worse by more than {tolerance:.0%}",
    )

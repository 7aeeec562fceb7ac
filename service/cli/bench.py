"""`logyard bench`: starts a cluster of its own in a directory, runs one case of `logyard.bench` on it, reports.

A directory in memory is refused without --volatile: its syncs cost nothing and its figures mean nothing. Registered by
`service.cli.root`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from logyard.bench.settings import (
    SPARK_CASES,
    AppendSettings,
    CatchupSettings,
    ChurnSettings,
    ClusterSettings,
    FailoverSettings,
    GroupsSettings,
    HugeSettings,
    IdleSettings,
    KvSettings,
    MixedSettings,
    QueueSettings,
    RecoverSettings,
    ReplaceSettings,
    ReplaySettings,
    SparkSettings,
    flag_of,
)

from .bench_suite import bench_compare, bench_run
from .output import Output, json_option

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def bench() -> None:
    """Measure: appends, idle logs, recovery, failover, replay, churn, and whole suites of them. Nodes and load are
    processes of their own.

    \b
    Example:
      logyard bench append --nodes 3 --logs 1 --size 256 --clients 5 --window 500 --seconds 10
    """


def options_of(kind: type[Any]) -> Callable[[F], F]:
    """Add an option for each field of a case's settings; the command receives them as one `settings`."""

    def add(command: F) -> F:
        @functools.wraps(command)
        def run(**given: Any) -> Any:
            told = {one.name: given.pop(one.name) * one.metadata["unit"] for one in dataclasses.fields(kind)}
            settings = kind(**told)
            return command(settings=settings, **given)

        for one in reversed(dataclasses.fields(kind)):
            said = one.metadata
            default = one.default // said["unit"] if said["unit"] > 1 else one.default
            add_option = click.option(
                flag_of(kind, one.name), one.name, type=_type_of(one), default=default, show_default=True,
                help=said["told"],
            )  # fmt: skip
            run = add_option(run)
        return run  # type: ignore[return-value]  # click calls it by keyword

    return add


def _type_of(one: dataclasses.Field[Any]) -> Any:
    least, most, among = (one.metadata[key] for key in ("least", "most", "among"))
    if among:
        return click.Choice(among)
    return click.IntRange(least, most) if isinstance(one.default, int) else click.FloatRange(least, most)


def cluster_directory(command: F) -> F:
    """Add --dir, --volatile and --json."""
    kind = click.Path(file_okay=False, path_type=Path)
    command = json_option(command)
    command = click.option("--volatile", is_flag=True, help="Allow a directory in memory (tmpfs).")(command)
    return click.option("--dir", "directory", type=kind, help="Keep nodes here (default: temporary).")(command)


def cluster_options(nodes: int | None) -> Callable[[F], F]:
    """Add --nodes, --dir, --volatile and --json. None: the cases say how many nodes."""

    def add(command: F) -> F:
        return click.option(
            "--nodes", type=click.IntRange(1, 9), default=nodes, show_default=nodes or "as the case needs",
            help="How many nodes.",
        )(cluster_directory(command))  # fmt: skip

    return add


@contextlib.contextmanager
def bench_cluster(
    nodes: int,
    directory: Path | None,
    volatile: bool,
    limits: Mapping[str, object] | None = None,
    catalog: bool = False,
) -> Iterator[tuple[Any, Path]]:
    """Run a cluster in a new or empty directory; yield both. Raises a usage error for one in memory."""
    from logyard.bench.calibrate import VOLATILE, filesystem_of

    from ..local_cluster import LocalCluster

    with contextlib.ExitStack() as stack:
        where = directory
        if where is None:
            where = Path(tempfile.mkdtemp(prefix="logyard-bench-"))
            stack.callback(shutil.rmtree, where, ignore_errors=True)
        where.mkdir(parents=True, exist_ok=True)
        kind = filesystem_of(where)
        if kind in VOLATILE and not volatile:
            raise click.BadParameter(f"{where} is in memory ({kind}): give another, or --volatile", param_hint="--dir")
        if any(where.iterdir()):
            raise click.BadParameter(f"{where} is not empty", param_hint="--dir")
        cluster = stack.enter_context(LocalCluster(where, nodes, limits=limits, catalog=catalog))
        cluster.start()
        yield cluster, where


def show(report: Mapping[str, Any], output: Output) -> None:
    """Show the report as a table, then the outcome."""
    rows = [(key, value) for key, value in report.items() if key not in ("machine", "problems")]
    output.table(f"bench {report['case']}", ("figure", "value"), rows)
    for problem in report.get("problems", []):
        output.say(f"  {problem}")
    output.result(report)


@bench.command("append")
@cluster_options(3)
@options_of(AppendSettings)
def bench_append(nodes: int, settings: AppendSettings, directory: Path | None, volatile: bool, output: Output) -> None:
    """Measure appends a second, with latency; a random 1 % is read back and compared.

    Bodies are distinct and incompressible. An append counts when a quorum has it on disk.

    \b
    Example:
      logyard bench append --nodes 3 --logs 1 --size 256 --clients 64 --seconds 10 --json
    """
    from logyard.bench.cases.append import run_append

    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_append(settings, cluster, where, output.say)
    show(report, output)


@bench.command("kv")
@cluster_options(3)
@options_of(KvSettings)
def bench_kv(nodes: int, settings: KvSettings, directory: Path | None, volatile: bool, output: Output) -> None:
    """Measure puts, linearizable gets, or events of a watched key a second, with latency; what is acknowledged is
    compared.

    \b
    Example:
      logyard bench kv --mode get --size 65536 --json
    """
    from logyard.bench.cases.kv import run_kv

    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_kv(settings, cluster, where, output.say)
    show(report, output)


@bench.command("queue")
@cluster_options(1)
@options_of(QueueSettings)
def bench_queue(nodes: int, settings: QueueSettings, directory: Path | None, volatile: bool, output: Output) -> None:
    """Measure messages published and confirmed a second, consumed and acknowledged meanwhile; all are counted in the
    end.

    \b
    Example:
      logyard bench queue --nodes 1 --size 256 --json
    """
    from logyard.bench.cases.queue import run_queue

    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_queue(settings, cluster, where, output.say)
    show(report, output)


@bench.command("groups")
@cluster_options(3)
@options_of(GroupsSettings)
def bench_groups(nodes: int, settings: GroupsSettings, directory: Path | None, volatile: bool, output: Output) -> None:
    """Measure records that a consumer group reads and commits a second, and how old they are at a tenth of that; all
    are counted.

    \b
    Example:
      logyard bench groups --nodes 3 --partitions 12 --members 4 --json
    """
    from logyard.bench.cases.groups import run_groups

    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_groups(settings, cluster, where, output.say)
    show(report, output)


@bench.command("cluster")
@cluster_options(4)
@options_of(ClusterSettings)
def bench_of_cluster(
    nodes: int, settings: ClusterSettings, directory: Path | None, volatile: bool, output: Output
) -> None:  # fmt: skip
    """Measure the catalogue of a cluster with many logs: logs created a second, look-ups, what a snapshot writes after
    a small change, a restart, and the memory of a node that only learns.

    \b
    Example:
      logyard bench cluster --logs 100000 --json
    """
    from logyard.bench.cases.cluster import limits_of, run_cluster

    if nodes < 4:
        raise click.BadParameter(
            "the fourth node is the first that only learns: take four or more", param_hint="--nodes"
        )
    with bench_cluster(nodes, directory, volatile, limits_of(settings), catalog=True) as (cluster, where):
        report = run_cluster(settings, cluster, where, output.say)
    show(report, output)


@bench.command("replace")
@cluster_options(4)
@options_of(ReplaceSettings)
def bench_replace(
    nodes: int, settings: ReplaceSettings, directory: Path | None, volatile: bool, output: Output
) -> None:  # fmt: skip
    """Measure how long it takes to replace the members of a node that is killed for good, and what clients notice of
    it.

    \b
    Example:
      logyard bench replace --logs 10000 --json
    """
    from logyard.bench.cases.replace import limits_of, run_replace

    if nodes < 4:
        raise click.BadParameter("the fourth node takes the members: take four or more", param_hint="--nodes")
    with bench_cluster(nodes, directory, volatile, limits_of(settings), catalog=True) as (cluster, where):
        report = run_replace(settings, cluster, where, output.say)
    show(report, output)


@bench.command("idle")
@cluster_options(3)
@options_of(IdleSettings)
def bench_idle(nodes: int, settings: IdleSettings, directory: Path | None, volatile: bool, output: Output) -> None:
    """Measure what a log costs that nobody uses: bytes a log and node, processor time, and a clean restart with all of
    them.

    \b
    Example:
      logyard bench idle --nodes 3 --logs 10000 --seconds 10 --json
    """
    from logyard.bench.cases.idle import run_idle

    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_idle(settings, cluster, where, output.say)
    show(report, output)


@bench.command("huge")
@cluster_options(1)
@options_of(HugeSettings)
def bench_huge(nodes: int, settings: HugeSettings, directory: Path | None, volatile: bool, output: Output) -> None:
    """Measure many logs on few nodes, created in batches: logs a second, bytes of each asleep, a restart, the first
    append to one, and a load over some of them beside the same without the others.

    \b
    Example:
      logyard bench huge --logs 100000 --nodes 3 --json
    """
    from logyard.bench.cases.huge import limits_of, run_alone, run_huge

    limits = limits_of(settings)
    with bench_cluster(nodes, None, volatile, limits) as (cluster, where):
        alone = run_alone(settings, cluster, where, output.say)
    with bench_cluster(nodes, directory, volatile, limits) as (cluster, where):
        report = run_huge(settings, cluster, where, alone, output.say)
    show(report, output)


@bench.command("recover")
@cluster_options(1)
@options_of(RecoverSettings)
def bench_recover(
    nodes: int, settings: RecoverSettings, directory: Path | None, volatile: bool, output: Output
) -> None:
    """Measure the seconds from the start of killed nodes until every log is led and applied everywhere.

    \b
    Example:
      logyard bench recover --nodes 1 --logs 10000 --entries 20 --size 256 --json
    """
    from logyard.bench.cases.recover import run_recover

    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_recover(settings, cluster, where, output.say)
    show(report, output)


@bench.command("failover")
@cluster_options(3)
@options_of(FailoverSettings)
def bench_failover(
    nodes: int, settings: FailoverSettings, directory: Path | None, volatile: bool, output: Output
) -> None:
    """Measure the seconds from kill -9 of the node that leads every log until each has acknowledged a write again; of
    one that leads a share of very many, until all have a leader again, and how long appends wait meanwhile.

    \b
    Examples:
      logyard bench failover --logs 1000 --json
      logyard bench failover --logs 100000 --leaders spread --json
    """
    from logyard.bench.cases.failover import run_failover
    from logyard.bench.cases.failover_spread import run_failover_spread

    if nodes < 3:
        raise click.BadParameter("two nodes have no quorum after a kill: take three or more", param_hint="--nodes")
    run, limits = run_failover, None
    if settings.leaders == "spread":
        run, limits = run_failover_spread, {
            "groups_max": max(100_000, 2 * settings.logs), "hibernate_after_ms": 0,
        }  # fmt: skip
    with bench_cluster(nodes, directory, volatile, limits) as (cluster, where):
        report = run(settings, cluster, where, output.say)
    show(report, output)


@bench.command("mixed")
@cluster_options(3)
@options_of(MixedSettings)
def bench_mixed(nodes: int, settings: MixedSettings, directory: Path | None, volatile: bool, output: Output) -> None:
    """Measure the p99 of small appends alone, and beside one large append that travels in pieces.

    \b
    Example:
      logyard bench mixed --logs 100 --upload-mib 1024 --json
    """
    from logyard.bench.cases.mixed import run_mixed

    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_mixed(settings, cluster, where, output.say)
    show(report, output)


@bench.command("replay")
@options_of(ReplaySettings)
@cluster_directory
def bench_replay(settings: ReplaySettings, directory: Path | None, volatile: bool, output: Output) -> None:
    """Measure the microseconds of processor an entry to apply and to replay: neither depends on the payload's size.

    \b
    Example:
      logyard bench replay --size 1048576 --json
    """
    from logyard.bench.cases.replay import limits_of, run_replay

    try:
        limits = limits_of(settings)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--entries") from None
    with (
        bench_cluster(1, directory, volatile, limits) as (cluster, where),
        output.progress("entries", settings.entries) as step,
    ):
        report = run_replay(settings, cluster, where, output.say, step)
    show(report, output)


@bench.command("churn")
@cluster_options(3)
@options_of(ChurnSettings)
def bench_churn(nodes: int, settings: ChurnSettings, directory: Path | None, volatile: bool, output: Output) -> None:
    """Measure how often a payload byte is written, and how much disk one that lives takes.

    Payloads die young, before their WAL file is given up, or live on and are migrated; then half of them die.

    \b
    Example:
      logyard bench churn --mode old --mib 1024 --json
    """
    from logyard.bench.cases.churn import limits_of, run_churn

    with (
        bench_cluster(nodes, directory, volatile, limits_of(settings)) as (cluster, where),
        output.progress("records", settings.records) as step,
    ):
        report = run_churn(settings, cluster, where, output.say, step)
    show(report, output)


@bench.command("catchup")
@cluster_options(3)
@options_of(CatchupSettings)
def bench_catchup(
    nodes: int, settings: CatchupSettings, directory: Path | None, volatile: bool, output: Output
) -> None:
    """Measure the seconds in which a member that lost its directory has everything again.

    \b
    Example:
      logyard bench catchup --logs 100 --mib 256 --json
    """
    from logyard.bench.cases.catchup import run_catchup

    if nodes < 3:
        raise click.BadParameter("two nodes have no quorum after a loss: take three or more", param_hint="--nodes")
    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_catchup(settings, cluster, where, output.say)
    show(report, output)


@bench.command("spark")
@cluster_options(None)
@options_of(SparkSettings)
@click.option("--master", default="local[2]", show_default=True, help="Spark's master.")
@click.option("--case", "cases", multiple=True, type=click.Choice(SPARK_CASES), help="This alone; may be repeated.")
def bench_spark(
    nodes: int | None, settings: SparkSettings, master: str, cases: Sequence[str], directory: Path | None,
    volatile: bool, output: Output,
) -> None:  # fmt: skip
    """Measure the format logyard on Spark, beside a source and a sink that cost nothing: reads, streams, sinks, tables,
    memory.

    \b
    Example:
      logyard bench spark --case live --case idle --json
    """
    from logyard.bench.cases.spark import counts_of, report_of, run_spark

    from .spark import session

    results = []
    with session(master, "2g", output) as spark:
        for count, some in counts_of(cases or SPARK_CASES, nodes):
            place = directory and directory / f"{count}-nodes"
            with bench_cluster(count, place, volatile) as (cluster, where):
                results += run_spark(settings, some, cluster, where, spark, output.say)
                report = report_of(settings, results, where)
    for one in results:
        rows = [(key, value) for key, value in one.items() if key not in ("case", "problems")]
        output.table(f"bench spark: {one['case']}", ("figure", "value"), rows)
    for problem in report["problems"]:
        output.say(f"  {problem}")
    output.result(report)


bench.add_command(bench_run)
bench.add_command(bench_compare)


def commands() -> list[click.Command]:
    """Return the verbs of this module."""
    return [bench]

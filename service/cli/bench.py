"""`logyard bench`: starts a cluster of its own in a directory, runs one case of `logyard.bench` on it, reports.

A directory in memory is refused without --volatile: its syncs cost nothing and its figures mean nothing. Registered by
`service.cli.root`.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from .output import Output, json_option

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def bench() -> None:
    """Measure: appends, idle logs, recovery, failover, replay, churn. Nodes and load are processes of their own.

    \b
    Example:
      logyard bench append --nodes 3 --logs 1 --size 256 --clients 5 --window 500 --seconds 10
    """


def cluster_directory(command: F) -> F:
    """Adds --dir, --volatile and --json."""
    kind = click.Path(file_okay=False, path_type=Path)
    command = json_option(command)
    command = click.option("--volatile", is_flag=True, help="Allow a directory in memory (tmpfs).")(command)
    return click.option("--dir", "directory", type=kind, help="Keep nodes here (default: temporary).")(command)


def cluster_options(nodes: int) -> Callable[[F], F]:
    """Adds --nodes, --dir, --volatile and --json."""

    def add(command: F) -> F:
        return click.option(
            "--nodes", type=click.IntRange(1, 9), default=nodes, show_default=True, help="How many nodes."
        )(cluster_directory(command))

    return add


@contextlib.contextmanager
def bench_cluster(
    nodes: int, directory: Path | None, volatile: bool, limits: Mapping[str, object] | None = None
) -> Iterator[tuple[Any, Path]]:
    """A running cluster in a new or empty directory, and the directory. Raises a usage error for one in memory."""
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
        cluster = stack.enter_context(LocalCluster(where, nodes, limits=limits))
        cluster.start()
        yield cluster, where


def show(report: Mapping[str, Any], output: Output) -> None:
    """The report as a table, then the outcome."""
    rows = [(key, value) for key, value in report.items() if key not in ("machine", "problems")]
    output.table(f"bench {report['case']}", ("figure", "value"), rows)
    for problem in report.get("problems", []):
        output.say(f"  {problem}")
    output.result(report)


@bench.command("append")
@cluster_options(3)
@click.option("--logs", type=click.IntRange(min=1), default=1, show_default=True, help="Over how many logs.")
@click.option("--size", type=click.IntRange(min=16), default=256, show_default=True, help="Bytes of a body.")
@click.option("--clients", type=click.IntRange(min=1), default=64, show_default=True, help="How many clients.")
@click.option("--window", type=click.IntRange(min=1), default=1, show_default=True, help="Calls outstanding a client.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="Measured time.")
@click.option("--warmup", type=click.FloatRange(min=0.0), default=2.0, show_default=True, help="Seconds before that.")
@click.option("--processes", type=click.IntRange(1, 2), default=1, show_default=True, help="Load processes.")
def bench_append(
    nodes: int,
    logs: int,
    size: int,
    clients: int,
    window: int,
    seconds: float,
    warmup: float,
    processes: int,
    directory: Path | None,
    volatile: bool,
    output: Output,
) -> None:
    """Appends a second, with latency; a random 1 % is read back and compared.

    Bodies are distinct and incompressible. An append counts when a quorum has it on disk.

    \b
    Example:
      logyard bench append --nodes 3 --logs 1 --size 256 --clients 64 --seconds 10 --json
    """
    from logyard.bench.cases.append import AppendSettings, run_append

    settings = AppendSettings(logs, size, clients, window, seconds, warmup, processes)
    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_append(settings, cluster, where, output.say)
    show(report, output)


@bench.command("kv")
@cluster_options(3)
@click.option("--mode", type=click.Choice(["put", "get", "watch"]), default="put", show_default=True, help="What.")
@click.option("--size", type=click.IntRange(min=16), default=256, show_default=True, help="Bytes of a value.")
@click.option("--clients", type=click.IntRange(min=1), default=64, show_default=True, help="How many clients.")
@click.option("--keys", type=click.IntRange(min=1), default=100, show_default=True, help="Keys of each client.")
@click.option("--watchers", type=click.IntRange(min=1), default=1000, show_default=True, help="Who watches one key.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="Measured time.")
@click.option("--warmup", type=click.FloatRange(min=0.0), default=2.0, show_default=True, help="Seconds before that.")
@click.option("--processes", type=click.IntRange(1, 2), default=1, show_default=True, help="Load processes.")
def bench_kv(
    nodes: int,
    mode: str,
    size: int,
    clients: int,
    keys: int,
    watchers: int,
    seconds: float,
    warmup: float,
    processes: int,
    directory: Path | None,
    volatile: bool,
    output: Output,
) -> None:
    """Puts, linearizable gets, or events of a watched key a second, with latency; what is acknowledged is compared.

    \b
    Example:
      logyard bench kv --mode get --size 65536 --json
    """
    from logyard.bench.cases.kv import KvSettings, run_kv

    settings = KvSettings(mode, size, clients, keys, watchers, seconds, warmup, processes)
    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_kv(settings, cluster, where, output.say)
    show(report, output)


@bench.command("queue")
@cluster_options(1)
@click.option("--queues", type=click.IntRange(min=1), default=1, show_default=True, help="Over how many queues.")
@click.option("--size", type=click.IntRange(min=16), default=256, show_default=True, help="Bytes of a body.")
@click.option("--publishers", type=click.IntRange(min=1), default=4, show_default=True, help="How many publishers.")
@click.option("--window", type=click.IntRange(min=1), default=256, show_default=True, help="Unconfirmed, a publisher.")
@click.option("--consumers", type=click.IntRange(min=0), default=1, show_default=True, help="How many; 0: none.")
@click.option("--prefetch", type=click.IntRange(1, 65_535), default=1000, show_default=True, help="Held, a consumer.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="Measured time.")
@click.option("--warmup", type=click.FloatRange(min=0.0), default=2.0, show_default=True, help="Seconds before that.")
def bench_queue(
    nodes: int,
    queues: int,
    size: int,
    publishers: int,
    window: int,
    consumers: int,
    prefetch: int,
    seconds: float,
    warmup: float,
    directory: Path | None,
    volatile: bool,
    output: Output,
) -> None:
    """Messages published and confirmed a second, consumed and acknowledged meanwhile; all are counted in the end.

    \b
    Example:
      logyard bench queue --nodes 1 --size 256 --json
    """
    from logyard.bench.cases.queue import QueueSettings, run_queue

    settings = QueueSettings(queues, size, publishers, window, consumers, prefetch, seconds, warmup)
    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_queue(settings, cluster, where, output.say)
    show(report, output)


@bench.command("idle")
@cluster_options(3)
@click.option("--logs", type=click.IntRange(min=1), default=10_000, show_default=True, help="How many logs.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="Measured time.")
@click.option("--settle", type=click.FloatRange(min=0.0), default=5.0, show_default=True, help="Seconds before that.")
def bench_idle(
    nodes: int, logs: int, seconds: float, settle: float, directory: Path | None, volatile: bool, output: Output
) -> None:
    """What a log costs that nobody uses: bytes a log and node, processor time, and a clean restart with all of them.

    \b
    Example:
      logyard bench idle --nodes 3 --logs 10000 --seconds 10 --json
    """
    from logyard.bench.cases.idle import IdleSettings, run_idle

    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_idle(IdleSettings(logs, seconds, settle), cluster, where, output.say)
    show(report, output)


@bench.command("recover")
@cluster_options(1)
@click.option("--logs", type=click.IntRange(min=1), default=1000, show_default=True, help="How many logs.")
@click.option("--entries", type=click.IntRange(min=1), default=20, show_default=True, help="Entries in each.")
@click.option("--size", type=click.IntRange(min=16), default=256, show_default=True, help="Bytes of a body.")
def bench_recover(
    nodes: int, logs: int, entries: int, size: int, directory: Path | None, volatile: bool, output: Output
) -> None:
    """Seconds from the start of killed nodes until every log is led and applied everywhere.

    \b
    Example:
      logyard bench recover --nodes 1 --logs 10000 --entries 20 --size 256 --json
    """
    from logyard.bench.cases.recover import RecoverSettings, run_recover

    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_recover(RecoverSettings(logs, entries, size), cluster, where, output.say)
    show(report, output)


@bench.command("failover")
@cluster_options(3)
@click.option("--logs", type=click.IntRange(min=1), default=1000, show_default=True, help="How many logs.")
@click.option("--size", type=click.IntRange(min=16), default=256, show_default=True, help="Bytes of a body.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.01),
    default=0.5,
    show_default=True,
    help="Seconds between a log's writes.",
)
@click.option(
    "--steady", type=click.FloatRange(min=0.0), default=2.0, show_default=True, help="Seconds before the kill."
)
def bench_failover(
    nodes: int,
    logs: int,
    size: int,
    interval: float,
    steady: float,
    directory: Path | None,
    volatile: bool,
    output: Output,
) -> None:
    """Seconds from kill -9 of the node that leads every log until each has acknowledged a write again.

    \b
    Example:
      logyard bench failover --logs 1000 --json
    """
    from logyard.bench.cases.failover import FailoverSettings, run_failover

    if nodes < 3:
        raise click.BadParameter("two nodes have no quorum after a kill: take three or more", param_hint="--nodes")
    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_failover(FailoverSettings(logs, size, interval, steady), cluster, where, output.say)
    show(report, output)


@bench.command("mixed")
@cluster_options(3)
@click.option("--logs", type=click.IntRange(min=1), default=100, show_default=True, help="How many small logs.")
@click.option("--size", type=click.IntRange(min=16), default=256, show_default=True, help="Bytes of a small body.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="Seconds alone.")
@click.option("--warmup", type=click.FloatRange(min=0.0), default=2.0, show_default=True, help="Seconds before that.")
@click.option("--upload-mib", type=click.IntRange(1, 4096), default=1024, show_default=True, help="MiB to upload.")
def bench_mixed(
    nodes: int,
    logs: int,
    size: int,
    seconds: float,
    warmup: float,
    upload_mib: int,
    directory: Path | None,
    volatile: bool,
    output: Output,
) -> None:
    """The p99 of small appends alone, and beside one large append that travels in pieces.

    \b
    Example:
      logyard bench mixed --logs 100 --upload-mib 1024 --json
    """
    from logyard.bench.cases.mixed import MixedSettings, run_mixed

    settings = MixedSettings(logs, size, seconds, warmup, upload_mib << 20)
    with bench_cluster(nodes, directory, volatile) as (cluster, where):
        report = run_mixed(settings, cluster, where, output.say)
    show(report, output)


@bench.command("replay")
@click.option("--size", type=click.IntRange(min=16), default=1024, show_default=True, help="Bytes of a payload.")
@click.option("--entries", type=click.IntRange(min=1), default=1000, show_default=True, help="How many entries.")
@cluster_directory
def bench_replay(size: int, entries: int, directory: Path | None, volatile: bool, output: Output) -> None:
    """Microseconds of processor an entry to apply and to replay: neither depends on the payload's size.

    \b
    Example:
      logyard bench replay --size 1048576 --json
    """
    from logyard.bench.cases.replay import ReplaySettings, limits_of, run_replay

    settings = ReplaySettings(size, entries)
    try:
        limits = limits_of(settings)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--entries") from None
    with bench_cluster(1, directory, volatile, limits) as (cluster, where), output.progress("entries", entries) as step:
        report = run_replay(settings, cluster, where, output.say, step)
    show(report, output)


@bench.command("churn")
@cluster_options(3)
@click.option("--mode", type=click.Choice(["young", "old"]), default="young", show_default=True, help="When they die.")
@click.option("--size", type=click.IntRange(4096, 1 << 20), default=65_536, show_default=True, help="Bytes a payload.")
@click.option("--mib", type=click.IntRange(min=8), default=512, show_default=True, help="MiB of payload to append.")
@click.option("--settle", type=click.FloatRange(min=0.1), default=3.0, show_default=True, help="Seconds of quiet.")
def bench_churn(
    nodes: int,
    mode: str,
    size: int,
    mib: int,
    settle: float,
    directory: Path | None,
    volatile: bool,
    output: Output,
) -> None:
    """How often a payload byte is written, and how much disk one that lives takes.

    Payloads die young, before their WAL file is given up, or live on and are migrated; then half of them die.

    \b
    Example:
      logyard bench churn --mode old --mib 1024 --json
    """
    from logyard.bench.cases.churn import ChurnSettings, limits_of, run_churn

    settings = ChurnSettings(mode, size, mib << 20, settle)
    with (
        bench_cluster(nodes, directory, volatile, limits_of(settings)) as (cluster, where),
        output.progress("records", settings.records) as step,
    ):
        report = run_churn(settings, cluster, where, output.say, step)
    show(report, output)


@bench.command("spark")
@cluster_options(1)
@click.option("--logs", type=click.IntRange(min=1), default=1000, show_default=True, help="Logs of small records.")
@click.option("--rows", type=click.IntRange(min=1), default=2000, show_default=True, help="Records in each.")
@click.option("--mib", type=click.IntRange(min=16), default=512, show_default=True, help="MiB of 64 KiB payloads.")
@click.option("--planned", type=click.IntRange(min=1), default=10_000, show_default=True, help="Logs to plan over.")
@click.option("--master", default="local[2]", show_default=True, help="Spark's master.")
def bench_spark(
    nodes: int,
    logs: int,
    rows: int,
    mib: int,
    planned: int,
    master: str,
    directory: Path | None,
    volatile: bool,
    output: Output,
) -> None:
    """The format logyard on Spark: rows and payload bytes a second beside PySpark's own, planning, the audit's memory.

    \b
    Example:
      logyard bench spark --json
    """
    from logyard.bench.cases.spark import SparkSettings, run_spark

    from .spark import session

    with bench_cluster(nodes, directory, volatile) as (cluster, where), session(master, "2g", output) as spark:
        report = run_spark(SparkSettings(logs, rows, mib, planned), cluster, where, spark, output.say)
    show(report, output)


def commands() -> list[click.Command]:
    """The verbs of this module."""
    return [bench]

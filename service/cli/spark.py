"""The verbs of the pipeline: export, import and audit of logs on Spark, tables of their records, and the demo.

`--master` chooses where tasks run: on this machine, or on a cluster whose executors have logyard installed. Registered
by `service.cli.root`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from .logs import members_option, servers_option, tls_config
from .output import Output, bytes_text, json_option

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

F = TypeVar("F", bound=Callable[..., Any])
DIRECTORY = click.Path(file_okay=False, path_type=Path)
SHOWN = 20


@click.group()
def spark() -> None:
    """Run jobs on Spark (PySpark): export logs to Parquet, import them, audit every copy, write their records to
    tables. Needs the extra `spark` and Java.

    \b
    Example:
      logyard spark export ./export --logs 'orders-.*'
    """


def session_options(command: F) -> F:
    """Add --master and --memory."""
    command = click.option("--memory", default="2g", show_default=True, help="Memory of the driver's JVM.")(command)
    return click.option("--master", default="local[2]", show_default=True, help="Spark's master.")(command)


def source_options(command: F) -> F:
    """Add --logs, --path and the options that say where the cluster is."""
    command = click.option(
        "--logs", "pattern", default=".*", show_default=True, help="A regular expression that whole names match."
    )(command)
    command = click.option(
        "--path", type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Read stopped nodes' directories instead: of one node, or of a local cluster.",
    )(command)  # fmt: skip
    return servers_option(command)


@contextlib.contextmanager
def session(master: str, memory: str, output: Output) -> Iterator[SparkSession]:
    """Run a Spark session that ends with the command."""
    from logyard.pipeline import local_session

    output.say(f"starting Spark ({master})")
    found = local_session("logyard", master=master, memory=memory)
    try:
        yield found
    finally:
        found.stop()


def source_of(servers: list[str], path: Path | None, pattern: str) -> dict[str, str]:
    """Return the data source's options for the running command's."""
    if path is not None:
        return {"path": str(path.absolute()), "subscribePattern": pattern}
    return {**cluster_of(servers), "subscribePattern": pattern}


def cluster_of(servers: list[str]) -> dict[str, str]:
    """Return where the cluster is, as options of the data source."""
    found = {"servers": ",".join(servers)}
    tls = tls_config()
    if tls is not None:
        found |= {"tlsCa": str(tls.ca), "tlsCertificate": str(tls.certificate), "tlsKey": str(tls.key)}
    return found


@contextlib.contextmanager
def counted(output: Output, what: str) -> Iterator[Callable[[int], None]]:
    """Show progress on a terminal: how many so far."""
    console = output.console
    if not console.is_terminal:
        yield lambda more: None
        return
    done = 0
    with console.status(what) as status:

        def advance(more: int) -> None:
            nonlocal done
            done += more
            status.update(f"{what}: {done:,}")

        yield advance


def seconds(_context: click.Context, _parameter: click.Parameter, value: str) -> float:
    """Return the seconds that `10s`, `500ms` or `5m` are."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is no time like 10s, 500ms or 5m")
    return float(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[found[2]]


@spark.command("export")
@click.argument("out", metavar="DIR", type=DIRECTORY)
@click.option(
    "--payloads", type=click.Choice(["column", "files", "none"]), default="column", show_default=True,
    help="Where payloads go: a column, a file each, or nowhere.",
)  # fmt: skip
@source_options
@session_options
@json_option
def export_logs(
    out: Path, payloads: str, servers: list[str], path: Path | None, pattern: str, master: str, memory: str,
    output: Output,
) -> None:  # fmt: skip
    """Export logs to Parquet in DIR, a directory a log; every payload is checked against its hash on the way.

    An export that was stopped goes on where it was when it is run again with the same options. DIR/manifest.jsonl comes
    last and proves that everything is there.

    \b
    Example:
      logyard spark export ./export --logs 'orders-.*' --payloads files
    """
    from logyard.pipeline.jobs.export import Export, run_export

    job = Export(source_of(servers, path, pattern), out.absolute(), payloads)
    with session(master, memory, output) as found, counted(output, "records exported") as advance:
        fields = run_export(found, job, advance)
    text = (
        f"{fields['logs']} logs, {fields['rows']:,} records, {bytes_text(fields['payload_bytes'])} of payload in "
        f"{fields['parts']} files ({fields['parts_skipped']} were there): {out}"
    )
    output.result(fields, text)


@spark.command("import")
@click.argument("source", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--members", callback=members_option, help="Nodes that hold new logs, as 1,2,3 (default: all).")
@click.option("--only", multiple=True, metavar="LOG", help="Only this log; may be given several times.")
@servers_option
@session_options
@json_option
def import_logs(
    source: Path, members: list[int] | None, only: tuple[str, ...], servers: list[str], master: str, memory: str,
    output: Output,
) -> None:  # fmt: skip
    """Import an export into a cluster, with the same logs and offsets.

    What is there already is compared, what is missing is appended: run again, it changes nothing. Exit code 1 if a log
    differs from the export.

    \b
    Example:
      logyard spark import ./export --servers 127.0.0.1:7001
    """
    from logyard.pipeline.jobs.importing import Import, run_import

    job = Import(source.absolute(), cluster_of(servers), tuple(members) if members else None, only or None)
    with session(master, memory, output) as found, counted(output, "records imported") as advance:
        fields = run_import(found, job, advance)
    for failure in fields["failures"][:SHOWN]:
        output.say(f"  {failure}")
    text = f"{fields['logs']} logs: {fields['appended']:,} records appended, {fields['compared']:,} were there"
    output.result(fields, text)


@spark.command("audit")
@click.option("--rows", type=click.Path(dir_okay=False, path_type=Path), help="Write a JSON line for each copy here.")
@source_options
@session_options
@json_option
def audit_logs(
    rows: Path | None, servers: list[str], path: Path | None, pattern: str, master: str, memory: str, output: Output
) -> None:
    """Check every live payload of every member's own copy against its hash, and copies against one another.

    Exit code 1 if anything is missing, damaged or in disagreement, or if a member can't be asked.

    \b
    Example:
      logyard spark audit --path ./yard --json
    """
    from logyard.pipeline.jobs.audit import run_audit

    with contextlib.ExitStack() as stack:
        file: IO[str] | None = stack.enter_context(open(rows, "w", encoding="utf-8")) if rows is not None else None

        def write(row: dict[str, Any]) -> None:
            if file is not None:
                file.write(json.dumps(row) + "\n")

        found = stack.enter_context(session(master, memory, output))
        advance = stack.enter_context(counted(output, "copies audited"))
        fields = run_audit(found, source_of(servers, path, pattern), advance, write)
    show_audit(fields, output)
    output.result(fields, "everything is sound" if fields["ok"] else None)


def show_audit(fields: dict[str, Any], output: Output) -> None:
    """Show by node the copies that take most space for what lives, and what is wrong."""
    columns = ("node", "copies", "units", "live", "dead", "amplification", "missing", "corrupt")
    output.table("audit", columns, [
        (node, one["copies"], one["units"], bytes_text(one["bytes"]), bytes_text(one["dead"]), one["amplification"],
         one["missing"], one["corrupt"])
        for node, one in fields["nodes"].items()
    ])  # fmt: skip
    worst = [(one["log"], one["node"], one["amplification"], bytes_text(one["dead"])) for one in fields["worst"]]
    output.table("most space for what lives", ("log", "node", "amplification", "dead"), worst[:5])
    for problem in fields["problems"][:SHOWN]:
        output.say(f"  {problem}")
    if fields["problem_count"] > SHOWN:
        output.say(f"  ... and {fields['problem_count'] - SHOWN} more")
    for warning in fields["warnings"][:SHOWN]:
        output.say(f"  warning: {warning}")
    if fields["warning_count"] > SHOWN:
        output.say(f"  ... and {fields['warning_count'] - SHOWN} more warnings")


@spark.command("tables")
@click.argument("name", metavar="TABLE")
@click.option("--out", type=DIRECTORY, required=True, help="Where the tables lie: DIR/TABLE and DIR/TABLE__rejected.")
@click.option("--logs", "pattern", default=".*", show_default=True, help="A regular expression that whole names match.")
@click.option("--kv", default="tables", show_default=True, help="The KV group that describes the table.")
@click.option("--prefix", default="", help="What its keys there begin with (default: tables/TABLE/).")
@click.option("--sink-id", default="", help="By what the tables know what was written (default: the table's name).")
@click.option(
    "--format",
    "form",
    type=click.Choice(["delta", "parquet"]),
    default="delta",
    show_default=True,
    help="Delta, or Spark's own Parquet files.",
)
@click.option("--once", is_flag=True, help="What is there now, and no more.")
@click.option("--every", callback=seconds, default="10s", show_default=True, help="From batch to batch.")
@click.option("--max-records", type=click.IntRange(1), help="Records of a batch, at most.")
@click.option("--compact", is_flag=True, help="Merge the files of each hour when it is an hour old.")
@click.option("--reset", is_flag=True, help="Go on in tables of a query whose checkpoint is gone.")
@click.option("--strict", is_flag=True, help="Exit code 1 if a record was rejected.")
@servers_option
@session_options
@json_option
def write_tables(
    name: str, out: Path, pattern: str, kv: str, prefix: str, sink_id: str, form: str, once: bool, every: float,
    max_records: int | None, compact: bool, reset: bool, strict: bool, servers: list[str], master: str, memory: str,
    output: Output,
) -> None:  # fmt: skip
    """Write the JSON records of logs to a Delta table by dimensions and hour, and what does not fit to TABLE__rejected.

    Fields, dimensions and time are keys of a KV group. Each record is in one of the two tables, once, however often
    this is killed and run again.

    \b
    Example:
      logyard kv put tables tables/orders/dimensions '["shop"]'
      logyard spark tables orders --out ./tables --logs 'orders-.*' --once
    """
    from logyard.pipeline.jobs.tables import Tables, run_tables

    given = source_of(servers, None, pattern)
    if max_records is not None:
        given["maxOffsetsPerTrigger"] = str(max_records)
    job = Tables(
        given, name, out.absolute(), kv, prefix, sink_id, None if once else every, compact, reset, form == "parquet"
    )  # fmt: skip
    with session(master, memory, output) as found, counted(output, "records written") as advance:
        fields = run_tables(found, job, advance)
    good = fields["rows_rejected"] == 0 or not strict
    text = (
        f"{fields['rows_read']:,} records in {fields['batches']} batches: {fields['rows_written']:,} rows in "
        f"{fields['table']}, {fields['rows_rejected']:,} in {fields['rejected_table']}"
    )
    output.result({**fields, "ok": good}, text)


@spark.command("demo")
@click.option("--dir", "directory", type=DIRECTORY, help="Keep yards, export and plots here (default: temporary).")
@click.option("--source", type=DIRECTORY, help="Files to append (default: Python's standard library).")
@click.option("--logs", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="How many logs.")
@session_options
@json_option
def demo_spark(
    directory: Path | None, source: Path | None, logs: int, master: str, memory: str, output: Output
) -> None:
    """Show the demo's yard going through the pipeline: export, import into a second yard, audits, every hash compared,
    two plots.

    \b
    Example:
      logyard spark demo --logs 200 --dir ./demo-spark
    """
    from ..demo.run import DemoSettings
    from ..demo.spark import run_demo_spark, show_demo_spark

    if directory is not None and directory.exists() and any(directory.iterdir()):
        raise click.BadParameter(f"{directory} is not empty", param_hint="--dir")
    with session(master, memory, output) as found:
        fields = run_demo_spark(DemoSettings(directory, source, logs), found, output)
    show_demo_spark(fields, output)
    output.result(fields)


def commands() -> list[click.Command]:
    """Return the verbs of this module."""
    return [spark]

"""The command line: every verb of logyard. Commands import what they need when they run, so that --help is quick.

Verbs that talk to a cluster are in `service.cli.logs`; those that start processes or read directories are here.
Entry point of the console script; `main` is what `python -m logyard.service.cli` runs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from logyard.pipeline.directory.places import data_directories

from ..signals import StopSignal, stop_signals
from . import (
    admin,
    bench,
    cluster,
    etcd,
    forks,
    kv,
    lease,
    logs,
    machine,
    members,
    nodes,
    plan,
    queue,
    repair,
    retention,
    spark,
    tls,
    topic,
)
from .output import Output, Terminated, Verbs, json_option

if TYPE_CHECKING:
    from collections.abc import Mapping

DIRECTORY = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
FINDINGS_SHOWN = 50
LOGS = 1000
"""Of the demo."""
SUBJECTS = {
    "Clusters and nodes": ("up", "serve", "status", "nodes", "plan", "cluster", "drain", "forget", "readmit", "tls"),
    "Logs": ("create", "list", "describe", "append", "read", "retain", "truncate", "delete"),
    "Topics": ("topic", "consume", "groups"),
    "Machines": ("kv", "queue", "etcd", "command", "query", "skip"),
    "Members and leaders": ("members", "leaders", "transfer", "campaign", "force-shrink"),
    "Space and health": ("compact", "snapshot", "scrub", "check", "forks"),
    "To try, to measure, to analyse": ("demo", "bench", "spark"),
}
"""How `logyard --help` lists its verbs; each stands in one place (tested)."""
AGAIN_SECONDS = 10.0
"""How long a second SIGTERM is taken for the first one: `timeout` sends it to the process and to its group."""


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="logyard", prog_name="logyard")
def cli() -> None:
    """Run logyard: many replicated logs on few nodes, one write-ahead log each, payloads kept apart.

    \b
    Start here:
      logyard demo                        the whole life, on real files, with kills
      logyard up --nodes 3 --dir ./yard   a cluster to play with
      logyard create orders && echo hello | logyard append orders && logyard read orders
    """


@cli.command()
@click.option("--config", "config", type=FILE, required=True, help="The node's node.toml (docs/config.md).")
@click.option("--until-eof", is_flag=True, help="Also stop when standard input ends: for a parent process.")
@click.option("--join", "server", metavar="HOST:PORT", help="An empty directory joins the cluster of this node first.")
@click.option("--token", help="What `logyard nodes invite` printed.", envvar="LOGYARD_TOKEN", default="")
@click.option("--replaces", type=click.IntRange(min=1), help="Take the members of this node, which is gone for good.")
@click.option("--zone", default="-", help="Where the node stands, with a catalogue: logs spread over zones.")
def serve(config: Path, until_eof: bool, server: str | None, token: str, replaces: int | None, zone: str) -> None:
    """Run one node until SIGTERM or Ctrl-C.

    Prints "ready client=HOST:PORT pid=N" when it serves. Exit codes: 0 stopped, 1 refused to start, 2 bad
    configuration, 75 the disk failed, 76 the others know a newer data directory of this node.

    With --join the configuration has no id: the cluster gives the number, and the directory keeps it, so that
    the same command starts the same node again.

    \b
    Examples:
      logyard serve --config node.toml
      logyard serve --config node.toml --join 127.0.0.1:7001 --token TOKEN
    """
    from ..catalog.join import Invitation
    from ..daemon import run_node

    given = click.get_current_context().get_parameter_source("token") is ParameterSource.COMMANDLINE
    if not server and (given or replaces):
        raise click.UsageError("--token and --replaces belong to --join")
    invitation = Invitation(server, token, replaces or 0, zone) if server else None
    raise click.exceptions.Exit(run_node(config, until_eof=until_eof, invitation=invitation, zone=zone))


@cli.command()
@click.option("--nodes", type=click.IntRange(1, 9), default=3, show_default=True, help="How many nodes.")
@click.option("--dir", "directory", type=DIRECTORY, required=True, help="Where the nodes live; kept, used again.")
@click.option("--port", type=click.IntRange(1024, 65000), default=7001, show_default=True, help="First client port.")
@click.option("--tls", is_flag=True, help="A new cluster speaks TLS only; certificates are made in DIR/tls.")
@click.option("--catalog", is_flag=True, help="A new cluster has a catalogue (docs/guides/cluster.md).")
@click.option(
    "--restart-after",
    type=click.FloatRange(0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="A node that is killed or crashes starts again after so long; 0: it stays down.",
)
@json_option
def up(nodes: int, directory: Path, port: int, tls: bool, catalog: bool, restart_after: float, output: Output) -> None:
    """Run a local cluster for development; Ctrl-C stops it cleanly.

    The first node answers clients on --port, the next on the port after it, and so on; peers talk on the ports
    after those. A directory that holds a cluster keeps its ports. Kill a node (its pid is shown) to see the others
    take over: they go on, and it comes back after --restart-after.

    \b
    Example:
      logyard up --nodes 3 --dir ./yard
    """
    from ..local_cluster import LOOK_S, KeptUp, LocalCluster

    directory.mkdir(parents=True, exist_ok=True)
    # Made before the nodes start, so that a Ctrl-C during the start stops them in order too.
    stopping = StopSignal(*stop_signals())
    with LocalCluster(directory, nodes, first_port=port, tls=tls, catalog=catalog) as cluster:
        cluster.start()
        for node in cluster.nodes.values():
            assert node.process is not None
            output.say(f"node {node.node_id}  {node.client_address}  pid {node.process.pid}  log {node.log_path}")
        output.say(f"export LOGYARD_SERVERS={','.join(cluster.addresses)}")
        if cluster.client_tls is not None:
            files = cluster.client_tls
            output.say(f"export LOGYARD_TLS_CA={files.ca} LOGYARD_TLS_CERT={files.certificate}")
            output.say(f"export LOGYARD_TLS_KEY={files.key}")
        if cluster.client_tls is None:
            output.say("every user of this machine is trusted as a client of it; --tls asks for certificates")
        output.say("Ctrl-C stops the cluster")
        kept = KeptUp(cluster, restart_after, output.say)
        while kept.look() and not stopping.wait(LOOK_S):
            pass
        codes = cluster.stop()
    fields = {
        "ok": not any(codes.values()) and not kept.all_down, "addresses": cluster.addresses,
        "exit_codes": {**kept.down, **codes}, "ended": kept.ended,
    }  # fmt: skip
    output.result(fields, "stopped")


def finding_text(finding: Mapping[str, object]) -> str:
    """Return one line of a check's report."""
    place = " ".join(str(finding[key]) for key in ("group", "path") if finding.get(key))
    return f"{finding.get('severity', '')} {place}: {finding.get('message', '')}"


@cli.command()
@click.argument("path", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--repair", is_flag=True, help="Remove what is damaged and can provably be rebuilt.")
@click.option(
    "--machine",
    "machines",
    multiple=True,
    metavar="NAME=MODULE:CLASS",
    help="A machine of your own, as in [machines] of node.toml; its groups can't be judged without it.",
)
@json_option
def check(path: Path, repair: bool, machines: tuple[str, ...], output: Output) -> None:
    """Verify the files of stopped nodes: DIR is a data directory, a node's directory, or that of a cluster.

    \b
    Example:
      logyard check ./yard
    """  # fmt: skip
    from ..check.peers import compare
    from ..check.run import check_directory

    own = dict(one.partition("=")[::2] for one in machines)
    reports = {str(found): check_directory(found, repair=repair, machines=own) for found in data_directories(path)}
    compare(reports.values())
    for name, found in reports.items():
        open_ = sum(finding["severity"] == "unknown" for finding in found["findings"])
        judged = f"good, but for {open_} findings that can't be judged here" if open_ else "good"
        output.say(f"{name}: {judged if found['ok'] else 'DAMAGED'}")
        for finding in found["findings"][:FINDINGS_SHOWN]:
            output.say(f"  {finding_text(finding)}")
        if len(found["findings"]) > FINDINGS_SHOWN:
            output.say(f"  ... and {len(found['findings']) - FINDINGS_SHOWN} more; --json has all")
    damaged = [name for name, found in reports.items() if not found["ok"]]
    output.result({"ok": not damaged, "directories": reports}, error=f"damaged: {', '.join(damaged)}")


@cli.command()
@click.option("--dir", "directory", type=DIRECTORY, help="Keep the nodes' directories here (default: a temporary one).")
@click.option("--source", type=DIRECTORY, help="Files to append (default: Python's standard library).")
@click.option("--logs", type=click.IntRange(1, 100_000), help="How many logs (default: 1000).")
@click.option("--cluster", is_flag=True, help="Nodes that die, come and go under topics and consumer groups instead.")
@json_option
def demo(
    directory: Path | None, source: Path | None, logs: int | None, cluster: bool, output: Output
) -> None:  # fmt: skip
    """Show the whole life on real files: three nodes, kill -9, recovery, snapshots, compaction, truncation, all
    verified. With --cluster: five nodes, one killed for good, one added, one drained, while producers send to two
    topics and consumer groups read them; every record is accounted for.

    \b
    Examples:
      logyard demo --logs 200 --dir ./demo
      logyard demo --cluster
    """
    from ..demo.report import show_summary
    from ..demo.run import DemoSettings, run_demo

    if source is not None and not source.is_dir():
        raise click.BadParameter(f"{source} is not a directory", param_hint="--source")
    if directory is not None and directory.exists() and any(directory.iterdir()):
        raise click.BadParameter(f"{directory} is not empty", param_hint="--dir")
    if cluster:
        from ..demo.cluster import run_cluster
        from ..demo.cluster_report import show_cluster

        if source is not None or logs is not None:
            raise click.BadParameter("--source and --logs belong to the demo of the logs", param_hint="--cluster")
        found = run_cluster(directory, output)
        show_cluster(found, output)
        output.result(found)
        return
    fields = run_demo(DemoSettings(directory, source, logs or LOGS), output)
    show_summary(fields, output)
    output.result(fields)


def register(verbs: Callable[[], list[click.Command]]) -> None:
    """Add another module's commands to the group."""
    for command in verbs():
        cli.add_command(command)


register(logs.commands)
register(retention.commands)
register(admin.commands)
register(members.commands)
register(nodes.commands)
register(plan.commands)
register(cluster.commands)
register(repair.commands)
register(forks.commands)
register(bench.commands)
register(tls.commands)
register(spark.commands)
register(queue.commands)
register(topic.commands)
register(kv.commands)
kv.kv_group.add_command(lease.lease_group)
register(machine.commands)
register(etcd.commands)
cli.subjects = SUBJECTS


class Terminate:
    """A handler of SIGTERM and SIGHUP, which are like Ctrl-C: nodes and rivals are stopped, temporary directories
    removed. Another one does not interrupt that, unless it takes long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0

    def __call__(self, number: int = signal.SIGTERM, _frame: object = None) -> None:
        """Exit."""
        if (now := self._clock()) >= self._until:
            self._until = now + AGAIN_SECONDS
            raise Terminated(128 + number)


def main() -> None:
    """Run the command line; ends the process with the exit code."""
    # `serve` and `up` set handlers of their own.
    stop = Terminate()
    for number in set(stop_signals()) - {signal.SIGINT}:
        signal.signal(number, stop)
    cli(prog_name="logyard")

"""The verbs for a log that does not go on by itself: campaign, skip, force-shrink, and
forget and readmit for a node that the others refuse. Registered by `service.cli.root`."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import click

from .logs import opened, servers_option
from .output import Output, json_option

NODE = click.IntRange(min=1)
LOOK_S = 0.05


@click.command()
@click.argument("name")
@click.option("--node", type=NODE, required=True, help="The member that shall ask to lead.")
@click.option(
    "--wait", type=click.FloatRange(min=0), default=5.0, show_default=True, help="Seconds to wait until it leads."
)
@servers_option
@json_option
def campaign(name: str, node: int, wait: float, servers: list[str], output: Output) -> None:
    """Let a log's member ask to lead now. Exit 1 if it does not lead in the end.

    While the others hear a leader they deny it: "transfer" moves a leadership that works.

    \b
    Example:
      logyard campaign orders --node 2
    """
    with opened(servers) as yard:
        yard.campaign(name, node)
        pause, deadline = threading.Event().wait, time.monotonic() + wait
        while True:
            (row,) = yard.key_metrics([name], node)
            if row["leader"] == node or time.monotonic() >= deadline:
                break
            pause(LOOK_S)
    fields = {"ok": row["leader"] == node, "log": name, "node": node, "leader": row["leader"], "term": row["term"]}
    text = f"{name} is led by node {node}"
    if not fields["ok"]:
        text = f"node {node} does not lead {name}; node {row['leader'] or 'unknown'} does"
    output.result(fields, text)


@click.command()
@click.argument("name")
@click.option("--index", type=click.IntRange(min=1), required=True, help="The entry that could not be applied.")
@click.option("--ordinal", type=click.IntRange(min=0), required=True, help="The command's number in it.")
@servers_option
@json_option
def skip(name: str, index: int, ordinal: int, servers: list[str], output: Output) -> None:
    """Leave out the command that a machine failed at, on every member; "describe" names it.

    \b
    Example:
      logyard skip orders --index 812 --ordinal 0
    """
    with opened(servers) as yard:
        yard.skip(name, index, ordinal)
    output.result(
        {"ok": True, "log": name, "index": index, "ordinal": ordinal}, f"{name} goes on without ({index}, {ordinal})"
    )


@click.command("force-shrink")
@click.argument("name")
@click.option("--node", type=NODE, required=True, help="The member that becomes the only one.")
@click.option("--yes-the-quorum-is-lost", "sure", is_flag=True, help="The others are gone for good.")
@servers_option
@json_option
def force_shrink(name: str, node: int, sure: bool, servers: list[str], output: Output) -> None:
    """Make one member the only one of a log whose quorum is gone for good. What it does not have is lost.

    The others must be down, or wiped: as long as they are a majority they can go on as a second log of that name.

    \b
    Example:
      logyard force-shrink orders --node 2 --yes-the-quorum-is-lost
    """
    if not sure:
        raise click.UsageError(
            f"what the other members of {name} committed and node {node} does not have would be lost: "
            "give --yes-the-quorum-is-lost if they are gone for good"
        )
    with opened(servers) as yard:
        index = yard.force_shrink(name, node)
    output.result(
        {"ok": True, "log": name, "node": node, "index": index}, f"{name} has one member, node {node}; add others"
    )


@click.command()
@click.option("--node", "lost", type=NODE, required=True, help="The node that lost its data.")
@click.option("--force", is_flag=True, help="Although logs still count it as a member: its promises may be broken.")
@servers_option
@json_option
def forget(lost: int, force: bool, servers: list[str], output: Output) -> None:
    """Let every other node forget a node's data directory, so that it may come back with an empty one.

    Nodes refuse one whose directory was wiped or restored from a copy. First take it out of every log ("members
    remove" or "members replace"); then forget it, empty its directory, start it, and add it again. Exit 1 if a node
    refused or did not answer. In a cluster with a catalogue the number goes with the directory, and the nodes refuse:
    let an empty directory join with "serve --join ... --replaces".

    
    Example:
      logyard forget --node 3
    """
    from logyard.protocol.errors import LogyardError

    done: list[int] = []
    failed: dict[int, str] = {}
    with opened(servers) as yard:
        for node in yard.nodes():
            if node == lost:
                continue
            try:
                yard.forget_node(lost, node, force)
                done.append(node)
            except LogyardError as error:
                failed[node] = str(error)
    for node, why in failed.items():
        output.say(f"node {node}: {why}")
    output.result(
        {
            "ok": not failed,
            "node": lost,
            "forgotten_by": done,
            "failed": {str(key): why for key, why in failed.items()},
        },
        f"node {lost} is forgotten by nodes {', '.join(map(str, done)) or 'none'}",
        "; ".join(f"node {node}: {why}" for node, why in failed.items()),
    )


@click.command()
@click.argument("path", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@json_option
def readmit(path: Path, output: Output) -> None:
    """Let a stopped node's directory start again that the other nodes refused (exit code 76).

    Nothing is lost by it: at the next start the others judge again, and refuse a directory that did forget. It is the
    way back for a node that was refused because somebody else had spoken in its name, which releases without a secret
    between nodes did not notice.

    \b
    Example:
      logyard readmit ./yard/node-2
    """
    from logyard.engine.disk.door import Disk
    from logyard.engine.recovery.incarnation import readmit as admit
    from logyard.pipeline.directory.places import data_directories

    reasons = {str(found): admit(Disk(), found) for found in data_directories(path)}
    for name, reason in reasons.items():
        output.say(f"{name}: {f'was refused: {reason}' if reason else 'was not refused'}")
    output.result({"ok": True, "directories": reasons}, "it may start again")


def commands() -> list[click.Command]:
    """Return the verbs of this module."""
    return [campaign, skip, force_shrink, forget, readmit]

"""The verbs that look after a running cluster: snapshot, truncate, compact, members, transfer, status.

Like those of `service.cli_logs` they open one blocking client each. Registered by `service.cli`.
"""

from __future__ import annotations

import click

from .cli_logs import opened, servers_option
from .cli_output import Output, bytes_text, json_option


@click.command()
@click.argument("names", metavar="[NAME...]", nargs=-1)
@servers_option
@json_option
def snapshot(names: tuple[str, ...], servers: list[str], output: Output) -> None:
    """Take snapshots of the named logs, or of all, on every member.

    \b
    Example:
      logyard snapshot orders
    """
    with opened(servers) as yard:
        found = yard.snapshot(list(names) or None)
    output.result({"ok": True, "nodes": found}, f"snapshots taken on nodes {', '.join(map(str, found))}")


@click.command()
@click.argument("name")
@click.option("--before", type=click.IntRange(min=0), required=True, help="The first offset to keep.")
@servers_option
@json_option
def truncate(name: str, before: int, servers: list[str], output: Output) -> None:
    """Remove the records of a log before an offset; their space comes back on every member.

    \b
    Example:
      logyard truncate orders --before 1000
    """
    with opened(servers) as yard:
        yard.log(name).truncate(before)
    output.result({"ok": True, "log": name, "start": before}, f"{name} starts at {before}")


@click.command()
@servers_option
@json_option
def compact(servers: list[str], output: Output) -> None:
    """Move every live payload from the write-ahead logs into generations, and give dead space back.

    \b
    Example:
      logyard compact
    """
    with opened(servers) as yard:
        found = yard.compact()
    output.result({"ok": True, "nodes": found}, f"compacted on nodes {', '.join(map(str, found))}")


@click.command()
@click.argument("name")
@click.option("--add", type=click.IntRange(min=1), help="Add this node as a member.")
@click.option("--remove", type=click.IntRange(min=1), help="Remove this member.")
@servers_option
@json_option
def members(name: str, add: int | None, remove: int | None, servers: list[str], output: Output) -> None:
    """Show the members of a log, or add or remove one.

    \b
    Examples:
      logyard members orders
      logyard members orders --add 4
    """
    if add is not None and remove is not None:
        raise click.UsageError("one change at a time: --add or --remove")
    with opened(servers) as yard:
        if add is not None:
            yard.add_member(name, add)
        elif remove is not None:
            yard.remove_member(name, remove)
        found = yard.members(name)
        if add is not None or remove is not None:
            # A member that was removed may never hear of it: what counts is the leader's view.
            described = yard.describe(name)
            found["members"] = [*described["voters"], *described["learners"]]
            found["leader"] = described["leader"]
    text = f"{name}: members {', '.join(map(str, found['members']))}; leader {found['leader'] or 'unknown'}"
    output.result({"ok": True, "name": name, **found}, text)


@click.command()
@click.argument("name")
@click.option("--to", "target", type=click.IntRange(min=1), required=True, help="The node that shall lead.")
@servers_option
@json_option
def transfer(name: str, target: int, servers: list[str], output: Output) -> None:
    """Hand a log's leadership to another member.

    \b
    Example:
      logyard transfer orders --to 2
    """
    with opened(servers) as yard:
        yard.transfer(name, target)
    output.result({"ok": True, "log": name, "to": target}, f"{name} is led by node {target}")


@click.command()
@click.option("--node", type=click.IntRange(min=1), help="Only this node.")
@servers_option
@json_option
def status(node: int | None, servers: list[str], output: Output) -> None:
    """What every node holds and does: groups, leaders, bytes, syncs. Exit 1 if a node does not answer.

    \b
    Example:
      logyard status
    """
    with opened(servers) as yard:
        found = yard.statuses() if node is None else {node: yard.status(node)}
    missing = [each for each, row in found.items() if "error" in row]
    for each in missing:
        output.say(f"node {each} does not answer: {found[each]['message']}")
    sizes = ("wal_bytes_live", "generations_bytes_live", "payload_disk_bytes", "snapshot_bytes", "memory_rss")
    counts = ("pid", "groups", "led", "fdatasyncs")
    rows = [
        [each, *(row.get(key, "") for key in counts), *(size_text(row.get(key)) for key in sizes)]
        for each, row in sorted(found.items())
        if each not in missing
    ]
    output.table("nodes", ("node", *counts, *sizes), rows)
    output.result({"ok": not missing, "nodes": list(found.values()), "missing": missing})


def size_text(value: object) -> str:
    """A byte count for the table; "" where the node did not say."""
    return bytes_text(value) if isinstance(value, (int, float)) else ""


def commands() -> list[click.Command]:
    """The verbs of this module."""
    return [snapshot, truncate, compact, members, transfer, status]

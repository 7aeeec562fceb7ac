"""The verbs that look after a running cluster: snapshot, truncate, compact, transfer, status, leaders.

Like those of `service.cli.logs` they open one blocking client each. Registered by `service.cli.root`.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from logyard.protocol.errors import BadRequest, LogyardError

from .. import status_watch
from .logs import opened, servers_option
from .members import check_node
from .output import EXIT_FAILED, Output, bytes_text, failure, json_option, plain

if TYPE_CHECKING:
    from logyard.client.sync import Yard

SCRUB_LOOK_S = 0.1


def done_by(ask: Callable[[], dict[int, Any]]) -> tuple[dict[int, Any], dict[str, Any]]:
    """Return what the nodes answered, and what --json says when some did not: they are `missing`, and the error."""
    try:
        return ask(), {"ok": True}
    except LogyardError as error:
        if "answers" not in error.details:
            raise
        found: Any = error.details["answers"]
        return found, {**failure(error.code, error.message), "missing": error.details["missing"]}


def also_missing(fields: dict[str, Any], gone: Mapping[int, LogyardError]) -> dict[str, Any]:
    """Return what --json says of `done_by`, when these nodes did not do it either."""
    if not gone:
        return fields
    from logyard.client.admin import all_of

    _, more = done_by(lambda: all_of(gone))
    if fields["ok"]:
        return more
    first = fields["error"]
    text = f"{first['message']}; {more['error']['message']}"
    return {**failure(first["code"], text), "missing": [*fields["missing"], *more["missing"]]}


def finish(text: str, found: dict[int, Any], fields: dict[str, Any], output: Output) -> None:
    """Print the outcome, and the error if a node did not do it. Leaves the command with exit 1 if it is not ok."""
    if "error" in fields:
        click.echo(f"error: {fields['error']['message']}", err=True)
    output.result({**fields, "nodes": found}, text if found else None)


@click.command()
@click.argument("names", metavar="[NAME...]", nargs=-1)
@servers_option
@json_option
def snapshot(names: tuple[str, ...], servers: list[str], output: Output) -> None:
    """Take snapshots of the named logs, or of all, on every member. Exit 1 if a node does not answer.

    \b
    Example:
      logyard snapshot orders
    """
    with opened(servers) as yard:
        found, fields = done_by(lambda: yard.snapshot(list(names) or None))
    finish(f"snapshots taken on nodes {', '.join(map(str, found))}", found, fields, output)


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
    """Move every live payload from the write-ahead logs into generations, and give dead space back. Exit 1 if a node
    does not answer.

    \b
    Example:
      logyard compact
    """
    with opened(servers) as yard:
        found, fields = done_by(yard.compact)
    finish(f"compacted on nodes {', '.join(map(str, found))}", found, fields, output)


@click.command()
@click.option("--node", type=click.IntRange(min=1), help="Only this node.")
@click.option("--last", is_flag=True, help="Begin none: show the one that runs, or the last one.")
@servers_option
@json_option
def scrub(node: int | None, last: bool, servers: list[str], output: Output) -> None:
    """Let every node read all that lies on its disk now, and repair what is damaged. Exit 1 if something is left
    or a node does not answer.

    Nodes do so by themselves, every scrub_every_s, at scrub_bytes_per_s.

    \b
    Example:
      logyard scrub --node 2
    """
    with opened(servers) as yard:
        found, fields = done_by(lambda: yard.scrub(node, start=not last))
        fields = also_missing(fields, await_scrubs(yard, found))
    rows = [
        (each, kind, bytes_text(one["bytes"]), one["found"], one["repaired"], one["found"] - one["repaired"])
        for each, row in sorted(found.items())
        for kind, one in row["last"].items()
    ]
    output.table("scrub", ("node", "kind", "read", "damaged", "repaired", "left"), rows)
    for each, row in sorted(found.items()):
        for one in row["findings"]:
            group = f"group {one['group']}: " if one["group"] else ""
            output.say(f"node {each}: {group}{one['text']}: {'repaired' if one['repaired'] else 'NOT repaired'}")
        if row["error"]:
            output.say(f"node {each}: it ended early: {row['error']}")
    sound = all(not row["left"] and not row["error"] for row in found.values())
    text = "nothing is left damaged" if sound else "something is damaged, or was not read"
    finish(text, found, {**fields, "ok": fields["ok"] and sound}, output)


def await_scrubs(yard: Yard, found: dict[int, dict[str, Any]]) -> dict[int, LogyardError]:
    """Look until those that were begun have ended; put how in their place. Nodes that ended themselves are taken out:
    return what of. Raises `BadRequest` for one that is none any more."""
    wanted = {each: (row["wanted"], row["epoch"]) for each, row in found.items()}
    gone: dict[int, LogyardError] = {}
    pause = threading.Event().wait
    # Those that it began with: nodes may join, and go, meanwhile.
    while waiting := [each for each, row in found.items() if row["passes"] < wanted[each][0]]:
        pause(SCRUB_LOOK_S)
        for each in waiting:
            try:
                row = yard.scrub(each)[each]
                if row["epoch"] != wanted[each][1]:
                    raise LogyardError("it was started again meanwhile, and its scrub did not end")
            except BadRequest:
                raise
            except LogyardError as error:
                gone[each] = error
                del found[each]
            else:
                found[each] = row
    return gone


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
@click.option("--watch", is_flag=True, help="Look again and again, with rates; Ctrl-C ends it.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between two looks."
)
@click.option("--count", type=click.IntRange(min=1), help="With --watch: end after so many looks.")
@servers_option
@json_option
def status(
    node: int | None, watch: bool, interval: float, count: int | None, servers: list[str], output: Output
) -> None:
    """Show what every node holds and does: groups, leaders, bytes, syncs. Exit 1 if a node does not answer.

    With --watch and --json each look is one line, a JSON object.

    \b
    Examples:
      logyard status
      logyard status --watch --interval 1
    """
    with opened(servers) as yard:

        def look() -> dict[int, dict[str, Any]]:
            return yard.statuses() if node is None else {node: yard.status(node)}

        if watch:
            watch_status(look, interval, count, output)
            return
        found = look()
    gone = status_watch.missing(found)
    for each in gone:
        output.say(f"node {each} does not answer: {found[each]['message']}")
    for line in status_watch.troubles(found):
        output.say(line)
    output.table("nodes", ("node", *status_watch.COUNTS, *status_watch.SIZES), status_watch.rows(found))
    output.result({"ok": not gone, "nodes": list(found.values()), "missing": gone}, error=silent(gone))


def watch_status(
    look: Callable[[], dict[int, dict[str, Any]]], interval: float, count: int | None, output: Output
) -> None:
    """Look until `count` or Ctrl-C; ends as the last look says."""
    from rich.live import Live

    wait = threading.Event().wait
    before: dict[int, dict[str, Any]] = {}
    seen_at, ok, looks = 0.0, True, 0
    screen = contextlib.nullcontext() if output.json_wanted else Live(console=output.console, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), screen as live:
        while True:
            found, now = look(), time.monotonic()
            rate = status_watch.rates(before, found, now - seen_at)
            gone = status_watch.missing(found)
            ok, before, seen_at, looks = not gone, found, now, looks + 1
            if live is not None:
                live.update(status_watch.screen(found, rate), refresh=True)
            else:
                error = failure("failed", silent(gone)) if gone else {}
                line = {**error, "ok": ok, "nodes": list(found.values()), "rates": rate, "missing": gone}
                click.echo(json.dumps(line, default=plain))
            if looks == count:
                break
            wait(min(interval, threading.TIMEOUT_MAX))
    if not ok:
        raise click.exceptions.Exit(EXIT_FAILED)


@click.command()
@click.argument("names", metavar="[NAME...]", nargs=-1)
@click.option("--node", type=click.IntRange(min=1), help="Only logs that this node leads.")
@click.option("--rows", type=click.IntRange(min=0), default=50, show_default=True, help="Logs shown; all with --json.")
@servers_option
@json_option
def leaders(names: tuple[str, ...], node: int | None, rows: int, servers: list[str], output: Output) -> None:
    """Show which node leads which logs and since when, from the nodes' own tables. Exit 1 if a node does not answer.

    \b
    Example:
      logyard leaders --node 2
    """
    with opened(servers) as yard:
        board, missing = yard.leaders()
        if node is not None:
            check_node(node, yard.nodes(), board)
    # A dead node's own leaderships are its followers' last news until they elect another.
    counts = Counter(row.leader for row in board)
    shown = [row for row in board if (not names or row.name in names) and node in (None, row.leader)]
    for each in missing:
        output.say(f"node {each} does not answer")
    output.table(
        "leaderships", ("node", "logs"), [(each or "unknown", count) for each, count in sorted(counts.items())]
    )
    cells = [(row.name, row.leader or "unknown", row.term, age_text(row.since_ms), row.state) for row in shown[:rows]]
    output.table("leaders", ("log", "leader", "term", "since", "state"), cells)
    if len(shown) > rows:
        output.say(f"... and {len(shown) - rows} more: --rows, or --json for all")
    groups = [{**row._asdict(), "members": row.members} for row in shown]
    fields = {"ok": not missing, "leaders": dict(sorted(counts.items())), "groups": groups, "missing": missing}
    output.result(fields, error=silent(missing))


def silent(nodes: Iterable[int]) -> str:
    """Return the error of nodes that do not answer."""
    return f"nodes {', '.join(map(str, nodes))} do not answer"


def age_text(since_ms: int) -> str:
    """Return how long ago a wall-clock time was; "" for never."""
    seconds = max(0, int(time.time() - since_ms / 1000)) if since_ms else -1
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s" if seconds >= 0 else ""


def commands() -> list[click.Command]:
    """Return the verbs of this module."""
    return [snapshot, truncate, compact, scrub, transfer, status, leaders]

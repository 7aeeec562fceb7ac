"""`logyard queue`: make queues, publish, consume, look and purge.

Rows are tab-separated, for other programs; with --json one object. Registered by `service.cli.root`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .as_text import cell, shown
from .logs import members_option, opened, servers_option
from .output import EXIT_FAILED, Output, json_option

if TYPE_CHECKING:
    from logyard.client.queue_sync import Consumer
    from logyard.protocol.queue import Message

F = TypeVar("F", bound=Callable[..., Any])
BATCH_MESSAGES = 512
BATCH_BYTES = 1 << 20
FILES = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group("queue")
def queue() -> None:
    """Use queues: messages wait, are delivered to one consumer each, and are gone when they are acknowledged.

    \b
    Example:
      logyard queue create jobs
      echo hello | logyard queue publish jobs
      logyard queue consume jobs
    """


def seconds(name: str, text: str) -> Callable[[F], F]:
    """Return an option that is a time."""
    return click.option(f"--{name}", type=click.FloatRange(min=0.001), help=text)


@queue.command("create")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--members", callback=members_option, help="Nodes that hold it, as 1,2,3 (default: all).")
@click.option("--max-length", type=click.IntRange(min=1), help="Messages that may be ready (default: any number).")
@click.option("--max-bytes", type=click.IntRange(min=1), help="Bytes of those messages.")
@click.option("--overflow", type=click.Choice(["drop_head", "reject"]), help="What goes when it is full: old or new.")
@seconds("ttl", "Seconds that a message may wait.")
@seconds("expires", "Seconds without a consumer after which the queue deletes itself.")
@seconds("lease", "Seconds in which a consumer has to settle a message (default: 1800).")
@click.option("--delivery-limit", type=click.IntRange(min=0), help="Failed deliveries (default: 20; 0: no limit).")
@click.option("--no-dead-letters", is_flag=True, help="Drop what nobody shall get any more, do not keep it.")
@click.option("--single-active", is_flag=True, help="One consumer at a time; the others wait to take over.")
@servers_option
@json_option
def create(
    names: tuple[str, ...],
    members: list[int] | None,
    ttl: float | None,
    expires: float | None,
    lease: float | None,
    no_dead_letters: bool,
    single_active: bool,
    servers: list[str],
    output: Output,
    **bounds: int | str | None,
) -> None:
    """Create queues. `logyard list`, `describe` and `delete` know them, too.

    \b
    Example:
      logyard queue create jobs --max-length 100000 --overflow reject --delivery-limit 5
    """
    options: dict[str, object] = {name: value for name, value in bounds.items() if value is not None}
    times = {"ttl_ms": ttl, "expires_ms": expires, "lease_ms": lease}
    options |= {name: round(value * 1000) for name, value in times.items() if value is not None}
    if no_dead_letters:
        options["dead_letters"] = False
    if single_active:
        options["single_active"] = True
    with opened(servers) as yard:
        yard.create_many(names, members=members, machine="queue", **options)
    output.result({"ok": True, "created": list(names)}, f"created {', '.join(names)}")


@queue.command("publish")
@click.argument("name")
@click.argument("files", nargs=-1, type=FILES)
@click.option("--metadata", default="", help="Metadata of every message.")
@click.option("--whole", is_flag=True, help="All of standard input is one message, not one message a line.")
@click.option("--priority", type=click.Choice(["normal", "high"]), default="normal", show_default=True)
@seconds("ttl", "Seconds that a message may wait.")
@seconds("delay", "Seconds until a message is ready.")
@servers_option
@json_option
def publish(
    name: str,
    files: tuple[Path, ...],
    metadata: str,
    whole: bool,
    priority: str,
    ttl: float | None,
    delay: float | None,
    servers: list[str],
    output: Output,
) -> None:
    """Publish messages: each file is one, or each line of standard input. Prints the number of them, and the ids of the
    first and the last.

    \b
    Examples:
      echo hello | logyard queue publish jobs
      logyard queue publish jobs a.json b.json --priority high
    """
    messages = first = last = 0
    fields: dict[str, object] = {"queue": name, "messages": 0}
    with opened(servers) as yard:
        target = yard.queue(name)
        for batch in batches(bodies(files, whole)):
            records = [(metadata.encode(), body) for body in batch]
            ids = target.publish_many(records, priority=priority, ttl=ttl, delay=delay)
            messages, first, last = messages + len(ids), first or ids.start, ids.stop - 1
            fields.update(messages=messages, first=first, last=last)
            output.did(fields, f"{messages} messages before it are published, with ids {first} to {last}")
    output.result({"ok": True, **fields}, f"{messages}\t{first}\t{last}" if messages else "0")


def bodies(files: tuple[Path, ...], whole: bool) -> Iterator[bytes]:
    """Yield what is to be published."""
    if files:
        yield from (path.read_bytes() for path in files)
    elif whole:
        yield sys.stdin.buffer.read()
    else:
        yield from (line.rstrip(b"\r\n") for line in sys.stdin.buffer)


def batches(messages: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Yield messages that are published together."""
    batch: list[bytes] = []
    size = 0
    for body in messages:
        if batch and (len(batch) >= BATCH_MESSAGES or size + len(body) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(body)
        size += len(body)
    if batch:
        yield batch


@queue.command("consume")
@click.argument("name")
@click.option("--count", type=click.IntRange(min=1), help="At most this many messages.")
@click.option("--wait", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Seconds for another one.")
@click.option("--follow", is_flag=True, help="Wait for ever; with --json give --count too.")
@click.option("--requeue", is_flag=True, help="Only look: nothing is acknowledged, everything goes back.")
@click.option("--dead", is_flag=True, help="The queue's dead letters.")
@click.option("--raw", is_flag=True, help="Write bodies only, one after the other.")
@click.option("--prefetch", type=click.IntRange(1, 65_535), default=256, show_default=True, help="Messages held.")
@seconds("lease", "Seconds in which a message has to be settled.")
@servers_option
@json_option
def consume(
    name: str,
    count: int | None,
    wait: float,
    follow: bool,
    requeue: bool,
    dead: bool,
    raw: bool,
    prefetch: int,
    lease: float | None,
    servers: list[str],
    output: Output,
) -> None:
    """Take messages, and acknowledge each when it is written: id, failed deliveries, metadata, body; for dead letters
    also why. With --json the object of an error, or of an interruption, has those that were written before it.

    \b
    Examples:
      logyard queue consume jobs --count 10
      logyard queue consume jobs --dead --requeue
    """
    if follow and output.json_wanted and count is None:
        raise click.UsageError("--follow --json never ends: give --count")
    if raw and output.json_wanted:
        raise click.UsageError("--raw does not go with --json")
    taken = 0
    # Exactly as many as are wanted, so that nobody else waits for what would only go back.
    exact = count is not None or requeue
    held = min(count or prefetch, 65_535) if exact else prefetch
    with output.rows("messages", queue=name) as shown:
        with (
            opened(servers) as yard,
            yard.queue(name).consume(prefetch=held, dead=dead, lease=lease, auto=not exact) as messages,
        ):
            while count is None or taken < count:
                message = messages.get(None if follow else wait)
                if message is None:
                    break
                taken += 1
                if raw:
                    sys.stdout.buffer.write(message.body or b"")
                    sys.stdout.buffer.flush()
                elif output.json_wanted:
                    shown.write(message_fields(message))
                else:
                    click.echo(message_line(message))
                if not requeue:
                    messages.ack(message)
                    if count is not None and taken % held == 0 and taken < count:
                        messages.credit(min(held, count - taken))
            acknowledged, not_held = settled(messages)
        if not_held:
            click.echo(
                f"error: {not_held} of {acknowledged + not_held} messages were acknowledged too late, after their "
                "lease: they come again; give a longer --lease",
                err=True,
            )
        if raw and not_held:
            raise click.exceptions.Exit(EXIT_FAILED)
        if not raw:
            output.result({"ok": not not_held, "acknowledged": acknowledged, "not_held": not_held}, rows=shown)


def settled(messages: Consumer) -> tuple[int, int]:
    """Return how many messages were acknowledged, and how many were so in vain."""
    from logyard.protocol.queue import NotHeld

    try:
        return messages.flush(), 0
    except NotHeld as late:
        return late.settled, late.missed


def message_fields(message: Message) -> dict[str, object]:
    """Return one message for --json: `metadata` and `body` are text where they are text, else `..._base64`."""
    fields: dict[str, object] = {
        "id": message.id,
        "deliveries": message.deliveries,
        "timestamp": message.timestamp,
    }
    if message.reason:
        fields["reason"] = message.reason
    return {**fields, **shown("metadata", message.metadata), **shown("body", message.body)}


def message_line(message: Message) -> str:
    """Return one row; tabs and line breaks within text are written as \\t and \\n, other bytes as base64."""
    cells = [str(message.id), str(message.deliveries)]
    cells += [cell(message.metadata), cell(message.body or b"")]
    if message.reason:
        cells.append(message.reason)
    return "\t".join(cells)


@queue.command("stats")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@servers_option
@json_option
def stats(names: tuple[str, ...], servers: list[str], output: Output) -> None:
    """Show messages and bytes by where they are, consumers, and what was counted since a queue's beginning: queue,
    figure, value.

    \b
    Example:
      logyard queue stats jobs --json
    """
    with opened(servers) as yard:
        found = {name: yard.queue(name).stats() for name in names}
    if not output.json_wanted:
        for name, figures in found.items():
            for key, value in figures.items():
                click.echo(f"{name}\t{key}\t{value}")
    output.result({"ok": True, "queues": found})


@queue.command("purge")
@click.argument("name")
@click.option("--delayed", is_flag=True, help="Those that wait for their time.")
@click.option("--dead", is_flag=True, help="The dead letters.")
@click.option("--ready/--no-ready", default=True, help="Those that wait for a consumer.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@servers_option
@json_option
def purge(name: str, delayed: bool, dead: bool, ready: bool, yes: bool, servers: list[str], output: Output) -> None:
    """Drop what waits, not what consumers hold. Prints how many messages that were. Asks first on a terminal.

    \b
    Example:
      logyard queue purge jobs --dead --yes
    """
    if not (ready or delayed or dead):
        raise click.UsageError("--no-ready goes with --delayed or --dead")
    if not yes and sys.stdin.isatty():
        click.confirm(f"Purge {name}?", abort=True, err=True)
    with opened(servers) as yard:
        count = yard.queue(name).purge(ready=ready, delayed=delayed, dead=dead)
    output.result({"ok": True, "queue": name, "purged": count}, str(count))


def commands() -> list[click.Command]:
    """Return the verbs of this module."""
    return [queue]

"""`logyard topic`, `consume`, `groups`: make topics, send and read records, look at consumer groups.

Rows are tab-separated, for other programs; with --json one object. Registered by `service.cli.root`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from logyard.protocol.errors import LogyardError

from .as_text import cell, shown
from .logs import members_option, opened, servers_option
from .output import Output, json_option

if TYPE_CHECKING:
    from logyard.client._sync.consumer import GroupConsumer
    from logyard.client.reading import Consumed
    from logyard.protocol.topics import Sources, Topic

F = TypeVar("F", bound=Callable[..., Any])
BATCH_RECORDS = 512
COMMIT_S = 1.0
FOLLOW_S = 1.0
"""So often `consume --follow --json` looks whether it is a commit that more waits for."""
INTERRUPTED_S = 2.0
"""How long the commit of an interrupted `consume` may take."""


def kept(command: F) -> F:
    """Add the options of what a topic keeps."""
    for option in (
        click.option(
            "--records", type=click.IntRange(min=0), default=0, help="Newest records that each partition keeps."
        ),
        click.option("--bytes", "size", type=click.IntRange(min=0), default=0, help="Newest bytes of each partition."),
        click.option("--age", type=click.FloatRange(min=0), default=0.0, help="Seconds that records are kept."),
    ):
        command = option(command)
    return command


@click.group("topic")
def topic() -> None:
    """Use topics: records with keys, in partitions, each of which is a log.

    \b
    Example:
      logyard topic create orders --partitions 12
      echo hello | logyard topic send orders --key customer-7
      logyard consume orders --group billing
    """


def topic_fields(row: Topic) -> dict[str, object]:
    """Return a topic for --json. `ends_at`: of a partition that ended, and is still to be read up to there."""
    shares = dict.fromkeys((one.number for one in row.partitions), 0)
    for slots, number in row.layout:
        shares[number] += slots
    return {
        "topic": row.name, "id": row.id, "state": row.state, "epoch": row.epoch, "revision": row.revision,
        "options": dict(row.options),
        "partitions": [
            {"partition": one.number, "log": one.log, "uid": f"{one.uid:016x}", "slots": shares[one.number],
             "ends_at": one.end, "after": offsets_fields(one.sources),
             "joins": [{"offset": join.offset, "after": offsets_fields(join.sources)} for join in one.joins]}
            for one in row.partitions
            if not one.retired
        ],
    }  # fmt: skip


def offsets_fields(offsets: Sources) -> list[dict[str, int]]:
    """Return offsets of partitions for --json."""
    return [{"partition": number, "offset": offset} for number, offset in offsets]


def count_text(row: Topic) -> str:
    """Return how many partitions a topic has, and which ones ended and are still to be read, as a sentence's end."""
    text = f"{len(row.live)} partitions"
    if row.draining:
        numbers = ", ".join(str(one.number) for one in row.draining)
        text += f"; those that ended stay until every consumer group has read them, or they are empty: {numbers}"
    return text


@topic.command("create")
@click.argument("name")
@click.option("--partitions", type=click.IntRange(min=1), default=1, show_default=True, help="How many logs it has.")
@click.option("--members", callback=members_option, help="Nodes that hold them, as 1,2,3 (default: all).")
@kept
@servers_option
@json_option
def create(
    name: str,
    partitions: int,
    members: list[int] | None,
    age: float,
    size: int,
    records: int,
    servers: list[str],
    output: Output,
) -> None:
    """Create a topic with its logs, NAME.0 and so on. One that was left half made is finished.

    \b
    Example:
      logyard topic create orders --partitions 12 --age 604800
    """
    with opened(servers) as yard:
        row = yard.topic(name).create(partitions, members=members, age=age, bytes=size, records=records)
    output.result({"ok": True, **topic_fields(row)}, f"created {name} with {count_text(row)}")


@topic.command("list")
@servers_option
@json_option
def list_(servers: list[str], output: Output) -> None:
    """List the topics: name, state, partitions, epoch, partitions that ended and are still to be read.

    \b
    Example:
      logyard topic list
    """
    with opened(servers) as yard:
        rows = yard.topics()
    if not output.json_wanted:
        for row in rows:
            click.echo(f"{row.name}\t{row.state}\t{len(row.live)}\t{row.epoch}\t{len(row.draining)}")
    output.result({"ok": True, "topics": [topic_fields(row) for row in rows]})


@topic.command("describe")
@click.argument("name")
@servers_option
@json_option
def describe(name: str, servers: list[str], output: Output) -> None:
    """Show a topic's partitions: number, log, slots of 16384, first offset, next offset, leader, and of one that ended
    and is still to be read its end; else -.

    \b
    Example:
      logyard topic describe orders
    """
    with opened(servers) as yard:
        row = yard.topic(name).describe()
        fields: dict[str, Any] = topic_fields(row)
        for one in fields["partitions"]:
            start, end = yard.log(one["log"]).latest()
            one |= {"start": start, "end": end, "leader": yard.locate(one["log"])["leader"]}
            if not output.json_wanted:
                ends = "-" if one["ends_at"] is None else one["ends_at"]
                shown = (one["partition"], one["log"], one["slots"], start, end, one["leader"], ends)
                click.echo("\t".join(map(str, shown)))
    output.result({"ok": True, **fields})


@topic.command("alter")
@click.argument("name")
@click.option("--partitions", type=click.IntRange(min=1), help="How many there are to be.")
@click.option("--force", is_flag=True, help="Drop what nobody has read of partitions that end, and ended before.")
@click.option("--yes", is_flag=True, help="Do not ask before --force.")
@click.option("--keep", is_flag=True, help="Set what is kept to --age, --bytes and --records; 0 is no limit.")
@kept
@servers_option
@json_option
def alter(
    name: str,
    partitions: int | None,
    force: bool,
    yes: bool,
    keep: bool,
    age: float,
    size: int,
    records: int,
    servers: list[str],
    output: Output,
) -> None:
    """Add partitions or take some away, or say what the topic keeps. Keys are read in their order.

    Partitions that are taken away are those of the highest numbers. They take no more records, and stay until every
    consumer group has read them, or they are empty; the same command again lets go those that were read meanwhile.
    --force asks first on a terminal.

    \b
    Examples:
      logyard topic alter orders --partitions 24
      logyard topic alter orders --partitions 6
      logyard topic alter orders --partitions 6 --force --yes
      logyard topic alter orders --keep --age 86400
    """
    if partitions is None and not keep:
        raise click.UsageError("say --partitions or --keep")
    if force and partitions is None:
        raise click.UsageError("--force is for fewer --partitions")
    if force and not yes and sys.stdin.isatty():
        click.confirm(f"Drop what nobody has read of partitions of {name}?", abort=True, err=True)
    with opened(servers) as yard:
        row = None
        if partitions is not None:
            row = yard.topic(name).alter(partitions, force=force)
        if keep:
            row = yard.topic(name).retain(age=age, bytes=size, records=records)
    assert row is not None
    output.result({"ok": True, **topic_fields(row)}, f"{name} has {count_text(row)}")


@topic.command("purge")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@servers_option
@json_option
def purge(name: str, yes: bool, servers: list[str], output: Output) -> None:
    """Drop all records of a topic. Prints how many those were. Asks first on a terminal.

    \b
    Example:
      logyard topic purge orders --yes
    """
    if not yes and sys.stdin.isatty():
        click.confirm(f"Purge {name}?", abort=True, err=True)
    with opened(servers) as yard:
        count = yard.topic(name).purge()
    output.result({"ok": True, "topic": name, "purged": count}, str(count))


@topic.command("delete")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@servers_option
@json_option
def delete(name: str, yes: bool, servers: list[str], output: Output) -> None:
    """Delete a topic, with its logs and all records. Asks first on a terminal.

    \b
    Example:
      logyard topic delete orders --yes
    """
    if not yes and sys.stdin.isatty():
        click.confirm(f"Delete {name} and all its records?", abort=True, err=True)
    with opened(servers) as yard:
        yard.topic(name).delete()
    output.result({"ok": True, "topic": name}, f"deleted {name}")


@topic.command("send")
@click.argument("name")
@click.option("--key", help="Key of every record (default: none).")
@click.option("--separator", help="What stands between key and record in each line: each line has its own key.")
@click.option("--metadata", default="", help="Metadata of every record.")
@servers_option
@json_option
def send(name: str, key: str | None, separator: str | None, metadata: str, servers: list[str], output: Output) -> None:
    """Send each line of standard input as a record, to the partition of its key. Prints how many those were.

    \b
    Examples:
      echo hello | logyard topic send orders --key customer-7
      printf 'a:1\\nb:2\\n' | logyard topic send orders --separator :
    """
    count, whole = 0, True
    batch: list[tuple[bytes | None, bytes, bytes]] = []
    if separator == "":
        raise click.BadParameter("nothing can stand between key and record", param_hint="--separator")
    with opened(servers) as yard:
        target = yard.topic(name)

        def sends() -> None:
            nonlocal count
            count += len(target.send_many(batch))
            batch.clear()
            output.did({"topic": name, "records": count}, f"{count} records before it are sent")

        for line in sys.stdin.buffer:
            body = line.rstrip(b"\r\n")
            own = None if key is None else key.encode()
            if separator is not None:
                own, found, body = body.partition(separator.encode())
                if not found:
                    whole = False
                    break
            batch.append((own, metadata.encode(), body))
            if len(batch) >= BATCH_RECORDS:
                sends()
        if batch:
            sends()
    if not whole:
        raise click.UsageError(f"line {count + 1} has no {separator!r}; the {count} lines before it are sent")
    output.result({"ok": True, "topic": name, "records": count}, str(count))


@click.command("consume")
@click.argument("name", metavar="TOPIC")
@click.option("--group", required=True, help="The consumer group that this is a member of.")
@click.option("--member", default="", help="A name that the next process has, too: it takes over at once.")
@click.option(
    "--start", type=click.Choice(["earliest", "latest", "error"]), default="earliest", show_default=True,
    help="Where to begin without an offset.",
)  # fmt: skip
@click.option("--count", type=click.IntRange(min=1), help="At most this many records.")
@click.option("--wait", type=click.FloatRange(min=0), default=5.0, show_default=True, help="Seconds for another one.")
@click.option("--follow", is_flag=True, help="Wait for ever; with --json give --count too.")
@click.option(
    "--ttl", type=click.FloatRange(1, 300), default=10.0, show_default=True, help="Seconds until it is given up."
)
@click.option("--zone", default="", help="Where this is: partitions that are led there come first.")
@servers_option
@json_option
def consume(
    name: str,
    group: str,
    member: str,
    start: str,
    count: int | None,
    wait: float,
    follow: bool,
    ttl: float,
    zone: str,
    servers: list[str],
    output: Output,
) -> None:
    """Read a topic as a member of a consumer group: partition, offset, key, metadata, record. What was written is
    committed, once a second and at the end, also by Ctrl-C; with --json at the end alone, which comes early where more
    is read only behind that: at the fences of partitions that were added or ended.

    \b
    Examples:
      logyard consume orders --group billing --follow
      logyard consume orders --group billing --count 10 --json
    """
    if follow and output.json_wanted and count is None:
        raise click.UsageError("--follow --json never ends: give --count")
    taken = 0
    lost: set[int] = set()
    written: Consumed | None = None
    # Who reads an object that names an error may make nothing of its records: they come again.
    commit_every = None if output.json_wanted else COMMIT_S
    with output.rows("records", topic=name, group=group) as shown:
        with (
            opened(servers) as yard,
            yard.consume(
                name, group=group, start=start, member=member, ttl=ttl, zone=zone, commit_every=commit_every
            ) as records,
        ):
            try:
                while count is None or taken < count:
                    if follow:
                        record = following(records) if output.json_wanted else next(records, None)
                    else:
                        record = records.get(wait)
                    if record is None:
                        # Where more comes only when this is committed, it is for whoever asks next.
                        if records.trouble is not None and records.trouble.code != "uncommitted":
                            raise records.trouble.again()
                        break
                    taken += 1
                    if output.json_wanted:
                        shown.write(record_fields(record))
                    else:
                        click.echo(record_line(record))
                        written = record
                    if taken == count:
                        lost |= set(records.commit(record).lost)
                lost |= set(records.commit().lost)
            except (KeyboardInterrupt, SystemExit):
                if written is not None:
                    commit_interrupted(records, written)
                raise
        output.result({"ok": True, "taken": taken, "lost": sorted(lost)}, rows=shown)


def following(records: GroupConsumer) -> Consumed | None:
    """Return the next record, however long that takes; None where only a commit brings more."""
    while (record := records.get(FOLLOW_S)) is None:
        if records.trouble is not None and records.trouble.code == "uncommitted":
            break
    return record


def commit_interrupted(records: GroupConsumer, written: Consumed) -> None:
    """Commit up to the last record that was written, if that is quick; another interrupt ends it at once."""
    try:
        records.commit(written, timeout=INTERRUPTED_S)
    except LogyardError:
        # What is not committed is read again.
        pass
    except BaseException:
        records.close(leave=False)
        raise


def record_fields(record: Consumed) -> dict[str, object]:
    """Return one record for --json: bytes are text where they are text, else `..._base64`."""
    return {
        "partition": record.partition, "offset": record.offset, "timestamp": record.timestamp,
        **shown("key", record.key), **shown("metadata", record.metadata), **shown("payload", record.payload),
    }  # fmt: skip


def record_line(record: Consumed) -> str:
    """Return one row; tabs and line breaks within text are written as \\t and \\n, other bytes as base64."""
    data = (record.key or b"", record.metadata, record.payload or b"")
    return "\t".join([str(record.partition), str(record.offset), *map(cell, data)])


@click.group("groups")
def groups() -> None:
    """Look at consumer groups: who reads what, how far, and how much is left.

    \b
    Example:
      logyard groups list
      logyard groups describe billing
    """


@groups.command("list")
@servers_option
@json_option
def list_groups(servers: list[str], output: Output) -> None:
    """List the consumer groups: name, members, partitions.

    \b
    Example:
      logyard groups list
    """
    with opened(servers) as yard:
        rows = yard.consumer_groups()
    if not output.json_wanted:
        for row in rows:
            click.echo(f"{row['group']}\t{row['members']}\t{row['partitions']}")
    output.result({"ok": True, "groups": rows})


@groups.command("describe")
@click.argument("name", metavar="GROUP")
@servers_option
@json_option
def describe_group(name: str, servers: list[str], output: Output) -> None:
    """Show each partition of a group: topic, partition, owner, committed offset, end, lag; - is nobody, or nothing yet.

    \b
    Example:
      logyard groups describe billing
    """
    with opened(servers) as yard:
        found = yard.consumer_group(name).describe()
    if not output.json_wanted:
        for one in found["partitions"]:
            cells = (one[key] for key in ("topic", "partition", "owner", "offset", "end", "lag"))
            click.echo("\t".join("-" if cell is None else str(cell) for cell in cells))
    output.result({"ok": True, **found})


@groups.command("reset")
@click.argument("name", metavar="GROUP")
@click.argument("topic_name", metavar="TOPIC")
@click.option("--to", default="earliest", show_default=True, help="earliest, latest, or an offset.")
@click.option("--partition", type=click.IntRange(min=0), help="This one only.")
@servers_option
@json_option
def reset(name: str, topic_name: str, to: str, partition: int | None, servers: list[str], output: Output) -> None:
    """Have a group read a topic from elsewhere; refused while it has members. Prints partition and offset.

    \b
    Example:
      logyard groups reset billing orders --to earliest
    """
    if not (to in ("earliest", "latest") or to.isdecimal()):
        raise click.UsageError("--to is earliest, latest or an offset")
    with opened(servers) as yard:
        offsets = yard.consumer_group(name).reset(
            topic_name, int(to) if to.isdecimal() else to, partition=partition
        )  # fmt: skip
    if not output.json_wanted:
        for number, offset in sorted(offsets.items()):
            click.echo(f"{number}\t{offset}")
    rows = [{"partition": number, "offset": offset} for number, offset in sorted(offsets.items())]
    output.result({"ok": True, "group": name, "topic": topic_name, "offsets": rows})


@groups.command("delete")
@click.argument("name", metavar="GROUP")
@click.option("--yes", is_flag=True, help="Do not ask.")
@servers_option
@json_option
def delete_group(name: str, yes: bool, servers: list[str], output: Output) -> None:
    """Forget a consumer group and its offsets; refused while it has members. Asks first on a terminal.

    \b
    Example:
      logyard groups delete billing --yes
    """
    if not yes and sys.stdin.isatty():
        click.confirm(f"Forget {name} and its offsets?", abort=True, err=True)
    with opened(servers) as yard:
        yard.consumer_group(name).delete()
    output.result({"ok": True, "group": name}, f"deleted {name}")


def commands() -> list[click.Command]:
    """Return the verbs of this module."""
    return [topic, consume, groups]

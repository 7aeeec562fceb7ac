"""The verbs that work with logs of a running cluster: create, list, describe, delete, append, read.

Each opens one blocking client, does one thing and closes it.
Where the cluster is: --servers, else the environment's LOGYARD_SERVERS, else 127.0.0.1:7001. TLS: --tls-ca, --tls-cert
and --tls-key, else LOGYARD_TLS_CA, _CERT and _KEY. Used by `service.cli.root`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click

from .as_text import shown, text_of
from .output import Output, bytes_text, json_option
from .payloads import Source, append_source, complete, input_records, whole_file, write_payload
from .values import since_option

if TYPE_CHECKING:
    from logyard.client.sync import Yard
    from logyard.protocol.records import Page, Record
    from logyard.protocol.tls import TlsConfig

F = TypeVar("F", bound=Callable[..., Any])
PREVIEW_CHARACTERS = 60
COUNT_MAX = 10_000_000
"""A node has no more groups than that, whatever its `groups_max`."""
TIMEOUT = "logyard.timeout"
TLS = "logyard.tls"
TLS_HELP = {
    "ca": "The CA that signed the nodes' certificates; with --tls-cert and --tls-key.",
    "cert": "This client's certificate.",
    "key": "The key to it.",
}


def near_socket(directory: str) -> str:
    """Return the address of the socket in a node's data directory, given that or the directory it is in."""
    from ..addresses import ADMIN

    for place in (Path(directory), Path(directory, "data")):
        if (place / ADMIN).exists():
            return f"unix:{(place / ADMIN).resolve()}"
    raise click.BadParameter(f"{directory!r} is no data directory of a node that runs")


def servers_option(command: F) -> F:
    """Add --servers, which the command receives as a list of "host:port", and --timeout, which `opened` finds."""

    def split(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
        found = [part.strip() for part in value.split(",") if part.strip()]
        for number, address in enumerate(found):
            if "/" in address and not address.startswith("unix:"):
                address = found[number] = near_socket(address)
            if address.startswith("unix:"):
                continue
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or len(port) > 5:
                raise click.BadParameter(f"{address!r} is not HOST:PORT")
        if not found:
            raise click.BadParameter("give at least one HOST:PORT")
        return found

    def keep(context: click.Context, _parameter: click.Parameter, value: float) -> None:
        context.meta[TIMEOUT] = value

    command = click.option(
        "--timeout",
        type=click.FloatRange(min=0.1),
        default=30.0,
        show_default=True,
        expose_value=False,
        callback=keep,
        help="Seconds to go on trying.",
    )(command)
    for name, text in reversed(TLS_HELP.items()):
        command = click.option(
            f"--tls-{name}",
            type=click.Path(dir_okay=False, path_type=Path),
            envvar=f"LOGYARD_TLS_{name.upper()}",
            show_envvar=True,
            expose_value=False,
            callback=keep_tls,
            help=text,
        )(command)
    return click.option(
        "--servers",
        envvar="LOGYARD_SERVERS",
        default="127.0.0.1:7001",
        show_default=True,
        show_envvar=True,
        callback=split,
        help="Client addresses of some nodes, separated by commas.",
    )(command)


def keep_tls(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    """Remember one of the three TLS options for `tls_config`."""
    assert parameter.name is not None
    context.meta.setdefault(TLS, {})[parameter.name.removeprefix("tls_")] = value


def tls_config() -> TlsConfig | None:
    """Return what the three TLS options of the running command add up to."""
    from logyard.protocol.tls import TlsConfig

    given: dict[str, Path | None] = click.get_current_context().meta[TLS]
    ca, certificate, key = (given[name] for name in TLS_HELP)
    if ca is None and certificate is None and key is None:
        return None
    if ca is None or certificate is None or key is None:
        raise click.UsageError("--tls-ca, --tls-cert and --tls-key go together (LOGYARD_TLS_CA, _CERT and _KEY)")
    return TlsConfig(ca=ca, certificate=certificate, key=key)


def members_option(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[int] | None:
    """Parse "1,2,3"."""
    if value is None:
        return None
    try:
        found = [int(part) for part in value.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise click.BadParameter(f"{value!r} is not a list of node numbers such as 1,2,3")
    return found


def arguments_option(_context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, object]:
    """Parse "limit=3": a value is JSON where it is JSON, and text otherwise."""
    found: dict[str, object] = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not key.isidentifier() or not equals:
            raise click.BadParameter(f"{one!r} is not KEY=VALUE")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
        except RecursionError:
            raise click.BadParameter(f"{key} is nested too deep") from None
    return found


@contextmanager
def opened(servers: Sequence[str]) -> Iterator[Yard]:
    """Open a blocking client of the cluster."""
    from logyard.client.sync import connect_sync

    with connect_sync(servers, timeout=click.get_current_context().meta[TIMEOUT], tls=tls_config()) as yard:
        yield yard


@click.command()
@click.argument("names", metavar="[NAME...]", nargs=-1)
@click.option("--count", type=click.IntRange(1, COUNT_MAX), help="Create so many, asleep: PREFIX000 and so on.")
@click.option("--prefix", help="How the names of --count begin.")
@click.option("--members", callback=members_option, help="Nodes that hold it, as 1,2,3 (default: all).")
@click.option("--compress", type=click.Choice(["zstd", "none"]), default="none", help="What appends do by default.")
@click.option("--compact", type=click.Choice(["key", "none"]), default="none", help="Keep each key's newest record.")
@click.option("--machine", default="log", show_default=True, help="What applies its commands: a name the nodes know.")
@click.option("--arg", "arguments", multiple=True, callback=arguments_option, metavar="KEY=VALUE", help="Told to it.")
@servers_option
@json_option
def create(
    names: tuple[str, ...],
    count: int | None,
    prefix: str | None,
    members: list[int] | None,
    compress: str,
    compact: str,
    machine: str,
    arguments: dict[str, object],
    servers: list[str],
    output: Output,
) -> None:
    """Create append logs, or groups of another --machine. With --compress zstd the payloads of logs are stored
    compressed where that makes them smaller; with --compact key every record has a key, and takes the place of the one
    before it with the same. --count creates many at once, asleep: each has its first leader when it is used first.

    \b
    Example:
      logyard create orders payments --members 1,2,3
      logyard create pages --compress zstd
      logyard create visits --machine counter --arg limit=3
      logyard create --count 100000 --prefix device-
    """
    if (count is None) != (prefix is None) or bool(names) == (count is not None):
        raise click.UsageError("give the names, or --count and --prefix")
    options = {} if compress == "none" else {"compress": compress}
    options |= {} if compact == "none" else {"compact": compact}
    if options and machine != "log":
        raise click.UsageError("--compress and --compact are for logs; other machines take --arg KEY=VALUE")
    with opened(servers) as yard:
        if count is None or prefix is None:
            yard.create_many(names, members=members, machine=machine, **{**options, **arguments})
            output.result({"ok": True, "created": list(names)}, f"created {', '.join(names)}")
            return
        width = len(str(count - 1))
        numbered = (f"{prefix}{number:0{width}}" for number in range(count))
        new = yard.create_batch(numbered, members=members, machine=machine, **{**options, **arguments})
    first, last = f"{prefix}{0:0{width}}", f"{prefix}{count - 1}"
    output.result({"ok": True, "new": new, "first": first, "last": last}, f"created {new}: {first} to {last}")


@click.command("list")
@click.option("--prefix", default="", help="Only names that begin so.")
@servers_option
@json_option
def list_logs(prefix: str, servers: list[str], output: Output) -> None:
    """List the logs.

    \b
    Example:
      logyard list --prefix ord
    """
    with opened(servers) as yard:
        found = [group for group in yard.list() if group["name"].startswith(prefix)]
    found.sort(key=lambda group: str(group["name"]))
    columns = ("name", "state", "role", "leader", "term", "commit", "applied")
    output.table(f"{len(found)} logs", columns, ([group.get(key, "") for key in columns] for group in found))
    output.result({"ok": True, "logs": found})


@click.command()
@click.argument("name")
@click.option("--node", type=click.IntRange(min=1), help="As this member has it, led or not (default: the leader).")
@servers_option
@json_option
def describe(name: str, node: int | None, servers: list[str], output: Output) -> None:
    """Show everything known of one log: members, leader, range, state and why it stopped, if it did.

    \b
    Examples:
      logyard describe orders
      logyard describe orders --node 2
    """
    with opened(servers) as yard:
        found = yard.describe(name, node)
    output.table(name, ("field", "value"), sorted(found.items()))
    output.result({"ok": True, **found})


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force-on", type=int, help="Node to delete from when most members are gone or stopped.")
@servers_option
@json_option
def delete(names: tuple[str, ...], yes: bool, force_on: int | None, servers: list[str], output: Output) -> None:
    """Delete logs with everything in them, on every member. Asks first on a terminal. One that fails does not keep the
    others; exit 1 if any did.

    \b
    Example:
      logyard delete orders --yes
      logyard delete orders --yes --force-on 1
    """
    from logyard.protocol.errors import LogyardError

    if not yes and sys.stdin.isatty():
        click.confirm(f"Delete {', '.join(names)} with all records?", abort=True, err=True)
    deleted: list[str] = []
    failed: dict[str, dict[str, str]] = {}
    with opened(servers) as yard:
        for name in dict.fromkeys(names):
            try:
                yard.delete(name, force_on)
            except LogyardError as error:
                if len(names) == 1:
                    raise
                failed[name] = {"code": error.code, "message": error.message}
                click.echo(f"error: {name}: {error}", err=True)
            else:
                deleted.append(name)
    # `error`, as of every command that fails: the first.
    first = {"error": next(iter(failed.values()))} if failed else {}
    fields = {"ok": not failed, **first, "deleted": deleted, "failed": failed}
    output.result(fields, f"deleted {', '.join(deleted)}" if deleted else None)


@click.command()
@click.argument("name")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--metadata", help="Metadata of every record (default: a file's path; nothing for lines).")
@click.option("--whole", is_flag=True, help="All of standard input is one record, not one record a line.")
@click.option(
    "--file",
    "more",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="As FILES: a file is one record of up to 4 GiB, streamed in pieces.",
)
@click.option("--compress", type=click.Choice(["zstd", "none"]), help="Instead of what the log's option says.")
@click.option("--key", help="Key of every record, for a log that was created with --compact key.")
@servers_option
@json_option
def append(
    name: str,
    files: tuple[Path, ...],
    metadata: str | None,
    whole: bool,
    more: tuple[Path, ...],
    compress: str | None,
    key: str | None,
    servers: list[str],
    output: Output,
) -> None:
    """Append records: each file is one, or each line of standard input.

    \b
    Examples:
      echo hello | logyard append orders
      logyard append orders invoice.pdf receipt.pdf
      logyard append films --file feature.mkv
    """
    records = payload_bytes = 0
    runs: list[range] = []
    fields: dict[str, object] = {"log": name, "records": 0, "payload_bytes": 0}
    with opened(servers) as yard:
        log = yard.log(name)
        for batch in batches(input_records((*files, *more), metadata, whole)):
            head, payload = batch[0]
            if not isinstance(payload, bytes):
                if key is not None:
                    raise click.UsageError("a record with --key has up to 1 MiB: it is not streamed")
                offset, size = append_source(log, head, payload, compress)
                offsets = range(offset, offset + 1)
            else:
                whole_ones = [(head, payload) for head, payload in batch if isinstance(payload, bytes)]
                keys = None if key is None else [key.encode()] * len(whole_ones)
                offsets = log.append_many(whole_ones, compress=compress, keys=keys)
                size = sum(len(payload) for _, payload in whole_ones)
            add_run(runs, offsets)
            # Not `len`: a range may be longer than that can say.
            records += offsets.stop - offsets.start
            payload_bytes += size
            fields.update(records=records, payload_bytes=payload_bytes, first=runs[0].start, last=runs[-1].stop - 1)
            output.did(fields, f"{records} records before it are stored, at offsets {runs_text(runs)}")
    where = f"at offsets {runs_text(runs)}" if runs else "(the input was empty)"
    output.result({"ok": True, **fields}, f"{records} records {where}")


def add_run(runs: list[range], more: range) -> None:
    """Take offsets behind those that there are, as ranges however many they are."""
    if runs and runs[-1].stop == more.start:
        runs[-1] = range(runs[-1].start, more.stop)
    elif more:
        runs.append(more)


def runs_text(runs: Sequence[range]) -> str:
    """Return ranges of offsets for people: others append as well, so there may be gaps; of many the first and the
    last."""
    shown = runs if len(runs) <= RUNS_SHOWN else [*runs[: RUNS_SHOWN - 1], runs[-1]]
    words = [f"{run.start} to {run.stop - 1}" for run in shown]
    if len(shown) < len(runs):
        words.insert(-1, f"{len(runs) - len(shown)} more ranges")
    return ", ".join(words)


RUNS_SHOWN = 8


BATCH_RECORDS = 512
BATCH_BYTES = 1 << 20


def batches(records: Iterator[tuple[bytes, Source]]) -> Iterator[list[tuple[bytes, Source]]]:
    """Yield groups of records small enough for one call; what is to be streamed comes alone."""
    batch: list[tuple[bytes, Source]] = []
    size = 0
    for record in records:
        if not isinstance(record[1], bytes):
            if batch:
                yield batch
            yield [record]
            batch, size = [], 0
            continue
        batch.append(record)
        size += len(record[1])
        if len(batch) >= BATCH_RECORDS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@click.command()
@click.argument("name")
@click.option("--from", "start", type=click.IntRange(min=0), help="First offset (default: the log's start).")
@click.option(
    "--since", callback=since_option, help="Instead: from then on, as 2026-01-31T12:00 (UTC) or ms since 1970."
)
@click.option("--to", "stop", type=click.IntRange(min=0), help="Offset to stop before (default: the log's end).")
@click.option("--count", type=click.IntRange(min=1), help="At most this many records.")
@click.option("--follow", is_flag=True, help="Wait for more at the end; with --json give --count or --to too.")
@click.option("--node", type=click.IntRange(min=1), help="Ask this member and no other.")
@click.option("--raw", is_flag=True, help="Write payload bytes only, one after the other.")
@click.option("--metadata-only", is_flag=True, help="Leave the payloads where they are.")
@click.option(
    "--body-to",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Stream the payloads of the records into this file, one after the other; show the rest.",
)
@servers_option
@json_option
def read(
    name: str,
    start: int | None,
    since: int | None,
    stop: int | None,
    count: int | None,
    follow: bool,
    node: int | None,
    raw: bool,
    metadata_only: bool,
    body_to: Path | None,
    servers: list[str],
    output: Output,
) -> None:
    """Read records in order.

    \b
    Examples:
      logyard read orders --from 10 --count 5
      logyard read orders --since 2026-01-31T12:00 --follow
      logyard read films --from 3 --count 1 --body-to feature.mkv
    """
    if follow and output.json_wanted and count is None and stop is None:
        raise click.UsageError("--follow --json never ends: give --count or --to")
    if start is not None and since is not None:
        raise click.UsageError("--from goes without --since")
    if raw and (metadata_only or output.json_wanted):
        raise click.UsageError("--raw goes with neither --metadata-only nor --json")
    if body_to is not None and (raw or metadata_only):
        raise click.UsageError("--body-to goes with neither --raw nor --metadata-only")
    shown: list[dict[str, object]] = []
    with opened(servers) as yard, ExitStack() as stack:
        log = yard.log(name)
        start = start if since is None else log.seek(since, node=node)
        binary: BinaryIO | None = sys.stdout.buffer if raw else None
        metadata_only = metadata_only or body_to is not None
        found = pages(yard, name, start, stop, count, follow, node, raw or not metadata_only)
        if body_to is not None:
            # Nothing is opened before the first answer: an unknown log, say, leaves the file as it is.
            found = chain([*islice(found, 1)], found)
            # Ctrl-C is how most that follow end, and what came is theirs.
            binary = stack.enter_context(body_to.open("wb") if follow else whole_file(body_to))
        for record, page in found:
            if binary is not None:
                write_payload(log, record, page, binary)
            else:
                complete(log, record, page, not output.json_wanted)
            if raw:
                continue
            if output.json_wanted:
                shown.append(record_fields(record, metadata_only))
            else:
                click.echo(record_line(record, metadata_only))
    if not raw:
        output.result({"ok": True, "log": name, "records": shown})


PAGE_RECORDS = 256
PAGE_BYTES = 4 << 20
FOLLOW_WAIT_S = 5.0


def pages(
    yard: Yard,
    name: str,
    start: int | None,
    stop: int | None,
    count: int | None,
    follow: bool,
    node: int | None,
    bodies: bool,
) -> Iterator[tuple[Record, Page]]:
    """Yield (record, the page that it came in) from `start` to `stop`, the end, or for ever with `follow`. Raises
    `UnknownGroup` when the log was deleted meanwhile, also where another one has its name."""
    log = yard.log(name)
    if start is None:
        start = log.latest(node=node, consistency="leader" if node is None else "local").start
    at, uid = start, 0
    left = count if count is not None else sys.maxsize
    while left > 0 and (stop is None or at < stop):
        most = min(PAGE_RECORDS, left, sys.maxsize if stop is None else stop - at)
        wait = FOLLOW_WAIT_S if follow else 0.0
        page = log.poll(at, max_records=most, max_bytes=PAGE_BYTES, wait=wait, node=node, bodies=bodies, uid=uid)
        uid = page.uid
        for record in page:
            if stop is not None and record.offset >= stop:
                # So many records of a keyed log may reach far behind it.
                return
            yield record, page
            left -= 1
        if not len(page) and not follow:
            return
        at = page.next


def record_fields(record: Record, metadata_only: bool) -> dict[str, object]:
    """Return one record for --json: `metadata` and `payload` are text where they are text, else `..._base64`."""
    fields: dict[str, object] = {
        "offset": record.offset,
        "index": record.index,
        "term": record.term,
        "timestamp": record.timestamp,
        "size": record.size,
        "stored": record.stored,
    }
    fields.update(shown("metadata", bytes(record.metadata)))
    if not metadata_only and record.payload is not None:
        fields.update(shown("payload", bytes(record.payload)))
    return fields


def record_line(record: Record, metadata_only: bool) -> str:
    """Return one record for a human: offset, metadata, the beginning of the payload."""

    def preview(data: bytes) -> str:
        text = text_of(data[: 4 * PREVIEW_CHARACTERS])
        if text is None:
            return f"<{bytes_text(len(data))}>"
        line = text.replace("\n", "\\n")
        return line if len(line) <= PREVIEW_CHARACTERS else line[: PREVIEW_CHARACTERS - 3] + "..."

    words = [str(record.offset), preview(bytes(record.metadata))]
    if not metadata_only and record.payload is not None:
        words.append(preview(bytes(record.payload)))
    return "\t".join(words)


def commands() -> list[click.Command]:
    """Return the verbs of this module."""
    return [create, list_logs, describe, delete, append, read]

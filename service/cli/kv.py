"""The verbs of KV groups: get, put, del, watch, txn, and what belongs to them.

Keys and values are text as the shell gives it; with --json what is no text is base64. Lines are separated by tabs: key,
mod revision, value. Used by `service.cli.root`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .as_text import shown, text_of
from .logs import members_option, opened, servers_option
from .output import Output, failure, json_option

if TYPE_CHECKING:
    from logyard.protocol.kv import Changes, Compare, KeyValue, Operation, Result

STALE = click.option("--stale", is_flag=True, help="Whatever the leader has applied, without asking the others.")
PREFIX = click.option("--prefix", is_flag=True, help="All keys that begin with KEY ('' for all).")
TXN_KEYS = ("compare", "then", "else")
SHOWN = 60
"""Characters of JSON that an error repeats."""
END = click.option("--end", help="Keys from KEY up to, but without, this one.")


def data_of(text: str) -> bytes:
    """Return bytes of an argument, also of one that is not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def end_of(end: str | None) -> bytes | None:
    """Return bytes of --end, if it is given."""
    return None if end is None else data_of(end)


def fields_of(one: KeyValue) -> dict[str, object]:
    """Return a key for --json."""
    return {
        **shown("key", one.key), **shown("value", one.value), "create_revision": one.create_revision,
        "mod_revision": one.mod_revision, "version": one.version, "lease": one.lease,
    }  # fmt: skip


def line_of(one: KeyValue) -> str:
    """Return a key for a human or a script."""
    return "\t".join((printable(one.key), str(one.mod_revision), printable(one.value)))


def printable(data: bytes) -> str:
    """Return text with tabs and line ends escaped; other bytes as \\x.."""
    text = data.decode("utf-8", "backslashreplace").replace("\\", "\\\\") if text_of(data) else ""
    if not text and data:
        text = data.decode("latin-1").encode("unicode_escape").decode()
    return text.replace("\t", "\\t").replace("\n", "\\n")


@click.group("kv")
def kv_group() -> None:
    """Use keys with values: put, get, del, txn, watch. NAME is that of the group.

    \b
    Example:
      logyard kv create settings && logyard kv put settings color blue && logyard kv get settings color
    """


@kv_group.command("create")
@click.argument("name")
@click.option("--members", callback=members_option, help="Nodes that hold it, as 1,2,3 (default: all).")
@click.option("--history", type=click.IntRange(min=0), help="Older revisions to keep (default: 100000).")
@click.option("--history-bytes", type=click.IntRange(min=0), help="As much, in bytes (default: 268435456).")
@servers_option
@json_option
def create(
    name: str,
    members: list[int] | None,
    history: int | None,
    history_bytes: int | None,
    servers: list[str],
    output: Output,
) -> None:
    """Create a KV group.

    \b
    Example:
      logyard kv create settings --members 1,2,3 --history 10000
    """
    given = {"history": history, "history_bytes": history_bytes}
    with opened(servers) as yard:
        options = {key: value for key, value in given.items() if value is not None}
        yard.create(name, members=members, machine="kv", **options)
    output.result({"ok": True, "created": name}, f"created {name}")


@kv_group.command()
@click.argument("name")
@click.argument("key")
@PREFIX
@END
@click.option("--revision", type=click.IntRange(min=0), default=0, help="As it was at that revision.")
@click.option("--limit", type=click.IntRange(min=0), default=0, help="At most so many keys.")
@click.option("--keys-only", is_flag=True, help="Without values.")
@click.option("--raw", is_flag=True, help="Write the value's bytes and nothing else.")
@STALE
@servers_option
@json_option
def get(
    name: str,
    key: str,
    prefix: bool,
    end: str | None,
    revision: int,
    limit: int,
    keys_only: bool,
    raw: bool,
    stale: bool,
    servers: list[str],
    output: Output,
) -> None:
    """Get a key, or a range of keys. Exit 1: there is no such key.

    \b
    Examples:
      logyard kv get settings color
      logyard kv get settings jobs/ --prefix --limit 10 --json
    """
    with opened(servers) as yard:
        found = yard.kv(name).range(
            data_of(key), end_of(end), prefix=prefix, revision=revision, limit=limit, keys_only=keys_only,
            consistency="leader" if stale else "linearizable",
        )  # fmt: skip
    missing = not found.kvs and not prefix and end is None
    if raw and not output.json_wanted:
        sys.stdout.buffer.write(b"".join(one.value for one in found.kvs))
    elif not output.json_wanted:
        for one in found.kvs:
            click.echo(line_of(one))
    fields: dict[str, object] = {"ok": True}
    if missing:
        fields = failure("key_not_found", f"no key {key!r}")
        click.echo(f"no key {key!r}", err=True)
    fields |= {"kv": name, "revision": found.revision, "count": found.count, "more": found.more}
    output.result({**fields, "keys": [fields_of(one) for one in found.kvs]})


@kv_group.command()
@click.argument("name")
@click.argument("key")
@click.argument("value", required=False)
@click.option("--file", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The value.")
@click.option("--lease", type=click.IntRange(min=0), default=0, help="The key goes when that lease ends.")
@click.option("--previous", is_flag=True, help="Show what was there before.")
@servers_option
@json_option
def put(
    name: str,
    key: str,
    value: str | None,
    path: Path | None,
    lease: int,
    previous: bool,
    servers: list[str],
    output: Output,
) -> None:
    """Set a key to VALUE, to a file's content, or to standard input.

    \b
    Examples:
      logyard kv put settings color blue
      logyard kv put settings logo --file logo.png
    """
    if value is not None and path is not None:
        raise click.UsageError("give a VALUE or a --file")
    data = data_of(value) if value is not None else path.read_bytes() if path is not None else sys.stdin.buffer.read()
    with opened(servers) as yard:
        done = yard.kv(name).put(data_of(key), data, lease=lease, previous=previous)
    fields: dict[str, object] = {"ok": True, "kv": name, "revision": done.revision}
    if previous:
        fields["previous"] = None if done.previous is None else fields_of(done.previous)
    text = str(done.revision) if done.previous is None else f"{done.revision}\t{line_of(done.previous)}"
    output.result(fields, text)


@kv_group.command("del")
@click.argument("name")
@click.argument("key")
@PREFIX
@END
@servers_option
@json_option
def delete(name: str, key: str, prefix: bool, end: str | None, servers: list[str], output: Output) -> None:
    """Delete a key, or a range of keys, at one revision; says how many there were.

    \b
    Example:
      logyard kv del settings jobs/ --prefix
    """
    with opened(servers) as yard:
        done = yard.kv(name).delete(data_of(key), end_of(end), prefix=prefix)
    output.result({"ok": True, "kv": name, "revision": done.revision, "deleted": done.deleted}, str(done.deleted))


@kv_group.command()
@click.argument("name")
@servers_option
@json_option
def txn(name: str, servers: list[str], output: Output) -> None:
    """Run a transaction, as JSON from standard input. Exit 0 whichever branch was taken.

    \b
    {"compare": [["color", "value", "=", "blue"], ["n", "version", ">", 2]],
     "then": [["put", "color", "red"], ["delete", "n"], ["get", "color"]], "else": []}

    \b
    Example:
      echo '{"compare": [["a", "version", "=", 0]], "then": [["put", "a", "1"]]}' | logyard kv txn settings
    """
    try:
        asked = json.load(sys.stdin)
        compare, then, otherwise = lists_of(asked)
        compares = [compare_of(one) for one in compare]
        operations = [[operation_of(one) for one in branch] for branch in (then, otherwise)]
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"standard input is no transaction: {error}") from None
    with opened(servers) as yard:
        done = yard.kv(name).txn(compares, *operations)
    fields = {"ok": True, "kv": name, "revision": done.revision, "succeeded": done.succeeded}
    results = [result_fields(one) for one in done.results]
    if not output.json_wanted:
        click.echo(f"{'then' if done.succeeded else 'else'}\t{done.revision}")
        for one in done.results:
            for kv in getattr(one, "kvs", ()):
                click.echo(line_of(kv))
    output.result({**fields, "results": results})


def lists_of(asked: object) -> list[list[Any]]:
    """Return what a transaction's JSON has under each of its keys. Raises ValueError."""
    there_are = f"a transaction is an object with the keys {', '.join(TXN_KEYS)}"
    if not isinstance(asked, dict):
        raise ValueError(f"{json.dumps(asked)[:SHOWN]} is no object: {there_are}")
    if unknown := [key for key in asked if key not in TXN_KEYS]:
        raise ValueError(f"unknown key {', '.join(map(repr, unknown))}: {there_are}")
    found = [asked.get(key, []) for key in TXN_KEYS]
    for key, value in zip(TXN_KEYS, found, strict=True):
        if not isinstance(value, list):
            raise ValueError(f"{key} is no list: {json.dumps(value)[:SHOWN]}")
    return found


def compare_of(given: object) -> Compare:
    """Return one compare of a transaction's JSON. Raises ValueError."""
    from logyard.protocol.kv import Compare

    match given:
        case [str(key), "value", str(relation), str(operand)]:
            return Compare(data_of(key), "value", relation, data_of(operand))
        case [str(key), str(target), str(relation), int(operand)] if target != "value":
            return Compare(data_of(key), target, relation, operand)
    raise ValueError(f'{given!r} is not [key, "value", relation, text] or [key, target, relation, number]')


def operation_of(given: Sequence[Any]) -> Operation:
    """Return one operation of a transaction's JSON. Raises ValueError."""
    from logyard.protocol.kv import Delete, Get, Put

    match given:
        case ["put", str(key), str(value)]:
            return Put(data_of(key), data_of(value))
        case ["delete", str(key)]:
            return Delete(data_of(key))
        case ["delete", str(key), str(end)]:
            return Delete(data_of(key), data_of(end))
        case ["get", str(key)]:
            return Get(data_of(key))
        case ["get", str(key), str(end)]:
            return Get(data_of(key), data_of(end))
    raise ValueError(f'{given!r} is not ["put", key, value], ["delete", key] or ["get", key]')


def result_fields(one: Result) -> dict[str, object]:
    """Return one operation's result for --json."""
    kvs = getattr(one, "kvs", None)
    if kvs is not None:
        return {"keys": [fields_of(kv) for kv in kvs]}
    deleted = getattr(one, "deleted", None)
    return {} if deleted is None else {"deleted": deleted}


@kv_group.command()
@click.argument("name")
@click.argument("key")
@PREFIX
@END
@click.option("--from", "start", type=click.IntRange(min=0), default=0, help="First revision (default: from now on).")
@click.option("--count", type=click.IntRange(min=1), help="End after so many events.")
@servers_option
@json_option
def watch(
    name: str,
    key: str,
    prefix: bool,
    end: str | None,
    start: int,
    count: int | None,
    servers: list[str],
    output: Output,
) -> None:
    """Show what changes, as it happens: revision, put or delete, key, value.

    \b
    Examples:
      logyard kv watch settings '' --prefix
      logyard kv watch settings color --from 2 --count 1 --json
    """
    if output.json_wanted and count is None:
        raise click.UsageError("watch --json never ends: give --count")
    events: list[dict[str, object]] = []
    left = count
    with opened(servers) as yard:
        for changes in yard.kv(name).watch(data_of(key), end_of(end), prefix=prefix, start=start):
            for fields, line in events_of(changes):
                if output.json_wanted:
                    events.append(fields)
                else:
                    click.echo(line)
                left = None if left is None else left - 1
                if left == 0:
                    break
            if left == 0:
                break
    output.result({"ok": True, "kv": name, "events": events})


def events_of(changes: Changes) -> list[tuple[dict[str, object], str]]:
    """Return each event for --json and as a line."""
    found: list[tuple[dict[str, object], str]] = []
    for event in changes.events:
        if event.kv is None:
            fields: dict[str, object] = {"type": "delete", "revision": changes.revision, **shown("key", event.key)}
            found.append((fields, f"{changes.revision}\tdelete\t{printable(event.key)}\t"))
        else:
            line = f"{changes.revision}\tput\t{printable(event.key)}\t{printable(event.kv.value)}"
            found.append(({"type": "put", "revision": changes.revision, **fields_of(event.kv)}, line))
    return found


@kv_group.command()
@click.argument("name")
@click.argument("revision", type=click.IntRange(min=1))
@servers_option
@json_option
def compact(name: str, revision: int, servers: list[str], output: Output) -> None:
    """Forget the history before REVISION; what only it could read is given back.

    \b
    Example:
      logyard kv compact settings 1000
    """
    with opened(servers) as yard:
        yard.kv(name).compact(revision)
    output.result({"ok": True, "kv": name, "compacted": revision}, f"compacted {revision}")


@kv_group.command("status")
@click.argument("name")
@servers_option
@json_option
def status(name: str, servers: list[str], output: Output) -> None:
    """Show revision, keys, leases and history of a group.

    \b
    Example:
      logyard kv status settings
    """
    with opened(servers) as yard:
        found = yard.kv(name).status()
    output.result({"ok": True, "kv": name, **found}, "\n".join(f"{key}\t{value}" for key, value in found.items()))


def commands() -> list[click.Command]:
    """Return the verbs of this module."""
    return [kv_group]

"""The verbs for what a forced shrink split off: files of entries that a replica held and its group's lineage has not.

They work on a node's directory, running or not: a node writes such a file once and never reads it. Registered by
`service.cli.root`.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import click

from .output import Output, json_option

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def forks() -> None:
    """List, export or drop entries that replicas held and their group's lineage has not: kept when they left.

    \b
    Example:
      logyard forks list ./yard
    """


@forks.command("list")
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@json_option
def list_(directory: Path, output: Output) -> None:
    """List the files of a node or of a local cluster's nodes, each with its log and its entries. Exit 1 if any is
    damaged.

    \b
    Example:
      logyard forks list ./yard
    """
    from logyard.pipeline.directory.places import data_directories
    from logyard.protocol.errors import Corrupt

    from ..fork_files import fork_files, read_fork, records_in

    found: list[dict[str, Any]] = []
    damaged: list[dict[str, Any]] = []
    for data in data_directories(directory):
        for path in fork_files(data):
            try:
                head, entries = read_fork(path)
            except Corrupt as error:
                damaged.append({"file": str(path), "offset": error.details["offset"]})
                output.say(f"{path}  DAMAGED at byte {error.details['offset']}: nothing of it is certain")
                continue
            records = sum(1 for _ in records_in(entries))
            row = {key: head[key] for key in ("name", "uid", "machine", "node", "first", "last", "commit")}
            row = {"file": str(path), **row, "uid": f"{head['uid']:016x}", "records": records}
            row["bytes"] = path.stat().st_size
            found.append(row)
            output.say(
                f"{path}  {head['name']} of node {head['node']}: entries {head['first']} to {head['last']} "
                f"(committed up to {head['commit']}), {records} records"
            )
    text = f"{len(found)} forks" + (f", {len(damaged)} damaged files" if damaged else "")
    output.result({"ok": not damaged, "forks": found, "damaged": damaged}, text)


@forks.command()
@click.argument("file", type=FILE)
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@json_option
def export(file: Path, directory: Path, output: Output) -> None:
    """Write a fork's records to DIR: records.jsonl, and each payload as a file of its own.

    \b
    Example:
      logyard forks export ./yard/node-2/data/forks/9d0c...-17-40.fork ./orders-fork
    """
    from ..fork_files import read_fork, records_in

    if directory.exists() and any(directory.iterdir()):
        raise click.BadParameter(f"{directory} is not empty", param_hint="DIR")
    head, entries = read_fork(file)
    directory.mkdir(parents=True, exist_ok=True)
    count = payloads = 0
    terms = {entry["index"]: entry["term"] for entry in entries}
    with (directory / "records.jsonl").open("w", encoding="utf-8") as lines:
        for record in records_in(entries):
            row: dict[str, Any] = {"index": record.index, "term": terms[record.index], "ordinal": record.ordinal}
            row["command"] = base64.b64encode(record.command).decode()
            row["metadata"] = base64.b64encode(record.head).decode()
            row["committed"] = record.index <= head["commit"]
            row["encoded"] = record.encoded
            if record.parts is not None:
                row["payload"] = f"{record.index}-{record.ordinal}.payload"
                with (directory / row["payload"]).open("wb") as payload:
                    payload.writelines(record.parts)
                payloads += 1
            if record.missing:
                row["missing_bytes"] = record.missing
            lines.write(json.dumps(row) + "\n")
            count += 1
    fields = {"ok": True, "log": head["name"], "records": count, "payloads": payloads, "directory": str(directory)}
    output.result(fields, f"{count} records of {head['name']} in {directory}")


@forks.command()
@click.argument("file", type=FILE)
@json_option
def drop(file: Path, output: Output) -> None:
    """Remove a fork's file for good, a damaged one too.

    \b
    Example:
      logyard forks drop ./yard/node-2/data/forks/9d0c...-17-40.fork
    """
    from logyard.protocol.errors import Corrupt

    from ..fork_files import is_fork_name, read_fork

    log = ""
    try:
        log = read_fork(file)[0]["name"]
    except Corrupt:
        # It may be any file, but for its place and name.
        if not is_fork_name(file):
            raise
    file.unlink()
    output.result({"ok": True, "log": log, "file": str(file)}, f"{file} is removed")


def commands() -> list[click.Command]:
    """Return the verbs of this module."""
    return [forks]

"""Verbs for groups of machines of one's own: `command` and `query`. Registered by `service.cli.root`.

What a machine takes and answers is bytes: given as text, as hexadecimal or as a file, shown as text where it is text.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from logyard.protocol.errors import WrongKind

from .logs import opened, servers_option
from .output import Output, json_option, text_or_hex

if TYPE_CHECKING:
    from logyard.client.sync import Yard

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FACES = {
    "log": "append, read, retain and truncate", "kv": "kv", "queue": "queue", "groups": "groups", "topics": "topic",
}  # fmt: skip
"""The verbs for built-in machines, whose commands and answers are not for people to write and read."""


def request_of(text: str, hexadecimal: bool) -> bytes:
    """Return the bytes that the command line means."""
    if not hexadecimal:
        return text.encode()
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not hexadecimal: {error}", param_hint="REQUEST") from None


def check_own(yard: Yard, name: str, node: int | None = None) -> None:
    """Raise `WrongKind` for a group of a built-in machine."""
    kind = str(yard.describe(name, node)["machine"])
    if kind in FACES:
        raise WrongKind.told(
            f"{name}: this verb is for machines of your own, and that is a {kind} group; for it there are the verbs "
            f"{FACES[kind]}",
            {"name": name, "kind": kind, "wanted": "own"},
        )


def show(name: str, reply: bytes, output: Output) -> None:
    """Print a reply."""
    fields = {"ok": True, "group": name, "reply": text_or_hex(reply), "reply_hex": reply.hex()}
    output.result(fields, text_or_hex(reply))


hex_option = click.option("--hex", "hexadecimal", is_flag=True, help="What is given is hexadecimal.")


@click.command()
@click.argument("name")
@click.argument("request", metavar="COMMAND")
@hex_option
@click.option("--payload", type=FILE, help="A file that goes with it as its payload.")
@click.option("--metadata", default="", help="Metadata of that payload.")
@servers_option
@json_option
def command(
    name: str, request: str, hexadecimal: bool, payload: Path | None, metadata: str, servers: list[str], output: Output
) -> None:
    """Have a machine of one's own apply a command, exactly once; prints its reply.

    \b
    Example:
      logyard command visits up --payload picture.png
    """
    with opened(servers) as yard:
        check_own(yard, name)
        body = None if payload is None else payload.read_bytes()
        reply = yard.machine(name).command(request_of(request, hexadecimal), body, metadata=metadata.encode())
    show(name, bytes(reply), output)


@click.command()
@click.argument("name")
@click.argument("request", default="")
@hex_option
@click.option("--node", type=click.IntRange(min=1), help="Ask this node's member, as it stands.")
@servers_option
@json_option
def query(name: str, request: str, hexadecimal: bool, node: int | None, servers: list[str], output: Output) -> None:
    """Ask a machine of one's own; prints its answer.

    \b
    Example:
      logyard query visits count
    """
    with opened(servers) as yard:
        check_own(yard, name, node)
        answer = yard.machine(name).query(request_of(request, hexadecimal), node=node)
    show(name, bytes(answer), output)


def commands() -> list[click.Command]:
    """Return the verbs of this module."""
    return [command, query]

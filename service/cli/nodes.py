"""The verbs about the cluster's nodes, as its catalogue has them: list, invite, drain, admit, declare-dead, remove.

Registered by `service.cli.root`.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import TYPE_CHECKING

import click

from .logs import opened, servers_option
from .output import Output, json_option

if TYPE_CHECKING:
    from logyard.client.sync import Yard

NODE = click.IntRange(min=1)
TOKEN_BYTES = 24


@click.group()
def nodes() -> None:
    """Show the nodes of a cluster with a catalogue, invite new ones, and let nodes go.

    \b
    Examples:
      logyard nodes list
      logyard nodes invite
    """


@nodes.command("list")
@click.option("--all", "everything", is_flag=True, help="Also those that were removed.")
@servers_option
@json_option
def list_nodes(everything: bool, servers: list[str], output: Output) -> None:
    """List the nodes: state, addresses, zone, and how many logs have a member there.

    \b
    Example:
      logyard nodes list
    """
    with opened(servers) as yard:
        found = yard.catalog("nodes", "list", {"removed": everything})
    rows = found["result"]
    output.table(
        "nodes", ("node", "state", "peers", "clients", "zone", "logs"),
        [(row["node"], row["state"], row["peer"], row["client"], row["zone"], row["held"]) for row in rows],
    )  # fmt: skip
    fields = {key: found[key] for key in ("leader", "applied", "trouble")}
    output.result({"ok": True, "nodes": rows, **fields}, found["trouble"] or None)


def invitation(yard: Yard, hours: float = 1.0, replaces: int = 0) -> tuple[str, int]:
    """Have the cluster take one more node; return the token, and until when (ms) it holds."""
    token, for_ms = secrets.token_urlsafe(TOKEN_BYTES), int(hours * 3_600_000)
    until = int(time.time() * 1000) + for_ms
    # `until` is for a node that does not know `for_ms`.
    values = {
        "hash": hashlib.sha256(token.encode()).digest(), "for_ms": for_ms, "until": until, "replaces": replaces,
    }  # fmt: skip
    yard.change_catalog("nodes", "invite", values)
    return token, until


@nodes.command()
@click.option("--hours", type=click.FloatRange(min=0.01, max=24 * 30), default=1.0, show_default=True, help="How long.")
@click.option("--replaces", type=NODE, help="The new node takes the members of this one, which is gone for good.")
@servers_option
@json_option
def invite(hours: float, replaces: int | None, servers: list[str], output: Output) -> None:
    """Invite a new node: print a token that one empty directory can join with.

    The token is shown once; the cluster keeps its hash. The first directory that uses it has it for itself.

    \b
    Example:
      logyard nodes invite
    """
    with opened(servers) as yard:
        token, until = invitation(yard, hours, replaces or 0)
        server = servers[0] if not servers[0].startswith("unix:") else "HOST:PORT"
    text = f"{token}\non the new node: logyard serve --config node.toml --join {server} --token {token}"
    output.result({"ok": True, "token": token, "until_ms": until, "replaces": replaces}, text)


@nodes.command()
@click.argument("node", type=NODE)
@click.option("--with", "by", type=NODE, required=True, help="The node that takes its members.")
@servers_option
@json_option
def replace(node: int, by: int, servers: list[str], output: Output) -> None:
    """Let one node take the members of another, which drains if it is not dead; "logyard plan" shows how far it is.

    \b
    Example:
      logyard nodes replace 3 --with 4
    """
    with opened(servers) as yard:
        state = yard.change_catalog("nodes", "replace", {"node": node, "by": by})
    output.result({"ok": True, "node": node, "by": by, "state": state}, f"node {node} is {state}; node {by} follows it")


def _state(verb: str, command: str, help_text: str, done: str, force: str = "") -> click.Command:
    """Return a verb that brings a node to another state. `force`: the help of its flag, for one that has it."""

    @click.argument("node", type=NODE)
    @servers_option
    @json_option
    def run(node: int, servers: list[str], output: Output, **forced: bool) -> None:
        with opened(servers) as yard:
            state = yard.change_catalog("nodes", command, {"node": node, **forced})
        output.result({"ok": True, "node": node, "state": state}, f"node {node} is {state}{done}")

    if force:
        run = click.option("--force", is_flag=True, help=force)(run)
    return click.command(verb, help=f"{help_text}\n\n\b\nExample:\n  logyard nodes {verb} 3")(run)


STATES = (
    _state(
        "drain", "drain",
        "Let a node get nothing new, and give up what it has. Where no other node can take it, because logs have a "
        'member on each, add a node or have fewer copies: "logyard members remove --all --node N".',
        "; `logyard plan` shows what moves, `logyard nodes list` what is left",
    ),
    _state("admit", "admit", "Let a node that drains, or was dead and is heard of again, get members again.", ""),
    _state(
        "declare-dead", "declare_dead",
        "Declare a node dead that will not come back with its data, without waiting.", "",
        "Although it is heard of: its members are replaced at once, from the others.",
    ),
    _state("remove", "remove", "Remove a node that has no members any more; its number is never used again.", ""),
)  # fmt: skip
for _command in STATES:
    nodes.add_command(_command)


def commands() -> list[click.Command]:
    """Return what the command line registers."""
    return [nodes]

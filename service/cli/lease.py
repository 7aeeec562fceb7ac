"""The verbs of a KV group's leases: grant, revoke, keepalive, ttl, list. `logyard kv put --lease` attaches a key.

Lines are separated by tabs; times are seconds. Used by `service.cli.root`.
"""

from __future__ import annotations

import threading

import click

from .as_text import shown
from .kv import printable
from .logs import opened, servers_option
from .output import Output, json_option

LEASE = click.argument("lease", type=click.IntRange(min=1))
RENEWALS = 3
"""In a lease's time: two may come late."""


@click.group("lease")
def lease_group() -> None:
    """Use leases: keys that go when nobody keeps them alive. NAME is the group's.

    \b
    Example:
      logyard kv lease grant settings 30 && logyard kv put settings here yes --lease 1
    """


def seconds(value: float) -> str:
    """Return a time without needless digits."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


@lease_group.command()
@click.argument("name")
@click.argument("ttl", type=click.FloatRange(min=0, min_open=True))
@click.option("--id", "lease", type=click.IntRange(min=1), help="Its number (default: a new one).")
@servers_option
@json_option
def grant(name: str, ttl: float, lease: int | None, servers: list[str], output: Output) -> None:
    """Grant a lease of TTL seconds; shows its number and its time.

    \b
    Example:
      logyard kv lease grant settings 30
    """
    with opened(servers) as yard:
        done = yard.kv(name).grant(ttl, lease=lease or 0)
    output.result({"ok": True, "kv": name, "lease": done.id, "ttl": done.ttl}, f"{done.id}\t{seconds(done.ttl)}")


@lease_group.command()
@click.argument("name")
@LEASE
@servers_option
@json_option
def revoke(name: str, lease: int, servers: list[str], output: Output) -> None:
    """End a lease; says how many keys went with it.

    \b
    Example:
      logyard kv lease revoke settings 1
    """
    with opened(servers) as yard:
        deleted = yard.kv(name).revoke(lease)
    output.result({"ok": True, "kv": name, "lease": lease, "deleted": deleted}, str(deleted))


@lease_group.command()
@click.argument("name")
@LEASE
@click.option("--follow", is_flag=True, help="Again and again, three times in its time, until Ctrl-C.")
@servers_option
@json_option
def keepalive(name: str, lease: int, follow: bool, servers: list[str], output: Output) -> None:
    """Begin a lease's time anew; shows its number and its time.

    \b
    Examples:
      logyard kv lease keepalive settings 1
      logyard kv lease keepalive settings 1 --follow
    """
    if follow and output.json_wanted:
        raise click.UsageError("keepalive --follow never ends: it has no --json")
    never = threading.Event()
    with opened(servers) as yard:
        ttl = yard.kv(name).keep_alive(lease)
        while follow:
            click.echo(f"{lease}\t{seconds(ttl)}")
            never.wait(ttl / RENEWALS)
            ttl = yard.kv(name).keep_alive(lease)
    output.result({"ok": True, "kv": name, "lease": lease, "ttl": ttl}, f"{lease}\t{seconds(ttl)}")


@lease_group.command()
@click.argument("name")
@LEASE
@click.option("--keys", is_flag=True, help="Also the keys that are attached, a line each.")
@servers_option
@json_option
def ttl(name: str, lease: int, keys: bool, servers: list[str], output: Output) -> None:
    """Show what is left of a lease: number, time granted, time left.

    \b
    Example:
      logyard kv lease ttl settings 1 --keys
    """
    with opened(servers) as yard:
        found = yard.kv(name).time_to_live(lease, keys=keys)
    fields: dict[str, object] = {"ok": True, "kv": name, "lease": lease, "ttl": found.ttl, "left": found.left}
    if keys:
        fields["keys"] = [shown("key", key) for key in found.keys]
    lines = [f"{lease}\t{seconds(found.ttl)}\t{seconds(found.left)}", *map(printable, found.keys)]
    output.result(fields, "\n".join(lines))


@lease_group.command("list")
@click.argument("name")
@servers_option
@json_option
def list_leases(name: str, servers: list[str], output: Output) -> None:
    """List the numbers of all leases, a line each.

    \b
    Example:
      logyard kv lease list settings
    """
    with opened(servers) as yard:
        found = yard.kv(name).leases()
    output.result({"ok": True, "kv": name, "leases": list(found)}, "\n".join(map(str, found)))

"""The verb that makes certificates: `logyard tls init`. Registered by `service.cli.root`."""

from __future__ import annotations

from pathlib import Path

import click

from .logs import members_option
from .output import Output, json_option

RENEWAL = "delete that file and give the same command again, put the new one in place, then kill -HUP its node"


@click.group()
def tls() -> None:
    """Make certificates for a cluster's TLS.

    \b
    Example:
      logyard tls init ./certificates --cluster orders
    """


@tls.command()
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--cluster", default="logyard", show_default=True, help="The cluster's name, as in node.toml.")
@click.option("--nodes", callback=members_option, default="1,2,3", show_default=True, help="Node numbers.")
@click.option("--clients", default="", help="Names of clients, separated by commas.")
@json_option
def init(directory: Path, cluster: str, nodes: list[int], clients: str, output: Output) -> None:
    """Make a CA and certificates for nodes and clients in DIR; what is there already is kept.

    Keys are readable by their owner alone. DIR/ca-key.pem signs further certificates: keep it in a safe place.
    To renew a certificate delete its file (the key may stay) and give the same command again; one that has expired,
    or will within 30 days, is named. Certificates of another cluster are refused.

    \b
    Example:
      logyard tls init ./certificates --cluster orders --nodes 1,2,3 --clients alice
    """
    from ..certificates import SOON_DAYS, days_left, issue

    names = [name.strip() for name in clients.split(",") if name.strip()]
    paths = [str(path) for path in issue(directory, cluster, nodes, names)]
    expiring = {path: days for path in paths if (days := days_left(Path(path))) < SOON_DAYS}
    for path in paths:
        output.say(path)
    for path, days in expiring.items():
        when = f"expires in {days} days" if days >= 0 else "HAS EXPIRED"
        renewal = "then all that it signed end, too: begin a new directory" if path == paths[0] else RENEWAL
        output.say(f"{path} {when}: {renewal}")
    output.result({"ok": True, "cluster": cluster, "certificates": paths, "expiring": expiring})


def commands() -> list[click.Command]:
    """Return the verbs of this module."""
    return [tls]

"""The verb `etcd`: a server that etcd's clients use through their JSON gateway. Used by `service.cli.root`."""

from __future__ import annotations

import os

import click


class EtcdCommand(click.Command):
    """A command whose options are etcd's."""

    @property
    def options(self) -> set[str]:
        """The flags that mean something here."""
        from ..etcd.flags import OURS

        return {f"--{name}" for name in OURS}


@click.command(
    "etcd",
    cls=EtcdCommand,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
@click.option("--version", "version", is_flag=True, help="Print the version of etcd that clients are told.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ETCD'S FLAGS]")
@click.pass_context
def etcd(context: click.Context, version: bool, arguments: tuple[str, ...]) -> None:
    """Serve the etcd v3 JSON gateway on a KV group: one node by default, several with --initial-cluster.

    Takes etcd's flags (--name, --data-dir, --listen-client-urls, ...), as --flag=value or --flag value, and ETCD_
    variables; warns about those it does not know. --servers HOST:PORT,... serves a cluster that is there already, its
    KV group --group (default: etcd). Prints "ready url=URL pid=N" when it serves.

    \b
    Examples:
      logyard etcd --data-dir ./default.etcd --listen-client-urls http://127.0.0.1:2379
      logyard etcd --servers 127.0.0.1:7001 --group settings
    """
    # Behind the value of a flag of etcd's, which is no option of ours, click looks for none.
    if "--help" in arguments:
        click.echo(context.get_help())
        return
    if version or "--version" in arguments:
        from ..etcd.cluster import SERVER_VERSION

        click.echo(f"etcd Version: {SERVER_VERSION}")
        return
    try:
        from ..etcd.launcher import run_etcd
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error}; install the extra: pip install 'logyard[etcd]'") from None
    raise click.exceptions.Exit(run_etcd(arguments, os.environ))


def commands() -> list[click.Command]:
    """Return the commands for `cli`."""
    return [etcd]

"""The verb that says what a log keeps. Registered by `service.cli.root`."""

from __future__ import annotations

import click

from .logs import opened, servers_option
from .output import Output, json_option
from .values import age_option, size_option


@click.command()
@click.argument("name")
@click.option("--age", callback=age_option, default="0", help="Keep records that are younger: 90s, 30m, 12h, 7d.")
@click.option("--bytes", "size", callback=size_option, default="0", help="Keep the newest: 64KiB, 10MiB, 1GiB.")
@click.option("--records", type=click.IntRange(min=0), default=0, help="Keep so many of the newest.")
@servers_option
@json_option
def retain(name: str, age: float, size: int, records: int, servers: list[str], output: Output) -> None:
    """Say what a log keeps from now on, in place of what was said before; no option: everything.

    What any limit gives up goes, at once and for as long as the limit stands, to an eighth of it.

    \b
    Examples:
      logyard retain orders --age 7d --bytes 10GiB
      logyard retain orders
    """
    with opened(servers) as yard:
        start = yard.log(name).retain(age=age, bytes=size, records=records)
    fields = {"ok": True, "log": name, "age_s": age, "bytes": size, "records": records, "start": start}
    output.result(fields, f"{name} starts at {start}")


def commands() -> list[click.Command]:
    """Return the verbs of this module."""
    return [retain]

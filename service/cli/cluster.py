"""The verbs about the cluster as a whole: recover its catalogue, finalise its version. Registered by
`service.cli.root`."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from .logs import opened, servers_option
from .output import Output, json_option

if TYPE_CHECKING:
    from logyard.client.sync import Yard

NAME = "_catalog"
WAIT_S = 30.0
LOOK_S = 0.2


@click.group()
def cluster() -> None:
    """Look after the catalogue of a cluster.

    \b
    Examples:
      logyard cluster recover --yes-the-majority-is-lost
      logyard cluster finalise
    """


def _copies(yard: Yard) -> dict[int, dict[str, Any]]:
    """Return each reachable node's copy of the catalogue, by its indexes."""
    from logyard.protocol.errors import LogyardError

    found: dict[int, dict[str, Any]] = {}
    for node in yard.nodes():
        try:
            found[node] = yard.key_metrics([NAME], node)[0]
        except (LogyardError, IndexError):
            continue
    return found


def newest(copies: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the node whose copy of a log is the newest, as an election judges: by its last entry's term, then by its
    length. The term of the member itself says what it heard, not what it has. A copy that is stopped by damage is none,
    where there is another."""
    return max(copies, key=lambda node: _newness(node, copies[node]))


def _newness(node: int, copy: Mapping[str, Any]) -> tuple[bool, int, int, int]:
    # A release before this one does not say the term of its last entry, nor does one that sleeps.
    return copy["state"] == "running", copy.get("last_term") or copy["term"], copy["last"], -node


@cluster.command()
@click.option("--yes-the-majority-is-lost", "sure", is_flag=True, help="Its other voters are gone for good.")
@servers_option
@json_option
def recover(sure: bool, servers: list[str], output: Output) -> None:
    """Make the newest copy of the catalogue that answers its only voter, when most of its voters are gone for good.

    The reconciler is paused then. What the newest copy has not, logs report again by themselves. The lost voters
    must not come back meanwhile. Logs are not concerned: their data goes on without a catalogue.

    \b
    Example:
      logyard cluster recover --yes-the-majority-is-lost
    """
    from logyard.protocol.errors import Refused

    if not sure:
        raise click.UsageError("what the lost voters alone had is lost: give --yes-the-majority-is-lost")
    with opened(servers) as yard:
        copies = _copies(yard)
        if not copies:
            raise Refused("no node that answers has a copy of the catalogue")
        if led := [node for node, row in copies.items() if row["leader"] in copies]:
            raise Refused(
                f"nodes {sorted(led)} hear a leader of the catalogue: its majority is there; after a recovery that was "
                "cut short do the rest of it: `logyard plan pause`, then a look at `logyard plan`"
            )
        best = newest(copies)
        index = yard.force_shrink(NAME, best)
        paused = _pause(yard)
    fields = {"ok": paused, "node": best, "index": index, "copies": sorted(copies), "paused": paused}
    text = f"node {best} has the catalogue, up to entry {index}; look at `logyard plan`, then `logyard plan resume`"
    output.result(fields, text)


def _pause(yard: Yard) -> bool:
    """Pause the reconciler as soon as there is a leader; return whether it is."""
    from logyard.protocol.errors import LogyardError

    pause, deadline = threading.Event().wait, time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            yard.change_catalog("plan", "pause", {"why": "the catalogue was recovered"})
            return True
        except LogyardError:
            pause(LOOK_S)
    return False


@cluster.command()
@servers_option
@json_option
def finalise(servers: list[str], output: Output) -> None:
    """Declare that every node of the cluster is of a release with a catalogue: names are unique from here on.

    Refused while some node has not said so. No node goes back to an older release after it.

    \b
    Example:
      logyard cluster finalise
    """
    with opened(servers) as yard:
        nodes = yard.nodes()
        conflicts = yard.catalog("logs", "list", {"state": "conflicting"})["result"]
        version = yard.change_catalog("nodes", "finalise", {"version": 1, "nodes": nodes})
    output.table("two logs of one name", ("name", "uid"), [(row["name"], f"{row['uid']:016x}") for row in conflicts])
    found = [{"name": row["name"], "uid": row["uid"]} for row in conflicts]
    output.result({"ok": True, "version": version, "conflicting": found}, f"finalised at version {version}")


def commands() -> list[click.Command]:
    """Return what the command line registers."""
    return [cluster]

"""`logyard bench catchup`: how long a member that lost its directory takes until it has everything again.

The last node is killed and leaves every log as an operator would have it (removed, forgotten), its directory is
emptied, it starts, and is a member again: measured from that last step until every member has applied all.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calibrate import describe_machine
from ..cluster import Cluster, all_applied, all_led, create_logs, log_names, reach
from ..settings import CatchupSettings
from ..workload import Workload

if TYPE_CHECKING:
    from logyard.client.sync import Yard

CATCHUP_S_MAX = 600.0
LED_S_MAX = 60.0
TOLD_S_MAX = 60.0
BATCH_BYTES = 1 << 20
SAMPLE = 20


def run_catchup(
    settings: CatchupSettings, cluster: Cluster, directory: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Fill, lose a member's directory, have it back. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    machine = describe_machine(directory)
    lost = cluster.count
    names = log_names(settings.logs)
    workload = Workload(settings.size, random.SystemRandom().getrandbits(32), 0)
    with connect_sync(cluster.addresses) as yard:
        say(f"creating {settings.logs} logs on {cluster.count} nodes, {settings.records} records in each")
        setup_s = create_logs(yard, cluster, settings.logs)
        batch = max(1, BATCH_BYTES // settings.size)
        for name in names:
            for first in range(0, settings.records, batch):
                numbers = range(first, min(settings.records, first + batch))
                yard.log(name).append_many([(b"", workload.body(number)) for number in numbers])
    say(f"node {lost} loses its directory")
    cluster.kill9(lost)
    with connect_sync(cluster.addresses[:-1]) as yard:
        reach("a leader for every log", lambda: _removed(yard, names, lost), LED_S_MAX)
        reach("nobody has it as a member", lambda: _forgotten(yard, lost), TOLD_S_MAX)
    shutil.rmtree(directory / f"node-{lost}" / "data")
    cluster.start()
    with connect_sync(cluster.addresses) as yard:
        reach("a leader for every log", lambda: all_led(yard, cluster, settings.logs), LED_S_MAX)
        say("it is a member again")
        began = time.monotonic()
        for name in names:
            yard.add_member(name, lost)
        reach("everything applied", lambda: all_applied(yard, cluster, settings.logs), CATCHUP_S_MAX)
        took_s = time.monotonic() - began
        different = [
            f"{name}: the last record of node {lost} is not what was acknowledged"
            for name in random.sample(names, min(SAMPLE, len(names)))
            if yard.log(name).read(settings.records - 1, node=lost).payload != workload.body(settings.records - 1)
        ]
    size = settings.logs * settings.records * settings.size
    return {
        "ok": not different,
        "case": "catchup",
        "nodes": cluster.count,
        **asdict(settings),
        "catchup_s": round(took_s, 3),
        "mb_per_s": round(size / took_s / 1e6, 3),
        "records": settings.records * settings.logs,
        "setup_s": round(setup_s, 3),
        "problems": different,
        "filesystem": machine["filesystem"],
        "machine": machine,
    }


def _removed(yard: Yard, names: Sequence[str], lost: int) -> bool:
    """Take the node out of every log that still has it; return whether none has."""
    from logyard.protocol.errors import LogyardError

    try:
        for name in names:
            if lost in yard.members(name)["members"]:
                yard.remove_member(name, lost)
    except LogyardError:
        return False
    return True


def _forgotten(yard: Yard, lost: int) -> bool:
    """Let the others forget the node's directory; return whether all did."""
    from logyard.protocol.errors import LogyardError

    try:
        for node in yard.nodes():
            if node != lost:
                yard.forget_node(lost, node)
    except LogyardError:
        return False
    return True

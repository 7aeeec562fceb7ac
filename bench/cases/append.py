"""`logyard bench append`: operations a second and their latency, with every operation committed by a quorum.

Nodes and load run in processes of their own, over sockets, also with one node. The run ends by reading a random 1 %
back, and by comparing the logs' ends with what was acknowledged.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from ..calibrate import describe_machine
from ..cluster import Cluster, Nodes, create_logs, log_names, statuses
from ..load import RECORD_BYTES, LoadSpec
from ..processes import Meter
from ..report import append_figures, shares
from ..settings import AppendSettings

SAMPLE_ONE_IN = 100


class Spec(Protocol):
    """What a load process is told, as a named tuple: these two and whatever its module knows."""

    @property
    def warmup_s(self) -> float:
        """Seconds before those that are measured."""
        ...

    @property
    def seconds(self) -> float:
        """Measured seconds."""
        ...

    def _asdict(self) -> dict[str, Any]: ...


class LoadFailed(Exception):
    """A load process ended without a result; its own words are on standard error."""


def run_append(
    settings: AppendSettings, cluster: Cluster, directory: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Create the logs, load them, verify. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    machine = describe_machine(directory)
    with connect_sync(cluster.addresses) as yard:
        say(f"creating {settings.logs} logs on {cluster.count} nodes")
        setup_s = create_logs(yard, cluster, settings.logs)
        for name in log_names(settings.logs if settings.keep else 0):
            yard.log(name).retain(bytes=settings.keep)
        before = statuses(yard, cluster)
        meter = Meter(cluster.pids)
        results = run_processes(specifications(settings, cluster), say)
        used = meter.figures(sum(int(result["acknowledged"]) for result in results))
        after = statuses(yard, cluster)
        bounds = [yard.log(name).latest() for name in log_names(settings.logs)]
    figures = append_figures(
        results, size=settings.size, clients=settings.clients, window=settings.window, seconds=settings.seconds
    )
    syncs, entries = (
        sum(int(one[key]) for one in after) - sum(int(one[key]) for one in before) for key in ("fdatasyncs", "commit")
    )
    different = sum(int(result["lost"]) for result in results)
    stored, kept = sum(end for _, end in bounds), sum(end - start for start, end in bounds)
    wanted = -(-settings.keep // (settings.size + RECORD_BYTES))
    gone = sum(max(0, wanted - (end - start)) for start, end in bounds if start)
    lost = different + max(0, figures["acknowledged"] - stored) + gone
    return {
        "ok": not lost and not figures["failed"] and figures["acknowledged"] > 0,
        "case": "append",
        "nodes": cluster.count,
        **asdict(settings),
        **figures,
        **used,
        "lost": lost,
        "stored": stored,
        "kept": kept,
        "fdatasyncs": syncs,
        "commands_per_entry": round(figures["acknowledged"] * cluster.count / max(1, entries), 2),
        "setup_s": round(setup_s, 3),
        "filesystem": machine["filesystem"],
        "machine": machine,
    }


def specifications(settings: AppendSettings, cluster: Nodes) -> list[LoadSpec]:
    """Return one for each process: clients are spread over processes, each process over all logs."""
    processes = min(settings.processes, settings.clients)
    seed = random.SystemRandom().getrandbits(32)
    return [
        LoadSpec(
            addresses=cluster.addresses,
            logs=log_names(settings.logs),
            size=settings.size,
            clients=clients,
            window=settings.window,
            seed=seed,
            lane=lane,
            warmup_s=settings.warmup_s,
            seconds=settings.seconds,
            sample_one_in=SAMPLE_ONE_IN,
            runtime=settings.runtime,
            rate=settings.rate * clients / settings.clients,
            keep=settings.keep,
        )
        for lane, clients in enumerate(shares(settings.clients, processes))
    ]


def run_processes(
    specs: Sequence[Spec], say: Callable[[str], None], module: str = "logyard.bench.load"
) -> list[dict[str, Any]]:
    """Start the load processes, each a run of `module`, let them go at once, collect their results."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for spec in specs:
            process = subprocess.Popen(
                [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            processes.append(process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(spec._asdict()) + "\n")
            process.stdin.flush()
        for process in processes:
            expect(process, "ready")
        say(f"loading: {specs[0].warmup_s:g} s warm-up, {specs[0].seconds:g} s measured")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [json.loads(expect(process)) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None and sys.exc_info()[0] is not None:
                process.kill()
            process.communicate()


def expect(process: subprocess.Popen[str], word: str | None = None) -> str:
    """Return the process's next line; raise `LoadFailed` when it ended, or said something else than `word`."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line or (word is not None and line != word):
        raise LoadFailed(f"a load process ended early: {line or 'it said nothing'}")
    return line

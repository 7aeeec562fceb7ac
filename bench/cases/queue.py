"""`logyard bench queue`: messages published and confirmed a second, and consumed and acknowledged meanwhile.

Publishers and consumers are processes of their own. The run ends when the queues are empty: everything that was
confirmed has been consumed, once, with its bytes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..calibrate import describe_machine
from ..cluster import Cluster, all_led, reach
from ..load import LoadSpec
from ..processes import Meter
from ..queue_load import QueueSpec
from ..report import append_figures
from ..settings import QueueSettings
from ..terms import Beside
from .append import expect

TERMS = "bench-queue-terms"
"""A queue of its own, whose leases and delays are looked at meanwhile."""


def run_queue(settings: QueueSettings, cluster: Cluster, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Declare the queues, load them, empty them, compare. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    names = [f"bench-{number:06d}" for number in range(settings.queues)]
    with connect_sync(cluster.addresses) as yard:
        say(f"declaring {settings.queues} queues on {cluster.count} nodes")
        began = time.monotonic()
        yard.create_many(names, members=list(range(1, cluster.count + 1)), machine="queue")
        reach("a leader for every queue", lambda: all_led(yard, cluster, settings.queues), 60.0)
        declare_s = time.monotonic() - began
        yard.create(TERMS, members=list(range(1, cluster.count + 1)), machine="queue")
        with Beside(cluster.addresses, TERMS, "queue") as terms:
            meter = Meter(cluster.pids)
            published, consumed = run_processes(settings, cluster, names, say)
            used = meter.figures(int(published["acknowledged"]))
        stats = [yard.queue(name).stats() for name in names]
    figures = append_figures(
        [published], size=settings.size, clients=settings.publishers, window=settings.window, seconds=settings.seconds
    )
    left = sum(one["ready"] + one["unacked"] + one["dead"] for one in stats)
    lost = figures["acknowledged"] - left - (consumed["consumed"] - consumed["twice"] if consumed else 0)
    wrong = consumed["different"] if consumed else 0
    return {
        "ok": not lost and not wrong and not terms.early and not figures["failed"] and figures["acknowledged"] > 0,
        "case": "queue",
        "nodes": cluster.count,
        **asdict(settings),
        **figures,
        **used,
        "declare_s": round(declare_s, 3),
        "consumed_per_s": round(consumed["counted"] / settings.seconds, 1) if consumed else 0,
        "consumed": consumed["consumed"] if consumed else 0,
        "twice": consumed["twice"] if consumed else 0,
        "consumer_cpu_s": consumed["cpu_s"] if consumed else 0,
        "left": left,
        "lost": lost,
        **terms.row(),
        "different": wrong,
        "machine": describe_machine(directory),
    }


def run_processes(
    settings: QueueSettings, cluster: Cluster, names: list[str], say: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of the publishing and of the consuming process; the latter's is empty when there is none."""
    load = LoadSpec(
        addresses=cluster.addresses,
        logs=names,
        size=settings.size,
        clients=settings.publishers,
        window=settings.window,
        seed=random.SystemRandom().getrandbits(32),
        lane=0,
        warmup_s=settings.warmup_s,
        seconds=settings.seconds,
        sample_one_in=1 << 60,
        runtime=settings.runtime,
    )
    specs = [QueueSpec(load._asdict())]
    if settings.consumers:
        specs.append(QueueSpec(load._asdict(), settings.consumers, settings.prefetch))
    processes: list[subprocess.Popen[str]] = []
    results: list[dict[str, Any]] = []
    try:
        for spec in specs:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "logyard.bench.queue_load"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
            tell(processes[-1], json.dumps(spec._asdict()))
        for process in processes:
            expect(process, "ready")
        say(f"loading: {settings.warmup_s:g} s warm-up, {settings.seconds:g} s measured")
        for process in processes:
            tell(process, "go")
        for process in processes:
            if results:
                # The publishers are done: what is there now is all.
                tell(process, "end")
            results.append(json.loads(expect(process)))
    finally:
        for process in processes:
            if process.poll() is None and sys.exc_info()[0] is not None:
                process.kill()
            process.communicate()
    return results[0], results[1] if settings.consumers else {}


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Write a line to a process."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()

"""`logyard bench mixed`: what one large append costs the small ones beside it.

A closed-loop client for each of many small logs, for some seconds alone, then for as long as a process of its own
uploads one large payload into another log. Reported: the p99 of both times and their ratio; the payload is read back
from a member and its hash compared.
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

import trio
import xxhash

from ..calibrate import describe_machine
from ..cluster import Cluster, create_logs, log_names
from ..histogram import Histogram
from ..settings import MixedSettings
from ..upload import digest_of, parts
from ..workload import Workload
from .append import expect

UPLOAD_LOG = "upload"
UPLOAD_TIMEOUT_S = 600.0
RATIO_MAX = 3.0
"""What the small logs may suffer (the issue's bound)."""


class Small:
    """The closed loops of the small logs. `histogram` is where latencies go at the moment."""

    def __init__(self, settings: MixedSettings) -> None:
        self.settings = settings
        self.histogram = Histogram()
        self.failed = 0
        self.stopped = False

    async def run(self, yard: Any, lane: int, name: str) -> None:
        """Run one client on one log, until stopped."""
        from logyard.protocol.errors import LogyardError

        log, workload, number = yard.log(name), Workload(self.settings.size, 1, lane), 0
        while not self.stopped:
            number += 1
            began = time.perf_counter()
            histogram = self.histogram
            try:
                await log.append(b"", workload.body(number))
            except LogyardError:
                self.failed += 1
                continue
            histogram.add(time.perf_counter() - began)


def run_mixed(settings: MixedSettings, cluster: Cluster, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Create the logs, run both times, read the payload back. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    machine = describe_machine(directory)
    with connect_sync(cluster.addresses) as yard:
        setup_s = create_logs(yard, cluster, settings.logs)
        yard.create(UPLOAD_LOG)
    seed = random.SystemRandom().getrandbits(32)
    quiet, beside, uploaded, failed = trio.run(_measure, settings, cluster.addresses, seed, say)
    say("reading the payload back")
    with connect_sync(cluster.addresses) as yard:
        found = xxhash.xxh3_128()
        for piece in yard.log(UPLOAD_LOG).body_pieces(int(uploaded["offset"])):
            found.update(piece)
    same = found.hexdigest() == digest_of(parts(settings.upload_bytes, seed))
    ratio = beside.quantile(0.99) / quiet.quantile(0.99) if quiet.samples and beside.samples else 0.0
    sound = bool(same and not failed and ratio)
    return {
        "ok": sound and ratio < RATIO_MAX,
        "sound": sound,
        "case": "mixed",
        "nodes": cluster.count,
        **asdict(settings),
        "p99_quiet_ms": round(quiet.quantile(0.99) * 1000, 3),
        "p99_beside_ms": round(beside.quantile(0.99) * 1000, 3),
        "ratio": round(ratio, 3),
        "p50_quiet_ms": round(quiet.quantile(0.5) * 1000, 3),
        "p50_beside_ms": round(beside.quantile(0.5) * 1000, 3),
        "appends_quiet": quiet.samples,
        "appends_beside": beside.samples,
        "upload_s": round(uploaded["seconds"], 3),
        "upload_mb_per_s": round(settings.upload_bytes / uploaded["seconds"] / 1e6, 1),
        "intact": same,
        "failed": failed,
        "setup_s": round(setup_s, 3),
        "filesystem": machine["filesystem"],
        "machine": machine,
    }


async def _measure(
    settings: MixedSettings, addresses: list[str], seed: int, say: Callable[[str], None]
) -> tuple[Histogram, Histogram, dict[str, Any], int]:
    from logyard.client.aio import connect

    small = Small(settings)
    spec = {"addresses": addresses, "log": UPLOAD_LOG, "bytes": settings.upload_bytes, "seed": seed}
    process = subprocess.Popen(
        [sys.executable, "-m", "logyard.bench.upload"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(spec) + "\n")
        process.stdin.flush()
        await trio.to_thread.run_sync(expect, process, "ready")
        async with connect(addresses) as yard, trio.open_nursery() as nursery:
            for lane, name in enumerate(log_names(settings.logs)):
                nursery.start_soon(small.run, yard, lane, name)
            await trio.sleep(settings.warmup_s)
            quiet = small.histogram = Histogram()
            say(f"{settings.logs} small logs alone for {settings.seconds:g} s")
            await trio.sleep(settings.seconds)
            beside = small.histogram = Histogram()
            say(f"beside an append of {settings.upload_bytes >> 20} MiB")
            process.stdin.write("go\n")
            process.stdin.flush()
            with trio.fail_after(UPLOAD_TIMEOUT_S):
                line = await trio.to_thread.run_sync(expect, process, abandon_on_cancel=True)
            small.histogram = Histogram()
            small.stopped = True
        return quiet, beside, json.loads(line), small.failed
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()

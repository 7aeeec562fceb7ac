"""`python -m logyard.bench.waterfall [--nodes N] [--seconds S] [--json]`: where each microsecond of a lone append goes.

One client appends 256 bytes at a time to one log; a library between the programs and the C library notes when each
system call began and ended, in every process (`call_times`). An append's way is found backwards: from the client's next
send to the reply that it had received, from there to the send that it came by, and so on over all processes, until the
client's own send. What is not on that way costs processor time only, and is in the second table: calls and processor
time of an append, by process. Noting costs about 0.1 us a call, and 1 us more each 256th wait.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from .call_times import Call, Traced, traced, tracing_environment
from .preload import NoCompiler

LOAD, NODE = "logyard.bench.load", "serve"
CALLS = ("epoll_wait", "epoll_ctl", "receive", "send", "write", "sync")
STEPS_MAX = 400
"""An append's way has some thirty steps; what has more is not understood and left out."""
KEPT = 0.8
"""The middle share of all appends, by their time, of which the mean is shown: the parts of means add up."""
OFTEN = 0.05
"""A part that fewer of the appends have is counted to `other`."""


class Process:
    """One process's calls on its main thread, and where its connections' bytes came from."""

    def __init__(self, found: Traced, role: str) -> None:
        self.role = role
        self.traced = found
        main = Counter(call.thread for call in found.calls).most_common(1)[0][0]
        told = {"usage", "switches"}
        self.calls = [call for call in found.calls if call.thread == main and call.kind not in told]
        self.begins = [call.begin for call in self.calls]
        self.sends: dict[tuple[int, int], list[Call]] = defaultdict(list)
        for call in self.calls:
            if call.kind == "send" and call.result > 0 and call.local:
                self.sends[call.local, call.remote].append(call)
        self.sent = {both: [call.begin for call in calls] for both, calls in self.sends.items()}

    @property
    def kind(self) -> str:
        """Client, leader or follower."""
        return self.role.partition(" ")[0]


class Part(NamedTuple):
    """A stretch of an append's way, in nanoseconds."""

    name: str
    ns: int


def roles(found: Sequence[Traced]) -> list[Process]:
    """Return client and nodes; the leader is the node that answers the client."""
    clients = [one for one in found if LOAD in one.command]
    nodes = [one for one in found if f" {NODE} " in f"{one.command} "]
    if len(clients) != 1 or not nodes:
        raise SystemExit("the run left no trace of its client and nodes")
    client = Process(clients[0], "client")
    ours = {(call.remote, call.local) for call in client.calls if call.kind == "send" and call.local}

    def answers(node: Traced) -> int:
        return sum(call.kind == "send" and (call.local, call.remote) in ours for call in node.calls)

    nodes.sort(key=answers, reverse=True)
    return [client, *(Process(one, f"follower {number}" if number else "leader") for number, one in enumerate(nodes))]


def way(processes: Sequence[Process], begin: int, end: int) -> list[Part] | None:
    """Return the parts of the time from the beginning of one of the client's sends to that of the next one; None if it
    is not understood."""
    here = processes[0]
    at = bisect_right(here.begins, end) - 2
    parts: list[Part] = []
    time = end
    for _ in range(STEPS_MAX):
        if at < 0 or here.calls[at].end < begin:
            return None
        call = here.calls[at]
        parts.append(Part(f"{here.kind}: between calls", time - call.end))
        come = arrival(processes, here, at) if call.kind == "epoll_wait" else None
        if come is None:
            parts.append(Part(f"{here.kind}: {call.kind}", call.end - call.begin))
            time = call.begin
            at -= 1
            continue
        sender, index, sent = come
        # The bytes may wake their receiver before the call that sent them returns.
        gone = min(sent.end, call.end)
        parts.append(Part(f"from {sender.kind}'s send to {here.kind}'s wake-up", call.end - gone))
        parts.append(Part(f"{sender.kind}: send", gone - sent.begin))
        if sent.begin == begin:
            return parts
        here, at, time = sender, index - 1, sent.begin
    return None


def arrival(processes: Sequence[Process], here: Process, at: int) -> tuple[Process, int, Call] | None:
    """Return who sent what the first read after a wait received: the process, the place of its send, the send."""
    for call in here.calls[at + 1 : at + 8]:
        if call.kind == "epoll_wait":
            return None
        if call.kind != "receive" or call.result <= 0 or not call.local:
            continue
        both = (call.remote, call.local)
        for other in processes:
            begun = other.sent.get(both)
            if begun is None:
                continue
            # The last send that was under way before the read ended.
            number = bisect_right(begun, call.end) - 1
            if number < 0:
                return None
            sent = other.sends[both][number]
            if sent.begin < here.calls[at].begin:
                # It was there before this wait began, which was not for it.
                return None
            return other, bisect_right(other.begins, sent.begin) - 1, sent
        return None
    return None


def ways(processes: Sequence[Process]) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield the time of each append that is understood, and its parts by name; of the middle of the run."""
    sends = [call for call in processes[0].calls if call.kind == "send" and call.local]
    sends = sends[len(sends) // 5 : -max(2, len(sends) // 10)]
    for one, two in pairwise(sends):
        found = way(processes, one.begin, two.begin)
        if found is not None:
            sums: dict[str, int] = defaultdict(int)
            for part in found:
                sums[part.name] += part.ns
            yield two.begin - one.begin, sums


def middle(found: list[tuple[int, dict[str, int]]]) -> list[tuple[int, dict[str, int]]]:
    """Return the middle of them by time."""
    found = sorted(found, key=lambda one: one[0])
    cut = int(len(found) * (1 - KEPT) / 2)
    return found[cut : len(found) - cut]


def table(found: Sequence[tuple[int, Mapping[str, int]]]) -> dict[str, float]:
    """Return the mean microseconds of each part, the largest first; rare ones together."""
    sums: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for _, parts in found:
        for name, ns in parts.items():
            sums[name] += ns
            times[name] += 1
    count = len(found)
    shown: dict[str, float] = {}
    other = 0
    for name, ns in sums.most_common():
        if times[name] < OFTEN * count:
            other += ns
        else:
            shown[name] = round(ns / count / 1000, 1)
    shown["other"] = round(other / count / 1000, 1)
    return shown


def used(process: Process, sends: Sequence[Call]) -> dict[str, float]:
    """Return calls and processor time of an append. The time is the median over stretches of 256 waits, as on a busy
    machine some of them are interrupted by others."""
    begin, end = sends[len(sends) // 5].end, sends[-1 - len(sends) // 10].end
    begun = [call.end for call in sends]
    appends = sum(begin <= one < end for one in begun)
    counts = Counter(call.kind for call in process.traced.calls if begin <= call.begin < end)
    shown = {kind: round(counts[kind] / appends, 2) for kind in CALLS}
    usages = [call for call in process.traced.calls if call.kind == "usage"]
    switches = [call for call in process.traced.calls if call.kind == "switches"]
    user, system, moved = [], [], []
    low, high = begin // 1_000_000, end // 1_000_000
    for number in range(1, min(len(usages), len(switches))):
        one, two = usages[number - 1], usages[number]
        # The clock's low bits stand where a call's result does.
        since, until = (call.result % (1 << 32) for call in (one, two))
        if not low % (1 << 32) <= since < until <= high % (1 << 32):
            continue
        count = bisect_right(begun, (high - (high % (1 << 32)) + until) * 1_000_000)
        count -= bisect_right(begun, (high - (high % (1 << 32)) + since) * 1_000_000)
        if count:
            user.append((two.begin - one.begin) / count / 1000)
            system.append((two.end - one.end) / count / 1000)
            three, four = switches[number - 1], switches[number]
            moved.append((four.begin + four.end - three.begin - three.end) / count)
    for name, values in (("user us", user), ("kernel us", system), ("switches", moved)):
        shown[name] = round(statistics.median(values), 2) if values else 0.0
    return shown


def run(nodes: int, seconds: float, runtime: str) -> tuple[dict[str, Any], list[Process]]:
    """Run the load with notes; return its report, and what the processes noted."""
    with tempfile.TemporaryDirectory(prefix="logyard-waterfall-") as name:
        directory = Path(name)
        try:
            environment = tracing_environment(directory)
        except NoCompiler as error:
            raise SystemExit(str(error)) from None
        command = [sys.executable, "-m", "logyard.service.cli", "bench", "append", "--logs", "1", "--size", "256"]
        options = ["--clients", "1", "--nodes", str(nodes), "--seconds", str(seconds), "--warmup", "0.5"]
        done = subprocess.run(
            [*command, *options, "--runtime", runtime, "--json"], text=True, check=False, capture_output=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"the load failed: {(done.stderr or done.stdout)[-500:]}")
        report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return report, roles([one for one in traced(directory) if one.calls])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m logyard.bench.waterfall", description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--runtime", choices=("trio", "asyncio"), default="trio")
    parser.add_argument("--json", action="store_true", help="one object instead of lines")
    given = parser.parse_args(arguments)
    report, processes = run(given.nodes, given.seconds, given.runtime)
    found = list(ways(processes))
    sends = [call for call in processes[0].calls if call.kind == "send" and call.local]
    kept = middle(found)
    shown = {
        "ok": bool(kept), "ops_per_s": report["ops_per_s"],
        "understood": round(len(found) / max(1, len(sends) * 7 // 10), 2),
        "load_average": report["machine"].get("load_average"),
        "append_us": round(statistics.mean(one[0] for one in kept) / 1000, 1) if kept else 0.0,
        "way": table(kept) if kept else {}, "used": {one.role: used(one, sends) for one in processes},
    }  # fmt: skip
    if given.json:
        print(json.dumps(shown))
        return 0
    print(f"{shown['append_us']} us an append (mean of the middle {KEPT:.0%}; {shown['understood']:.0%} understood)")
    print(f"{report['ops_per_s']} appends a second, load average before {shown['load_average']}")
    for name, us in shown["way"].items():
        print(f"  {us:8.1f}  {name}")
    for role, row in shown["used"].items():
        print(f"{role}: " + ", ".join(f"{value} {name}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

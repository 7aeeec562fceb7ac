"""`python -m logyard.bench.cost_model [--seconds S] [--rounds N] [--json]`: an append's cost by what it is made of.

Append loads of several shapes run on three nodes, in rounds that alternate. Of each run the processor time of each node
(all its processes) and of the client is taken, beside how many commands, entries, batches of the write-ahead log (a
write and a sync each), client's frames and KiB there were, those of logs that the node leads apart, and how often its
threads slept. A fit without negative coefficients gives the microseconds of each; then it predicts shapes that it has
not seen, from their counts. Exit code 1: the prediction of one of them, client and nodes together, is off by more than
30 %.

Invariant: a row is one run, so counts and processor time belong together; of a shape's runs the one of median cost is
used. A loop beside each run measures the machine's speed then, and times are those of the command's median speed.
Frames between nodes are not counted by a node: what they cost is in its entries and batches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import operator
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from logyard.protocol.errors import LogyardError

from .calibrate import describe_machine, mixed_turn_ns
from .cases.append import run_processes, specifications
from .cluster import NotReached, create_logs, groups_of, log_names, reach, statuses
from .processes import cpu_seconds, wake_ups
from .settings import AppendSettings

if TYPE_CHECKING:
    from logyard.client.sync import Yard

NODES = 3
TOLERANCE = 0.3
INDEPENDENT = 0.03
"""The least share of a count that the others must not explain."""
PORTS = range(10_000, 32_000)
PORT_TRIES = 5
READY = "Ctrl-C stops the cluster"
STOP_S = 30.0
GATHERED = 10
"""Logs that the first node leads; the others are led where elections put them."""
APPLIED_S = 60.0
SPEED_EVERY_S = 0.1
LEFT_OUT = 1 << 30
"""Reads back one of so many: reading would be counted to the appends."""


class Shape(NamedTuple):
    """A load: over so many logs, of bodies of so many bytes, by clients with so many calls outstanding each."""

    logs: int
    size: int
    clients: int
    window: int

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.logs} x {self.size} B, {self.clients} x {self.window}"


FITTED = (
    Shape(1, 100, 1, 1), Shape(1, 100, 1, 20), Shape(1, 100, 5, 500), Shape(1, 4096, 5, 20), Shape(1, 65_536, 1, 1),
    Shape(1, 65_536, 2, 8), Shape(10, 256, 5, 20), Shape(10, 16_384, 4, 5), Shape(300, 100, 1, 10),
    Shape(300, 256, 5, 100),
)  # fmt: skip
HELD_OUT = (Shape(1, 256, 5, 8), Shape(10, 8192, 2, 10), Shape(100, 1024, 5, 50))
COUNTS = ("command", "entry", "batch", "KiB")
NODE = (*(f"{role} {name}" for role in ("leader", "follower") for name in COUNTS), "wake-up")
CLIENT = ("command", "frame", "KiB", "wake-up")


class Unfit(Exception):
    """The observations do not say what was asked of them; the message says what is missing."""


class Row(NamedTuple):
    """What one process used in a run, in microseconds, and its counts by name."""

    us: float
    counts: Mapping[str, float]


class Run(NamedTuple):
    """One run of a shape. `turn_ns`: the machine's speed beside it."""

    shape: Shape
    turn_ns: float
    commands: int
    client: Row
    nodes: Sequence[Row]

    @property
    def us(self) -> float:
        """All processes together."""
        return self.client.us + sum(row.us for row in self.nodes)

    def at_speed(self, turn_ns: float) -> Run:
        """Return it with the times of a machine of that speed."""
        scale = turn_ns / self.turn_ns
        return self._replace(
            turn_ns=turn_ns,
            client=self.client._replace(us=self.client.us * scale),
            nodes=[row._replace(us=row.us * scale) for row in self.nodes],
        )


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """Return the solution of a system of linear equations; None if there is not just one."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for at in range(size):
        best = max(range(at, size), key=lambda number: abs(rows[number][at]))
        if abs(rows[best][at]) < 1e-12:
            return None
        rows[at], rows[best] = rows[best], rows[at]
        for number in range(size):
            if number != at:
                times = rows[number][at] / rows[at][at]
                rows[number] = [one - times * two for one, two in zip(rows[number], rows[at], strict=True)]
    return [rows[at][size] / rows[at][at] for at in range(size)]


def fit(rows: Sequence[Row], names: Sequence[str]) -> dict[str, float]:
    """Return the microseconds of each count that predict the rows with the least sum of squared relative errors, none
    below 0. Raises `Unfit` where a count is missing, or follows from others in all rows."""
    table = [[row.counts.get(name, 0.0) / row.us for row in rows] for name in names]
    lengths = [math.sqrt(math.fsum(value * value for value in column)) for column in table]
    missing = [name for name, length in zip(names, lengths, strict=True) if not length]
    if missing:
        raise Unfit(f"no observation has any {', '.join(missing)}")
    # Of length 1, so that one threshold tells for all columns.
    table = [[value / length for value in column] for column, length in zip(table, lengths, strict=True)]
    gram = [[math.fsum(map(operator.mul, left, right)) for right in table] for left in table]
    for at, name in enumerate(names):
        others = [number for number in range(len(names)) if number != at]
        if 1.0 - explained(gram, gram[at], others)[0] < INDEPENDENT**2:
            raise Unfit(f"the counts of {name} follow from those of others in all observations: no share is its own")
    # The best one without negative coefficients is the plain least squares over those that are not 0: try each set.
    sums = list(map(math.fsum, table))
    every = (chosen for count in range(len(names)) for chosen in combinations(range(len(names)), count + 1))
    _, best, used = max(
        (*found, chosen) for chosen in every if min((found := explained(gram, sums, chosen))[1], default=-1.0) >= 0
    )
    scaled = {names[at]: value / lengths[at] for at, value in zip(used, best, strict=True)}
    return {name: scaled.get(name, 0.0) for name in names}


def explained(
    gram: Sequence[Sequence[float]], target: Sequence[float], used: Sequence[int]
) -> tuple[float, list[float]]:
    """Return how much of a target's square columns explain, and by which factors. `target`: its products with all
    columns; 1 and no factors where the columns follow from one another."""
    found = solve([[gram[one][two] for two in used] for one in used], [target[one] for one in used])
    return (
        (1.0, [])
        if found is None
        else (math.fsum(target[at] * one for at, one in zip(used, found, strict=True)), found)
    )


def predict(row: Row, coefficients: Mapping[str, float]) -> float:
    """Return the microseconds that the coefficients give for a row's counts."""
    return sum(coefficients[name] * value for name, value in row.counts.items())


class Model(NamedTuple):
    """Microseconds of each count, of a client and of a node."""

    client: Mapping[str, float]
    node: Mapping[str, float]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Model:
        """Fit both."""
        rows = [row for run in runs for row in run.nodes]
        return cls(fit([run.client for run in runs], CLIENT), fit(rows, NODE))

    def compare(self, run: Run) -> dict[str, Any]:
        """Return what a run cost, in microseconds a command, and what part of it is predicted."""
        client, nodes = predict(run.client, self.client), sum(predict(row, self.node) for row in run.nodes)
        return {
            "shape": run.shape._asdict(), "name": run.shape.name, "commands": run.commands,
            "us_per_command": round(run.us / run.commands, 2),
            "client": round(client / run.client.us, 3),
            "nodes": round(nodes / (run.us - run.client.us), 3),
            "total": round((client + nodes) / run.us, 3),
        }  # fmt: skip

    def roles(self) -> dict[str, dict[str, float]]:
        """Return the coefficients by role."""
        found = {"client": {name: round(us, 3) for name, us in self.client.items()}}
        for role in ("leader", "follower"):
            found[role] = {name: round(self.node[f"{role} {name}"], 3) for name in COUNTS}
        found["node"] = {"wake-up": round(self.node["wake-up"], 3)}
        return found


def median_run(runs: Sequence[Run]) -> Run:
    """Return the run whose cost of a command is the median one."""
    return sorted(runs, key=lambda run: run.us / run.commands)[len(runs) // 2]


class Started:
    """The nodes of `logyard up`, from the lines that it says of them."""

    def __init__(self, lines: Sequence[str]) -> None:
        words = [line.split() for line in lines if line.startswith("node ")]
        self.count = len(words)
        self.addresses = [one[2] for one in words]
        self.pids = [int(one[4]) for one in words]


@contextlib.contextmanager
def started(directory: Path) -> Iterator[Started]:
    """Run nodes whose logs stay awake; their cost at rest is not measured here."""
    for _ in range(PORT_TRIES):
        port = random.SystemRandom().choice(PORTS)
        command = [sys.executable, "-m", "logyard.service.cli", "up", "--nodes", str(NODES), "--restart-after", "0"]
        process = subprocess.Popen(
            [*command, "--dir", str(directory), "--port", str(port)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "LOGYARD_LIMITS_HIBERNATE_AFTER_MS": "0"},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line.strip())
                if READY in line:
                    yield Started(lines)
                    return
        finally:
            process.terminate()
            process.communicate(timeout=STOP_S)
    raise SystemExit("the nodes did not start")


class Speed:
    """The machine's speed while something runs, as `mixed_turn_ns`: the median of short looks."""

    def __init__(self) -> None:
        self._looks: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while True:
            self._looks.append(mixed_turn_ns())
            if self._over.wait(SPEED_EVERY_S):
                return

    def __enter__(self) -> Speed:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def turn_ns(self) -> float:
        """The median."""
        return statistics.median(self._looks)


class Look(NamedTuple):
    """What the nodes say: of each node its batches, which logs it leads in which term; of each log commit and end."""

    batches: Sequence[int]
    led: Sequence[Mapping[str, int]]
    commit: Mapping[str, int]
    end: Mapping[str, int]

    @classmethod
    def at(cls, yard: Yard, cluster: Started) -> Look:
        """Ask all of them."""
        rows = groups_of(yard, cluster)
        leaders = [[row for row in rows[node + 1] if row["role"] == "leader"] for node in range(cluster.count)]
        every = [row for led in leaders for row in led]
        return cls(
            batches=[int(status["wal"]["batches"]) for status in statuses(yard, cluster)],
            led=[{row["name"]: row["term"] for row in led} for led in leaders],
            commit={row["name"]: int(row["commit"]) for row in every},
            end={row["name"]: int(row["end"]) for row in every},
        )


def counts_of(shape: Shape, before: Look, after: Look) -> tuple[int, list[dict[str, float]]]:
    """Return a run's commands, and the counts of each node. Raises `NotReached` where leaders changed meanwhile."""
    if before.led != after.led:
        raise NotReached(f"{shape.name}: leaders changed during the run")
    commands = {name: after.end[name] - before.end[name] for name in after.end}
    entries = {name: after.commit[name] - before.commit[name] for name in after.commit}
    found: list[dict[str, float]] = []
    for node, led in enumerate(after.led):
        batches = after.batches[node] - before.batches[node]
        share = sum(entries[name] for name in led) / max(1, sum(entries.values()))
        own: dict[str, float] = {
            "leader command": sum(commands[name] for name in led), "leader entry": sum(entries[name] for name in led),
            "leader batch": batches * share, "follower batch": batches * (1 - share),
        }  # fmt: skip
        own["follower command"] = sum(commands.values()) - own["leader command"]
        own["follower entry"] = sum(entries.values()) - own["leader entry"]
        for role in ("leader", "follower"):
            own[f"{role} KiB"] = own[f"{role} command"] * shape.size / 1024
        found.append(own)
    return sum(commands.values()), found


def level(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all nodes applied all entries, as their status says it."""
    return len({row[key] for row in rows for key in ("commit", "applied")}) == 1


def gather(yard: Yard) -> None:
    """Have the first node lead the first logs: where all nodes lead equal shares of everything, what a leader's entry
    costs can't be told from a follower's."""

    def gathered() -> bool:
        led = {row["name"] for row in yard.list(node=1) if row["role"] == "leader"}
        for name in (elsewhere := [name for name in log_names(GATHERED) if name not in led]):
            with contextlib.suppress(LogyardError):
                yard.transfer(name, 1)
        return not elsewhere

    reach("leaders on the first node", gathered, APPLIED_S)


def observe(shape: Shape, yard: Yard, cluster: Started, seconds: float) -> Run:
    """Run a shape once. Raises `NotReached` where the run is of no use."""
    settings = AppendSettings(*shape, seconds=seconds, warmup_s=0.0)
    specs = [spec._replace(sample_one_in=LEFT_OUT) for spec in specifications(settings, cluster)]
    reach("all applied", lambda: level(statuses(yard, cluster)), APPLIED_S)
    before = Look.at(yard, cluster)
    so_far: list[float] = []
    slept: list[int] = []

    def loading(text: str) -> None:
        """Begin to count: the load process is ready, and waits to be let go."""
        so_far.extend(map(cpu_seconds, cluster.pids))
        slept.extend(map(wake_ups, cluster.pids))

    with Speed() as speed:
        (result,) = run_processes(specs, loading)
        reach("all applied", lambda: level(statuses(yard, cluster)), APPLIED_S)
    used = [cpu_seconds(pid) - before_s for pid, before_s in zip(cluster.pids, so_far, strict=True)]
    woken = [wake_ups(pid) - so_far for pid, so_far in zip(cluster.pids, slept, strict=True)]
    commands, nodes = counts_of(shape, before, Look.at(yard, cluster))
    for node, count in zip(nodes, woken, strict=True):
        node["wake-up"] = count
    if result["failed"] or not commands:
        raise NotReached(f"{shape.name}: {'; '.join(result['problems']) or 'nothing was appended'}")
    client = {
        "command": commands, "frame": result["frames"], "KiB": commands * shape.size / 1024,
        "wake-up": result["wake_ups"],
    }  # fmt: skip
    if not min(used):
        raise NotReached(f"{shape.name}: no processor time of the nodes is known: it is read from Linux")
    rows = [Row(1e6 * cpu_s, counts) for cpu_s, counts in zip(used, nodes, strict=True)]
    return Run(shape, speed.turn_ns, commands, Row(1e6 * result["cpu_s"], client), rows)


def measure(seconds: float, rounds: int) -> tuple[dict[Shape, list[Run]], list[str], dict[str, object]]:
    """Run all shapes in rounds, each beginning with another one. Returns the runs, what was of no use, the machine."""
    from logyard.client.sync import connect_sync

    shapes = [*FITTED, *HELD_OUT]
    runs: dict[Shape, list[Run]] = {shape: [] for shape in shapes}
    skipped = []
    with tempfile.TemporaryDirectory(prefix="logyard-cost-") as name, started(Path(name)) as cluster:
        machine = describe_machine(Path(name))
        with connect_sync(cluster.addresses) as yard:
            create_logs(yard, cluster, max(shape.logs for shape in shapes))
            gather(yard)
            for number in range(rounds):
                first = number * len(shapes) // rounds
                for shape in shapes[first:] + shapes[:first]:
                    try:
                        runs[shape].append(observe(shape, yard, cluster, seconds))
                    except NotReached as error:
                        skipped.append(str(error))
    return runs, skipped, machine


def report(runs: Mapping[Shape, Sequence[Run]], held_out: Sequence[Shape]) -> dict[str, Any]:
    """Fit the median runs of all shapes but `held_out`, and predict those."""
    empty = [shape.name for shape, found in runs.items() if not found]
    if empty:
        raise Unfit(f"no run of {', '.join(empty)} is of use")
    turn_ns = statistics.median(run.turn_ns for found in runs.values() for run in found)
    chosen = {shape: median_run([run.at_speed(turn_ns) for run in found]) for shape, found in runs.items()}
    model = Model.of([run for shape, run in chosen.items() if shape not in held_out])
    told = {shape: model.compare(run) for shape, run in chosen.items()}
    held = [told[shape] for shape in held_out]
    return {
        "ok": all(abs(one["total"] - 1) <= TOLERANCE for one in held), "turn_ns": round(turn_ns, 1),
        "coefficients": model.roles(), "held_out": held,
        "observations": [
            told[shape] | {
                "client_us": round(run.client.us), "client_counts": run.client.counts,
                "nodes_us": [round(row.us) for row in run.nodes], "node_counts": [row.counts for row in run.nodes],
            }
            for shape, run in chosen.items() if shape not in held_out
        ],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m logyard.bench.cost_model", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="one object instead of lines")
    given = parser.parse_args(arguments)
    runs, skipped, machine = measure(given.seconds, given.rounds)
    try:
        found = report(runs, HELD_OUT)
    except Unfit as error:
        raise SystemExit(str(error)) from None
    if given.json:
        print(json.dumps(found | {"skipped": skipped, "machine": machine}))
        return 0 if found["ok"] else 1
    for role, row in found["coefficients"].items():
        print(f"{role}: " + ", ".join(f"{us} us a {name}" for name, us in row.items()))
    print("predicted / measured of client, nodes, total; us a command")
    for title, rows in (("fitted", found["observations"]), ("held out", found["held_out"])):
        for one in rows:
            print(f"  {title} {one['name']}: {one['client']}, {one['nodes']}, {one['total']}; {one['us_per_command']}")
    for line in skipped:
        print(f"  left out: {line}")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

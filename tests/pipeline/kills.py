"""`python -m tests.pipeline.kills [--seed S] [--runs N] [--json]`: exactly-once through kills of everything in Spark.

Each run is a new query that copies logs of a cluster of three nodes to other logs. At a step that the seed draws, at
the first, second or third time, SIGKILL ends the worker of the task, the process that commits, or the driver with all
that it started. The query goes on from its checkpoint, is given more records, and goes on again. Then each log holds
what its source holds, in its order. Exit code 1: one does not; the command that repeats that run is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from logyard.client.sync import Yard, connect_sync
from logyard.service.local_cluster import LocalCluster

from .crashing import BACKEND, EXECUTOR, GROUP, PROCESS, CrashingSource, reached
from .support import fill, reach

ROOT = Path(__file__).parent.parent.parent
STEPS = {
    "exactly-once": (
        "mid-write", "after-write", "before-commit", "after-manifest", "mid-fan-out", "before-done",
        "before-truncation", "after-truncation",
    ),
    "exactly-once-direct": ("mid-write", "after-write", "before-done"),
}  # fmt: skip
IN_TASKS = ("mid-write", "after-write")
"""Steps that come in an executor; a commit is the driver's."""
RUNS = 6
LOGS = 4
PATIENCE_S = 120.0
LOCAL, EXECUTORS = "local[2,3]", "local-cluster[2,1,700]"
"""Masters: tasks are repeated in both; with the second each of two executors is a JVM of its own."""


class Kill(NamedTuple):
    """What dies in a run, and when."""

    guarantee: str
    step: str
    time: int
    victim: str


def drawn(seed: int, executors: bool = False) -> Kill:
    """Return the kill of a seed: six in a row see both guarantees and both victims."""
    draw = random.Random(seed)
    guarantee = "exactly-once-direct" if seed % 3 == 2 else "exactly-once"
    if executors:
        return Kill(guarantee, draw.choice(IN_TASKS), draw.randint(1, 3), EXECUTOR)
    return Kill(guarantee, draw.choice(STEPS[guarantee]), draw.randint(1, 3), GROUP if seed % 2 else PROCESS)


class Driver:
    """A driver of Spark in a session of its own, so that it can be ended with everything that it started."""

    def __init__(self, path: Path, master: str = LOCAL) -> None:
        command = [sys.executable, "-m", "tests.pipeline.kills", "--driver", str(path), "--master", master]
        self.process = subprocess.Popen(
            command, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def ask(self, query: dict[str, Any]) -> None:
        """Have a query run until it has read what there is."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(query) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return what became of it: `{error}`, "" for none. Empty: the driver is dead."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):
                found: dict[str, Any] = json.loads(line)
                return found
        return {}

    def signal(self, number: signal.Signals) -> None:
        """Stop it, its JVM and its workers, or let them go on."""
        for pid in psutil.pids():
            if session_of(pid) == self.process.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill(self) -> None:
        """End it, its JVM and its workers, all at once. Those that begin meanwhile end, too."""
        while left := [one for one in psutil.pids() if session_of(one) == self.process.pid]:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
        self.process.wait()


def session_of(pid: int) -> int:
    """Return the session of a process that runs; 0: none does."""
    try:
        if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            return os.getsid(pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        pass
    return 0


def drive(path: str, master: str) -> None:
    """Be the driver: a query a line of standard input, an answer a line of standard output. Spark's files go to
    `path`."""
    from logyard.pipeline import local_session

    # In a test's process this is how short-lived JVMs run: the driver's is started with it, executors are told.
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    spark = local_session(
        "kills", memory="1g", master=master, spark_local_dir=path, spark_executor_extraJavaOptions=options
    )
    spark.dataSource.register(CrashingSource)
    for line in sys.stdin:
        query = json.loads(line)
        stream = spark.readStream.format("logyard").options(**query["source"]).load()
        rows = stream.selectExpr("replace(log, 'from', 'to') as log", "meta", "payload")
        running = rows.writeStream.format("crashing").options(**query["sink"]).trigger(availableNow=True).start()
        error = ""
        try:
            running.awaitTermination()
        except Exception as failure:
            error = str(failure)
        finally:
            running.stop()
        print(json.dumps({"error": error}), flush=True)


class Rig:
    """A cluster, and a driver that is made anew where it was killed."""

    def __init__(self, cluster: LocalCluster, yard: Yard, path: Path, executors: bool = False) -> None:
        self.yard = yard
        self.path = path
        self.executors = executors
        self.servers = ",".join(cluster.addresses)
        self.driver = self.start()
        self.told: Counter[str] = Counter()

    def start(self) -> Driver:
        """Return a new driver."""
        return Driver(self.path, EXECUTORS if self.executors else LOCAL)

    def query(self, name: str, guarantee: str) -> dict[str, Any]:
        """Return a query from the logs `from-NAME-...` to `to-NAME-...`, whose mark is `mark(name)`."""
        return {
            "source": {
                "servers": self.servers, "subscribePattern": f"from-{name}-.*", "startingOffsets": "earliest",
                "includePayload": "inline", "maxOffsetsPerTrigger": "60", "minRowsPerLog": "7",
            },
            "sink": {
                "servers": self.servers, "sinkId": f"kills-{name}", "deliveryGuarantee": guarantee,
                "createLogs": "true", "checkpointLocation": str(self.path / f"checkpoint-{name}"),
                "mark": str(self.mark(name)),
            },
        }  # fmt: skip

    def mark(self, name: str) -> Path:
        """Return the file that says what is to be killed in a query."""
        return self.path / f"mark-{name}"

    def run(self, seed: int) -> str:
        """Do one run; return what is wrong afterwards, "" for nothing."""
        kill, draw = drawn(seed, self.executors), random.Random(seed)
        sources = [f"from-{seed}-{number}" for number in range(LOGS)]
        mark, query = self.mark(str(seed)), self.query(str(seed), kill.guarantee)
        fill(self.yard, sources, 40, draw.randbytes(draw.choice((0, 20, 9000))))
        mark.write_text(f"{kill.step} {kill.time} {kill.victim}")
        self.driver.ask(query)
        if kill.victim == GROUP:
            try:
                reach(reached(mark).exists, PATIENCE_S)
            except AssertionError:
                return f"step {kill.step} was not reached"
            self.driver.kill()
            self.driver = self.start()
        elif not (answer := self.driver.answer()):
            return "the driver is dead"
        elif kill.victim == EXECUTOR and answer["error"]:
            return f"the tasks of a dead executor were not repeated: {answer['error']}"
        if mark.exists():
            return f"step {kill.step} was not reached"
        if kill.victim == EXECUTOR and BACKEND not in reached(mark).read_text():
            return f"{reached(mark).read_text()[:60]} is no executor"
        self.told[kill.step] += 1
        for name in sources:
            if draw.random() < 0.5:
                self.yard.log(name).append_many([(b"more %d" % number, None) for number in range(30)])
        for _ in range(2):
            # The second time there is nothing to do.
            self.driver.ask(query)
            answer = self.driver.answer()
            if answer.get("error", "the driver is dead"):
                return f"it did not go on: {answer}"
        return "; ".join(self.different(name) for name in sources if self.different(name))

    def different(self, source: str) -> str:
        """Return how a log differs from its source, "" for not at all."""
        wanted, found = (list(self.rows(name)) for name in (source, source.replace("from", "to")))
        if wanted == found:
            return ""
        lost, more = Counter(wanted) - Counter(found), Counter(found) - Counter(wanted)
        return f"{source}: {len(wanted)} records, {lost.total()} lost, {more.total()} twice, or their order changed"

    def rows(self, name: str) -> Iterator[tuple[bytes, bytes | None]]:
        for one in self.yard.log(name).records():
            yield bytes(one.metadata), None if one.payload is None else bytes(one.payload)


@contextmanager
def rig(executors: bool = False) -> Iterator[Rig]:
    """Run a cluster and a driver, with executors of its own or without."""
    with ExitStack() as stack:
        directory = tempfile.TemporaryDirectory(prefix="logyard-kills-", ignore_cleanup_errors=True)
        path = Path(stack.enter_context(directory))
        cluster = stack.enter_context(LocalCluster(path / "yard", 3))
        cluster.start()
        yard = stack.enter_context(connect_sync(cluster.addresses))
        found = Rig(cluster, yard, path, executors)
        stack.callback(lambda: found.driver.kill())
        yield found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.pipeline.kills", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first run's")
    parser.add_argument("--runs", type=int, default=RUNS, help="how many")
    parser.add_argument("--json", action="store_true", help="one object instead of lines")
    parser.add_argument("--executors", action="store_true", help="kill the JVMs of executors, and nothing else")
    parser.add_argument("--driver", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--master", default=LOCAL, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.driver:
        drive(given.driver, given.master)
        return 0
    wrong: list[str] = []
    began = time.monotonic()
    with rig(given.executors) as found:
        for seed in range(given.seed, given.seed + given.runs):
            said = found.run(seed)
            if said:
                only = " --executors" if given.executors else ""
                wrong.append(f"{said}: python -m tests.pipeline.kills --seed {seed} --runs 1{only}")
            if not given.json:
                print(
                    f"{seed}: {' '.join(map(str, drawn(seed, given.executors)))}: {said or 'each record once'}",
                    flush=True,
                )
    outcome = {
        "ok": not wrong, "runs": given.runs, "kills": sum(found.told.values()), "steps": dict(found.told),
        "wrong": wrong, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    print(json.dumps(outcome) if given.json else f"{outcome['kills']} kills, {len(wrong)} runs wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

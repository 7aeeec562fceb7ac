"""Consumers as processes of their own on a cluster of daemons: killed, stopped and continued, ended in order; nodes
that coordinate them killed; partitions added and taken away. Then the judgement."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from logyard.client.sync import Yard, connect_sync
from logyard.protocol.errors import LogyardError
from logyard.protocol.groups import coordinator_of
from logyard.service.demo.judge import Commit, Given, History, Place, Verdict, judge
from logyard.service.local_cluster import LocalCluster

from .consumer import REBORN

TOPIC, GROUP = "work", "workers"
CONSUMERS = 4
PRODUCERS = 2
KEYS = 6
PARTITIONS, PARTITIONS_MAX = 3, 8
RATE_S = 0.01
DRAIN_S = 90.0
KINDS = ("kill", "stop", "end", "coordinator", "grow", "shrink", "takeover")


class Result(NamedTuple):
    """What came of a run."""

    verdict: Verdict
    faults: dict[str, int]
    rebalances: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Return whether it is as it must be."""
        return self.verdict.passed and self.verdict.records > 0

    def row(self) -> dict[str, Any]:
        """Return it for a machine."""
        verdict = self.verdict
        return {
            "ok": self.passed, "records": verdict.records, "given": verdict.given, "lost": verdict.lost,
            "doubled": verdict.doubled, "doubled_without_cause": verdict.doubled_without_cause,
            "violations": len(verdict.violations), "first": verdict.violations[:5], "faults": self.faults,
            "rebalances": self.rebalances, "seconds": round(self.seconds, 1),
        }  # fmt: skip


class Producer(threading.Thread):
    """Sends the numbers of its keys, one after the other, and knows what was acknowledged."""

    def __init__(self, servers: list[str], first: int) -> None:
        super().__init__(daemon=True)
        self.servers = servers
        self.keys = range(first, first + KEYS)
        # By key and number: numbers of partitions are used again.
        self.sent: dict[tuple[int, int], Place] = {}
        self.over = threading.Event()

    def run(self) -> None:
        """Send until told to end."""
        numbers: Counter[int] = Counter()
        with connect_sync(self.servers) as yard:
            topic = yard.topic(TOPIC)
            while not self.over.is_set():
                for key in self.keys:
                    numbers[key] += 1
                    with suppress(LogyardError):
                        found = topic.send(b"key-%d" % key, b"", b"%d:%d" % (key, numbers[key]))
                        self.sent[key, numbers[key]] = found.partition, found.offset
                    self.over.wait(RATE_S)


class Members:
    """The consumers' processes."""

    def __init__(self, directory: Path, servers: list[str], chance: random.Random) -> None:
        self.directory = directory
        self.servers = servers
        self.chance = chance
        self.alive: dict[int, subprocess.Popen[bytes]] = {}
        self.names: dict[int, str] = {}
        self.killed: dict[int, float] = {}
        self.fenced: set[int] = set()
        self.stops: dict[int, list[tuple[float, float]]] = {}
        self.count = 0

    def journal(self, number: int) -> Path:
        """Return where a consumer writes."""
        return self.directory / f"consumer-{number}.jsonl"

    def begin(self, name: str = "") -> int:
        """Start one; return its number."""
        self.count += 1
        number = self.count
        words = [",".join(self.servers), TOPIC, GROUP, str(self.journal(number)), str(self.chance.random()), name]
        log = (self.directory / f"consumer-{number}.log").open("wb")
        self.alive[number] = subprocess.Popen([sys.executable, "-m", "tests.groups.consumer", *words], stderr=log)
        self.names[number] = name
        return number

    def any(self) -> int:
        """Return one of them."""
        return self.chance.choice(sorted(self.alive))

    def kill(self, number: int) -> None:
        """Kill one as no process can help it."""
        self.killed[number] = time.monotonic()
        process = self.alive.pop(number)
        process.kill()
        process.wait()

    def stop(self, number: int, seconds: float) -> None:
        """Have one not run for a time."""
        began = time.monotonic()
        self.alive[number].send_signal(signal.SIGSTOP)
        rest(seconds)
        self.alive[number].send_signal(signal.SIGCONT)
        self.stops.setdefault(number, []).append((began, time.monotonic()))

    def end(self, number: int) -> None:
        """Let one end in order."""
        process = self.alive.pop(number)
        process.terminate()
        # One that was still being loaded has not joined.
        if process.wait(60) not in (0, -signal.SIGTERM):
            said = (self.directory / f"consumer-{number}.log").read_text()
            raise RuntimeError(f"consumer {number} failed:\n{said}")

    def close(self) -> None:
        """Leave nothing behind."""
        for number in list(self.alive):
            self.alive[number].send_signal(signal.SIGCONT)
            self.kill(number)

    def rows(self) -> tuple[list[Given], list[Commit], dict[int, list[int]]]:
        """Return what all of them wrote."""
        given: list[Given] = []
        commits: list[Commit] = []
        numbers: dict[int, list[int]] = {}
        for number in range(1, self.count + 1):
            path = self.journal(number)
            for line in path.read_bytes().splitlines() if path.exists() else ():
                try:
                    kind, *values = json.loads(line)
                except ValueError:
                    # Its last line, when it was killed.
                    continue
                if kind == "given":
                    at, *rest = values
                    given.append(Given(at, number, *rest))
                elif kind == "commit":
                    asked, answered, counted = values
                    commits += (Commit(asked, answered, number, *one) for one in counted)
                elif kind == "member":
                    numbers.setdefault(number, []).append(values[0])
        return given, commits, numbers


def run(directory: Path, seconds: float, seed: int, only: tuple[str, ...] = KINDS) -> Result:
    """Run it for so long."""
    chance = random.Random(seed)
    began = time.monotonic()
    faults: Counter[str] = Counter()
    with LocalCluster(directory / "cluster", 3) as cluster:
        cluster.start()
        servers = list(cluster.addresses)
        members = Members(directory, servers, chance)
        producers = [Producer(servers, 1 + KEYS * number) for number in range(PRODUCERS)]
        try:
            with connect_sync(servers, timeout=60) as yard:
                yard.topic(TOPIC).create(PARTITIONS)
                for number in range(CONSUMERS):
                    members.begin("fixed" if not number else "")
                for one in producers:
                    one.start()
                wait_for(lambda: sum(row["members"] for row in yard.consumer_groups()) == CONSUMERS, "all are members")
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    kind = chance.choice(only)
                    if fault(kind, yard, cluster, members, chance):
                        faults[kind] += 1
                    rest(chance.uniform(0.5, 3.0))
                for one in producers:
                    one.over.set()
                for one in producers:
                    one.join(60)
                sent = {said: place for one in producers for said, place in one.sent.items()}
                drain(members, set(sent))
                for number in list(members.alive):
                    members.end(number)
                rebalances = int(yard.consumer_group(GROUP).describe()["rebalances"])
        finally:
            members.close()
            for one in producers:
                one.over.set()
    given, commits, numbers = members.rows()
    verdict = judge(
        History(places(sent, given), given, commits, members.killed, members.stops, numbers, members.fenced)
    )
    return Result(verdict, dict(faults), rebalances, time.monotonic() - began)


def fault(kind: str, yard: Yard, cluster: LocalCluster, members: Members, chance: random.Random) -> bool:
    """Do one thing; return whether it could be done."""
    number = members.any()
    if kind == "kill":
        members.kill(number)
        members.begin(members.names[number])
    elif kind == "stop":
        members.stop(number, chance.uniform(0.5, 6.0))
    elif kind == "end":
        name = members.names[number]
        members.end(number)
        members.begin(name)
    elif kind == "takeover":
        # The older process runs when the newer one comes.
        older = next((one for one in members.alive if members.names[one]), None)
        if older is None:
            return False
        members.fenced.add(older)
        members.begin(members.names[older])
        rest(2.0)
        members.kill(older)
    elif kind == "coordinator":
        leader = int(yard.locate(coordinator_of(GROUP))["leader"])
        if not leader:
            return False
        cluster.kill9(leader)
        rest(chance.uniform(0.1, 2.0))
        cluster.restart(leader)
    else:
        topic = yard.topic(TOPIC)
        count = len(topic.describe().live)
        wanted = count + chance.randint(1, 2) if kind == "grow" else count - chance.randint(1, 2)
        if not 0 < wanted <= PARTITIONS_MAX:
            return False
        topic.alter(wanted)
    return True


def rest(seconds: float) -> None:
    """Let the processes be as they are for a while: how long a fault lasts is a time."""
    threading.Event().wait(seconds)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until something is so. Raises TimeoutError."""
    until = time.monotonic() + DRAIN_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(what)
        rest(0.1)


def places(sent: Mapping[tuple[int, int], Place], given: Sequence[Given]) -> dict[Place, tuple[int, int]]:
    """Return what was sent by where it lies, in the partition that whoever was given it knows; what nobody was given
    from where it lies is lost, and where others were given that, in a partition of its number that no one was."""
    known = {
        (one.key, one.number): (one.partition, one.offset)
        for one in given
        if sent.get((one.key, one.number)) == (one.partition % REBORN, one.offset)
    }
    taken = {(one.partition, one.offset) for one in given}
    return {
        known.get(said) or ((-place[0] - 1, place[1]) if place in taken else place): said
        for said, place in sent.items()
    }


def drain(members: Members, sent: set[tuple[int, int]]) -> None:
    """Wait until everything that was acknowledged was given to somebody, as long as that may take."""
    until = time.monotonic() + DRAIN_S
    while time.monotonic() < until:
        given, _, _ = members.rows()
        if sent <= {(one.key, one.number) for one in given}:
            return
        rest(1.0)

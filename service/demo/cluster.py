"""The demo of the cluster: nodes die, come and go while producers send and consumer groups consume.

Five node processes with a catalogue, two topics, four consumer processes. A node is killed for good and declared dead,
a consumer is killed and another one comes, a node joins by invitation, another is drained and removed. Everything that
was acknowledged must have been consumed, nothing skipped, and read twice only what a killed consumer had not committed
(`judge`). `run_cluster` returns every figure of the report; called by `logyard demo --cluster`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from logyard.bench.cluster import reach
from logyard.client.sync import Yard, connect_sync
from logyard.protocol.errors import LogyardError

from ..cli.nodes import invitation
from ..cli.output import Output
from ..local_cluster import LocalCluster
from .cluster_report import Found, account
from .consumer import group_of
from .judge import Place
from .run import Steps, home
from .timeline import Event, Journals, picture

NODES = 5
COPIES = 3
TOPICS: Mapping[str, tuple[int, tuple[int, ...]]] = {"orders": (8, (1, 2, 3)), "clicks": (4, (3, 4, 5))}
"""Of each topic: its partitions, and the nodes that hold them at first."""
CONSUMERS = 4
BEFORE = 2000
"""Records that are acknowledged before anything is done to the cluster."""
KEYS = 20
"""Of each producer; one record of each goes in a batch."""
PAUSE_S = 0.15
"""Between two batches of a producer."""
LOOK_S = 0.4
"""Between two looks at where members are."""
STEP_S = 90.0
CALL_S = 60.0
STOP_S = 20.0
DATA = ("nodes", "consumers")
PICTURE = "who-had-what.png"


class Producer(threading.Thread):
    """Sends numbered records of its keys to one topic, a batch at a time. `sent`: (key, number) of what was
    acknowledged, by place; `unknown`: records whose outcome it was not told; `longest`: seconds of a batch."""

    def __init__(self, servers: Sequence[str], topic: str) -> None:
        super().__init__(daemon=True, name=f"producer of {topic}")
        self.servers = list(servers)
        self.topic = topic
        self.sent: dict[Place, tuple[int, int]] = {}
        self.unknown = 0
        self.longest = 0.0
        self.over = threading.Event()
        self.finished = False

    def run(self) -> None:
        """Send until told to end."""
        with connect_sync(self.servers, timeout=CALL_S) as yard:
            topic = yard.topic(self.topic)
            for number in count(1):
                began = time.monotonic()
                batch = [(b"key-%d" % key, b"", b"%d:%d" % (key, number)) for key in range(KEYS)]
                try:
                    found = topic.send_many(batch)
                except LogyardError:
                    self.unknown += KEYS
                else:
                    self.sent |= {(place.partition, place.offset): (key, number) for key, place in enumerate(found)}
                self.longest = max(self.longest, time.monotonic() - began)
                if self.over.wait(PAUSE_S):
                    break
        self.finished = True


class Watch(threading.Thread):
    """Looks where the members of all partitions are, as the catalogue has it. `seen`: from then on, a partition's
    voters."""

    def __init__(self, servers: Sequence[str]) -> None:
        super().__init__(daemon=True, name="watch")
        self.servers = list(servers)
        self.seen: list[tuple[float, tuple[str, int], frozenset[int]]] = []
        self.over = threading.Event()

    def run(self) -> None:
        """Look until told to end."""
        newest: dict[tuple[str, int], frozenset[int]] = {}
        with connect_sync(self.servers, timeout=CALL_S) as yard:
            while not self.over.wait(LOOK_S):
                with contextlib.suppress(LogyardError):
                    for place, voters in partitions(yard).items():
                        if voters and newest.get(place) != voters:
                            newest[place] = voters
                            self.seen.append((time.monotonic(), place, voters))


def partitions(yard: Yard) -> dict[tuple[str, int], frozenset[int]]:
    """Return the voters of each topic's partitions, as the catalogue has them."""
    found = {}
    for row in yard.catalog("logs", "list", {"state": "live"})["result"]:
        topic, _, number = row["name"].rpartition(".")
        if topic in TOPICS:
            found[topic, int(number)] = frozenset(row["voters"])
    return found


class Consumers:
    """The consumers' processes, by number. `killed`: when each of those that were was."""

    def __init__(self, directory: Path, servers: Sequence[str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.servers = ",".join(servers)
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.killed: dict[int, float] = {}
        self.started = 0

    def journal(self, number: int) -> Path:
        """Return where one writes."""
        return self.directory / f"consumer-{number}.jsonl"

    def begin(self) -> int:
        """Start one; return its number. It ends when this process does, which holds its standard input."""
        self.started += 1
        number = self.started
        command = [sys.executable, "-m", "logyard.service.demo.consumer", self.servers, str(self.journal(number))]
        with (self.directory / f"consumer-{number}.log").open("wb") as log:
            self.running[number] = subprocess.Popen(
                [*command, *TOPICS], stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        return number

    def kill(self, number: int) -> None:
        """Send SIGKILL to one."""
        process = self.running.pop(number)
        process.kill()
        process.communicate()
        self.killed[number] = time.monotonic()

    def end(self) -> list[str]:
        """Let all end in order; return what went wrong."""
        for process in self.running.values():
            assert process.stdin is not None
            process.stdin.close()
        problems = []
        for number, process in self.running.items():
            if process.wait(STOP_S):
                said = (self.directory / f"consumer-{number}.log").read_text("utf-8", "replace").strip()
                problems.append(f"consumer {number} ended with code {process.returncode}: {said[-400:]}")
        self.running.clear()
        return problems

    def close(self) -> None:
        """Leave no process behind."""
        for process in self.running.values():
            process.kill()
            process.communicate()
        self.running.clear()


def run_cluster(directory: Path | None, output: Output) -> dict[str, Any]:
    """Run everything; return the report. Raises `ClusterFailed`, `NotReached` or a client's error when a step can't be
    finished."""
    steps = Steps(output)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(home(directory, "logyard-demo-cluster-", DATA))
        stack.enter_context(steps.progress)
        cluster = stack.enter_context(LocalCluster(where / "nodes", NODES, catalog=True))
        with steps.step(f"start {NODES} nodes"):
            cluster.start()
        yard = stack.enter_context(connect_sync(cluster.addresses, timeout=CALL_S))
        with contextlib.closing(ClusterDemo(cluster, yard, where / "consumers", steps)) as run:
            run.everything()
            cluster.stop()
            fields = account(run.found(), COPIES) | run.figures()
        with steps.step("draw"):
            fields["picture"] = drawn(where / PICTURE, fields)
    fields |= {"seconds": round(time.monotonic() - began, 2), "step_seconds": steps.seconds}
    return fields


def drawn(path: Path, fields: Mapping[str, Any]) -> str | None:
    """Draw the picture; return its path, or None where there is no matplotlib."""
    owned, held, events = fields["owned"], fields["held"], fields["events"]
    try:
        return str(picture(path, owned, held, events))
    except ImportError:
        return None


class ClusterDemo:
    """One run: the steps in order, and what is known of each."""

    def __init__(self, cluster: LocalCluster, yard: Yard, directory: Path, steps: Steps) -> None:
        self.cluster = cluster
        self.yard = yard
        self.steps = steps
        self.consumers = Consumers(directory, cluster.addresses)
        self.producers = [Producer(cluster.addresses, topic) for topic in TOPICS]
        self.watch = Watch(cluster.addresses)
        self.began = time.monotonic()
        self.events: list[Event] = []
        self.problems: list[str] = []
        self.pids: list[int] = []
        self.rebalances = 0
        self.ended_moves: list[Mapping[str, Any]] = []
        self.voters: dict[tuple[str, int], frozenset[int]] = {}
        self.away: dict[str, int] = {}
        """The node that was killed, the one that was drained, the one that came."""

    def everything(self) -> None:
        """Run all steps."""
        self.prepare()
        self.consume()
        self.kill_a_node()
        self.replace_a_consumer()
        self.add_a_node()
        self.drain_a_node()
        self.finish()

    def close(self) -> None:
        """Leave nothing running that this made."""
        for producer in self.producers:
            producer.over.set()
        self.watch.over.set()
        self.consumers.close()

    def note(self, text: str) -> None:
        """Keep when something was done."""
        self.events.append(Event(round(time.monotonic() - self.began, 2), text))

    def nodes(self) -> dict[int, tuple[str, int]]:
        """Return each node's state, and how many logs have a member there."""
        rows = self.yard.catalog("nodes", "list")["result"]
        return {int(row["node"]): (str(row["state"]), int(row["held"])) for row in rows}

    def emptied(self, node: int) -> bool:
        """Return whether no log has a member on a node."""
        return self.nodes().get(node, ("", 0))[1] == 0

    def prepare(self) -> None:
        """Make the topics, once all nodes know one another."""
        with self.steps.step("the catalogue has all nodes, topics"):
            states = [("active", 0)] * NODES
            reach("a catalogue of all nodes", lambda: [*self.nodes().values()] == states, STEP_S)
            for name, (number, members) in TOPICS.items():
                self.yard.topic(name).create(number, members=members)
            self.pids = self.cluster.pids
            self.began = time.monotonic()

    def consume(self) -> None:
        """Send; let two consumers begin, then two more."""
        for thread in (*self.producers, self.watch):
            thread.start()
        with self.steps.step("send; two consumers, then four"):
            for members in (CONSUMERS // 2, CONSUMERS):
                for _ in range(CONSUMERS // 2):
                    self.note(f"consumer {self.consumers.begin()} starts")
                reach(f"{members} members of each group", lambda members=members: self.shared(members), STEP_S)  # type: ignore[misc]

    def groups(self) -> list[dict[str, Any]]:
        """Return what the coordinators say of the groups."""
        try:
            return [self.yard.consumer_group(group_of(topic)).describe() for topic in TOPICS]
        except LogyardError as error:
            if error.code != "unknown_consumer_group":
                raise
            return []

    def shared(self, members: int) -> bool:
        """Return whether each group has so many members, and each of them a share of it."""
        found = self.groups()
        return bool(found) and all(
            len(one["members"]) == members
            and {row["owner"] for row in one["partitions"] if not row["revoking"]}
            == {row["member"] for row in one["members"]}
            for one in found
        )

    def kill_a_node(self) -> None:
        """Send SIGKILL to the node that leads most partitions, declare it dead, wait until its members are replaced."""
        with self.steps.step("kill -9 a node, declare it dead"):
            reach("records", lambda: sum(len(one.sent) for one in self.producers) >= BEFORE, STEP_S)
            leads = Counter(int(self.yard.locate(f"{topic}.{number}")["leader"]) for topic, number in self.places())
            victim = max((node for node in leads if node), key=lambda node: (leads[node], node))
            self.away["killed"] = victim
            self.cluster.kill9(victim)
            self.note(f"node {victim} is killed")
            self.yard.change_catalog("nodes", "declare_dead", {"node": victim, "force": True})
            self.note(f"node {victim} is declared dead")
            reach("the dead node's members are replaced", lambda: self.emptied(victim), STEP_S)
            self.note(f"node {victim} is replaced")

    def places(self) -> list[tuple[str, int]]:
        """Return all partitions."""
        return [(topic, number) for topic, (partitions, _) in TOPICS.items() for number in range(partitions)]

    def replace_a_consumer(self) -> None:
        """Send SIGKILL to a consumer, and start another one."""
        victim = max(self.consumers.running)
        self.consumers.kill(victim)
        self.note(f"consumer {victim} is killed")
        self.note(f"consumer {self.consumers.begin()} starts")

    def add_a_node(self) -> None:
        """Let a node join, and wait until it has members."""
        with self.steps.step("invite a node"):
            node = max(self.nodes()) + 1
            self.away["added"] = node
            token, _ = invitation(self.yard)
            asked = next(one.client_address for one in self.cluster.nodes.values() if one.process is not None)
            self.cluster.join(node, token, asked)
            self.note(f"node {node} joins")
            reach("the new node has members", lambda: self.nodes()[node][1] > 0, STEP_S)
        with self.steps.step("the new consumer has its share"):
            reach("the killed consumer is replaced", lambda: self.shared(CONSUMERS), STEP_S)

    def drain_a_node(self) -> None:
        """Drain the node with most members, remove it, stop it."""
        with self.steps.step("drain a node, remove it"):
            held = {node: logs for node, (state, logs) in self.nodes().items() if state == "active"}
            del held[self.away["added"]]
            node = max(held, key=lambda one: (held[one], one))
            self.away["drained"] = node
            self.yard.change_catalog("nodes", "drain", {"node": node})
            self.note(f"node {node} drains")
            reach("the drained node is empty", lambda: self.emptied(node), STEP_S)
            self.yard.change_catalog("nodes", "remove", {"node": node})
            self.cluster.end(node)
            self.note(f"node {node} is empty, removed, stopped")

    def finish(self) -> None:
        """Send no more, wait until all is consumed and committed."""
        with self.steps.step("consume what is left"):
            for producer in self.producers:
                producer.over.set()
            for producer in self.producers:
                producer.join(CALL_S)
                if not producer.finished:
                    self.problems.append(f"the {producer.name} did not end in order")
            reach("everything is committed", self.caught_up, STEP_S)
            self.note("everything is committed")
            self.rebalances = sum(int(one["rebalances"]) for one in self.groups())
            self.problems += self.consumers.end()
            self.watch.over.set()
            self.watch.join(CALL_S)
            self.ended_moves = self.yard.catalog("plan", "list")["result"]["ended"]
            self.voters = partitions(self.yard)

    def caught_up(self) -> bool:
        """Return whether the groups have committed everything."""
        found = self.groups()
        return bool(found) and all(row["lag"] == 0 for one in found for row in one["partitions"])

    def found(self) -> Found:
        """Return what the run left behind, to be accounted for."""
        end, journals = time.monotonic(), Journals()
        for number in range(1, self.consumers.started + 1):
            journals.read(number, self.consumers.journal(number), self.consumers.killed.get(number, end))
        return Found(
            journals, {one.topic: one.sent for one in self.producers}, self.consumers.killed, self.ended_moves,
            {place: self.voters.get(place, frozenset()) for place in self.places()},
            set(self.cluster.nodes) - {self.away["killed"], self.away["drained"]},
            self.watch.seen, self.began, end, self.problems,
        )  # fmt: skip

    def figures(self) -> dict[str, Any]:
        """Return what is only told, and not judged."""
        return {
            "nodes": NODES, **self.away, "consumers": self.consumers.started, "node_pids": self.pids,
            "rebalances": self.rebalances, "events": self.events,
            "unknown": sum(producer.unknown for producer in self.producers),
            "longest_send_s": round(max(producer.longest for producer in self.producers), 3),
        }  # fmt: skip

"""One run: load from the first moment to the last, faults in an order drawn from the seed, then the judgement."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from logyard.client.sync import connect_sync
from logyard.protocol.errors import LogyardError
from logyard.service.local_cluster import ClusterFailed

from . import judge, offline
from .cluster import ChaosCluster
from .faults import BREAKING, Torment
from .kv_load import KvLoad
from .load import (
    KVS,
    LOGS,
    NAMES,
    QUEUES,
    REGISTERS,
    RING,
    Client,
    Journal,
    LogClient,
    QuietClient,
    RegisterClient,
    RingClient,
)  # fmt: skip
from .queue_load import OPTIONS, QueueLoad
from .term_load import TERM_KV, TERM_QUEUE, TermLoad
from .trio_load import FINISH_S, TrioLoad

RATE_MIN = 100.0
LOOK_EVERY = 4
"""After so many faults all nodes scrub, and one is killed and its directory checked."""
CALM_S = 0.5
REGISTER_CLIENTS = 6
LOG_CLIENTS = 3
KV_CLIENTS_FROM, QUEUE_CLIENTS_FROM, TERM_CLIENTS_FROM = 100, 200, 300
"""Numbers of clients; one thread has many."""


class Result:
    """What a run found. `healthy_s`: seconds in which a quorum was healthy, with `healthy` operations done in them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.operations = 0
        self.acknowledged = 0
        self.faults: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.lost: list[str] = []
        self.undecided = 0
        self.violations: list[str] = []
        self.errors: dict[str, int] = {}
        self.seconds = self.healthy_s = 0.0
        self.healthy = 0
        self.disk: dict[int, int] = {}
        self.histories: dict[str, int] = {}
        self.watched = 0
        self.queues: dict[str, dict[str, int]] = {}
        self.terms = 0
        self.scrubs = 0

    @property
    def rate(self) -> float:
        """Operations a second while a quorum was healthy."""
        return self.healthy / self.healthy_s if self.healthy_s else 0.0

    @property
    def passed(self) -> bool:
        """Whether all is well."""
        silent = [kind for kind in self.missed if not self.faults[kind]]
        return not (self.lost or self.undecided or self.violations or silent) and self.rate >= RATE_MIN

    def row(self) -> dict[str, Any]:
        """For people and machines."""
        faults = dict(sorted(self.faults.items()))
        return {
            "operations": self.operations, "acknowledged": self.acknowledged, "faults": faults,
            "missed": dict(self.missed), "lost": len(self.lost), "undecided": self.undecided,
            "violations": [*self.violations, *self.lost[:20]], "rate": round(self.rate, 1), "seed": self.seed,
            "seconds": round(self.seconds, 1), "errors": self.errors, "disk_bytes": self.disk, "passed": self.passed,
            "histories": self.histories, "watched": self.watched, "queues": self.queues,
            "terms": self.terms, "scrubs": self.scrubs,
        }  # fmt: skip


class Run:
    """The pieces of one run."""

    def __init__(self, cluster: ChaosCluster, seed: int) -> None:
        self.cluster = cluster
        self.result = Result(seed)
        self.journal = Journal()
        self.stop = threading.Event()
        self.yard = connect_sync(cluster.addresses, timeout=10.0)
        self.torment = Torment(cluster, self.yard, seed)
        kinds: list[type[Client]] = [*[RegisterClient] * REGISTER_CLIENTS, *[LogClient] * LOG_CLIENTS]
        kinds += [RingClient, QuietClient]
        self.clients = [
            kind(number, cluster.addresses, self.journal, self.stop, seed) for number, kind in enumerate(kinds, 1)
        ]

        self.kv = KvLoad(KV_CLIENTS_FROM, cluster.addresses, self.journal, self.stop, seed)
        self.queue = QueueLoad(QUEUE_CLIENTS_FROM, cluster.addresses, self.journal, self.stop, seed)
        self.terms = TermLoad(TERM_CLIENTS_FROM, cluster.addresses, self.journal, self.stop, seed)

    @property
    def threads(self) -> list[Client | TrioLoad]:
        """All that makes load."""
        return [*self.clients, self.kv, self.queue, self.terms]

    def create(self) -> None:
        """The groups, on all nodes."""
        members = tuple(self.cluster.nodes)
        self.yard.create_many(REGISTERS, members=members, machine="registers")
        self.yard.create_many((*LOGS, RING), members=members)
        self.yard.create_many(KVS, members=members, machine="hashed-kv")
        self.yard.create_many(QUEUES, members=members, machine="hashed-queue", **OPTIONS)
        self.yard.create(TERM_KV, members=members, machine="kv")
        self.yard.create(TERM_QUEUE, members=members, machine="queue")

    def schedule(self, only: tuple[str, ...]) -> Iterator[tuple[str, Callable[[], int]]]:
        """All kinds in a drawn order, again and again."""
        kinds = self.torment.kinds()
        chosen = list(only or kinds)
        while True:
            self.torment.draw.shuffle(chosen)
            for kind in chosen:
                yield kind, kinds[kind]

    def storm(self, seconds: float, only: tuple[str, ...]) -> None:
        """Faults until the time is over, or the cluster does not come back."""
        result, journal = self.result, self.journal
        deadline = time.monotonic() + seconds
        for number, (kind, strike) in enumerate(self.schedule(only), 1):
            if time.monotonic() > deadline:
                return
            begun, before = time.monotonic(), journal.done
            try:
                hits = strike()
            except (AssertionError, ClusterFailed, subprocess.TimeoutExpired, LogyardError) as error:
                result.violations.append(f"{kind}: {type(error).__name__}: {error}")
                return
            (result.faults if hits else result.missed)[kind] += hits or 1
            if kind not in BREAKING:
                result.healthy_s += time.monotonic() - begun
                result.healthy += journal.done - before
            begun, before = time.monotonic(), journal.done
            complaint = judge.until(self.healthy)
            if complaint:
                result.violations.append(f"stuck after {kind}: {complaint}")
                self.note("stuck.json")
                return
            if number % LOOK_EVERY == 0:
                result.violations += self.look(self.torment.victim())
            self.torment.never.wait(CALM_S)
            result.healthy_s += time.monotonic() - begun
            result.healthy += journal.done - before

    def look(self, victim: int) -> list[str]:
        """Look for damage on every disk, while nodes run and when one was killed: on sound ones there is none."""
        rotten = self.torment.rotten
        complaint = judge.scrubbed(self.yard)
        found = [complaint] if complaint else judge.false_alarms(self.yard.scrub(), rotten)
        self.result.scrubs += 1
        return found + offline.look(self.cluster, victim, rotten)

    def healthy(self) -> str:
        """All nodes run, and all members are up to date."""
        for node, code in self.cluster.exited().items():
            tail = self.cluster.nodes[node].log_tail()
            self.result.violations.append(f"node {node} ended by itself with {code}: {tail}")
            self.cluster.nodes[node].forget()
            self.cluster.restart(node)
        return judge.settled(self.yard)

    def note(self, name: str) -> None:
        """Write down how every node and every member sees itself, for whoever looks for the reason."""
        found: dict[str, dict[int, Any]] = {}
        for node in self.cluster.nodes:
            try:
                found.setdefault("nodes", {})[node] = self.yard.status(node)
            except LogyardError as error:
                found.setdefault("nodes", {})[node] = str(error)
        for group in NAMES:
            for node in self.cluster.nodes:
                try:
                    found.setdefault(group, {})[node] = self.yard.describe(group, node=node)
                except LogyardError as error:
                    found.setdefault(group, {})[node] = str(error)
        (self.cluster.directory / name).write_text(json.dumps(found, indent=1, default=str), "utf-8")

    def finish(self, directory: Path) -> None:
        """Load ends; everything is judged."""
        result, journal = self.result, self.journal
        self.stop.set()
        for client in self.threads:
            client.join(60 + 2 * FINISH_S)
            if client.is_alive():
                result.violations.append(f"{client.name} does not end")
            if client.failure is not None:
                trace = "".join(traceback.format_exception(client.failure)[-3:])
                result.violations.append(f"{client.name} failed: {trace}")
        self.judge_histories(directory)
        for told in self.queue.told.values():
            if told.stats:
                result.lost += told.judge()
            result.queues[told.name] = {
                **told.stats,
                "confirmed": len(told.confirmed),
                "again": told.again,
                **{f"again_{cause}": count for cause, count in told.causes.items()},
            }
        result.violations += [*journal.violations, *self.terms.terms.early]
        result.terms = self.terms.terms.checked
        if complaint := judge.until(self.healthy):
            result.violations.append(f"stuck at the end: {complaint}")
            self.note("stuck.json")
            return
        journal.violations.clear()
        verdict = judge.Verdict(self.yard, journal, self.kv.revisions)
        try:
            verdict.examine()
            result.disk = verdict.shrink()
        except LogyardError as error:
            result.violations.append(f"the examination failed: {error.code}: {error}")
        result.lost += verdict.lost
        result.violations += [*verdict.violations, *journal.violations]

    def judge_histories(self, directory: Path) -> None:
        """Registers and keys, as the checker sees them."""
        result, journal = self.result, self.journal
        result.operations = len(journal.acknowledged) + len(journal.refused)
        for model in journal.rows:
            outcome = judge.linearizable(journal, model, directory / f"{model}.jsonl")
            result.operations += outcome.operations
            result.histories[model] = outcome.operations
            if outcome.valid is None:
                result.undecided += 1
            elif not outcome.valid:
                result.violations.append(f"not linearizable: {outcome.key}: {outcome.reason}")
        for seen in self.kv.revisions.values():
            result.watched += len(seen.whole)
        for told in self.queue.told.values():
            result.operations += len(told.ids) + len(told.refused)
        result.acknowledged, result.errors = journal.done, dict(journal.errors)


def run(directory: Path, minutes: float, seed: int, only: tuple[str, ...] = ()) -> Result:
    """A whole run in a directory of its own. BLOCKING."""
    begun = time.monotonic()
    cluster = ChaosCluster(directory / "yard")
    with cluster:
        cluster.start()
        one = Run(cluster, seed)
        with one.yard:
            one.create()
            one.kv.prepare()
            one.queue.prepare()
            one.terms.prepare()
            for client in one.threads:
                client.start()
            try:
                one.storm(minutes * 60, only)
            finally:
                one.stop.set()
            one.finish(directory)
        cluster.stop()
        one.result.violations += offline.complaints(cluster, sorted(cluster.nodes), one.torment.rotten)
    one.result.seconds = time.monotonic() - begun
    return one.result


__all__ = ["NAMES", "Result", "run"]

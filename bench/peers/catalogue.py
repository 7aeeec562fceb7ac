"""Which file knows which rival."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..suite.ours import settings_of
from ..suite.run import Contender
from ..suite.table import SHIPPED, Case, Profile
from .peer import PUT, WATCH, Load, Peer

MODULES: Mapping[str, str] = {
    "etcd": "etcd", "etcd-debian": "etcd", "ra": "ra", "rabbitmq": "rabbitmq", "nats": "nats", "redis": "redis",
    "zookeeper": "zookeeper", "pysyncobj": "pysyncobj_peer",
}  # fmt: skip


def peer_of(name: str) -> type[Peer]:
    """Return a rival's class."""
    found: Mapping[str, type[Peer]] = importlib.import_module(f"logyard.bench.peers.{MODULES[name]}").PEERS
    return found[name]


def contenders(names: Sequence[str], shipped: bool) -> list[Contender]:
    """Return the rivals as the suite runs them, those that are not installed too; with `shipped` once more as they
    come, where that is less durable."""
    found = []
    for name in names:
        kind = peer_of(name)
        version, install = kind.look()
        both = bool(version) and shipped and kind.weaker_as_shipped()
        for as_shipped in (False, True) if both else (False,):
            notes = list(kind.remarks() if version else ())
            notes += ["as shipped: does not sync before it answers"] * as_shipped
            called = name + SHIPPED * as_shipped
            run_one = Runner(kind, as_shipped).run if version else None
            found.append(Contender(called, version, run_one, install, notes))
    return found


class Runner:
    """Runs a case on a rival: a new cluster each time."""

    def __init__(self, kind: type[Peer], shipped: bool) -> None:
        self.kind = kind
        self.shipped = shipped

    def run(self, case: Case, profile: Profile, directory: Path, processes: int) -> dict[str, Any]:
        """Start it, load it once, stop it."""
        with self.kind(case.nodes, directory, self.shipped) as peer:
            peer.start()
            return peer.run(load_of(case, profile, processes), lambda text: None)


def load_of(case: Case, profile: Profile, processes: int) -> Load:
    """Return what a case asks of any system: appends, or what KV has beside its defaults."""
    told: Mapping[str, Any] = asdict(settings_of(case, profile, processes))
    mode = str(told.get("mode", PUT))
    return Load(
        clients=int(told["clients"]), window=int(told.get("window", 1)), size=int(told["size"]),
        logs=int(told.get("logs", 1)), seconds=told["seconds"], warmup_s=told["warmup_s"],
        rate=float(told.get("rate", 0.0)), processes=processes, mode=mode,
        watchers=int(told["watchers"]) if mode == WATCH else 0, keep=int(told.get("keep", 0)),
    )  # fmt: skip

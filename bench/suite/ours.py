"""Our own system as the suite's first one: each kind of case is run by its function of `bench.cases`.

The command line gives a way to start a cluster; this module knows which settings and limits a kind takes.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .. import settings as kinds
from ..cluster import Cluster
from .sync_delay import delayed_environment
from .table import Case, Profile


class Clusters(Protocol):
    """Start a cluster of so many nodes in a directory, and stop it in the end."""

    def __call__(
        self, nodes: int, directory: Path, limits: Mapping[str, object] | None, environment: Mapping[str, str]
    ) -> AbstractContextManager[Cluster]:
        """Return the running cluster as a context."""
        ...


class Kind(NamedTuple):
    """What runs a case: its settings, the module and function below `bench.cases`; `steps`: it is also told whom to
    tell of its progress; `limited`: its nodes have limits of their own (`limits_of`)."""

    settings: type[Any]
    module: str
    function: str
    steps: bool = False
    limited: bool = False


KINDS: Mapping[str, Kind] = {
    "append": Kind(kinds.AppendSettings, "append", "run_append"),
    "kv": Kind(kinds.KvSettings, "kv", "run_kv"),
    "queue": Kind(kinds.QueueSettings, "queue", "run_queue"),
    "idle": Kind(kinds.IdleSettings, "idle", "run_idle"),
    "recover": Kind(kinds.RecoverSettings, "recover", "run_recover"),
    "failover": Kind(kinds.FailoverSettings, "failover", "run_failover"),
    "mixed": Kind(kinds.MixedSettings, "mixed", "run_mixed"),
    "churn": Kind(kinds.ChurnSettings, "churn", "run_churn", True, True),
    "catchup": Kind(kinds.CatchupSettings, "catchup", "run_catchup"),
}


def settings_of(case: Case, profile: Profile, processes: int = 1) -> Any:
    """Return a case's settings under a profile: its own, and the profile's seconds where it has none of its own."""
    kind = KINDS[case.kind].settings
    known = {one.name for one in dataclasses.fields(kind)}
    told: dict[str, object] = {}
    if case.kind in ("append", "kv", "queue"):
        told = {"seconds": profile.seconds, "warmup_s": profile.warmup_s, "processes": processes}
    return kind(**{key: value for key, value in {**told, **case.settings}.items() if key in known})


def run_ours(
    case: Case, profile: Profile, clusters: Clusters, directory: Path, say: Callable[[str], None], processes: int = 1
) -> dict[str, Any]:
    """Run one case once on a new cluster in an empty directory. Returns the case's own report."""
    kind, settings = KINDS[case.kind], settings_of(case, profile, processes)
    module = importlib.import_module(f"logyard.bench.cases.{kind.module}")
    limits = module.limits_of(settings) if kind.limited else None
    environment = delayed_environment(directory.parent / "sync-delay", case.sync_delay_ms)
    with clusters(case.nodes, directory, limits, environment) as cluster:
        more = (lambda count: None,) if kind.steps else ()
        report: dict[str, Any] = getattr(module, kind.function)(settings, cluster, directory, say, *more)
    return report

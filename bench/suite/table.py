"""The cases and the three profiles of `logyard bench run`, as data. A new case is a row here.

Nothing is loaded but the standard library: the command line reads this for its help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIB = 1 << 20
OURS = "logyard"
SPLIT = ("append", "kv")
"""Kinds whose load can be made by several processes."""
SHIPPED = "-as-shipped"
"""Behind a rival's name: started as it comes, less durable than the others."""
KV_RIVALS = ("etcd", "etcd-debian")
"""Who has keys, reads that are linearizable, and watches."""


class SuiteFailed(Exception):
    """The suite cannot do what was asked, or a comparison has nothing to compare; the message says why."""


class BadSuite(SuiteFailed):
    """What was asked for makes no sense: an unknown rival, a directory of another run."""

    code = "bad_request"


@dataclass(frozen=True, slots=True)
class Case:
    """One row. `kind` names who runs it (`suite.ours`), with `settings` in place of the profile's; `rivals` can be
    asked the same (None: all of them, appends), unless it has a delay that cannot be given to them. `figure` is the
    key that is compared, `unit` what it is in, and `more` whether more of it is better."""

    name: str
    told: str
    kind: str = "append"
    nodes: int = 3
    settings: Mapping[str, object] = field(default_factory=dict)
    figure: str = "ops_per_s"
    unit: str = "/s"
    more: bool = True
    sync_delay_ms: float = 0.0
    rivals: tuple[str, ...] | None = None

    def is_for(self, rival: str) -> bool:
        """Return whether a rival can be asked the same."""
        can = self.kind == "append" if self.rivals is None else rival in self.rivals
        return can and not self.sync_delay_ms


def _append(name: str, told: str, *, nodes: int = 3, delay: float = 0.0, **settings: object) -> Case:
    return Case(name, told, nodes=nodes, settings=settings, sync_delay_ms=delay)


def _open(name: str, told: str, **settings: object) -> Case:
    # Whoever keeps up does the rate, and no more: how late it is can be compared.
    return Case(f"open-{name}", told, "append", 3, settings, "p99_ms", "ms", False)


def _time(name: str, told: str, kind: str, figure: str, *, nodes: int = 3, **settings: object) -> Case:
    return Case(name, told, kind, nodes, settings, figure, "s", False)


CASES: tuple[Case, ...] = (
    # Closed loop and pipelined appends; a rival gets the same clients, window and size.
    _append("pipelined-256", "256 B, 5 clients x 500", size=256, clients=5, window=500),
    _append("closed-256", "256 B, 64 closed-loop clients", size=256, clients=64, window=1),
    _append("alone-256", "256 B, one client", size=256, clients=1, window=1),
    _append("pipelined-4k", "4 KiB, 5 clients x 200", size=4096, clients=5, window=200),
    _append("pipelined-64k", "64 KiB, 5 clients x 50", size=65_536, clients=5, window=50),
    _append("pipelined-1m", "1 MiB, 5 clients x 8", size=MIB, clients=5, window=8),
    _append("logs-1000", "256 B over 1,000 logs, 5 clients x 500", size=256, clients=5, window=500, logs=1000),
    # Open loop: a fixed rate, latencies from the intended send times.
    _open("256", "p99 of 256 B, 2,000 a second whatever happens", size=256, clients=64, window=1, rate=2000.0),
    _open("64k", "p99 of 64 KiB, 200 a second whatever happens", size=65_536, clients=16, window=1, rate=200.0),
    # One node.
    _append("one-pipelined-256", "256 B, 5 clients x 500", nodes=1, size=256, clients=5, window=500),
    _append("one-closed-256", "256 B, 64 closed-loop clients", nodes=1, size=256, clients=64, window=1),
    _append("one-alone-256", "256 B, one client", nodes=1, size=256, clients=1, window=1),
    _append("one-pipelined-64k", "64 KiB, 5 clients x 100", nodes=1, size=65_536, clients=5, window=100),
    _append("one-pipelined-1m", "1 MiB, 5 clients x 8", nodes=1, size=MIB, clients=5, window=8),
    _append("one-logs-1000", "256 B over 1,000 logs", nodes=1, size=256, clients=5, window=500, logs=1000),
    # Large bodies for a minute, beside who can let go of its log. New: all is kept, so that most is written to files
    # that were never written, and twice. Recycled: files are reused, or made anew, as what is in them goes.
    *(
        Case(f"{name}-{where}", f"{told}, {'all is' if keep == 0 else 'the newest GiB is'} kept", nodes=nodes,
             settings={"size": size, "clients": 5, "window": window, "seconds": 60.0, "warmup_s": warmup, "keep": keep},
             rivals=("ra",))
        for nodes, name, size, window, told in (
            (1, "one-64k", 65_536, 100, "64 KiB, 5 clients x 100"), (1, "one-1m", MIB, 8, "1 MiB, 5 clients x 8"),
            (3, "three-64k", 65_536, 50, "64 KiB, 5 clients x 50"), (3, "three-1m", MIB, 8, "1 MiB, 5 clients x 8"),
        )
        for where, warmup, keep in (("new", 2.0, 0), ("recycled", 20.0, 1 << 30))
    ),
    # A disk whose sync takes longer: our nodes alone.
    *(
        _append(f"{name}-sync-{delay:g}ms", f"{told}, each sync {delay:g} ms later", delay=delay, size=256, **shape)
        for delay in (0.2, 1.0, 5.0)
        for name, told, shape in (
            ("pipelined-256", "256 B, 5 clients x 500", {"clients": 5, "window": 500}),
            ("closed-256", "256 B, 64 closed-loop clients", {"clients": 64, "window": 1}),
        )
    ),
    # KV and queues.
    *(
        Case(f"kv-{mode}{name}", f"{told} 256 B, 64 clients{where}", "kv", settings={"mode": mode, **shape},
             rivals=KV_RIVALS)
        for name, where, shape in (("", "", {}), ("-4p", " in 4 processes", {"processes": 4}))
        for mode, told in (("put", "put"), ("get", "linearizable get"))
    ),
    *(
        Case(f"watch-1000{name}", f"one key with 1,000 watchers{where}: events", "kv",
             settings={"mode": "watch", "watchers": 1000, **shape}, rivals=KV_RIVALS)
        for name, where, shape in (("", "", {}), ("-4p", " in 4 processes", {"processes": 4}))
    ),
    Case("queue-256", "256 B published, 4 x 256, consumed meanwhile", "queue", 1),
    Case("queue-64k", "64 KiB published, 4 x 16, consumed meanwhile", "queue", 1,
         {"size": 65_536, "window": 16}),
    Case("queue-1m", "1 MiB published, 4 x 4, consumed meanwhile by 4", "queue", 1,
         {"size": MIB, "window": 4, "consumers": 4}),
    # Life: what goes wrong, and what costs while nothing happens.
    _time("failover-1000", "kill -9 of the leader of 1,000 logs, until all are written again", "failover",
          "failover_s", logs=1000),
    _time("recover-1000", "restart after kill -9, 1,000 logs x 20 entries", "recover", "recovery_s", nodes=1,
          logs=1000, entries=20),
    _time("restart-10000", "clean restart with 10,000 logs asleep", "idle", "restart_s", logs=10_000, seconds=5.0),
    Case("idle-10000", "bytes of a sleeping log, of 10,000", "idle", 3, {"logs": 10_000, "seconds": 10.0},
         "bytes_per_log", "bytes", False),
    _time("catch-up", "a wiped member of 100 logs, 256 MiB, until it has everything again", "catchup", "catchup_s",
          logs=100, total=256 * MIB),
    Case("mixed", "p99 of 100 small logs beside an upload of 256 MiB, over that without", "mixed", 3,
         {"upload_bytes": 256 * MIB}, "ratio", "times", False),
    Case("churn-young", "written per payload byte, what dies young", "churn", 3, {"mode": "young"},
         "written_per_payload_byte", "times", False),
    Case("churn-old", "written per payload byte, what lives on", "churn", 3, {"mode": "old"},
         "written_per_payload_byte", "times", False),
    # Small ones of the smoke profile.
    _time("recover-100", "restart after kill -9, 100 logs x 5 entries", "recover", "recovery_s", nodes=1,
          logs=100, entries=5),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Profile:
    """How much is run. `rivals`: who is beside us when --against does not say; `seconds` is the measured time of a
    load. `shipped`: whether rivals run once more as they come, without what makes them durable."""

    name: str
    told: str
    cases: tuple[str, ...]
    rounds: int
    seconds: float
    warmup_s: float
    rivals: tuple[str, ...] = ()
    shipped: bool = False


RIVALS = ("etcd", "etcd-debian", "ra", "rabbitmq", "nats", "redis", "zookeeper", "pysyncobj")
SMALL = ("recover-100",)
LARGE = tuple(case.name for case in CASES if "keep" in case.settings)
PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            "smoke", "about 2 minutes, logyard alone",
            ("pipelined-256", "closed-256", "pipelined-64k", "one-pipelined-256", "open-256", "kv-put", "recover-100"),
            1, 8.0, 1.0,
        ),
        Profile(
            "standard", "about 20 minutes, beside etcd and Ra",
            ("pipelined-256", "closed-256", "pipelined-64k", "logs-1000"), 3, 20.0, 2.0, ("etcd", "ra"),
        ),
        Profile("large", "about 2 hours, large bodies beside Ra", LARGE, 5, 60.0, 2.0, ("ra",)),
        Profile(
            "full", "about 6 hours, beside all rivals",
            tuple(case.name for case in CASES if case.name not in SMALL + LARGE), 5, 15.0, 2.0, RIVALS, True,
        ),
    )
}  # fmt: skip


def case_of(name: str) -> Case:
    """Return the row of that name."""
    for case in CASES:
        if case.name == name:
            return case
    raise BadSuite(f"there is no case {name}: {', '.join(case.name for case in CASES)}")

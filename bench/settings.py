"""What each case of `logyard bench` can be told: a field is an option, with its bounds, its default and its help.

The command line makes its flags from these classes, and the cases take them as they are. Loads nothing: `--help` reads
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .loops import RUNTIMES

MIB = 1 << 20
BODY_BYTES_MAX = (64 << 20) - (128 << 10)
VALUE_BYTES_MAX = 32 << 20
"""What one frame takes; `protocol` has them too, and a test compares."""


def option(
    default: Any,
    told: str,
    *,
    least: float | None = None,
    most: float | None = None,
    among: tuple[str, ...] = (),
    flag: str = "",
    unit: int = 1,
) -> Any:
    """Return a field with what the command line says of it: `told` in its help, from `least` to `most`, or `among`.
    `flag`: its option, if that is not called as the field is; `unit`: what one of the option is in the field."""
    said = {"told": told, "least": least, "most": most, "among": among, "flag": flag, "unit": unit}
    return field(default=default * unit, metadata=said)


def flag_of(settings: type[Any], name: str) -> str:
    """Return the command line's option of a field of these settings."""
    (found,) = (one for one in fields(settings) if one.name == name)
    return f"--{found.metadata['flag'] or name}"


def size_option(default: int, what: str = "Bytes of a body.", most: int = BODY_BYTES_MAX) -> Any:
    """Return the field of a body's bytes: its first 16 tell which one it is."""
    return option(default, what, least=16, most=most)


def seconds_option(default: float, told: str = "Measured time.", least: float = 0.1, flag: str = "") -> Any:
    """Return a field of seconds."""
    return option(default, told, least=least, flag=flag)


def warmup_option() -> Any:
    """Return the field of the seconds before those that are measured."""
    return seconds_option(2.0, "Seconds before that.", 0.0, "warmup")


def processes_option(most: int = 2) -> Any:
    """Return the field of how many processes make the load."""
    return option(1, "Load processes.", least=1, most=most)


def runtime_option() -> Any:
    """Return the field of the library that the load processes run under."""
    return option("trio", "What the load runs under.", among=RUNTIMES)


@dataclass(frozen=True, slots=True)
class AppendSettings:
    """`bench append`."""

    logs: int = option(1, "Over how many logs.", least=1)
    size: int = size_option(256)
    clients: int = option(64, "How many clients.", least=1)
    window: int = option(1, "Calls outstanding a client.", least=1)
    seconds: float = seconds_option(10.0)
    warmup_s: float = warmup_option()
    processes: int = processes_option()
    runtime: str = runtime_option()
    rate: float = option(0.0, "Appends a second, due at fixed times (0: closed loop).", least=0.0)
    keep: int = option(0, "Bytes that a log keeps; the oldest records go (0: all stay).", least=0)


@dataclass(frozen=True, slots=True)
class KvSettings:
    """`bench kv`."""

    mode: str = option("put", "What.", among=("put", "get", "watch"))
    size: int = size_option(256, "Bytes of a value.", VALUE_BYTES_MAX)
    clients: int = option(64, "How many clients.", least=1)
    keys: int = option(100, "Keys of each client.", least=1)
    watchers: int = option(1000, "Who watches one key.", least=1)
    seconds: float = seconds_option(10.0)
    warmup_s: float = warmup_option()
    processes: int = processes_option(8)
    runtime: str = runtime_option()


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """`bench queue`."""

    queues: int = option(1, "Over how many queues.", least=1)
    size: int = size_option(256)
    publishers: int = option(4, "How many publishers.", least=1)
    window: int = option(256, "Unconfirmed, a publisher.", least=1)
    consumers: int = option(1, "How many; 0: none.", least=0)
    prefetch: int = option(4000, "Held, a consumer.", least=1, most=65_535)
    seconds: float = seconds_option(10.0)
    warmup_s: float = warmup_option()
    runtime: str = runtime_option()


@dataclass(frozen=True, slots=True)
class IdleSettings:
    """`bench idle`."""

    logs: int = option(10_000, "How many logs.", least=1)
    seconds: float = seconds_option(10.0)
    settle_s: float = seconds_option(5.0, "Seconds before that.", 0.0, "settle")


@dataclass(frozen=True, slots=True)
class HugeSettings:
    """`bench huge`."""

    logs: int = option(100_000, "How many logs.", least=100)
    active: int = option(10_000, "How many of them are loaded; at most half.", least=1)
    size: int = size_option(256)
    seconds: float = seconds_option(10.0)
    warmup_s: float = warmup_option()

    @property
    def active_logs(self) -> int:
        """How many are loaded."""
        return min(self.active, self.logs // 2)


@dataclass(frozen=True, slots=True)
class RecoverSettings:
    """`bench recover`."""

    logs: int = option(1000, "How many logs.", least=1)
    entries: int = option(20, "Entries in each.", least=1)
    size: int = size_option(256)


@dataclass(frozen=True, slots=True)
class GroupsSettings:
    """`bench groups`."""

    partitions: int = option(12, "Of the topic.", least=1)
    members: int = option(4, "Processes that consume.", least=1)
    records: int = option(500_000, "What is there before they do.", least=1)
    size: int = size_option(256)
    seconds: float = seconds_option(10.0, "Seconds at a tenth of what was consumed.")
    runtime: str = runtime_option()


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """`bench cluster`."""

    logs: int = option(10_000, "How many logs.", least=100)
    lookups: int = option(100_000, "Names looked up, in memory.", least=1)
    finds: int = option(200, "Names looked up over a connection.", least=1)


@dataclass(frozen=True, slots=True)
class ReplaceSettings:
    """`bench replace`."""

    logs: int = option(10_000, "How many logs.", least=64)
    clients: int = option(64, "How many of them are appended to.", least=1, most=64)
    size: int = size_option(256)
    interval_s: float = seconds_option(0.1, "Seconds between a log's appends.", 0.01, "interval")
    steady_s: float = seconds_option(10.0, "Seconds before the kill.", 0.1, "steady")


@dataclass(frozen=True, slots=True)
class FailoverSettings:
    """`bench failover`."""

    logs: int = option(1000, "How many logs.", least=1)
    size: int = size_option(256)
    interval_s: float = seconds_option(0.5, "Seconds between a log's writes.", 0.01, "interval")
    steady_s: float = seconds_option(2.0, "Seconds before the kill.", 0.0, "steady")
    leaders: str = option(
        "one", "Who leads before the kill: the node that dies all, or each node a share, of very many.",
        among=("one", "spread"),
    )  # fmt: skip
    rate: float = option(200.0, "With spread leaders: appends a second, to random logs.", least=0.1)


@dataclass(frozen=True, slots=True)
class MixedSettings:
    """`bench mixed`."""

    logs: int = option(100, "How many small logs.", least=1)
    size: int = size_option(256, "Bytes of a small body.")
    seconds: float = seconds_option(5.0, "Seconds alone.")
    warmup_s: float = warmup_option()
    upload_bytes: int = option(1024, "MiB to upload.", least=1, most=4096, flag="upload-mib", unit=MIB)


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """`bench replay`."""

    size: int = size_option(1024, "Bytes of a payload.")
    entries: int = option(1000, "How many entries.", least=1)


@dataclass(frozen=True, slots=True)
class ChurnSettings:
    """`bench churn`."""

    mode: str = option("young", "When they die.", among=("young", "old"))
    size: int = option(65_536, "Bytes a payload.", least=4096, most=MIB)
    total: int = option(512, "MiB of payload to append.", least=8, flag="mib", unit=MIB)
    settle_s: float = seconds_option(3.0, "Seconds of quiet.", flag="settle")

    @property
    def records(self) -> int:
        """How many are appended."""
        return max(2, self.total // self.size)


@dataclass(frozen=True, slots=True)
class CatchupSettings:
    """`bench catchup`."""

    logs: int = option(100, "How many logs.", least=1)
    size: int = option(65_536, "Bytes a payload.", least=16, most=MIB)
    total: int = option(256, "MiB of payload to append.", least=1, flag="mib", unit=MIB)

    @property
    def records(self) -> int:
        """How many are appended to each log."""
        return max(1, self.total // self.size // self.logs)


SPARK_CASES = (
    "rows", "payload", "plan", "audit", "memory", "stream", "live", "idle", "direct", "once", "tables", "dead",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SparkSettings:
    """`bench spark`."""

    logs: int = option(1000, "Logs of small records.", least=1)
    rows: int = option(1000, "Records in each.", least=1)
    mib: int = option(512, "MiB of 64 KiB payloads.", least=16)
    planned: int = option(10_000, "Logs to plan over.", least=1)
    sink_rows: int = option(1_000_000, "Rows of 100 B that a sink is given.", least=100, flag="sink-rows")
    sink_mib: int = option(256, "MiB of 64 KiB rows that a sink is given.", least=16, flag="sink-mib")

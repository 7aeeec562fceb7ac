"""The options of the sinks: one table from which they are parsed, refused and documented. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import OptionError
from ..option_table import (
    Option,
    check_servers,
    check_tls,
    count,
    fields_of,
    flag,
    markdown,
    meant,
    names,
    plain,
    seconds,
    without_sparks_own,
)

ONCE, DIRECT, LEAST = "exactly-once", "exactly-once-direct", "at-least-once"
SINK_NAME_MAX = 100
STREAM_DEFAULT, BATCH_DEFAULT = ONCE, LEAST


def _guarantee(given: str) -> str:
    if given in (ONCE, DIRECT, LEAST):
        return given
    raise ValueError(f"{ONCE}, {DIRECT} or {LEAST} is expected")


def _sink(given: str) -> str:
    if 0 < len(given) <= SINK_NAME_MAX:
        return given
    raise ValueError(f"a name of 1 to {SINK_NAME_MAX} characters is expected")


def _members(given: str) -> tuple[int, ...]:
    found = tuple(int(one) for one in given.split(",") if one.strip().isdecimal())
    if found and all(found) and len(found) == len(given.split(",")):
        return found
    raise ValueError("numbers of nodes are expected, like 1,2,3")


def _batch(given: str) -> int:
    if given.isdecimal():
        return int(given)
    raise ValueError("a whole number is expected: str(batch_id) of foreachBatch")


SINK_OPTIONS: tuple[Option, ...] = (
    Option("servers", "servers", names, "", "Client addresses of the cluster, `host:port,host:port`."),
    Option("log", "log", plain, "", "The log that all rows go to; without it the column `log` says it for each row."),
    Option("sinkId", "sink", _sink, "", "The name under which the sink knows what it has written; whoever writes under"
           " it again, after a restart as well, is the same sink. Its own log is `SINKID.log`."),
    Option("deliveryGuarantee", "guarantee", _guarantee, "", f"`{ONCE}` (a stream's default), `{DIRECT}` or `{LEAST}`"
           " (a batch's default)."),
    Option("batchId", "batch", _batch, "", "Of a batch that is written again under the same number: `str(batch_id)` in"
           " `foreachBatch`. With `sinkId`."),
    Option("createLogs", "create", flag, "false", "Make logs that are not there, instead of failing before anything is"
           " visible."),
    Option("members", "members", _members, "", "The nodes of logs that are made, `1,2,3`; all by default."),
    Option("stageLogs", "stages", count, "8", f"Logs that hold the rows of a batch under `{ONCE}` until it is"
           " committed; kept from the sink's first batch on."),
    Option("dropMissing", "drop", flag, "false", "Leave out rows for a log that was deleted after their batch was"
           " committed, instead of failing."),
    Option("sinkReset", "reset", flag, "false", "Begin anew with a sink that belonged to a query whose checkpoint is"
           " gone. What was written before may be written again."),
    Option("timeoutSeconds", "timeout_s", seconds, "60", "How long one append is tried."),
    Option("tlsCa", "tls_ca", plain, "", "As for reading."),
    Option("tlsCertificate", "tls_certificate", plain, "", "As for reading."),
    Option("tlsKey", "tls_key", plain, "", "As for reading."),
)  # fmt: skip
ELSEWHERE = {
    "kafka.bootstrap.servers": "here it is servers",
    "topic": "here it is log, or the column log",
    "includeheaders": "what a record has beside its payload is the column meta",
    "path": "a sink writes to a running cluster: servers",
}
"""In lower case, as Spark may hand them over."""


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """What was asked for."""

    servers: tuple[str, ...]
    log: str | None
    sink: str
    guarantee: str
    batch: int | None
    create: bool
    members: tuple[int, ...] | None
    stages: int
    drop: bool
    reset: bool
    timeout_s: float
    tls_ca: str | None
    tls_certificate: str | None
    tls_key: str | None


def _unknown(name: str) -> str:
    return f"{name}: a sink has no such option; {ELSEWHERE.get(name.lower()) or meant(name, SINK_OPTIONS)}"


def parse_sink(given: Mapping[str, str], streaming: bool) -> SinkOptions:
    """Return the options of a sink. Raises `OptionError`; it begins with the option's name."""
    fields, _ = fields_of(SINK_OPTIONS, without_sparks_own(given), lambda option: "", _unknown)
    if not fields["servers"]:
        raise OptionError("servers: it is needed: a sink writes to a running cluster")
    check_servers(fields["servers"])
    if fields["guarantee"] is None:
        named = fields["batch"] is not None
        fields["guarantee"] = STREAM_DEFAULT if streaming or named else BATCH_DEFAULT
    _check_sink(fields, streaming)
    check_tls(fields)
    return SinkOptions(**fields)


def _check_sink(fields: dict[str, Any], streaming: bool) -> None:
    if fields["guarantee"] == LEAST:
        for name, field in (("batchId", "batch"), ("sinkReset", "reset")):
            if fields[field]:
                raise OptionError(f"{name}: at-least-once keeps nothing that it could mean")
        fields["sink"] = fields["sink"] or ""
        return
    if fields["sink"] is None:
        raise OptionError(f"sinkId: it is needed: {fields['guarantee']} knows by it what was written")
    if streaming and fields["batch"] is not None:
        raise OptionError("batchId: a stream has its own; it is for a batch that is written in foreachBatch")
    if not streaming and fields["batch"] is None:
        raise OptionError(
            f"batchId: it is needed: without it a batch is written at-least-once; {fields['guarantee']} must know "
            "which batch this is"
        )


def sink_table() -> str:
    """Return the table of docs/guides/spark.md."""
    return markdown(SINK_OPTIONS)

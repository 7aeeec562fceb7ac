"""The options of the data source over logs.

Every option is checked when a DataFrame is loaded, before anything is asked of a cluster, as far as batches and streams
agree on it: Spark does not tell a Python source which of them is loaded before it begins (decision 0030). Used by
`datasource` and `stream`; pure.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from logyard.protocol.topics import NAME as TOPIC

from .errors import OptionError
from .option_table import (
    Option,
    check_servers,
    check_tls,
    count,
    fields_of,
    flag,
    markdown,
    names,
    nearest,
    plain,
    seconds,
)
from .partitions import LOG_ROWS_WEIGHT
from .sources import INLINE_BYTES, Reading

EARLIEST = -2
LATEST = -1
INLINE_MAX = 1 << 30
BATCH = "batch"
STREAM = "stream"
Offsets: TypeAlias = int | dict[str, int]
"""One offset for all logs, or one for each that is named; `EARLIEST` and `LATEST` stand for themselves."""
SIZE = re.compile(r"(\d+)\s*(?:([kmgt])i?)?b?", re.IGNORECASE)
UNITS = {None: 0, "k": 10, "m": 20, "g": 30, "t": 40}


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


def _topics(text: str) -> tuple[str, ...]:
    found = names(text)
    for name in found:
        if not TOPIC.fullmatch(name):
            raise ValueError(f"{name!r} can be no topic's name: letters, digits, '.', '_' and '-' are expected")
    return found


def _size(text: str) -> int:
    found = SIZE.fullmatch(text.strip())
    size = int(found[1]) << UNITS[found[2].lower() if found[2] else None] if found else 0
    if size <= 0:
        raise ValueError("a number of bytes above 0 is expected, like 1048576, 64m or 2g")
    return size


def _inline(text: str) -> int:
    size = _size(text)
    if size > INLINE_MAX:
        raise ValueError(f"at most {INLINE_MAX} bytes: Arrow's batches stay below 2 GiB")
    return size


def _millis(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise ValueError("milliseconds since 1970 are expected")


def _object(text: str, least: int) -> dict[str, int]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict) and all(type(one) is int and one >= least for one in value.values()):
        return value
    raise ValueError('a JSON object is expected, like {"log-a": 100, "log-b": -2}')


def _starting(text: str) -> Offsets:
    """Return where to begin; a batch refuses `latest`: it would be empty."""
    if text.lower() in ("earliest", "latest"):
        return EARLIEST if text.lower() == "earliest" else LATEST
    return _object(text, EARLIEST)


def _ending(text: str) -> Offsets:
    if text.lower() == "latest":
        return LATEST
    found = _object(text, EARLIEST)
    if EARLIEST in found.values():
        raise ValueError("-2 (earliest) is no end of a batch")
    return found


def _times(text: str) -> dict[str, int]:
    return _object(text, 0)


def _strategy(text: str) -> str:
    if text in ("error", "latest"):
        return text
    raise ValueError("error or latest is expected")


def _new_logs(text: str) -> str:
    if text in ("earliest", "latest"):
        return text
    raise ValueError("earliest or latest is expected")


def _consumer(text: str) -> tuple[str, str]:
    group, _, key = text.partition("/")
    if group and key:
        return group, key
    raise ValueError("a KV group and a key in it are expected, like hints/spark/orders")


def _payload(text: str) -> bool:
    if text in ("none", "inline"):
        return text == "inline"
    raise ValueError("none or inline is expected")


def _assign(text: str) -> dict[str, tuple[int, int]]:
    """Return by log (first, end); EARLIEST and LATEST where they are not given."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return {name: (EARLIEST, LATEST) for name in value}
    if isinstance(value, dict) and value and all(_is_span(span) for span in value.values()):
        return {name: (first, end) for name, (first, end) in value.items()}
    raise ValueError('a JSON list of logs is expected, or of their ranges: {"log-a": [100, 200], "log-b": [-2, -1]}')


def _is_span(span: object) -> bool:
    return (
        isinstance(span, list)
        and len(span) == 2
        and all(type(one) is int for one in span)
        and span[0] >= EARLIEST
        and span[1] >= LATEST
        and span[0] != LATEST
    )


CHOICES = ("subscribe", "subscribePattern", "assign", "subscribeTopic")
NO_END = "a stream has no end: use availableNow for what is there now, or read a batch (spark.read)"
BOUNDED = "a batch is bounded by startingOffsets and endingOffsets"

OPTIONS: tuple[Option, ...] = (
    Option("servers", "servers", names, "", "Client addresses of a running cluster, `host:port,host:port`; one that"
           " answers is enough. Either this or `path`."),
    Option("path", "path", plain, "", "The directory of a stopped node, or a backup; read without any server. Alone,"
           " as in `load(\"DIR\")`, it means all logs.", BATCH, "nothing is appended to a stopped directory: read it as"
           " a batch (spark.read)"),
    Option("subscribe", "subscribe", names, "", "Names of logs, separated by commas. Exactly one of the four."),
    Option("subscribePattern", "pattern", _pattern, "", "A regular expression (Python's) that whole names match."),
    Option("assign", "assign", _assign, "", 'Logs as JSON: `["a", "b"]`, or exact ranges `{"a": [first, end]}`, the'
           " end excluded; -2 is the start, -1 the end of the log."),
    Option("subscribeTopic", "topics", _topics, "", "Names of [topics](topics.md), separated by commas: all their"
           " partitions, with the records' keys in the column `key`."),
    Option("startingOffsets", "starting", _starting, "earliest", "`earliest`, or JSON: `{\"a\": 100}`; -2 is earliest,"
           " -1 latest. Logs that are not named begin at earliest. A stream takes `latest`, too, which is its default.",
           streams_default="latest"),
    Option("endingOffsets", "ending", _ending, "latest", "`latest`, or JSON: `{\"a\": 200}`, excluded; -1 is latest."
           " Logs that are not named end at latest.", BATCH, NO_END),
    Option("startingTimestamp", "starting_time", _millis, "", "Milliseconds since 1970: from the first record stamped"
           " then or later. In place of `startingOffsets`."),
    Option("startingOffsetsByTimestamp", "starting_times", _times, "", "The same for each log, as JSON; others begin at"
           " earliest."),
    Option("startingOffsetsByTimestampStrategy", "strategy", _strategy, "error", "What to do with a log without such a"
           " record: `error`, or `latest` to read nothing of it."),
    Option("endingTimestamp", "ending_time", _millis, "", "Milliseconds since 1970: up to, without, the first record"
           " stamped then or later. In place of `endingOffsets`.", BATCH, NO_END),
    Option("endingOffsetsByTimestamp", "ending_times", _times, "", "The same for each log, as JSON; others end at"
           " latest.", BATCH, NO_END),
    Option("includePayload", "payloads", _payload, "none", "`inline` adds the column `payload`; `none` reads metadata"
           " only and touches no large payload anywhere."),
    Option("maxInlineBytes", "inline_bytes", _inline, str(INLINE_BYTES), "A larger payload is null in that column; its"
           " size is still there."),
    Option("verify", "verify", flag, "false", "Read every payload, check it against its stored hash in the task, and"
           " fill `payload_hash`, also with `includePayload=none`."),
    Option("failOnDataLoss", "fail", flag, "true", "`false`: records that were truncated meanwhile, or before the"
           " offset asked for, are one row of kind `gap` that counts them, in place of an error."),
    Option("minPartitions", "min_partitions", count, "", "At least about so many tasks. Not given: by size, up to"
           " twice the driver's cores."),
    Option("maxPartitionBytes", "max_partition_bytes", _size, "128m", "About as much for one task; a longer log is"
           " split.", BATCH, "it goes by what the servers estimate today, and a batch that is repeated must be cut as"
           " it was: here it is maxPartitionRows"),
    Option("timeoutSeconds", "timeout_s", seconds, "60", "How long a range may make no progress on any node before the"
           " task fails."),
    Option("tlsCa", "tls_ca", plain, "", "The authority's certificate, a file on driver and executors. With it and the"
           " next two, connections are secured; without, only loopback addresses are reached."),
    Option("tlsCertificate", "tls_certificate", plain, "", "The client's certificate, a file."),
    Option("tlsKey", "tls_key", plain, "", "The key to it, a file."),
    Option("maxOffsetsPerTrigger", "max_offsets", count, "", "Records of a batch at most, over all logs.", STREAM,
           BOUNDED),
    Option("maxBytesPerTrigger", "max_bytes", _size, "", "About so many bytes of metadata and payload a batch, by"
           " estimates; one record always passes. In place of `maxOffsetsPerTrigger`.", STREAM, BOUNDED),
    Option("minRowsPerLog", "min_rows", count, "1000", "How a limit is shared out: a log that takes part in a batch"
           " gets at least so many of its records, if it has them; logs take turns.", STREAM, BOUNDED),
    Option("newLogs", "new_logs", _new_logs, "earliest", "Where logs begin that appear while the stream is there:"
           " `earliest` or `latest`.", STREAM, "a batch reads the logs that are there"),
    Option("maxPartitionRows", "max_partition_rows", count, "250000", "Records of a task at most, each log counted as"
           f" {LOG_ROWS_WEIGHT} more; a longer log is split.", STREAM, "here it is maxPartitionBytes"),
    Option("consumer", "consumer", _consumer, "", "`GROUP/KEY`: a key of a KV group to which the stream writes how far"
           " it has come, as a hint for retention and dashboards.", STREAM, "a batch has no place of its own"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for; `None` where an option without a default was not given."""

    servers: tuple[str, ...] | None
    path: str | None
    subscribe: tuple[str, ...] | None
    pattern: str | None
    assign: dict[str, tuple[int, int]] | None
    topics: tuple[str, ...] | None
    starting: Offsets
    ending: Offsets
    starting_time: int | None
    starting_times: dict[str, int] | None
    strategy: str
    ending_time: int | None
    ending_times: dict[str, int] | None
    payloads: bool
    inline_bytes: int
    verify: bool
    fail: bool
    min_partitions: int | None
    max_partition_bytes: int
    timeout_s: float
    tls_ca: str | None
    tls_certificate: str | None
    tls_key: str | None
    max_offsets: int | None
    max_bytes: int | None
    min_rows: int
    new_logs: str
    max_partition_rows: int
    consumer: tuple[str, str] | None

    @property
    def reading(self) -> Reading:
        """What a read brings."""
        return Reading(self.payloads, self.inline_bytes, self.verify, not self.fail)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The logs that are named, None for a pattern, or for topics, whose partitions a cluster has to tell."""
        return self.subscribe if self.assign is None else tuple(self.assign)


def parse_loaded(given: Mapping[str, str]) -> Options:
    """Return the options of a load that may be a batch's or a stream's. Raises `OptionError` for what is wrong in
    both."""
    try:
        return parse_options(given)
    except OptionError as error:
        try:
            return parse_options(given, STREAM)
        except OptionError as streams:
            streaming = {option.name.lower() for option in OPTIONS if option.only == STREAM}
            raise (streams if any(name.lower() in streaming for name in given) else error) from None


def parse_options(given: Mapping[str, str], kind: str = BATCH) -> Options:
    """Return the options of a `BATCH` or a `STREAM`; names are not case-sensitive. Raises `OptionError`; it begins with
    the option's name."""
    fields, present = fields_of(
        OPTIONS,
        given,
        lambda option: option.why if option.only not in ("", kind) else "",
        lambda name: _unknown(name, kind),
        streams=kind == STREAM,
    )
    _exactly_one(present, "servers", "path")
    if "path" in present and "subscribeTopic" in present:
        raise OptionError(
            "subscribeTopic: a running cluster knows topics, a directory does not: subscribe to their logs"
        )
    if "path" in present and not present & {*CHOICES}:
        fields["pattern"] = ".*"
    else:
        _exactly_one(present, *CHOICES)
    starts = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
    ends = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
    for several in (starts, ends):
        both = [name for name in several if name in present]
        if len(both) > 1:
            raise OptionError(f"{both[0]}: it excludes {both[1]}; give one of them")
    if isinstance(assigned := fields["assign"], dict) and any(span != (EARLIEST, LATEST) for span in assigned.values()):
        both = [name for name in (*starts, *ends) if name in present]
        if both:
            raise OptionError(f"{both[0]}: assign gives the ranges already")
        if kind == STREAM:
            raise OptionError("assign: exact ranges are a batch's: give a list of logs, and startingOffsets")
    if kind == STREAM and present & set(starts[1:]):
        fields["starting"] = EARLIEST
    if kind == BATCH and fields["starting"] == LATEST:
        raise OptionError("startingOffsets: latest would be an empty batch; a stream begins there")
    if fields["max_offsets"] is not None and fields["max_bytes"] is not None:
        raise OptionError("maxBytesPerTrigger: it excludes maxOffsetsPerTrigger: Spark hands a Python source one limit")
    check_tls(fields)
    found = Options(**fields)
    _check_place(found)
    return found


NO_LEAST = (
    "Spark knows a least number of rows for a Python source (ReadMinRows), but not together with a greatest one, and "
    "it may wait for ever under availableNow: use a longer trigger interval"
)
ELSEWHERE = {
    "kafka.bootstrap.servers": "here it is servers",
    "bootstrap.servers": "here it is servers",
    "topic": "here it is subscribeTopic",
    "includeHeaders": "what a record has beside its payload is in the column meta",
    "minOffsetsPerTrigger": NO_LEAST,
    "maxTriggerDelay": NO_LEAST,
    "maxRecordsPerPartition": "here it is maxPartitionBytes, in a stream maxPartitionRows",
    "startingTime": "here it is startingTimestamp",
    "groupIdPrefix": "a read joins no group of consumers",
    "kafka.group.id": "a read joins no group of consumers",
    "fetchOffset.numRetries": "here it is timeoutSeconds",
    "fetchOffset.retryIntervalMs": "here it is timeoutSeconds",
    "kafkaConsumer.pollTimeoutMs": "here it is timeoutSeconds",
    "kafka.security.protocol": "here it is tlsCa, tlsCertificate and tlsKey",
    "kafka.ssl.truststore.location": "here it is tlsCa",
    "kafka.ssl.keystore.location": "here it is tlsCertificate and tlsKey",
}
"""Options of Spark's format "kafka" and what stands in their place."""


def _unknown(name: str, kind: str) -> str:
    """Return what is said of an option that is none. Spark hands names over in lower case: known ones are written as
    their own documentation writes them."""
    elsewhere = {one.lower(): one for one in ELSEWHERE}
    if name.lower() in elsewhere:
        foreign = elsewhere[name.lower()]
        return f"{foreign}: there is no such option; {ELSEWHERE[foreign]}"
    if name.lower().startswith("kafka."):
        return f"{name}: there is no such option; there is no Kafka client behind this format, and nothing to set in it"
    known = [option.name for option in OPTIONS if option.only in ("", kind)]
    if near := nearest(name, known):
        return f"{name}: there is no such option; is it {near}?"
    return f"{name}: there is no such option (Spark tells names in lower case); there are {', '.join(known)}"


def _exactly_one(present: set[str], *names: str) -> None:
    given = [name for name in names if name in present]
    if not given:
        raise OptionError(f"{names[0]}: give exactly one of {', '.join(names)}")
    if len(given) > 1:
        raise OptionError(f"{given[1]}: it excludes {given[0]}; give exactly one of {', '.join(names)}")


def _check_place(options: Options) -> None:
    check_servers(options.servers or ())
    if options.path is not None and not os.path.isdir(options.path):
        raise OptionError(f"path: {options.path!r} is no directory")


def options_table(kind: str = BATCH) -> str:
    """Return a table of docs/guides/spark.md: a batch's options, or those that only a stream has."""
    return markdown(one for one in OPTIONS if (one.only == STREAM) == (kind == STREAM))


def foreign_table() -> str:
    """Return the table of docs/guides/from-kafka.md: what is said of each option of Spark's format "kafka"."""
    rows = ["| option | what `load()` says |", "| --- | --- |"]
    rows += [f"| `{name}` | there is no such option; {why} |" for name, why in ELSEWHERE.items()]
    return "\n".join(rows) + "\n"

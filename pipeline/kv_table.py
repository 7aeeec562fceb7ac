"""KV groups in Spark, ``machine=kv``: a batch is all keys at one revision, a stream the changes from a revision on, and
a sink puts and deletes. Used by `datasource`.

A stream's offset is a revision of a group, told from an earlier one of its name by its uid; so a batch follows from its
two offsets as long as the group keeps that history. A sink writes a key's last value; written again, it is the same
one: nothing has to be remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow

from logyard.client.kv_sync import KV
from logyard.client.sync import Yard, connect_sync
from logyard.protocol.kv import Compacted, Delete, KeyValue, Put, behind, range_of

from .errors import DataLoss, OptionError
from .option_table import (
    Option,
    check_servers,
    check_tls,
    count,
    fields_of,
    markdown,
    meant,
    names,
    plain,
    seconds,
    tls_of,
    without_sparks_own,
)
from .stream_offsets import BadOffset

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

COLUMNS = (
    ("key", "binary", pyarrow.binary(), False),
    ("value", "binary", pyarrow.binary(), True),
    ("deleted", "boolean", pyarrow.bool_(), False),
    ("revision", "long", pyarrow.int64(), False),
    ("create_revision", "long", pyarrow.int64(), True),
    ("version", "long", pyarrow.int64(), True),
    ("lease", "long", pyarrow.int64(), True),
)
"""name, Spark type, Arrow type, nullable. `revision` is the one that changed the key; a deletion has no value."""
SCHEMA = pyarrow.schema([pyarrow.field(name, kind, nullable) for name, _, kind, nullable in COLUMNS])
SINK_COLUMNS = {"key": ("binary", "string"), "value": ("binary", "string"), "deleted": ("boolean",)}
PAGE_KEYS = 100
BATCH_ROWS = 10_000
BATCH_BYTES = 4 << 20
WRITE_OPERATIONS = 1000
WRITE_BYTES = 8 << 20
WAIT_S = 0.2
"""A batch of a stream ends when so long nothing more came up to its end; what is there comes at once."""
VERSION = 1


def _revision(given: str) -> int:
    if given.isdecimal() and int(given):
        return int(given)
    raise ValueError("a revision is expected, 1 or more")


def _starting(given: str) -> str | int:
    return given if given in ("earliest", "latest") else _revision(given)


KV_OPTIONS: tuple[Option, ...] = (
    Option("servers", "servers", names, "", "Client addresses of the cluster, `host:port,host:port`."),
    Option("machine", "machine", plain, "", "`kv`."),
    Option("group", "group", plain, "", "The KV group."),
    Option("prefix", "prefix", plain, "", "Only keys that begin with it (reading)."),
    Option("revision", "revision", _revision, "", "A batch's: keys as of this revision, not as of now."),
    Option("startingRevision", "starting", _starting, "latest", "A stream's: changes from this revision on, `earliest`"
           " (of the history) or `latest`."),
    Option("maxPartitionKeys", "max_keys", count, "10000", "A batch's: keys of a task; more are read by several."),
    Option("timeoutSeconds", "timeout_s", seconds, "60", "How long one question is tried."),
    Option("tlsCa", "tls_ca", plain, "", "As for logs."),
    Option("tlsCertificate", "tls_certificate", plain, "", "As for logs."),
    Option("tlsKey", "tls_key", plain, "", "As for logs."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KvOptions:
    """What was asked for."""

    servers: tuple[str, ...]
    machine: str
    group: str
    prefix: str | None
    revision: int | None
    starting: str | int
    max_keys: int
    timeout_s: float
    tls_ca: str | None
    tls_certificate: str | None
    tls_key: str | None

    def connect(self) -> Yard:
        """Return the cluster. Close it."""
        tls = tls_of(self.tls_ca, self.tls_certificate, self.tls_key)
        return connect_sync(self.servers, timeout=self.timeout_s, tls=tls)


def parse_kv(given: Mapping[str, str], *refused: str) -> KvOptions:
    """Return the options; those that are `refused` belong to another use. Raises `OptionError`."""
    use = "a sink" if "prefix" in refused else "this read"
    fields, _ = fields_of(
        KV_OPTIONS,
        without_sparks_own(given),
        lambda option: f"this is not for {use}" if option.name in refused else "",
        lambda name: f"{name}: with machine=kv there is no such option; {meant(name, KV_OPTIONS)}",
    )
    if fields["machine"] != "kv":
        raise OptionError(f"machine: kv is expected, not {fields['machine']!r}; logs are read and written without it")
    for name in ("servers", "group"):
        if not fields[name]:
            raise OptionError(f"{name}: it is needed with machine=kv")
    check_servers(fields["servers"])
    check_tls(fields)
    return KvOptions(**fields)


def spark_schema() -> StructType:
    """Return the columns of both reads."""
    from pyspark.sql import types

    kinds = {"binary": types.BinaryType, "long": types.LongType, "boolean": types.BooleanType}
    return types.StructType([types.StructField(name, kinds[kind](), nullable) for name, kind, _, nullable in COLUMNS])


@dataclass
class KvPartition(InputPartition):
    """Keys from `key` to `until` as of `end`, or what the revisions behind `first` up to `end` changed, of the group
    `uid` (0: whichever has the name)."""

    first: int
    end: int
    key: bytes = b""
    until: bytes = b""
    uid: int = 0


def identity(yard: Yard, group: str) -> int:
    """Return what tells a group from an earlier one of its name."""
    return int(yard.locate(group)["uid"])


def check_identity(group: str, known: int, found: int, revision: int) -> None:
    """Raise `DataLoss` for a group that is another one than was known; revisions of the two mean different things."""
    if known and known != found:
        raise DataLoss(
            f"KV group {group!r}: it was deleted and made anew; what changed behind revision {revision} may have been "
            "lost: start the query with a new checkpointLocation, or read it anew"
        )


def older(group: str, newest: int, read: int) -> DataLoss:
    """Return the error of a group that ends before what was read of it: what it gets up to there would be passed
    over."""
    return DataLoss(
        f"KV group {group!r}: it is at revision {newest}, and the checkpoint says that it was at {read}: an older copy "
        "of it was put back, or the checkpoint is another cluster's; start the query with a new checkpointLocation"
    )


class KvReader(DataSourceReader):
    """All keys at one revision, in tasks of so many keys."""

    def __init__(self, options: KvOptions) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        """Return the tasks: the revision is fixed here. Costs a question for the keys of each task. Raises
        `DataLoss`."""
        key, end = range_of((self.options.prefix or "").encode(), None, True)
        tasks: list[InputPartition] = []
        with closing(self.options.connect()) as yard:
            uid = identity(yard, self.options.group)
            kv = yard.kv(self.options.group)
            revision = self.options.revision or kv.status()["revision"]
            while True:
                keys = self._page(kv, key, end, revision, self.options.max_keys, keys_only=True)
                following = end if len(keys) < self.options.max_keys else behind(keys[-1].key)
                tasks.append(KvPartition(0, revision, key, following, uid))
                if following == end:
                    return tasks
                key = following

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the keys. Raises `DataLoss`."""
        assert isinstance(partition, KvPartition)
        group = self.options.group
        with closing(self.options.connect()) as yard:
            check_identity(group, partition.uid, identity(yard, group), partition.end)
            yield from batches(map(row_of, self._keys(yard.kv(group), partition)))

    def _keys(self, kv: KV, wanted: KvPartition) -> Iterator[KeyValue]:
        key = wanted.key
        while True:
            page = self._page(kv, key, wanted.until, wanted.end, PAGE_KEYS)
            yield from page
            if len(page) < PAGE_KEYS:
                return
            key = behind(page[-1].key)
            if key == wanted.until:
                return

    def _page(
        self, kv: KV, key: bytes, end: bytes, revision: int, limit: int, keys_only: bool = False
    ) -> Sequence[KeyValue]:
        try:
            return kv.range(key, end, revision=revision, limit=limit, keys_only=keys_only).kvs
        except Compacted as error:
            raise DataLoss(f"KV group {self.options.group!r}: {error}: read it anew") from error


class KvStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What changes from a revision on. Options are parsed when they are first needed, as in `stream`."""

    def __init__(self, options: Callable[[], KvOptions]) -> None:
        self._parse = options
        self._pinned: tuple[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self._parse()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        options = state["options"]
        KvStreamReader.__init__(self, lambda: options)

    def _status(self) -> Mapping[str, int]:
        options = self._parse()
        with closing(options.connect()) as yard:
            uid = identity(yard, options.group)
            return {**yard.kv(options.group).status(), "uid": uid}

    def _newest(self) -> tuple[int, int]:
        """Return the newest revision, and the group's identity."""
        found = self._status()
        return found["revision"], found["uid"]

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return none: a history is bounded."""
        return ReadAllAvailable()

    def initialOffset(self) -> dict[str, Any]:
        """Return the revision before the first one. It may be another one when Spark asks again: so it is marked."""
        starting = self._parse().starting
        if not isinstance(starting, int):
            starting = self._status()["revision" if starting == "latest" else "compacted"] + 1
        return {"v": VERSION, "machine": "kv", "revision": starting - 1, "initial": True}

    def prepareForTriggerAvailableNow(self) -> None:
        """Pin the end."""
        self._pinned = self._newest()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the newest revision; `start` when it is that. Raises `DataLoss` for another group of that name, or an
        older copy of it."""
        since = revision_of(start)
        newest, uid = self._pinned or self._newest()
        check_identity(self._parse().group, start.get("uid", 0), uid, since)
        if newest < since and not start.get("initial"):
            raise older(self._parse().group, newest, since)
        if newest < since or (newest == since and not start.get("initial")):
            return start
        found = {"v": VERSION, "machine": "kv", "uid": uid, "revision": newest}
        return {**found, "first": since} if start.get("initial") and newest > since else found

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the task; what an initial start says counts for nothing."""
        first = end.get("first", revision_of(end)) if start.get("initial") else revision_of(start)
        return [KvPartition(first, revision_of(end), uid=end.get("uid", 0))]

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing: no connection is kept."""

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield what changed. Raises `DataLoss` where the history of it is gone."""
        assert isinstance(partition, KvPartition)
        options = self._parse()
        if partition.first < partition.end:
            with closing(options.connect()) as yard:
                check_identity(options.group, partition.uid, identity(yard, options.group), partition.first)
                kv = yard.kv(options.group)
                if (newest := kv.status()["revision"]) < partition.end:
                    # Nobody knows when it would come there, and what by then.
                    raise older(options.group, newest, partition.end)
                yield from batches(self._changes(kv, partition))

    def _changes(self, kv: KV, wanted: KvPartition) -> Iterator[dict[str, Any]]:
        prefix = (self._parse().prefix or "").encode()
        try:
            for one in kv.watch(prefix, prefix=True, start=wanted.first + 1, progress=True, wait=WAIT_S):
                if one.revision <= wanted.end:
                    for event in one.events:
                        yield row_of(event.kv) if event.kv else deletion(event.key, one.revision)
                if one.revision >= wanted.end:
                    return
        except Compacted as error:
            raise DataLoss(
                f"KV group {self._parse().group!r}: what changed from revision {wanted.first + 1} on is compacted: "
                "start the query with a new checkpointLocation, or keep more history"
            ) from error


def revision_of(offset: Any) -> int:
    """Return a checkpoint's revision. Raises `BadOffset`."""
    if isinstance(offset, dict) and offset.get("v") == VERSION and offset.get("machine") == "kv":
        return int(offset["revision"])
    raise BadOffset(f"checkpoint: {str(offset)[:60]} is no offset of a KV group: it is another source's")


def row_of(kv: KeyValue) -> dict[str, Any]:
    """Return a key's row."""
    return {
        "key": kv.key, "value": kv.value, "deleted": False, "revision": kv.mod_revision,
        "create_revision": kv.create_revision, "version": kv.version, "lease": kv.lease,
    }  # fmt: skip


def deletion(key: bytes, revision: int) -> dict[str, Any]:
    """Return the row of a key that went."""
    return {"key": key, "deleted": True, "revision": revision}


def batches(rows: Iterator[dict[str, Any]]) -> Iterator[pyarrow.RecordBatch]:
    """Yield rows as Arrow has them."""
    held: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row["key"]) + len(row.get("value") or b"")
        if size >= BATCH_BYTES or len(held) >= BATCH_ROWS:
            yield pyarrow.RecordBatch.from_pylist(held, SCHEMA)
            held, size = [], 0
    if held:
        yield pyarrow.RecordBatch.from_pylist(held, SCHEMA)


def parse_kv_sink(given: Mapping[str, str], schema: StructType, overwrite: bool) -> KvOptions:
    """Return a sink's options; mode and columns are checked as well. Raises `OptionError`."""
    if overwrite:
        raise OptionError("mode: overwrite, complete and update: keys are put and deleted by rows: use append")
    columns = {one.name: one.dataType.simpleString() for one in schema.fields}
    for name, kind in columns.items():
        if kind not in SINK_COLUMNS.get(name, ()):
            raise OptionError(f"{name}: {kind}: a KV sink takes key and value (binary or string) and deleted (boolean)")
    if not {"key", "value"} <= columns.keys():
        raise OptionError("key, value: a KV sink needs both columns; value is null where deleted is true")
    return parse_kv(given, "prefix", "revision", "startingRevision", "maxPartitionKeys")


class Writes:
    """What a task of either sink does."""

    def __init__(self, options: KvOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        """Put and delete, some keys at a time; of a key the last row counts."""
        with closing(self.options.connect()) as yard:
            kv = yard.kv(self.options.group)
            held: dict[bytes, Put | Delete] = {}
            size = 0
            for batch in iterator:
                for row in batch.to_pylist():
                    one = operation(row)
                    held[one.key] = one
                    size += len(one.key) + (len(one.value or b"") if isinstance(one, Put) else 0)
                    if len(held) >= WRITE_OPERATIONS or size >= WRITE_BYTES:
                        kv.txn((), list(held.values()))
                        held, size = {}, 0
            if held:
                kv.txn((), list(held.values()))
        return WriterCommitMessage()


def operation(row: Mapping[str, Any]) -> Put | Delete:
    """Return what a row asks for. Raises `OptionError`."""
    key, value = (one.encode() if isinstance(one, str) else one for one in (row["key"], row["value"]))
    if not key:
        raise OptionError("key: a row has none")
    if row.get("deleted"):
        return Delete(key)
    if value is None:
        raise OptionError(f"value: key {key!r} has none: an empty one is a value, and deleted = true removes the key")
    return Put(key, value)


class KvSink(Writes, DataSourceArrowWriter):
    """A batch's sink."""

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: tasks have written."""

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing."""


class KvStreamSink(Writes, DataSourceStreamArrowWriter):
    """A stream's sink."""

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: tasks have written, and a batch that is repeated writes the same."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing."""


def kv_table() -> str:
    """Return the table of docs/guides/spark.md."""
    return markdown(KV_OPTIONS)

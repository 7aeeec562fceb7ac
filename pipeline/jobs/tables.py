"""Tables: JSON records of logs, as they come, into a Delta table by dimensions and hour, and its rejects into another.

Each batch of the stream reads the table's rules from a KV group, lets tasks write Parquet files, and commits these:
first those of the rejects, then those of the table, one transaction each. A batch that is repeated is done with the
rules that the first commit noted, and what is committed is left out (decision 0035).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..errors import OptionError
from ..opening import open_network
from ..options import STREAM, parse_options
from ..sink.record import Fenced, SinkError
from ..tables.commit import Table, fit, prepare
from ..tables.compaction import compact
from ..tables.files import REJECTED_SCHEMA, Added, Task, result_of, table_schema
from ..tables.kv_schema import Reads, describe
from ..tables.plain import run_plain
from ..tables.rules import HOUR, rules_of
from .running import Progress, silent

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = ("log", "offset", "timestamp", "meta", "payload_size", "payload")
QUERY = "sql.streaming.queryId"
NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
COMPACT_S = 60.0
HOOK: Callable[[str], None] | None = None
"""Of tests alone: called with the name of each step that a crash may come before."""


def at(step: str) -> None:
    """Tell the tests' hook, if there is one, which step comes next."""
    if HOOK is not None:
        HOOK(step)


class Tables(NamedTuple):
    """What to do. `given`: the stream's options, servers and which logs. `out` holds the tables `name` and
    `name__rejected`, and the checkpoint. `kv` is the KV group with the rules, below `prefix`. `every`: seconds from
    batch to batch; None: what is there now, and no more. `plain`: as
    Spark's Parquet files."""

    given: Mapping[str, str]
    name: str
    out: Path
    kv: str = "tables"
    prefix: str = ""
    sink: str = ""
    every: float | None = None
    compact: bool = False
    reset: bool = False
    plain: bool = False

    @property
    def table(self) -> Path:
        """The table's directory."""
        return self.out / self.name

    @property
    def rejected(self) -> Path:
        """The directory of the table of rejects."""
        return self.out / f"{self.name}__rejected"

    @property
    def sink_id(self) -> str:
        """By what the tables know what was written."""
        return self.sink or self.name

    @property
    def rules_at(self) -> str:
        """The prefix of its keys in the KV group."""
        return self.prefix or f"tables/{self.name}/"

    @property
    def checkpoint(self) -> Path:
        """Where the stream keeps how far it is."""
        return self.out / f"{self.name}__checkpoint" / self.sink_id


class Counts(NamedTuple):
    """Of a run: batches, and those that were committed before; records read, rows of either table, files."""

    batches: int = 0
    repeated: int = 0
    read: int = 0
    rows: int = 0
    rejected: int = 0
    files: int = 0
    merged: int = 0

    def plus(self, **more: int) -> Counts:
        """Return the sum."""
        return self._replace(**{name: getattr(self, name) + count for name, count in more.items()})


Run: TypeAlias = Callable[[Task], Iterator[str]]
"""Runs a task over the parts of a batch, wherever they are, and yields what each says."""


class Batches:
    """The batches of one run of the job: what the driver does with each."""

    def __init__(self, job: Tables, kv: Reads, progress: Progress = silent) -> None:
        self.job = job
        self.counts = Counts()
        self.revision = 0
        self._kv = kv
        self._progress = progress
        self._own: int | None = None
        self._compact_at = 0.0

    def write(self, batch: int, query: str, run: Run) -> None:
        """Bring a batch into both tables, or find that it is there. `query` is the stream's id, which its checkpoint
        keeps. Raises `Fenced`, `SinkError`, `BadTable`."""
        job = self.job
        prepare(job.rejected, REJECTED_SCHEMA, [HOUR])
        rejected = Table(job.rejected, job.sink_id)
        done = self._newest(rejected, batch, query)
        if done is None or done < batch:
            found = describe(self._kv, job.kv, job.rules_at)
            self.revision = found.revision
            prepare(job.table, table_schema(found.rules), found.rules.partitioned_by)
            rules = fit(job.table, found.rules)
        # Looked at and committed on the same snapshot: only so the look is a fence.
        table = Table(job.table, job.sink_id)
        missing = [one for one in (rejected, table) if not one.has(batch, query)]
        if not missing:
            self._count(repeated=1)
            return
        if rejected not in missing:
            # The crash was between the two commits: the same rules once more.
            noted = rejected.notes(batch, query)
            self.revision = noted["revision"]
            rules = rules_of(noted["rules"])
        read, added, bad = 0, list[Added](), list[Added]()
        for said in run(Task(job.table, job.rejected, rules)):
            more, rows, rejects = result_of(said)
            read, added, bad = read + more, added + rows, bad + rejects
        good, refused = sum(one.rows for one in added), sum(one.rows for one in bad)
        if read != good + refused:
            raise SinkError(f"batch {batch}: {read} records were read, {good} are rows and {refused} rejected")
        notes = {"revision": self.revision, "rules": rules.plain(), "read": read, "rows": good, "rejected": refused}
        for one, files in ((rejected, bad), (table, added)):
            at(f"before-{one.path.name}")
            if one in missing:
                one.commit(batch, query, files, notes)
        at("after-commit")
        self._own = batch
        self._count(read=read, rows=good, rejected=refused, files=len(added) + len(bad))

    def _newest(self, rejected: Table, batch: int, query: str) -> int | None:
        """Return the newest batch that this query has committed, by the table of rejects, which is the first. Raises
        for a batch that is none of the query that has written there."""
        name = f"sink {self.job.sink_id!r}"
        done = rejected.batch
        if done is not None and not rejected.is_of(query):
            if self._own is None and self.job.reset:
                return None
            raise SinkError(
                f"{name}: {rejected.path}: another query has written under this name up to batch {done} (a checkpoint "
                "that was deleted makes another query, too): --reset begins anew, and what is written again is there "
                "twice"
            )
        if self._own is not None and done != self._own:
            raise Fenced(f"{name}: another run of this query has taken over at batch {done}")
        if batch > (-1 if done is None else done) + 1 and not self.job.reset:
            raise SinkError(
                f"{name}: batch {batch} was asked for, and {rejected.path} has {'none' if done is None else done}: was "
                "it deleted, or is this another table's checkpoint? --reset goes on"
            )
        return done

    def _count(self, **more: int) -> None:
        self.counts = self.counts.plus(batches=1, **more)
        self._progress(more.get("read", 0))

    def tidy(self, last: bool = False) -> None:
        """Merge the files of old hours, now and then and at the end, if that was asked for."""
        if not self.job.compact or (not last and time.monotonic() < self._compact_at):
            return
        now = datetime.now(UTC)
        for path in (self.job.table, self.job.rejected):
            removed, _ = compact(path, now)
            self.counts = self.counts.plus(merged=removed)
        self._compact_at = time.monotonic() + COMPACT_S


def run_tables(spark: SparkSession, job: Tables, progress: Progress = silent) -> dict[str, Any]:
    """Write tables until what is there is in them, or, with `every`, until Ctrl-C; return plain figures. Raises what a
    batch raises. `progress` counts records."""
    for name in (job.name, job.sink_id):
        if not NAME.fullmatch(name):
            raise OptionError(f"{name!r}: a name of letters, digits, '.', '_' and '-' is expected")
    job = job._replace(out=job.out.absolute())
    given = {"startingOffsets": "earliest", **job.given, "includePayload": "inline"}
    job.out.mkdir(parents=True, exist_ok=True)
    when: Any = {"availableNow": True} if job.every is None else {"processingTime": f"{job.every} seconds"}
    with closing(open_network(parse_options(given, STREAM))) as source:
        kv = source.yard.kv(job.kv)
        # What is wrong with them is said before anything is started.
        found = describe(kv, job.kv, job.rules_at)
        stream = spark.readStream.format("logyard").options(**given).load().select(*COLUMNS)
        if job.plain:
            rows, bad = run_plain(stream, found.rules, job.table, job.rejected, job.checkpoint, when, progress)
            if rows.read == bad.read and rows.read != rows.rows + bad.rows:
                raise SinkError(f"{rows.read} records were read, {rows.rows} are rows and {bad.rows} rejected")
            counts = Counts(rows.batches, 0, rows.read, rows.rows, bad.rows)
            return figures(job, counts, found.revision)
        batches = Batches(job, kv, progress)
        failures: list[BaseException] = []

        def write(df: DataFrame, number: int) -> None:
            try:
                query = df.sparkSession.sparkContext.getLocalProperty(QUERY)
                assert query is not None, "Spark says which query a batch is of"
                batches.write(number, query, lambda task: run_task(df, task))
                batches.tidy()
            except BaseException as error:
                # Spark makes text of it.
                failures.append(error)
                raise

        writing = stream.writeStream.foreachBatch(write).option("checkpointLocation", str(job.checkpoint))
        query = writing.trigger(**when).start()
        try:
            query.awaitTermination()
        except KeyboardInterrupt:
            pass
        except Exception as error:
            raise failures[0] if failures else SinkError(f"the stream ended: {essence(str(error))}") from None
        finally:
            query.stop()
        batches.tidy(last=True)
    return figures(job, batches.counts, batches.revision)


def essence(text: str) -> str:
    """Return what an error of ours says in what Spark made of it; else its first line."""
    said: list[str] = re.findall(r"^logyard\.[\w.]+: (.+)$", text, re.MULTILINE)
    return said[-1] if said else text.partition("\n")[0]


def figures(job: Tables, counts: Counts, revision: int) -> dict[str, Any]:
    """Return what a run says of itself."""
    return {
        "ok": True, "table": str(job.table), "rejected_table": str(job.rejected), "batches": counts.batches,
        "batches_repeated": counts.repeated, "rows_read": counts.read, "rows_written": counts.rows,
        "rows_rejected": counts.rejected, "files": counts.files, "files_merged": counts.merged,
        "kv_revision": revision,
    }  # fmt: skip


def run_task(df: DataFrame, task: Task) -> Iterator[str]:
    """Run a task over each of Spark's partitions of a batch."""

    def write(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow

        said = json.dumps(task.run(batches))
        yield pyarrow.RecordBatch.from_pydict({"result": [said]})

    for row in df.mapInArrow(write, "result string").collect():
        yield row["result"]

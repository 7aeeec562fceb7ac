"""The sinks as Spark calls them: `writeStream` and `write` with ``format("logyard")``.

Spark writes each task in a process of its own, and makes the writer anew for the commit, which gets the tasks' messages
and the batch's number only: so the messages say what query and run they are of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from ..errors import OptionError
from .core import Writing, Written, commit_batch, write_task
from .options import SinkOptions, parse_sink
from .rows import check_columns

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

QUERY, BATCH, RUN = "sql.streaming.queryId", "streaming.sql.batchId", "spark.jobGroup.id"
"""Local properties of a task of a stream: its query's id, which the checkpoint keeps, the batch, and the run's id."""


@dataclass
class Message(WriterCommitMessage):
    """What a task tells the commit."""

    written: Written


def context() -> tuple[TaskContext, str, str]:
    """Return the task's context, its query and its run; both are empty where there is no stream."""
    task = TaskContext.get()
    assert task is not None, "Spark calls this in a task"
    return task, task.getLocalProperty(QUERY) or "", task.getLocalProperty(RUN) or ""


class StreamSink(DataSourceStreamArrowWriter):
    """A stream's sink."""

    def __init__(self, options: SinkOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Message:
        """Write a task's rows."""
        task, query, run = context()
        batch = task.getLocalProperty(BATCH)
        if batch is None:
            raise OptionError("writeStream: Spark does not tell which batch this is")
        return Message(write_task(self.options, iterator, Writing(int(batch), query, run), task.partitionId()))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Make a batch visible."""
        commit_batch(self.options, told_by(messages), batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: it is called behind a commit that failed half-way as well, and nothing may be undone then."""


class BatchSink(DataSourceArrowWriter):
    """A batch's sink. One object goes to all tasks and to the commit."""

    def __init__(self, options: SinkOptions) -> None:
        self.options = options
        self.job = uuid4().hex

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Message:
        """Write a task's rows."""
        task, query, run = context()
        # In foreachBatch two writes of one run are two jobs, and a sink is for one of them.
        writing = Writing(self.options.batch or 0, query, f"{run}/{self.job}")
        return Message(write_task(self.options, iterator, writing, task.partitionId()))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make it visible."""
        commit_batch(self.options, told_by(messages), self.options.batch or 0)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing, as `StreamSink.abort`."""


def told_by(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    """Return what the tasks wrote, in their order."""
    return [message.written for message in messages if isinstance(message, Message)]


def parsed(given: Any, schema: StructType, overwrite: bool, streaming: bool) -> SinkOptions:
    """Return a sink's options, all of it checked. Raises `OptionError`."""
    if overwrite:
        what = "outputMode: complete and update" if streaming else "mode: overwrite"
        raise OptionError(f"{what}: a log is appended to: use append, and logyard truncate for what is to go")
    options = parse_sink(given, streaming)
    check_columns([(one.name, one.dataType.simpleString()) for one in schema.fields], options.log)
    return options

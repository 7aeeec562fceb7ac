"""The data source with a sink whose processes die: the worker of a task, or the one that commits, before a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from pyspark.sql.datasource import WriterCommitMessage

from logyard.pipeline.datasource import LogyardDataSource
from logyard.pipeline.sink import core
from logyard.pipeline.sink.options import SinkOptions
from logyard.pipeline.sink.writers import Message, StreamSink, parsed

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType


PROCESS, GROUP, EXECUTOR, NOBODY = "process", "group", "executor", "nobody"
"""Who dies: the process that comes to the step; all of the query's, by the hand of who waits for `reached`; the JVM
that runs the task, an executor's; nobody, but the process stops until who waits for `reached` lets it go on."""
BACKEND = "CoarseGrainedExecutorBackend"


def reached(mark: Path) -> Path:
    """Return the file that says that a step was reached, and the process that stands there, or what was killed."""
    return mark.with_suffix(".reached")


def tell(mark: Path, what: str) -> None:
    """Write `reached`, all of it at once."""
    part = mark.with_suffix(".part")
    part.write_text(what)
    part.rename(reached(mark))


def arm(mark: Path) -> None:
    """Die before the step that a file names, "STEP" or "STEP TIME VICTIM", when a task or commit comes to it for that
    time; once, and the file is gone."""
    times = 0

    def hook(step: str) -> None:
        nonlocal times
        try:
            wanted, time, victim = (*mark.read_text().split(), "1", PROCESS)[:3]
            if step != wanted:
                return
            times += 1
            # Other steps come once a task, or once a commit.
            if step.startswith("mid") and times < int(time):
                return
            mark.unlink()
        except FileNotFoundError:
            return
        if victim in (GROUP, NOBODY):
            tell(mark, str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        elif victim == EXECUTOR:
            # A worker is its daemon's child, which is the JVM's.
            jvm = next(one for one in psutil.Process().parents() if one.name() == "java")
            tell(mark, " ".join(jvm.cmdline()))
            jvm.kill()
        if victim != NOBODY:
            os.kill(os.getpid(), signal.SIGKILL)

    core.HOOK = hook


class CrashingSink(StreamSink):
    def __init__(self, options: SinkOptions, mark: str) -> None:
        super().__init__(options)
        self.mark = mark

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Message:
        arm(Path(self.mark))
        try:
            return super().write(iterator)
        finally:
            core.HOOK = None

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        arm(Path(self.mark))
        super().commit(messages, batchId)


class CrashingSource(LogyardDataSource):
    """`mark`: the file."""

    @classmethod
    def name(cls) -> str:
        return "crashing"

    def streamWriter(self, schema: StructType, overwrite: bool) -> CrashingSink:
        given = {name: value for name, value in self.options.items() if name.lower() != "mark"}
        mark = {name.lower(): value for name, value in self.options.items()}["mark"]
        return CrashingSink(parsed(given, schema, overwrite, True), mark)

"""The node's side of its writer process: starts it, sends one job at a time, starts it again when it dies.

Invariant: a job is over when its reply is here, or when the process that had it has ended; nothing here waits in the
loop but with `await`. A job that kills the process `DEATHS_MAX` times is set aside with a reason; segments are then
written in a thread, as they are while no process can be started. Called by `segment_files` and `payload_port`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from logyard.engine.config import SystemConfig
from logyard.engine.disk.door import Disk
from logyard.engine.entry import Entry
from logyard.engine.log.segment_job import SegmentJob, SegmentWritten, run_segment_job
from logyard.engine.types import Buffer
from logyard.protocol.errors import Corrupt, JobPoisoned, LogyardError

from .child import HELLO, PROTOCOL
from .jobs import ERROR, SEGMENT, decode_failure
from .wire import HEAD, READ_BYTES, WireBroken, decode_head, decode_header, encode

log = logging.getLogger(__name__)

DEATHS_MAX = 3
"""Of one job: once may be chance, twice an operator; three times it is the job."""
START_S = 20.0
"""How long a job waits for a process before it goes another way."""
STOP_S = 10.0
"""How long a process whose pipe is closed may take to end: one transaction, on a slow disk."""
BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 5.0
"""Pause before the next start, doubled for each process that ended without a finished job."""
MISFIRES_MAX = 2
"""Processes in a row that never said hello: from then on no job waits for the next."""
INLINE_BYTES = 64 << 10
"""A longer reply is decoded in a thread."""
ASIDE_MAX = 16
"""Reasons kept for the status."""
COMMAND = (sys.executable, "-m", "logyard.service.writer.child")


class WriterAway(LogyardError):
    """No writer process could be started in time; the status says why. The job is tried again later."""


class _Died(Exception):
    """The process ended, or broke the pipe, before it had replied."""


class WriterProcess:
    """`engine.ports.WriterPort`. The constructor starts nothing. `command` is another program in tests."""

    def __init__(self, directory: Path, config: SystemConfig, disk: Disk, command: Sequence[str] = COMMAND) -> None:
        self.directory = directory
        self._maps = (config.generation_bytes, config.generation_transaction_bytes, config.generation_files)
        self._disk = disk
        self._command = command
        self._turn = trio.Lock()
        self._process: trio.Process | None = None
        self._changed = trio.Event()
        self._stopped = True
        self._failures = 0
        self._misfires = 0
        self.starts = 0
        self.jobs = 0
        self.poisoned = 0
        self.last_end = ""
        self.job = ""
        self.set_aside: deque[tuple[str, str]] = deque(maxlen=ASIDE_MAX)

    @property
    def pid(self) -> int:
        """The process that takes jobs now; 0: none."""
        return self._process.pid if self._process is not None else 0

    def status(self) -> dict[str, Any]:
        """Return what `logyard status` shows; `set_aside` are (job, reason), the last few."""
        return {
            "pid": self.pid, "starts": self.starts, "jobs": self.jobs, "poisoned": self.poisoned, "job": self.job,
            "last_end": self.last_end, "set_aside": [list(one) for one in self.set_aside],
        }  # fmt: skip

    # The process

    async def run(self, lock_fd: int, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a process running until cancelled; then it is told to end, and has ended when this returns."""
        self._stopped = False
        task_status.started()
        try:
            while True:
                await self._live(lock_fd)
                pause = min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** min(self._failures, 16))
                self._failures += 1
                await trio.sleep(pause)
        finally:
            self._stopped = True
            self._tell()

    async def _live(self, lock_fd: int) -> None:
        """Run one process, from its start to its end."""
        path = os.pathsep.join(os.path.abspath(part) for part in sys.path)
        command = [*self._command, str(self.directory), str(lock_fd), *map(str, self._maps)]
        try:
            process = await trio.lowlevel.open_process(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(lock_fd,),
                env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        except OSError as error:
            self._misfires += 1
            self._ended(f"it could not be started: {error}")
            return
        self.starts += 1
        try:
            header, _ = await self._receive(process)
            if header[:2] != [HELLO, PROTOCOL]:
                raise WireBroken(f"it said {header[:2]}, not {[HELLO, PROTOCOL]}")
            self._process = process
            self._misfires = 0
            self._tell()
            await process.wait()
        except (_Died, WireBroken) as error:
            self._misfires += 1
            log.error("writer: %s", error)
        finally:
            # Nobody else writes to this directory until it has ended.
            with trio.CancelScope(shield=True):
                await self._end(process)
            self._ended(_how(process))

    async def _end(self, process: trio.Process) -> None:
        """Close its input: it ends by itself, at its next step; kill it if it does not."""
        assert process.stdin is not None and process.stdout is not None
        await process.stdin.aclose()
        with trio.move_on_after(STOP_S):
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
        await process.stdout.aclose()

    def _ended(self, how: str) -> None:
        self._process = None
        self.last_end = how
        if how != _how_well():
            log.error("writer: %s", how)
        self._tell()

    def _tell(self) -> None:
        event, self._changed = self._changed, trio.Event()
        event.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    # Jobs

    async def write_segment(self, job: SegmentJob, entries: Sequence[tuple[int, Entry]]) -> SegmentWritten:
        """Write a segment there, or, where that fails and memory helps, in a thread here."""
        what = f"segment of WAL file {job.file}"
        try:
            result = await self.call(what, lambda: [SEGMENT, job.pack()])
            return await trio.to_thread.run_sync(SegmentWritten.unpack, result)
        except (Corrupt, FileNotFoundError, JobPoisoned, WriterAway, WireBroken) as error:
            # What the file does not give any more is in memory; and a job that is too long, or deadly, is not so here.
            log.error("writer: %s is written in the node: %s", what, error)
        return await trio.to_thread.run_sync(run_segment_job, self._disk, job, entries)

    async def call(
        self,
        what: str,
        pack: Callable[[], Sequence[object]],
        bodies: Sequence[Buffer] = (),
        died: Callable[[], Awaitable[object]] | None = None,
    ) -> list[Any]:
        """Return one job's result; `pack()` is called in a thread, as a job of many groups takes a while to encode. A
        process that dies is replaced, `died` awaited, and the same job sent again.

        Raises `JobPoisoned` when it died too often, `WriterAway`, and what the job raised.
        """
        size = sum(map(len, bodies))
        head = await trio.to_thread.run_sync(lambda: encode(pack(), size))
        deaths = 0
        async with self._turn:
            self.job = what
            try:
                while True:
                    try:
                        status, *result = await self._attempt(head, bodies)
                        break
                    except _Died:
                        deaths += 1
                        if died is not None:
                            await died()
                        if deaths >= DEATHS_MAX:
                            reason = f"it ended the writer process {deaths} times, last: {self.last_end}"
                            self.poisoned += 1
                            self.set_aside.append((what, reason))
                            raise JobPoisoned(f"{what} is set aside: {reason}") from None
            finally:
                self.job = ""
        self.jobs += 1
        self._failures = 0
        if status == ERROR:
            raise decode_failure(*result)
        return result

    async def _attempt(self, head: bytes, bodies: Sequence[Buffer]) -> list[Any]:
        """Send a job and wait for its reply. When this raises, no process has the job any more."""
        with trio.move_on_after(START_S):
            await self._until(lambda: self._process is not None or self._stopped or self._misfires >= MISFIRES_MAX)
        process = self._process
        if process is None:
            raise WriterAway(f"no writer process runs: {self.last_end or 'it has not started yet'}")
        assert process.stdin is not None
        try:
            for part in (head, *bodies):
                await process.stdin.send_all(part)
            header, _ = await self._receive(process)
            return header
        except BaseException as error:
            with trio.CancelScope(shield=True):
                # Also when cancelled: its reply would be taken for the next job's.
                await self._end(process)
                await self._until(lambda: self._process is not process)
            if isinstance(error, trio.BrokenResourceError | trio.ClosedResourceError):
                raise _Died from None
            raise

    async def _receive(self, process: trio.Process) -> tuple[list[Any], bytes]:
        """Return header and body of the next message. Raises `_Died`, `WireBroken`."""
        header_bytes, body_bytes = decode_head(await self._exactly(process, HEAD.size))
        packed = await self._exactly(process, header_bytes)
        if header_bytes > INLINE_BYTES:
            header = await trio.to_thread.run_sync(decode_header, packed)
        else:
            header = decode_header(packed)
        return header, await self._exactly(process, body_bytes)

    async def _exactly(self, process: trio.Process, size: int) -> bytes:
        assert process.stdout is not None
        found = bytearray()
        while len(found) < size:
            try:
                more = await process.stdout.receive_some(min(READ_BYTES, size - len(found)))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                more = b""
            if not more:
                raise _Died("the writer process ended")
            found += more
        return bytes(found)


def _how(process: trio.Process) -> str:
    """Return how a process ended, for people."""
    code = process.returncode
    if code is None or code >= 0:
        return f"the process ended with code {code}" if code else _how_well()
    return f"the process was killed by {signal.Signals(-code).name}"


def _how_well() -> str:
    return "the process was told to end"

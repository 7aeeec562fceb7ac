"""The writer process of a node: `python -m logyard.service.writer.child DIRECTORY LOCK-FD MAP-BYTES TRANSACTION-BYTES`.

Invariant: it runs only with the directory's lock, inherited from the node that started it, and alone; it decides
nothing about liveness, deletes nothing, and ends when its input does: an orphan finishes or aborts the transaction it
is in, and until then the directory stays locked. Jobs come on standard input, replies go to standard output.
Started by `writer_process`, by exec: never forked from a process with open environments.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
from collections.abc import Sequence

from logyard.engine.disk.door import Disk
from logyard.engine.disk.lock import lock_writer
from logyard.payloads.writing import GenerationConfig, Step, quiet
from logyard.protocol.errors import DirectoryInUse

from .jobs import Jobs
from .wire import encode, receive, send

HELLO = "hello"
PROTOCOL = 1
NICE = 5
"""Behind the loop when both want a core, and still a third of it: a writer that starves makes clients wait instead."""


class Orphaned(BaseException):
    """The node is gone: no job matters any more. Not an `Exception`, so that nothing takes it for a failed job."""


class Parent:
    """The reading end of the pipe from the node."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._poll = select.poll()
        self._poll.register(fd, 0)

    def watch(self, seconds: float = 0.0) -> None:
        """Wait, as long as the node lives. Raises `Orphaned`."""
        # Only a hang-up can come: a node sends nothing while a job runs.
        if self._poll.poll(seconds * 1000):
            raise Orphaned


def serve(directory: str, lock_fd: int, maps: GenerationConfig, step: Step = quiet, disk: Disk | None = None) -> int:
    """Run jobs until the input ends; return the exit code. `step` is told of every step of every job."""
    source, target = os.dup(0), os.dup(1)
    # Whatever prints, prints to standard error: replies have the pipe to themselves.
    os.dup2(2, 1)
    # A terminal's Ctrl-C, a service's stop and its reload reach the whole group; the node says when it is over.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        lock_writer(directory, lock_fd)
    except DirectoryInUse as error:
        print(f"logyard writer: {error}", file=sys.stderr)
        return 1
    os.nice(NICE)
    # A job's many objects end with it: collections meanwhile would find nothing, in 0.3 s of the 2 of a segment.
    gc.disable()
    gc.freeze()
    parent = Parent(source)

    def watched(name: str, size: int) -> None:
        step(name, size)
        parent.watch()

    jobs = Jobs(directory, maps, disk or Disk(), watched, parent.watch)
    try:
        send(target, encode([HELLO, PROTOCOL, os.getpid()]))
        while (message := receive(source)) is not None:
            kind, *arguments = message.header
            reply = encode(jobs.run(kind, arguments, message.body))
            del message, arguments
            step("before reply", 0)
            send(target, reply)
            step("after reply", 0)
            del reply
            gc.collect()
    except (Orphaned, BrokenPipeError):
        pass
    return 0


def main(arguments: Sequence[str]) -> int:
    """Return the exit code."""
    if len(arguments) != 5:
        print("logyard writer: a node starts this process, nobody else", file=sys.stderr)
        return 2
    directory, lock_fd, map_bytes, transaction_bytes, beside = arguments
    return serve(directory, int(lock_fd), GenerationConfig(int(map_bytes), int(transaction_bytes), beside == "1"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

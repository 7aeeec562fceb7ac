"""Frames on their way to logs: several logs at once, those of one log in their order. Blocking, from one thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

THREADS = 8
UNDER_WAY_BYTES = 32 << 20
"""Handed over and not stored yet; above, the task waits."""


class Sending:
    """Sends what it is given. The first failure is raised by the next call, or at the end of the ``with`` block."""

    def __init__(self, threads: int = THREADS, bytes_max: int = UNDER_WAY_BYTES) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="logyard-sink")
        self._bytes_max = bytes_max
        self._lock = threading.Condition()
        self._bytes = 0
        self._waiting: dict[str, deque[tuple[Callable[[], object], int]]] = {}
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        # One thread is there from now on, or this fails: what no other one can be started for comes to it.
        self._pool.submit(int)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if error is not None and self._failure is None:
                self._failure = error
            self._lock.wait_for(lambda: not self._waiting)
        self._pool.shutdown()
        if error is None and self._failure is not None:
            raise self._failure

    def put(self, log: str, send: Callable[[], object], size: int) -> None:
        """Call `send` behind those of the same log that were given before; wait while too much is under way."""
        with self._lock:
            self._lock.wait_for(lambda: self._failure is not None or not self._bytes or self._bytes < self._bytes_max)
            if self._failure is not None:
                raise self._failure
            self._bytes += size
            waiting = self._waiting.get(log)
            if waiting is not None:
                waiting.append((send, size))
                return
            self._waiting[log] = deque([(send, size)])
        try:
            self._pool.submit(self._run, log)
        except RuntimeError as error:
            # No more threads are to be had. The pool has it all the same, and drops it after a failure.
            with self._lock:
                self._failure = self._failure or error
            raise

    def _run(self, log: str) -> None:
        """Send one log's frames until there is none."""
        while True:
            with self._lock:
                send, size = self._waiting[log][0]
                failed = self._failure is not None
            if not failed:
                try:
                    send()
                except BaseException as error:  # whatever it is, the task must hear of it
                    with self._lock:
                        self._failure = self._failure or error
            with self._lock:
                waiting = self._waiting[log]
                waiting.popleft()
                self._bytes -= size
                if not waiting:
                    del self._waiting[log]
                self._lock.notify_all()
                if not waiting:
                    return

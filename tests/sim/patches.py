"""Puts the twins in place of what the engine's modules call: trio, time, os, lmdb, threads, `open` and paths.

Only names in the modules of logyard are changed, and all are put back at the end: another test in the same process
sees nothing of it. Used by `cluster`.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import lmdb
import trio

from logyard.engine import jobs
from logyard.engine.disk import rate_limiter, slow_disk
from logyard.engine.host import admission
from logyard.engine.log import cache, group_commit, meta
from logyard.engine.raft import steady
from logyard.engine.raft.core import Raft
from logyard.engine.raft.messages import Message
from logyard.engine.replica import member
from logyard.engine.replica.log_time import LogTime
from logyard.engine.transfer import pull
from logyard.payloads import generation as generations
from logyard.payloads import store as payload_store
from logyard.protocol.errors import GenerationFailed, GenerationUnfinished
from logyard.service import node, payload_port  # noqa: F401  # so that their names are there to change
from logyard.service.log import reader as log_reader  # noqa: F401  # so that their names are there to change

from .disk import Os, files_of, open_twin, remove_tree
from .files import File
from .loop import Crashed, Loop
from .store import module as lmdb_module
from .twins import Trio

WALL_NS = 1_750_000_000 * 1_000_000_000
PREFIX = "logyard."


class Clock:
    """Stands for the module `time`: the clocks of the node that runs."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        life = self._loop.life
        assert life is not None
        return life.now() + life.shift

    perf_counter = monotonic

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)

    perf_counter_ns = monotonic_ns

    def clock_gettime_ns(self, clock: int) -> int:
        """Nothing is suspended here."""
        return self.monotonic_ns()

    def time_ns(self) -> int:
        life = self._loop.life
        assert life is not None
        return WALL_NS + int(life.now() * 1e9) + life.wall_jump_ns

    def time(self) -> float:
        return self.time_ns() / 1e9

    def thread_time_ns(self) -> int:
        return 0

    def process_time(self) -> float:
        return 0.0


class JobLine:
    """The queue to the WAL thread, and that thread: each job is done when the disk has had its time for it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._jobs: deque[Any] = deque()
        self._armed = 0
        self._free = 0.0
        self.run: Callable[[], None] | None = None

    def put(self, job: Any) -> None:
        if job is None:
            # The orderly end: everything handed over is done first.
            self._armed = len(self._jobs)
            if self._jobs and self.run is not None:
                self.run()
            return
        loop, life = self._loop, self._loop.life
        assert life is not None
        latency = life.disk.sync_seconds()  # type: ignore[attr-defined]
        self._jobs.append(job)
        self._free = max(loop.now, self._free) + latency
        loop.at(self._free, life, self._work, latency)

    def _work(self, latency: float) -> None:
        life = self._loop.life
        assert life is not None and self.run is not None
        if not self._jobs:
            return
        self._armed = 1
        life.shift = -latency
        try:
            self.run()
        finally:
            life.shift = 0.0

    def get(self) -> Any:
        if not self._armed or not self._jobs:
            return None
        self._armed -= 1
        return self._jobs.popleft()


class _Thread:
    """A thread whose `target` works on a `JobLine`."""

    def __init__(self, target: Any, name: str = "", daemon: bool = False) -> None:
        self._line = target.__self__._jobs
        self._line.run = target

    def start(self) -> None:
        """It waits for jobs."""

    def join(self) -> None:
        """Its last job is done."""


class _Lock:
    """Nobody else runs."""

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        return None

    def locked(self) -> bool:
        return False


class SimJournal:
    """Of the payload environments in use: nobody dies inside one here, so it suspects nobody."""

    def __init__(self, path: str) -> None:
        self.path = path

    def open(self) -> list[int]:
        return []

    def enter(self, number: int) -> int:
        return 0

    def mark(self, slot: int, inside: bool) -> None:
        """Not needed."""

    def leave(self, slot: int) -> None:
        """Not needed."""

    def close(self) -> None:
        """Not needed."""


def _check_file(loop: Loop) -> Callable[[str], None]:
    def check_file(path: str) -> None:
        found = files_of(loop).find(path)
        if not isinstance(found, File):
            raise GenerationFailed(path, "it cannot be opened")
        if found.rows is None:
            raise GenerationUnfinished(path, "its creation did not finish")
        if found.kind == "damaged":
            raise GenerationFailed(path, "neither of its meta pages is one")

    return check_file


CLOCKED: tuple[Any, ...] = (
    admission.Admission, cache.PayloadCache, slow_disk.SlowDisk, rate_limiter.RateLimiter,
)  # fmt: skip


def _telling(loop: Loop, old: Callable[..., Any]) -> Callable[..., Any]:
    """Who counts a defect and goes on says so."""

    def fail(self: Any, what: str, error: Exception) -> Any:
        loop.on_defect(what, error)
        return old(self, what, error)

    return fail


class _Random:
    """The module `random` with generators of the run's seed only."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def Random(self, seed: object = None) -> random.Random:
        return random.Random(self._draw.getrandbits(64) if seed is None else seed)  # type: ignore[arg-type]


@contextmanager
def installed(loop: Loop, draw: random.Random, clocks: bool = False) -> Iterator[None]:
    """Everything below runs in the simulation. `clocks`: also what took a clock when it was loaded, and which the first
    recorded seeds left alone."""
    clock = Clock(loop)
    twin = Trio(loop)
    threads = SimpleNamespace(Lock=_Lock, RLock=_Lock, Thread=_Thread)
    places: dict[int, Any] = {
        id(trio): twin,
        id(time): clock,
        id(os): Os(loop, draw.randbytes),
        id(lmdb): lmdb_module(loop),
        id(threading): threads,
        id(random): _Random(draw),
        id(shutil): SimpleNamespace(rmtree=remove_tree(loop)),
    }
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        undo.append((owner, name, owner.__dict__.get(name, undo)))
        setattr(owner, name, value)

    for name, one in list(sys.modules.items()):
        if name.startswith(PREFIX) and one is not None:
            for attribute in ("trio", "time", "os", "lmdb", "threading", "random", "shutil"):
                found = places.get(id(one.__dict__.get(attribute)))
                if found is not None:
                    put(one, attribute, found)
    put(group_commit, "queue", SimpleNamespace(SimpleQueue=lambda: JobLine(loop)))
    put(meta, "open", open_twin(loop))
    put(payload_store, "Journal", SimJournal)
    put(payload_store, "take_suspects", lambda path: [])
    put(generations, "check_file", _check_file(loop))
    lane = Raft.hand_out

    def checked(raft: Raft, out: list[Message]) -> steady.Handed | None:
        found = lane(raft, out)
        if found is not None:
            raft.check()
        return found

    put(Raft, "hand_out", checked)
    # Sets of members are gone through in an order that does not depend on addresses.
    put(member.Member, "__hash__", lambda self: self.spec.uid)
    for name in ("fail", "freeze"):
        put(jobs.Jobs, name, _telling(loop, jobs.Jobs.__dict__[name]))
    # Clocks that were taken when their modules were loaded.
    taken: dict[Any, tuple[Any, ...]] = {}
    for kind in (jobs.Jobs, pull.Pace, *(CLOCKED if clocks else ())):
        init: Any = kind.__init__
        taken[init] = init.__defaults__
        init.__defaults__ = (clock.monotonic,)
    try:
        yield
    finally:
        for init, defaults in taken.items():
            init.__defaults__ = defaults
        for owner, name, value in reversed(undo):
            if value is undo:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextmanager
def old_stamps(loop: Loop) -> Iterator[None]:
    """Processes of the program before stamp as that did: log time catches up with the wall clock at up to twice the
    pace, and waits for it at half of it, whatever runs. Apply reads no clock, so states are equal all the same."""
    before = {name: LogTime.__dict__[name] for name in ("now", "follow")}

    def slewed(self: Any, monotonic_ns: int) -> int:
        passed = monotonic_ns - self._read
        if passed > 0:
            wall_ns = Clock(loop).time_ns()
            self._read = monotonic_ns
            self._stamp = min(max(wall_ns, self._stamp + passed // 2), self._stamp + passed * 2)
        return int(self._stamp // 1_000_000)

    def now(self: Any, monotonic_ns: int) -> int:
        own = slewed if loop.life.old_program else before["now"]  # type: ignore[union-attr]
        return int(own(self, monotonic_ns))

    def follow(self: Any, wall_ns: int, monotonic_ns: int) -> int:
        if loop.life.old_program:  # type: ignore[union-attr]
            return slewed(self, monotonic_ns)
        return int(before["follow"](self, wall_ns, monotonic_ns))

    LogTime.now, LogTime.follow = now, follow  # type: ignore[method-assign]
    try:
        yield
    finally:
        LogTime.now, LogTime.follow = before["now"], before["follow"]  # type: ignore[method-assign]


__all__ = ["Crashed", "installed", "old_stamps"]

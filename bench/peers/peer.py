"""What the suite asks of a rival: is it here, start it durably on loopback, load it, stop it by its process ids.

A rival is a class over `Peer` with a few lines: which programs, which words they are started with, when they are ready,
and how its load speaks to it (`load.Wire`, or a program of its own). Processes are ended by their ids, never by name.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

from ..cases.append import run_processes
from ..cluster import reach
from ..processes import Meter, family
from ..report import append_figures, shares

READY_S = 60.0
STOP_S = 15.0
TAIL_LINES = 4
SAY_S = 20.0
PUT, GET, WATCH = "put", "get", "watch"


class PeerFailed(Exception):
    """A rival did not start, ended early, or its load did; the message ends with the last lines of its log."""


class Found(NamedTuple):
    """What `look` found. `version` is empty if it is not installed; `install` says what would."""

    version: str
    install: str


@dataclass(frozen=True, slots=True)
class Load:
    """What every system is asked: appends of `size` bytes by `clients` with a window each over `logs`, for so long.
    `mode`, of those that have keys: GET reads what was put; WATCH has `watchers` of one key that one client puts.
    `keep`: the newest bytes of a log; what is older may go (0: all stay)."""

    clients: int
    window: int
    size: int
    logs: int
    seconds: float
    warmup_s: float
    rate: float = 0.0
    processes: int = 1
    mode: str = PUT
    watchers: int = 0
    keep: int = 0


class PeerSpec(NamedTuple):
    """What one load process of a rival does; see `bench.load.LoadSpec`."""

    peer: str
    addresses: list[str]
    names: list[str]
    size: int
    clients: int
    window: int
    seed: int
    lane: int
    warmup_s: float
    seconds: float
    rate: float
    nodes: int
    mode: str = PUT
    watchers: int = 0


class Peer:
    """A rival with its processes. Leaving it as a context stops all of them.

    `notes` say what a reader must know to compare; `differs`: as it is shipped, it is less durable than we start it.
    """

    name: ClassVar[str]
    install: ClassVar[str]
    notes: ClassVar[tuple[str, ...]] = ()
    differs: ClassVar[bool] = False

    def __init__(self, nodes: int, directory: Path, shipped: bool = False) -> None:
        self.nodes = nodes
        self.directory = directory.resolve()
        self.shipped = shipped
        self.processes: list[subprocess.Popen[bytes]] = []
        self.logs: list[Path] = []

    @classmethod
    def version(cls) -> str:
        """Return which version is installed; "" if none is."""
        raise NotImplementedError

    @classmethod
    def look(cls) -> Found:
        """Return whether it is here, and how to install it."""
        try:
            return Found(cls.version(), cls.install)
        except (OSError, ImportError, subprocess.SubprocessError):
            return Found("", cls.install)

    @classmethod
    def remarks(cls) -> tuple[str, ...]:
        """Return what a reader must know to compare, of the version that is here."""
        return cls.notes

    @classmethod
    def weaker_as_shipped(cls) -> bool:
        """Return whether it is less durable as it comes than we start it."""
        return cls.differs

    def start(self) -> None:
        """Start all nodes and wait until they serve."""
        raise NotImplementedError

    def prepare(self, names: Sequence[str]) -> None:
        """Create what is loaded, where that has to be."""

    @property
    def addresses(self) -> list[str]:
        """Where clients connect to, in order of the nodes."""
        raise NotImplementedError

    @property
    def pids(self) -> list[int]:
        """Process ids of all nodes."""
        return [process.pid for process in self.processes]

    def specs(self, load: Load) -> list[PeerSpec]:
        """Return what each load process does."""
        watch = load.mode == WATCH
        processes = min(load.processes, load.watchers if watch else load.clients)
        watchers = shares(load.watchers, processes) if watch else [0] * processes
        names = [f"bench-{number:06d}" for number in range(load.logs)]
        return [
            PeerSpec(
                self.name, self.addresses, names, load.size, clients, load.window, os.getpid(), lane, load.warmup_s,
                load.seconds, load.rate * clients / load.clients, self.nodes, load.mode, watchers[lane],
            )
            for lane, clients in enumerate([1] * processes if watch else shares(load.clients, processes))
        ]  # fmt: skip

    def drive(self, load: Load, specs: Sequence[PeerSpec], say: Callable[[str], None]) -> list[dict[str, Any]]:
        """Run the load; return what each process counted. One that loads from inside of itself does it here."""
        return run_processes(specs, say, "logyard.bench.peers.load")

    def run(self, load: Load, say: Callable[[str], None]) -> dict[str, Any]:
        """Load it once, and return figures with the keys of `bench append`."""
        specs = self.specs(load)
        self.prepare(specs[0].names)
        meter = Meter(self.pids)
        results = self.drive(load, specs, say)
        used = meter.figures(sum(int(result["acknowledged"]) for result in results))
        self.check_alive()
        figures = append_figures(
            results, size=load.size, clients=load.clients, window=load.window, seconds=load.seconds
        )
        return {
            "ok": bool(figures["acknowledged"]) and not figures["failed"],
            "seconds": load.seconds, "warmup_s": load.warmup_s, **figures, **used,
        }  # fmt: skip

    # Processes

    def spawn(
        self, words: Sequence[str], name: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start one process, which ends with this one; what it says goes to `NAME.log`."""
        log = self.directory / f"{name}.log"
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [*with_parent(), *words], stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                cwd=cwd or self.directory, env={**os.environ, **(environment or {})}, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        self.logs.append(log)
        return process

    def await_ready(self, what: str, ready: Callable[[], bool], timeout_s: float = READY_S) -> None:
        """Wait until `ready`; raise `PeerFailed` as soon as a process ends."""

        def look() -> bool:
            self.check_alive()
            return ready()

        try:
            reach(what, look, timeout_s)
        except PeerFailed:
            raise
        except Exception as error:
            raise PeerFailed(f"{self.name}: {error}: {self.tail()}") from None

    def check_alive(self) -> None:
        """Raise `PeerFailed` if a process ended."""
        for process, log in zip(self.processes, self.logs, strict=True):
            if process.poll() is not None:
                raise PeerFailed(f"{self.name} ended with code {process.returncode}: {tail_of(log)}")

    def tail(self) -> str:
        """Return the last lines of all logs."""
        return " | ".join(tail_of(log) for log in self.logs)

    def stop(self) -> None:
        """End every process with all it started: SIGTERM by id, SIGKILL to what does not follow."""
        everyone = family(self.pids) if self.processes else set()
        deadline = time.monotonic() + STOP_S
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in everyone - set(self.pids):
            try:
                # A helper that its parent left behind; one whose group is not ours is somebody else by now.
                if os.getpgid(pid) in self.pids:
                    os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        self.processes.clear()
        self.logs.clear()

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def with_parent() -> list[str]:
    """Return the words before a command that end its process when this one is killed; none where no program does."""
    found = shutil.which("setpriv")
    return [found, "--pdeathsig", "KILL", "--"] if found else []


def tail_of(log: Path) -> str:
    """Return the last lines of a log in one line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return " / ".join(line.strip() for line in lines[-TAIL_LINES:] if line.strip())[-400:] or "(it said nothing)"


def said_by(*words: str) -> str:
    """Return what a program says; raise OSError or SubprocessError if it is not there."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=SAY_S, check=True)
    return (done.stdout + done.stderr).strip()


def this_python(*words: str) -> list[str]:
    """Return the words that start this interpreter."""
    return [sys.executable, *words]

"""A writer process that fails where a plan says: ``python -m tests.service.writer.failing PLAN ...`` and what
`logyard.service.writer.child` takes.

PLAN is a directory. `die` holds a step's name and a number: that time it comes to it the process is killed. `always`,
`once` and `stall` hold a step's name: it is killed there each time, or once; it waits there while the file exists.
`short` holds a step's name: there it finds no descriptor, as long as the file exists.
`steps` gets the names of all steps, `died` those at which `die` was obeyed, `collected` the newest step at each
collection of garbage. `full` holds the size beyond which no file grows.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from logyard.engine.disk.door import Disk
from logyard.engine.types import Buffer
from logyard.payloads.writing import GenerationConfig
from logyard.protocol.errors import StoreShort
from logyard.service.writer.child import serve


def command(plan: Path) -> tuple[str, ...]:
    """For `WriterProcess`."""
    plan.mkdir(exist_ok=True)
    return (sys.executable, "-m", "tests.service.writer.failing", str(plan))


class Plan:
    """What happens at a step."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.newest = ""

    def read(self, name: str) -> str:
        try:
            return (self.directory / name).read_text()
        except FileNotFoundError:
            return ""

    def collected(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            with (self.directory / "collected").open("a") as collected:
                collected.write(f"{self.newest}\n")

    def step(self, name: str, size: int = 0) -> None:
        self.newest = name
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(self.read("full") or resource.RLIM_INFINITY), -1))
        with (self.directory / "steps").open("a") as steps:
            steps.write(f"{name}\n")
        wanted, _, left = self.read("die").rpartition(" ")
        if wanted == name:
            if int(left) > 1:
                (self.directory / "die").write_text(f"{name} {int(left) - 1}")
            else:
                (self.directory / "die").unlink()
                with (self.directory / "died").open("a") as died:
                    died.write(f"{name}\n")
                os.kill(os.getpid(), signal.SIGKILL)
        if self.read("always") == name:
            for data in Path(self.read("damage") or "/nowhere").glob("gen-*/data.mdb"):
                os.truncate(data, 3 * 4096)
            os.kill(os.getpid(), signal.SIGBUS if self.read("damage") else signal.SIGKILL)
        if self.read("short") == name:
            raise StoreShort("no descriptors")
        if self.read("once") == name:
            (self.directory / "once").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        while self.read("stall") == name:
            (self.directory / "stalling").write_text(str(os.getpid()))
            (self.directory / "stalling").rename(self.directory / "stalled")
            select.select([], [], [], 0.005)


class StepDisk(Disk):
    """A disk whose calls are steps."""

    __slots__ = ("_plan",)

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def gather_write(self, fd: int, buffers: Iterable[Buffer], offset: int) -> int:
        self._plan.step("before write")
        return super().gather_write(fd, buffers, offset)

    def sync_file(self, fd: int) -> None:
        self._plan.step("before sync")
        super().sync_file(fd)
        self._plan.step("after sync")

    def rename(self, old: str, new: str) -> None:
        self._plan.step("before rename")
        super().rename(old, new)


def main() -> int:
    """As the real one."""
    plan = Plan(Path(sys.argv[1]))
    gc.callbacks.append(plan.collected)
    directory, lock_fd, map_bytes, transaction_bytes, beside = sys.argv[2:]
    maps = GenerationConfig(int(map_bytes), int(transaction_bytes), beside == "1")
    return serve(directory, int(lock_fd), maps, plan.step, StepDisk(plan))


if __name__ == "__main__":
    raise SystemExit(main())

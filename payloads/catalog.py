"""The generations of one store directory that this process has open: one environment per process and path (an LMDB
rule).

Invariants: numbers rise and are never used again (the newest directory is never removed before its successor
exists); at most the newest generation is written. Shared by `store` (readers, event loop) and `compaction` (the
writing thread, or another process with a catalog of its own).
"""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from typing import Protocol

from logyard.protocol.errors import FormatNewer, GenerationFailed, GenerationUnfinished, StoreShort

from .bodies import BodiesDoor
from .generation import HALF_MADE, Generation
from .journal import Journal
from .writing import GenerationConfig

_DEAD = ".dead"
_SUSPECT = ".suspect"


class DiskDoor(BodiesDoor, Protocol):
    """What the payload store needs of the engine's disk door: names become durable only through it."""

    def sync_directory(self, path: str, /) -> object:
        """Make a directory durable (fsync)."""
        ...

    def spend(self) -> bool:
        """Give up a descriptor held in reserve, for what is opened next; return False when none is left."""
        ...


class Catalog:
    """Opens generations when they are first asked for. Thread-safe. `writer`: this process may write; else it opens
    read-only."""

    __slots__ = ("directory", "config", "writer", "_disk", "_journal", "_lock", "_open", "_failed")

    def __init__(
        self,
        directory: str,
        config: GenerationConfig,
        disk: DiskDoor,
        *,
        journal: Journal | None = None,
        writer: bool = True,
    ) -> None:
        self.directory = directory
        self.config = config
        self.writer = writer
        self._disk = disk
        self._journal = journal
        self._lock = threading.RLock()
        self._open: dict[int, Generation] = {}
        self._failed: dict[int, GenerationFailed] = {}

    def path(self, number: int) -> str:
        """Return the directory of a generation."""
        return os.path.join(self.directory, f"gen-{number:010d}")

    def numbers(self) -> list[int]:
        """Return every generation there is, rising; those set aside are not."""
        names = [name for name in os.listdir(self.directory) if name.startswith("gen-")]
        return sorted(int(name[4:]) for name in names if name[4:].isdigit())

    def failed(self) -> dict[int, GenerationFailed]:
        """Return the generations that could not be opened or read."""
        return dict(self._failed)

    def fail(self, number: int, error: GenerationFailed) -> None:
        """Serve nothing more of a generation."""
        with self._lock:
            self._failed[number] = error
            generation = self._open.pop(number, None)
        if generation is not None:
            generation.close()

    def get(self, number: int) -> Generation:
        """Return a generation, open. Raises `GenerationFailed`."""
        found = self._open.get(number)
        if found is not None:
            return found
        with self._lock:
            found = self._open.get(number)
            if found is not None:
                return found
            if number in self._failed:
                raise self._failed[number]
            generation = Generation(self.path(number), number, self.config, self._journal, self._disk)
            try:
                self._begin(generation)
            except (FormatNewer, GenerationUnfinished):
                raise
            except GenerationFailed as error:
                if os.path.isdir(generation.path):
                    self._failed[number] = error
                raise
            self._open[number] = generation
            return generation

    def _begin(self, generation: Generation) -> None:
        """Open a generation, out of the reserve of descriptors when there are no others."""
        while True:
            try:
                if self.writer and not generation.sealed and os.path.isdir(generation.path):
                    generation.open_writer()
                else:
                    generation.open_reader()
            except StoreShort:
                if not self._disk.spend():
                    raise
            else:
                return

    def create(self, number: int, base_run: int) -> Generation:
        """Return a new, empty generation; `base_run` is the highest run number in use. It stays open in a process that
        writes; another opens it again when it reads it."""
        with self._lock:
            assert number not in self._open
            generation = Generation(self.path(number), number, self.config, self._journal, self._disk)
            generation.create(base_run, self._disk.sync_directory)
            if self.writer:
                self._open[number] = generation
            else:
                generation.close()
            return generation

    def writer_from(self, number: int, base_run: int) -> Generation:
        """Return the first generation from `number` on that is not sealed; created when there is none."""
        while True:
            if os.path.isdir(self.path(number)):
                try:
                    if not Generation(self.path(number), number, self.config).sealed and number not in self._failed:
                        return self.get(number)
                except GenerationUnfinished:
                    return self.create(number, base_run)
                except FormatNewer:
                    raise
                except GenerationFailed:
                    pass
                number += 1
            elif os.path.isdir(self.path(number) + _SUSPECT):
                number += 1
            else:
                return self.create(number, base_run)

    def seal(self, number: int) -> None:
        """Seal a generation: nothing will be written to it any more."""
        Generation(self.path(number), number, self.config).seal(self._disk.sync_directory)

    def sealed(self, number: int) -> bool:
        """Return whether a generation is sealed."""
        return Generation(self.path(number), number, self.config).sealed

    def retire(self, number: int) -> None:
        """Take a generation out of use at once; `sweep` gives its space back."""
        self._rename(number, _DEAD)

    def set_aside(self, number: int) -> None:
        """Keep a generation's bytes for whoever wants to look at them, and never open them again."""
        self._rename(number, _SUSPECT)

    def _rename(self, number: int, suffix: str) -> None:
        with self._lock:
            generation = self._open.pop(number, None)
            os.rename(self.path(number), self.path(number) + suffix)
            self._disk.sync_directory(self.directory)
            self._failed.pop(number, None)
        if generation is not None:
            generation.close()

    def sweep(self) -> int:
        """Unlink what was retired; return the bytes of disk given back. Slow (28 ms for 256 MiB): never in the
        event loop."""
        freed = 0
        for name in os.listdir(self.directory):
            if name.startswith("gen-") and name.endswith(_DEAD):
                path = os.path.join(self.directory, name)
                freed += allocated(path)
                shutil.rmtree(path)
        if freed:
            self._disk.sync_directory(self.directory)
        return freed

    def clear_unfinished(self) -> None:
        """Remove generations whose creation a crash cut off; raise `FormatNewer`."""
        for name in os.listdir(self.directory):
            if name.startswith("gen-") and name.endswith(HALF_MADE):
                shutil.rmtree(os.path.join(self.directory, name))
        # An earlier version created them under their own names.
        unfinished: list[int] = []
        for number in self.numbers():
            try:
                self.get(number)
            except GenerationUnfinished:
                unfinished.append(number)
            except FormatNewer:
                raise
            except GenerationFailed:
                continue
        for number in unfinished:
            shutil.rmtree(self.path(number))

    def set_aside_numbers(self) -> list[int]:
        """Return the generations that were set aside, now or in earlier runs."""
        names = [name for name in os.listdir(self.directory) if name.startswith("gen-") and name.endswith(_SUSPECT)]
        return sorted(int(name[4 : -len(_SUSPECT)]) for name in names)

    def disk_bytes(self) -> int:
        """Return the allocated bytes of everything here."""
        return sum(
            allocated(os.path.join(self.directory, name))
            for name in os.listdir(self.directory)
            if name.startswith("gen-")
        )

    def close(self) -> None:
        """Close every environment."""
        with self._lock:
            for generation in self._open.values():
                generation.close()
            self._open.clear()


def allocated(path: str) -> int:
    """Return bytes of disk that the files of a directory take (a sparse file's holes do not count); none of those that
    another thread takes away meanwhile."""
    size = 0
    with suppress(FileNotFoundError):
        for name in os.listdir(path):
            with suppress(FileNotFoundError):
                size += os.stat(os.path.join(path, name)).st_blocks * 512
    return size

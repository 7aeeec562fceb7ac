"""What the demo appends: a walk over real files, hashed once, spread over logs.

Pure but for reading files: no network, no randomness. The plan is a function of the files' names and the number of
logs, so that every later check knows which bytes record i must hold. Called by `service.demo.run` and its parts.
"""

from __future__ import annotations

import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__"})
RECORDS_PER_LOG_MIN = 4
"""With fewer files than this per log the walk repeats, each round with `copy=n` in the metadata."""
FILE_BYTES_MAX = 60 * 1024 * 1024
"""Larger files are left out (and counted): a record is bounded by `record_bytes_max`, 64 MiB by default."""


class SourceChanged(Exception):
    """A file is not what it was when it was hashed: the source must hold still during a run."""


class SourceFile(NamedTuple):
    """One file: `name` is relative to the source, `size` in bytes, `digest` the xxh3-128 of its bytes."""

    path: str
    name: str
    mode: int
    mtime_ns: int
    size: int
    digest: bytes


class SourceRecord(NamedTuple):
    """Record `number` of the run: it goes to log `number` modulo the number of logs. `copy` counts the rounds."""

    number: int
    log: int
    file: SourceFile
    copy: int

    @property
    def metadata(self) -> bytes:
        """The record's metadata: compact JSON with path, mode, mtime (seconds), size and, in later rounds, copy."""
        fields: dict[str, object] = {
            "record": self.number,
            "path": self.file.name,
            "mode": self.file.mode,
            "mtime": self.file.mtime_ns / 1e9,
            "size": self.file.size,
        }
        if self.copy:
            fields["copy"] = self.copy
        return json.dumps(fields, separators=(",", ":")).encode()


class Source(NamedTuple):
    """All files of a directory, in the order of the walk, and how many were too large."""

    root: Path
    files: Sequence[SourceFile]
    skipped: int


def default_source() -> Path:
    """Return the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def walk(root: Path) -> Iterator[Path]:
    """Yield regular files below `root` in name order; links, site-packages and __pycache__ are left out."""
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in SKIPPED_DIRECTORIES)
        for name in sorted(files):
            path = Path(directory, name)
            try:
                mode = path.lstat().st_mode
            except OSError:
                continue
            if stat.S_ISREG(mode) and os.access(path, os.R_OK):
                yield path


def scan(root: Path, progress: Callable[[int], None] = lambda size: None) -> Source:
    """Walk and hash once. `progress` is told the bytes of each file."""
    files: list[SourceFile] = []
    skipped = 0
    for path in walk(root):
        if path.stat().st_size > FILE_BYTES_MAX:
            skipped += 1
            continue
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            data = stream.read()
        name = path.relative_to(root).as_posix()
        digest = xxhash.xxh3_128_digest(data)
        files.append(SourceFile(str(path), name, stat.S_IMODE(status.st_mode), status.st_mtime_ns, len(data), digest))
        progress(len(data))
    return Source(root, files, skipped)


def plan(files: Sequence[SourceFile], logs: int) -> list[SourceRecord]:
    """Return the records of a run, at least `RECORDS_PER_LOG_MIN` for each of `logs` logs; [] without files."""
    if not files:
        return []
    count = max(len(files), RECORDS_PER_LOG_MIN * logs)
    return [
        SourceRecord(number, number % logs, files[number % len(files)], number // len(files)) for number in range(count)
    ]


def content(file: SourceFile) -> bytes:
    """Return the file's bytes, read again; raise `SourceChanged` if it is not the file that was hashed."""
    try:
        with open(file.path, "rb") as stream:
            status = os.fstat(stream.fileno())
            data = stream.read()
    except OSError as error:
        raise SourceChanged(f"{file.path}: {error.strerror} (the source must not change during a run)") from error
    if len(data) != file.size or status.st_mtime_ns != file.mtime_ns:
        raise SourceChanged(f"{file.path} changed during the run; give a --source that holds still")
    return data


def log_name(number: int) -> str:
    """Return the name of the demo's log `number`."""
    return f"demo-{number:06d}"

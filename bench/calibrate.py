"""What this machine can do: the file system under a directory, the speed of fdatasync and of memory.

A figure without these numbers cannot be compared with another machine's. Called by the bench cases before a run.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from pathlib import Path

VOLATILE = frozenset({"tmpfs", "ramfs"})


def filesystem_of(path: Path, mounts: str | None = None) -> str:
    """Return the type of the file system that holds `path` (ext4, tmpfs ...); "unknown" where there is no
    /proc/mounts."""
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "unknown"
    place = str(path.resolve())
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), fields[2]
    return kind


def fdatasync_us(directory: Path, rounds: int = 64, size: int = 4096) -> float:
    """Return the median microseconds of a `size`-byte write and fdatasync into space written before."""
    block = os.urandom(size)
    times: list[float] = []
    with tempfile.TemporaryFile(dir=directory) as stream:
        handle = stream.fileno()
        os.pwrite(handle, bytes(size * rounds), 0)
        os.fsync(handle)
        for number in range(rounds):
            began = time.perf_counter()
            os.pwrite(handle, block, number * size)
            os.fdatasync(handle)
            times.append(time.perf_counter() - began)
    return sorted(times)[rounds // 2] * 1e6


def memcpy_mb_per_s(size: int = 16 << 20, rounds: int = 4) -> float:
    """Return the megabytes per second of a plain copy of `size` bytes, the best of `rounds`."""
    source, target = memoryview(bytes(size)), bytearray(size)
    best = 0.0
    for _ in range(rounds):
        began = time.perf_counter()
        target[:] = source
        best = max(best, size / (time.perf_counter() - began) / 1e6)
    return best


def describe_machine(directory: Path) -> dict[str, object]:
    """Return cores, Python, file system and the two speeds, for the report."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "filesystem": filesystem_of(directory),
        "fdatasync_us": round(fdatasync_us(directory), 1),
        "memcpy_mb_per_s": round(memcpy_mb_per_s()),
    }

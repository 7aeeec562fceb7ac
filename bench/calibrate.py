"""What this machine can do: the file system under a directory, the speed of fdatasync and of memory.

A figure without these numbers cannot be compared with another machine's. Called by the bench cases before a run.
"""

from __future__ import annotations

import os
import platform
import socket
import struct
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


def loop_millions_per_s(rounds: int = 500_000) -> float:
    """Return the millions of turns a second of a plain loop of this interpreter, the best of three."""
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        for _number in range(rounds):
            pass
        best = max(best, rounds / (time.perf_counter() - began) / 1e6)
    return best


def mixed_turn_ns(turns: int = 3000) -> float:
    """Return the nanoseconds of this thread's processor time that a turn of a loop takes which makes, packs and looks
    up small objects: what a run of interpreted code beside it is measured against."""
    pack, table = struct.Struct("<QQ").pack, {number: bytes(64) for number in range(256)}
    began = time.thread_time_ns()
    for turn in range(turns):
        table[turn & 255] = pack(turn, len(table[(turn * 7) & 255])) + table[(turn * 13) & 255][:48]
    return (time.thread_time_ns() - began) / turns


def disk_mb_per_s(directory: Path, size: int = 1 << 20, rounds: int = 32) -> float:
    """Return the megabytes per second into space never written before, with a sync after each `size` bytes."""
    block = os.urandom(size)
    with tempfile.TemporaryFile(dir=directory) as stream:
        handle = stream.fileno()
        began = time.perf_counter()
        for number in range(rounds):
            os.pwrite(handle, block, number * size)
            os.fdatasync(handle)
        return size * rounds / (time.perf_counter() - began) / 1e6


def loopback_us(rounds: int = 2000, size: int = 128) -> float:
    """Return the median microseconds that `size` bytes take there and back over loopback TCP, without a task switch."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            block, times = bytes(size), []
            for _ in range(rounds):
                began = time.perf_counter()
                for sender, receiver in ((near, far), (far, near)):
                    sender.sendall(block)
                    receiver.recv(size, socket.MSG_WAITALL)
                times.append(time.perf_counter() - began)
    return sorted(times)[rounds // 2] * 1e6


def describe_machine(directory: Path) -> dict[str, object]:
    """Return cores, Python, file system and the speeds of what a figure hangs on, for the report."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "filesystem": filesystem_of(directory),
        "fdatasync_us": round(fdatasync_us(directory), 1),
        "memcpy_mb_per_s": round(memcpy_mb_per_s()),
        "loop_millions_per_s": round(loop_millions_per_s(), 1),
        "disk_mb_per_s": round(disk_mb_per_s(directory)),
        "loopback_us": round(loopback_us(), 1),
        "load_average": round(os.getloadavg()[0], 2),
    }

"""Memory, processor time and written bytes of a node with all its child processes, read from /proc.

Called by the cases, and by the suite for rivals. Linux only: elsewhere the functions return 0, which the report shows
as missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CPUCLOCK_SCHED = 2


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command name; [] if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def family(pids: Iterable[int]) -> set[int]:
    """Return the processes and all their descendants."""
    parents: dict[int, int] = {}
    proc = Path("/proc")
    if proc.is_dir():
        for entry in proc.iterdir():
            if entry.name.isdigit():
                fields = stat_fields(int(entry.name))
                if fields:
                    parents[int(entry.name)] = int(fields[1])
    found = set(pids)
    grown = True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        grown = bool(more)
        found |= more
    return found


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a node, all its processes, in bytes."""
    total = 0
    for member in family([pid]):
        fields = stat_fields(member)
        if fields:
            total += int(fields[21]) * PAGE_BYTES
    return total


def peak_bytes(pid: int) -> int:
    """Return the most resident memory that one process ever had, in bytes."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM:"))


def command_line(pid: int) -> str:
    """Return the words with which a process was started, "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").replace("\0", " ")
    except OSError:
        return ""


def anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a node that is no file's, all its processes, in bytes."""
    total = 0
    for member in family([pid]):
        try:
            text = Path(f"/proc/{member}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Anonymous:"))
    return total


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a node so far, all its processes; of threads that ended, too."""
    total = 0.0
    for member in family([pid]):
        try:
            # What clock_getcpuclockid(3) gives: /proc counts in hundredths of a second, too coarse for an idle node.
            total += time.clock_gettime(~member << 3 | CPUCLOCK_SCHED)
        except OSError:
            continue
    return total


def wake_ups(pid: int) -> int:
    """Return how often threads of a node, all its processes, have slept so far (voluntary context switches): each is
    woken after it."""
    total = 0
    for member in family([pid]):
        for thread in Path(f"/proc/{member}/task").glob("*/status"):
            try:
                text = thread.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("voluntary_ctxt"))
    return total


def written_bytes(pid: int) -> int:
    """Return bytes that a node caused to be written to storage so far, all its processes (`write_bytes` of
    /proc/PID/io).

    Of processes that ended it counts those that their parent waited for: the kernel adds them to the parent's.
    """
    total = 0
    for member in family([pid]):
        try:
            text = Path(f"/proc/{member}/io").read_text(encoding="ascii")
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("write_bytes:"))
    return total


class Meter:
    """What all processes of a system use between its making and `figures`; none of them may end meanwhile."""

    __slots__ = ("began", "cpu_s", "pids", "written")

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = list(pids)
        self.began = time.monotonic()
        self.cpu_s = sum(map(cpu_seconds, self.pids))
        self.written = sum(map(written_bytes, self.pids))

    def figures(self, operations: int) -> dict[str, Any]:
        """Return the keys of a report, an operation's share where there was one."""
        cpu_s = sum(map(cpu_seconds, self.pids)) - self.cpu_s
        written = sum(map(written_bytes, self.pids)) - self.written
        return {
            "server_cpu_s": round(cpu_s, 3),
            "server_cpu_us_per_op": round(cpu_s * 1e6 / operations, 2) if operations else None,
            "written_bytes_per_op": round(written / operations, 1) if operations else None,
            "server_resident_bytes": sum(map(resident_bytes, self.pids)),
            "metered_s": round(time.monotonic() - self.began, 3),
        }

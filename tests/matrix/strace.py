"""Answers of the kernel that are errors, for chosen files of a running daemon: strace lets its calls fail."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

READS = "pread64,preadv,preadv2,read"
WRITES = "pwrite64,pwritev,pwritev2,write,writev"
SYNCS = "fsync,fdatasync"
ATTACH_S = 20.0
DETACH_S = 3.0


def words(calls: str, error: str, paths: Sequence[Path], output: Path) -> list[str]:
    """The command, up to what is to be traced."""
    chosen = [word for path in paths for word in ("-P", str(path))]
    inject = f"inject={calls}:error={error}"
    return ["strace", "-f", "-y", "-o", str(output), *chosen, "-e", f"trace={calls}", "-e", inject]


def count(output: Path) -> int:
    """Calls that failed by order."""
    return output.read_text("utf-8", "replace").count("(INJECTED)") if output.exists() else 0


class Failing:
    """A context in which these calls of these processes fail on these files. `hits` afterwards."""

    def __init__(self, pids: Sequence[int], calls: str, error: str, paths: Sequence[Path], output: Path) -> None:
        self.output = output
        output.unlink(missing_ok=True)
        attach = [word for pid in pids for word in ("-p", str(pid))]
        self._pids = pids
        self._command = [*words(calls, error, paths, output), *attach]
        self._process: subprocess.Popen[str] | None = None

    @property
    def hits(self) -> int:
        """Calls that failed until now."""
        return count(self.output)

    def __enter__(self) -> Failing:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        said = self._process.stderr
        assert said is not None
        missing = set(self._pids)
        deadline = time.monotonic() + ATTACH_S
        while missing and time.monotonic() < deadline and (line := said.readline()):
            if found := re.search(r"Process (\d+) attached", line):
                missing.discard(int(found[1]))
        assert not missing, f"strace did not attach to {missing}"
        # Its pipe must not fill up.
        threading.Thread(target=said.read, daemon=True).start()
        return self

    def __exit__(self, *found: object) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(DETACH_S)
        except subprocess.TimeoutExpired:
            # It can miss that a process of several threads has ended; the kernel lets go of what it held.
            self._process.kill()
            self._process.wait()

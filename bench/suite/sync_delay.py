"""A disk whose syncs take longer: a library that a node's loader puts before the C library, made when it is asked for.

Every fsync and fdatasync of a process waits before the real one, LMDB's too. Nothing of the product knows of it. Go
programs call the kernel themselves, so etcd and NATS cannot be slowed like this.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from .table import SuiteFailed

VARIABLE = "BENCH_SYNC_DELAY_US"
SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>

static void wait_first(void) {
    const char *told = getenv("BENCH_SYNC_DELAY_US");
    long us = told ? atol(told) : 0;
    struct timespec left = {us / 1000000, us % 1000000 * 1000};
    while (us && nanosleep(&left, &left)) {}
}

#define LATER(name) \\
    int name(int fd) { \\
        static int (*real)(int); \\
        if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, #name); \\
        wait_first(); \\
        return real(fd); \\
    }

LATER(fsync)
LATER(fdatasync)
"""


def delayed_environment(directory: Path, delay_ms: float) -> Mapping[str, str]:
    """Return the environment of processes whose syncs take so much longer; the library is made in `directory`."""
    if not delay_ms:
        return {}
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SuiteFailed("to delay syncs a C compiler is needed: apt-get install gcc libc6-dev")
    directory.mkdir(parents=True, exist_ok=True)
    source, library = directory / "sync_delay.c", directory / "sync_delay.so"
    source.write_text(SOURCE, encoding="utf-8")
    done = subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SuiteFailed(f"the library that delays syncs was not made: {done.stderr.strip()[:300]}")
    return {"LD_PRELOAD": str(library.resolve()), VARIABLE: str(int(delay_ms * 1000))}

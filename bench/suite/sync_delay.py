"""A disk whose syncs take longer: a library that a node's loader puts before the C library, made when it is asked for.

Every fsync and fdatasync of a process waits before the real one, LMDB's too, and so does each pwrite to a file that was
opened with O_DSYNC, which is how LMDB writes its meta page. Nothing of the product knows of it. Go programs call the
kernel themselves, so etcd and NATS cannot be slowed like this; of the others nobody has looked whether they sync in one
of these ways, so ours run alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..preload import NoCompiler, preloaded
from .table import SuiteFailed

VARIABLE = "BENCH_SYNC_DELAY_US"
SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/types.h>
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

#define LATER_IF_SYNCHRONOUS(name, offset) \\
    ssize_t name(int fd, const void *bytes, size_t size, offset at) { \\
        static ssize_t (*real)(int, const void *, size_t, offset); \\
        if (!real) real = (ssize_t (*)(int, const void *, size_t, offset))dlsym(RTLD_NEXT, #name); \\
        if (fcntl(fd, F_GETFL) & O_DSYNC) wait_first(); \\
        return real(fd, bytes, size, at); \\
    }

LATER_IF_SYNCHRONOUS(pwrite, off_t)
LATER_IF_SYNCHRONOUS(pwrite64, off64_t)
"""


def delayed_environment(directory: Path, delay_ms: float) -> Mapping[str, str]:
    """Return the environment of processes whose syncs take so much longer; the library is made in `directory`."""
    if not delay_ms:
        return {}
    try:
        library = preloaded(directory, "sync_delay", SOURCE)
    except NoCompiler as error:
        raise SuiteFailed(str(error)) from error
    return {"LD_PRELOAD": library, VARIABLE: str(int(delay_ms * 1000))}

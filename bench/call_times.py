"""A library that notes when each system call on the way of an append begins and ends, in every process of a run.

It stands before the C library (`LD_PRELOAD`), as `suite.sync_delay` does, and is made when it is asked for. Each
process writes one file of fixed records into a directory; the clock is that of the machine, so the files of a run fit
together. A note costs about 0.1 us. Called by `waterfall`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from .preload import preloaded

VARIABLE = "BENCH_CALL_TIMES"
KINDS = ("epoll_wait", "epoll_ctl", "receive", "send", "write", "sync", "usage", "switches")
"""What a record tells of. Of `usage`, `begin` and `end` are the process's seconds so far in user and in kernel space,
of `switches` its voluntary and involuntary switches."""
HEAD = struct.Struct("<Q504s")
"""Records that were begun, the command line."""
RECORD = struct.Struct("<QQiHHHHI")
"""begin, end (ns), result, kind, local port, the other's port, 0, thread."""
RECORDS_MAX = 1 << 21
SOURCE = """
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MOST (1 << 21)
#define FILES 65536
enum { WAIT, CONTROL, RECEIVE, SEND, WRITE, SYNC, USAGE, SWITCHES };
struct record { uint64_t begin, end; int32_t result; uint16_t kind, local, remote, none; uint32_t thread; };
struct head { uint64_t count; char command[504]; };

static struct head *head;
static struct record *records;
static uint32_t ports[FILES];
static __thread uint32_t thread;
static __thread unsigned waits;

__attribute__((constructor)) static void begin(void) {
    const char *directory = getenv("BENCH_CALL_TIMES");
    char path[4096];
    if (!directory) return;
    snprintf(path, sizeof path, "%s/%d.calls", directory, (int)getpid());
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    size_t size = sizeof(struct head) + (size_t)MOST * sizeof(struct record);
    if (file < 0 || ftruncate(file, size)) return;
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (map == MAP_FAILED) return;
    struct head *found = map;
    int told = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    if (told >= 0) { (void)!read(told, found->command, sizeof found->command - 1); close(told); }
    records = (struct record *)(found + 1);
    head = found;
}

static inline uint64_t now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + at.tv_nsec;
}

static uint16_t port(struct sockaddr_storage *at) {
    if (at->ss_family == AF_INET) return ntohs(((struct sockaddr_in *)at)->sin_port);
    return at->ss_family == AF_INET6 ? ntohs(((struct sockaddr_in6 *)at)->sin6_port) : 0;
}

static uint32_t ends(int file) {
    struct sockaddr_storage one, other;
    socklen_t size = sizeof one, length = sizeof other;
    if (file < 0 || file >= FILES) return 0;
    if (!ports[file]) {
        if (getsockname(file, (void *)&one, &size) || getpeername(file, (void *)&other, &length)) return 0;
        ports[file] = (uint32_t)port(&one) << 16 | port(&other);
    }
    return ports[file];
}

static void put(uint64_t from, uint64_t to, long result, int kind, uint32_t both) {
    uint64_t at = __atomic_fetch_add(&head->count, 1, __ATOMIC_RELAXED);
    if (at >= MOST) return;
    if (!thread) thread = syscall(SYS_gettid);
    records[at] = (struct record){from, to, result, kind, both >> 16, both & 65535, 0, thread};
}

#define REAL(type, name, ...) \\
    static type (*real)(__VA_ARGS__); \\
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name);
#define NOTED(kind, file, call) \\
    if (!head) return call; \\
    uint64_t from = now(); \\
    long result = call; \\
    int said = errno; \\
    put(from, now(), result, kind, file < 0 ? 0 : ends(file)); \\
    errno = said; \\
    return result;

int epoll_wait(int file, struct epoll_event *events, int most, int timeout) {
    REAL(int, "epoll_wait", int, struct epoll_event *, int, int)
    if (head && waits++ % 256 == 0) {
        struct rusage used;
        getrusage(RUSAGE_SELF, &used);
        put(used.ru_utime.tv_sec * 1000000000ull + used.ru_utime.tv_usec * 1000ull,
            used.ru_stime.tv_sec * 1000000000ull + used.ru_stime.tv_usec * 1000ull, now() / 1000000, USAGE, 0);
        put(used.ru_nvcsw, used.ru_nivcsw, now() / 1000000, SWITCHES, 0);
    }
    NOTED(WAIT, -1, real(file, events, most, timeout))
}
int epoll_ctl(int file, int what, int of, struct epoll_event *event) {
    REAL(int, "epoll_ctl", int, int, int, struct epoll_event *)
    NOTED(CONTROL, -1, real(file, what, of, event))
}
ssize_t recv(int file, void *into, size_t size, int flags) {
    REAL(ssize_t, "recv", int, void *, size_t, int)
    NOTED(RECEIVE, file, real(file, into, size, flags))
}
ssize_t readv(int file, const struct iovec *into, int count) {
    REAL(ssize_t, "readv", int, const struct iovec *, int)
    NOTED(RECEIVE, file, real(file, into, count))
}
ssize_t send(int file, const void *from_, size_t size, int flags) {
    REAL(ssize_t, "send", int, const void *, size_t, int)
    NOTED(SEND, file, real(file, from_, size, flags))
}
ssize_t sendmsg(int file, const struct msghdr *message, int flags) {
    REAL(ssize_t, "sendmsg", int, const struct msghdr *, int)
    NOTED(SEND, file, real(file, message, flags))
}
ssize_t pwritev(int file, const struct iovec *of, int count, off_t at) {
    REAL(ssize_t, "pwritev", int, const struct iovec *, int, off_t)
    NOTED(WRITE, -1, real(file, of, count, at))
}
ssize_t pwritev64(int file, const struct iovec *of, int count, off64_t at) {
    REAL(ssize_t, "pwritev64", int, const struct iovec *, int, off64_t)
    NOTED(WRITE, -1, real(file, of, count, at))
}
ssize_t pwritev64v2(int file, const struct iovec *of, int count, off64_t at, int flags) {
    REAL(ssize_t, "pwritev64v2", int, const struct iovec *, int, off64_t, int)
    NOTED(WRITE, -1, real(file, of, count, at, flags))
}
int fdatasync(int file) {
    REAL(int, "fdatasync", int)
    NOTED(SYNC, -1, real(file))
}
int close(int file) {
    REAL(int, "close", int)
    if (file >= 0 && file < FILES) ports[file] = 0;
    return real(file);
}
"""


class Call(NamedTuple):
    """One record: nanoseconds, what came of it, and between which ports (0: no TCP connection)."""

    begin: int
    end: int
    result: int
    kind: str
    local: int
    remote: int
    thread: int


class Traced(NamedTuple):
    """One process: its command line, and its calls in the order in which they began."""

    pid: int
    command: str
    calls: list[Call]


def tracing_environment(directory: Path) -> Mapping[str, str]:
    """Return the environment of processes whose calls are noted in `directory`; the library is made there. Raises
    `NoCompiler`."""
    return {"LD_PRELOAD": preloaded(directory, "call_times", SOURCE), VARIABLE: str(directory.resolve())}


def traced(directory: Path) -> Iterator[Traced]:
    """Yield what each process noted."""
    for path in sorted(directory.glob("*.calls")):
        with path.open("rb") as file:
            count, command = HEAD.unpack(file.read(HEAD.size))
            data = file.read(min(count, RECORDS_MAX) * RECORD.size)
        calls = [
            Call(begin, end, result, KINDS[kind], local, remote, thread)
            for begin, end, result, kind, local, remote, _, thread in RECORD.iter_unpack(data)
        ]
        words = command.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        yield Traced(int(path.stem), words, sorted(calls, key=lambda call: call.begin))

"""The lock of a data directory: one node process, and at most one writer process that it started.

Invariant: the lock belongs to an open file, so a writer that inherits the descriptor keeps the directory locked while
it lives, also as an orphan. The process ids in the file are for messages, and for waiting for an orphan's end. Called
by recovery (through `disk`), the writer process and `logyard check`.
"""

from __future__ import annotations

import fcntl
import os
import select
import time

from logyard.protocol.errors import DirectoryInUse

LOCK = "lock"
WRITER_LOCK = "writer-lock"
"""Held by the writer process alone, besides its share of the directory's lock: so there is never a second one."""
ORPHAN_WAIT_S = 10.0
"""How long a start waits for the writer of a node that died: it ends with the transaction it is in."""
_LOOK_S = 0.01
_PID = 16
"""Bytes of a process id in a lock file: the owner's, then its writer's."""
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def lock_directory(path: str, orphan_wait_s: float = ORPHAN_WAIT_S) -> int:
    """Take the lock of a data directory; the descriptor holds it until it and every inherited copy are closed.
    BLOCKING while the writer of a node that died has it, up to `orphan_wait_s`. Raises `DirectoryInUse`."""
    fd = os.open(os.path.join(path, LOCK), _OPEN, 0o600)
    try:
        if not _try_lock(fd) and not _left_by_orphan(fd, orphan_wait_s):
            raise DirectoryInUse(in_use(path, fd), path=path)
        os.ftruncate(fd, 0)
        os.pwrite(fd, _line(os.getpid()), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def lock_writer(path: str, lock_fd: int) -> int:
    """Become the writer process of a data directory, whose lock this process inherited as `lock_fd`; return the
    descriptor of the second lock. Raises `DirectoryInUse` for anybody else, and beside another writer."""
    try:
        ours = os.path.samestat(os.fstat(lock_fd), os.stat(os.path.join(path, LOCK)))
    except OSError as error:
        raise DirectoryInUse(f"{path}: only its node starts a writer ({error.strerror})", path=path) from error
    # Shared by inheritance, so that taking it again changes nothing; from another open file it is refused.
    if not ours or not _try_lock(lock_fd):
        raise DirectoryInUse(f"{path}: only its node starts a writer", path=path)
    fd = os.open(os.path.join(path, WRITER_LOCK), _OPEN, 0o600)
    if not _try_lock(fd):
        os.close(fd)
        raise DirectoryInUse(f"{path} has a writer already, process {lock_holders(lock_fd)[1]}", path=path)
    os.pwrite(lock_fd, _line(os.getpid()), _PID)
    return fd


def lock_holders(fd: int) -> tuple[int, int]:
    """Return (process that took a directory's lock, its writer process), 0 for none or unknown; `fd` is of the lock
    file."""
    text = os.pread(fd, 2 * _PID, 0)
    owner, writer = (text[at : at + _PID].strip(b" \n\0") for at in (0, _PID))
    return int(owner) if owner.isdigit() else 0, int(writer) if writer.isdigit() else 0


def in_use(path: str, fd: int) -> str:
    """Return who has a directory, and what to do about it, for a message."""
    owner, writer = lock_holders(fd)
    if owner and _wait_end(owner, 0):
        named = f"process {writer}, " if writer and not _wait_end(writer, 0) else ""
        return f"{path} is in use by {named}the writer of a node that died; it ends by itself: try again"
    return f"{path} is in use by process {owner or 'unknown'}; stop it first"


def _line(process: int) -> bytes:
    return b"%-15d\n" % process


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _left_by_orphan(fd: int, seconds: float) -> bool:
    """Take the lock that the writer of a node that died still has, within `seconds`; return False when it is somebody
    else's. A writer has it from its first moment and says who it is a little later: until then the lock itself is
    looked at."""
    owner, _ = lock_holders(fd)
    if not owner or not _wait_end(owner, 0):
        return False
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        _, writer = lock_holders(fd)
        if not writer or _wait_end(writer, left):
            select.poll().poll(_LOOK_S * 1000)
        if _try_lock(fd):
            return True
    return False


def _wait_end(process: int, seconds: float) -> bool:
    """Return whether a process has ended, or does within `seconds`. One that nobody has waited for has ended, too."""
    try:
        fd = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # Not ours to watch: take it for alive.
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(fd)

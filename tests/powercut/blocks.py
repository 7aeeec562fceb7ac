"""A disk whose single blocks fail: an image file served by FUSE, which answers for chosen bytes with EIO.

``python -m tests.powercut.blocks BACKING MOUNT ORDERS`` serves BACKING as the one file MOUNT/image until it is
unmounted. ORDERS (JSON: ``read`` and ``write``, lists of [first byte, end]) is read before every request; the hits are
counted in ORDERS.hits. Needs root, /dev/fuse, the package mfusepy and libfuse 2 (``FUSE_LIBRARY_PATH`` names one that
is not installed).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import fcntl
import importlib.util
import json
import os
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

FIEMAP = 0xC020660B
HEAD = struct.Struct("=QQIIII")
EXTENT = struct.Struct("=QQQQQIIII")
EXTENTS = 64
SYNC = 1
NAME = "image"
MOUNT_S = 20.0


def reason_against() -> str:
    """Why it can't be run here; empty where it can."""
    if os.geteuid() != 0:
        return "needs root"
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse"
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed (the extra `fuse`)"
    library = os.environ.get("FUSE_LIBRARY_PATH") or ctypes.util.find_library("fuse")
    try:
        ctypes.CDLL(library or "libfuse.so.2")
    except OSError:
        return "there is no libfuse 2 (FUSE_LIBRARY_PATH)"
    return ""


class BadBlocks:
    """The disk, from the outside. Use as a context; `file` is what to mount by a loop device."""

    def __init__(self, directory: Path, size: int) -> None:
        self.backing, self.path = directory / "backing", directory / "disk"
        self.orders = directory / "orders"
        self.size = size
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def file(self) -> Path:
        """The image."""
        return self.path / NAME

    def __enter__(self) -> BadBlocks:
        self.path.mkdir()
        with self.backing.open("wb") as file:
            file.truncate(self.size)
        self.order()
        words = [sys.executable, "-m", "tests.powercut.blocks", str(self.backing), str(self.path), str(self.orders)]
        self.process = subprocess.Popen(words)
        deadline = time.monotonic() + MOUNT_S
        while not self.file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise OSError("the FUSE file system did not come up")
            threading.Event().wait(0.02)
        return self

    def __exit__(self, *found: object) -> None:
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True)
        assert self.process is not None
        try:
            self.process.wait(MOUNT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def order(self, **ranges: list[tuple[int, int]]) -> None:
        """Which bytes fail from now on: `read`, `write`. All others are sound again."""
        written = self.orders.with_suffix(".new")
        written.write_text(json.dumps(ranges), "ascii")
        os.replace(written, self.orders)

    @property
    def hits(self) -> int:
        """Requests that failed so far."""
        path = self.orders.with_suffix(".hits")
        return path.stat().st_size if path.exists() else 0


def extents(path: Path) -> list[tuple[int, int]]:
    """Where a file's bytes lie on its device: (first byte, end) of each piece."""
    fd = os.open(path, os.O_RDONLY)
    try:
        asked = bytearray(HEAD.pack(0, (1 << 64) - 1, SYNC, 0, EXTENTS, 0) + bytes(EXTENT.size * EXTENTS))
        fcntl.ioctl(fd, FIEMAP, asked)
    finally:
        os.close(fd)
    count = HEAD.unpack_from(asked)[3]
    rows = [EXTENT.unpack_from(asked, HEAD.size + number * EXTENT.size) for number in range(count)]
    return [(row[1], row[1] + row[2]) for row in rows]


class Served:
    """The file system of one file; the methods are FUSE's."""

    def __init__(self, backing: str, orders: str) -> None:
        self.fd = os.open(backing, os.O_RDWR)
        self.orders = orders
        self.hits = os.open(str(Path(orders).with_suffix(".hits")), os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def check(self, kind: str, offset: int, length: int) -> None:
        """Raises EIO where a request meets bytes that fail."""
        with open(self.orders, encoding="ascii") as found:
            ranges = json.load(found).get(kind, ())
        if any(first < offset + length and offset < end for first, end in ranges):
            os.write(self.hits, b".")
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def getattr(self, path: str, handle: int | None = None) -> dict[str, int]:
        """A directory and its file."""
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if path != f"/{NAME}":
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": os.fstat(self.fd).st_size}

    def readdir(self, path: str, handle: int) -> list[str]:
        """The one name."""
        return [".", "..", NAME]

    def open(self, path: str, flags: int) -> int:
        """There is one file."""
        return self.fd

    def read(self, path: str, size: int, offset: int, handle: int) -> bytes:
        """Bytes, or EIO."""
        self.check("read", offset, size)
        return os.pread(self.fd, size, offset)

    def write(self, path: str, data: bytes, offset: int, handle: int) -> int:
        """The same."""
        self.check("write", offset, len(data))
        return os.pwrite(self.fd, data, offset)

    def fsync(self, path: str, datasync: int, handle: int) -> int:
        """What was written is there: this disk loses nothing by itself."""
        return 0


def main(backing: str, mount: str, orders: str) -> None:
    """Serve."""
    import mfusepy

    class Operations(Served, mfusepy.Operations):  # type: ignore[misc,unused-ignore]
        use_ns = True

    mfusepy.FUSE(
        Operations(backing, orders), mount, foreground=True, nothreads=True, direct_io=True, raw_fi=False,
        big_writes=True,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A file system in an image file, mounted by a loop device, that can be shut down as if the power had gone: by root."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

SHUTDOWN = 0x8004587D
"""FS_IOC_SHUTDOWN; ext4 and xfs have it under the same number."""
NO_LOG_FLUSH = 2
MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
}


def reason_against(kind: str) -> str:
    """Why power cuts of that file system can't be tried here; empty where they can."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which(MAKE[kind][0]) is None:
        return f"there is no {MAKE[kind][0]}"
    if not os.path.exists("/dev/loop-control"):
        return "there are no loop devices"
    if kind not in Path("/proc/filesystems").read_text("ascii"):
        return f"the kernel does not know {kind}"
    return ""


def command(*words: str) -> None:
    """Run a program; its words are the error."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


class Image:
    """One file system. `path` is where it is mounted. Use as a context."""

    def __init__(self, directory: Path, kind: str, size: int) -> None:
        self.kind = kind
        self.file = directory / f"{kind}.image"
        self.path = directory / f"{kind}.mounted"
        self.size = size

    def __enter__(self) -> Image:
        self.path.mkdir(exist_ok=True)
        with self.file.open("wb") as file:
            file.truncate(self.size)
        command(*MAKE[self.kind], str(self.file))
        self.mount()
        return self

    def __exit__(self, *found: object) -> None:
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True)
        self.file.unlink()

    def mount(self) -> None:
        """Mount it: the file system's own recovery runs."""
        command("mount", "-o", "loop", str(self.file), str(self.path))

    def cut(self) -> None:
        """From now on nothing reaches the device, not even the journal. What runs on it gets errors."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def remount(self) -> None:
        """After a cut, when nobody has it open any more."""
        command("umount", str(self.path))
        self.mount()

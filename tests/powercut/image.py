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


LEAST = {"ext4": 0, "xfs": 320 << 20}
"""What mkfs insists on; what is too much for a full image is taken by a file."""


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


def attach(file: Path) -> str:
    """Return a loop device for an image. One request of it is one of the FUSE file system that serves the image: the
    kernel's loop device calls a write good of which only the first part could be done."""
    done = subprocess.run(["losetup", "--find", "--show", str(file)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"losetup: {done.stderr.strip()}")
    device = done.stdout.strip()
    Path(f"/sys/block/{Path(device).name}/queue/max_sectors_kb").write_text("128", "ascii")
    return device


class Image:
    """One file system. `path` is where it is mounted, `file` another image than its own. Use as a context."""

    def __init__(self, directory: Path, kind: str, size: int, file: Path | None = None) -> None:
        self.kind = kind
        self.file = file or directory / f"{kind}.image"
        self.own = file is None
        self.path = directory / f"{kind}.mounted"
        self.size = max(size, LEAST[kind])

    def __enter__(self) -> Image:
        self.path.mkdir(exist_ok=True)
        if self.own:
            with self.file.open("wb") as file:
                file.truncate(self.size)
        command(*MAKE[self.kind], str(self.file))
        self.mount()
        return self

    def shrink(self, free: int) -> None:
        """Leave about so many bytes."""
        found = os.statvfs(self.path)
        fd = os.open(self.path / "taken", os.O_CREAT | os.O_WRONLY)
        try:
            os.posix_fallocate(fd, 0, max(1, found.f_bavail * found.f_frsize - free))
        finally:
            os.close(fd)

    def __exit__(self, *found: object) -> None:
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True)
        if self.own:
            self.file.unlink()

    def mount(self) -> None:
        """Mount it: the file system's own recovery runs."""
        device = attach(self.file)
        try:
            command("mount", device, str(self.path))
        finally:
            # It goes when it is not mounted any more.
            command("losetup", "--detach", device)

    def cut(self) -> None:
        """From now on nothing reaches the device, not even the journal. What runs on it gets errors."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def unmount(self) -> None:
        """Everything is written, as far as it can be."""
        command("umount", str(self.path))

    def remount(self) -> None:
        """After a cut, when nobody has it open any more."""
        self.unmount()
        self.mount()

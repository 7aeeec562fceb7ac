"""What the disk makes durable, seen at the system calls: the twins of the simulator and of the crash rig stand in
for whole methods, so what those do inside is seen nowhere else."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from logyard.engine.disk import door
from logyard.engine.disk.door import SYNC_EVERY, Disk


class Calls:
    """The names and files of what is asked of the system, in order; `failing` is refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.seen: list[tuple[str, str]] = []
        self.failing = ""
        for name in names:
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, real: object) -> object:
        def call(target: int | str, *more: object, **options: object) -> object:
            self.seen.append((name, os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)))
            if name == self.failing:
                raise OSError(errno.EIO, "injected")
            return real(target, *more, **options)  # type: ignore[operator]

        return call


def test_pages_are_let_go_only_after_they_were_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sync the pages that the last process could not write would stay, and be believed."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    calls = Calls(monkeypatch, "fdatasync", "posix_fadvise")
    Disk().revalidate(str(path))
    assert calls.seen == [("fdatasync", str(path)), ("posix_fadvise", str(path))]
    calls.seen.clear()
    calls.failing = "fdatasync"
    with pytest.raises(OSError, match="injected"):
        Disk().revalidate(str(path))
    assert calls.seen == [("fdatasync", str(path))], "what may not be on the disk stays in memory"


def test_a_new_directorys_name_is_durable_in_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, "mkdir", "fsync")
    made = tmp_path / "made"
    Disk().make_directory(str(made))
    assert calls.seen == [("mkdir", str(made)), ("fsync", str(tmp_path))] and made.stat().st_mode & 0o777 == 0o700
    calls.seen.clear()
    Disk().make_directory(str(made))
    assert calls.seen == [("mkdir", str(made))], "it was durable when it was made"
    monkeypatch.chdir(tmp_path)
    calls.seen.clear()
    Disk().make_directory("relative")
    assert calls.seen == [("mkdir", "relative"), ("fsync", str(tmp_path))]
    calls.failing = "fsync"
    with pytest.raises(OSError, match="injected"):
        Disk().make_directory(str(tmp_path / "other"))


def test_each_sync_of_a_file_is_one_of_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, "fdatasync", "fsync")
    disk, path = Disk(), str(tmp_path / "file")
    fd = disk.create(path)
    disk.datasync(fd)
    disk.sync_file(fd)
    assert calls.seen == [("fdatasync", path), ("fsync", path)] and disk.fdatasyncs == 1
    disk.close(fd)


def test_zeros_are_synced_on_the_way_and_before_their_pages_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "STEP", 4096)
    calls = Calls(monkeypatch, "fdatasync", "posix_fadvise")
    disk = Disk()
    fd = disk.create(str(tmp_path / "file"))
    disk.preallocate(fd, 4096 * (2 * SYNC_EVERY + 1))
    assert [name for name, _ in calls.seen] == ["fdatasync"] * 3 + ["posix_fadvise"]
    disk.close(fd)
